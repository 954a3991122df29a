"""Instructions about words, letters and their case."""

import re

from evaluation.ifeval.instruction import RELATIONS, Arguments, Instruction, holds

WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
"""A word; `don't` is one."""


def _has_all(text: str, arguments: Arguments) -> bool:
    return all(word.lower() in text.lower() for word in arguments["keywords"])


def _has_often(text: str, arguments: Arguments) -> bool:
    count = text.lower().count(arguments["keyword"].lower())
    return holds(count, arguments["relation"], int(arguments["frequency"]))


def _has_none(text: str, arguments: Arguments) -> bool:
    forbidden = (re.escape(word) for word in arguments["forbidden_words"])
    return not any(
        re.search(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE) is not None for word in forbidden
    )


def _has_letter(text: str, arguments: Arguments) -> bool:
    count = text.lower().count(arguments["letter"].lower())
    return holds(count, arguments["let_relation"], int(arguments["let_frequency"]))


def _shouts(text: str, arguments: Arguments) -> bool:
    count = sum(word.isupper() for word in WORD.findall(text))
    return holds(count, arguments["capital_relation"], int(arguments["capital_frequency"]))


NUMBER = (int, float)

WORDS = {
    "keywords:existence": Instruction(_has_all, {"keywords": list}),
    "keywords:frequency": Instruction(
        _has_often, {"keyword": str, "frequency": NUMBER}, {"relation": RELATIONS}
    ),
    "keywords:forbidden_words": Instruction(_has_none, {"forbidden_words": list}),
    "keywords:letter_frequency": Instruction(
        _has_letter, {"letter": str, "let_frequency": NUMBER}, {"let_relation": RELATIONS}
    ),
    "change_case:capital_word_frequency": Instruction(
        _shouts, {"capital_frequency": NUMBER}, {"capital_relation": RELATIONS}
    ),
    "change_case:english_capital": Instruction(lambda text, _: text.isupper()),
    "change_case:english_lowercase": Instruction(lambda text, _: text.islower()),
    "punctuation:no_comma": Instruction(lambda text, _: "," not in text),
}
"""The instructions on words, by their names in the public rows."""
