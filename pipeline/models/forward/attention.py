"""Causal attention over concatenated sequences, for any Hugging Face model.

It is registered as `ragged` in the attention-function registry of `transformers`: a model's layers
call it and pass on the model's keyword argument `ragged`. In training, that is a `Ragged` layout,
in which each token attends to itself and to the earlier tokens of its sequence. Generation has its
own layouts, which read a cache. Without the keyword, the scaled-dot-product attention of
`transformers` is used.

On a GPU in 16-bit precision, `Ragged` uses `torch.nn.attention.varlen`: FlashAttention over packed
sequences (Dao 2023). If that kernel can't run, attention is computed sequence by sequence.

Dimension names: B sequences, N tokens in all of them, M keys in each of S slots, H query heads, G
key/value heads, D and E head sizes.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.config import Kernels
from pipeline.parallel.device import to_device

logger = logging.getLogger(__name__)

VARLEN_DTYPES = (torch.bfloat16, torch.float16)

MAX_HEAD_SIZE = 256
"""Largest head size of `varlen_attn`."""

VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters.keys()
"""Parameters of `varlen_attn`; in torch 2.11 it supports neither grouped queries nor split keys."""


def supports_varlen(query: Tensor, key: Tensor, value: Tensor, *, dropout: float) -> bool:
    """Return whether `varlen_attention` supports these heads and their gradients."""
    size = query.shape[-1]
    fits = size <= MAX_HEAD_SIZE and size % 8 == 0 and value.shape[-1] == size
    if not (query.is_cuda and query.dtype in VARLEN_DTYPES and fits) or dropout:
        return False
    return _probe_varlen(query.device, query.dtype, size, query.shape[1] // key.shape[1])


class Keys(NamedTuple):
    """The keys of each sequence, if some sequences continue others and attend to them."""

    index: Int[Tensor, " M"]
    """Index of each key in the row, sequence by sequence."""

    bounds: Int[Tensor, " B+1"]
    """int32 offsets of the sequences' keys, and the end of the last one."""

    longest: int


def varlen_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    bounds: Tensor,
    longest: int,
    keys: Keys | None = None,
    scaling: float | None,
    sliding_window: int | None,
) -> Float[Tensor, "1 N H D"]:
    """Compute causal attention of each sequence to itself, or to `keys`, which end with its own.

    H / G query heads share a key and a value head. `bounds` are int32 offsets of the sequences, and
    the end of the last one. Scores are multiplied by `scaling`, by default head size ** -0.5. Each
    token attends to `sliding_window` tokens, including itself, by default to all.
    """
    query, key, value = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    if keys is not None:
        key, value = key[keys.index], value[keys.index]
    key_bounds, longest_keys = (bounds, longest) if keys is None else keys[1:]
    options: dict[str, Any] = {}
    if "num_splits" in VARLEN_OPTIONS:
        options["num_splits"] = 1  # bitwise independent of the rest of the batch
    if "enable_gqa" in VARLEN_OPTIONS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        shared_by = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(shared_by, dim=1) for heads in (key, value))
    attended: Any = varlen_attn(
        query,
        key,
        value,
        bounds,
        key_bounds,
        longest,
        longest_keys,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **options,
    )
    return attended.unsqueeze(0)


def compute_bounds(lengths: Sequence[int]) -> Tensor:
    """Return the offsets of sequences in a row, and the end of the last, for `varlen_attention`."""
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@functools.cache
def _probe_varlen(device: torch.device, dtype: torch.dtype, size: int, shared_by: int) -> bool:
    """Return whether a small call of `varlen_attention` succeeds, forward and backward."""
    lengths = (5, 33)
    try:
        # The result is cached: later callers may need gradients even if this one doesn't.
        with torch.inference_mode(mode=False), torch.enable_grad():
            heads = [
                torch.ones(1, count, sum(lengths), size, device=device, dtype=dtype)
                for count in (2 * shared_by, 2, 2)
            ]
            out = varlen_attention(
                *(head.requires_grad_() for head in heads),
                bounds=compute_bounds(lengths).to(device),
                longest=max(lengths),
                scaling=None,
                sliding_window=None,
            )
            out.sum().backward()
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        logger.info("attention runs per sequence, because varlen_attn can't run here: %s", reason)
        return False
    return True


