"""Settings of preference optimization, and its methods as presets of these settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from evaluation.config import TaskSettings, check_tasks
from pipeline.config import (
    EarlyStopping,
    FrozenModelConfig,
    Generation,
    ModelUse,
    OptimConfig,
    RowShare,
    StepConfig,
    TrainedModelConfig,
    Workload,
)
from pipeline.guards.settings import Action, Guard, check_guards, guard_presets, with_defaults
from pipeline.system.errors import require


def _row(**settings: Any) -> Mapping[str, Any]:  # noqa: ANN401
    return MappingProxyType(settings)


METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Rafailov et al. 2023, eq. 7.
        "dpo": _row(),
        # Mitchell 2023, eq. 3.
        "cdpo": _row(label_smoothing=0.1),
        # Chowdhury et al. 2024, eq. 12.
        "rdpo": _row(label_smoothing=0.1, robust=True),
        # Lambert et al. 2024 (Tulu 3), section 5.2.
        "ldpo": _row(logp="mean", beta=5.0),
        # Azar et al. 2023, eq. 17, with log-probabilities per token: the target is half a nat.
        "ipo": _row(loss="ipo", beta=1.0),
        # Zhao et al. 2023 (SLiC), with the reference of Liu et al. 2024 (RSO, eq. 11).
        "hinge": _row(loss="hinge"),
        # Meng et al. 2024, eq. 6.
        "simpo": _row(reference_free=True, logp="mean", beta=2.5, gamma=1.375),
        # Xu et al. 2024, eq. 3 and section 3.
        "cpo": _row(reference_free=True, nll_coef=1.0),
        # Hong et al. 2024, eq. 6 and 7.
        "orpo": _row(loss="orpo", reference_free=True, nll_coef=1.0),
        # Ethayarajh et al. 2024, eq. 7 and 8.
        "kto": _row(loss="kto"),
    }
)
"""Settings by method; docs/preference.md describes when to use each."""

Signal = Literal["kl", "kl_per_token", "chosen_nll", "response_length", "stop_rate", "repetition"]

SAMPLED_SIGNALS = ("kl", "kl_per_token", "response_length", "stop_rate", "repetition")
"""Signals that are measured on the actor's responses; chosen_nll is measured on held-out rows."""

