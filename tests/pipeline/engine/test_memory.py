"""The memory command: DeepSpeed's numbers, and this engine's."""

import json
from pathlib import Path

import pytest

from pipeline.engine.memory import (
    estimate_zero2,
    estimate_zero3,
    main,
)

INTERNLM2 = (1_889_110_016, 189_530_112)
"""Parameters of InternLM2-1.8B, and of its embedding of 92544 x 2048."""


def test_stage_3_is_estimated_as_deepspeed_does() -> None:
    table = [
        (round(each.cpu / 2**30, 2), round(each.gpu / 2**30, 2))
        for each in estimate_zero3(*INTERNLM2)
    ]

    assert table == [
        (47.5, 0.71), (47.5, 0.71), (42.22, 4.22), (42.22, 4.22), (1.06, 32.37), (10.56, 32.37),
    ]  # fmt: skip


def test_stage_2_is_estimated_as_deepspeed_does() -> None:
    # 2 GPUs on each of 2 machines: host max(4 * 4, 16) * 1.5, GPU 2 and 2 + 18 / 4 bytes a
    # parameter.
    offloaded, resident = estimate_zero2(1000, gpus=2, nodes=2)

    assert (offloaded.cpu, offloaded.gpu) == (24_000, 2_000)
    assert (resident.cpu, resident.gpu) == (12_000, 6_500)


def test_a_model_is_counted_from_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    # A block: q and o 2 * 32 * 32, k and v 2 * 32 * 16, three of 32 * 64, two norms of 32: 9280.
    main(["--model", str(tmp_path), "--gpus", "2"])

    out = capsys.readouterr().out
    assert out.startswith(f"{3 * 9280 + 3232:,} parameters on 1 machines with 2 processes each")
    assert "stage 3: weights" in out
