"""The call of `cpu.cpp`, and whether PyTorch's attention adds up on this machine as it does."""

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.decode_attention.pieces import piece
from pipeline.kernels.toolchain.cpp import FUSED, NUMBERS, Built, NotBuiltError, build
from pipeline.kernels.toolchain.levels import bf16_flags
from pipeline.kernels.toolchain.threads import parallel

SOURCE = Path(__file__).with_name("cpu.cpp")
MOST_SIZE = 256
"""Largest head size, as in the source."""


class Attention(ctypes.Structure):
    """One call; the source has the same structure."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lengths")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "width", "size")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head")),
        ("window", ctypes.c_int32),
        ("scaling", ctypes.c_float),
    ]


def refusals(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "S G M D"], value: Float[Tensor, "S G M E"]
) -> Iterator[str]:
    """Why the kernel doesn't take these tensors, in clauses; nothing where it does."""
    size = query.shape[2]
    if query.dtype not in NUMBERS:
        yield f"it is written for fp32 and bf16, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        yield f"the query is {query.dtype}, keys {key.dtype} and values {value.dtype}"
    if size != value.shape[3] or size != key.shape[3]:
        yield f"keys have heads of {key.shape[3]} numbers and values of {value.shape[3]}"
    unit = 4 // query.element_size() or 1
    if not 0 < size <= MOST_SIZE or size % unit:
        even = "an even number of " if unit == 2 else ""
        yield f"it is written for heads of {even}up to {MOST_SIZE} numbers, not {size}"
    if not key.is_contiguous() or not value.is_contiguous() or query.stride(2) != 1:
        yield "the numbers of a head don't lie side by side"
    if any(tensor.data_ptr() % tensor.element_size() for tensor in (query, key, value)):
        yield "a tensor begins between the places of two numbers in memory"


@dataclass(frozen=True)
class Prepared:
    """Attention that can be called as often as one likes, on the memory it was made for."""

    built: Built
    call: Attention
    tensors: tuple[Tensor, ...]
    """They keep the memory that `call` points to."""

    def __call__(self, lengths: Int[Tensor, " B"]) -> None:
        """Attend to what the memory holds now; of each row one past the last key that it sees."""
        self.call.lengths = lengths.data_ptr()
        self.built.library.decode_attention(
            ctypes.byref(self.call), parallel(), ctypes.c_int32(torch.get_num_threads())
        )


def prepare(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "S G M D"],
    value: Float[Tensor, "S G M D"],
    out: Float[Tensor, "B H D"],
    *,
    scaling: float,
    sliding_window: int | None,
    built: Built,
) -> Prepared:
    """The call on these tensors; nothing is checked here."""
    call = Attention(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        out=out.data_ptr(),
        rows=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        width=key.shape[2],
        size=query.shape[2],
        query_row=query.stride(0),
        query_head=query.stride(1),
        window=sliding_window or 0,
        scaling=scaling,
    )
    return Prepared(built, call, (query, key, value, out))


def decode_attention(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "S G M D"],
    value: Float[Tensor, "S G M D"],
    lengths: Int[Tensor, " B"],
    *,
    scaling: float,
    sliding_window: int | None,
    built: Built,
    out: Float[Tensor, "B H D"] | None = None,
) -> Float[Tensor, "B H D"]:
    """Attention of the last token of each of the first B slots; nothing is checked here.

    The bits are those of a causal pass over the whole sequence: in bf16 by `causal_attention`, in
    fp32 by PyTorch if there are as many keys as `whole_pieces` says.
    """
    out = query.new_empty(query.shape) if out is None else out
    call = prepare(
        query, key, value, out, scaling=scaling, sliding_window=sliding_window, built=built
    )
    call(lengths)
    return out


