"""Step 2 with tensor parallelism matches one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.budget.machine import Machine
from pipeline.budget.memory import RUNTIME_CPU, step_memory
from pipeline.config import LoraConfig, ParallelConfig
from step2_reward.train import train
from tests.distributed import run_ranks
from tests.families import save_base
from tests.staged import train_sharded
from tests.step2_reward.labeled import make_rows, write_jsonl
from tests.step2_reward.test_pipeline import make_config, read_outcome

run = partial(train_sharded, train)

CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    # Kind of label, model settings, and tolerance of the figures.
    "pairs": ("pairs", {"zero_stage": 3}, 1e-5),
    "classes, adapters": ("classes", {"lora": LoraConfig(rank=2)}, 1e-5),
    "ratings, bf16": ("scalar", {"precision": "bf16", "zero_stage": 1}, 3e-2),
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n == "pairs" else pytest.mark.grid) for n in CASES]
)
def test_two_tensor_parallel_ranks_match_one_process(case: str, tmp_path: Path) -> None:
    kind, model, bound = CASES[case]
    save_base(tmp_path / "base")
    write_jsonl(tmp_path / "rows.jsonl", make_rows(kind))
    single = make_config(tmp_path, tmp_path / "alone", pp=1, model=model)
    together = replace(
        make_config(tmp_path, tmp_path / "together", pp=1, model=model),
        parallel=ParallelConfig(tp=2, micro_batches=3),
    )
    run(single)

    run_ranks(run, together)

    actual, expected = read_outcome(together.output_dir), read_outcome(single.output_dir)
    for line, other in zip(actual["metrics"], expected["metrics"], strict=True):
        assert line == pytest.approx(other, rel=bound, abs=bound)
    assert actual["config"].keys() == expected["config"].keys()
    memory = step_memory(together, machine=Machine(2, 2, None, 2**34, "it"))
    single_memory = step_memory(single, machine=Machine(1, 1, None, 2**34, "it"))
    assert memory.peak("device") - RUNTIME_CPU < single_memory.peak("device") - RUNTIME_CPU
