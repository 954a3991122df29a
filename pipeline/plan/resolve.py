"""The settings of the steps: one list of layers for each, merged once; later ones win.

1. models that earlier steps hand over;
2. `configs/embedded.yaml` where the run begins with the embedded model, else the default data;
3. the row of settings that the method names;
4. what `--plan auto` chose;
5. each `--config` in order: its settings of the step, then those of the step's method;
6. the DeepSpeed file of `--zero-config`;
7. options of train.py such as `--actor-model` and `--lr` (`OPTIONS` of the step's settings);
8. dotted options such as `--ppo.kl_coef`, then those of one method, `--methods.grpo.kl_coef`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from pipeline.cli import read_layers
from pipeline.config import EMBEDDED, StepConfig
from pipeline.config.deepspeed import deepspeed_layer
from pipeline.errors import ConfigError, UserErrors, require
from pipeline.installation import ROOT
from pipeline.plan.methods import of_methods, options_of, settings_of
from pipeline.plan.request import CommandLine, Request
from pipeline.plan.stage import BEFORE, Stage
from pipeline.settings.build import Layer, build_config, method_layer, rows_of, typed_settings
from pipeline.settings.plain import Option, flatten, nested

DEFAULT_DATA = "Dahoas/rm-static"
"""Data for a model of the user's own, where none is named (as in DeepSpeed-Chat)."""

EMBEDDED_PRESET = ROOT / "configs" / "embedded.yaml"

NOTHING = Layer({}, "nothing")


def step_configs(
    command_line: CommandLine,
    stages: Sequence[Stage],
    *,
    world: int = 1,
    chosen: Mapping[str, Layer] | None = None,
) -> dict[str, StepConfig]:
    """The settings of all steps by name, whether they are to run, in `world` processes, or not.

    Where a step of the run may learn labels all of them read rows alike.

    `chosen` has settings by the prefix of a stage that give way to all that the user gave.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or contradictory.
        UserErrors: that is so in several methods, each in its way.
    """
    configs: dict[str, StepConfig] = {}
    wrong: dict[str, list[str]] = {}
    for stage in stages:
        layer = (chosen or {}).get(stage.prefix)
        try:
            configs[stage.name] = step_config(
                stage, command_line, stages, world=world, chosen=layer
            )
        except ConfigError as error:
            if stage.method is None:
                raise
            wrong.setdefault(str(error), []).append(stage.method)
    if wrong:
        _refuse(of_methods(wrong, stages))
    in_run = {*command_line.request.step, *command_line.made}
    if not any(configs[stage.name].learns_labels for stage in stages if stage.number in in_run):
        return configs
    return {name: _knowing_labels(config) for name, config in configs.items()}


def resolve_run(
    command_line: CommandLine,
    stages: Sequence[Stage],
    *,
    known: Sequence[Stage] | None = None,
    world: int = 1,
) -> tuple[CommandLine, dict[str, StepConfig]]:
    """The settings of all steps, and the command line without steps that nothing in the run needs.

    A step is left out where other steps would take their models from it, and none that runs does;
    but not where the user chose the steps.

    Args:
        command_line: what the user gave.
        stages: the steps that may run.
        known: all steps there are, of whatever methods; by default those.
        world: processes of each step.

    Raises:
        ConfigError, UserErrors: as `step_configs`.
    """
    configs = step_configs(command_line, stages, world=world)
    if "step" in command_line.typed or any("step" in file.settings for file in command_line.files):
        return command_line, configs
    offered = {origin for stage in known or stages for origin in stage.models.values()}
    read: set[str] = set()
    idle: set[int] = set()
    for stage in reversed(stages):
        if stage.section in offered - read:
            idle.add(stage.number)
            continue
        used = configs[stage.name].used_models().keys() - stage.optional
        origins = stage.origins(used, _method(stage, command_line.request))
        read |= {origin for role, origin in origins.items() if role in used}
    if idle.isdisjoint(command_line.request.step):
        return command_line, configs
    steps = tuple(number for number in command_line.request.step if number not in idle)
    command_line = replace(command_line, request=replace(command_line.request, step=steps))
    return command_line, step_configs(command_line, stages, world=world)


