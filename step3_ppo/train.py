r"""Step 3: train the actor with PPO, or with another method that learns from rewards or a teacher.

python -m step3_ppo.train --actor.path OUT/step1_sft --critic.path OUT/step2_reward \
        --reward.path OUT/step2_reward
torchrun --nproc_per_node 2 -m step3_ppo.train ...
"""

from pipeline.cli.options import prepare_imports
from step3_ppo.config import PPOConfig

if __name__ == "__main__":
    prepare_imports(PPOConfig)

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from inference.remote import RemoteGenerator, remote_generation
from pipeline.cli.options import run_main
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.engine.checkpoint.parts import BestWeights
from pipeline.guards.guards import Guards
from pipeline.models.hf.chat import load_chat
from pipeline.models.trained import limit_to_context
from pipeline.parallel.mesh import current_mesh
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.exporting import export_verified
from pipeline.run.run import Run
from pipeline.run.training import check_finite, exporting_best, run_step
from pipeline.system.logs import Clock
from pipeline.system.torch_process import seed_generators
from step3_ppo.evaluate import Evaluator
from step3_ppo.experience import check_rollout_gap, compute_advantages, score_responses
from step3_ppo.guards import RLSignals
from step3_ppo.metrics import rollout_statistics
from step3_ppo.models import Models, load_models, serve_rollouts
from step3_ppo.reward_sources import RewardSources
from step3_ppo.rewards import compute_rewards, measure_scores
from step3_ppo.rollout import Prompts, load_prompts, request_next, sample_responses, sample_rollout
from step3_ppo.update import Ema, PtxStream, fit_values, open_ptx, update_policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """Models, data and state of a run."""

    models: Models
    prompts: Prompts
    ema: Ema | None
    ptx: PtxStream | None
    guards: Guards
    evaluator: Evaluator
    checkpoints: Checkpoints

    @property
    def is_done(self) -> bool:
        """Whether the run must end before its last planned iteration."""
        return self.guards.stopped or self.prompts.all_solved

    def export_actor(self) -> None:
        """Write the actor with its current weights to the output directory."""
        models = self.models
        directory = self.checkpoints.run.path("actor")
        export_verified(models.policy_passes, models.policy, models.chat.tokenizer, directory)


def set_up(
    config: PPOConfig,
    chat: ChatFormat,
    prompts: Prompts,
    run: Run,
    sources: RewardSources,
    remote: RemoteGenerator | None,
) -> Setup:
    """Load the models and, with `resume`, an earlier run's state; evaluate the initial actor.

    Raises:
        ModelError: as in `load_models`, or the initial actor's metrics are not finite.
        ConfigError: the models don't support a setting, or processes have different files.
    """
    sources.check_same_files(run.mesh.world)
    models = load_models(config, chat, iterations=run.total_steps, sources=sources, remote=remote)
    if models.reward is not None and models.reward.text is not None:
        models.reward.text.register_prompts((*prompts.train, *prompts.held_out))
    evaluator = Evaluator(models, prompts.held_out, config, total_steps=run.total_steps)
    ema = Ema(models.actor, decay=config.ema_decay) if config.ema_decay else None
    ptx = open_ptx(chat, limit_to_context(config, config.actor), prompts.record)
    has_eos_penalty = config.uses_reward_model and config.missing_eos_score is not None
    rates = config.actor.peak_lr[0], config.critic.peak_lr[0]
    guards = Guards(config.guards, RLSignals(has_eos_penalty, *rates, config.rollout_size))
    checkpoints = Checkpoints(
        run,
        engines=models.trained,
        parts={
            "stream": prompts.stream,
            "ema": ema,
            "ptx": ptx,
            "best": evaluator.best,
            "guards": guards,
            "rewards": None if sources.is_empty else sources,
            "rollout": remote,
        },
        tokenizer=chat.tokenizer,
        data=prompts.fingerprint,
        guards=guards,
    )
    normalize_scores(models, prompts, config, checkpoints)
    evaluator.begin(checkpoints, run)
    ppo = Setup(models, prompts, ema, ptx, guards, evaluator, checkpoints)
    apply_rollbacks(ppo)
    return ppo


def apply_rollbacks(ppo: Setup) -> None:
    """Adapt learning rates, sampling keys and the critic's linear function to past rollbacks."""
    rollbacks, checkpoints = ppo.guards.rollbacks, ppo.checkpoints
    is_fitted = checkpoints.done > 0
    line = checkpoints.once("values", lambda: (1.0, 0.0)) if is_fitted else (1.0, 0.0)
    ppo.models.set_value_line(*line)
    for engine in ppo.models.trained.values():
        engine.lr_scale = 0.5**rollbacks
    ppo.prompts.attempt = rollbacks


