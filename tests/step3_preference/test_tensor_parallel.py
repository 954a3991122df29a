"""Preference methods on two processes that compute each layer together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pipeline.config import LoraConfig, ParallelConfig
from pipeline.parallel.mesh import cut_mesh
from step3_preference.config import PreferenceConfig
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.step3_preference.test_pipeline import ended
from tests.step3_preference.toy import metrics, toy_config

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"zero_stage": 3}),
    "kto, adapters": ("kto", {"lora": LoraConfig(rank=2)}),
    "dpo, 4 bits": ("dpo", {"lora": LoraConfig(rank=2), "quantize": "nf4"}),
}


def run(config: PreferenceConfig) -> None:
    with cut_mesh(replicas=1, tp=config.parallel.tp, timeout_seconds=60.0):
        train(config)


@pytest.mark.jobs
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n.startswith("dpo") else pytest.mark.grid) for n in CASES]
)
def test_two_processes_learn_what_one_does(case: str, toy: Path, tmp_path: Path) -> None:
    method, model = CASES[case]
    alone = toy_config(toy, method, output_dir=tmp_path / "alone", model=model, eval_prompts=4)
    together = replace(alone, output_dir=tmp_path / "both", parallel=ParallelConfig(tp=2))
    train(alone)

    run_ranks(run, together)

    for line, expected in zip(metrics(together.output_dir), metrics(alone.output_dir), strict=True):
        figures = {name: each for name, each in expected.items() if isinstance(each, float | int)}
        found = {name: line[name] for name in figures}
        assert found == pytest.approx(figures, rel=1e-3, abs=1e-3)
    AutoModelForCausalLM.from_pretrained(together.output_dir / "actor")


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("method", "lora"),
    [
        ("dpo", None),
        pytest.param("kto", None, marks=pytest.mark.grid),
        pytest.param("dpo", LoraConfig(rank=2, dropout=0.3), marks=pytest.mark.grid),
        pytest.param("ipo", LoraConfig(rank=2, variant="olora"), marks=pytest.mark.grid),
    ],
)
def test_with_invariant_arithmetic_one_process_and_two_end_in_the_same_bits(
    method: str, lora: LoraConfig | None, toy: Path, tmp_path: Path
) -> None:
    for tp in (1, 2):
        parallel = ParallelConfig(tp=tp, arithmetic="invariant:2")
        config = toy_config(toy, method, output_dir=tmp_path / str(tp), eval_prompts=4)
        config = replace(config, model=replace(config.model, lora=lora))
        run_ranks(run, replace(config, parallel=parallel), world_size=tp)

    alone, together = (ended(tmp_path / str(tp)) for tp in (1, 2))
    assert together == alone
