"""Wrong input of `train.py` prints one or two sentences and exits with code 2."""

import contextlib
import io
import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

import train
from pipeline.cli.options import run_main

ENVIRONMENTS = """
class Game:
    def reset(self, row, *, seed): ...
    def step(self, answer): ...
    def reward(self): ...

class Stepless:
    def reset(self, row, *, seed): ...
    def reward(self): ...

class Rewardless:
    def reset(self, row, *, seed): ...
    def step(self, answer): ...
"""


FILES: dict[str, str | bytes] = {
    "good.jsonl": "".join(
        json.dumps({"prompt": f"question {row}", "chosen": "a", "rejected": "b"}) + "\n"
        for row in range(60)
    ),
    "latin.jsonl": '{"prompt": "caf\xe9", "chosen": "a"}\n'.encode("latin-1"),
    "empty.jsonl": "",
    "braces.jsonl": "{}\n{}\n",
    "broken.jsonl": '{"prompt": "a"\n',
    "list.jsonl": "[1, 2]\n",
    "numbers.jsonl": '{"prompt": 3, "chosen": 4}\n',
    "one_prompt.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 30,
    "cut.parquet": "PAR1",
    "lfs.parquet": "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n",
    "bad.csv": 'prompt,chosen\n"a,b\n',
    "twice.csv": "prompt,prompt\na,b\n",
    "tie.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c", "tie": "maybe"}\n',
    "latin.jinja": b"{# caf\xe9 #}",
    "null.jinja": "{{- messages[0].role -}}",
    "bracket.yaml": "ppo: [1\n",
    "twice.yaml": "ppo:\n  kl_coef: 1\n  kl_coef: 2\n",
    "type.yaml": "sft:\n  batch_size: many\n",
    "unknown.yaml": "sft:\n  bach_size: 3\n",
    "latin.yaml": b"x: caf\xe9\n",
    "broken.json": "{",
    "stage7.json": '{"zero_optimization": {"stage": 7}}',
    "uneven.json": '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2,'
    ' "gradient_accumulation_steps": 2}',
    "game.py": ENVIRONMENTS,
    "score.py": "def check(episodes):\n    return [0.0]\n\ndef odd(x):\n    return x\n",
    "bad_hosts": "a slots=x\n",
}

