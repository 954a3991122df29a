"""Generation says what plain transformers says, and a row never depends on the rows beside it."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from inference.generation import generate
from pipeline.config import FrozenModelConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.errors import DataError
from pipeline.models.forward import Policy
from pipeline.models.load import load_causal_lm
from tests.families import FAMILIES, PECULIAR, random_rows, saved, tiny_causal_lm

PROMPTS = [row.input_ids for row in random_rows((7, 3, 12, 5, 1, 6))]
NEW_TOKENS = 8


def loaded(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    path = saved(tiny_causal_lm(family, **changes), directory)
    return load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))


def greedy_of_transformers(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=2
    )
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", [*FAMILIES, *PECULIAR])
def test_greedy_answers_to_prompts_of_many_lengths_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    plain = tiny_causal_lm(family)
    model = load_causal_lm(
        FrozenModelConfig(path=saved(plain, tmp_path)), device=torch.device("cpu")
    )

    responses = generate(
        model, PROMPTS, max_new_tokens=NEW_TOKENS, temperature=0.0, stop_ids=[2], seed=0
    )

    assert [response.ids for response in responses] == [
        greedy_of_transformers(plain, prompt) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_log_probabilities_of_samples_are_those_training_computes(
    family: str, tmp_path: Path
) -> None:
    model = loaded(family, tmp_path)

    responses = generate(
        model, PROMPTS, max_new_tokens=NEW_TOKENS, temperature=0.8, stop_ids=[2], seed=1
    )

    rows = [
        Encoded([*prompt, *response.ids], [False] * len(prompt) + [True] * len(response.ids))
        for prompt, response in zip(PROMPTS, responses, strict=True)
    ]
    expected = Policy(model)(collate(rows), temperature=0.8).logprobs
    sampled = torch.tensor([logprob for response in responses for logprob in response.logprobs])
    torch.testing.assert_close(sampled, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "falcon"])
def test_a_sampled_answer_does_not_depend_on_order_or_batch_size(
    family: str, tmp_path: Path
) -> None:
    model = loaded(family, tmp_path)
    keys = [40 + row for row in range(len(PROMPTS))]

    def sample(order: list[int], batch_size: int) -> dict[int, list[int]]:
        responses = generate(
            model,
            [PROMPTS[row] for row in order],
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            top_p=0.9,
            stop_ids=[2, 3, 4, 5, 6, 7, 8],
            seed=1,
            keys=[keys[row] for row in order],
            batch_size=batch_size,
        )
        return {row: response.ids for row, response in zip(order, responses, strict=True)}

    together = sample([0, 1, 2, 3, 4, 5], 64)

    assert sample([5, 3, 1, 0, 2, 4], 64) == together
    assert sample([0, 1, 2, 3, 4, 5], 1) == together
    assert sample([4, 2, 0, 1, 3, 5], 4) == together
    assert len({len(ids) for ids in together.values()}) > 1  # some ended early


def test_the_seed_and_the_key_choose_the_sample(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)

    def sample(seed: int, keys: list[int]) -> list[list[int]]:
        responses = generate(
            model,
            [PROMPTS[0]] * len(keys),
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            stop_ids=[],
            seed=seed,
            keys=keys,
        )
        return [response.ids for response in responses]

    first, second, same = sample(1, [0, 1, 0])

    assert first == same
    assert first != second
    assert sample(2, [0]) != [first]


def test_a_stop_token_ends_the_response_and_belongs_to_it(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    (whole,) = generate(model, [PROMPTS[0]], max_new_tokens=8, temperature=0.0, stop_ids=[], seed=0)
    stop = whole.ids[3]
    first = whole.ids.index(stop)

    (stopped,) = generate(
        model, [PROMPTS[0]], max_new_tokens=8, temperature=0.0, stop_ids=[2, stop], seed=0
    )

    assert not whole.stopped
    assert len(whole.ids) == 8
    assert stopped.stopped
    assert stopped.ids == whole.ids[: first + 1]
    assert stopped.logprobs == pytest.approx(whole.logprobs[: first + 1])


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_responses_end_where_the_context_does_and_the_others_go_on(
    family: str, tmp_path: Path
) -> None:
    """Positions are learned in GPT-2 and OPT: one beyond the last is an error, not a bad guess."""
    limit = {"n_positions" if family == "gpt2" else "max_position_embeddings": 16}
    model = loaded(family, tmp_path, **limit)
    prompts = [row.input_ids for row in random_rows((15, 12, 4, 3, 2))]

    responses = generate(model, prompts, max_new_tokens=20, temperature=0.0, stop_ids=[], seed=0)

    assert [len(response.ids) for response in responses] == [1, 4, 12, 13, 14]
    assert not any(response.stopped for response in responses)


def test_a_row_that_ended_changes_nothing_for_the_others(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    alone = [
        generate(model, [prompt], max_new_tokens=12, temperature=0.0, stop_ids=[], seed=0)[0].ids
        for prompt in PROMPTS
    ]
    stop = alone[0][0]

    together = generate(model, PROMPTS, max_new_tokens=12, temperature=0.0, stop_ids=[stop], seed=0)

    assert together[0].ids == [stop]
    for ids, response in zip(alone, together, strict=True):
        assert response.ids == ids[: len(response.ids)]
        assert response.stopped == (stop in ids)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [([], "a prompt has no tokens"), ([5] * 64, "a prompt has 64 tokens and the model reads 64")],
)
def test_a_prompt_that_can_not_be_answered_is_refused(
    prompt: list[int], sentence: str, tmp_path: Path
) -> None:
    model = loaded("llama", tmp_path)

    with pytest.raises(DataError, match=sentence):
        generate(model, [[5], prompt], max_new_tokens=2, temperature=0.0, stop_ids=[], seed=0)


def test_tokens_are_told_as_they_come_each_response_in_order(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    told: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS))}
    rows: list[int] = []

    def on_token(row: int, token: int) -> None:
        told[row].append(token)
        rows.append(row)

    responses = generate(
        model,
        PROMPTS,
        max_new_tokens=3,
        temperature=0.0,
        stop_ids=[],
        seed=0,
        on_token=on_token,
    )

    assert told == {row: response.ids for row, response in enumerate(responses)}
    # All rows of the batch get a token before any gets its next.
    assert [sorted(rows[at : at + 6]) for at in (0, 6, 12)] == [[0, 1, 2, 3, 4, 5]] * 3


def test_no_prompts_have_no_responses(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)

    assert generate(model, [], max_new_tokens=3, temperature=0.0, stop_ids=[], seed=0) == []
