"""Benchmark steps 1, 2, DPO and GRPO against TRL's SFT, Reward, DPO and GRPO trainers.

    pip install -e '.[peers]'
    python -m benchmarks.training --data-path train.jsonl.gz [--precisions fp32 bf16] [--rounds 3]
    python -m benchmarks.training --data-path train.jsonl.gz --tasks dpo
    python -m benchmarks.training --data-path train.jsonl.gz --model DIR --threads 1 --tasks grpo

Both sides train the same model, by default a Llama with 15M random parameters, on the same token
ids in batches of equal size, with fused AdamW, without gradient checkpointing or evaluation. Our
side is the step as users run it, which tokenizes during training; TRL gets token ids or, for DPO
and GRPO, text. Both precompute DPO's reference log-probabilities, which is not timed, so a few
hundred pairs suffice. With GRPO, both sides sample 8 responses of up to 64 tokens to each prompt,
rewarded for their fraction of distinct words, without a KL penalty. The sides alternate within one
run, each round in a new process. Reported values are medians over rounds of tokens (without
padding), pairs or responses per second, starting at the fourth step.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TASKS = ("sft", "reward", "dpo", "grpo")

UNITS = {"sft": "tokens", "reward": "pairs", "dpo": "tokens", "grpo": "responses"}

GROUP, RESPONSE = 8, 64
"""Responses per prompt and tokens per response with GRPO."""

WARM_UP = 2
"""Number of steps before timing starts."""


def build_model(directory: Path, data_path: str) -> None:
    """Save the 15M Llama, and a tokenizer trained on the data."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    from benchmarks.llama import VOCABULARY, save_llama
    from pipeline.config import DataConfig
    from pipeline.data.sharing.steps import load_examples

    examples = load_examples(DataConfig(path=(data_path,)), step=2, seed=0).train
    texts = [turn.content for e in examples for turn in (*e.prompt, *e.chosen, *e.rejected)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<s>", "</s>", "<pad>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # noqa: SLF001
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    save_llama(directory)
    tokenizer.save_pretrained(directory)


def distinct_words(responses: Sequence[str]) -> list[float]:
    """Return the fraction of distinct words among the words of each response."""
    return [len(set(words)) / max(len(words), 1) for words in map(str.split, responses)]


def reward_episodes(episodes: Sequence[Any]) -> list[float]:
    """`distinct_words` as a reward source."""
    return distinct_words([episode.response for episode in episodes])


def reward_completions(completions: Sequence[str], **_: object) -> list[float]:
    """`distinct_words` as a TRL reward function."""
    return distinct_words(completions)


def run_ours(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Run the step as users do; return (seconds, tokens) of each optimizer step but the first."""
    from pipeline.config import DataConfig, OptimConfig, TrainedModelConfig

    split = {"sft": (1, 0, 0), "reward": (0, 1, 0), "dpo": (0, 1, 1), "grpo": (0, 0, 1)}[args.task]
    model = TrainedModelConfig(
        path=args.model, precision=args.precision, optim=OptimConfig(lr=1e-4)
    )
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "output_dir": Path(scratch) / "run",
            "data": DataConfig(
                path=(args.data_path,), max_length=args.max_length, split=split, max_eval_rows=8
            ),
            "max_steps": args.steps,
            "eval_every": 0,
            "keep_best": False,
            "batch_size": args.batch_size,
            "micro_batch_size": args.batch_size,
        }
        directory = TRAIN[args.task](args, model, settings)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    steps = [line for line in lines if "tokens" in line]
    return [
        (after["seconds"] - before["seconds"], after["tokens"])
        for before, after in itertools.pairwise(steps)
    ]


def train_sft(_: argparse.Namespace, model: Any, settings: dict[str, Any]) -> Path:  # noqa: ANN401
    """Run step 1."""
    from step1_sft.config import SFTConfig
    from step1_sft.train import train

    return train(SFTConfig(model=model, **settings))


def train_reward(_: argparse.Namespace, model: Any, settings: dict[str, Any]) -> Path:  # noqa: ANN401
    """Run step 2."""
    from step2_reward.config import RewardConfig
    from step2_reward.train import train

    return train(RewardConfig(model=model, **settings))


def train_dpo(args: argparse.Namespace, model: Any, settings: dict[str, Any]) -> Path:  # noqa: ANN401
    """Run step 3 with DPO."""
    from step3_preference.config import PreferenceConfig
    from step3_preference.train import train

    limits = {"max_prompt_length": args.max_length // 2, "max_new_tokens": 2}
    return train(PreferenceConfig(model=model, **settings, **limits))


def train_grpo(args: argparse.Namespace, actor: Any, settings: dict[str, Any]) -> Path:  # noqa: ANN401
    """Run step 3 with GRPO: one update per rollout, without replacing prompts."""
    from rewards.config import read_specs
    from step3_ppo.config import PPOConfig
    from step3_ppo.methods import METHODS
    from step3_ppo.train import train

    limits = {"max_prompt_length": args.max_length - RESPONSE, "max_new_tokens": RESPONSE}
    method = {**METHODS["grpo"], "group_size": GROUP, "dynamic_sampling": 0, "overlong": "score"}
    rollout = {"rollout_size": args.batch_size, "generation_batch_size": args.batch_size}
    config = PPOConfig(
        actor=actor,
        rewards=tuple(read_specs([f"{__file__}:reward_episodes"])),
        samples_every=args.steps,
        **{**method, **settings, **limits, **rollout, "method": "grpo"},
    )
    return train(config)


TRAIN = {"sft": train_sft, "reward": train_reward, "dpo": train_dpo, "grpo": train_grpo}


def run_trl(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Train with TRL on the same token ids; return (seconds, tokens) of each optimizer step."""
    import torch
    from datasets import Dataset
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

    from benchmarks.llama import StepEnds

    rows = token_rows(args)
    lengths = [row.pop("length") for row in rows]

    steps = StepEnds()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "output_dir": scratch,
            "per_device_train_batch_size": args.batch_size,
            "max_steps": args.steps,
            "learning_rate": 1e-4,
            "bf16": args.precision == "bf16",
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "use_cpu": not torch.cuda.is_available(),
        }
        dataset = Dataset.from_list(rows[: args.steps * args.batch_size])
        trainer_class, config_class = {
            "sft": (SFTTrainer, SFTConfig),
            "reward": (RewardTrainer, RewardConfig),
            "dpo": (DPOTrainer, DPOConfig),
            "grpo": (GRPOTrainer, GRPOConfig),
        }[args.task]
        functions = {}
        if args.task == "grpo":
            settings |= {"num_generations": GROUP, "max_completion_length": RESPONSE, "beta": 0.0}
            functions["reward_funcs"] = reward_completions
        else:
            settings |= {"max_length": args.max_length, "train_sampling_strategy": "sequential"}
        if args.task == "dpo":
            settings["precompute_ref_log_probs"] = True
        trainer = trainer_class(
            model=args.model,
            args=config_class(**settings),
            train_dataset=dataset,
            callbacks=[steps],
            **functions,
        )
        trainer.train()
    sizes = [sum(lengths[i : i + args.batch_size]) for i in range(0, len(rows), args.batch_size)]
    seconds = [after - before for before, after in itertools.pairwise(steps.ends)]
    return list(zip(seconds, sizes[1:], strict=False))


def token_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows that our step trains on, in the same order, in TRL's format.

    Rows contain token ids or, for DPO and GRPO, text.
    """
    from pipeline.config import DataConfig, FrozenModelConfig
    from pipeline.data.batches import RowStream
    from pipeline.data.sharing.steps import load_examples
    from pipeline.models.hf.chat import load_chat

    chat = load_chat(FrozenModelConfig(path=args.model), DataConfig())
    step, split = {"sft": (1, (1, 0, 0)), "grpo": (3, (0, 0, 1))}.get(args.task, (2, (0, 1, 0)))
    tokenizer = chat.tokenizer
    data = DataConfig(path=(args.data_path,), split=split, max_eval_rows=8)
    examples = load_examples(data, step=step, seed=1234).train
    stream = RowStream(num_rows=len(examples), batch_size=args.batch_size, seed=1234)
    rows: list[dict[str, Any]] = []
    for _ in range(args.steps):
        for example in (examples[row] for row in next(stream)):
            if args.task == "grpo":
                prompt_ids = chat.encode_prompt(example.prompt)
                if len(prompt_ids) <= args.max_length - RESPONSE:
                    rows.append({"prompt": tokenizer.decode(prompt_ids), "length": 0})
                continue
            chosen = chat.encode(example.prompt, example.chosen)
            if args.task == "sft":
                chosen = chosen.head(args.max_length)
                labels = [
                    token if trained else -100
                    for token, trained in zip(chosen.input_ids, chosen.trained, strict=True)
                ]
                rows.append(
                    {"input_ids": chosen.input_ids, "labels": labels, "length": len(chosen)}
                )
            elif args.task == "dpo":
                rejected = chat.encode(example.prompt, example.rejected)
                prompt = chosen.trained.index(True)
                sides = {"chosen": chosen, "rejected": rejected}
                rows.append(
                    {
                        "prompt": tokenizer.decode(chosen.input_ids[:prompt]),
                        **{k: tokenizer.decode(v.input_ids[prompt:]) for k, v in sides.items()},
                        "length": sum(min(len(v), args.max_length) for v in sides.values()),
                    }
                )
            else:
                chosen = chosen.tail(args.max_length)
                rejected = chat.encode(example.prompt, example.rejected).tail(args.max_length)
                rows.append(
                    {
                        "chosen_ids": chosen.input_ids,
                        "rejected_ids": rejected.input_ids,
                        "length": len(chosen) + len(rejected),
                    }
                )
    return rows


def measure(args: argparse.Namespace) -> None:
    """Run one side and print its speed in `UNITS` of the task per second."""
    steps = (run_ours if args.side == "ours" else run_trl)(args)[WARM_UP:]
    seconds = sum(step[0] for step in steps)
    rows = len(steps) * args.batch_size / seconds
    is_counted = UNITS[args.task] == "tokens"
    print(sum(step[1] for step in steps) / seconds if is_counted else rows)


def compare(args: argparse.Namespace) -> None:
    """Run both sides alternately and print the table."""
    print("| task | precision | TRL | ours | ratio | spread of the ratio |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            build_model(Path(directory), args.data_path)
            args.model = directory
        for task, precision in itertools.product(args.tasks, args.precisions):
            speeds: dict[str, list[float]] = {"trl": [], "ours": []}
            for _ in range(args.rounds):
                for side, values in speeds.items():
                    values.append(run_side(args, task, precision, side))
            ratios = [ours / trl for trl, ours in zip(*speeds.values(), strict=True)]
            cells = [
                f"{statistics.median(values):,.2f} {UNITS[task]}/s" for values in speeds.values()
            ]
            print(
                f"| {task} | {precision} | {' | '.join(cells)} | {statistics.median(ratios):.2f}"
                f" | {min(ratios):.2f} to {max(ratios):.2f} |",
                flush=True,
            )


def run_side(args: argparse.Namespace, task: str, precision: str, side: str) -> float:
    """Run one side in a separate process; return its speed."""
    command = [sys.executable, "-m", "benchmarks.training", "--side", side, "--task", task]
    command += ["--model", args.model, "--precision", precision, "--data-path", args.data_path]
    command += ["--steps", str(args.steps), "--batch-size", str(args.batch_size)]
    command += ["--max-length", str(args.max_length)]
    environment = os.environ | ({"OMP_NUM_THREADS": str(args.threads)} if args.threads else {})
    process = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr}")
    return float(process.stdout.splitlines()[-1])


def main(argv: Sequence[str]) -> None:
    """Parse the options and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-path", required=True, help="preference pairs, as for train.py")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["sft", "reward"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--threads", type=int, help="threads of both sides; by default, all cores")
    parser.add_argument("--model", help="directory of a chat model, instead of the 15M Llama")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="fp32", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    measure(args) if args.side else compare(args)


if __name__ == "__main__":
    main(sys.argv[1:])
