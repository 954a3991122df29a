"""Parts of a weight in 4 or 8 bits: the codes, scales and numbers of the whole one."""

import pytest
import torch
from torch import Tensor, nn

from pipeline.engine.sharding.tensor_parallel import ParamShard
from pipeline.models.adapters.quantized import BLOCK, Form, QuantizedLinear, weights_per_code
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.system.errors import ConfigError

FORMS: list[Form] = ["nf4", "int8"]

Borders = tuple[tuple[tuple[int, int], ...], ...]
"""Of each process's shards, where they begin and end."""

CUTS: dict[str, tuple[tuple[int, int], int, Borders]] = {
    # Shape of the weight, the dimension that is cut, and how.
    "rows": ((96, 256), 0, (((0, 48),), ((48, 96),))),
    "columns": ((32, 256), 1, (((0, 64),), ((64, 128),), ((128, 192),), ((192, 256),))),
    "rows of several to a block": ((96, 16), 0, (((0, 48),), ((48, 96),))),
    "three of each": (
        (8, 384),
        1,
        (((0, 64), (128, 192), (256, 320)), ((64, 128), (192, 256), (320, 384))),
    ),
}


def vectors(layer: QuantizedLinear) -> dict[str, Tensor]:
    return {name: layer.get_parameter(name).detach() for name in ("codes", "scales")}


def numbers(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.logspace(-2, 1, shape[0])[:, None]  # so that scales and their groups differ
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * rows).to(dtype)


def linear(shape: tuple[int, int], form: Form) -> QuantizedLinear:
    plain = nn.Linear(shape[1], shape[0], bias=False)
    plain.weight.data = numbers(shape)
    return QuantizedLinear(plain.requires_grad_(requires_grad=False), form)


def parts(shape: tuple[int, int], dim: int, borders: Borders) -> list[ParamShard]:
    specs = tuple(ShardSpec(dim, tuple(Shard(*each) for each in own)) for own in borders)
    return [ParamShard(torch.Size(shape), specs, rank) for rank in range(len(specs))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_part_is_the_part_of_the_whole_weight_to_the_bit(cut: str, form: Form) -> None:
    shape, dim, borders = CUTS[cut]
    whole = linear(shape, form)
    for part in parts(shape, dim, borders):
        own = linear(shape, form)
        own.cut(part, name="it")
        expected = part.spec.extract(whole.dequantized())
        assert torch.equal(own.dequantized(), expected)
        assert torch.equal(own.dequantized(torch.bfloat16), expected.bfloat16())
        assert own.weight.is_contiguous()
        assert (own.out_features, own.in_features) == expected.shape
        here = vectors(own)
        assert here["codes"].numel() * weights_per_code(form) == expected.numel()
        assert here["scales"].numel() == expected.numel() // BLOCK


def test_a_cut_within_a_block_is_refused() -> None:
    _, part = parts((32, 192), 1, (((0, 96),), ((96, 192),)))
    with pytest.raises(ConfigError, match=r"parallel.tp 2 would split blocks of it \(32 x 192\)"):
        linear((32, 192), "nf4").cut(part, name="it")


def test_scales_of_a_part_by_hand() -> None:
    # Blocks of the weight have the scales 0, 1, 2, ..., four to a row; the second process has the
    # last two of each row.
    plain = nn.Linear(256, 300, bias=False).requires_grad_(requires_grad=False)
    plain.weight.data = torch.arange(1200.0).repeat_interleave(64).view(300, 256)
    _, part = parts((300, 256), 1, (((0, 128),), ((128, 256),)))
    layer = QuantizedLinear(plain, "nf4")
    layer.cut(part, name="it")

    assert vectors(layer)["scales"][:5].tolist() == [2, 3, 6, 7, 10]
    assert [len(each) for each in vectors(layer).values()] == [300 * 64, 600]
