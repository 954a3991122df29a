"""Check a plan and read the rows of its steps, before the first step starts.

Cheap checks come first, and nothing heavy is imported before they pass. Weights are never loaded.
"""

import copy
import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.budget.models import build_models
from pipeline.config import (
    EMBEDDED,
    DataConfig,
    FrozenModelConfig,
    ModelUse,
    RowColumns,
    StepConfig,
)
from pipeline.data.examples import Example
from pipeline.data.rows.sources import LOCAL_JSONFILE, bare_name, is_hub_name, is_local_jsonfile
from pipeline.data.sharing.steps import StepData, check_embedded, load_examples, select_rows
from pipeline.models.hf.directory import check_model_directory
from pipeline.plan.inputs import is_local
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.system.errors import UserError, counted, require
from pipeline.system.hub import cached_file, check_push

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.data.chat.chat_format import ChatFormat

SAMPLE = 128
"""Maximum number of rows that are encoded to estimate the mean length."""

MAX_BYTES = 512 * 2**20
"""Maximum size of data files that are read for a plan; larger ones are left to the steps."""


@dataclass(frozen=True)
class Preview:
    """The rows of a step, as far as they are known before it starts."""

    data: StepData | None = None
    """The data; None if the rows were not read."""

    unread: str = ""
    """The reason why the rows were not read; empty if they were."""

    row_tokens: float | None = None
    """Mean tokens per training row (both sequences of a pair; in RL, prompt only), if known."""

    def steps(self, config: StepConfig) -> int | None:
        """Return the number of optimizer steps (in RL, iterations), or None if unknown."""
        if config.max_steps is not None or self.data is None:
            return config.max_steps
        return math.ceil(config.epochs * len(self.data.train) / config.workload(1).data_rows)

    def held_out(self, config: StepConfig) -> int:
        """Return the number of evaluation rows, or 0 if the rows were not read."""
        return min(len(self.data.eval), config.data.max_eval_rows) if self.data else 0


def check_settings(plan: Plan) -> None:
    """Check everything that doesn't depend on the rows, quickly and without importing PyTorch.

    Finished steps are skipped; with `--plan off`, no step is checked.

    Raises:
        UserError: a setting or a model can't be used.
    """
    request = plan.request
    if request.push_to_hub is not None:
        check_push(request.push_to_hub, online=not (request.dry_run or request.plan_for))
    checks = [partial(check, plan) for check in (_check_processes, _check_model_files)]
    _run_checks(plan, [lambda stage: plan.configs[stage.name].require_trackers(), *checks])


def check_rows(plan: Plan, *, downloads: bool) -> Mapping[str, Preview]:
    """Read, tokenize and check the rows of the steps that `check_settings` has checked.

    With `downloads`, models and data may be downloaded from the Hub.

    Raises:
        UserError: a model or the rows can't be used.
    """
    chats = ChatFormats(plan, downloads=downloads)
    previews: dict[str, Preview] = {}

    def read(stage: Stage) -> None:
        config = plan.configs[stage.name]
        if config.reads_dialogues:
            previews[stage.name] = read_rows(config, stage, downloads=downloads)

    def count_tokens(stage: Stage) -> None:
        config, preview = plan.configs[stage.name], previews.get(stage.name)
        chat = chats.get_format(stage) if config.reads_dialogues else None
        if chat is not None and preview is not None and preview.data is not None:
            tokens = mean_tokens(preview.data.train, config, chat)
            previews[stage.name] = replace(preview, row_tokens=tokens)

    gc.disable()  # modules and rows stay alive: a collection would free nothing
    try:
        _run_checks(plan, [read, count_tokens, partial(_check_lengths, plan)])
    finally:
        gc.freeze()
        gc.enable()
    return previews


def _run_checks(plan: Plan, checks: Sequence[Callable[[Stage], None]]) -> None:
    """Run the checks on each unfinished step; with `--plan off`, run none."""
    for stage in plan.unfinished if plan.request.plan != "off" else ():
        for check in checks:
            try:
                check(stage)
            except UserError as error:
                if stage.method is None:
                    raise
                raise type(error)(f"method {stage.method}: {error}") from None


