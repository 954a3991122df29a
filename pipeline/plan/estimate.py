"""How long the steps of a plan take, before anything is run.

Passes are counted as the steps make them - training, evaluation before and after, generation,
scoring - and timed by `pipeline.budget.speed`. What is not known beforehand, such as how long
answers will be, is taken from the settings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.budget.machine import Machine
from pipeline.budget.models import CountedModel, models_of
from pipeline.budget.shape import Shape
from pipeline.budget.speed import CpuSpeed, Speed, Work, gpu_speed
from pipeline.config import StepConfig
from pipeline.launch.local import gpu_names, share_of_cores
from pipeline.plan.memory import origins_of
from pipeline.plan.plan import Plan
from pipeline.plan.preview import Preview, rows_of_a_step
from pipeline.plan.request import Stage

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
    """Of a process of the plan; None where nothing is known of the machine's GPUs."""
    machine = plan.machine
    if machine.has_gpu:
        return gpu_speed(plan.request.plan_for or " ".join(gpu_names()))
    cores = share_of_cores(1)
    return CpuSpeed(share_of_cores(machine.processes), crowd=max(1.0, machine.processes / cores))


def estimate(plan: Plan, stage: Stage, preview: Preview, speed: Speed) -> Estimate | str:
    """How long a step takes, or in a few words why that can't be told."""
    config = plan.configs[stage.name]
    steps = preview.steps(config)
    if preview.data is None:
        return "not known before the rows are read"
    if preview.tokens is None or steps is None:
        return "not known before the tokenizer is there"
    models = models_of(
        config, origins_of(plan.configs), section=stage.section, has_gpu=plan.machine.has_gpu
    )
    work = {model.role: _work(model) for model in models if model.module is not None}
    if len(work) < len(models):
        return "not known before the models are there"
    count = _Count(config, stage.section, plan.machine, work, preview, speed)
    of_step = {"sft": count.sft, "reward": count.reward}.get(stage.section, count.ppo)
    return Estimate(START + preview.seconds + of_step(steps), speed.spread)


@dataclass(frozen=True)
class _Count:
    """The passes of one process."""

    config: StepConfig
    section: str
    machine: Machine
    work: Mapping[str, Work]
    preview: Preview
    speed: Speed

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.config, self.section, self.machine.world)

    @property
    def row(self) -> float:
        """Tokens of a row."""
        assert self.preview.tokens is not None
        return self.preview.tokens.row

    @property
    def encoding(self) -> float:
        """Seconds to encode a row."""
        assert self.preview.tokens is not None
        return self.preview.tokens.seconds

    @property
    def held_out(self) -> int:
        assert self.preview.data is not None
        return -(-len(self.preview.data.eval) // self.machine.world)

    def sft(self, steps: int) -> float:
        """Every process encodes all rows of a step, and computes its share."""
        model = self.work["model"]
        return (
            steps * self._train(model, rows=self.shape.share, sequences=1)
            + steps * (self.config.batch_size * self.encoding + self.speed.update(model))
            + self._evaluations(steps) * self._ask(model, rows=self.held_out, sequences=1)
        )

    def reward(self, steps: int) -> float:
        """Pairs; in the end the actor's answers are scored."""
        model, actor = self.work["model"], self.work.get("actor")
        settings: Any = self.config
        seconds = (
            steps * self._train(model, rows=self.shape.share, sequences=2)
            + steps * (self.config.batch_size * self.encoding + self.speed.update(model))
            + self._evaluations(steps) * self._ask(model, rows=self.held_out, sequences=2)
        )
        prompts = -(-settings.normalization_prompts // self.machine.world)
        return seconds + (0 if actor is None else self._generate(actor, prompts, self.row / 4))

    def ppo(self, steps: int) -> float:
        """Each iteration answers, scores, and learns from what it scored."""
        settings: Any = self.config
        actor, critic = self.work["actor"], self.work["critic"]
        rows = -(-rows_of_a_step(self.config) // self.machine.world)
        whole = self.row + ANSWERED * settings.max_new_tokens
        passes = float(-(-rows // self.config.micro_batch_size))

        def asked(role: str) -> float:
            model = self.work.get(role, actor)
            return self.speed.forward(model, tokens=rows * whole, length=whole, passes=passes)

        experience = sum(map(asked, ("actor", "reference", "critic", "reward")))
        learning = settings.ppo_epochs * sum(
            self.speed.train(model, tokens=rows * whole, length=whole, passes=passes)
            for model in (actor, critic)
        )
        minibatches = settings.ppo_epochs * -(-rows_of_a_step(self.config) // settings.batch_size)
        updates = minibatches * (self.speed.update(actor) + self.speed.update(critic))
        answers = self._generate(actor, rows, self.row)
        # Greedy and sampled answers to the held-out prompts, before and after; the base's once.
        compared = (1 + 4 * self._evaluations(steps) / 2) * self._generate(
            actor, self.held_out, self.row
        )
        return steps * (answers + experience + learning + updates) + compared

    def _evaluations(self, steps: int) -> int:
        every = self.config.eval_every
        return 2 + (steps // every if every else 0)

    def _train(self, model: Work, *, rows: int, sequences: int) -> float:
        """One optimizer step; micro-batches are filled by tokens, not by rows."""
        tokens = rows * self.row
        return self.speed.train(
            model,
            tokens=tokens,
            length=self.row / sequences,
            passes=self._passes(tokens, sequences),
        )

    def _ask(self, model: Work, *, rows: int, sequences: int) -> float:
        tokens = rows * self.row
        return rows * self.encoding + self.speed.forward(
            model,
            tokens=tokens,
            length=self.row / sequences,
            passes=self._passes(tokens, sequences),
        )

    def _passes(self, tokens: float, sequences: int) -> float:
        most = self.config.micro_batch_size * self.config.data.max_length * sequences
        return float(max(1, math.ceil(tokens / most)))

    def _generate(self, model: Work, prompts: int, prompt: float) -> float:
        """Prompts are read in passes of their own, then each step adds a token to all of them."""
        slots = max(1, min(self.shape.slots, prompts))
        rounds = float(-(-prompts // slots))
        new = ANSWERED * self.shape.new_tokens
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
        parameters=sum(param.numel() for param in params),
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
