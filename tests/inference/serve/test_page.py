"""The page in a real browser, and how large it is."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inference.ratings.file import read_ratings, standing_ratings
from inference.serve.models import ModelPath
from inference.serve.page_files import HERE
from inference.serve.watch import WatchedRun
from tests.inference.serve.serving import (
    Running,
    chat,
    get,
    in_browser,
    post,
    serving,
    serving_page,
    until,
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


def test_the_page_is_small_and_has_no_inline_script_and_no_html_of_a_model() -> None:
    files = {file.name: file.read_text("utf-8") for file in HERE.iterdir()}

    assert sum(len(text.encode()) for text in files.values()) <= 120_000
    assert sum(text.count("\n") for text in files.values()) <= 1200
    scripts = "".join(text for name, text in files.items() if name.endswith(".js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", scripts)
    assert "https://" not in "".join(files.values())
    assert not re.search(
        r"<script(?! type=\"module\" src=\"/page/)|style=|\son\w+=", files["index.html"]
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving_page(tmp_path_factory.mktemp("out")) as running:
        yield running


@pytest.mark.parametrize("view", ["chat", "compare", "rate", "watch"])
def test_a_view_can_be_typed_by_its_name(served: Running, view: str) -> None:
    answer = get(served, f"/{view}")

    assert answer.status == 307
    assert answer.headers["location"] == f"/#{view}"


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
def test_stop_ends_the_response_in_the_server(page: Any, served: Running) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest response, tokens").fill("200")
    page.get_by_role("button", name="Settings").click()
    worker = served.server._worker
    assert worker is not None
    page.get_by_label("Message", exact=True).fill("Tell me all")
    with served.paused():
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()

    assert until(served.is_idle)


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


@in_browser
def test_a_response_is_seen_beside_what_the_first_model_says_of_its_tokens(
    page: Any, served: Running
) -> None:
    page.get_by_role("link", name="Compare").click()
    page.get_by_label("KL to first").check()
    page.get_by_label("Prompt").fill("What is 3 plus 4?")
    page.keyboard.press("Enter")
    page.get_by_text("KL to first", exact=False).nth(1).wait_for()

    base, other = page.locator(".card").all()
    assert base.locator(".token").count() == 0
    assert "KL" not in base.locator(".foot").inner_text()
    titles = [each.get_attribute("title") for each in other.locator(".token").all()]
    words = re.search(r"(\d+) tokens.* KL to first (\S+) nats", other.inner_text())
    assert words is not None
    assert len(titles) == int(words[1])
    sums = [float(re.findall(r"(-?[\d.]+) until here", title or "")[0]) for title in titles]
    assert sums[-1] == float(words[2])

    assert sums[-1] == pytest.approx(divergence(served, page), abs=0.02)


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


@in_browser
def test_pairs_are_rated_by_keyboard_and_taken_back(page: Any, served: Running) -> None:
    before = len(ratings(served))
    page.get_by_role("link", name="Rate").click()
    page.get_by_label("Prompts", exact=True).fill('One?\n{"prompt": "Two?"}\n\nThree?')
    page.get_by_role("button", name="Begin").click()

    def press(key: str, title: str) -> None:
        page.get_by_role("group", name="Rating").wait_for()
        page.keyboard.press(key)
        page.get_by_text(title).wait_for()

    press("2", "2 of 3, 1 rated")
    press("3", "3 of 3, 2 rated")
    press("u", "2 of 3, 1 rated")
    press("4", "3 of 3, 2 rated")
    press("s", "ratings in ratings.jsonl")

    found = ratings(served)[before:]
    assert [pair["messages"][-1]["content"] for pair in found] == ["One?", "Two?"]
    assert found[0]["choice"] == found[0]["shown"][1]
    assert (found[1]["choice"], found[1]["tie"]) == (None, False)


def keep(held: list[Any], route: Any) -> None:
    """A request that waits until the test lets it go on."""
    held.append(route)


@in_browser
def test_rating_begins_while_the_summary_is_still_on_its_way(page: Any) -> None:
    asked: list[Any] = []
    page.route("**/api/ratings/summary", partial(keep, asked))
    page.get_by_role("link", name="Rate").click()
    page.get_by_label("Prompts", exact=True).fill("One?")
    page.get_by_role("button", name="Begin").click()

    page.get_by_role("group", name="Rating").wait_for()

    (held,) = asked
    held.continue_()


@in_browser
def test_the_last_of_two_views_chosen_at_once_is_shown_alone(page: Any) -> None:
    page.get_by_label("Message", exact=True).wait_for()
    held: list[Any] = []
    page.route("**/api/server", partial(keep, held))
    page.get_by_role("link", name="Watch").click()
    page.get_by_role("link", name="Compare").click()
    page.wait_for_function("location.hash === '#compare'")
    while len(held) < 2:
        page.wait_for_timeout(10)
    for request in reversed(held):
        request.continue_()

    page.get_by_label("Prompt", exact=True).wait_for()
    page.wait_for_load_state("networkidle")
    assert page.get_by_role("group", name="Steps").count() == 0
    assert page.title() == "Compare"


@pytest.mark.jobs
@in_browser
def test_a_run_is_drawn_as_it_grows(page: Any, served: Running) -> None:
    page.get_by_role("link", name="Watch").click()
    canvas = page.get_by_role("img", name="Loss by step")
    canvas.wait_for()
    assert "last training 0.1034" in canvas.get_attribute("aria-label")
    watched = served.state.watched
    assert watched is not None

    with (watched.out / "step1_sft" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": 0.75}\n')

    page.get_by_role("img", name="last training 0.75").wait_for()


@in_browser
def test_a_run_is_watched_without_a_model(browser: Any, tmp_path: Path) -> None:
    step = tmp_path / "step1_sft"
    step.mkdir()
    (step / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n')
    with serving((), watch=tmp_path) as server:
        server.state.watched = WatchedRun(tmp_path)
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_role("img", name="Loss by step").wait_for()

        assert [each.inner_text() for each in page.locator("nav a:visible").all()] == ["Watch"]
        assert get(server, "/v1/models").json["data"] == []
        assert post(server, "/v1/chat/completions", chat()).error["code"] == "model_not_found"
        page.close()


@in_browser
def test_a_key_is_entered_once_and_kept_until_the_browser_is_closed(browser: Any) -> None:
    with serving(api_key=("secret-key",), max_tokens_default=4) as server:
        page = browser.new_page()
        page.set_default_timeout(20_000)
        page.goto(server.url)
        page.get_by_text("this server needs an API key").wait_for()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill("secret-key")
        page.keyboard.press("Tab")
        page.get_by_label("Model").wait_for()
        page.reload()
        ask(page, "Hello")

        assert "secret" not in json.dumps(page.evaluate("({...localStorage})"))
        page.close()


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
