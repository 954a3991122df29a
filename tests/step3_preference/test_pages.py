"""docs/preference.md: a section for each method, with its paper, and the numbers of its row."""

import re
from pathlib import Path

import pytest

from step3_preference.config import PreferenceConfig
from step3_preference.methods import METHODS, TITLES

PAGE = Path(__file__).parent.parent.parent / "docs" / "preference.md"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_section_that_is_true_to_its_row(method: str) -> None:
    pieces = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = dict(zip(pieces[1::2], pieces[2::2], strict=True))[method]
    settings = text.partition("**Settings.**")[2].partition("**Watch.**")[0]
    numbers = dict(re.findall(r"`(\w+)` (\d[\d.]*)", settings))
    row = METHODS[method]

    assert method in TITLES
    assert "arxiv.org/abs/" in text
    assert all(part in text for part in ("**When.**", "**Settings.**", "**Watch.**"))
    named = {"beta", "gamma", "label_smoothing", "nll_coef"}
    assert row.keys() & named <= numbers.keys()
    for name, number in numbers.items():
        assert float(number.rstrip(".")) == row.get(name, getattr(PreferenceConfig, name)), name


@pytest.mark.parametrize("method", METHODS)
def test_every_row_is_a_set_of_settings_that_can_be_taken_together(method: str) -> None:
    assert PreferenceConfig(method=method, **METHODS[method]).step_name == f"step3_{method}"
