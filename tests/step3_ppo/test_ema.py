"""The moving average of the actor's weights."""

import pytest
import torch
from torch import nn

from pipeline.config import OptimConfig, TrainedModelConfig
from pipeline.engine.engine import Engine
from step3_ppo.update import Ema


def make_engine(model: nn.Module) -> Engine:
    return Engine(model, TrainedModelConfig(optim=OptimConfig(lr=1e-3)), total_steps=1)


def fill(engine: Engine, value: float) -> None:
    engine.load_masters([torch.full_like(master, value) for master in engine.masters()])


def test_ema_moves_by_one_minus_decay() -> None:
    engine = make_engine(nn.Linear(1, 1, bias=False))
    fill(engine, 1.0)
    ema = Ema(engine, decay=0.75)
    averages = []

    for value in (2.0, 2.0, -1.0):
        fill(engine, value)
        ema.update()
        averages.append(ema.weights[0][0].item())

    # 1 + 0.25, then 1.25 + 0.25 * 0.75, then 1.4375 - 0.25 * 2.4375
    assert averages == [1.25, 1.4375, 0.828125]


def test_trained_weights_are_restored_bitwise_after_an_error() -> None:
    model = nn.Linear(3, 2).bfloat16()
    engine = make_engine(model)
    ema = Ema(engine, decay=0.5)
    engine.load_masters([master + 1 / 3 for master in engine.masters()])
    ema.update()
    original = {name: param.clone() for name, param in model.named_parameters()}
    masters = [master.clone() for master in engine.masters()]

    def interrupt() -> None:
        with ema.applied():
            average = engine.groups[0].flat.unflatten(ema.weights[0])["weight"].bfloat16()
            assert torch.equal(model.weight, average)
            assert not torch.equal(model.weight, original["weight"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()

    assert all(torch.equal(param, original[name]) for name, param in model.named_parameters())
    assert all(map(torch.equal, engine.masters(), masters))
