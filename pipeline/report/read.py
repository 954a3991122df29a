"""Reading an output directory: whatever its steps left there, finished or not."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from pipeline.errors import DataError
from pipeline.origin import training_id
from pipeline.report.choice import model_to_talk_to, of_one_origin
from pipeline.report.guards import without_undone
from pipeline.report.lab import LAB
from pipeline.report.results import (
    Results,
    Sample,
    SampleAnswer,
    StepResult,
    TalkAnswer,
    finite,
    mapping,
)
from pipeline.settings.plain import portable

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
