"""The models to serve: paths, memory plan, loading, tokenization and scoring."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.batch import OpenBatch
from inference.engine.cache import count_pages, page_bytes
from inference.engine.sampling import TokenLogprobs, compute_logprobs
from inference.replica import weights_hash
from inference.reward_model import load_scorer
from inference.serve.config import ServeConfig
from inference.serve.http import ApiError
from inference.text import TokenBytes
from pipeline.budget.machine import GIB, format_bytes
from pipeline.cli.options import print_notice
from pipeline.config import FrozenModelConfig
from pipeline.data.batches import TokenBatch, collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import Argument, resolve_format, unused_names
from pipeline.data.examples import Encoded, Message
from pipeline.models.adapters.lora import Task
from pipeline.models.forward.forward import Policy, Scorer, base_model, context_length
from pipeline.models.hf.chat import check_ready
from pipeline.models.hf.load import load_causal_lm, load_tokenizer
from pipeline.models.hf.meta import load_on_meta
from pipeline.parallel.device import local_device
from pipeline.report.results import StepResult, find_chat_model, read_results
from pipeline.system.errors import ConfigError, DataError, ModelError, UserError, require
from pipeline.system.memory import available_bytes

MAX_LOGITS = 2**26
"""Maximum number of logits per pass over a prompt: 256 MiB in fp32, and as much again for their
log-probabilities."""


@dataclass(frozen=True)
class ServedModel:
    """A model that the server generates with."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat

    batch: OpenBatch
    """Used only by the generation thread."""

    num_slots: int

    context: int
    """Maximum number of tokens in prompt and response."""

    weights_hash: str
    token_bytes: TokenBytes

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return self.model.get_input_embeddings().weight.shape[0]  # pyrefly: ignore[bad-index, bad-return]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        continues: bool,
        adds_prompt: bool = True,
        arguments: Mapping[str, Argument] | None = None,
    ) -> list[int]:
        """Return the token ids of a dialogue rendered with the chat template.

        Args:
            messages: the dialogue.
            continues: whether the response continues the last turn, an assistant turn.
            adds_prompt: whether to add the generation prompt after a user turn.
            arguments: arguments of the chat template.

        Raises:
            ApiError: the template can't render the dialogue or doesn't use an argument, or the last
                turn has the wrong role.
        """
        answered = messages[-1].role == "assistant"
        if answered and len(messages) == 1:
            raise ApiError(400, "messages must not begin with an assistant turn", param="messages")
        if (continues and not answered) or (answered and adds_prompt and not continues):
            raise ApiError(
                400,
                "messages must end with a user turn, or an assistant turn if"
                " continue_final_message is true",
                param="messages",
            )
        chat = self._resolve_chat(arguments) if arguments else self.chat
        try:
            if continues or not answered:
                return chat.encode_prompt(messages, generation_prompt=adds_prompt)
            return chat.encode(messages[:-1], messages[-1:]).input_ids
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _resolve_chat(self, arguments: Mapping[str, Argument]) -> ChatFormat:
        """Return the chat format with arguments for its template."""
        unknown = unused_names(self.chat.template, arguments)
        if unknown:
            names = ", ".join(name[:64] for name in unknown[:16])
            raise ApiError(
                400,
                f"chat_template_kwargs: the chat template of {self.name} doesn't use {names}; omit"
                " unused arguments",
                param="chat_template_kwargs",
            )
        try:
            return resolve_format(self.tokenizer, "auto", arguments)
        except UserError as error:
            reason = str(error).replace("data.template_args", "chat_template_kwargs:")
            raise ApiError(400, reason, param="chat_template_kwargs") from None

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
        """Return the log-probability of each token given the preceding ones, or None for the first.

        A long prompt takes several passes, each with at most `MAX_LOGITS` logits.
        """
        device = next(self.model.parameters()).device
        ids = torch.tensor(list(prompt), device=device)
        policy = Policy(self.model)
        step = max(1, MAX_LOGITS // self.vocabulary)
        result: list[TokenLogprobs | None] = [None]
        for first in range(1, len(prompt), step):
            last = min(first + step, len(prompt))
            batch = TokenBatch(ids[:last], (last,), torch.arange(first, last, device=device))
            logits = policy.logits(batch)
            result += compute_logprobs(logits, list(prompt[first:last]), [num_top] * (last - first))
        return result


@dataclass(frozen=True)
class ServedReward:
    """A reward model, and the chat format that was saved with it."""

    name: str
    scorer: Scorer
    chat: ChatFormat

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Return the token ids of a dialogue that ends with a response.

        Raises:
            ApiError: the dialogue has no response, is too long, or can't be rendered.
        """
        if messages[-1].role != "assistant" or len(messages) < 2:
            raise ApiError(400, "messages must end with a prompt and a response", param="messages")
        try:
            encoded = self.chat.encode(messages[:-1], messages[-1:])
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        limit = context_length(base_model(self.scorer.model))
        if len(encoded) > limit:
            raise ApiError(
                400,
                f"the dialogue has {len(encoded)} tokens, but the context length of"
                f" {self.name} is {limit}; shorten the dialogue",
                param="messages",
                code="context_length_exceeded",
            )
        return encoded

    @torch.inference_mode()
    def score(self, dialogue: Encoded) -> float:
        """Return the score of a dialogue's last response."""
        batch = collate([dialogue]).to(local_device())
        return self.scorer.final_scores(batch).item()


NAME_PATTERN = re.compile(r"[\w.:-]{1,64}")
BASE = "base"

DEFAULT_CONTEXT = 8192
"""Maximum tokens per sequence without `--context`."""

MIN_CONTEXT = 256
"""Minimum tokens per sequence that must fit in memory without `--context`."""

DEFAULT_SLOTS = 32
"""Maximum concurrent sequences without `--slots`."""

PREFILL_CHUNK = {"cpu": 64, "cuda": 512}
"""Maximum prompt tokens per step without `--prefill-chunk`."""


@dataclass(frozen=True)
class ModelPath:
    """A model to serve."""

    name: str
    path: str

    seed: int = 0
    """Seed of an embedded base model's weights."""

    template_source: str | None = None
    """Model whose chat template the initial model of a run may use."""


def collect_models(config: ServeConfig) -> list[ModelPath]:
    """Return the models of `--path` and `--run`, with distinct names.

    Raises:
        ConfigError: two models have the same name, or the run can't be read.
        ModelError: the run has no model yet.
    """
    paths = [] if config.run is None else find_run_models(config.run)
    paths += [_parse_path(word) for word in config.path]
    names = [path.name for path in paths]
    for name in names:
        require(
            names.count(name) == 1,
            f"--path: two models are called {name}; rename one, as in sft=OUT/step1_sft",
        )
    return paths


def _parse_path(word: str) -> ModelPath:
    name, equals, path = word.partition("=")
    if equals and NAME_PATTERN.fullmatch(name) and path:
        return ModelPath(name, path)
    directory = Path(word).expanduser()
    name = directory.name or directory.resolve().name
    if name in ("actor", "ema") and directory.parent.name:
        name = directory.parent.name if name == "actor" else f"{directory.parent.name}-{name}"
    return ModelPath(re.sub(r"[^\w.:-]", "-", name)[:64] or "model", word)


def find_run_models(out: Path) -> list[ModelPath]:
    """Return a run's generative models: base, steps 0, 1 and 3, with the best method last.

    Raises:
        ModelError: no step that trains such a model has finished.
    """
    paths: list[ModelPath] = []
    steps = _read_steps(out)
    for name, step in steps.items():
        if not paths and step.finished and step.has("perplexity_after"):
            paths += _base_model(step, str(out / name))
        for directory in (out / name, out / name / "actor"):
            generates = step.has("perplexity_after") or directory.name == "actor"
            if step.finished and generates and (directory / "config.json").is_file():
                paths.append(ModelPath(name, str(directory)))
    best = find_chat_model(steps)
    paths.sort(key=lambda path: best is not None and path.name == best.name)
    if all(path.name == BASE for path in paths):
        raise ModelError(f"--run {out} has no model to serve yet; finish it with train.py --resume")
    return paths


def find_run_reward(out: Path) -> str | None:
    """Return the path of a run's reward model, if it has one."""
    for name, step in _read_steps(out).items():
        if step.finished and step.has("accuracy_after") and (out / name / "config.json").is_file():
            return str(out / name)
    return None


def _read_steps(out: Path) -> Mapping[str, StepResult]:
    try:
        return read_results(out).steps
    except DataError as error:
        raise ConfigError(f"--run {error}") from None


def _base_model(step: StepResult, directory: str) -> list[ModelPath]:
    """Return the model that the run's first step started from, if its settings name one."""
    path, seed = step.settings.get("model.path"), step.settings.get("seed")
    if not isinstance(path, str):
        return []
    return [ModelPath(BASE, path, seed if isinstance(seed, int) else 0, directory)]


def load_models(
    config: ServeConfig, paths: Sequence[ModelPath], reward: str | None
) -> tuple[dict[str, ServedModel], ServedReward | None]:
    """Plan the memory of all models, then load them and the reward model at `reward`.

    Raises:
        UserError: a model does not exist or does not fit in memory.
    """
    paths = _skip_missing(paths)
    if reward is not None:
        check_ready(reward, reward_model=True)
    plan = plan_memory(paths, reward, config)
    served_reward = None
    if reward is not None:
        scorer, chat = load_scorer(reward)
        scorer.requires_grad_(requires_grad=False)
        served_reward = ServedReward("reward", scorer, chat)
    models: dict[str, ServedModel] = {}
    for path in paths:
        num_slots, context = plan[path.name]
        settings = FrozenModelConfig(path=path.path, precision=config.precision)
        model = load_causal_lm(settings, device=local_device(), seed=path.seed)
        model.requires_grad_(requires_grad=False)
        cache_bytes = num_slots * count_pages(context) * page_bytes(model)
        weights, cache = format_bytes(_num_bytes(model), cache_bytes)
        print_notice(
            f"{path.name}: {path.path}, {weights} of weights, {num_slots} slots of"
            f" {context:,} tokens ({cache} of keys and values)"
        )
        tokenizer = _load_tokenizer(path)
        models[path.name] = ServedModel(
            name=path.name,
            model=model,
            tokenizer=tokenizer,
            chat=resolve_format(tokenizer, "auto"),
            batch=OpenBatch(
                model,
                num_slots=num_slots,
                capacity=context,
                chunk=config.prefill_chunk or PREFILL_CHUNK[model.device.type],
                reuse_prefixes=config.prefix_reuse != "off",
            ),
            num_slots=num_slots,
            context=context,
            weights_hash=f"{weights_hash(model):013x}",
            token_bytes=TokenBytes(tokenizer),
        )
    return models, served_reward


def _skip_missing(paths: Sequence[ModelPath]) -> list[ModelPath]:
    """Return `paths` without the run's initial model if it is missing; the others must exist."""
    ready: list[ModelPath] = []
    for path in paths:
        try:
            check_ready(path.path)
        except ModelError as error:
            if path.template_source is None:
                raise
            print_notice(f"{path.name}, the run's initial model, is skipped: {error}")
        else:
            ready.append(path)
    return ready


def plan_memory(
    paths: Sequence[ModelPath], reward: str | None, config: ServeConfig
) -> dict[str, tuple[int, int]]:
    """Return each model's number of slots and tokens per slot.

    Raises:
        ConfigError: the weights don't fit, or leave no room for a single sequence.
        ModelError: a model has no configuration to read.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {path.name: _load_on_meta(path.path, config, device) for path in paths}
    total = sum(map(_num_bytes, models.values()))
    if reward is not None:
        total += _num_bytes(_load_on_meta(reward, config, device, task="classifier"))
    free = available_bytes()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    if total > free:
        needed, available = format_bytes(total, free)
        raise ConfigError(
            f"the weights of the models take {needed}, but only {available} is free; serve fewer"
            " models, or set --precision bf16"
        )
    budget = (free - total) // 2 if config.cache_gib is None else int(config.cache_gib * GIB)
    share = budget // max(1, len(models))
    return {name: _plan_slots(name, model, share, config) for name, model in models.items()}


def _plan_slots(
    name: str, model: PreTrainedModel, budget: int, config: ServeConfig
) -> tuple[int, int]:
    limit = context_length(model)
    require(
        config.context is None or config.context <= limit,
        f"--context {config.context} exceeds the {limit}-token context of {name}; lower it",
    )
    context = min(limit, config.context or DEFAULT_CONTEXT)
    if config.context is None:  # shorten it rather than fail
        while context > MIN_CONTEXT and count_pages(context) * page_bytes(model) > budget:
            context = max(MIN_CONTEXT, context // 2)
    slot_bytes = count_pages(context) * page_bytes(model)
    slots = config.slots or max(1, min(DEFAULT_SLOTS, budget // slot_bytes))
    if slots * slot_bytes > budget:
        needed, available = format_bytes(slots * slot_bytes, budget)
        raise ConfigError(
            f"the keys and values of {name} take {needed} with --slots {slots} and --context"
            f" {context}, but only {available} is available; lower one, or serve fewer models"
        )
    return slots, context


def _load_on_meta(
    path: str, config: ServeConfig, device: torch.device, *, task: Task = "causal"
) -> PreTrainedModel:
    settings = FrozenModelConfig(path=path, precision=config.precision)
    return cast("PreTrainedModel", load_on_meta(settings, task=task, device=device))


def _num_bytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def _load_tokenizer(path: ModelPath) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    A run's base model without a chat template uses the tokenizer of the model that was trained from
    it if their vocabularies are identical, so that both models get the same text.
    """
    tokenizer = load_tokenizer(FrozenModelConfig(path=path.path))
    if path.template_source is None or tokenizer.chat_template:
        return tokenizer
    trained = load_tokenizer(FrozenModelConfig(path=path.template_source))
    return trained if trained.get_vocab() == tokenizer.get_vocab() else tokenizer
