"""The installed package: the folders and files of a checkout, below one name.

A checkout has `pipeline/`, `inference/`, `step1_sft/`, `train.py`, ... at its top, and they import
each other by these names. In an environment shared with other software such names would collide, so
a wheel puts them all below this package, and nothing but `rlhf_pipeline` is importable there.
`rlhf`, `rlhf-chat` and `rlhf-serve` run them; `python -m rlhf_pipeline MODULE` runs any other of
their modules; a program that uses the engine calls `rlhf_pipeline.add_to_path()` first.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent

ROOT = _HERE if (_HERE / "pipeline").is_dir() else _HERE.parent
"""Directory of `pipeline/` and the others: this package in a wheel, else the checkout."""


def add_to_path() -> None:
    """Make `pipeline`, `inference` and the steps importable, ahead of other modules so named."""
    root = str(ROOT)
    if root in sys.path:
        sys.path.remove(root)
    sys.path.insert(0, root)
