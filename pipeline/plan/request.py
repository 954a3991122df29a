"""The command line of `train.py`: its own options, settings files, options of the steps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from pipeline.cli.options import load_layers, option_name, split_options
from pipeline.config import AdapterVariant, Quantize, check_split
from pipeline.launch.layout import Deployment
from pipeline.plan.stage import METHODS, Stage, check_method_name
from pipeline.settings.build import Layer, build_config
from pipeline.settings.deepspeed_chat import deepspeed_chat_hint
from pipeline.settings.fields import Option, did_you_mean, list_settings
from pipeline.system.errors import ConfigError, require

OPT_SIZES = ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")
"""Sizes of OPT that may be given instead of a model's name, as in DeepSpeed-Chat."""


@dataclass(frozen=True, kw_only=True)
class Request(Deployment):
    """The options of `train.py`."""

    step: tuple[Literal[0, 1, 2, 3], ...] = (1, 2, 3)
    """Steps to run: 1 supervised fine-tuning, 2 reward model, 3 PPO or another method. By default
    all whose models are needed, which excludes step 2 if programs give the rewards or the method
    trains on pairs, and step 1 for orpo. Step 0 is pre-training on --pretrain.data.path."""

    method: tuple[str, ...] = ()
    """Method of step 3: ppo; without a critic: grpo, grpo_2024, dr_grpo, dapo, gspo, cispo, rloo,
    reinforce_pp or raft; from a --teacher: distill or gkd. Each sets defaults of --ppo settings
    (docs/methods.md). Without RL, from preferences: dpo, cdpo, rdpo, ldpo, ipo, hinge, simpo, cpo,
    orpo or kto, with --preference settings (docs/preference.md). Several methods run in separate
    directories step3_NAME and are compared; --methods.NAME.SETTING applies to one."""

    actor_model: str | None = None
    """Model that becomes the chat model: Hugging Face id, local directory, or an OPT size as in
    DeepSpeed-Chat (1.3b is facebook/opt-1.3b). By default the embedded model with 1M parameters. If
    there is no output of step 1, step 3 starts from this model."""

    reward_model: str | None = None
    """Model from which the reward model starts, given as for --actor-model; by default step 1's
    output. If there is no output of step 2, PPO uses this model as the reward model."""

    reward_function: tuple[str, ...] = ()
    """Python functions that compute the rewards of step 3 instead of a reward model, each as
    FILE.py:NAME; they become sources in --ppo.rewards."""

    reward: tuple[str, ...] = ()
    """Built-in sources of rewards: math, regex:PATTERN, ... (docs/rewards.md); verifier, for the
    embedded task; or model, the reward model. Settings of a source are given in braces."""

    teacher: str | None = None
    """Model with the actor's tokenizer from which step 3 learns with --method distill or gkd; for
    distill, also the address of an OpenAI-compatible server for it: http://HOST:8000/v1."""

    environment: str | None = None
    """Environment class of step 3, as FILE.py:CLASS, or one listed in docs/environments.md."""

    guards: Literal["warn", "strict", "none"] | None = None
    """Action in step 3 when a guard trips: warn logs a warning (the default), strict rolls back to
    the last healthy checkpoint, none switches guards off (docs/guards.md)."""

    actor_zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage of the actor in steps 0, 1 and 3."""

    reward_zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage of the reward model in step 2 and of the critic in step 3."""

    replicas: int | None = None
    """Copies of the sharded models in all steps (HSDP, docs/parallel.md): each step's
    parallel.replicas; default 1."""

    tensor_parallel: int | None = None
    """Tensor-parallel size in all steps (docs/parallel.md): each step's parallel.tp, and
    inference_tp_size where step 3 generates; default 1."""

    pipeline_parallel: int | None = None
    """Pipeline stages in all steps (docs/parallel.md): each step's parallel.pp; default 1."""

    zero_config: Path | None = None
    """DeepSpeed JSON file: settings of every trained model, and batch sizes. It overrides --config,
    and other options override it; docs/deepspeed.md lists its keys."""

    output_dir: Path = Path("output")
    """Directory for step0_pretrain, step1_sft, step2_reward, step3_ppo or step3_dpo, summary.json
    and report.html."""

    data_path: tuple[str, ...] = ()
    """Local .json, .jsonl, .csv, .tsv (all also .gz) or .parquet files, directories, or Hub names,
    each with an optional @split and :weight. By default the embedded task for the embedded model,
    Dahoas/rm-static for any other. If only step 0 runs, its texts."""

    eval_path: tuple[str, ...] = ()
    """Rows for evaluation in all steps, given as for --data-path; prompts for step 3 only are given
    with --ppo.data.eval_path. By default the test split, or a held-out part of the data."""

    data_split: tuple[float, float, float] | None = None
    """Proportions of the prompts for steps 1, 2 and 3; default 2,4,4."""

    data_seed: int | None = None
    """Seed that decides which prompts are held out, and which step gets each of the others; default
    0. Independent of --seed."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names if they differ from the usual ones: prompt=question chosen=good."""

    format: str | None = None
    """Chat format: auto, tokenizer, human_assistant, chatml, llama2, llama3, plain,
    or a Jinja file."""

    max_length: int | None = None
    """Maximum tokens in prompt and response; default 512."""

    lr: float | None = None
    """Peak learning rate of the steps that run: model.optim.lr of each, and in step 3 the actor's,
    --ppo.actor.optim.lr or --preference.model.optim.lr; for adapters MODEL.lora.lr. The critic
    keeps its own."""

    batch_size: int | None = None
    """Sequences in an optimizer step of the steps that run: --sft.batch_size, --reward.batch_size
    (pairs), and in step 3 the minibatch of PPO, --ppo.batch_size; --ppo.rollout_size is raised to
    it if it is smaller."""

    epochs: float | None = None
    """Passes over the training rows (in RL, over the prompts) of the steps that run, instead of
    max_steps: --sft.epochs, --reward.epochs, --ppo.epochs. Passes over one rollout are
    --ppo.ppo_epochs."""

    lora: int | None = None
    """Train only adapters, with this rank (lora.rank of trained models)."""

    lora_variant: AdapterVariant | None = None
    """Variant of the adapters (MODEL.lora.variant)."""

    quantize: Quantize | None = None
    """Store the frozen weights under adapters in 4 or 8 bits (MODEL.quantize)."""

    seed: int | None = None
    """Seed of all steps; default 1234."""

    threads: int | None = None
    """CPU threads per process; by default RLHF_THREADS or OMP_NUM_THREADS from the environment, or
    else one per core of the process's share."""

    push_to_hub: str | None = None
    """Hub repository OWNER/NAME for the last step's model, private if it is new; uploaded when all
    steps are done (docs/report.md)."""

    dry_run: bool = False
    """Check the plan and print it: rows, steps, tokens and an estimate of the time of each step,
    the commands that run it manually, and the memory table; run nothing. The exit code is 0 even if
    a step can't fit this machine."""

    plan: Literal["check", "auto", "off"] = "check"
    """Before step 1 starts: check verifies the settings, data, chat formats, tokenizers, model
    files and lengths of every step, estimates memory, and refuses what can't fit this machine; auto
    also chooses micro-batch, ZeRO stage, offload, gradient checkpointing, and in step 3 the number
    of concurrent responses and of processes that generate together, unless you set them; off does
    none of this."""

    plan_for: str | None = None
    """Plan for another machine and run nothing: 8xA100-80GB, 4x24GB, 2x8xH100-80GB for two
    machines, 8xA100-80GB+1024GB to specify the host memory."""

    autotune: Literal["tune", "run"] | None = None
    """Find fast settings that fit, with short timed trials, each a real run: the micro-batch is
    doubled while that is faster, then gradient checkpointing and ZeRO stages are tried. tune prints
    the settings as options and exits; run continues with them."""

    autotune_steps: int = 4
    """Optimizer steps measured in a trial (in RL, iterations), after 2 warm-up steps."""

    resume: bool = False
    """Continue the last run of the output directory, with its options if you give none: skip
    finished steps, resume an unfinished one."""

    overwrite: bool = False
    """Replace the output of an earlier run in the output directory; other files are kept."""

    save_every: int | str | None = None
    """Steps between checkpoints, or a time such as 2h; default 15m."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.step), "--step needs at least one of 0 1 2 3")
        for name in ("actor_model", "reward_model", "data_path", "eval_path"):
            value = getattr(self, name)
            words = (value,) if isinstance(value, str) else value or ()
            require("" not in words, f"{name} is empty; pass a value, or omit the option")
        counts = ("batch_size", "epochs", "lora", "max_length", "replicas", "tensor_parallel")
        for name in ("lr", *counts, "pipeline_parallel", "threads", "autotune_steps"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be positive, got {value}")
        require(
            self.lora is not None or self.lora_variant is None,
            f"--lora-variant {self.lora_variant} needs adapters, but --lora is not set; add --lora"
            " 16, or set the lora.variant of a model",
        )
        if self.data_split is not None:
            check_split("data_split", self.data_split)
        require(
            self.autotune is not None or self.autotune_steps == Request.autotune_steps,
            "--autotune-steps needs --autotune tune or --autotune run",
        )
        require(
            self.autotune is None or not (self.dry_run or self.plan_for),
            "--autotune runs trials on the machines that this command reaches; omit"
            f" {'--dry-run' if self.dry_run else '--plan-for'}",
        )
        in_pods = self.deployment_type == "kubernetes"
        require(
            not in_pods or not (self.overwrite or self.autotune or self.output_dir.is_absolute()),
            "--deployment-type kubernetes needs an --output-dir relative to its volume, and"
            " can't be combined with --overwrite or --autotune",
        )
        require(
            not (self.resume and self.overwrite),
            "--resume keeps earlier results and --overwrite replaces them; choose one",
        )


@dataclass(frozen=True)
class CommandLine:
    """The command line, before it is resolved to settings of the steps."""

    request: Request

    files: tuple[Layer, ...]
    """Each `--config`, in order."""

    overrides: Mapping[str, tuple[Option, ...]]
    """Dotted options by section: `--ppo.kl_coef 0.1` is ("kl_coef", ["0.1"]) under "ppo", and
    `--methods.grpo.kl_coef 0.1` is the same under "methods.grpo"."""

    typed: frozenset[str] = frozenset()
    """Names of train.py's options on the command line, not in a file."""

    finished_steps: frozenset[int] = frozenset()
    """Numbers of the steps that an earlier run finished in the output directory."""


