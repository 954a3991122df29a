"""Decoding from traces: the bits of the modules' passes and of training, or the modules' passes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inference.engine import decoder
from inference.engine.replay import Pass
from inference.engine.requests import Response
from inference.engine.sampling import Sampler
from inference.engine.trace import OperatorTrace
from inference.generation import generate, generate_each
from pipeline.config import FrozenModelConfig, Precision
from pipeline.data.batches import TokenBatch
from pipeline.kernels.choice import SWITCH
from pipeline.kernels.linear.dispatch import is_built
from pipeline.models.forward import Policy
from pipeline.models.load import load_causal_lm
from tests.families import RAGGED_FAMILIES, random_rows, saved, tiny_causal_lm
from tests.mixtures import MIXTURES, tiny_mixture

PROMPTS = [row.input_ids for row in random_rows((7, 3, 12, 5, 1, 6))]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
WHOLE_VECTORS: dict[str, dict[str, int]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": {"n_embd": 128, "n_head": 2},
}
"""Sizes of which no element is left over: PyTorch computes functions such as the sine of the last
few of a tensor otherwise than of the rest, wherever a batch ends."""


def loaded(
    family: str, directory: Path, precision: Precision = "fp32", **changes: object
) -> PreTrainedModel:
    path = saved(tiny_causal_lm(family, **changes), directory)
    config = FrozenModelConfig(path=path, precision=precision)
    return load_causal_lm(config, device=torch.device("cpu"))


def answered(model: PreTrainedModel, slots: int = 4, new_tokens: int = 12) -> list[Response]:
    return generate(
        model,
        PROMPTS,
        max_new_tokens=new_tokens,
        temperature=1.0,
        stop_ids=[],
        seed=3,
        batch_size=slots,
    )


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each pass that comes from a trace."""
    counted: list[int] = []
    replay = OperatorTrace.replay

    def count(self: OperatorTrace) -> torch.Tensor:
        counted.append(1)
        return replay(self)

    monkeypatch.setattr(OperatorTrace, "replay", count)
    return counted


def watched(model: PreTrainedModel) -> None:
    """Have its modules run each time: somebody wants to know."""
    model.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("family", RAGGED_FAMILIES)
def test_tapes_say_what_the_modules_say_to_the_bit(
    family: str, replays: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same operators on both sides, and as many rows: all answers are equally long.
    monkeypatch.setenv(SWITCH, "off")
    model = loaded(family, tmp_path)
    from_tapes = answered(model, len(PROMPTS))
    # The first token is the prompt's, two passes are the modules', the next proves two traces.
    assert len(replays) == 12 - 3 + 1
    replays.clear()
    watched(model)

    assert answered(model, len(PROMPTS)) == from_tapes
    assert not replays


def recomputed(model: PreTrainedModel, responses: list[Response]) -> torch.Tensor:
    """Log-probabilities of the answers as training has them, all sequences in one pass."""
    rows = [[*prompt, *each.ids] for prompt, each in zip(PROMPTS, responses, strict=True)]
    first = 0
    targets: list[int] = []
    for prompt, row in zip(PROMPTS, rows, strict=True):
        targets += range(first + len(prompt), first + len(row))
        first += len(row)
    batch = TokenBatch(
        input_ids=torch.tensor([token for row in rows for token in row]),
        lengths=tuple(map(len, rows)),
        targets=torch.tensor(targets),
    )
    with torch.no_grad():
        return Policy(model)(batch).logprobs


@pytest.mark.parametrize("family", WHOLE_VECTORS)
def test_sampled_tokens_have_the_log_probabilities_of_training(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path, **WHOLE_VECTORS[family])
    for slots in (1, 8):
        responses = answered(model, slots, new_tokens=40)

        sampled = torch.tensor([each for response in responses for each in response.logprobs])
        torch.testing.assert_close(sampled, recomputed(model, responses), atol=1e-4, rtol=0)


def test_a_proved_trace_serves_the_sequences_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("llama", tmp_path, **_LLAMA)
    if not is_built(torch.float32):
        pytest.skip("there is no kernel that skips padding")
    made: list[int] = []

    class Counted(decoder.TracedRows):
        def __init__(self, modules: Pass, num_rows: int) -> None:
            made.append(num_rows)
            super().__init__(modules, num_rows)

    def lengths(served: bool) -> list[list[int]]:
        monkeypatch.setattr(decoder, "WIDER", 4 if served else 1)
        made.clear()
        ended = generate_each(
            model,
            (PROMPTS * 6)[:32],
            Sampler(temperature=1.0, seed=3),
            max_new_tokens=40,
            stop_when=lambda index, ids: len(ids) == 8 + index,
        )
        return [each.response.ids for each in sorted(ended, key=lambda each: each.index)]

    monkeypatch.setattr(decoder, "TracedRows", Counted)
    ours = lengths(served=True)
    assert made[:2] == [32, 4]
    assert lengths(served=False) == ours
    assert made == [32, 16, 8, 4, 2, 1]


def test_a_model_whose_python_looks_at_numbers_runs_its_modules(
    replays: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("llama", tmp_path)
    expected = answered(model)
    replays.clear()
    plain = model.model.norm.forward

    def looks(hidden: torch.Tensor) -> torch.Tensor:
        return plain(hidden) if hidden.abs().max() > 0 else hidden

    model.model.norm.forward = looks

    with caplog.at_level(logging.INFO, "inference"):
        assert [each.ids for each in answered(model)] == [each.ids for each in expected]

    assert "decoding goes through the model's modules each time" in caplog.text
    assert "hands a number to Python" in caplog.text
    assert not replays


def test_numbers_that_a_mixture_takes_beside_the_dispatcher_are_seen(
    replays: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # JetMoe splits its tokens among experts by `tolist`, which is not an operator.
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
    model = load_causal_lm(
        FrozenModelConfig(path=saved(plain, tmp_path)), device=torch.device("cpu")
    )

    with caplog.at_level(logging.INFO, "inference"):
        ours = answered(model)
    assert "tolist hands numbers to Python" in caplog.text
    assert not replays

    watched(model)
    assert [each.ids for each in ours] == [each.ids for each in answered(model)]


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_answer_as_their_modules_do(family: str, tmp_path: Path) -> None:
    path = saved(tiny_mixture(family), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))
    ours = answered(model, len(PROMPTS))
    watched(model)

    assert [each.ids for each in ours] == [each.ids for each in answered(model, len(PROMPTS))]


def test_modules_that_do_what_no_trace_can_run_each_time(
    replays: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("llama", tmp_path)
    expected = answered(model)
    plain = model.model.norm.forward

    def sparse(hidden: torch.Tensor) -> torch.Tensor:
        return plain(hidden.to_sparse().to_dense())  # whose numbers lie in no one memory

    model.model.norm.forward = sparse
    replays.clear()

    with caplog.at_level(logging.INFO, "inference"):
        assert [each.ids for each in answered(model)] == [each.ids for each in expected]

    assert "decoding goes through the model's modules each time" in caplog.text
    assert not replays


def test_modules_that_do_not_do_the_same_each_time_are_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("llama", tmp_path)
    plain: Callable[..., Any] = model.model.norm.forward
    passes: list[int] = []

    def changes(hidden: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return plain(hidden) * (2.0 if len(passes) % 2 else 1.0)

    model.model.norm.forward = changes

    with caplog.at_level(logging.INFO, "inference"):
        answered(model)

    assert "its modules do not do the same in each pass" in caplog.text
