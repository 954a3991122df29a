"""Settings that every step has, and the description of a step's workload on each process.

Memory, time and the plan are computed from the workload (`StepConfig.workload`).
"""

import importlib.util
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.config.data import DataConfig, RowColumns, RowShare
from pipeline.config.model import FrozenModelConfig, TrainedModelConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.system.errors import counted, require


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model of a step, and how the step uses it."""

    role: str
    """Field of the step's settings that holds the model."""

    settings: FrozenModelConfig
    """Settings of the model; it is trained if they are a `TrainedModelConfig`."""

    scores: bool = False
    """Whether the model is a classifier rather than a language model."""

    sharded_like: TrainedModelConfig | None = None
    """Trained model whose sharding a frozen model shares at stage 3."""

    comparison_only: bool = False
    """Whether the model is loaded only after training, for a comparison."""

    scoring_passes: int = 0
    """Passes without gradients over each row of an iteration, before training on it."""

    text_length: int | None = None
    """Tokens per text if the model also trains on texts, in separate passes; otherwise None."""

    keeps_average: bool = False
    """Whether a moving average of its weights is kept, next to the optimizer's states."""

    host_copies: int = 0
    """Number of copies of weights in host memory: the best ones, and the initial ones."""

    @property
    def is_trained(self) -> bool:
        """Whether the step trains the model."""
        return isinstance(self.settings, TrainedModelConfig)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The responses that a process generates."""

    role: str
    """Field of the step's settings that holds the model that generates."""

    phase: Literal["each iteration", "after training"]

    count: int
    """Number of responses that a process generates per iteration, or after training."""

    batch_size: int
    """Maximum responses that a process generates at once."""

    prompt_length: int
    """Length of the longest prompt, in tokens."""

    new_tokens: int
    """Length of the longest response, in tokens."""

    group_size: int = 1
    """Responses per prompt."""

    tensor_parallel: int = 1
    """Number of processes that generate together."""

    shared_by: int = 1
    """Number of processes, or groups of processes, among which these responses are divided."""

    keeps_replica: bool = False
    """Whether the copy of the weights for generation stays in memory while models train."""

    offloads_training: bool = False
    """Whether the optimizers' states leave the GPU while responses are generated."""

    @property
    def max_concurrent(self) -> int:
        """Number of responses generated at once by the processes that generate together."""
        return -(-self.count * self.tensor_parallel // self.shared_by)

    @property
    def slots(self) -> int:
        """Maximum number of sequences in a process's cache."""
        return min(self.batch_size, self.max_concurrent)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step's workload on its busiest process."""

    world: int
    """Number of processes that train."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the processes are divided."""

    models: tuple[ModelUse, ...]
    """Models in loading order; the main model of the step precedes other trained ones."""

    iteration_rows: int
    """Responses per rollout, or rows per optimizer step without rollouts, over all processes."""

    batch_size: int
    """Rows per optimizer step, over all processes."""

    micro_batch_size: int
    """Maximum rows per micro-batch."""

    sequences_per_row: int = 1

    length: int
    """Length of the longest sequence, in tokens."""

    targets: int
    """Maximum number of tokens per sequence that enter a loss."""

    generation: Generation | None = None

    epochs: int = 1
    """Passes over the rows of an iteration."""

    reuses_forward: bool = False
    """Whether models backpropagate through the passes that scored a rollout."""

    compares_logits: bool = False
    """Whether the loss compares all logits with those of a teacher."""

    generating: int = 0
    """Number of processes that only generate, in addition to the `world`."""

    @property
    def rollouts(self) -> Generation | None:
        """The responses of a process that only generates; None if there is no such process."""
        if self.generating == 0 or self.generation is None:
            return None
        prompts = -(-self.data_rows // self.generating)
        return replace(self.generation, count=prompts * self.generation.group_size)

    @property
    def data_rows(self) -> int:
        """Number of data rows that an iteration uses."""
        return self.iteration_rows // (self.generation.group_size if self.generation else 1)

    @property
    def shards(self) -> int:
        """Number of processes that shard the states of a model, or of its model-parallel part."""
        return max(1, self.data_processes // self.parallel.replicas)

    @property
    def data_processes(self) -> int:
        """Number of processes, or model-parallel groups, that each have a share of the batch."""
        return self.parallel.num_pipelines(self.world)

    @property
    def process_rows(self) -> int:
        """Maximum rows per optimizer step on one process."""
        if self.generates_first and self.generation and self.batch_size == self.iteration_rows:
            return self.generation.count
        return -(-self.batch_size // self.data_processes)

    @property
    def micro_batch_rows(self) -> int:
        """Rows per micro-batch."""
        count = min(self.parallel.min_micro_batches or 1, self.process_rows)
        return min(self.micro_batch_size, -(-self.process_rows // count))

    @property
    def sequences(self) -> int:
        """Sequences per micro-batch."""
        return self.sequences_per_row * self.micro_batch_rows

    @property
    def micro_batches(self) -> int:
        """Micro-batches per process and optimizer step."""
        return -(-self.process_rows // self.micro_batch_rows)

    @property
    def generates_first(self) -> bool:
        """Whether each iteration trains on responses that it generates."""
        return self.generation is not None and self.generation.phase == "each iteration"


Tracker = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class SaveInterval:
    """Interval between checkpoints, in steps or seconds."""

    steps: int | None = None
    seconds: int = 0

    @classmethod
    def parse(cls, text: int | str) -> "SaveInterval":
        """Parse an interval: `100` (steps), `90s`, `15m` or `2h`.

        Raises:
            ConfigError: the text is not an interval.
        """
        match = re.fullmatch(r"(\d+)([smh]?)", str(text).strip())
        require(
            match is not None and int(match[1]) > 0,
            "save_every must be a number of steps, such as 100, or a time, such as 90s, 15m or 2h,"
            f" got {text}",
        )
        assert match is not None
        number, unit = int(match[1]), match[2]
        return cls(number) if not unit else cls(None, number * SECONDS[unit])


SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class StepConfig(ABC):
    """Settings of every step."""

    section: ClassVar[str] = ""
    """Name of the step in settings files for several steps."""

    reads_dialogues: ClassVar[bool] = True
    """Whether the step trains on rows in a chat format; otherwise on a corpus."""

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{name: (name,) for name in ("seed", "save_every", "threads")},
        "replicas": ("parallel.replicas",),
        "tensor_parallel": ("parallel.tp",),
        "pipeline_parallel": ("parallel.pp",),
        **{f"data_{name}": (f"data.{name}",) for name in ("path", "seed", "split")},
        **{name: (f"data.{name}",) for name in ("eval_path", "fields", "format", "max_length")},
    }
    """Options of train.py, and the settings of the step that each of them sets."""

    RUN_OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "lr": ("model.optim.lr",),
        "batch_size": ("batch_size",),
        "epochs": ("epochs",),
        "lora": ("model.lora.rank",),
        "lora_variant": ("model.lora.variant",),
        "quantize": ("model.quantize",),
    }
    """Additional options of train.py that apply to each step that runs."""

    SINGLE_STEP_OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Additional options of train.py that apply if no other step runs."""

    METHODS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings of each method, by its name; empty for a step without methods."""

    MINIMUMS: ClassVar[Mapping[str, str]] = {}
    """For each setting, the setting that is its lower bound if an option sets the latter."""

    output_dir: Path
    """Directory of the step's output files."""

    data: DataConfig = field(default_factory=DataConfig)

    seed: int = 1234
    """Seed of the data order, sampling and new weights."""

    max_steps: int | None = None
    """Optimizer steps (in RL, iterations); null trains for `epochs`."""

    epochs: float = 1.0
    """Passes over the training rows (num_train_epochs) if `max_steps` is null."""

    batch_size: int = 32
    """Rows (sequences, or pairs of them) in an optimizer step, over all processes."""

    micro_batch_size: int = 8
    """Maximum rows in a process's forward pass (per_device_train_batch_size); affects memory and
    speed, not the result."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    threads: int | None = None
    """CPU threads per process; null uses RLHF_THREADS, or else one per core of the process's share.
    A different number may change rounding."""

    tf32: bool = False
    """Multiply fp32 matrices on GPUs in TF32, which has a 10-bit mantissa."""

    timeout_seconds: float = 1800.0
    """Seconds to wait for another process before the step fails and names it; must exceed
    the time of any work that one process does alone."""

    eval_every: int | None = None
    """Steps between evaluations; null evaluates up to 10 times, at a cost of at most 8% of
    the run; 0 evaluates only before and after it."""

    keep_best: bool = True
    """Export the weights of the best evaluation, at the cost of a copy in host memory; false
    exports the last ones."""

    log_every: int = 1
    """Steps between lines of metrics.jsonl."""

    trackers: tuple[Tracker, ...] = ()
    """Destinations of metrics in addition to metrics.jsonl."""

    save_every: int | str | None = "15m"
    """Time (90s, 15m, 2h) or steps (save_steps) between checkpoints; null saves only if a signal
    stops the run."""

    keep_last: int = 2
    """Checkpoints to keep (save_total_limit), at least 2."""

    resume: bool = False
    """Continue from the newest intact checkpoint; start from scratch if there is none."""

    def __post_init__(self) -> None:
        counts = ("max_steps", "batch_size", "micro_batch_size", "threads", "log_every", "epochs")
        for name in (*counts, "timeout_seconds"):
            value = getattr(self, name)
            is_valid = value is None or 0 < value < math.inf
            require(is_valid, f"{name} must be positive and finite, got {value}")
        require(
            self.eval_every is None or self.eval_every >= 0,
            f"eval_every must be at least 0, got {self.eval_every}",
        )
        require(self.keep_last >= 2, f"keep_last must be at least 2, got {self.keep_last}")
        if self.save_every is not None:
            SaveInterval.parse(self.save_every)

    @classmethod
    def implied_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Return settings, by dotted name, that follow from the `given` options of train.py."""
        return {}

    @property
    def unused_roles(self) -> frozenset[str]:
        """Fields of models that the step does not use with these settings."""
        return frozenset()

    def used_models(self) -> Mapping[str, FrozenModelConfig]:
        """Return the models that the step loads, by the name of their field."""
        models = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            role: model
            for role, model in models.items()
            if isinstance(model, FrozenModelConfig)
            and model.path is not None
            and role not in self.unused_roles
        }

    @property
    def trains_on_labels(self) -> bool:
        """Whether the step trains on the column `label` of a row."""
        return False

    @property
    def row_columns(self) -> RowColumns:
        """Columns of the rows that the step reads in addition to the dialogue."""
        return RowColumns()

    def choose_rows(self, train: Any, held_out: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Return the training and evaluation examples of the kind that the step learns from.

        Raises:
            DataError: there are no such examples, or none can be trained on.
        """
        return train, held_out

    @property
    def row_share(self) -> RowShare | None:
        """The rows that the step uses; None for the default of its step number."""
        return None

    def check_corpus(self) -> None:  # noqa: B027  # steps that read dialogues have no corpus
        """Check that the corpus exists if the step trains on one.

        Raises:
            DataError, ConfigError: the corpus does not exist.
        """

    @abstractmethod
    def workload(self, world: int) -> Workload:
        """Return the step's workload on each of a job's `world` processes."""

    def check_processes(self, world: int, *, section: str = "") -> None:
        """Check that a job's `world` processes can be divided as the settings require.

        Raises:
            ConfigError: the processes can't be divided, or all of them would only generate.
        """
        work, prefix = self.workload(world), f"{section}." if section else ""
        require(
            work.world > 0,
            f"{prefix}rollout_processes {work.generating} leaves none of the"
            f" {counted(world, 'process')} to train; lower it, or start more processes",
        )
        self.parallel.check(work.world, section=section)

    def require_trackers(self) -> None:
        """Raise ConfigError if the package of a tracker is not installed."""
        for name in self.trackers:
            require(
                importlib.util.find_spec(name) is not None,
                f"trackers: {name} is not installed; run `pip install {name}` or remove it from"
                " `trackers`",
            )

    @property
    def is_deterministic(self) -> bool:
        """Whether a model of the step sums its gradients in a fixed order."""
        values = [getattr(self, item.name) for item in fields(self)]
        trained = [value for value in values if isinstance(value, TrainedModelConfig)]
        return any(model.zero.reduction == "deterministic" for model in trained)

    def workload_of_rows(self, model: TrainedModelConfig, world: int) -> Workload:
        """Return the workload of training one language model on rows of `max_length` tokens."""
        return Workload(
            world=world,
            parallel=self.parallel,
            models=(ModelUse(role="model", settings=model, host_copies=self.keep_best),),
            iteration_rows=self.batch_size,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            length=self.data.max_length,
            targets=self.data.max_length - 1,
        )

    @property
    def save_interval(self) -> SaveInterval | None:
        """`save_every`, parsed."""
        return None if self.save_every is None else SaveInterval.parse(self.save_every)


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(StepConfig):
    """Settings of a step that may stop before its last optimizer step."""

    patience: int | None = None
    """Stop after this many evaluations without improvement; null never stops early."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.patience is None or self.patience > 0,
            f"patience must be positive or null, got {self.patience}",
        )
        require(
            self.patience is None or self.eval_every != 0,
            "patience counts evaluations, so eval_every must not be 0",
        )


CHANGEABLE_SETTINGS = (
    *("output_dir", "resume", "save_every", "keep_last", "log_every", "trackers"),
    *("data.labels", "timeout_seconds", "threads", "micro_batch_size", "generation_batch_size"),
    "parallel.*",
    *("inference_tp_size", "replica", "offload_in_generation", "reuse_forward"),
    *("*.zero_stage", "*.zero.*", "*.gradient_checkpointing", "*.kernels"),
)
"""Settings that can be changed when a run is resumed: location, memory, speed. Whether
`data.labels` changes rows is checked by comparing the rows themselves."""


def affects_result(name: str) -> bool:
    """Return whether the setting with this dotted name affects a run's result."""
    is_changeable = any(fnmatch(name, pattern) for pattern in CHANGEABLE_SETTINGS)
    return not is_changeable or name.endswith(".zero.reduce_dtype")
