"""Preference methods with tensor parallelism match one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pipeline.config import LoraConfig, ParallelConfig
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.staged import train_sharded
from tests.step3_preference.toy import toy_config
from tests.test_resume import read_metrics

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"zero_stage": 3}),
    "kto, adapters": ("kto", {"lora": LoraConfig(rank=2)}),
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n.startswith("dpo") else pytest.mark.grid) for n in CASES]
)
def test_two_tensor_parallel_ranks_match_one_process(case: str, toy: Path, tmp_path: Path) -> None:
    method, model = CASES[case]
    alone = toy_config(toy, method, output_dir=tmp_path / "alone", model=model, eval_prompts=4)
    together = replace(alone, output_dir=tmp_path / "both", parallel=ParallelConfig(tp=2))
    train(alone)

    run_ranks(train_sharded, train, together)

    for line, expected in zip(
        read_metrics(together.output_dir), read_metrics(alone.output_dir), strict=True
    ):
        figures = {name: v for name, v in expected.items() if isinstance(v, float | int)}
        actual = {name: line[name] for name in figures}
        assert actual == pytest.approx(figures, rel=1e-3, abs=1e-3)
    AutoModelForCausalLM.from_pretrained(together.output_dir / "actor")
