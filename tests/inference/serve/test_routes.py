"""Routes other than completions: scores, metrics, health, unknown paths."""

from collections.abc import Iterator

import pytest

from inference.reward_model import score_responses
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from tests.families import saved, tiny_classifier
from tests.inference.serve.serving import Running, get, post, serving
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
    return saved(classifier, path)


@pytest.fixture(scope="module")
def scoring(reward: str) -> Iterator[Running]:
    with serving(reward=reward) as running:
        yield running


def test_a_score_is_that_of_the_reward_model_in_its_own_format(
    scoring: Running, reward: str
) -> None:
    prompt = [Message("user", "How are you?")]
    (expected,) = score_responses(reward, [(prompt, "Fine, so.")])

    answer = post(scoring, "/v1/score", {"messages": DIALOGUE})

    assert answer.json["score"] == pytest.approx(expected, rel=1e-5)
    assert answer.json["model"] == "reward"


def test_metrics_count_responses_by_their_reason_to_end() -> None:
    request = {"model": "tiny", "prompt": "Hi", "max_tokens": 6, "temperature": 0}
    with serving() as running:
        text = post(running, "/v1/completions", request).json["choices"][0]["text"]
        post(running, "/v1/completions", request | {"stop": text[2:4]})
        shown = get(running, "/metrics").body.decode()

    for reason in ("length", "stop"):
        assert f'rlhf:responses_total{{model_name="tiny",reason="{reason}"}} 1.0' in shown
