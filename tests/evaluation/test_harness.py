"""Our model under EleutherAI's harness, against the harness's own; runs where lm_eval is."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import tiny_causal_lm
from tests.pipeline.data.tokenizers import byte_level

ROOT = Path(__file__).parent.parent.parent

TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""


def test_without_the_package_one_sentence_says_so() -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm_eval is here")
    done = subprocess.run(
        [sys.executable, "-m", "evaluation.harness", "run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stderr == (
        'error: the package lm_eval is missing: pip install "rlhf-pipeline[harness]"\n'
    )
    assert done.returncode == 2


@pytest.mark.filterwarnings("ignore")
def test_a_local_task_has_the_log_likelihoods_of_the_harness_itself(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from evaluation.harness.model import HarnessModel

    tokenizer = byte_level(bos=True)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    tiny_causal_lm("llama", **sizes).save_pretrained(tmp_path / "model")
    rows = [
        {"question": f"{n} and {n} ", "choices": [str(2 * n), "so", "how are you"], "right": n % 3}
        for n in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "choices.yaml").write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))

    path = str(tmp_path / "model")
    models = (HarnessModel(path), HFLM(pretrained=path, device="cpu", dtype="float32"))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    ours, theirs = (
        [
            [float(response[0]) for response in sample["filtered_resps"]]
            for sample in simple_evaluate(
                model, tasks=["choices"], task_manager=manager, bootstrap_iters=0
            )["samples"]["choices"]
        ]
        for model in models
    )

    assert len(ours) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
