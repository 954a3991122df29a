"""Builds what the loop works with, and restores the state of an earlier run."""

import logging
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.guards.guards import Guarded, Guards
from pipeline.models.export import export
from pipeline.models.trained import within_context
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.run import Run
from step3_ppo.config import PPOConfig
from step3_ppo.ema import Ema
from step3_ppo.evaluate import Course
from step3_ppo.guards import RLSignals
from step3_ppo.losses import KLController
from step3_ppo.metrics import UpdateUtilization, update_utilization
from step3_ppo.models import Models, load_models
from step3_ppo.ptx import PtxStream, open_ptx
from step3_ppo.reward_model import check_reward_model
from step3_ppo.reward_sources import RewardSources
from step3_ppo.rewards import measured_moments
from step3_ppo.rollout import Prompts, sampled_responses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What an iteration works with, and the state carried from one to the next."""

    models: Models
    prompts: Prompts
    kl: KLController
    ema: Ema | None
    ptx: PtxStream | None
    guards: Guards
    course: Course
    checkpoints: Checkpoints
    utilization: UpdateUtilization

    @property
    def guarded(self) -> Guarded:
        """The run, as guards watch it."""
        return Guarded(self.guards, self.checkpoints, slow_down=lambda: slow_down(self))

    def export_actor(self) -> None:
        """Write the actor with its current weights to the output directory."""
        models = self.models
        directory = self.checkpoints.run.path("actor")
        export(models.policy, models.tokenizer, directory, weights=models.actor)


def set_up(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    prompts: Prompts,
    run: Run,
    sources: RewardSources,
) -> Setup:
    """Load the models, with `resume` the state of an earlier run, and evaluate the initial actor.

    Raises:
        ModelError: as `step3_ppo.models.load_models`; or the actor's first figures are not finite.
        ConfigError: the models don't support a setting, or processes have different files.
    """
    sources.check_alike(run.mesh.world)
    if config.uses_reward_model:
        for model in (config.reward, *config.reward_members):
            check_reward_model(model.path)
    models = load_models(config, tokenizer, chat, iterations=run.total_steps, sources=sources)
    if models.reward is not None and models.reward.text is not None:
        models.reward.text.know((*prompts.train, *prompts.held_out))
    course = Course(models, prompts.held_out, config, total_steps=run.total_steps)
    kl = KLController(config.kl_weight, config.kl_target, config.kl_horizon)
    ema = Ema(models.actor, decay=config.ema_decay) if config.ema_decay else None
    ptx = open_ptx(chat, within_context(config, models.policy), prompts.record)
    scores_ends = config.uses_reward_model and config.missing_eos_score is not None
    guards = Guards(config.guards, RLSignals(scores_ends=scores_ends))
    checkpoints = Checkpoints(
        run,
        engines=models.trained,
        parts={
            "stream": prompts.stream,
            "controller": kl,
            "ema": ema,
            "ptx": ptx,
            "best": course.best,
            "guards": guards,
            "rewards": None if sources.is_empty else sources,
        },
        tokenizer=tokenizer,
        data=prompts.fingerprint,
        guards=guards,
    )
    set_moments(models, prompts, config, checkpoints)
    course.begin(checkpoints, run)
    utilization = update_utilization(models, config, run.mesh)
    ppo = Setup(models, prompts, kl, ema, ptx, guards, course, checkpoints, utilization)
    slow_down(ppo)
    return ppo


def slow_down(ppo: Setup) -> None:
    """Halve the learning rate and double `kl_coef` for each rollback, and resample responses."""
    rollbacks = ppo.guards.rollbacks
    for engine in ppo.models.trained.values():
        engine.lr_scale = 0.5**rollbacks
    ppo.kl.factor = 2.0**rollbacks
    ppo.prompts.attempt = rollbacks


def set_moments(
    models: Models, prompts: Prompts, config: PPOConfig, checkpoints: Checkpoints
) -> None:
    """Measure, or restore, the moments of a reward model that has none stored.

    The responses are those that the first iteration learns from.
    """
    if models.reward is None or models.reward.has_moments or not config.normalize_score:
        return

    def measure() -> list[float]:
        batch = prompts.first_batch()
        responses = sampled_responses(models, batch, config)
        return measured_moments(models, batch.inputs, responses, config)

    mean, std = checkpoints.once("moments", measure)
    models.set_moments(mean, std)
    logger.info(
        "the reward model has no stored moments: scores are normalized by mean %.4g and standard"
        " deviation %.4g of the first rollout",
        mean,
        std,
    )
