"""The settings of the three steps, from what the user gave and what one step hands the next.

Laid over one another, later ones winning: the dataclass's defaults; models handed over by the steps
before; `configs/embedded.yaml` where the actor is the embedded model; the row of settings that
`--method` names; what `--plan auto` chose; each `--config` in order, its settings of one method
above those of the step; the DeepSpeed file of `--zero-config`; train.py's own options such as
`--actor-model` and the short forms such as `--lr`; dotted options such as `--ppo.kl_coef`, then
those of one method such as `--methods.grpo.kl_coef`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, get_type_hints

from pipeline.cli import read_layers
from pipeline.config import EMBEDDED, StepConfig, TrainedModelConfig
from pipeline.config.deepspeed import deepspeed_layer
from pipeline.errors import ConfigError, UserErrors, require
from pipeline.installation import ROOT
from pipeline.plan.methods import of_methods, options_of, settings_of
from pipeline.plan.request import CommandLine, Request
from pipeline.plan.stage import BEFORE, Stage
from pipeline.settings.build import Layer, build_config
from pipeline.settings.methods import method_layer, rows_of
from pipeline.settings.plain import Option, flatten

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

    Where a step of the run may learn labels all know that, so that they share rows out alike.

    `chosen` has settings by the prefix of a stage that give way to all that the user gave.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or contradictory.
        UserErrors: that is so in several methods, each in its way.
    """
    layers = chosen or {}
    configs: dict[str, StepConfig] = {}
    wrong: dict[str, list[str]] = {}
    for stage in stages:
        layer = layers.get(stage.prefix, NOTHING)
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


def _knowing_labels(config: StepConfig) -> StepConfig:
    if not config.reads_dialogues or EMBEDDED in config.data.path:
        return config
    return replace(config, data=replace(config.data, labels=True))


def _refuse(sentences: Sequence[str]) -> NoReturn:
    raise ConfigError(sentences[0]) if len(sentences) == 1 else UserErrors(sentences)


def given_settings(
    command_line: CommandLine, stage: Stage, stages: Sequence[Stage]
) -> frozenset[str]:
    """Dotted names of the settings of a step that the command line says.

    An option of train.py says those that it stands for; what files say is not among them.
    """
    dotted = {name for name, _ in _overrides(stage, command_line)}
    return frozenset(
        dotted | flatten(_options(stage, command_line.request, stages).settings).keys()
    )


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

    def handed(origins: Mapping[str, str]) -> StepConfig:
        below = _handed_over(stage, command_line, stages, origins)
        return _built(stage, command_line, stages, below, world=world, chosen=chosen)

    config = handed(stage.models)
    origins = stage.origins(config.used_models().keys(), _method(stage, command_line.request))
    return config if origins == stage.models else handed(origins)


def user_settings(
    stage: Stage, command_line: CommandLine, stages: Sequence[Stage], *, world: int
) -> frozenset[str]:
    """Dotted names of the settings of a step that the user has given, in whatever way.

    Raises:
        ConfigError: as `step_configs`.
    """
    below = _handed_over(stage, command_line, stages, stage.models)
    _, given = _layers(stage, command_line, stages, below, world=world, chosen=None)
    names = {name for layer in given for name in flatten(layer.settings)}
    return frozenset(names | {name for name, _ in _overrides(stage, command_line)})


def with_needed_steps(
    command_line: CommandLine, stages: Sequence[Stage], known: Sequence[Stage] | None = None
) -> CommandLine:
    """Without the steps whose models nothing in the run reads, unless the user chose which to run.

    A step is left out where other steps would take their models from it, and none that runs does.

    Args:
        command_line: what the user gave.
        stages: the steps that may run.
        known: all steps there are, of whatever methods; by default those.
    """
    if "step" in command_line.typed or any("step" in file.settings for file in command_line.files):
        return command_line
    # A DeepSpeed file says nothing of which models there are, and is read for the processes it is
    # meant for later.
    request = replace(command_line.request, zero_config=None)
    try:
        configs = step_configs(replace(command_line, request=request), stages)
    except (ConfigError, UserErrors):  # whoever resolves the settings to run them says it
        return command_line
    offered = {origin for stage in known or stages for origin in stage.models.values()}
    read: set[str] = set()
    idle: set[int] = set()
    for stage in reversed(stages):
        if stage.section in offered - read:
            idle.add(stage.number)
            continue
        used = configs[stage.name].used_models().keys() - stage.optional
        origins = stage.origins(used, _method(stage, request))
        read |= {origin for role, origin in origins.items() if role in used}
    steps = tuple(number for number in command_line.request.step if number not in idle)
    return replace(command_line, request=replace(command_line.request, step=steps))


