"""Pairs of responses as a reward model reads them, and this process's micro-batches of them."""

from collections.abc import Sequence

from pipeline import offline
from pipeline.data.batches import EncodedPair, PairBatch
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.data.lengths import Fit, RowsFit
from step2_reward.config import RewardConfig


def encode(
    examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
) -> list[EncodedPair]:
    """Token ids of both dialogues.

    What is longer than `max_length` loses its beginning: the score is read at the end.
    """
    limit = config.data.max_length
    keep = chat.begins_with_cls
    return [
        EncodedPair(
            chosen=chat.encode(example.prompt, example.chosen).tail(limit, keep_first=keep),
            rejected=chat.encode(example.prompt, example.rejected).tail(limit, keep_first=keep),
            margin=example.margin or 0.0,
        )
        for example in examples
    ]


def pairs_fit(chat: ChatFormat, config: RewardConfig) -> RowsFit[Example]:
    """Whether the responses of a pair still differ where it is cut."""
    limit = config.data.max_length

    def fit(examples: Sequence[Example]) -> list[Fit]:
        fits = []
        for each in examples:
            chosen = chat.encode(each.prompt, each.chosen)
            rejected = chat.encode(each.prompt, each.rejected)
            differ = chosen.tail(limit).input_ids != rejected.tail(limit).input_ids
            fits.append(Fit(max(len(chosen), len(rejected)) > limit, int(differ)))
        return fits

    return RowsFit(fit, end="beginning", empty="have equal responses", rows="pairs")


def cut(pairs: Sequence[EncodedPair], config: RewardConfig) -> list[PairBatch]:
    """This process's micro-batches of the pairs."""
    deterministic = config.model.zero.reduction == "deterministic"
    return offline.pair_batches(pairs, config, deterministic=deterministic)
