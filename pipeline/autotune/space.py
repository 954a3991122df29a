"""What can be tuned: the settings that change memory and speed and leave the result as it is.

A candidate is one value of each dimension. Their order is DeepSpeed's order for a model that does
not fit: the smallest micro-batch first, then activations recomputed, then higher ZeRO stages, each
first without and then with offload.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipeline.budget.fallbacks import changed, trained_models
from pipeline.budget.machine import Machine
from pipeline.budget.mesh_sizes import MeshSizes
from pipeline.config import StepConfig, affects_result
from pipeline.errors import ConfigError, require
from pipeline.settings.build import typed_settings
from pipeline.settings.plain import flatten, plain

Value = bool | int | float | str
Candidate = tuple[Value, ...]
"""One value of each dimension of a space, in its order."""

OFFLOAD = "offload"
OFFLOADS = ("optimizer", "gradients", "params")
"""Joined by + they are a value of the dimension `offload`; the others stay on the device."""

AS_IT_IS = "as it is"
"""Value of a dimension of several models: each keeps its own."""

GROWING = ("generation_batch_size", "micro_batch_size")
"""The sizes of batches."""

OF_THE_RUN = (
    *("output_dir", "resume", "save_every", "keep_last", "log_every"),
    *("trackers", "timeout_seconds"),
)
"""Settings that change neither the result of a step nor its speed or memory."""

MESH = ("parallel.pp", "parallel.tp", "parallel.replicas")
"""How the processes share the models."""

FALLBACK_ORDER = (
    *MESH,
    *("zero_stage", OFFLOAD, "gradient_checkpointing", "checkpoint_every", "inference_tp_size"),
    "offload_in_generation",
    *GROWING,
)
"""The slowest-changing dimension first."""


@dataclass(frozen=True)
class Dimension:
    """One thing to choose."""

    name: str

    values: tuple[Value, ...]
    """In the fallback order."""

    settings: tuple[str, ...]
    """Dotted names of the step's settings that get the value; of `offload`, the sections."""

    present: Mapping[str, Value] = field(default_factory=dict[str, Value])
    """The step's settings as they are."""

    def assigned(self, value: Value) -> dict[str, Value]:
        """The step's settings that a value stands for."""
        if value == AS_IT_IS:
            return dict(self.present)
        if self.name != OFFLOAD:
            return dict.fromkeys(self.settings, value)
        away = str(value).split("+")
        return {
            f"{section}.{kind}": "cpu" if kind in away else "none"
            for section in self.settings
            for kind in OFFLOADS
        }


@dataclass(frozen=True)
class Space:
    """The candidates for the settings of one step."""

    base: StepConfig
    dimensions: tuple[Dimension, ...]

    candidates: tuple[Candidate, ...]
    """In the fallback order."""

    world: int = 1
    """Processes of the step."""

    @cached_property
    def start(self) -> Candidate | None:
        """The settings as they are; None where `given` values leave them out."""
        return next((each for each in self.candidates if self.config(each) == self.base), None)

    def config(self, candidate: Candidate) -> StepConfig:
        """The step's settings with those of a candidate."""
        return _configured(self.base, self.dimensions, candidate)

    def settings(self, candidate: Candidate) -> dict[str, Value]:
        """The step's settings that a candidate stands for, by their dotted names."""
        return _assigned(self.dimensions, candidate)

    def named(self, candidate: Candidate) -> dict[str, Value]:
        """The values by the names of their dimensions."""
        return {each.name: value for each, value in zip(self.dimensions, candidate, strict=True)}

    def candidate(self, named: Mapping[str, Value]) -> Candidate:
        """The candidate of these values."""
        return tuple(named[each.name] for each in self.dimensions)

    def needs_as_much(self, candidate: Candidate, failed: Candidate) -> bool:
        """Whether a candidate takes at least the memory of one for which there was too little.

        That is where it is not above it in the fallback order and its batches are no smaller.
        """
        return all(
            _saves_no_more(each.name, ours, theirs)
            for each, ours, theirs in zip(self.dimensions, candidate, failed, strict=True)
        )


