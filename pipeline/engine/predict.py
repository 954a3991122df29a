"""The bytes of each process that training a model takes, counted before any is allocated.

The layout is the engine's own: its units, its kinds of weights, its padding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from pipeline.config import OptimConfig, TrainedModelConfig
from pipeline.engine.flat import ParamSettings, Placement, lay_out, padded_size
from pipeline.engine.gradients import PIECE
from pipeline.engine.masters import BYTES as MASTER_BYTES
from pipeline.engine.masters import MOMENTS, build_optimizer, kind_of_masters
from pipeline.engine.setup import placement_of, vectors_of
from pipeline.engine.units import Kind, UnitParams, engine_units
from pipeline.kernels.adamw.definition import BLOCK
from pipeline.parallel.device import local_device

HELD = ("weights", "masters", "moments")
"""Kinds of memory that are held between steps."""

IN_FLIGHT = ("gradients", "gradient_buffers", "gathered")
"""Kinds of memory that come and go within a step; their bytes are the peak."""

KINDS = (*HELD, *IN_FLIGHT)


@dataclass(frozen=True)
class Vector:
    """A flat vector of the engine."""

    settings: ParamSettings

    numel: int
    """With its padding."""

    tied: bool
    """Whether the model has one of its weights in several places."""

    kind: Kind = "block"
    """Kind of the unit that it belongs to."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole vector, as the model has its weights."""
        return self.numel * self.settings.dtype.itemsize


Unit = Sequence[Vector]
"""The vectors of a unit, one for each kind of weights."""


@dataclass(eq=False)
class _Buffer:
    """A gradient buffer of the engine's pool."""

    numel: int

    used: int = 0
    """Bytes that have been written."""

    read: bool = True
    """Whether the other processes are done with it."""


def predict(
    model: nn.Module,
    config: TrainedModelConfig,
    *,
    world: int,
    replicas: int = 1,
    device: torch.device | None = None,
    micro_batches: int = 1,
) -> dict[str, int]:
    """Bytes that the engine holds on each process, by kind; activations come on top.

    Args:
        model: with its adapters, frozen where it is to be; it may be on the meta device.
        config: its settings.
        world: processes that share it.
        replicas: copies of it, each shared by so many processes.
        device: where it computes; by default this process's.
        micro_batches: of one process in an optimizer step.

    Returns:
        `weights`: as the model has them, at stage 3 the own piece; `masters`: fp32 copies of
        trained weights that are below fp32 or live elsewhere, from stage 1 the own piece, or the 16
        bits that bf16 weights lack of them (a GPU is taken to have the kernel for that);
        `moments`: the optimizer's state after its first step; `gradients`: the own piece of their
        fp32 sum over micro-batches, at every stage, for each micro-batch is reduced as it is found,
        and in the deterministic mode all partial sums, from the first backward pass to the step;
        `gradient_buffers`: gradients of whole units, the root's all through a backward pass and
        two others', of which one is being reduced, or of three blocks where processes of one
        machine may be a block apart; in fp32, but there in the weights' own type for a vector none
        of whose weights is tied (a pass that uses a weight twice otherwise takes fp32 as well), and
        the pieces that are summed over copies of the model; `gathered`: at stage 3, the whole
        weights of the root, of the unit at work and of those gathered ahead, or all of them to
        generate.
    """
    placement = placement_of(config, local_device() if device is None else device)
    units = unit_vectors(model, config, world=world)
    vectors = [vector for unit in units for vector in unit]
    trained = [vector for vector in vectors if vector.settings.trained]
    in_weights = world if placement.shard_params else 1
    in_optimizer = world if placement.shard_optimizer else 1
    updated = sum(vector.numel for vector in trained) // in_optimizer
    masters = sum(vector.numel * _master_bytes(vector, config, placement) for vector in trained)
    # As many partial sums as a binary counter has digits set at most.
    sums = (micro_batches + 1).bit_length() - 1 if placement.deterministic else 1
    return {
        "weights": sum(vector.num_bytes for vector in vectors) // in_weights,
        "masters": masters // in_optimizer,
        "gradients": 4 * sums * sum(vector.numel for vector in trained) // world,
        "moments": int(updated * moment_bytes(config.optim)),
        "gradient_buffers": _gradient_buffers(units, config, placement, world, micro_batches)
        + _pieces_of_copies(units, config, placement, world, replicas),
        "gathered": _gathered(units, config, placement, world),
    }


