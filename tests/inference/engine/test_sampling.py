"""Counter-based random numbers, inverse-transform sampling, and logits processing."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.engine.sampling import Sampler, inverse_transform, keep_top_p

DISTRIBUTION = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]], dtype=torch.float64)


def test_inverse_transform_selects_the_interval_with_the_point() -> None:
    points = torch.tensor(
        [0.0, 0.099, 0.1, 0.499, 0.5, 0.799, 0.8, 1 - 2**-53], dtype=torch.float64
    )

    tokens = inverse_transform(DISTRIBUTION.expand(len(points), -1), points)

    assert tokens.tolist() == [0, 0, 1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("vocabulary", [1, 257, 4096, 32_000])
def test_inverse_transform_is_accurate_for_large_vocabularies(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(100, vocabulary, generator=generator)
    logits[:, 3::7] = -torch.inf
    weights = logits.softmax(dim=-1)
    points = torch.rand(100, dtype=torch.float64, generator=generator)

    tokens = inverse_transform(weights, points)

    cumulative = weights.double().cumsum(dim=-1)
    thresholds = points * cumulative[:, -1]
    rows = torch.arange(100)
    reached = cumulative[rows, tokens]
    assert (reached >= thresholds - 1e-6).all()
    assert (reached - weights[rows, tokens] <= thresholds + 1e-6).all()
    assert (weights[rows, tokens] > 0).all()


def test_nucleus_has_the_fewest_likeliest_tokens_that_reach_top_p() -> None:
    kept = {
        top_p: keep_top_p(DISTRIBUTION, top_p).nonzero()[:, 1].tolist()
        for top_p in (0.1, 0.39, 0.41, 0.71, 0.95)
    }

    assert kept == {0.1: [1], 0.39: [1], 0.41: [1, 3], 0.71: [1, 3, 4], 0.95: [0, 1, 3, 4]}
    assert keep_top_p(DISTRIBUTION, 0.41)[0, 1] == 0.4  # weights, not yet probabilities
    assert keep_top_p(DISTRIBUTION, 1.0) is DISTRIBUTION


@pytest.mark.parametrize("vocabulary", [1, 37, 5000])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 1 - 1e-12])
def test_nucleus_is_a_prefix_of_tokens_sorted_by_weight(vocabulary: int, top_p: float) -> None:
    """Rows: nearly uniform, typical, with ties, with zeros, peaked, and uniform."""
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits[1:4] *= 3
    logits[2] = (2 * logits[2]).round() / 2
    logits[3, 1::2] = -torch.inf
    logits[4] *= 200
    logits[5] = 0
    rows = logits.softmax(dim=-1).double()
    for weights in (rows, *rows.split(1)):  # all rows of a call have few or many candidates
        ordered, indices = weights.sort(dim=-1, descending=True, stable=True)
        kept = ordered * (ordered.cumsum(dim=-1) - ordered < top_p)
        expected = torch.zeros_like(weights).scatter(-1, indices, kept)
        assert torch.equal(keep_top_p(weights, top_p), expected)


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_samples_follow_the_policys_distribution(top_p: float) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
    sampler = Sampler(temperature=2.0, top_p=top_p, seed=3)
    expected = (logits / 2).double().softmax(-1)
    if top_p < 1:
        expected = torch.where(expected >= expected[0], expected, 0)  # 0.42 + 0.25 + 0.20 > 0.75
        expected = expected / expected.sum()

    tokens, logprobs = sampler(logits.expand(5000, -1), range(5000), 0)

    counts = torch.bincount(torch.tensor(tokens), minlength=5).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - 5000 * expected) ** 2 / (5000 * expected))[possible].sum()
    assert chi_square < 18.5  # 4 degrees of freedom, one in a thousand seeds
    policy = (logits / 2).log_softmax(-1)
    assert logprobs == pytest.approx(policy[tokens].tolist())  # of the policy before truncation


def test_temperature_0_is_greedy_and_reports_logprobs_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])

    tokens, logprobs = Sampler(temperature=0.0, top_p=1.0, seed=0)(logits, [0, 1], 0)

    assert tokens == [2, 0] == Sampler(temperature=1e-40, seed=0)(logits, [0, 1], 0)[0]
    normalizers = [math.log(sum(math.exp(x) for x in row)) for row in logits.tolist()]
    assert logprobs == pytest.approx([3 - normalizers[0], 2 - normalizers[1]])


def test_presence_and_frequency_penalties_follow_openais_formula() -> None:
    responses = [[], [0, 0, 1], [0] * 4 + [1], [0] * 4]
    logits = torch.tensor([[3.0, 2.0, 1.5]]).expand(4, -1)

    greedy = Sampler(temperature=0.0, seed=0, presence_penalty=0.5, frequency_penalty=0.3)
    tokens, logprobs = greedy(logits, range(4), 5, responses=responses)

    # Third response: 3 - 0.5 - 4 * 0.3 = 1.3, 2 - 0.5 - 0.3 = 1.2, 1.5.
    assert tokens == [0, 0, 2, 1]
    assert logprobs == pytest.approx(logits[0].log_softmax(-1)[tokens].tolist())  # no penalties


HISTORY = [3, 3, 0, 7]


@pytest.mark.parametrize(
    ("settings", "processors"),
    [
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_k": 3, "top_p": 0.7}, [TopKLogitsWarper(3), TopPLogitsWarper(0.7)]),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
        (
            {"min_new_tokens": 2, "stop_ids": [1, 4]},
            [MinNewTokensLengthLogitsProcessor(3, 2, [1, 4], device="cpu")],
        ),
    ],
)
def test_samples_follow_the_logits_processors_of_transformers(
    settings: dict, processors: list[LogitsProcessor]
) -> None:
    logits = torch.FloatTensor([[0.5, 2.5, 2.0, -0.6, 1.0, 0.9, -1.0, 1.5]])
    expected = logits
    for processor in processors:
        expected = processor(torch.LongTensor([HISTORY]), expected)
    expected = expected[0].double().softmax(-1)

    sampler = Sampler(temperature=1.0, seed=3, **settings)
    tokens, logprobs = sampler(logits.expand(5000, -1), range(5000), 1, [HISTORY] * 5000)

    counts = torch.bincount(torch.tensor(tokens), minlength=8).double()
    assert ((counts > 0) == (expected > 0)).all()
    possible = expected > 0
    chi_square = ((counts - 5000 * expected) ** 2 / (5000 * expected))[possible].sum()
    assert chi_square < 25  # 7 degrees of freedom, less than one in a thousand seeds
    assert logprobs == pytest.approx(logits[0].log_softmax(-1)[tokens].tolist())
