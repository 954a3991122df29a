"""Generation matches transformers, and rows don't depend on each other."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from inference.engine.requests import repeated_trigrams
from inference.generation import gather_prompts, generate
from pipeline.config import FrozenModelConfig, Precision
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.models.forward.forward import Policy
from pipeline.models.hf.load import load_causal_lm
from pipeline.parallel.mesh import current_mesh, split_mesh
from tests.distributed import rank, run_ranks
from tests.families import FAMILIES, UNPACKED, random_rows, save_to, tiny_causal_lm
from tests.inference.engine.test_batch import load

PROMPTS = [row.input_ids for row in random_rows((7, 3, 12, 5, 1, 6))]

NEW_TOKENS = 8


@torch.no_grad()
def most_likely(model: PreTrainedModel, prompt: list[int], response: list[int]) -> list[int]:
    """Return the most likely token at each position of a response, given the tokens before it."""
    logits = model(torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("family", "precision"),
    # No UNPACKED family in bf16, since a tie in expert routing changes all later tokens.
    [*product([*FAMILIES, *UNPACKED], ["fp32"]), *product(FAMILIES, ["bf16"])],
)
def test_greedy_responses_match_transformers(
    family: str, precision: Precision, tmp_path: Path
) -> None:
    plain = tiny_causal_lm(family).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    config = FrozenModelConfig(path=save_to(plain, tmp_path), precision=precision)
    model = load_causal_lm(config, device=torch.device("cpu"))

    settings: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "stop_ids": [2], "seed": 0}
    responses = generate(model, PROMPTS, **settings, batch_size=4)

    for prompt, response in zip(PROMPTS, responses, strict=True):
        expected = most_likely(plain, prompt, response.ids)
        assert (2 in response.ids) or len(response.ids) == NEW_TOKENS
        assert 2 not in response.ids[:-1]
        if precision == "fp32":
            assert response.ids == expected
        else:
            assert_equal_up_to_ties(plain, prompt, response.ids, expected)


@torch.no_grad()
def assert_equal_up_to_ties(
    model: PreTrainedModel, prompt: list[int], actual: list[int], expected: list[int]
) -> None:
    """Allow responses to differ only where two tokens are equally likely up to rounding."""
    for first in (index for index, token in enumerate(actual) if token != expected[index]):
        logits = model(torch.tensor([prompt + actual[:first]])).logits[0, -1]
        rounding = torch.finfo(logits.dtype).eps * logits.abs().max()
        assert (logits[actual[first]] - logits[expected[first]]).abs() <= 4 * rounding


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_log_probabilities_match_those_of_training(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)

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
def test_samples_do_not_depend_on_order_or_number_of_slots(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    keys = [40 + row for row in range(len(PROMPTS))]
    settings: Any = {"max_new_tokens": NEW_TOKENS, "top_p": 0.9, "stop_ids": [*range(2, 9)]}
    settings |= {"temperature": 1.0, "seed": 1}

    def sample(order: list[int], batch_size: int) -> dict[int, list[int]]:
        responses = generate(
            model,
            [PROMPTS[row] for row in order],
            keys=[keys[row] for row in order],
            batch_size=batch_size,
            **settings,
        )
        return {row: response.ids for row, response in zip(order, responses, strict=True)}

    expected = sample([0, 1, 2, 3, 4, 5], 64)

    assert sample([5, 3, 1, 0, 2, 4], 64) == expected
    assert sample([0, 1, 2, 3, 4, 5], 1) == expected
    assert sample([4, 2, 0, 1, 3, 5], 3) == expected
    assert sample([0, 1, 2, 3, 4, 5], 8) == expected
    assert len({len(ids) for ids in expected.values()}) > 1  # some ended early


def sample_shard(rank: int, world_size: int, directory: Path) -> dict[int, list[int]]:
    """Return responses to every `world_size`-th prompt, by prompt."""
    path = FrozenModelConfig(path=str(directory))
    rows = list(range(len(PROMPTS)))[rank::world_size]
    responses = generate(
        load_causal_lm(path, device=torch.device("cpu")),
        [PROMPTS[row] for row in rows],
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        stop_ids=[2],
        seed=3,
        keys=rows,
    )
    return {row: response.ids for row, response in zip(rows, responses, strict=True)}


def sample_own_shard(directory: Path) -> dict[int, list[int]]:
    world = current_mesh().world
    return sample_shard(world.rank, world.size, directory)


@pytest.mark.jobs
def test_two_processes_sample_the_same_as_one(tmp_path: Path) -> None:
    save_to(tiny_causal_lm("llama"), tmp_path)

    first, second = run_ranks(sample_own_shard, tmp_path)

    assert {**first, **second} == sample_shard(0, 1, tmp_path)


def test_repeated_trigrams_are_counted() -> None:
    assert repeated_trigrams([1, 2, 3, 1, 2, 4, 1, 2, 3]) == 1


SHARED = ((5, 6), 10)
"""A prompt of both processes with the same key."""


def exchange() -> tuple[list[tuple[tuple[int, ...], int]], list[list[int]]]:
    prompts = [((7 + rank(),), 11), SHARED, SHARED]
    with split_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        return gather_prompts(prompts, mesh.tensor.untracked)


def test_shared_prompts_are_gathered_once_per_occurrence() -> None:
    first, second = run_ranks(exchange)

    prompts = [((7,), 11), SHARED, SHARED, ((8,), 11)]
    assert first == (prompts, [[0], [1], [2], []])
    assert second == (prompts, [[], [1], [2], [0]])
