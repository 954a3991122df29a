"""Decoding passes repeated without the Python code of the modules."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.engine.cache import NextToken
from pipeline.models.attention import Layout

Pass = Callable[[Int[Tensor, "4 N"], Layout], Float[Tensor, "N V"]]
"""A forward pass of the modules over tokens, positions, places in the cache, and adapters."""

Column = tuple[int, int, int, int]
"""A token, its position, its place in the cache, and the number of its adapter, 0 for none."""


class ReplayError(Exception):
    """A pass can't be repeated without its modules; the message is a clause with the reason."""


@dataclass
class PassCounts:
    """Number of passes of a batch, by how they were computed."""

    prefill: int = 0
    """Passes over prompts."""

    by_modules: int = 0
    """Decoding passes by the model's modules."""

    replayed: int = 0
    """Decoding passes from a trace or a graph."""

    refused: int = 0
    """Recordings that failed, or did not repeat the modules' logits."""

    @property
    def share_replayed(self) -> float:
        """Share of replayed passes in all decoding passes; 0 without any."""
        return self.replayed / max(1, self.replayed + self.by_modules)


class Stage(Enum):
    """What the next pass of a size does."""

    MODULES = auto()
    """Run the modules: a batch of one or two tokens has no use for more."""

    RECORD = auto()
    VERIFY = auto()
    REPLAY = auto()


class ReplayedRows(ABC):
    """Passes of one number of rows: recorded in the second, verified in the third, then replayed.

    The first three return the logits of the modules.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.stage = Stage.MODULES

    def run(self, columns: Sequence[Column], layout: NextToken) -> Float[Tensor, "N V"]:
        """Return the logits of the rows, in memory that the next pass may use again.

        Args:
            columns: of each row; those beyond the rows of `layout` are padding.
            layout: attention of the rows.

        Raises:
            ReplayError: the modules' pass can't be repeated.
        """
        self._take(columns, layout)
        if self.stage is Stage.REPLAY:
            return self._replay()
        if self.stage is Stage.MODULES:
            self.stage = Stage.RECORD
            return self._by_modules()
        try:
            if self.stage is Stage.RECORD:
                self.stage = Stage.VERIFY
                return self._record()
            self.stage = Stage.REPLAY
            return self._verify(len(layout.lengths))
        except ReplayError:
            raise
        except Exception as error:
            sentence = str(error).strip().partition("\n")[0]
            raise ReplayError(f"{type(error).__name__}: {sentence}") from error

    def _verify(self, num_live: int) -> Float[Tensor, "N V"]:
        """Compute the pass both ways, which must agree up to rounding.

        A recording may add in another order than the modules: cuBLAS chooses other kernels on the
        stream of a capture, and a kernel may replace a product.
        """
        expected = self._by_modules()
        difference = relative_difference(self._replay()[:num_live], expected[:num_live])
        # Half of a dtype's digits: 3.5e-4 in fp32, 0.09 in bf16. False for NaN.
        if not difference <= torch.finfo(expected.dtype).eps ** 0.5:
            raise ReplayError(
                "the recording does not repeat its modules: logits differ by"
                f" {difference:.1g} of the largest"
            )
        return expected

    @abstractmethod
    def _take(self, columns: Sequence[Column], layout: NextToken) -> None:
        """Copy the inputs of the next pass into the tensors that a repetition reads."""

    @abstractmethod
    def _by_modules(self) -> Float[Tensor, "N V"]:
        """Run the modules."""

    @abstractmethod
    def _record(self) -> Float[Tensor, "N V"]:
        """Run the modules, and record how to repeat the pass."""

    @abstractmethod
    def _replay(self) -> Float[Tensor, "N V"]:
        """Repeat the pass without the modules."""


def relative_difference(ours: Float[Tensor, "N V"], expected: Float[Tensor, "N V"]) -> float:
    """Return the largest difference as a share of the largest number."""
    difference = (ours.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp(min=1e-30))