def make_space(
    config: StepConfig,
    machine: Machine,
    *,
    fixed: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    tp_sizes: Sequence[int] = (),
    mesh: MeshSizes = MeshSizes(),  # noqa: B008  # it is frozen
) -> Space:
    """The candidates for a step, the settings as they are among them unless `given` says otherwise.

    Args:
        config: its settings as they are.
        machine: where it runs.
        fixed: dotted names of settings that the user gave, which stay as they are.
        given: values by the names of dimensions, or of settings, in place of the usual ones: 1,2,4.
        tp_sizes: values that `inference_tp_size` may have.
        mesh: values that the settings of `parallel` may have.

    Raises:
        ConfigError: a value can't be used, or changes what a run results in.
    """
    usual, given = dict(_usual(config, machine, tp_sizes, mesh)), given or {}
    owners: dict[str, str] = {}
    for name in given:
        for setting in _settings_of(config, name):
            other = next((owners[each] for each in owners if _overlap(each, setting)), None)
            require(
                other is None,
                f"--autotune-space {name} and {other} both say what {setting} is; give one",
            )
            owners[setting] = name
    dimensions: list[Dimension] = []
    for name in sorted(usual.keys() | given.keys(), key=_position):
        settings = _settings_of(config, name)
        if name in given:
            values = _values(config, name, settings, given[name]) if settings else ()
        else:
            settings = tuple(
                each
                for each in settings
                if not _is_given(each, fixed) and not any(_overlap(each, other) for other in owners)
            )
            values = usual[name]
        if settings:
            dimension = Dimension(name, (), settings, _present(config, name, settings))
            if name not in given:
                values = _with_present(dimension, values)
            dimensions.append(replace(dimension, values=tuple(dict.fromkeys(values))))
    candidates = tuple(_possible(config, dimensions, machine))
    return Space(config, tuple(dimensions), candidates, machine.world)


def known_dimensions(config: StepConfig) -> list[str]:
    """Names that `given` may have for a step."""
    full = [name for name in flatten(plain(config)) if _is_tunable(name)]
    short = [name.removeprefix(f"{role}.") for role in trained_models(config) for name in full]
    return [OFFLOAD, *dict.fromkeys([*full, *short])]


