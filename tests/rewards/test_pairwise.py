"""A judge that compares two responses, on real servers on loopback."""

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from rewards.config import RewardConfig
from rewards.contract import Outcome
from rewards.judge import PairwiseJudge, pairwise_judge
from tests.rewards.test_endpoints import Server, episodes, judged, say, serving


def make_judge(server: Server, cache_dir: Path | None = None, **settings: Any) -> PairwiseJudge:
    config = RewardConfig(name="judge", kind="judge", path=server.url, model="m", **settings)
    return pairwise_judge(config, cache_dir=cache_dir, timeout_seconds=5.0)


def prefers_long(_server: Server, handler: BaseHTTPRequestHandler, body: Any) -> None:
    """The longer response is better; a `biased` one wherever it comes first."""
    text = body["messages"][0]["content"]
    first = text.split("[First response]\n")[1].split("\n\n[Second")[0]
    second = text.split("[Second response]\n")[1].split("\n\nAnswer")[0]
    longer = "first" if len(first) > len(second) else "second"
    better = "tie" if len(first) == len(second) else longer
    better = "first" if "biased" in first else better
    say(handler, judged(f'{{"reason": "x"}} so {{"better": "{better}"}}'))


def test_both_orders_must_agree_else_it_is_a_tie() -> None:
    ours = episodes("a long one", "short", "biased a", "same", "abc")
    theirs = episodes("short", "a long one", "biased b", " same\n", "xyz")
    with serving(prefers_long) as server:
        outcomes = make_judge(server).compare(ours, theirs)

    assert outcomes == [Outcome(1.0), Outcome(0.0), Outcome(0.5), Outcome(0.5), Outcome(0.5)]
    assert len(server.asked) == 2 * 4  # no request is made for equal texts


def test_no_verdict_is_a_failure_and_is_not_kept(tmp_path: Path) -> None:
    words = iter(['{"better": "both"}', '{"better": "first"}', '{"better": "second"}'])

    def answer(_server: Server, handler: BaseHTTPRequestHandler, _body: Any) -> None:
        say(handler, judged(next(words)))

    with serving(answer) as server:
        judge = make_judge(server, tmp_path, concurrency=1)
        (failed,) = judge.compare(episodes("a"), episodes("b"))
        (won,) = judge.compare(episodes("a"), episodes("b"))
        again = judge.compare(episodes("a"), episodes("b"))

    assert failed.value is None
    assert failed.failure == 'the judge\'s answer has no JSON with a verdict: {"better": "both"}'
    assert [won] == again == [Outcome(1.0)]
    assert len(server.asked) == 3  # what has been answered is not asked again
