"""Which language a text is in, by its script and its most frequent words."""

import functools
import re
import unicodedata
from collections import Counter
from pathlib import Path

from evaluation.ifeval.instruction import Arguments, Instruction

SCRIPTS = {
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "fi", "vi", "sw"), "LATIN"),
    **dict.fromkeys(("ru", "bg"), "CYRILLIC"),
    **dict.fromkeys(("ar", "fa", "ur"), "ARABIC"),
    **dict.fromkeys(("hi", "mr", "ne"), "DEVANAGARI"),
    "kn": "KANNADA",
    "te": "TELUGU",
    "ko": "HANGUL",
    "th": "THAI",
    "pa": "GURMUKHI",
    "gu": "GUJARATI",
    "bn": "BENGALI",
    "ta": "TAMIL",
    "ml": "MALAYALAM",
    "zh": "CJK",
}
"""By code of the language, as the names of its letters begin in Unicode."""


def is_language(text: str, language: str) -> bool:
    """Whether most letters are of the language's script, and its frequent words the most common.

    Of languages that share a script, the one whose frequent words the text has most of is meant; a
    text without any is of none.
    """
    letters = Counter(unicodedata.name(char, "").split(" ")[0] for char in text if char.isalpha())
    script = SCRIPTS[language]
    if 2 * letters[script] <= letters.total():
        return False
    rivals = [each for each, of_script in SCRIPTS.items() if of_script == script]
    if len(rivals) == 1:
        return True
    words = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]+)?", text.lower()))
    points = {each: sum(words[word] for word in frequent_words()[each]) for each in rivals}
    return 0 < points[language] == max(points.values())


@functools.cache
def frequent_words() -> dict[str, frozenset[str]]:
    """The frequent words of each language."""
    text = (Path(__file__).parent / "function_words.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {language: frozenset(words) for language, *words in rows}


def _follows(text: str, arguments: Arguments) -> bool:
    return is_language(text, arguments["language"])


LANGUAGE = {
    "language:response_language": Instruction(_follows, one_of={"language": tuple(SCRIPTS)})
}
"""The instruction on language, by its name in the public rows."""
