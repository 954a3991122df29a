"""Words of the command line as values, and the parser's messages as one sentence."""

import json
import re
import typing

from pipeline.errors import ConfigError
from pipeline.settings.describe import section_class, without_none


def as_word(option: str, kind: object, words: list[str]) -> str:
    """The words after an option as the one word that jsonargparse reads."""
    kind = without_none(kind)
    # A list of texts may have an item in braces; a mapping is not a list.
    is_texts = typing.get_origin(kind) is tuple and typing.get_args(kind)[0] is str
    opening = ("[",) if is_texts else ("[", "{")
    is_json = len(words) == 1 and words[0][:1] in opening
    if is_json or words == ["null"]:
        return words[0]
    if typing.get_origin(kind) is tuple:
        if not words:
            raise ConfigError(f"{option} takes at least one value, got none")
        return json.dumps(items_of(kind, words))
    if typing.get_origin(kind) is dict and words and all("=" in word for word in words):
        return json.dumps(dict(word.split("=", 1) for word in words))
    if not words and kind is bool:
        return "true"
    if section_class(kind) is not None:
        if words:
            raise ConfigError(f"{option} holds settings: set them one by one, {option}.NAME VALUE")
        return "{}"
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise ConfigError(f"{option} takes one value, {got}")
    return words[0]


def items_of(kind: object, words: list[str]) -> list[str]:
    """The items of a list setting; numbers may be joined by commas: "2,4,4"."""
    if str in typing.get_args(kind):
        return words
    return [item for item in ",".join(words).split(",") if item]


def one_sentence(message: str, section: str) -> str:
    """The parser's multi-line message as one sentence that names the setting."""
    names = re.findall(r'Parser key "([^"]+)":', message)
    if not names:
        return " ".join(message.split())
    problem = message.rpartition(f'Parser key "{names[-1]}":')[2]
    if len(names) > 1:  # inside an optional section: drop the alternative, null
        problem = problem.split("\n    -")[0]
    name = section + ".".join(names)
    expected = re.findall(r"Expected (?:an? )?(.+?)(?=\. Got value|$)", problem, re.MULTILINE)
    got = re.search(r"(?:Got|Given) value:[ ]?(.*)", problem)
    if not expected or not got:
        return f"{name}: {' '.join(problem.split())}"
    kinds = " or ".join(_in_words(kind) for kind in expected)
    value = got[1].strip() or "nothing"
    if value.startswith("["):  # words of the command line, which have no quotes there
        value = value.replace("'", "")
    return f"{name} must be {kinds}, got {'null' if value == 'None' else value}"


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple": "a list",
    "dict": "a mapping of names to values",
    "NoneType": "null",
    "Path": "a path",
}


def _in_words(kind: str) -> str:
    """A type as jsonargparse prints it, in plain words."""
    if choices := re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", kind):
        return "one of " + choices[1]
    if length := re.fullmatch(r"tuple with (\d+) elements", kind):
        return f"a list of {length[1]} values"
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind).strip()
    return _WORDS.get(name, name)