def unpad(padded: Float[Tensor, "P ..."], index: Int[Tensor, " N"]) -> Float[Tensor, "N ..."]:
    """Remove padding: row n of the result is `padded[index[n]]`; padding gets a zero gradient."""
    return _Unpad.apply(padded, index)


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, index: Tensor) -> Tensor:  # noqa: ANN401
        ctx.num_padded = len(padded)
        ctx.save_for_backward(index)
        return padded.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        (index,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.num_padded, *grad.shape[1:])
        return padded.index_copy_(0, index, grad), None


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def run_reproducibly(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run `attend` on these heads, with reproducible gradients if the step requires them."""
    heads = (query, key, value)
    is_required = query.is_cuda and torch.is_deterministic_algorithms_warn_only_enabled()
    if is_required and torch.is_grad_enabled() and any(head.requires_grad for head in heads):
        return _ReproducibleBackward.apply(attend, *heads)
    return attend(*heads)


class _ReproducibleBackward(torch.autograd.Function):
    """Attention whose backward pass raises an error instead of running nondeterministic code."""

    @staticmethod
    def forward(ctx: Any, attend: Attend, *heads: Tensor) -> Tensor:  # noqa: ANN401
        with torch.enable_grad():
            ctx.heads = [head.detach().requires_grad_(head.requires_grad) for head in heads]
            ctx.out = attend(*ctx.heads)
        return ctx.out.detach()

    @staticmethod
    @once_differentiable
    def backward(  # due to the decorator's type  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        inputs = [head for head in ctx.heads if head.requires_grad]
        torch.use_deterministic_algorithms(mode=True, warn_only=False)
        try:
            gradients = iter(torch.autograd.grad(ctx.out, inputs, grad))
        finally:
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
        del ctx.out  # frees its graph
        return (None, *(next(gradients) if head.requires_grad else None for head in ctx.heads))


RAGGED = "ragged"

KEY_BLOCK = 32
"""Padded lengths are multiples of this number of tokens."""


class MissingLayoutError(RuntimeError):
    """A packed batch reached a layer that does not receive its sequence boundaries."""


MAX_PADDING = 1.3
"""Maximum ratio of padded to real tokens in a forward pass, before rounding to `KEY_BLOCK`."""


@runtime_checkable
class Layout(Protocol):
    """Arrangement of the tokens of a forward pass, and the keys that each token attends to."""

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
        """Compute the attention of every token, within `sliding_window` tokens if given."""
        ...


@dataclass(frozen=True)
class Padded:
    """Sequences of one row as groups of similar length, each group padded for one forward pass.

    Dimension names: P padded tokens of all groups, B sequences of a group, T their padded length.
    """

    shapes: list[tuple[int, int]]
    """(B, T) of each group."""

    source: Int[Tensor, " P"]
    """Index in the row for each padded token; padding repeats the sequence's last token."""

    real: Int[Tensor, " P"]
    """1 for the row's tokens, 0 for padding."""

    index: Int[Tensor, " N"]
    """Index among the padded tokens for each token of the row."""

    def split(self, padded: Shaped[Tensor, "P ..."]) -> list[Shaped[Tensor, "_B _T ..."]]:
        """Return the padded tokens of each group."""
        groups = padded.split([rows * length for rows, length in self.shapes])
        return [group.unflatten(0, shape) for group, shape in zip(groups, self.shapes, strict=True)]


class Ragged:
    """Layout of sequences that are concatenated in one row.

    `varlen_attn` is used unless `kernels` is off; `continues` is the same as in `TokenBatch`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        *,
        kernels: Kernels = "auto",
        continues: Sequence[int | None] = (),
    ) -> None:
        self.kernels: Kernels = kernels
        self.lengths = tuple(lengths)
        self.continues = tuple(continues) or (None,) * len(self.lengths)
        starts = [0 if index is None else lengths[index] for index in self.continues]
        self.key_lengths = tuple(map(sum, zip(lengths, starts, strict=True)))
        positions = [
            torch.arange(start, end) for start, end in zip(starts, self.key_lengths, strict=True)
        ]
        self.positions = to_device(torch.cat(positions), device)
        self.device = device
        self._masks: dict[tuple[object, ...], Tensor | None] = {}
        """Masks that the layers share, by arguments of `causal_mask` and data type."""

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
        """Compute causal attention of each sequence to itself and the one that it continues.

        On a GPU in 16-bit precision, one call computes all sequences if `varlen_attn` supports it.
        Otherwise each has its own call, since padding them would take longer than the attention.
        """
        if self.kernels != "off" and supports_varlen(query, key, value, dropout=dropout):
            attend_all = partial(
                varlen_attention,
                bounds=self._bounds,
                longest=max(self.lengths),
                keys=self._keys,
                scaling=scaling,
                sliding_window=sliding_window,
            )
            return run_reproducibly(attend_all, query, key, value)
        options = {"scaling": scaling, "sliding_window": sliding_window, "dropout": dropout}
        attend = partial(attend_causally, **options, masks=self._masks)
        queries, keys, values = (heads.split(self.lengths, dim=2) for heads in (query, key, value))
        outputs = [
            run_reproducibly(attend, q, self._with_prefix(keys, i), self._with_prefix(values, i))
            for i, q in enumerate(queries)
        ]
        # Contiguous, because the code of some models calls `view` on the result.
        return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)

    def _with_prefix(self, heads: Sequence[Tensor], index: int) -> Float[Tensor, "1 G M D"]:
        """Return the keys or values that a sequence attends to."""
        prefix = self.continues[index]
        return heads[index] if prefix is None else torch.cat([heads[prefix], heads[index]], dim=2)

    @cached_property
    def _keys(self) -> "Keys | None":
        """The keys that each sequence attends to; None if it attends only to its own keys."""
        if self.key_lengths == self.lengths:
            return None
        bounds = to_device(compute_bounds(self.key_lengths), self.device)
        indices = to_device(torch.cat(self._key_indices()), self.device)
        return Keys(indices, bounds, max(self.key_lengths))

    def _key_indices(self) -> list[Int[Tensor, " _M"]]:
        """Return the indices in the row of the tokens that each sequence attends to."""
        indices = torch.arange(sum(self.lengths)).split(self.lengths)
        return [
            local if prefix is None else torch.cat([indices[prefix], local])
            for local, prefix in zip(indices, self.continues, strict=True)
        ]

    @cached_property
    def _bounds(self) -> Tensor:
        """Offsets of the sequences and the end of the last one, on the device."""
        return to_device(compute_bounds(self.lengths), self.device)

    @cached_property
    def padded(self) -> Padded:
        """The sequences in the padded form that other models require.

        Each follows a copy of the sequence that it continues; the latter has no row of its own.
        """
        keys = enumerate(self._key_indices())
        rows = [indices for index, indices in keys if index not in self.continues]
        return _pad_groups(rows, self.device)


def causal_mask(
    num_queries: int, num_keys: int, sliding_window: int | None, like: Tensor
) -> Float[Tensor, "T M"] | None:
    """Return the mask added to the scores of the last T of M tokens; None if `is_causal` suffices.

    Its data type and device are those of `like`.
    """
    if num_queries == num_keys and (sliding_window is None or num_keys <= sliding_window):
        return None
    offset = num_keys - num_queries
    mask = like.new_full((num_queries, num_keys), -math.inf)
    later = mask.triu(offset + 1)
    return later if sliding_window is None else later + mask.tril(offset - sliding_window)


def attend_causally(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 G M D"],
    value: Float[Tensor, "1 G M E"],
    *,
    scaling: float | None,
    sliding_window: int | None,
    dropout: float = 0.0,
    masks: dict[tuple[object, ...], Tensor | None] | None = None,
) -> Float[Tensor, "1 H T E"]:
    """Compute causal attention for the last T of a sequence's M tokens, over the keys of all M."""
    disable_cudnn_attention(query)
    shared_by = query.shape[1] // key.shape[1]
    if shared_by > 1 and query.is_cuda:  # not all CUDA kernels support grouped queries
        key, value = (heads.repeat_interleave(shared_by, dim=1) for heads in (key, value))
    masks = {} if masks is None else masks
    shape = (query.shape[2], key.shape[2], sliding_window)
    if (*shape, query.dtype) not in masks:
        masks[*shape, query.dtype] = causal_mask(*shape, query)
    mask = masks[*shape, query.dtype]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=key.shape[1] < query.shape[1],
    )


