"""The sampler's definition, against numbers by hand and the generation engine's own."""

import logging
import math
from typing import Any

import pytest
import torch

from inference.engine.sampling import Sampler, uniforms
from pipeline.errors import KernelError
from pipeline.kernels import choice
from pipeline.kernels.sampling import cuda, definition
from pipeline.kernels.sampling.definition import Draw, kept
from pipeline.kernels.sampling.dispatch import sample

HALVES = torch.tensor([[0.5, 0.125, 0.25, 0.125]]).double()


def test_uniform_numbers_are_the_generation_engines_to_the_bit() -> None:
    keys, positions = [0, 1, 2**63 - 1, 5], [0, 9, 4, 2**40]

    for seed in (0, 7, 2**64 - 1, -3):
        ours = definition.uniforms(seed, torch.tensor(keys), torch.tensor(positions))

        assert ours.tolist() == uniforms(seed, keys, positions).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 2}, [0.5, 0, 0.25, 0]),
        ({"top_k": 3}, [0.5, 0.125, 0.25, 0.125]),  # the fourth is as likely as the third
        ({"top_p": 0.75}, [0.5, 0, 0.25, 0]),
        ({"top_p": 0.76}, [0.5, 0.125, 0.25, 0]),  # of equals the first
        ({"top_k": 2, "top_p": 0.6}, [0.5, 0, 0, 0]),  # 0.6 of 0.75 is less than 0.5
        ({"min_p": 0.5}, [0.5, 0, 0.25, 0]),
    ],
)
def test_tokens_are_cut_off(settings: dict[str, Any], expected: list[float]) -> None:
    assert kept(HALVES, Draw(seed=0, temperature=1.0, **settings)).tolist() == [expected]


def test_the_log_probability_is_that_before_anything_is_cut_off() -> None:
    numbers = torch.zeros(2, 1, dtype=torch.long)

    for draw in (Draw(seed=0, temperature=0.0), Draw(seed=0, temperature=1.0, top_k=1)):
        tokens, logprobs = sample(HALVES.log().float(), numbers[0], numbers[1], draw)

        assert tokens.item() == 0
        assert logprobs.item() == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_tokens_are_those_of_the_generation_engine(settings: dict[str, Any]) -> None:
    logits = 3 * torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    keys, positions = list(range(200)), [row % 7 for row in range(200)]

    tokens, logprobs = sample(
        logits, torch.tensor(keys), torch.tensor(positions), Draw(seed=3, **settings)
    )
    expected = Sampler(seed=3, **settings)(logits, keys, positions)

    assert tokens.tolist() == expected[0]
    assert logprobs.tolist() == pytest.approx(expected[1], abs=2e-6)


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("a repetition penalty", {"repetition_penalty": 1.3}),
        ("a minimum length", {"min_new_tokens": 4, "stop_ids": (2,)}),
    ],
)
def test_what_changes_logits_is_left_to_pytorch_and_said_or_ends_the_run(
    what: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice._say_once.cache_clear()
    sampler = Sampler(seed=3, temperature=1.0, **settings)
    asked = (torch.randn(2, 9), [0, 1], 0, [[1, 2], [3]])
    with caplog.at_level(logging.INFO):
        expected = sampler(*asked)
        assert not caplog.records  # on a CPU there is no kernel to miss

        monkeypatch.setattr(choice, "wanted", lambda _: True)
        assert sampler(*asked) == sampler(*asked) == expected
    assert [record.message for record in caplog.records] == [
        f"PyTorch does the work of the kernel of sampling: {what} changes the logits"
    ]

    monkeypatch.setenv(choice.SWITCH, "required")
    with pytest.raises(KernelError, match=f"of sampling can't be had: {what} changes the logits"):
        sampler(*asked)


def test_the_kernel_refuses_what_it_is_not_written_for() -> None:
    assert cuda.refusal(torch.zeros(2, 50_257, dtype=torch.bfloat16)) is None
    assert cuda.refusal(torch.zeros(2, 9).double()) == "logits of torch.float64"
    assert cuda.refusal(torch.zeros(9, 2).T) == "logits that don't lie side by side"
    assert cuda.refusal(torch.zeros(1, cuda.MOST_WORDS)) is None
    refused = cuda.refusal(torch.zeros(1, cuda.MOST_WORDS + 1))
    assert refused == f"a vocabulary of {cuda.MOST_WORDS + 1:,} words"
