"""Which rows a step trains on and is evaluated on.

Rows are read, some prompts are held out for evaluation, and each of the others goes to one step.
Both are decided prompt by prompt, from the prompt and `data.seed` alone: a row that is added, a
path more, another order or another training seed moves no other prompt. The prompts that earlier
steps trained on or held out, however their rows were chosen, are kept apart as well.
"""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config import EMBEDDED, DataConfig, RowColumns, RowShare, RowUse, StepConfig
from pipeline.data.examples import Example
from pipeline.data.rows.dialogues import histories
from pipeline.data.rows.reading import ReadPath, RowReader, Wanted
from pipeline.data.sharing.prompts import (
    PromptRecord,
    as_hashes,
    contained,
    content_hash,
    draw,
    earlier_prompts,
    prompt_hash,
)
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError

logger = logging.getLogger(__name__)

MANY_HELD_OUT = 2048
"""Held-out rows above which a note recommends fewer."""

OF_ROWS = ("split", "fields", "eval_fraction", "seed")
"""Settings of how a user's rows are read and divided among the steps."""

USES: Mapping[int, RowUse] = {1: "demonstrations", 2: "pairs", 3: "prompts"}
"""What each step reads of a row, by its number."""

NEEDS: Mapping[RowUse, str] = {
    "demonstrations": "a response (chosen, response, output, messages, ...)",
    "pairs": "a chosen and a rejected response",
    "labels": "a chosen and a rejected response, a label, ranked responses, or labelled steps",
    "prompts": "a prompt",
    "responses": "a response, chosen, rejected or with a label",
}
"""What a row must have for a use."""


@dataclass(frozen=True)
class StageData:
    """The examples of one step."""

    train: list[Example]
    eval: list[Example]

    notes: list[str]
    """Remarks for the user: columns and rows that are not used, and why."""

    prompts: PromptRecord = field(default_factory=PromptRecord, compare=False)
    """Prompts that this step and the earlier ones train on and hold out."""

    held_out_prompts: list[Example] = field(default_factory=list[Example], compare=False)
    """For a step with a `RowShare`: the held-out prompts as step 3 has them, in its order."""


def load_step_rows(config: StepConfig, *, step: int) -> StageData:
    """Load the examples of a running step, the same on every process.

    Raises:
        DataError: as `load_examples`; or the record of an earlier step is damaged.
    """
    mesh = current_mesh()  # on other machines the directories may be incomplete
    earlier = mesh.world.gather_objects(earlier_prompts(config) if mesh.is_main else None)[0]
    data = load_examples(
        config.data,
        step=step,
        seed=config.seed,
        earlier=earlier,
        kept=config.row_columns,
        share=config.row_share,
    )
    return of_one_kind(data, config)


def record_prompts(prompts: PromptRecord, config: StepConfig) -> None:
    """Write the prompts of this step and the earlier ones to its output directory."""
    if current_mesh().is_main:
        prompts.write(config.output_dir)


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
    """Load the examples that `step` (1, 2 or 3) trains on and is evaluated on; log the notes.

    Args:
        config: the paths, and how their rows are read and divided.
        step: number of the step.
        seed: seed of the run, with which the embedded task draws its rows; a user's rows depend on
            `config.seed` alone.
        earlier: the prompts of the steps before: those they trained on are not held out here, and
            those they held out are not trained on.
        reader: reads each path once, if several steps are loaded one after the other.
        kept: columns that the examples have as `extra`, in addition to the dialogue.
        share: the rows that the step takes, if not those of its number and kind.

    Raises:
        DataError: a path, row, split or setting leaves the step without usable rows.
    """
    earlier = earlier or PromptRecord()
    kept = kept or RowColumns()
    if step != 2:
        kept = replace(kept, known_labels=config.labels)
    if EMBEDDED in config.path:
        data = _embedded(config, kept, earlier, step=step, seed=seed, share=share)
    else:
        wanted = Wanted(config.fields, kept)
        data = _read_and_share(
            config, wanted, earlier, reader or RowReader(), step=step, share=share
        )
    for note in data.notes:
        logger.info("data for step %d: %s", step, note)
    return replace(
        data,
        train=histories(data.train, config.history),
        eval=histories(data.eval, config.history),
    )


