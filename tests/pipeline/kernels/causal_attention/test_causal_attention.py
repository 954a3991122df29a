"""Attention of whole sequences in bf16: against its definition, decoding, and itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.engine.graph import parameter_uses
from pipeline.errors import KernelError
from pipeline.kernels.causal_attention import cpu, definition, dispatch
from pipeline.kernels.causal_attention.dispatch import causal_attention, continued_attention
from pipeline.kernels.decode_attention import cpu as decode_attention
from pipeline.kernels.decode_attention import pieces
from pipeline.kernels.linear.cpu import order_of
from pipeline.kernels.linear.rows import fewest_rows
from pipeline.kernels.toolchain.cpp import Built

SHAPES = [
    *[(2, 3, tokens, 48) for tokens in (1, 2, 15, 31, 33, 64, 100, 192)],
    *[(1, 2, 130, size) for size in (2, 16, 40, 64, 80, 128, 256)],
    (1, 1, 1100, 64),
]
"""Sequences, heads, tokens, numbers of a head: whole tiles and vectors, and what is left over."""

ROUNDED = 2.0**-9
"""The largest relative error of a rounding to bf16; a result goes through one of them that counts,
a gradient through three."""


def is_built() -> bool:
    libraries = (cpu.forward_library(), cpu.backward_library())
    return all(isinstance(each, Built) for each in libraries)


needs_kernels = pytest.mark.skipif(not is_built(), reason="the kernels can't be built here")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def inputs(batch: int, heads: int, tokens: int, size: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value and the result's gradient, token after token as models have them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, batch, tokens, heads, size)
    made = 1.5 * torch.randn(shape, generator=generator)
    return list(made.bfloat16().transpose(2, 3).unbind())


def gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, **settings: object
) -> list[Tensor]:
    """The result, and the gradients of query, key and value."""
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    out = causal_attention(*leaves, **settings)  # pyright: ignore[reportArgumentType]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def defined(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by the definition, in fp64."""
    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    out = definition.causal_attention(*leaves, scaling=query.shape[3] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def error(ours: Tensor, expected: Tensor) -> float:
    """Relative, of the whole tensor."""
    size = expected.norm()
    return float((ours.double() - expected).norm() / (size if size > 0 else 1))


def test_definition_is_attention() -> None:
    """Checked by hand: with queries of 0 a token takes the mean of the values up to itself."""
    value = torch.tensor([[1.0, 8.0], [3.0, 0.0], [5.0, 1.0]]).view(1, 1, 3, 2)
    zero, key = torch.zeros_like(value), torch.randn_like(value)
    out = definition.causal_attention(zero, key, value, scaling=1.0)
    torch.testing.assert_close(out[0, 0], torch.tensor([[1.0, 8.0], [2.0, 4.0], [3.0, 3.0]]))


@pytest.mark.parametrize("shape", SHAPES)
def test_result_and_gradients_are_the_definition(shape: tuple[int, int, int, int]) -> None:
    made = inputs(*shape)
    for place, (ours, expected) in enumerate(zip(gradients(*made), defined(*made), strict=True)):
        assert ours.dtype == torch.bfloat16
        assert ours.shape == expected.shape
        assert error(ours, expected) < ROUNDED * (1 if place == 0 else 3)


def test_gradients_by_hand() -> None:
    """Two tokens, queries of 0, so that the weights are 1 and then a half each.

    dV = (g0 + g1 / 2, g1 / 2); the second row of dS is (d, -d) with d = g1 (v0 - v1) / 4, and dQ
    is d (k0 - k1) there; dK is dS^T Q = 0.
    """
    query = torch.zeros(1, 1, 2, 2)
    key = torch.tensor([[1.0, 2.0], [3.0, -2.0]]).view(1, 1, 2, 2)
    value = torch.tensor([[4.0, 0.0], [0.0, 8.0]]).view(1, 1, 2, 2)
    grad = torch.tensor([[1.0, 3.0], [2.0, -4.0]]).view(1, 1, 2, 2)
    made = [each.bfloat16() for each in (query, key, value, grad)]
    out, dq, dk, dv = gradients(*made, scaling=1.0)
    assert out[0, 0].tolist() == [[4.0, 0.0], [2.0, 4.0]]
    assert dv[0, 0].tolist() == [[2.0, 1.0], [1.0, -2.0]]
    d = (2.0 * 4.0 + -4.0 * -8.0) / 4
    assert dq[0, 0].tolist() == [[0.0, 0.0], [d * -2.0, d * 4.0]]
    assert dk.count_nonzero() == 0


@needs_kernels
def test_gradients_are_as_near_as_those_of_pytorch() -> None:
    made = inputs(2, 4, 256, 64)
    expected = defined(*made)
    for ours, theirs, exact in zip(
        gradients(*made), gradients(*made, kernels="off"), expected, strict=True
    ):
        assert error(ours, exact) <= 1.1 * error(theirs, exact)


@needs_kernels
@pytest.mark.parametrize("tokens", [31, 224, 600])
def test_a_token_has_the_bits_that_decoding_has(tokens: int) -> None:
    """What trains rounds as what generates, wherever sums are cut."""
    query, key, value, _ = inputs(2, 3, tokens, 48)
    kernel = decode_attention.kernel(torch.bfloat16, 48)
    if not isinstance(kernel, Built):
        pytest.skip(kernel)
    whole = causal_attention(query, key, value)
    for token in range(tokens):
        one = decode_attention.decode_attention(
            query[:, :, token].contiguous(),
            key.contiguous(),
            value.contiguous(),
            torch.full((2,), token + 1, dtype=torch.int32),
            scaling=48**-0.5,
            sliding_window=None,
            built=kernel,
        )
        assert torch.equal(one, whole[:, :, token])


@needs_kernels
@pytest.mark.parametrize("first", [0, 1, 31, 32, 500, 511, 599])
def test_the_last_tokens_alone_have_the_bits_that_they_have_among_all(first: int) -> None:
    query, key, value, _ = inputs(2, 3, 600, 48)
    if isinstance(why := decode_attention.piece_of(torch.bfloat16, 48), str):
        pytest.skip(why)
    whole = causal_attention(query, key, value)

    last = continued_attention(query[:, :, first:], key, value)

    assert last is not None
    assert torch.equal(last, whole[:, :, first:])


def test_in_fp32_and_without_kernels_pytorch_goes_on() -> None:
    made = inputs(1, 2, 40, 16)[:3]
    assert continued_attention(*made, kernels="off") is None
    assert continued_attention(*(each.float() for each in made)) is None


@needs_kernels
def test_a_sequence_depends_on_no_other_and_no_thread() -> None:
    made = inputs(3, 2, 150, 48)
    with threads(2):
        together = gradients(*made)
    for row in range(3):
        with threads(1):
            alone = gradients(*(each[row : row + 1] for each in made))
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[row])


