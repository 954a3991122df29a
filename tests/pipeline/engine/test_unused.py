"""A parameter without a gradient in a step stays as a plain loop leaves it, moments and all."""

import inspect
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import LossScaleConfig, OptimConfig, TrainedModelConfig
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.engine.engine import Engine
from tests.distributed import rank, run_ranks, world_size
from tests.pipeline.engine.reference import rounded
from tests.pipeline.engine.test_stages import DTYPES
from tests.pipeline.engine.test_state import resume, save

STEPS: list[tuple[tuple[str, str], ...]] = [
    (("a", "a"), ("ab", "a")),
    (("", "ab"), ("", "a")),
    (("b", ""), ("a", "")),
    (("", ""), ("", "")),
    (("ab", "b"), ("b", "b")),
    (("ab", "ab"), ("a", "ab")),
]
"""By step and rank: the layers that each of two blocks goes through. Every process must go through
the same blocks."""

SGD = OptimConfig(name="SGD", params={"momentum": 0.9, "dampening": 0.5}, lr=1e-2)
ADAMW = OptimConfig(lr=1e-2, weight_decay=0.1)
OTHERS = ("Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD")


class Block(nn.Module):
    """Two layers of which a step goes through both, one or none.

    Their sizes are such that PyTorch's fused kernels round all elements alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, layers: str) -> Tensor:
        x = 0.9 * x
        for name in layers:
            x = x + getattr(self, name)(x)
        return x


class Model(nn.Module):
    """Two blocks; of the third nothing is ever used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor, layers: tuple[str, ...]) -> Tensor:
        for block, names in zip(self.blocks, layers, strict=False):
            x = block(x, names)
        return x


def build(dtype: str) -> Model:
    torch.manual_seed(0)
    return Model().to(DTYPES[dtype])


def loss_of(model: Any, step: int, of_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + of_rank)
    inputs = torch.randn(3, 16, generator=generator)
    inputs = inputs.to(next(iter(getattr(model, "model", model).parameters())).dtype)
    return model(inputs, STEPS[step][of_rank]).float().square().sum()


def config(optim: OptimConfig, stage: int, kernels: str = "auto", **zero: Any) -> Any:
    optim = replace(optim, schedule="constant", warmup_ratio=0.0, max_grad_norm=None)
    return TrainedModelConfig(
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        kernels=kernels,  # pyright: ignore[reportArgumentType]
        optim=optim,
        zero=ZeroConfig(**zero),
        fp16=LossScaleConfig(loss_scale=1.0),
    )


def optimizer_of(optim: OptimConfig, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's, with decay for matrices alone."""
    optimizer_class = getattr(torch.optim, optim.name)
    known = {"betas": optim.betas, "eps": optim.eps, "fused": True}
    accepted = inspect.signature(optimizer_class).parameters
    arguments = {name: value for name, value in known.items() if name in accepted}
    groups = [
        {"params": [each], "weight_decay": optim.weight_decay if each.ndim > 1 else 0.0}
        for each in masters
    ]
    return optimizer_class(groups, lr=optim.lr, **arguments, **optim.params)


def sums_of(model: nn.Module, step: int, ranks: int) -> dict[str, Tensor]:
    """Of each parameter that has a gradient on some process, the sum over all."""
    sums: dict[str, Tensor] = {}
    for of_rank in range(ranks):
        loss = loss_of(model, step, of_rank)
        if loss.requires_grad:
            loss.backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                sums[name] = sums[name] + param.grad if name in sums else param.grad
            param.grad = None
    return sums


def plain(optim: OptimConfig, dtype: str, ranks: int) -> dict[str, Tensor]:
    """A loop over torch.optim, on one process, that knows nothing of vectors."""
    model = build(dtype)
    params = dict(model.named_parameters())
    masters = {name: nn.Parameter(param.detach().float()) for name, param in params.items()}
    optimizer = optimizer_of(optim, list(masters.values()))
    for param in params.values():
        param.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(len(STEPS)):
        sums = sums_of(model, step, ranks)
        for name, master in masters.items():
            master.grad = sums.get(name)
        optimizer.step()
        for name, param in params.items():
            param.data.copy_(rounded(masters[name].detach(), param.dtype))
    return {name: param.detach().clone() for name, param in masters.items()}


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        engine.backward(loss_of(engine, step, rank()))
        engine.step()


def wrong(engine: Engine, expected: dict[str, Tensor]) -> list[str]:
    """Parameters whose masters are not those of the plain loop, bit for bit."""
    return [
        name
        for group in engine.visit()
        for name, place, elements in group.spans()
        if not torch.equal(group.masters.fp32()[place], expected[name].flatten()[elements])
    ]


def ways(dtype: str, directory: str) -> dict[str, list[str]]:
    nvme = {"nvme_path": Path(directory)}
    offloads: dict[str, dict[str, Any]] = {
        "plain": {},
        "process group": {"shared_memory": False},
        "deterministic": {"reduction": "deterministic"},
        "cpu": {"offload": OffloadConfig(optimizer="cpu", gradients="cpu")},
        "nvme": {"offload": OffloadConfig(optimizer="nvme", **nvme)},
    }
    expected = plain(ADAMW, dtype, world_size())
    found: dict[str, list[str]] = {}
    cases = [("auto", name, stage) for name, stage in product(offloads, range(4))]
    for kernels, name, stage in [*cases, *(("off", "plain", stage) for stage in range(4))]:
        zero = offloads[name]
        engine = Engine(build(dtype), config(ADAMW, stage, kernels, **zero), total_steps=9)
        train(engine, range(len(STEPS)))
        found[f"stage {stage}, {name}, kernels {kernels}"] = wrong(engine, expected)
    return found


@pytest.mark.jobs
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_has_no_gradient_on_any_process_stays_as_a_plain_loop_leaves_it(
    dtype: str, tmp_path: Path
) -> None:
    for world in (1, 2):
        for found in run_ranks(ways, dtype, str(tmp_path), world_size=world):
            assert len(found) == 24
            assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize("name", OTHERS)
def test_it_does_with_every_other_optimizer(name: str) -> None:
    optim = SGD if name == "SGD" else OptimConfig(name=name, lr=1e-3, weight_decay=0.1)
    expected = plain(optim, "fp32", 1)
    before = dict(build("fp32").named_parameters())

    for stage in (0, 3):
        engine = Engine(build("fp32"), config(optim, stage), total_steps=9)
        train(engine, range(len(STEPS)))

        assert wrong(engine, expected) == []
    assert all(
        torch.equal(each, before[name].detach())
        for name, each in expected.items()
        if name.startswith("blocks.2.")
    )


@pytest.mark.parametrize("optim", [ADAMW, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("cut", range(len(STEPS)))
def test_a_run_that_was_cut_goes_on_with_the_updates_of_each_parameter(
    optim: OptimConfig, cut: int, tmp_path: Path
) -> None:
    expected = plain(optim, "fp32", 1)
    first = Engine(build("fp32"), config(optim, 1), total_steps=9)
    train(first, range(cut))
    save(first, tmp_path)

    # With other vectors: without decay all parameters of a block lie in one.
    second = Engine(build("fp32"), config(optim, 3), total_steps=9)
    train(second, range(2))  # what it has done before is forgotten
    resume(second, tmp_path)
    if cut == 0:  # all are as new, so that none has to be updated by itself
        assert not any(group.numbers_of or group.state for group in second.groups)
    train(second, range(cut, len(STEPS)))

    assert wrong(second, expected) == []
