"""The arithmetic of scaling, against numbers found by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.budget.flops import model_flops
from pipeline.budget.scaling import ScalingConfig, main, scale
from pipeline.errors import ConfigError
from tests.families import tiny_causal_lm, tiny_config

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny_config("llama", vocab_size=96).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_seconds_follow_from_operations_and_bytes(model: str) -> None:
    config = ScalingConfig(
        model=model,
        gpus=(1, 16),
        card="A100-40GB",
        stages=(0, 3),
        tokens_per_gpu=64,
        length=32,
        gradient_checkpointing=False,
        efficiency=0.5,
        bandwidth=10.0,
    )
    operations = 64 * model_flops(tiny_causal_lm("llama", vocab_size=96)).train(32)

    rows = list(scale(config))

    assert [(row.gpus, row.stage) for row in rows] == [(1, 0), (1, 3), (16, 0), (16, 3)]
    for row in rows:
        assert row.computing == pytest.approx(operations / 156e12)
        assert row.sending == (None if row.gpus == 1 else row.sent / 10e9)
        assert row.fits
    # Two micro-batches of gradients in fp32 and their sum, all but a sixteenth sent by a ring.
    alone, zero = rows[0], rows[2]
    weights = sum(param.numel() for param in tiny_causal_lm("llama", vocab_size=96).parameters())
    assert alone.sent == 0
    assert 1 <= zero.sent / (3 * 4 * weights * 15 / 16) < 1.3  # padding of small vectors
    assert rows[3].num_bytes < zero.num_bytes  # sharded


def test_copies_on_each_machine_send_only_their_pieces_of_gradients_to_others(model: str) -> None:
    config = ScalingConfig(
        model=model, gpus=(8, 32), stages=(3,), tokens_per_gpu=64, length=32, bandwidth=10.0
    )
    (alone, shared), (_, copies) = scale(config), scale(replace(config, copies=True))
    weights = sum(param.numel() for param in tiny_causal_lm("llama", vocab_size=96).parameters())

    # Two micro-batches; an eighth of the gradients in fp32, there and back, all but a quarter.
    assert 1 <= copies.sent_away / (2 * 2 * 4 * weights / 8 * 3 / 4) < 1.3
    assert copies.sending == copies.sent_away / 10e9
    assert shared.sent_away == shared.sent > alone.sent_away == 0
    assert copies.num_bytes > shared.num_bytes


def test_the_table_has_a_line_for_each_number_of_gpus_and_stage(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--model", model, "--gpus", "8", "1024", "--length", "32", "--tokens-per-gpu", "64"])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-8:]] == [
        [gpus, stage] for gpus in ("8", "1024") for stage in "0123"
    ]
    assert all(" fits " in line for line in lines[-8:])
    assert "GFLOP for each token to train" in lines[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"card": "RTX4090-24GB"}, "card RTX4090-24GB is of none of the kinds A100, A800"),
        ({"length": 3000}, "tokens_per_gpu 16384 must be whole sequences of length 3000"),
        ({"efficiency": 2.0}, "efficiency must lie in (0, 1], got 2.0"),
        ({"gpus": (0,)}, "gpus must be above 0"),
    ],
)
def test_what_cannot_be_counted_is_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        ScalingConfig(**settings)  # pyright: ignore[reportArgumentType]

    assert str(error.value).startswith(sentence)


def test_help_comes_without_anything_heavy() -> None:
    program = (
        "import sys; from pipeline.budget.scaling import main; main(['--help']);"
        " assert not {'torch', 'transformers'} & set(sys.modules)"
    )

    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout

    assert "--tokens-per-gpu N" in said
