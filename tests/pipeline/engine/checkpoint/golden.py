"""Writes the checkpoint that every later version of the program must read.

    python -m tests.pipeline.engine.checkpoint.golden DIR

DIR is named after the format. The one of a format is written once, when the format is new.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from pipeline.config import OptimConfig, TrainedModelConfig
from pipeline.engine.engine import Engine
from pipeline.engine.resume import EngineCheckpoints

STEPS = 2


def golden_engine() -> Engine:
    """A layer that learns and one that doesn't, with an average beside them."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[2].requires_grad_(requires_grad=False)
    optim = OptimConfig(lr=0.1, schedule="constant", warmup_steps=0)
    return Engine(model, TrainedModelConfig(path="none", optim=optim), total_steps=4)


def train(engine: Engine, steps: range) -> None:
    """On inputs that are the steps' own."""
    for step in steps:
        inputs = torch.arange(20.0).reshape(5, 4).mul(0.1 * (step + 1)).sin()
        engine.backward(engine(inputs).square().sum())
        engine.step()


def numbers(engine: Engine) -> dict[str, list[float]]:
    """Weights, buffers and moments, as JSON has them."""
    found = {name: each.flatten().tolist() for name, each in engine.model.state_dict().items()}
    for index, group in enumerate(engine.groups):
        for kind, value in group.state.items():
            found[f"{kind} of group {index}"] = value.flatten().tolist()
    return found


def write(directory: Path) -> None:
    """Train for `STEPS` steps and save, with the numbers themselves beside the tensors."""
    engine = golden_engine()
    train(engine, range(STEPS))
    EngineCheckpoints(engine).save(directory, {"numbers": numbers(engine)})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
