"""Decoding with traces and graphs matches the modules; otherwise the modules run."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from inference.engine import decoder, slots
from inference.engine.decoder import CudaCapture, Decoder, GraphedRows
from inference.engine.replay import OperatorTrace, PassCounts, ReplayError, TraceRecorder
from inference.engine.requests import Response
from inference.engine.sampling import Sampler
from inference.generation import generate_each
from pipeline.config import FrozenModelConfig
from pipeline.kernels.choice import KERNELS_VARIABLE
from pipeline.models.hf.load import load_causal_lm
from tests.families import RAGGED_FAMILIES, random_rows, save_to, tiny_causal_lm
from tests.inference.closeness import assert_close
from tests.mixtures import MIXTURES, tiny_mixture

PROMPTS = [row.input_ids for row in random_rows((7, 3, 12, 5, 1, 6))]
CPU = torch.device("cpu")
Capture = Callable[[Callable[[], Tensor], Tensor], Callable[[], Tensor]]


def load(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    path = save_to(tiny_causal_lm(family, **changes), directory)
    return load_causal_lm(FrozenModelConfig(path=path), device=CPU)


def generate_responses(
    model: PreTrainedModel, *, slots: int = 8, new_tokens: int = 12
) -> tuple[list[Response], PassCounts]:
    passes = PassCounts()
    completions = generate_each(
        model,
        PROMPTS,
        Sampler(temperature=1.0, seed=3),
        max_new_tokens=new_tokens,
        batch_size=slots,
        passes=passes,
    )
    return [f.response for f in sorted(completions, key=lambda f: f.index)], passes


def with_hook(model: PreTrainedModel) -> PreTrainedModel:
    """Add a hook, so that every pass runs the modules."""
    model.register_forward_hook(lambda *_: None)
    return model


def capture_trace(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
    """Capture a trace, as a graph is captured on a GPU."""
    with TraceRecorder() as recorder:
        result = compute()
    return OperatorTrace(recorder.calls, [inputs], result).replay


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("family", RAGGED_FAMILIES)
def test_traces_and_graphs_match_the_modules(
    family: str, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(family, tmp_path)
    by_traces, trace_passes = generate_responses(model, slots=slots)
    with monkeypatch.context() as patch:
        patch.setattr("inference.engine.slots.Decoder", partial(Decoder, capture=capture_trace))
        patch.setenv(
            KERNELS_VARIABLE, "off"
        )  # the trace that replaces a graph records only operators
        by_graphs, graph_passes = generate_responses(model, slots=slots)
        expected, passes = generate_responses(with_hook(model), slots=slots)

    for counts in (trace_passes, graph_passes):
        assert counts.replayed > 8
        assert counts.failed_recordings == 0
    assert passes.replayed == 0
    assert_close(by_traces, expected)
    assert_close(by_graphs, expected)


@pytest.mark.parametrize("family", MIXTURES)
def test_traces_of_mixtures_of_experts_match_the_modules(family: str, tmp_path: Path) -> None:
    path = save_to(tiny_mixture(family), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)

    actual, _ = generate_responses(model)

    expected, _ = generate_responses(with_hook(model))
    assert [r.ids for r in actual] == [r.ids for r in expected]


def test_verified_trace_serves_the_remaining_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", tmp_path)
    row_counts: list[int] = []
    traced_rows = decoder.TracedRows
    monkeypatch.setattr(decoder, "has_kernel", lambda _: True)
    monkeypatch.setattr(
        decoder,
        "TracedRows",
        lambda modules, count: row_counts.append(count) or traced_rows(modules, count),
    )

    completions = generate_each(
        model,
        (PROMPTS * 6)[:32],
        Sampler(temperature=1.0, seed=3),
        max_new_tokens=40,
        stop_when=lambda index, ids: len(ids) == 8 + index,
    )

    assert len(list(completions)) == 32
    assert row_counts[:2] == [32, 4]  # 32 rows are used for 8 to 31 sequences


def test_next_pass_launches_before_tokens_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def capture(compute: Callable[[], Tensor], _: Tensor) -> Callable[[], Tensor]:
        return lambda: launched.append(1) or compute()

    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=capture))
    counts: list[int] = []
    greedy = Sampler(temperature=0.0, seed=0)
    list(
        generate_each(
            *(load("llama", tmp_path), PROMPTS[:1], greedy),
            max_new_tokens=12,
            stop_when=lambda _, __: counts.append(len(launched)),
        )
    )

    # The modules compute two passes; the second is compared with a graph.
    assert counts == [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11]


def test_sequences_that_end_during_a_pass_change_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", tmp_path, max_position_embeddings=512)
    sampler = Sampler(temperature=1.0, seed=3, top_p=0.9, stop_ids=range(2, 10))
    prompts = [*PROMPTS * 8, *([token] * 240 for token in range(20, 26))]  # a graph has 256 tokens

    def sample() -> list[Response]:
        completions = generate_each(model, prompts, sampler, max_new_tokens=40, batch_size=16)
        return [f.response for f in sorted(completions, key=lambda f: f.index)]

    with monkeypatch.context() as patch:
        patch.setattr(slots, "Decoder", partial(Decoder, capture=capture_trace))
        patch.setenv(KERNELS_VARIABLE, "off")
        actual = sample()

    assert_close(actual, sample())


def test_row_at_its_limit_repeats_its_last_position() -> None:
    rows = GraphedRows(with_hook, 2, longest=64, device=CPU, capture=capture_trace, agree=bool)
    rows._inputs.copy_(torch.tensor([[5, 6], [10, 20], [10, 20], [11, 21]]))

    rows.advance(torch.tensor([7, 8]), torch.tensor([1, 0]))

    assert rows._inputs.tolist() == [[7, 6], [11, 20], [11, 20], [12, 21]]


def scale_by(factor: float) -> Capture:
    return lambda compute, _: lambda: compute() * factor


def raise_replay_error(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
    del compute, inputs
    raise ReplayError("it waits for a number")


@pytest.mark.parametrize(
    ("capture", "counts", "reason"),
    [
        (scale_by(1 + 1e-5), PassCounts(1, 2, 10, 0), ""),
        (scale_by(-1.0), PassCounts(1, 12, 0, 1), "does not match the modules: logits differ"),
        (
            raise_replay_error,
            PassCounts(1, 12, 0, 1),
            "in eager mode, without replay: it waits for a number",
        ),
    ],
)
def test_graph_is_used_only_if_it_matches_the_modules(
    capture: Capture,
    counts: PassCounts,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load("llama", tmp_path)
    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=capture))

    with caplog.at_level(logging.INFO, "inference"):
        actual, passes = generate_responses(model)

    assert passes == counts
    assert reason in caplog.text
    expected, _ = generate_responses(with_hook(model))
    assert [r.ids for r in actual] == [r.ids for r in expected]


@pytest.mark.gpu
def test_gpu_responses_match_the_modules(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    path = save_to(tiny_causal_lm("llama", **sizes), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cuda", 0))

    actual, passes = generate_responses(model)

    assert (passes.failed_recordings, passes.replayed) == (0, 10)
    assert_close(actual, generate_responses(with_hook(model))[0])


@pytest.mark.gpu
def test_graph_contains_nccl_collectives(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda", 0)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=device)
    try:
        x = torch.ones(64, 64, device=device)

        def compute() -> Tensor:
            y = x @ x
            dist.all_reduce(y)
            return y + 1

        compute()
        replay = CudaCapture(device)(compute, x)
        x.fill_(2.0)
        result = replay().clone()

        assert torch.equal(result, torch.full_like(result, 4 * 64 + 1))
    finally:
        dist.destroy_process_group()
