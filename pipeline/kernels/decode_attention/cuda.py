"""Decode attention on a GPU: checks, the choice of a specialisation, and the launch."""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.kernels.decode_attention import definition
from pipeline.kernels.decode_attention.definition import Scores
from pipeline.kernels.gpu import DTYPES, DTYPES_BY_NAME, Gpu, Macros

HEAD_SIZES = (8, 32, 48, 64, 80, 96, 128, 256)

WARPS = 4
"""Warps of a block, as in the source."""

KEYS_OF_SPLIT = 128
"""A block that reads fewer keys costs more to put together than it saves."""

BLOCKS_OF_MULTIPROCESSOR = 4
"""Blocks that run at once on a multiprocessor, which their registers limit."""

SEQUENCES = 65535
"""Sequences of one launch at most: the largest third dimension of a grid."""

ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of the norm, in the self-test: a few times what rounding makes, far less than a fault does."""


class Params(ctypes.Structure):
    """`DecodeParams` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "parts")),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("query_sequence", "query_head")),
        *((name, ctypes.c_int64) for name in ("out_sequence", "out_head")),
        *((name, ctypes.c_int64) for name in ("key_sequence", "key_head", "key_token")),
        *((name, ctypes.c_int64) for name in ("value_sequence", "value_head", "value_token")),
        *((name, ctypes.c_int) for name in ("heads_per_kv", "blocks_per_kv", "capacity")),
        *((name, ctypes.c_int) for name in ("window", "num_splits")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Shape:
    """How the query heads of a kv head are shared out among blocks."""

    heads_per_kv: int
    head_size: int
    itemsize: int

    @property
    def blocks_per_kv(self) -> int:
        """Blocks that read the same keys, each for its own heads."""
        # What a lane holds of the queries and of the sums has to fit into its registers.
        most = 4 if self.itemsize * self.head_size > 512 else 8
        return -(-self.heads_per_kv // most)

    @property
    def group(self) -> int:
        """Query heads of a block."""
        return -(-self.heads_per_kv // self.blocks_per_kv)


def refusal(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "S G M D"], value: Float[Tensor, "S G M E"]
) -> str | None:
    """Why the kernel can't take these, if it can't."""
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"dtypes {query.dtype}, {key.dtype} and {value.dtype}"
    if query.shape[2] not in HEAD_SIZES or value.shape[3] != query.shape[2]:
        return f"head sizes {query.shape[2]} and {value.shape[3]}"
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} query heads for {key.shape[1]} of keys"
    if not 0 < query.shape[0] <= SEQUENCES or not query.shape[1]:
        return f"no sequences, no heads, or more than {SEQUENCES} sequences"
    itemsize = query.dtype.itemsize
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        places = [tensor.data_ptr(), *(stride * itemsize for stride in tensor.stride()[:-1])]
        if tensor.stride(-1) != 1 or any(place % 16 for place in places):
            # Without the strides: they differ with the number of sequences, and reasons are kept.
            return (
                f"heads of {tensor.shape[-1]} numbers, {tensor.dtype}: those of the {name} don't"
                " lie in whole lots of 16 bytes"
            )
    return None


def decode_attention(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    scores: Scores,
    *,
    gpu: Gpu,
    longest: int,
    num_splits: int | None = None,
    out: Float[Tensor, "B H D"] | None = None,
) -> Float[Tensor, "B H D"]:
    """`definition.decode_attention` on a GPU, for what `refusal` has nothing against.

    No number of `lengths` is looked at on the host: a CUDA graph of the call may be replayed with
    others, up to `longest`. By default the keys are cut into as many splits as fill
    the GPU. The result is written into `out` if that is given.
    """
    batch, heads, size = query.shape
    kv_heads = key.shape[1]
    shape = Shape(heads // kv_heads, size, query.dtype.itemsize)
    if num_splits is None:
        reach = min(longest, scores.sliding_window or longest)
        num_splits = choose_splits(batch * kv_heads * shape.blocks_per_kv, reach, gpu)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    parts = None
    if num_splits > 1:
        parts = out.new_empty((batch, heads, num_splits, size + 2), dtype=torch.float32)
    params = _params(query, key, value, scores, out, parts, shape=shape, num_splits=num_splits)
    defines = specialisation(query.dtype, shape)
    kernel = gpu.kernel("decode_attention", "decode_attention", defines)
    kernel(
        params,
        grid=(num_splits, kv_heads * shape.blocks_per_kv, batch),
        block=(32 * WARPS, 1, 1),
        shared_bytes=4 * WARPS * shape.group * (size + 2),
    )
    if num_splits > 1:
        combine = gpu.kernel("decode_attention", "decode_attention_combine", defines)
        combine(params, grid=(heads, batch, 1), block=(size, 1, 1))
    return out


def _params(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    out: Tensor,
    parts: Tensor | None,
    *,
    shape: Shape,
    num_splits: int,
) -> Params:
    """What the kernels read: addresses, strides in elements, sizes."""
    return Params(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        out=out.data_ptr(),
        parts=None if parts is None else parts.data_ptr(),
        lengths=scores.lengths.data_ptr(),
        query_sequence=query.stride(0),
        query_head=query.stride(1),
        out_sequence=out.stride(0),
        out_head=out.stride(1),
        key_sequence=key.stride(0),
        key_head=key.stride(1),
        key_token=key.stride(2),
        value_sequence=value.stride(0),
        value_head=value.stride(1),
        value_token=value.stride(2),
        heads_per_kv=shape.heads_per_kv,
        blocks_per_kv=shape.blocks_per_kv,
        capacity=key.shape[2],
        window=scores.sliding_window or 0,
        num_splits=num_splits,
        scale=scores.scaling,
    )


def specialisation(dtype: torch.dtype, shape: Shape) -> dict[str, str | int]:
    """Macros of the kernel."""
    return {
        "NUMBER": DTYPES[dtype],
        "HEAD_SIZE": shape.head_size,
        "GROUP": shape.group,
        "PARAMS_BYTES": ctypes.sizeof(Params),
    }


def choose_splits(num_blocks: int, num_keys: int, gpu: Gpu) -> int:
    """Into how many parts to cut the keys of a sequence, so that blocks fill the GPU."""
    wanted = -(-gpu.num_multiprocessors * BLOCKS_OF_MULTIPROCESSOR // max(num_blocks, 1))
    return max(1, min(wanted, num_keys // KEYS_OF_SPLIT))


def self_test(gpu: Gpu, defines: Macros) -> bool:
    """Two sequences, whole and cut into two parts; what must not be read is NaN."""
    dtype = DTYPES_BY_NAME[str(defines["NUMBER"])]
    size, heads = int(defines["HEAD_SIZE"]), int(defines["GROUP"])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 37], dtype=torch.int32)
    scaling = size**-0.5
    query = torch.randn(2, heads, size, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, 1, 40, size, generator=generator).to(dtype)
    for row, length in enumerate(lengths.tolist()):
        key[row, :, length:] = value[row, :, length:] = torch.nan
    scores = Scores(lengths=lengths, scaling=scaling)
    expected = definition.decode_attention(query.double(), key.double(), value.double(), scores)
    query, key, value = (each.to(gpu.device) for each in (query, key, value))
    scores = Scores(lengths=lengths.to(gpu.device), scaling=scaling)
    outs = [
        decode_attention(query, key, value, scores, gpu=gpu, longest=40, num_splits=num_splits)
        for num_splits in (1, 2)
    ]
    errors = [float((out.cpu().double() - expected).norm() / expected.norm()) for out in outs]
    return all(error <= ERROR[dtype] for error in errors)  # of NaN it is not
