"""IFEval: prompts with instructions that programs check (Zhou et al. 2023, arXiv:2311.07911).

Rows contain the public data set's columns: `key`, `prompt`, `instruction_id_list`, and `kwargs`,
a mapping for each instruction. The checks follow the authors' program, except for language
identification.
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

from evaluation.contract import Grades, Question, ReadOptions, Task, get_column, read_task_rows
from pipeline.data.examples import Message
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError, suggestion

Arguments = Mapping[str, Any]
"""The `kwargs` of an instruction in a row, without nulls."""


@dataclass(frozen=True)
class Instruction:
    """One kind of instruction."""

    follows: Callable[[str, Arguments], bool]
    """Returns whether a non-empty text follows the instruction."""

    argument_types: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    """The instruction's arguments and their types."""

    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Allowed values of the arguments that have a fixed set of them."""

    def check(self, arguments: Arguments, location: str) -> None:
        """Raise DataError, prefixed with `location`, if an argument is missing or invalid."""
        for name, expected in self.argument_types.items():
            if not isinstance(arguments.get(name), expected) or isinstance(arguments[name], bool):
                raise DataError(f"{location} needs {name}, got {arguments.get(name)!r}")
            value = arguments[name]
            if isinstance(value, list) and not all(isinstance(item, str) for item in value):
                raise DataError(f"{location}: {name} must contain only strings, got {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise DataError(f"{location}: {name} must be finite, got {value!r}")
        for name, allowed in self.choices.items():
            if arguments.get(name) not in allowed:
                raise DataError(
                    f"{location}: {name} must be one of {', '.join(allowed)}, got"
                    f" {arguments.get(name)!r}"
                )


RELATIONS = ("at least", "less than")


def satisfies(count: int, relation: str, bound: int) -> bool:
    """Return whether a count satisfies `relation`, "at least" or "less than", to a bound."""
    return count >= bound if relation == "at least" else count < bound


def _has_keywords(text: str, arguments: Arguments) -> bool:
    return all(word.lower() in text.lower() for word in arguments["keywords"])


def _has_keyword_frequency(text: str, arguments: Arguments) -> bool:
    count = text.lower().count(arguments["keyword"].strip().lower())
    return satisfies(count, arguments["relation"], int(arguments["frequency"]))


def _has_no_forbidden_words(text: str, arguments: Arguments) -> bool:
    forbidden = (re.escape(word) for word in arguments["forbidden_words"])
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden)


def _has_letter_frequency(text: str, arguments: Arguments) -> bool:
    count = text.lower().count(arguments["letter"].strip().lower())
    return satisfies(count, arguments["let_relation"], int(arguments["let_frequency"]))


def _has_capital_words(text: str, arguments: Arguments) -> bool:
    # `DON'T` counts twice, since its suffix is tokenized as a word.
    separated = re.sub(r"(?i)n't\b|'(?:s|m|d|ll|re|ve)\b", r" \g<0>", text)
    words = re.findall(r"[^\s,;:@#$%&?!()\[\]{}<>\"\u2013\u2014\u2018-\u201d*]+", separated)
    count = sum(word.isupper() for word in words)
    return satisfies(count, arguments["capital_relation"], int(arguments["capital_frequency"]))


NUMBER = (int, float)

WORDS = {
    "keywords:existence": Instruction(_has_keywords, {"keywords": list}),
    "keywords:frequency": Instruction(
        _has_keyword_frequency, {"keyword": str, "frequency": NUMBER}, {"relation": RELATIONS}
    ),
    "keywords:forbidden_words": Instruction(_has_no_forbidden_words, {"forbidden_words": list}),
    "keywords:letter_frequency": Instruction(
        _has_letter_frequency, {"letter": str, "let_frequency": NUMBER}, {"let_relation": RELATIONS}
    ),
    "change_case:capital_word_frequency": Instruction(
        _has_capital_words, {"capital_frequency": NUMBER}, {"capital_relation": RELATIONS}
    ),
    "change_case:english_capital": Instruction(
        lambda text, _: text.isupper() and is_language(text, "en")
    ),
    "change_case:english_lowercase": Instruction(
        lambda text, _: text.islower() and is_language(text, "en")
    ),
    "punctuation:no_comma": Instruction(lambda text, _: "," not in text),
}
"""The instructions on words, by their names in the data set."""


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
    """Return whether a text is in a language, by the script of its letters and its frequent words.

    Most letters must be in the language's script. Among languages that share it, the one whose
    frequent words occur most often in the text wins; without frequent words, it is English.
    """
    letters = Counter(unicodedata.name(char, "").split(" ")[0] for char in text if char.isalpha())
    script = SCRIPTS[language]
    if 2 * letters[script] <= letters.total():
        return False
    candidates = [code for code, name in SCRIPTS.items() if name == script]
    if len(candidates) == 1:
        return True
    words = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]+)?", text.lower()))
    counts = {code: sum(words[word] for word in frequent_words()[code]) for code in candidates}
    return counts[language] == max(counts.values()) and (language == "en" or counts[language] > 0)


@functools.cache
def frequent_words() -> dict[str, frozenset[str]]:
    """Read the frequent words of each language."""
    text = (Path(__file__).parent / "function_words.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {language: frozenset(words) for language, *words in rows}


def _is_in_language(text: str, arguments: Arguments) -> bool:
    return is_language(text, arguments["language"])


LANGUAGE = {
    "language:response_language": Instruction(_is_in_language, choices={"language": tuple(SCRIPTS)})
}
"""The instruction on language, by its name in the data set."""


_CLOSING = "\"')]}\u2018\u2019\u201c\u201d\xab\xbb"
_END = re.compile(rf"[.!?](?:(?=[{re.escape(_CLOSING)};*:@({{[!?])|\s+(?=(\S+)))")
"""A mark that may end a sentence: before other punctuation, or before a space and the next word."""

ABBREVIATIONS = re.compile(
    "m(rs?|s|essrs)|dr|prof|gen|maj|col|lt|sen|rep|st|jr|sr|inc|ltd|corp|cos?|bros|vs|ok|jan|feb|aug|"
    r"sept?|oct|nov|dec|tues|wed|fri|ave|ft|ph\.d|m\.b\.a|[ap]\.m|u\.[skn]|u\.s\.a|n\.y|d\.c|l\.a"
)
"""Words whose dot ends a sentence only before one of `STARTERS`."""

STARTERS = re.compile(
    "(?:an?|although|among|and|as|at|both|but|by|despite|for|from|he|her|his|however|i|if|in|indeed|"
    "instead|is|its?|many|my|of|on|one|or|our|she|since|so|some|that|the(ir|n|re|se|y)?|this|though|"
    r"to|under|we|what|when|while|who|with|yet)\b"
)
"""Words that are capitalized only at the beginning of a sentence."""


def count_sentences(text: str) -> int:
    """Count sentences according to Punkt's rules (Kiss and Strunk 2006).

    A dot in an abbreviation, an initial or an ellipsis doesn't end a sentence unless a capitalized
    frequent word follows, nor does a dot between a number and a lowercase letter, nor a line break.
    """
    count = 1
    for mark in _END.finditer(text):
        word = text[max(0, mark.start() - 40) : mark.start() + 1].rsplit(maxsplit=1)[-1]
        is_last = not text[mark.end() :].strip(f"{_CLOSING} \n")
        count += not is_last and _ends_sentence(word, mark[1] or "")
    return count


def _ends_sentence(word: str, following: str) -> bool:
    """Return whether a word's final punctuation ends the sentence, given the next word."""
    stripped = word.lower().rstrip(".").lstrip("\"'([{*")
    starts_sentence = following[:1].isupper() and STARTERS.match(following.lower()) is not None
    if not word.endswith("."):
        return True
    if word.endswith("..") or ABBREVIATIONS.fullmatch(stripped.rpartition("-")[2]):
        return starts_sentence
    if len(stripped) == 1 and stripped.isalpha():  # an initial
        return starts_sentence or not following[:1].isalpha()
    return not (stripped.isdecimal() and following[:1].islower())


