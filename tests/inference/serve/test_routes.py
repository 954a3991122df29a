"""The route for scores."""

from collections.abc import Iterator

import pytest

from inference.reward_model import score_responses
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from tests.families import save_to, tiny_classifier
from tests.inference.serve.serving import LiveServer, post, serving
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
