"""Causal attention of whole sequences, forward and backward: by kernels in bf16 on a CPU.

See `definition.py` for the dimension names. In fp32, where PyTorch's own kernels are fast and their
bits are promised, they do the work.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.config import Kernels
from pipeline.kernels import choice
from pipeline.kernels.causal_attention import cpu, definition
from pipeline.kernels.decode_attention.cpu import piece_of
from pipeline.kernels.toolchain.cpp import Built, NotBuiltError

NAME = "attention of whole sequences"


def causal_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H M D"],
    value: Float[Tensor, "B H M E"],
    *,
    scaling: float | None = None,
    kernels: Kernels = "auto",
) -> Float[Tensor, "B H T E"]:
    """Attention of each token to itself and those before it; a score is `scaling` or D^-0.5 times.

    There may be more keys than tokens, which nobody sees. By the kernels, what a sequence gets and
    its gradients depend on no other sequence of the call.

    Raises:
        ValueError: the tensors don't fit one another; the sentence names one.
        KernelError: `kernels` is required, and there is none for tensors in bf16 on a CPU.
    """
    definition.check(query, key, value)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # By its own layout a sequence's kernel would depend on what shares the call.
        query, key, value = (
            each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value)
        )
    built = _backward_for(query, key, value, kernels)
    if built is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    factor = query.shape[3] ** -0.5 if scaling is None else scaling
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        return _Causal.apply(query, key, value, factor, kernels, built)
    return _forward(query, key, value, factor, kernels)[0]


def continued_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H M D"],
    value: Float[Tensor, "B H M D"],
    *,
    scaling: float | None = None,
    kernels: Kernels = "auto",
) -> Float[Tensor, "B H T D"] | None:
    """Attention of the last T of M tokens, with the bits that `causal_attention` has for all.

    Without gradients. None where there is no kernel: PyTorch's own takes a mask.

    Raises:
        ValueError: the tensors don't fit one another; the sentence names one.
        KernelError: `kernels` is required, and there is none for tensors in bf16 on a CPU.
    """
    definition.check(query, key, value)
    query, key, value = (
        each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value)
    )
    # A causal call of all tokens is by the kernel where this has all that the kernel asks for.
    if _backward_for(key, key, value, kernels) is None:
        return None
    piece, built = piece_of(query.dtype, query.shape[3]), cpu.forward_library()
    if isinstance(piece, str) or isinstance(built, NotBuiltError):
        return None
    factor = query.shape[3] ** -0.5 if scaling is None else scaling
    return cpu.attention(query, key, value, scaling=factor, piece=piece, built=built)[0]


def leave_out_cudnn(query: Tensor) -> None:
    """Have PyTorch take FlashAttention for `query` of a GPU, and for all after it.

    From Hopper on it prefers cuDNN's attention, which makes a plan for each new shape of a call:
    batches of sequences of any lengths have thousands of shapes.
    """
    if query.is_cuda and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)


def _backward_for(query: Tensor, key: Tensor, value: Tensor, kernels: Kernels) -> Built | None:
    """The kernel of the way back for these; None where PyTorch is to do all the work."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or query.numel() == 0:
        return None
    if kernels == "off" or torch.compiler.is_compiling():
        return None
    found = next(cpu.refusals(query, key, value), None) or cpu.backward_library()
    if isinstance(found, Built):
        return found
    choice.settle(NAME, str(found), kernels)
    return None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, kernels: Kernels
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Attention, and the logarithm of each token's sum of exponentials.

    In the order in which decoding adds up as well; where that has no kernel, by PyTorch, which cuts
    sums where the longest sequence ends.
    """
    piece, built = piece_of(query.dtype, query.shape[3]), cpu.forward_library()
    if isinstance(piece, str) or isinstance(built, NotBuiltError):
        choice.settle(f"forward {NAME}", str(built if isinstance(piece, int) else piece), kernels)
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
        return operator(query, key, value, 0.0, is_causal=True, scale=scaling)
    return cpu.attention(query, key, value, scaling=scaling, piece=piece, built=built)


class _Causal(torch.autograd.Function):
    """Keeps its inputs, its result and the logarithms: weights are computed again."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        kernels: Kernels,
        built: Built,
    ) -> Tensor:
        ctx.uses_inputs_alone = True  # for pipeline.engine.graph: it reaches no parameter
        ctx.scaling, ctx.built = scaling, built
        out, logsumexp = _forward(query, key, value, scaling, kernels)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        grads = cpu.attention_grad(grad, *ctx.saved_tensors, scaling=ctx.scaling, built=ctx.built)
        return (*grads, None, None, None)
