"""Decoding from graphs: every pass is the same launches, and what differs is read on the device.

Without a GPU a trace stands in for a CUDA graph: both repeat operators on the memory that they had.
"""

import gc
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.engine import slots
from inference.engine.decoder import SHORT, Decoder
from inference.engine.graphs import no_garbage_collection, require_capturable
from inference.engine.replay import ReplayError
from inference.engine.requests import Response
from inference.engine.trace import OperatorTrace, TraceRecorder
from inference.generation import generate
from pipeline.config import FrozenModelConfig
from pipeline.kernels.choice import SWITCH
from pipeline.models.load import load_causal_lm
from tests.families import RAGGED_FAMILIES, random_rows, saved, tiny_causal_lm

PROMPTS = [row.input_ids for row in random_rows((7, 3, 12, 5, 1, 6))]
CPU = torch.device("cpu")


def answered(model: PreTrainedModel, *, slots: int, new_tokens: int = 12) -> list[Response]:
    return generate(
        model,
        PROMPTS,
        max_new_tokens=new_tokens,
        temperature=1.0,
        stop_ids=[2],
        seed=3,
        batch_size=slots,
    )


def watched(model: PreTrainedModel) -> PreTrainedModel:
    """Its modules run each time: somebody wants to know."""
    model.register_forward_hook(lambda *_: None)
    return model


def agree(ours: list[Response], expected: list[Response], *, within: float) -> bool:
    said, wanted = (
        torch.tensor([logprob for response in each for logprob in response.logprobs])
        for each in (ours, expected)
    )
    same = [response.ids for response in ours] == [response.ids for response in expected]
    return same and bool((said - wanted).abs().max() <= within)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has passes kept by traces as they are by graphs; grows with each that is repeated."""
    counted: list[int] = []

    def capture(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
        with TraceRecorder() as recorder:
            result = compute()
        trace = OperatorTrace(recorder.calls, [inputs], result)

        def replay() -> Tensor:
            counted.append(1)
            return trace.replay()

        return replay

    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=capture))
    monkeypatch.setenv(SWITCH, "off")  # a kernel of the CPU is no operator that a trace has
    return counted


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("family", RAGGED_FAMILIES)
def test_answers_are_those_of_the_modules(
    family: str, slots: int, replays: list[int], tmp_path: Path
) -> None:
    path = saved(tiny_causal_lm(family), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)
    ours = answered(model, slots=slots)
    assert len(replays) > 8

    replays.clear()
    expected = answered(watched(model), slots=slots)

    assert not replays
    assert agree(ours, expected, within=1e-5)


def test_long_sequences_have_graphs_of_their_own(replays: list[int], tmp_path: Path) -> None:
    path = saved(tiny_causal_lm("llama", max_position_embeddings=4096), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)
    prompts = [[5, 6, 7] * (SHORT // 3 - 2)]

    (ours,) = generate(
        model, prompts, max_new_tokens=20, temperature=0.0, stop_ids=[], seed=0, batch_size=1
    )

    # Of 19 passes, for the first token is the prompt's, two on each side are the modules'; one that
    # is written down is repeated at once.
    passes_below = SHORT - len(prompts[0])
    assert len(replays) == (passes_below - 1) + (19 - passes_below - 1)
    assert len(ours.ids) == 20


def test_modules_that_can_not_be_captured_run_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
        del compute, inputs
        raise ReplayError("it waits for a number")

    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=refuse))
    path = saved(tiny_causal_lm("llama"), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)

    with caplog.at_level(logging.INFO, "inference"):
        ours = answered(model, slots=8)

    assert "decoding goes through the model's modules each time: it waits for a number" in (
        caplog.text
    )
    assert agree(ours, answered(watched(model), slots=8), within=1e-5)


def test_what_a_graph_can_not_hold_is_refused_without_a_mode_that_other_threads_see() -> None:
    x = torch.ones(3)
    own: list[float] = []

    def elsewhere() -> None:
        own.append((x * 2).sum().item())

    def compute() -> Tensor:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return x + x.sum()

    require_capturable(compute)
    assert own == [6.0]
    with pytest.raises(ReplayError, match="hands a number to Python"):
        require_capturable(lambda: x * x.max().item())


def test_nothing_is_collected_within_a_capture() -> None:
    assert gc.isenabled()
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.gpu
def test_answers_on_a_gpu_are_those_of_its_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    path = saved(tiny_causal_lm("llama", **sizes), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cuda", 0))
    replay = torch.cuda.CUDAGraph.replay
    replays: list[int] = []

    def count(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    ours = answered(model, slots=8)

    assert len(replays) > 8
    assert agree(ours, answered(watched(model), slots=8), within=1e-5)