def _check_processes(plan: Plan, stage: Stage) -> None:
    """Check that parallel sizes divide the number of processes, which must all have prompts."""
    settings: Any = plan.configs[stage.name]
    settings.check_processes(plan.machine.world, section=stage.prefix)
    work = settings.workload(plan.machine.world)
    world, shares = work.world, work.data_processes
    rollout, tp_size = (getattr(settings, f"{n}_size", None) for n in ("rollout", "inference_tp"))
    group = getattr(settings, "group_size", 1)
    in_groups = f" in groups of {group}" if group > 1 else ""
    require(
        rollout is None or rollout // group >= shares,
        f"{stage.prefix}.rollout_size {rollout}{in_groups} leaves some of the {shares}"
        " data-parallel processes without a prompt; raise it, or start fewer processes",
    )
    require(
        tp_size is None or world % tp_size == 0,
        f"{stage.prefix}.inference_tp_size {tp_size} doesn't divide the {counted(world, 'process')}"
        "; choose a size that does, or start a different number of processes",
    )


def _check_model_files(plan: Plan, stage: Stage) -> None:
    """Check the files of local model directories, except directories that the run will write."""
    config = plan.configs[stage.name]
    if plan.request.plan_for is not None:
        return  # the weights may be on the target machine
    uses = config.workload(plan.machine.world).models
    generating = {str(use.settings.path) for use in uses if not use.scores}
    for model in config.used_models().values():
        path = str(model.path)
        if path != EMBEDDED and is_local(path) and path not in _writers(plan):
            check_model_directory(
                path,
                generates=path in generating,
                allow_pickle=model.allow_pickle,
                trust_remote_code=model.trust_remote_code,
            )


def _writers(plan: Plan) -> dict[str, Stage]:
    """Return the steps that will run, by output directory."""
    return {str(plan.configs[stage.name].output_dir): stage for stage in plan.unfinished}


def _check_lengths(plan: Plan, stage: Stage) -> None:
    """Check that a complete prompt and response fit the context of each model of step 3.

    A model that does not exist yet has the context length of the model it starts from.
    """
    settings: Any = plan.configs[stage.name]
    if not hasattr(settings, "max_prompt_length"):
        return  # steps 1 and 2 truncate to the model's context
    workload = settings.workload(plan.machine.world)
    models, _ = build_models(workload, plan.origins, has_gpu=plan.machine.has_gpu)
    for model in models:
        context = model.shape.context
        require(
            model.role == "base" or settings.max_prompt_length + settings.max_new_tokens <= context,
            f"{stage.section}.max_prompt_length {settings.max_prompt_length} +"
            f" {stage.section}.max_new_tokens {settings.max_new_tokens} exceeds the {context}-token"
            f" context of the {model.role} {model.path}; lower one of them",
        )


def read_rows(config: StepConfig, stage: Stage, *, downloads: bool) -> Preview:
    """Read the rows of a step as the step will read them.

    Raises:
        DataError: a path, row, split or setting is invalid, or leaves the step without usable rows.
    """
    texts: DataConfig | None = getattr(config, "ptx_rows", None)
    inputs = [(config.data, stage.number, config.row_columns, config.row_share)]
    inputs += [(texts, 1, RowColumns(), None)] if texts is not None else []
    unread = _unread_reason([path for data, *_ in inputs for path in (*data.path, *data.eval_path)])
    if unread and not (downloads and unread == ON_HUB):
        return Preview(unread=unread)
    # Only a dry run shows the preview, and generating these rows takes seconds.
    if downloads and all(EMBEDDED in data.path for data, *_ in inputs):
        for data, _, columns, _ in inputs:
            check_embedded(data, columns)
        return Preview(unread="drawn when the step starts")
    examples, *_ = [
        load_examples(data, step=step, seed=config.seed, kept=columns, share=share)
        for data, step, columns, share in inputs
    ]
    return Preview(select_rows(examples, config))


ON_HUB = "on the Hub, read when the run starts"


def _unread_reason(paths: Iterable[str]) -> str:
    """Return the reason why a plan doesn't read the rows of these paths, or "" if it does."""
    size = 0
    for path in paths:
        bare = bare_name(path)
        if bare == EMBEDDED:
            continue
        local = Path(bare).expanduser()
        if is_local_jsonfile(bare):
            files = LOCAL_JSONFILE
        elif is_hub_name(bare):
            return ON_HUB
        else:
            files = local.rglob("*") if local.is_dir() else [local]
        size += sum(file.stat().st_size for file in files if file.is_file())
    return f"{size / 2**30:.1f} GiB, read when the run starts" if size > MAX_BYTES else ""


