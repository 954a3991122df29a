"""Which rows a step trains on and is evaluated on.

Rows for evaluation are taken out first and are the same for every step. The others are cut into
three disjoint parts, one for each step. Everything follows from the paths and the seed.
"""

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeline.config import EMBEDDED, DataConfig
from pipeline.data.examples import Example, Message
from pipeline.data.named import named_set
from pipeline.data.shapes import check_fields, read_row
from pipeline.data.sources import Row, Source, read_source
from pipeline.errors import DataError

logger = logging.getLogger(__name__)

_NEEDS = {
    1: "a response (chosen, response, output, messages, ...)",
    2: "a chosen and a rejected response",
    3: "a prompt",
}


@dataclass(frozen=True)
class StageData:
    """The examples of one step."""

    train: list[Example]

    eval: list[Example]

    notes: list[str]
    """What a user may want to know: rows left out, and why."""


@dataclass(frozen=True)
class _Part:
    """The examples of one data path."""

    name: str
    weight: float | None
    train: list[Example]
    eval: list[Example]


OF_ROWS = ("split", "fields", "eval_fraction")
"""Settings of how a user's rows are read and shared out."""

MAX_HELD_OUT = 2048
"""Rows cut off for evaluation, at the most; more would tell little and be missed in training."""


def load_examples(config: DataConfig, *, step: int, seed: int) -> StageData:
    """The examples `step` (1, 2 or 3) trains on and is evaluated on; the log gets the notes.

    Raises:
        DataError: a path, row, split or setting leaves the step without usable rows.
    """
    read = _embedded if EMBEDDED in config.path else _read_and_share
    data = read(config, step=step, seed=seed)
    for note in data.notes:
        logger.info("data for step %d: %s", step, note)
    return data


def _read_and_share(config: DataConfig, *, step: int, seed: int) -> StageData:
    notes: list[str] = []
    parts = _read(config.path, config, step, notes)
    train = _mix(parts, seed, notes)
    if config.eval_path:
        eval_parts = _read(config.eval_path, config, step, notes)
        held_out = [example for part in eval_parts for example in part.eval or part.train]
    else:
        held_out = [example for part in parts for example in part.eval]
        uncut = {example.origin for part in parts if not part.eval for example in part.train}
        uncut_rows = [example for example in train if example.origin in uncut]
        held_out += _cut_eval(uncut_rows, config, seed)
    train = _without_prompts_of(held_out, train, notes, cut_here=not config.eval_path)
    return StageData(
        _share(train, config, step, seed, notes),
        _eval_rows(held_out, config, step, seed),
        notes,
    )


def _embedded(config: DataConfig, *, step: int, seed: int) -> StageData:
    if config.path != (EMBEDDED,) or config.eval_path:
        raise DataError(
            f"data path {EMBEDDED} is the built-in task and can't be mixed with other data;"
            " give either it or your own paths"
        )
    from pipeline.data.embedded import stage_examples

    train, held_out = stage_examples(step=step, seed=seed)
    usual = DataConfig()
    unused = [name for name in OF_ROWS if getattr(config, name) != getattr(usual, name)]
    notes = [
        f"data.{name} is not used: the built-in task has rows of its own for every step"
        for name in unused
    ]
    return StageData(train, held_out[: config.max_eval_rows], notes)


def _read(paths: Sequence[str], config: DataConfig, step: int, notes: list[str]) -> list[_Part]:
    sources = [read_source(path) for path in paths]
    if config.fields:
        rows = (row for source in sources for row in (*source.train, *source.eval))
        check_fields(config.fields, {name for row in rows for name in row.columns})
    return [_convert(source, config, step, notes) for source in sources]


def _convert(source: Source, config: DataConfig, step: int, notes: list[str]) -> _Part:
    known = None if config.fields else named_set(source.name)
    if known is not None and step == 2 and not known.has_rejected:
        raise DataError(
            f"data path {source.name} has no rejected responses, which step 2 needs;"
            " use it in steps 1 and 3"
        )

    def examples(rows: list[Row]) -> list[Example]:
        read = [known.read(row) if known else read_row(row, config.fields) for row in rows]
        return [example for example in read if example is not None]

    train, held_out = examples(source.train), examples(source.eval)
    dropped = len(source.train) + len(source.eval) - len(train) - len(held_out)
    if dropped:
        notes.append(
            f"{source.name}: left out {_rows(dropped)} in which no assistant answers a user"
        )
    if not train:
        raise DataError(
            f"data path {source.name}: none of its {_rows(len(source.train))} is usable:"
            " in none an assistant answers a user"
        )
    return _Part(source.name, source.weight, train, held_out)


def _mix(parts: Sequence[_Part], seed: int, notes: list[str]) -> list[Example]:
    """The training rows of all parts; with weights, each part's share of them is its weight's.

    No row is repeated: the part that is shortest for its weight is used whole, and of the others
    a random choice. A part without a weight among others with one weighs 1.
    """
    if all(part.weight is None for part in parts):
        return [example for part in parts for example in part.train]
    weights = [1.0 if part.weight is None else part.weight for part in parts]
    unit = min(len(part.train) / weight for part, weight in zip(parts, weights, strict=True))
    mixture = []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        count = min(len(part.train), max(1, round(unit * weight)))
        if count < len(part.train):
            notes.append(f"{part.name}: {count} of {_rows(len(part.train))}, as its weight says")
        chosen = random.Random(f"{seed} mix {number}").sample(range(len(part.train)), count)
        mixture += [part.train[index] for index in sorted(chosen)]
    return mixture


def _key(example: Example) -> tuple[Message, ...]:
    """What makes two rows the same question: the prompt, or the text where there is none."""
    return example.prompt or example.chosen


