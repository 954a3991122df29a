"""Keys and values of running sequences, in slots of one fixed size.

The cache is handed to an unmodified Hugging Face model, whose layers store through it; the layouts
beside it tell the model's attention what to read. A forward pass is one row of tokens, whatever
slots they belong to. Dimension names: S slots, M tokens of a slot, N tokens of a pass, B sequences,
G key heads, H query heads, D and E head sizes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

from inference.tp_group import kv_heads_here
from pipeline.kernels.cache_append.cuda import append_
from pipeline.kernels.cache_append.cuda import kernel_for as append_kernel_for
from pipeline.kernels.decode_attention.definition import Scores
from pipeline.kernels.decode_attention.dispatch import decode_attention, kernel_for, prepare
from pipeline.models.attention import KEY_BLOCK, round_up
from pipeline.models.forward import kv_bytes_per_token, num_key_heads
from pipeline.system.torch_process import zeros_in_huge_pages

CALL = 256
"""Keys that cost as much to read as one more attention call."""


class SlotCache(Cache):
    """The keys and values of S sequences; a slot holds its sequence from the first token on."""

    def __init__(self, *, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.width = round_up(capacity, KEY_BLOCK) + KEY_BLOCK
        """Tokens of a slot; the last KEY_BLOCK of them take what nobody will read."""
        self.keys: list[Float[Tensor, "S G M D"]] = []
        self.values: list[Float[Tensor, "S G M E"]] = []
        self._places: Int[Tensor, " N"] = torch.empty(0, dtype=torch.long)
        self._reads_slots = False
        self._rows: dict[int, Int[Tensor, "N G"]] = {}

    def begin(self, places: Int[Tensor, " N"], *, reads_slots: bool) -> None:
        """Say where the tokens of the next pass go: slot * width + position.

        With `reads_slots` attention is given all slots, else the keys and values of the pass alone.
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
        """What the kernel does, by PyTorch."""
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
        """Give slot `target` the first `length` tokens of slot `source`."""
        for stored in (*self.keys, *self.values):
            stored[target, :, :length] = stored[source, :, :length]

    @torch.inference_mode()
    def swap(self, slots: tuple[int, int], lengths: tuple[int, int]) -> None:
        """Have two slots change places, of which that many first tokens count."""
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
        """No common length: models are given the positions of their tokens."""
        return 0

    def _empty(self, states: Float[Tensor, "1 G N D"]) -> Float[Tensor, "S G M D"]:
        # Zeros, because a masked key still takes part in a product with 0.
        return zeros_in_huge_pages(
            states, self.num_slots, states.shape[1], self.width, states.shape[3]
        )


@dataclass(frozen=True)
class Span:
    """Neighbouring slots that share an attention call."""

    first: int
    last: int
    """One past the last slot."""


def spans(lengths: Sequence[int]) -> list[Span]:
    """Cut slots into neighbours of similar length, so that padding costs less than a call."""
    parts: list[Span] = []
    first, longest, total = 0, 0, 0
    for slot, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        if longest * (slot + 1 - first) - total > CALL * max(1, slot - first):
            parts.append(Span(first, slot))
            first, longest, total = slot, length, length
    return [*parts, Span(first, len(lengths))] if lengths else parts


