"""Which rows a step trains on and is evaluated on.

Rows for evaluation are taken out first; the others are cut into three parts, one for each step.
Both are decided prompt by prompt (`parts`). What earlier steps trained on or held out, in whichever
way their rows were chosen, is kept apart as well (`prompt_record`).
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config import EMBEDDED, DataConfig, RowColumns, RowShare, RowUse, StepConfig
from pipeline.data.examples import Example
from pipeline.data.history import histories
from pipeline.data.parts import assign_steps, held_out_prompts
from pipeline.data.prompt_hash import draw, prompt_hash
from pipeline.data.prompt_record import PromptRecord, as_hashes, contained
from pipeline.data.reading import ReadPath, RowReader, Wanted
from pipeline.data.row_uses import NEEDS, as_used, is_usable, uses_of
from pipeline.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageData:
    """The examples of one step."""

    train: list[Example]

    eval: list[Example]

    notes: list[str]
    """What a user may want to know: columns and rows that are not used, and why."""

    prompts: PromptRecord = field(default_factory=PromptRecord, compare=False)
    """What this step and the earlier ones train on and hold out."""

    held_out_prompts: list[Example] = field(default_factory=list[Example], compare=False)
    """Of a step with a `RowShare`: the held-out prompts as step 3 has them, in its order."""


@dataclass(frozen=True)
class _Row:
    """An example with the hash of its prompt."""

    prompt: int
    example: Example


OF_ROWS = ("split", "fields", "eval_fraction", "seed")
"""Settings of how a user's rows are read and shared out."""

MANY_HELD_OUT = 2048
"""Rows held out above which a note says that fewer would do."""


def load_examples(
    config: DataConfig,
    *,
    step: int,
    seed: int,
    earlier: PromptRecord | None = None,
    reader: RowReader | None = None,
    kept: RowColumns | None = None,
    share: RowShare | None = None,
) -> StageData:
    """The examples `step` (1, 2 or 3) trains on and is evaluated on; the log gets the notes.

    Args:
        config: the paths, and how their rows are read and shared out.
        step: which step reads them.
        seed: of the run. The embedded task draws its rows with it; a user's own rows depend on
            `config.seed` alone.
        earlier: the prompts of the steps before, which stay apart: those they trained on are not
            held out here, and those they held out are not trained on.
        reader: reads each path once, where several steps are loaded one after the other.
        kept: columns that the examples have as `extra`, beside the dialogue.
        share: which rows the step takes, where it is not those of its number and kind.

    Raises:
        DataError: a path, row, split or setting leaves the step without usable rows.
    """
    earlier = earlier or PromptRecord()
    kept = kept or RowColumns()
    if EMBEDDED in config.path:
        data = _embedded(config, kept, earlier, step=step, seed=seed, share=share)
    else:
        wanted = Wanted(config.fields, kept)
        reader = reader or RowReader()
        data = _read_and_share(config, wanted, earlier, reader, step=step, share=share)
    for note in data.notes:
        logger.info("data for step %d: %s", step, note)
    return replace(
        data,
        train=histories(data.train, config.history),
        eval=histories(data.eval, config.history),
    )


def of_one_kind(data: StageData, config: StepConfig) -> StageData:
    """The rows of the kind that the step's settings choose, of those that it has a use for.

    Raises:
        DataError: there are none.
    """
    train, held_out = config.choose_rows(data.train, data.eval)
    return replace(data, train=train, eval=held_out)


def _read_and_share(
    config: DataConfig,
    wanted: Wanted,
    earlier: PromptRecord,
    reader: RowReader,
    *,
    step: int,
    share: RowShare | None,
) -> StageData:
    notes: list[str] = []
    uses = uses_of(wanted.kept)
    part = share or RowShare(uses[step], (step,))
    paths = reader.read(config.path, wanted, step=step, notes=notes)
    rows = _mix(paths, config, notes)
    if config.eval_path:
        given = reader.read(config.eval_path, wanted, step=step, notes=notes)
        held_out = _hashed(row for path in given for row in path.eval or path.train)
    else:
        uncut = [path.name for path in paths if not path.eval]
        held_out = _hashed(row for path in paths for row in path.eval)
        held_out += _cut_eval([row for name in uncut for row in rows[name]], config, notes)
    cut_here = {id(row.example) for row in held_out}
    train = _without_held_out(
        [row for rows_of_path in rows.values() for row in rows_of_path],
        {row.prompt for row in held_out},
        cut_here,
        notes,
    )
    held_out, train = _apart(held_out, train, earlier, notes)
    mine = _share(train, config, step, part, uses, notes)
    evaluated = _eval_rows(held_out, config, step, part.use, notes)
    _note_repeated([row.prompt for row in mine], earlier, notes)
    prompts = [] if share is None else _eval_rows(held_out, config, step, "prompts", [])
    return StageData(
        as_used([row.example for row in mine], part.use),
        as_used([row.example for row in evaluated], part.use),
        notes,
        earlier
        | PromptRecord(
            as_hashes(row.prompt for row in mine), as_hashes(row.prompt for row in held_out)
        ),
        [row.example for row in prompts],
    )


