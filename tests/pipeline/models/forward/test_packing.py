"""Families whose outputs packing would change are padded, and match separate sequences."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.config import FrozenModelConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.models.forward.forward import Policy, is_ragged
from pipeline.models.forward.packing import HEADS, _probe_batching, small_settings
from pipeline.models.hf.load import load_causal_lm
from pipeline.system.errors import ModelError
from tests.families import GROUPED, VOCAB, depends_on_later_tokens, random_rows, randomize, save_to

CPU = torch.device("cpu")
LENGTHS = (7, 3, 12, 5, 1, 6, 6)
WINDOW = 4

_SIZES: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[dict[str, Any], str | None]] = {
    "llama": ({}, None),
    "mistral": ({"sliding_window": WINDOW}, None),
    "qwen2": ({"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, None),
    "mixtral": (_EXPERTS, None),
    "nemotron": ({}, "NemotronAttention drops the sequence boundaries, so"),
    "doge": ({"keep_window_size": 6}, "log-probabilities of a small copy differ by"),
    "phimoe": (
        {**_EXPERTS, "sliding_window": WINDOW},
        "log-probabilities of a small copy differ by",
    ),
    "qwen2_moe": (
        {
            **_EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
        "log-probabilities of a small copy differ by",
    ),
}
"""Settings in addition to the sizes, and the start of the reason for padding, if any."""


def make_tiny(family: str, **changes: Any) -> PreTrainedModel:
    settings = {**_SIZES, **FAMILIES[family][0], **changes}
    config = AutoConfig.for_model(family, **settings)
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def logprobs_alone(model: PreTrainedModel, rows: list[Encoded]) -> torch.Tensor:
    """Return the plain model's output for each sequence's tokens after the first."""
    results: list[torch.Tensor] = []
    for row in rows:
        ids = torch.tensor(row.input_ids)
        logprobs = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        results.append(logprobs.gather(1, ids[1:, None])[:, 0])
    return torch.cat(results).float()


@torch.no_grad()
def test_sequences_are_independent_and_padding_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = random_rows(LENGTHS)
    _probe_batching.cache_clear()
    assert small_settings(AutoConfig.for_model("gemma3")).text_config.num_attention_heads == HEADS
    failures: list[str] = []
    for family, (_, reason) in FAMILIES.items():
        plain = make_tiny(family)
        expected = logprobs_alone(plain, rows)
        path = save_to(plain, tmp_path / family)
        if depends_on_later_tokens(plain):
            with pytest.raises(ModelError, match=f"outputs of {family} depend on later tokens"):
                load_causal_lm(FrozenModelConfig(path=path), device=CPU)
            continue
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="pipeline.models"):
            model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)
            load_causal_lm(FrozenModelConfig(path=path), device=CPU)
        error = (Policy(model)(collate(rows)).logprobs - expected).abs().max().item()
        messages = [line for line in caplog.messages if "padded" in line]
        start = f"{family} runs padded, not packed: {reason}"
        if error > 1e-4:
            failures.append(f"{family} is {error} nats off")
        if is_ragged(model) != (reason is None):
            failures.append(f"{family} is packed: {is_ragged(model)}")
        if [line[: len(start)] for line in messages] != [start] * (reason is not None):
            failures.append(f"{family}: {messages}")

    assert not failures, "\n".join(failures)