def _usual(
    config: StepConfig, machine: Machine, tp_sizes: Sequence[int], mesh: MeshSizes
) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """The dimensions that are tuned by default."""
    for name in MESH:
        values = getattr(mesh, name.rpartition(".")[2])
        if len(values) > 1:
            yield name, values
    parts = max((pp * tp for pp, tp, _ in mesh.combinations(machine.world)), default=1)
    each = -(-config.batch_size * parts // machine.world)
    yield "micro_batch_size", _doubling(1, each, config.micro_batch_size)
    yield "gradient_checkpointing", (False, True)
    stages = (0, 1, 2, 3)
    if machine.world == 1:  # nothing to share out; stage 3 alone can offload the weights
        stages = (0, 3) if machine.has_gpu else ()
    if stages:
        yield "zero_stage", stages
    if machine.has_gpu:
        yield OFFLOAD, ("none", "optimizer+gradients", "optimizer+gradients+params")
    prompts = getattr(config, "rollout_size", None)
    if prompts is not None:
        most = -(-prompts // machine.world)
        present = getattr(config, "generation_batch_size", most)
        yield "generation_batch_size", _doubling(max(1, most // 4), most, present)
        if len(tp_sizes) > 1:
            yield "inference_tp_size", tuple(tp_sizes)
        if machine.has_gpu:
            yield "offload_in_generation", (False, True)


def _doubling(least: int, most: int, present: int) -> tuple[int, ...]:
    """`least`, twice that and so on up to `most`, and the present value among them.

    From `most` on all sizes are the same, and the present one stands for them.
    """
    highest = most - 1 if present >= most else most
    powers = itertools.takewhile(lambda size: size <= highest, (least << n for n in range(32)))
    return tuple(sorted({*powers, present}))


def _possible(
    config: StepConfig, dimensions: Sequence[Dimension], machine: Machine
) -> Iterator[Candidate]:
    """The combinations that the settings allow and that are not the same as another one."""
    refused: ConfigError | None = None
    same = dict[tuple[Value, ...], Candidate]()
    for candidate in itertools.product(*(each.values for each in dimensions)):
        try:
            made = _configured(config, dimensions, candidate)
            made.parallel.check(machine.world)
        except ConfigError as error:
            refused = error
            continue
        if made != config and _shards_in_vain(made, machine.world):
            continue
        # A step that has fewer rows makes the same micro-batches of any size above them.
        sized = zip(dimensions, candidate, strict=True)
        others = tuple(value for each, value in sized if each.name != "micro_batch_size")
        key = (*others, made.workload(machine.world).rows)
        if made == config or key not in same:
            same[key] = candidate
    if not same:
        raise refused or ConfigError(
            "--autotune-space leaves nothing to try: one process gains nothing by a zero_stage"
            " above 0 without offload=params; name 0 as well, or more processes"
        )
    yield from same.values()


def _shards_in_vain(config: StepConfig, world: int) -> bool:
    """Whether processes are at a stage, or have replicas, that gain nothing.

    A process that shares a model's states with no other needs stage 0 alone, unless its weights
    are not on the device; replicas of such processes, and of stage 0, are what there is without.
    """
    models = trained_models(config).values()
    alone = config.workload(world).shards == 1
    if config.parallel.replicas > 1 and (alone or all(not each.zero_stage for each in models)):
        return True
    return alone and any(m.zero_stage and m.zero.offload.params == "none" for m in models)


def _configured(
    config: StepConfig, dimensions: Sequence[Dimension], candidate: Candidate
) -> StepConfig:
    return changed(config, _assigned(dimensions, candidate))


def _assigned(dimensions: Sequence[Dimension], candidate: Candidate) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for each, value in zip(dimensions, candidate, strict=True):
        values |= each.assigned(value)
    return values


def _saves_no_more(dimension: str, ours: Value, theirs: Value) -> bool:
    """Whether a value leaves at least as much in the memory of the device as another one."""
    if AS_IT_IS in (ours, theirs):
        return ours == theirs
    if dimension == OFFLOAD:
        return set(str(ours).split("+")) - {"none"} <= set(str(theirs).split("+"))
    if dimension in (*GROWING, "checkpoint_every", "parallel.replicas"):
        return int(ours) >= int(theirs)
    if dimension in FALLBACK_ORDER:
        return int(ours) <= int(theirs)
    return ours == theirs


def _settings_of(config: StepConfig, name: str) -> tuple[str, ...]:
    """The step's settings that a dimension of this name changes; none where it has no such."""
    settings = flatten(plain(config))
    if name == OFFLOAD:
        # What lies on a disk was put there by somebody who knows the disk.
        sections = [f"{role}.zero.offload" for role in trained_models(config)]
        return tuple(each for each in sections if "nvme" not in _places(settings, each, *OFFLOADS))
    if name in settings:
        return (name,)
    return tuple(full for role in trained_models(config) if (full := f"{role}.{name}") in settings)


def _places(settings: Mapping[str, Any], section: str, *kinds: str) -> set[str]:
    return {settings[f"{section}.{kind}"] for kind in kinds}


def _present(config: StepConfig, name: str, settings: Sequence[str]) -> dict[str, Value]:
    """The step's settings of a dimension as they are."""
    every = flatten(plain(config))
    if name == OFFLOAD:
        settings = [f"{section}.{kind}" for section in settings for kind in OFFLOADS]
    return {setting: every[setting] for setting in settings}


def _with_present(dimension: Dimension, values: Sequence[Value]) -> Sequence[Value]:
    """The usual values, and among them the one by which the settings stay as they are."""
    present = dimension.present
    if dimension.name == OFFLOAD:
        away = [kind for kind in OFFLOADS if "cpu" in _places(present, dimension.settings[0], kind)]
        value: Value = "+".join(away) or "none"
    else:
        value = present[dimension.settings[0]]
    if dimension.assigned(value) != present:  # it is not the same for all models
        return (AS_IT_IS, *values)
    if value in values:
        return values
    if isinstance(value, int):
        return sorted([*(each for each in values if isinstance(each, int)), value])
    return sorted([*map(str, values), str(value)], key=_number_offloaded)


def _number_offloaded(value: str) -> int:
    return len(set(value.split("+")) - {"none"})


def _is_given(setting: str, fixed: Sequence[str]) -> bool:
    """Whether a setting, or one inside it, was given."""
    return any(f"{each}.".startswith(f"{setting}.") for each in fixed)


def _overlap(one: str, other: str) -> bool:
    """Whether two names are of the same setting, or one of a section that has the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _is_tunable(setting: str) -> bool:
    return not affects_result(setting) and setting not in OF_THE_RUN


def _values(config: StepConfig, name: str, settings: Sequence[str], text: str) -> tuple[Value, ...]:
    """The values in `1,2,4`, of the type that the settings have."""
    option = f"--autotune-space {name}"
    words = [word.strip() for word in text.split(",") if word.strip()]
    require(bool(words), f"{option}={text} names no values; write {name}=1,2,4")
    if name == OFFLOAD:
        for part in (part for word in words for part in word.split("+")):
            kinds = ", ".join(OFFLOADS)
            require(
                part in ("none", *OFFLOADS),
                f"{option} takes none, or {kinds} joined by +, not {part}",
            )
        return tuple(words)
    require(
        all(_is_tunable(setting) for setting in settings),
        f"{option} is none of memory and speed alone; tune settings such as micro_batch_size,"
        " zero_stage or offload",
    )
    setting = settings[0]
    try:
        return tuple(
            typed_settings(type(config), [], [(setting, [w])], names=[setting])[setting]
            for w in words
        )
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _position(name: str) -> tuple[int, str]:
    """Settings that the fallback order does not have come before the sizes of batches."""
    order = (*FALLBACK_ORDER[: -len(GROWING)], "", *GROWING)
    return order.index(name if name in FALLBACK_ORDER else ""), name
