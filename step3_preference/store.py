"""The rows that are learned from: those that fit, as token ids."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.sharing.steps import StageData
from pipeline.errors import DataError
from pipeline.parallel.mesh import current_mesh
from step3_preference.config import PreferenceConfig
from step3_preference.rows import Fate, Row, fit

logger = logging.getLogger(__name__)

KEPT_TOKENS = 2**25
"""Of the rows that stay encoded, at five bytes each; further ones are encoded as they come."""


@dataclass(frozen=True)
class Packed:
    """A sequence in little memory."""

    input_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, side: Encoded | None) -> "Packed | None":
        """The sequence, where there is one."""
        if side is None:
            return None
        return cls(np.array(side.input_ids, np.int32), np.array(side.trained, np.bool_))

    def whole(self) -> Encoded:
        """The sequence, unpacked."""
        return Encoded(self.input_ids.tolist(), self.trained.tolist())


Sides = tuple[Packed | None, Packed | None]


class RowStore:
    """The step's training and held-out rows, without those that teach nothing or don't fit."""

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.held_out: list[Row] = []
        self._packed: list[Sides | None] = []

    def sift(self, data: StageData, chat: ChatFormat) -> StageData:
        """The rows that can be learned from, which the store has from then on; all call it.

        Raises:
            DataError: none is left to train on, or to evaluate; or of kto's responses all are good,
                or all bad.
        """
        self._chat = chat
        fates, self._packed = self._look("training", data.train)
        held_fates, _ = self._look("held-out", data.eval)
        kept = [self._kept(data.train, fates), self._kept(data.eval, held_fates)]
        if self.config.is_unpaired:
            for name, examples in zip(("training", "held-out"), kept, strict=True):
                _require_both(name, examples)
        self._examples, evaluated = kept
        self.held_out = [fit(example, chat, self.config)[0] for example in evaluated]
        return replace(data, train=kept[0], eval=evaluated)

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def num_good(self) -> int:
        """Training rows with a chosen response: of kto the good ones."""
        return sum(bool(example.chosen) for example in self._examples)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The training rows of these numbers."""
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> Row:
        packed = self._packed[number]
        if packed is None:
            return fit(self._examples[number], self._chat, self.config)[0]
        return Row(*(each and each.whole() for each in packed))

    def _look(
        self, name: str, examples: Sequence[Example]
    ) -> tuple[list[Fate], list[Sides | None]]:
        """What becomes of each example, and those that stay, packed; each process sees a share."""
        data = current_mesh().data
        room = KEPT_TOKENS // data.size
        mine: list[tuple[Fate, Sides | None]] = []
        for number in range(data.rank, len(examples), data.size):
            row, fate = fit(examples[number], self._chat, self.config)
            room -= row.num_tokens
            stays = fate in ("whole", "cut") and room > 0
            mine.append((fate, (Packed.of(row.chosen), Packed.of(row.rejected)) if stays else None))
        everyones = data.gather_objects(mine)
        found: list[tuple[Fate, Sides | None]] = [
            everyones[row % data.size][row // data.size] for row in range(len(examples))
        ]
        fates: list[Fate] = [fate for fate, _ in found]
        _report(name, Counter(fates), len(examples), self.config)
        return fates, [sides for fate, sides in found if fate in ("whole", "cut")]

    def _kept(self, examples: Sequence[Example], fates: Sequence[Fate]) -> list[Example]:
        pairs = zip(examples, fates, strict=True)
        return [example for example, fate in pairs if fate in ("whole", "cut")]


def check_learnable(
    train: Sequence[Example],
    held_out: Sequence[Example],
    chat: ChatFormat,
    config: PreferenceConfig,
) -> None:
    """Return as soon as `RowStore.sift` would find rows to train on, and to evaluate.

    Raises:
        DataError: as `RowStore.sift`.
    """
    for name, examples in (("training", train), ("held-out", held_out)):
        fates, kept, kinds = Counter[Fate](), list[Example](), set[bool]()
        for example in examples:
            _, fate = fit(example, chat, config)
            fates[fate] += 1
            if fate in ("whole", "cut"):
                kept.append(example)
                kinds.add(bool(example.chosen))
            if len(kinds) == (2 if config.is_unpaired else 1):
                break
        else:
            _require_some(name, fates, len(examples), config)
            _require_both(name, kept)


def _report(name: str, fates: Counter[Fate], number: int, config: PreferenceConfig) -> None:
    _require_some(name, fates, number, config)
    limit, reasons = config.data.max_length, _left_out(fates)
    if fates["cut"] or reasons:
        logger.info(
            "of %d %s rows %d lose the beginning of their prompt at %d tokens; left out: %s",
            *(number, name, fates["cut"], limit, reasons or "none"),
        )


def _left_out(fates: Counter[Fate]) -> str:
    """How many rows are left out, and why, in words."""
    out = {
        "don't fit": fates["too long"],
        "have equal responses": fates["equal"],
        "have a response without a learned token": fates["untrained"],
    }
    return ", ".join(f"{count} {why}" for why, count in out.items() if count)


def _require_some(name: str, fates: Counter[Fate], number: int, config: PreferenceConfig) -> None:
    if not fates["whole"] + fates["cut"]:
        limit = f" at data.max_length {config.data.max_length}; raise it, or see the rows"
        raise DataError(
            f"none of the {number} {name} rows can be learned from: {_left_out(fates)}"
            f"{limit if fates['too long'] else '; see them'} with `python -m pipeline.data.inspect`"
        )


def _require_both(name: str, examples: Sequence[Example]) -> None:
    good = sum(bool(each.chosen) for each in examples)
    if good in (0, len(examples)):
        missing = "good" if good == 0 else "bad"
        raise DataError(
            f"none of the {len(examples)} {name} responses is {missing}: kto learns from pairs, or"
            " from responses of which a column label says true or false"
        )
