"""An engine trains on the processes of its group: two halves of a job train two models."""

import pytest
import torch
from torch import Tensor

from pipeline.engine.engine import Engine
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh, subgroup
from tests.distributed import run_ranks
from tests.pipeline.engine.test_stages import STEPS, build, loss_of, settings


def train(group: Group, model_of: int, stage: int, shared_memory: bool) -> tuple[Tensor, float]:
    """The weights, and the norm of the last gradient, of a model with batches of its own."""
    engine = Engine(
        build("llama", "bf16"),
        settings(stage, max_norm=1.0, shared_memory=shared_memory),
        total_steps=STEPS,
        group=group,
    )
    norm = 0.0
    for step in range(STEPS):
        for micro_batch in range(2):
            engine.backward(loss_of(engine, step, 2 * model_of + micro_batch, group.rank))
        norm = engine.step().grad_norm
    with engine.gathered():
        weights = torch.cat([param.detach().flatten() for param in engine.model.parameters()])
    return weights.float(), norm


def apart(stage: int, shared_memory: bool) -> tuple[Tensor, float]:
    """One of two models, each on every other process."""
    group = subgroup([(0, 2), (1, 3)], timeout_seconds=60.0)
    return train(group, current_mesh().world.rank % 2, stage, shared_memory)


def alone(stage: int, shared_memory: bool) -> list[tuple[Tensor, float]]:
    """Both models, each on the two processes of a job."""
    return [train(current_mesh().data, model_of, stage, shared_memory) for model_of in range(2)]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_two_groups_train_two_models_as_two_jobs_do(stage: int, shared_memory: bool) -> None:
    expected, _ = run_ranks(alone, stage, shared_memory)

    found = run_ranks(apart, stage, shared_memory, world_size=4)

    assert not torch.equal(expected[0][0], expected[1][0])
    for rank, (weights, norm) in enumerate(found):
        assert torch.equal(weights, expected[rank % 2][0])
        assert norm == expected[rank % 2][1]
