"""Later turns reuse keys and values of earlier ones: same responses, reported token counts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.inference.serve.serving import COMPLETIONS, Running, make_client, post, serving

if TYPE_CHECKING:  # importing it takes half a second, also where tests are only collected
    from openai.types.chat import ChatCompletion

Turn = dict[str, str]
SYSTEM = "You are polite, brief and right. You add numbers of two digits and show no work at all."
TEXTS = ("What is 12 plus 31?", "And 7 more than that?", "Say it again, please.")
KEYS = ("the-first-key", "the-second-key")


@pytest.fixture(scope="module")
def reusing() -> Iterator[Running]:
    with serving(prefill_chunk=24) as running:
        yield running


@pytest.fixture(scope="module")
def anew() -> Iterator[Running]:
    with serving(prefix_reuse="off") as running:
        yield running


def answer(server: Running, messages: Any, **fields: Any) -> "ChatCompletion":
    from openai.types.chat import ChatCompletion

    with make_client(server) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=messages,
            **{"seed": 3, "max_tokens": 16, "logprobs": True, "top_logprobs": 2, **fields},
        )
    return ChatCompletion.model_validate_json(raw.text, strict=True)


def cached(completion: "ChatCompletion") -> int:
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    count = completion.usage.prompt_tokens_details.cached_tokens
    assert count is not None
    return count


def num_prompt(completion: "ChatCompletion") -> int:
    assert completion.usage is not None
    return completion.usage.prompt_tokens


def test_turns_are_read_once_and_are_those_of_a_server_that_reads_all(
    reusing: Running, anew: Running
) -> None:
    messages: list[Turn] = [{"role": "system", "content": SYSTEM}]
    before = 0
    for text in TEXTS:
        messages.append({"role": "user", "content": text})

        ours, whole = answer(reusing, messages), answer(anew, messages)

        assert ours.choices[0].message == whole.choices[0].message
        assert cached(whole) == 0
        # What an answer's text is encoded as may differ from what was sampled.
        assert before <= cached(ours) < num_prompt(ours)
        before = num_prompt(ours) - 8
        messages.append({"role": "assistant", "content": ours.choices[0].message.content or "-"})
    assert before > 100


@pytest.mark.parametrize(("prefix_reuse", "shared"), [("client", False), ("all", True)])
def test_one_client_learns_nothing_of_the_prompts_of_another(
    prefix_reuse: str, shared: bool
) -> None:
    body = {"prompt": SYSTEM, "max_tokens": 1}
    with serving(api_key=KEYS, prefix_reuse=prefix_reuse) as server:
        found = [
            post(server, COMPLETIONS, body, Authorization=f"Bearer {key}").json["usage"]
            for key in (KEYS[0], KEYS[1], KEYS[0])
        ]

    counts = [each["prompt_tokens_details"]["cached_tokens"] for each in found]
    whole = found[0]["prompt_tokens"] - 1
    assert counts == [0, whole if shared else 0, whole]
