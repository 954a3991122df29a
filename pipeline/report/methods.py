"""Comparison of a run's methods at equal KL to the reference.

Each method has a curve of evaluations during training: a metric of sampled responses to the same
held-out prompts, as a function of the KL to the reference. Between evaluations, the KL and each
prompt's metric are interpolated linearly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.report.charts import Curve, DrawnChart, line_chart
from pipeline.report.figures import (
    Interval,
    Verdict,
    change_interval,
    get_verdict,
    join_names,
    mean_interval,
    nats,
    percent,
    score,
    share_interval,
    title,
)
from pipeline.report.results import (
    Results,
    StepResult,
    Values,
    finite,
    known,
    mapping,
    mean,
    numbers,
)
from pipeline.system.logs import format_duration

METRICS = {
    "judge": "correct and polite",
    "gold": "gold reward",
    "reward": "reward",
    "score": "reward model's score",
}
"""Metrics of responses, most trustworthy first."""

PROMPT_SETTINGS = ("data.", "seed", "max_prompt_length")
"""Prefixes of settings that affect which prompts are held out, except `NON_PROMPT_SETTINGS`."""

NON_PROMPT_SETTINGS = ("data.max_length", "data.train_on")

REWARD_SETTINGS = ("reward.path", "rewards", "missing_eos_score")
"""Prefixes of settings that affect rewards."""

RESPONSE_SETTINGS = ("temperature", "max_new_tokens", "environment", "max_turns")
"""Prefixes of settings that affect the responses to held-out prompts."""

DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a method at one point in its training."""

    step: float

    kl: float
    """Nats per response."""

    values: Values
    """The metric by prompt."""

    @property
    def mean(self) -> float:
        """Mean over the prompts with a known value."""
        return mean(known(self.values))


@dataclass(frozen=True)
class Method:
    """A method of the run, with its evaluations."""

    step: StepResult
    title: str

    evaluations: Sequence[Evaluation]
    """Evaluations in order, starting before training; empty if they can't be compared."""

    @property
    def is_measured(self) -> bool:
        """Whether the method was evaluated between its start and end."""
        return len(self.evaluations) > 2

    @property
    def max_kl(self) -> float:
        """The largest KL over all evaluations."""
        return max(evaluation.kl for evaluation in self.evaluations)


@dataclass(frozen=True)
class MethodAtKL:
    """A method at the KL that all methods have reached."""

    method: Method
    value: float
    interval: Interval | None

    against_best: Verdict | None
    """How the best method compares with this one on common prompts; None for the best."""


@dataclass(frozen=True)
class Comparison:
    """All methods of a run, compared by one metric."""

    metric: str
    methods: Sequence[Method]

    kl: float | None
    """The largest KL that all measured methods have reached; None if they can't be compared."""

    equal: Sequence[MethodAtKL]
    """Methods at that KL, best first."""

    notes: Sequence[str]
    """Sentences on limitations of the comparison, without trailing periods."""

    @property
    def sentence(self) -> str:
        """The comparison at equal KL in a sentence; empty if there is none."""
        if self.kl is None or len(self.equal) < 2:
            return ""
        best, *others = self.equal
        where = f"At equal KL ({nats(self.kl)}), {METRICS[self.metric]}"
        parts = [f"{where}: {best.method.title} {format_metric(self.metric, best.value)}"]
        phrases = {"better": "better than", "not distinguishable": "not distinguishable from"}
        for verdict in ("better", "not distinguishable", "worse"):
            matching = [other for other in others if other.against_best == verdict]
            names = [f"{e.method.title} ({format_metric(self.metric, e.value)})" for e in matching]
            parts += [f"{phrases.get(verdict, 'worse than')} {join_names(names)}"] if names else []
        return ", ".join(parts)


