"""The code speaks the field's language: words of a private one are no part of a name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.sources import PACKAGES, ROOT

FIELD_WORDS = {
    "said": "outputs, given, message",
    "told": "signal_received, published",
    "tell": "log_once, publish, announce",
    "asked": "query, prompts, requested",
    "asking": "forward passes",
    "nap": "offload",
    "naps": "offload",
    "napping": "offloading",
    "tape": "operator trace",
    "tapes": "operator traces",
    "taped": "traced, replayed",
    "flip": "weight sync",
    "suspects": "failure attribution",
    "notices": "heartbeats",
    "unburied": "unreaped",
    "mend": "suggest_fix, fix",
    "mended": "fixed",
    "ladder": "fallback order",
    "rung": "option",
    "rungs": "options",
    "rehearsal": "warm-up checkpoint",
    "rehearsals": "warm-up checkpoints",
    "meter": "activation profiler",
    "division": "sharding",
    "divisions": "tp_sizes",
    "peers": "tp_group",
    "judge": "verifier, verify",
    "judged": "verified",
    "meeting": "barrier, rendezvous",
    "meetings": "rendezvous",
}
"""Each with what the field says instead; CONTRIBUTING has the terms."""

NOT_OURS = {"tell"}
"""Names of the standard library: the position in a file."""

OF_A_PACKAGE = {"rewards": {"judge"}, "evaluation": {"judge"}}
"""Words that are the field's own there: a language model that scores is a judge."""


def names(file: Path) -> Iterator[str]:
    """Every identifier of a file that it defines or uses, and its own name."""
    yield file.stem
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def words(name: str) -> set[str]:
    """`_tell_last` and `TellLast` have tell and last."""
    return {each.lower() for each in re.findall(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])", name)}


def test_no_name_has_a_word_of_a_private_language() -> None:
    found = sorted(
        {
            f"{file.relative_to(ROOT)}: {name}; say {FIELD_WORDS[word]}"
            for package in (*PACKAGES, "benchmarks")
            for file in (ROOT / package).rglob("*.py")
            for name in names(file)
            for word in words(name) & FIELD_WORDS.keys() - OF_A_PACKAGE.get(package, set())
            if name not in NOT_OURS
        }
    )

    assert not found, "\n".join(found)