def parse_request(argv: Sequence[str], stages: Sequence[Stage]) -> CommandLine:
    """Parse train.py's options, and separate those of the steps and of single methods.

    Raises:
        ConfigError: an option or a settings file can't be used; the message names it.
    """
    typed: list[Option] = []
    dotted: dict[str, list[Option]] = {stage.section: [] for stage in stages}
    files: list[Layer] = []
    for name, words in split_options(argv):
        section, _, rest = name.partition(".")
        if name == "config":
            files += load_layers(words)
        elif section in dotted and rest:
            dotted[section].append((rest, words))
        elif section == METHODS and "." in rest:
            method, _, rest = rest.partition(".")
            dotted.setdefault(f"{METHODS}.{method}", []).append((rest, words))
        else:
            typed.append((name, words))
    _check_names(typed, files, stages)
    sections = {*(stage.section for stage in stages), METHODS}
    layers = [
        replace(file, settings={k: v for k, v in file.settings.items() if k not in sections})
        for file in files
    ]
    try:
        request = build_config(Request, layers, typed)
    except ConfigError as error:
        raise ConfigError(_with_option_name(str(error), files)) from None
    request = replace(
        request,
        actor_model=resolve_model_name("--actor-model", request.actor_model),
        reward_model=resolve_model_name("--reward-model", request.reward_model),
    )
    _check_sections(files, dotted, request.method, stages)
    overrides = {section: tuple(options) for section, options in dotted.items()}
    return CommandLine(request, tuple(files), overrides, frozenset(name for name, _ in typed))


