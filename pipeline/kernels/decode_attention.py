"""Attention of each sequence's newest token over a paged cache, with a kernel if there is one.

`reference_attention` defines the operator in PyTorch. Dimension names: B sequences, L pages per
sequence, H query heads, G key/value heads, P pages in the cache, T tokens per page, D head size.
"""

import ctypes
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.build import CPP_DTYPES, FUSED, Library, bf16_flags, build, gomp_parallel
from pipeline.kernels.gpu import DTYPES, Gpu

PAGE = 64
"""Tokens per page, as in decode_attention.cpp: 16 KiB for a head of 64 fp32 elements, or of 128
16-bit ones. With pages of half the size, attention on a CPU takes 10 to 15% longer."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The keys that the last token of each sequence attends to, and the scale of the scores."""

    lengths: Int[Tensor, " B"]
    """int32. Length of each sequence, including the new token: one past the last visible key."""

    pages: Int[Tensor, "B L"]
    """int32. Pages of each sequence, in the order of its tokens; pages past its end aren't read."""

    scaling: float
    """Factor that scales the products of query and key."""

    sliding_window: int | None = None
    """Number of most recent keys that a token attends to; None for all."""


def gather_pages(
    stored: Float[Tensor, "P G T D"], pages: Int[Tensor, "B L"]
) -> Float[Tensor, "B G L*T D"]:
    """Copy the keys or values of sequences out of their pages."""
    gathered = stored.index_select(0, pages.flatten()).unflatten(0, pages.shape)
    return gathered.transpose(1, 2).flatten(2, 3)


def reference_attention(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "P G T D"],
    value: Float[Tensor, "P G T D"],
    spec: AttentionSpec,
) -> Float[Tensor, "B H D"]:
    """Compute the attention of each sequence's last token in PyTorch.

        out = sum_t softmax_t(scaling * query . key_t) value_t

    over the keys that `spec` allows. A key/value head serves H / G consecutive query heads. The
    result is computed in fp32, or in the dtype of `query` if that is wider; it is 0 if there is no
    key. Other keys and values are ignored and may be NaN.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (gather_pages(stored, spec.pages) for stored in (key, value))
    tokens = torch.arange(key.shape[2], device=key.device)
    ends = spec.lengths[:, None]
    is_visible = tokens < ends  # (B, L * T)
    if spec.sliding_window is not None:
        is_visible &= tokens >= ends - spec.sliding_window
    is_masked = ~is_visible[:, None, :, None]
    key, value = (tensor.to(dtype).masked_fill(is_masked, 0.0) for tensor in (key, value))
    grouped = query.to(dtype).unflatten(1, (key.shape[1], -1))  # (B, G, H / G, D)
    scores = spec.scaling * grouped @ key.transpose(2, 3)  # (B, G, H / G, L * T)
    scores = scores.masked_fill(~is_visible[:, None, None, :], -math.inf)
    # Without visible keys, all weights are NaN.
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ value).flatten(1, 2).to(query.dtype)


def decode_attention(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "P G T D"],
    value: Float[Tensor, "P G T D"],
    spec: AttentionSpec,
    *,
    longest: int,
    out: Float[Tensor, "B H D"] | None = None,
) -> Float[Tensor, "B H D"]:
    """Compute the attention of each sequence's last token, as `reference_attention` defines it.

    `longest` is an upper bound on the lengths, from which the CUDA kernel's number of splits is
    chosen, because the host doesn't read them. Lengths beyond the pages are clamped. The result is
    written to `out` if given, which must be contiguous.

    Raises:
        KernelError: kernels are required, and there is none for these tensors.
    """
    if query.numel() == 0:
        return torch.empty_like(query) if out is None else out
    kernel = find_kernel(query, key, value)
    if isinstance(kernel, Gpu):
        return launch(query, key, value, spec, gpu=kernel, longest=longest, out=out)
    if kernel is not None:
        out = query.new_empty(query.shape) if out is None else out
        PreparedAttention(
            kernel, query, key, value, out, scaling=spec.scaling, window=spec.sliding_window
        )(spec.lengths, spec.pages)
        return out
    result = reference_attention(query, key, value, spec)
    return result if out is None else out.copy_(result)


def prepare(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "P G T D"],
    value: Float[Tensor, "P G T D"],
    out: Float[Tensor, "B H D"],
    *,
    scaling: float,
    sliding_window: int | None,
) -> "PreparedAttention | None":
    """Prepare the C++ kernel for repeated calls on this memory; return None if it can't be used.

    Raises:
        KernelError: kernels are required, and there is none for these tensors.
    """
    kernel = find_kernel(query, key, value)
    if not isinstance(kernel, Library) or not out.is_contiguous():
        return None
    return PreparedAttention(kernel, query, key, value, out, scaling=scaling, window=sliding_window)


def find_kernel(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "P G T D"], value: Float[Tensor, "P G T E"]
) -> Gpu | Library | None:
    """Return the kernel for these tensors, or None if PyTorch is used.

    Raises:
        KernelError: kernels are required, and there is none for these tensors.
    """
    if torch.is_grad_enabled() and query.requires_grad:
        return None
    if choice.use_gpu(query.device):
        reason = cuda_unsupported_reason(query, key, value)
        if reason is not None:
            return choice.resolve("attention", reason)
        grouping = HeadGrouping(query.shape[1] // key.shape[1], key.shape[3], query.dtype.itemsize)
        defines = cuda_macros(query.dtype, grouping)
        return choice.resolve(
            "attention", choice.load_kernel(query.device, "decode_attention", defines)
        )
    if query.device.type != "cpu" or choice.kernel_mode() == "off":
        return None
    reason = next(cpp_unsupported_reasons(query, key, value), None)
    return choice.resolve("attention", reason or library(query.dtype))


# The C++ kernel

MAX_HEAD_SIZE = 256
"""Largest head size, as in decode_attention.cpp."""


class AttentionParams(ctypes.Structure):
    """`AttentionParams` of decode_attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out")),
        *((name, ctypes.c_void_p) for name in ("lengths", "pages")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "size")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "pages_row", "max_pages")),
        ("window", ctypes.c_int32),
        ("scaling", ctypes.c_float),
    ]


