"""Assignment of rows to the steps and to evaluation.

Some prompts are held out for evaluation, and each other prompt is assigned to one step. This is
decided from the prompt and `data.seed` alone: adding or reordering rows or paths, or changing the
training seed, does not move any other prompt. Prompts that earlier steps trained on or held out are
kept apart as well, however their rows were chosen.
"""

import hashlib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from pipeline.config import EMBEDDED, DataConfig, RowColumns, RowShare, RowUse, StepConfig
from pipeline.data.examples import Example, Message
from pipeline.data.rows.reading import PathExamples, read_paths
from pipeline.data.rows.shapes import check_columns
from pipeline.data.sharing.prompts import (
    Hashes,
    PromptRecord,
    draw,
    isin,
    read_earlier_prompts,
    unique_hashes,
)
from pipeline.system.errors import DataError, counted

logger = logging.getLogger(__name__)

STEP_USES: Mapping[int, RowUse] = {1: "demonstrations", 2: "pairs", 3: "prompts"}
"""The part of a row that each step reads, by the step's number."""

NEEDS: Mapping[RowUse, str] = {
    "demonstrations": "a response to train on (chosen, response, output, messages, ...)",
    "pairs": "a chosen and a rejected response",
    "labels": "a chosen and a rejected response, a label, or labeled steps",
    "prompts": "a prompt",
    "responses": "a chosen, rejected or labeled response",
}
"""Data that a row needs for each use, as phrased in messages."""


@dataclass(frozen=True)
class StepData:
    """The examples of one step."""

    train: list[Example]
    eval: list[Example]
    """At most `max_eval_rows` rows. A user's prompts, and rows for a `RowShare`, are not limited,
    because the step first drops those that are too long."""

    notes: list[str]
    """Remarks for the user: columns and rows that are not used, and why."""

    prompts: PromptRecord = field(default_factory=PromptRecord, compare=False)
    """Prompts that this step and the earlier ones train on and hold out."""

    held_out_prompts: list[Example] = field(default_factory=list[Example], compare=False)
    """Held-out prompts of step 3, in its order, for a step with a `RowShare`."""


def load_step_rows(config: StepConfig, *, step: int) -> StepData:
    """Load the examples of a running step, the same on every process.

    Raises:
        DataError: as for `load_examples`; or the record of an earlier step is damaged.
    """
    from pipeline.parallel.mesh import current_mesh  # imports torch

    mesh = current_mesh()  # other machines may lack the directories
    earlier = mesh.world.gather_objects(read_earlier_prompts(config) if mesh.is_main else None)[0]
    data = load_examples(
        config.data,
        step=step,
        seed=config.seed,
        earlier=earlier,
        kept=config.row_columns,
        share=config.row_share,
    )
    return select_rows(data, config)


def record_prompts(prompts: PromptRecord, config: StepConfig) -> None:
    """Write the prompts of this step and the earlier ones to its output directory."""
    from pipeline.parallel.mesh import current_mesh  # imports torch

    if current_mesh().is_main:
        prompts.write(config.output_dir)


def load_examples(
    config: DataConfig,
    *,
    step: int,
    seed: int,
    earlier: PromptRecord | None = None,
    kept: RowColumns | None = None,
    share: RowShare | None = None,
) -> StepData:
    """Load the examples that `step` (1, 2 or 3) trains on and is evaluated on; log the notes.

    The rows of the embedded task depend on `seed`, a user's rows on `config.seed` alone. Prompts
    that `earlier` steps trained on are not held out, and prompts that they held out are not trained
    on. Columns in `kept` are kept in `extra`; `share` replaces the step's default choice of rows.

    Raises:
        DataError: a path, row, split or setting is invalid, or leaves the step without usable rows.
    """
    earlier = earlier or PromptRecord()
    kept = kept or RowColumns()
    if step != 2:
        kept = replace(kept, known_labels=config.labels)
    if EMBEDDED in (*config.path, *config.eval_path):
        data = _load_embedded(config, kept, earlier, step=step, seed=seed, share=share)
    else:
        data = _load_user_rows(config, kept, earlier, step=step, share=share)
    for note in data.notes:
        prefix = "" if note.startswith("step ") else f"data for step {step}: "
        logger.info("%s%s", prefix, note)
    return data


def select_rows(data: StepData, config: StepConfig) -> StepData:
    """Keep the rows that the step's settings select.

    Raises:
        DataError: there are no such rows.
    """
    train, held_out = config.choose_rows(data.train, data.eval)
    return replace(data, train=train, eval=held_out)


