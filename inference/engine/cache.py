"""Keys and values of running sequences, in slots of one fixed size.

The cache is passed to an unmodified Hugging Face model, whose layers store through it; the layouts
define the attention of a pass. A forward pass is one row of tokens of any slots. Dimension names:
S slots, M tokens of a slot, N tokens of a pass, B sequences, G key heads, H query heads, D and E
head sizes.
"""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import Cache, PreTrainedModel

from inference.tensor_parallel import kv_heads_here
from pipeline.kernels.cache_append import append_
from pipeline.kernels.cache_append import kernel_for as append_kernel_for
from pipeline.kernels.decode_attention import (
    Scores,
    decode_attention,
    kernel_for,
    sequence_attention,
)
from pipeline.models.forward.attention import KEY_BLOCK, attend_causally, round_up

FEW = 2
"""Length of a piece up to which the decoding kernel is faster than the sequence kernel."""

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page. With ordinary pages a core translates the address of every 4 KiB it
reads."""


def slot_width(capacity: int) -> int:
    """Tokens that a slot has memory for: `capacity` plus one for padding, rounded up to blocks."""
    return round_up(capacity + 1, KEY_BLOCK)


def slot_bytes(model: PreTrainedModel, capacity: int) -> int:
    """Bytes per slot on this process: keys and values of all layers."""
    settings = model.config.get_text_config()
    heads, all_heads = kv_heads_here(model), settings.num_attention_heads
    heads = heads or getattr(settings, "num_key_value_heads", None) or all_heads
    size = getattr(settings, "head_dim", None) or settings.hidden_size // all_heads
    of_token = 2 * settings.num_hidden_layers * heads * size * model.dtype.itemsize
    return of_token * slot_width(capacity)


class SlotCache(Cache):
    """The keys and values of S sequences; a slot stores its sequence from the first token on."""

    def __init__(self, *, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.width = slot_width(capacity)
        self.spare = self.width - 1
        """Position for the padding of passes: the last one of slot 0."""
        self.keys: list[Float[Tensor, "S G M D"]] = []
        self.values: list[Float[Tensor, "S G M E"]] = []
        self._places: Int[Tensor, " N"] = torch.empty(0, dtype=torch.long)
        self._reads_slots = False
        self._rows: dict[int, Int[Tensor, "N G"]] = {}

    def begin(self, places: Int[Tensor, " N"], *, reads_slots: bool) -> None:
        """Set the cache positions of the next pass's tokens: slot * width + position.

        With `reads_slots` attention is given all slots, else the keys and values of the pass.
        """
        self._places = places
        self._reads_slots = reads_slots
        self._rows.clear()

    def update(
        self,
        key_states: Float[Tensor, "1 G N D"],
        value_states: Float[Tensor, "1 G N E"],
        layer_idx: int,
        *args: object,  # noqa: ARG002
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values; called by the model."""
        if layer_idx == len(self.keys):
            self.keys.append(self._empty(key_states))
            self.values.append(self._empty(value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        new = (key_states[0], value_states[0])
        gpu = append_kernel_for((keys, values), new)
        if gpu is None:
            self._store((keys, values), new)
        else:
            append_((keys, values), new, self._places, gpu=gpu)
        return (keys, values) if self._reads_slots else (key_states, value_states)

    def _store(
        self,
        cache: tuple[Float[Tensor, "S G M D"], Float[Tensor, "S G M E"]],
        new: tuple[Float[Tensor, "G N D"], Float[Tensor, "G N E"]],
    ) -> None:
        """Store keys and values with PyTorch, as the kernel does."""
        num_heads = cache[0].shape[1]
        rows = self._rows.get(num_heads)
        if rows is None:
            # One row of D numbers for each slot, head and token.
            slots, tokens = self._places // self.width, self._places % self.width
            heads = torch.arange(num_heads, device=self._places.device)
            first = (slots[:, None] * num_heads + heads) * self.width
            rows = self._rows[num_heads] = (first + tokens[:, None]).flatten()
        for stored, states in zip(cache, new, strict=True):
            size = stored.shape[-1]
            stored.view(-1, size).index_copy_(0, rows, states.transpose(0, 1).reshape(-1, size))

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        for stored in (*self.keys, *self.values):
            stored[target, :, :length] = stored[source, :, :length]

    @torch.inference_mode()
    def swap(self, slots: tuple[int, int], lengths: tuple[int, int]) -> None:
        """Swap two slots, given their numbers of stored tokens."""
        if 0 in lengths:
            source, target = slots[::-1] if lengths[0] == 0 else slots
            self.copy(source, target, max(lengths))
            return
        (one, other), length = slots, max(lengths)
        for stored in (*self.keys, *self.values):
            before = stored[one, :, :length].clone()
            stored[one, :, :length] = stored[other, :, :length]
            stored[other, :, :length] = before

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return 0: slots have no common length, and positions are passed to the model."""
        return 0

    def _empty(self, states: Float[Tensor, "1 G N D"]) -> Float[Tensor, "S G M D"]:
        # Zeros: uninitialized NaNs would survive the multiplication of masked values by 0.
        return zeros_in_huge_pages(
            states, self.num_slots, states.shape[1], self.width, states.shape[3]
        )


class NextToken:
    """Causal attention of one new token in each of the first B slots.

    More rows than slots are padding; their result is 0, unless there is `out`.
    """

    is_live = False
    """Whether lengths are read on the device only."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        """Number of tokens in each slot, including the new one."""
        self.device = device
        self._masks: dict[int | None, Float[Tensor, "B 1 1 K"]] = {}
        self._ends: Int[Tensor, " B"] | None = None

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "S G M D"],
        value: Float[Tensor, "S G M E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
        out: Float[Tensor, "1 N H E"] | None = None,
    ) -> Float[Tensor, "1 N H E"]:
        """Attention with a kernel if there is one, otherwise with PyTorch; fills `out` if given."""
        del dropout  # unused in generation
        rows = query[0].transpose(0, 1)  # (N, H, D)
        if self.is_live or kernel_for(rows, key, value) is not None:
            count = min(len(rows), len(key))
            if out is None:
                out = rows.new_empty(1, *rows.shape)
                if count < len(rows):
                    out[0, count:] = 0.0
            scores = Scores(
                lengths=self.ends(count),
                scaling=rows.shape[2] ** -0.5 if scaling is None else scaling,
                sliding_window=sliding_window,
            )
            longest = min(max(self.lengths), key.shape[2])
            first = (rows[:count], key[:count], value[:count])
            decode_attention(*first, scores, longest=longest, out=out[0, :count])
            return out
        count, longest = len(self.lengths), round_up(max(self.lengths), KEY_BLOCK)
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._mask(sliding_window, query.dtype)
        attended = F.scaled_dot_product_attention(
            rows[:count].unflatten(1, (key.shape[1], -1)),  # (B, G, H / G, D)
            key[:count, :, :longest],
            value[:count, :, :longest],
            attn_mask=self._masks[sliding_window],
            scale=scaling,
        ).flatten(1, 2)
        result = F.pad(attended, (0, 0, 0, 0, 0, len(rows) - count))[None]
        return result if out is None else out.copy_(result)

    def ends(self, count: int) -> Int[Tensor, " B"]:
        """One past the last key of each of `count` slots; 0 for padding."""
        if self._ends is None or self._ends.shape[0] != count:
            ends = [*self.lengths, *[0] * (count - len(self.lengths))]
            self._ends = torch.tensor(ends, dtype=torch.int32).to(self.device, non_blocking=True)
        return self._ends

    def _mask(self, sliding_window: int | None, dtype: torch.dtype) -> Float[Tensor, "B 1 1 K"]:
        """Minus infinity at the keys that a token must not attend to."""
        ends = torch.tensor(self.lengths, device=self.device)[:, None]
        keys = torch.arange(round_up(max(self.lengths), KEY_BLOCK), device=self.device)
        hidden = (keys >= ends) | (keys < ends - (sliding_window or len(keys)))
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        return mask.masked_fill_(hidden, -math.inf)[:, None, None, :]


class Piece(NamedTuple):
    """Consecutive tokens of a prompt whose beginning is stored in a slot."""

    slot: int
    first: int
    """Position of the first of the tokens."""
    length: int


class Pieces:
    """Causal attention of concatenated pieces of several prompts, each to its own slot."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "S G M D"],
        value: Float[Tensor, "S G M E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
    ) -> Float[Tensor, "1 N H E"]:
        """Attention of each token to the tokens of its own prompt up to itself."""
        del dropout  # unused in generation
        attended = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        begin = 0
        for piece in self._pieces:
            rows = slice(begin, begin + piece.length)
            slot = slice(piece.slot, piece.slot + 1)
            begin = rows.stop
            if piece.length <= FEW and sequence_attention(
                query[0, :, rows].transpose(0, 1),
                key[slot],
                value[slot],
                first=piece.first,
                scaling=query.shape[3] ** -0.5 if scaling is None else scaling,
                sliding_window=sliding_window,
                out=attended[0, rows],
            ):
                continue
            end = piece.first + piece.length
            attended[:, rows] = attend_causally(
                query[:, :, rows],
                key[slot, :, :end],
                value[slot, :, :end],
                scaling=scaling,
                sliding_window=sliding_window,
            ).transpose(1, 2)
        return attended


def zeros_in_huge_pages(like: Tensor, *shape: int) -> Shaped[Tensor, "..."]:
    """Zeros with the dtype and device of `like`, on a CPU in pages of 2 MiB where possible.

    `madvise` is called before the first write, when the system chooses the page size.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    tensor = like.new_empty(shape)
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE - start
        if size > 0:  # only a hint: errors are ignored
            advise = ctypes.CDLL(None).madvise
            advise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor.zero_()