def mean_tokens(rows: Sequence[Example], config: StepConfig, chat: "ChatFormat") -> float:
    """Estimate the mean number of tokens per training row from a sample."""
    rows = rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE]
    work = config.workload(1)
    if work.generates_first and work.generation is not None:
        lengths = [len(chat.encode_prompt(row.prompt, origin=row.origin)) for row in rows]
        return sum(min(length, work.generation.prompt_length) for length in lengths) / len(rows)
    lengths = [n for row in rows for n in _row_lengths(row, chat, work.sequences_per_row)]
    return sum(min(length, work.length) for length in lengths) / len(rows)


def _row_lengths(row: Example, chat: "ChatFormat", sequences: int) -> list[int]:
    """Return the number of tokens in each sequence of a row."""
    responses = [text for text in (row.chosen, row.rejected) if text]
    if not responses:
        return [len(chat.encode_prompt(row.prompt, origin=row.origin))]
    encoded = (chat.encode(row.prompt, text, origin=row.origin) for text in responses[:sequences])
    return list(map(len, encoded))


class ChatFormats:
    """The tokenizer and chat format of every model of a plan, even if it does not exist yet.

    A model made by an earlier step has the tokenizer of the model it starts from, with the chat
    format of that step. Only tokenizers are loaded, each once. They are downloaded from the Hub if
    `downloads` is true; otherwise those not yet downloaded are unknown.
    """

    def __init__(self, plan: Plan, *, downloads: bool) -> None:
        self.plan, self.downloads, self.writers = plan, downloads, _writers(plan)
        self.tokenizers: dict[str, PreTrainedTokenizerBase | None] = {}

    def get_format(self, stage: Stage) -> "ChatFormat | None":
        """Return the format that a step trains with, or None if its tokenizer is unknown.

        Raises:
            UserError: there is no tokenizer or no such format, or a model of the step has a
                different vocabulary or was trained with a different format.
        """
        from pipeline.models.hf.chat import require_same_chat, same_chat_format

        trained, *others = _models_sharing_vocabulary(self.plan.configs[stage.name])
        tokenizer, chat = self._load_chat(trained.settings, self.plan.configs[stage.name].data)
        for use in others:
            other = self.tokenizer(use.settings)
            if tokenizer is None or other is None:
                continue
            if use.scores and not use.is_trained:  # it can read text
                same_chat_format(tokenizer, other, str(use.settings.path))
            else:
                require_same_chat(tokenizer, other, "the actor", use.settings)
        return chat

    def tokenizer(self, model: FrozenModelConfig) -> "PreTrainedTokenizerBase | None":
        """Return the tokenizer of a model, or None if it has not been downloaded.

        Raises:
            UserError: the model has no tokenizer.
        """
        from pipeline.models.hf.load import load_tokenizer

        path = str(model.path)
        if path not in self.tokenizers:
            if path in self.writers:
                config = self.plan.configs[self.writers[path].name]
                initial_model = _models_sharing_vocabulary(config)[0].settings
                has_chat_format = config.reads_dialogues
                loaded = self._load_chat(initial_model, config.data) if has_chat_format else None
                self.tokenizers[path] = loaded[0] if loaded else self.tokenizer(initial_model)
            else:
                is_available = self.downloads or _has_tokenizer(path)
                self.tokenizers[path] = load_tokenizer(model) if is_available else None
        return self.tokenizers[path]

    def _load_chat(
        self, model: FrozenModelConfig, data: DataConfig
    ) -> "tuple[PreTrainedTokenizerBase | None, ChatFormat | None]":
        """Load tokenizer and chat format like `load_chat`, even if the model doesn't exist yet."""
        from pipeline.data.chat.resolve_format import resolve_format

        tokenizer = copy.deepcopy(self.tokenizer(model))
        if tokenizer is None:
            return None, None
        chat = resolve_format(tokenizer, data.format, data.template_args)
        chat.add_new_tokens()
        chat.attach(tokenizer)
        return tokenizer, chat


def _has_tokenizer(path: str) -> bool:
    """Return whether a tokenizer can be read without network access.

    A directory that is used only for planning may have a configuration but no tokenizer.
    """
    if path == EMBEDDED or not is_local(path):
        return path == EMBEDDED or cached_file(path, "tokenizer_config.json") is not None
    directory = Path(path).expanduser()
    return any(directory.glob("token*")) or any(directory.glob("*.model"))


def _models_sharing_vocabulary(config: StepConfig) -> list[ModelUse]:
    """Return the step's models that must share a vocabulary, the trained one first.

    A model used only for comparison is not included: the step skips it if the vocabulary differs.
    """
    workload = config.workload(1)
    uses = [use for use in workload.models if use.settings.path and not use.comparison_only]
    return sorted(uses, key=lambda use: not use.is_trained)
