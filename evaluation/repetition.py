"""How much of a response repeats itself: the sign of a loop."""

from collections.abc import Sequence


def repeated_trigrams(ids: Sequence[int]) -> int:
    """Tokens of a response that end three tokens in a row which it has had before."""
    trigrams = list(zip(ids, ids[1:], ids[2:], strict=False))
    return len(trigrams) - len(set(trigrams))