def sequence_attention(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "1 G M D"],
    value: Float[Tensor, "1 G M D"],
    lengths: Int[Tensor, " T"],
    *,
    scaling: float,
    sliding_window: int | None,
    built: Built,
    out: Float[Tensor, "T H D"],
) -> None:
    """Attention of tokens of one sequence, of each to its first `lengths` keys; nothing is checked.

    Each has the bits that `decode_attention` gives it alone; keys are read once for all of them.
    """
    call = prepare(
        query, key, value, out, scaling=scaling, sliding_window=sliding_window, built=built
    ).call
    call.lengths = lengths.data_ptr()
    built.library.sequence_attention(
        ctypes.byref(call), parallel(), ctypes.c_int32(torch.get_num_threads())
    )


@functools.cache
def kernel(dtype: torch.dtype, size: int) -> Built | str:
    """The kernel for heads of this size, if it has the bits of PyTorch's; else why not, a clause.

    Asked of PyTorch itself, on sequences whose products come out otherwise in every other order.
    """
    found = piece_of(dtype, size)
    return found if isinstance(found, str) else build_for(dtype, found)


@functools.cache
def piece_of(dtype: torch.dtype, size: int) -> int | str:
    """How many products PyTorch adds up in one go; why there is no kernel for that, a clause."""
    pieces = (piece(),) if dtype == torch.float32 else PIECES_BF16
    try:
        with torch.device("cpu"):  # another may be the default
            for each in pieces:
                if adds_up_alike(build_for(dtype, each), dtype=dtype, size=size):
                    return each
    except NotBuiltError as error:
        return str(error)
    return "PyTorch's attention adds up otherwise on this machine"


@functools.cache
def build_for(dtype: torch.dtype, piece: int) -> Built:
    """The kernel that cuts sums of values after that many keys.

    Raises:
        NotBuiltError: there is no compiler, or it fails.
    """
    defines: dict[str, str | int] = {"NUMBER": NUMBERS[dtype], "PIECE": piece}
    return build(SOURCE, defines, FUSED, optional=bf16_flags())


def adds_up_alike(built: Built, *, dtype: torch.dtype, size: int) -> bool:
    """Whether it has PyTorch's bits for sequences whose sums come out otherwise in other orders."""
    query, key, value = (tensor.to(dtype) for tensor in probe(dtype, size))
    with torch.inference_mode():
        whole = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    # The last one sees all pairs of large values: what is left of the others shows in any format.
    rows = query.shape[2] - 1 - torch.arange(0, query.shape[2], PROBE_STEP)
    queries = query[0, :, rows].transpose(0, 1).contiguous()
    got = decode_attention(
        queries,
        key.expand(len(rows), -1, -1, -1).contiguous(),
        value.expand(len(rows), -1, -1, -1).contiguous(),
        (rows + 1).int(),
        scaling=size**-0.5,
        sliding_window=None,
        built=built,
    )
    return torch.equal(got, whole[0, :, rows].transpose(0, 1))


PIECES_BF16 = (192, 384)
"""Keys whose values are added up in one go in bf16, as far as is known; those of longer sequences
PyTorch cuts in halves here and there, and our kernels nowhere."""

LENGTHS = {torch.float32: 512, torch.bfloat16: 384}
"""Number of keys in the probe, by dtype."""

LARGE = {torch.float32: (8, 22), torch.bfloat16: (16, 30)}
"""Exponents of its large values: next to them a sum has no room for the others' last bits."""

PROBE_STEP = 13
"""Every so manieth of its tokens is compared, from the last one on."""


def probe(dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (1, 2, M, size) each, for which the order of addition matters.

    Half of the values come in pairs of neighbours in a shuffled order that are large and cancel
    each other; one head's keys are alike, so that its weights are, and the other's are not.
    """
    generator = torch.Generator().manual_seed(size)
    length = LENGTHS[dtype]
    query, key, value = torch.randn(3, 1, 2, length, size, generator=generator)
    query[:, 0] = 0
    pairs = torch.randperm(length, generator=generator)[: length // 2].view(2, -1)
    large = 2.0 ** torch.randint(*LARGE[dtype], (pairs.shape[1], size), generator=generator)
    value[0, 0, pairs[0]], value[0, 0, pairs[1]] = large, -large
    return query, key, value
