"""Process rewards: each step of a response is right or wrong, and is predicted where it ends.

Dimension names: E labelled step ends of a micro-batch, M of all held-out rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline import offline
from pipeline.data.batches import TokenBatch, collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.lengths import Fit, RowsFit
from pipeline.errors import DataError
from pipeline.models.forward import LabelOutputs, Scorer
from pipeline.models.scores import separator_ids, step_ends
from pipeline.models.trained import evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step2_reward.config import RewardConfig
from step2_reward.lab.figures import PredictedSteps, step_figures
from step2_reward.label_rows import Labels
from step2_reward.losses import binary_cross_entropy
from step2_reward.objective import Objective


@dataclass(frozen=True)
class StepRow:
    """A response as token ids, and its labelled steps."""

    sequence: Encoded

    ends: tuple[int, ...]
    """Where in the sequence labelled steps end."""

    targets: tuple[float, ...]
    """How right each of them is, from 0 to 1."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.sequence)


@dataclass(frozen=True)
class StepBatch:
    """Rows of a micro-batch."""

    tokens: TokenBatch
    ends: Int[Tensor, " E"]
    """Where in the batch each labelled step ends, row after row."""
    targets: Float[Tensor, " E"]
    weight: float
    """Of a step, so that all steps of all rows weigh as much as there are rows."""
    numbers: tuple[int, ...]
    """The place of each row among those that were cut."""


