"""Misuse of a model whose weights are sharded."""

import pytest
from torch import nn

from pipeline.engine.engine import Engine
from pipeline.system.errors import ConfigError
from tests.pipeline.engine.test_stages import build, compute_loss, settings


def make_sharded(**changes: object) -> tuple[nn.Module, Engine]:
    model = build("llama", "bf16", **changes)
    return model, Engine(model, settings(3, max_norm=None), total_steps=4)


CHANGES = {
    "frozen": lambda model: model.model.layers[0].mlp.up_proj.requires_grad_(False),
    "halved": lambda model: model.half(),
    "doubled": lambda model: model.model.norm.double(),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("frozen", r"model.layers.0.mlp.up_proj.weight was frozen after the engine"),
        ("halved", r"was converted or moved \(for example by .half\(\) or .to\(\)\) after the"),
        ("doubled", r"model.norm.weight was converted or moved"),
    ],
)
def test_model_modified_outside_the_engine_raises(stage: int, change: str, message: str) -> None:
    model = build("llama", "bf16")
    engine = Engine(model, settings(stage, max_norm=None), total_steps=1)

    CHANGES[change](model)

    with pytest.raises(ConfigError, match=message):
        compute_loss(engine, 0, 0, 0)


def test_step_between_forward_and_backward_raises() -> None:
    _, engine = make_sharded()
    loss = compute_loss(engine, 0, 0, 0)
    engine.backward(compute_loss(engine, 0, 1, 0))
    engine.step()

    with pytest.raises(RuntimeError, match="updated between a forward pass and its backward"):
        engine.backward(loss)


def test_failed_backward_pass_requires_discard() -> None:
    model, engine = make_sharded()

    def fail(*_: object) -> None:
        raise MemoryError

    loss = compute_loss(engine, 0, 0, 0)
    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        engine.backward(loss)
    handle.remove()

    for use in (engine.step, lambda: compute_loss(engine, 0, 0, 0), engine.masters):
        with pytest.raises(RuntimeError, match=r"call discard\(\), then repeat"):
            use()
    engine.discard()
    engine.backward(compute_loss(engine, 0, 0, 0))
    assert not engine.step().skipped
