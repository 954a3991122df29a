"""docs/methods.md: a section for each method, with its paper, and the numbers of its row."""

import re
from pathlib import Path

import pytest

from step3_ppo.config import PPOConfig
from step3_ppo.methods import METHODS

PAGE = Path(__file__).parent.parent.parent / "docs" / "methods.md"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_section_that_is_true_to_its_row(method: str) -> None:
    pieces = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    text = sections[method]
    of_row, _, _ = text.partition("###")  # VAPO's parts are settings over ppo
    numbers = dict(re.findall(r"`(\w+)` (\d[\d.]*(?:e-\d+)?)", of_row))
    row = METHODS[method]
    named = {"group_size", "kl_coef", "clip_high", "dynamic_sampling", "overlong_buffer"}

    assert "arxiv.org/abs/" in text
    assert all(part in text for part in ("**When.**", "**Settings.**", "**Watch.**"))
    assert row.keys() & named <= numbers.keys()
    for name, number in numbers.items():
        assert float(number) == row.get(name, getattr(PPOConfig, name)), name