# A command line, then parts of the required message: what is wrong and how to fix it.
CASES = r"""
nonsense | 'nonsense' | options start with --
--nonsense | --nonsense | --help lists
--step 4 | --step | one of 0, 1, 2, 3
--step 0 | pretrain.data.path | pass a token file
--step 3 | step 3 needs the model of step 1 | create it with `python train.py --step 1
--actor-model ./none | --actor-model: no such model | none does not exist
--actor-model ./good.jsonl | --actor-model: good.jsonl is a file | a directory with config.json
--actor-model empty_directory | --actor-model: empty_directory | config.json
--actor-model 1.4b | --actor-model 1.4b | 1.3b, 2.7b
--actor-model ~unknown/model | home directory | use the full path
--data-path latin.jsonl | latin.jsonl | save it as UTF-8
--data-path empty.jsonl | empty.jsonl | has no rows
--data-path braces.jsonl | braces.jsonl line 1 | the row is empty; remove it
--data-path broken.jsonl | broken.jsonl line 1 | fix or remove the line
--data-path list.jsonl | list.jsonl | named fields
--data-path numbers.jsonl | prompt must be text | fix the row
--data-path one_prompt.jsonl | share one prompt | add more rows
--data-path cut.parquet | cut.parquet | not a readable Parquet file
--data-path lfs.parquet | lfs.parquet is a Git LFS pointer | git lfs pull
--data-path bad.csv | bad.csv line 2 | fix it
--data-path twice.csv | twice.csv line 1 | a unique name
--data-path tie.jsonl | tie.jsonl line 1 | true or false, got 'maybe'
--data-path empty_directory | empty_directory contains no | .jsonl
--data-path good.jsonl:0 | good.jsonl:0 | positive
--data-path good.jsonl --eval-path embedded | embedded | use either it or your own paths
--data-path embedded good.jsonl | embedded | use either it or your own paths
--data-split 1,2 | --data-split | 3
--data-path good.jsonl --data-split 1,0,0 | leaves step 2 without rows | raise the step's share
--fields prompt=nothing --data-path good.jsonl | column nothing | chosen, prompt, rejected
--fields nothing=prompt --data-path good.jsonl | nothing is unknown | chosen
--format nothing --data-path good.jsonl | --format nothing | chatml
--format latin.jinja --step 1 | --format latin.jinja | save it as UTF-8
--format null.jinja --step 1 | null.jinja | choose another --format
--format tokenizer --step 1 | the tokenizer has no chat template | a Jinja file
--step 1 --sft.data.template_args '{"messages": 1}' | template_args messages | reserved or invalid
--step 1 --sft.data.template_args '{"nothing": 1}' | template_args nothing | check its spelling
--max-length ten | --max-length | integer
--config none.yaml | none.yaml | no such file
--config bracket.yaml | bracket.yaml | not valid YAML at line 2
--config twice.yaml | has kl_coef twice | keep one of them
--config type.yaml | sft.batch_size in type.yaml | integer
--config unknown.yaml | sft.bach_size in unknown.yaml | did you mean sft.batch_size
--config latin.yaml | latin.yaml | save the file as UTF-8
--zero-config none.json | none.json | no such DeepSpeed
--zero-config broken.json | broken.json | line 1
--zero-config stage7.json | sft.model.zero_stage in stage7.json | one of 0, 1, 2, 3
--zero-config uneven.json | train_batch_size in uneven.json is 7 | choose sizes that agree
--sft.epochs -1 | sft.epochs | positive
--batch-size 1.5 | --batch-size | integer
--resume --overwrite | --resume | choose one
--save-every never | never | 15m
--plan-for 8xTOASTER | 8xTOASTER | 8xA100-80GB
--num-processes 1000 --deployment-type single_node | 1000 data-parallel | start fewer processes
--deployment-type cloud | --deployment-type | 'single_gpu', 'single_node', 'multi_node', 'ray'
--deployment-type multi_node --hostfile bad_hosts | bad_hosts:1 | worker-0 slots=8
--output-dir good.jsonl | --output-dir good.jsonl | not a directory
--step 1 --ppo.gamma 2 | ppo.gamma | [0, 1]
--sft.model.optim.schedule cosin | cosin | did you mean cosine
--sft.model.zero.offload.optimizer nvme | offload.optimizer nvme | offload.nvme_path
--ppo.critic.path null | ppo.critic.path | must be a model, got null
--sft.output_dir here | sft.output_dir | use --output-dir
--reward mth | --reward mth | did you mean math
--reward math --data-path good.jsonl | column answer | chosen, prompt, rejected
--reward regex:( | rewards.regex.pattern | not a regular expression
--reward-function none.py:check | no such file: none.py | rewards.check.path
--reward-function score.py:odd | that no reward function interface defines | odd(episodes)
--reward verifier --ppo.score_clip 3 | ppo.score_clip | reward model's score
--guards strict --save-every null | ppo.guards | set save_every to a number
--ppo.guards '[{"signal":"lenght","limit":2}]' | ppo.guards.signal | 'response_length'
--ppo.guards '[{"signal":"kl"}]' | ppo.guards | lacks its limit
--ppo.guards '[{"signal":"dead_groups","limit":0.5}]' | dead_groups | ppo.group_size
--environment none.py:Game | no such file: none.py | ppo.environment
--environment game.py:Gaem | has no `class Gaem` | did you mean Game
--environment game.py:Stepless | is not an environment | public methods with docstrings
--environment game.py:Rewardless | lacks reward | reset(self, row, *, seed)
--environment calculator --ppo.inference_tp_size 2 | ppo.environment | inference_tp_size at 1
"""


def run_with_wrong_input(argv: Sequence[str]) -> tuple[object, str]:
    """Run `train.py`; return its exit code and standard error."""
    stderr = io.StringIO()
    with (
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(SystemExit) as exit_info,
    ):
        run_main(train.main, argv)
    return exit_info.value.code, stderr.getvalue()


def test_wrong_input_is_named_with_its_fix_and_creates_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The initial level of train.py; other tests may have changed it.
    caplog.set_level(logging.WARNING, logger="pipeline")
    (tmp_path / "empty_directory").mkdir()
    for name, content in FILES.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    rows = [[part.strip() for part in row.split(" | ")] for row in CASES.strip().splitlines()]

    failures: list[str] = []
    for command, *required in rows:
        args = shlex.split(command)
        if "--output-dir" not in args:
            args += ["--output-dir", "out"]
        code, message = run_with_wrong_input(args)
        missing = [part for part in required if part not in message]
        if code != 2 or missing or len(message.splitlines()) > 3 or "Traceback" in message:
            failures.append(f"{command}: exit {code}, without {missing}: {message}")

    assert len(rows) > 60
    assert failures == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert not (tmp_path / "out").exists()
