"""Parts of a weight in 4 or 8 bits: the codes, scales and numbers of the whole one."""

import pytest
import torch
from torch import Tensor, nn

from pipeline.engine.stored import StoredParameter, copy_elements, stored_like
from pipeline.engine.tensor_parts import Part
from pipeline.models.block_codes import GROUP, Form, parts_of
from pipeline.models.quantized import QuantizedLinear
from pipeline.parallel.shards import Shard, ShardSpec

FORMS = [Form("nf4"), Form("nf4", double=True), Form("int8")]

Borders = tuple[tuple[tuple[int, int], ...], ...]
"""Of each process's shards, where they begin and end."""

CUTS: dict[str, tuple[tuple[int, int], int, Borders, tuple[int, ...]]] = {
    # Shape of the weight, the dimension that is cut, and how; scales of each process.
    "rows": ((96, 256), 0, (((0, 48),), ((48, 96),)), (192, 192)),
    "columns of parted blocks": (
        (32, 320),
        1,
        (((0, 80),), ((80, 160),), ((160, 240),), ((240, 320),)),
        (2 * 32, 2 * 32, 2 * 32, 2 * 32),
    ),
    "rows of parted blocks": ((48, 44), 0, (((0, 24),), ((24, 48),)), (17, 17)),
    "three of each within blocks": (
        (64, 96),
        1,
        (((0, 16), (32, 48), (64, 80)), ((16, 32), (48, 64), (80, 96))),
        (96, 96),
    ),
}


def vectors(layer: QuantizedLinear) -> dict[str, Tensor]:
    return {name: layer.get_parameter(name).detach() for name in parts_of(layer.form)}


def numbers(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.logspace(-2, 1, shape[0])[:, None]  # so that scales and their groups differ
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * rows).to(dtype)


def linear(shape: tuple[int, int], form: Form, *, lazy: bool = False) -> QuantizedLinear:
    plain, weight = nn.Linear(shape[1], shape[0], bias=False), numbers(shape)
    if lazy:
        flat = weight.flatten()
        plain.weight = stored_like(weight, lambda start, stop: flat[start:stop])
    else:
        plain.weight.data = weight
    return QuantizedLinear(plain.requires_grad_(requires_grad=False), form, lazy=lazy)


def parts(shape: tuple[int, int], dim: int, borders: Borders) -> list[Part]:
    specs = tuple(ShardSpec(dim, tuple(Shard(*each) for each in own)) for own in borders)
    return [Part(torch.Size(shape), specs, rank) for rank in range(len(specs))]


def settled(layer: QuantizedLinear) -> None:
    """Read what is still in a file, a few elements at a time, as an engine does."""
    for name in parts_of(layer.form):
        param = layer.get_parameter(name)
        assert isinstance(param, StoredParameter)
        data = torch.empty(param.shape, dtype=param.dtype)
        for start in range(0, len(data), 1000):
            copy_elements(param, start, data[start : start + 1000])
        param.data = data
        param.settle()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_part_is_the_part_of_the_whole_weight_to_the_bit(cut: str, form: Form) -> None:
    shape, dim, borders, scales_here = CUTS[cut]
    whole = linear(shape, form)
    for part in parts(shape, dim, borders):
        for lazy in (False, True):
            own = linear(shape, form, lazy=lazy)
            own.cut(part, name="it")
            if lazy:
                settled(own)
            expected = part.own.of(whole.dequantized())
            assert torch.equal(own.dequantized(), expected)
            assert torch.equal(own.dequantized(torch.bfloat16), expected.bfloat16())
            assert own.weight.is_contiguous()
            assert (own.out_features, own.in_features) == expected.shape
            here = vectors(own)
            assert here["codes"].numel() * parts_of(form)["codes"].grain == expected.numel()
            scales = here["scale_codes" if form.double else "scales"]
            assert scales.numel() == scales_here[part.rank]


def test_scales_of_a_part_by_hand() -> None:
    # Blocks of the weight have the scales 0, 1, 2, ..., four to a row; the second process has the
    # last two of each row. 300 rows have 1,200 blocks, in groups of 256.
    plain = nn.Linear(256, 300, bias=False).requires_grad_(requires_grad=False)
    plain.weight.data = torch.arange(1200.0).repeat_interleave(64).view(300, 256)
    _, part = parts((300, 256), 1, (((0, 128),), ((128, 256),)))
    layer, double = (QuantizedLinear(plain, Form("nf4", double=way)) for way in (False, True))
    for each in (layer, double):
        each.cut(part, name="it")

    assert vectors(layer)["scales"][:5].tolist() == [2, 3, 6, 7, 10]
    assert [len(each) for each in vectors(layer).values()] == [300 * 64, 600]
    # A group's range is 0 to 255 more than its first, and 1200 - 4 * 256 blocks are the last one.
    ranges = [(first, 1.0) for first in range(0, 1024, GROUP)] + [(1024.0, 175 / 255)]
    assert torch.equal(vectors(double)["scale_ranges"], torch.tensor(ranges).flatten())
    assert torch.equal(double.dequantized()[:256], part.own.of(plain.weight)[:256])
