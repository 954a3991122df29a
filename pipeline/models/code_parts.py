"""Which codes and scales a process has of a weight that several processes compute with.

A weight is quantized whole and cut then, so that processes together have the numbers of one. Codes
are cut as the weight is. A process has the scales of all blocks in which it has weights, so that
two have that of a block which the cut parts; and all ranges, one for a group of 16,384 weights.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from pipeline.engine.tensor_parts import Part
from pipeline.errors import ConfigError
from pipeline.models.block_codes import (
    BLOCK,
    GROUP,
    Form,
    Packed,
    parts_of,
    scaled,
    scales_of,
)
from pipeline.parallel.shards import Shard, ShardSpec


@dataclass(frozen=True)
class CodePart:
    """A part of a weight, in codes.

    Raises:
        ConfigError: `name`, the weight, can't be cut so.
    """

    part: Part
    """The part of the weight that this process has."""

    form: Form
    name: str

    def __post_init__(self) -> None:
        if self.part.whole.numel() % BLOCK:
            raise self._refused(f"whose last block of {BLOCK} is not full", "take quantize none")
        if self.run % parts_of(self.form)["codes"].grain:
            raise self._refused(
                "between two weights that share a byte", "take int8, or another parallel.tp"
            )

    def _refused(self, reason: str, fix: str) -> ConfigError:
        shape = " x ".join(map(str, self.part.whole))
        return ConfigError(
            f"parallel.tp {len(self.part.specs)} would cut the {self.form.codes} codes of"
            f" {self.name} ({shape}) {reason}; {fix}"
        )

    @property
    def shape(self) -> torch.Size:
        """Of the part."""
        return self.part.own.shape(self.part.whole)

    @property
    def run(self) -> int:
        """Weights that lie in one block, and follow each other in every process's part."""
        inner, dim = self.part.inner, self.part.own.dim
        shards = [shard for spec in self.part.specs for shard in spec.shards]
        borders = [inner * border for each in shards for border in (each.start, each.stop)]
        return math.gcd(BLOCK, inner * self.part.whole[dim], *borders)

    def of(self, vector: str) -> Part | None:
        """What a process has of a vector; None is all of it."""
        stored = parts_of(self.form)[vector]
        if stored.grain > BLOCK:
            return None
        found = self._scales if stored.grain == BLOCK else self.part.in_blocks(stored.grain)
        if found is None:
            return None
        numel = stored.numel(self.part.whole.numel())
        return replace(found, stored=torch.Size((numel,)))

    @cached_property
    def _scales(self) -> Part | None:
        """What a process has of scales: those of all blocks in which it has weights.

        None where that is left at all of them: blocks are parts of several rows, or of several
        stretches of a process.
        """
        whole = self.part.in_blocks(BLOCK)
        if whole is not None:
            return whole
        rows, inner = self.part.whole[: self.part.own.dim].numel(), self.part.inner
        stride = self.part.whole[self.part.own.dim] * inner
        shards = [shard for spec in self.part.specs for shard in spec.shards]
        is_plain = len(shards) == len(self.part.specs) and all(each.copies == 1 for each in shards)
        if not is_plain or (rows > 1 and stride % BLOCK):
            return None
        specs, held = list[ShardSpec](), 0
        for each in shards:
            first, last = each.start * inner // BLOCK, -(-each.stop * inner // BLOCK)
            own = [Shard(max(first, held), last)]
            if first < held:  # the process before has weights of that block too
                own.insert(0, Shard(first, held, counts=False))
            specs.append(ShardSpec(1, tuple(shard for shard in own if shard.size)))
            held = last
        return Part(torch.Size((rows, stride // BLOCK)), tuple(specs), self.part.rank)

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The part of the weight that `packed` stands for, to the bits of the whole one's."""
        codes, own = packed["codes"], self._scales
        groups = None
        if self.form.double and own is not None:
            groups = _numbers(own, codes.device).view(-1) // GROUP
        scales = scales_of(packed, self.form, groups)
        if self.run < BLOCK:
            scales = scales[self._places(codes.device)]
        return scaled(codes, scales, self.shape, self.form, dtype)

    def _places(self, device: torch.device) -> Int64[Tensor, " n"]:
        """Of each run of the part, where the scale of its block is among those that are here."""
        in_runs = self.part.in_blocks(self.run)
        assert in_runs is not None
        blocks = _numbers(in_runs, device) // (BLOCK // self.run)
        if self._scales is None:
            return blocks.view(-1)
        (first, *_), (rows, stride) = self._scales.own.shards, self._scales.whole
        row = torch.arange(rows, device=device)[:, None]
        width = self._scales.own.shape(self._scales.whole)[1]
        return (blocks - row * stride - first.start + row * width).view(-1)


def _numbers(part: Part, device: torch.device) -> Int64[Tensor, "rows n"]:
    """Those that the elements of a part have in the whole."""
    rows, stride = part.whole
    own = [torch.arange(each.start, each.stop, device=device) for each in part.own.shards]
    return torch.arange(rows, device=device)[:, None] * stride + torch.cat(own)
