"""Rows shared out: which are held out for evaluation, which step trains on which of the others.

Both are decided prompt by prompt (`parts`), for anything that stands for a row: its texts, or a
document of a token file. What earlier steps trained on or held out, in whichever way their rows
were chosen, is kept apart as well (`prompt_record`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pipeline.config import DataConfig, RowShare, RowUse
from pipeline.data.parts import assign_steps, held_out_prompts
from pipeline.data.prompt_hash import draw
from pipeline.data.prompt_record import PromptRecord, as_hashes, contained
from pipeline.data.row_uses import NEEDS
from pipeline.errors import DataError

MANY_HELD_OUT = 2048
"""Rows held out above which a note says that fewer would do."""


class SharedRow(Protocol):
    """What stands for a row."""

    @property
    def prompt(self) -> int:
        """The hash of its prompt: rows of one prompt stay together."""
        ...

    @property
    def key(self) -> int:
        """The hash of its texts: rows of one prompt come in its order."""
        ...

    @property
    def whole_prompt(self) -> object:
        """What is the same for the same dialogue up to the response."""
        ...

    @property
    def origin(self) -> str:
        """Where it was read, for messages."""
        ...

    @property
    def has(self) -> str:
        """What there is of prompt and responses, for messages."""
        ...

    def is_usable(self, use: RowUse) -> bool:
        """Whether the row has what that use needs."""
        ...


R = TypeVar("R", bound=SharedRow)


@dataclass(frozen=True)
class SharedPath(Generic[R]):
    """The rows of one data path."""

    name: str

    weight: float | None
    """Its share of the mixture; None where none was given."""

    train: Sequence[R]

    eval: Sequence[R]
    """Of its test split; empty where it has none."""


@dataclass(frozen=True)
class Shared(Generic[R]):
    """The rows of one step."""

    train: list[R]
    eval: list[R]

    prompts: PromptRecord
    """What this step and the earlier ones train on and hold out."""

    held_out_prompts: list[R]
    """Of a step with a share of its own: the held-out rows as step 3 has them, in its order."""


def share_out(
    paths: Sequence[SharedPath[R]],
    evaluation: Sequence[SharedPath[R]],
    config: DataConfig,
    earlier: PromptRecord,
    uses: Mapping[int, RowUse],
    notes: list[str],
    *,
    step: int,
    share: RowShare | None = None,
) -> Shared[R]:
    """The rows that `step` trains on and is evaluated on; `notes` receives what was left out.

    Args:
        paths: of the training rows, each row an object of its own.
        evaluation: those of `eval_path`; none holds out rows of `paths`.
        config: how rows are shared out.
        earlier: the prompts of the steps before.
        uses: what each step reads of a row, by its number.
        notes: for the log.
        step: its number.
        share: which rows the step takes, where it is not those of its number and kind.

    Raises:
        DataError: the step is left without usable rows.
    """
    part = share or RowShare(uses[step], (step,))
    rows = _mix(paths, config, notes)
    if evaluation:
        held_out = [row for given in evaluation for row in given.eval or given.train]
    else:
        uncut = [path.name for path in paths if not path.eval]
        held_out = [row for path in paths for row in path.eval]
        held_out += _cut_eval([row for name in uncut for row in rows[name]], config, notes)
    train = _without_held_out(
        [row for rows_of_path in rows.values() for row in rows_of_path],
        {row.prompt for row in held_out},
        {id(row) for row in held_out},
        notes,
    )
    held_out, train = _apart(held_out, train, earlier, notes)
    mine = _share(train, config, step, part, uses, notes)
    evaluated = _eval_rows(held_out, config, step, part.use, notes)
    _note_repeated([row.prompt for row in mine], earlier, notes)
    prompts = [] if share is None else _eval_rows(held_out, config, step, "prompts", [])
    own = PromptRecord(as_hashes(row.prompt for row in mine), as_hashes(r.prompt for r in held_out))
    return Shared(mine, evaluated, earlier | own, prompts)


def _mix(
    paths: Sequence[SharedPath[R]], config: DataConfig, notes: list[str]
) -> dict[str, list[R]]:
    """The training rows of all paths, by path; with weights, each path's share is its weight's.

    No row is repeated: the path that is shortest for its weight is used whole, and of the others
    the prompts with the smallest draws. A path without a weight among others with one weighs 1.
    """
    rows = {path.name: list(path.train) for path in paths}
    if all(path.weight is None for path in paths):
        return rows
    weights = {path.name: 1.0 if path.weight is None else path.weight for path in paths}
    unit = min(len(rows[name]) / weight for name, weight in weights.items())
    for name, weight in weights.items():
        count = min(len(rows[name]), max(1, round(unit * weight)))
        if count < len(rows[name]):
            notes.append(f"{name}: {count} of {_rows(len(rows[name]))}, as its weight says")
            rows[name] = _in_drawn_order(rows[name], config, "mixture")[:count]
    return rows


def _in_drawn_order(rows: Sequence[R], config: DataConfig, purpose: str) -> list[R]:
    """The rows in an order that does not depend on the one they come in."""
    draws: dict[int, float] = {}
    for row in rows:
        if row.prompt not in draws:
            draws[row.prompt] = draw(row.prompt, seed=config.seed, purpose=purpose)

    return sorted(rows, key=lambda row: (draws[row.prompt], row.key))


def _cut_eval(rows: Sequence[R], config: DataConfig, notes: list[str]) -> list[R]:
    """The rows of the prompts that are held out, of paths without a test split.

    `max_eval_rows` plays no part: it may differ from step to step, and a row that one step
    evaluates must not be trained on by another.
    """
    if not rows:
        return []
    prompts = {row.prompt for row in rows}
    if len(prompts) == 1:
        raise DataError(
            f"{rows[0].origin} and all rows with it share one prompt, so none can be held"
            " out for evaluation; give more rows, or --eval-path"
        )
    chosen = held_out_prompts(prompts, fraction=config.eval_fraction, seed=config.seed)
    held_out = [row for row in rows if row.prompt in chosen]
    if len(held_out) > max(MANY_HELD_OUT, config.max_eval_rows):
        notes.append(
            f"holds out {_rows(len(held_out))} of {len(rows)}, of which at most"
            f" {config.max_eval_rows} are evaluated; a data.eval_fraction below"
            f" {config.eval_fraction:g}, the same for all steps, trains on more"
        )
    return held_out


def _without_held_out(
    rows: Sequence[R], prompts: Collection[int], cut_here: Collection[int], notes: list[str]
) -> list[R]:
    """The training rows whose prompt is not evaluated on."""
    kept = [row for row in rows if row.prompt not in prompts]
    shared = sum(row.prompt in prompts and id(row) not in cut_here for row in rows)
    if shared:
        notes.append(f"left out {_rows(shared)} whose prompt is in the evaluation rows")
    if not kept:
        raise DataError(
            "every training row's prompt is in the evaluation rows as well; give other --eval-path"
        )
    return kept


def _apart(
    held_out: Sequence[R], train: Sequence[R], earlier: PromptRecord, notes: list[str]
) -> tuple[list[R], list[R]]:
    """The held-out rows that no earlier step trained on, the training rows that none held out.

    Raises:
        DataError: nothing is left of one of them.
    """
    trained = contained([row.prompt for row in held_out], earlier.trained)
    if any(trained):
        notes.append(
            f"left out {sum(trained)} of {_rows(len(held_out))} for evaluation whose prompt an"
            " earlier step trained on"
        )
    if held_out and all(trained):
        raise DataError(
            f"an earlier step trained on the prompts of all {_rows(len(held_out))} for evaluation;"
            " give --eval-path with other prompts, or the earlier steps' data.seed and"
            " data.eval_fraction"
        )
    evaluated = contained([row.prompt for row in train], earlier.held_out)
    if any(evaluated):
        notes.append(
            f"left out {_rows(sum(evaluated))} whose prompt an earlier step holds out for"
            " evaluation"
        )
    if all(evaluated):
        raise DataError(
            f"an earlier step holds out the prompts of all {_rows(len(train))} for evaluation;"
            " give other training rows, or begin from models that were evaluated on others"
        )
    return (
        [row for row, drop in zip(held_out, trained, strict=True) if not drop],
        [row for row, drop in zip(train, evaluated, strict=True) if not drop],
    )


def _note_repeated(prompts: Sequence[int], earlier: PromptRecord, notes: list[str]) -> None:
    own = list(dict.fromkeys(prompts))
    repeated = sum(contained(own, earlier.trained))
    if repeated:
        notes.append(
            f"{repeated} of its {len(own)} prompts were trained on by an earlier step as well; with"
            " the same paths, data.seed and split in all steps there are none"
        )


def _share(
    rows: Sequence[R],
    config: DataConfig,
    step: int,
    part: RowShare,
    uses: Mapping[int, RowUse],
    notes: list[str],
) -> list[R]:
    """The rows of `step`: of other prompts than the other steps', in proportion to `config.split`.

    A prompt goes to one of the steps that can use a row of it, with all its rows.
    """
    usable = [row for row in rows if row.is_usable(part.use)]
    if not usable:
        first = rows[0]
        raise DataError(
            f"no row has what step {step} needs, {NEEDS[part.use]}; the first,"
            f" {first.origin}, has {first.has}: give other data, name its columns with --fields, or"
            f" choose the steps with --step, without {step}"
        )
    if len(usable) < len(rows):
        others = len(rows) - len(usable)
        lack, are = ("lacks", "is") if others == 1 else ("lack", "are")
        notes.append(
            f"{_rows(others)} of {len(rows)} {lack} what step {step} needs, {NEEDS[part.use]}, and"
            f" {are} left to other steps"
        )
    steps: dict[int, set[int]] = {}
    for row in rows:
        of_row = {number for number, use in uses.items() if row.is_usable(use)}
        steps.setdefault(row.prompt, set()).update(of_row)
    owners = assign_steps(steps, split=config.split, seed=config.seed)
    mine = [row for row in usable if owners[row.prompt] in part.of_steps]
    parts = ",".join(f"{part:g}" for part in config.split)
    if not mine:
        raise DataError(
            f"--data-split {parts} leaves step {step} without rows: {len(usable)} of"
            f" {_rows(len(rows))} are usable in it, of {len({row.prompt for row in usable})}"
            " prompts; give more rows or raise the step's share"
        )
    mine = _in_drawn_order(mine, config, "order")
    mine = _unique_prompts(mine, notes) if part.use == "prompts" else mine
    taken = "" if part.of_steps == (step,) else f", parts {','.join(map(str, part.of_steps))}"
    notes.append(
        f"step {step} trains on {len(mine)} of {_rows(len(rows))} (data_split {parts}{taken})"
    )
    return mine


def _unique_prompts(rows: Sequence[R], notes: list[str]) -> list[R]:
    unique = list({row.whole_prompt: row for row in reversed(rows)}.values())[::-1]
    if len(unique) < len(rows):
        notes.append(f"{_rows(len(rows) - len(unique))} repeat a prompt and are left out")
    return unique


def _eval_rows(
    held_out: Sequence[R], config: DataConfig, step: int, use: RowUse, notes: list[str]
) -> list[R]:
    usable = [row for row in held_out if row.is_usable(use)]
    if not usable:
        raise DataError(
            f"none of the {_rows(len(held_out))} for evaluation has what step {step} needs,"
            f" {NEEDS[use]}; give --eval-path with such rows"
        )
    usable = _in_drawn_order(usable, config, "evaluation order")
    if use == "prompts":
        usable = _unique_prompts(usable, [])
    evaluated = usable[: config.max_eval_rows]
    notes.append(f"step {step} is evaluated on {len(evaluated)} of {_rows(len(held_out))} held out")
    return evaluated


def _rows(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"