def step_config(
    stage: Stage,
    command_line: CommandLine,
    stages: Sequence[Stage],
    *,
    world: int = 1,
    chosen: Layer | None = None,
) -> StepConfig:
    """The settings of one of the steps.

    Raises:
        ConfigError: as `step_configs`.
    """
    run = _Run(command_line, stages, world)
    usual, given = run.layers(stage, chosen or NOTHING)

    def with_models_from(origins: Mapping[str, str]) -> StepConfig:
        layers = [run.handed_over(stage, origins), *usual, *given]
        overrides = run.overrides(stage)
        return build_config(stage.config_class, layers, overrides, section=f"{stage.section}.")

    # Which models a step uses follows from its settings, and where some come from follows from it.
    config = with_models_from(stage.models)
    origins = stage.origins(config.used_models().keys(), _method(stage, command_line.request))
    return config if origins == stage.models else with_models_from(origins)


def given_settings(
    command_line: CommandLine, stage: Stage, stages: Sequence[Stage]
) -> frozenset[str]:
    """Dotted names of the settings of a step that options of the command line set."""
    run = _Run(command_line, stages)
    dotted = {name for name, _ in run.overrides(stage)}
    options = {**run.options(stage, []).settings, **run.method(stage).settings}
    return frozenset(dotted | flatten(options).keys())


def user_settings(
    stage: Stage, command_line: CommandLine, stages: Sequence[Stage], *, world: int
) -> frozenset[str]:
    """Dotted names of the settings of a step that the user has given, in files or options.

    Raises:
        ConfigError: as `step_configs`.
    """
    run = _Run(command_line, stages, world)
    _, given = run.layers(stage, NOTHING)
    names = {name for layer in given for name in flatten(layer.settings)}
    return frozenset(names | {name for name, _ in run.overrides(stage)})