def compare_methods(results: Results) -> Comparison | None:
    """Compare the methods of a run; return None if there is only one or none has evaluations."""
    origins = [step.began_from for step in results.methods if step.began_from is not None]
    origin = max(origins, key=origins.count, default=None)
    comparable = [step for step in results.methods if step.began_from in (None, origin)]
    counts = {m: sum(bool(get_evaluations(step, m)) for step in comparable) for m in METRICS}
    metric = max(counts, key=lambda name: counts[name])  # the first of a tie
    if not counts[metric]:
        return None
    evaluations_by_step = {step.name: get_evaluations(step, metric) for step in comparable}
    methods = [
        Method(step, title(step.name, results), evaluations_by_step.get(step.name, ()))
        for step in results.methods
    ]
    measured = [method for method in methods if method.is_measured]
    steps = [method.step for method in methods if method.evaluations]
    prompts = _differing_settings(steps, PROMPT_SETTINGS)
    rewards = {"gold": ("gold",), "judge": ()}.get(metric, REWARD_SETTINGS)
    notes: list[str] = []
    if differing := prompts + _differing_settings(steps, (*rewards, *RESPONSE_SETTINGS)):
        notes.append(f"Settings of prompts, responses or rewards differ: {', '.join(differing)}")
    reasons = ((method, _limitation(method, method.step in comparable)) for method in methods)
    notes += [f"{method.title} {reason}" for method, reason in reasons if reason]
    kl = min((method.max_kl for method in measured), default=0.0)
    if kl <= 0 or len(measured) < 2 or prompts:
        return Comparison(metric, methods, None, (), notes)
    return Comparison(metric, methods, kl, _compare_at_kl(measured, kl, metric), notes)


def get_evaluations(step: StepResult, metric: str) -> list[Evaluation]:
    """Return the evaluations that have a KL and the metric by prompt, in training order."""
    result: list[Evaluation] = []
    for line in step.metrics:
        values = numbers(mapping(line.get("eval_by_prompt")).get(metric))
        number, kl = finite(line.get("step")), finite(line.get("eval_kl"))
        if known(values) and number is not None and kl is not None:
            result.append(Evaluation(number, kl, values))
    return result


def value_at(evaluations: Sequence[Evaluation], kl: float) -> list[float | None]:
    """Return the metric by prompt where the curve first reaches this KL, interpolated linearly.

    A prompt's metric is None if it has no value in one of the two evaluations.

    Raises:
        ValueError: the curve never reaches this KL.
    """
    if evaluations and evaluations[0].kl >= kl:
        return list(evaluations[0].values)
    for before, after in pairwise(evaluations):
        if after.kl >= kl:
            fraction = (kl - before.kl) / (after.kl - before.kl)
            return [
                None if a is None or b is None else (1 - fraction) * a + fraction * b
                for a, b in zip(before.values, after.values, strict=False)
            ]
    raise ValueError(f"no evaluation at a KL of {kl} or more")


def get_interval(metric: str, values: Values) -> Interval | None:
    """Return the 95% interval of a metric's mean over prompts, or None for fewer than 2 prompts."""
    items = known(values)
    if len(items) < 2:
        return None
    return share_interval(sum(items), len(items)) if metric == "judge" else mean_interval(items)


def difference_interval(metric: str, new: Values, old: Values) -> Interval | None:
    """Return the 95% interval of the mean difference on common prompts; None for fewer than 2."""
    pairs = zip(new, old, strict=False)
    changes = [a - b for a, b in pairs if a is not None and b is not None]
    if len(changes) < 2:
        return None
    if metric != "judge":
        return mean_interval(changes)
    gained, lost = (sum(max(0.0, sign * change) for change in changes) for sign in (1, -1))
    return change_interval(gained, lost, len(changes))


def format_metric(metric: str, value: float) -> str:
    """Format a value of the metric."""
    return percent(value) if metric == "judge" else score(value)


def _compare_at_kl(methods: Sequence[Method], kl: float, metric: str) -> list[MethodAtKL]:
    # Methods with larger rollouts evaluate more prompts; the first ones are common to all.
    count = min(len(point.values) for method in methods for point in method.evaluations)
    values = {method.step.name: value_at(method.evaluations, kl)[:count] for method in methods}
    ranked = sorted(methods, key=lambda method: -mean(known(values[method.step.name])))
    best = values[ranked[0].step.name]
    results: list[MethodAtKL] = []
    for method in ranked:
        items = values[method.step.name]
        interval = difference_interval(metric, best, items)
        verdict: Verdict = "not distinguishable" if interval is None else get_verdict(interval)
        against = None if method is ranked[0] else verdict
        results.append(MethodAtKL(method, mean(known(items)), get_interval(metric, items), against))
    return results


