"""Faults planted in the kernels are found by the cases that test them."""

import itertools
from pathlib import Path

import pytest
import torch

from pipeline.kernels.cuda import gpu as gpu_module
from tests.pipeline.kernels.cuda import adam_cases, append_cases, sampling_cases
from tests.pipeline.kernels.cuda import attention_cases as attention
from tests.pipeline.kernels.cuda import test_adam as adam
from tests.pipeline.kernels.cuda.attention_cases import BF16, F32, RAGGED, Case
from tests.pipeline.kernels.cuda.emulated import SCHEDULES, Emulator

SOURCES = ("adamw.cu", "append.cu", "decode_attention.cu", "sample.cu")

ATTENTION = {
    "no barrier before shared memory is read": ("  __syncthreads();\n  for", "  for"),
    "a barrier that half of the warps come to": (
        "  __syncthreads();\n  for",
        "  if (warp < 2) __syncthreads();\n  for",
    ),
    "a shuffle that lanes past the end don't come to": (
        "for (int other = LANES / 2; other > 0; other /= 2)",
        "for (int other = token < keys.end ? LANES / 2 : 0; other > 0; other /= 2)",
    ),
    "keys past the end take part": ("if (token >= keys.end) score[a][g] = MINUS_INFINITY;", ""),
    "keys past the end are read": (
        "const bool real = token < keys.end && load < LOADS;",
        "const bool real = load < LOADS;",
    ),
    "a split ends one key early": (
        "min(end, first + count)}",
        "min(end, first + count - 1)}",
    ),
    "the window is one token short": (
        "? length - p.window : 0",
        "? length - p.window + 1 : 0",
    ),
    "tokens and heads change places": ("token * p.key_token", "token * p.key_head"),
    "a softmax without keys is not guarded": (
        "return highest == MINUS_INFINITY ? 0.f : highest;",
        "return highest;",
    ),
    "splits are put together without their maxima": (
        "const float share = exp2_fast(read(part + HEAD_SIZE) - zero);",
        "const float share = 1.f;",
    ),
    "warps are put together without their maxima": (
        "const float share = exp2_fast(shared_weights[row * 2] - zero);",
        "const float share = 1.f;",
    ),
    "arrays of shared memory overlap": (
        "shared + WARPS * GROUP * HEAD_SIZE;",
        "shared + WARPS * GROUP * HEAD_SIZE - 2;",
    ),
    "shared memory is left": (
        "shared + WARPS * GROUP * HEAD_SIZE;",
        "shared + WARPS * GROUP * HEAD_SIZE + 2;",
    ),
    "half of a warp is not put together": ("other < 32; other *= 2", "other < 16; other *= 2"),
    "query heads are taken in another order": (
        "const int first_head = kv_head * p.heads_per_kv + first_of_kv;",
        "const int first_head = kv_head + first_of_kv;",
    ),
    "a load begins one number late": (
        "load16_once(key + token * p.key_token + load * PER_LOAD)",
        "load16_once(key + token * p.key_token + load * PER_LOAD + 1)",
    ),
    "sums are not shrunk by a new maximum": (
        "sums.values[g][e] *= shrink;",
        "sums.values[g][e] *= 1.f;",
    ),
    "the last of the query heads is written twice": (
        "i < num_heads * HEAD_SIZE;",
        "i < (num_heads + 1) * HEAD_SIZE;",
    ),
}

ATTENTION_CASES = [
    *(
        Case(F32, 64, 3, 1, RAGGED, num_splits=splits, schedule=order)
        for splits, order in itertools.product((1, 3), SCHEDULES)
    ),
    Case(F32, 64, 3, 1, RAGGED, window=40, num_splits=1),
    Case(F32, 80, 9, 1, RAGGED, num_splits=2),
    Case(BF16, 64, 6, 2, RAGGED, num_splits=2),
]

