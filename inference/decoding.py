"""Decoding passes: through the model's modules, and on the CPU soon from a tape of what they do.

A pass on the CPU has more rows than it needs, so that few tapes serve all batches; what a row says
does not depend on the others. Each tape is proved before it is trusted: it has to repeat the
modules' next pass to the bit.
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.slots import NextToken
from inference.tape import Call, Repeat, Tape, TapeError, Writer
from pipeline.kernels.choice import chosen
from pipeline.kernels.cpu.linear import Linear, is_built, prepare
from pipeline.models.attention import Layout, round_up

logger = logging.getLogger(__name__)

FEWEST = 4
"""Rows of a pass on the CPU. Products of fewer are rounded otherwise than those of training, which
have many; where a kernel of ours has the same bits, it computes no more rows than are asked for."""

Pass = Callable[[Int[Tensor, "3 N"], Layout], Float[Tensor, "N V"]]
"""A forward pass of the modules over tokens, their positions and their places in the cache."""


class Stage(Enum):
    """What the next pass of so many rows does."""

    MODULES = auto()
    """Whoever decodes a token or two needs no tape."""

    WRITE = auto()
    PROVE = auto()
    REPEAT = auto()


class Asked:
    """The layout that modules are given: asks the one of the pass at hand, on and off a tape."""

    def __init__(self) -> None:
        self.layout: NextToken | None = None
        self.writer: Writer | None = None

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

        def compute(out: Tensor | None) -> Tensor:
            assert self.layout is not None
            return self.layout.attend(
                query,
                key,
                value,
                scaling=scaling,
                sliding_window=sliding_window,
                dropout=dropout,
                out=out,
            )

        if self.writer is None:
            return compute(None)
        return self.writer.outside(compute, [query, key, value])


class Rows:
    """Passes of one number of rows, and their tape."""

    def __init__(self, num_rows: int, asked: Asked) -> None:
        self.inputs: Int[Tensor, "3 N"] = torch.zeros(3, num_rows, dtype=torch.long)
        self.stage = Stage.MODULES
        self._asked = asked
        self._calls: list[Call] = []
        self._result: Float[Tensor, "N V"] | None = None
        self._products: list[Linear] = []
        self._tape: Tape | None = None

    def run(self, modules: Pass, num_live: int) -> Float[Tensor, "N V"]:
        """The logits of what `inputs` holds; those of the first `num_live` rows count.

        Raises:
            TapeError: the modules do what can't be repeated.
        """
        if self.stage is Stage.MODULES:
            self.stage = Stage.WRITE
            return modules(self.inputs, self._asked)
        if self.stage is Stage.WRITE:
            return self._write(modules)
        if self.stage is Stage.PROVE:
            return self._prove(modules)
        assert self._tape is not None
        for product in self._products:
            product.take(num_live)
        return self._tape.replay()

    def _write(self, modules: Pass) -> Float[Tensor, "N V"]:
        writer = self._asked.writer = Writer()
        try:
            with writer:
                self._result = modules(self.inputs, self._asked)
        finally:
            self._asked.writer = None
        self._calls = writer.calls
        self.stage = Stage.PROVE
        return self._result.clone()  # what comes next makes use of its memory

    def _prove(self, modules: Pass) -> Float[Tensor, "N V"]:
        """Repeat by the modules' own operators, then give products to the kernel."""
        assert self._result is not None
        expected = modules(self.inputs, self._asked)
        if not torch.equal(Tape(self._calls, [self.inputs], self._result).replay(), expected):
            raise TapeError("its modules do not do the same in each pass")
        self._tape = Tape(self._calls, [self.inputs], self._result, substitute=self._product)
        self._calls = []
        self.stage = Stage.REPEAT
        return expected

    def _product(self, call: Call) -> Repeat | None:
        """A product of few rows by the kernel, if it has the bits that products of many have."""
        if chosen() == "off" or len(call.made) != 1 or call.kwargs:
            return None
        linear = None
        if call.name == "linear":
            x, weight, *bias = call.args
            linear = prepare(x, weight, bias[0] if bias else None, call.made[0])
        elif call.name == "addmm":  # transformers' Conv1D, of GPT-2
            bias, x, weight = call.args
            linear = prepare(x, weight.mT, bias, call.made[0])
        if linear is not None:
            self._products.append(linear)
        return linear


class Decoder:
    """Decodes one token of each running sequence at a time.

    Args:
        modules: a pass through the model.
        dtype: of the model.
        device: of the model.
        tapes: whether they may be written, on a CPU: modules whose Python does more than compute,
            with other processes or for somebody who watches, must run each time.
    """

    def __init__(
        self, modules: Pass, *, dtype: torch.dtype, device: torch.device, tapes: bool
    ) -> None:
        self._modules = modules
        self._dtype = dtype
        self._device = device
        self._tapes = tapes and device.type == "cpu"
        self._asked = Asked()
        self._rows: dict[int, Rows] = {}

    def __call__(
        self, columns: Sequence[tuple[int, int, int]], layout: NextToken, *, spare: int
    ) -> Float[Tensor, "B V"]:
        """The logits after each token.

        Args:
            columns: of each sequence the token, its position and its place in the cache.
            layout: what each of them sees.
            spare: a place in the cache that nobody reads.
        """
        count = len(columns)
        num_rows = self._num_rows(count)
        padded = [*columns, *[(columns[-1][0], 0, spare)] * (num_rows - count)]
        inputs = torch.tensor(padded).T
        if not self._tapes:
            return self._modules(inputs.contiguous().to(self._device), layout)[:count]
        rows = self._rows.get(num_rows)
        if rows is None:
            rows = self._rows[num_rows] = Rows(num_rows, self._asked)
        rows.inputs.copy_(inputs)
        self._asked.layout = layout
        try:
            return rows.run(self._modules, count)[:count]
        except TapeError as reason:
            logger.info("decoding goes through the model's modules each time: %s", reason)
            self._tapes = False
            self._rows.clear()
            return self._modules(rows.inputs, layout)[:count]

    def _num_rows(self, count: int) -> int:
        if self._device.type != "cpu":
            return count
        if not self._tapes:
            return 1 if count == 1 else round_up(count, FEWEST)
        fewest = FEWEST if count > 1 or is_built(self._dtype) else 1
        return max(fewest, 1 << (count - 1).bit_length())
