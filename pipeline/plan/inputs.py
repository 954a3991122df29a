"""Check that the models and data of a step exist, before anything heavy is imported."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.config import EMBEDDED, StepConfig
from pipeline.data.rows.sources import LOCAL_JSONFILE, bare_name, is_hub_name, is_local_jsonfile
from pipeline.models.hf.directory import check_configuration
from pipeline.plan.output import MARK, RESULT, last_steps
from pipeline.plan.request import Request
from pipeline.plan.stage import BASE, Stage
from pipeline.settings.fields import to_options
from pipeline.system.errors import DataError, ModelError, UserError, require
from pipeline.system.installation import MODULE, TRAIN


def check_inputs(
    request: Request, stages: Sequence[Stage], configs: Mapping[str, StepConfig]
) -> None:
    """Raise for the first missing model or file, in the order of the steps.

    A model made by an earlier step of the same request need not exist yet. Hub names are not
    checked until they are loaded.

    Raises:
        ModelError: a model directory is missing; the message names the step that creates it.
        ConfigError: a model is null, or in the output directory of the step that loads it.
        DataError: a data file is missing.
    """
    writers = {configs[stage.name].output_dir: stage for stage in stages}
    for stage in stages:
        if stage.number not in request.step:
            continue
        config = configs[stage.name]
        for role in stage.models.keys() - {BASE, *stage.optional, *config.unused_roles}:
            name = f"{stage.section}.{role}.path"
            require(role in config.used_models(), f"{name} must be a model, got null")
        for name, path in model_paths(config):
            writer = writers.get(Path(path))
            label = _label(f"{stage.section}.{name}", path, request)
            _check_model(label, path, stage, config, written=writer is not None)
            if writer and (writer.number >= stage.number or writer.number not in request.step):
                _check_written(stage, writer, Path(path), request)
        try:
            config.check_corpus()
        except UserError as error:
            raise type(error)(f"{stage.section}.{error}") from None
        for name, paths in _data_paths(config):
            for path in paths:
                _check_data(_label(f"{stage.section}.{name}", path, request), path)


def model_paths(config: StepConfig) -> Iterator[tuple[str, str]]:
    """Yield the (setting, path) of each model: ("actor.path", "output/step1_sft"), ..."""
    for role, model in config.used_models().items():
        yield f"{role}.path", str(model.path)


def is_local(path: str) -> bool:
    """Return whether a model's path is local, not a Hub name (`name` or `owner/name`)."""
    looks_like_a_path = path.startswith((".", "/", "~", "\\")) or path.endswith("/")
    return looks_like_a_path or path.count("/") > 1 or Path(path).exists()


def _data_paths(config: StepConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    if config.reads_dialogues:
        yield "data.path", config.data.path
        yield "data.eval_path", config.data.eval_path
    yield "ptx_data", getattr(config, "ptx_data", ())
    yield "eval_task_data", tuple(getattr(config, "eval_task_data", {}).values())


def _check_written(stage: Stage, writer: Stage, path: Path, request: Request) -> None:
    """Raise unless the earlier step `writer` has written its model to `path`."""
    is_ours = (path / MARK).is_file()
    if (path / "config.json").is_file() and ((path / RESULT).is_file() or not is_ours):
        return
    out = str(request.output_dir)
    names = {"actor_model", "data_path", "eval_path", "data_split", "data_seed", "fields", "format"}
    names |= {"seed", *(["reward_model"] if writer.number == 2 else [])}
    words = ["--step", str(writer.number)]
    for name, given in to_options(request):
        words += [f"--{name.replace('_', '-')}", *given] if name in names else []
    problem = f"there is none in {path}; create it with `"
    command = [TRAIN, shlex.join([*words, "--output-dir", out])]
    if is_ours:
        problem = f"{path} has an unfinished one; finish it with `"
        # It resumes only with its recorded settings.
        command = [MODULE, shlex.join([writer.module, "--config", str(path / MARK), "--resume"])]
        if writer.number in last_steps(request.output_dir):
            command = [TRAIN, shlex.join(["--output-dir", out, "--resume"])]
    problem += " ".join(command) + "`"
    if stage.number == 3 and writer.number == 2:
        problem += ", or pass another source of rewards with --reward or --reward-function"
    raise ModelError(f"step {stage.number} needs the model of step {writer.number}, and {problem}")


def _check_model(name: str, path: str, stage: Stage, config: StepConfig, *, written: bool) -> None:
    """Raise if a local model is missing and the run won't write it, or if the run would delete it.

    The step clears its own directory before it reads its models.
    """
    if path == EMBEDDED or not is_local(path):
        return
    directory = Path(path).expanduser()
    require(
        not directory.resolve().is_relative_to(config.output_dir.resolve()),
        f"{name} {path} is in {config.output_dir}, which step {stage.number} may clear before it"
        " reads the model; move the model, or choose another --output-dir",
    )
    if not written and not (directory / "config.json").is_file():
        try:
            check_configuration(directory)
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None


def _check_data(name: str, path: str) -> None:
    bare = bare_name(path)
    if bare == EMBEDDED or Path(bare).expanduser().exists():
        return
    if is_local_jsonfile(bare):
        missing = [str(file) for file in LOCAL_JSONFILE if not file.is_file()]
        if missing:
            both = " and ".join(map(str, LOCAL_JSONFILE))
            raise DataError(
                f"{name} {path} refers to {both} below the current directory, but there is no"
                f" {' and no '.join(missing)}"
            )
        return
    if not is_hub_name(bare):
        raise DataError(f"{name} {path}: no such file or directory")


def _label(name: str, path: str, request: Request) -> str:
    """Return the option with which the user gave `path`, or else the setting's name."""
    given = {
        "sft.model.path": ("--actor-model", (request.actor_model,)),
        "reward.model.path": ("--reward-model", (request.reward_model,)),
    }
    option, values = given.get(name, ("--data-path", request.data_path))
    return option if path in values else name
