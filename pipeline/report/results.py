"""A run's results, metrics and sample responses, read from its output directory."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pipeline.cli.options import print_notice
from pipeline.settings.fields import make_portable, read_step_config
from pipeline.system.errors import DataError, ModelError

LAB = "lab.json"
"""File with the results of `step2_reward.lab`, in the directory of a reward model."""

SAMPLES = "samples.json"
"""File with responses to held-out prompts, in the directory of a step that compares models."""

STEP_DIRECTORY = re.compile(r"step[0-9]_[a-z0-9_]+")
"""Pattern of the names of step directories."""

Values = Sequence[float | None]
"""Values by prompt; None for a prompt without a value."""

Line = Mapping[str, object]
"""A line of metrics.jsonl."""

Sample = dict[str, Any]
"""A row of samples.json: `prompt`, a list of messages, and `answers` by model."""


@dataclass(frozen=True, kw_only=True)
class GuardEvent:
    """A guard that tripped."""

    step: int
    action: str
    """warn, rollback or stop."""

    sentence: str

    to: int | None
    """The step whose state the run returned to, if any."""

    unit: str = "iteration"

    @property
    def effect(self) -> str:
        """Action that the guard took, as shown in the report."""
        at = f"{self.unit} {self.to}" if self.to else "the start"
        if self.action == "stop":
            return f"stopped with the model of {at}"
        return f"rolled back to {at}" if self.action == "rollback" else "warned"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step. An unfinished step has no evaluation and no totals."""

    name: str
    finished: bool
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    eval: Mapping[str, object] = field(default_factory=dict)
    """Evaluation metrics on held-out rows, before and after training."""

    diverged: str = ""
    """Sentence on when and why training diverged, if it did."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """All settings by dotted name; paths inside the output directory are relative."""

    changed_settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of a finished step that differ from the defaults."""

    lab: Mapping[str, object] = field(default_factory=dict)
    """Results of `step2_reward.lab` for the reward model."""

    metrics: tuple[Line, ...] = ()
    """Logged metrics, without iterations that were rolled back."""

    events: tuple[GuardEvent, ...] = ()
    """Guards that tripped, in order."""

    samples: int = 0
    """Number of sampled responses that the step trained on."""

    @property
    def stage(self) -> str:
        """Prefix of the name, such as `step3`, shared by the methods of one run."""
        return self.name.partition("_")[0]

    @property
    def method(self) -> str:
        """Training method, such as `ppo`, or else the step's name after the underscore."""
        method = self.settings.get("method")
        return method if isinstance(method, str) else self.name.partition("_")[2]

    @property
    def state(self) -> str:
        """The state: finished, not finished, or diverged."""
        if self.diverged:
            return "diverged"
        return "finished" if self.finished else "not finished"

    @property
    def is_pretraining(self) -> bool:
        """Whether the step trained on plain text (step 0)."""
        return self.has("held_out_tokens")

    def metric(self, name: str) -> float | None:
        """Return the evaluation metric `name`, or None if it is missing or not finite."""
        return finite(self.eval.get(name))

    def has(self, metric: str) -> bool:
        """Return whether the step's evaluation has that metric."""
        return metric in self.eval

    @property
    def began_from(self) -> str | None:
        """Training id or path of the initial model; None if unknown."""
        origins = (line.get("began_from") for line in self.metrics)
        return next((origin for origin in origins if isinstance(origin, str)), None)

    @property
    def start(self) -> str:
        """A description of the model that step 3 started from."""
        path = str(self.settings.get("actor.path", self.settings.get("model.path", "")))
        name = Path(path).name if self.settings else "step1_"
        is_step = re.fullmatch(r"step\d_.*", name) is not None
        return f"step {name[4]}" if is_step else "the starting model"

    @property
    def exported(self) -> tuple[str, list[float | None]] | None:
        """The exported model's metric, and its value for each held-out prompt; None if unknown."""
        for line in reversed(self.metrics):
            by_metric = mapping(mapping(line.get("eval_by_prompt")).get("exported"))
            for metric, values in by_metric.items():
                return metric, numbers(values)
        return None

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return the (step, value) pairs of all lines with a finite `name`."""
        pairs = ((finite(line.get("step")), finite(line.get(name))) for line in self.metrics)
        return [(step, value) for step, value in pairs if step is not None and value is not None]


@dataclass(frozen=True, kw_only=True)
class Results:
    """The contents of an output directory."""

    steps: Mapping[str, StepResult]
    seconds: float

    samples: Sequence[Sample]
    """Held-out prompts with the responses of several models, earliest model first."""

    @property
    def methods(self) -> list[StepResult]:
        """The last stage's steps if several methods ran; otherwise empty."""
        last = max((step.stage for step in self.steps.values()), default="")
        methods = [step for step in self.steps.values() if step.stage == last]
        return methods if len(methods) > 1 else []

    def last_step_with(self, metric: str) -> StepResult | None:
        """Return the last step with that metric."""
        steps = reversed(list(self.steps.values()))
        return next((step for step in steps if step.has(metric)), None)


