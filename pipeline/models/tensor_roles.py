"""Of which parameters that all processes have whole each finds a part of the gradient.

Norms of queries and keys are such: a process uses them with its heads alone. A small copy of the
model says which, run whole and divided: whatever a family's code does, each gradient must be that
of the whole copy, alone or summed over the processes. One that is neither is refused by name.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.data.batches import TokenBatch
from pipeline.engine.tensor_parts import completed, part_of
from pipeline.errors import ModelError
from pipeline.models.attention import RAGGED, Ragged
from pipeline.models.forward import ragged_inputs
from pipeline.models.packing import how_to_run
from pipeline.models.small_copy import VOCABULARY, small_copy, small_settings
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group
from pipeline.parallel.sums import tree_sum

LENGTHS = (7, 5)
"""Sequences of the comparison."""

CLOSE = 1e-3
"""Relative distance, in fp32; without a sum it is about 1."""

NOISE = 1e-6
"""What of the whole gradient may be rounding: biases of keys have a gradient of nothing else."""


def partial_parameters(
    model: PreTrainedModel, group: Group, divide: Callable[[PreTrainedModel, Group], None]
) -> frozenset[str]:
    """The names of these parameters; all processes of the group call it.

    Args:
        model: of the family, undivided.
        group: the processes that will compute each layer together.
        divide: leaves in a model what this process has of each layer.

    Raises:
        ModelError: divided, models of the family compute something else.
    """
    settings = small_settings(model.config, heads=2 * group.size)
    settings.name_or_path = ""
    copies = [small_copy(type(model), settings) for _ in range(2)]
    for each in copies:
        nn.Module.to(each, device=local_device())
    if how_to_run(model).packed:
        for each in copies:
            each.set_attn_implementation(RAGGED)
    whole, divided = copies
    divide(divided, group)
    outputs = [_run(each) for each in copies]
    if not _close(outputs[1].detach(), outputs[0].detach()):
        raise ModelError(_unlike(model, "they compute something else"))
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0))
    for output in outputs:
        (output * weights.to(output)).sum().backward()
    return frozenset(_partial(model, group, whole, divided))


def _partial(
    model: PreTrainedModel, group: Group, whole: PreTrainedModel, divided: PreTrainedModel
) -> Iterator[str]:
    same: dict[str, tuple[Tensor, Tensor]] = {}
    gradients = [param.grad for param in whole.parameters() if param.grad is not None]
    noise = NOISE * torch.stack([each.norm() for each in gradients]).norm()
    for (name, param), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
        expected, part = theirs.grad, part_of(param)
        if expected is None or param.grad is None:
            continue
        if part is None:
            same[name] = param.grad, expected
            continue
        own = param.grad.flatten()
        stretch = (param, 0, slice(0, own.numel()))
        found = completed(own, part.role, group, [stretch]).view(param.shape)
        if not _close(found, part.own.of(expected), noise):
            raise ModelError(_unlike(model, f"the gradient of {name} is another"))
    flat = torch.cat([found.flatten() for found, _ in same.values()])
    by_process = [
        each.split([found.numel() for found, _ in same.values()])
        for each in group.gather(flat, what="gradients of a small copy")
    ]
    for (name, (_, expected)), *found in zip(same.items(), *by_process, strict=True):
        if all(_close(each, expected.flatten(), noise) for each in found):
            continue
        if not _close(tree_sum(found), expected.flatten(), noise):
            raise ModelError(_unlike(model, f"the gradient of {name} is another"))
        yield name


def _run(model: PreTrainedModel) -> Float[Tensor, "1 N X"]:
    """What a model says of a few tokens: hidden states, or what a head makes of them."""
    ids = torch.randint(4, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    if model.config._attn_implementation != RAGGED:  # noqa: SLF001
        return model.base_model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]))[0]
    batch = TokenBatch(ids, LENGTHS, ids[:0])
    ragged = Ragged(LENGTHS, ids.device, kernels="off")
    return model.base_model(**ragged_inputs(batch, ragged))[0]


def _close(found: Tensor, expected: Tensor, noise: Tensor | float = 0.0) -> bool:
    return bool((found - expected).norm() <= CLOSE * expected.norm() + noise)


def _unlike(model: PreTrainedModel, reason: str) -> str:
    kind = model.config.model_type
    return (
        f"{kind} models can't be divided among processes that train each layer together: {reason};"
        " set parallel.tp 1"
    )
