"""Benchmark steps 1, 2 and DPO against TRL's SFTTrainer, RewardTrainer and DPOTrainer.

    pip install -e '.[peers]'
    python -m benchmarks.training --data-path train.jsonl.gz [--precisions fp32 bf16] [--rounds 3]
    python -m benchmarks.training --data-path train.jsonl.gz --tasks dpo

Both sides train the same Llama with 15M parameters on the same token ids in batches of equal size,
with fused AdamW, without gradient checkpointing or evaluation. Our side is the step as users run
it, which tokenizes during training; TRL gets token ids or, for DPO, text that it tokenizes before
training. Both precompute DPO's reference log-probabilities, which is not timed, so a few hundred
pairs suffice. The sides alternate within one run, each round in a new process. Reported values are
medians over rounds of tokens (without padding) or pairs per second, starting at the fourth step.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TASKS = ("sft", "reward", "dpo")

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


def run_ours(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Run the step as users do; return (seconds, tokens) of each optimizer step."""
    from pipeline.config import DataConfig, OptimConfig, TrainedModelConfig

    split = {"sft": (1, 0, 0), "reward": (0, 1, 0), "dpo": (0, 1, 1)}[args.task]
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
            "model": TrainedModelConfig(
                path=args.model, precision=args.precision, optim=OptimConfig(lr=1e-4)
            ),
        }
        if args.task == "sft":
            from step1_sft.config import SFTConfig
            from step1_sft.train import train as train_sft

            directory = train_sft(SFTConfig(**settings))
        elif args.task == "dpo":
            from step3_preference.config import PreferenceConfig
            from step3_preference.train import train as train_preference

            limits = {"max_prompt_length": args.max_length // 2, "max_new_tokens": 2}
            directory = train_preference(PreferenceConfig(**settings, **limits))
        else:
            from step2_reward.config import RewardConfig
            from step2_reward.train import train as train_reward

            directory = train_reward(RewardConfig(**settings))
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    steps = [line for line in lines if "loss" in line]
    return [
        (after["seconds"] - before["seconds"], after["tokens"])
        for before, after in itertools.pairwise(steps)
    ]


def run_trl(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Train with TRL on the same token ids; return (seconds, tokens) of each optimizer step."""
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

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
            "max_length": args.max_length,
            "learning_rate": 1e-4,
            "bf16": args.precision == "bf16",
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "use_cpu": not torch.cuda.is_available(),
            "train_sampling_strategy": "sequential",
        }
        dataset = Dataset.from_list(rows[: args.steps * args.batch_size])
        trainer_class, config_class = {
            "sft": (SFTTrainer, SFTConfig),
            "reward": (RewardTrainer, RewardConfig),
            "dpo": (DPOTrainer, DPOConfig),
        }[args.task]
        if args.task == "dpo":
            settings["precompute_ref_log_probs"] = True
        trl_config = config_class(**settings)
        trainer = trainer_class(
            model=args.model, args=trl_config, train_dataset=dataset, callbacks=[steps]
        )
        trainer.train()
    sizes = [sum(lengths[i : i + args.batch_size]) for i in range(0, len(rows), args.batch_size)]
    seconds = [after - before for before, after in itertools.pairwise(steps.ends)]
    return list(zip(seconds, sizes[1:], strict=False))


def token_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return our step's rows, in its order, in TRL's form: token ids or, for DPO, text."""
    from pipeline.config import DataConfig, FrozenModelConfig
    from pipeline.data.batches import RowStream
    from pipeline.data.sharing.steps import load_examples
    from pipeline.models.hf.chat import load_chat

    chat = load_chat(FrozenModelConfig(path=args.model), DataConfig())
    step, split = (1, (1, 0, 0)) if args.task == "sft" else (2, (0, 1, 0))
    tokenizer = chat.tokenizer
    data = DataConfig(path=(args.data_path,), split=split, max_eval_rows=8)
    examples = load_examples(data, step=step, seed=1234).train
    stream = RowStream(num_rows=len(examples), batch_size=args.batch_size, seed=1234)
    rows: list[dict[str, Any]] = []
    for _ in range(args.steps):
        for example in (examples[row] for row in next(stream)):
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
    """Run one side and print its metrics as a line of JSON."""
    steps = (run_ours if args.side == "ours" else run_trl)(args)[WARM_UP:]
    seconds = sum(step[0] for step in steps)
    rows = len(steps) * args.batch_size / seconds
    print(json.dumps({"tokens": sum(step[1] for step in steps) / seconds, "rows": rows}))


def compare(args: argparse.Namespace) -> None:
    """Run both sides alternately and print the table."""
    print("| task | precision | TRL | ours | ratio | spread of the ratio |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        build_model(Path(directory), args.data_path)
        for task, unit in (("sft", "tokens"), ("reward", "rows"), ("dpo", "tokens")):
            if task not in args.tasks:
                continue
            for precision in args.precisions:
                ratios: list[float] = []
                figures: dict[str, list[float]] = {"trl": [], "ours": []}
                for _ in range(args.rounds):
                    for side, values in figures.items():
                        values.append(run_side(args, directory, task, precision, side)[unit])
                    ratios.append(figures["ours"][-1] / figures["trl"][-1])
                trl, ours = (statistics.median(figures[side]) for side in ("trl", "ours"))
                name = "tokens/s" if unit == "tokens" else "pairs/s"
                print(
                    f"| {task} | {precision} | {trl:,.1f} {name} | {ours:,.1f} {name} |"
                    f" {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |",
                    flush=True,
                )


def run_side(
    args: argparse.Namespace, model: str, task: str, precision: str, side: str
) -> dict[str, float]:
    """Run one side in a separate process; return its metrics."""
    command = [sys.executable, "-m", "benchmarks.training", "--side", side, "--task", task]
    command += ["--model", model, "--precision", precision, "--data-path", args.data_path]
    command += ["--steps", str(args.steps), "--batch-size", str(args.batch_size)]
    command += ["--max-length", str(args.max_length)]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


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
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="fp32", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    measure(args) if args.side else compare(args)


if __name__ == "__main__":
    main(sys.argv[1:])
