"""Instructions about how long a text is, in words, sentences and paragraphs."""

import re

from evaluation.ifeval.instruction import RELATIONS, Arguments, Instruction, holds
from evaluation.ifeval.words import NUMBER, WORD

_END = re.compile(r"(?:[.!?\u2026]+[\"'\u201d\u2019)\]*_]*(?=\s|$)|[\u3002\uff01\uff1f]+)")
"""Where a sentence may end: its mark with quotes and brackets behind it."""

_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Za-z]|mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|approx|no|inc|ltd|jr|sr)\.|^\s*\d+\.)$",
    re.IGNORECASE | re.MULTILINE,
)
"""What ends in a dot and no sentence: short forms, initials, the number of a list's item."""


def num_sentences(text: str) -> int:
    """Sentences of a text: pieces with a letter or digit that end in a mark, or with the text.

    A dot of a common abbreviation, an initial or a list's number ends none.
    """
    count, start = 0, 0
    for end in _END.finditer(text):
        piece = text[start : end.end()]
        if _ABBREVIATION.search(piece) and text[end.end() :].strip():
            continue
        count += any(char.isalnum() for char in piece)
        start = end.end()
    return count + any(char.isalnum() for char in text[start:])


def paragraphs(text: str, separator: str) -> list[str]:
    """Pieces of a text between separators; empty ones at its ends are none."""
    pieces = [piece.strip() for piece in re.split(separator, text)]
    while pieces and not pieces[0]:
        pieces.pop(0)
    while pieces and not pieces[-1]:
        pieces.pop()
    return pieces


def _sentences(text: str, arguments: Arguments) -> bool:
    return holds(num_sentences(text), arguments["relation"], int(arguments["num_sentences"]))


def _words(text: str, arguments: Arguments) -> bool:
    count = len(WORD.findall(text))
    return holds(count, arguments["relation"], int(arguments["num_words"]))


def _paragraphs(text: str, arguments: Arguments) -> bool:
    pieces = paragraphs(text, r"(?<!\*)\*\*\*(?!\*)")
    return all(pieces) and len(pieces) == int(arguments["num_paragraphs"])


def _first_word(text: str, arguments: Arguments) -> bool:
    """The paragraphs, which blank lines separate, are that many, and one begins with a word."""
    pieces = [piece for piece in paragraphs(text, r"\n\s*\n") if piece]
    place = int(arguments["nth_paragraph"])
    if len(pieces) != int(arguments["num_paragraphs"]) or not 1 <= place <= len(pieces):
        return False
    words = WORD.findall(pieces[place - 1])
    return bool(words) and words[0].lower() == arguments["first_word"].lower()


LENGTHS = {
    "length_constraints:number_sentences": Instruction(
        _sentences, {"num_sentences": NUMBER}, {"relation": RELATIONS}
    ),
    "length_constraints:number_words": Instruction(
        _words, {"num_words": NUMBER}, {"relation": RELATIONS}
    ),
    "length_constraints:number_paragraphs": Instruction(_paragraphs, {"num_paragraphs": NUMBER}),
    "length_constraints:nth_paragraph_first_word": Instruction(
        _first_word, {"num_paragraphs": NUMBER, "nth_paragraph": NUMBER, "first_word": str}
    ),
}
"""The instructions on length, by their names in the public rows."""
