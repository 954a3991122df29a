"""The duration of a plan's steps, by a coarse count of operations.

Training, evaluation, generation and scoring are counted as the step makes them, at a share of the
device's peak, with a minimum for each block of each pass. Unknown quantities, such as the length of
responses, are taken from the settings. The result is right within a factor of two or three.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.budget.models import CountedModel, models_of
from pipeline.config import StepConfig, Workload
from pipeline.launch.local import gpu_names, share_of_cores
from pipeline.parallel.schedules import bubble
from pipeline.plan.memory import origins_of
from pipeline.plan.plan import Plan
from pipeline.plan.preview import Preview
from pipeline.plan.stage import Stage

RESPONSE = 0.6
"""Mean length of a response, as a share of the longest that settings allow."""

START = 12.0
"""Seconds of imports, loading and export."""

EFFICIENCY = 0.35
"""Share of the peak that computation reaches."""

BLOCK_SECONDS = 1e-3
"""Minimum of a block in a forward pass; a backward pass takes twice as long."""

SPREAD = (0.5, 2.5)
"""Factors of the shortest and the longest time that an estimate stands for."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step."""

    seconds: float

    def __str__(self) -> str:
        shortest, longest = (self.seconds * factor for factor in SPREAD)
        return f"about {in_words(self.seconds)} ({in_words(shortest)} to {in_words(longest)})"


@dataclass(frozen=True)
class Speed:
    """Operations per second of one process."""

    flops: float
    basis: str


def speed_of(plan: Plan) -> Speed | None:
    """The speed of a process of the plan; None where the machine's GPUs are not known."""
    import torch

    from pipeline.budget.flops import data_sheet_peak, measured_peak

    share = f"{EFFICIENCY:.0%} of"
    if plan.machine.has_gpu:
        known = data_sheet_peak(plan.request.plan_for or " ".join(gpu_names()))
        if known is None:
            return None
        peak, card = known
        return Speed(EFFICIENCY * peak, f"{share} an {card}'s peak of {peak / 1e12:.0f} TFLOP/s")
    peak = measured_peak(torch.device("cpu"), torch.float32)
    crowd = max(1.0, plan.machine.processes / share_of_cores(1))
    basis = f"{share} the {peak / 1e9:.0f} GFLOP/s that a product of matrices reaches here now"
    return Speed(EFFICIENCY * peak / max(crowd, plan.machine.processes), basis)


def estimate(plan: Plan, stage: Stage, preview: Preview, speed: Speed) -> Estimate | str:
    """The duration of a step, or the reason why there is no estimate."""
    config = plan.configs[stage.name]
    steps = preview.steps(config)
    if preview.counts is None:
        return "not known before the rows are read"
    if preview.tokens is None or steps is None:
        return "not known before the tokenizer is there"
    workload = config.workload(plan.machine.world)
    models = models_of(workload, origins_of(plan.configs), has_gpu=plan.machine.has_gpu)
    known = {model.role: model for model in models if model.module is not None}
    if len(known) < len(models):
        return "not known before the models are there"
    seconds = _Passes(config, workload, known, preview, speed.flops).seconds(steps)
    return Estimate(START + preview.seconds + seconds)


@dataclass(frozen=True)
class _Passes:
    """The passes of one process."""

    config: StepConfig
    workload: Workload
    models: Mapping[str, CountedModel]
    preview: Preview
    flops: float

    def seconds(self, steps: int) -> float:
        """Seconds of that many iterations and of the evaluations."""
        assert self.preview.counts is not None
        assert self.preview.tokens is not None
        work, generation = self.workload, self.workload.generation
        every = self.config.eval_every
        evaluations = 2 + (steps // every if every else 0)
        held_out = -(-self.preview.counts.held_out // work.world)
        rows = -(-work.iteration_rows // work.world)
        learning = sum(self._pass(use.role, rows, trains=True) for use in self._learning)
        learning *= work.epochs / (1 - self._bubble)
        learning += sum(
            use.scored * self._pass(use.role, rows)
            for use in work.models
            if use.role in self.models
        )
        if work.generates_first:
            compared = 1 + 2 * evaluations
            return steps * (learning + self._generate(rows)) + compared * self._generate(held_out)
        encoding = self.preview.tokens.seconds
        seconds = steps * (learning + work.iteration_rows * encoding)
        role = self._learning[0].role
        seconds += evaluations * (self._pass(role, held_out) + held_out * encoding)
        if generation is not None and generation.role in self.models:
            seconds += self._generate(generation.count)
        return seconds

    @property
    def _learning(self) -> list[CountedModel]:
        return [model for model in self.models.values() if model.trained is not None]

    @property
    def _bubble(self) -> float:
        """Share of their time in which the stages of a pipeline wait."""
        return bubble(self.workload.parallel.pp, self.workload.micro_batches)

    def _pass(self, role: str, rows: int, *, trains: bool = False) -> float:
        """Seconds of a pass over rows with their responses."""
        from pipeline.budget.flops import model_flops

        assert self.preview.tokens is not None
        work, model = self.workload, self.models[role]
        row = self.preview.tokens.row
        if work.generates_first and work.generation is not None:
            row += RESPONSE * work.generation.new_tokens
        length = round(row / work.sequences_per_row)
        flops = model_flops(model.present)
        recomputes = model.trained is not None and model.trained.gradient_checkpointing
        each = flops.train(length, recomputes=recomputes) if trains else flops.forward(length)
        most = work.micro_batch_size * work.length * work.sequences_per_row
        passes = max(1, math.ceil(rows * row / most))
        least = passes * flops.layers * BLOCK_SECONDS * (3 if trains else 1)
        return max(least, rows * row * each / self.flops)

    def _generate(self, prompts: int) -> float:
        """Seconds of reading prompts and of a pass for each token of the responses."""
        from pipeline.budget.flops import model_flops

        generation = self.workload.generation
        assert generation is not None
        assert self.preview.tokens is not None
        flops = model_flops(self.models[generation.role].present)
        slots = max(1, min(generation.slots, prompts))
        passes = -(-prompts // slots) * RESPONSE * generation.new_tokens
        tokens = prompts * (self.preview.tokens.row + RESPONSE * generation.new_tokens)
        return max(passes * flops.layers * BLOCK_SECONDS, tokens * flops.forward(1) / self.flops)


def in_words(seconds: float) -> str:
    """`40 s`, `5 min`, `3.5 h`, `2.1 days`."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * unit:
            number = seconds / unit
            return f"{number:.0f} {name}" if number >= 10 else f"{number:.2g} {name}"
    return f"{seconds:.0f} s"
