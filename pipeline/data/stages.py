"""Which rows a step trains on and is evaluated on: read, then shared out (`sharing`)."""

import logging
from dataclasses import dataclass, field, replace

from pipeline.config import EMBEDDED, DataConfig, RowColumns, RowShare, RowUse, StepConfig
from pipeline.data.examples import Example
from pipeline.data.history import histories
from pipeline.data.prompt_hash import content_hash, prompt_hash
from pipeline.data.prompt_record import PromptRecord, as_hashes
from pipeline.data.reading import ReadPath, RowReader, Wanted
from pipeline.data.row_uses import as_used, is_usable, uses_of
from pipeline.data.sharing import SharedPath, share_out
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

    @property
    def key(self) -> int:
        """See `SharedRow`."""
        return content_hash(self.example)

    @property
    def whole_prompt(self) -> object:
        """See `SharedRow`."""
        return self.example.prompt

    @property
    def origin(self) -> str:
        """See `SharedRow`."""
        return self.example.origin

    @property
    def has(self) -> str:
        """See `SharedRow`."""
        example = self.example
        responses = {
            (True, True): "a chosen and a rejected response",
            (True, False): "a response",
            (False, True): "a rejected response",
        }
        found = responses.get((bool(example.chosen), bool(example.rejected)))
        parts = ["a prompt"] if example.prompt else []
        return " and ".join([*parts, *([found] if found else [])]) or "nothing"

    def is_usable(self, use: RowUse) -> bool:
        """See `SharedRow`."""
        return is_usable(self.example, use)


OF_ROWS = ("split", "fields", "eval_fraction", "seed")
"""Settings of how a user's rows are read and shared out."""


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
    if step != 2:
        kept = replace(kept, known_labels=config.labels)
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
    paths, evaluation = (
        [_hashed(path) for path in reader.read(names, wanted, step=step, notes=notes)]
        if names
        else []
        for names in (config.path, config.eval_path)
    )
    shared = share_out(paths, evaluation, config, earlier, uses, notes, step=step, share=share)
    use = uses[step] if share is None else share.use
    return StageData(
        as_used([row.example for row in shared.train], use),
        as_used([row.example for row in shared.eval], use),
        notes,
        shared.prompts,
        [row.example for row in shared.held_out_prompts],
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


def _hashed(path: ReadPath) -> SharedPath[_Row]:
    train, held_out = (
        [_Row(prompt_hash(example), example) for example in examples]
        for examples in (path.train, path.eval)
    )
    return SharedPath(path.name, path.weight, train, held_out)
