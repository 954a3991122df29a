"""The packages of the project, found in the file system so that tests cover new ones."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = tuple(
    sorted(
        file.parent.name
        for file in ROOT.glob("*/__init__.py")
        if file.parent.name not in {"tests", "benchmarks"}
    )
)
"""Packages that a user installs."""
