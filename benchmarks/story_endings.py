"""Real text: RL on a rule about how stories end, for a small pretrained model of stories.

python -m benchmarks.story_endings --model STORIES260K --out DIR [--seeds 1 2 3]

Makes rows (`benchmarks.story_rows`), then runs the commands of docs/rewards.md: step 1; pairs of
responses by the rule (`benchmarks.story_rule`); and for each seed GRPO with the rule as its reward
function, and PPO with a reward model of the pairs, which never sees the rule. What DIR already
holds is kept, so that a command that was cut off goes on where it stopped.

The table has, by model, the share of sampled responses to held-out prompts that keep the rule; the
perplexity of the responses under the model as it was pretrained, which tells stories from words
that merely please; and how many of them end in different sentences. Responses follow, to be read.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.ppo_robustness import processor
from benchmarks.story_rows import borders
from benchmarks.story_rule import keeps_rule, sentences_of
from inference.generation import generate
from pipeline.data.examples import Message
from pipeline.data.resolve_format import resolve_format
from pipeline.models.chat import decode_response
from pipeline.models.load import load_for_inference
from pipeline.report.intervals import share_interval

ROOT = Path(__file__).parent.parent
RULE = "benchmarks/story_rule.py:ends_well"
METHODS = ("grpo", "ppo")
MAX_NEW_TOKENS = 96
PROMPTS_OF_PAIRS = {"train": 700, "test": 150}
SHOWN = 3
"""Prompts whose responses are printed."""


@dataclass(frozen=True)
class Sampled:
    """A response to a held-out prompt."""

    text: str
    stopped: bool

    @property
    def keeps_rule(self) -> bool:
        """As the reward function has it."""
        return self.stopped and keeps_rule(self.text)


def main(argv: Sequence[str]) -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description="RL on a rule about how stories end.")
    parser.add_argument("--model", type=Path, required=True, help="a causal LM of short stories")
    parser.add_argument("--out", type=Path, required=True, help="where rows and runs go, and stay")
    parser.add_argument("--stories", type=int, default=2400, help="to sample")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args(argv)
    out, model = args.out.absolute(), args.model.absolute()
    if not (out / "rows" / "train.jsonl").is_file():
        run("-m", "benchmarks.story_rows", "--model", model, "--output", out / "rows",
            "--stories", args.stories)  # fmt: skip
    for seed in args.seeds:
        train(model, out, seed, "--step", 1)
        make_pairs(out, seed)
        train(model, out, seed, "--step", 2, 3, "--reward.data.path", out / f"pairs{seed}")
    print(f"{processor()}, Python {platform.python_version()}\n")
    print(report(model, out, args.seeds))


def train(model: Path, out: Path, seed: int, *options: object) -> None:
    """Steps of a seed's run; one that is finished stays as it is."""
    run("train.py", "--config", "stories.yaml", "--method", *METHODS, "--actor-model", model,
        "--data-path", out / "rows", "--format", "benchmarks/story.jinja", "--seed", seed,
        "--output-dir", out / f"seed{seed}", *options, "--resume")  # fmt: skip


def make_pairs(out: Path, seed: int) -> None:
    """Of each prompt two responses of step 1's model, one that keeps the rule and one that not."""
    for name, limit in PROMPTS_OF_PAIRS.items():
        pairs = out / f"pairs{seed}" / f"{name}.jsonl"
        if not pairs.is_file():
            run("-m", "rewards.select", "--path", out / f"seed{seed}" / "step1_sft",
                "--prompts", out / "rows" / f"{name}.jsonl", "--limit", limit,
                "--reward-function", RULE, "--write", "pairs", "--best-of", 8,
                "--max-new-tokens", MAX_NEW_TOKENS, "--batch-size", 128,
                "--output", pairs)  # fmt: skip


def run(*words: object) -> None:
    """Run a command of the project, which is printed first."""
    command = [str(word) for word in words]
    print("python", *command, flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)


