"""Passes that run blocks repeatedly, in a different order or not at all, at every stage."""

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.engine.engine import Engine
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import settings


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Network(nn.Module):
    """Three blocks in a given order."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return x.square().mean()


def inputs(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank()))


def train(order: tuple[int, ...], stage: int) -> dict[str, Tensor]:
    model = Network(order)
    engine = Engine(model, settings(stage, max_norm=None), total_steps=3)
    for step in range(3):
        engine.backward(engine(inputs(step)))
        engine.step()
    with engine.gathered():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_plain(order: tuple[int, ...], world_size: int) -> dict[str, Tensor]:
    """Train with autograd and AdamW only."""
    model = Network(order)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=OptimConfig().betas,
        fused=True,
    )
    for step in range(3):
        gradients: list[list[Tensor | None]] = []
        for index in range(world_size):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + index))
            model(x).backward()
            gradients.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for param, first, second in zip(model.parameters(), *gradients, strict=True):
            # A block that no process runs has a gradient of zero, as in DeepSpeed.
            is_unused = first is None or second is None
            param.grad = torch.zeros_like(param) if is_unused else first + second
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 0, 2, 1), (2, 0), (1, 1, 1)], ids=str)
def test_repeated_reordered_and_skipped_blocks_match_plain_training(
    order: tuple[int, ...], stage: int
) -> None:
    expected = train_plain(order, 2)

    for actual in run_ranks(train, order, stage):
        for name, weight in expected.items():
            torch.testing.assert_close(actual[name], weight, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("reaches_root", [True, False])
def test_no_weights_stay_gathered_after_the_backward_pass(reaches_root: bool) -> None:
    model = Network((0, 2, 1))
    if not reaches_root:
        model.first.register_forward_hook(lambda *call: call[-1].detach())
    zero = Engine(model, settings(3, max_norm=None), total_steps=1).zero

    loss = zero.model(inputs(0))
    during = [unit.gathered for unit in zero.units]
    zero.backward([loss], reaches_root=reaches_root)

    assert during == [unit is zero.root for unit in zero.units]
    assert not any(unit.gathered for unit in zero.units)
