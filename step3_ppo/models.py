"""The models of RLHF: actor and critic are trained; reference and reward model only score.

Dimension names: N tokens of a batch, K response tokens (its targets), B responses.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.held_out import Prompt
from inference.engine.requests import Response
from inference.hybrid_engine import HybridEngine
from inference.remote import RemoteGenerator, serve_requests
from pipeline.config import FrozenModelConfig, Kernels, ParallelConfig, TrainedModelConfig
from pipeline.data.batches import TokenBatch, local_micro_batches, prompt_units
from pipeline.data.chat.chat_format import ChatFormat, Messages
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Message
from pipeline.engine.engine import Engine, FrozenEngine
from pipeline.models.forward.forward import (
    Policy,
    Scorer,
    base_model,
    context_length,
    is_encoder,
    set_fp32_logits,
)
from pipeline.models.forward.scores import require_score, response_scores
from pipeline.models.hf.chat import decode_response, load_chat, require_same_chat, same_chat_format
from pipeline.models.hf.export import set_stop_tokens, unties_layers
from pipeline.models.hf.load import add_tokens, load_causal_lm, load_classifier, load_tokenizer
from pipeline.models.hf.meta import load_on_meta
from pipeline.models.parallel.stages import StageModule
from pipeline.models.passes import (
    ForwardPasses,
    Passes,
    evaluating,
    make_frozen_passes,
    make_passes,
    make_policy,
)
from pipeline.models.trained import prepare_classifier
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import RolloutGroups, current_mesh
from pipeline.system.errors import ConfigError, ModelError
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse
from step3_ppo.reward_sources import RewardSources
from step3_ppo.served_teacher import ServedTeacher

logger = logging.getLogger(__name__)


def join_response(prompt: Sequence[int], response: Response) -> Encoded:
    """Join a prompt and its response; only the actor's tokens are trained on."""
    if isinstance(response, EpisodeResponse):
        return response.sequence
    trained = [False] * len(prompt) + [True] * len(response.ids)
    return Encoded([*prompt, *response.ids], trained)


class RewardTextEncoder:
    """Converts the actor's tokens, via text, into the reward model's tokens.

    A prompt is mapped to its original dialogue, so that no text is lost; the response is decoded.
    Both are rendered with the reward model's own chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, *, max_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        """The actor's tokenizer."""
        self.chat = chat
        """The reward model's chat format."""
        self.max_tokens = max_tokens
        """The reward model's context length; longer dialogues lose their beginning."""
        self._dialogues: dict[tuple[int, ...], Messages] = {}

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Store each prompt's dialogue under the prompt's token ids for the actor."""
        self._dialogues |= {tuple(prompt.input_ids): prompt.messages for prompt in prompts}

    def encode(self, prompt: Sequence[int], response: Response) -> Encoded:
        """Return the reward model's tokens; unfinished responses get no end-of-turn token."""
        if isinstance(response, EpisodeResponse):
            *context, last = (*response.opening, *response.turns)
        else:
            context = self._dialogues[tuple(prompt)]
            continues = context[-1].role == "assistant"
            text = decode_response(self.tokenizer, response.text_ids, continues=continues)
            last = Message("assistant", text)
        return self.chat.encode_scored(
            context, last, stopped=response.stopped, max_length=self.max_tokens
        )


def reward_chat(tokenizer: PreTrainedTokenizerBase, reward: FrozenModelConfig) -> ChatFormat | None:
    """Return a reward model's chat format, or None if it reads the actor's tokens.

    Raises:
        ModelError: the reward model has a different tokenizer and no chat template.
    """
    reward_tokenizer = load_tokenizer(reward)
    if same_chat_format(tokenizer, reward_tokenizer, str(reward.path)):
        return None
    return resolve_format(reward_tokenizer, "auto")


