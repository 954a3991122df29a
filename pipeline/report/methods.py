"""Methods of one run side by side, above all where all have moved equally far from the reference.

Each method is drawn by its evaluations during training: what its sampled answers to the same
held-out prompts were worth, against the KL to the reference on these prompts. Between two
evaluations both are taken to change in proportion, prompt by prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from pipeline.progress import duration
from pipeline.report.charts import Frame, Scale, grid, path, picture, text
from pipeline.report.figures import listed, nats, percent, score, title
from pipeline.report.intervals import (
    Interval,
    Verdict,
    change_interval,
    mean_interval,
    share_interval,
    verdict_of,
)
from pipeline.report.results import (
    Results,
    StepResult,
    Values,
    finite,
    known,
    mean,
    numbers,
    of_one_origin,
)

FIGURES = {
    "judge": "correct and polite",
    "gold": "gold reward",
    "reward": "reward",
    "score": "reward model's score",
}
"""What the answers are measured by, the most trustworthy first."""

TRAINED_ON = ("reward", "score")
"""Those of the figures that training maximizes."""

PROMPTS = ("data.", "seed", "max_prompt_length")
"""Settings that decide which prompts are held out."""

NOT_PROMPTS = ("data.max_length", "data.train_on")
"""Settings that begin so and yet decide nothing about prompts."""

REWARDS = ("reward.path", "rewards", "reward_combine", "missing_eos_score")
"""Settings that decide what a reward counts."""

ANSWERS = ("temperature", "max_new_tokens", "environment", "max_turns")
"""Settings that decide how held-out prompts are answered."""


@dataclass(frozen=True)
class Evaluation:
    """A method at one point of its training."""

    step: float
    kl: float
    """Nats per answer."""
    values: Values
    """By prompt."""

    @property
    def mean(self) -> float:
        """Over the prompts whose value is known."""
        return mean(known(self.values))


@dataclass(frozen=True)
class Method:
    """One of the methods, with what is known of it."""

    step: StepResult
    title: str
    path: tuple[Evaluation, ...]
    """In the order of training, the start included; of another origin empty."""

    of_one_origin: bool
    """Whether it began from the model that the others began from."""

    @property
    def is_measured(self) -> bool:
        """Whether it was evaluated between its start and its end."""
        return len(self.path) > 2

    @property
    def reach(self) -> float:
        """The largest KL of an evaluation."""
        return max(each.kl for each in self.path)


@dataclass(frozen=True)
class AtEqualKL:
    """What a method is worth at a KL that all have reached."""

    method: Method
    value: float
    interval: Interval | None
    against_best: Verdict | None
    """What the best one is against it, by the prompts that both answered; None of the best."""


@dataclass(frozen=True)
class Comparison:
    """All that the report says of several methods."""

    figure: str
    methods: tuple[Method, ...]
    kl: float | None
    """The largest that all methods with evaluations on their way have reached."""
    equal: tuple[AtEqualKL, ...]
    """At that KL, the best one first."""
    notes: tuple[str, ...]
    """What stands in the way of a comparison, a sentence each, without full stops."""

    @property
    def sentence(self) -> str:
        """Who is better at equal KL; empty where there is no comparison."""
        if self.kl is None or len(self.equal) < 2:
            return ""
        best, *others = self.equal
        where = f"At equal KL of {nats(self.kl)}, {FIGURES[self.figure]}"
        parts = [f"{where}: {best.method.title} {shown(self.figure, best.value)}"]
        for verdict, words in _WORDS.items():
            found = [each for each in others if each.against_best == verdict]
            names = [f"{each.method.title} ({shown(self.figure, each.value)})" for each in found]
            parts += [f"{words} {listed(names)}"] if names else []
        return ", ".join(parts)


_WORDS: Mapping[Verdict, str] = {
    "better": "better than",
    "not told apart": "not told apart from",
    "worse": "worse than",
}


def compare_methods(results: Results) -> Comparison | None:
    """The methods of a run; None where it has one alone, or nothing by which to compare them."""
    alike = of_one_origin(results.methods, results.steps)
    figure = common_figure(alike)
    if figure is None:
        return None
    paths = {step.name: evaluations(step, figure) for step in alike}
    methods = tuple(
        Method(step, title(step.name, results), paths.get(step.name, ()), step.name in paths)
        for step in results.methods
    )
    measured = [method for method in methods if method.is_measured]
    evaluated = [method.step for method in methods if method.path]
    notes = (*_differences(evaluated, figure), *_unfinished(measured), *_missing(methods))
    kl = min((method.reach for method in measured), default=0.0)
    if kl <= 0 or len(measured) < 2 or any(note.startswith(_OTHER_PROMPTS) for note in notes):
        return Comparison(figure, methods, None, (), notes)
    return Comparison(figure, methods, kl, _at_equal_kl(measured, kl, figure), notes)


def common_figure(steps: Sequence[StepResult]) -> str | None:
    """The figure by prompt that most steps have, of such figures the most trustworthy one."""
    count = {figure: sum(bool(evaluations(each, figure)) for each in steps) for figure in FIGURES}
    most = max(count.values())
    return next((figure for figure in FIGURES if count[figure] == most), None) if most else None


def evaluations(step: StepResult, figure: str) -> tuple[Evaluation, ...]:
    """The evaluations that have the figure by prompt, and a KL, in the order of training."""
    found: list[Evaluation] = []
    for line in step.metrics:
        by_prompt, kl, at = (line.get(name) for name in ("eval_by_prompt", "eval_kl", "step"))
        values = numbers(by_prompt.get(figure)) if isinstance(by_prompt, Mapping) else []
        place, distance = finite(at), finite(kl)
        if known(values) and place is not None and distance is not None:
            found.append(Evaluation(place, distance, values))
    return tuple(found)


def value_at(path: Sequence[Evaluation], kl: float) -> list[float | None]:
    """Figures by prompt where the path first comes to this KL, in proportion between evaluations.

    A prompt is not known where it is not in either of them.

    Raises:
        ValueError: the path never comes there.
    """
    if path and path[0].kl >= kl:
        return list(path[0].values)
    for before, after in pairwise(path):
        if after.kl >= kl:
            share = (kl - before.kl) / (after.kl - before.kl)
            pairs = zip(before.values, after.values, strict=False)
            return [
                None if a is None or b is None else (1 - share) * a + share * b for a, b in pairs
            ]
    raise ValueError(f"no evaluation at a KL of {kl} or more")


def interval_of(figure: str, values: Values) -> Interval | None:
    """95 % of the mean of a figure over prompts; None for less than two of them."""
    count = known(values)
    if len(count) < 2:
        return None
    return share_interval(sum(count), len(count)) if figure == "judge" else mean_interval(count)


def difference_interval(figure: str, new: Values, old: Values) -> Interval | None:
    """95 % of the mean difference, on the prompts that both answered."""
    pairs = zip(new, old, strict=False)
    changes = [a - b for a, b in pairs if a is not None and b is not None]
    if len(changes) < 2:
        return None
    if figure != "judge":
        return mean_interval(changes)
    gained, lost = (sum(max(0.0, sign * change) for change in changes) for sign in (1, -1))
    return change_interval(gained, lost, len(changes))


def shown(figure: str, value: float) -> str:
    """A value of the figure in words."""
    return percent(value) if figure == "judge" else score(value)


def _at_equal_kl(methods: Sequence[Method], kl: float, figure: str) -> tuple[AtEqualKL, ...]:
    # The first prompts are common to all: a method with larger rollouts watches more of them.
    count = min(len(each.values) for method in methods for each in method.path)
    values = {method.step.name: value_at(method.path, kl)[:count] for method in methods}
    ranked = sorted(methods, key=lambda method: -mean(known(values[method.step.name])))
    best = values[ranked[0].step.name]
    found: list[AtEqualKL] = []
    for method in ranked:
        own = values[method.step.name]
        interval = difference_interval(figure, best, own)
        verdict: Verdict = "not told apart" if interval is None else verdict_of(interval)
        against = None if method is ranked[0] else verdict
        found.append(AtEqualKL(method, mean(known(own)), interval_of(figure, own), against))
    return tuple(found)


_OTHER_PROMPTS = "The held-out prompts differ"


def _differences(steps: Sequence[StepResult], figure: str) -> list[str]:
    """Sentences about settings that keep the methods from being compared."""
    found: list[str] = []
    if names := _differing(steps, PROMPTS):
        found.append(f"{_OTHER_PROMPTS} ({', '.join(names)}), so that nothing is compared by them")
    if figure in TRAINED_ON and (names := _differing(steps, REWARDS)):
        found.append(
            f"Rewards don't count alike in all methods ({', '.join(names)}): a gold reward would"
        )
    if figure == "gold" and (names := _differing(steps, ("gold",))):
        found.append("The gold rewards of the methods differ, so that they don't count alike")
    if names := _differing(steps, ANSWERS):
        found.append(
            f"Held-out prompts are not answered alike in all methods ({', '.join(names)}), which"
            " moves rewards and KL by itself"
        )
    return found


def _missing(methods: Sequence[Method]) -> list[str]:
    """Sentences about methods that have nothing to compare at equal KL."""

    def titles(chosen: Callable[[Method], bool]) -> str:
        return listed([method.title for method in methods if chosen(method)] or [""])

    found: list[str] = []
    if apart := titles(lambda each: not each.of_one_origin):
        found.append(
            f"At equal KL nothing is said of {apart}, which began from another model than"
            f" {titles(lambda each: each.of_one_origin)} (a new step 1, or another actor.path)"
        )
    if sparse := titles(lambda each: bool(each.path) and not each.is_measured):
        found.append(
            f"{sparse} kept no evaluation between start and end (eval_every), so that nothing is"
            " known of smaller KLs"
        )
    if absent := titles(lambda each: each.of_one_origin and not each.path):
        found.append(f"{absent} kept no evaluation that has this figure")
    if still := titles(lambda each: each.is_measured and each.reach <= 0):
        found.append(
            f"{still} never left the reference (KL 0), so that nothing is compared at equal KL"
        )
    return found


def _unfinished(methods: Sequence[Method]) -> list[str]:
    """Sentences about methods that are compared though they did not come to their end."""
    found: list[str] = []
    for state, end in _ENDS.items():
        if names := [method.title for method in methods if method.step.state == state]:
            found.append(f"Of {listed(names)}, which {end}, evaluations until then are compared")
    return found


_ENDS = {"diverged": "diverged", "not finished": "did not finish"}
"""What sentences say of a step, by its state."""


def _differing(steps: Sequence[StepResult], beginnings: Sequence[str]) -> list[str]:
    """Names of the settings with such beginnings in which the steps differ."""
    known = [step.settings for step in steps if step.settings]
    names = sorted({name for settings in known for name in settings} - {*NOT_PROMPTS})
    # A step without a setting of its own of that name does not differ in it.
    everywhere = [all(name in settings for settings in known) for name in names]
    names = [name for name, is_ in zip(names, everywhere, strict=True) if is_ or "." in name]
    # What is null in one step has a name for each of its parts in another.
    return [
        name
        for name in names
        if name.startswith(tuple(beginnings))
        and len({repr(settings.get(name)) for settings in known}) > 1
    ]


@dataclass(frozen=True)
class Row:
    """A method's row, in words; a dash where something is not known."""

    title: str
    cells: tuple[str, ...]
    """Under `heads`."""


