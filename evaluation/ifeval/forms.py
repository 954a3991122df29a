"""Instructions about the form of a text: lists, sections, titles, JSON, its beginning and end."""

import json
import re

from evaluation.ifeval.instruction import Arguments, Instruction
from evaluation.ifeval.words import NUMBER

OPTIONS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
"""One of which an answer must have where it is constrained to them."""

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
