"""Everything about a plan that can be wrong, found before its first step begins.

What is cheap to look at comes first: where that is wrong, nothing heavy is imported. Weights are
never loaded.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.budget.fit import in_words
from pipeline.budget.machine import RUNTIME_CPU
from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig, ModelUse, StepConfig
from pipeline.errors import ConfigError, UserError, UserErrors, require
from pipeline.hub import cached_file
from pipeline.launch.local import share_of_cores
from pipeline.models.directory import check_model_directory
from pipeline.plan.inputs import is_local, model_paths
from pipeline.plan.methods import of_methods
from pipeline.plan.plan import Plan
from pipeline.plan.preview import (
    Preview,
    check_task_rows,
    count_corpus,
    count_tokens,
    read_rows,
)
from pipeline.plan.stage import Stage
from pipeline.trackers import require_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.data.chat.chat_format import ChatFormat


Problem = tuple[Stage, str]
"""A step, and the sentence on what is wrong in it."""


def check_plan(plan: Plan, *, downloads: bool) -> Mapping[str, Preview]:
    """Check everything, and return the data of each step that will run.

    Args:
        plan: its finished steps are left out; with `--plan off` nothing is looked at.
        downloads: whether models and data on the Hub may be asked for.

    Raises:
        UserErrors: everything that is wrong, each in one sentence.
    """
    check_settings(plan)
    return check_rows(plan, downloads=downloads)


def check_settings(plan: Plan) -> None:
    """Refuse what is wrong whatever the rows are; takes no time and doesn't need PyTorch.

    Raises:
        UserErrors: as `check_plan`.
    """
    problems: list[Problem] = []
    for stage in _to_check(plan):
        for check in (_trackers, _processes, _model_files):
            problems += _found(stage, lambda check=check, stage=stage: check(plan, stage))
    _raise(problems, plan)


def check_rows(plan: Plan, *, downloads: bool) -> Mapping[str, Preview]:
    """Check the rows of each step in its model's tokens, after `check_settings`.

    Raises:
        UserErrors: as `check_plan`.
    """
    stages, problems = _to_check(plan), list[Problem]()
    chats = Chats(stages, plan.configs, downloads=downloads)
    previews: dict[str, Preview] = {}
    for stage in stages:
        for check in (
            lambda stage=stage: _rows(plan, stage, previews, downloads=downloads),
            lambda stage=stage: check_task_rows(plan.configs[stage.name], downloads=downloads),
            lambda stage=stage: _chat(plan, stage, chats, previews),
            lambda stage=stage: _lengths(plan, stage),
        ):
            problems += _found(stage, check)
    _raise(problems, plan)
    return previews


def _to_check(plan: Plan) -> list[Stage]:
    if plan.request.plan == "off":
        return []
    return [stage for stage in plan.stages if stage.name not in plan.finished]


def _found(stage: Stage, check: Callable[[], None]) -> Iterator[Problem]:
    try:
        check()
    except UserError as error:
        yield stage, str(error)


def _raise(problems: Sequence[Problem], plan: Plan) -> None:
    """Raise everything that is wrong, each once, with the methods that it concerns."""
    found: dict[str, list[str]] = {}
    for stage, sentence in problems:
        found.setdefault(sentence, []).extend([stage.method] if stage.method else [])
    if found:
        raise UserErrors(of_methods(found, _to_check(plan)))


def _trackers(plan: Plan, stage: Stage) -> None:
    require_trackers(plan.configs[stage.name].trackers)


def _processes(plan: Plan, stage: Stage) -> None:
    """Main memory, prompts and layers for each process."""
    settings: Any = plan.configs[stage.name]
    world, machine = plan.machine.world, plan.machine
    least, cores = machine.processes * RUNTIME_CPU, share_of_cores(1)
    require(
        machine.has_gpu or machine.host_bytes is None or least <= machine.host_bytes,
        f"{machine.processes} processes are more than {machine.name} can run: they take"
        f" {in_words(least)[0]} before they load a model, and it has"
        f" {in_words(machine.host_bytes or 0)[0]} and {cores} core{'s' if cores > 1 else ''}; take"
        f" --num-processes {max(1, min(cores, (machine.host_bytes or 0) // RUNTIME_CPU))}",
    )
    plan.configs[stage.name].parallel.check(world, section=stage.prefix)
    rollout, together = (getattr(settings, f"{n}_size", None) for n in ("rollout", "inference_tp"))
    group = getattr(settings, "group_size", 1)
    of_groups = f" in groups of {group}" if group > 1 else ""
    require(
        rollout is None or rollout // group >= world,
        f"{stage.prefix}.rollout_size {rollout}{of_groups} leaves some of {world} processes"
        " without a prompt; raise it, or start fewer processes",
    )
    require(
        together is None or world % together == 0,
        f"{stage.prefix}.inference_tp_size {together} doesn't divide the {world} processes; choose"
        " one that does, or start another number of processes",
    )


def _model_files(plan: Plan, stage: Stage) -> None:
    """The headers of the model directories that already exist."""
    config = plan.configs[stage.name]
    if plan.request.plan_for is not None:
        return  # the weights may be on the machine that this is planned for
    uses = config.workload(plan.machine.world).models
    generating = {str(use.settings.path) for use in uses if not use.scores}
    for model in config.used_models().values():
        path = str(model.path)
        to_make = [each for each in plan.stages if each.name not in plan.finished]
        made = Path(path) in {plan.configs[each.name].output_dir for each in to_make}
        if path != EMBEDDED and is_local(path) and not made:
            check_model_directory(
                path,
                generates=path in generating,
                allow_pickle=model.allow_pickle,
                trust_remote_code=model.trust_remote_code,
            )


def _rows(plan: Plan, stage: Stage, previews: dict[str, Preview], *, downloads: bool) -> None:
    config = plan.configs[stage.name]
    if config.reads_dialogues:
        previews[stage.name] = read_rows(config, stage, downloads=downloads)


def _chat(plan: Plan, stage: Stage, chats: "Chats", previews: dict[str, Preview]) -> None:
    """Tokenizers and formats, and how long the rows are in them."""
    if not plan.configs[stage.name].reads_dialogues:
        config = _within_context(plan, stage)
        previews[stage.name] = count_corpus(config, chats.tokenizer_of(stage))
        return
    chat = chats.of_step(stage)
    preview = previews.get(stage.name)
    if chat is not None and preview is not None and preview.data is not None:
        data, config = preview.data, plan.configs[stage.name]
        previews[stage.name] = replace(preview, tokens=count_tokens(data, config, chat, stage))
        stage.check_learnable(data.train, data.eval, chat, _within_context(plan, stage))


def _within_context(plan: Plan, stage: Stage) -> StepConfig:
    """The settings with rows no longer than the model reads that learns from them."""
    config = plan.configs[stage.name]
    known = [each.tokens for each in contexts(plan, stage) if each.role == "model"]
    length = min([config.data.max_length, *known])
    return replace(config, data=replace(config.data, max_length=length))


def _lengths(plan: Plan, stage: Stage) -> None:
    """Whether each model of step 3 reads prompt and response to their end."""
    settings: Any = plan.configs[stage.name]
    if not hasattr(settings, "max_prompt_length"):
        return  # steps 1 and 2 cut what is longer than the model reads
    for limit in contexts(plan, stage):
        if settings.max_prompt_length + settings.max_new_tokens > limit.tokens:
            raise ConfigError(
                f"{stage.section}.max_prompt_length {settings.max_prompt_length} +"
                f" {stage.section}.max_new_tokens {settings.max_new_tokens} is more than the"
                f" {limit.tokens} tokens that the {limit.role} {limit.path} reads; lower one of"
                " them"
            )


@dataclass(frozen=True)
class Context:
    """The context length of a model."""

    role: str
    path: str
    tokens: int


def contexts(plan: Plan, stage: Stage) -> Iterator[Context]:
    """The contexts of the models of a step, as far as they are known.

    A model that is yet to be made reads as much as the one it starts from.
    """
    from pipeline.plan.memory import origins_of

    origins = origins_of(plan.configs)
    for name, path in model_paths(plan.configs[stage.name]):
        role = name.partition(".")[0]
        source = path
        while source in origins and not (Path(source) / "config.json").is_file():
            source = origins[source]
        tokens = _context(source)
        if tokens is not None and role != "base":
            yield Context(role, path, tokens)


def _context(path: str) -> int | None:
    from transformers import AutoConfig

    from pipeline.demo.model import CONTEXT
    from pipeline.models.known import KNOWN

    if path == EMBEDDED:
        return CONTEXT
    try:
        if is_here(path):
            settings = AutoConfig.from_pretrained(path)
        elif path in KNOWN:
            settings = AutoConfig.for_model(**KNOWN[path])
        else:
            return None
    except (OSError, ValueError, KeyError):  # loading it reports the error
        return None
    return getattr(settings.get_text_config(), "max_position_embeddings", None)


@dataclass
class Chats:
    """The tokenizer and chat format of every model of a plan, also of those yet to be made.

    A model that an earlier step makes has the tokenizer of the model it starts from, with the chat
    format of that step. Each tokenizer is loaded once, and nothing but tokenizers.
    """

    stages: Sequence[Stage]
    """The steps that will run, in order; their outputs need not be there."""

    configs: Mapping[str, StepConfig]

    downloads: bool
    """Whether names on the Hub may be requested; if not, what was not downloaded is unknown."""

    _known: "dict[str, PreTrainedTokenizerBase | None]" = field(default_factory=dict)

    def of_step(self, stage: Stage) -> "ChatFormat | None":
        """The format that a step trains in; None where its tokenizer is not known.

        Raises:
            UserError: there is no tokenizer or no such format, or a model of the step numbers its
                tokens differently or was trained in another format.
        """
        from pipeline.models.chat import require_same_chat, speaks_alike

        config = self.configs[stage.name]
        own, *others = _models(config)
        tokenizer, chat = self._with_format(own.settings, config.data)
        for use in others:
            other = self._of(use.settings)
            if tokenizer is None or other is None:
                continue
            if own.scores and chat is not None and chat.begins_with_cls:
                continue  # an encoder reads the actor's responses as text
            if use.scores and not use.learns:  # it may read text instead of the actor's tokens
                speaks_alike(tokenizer, other, str(use.settings.path))
            else:
                name = "the reward model" if own.scores else "the actor"
                require_same_chat(tokenizer, other, name, use.settings)
        return chat

    def tokenizer_of(self, stage: Stage) -> "PreTrainedTokenizerBase | None":
        """That of the model which a step trains without a format; None where it is not known.

        Raises:
            UserError: there is none.
        """
        own, *_ = _models(self.configs[stage.name])
        return self._of(own.settings)

    def _with_format(
        self, model: FrozenModelConfig, data: DataConfig
    ) -> "tuple[PreTrainedTokenizerBase | None, ChatFormat | None]":
        """As `pipeline.models.chat.load_chat`, for a model that may not be there yet."""
        from pipeline.data.chat.resolve_format import resolve_format

        tokenizer = self._of(model)
        if tokenizer is None:
            return None, None
        tokenizer = copy.deepcopy(tokenizer)
        chat = resolve_format(tokenizer, data.format, data.template_args, data.template_date)
        chat.add_new_tokens()
        chat.attach(tokenizer)
        return tokenizer, chat

    def _of(self, model: FrozenModelConfig) -> "PreTrainedTokenizerBase | None":
        path = str(model.path)
        if path not in self._known:
            self._known[path] = self._load(model, path)
        return self._known[path]

    def _load(self, model: FrozenModelConfig, path: str) -> "PreTrainedTokenizerBase | None":
        from pipeline.models.load import load_tokenizer

        maker = self._maker(path)
        if maker is not None:
            config = self.configs[maker.name]
            start, *_ = _models(config)
            if not config.reads_dialogues:
                return self._of(start.settings)
            return self._with_format(start.settings, config.data)[0]
        if not self.downloads and not _has_tokenizer(path):
            return None
        return load_tokenizer(model)

    def _maker(self, path: str) -> Stage | None:
        """The step of the plan that makes the model."""
        outputs = {self.configs[stage.name].output_dir: stage for stage in self.stages}
        return outputs.get(Path(path))


def is_here(path: str) -> bool:
    """Whether a model's small files can be read without the network."""
    return path == EMBEDDED or is_local(path) or _has_cached_tokenizer(path)


def _has_tokenizer(path: str) -> bool:
    """Whether a tokenizer is here; a directory to plan with needs a configuration alone."""
    directory = Path(path).expanduser()
    return is_here(path) and (
        not directory.is_dir() or any(directory.glob("token*")) or any(directory.glob("*.model"))
    )


def _has_cached_tokenizer(name: str) -> bool:
    return cached_file(name, "tokenizer_config.json") is not None


def _models(config: StepConfig) -> list[ModelUse]:
    """The step's models whose tokens must be the same, the one that learns first.

    Not among them is one that the step only compares with: it does without where that can't be.
    """
    workload = config.workload(1)
    uses = [use for use in workload.models if use.settings.path and use not in workload.compared]
    return sorted(uses, key=lambda use: not use.learns)