@dataclass(frozen=True)
class _Run:
    """The sources of the layers of all steps."""

    command_line: CommandLine
    stages: Sequence[Stage]
    world: int = 1

    @property
    def request(self) -> Request:
        """The options of train.py."""
        return self.command_line.request

    def layers(self, stage: Stage, chosen: Layer) -> tuple[list[Layer], list[Layer]]:
        """The layers of a step above the models it is handed: usual settings, then those given."""
        config_class, overrides = stage.config_class, self.overrides(stage)
        files = list(self.files(stage))
        self.check_place(stage, files)
        base, named = self.base(stage), self.method(stage)
        row = method_layer(config_class, [base, *files, named], overrides)
        usual = [base, row, chosen]
        own = [named, self.options(stage, [*usual, *files])]
        own += [Layer({"output_dir": str(self.request.output_dir / stage.name)}, "--output-dir")]
        path = self.request.zero_config
        # Steps that don't run are resolved for what they hand over: the file need not suit them.
        if path is None or stage.number not in self.request.step:
            return usual, [*files, *own]
        of_file = deepspeed_layer(
            config_class,
            path,
            world=self.world,
            layers=[*usual, *files, *own],
            overrides=overrides,
            section=f"{stage.section}.",
        )
        return usual, [*files, of_file, *own]

    def method(self, stage: Stage) -> Layer:
        """The method that the user named for a step."""
        name = _method(stage, self.request) if rows_of(stage.config_class) else None
        return Layer({} if name is None else {"method": name}, "--method")

    def base(self, stage: Stage) -> Layer:
        """The preset of the embedded model, or else the default data."""
        if self.first_model() == EMBEDDED:
            (preset,) = read_layers([str(EMBEDDED_PRESET)])
            return replace(preset, settings=preset.settings.get(stage.section, {}))
        if not stage.config_class.reads_dialogues:
            return NOTHING
        return Layer({"data": {"path": [DEFAULT_DATA]}}, "train.py")

    def first_model(self) -> str:
        """The model that the first step begins with."""
        first, path = self.stages[0], EMBEDDED
        for layer in self.command_line.files:
            model = layer.settings.get(first.section, {}).get(first.main_role)
            path = model.get("path", path) if isinstance(model, Mapping) else path
        path = self.request.actor_model or path
        for name, words in self.command_line.overrides[first.section]:
            path = words[0] if name == f"{first.main_role}.path" and words else path
        return str(path)

    def files(self, stage: Stage) -> Iterator[Layer]:
        """Each file's settings of a step, and then of its method."""
        for layer in self.command_line.files:
            yield from settings_of(layer, stage, _method(stage, self.request))

    def overrides(self, stage: Stage) -> tuple[Option, ...]:
        """The dotted options of a step, those of its method last."""
        method = _method(stage, self.request)
        return options_of(self.command_line.overrides, stage, method)

    def check_place(self, stage: Stage, files: Sequence[Layer]) -> None:
        """Refuse a method, or an output directory, for one step where the run has its own."""
        dotted = {name for name, _ in self.overrides(stage)}
        require(
            stage.method is None or "method" not in dotted,
            f"{stage.section}.method names one method, and --method several; leave it out",
        )
        require(
            "output_dir" not in dotted and not any("output_dir" in file.settings for file in files),
            f"{stage.section}.output_dir can't be set here: train.py puts this step in"
            f" {self.request.output_dir / stage.name}; --output-dir moves it",
        )

    def handed_over(self, stage: Stage, origins: Mapping[str, str]) -> Layer:
        """Models from earlier steps, by role the section of the step that makes it."""
        made = {each.section: str(self.request.output_dir / each.name) for each in self.stages}
        made[BEFORE] = EMBEDDED if stage is self.stages[0] else self.first_model()
        running = {*self.request.step, *self.command_line.made}
        present = {each.section for each in self.stages if each.number in running} | {BEFORE}
        settings: dict[str, Any] = {
            role: {"path": made[origin]}
            for role, origin in origins.items()
            if role not in stage.optional or origin in present
        }
        if stage.takes_shares:
            needed = {each for role, each in origins.items() if role not in stage.optional}
            read = {each.number for each in self.stages if each.section in needed}
            earlier = set(range(1, stage.number)) - read - running
            settings["shares"] = sorted({stage.number, *earlier})
        return Layer(settings, "train.py")

    def options(self, stage: Stage, below: Sequence[Layer]) -> Layer:
        """The settings that train.py's own options stand for."""
        config_class, request = stage.config_class, self.request
        runs, alone = stage.number in request.step, set(request.step) == {stage.number}
        table = {
            **config_class.OPTIONS,
            **(config_class.RUN_OPTIONS if runs else {}),
            **(config_class.ALONE_OPTIONS if alone else {}),
        }
        given = {name: getattr(request, name) for name in table}
        given = {name: value for name, value in given.items() if value not in (None, (), {})}
        settings = {setting: value for name, value in given.items() for setting in table[name]}
        settings |= config_class.implied_settings(given)
        settings |= self.raised(stage, settings, below)
        if "epochs" in settings and not self.keeps_steps(stage):
            settings["max_steps"] = None
        settings |= {f"{role}.path": path for role, path in self.paths(stage)}
        return Layer(nested(settings), "the command line")

    def raised(
        self, stage: Stage, settings: Mapping[str, Any], below: Sequence[Layer]
    ) -> dict[str, Any]:
        """Settings that must be at least as large as another one that an option sets."""
        found: dict[str, Any] = {}
        for name, other in stage.config_class.AT_LEAST.items():
            if other in settings:
                section = f"{stage.section}."
                typed = typed_settings(stage.config_class, below, names=[name], section=section)
                found[name] = max(typed[name], settings[other])
        return found

    def keeps_steps(self, stage: Stage) -> bool:
        """Whether a file has a step's own max_steps, which are more specific than its epochs."""
        in_file = any("max_steps" in file.settings for file in self.files(stage))
        return in_file and "epochs" not in self.command_line.typed

    def paths(self, stage: Stage) -> Iterator[tuple[str, str]]:
        """The models that options name for roles of a step, unless an earlier step begins with it.

        Later steps take the model from that one.
        """
        named = {"actor": self.request.actor_model, "reward": self.request.reward_model}
        earlier = [each for each in self.stages if each.number < stage.number]
        begun = {option for each in earlier for option in each.options.values()}
        for role, option in stage.options.items():
            path = named[option]
            if path is not None and option not in begun:
                yield role, path


def _method(stage: Stage, request: Request) -> str | None:
    """The method that the user named for a step: its own of several, or the one it has."""
    known = rows_of(stage.config_class)
    named = (name for name in request.method if name in known or not known)
    return stage.method or next(named, None)


def _knowing_labels(config: StepConfig) -> StepConfig:
    if not config.reads_dialogues or EMBEDDED in config.data.path:
        return config
    return replace(config, data=replace(config.data, labels=True))


def _refuse(sentences: Sequence[str]) -> NoReturn:
    raise ConfigError(sentences[0]) if len(sentences) == 1 else UserErrors(sentences)
