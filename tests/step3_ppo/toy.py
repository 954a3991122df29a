"""Tiny actor, critic and reward model with the embedded tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.engine.requests import Response
from pipeline.config import DataConfig, FrozenModelConfig, OptimConfig, TrainedModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.engine.engine import Engine
from pipeline.models.hf.chat import load_chat
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Rollout, compute_advantages, score_responses
from step3_ppo.models import Models, load_models
from step3_ppo.rewards import score_to_reward
from step3_ppo.rollout import generate_responses
from step3_ppo.update import PtxStream, Update, update_minibatch
from tests.families import tiny_causal_lm, tiny_classifier

FEW = DataConfig(path=(str(Path(__file__).with_name("few.jsonl")),))
"""200 rows of the embedded task; encoding thousands takes longer than a toy run."""

END = 2
"""The embedded tokenizer's end of sequence."""

PROMPTS = [[1, *range(20, 20 + length)] for length in (3, 7, 1, 5, 2, 6, 4, 3)]

ALL_ROWS = range(len(PROMPTS))
"""The rows of a rollout."""


def save_models(directory: Path, *, blocks: int = 2, **changes: Any) -> None:
    """Save random models in the directories that `toy_config` names."""
    tokenizer = build_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": blocks, **changes}
    reward = tiny_classifier("llama", seed=2, bos_token_id=1, **sizes)
    actor, teacher = (tiny_causal_lm("llama", seed=seed, **sizes) for seed in (1, 7))
    models = {"actor": actor, "reward": reward, "teacher": teacher}
    for name, model in models.items():
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


def toy_config(directory: Path, **changes: Any) -> PPOConfig:
    """Return settings of eight prompts, one minibatch, at most 8 tokens and constant rates."""
    optim = OptimConfig(
        lr=0.01, eps=1e-5, schedule="constant", warmup_ratio=0.0, max_grad_norm=None
    )
    settings = {
        "output_dir": directory / "out",
        "actor": TrainedModelConfig(path=str(directory / "actor"), optim=optim),
        "critic": TrainedModelConfig(path=str(directory / "reward"), optim=optim),
        "reward": FrozenModelConfig(path=str(directory / "reward")),
        "data": FEW,
        "rollout_size": len(PROMPTS),
        "batch_size": len(PROMPTS),
        "correction": "none",  # hand-made rollouts are off-policy
        "target_kl": None,  # updates at this rate move the policy far
        "max_prompt_length": 8,
        "max_new_tokens": 8,
    }
    return PPOConfig(**{**settings, **changes})


def toy_models(config: PPOConfig) -> Models:
    """Return the models that step 3 loads, with hand-set moments of scores and values."""
    models = load_models(config, load_chat(config.actor, config.data), iterations=4)
    if models.reward is not None and config.normalize_score:
        models.reward.mean, models.reward.std = 0.5, 2.0
        models.set_value_line(0.5, -0.25)
    return models


def toy_rollout(models: Models, config: PPOConfig, *, seed: int = 0) -> Rollout:
    """Return a rollout of the actor's responses to all prompts; three of them stop."""
    keys = [seed * len(PROMPTS) + row for row in range(len(PROMPTS))]
    responses = generate_responses(models, PROMPTS, config, keys=keys)
    for row, length in ((1, 3), (4, 1), (6, 5)):
        responses[row] = Response(
            [*responses[row].ids[: length - 1], END], responses[row].logprobs[:length], stopped=True
        )
    experience = score_responses(models, PROMPTS, responses, config, step=1)
    score = score_to_reward(experience.score, experience.stopped, models, config)
    return compute_advantages(experience, score, config, kl_coef=config.kl_coef)


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


def run_update(
    models: Models,
    rollout: Rollout,
    config: PPOConfig,
    *,
    rows: Sequence[int] = ALL_ROWS,
    ptx: PtxStream | None = None,
) -> Update:
    """Update on one minibatch of the given rows."""
    return update_minibatch(models, rollout, rows, config, ptx=ptx)


def read_gradients(engine: Engine) -> dict[str, Tensor]:
    """Return the gradient of the engine's only step: ten times Adam's first moment."""
    return {
        name: moment / (1 - engine.optim.betas[0])
        for group in engine.groups
        for name, moment in group.flat.unflatten(group.state["exp_avg"]).items()
    }


def read_flat_gradient(engine: Engine) -> Tensor:
    """Return the gradient as one vector."""
    return torch.cat([grad.flatten() for grad in read_gradients(engine).values()])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Compute the relative L2 distance."""
    return ((actual - expected).norm() / expected.norm()).item()
