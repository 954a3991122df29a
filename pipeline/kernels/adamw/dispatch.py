"""AdamW over flat vectors: one pass over memory where there is a kernel for it.

Every kernel, and PyTorch on a CPU, gives the bits of the definition. PyTorch on a GPU rounds a
division by a number of the host otherwise, in the last bit.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels import choice
from pipeline.kernels.adamw import cpu, cuda, definition
from pipeline.kernels.adamw.definition import AdamW, Shard, Weights
from pipeline.kernels.build import Built, NotBuiltError
from pipeline.kernels.gpu import Gpu

CHUNK = 65536
"""Elements that PyTorch steps at once: what it makes on the way fits into a core's cache."""


def adamw_(
    weights: Weights, gradient: Float[Tensor, " n"], step: AdamW, *, kernels: Kernels = "auto"
) -> None:
    """One step of AdamW, in place, as `definition.adamw_` defines it.

    All vectors are contiguous, of one length, on one device, and share no memory. The gradient is
    fp32, bf16 or fp16.

    Raises:
        ValueError: they are not; the sentence names the vector.
        KernelError: `kernels` is required, and there is none for them. (With auto PyTorch does the
            work then, with off it always does, on a CPU to the same bits.)
    """
    definition.check(weights, gradient)
    if gradient.numel() == 0:
        return
    found = _find(weights, gradient) if kernels != "off" else NotBuiltError("kernels is off")
    if isinstance(found, Built):
        cpu.run(found, weights, gradient, step, threads=torch.get_num_threads())
        return
    if isinstance(found, Gpu):
        cuda.run(found, weights, gradient, step)
        return
    if kernels != "off":
        choice.settle("AdamW", str(found), kernels)
    _step_in_chunks(weights, gradient, step)


class Launches:
    """Steps of many vectors, on a GPU with one launch for all of a kind.

    Its tables of where the vectors lie are kept from step to step: as long as nothing moves, a step
    sends the GPU four numbers.
    """

    def __init__(self) -> None:
        self._place: object = None
        self._tables: list[cuda.ShardTable] = []

    def step(self, shards: Sequence[Shard], step: AdamW, *, kernels: Kernels) -> None:
        """One step of all, in place; rate and weight decay of each are the shard's.

        The rate of `step` is what each shard's is multiplied by.

        Raises:
            ValueError, KernelError: as `adamw_`.
        """
        place = cuda.place_of(shards)
        if place != self._place:
            self._place, self._tables = None, []
            rest = self._look_for_tables(shards, kernels)
            for shard in rest:
                own = replace(step, lr=shard.lr * step.lr, weight_decay=shard.weight_decay)
                adamw_(shard.weights, shard.gradient, own, kernels=kernels)
            if not rest:
                self._place = place
        for table in self._tables:
            scalars = cuda.scalars_of(step, table.gpu.device)
            cuda.adamw_(table, scalars, betas=step.betas, eps=step.eps)

    def _look_for_tables(self, shards: Sequence[Shard], kernels: Kernels) -> list[Shard]:
        """Make a table of all shards of a kind that a GPU steps; the others are returned."""
        by_kind: dict[tuple[Gpu, cuda.Kind], list[Shard]] = {}
        rest: list[Shard] = []
        for shard in shards:
            found = NotBuiltError("kernels is off")
            if kernels != "off" and shard.gradient.numel():
                found = _find(shard.weights, shard.gradient)
            if isinstance(found, Gpu):
                kind = cuda.kind_of(shard.weights, shard.gradient)
                by_kind.setdefault((found, kind), []).append(shard)
            else:
                rest.append(shard)
        self._tables = [cuda.ShardTable(each, gpu) for (gpu, _), each in by_kind.items()]
        return rest


def prepare(
    device: torch.device,
    *,
    copy: torch.dtype | None,
    split: bool = False,
    moments: torch.dtype = torch.float32,
    kernels: Kernels,
) -> bool:
    """Have the kernel for fp32 gradients on `device` ready before the first step.

    Args:
        device: of the vectors.
        copy: the type of the rounded copy, if there is one.
        split: whether the masters are bf16 weights and 16 bits more.
        moments: the type in which they are kept.
        kernels: off does nothing.

    Returns:
        Whether it is.

    Raises:
        KernelError: it is required and can't be had.
    """
    if kernels == "off":
        return False
    found = find(device, copy=copy, split=split, moments=moments)
    if isinstance(found, NotBuiltError):
        choice.settle("AdamW", str(found), kernels)
        return False
    return True


def find(
    device: torch.device,
    *,
    copy: torch.dtype | None,
    split: bool = False,
    moments: torch.dtype = torch.float32,
) -> Built | Gpu | NotBuiltError:
    """What steps by fp32 gradients on the CPU or a GPU, built if need be, or why nothing does."""
    if device.type == "cuda":
        return _on_gpu(device, (torch.float32, moments, copy, split))
    return cpu.library(cpu.Variant(torch.float32, moments, copy, split))


def _find(weights: Weights, gradient: Tensor) -> Built | Gpu | NotBuiltError:
    device = gradient.device
    if device.type not in ("cpu", "cuda"):
        return NotBuiltError(f"there is none for {device.type}")
    tensors = [gradient, *weights.tensors().values()]
    if any(tensor.data_ptr() % tensor.element_size() for tensor in tensors):
        return NotBuiltError("a vector begins between the places of two elements in memory")
    if device.type == "cuda":
        return _on_gpu(device, cuda.kind_of(weights, gradient))
    return cpu.library(cpu.Variant.of(weights, gradient))


def _on_gpu(device: torch.device, kind: cuda.Kind) -> Gpu | NotBuiltError:
    found = choice.find(device, "adamw", cuda.specialisation(kind), cuda.self_test)
    return NotBuiltError(found) if isinstance(found, str) else found


def _step_in_chunks(weights: Weights, gradient: Tensor, step: AdamW) -> None:
    """The definition, on a CPU in pieces that fit into a core's cache."""
    numel = gradient.numel()
    size = CHUNK if gradient.device.type == "cpu" else numel
    for start in range(0, numel, size):
        piece = slice(start, min(start + size, numel))
        definition.adamw_(weights.part(piece), gradient[piece], step)
