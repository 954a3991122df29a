"""The steps of the pipeline, as seen by the orchestrator."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.config import StepConfig
from pipeline.system.errors import ConfigError, require, suggestion

INITIAL = "before"
"""Origin, instead of a section name, for the model from which the first step starts."""

BASE = "base"
"""Role of the model from which earlier steps trained the main one; used for comparison."""

METHODS = "methods"
"""Section of settings files; each subsection, named after a method, applies to that method only."""


@dataclass(frozen=True)
class Stage:
    """A step of the pipeline, as seen by the orchestrator."""

    number: int

    name: str
    """Name of its package, and of its directory in the output directory: `step1_sft`."""

    section: str
    """Name in settings files and dotted options: `sft`."""

    config_class: type[StepConfig]

    module: str
    """The module that runs it: `python -m module --config FILE`."""

    models: Mapping[str, str]
    """Default origin of each of its models, by role: the section of an earlier step, or `INITIAL`.
    The first role is the step's main one."""

    options: Mapping[str, Literal["actor", "reward"]]
    """For each role, whether train.py's --actor-... or its --reward-... options apply to it."""

    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """Origins by role that replace those in `models` if no other model comes from the same step: a
    critic starts from the actor's model if no reward model is used."""

    method_origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Origins, by method and role, that replace those in `models` for a method."""

    optional: frozenset[str] = frozenset()
    """Roles that the step can run without if no step provides the model."""

    uses_skipped_rows: bool = False
    """Whether the step also uses the rows of earlier steps that neither run nor have run."""

    separate_directories: bool = False
    """Whether each method has its own directory even if it runs alone."""

    on_request: bool = False
    """Whether the step runs only if `--step` names it; later steps then use its models."""

    method: str | None = None
    """The method that this stage runs, if each of several has its own stage; otherwise None."""

    @property
    def prefix(self) -> str:
        """Prefix of this stage's settings: `ppo`, or `methods.grpo` if several methods run."""
        return self.section if self.method is None else f"{METHODS}.{self.method}"

    @property
    def title(self) -> str:
        """Name in messages: `step 3`, or `step 3 (grpo)` if several methods run."""
        return f"step {self.number}" + ("" if self.method is None else f" ({self.method})")

    def origins(self, used: Collection[str], method: str | None = None) -> Mapping[str, str]:
        """Return the models' origins by role, in a run of `method` that uses the roles `used`."""
        needed = {self.models[role] for role in used if role in self.models.keys() - self.fallbacks}
        origins = {
            role: origin if role not in self.fallbacks or origin in needed else self.fallbacks[role]
            for role, origin in self.models.items()
        }
        return {**origins, **self.method_origins.get(method or "", {})}

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of each method, by name; empty for a step without methods."""
        return self.config_class.METHODS

    def directory(self, method: str) -> str:
        """Return the directory of a method that runs alongside others: `step3_grpo`."""
        return f"{self.name.partition('_')[0]}_{method}"

    @property
    def main_role(self) -> str:
        """Role of the step's main model."""
        return next(iter(self.models))


def drop_unselected(
    stages: Sequence[Stage],
    numbers: Collection[int],
    finished: Collection[str],
    replaced: Collection[str] = (),
) -> tuple[Stage, ...]:
    """Drop stages not in `numbers` that are `replaced`, or unfinished and run only on request.

    In place of a required model that a dropped stage would train, later stages get the model that
    the stage would start from. `finished` contains the names of stages whose output exists, and
    `replaced` the sections of stages that a user's model replaces.
    """
    dropped: dict[str, str] = {}
    for stage in stages:
        is_absent = stage.section in replaced or (stage.on_request and stage.name not in finished)
        if stage.number not in numbers and is_absent:
            origin = stage.models[stage.main_role]
            dropped[stage.section] = dropped.get(origin, origin)

    def remap(stage: Stage, origins: Mapping[str, str]) -> Mapping[str, str]:
        return {
            role: origin if role in stage.optional else dropped.get(origin, origin)
            for role, origin in origins.items()
        }

    return tuple(
        replace(stage, models=remap(stage, stage.models), fallbacks=remap(stage, stage.fallbacks))
        for stage in stages
        if stage.section not in dropped
    )


def split_methods(stages: Sequence[Stage], methods: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages of a run, with one stage for each of several named methods.

    `step3_ppo` becomes `step3_ppo`, `step3_grpo`, ...; with at most one method it is unchanged,
    unless its methods have separate directories. Of stages with methods and the same number, those
    with a named method are kept, or the first if no method is named.

    Raises:
        ConfigError: no step has a method with that name, or one is named twice.
    """
    for name in methods:
        check_method_name(name, stages, "--method")
        require(methods.count(name) == 1, f"--method lists {name} twice")
    kept: list[Stage] = []
    numbers: set[int] = set()
    for stage in stages:
        named = [name for name in methods if name in stage.methods]
        if stage.methods and not named and (methods or stage.number in numbers):
            continue
        numbers.add(stage.number)
        if len(methods) > 1 and named:
            kept += [replace(stage, name=stage.directory(name), method=name) for name in named]
        elif stage.separate_directories:
            kept += [replace(stage, name=stage.directory(name)) for name in named] or [stage]
        else:
            kept.append(stage)
    return tuple(kept)


def all_directories(stages: Sequence[Stage]) -> set[str]:
    """Return the names of all directories that these steps can create."""
    return {s.name for s in stages} | {s.directory(m) for s in stages for m in s.methods}


def check_method_name(name: str, stages: Sequence[Stage], origin: str) -> None:
    """Raise a `ConfigError`, prefixed with `origin`, for an unknown method."""
    known = [method for stage in stages for method in stage.methods]
    if name not in known:
        raise ConfigError(f"{origin} {name}: no such method; {suggestion(name, known)}")
