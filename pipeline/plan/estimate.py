"""How long the steps of a plan take, before anything is run.

Passes are counted as the steps make them - training, evaluation before and after, generation,
scoring - and timed by `pipeline.budget.speed`. What is not known beforehand, such as how long
answers will be, is taken from the settings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.budget.models import CountedModel, models_of
from pipeline.budget.speed import CpuSpeed, Speed, Work, gpu_speed
from pipeline.config import Generation, StepConfig, Workload
from pipeline.launch.local import gpu_names, share_of_cores
from pipeline.parallel.schedules import bubble
from pipeline.plan.memory import origins_of
from pipeline.plan.plan import Plan
from pipeline.plan.preview import Preview
from pipeline.plan.stage import Stage

ANSWERED = 0.6
"""Of the longest response that settings allow, the length of one on the average."""

START = 12.0
"""Seconds of a step before its first pass and after its last: imports, loading, export."""

DECODED = 0.6
"""Of a plain pass over one token for each sequence, what decoding takes: its operators are replayed
without their Python."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step."""

    seconds: float
    spread: tuple[float, float]

    def __str__(self) -> str:
        shortest, longest = (self.seconds * factor for factor in self.spread)
        return f"about {in_words(self.seconds)} ({in_words(shortest)} to {in_words(longest)})"


def speed_of(plan: Plan) -> Speed | None:
    """The speed of a process of the plan; None where nothing is known of the machine's GPUs."""
    machine = plan.machine
    if machine.has_gpu:
        return gpu_speed(plan.request.plan_for or " ".join(gpu_names()))
    cores = share_of_cores(1)
    return CpuSpeed(share_of_cores(machine.processes), crowd=max(1.0, machine.processes / cores))


def estimate(plan: Plan, stage: Stage, preview: Preview, speed: Speed) -> Estimate | str:
    """How long a step takes, or in a few words why there is no estimate."""
    config = plan.configs[stage.name]
    steps = preview.steps(config)
    if preview.counts is None:
        return "not known before the rows are read"
    if preview.tokens is None or steps is None:
        return "not known before the tokenizer is there"
    workload = config.workload(plan.machine.world)
    models = models_of(workload, origins_of(plan.configs), has_gpu=plan.machine.has_gpu)
    work = {model.role: _work(model) for model in models if model.module is not None}
    if len(work) < len(models):
        return "not known before the models are there"
    counted = _Count(config, workload, work, preview, speed)
    return Estimate(START + preview.seconds + counted.seconds(steps), speed.spread)


@dataclass(frozen=True)
class _Count:
    """The passes of one process."""

    config: StepConfig
    workload: Workload
    work: Mapping[str, Work]
    preview: Preview
    speed: Speed

    @property
    def row(self) -> float:
        """Tokens of a row of the data."""
        assert self.preview.tokens is not None
        return self.preview.tokens.row

    @property
    def encoding(self) -> float:
        """Seconds to encode a row."""
        assert self.preview.tokens is not None
        return self.preview.tokens.seconds

    @property
    def held_out(self) -> int:
        """Held-out rows of a process."""
        assert self.preview.counts is not None
        return -(-self.preview.counts.held_out // self.workload.world)

    def seconds(self, steps: int) -> float:
        """Seconds of that many iterations and the evaluations beside them."""
        generation = self.workload.generation
        rows = -(-self.workload.iteration_rows // self.workload.world)
        seconds = steps * self._learning(rows)
        if self.workload.generates_first:
            assert generation is not None
            # Greedy and sampled responses to the held-out prompts, before and after; the base's
            # once.
            compared = 1 + 4 * self._evaluations(steps) / 2
            seconds += steps * (self._generate(generation, rows, self.row) + self._scoring(rows))
            return seconds + compared * self._generate(generation, self.held_out, self.row)
        # Every process encodes all rows of a step, and computes its share.
        seconds += steps * self.workload.iteration_rows * self.encoding
        seconds += steps * self._scoring(rows)
        seconds += self._evaluations(steps) * self._evaluation()
        if generation is not None and generation.role in self.work:
            # A row has two sequences, of each of which the prompt is about a half.
            seconds += self._generate(generation, generation.count, self.row / 4)
        return seconds

    def _learning(self, rows: int) -> float:
        """Passes over an iteration's rows of all models that learn, and their updates."""
        batches = -(-self.workload.iteration_rows // self.workload.batch_size)
        learning = 0.0
        for model in self.workload.models:
            if model.learns:
                work = self.work[model.role]
                learning += self._passes(work, rows, learns=True) / (1 - self._bubble)
                learning += batches * self.speed.update(work)
        return self.workload.epochs * learning

    @property
    def _bubble(self) -> float:
        """Share of their time in which the stages of a pipeline wait for each other."""
        parallel, count = self.workload.parallel, self.workload.micro_batches
        return bubble(parallel.schedule, parallel.pp, count, parallel.chunks)

    def _scoring(self, rows: int) -> float:
        """Passes without gradients over an iteration's responses."""
        return sum(
            model.scored * self._passes(self.work[model.role], rows)
            for model in self.workload.models
            if model.role in self.work
        )

    def _evaluation(self) -> float:
        """Passes of the model that learns over the held-out rows, which are encoded each time."""
        work = next(self.work[model.role] for model in self.workload.models if model.learns)
        return self.held_out * self.encoding + self._passes(work, self.held_out)

    def _evaluations(self, steps: int) -> int:
        every = self.config.eval_every
        return 2 + (steps // every if every else 0)

    def _passes(self, work: Work, rows: int, *, learns: bool = False) -> float:
        """Over rows with their responses; micro-batches are filled by tokens, not by rows."""
        workload = self.workload
        sequences = workload.sequences_per_row
        row = self.row
        if workload.generates_first and workload.generation is not None:
            row += ANSWERED * workload.generation.new_tokens
        most = workload.micro_batch_size * workload.length * sequences
        passes = float(max(1, math.ceil(rows * row / most)))
        run = self.speed.train if learns else self.speed.forward
        return run(work, tokens=rows * row, length=row / sequences, passes=passes)

    def _generate(self, generation: Generation, prompts: int, prompt: float) -> float:
        """Prompts are read in passes of their own, then each step adds a token to all of them."""
        model = self.work[generation.role]
        slots = max(1, min(generation.slots, prompts))
        rounds = float(-(-prompts // slots))
        new = ANSWERED * generation.new_tokens
        reading = self.speed.forward(model, tokens=prompts * prompt, length=prompt, passes=rounds)
        decoding = self.speed.forward(
            model, tokens=rounds * new * slots, length=1.0, passes=rounds * new
        )
        return reading + DECODED * decoding


def _work(model: CountedModel) -> Work:
    from pipeline.budget.flops import model_flops

    config = model.plain.config.get_text_config()
    params = list(model.present.parameters())
    return Work(
        flops=model_flops(model.present),
        hidden=config.hidden_size,
        vocabulary=0 if model.scores else config.vocab_size,
        parameters=model.parameters,
        trained=sum(param.numel() for param in params if param.requires_grad),
        narrow=model.settings.precision != "fp32",
    )


def in_words(seconds: float) -> str:
    """`40 s`, `5 min`, `3.5 h`, `2.1 days`."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * unit:
            number = seconds / unit
            return f"{number:.0f} {name}" if number >= 10 else f"{number:.2g} {name}"
    return f"{seconds:.0f} s"