def normalize_scores(
    models: Models, prompts: Prompts, config: PPOConfig, checkpoints: Checkpoints
) -> None:
    """Set the mean and standard deviation with which scores are normalized.

    They are measured once per run, on the initial actor's responses to the first prompts.
    """
    if models.reward is None or not config.normalize_score:
        return

    def measure() -> list[float]:
        batch = prompts.first_batch()
        responses = sample_responses(models, batch, config)
        return measure_scores(models, batch.inputs, responses, config)

    mean, std = checkpoints.once("moments", measure)
    models.reward.mean, models.reward.std = mean, std
    logger.info("normalizing scores by the first rollout's mean %.4g and std %.4g", mean, std)


def train(config: PPOConfig) -> Path:
    """Train the actor and return the output directory."""
    mesh = current_mesh()
    if mesh.rollout is not None and mesh.rollout.generates:
        serve_rollouts(config, mesh.rollout)
        return config.output_dir
    seed_generators(config.seed + mesh.data.rank)
    chat = load_chat(config.actor, config.data)
    prompts = load_prompts(chat, config)
    total_steps = prompts.stream.num_steps(config.epochs, config.max_steps)
    with (
        nullcontext() if mesh.rollout is None else remote_generation(mesh.rollout) as remote,
        Run(config, name=config.step_name, total_steps=total_steps, mesh=mesh) as run,
        RewardSources(config) as sources,
    ):
        ppo = set_up(config, chat, prompts, run, sources, remote)
        with exporting_best(run, ppo.evaluator.best, ppo.export_actor, actor=config.actor):
            for step in ppo.checkpoints.steps(should_stop=lambda: ppo.is_done):
                metrics = iterate(ppo, config, run, step=step)  # its autograd graphs are freed
                ppo.evaluator.evaluate(step, run, is_last=prompts.all_solved)
                ppo.guards.watch(ppo.checkpoints, step, metrics, lambda: apply_rollbacks(ppo))
        if prompts.all_solved:
            logger.info("%s ended early: all %d prompts are solved", run.name, len(prompts.train))
        export_models(ppo.models, ppo.ema, run, best=ppo.evaluator.best)
        ppo.evaluator.end(run, ppo.guards)
    return config.output_dir


def iterate(ppo: Setup, config: PPOConfig, run: Run, *, step: int) -> dict[str, float]:
    """Run one iteration, a rollout and its updates; log and return the metrics."""
    models, clock = ppo.models, Clock()
    models.hybrid_engine.seconds = models.sources.seconds = 0.0
    sampled = sample_rollout(models, ppo.prompts, config)
    request_next(models, ppo.prompts, is_last=step == run.total_steps)
    clock.end("generation")
    inputs = models, sampled.inputs, sampled.responses, config
    kl_coef = config.kl_weight * 2.0**ppo.guards.rollbacks
    fit = step == 1 and models.critic is not None
    experience = score_responses(*inputs, score=sampled.score, step=None if fit else step)
    rewards = compute_rewards(
        models, experience.score, experience.stopped, config, source_rewards=sampled.source_rewards
    )
    if fit:
        line = fit_values(experience, rewards, config, kl_coef=kl_coef)
        models.set_value_line(*ppo.checkpoints.once("values", lambda: line))
        experience = score_responses(*inputs, score=experience.score, step=step)
    rollout = compute_advantages(
        experience, rewards.reward, config, kl_coef=kl_coef, counted=rewards.known
    )
    # A distilled actor's reward is its negative reverse KL times the coefficient.
    score = rollout.reward_score / (kl_coef or 1.0) if config.is_distillation else rewards.score
    metrics = models.hybrid_engine.metrics() | rollout_statistics(rollout, score) | sampled.metrics
    if config.method == "distill":  # otherwise, `kl` is relative to the initial actor
        metrics["reverse_kl"] = metrics.pop("kl") / metrics["response_length"]
    metrics |= rewards.metrics(group_size=config.group_size)
    check_finite(f"of the rollout of iteration {step}", metrics)
    check_rollout_gap(metrics, models)
    clock.end("experience")

    updates = update_policy(
        models, rollout, config, step=step, forward=experience.forward, ema=ppo.ema, ptx=ppo.ptx
    )
    clock.end("training")
    metrics |= updates.metrics() | {"kl_coef": kl_coef}
    if config.method == "gkd":
        metrics["score"] = -metrics["reverse_kl"] * metrics["response_length"]
    run.log(step, tokens=updates.tokens, **metrics, **clock.metrics())
    return metrics


def export_models(models: Models, ema: Ema | None, run: Run, *, best: BestWeights) -> None:
    """Export the actor and, if they exist, the critic and the averaged actor.

    If the best actor was kept, it is exported and remains in the engine. The average includes all
    updates, and the critic is exported with its last weights.
    """
    passes = models.policy_passes
    if ema is not None:
        with ema.applied():
            export_verified(passes, models.policy, models.chat.tokenizer, run.path("ema"))
    if best.step != run.step:
        best.restore()
    export_verified(passes, models.policy, models.chat.tokenizer, run.path("actor"))
    if models.value_passes is None:
        run.discard("critic")  # left by an earlier run
    else:
        passes, model = models.value_passes, models.value_model
        export_verified(passes, model, models.chat.tokenizer, run.path("critic"))


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(PPOConfig, train, argv)


if __name__ == "__main__":
    run_main(main)
