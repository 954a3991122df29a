"""Settings of step 3, and what follows from them; step3_ppo/config.py has what they must be."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from evaluation.config import TaskSettings
from pipeline.config import (
    EMBEDDED,
    DataConfig,
    FrozenModelConfig,
    OptimConfig,
    RowColumns,
    StepConfig,
    TrainedModelConfig,
)
from pipeline.settings.fields import Option
from step3_ppo.guard_settings import GuardSettings
from step3_ppo.methods import ESTIMATOR_NEEDS
from step3_ppo.reward_settings import RewardSettings, read_reward_options, without_reward_options

LEARNING_RATES = {"actor": 1e-6, "critic": 9e-6}
"""Default learning rates, where whole weights learn."""


def adam(lr: float) -> OptimConfig:
    """Adam as PPO wants it (Huang et al. 2024, details 16 and 17)."""
    return OptimConfig(lr=lr, betas=(0.9, 0.999), eps=1e-5, schedule="linear")


@dataclass(frozen=True, kw_only=True)
class PPOSettings(TaskSettings, StepConfig, RewardSettings, GuardSettings):
    """The settings of `PPOConfig`."""

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **StepConfig.OPTIONS,
        "actor_zero_stage": ("actor.zero_stage",),
        "reward_zero_stage": ("critic.zero_stage",),
        "tensor_parallel": ("parallel.tp", "inference_tp_size"),
        "guards": ("guards",),
        "environment": ("environment",),
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

    AT_LEAST: ClassVar[Mapping[str, str]] = {"rollout_size": "batch_size"}
    """A minibatch is cut from one rollout."""

    output_dir: Path = Path("output/step3_ppo")

    method: Literal[
        "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "raft"
    ] = "ppo"
    """Other defaults for the settings below; what is set beside it wins (docs/ppo.md)."""

    actor: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(optim=adam(LEARNING_RATES["actor"]))
    )
    """The policy; a null path starts from step 1's output."""

    critic: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(optim=adam(LEARNING_RATES["critic"]))
    )
    """The value model; a null path starts from step 2's output, or without a reward model from
    step 1's."""

    reference: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The reference of the KL penalty; a null path is the initial actor."""

    reward: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The reward model, where one is used; null takes step 2's output."""

    base: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model before step 1, for the report; a null path leaves it out."""

    batch_size: int = 64
    """Sequences in an optimizer step (a PPO minibatch), over all processes."""

    rollout_size: int = 128
    """Responses before each round of updates, in all."""

    group_size: int = 1
    """Responses to each prompt (num_generations, rollout.n)."""

    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "best"] = "gae"
    """gae uses a critic; grpo, dr_grpo, rloo and best compare the responses to a prompt: with their
    mean, divided by their deviation or not, with the mean of the others, or keep the best alone;
    reinforce_pp whitens the reward-to-go over all tokens. Papers: docs/ppo.md."""

    baseline: Literal["none", "group"] = "none"
    """For reinforce_pp: group subtracts the mean score of a prompt's responses from each."""

    loss: Literal["clip", "gspo", "cispo", "none"] = "clip"
    """clip is PPO's clipped ratio; gspo clips the mean ratio of a response; cispo bounds the ratio
    and keeps every gradient; none is the plain policy gradient, for one update a rollout."""

    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Weighting of that loss: tokens equally, responses equally, or 1 / max_new_tokens each."""

    dynamic_sampling: int = 0
    """Rounds that replace prompts without a gradient (Yu et al. 2025, eq. 11)."""

    overlong_buffer: float = 0.0
    """Tokens before max_new_tokens in which a reward falls by up to 1 (Yu et al. 2025, eq. 13);
    below 1 a share of them."""

    overlong: Literal["score", "mask"] = "score"
    """Unfinished responses: score keeps them; mask leaves them out of baseline and loss."""

    correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weights of off-policy tokens: truncate at correction_cap, mask beyond it (TIS,
    IcePop), or auto: truncate if rollout_gap exceeds correction_threshold."""

    correction_threshold: float = 1e-3
    """Mean absolute difference of log-probabilities, in nats."""

    correction_level: Literal["token", "sequence"] = "token"
    """Whose ratio: a token's, or the geometric mean of a response's."""

    correction_cap: float = 2.0
    """The largest weight; mask also leaves out ratios below 1 / correction_cap."""

    positive_nll_coef: float = 0.0
    """Weight of the negative log-likelihood of responses with a reward above 0, mean per token (Yue
    et al. 2025, VAPO: 0.1)."""

    generation_batch_size: int = 64
    """Concurrent responses of a process; changes no result."""

    inference_tp_size: int = 1
    """Processes that generate together by tensor parallelism; must divide their number and the
    number of attention heads."""

    replica: Literal["release", "resident"] = "release"
    """Weights gathered, merged or sharded to generate with: release gives their memory back to
    training, resident keeps it."""

    offload_in_generation: bool = False
    """Move what actor and critic keep for training to main memory while responses are generated,
    on GPUs, to make room for more at once."""

    max_prompt_length: int = 256
    """Longest prompt, in tokens; rows with longer prompts are left out, and counted."""

    max_new_tokens: int = 256
    """Longest response, in tokens, its end-of-turn token included."""

    temperature: float = 1.0
    """Temperature of sampling and of all log-probabilities."""

    ppo_epochs: int = 1
    """Passes over each rollout."""

    reuse_forward: bool = True
    """Where a rollout is one micro-batch, backpropagate the first update through the pass that gave
    the old log-probabilities: a fifth less work after generation, for its activations' memory."""

    kl_coef: float = 0.05
    """Weight of the KL penalty to the reference."""

    kl_in: Literal["reward", "loss", "none"] = "reward"
    """Where that penalty is applied (use_kl_loss)."""

    kl_estimator: Literal["auto", "k1", "k2", "k3", "k3_is"] = "auto"
    """auto is k1 in the reward, and in the loss k3_is, whose gradient is that of KL(pi || pi_ref),
    as k2's is on-policy; that of k3 (low_var_kl) is of KL(pi_ref || pi)."""

    kl_target: float | None = None
    """Nats per response that an adaptive kl_coef steers to (Ziegler et al. 2019, 2.2); null keeps
    kl_coef fixed."""

    kl_horizon: int = 10_000
    """Responses over which the adaptive kl_coef reacts."""

    gamma: float = 1.0
    """Discount per token."""

    lam: float = 0.95
    """Bias-variance trade-off of GAE: 1 is Monte Carlo, 0 one-step TD."""

    lam_value: float | None = None
    """The same for the critic's returns (Yue et al. 2025, VAPO: 1); null is lam."""

    lam_length_alpha: float | None = None
    """Let the policy's trade-off grow with the response's length, 1 - 1 / (alpha * tokens) (Yue et
    al. 2025, VAPO: 0.05); null is off."""

    whiten_advantages: bool = True
    """Shift and scale the advantages of gae and reinforce_pp to mean 0, variance 1 over the rollout
    of all processes."""

    whiten_rewards: bool = False
    """Scale token rewards to variance 1, keeping their mean."""

    clip: float = 0.2
    """Lower side of the trust region: the ratio is clipped at 1 - clip."""

    clip_high: float | None = None
    """Upper side, 1 + clip_high (Yu et al. 2025); null uses `clip`."""

    dual_clip: float | None = None
    """Bound c > 1 on the loss of negative advantages (Ye et al. 2020, eq. 5); null is off."""

    value_clip: float | None = 0.2
    """Trust region of the value estimate, in units of reward; null is off."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    target_kl: float | None = 0.05
    """Stop the epochs over a rollout when new and old policy are over 1.5 times this apart, in nats
    per token; null never stops."""

    normalize_score: bool = True
    """Subtract the reward model's stored mean and divide by its deviation, or by those of the first
    rollout where it has none."""

    score_clip: float | None = 5.0
    """Normalized scores are clipped to ± this; null is off."""

    missing_eos_score: float | None = -1.0
    """Maximum score of an unfinished response, after normalization; null is off."""

    critic_warmup_steps: int = 0
    """First iterations in which only the critic learns."""

    ptx_coef: float = 0.0
    """Weight of the language-model loss on `ptx_data`, mean per token (PPO-ptx)."""

    ptx_data: tuple[str, ...] = ()
    """Plain text or dialogues for the PPO-ptx loss, as `data.path`; empty uses step 1's rows."""

    ema_decay: float | None = None
    """Decay of the exponential moving average of the actor (enable_ema uses 0.992); null is off."""

    samples_every: int = 20
    """Iterations between printed samples of fixed prompts (print_answers_interval)."""

    def reuses_forward(self, *, processes: int) -> bool:
        """Whether the rollout of each of that many processes is one micro-batch, and is reused."""
        of_process = self.responses_per_process(processes)
        is_one = self.batch_size == self.rollout_size and of_process <= self.micro_batch_size
        is_one = is_one and self.least_micro_batches == 1 and self.parallel.pp == 1
        return self.reuse_forward and is_one

    @property
    def least_micro_batches(self) -> int:
        """The least number of micro-batches of a minibatch on each process, or each pipeline."""
        given, deterministic = self.parallel.micro_batches, self.actor.zero.reduction
        if given is None and deterministic == "deterministic":
            return 1
        return self.parallel.least_micro_batches or 1

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return ESTIMATOR_NEEDS[self.advantage].critic

    @property
    def method_name(self) -> str:
        """What its settings make: `method`, or the method of the advantage where none is named."""
        by_advantage = {"gae": "ppo", "best": "raft"}
        named = self.method != "ppo"
        return self.method if named else by_advantage.get(self.advantage, self.advantage)

    @property
    def step_name(self) -> str:
        """What its figures call the step: of several methods each has a directory of its name."""
        own = f"step3_{self.method}"
        return own if self.output_dir.name == own else "step3_ppo"

    @property
    def kl_weight(self) -> float:
        """`kl_coef` where there is a KL penalty at all."""
        return 0.0 if self.kl_in == "none" else self.kl_coef

    @property
    def overlong_tokens(self) -> float:
        """`overlong_buffer` in tokens."""
        buffer = self.overlong_buffer
        return buffer * self.max_new_tokens if buffer < 1 else buffer

    @property
    def reward_layout(self) -> TrainedModelConfig:
        """The trained model as which the reward model is sharded."""
        return self.critic if self.has_critic else self.actor

    @property
    def prompts_per_rollout(self) -> int:
        """Over all processes; each process has all responses to its prompts."""
        return self.rollout_size // self.group_size

    def responses_per_process(self, processes: int) -> int:
        """Responses of a rollout that one of that many processes has, at most."""
        return -(-self.prompts_per_rollout // processes) * self.group_size

    @property
    def unused_roles(self) -> frozenset[str]:
        """The models that the method and its rewards do without."""
        critic = frozenset[str]() if self.has_critic else frozenset({"critic"})
        return critic if self.uses_reward_model else critic | {"reward"}

    @property
    def reward_members(self) -> tuple[FrozenModelConfig, ...]:
        """The reward models beside the first, whose scores are pooled with its own."""
        paths = self.model_source.members if self.model_source is not None else ()
        return tuple(replace(self.reward, path=path) for path in paths)

    def used_models(self) -> Mapping[str, FrozenModelConfig]:
        """The models that the step loads, by the field that names them."""
        source = self.model_source
        others = {
            f"rewards.{source.name}.members.{number}": member
            for number, member in enumerate(self.reward_members, start=1)
            if source is not None
        }
        return {**super().used_models(), **others}

    @property
    def row_columns(self) -> RowColumns:
        """The columns that the sources of rewards read."""
        return self.reward_columns

    @classmethod
    def implied_settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The sources that options name; in an environment each process plays by itself."""
        words = {name: given[name] for name in ("reward_function", "reward") if name in given}
        sources = {"rewards": read_reward_options(words.items())} if words else {}
        return {**sources, **({"inference_tp_size": 1} if "environment" in given else {})}

    @classmethod
    def without_short_forms(cls, options: list[Option]) -> list[Option]:
        """`--reward-function FILE.py:NAME` and `--reward KIND` as a list of `rewards`."""
        return without_reward_options(options)

    def trains_actor(self, step: int) -> bool:
        """Whether iteration `step` updates the actor beside the critic."""
        return step > self.critic_warmup_steps

    @property
    def max_length(self) -> int:
        """Longest prompt with its response, in tokens."""
        return self.max_prompt_length + self.max_new_tokens

    @property
    def ptx_rows(self) -> DataConfig | None:
        """Where the texts of the PPO-ptx loss come from; None where it has no weight."""
        if self.ptx_coef == 0:
            return None
        if not self.ptx_data:
            return replace(self.data, eval_path=())
        # Rows of its own, read by their own fields; all of them, which the embedded task can't cut.
        data = replace(self.data, path=self.ptx_data, fields={}, eval_path=())
        return data if EMBEDDED in data.path else replace(data, split=(1.0, 0.0, 0.0))
