"""One sentence where the reward model that PPO is to climb is near chance."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from step3_ppo.reward_model import check_reward_model


def warned(directory: Path, result: Any, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    (directory / "result.json").write_text(json.dumps(result))
    check_reward_model(str(directory))
    return " ".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


def test_a_reward_model_near_chance_is_named_with_its_figure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(accuracy: float, pairs: int) -> str:
        result = {"eval": {"accuracy_after": accuracy, "pairs": pairs}}
        return warned(tmp_path, result, caplog)

    assert "orders 49.3 % of 150 held-out pairs right, where guessing gives 50 %" in said(
        0.493, 150
    )
    assert "54.0 % of 5000" in said(0.54, 5000)
    assert "60.0 % of 64" in said(0.6, 64)  # guessing gives as much in one of twenty
    assert said(0.6, 1000) == said(0.96, 768) == ""