def known(values: Values) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float]) -> float:
    """Return the mean, or minus infinity if there are no values."""
    return sum(values) / len(values) if values else -math.inf


def finite(value: object) -> float | None:
    """Return `value` as a number, or None if it is not a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(value: object) -> list[float | None]:
    """Return a list's items, or None for those that aren't finite numbers; [] if not a list."""
    return [finite(item) for item in value] if isinstance(value, list) else []


def mapping(value: object) -> Mapping[str, object]:
    """Return `value` if it is a JSON object, else an empty object."""
    return value if isinstance(value, dict) else {}


def parse_event(line: Line) -> GuardEvent | None:
    """Return the guard event in a line of metrics.jsonl, or None."""
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


def drop_rolled_back(lines: Iterator[Line]) -> tuple[list[Line], list[GuardEvent]]:
    """Return the metrics, except those that a rollback undid, and the guard events."""
    kept: list[Line] = []
    events: list[GuardEvent] = []
    for line in lines:
        event = parse_event(line)
        if event is None:
            kept.append(line)
            continue
        events.append(event)
        if event.to is not None:
            kept = [other for other in kept if (finite(other.get("step")) or 0.0) <= event.to]
    return kept, events


def read_results(out: Path) -> Results:
    """Read all steps in `out`, finished or not.

    Raises:
        DataError: the directory doesn't exist, has no step, or has a file that can't be read.
    """
    if not out.is_dir():
        raise DataError(f"{out}: no such directory")
    summary = _read_object(out / "summary.json")
    summaries = mapping(summary.get("steps"))
    started = {path.parent.name for path in out.glob("*/metrics.jsonl")}
    names = sorted({name for name in started if STEP_DIRECTORY.fullmatch(name)} | summaries.keys())
    steps = {name: _read_step(out / name, mapping(summaries.get(name))) for name in names}
    if not steps:
        raise DataError(f"{out} has no results: no summary.json and no <step>/metrics.jsonl")
    seconds = finite(summary.get("seconds"))
    samples = [_read_object(out / name / SAMPLES).get("rows") or [] for name in steps]
    return Results(
        steps=steps,
        seconds=sum(step.seconds for step in steps.values()) if seconds is None else seconds,
        samples=_merge_samples(cast("list[list[Sample]]", samples)),
    )


def _read_step(directory: Path, summary: Mapping[str, object]) -> StepResult:
    result = {**_read_object(directory / "result.json"), **summary}
    metrics = directory / "metrics.jsonl"
    lines, events = drop_rolled_back(_lines(metrics) if metrics.is_file() else iter(()))
    return StepResult(
        name=directory.name,
        finished=bool(result),
        seconds=finite(result.get("seconds")) or 0.0,
        steps=int(finite(result.get("steps")) or 0),
        tokens=int(finite(result.get("tokens")) or 0),
        samples=int(finite(result.get("samples")) or 0),
        eval=mapping(result.get("eval")),
        diverged=str(_read_object(directory / "diverged.json").get("sentence", "")),
        settings=make_portable(read_step_config(directory)),
        changed_settings=mapping(result.get("changed_settings")),
        lab=_read_object(directory / LAB),
        metrics=tuple(lines),
        events=tuple(events),
    )


def _merge_samples(files: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the first file's prompts, with the responses to the same prompts from all files."""
    merged: list[Sample] = []
    for index, sample in enumerate(next(filter(None, files), ())):
        rows = [file[index] for file in files if index < len(file)]
        answers: dict[str, Any] = {}
        for row in rows:
            if row["prompt"] == sample["prompt"]:
                answers |= {m: text for m, text in row["answers"].items() if m not in answers}
        merged.append({**sample, "answers": answers})
    return merged