class StepObjective(Objective[StepRow, StepBatch]):
    """Each labelled step is to be predicted right where it is right: binary cross entropy."""

    def __init__(self, labels: Labels, config: RewardConfig) -> None:
        super().__init__(labels, config)
        self._separators: frozenset[int] | None = None

    def separators(self, chat: ChatFormat) -> frozenset[int]:
        """Tokens that end a step.

        Raises:
            DataError: the tokenizer has none.
        """
        if self._separators is None:
            self._separators = known_separators(chat, self.config.step_separator)
        return self._separators

    def rows_fit(self, chat: ChatFormat, config: RewardConfig) -> RowsFit[Example]:
        """How many labelled steps of a row are left."""
        limit = config.data.max_length
        separators = self.separators(chat)

        def fit(examples: Sequence[Example]) -> list[Fit]:
            rows = [encode_steps(each, chat, config, separators) for each in examples]
            cut = [within(row, limit) for row in rows]
            return [
                Fit(row.num_tokens > limit, len(left.ends))
                for row, left in zip(rows, cut, strict=True)
            ]

        return RowsFit(fit, end="beginning", empty="have no labelled step")

    def encode(
        self, examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
    ) -> list[StepRow]:
        """Token ids and targets; what is longer than `max_length` loses its first steps."""
        separators = self.separators(chat)
        limit = config.data.max_length
        return [within(encode_steps(each, chat, config, separators), limit) for each in examples]

    def sequences(self, row: StepRow) -> tuple[Encoded, ...]:
        """The one dialogue."""
        return (row.sequence,)

    def cut(self, rows: Sequence[StepRow], config: RewardConfig) -> list[StepBatch]:
        """This process's micro-batches of the rows."""
        parts = offline.local_parts(
            [row.num_tokens for row in rows],
            config,
            max_tokens=config.micro_batch_size * config.data.max_length,
            deterministic=config.model.zero.reduction == "deterministic",
        )
        steps = sum(len(row.ends) for row in rows)
        return [collate_steps(rows, part, weight=len(rows) / max(1, steps)) for part in parts]

    def settings(self) -> dict[str, object]:
        """How the score of a response follows from its steps."""
        assert self._separators is not None  # rows have been encoded
        return {
            "step_separator": self.config.step_separator,
            "step_token_ids": sorted(self._separators),
            "step_score": self.config.step_score,
        }

    def places(self, batch: StepBatch) -> Int[Tensor, " E"]:
        """Where the labelled steps end."""
        return batch.ends

    def loss(self, outputs: LabelOutputs, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """The mean loss of all steps, and the share that is predicted right, times the rows."""
        logits = outputs.logits.squeeze(-1)
        right = ((logits > 0) == (batch.targets >= 0.5)).sum().double()
        return batch.weight * binary_cross_entropy(logits, batch.targets), batch.weight * right

    def evaluate(
        self, scorer: Scorer, rows: Sequence[StepRow], config: RewardConfig
    ) -> dict[str, float]:
        """Loss and accuracy of the held-out steps of all processes, and the first errors found."""
        loss, predicted = self.predict(scorer, rows, config)
        return {"loss": loss, **step_figures(predicted)}

    def predict(
        self, scorer: Scorer, rows: Sequence[StepRow], config: RewardConfig
    ) -> tuple[float, list[PredictedSteps]]:
        """The mean loss of all steps, and what the model says of them; all processes call it."""
        total, found = 0.0, list[tuple[int, list[float]]]()
        with evaluating(scorer):
            for batch in self.cut(rows, config):
                outputs = scorer(batch.tokens, labels=True).at(batch.ends)
                total += self.loss(outputs, batch)[0].item()
                logits = outputs.logits.squeeze(-1).split(
                    [len(rows[number].ends) for number in batch.numbers]
                )
                found += zip(batch.numbers, (each.tolist() for each in logits), strict=True)
        data = current_mesh().data
        by_row = dict(pair for of_process in data.gather_objects(found) for pair in of_process)
        return data.sum(total) / len(rows), [
            PredictedSteps(row.targets, tuple(by_row[number])) for number, row in enumerate(rows)
        ]


def known_separators(chat: ChatFormat, separator: str) -> frozenset[int]:
    """The tokens of the chat's tokenizer that end a step.

    Raises:
        DataError: there is none.
    """
    found = frozenset(separator_ids(chat.tokenizer, separator))
    if not found:
        raise DataError(
            f"reward.step_separator: the tokenizer has no token that ends in {separator!r}; choose"
            " a shorter one, such as a line feed"
        )
    return found


def step_texts(example: Example, separator: str) -> list[str]:
    """The steps as they are read; a separator inside one becomes a space."""
    parts = [map(str.strip, text.split(separator)) for text in example.steps]
    return [" ".join(filter(None, each)) for each in parts]


def encode_steps(
    example: Example, chat: ChatFormat, config: RewardConfig, separators: frozenset[int]
) -> StepRow:
    """The whole response, its steps joined by the separator.

    Raises:
        DataError: its tokens have another number of steps.
    """
    texts = step_texts(example, config.step_separator)
    whole = chat.encode(example.prompt, (Message("assistant", config.step_separator.join(texts)),))
    (ends,) = step_ends(collate([whole]), separators)
    if len(ends) != len(texts):
        raise DataError(
            f"{example.origin}: {len(texts)} steps joined by {config.step_separator!r} are"
            f" {len(ends)} where the tokens are read; choose another reward.step_separator"
        )
    labelled = [
        (end, label)
        for end, label in zip(ends, example.step_labels, strict=True)
        if label is not None
    ]
    return StepRow(whole, tuple(end for end, _ in labelled), tuple(label for _, label in labelled))


def within(row: StepRow, max_length: int) -> StepRow:
    """The row without what is too much at its beginning."""
    dropped = max(0, row.num_tokens - max_length)
    kept = [place for place, end in enumerate(row.ends) if end >= dropped]
    return StepRow(
        row.sequence.tail(max_length),
        tuple(row.ends[place] - dropped for place in kept),
        tuple(row.targets[place] for place in kept),
    )


def collate_steps(
    all_rows: Sequence[StepRow], numbers: Sequence[int], *, weight: float
) -> StepBatch:
    """The rows of these numbers end to end; where there are none, the first without its steps."""
    rows = [all_rows[number] for number in numbers]
    ends, targets, start = list[int](), list[float](), 0
    for row in rows:
        ends += [start + end for end in row.ends]
        targets += row.targets
        start += row.num_tokens
    device = local_device()
    return StepBatch(
        tokens=collate([row.sequence for row in rows or all_rows[:1]]).to(device),
        ends=torch.tensor(ends, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.float32, device=device),
        weight=weight,
        numbers=tuple(numbers),
    )
