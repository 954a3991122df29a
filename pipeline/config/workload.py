"""The work of a step on each of its processes.

A step describes its models, batches and phases in these words (`StepConfig.workload`). Memory, time
and the plan are computed from the description: nothing below the steps knows one by name.
"""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.model import FrozenModelConfig, TrainedModelConfig
from pipeline.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model of a step, and what the step does with it."""

    role: str
    """The field of the step's settings."""

    settings: FrozenModelConfig
    """It learns where they are a `TrainedModelConfig`; without a path it is not there."""

    scores: bool = False
    """Whether it is a classifier rather than a language model."""

    sharded_like: TrainedModelConfig | None = None
    """Of a frozen model: the trained one whose sharding it shares at stage 3."""

    divided: bool = False
    """Of a frozen model: whether processes that compute each layer together do so with it too,
    where its layers can be divided."""

    phase_only: bool = False
    """Whether it is loaded for one phase alone: to generate after training, or to be compared."""

    scored: int = 0
    """Passes without gradients over each row of an iteration, before the model learns from it."""

    scores_entropy: bool = False
    """Whether those passes compute the entropy of each token."""

    text_length: int | None = None
    """Tokens of the texts that it also learns from, in passes of their own; None without texts."""

    keeps_best: bool = False
    """Whether a copy of its best weights is kept."""

    keeps_start: bool = False
    """Whether a copy of the weights that it began with is kept."""

    keeps_average: bool = False
    """Whether a moving average of its weights is kept."""

    @property
    def learns(self) -> bool:
        """Whether the step trains it."""
        return isinstance(self.settings, TrainedModelConfig)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The responses that a process generates."""

    role: str
    """The model that generates."""

    phase: Literal["each iteration", "after training"]

    count: int
    """Responses of an iteration, or after training, that are a process's share."""

    batch_size: int
    """Responses that a process generates at once, where there is room for that many."""

    prompt_length: int
    """Tokens of the longest prompt."""

    new_tokens: int
    """Tokens of the longest response."""

    group_size: int = 1
    """Responses to each prompt."""

    tensor_parallel: int = 1
    """Processes that generate together."""

    shared_by: int = 1
    """Processes, or groups of those, that have the same responses to generate, and share them."""

    keeps_replica: bool = False
    """Whether the weights that generate stay in memory while models train."""

    offloads_training: bool = False
    """Whether the optimizers' states leave the GPU while responses are generated."""

    @property
    def most_at_once(self) -> int:
        """Responses of the processes that generate together."""
        return -(-self.count // self.shared_by) * self.tensor_parallel

    @property
    def slots(self) -> int:
        """Sequences that a process has in its cache."""
        return min(self.batch_size, self.most_at_once)


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """The rows of a step that learns from a corpus, before it begins."""

    train: int = 0
    """Training rows of one pass over the corpus."""

    held_out: int = 0

    tokens: float = 0.0
    """Mean number of tokens of a row."""

    notes: tuple[str, ...] = ()
    """Notes on the files, for the user."""

    unread: str = ""
    """Why the rows are not known; empty where they are."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a step, cut among its processes, at its largest."""

    world: int
    """Processes."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How they are divided."""

    models: tuple[ModelUse, ...]
    """In the order in which they are loaded; of those that learn, the one the step is about first.
    """

    iteration_rows: int
    """Responses of a rollout, or rows of an optimizer step where nothing is generated, over all
    processes."""

    batch_size: int
    """Rows of an optimizer step, over all processes."""

    micro_batch_size: int
    """Rows of a micro-batch, at most."""

    sequences_per_row: int = 1

    length: int
    """Tokens of the longest sequence."""

    targets: int
    """Tokens of a sequence that a loss may count, at most."""

    generation: Generation | None = None

    epochs: int = 1
    """Passes over the rows of an iteration."""

    temperature: float = 1.0
    """Divisor of the logits."""

    learns_entropy: bool = False
    """Whether the loss has an entropy bonus."""

    uniform: bool = False
    """Whether every token of a loss has the same weight."""

    reuses_forward: bool = False
    """Whether models learn from the passes that scored a rollout, which wait for each other."""

    @property
    def data_rows(self) -> int:
        """Rows of the data that an iteration takes."""
        return self.iteration_rows // (self.generation.group_size if self.generation else 1)

    @property
    def shards(self) -> int:
        """Processes that share out the states of a model, or of a part of it."""
        return max(1, self.data_processes // self.parallel.replicas)

    @property
    def data_processes(self) -> int:
        """Processes, or groups of those that have the parts of a model, with shares of a batch."""
        return self.parallel.pipelines(self.world)

    @property
    def share(self) -> int:
        """Rows of an optimizer step that one process has, at most."""
        if self.generates_first and self.generation and self.batch_size == self.iteration_rows:
            return self.generation.count
        return -(-self.batch_size // self.data_processes)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        count = min(self.parallel.least_micro_batches or 1, self.share)
        return min(self.micro_batch_size, -(-self.share // count))

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch."""
        return self.sequences_per_row * self.rows

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a process in an optimizer step."""
        return -(-self.share // self.rows)

    @property
    def generates_first(self) -> bool:
        """Whether each iteration learns from responses that it generates."""
        return self.generation is not None and self.generation.phase == "each iteration"

    @property
    def compared(self) -> tuple[ModelUse, ...]:
        """The models that come when the step is done, to generate in addition to the others."""
        generates = self.generation.role if self.generation else None
        return tuple(use for use in self.models if use.phase_only and use.role != generates)

    def model(self, role: str) -> ModelUse:
        """The model of a role."""
        return next(model for model in self.models if model.role == role)

    def passes(self, role: str) -> int:
        """Backward passes of a model in an optimizer step."""
        return self.micro_batches * (1 if self.model(role).text_length is None else 2)
