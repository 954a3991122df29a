"""Identity of a training, to tell its model from another one at the same path."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path


def training_id(result: Mapping[str, object]) -> str:
    """An id of the training that left this result.json, by its steps, tokens and figures.

    Figures on held-out rows have all their digits: only the same weights have the same ones. Time
    and settings don't count, so that a training that was repeated bit for bit is the same.
    """
    known = [result.get(name) for name in ("steps", "tokens", "eval")]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def training_at(path: str) -> str | None:
    """The training whose result is stored next to the model at `path`; None of any other model."""
    try:
        result = json.loads((Path(path) / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return training_id(result) if isinstance(result, dict) else None