def _built(
    stage: Stage,
    command_line: CommandLine,
    stages: Sequence[Stage],
    handed_over: Layer,
    *,
    world: int,
    chosen: Layer | None,
) -> StepConfig:
    """The settings of a step that takes its models from earlier ones as `handed_over` has it."""
    usual, given = _layers(stage, command_line, stages, handed_over, world=world, chosen=chosen)
    overrides = _overrides(stage, command_line)
    return build_config(stage.config_class, usual + given, overrides, section=f"{stage.section}.")


def _layers(
    stage: Stage,
    command_line: CommandLine,
    stages: Sequence[Stage],
    handed_over: Layer,
    *,
    world: int,
    chosen: Layer | None,
) -> tuple[list[Layer], list[Layer]]:
    """The usual settings of a step, and above them those that the user gave."""
    own_corpus = not stage.config_class.reads_dialogues
    if _before(command_line, stages[0]) == EMBEDDED:
        base = _section(read_layers([str(EMBEDDED_PRESET)])[0], stage)
    else:
        base = NOTHING if own_corpus else Layer({"data": {"path": [DEFAULT_DATA]}}, "train.py")
    out = command_line.request.output_dir / stage.name
    overrides = _overrides(stage, command_line)
    usual = [handed_over, base, chosen or NOTHING]
    given = _from_files(stage, command_line)
    require(
        stage.method is None or all(name != "method" for name, _ in overrides),
        f"{stage.section}.method names one method, and --method several; leave it out",
    )
    require(
        not any("output_dir" in layer.settings for layer in usual + given)
        and not any(name == "output_dir" for name, _ in overrides),
        f"{stage.section}.output_dir can't be set here: train.py puts this step in {out};"
        " --output-dir moves it",
    )
    options = _options(stage, command_line.request, stages)
    row = method_layer(stage.config_class, [*usual, *given, options], overrides)
    usual.insert(2, row)
    above = [
        options,
        _short_forms(stage, command_line, usual + given),
        Layer({"output_dir": str(out)}, "--output-dir"),
    ]
    zero_config = command_line.request.zero_config
    # Steps that don't run are resolved for what they hand over: the file need not suit them.
    if zero_config is not None and stage.number in command_line.request.step:
        given.append(
            deepspeed_layer(
                stage.config_class,
                zero_config,
                world=world,
                layers=usual + given + above,
                overrides=overrides,
                section=f"{stage.section}.",
            )
        )
    return usual, given + above


def _before(command_line: CommandLine, first: Stage) -> str:
    """The model that the first step begins with."""
    path: Any = EMBEDDED
    for layer in command_line.files:
        model = layer.settings.get(first.section, {}).get(first.main_role)
        if isinstance(model, Mapping):
            path = model.get("path", path)
    path = command_line.request.actor_model or path
    for name, words in command_line.overrides[first.section]:
        if name == f"{first.main_role}.path" and words:
            path = words[0]
    return str(path)


def _method(stage: Stage, request: Request) -> str | None:
    """The method that the user named for a step: its own of several, or the one it has."""
    known = rows_of(stage.config_class)
    named = (name for name in request.method if name in known or not known)
    return stage.method or next(named, None)


def _from_files(stage: Stage, command_line: CommandLine) -> list[Layer]:
    """What each file says about a step, and then about its method."""
    method = _method(stage, command_line.request)
    return [each for layer in command_line.files for each in settings_of(layer, stage, method)]


def _overrides(stage: Stage, command_line: CommandLine) -> tuple[Option, ...]:
    """The dotted options of a step, those of its method the last."""
    return options_of(command_line.overrides, stage, _method(stage, command_line.request))


def _section(layer: Layer, stage: Stage) -> Layer:
    """What a file says about one step."""
    return replace(layer, settings=layer.settings.get(stage.section, {}))


