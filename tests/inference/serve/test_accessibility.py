"""Accessibility of the page."""

from typing import Any

import pytest

from tests.inference.serve.serving import LiveServer, in_browser


@pytest.mark.serve
@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["chat", "compare", "rate"])
def test_axe_finds_no_accessibility_violations(
    browser: Any, page_server: LiveServer, view: str, theme: str
) -> None:
    """Rules of WCAG 2.2 level AA, and axe-core's best practices."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(color_scheme=theme)
    page = context.new_page()
    page.goto(f"{page_server.url}/#{view}")
    page.locator("main :is(textarea, button, select)").first.wait_for()
    if view == "chat":
        page.get_by_role("button", name="Settings").click()
        page.locator("main textarea").fill("What is a kettle?")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").first.wait_for()

    result = axe.run(page).response

    assert len(result["passes"]) > 15
    assert not [
        (rule["id"], [node["target"] for node in rule["nodes"]]) for rule in result["violations"]
    ]
    context.close()