def _cut_eval(examples: Sequence[Example], config: DataConfig, seed: int) -> list[Example]:
    """All rows of some prompts: `eval_fraction` of the rows, at most MAX_HELD_OUT.

    `max_eval_rows` plays no part: it may differ from step to step, and a row that one step
    evaluates must not be trained on by another.
    """
    if not examples:
        return []
    groups = _groups(examples, random.Random(f"{seed} eval"))
    if len(groups) == 1:
        raise DataError(
            f"{examples[0].origin} and all rows with it share one prompt, so none can be held out"
            " for evaluation; give more rows, or --eval-path"
        )
    wanted = min(max(1, round(config.eval_fraction * len(examples))), MAX_HELD_OUT)
    held_out: list[Example] = []
    for group in groups[:-1]:
        if held_out and len(held_out) + len(group) > wanted:
            break
        held_out += group
    return held_out


def _groups(examples: Iterable[Example], rng: random.Random) -> list[list[Example]]:
    """The examples of each prompt, prompts in random order."""
    groups: dict[tuple[Message, ...], list[Example]] = {}
    for example in examples:
        groups.setdefault(_key(example), []).append(example)
    shuffled = list(groups.values())
    rng.shuffle(shuffled)
    return shuffled


def _without_prompts_of(
    held_out: Sequence[Example], train: Sequence[Example], notes: list[str], *, cut_here: bool
) -> list[Example]:
    """`train` without the rows whose prompt is evaluated on."""
    prompts = {_key(example) for example in held_out}
    origins = {example.origin for example in held_out} if cut_here else set()
    kept = [example for example in train if _key(example) not in prompts]
    shared = sum(_key(example) in prompts and example.origin not in origins for example in train)
    if shared:
        notes.append(f"left out {_rows(shared)} whose prompt is in the evaluation rows")
    if not kept:
        raise DataError(
            "every training row's prompt is in the evaluation rows as well; give other --eval-path"
        )
    return kept


def _usable(example: Example, step: int) -> bool:
    if step == 1:
        return bool(example.chosen)
    if step == 2:
        return bool(example.chosen and example.rejected)
    return bool(example.prompt)


def _steps(example: Example) -> tuple[int, ...]:
    """The steps that can use a row."""
    return tuple(step for step in (1, 2, 3) if _usable(example, step))


def _share(
    examples: Sequence[Example], config: DataConfig, step: int, seed: int, notes: list[str]
) -> list[Example]:
    """The rows of `step`: disjoint from the other steps', in proportion to `config.split`.

    Rows that only some of the steps can use are shared by those steps alone. Rows of one prompt
    stay together.
    """
    usable = [example for example in examples if _usable(example, step)]
    if not usable:
        first = examples[0]
        raise DataError(
            f"no row has what step {step} needs, {_NEEDS[step]}; the first,"
            f" {first.origin}, has {_has(first)}: give other data or say with --fields which"
            " column is which"
        )
    if len(usable) < len(examples):
        notes.append(
            f"{_rows(len(examples) - len(usable))} of {len(examples)} lack what step {step} needs,"
            f" {_NEEDS[step]}, and are left to other steps"
        )
    mine: list[Example] = []
    for steps, same in groupby(sorted(usable, key=_steps), key=_steps):
        groups = _groups(same, random.Random(f"{seed} split {steps}"))
        proportions = [float(config.split[number - 1]) for number in steps]
        mine += _cut(groups, proportions, steps.index(step))
    if not mine:
        raise DataError(
            f"--data-split {','.join(f'{part:g}' for part in config.split)} leaves step {step}"
            f" without rows: {len(usable)} of {_rows(len(examples))} are usable in it;"
            " give more rows or raise the step's share"
        )
    random.Random(f"{seed} order").shuffle(mine)
    mine = _unique_prompts(mine, notes) if step == 3 else mine
    notes.append(
        f"step {step} trains on {len(mine)} of {_rows(len(examples))} (data_split"
        f" {','.join(f'{part:g}' for part in config.split)})"
    )
    return mine


def _cut(
    groups: Sequence[Sequence[Example]], proportions: Sequence[float], part: int
) -> list[Example]:
    """The rows of the groups that begin inside the given part of all rows."""
    rows = sum(map(len, groups))
    total = sum(proportions) or 1.0
    start = round(rows * sum(proportions[:part]) / total)
    end = round(rows * sum(proportions[: part + 1]) / total)
    mine: list[Example] = []
    position = 0
    for group in groups:
        if start <= position < end:
            mine += group
        position += len(group)
    return mine


def _unique_prompts(examples: Sequence[Example], notes: list[str]) -> list[Example]:
    unique = list({example.prompt: example for example in reversed(examples)}.values())[::-1]
    if len(unique) < len(examples):
        notes.append(f"{_rows(len(examples) - len(unique))} repeat a prompt and are left out")
    return unique


def _eval_rows(
    held_out: Sequence[Example], config: DataConfig, step: int, seed: int
) -> list[Example]:
    usable = [example for example in held_out if _usable(example, step)]
    if not usable:
        raise DataError(
            f"none of the {_rows(len(held_out))} for evaluation has what step {step} needs,"
            f" {_NEEDS[step]}; give --eval-path with such rows"
        )
    if step == 3:
        usable = _unique_prompts(usable, [])
    random.Random(f"{seed} eval order").shuffle(usable)
    return usable[: config.max_eval_rows]


def _has(example: Example) -> str:
    has = [name for name in ("prompt", "chosen", "rejected") if getattr(example, name)]
    return " and ".join(has) or "nothing"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"
