"""A reward function of one's own: whether a story ends well.

python train.py --method grpo --reward-function benchmarks/story_rule.py:ends_well ...
"""

import re
from collections.abc import Sequence
from typing import Any

WELL = re.compile(r"\b(happy|happily|glad|smiled|friends?|together|fun)\b", re.IGNORECASE)
SENTENCE = re.compile(r"[^.!?]+[.!?]+[\"']*")


def ends_well(episodes: Sequence[Any]) -> list[float]:
    """1 for a response that ended by itself, with a whole sentence that is a happy one; else 0."""
    return [float(each.stopped and keeps_rule(each.response)) for each in episodes]


def keeps_rule(response: str) -> bool:
    """Whether the text ends with a whole sentence, and that has a word of a happy end."""
    sentences = sentences_of(response)
    return "".join(sentences) == response.strip() != "" and bool(WELL.search(sentences[-1]))


def sentences_of(text: str) -> list[str]:
    """The whole sentences of a text, with the spaces between them; no rest that is cut off."""
    return SENTENCE.findall(text.strip())
