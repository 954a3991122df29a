"""Settings shared by the three steps.

One frozen dataclass per concern. A field's docstring is its `--help` text and its documentation.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from pipeline.engine.config import ZeroConfig
from pipeline.engine.element_wise import check_optimizer
from pipeline.engine.schedule_params import check_schedule_params
from pipeline.engine.schedules import SCHEDULES
from pipeline.errors import require, suggestion

EMBEDDED = "embedded"
"""As a model path: the embedded Llama and its tokenizer. As a data path: the embedded task."""

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Tracker = Literal["tensorboard", "wandb"]
Kernels = Literal["auto", "required", "off"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = "AdamW"
    """Element-wise class of torch.optim: AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax,
    Adadelta, ASGD or Rprop."""

    params: dict[str, bool | int | float | str | list[float]] = field(default_factory=dict)
    """Further arguments of that class: `{"momentum": 0.9, "nesterov": true}` with SGD."""

    lr: float = 1e-5
    """Peak learning rate (learning_rate), reached after the warm-up."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's first and second moment, for the classes that have them."""

    eps: float = 1e-8
    """Added to Adam's denominator, and to that of the other classes that have it."""

    weight_decay: float = 0.0
    """Weight decay, decoupled in AdamW, an L2 penalty in the other classes; biases, norms and other
    one-dimensional weights are exempt."""

    schedule: str = "cosine"
    """Course of the learning rate (lr_scheduler_type): linear, cosine, cosine_with_restarts,
    polynomial, constant or constant_with_warmup as in transformers; warmup, warmup_decay,
    warmup_cosine, one_cycle or lr_range_test as in DeepSpeed; noam or exponential as in BMTrain.
    `pipeline/engine/schedules.py` has the formulas."""

    schedule_params: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Parameters of the schedule where it has any: `{"power": 2}` with polynomial."""

    warmup_steps: int | None = None
    """Steps of the warm-up to `lr` (num_warmup_steps, warmup_num_steps); null takes
    `warmup_ratio`. one_cycle and lr_range_test have none."""

    warmup_ratio: float = 0.03
    """Share of the steps spent in the warm-up."""

    final_lr_ratio: float = 0.0
    """The schedule ends at this share of `lr` (cos_min_ratio), where it is linear, cosine,
    cosine_with_restarts, polynomial or warmup_cosine."""

    max_grad_norm: float | None = 1.0
    """Clip the global gradient L2 norm to this value; null turns clipping off."""

    def __post_init__(self) -> None:
        check_optimizer(self.name, self.params)
        require(
            self.weight_decay == 0 or self.name != "Rprop",
            f"optim.weight_decay must be 0: Rprop has none, got {self.weight_decay}",
        )
        require(self.lr > 0, f"optim.lr must be above 0, got {self.lr}")
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optim.betas must lie in [0, 1), got {self.betas}",
        )
        require(self.eps > 0, f"optim.eps must be above 0, got {self.eps}")
        require(
            self.weight_decay >= 0, f"optim.weight_decay must not be below 0: {self.weight_decay}"
        )
        require(
            0 <= self.warmup_ratio < 1,
            f"optim.warmup_ratio must lie in [0, 1), got {self.warmup_ratio}",
        )
        require(
            0 <= self.final_lr_ratio <= 1,
            f"optim.final_lr_ratio must lie in [0, 1], got {self.final_lr_ratio}",
        )
        require(
            self.schedule in SCHEDULES,
            f"optim.schedule {self.schedule} is no schedule;"
            f" {suggestion(self.schedule, SCHEDULES)}",
        )
        schedule = SCHEDULES[self.schedule]
        require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"optim.warmup_steps must not be below 0, got {self.warmup_steps}",
        )
        require(
            not self.warmup_steps or schedule.has_warmup,
            f"optim.warmup_steps must be null or 0: the schedule {self.schedule} has no warm-up",
        )
        require(
            self.final_lr_ratio == 0 or schedule.has_final_ratio,
            f"optim.final_lr_ratio must be 0: the schedule {self.schedule} does not heed it",
        )
        check_schedule_params(self.schedule, self.schedule_params)
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"optim.max_grad_norm must be above 0 or null, got {self.max_grad_norm}",
        )


DEFAULT_OPTIM = OptimConfig()
"""What a model has whose optimizer nobody has set: a step may put its own default in its place."""


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling of fp16, in DeepSpeed's words; no effect in other precisions."""

    loss_scale: float = 0.0
    """A fixed factor of the loss; 0 finds one as it goes (dynamic loss scaling)."""

    initial_scale_power: int = 16
    """The dynamic scale starts at 2 to this power."""

    loss_scale_window: int = 1000
    """Good steps in a row, after the first one, that double the dynamic scale."""

    hysteresis: int = 2
    """The overflow that halves the dynamic scale: the second by default, then every further one
    until the scale is doubled again."""

    consecutive_hysteresis: bool = False
    """Count only overflows in a row: every good step starts the count of `hysteresis` again."""

    min_loss_scale: float = 1.0
    """The dynamic scale never falls below this; a further overflow there stops the training."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.loss_scale) and self.loss_scale >= 0,
            f"fp16.loss_scale must be a finite number, 0 or above, got {self.loss_scale}",
        )
        require(
            0 <= self.initial_scale_power <= 127,
            "fp16.initial_scale_power must lie in [0, 127], the powers of 2 that fp32 holds, got"
            f" {self.initial_scale_power}",
        )
        require(
            self.loss_scale_window > 0,
            f"fp16.loss_scale_window must be above 0, got {self.loss_scale_window}",
        )
        require(self.hysteresis > 0, f"fp16.hysteresis must be above 0, got {self.hysteresis}")
        require(
            self.loss_scale > 0 or 0 < self.min_loss_scale <= self.initial_scale,
            "fp16.min_loss_scale must be above 0 and at most the initial scale,"
            f" {self.initial_scale:g}, got {self.min_loss_scale}",
        )

    @property
    def initial_scale(self) -> float:
        """The factor of the first step."""
        return float(self.loss_scale or 2.0**self.initial_scale_power)


LORA_RATE = 10.0
"""Learning rate of adapters over that of whole weights: the best rates found lie about ten times
higher (Schulman et al. 2025, "LoRA Without Regret"; Biderman et al. 2024, section 6)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021), through peft."""

    rank: int = 16
    """Rank r of the update B @ A (lora_dim)."""

    alpha: float = 32.0
    """The update is scaled by alpha / rank."""

    dropout: float = 0.0
    """Dropout on the adapter's input; 0 in step 3, where it would break the policy ratio."""

    targets: tuple[str, ...] = ("all-linear",)
    """Module names that get an adapter, as peft's target_modules (lora_module_name)."""

    lr: float | None = None
    """Learning rate of the adapters (lora_learning_rate); null is 10 times `optim.lr`, the rate of
    whole weights, as adapters need it."""

    def __post_init__(self) -> None:
        require(self.rank > 0, f"lora.rank must be above 0, got {self.rank}")
        require(self.alpha > 0, f"lora.alpha must be above 0, got {self.alpha}")
        require(0 <= self.dropout < 1, f"lora.dropout must lie in [0, 1), got {self.dropout}")
        require(bool(self.targets), 'lora.targets must name a module, or "all-linear"')
        require(self.lr is None or self.lr > 0, f"lora.lr must be above 0 or null, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig:
    """A model that only answers."""

    path: str | None = None
    """Hugging Face model id or local directory; null takes the output of the step before."""

    precision: Precision = "auto"
    """Number format of the weights (dtype); auto is bf16 on a GPU that has it, else fp32. On a CPU
    bf16 is fast only where the processor has instructions for it (AVX512-BF16, AMX)."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    allow_pickle: bool = False
    """Load weights that are there as a pickle alone (pytorch_model.bin), which may run code. Only
    for sources you trust; the Hub has older models as safetensors too."""


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig(FrozenModelConfig):
    """A model that learns: where it starts and how it is trained."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What processes share out: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    checkpoint_every: int = 1
    """With gradient_checkpointing, recompute every so-many-th block only, and keep the others."""

    lora: LoraConfig | None = None
    """Train adapters only; null trains all weights."""

    head_lr: float | None = None
    """Learning rate of a score head, which step 2 draws anew; null uses `optim.lr`."""

    fp16: LossScaleConfig = field(default_factory=LossScaleConfig)

    optim: OptimConfig = field(default_factory=lambda: DEFAULT_OPTIM)

    kernels: Kernels = "auto"
    """Kernels of our own (docs/kernels.md): auto uses those that this machine can build, required
    ends the run where one is missing, off leaves their work to PyTorch. They change memory and
    speed, and how attention in bf16 is rounded on a CPU."""

    @property
    def lora_lr(self) -> float:
        """Learning rate of the adapters, where there are any."""
        given = None if self.lora is None else self.lora.lr
        return LORA_RATE * self.optim.lr if given is None else given

    def __post_init__(self) -> None:
        self.zero.offload.check(self.zero_stage)
        require(
            self.head_lr is None or self.head_lr > 0,
            f"head_lr must be above 0 or null, got {self.head_lr}",
        )
        require(
            self.checkpoint_every > 0,
            f"checkpoint_every must be above 0, got {self.checkpoint_every}",
        )
        plain_adam = self.optim.name in ("Adam", "AdamW") and not self.optim.params.get("amsgrad")
        require(
            self.zero.offload.optimizer != "nvme" or plain_adam,
            "zero.offload.optimizer nvme keeps the two moments of Adam and AdamW on the disk, and"
            f" optim.name {self.optim.name} has others; use one of these, or cpu",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows a step reads and how they become tokens."""

    path: tuple[str, ...] = (EMBEDDED,)
    """Local .json, .jsonl, .csv, .tsv (all also .gz) or .parquet files, directories, or Hub names
    (data_path); each may end in `@split`, a split of a set, and `:weight`, its share of the
    mixture. `embedded` is the built-in task."""

    eval_path: tuple[str, ...] = ()
    """Rows for evaluation; empty holds out `eval_fraction` of `path`, or its test split."""

    eval_fraction: float = 0.1
    """Share of the prompts held out for evaluation where `eval_path` is empty."""

    seed: int = 0
    """Decides which prompts are held out and which step gets each other one (data_seed). It has
    nothing to do with the seed of training, and must be the same in all steps."""

    max_eval_rows: int = 256
    """At most this many rows are evaluated."""

    split: tuple[float, float, float] = (2.0, 4.0, 4.0)
    """Proportions of the prompts that steps 1, 2 and 3 see; no prompt is in two parts
    (data_split)."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names where they differ from the usual: `{"prompt": "question", "chosen": "good"}`."""

    format: str = "auto"
    """Chat format: auto (the tokenizer's own template, else human_assistant), tokenizer,
    human_assistant, chatml, llama2, llama3, alpaca, vicuna, plain, or a path to a Jinja file."""

    template_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the chat template: `{"enable_thinking": false}` (chat_template_kwargs). They are
    saved with the model."""

    template_date: str = "2026-01-01"
    """The date, as 2026-01-31, for chat templates that put today's into the prompt, so that tokens
    don't depend on the day of training."""

    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens whose prediction is trained: assistant turns only, or the whole dialogue."""

    max_length: int = 512
    """Prompt + response, in tokens (max_seq_len). What is longer loses its end in step 1, and its
    beginning in step 2, whose score is read at the end; step 3 has lengths of its own."""

    def __post_init__(self) -> None:
        require(bool(self.path), "data.path names no data; give a file, a directory or a Hub name")
        require(
            0 < self.eval_fraction < 1,
            f"data.eval_fraction must lie between 0 and 1, got {self.eval_fraction}",
        )
        require(
            self.max_eval_rows > 0, f"data.max_eval_rows must be above 0, got {self.max_eval_rows}"
        )
        check_split("data.split", self.split)
        require(
            _is_date(self.template_date),
            f"data.template_date must be a date as 2026-01-31, got {self.template_date}",
        )
        require(self.max_length > 1, f"data.max_length must be above 1, got {self.max_length}")


def check_split(name: str, split: Sequence[float]) -> None:
    """Raise `ConfigError`, which begins with `name`, unless the rows can be cut so."""
    require(
        all(part >= 0 and math.isfinite(part) for part in split) and sum(split) > 0,
        f"{name} needs three proportions of 0 or more that are not all 0, as 2,4,4; got"
        f" {','.join(f'{part:g}' for part in split)}",
    )


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class SaveInterval:
    """How often a step's state is saved: every so many steps, or seconds."""

    steps: int | None = None
    seconds: int = 0

    @classmethod
    def parse(cls, text: int | str) -> "SaveInterval":
        """Of `100` (steps), `90s`, `15m` or `2h`.

        Raises:
            ConfigError: it is none of them.
        """
        said = re.fullmatch(r"(\d+)([smh]?)", str(text).strip())
        require(
            said is not None and int(said[1]) > 0,
            f"save_every takes a number of steps, as 100, or a time, as 90s, 15m or 2h, got {text}",
        )
        assert said is not None
        number, unit = int(said[1]), said[2]
        return cls(number) if not unit else cls(None, number * SECONDS[unit])


SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What every step needs."""

    output_dir: Path
    """Receives config.yaml, metrics.jsonl and the model."""

    data: DataConfig = field(default_factory=DataConfig)

    seed: int = 1234
    """Seed of the data order, the sampling and the initialization of new weights."""

    max_steps: int | None = None
    """Optimizer steps (iterations of rollout and update in step 3); null runs `epochs`."""

    epochs: float = 1.0
    """Passes over the training rows (num_train_epochs), where `max_steps` is null."""

    batch_size: int = 32
    """Sequences in an optimizer step, over all processes (pairs in step 2)."""

    micro_batch_size: int = 8
    """Sequences in one forward pass of one process (per_device_train_batch_size); accumulation
    follows from it. It changes memory and speed, not the result."""

    threads: int | None = None
    """Processor threads of each process; null takes the variable RLHF_THREADS, else one for each
    core that is the process's share. Another number may round otherwise."""

    timeout_seconds: float = 1800.0
    """A process that keeps the others waiting for so long is named, and the step ends; more
    than the longest time that one process works alone."""

    eval_every: int | None = None
    """Evaluate every so many steps; null chooses, up to 10 times a run in at most 8 % of its work;
    0 evaluates before and after only."""

    keep_best: bool = True
    """Export the weights of the best evaluation, whichever step they came from, for a copy of the
    trained weights in main memory; false exports the last ones."""

    log_every: int = 1
    """Steps between lines of metrics.jsonl."""

    trackers: tuple[Tracker, ...] = ()
    """Where metrics go besides metrics.jsonl: tensorboard, wandb."""

    save_every: int | str | None = "15m"
    """Time between checkpoints, as 90s, 15m or 2h, or a number of steps (save_steps); null saves
    only when Ctrl-C or a scheduler ends the run."""

    keep_last: int = 2
    """Checkpoints that are kept (save_total_limit); at least 2, so that one may be damaged."""

    resume: bool = False
    """Go on from the newest checkpoint in `output_dir` that verifies; without one, begin."""

    def __post_init__(self) -> None:
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

    @property
    def save_interval(self) -> SaveInterval | None:
        """`save_every`, read."""
        return None if self.save_every is None else SaveInterval.parse(self.save_every)


FREE_SETTINGS = (
    *("output_dir", "resume", "save_every", "keep_last", "log_every", "trackers"),
    *("timeout_seconds", "threads", "micro_batch_size", "generation_batch_size"),
    *("inference_tp_size", "replica", "offload_in_generation"),
    *("*.zero_stage", "*.zero.*", "*.gradient_checkpointing", "*.checkpoint_every", "*.kernels"),
)
"""What may change while a run is interrupted: where it lies, memory and speed."""


def binds(name: str) -> bool:
    """Whether the setting of this dotted name decides what a run results in."""
    return not any(fnmatch(name, pattern) for pattern in FREE_SETTINGS)
