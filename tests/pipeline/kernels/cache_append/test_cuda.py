"""Storing keys and values on a GPU: what is refused, and the launch."""

import torch

from pipeline.kernels.cache_append import cuda
from pipeline.kernels.cache_append.cases import QUICK, inputs_of, run
from pipeline.kernels.emulator.emulated import Emulator


def test_no_case_is_refused() -> None:
    for case in QUICK:
        inputs = inputs_of(case, torch.device("cpu"))

        assert cuda.refusal(inputs.cache, inputs.states) is None


def test_why_it_is_refused_does_not_differ_with_the_number_of_tokens() -> None:
    reasons: set[str | None] = set()
    for tokens in (1, 2, 700):
        cache = (torch.zeros(1, 2, 8, 6), torch.zeros(1, 2, 8, 6))
        states = (torch.zeros(2, tokens, 6), torch.zeros(2, tokens, 6))
        reasons.add(cuda.refusal(cache, states))

    assert reasons == {
        "heads of 6 numbers, torch.float32: keys don't lie in whole lots of 16 bytes"
    }


def test_one_block_takes_a_token(emulator: Emulator) -> None:
    inputs = inputs_of(QUICK[0], torch.device("cpu"))

    with emulator.memory(*inputs.tensors()):
        run(QUICK[0], inputs, emulator.gpu())

    # 8 heads of two rows of 16 loads each.
    assert emulator.last_launch == "cache_append grid 5 1 1 block 256 1 1 shared 0 stream 0"