def _lines(path: Path) -> Iterator[Line]:
    """Yield the objects in a .jsonl file, except a line that a killed process left incomplete."""
    for line in path.read_text("utf-8").splitlines():
        try:
            yield mapping(json.loads(line))
        except json.JSONDecodeError:
            continue


def _read_object(path: Path) -> Mapping[str, object]:
    """Read the JSON object in `path`; return an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        return mapping(json.loads(path.read_text("utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None


def find_chat_model(steps: Mapping[str, StepResult]) -> StepResult | None:
    """Return the latest finished step with a chat model, or None if there is none.

    Of several methods, choose the one whose exported model is best on held-out prompts if all have
    the same metric, otherwise the first.
    """
    chat_models = [
        step
        for step in steps.values()
        if step.finished
        and (step.has("win_rate") or (step.has("perplexity_after") and not step.is_pretraining))
    ]
    if not chat_models:
        return None
    latest = [step for step in chat_models if step.stage == chat_models[-1].stage]
    exported = {step.name: result for step in latest if (result := step.exported) is not None}
    if len(exported) < len(latest) or len({metric for metric, _ in exported.values()}) > 1:
        return latest[0]
    return max(latest, key=lambda step: mean(known(exported[step.name][1])))


def find_model(path: str, method: str | None = None) -> str:
    """Return `path` or, if it is an output directory of `train.py`, the latest model in it.

    `path` may also be a name on the Hub. Of several methods, `method` is chosen, or else the one
    whose model is best on held-out prompts. The choice is written to standard error.

    Raises:
        ModelError: the run has no model yet, or no model of this method.
    """
    out = Path(path).expanduser()
    steps: Mapping[str, StepResult] = {}
    if not (out / "config.json").is_file():
        with suppress(DataError):
            steps = read_results(out).steps
    if not steps:
        if method is not None:
            raise ModelError(
                f"--method selects a model of a run, but {path} is not a run's output directory;"
                " omit --method"
            )
        return path
    chosen = find_chat_model(steps)
    if chosen is None:
        raise ModelError(f"{path} has no finished model yet; finish it with train.py --resume")
    same_stage = [step for step in steps.values() if step.stage == chosen.stage and step.finished]
    if method is not None:
        of_method = [step for step in same_stage if step.method == method]
        if not of_method:
            has = ", ".join(step.method for step in same_stage)
            raise ModelError(f"--method {method}: {path} has no such finished model; it has {has}")
        chosen = of_method[0]
    others = ", ".join(step.method for step in same_stage if step is not chosen)
    hint = f"; select another with --method: {others}" if others and method is None else ""
    model = model_directory(out, chosen)
    print_notice(f"the model is {model}{hint}")
    return str(model)


def model_directory(out: Path, step: StepResult) -> Path:
    """Return the step's directory, or `actor` in it."""
    directory = out / step.name
    return directory if (directory / "config.json").is_file() else directory / "actor"
