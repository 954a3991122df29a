"""Which models are served, by which names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inference.serve.adapter_files import adapter_directory
from inference.serve.config import ServeConfig
from pipeline.errors import ConfigError, DataError, ModelError, require
from pipeline.report.results import StepResult, read_results

NAME = re.compile(r"[\w.:-]{1,64}")
BASE = "base"


@dataclass(frozen=True)
class ModelPath:
    """A model that is to be served."""

    name: str
    path: str

    seed: int = 0
    """Seed that the weights of an embedded base model are drawn from."""

    format_of: str | None = None
    """Model whose chat template one without its own takes."""

    adapter: Path | None = None
    """Directory of an adapter over the model; None for the model alone."""

    base: str | None = None
    """Name of the model under the adapter; None without one."""

    @property
    def begins_run(self) -> bool:
        """Whether it is what a run's first step began from, which that step names by its format."""
        return self.format_of is not None


def paths_to_serve(config: ServeConfig) -> list[ModelPath]:
    """The models of `--path` and `--run`, and those with an adapter, each with a name of its own.

    Raises:
        ConfigError: two have the same name, or there is no model for the adapters.
        ModelError: the run has no model yet, or there is no adapter in a directory.
    """
    found = [] if config.run is None else models_of_run(config.run)
    found += [_named(word) for word in config.path]
    found += _adapted(config, found)
    names = [each.name for each in found]
    for name in names:
        require(
            names.count(name) == 1,
            f"--path: two models are called {name}; name them, as sft=OUT/step1_sft",
        )
    return found


def _adapted(config: ServeConfig, models: Sequence[ModelPath]) -> list[ModelPath]:
    """The adapters, over the model of `--adapter-base`."""
    if not config.adapter:
        return []
    wanted = config.adapter_base
    bases = [each for each in models if wanted in (None, each.name)]
    if not bases:
        there = ", ".join(each.name for each in models) or "none"
        raise ConfigError(f"--adapter-base: there is no model {wanted}; there are: {there}")
    found: list[ModelPath] = []
    for word in config.adapter:
        name, equals, path = word.partition("=")
        require(
            bool(equals and path and NAME.fullmatch(name)),
            f"--adapter takes NAME=DIR, as polite=OUT/step1_sft, got {word[:100]}",
        )
        directory = adapter_directory(path)
        found.append(replace(bases[0], name=name, adapter=directory, base=bases[0].name))
    return found


def _named(word: str) -> ModelPath:
    name, equals, path = word.partition("=")
    if equals and NAME.fullmatch(name) and path:
        return ModelPath(name, path)
    directory = Path(word).expanduser()
    own = directory.name or directory.resolve().name
    if own in ("actor", "ema") and directory.parent.name:
        own = directory.parent.name if own == "actor" else f"{directory.parent.name}-{own}"
    own = re.sub(r"[^\w.:-]", "-", own)[:64] or "model"
    return ModelPath(own, word)


def models_of_run(out: Path) -> list[ModelPath]:
    """The models of a run that answer: base, step 1, and step 3 of each method.

    Raises:
        ModelError: there is none.
    """
    steps = _steps(out)
    found: list[ModelPath] = []
    for name, step in steps.items():
        if not found and step.finished and step.has("perplexity_after"):
            found += _base(step, str(out / name))
        for directory in (out / name, out / name / "actor"):
            talks = step.has("perplexity_after") or directory.name == "actor"
            if step.finished and talks and (directory / "config.json").is_file():
                found.append(ModelPath(name, str(directory)))
    if not [each for each in found if each.name != BASE]:
        raise ModelError(f"--run {out} has no model to talk to yet; finish its steps with --resume")
    return found


def reward_of_run(out: Path) -> str | None:
    """The reward model of a run, where it has one."""
    for name, step in _steps(out).items():
        if step.finished and step.has("accuracy_after") and (out / name / "config.json").is_file():
            return str(out / name)
    return None


def _steps(out: Path) -> Mapping[str, StepResult]:
    try:
        return read_results(out).steps
    except DataError as error:
        raise ConfigError(f"--run {error}") from None


def _base(step: StepResult, directory: str) -> list[ModelPath]:
    """What step 1 began from; nothing where its settings don't say."""
    path, seed = step.settings.get("model.path"), step.settings.get("seed")
    if not isinstance(path, str):
        return []
    return [ModelPath(BASE, path, seed if isinstance(seed, int) else 0, directory)]