def of_one_kind(data: StageData, config: StepConfig) -> StageData:
    """Keep the rows that the step's settings choose.

    Raises:
        DataError: there are none.
    """
    train, held_out = config.choose_rows(data.train, data.eval)
    return replace(data, train=train, eval=held_out)


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
        f"data.{name} is not used: the built-in task has separate rows for every step"
        for name in unused
    ]
    by_prompt = {example.prompt: example for example in train}  # each prompt occurs many times
    own = PromptRecord(
        as_hashes(prompt_hash(example) for example in by_prompt.values()),
        as_hashes(prompt_hash(example) for example in held_out),
    )
    held_out = held_out[: config.max_eval_rows]
    if share is not None:
        train, held_out = (_as_used(rows, share.use) for rows in (train, held_out))
    return StageData(train, held_out, notes, earlier | own, prompts)


@dataclass(frozen=True)
class _Row:
    """An example with the hash of its prompt."""

    prompt: int
    example: Example


@dataclass(frozen=True)
class _Path:
    """The rows of one data path."""

    name: str
    weight: float | None
    """Share of the mixture; None if none was given."""

    train: list[_Row]
    eval: list[_Row]
    """Rows of its test split; empty if it has none."""

    @classmethod
    def of(cls, path: ReadPath) -> "_Path":
        """Hash the prompts of a path."""
        train, held_out = (
            [_Row(prompt_hash(example), example) for example in examples]
            for examples in (path.train, path.eval)
        )
        return cls(path.name, path.weight, train, held_out)


