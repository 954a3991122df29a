"""What a user sees of a model whose weights are sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.engine.engine import Engine
from pipeline.errors import ConfigError
from tests.pipeline.engine.test_stages import build, loss_of, settings


def sharded(**changes: object) -> tuple[nn.Module, Engine]:
    model = build("llama", "bf16", **changes)
    return model, Engine(model, settings(3, max_norm=None), total_steps=4)


def test_names_shapes_and_types_stay_true_and_elements_are_nan_and_cant_be_changed() -> None:
    plain = dict(build("llama", "bf16").named_parameters())
    model, engine = sharded()

    assert list(dict(model.named_parameters())) == list(plain)
    with pytest.raises(RuntimeError, match=r"call state_dict\(\) under `with engine.gathered"):
        model.state_dict()
    for name, param in model.named_parameters():
        assert (param.shape, param.dtype, param.device) == (
            plain[name].shape,
            plain[name].dtype,
            plain[name].device,
        )
        assert param.isnan().all()
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            param.add_(1)
    assert engine.zero.gathered_bytes == 0
    with engine.gathered():
        assert list(model.state_dict()) == list(build("llama", "bf16").state_dict())
        assert all(torch.equal(param, plain[name]) for name, param in model.named_parameters())
    assert engine.zero.gathered_bytes == 0


def test_a_pass_without_gradients_frees_everything_and_one_with_them_keeps_head_and_root() -> None:
    _, engine = sharded()

    with torch.no_grad():
        loss_of(engine, 0, 0, 0)
    assert engine.zero.gathered_bytes == 0
    loss = loss_of(engine, 0, 0, 0)
    kept = [flat for unit in engine.zero.units[-2:] for flat in unit.flats]
    assert {name for flat in kept for name in flat.params} == {
        "lm_head.weight",
        "model.norm.weight",
    }
    assert engine.zero.gathered_bytes == sum(2 * flat.numel for flat in kept)
    with torch.no_grad():
        loss_of(engine, 0, 1, 0)
    engine.backward(loss)

    assert engine.zero.gathered_bytes == 0


CHANGES = {
    "frozen": lambda model: model.model.layers[0].mlp.up_proj.requires_grad_(False),
    "halved": lambda model: model.half(),
    "doubled": lambda model: model.model.norm.double(),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("frozen", r"model.layers.0.mlp.up_proj.weight was frozen after the engine"),
        ("halved", r"was converted or moved after the engine had taken the model"),
        ("doubled", r"model.norm.weight was converted or moved"),
    ],
)
def test_a_model_changed_behind_the_engines_back_is_refused_by_name(
    stage: int, change: str, sentence: str
) -> None:
    model = build("llama", "bf16")
    engine = Engine(model, settings(stage, max_norm=None), total_steps=1)

    CHANGES[change](model)

    with pytest.raises(ConfigError, match=sentence):
        loss_of(engine, 0, 0, 0)


def test_an_update_between_forward_and_backward_is_refused() -> None:
    _, engine = sharded()
    loss = loss_of(engine, 0, 0, 0)
    engine.backward(loss_of(engine, 0, 1, 0))
    engine.step()

    with pytest.raises(RuntimeError, match="updated between a forward pass and its backward"):
        engine.backward(loss)


def test_after_a_backward_pass_that_failed_nothing_goes_on_before_discard() -> None:
    model, engine = sharded()

    def fail(*_: object) -> None:
        raise MemoryError

    loss = loss_of(engine, 0, 0, 0)
    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        engine.backward(loss)
    handle.remove()

    for use in (engine.step, lambda: loss_of(engine, 0, 0, 0), engine.masters):
        with pytest.raises(RuntimeError, match=r"call discard\(\), then repeat"):
            use()
    engine.discard()
    engine.backward(loss_of(engine, 0, 0, 0))
    assert not engine.step().skipped


class View(nn.Module):
    """A block that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1, 4)


class Viewed(nn.Module):
    """Blocks whose outputs are changed in place: a hook on the view itself would be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([View(), View()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x[:1]


@pytest.mark.parametrize("stage", [0, 3])
def test_views_that_are_changed_in_place_get_their_gradients(stage: int) -> None:
    torch.manual_seed(0)
    model, plain = Viewed(), Viewed()
    plain.load_state_dict(model.state_dict())
    engine = Engine(model, settings(stage, max_norm=None), total_steps=1)

    said = engine(torch.ones(2, 4))
    said *= 2
    said.sum().backward()
    (2 * plain(torch.ones(2, 4))).sum().backward()
    gradients = engine.gradients()

    for name, param in plain.named_parameters():
        assert torch.equal(gradients[name], param.grad), name


class InObject(nn.Module):
    """Blocks that return and take objects of some class."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Boxed(kind), Boxed(kind), Boxed(kind)])

    def forward(self, x: Tensor) -> Any:
        box = self.kind(x)
        for block in self.blocks:
            box = block(box)
            box.hidden.mul_(2)  # of a view, whose hook would be lost
        return box


class Boxed(nn.Module):
    """One of the blocks."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(4, 4)

    def forward(self, box: Any) -> Any:
        return self.kind(self.inner(box.hidden.tanh()).view(-1, 4))


def test_a_block_whose_tensors_are_out_of_reach_is_refused_by_name_and_class() -> None:
    kept: dict[int, Tensor] = {}

    class Hidden:
        __slots__ = ()

        def __init__(self, hidden: Tensor) -> None:
            kept[id(self)] = hidden

        @property
        def hidden(self) -> Tensor:
            return kept[id(self)]

    engine = Engine(InObject(Hidden), settings(3, max_norm=None), total_steps=1)

    with pytest.raises(ConfigError, match=r"^blocks\.0 returns a .*Hidden, in which the engine"):
        engine(torch.ones(2, 4))
