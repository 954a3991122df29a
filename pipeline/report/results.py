"""Results, metrics and sample answers of a run, read from its output directory, finished or not."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pipeline.cli import remark
from pipeline.errors import DataError, ModelError
from pipeline.origin import training_id
from pipeline.settings.plain import portable

LAB = "lab.json"
"""Figures of the laboratory, in the directory of a reward model."""

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


Line = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class GuardEvent:
    """A guard that spoke up."""

    step: int
    action: str
    """warn, rollback or stop."""

    sentence: str

    to: int | None
    """The step that the run went back to."""

    unit: str = "iteration"
    """What the run's steps are called."""

    @property
    def words(self) -> str:
        """What was done."""
        at = f"{self.unit} {self.to}" if self.to else "the start"
        if self.action == "stop":
            return f"ended with {at}"
        return f"back to {at}" if self.action == "rollback" else "warned"


def events_of(step: StepResult) -> list[GuardEvent]:
    """The events of the guards, in the order in which they came."""
    return [event for line in step.events if (event := event_of(line)) is not None]


def without_undone(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """(the lines of the course that the run ended on, the lines of guards).

    Of a run that went back to an iteration what it had logged of later ones is left out.
    """
    kept: list[Line] = []
    events: list[Line] = []
    for line in lines:
        guard = mapping(line.get("guard"))
        if not guard:
            kept.append(line)
            continue
        events.append(line)
        to = finite(guard.get("to"))
        if to is not None:
            kept = [each for each in kept if (finite(each.get("step")) or 0.0) <= to]
    return kept, events


def event_of(line: Line) -> GuardEvent | None:
    """The guard that spoke up in a line of metrics.jsonl, if one did."""
    guard = mapping(line.get("guard"))
    if not guard:
        return None
    to = finite(guard.get("to"))
    return GuardEvent(
        step=int(finite(guard.get("step")) or 0),
        action=str(guard.get("action", "")),
        sentence=str(guard.get("sentence", "")),
        to=None if to is None else int(to),
        unit=str(guard.get("unit", "iteration")),
    )


STEP = re.compile(r"step[0-9]_[a-z0-9]+")
"""Names of the directories of steps, in their order; a copy such as step3_ppo.old is none.

A method's directory may have more underscores: `step3_dr_grpo`, of a step whose settings say so.
"""

SAMPLES = "samples.json"
"""Answers to held-out prompts, in the directory of the step that compares models."""


def read_results(out: Path) -> Results:
    """Read whatever is in `out`: any of the steps, finished or not.

    Raises:
        DataError: there is no such directory, no step in it, or a file that can't be read.
    """
    if not out.is_dir():
        raise DataError(f"{out}: no such directory")
    summary = _read_object(out / "summary.json")
    summaries = mapping(summary.get("steps"))
    begun = {path.parent.name for path in out.glob("*/metrics.jsonl")}
    begun = {name for name in begun if STEP.fullmatch(name) or _is_of_method(out / name)}
    steps = {
        name: _read_step(out / name, mapping(summaries.get(name)))
        for name in sorted(begun | {str(name) for name in summaries})
    }
    if not steps:
        raise DataError(
            f"{out} holds no step's results: no summary.json and no <step>/metrics.jsonl"
        )
    seconds = finite(summary.get("seconds"))
    files = {name: out / name / SAMPLES for name in steps if (out / name / SAMPLES).is_file()}
    alike = {step.name for step in of_one_origin([steps[name] for name in files], steps)}
    files = {name: files[name] for name in sorted(files, key=lambda name: name not in alike)}
    furthest = model_to_talk_to(steps)
    talk = None if furthest is None else files.get(furthest.name)
    return Results(
        steps=steps,
        seconds=sum(step.seconds for step in steps.values()) if seconds is None else seconds,
        samples=_side_by_side([tuple(_samples(file)) for file in files.values()]),
        talk=() if talk is None else tuple(_talk(talk)),
    )


def _read_step(directory: Path, summary: Mapping[str, object]) -> StepResult:
    own = _read_object(directory / "result.json")
    result = {**own, **summary}
    metrics = directory / "metrics.jsonl"
    lines, events = without_undone(list(_lines(metrics)) if metrics.is_file() else [])
    return StepResult(
        name=directory.name,
        finished=bool(result),
        seconds=finite(result.get("seconds")) or 0.0,
        steps=int(finite(result.get("steps")) or 0),
        tokens=int(finite(result.get("tokens")) or 0),
        samples=int(finite(result.get("samples")) or 0),
        eval=mapping(result.get("eval")),
        diverged=str(_read_object(directory / "diverged.json").get("sentence", "")),
        training=training_id(own) if own else "",
        settings=_settings(directory),
        changed_settings=mapping(result.get("changed_settings")),
        lab=_read_object(directory / LAB),
        metrics=tuple(lines),
        events=tuple(events),
    )


def _is_of_method(directory: Path) -> bool:
    """Whether the settings in a directory name the method that it is called after."""
    stage, _, method = directory.name.partition("_")
    return bool(STEP.fullmatch(f"{stage}_x")) and _settings(directory).get("method") == method


def _settings(directory: Path) -> Mapping[str, object]:
    """The settings that a step recorded, by dotted name; empty where they can't be read."""
    try:
        settings = yaml.safe_load((directory / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return portable(settings) if isinstance(settings, dict) else {}


def _side_by_side(files: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """The first file's prompts, with the answers of every file that has the same one there."""
    joined: list[Sample] = []
    for place, sample in enumerate(files[0] if files else ()):
        same = [file[place] for file in files if file[place : place + 1]]
        answers = [each.answers for each in same if each.prompt == sample.prompt]
        joined.append(Sample(prompt=sample.prompt, answers=_first_of_each(answers)))
    return tuple(joined)


def _first_of_each(answers: Sequence[Mapping[str, SampleAnswer]]) -> dict[str, SampleAnswer]:
    """The first answer of every model, in the order in which the models come."""
    found: dict[str, SampleAnswer] = {}
    for each in answers:
        found |= {model: answer for model, answer in each.items() if model not in found}
    return found


def _samples(path: Path) -> Iterator[Sample]:
    rows = _read_object(path).get("rows", [])
    for row in rows if isinstance(rows, list) else []:
        yield Sample(
            prompt=tuple((str(turn["role"]), str(turn["content"])) for turn in row["prompt"]),
            answers={model: _answer(answer) for model, answer in row["answers"].items()},
        )


def _answer(answer: Mapping[str, object]) -> SampleAnswer:
    rewards = {name: finite(value) for name, value in mapping(answer.get("rewards")).items()}
    marks = {name: answer.get(name) for name in ("correct", "polite")}
    return SampleAnswer(
        text=str(answer.get("text", "")),
        score=finite(answer.get("score")),
        stopped=bool(answer.get("stopped", True)),
        marks={name: mark for name, mark in marks.items() if isinstance(mark, bool)},
        rewards={
            name.removeprefix("reward_"): value
            for name, value in rewards.items()
            if value is not None
        },
    )


def _talk(path: Path) -> Iterator[TalkAnswer]:
    rows = _read_object(path).get("talk", [])
    for row in rows if isinstance(rows, list) else []:
        yield TalkAnswer(
            prompt=str(row["prompt"]),
            answer=str(row["text"]),
            right=row.get("correct") is True and row.get("polite") is True,
        )


def _lines(path: Path) -> Iterator[Mapping[str, object]]:
    """The objects in a .jsonl file; a line that a killed process left unfinished is left out."""
    for line in path.read_text("utf-8").splitlines():
        try:
            yield mapping(json.loads(line))
        except json.JSONDecodeError:
            continue


def _read_object(path: Path) -> Mapping[str, object]:
    """The JSON object in `path`; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        return mapping(json.loads(path.read_text("utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None


def of_one_origin(
    methods: Sequence[StepResult], steps: Mapping[str, StepResult]
) -> list[StepResult]:
    """The methods that began from the same model, those of which it is not known included.

    That is the one which a step has left there now; where none began from such a model, the one
    that most began from.
    """
    origins = [method.began_from for method in methods if method.began_from is not None]
    now = [step.training for step in steps.values() if step.training in origins]
    chosen = next(iter(now or sorted(origins, key=origins.count, reverse=True)), None)
    return [method for method in methods if method.began_from in (None, chosen)]


def model_to_talk_to(steps: Mapping[str, StepResult]) -> StepResult | None:
    """The furthest finished step with a model that talks.

    Of methods side by side that began from one model it is the one whose exported model has the
    highest figure on held-out prompts, where they have the same one; else, and of equal ones, the
    first.
    """
    finished = [step for step in steps.values() if step.finished]
    talking = [
        step
        for step in finished
        if step.has("win_rate") or (step.has("perplexity_after") and not step.reads_texts)
    ]
    if not talking:
        return None
    last = [step for step in talking if step.stage == talking[-1].stage]
    furthest = of_one_origin(last, steps)
    exported = {step.name: found for step in furthest if (found := step.exported) is not None}
    if len(exported) < len(furthest) or len({figure for figure, _ in exported.values()}) > 1:
        return furthest[0]
    means = {name: mean(known(values)) for name, (_, values) in exported.items()}
    return max(furthest, key=lambda step: means[step.name])


def find_model(path: str, method: str | None = None) -> str:
    """`path`, or where it is the output directory of `train.py` the furthest model in there.

    Of methods that ran side by side it is the one whose model did best on held-out prompts; which
    one, and how to take another, is written to standard error.

    Args:
        path: a model directory, an output directory, or a name on the Hub.
        method: takes the model of this one.

    Raises:
        ModelError: the run has no model yet, or none of this method.
    """
    out = Path(path).expanduser()
    steps = {} if (out / "config.json").is_file() else _steps_in(out)
    if not steps:
        if method is not None:
            raise ModelError(
                f"--method chooses among the models of a run, and {path} is not an output directory"
                " of one; leave it out"
            )
        return path
    chosen = model_to_talk_to(steps)
    if chosen is None:
        raise ModelError(f"{path} has no finished model yet; finish its steps with --resume")
    beside = [each for each in steps.values() if each.stage == chosen.stage and each.finished]
    if method is not None:
        of_method = [each for each in beside if each.method == method]
        if not of_method:
            has = ", ".join(each.method for each in beside)
            raise ModelError(f"--method {method}: {path} has no finished model of it; it has {has}")
        chosen = of_method[0]
    others = ", ".join(each.method for each in beside if each is not chosen)
    hint = f"; --method takes another: {others}" if others and method is None else ""
    model = _model_of(out, chosen)
    remark(f"the model is {model}{hint}")
    return str(model)


def _steps_in(out: Path) -> dict[str, StepResult]:
    """What is in an output directory; nothing where it is none."""
    try:
        return dict(read_results(out).steps)
    except DataError:
        return {}


def _model_of(out: Path, step: StepResult) -> Path:
    directory = out / step.name
    return directory if (directory / "config.json").is_file() else directory / "actor"
