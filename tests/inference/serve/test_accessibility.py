"""The page for people who don't see it, see little, or have no mouse."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.inference.serve.serving import Running, in_browser, serving_page

PAIRS = (
    *(("text", "back"), ("text", "card"), ("text", "mine"), ("dim", "back"), ("dim", "card")),
    *(("on-accent", "accent"), ("bad", "back"), ("bad", "card"), ("dim", "mine")),
)
"""Colours of texts, and what they stand on."""


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    digits = colour.lstrip("#")
    digits = digits if len(digits) == 6 else "".join(digit * 2 for digit in digits)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving_page(tmp_path_factory.mktemp("out")) as running:
        yield running


@pytest.mark.serve
@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["chat", "compare", "rate", "watch"])
def test_axe_finds_no_violation(browser: Any, served: Running, view: str, theme: str) -> None:
    """Of level AA of WCAG 2.2, and of what axe-core calls best practice."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(color_scheme=theme)
    page = context.new_page()
    page.goto(f"{served.url}/#{view}")
    page.locator("main :is(textarea, button, select, svg)").first.wait_for()
    if view == "chat":
        page.get_by_role("button", name="Settings").click()
        page.locator("main textarea").fill("What is a kettle?")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").first.wait_for()

    found = axe.run(page).response

    assert len(found["passes"]) > 15
    assert not [
        (each["id"], [node["target"] for node in each["nodes"]]) for each in found["violations"]
    ]
    context.close()
