"""Optimizers over flat vectors against the same ones over separate tensors."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.config.optim import ELEMENT_WISE
from pipeline.engine.optimizer.trained import build_optimizer
from pipeline.engine.sharding.flat import ALIGNMENT

FUSED = {"AdamW", "Adam", "SGD", "Adagrad"}
ROUNDS_TAILS_DIFFERENTLY = {"AdamW", "Adam", "SGD"}
EXTRA: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {"momentum_decay": 0.01, "decoupled_weight_decay": True},
    "Adam": {"amsgrad": True},
}


def optim(name: str, **settings: object) -> OptimConfig:
    decay = 0.0 if name == "Rprop" else 0.1
    return OptimConfig(name=name, **{"lr": 0.01, "weight_decay": decay, **settings})


def group(params: Sequence[Tensor], config: OptimConfig) -> dict[str, Any]:
    return {"params": list(params), "lr": config.lr, "weight_decay": config.weight_decay}


def trained(config: OptimConfig, sizes: Sequence[int]) -> Tensor:
    """A vector after four steps, held as separate parameters of these sizes."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(sum(sizes), generator=generator)
    params = [nn.Parameter(piece.clone()) for piece in vector.split(list(sizes))]
    optimizer = build_optimizer([group(params, config)], config)
    for _ in range(4):
        gradient = torch.randn(sum(sizes), generator=generator)
        for param, piece in zip(params, gradient.split(list(sizes)), strict=True):
            param.grad = piece.clone()
        optimizer.step()
    return torch.cat([param.detach() for param in params])


ODD = (1, 7, 15, 0, 33, 100, 3, 129, 5, 63, 1, 500, 7)
"""Together whole cache lines, as an engine's vectors are."""


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_a_flat_vector_is_updated_like_the_tensors_in_it(name: str) -> None:
    config = optim(name, params=EXTRA.get(name, {}))

    separate, flat = trained(config, ODD), trained(config, [sum(ODD)])

    if name not in ROUNDS_TAILS_DIFFERENTLY:
        assert torch.equal(flat, separate)
        return
    # Its fused kernel finishes a tensor's last elements, fewer than a cache line, one by one.
    assert sum(ODD) % ALIGNMENT == 0
    for one, other in zip(flat.split(ODD), separate.split(ODD), strict=True):
        whole = len(one) // ALIGNMENT * ALIGNMENT
        assert torch.equal(one[:whole], other[:whole])
        torch.testing.assert_close(one[whole:], other[whole:], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_the_update_is_that_of_the_class_in_torch(name: str) -> None:
    config = optim(name, betas=(0.8, 0.97), eps=1e-6, params=EXTRA.get(name, {}))
    takes = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    without = {"SGD": {"betas", "eps"}, "ASGD": {"betas", "eps"}, "Rprop": set(takes)}
    without |= {each: {"betas"} for each in ("Adagrad", "RMSprop", "Adadelta")}
    arguments = {key: value for key, value in takes.items() if key not in without.get(name, set())}
    ours, plain = (nn.Parameter(torch.linspace(-1, 1, 37)) for _ in range(2))

    optimizer = build_optimizer([group([ours], config)], config)
    reference = getattr(torch.optim, name)(
        [plain],
        lr=config.lr,
        **arguments,
        **EXTRA.get(name, {}),
        **({"fused": True} if name in FUSED else {}),
    )
    for _ in range(3):
        ours.grad = torch.cos(ours.detach())
        plain.grad = torch.cos(plain.detach())
        optimizer.step()
        reference.step()

    assert torch.equal(ours, plain)
    assert not torch.equal(ours, torch.linspace(-1, 1, 37))
