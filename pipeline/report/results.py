"""What is known of a run: the results, metrics and sample answers of its steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Values = Sequence[float | None]
"""By prompt; None where a prompt has none."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step left behind; a step that was stopped has metrics only."""

    name: str
    finished: bool
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    eval: Mapping[str, object] = field(default_factory=dict)
    """Measured on held-out rows, before and after."""

    diverged: str = ""
    """When and why, where training left the finite numbers."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """All settings by dotted name, paths beside the step's directory written relative to it."""

    changed_settings: Mapping[str, object] = field(default_factory=dict)
    """Dotted names and values of those that differ from the defaults, of a finished step."""

    lab: Mapping[str, object] = field(default_factory=dict)
    """What the laboratory measured of a reward model."""

    training: str = ""
    """What tells it from another training in its place; empty of an unfinished one."""

    metrics: tuple[Mapping[str, object], ...] = ()
    """The lines of metrics.jsonl, without those of iterations that a guard undid."""

    events: tuple[Mapping[str, object], ...] = ()
    """The lines in which guards spoke up."""

    samples: int = 0
    """Responses of its own that it learned from."""

    @property
    def stage(self) -> str:
        """What the name begins with: `step3`, which methods that ran side by side share."""
        return self.name.partition("_")[0]

    def number(self, name: str) -> float | None:
        """The evaluation figure `name`; None where it is missing or was not finite."""
        return finite(self.eval.get(name))

    def has(self, figure: str) -> bool:
        """Whether the step was evaluated by that figure."""
        return figure in self.eval

    @property
    def reads_texts(self) -> bool:
        """Whether it learned from texts, which teach no answers."""
        return self.has("held_out_tokens")

    @property
    def method(self) -> str:
        """How it learned: `ppo`; of a step that knows no methods the end of its name."""
        method = self.settings.get("method")
        return method if isinstance(method, str) else self.name.partition("_")[2]

    @property
    def state(self) -> str:
        """How it ended, in words."""
        if self.diverged:
            return "diverged"
        return "finished" if self.finished else "not finished"

    @property
    def began_from(self) -> str | None:
        """The training or the path of the model that it began from; None where it is not known."""
        found = (line.get("began_from") for line in self.metrics)
        return next((origin for origin in found if isinstance(origin, str)), None)

    @property
    def exported(self) -> tuple[str, list[float | None]] | None:
        """(figure, its value for each held-out prompt) of the model that was exported."""
        for line in reversed(self.metrics):
            found = mapping(mapping(line.get("eval_by_prompt")).get("exported"))
            for figure, values in found.items():
                return figure, numbers(values)
        return None

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of every line that has a finite `name`."""
        pairs = ((finite(line.get("step")), finite(line.get(name))) for line in self.metrics)
        return [(step, value) for step, value in pairs if step is not None and value is not None]


@dataclass(frozen=True, kw_only=True)
class SampleAnswer:
    """One model's answer to a held-out prompt."""

    text: str
    score: float | None
    """By the reward model, or by all sources of rewards together."""

    stopped: bool
    """Ended by itself rather than at the length limit."""

    marks: Mapping[str, bool]
    """What a judge says, such as correct and polite; empty where there is none."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """By source of rewards; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A held-out prompt, answered by several models."""

    prompt: tuple[tuple[str, str], ...]
    """(role, content) of each message."""

    answers: Mapping[str, SampleAnswer]
    """By model, the earliest first: base, step1_sft, ..."""


@dataclass(frozen=True, kw_only=True)
class TalkAnswer:
    """The last model's answer to a prompt that was written by hand."""

    prompt: str
    answer: str
    right: bool
    """Correct and polite."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """All of an output directory."""

    steps: Mapping[str, StepResult]
    seconds: float
    samples: tuple[Sample, ...]

    talk: tuple[TalkAnswer, ...] = ()
    """Of the model to talk to; empty where there is no judge."""

    @property
    def methods(self) -> list[StepResult]:
        """The steps that ran side by side, each by a method of its own; none where one ran."""
        last = max((step.stage for step in self.steps.values()), default="")
        found = [step for step in self.steps.values() if step.stage == last]
        return found if len(found) > 1 else []

    def evaluated_by(self, figure: str) -> StepResult | None:
        """The last step that was evaluated by that figure."""
        return next(
            (step for step in reversed(list(self.steps.values())) if step.has(figure)), None
        )


def known(values: Values) -> list[float]:
    """Without those that are not known."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float]) -> float:
    """The mean; of nothing minus infinity, below every other."""
    return sum(values) / len(values) if values else -math.inf


def numbers(values: object) -> list[float | None]:
    """The numbers of a list, None for what is none."""
    return [finite(value) for value in values] if isinstance(values, list) else []


def finite(value: object) -> float | None:
    """`value` as a number, None if it is none or not finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: object) -> Mapping[str, object]:
    """`value` as a JSON object, empty if it is none."""
    return value if isinstance(value, dict) else {}
