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
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from inference.engine import slots
from inference.engine.decoder import SHORT, Decoder
from inference.engine.graphs import CudaCapture, no_garbage_collection, require_capturable
from inference.engine.repeatable import has_hooks
from inference.engine.replay import PassCounts, ReplayError
from inference.engine.requests import Response
from inference.engine.sampling import Sampler
from inference.engine.trace import OperatorTrace, TraceRecorder
from inference.generation import generate, generate_each
from inference.weights.replica import InPlace, Replica
from inference.weights.sharding import Sharding
from pipeline.config import FrozenModelConfig
from pipeline.kernels.choice import SWITCH
from pipeline.models.load import load_causal_lm
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh
from tests.distributed import rank, run_ranks
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
    monkeypatch.setenv(SWITCH, "off")  # a kernel of the CPU is not an operator that a trace has
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


def answered_by(
    capture: Callable[[Callable[[], Tensor], Tensor], Callable[[], Tensor]],
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[list[int]], PassCounts]:
    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=capture))
    monkeypatch.setattr(slots, "replays_passes", lambda *_: True)
    passes = PassCounts()
    finished = generate_each(
        model, PROMPTS, Sampler(temperature=0.0, seed=0), max_new_tokens=12, passes=passes
    )
    return [each.response.ids for each in sorted(finished, key=lambda each: each.index)], passes


def test_a_graph_that_repeats_its_modules_up_to_rounding_is_used_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tiny_causal_lm("llama"), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)
    monkeypatch.setenv(SWITCH, "off")
    off = {"exact": 1.0, "rounded": 1 + 1e-5, "wrong": 1 + 1e-2}

    with caplog.at_level(logging.INFO, "inference"):
        found = {
            name: answered_by(
                lambda compute, _: lambda: compute() * factor,  # noqa: B023
                model,
                monkeypatch,
            )
            for name, factor in off.items()
        }

    expected = found["exact"][0]
    assert [ids for ids, _ in found.values()] == [expected] * 3
    # Of 11 passes, for the first token is the prompt's, three are the modules'.
    assert found["exact"][1] == PassCounts(by_modules=3, replayed=8, exact=1)
    assert found["rounded"][1] == PassCounts(by_modules=3, replayed=8, rounded=1)
    assert found["wrong"][1] == PassCounts(by_modules=11, refused=1)
    assert "graphs, which repeat the model's modules to the bit" in caplog.text
    assert "up to rounding, by 1e-05 of the largest logit" in caplog.text
    assert "a graph does not repeat its modules: logits differ by 0.01 of the" in caplog.text


def graphs_of_parts(without: int | None) -> tuple[list[list[int]], PassCounts]:
    """Answers of a model that is divided; on one rank no graph can be made."""

    def capture(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
        del inputs
        require_capturable(compute)  # collectives are no numbers for the host
        if rank() == without:
            raise ReplayError("there is no memory for a graph")
        return compute

    model = tiny_causal_lm("llama")
    model.set_attn_implementation("ragged")
    replica = Replica(model, shares=True, tp_group=current_mesh().tp_group(2, timeout_seconds=60.0))
    replica.load(InPlace(model))
    with pytest.MonkeyPatch.context() as monkeypatch:
        return answered_by(capture, replica.model, monkeypatch)


def test_processes_with_parts_of_each_layer_go_by_graphs_together_or_not_at_all() -> None:
    by_graphs, by_modules = run_ranks(graphs_of_parts, None), run_ranks(graphs_of_parts, 1)

    assert [counts for _, counts in by_graphs] == [
        PassCounts(by_modules=3, replayed=8, exact=1)
    ] * 2
    assert [counts for _, counts in by_modules] == [PassCounts(by_modules=11, refused=1)] * 2
    assert by_graphs[0][0] == by_modules[0][0] == by_modules[1][0]


def test_only_hooks_of_others_keep_the_modules_running() -> None:
    model = tiny_causal_lm("llama")
    Sharding(model, Group(0, (0, 1))).apply()

    assert not has_hooks(model)
    assert has_hooks(watched(model))


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
    passes = PassCounts()
    sampler = Sampler(temperature=1.0, seed=3)
    list(generate_each(model, PROMPTS, sampler, max_new_tokens=12, passes=passes))
    assert (passes.refused, passes.replayed) == (0, 8)
    replays.clear()
    ours = answered(model, slots=8)

    assert len(replays) > 8
    assert agree(ours, answered(watched(model), slots=8), within=1e-5)


@pytest.mark.gpu
def test_a_graph_holds_the_collectives_of_nccl(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda", 0)
    place = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=place, rank=0, world_size=1, device_id=device)
    try:
        x = torch.ones(64, 64, device=device)

        def compute() -> Tensor:
            y = x @ x
            dist.all_reduce(y)
            return y + 1

        compute()
        replay = CudaCapture(device)(compute, x)
        x.fill_(2.0)
        found = replay().clone()

        assert torch.equal(found, torch.full_like(found, 4 * 64 + 1))
    finally:
        dist.destroy_process_group()