@needs_kernels
def test_what_comes_later_changes_nothing() -> None:
    """Padding on the right, whose results get no gradient."""
    long = inputs(1, 2, 192, 48)
    long[3][:, :, 70:] = 0
    short = [each[:, :, :70] for each in long]
    for ours, padded in zip(gradients(*short), gradients(*long), strict=True):
        assert torch.equal(ours, padded[:, :, :70])
    for rest in gradients(*long)[2:]:
        assert rest[:, :, 70:].count_nonzero() == 0


@needs_kernels
def test_one_head_is_shared_out_among_threads() -> None:
    query, key, value, _ = inputs(1, 1, 500, 64)
    with threads(1):
        one = causal_attention(query, key, value)
    with threads(2):
        assert torch.equal(causal_attention(query, key, value), one)


@needs_kernels
def test_logarithms_of_sums() -> None:
    query, key, value, _ = inputs(2, 2, 600, 32)
    built = cpu.forward_library()
    assert isinstance(built, Built)
    _, ours = cpu.attention(query, key, value, scaling=0.3, piece=192, built=built)
    scores = 0.3 * query.double() @ key.double().mT
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(later, -torch.inf).logsumexp(dim=-1)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-4)


@needs_kernels
def test_memory_of_any_layout() -> None:
    """Heads before tokens, and a gradient that is one number."""
    query, key, value, _ = inputs(2, 3, 40, 48)
    one = torch.ones((), dtype=torch.bfloat16).expand(2, 3, 40, 48)
    other = [each.contiguous() for each in (query, key, value, one)]
    expected = gradients(query, key, value, one)
    assert all(map(torch.equal, gradients(*other), expected))


def test_a_query_key_or_value_that_is_no_number_shows_in_what_it_reaches() -> None:
    """Token 40's: its query is read by itself alone, its key and value by all from it on."""

    def broken(which: int) -> list[Tensor]:
        made = inputs(1, 1, 100, 48)
        made[which][0, 0, 40, 3] = torch.nan
        return [each[0, 0].isnan().any(dim=-1) for each in gradients(*made)]

    out, dq, dk, dv = broken(0)
    assert [row for row in range(100) if out[row]] == [40]
    assert dq[40]
    assert dk[:41].all()
    assert dv[:41].all()
    out, dq, dk, dv = broken(1)
    assert all(each[40:].all() for each in (out, dq, dk, dv))
    out, dq, dk, _ = broken(2)
    assert all(each[40:].all() for each in (out, dq, dk))


