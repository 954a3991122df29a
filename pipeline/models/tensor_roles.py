"""Of which parameters that all processes have whole each finds a part of the gradient.

Norms of queries and keys are such: a process uses them with its heads alone. A small copy of the
model says which, run whole and divided: whatever a family's code does, each gradient must be that
of the whole copy, alone or summed over the processes. One that is neither is refused by name.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.data.batches import TokenBatch
from pipeline.engine.tensor_parts import completed, part_of
from pipeline.errors import ModelError
from pipeline.models.attention import KEY_BLOCK, RAGGED, Ragged
from pipeline.models.forward import ragged_inputs
from pipeline.models.packing import how_to_run
from pipeline.models.small_copy import VOCABULARY, small_copy, small_settings
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group, rehearsed
from pipeline.parallel.sums import tree_sum

LENGTHS = (7, 5)
"""Lengths of the sequences on which a divided copy is compared with a whole one."""

CLOSE = 1e-3
"""Relative distance, in fp32; without a sum it is about 1."""

NOISE = 1e-6
"""What of the whole gradient may be rounding: biases of keys have a gradient of nothing else."""


@runtime_checkable
class Divide(Protocol):
    """Leaves in a model what this process of a group has of each layer."""

    def __call__(self, model: PreTrainedModel, group: Group, /, *, sequence: bool) -> None:
        """With `sequence`, of hidden states between layers too."""
        ...


def partial_parameters(
    model: PreTrainedModel,
    group: Group,
    divide: Divide,
    *,
    sequence: bool,
) -> frozenset[str]:
    """The names of these parameters; all processes of the group call it.

    Args:
        model: of the family, undivided.
        group: the processes that will compute each layer together.
        divide: what is tried.
        sequence: whether hidden states are shared out too.

    Raises:
        ModelError: divided, the code of the family can't run, or computes something else.
    """
    fix = "set parallel.sequence false" if sequence else "set parallel.tp 1"
    refused = (
        f"{model.config.model_type} models can't be divided among processes that train each layer"
        " together: {reason}; " + fix
    )
    error = why_not_run(model, group.size, divide, sequence=sequence)
    if error is not None:
        raise ModelError(refused.format(reason=f"their code can't run ({error})"))
    trial = _trial(model, group.size, divide, sequence=sequence)
    whole, divided = trial.copy(), trial.copy()
    for each in (whole, divided):
        nn.Module.to(each, device=local_device())
    divide(divided, group, sequence=sequence)
    outputs = [_run(each) for each in (whole, divided)]
    unlike = _Unlike()
    if not _close(outputs[1].detach(), outputs[0].detach()):
        unlike.add("they compute something else")
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0))
    for output in outputs:
        (output * weights.to(output)).sum().backward()
    names = frozenset(_partial(group, whole, divided, unlike))
    # What one process finds, all must know: they go on together, or not at all.
    reasons = [each for each in group.gather_objects(unlike.first) if each]
    if reasons:
        raise ModelError(refused.format(reason=reasons[0]))
    return names


def why_not_run(
    model: PreTrainedModel,
    size: int,
    divide: Divide,
    *,
    sequence: bool,
) -> str | None:
    """The error in which the code of a small copy ends, divided among so many; None if it doesn't.

    It is tried on this process alone, for its shapes: what it computes is another question.
    """
    return _tried(_trial(model, size, divide, sequence=sequence))


@dataclass(frozen=True)
class _Trial:
    """Models of which one answer holds for all."""

    kind: type[PreTrainedModel]
    text: str
    packed: bool
    size: int
    sequence: bool
    settings: PreTrainedConfig = field(compare=False)
    divide: Divide = field(compare=False)

    def copy(self) -> PreTrainedModel:
        """A small model, the same at each call."""
        copy = small_copy(self.kind, self.settings)
        if self.packed:
            copy.set_attn_implementation(RAGGED)
        return copy


def _trial(model: PreTrainedModel, size: int, divide: Divide, *, sequence: bool) -> _Trial:
    settings = small_settings(model.config, heads=2 * size)
    settings.name_or_path = ""
    text = settings.to_json_string(use_diff=False)
    packed = how_to_run(model).packed
    return _Trial(type(model), text, packed, size, sequence, settings, divide)


@functools.cache
def _tried(trial: _Trial) -> str | None:
    try:
        copy = trial.copy()
        trial.divide(copy, rehearsed(trial.size), sequence=trial.sequence)
        _run(copy)
    except Exception as error:  # noqa: BLE001  # whatever its code raises
        return " ".join(f"{type(error).__name__}: {error}".split())[:100]
    return None


@dataclass
class _Unlike:
    """What was found to be other than in the whole copy."""

    first: str = ""

    def add(self, reason: str) -> None:
        """Note it, unless something was before."""
        self.first = self.first or reason


def _partial(
    group: Group, whole: PreTrainedModel, divided: PreTrainedModel, unlike: _Unlike
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
            unlike.add(f"the gradient of {name} is another")
    if not same:
        return
    flat = torch.cat([found.flatten() for found, _ in same.values()])
    by_process = [
        each.split([found.numel() for found, _ in same.values()])
        for each in group.gather(flat, what="gradients of a small copy")
    ]
    for (name, (_, expected)), *found in zip(same.items(), *by_process, strict=True):
        if all(_close(each, expected.flatten(), noise) for each in found):
            continue
        if not _close(tree_sum(found), expected.flatten(), noise):
            unlike.add(f"the gradient of {name} is another")
        yield name


def _run(model: PreTrainedModel) -> Float[Tensor, "1 N X"]:
    """What a model says of a few tokens: hidden states, or what a head makes of them."""
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