def _handed_over(
    stage: Stage, command_line: CommandLine, stages: Sequence[Stage], origins: Mapping[str, str]
) -> Layer:
    """Models that come from the steps before, by role the section of the one that makes it."""
    first, *_ = stages
    made = {each.section: str(command_line.request.output_dir / each.name) for each in stages}
    made[BEFORE] = EMBEDDED if stage is first else _before(command_line, first)
    running = {*command_line.request.step, *command_line.made}
    present = {each.section for each in stages if each.number in running} | {BEFORE}
    settings: dict[str, Any] = {
        role: {"path": made[origin]}
        for role, origin in origins.items()
        if role not in stage.optional or origin in present
    }
    if "shares" in get_type_hints(stage.config_class):
        needed = {each for role, each in origins.items() if role not in stage.optional}
        read = {each.number for each in stages if each.section in needed}
        earlier = set(range(1, stage.number)) - read - running
        settings["shares"] = sorted({stage.number, *earlier})
    return Layer(settings, "train.py")


def _options(stage: Stage, request: Request, stages: Sequence[Stage]) -> Layer:
    """The settings that train.py's own options stand for."""
    data = {
        "path": list(request.data_path) or None,
        "eval_path": list(request.eval_path) or None,
        "seed": request.data_seed,
        "split": request.data_split and list(request.data_split),
        "fields": request.fields or None,
        "format": request.format,
        "max_length": request.max_length,
    }
    if not stage.config_class.reads_dialogues:
        # Unless it runs by itself they speak of the rows of other steps.
        alone = set(request.step) == {stage.number}
        kept = ("path", "eval_path", "seed", "max_length") if alone else ()
        data = {name: data[name] for name in kept}
    paths = {"actor": request.actor_model, "reward": request.reward_model}
    zero_stages = {"actor": request.actor_zero_stage, "reward": request.reward_zero_stage}
    earlier = [each for each in stages if each.number < stage.number]
    begun = {option for each in earlier for option in each.options.values()}
    models = {
        # Later steps take the model from the one that begins with it.
        role: {
            "path": None if option in begun else paths[option],
            "zero_stage": zero_stages[option],
        }
        for role, option in stage.options.items()
    }
    own: dict[str, Any] = {
        "seed": request.seed,
        "save_every": request.save_every,
        "threads": request.threads,
        "parallel": {
            "replicas": request.replicas,
            "tp": request.tensor_parallel,
            "pp": request.pipeline_parallel,
        },
        "method": _method(stage, request) if rows_of(stage.config_class) else None,
        "environment": request.environment if hasattr(stage.config_class, "environment") else None,
    }
    if hasattr(stage.config_class, "inference_tp_size"):
        # Each process plays by itself, with whole weights.
        own["inference_tp_size"] = 1 if request.environment else request.tensor_parallel
    if request.guards is not None and hasattr(stage.config_class, "guards"):
        own["guards"] = request.guards
    # Steps that have no such short forms leave them as they are.
    short = [("reward_function", [*request.reward_function]), ("reward", [*request.reward])]
    given = [option for option in short if option[1]]
    for name, words in stage.config_class.without_short_forms(given):
        if (name, words) not in given:
            own[name] = json.loads(words[0])
    return Layer(_given({"data": data, **own, **models}), "the command line")


def _short_forms(stage: Stage, command_line: CommandLine, below: Sequence[Layer]) -> Layer:
    """The settings that --lr, --batch-size, --epochs and others stand for, in a step that runs."""
    request = command_line.request
    if stage.number not in request.step:
        return NOTHING
    kinds = get_type_hints(stage.config_class)
    trained = [name for name, kind in kinds.items() if kind is TrainedModelConfig]
    lora = _given({"rank": request.lora, "variant": request.lora_variant})
    of_model = _given({"lora": lora or None, "quantize": request.quantize})
    settings: dict[str, Any] = {role: dict(of_model) for role in trained if of_model}
    if request.lr is not None:  # the first is the one that the step is about
        settings.setdefault(trained[0], {})["optim"] = {"lr": request.lr}
    if request.batch_size is not None:
        settings["batch_size"] = request.batch_size
        if "rollout_size" in kinds:  # a minibatch is cut from one rollout
            sizes = [layer.settings.get("rollout_size") for layer in below]
            defaults: Any = stage.config_class
            default = defaults.rollout_size
            rollout = next((size for size in reversed(sizes) if size is not None), default)
            if isinstance(rollout, int) and rollout < request.batch_size:
                settings["rollout_size"] = request.batch_size
    if request.epochs is not None:
        settings["epochs"] = request.epochs
        own = [layer.settings for layer in _from_files(stage, command_line)]
        # Of a file that says both, a step's own max_steps is the more specific.
        if "epochs" in command_line.typed or not any("max_steps" in section for section in own):
            settings["max_steps"] = None
    return Layer(settings, "the command line")


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that are None."""
    return {
        name: _given(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value is not None
    }
