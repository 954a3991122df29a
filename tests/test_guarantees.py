"""docs/guarantees.md: every test that it names exists, and runs in the tier that it says."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)?::(test_\w+)`")
MARK = re.compile(r"mark\.(faults|grid|jobs|serve)")


@functools.cache
def tiers_of(file: str) -> dict[str, set[str]]:
    """By test of a file, where its cases run: a mark of the whole test, or of some of them."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    tables: dict[str, str] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        if isinstance(target, ast.Name):
            tables[target.id] = ast.unparse(node)
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        whole: set[str] = set()
        some: set[str] = set()
        for decorator in map(ast.unparse, node.decorator_list):
            if mark := re.fullmatch(r"pytest\.mark\.(faults|grid|jobs|serve)", decorator):
                whole.add(mark[1])
                continue
            cases = [text for name, text in tables.items() if re.search(rf"\b{name}\b", decorator)]
            some |= {mark for text in (decorator, *cases) for mark in MARK.findall(text)}
        found[node.name] = (whole or {"test"}) | some
    return found


def promises() -> Iterator[tuple[int, list[tuple[str, str]], set[str]]]:
    """(line, files and names of tests, tiers) of each row of the page's tables."""
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("| ") or "::" not in line:
            continue
        tests: list[tuple[str, str]] = []
        for file, name in NAMED.findall(line):
            tests.append((file or tests[-1][0], name))
        tier = line.rstrip(" |").rsplit(" | ", 1)[1]
        yield number, tests, set(re.findall(r"\b(test|faults|grid|jobs|serve)\b(?=:|;|$)", tier))


def test_every_promise_names_tests_that_exist_and_their_tiers() -> None:
    wrong: list[str] = []
    count = 0
    for number, tests, tiers in promises():
        missing = [f"{file}::{name}" for file, name in tests if name not in tiers_of(file)]
        wrong += [f"line {number}: there is no {test}" for test in missing]
        run = set().union(*(tiers_of(file).get(name, set()) for file, name in tests))
        if not missing and run != tiers:
            wrong.append(f"line {number} says {sorted(tiers)}, and they run in {sorted(run)}")
        count += len(tests)

    assert count > 100
    assert not wrong, "\n".join(wrong)


def test_every_test_that_the_results_name_exists() -> None:
    missing: list[str] = []
    for line in (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines():
        file = ""
        for named, name in NAMED.findall(line):
            file = named or file
            if name not in tiers_of(file):
                missing.append(f"{file}::{name}")
    assert not missing
