"""The settings of the steps: one list of layers per step, merged once in ascending precedence.

1. models from earlier steps; 2. `configs/embedded.yaml` for models derived from the embedded one,
else the default data; 3. the defaults of the chosen method; 4. what `--plan auto` chose; 5.
each `--config` in order: its settings of the step, then those of the step's method; 6. the
DeepSpeed file of `--zero-config`; 7. options of train.py such as `--actor-model` and `--lr`
(`OPTIONS` of the step's settings); 8. dotted options such as `--ppo.kl_coef`, then those of one
method, `--methods.grpo.kl_coef`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from pipeline.config import EMBEDDED, StepConfig, TrainedModelConfig
from pipeline.config.deepspeed import deepspeed_layer
from pipeline.plan.output import recorded_base_model, recorded_model
from pipeline.plan.request import CommandLine, Request
from pipeline.plan.response_length import default_length
from pipeline.plan.stage import BASE, INITIAL, METHODS, Stage
from pipeline.settings.build import Layer, build_config, merge, method_layer, read_settings
from pipeline.settings.fields import Option, flatten, get_default, unflatten
from pipeline.system.errors import ConfigError, require
from pipeline.system.installation import ROOT

DEFAULT_DATA = "Dahoas/rm-static"
"""Default data for a model other than the embedded one (as in DeepSpeed-Chat)."""

EMBEDDED_PRESET = ROOT / "configs" / "embedded.yaml"


def step_configs(
    command_line: CommandLine,
    stages: Sequence[Stage],
    *,
    world: int = 1,
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, StepConfig]:
    """Return the settings of all steps by name, including steps that don't run.

    If a step that runs or has run trains on labels, all steps with user data set `data.labels`.
    `world` is the number of processes of each step, and `chosen` the choice of `--plan auto`, by
    stage prefix and dotted name.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or contradictory.
    """
    resolver = Resolver(command_line, stages, world, chosen or {})
    configs: dict[str, StepConfig] = {}
    for stage in stages:
        try:
            configs[stage.name] = resolver.config(stage)
        except ConfigError as error:
            if stage.method is None:
                raise
            raise ConfigError(f"method {stage.method}: {error}") from None
    in_run = {*command_line.request.step, *command_line.finished_steps}
    if not any(configs[stage.name].trains_on_labels for stage in stages if stage.number in in_run):
        return configs
    return {
        name: replace(config, data=replace(config.data, labels=True))
        if config.reads_dialogues and EMBEDDED not in config.data.path
        else config
        for name, config in configs.items()
    }


def resolve_run(
    command_line: CommandLine,
    stages: Sequence[Stage],
    *,
    known: Sequence[Stage] | None = None,
    world: int = 1,
) -> tuple[CommandLine, dict[str, StepConfig]]:
    """Return the command line without unneeded steps, and the settings of all steps.

    A step whose model only serves other steps is dropped if no step that runs uses it, unless the
    user chose the steps. `stages` are the steps that may run, `known` those of all methods (by
    default `stages`), and `world` is the number of processes of each step.

    Raises:
        ConfigError: see `step_configs`.
    """
    configs = step_configs(command_line, stages, world=world)
    if "step" in command_line.typed or any("step" in file.settings for file in command_line.files):
        return command_line, configs
    offered = {origin for stage in known or stages for origin in stage.models.values()}
    used_origins: set[str] = set()
    unneeded: set[int] = set()
    for stage in reversed(stages):
        if stage.section in offered - used_origins:
            unneeded.add(stage.number)
            continue
        used = configs[stage.name].used_models().keys() - stage.optional
        origins = stage.origins(used, _get_method(stage, command_line.request))
        used_origins |= {origin for role, origin in origins.items() if role in used}
    if unneeded.isdisjoint(command_line.request.step):
        return command_line, configs
    steps = tuple(number for number in command_line.request.step if number not in unneeded)
    command_line = replace(command_line, request=replace(command_line.request, step=steps))
    return command_line, step_configs(command_line, stages, world=world)


@dataclass(frozen=True)
class Resolver:
    """Resolves the layers of settings of a run's steps."""

    command_line: CommandLine
    stages: Sequence[Stage]
    world: int = 1
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def request(self) -> Request:
        """The options of train.py."""
        return self.command_line.request

    def config(self, stage: Stage) -> StepConfig:
        """Return the settings of a step.

        Raises:
            ConfigError: see `step_configs`.
        """
        self._check_forbidden(stage)
        layers = [*self._default_layers(stage), *self._user_layers(stage)]
        layers.append(self._raised_settings(stage, layers))

        def build(origins: Mapping[str, str]) -> StepConfig:
            inherited, overrides = self._inherited_models(stage, origins), self._overrides(stage)
            section = f"{stage.section}."
            return build_config(
                stage.config_class, [inherited, *layers], overrides, section=section
            )

        # The settings determine the step's models, which determine some origins.
        config = build(stage.models)
        origins = stage.origins(config.used_models().keys(), _get_method(stage, self.request))
        config = self._with_lora_lr(stage, config if origins == stage.models else build(origins))
        if default := self.response_length(stage, config):
            config = replace(config, max_new_tokens=default[0])  # pyrefly: ignore[unexpected-keyword]
        return config

    def _with_lora_lr(self, stage: Stage, config: StepConfig) -> StepConfig:
        """Apply --lr also to adapters; by default, their rate is a multiple of `optim.lr`."""
        role, _, name = stage.config_class.RUN_OPTIONS["lr"][0].partition(".")
        model: TrainedModelConfig = getattr(config, role)
        given = flatten(self._option_layer(stage).settings).get(f"{role}.{name}")
        if model.lora is None or model.lora.lr is not None or given != model.optim.lr:
            return config
        return replace(config, **{role: replace(model, lora=replace(model.lora, lr=given))})  # pyrefly: ignore[bad-argument-type]

    def user_settings(self, stage: Stage, *, files: bool = True) -> frozenset[str]:
        """Return the dotted names of settings given in options or, with `files`, in files.

        Raises:
            ConfigError: see `step_configs`.
        """
        layers = self._user_layers(stage) if files else [self._option_layer(stage)]
        names = {name for layer in layers for name in flatten(layer.settings)}
        return frozenset(names | {name for name, _ in self._overrides(stage)})

    def initial_model(self, stage: Stage, role: str = "") -> str:
        """Return the initial model from which a role's weights derive.

        The default role is the main one. The result is empty if there is no such model.
        """
        role, out = role or stage.main_role, self.request.output_dir
        origin = stage.origins(stage.models, _get_method(stage, self.request))[role]
        is_available = role not in stage.optional or origin in self._available
        path = self._model_path(stage, role, self._output_path(origin) if is_available else "")
        for other in self.stages:
            is_reused = other.number not in self.request.step and recorded_model(path) is not None
            if other.number < stage.number and Path(path) == out / other.name and not is_reused:
                return self.initial_model(other)
        return recorded_base_model(path, within=out)

    def has_preset(self, stage: Stage, role: str = "") -> bool:
        """Return whether a role's model, by default the main one, derives from the embedded one."""
        return recorded_base_model(self.initial_model(stage, role)) == EMBEDDED

    def _model_path(self, stage: Stage, role: str, default: str) -> str:
        """Return the path of a role's model in files and options, or else `default`."""
        layers = [Layer({role: {"path": default}}, "train.py"), *self._file_layers(stage)]
        layers.append(self._option_layer(stage))
        section = f"{stage.section}."
        model = merge(stage.config_class, layers, self._overrides(stage), section=section)[role]
        return str((model or {}).get("path") or "")

    def _output_path(self, origin: str) -> str:
        """Return the path of the model that a section's step writes, or of the initial model."""
        if origin == INITIAL:
            first, default = self.stages[0], self.request.actor_model or EMBEDDED
            return self._model_path(first, first.main_role, default)
        name = next(other.name for other in self.stages if other.section == origin)
        return str(self.request.output_dir / name)

    @property
    def _available(self) -> set[str]:
        """Origins of models that exist or that the run will create."""
        running = {*self.request.step, *self.command_line.finished_steps}
        return {stage.section for stage in self.stages if stage.number in running} | {INITIAL}

    def _default_layers(self, stage: Stage) -> list[Layer]:
        """Return layers 2 to 4, as numbered at the beginning of this file."""
        layers: list[Layer] = []
        if self.has_preset(stage):
            preset = _read_preset()
            settings = preset.settings.get(stage.section, {})
            others = {role for role in stage.models if not self.has_preset(stage, role)}
            settings = {name: value for name, value in settings.items() if name not in others}
            layers.append(replace(preset, settings=settings))
        if stage.config_class.reads_dialogues and not self.has_preset(self._responder(stage)):
            layers.append(Layer({"data": {"path": [DEFAULT_DATA]}}, "train.py"))
        given = [*layers, *self._file_layers(stage), self._option_layer(stage)]
        defaults = method_layer(stage.config_class, given, self._overrides(stage))
        chosen = Layer(unflatten(self.chosen.get(stage.prefix, {})), "--plan auto")
        return [*layers, defaults, chosen]

    def _responder(self, stage: Stage) -> Stage:
        """Return the step that `stage`'s reward model starts from if available, else `stage`."""
        role, origins = stage.main_role, self._available
        if stage.options[role] == "reward" and stage.models[role] in origins:
            return next((s for s in self.stages if s.section == stage.models[role]), stage)
        return stage

    def _user_layers(self, stage: Stage) -> list[Layer]:
        """Return layers 5 to 7, as numbered at the beginning of this file."""
        files, options = list(self._file_layers(stage)), self._option_layer(stage)
        path = self.request.zero_config
        # Steps that don't run are resolved only for their outputs: the file need not fit them.
        if path is None or stage.number not in self.request.step:
            return [*files, options]
        chosen = Layer(unflatten(self.chosen.get(stage.prefix, {})), "--plan auto")
        given = stage.config_class, path, [chosen, *files, options], self._overrides(stage)
        return [*files, deepspeed_layer(*given, world=self.world), options]

    def _file_layers(self, stage: Stage) -> Iterator[Layer]:
        """Yield each file's settings for a step, followed by those for the method it runs."""
        method = _get_method(stage, self.request)
        for layer in self.command_line.files:
            yield replace(layer, settings=layer.settings.get(stage.section) or {})
            if stage.methods:
                yield replace(layer, settings=(layer.settings.get(METHODS) or {}).get(method) or {})

    def _overrides(self, stage: Stage) -> tuple[Option, ...]:
        """Return the dotted options of a step, followed by those of the method it runs."""
        overrides = self.command_line.overrides
        method = f"{METHODS}.{_get_method(stage, self.request)}" if stage.methods else ""
        return *overrides.get(stage.section, ()), *overrides.get(method, ())

    def _check_forbidden(self, stage: Stage) -> None:
        """Reject a method or an output directory for one step if the run determines it."""
        dotted = {name for name, _ in self._overrides(stage)}
        in_files = [file.settings for file in self._file_layers(stage)]
        require(
            stage.method is None or "method" not in dotted,
            f"{stage.section}.method can't be set when --method names several methods; omit it",
        )
        require(
            not any("output_dir" in names for names in (dotted, *in_files)),
            f"{stage.section}.output_dir can't be set here: train.py writes this step to"
            f" {self.request.output_dir / stage.name}; use --output-dir",
        )

    def _inherited_models(self, stage: Stage, origins: Mapping[str, str]) -> Layer:
        """Return the models from earlier steps, by role."""
        paths = {
            role: self._output_path(origin)
            for role, origin in origins.items()
            if role not in stage.optional or origin in self._available
        }
        main_role = stage.main_role
        main = self._model_path(stage, main_role, paths[main_role])
        paths |= {role: main for role in stage.fallbacks if origins[role] != stage.models[role]}
        if "critic" in paths and origins["critic"] not in self._available:
            paths["critic"] = self._model_path(stage, "reward", paths["critic"])
        if BASE in paths:
            initial_model = self.initial_model(stage)
            skips = stage.models[main_role] != INITIAL == origins[main_role] and main == paths[BASE]
            paths[BASE] = initial_model if initial_model != main or skips else ""
        settings: dict[str, Any] = {role: {"path": path or None} for role, path in paths.items()}
        if stage.uses_skipped_rows:
            given = {*self._available, origins[main_role] if main == paths[main_role] else ""}
            taken = {other.number for other in self.stages if other.section in given}
            settings["shares"] = sorted({stage.number, *set(range(1, stage.number)) - taken})
        return Layer(settings, "train.py")

    def _option_layer(self, stage: Stage) -> Layer:
        """Return the settings that train.py's own options set."""
        config_class, request = stage.config_class, self.request
        runs, alone = stage.number in request.step, set(request.step) == {stage.number}
        table = {
            **config_class.OPTIONS,
            **(config_class.RUN_OPTIONS if runs else {}),
            **(config_class.SINGLE_STEP_OPTIONS if alone else {}),
        }
        given = {name: getattr(request, name) for name in table}
        given = {name: value for name, value in given.items() if value not in (None, (), {})}
        settings = {setting: value for name, value in given.items() for setting in table[name]}
        settings |= config_class.implied_settings(given)
        in_file = any("max_steps" in file.settings for file in self._file_layers(stage))
        if "epochs" in settings and ("epochs" in self.command_line.typed or not in_file):
            settings["max_steps"] = None
        # A model option applies to the first step that has it; later steps use that step's model.
        named = {"actor": request.actor_model, "reward": request.reward_model}
        earlier = (other for other in self.stages if other.number < stage.number)
        covered = {option for other in earlier for option in other.options.values()}
        for role, option in stage.options.items():
            if named[option] is not None and option not in covered:
                settings[f"{role}.path"] = named[option]
        if stage.methods and (method := _get_method(stage, request)) is not None:
            settings["method"] = method
        settings["output_dir"] = str(request.output_dir / stage.name)
        return Layer(unflatten(settings), "the command line")

    def response_length(self, stage: Stage, config: StepConfig) -> tuple[int, str] | None:
        """Return the default of max_new_tokens for the user's model, and the reason for it.

        Return None if `max_new_tokens` is set, or if not all rewards come from programs.
        """
        initial_model, settings = self.initial_model(stage), cast("Any", config)
        kinds = {source.kind for source in getattr(settings, "rewards", ())}
        is_given = self.has_preset(stage) or "max_new_tokens" in self.user_settings(stage)
        if not initial_model or not kinds or "model" in kinds or is_given:
            return None
        with suppress(ValueError, AttributeError):  # loading the model reports damaged files
            return default_length(
                initial_model,
                config.data,
                reserved=settings.max_prompt_length,
                downloads=not self.request.dry_run and self.request.plan_for is None,
            )
        return None

    def _raised_settings(self, stage: Stage, layers: Sequence[Layer]) -> Layer:
        """Return settings raised to at least the value that an option sets for another setting."""
        settings: dict[str, Any] = {}
        options = self._option_layer(stage).settings
        for name, other in stage.config_class.MINIMUMS.items():
            if other in options:
                values = [layer.settings[name] for layer in layers if name in layer.settings]
                value = values[-1] if values else get_default(stage.config_class, name)
                settings[name] = max(value, options[other]) if isinstance(value, int) else value
        return Layer(settings, "the command line")


@cache
def _read_preset() -> Layer:
    return read_settings(EMBEDDED_PRESET)


def _get_method(stage: Stage, request: Request) -> str | None:
    """Return the user's method for a step, or None if none is named."""
    named = (name for name in request.method if name in stage.methods or not stage.methods)
    return stage.method or next(named, None)
