"""Routes for scores and metrics."""

from collections.abc import Iterator

import pytest

from inference.reward_model import score_responses
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from tests.families import save_to, tiny_classifier
from tests.inference.serve.serving import LiveServer, get, post, serving
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


def test_metrics_count_responses_by_finish_reason() -> None:
    request = {"model": "tiny", "prompt": "Hi", "max_tokens": 6, "temperature": 0}
    with serving() as running:
        text = post(running, "/v1/completions", request).json["choices"][0]["text"]
        post(running, "/v1/completions", request | {"stop": text[2:4]})
        metrics = get(running, "/metrics").body.decode()

    model = 'model_name="tiny"'
    for line in (
        f'rlhf:responses_total{{{model},reason="length"}} 1.0',
        f'rlhf:responses_total{{{model},reason="stop"}} 1.0',
        f'rlhf:decoding_passes{{by="modules",{model}}} 2.0',
        f'rlhf:decoding_passes{{by="replay",{model}}} 6.0',
        f"rlhf:slots{{{model}}} 4.0",
        f"vllm:prompt_tokens_total{{{model}}} 4.0",
        f"vllm:prefix_cache_queries_total{{{model}}} 4.0",
        f"vllm:prefix_cache_hits_total{{{model}}} 1.0",
        f"vllm:generation_tokens_total{{{model}}} 8.0",
        f"vllm:num_requests_running{{{model}}} 0.0",
        f"vllm:num_requests_waiting{{{model}}} 0.0",
        f"vllm:time_to_first_token_seconds_count{{{model}}} 2.0",
        f"vllm:time_per_output_token_seconds_count{{{model}}} 6.0",
        'rlhf:requests_total{route="/v1/completions",status="200"} 2.0',
        'rlhf:request_seconds_count{route="/v1/completions"} 2.0',
    ):
        assert f"{line}\n" in metrics, line
