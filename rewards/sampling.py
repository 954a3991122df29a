"""Sample a model's responses to the prompts in a data path, and score them.

The commands `rewards.select` and `evaluation.winrate` use this module.
"""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config import EMBEDDED, DataConfig, RowColumns
from pipeline.data.examples import Example
from pipeline.data.rows.reading import read_paths
from pipeline.data.sharing.steps import load_examples
from pipeline.system.errors import DataError, require
from pipeline.system.logs import Progress
from rewards.config import RewardConfig
from rewards.contract import Episode, SourceResults
from rewards.mixture import Rewards

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """Rows, and the worker processes that score their responses."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names that differ from the usual ones, such as prompt=question."""

    limit: int | None = None
    """Maximum number of rows to read; null reads all."""

    timeout_seconds: float = 10.0
    """Maximum seconds per source call or request; longer ones fail."""

    workers: int = 2
    """Number of worker processes that compute rewards."""

    def __post_init__(self) -> None:
        for name in ("limit", "timeout_seconds", "workers", "max_new_tokens", "batch_size"):
            value = getattr(self, name, None)
            option = name.replace("_", "-")
            require(value is None or value > 0, f"--{option} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(ScoringConfig):
    """Prompts, and how responses to them are sampled."""

    prompts: str = ""
    """Rows with the prompts: a file, directory or Hub name, or `embedded`."""

    temperature: float = 1.0
    """Sampling temperature; 0 selects greedy decoding."""

    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""

    max_new_tokens: int = 256
    """Maximum number of tokens per response."""

    batch_size: int = 32
    """Number of responses sampled at once; it does not affect the results."""

    seed: int = 0
    """The same seed draws the same responses."""

    max_failures: float = 0.1
    """Fraction of the responses on which a source may fail; more failures stop the command."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.prompts), "--prompts is missing: pass rows with prompts")
        require(
            0 <= self.max_failures <= 1,
            f"--max-failures must be between 0 and 1, got {self.max_failures}",
        )


def read_prompts(
    config: SamplingConfig, columns: RowColumns, *, held_out: bool = False
) -> list[Example]:
    """Read the rows that contain a prompt, keeping the columns that reward sources read.

    Args:
        config: the data path and its limit.
        columns: columns to keep.
        held_out: whether to use the rows that no step trains on, if the path has any.

    Raises:
        DataError: the rows can't be read, or none contains a prompt.
    """
    if config.prompts == EMBEDDED:
        all_columns = replace(columns, all=True)
        splits = load_examples(DataConfig(), step=3, seed=config.seed, kept=all_columns)
        examples = splits.eval if held_out else splits.train
    else:
        notes: list[str] = []
        (splits,) = read_paths((config.prompts,), config.fields, columns, step=3, notes=notes)
        for note in notes:
            logger.info("%s", note)
        split = (splits.eval or splits.train) if held_out else splits.train
        examples = [example for example in split if example.prompt]
    if not examples:
        raise DataError(f"--prompts {config.prompts}: no row has a prompt")
    return examples[: config.limit]


def sample_responses(
    path: str, examples: Sequence[Example], config: SamplingConfig, *, num_samples: int = 1
) -> Iterator[list[Episode]]:
    """Sample `num_samples` responses to each prompt, as episodes with consecutive slots.

    Raises:
        ModelError: there is no model at `path`.
        DataError: a prompt is too long for the model.
    """
    from inference.responses import Prompt, Responder
    from inference.settings import Sampling
    from pipeline.models.hf.load import load_for_inference

    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    responder = Responder(*load_for_inference(path), sampling, num_samples=num_samples)
    encoded = [
        responder.encode(Prompt(None, example.prompt, None, example.origin)) for example in examples
    ]
    samples = responder.responses(encoded, first_row=0, batch_size=config.batch_size)
    slots = itertools.count()
    progress = Progress("respond", len(examples))
    progress.start()
    start_time = time.perf_counter()
    try:
        for done, (example, responses) in enumerate(zip(examples, samples, strict=True), start=1):
            yield [
                Episode(
                    prompt=example.prompt,
                    response=response.text,
                    extra=example.extra,
                    stopped=response.stop != "length",
                    num_tokens=len(response.token_ids),
                    slot=slot,
                )
                for response, slot in zip(responses, slots, strict=False)
            ]
            progress.update(done, {}, seconds=time.perf_counter() - start_time)
    finally:
        progress.stop()


def score_episodes(
    sources: Sequence[RewardConfig], batches: Iterable[list[Episode]], config: SamplingConfig
) -> tuple[list[list[Episode]], dict[str, SourceResults]]:
    """Score episodes with programs as the batches arrive, and then with reward models.

    Returns:
        The batches, and each source's results for all episodes.

    Raises:
        RewardError: a source failed on more episodes than `max_failures` allows.
    """
    programs = [source for source in sources if source.kind != "model"]
    results: dict[str, SourceResults] = {}
    if programs:
        with Rewards(
            programs,
            timeout_seconds=config.timeout_seconds,
            workers=config.workers,
            max_failures=config.max_failures,
        ) as rewards:
            for note in rewards.notes:
                logger.info("%s", note)
            submitted = []
            for batch in batches:
                rewards.submit(batch)
                submitted.append(batch)
            batches, results = submitted, rewards.checked_results()
    batches = list(batches)
    for source in sources:
        if source.kind == "model":
            from inference.reward_model import score_responses

            assert source.path is not None
            episodes = [episode for batch in batches for episode in batch]
            dialogues = [(episode.prompt, episode.response) for episode in episodes]
            stopped = [episode.stopped for episode in episodes]
            scores = score_responses(source.path, dialogues, stopped)
            results[source.name] = SourceResults([*scores], [None] * len(dialogues))
    return batches, {source.name: results[source.name] for source in sources}