def resolve_model_name(option: str, path: str | None) -> str | None:
    """Expand a DeepSpeed-Chat size: `1.3b` becomes `facebook/opt-1.3b`.

    A local directory with that name takes precedence.

    Raises:
        ConfigError: the name looks like a size that OPT does not have.
    """
    if path is None or not re.fullmatch(r"\d+(\.\d+)?[bBmM]", path) or Path(path).is_dir():
        return path
    require(
        path.lower() in OPT_SIZES,
        f"{option} {path} is not an OPT size ({', '.join(OPT_SIZES)}); for another family pass the"
        " model's name or directory",
    )
    return f"facebook/opt-{path.lower()}"


def check_sections_run(
    command_line: CommandLine, stages: Sequence[Stage], known: Sequence[Stage]
) -> None:
    """Reject options that apply to no step that may run, such as those of methods not selected.

    Raises:
        ConfigError: such an option is given; the message names it and the fix.
    """
    present = {stage.section for stage in stages}
    for stage in known:
        options = command_line.overrides.get(stage.section, ())
        is_chosen = stage.on_request or stage.number in command_line.request.step
        if options and stage.section not in present and is_chosen:
            owner = f"methods {', '.join(stage.methods)}, none of which runs; add one to --method"
            if stage.on_request:
                owner = f"step {stage.number}, which is not selected; add {stage.number} to --step"
            raise ConfigError(
                f"--{stage.section}.{options[0][0]} is a setting of {owner}, or omit the setting"
            )
    names = ("reward_function", "reward", "environment", "teacher")
    given = [option_name(name) for name in names if getattr(command_line.request, name)]
    request = command_line.request
    require(
        request.teacher is None or not {"distill", "gkd"}.isdisjoint(request.method or ["gkd"]),
        "--teacher is for the methods distill and gkd: add one to --method, or omit --teacher",
    )
    takes_rewards = any("environment" in stage.config_class.OPTIONS for stage in stages)
    require(
        takes_rewards or not given,
        f"only methods that learn from rewards take {' and '.join(given)}, but the selected ones"
        " learn from preferences; add a method such as grpo to --method, or omit the option",
    )


