"""Settings of step 3, their valid ranges, and the workload that they imply."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from evaluation.config import TaskSettings, check_tasks
from pipeline.config import (
    DEFAULT_OPTIM,
    EMBEDDED,
    DataConfig,
    FrozenModelConfig,
    Generation,
    ModelUse,
    RowColumns,
    StepConfig,
    TrainedModelConfig,
    Workload,
)
from pipeline.guards.settings import check_guards, with_defaults
from pipeline.system.errors import require
from step3_ppo.guard_settings import DEFAULT_GUARDS, GuardSettings, unmeasured_signals
from step3_ppo.methods import ESTIMATOR_NEEDS, LEARNING_RATES, METHODS, Method, adam
from step3_ppo.reward_settings import (
    MODEL_KIND,
    RewardSettings,
    add_environment_source,
    read_reward_options,
)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(TaskSettings, StepConfig, RewardSettings, GuardSettings):
    """Step 3: PPO with a KL penalty to the reference (Ziegler et al. 2019; Ouyang et al. 2022)."""

    section: ClassVar[str] = "ppo"

    METHODS: ClassVar[Mapping[str, Mapping[str, Any]]] = METHODS
    """Default settings of each `method`."""

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **StepConfig.OPTIONS,
        "actor_zero_stage": ("actor.zero_stage",),
        "reward_zero_stage": ("critic.zero_stage",),
        "tensor_parallel": ("parallel.tp", "inference_tp_size"),
        "guards": ("guards",),
        "environment": ("environment",),
        "teacher": ("teacher.path",),
        "reward_function": (),
        "reward": (),
    }

    RUN_OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "lr": ("actor.optim.lr",),
        "batch_size": ("batch_size",),
        "epochs": ("epochs",),
        "lora": ("actor.lora.rank", "critic.lora.rank"),
        "lora_variant": ("actor.lora.variant", "critic.lora.variant"),
        "quantize": ("actor.quantize", "critic.quantize"),
    }

    MINIMUMS: ClassVar[Mapping[str, str]] = {"rollout_size": "batch_size"}
    """--batch-size raises a smaller rollout_size, because a minibatch is part of one rollout."""

    output_dir: Path = Path("output/step3_ppo")

    method: Method = "ppo"
    """Sets defaults for the settings below; explicit settings take precedence (docs/ppo.md)."""

    actor: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(optim=adam(LEARNING_RATES["actor"]))
    )
    """The policy, by default initialized from step 1's output, or else from --actor-model."""

    critic: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(optim=adam(LEARNING_RATES["critic"]))
    )
    """The value model, by default initialized from step 2's output, or from the actor's model if
    no reward model is used."""

    reference: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """Reference policy of the KL penalty, by default the initial actor. Without a penalty, it is
    not loaded and no KL is measured, unless a path is given or several methods are compared."""

    teacher: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model that distill and gkd learn from (--teacher); must share the actor's tokenizer."""

    teacher_url: str | None = None
    """URL of a server that runs the teacher instead (--teacher http://HOST:8000/v1), such as vLLM,
    SGLang or inference.serve."""

    gkd_beta: float = 0.5
    """Divergence that gkd minimizes: 0 is the forward KL(teacher || actor), 1 the reverse KL, and
    values between them the generalized Jensen-Shannon divergence (GKDConfig.beta)."""

    gkd_lambda: float = 1.0
    """Probability that gkd trains on the actor's own responses in an iteration, rather than on the
    data's responses (GKDConfig.lmbda)."""

    reward: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The reward model, if one is used; by default step 2's output."""

    base: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model before step 1, for the report; a null path omits it."""

    batch_size: int = 64
    """Sequences per optimizer step (a PPO minibatch), over all processes."""

    rollout_size: int = 128
    """Responses per iteration, over all processes."""

    group_size: int = 1
    """Responses per prompt (num_generations, rollout.n)."""

    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "best"] = "gae"
    """gae uses a critic, and reinforce_pp whitens the reward-to-go over all tokens. The others
    compare the responses to a prompt: grpo and dr_grpo subtract the mean reward (grpo also divides
    by the standard deviation), rloo subtracts the mean of the other responses, and best keeps only
    the best response (docs/ppo.md)."""

    baseline: Literal["none", "group"] = "none"
    """Baseline of reinforce_pp: group subtracts the mean score of a prompt's responses."""

    loss: Literal["clip", "gspo", "cispo", "none"] = "clip"
    """clip uses PPO's clipped ratio; gspo clips a response's mean ratio; cispo bounds the ratio but
    keeps every gradient; none is the plain policy gradient, for one update per rollout."""

    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Weights in the loss: equal per token, equal per response, or 1 / max_new_tokens per token."""

    dynamic_sampling: int = 0
    """Maximum number of rounds that replace prompts without a gradient (Yu et al. 2025, eq. 11)."""

    drop_solved: float | None = None
    """Stop drawing a prompt once at least this fraction of its responses in a rollout, such as
    0.875, have the maximum of each reward (docs/ppo.md); null keeps all prompts."""

    overlong_buffer: float = 0.0
    """Number of tokens before max_new_tokens over which the reward falls by up to 1 (Yu et al.
    2025, eq. 13); a value below 1 is a fraction of max_new_tokens."""

    overlong: Literal["score", "mask"] = "score"
    """score keeps unfinished responses; mask excludes them from the baseline and the loss."""

    correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weights of off-policy tokens: truncate caps them at correction_cap, mask zeroes
    larger ones (TIS, IcePop); auto truncates if rollout_gap exceeds correction_threshold."""

    correction_threshold: float = 1e-3
    """Threshold for the mean absolute difference in log-probability per token, in nats."""

    correction_level: Literal["token", "sequence"] = "token"
    """Level of the ratio: each token's ratio, or the geometric mean over a response."""

    correction_cap: float = 2.0
    """Maximum weight; mask also drops ratios below 1 / correction_cap."""

    generation_batch_size: int = 64
    """Concurrent responses per process; does not affect the result."""

    rollout_processes: int = 0
    """Number of processes that only generate, one rollout ahead of the others (docs/ppo.md)."""

    inference_tp_size: int = 1
    """Tensor-parallel size for generation; must divide the number of processes and the number of
    attention heads."""

    replica: Literal["release", "resident"] = "release"
    """Memory of weights gathered, merged or sharded for generation: release frees it for training,
    resident keeps it allocated."""

    offload_in_generation: bool = False
    """On GPUs, move the training states of actor and critic to host memory during generation, to
    make room for more concurrent responses."""

    max_prompt_length: int = 256
    """Maximum tokens per prompt; rows with longer prompts are dropped and counted."""

    max_new_tokens: int = 256
    """Maximum tokens per response, including its end-of-turn token. If you train your own model
    with rewards from programs only, train.py's default is 1024, or 4096 for thinking models."""

    temperature: float = 1.0
    """Temperature of sampling and log-probabilities."""

    ppo_epochs: int = 1
    """Passes over each rollout."""

    reuse_forward: bool = True
    """If a rollout is one micro-batch, backpropagate the first update through the pass that
    computed the old log-probabilities. This saves a fifth of the computation after generation, but
    keeps that pass's activations in memory."""

    kl_coef: float = 0.05
    """Weight of the KL penalty to the reference."""

    kl_in: Literal["reward", "loss", "none"] = "reward"
    """Where the penalty applies: reward, loss (use_kl_loss), or none."""

    kl_estimator: Literal["auto", "k1", "k2", "k3", "k3_is"] = "auto"
    """auto is k1 in the reward and k3_is in the loss. k3_is, and on-policy also k2, have the
    gradient of KL(pi || pi_ref); k3 (low_var_kl) has that of KL(pi_ref || pi)."""

    gamma: float = 1.0
    """Discount per token."""

    lam: float = 0.95
    """Lambda of GAE: 1 is Monte Carlo, 0 is one-step TD."""

    whiten_advantages: bool = True
    """Normalize the advantages of gae and reinforce_pp to mean 0 and variance 1 over the rollout of
    all processes."""

    clip: float = 0.2
    """Lower bound of the trust region, 1 - clip."""

    clip_high: float | None = None
    """Upper bound of the trust region, 1 + clip_high (Yu et al. 2025); null uses `clip`."""

    dual_clip: float | None = None
    """Bound c > 1 on the loss of negative advantages (Ye et al. 2020, eq. 5); null disables it."""

    value_clip: float | None = 0.2
    """Trust region of the value estimate, in units of reward; null disables it."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    target_kl: float | None = 0.05
    """Stop updating on a rollout when the KL between new and old policy exceeds 1.5 times this
    value, in nats per token; null disables this."""

    normalize_score: bool = True
    """Normalize the reward model's scores by the first rollout's mean and standard deviation."""

    score_clip: float | None = 5.0
    """Clip normalized scores to ± this; null disables it."""

    missing_eos_score: float | None = -1.0
    """Maximum score of an unfinished response, after normalization; null disables it."""

    ptx_coef: float = 0.0
    """Weight of the mean language-model loss per token on `ptx_data` (PPO-ptx)."""

    ptx_data: tuple[str, ...] = ()
    """Plain text or dialogues for the PPO-ptx loss, as in `data.path`; empty uses step 1's rows."""

    ema_decay: float | None = None
    """Decay of the moving average of the actor's weights (enable_ema: 0.992); null disables it."""

    samples_every: int = 20
    """Iterations between printed responses to fixed prompts (print_answers_interval)."""

    def reuses_forward(self, *, processes: int) -> bool:
        """Return whether each process's rollout is one micro-batch whose forward pass is reused."""
        responses = self.responses_per_process(processes)
        is_single = self.batch_size == self.rollout_size and responses <= self.micro_batch_size
        is_single = is_single and self.min_micro_batches == 1 and self.parallel.pp == 1
        return self.reuse_forward and is_single and self.method != "gkd"

    @property
    def min_micro_batches(self) -> int:
        """Minimum micro-batches per minibatch on each process or pipeline."""
        if self.parallel.micro_batches is None and self.actor.zero.reduction == "deterministic":
            return 1
        return self.parallel.min_micro_batches or 1

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained in addition to the policy."""
        return ESTIMATOR_NEEDS[self.advantage].critic

    @property
    def method_name(self) -> str:
        """Name of the method: `method`, or if that is ppo, the name that fits `advantage`."""
        names = {"gae": "ppo", "best": "raft"}
        return names.get(self.advantage, self.advantage) if self.method == "ppo" else self.method

    @property
    def step_name(self) -> str:
        """Name in metrics: the output directory's name if it is step3_METHOD, or else step3_ppo."""
        method_step = f"step3_{self.method}"
        return method_step if self.output_dir.name == method_step else "step3_ppo"

    @property
    def kl_weight(self) -> float:
        """`kl_coef`, or 0 without a KL penalty."""
        return 0.0 if self.kl_in == "none" else self.kl_coef

    @property
    def is_distillation(self) -> bool:
        """Whether the actor learns from a teacher alone, without rewards."""
        return self.method in ("distill", "gkd")

    @property
    def uses_demonstrations(self) -> bool:
        """Whether some rollouts consist of the data's responses instead of the actor's."""
        return self.method == "gkd" and self.gkd_lambda < 1

    @property
    def uses_reward_model(self) -> bool:
        """Whether a reward model scores the responses."""
        return not self.is_distillation and super().uses_reward_model

    @property
    def reference_role(self) -> Literal["reference", "teacher"] | None:
        """Role of the frozen policy: `teacher`, or `reference` if the KL is penalized or measured.

        None if there is no such policy, or if a server runs it.
        """
        if self.is_distillation:
            return "teacher" if self.teacher_url is None else None
        is_measured = self.reference.path is not None or self.step_name != "step3_ppo"
        return "reference" if is_measured or self.kl_weight > 0 else None

    @property
    def overlong_tokens(self) -> float:
        """`overlong_buffer` in tokens."""
        buffer = self.overlong_buffer
        return buffer * self.max_new_tokens if buffer < 1 else buffer

    @property
    def reward_layout(self) -> TrainedModelConfig:
        """The trained model whose sharding the reward model shares."""
        return self.critic if self.has_critic else self.actor

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts per rollout over all processes; all responses to a prompt are on one process."""
        return self.rollout_size // self.group_size

    def responses_per_process(self, processes: int) -> int:
        """Return the maximum number of a rollout's responses on one process."""
        return -(-self.prompts_per_rollout // processes) * self.group_size

    @property
    def unused_roles(self) -> frozenset[str]:
        """Roles of the models that the method and its rewards don't use."""
        used = {"critic": self.has_critic, "reward": self.uses_reward_model}
        used |= {role: self.reference_role == role for role in ("reference", "teacher")}
        return frozenset(role for role, is_used in used.items() if not is_used)

    @property
    def row_columns(self) -> RowColumns:
        """The columns that the reward sources read."""
        return self.reward_columns

    @classmethod
    def implied_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that options for rewards, teachers and environments imply."""
        options = {name: given[name] for name in ("reward_function", "reward") if name in given}
        implied = {"rewards": read_reward_options(options.items())} if options else {}
        teacher = given.get("teacher")
        implied |= {"method": "distill"} if teacher else {}
        if teacher and str(teacher).startswith(("http://", "https://")):
            implied |= {"teacher_url": teacher, "teacher.path": None}
        return {**implied, **({"inference_tp_size": 1} if "environment" in given else {})}

    @property
    def max_length(self) -> int:
        """Maximum tokens of a prompt and its response together."""
        return self.max_prompt_length + self.max_new_tokens

    @property
    def ptx_rows(self) -> DataConfig | None:
        """Source of the texts for the PPO-ptx loss; None if its weight is 0."""
        if self.ptx_coef == 0:
            return None
        if not self.ptx_data:
            return replace(self.data, eval_path=())
        # Separate rows with default fields. All are trained on; the embedded task can't be split.
        data = replace(self.data, path=self.ptx_data, fields={}, eval_path=())
        return data if EMBEDDED in data.path else replace(data, split=(1.0, 0.0, 0.0))

    def workload(self, world: int) -> Workload:
        """Return the workload of an iteration, which generates, scores and trains on responses."""
        training = world - self.rollout_processes
        processes = self.parallel.num_pipelines(training)
        return Workload(
            world=training,
            generating=self.rollout_processes,
            parallel=self.parallel,
            models=_describe_models(self),
            iteration_rows=self.rollout_size,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            length=self.max_length,
            targets=self.max_new_tokens,
            generation=Generation(
                role="actor",
                phase="each iteration",
                count=self.responses_per_process(processes),
                group_size=self.group_size,
                batch_size=self.generation_batch_size,
                prompt_length=self.max_prompt_length,
                new_tokens=self.max_new_tokens,
                tensor_parallel=self.inference_tp_size,
                # The processes of a tensor-parallel group train on the same prompts.
                shared_by=self.parallel.pp * min(self.parallel.tp, self.inference_tp_size),
                keeps_replica=self.replica == "resident",
                offloads_training=self.offload_in_generation,
            ),
            epochs=self.ppo_epochs,
            reuses_forward=self.reuses_forward(processes=processes),
            compares_logits=self.method == "gkd",
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parallel.check_model("ppo.actor", self.actor)
        if self.has_critic:
            self.parallel.check_model("ppo.critic", self.critic)
        for role, lr in LEARNING_RATES.items():
            model: TrainedModelConfig = getattr(self, role)
            if model.optim is DEFAULT_OPTIM:  # identical only if it was not set
                object.__setattr__(self, role, replace(model, optim=adam(lr)))
        names = ("rollout_size", "group_size", "generation_batch_size", "max_prompt_length")
        names += ("max_new_tokens", "inference_tp_size", "ppo_epochs")
        names += ("samples_every", "max_turns", "reward_timeout", "reward_workers", "temperature")
        for name in names:
            value = getattr(self, name)
            require(value > 0, f"ppo.{name} must be positive, got {value}")
        names = ("kl_coef", "entropy_coef", "ptx_coef", "dynamic_sampling", "rollout_processes")
        for name in (*names, "correction_threshold"):
            value = getattr(self, name)
            require(value >= 0, f"ppo.{name} must be at least 0, got {value}")
        require(
            self.rollout_size >= self.batch_size,
            f"ppo.batch_size {self.batch_size} is larger than ppo.rollout_size"
            f" {self.rollout_size}; a minibatch must be part of one rollout",
        )
        require(self.rollout_size > 1, "ppo.rollout_size must be at least 2 to whiten advantages")
        _check_method(self)
        object.__setattr__(self, "rewards", add_environment_source(self))
        self.check_rewards()
        _check_scores(self)
        check_tasks(self)
        self._complete_guards()
        for source in self.rewards:
            if source.kind == MODEL_KIND and source.path is not None:
                object.__setattr__(self, "reward", replace(self.reward, path=source.path))
        require(0 < self.clip < 1, f"ppo.clip must be between 0 and 1, got {self.clip}")
        for name in ("clip_high", "value_clip", "score_clip", "target_kl"):
            value = getattr(self, name)
            require(value is None or value > 0, f"ppo.{name} must be positive or null, got {value}")
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"ppo.dual_clip must be above 1 or null, got {self.dual_clip}",
        )
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"ppo.ema_decay must be between 0 and 1 or null, got {self.ema_decay}",
        )
        for role in ("actor", "critic"):
            lora = getattr(self, role).lora
            require(
                lora is None or lora.dropout == 0,
                f"ppo.{role}.lora.dropout must be 0, since dropout invalidates the ratio of new to"
                " old policy",
            )

    def _complete_guards(self) -> None:
        """Add the default guards to the configured ones; reject guards that could never trip."""
        object.__setattr__(self, "guards", with_defaults(self.guards, DEFAULT_GUARDS))
        unmeasured = unmeasured_signals(
            gold=self.gold is not None,
            critic=self.has_critic,
            reference=self.reference_role == "reference",
            groups=self.group_size > 1,
            sources=bool(self.rewards),
        )
        check_guards(
            self.guards, DEFAULT_GUARDS, section="ppo", missing=unmeasured, saves=self.save_interval
        )


def _describe_models(config: PPOConfig) -> tuple[ModelUse, ...]:
    sharded_actor = _if_sharded(config.actor)
    models = (
        ModelUse(
            role="actor",
            settings=config.actor,
            scoring_passes=1 if _loads_reference(config) else 2,
            text_length=config.data.max_length if config.ptx_coef > 0 else None,
            host_copies=config.keep_best,
            keeps_average=config.ema_decay is not None,
        ),
        ModelUse(role="critic", settings=config.critic, scores=True, scoring_passes=1),
        *(
            ModelUse(role=role, settings=model, sharded_like=sharded_actor, scoring_passes=1)
            for role, model in (("reference", _reference(config)), ("teacher", config.teacher))
        ),
        ModelUse(
            role="reward",
            settings=config.reward,
            scores=True,
            sharded_like=_if_sharded(config.reward_layout),
            scoring_passes=1,
        ),
        ModelUse(role="base", settings=config.base, comparison_only=True),
    )
    return tuple(model for model in models if model.role not in config.unused_roles)


def _loads_reference(config: PPOConfig) -> bool:
    is_actor = config.reference.path is None and config.actor.lora is not None
    return config.reference_role != "reference" or not is_actor


def _reference(config: PPOConfig) -> FrozenModelConfig:
    """Return the settings of the reference; if it is a copy of the actor, the actor's settings."""
    if config.reference.path is not None or not _loads_reference(config):
        return config.reference
    shared = {field.name: getattr(config.actor, field.name) for field in fields(FrozenModelConfig)}
    return FrozenModelConfig(**shared)


def _if_sharded(model: TrainedModelConfig) -> TrainedModelConfig | None:
    return model if model.zero_stage == 3 else None


def _check_method(config: PPOConfig) -> None:
    """Reject incompatible estimators, losses, groups and penalties.

    Raises:
        ConfigError: settings are incompatible; the message names a setting and the remedy.
    """
    _check_groups(config)
    _check_losses(config)
    _check_kl(config)
    _check_teacher(config)
    _check_overlong(config)
    parallel = config.parallel
    is_plain = parallel.pp * parallel.tp * parallel.replicas * config.inference_tp_size == 1
    require(
        config.rollout_processes == 0
        or (is_plain and config.environment is None and config.method != "gkd"),
        "ppo.rollout_processes supports neither ppo.environment, --method gkd, nor a parallel.pp,"
        " parallel.tp, parallel.replicas or inference_tp_size above 1; set it to 0",
    )


def _check_groups(config: PPOConfig) -> None:
    needs = ESTIMATOR_NEEDS[config.advantage]
    require(
        config.rollout_size % config.group_size == 0,
        f"ppo.group_size {config.group_size} doesn't divide ppo.rollout_size {config.rollout_size};"
        " a rollout contains all responses to each of its prompts",
    )
    has_groups = config.group_size > 1
    require(
        not needs.group or has_groups,
        f"ppo.advantage {config.advantage} compares the responses to a prompt: set ppo.group_size"
        " to 2 or more",
    )
    require(
        config.baseline == "none" or config.advantage == "reinforce_pp",
        f"ppo.baseline {config.baseline} requires ppo.advantage reinforce_pp; {config.advantage}"
        " has its own baseline",
    )
    require(
        config.baseline == "none" or has_groups,
        "ppo.baseline group is the mean score of the responses to a prompt: set ppo.group_size to 2"
        " or more",
    )
    require(
        config.dynamic_sampling == 0 or has_groups,
        "ppo.dynamic_sampling replaces prompts whose responses have the same reward: set"
        " ppo.group_size to 2 or more",
    )
    has_maximum = math.inf not in (config.max_rewards.values() or [math.inf])
    solved = config.drop_solved
    require(
        solved is None or (0 < solved <= 1 and has_maximum),
        f"ppo.drop_solved {solved} must be positive and at most 1, and requires rewards with a"
        " maximum, which a reward model and a remote service don't have; set it to null",
    )
    require(
        needs.discount or config.gamma == 1,
        f"ppo.gamma {config.gamma} discounts later rewards, but ppo.advantage"
        f" {config.advantage} sums a response's rewards undiscounted; leave it at 1",
    )


def _check_losses(config: PPOConfig) -> None:
    for name in ("gamma", "lam", "gkd_beta", "gkd_lambda"):
        value = getattr(config, name)
        require(0 <= value <= 1, f"ppo.{name} must be in [0, 1], got {value}")
    require(
        config.ptx_coef > 0 or not config.ptx_data, "ppo.ptx_data requires a ppo.ptx_coef above 0"
    )
    require(
        config.loss != "none"
        or (config.ppo_epochs == 1 and config.batch_size == config.rollout_size),
        "ppo.loss none is valid only on-policy, that is, for one update per rollout: set"
        " ppo.ppo_epochs to 1 and ppo.batch_size to ppo.rollout_size, or set ppo.loss to clip",
    )
    require(
        config.loss != "cispo" or config.dual_clip is None,
        "ppo.dual_clip bounds a clipped loss, but ppo.loss cispo bounds the ratio; leave it at"
        " null",
    )
    require(
        config.correction_cap >= 1,
        f"ppo.correction_cap must be at least 1, got {config.correction_cap}: a lower cap would"
        " also correct on-policy tokens",
    )


def _check_kl(config: PPOConfig) -> None:
    estimator = config.kl_estimator
    require(
        not (config.kl_in == "loss" and estimator == "k1"),
        "ppo.kl_estimator k1 in the loss has an expected gradient of 0 and no effect: use k3_is or"
        " k2, or set ppo.kl_in to reward",
    )
    require(
        not (config.kl_in == "reward" and estimator in ("k2", "k3", "k3_is")),
        f"ppo.kl_estimator {estimator} is for the loss, but ppo.kl_in is reward, where only k1 has"
        " the gradient of the KL: set ppo.kl_in to loss, or leave the estimator at auto",
    )


def _check_teacher(config: PPOConfig) -> None:
    is_served, method = config.teacher_url is not None, config.method
    if not config.is_distillation:
        is_one_of_several = config.step_name != "step3_ppo" or method == "ppo"
        require(
            not (config.teacher.path or is_served) or is_one_of_several,
            f"--teacher requires --method distill or gkd, not {method}; omit it or use one of them",
        )
        return
    require(
        method != "gkd" or (not is_served and config.parallel.tp == config.parallel.pp == 1),
        "--method gkd compares all logits, which servers don't return, and which parallel.tp and"
        " parallel.pp split: set --teacher to a directory, and leave both settings at 1",
    )
    require(
        (config.teacher.path is None) == is_served,
        f"--method {method} has two teachers; omit ppo.teacher.path or ppo.teacher_url"
        if is_served
        else f"--method {method} has no teacher; set --teacher to a model with the actor's"
        " tokenizer",
    )
    require(
        not is_served or config.temperature == 1,
        f"ppo.temperature must be 1 with ppo.teacher_url, got {config.temperature:g}: servers"
        " return log-probabilities at temperature 1",
    )
    given = config.rewards, config.environment, config.dynamic_sampling, config.overlong_buffer
    is_penalized = config.kl_in == "reward" and config.kl_coef > 0
    is_plain = config.kl_in == "none" and config.entropy_coef == 0
    require(
        not any(given) and (is_plain if method == "gkd" else is_penalized),
        f"--method {method} learns from its teacher alone: omit --reward, --reward-function,"
        " --environment, ppo.rewards, ppo.dynamic_sampling, ppo.overlong_buffer, ppo.kl_in and, for"
        " gkd, ppo.entropy_coef",
    )


def _check_overlong(config: PPOConfig) -> None:
    buffer = config.overlong_buffer
    require(
        0 <= buffer <= config.max_new_tokens,
        f"ppo.overlong_buffer must be between 0 and ppo.max_new_tokens {config.max_new_tokens},"
        f" got {buffer}",
    )
    masks = config.overlong == "mask"
    name = "ppo.overlong mask" if masks else f"ppo.overlong_buffer {buffer:g}"
    require(
        not (masks and buffer > 0),
        "ppo.overlong mask excludes unfinished responses, and ppo.overlong_buffer penalizes them:"
        " choose one",
    )
    require(
        not (
            (masks or buffer > 0)
            and config.uses_reward_model
            and config.missing_eos_score is not None
        ),
        f"{name} and ppo.missing_eos_score {config.missing_eos_score} both set the reward of"
        " unfinished responses: set the latter to null",
    )


def _check_scores(config: PPOConfig) -> None:
    require(
        config.environment is None or config.inference_tp_size == 1,
        "ppo.environment runs each episode on a single process; leave ppo.inference_tp_size at 1",
    )
    for name in ("missing_eos_score", "score_clip"):
        value, default = getattr(config, name), getattr(type(config), name)
        require(
            config.uses_reward_model or value in (None, default),
            f"ppo.{name} applies to a reward model's score, but ppo.rewards has no reward model;"
            " omit it. To penalize unfinished responses, add a source of kind length, or a function"
            " that reads `stopped`",
        )
