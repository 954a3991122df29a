"""The plan's bytes of step 3's learning are those that a real iteration takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import peak_bytes_of
from inference.generation import Response
from pipeline.budget.machine import Machine
from pipeline.budget.step import step_memory
from pipeline.demo.model import build_tokenizer
from step3_ppo.config import PPOConfig
from step3_ppo.models import Models
from step3_ppo.rollout import compute_advantages, score_responses
from step3_ppo.scoring import reward_of
from step3_ppo.update import update_policy
from tests.distributed import run_ranks
from tests.families import tiny_causal_lm, tiny_classifier
from tests.step3_ppo.toy import toy_config, toy_models

ROWS, PROMPT, ANSWER = 8, 32, 32
NOT_MEASURED = ("runtime",)
"""What is not made of tensors."""


@pytest.fixture(scope="module")
def larger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds actor and reward model, with that many words or the tokenizer's."""
    directory = tmp_path_factory.mktemp("larger")
    tokenizer = build_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": request.param or len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
    }
    models = {
        "actor": tiny_causal_lm("llama", **shape),
        "reward": tiny_classifier("llama", **shape),
    }
    for name, model in models.items():
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return directory


def measured(models: Models, config: PPOConfig) -> float:
    """Of experience and learning; the first time is not counted, which makes what stays."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 60, (ROWS, PROMPT + ANSWER), generator=generator).tolist()
    prompts = [row[:PROMPT] for row in ids]
    responses = [Response(row[PROMPT:], [-1.0] * ANSWER, stopped=False) for row in ids]

    def iteration() -> None:
        experience = score_responses(models, prompts, responses, config)
        score = reward_of(experience.score, experience.stopped, models, config)
        rollout = compute_advantages(experience, score, config, kl_coef=config.kl_coef)
        update_policy(models, rollout, config, step=1, forward=experience.forward)

    iteration()
    return peak_bytes_of(iteration)


def planned(config: PPOConfig) -> float:
    memory = step_memory(config, machine=Machine(1, 1, None, None))
    assert not memory.unknown
    phases = [phase for phase in memory.phases if phase.name in ("score", "train")]
    return max(
        phase.peak("device") - sum(phase.by_kind("device").get(kind, 0) for kind in NOT_MEASURED)
        for phase in phases
    )


def compared(
    directory: str,
    reuse: bool,
    micro_batch_size: int,
    checkpointing: bool,
) -> tuple[float, float]:
    """Planned and measured bytes, in a process that holds no tensors of other tests."""
    config = toy_config(
        Path(directory),
        max_prompt_length=PROMPT,
        max_new_tokens=ANSWER,
        micro_batch_size=micro_batch_size,
        reuse_forward=reuse,
        keep_best=False,  # whose copy is made between iterations
    )
    actor, critic = (
        replace(model, gradient_checkpointing=checkpointing)
        for model in (config.actor, config.critic)
    )
    config = replace(config, actor=actor, critic=critic)
    return planned(config), measured(toy_models(config), config)


ITERATIONS = [
    # Each way of checkpointing with and without reuse; the others are the grid.
    pytest.param(*way, checkpointing, marks=marks if once == checkpointing else pytest.mark.grid)
    for once, marks, way in (
        (False, (), (None, False, 8)),
        (True, (), (None, True, 8)),
        (False, pytest.mark.jobs, (None, True, 4)),
        (True, pytest.mark.jobs, (8000, False, 8)),
        (False, pytest.mark.jobs, (8000, True, 8)),
    )
    for checkpointing in (False, True)
]


@pytest.mark.parametrize(
    ("larger", "reuse", "micro_batch_size", "checkpointing"), ITERATIONS, indirect=["larger"]
)
def test_an_iteration_takes_what_was_planned(
    larger: Path, *, reuse: bool, micro_batch_size: int, checkpointing: bool
) -> None:
    arguments = (str(larger), reuse, micro_batch_size, checkpointing)

    ((plan, taken),) = run_ranks(compared, *arguments, world_size=1)

    assert plan == pytest.approx(taken, rel=0.05)
