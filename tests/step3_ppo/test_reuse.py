"""The first update reuses the forward pass that scored the rollout, with equal bits."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import LoraConfig
from pipeline.models.hf.chat import load_chat
from pipeline.parallel.mesh import current_mesh
from pipeline.run.run import Run
from step3_ppo.config import PPOConfig
from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.reward_sources import RewardSources
from step3_ppo.rewards import score_to_reward
from step3_ppo.rollout import generate_responses, load_prompts
from step3_ppo.train import iterate, set_up
from step3_ppo.update import update_policy
from tests.distributed import rank, world_size
from tests.step3_ppo.toy import FEW, PROMPTS, toy_config, toy_models

STEPS = 2

CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "entropy bonus": {"entropy_coef": 0.1},
    "epochs": {"ppo_epochs": 3, "temperature": 0.7},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "adapters": {"lora": LoraConfig(rank=4)},
    "KL limit": {"target_kl": 1e-9, "ppo_epochs": 2},
    "recomputation": {"gradient_checkpointing": True},
    "stage 3": {"zero_stage": 3},
}
SHORT = ("epochs", "fp16", "adapters", "stage 3")
"""Default cases; the others run in the grid tier."""


def make_config(toy: Path, *, reuse: bool, **changes: Any) -> PPOConfig:
    """Apply model settings to actor and critic, and others to PPO."""
    model_settings = ("precision", "lora", "gradient_checkpointing", "zero_stage")
    model_changes = {name: changes.pop(name) for name in model_settings if name in changes}
    config = toy_config(toy, reuse_forward=reuse, **changes)
    if "precision" in model_changes:
        frozen = replace(config.reward, precision=model_changes["precision"])
        config = replace(config, reward=frozen)
    actor, critic = replace(config.actor, **model_changes), replace(config.critic, **model_changes)
    return replace(config, actor=actor, critic=critic)


def run_two_iterations(
    directory: str, changes: Mapping[str, Any], *, reuse: bool
) -> dict[str, Any]:
    """Return both models' masters, metrics, and the number of forward passes with gradients."""
    config = make_config(Path(directory), reuse=reuse, **changes)
    models = toy_models(config)
    engines = {"actor": models.actor, "critic": models.critic}
    passes = dict.fromkeys(engines, 0)

    def count(name: str) -> None:
        passes[name] += torch.is_grad_enabled()

    for name, engine in engines.items():
        engine.model.register_forward_hook(lambda *_, name=name: count(name))
    metrics: list[dict[str, float]] = []
    for step in range(1, STEPS + 1):
        rows = list(range(len(PROMPTS)))[rank() :: world_size()]
        keys = [step * len(PROMPTS) + row for row in rows]
        prompts = [PROMPTS[row] for row in rows]
        responses = generate_responses(models, prompts, config, keys=keys)
        experience = score_responses(models, prompts, responses, config, step=step)
        assert (experience.forward is not None) == reuse
        score = score_to_reward(experience.score, experience.stopped, models, config)
        rollout = compute_advantages(experience, score, config, kl_coef=config.kl_coef)
        updates = update_policy(models, rollout, config, step=step, forward=experience.forward)
        metrics.append(updates.metrics())
    masters = {name: torch.cat(list(engine.masters())) for name, engine in engines.items()}
    return {"masters": masters, "metrics": metrics, "passes": passes}


def same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in SHORT else pytest.mark.grid) for name in CASES]
)
def test_reuse_does_not_change_weights_and_metrics(toy: Path, case: str) -> None:
    plain = run_two_iterations(str(toy), CASES[case], reuse=False)
    reused = run_two_iterations(str(toy), CASES[case], reuse=True)

    assert same_tensors(plain["masters"], reused["masters"])
    assert plain["metrics"] == reused["metrics"]
    epochs = CASES[case].get("ppo_epochs", 1)
    assert plain["passes"] == reused["passes"] == dict.fromkeys(("actor", "critic"), STEPS * epochs)


def test_only_the_first_iteration_scores_its_rollout_twice(toy: Path, tmp_path: Path) -> None:
    data = replace(FEW, max_eval_rows=2)
    config = make_config(toy, reuse=True, data=data, output_dir=tmp_path, max_prompt_length=48)
    chat = load_chat(config.actor, config.data)
    prompts, passes = load_prompts(chat, config), list[str]()
    run = Run(config, name=config.step_name, total_steps=2, mesh=current_mesh())
    with run, RewardSources(config) as sources:
        ppo = set_up(config, chat, prompts, run, sources, None)
        for step in (1, 2):
            hook = ppo.models.actor.model.register_forward_hook(
                lambda *_, step=step: passes.append(f"{step}{'+' * torch.is_grad_enabled()}")
            )
            iterate(ppo, config, run, step=step)
            hook.remove()

    assert passes == ["1", "1+", "2+"]
