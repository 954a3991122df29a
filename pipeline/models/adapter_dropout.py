"""Dropout of what adapters read, by masks that do not depend on who computes which layer when.

A mask is drawn from the run's seed, the layer's name, and the pass: the process's place in the data
axis, the optimizer step and the micro-batch. So the stages of a pipeline draw the masks that one
process draws, in whatever order they come to their blocks, and a run that goes on in another cut
goes on with them. A block that is run again in the backward pass draws those of its first run.

Processes that compute a layer together draw the mask of all columns, and take their own. So do the
virtual parts that one process computes one after the other (`part_by_part.py`).
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pipeline.parallel.shards import ShardSpec


@dataclass
class _Pass:
    """A forward pass of a micro-batch that learns."""

    number: tuple[int, ...]

    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each layer has been run, for each part: more than once where rows are padded in
    groups."""


_current: ContextVar[_Pass | None] = ContextVar("pass", default=None)
_part: ContextVar[int] = ContextVar("part", default=0)


@contextmanager
def masks_of(*number: int) -> Iterator[None]:
    """Have adapters draw the masks of the pass of that number."""
    token = _current.set(_Pass(number))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def masks_of_part(number: int) -> Iterator[None]:
    """Have adapters take the columns of that one of this process's virtual parts."""
    token = _part.set(number)
    try:
        yield
    finally:
        _part.reset(token)


def masks_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts in which a block runs, and runs again: `context_fn` of PyTorch's `checkpoint`.

    It is called before the block runs.
    """
    now = _current.get()
    if now is None:  # masks are of PyTorch's generator, whose state `checkpoint` brings back
        return nullcontext(), nullcontext()
    return nullcontext(), _as_at(now, Counter(now.calls))


@contextmanager
def _as_at(one: _Pass, calls: Counter[tuple[str, int]]) -> Iterator[None]:
    token = _current.set(replace(one, calls=calls))
    try:
        yield
    finally:
        _current.reset(token)


class AdapterDropout(nn.Module):
    """Dropout of a layer's adapter (Srivastava et al. 2014), scaled by 1 / (1 - p).

    Args:
        probability: of an element to be dropped.
        seed: of the run.
        name: of the layer in the whole model.
    """

    def __init__(self, probability: float, *, seed: int, name: str) -> None:
        super().__init__()
        self.p, self._seed, self._name = probability, seed, name
        self._columns: int | None = None
        self._own: Sequence[ShardSpec] = ()

    def divide(self, columns: int, own: Sequence[ShardSpec]) -> None:
        """Read this process's own of so many columns from now on, of each of its parts."""
        self._columns, self._own = columns, own

    def forward(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B n"]:
        """Some elements 0, the others larger."""
        if not self.training:
            return values
        return values.masked_fill(self._dropped(values), 0.0) * (1 / (1 - self.p))

    def _dropped(self, values: Float[Tensor, "*B n"]) -> Bool[Tensor, "*B n"]:
        """Which elements go."""
        shape = (*values.shape[:-1], self._columns or values.shape[-1])
        mask = torch.empty(shape, dtype=torch.bool, device=values.device)
        mask.bernoulli_(self.p, generator=self._generator(values.device))
        if not self._own:
            return mask
        return replace(self._own[_part.get()], dim=values.ndim - 1).of(mask).contiguous()

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """Where this pass's mask comes from; outside of a pass the device's own."""
        now = _current.get()
        if now is None or device.type == "meta":
            return None
        place = self._name, _part.get()
        calls = now.calls[place]
        now.calls[place] += 1
        text = f"{self._seed} {self._name} {now.number} {calls}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def seed_dropout(model: nn.Module, seed: int) -> None:
    """Have the adapters of a whole model draw their masks by name, from `seed`."""
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        plain = layer.lora_dropout["default"]
        if isinstance(plain, nn.Dropout):
            layer.lora_dropout["default"] = AdapterDropout(plain.p, seed=seed, name=name)