DASH = "\N{EN DASH}"


def heads(comparison: Comparison) -> tuple[str, ...]:
    """The heads of the columns after the first."""
    of_equal = ("at equal KL", "the best is") if comparison.equal else ()
    ends = ("95 % interval", "KL", "length", "stops", "time", "samples")
    return (FIGURES[comparison.figure], *ends, *of_equal)


def rows(comparison: Comparison) -> list[Row]:
    """A row for each method."""
    return [_row(method, comparison) for method in comparison.methods]


def lines(comparison: Comparison) -> Iterator[str]:
    """The table as text, and below it the sentence and the notes."""
    table = [("method", *heads(comparison))]
    table += [(row.title, *row.cells) for row in rows(comparison)]
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    for first, *others in table:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
    yield from filter(None, (comparison.sentence, *comparison.notes))


def _row(method: Method, comparison: Comparison) -> Row:
    step, figure = method.step, comparison.figure
    ended = step.exported
    values = ended[1] if ended is not None and ended[0] == figure and step.finished else []
    kl, length, stops = (step.number(name) for name in ("kl", "length_after", "stop_rate"))
    return Row(
        method.title,
        (
            shown(figure, mean(known(values))) if known(values) else _instead(step),
            _interval(figure, interval_of(figure, values)),
            DASH if kl is None else nats(kl),
            DASH if length is None else f"{length:.1f}",
            DASH if stops is None else percent(stops),
            duration(step.seconds) if step.finished else DASH,
            f"{step.samples:,}" if step.samples else DASH,
            *_cells_at_equal_kl(method, comparison),
        ),
    )