ADAM = {
    "no barrier before the factors are read": ("  __syncthreads();\n", ""),
    "the tail of a block is left out": (
        "i < count; i += THREADS) update_one",
        "i < done; i += THREADS) update_one",
    ),
    "a block reads beyond its shard": (
        "left < CHUNK ? static_cast<int>(left) : CHUNK",
        "left < CHUNK ? static_cast<int>(left) + 1 : CHUNK",
    ),
    "all blocks update the first shard": (
        "p.shards + load_int(p.shard_of_block + block)",
        "p.shards",
    ),
    "blocks of a shard begin at the first of the launch": (
        "block - load_i64(&shard->first_block)",
        "block - 0",
    ),
    "wide loads of what is not aligned": ("return ends == 0;", "return true;"),
    "decay is not decoupled": ("master = master * f.decay;", ""),
    "the root is not corrected": ("sqrtf(square) / f.root_correction", "sqrtf(square)"),
    "the multiplier is left out": ("* f.multiplier;", ";"),
    "a product and a sum are rounded apart": (
        "square = fmaf(f.sq_weight * gradient, gradient, square * f.beta2);",
        "square = f.sq_weight * gradient * gradient + square * f.beta2;",
    ),
    "the second moment is that of the first": (
        "round_to(square, x.exp_avg_sq);",
        "round_to(average, x.exp_avg_sq);",
    ),
    "weights are rounded down": ("(bits + 0x8000u) >> 16", "bits >> 16"),
    "ties of weights go to even": ("bits + 0x8000u", "bits + 0x7fffu + ((bits >> 16) & 1u)"),
}

ADAM_CASES = [
    *((adam_cases.Kind(), shift, schedule) for shift, schedule in [(0, 0), (0, 1), (1, 7)]),
    (adam_cases.Kind(BF16, BF16, BF16), 1, 0),
    (adam_cases.Kind(BF16, split=True), 0, 7),
]

APPEND = {
    "tokens in no slot are stored": (
        "if (place < 0 || place >= p.num_slots * p.width) return;",
        "if (place < 0) return;",
    ),
    "slots and positions change places": (
        "(slot * p.num_heads + head) * p.width + position",
        "(position * p.num_heads + head) * p.width + slot",
    ),
    "the heads beyond a block are left": ("at < p.num_heads * of_both", "at < 16 * blockDim.x"),
    "values are taken for keys": (
        "const bool is_key = byte < of_key;",
        "const bool is_key = true;",
    ),
    "heads lie as tokens do": (
        "head * of_head + token * of_token",
        "head * of_token + token * of_head",
    ),
    "values begin where keys end": (": byte - of_key;", ": byte;"),
    "half of the loads": ("at += 16 * blockDim.x", "at += 32 * blockDim.x"),
}

