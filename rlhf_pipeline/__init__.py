"""The installed package: the folders and files of a checkout, under one name.

A checkout has `pipeline/`, `inference/`, `step1_sft/`, `train.py`, ... at its top, and they import
each other by these names. In an environment shared with other software such names could collide, so
a wheel puts them under this package, and only `rlhf_pipeline` is importable. `rlhf`, `rlhf-chat`
and `rlhf-serve` run them; `python -m rlhf_pipeline MODULE` runs any other module. `from
rlhf_pipeline import Engine` imports the training engine in other programs.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pipeline.library import Engine, process_group

__all__ = ["Engine", "add_to_path", "process_group"]

_HERE = Path(__file__).resolve().parent

ROOT = _HERE if (_HERE / "pipeline").is_dir() else _HERE.parent
"""Directory of `pipeline/` and other folders: this package in a wheel, otherwise the checkout."""


def add_to_path() -> None:
    """Make `pipeline`, `inference` and the steps importable, ahead of modules of the same names."""
    root = str(ROOT)
    if root in sys.path:
        sys.path.remove(root)
    sys.path.insert(0, root)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import `Engine` or `process_group` on first use; a program's own modules take precedence."""
    if name not in ("Engine", "process_group"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    path = importlib.import_module("pipeline").__file__
    if path is None or not Path(path).is_relative_to(ROOT):
        raise ImportError(f"rename {path}, which shadows the module pipeline of rlhf_pipeline")
    return getattr(importlib.import_module("rlhf_pipeline.library"), name)
