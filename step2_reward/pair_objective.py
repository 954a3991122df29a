"""Pairs of responses: Bradley-Terry, with margin, focal."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from pipeline.data.batches import EncodedPair, PairBatch
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.lengths import RowsFit
from pipeline.models.forward import LabelOutputs, Scorer
from pipeline.models.trained import evaluating
from pipeline.parallel.mesh import current_mesh
from step2_reward.config import RewardConfig
from step2_reward.losses import pairwise_loss
from step2_reward.objective import Objective
from step2_reward.pairs import cut, encode, pairs_fit


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