def _cells_at_equal_kl(method: Method, comparison: Comparison) -> tuple[str, ...]:
    """The last two cells, where any method is compared there."""
    if not comparison.equal:
        return ()
    equal = next((each for each in comparison.equal if each.method is method), None)
    if equal is None:
        return DASH, DASH
    within = "" if equal.interval is None else f" ({_interval(comparison.figure, equal.interval)})"
    value = f"{shown(comparison.figure, equal.value)}{within}"
    return value, equal.against_best or "this one"


def _instead(step: StepResult) -> str:
    """What stands in place of a value."""
    return DASH if step.state == "finished" else step.state


def _interval(figure: str, interval: Interval | None) -> str:
    if interval is None:
        return DASH
    low, high = (shown(figure, end) for end in interval)
    return f"{low} to {high}"


FRAME = Frame(720, 320, 52, 16, 12, 40)

MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "M-3.5 -3.5H3.5V3.5H-3.5Z",
    "M0 -4.5L4.5 3.5H-4.5Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.5L4.5 -3.5H-4.5Z",
    "M-1.5 -5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z",
    "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
    "M0 -5L4.8 -1.5L2.9 4H-2.9L-4.8 -1.5Z",
    "M-5 -2H5V2H-5Z",
)
"""Outlines around (0, 0), one for each method."""

