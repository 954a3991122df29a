"""What a kind of label makes of rows: what is encoded, a loss, and figures of held-out rows.

Dimension name: S sequences of a micro-batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from pipeline.data.batches import TokenBatch
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.lengths import RowsFit
from pipeline.models.forward import LabelOutputs, Scorer
from pipeline.models.scores import Cutpoints
from pipeline.parallel.device import local_device
from step2_reward.config import RewardConfig
from step2_reward.label_rows import Labels


@runtime_checkable
class Row(Protocol):
    """A row as token ids."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences."""
        ...


@runtime_checkable
class Batch(Protocol):
    """Rows of a micro-batch."""

    @property
    def tokens(self) -> TokenBatch:
        """Their S sequences."""
        ...


R = TypeVar("R", bound=Row)
B = TypeVar("B", bound=Batch)


class Objective(ABC, Generic[R, B]):
    """One kind of label, for the loop that is the same for all."""

    counts_right = True
    """Whether rows can be right or wrong one by one."""

    def __init__(self, labels: Labels, config: RewardConfig) -> None:
        self.labels = labels
        self.config = config
        """With the settings of the loss."""

    def cutpoints(self) -> Cutpoints | None:
        """Thresholds that are learned with the score, where the labels need some."""
        return None

    @abstractmethod
    def rows_fit(self, chat: ChatFormat, config: RewardConfig) -> RowsFit[Example]:
        """What of a row is left to learn where it is cut.

        Raises:
            DataError: the format can't have such rows.
        """

    @abstractmethod
    def encode(
        self, examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
    ) -> list[R]:
        """Token ids and targets of rows."""

    @abstractmethod
    def sequences(self, row: R) -> tuple[Encoded, ...]:
        """The dialogues of a row."""

    @abstractmethod
    def cut(self, rows: Sequence[R], config: RewardConfig) -> list[B]:
        """This process's micro-batches of the rows."""

    def settings(self) -> dict[str, object]:
        """What else the exported model's config.json says of how its outputs are read."""
        return {}

    def places(self, batch: B) -> Tensor:
        """The tokens of a batch whose outputs `loss` takes: the last of each sequence."""
        return batch.tokens.last_tokens

    @abstractmethod
    def loss(self, outputs: LabelOutputs, batch: B) -> tuple[Tensor, Tensor | None]:
        """The loss summed over rows, and how many rows are right, where one by one they can be.

        Args:
            outputs: of the S sequences, or of `places`.
            batch: the rows.
        """

    @abstractmethod
    def evaluate(self, scorer: Scorer, rows: Sequence[R], config: RewardConfig) -> dict[str, float]:
        """Figures of held-out rows of all processes, loss and accuracy first."""


def start_cutpoints(values: Sequence[float], *, positive: bool = False) -> Cutpoints:
    """Cutpoints of this process's device that begin at `values`."""
    return Cutpoints(values, device=local_device(), positive=positive)