@lru_cache(maxsize=6)
def embedded_examples(
    *, step: int, seed: int, split_steps: tuple[int, ...] | None = None
) -> tuple[list[Example], list[Example]]:
    """Return a step's training and evaluation rows of the embedded task; do not modify them.

    With `split_steps`, the rows are pairs of responses to the prompts of these steps.
    """
    from pipeline.demo.task import pair_rows, step_rows

    splits = (
        pair_rows(split_steps=split_steps, seed=seed)
        if split_steps
        else step_rows(step=step, seed=seed)
    )

    def make_turns(response: str) -> tuple[Message, ...]:
        return (Message("assistant", response),) if response else ()

    train, held_out = (
        [
            Example(
                prompt=(Message("user", row.prompt),),
                chosen=make_turns(row.chosen),
                rejected=make_turns(row.rejected),
                origin="embedded task",
                extra={} if row.chosen else {"answer": row.answer},
            )
            for row in rows
        ]
        for rows in splits
    )
    return train, held_out


def check_embedded(config: DataConfig, kept: RowColumns) -> None:
    """Check settings of the embedded task, as `load_examples` does, without drawing its rows.

    Raises:
        DataError: it is mixed with other data, or lacks a column that a reward reads.
    """
    if config.path != (EMBEDDED,) or config.eval_path:
        raise DataError(
            f"data path {EMBEDDED} is the embedded task and can't be mixed with other data; use"
            " either it or your own paths"
        )
    check_columns([{"answer": ""}], {}, kept)


def _load_embedded(
    config: DataConfig,
    kept: RowColumns,
    earlier: PromptRecord,
    *,
    step: int,
    seed: int,
    share: RowShare | None,
) -> StepData:
    check_embedded(config, kept)
    prompts: list[Example] = []
    train, held_out = embedded_examples(
        step=step, seed=seed, split_steps=share.split_steps if share else None
    )
    by_prompt = {example.prompt: example for example in train}  # each prompt occurs many times
    record = earlier | _make_record(by_prompt.values(), held_out)
    held_out = held_out[: config.max_eval_rows]
    if share is not None:
        prompts = embedded_examples(step=3, seed=seed)[1][: config.max_eval_rows]
        train, held_out = (_split_responses(rows, share.use) for rows in (train, held_out))
    return StepData(train, held_out, [], record, prompts)


