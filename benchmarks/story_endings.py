"""Real text: RL on a rule about how stories end, for a small pretrained model of stories.

python -m benchmarks.story_endings --model STORIES260K --out DIR [--method grpo] [--seed 1]

The model writes stories. Those that end become rows: the last sentence is the demonstration,
all before it the prompt, so that step 1 learns no more than the chat format. Step 3 then asks for
endings, and a program rewards those that name a friend in the last sentence. `--method grpo` has
the program as reward function; `--method ppo` trains a reward model on pairs that the program made,
two endings of the same story of which one keeps the rule, and the program only measures (`gold`).

The table has the share of sampled endings to held-out stories that keep the rule, before and after,
the KL divergence from step 1, and the times; endings follow, to be read.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ppo_robustness import processor
from inference.generation import generate
from pipeline.models.chat import decode_response
from pipeline.models.load import load_for_inference

ROOT = Path(__file__).parent.parent
BEGIN_ID, END_IDS = 1, (1, 2)
"""Of stories260K, which ends a story by the beginning of the next."""

MAX_NEW_TOKENS = 56
TRIES = 8
"""Endings of a story among which a pair is looked for."""

SHOWN = 4
"""Endings that are printed."""

RULE = '''"""The rule: the last sentence names a friend."""

from benchmarks.story_endings import names_a_friend


def friend(episodes):
    """1 for a response that ended by itself and keeps the rule, else 0."""
    return [float(each.stopped and names_a_friend(each.response)) for each in episodes]
'''
"""A file of the user's, as --reward-function takes it."""


def names_a_friend(ending: str) -> bool:
    """Whether the last sentence has the word."""
    sentences = re.findall(r"[^.!?]+", ending)
    return bool(sentences) and "friend" in sentences[-1].lower()


def of_grpo(rule: Path, pairs: Path) -> list[str]:
    """The rule as reward function, without reward model and critic."""
    del pairs
    options = [
        "--method",
        "grpo",
        "--reward-function",
        f"{rule}:friend",
        "--ppo.aggregate",
        "token",
    ]
    options += ["--ppo.batch_size", "128", "--ppo.max_steps", "40", "--ppo.kl_in", "reward"]
    return [*options, "--ppo.kl_coef", "0.05", "--ppo.actor.optim.lr", "2e-4"]


def of_ppo(rule: Path, pairs: Path) -> list[str]:
    """A reward model of pairs that the rule made; the rule measures."""
    gold = json.dumps({"kind": "function", "path": f"{rule}:friend"})
    options = ["--method", "ppo", "--ppo.gold", gold, "--reward.data.path", str(pairs)]
    options += ["--reward.epochs", "4", "--reward.model.optim.lr", "1e-3"]
    options += ["--ppo.batch_size", "128", "--ppo.max_steps", "40", "--ppo.kl_coef", "0.05"]
    return [*options, "--ppo.actor.optim.lr", "5e-4", "--ppo.critic.optim.lr", "1e-3"]


OPTIONS = {"grpo": of_grpo, "ppo": of_ppo}
COMMON = [
    *("--format", "plain", "--data-split", "4,3,3", "--max-length", "480"),
    *("--sft.epochs", "6", "--sft.model.optim.lr", "5e-4", "--sft.batch_size", "8"),
    *("--ppo.max_prompt_length", "400", "--ppo.max_new_tokens", str(MAX_NEW_TOKENS)),
    *("--ppo.epochs", "100", "--ppo.micro_batch_size", "32"),
]