@functools.cache
def library(dtype: torch.dtype) -> Library | str:
    """Build the kernel for this dtype, or return the reason why it can't be built."""
    source = Path(__file__).with_suffix(".cpp")
    return build(source, {"NUMBER": CPP_DTYPES[dtype]}, (*FUSED, *bf16_flags()))


def cpp_unsupported_reasons(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "P G T D"], value: Float[Tensor, "P G T E"]
) -> Iterator[str]:
    """Yield the reasons why the kernel doesn't support these tensors."""
    size = query.shape[2]
    if key.shape[2] != PAGE:
        yield f"pages have {key.shape[2]} tokens, not {PAGE}"
    if query.dtype not in CPP_DTYPES:
        yield f"it supports fp32 and bf16, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        yield f"queries are {query.dtype}, keys {key.dtype} and values {value.dtype}"
    if size != value.shape[3] or size != key.shape[3]:
        yield f"keys have head size {key.shape[3]} and values {value.shape[3]}, not {size}"
    multiple = 4 // query.element_size() or 1
    if not 0 < size <= MAX_HEAD_SIZE or size % multiple:
        even = "even " if multiple == 2 else ""
        yield f"it supports {even}head sizes up to {MAX_HEAD_SIZE}, not {size}"
    if not key.is_contiguous() or not value.is_contiguous() or query.stride(2) != 1:
        yield "the elements of a head are not contiguous"
    if any(tensor.data_ptr() % tensor.element_size() for tensor in (query, key, value)):
        yield "a tensor is not aligned to its element size"


class PreparedAttention:
    """Attention on fixed memory, for repeated calls."""

    def __init__(
        self,
        library: Library,
        query: Float[Tensor, "B H D"],
        key: Float[Tensor, "P G T D"],
        value: Float[Tensor, "P G T D"],
        out: Float[Tensor, "B H D"],
        *,
        scaling: float,
        window: int | None,
    ) -> None:
        self._library = library
        self._tensors = query, key, value, out  # keep their memory alive
        self.params = AttentionParams(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            out=out.data_ptr(),
            rows=query.shape[0],
            heads=query.shape[1],
            kv_heads=key.shape[1],
            size=query.shape[2],
            query_row=query.stride(0),
            query_head=query.stride(1),
            window=window or 0,
            scaling=scaling,
        )

    def __call__(self, lengths: Int[Tensor, " B"], pages: Int[Tensor, "B L"]) -> None:
        """Compute attention from the memory's current contents; see `AttentionSpec`."""
        self.params.lengths, self.params.pages = lengths.data_ptr(), pages.data_ptr()
        self.params.pages_row, self.params.max_pages = pages.stride(0), pages.shape[1]
        self._library.decode_attention(
            ctypes.byref(self.params), gomp_parallel(), ctypes.c_int32(torch.get_num_threads())
        )


# The CUDA kernel

HEAD_SIZES = (8, 32, 48, 64, 80, 96, 128, 256)

WARPS = 4
"""Warps per block, as in decode_attention.cu."""

MIN_KEYS_PER_SPLIT = 128
"""Minimum number of keys per split: combining smaller splits costs more than they save."""

MAX_SEQUENCES = 65535
"""Maximum number of sequences per launch: the largest third dimension of a grid."""

AXES = {3: ("sequence", "head"), 4: ("page", "head", "token")}
"""Axes whose strides the kernel takes, by number of dimensions."""


