r"""Step 3: PPO against the reward model.

python -m step3_ppo.train --actor.path OUT/step1_sft --critic.path OUT/step2_reward \
        --reward.path OUT/step2_reward
torchrun --nproc_per_node 2 -m step3_ppo.train ...
"""

from pipeline.cli import help_before_imports
from step3_ppo.config import PPOConfig

if __name__ == "__main__":
    help_before_imports(PPOConfig)

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from inference.self_test import check_generation
from pipeline.budget.start import check_memory
from pipeline.checkpoints import Checkpoints
from pipeline.cli import parse_step, run_main
from pipeline.clock import Clock
from pipeline.compute_threads import compute_threads
from pipeline.data.batches import RowStream, num_steps
from pipeline.distributed import is_main, process_group, rank, share_of_rank, world_size
from pipeline.divergence import check_finite, keeping_best
from pipeline.engine.best import BestWeights
from pipeline.errors import ConfigError
from pipeline.models.chat import load_chat
from pipeline.models.export import export
from pipeline.models.trained import within_context
from pipeline.random_state import seed_generators
from pipeline.run import Run, configure_logging
from step3_ppo.alarms import Alarms, check_reward_model
from step3_ppo.course import Course
from step3_ppo.ema import Ema
from step3_ppo.kl import KLController
from step3_ppo.models import Models, load_models
from step3_ppo.prompts import Prompts, load_prompts
from step3_ppo.ptx import PtxStream, open_ptx
from step3_ppo.rollout import (
    Forward,
    Rollout,
    finish_rollout,
    gather_experience,
    reward_of_score,
    sample_responses,
)
from step3_ppo.scoring import counted_scores, measured_moments
from step3_ppo.statistics import rollout_statistics
from step3_ppo.update import Updates, check_first_update, check_rollout_gap, update_models

logger = logging.getLogger(__name__)


