"""The route for scores, and long texts."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from inference.reward_model import score_responses
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from tests.families import save_to, tiny_classifier
from tests.inference.serve.serving import CHAT, LiveServer, get, post, serving
from tests.pipeline.data.tokenizers import byte_level

DIALOGUE = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine, so."},
]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("reward")
    tokenizer = byte_level()
    resolve_format(tokenizer, "human_assistant").attach(tokenizer)
    tokenizer.save_pretrained(path)
    classifier = tiny_classifier("llama", vocab_size=len(tokenizer), max_position_embeddings=64)
    return save_to(classifier, path)


@pytest.fixture(scope="module")
def scoring_server(reward: str) -> Iterator[LiveServer]:
    with serving(reward=reward) as running:
        yield running


def test_score_uses_the_reward_models_chat_format(scoring_server: LiveServer, reward: str) -> None:
    prompt = [Message("user", "How are you?")]
    (expected,) = score_responses(reward, [(prompt, "Fine, so.")])

    response = post(scoring_server, "/v1/score", {"messages": DIALOGUE})

    assert response.json["score"] == pytest.approx(expected, rel=1e-5)
    assert response.json["model"] == "reward"


@pytest.mark.parametrize(("path", "count"), [(CHAT, 1), ("/v1/score", 2)])
def test_tokenizing_a_long_text_does_not_block_the_server(
    scoring_server: LiveServer, path: str, count: int
) -> None:
    messages = [{"role": "user", "content": "One more. " * 100_000}, DIALOGUE[1]][:count]
    latencies = []

    with ThreadPoolExecutor() as pool:
        rejected = pool.submit(post, scoring_server, path, {"messages": messages})
        while not rejected.done():
            sent = time.monotonic()
            get(scoring_server, "/health")
            latencies.append(time.monotonic() - sent)

    assert rejected.result().error["code"] == "context_length_exceeded"
    assert max(latencies) < sum(latencies) / 2
