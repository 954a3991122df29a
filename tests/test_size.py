"""Limits on the length of loops, functions, files, packages and documentation lines."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import PACKAGES, ROOT

LOOP_LINES, FUNCTION_LINES, FILE_LINES, DOC_COLUMNS = 40, 60, 700, 100

PACKAGE_LINES = {
    "pipeline": 36_000,
    "inference": 9_000,
    "rewards": 3_800,
    "evaluation": 2_200,
    "step0_pretrain": 500,
    "step1_sft": 500,
    "step2_reward": 3_000,
    "step3_ppo": 5_600,
    "step3_preference": 1_900,
    "benchmarks": 3_000,
    "tests": 36_000,
    "docs": 5_000,
}
"""Lines of source files and pages; lower a limit when a package shrinks."""

SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h", ".js", ".css", ".html", ".jinja"}


def function_lengths(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and length of each function in a file, including nested ones."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_training_loop_of_each_step_is_short() -> None:
    files = sorted(ROOT.glob("step*/train.py"))
    loops = {
        str(file.relative_to(ROOT)): length
        for file in files
        for name, length in function_lengths(file)
        if name in ("train", "iterate")
    }

    assert len(files) == 5
    assert not {name: length for name, length in loops.items() if length > LOOP_LINES}


def test_functions_and_files_are_short() -> None:
    sources = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    long = [
        f"{name}() of {file.relative_to(ROOT)} has {length} lines"
        for file in sources
        for name, length in function_lengths(file)
        if length > FUNCTION_LINES
    ]
    for file in sources:
        length = file.read_text(encoding="utf-8").count("\n")
        if length > FILE_LINES:
            long.append(f"{file.relative_to(ROOT)} has {length} lines of {FILE_LINES}")

    assert not long, "\n".join(long)


def test_documentation_lines_have_at_most_100_columns() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    long_lines = [
        f"{page.relative_to(ROOT)}:{number} has {len(line)} columns"
        for page in sorted(pages)
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > DOC_COLUMNS and not line.lstrip().startswith("|") and "](" not in line
    ]

    assert len(pages) > 15
    assert not long_lines, "\n".join(long_lines)


def test_packages_stay_within_their_line_limits() -> None:
    lines = {
        package: sum(
            file.read_text(encoding="utf-8").count("\n")
            for file in (ROOT / package).rglob("*")
            if file.suffix in SUFFIXES or (package == "docs" and file.suffix == ".md")
        )
        for package in PACKAGE_LINES
    }

    assert not [
        f"{name} has {count} lines of {PACKAGE_LINES[name]}: make room, or raise PACKAGE_LINES"
        for name, count in lines.items()
        if count > PACKAGE_LINES[name]
    ]
