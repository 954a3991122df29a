"""What the settings of step 3 must be, and what its memory and time follow from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from evaluation.config import check_tasks
from pipeline.config import DEFAULT_OPTIM, TrainedModelConfig, Workload
from pipeline.guards.settings import check_guards, completed
from pipeline.system.errors import require
from step3_ppo.guard_settings import WARNING, unmeasured
from step3_ppo.methods import ESTIMATOR_NEEDS, METHODS
from step3_ppo.reward_settings import MODEL, with_environment
from step3_ppo.settings import LEARNING_RATES, PPOSettings, adam
from step3_ppo.validation import check_environment, check_method, check_parallel, check_rewards
from step3_ppo.workload import workload_of


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PPOSettings):
    """Step 3: PPO with a KL penalty to the reference (Ziegler et al. 2019; Ouyang et al. 2022)."""

    section: ClassVar[str] = "ppo"

    METHODS: ClassVar[Mapping[str, Mapping[str, Any]]] = METHODS
    """The settings that each choice of `method` stands for."""

    def workload(self, world: int) -> Workload:
        """The models, batches and lengths of the step, as `step3_ppo.workload` describes them."""
        return workload_of(self, world)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parallel(self)
        for role, lr in LEARNING_RATES.items():
            model: TrainedModelConfig = getattr(self, role)
            if model.optim is DEFAULT_OPTIM:  # nobody has set it: it is of the class alone
                object.__setattr__(self, role, replace(model, optim=adam(lr)))
        counts = ("rollout_size", "group_size", "generation_batch_size", "max_prompt_length")
        counts += ("max_new_tokens", "inference_tp_size", "ppo_epochs", "kl_horizon")
        for name in (*counts, "samples_every"):
            value = getattr(self, name)
            require(value > 0, f"ppo.{name} must be above 0, got {value}")
        require(
            self.rollout_size >= self.batch_size,
            f"ppo.batch_size {self.batch_size} is larger than ppo.rollout_size"
            f" {self.rollout_size}: a minibatch is cut from one rollout",
        )
        require(self.rollout_size > 1, "ppo.rollout_size must be at least 2 to whiten advantages")
        check_method(self, ESTIMATOR_NEEDS[self.advantage])
        object.__setattr__(self, "rewards", with_environment(self))
        check_environment(self)
        check_rewards(self)
        check_tasks(self)
        self._complete_guards()
        for source in self.rewards:
            if source.kind == MODEL and source.path is not None:
                object.__setattr__(self, "reward", replace(self.reward, path=source.path))
        require(self.temperature > 0, f"ppo.temperature must be above 0, got {self.temperature}")
        require(self.kl_coef >= 0, f"ppo.kl_coef must not be below 0, got {self.kl_coef}")
        require(0 <= self.gamma <= 1, f"ppo.gamma must lie in [0, 1], got {self.gamma}")
        for name in ("lam", "lam_value"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, f"ppo.{name} must lie in [0, 1], got {value}")
        require(0 < self.clip < 1, f"ppo.clip must lie between 0 and 1, got {self.clip}")
        above = ("clip_high", "value_clip", "score_clip", "kl_target", "target_kl")
        for name in (*above, "lam_length_alpha"):
            value = getattr(self, name)
            require(value is None or value > 0, f"ppo.{name} must be above 0 or null, got {value}")
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"ppo.dual_clip must be above 1 or null, got {self.dual_clip}",
        )
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"ppo.ema_decay must lie between 0 and 1 or be null, got {self.ema_decay}",
        )
        require(
            self.kl_target is None or self.kl_coef > 0,
            "ppo.kl_target adapts kl_coef by factors: start from a ppo.kl_coef above 0",
        )
        for role in ("actor", "critic"):
            lora = getattr(self, role).lora
            require(
                lora is None or lora.dropout == 0,
                f"ppo.{role}.lora.dropout must be 0: dropout breaks the ratio of new to old policy",
            )

    def _complete_guards(self) -> None:
        """Add the usual guards to those that are given; refuse what can't do what it says."""
        object.__setattr__(self, "guards", completed(self.guards, WARNING))
        lacking = unmeasured(
            gold=self.gold is not None,
            critic=self.has_critic,
            groups=self.group_size > 1,
            sources=bool(self.rewards),
        )
        check_guards(self.guards, WARNING, section="ppo", lacking=lacking, every=self.save_interval)
