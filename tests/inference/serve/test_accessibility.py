"""The page for people who don't see it, see little, or have no mouse."""

from typing import Any

import pytest

from tests.inference.serve.serving import Running, in_browser


@pytest.mark.serve
@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["chat", "compare", "rate"])
def test_axe_finds_no_violation(browser: Any, served: Running, view: str, theme: str) -> None:
    """Of level AA of WCAG 2.2, and of what axe-core calls best practice."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(color_scheme=theme)
    page = context.new_page()
    page.goto(f"{served.url}/#{view}")
    page.locator("main :is(textarea, button, select)").first.wait_for()
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
