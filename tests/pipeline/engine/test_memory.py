"""The memory command."""

import json
from pathlib import Path

import pytest

from pipeline.engine.memory import main


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


def test_bytes_of_stages_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    # On 2 processes; bytes of weights, masters, moments and gradients are 2, 2, 8 and 4.
    main(["--params", str(2**30), "--gpus", "2"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith(
        "weights 2.00, masters 2.00, moments 8.00, gradients 2.00; total 14.00"
    )
    assert lines[5].endswith("weights 1.00, masters 1.00, moments 4.00, gradients 2.00; total 8.00")