DEFAULT_LIMITS: tuple[tuple[Signal, float, int], ...] = (
    ("kl_per_token", 0.5, 2),
    ("chosen_nll", 0.5, 2),
    ("response_length", 0.5, 2),
    ("response_length", 3.0, 2),
    ("stop_rate", 0.05, 2),
    ("repetition", 0.3, 2),
)
"""Signal, limit and window of the default guards; unmeasured signals are ignored."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Guard):
    """A signal, its limit, and the action taken when the limit is exceeded."""

    RELATIVE = ("response_length",)
    PRESETS: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = guard_presets(DEFAULT_LIMITS)
    """Lists of guards, by keyword."""

    signal: Signal

    limit: float
    """kl: nats per sampled response; kl_per_token: nats per token; chosen_nll: nats per token by
    which held-out chosen responses have become less likely since the start; response_length: ratio
    to the start (a limit below 1 is a lower bound); stop_rate: decrease since the start;
    repetition: fraction."""

    window: int = 2
    """Number of consecutive evaluations in which the signal must be beyond the limit."""

    action: Action = "warn"
    """warn logs a message; stop ends the run with the last healthy actor; rollback returns to the
    last healthy checkpoint and continues with half the learning rate, at most twice; none disables
    the guard."""


DEFAULT_GUARDS = tuple(GuardConfig(**settings) for settings in GuardConfig.PRESETS["warn"])


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Signals that are watched during a run."""

    guards: tuple[GuardConfig, ...] = DEFAULT_GUARDS
    """Changes to the default guards, which warn: a list of signal, limit, window and action, or the
    keyword strict, which rolls back, or none, which disables all (docs/guards.md). Guards are
    checked at evaluations; to stop or roll back, save_every must be a number of steps."""

    @property
    def acting_guards(self) -> tuple[GuardConfig, ...]:
        """The guards that may end the run or roll it back."""
        return tuple(guard for guard in self.guards if guard.can_act)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(TaskSettings, EarlyStopping, GuardSettings):
    """Step 3 without RL: trains the actor on pairs of responses, or on single rated responses."""

    section: ClassVar[str] = "preference"

    METHODS: ClassVar[Mapping[str, Mapping[str, Any]]] = METHODS
    """Default settings of each `method`."""

    OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **StepConfig.OPTIONS,
        "actor_zero_stage": ("model.zero_stage",),
        "guards": ("guards",),
    }

    output_dir: Path = Path("output/step3_dpo")

    method: Literal[
        "dpo", "cdpo", "rdpo", "ldpo", "ipo", "hinge", "simpo", "cpo", "orpo", "kto"
    ] = "dpo"
    """Sets defaults for the settings below; explicit settings take precedence
    (docs/preference.md)."""

    model: TrainedModelConfig = field(
        default_factory=lambda: TrainedModelConfig(
            optim=OptimConfig(lr=1e-6, schedule="linear", warmup_ratio=0.1, weight_decay=0.0)
        )
    )
    """The actor, by default step 1's output; its initial weights are the reference."""

    reward: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """A reward model that only judges responses to held-out prompts: by default step 2's output, if
    the run has one. Without a reward model, only the embedded task's verifier judges them, if it
    applies."""

    base: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model before step 1, for the report; a null path omits it."""

    shares: tuple[Literal[1, 2, 3], ...] = (2, 3)
    """Parts of `data.split` to train on; train.py adds the parts of steps that don't run."""

    loss: Literal["dpo", "ipo", "hinge", "orpo", "kto"] = "dpo"
    """dpo is the logistic loss of a pair's margin, ipo the margin's squared distance from a target,
    hinge its shortfall from 1, orpo the logistic loss of the log odds ratio; kto is for single
    responses."""

    beta: float = 0.1
    """Weight of the margin; larger values keep the actor closer to the reference. For orpo, weight
    of the odds ratio. Means over tokens (logp mean) need values that are 10 to 50 times larger."""

    gamma: float = 0.0
    """For loss dpo: margin that beta times a pair's difference should exceed (SimPO)."""

    label_smoothing: float = 0.0
    """For loss dpo: assumed fraction of pairs whose order is wrong (cDPO)."""

    robust: bool = False
    """For loss dpo: correct the loss for wrong labels, instead of averaging (robust DPO)."""

    logp: Literal["auto", "sum", "mean"] = "auto"
    """Log-probability of a response: the sum or the mean over its tokens; auto is the mean for ipo
    and orpo, otherwise the sum."""

    nll_coef: float = 0.0
    """Weight of the mean negative log-likelihood per token of chosen responses (rpo_alpha,
    sft_loss_weight). It counteracts falling log-probabilities, and missing end-of-turn tokens."""

    reference_free: bool = False
    """Omit the reference: compare log-probabilities instead of log-ratios."""

    weight_chosen: float | Literal["auto"] = 1.0
    """For loss kto: weight of good responses (desirable_weight); auto gives good and bad responses
    the same total weight."""

    weight_rejected: float | Literal["auto"] = 1.0
    """For loss kto: weight of bad responses (undesirable_weight); auto gives good and bad responses
    the same total weight."""

    precompute: Literal["auto", "on", "off"] = "auto"
    """on computes the reference's log-probabilities once, before training; off runs the model
    without its adapter in each step; auto is off for a model with an adapter, otherwise on."""

    too_long: Literal["cut_prompt", "drop"] = "cut_prompt"
    """For rows longer than data.max_length: cut_prompt truncates the prompt at its beginning,
    equally for both responses, and skips rows whose responses are too long; drop skips all."""

    max_prompt_length: int = 256
    """Maximum tokens per held-out prompt; longer ones are dropped and counted."""

    max_new_tokens: int = 256
    """Maximum tokens per response to a held-out prompt, including its end-of-turn token."""

    temperature: float = 1.0
    """Sampling temperature for responses to held-out prompts."""

    eval_prompts: int = 128
    """Number of held-out prompts to respond to in evaluations during training; may be 0."""

    generation_batch_size: int = 64
    """Number of concurrent responses per process; it does not affect the result."""

    @property
    def step_name(self) -> str:
        """Name of the step in metrics."""
        return f"step3_{self.method}"

    @property
    def is_mean(self) -> bool:
        """Whether a response's log-probability is the mean over its tokens."""
        return self.loss in ("ipo", "orpo") if self.logp == "auto" else self.logp == "mean"

    @property
    def is_unpaired(self) -> bool:
        """Whether the method trains on single responses."""
        return self.loss == "kto"

    @property
    def precomputes(self) -> bool:
        """Whether the reference's log-probabilities are computed before training."""
        auto = self.model.lora is None if self.precompute == "auto" else None
        return not self.reference_free and (self.precompute == "on" or bool(auto))

    @property
    def row_share(self) -> RowShare:
        """Kind of rows (pairs, or single responses for kto) and their parts of `data.split`."""
        return RowShare("responses" if self.is_unpaired else "pairs", tuple(sorted(self.shares)))

    def workload(self, world: int) -> Workload:
        """Return the workload of training on rows and responding to held-out prompts."""
        scoring_passes = 0 if self.reference_free else 1
        scoring_passes += 2 if self.is_unpaired else 0  # mismatched responses, by both policies
        return Workload(
            world=world,
            parallel=self.parallel,
            models=(
                ModelUse(
                    role="model",
                    settings=self.model,
                    scoring_passes=scoring_passes,
                    host_copies=self.keep_best + (self.model.lora is None),
                ),
                ModelUse(role="base", settings=self.base, comparison_only=True),
                ModelUse(role="reward", settings=self.reward, scores=True, comparison_only=True),
            ),
            iteration_rows=self.batch_size,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            sequences_per_row=1 if self.is_unpaired else 2,
            length=self.data.max_length,
            targets=self.data.max_length - 1,
            generation=Generation(
                role="model",
                phase="after training",
                count=-(-self.data.max_eval_rows // self.parallel.num_pipelines(world)),
                batch_size=self.generation_batch_size,
                prompt_length=self.max_prompt_length,
                new_tokens=self.max_new_tokens,
                tensor_parallel=self.parallel.tp,
                shared_by=self.parallel.pp * self.parallel.tp,
            ),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parallel.check_model("preference.model", self.model)
        check_tasks(self)
        require(
            bool(self.shares), "preference.shares is empty; name parts of data.split: 1, 2 or 3"
        )
        for name in ("beta", "temperature", "max_prompt_length", "max_new_tokens"):
            value = getattr(self, name)
            require(value > 0, f"preference.{name} must be positive, got {value}")
        for name in ("gamma", "nll_coef", "eval_prompts"):
            value = getattr(self, name)
            require(value >= 0, f"preference.{name} must be at least 0, got {value}")
        require(
            0 <= self.label_smoothing < 0.5,
            f"preference.label_smoothing must be in [0, 0.5), got {self.label_smoothing}",
        )
        only_dpo = {"gamma": self.gamma, "label_smoothing": self.label_smoothing}
        for name, value in (*only_dpo.items(), ("robust", self.robust)):
            require(
                not value or self.loss == "dpo",
                f"preference.{name} requires loss dpo; omit it with loss {self.loss}",
            )
        require(
            not self.robust or self.label_smoothing > 0,
            "preference.robust corrects for wrong labels; set their fraction with"
            " preference.label_smoothing",
        )
        self._check_loss()
        object.__setattr__(self, "guards", with_defaults(self.guards, DEFAULT_GUARDS))
        self._check_guards()

    def _check_guards(self) -> None:
        """Reject guards that would never be checked or could never trip."""
        missing = dict.fromkeys(SAMPLED_SIGNALS, "responses; set preference.eval_prompts above 0")
        check_guards(
            self.guards,
            DEFAULT_GUARDS,
            section="preference",
            missing=missing if not self.eval_prompts else {},
            saves=self.save_interval,
            unit="steps",
        )
        for guard in self.acting_guards[:1]:
            require(
                self.eval_every != 0,
                f"preference.guards: {guard.signal} with action {guard.action} depends on"
                " evaluations: eval_every must not be 0",
            )

    def _check_loss(self) -> None:
        """Reject settings that the loss does not use."""
        for name in ("weight_chosen", "weight_rejected"):
            value = getattr(self, name)
            require(
                value == "auto" or value > 0,
                f"preference.{name} must be positive or auto, got {value}",
            )
            require(
                value == 1 or self.loss == "kto",
                f"preference.{name} requires loss kto; omit it with loss {self.loss}",
            )
        require(
            self.loss != "orpo" or (self.is_mean and self.reference_free),
            "preference.loss orpo compares mean log-probabilities without a reference; leave logp"
            " at auto and set reference_free, as --method orpo does",
        )
        require(
            self.loss != "kto" or not (self.is_mean or self.reference_free),
            "preference.loss kto needs the reference and sums of log-probabilities; omit logp and"
            " reference_free",
        )
        require(
            self.precompute != "off" or self.model.lora is not None,
            "preference.precompute off runs the model without its adapter, but it has none; set"
            " model.lora, or leave precompute at auto",
        )
        require(
            self.reward.quantize == "none",
            "preference.reward is used as saved; leave its quantize at none",
        )
        require(
            self.precompute != "on" or not self.reference_free,
            "preference.precompute on needs a reference; leave it at auto with reference_free",
        )
