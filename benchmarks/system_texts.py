"""A few megabytes of real text that every machine has, as rows to pre-train on.

The language reference that `help()` shows, the docstrings of Python's standard library, a document
for each topic and module; and the system's licences, where it keeps any.

    python -m benchmarks.system_texts --out texts.jsonl
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

SHORTEST = 100
"""Characters of a document."""

LICENCES = Path("/usr/share/common-licenses")
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "pydoc_data"}


def documents() -> Iterator[str]:
    """The texts, in an order of their names."""
    yield from (text for _, text in sorted(topics.topics.items()))
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(file.relative_to(library).parts):
            yield docstrings(file)
    if LICENCES.is_dir():
        files = (file for file in LICENCES.iterdir() if not file.is_symlink())
        yield from (file.read_text(errors="replace") for file in sorted(files))


def docstrings(file: Path) -> str:
    """Those of a module; nothing where it can't be parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(each) for each in ast.walk(tree) if isinstance(each, documented))
    return "\n\n".join(text for text in found if text)


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    out = parser.parse_args().out
    texts = [text for text in documents() if len(text) >= SHORTEST]
    with out.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    print(f"{out}: {len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} M characters")


if __name__ == "__main__":
    main()
