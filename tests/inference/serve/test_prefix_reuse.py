"""Later turns reuse keys and values of earlier ones, with equal responses."""

from collections.abc import Iterator

import pytest

from tests.inference.serve.serving import CHAT, COMPLETIONS, LiveServer, post, serving

Turn = dict[str, str]
SYSTEM = "You are polite, brief and right. You add numbers of two digits and show no work at all."
TEXTS = ("What is 12 plus 31?", "And 7 more than that?", "Say it again, please.")
KEYS = ("the-first-key", "the-second-key")


@pytest.fixture(scope="module")
def reusing_server() -> Iterator[LiveServer]:
    with serving(prefill_chunk=24) as running:
        yield running


@pytest.fixture(scope="module")
def plain_server() -> Iterator[LiveServer]:
    with serving(prefix_reuse="off") as running:
        yield running


def complete(server: LiveServer, messages: list[Turn]) -> tuple[Turn, int, int]:
    """Return the answer, and the numbers of all and of reused prompt tokens."""
    response = post(server, CHAT, {"messages": messages, "seed": 3, "max_tokens": 16}).json
    usage = response["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return response["choices"][0]["message"], usage["prompt_tokens"], cached


def test_prefix_reuse_does_not_change_responses(
    reusing_server: LiveServer, plain_server: LiveServer
) -> None:
    messages: list[Turn] = [{"role": "system", "content": SYSTEM}]
    before = 0
    for text in TEXTS:
        messages.append({"role": "user", "content": text})

        answer, num_prompt, num_cached = complete(reusing_server, messages)
        expected, _, num_cached_without_reuse = complete(plain_server, messages)

        assert answer == expected
        assert num_cached_without_reuse == 0
        # The tokens of an answer's text may differ from the sampled ones.
        assert before <= num_cached < num_prompt
        before = num_prompt - 8
        messages.append({"role": "assistant", "content": answer["content"] or "-"})
    assert before > 100


@pytest.mark.parametrize(
    ("prefix_reuse", "reused"), [("client", (0, 0, 1)), ("all", (0, 1, 1)), ("off", (0, 0, 0))]
)
def test_clients_share_cached_prefixes_only_if_allowed(
    prefix_reuse: str, reused: tuple[int, ...]
) -> None:
    body = {"prompt": SYSTEM, "max_tokens": 1}
    with serving(api_key=KEYS, prefix_reuse=prefix_reuse) as server:
        usages = [
            post(server, COMPLETIONS, body, Authorization=f"Bearer {key}").json["usage"]
            for key in (KEYS[0], KEYS[1], KEYS[0])
        ]

    counts = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    full = usages[0]["prompt_tokens"] - 1
    assert counts == [full * is_reused for is_reused in reused]