def attend_without_grad(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 G M D"],
    value: Float[Tensor, "1 G M E"],
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> Float[Tensor, "1 H T E"]:
    """Compute the same as `attend_causally`, faster on a CPU if T < M but without gradients.

    With a mask, PyTorch also computes the masked scores. Instead, attention to the first M - T keys
    and attention to the last T keys are computed separately and combined by their log-sum-exps,
    like the blocks of FlashAttention (Dao et al. 2022, section 3.1).
    """
    split = (key.shape[2] - query.shape[2], query.shape[2])
    has_kernel = query.is_cpu and query.shape[3] == key.shape[3] == value.shape[3]
    if not (split[0] and has_kernel and sliding_window is None):
        return attend_causally(query, key, value, scaling=scaling, sliding_window=sliding_window)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    (first_key, last_key), (first_value, last_value) = key.split(split, 2), value.split(split, 2)
    first, first_lse = flash(query, first_key, first_value, scale=scaling)
    last, last_lse = flash(query, last_key, last_value, is_causal=True, scale=scaling)
    weight = torch.sigmoid(first_lse - last_lse)[..., None]
    return torch.lerp(last.to(weight.dtype), first.to(weight.dtype), weight).to(query.dtype)


def disable_cudnn_attention(query: Tensor) -> None:
    """Disable cuDNN's attention for the whole process, so that PyTorch can use FlashAttention.

    On Hopper and later GPUs PyTorch prefers cuDNN's attention, which builds a plan for each shape,
    and batches of sequences with varying lengths have thousands of shapes.
    """
    if query.is_cuda and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group the sequences, sorted by length, so that padding is limited (`MAX_PADDING`)."""
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups: list[list[int]] = []
    num_tokens = 0
    for row in by_length:
        num_tokens += lengths[row]
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= MAX_PADDING * num_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            num_tokens = lengths[row]
    return groups


def round_up(number: int, multiple: int) -> int:
    """Round `number` up to a multiple."""
    return -(-number // multiple) * multiple


def _pad_groups(rows: Sequence[Int[Tensor, " _T"]], device: torch.device) -> Padded:
    """Pad rows of token indices, in groups, to lengths that are multiples of `KEY_BLOCK`."""
    shapes: list[tuple[int, int]] = []
    source: list[Tensor] = []
    is_real: list[Tensor] = []
    for group in group_by_length([len(row) for row in rows]):
        length = round_up(len(rows[group[0]]), KEY_BLOCK)
        shapes.append((len(group), length))
        for tokens in (rows[row] for row in group):
            positions = torch.arange(length)
            source.append(tokens[positions.clamp(max=len(tokens) - 1)])
            is_real.append(positions < len(tokens))
    source_index, mask = torch.cat(source), torch.cat(is_real)
    real = mask.nonzero().squeeze(-1)
    tokens, order = source_index[real].sort(stable=True)
    first_copies = tokens.diff(prepend=tokens.new_tensor([-1])) > 0
    arrays = (source_index, mask.long(), real[order[first_copies]])
    return Padded(shapes, *(to_device(array, device) for array in arrays))


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
    """Compute causal attention in the layout `ragged`, within `sliding_window` tokens if given.

    The batch size Q is 1 with a layout.

    Raises:
        MissingLayoutError: a placeholder mask was passed without its layout.
    """
    if ragged is None:
        _reject_placeholder_mask(module, query, key, attention_mask)

        def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, **kwargs
            )[0]

        return run_reproducibly(sdpa, query, key, value), None
    attended = ragged.attend(
        query,
        key,
        value,
        scaling=scaling,
        sliding_window=sliding_window,
        dropout=dropout if module.training else 0.0,
    )
    return attended, None


def _reject_placeholder_mask(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None
) -> None:
    """Reject a one-element mask for all pairs of tokens, which is not causal."""
    pairs = query.shape[2] * key.shape[2]
    if attention_mask is not None and pairs > 1 and attention_mask.shape[-2:] == (1, 1):
        raise MissingLayoutError(f"{type(module).__name__} drops the sequence boundaries")


AttentionInterface.register(RAGGED, ragged_attention)
AttentionMaskInterface.register(RAGGED, sdpa_mask)
