"""What a user sees of a model whose weights are sharded."""

import pytest
import torch
from torch import Tensor, nn

from pipeline.distributed import rank
from pipeline.engine.engine import Engine
from pipeline.errors import ConfigError
from tests.distributed import run_ranks
from tests.pipeline.engine.test_stages import build, loss_of, settings


def sharded(**changes: object) -> tuple[nn.Module, Engine]:
    model = build("llama", "bf16", **changes)
    return model, Engine(model, settings(3, max_norm=None), total_steps=4)


def test_names_shapes_and_types_stay_true_and_elements_are_nan_and_cant_be_changed() -> None:
    plain = dict(build("llama", "bf16").named_parameters())
    model, engine = sharded()

    assert list(dict(model.named_parameters())) == list(plain)
    assert list(model.state_dict()) == list(build("llama", "bf16").state_dict())
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
        assert all(torch.equal(param, plain[name]) for name, param in model.named_parameters())
    assert engine.zero.gathered_bytes == 0


def test_tied_weights_stay_tied() -> None:
    model, engine = sharded(tie_word_embeddings=True)
    head, embeddings = model.lm_head, model.get_input_embeddings()

    engine.backward(loss_of(engine, 0, 0, 0))
    engine.step()

    assert head.weight is embeddings.weight
    with engine.gathered():
        assert torch.equal(head.weight, embeddings.weight)


def test_weights_read_as_numpy_can_be_freed_all_the_same() -> None:
    model, engine = sharded()
    with engine.gathered():
        kept = model.lm_head.weight.detach().float().numpy().copy()
        model.lm_head.weight.detach().view(torch.uint8).numpy()

    assert engine.zero.gathered_bytes == 0
    engine.backward(loss_of(engine, 0, 0, 0))
    with engine.gathered():
        assert (model.lm_head.weight.detach().float().numpy() == kept).all()


def test_a_forward_without_gradients_frees_everything_and_one_with_them_keeps_the_root() -> None:
    _, engine = sharded()

    with torch.no_grad():
        loss_of(engine, 0, 0, 0)
    assert engine.zero.gathered_bytes == 0
    loss = loss_of(engine, 0, 0, 0)
    root = engine.zero.root.flats
    assert engine.zero.gathered_bytes == sum(2 * flat.numel for flat in root)
    with torch.no_grad():
        loss_of(engine, 0, 1, 0)
    engine.backward(loss)

    assert engine.zero.gathered_bytes == 0


def test_a_pass_that_fails_leaves_a_model_that_goes_on() -> None:
    model, engine = sharded()
    expected = loss_of(engine, 0, 0, 0).item()

    def fail(*_: object) -> None:
        raise MemoryError

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        loss_of(engine, 0, 0, 0)
    handle.remove()
    engine.discard()

    assert engine.zero.gathered_bytes == 0
    loss = loss_of(engine, 0, 0, 0)
    assert loss.item() == expected
    engine.backward(loss)
    assert not engine.step().skipped


def test_a_block_called_by_itself_says_what_to_do() -> None:
    model, _ = sharded()

    with pytest.raises(RuntimeError, match=r"model.layers.0 was called .* call the engine instead"):
        model.model.layers[0](torch.zeros(1, 3, 32))


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


class Odd(nn.Module):
    """Sizes that no cut fits: empty, scalar, one element, fewer than processes, not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))
        self.three = nn.Parameter(torch.randn(3))
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.low = nn.Parameter(torch.randn(11).bfloat16())
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        said = (self.turned * x).sum(0) @ (self.frozen[:5] * self.scalar)
        return said + (self.three * self.one).sum() + self.low.float().sum() + self.offset


def train_odd(stage: int) -> dict[str, Tensor]:
    model = Odd()
    engine = Engine(model, settings(stage, max_norm=None, weight_decay=0.0), total_steps=3)
    for step in range(3):
        engine.backward(engine(torch.tensor(1.0 + step + rank())))
        engine.step()
    with engine.gathered():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_odd_sizes_train_alike_at_every_stage(world: int) -> None:
    start = {name: param.detach().clone() for name, param in Odd().named_parameters()}

    ended = [each for stage in range(4) for each in run_ranks(train_odd, stage, world_size=world)]

    for weights in ended:
        assert all(torch.equal(weights[name], ended[0][name]) for name in start)
    changed = {name for name in start if not torch.equal(ended[0][name], start[name])}
    assert changed == {"scalar", "one", "three", "turned", "low"}
