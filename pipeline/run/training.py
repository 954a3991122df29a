"""Code shared by the training steps: command line, rows, evaluations, divergence."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from pipeline.budget.fit import check_memory
from pipeline.cli.options import parse_step
from pipeline.config import StepConfig, TrainedModelConfig
from pipeline.data.batches import RowStream, micro_batches
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.data.lengths import FitCheck, report_lengths, require_targets
from pipeline.data.sharing.prompts import PromptRecord, fingerprint
from pipeline.data.sharing.steps import StepData, load_step_rows, record_prompts
from pipeline.engine.checkpoint.parts import BestWeights, HealthMonitor, Stateful
from pipeline.engine.engine import Engine
from pipeline.models.hf.chat import load_chat
from pipeline.models.passes import Passes
from pipeline.parallel import launched
from pipeline.parallel.mesh import current_mesh, split_mesh
from pipeline.parallel.process_group import process_group
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.exporting import export_verified
from pipeline.run.run import Run
from pipeline.system.errors import DivergedError, ModelError
from pipeline.system.logs import configure_logging
from pipeline.system.threads import set_compute_threads
from pipeline.system.torch_process import gpu_numerics, use_expandable_segments
from pipeline.watchdog.process import watch_processes

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=StepConfig)


def run_step(config_class: type[C], train: Callable[[C], object], argv: Sequence[str]) -> None:
    """Call `train` with a step's settings, on torchrun's processes or on this process alone.

    Raises:
        ConfigError: a setting can't be used, or the step needs more memory than is available.
    """
    config = parse_step(config_class, argv)
    use_expandable_segments()
    set_compute_threads(config.threads)
    config.check_processes(launched.world_size())
    check_memory(config)
    parallel, timeout = config.parallel, config.timeout_seconds
    axes = {"replicas": parallel.replicas, "pp": parallel.pp, "tp": parallel.tp}
    axes["generating"] = config.workload(launched.world_size()).generating
    with (
        process_group(watch_processes, timeout),
        split_mesh(**axes, timeout_seconds=timeout) as mesh,
        gpu_numerics(tf32=config.tf32, deterministic=config.is_deterministic),
    ):
        configure_logging(is_main=mesh.is_main)
        train(config)


MAX_EVALUATIONS = 10
"""Default maximum number of evaluations per run, including the last one but not the first."""

MAX_EVAL_FRACTION = 0.08
"""Maximum fraction of a run's cost for evaluations after the first; the last one always runs."""

FORWARD_FRACTION = 1 / 3
"""Fraction of a training step taken by the forward pass; the backward pass takes twice as long."""

R = TypeVar("R")


class _RowSource(Protocol):
    """Rows, and the order in which a step trains on them."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def stream(self) -> Stateful: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def prompts(self) -> PromptRecord | None: ...


S = TypeVar("S", bound=_RowSource)


@dataclass(frozen=True)
class Rows:
    """The rows of a step, and the order in which it trains on them."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    data: StepData
    stream: RowStream
    """Row indices of `data.train`, one global batch at a time."""

    total_steps: int
    """Number of optimizer steps in the run."""

    @property
    def fingerprint(self) -> str:
        """Hash of the training rows: different rows have different fingerprints."""
        return fingerprint(self.data.train)

    @property
    def prompts(self) -> PromptRecord:
        """Prompts that this step and the earlier ones train on and hold out."""
        return self.data.prompts

    def next_examples(self) -> list[Example]:
        """Return the examples of the next global batch."""
        return [self.data.train[row] for row in next(self.stream)]


def load_rows(
    config: StepConfig,
    model: TrainedModelConfig,
    *,
    step: int,
    filter_rows: Callable[[StepData, ChatFormat], StepData] | None = None,
) -> Rows:
    """Read the step's rows, and load the tokenizer of the model that it trains.

    `filter_rows` filters rows before they are ordered.

    Raises:
        DataError: as raised by `pipeline.data.sharing.steps.load_step_rows`.
        ModelError, ConfigError: as raised by `pipeline.models.hf.chat.load_chat`.
    """
    chat = load_chat(model, config.data)
    data = load_step_rows(config, step=step)
    data = data if filter_rows is None else filter_rows(data, chat)
    stream = RowStream(num_rows=len(data.train), batch_size=config.batch_size, seed=config.seed)
    return Rows(
        chat.tokenizer, chat, data, stream, stream.num_steps(config.epochs, config.max_steps)
    )


