"""What was asked of the CUDA kernels before they were measured, and whether it is so.

What was asked and not measured, for want of time or by an error, does not hold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Gate = tuple[str, bool]


def of_correct(row: Row) -> Iterator[Gate]:
    """Near float64, and the same again."""
    if "case" in row:
        right = row["error"] < row["tolerance"] and row["same_again"]
        yield f"decode attention is right: {row['case']}", right
    if "operator" in row:
        yield f"it is right: {row['operator']}", row["right"]


def of_compile(row: Row) -> Iterator[Gate]:
    """No register goes to memory; the compiler must report it."""
    if "kernel" in row:
        yield f"{row['kernel']} {row['defines']} spills nothing", row["spilled"] == 0


def of_adam(row: Row) -> Iterator[Gate]:
    """Near the time that its bytes take, and well under that of several passes."""
    if "ours" in row:
        name = f"AdamW, {row['vectors']}: "
        yield name + "at most 1.20 x its floor", row["ours"] <= 1.2 * row["floor"]
        yield name + "at most 0.8 x PyTorch's", row["ours"] <= 0.8 * row["pytorch"]


def of_decode(row: Row) -> Iterator[Gate]:
    """Near the time that keys and values take, where there are many."""
    if row.get("batch") == 64 and row["length"] >= 512 and row["num_splits"] is None:
        name = f"decode attention, {row['model']}, 64 x {row['length']}: "
        yield name + "at least 0.75 of a copy", row["share"] >= 0.75
        # None: more than the GPU's memory.
        theirs = [row[way] for way in ("masked", "live") if row[way] is not None]
        yield name + "not slower than PyTorch's", bool(theirs) and row["ours"] <= min(theirs)


def of_small(row: Row) -> Iterator[Gate]:
    """One launch is not slower than the several that it stands for."""
    if "ours" in row:
        yield f"not slower than PyTorch: {row['what']}", row["ours"] <= row["pytorch"]


def of_loop(row: Row) -> Iterator[Gate]:
    """Near the time that weights, keys and values take."""
    if row.get("system") == "kernel":
        near = row["seconds_per_token"] <= 1.35 * row["floor"]
        yield "a token of OPT-1.3B at most 1.35 x its floor", near


GATES: Mapping[str, Callable[[Row], Iterator[Gate]]] = {
    "correct": of_correct,
    "compile": of_compile,
    "adam": of_adam,
    "decode": of_decode,
    "small": of_small,
    "loop": of_loop,
}
UNTIMED = ("correct",)
"""Phases whose gates mean something without a GPU."""


def gates(rows: Sequence[Row], *, timed: bool = True) -> Iterator[Gate]:
    """All of them, of a GPU only if `timed`; each phase that was asked for has one at least."""
    phases = [phase for row in rows for phase in row.get("phases", ())]
    missing = [phase for phase in phases if phase in GATES and (timed or phase in UNTIMED)]
    for row in rows:
        for gate in _of_row(row, timed=timed):
            missing = [phase for phase in missing if phase != row["phase"]]
            yield gate
    for phase in missing:
        yield f"{phase}: nothing was evaluated", False


def _of_row(row: Row, *, timed: bool) -> Iterator[Gate]:
    phase = row["phase"]
    if "failed" in row:
        yield f"the phase {phase} ends without an error: {row['failed']}", False
    elif phase in GATES and (timed or phase in UNTIMED):
        if "left_off" in row:
            yield f"{phase}: {row['left_off']} cases were not evaluated, time was over", False
        else:
            yield from GATES[phase](row)


def report(rows: Sequence[Row], *, timed: bool) -> bool:
    """Print what was measured and the gates; whether all hold."""
    for phase in ("environment", "ceilings", "adam", "decode", "small", "loop"):
        print(f"\n## {phase}\n")
        for row in rows:
            if row["phase"] == phase:
                cells = (f"{key} {_shown(value)}" for key, value in row.items() if key != "phase")
                print(f"| {' | '.join(cells)} |")
    results = list(gates(rows, timed=timed))
    failed = [name for name, holds in results if not holds]
    print(f"\n{len(results) - len(failed)} of {len(results)} gates hold")
    for name in failed:
        print(f"FAILS: {name}")
    if not timed:
        print("Under the emulator times and registers say nothing, and have no gates.")
    return not failed


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
