"""Settings that every step has, and those that may change while a run is interrupted."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.config.data import DataConfig, RowColumns, RowShare
from pipeline.config.model import FrozenModelConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.workload import RowCounts, Workload
from pipeline.errors import require
from pipeline.settings.plain import Option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True)
class SaveInterval:
    """How often a step's state is saved: every that many steps, or seconds."""

    steps: int | None = None
    seconds: int = 0

    @classmethod
    def parse(cls, text: int | str) -> "SaveInterval":
        """The interval that `100` (steps), `90s`, `15m` or `2h` stands for.

        Raises:
            ConfigError: it is none of them.
        """
        match = re.fullmatch(r"(\d+)([smh]?)", str(text).strip())
        require(
            match is not None and int(match[1]) > 0,
            "save_every takes a number of steps, such as 100, or a time, such as 90s, 15m or 2h,"
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
    """Name of the step in files of settings for several steps."""

    reads_dialogues: ClassVar[bool] = True
    """Whether it learns from rows in a chat format; else from a corpus."""

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{name: (name,) for name in ("seed", "save_every", "threads")},
        "replicas": ("parallel.replicas",),
        "tensor_parallel": ("parallel.tp",),
        "pipeline_parallel": ("parallel.pp",),
        "data_path": ("data.path",),
        "eval_path": ("data.eval_path",),
        "data_seed": ("data.seed",),
        "data_split": ("data.split",),
        "fields": ("data.fields",),
        "format": ("data.format",),
        "max_length": ("data.max_length",),
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
    """Further ones, where the step is one of those that run."""

    ALONE_OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Further ones, where no other step runs."""

    AT_LEAST: ClassVar[Mapping[str, str]] = {}
    """Settings that are raised to another one where an option sets that one."""

    output_dir: Path
    """Receives config.yaml, metrics.jsonl and the model."""

    data: DataConfig = field(default_factory=DataConfig)

    seed: int = 1234
    """Seed of the data order, sampling and new weights."""

    max_steps: int | None = None
    """Optimizer steps (iterations in step 3); null runs `epochs`."""

    epochs: float = 1.0
    """Passes over the training rows (num_train_epochs), where `max_steps` is null."""

    batch_size: int = 32
    """Sequences in an optimizer step, over all processes (pairs in step 2)."""

    micro_batch_size: int = 8
    """Sequences in one forward pass of one process (per_device_train_batch_size); changes memory
    and speed, not the result."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    threads: int | None = None
    """Processor threads of each process; null takes RLHF_THREADS, else one for each core of its
    share. Another number may round otherwise."""

    tf32: bool = False
    """Multiply fp32 matrices on GPUs in TF32, whose mantissa has 10 bits."""

    timeout_seconds: float = 1800.0
    """A process that keeps the others waiting for so long is named, and the step ends; more
    than one ever works alone."""

    eval_every: int | None = None
    """Evaluate every that many steps; null chooses, up to 10 times a run in at most 8 % of its
    work; 0 evaluates before and after only."""

    keep_best: bool = True
    """Export the weights of the best evaluation, for a copy of them in main memory; false exports
    the last ones."""

    log_every: int = 1
    """Steps between lines of metrics.jsonl."""

    trackers: tuple[Tracker, ...] = ()
    """Destinations of metrics besides metrics.jsonl: tensorboard, wandb."""

    save_every: int | str | None = "15m"
    """Time between checkpoints, such as 90s or 2h, or steps (save_steps); null saves only when a
    signal ends the run."""

    keep_last: int = 2
    """Checkpoints kept (save_total_limit), at least 2."""

    resume: bool = False
    """Continue from the newest checkpoint that verifies; without one, begin."""

    peak_tflops: float | None = None
    """Peak TFLOP/s of a device, for `mfu`; null takes those of a GPU's data sheet, or measures a
    product of matrices."""

    def __post_init__(self) -> None:
        require(
            self.peak_tflops is None or self.peak_tflops > 0,
            f"peak_tflops must be above 0, got {self.peak_tflops}",
        )
        require(
            self.timeout_seconds > 0,
            f"timeout_seconds must be above 0, got {self.timeout_seconds}",
        )
        positive = {
            name: getattr(self, name)
            for name in ("max_steps", "batch_size", "micro_batch_size", "threads", "log_every")
        }
        for name, value in positive.items():
            require(value is None or value > 0, f"{name} must be above 0, got {value}")
        require(
            self.eval_every is None or self.eval_every >= 0,
            f"eval_every must not be below 0, got {self.eval_every}",
        )
        require(self.epochs > 0, f"epochs must be above 0, got {self.epochs}")
        require(self.keep_last >= 2, f"keep_last must be at least 2, got {self.keep_last}")
        if self.save_every is not None:
            SaveInterval.parse(self.save_every)

    @classmethod
    def implied_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Settings by dotted name that follow from several options of train.py, or from others."""
        return {}

    @classmethod
    def without_short_forms(cls, options: list[Option]) -> list[Option]:
        """The options of the step's own command, its short forms spelled out."""
        return options

    @property
    def unused_roles(self) -> frozenset[str]:
        """Fields of models that the step, with these settings, does without."""
        return frozenset()

    def used_models(self) -> Mapping[str, FrozenModelConfig]:
        """The models that the step loads, by the field that names them."""
        models = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            role: model
            for role, model in models.items()
            if isinstance(model, FrozenModelConfig)
            and model.path is not None
            and role not in self.unused_roles
        }

    @property
    def learns_labels(self) -> bool:
        """Whether the column `label` of a row is what the step learns."""
        return False

    @property
    def row_columns(self) -> RowColumns:
        """Columns of the rows that the step reads in addition to the dialogue."""
        return RowColumns()

    def choose_rows(self, train: Any, held_out: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """The step's examples of the kind it learns from, to train and to evaluate.

        Raises:
            DataError: there are none, or they can't be learned from.
        """
        return train, held_out

    @property
    def row_share(self) -> RowShare | None:
        """Its rows, where they are not those of its number and kind."""
        return None

    def check_task_rows(self) -> None:  # noqa: B027  # steps that ask none have none to read
        """Read the rows of the tasks that the step's model is asked, where it is asked any.

        Raises:
            DataError: they can't be read, or lack what they need.
        """

    def check_corpus(self) -> None:  # noqa: B027  # steps that read dialogues have none
        """Whether the corpus of a step that learns from one is there.

        Raises:
            DataError, ConfigError: it is not.
        """

    def count_rows(self, tokenizer: "PreTrainedTokenizerBase | None") -> RowCounts:  # noqa: ARG002
        """The rows of a step that learns from a corpus, with the tokenizer of its model.

        Raises:
            DataError: the corpus can't be used with it.
        """
        return RowCounts(unread="the step reads no corpus")

    @abstractmethod
    def workload(self, world: int) -> Workload:
        """The work of the step on each process."""

    @property
    def save_interval(self) -> SaveInterval | None:
        """`save_every`, read."""
        return None if self.save_every is None else SaveInterval.parse(self.save_every)


FREE_SETTINGS = (
    *("output_dir", "resume", "save_every", "keep_last", "log_every", "trackers"),
    *("peak_tflops", "data.labels"),
    *("timeout_seconds", "threads", "micro_batch_size", "generation_batch_size"),
    "parallel.*",
    *("inference_tp_size", "replica", "offload_in_generation"),
    *("*.zero_stage", "*.zero.*", "*.gradient_checkpointing", "*.checkpoint_every", "*.kernels"),
)
"""Settings that may change between a run and its continuation: place, memory, speed. Where
`data.labels` changes rows, these differ, which is compared separately."""


def affects_result(name: str) -> bool:
    """Whether the setting of this dotted name decides what a run results in."""
    free = any(fnmatch(name, pattern) for pattern in FREE_SETTINGS)
    return not free or name.endswith(".zero.reduce_dtype")


LENGTH = ("max_steps", "epochs")
"""Settings of the number of steps: a run may take more when it continues, under a learning rate
that does not depend on it."""
