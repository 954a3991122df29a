"""A check that a family can be trained with its layers sharded, on a small copy of the model.

The copy is run whole and sharded, forward and backward. A family whose code needs whole layers, or
whose plan is wrong, computes another output or gradient, and is refused by name.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.data.batches import TokenBatch
from pipeline.engine.tensor_parts import completed, part_of, role_of
from pipeline.models.attention import KEY_BLOCK, RAGGED, Ragged
from pipeline.models.forward import ragged_inputs
from pipeline.models.packing import how_to_run
from pipeline.models.small_copy import VOCABULARY, small_copy, small_settings
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group

LENGTHS = (7, 5)
"""Lengths of the sequences that the copies are run on."""

CLOSE = 1e-3
"""Relative distance, in fp32; a missing sum makes it about 1."""

NOISE = 1e-6
"""Share of the whole gradient that may be rounding: biases of keys have no other gradient."""


ShardLayers = Callable[..., None]
"""Leaves in a model what this process of a group has of each layer; `divide`, for one."""


def mismatch(
    model: PreTrainedModel, group: Group, shard_layers: ShardLayers, *, sequence: bool
) -> str | None:
    """The reason why a model of this family can't be trained sharded; None if it can.

    All processes of the group call it, and get the same answer.

    Args:
        model: of the family, whole.
        group: the processes that will compute each layer together.
        shard_layers: what is tried.
        sequence: whether hidden states are sharded too.
    """
    settings = small_settings(model.config, heads=2 * group.size)
    settings.name_or_path = ""
    whole, sharded = (small_copy(type(model), settings) for _ in range(2))
    for each in (whole, sharded):
        if how_to_run(model).packed:
            each.set_attn_implementation(RAGGED)
        nn.Module.to(each, device=local_device())
    try:
        shard_layers(sharded, group, sequence=sequence)
        expected, output = _run(whole), _run(sharded)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        for each in (expected, output):
            (each * weights.to(each)).sum().backward()
        reason = _different_gradient(whole, sharded, group)
        if not _close(output.detach(), expected.detach()):
            reason = "they compute something else"
    except Exception as error:  # noqa: BLE001  # whatever its code raises
        words = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        reason = f"their code can't run ({words})"
    reasons = [each for each in group.gather_objects(reason) if each]
    return reasons[0] if reasons else None


def _different_gradient(whole: nn.Module, sharded: nn.Module, group: Group) -> str | None:
    """The first parameter whose gradient, completed over the processes, is not the whole copy's."""
    norms = [param.grad.norm() for param in whole.parameters() if param.grad is not None]
    noise = NOISE * torch.stack(norms).norm()
    names: list[str] = []
    for (name, param), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        if param.grad is None or other.grad is None:
            continue
        own, part = param.grad.flatten(), part_of(param)
        stretch = (param, 0, slice(0, own.numel()))
        found = completed(own, role_of(param), group, [stretch]).view(param.shape)
        if not _close(found, other.grad if part is None else part.own.of(other.grad), noise):
            names.append(name)
    return f"the gradient of {names[0]} is another" if names else None


def _run(model: PreTrainedModel) -> Float[Tensor, "1 N X"]:
    """The last hidden states of a few tokens."""
    is_row = model.config._attn_implementation == RAGGED  # noqa: SLF001
    count = sum(LENGTHS) if is_row else KEY_BLOCK  # as padded rows are multiples of it
    ids = torch.randint(4, VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    if not is_row:
        return model.base_model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]))[0]
    batch = TokenBatch(ids, LENGTHS, ids[:0])
    ragged = Ragged(LENGTHS, ids.device, kernels="off")
    return model.base_model(**ragged_inputs(batch, ragged))[0]


def _close(found: Tensor, expected: Tensor, noise: Tensor | float = 0.0) -> bool:
    return bool((found - expected).norm() <= CLOSE * expected.norm() + noise)