@dataclass(frozen=True)
class Training(Generic[C, R, S]):
    """A model in training, on rows of type R from a source S, with settings of type C."""

    config: C
    """Settings, with `data.max_length` capped at the model's context."""

    model: nn.Module
    """The Hugging Face model, with its adapters if it has any."""

    engine: Engine
    rows: S
    held_out: Sequence[R]
    """The evaluation rows, encoded."""

    best: BestWeights
    checkpoints: Checkpoints
    eval_every: int

    passes: Passes
    """Passes over the micro-batches of a step."""

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due after `step`."""
        return step == self.rows.total_steps or step % self.eval_every == 0

    def export(self) -> None:
        """Write the model with its current weights to the output directory."""
        export_verified(self.passes, self.model, self.rows.tokenizer, self.config.output_dir)


def evaluation_interval(every: int | None, *, total_steps: int, cost: float) -> int:
    """Return the number of steps between evaluations; the last step is always evaluated.

    It depends only on settings and rows, never on a clock: the choice of the best weights must not
    depend on the speed of the machine.

    `every` is `eval_every`: a number of steps, 0 for the last step only, None for the default.
    `cost` is the cost of one evaluation, in training steps.
    """
    if every == 0:
        return total_steps
    if every is not None:
        return every
    affordable = int(MAX_EVAL_FRACTION * total_steps / max(cost, 1e-9))
    return math.ceil(total_steps / max(1, min(MAX_EVALUATIONS, affordable)))


def choose_eval_interval(config: StepConfig, rows: _RowSource, held_out: Sequence[object]) -> int:
    """Choose the interval between evaluations, for these training and held-out rows."""
    return evaluation_interval(
        config.eval_every,
        total_steps=rows.total_steps,
        cost=FORWARD_FRACTION * len(held_out) / config.batch_size,
    )


def set_up(
    config: C,
    model: nn.Module,
    engine: Engine,
    rows: S,
    held_out: Sequence[R],
    run: Run,
    guards: HealthMonitor | None = None,
    passes: Passes | None = None,
) -> Training[C, R, S]:
    """Record the step's prompts, set the evaluation interval, and load the state if resuming.

    The state includes `guards`, if any. `passes` is given if the model is a pipeline stage.
    """
    if rows.prompts is not None:
        record_prompts(rows.prompts, config)
    best = BestWeights(engine, keep=config.keep_best)
    checkpoints = Checkpoints(
        run,
        engines={"model": engine},
        parts={"stream": rows.stream, "best": best, "guards": guards},
        tokenizer=rows.tokenizer,
        data=rows.fingerprint,
        guards=guards,
    )
    every = choose_eval_interval(config, rows, held_out)
    passes = Passes(engine) if passes is None else passes
    return Training(config, model, engine, rows, held_out, best, checkpoints, every, passes)


def check_rows(data: StepData, rows_fit: FitCheck[Example], config: StepConfig) -> None:
    """Log how many of a step's training and evaluation rows are truncated.

    Raises:
        DataError: nothing is left to train on or to evaluate.
    """
    require_targets(data.train, data.eval, rows_fit, config.data)
    for name, examples in (("training", data.train), ("evaluation", data.eval)):
        report_lengths(examples, rows_fit, config.data, name=f"{name} {rows_fit.rows}")


def shard_rows(
    lengths: Sequence[int], config: StepConfig, model: TrainedModelConfig, *, sequences: int = 1
) -> list[list[int]]:
    """Return the row indices of this process's micro-batches in a global batch.

    `lengths` lists the number of tokens in each row. A row consists of at most `sequences`
    sequences, each of up to `data.max_length` tokens. If the model's reduction is deterministic,
    the micro-batches are the same for any number of processes.
    """
    deterministic = model.zero.reduction == "deterministic"
    data, parallel = current_mesh().data, config.parallel
    min_count = math.ceil(len(lengths) / config.micro_batch_size) if deterministic else None
    if parallel.micro_batches is not None or (parallel.pp > 1 and not deterministic):
        minimum = (parallel.min_micro_batches or 1) * data.size
        min_count = max(min_count or 1, min(minimum, len(lengths)))
    return micro_batches(
        lengths,
        max_tokens=sequences * config.micro_batch_size * config.data.max_length,
        num_processes=data.size,
        process=data.rank,
        min_count=min_count,
    )


@contextmanager
def exporting_best(
    run: Run, best: BestWeights, export: Callable[[], object], **trained: TrainedModelConfig
) -> Iterator[None]:
    """Export the best weights if training diverges in the `with` block, which is a step's loop.

    All processes call `export`, which writes the model. `trained` maps its name to its settings.

    Raises:
        DivergedError: training diverged; the message says what happened, what is kept, and the fix.
    """
    try:
        yield
    except DivergedError as error:
        outcome = "no weights are exported"
        if best.restore():
            export()
            outcome = f"the best evaluated weights, after step {best.step}, are exported"
        ((name, model),) = trained.items()
        setting, rate = model.peak_lr
        context = f"{run.name} diverged after step {run.step}"
        sentence = f"{context}: {error} ({name}.{setting} is {rate:g}); {outcome}"
        run.record_divergence(sentence)
        raise DivergedError(sentence) from None


def check_initial_metrics(path: str | None, metrics: Mapping[str, float]) -> None:
    """Reject a model whose metrics are not finite before training.

    Raises:
        ModelError: a metric of the first evaluation is infinite or not a number.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ModelError(
                f"{path}: the {name.replace('_', ' ')} is {value} before training; the model's"
                " weights contain infinities or NaNs, or its activations overflow (try fp32)"
            )


def check_finite(context: str, metrics: Mapping[str, float]) -> None:
    """Raise an error if a run's metrics are no longer finite.

    Raises:
        DivergedError: a metric is infinite or not a number.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise DivergedError(
                f"{name.replace('_', ' ')} {context} is {value}; lower the learning rate or,"
                " with precision fp16, use bf16 or fp32"
            )
