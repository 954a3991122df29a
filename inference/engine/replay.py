"""Decoding passes that are repeated without the Python of the modules they came from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto

from jaxtyping import Float, Int
from torch import Tensor

from inference.engine.cache import NextToken
from pipeline.models.attention import Layout

Pass = Callable[[Int[Tensor, "3 N"], Layout], Float[Tensor, "N V"]]
"""A forward pass of the modules over tokens, their positions and their places in the cache."""

Column = tuple[int, int, int]
"""A token, its position and its place in the cache."""


class RepeatError(Exception):
    """A pass can't be repeated without its modules; the message is a clause that says why."""


class Stage(Enum):
    """What the next pass of its size does."""

    MODULES = auto()
    """Whoever decodes a token or two has no use for more."""

    WRITE = auto()
    PROVE = auto()
    REPEAT = auto()


class Repeated(ABC):
    """Passes of one number of rows: what the modules do is written down, proved, and repeated."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.stage = Stage.MODULES

    def run(self, columns: Sequence[Column], layout: NextToken) -> Float[Tensor, "N V"]:
        """The logits of the rows, in memory that the next pass may use again.

        Args:
            columns: of each row; those beyond the sequences of `layout` are padding.
            layout: what each sequence sees.

        Raises:
            RepeatError: the modules do what can't be repeated.
        """
        self._take(columns, layout)
        if self.stage is Stage.MODULES:
            self.stage = Stage.WRITE
            return self._by_modules()
        if self.stage is Stage.REPEAT:
            return self._repeat()
        try:
            if self.stage is Stage.WRITE:
                self.stage = Stage.PROVE
                return self._write()
            self.stage = Stage.REPEAT
            return self._prove()
        except RepeatError:
            raise
        except Exception as error:  # whatever it is, the modules may still do
            sentence = str(error).strip().partition("\n")[0]
            raise RepeatError(f"{type(error).__name__}: {sentence}") from error

    @abstractmethod
    def _take(self, columns: Sequence[Column], layout: NextToken) -> None:
        """Have the next pass read these."""

    @abstractmethod
    def _by_modules(self) -> Float[Tensor, "N V"]:
        """The pass by the modules."""

    @abstractmethod
    def _write(self) -> Float[Tensor, "N V"]:
        """The pass, and how to repeat it."""

    @abstractmethod
    def _prove(self) -> Float[Tensor, "N V"]:
        """The pass both ways, which must agree to the bit."""

    @abstractmethod
    def _repeat(self) -> Float[Tensor, "N V"]:
        """The pass without the modules."""
