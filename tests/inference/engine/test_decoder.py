"""Decoding from traces and graphs has the tokens of the modules, or the modules run.

Without a GPU a trace stands in for a CUDA graph: both repeat operators on the memory that they had.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inference.engine import decoder, slots
from inference.engine.decoder import SHORT, Decoder, can_replay
from inference.engine.graphs import CudaCapture, require_capturable
from inference.engine.replay import PassCounts, ReplayError
from inference.engine.requests import Response
from inference.engine.sampling import Sampler
from inference.engine.trace import OperatorTrace, TraceRecorder
from inference.generation import generate_each
from inference.weights.replica import InPlace, Replica
from pipeline.config import FrozenModelConfig
from pipeline.kernels.choice import SWITCH
from pipeline.models.load import load_causal_lm
from pipeline.parallel.mesh import current_mesh
from tests.distributed import rank, run_ranks
from tests.families import RAGGED_FAMILIES, random_rows, saved, tiny_causal_lm
from tests.inference.closeness import assert_close
from tests.mixtures import MIXTURES, tiny_mixture

PROMPTS = [row.input_ids for row in random_rows((7, 3, 12, 5, 1, 6))]
CPU = torch.device("cpu")
Capture = Callable[[Callable[[], Tensor], Tensor], Callable[[], Tensor]]


def loaded(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    path = saved(tiny_causal_lm(family, **changes), directory)
    return load_causal_lm(FrozenModelConfig(path=path), device=CPU)


def answered(
    model: PreTrainedModel, *, slots: int = 8, new_tokens: int = 12
) -> tuple[list[Response], PassCounts]:
    passes = PassCounts()
    finished = generate_each(
        model,
        PROMPTS,
        Sampler(temperature=1.0, seed=3),
        max_new_tokens=new_tokens,
        batch_size=slots,
        passes=passes,
    )
    return [each.response for each in sorted(finished, key=lambda each: each.index)], passes


def watched(model: PreTrainedModel) -> PreTrainedModel:
    """Add a hook, so that the modules run in each pass."""
    model.register_forward_hook(lambda *_: None)
    return model


def traced(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
    """Capture by a trace, as graphs are captured on a GPU."""
    with TraceRecorder() as recorder:
        result = compute()
    return OperatorTrace(recorder.calls, [inputs], result).replay


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("family", RAGGED_FAMILIES)
def test_traces_and_graphs_have_the_tokens_of_the_modules(
    family: str, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(family, tmp_path)
    by_traces, trace_passes = answered(model, slots=slots)
    with monkeypatch.context() as patch:
        patch.setattr("inference.engine.slots.Decoder", partial(Decoder, capture=traced))
        patch.setenv(SWITCH, "off")  # a trace in place of a graph records operators only
        by_graphs, graph_passes = answered(model, slots=slots)
    expected, passes = answered(watched(model), slots=slots)

    for counts in (trace_passes, graph_passes):
        assert counts.replayed > 8
        assert counts.refused == 0
    assert passes.replayed == 0
    assert_close(by_traces, expected)
    assert_close(by_graphs, expected)


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_have_the_tokens_of_their_modules(family: str, tmp_path: Path) -> None:
    path = saved(tiny_mixture(family), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)

    ours, _ = answered(model)

    expected, _ = answered(watched(model))
    assert [each.ids for each in ours] == [each.ids for each in expected]


def test_a_verified_trace_serves_the_sequences_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("llama", tmp_path)
    made: list[int] = []
    rows = decoder.TracedRows
    monkeypatch.setattr(decoder, "is_built", lambda _: True)
    monkeypatch.setattr(
        decoder, "TracedRows", lambda modules, count: made.append(count) or rows(modules, count)
    )

    finished = generate_each(
        model,
        (PROMPTS * 6)[:32],
        Sampler(temperature=1.0, seed=3),
        max_new_tokens=40,
        stop_when=lambda index, ids: len(ids) == 8 + index,
    )

    assert len(list(finished)) == 32
    assert made[:2] == [32, 4]  # 32 rows serve 8 to 31 sequences


def test_long_sequences_have_their_own_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=traced))
    monkeypatch.setenv(SWITCH, "off")
    model = loaded("llama", tmp_path, max_position_embeddings=4096)
    passes = PassCounts()
    prompt = [5, 6, 7] * (SHORT // 3 - 3)
    sampler = Sampler(temperature=0.0, seed=0)

    list(generate_each(model, [prompt], sampler, max_new_tokens=20, passes=passes))

    # Three passes below SHORT tokens are the modules', and three above.
    assert (passes.by_modules, passes.replayed) == (6, 14)


def off_by(factor: float) -> Capture:
    return lambda compute, _: lambda: compute() * factor


def refuse(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
    del compute, inputs
    raise ReplayError("it waits for a number")


@pytest.mark.parametrize(
    ("capture", "counts", "reason"),
    [
        (off_by(1 + 1e-5), PassCounts(1, 3, 9, 0), ""),
        (off_by(1 + 1e-2), PassCounts(1, 12, 0, 1), "does not repeat its modules: logits differ"),
        (
            refuse,
            PassCounts(1, 12, 0, 1),
            "the model's modules in each pass: it waits for a number",
        ),
    ],
)
def test_a_graph_is_used_if_it_repeats_its_modules_up_to_rounding(
    capture: Capture,
    counts: PassCounts,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = loaded("llama", tmp_path)
    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=capture))

    with caplog.at_level(logging.INFO, "inference"):
        ours, passes = answered(model)

    assert passes == counts
    assert reason in caplog.text
    expected, _ = answered(watched(model))
    assert [each.ids for each in ours] == [each.ids for each in expected]


def test_no_logits_of_a_graph_are_used_before_it_is_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = loaded("llama", tmp_path)
    expected, _ = answered(model, new_tokens=3)
    monkeypatch.setattr(slots, "Decoder", partial(Decoder, capture=off_by(-1.0)))

    ours, _ = answered(model, new_tokens=3)

    assert_close(ours, expected)


def test_modules_that_look_at_numbers_run_in_each_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("llama", tmp_path)
    expected, _ = answered(model)
    plain = model.model.norm.forward
    model.model.norm.forward = lambda x: plain(x) if x.abs().max() > 0 else x

    with caplog.at_level(logging.INFO, "inference"):
        ours, passes = answered(model)

    assert_close(ours, expected)
    assert passes.replayed == 0
    assert "hands a number to Python" in caplog.text


def test_tolist_of_a_mixture_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # JetMoe divides its tokens among experts by `tolist`, which is not an operator.
    config = AutoConfig.for_model(
        "jetmoe",
        vocab_size=101,
        hidden_size=32,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=48,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = load_causal_lm(FrozenModelConfig(path=saved(plain, tmp_path)), device=CPU)

    with caplog.at_level(logging.INFO, "inference"):
        _, passes = answered(model)

    assert "tolist hands numbers to Python" in caplog.text
    assert passes.replayed == 0


def tensor_parallel_graphs(without: int | None) -> tuple[list[list[int]], PassCounts]:
    """Responses of a tensor-parallel model; on one rank no graph can be made."""

    def capture(compute: Callable[[], Tensor], inputs: Tensor) -> Callable[[], Tensor]:
        del inputs
        require_capturable(compute)
        if rank() == without:
            raise ReplayError("there is no memory for a graph")
        return compute

    model = tiny_causal_lm("llama")
    model.set_attn_implementation("ragged")
    replica = Replica(model, shares=True, tp_group=current_mesh().tp_group(2, timeout_seconds=60.0))
    replica.load(InPlace(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "Decoder", partial(Decoder, capture=capture))
        patch.setattr(decoder, "can_replay", lambda *_: True)
        responses, passes = answered(replica.model)
    return [each.ids for each in responses], passes


def test_tensor_parallel_processes_replay_graphs_together_or_not_at_all() -> None:
    by_graphs = run_ranks(tensor_parallel_graphs, None)
    by_modules = run_ranks(tensor_parallel_graphs, 1)

    assert [counts.replayed for _, counts in by_graphs] == [9, 9]
    assert [counts.replayed for _, counts in by_modules] == [0, 0]
    assert by_graphs[0][0] == by_modules[0][0] == by_modules[1][0]


def test_hooks_keep_the_modules_running() -> None:
    model = tiny_causal_lm("llama")

    assert can_replay(model, CPU)
    assert not can_replay(watched(model), CPU)


def test_what_a_graph_can_not_contain_is_refused_without_a_mode_of_other_threads() -> None:
    x = torch.ones(3)
    found: list[float] = []

    def elsewhere() -> None:
        found.append((x * 2).sum().item())

    def compute() -> Tensor:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return x + x.sum()

    require_capturable(compute)
    assert found == [6.0]
    with pytest.raises(ReplayError, match="hands a number to Python"):
        require_capturable(lambda: x * x.max().item())


@pytest.mark.gpu
def test_responses_on_a_gpu_are_those_of_its_modules(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    path = saved(tiny_causal_lm("llama", **sizes), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cuda", 0))

    ours, passes = answered(model)

    assert (passes.refused, passes.replayed) == (0, 9)
    assert_close(ours, answered(watched(model))[0])


@pytest.mark.gpu
def test_a_graph_contains_the_collectives_of_nccl(tmp_path: Path) -> None:
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