@dataclass
class _RowSelector:
    """Selects the rows of one step."""

    config: DataConfig
    step: int

    share: RowShare
    """The part of a row that the step reads, and the parts of `config.split` that it uses."""

    uses: Mapping[int, RowUse]
    """The part of a row that each step reads."""

    notes: list[str]
    """Receives notes on what was dropped."""

    drops_long_rows: bool
    """Whether the step drops held-out rows that are too long."""

    def mix(self, paths: Sequence[PathExamples]) -> list[list[Example]]:
        """Return the training rows of each path, in proportion to the weights if there are any.

        No row is repeated: the path that is smallest relative to its weight is used in full, and
        the others are randomly subsampled. If any weight is given, missing ones default to 1.
        """
        if all(path.weight is None for path in paths):
            return [path.train for path in paths]
        weights = [1.0 if path.weight is None else path.weight for path in paths]
        scale = min(len(path.train) / weight for path, weight in zip(paths, weights, strict=True))
        mixed: list[list[Example]] = []
        for path, weight in zip(paths, weights, strict=True):
            rows, count = path.train, max(1, round(scale * weight))
            if count < len(rows):
                total = counted(len(rows), "row")
                self.notes.append(f"{path.name}: uses {count:,} of {total}, given its weight")
                rows = self.shuffle_by_hash(rows, "mixture")[:count]
            mixed.append(rows)
        return mixed

    def shuffle_by_hash(self, rows: Sequence[Example], purpose: str) -> list[Example]:
        """Shuffle the rows into an order that does not depend on the current one."""
        seed = self.config.seed
        draws = {
            prompt: draw(prompt, seed=seed, purpose=purpose)
            for prompt in {row.prompt_hash for row in rows}
        }
        return sorted(
            rows,
            key=lambda row: (
                draws[row.prompt_hash],
                hashlib.sha256(repr((row.prompt, row.chosen, row.rejected)).encode()).digest(),
            ),
        )

    def hold_out(self, rows: Sequence[Example]) -> list[Example]:
        """Return the rows whose prompts are held out; `rows` are from paths without a test split.

        `max_eval_rows` is ignored: it may differ between steps, and a row that one step evaluates
        must not be trained on by another.
        """
        prompts = {row.prompt_hash for row in rows}
        if len(prompts) == 1:
            raise DataError(
                f"{rows[0].origin} and all other rows share one prompt, so none can be held out for"
                " evaluation; add more rows, or pass --eval-path"
            )
        config = self.config
        selected = draw_held_out(prompts, fraction=config.eval_fraction, seed=config.seed)
        return [row for row in rows if row.prompt_hash in selected]

    def drop_overlaps(
        self, train: Sequence[Example], held_out: Sequence[Example], earlier: PromptRecord
    ) -> tuple[list[Example], list[Example]]:
        """Remove training rows that this or an earlier step holds out.

        Held-out rows that an earlier step trained on are removed as well.

        Raises:
            DataError: no training rows or no held-out rows are left.
        """
        held_out_ids = set(map(id, held_out))
        train = self._drop_prompts(
            [row for row in train if id(row) not in held_out_ids],
            unique_hashes(row.prompt_hash for row in held_out),
            "whose prompt is also in the evaluation rows",
            "pass another --eval-path",
        )
        held_out = self._drop_prompts(
            held_out,
            earlier.trained,
            "for evaluation whose prompt an earlier step trained on",
            "pass --eval-path with other prompts, or the earlier steps' data.seed and"
            " data.eval_fraction",
        )
        train = self._drop_prompts(
            train,
            earlier.held_out,
            "whose prompt an earlier step holds out for evaluation",
            "use other training rows, or start from models that held out other prompts",
        )
        return train, held_out

    def _drop_prompts(
        self, rows: Sequence[Example], prompts: Hashes, reason: str, fix: str
    ) -> list[Example]:
        is_dropped = isin([row.prompt_hash for row in rows], prompts)
        note = f"dropped {counted(sum(is_dropped), 'row')} {reason}"
        if any(is_dropped):
            self.notes.append(note)
        if rows and all(is_dropped):
            raise DataError(f"{note}, so nothing remains; {fix}")
        return [row for row, dropped in zip(rows, is_dropped, strict=True) if not dropped]

    def select_train_rows(self, rows: Sequence[Example]) -> list[Example]:
        """Return the rows whose prompts are assigned to this step, and to no other.

        Each prompt is assigned, with all its rows, to one of the steps that can use any of the
        rows, in proportion to `config.split`.
        """
        config, step, needs = self.config, self.step, NEEDS[self.share.use]
        usable = [row for row in rows if is_usable(row, self.share.use)]
        if not usable:
            raise DataError(
                f"no row has what step {step} needs, {needs} (the first row is {rows[0].origin});"
                " use other data, map the columns with --fields, or use --step to run only steps"
                f" other than {step}"
            )
        if num_others := len(rows) - len(usable):
            tie = ", or with a tie," if any(row.tie for row in rows) else ""
            others = counted(num_others, "row")
            self.notes.append(f"{others} without {needs}{tie} left to other steps")
        candidate_steps: dict[int, set[int]] = {}
        for row in rows:
            row_steps = {number for number, use in self.uses.items() if is_usable(row, use)}
            candidate_steps.setdefault(row.prompt_hash, set()).update(row_steps)
        owners = {
            prompt: assign_step(prompt, sorted(candidates), split=config.split, seed=config.seed)
            for prompt, candidates in candidate_steps.items()
        }
        selected = [row for row in usable if owners[row.prompt_hash] in self.share.split_steps]
        split = ",".join(f"{share:g}" for share in config.split)
        all_rows = counted(len(rows), "row")
        if not selected:
            raise DataError(
                f"--data-split {split} leaves step {step} without rows, although it could use"
                f" {len(usable):,} of {all_rows}; add rows or raise the step's share"
            )
        selected = self.shuffle_by_hash(selected, "order")
        selected = _unique_prompts(selected) if self.share.use == "prompts" else selected
        parts = "part " if len(self.share.split_steps) == 1 else "parts "
        parts += ", ".join(map(str, self.share.split_steps))
        total = f"{len(selected):,} of {all_rows} ({parts} of data_split {split})"
        total = total if len(selected) < len(rows) else all_rows
        self.notes.append(f"step {step} trains on {total}")
        return selected

    def select_eval_rows(
        self, held_out: Sequence[Example], use: RowUse, notes: list[str]
    ) -> list[Example]:
        """Return the held-out rows that the step can use, limited as in `StepData.eval`."""
        usable = [row for row in held_out if is_usable(row, use)]
        if not usable:
            raise DataError(
                f"no evaluation row ({len(held_out)} read) has what step {self.step} needs,"
                f" {NEEDS[use]}; pass --eval-path with such rows"
            )
        usable = self.shuffle_by_hash(usable, "evaluation order")
        usable = _unique_prompts(usable) if use == "prompts" else usable
        evaluated = usable[: self.config.max_eval_rows]
        total = counted(len(held_out), "row")
        notes.append(f"step {self.step} is evaluated on {len(evaluated):,} of {total} held out")
        return usable if self.drops_long_rows or use == "prompts" else evaluated


