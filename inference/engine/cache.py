"""Keys and values of running sequences, in pages that sequences share (Kwon et al. 2023).

The cache is passed to an unmodified Hugging Face model, whose layers store keys and values in it.
A pass is one row of tokens from any sequences; its layout computes attention. Dimension names: P
pages, T tokens of a page, N tokens of a pass, B sequences, L pages of a sequence, G key/value
heads, H query heads, D and E head sizes.
"""

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import Cache, PreTrainedModel

from inference.tensor_parallel import get_local_kv_heads
from pipeline.kernels.cache_append import append_
from pipeline.kernels.cache_append import find_kernel as append_kernel_for
from pipeline.kernels.decode_attention import (
    PAGE,
    AttentionSpec,
    decode_attention,
    find_kernel,
    gather_pages,
)
from pipeline.models.forward.attention import attend_without_grad

PADDING_INDEX = 0
"""Cache index for the padding of passes, on a page that no sequence uses."""


def count_pages(tokens: int) -> int:
    """Return the number of pages that hold this number of tokens."""
    return -(-tokens // PAGE)


def page_bytes(model: PreTrainedModel) -> int:
    """Return the size in bytes of a page on this process: keys and values of all layers."""
    config = model.config.get_text_config()
    heads, all_heads = get_local_kv_heads(model), config.num_attention_heads
    heads = heads or getattr(config, "num_key_value_heads", None) or all_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // all_heads
    return 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize * PAGE


class PagedCache(Cache):
    """Keys and values in `num_pages` pages; the first page is for padding."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(layers=[])
        self.num_pages = num_pages
        self.keys: list[Float[Tensor, "P G T D"]] = []
        self.values: list[Float[Tensor, "P G T E"]] = []
        self._indices: Int[Tensor, " N"] = torch.empty(0, dtype=torch.long)
        self._reads_pages = False
        self._rows: dict[int, Int[Tensor, " R"]] = {}

    def begin(self, indices: Int[Tensor, " N"], *, reads_pages: bool) -> None:
        """Set the cache indices of the next pass's tokens: page * PAGE + offset within the page.

        With `reads_pages`, attention reads all pages; otherwise only this pass's keys and values.
        """
        self._indices = indices
        self._reads_pages = reads_pages
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
            for stored, new in ((self.keys, key_states), (self.values, value_states)):
                stored.append(new_zeros(new, self.num_pages, new.shape[1], PAGE, new.shape[3]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        states = (key_states[0], value_states[0])
        gpu = append_kernel_for((keys, values), states)
        if gpu is not None:
            append_((keys, values), states, self._indices, gpu=gpu)
        else:
            rows = self._select_rows(keys.shape[1])
            for stored, new in zip((keys, values), states, strict=True):
                size = stored.shape[-1]
                stored.view(-1, size).index_copy_(0, rows, new.transpose(0, 1).reshape(-1, size))
        return (keys, values) if self._reads_pages else (key_states, value_states)

    def _select_rows(self, num_heads: int) -> Int[Tensor, " R"]:
        """Return the indices of the pass's R = N * G rows in a cache viewed as [P * G * T, D]."""
        if num_heads not in self._rows:
            pages, tokens = self._indices // PAGE, self._indices % PAGE
            heads = torch.arange(num_heads, device=self._indices.device)
            first = (pages[:, None] * num_heads + heads) * PAGE
            self._rows[num_heads] = (first + tokens[:, None]).flatten()
        return self._rows[num_heads]

    @torch.inference_mode()
    def copy(self, sources: Mapping[int, int]) -> None:
        """Copy pages; `sources` maps targets to sources, which are all read before any write."""
        if not sources:
            return
        for stored in (*self.keys, *self.values):
            stored[[*sources]] = stored[[*sources.values()]]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return 0: sequences have no common length, and positions are passed to the model."""
        return 0


class DecodeAttention:
    """Causal attention for one new token in each of B sequences.

    Rows of a pass beyond B are padding; their result is 0.
    """

    is_on_device = False
    """Whether only the device reads the lengths and pages."""

    def __init__(
        self, lengths: Sequence[int], pages: Int[np.ndarray, "B L"], device: torch.device
    ) -> None:
        self.lengths = lengths
        """Number of tokens of each sequence, including the new one."""
        self.pages = pages
        """int32 pages of each sequence, in order; entries beyond its last page are arbitrary."""
        self.device = device
        self._masks: dict[int | None, Float[Tensor, "B 1 1 K"]] = {}
        self._device_tables: tuple[Int[Tensor, " N"], Int[Tensor, "N L"]] | None = None

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "P G T D"],
        value: Float[Tensor, "P G T E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
        out: Float[Tensor, "1 N H E"] | None = None,
    ) -> Float[Tensor, "1 N H E"]:
        """Compute attention, with a kernel if there is one, and write it to `out` if given."""
        del dropout  # unused in generation
        rows = query[0].transpose(0, 1)  # (N, H, D)
        if self.is_on_device or find_kernel(rows, key, value) is not None:
            lengths, pages = self.device_tables(len(rows))
            spec = AttentionSpec(
                lengths=lengths,
                pages=pages,
                scaling=rows.shape[2] ** -0.5 if scaling is None else scaling,
                sliding_window=sliding_window,
            )
            out = rows.new_empty(1, *rows.shape) if out is None else out
            decode_attention(rows, key, value, spec, longest=max(self.lengths), out=out[0])
            return out
        count, pages = len(self.lengths), torch.from_numpy(self.pages).to(self.device)
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._mask(sliding_window, query.dtype)
        attended = F.scaled_dot_product_attention(
            rows[:count].unflatten(1, (key.shape[1], -1)),  # (B, G, H / G, D)
            gather_pages(key, pages),
            gather_pages(value, pages),
            attn_mask=self._masks[sliding_window],
            scale=scaling,
        ).flatten(1, 2)
        result = F.pad(attended, (0, 0, 0, 0, 0, len(rows) - count))[None]
        return result if out is None else out.copy_(result)

    def device_tables(self, count: int) -> tuple[Int[Tensor, " N"], Int[Tensor, "N L"]]:
        """Return int32 lengths and pages of `count` rows on the device; padding has length 0."""
        if self._device_tables is None or len(self._device_tables[0]) != count:
            padding = count - len(self.lengths)
            lengths = torch.tensor([*self.lengths, *[0] * padding], dtype=torch.int32)
            pages = torch.from_numpy(np.pad(self.pages, ((0, padding), (0, 0))))
            self._device_tables = lengths.to(self.device), pages.to(self.device)
        return self._device_tables

    def _mask(self, sliding_window: int | None, dtype: torch.dtype) -> Float[Tensor, "B 1 1 K"]:
        """Return a mask with minus infinity at the keys that a token must not attend to."""
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        keys = torch.arange(self.pages.shape[1] * PAGE, device=self.device)
        masked = (keys >= lengths) | (keys < lengths - (sliding_window or len(keys)))
        mask = torch.zeros(masked.shape, dtype=dtype, device=self.device)
        return mask.masked_fill_(masked, -math.inf)[:, None, None, :]


class Chunk(NamedTuple):
    """Consecutive tokens of a prompt; the preceding ones are in the cache."""

    pages: Int[np.ndarray, " L"]
    """int32 pages of the sequence."""

    first: int
    """Position of the first token."""

    length: int


class ChunkedAttention:
    """Causal attention for concatenated chunks of several prompts."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._chunks = chunks
        self._pages = [torch.from_numpy(chunk.pages).to(device) for chunk in chunks]

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "P G T D"],
        value: Float[Tensor, "P G T E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
    ) -> Float[Tensor, "1 N H E"]:
        """Compute the attention of each token to the tokens of its prompt up to itself."""
        del dropout  # unused in generation
        attended = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        begin = 0
        for chunk, pages in zip(self._chunks, self._pages, strict=True):
            rows = slice(begin, begin + chunk.length)
            begin = rows.stop
            end = chunk.first + chunk.length
            used_pages = pages[None, : count_pages(end)]
            attended[:, rows] = attend_without_grad(
                query[:, :, rows],
                gather_pages(key, used_pages)[:, :, :end],
                gather_pages(value, used_pages)[:, :, :end],
                scaling=scaling,
                sliding_window=sliding_window,
            ).transpose(1, 2)
        return attended


def new_zeros(like: Tensor, *shape: int) -> Shaped[Tensor, "..."]:
    """Return zeros with the dtype and device of `like`; on a CPU, memory is allocated on write.

    Uninitialized NaNs would survive the multiplication of masked values by 0. Huge pages need fewer
    address translations.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
    memory = mmap.mmap(-1, math.prod(shape) * like.itemsize, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)
