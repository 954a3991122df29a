"""The page in a real browser, and how large it is."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from inference.ratings.file import read_ratings, standing_ratings
from inference.serve.models import ModelPath
from tests.inference.serve.serving import (
    Running,
    chat,
    get,
    in_browser,
    post,
    serving_page,
)

TWO = (ModelPath("first", "embedded"), ModelPath("second", "embedded", seed=1))

MARKUP = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1>",
    "[x](javascript:window.hit=1)",
    "```\n</pre><script>window.hit=1</script>\n```",
    "`<iframe srcdoc='<script>parent.hit=1</script>'>`",
    "<style>*{display:none}</style><a href='javascript:hit=1'>a</a>",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving_page(tmp_path_factory.mktemp("out")) as running:
        yield running


@pytest.fixture
def page(browser: Any, served: Running) -> Iterator[Any]:
    """A page 360 pixels wide, on which no script fails and no policy is broken."""
    context = browser.new_context(viewport={"width": 360, "height": 720})
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    opened.goto(served.url)
    opened.set_default_timeout(20_000)
    yield opened
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()
    assert wrong == []


def ratings(served: Running) -> list[Any]:
    assert served.state.ratings is not None
    return [*standing_ratings(read_ratings(served.state.ratings.path))]


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="Send").wait_for()


@pytest.mark.jobs
@in_browser
def test_a_dialogue_streams_is_kept_over_a_reload_and_its_response_is_rated(
    page: Any, served: Running
) -> None:
    before = len(ratings(served))
    ask(page, "What is 2 plus 2?")
    first = page.locator(".turn.assistant .text").inner_text()
    page.get_by_label("Show tokens").check()
    assert page.locator(".token").count() > 3
    page.reload()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".turn.assistant .text").inner_text() == first

    page.get_by_role("button", name="Good").click()
    page.get_by_text("Rated").wait_for()
    (thumb,) = ratings(served)[before:]
    assert (thumb["kind"], thumb["choice"]) == ("thumb", 1)
    assert thumb["answers"][0]["text"].strip() == first.strip()
    page.get_by_role("button", name="Good").click()
    page.get_by_text("The rating is undone").wait_for()
    assert len(ratings(served)) == before

    page.get_by_role("button", name="Write a better one").click()
    page.get_by_label("Better response").fill("It is 4.")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Saved as a demonstration").wait_for()
    assert ratings(served)[-1]["edit"] == "It is 4."

    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message", exact=True).input_value() == "What is 2 plus 2?"


@in_browser
def test_markup_of_a_model_is_text(page: Any, served: Running) -> None:
    """As if a model had written it, in a dialogue of this browser."""
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
    shown = page.locator(".turn.user .text").all_inner_texts()
    assert [text.split() for text in shown] == [text.split() for text in MARKUP]
    assert get(served, "/api/server").status == 200


def divergence(served: Running, page: Any) -> float:
    """Log p / p_first of the second model's response to the prompt on the page, with its seed."""
    seed = int(re.findall(r"Seed (\d+)", page.locator("#status").inner_text())[0])
    fields = {"seed": seed, "temperature": 0.7, "return_token_ids": True}
    body = {**chat("What is 3 plus 4?", **fields), "model": "second"}
    ids = post(served, "/v1/chat/completions", body).json["choices"][0]["token_ids"]
    prompt = post(served, "/tokenize", {"messages": body["messages"]}).json["tokens"]
    scored = {"prompt": prompt + ids, "echo": True, "max_tokens": 0, "logprobs": 1}
    first, second = (
        post(served, "/v1/completions", {"model": name, **scored}).json["choices"][0]["logprobs"]
        for name in ("first", "second")
    )
    pairs = zip(second["token_logprobs"], first["token_logprobs"], strict=True)
    return sum(own - other for own, other in list(pairs)[len(prompt) :])


@in_browser
def test_two_models_are_compared_blind_with_one_seed(page: Any, served: Running) -> None:
    before = len(ratings(served))
    page.get_by_role("link", name="Compare").click()
    page.get_by_label("Blind").check()
    page.get_by_label("Prompt").fill("What is 3 plus 4?")
    page.keyboard.press("Enter")
    page.get_by_role("group", name="Rating").wait_for()
    assert page.locator(".card h2").all_inner_texts() == ["A", "B"]
    left = page.locator(".card .text").first.inner_text()

    page.keyboard.press("1")
    page.get_by_role("button", name="Undo").wait_for()

    names = page.locator(".card h2").all_inner_texts()
    assert sorted(name.split(": ")[1] for name in names) == ["first", "second"]
    (pair,) = ratings(served)[before:]
    chosen = pair["answers"][pair["choice"]]
    assert pair["blind"] is True
    assert pair["shown"][0] == pair["choice"]
    assert chosen["text"].strip() == left.strip()
    assert names[0] == f"A: {chosen['model']}"
    assert len({answer["seed"] for answer in pair["answers"]}) == 1
    assert {answer["weights_hash"] for answer in pair["answers"]} == {
        served.state.models[name].weights_hash for name in ("first", "second")
    }
    page.get_by_role("button", name="Undo").click()
    page.get_by_text("The last rating is undone").wait_for()
    assert len(ratings(served)) == before


def keep(held: list[Any], route: Any) -> None:
    """A request that waits until the test lets it go on."""
    held.append(route)


def test_a_rating_that_contradicts_itself_is_refused(served: Running) -> None:
    answer = {"model": "first", "text": "Hi"}
    messages = [{"role": "user", "content": "Hello"}]
    right = {"kind": "thumb", "messages": messages, "answers": [answer], "choice": 1}
    wrong = (
        {"kind": "score"},
        {"choice": None},
        {"choice": 2},
        {"answers": [answer, answer]},
        {"kind": "pair"},
        {"kind": "edit"},
        {"edit": "x"},
        {"path": "/etc/passwd"},
        {"messages": [{"role": "assistant", "content": "x"}]},
    )

    refused = [post(served, "/api/ratings", right | change) for change in wrong]
    unknown = post(served, "/api/ratings/undo", {"id": "0"})
    taken = post(served, "/api/ratings", right)

    assert [answer.status for answer in refused] == [400] * len(wrong)
    assert unknown.status == 404
    assert taken.status == 200
    assert ratings(served)[-1]["id"] == taken.json["id"]
    assert post(served, "/api/ratings", right, Origin="https://evil.example").status == 403
