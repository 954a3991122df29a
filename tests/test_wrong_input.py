"""A hundred wrong inputs of `train.py`: each is answered in a sentence or two, with exit code 2."""

import contextlib
import io
import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

import train
from pipeline.cli import run_main

GAMES = """
class Game:
    def reset(self, row, *, seed): ...
    def step(self, answer): ...
    def reward(self): ...

class Deaf:
    def reset(self, row, *, seed): ...
    def reward(self): ...

class Unpaid:
    def reset(self, row, *, seed): ...
    def step(self, answer): ...

class Seedless(Game):
    def reset(self, row): ...

class Silent:
    def reset(self, **row): ...
    def call(self, a: int): ...

class Bare:
    def reset(self, **row): ...
    def call(self, a):
        '''Call.'''

class Worthless:
    def reset(self, **row): ...
    def call(self, a: int):
        '''Call.'''
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
    "spaces.jsonl": '{"prompt": "  ", "chosen": "a", "rejected": "b"}\n' * 3,
    "words.jsonl": "hello\n",
    "numbers.jsonl": '{"prompt": 3, "chosen": 4}\n',
    "one_prompt.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 30,
    "not_gzip.jsonl.gz": "x",
    "cut.parquet": "PAR1",
    "bad.csv": 'prompt,chosen\n"a,b\n',
    "tab.yaml": "ppo:\n\tkl_coef: 1\n",
    "bracket.yaml": "ppo: [1\n",
    "twice.yaml": "ppo:\n  kl_coef: 1\n  kl_coef: 2\n",
    "type.yaml": "sft:\n  batch_size: many\n",
    "unknown.yaml": "sft:\n  bach_size: 3\n",
    "list.yaml": "- 1\n",
    "step4.yaml": "step: 4\n",
    "latin.yaml": b"x: caf\xe9\n",
    "broken.json": "{",
    "stage7.json": '{"zero_optimization": {"stage": 7}}',
    "uneven.json": '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}',
    "game.py": GAMES,
    "score.py": "def check(episodes):\n    return [0.0]\n\ndef odd(x):\n    return x\n",
    "words.py": "not a program\n",
    "no_hosts": "",
    "bad_hosts": "a slots=x\n",
}

# The command line, then words that the answer must hold: the thing, and what to do about it.
WRONG = r"""
nonsense | 'nonsense' | options start with --
--nonsense | --nonsense | --help lists
--step 4 | --step | one of 0, 1, 2, 3
--step 0 | pretrain.data.path | give token files
--step two | --step | whole number
--step | --step | at least one value
--step 2 | step 2 needs the model of step 1 | make it with `python train.py --step 1
--step 3 | step 3 needs the model of step 1 | make it with `python train.py --step 1
--actor-model ./none | --actor-model ./none | no such directory
--actor-model good.jsonl | --actor-model good.jsonl | directory
--actor-model empty_directory | --actor-model empty_directory | config.json
--reward-model ./none | --reward-model ./none | no such directory
--actor-model 1.4b | --actor-model 1.4b | 1.3b, 2.7b
--data-path none.jsonl | --data-path none.jsonl | no such file
--data-path latin.jsonl | latin.jsonl | save it as UTF-8
--data-path empty.jsonl | empty.jsonl | holds no rows
--data-path braces.jsonl | braces.jsonl line 1 | the row is empty; remove it
--data-path broken.jsonl | broken.jsonl line 1 | mend or remove the line
--data-path list.jsonl | list.jsonl | named fields
--data-path spaces.jsonl | spaces.jsonl | give more rows
--data-path words.jsonl | words.jsonl line 1 | mend or remove the line
--data-path numbers.jsonl | prompt must be text | mend the row
--data-path one_prompt.jsonl | share one prompt | give more rows
--data-path not_gzip.jsonl.gz | not_gzip.jsonl.gz | Not a gzipped file
--data-path cut.parquet | cut.parquet | not a readable parquet file
--data-path bad.csv | bad.csv line 2 | mend it
--data-path empty_directory | empty_directory | .jsonl
--data-path good.jsonl:0 | good.jsonl:0 | above 0
--data-path good.jsonl:x | good.jsonl:x | no such file
--data-path embedded good.jsonl | embedded | give either it or your own paths
--data-split 1,2 | --data-split | 3
--data-split 1,2,x | --data-split | a number
--data-split -1,2,3 | --data-split | as 2,4,4
--data-split 0,0,0 | --data-split | as 2,4,4
--data-path good.jsonl --data-split 1,0,0 | leaves step 2 without rows | raise the step's share
--data-seed x | --data-seed | whole number
--eval-path none.jsonl | none.jsonl | no such file
--fields prompt | --fields | names to values
--fields prompt=nothing --data-path good.jsonl | column nothing | chosen, prompt, rejected
--format nothing --data-path good.jsonl | --format nothing | chatml
--max-length 0 | --max-length | above 0
--max-length 1 | max_length | above 1
--max-length ten | --max-length | whole number
--seed x | --seed | whole number
--config none.yaml | none.yaml | no such file
--config tab.yaml | tab.yaml | indent with spaces
--config bracket.yaml | bracket.yaml | not closed
--config twice.yaml | ppo.kl_coef stands twice | keep one of them
--config type.yaml | sft.batch_size in type.yaml | whole number
--config unknown.yaml | sft.bach_size in unknown.yaml | did you mean sft.batch_size
--config list.yaml | list.yaml | `name: value`
--config step4.yaml | step in step4.yaml | one of 0, 1, 2, 3
--config latin.yaml | latin.yaml | save the file as UTF-8
--config | --config | needs a file
--zero-config none.json | none.json | no such DeepSpeed
--zero-config broken.json | broken.json | line 1
--zero-config stage7.json | zero_optimization.stage in stage7.json | one of 0, 1, 2, 3
--zero-config uneven.json | train_batch_size 7 | choose a batch size that divides
--actor-zero-stage 4 | --actor-zero-stage | one of 0, 1, 2, 3
--reward-zero-stage x | --reward-zero-stage | whole number
--lr -1 | --lr | above 0
--lr 0 | --lr | above 0
--lr fast | --lr | a number
--batch-size 0 | --batch-size | above 0
--batch-size 1.5 | --batch-size | whole number
--epochs 0 | --epochs | above 0
--lora 0 | --lora | above 0
--lora x | --lora | whole number
--resume --overwrite | --resume | choose one
--check --dry-run | --check | omit --dry-run
--save-every never | never | 15m
--save-every 0 | save_every | 15m
--plan maybe | --plan | 'check', 'auto', 'off'
--plan-for 8xTOASTER | 8xTOASTER | 8xA100-80GB
--num-processes 0 --deployment-type single_node | --num-processes | above 0
--num-processes x --deployment-type single_node | --num-processes | whole number
--num-processes 1000 --deployment-type single_node | 1000 processes | take --num-processes
--deployment-type cloud | --deployment-type | 'single_gpu', 'single_node', 'multi_node'
--deployment-type multi_node | multi_node | --hostfile FILE
--deployment-type multi_node --hostfile none | --hostfile none | no such file
--deployment-type multi_node --hostfile no_hosts | no_hosts | worker-0 slots=8
--deployment-type multi_node --hostfile bad_hosts | bad_hosts:1 | worker-0 slots=8
--threads 0 | --threads | above 0
--autotune run --dry-run | --autotune | omit --dry-run
--output-dir good.jsonl | --output-dir good.jsonl | not a directory
--ppo.kl_coeff 1 | ppo.kl_coeff | did you mean ppo.kl_coef
--ppo.rollout_size 8 | ppo.rollout_size 8 | ppo.batch_size
--ppo.gamma 2 | ppo.gamma | [0, 1]
--ppo.temperature 0 | ppo.temperature | above 0
--ppo.max_new_tokens 0 | ppo.max_new_tokens | above 0
--ppo.max_new_tokens 4000 | ppo.max_new_tokens 4000 | lower one of them
--ppo.kl_coef x | ppo.kl_coef | a number
--ppo.trackers mlflow | ppo.trackers | 'tensorboard', 'wandb'
--sft.model.optim.name Adm | sft.model.optim.name Adm | did you mean Adam
--sft.model.optim.lr -1 | sft.model.optim.lr | above 0
--sft.model.optim.betas 0.9,1.2 | sft.model.optim.betas | [0, 1)
--sft.model.optim.schedule cosin | cosin | did you mean cosine
--sft.model.lora.rank 0 | sft.model.lora.rank | above 0
--sft.model.lora.dropout 2 | sft.model.lora.dropout | [0, 1)
--sft.model.quantize nf4 | sft.model.quantize nf4 | add adapters with lora.rank
--sft.model.quantize int4 | sft.model.quantize | 'nf4', 'int8'
--sft.model.double_quant true | double_quant | belongs to quantize nf4
--sft.model.precision fp8 | sft.model.precision | 'fp32'
--sft.model.zero_stage 5 | sft.model.zero_stage | one of 0, 1, 2, 3
--sft.model.zero.offload.optimizer nvme | offload.optimizer nvme | offload.nvme_path
--sft.data.eval_fraction 2 | sft.data.eval_fraction | between 0 and 1
--sft.data.max_eval_rows 0 | sft.data.max_eval_rows | above 0
--sft.data.template_date tomorrow | sft.data.template_date | 2026-01-31
--sft.data.template_args x | sft.data.template_args | names to values
--sft.output_dir here | sft.output_dir | --output-dir moves it
--sft.keep_last 1 | sft.keep_last | at least 2
--sft.log_every 0 | sft.log_every | above 0
--reward mth | --reward mth | did you mean math
--reward | --reward | at least one value
--reward math --data-path good.jsonl | column answer | chosen, prompt, rejected
--reward length | max_tokens is missing | needs the longest response
--reward regex:( | rewards.regex.pattern | not a regular expression
--reward-function score.py | --reward-function score.py | FILE.py:NAME
--reward-function none.py:check | there is no file none.py | rewards.check.path
--reward-function score.py:chek | has no `def chek` | did you mean check
--reward-function score.py:odd | parameters that no form of reward function has | write (episodes)
--reward-function words.py:check | words.py line 1 | not valid Python
--ppo.rewards math | ppo.rewards | must be a list
--ppo.max_reward_failures 2 | ppo.max_reward_failures | [0, 1]
--ppo.reward_timeout 0 | ppo.reward_timeout | above 0
--reward verifier --ppo.score_clip 3 | ppo.score_clip | reward model's score
--reward verifier --ppo.reward_combine normalize_then_sum | reward_combine | group_size
--ppo.gold.name a --ppo.gold.kind model | ppo.gold | weight 0
--guards strict | ppo.guards: entropy with action rollback | set save_every to a number
--guards strict --save-every null | ppo.guards | set save_every to a number
--guards loud | --guards | 'strict'
--ppo.guards loud | ppo.guards | warn, strict, none, or a list
--ppo.guards '[{"signal":"lenght","limit":2}]' | ppo.guards.signal | 'response_length'
--ppo.guards '[{"signal":"kl"}]' | ppo.guards | lacks its limit
--ppo.guards '[{"signal":"kl","limit":9,"window":0}]' | guards.kl.window | 1 or more
--ppo.guards '[{"signal":"divergence","limit":2,"window":2}]' | guards.divergence.window | 3 or more
--ppo.guards '[{"signal":"divergence","limit":0}]' | guards.divergence.limit | above 0
--ppo.guards '[{"signal":"entropy","limit":1}]' | guards.entropy.limit | upper one
--ppo.guards '[{"signal":"divergence","limit":3}]' | divergence can't be measured | ppo.gold
--ppo.guards '[{"signal":"dead_groups","limit":0.5}]' | dead_groups | ppo.group_size
--ppo.guards '[{"signal":"kl","limit":9,"action":"stop"}]' | kl with action stop | save_every
--method dpo --guards strict | preference.guards: kl_per_token with action rollback | set save_every
--method dpo --preference.guards '[{"signal":"lost","limit":2}]' | preference.guards | 'chosen_nll'
--environment game.py | FILE.py:CLASS | guessing
--environment none.py:Game | there is no file none.py | ppo.environment
--environment score.py:Game | has no `class Game` | ppo.environment
--environment words.py:Game | words.py line 1 | not valid Python
--environment game.py:Gaem | has no `class Gaem` | did you mean Game
--environment game.py:Deaf | is not an environment | public methods with docstrings
--environment game.py:Unpaid | lacks reward | reset(self, row, *, seed)
--environment game.py:Seedless | without `seed` | reset(self, row, *, seed)
--environment game.py:Silent | the tool call without a docstring | begin its name with _
--environment game.py:Bare | arguments without a type (a) | `a: int`
--environment game.py:Worthless | has no reward | --reward-function
--environment guessing --ppo.max_turns 0 | ppo.max_turns | above 0
--environment guessing --ppo.inference_tp_size 2 | ppo.environment | inference_tp_size at 1
--reward environment | source of kind environment | ppo.environment names none
--environment guessing --ppo.gold.name a --ppo.gold.kind environment | ppo.gold | weight 0
--reward.center_coef -1 | reward.center_coef | below 0
"""


def complaint(argv: Sequence[str]) -> tuple[object, str]:
    """The exit code of `train.py` and what it writes to standard error."""
    written = io.StringIO()
    with (
        contextlib.redirect_stderr(written),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(SystemExit) as ended,
    ):
        run_main(train.main, argv)
    return ended.value.code, written.getvalue()


@pytest.mark.jobs
def test_each_is_answered_with_the_thing_and_the_mend_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # As train.py begins; other tests may have left it at what the steps show.
    caplog.set_level(logging.WARNING, logger="pipeline")
    (tmp_path / "empty_directory").mkdir()
    for name, content in FILES.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    rows = [[part.strip() for part in row.split(" | ")] for row in WRONG.strip().splitlines()]

    found: list[str] = []
    for command, *needed in rows:
        words = shlex.split(command)
        if "--output-dir" not in words:
            words += ["--output-dir", "out"]
        code, said = complaint(words)
        missing = [part for part in needed if part not in said]
        if code != 2 or missing or len(said.splitlines()) > 3 or "Traceback" in said:
            found.append(f"{command}: exit {code}, without {missing}: {said}")

    assert len(rows) >= 100
    assert found == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert not (tmp_path / "out").exists()
