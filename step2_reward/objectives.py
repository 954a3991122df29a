"""Objectives of step 2: loss of a micro-batch and figures of held-out rows, by kind of label."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.data.batches import EncodedPair, PairBatch
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.lengths import Fit, RowsFit, require_learnable
from pipeline.models.forward import LabelOutputs, Scorer
from pipeline.models.scores import Cutpoints
from pipeline.models.trained import evaluating
from pipeline.parallel.device import send
from pipeline.parallel.mesh import current_mesh
from step2_reward.config import RewardConfig
from step2_reward.lab.figures import class_report, concordance, spearman
from step2_reward.label_rows import Labels, resolve
from step2_reward.losses import (
    balanced_weights,
    binary_cross_entropy,
    cross_entropy,
    ordinal_log_probabilities,
    ordinal_loss,
    pairwise_loss,
    plackett_luce_loss,
    squared_error,
    tie_log_probabilities,
    tie_loss,
)
from step2_reward.objective import Objective, start_cutpoints
from step2_reward.rows import (
    LabelledBatch,
    LabelledRow,
    cut,
    cut_rows,
    encode,
    encode_rows,
    pairs_fit,
)
from step2_reward.step_objective import StepObjective


class PairObjective(Objective[EncodedPair, PairBatch]):
    """The better response of a pair is to score higher."""

    def rows_fit(self, chat: ChatFormat, config: RewardConfig) -> RowsFit[Example]:
        """Whether the responses of a pair still differ where it is cut."""
        return pairs_fit(chat, config)

    def encode(
        self, examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
    ) -> list[EncodedPair]:
        """Token ids of both dialogues."""
        return encode(examples, chat, config)

    def sequences(self, row: EncodedPair) -> tuple[Encoded, ...]:
        """The chosen dialogue and the rejected one."""
        return row.chosen, row.rejected

    def cut(self, rows: Sequence[EncodedPair], config: RewardConfig) -> list[PairBatch]:
        """This process's micro-batches of the pairs."""
        return cut(rows, config)

    def loss(self, outputs: LabelOutputs, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over pairs, and how many are in the right order; ties count half."""
        config = self.config
        chosen, rejected = batch.split(outputs.logits.squeeze(-1))
        loss = pairwise_loss(
            chosen,
            rejected,
            margin=batch.margin if config.margin else None,
            center_coef=config.center_coef,
            focal_gamma=config.focal_gamma if self.labels.loss == "focal" else 0.0,
        )
        return loss, num_in_order(chosen, rejected)

    def evaluate(
        self, scorer: Scorer, rows: Sequence[EncodedPair], config: RewardConfig
    ) -> dict[str, float]:
        """Loss, accuracy and mean scores of held-out pairs."""
        return evaluate(scorer, rows, config)


def num_in_order(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """How many pairs have the higher score on the chosen response; ties count half."""
    return (chosen > rejected).sum() + 0.5 * (chosen == rejected).sum()


def evaluate(
    scorer: Scorer, pairs: Sequence[EncodedPair], config: RewardConfig
) -> dict[str, float]:
    """Loss, accuracy (ties count half) and mean scores over held-out pairs, of all processes."""
    totals = [0.0, 0.0, 0.0, 0.0]
    with evaluating(scorer):
        for batch in cut(pairs, config):
            chosen, rejected = batch.split(scorer.final_scores(batch.tokens))
            totals[0] += num_in_order(chosen, rejected).item()
            totals[1] += chosen.sum().item()
            totals[2] += rejected.sum().item()
            totals[3] += pairwise_loss(chosen, rejected).item()
    accuracy, mean_chosen, mean_rejected, loss = (
        total / max(1, len(pairs)) for total in current_mesh().data.sums(totals)
    )
    return {
        "loss": loss,
        "accuracy": accuracy,
        "mean_chosen": mean_chosen,
        "mean_rejected": mean_rejected,
    }


@dataclass(frozen=True)
class Evaluated:
    """Held-out rows, and what the model computes of them."""

    rows: Sequence[LabelledRow]
    outputs: Sequence[Sequence[Sequence[float]]]
    """The C outputs of each sequence of each row."""
    cutpoints: Float[Tensor, " cuts"] | None

    @property
    def first(self) -> Float[Tensor, "N C"]:
        """The outputs of the first sequence of each row."""
        return torch.tensor([row[0] for row in self.outputs])

    @property
    def targets(self) -> Float[Tensor, " N"]:
        """What each row has to be."""
        return torch.tensor([row.target for row in self.rows])


class LabelObjective(Objective[LabelledRow, LabelledBatch]):
    """What the kinds of labels share that `labelled` encodes."""

    def rows_fit(self, chat: ChatFormat, config: RewardConfig) -> RowsFit[Example]:
        """Whether the sequences of a row still differ where they are cut."""
        limit = config.data.max_length

        def fit(examples: Sequence[Example]) -> list[Fit]:
            # Whole, as far as a model could read; what is equal in the end teaches nothing.
            rows = encode_rows(examples, self.labels, chat, config, max_length=2**31)
            ends = [{tuple(each.tail(limit).input_ids) for each in row.sequences} for row in rows]
            return [
                Fit(max(map(len, row.sequences)) > limit, int(len(each) == len(row.sequences)))
                for row, each in zip(rows, ends, strict=True)
            ]

        return RowsFit(fit, end="beginning", empty="have equal responses")

    def encode(
        self, examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
    ) -> list[LabelledRow]:
        """Token ids and targets of rows."""
        return encode_rows(examples, self.labels, chat, config, max_length=config.data.max_length)

    def sequences(self, row: LabelledRow) -> tuple[Encoded, ...]:
        """The dialogues of a row."""
        return row.sequences

    def cut(self, rows: Sequence[LabelledRow], config: RewardConfig) -> list[LabelledBatch]:
        """This process's micro-batches of the rows."""
        return cut_rows(rows, config)

    def evaluate(
        self, scorer: Scorer, rows: Sequence[LabelledRow], config: RewardConfig
    ) -> dict[str, float]:
        """Loss and accuracy of held-out rows of all processes, and what else the labels have."""
        total, right, found = 0.0, 0.0, list[tuple[int, list[list[float]]]]()
        cutpoints: Tensor | None = None
        with evaluating(scorer):
            for batch in self.cut(rows, config):
                outputs = scorer.final_outputs(batch.tokens)
                loss, num_right = self.loss(outputs, batch)
                total += loss.item()
                right += 0.0 if num_right is None else num_right.item()
                found += zip(batch.numbers, outputs.logits[batch.places].tolist(), strict=True)
                cutpoints = outputs.cutpoints
        data = current_mesh().data
        total, right = data.sums([total, right])
        by_row = dict(pair for of_process in data.gather_objects(found) for pair in of_process)
        ordered = [by_row[number] for number in range(len(rows))]
        figures = self.figures(
            Evaluated(rows, ordered, None if cutpoints is None else cutpoints.cpu())
        )
        return {"loss": total / len(rows), "accuracy": right / len(rows), **figures}

    @abstractmethod
    def figures(self, held_out: Evaluated) -> dict[str, float]:
        """Further figures of held-out rows."""


class TieObjective(LabelObjective):
    """Pairs that may be ties: Rao-Kupper, with a learned threshold."""

    def cutpoints(self) -> Cutpoints:
        """kappa, which begins where equal scores tie as often as the rows do."""
        share = min(self.labels.tie_share, 0.9)
        return start_cutpoints([2 * math.atanh(share)], positive=True)

    def loss(self, outputs: LabelOutputs, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over pairs, and how many outcomes are the likeliest."""
        assert outputs.cutpoints is not None
        kappa = outputs.cutpoints[0]
        chosen, rejected = batch.by_row(outputs.logits.squeeze(-1)).unbind(1)
        is_tie = batch.targets == 1
        likeliest = tie_log_probabilities((chosen - rejected).detach(), kappa.detach()).argmax(1)
        right = (likeliest == is_tie.long()).sum()
        return tie_loss(chosen, rejected, is_tie, kappa), right

    def figures(self, held_out: Evaluated) -> dict[str, float]:
        """The share of decided pairs in the right order, and kappa."""
        assert held_out.cutpoints is not None
        decided = [
            float(one > other) + 0.5 * float(one == other)
            for row, ((one,), (other,)) in zip(held_out.rows, held_out.outputs, strict=True)
            if not row.target
        ]
        return {
            "order_accuracy": sum(decided) / max(1, len(decided)),
            "kappa": held_out.cutpoints[0].item(),
        }


class ClassObjective(LabelObjective):
    """Classes: cross entropy, focal, weighted."""

    def loss(self, outputs: LabelOutputs, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over rows, and how many are in their class."""
        logits = outputs.logits[batch.places[:, 0]]
        loss = cross_entropy(
            logits,
            batch.classes,
            weights=self._weights(),
            focal_gamma=self.config.focal_gamma if self.labels.loss == "focal" else 0.0,
        )
        return loss, (logits.argmax(dim=1) == batch.classes).sum()

    def _weights(self) -> Tensor | None:
        weights: Sequence[float] = self.config.class_weights
        if self.config.class_balance_beta:
            weights = balanced_weights(self.labels.counts, beta=self.config.class_balance_beta)
        return send(torch.tensor(weights)) if weights else None

    def figures(self, held_out: Evaluated) -> dict[str, float]:
        """Recall and F1, each class counting alike."""
        logprobs = held_out.first.log_softmax(dim=1)
        report = class_report(logprobs, held_out.targets.long(), self.labels.classes)
        return {"macro_recall": report.macro_recall, "macro_f1": report.macro_f1}


class OrdinalObjective(LabelObjective):
    """Ordered classes: one score, and learned cutpoints between them."""

    def cutpoints(self) -> Cutpoints:
        """Where a score of 0 has the classes' shares."""
        total = sum(self.labels.counts) + len(self.labels.counts)
        below, starts = 0.0, list[float]()
        for count in self.labels.counts[:-1]:
            below += count + 1  # as if each class had a row more, so that all are apart
            starts.append(math.log(below / (total - below)))
        return start_cutpoints(starts)

    def loss(self, outputs: LabelOutputs, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over rows, and how many are in their class."""
        assert outputs.cutpoints is not None
        scores = outputs.logits[batch.places[:, 0]].squeeze(-1)
        logprobs = ordinal_log_probabilities(scores.detach(), outputs.cutpoints.detach())
        right = (logprobs.argmax(dim=1) == batch.classes).sum()
        return ordinal_loss(scores, batch.classes, outputs.cutpoints), right

    def figures(self, held_out: Evaluated) -> dict[str, float]:
        """The share of rows of different classes in order, rank correlation, classes off."""
        assert held_out.cutpoints is not None
        scores, targets = held_out.first.squeeze(1), held_out.targets
        taken = ordinal_log_probabilities(scores, held_out.cutpoints).argmax(dim=1)
        return {
            "concordance": concordance(scores, targets),
            "spearman": spearman(scores, targets),
            "mean_error": (taken - targets).abs().mean().item(),
        }


class ScalarObjective(LabelObjective):
    """Numbers: squared error of what is shifted and scaled, or binary cross entropy."""

    counts_right = False

    def loss(self, outputs: LabelOutputs, batch: LabelledBatch) -> tuple[Tensor, None]:
        """The loss summed over rows, of which none is right or wrong by itself."""
        scores = outputs.logits[batch.places[:, 0]].squeeze(-1)
        error = squared_error if self.labels.loss == "mse" else binary_cross_entropy
        return error(scores, batch.targets), None

    def figures(self, held_out: Evaluated) -> dict[str, float]:
        """Pairs of rows in order, for accuracy; rank correlation; error in the data's unit."""
        scores, targets = held_out.first.squeeze(1), held_out.targets
        numbers = scores if self.labels.loss == "mse" else scores.sigmoid()
        return {
            "accuracy": concordance(scores, targets),
            "spearman": spearman(scores, targets),
            "mean_error": (numbers - targets).abs().mean().item() * self.labels.std,
        }


class RankingObjective(LabelObjective):
    """Ranked lists: Plackett-Luce."""

    def loss(self, outputs: LabelOutputs, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over lists, and the shares of their pairs in the right order, summed."""
        scores = batch.by_row(outputs.logits.squeeze(-1))
        is_pair = (batch.ranks[:, :, None] < batch.ranks[:, None, :]) & batch.ranks.isfinite()[
            :, None
        ]
        ahead = (scores[:, :, None] > scores[:, None, :]) & is_pair
        shares = ahead.sum(dim=(1, 2)) / is_pair.sum(dim=(1, 2)).clamp(min=1)
        return plackett_luce_loss(scores, batch.ranks), shares.sum()

    def figures(self, held_out: Evaluated) -> dict[str, float]:
        """How often the response with the highest score is one of the best."""
        hits = 0
        for row, scores in zip(held_out.rows, held_out.outputs, strict=True):
            best = max(range(len(row.sequences)), key=lambda place: scores[place][0])
            hits += row.ranks[best] == min(row.ranks)
        return {"best_found": hits / max(1, len(held_out.rows))}


OBJECTIVES: dict[str, type[PairObjective | LabelObjective | StepObjective]] = {
    "pairs": PairObjective,
    "ties": TieObjective,
    "classes": ClassObjective,
    "ordinal": OrdinalObjective,
    "scalar": ScalarObjective,
    "rankings": RankingObjective,
    "steps": StepObjective,
}
"""By kind of label."""


def objective_of(
    labels: Labels, config: RewardConfig
) -> PairObjective | LabelObjective | StepObjective:
    """What the labels make of rows."""
    return OBJECTIVES[labels.kind](labels, config)


def check_learnable(
    train: Sequence[Example], held_out: Sequence[Example], chat: ChatFormat, config: RewardConfig
) -> None:
    """Return if the responses of a row differ where they are cut, or a labelled step is left.

    Raises:
        DataError: there is none to train on, or to evaluate; or steps can't be told apart.
    """
    objective = objective_of(resolve(config, train, held_out), config)
    require_learnable(train, held_out, objective.rows_fit(chat, config), config.data)