def main(argv: Sequence[str]) -> None:
    """Make the rows, train, and print the table."""
    parser = argparse.ArgumentParser(description="RL on a rule about how stories end.")
    parser.add_argument("--model", type=Path, required=True, help="directory of stories260K")
    parser.add_argument("--out", type=Path, required=True, help="where rows and runs go, and stay")
    parser.add_argument("--method", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--stories", type=int, default=3000, help="to sample")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    rows, rule = args.out / "rows", args.out / "rule.py"
    if not rows.is_dir():
        make_rows(args.model, rows, rule, count=args.stories)
    run = args.out / f"{args.method}-seed{args.seed}"
    pairs = args.out / "pairs"
    if args.method == "ppo" and not pairs.is_dir():
        make_pairs(args.model, rows, pairs)
    began = time.monotonic()
    train(args.model, run, rows, [*OPTIONS[args.method](rule, pairs), "--seed", str(args.seed)])
    seconds = time.monotonic() - began
    print(f"{processor()}, Python {platform.python_version()}\n")
    print(table(args.method, args.seed, run, seconds))


def make_rows(model_path: Path, rows: Path, rule: Path, *, count: int) -> None:
    """Stories of the model as prompts and endings, some held out; pairs where the rule parts two.

    Every story is written three times from where its ending begins: the first is the demonstration.
    """
    model, tokenizer = load_for_inference(model_path, precision="fp32")
    stories = generate(
        model,
        [[BEGIN_ID]] * count,
        keys=range(count),
        max_new_tokens=384,
        temperature=0.8,
        stop_ids=END_IDS,
        seed=0,
        batch_size=128,
    )
    texts = [decode_response(tokenizer, each.ids) for each in stories]
    parts = [split(text) for text, each in zip(texts, stories, strict=True) if each.stopped]
    cut = [part for part in parts if part is not None]
    held_out = len(cut) // 5
    rows.mkdir(parents=True)
    rule.write_text(RULE)
    for name, chosen in (("test", cut[:held_out]), ("train", cut[held_out:])):
        lines = [json.dumps({"prompt": prompt, "response": ending}) for prompt, ending in chosen]
        (rows / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{len(cut)} of {count} stories ended; {held_out} are held out")


def split(story: str) -> tuple[str, str] | None:
    """All but the last sentence, and that; None of a story too short for that."""
    sentences = re.findall(r"[^.!?]*[.!?]+\"?", " ".join(story.split()))
    if len(sentences) < 6:
        return None
    return "".join(sentences[:-1]).strip(), sentences[-1].strip()


def make_pairs(model_path: Path, rows: Path, pairs: Path) -> None:
    """Of each story two endings of the model, one that keeps the rule and one that does not."""
    model, tokenizer = load_for_inference(model_path, precision="fp32")
    pairs.mkdir(parents=True)
    for name in ("train", "test"):
        prompts = [
            json.loads(line)["prompt"] for line in (rows / f"{name}.jsonl").read_text().splitlines()
        ]
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        endings = generate(
            model,
            [each for each in ids for _ in range(TRIES)],
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=1.0,
            stop_ids=END_IDS,
            seed=1,
            batch_size=128,
        )
        lines = []
        for place, prompt in enumerate(prompts):
            own = endings[place * TRIES : (place + 1) * TRIES]
            texts = [decode_response(tokenizer, each.ids) for each in own]
            kept = [names_a_friend(text) for text in texts]
            if any(kept) and not all(kept):
                chosen, rejected = texts[kept.index(True)], texts[kept.index(False)]
                pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                lines.append(json.dumps(pair))
        (pairs / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{len(lines)} pairs of {len(prompts)} stories in {name}.jsonl")


def train(model: Path, run: Path, rows: Path, options: Sequence[str]) -> None:
    """All steps that the method needs; a run that is finished stays as it is."""
    command = [sys.executable, "train.py", "--actor-model", str(model), "--data-path", str(rows)]
    command += [*COMMON, *options, "--output-dir", str(run), "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def table(method: str, seed: int, run: Path, seconds: float) -> str:
    """The figures of a run as a line of a table, and some endings below it."""
    step = run / "step3_ppo"
    figures = json.loads((step / "result.json").read_text())["eval"]
    rows = json.loads((step / "samples.json").read_text())["rows"]
    kept = {model: share_kept(rows, model) for model in ("step1_sft", "step3_ppo")}
    columns = ("method", "seed", "before", "after", "KL per response", "stop rate", "seconds")
    cells = (
        *(method, str(seed), f"{kept['step1_sft']:.1%}", f"{kept['step3_ppo']:.1%}"),
        *(f"{figures['kl']:.2f}", f"{figures['sampled_stop_rate']:.1%}", f"{seconds:.0f}"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", f"| {' | '.join(cells)} |"]
    for row in rows[:SHOWN]:
        lines.append(f"\n... {row['prompt'][-1]['content'][-160:]}")
        lines += [f"  {model}: {row['answers'][model]['text']}" for model in kept]
    return "\n".join(lines)


def share_kept(rows: Sequence[Any], model: str) -> float:
    """Of sampled endings that ended by themselves and keep the rule, over all."""
    answers = [row["answers"][model] for row in rows]
    return sum(each["stopped"] and names_a_friend(each["text"]) for each in answers) / len(answers)


if __name__ == "__main__":
    main(sys.argv[1:])
