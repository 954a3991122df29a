"""The operators: folders with a `cases.py`. Nothing lists them, so a copied folder is one more."""

from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def operators(*, on_gpu: bool = False) -> list[str]:
    """Names of the folders; with `on_gpu` of those that hold a kernel for GPUs."""
    folders = (file.parent for file in HERE.glob("*/cases.py"))
    return sorted(each.name for each in folders if not on_gpu or (each / "cuda.cu").exists())


def cases_of(name: str) -> Any:  # noqa: ANN401
    """The module of an operator's cases: what is timed, tested and measured."""
    return import_module(f"pipeline.kernels.{name}.cases")
