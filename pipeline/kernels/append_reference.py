"""Storing keys and values of new tokens in a cache of slots: the definition.

Dimension names: S slots, G heads, M tokens of a slot, N new tokens, D and E head sizes.
"""

from jaxtyping import Float, Int
from torch import Tensor


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
