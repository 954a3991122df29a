import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engine.estimates import estimate_zero2, estimate_zero3, format_estimates
from pipeline.engine.memory import ADAM_BYTES, main, parse_count
from pipeline.errors import ConfigError, ModelError

ROOT = Path(__file__).parents[3]
INTERNLM2 = (1_889_110_016, 189_530_112)
"""Parameters of InternLM2-1.8B, and of its embedding of 92544 x 2048."""
T0_3B = (2_783_959_040, 65_798_144)
"""Parameters of T0_3B, and of its embedding of 32128 x 2048."""


def test_stage_3_is_estimated_as_deepspeed_does() -> None:
    params, layer = INTERNLM2

    table = format_estimates(estimate_zero3(params, layer), params=params, largest_layer=layer)

    assert table.splitlines() == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 1 GPU per node.",
        "SW: Model with 1889M total params, 189M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "   47.50GB |   0.71GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "   47.50GB |   0.71GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "   42.22GB |   4.22GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "   42.22GB |   4.22GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "    1.06GB |  32.37GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "   10.56GB |  32.37GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]


def test_stage_3_on_two_gpus_is_estimated_as_deepspeed_does() -> None:
    params, layer = T0_3B
    hardware = {"params": params, "gpus": 2}

    table = format_estimates(estimate_zero3(largest_layer=layer, **hardware), **hardware)

    assert table.splitlines()[1:] == [
        "HW: Setup with 1 node, 2 GPUs per node.",
        "SW: Model with 2783M total params.",
        "  per CPU  |  per GPU |   Options",
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "   62.23GB |   2.84GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "   62.23GB |   2.84GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "    0.74GB |  23.58GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "   31.11GB |  23.58GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]


def test_stage_2_is_estimated_as_deepspeed_does() -> None:
    # 2 GPUs on each of 2 machines: host max(4 * 4, 16) * 1.5, GPU 2 and 2 + 18 / 4 bytes a
    # parameter.
    offloaded, resident = estimate_zero2(1000, gpus=2, nodes=2)

    assert (offloaded.cpu, offloaded.gpu) == (24_000, 2_000)
    assert (resident.cpu, resident.gpu) == (12_000, 6_500)
    assert estimate_zero2(1000, gpus=8)[0].cpu == 48_000


def test_more_machines_share_the_host_memory_of_stage_3() -> None:
    zero_init, without = estimate_zero3(1000, 10, gpus=8, nodes=2)[:2]

    assert (zero_init.cpu, zero_init.gpu) == (13_500, 40)
    assert without.cpu == 48_000  # every process of the machine builds the model


def test_seven_billion_parameters_take_112_gigabytes() -> None:
    assert ADAM_BYTES * 7_000_000_000 / 1e9 == 112.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9),
        ("7e9", 7 * 10**9),
        ("1889.1M", 1_889_100_000),
        ("12k", 12_000),
        ("1,024", 1024),
    ],
)
def test_counts_may_be_rounded(text: str, count: int) -> None:
    assert parse_count(text, "params") == count


@pytest.mark.parametrize("text", ["many", "-3M", "0", "", "7T", "1e"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^params must be a number of parameters such as"):
        parse_count(text, "params")


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
    # The root: embedding 3200 and, in a vector of its own, a norm of 32. On 2 GPUs in multiples of
    # 256: 9472, 3328 and 256, together 32000.
    main(["--model", str(tmp_path), "--gpus", "2", "--stage", "3"])

    out = capsys.readouterr().out
    total = 3 * 9280 + 3232
    assert out.startswith(f"{total:,} parameters x 16 bytes")
    assert "SW: Model with 0M total params, 0M largest layer params." in out
    assert "ZeRO stage 2" not in out
    assert "This engine's bytes on each of 2 GPUs with AdamW, without activations" in out
    flat, buffers = 3 * 9472 + 3584, 4 * (3584 + 2 * 9472)
    assert [[cell.strip() for cell in line.split("|")] for line in out.splitlines()[-4:]] == [
        [str(stage), *(f"{size:,}" for size in (*line, sum(line)))]
        for stage, line in enumerate(
            [
                (2 * flat, 2 * flat, 8 * flat, 2 * flat, buffers, 0),
                (2 * flat, flat, 4 * flat, 2 * flat, buffers, 0),
                (2 * flat, flat, 4 * flat, 2 * flat, buffers, 0),
                (flat, flat, 4 * flat, 2 * flat, buffers, 2 * (3584 + 2 * 9472)),
            ]
        )
    ]


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere has no configuration to read"):
        main(["--model", str(tmp_path / "nowhere")])


def test_the_command_prints_both_tables() -> None:
    words = ["--params", "1889.11M", "--largest-layer", "189.53M"]

    done = subprocess.run(
        [sys.executable, "-m", "pipeline.engine.memory", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "47.50GB |   0.71GB" in done.stdout
    assert "42.22GB |   3.52GB | offload_optimizer=cpu" in done.stdout
    assert "= 30.2 GB" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--model or --params must be given"),
        (["--params", "7B", "--model", "x"], "--model or --params must be given"),
        (["--params", "1M", "--largest-layer", "2M"], "--largest-layer must not have more"),
        (["--params", "1M", "--gpus", "0"], "--gpus must be above 0, got 0"),
        (["--params", "1M", "--stage", "4"], "--stage must be one of"),
    ],
)
def test_wrong_options_are_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        main(words)
