"""Causal attention over sequences laid end to end, for any Hugging Face model.

Registered under the name `ragged` in the attention-function registry of `transformers`: a model's
own layers call it and pass on the keyword `ragged` that the model was called with, which computes.
In training that is `Ragged`: each token sees the earlier tokens of its own sequence and nothing
else. Generation has layouts of its own, which read a cache. Called without the keyword, it is the
library's own scaled-dot-product attention.

Dimension names: N tokens of all sequences, H query heads, G key heads, D and E head sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.config import Kernels
from pipeline.kernels.causal_attention.dispatch import causal_attention
from pipeline.kernels.decode_attention.pieces import whole_pieces

RAGGED = "ragged"

KEY_BLOCK = 32
"""Attention reads keys in multiples of so many, in training as in generation: both then add up a
softmax alike, to the bit, whatever shares the call."""


class LostLayoutError(RuntimeError):
    """A packed batch reached a layer that doesn't hear where its sequences lie."""


MAX_PADDING = 1.3
"""Sequences share one attention call while it computes at most this many times their tokens."""


@runtime_checkable
class Layout(Protocol):
    """Where the tokens of a forward pass lie, and which keys each of them sees."""

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
        """Attention of every token, within `sliding_window` tokens if given."""
        ...


@dataclass(frozen=True)
class Group:
    """Sequences of similar length that share one padded attention call."""

    tokens: Int[Tensor, "B T"]
    """Index of each token in the row; padding repeats the sequence's last token."""

    real: Int[Tensor, " n"]
    """Indices of the real tokens among the B * T."""


class Ragged:
    """How sequences lie in one row, and which of them share an attention call."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, *, kernels: Kernels = "auto"
    ) -> None:
        self.kernels: Kernels = kernels
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self.lengths = tuple(lengths)
        self.device = device
        self.groups = [_group(rows, lengths, device) for rows in similar_lengths(lengths)]
        order = torch.cat([group.tokens.flatten()[group.real] for group in self.groups])
        self.restore = order.argsort()
        """Index that puts the groups' real tokens, one group after the other, back in row order."""
        self.even = len(set(lengths)) == 1 and lengths[0] % KEY_BLOCK == 0
        """Whether the row cut into equal parts is its one group: nothing need be moved."""

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float = 0.0,
    ) -> Float[Tensor, "1 N H E"]:
        """Causal attention of each sequence to itself.

        Padding sits on the right, for the attention alone: under a causal mask no real token sees
        what comes after it, so padding needs no mask. In fp32 there are so many keys that what a
        token sees is added up alike on a CPU, to the bit, whatever comes after it.
        """
        if key.shape[1] != query.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

        outputs: list[Tensor] = []
        for group in self.groups:
            length = group.tokens.shape[1]
            exact = query.dtype == torch.float32 and query.device.type == "cpu"
            more = whole_pieces(length) - length if exact else 0
            keys = torch.cat([group.tokens, group.tokens[:, -1:].expand(-1, more)], dim=1)
            window = window_mask(length, sliding_window, query.device, more=more)
            taken = (
                self._take(query, group.tokens),
                self._take(key, keys),
                self._take(value, keys),
            )
            if window is None and dropout == 0.0:
                attended = causal_attention(*taken, scaling=scaling, kernels=self.kernels)
            else:
                attended = F.scaled_dot_product_attention(
                    *taken,
                    attn_mask=window,
                    is_causal=window is None,
                    dropout_p=dropout,
                    scale=scaling,
                )  # (B, H, T, E)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        if self.even:
            return outputs[0].unsqueeze(0)
        real = [
            output.index_select(0, group.real)
            for output, group in zip(outputs, self.groups, strict=True)
        ]
        return torch.cat(real).index_select(0, self.restore).unsqueeze(0)

    def _take(self, heads: Float[Tensor, "1 H N D"], tokens: Int[Tensor, "B T"]) -> Tensor:
        """The heads of these tokens: (B, H, T, D)."""
        if self.even and tokens.numel() == heads.shape[2]:
            return heads[0].unflatten(1, tokens.shape).transpose(0, 1)
        rows = heads[0].transpose(0, 1).index_select(0, tokens.flatten())  # (B * T, H, D)
        return rows.unflatten(0, tokens.shape).transpose(1, 2)


def similar_lengths(lengths: Sequence[int], max_padding: float = MAX_PADDING) -> list[list[int]]:
    """Cut the sequences, sorted by length, so that padding each part wastes little."""
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    parts: list[list[int]] = []
    tokens = 0
    for row in by_length:
        tokens += lengths[row]
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= max_padding * tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            tokens = lengths[row]
    return parts


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def _group(rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> Group:
    sizes = torch.tensor(lengths)
    first = (sizes.cumsum(0) - sizes)[list(rows), None]  # (B, 1)
    size = sizes[list(rows), None]
    step = torch.arange(round_up(int(size.max()), KEY_BLOCK))[None, :]  # (1, T)
    tokens = first + torch.minimum(step, size - 1)
    return Group(tokens.to(device), (step < size).flatten().nonzero().squeeze(-1).to(device))


def ragged_attention(
    module: nn.Module,
    query: Float[Tensor, "Q H N D"],
    key: Float[Tensor, "S G M D"],
    value: Float[Tensor, "S G M E"],
    attention_mask: Tensor | None,
    *,
    ragged: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Float[Tensor, "Q N H E"], None]:
    """Causal attention, within `sliding_window` tokens if given, as the layout `ragged` has it.

    With a layout, Q is 1.

    Raises:
        LostLayoutError: a mask that stands for a layout came without it.
    """
    if ragged is None:
        _require_mask(module, query, key, attention_mask)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    attended = ragged.attend(
        query,
        key,
        value,
        scaling=scaling,
        sliding_window=sliding_window,
        dropout=dropout if module.training else 0.0,
    )
    return attended, None


def _require_mask(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None
) -> None:
    """Refuse one element for all pairs of tokens: no mask at all, and so no causal one."""
    pairs = query.shape[2] * key.shape[2]
    if attention_mask is not None and pairs > 1 and attention_mask.shape[-2:] == (1, 1):
        raise LostLayoutError(f"{type(module).__name__} does not hand on where sequences lie")


def window_mask(
    length: int, sliding_window: int | None, device: torch.device, *, more: int = 0
) -> Bool[Tensor, "T S"] | None:
    """True where token i sees token j: j <= i < j + sliding_window; None where that is all j.

    `more` is how many keys there are besides those of the tokens, which nobody sees.
    """
    if sliding_window is None or length <= sliding_window:
        return None
    tokens = torch.arange(length, device=device)
    distance = tokens[:, None] - torch.arange(length + more, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)


AttentionInterface.register(RAGGED, ragged_attention)
AttentionMaskInterface.register(RAGGED, sdpa_mask)
