"""The output directory of a run: its owner, finished steps, and replaceable files.

`OUT/<step>/config.yaml` marks a directory as a step's and records the settings;
`OUT/<step>/result.json` marks the step as finished. Replacing a step removes the files that steps
write (`OUTPUTS`) and nothing else. `OUT/command.txt` contains the run's shell command with paths as
typed, so that `--resume` alone repeats its options.
"""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.cli.options import split_options
from pipeline.config import StepConfig, affects_result
from pipeline.files.durable import replace_durably
from pipeline.files.lock import RunLock
from pipeline.plan.request import Request
from pipeline.plan.stage import INITIAL, Stage, all_directories
from pipeline.settings.fields import make_portable, read_step_config, to_plain
from pipeline.system.errors import ConfigError
from pipeline.system.installation import TRAIN

MARK = "config.yaml"
RESULT = "result.json"
METRICS = "metrics.jsonl"
DIVERGED = "diverged.json"
"""Marks a step whose training diverged: its state is unusable, so `--resume` starts it again."""
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
"""Lock file of a run's or a step's directory, which names the process that uses it."""
SUMMARY = "summary.json"
REPORT = "report.html"
COMMAND = "command.txt"
"""File with the command of the last run, whose options `--resume` repeats."""
JOB_SET = "jobset.yaml"
"""Manifest of a run on Kubernetes."""
RATINGS = "ratings.jsonl"
"""Ratings from the page of `python -m inference.serve --run`."""
AUTOTUNE = "autotune"
"""Directory of the autotuning trials and their results."""

RECORDS = (
    *(MARK, METRICS, "result.json*", "samples.json", DIVERGED, "*_prompts.hashes*"),
    *("lab.json", "predictions.jsonl", "reference.*", "trackers.json", "critic/*", "ema/*"),
    *("tensorboard/*", "wandb/*", ".writing-*/*", "checkpoints/*", LOCK, "tokens/*"),
)
"""Name patterns of the files that steps write in addition to their model."""

