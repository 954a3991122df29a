"""Offloaded gradients go to main memory beside the backward pass, and nobody waits for them in it.

A stream that does its work as late as it may stands in for a GPU's: what is not waited for has not
been done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pipeline.engine import buffers
from pipeline.engine.engine import Engine
from pipeline.engine.gradient_sums import OffloadedSum
from pipeline.engine.side_stream import AT_ONCE, GradientCopies, gradient_copies
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_device import settings
from tests.pipeline.engine.test_stages import build, loss_of


class LateStream:
    """Does its work when somebody waits for it, and no sooner."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = self.given = self.holds = self.synchronized = 0
        self.longest = 0

    def run(self, work: Callable[[], object]) -> "LateMark":
        self.queue.append(work)
        self.given += 1
        self.longest = max(self.longest, len(self.queue))
        return LateMark(self, self.given)

    def go_on(self, until: int) -> None:
        while self.done < until:
            self.queue.pop(0)()
            self.done += 1


class LateMark:
    """A moment of a late stream."""

    def __init__(self, stream: LateStream, number: int) -> None:
        self.stream, self.number = stream, number

    def hold_computation(self) -> None:
        self.stream.holds += 1
        self.stream.go_on(self.number)

    def synchronize(self) -> None:
        self.stream.synchronized += 1
        self.stream.go_on(self.number)

    def has_come(self) -> bool:
        return self.stream.done >= self.number


@contextmanager
def late_streams() -> Iterator[list[LateStream]]:
    """Engines that are built inside have them; grows with each."""
    made: list[LateStream] = []

    def copies(device: torch.device) -> GradientCopies:
        del device
        made.append(LateStream())
        return GradientCopies(made[-1])

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(buffers, "gradient_copies", copies)
        yield made


def trained(
    stage: int, precision: str, reduction: str, *, offloads: bool
) -> tuple[dict[str, Tensor], list[int]]:
    """Weights after two steps of three micro-batches, and how often the host waited in each."""
    model = build("llama", precision, num_hidden_layers=4)
    offload = {"gradients": "cpu"} if offloads else {}
    with late_streams() as streams:
        engine = Engine(model, settings(stage, reduction=reduction, **offload), total_steps=2)
    (stream,) = streams
    waits: list[int] = []
    for step in range(2):
        before = stream.synchronized
        for micro_batch in range(3):
            engine.backward(loss_of(engine.model, step, micro_batch, rank()))
            assert stream.longest <= AT_ONCE
        waits.append(stream.synchronized - before)
        engine.step()
    assert (stream.given > 0) is offloads
    with engine.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}, waits


def of_all(reduction: str) -> list[str]:
    wrong: list[str] = []
    for stage, precision in ((0, "fp32"), (3, "bf16")):
        expected, _ = trained(stage, precision, reduction, offloads=False)
        got, waits = trained(stage, precision, reduction, offloads=True)
        if any(not torch.equal(got[name], expected[name]) for name in expected):
            wrong.append(f"stage {stage}: other weights")
        if reduction == "fast" and waits != [0, 0]:
            wrong.append(f"stage {stage}: the host waited {waits} times in the backward passes")
    return wrong


@pytest.mark.parametrize("reduction", ["fast", "deterministic"])
def test_the_weights_are_those_of_sums_on_the_device_and_no_backward_pass_waits(
    reduction: str,
) -> None:
    assert run_ranks(of_all, reduction) == [[], []]


def test_a_gradient_may_change_once_it_has_been_read_and_no_sooner() -> None:
    stream = LateStream()
    found = OffloadedSum(lambda: torch.empty(3), GradientCopies(stream))
    first, second, third = (torch.full((3,), value) for value in (1.0, 2.0, 4.0))

    found.add(first)
    assert found.read is not None
    assert not found.read.has_come()
    found.add(second)
    found.add(third)  # one too many at once: the computation waits for the first
    assert (stream.holds, stream.synchronized, stream.done) == (1, 0, 1)
    first.zero_()

    assert torch.equal(found.finish(), torch.full((3,), 7.0))
    assert stream.synchronized == 1
    found.add(second)
    found.clear()
    assert (found.empty, stream.done) == (True, 4)


@pytest.mark.gpu
def test_the_host_goes_on_while_gradients_leave_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    copies = gradient_copies(device)
    assert copies is not None
    found = OffloadedSum(lambda: torch.empty(2**22, pin_memory=True), copies)
    gradients = [torch.full((2**22,), float(value), device=device) for value in (1, 2, 3)]

    torch.cuda._sleep(500_000_000)
    for gradient in gradients:
        found.add(gradient)
    assert found.read is not None
    assert not found.read.has_come()
    found.read.hold_computation()
    for gradient in gradients:
        gradient.zero_()

    assert torch.equal(found.finish(), torch.full((2**22,), 6.0))