def _load_user_rows(
    config: DataConfig,
    kept: RowColumns,
    earlier: PromptRecord,
    *,
    step: int,
    share: RowShare | None,
) -> StepData:
    notes: list[str] = []
    has_labels = kept.labels or kept.known_labels
    uses: Mapping[int, RowUse] = {**STEP_USES, 2: "labels"} if has_labels else STEP_USES
    row_share = share or RowShare(uses[step], (step,))
    selector = _RowSelector(config, step, row_share, uses, notes, drops_long_rows=share is not None)
    read = partial(read_paths, fields=config.fields, kept=kept, step=step, notes=notes)
    paths = read(config.path)
    mixed = selector.mix(paths)
    train = [row for rows in mixed for row in rows]
    if config.eval_path:
        eval_paths = read(config.eval_path, optional=True)
        held_out = [row for path in eval_paths for row in path.eval or path.train]
    else:
        held_out = [row for path in paths for row in path.eval]
        unsplit = [rows for path, rows in zip(paths, mixed, strict=True) if not path.eval]
        held_out += selector.hold_out([row for rows in unsplit for row in rows])
    train, held_out = selector.drop_overlaps(train, held_out, earlier)
    selected = selector.select_train_rows(train)
    evaluated = selector.select_eval_rows(held_out, row_share.use, notes)
    prompts = [] if share is None else selector.select_eval_rows(held_out, "prompts", [])
    record = _make_record(selected, held_out)
    if num_repeated := sum(isin(record.trained.tolist(), earlier.trained)):
        notes.append(
            f"an earlier step also trained on {num_repeated} of the {len(record.trained)} prompts;"
            " to avoid this, use the same paths, data.seed and split in all steps"
        )
    train, held_out = (_split_responses(rows, row_share.use) for rows in (selected, evaluated))
    return StepData(train, held_out, notes, earlier | record, prompts)


def _make_record(train: Iterable[Example], held_out: Iterable[Example]) -> PromptRecord:
    trained, evaluated = ([row.prompt_hash for row in rows] for rows in (train, held_out))
    return PromptRecord(unique_hashes(trained), unique_hashes(evaluated))


def is_usable(example: Example, use: RowUse) -> bool:
    """Return whether the row contains the data that `use` needs."""
    match use:
        case "demonstrations":
            return bool(example.chosen) and not example.tie and example.label is not False
        case "pairs":
            return bool(example.chosen and example.rejected) and not example.tie
        case "labels":
            is_pair = is_usable(example, "pairs")
            return is_pair or example.label is not None or bool(example.steps)
        case "responses":
            return bool(example.chosen or example.rejected) and not example.tie
        case "prompts":
            return bool(example.prompt)


def _split_responses(examples: Sequence[Example], use: RowUse) -> list[Example]:
    """Split each pair into two single-response examples if `use` is "responses"."""
    if use != "responses":
        return list(examples)
    return [
        single
        for example in examples
        for single in (replace(example, rejected=()), replace(example, chosen=()))
        if single.chosen or single.rejected
    ]


def draw_held_out(prompts: Collection[int], *, fraction: float, seed: int) -> set[int]:
    """Return the prompts whose draw is below `fraction`.

    If that selects none or all of them, as can happen with few rows, return only the prompt with
    the smallest draw, or nothing if there is only one prompt.
    """
    draws = {prompt: draw(prompt, seed=seed, purpose="held out") for prompt in prompts}
    selected = {prompt for prompt, value in draws.items() if value < fraction}
    if selected and len(selected) < len(draws):
        return selected
    return {min(draws, key=lambda prompt: draws[prompt])} if len(draws) > 1 else set()


def assign_step(
    prompt: int, steps: Iterable[int], *, split: Sequence[float], seed: int
) -> int | None:
    """Return which of `steps` gets the prompt, by their shares in `split`, or None if all are 0.

    Weighted rendezvous hashing (Schindelhauer & Schomaker 2005): each step draws an exponential
    variate whose rate is its share, and the smallest wins. If a step is removed from `steps` or its
    share changes, no prompt moves between other steps.
    """
    variates = [
        (-math.log(draw(prompt, seed=seed, purpose=f"step {step}")) / split[step - 1], step)
        for step in steps
        if split[step - 1] > 0
    ]
    return min(variates)[1] if variates else None


def _unique_prompts(rows: Sequence[Example]) -> list[Example]:
    return list({row.prompt: row for row in reversed(rows)}.values())[::-1]