class RewardModel:
    """A frozen reward model.

    It is sharded and split into stages like the critic, or like the actor if there is no critic.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: TrainedModelConfig,
        text: RewardTextEncoder | None = None,
        *,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.engine, self.passes = make_frozen_passes(
            model,
            layout,
            parallel or ParallelConfig(),
            current_mesh(),
            lambda module: Scorer(module, kernels=layout.kernels),
            name="reward model",
        )
        self.hf_config = base_model(model).config
        self.text = text
        """Encodes text for the reward model; None if it reads the actor's tokens."""
        self.mean, self.std = 0.0, 1.0
        """Moments of the first rollout's scores, set by `step3_ppo.train.normalize_scores`."""

    def scores(self, batches: Sequence[TokenBatch]) -> list[Float[Tensor, " B"]]:
        """Compute each batch's raw scores, from rows' last tokens or from their steps."""
        with evaluating(self.engine.model):
            return self.passes.forward_everywhere(
                batches,
                lambda batch: response_scores(self.engine(batch), batch, self.hf_config),
                lambda batch: (len(batch.rows),),
            )

    def normalize(self, scores: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Normalize scores by the mean and standard deviation of the first rollout's scores."""
        return (scores - self.mean) / self.std


class Reference:
    """The policy from which the KL divergence of the actor is computed."""

    def __init__(self, engine: Engine | FrozenEngine, passes: ForwardPasses) -> None:
        self.engine = engine
        """The actor's engine if the reference is the actor without its adapter, otherwise
        another."""
        self.passes = passes
        """Runs the reference's forward passes."""

    def logprobs(
        self, batches: Sequence[TokenBatch], *, temperature: float
    ) -> list[Float[Tensor, " K"]]:
        """Compute log pi_ref of the response tokens of each batch."""
        engine = self.engine
        model = cast("Policy", engine.model).model
        is_frozen = isinstance(engine, FrozenEngine)
        adapter_off = nullcontext() if is_frozen else cast("PeftModel", model).disable_adapter()
        with evaluating(engine.model), adapter_off:
            return self.passes.forward_everywhere(
                batches,
                lambda batch: engine(batch, temperature=temperature).logprobs,
                lambda batch: (batch.num_targets,),
            )


class Critic(nn.Module):
    """Estimates the value of the state before each response token, on the scale of PPO's reward.

    A value is a linear function of the model's score, which is initially the reward model's;
    `step3_ppo.update.fit_values` fits the function to the first rollout.
    """

    def __init__(self, model: nn.Module, *, kernels: Kernels = "auto") -> None:
        super().__init__()
        self.scorer = Scorer(model, kernels=kernels)
        self.slope, self.intercept = 1.0, 0.0

    def forward(
        self, batch: TokenBatch, *, labels: bool = False
    ) -> Float[Tensor, " K"] | Float[Tensor, "N C"]:
        """Return the value at the token before each target; with `labels`, the scorer's outputs."""
        if labels:
            return self.scorer(batch, labels=True)
        return self.scorer(batch)[batch.before_targets] * self.slope + self.intercept


class CriticStage(nn.Module):
    """A pipeline stage of the critic other than the last; parameters have the critic's names."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.scorer = stage

    def forward(self, batch: TokenBatch) -> Float[Tensor, "1 N d"]:
        """Return the hidden states."""
        return self.scorer(batch)


@dataclass(frozen=True)
class Models:
    """The models of step 3."""

    actor: Engine
    critic: Engine | None
    """The critic's engine; None if the advantage estimator needs none."""
    reference: Reference | None
    """The reference, or a teacher; None if neither is loaded."""
    teacher: ServedTeacher | None
    """The teacher, if a server runs it; otherwise None."""
    reward: RewardModel | None
    """The reward model; None if only programs reward the responses."""
    sources: RewardSources
    """The programs that give rewards; empty if only a reward model does."""
    hybrid_engine: HybridEngine
    """The actor, for generation."""
    chat: ChatFormat
    policy_passes: Passes
    """The actor's passes over micro-batches."""
    value_passes: Passes | None
    """The critic's passes over micro-batches; None without a critic."""
    remote: RemoteGenerator | None = None
    """The processes that sample rollouts; None if this process does."""

    @property
    def trained(self) -> dict[str, Engine]:
        """The engines of the trained models, by role."""
        actor = {"actor": self.actor}
        return actor if self.critic is None else actor | {"critic": self.critic}

    @property
    def policy(self) -> nn.Module:
        """The actor's Hugging Face model, with its adapters if it has any."""
        return cast("Policy", self.actor.model).model

    def set_value_line(self, slope: float, intercept: float) -> None:
        """Set the linear function that maps the scores of the critic's model to values."""
        critic = None if self.critic is None else self.critic.model
        if isinstance(critic, Critic):  # not a pipeline stage without the head
            critic.slope, critic.intercept = slope, intercept

    @property
    def value_model(self) -> nn.Module:
        """The critic's Hugging Face model, with its adapters if it has any."""
        assert self.critic is not None
        return cast("Critic", self.critic.model).scorer.model


def load_models(
    config: PPOConfig,
    chat: ChatFormat,
    *,
    iterations: int,
    sources: RewardSources | None = None,
    remote: RemoteGenerator | None = None,
) -> Models:
    """Load the models for `iterations` rollouts; `sources` are created from `config` by default.

    Raises:
        ModelError: a model can't be used, or its tokenizer or chat format doesn't fit the actor's.
        ConfigError: the number of processes is not divisible by `config.inference_tp_size`, or
            prompt and response may exceed a model's context.
    """
    tokenizer, mesh = chat.tokenizer, current_mesh()
    tp_group = mesh.tp_group(config.inference_tp_size, timeout_seconds=config.timeout_seconds)
    models = config.used_models()
    for model in (models[role] for role in ("critic", "reference", "teacher") if role in models):
        require_same_chat(tokenizer, load_tokenizer(model), "the actor", model)

    minibatches = math.ceil(config.rollout_size / config.batch_size)
    updates = iterations * config.ppo_epochs * minibatches
    actor, policy_passes = make_policy(
        config.actor,
        tokenizer,
        config.parallel,
        mesh,
        total_steps=updates,
        seed=config.seed,
        name="actor",
    )
    set_stop_tokens(actor, chat.stop_ids)
    require_context(base_model(actor), "actor", config)
    value_passes = load_critic(config, tokenizer, total_steps=updates)
    engines = [passes.engine for passes in (policy_passes, value_passes) if passes is not None]
    return Models(
        actor=policy_passes.engine,
        critic=None if value_passes is None else value_passes.engine,
        reference=load_reference(config, policy_passes, tokenizer),
        teacher=ServedTeacher(config.teacher_url, tokenizer) if config.teacher_url else None,
        reward=load_reward(config, tokenizer),
        sources=RewardSources(config) if sources is None else sources,
        hybrid_engine=HybridEngine(
            policy_passes.engine,
            actor,
            tp_group=tp_group,
            resident=config.replica == "resident",
            offloading=engines if config.offload_in_generation else (),
        ),
        chat=chat,
        policy_passes=policy_passes,
        value_passes=value_passes,
        remote=remote,
    )


def load_critic(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, *, total_steps: int
) -> Passes | None:
    """Return the passes of the critic (of its local stage in a pipeline), or None without one.

    If the reward model has several labels, all weights except those of the head are used, and the
    head is initialized randomly.

    Raises:
        ModelError: the model is an encoder.
        ConfigError: prompt and response may exceed the model's context.
    """
    if not config.has_critic:
        return None
    critic = prepare_classifier(config.critic, tokenizer, device=local_device(), seed=config.seed)
    if is_encoder(base_model(critic)):
        raise ModelError(
            f"ppo.critic.path {config.critic.path} is an encoder, but a critic needs a value at"
            " each token; set ppo.critic.path to step 1's output, or choose a --method without a"
            " critic"
        )
    require_context(base_model(critic), "critic", config)
    return make_passes(
        critic,
        config.critic,
        config.parallel,
        current_mesh(),
        lambda module: Critic(module, kernels=config.critic.kernels),
        total_steps=total_steps,
        name="critic",
        wrap_stage=CriticStage,
    )


def load_reward(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> RewardModel | None:
    """Load the reward model, if any; if its chat format differs from the actor's, it reads text.

    Raises:
        ModelError: the model has a different tokenizer and no chat template, or its labels have no
            values.
        ConfigError: prompt and response may exceed the model's context.
    """
    if not config.uses_reward_model:
        return None
    settings = config.reward
    chat = reward_chat(tokenizer, settings)
    layout = config.reward_layout
    reward = load_classifier(settings, device=local_device(), seed=config.seed, defer=True)
    require_score(base_model(reward))
    if chat is None:
        require_context(base_model(reward), "reward", config)
        return RewardModel(reward, layout, parallel=config.parallel)
    logger.info(
        "%s has a different tokenizer or chat template from the actor's, so it reads text",
        settings.path,
    )
    text = RewardTextEncoder(tokenizer, chat, max_tokens=context_length(base_model(reward)))
    return RewardModel(reward, layout, text, parallel=config.parallel)


def require_context(model: PreTrainedModel, role: str, config: PPOConfig) -> None:
    """Check before training that prompt and response fit into a model's context.

    Raises:
        ConfigError: prompt and response may exceed the model's context.
    """
    limit = context_length(model)
    if config.max_length > limit:
        raise ConfigError(
            f"ppo.max_prompt_length {config.max_prompt_length} + ppo.max_new_tokens"
            f" {config.max_new_tokens} exceeds the {limit}-token context of the {role}; lower one"
            " of them"
        )


def load_reference(
    config: PPOConfig, actor: Passes, tokenizer: PreTrainedTokenizerBase
) -> Reference | None:
    """Load the teacher, or the reference (by default the initial actor), sharded like the actor.

    Return None if a server runs the teacher, or if the KL is neither penalized nor measured. With
    LoRA, the default is the base with the adapter disabled, which needs no second copy.
    """
    role = config.reference_role
    if role is None:
        if not config.is_distillation:
            logger.info(
                "there is no KL penalty, so no reference is loaded and the KL to the initial actor"
                " is not measured (set ppo.reference.path to measure it)"
            )
        return None
    settings: FrozenModelConfig = config.teacher if role == "teacher" else config.reference
    if settings.path is None and config.actor.lora is not None:
        return Reference(actor.engine, actor)
    settings = config.actor if settings.path is None else settings
    model = load_causal_lm(settings, device=local_device(), seed=config.seed, defer=True)
    require_context(base_model(model), role, config)
    add_tokens(model, tokenizer, seed=config.seed)
    if config.actor.fp32_head:
        set_fp32_logits(model)
    engine, passes = make_frozen_passes(
        model,
        config.actor,
        config.parallel,
        current_mesh(),
        lambda module: Policy(module, kernels=config.actor.kernels),
        name=role,
    )
    return Reference(engine, passes)


def sampling_options(chat: ChatFormat, config: PPOConfig) -> dict[str, Any]:
    """Return the arguments of `generate` for responses to train on."""
    return {
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "stop_ids": chat.stop_ids,
        "seed": config.seed,
        "batch_size": config.generation_batch_size,
    }


def serve_rollouts(config: PPOConfig, groups: RolloutGroups) -> None:
    """Load the actor, and sample responses with `serve_requests` for the training processes."""
    chat = load_chat(config.actor, config.data)
    actor = load_causal_lm(config.actor, device=local_device(), seed=config.seed)
    add_tokens(actor, chat.tokenizer, seed=config.seed)
    adapted = load_on_meta(config.actor, task="causal", device=local_device())
    if unties_layers(actor, [name for name, _ in adapted.named_parameters() if ".lora_" in name]):
        head = cast("nn.Linear", actor.get_output_embeddings())
        head.weight = nn.Parameter(head.weight.detach().clone())  # merged weights are not tied
    if config.actor.fp32_head:
        set_fp32_logits(actor)
    serve_requests(actor, groups, group_size=config.group_size, **sampling_options(chat, config))


def split_micro_batches(config: PPOConfig, rows: Sequence[Encoded]) -> list[list[int]]:
    """Split this process's rows into micro-batches; adjacent rows with equal prompts stay together.

    The number of micro-batches is the same on every process; some may be empty.
    """
    max_tokens = config.micro_batch_size * config.max_length
    units = prompt_units(rows, max_tokens=max_tokens)
    micro_batches = local_micro_batches(
        [sum(len(rows[row]) for row in unit) for unit in units],
        max_tokens=max_tokens,
        min_count=config.min_micro_batches,
    )
    return [[row for unit in part for row in units[unit]] for part in micro_batches]
