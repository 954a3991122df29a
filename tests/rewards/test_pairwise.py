"""A judge that compares two responses, on real servers on loopback."""

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Outcome
from rewards.pairwise import PairwiseJudge, pairwise_judge
from tests.rewards.test_endpoints import Server, episodes, judged, say, serving


def judge_of(server: Server, cache_dir: Path | None = None, **settings: Any) -> PairwiseJudge:
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
        outcomes = judge_of(server).compare(ours, theirs)

    assert outcomes == [Outcome(1.0), Outcome(0.0), Outcome(0.5), Outcome(0.5), Outcome(0.5)]
    assert len(server.asked) == 2 * 4  # nothing is asked about equal texts


def test_no_verdict_is_a_failure_and_is_not_kept(tmp_path: Path) -> None:
    words = iter(['{"better": "both"}', '{"better": "first"}', '{"better": "second"}'])

    def answer(_server: Server, handler: BaseHTTPRequestHandler, _body: Any) -> None:
        say(handler, judged(next(words)))

    with serving(answer) as server:
        judge = judge_of(server, tmp_path, concurrency=1)
        (failed,) = judge.compare(episodes("a"), episodes("b"))
        (won,) = judge.compare(episodes("a"), episodes("b"))
        again = judge.compare(episodes("a"), episodes("b"))

    assert failed.value is None
    assert failed.failure == 'the judge\'s answer has no JSON with a verdict: {"better": "both"}'
    assert [won] == again == [Outcome(1.0)]
    assert len(server.asked) == 3  # what has been answered is not asked again


def test_a_template_must_name_both_responses(tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    template.write_text("{prompt} {first} {column}: {{}}")
    config = RewardConfig(
        name="judge", kind="judge", path="https://x/v1", model="m", template=str(template)
    )
    with pytest.raises(ConfigError, match=r"must name \{first\} and \{second\}"):
        pairwise_judge(config, cache_dir=None, timeout_seconds=1.0)
    template.write_text("{first} {second} {column}")
    judge = pairwise_judge(config, cache_dir=None, timeout_seconds=1.0)
    assert judge.columns == {"column"}


def test_a_setting_of_judges_that_score_one_by_one_is_refused() -> None:
    config = RewardConfig(
        name="judge", kind="judge", path="https://x/v1", model="m", scale=(1.0, 5.0)
    )
    with pytest.raises(ConfigError, match=r"rewards\.judge\.scale is for a judge that scores"):
        pairwise_judge(config, cache_dir=None, timeout_seconds=1.0)


@pytest.mark.parametrize("text", ["{first} {second} {", "{first} {second} {}", "{first:d}"])
def test_a_template_that_can_not_be_filled_is_refused(tmp_path: Path, text: str) -> None:
    template = tmp_path / "template.txt"
    template.write_text(text)
    config = RewardConfig(
        name="judge", kind="judge", path="https://x/v1", model="m", template=str(template)
    )
    with pytest.raises(ConfigError, match=r"rewards\.judge\.template: .*; write \{\{ and \}\}"):
        pairwise_judge(config, cache_dir=None, timeout_seconds=1.0)
