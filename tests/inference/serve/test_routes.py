"""Routes beside completions: scores, metrics, health, what there is not."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline import __version__
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.models.reward_model import score_responses
from tests.families import saved, tiny_classifier
from tests.inference.serve.serving import CHAT, COMPLETIONS, Running, chat, get, post, serving
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


def figures(server: Running) -> dict[str, float]:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(get(server, "/metrics").body.decode())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_score_is_that_of_the_reward_model_in_its_own_format(
    scoring: Running, reward: str
) -> None:
    prompt = [Message("user", "How are you?")]
    (expected,) = score_responses(reward, [(prompt, "Fine, so.")])

    answer = post(scoring, "/v1/score", {"messages": DIALOGUE})

    assert answer.json["score"] == pytest.approx(expected, rel=1e-5)
    assert answer.json["model"] == "reward"


def test_what_can_not_be_scored_is_refused_in_a_sentence(scoring: Running, server: Running) -> None:
    unanswered = post(scoring, "/v1/score", {"messages": DIALOGUE[:1] * 2})
    long = post(
        scoring, "/v1/score", {"messages": [DIALOGUE[0], {**DIALOGUE[1], "content": "a" * 99}]}
    )
    none = post(server, "/v1/score", {"messages": DIALOGUE})

    assert (unanswered.status, long.status, none.status) == (400, 400, 404)
    assert unanswered.error["message"] == "messages must end in the assistant's turn"
    assert long.error["code"] == "context_length_exceeded"
    assert none.error["message"].endswith("start the server with --reward DIR")


def test_metrics_count_requests_tokens_and_why_responses_ended(scoring: Running) -> None:
    before = figures(scoring)
    post(scoring, CHAT, chat(max_tokens=7, min_tokens=7, n=2))
    post(scoring, COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 3, "min_tokens": 3})
    post(scoring, CHAT, chat(temperature=-1))

    after = figures(scoring)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}

    assert grown["vllm:generation_tokens_total tiny"] == 17
    assert grown["rlhf:responses_total tiny length"] == 3
    assert grown["rlhf:requests_total /v1/chat/completions 200"] == 1
    assert grown["rlhf:requests_total /v1/chat/completions 400"] == 1
    assert grown["vllm:time_to_first_token_seconds_count tiny"] == 3
    assert grown["vllm:time_per_output_token_seconds_count tiny"] == 14
    by = {each: grown[f"rlhf:decoding_passes {each} tiny"] for each in ("modules", "replay")}
    assert 7 + 3 <= sum(by.values()) <= 8 + 3, by  # the second sample waits for the prompt
    assert after["rlhf:slots tiny"] == 4
    assert after["process_resident_memory_bytes"] > 2**26


def test_there_are_no_metrics_and_no_page_where_they_are_switched_off() -> None:
    with serving(metrics=False, page=False) as server:
        assert get(server, "/metrics").status == get(server, "/").status == 404
        assert get(server, "/health").json == {"status": "ok"}
        assert get(server, "/ready").json == {"status": "ready"}
        assert get(server, "/version").json == {"version": __version__}
