"""Shards of weights in 4 or 8 bits have the codes and scales of the full weight."""

import pytest
import torch
from torch import Tensor, nn

from pipeline.engine.sharding.tensor_parallel import ParamShard
from pipeline.models.adapters.quantized import BLOCK, QuantizedLinear, Scheme, weights_per_code
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.system.errors import ConfigError

SCHEMES: list[Scheme] = ["nf4", "int8"]

Bounds = tuple[tuple[tuple[int, int], ...], ...]
"""Start and end of each process's shards."""

SHARDINGS: dict[str, tuple[tuple[int, int], int, Bounds]] = {
    # Shape of the weight, the sharded dimension, and the bounds.
    "rows": ((96, 256), 0, (((0, 48),), ((48, 96),))),
    "columns": ((32, 256), 1, (((0, 64),), ((64, 128),), ((128, 192),), ((192, 256),))),
    "several rows in a block": ((96, 16), 0, (((0, 48),), ((48, 96),))),
    "three intervals each": (
        (8, 384),
        1,
        (((0, 64), (128, 192), (256, 320)), ((64, 128), (192, 256), (320, 384))),
    ),
}


def get_vectors(layer: QuantizedLinear) -> dict[str, Tensor]:
    return {name: layer.get_parameter(name).detach() for name in ("codes", "scales")}


def make_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.logspace(-2, 1, shape[0])[:, None]  # so that scales differ
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * rows).to(dtype)


def make_linear(shape: tuple[int, int], scheme: Scheme) -> QuantizedLinear:
    plain = nn.Linear(shape[1], shape[0], bias=False)
    plain.weight.data = make_weight(shape)
    return QuantizedLinear(plain.requires_grad_(requires_grad=False), scheme)


def make_shards(shape: tuple[int, int], dim: int, bounds: Bounds) -> list[ParamShard]:
    specs = tuple(ShardSpec(dim, tuple(Shard(*pair) for pair in intervals)) for intervals in bounds)
    return [ParamShard(torch.Size(shape), specs, rank) for rank in range(len(specs))]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharded_layer_matches_shard_of_the_full_weight_bitwise(
    sharding: str, scheme: Scheme
) -> None:
    shape, dim, bounds = SHARDINGS[sharding]
    full = make_linear(shape, scheme)
    for shard in make_shards(shape, dim, bounds):
        layer = make_linear(shape, scheme)
        layer.shard(shard, name="it")
        expected = shard.spec.extract(full.dequantize())
        assert torch.equal(layer.dequantize(), expected)
        assert torch.equal(layer.dequantize(torch.bfloat16), expected.bfloat16())
        assert layer.weight.is_contiguous()
        assert (layer.out_features, layer.in_features) == expected.shape
        vectors = get_vectors(layer)
        assert vectors["codes"].numel() * weights_per_code(scheme) == expected.numel()
        assert vectors["scales"].numel() == expected.numel() // BLOCK


def test_sharding_within_a_block_raises() -> None:
    _, shard = make_shards((32, 192), 1, (((0, 96),), ((96, 192),)))
    with pytest.raises(ConfigError, match=r"parallel.tp 2 would split blocks of it \(32 x 192\)"):
        make_linear((32, 192), "nf4").shard(shard, name="it")


def test_scales_of_a_shard_match_hand_computed_ones() -> None:
    # Blocks of the weight have the scales 0, 1, 2, ..., four in each row; the second process has
    # the last two of each row.
    plain = nn.Linear(256, 300, bias=False).requires_grad_(requires_grad=False)
    plain.weight.data = torch.arange(1200.0).repeat_interleave(64).view(300, 256)
    _, shard = make_shards((300, 256), 1, (((0, 128),), ((128, 256),)))
    layer = QuantizedLinear(plain, "nf4")
    layer.shard(shard, name="it")

    assert get_vectors(layer)["scales"][:5].tolist() == [2, 3, 6, 7, 10]
    assert [len(vector) for vector in get_vectors(layer).values()] == [300 * 64, 600]