def report(model: Path, out: Path, seeds: Sequence[int]) -> str:
    """The table, and responses of the models of the first seed below it."""
    lines = (out / "rows" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    prompts = [str(row["prompt"]) for row in rows]
    base, tokenizer = load_for_inference(model, precision="fp32")
    written = {"demonstrations": [Sampled(str(row["response"]), True) for row in rows]}
    figures: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        run_of_seed = out / f"seed{seed}"
        written[f"step 1, seed {seed}"] = respond(run_of_seed / "step1_sft", prompts)
        steps = json.loads((run_of_seed / "summary.json").read_text(encoding="utf-8"))["steps"]
        for method in METHODS:
            name = f"{method}, seed {seed}"
            figures[name] = steps[f"step3_{method}"]
            written[name] = respond(run_of_seed / f"step3_{method}" / "actor", prompts)
    columns = ("model", "keep the rule", "95 % interval", "perplexity", "tokens", "last sentences")
    columns += ("KL per response", "seconds")
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, responses in written.items():
        cells = [name, *describe(base, tokenizer, prompts, responses)]
        step = figures.get(name)
        cells += [f"{step['eval']['kl']:.2f}", f"{step['seconds']:.0f}"] if step else ["", ""]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join([*table, "", *reward_models(out, seeds), *samples(prompts, written, seeds[0])])


def reward_models(out: Path, seeds: Sequence[int]) -> list[str]:
    """How many held-out pairs of the rule each reward model has in order."""
    lines = []
    for seed in seeds:
        result = out / f"seed{seed}" / "step2_reward" / "result.json"
        figures = json.loads(result.read_text(encoding="utf-8"))["eval"]
        accuracy = f"{figures['accuracy_after']:.1%} of {figures['pairs']}"
        lines.append(f"reward model, seed {seed}: {accuracy} held-out pairs in order")
    return lines


def respond(path: Path, prompts: Sequence[str]) -> list[Sampled]:
    """A response to each prompt, sampled as in training."""
    model, tokenizer = load_for_inference(path, precision="fp32")
    chat = resolve_format(tokenizer, "auto")
    responses = generate(
        model,
        [chat.encode_prompt([Message("user", prompt)]) for prompt in prompts],
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
        stop_ids=chat.stop_ids,
        seed=0,
        batch_size=128,
    )
    return [Sampled(decode_response(tokenizer, each.ids), each.stopped) for each in responses]


def describe(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    responses: Sequence[Sampled],
) -> list[str]:
    """Of responses: how many keep the rule, the base's perplexity, length, different ends."""
    count, kept = len(responses), sum(each.keeps_rule for each in responses)
    low, high = share_interval(kept, count)
    nll, tokens = surprise(base, tokenizer, prompts, responses)
    ends = {(sentences_of(each.text) or [""])[-1].strip() for each in responses}
    return [
        f"{kept / count:.1%} of {count}",
        f"{low:.1%} to {high:.1%}",
        f"{math.exp(nll / tokens):.2f}",
        f"{tokens / count:.0f}",
        f"{len(ends) / count:.0%} different",
    ]


@torch.no_grad()
def surprise(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    responses: Sequence[Sampled],
) -> tuple[float, int]:
    """Nats of all responses as texts that go on from their prompts, and their tokens.

    The end is not counted: the pretrained model has never ended a text where these do.
    """
    begin, _ = borders(tokenizer)
    nats, tokens = 0.0, 0
    for prompt, each in zip(prompts, responses, strict=True):
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        whole = tokenizer(f"{prompt} {each.text}", add_special_tokens=False)["input_ids"]
        logits = base(input_ids=torch.tensor([[begin, *whole]])).logits[0, start:-1]
        targets = torch.tensor(whole[start:])
        nats += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        tokens += len(targets)
    return nats, tokens


def samples(prompts: Sequence[str], written: dict[str, list[Sampled]], seed: int) -> list[str]:
    """Responses of the models before and after, to the first prompts."""
    names = [f"step 1, seed {seed}", *(f"{method}, seed {seed}" for method in METHODS)]
    lines = []
    for place, prompt in enumerate(prompts[:SHOWN]):
        lines.append(f"\n{prompt}")
        lines += [f"  {name}: {written[name][place].text}" for name in names]
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
