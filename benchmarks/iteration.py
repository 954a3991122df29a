"""One iteration of step 3 on prompts of random tokens, timed phase by phase."""

from collections.abc import Callable
from typing import Any

import torch

from pipeline.parallel.mesh import current_mesh
from pipeline.progress import Clock
from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.models import Models
from step3_ppo.rewards import reward_of
from step3_ppo.rollout import generate_responses
from step3_ppo.update import update_policy


def iterate(
    models: Models,
    config: Any,  # noqa: ANN401
    *,
    step: int,
    num_prompts: int,
    prompt_length: int,
    vocabulary: int,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Seconds of generation, experience, training, the weight sync among them, and all of it.

    Args:
        models: of step 3.
        config: its settings.
        step: counts from 1, and chooses prompts and samples.
        num_prompts: of this process.
        prompt_length: tokens of each.
        vocabulary: tokens are drawn below it.
        wait: returns when the device's queue is empty.
    """
    data = current_mesh().data
    generator = torch.Generator().manual_seed(step * data.size + data.rank)
    shape = (num_prompts, prompt_length)
    prompts = torch.randint(3, vocabulary, shape, generator=generator).tolist()
    first_key = (step * data.size + data.rank) * num_prompts
    wait()
    clock = Clock()
    keys = range(first_key, first_key + num_prompts)
    responses = generate_responses(models, prompts, config, keys=keys)
    wait()
    clock.end("generation")
    experience = score_responses(models, prompts, responses, config)
    score = reward_of(experience.score, experience.stopped, models, config)
    rollout = compute_advantages(experience, score, config, kl_coef=config.kl_coef)
    wait()
    clock.end("experience")
    update_policy(models, rollout, config, step=step, forward=experience.forward)
    wait()
    clock.end("training")
    phases = clock.seconds
    return {"sync": models.hybrid_engine.seconds, **phases, "iteration": sum(phases.values())}
