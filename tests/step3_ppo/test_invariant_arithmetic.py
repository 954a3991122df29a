"""Step 3 with `parallel.arithmetic invariant:2` on one process, and on two that share layers."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import LoraConfig, ParallelConfig
from pipeline.errors import ConfigError
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from tests.distributed import run_ranks
from tests.step3_ppo.test_tensor_parallel import logged, run, small
from tests.step3_ppo.toy import save_models

CASES: dict[str, dict[str, Any]] = {
    "ppo": {"critic": {"zero_stage": 2}},
    "ppo, bf16, recomputation": {
        "actor": {"precision": "bf16", "gradient_checkpointing": True, "zero_stage": 3},
        "critic": {"precision": "bf16"},
    },
    "ppo, adapters": {
        "actor": {"zero_stage": 3, "lora": LoraConfig(rank=2, variant="dora")},
        "critic": {"lora": LoraConfig(rank=2, variant="pissa")},
    },
    "grpo": {
        "method": "grpo",
        "group_size": 2,
        "rewards": (RewardConfig(name="short", kind="length", max_tokens=3),),
    },
}


def weights(out: Path) -> dict[str, str]:
    """Hashes of the files of weights."""
    return {
        str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(out.rglob("*.safetensors"))
        if "checkpoints" not in file.parts
    }


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n == "ppo" else pytest.mark.grid) for n in CASES]
)
def test_one_process_and_two_end_in_the_same_bits(case: str, tmp_path: Path) -> None:
    save_models(tmp_path)
    outs = tmp_path / "1", tmp_path / "2"
    for tp, out in enumerate(outs, start=1):
        parallel = ParallelConfig(tp=tp, arithmetic="invariant:2")
        config = small(tmp_path, {**CASES[case], "parallel": parallel, "output_dir": out})
        run_ranks(run, config, world_size=tp)

    assert weights(outs[1]) == weights(outs[0])
    assert logged(outs[1]) == logged(outs[0])
    assert len(logged(outs[0])) >= 4


def test_processes_that_generate_together_divide_the_parts() -> None:
    with pytest.raises(
        ConfigError, match=r"inference_tp_size 4 doesn't divide the 2 parts of .* take 1"
    ):
        PPOConfig(parallel=ParallelConfig(arithmetic="invariant:2"), inference_tp_size=4)