OUTPUTS = (
    *RECORDS,
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.jinja", "README.md*", "actor/*", "adapter/*"),
)
"""Name patterns of the files that steps write."""

SHARED = (
    *("seed", "data.path", "data.split", "data.format"),
    *("data.eval_path", "data.eval_fraction", "data.fields", "data.seed"),
)
"""Settings shared by all steps of a run."""


def finished_steps(
    request: Request,
    stages: Sequence[Stage],
    configs: Mapping[str, StepConfig],
    *,
    known: Sequence[Stage] | None = None,
) -> set[str]:
    """Return the names of the finished steps, which `--resume` skips; change nothing.

    `stages` are the steps that may run, and `known` those of all methods, by default `stages`.

    Raises:
        ConfigError: the output directory contains another run or foreign files, and neither
            `--resume` nor `--overwrite` is given; or it can't be used even with them.
    """
    out = request.output_dir
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--output-dir {out} is a file, not a directory")
    foreign = _foreign_files(out, known or stages)
    present = [stage for stage in stages if _files(out / stage.name)]
    for directory in (out / stage.name for stage in present):
        if not (directory / MARK).is_file():
            raise ConfigError(
                f"{directory} contains files that are not from a run (it has no {MARK}); move them"
                " or choose another --output-dir"
            )
    if foreign and not (request.resume or request.overwrite):
        raise ConfigError(
            f"--output-dir {out} contains files that are not from a run"
            f" ({', '.join(foreign[:3])}); choose another directory, or pass --resume or"
            " --overwrite, which keep them"
        )
    if not request.overwrite:
        for stage in present:
            first = next((other for other in stages if other.number in request.step), stage)
            _check_step(request, stage, configs[stage.name], first)
    return _skipped_steps(request, stages)


def clear_step(out: Path, name: str) -> None:
    """Remove only the files of an earlier run of this step, and its entry in summary.json."""
    directory = out / name
    if (directory / MARK).is_file():
        _remove(directory, [file for file in _files(directory) if _is_output(file)])
    steps = read_summary(out).get("steps", {})
    if name in steps:
        _write_summary(out, {step: result for step, result in steps.items() if step != name})


def _is_output(file: str) -> bool:
    """Return whether steps write a file of this name, relative to a step's directory."""
    return any(fnmatch(file, p) and ("/" in p or "/" not in file) for p in OUTPUTS)


def can_resume(out: Path, name: str) -> bool:
    """Return whether the step was interrupted and has a checkpoint."""
    directory = out / name
    ended = (directory / DIVERGED).exists() or (directory / RESULT).exists()
    return not ended and any((directory / CHECKPOINTS).glob("step_*"))


def discard_empty_step(out: Path, name: str) -> None:
    """Remove the directory of a step that stopped before it wrote any output.

    This leaves the output directory free for the corrected command.
    """
    directory = out / name
    files = _files(directory)
    written = {file for file in files if file != METRICS or (directory / file).stat().st_size > 0}
    if MARK in files and written <= {MARK, LOCK}:
        _remove(directory, files)


def _remove(directory: Path, files: Sequence[str]) -> None:
    """Remove files, and directories that become empty, including `directory`."""
    for file in files:
        (directory / file).unlink(missing_ok=True)
    nested = [path for path in directory.rglob("*") if path.is_dir() and not path.is_symlink()]
    for path in [*sorted(nested, reverse=True), directory]:  # deepest first
        if not any(path.iterdir()):
            path.rmdir()


@contextmanager
def lock_output(out: Path) -> Iterator[None]:
    """Lock the directory; on exit, remove it if it is empty or contains only `COMMAND`.

    Raises:
        ConfigError: another job is using the directory, or it can't be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {out} can't be created: {error}") from None
    try:
        with RunLock(out / LOCK):
            yield
    finally:
        with suppress(OSError):  # not empty
            if [path.name for path in out.iterdir()] == [COMMAND]:
                (out / COMMAND).unlink()
            out.rmdir()


def _files(directory: Path) -> list[str]:
    """Return the files below `directory`, relative to it, sorted."""
    files = (file for file in directory.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(str(file.relative_to(directory)) for file in files)


def add_to_summary(out: Path, name: str) -> None:
    """Add the finished step's result.json to summary.json.

    Raises:
        FileNotFoundError: the step exited without a result.
    """
    result = json.loads((out / name / RESULT).read_text(encoding="utf-8"))
    steps = read_summary(out).get("steps", {}) | {name: result}
    _write_summary(out, dict(sorted(steps.items())))


def read_summary(out: Path) -> dict[str, Any]:
    """Return the content of summary.json, or {} before the first step has finished."""
    try:
        return json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _write_summary(out: Path, steps: Mapping[str, Mapping[str, Any]]) -> None:
    seconds = sum(result.get("seconds", 0) for result in steps.values())
    text = json.dumps({"steps": steps, "seconds": round(seconds, 3)}, indent=2) + "\n"
    replace_durably(out / SUMMARY, text.encode())


def _foreign_files(out: Path, stages: Sequence[Stage]) -> list[str]:
    """Return the names of foreign files in the output directory, ignoring hidden ones."""
    known_names = {SUMMARY, REPORT, COMMAND, JOB_SET, AUTOTUNE, RATINGS, *all_directories(stages)}
    if not out.is_dir():
        return []
    # A run that is killed while it writes one of them leaves a temporary file.
    names = (path.name.removesuffix(".tmp").removesuffix(".partial") for path in out.iterdir())
    return sorted(name for name in names if name not in known_names and not name.startswith("."))


def _check_step(request: Request, stage: Stage, config: StepConfig, first: Stage) -> None:
    """Raise if the step's existing output conflicts with this run, whose first step is `first`."""
    directory = request.output_dir / stage.name
    difference = _find_difference(stage, directory, config, request)
    finished = (directory / RESULT).is_file()
    chosen = stage.number in request.step
    if chosen and request.resume:
        started = finished or can_resume(request.output_dir, stage.name)
        if started and difference:
            raise ConfigError(
                f"step {stage.number} in {directory} was {'finished' if finished else 'started'}"
                f" with {difference}; use that setting, choose another --output-dir, or pass"
                " --overwrite"
            )
    elif difference:
        name = difference.partition(" ")[0].partition(".")[2]
        options = f"--{first.section}.data.path and --{first.section}.data.eval_path"
        hint = f" (to use other rows only in {first.title}, pass {options})"
        raise ConfigError(
            f"--output-dir {request.output_dir} contains another run, with {difference}; use that"
            f" setting{hint if name in ('data.path', 'data.eval_path') and not chosen else ''},"
            " choose another directory, or pass --overwrite"
        )
    elif chosen:
        resumes = can_resume(request.output_dir, stage.name)
        effect = "resumes from its checkpoint" if resumes else "restarts it"
        raise ConfigError(
            f"step {stage.number} in {directory} is {'' if finished else 'not '}finished;"
            f" --resume {'skips it' if finished else effect}, --overwrite replaces it"
        )


def _skipped_steps(request: Request, stages: Sequence[Stage]) -> set[str]:
    """Return the finished steps that `--resume` skips: those before the first step to run."""
    chosen = [stage for stage in stages if stage.number in request.step]
    finished = {
        stage.name
        for stage in chosen
        if request.resume and (request.output_dir / stage.name / RESULT).is_file()
    }
    # Compared methods share one number: none of them follows another.
    first = min((stage.number for stage in chosen if stage.name not in finished), default=None)
    return {
        stage.name
        for stage in chosen
        if stage.name in finished and (first is None or stage.number <= first)
    }


def _find_difference(stage: Stage, directory: Path, config: StepConfig, request: Request) -> str:
    """Return the first difference, such as "sft.seed 1 where this run has 2", or "" if none.

    If the step will not run, only the settings that all steps share are compared.
    """
    settings = read_step_config(directory)
    if not settings:
        raise ConfigError(f"{directory / MARK} can't be read; choose another --output-dir")
    recorded = make_portable(settings)
    wanted = make_portable(to_plain(config))
    # A method determines many other settings, so report the method first.
    names = recorded.keys() | wanted.keys()
    for name in sorted(names, key=lambda name: (name != "method", name)):
        role, _, field = name.rpartition(".")
        is_start = field == "path" and stage.models.get(role) == INITIAL and role == stage.main_role
        is_corpus = not stage.config_class.reads_dialogues and name.startswith("data.")
        is_shared = (name in SHARED and not is_corpus) or is_start
        if stage.number not in request.step and not is_shared:
            continue
        old, new = recorded.get(name), wanted.get(name)
        if any(other.startswith(f"{name}.") for other in (*recorded, *wanted)):
            continue  # a mapping that is empty on the other side: report its first entry
        if old != new and affects_result(name):
            return f"{stage.section}.{name} {_format(old)} where this run has {_format(new)}"
    return ""


def recorded_model(path: str) -> str | None:
    """Return the model that a run fine-tuned into this one, or None if no run produced it."""
    directory = Path(path).parent if Path(path).name in ("actor", "ema") else Path(path)
    if not path:
        return None
    settings = read_step_config(directory)
    model = settings.get("model") or settings.get("actor")
    start = model.get("path") if isinstance(model, dict) else None
    return None if start is None else str(start)


def recorded_base_model(path: str, within: Path | None = None) -> str:
    """Return the initial model of the runs that led to `path`, or the first outside `within`."""
    for _ in range(100):  # records may form a cycle
        if within is not None and not Path(path).is_relative_to(within):
            break
        path = recorded_model(path) or path
    return path


def _format(value: object) -> str:
    if value is None:
        return "null"
    return " ".join(str(item) for item in value) if isinstance(value, list) else str(value)


UNRECORDED_OPTIONS = ("output_dir", "resume", "overwrite", "dry_run")
"""Options of a command that are not part of the run and are never recorded."""


def record_command(out: Path, argv: Sequence[str]) -> None:
    """Record the options of the command that runs in the output directory `out`."""
    command = " ".join([TRAIN, shlex.join(without_options(argv, UNRECORDED_OPTIONS))]).rstrip()
    replace_durably(out / COMMAND, f"{command}\n".encode())


def without_options(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words of a command line, except those of the given options."""
    words: list[str] = []
    kept = True
    for word in argv:
        if word.startswith("--"):
            kept = word[2:].partition("=")[0].replace("-", "_") not in names
        words += [word] if kept else []
    return words


def last_steps(out: Path) -> set[int]:
    """Return the numbers of the steps in the last run recorded in `out`, if a run is recorded."""
    given = dict(split_options(with_last_options(["--resume", "--output-dir", str(out)])))
    steps = given.get("step", ["1", "2", "3"])
    return {int(word) for word in steps if word.isdigit()} if (out / COMMAND).is_file() else set()


def with_last_options(argv: Sequence[str]) -> list[str]:
    """Return the command line; `--resume` alone adds the options of the recorded run.

    Options in `UNRECORDED_OPTIONS` may accompany it. If no command is recorded, nothing is added.
    """
    given = dict(split_options(argv))
    if given.get("resume") not in ([], ["true"]) or given.keys() - set(UNRECORDED_OPTIONS):
        return list(argv)
    text = " ".join(given.get("output_dir", [])) or str(Request.output_dir)
    out = Path(text).expanduser()
    try:
        words = shlex.split((out / COMMAND).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return list(argv)
    options = next((words[i:] for i, word in enumerate(words) if word.startswith("--")), [])
    return [*options, *argv]
