"""IFEval: prompts whose instructions programs check (Zhou et al. 2023, arXiv:2311.07911).

Rows have the public schema: `key`, `prompt`, `instruction_id_list`, and `kwargs`, a mapping for
each instruction. The checks are our own readings of the instructions.
"""

import functools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.contract import Grades, Question, Reading, Task, column, rows_of
from pipeline.data.examples import Message
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError, suggestion

Arguments = Mapping[str, Any]
"""The `kwargs` of an instruction in a row; those that are null are left out."""


@dataclass(frozen=True)
class Instruction:
    """One kind of instruction."""

    follows: Callable[[str, Arguments], bool]
    """Whether a non-empty text follows the instruction."""

    needs: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    """Its arguments and their types."""

    one_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Allowed values of the arguments that have a fixed set of them."""

    def check(self, arguments: Arguments, where: str) -> None:
        """Raise DataError, which begins with `where`, unless the arguments are complete."""
        for name, kind in self.needs.items():
            if not isinstance(arguments.get(name), kind) or isinstance(arguments[name], bool):
                raise DataError(f"{where} needs {name}, got {arguments.get(name)!r}")
            value = arguments[name]
            if isinstance(value, list) and not all(isinstance(each, str) for each in value):
                raise DataError(f"{where}: {name} must hold texts alone, got {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise DataError(f"{where}: {name} must be finite, got {value!r}")
        for name, words in self.one_of.items():
            if arguments.get(name) not in words:
                raise DataError(
                    f"{where}: {name} must be one of {', '.join(words)}, got"
                    f" {arguments.get(name)!r}"
                )


RELATIONS = ("at least", "less than")


def holds(count: int, relation: str, bound: int) -> bool:
    """Whether a count is at least, or less than, a limit."""
    return count >= bound if relation == "at least" else count < bound


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
"""Unicode name prefix of a language's letters, by language code."""


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


_END = re.compile(r"(?:[.!?\u2026]+[\"'\u201d\u2019)\]*_]*(?=\s|$)|[\u3002\uff01\uff1f]+)")
"""End of a sentence: its mark with the closing quotes and brackets."""

_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Za-z]|mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|approx|no|inc|ltd|jr|sr)\.|^\s*\d+\.)$",
    re.IGNORECASE | re.MULTILINE,
)
"""Words that end in a dot within a sentence: abbreviations, initials, numbers of list items."""


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
    """Pieces of a text between separators, without empty ones at its ends."""
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
    """Whether there is this number of paragraphs, and the given one begins with a word."""
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


OPTIONS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
"""Phrases of which a constrained response must contain one."""

_BULLET = re.compile(r"^[ \t]*(?:[-+]|\*(?!\*))[ \t]*\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*(?=\S)[^*\n]*\S\*\*|(?<!\*)\*(?=[^\s*])[^*\n]*(?<=\S)\*(?!\*)")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL | re.IGNORECASE)


def _placeholders(text: str, arguments: Arguments) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= int(arguments["num_placeholders"])


def _postscript(text: str, arguments: Arguments) -> bool:
    """A line begins with the marker, however its dots are spaced."""
    letters = [re.escape(each) for each in re.findall(r"\w", arguments["postscript_marker"])]
    marker = r"\.?\s?".join(letters)
    return re.search(rf"^\s*{marker}(?!\w)", text, re.IGNORECASE | re.MULTILINE) is not None


def _bullets(text: str, arguments: Arguments) -> bool:
    return len(_BULLET.findall(text)) == int(arguments["num_bullets"])


def _constrained(text: str, _: Arguments) -> bool:
    return any(option in text.lower() for option in OPTIONS)


def _highlights(text: str, arguments: Arguments) -> bool:
    return len(_HIGHLIGHT.findall(text)) >= int(arguments["num_highlights"])


def _sections(text: str, arguments: Arguments) -> bool:
    mark = re.escape(arguments["section_spliter"].strip())
    found = re.findall(rf"^[\s#*]*{mark}\s?\d+", text, re.MULTILINE | re.IGNORECASE)
    return len(found) >= int(arguments["num_sections"])


def _json(text: str, _: Arguments) -> bool:
    fenced = _FENCE.fullmatch(text.strip())
    try:
        json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    return True


def _title(text: str, _: Arguments) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^<>\n]+)>>", text))


def _two_responses(text: str, _: Arguments) -> bool:
    pieces = [piece.strip() for piece in re.split(r"(?<!\*)\*{6}(?!\*)", text)]
    filled = [piece for piece in pieces if piece]
    # A separator may stand before the first or behind the last; between the two there is one.
    inner = pieces[1 if not pieces[0] else 0 : len(pieces) - (not pieces[-1])]
    return len(filled) == len(inner) == 2 and filled[0] != filled[1]


