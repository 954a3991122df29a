"""Objectives of step 2, by kind of label: micro-batch loss, and metrics of held-out rows.

Dimension names: N rows, O positions of a batch, C outputs of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.data.lengths import FitCheck, RowFit
from pipeline.models.forward.forward import Scorer
from pipeline.models.forward.scores import separator_ids
from pipeline.models.passes import evaluating
from pipeline.parallel.device import to_device
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError
from pipeline.system.logs import log_progress
from step2_reward.config import RewardConfig
from step2_reward.lab.figures import (
    PredictedSteps,
    class_report,
    concordance,
    spearman,
    summarize_steps,
)
from step2_reward.labels import Labels
from step2_reward.losses import (
    binary_cross_entropy,
    cross_entropy,
    pairwise_loss,
    squared_error,
)
from step2_reward.rows import UNLIMITED, Batch, Row, encode_rows, encode_steps, split_rows


@dataclass(frozen=True)
class HeldOutOutputs:
    """Held-out rows, and the model's outputs for them."""

    rows: Sequence[Row]

    outputs: Sequence[Sequence[Sequence[float]]]
    """For each row, the C outputs of each sequence or labeled step."""

    @property
    def first_outputs(self) -> Float[Tensor, "N C"]:
        """The outputs of the first sequence of each row."""
        return torch.tensor([row[0] for row in self.outputs])

    @property
    def targets(self) -> Float[Tensor, " N"]:
        """The first target of each row."""
        return torch.tensor([row.targets[0] for row in self.rows])


def compute_outputs(
    scorer: Scorer,
    rows: Sequence[Row],
    config: RewardConfig,
    observe: Callable[[Tensor, Batch], None] = lambda _outputs, _batch: None,
) -> HeldOutOutputs:
    """Run the model on rows, the same on all processes, which must all call this.

    Args:
        scorer: the model.
        rows: rows with one kind of label.
        config: sizes of micro-batches.
        observe: called with the outputs of each micro-batch of this process.
    """
    by_row: list[tuple[int, list[list[float]]]] = []
    with evaluating(scorer):
        for batch in log_progress(
            split_rows(rows, config), "scored micro-batches of held-out rows"
        ):
            outputs: Tensor = scorer(batch.tokens, labels=True)[batch.positions]
            observe(outputs, batch)
            batch_rows = [rows[index] for index in batch.indices]
            if rows[0].ends is None:
                values = outputs[batch.sequence_indices].tolist()
                pairs = zip(values, batch_rows, strict=True)
                values = [scores[: len(row.sequences)] for scores, row in pairs]
            else:
                counts = [len(row.ends or ()) for row in batch_rows]
                values = [part.tolist() for part in outputs.split(counts)]
            by_row += zip(batch.indices, values, strict=True)
    gathered = dict(item for part in current_mesh().data.gather_objects(by_row) for item in part)
    return HeldOutOutputs(rows, [gathered[index] for index in range(len(rows))])


