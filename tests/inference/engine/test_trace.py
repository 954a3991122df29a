"""What a trace replays, leaves out and refuses."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from inference.engine.replay import ReplayError
from inference.engine.trace import OperatorTrace, TraceRecorder


def written(compute: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> OperatorTrace:
    with torch.inference_mode(), TraceRecorder() as recorder:
        result = compute()
    return OperatorTrace(recorder.calls, inputs, result)


def repeated(trace: OperatorTrace) -> torch.Tensor:
    with torch.inference_mode():
        return trace.replay().clone()


def test_it_computes_again_from_what_the_inputs_hold() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)

    def compute() -> torch.Tensor:
        hidden = F.silu(F.linear(x, weight, bias))
        left, right = hidden[:, :2], hidden[:, 2:4].mul(0.5)
        return torch.cat((left, -right), dim=-1).transpose(0, 1).reshape(-1) + 1

    trace = written(compute, x)
    first = repeated(trace)
    x.copy_(torch.randn(3, 4))

    assert torch.equal(repeated(trace), compute())
    assert not torch.equal(repeated(trace), first)


def test_what_depends_on_no_input_is_computed_once() -> None:
    x = torch.randn(3)
    angles = torch.arange(3.0)
    trace = written(lambda: x * angles.cos(), x)
    expected = x * angles.cos()

    angles.zero_()

    assert torch.equal(repeated(trace), expected)


def test_what_nobody_reads_is_left_out() -> None:
    x = torch.ones(3)

    def compute() -> torch.Tensor:
        (x.exp() + x).sum()
        return x * 2

    with torch.inference_mode(), TraceRecorder() as recorder:
        result = compute()

    assert len(recorder.calls) == 4
    assert len(OperatorTrace(recorder.calls, [x], result)) == 1


def test_memory_from_outside_is_changed_each_time() -> None:
    places, cache = torch.tensor([1]), torch.zeros(4)

    def compute() -> torch.Tensor:
        cache.index_copy_(0, places, torch.ones(1))
        return cache.cumsum(0)

    trace = written(compute, places)
    places.fill_(3)

    assert repeated(trace).tolist() == [0, 1, 1, 2]
    assert cache.tolist() == [0, 1, 0, 1]


def test_what_is_computed_outside_is_asked_for_again() -> None:
    x, factors = torch.tensor([3.0]), iter((2.0, 5.0, 7.0))

    def times(out: torch.Tensor | None) -> torch.Tensor:
        product = x * next(factors)
        return product if out is None else out.copy_(product)

    with torch.inference_mode(), TraceRecorder() as recorder:
        result = recorder.outside(times, [x]) + 1
    trace = OperatorTrace(recorder.calls, [x], result)

    assert result.tolist() == [7]
    assert repeated(trace).tolist() == [16]
    x.fill_(1)
    assert repeated(trace).tolist() == [8]


def test_a_call_may_be_done_another_way() -> None:
    x = torch.tensor([3.0])

    with torch.inference_mode(), TraceRecorder() as recorder:
        result = (x * 2) + 1
    made = recorder.calls[0].made[0]
    trace = OperatorTrace(
        recorder.calls,
        [x],
        result,
        lambda call: (lambda: made.fill_(10)) if call.name == "mul" else None,
    )

    assert repeated(trace).tolist() == [11]


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x * x.max().item(), "hands a number to Python"),
        (lambda x: x + 1 if x.sum() > 0 else x, "hands a number to Python"),
        (lambda x: x * x.tolist()[0], "tolist hands numbers to Python"),
        (lambda x: x * float(x.numpy()[0]), "numpy hands numbers to Python"),
        (lambda x: x + torch.rand_like(x), "rand_like can't be repeated"),
        (lambda x: F.dropout(x, training=True), "can't be repeated"),
        (lambda x: x[x > 0], "the size of the result of index depends on numbers"),
        (lambda x: x.nonzero(), "the size of the result of nonzero depends on numbers"),
        (lambda x: x.to("meta"), "to copies between the host and a device"),
    ],
)
def test_what_can_not_be_repeated_is_refused(
    compute: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    x = torch.ones(3)

    with pytest.raises(ReplayError, match=reason):
        written(lambda: compute(x), x)