@dataclass(frozen=True)
class _Sharing:
    """How the rows of one step are chosen."""

    config: DataConfig
    step: int
    part: RowShare
    uses: Mapping[int, RowUse]
    """What each step reads of a row."""

    notes: list[str]
    """Receives what was left out."""

    def mix(self, paths: Sequence[_Path]) -> dict[str, list[_Row]]:
        """Return the training rows by path; with weights, each path's share is its weight's.

        No row is repeated: the path that is shortest for its weight is used in full, and of the
        others the prompts with the smallest draws. A missing weight among others is 1.
        """
        rows = {path.name: list(path.train) for path in paths}
        if all(path.weight is None for path in paths):
            return rows
        weights = {path.name: 1.0 if path.weight is None else path.weight for path in paths}
        unit = min(len(rows[name]) / weight for name, weight in weights.items())
        for name, weight in weights.items():
            count = min(len(rows[name]), max(1, round(unit * weight)))
            if count < len(rows[name]):
                self.notes.append(f"{name}: {count} of {_rows(len(rows[name]))}, by its weight")
                rows[name] = self.in_drawn_order(rows[name], "mixture")[:count]
        return rows

    def in_drawn_order(self, rows: Sequence[_Row], purpose: str) -> list[_Row]:
        """Sort the rows into an order that does not depend on the present one."""
        draws: dict[int, float] = {}
        for row in rows:
            if row.prompt not in draws:
                draws[row.prompt] = draw(row.prompt, seed=self.config.seed, purpose=purpose)
        return sorted(rows, key=lambda row: (draws[row.prompt], content_hash(row.example)))

    def cut_eval(self, rows: Sequence[_Row]) -> list[_Row]:
        """Return the rows of held-out prompts, of paths without a test split.

        `max_eval_rows` is ignored: it may differ between steps, and a row that one step evaluates
        must not be trained on by another.
        """
        if not rows:
            return []
        config, prompts = self.config, {row.prompt for row in rows}
        if len(prompts) == 1:
            raise DataError(
                f"{rows[0].example.origin} and all rows with it share one prompt, so none can be"
                " held out for evaluation; give more rows, or --eval-path"
            )
        chosen = held_out_prompts(prompts, fraction=config.eval_fraction, seed=config.seed)
        held_out = [row for row in rows if row.prompt in chosen]
        if len(held_out) > max(MANY_HELD_OUT, config.max_eval_rows):
            self.notes.append(
                f"holds out {_rows(len(held_out))} of {len(rows)}, of which at most"
                f" {config.max_eval_rows} are evaluated; a data.eval_fraction below"
                f" {config.eval_fraction:g}, the same for all steps, trains on more"
            )
        return held_out

    def without_held_out(self, rows: Sequence[_Row], held_out: Sequence[_Row]) -> list[_Row]:
        """Return the training rows whose prompt is not evaluated on."""
        prompts, cut_here = {row.prompt for row in held_out}, {id(row) for row in held_out}
        kept = [row for row in rows if row.prompt not in prompts]
        shared = sum(row.prompt in prompts and id(row) not in cut_here for row in rows)
        if shared:
            self.notes.append(f"left out {_rows(shared)} whose prompt is in the evaluation rows")
        if not kept:
            raise DataError(
                "every training row's prompt is in the evaluation rows as well; give other"
                " --eval-path"
            )
        return kept

    def apart(
        self, held_out: Sequence[_Row], train: Sequence[_Row], earlier: PromptRecord
    ) -> tuple[list[_Row], list[_Row]]:
        """Drop held-out rows that an earlier step trained on, and training rows that one held out.

        Raises:
            DataError: nothing is left of one of them.
        """
        trained = contained([row.prompt for row in held_out], earlier.trained)
        if any(trained):
            self.notes.append(
                f"left out {sum(trained)} of {_rows(len(held_out))} for evaluation whose prompt an"
                " earlier step trained on"
            )
        if held_out and all(trained):
            raise DataError(
                f"an earlier step trained on the prompts of all {_rows(len(held_out))} for"
                " evaluation; give --eval-path with other prompts, or the earlier steps' data.seed"
                " and data.eval_fraction"
            )
        evaluated = contained([row.prompt for row in train], earlier.held_out)
        if any(evaluated):
            self.notes.append(
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

    def own_rows(self, rows: Sequence[_Row]) -> list[_Row]:
        """Return the rows of the step; other steps have other prompts.

        A prompt goes to one of the steps that can use a row of it, with all its rows, in proportion
        to `config.split`.
        """
        config, step, part = self.config, self.step, self.part
        usable = [row for row in rows if is_usable(row.example, part.use)]
        if not usable:
            first = rows[0].example
            raise DataError(
                f"no row has what step {step} needs, {NEEDS[part.use]}; the first, {first.origin},"
                f" has {_content(first)}: give other data, name its columns with --fields, or"
                f" choose the steps with --step, without {step}"
            )
        if others := len(rows) - len(usable):
            lack, are = ("lacks", "is") if others == 1 else ("lack", "are")
            self.notes.append(
                f"{_rows(others)} of {len(rows)} {lack} what step {step} needs, {NEEDS[part.use]},"
                f" and {are} left to other steps"
            )
        steps: dict[int, set[int]] = {}
        for row in rows:
            of_row = {number for number, use in self.uses.items() if is_usable(row.example, use)}
            steps.setdefault(row.prompt, set()).update(of_row)
        owners = {
            prompt: step_of_prompt(prompt, sorted(able), split=config.split, seed=config.seed)
            for prompt, able in steps.items()
        }
        mine = [row for row in usable if owners[row.prompt] in part.of_steps]
        split = ",".join(f"{share:g}" for share in config.split)
        if not mine:
            raise DataError(
                f"--data-split {split} leaves step {step} without rows: {len(usable)} of"
                f" {_rows(len(rows))} are usable in it, of {len({row.prompt for row in usable})}"
                " prompts; give more rows or raise the step's share"
            )
        mine = self.in_drawn_order(mine, "order")
        mine = _unique_prompts(mine, self.notes) if part.use == "prompts" else mine
        taken = "" if part.of_steps == (step,) else f", parts {','.join(map(str, part.of_steps))}"
        self.notes.append(
            f"step {step} trains on {len(mine)} of {_rows(len(rows))} (data_split {split}{taken})"
        )
        return mine

    def eval_rows(self, held_out: Sequence[_Row], use: RowUse, notes: list[str]) -> list[_Row]:
        """Return the held-out rows that the step evaluates."""
        usable = [row for row in held_out if is_usable(row.example, use)]
        if not usable:
            raise DataError(
                f"none of the {_rows(len(held_out))} for evaluation has what step {self.step}"
                f" needs, {NEEDS[use]}; give --eval-path with such rows"
            )
        usable = self.in_drawn_order(usable, "evaluation order")
        if use == "prompts":
            usable = _unique_prompts(usable, [])
        evaluated = usable[: self.config.max_eval_rows]
        notes.append(
            f"step {self.step} is evaluated on {len(evaluated)} of {_rows(len(held_out))} held out"
        )
        return evaluated


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
    labelled = wanted.kept.labels or wanted.kept.known_labels
    uses: Mapping[int, RowUse] = {**USES, 2: "labels"} if labelled else USES
    part = share or RowShare(uses[step], (step,))
    sharing = _Sharing(config, step, part, uses, notes)
    paths, evaluation = (
        [_Path.of(path) for path in reader.read(names, wanted, step=step, notes=notes)]
        if names
        else []
        for names in (config.path, config.eval_path)
    )
    rows = sharing.mix(paths)
    if evaluation:
        held_out = [row for given in evaluation for row in given.eval or given.train]
    else:
        uncut = [path.name for path in paths if not path.eval]
        held_out = [row for path in paths for row in path.eval]
        held_out += sharing.cut_eval([row for name in uncut for row in rows[name]])
    train = sharing.without_held_out(
        [row for of_path in rows.values() for row in of_path], held_out
    )
    held_out, train = sharing.apart(held_out, train, earlier)
    mine = sharing.own_rows(train)
    evaluated = sharing.eval_rows(held_out, part.use, notes)
    _note_repeated([row.prompt for row in mine], earlier, notes)
    prompts = [] if share is None else sharing.eval_rows(held_out, "prompts", [])
    own = PromptRecord(as_hashes(row.prompt for row in mine), as_hashes(r.prompt for r in held_out))
    return StageData(
        _as_used([row.example for row in mine], part.use),
        _as_used([row.example for row in evaluated], part.use),
        notes,
        earlier | own,
        [row.example for row in prompts],
    )


def is_usable(example: Example, use: RowUse) -> bool:
    """Whether the row has what a use needs."""
    match use:
        case "demonstrations":
            return bool(example.chosen) and not example.tie and example.label is not False
        case "pairs":
            return bool(example.chosen and example.rejected) and not example.tie
        case "labels":
            is_pair = bool(example.chosen and example.rejected)
            return is_pair or example.label is not None or bool(example.steps)
        case "responses":
            return bool(example.chosen or example.rejected)
        case "prompts":
            return bool(example.prompt)


def _as_used(examples: Sequence[Example], use: RowUse) -> list[Example]:
    """The examples; if responses are read one by one, two for each pair."""
    if use != "responses":
        return list(examples)
    return [
        each
        for example in examples
        for each in (replace(example, rejected=()), replace(example, chosen=()))
        if each.chosen or each.rejected
    ]


def held_out_prompts(prompts: Collection[int], *, fraction: float, seed: int) -> set[int]:
    """Return the prompts whose draw is below `fraction`.

    If there is none, as in a few rows, the one with the smallest draw; but never all of them.
    """
    draws = {prompt: draw(prompt, seed=seed, purpose="held out") for prompt in prompts}
    found = {prompt for prompt, number in draws.items() if number < fraction}
    ordered = sorted(draws, key=lambda prompt: draws[prompt])
    return found if found and len(found) < len(draws) else set(ordered[: len(ordered) > 1])


def step_of_prompt(
    prompt: int, steps: Iterable[int], *, split: Sequence[float], seed: int
) -> int | None:
    """Return the one of `steps` that gets the prompt, in proportion to `split`; None if all are 0.

    Weighted rendezvous hashing (Schindelhauer & Schomaker 2005): each step draws an exponential
    number at the rate of its share, and the smallest wins. A step that leaves `steps`, or whose
    share changes, moves no prompt between the others.
    """
    numbers = [
        (-math.log(draw(prompt, seed=seed, purpose=f"step {step}")) / split[step - 1], step)
        for step in steps
        if split[step - 1] > 0
    ]
    return min(numbers)[1] if numbers else None


def _note_repeated(prompts: Sequence[int], earlier: PromptRecord, notes: list[str]) -> None:
    own = list(dict.fromkeys(prompts))
    if repeated := sum(contained(own, earlier.trained)):
        notes.append(
            f"{repeated} of its {len(own)} prompts were trained on by an earlier step as well; with"
            " the same paths, data.seed and split in all steps there are none"
        )


def _unique_prompts(rows: Sequence[_Row], notes: list[str]) -> list[_Row]:
    unique = list({row.example.prompt: row for row in reversed(rows)}.values())[::-1]
    if len(unique) < len(rows):
        notes.append(f"{_rows(len(rows) - len(unique))} repeat a prompt and are left out")
    return unique


def _content(example: Example) -> str:
    """The parts of a row, for messages."""
    found = {
        "a prompt": example.prompt,
        "a chosen response" if example.rejected else "a response": example.chosen,
        "a rejected response": example.rejected,
    }
    return " and ".join(name for name, turns in found.items() if turns) or "nothing"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"
