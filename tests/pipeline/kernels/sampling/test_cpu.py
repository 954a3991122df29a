"""Drawing tokens from log-probabilities on the CPU: against fp64, by hand, and row by row."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inference.engine.sampling import Sampler, uniforms, words_of
from pipeline.kernels import sampling
from pipeline.kernels.choice import SWITCH

KEYS = [0, 1, 7, 123456789, 2**63, 2**64 - 1]


def drawn(
    logprobs: Tensor, keys: Sequence[int], positions: int | Sequence[int] = 3, seed: int = 5
) -> tuple[Tensor, Tensor]:
    result = sampling.draw(logprobs, *words_of(keys, positions), seed=seed)
    if result is None:
        pytest.skip(str(sampling.library()))
    return result


def test_shares_are_those_of_the_definition() -> None:
    """Of equally likely tokens it is the token's number that tells the share, to 16 bits."""
    logprobs = torch.full((len(KEYS), 2**16), -16 * math.log(2))
    for seed in (0, 5, 2**64 - 3):
        for position in (0, 1, 1000, 2**64 - 1):
            tokens, _ = drawn(logprobs, KEYS, [position] * len(KEYS), seed)
            shares = uniforms(seed, KEYS, [position] * len(KEYS))
            assert tokens.tolist() == [int(share * 2**16) for share in shares]


@pytest.mark.parametrize("vocabulary", [1, 15, 257, 32_000])
def test_the_token_is_where_the_cumulative_weight_passes_the_share(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(200, vocabulary, generator=generator)
    logits[:, 3::7] = -torch.inf
    logprobs = logits.log_softmax(dim=-1)
    keys = range(200)
    tokens, chosen = drawn(logprobs, keys)
    weights = logprobs.double().exp()
    after = weights.cumsum(dim=-1)
    shares = torch.from_numpy(uniforms(5, keys, 3)) * after[:, -1]
    rows = torch.arange(200)
    passed = after[rows, tokens]
    assert (passed >= shares - 1e-6).all()
    assert (passed - weights[rows, tokens] <= shares + 1e-6).all()
    assert (weights[rows, tokens] > 0).all()
    assert torch.equal(chosen, logprobs[rows, tokens])


def test_tokens_by_hand() -> None:
    """Weights 1/2, 0, 1/4, 1/4: a share u takes token 0 below 1/2, 2 below 3/4, else 3."""
    keys = list(range(64))
    logprobs = torch.tensor([0.5, 0.0, 0.25, 0.25]).log().repeat(64, 1)
    tokens, _ = drawn(logprobs, keys)
    shares = uniforms(5, keys, 3)
    expected = np.where(shares < 0.5, 0, np.where(shares < 0.75, 2, 3))
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) == 3


def test_samplers_take_it_and_draw_what_pytorch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 2 * torch.randn(50, 3000, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(temperature=0.7, seed=11)
    calls: list[int] = []
    original = sampling.draw

    def counted(logprobs: Tensor, *words: np.ndarray, seed: int) -> object:
        calls.append(len(logprobs))
        return original(logprobs, *words, seed=seed)

    monkeypatch.setattr(sampling, "draw", counted)
    ours = sampler(logits, range(50), range(50))
    assert calls == [50]
    monkeypatch.setenv(SWITCH, "off")
    assert sampler(logits, range(50), range(50)) == ours