DASHES = ("none", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2", "1 4", "10 2 4 2", "3 6")
"""Of the lines between them."""

COLOURS = 4


@dataclass(frozen=True)
class Line:
    """How a method is drawn."""

    title: str
    colour: str
    dash: str
    mark: str


def lines_of(comparison: Comparison) -> list[Line]:
    """A line for each method, no two alike."""
    return [
        Line(
            method.title,
            f"c{place % COLOURS}",
            DASHES[place % len(DASHES)],
            MARKS[place % len(MARKS)],
        )
        for place, method in enumerate(comparison.methods)
    ]


def kl_chart(comparison: Comparison) -> Markup:
    """The evaluations of all methods, in the order of training; empty where there are none."""
    drawn = [method for method in comparison.methods if method.path]
    if not drawn:
        return Markup("")
    x, y = _scales(drawn, is_share=comparison.figure == "judge")
    middle = (FRAME.left + FRAME.width - FRAME.right) / 2
    parts = [
        *grid(FRAME, x, y),
        text(middle, FRAME.height - 6, "middle", "KL to the reference, nats per answer"),
    ]
    if comparison.kl is not None:
        at = Markup('<path class="equal" d="M{:.1f} {}V{}"><title>{}</title></path>')
        words = f"equal KL of {nats(comparison.kl)}"
        parts.append(at.format(x(comparison.kl), FRAME.top, FRAME.height - FRAME.bottom, words))
    for method, line in zip(comparison.methods, lines_of(comparison), strict=True):
        parts += _drawn(method, line, comparison.figure, x, y)
    label = f"{FIGURES[comparison.figure]} over the KL to the reference, by method"
    return picture(FRAME, parts, label)


def _scales(methods: Sequence[Method], *, is_share: bool) -> tuple[Scale, Scale]:
    kls = [each.kl for method in methods for each in method.path]
    values = [each.mean for method in methods for each in method.path]
    low, high = min(0.0, *kls), max(kls)
    room = 0.08 * (max(values) - min(values)) or 0.1
    least, most = min(values) - room, max(values) + room
    if is_share:
        least, most = max(0.0, least), min(1.0, most)
    return FRAME.x(low, high if high > low else low + 1.0), FRAME.y(least, most)


def _drawn(method: Method, line: Line, figure: str, x: Scale, y: Scale) -> list[Markup]:
    mark = Markup(
        '<path class="dot {}" transform="translate({:.1f} {:.1f})" d="{}"><title>{}</title></path>'
    )
    points = [(each.kl, each.mean) for each in method.path]
    # A line from the start to the end alone would look like a measured curve.
    joined = [path(points, x, y, f"line {line.colour}", line.dash)] if method.is_measured else []
    return [
        *joined,
        *(
            mark.format(
                line.colour,
                x(each.kl),
                y(each.mean),
                line.mark,
                f"{line.title}, step {each.step:g}: {shown(figure, each.mean)} at {nats(each.kl)}",
            )
            for each in method.path
        ),
    ]