SAMPLE = {
    "no barrier before the highest score is read": (
        "is_number = !__syncthreads_or(!is_number);",
        "is_number = true;",
    ),
    "bins are counted before they are empty": (
        "shared->bins[bin] = 0;\n    __syncthreads();",
        "shared->bins[bin] = 0;",
    ),
    "bins are read before they are counted": (
        "amount);\n    }\n    __syncthreads();",
        "amount);\n    }",
    ),
    "the segments' weights are read too early": (
        "row.ties[segment] = ties;\n  }\n  __syncthreads();",
        "row.ties[segment] = ties;\n  }",
    ),
    "a barrier that one warp alone comes to": (
        "if (lane == 0) row.shared->total = total;",
        "if (lane == 0) row.shared->total = total;\n    __syncthreads();",
    ),
    "words beyond the last are read": ("if (word >= row.num_words) continue;", ""),
    "the last segment is left out": (
        "(p.num_words + SEGMENT - 1) / SEGMENT",
        "p.num_words / SEGMENT",
    ),
    "of equally likely words the last is taken": (
        "(their_highest == highest && their_first < first)",
        "(their_highest == highest && their_first > first)",
    ),
    "ties are counted anew in each segment": ("const int up_to = before + ", "const int up_to = "),
    "one tie too many": (
        "(wanted - above + of_tie - 1) / of_tie",
        "(wanted - above + of_tie - 1) / of_tie + 1",
    ),
    "ties of the drawn segment have no order": (
        "__popc(tied & ((1u << lane) - 1))",
        "__popc(tied & ~1u)",
    ),
    "the bits found so far are not heeded": (
        "d >> (shift + 8) == found >> (shift + 8)",
        "true",
    ),
    "what comes before a digit is forgotten": (
        "u64 sum = above + sum_so_far(own);",
        "u64 sum = sum_so_far(own);",
    ),
    "the nucleus is of all words, not of those that top-k left": (
        "if (p.top_k > 0) total = fill(row, cut);",
        "",
    ),
    "words count by number where they shall by weight": ("by_weight ? weight(d) : 1", "1"),
    "the least share is not heeded": ("cut.least = p.min_p;", ""),
    "the log-probability is that of what was kept": (
        "const u64 total = whole ? all : fill(row, cut);",
        "const u64 total = whole ? all : fill(row, cut); const_cast<u64&>(all) = total;",
    ),
    "the log-probability is the likeliest word's": ("score(row, word) - row.highest)", "0.f)"),
    "the temperature is left out": ("? logit / row.temperature : logit", "? logit : logit"),
    "the position is left out of the draw": ("p.positions + blockIdx.x", "p.keys + blockIdx.x"),
    "the point of a share of the words, not of the weight": (
        "share * static_cast<double>(total)",
        "share * static_cast<double>(total) * 0.9",
    ),
    "all rows are the first": ("blockIdx.x * p.row_stride", "0"),
    "shared memory is left": (
        "reinterpret_cast<int*>(row.weights + row.num_segments)",
        "reinterpret_cast<int*>(row.weights + row.num_segments + 1)",
    ),
    "arrays of shared memory overlap": (
        "reinterpret_cast<int*>(row.weights + row.num_segments)",
        "reinterpret_cast<int*>(row.weights + row.num_segments - 1)",
    ),
}


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources with one line changed."""
    name, (before, after) = request.param
    for file in (gpu_module.PRELUDE, *SOURCES):
        text = (gpu_module.SOURCES / file).read_text()
        if file == name:
            assert before in text
            text = text.replace(before, after)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(gpu_module, "SOURCES", tmp_path)


def attention_is_right(emulator: Emulator) -> bool:
    for case in ATTENTION_CASES:
        inputs = attention.inputs_of(case, torch.device("cpu"))
        try:
            with emulator.memory(*inputs.tensors(), schedule=case.schedule):
                out = attention.run(case, inputs, emulator.gpu())
        except AssertionError:
            return False
        if not attention.relative_error(inputs, out) < attention.TOLERANCES[case.dtype]:
            return False
    return True


def adam_is_right(emulator: Emulator) -> bool:
    for kind, shift, schedule in ADAM_CASES:
        for test in (
            lambda: adam.check_bits(kind, emulator, shift=shift, schedule=schedule),  # noqa: B023
            lambda: adam.check_ties(adam_cases.Kind(split=True), emulator),
        ):
            try:
                test()
            except AssertionError:
                return False
    return True


def append_is_right(emulator: Emulator) -> bool:
    for case in append_cases.CASES:
        inputs = append_cases.inputs_of(case, torch.device("cpu"))
        try:
            with emulator.memory(*inputs.tensors(), schedule=case.schedule):
                if not append_cases.is_right(inputs, emulator.gpu()):
                    return False
        except AssertionError:
            return False
    return True


def sampling_is_right(emulator: Emulator) -> bool:
    for case in sampling_cases.QUICK:
        inputs = sampling_cases.inputs_of(case, torch.device("cpu"))
        try:
            with emulator.memory(*inputs.tensors(), schedule=case.schedule):
                out = sampling_cases.run(case, inputs, emulator.gpu())
        except AssertionError:
            return False
        if not sampling_cases.is_right(case, inputs, out):
            return False
    return True


@pytest.mark.grid
@pytest.mark.parametrize(
    "planted",
    [("decode_attention.cu", each) for each in ATTENTION.values()],
    ids=list(ATTENTION),
    indirect=True,
)
@pytest.mark.usefixtures("planted")
def test_a_fault_planted_in_decode_attention_is_found(emulator: Emulator) -> None:
    assert not attention_is_right(emulator)


@pytest.mark.grid
@pytest.mark.parametrize(
    "planted", [("adamw.cu", each) for each in ADAM.values()], ids=list(ADAM), indirect=True
)
@pytest.mark.usefixtures("planted")
def test_a_fault_planted_in_adamw_is_found(emulator: Emulator) -> None:
    assert not adam_is_right(emulator)


@pytest.mark.grid
@pytest.mark.parametrize(
    "planted", [("append.cu", each) for each in APPEND.values()], ids=list(APPEND), indirect=True
)
@pytest.mark.usefixtures("planted")
def test_a_fault_planted_in_the_cache_is_found(emulator: Emulator) -> None:
    assert not append_is_right(emulator)


@pytest.mark.grid
@pytest.mark.parametrize(
    "planted", [("sample.cu", each) for each in SAMPLE.values()], ids=list(SAMPLE), indirect=True
)
@pytest.mark.usefixtures("planted")
def test_a_fault_planted_in_the_sampler_is_found(emulator: Emulator) -> None:
    assert not sampling_is_right(emulator)


@pytest.mark.grid
def test_without_a_planted_fault_the_same_cases_pass(emulator: Emulator) -> None:
    assert attention_is_right(emulator)
    assert adam_is_right(emulator)
    assert append_is_right(emulator)
    assert sampling_is_right(emulator)
