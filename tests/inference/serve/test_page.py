"""The page in a real browser."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inference.ratings import active_ratings, read_ratings
from tests.inference.serve.serving import LiveServer, get, in_browser

MARKUP = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1>",
    "[x](javascript:window.hit=1)",
    "```\n</pre><script>window.hit=1</script>\n```",
    "`<iframe srcdoc='<script>parent.hit=1</script>'>`",
    "<style>*{display:none}</style><a href='javascript:hit=1'>a</a>",
)


@pytest.fixture
def page(browser: Any, page_server: LiveServer) -> Iterator[Any]:
    """A page 360 pixels wide, which must have no script errors or policy violations."""
    context = browser.new_context(viewport={"width": 360, "height": 720})
    new_page = context.new_page()
    errors: list[str] = []
    new_page.on("pageerror", lambda error: errors.append(str(error)))
    new_page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    new_page.goto(page_server.url)
    new_page.set_default_timeout(20_000)
    yield new_page
    assert new_page.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()
    assert errors == []


def read_all_ratings(page_server: LiveServer) -> list[Any]:
    assert page_server.state.ratings is not None
    return [*active_ratings(read_ratings(page_server.state.ratings.path))]


@pytest.mark.jobs
@in_browser
def test_dialogue_survives_a_reload_and_can_be_rated(page: Any, page_server: LiveServer) -> None:
    before = len(read_all_ratings(page_server))
    page.get_by_label("Message", exact=True).fill("What is 2 plus 2?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="Send").wait_for()
    first = page.locator(".turn.assistant .text").inner_text()
    page.get_by_label("Show tokens").check()
    page.locator(".token").nth(3).wait_for()
    page.reload()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".turn.assistant .text").inner_text() == first

    page.get_by_role("button", name="Good").click()
    page.get_by_text("Rated").wait_for()
    (thumb,) = read_all_ratings(page_server)[before:]
    assert (thumb["kind"], thumb["choice"]) == ("thumb", 1)
    assert thumb["answers"][0]["text"].strip() == first.strip()
    page.get_by_role("button", name="Good").click()
    page.get_by_text("Removed the rating").wait_for()
    assert len(read_all_ratings(page_server)) == before

    page.get_by_role("button", name="Write a better one").click()
    page.get_by_label("Better response").fill("It is 4.")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Saved as a demonstration").wait_for()
    assert read_all_ratings(page_server)[-1]["edit"] == "It is 4."

    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message", exact=True).input_value() == "What is 2 plus 2?"


@in_browser
def test_markdown_is_rendered_and_settings_close_on_view_change(page: Any) -> None:
    text = "# T\n- **a**\n  1. b\n\n| x | y |\n|---|---|\n| 1 | `z` |\n\n```py\nq = 1\n```\n"
    tokens = [{"token": "```", "logprob": -1, "top_logprobs": []}]
    answer = {"model": "m", "finish": "length", "token_ids": [1] * 90, "tokens": tokens}
    turns = [
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": 5 * text, "answer": answer},
    ]
    page.evaluate("turns => localStorage.setItem('dialogue', turns)", json.dumps(turns))
    page.reload()
    page.get_by_text("cut off at 90 tokens").wait_for()
    page.get_by_label("Show tokens").check()

    shown = {tag: page.locator(f".text {tag}").count() for tag in ("h3", "ul ol", "td code", "pre")}
    assert shown == dict.fromkeys(shown, 5)
    assert page.locator(".tokens .token").count() == 1
    tools, composer = page.locator(".tools").last.bounding_box(), page.locator(".composer")
    assert tools["y"] + tools["height"] <= composer.bounding_box()["y"]
    page.get_by_role("button", name="Settings").click()
    length = page.get_by_label("Maximum response")
    assert length.get_attribute("placeholder") == "12"
    page.goto(page.url.partition("#")[0] + "#rate")
    page.get_by_text("Each choice is a preference").wait_for()
    assert not length.is_visible()


@in_browser
def test_markup_of_a_model_is_shown_as_text(page: Any, page_server: LiveServer) -> None:
    """The markup is in a stored dialogue, as if a model had generated it."""
    turns = [
        turn
        for text in MARKUP
        for turn in (
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "answer": {"model": text, "text": text}},
        )
    ]
    page.evaluate("turns => localStorage.setItem('dialogue', turns)", json.dumps(turns))

    page.reload()
    page.get_by_role("button", name="Regenerate").wait_for()

    assert page.evaluate("window.hit") is None
    assert page.locator("main script, main iframe, main img, main a, main style").count() == 0
    texts = page.locator(".turn.user .text").all_inner_texts()
    assert [text.split() for text in texts] == [text.split() for text in MARKUP]
    assert get(page_server, "/api/server").status == 200