def _check_sections(
    files: Sequence[Layer],
    overrides: Mapping[str, Sequence[Option]],
    methods: Sequence[str],
    stages: Sequence[Stage],
) -> None:
    """Reject invalid sections, unknown methods, and options for methods that don't run.

    A file may contain sections of methods that don't run.
    """
    for layer in files:
        methods_section = layer.settings.get(METHODS) or {}
        sections = {stage.section: layer.settings.get(stage.section, {}) for stage in stages}
        sections[METHODS] = methods_section
        if isinstance(methods_section, Mapping):
            sections |= {f"{METHODS}.{name}": value for name, value in methods_section.items()}
            for name in methods_section:
                check_method_name(str(name), stages, f"{METHODS} in {layer.origin}:")
        for name, value in sections.items():
            is_section = value is None or isinstance(value, Mapping)
            require(is_section, f"{name} in {layer.origin} must be a section, got {value}")
    for section, options in overrides.items():
        head, _, name = section.partition(".")
        if head == METHODS:
            check_method_name(name, stages, f"--{METHODS}.NAME.SETTING:")
            require(
                name in methods,
                f"--{section}.{options[0][0]} is for a method that does not run; add {name} to"
                " --method",
            )


def _check_names(typed: Sequence[Option], files: Sequence[Layer], stages: Sequence[Stage]) -> None:
    """Reject unknown options, with suggestions, and steps' settings at the top level of a file."""
    known = {option.name for option in fields(Request)} | {stage.section for stage in stages}
    unknown = [name for name, _ in typed if name.partition(".")[0] not in known]
    known.add(METHODS)
    if not unknown and all(layer.settings.keys() <= known for layer in files):
        return
    step_settings = [
        setting
        for stage in stages
        for setting in list_settings(stage.config_class, f"{stage.section}.")
    ]
    for name in unknown:
        settings = [*list_settings(Request), *step_settings]
        hint = deepspeed_chat_hint(name) or did_you_mean(settings, name, option_name)
        raise ConfigError(f"there is no option {option_name(name)}; {hint}")
    nested_names = {word for setting in step_settings for word in setting.name.split(".")[1:]}
    for layer in files:
        for name in layer.settings.keys() & nested_names - known:
            raise ConfigError(
                f"{name} in {layer.origin} is a setting of the steps; put it under pretrain:, sft:,"
                " reward:, ppo: or preference:"
            )


def _with_option_name(sentence: str, files: Sequence[Layer]) -> str:
    """Spell the first word of `sentence`, a setting, as an option unless a file sets it."""
    first, space, rest = sentence.partition(" ")
    name = first.lstrip("-")
    known = {option.name for option in fields(Request)}
    in_file = any(rest.startswith(f"in {layer.origin} ") for layer in files)
    return option_name(name) + space + rest if name in known and not in_file else sentence
