"""The prompts of step 3."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.held_out import Prompt
from pipeline.data.batches import RowStream
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.data.sharing.prompts import PromptRecord, fingerprint
from pipeline.data.sharing.steps import load_step_rows
from pipeline.errors import ConfigError, DataError
from pipeline.parallel.mesh import current_mesh
from step3_ppo.config import PPOConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptBatch:
    """This process's prompts of a rollout, or of some of its groups."""

    groups: list[int]
    """Their groups in the rollout; group g belongs to process g % W."""

    prompts: list[Prompt]
    """Those of a group are the same, and adjacent."""

    keys: list[int]
    """Of the random numbers that sample each response; unique within the run."""

    @property
    def inputs(self) -> list[list[int]]:
        """Token ids of each."""
        return [prompt.input_ids for prompt in self.prompts]


ATTEMPT_KEYS = 2**40
"""Keys of one attempt, more than any run needs."""


@dataclass
class Prompts:
    """Prompts to learn from and prompts held out."""

    train: list[Prompt]
    held_out: list[Prompt]
    stream: RowStream
    """Row numbers of `train`, one iteration's at a time."""

    fingerprint: str
    """Of the rows that the training prompts come from."""

    group_size: int
    """Responses to each prompt."""

    record: PromptRecord
    """Of what this step and the earlier ones train on and hold out."""

    attempt: int = 0
    """Number of rollbacks; part of the keys, so that other responses are sampled after one."""

    def next_batch(self, groups: Sequence[int] | None = None) -> PromptBatch:
        """The stream's next prompts, one for each of these groups of a rollout; by default for all.

        A prompt's process follows from its group; the random numbers, from the number of prompts
        that the run has taken before and the number of rollbacks.
        """
        places = range(self.stream.batch_size) if groups is None else groups
        first = self.stream.position
        return self._batch(self.stream.take(len(places)), places, first, attempt=self.attempt)

    def first_batch(self) -> PromptBatch:
        """The prompts of the first iteration; does not advance the stream."""
        stream = self.stream
        rows = RowStream(num_rows=stream.num_rows, batch_size=stream.batch_size, seed=stream.seed)
        return self._batch(next(rows), range(stream.batch_size), 0, attempt=0)

    def _batch(
        self, rows: Sequence[int], groups: Sequence[int], first: int, *, attempt: int
    ) -> PromptBatch:
        size, data = self.group_size, current_mesh().data
        keys_before = attempt * ATTEMPT_KEYS + first * size
        own = [number for number, group in enumerate(groups) if group % data.size == data.rank]
        return PromptBatch(
            groups=[groups[number] for number in own],
            prompts=[self.train[rows[number]] for number in own for _ in range(size)],
            keys=[keys_before + number * size + sample for number in own for sample in range(size)],
        )


def load_prompts(chat: ChatFormat, config: PPOConfig) -> Prompts:
    """Read and encode the prompts; those over `max_prompt_length` are left out, and counted.

    Raises:
        DataError: no prompt is short enough.
        ConfigError: an iteration has fewer prompts than there are processes.
    """
    processes = current_mesh().data.size
    if config.prompts_per_rollout < processes:
        of_groups = f" in groups of {config.group_size}" if config.group_size > 1 else ""
        raise ConfigError(
            f"ppo.rollout_size {config.rollout_size}{of_groups} leaves some of {processes}"
            " processes without a prompt; raise it"
        )
    data = load_step_rows(config, step=3)
    train = _encode(data.train, chat)
    short = _short(train, config.max_prompt_length)
    encoded = _encode(data.eval, chat)
    held_out = _short(encoded, config.max_prompt_length)
    for name, kept, all_of_them in (("training", short, train), ("held-out", held_out, encoded)):
        if not kept:
            shortest = min(len(prompt.input_ids) for prompt in all_of_them)
            raise DataError(
                f"every {name} prompt is longer than ppo.max_prompt_length"
                f" {config.max_prompt_length} (the shortest has {shortest} tokens); raise it"
            )
        logger.info(
            "%d of %d %s prompts are longer than max_prompt_length %d and left out",
            len(all_of_them) - len(kept),
            len(all_of_them),
            name,
            config.max_prompt_length,
        )
    return Prompts(
        train=short,
        held_out=held_out,
        stream=RowStream(
            num_rows=len(short), batch_size=config.prompts_per_rollout, seed=config.seed
        ),
        group_size=config.group_size,
        fingerprint=fingerprint(data.train),
        record=data.prompts,
    )


def _encode(examples: Sequence[Example], chat: ChatFormat) -> list[Prompt]:
    return [
        Prompt(example.prompt, chat.encode_prompt(example.prompt), example.extra)
        for example in examples
    ]


def _short(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    return [prompt for prompt in prompts if len(prompt.input_ids) <= limit]