def test_what_is_not_finite_is_not_lost() -> None:
    made = inputs(1, 1, 100, 48)
    made[3][0, 0, 50, 3] = torch.nan
    _, dq, dk, dv = gradients(*made)
    assert dq[0, 0, 50].isnan().all()
    assert dk[0, 0, :51].isnan().all()
    assert dv[0, 0, :51, 3].isnan().all()


def test_recomputed_blocks_have_the_same_gradients() -> None:
    query, key, value, grad = inputs(2, 2, 64, 32)
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    out = torch.utils.checkpoint.checkpoint(causal_attention, *leaves, use_reentrant=False)
    assert isinstance(out, Tensor)
    again = torch.autograd.grad(out, leaves, grad)
    assert all(map(torch.equal, again, gradients(query, key, value, grad)[1:]))


@needs_kernels
def test_the_graph_is_known_before_the_way_back() -> None:
    query, key, value, _ = inputs(1, 1, 8, 16)
    leaf = key.detach().requires_grad_()
    uses = parameter_uses(causal_attention(query, leaf, value).sum())
    assert uses is not None
    assert uses[leaf] == 1


@needs_kernels
def test_gradients_of_gradients_are_refused() -> None:
    query, key, value, grad = inputs(1, 1, 8, 16)
    leaf = query.detach().requires_grad_()
    out = causal_attention(leaf, key, value)
    (first,) = torch.autograd.grad(out, leaf, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.float32, "required"), (torch.bfloat16, "off")]
)
def test_pytorch_does_the_work_in_fp32_and_where_kernels_are_off(
    dtype: torch.dtype, kernels: str
) -> None:
    made = [each.to(dtype) for each in inputs(2, 2, 64, 32)]
    leaves = [each.detach().requires_grad_() for each in made[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, made[3])]
    assert all(map(torch.equal, gradients(*made, kernels=kernels), expected))


@needs_kernels
@pytest.mark.parametrize(
    ("size", "value_size", "why"),
    [
        (7, 7, "even number up to 256, not 7"),
        (16, 32, "16 numbers in keys and 32"),
        (512, 512, "not 512"),
    ],
)
def test_what_the_kernels_do_not_take(size: int, value_size: int, why: str) -> None:
    query, key, _, _ = inputs(1, 2, 20, size)
    value, grad = (inputs(1, 2, 20, value_size)[place] for place in (2, 3))
    with pytest.raises(KernelError, match=why):
        causal_attention(query, key, value, kernels="required")
    ours = gradients(query, key, value, grad)
    for result, expected in zip(ours, defined(query, key, value, grad), strict=True):
        assert error(result, expected) < 3 * ROUNDED


@needs_kernels
def test_where_decoding_has_no_kernel_pytorch_goes_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_known(*_: object) -> str:
        return "PyTorch's attention adds up otherwise on this machine"

    monkeypatch.setattr(dispatch, "piece_of", nothing_known)
    made = inputs(2, 2, 100, 48)
    for ours, expected in zip(gradients(*made), defined(*made), strict=True):
        assert error(ours, expected) < 3 * ROUNDED
    assert torch.equal(gradients(*made)[0], gradients(*made, kernels="off")[0])
    with pytest.raises(KernelError, match=r"forward attention .* adds up otherwise"):
        gradients(*made, kernels="required")


@needs_kernels
def test_gradients_of_one_input_alone() -> None:
    query, key, value, grad = inputs(1, 2, 40, 16)
    leaf = value.detach().requires_grad_()
    (ours,) = torch.autograd.grad(causal_attention(query, key, leaf), leaf, grad)
    assert torch.equal(ours, gradients(query, key, value, grad)[3])


@needs_kernels
def test_a_default_device_does_not_move_what_the_kernels_work_in() -> None:
    made = inputs(1, 2, 40, 16)
    expected = gradients(*made)
    order, piece, rows = order_of(torch.float32, 288), pieces.piece(), fewest_rows(torch.float32)
    for asked in (decode_attention.piece_of, pieces.piece, order_of, fewest_rows):
        asked.cache_clear()  # what PyTorch is asked is asked again
    with torch.device("meta"):
        assert all(map(torch.equal, gradients(*made), expected))
        assert order_of(torch.float32, 288) == order
        assert pieces.piece() == piece
        assert fewest_rows(torch.float32) == rows


def test_on_gpus_pytorch_makes_no_plan_for_each_shape() -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        dispatch.leave_out_cudnn(torch.empty(1))
        on_a_cpu = torch.backends.cuda.cudnn_sdp_enabled()
        with FakeTensorMode():
            dispatch.leave_out_cudnn(torch.empty(1, device="cuda:0"))
        on_a_gpu = torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)

    assert (on_a_cpu, on_a_gpu) == (True, False)
