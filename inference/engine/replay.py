"""Decoding passes that are repeated without the Python of the modules they came from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.engine.pieces import StepLayout
from pipeline.models.attention import Layout

Pass = Callable[[Int[Tensor, "4 N"], Layout], Float[Tensor, "N V"]]
"""A forward pass of the modules over tokens, their positions, their places in the cache and their
adapters."""

Column = tuple[int, int, int, int]
"""A token, its position, its place in the cache, and the number of its adapter, 0 for none."""


class ReplayError(Exception):
    """A pass can't be repeated without its modules; the message is a clause that says why."""


@dataclass
class PassCounts:
    """How the decoding passes of a batch were computed."""

    by_modules: int = 0
    replayed: int = 0
    exact: int = 0
    """Recordings that repeated the modules' pass to the bit."""

    rounded: int = 0
    """Recordings that repeated it up to rounding."""

    refused: int = 0
    """Recordings that could not be made, or that gave other logits than the modules."""

    @property
    def share_replayed(self) -> float:
        """The share of replayed passes in all passes; 0 where there was none."""
        return self.replayed / max(1, self.replayed + self.by_modules)


class Stage(Enum):
    """What the next pass of its size does."""

    MODULES = auto()
    """Whoever decodes a token or two has no use for more."""

    RECORD = auto()
    VERIFY = auto()
    REPLAY = auto()


class ReplayedRows(ABC):
    """Passes of one number of rows: what the modules do is recorded, verified, and replayed."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.stage = Stage.MODULES
        self.difference = 0.0
        """From the modules' pass that verified it, as `relative_difference` has it."""

    def run(self, columns: Sequence[Column], layout: StepLayout) -> Float[Tensor, "N V"]:
        """The logits of the rows, in memory that the next pass may use again.

        Args:
            columns: of each row; those beyond the rows of `layout` are padding.
            layout: what each row sees.

        Raises:
            ReplayError: the modules do what can't be repeated.
        """
        self._take(columns, layout)
        if self.stage is Stage.MODULES:
            self.stage = Stage.RECORD
            return self._by_modules()
        if self.stage is Stage.REPLAY:
            return self._replay()
        try:
            if self.stage is Stage.RECORD:
                self.stage = Stage.VERIFY
                return self._record()
            self.stage = Stage.REPLAY
            return self._verify()
        except ReplayError:
            raise
        except Exception as error:  # whatever it is, the modules may still do
            sentence = str(error).strip().partition("\n")[0]
            raise ReplayError(f"{type(error).__name__}: {sentence}") from error

    @abstractmethod
    def _take(self, columns: Sequence[Column], layout: StepLayout) -> None:
        """Copy what the next pass reads into the tensors that a repetition reads from."""

    @abstractmethod
    def _by_modules(self) -> Float[Tensor, "N V"]:
        """The pass by the modules."""

    @abstractmethod
    def _record(self) -> Float[Tensor, "N V"]:
        """The pass, and how to repeat it."""

    @abstractmethod
    def _verify(self) -> Float[Tensor, "N V"]:
        """The pass both ways, which must agree."""

    @abstractmethod
    def _replay(self) -> Float[Tensor, "N V"]:
        """The pass without the modules."""


def relative_difference(ours: Float[Tensor, "N V"], expected: Float[Tensor, "N V"]) -> float:
    """The largest difference, as a share of the largest number; 0 where all bits agree."""
    if torch.equal(ours, expected):
        return 0.0
    difference = (ours.double() - expected.double()).abs().max()
    return float(difference / expected.abs().max())


def is_rounding(difference: float, dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype that differ by so much may differ by rounding alone.

    That is less than half of a dtype's digits: 3.5e-4 in fp32, 0.09 in bf16. False for NaN.
    """
    return difference <= torch.finfo(dtype).eps ** 0.5
