"""Tokenizing as llama.cpp does, with the vocabulary of a GGUF file.

It reads nothing of the model's own tokenizer, so that equal tokens show that the file has all that
llama.cpp needs.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from pipeline.export.gguf_pretokenizers import EXPRESSIONS, WHOLE_WORDS
from pipeline.export.gguf_vocabulary import (
    CONTROL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
)

Encode = Callable[[str], list[int]]


def tokenize_with(vocabulary: Vocabulary) -> Encode:
    """A function from a text to ids, special tokens in it found, and none put around it."""
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    special = {
        token: numbers[token]
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
    }
    pieces = (
        _by_scores(vocabulary, numbers)
        if vocabulary.model == "llama"
        else _by_merges(vocabulary, numbers)
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for part in _parts(text, special):
            ids += [part] if isinstance(part, int) else pieces(part)
        return ids

    return encode


def _parts(text: str, special: dict[str, int]) -> Iterator[str | int]:
    """The text cut at special tokens, the longest ones first."""
    parts: list[str | int] = [text] if text else []
    for token in sorted(special, key=len, reverse=True):
        if token not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for number, between in enumerate(part.split(token)):
                cut += [special[token]] if number else []
                cut += [between] if between else []
        parts = cut
    return iter(parts)


def _by_merges(vocabulary: Vocabulary, numbers: dict[str, int]) -> Encode:
    backend = Tokenizer(
        models.BPE(
            vocab=numbers,
            merges=[_pair(merge) for merge in vocabulary.merges],
            ignore_merges=vocabulary.pre in WHOLE_WORDS,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(EXPRESSIONS[vocabulary.pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _by_scores(vocabulary: Vocabulary, numbers: dict[str, int]) -> Encode:
    prefix = SPACE if vocabulary.add_space_prefix else ""

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for piece in _joined(prefix + text.replace(" ", SPACE), numbers, vocabulary.scores):
            if piece in numbers:
                ids.append(numbers[piece])
            else:
                ids += [numbers[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return ids

    return encode


def _joined(text: str, numbers: dict[str, int], scores: Sequence[float]) -> list[str]:
    """The pieces left when neighbours were joined until no two make a token.

    The two with the highest score come first, the leftmost of several.
    """
    pieces = list(text)
    before, after = list(range(-1, len(text) - 1)), [*range(1, len(text)), -1]
    queue: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (joined := pieces[left] + pieces[right]) in numbers:
            heapq.heappush(queue, (-scores[numbers[joined]], left, right, len(joined)))

    for right in range(1, len(pieces)):
        offer(right - 1, right)
    while queue:
        _, left, right, length = heapq.heappop(queue)
        gone = not pieces[left] or not pieces[right]
        if gone or len(pieces[left]) + len(pieces[right]) != length:
            continue
        pieces[left] += pieces[right]
        pieces[right] = ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [piece for piece in pieces if piece]