def _has_num_sentences(text: str, arguments: Arguments) -> bool:
    return satisfies(count_sentences(text), arguments["relation"], int(arguments["num_sentences"]))


def _has_num_words(text: str, arguments: Arguments) -> bool:
    count = len(re.findall(r"\w+", text))
    return satisfies(count, arguments["relation"], int(arguments["num_words"]))


def split_pieces(text: str, separator: str) -> list[str]:
    """Split a text at a separator; drop empty pieces at the beginning and the end."""
    pieces = [piece.strip() for piece in text.split(separator)]
    return pieces[not pieces[0] : len(pieces) - (len(pieces) > 1 and not pieces[-1])]


def _has_num_paragraphs(text: str, arguments: Arguments) -> bool:
    pieces = split_pieces(text, "***")
    return all(pieces) and len(pieces) == int(arguments["num_paragraphs"])


def _has_first_word(text: str, arguments: Arguments) -> bool:
    """Return whether the paragraph count, and the nth paragraph's first word, are as required."""
    pieces = [piece.strip() for piece in text.split("\n\n")]
    number, count = int(arguments["nth_paragraph"]), sum(map(bool, pieces))
    if count != int(arguments["num_paragraphs"]) or not 1 <= number <= count:
        return False
    first = pieces[number - 1].partition(" ")[0].split("\n")[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", first)[0].lower() == arguments["first_word"].lower()


LENGTHS = {
    "length_constraints:number_sentences": Instruction(
        _has_num_sentences, {"num_sentences": NUMBER}, {"relation": RELATIONS}
    ),
    "length_constraints:number_words": Instruction(
        _has_num_words, {"num_words": NUMBER}, {"relation": RELATIONS}
    ),
    "length_constraints:number_paragraphs": Instruction(
        _has_num_paragraphs, {"num_paragraphs": NUMBER}
    ),
    "length_constraints:nth_paragraph_first_word": Instruction(
        _has_first_word, {"num_paragraphs": NUMBER, "nth_paragraph": NUMBER, "first_word": str}
    ),
}
"""The instructions on length, by their names in the data set."""


OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Phrases of which a constrained response must contain one."""

_BULLET = re.compile(r"^\s*(?:\*[^*].*|-.*)$", re.MULTILINE)


def _has_placeholders(text: str, arguments: Arguments) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= int(arguments["num_placeholders"])


def _has_postscript(text: str, arguments: Arguments) -> bool:
    """Return whether the text contains the marker, in any case; a space may follow its dots."""
    marker = re.escape(arguments["postscript_marker"].strip().lower())
    return re.search(re.sub(r"(?<=\.)(?=\w)", r"\\s?", marker), text.lower()) is not None


def _has_num_bullets(text: str, arguments: Arguments) -> bool:
    return len(_BULLET.findall(text)) == int(arguments["num_bullets"])


def _has_option(text: str, _: Arguments) -> bool:
    return any(option in text for option in OPTIONS)


def _has_highlights(text: str, arguments: Arguments) -> bool:
    """Return whether there are enough passages between single or double asterisks."""
    spans = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(span.strip("* \t")) for span in spans) >= int(arguments["num_highlights"])


def _has_sections(text: str, arguments: Arguments) -> bool:
    splitter = re.escape(arguments["section_spliter"].strip())
    return len(re.findall(rf"{splitter}\s?\d+", text)) >= int(arguments["num_sections"])


def _is_json(text: str, _: Arguments) -> bool:
    bare = re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip())
    try:
        json.loads(bare)
    except ValueError:
        return False
    return True


def _has_title(text: str, _: Arguments) -> bool:
    return any(title.strip("<> \t") for title in re.findall(r"<<[^\n]+>>", text))


def _has_two_responses(text: str, _: Arguments) -> bool:
    pieces = split_pieces(text, "******")
    return all(pieces) and len(pieces) == len(set(pieces)) == 2


def _repeats_prompt(text: str, arguments: Arguments) -> bool:
    prompt = arguments["prompt_to_repeat"].strip().lower()
    return text.strip().lower().startswith(prompt)


def _ends_with_phrase(text: str, arguments: Arguments) -> bool:
    end = arguments["end_phrase"].strip().lower()
    return text.strip().strip('"').lower().endswith(end)


def _is_quoted(text: str, _: Arguments) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare.startswith('"') and bare.endswith('"')


FORMS = {
    "detectable_content:number_placeholders": Instruction(
        _has_placeholders, {"num_placeholders": NUMBER}
    ),
    "detectable_content:postscript": Instruction(_has_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": Instruction(_has_num_bullets, {"num_bullets": NUMBER}),
    "detectable_format:constrained_response": Instruction(_has_option),
    "detectable_format:number_highlighted_sections": Instruction(
        _has_highlights, {"num_highlights": NUMBER}
    ),
    "detectable_format:multiple_sections": Instruction(
        _has_sections, {"section_spliter": str, "num_sections": NUMBER}
    ),
    "detectable_format:json_format": Instruction(_is_json),
    "detectable_format:title": Instruction(_has_title),
    "combination:two_responses": Instruction(_has_two_responses),
    "combination:repeat_prompt": Instruction(_repeats_prompt, {"prompt_to_repeat": str}),
    "startend:end_checker": Instruction(_ends_with_phrase, {"end_phrase": str}),
    "startend:quotation": Instruction(_is_quoted),
}
"""The instructions on form, by their names in the data set."""


INSTRUCTIONS = {**WORDS, **LANGUAGE, **LENGTHS, **FORMS}
"""Instructions by their names in the data set."""


def read_ifeval(options: ReadOptions) -> list[Question]:
    """Read the prompts from a data path.

    Raises:
        DataError: a row lacks a column, or has an unknown instruction or invalid arguments.
    """
    assert options.path is not None
    rows, _ = read_task_rows(options.path, options.limit)
    return [
        Question(
            (Message("user", str(get_column(row, "prompt"))),),
            {"instructions": _parse_instructions(row)},
        )
        for row in rows
    ]


def grade_ifeval(question: Question, response: str) -> Grades:
    """Return whether each instruction is followed, and whether all are, by strict and loose rules.

    The loose grades also accept a response that follows the instruction without its first or last
    line or without asterisks, because introductions, closing sentences and bold text break many
    checks.
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
    """Return whether a response follows an instruction; an empty response follows none."""
    return bool(response.strip()) and INSTRUCTIONS[name].follows(response, arguments)


def variants(response: str) -> Iterator[str]:
    """Yield the response with and without its first and last lines, each also without asterisks."""
    lines = response.split("\n")
    shorter = ("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))
    for text in (response, *shorter):
        yield text
        yield text.replace("*", "")


def _parse_instructions(row: Row) -> list[tuple[str, Arguments]]:
    names = get_column(row, "instruction_id_list", list)
    all_kwargs = get_column(row, "kwargs", list)
    assert isinstance(names, list)
    assert isinstance(all_kwargs, list)
    if not names or len(names) != len(all_kwargs):
        raise DataError(
            f"{row.origin}: instruction_id_list has {len(names)} entries, but kwargs has"
            f" {len(all_kwargs)}; each instruction needs a mapping, which may be empty"
        )
    return [_parse_instruction(row, *pair) for pair in zip(names, all_kwargs, strict=True)]


def _parse_instruction(row: Row, name: object, kwargs: object) -> tuple[str, Arguments]:
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise DataError(
            f"{row.origin}: there is no instruction {name}; {suggestion(str(name), INSTRUCTIONS)}"
        )
    if not isinstance(kwargs, Mapping):
        raise DataError(f"{row.origin}: kwargs must contain a mapping for {name}, got {kwargs!r}")
    arguments: dict[str, Any] = {key: value for key, value in kwargs.items() if value is not None}
    INSTRUCTIONS[str(name)].check(arguments, f"{row.origin}: {name}")
    return str(name), arguments


IFEVAL = Task("ifeval", read_ifeval, grade_ifeval, max_new_tokens=1024, needs_path=True)