def _embedded(
    config: DataConfig,
    kept: RowColumns,
    earlier: PromptRecord,
    *,
    step: int,
    seed: int,
    share: RowShare | None,
) -> StageData:
    if config.path != (EMBEDDED,) or config.eval_path:
        raise DataError(
            f"data path {EMBEDDED} is the built-in task and can't be mixed with other data;"
            " give either it or your own paths"
        )
    from pipeline.data.embedded import COLUMNS, pair_examples, stage_examples

    Wanted({}, kept).check(COLUMNS)
    prompts: list[Example] = []
    if share is None:
        train, held_out = stage_examples(step=step, seed=seed)
    else:
        train, held_out = pair_examples(of_steps=share.of_steps, seed=seed)
        prompts = stage_examples(step=3, seed=seed)[1][: config.max_eval_rows]
    usual = DataConfig()
    unused = [name for name in OF_ROWS if getattr(config, name) != getattr(usual, name)]
    notes = [
        f"data.{name} is not used: the built-in task has rows of its own for every step"
        for name in unused
    ]
    by_prompt = {example.prompt: example for example in train}  # each many times
    own = PromptRecord(
        as_hashes(prompt_hash(example) for example in by_prompt.values()),
        as_hashes(prompt_hash(example) for example in held_out),
    )
    held_out = held_out[: config.max_eval_rows]
    if share is not None:
        train, held_out = (as_used(rows, share.use) for rows in (train, held_out))
    return StageData(train, held_out, notes, earlier | own, prompts)


def _hashed(examples: Iterable[Example]) -> list[_Row]:
    return [_Row(prompt_hash(example), example) for example in examples]


def _mix(paths: Sequence[ReadPath], config: DataConfig, notes: list[str]) -> dict[str, list[_Row]]:
    """The training rows of all paths, by path; with weights, each path's share is its weight's.

    No row is repeated: the path that is shortest for its weight is used whole, and of the others
    the prompts with the smallest draws. A path without a weight among others with one weighs 1.
    """
    rows = {path.name: _hashed(path.train) for path in paths}
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


def _in_drawn_order(rows: Iterable[_Row], config: DataConfig, purpose: str) -> list[_Row]:
    """The rows in an order that does not depend on the one they come in."""
    draws: dict[int, float] = {}
    for row in rows:
        if row.prompt not in draws:
            draws[row.prompt] = draw(row.prompt, seed=config.seed, purpose=purpose)

    def place(row: _Row) -> tuple[float, list[str]]:
        example = row.example
        turns = (*example.prompt, *example.chosen, *example.rejected)
        return draws[row.prompt], [turn.content for turn in turns]

    return sorted(rows, key=place)


def _cut_eval(rows: Sequence[_Row], config: DataConfig, notes: list[str]) -> list[_Row]:
    """The rows of the prompts that are held out, of paths without a test split.

    `max_eval_rows` plays no part: it may differ from step to step, and a row that one step
    evaluates must not be trained on by another.
    """
    if not rows:
        return []
    prompts = {row.prompt for row in rows}
    if len(prompts) == 1:
        raise DataError(
            f"{rows[0].example.origin} and all rows with it share one prompt, so none can be held"
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
    rows: Sequence[_Row], prompts: Collection[int], cut_here: Collection[int], notes: list[str]
) -> list[_Row]:
    """The training rows whose prompt is not evaluated on."""
    kept = [row for row in rows if row.prompt not in prompts]
    shared = sum(row.prompt in prompts and id(row.example) not in cut_here for row in rows)
    if shared:
        notes.append(f"left out {_rows(shared)} whose prompt is in the evaluation rows")
    if not kept:
        raise DataError(
            "every training row's prompt is in the evaluation rows as well; give other --eval-path"
        )
    return kept


def _apart(
    held_out: Sequence[_Row], train: Sequence[_Row], earlier: PromptRecord, notes: list[str]
) -> tuple[list[_Row], list[_Row]]:
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
    rows: Sequence[_Row],
    config: DataConfig,
    step: int,
    part: RowShare,
    uses: Mapping[int, RowUse],
    notes: list[str],
) -> list[_Row]:
    """The rows of `step`: of other prompts than the other steps', in proportion to `config.split`.

    A prompt goes to one of the steps that can use a row of it, with all its rows.
    """
    usable = [row for row in rows if is_usable(row.example, part.use)]
    if not usable:
        first = rows[0].example
        raise DataError(
            f"no row has what step {step} needs, {NEEDS[part.use]}; the first,"
            f" {first.origin}, has {_has(first)}: give other data or say with --fields which"
            " column is which"
        )
    if len(usable) < len(rows):
        notes.append(
            f"{_rows(len(rows) - len(usable))} of {len(rows)} lack what step {step} needs,"
            f" {NEEDS[part.use]}, and are left to other steps"
        )
    steps: dict[int, set[int]] = {}
    for row in rows:
        of_row = {number for number, use in uses.items() if is_usable(row.example, use)}
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


def _unique_prompts(rows: Sequence[_Row], notes: list[str]) -> list[_Row]:
    unique = list({row.example.prompt: row for row in reversed(rows)}.values())[::-1]
    if len(unique) < len(rows):
        notes.append(f"{_rows(len(rows) - len(unique))} repeat a prompt and are left out")
    return unique


def _eval_rows(
    held_out: Sequence[_Row], config: DataConfig, step: int, use: RowUse, notes: list[str]
) -> list[_Row]:
    usable = [row for row in held_out if is_usable(row.example, use)]
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


def _has(example: Example) -> str:
    has = [name for name in ("prompt", "chosen", "rejected") if getattr(example, name)]
    return " and ".join(has) or "nothing"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"
