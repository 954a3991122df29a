"""Several methods side by side: a stage for each, and the settings that are of one method alone.

Options of a step's section, such as `--ppo.kl_coef`, are for all methods of a run; those of
`methods.NAME` are for one of them, and win where both stand in one place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.errors import ConfigError, require, suggestion
from pipeline.plan.stage import METHODS, Stage
from pipeline.settings.build import Layer, rows_of
from pipeline.settings.plain import Option


def side_by_side(
    stages: Sequence[Stage], methods: Sequence[str], recorded: Mapping[str, str] | None = None
) -> tuple[Stage, ...]:
    """The stages of a run, where several methods are named one for each of them.

    `step3_ppo` becomes `step3_ppo`, `step3_grpo`, ...; with one method or none it stays, unless its
    methods have directories of their own. Where an earlier run has a directory of a method, whether
    it was alone then or not, it is taken up. Of stages with methods and the same number those stay
    that have a named one, without a name the first.

    Args:
        stages: all steps.
        methods: those that `--method` names.
        recorded: the method in each directory of an earlier run.

    Raises:
        ConfigError: no step has a method of such a name, or one is named twice.
    """
    known = recorded or {}
    several = len(methods) > 1
    for name in methods:
        check_method_name(name, stages, "--method")
        require(methods.count(name) == 1, f"--method names {name} twice")
    found: list[Stage] = []
    for stage in _that_run(stages, methods):
        names = [name for name in methods if name in rows_of(stage.config_class)]
        own = {name: directory_of(stage, name) for name in names}
        if stage.own_directories and not several:
            found += [replace(stage, name=own[name]) for name in names]
            continue
        apart = [
            name
            for name in names
            if several or (own[name] != stage.name and known.get(own[name]) == name)
        ]
        found += [
            replace(stage, name=_directory(stage, name, methods, known), method=name)
            for name in apart
        ] or [stage]
    return tuple(found)


def _that_run(stages: Sequence[Stage], methods: Sequence[str]) -> Iterator[Stage]:
    """The steps, and of several with methods those that `methods` names, or else the first."""
    numbers: set[int] = set()
    for stage in stages:
        rows = rows_of(stage.config_class)
        if not rows:
            yield stage
        elif not rows.keys().isdisjoint(methods) or (not methods and stage.number not in numbers):
            numbers.add(stage.number)
            yield stage


def check_sections_run(
    overrides: Mapping[str, Sequence[Option]],
    rewards: Sequence[str],
    stages: Sequence[Stage],
    known: Sequence[Stage],
) -> None:
    """Refuse options of a step that does not run, for its methods are not named.

    Args:
        overrides: dotted options by section.
        rewards: those of train.py's options for rewards and environments that are given.
        stages: those that may run, with these methods.
        known: all steps.

    Raises:
        ConfigError: it names the option and the methods that it is of.
    """
    present = {stage.section for stage in stages}
    for stage in known:
        options = overrides.get(stage.section, ())
        if options and stage.section not in present and stage.by_choice:
            raise ConfigError(
                f"--{stage.section}.{options[0][0]} is a setting of step {stage.number}, which runs"
                f" only where it is named; add --step {stage.number}, or omit the setting"
            )
        if options and stage.section not in present:
            raise ConfigError(
                f"--{stage.section}.{options[0][0]} is a setting of the methods"
                f" {', '.join(rows_of(stage.config_class))}, none of which runs; name one with"
                " --method, or leave it out"
            )
    takes_rewards = any("environment" in stage.config_class.OPTIONS for stage in stages)
    if rewards and not takes_rewards:
        raise ConfigError(
            f"{rewards[0]} is for methods that learn from rewards, and those that run learn from"
            " preferences; add a method such as grpo to --method, or leave it out"
        )


def _directory(
    stage: Stage, method: str, methods: Sequence[str], recorded: Mapping[str, str]
) -> str:
    """The directory of a method among others: its own, or the step's where it was trained alone.

    Not together with the method whose own directory is the step's.
    """
    own = directory_of(stage, method)
    was_alone = recorded.get(stage.name) == method and own not in recorded
    is_free = all(directory_of(stage, name) != stage.name for name in methods)
    return stage.name if was_alone and is_free else own


def directory_of(stage: Stage, method: str) -> str:
    """The directory of a method that runs with others: `step3_grpo`."""
    return f"{stage.name.partition('_')[0]}_{method}"


def directories(stages: Sequence[Stage]) -> set[str]:
    """Names of all directories that runs of these steps make, by whatever methods."""
    return {stage.name for stage in stages} | {
        directory_of(stage, method) for stage in stages for method in rows_of(stage.config_class)
    }


def method_names(stages: Sequence[Stage]) -> list[str]:
    """All methods that the steps know."""
    return [name for stage in stages for name in rows_of(stage.config_class)]


def check_method_name(name: str, stages: Sequence[Stage], place: str) -> None:
    """Refuse, in a sentence that begins with `place`, a name that no method has.

    Raises:
        ConfigError: there is no such method.
    """
    known = method_names(stages)
    if name not in known:
        raise ConfigError(f"{place} {name}: there is no such method; {suggestion(name, known)}")


def check_sections(
    files: Sequence[Layer],
    overrides: Mapping[str, Sequence[Option]],
    methods: Sequence[str],
    stages: Sequence[Stage],
) -> None:
    """Refuse settings of methods that nothing would read.

    A file may hold those of more methods than a run has, if it names any.

    Args:
        files: each `--config`.
        overrides: dotted options, of a method under `methods.NAME`.
        methods: those that `--method` names.
        stages: all steps.

    Raises:
        ConfigError: there is no such method, it does not run, or its section is none.
    """
    for layer in files:
        given = layer.settings.get(METHODS, {})
        place = f"{METHODS} in {layer.origin}"
        require(isinstance(given, Mapping), f"{place} holds no settings: {given}")
        for name, settings in given.items():
            check_method_name(str(name), stages, f"{METHODS} in {layer.origin}:")
            require(
                isinstance(settings, Mapping),
                f"{METHODS}.{name} in {layer.origin} holds no settings: {settings}",
            )
            require("method" not in settings, f"{METHODS}.{name}.method in {layer.origin} {_NAMED}")
        require(
            not given or bool(methods),
            f"{place} holds settings of {', '.join(map(str, given))}, and --method names none",
        )
    for section, options in overrides.items():
        head, _, name = section.partition(".")
        if head != METHODS:
            continue
        check_method_name(name, stages, f"--{METHODS}.NAME.SETTING:")
        require(
            name in methods,
            f"--{section}.{options[0][0]} is of a method that does not run; add {name} to --method",
        )
        require(all(each != "method" for each, _ in options), f"--{section}.method {_NAMED}")


_NAMED = "can't be set: the name before it is the method"


def settings_of(layer: Layer, stage: Stage, method: str | None) -> Iterator[Layer]:
    """A file's settings of a step, and above them those of the method it runs."""
    yield replace(layer, settings=layer.settings.get(stage.section, {}))
    if method is not None and rows_of(stage.config_class):
        yield replace(layer, settings=layer.settings.get(METHODS, {}).get(method, {}))


def options_of(
    overrides: Mapping[str, Sequence[Option]], stage: Stage, method: str | None
) -> tuple[Option, ...]:
    """The dotted options of a step, and after them those of the method it runs."""
    of_method = () if method is None else overrides.get(f"{METHODS}.{method}", ())
    return *overrides.get(stage.section, ()), *(of_method if rows_of(stage.config_class) else ())


def of_methods(wrong: Mapping[str, Sequence[str]], stages: Sequence[Stage]) -> list[str]:
    """Sentences about what is wrong, with the methods of which each holds unless it is all.

    Args:
        wrong: by sentence the methods of which it holds, none if it is about another step.
        stages: those that were looked at.
    """
    number = sum(stage.method is not None for stage in stages)
    return [
        f"method {', '.join(methods)}: {sentence}" if 0 < len(methods) < number else sentence
        for sentence, methods in wrong.items()
    ]
