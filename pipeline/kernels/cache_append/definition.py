"""Storing keys and values of new tokens in a cache of slots: the definition.

Dimension names: S slots, G heads, M tokens of a slot, N new tokens, D and E head sizes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def check(
    cache: tuple[Tensor, Tensor], states: tuple[Tensor, Tensor], places: Int[Tensor, " N"]
) -> None:
    """Raise unless the tensors fit one another.

    Raises:
        ValueError: one sentence, which names the tensor.
    """
    keys = cache[0]
    if places.ndim != 1 or places.dtype != torch.int64 or not places.is_contiguous():
        raise ValueError(
            f"places must be int64, side by side, and are {places.dtype} of shape"
            f" {tuple(places.shape)} and stride {places.stride()}"
        )
    for name, stored, new in zip(("keys", "values"), cache, states, strict=True):
        if stored.ndim != 4 or stored.shape[:3] != keys.shape[:3] or 0 in stored.shape:
            raise ValueError(
                f"a cache holds keys and values of (slots, heads, tokens, size), none of them 0,"
                f" and its {name} have shape {tuple(stored.shape)} beside {tuple(keys.shape)}"
            )
        expected = (stored.shape[1], len(places), stored.shape[3])
        if tuple(new.shape) != expected:
            raise ValueError(f"new {name} must have shape {expected}, not {tuple(new.shape)}")
        for other in (new, places):
            if other.device != stored.device:
                raise ValueError(
                    f"the cache is on {stored.device}, new {name} or places on {other.device}"
                )
        if new.dtype != stored.dtype:
            raise ValueError(f"the cache has {name} of {stored.dtype}, new ones are {new.dtype}")


def append_(
    cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
    states: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
    places: Int[Tensor, " N"],
) -> None:
    """Store the keys and values of each token at its place, slot * M + position, in place.

    A token whose place is in no slot is left out. Of several with the same place any may stay.
    """
    num_slots, _, width, _ = cache[0].shape
    real = (places >= 0) & (places < num_slots * width)
    slots, positions = places[real] // width, places[real] % width
    for stored, new in zip(cache, states, strict=True):
        stored[slots, :, positions] = new.transpose(0, 1)[real]