def unit_vectors(model: nn.Module, config: TrainedModelConfig, *, world: int) -> list[Unit]:
    """The flat vectors of each unit, the root's last."""
    places = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    return [
        _vectors(unit, config, world, places)
        for unit in engine_units(model, config.zero.unit_classes)
    ]


def offloaded(config: TrainedModelConfig, device: torch.device) -> dict[str, str]:
    """The place, "cpu" or "nvme", of each kind that doesn't lie on `device`."""
    offload = config.zero.offload
    places = {
        "weights": offload.params,
        "masters": offload.optimizer,
        "gradients": offload.gradients,
        "moments": offload.optimizer,
    }
    return {kind: place for kind, place in places.items() if place not in ("none", device.type)}


def streamed(model: nn.Module, config: TrainedModelConfig, *, world: int) -> int:
    """Bytes of main memory through which what lies on a disk comes and goes, on each process.

    Two sets of masters and moments of the largest vector, and for each size of a piece of the
    weights as many buffers as the engine makes.
    """
    if "nvme" not in (config.zero.offload.optimizer, config.zero.offload.params):
        return 0
    vectors = [vector for unit in unit_vectors(model, config, world=world) for vector in unit]
    num_bytes = 0
    if config.zero.offload.optimizer == "nvme":
        in_optimizer = world if config.zero_stage >= 1 else 1
        trained = [vector.numel for vector in vectors if vector.settings.trained]
        largest = max(trained, default=0)
        num_bytes += 2 * int((4 + moment_bytes(config.optim)) * (largest // in_optimizer))
    if config.zero.offload.params == "nvme":
        pieces = Counter((vector.numel // world, vector.settings.dtype) for vector in vectors)
        num_bytes += sum(
            min(count + 1, 3) * numel * dtype.itemsize for (numel, dtype), count in pieces.items()
        )
    return num_bytes


def moment_bytes(optim: OptimConfig) -> Fraction:
    """Bytes that the optimizer keeps for each weight from step to step."""
    if optim.moments == "fp32":
        return Fraction(4 * state_vectors(optim))
    exponents = Fraction(optim.moments == "8bit", BLOCK)
    return 2 * (MOMENTS[optim.moments].itemsize + exponents)


def state_vectors(optim: OptimConfig) -> int:
    """Vectors of the weights' size that the optimizer keeps from step to step: 2 for Adam's kind.

    Found by one step of the optimizer itself on two numbers.
    """
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    settings = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    optimizer = build_optimizer([{"params": [weight], **settings}], optim)
    optimizer.step()
    state = optimizer.state[weight].values()
    return sum(isinstance(value, Tensor) and value.numel() == 2 for value in state)


def _vectors(
    unit: UnitParams, config: TrainedModelConfig, world: int, places: Counter[int]
) -> Unit:
    return [
        Vector(
            settings,
            padded_size(
                lay_out(params, decays=settings.weight_decay > 0, block=settings.block).used,
                world,
                block=settings.block,
            ),
            tied=any(places[id(param)] > 1 for param in params.values()),
            kind=unit.kind,
        )
        for (_, settings), params in vectors_of(unit, config).items()
    ]


def _master_bytes(vector: Vector, config: TrainedModelConfig, placement: Placement) -> int:
    """Bytes of a master, beside its weight."""
    kind = kind_of_masters(vector.settings.dtype, placement, config.optim)
    return MASTER_BYTES[kind]


def _gradient_buffers(
    units: Sequence[Unit],
    config: TrainedModelConfig,
    placement: Placement,
    world: int,
    micro_batches: int,
) -> int:
    """The buffers of one backward pass; they are kept and used again."""
    computes_sums = placement.gradient_device == placement.device and not placement.deterministic
    if world == 1 and micro_batches == 1 and computes_sums:
        return 0  # autograd writes into the sums themselves
    trained = [[vector for vector in unit if vector.settings.trained] for unit in units]
    through_group = through_a_group(config, placement.device, world)
    apart = False
    narrow = False
    num_bytes = sum(each.used for each in _buffers_of_pass(trained, narrow=narrow, apart=apart))
    if placement.offloads_gradients and placement.device.type == "cuda" and micro_batches > 1:
        # A sum in main memory comes to the GPU to be added to, a piece at a time.
        sums = (vector.numel // world for unit in trained for vector in unit)
        num_bytes += 4 * min(PIECE, max(sums, default=0))
    # gloo, and NCCL where the order of addition is fixed, receive pieces beside those they send.
    on_cpu = placement.device.type == "cpu"
    exchanges = through_group and (on_cpu or placement.deterministic)
    return 2 * num_bytes if exchanges else num_bytes


def _pieces_of_copies(
    units: Sequence[Unit],
    config: TrainedModelConfig,
    placement: Placement,
    world: int,
    replicas: int,
) -> int:
    """The buffers in which copies sum a process's pieces, one vector after the other."""
    if replicas == 1:
        return 0
    *blocks, root = [[each for each in unit if each.settings.trained] for unit in units]
    pieces = [padded_piece(each, world, replicas) for each in chain(*reversed(blocks), root)]
    if through_a_group(config, placement.device, replicas):  # which receives beside what it sends
        return 4 * (sum(set(pieces)) + max(pieces))
    # In the memory of one machine another may still read the piece before, if it is as long.
    twice = {piece for piece, other in pairwise(pieces) if piece == other}
    return 4 * (sum(set(pieces)) + sum(twice))


def padded_piece(vector: Vector, world: int, replicas: int) -> int:
    """Elements of a process's piece of a vector, as copies of the model cut it among them."""
    return -(-vector.numel // world // replicas) * replicas


def gradient_bytes(vector: Vector, *, narrow: bool) -> int:
    """Bytes of a vector's gradients on their way, where they may or may not be of its own type."""
    itemsize = vector.settings.dtype.itemsize if narrow and not vector.tied else 4
    return min(itemsize, 4) * vector.numel


def _buffers_of_pass(units: Sequence[Unit], *, narrow: bool, apart: bool) -> list[_Buffer]:
    """Go through a backward pass as the engine's pool does.

    Args:
        units: their trained vectors, the root's last.
        narrow: whether buffers may be of the weights' own type.
        apart: whether a buffer has been read only when all have come to the next reduction.
    """
    *others, root = units
    made = [_Buffer(each.numel, gradient_bytes(each, narrow=narrow)) for each in root]
    free: list[_Buffer] = []
    reducing: list[_Buffer] = []
    for unit in reversed(others):
        borrowed: list[_Buffer] = []
        for vector in unit:
            same = [each for each in free if each.numel == vector.numel]
            at_most = 2 + narrow if vector.kind == "block" else 1
            enough = sum(each.numel == vector.numel for each in made) >= at_most
            if same and enough and not any(each.read for each in same):
                for each in free:  # rather than make more, the processes wait for each other
                    each.read = True
            buffer = next((each for each in same if each.read), None)
            if buffer is None:
                buffer = _Buffer(vector.numel)
                made.append(buffer)
            else:
                free.remove(buffer)
            buffer.used = max(buffer.used, gradient_bytes(vector, narrow=narrow))
            borrowed.append(buffer)
        if reducing:
            for each in free:
                each.read = True
        for each in reducing:
            each.read = not apart
            free.append(each)
        reducing = borrowed
    return made


def _gathered(
    units: Sequence[Unit], config: TrainedModelConfig, placement: Placement, world: int
) -> int:
    if not placement.shard_params:
        return 0
    *others, root = (sum(vector.num_bytes for vector in unit) for unit in units)
    overlaps = through_a_group(config, placement.device, world)
    at_once = 1 + (config.zero.prefetch_units if overlaps else 0)
    windows = (sum(others[first : first + at_once]) for first in range(len(others)))
    return root + max(windows, default=0)


def through_a_group(config: TrainedModelConfig, device: torch.device, world: int) -> bool:
    """Whether collectives run beside the computation, not through one machine's own memory."""
    return world > 1 and not (device.type == "cpu" and config.zero.shared_memory)