def _repeats(text: str, arguments: Arguments) -> bool:
    prompt = arguments["prompt_to_repeat"].strip().lower()
    return text.strip().lower().startswith(prompt)


def _ends(text: str, arguments: Arguments) -> bool:
    end = arguments["end_phrase"].strip().lower()
    return text.strip().strip('"').strip().lower().endswith(end)


def _quoted(text: str, _: Arguments) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare.startswith('"') and bare.endswith('"')


FORMS = {
    "detectable_content:number_placeholders": Instruction(
        _placeholders, {"num_placeholders": NUMBER}
    ),
    "detectable_content:postscript": Instruction(_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": Instruction(_bullets, {"num_bullets": NUMBER}),
    "detectable_format:constrained_response": Instruction(_constrained),
    "detectable_format:number_highlighted_sections": Instruction(
        _highlights, {"num_highlights": NUMBER}
    ),
    "detectable_format:multiple_sections": Instruction(
        _sections, {"section_spliter": str, "num_sections": NUMBER}
    ),
    "detectable_format:json_format": Instruction(_json),
    "detectable_format:title": Instruction(_title),
    "combination:two_responses": Instruction(_two_responses),
    "combination:repeat_prompt": Instruction(_repeats, {"prompt_to_repeat": str}),
    "startend:end_checker": Instruction(_ends, {"end_phrase": str}),
    "startend:quotation": Instruction(_quoted),
}
"""The instructions on form, by their names in the public rows."""


INSTRUCTIONS = {**WORDS, **LANGUAGE, **LENGTHS, **FORMS}
"""Instructions by their names in the public rows."""


def read(reading: Reading) -> list[Question]:
    """The prompts of a data path.

    Raises:
        DataError: a row lacks a column, or names an instruction or arguments that there aren't.
    """
    assert reading.path is not None
    rows, _ = rows_of(reading.path, reading.limit)
    return [
        Question(
            (Message("user", str(column(row, "prompt"))),), {"instructions": _instructions(row)}
        )
        for row in rows
    ]


def grade(question: Question, response: str) -> Grades:
    """Return whether each instruction is followed, and whether all are; strict and loose.

    Loose takes an instruction as followed if it is by the response without its first or last line,
    or without asterisks: an opening, a closing sentence or bold letters spoil many a check.
    """
    instructions: list[tuple[str, Arguments]] = question.extra["instructions"]
    strict = [follows(response, name, arguments) for name, arguments in instructions]
    loose = [
        any(follows(text, name, arguments) for text in variants(response))
        for name, arguments in instructions
    ]
    return {
        "prompt_strict": (all(strict),),
        "instruction_strict": strict,
        "prompt_loose": (all(loose),),
        "instruction_loose": loose,
    }


def follows(response: str, name: str, arguments: Arguments) -> bool:
    """Whether a response follows an instruction; an empty one follows none."""
    return bool(response.strip()) and INSTRUCTIONS[name].follows(response, arguments)


def variants(response: str) -> Iterator[str]:
    """The response, and it without its first line, its last, both; each also without asterisks."""
    lines = response.split("\n")
    for kept in (lines, lines[1:], lines[:-1], lines[1:-1]):
        text = "\n".join(kept).strip()
        yield text
        yield text.replace("*", "")


def _instructions(row: Row) -> list[tuple[str, Arguments]]:
    names = column(row, "instruction_id_list", list)
    given = column(row, "kwargs", list)
    assert isinstance(names, list)
    assert isinstance(given, list)
    if not names or len(names) != len(given):
        raise DataError(
            f"{row.origin}: instruction_id_list has {len(names)} instructions and kwargs"
            f" {len(given)}; each instruction needs its own, empty if it takes none"
        )
    return [_instruction(row, *each) for each in zip(names, given, strict=True)]


def _instruction(row: Row, name: object, given: object) -> tuple[str, Arguments]:
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise DataError(
            f"{row.origin}: there is no instruction {name}; {suggestion(str(name), INSTRUCTIONS)}"
        )
    if not isinstance(given, Mapping):
        raise DataError(f"{row.origin}: kwargs must hold a mapping for {name}, got {given!r}")
    arguments: dict[str, Any] = {key: each for key, each in given.items() if each is not None}
    INSTRUCTIONS[str(name)].check(arguments, f"{row.origin}: {name}")
    return str(name), arguments


IFEVAL = Task("ifeval", read, grade, max_new_tokens=1024, needs_path=True)