class Objective(ABC):
    """A kind of label's encoding, loss and metrics, as the training loop uses them."""

    has_accuracy = True
    """Whether each prediction is right or wrong, so that accuracy is defined during training."""

    def __init__(self, labels: Labels, config: RewardConfig) -> None:
        self.labels = labels
        self.config = config
        """Settings of the step, including those of the loss."""

    def make_fit_check(self, chat: ChatFormat, config: RewardConfig) -> FitCheck[Example]:
        """Return a function that checks whether a row's sequences still differ after truncation.

        Raises:
            DataError: the chat format does not support such rows.
        """
        limit = config.data.max_length

        def fit(examples: Sequence[Example]) -> list[RowFit]:
            rows = encode_rows(examples, self.labels, chat, max_length=UNLIMITED)
            truncated = [{tuple(x.tail(limit).input_ids) for x in row.sequences} for row in rows]
            return [
                RowFit(max(map(len, row.sequences)) > limit, int(len(unique) == len(row.sequences)))
                for row, unique in zip(rows, truncated, strict=True)
            ]

        name = "pairs" if self.labels.kind == "pairs" else "rows"
        return FitCheck(fit, lost_side="beginning", empty="have identical responses", rows=name)

    def encode(
        self, examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
    ) -> list[Row]:
        """Convert rows to token ids and targets."""
        return encode_rows(examples, self.labels, chat, max_length=config.data.max_length)

    def config_entries(self) -> dict[str, object]:
        """Return the entries of the exported config.json that describe the model's outputs."""
        return {}

    @abstractmethod
    def loss(self, outputs: Float[Tensor, "O C"], batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the loss summed over rows, and the number of correct rows (None if undefined).

        Args:
            outputs: outputs at `batch.positions`.
            batch: the rows.
        """

    def evaluate(
        self, scorer: Scorer, rows: Sequence[Row], config: RewardConfig
    ) -> tuple[dict[str, float], HeldOutOutputs]:
        """Return the metrics of `rows`, which are the same on all processes, and the outputs."""
        totals = [0.0, 0.0]

        def observe(outputs: Float[Tensor, "O C"], batch: Batch) -> None:
            loss, right = self.loss(outputs, batch)
            totals[0] += loss.item()
            totals[1] += 0.0 if right is None else right.item()

        held_out = compute_outputs(scorer, rows, config, observe)
        loss, right = current_mesh().data.sums(totals)
        means = {"loss": loss / len(rows), "accuracy": right / len(rows)}
        return {**means, **self.compute_metrics(held_out)}, held_out

    @abstractmethod
    def compute_metrics(self, held_out: HeldOutOutputs) -> dict[str, float]:
        """Compute additional metrics of held-out rows; they may replace `loss` and `accuracy`."""


class PairObjective(Objective):
    """Pairs of responses, of which the better one should score higher."""

    def loss(self, outputs: Float[Tensor, "O C"], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss summed over pairs, and the number ordered correctly; ties count half."""
        config = self.config
        chosen, rejected = batch.group_by_row(outputs.squeeze(-1)).unbind(1)
        loss = pairwise_loss(
            chosen,
            rejected,
            margin=batch.targets if config.margin else None,
            center_coef=config.center_coef,
            focal_gamma=config.focal_gamma if self.labels.loss == "focal" else 0.0,
        )
        return loss, (chosen > rejected).sum() + 0.5 * (chosen == rejected).sum()

    def compute_metrics(self, held_out: HeldOutOutputs) -> dict[str, float]:
        """Compute the loss without margin, centering and focal weights, and the mean scores."""
        chosen, rejected = torch.tensor(held_out.outputs).squeeze(-1).double().unbind(1)
        return {
            "loss": pairwise_loss(chosen, rejected).item() / len(held_out.rows),
            "mean_chosen": chosen.mean().item(),
            "mean_rejected": rejected.mean().item(),
        }


class ClassObjective(Objective):
    """Classes, learned with cross entropy, optionally focal or weighted."""

    def loss(self, outputs: Float[Tensor, "O C"], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss summed over rows, and the number of correctly classified rows."""
        logits = outputs[batch.sequence_indices[:, 0]]
        weights = self.config.class_weights
        loss = cross_entropy(
            logits,
            batch.classes,
            weights=to_device(torch.tensor(weights)) if weights else None,
            focal_gamma=self.config.focal_gamma if self.labels.loss == "focal" else 0.0,
        )
        return loss, (logits.argmax(dim=1) == batch.classes).sum()

    def compute_metrics(self, held_out: HeldOutOutputs) -> dict[str, float]:
        """Compute macro recall and F1."""
        logprobs = held_out.first_outputs.log_softmax(dim=1)
        report = class_report(logprobs, held_out.targets.long(), self.labels.classes)
        return {name: report[name] for name in ("macro_recall", "macro_f1")}


class ScalarObjective(Objective):
    """Numbers, learned with squared error (on standardized labels) or binary cross entropy."""

    has_accuracy = False

    def loss(self, outputs: Float[Tensor, "O C"], batch: Batch) -> tuple[Tensor, None]:
        """Return the loss summed over rows, and None: a prediction is neither right nor wrong."""
        scores = outputs[batch.sequence_indices[:, 0]].squeeze(-1)
        error = squared_error if self.labels.loss == "mse" else binary_cross_entropy
        return error(scores, batch.targets), None

    def compute_metrics(self, held_out: HeldOutOutputs) -> dict[str, float]:
        """Compute the fraction of correctly ordered pairs, rank correlation and mean error."""
        scores, targets = held_out.first_outputs.squeeze(1), held_out.targets
        predictions = scores if self.labels.loss == "mse" else scores.sigmoid()
        return {
            "accuracy": concordance(scores, targets),
            "spearman": spearman(scores, targets),
            "mean_error": (predictions - targets).abs().mean().item() * self.labels.std,
        }


class StepObjective(Objective):
    """Process rewards, learned with binary cross entropy at the end of each labeled step."""

    def __init__(self, labels: Labels, config: RewardConfig) -> None:
        super().__init__(labels, config)
        self._separators: frozenset[int] | None = None

    def separators(self, chat: ChatFormat) -> frozenset[int]:
        """Return the tokens that end a step.

        Raises:
            DataError: the tokenizer has no such tokens.
        """
        if self._separators is None:
            self._separators = frozenset(separator_ids(chat.tokenizer, self.config.step_separator))
        if not self._separators:
            raise DataError(
                "reward.step_separator: the tokenizer has no token that ends in"
                f" {self.config.step_separator!r}; choose a shorter one, such as a newline"
            )
        return self._separators

    def make_fit_check(self, chat: ChatFormat, config: RewardConfig) -> FitCheck[Example]:
        """Return a function that checks whether rows still have labeled steps after truncation."""
        limit, separators = config.data.max_length, self.separators(chat)

        def fit(examples: Sequence[Example]) -> list[RowFit]:
            full = [encode_steps(x, chat, config.step_separator, separators) for x in examples]
            truncated = self.encode(examples, chat, config)
            return [
                RowFit(row.num_tokens > limit, len(rest.ends or ()))
                for row, rest in zip(full, truncated, strict=True)
            ]

        return FitCheck(fit, lost_side="beginning", empty="have no labeled step")

    def encode(
        self, examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
    ) -> list[Row]:
        """Convert rows to token ids and targets; long dialogues lose their beginning."""
        separator, separators = self.config.step_separator, self.separators(chat)
        limit = config.data.max_length
        return [encode_steps(x, chat, separator, separators, max_length=limit) for x in examples]

    def config_entries(self) -> dict[str, object]:
        """Return the settings for computing the score of a response from its steps."""
        assert self._separators is not None  # set by encoding the rows
        return {
            "step_separator": self.config.step_separator,
            "step_token_ids": sorted(self._separators),
            "step_score": self.config.step_score,
        }

    def loss(self, outputs: Float[Tensor, "O C"], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of correct predictions, summed over weighted steps."""
        logits = outputs.squeeze(-1)
        right = ((logits > 0) == (batch.targets >= 0.5)).sum().double()
        return batch.weight * binary_cross_entropy(logits, batch.targets), batch.weight * right

    def compute_metrics(self, held_out: HeldOutOutputs) -> dict[str, float]:
        """Compute the accuracy of steps, and the metrics of first errors."""
        return summarize_steps(predicted_steps(held_out))


def predicted_steps(held_out: HeldOutOutputs) -> list[PredictedSteps]:
    """Return the labeled steps of each row, and the model's log-odds for them."""
    return [
        PredictedSteps(row.targets, tuple(logit for (logit,) in logits))
        for row, logits in zip(held_out.rows, held_out.outputs, strict=True)
    ]


OBJECTIVES: dict[str, type[Objective]] = {
    "pairs": PairObjective,
    "classes": ClassObjective,
    "scalar": ScalarObjective,
    "steps": StepObjective,
}
"""Objective classes by kind of label."""


def make_objective(labels: Labels, config: RewardConfig) -> Objective:
    """Make the objective for the kind of label."""
    return OBJECTIVES[labels.kind](labels, config)