def _differing_settings(steps: Sequence[StepResult], prefixes: Sequence[str]) -> list[str]:
    """Return the settings with these prefixes that all steps record, but with different values."""
    recorded = [step.settings for step in steps if step.settings]
    names = set(recorded[0]).intersection(*recorded) - {*NON_PROMPT_SETTINGS} if recorded else ()
    named = sorted(name for name in names if name.startswith(tuple(prefixes)))
    return [name for name in named if len({repr(settings[name]) for settings in recorded}) > 1]


def _limitation(method: Method, same_origin: bool) -> str:  # noqa: FBT001
    """Return the reason why a method is not fully compared at equal KL, or "" if it is."""
    if not same_origin:
        return "started from a different model and is not compared"
    if not method.evaluations:
        return "has no evaluation of this metric"
    if not method.is_measured:
        return "was not evaluated between its start and end (eval_every) and is not compared"
    if method.max_kl <= 0:
        return "stayed at the reference (KL 0), so nothing is compared at equal KL"
    if method.step.state != "finished":
        return f"({method.step.state}) is compared up to its last evaluation"
    return ""


def header(comparison: Comparison) -> tuple[str, ...]:
    """Return the headers of all columns of the table except the first."""
    at_equal_kl = ("at equal KL", "the best is") if comparison.equal else ()
    columns = ("95% interval", "KL", "length", "stops", "time", "samples")
    return (METRICS[comparison.metric], *columns, *at_equal_kl)


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the table's rows, one per method: its title, then a cell for each header."""
    return [_row(method, comparison) for method in comparison.methods]


def table(comparison: Comparison) -> str:
    """Format the table as text, followed by the sentence and the notes."""
    cells = [("method", *header(comparison)), *rows(comparison)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in cells
    ]
    return "\n".join([*lines, *filter(None, (comparison.sentence, *comparison.notes))])


def _row(method: Method, comparison: Comparison) -> tuple[str, ...]:
    step, metric = method.step, comparison.metric
    exported = step.exported
    values = exported[1] if exported and exported[0] == metric and step.finished else []
    kl, length, stops = (step.metric(name) for name in ("kl", "length_after", "stop_rate"))
    missing = DASH if step.state == "finished" else step.state
    cells = [
        method.title,
        format_metric(metric, mean(known(values))) if known(values) else missing,
        _interval(metric, get_interval(metric, values)),
        DASH if kl is None else nats(kl),
        DASH if length is None else f"{length:.1f}",
        DASH if stops is None else percent(stops),
        format_duration(step.seconds) if step.finished else DASH,
        f"{step.samples:,}" if step.samples else DASH,
    ]
    if comparison.equal:
        equal = next((e for e in comparison.equal if e.method is method), None)
        if equal is None:
            return (*cells, DASH, DASH)
        within = f" ({_interval(metric, equal.interval)})" if equal.interval else ""
        cells += [format_metric(metric, equal.value) + within, equal.against_best or "this one"]
    return tuple(cells)


def _interval(metric: str, interval: Interval | None) -> str:
    return " to ".join(format_metric(metric, end) for end in interval) if interval else DASH


def draw_kl_chart(comparison: Comparison) -> DrawnChart:
    """Draw the methods' metric as a function of the KL to the reference."""
    curves = [
        Curve(method.title, [(point.kl, point.mean) for point in method.evaluations], measured=True)
        for method in comparison.methods
        if method.evaluations
    ]
    heading = f"{METRICS[comparison.metric]} by KL to the reference, nats per answer"
    picture = line_chart(curves, heading, size=(720, 320), marker=comparison.kl)
    note = "held-out prompts, sampled answers, during training"
    return DrawnChart(heading, note, [curve.name for curve in curves], picture)
