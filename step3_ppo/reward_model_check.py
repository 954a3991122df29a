"""Whether the reward model can tell good responses from bad ones, as step 2 has recorded it."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CHANCE = 0.55
"""Held-out accuracy of a reward model at which a policy has nothing to climb."""


def check_reward_model(path: str | None) -> None:
    """Warn where step 2's result beside the reward model says that it is near chance."""
    result = _result(path)
    accuracy, pairs = result.get("accuracy_after"), result.get("pairs")
    if not isinstance(accuracy, int | float):
        return
    count = float(pairs) if isinstance(pairs, int | float) else 0.0
    # Two standard errors of guessing; few pairs can't tell a weak model from none.
    chance = max(CHANCE, 0.5 + 1 / math.sqrt(count)) if count > 0 else CHANCE
    if accuracy < chance:
        logger.warning(
            "the reward model orders %.1f %%%s held-out pairs right, where guessing gives 50 %%:"
            " there is next to nothing to climb; train step 2 on more pairs first",
            100 * accuracy,
            f" of {count:.0f}" if count > 0 else " of",
        )


def _result(path: str | None) -> Mapping[str, Any]:
    """The `eval` object that step 2 left in the reward model's directory; empty without one."""
    try:
        result = json.loads((Path(path or "") / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = result.get("eval") if isinstance(result, dict) else None
    return found if isinstance(found, dict) else {}
