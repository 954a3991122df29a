"""The duration of a plan's steps, by a coarse count of operations.

A forward pass takes two operations for each weight and token, a backward pass four. They run at a
share of the device's peak, with a minimum for each block of each pass. Unknown quantities, such as
the length of responses, are taken from the settings. The result is right within a factor of two or
three.
"""

import math

import torch

from pipeline.budget.machine import data_sheet_peak, measured_peak
from pipeline.budget.models import CountedModel, read_models
from pipeline.launch.local import query_gpus, share_of_cores
from pipeline.parallel.schedules import bubble
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


def speed_of(plan: Plan) -> tuple[float, str] | None:
    """Operations per second of a process of the plan, and their source; None of unknown GPUs."""
    share = f"{EFFICIENCY:.0%} of"
    if plan.machine.has_gpu:
        known = data_sheet_peak(plan.request.plan_for or " ".join(gpu.name for gpu in query_gpus()))
        if known is None:
            return None
        peak, card = known
        return EFFICIENCY * peak, f"{share} an {card}'s peak of {peak / 1e12:.0f} TFLOP/s"
    peak = measured_peak(torch.device("cpu"), torch.float32)
    basis = f"{share} the {peak / 1e9:.0f} GFLOP/s that a product of matrices reaches here now"
    return EFFICIENCY * peak / max(plan.machine.processes / share_of_cores(1), 1.0), basis


def estimate(plan: Plan, stage: Stage, preview: Preview, flops: float) -> float | str:
    """Seconds of a step at `flops` operations per second, or the reason why they are not known."""
    config, counts, tokens = plan.configs[stage.name], preview.counts, preview.tokens
    steps = preview.steps(config)
    if counts is None:
        return "not known before the rows are read"
    if tokens is None or steps is None:
        return "not known before the tokenizer is there"
    work = config.workload(plan.machine.world)
    models, unknown = read_models(work, plan.origins, has_gpu=plan.machine.has_gpu)
    if unknown:
        return "not known before the models are there"
    generation = work.generation
    new_tokens = RESPONSE * generation.new_tokens if generation is not None else 0.0
    row = tokens.row + (new_tokens if work.generates_first else 0.0)

    def forward(model: CountedModel, rows: int, times: int = 1) -> float:
        """Seconds of `times` forward passes over rows."""
        most = work.micro_batch_size * work.length * work.sequences_per_row
        least = max(1, math.ceil(rows * row / most)) * model.shape.layers * BLOCK_SECONDS
        return times * max(least, rows * row * 2 * model.parameters / flops)

    def generate(prompts: int) -> float:
        """Seconds of reading prompts and of a pass for each token of the responses."""
        model = next((each for each in models if generation and each.role == generation.role), None)
        if generation is None or model is None:
            return 0.0
        passes = -(-prompts // max(1, min(generation.slots, prompts))) * new_tokens
        all_tokens = prompts * (tokens.row + new_tokens)
        return max(
            passes * model.shape.layers * BLOCK_SECONDS, all_tokens * 2 * model.parameters / flops
        )

    rows, held_out = (-(-count // work.world) for count in (work.iteration_rows, counts.held_out))
    evaluations = 2 + (steps // config.eval_every if config.eval_every else 0)
    waits = bubble(work.parallel.pp, work.micro_batches)
    learning = [model for model in models if model.trained is not None]
    seconds = START + preview.seconds
    for model in learning:
        recomputes = model.trained is not None and model.trained.gradient_checkpointing
        passes = forward(model, rows, times=4 if recomputes else 3)
        seconds += steps * work.epochs * passes / (1 - waits)
    seconds += steps * sum(forward(model, rows, times=model.use.scored) for model in models)
    if work.generates_first:
        return seconds + steps * generate(rows) + (1 + 2 * evaluations) * generate(held_out)
    seconds += steps * work.iteration_rows * tokens.seconds
    seconds += evaluations * (forward(learning[0], held_out) + held_out * tokens.seconds)
    return seconds + (generate(generation.count) if generation is not None else 0.0)


def with_spread(seconds: float) -> str:
    """`5 min (2.5 min to 12 min)`."""
    shortest, longest = (in_words(seconds * factor) for factor in SPREAD)
    return f"{in_words(seconds)} ({shortest} to {longest})"


def in_words(seconds: float) -> str:
    """`40 s`, `5 min`, `3.5 h`, `2.1 days`."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * unit:
            number = seconds / unit
            return f"{number:.0f} {name}" if number >= 10 else f"{number:.2g} {name}"
    return f"{seconds:.0f} s"
