r"""Step 3: PPO against the reward model.

python -m step3_ppo.train --actor.path OUT/step1_sft --critic.path OUT/step2_reward \
        --reward.path OUT/step2_reward
torchrun --nproc_per_node 2 -m step3_ppo.train ...
"""

from pipeline.cli.options import before_imports
from step3_ppo.config import PPOConfig

if __name__ == "__main__":
    before_imports(PPOConfig)

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.options import run_main
from pipeline.engine.best import BestWeights
from pipeline.models.chat import load_chat
from pipeline.models.export import export
from pipeline.parallel.mesh import current_mesh
from pipeline.run.run import Run
from pipeline.run.training import check_finite, keeping_best, run_step
from pipeline.system.logs import Clock
from pipeline.system.torch_process import seed_generators
from step3_ppo.ema import Ema
from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.metrics import rollout_statistics
from step3_ppo.models import Models
from step3_ppo.off_policy import check_rollout_gap
from step3_ppo.reward_sources import RewardSources
from step3_ppo.rewards import rewards_of
from step3_ppo.rollout import load_prompts, sample_rollout
from step3_ppo.setup import Setup, set_up
from step3_ppo.update import update_policy


def train(config: PPOConfig) -> Path:
    """Improve the actor; return the directory that holds actor and critic."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)
    tokenizer, chat = load_chat(config.actor, config.data)
    prompts = load_prompts(chat, config)
    total_steps = prompts.stream.num_steps(config.epochs, config.max_steps)
    with (
        Run(config, name=config.step_name, total_steps=total_steps, mesh=mesh) as run,
        RewardSources(config, cache_dir=run.path("reward_cache")) as sources,
    ):
        ppo = set_up(config, tokenizer, chat, prompts, run, sources)
        with keeping_best(run, ppo.course.best, ppo.export_actor, actor=config.actor):
            for step in ppo.checkpoints.steps(enough=lambda: ppo.guards.stopped):
                metrics = iterate(ppo, config, run, step=step)
                ppo.course.evaluate(step, run)
                ppo.guarded.check(step, metrics)
        export_models(ppo.models, ppo.ema, run, best=ppo.course.best)
        ppo.course.end(run, ppo.guards)
    return config.output_dir


def iterate(ppo: Setup, config: PPOConfig, run: Run, *, step: int) -> dict[str, float]:
    """One rollout and the updates on it, logged; returns the metrics.

    A function of its own, so that an iteration's graphs are freed before the next one begins.
    """
    models, clock = ppo.models, Clock()
    sampled = sample_rollout(models, ppo.prompts, config)
    clock.end("generation")

    experience = score_responses(
        models, sampled.inputs, sampled.responses, config, score=sampled.score, step=step
    )
    rewards = rewards_of(models, experience.score, experience.stopped, config, given=sampled.given)
    rollout = compute_advantages(
        experience, rewards.reward, config, kl_coef=ppo.kl.coef, counted=rewards.known
    )
    metrics = rollout_statistics(rollout, rewards.score) | sampled.metrics
    metrics |= rewards.metrics(group_size=config.group_size)
    check_finite(f"of the rollout of iteration {step}", metrics)
    check_rollout_gap(metrics["rollout_gap"], models, largest=metrics["rollout_gap_max"])
    clock.end("experience")

    updates = update_policy(
        models,
        rollout,
        config,
        step=step,
        forward=experience.forward,
        ema=ppo.ema,
        ptx=ppo.ptx,
    )
    clock.end("training")

    metrics |= updates.metrics() | {"kl_coef": ppo.kl.coef}
    timing = models.hybrid_engine.metrics() | clock.metrics()
    seconds = clock.seconds["training"]
    timing |= ppo.utilization.metrics(experience, updates, config, step=step, seconds=seconds)
    run.log(step, tokens=updates.tokens, **metrics, **timing)
    ppo.kl.update(metrics["kl"], responses=config.rollout_size)
    return metrics


def export_models(models: Models, ema: Ema | None, run: Run, *, best: BestWeights) -> None:
    """Write the directories of actor and critic, and of the averaged actor if there is one.

    The actor is the best one, if that is kept, and remains in the engine; the average is over all
    updates, and the critic is the last one.
    """
    if ema is not None:
        with ema.applied():
            export(models.policy, models.tokenizer, run.path("ema"), weights=models.actor)
    if best.step != run.step:
        best.restore()
    export(models.policy, models.tokenizer, run.path("actor"), weights=models.actor)
    if models.critic is None:
        run.discard("critic")  # of an earlier run with one
    else:
        export(models.value_model, models.tokenizer, run.path("critic"), weights=models.critic)


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(PPOConfig, train, argv)


if __name__ == "__main__":
    run_main(main)
