"""Step 0 with the other steps: initial models, plans, rejected settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.options import write_config
from pipeline.data.store.pack import pack
from pipeline.data.store.token_file import read_vocabulary
from pipeline.demo.model import build_tokenizer
from pipeline.plan.plan import Plan
from pipeline.report.findings import findings
from pipeline.report.results import find_chat_model, read_results
from pipeline.run.orchestrator import main
from pipeline.system.errors import UserError
from tests.pipeline.data.store.corpus import write_rows
from tests.pipeline.plan.test_checks import plan as plan_run
from train import STAGES

SHORT = [
    *("--plan", "off", "--pretrain.max_steps", "2", "--pretrain.batch_size", "4"),
    *("--pretrain.data.max_length", "64", "--pretrain.data.max_eval_rows", "4"),
    *("--sft.max_steps", "2", "--sft.batch_size", "8", "--sft.data.max_eval_rows", "8"),
]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A token file, next to the texts in texts.jsonl."""
    write_rows(
        tmp_path / "texts.jsonl", [f"{n} and {n + 1} are {2 * n + 1}. " * 20 for n in range(40)]
    )
    out = tmp_path / "texts"
    pack([tmp_path / "texts.jsonl"], read_vocabulary(build_tokenizer(), "embedded"), out)
    return out


def get_path(plan: Plan, name: str) -> str:
    config: Any = plan.configs[name]
    return config.model.path


@pytest.mark.faults
def test_step1_starts_from_step0_and_both_are_reported(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    corpus = ("--pretrain.data.path", str(texts))

    main(["--step", "0", "1", "--output-dir", str(out), *corpus, *SHORT], STAGES)

    summary = json.loads((out / "summary.json").read_text())["steps"]
    assert list(summary) == ["step0_pretrain", "step1_sft"]
    assert (out / "step0_pretrain" / "config.json").is_file()
    assert str(out / "step0_pretrain") in (out / "step1_sft" / "config.yaml").read_text()
    results = read_results(out)
    sentences = " ".join(finding.text for finding in findings(results))
    assert "tokens of held-out texts" in sentences
    assert "8 held-out answers" in sentences
    model = find_chat_model(results.steps)
    assert model is not None
    assert model.name == "step1_sft"
    assert "Continued pre-training" in (out / "report.html").read_text()


def test_step1_plan_uses_the_model_of_step0_if_it_runs_or_has_run(
    texts: Path, tmp_path: Path
) -> None:
    options = ("--actor-model", "some/model", "--data-path", f"{texts}.jsonl")
    corpus = ("--pretrain.data.path", str(texts))

    both = plan_run(tmp_path / "both", "--step", "0", "1", *options, *corpus)
    without_step0 = plan_run(tmp_path / "alone", "--step", "1", *options)

    directory = tmp_path / "both" / "step0_pretrain"
    assert get_path(both, "step0_pretrain") == "some/model"
    assert get_path(both, "step1_sft") == str(directory)
    assert get_path(without_step0, "step1_sft") == "some/model"
    assert "step0_pretrain" not in without_step0.configs
    directory.mkdir(parents=True)
    write_config(both.configs["step0_pretrain"], directory / "config.yaml")
    for name in ("result.json", "config.json"):
        (directory / name).write_text("{}")
    later = plan_run(tmp_path / "both", "--step", "1", *options)
    assert get_path(later, "step1_sft") == str(directory)


def test_plan_rejects_invalid_step0_settings(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    step0 = ("--step", "0", "--data-path", str(texts))
    for options, message in (
        (["--step", "0"], "pretrain.data.path is empty; pass a token file"),
        (["--step", "0", "--data-path", str(tmp_path)], "is a directory; list its files"),
        (["--step", "0", "--data-path", "c.tokens"], "pretrain.data.path c.tokens: no such"),
        (["--step", "0", "--data-path", f"{texts}.jsonl"], "is not a token file"),
        (["--step", "1", "--pretrain.seed", "1"], "--pretrain.seed is a setting of step 0, which"),
        ([*step0, "--pretrain.data.format", "plain"], "there is no setting pretrain.data.format"),
        ([*step0, "--pretrain.warm_start", str(tmp_path)], "pretrain.warm_start .* no checkpoints"),
    ):
        with pytest.raises(UserError, match=message):
            plan_run(out, *options)
    main(["--output-dir", str(out), *step0, "--dry-run"], STAGES)
    assert not out.exists()
