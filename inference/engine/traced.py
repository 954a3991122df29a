"""Decoding passes on the CPU, from traces of what the modules do.

A trace is verified before it is trusted: it has to repeat the modules' next pass to the bit. Then
kernels take over products of few rows, whose rounding may be another, and are verified by the same
pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.engine.cache import NextToken, prepare_attention
from inference.engine.pieces import StepLayout
from inference.engine.replay import (
    Column,
    Pass,
    ReplayedRows,
    ReplayError,
    is_rounding,
    relative_difference,
)
from inference.engine.trace import Call, OperatorTrace, Replay, TraceRecorder, memory
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.linear.dispatch import Linear, prepare

Again = Callable[[StepLayout], object]
"""Attention into the memory of a trace, as the layout at hand has it."""


class CurrentLayout:
    """The layout that modules are given: asks the one of the pass at hand, on and off a trace."""

    def __init__(self) -> None:
        self.layout: StepLayout | None = None
        self.recorder: TraceRecorder | None = None

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
        """Attention as the layout of the pass has it."""
        again: Again | None = None

        def attend(layout: StepLayout, out: Tensor | None = None) -> Tensor:
            return layout.attend(
                query,
                key,
                value,
                scaling=scaling,
                sliding_window=sliding_window,
                dropout=dropout,
                out=out,
            )

        def compute(out: Tensor | None) -> Tensor:
            nonlocal again
            assert self.layout is not None
            if out is None:
                return attend(self.layout)
            if again is None:  # what the tensors are is looked at once
                prepared = None
                if isinstance(self.layout, NextToken):
                    prepared = prepare_attention(
                        query, key, value, out, scaling=scaling, sliding_window=sliding_window
                    )
                again = cast("Again | None", prepared) or partial(attend, out=out)
            again(self.layout)
            return out

        if self.recorder is None:
            return compute(None)
        return self.recorder.outside(compute, [query, key, value])


class TracedRows(ReplayedRows):
    """Passes of one number of rows from a trace, products of few rows by a kernel of ours."""

    def __init__(self, modules: Pass, num_rows: int) -> None:
        super().__init__(num_rows)
        self._modules = modules
        self._inputs: Int[Tensor, "4 N"] = torch.zeros(4, num_rows, dtype=torch.long)
        self._layout = CurrentLayout()
        self._calls: list[Call] = []
        self._result: Float[Tensor, "N V"] | None = None
        self._products: list[Linear] = []
        self._head: Linear | None = None
        """The product that is the result: of rows that nobody reads it isn't computed."""
        self._trace: OperatorTrace | None = None

    def _take(self, columns: Sequence[Column], layout: StepLayout) -> None:
        self._inputs.copy_(torch.tensor(columns).T)
        self._layout.layout = layout

    def _by_modules(self) -> Float[Tensor, "N V"]:
        return self._modules(self._inputs, self._layout)

    def _record(self) -> Float[Tensor, "N V"]:
        recorder = self._layout.recorder = TraceRecorder()
        try:
            with recorder:
                self._result = self._by_modules()
        finally:
            self._layout.recorder = None
        self._calls = recorder.calls
        return self._result.clone()  # what comes next makes use of its memory

    def _verify(self) -> Float[Tensor, "N V"]:
        """Replay by the modules' own operators, then give products to the kernel."""
        assert self._result is not None
        expected = self._by_modules()
        self._trace = OperatorTrace(self._calls, [self._inputs], self._result)
        self._calls = []
        if not torch.equal(self._trace.replay(), expected):
            raise ReplayError("its modules do not do the same in each pass")
        self._trace.substitute(self._product)
        assert self._layout.layout is not None
        live = slice(self._layout.layout.num_read)
        self.difference = relative_difference(self._replay()[live], expected[live])
        if not is_rounding(self.difference, expected.dtype):
            raise ReplayError("a kernel's products are not those of its modules")
        return expected

    def _replay(self) -> Float[Tensor, "N V"]:
        layout = self._layout.layout
        assert self._trace is not None
        assert layout is not None
        for product in self._products:
            product.take(layout.num_rows)
        if self._head is not None:
            self._head.take(layout.num_read)
        return self._trace.replay()

    def _product(self, call: Call) -> Replay | None:
        """A product of few rows by the kernel, if it supports the tensors."""
        if kernel_mode() == "off" or len(call.made) != 1 or call.kwargs:
            return None
        if call.made[0].shape[:-1].numel() != self._inputs.shape[1]:
            return None  # not one row for each token: which of them count is not known
        linear = None
        if call.name == "linear":
            x, weight, *bias = call.args
            linear = prepare(x, weight, bias[0] if bias else None, call.made[0])
        elif call.name == "addmm":  # transformers' Conv1D, of GPT-2
            bias, x, weight = call.args
            linear = prepare(x, weight.mT, bias, call.made[0])
        if linear is not None:
            self._products.append(linear)
            assert self._result is not None
            if memory(call.made[0]) == memory(self._result):
                self._head = linear
        return linear