def train(config: PPOConfig) -> Path:
    """Improve the actor; return the directory that holds actor and critic."""
    if config.rollout_size < world_size():
        raise ConfigError(
            f"ppo.rollout_size {config.rollout_size} leaves some of {world_size()} processes"
            " without a prompt; raise it"
        )
    seed_generators(config.seed + rank())
    tokenizer, chat = load_chat(config.actor, config.data)
    prompts = load_prompts(chat, config)
    stream = RowStream(
        num_rows=len(prompts.train), batch_size=config.rollout_size, seed=config.seed
    )
    total_steps = num_steps(
        num_rows=len(prompts.train),
        batch_size=config.rollout_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    with Run(config, name="step3_ppo", total_steps=total_steps, is_main=is_main()) as run:
        check_reward_model(config.reward.path)
        models = load_models(config, tokenizer, chat, iterations=total_steps)
        if models.reward.text is not None:
            models.reward.text.know((*prompts.train, *prompts.held_out))
        course = Course(models, prompts.held_out, config, total_steps=total_steps)
        controller = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        ema = Ema(models.actor, decay=config.ema_decay) if config.ema_decay else None
        ptx = open_ptx(chat, within_context(config, models.policy), prompts.record)
        alarms = Alarms()
        checkpoints = Checkpoints(
            run,
            engines={"actor": models.actor, "critic": models.critic},
            parts={
                "stream": stream,
                "controller": controller,
                "ema": ema,
                "ptx": ptx,
                "best": course.best,
                "alarms": alarms,
            },
            tokenizer=tokenizer,
            data=prompts.fingerprint,
        )
        with models.hybrid_engine.generating() as actor:
            check_generation(actor, [row.input_ids for row in prompts.train[:2]])
        set_moments(models, prompts, config, checkpoints)
        course.begin(checkpoints, run)

        def write_actor() -> None:
            export(models.policy, models.tokenizer, run.path("actor"), weights=models.actor)

        with keeping_best(run, course.best, write_actor, actor=config.actor):
            for step in checkpoints.steps():
                metrics = iterate(
                    models,
                    prompts,
                    next(stream),
                    config,
                    controller,
                    run,
                    step=step,
                    ema=ema,
                    ptx=ptx,
                )
                alarms.look(step, metrics)
                if step % config.samples_every == 0:
                    course.held_out.print_samples(step)
                course.look(step, run)

        export_models(models, ema, run, best=course.best)
        course.end(run)
    return config.output_dir


def set_moments(
    models: Models, prompts: Prompts, config: PPOConfig, checkpoints: Checkpoints
) -> None:
    """Measure the moments of a reward model without any on the first rollout, or take up those.

    The actor's answers are the ones that the first iteration learns from.
    """
    if not config.normalize_score or models.reward.has_moments:
        return

    def measure() -> list[float]:
        first = RowStream(
            num_rows=len(prompts.train), batch_size=config.rollout_size, seed=config.seed
        )
        inputs = [prompts.train[row].input_ids for row in share_of_rank(next(first))]
        keys = share_of_rank(range(config.rollout_size))
        responses = sample_responses(models, inputs, config, keys=keys)
        return measured_moments(models, inputs, responses, config)

    mean, std = checkpoints.once("moments", measure)
    models.set_moments(mean, std)
    logger.info(
        "the reward model has no stored moments: scores are normalized by mean %.4g and standard"
        " deviation %.4g of the first rollout",
        mean,
        std,
    )


def iterate(
    models: Models,
    prompts: Prompts,
    rows: Sequence[int],
    config: PPOConfig,
    controller: KLController,
    run: Run,
    *,
    step: int,
    ema: Ema | None,
    ptx: PtxStream | None,
) -> dict[str, float]:
    """One rollout and its updates, logged; the metrics."""
    clock = Clock()
    inputs = [prompts.train[row].input_ids for row in share_of_rank(rows)]
    first_key = (step - 1) * config.rollout_size
    keys = share_of_rank(range(first_key, first_key + config.rollout_size))
    responses = sample_responses(models, inputs, config, keys=keys)
    seconds_generation = clock.lap()

    experience = gather_experience(
        models, inputs, responses, config, train_actor=step > config.critic_warmup_steps
    )
    score = reward_of_score(experience, models, config)
    rollout = finish_rollout(experience, score, config, kl_coef=controller.coef)
    counted = counted_scores(experience.score, experience.stopped, models, config)
    statistics = rollout_statistics(rollout, score, counted)
    check_finite(f"of the rollout of iteration {step}", statistics)
    check_rollout_gap(statistics["rollout_gap"], models, largest=statistics["rollout_gap_max"])
    seconds_experience = clock.lap()

    updates = learn(
        models, rollout, config, step=step, forward=experience.forward, ema=ema, ptx=ptx
    )
    metrics = {**statistics, **updates.values(), "kl_coef": controller.coef}
    run.log(
        step,
        tokens=updates.tokens,
        **metrics,
        **models.hybrid_engine.metrics(),
        seconds_generation=seconds_generation,
        seconds_experience=seconds_experience,
        seconds_training=clock.lap(),
    )
    controller.update(statistics["kl"], responses=config.rollout_size)
    return metrics


def learn(
    models: Models,
    rollout: Rollout,
    config: PPOConfig,
    *,
    step: int,
    forward: Forward | None = None,
    ema: Ema | None = None,
    ptx: PtxStream | None = None,
) -> Updates:
    """Update actor and critic over the epochs and minibatches of one rollout.

    Which responses share a minibatch depends on (seed, step, epoch) alone, so that every process
    cuts the same minibatches, however many processes hold them. `forward` is the pass over the
    rollout that the first of them goes back through, where there is one.
    """
    updates = Updates()
    for epoch in range(config.ppo_epochs):
        generator = torch.Generator().manual_seed(
            config.seed * 1_000_003 + step * config.ppo_epochs + epoch
        )
        order = torch.randperm(config.rollout_size, generator=generator)
        for minibatch in order.split(config.batch_size):
            # In order: a minibatch of all responses then is the rollout as it was scored. Slot s of
            # the rollout is row s // W of process s % W.
            slots = sorted(minibatch.tolist())
            rows = [slot // world_size() for slot in slots if slot % world_size() == rank()]
            update = update_models(
                models,
                rollout,
                rows,
                config,
                train_actor=step > config.critic_warmup_steps,
                ptx=ptx,
                forward=forward if updates.count == 0 else None,
            )
            updates.add(update)
            if step == 1 and updates.count == 1:
                check_first_update(update, models)
            if update.stopped:
                return updates
            if ema is not None:
                ema.update()
    return updates


def export_models(models: Models, ema: Ema | None, run: Run, *, best: BestWeights) -> None:
    """Write the directories of actor and critic, and of the averaged actor if there is one.

    The actor is the best one, where it is kept, and stays in the engine; the average is that of all
    updates, and the critic the last one.
    """
    if ema is not None:
        with ema.applied():
            export(models.policy, models.tokenizer, run.path("ema"), weights=models.actor)
    if best.step != best.last_step:
        best.restore()
    export(models.policy, models.tokenizer, run.path("actor"), weights=models.actor)
    export(models.value_model, models.tokenizer, run.path("critic"), weights=models.critic)


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    config = parse_step(PPOConfig, argv)
    check_memory(config, section="ppo")
    with compute_threads(config.threads), process_group(config.timeout_seconds):
        configure_logging(is_main=is_main())
        train(config)


if __name__ == "__main__":
    run_main(main)