class NextToken:
    """One token of each of the first B slots, which sees what its slot holds up to itself.

    More tokens than slots are padding; their result is 0.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        """Tokens of each slot, the new one included."""
        self.device = device
        self._parts: Sequence[Span] = ()
        self._reads: dict[int | None, list[tuple[int, int, Tensor | None]]] = {}
        self._ends: Int[Tensor, " B"] | None = None

    @property
    def num_rows(self) -> int:
        """Rows that are no padding."""
        return len(self.lengths)

    @property
    def num_read(self) -> int:
        """How many of the first rows have logits that are read."""
        return len(self.lengths)

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
        """Attention of each token to the live keys of its own slot, into `out` if given.

        By one kernel where there is one; else by a call of PyTorch for each span.
        """
        del dropout  # generation has none
        rows = query[0].transpose(0, 1)  # (N, H, D)
        if kernel_for(rows, key, value) is not None:
            into = None if out is None else out[0]
            return self._by_kernel(rows, key, value, scaling, sliding_window, into)[None]
        if not self._parts:
            self._parts = spans(self.lengths)
        if sliding_window not in self._reads:
            self._reads[sliding_window] = [
                self._read(part, sliding_window, query.dtype) for part in self._parts
            ]
        heads = rows.unflatten(1, (key.shape[1], -1))  # (N, G, H / G, D)
        attended = [
            F.scaled_dot_product_attention(
                heads[part.first : part.last],
                key[part.first : part.last, :, start:stop],
                value[part.first : part.last, :, start:stop],
                attn_mask=bias,
                scale=scaling,
            ).flatten(1, 2)
            for part, (start, stop, bias) in zip(
                self._parts, self._reads[sliding_window], strict=True
            )
        ]
        result = torch.cat(attended) if len(attended) > 1 else attended[0]
        padding = len(rows) - len(result)
        result = (F.pad(result, (0, 0, 0, 0, 0, padding)) if padding else result)[None]
        return result if out is None else out.copy_(result)

    def ends(self, count: int) -> Int[Tensor, " B"]:
        """One past the last key of each of that many slots; of those that nobody reads 0."""
        if self._ends is None or len(self._ends) != count:
            ends = [*self.lengths, *[0] * (count - len(self.lengths))]
            self._ends = torch.tensor(ends, dtype=torch.int32).to(self.device, non_blocking=True)
        return self._ends

    def _by_kernel(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "S G M D"],
        value: Float[Tensor, "S G M D"],
        scaling: float | None,
        sliding_window: int | None,
        out: Float[Tensor, "N H D"] | None,
    ) -> Float[Tensor, "N H D"]:
        return attend_by_kernel(
            query,
            key,
            value,
            self.ends(min(len(query), len(key))),
            scaling=scaling,
            sliding_window=sliding_window,
            longest=max(self.lengths),
            out=out,
        )

    def _read(
        self, part: Span, sliding_window: int | None, dtype: torch.dtype
    ) -> tuple[int, int, Tensor | None]:
        """First key, one past the last, and what keeps each slot to its own keys among them."""
        lengths = self.lengths[part.first : part.last]
        reach = sliding_window or max(lengths)
        block = KEY_BLOCK if dtype.itemsize < torch.float32.itemsize else 1
        start = max(0, min(lengths) - reach) // block * block
        stop = round_up(max(lengths), block)
        if min(lengths) == stop <= start + reach:
            return start, stop, None
        ends = torch.tensor(lengths, device=self.device)[:, None]
        keys = torch.arange(start, stop, device=self.device)
        hidden = (keys >= ends) | (keys < ends - reach)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        return start, stop, bias.masked_fill_(hidden, -math.inf)[:, None, None, :]


def attend_by_kernel(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "S G M D"],
    value: Float[Tensor, "S G M D"],
    ends: Int[Tensor, " K"],
    *,
    scaling: float | None,
    sliding_window: int | None,
    longest: int,
    out: Float[Tensor, "N H D"] | None = None,
) -> Float[Tensor, "N H D"]:
    """Attention of each row to the keys of the slot of its number, before the end of its own.

    There may be more rows than slots: padding, which sees nothing, and is 0 if `out` is not given.
    """
    count = min(len(query), len(key))
    if out is None:
        out = query.new_empty(query.shape)
        if count < len(query):
            out[count:].zero_()
    decode_attention(
        query[:count],
        key[:count],
        value[:count],
        Scores(
            lengths=ends[:count],
            scaling=query.shape[2] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
        ),
        longest=longest,
        out=out[:count],
    )
    return out


def prepare_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "S G M D"],
    value: Float[Tensor, "S G M D"],
    out: Float[Tensor, "1 N H D"],
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> Callable[[NextToken], None] | None:
    """What `NextToken.attend` does, ready to be repeated on this memory by the CPU's kernel.

    None where there is no such kernel for these.
    """
    rows = query[0].transpose(0, 1)
    count = min(len(rows), len(key))
    call = prepare(
        rows[:count],
        key[:count],
        value[:count],
        out[0, :count],
        scaling=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
    )
    return None if call is None else lambda layout: call(layout.ends(count))


def bytes_per_token(model: PreTrainedModel) -> int:
    """Memory of one token's keys and values in all layers, as far as this process has them."""
    return kv_bytes_per_token(model, key_heads=kv_heads_here(model) or num_key_heads(model))
