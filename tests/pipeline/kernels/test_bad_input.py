"""Bad input ends in a sentence or in PyTorch's hands, whatever the operator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.kernels.cuda.emulated import compiler_found

ROOT = Path(__file__).parents[3]

EXPECTED = {
    "adamw: good": "right by the kernel",
    "adamw: dtype": (
        "refused: AdamW's gradient must be torch.float32 or torch.bfloat16 or torch.float16"
        " here, not torch.float64"
    ),
    "adamw: device": (
        "refused: AdamW steps flat vectors of one length on one device: master has shape"
        " (64,) on meta, the gradient has (64,) on cpu"
    ),
    "adamw: stride": "refused: AdamW steps contiguous vectors, and exp_avg has stride (2,)",
    "adamw: address": "right by PyTorch",
    "adamw: empty": "right by PyTorch",
    "adamw: length": (
        "refused: AdamW steps flat vectors of one length on one device: master has shape"
        " (63,) on cpu, the gradient has (64,) on cpu"
    ),
    "adamw: a GPU that is too old": "right by PyTorch",
    "adamw: a GPU that nobody knows yet": "right by the kernel",
    "adamw: a cache that can't be written": "right by the kernel",
    "logprobs: good": "right by PyTorch",
    "logprobs: dtype": (
        "refused: log-probabilities: targets are a vector of int64, not torch.int32 of shape (5,)"
    ),
    "logprobs: another dtype": (
        "refused: log-probabilities: hidden is torch.bfloat16 on cpu, the output matrix"
        " torch.float32 and the targets on cpu"
    ),
    "logprobs: device": (
        "refused: log-probabilities: weight is torch.float32 on meta, the output matrix"
        " torch.float32 and the targets on cpu"
    ),
    "logprobs: stride": "right by PyTorch",
    "logprobs: address": "right by PyTorch",
    "logprobs: empty": "right by PyTorch",
    "logprobs: no words": (
        "refused: log-probabilities: the output matrix has shape (0, 8); it must have words"
        " and a width"
    ),
    "logprobs: length": (
        "refused: log-probabilities of 5 targets: hidden has shape (4, 8), not (5, 8)"
    ),
    "attention: good": "right by the kernel",
    "attention: dtype": (
        "refused: lengths must be torch.int32, 2 of them side by side, and is torch.int64 of"
        " shape (2,) and stride (1,)"
    ),
    "attention: another dtype": "right by PyTorch",
    "attention: whole numbers": (
        "refused: key must be numbers in 4 dimensions, and is torch.int32 of shape (2, 2, 9, 64)"
    ),
    "attention: device": "refused: value is on meta, the query on cpu",
    "attention: stride": "right by PyTorch",
    "attention: address": "right by PyTorch",
    "attention: another address": "right by PyTorch",
    "attention: empty": "right by PyTorch",
    "attention: no tokens": "right by the kernel",
    "attention: no heads": "refused: 4 query heads can't share 0 heads of keys",
    "attention: length": "refused: the cache holds 9 tokens of a sequence, not 10",
    "attention: lengths beyond the cache": "right by the kernel",
    "attention: lengths and a window beyond the cache": "right by the kernel",
    "attention: lengths below 0": "right by the kernel",
    "attention: no window": "refused: a sliding window has a token at least, not 0",
    "attention: fewer sequences": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (1, 2, 9, 64) and (1, 2, 9, 64)"
    ),
    "attention: shorter values": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (2, 2, 9, 64) and (2, 2, 4, 64)"
    ),
    "attention: another head size": "refused: keys have 64 numbers a head, the query 32",
    "attention: a place for the result": "right by the kernel",
    "attention: a place for another result": (
        "refused: out must be torch.float32 on cpu of shape (2, 4, 64), side by side, and is"
        " torch.float32 on cpu of shape (2, 4, 32) and stride (128, 32, 1)"
    ),
    "attention: a GPU that is too old": "right by PyTorch",
    "attention: a GPU that nobody knows yet": "right by the kernel",
    "attention: a cache that can't be written": "right by the kernel",
    "attention on a CPU: good": "right by the kernel",
    "attention on a CPU: dtype": (
        "refused: lengths must be torch.int32, 2 of them side by side, and is torch.int64 of"
        " shape (2,) and stride (1,)"
    ),
    "attention on a CPU: another dtype": "right by PyTorch",
    "attention on a CPU: whole numbers": (
        "refused: key must be numbers in 4 dimensions, and is torch.int32 of shape (2, 2, 9, 64)"
    ),
    "attention on a CPU: device": "refused: value is on meta, the query on cpu",
    "attention on a CPU: stride": "right by PyTorch",
    "attention on a CPU: address": "right by PyTorch",
    "attention on a CPU: another address": "right by the kernel",
    "attention on a CPU: empty": "right by PyTorch",
    "attention on a CPU: no tokens": "right by the kernel",
    "attention on a CPU: no heads": "refused: 4 query heads can't share 0 heads of keys",
    "attention on a CPU: length": "refused: the cache holds 9 tokens of a sequence, not 10",
    "attention on a CPU: lengths beyond the cache": "right by the kernel",
    "attention on a CPU: lengths and a window beyond the cache": "right by the kernel",
    "attention on a CPU: lengths below 0": "right by the kernel",
    "attention on a CPU: no window": "refused: a sliding window has a token at least, not 0",
    "attention on a CPU: fewer sequences": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (1, 2, 9, 64) and (1, 2, 9, 64)"
    ),
    "attention on a CPU: shorter values": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (2, 2, 9, 64) and (2, 2, 4, 64)"
    ),
    "attention on a CPU: another head size": "refused: keys have 64 numbers a head, the query 32",
    "attention on a CPU: a place for the result": "right by the kernel",
    "attention on a CPU: a place for another result": (
        "refused: out must be torch.float32 on cpu of shape (2, 4, 64), side by side, and is"
        " torch.float32 on cpu of shape (2, 4, 32) and stride (128, 32, 1)"
    ),
    "causal: good": "right by the kernel",
    "causal: dtype": "right by PyTorch",
    "causal: another dtype": (
        "refused: key is torch.float32 on cpu, the query torch.bfloat16 on cpu"
    ),
    "causal: whole numbers": (
        "refused: key must be numbers in 4 dimensions, and is torch.int32 of shape (1, 2, 9, 16)"
    ),
    "causal: device": "refused: value is torch.bfloat16 on meta, the query torch.bfloat16 on cpu",
    "causal: stride": "right by the kernel",
    "causal: stride of the tokens": "right by the kernel",
    "causal: address": "right by PyTorch",
    "causal: another address": "right by the kernel",
    "causal: empty": "right by PyTorch",
    "causal: no tokens": "right by PyTorch",
    "causal: no heads": "right by PyTorch",
    "causal: an odd head": "right by PyTorch",
    "causal: a head that is too large": "right by PyTorch",
    "causal: more keys": "right by PyTorch",
    "causal: fewer keys": (
        "refused: keys of shape (1, 2, 4, 16) are not those of queries of (1, 2, 9, 16)"
    ),
    "causal: fewer values": (
        "refused: values of shape (1, 2, 4, 16) are not those of keys of (1, 2, 9, 16)"
    ),
    "causal: another head size": (
        "refused: keys of shape (1, 2, 9, 16) are not those of queries of (1, 2, 9, 8)"
    ),
    "causal: three dimensions": (
        "refused: key must be numbers in 4 dimensions, and is torch.bfloat16 of shape (2, 9, 16)"
    ),
    "draw: good": "right by the kernel",
    "draw: dtype": (
        "refused: keys must be uint64, 2 of them side by side, and is int64 of shape (2,) and"
        " strides (8,)"
    ),
    "draw: another dtype": (
        "refused: log-probabilities must be torch.float32 of (sequences, words), and are"
        " torch.float64 of shape (2, 40)"
    ),
    "draw: stride": "right by the kernel",
    "draw: stride of the keys": (
        "refused: keys must be uint64, 2 of them side by side, and is uint64 of shape (2,)"
        " and strides (16,)"
    ),
    "draw: address": "right by the kernel",
    "draw: empty": "right by the kernel",
    "draw: no words": (
        "refused: log-probabilities must be torch.float32 of (sequences, words), and are"
        " torch.float32 of shape (2, 0)"
    ),
    "draw: a vector": (
        "refused: log-probabilities must be torch.float32 of (sequences, words), and are"
        " torch.float32 of shape (40,)"
    ),
    "draw: length": (
        "refused: keys must be uint64, 2 of them side by side, and is uint64 of shape (3,)"
        " and strides (8,)"
    ),
    "linear: good": "right by the kernel",
    "linear: no bias": "right by the kernel",
    "linear: dtype": "right by PyTorch",
    "linear: another dtype": "right by PyTorch",
    "linear: device": "right by PyTorch",
    "linear: stride": "right by PyTorch",
    "linear: stride of the bias": "right by PyTorch",
    "linear: stride of the weight": "right by PyTorch",
    "linear: address": "right by PyTorch",
    "linear: another address": "right by the kernel",
    "linear: empty": "right by PyTorch",
    "linear: no inputs": "right by PyTorch",
    "linear: a vector": "right by PyTorch",
    "linear: a weight that is a vector": "right by PyTorch",
    "linear: a bias for each row": "right by PyTorch",
    "linear: a bias of one number": "right by PyTorch",
    "linear: a result of another shape": "right by PyTorch",
    "linear: rows that there are not": ("refused: this linear layer was made for 3 rows, not 4"),
    "linear: rows below 0": "refused: this linear layer was made for 3 rows, not -1",
    "append: good": "right by the kernel",
    "append: dtype": "refused: the cache has keys of torch.float32, new ones are torch.bfloat16",
    "append: another dtype": (
        "refused: places must be int64, side by side, and are torch.int32 of shape (4,) and"
        " stride (1,)"
    ),
    "append: device": "refused: the cache is on cpu, new values or places on meta",
    "append: stride": "right by PyTorch",
    "append: stride of the cache": "right by PyTorch",
    "append: address": "right by PyTorch",
    "append: odd size": "right by PyTorch",
    "append: empty": "right by PyTorch",
    "append: no slots": (
        "refused: a cache holds keys and values of (slots, heads, tokens, size), none of them"
        " 0, and its keys have shape (0, 3, 8, 64) beside (0, 3, 8, 64)"
    ),
    "append: length": "refused: new keys must have shape (3, 3, 64), not (3, 4, 64)",
    "append: places beyond the cache": "right by the kernel",
    "append: shorter values": (
        "refused: a cache holds keys and values of (slots, heads, tokens, size), none of them"
        " 0, and its values have shape (2, 3, 4, 64) beside (2, 3, 8, 64)"
    ),
    "append: a GPU that is too old": "right by PyTorch",
    "append: a GPU that nobody knows yet": "right by the kernel",
    "append: a cache that can't be written": "right by the kernel",
    "sample: good": "right by the kernel",
    "sample: dtype": (
        "refused: keys must be torch.int64, 2 of them side by side on cpu, and is torch.int32"
        " of shape (2,) and stride (1,) on cpu"
    ),
    "sample: another dtype": "right by PyTorch",
    "sample: whole numbers": (
        "refused: logits must be numbers of (sequences, words), and are torch.int32 of shape"
        " (2, 40)"
    ),
    "sample: device": (
        "refused: positions must be torch.int64, 2 of them side by side on cpu, and is"
        " torch.int64 of shape (2,) and stride (1,) on meta"
    ),
    "sample: stride": "right by PyTorch",
    "sample: address": "right by PyTorch",
    "sample: empty": "right by PyTorch",
    "sample: no words": (
        "refused: logits must be numbers of (sequences, words), and are torch.float32 of"
        " shape (2, 0)"
    ),
    "sample: length": (
        "refused: keys must be torch.int64, 2 of them side by side on cpu, and is torch.int64"
        " of shape (3,) and stride (1,) on cpu"
    ),
    "sample: too many words": "right by PyTorch",
    "sample: no share": (
        "refused: a temperature, top_p or min_p is out of range: Draw(seed=1,"
        " temperature=1.0, top_k=None, top_p=0.0, min_p=0.0)"
    ),
    "sample: no share that is a number": (
        "refused: a temperature, top_p or min_p is out of range: Draw(seed=1,"
        " temperature=1.0, top_k=None, top_p=nan, min_p=0.0)"
    ),
    "sample: no candidates": "refused: top_k must be above 0: 0",
    "sample: a GPU that is too old": "right by PyTorch",
    "sample: a GPU that nobody knows yet": "right by the kernel",
    "sample: a cache that can't be written": "right by the kernel",
}
"""By operator and what is bad of its input."""

ON_CPU = ("attention on a CPU", "linear", "causal")
"""Whose kernels are used where they have PyTorch's bits, which is not everywhere."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not compiler_found():
        pytest.skip("the emulator is built by g++")
    directory = tmp_path_factory.mktemp("emulator")
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.kernels.bad_input", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", EXPECTED)
def test_bad_input_is_refused_in_a_sentence_or_left_to_pytorch(
    what: str, outcomes: dict[str, str]
) -> None:
    operator = what.partition(":")[0]
    if operator in ON_CPU and outcomes[f"{operator}: good"] == "right by PyTorch":
        pytest.skip("there is no kernel that adds up as PyTorch does")

    assert outcomes[what] == EXPECTED[what]


def test_every_outcome_is_looked_at(outcomes: dict[str, str]) -> None:
    assert outcomes.keys() == EXPECTED.keys()