class Params(ctypes.Structure):
    """`DecodeParams` of decode_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "partials")),
        *((name, ctypes.c_void_p) for name in ("lengths", "pages")),
        *((name, ctypes.c_int64) for name in ("query_sequence", "query_head")),
        *((name, ctypes.c_int64) for name in ("out_sequence", "out_head")),
        *((name, ctypes.c_int64) for name in ("key_page", "key_head", "key_token")),
        *((name, ctypes.c_int64) for name in ("value_page", "value_head", "value_token")),
        *((name, ctypes.c_int) for name in ("heads_per_kv", "blocks_per_kv", "pages_row")),
        *((name, ctypes.c_int) for name in ("capacity", "window", "num_splits")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class HeadGrouping:
    """How the query heads that share a key/value head are distributed over thread blocks."""

    heads_per_kv: int
    head_size: int
    itemsize: int

    @property
    def blocks_per_kv(self) -> int:
        """Number of blocks that read the same keys, each for different query heads."""
        # A lane's share of the queries and sums must fit into registers.
        limit = 4 if self.itemsize * self.head_size > 512 else 8
        return -(-self.heads_per_kv // limit)

    @property
    def heads_per_block(self) -> int:
        """Number of query heads per block."""
        return -(-self.heads_per_kv // self.blocks_per_kv)


def cuda_macros(dtype: torch.dtype, grouping: HeadGrouping) -> dict[str, str | int]:
    """Return the preprocessor macros of the kernel."""
    return {
        "NUMBER": DTYPES[dtype],
        "HEAD_SIZE": grouping.head_size,
        "GROUP": grouping.heads_per_block,
        "PAGE": PAGE,
        "PARAMS_BYTES": ctypes.sizeof(Params),
    }


def cuda_unsupported_reason(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "P G T D"], value: Float[Tensor, "P G T E"]
) -> str | None:
    """Return the reason why the kernel doesn't support these tensors, or None if it does."""
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"queries are {query.dtype}, keys {key.dtype} and values {value.dtype}"
    if query.shape[2] not in HEAD_SIZES or value.shape[3] != query.shape[2]:
        return f"it doesn't support head size {query.shape[2]} with values of size {value.shape[3]}"
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} query heads can't share {key.shape[1]} key/value heads evenly"
    if not 0 < query.shape[0] <= MAX_SEQUENCES or not query.shape[1] or key.shape[2] != PAGE:
        return f"it supports 1 to {MAX_SEQUENCES} sequences with pages of {PAGE} tokens"
    itemsize = query.dtype.itemsize
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        offsets = [tensor.data_ptr(), *(stride * itemsize for stride in tensor.stride()[:-1])]
        if tensor.stride(-1) != 1 or any(offset % 16 for offset in offsets):
            # Omits the strides, which vary with the number of sequences: reasons are cached.
            return (
                f"heads of size {tensor.shape[-1]}, {tensor.dtype}: the {name} is not contiguous"
                " and aligned to 16 bytes"
            )
    return None


def launch(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "P G T D"],
    value: Float[Tensor, "P G T D"],
    spec: AttentionSpec,
    *,
    gpu: Gpu,
    longest: int,
    num_splits: int | None = None,
    out: Float[Tensor, "B H D"] | None = None,
) -> Float[Tensor, "B H D"]:
    """Compute `reference_attention` on a GPU, for tensors that the kernel supports.

    The host doesn't read the lengths, so a CUDA graph of the call can be replayed with different
    lengths, up to `longest`. By default the keys are divided into enough splits to fill the GPU.
    The result is written to `out` if given.
    """
    batch, heads, size = query.shape
    grouping = HeadGrouping(heads // key.shape[1], size, query.dtype.itemsize)
    defines = cuda_macros(query.dtype, grouping)
    kernel = gpu.kernel("decode_attention", "decode_attention", defines)
    rows = key.shape[1] * grouping.blocks_per_kv
    shared_bytes = 4 * WARPS * grouping.heads_per_block * (size + 2)
    if num_splits is None:
        active = gpu.num_multiprocessors * kernel.max_active_blocks(32 * WARPS, shared_bytes)
        num_keys = min(longest, spec.sliding_window or longest)
        num_splits = choose_splits(batch * rows, num_keys, active)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    partials = None
    if num_splits > 1:
        partials = out.new_empty((batch, heads, num_splits, size + 2), dtype=torch.float32)
    tensors = {"query": query, "out": out, "key": key, "value": value}
    strides = {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip(AXES[tensor.ndim], tensor.stride(), strict=False)
    }
    tensors |= {"lengths": spec.lengths, "pages": spec.pages}
    params = Params(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        partials=None if partials is None else partials.data_ptr(),
        **strides,
        heads_per_kv=grouping.heads_per_kv,
        blocks_per_kv=grouping.blocks_per_kv,
        pages_row=spec.pages.stride(0),
        capacity=spec.pages.shape[1] * PAGE,
        window=spec.sliding_window or 0,
        num_splits=num_splits,
        scale=spec.scaling,
    )
    grid, block = (num_splits, rows, batch), (32 * WARPS, 1, 1)
    kernel(params, grid=grid, block=block, shared_bytes=shared_bytes)
    if num_splits > 1:
        combine = gpu.kernel("decode_attention", "decode_attention_combine", defines)
        combine(params, grid=(heads, batch, 1), block=(size, 1, 1))
    return out


def choose_splits(num_blocks: int, num_keys: int, max_active_blocks: int) -> int:
    """Choose the number of splits of each sequence's keys that fills the GPU with blocks.

    `max_active_blocks` is the number of blocks that the GPU runs at once.
    """
    return max(1, min(-(-max_active_blocks // max(num_blocks, 1)), num_keys // MIN_KEYS_PER_SPLIT))
