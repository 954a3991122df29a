"""An iteration of PPO against DeepSpeed-Chat's, and against one of TRL's GRPOTrainer.

    pip install -e '.[peers]'       # TRL
    python -m benchmarks.ppo [--rounds 3] [--threads 2] [--precision bf16]
           [--deepspeed-python PATH --deepspeed-chat DIR]

DIR holds the package `dschat` of DeepSpeedExamples (applications/DeepSpeed-Chat), PATH is a Python
that has deepspeed. All sides answer the same 8 prompts of 128 tokens with 64 new ones an iteration
and learn from them in one step with Llamas of 15M parameters: actor, reference, critic and reward
model. TRL has no PPO any more: its GRPOTrainer has no critic to train, and samples 2 answers to
each of 4 prompts; ours does the same by `method: grpo`, beside PPO. The sides alternate within one
run, each round in fresh processes; a figure is the median over rounds of the median iteration, a
ratio the median of those within rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BATCH, PROMPT, ANSWER = 8, 128, 64
PROMPTS = 64
PHASES = ("generation", "experience", "training")


def build_assets(directory: Path) -> None:
    """Save the models, a tokenizer whose tokens are words, and prompts of exactly PROMPT tokens."""
    import torch
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    from benchmarks.llama import VOCABULARY, save_llama
    from pipeline.config import DataConfig, FrozenModelConfig
    from pipeline.data.examples import Message
    from pipeline.models.chat import load_chat

    save_llama(directory / "actor")
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(directory / "actor", num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(directory / "reward")
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(directory / "critic")

    names = ["<s>", "</s>", "<pad>", "<unk>"]
    words = {name: number for number, name in enumerate(names)}
    words |= {f"w{number}": number for number in range(len(names), VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    for name in ("actor", "reward", "critic"):
        fast.save_pretrained(directory / name)

    _, chat = load_chat(FrozenModelConfig(path=str(directory / "actor")), DataConfig())
    empty = len(chat.encode_prompt((Message("user", ""),)))
    generator = torch.Generator().manual_seed(0)
    rows: list[str] = []
    ids: list[list[int]] = []
    for _ in range(PROMPTS):
        chosen = torch.randint(len(names), VOCABULARY, (PROMPT - empty,), generator=generator)
        text = " ".join(f"w{number}" for number in chosen.tolist())
        rows.append(json.dumps({"prompt": text, "chosen": "w9", "rejected": "w8"}))
        ids.append(chat.encode_prompt((Message("user", text),)))
    assert {len(prompt) for prompt in ids} == {PROMPT}
    (directory / "prompts.jsonl").write_text("\n".join(rows))
    (directory / "prompt_ids.json").write_text(json.dumps(ids))


def run_side(args: argparse.Namespace, side: str, directory: Path) -> dict[str, float]:
    """Seconds of a side's median iteration, whole and by phase, in a process of its own."""
    deepspeed = side == "deepspeed-chat"
    python = args.deepspeed_python if deepspeed else sys.executable
    command = [python, "-m", "benchmarks.ppo_sides", "--side", side]
    command += ["--directory", str(directory), "--iterations", str(args.iterations)]
    command += ["--precision", args.precision]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "DS_ACCELERATOR": "cpu"}
    if deepspeed:
        environment["PYTHONPATH"] = str(args.deepspeed_chat)
        # DeepSpeed builds its Adam with the ninja of its interpreter's environment.
        environment["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


OURS = ("ours", "ours, grpo")


def table(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown; how many times as many samples a second ours has, by each method."""
    head = ["", "iteration", *PHASES, "samples/s", *(f"{side} is" for side in OURS)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for side, rounds in figures.items():
        seconds = statistics.median(each["iteration"] for each in rounds)
        phases = [
            f"{statistics.median(each[phase] for each in rounds):.3f} s"
            for phase in PHASES
            if phase in rounds[0]
        ]
        cells = [
            side,
            f"{seconds:.3f} s",
            *(phases or [""] * len(PHASES)),
            f"{BATCH / seconds:.1f}",
        ]
        cells += ["" if side in OURS else speedup(rounds, figures[ours]) for ours in OURS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speedup(theirs: Sequence[Mapping[str, float]], ours: Sequence[Mapping[str, float]]) -> str:
    """The median of the rounds' ratios, and their range."""
    ratios = [a["iteration"] / b["iteration"] for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"


def main(argv: Sequence[str]) -> None:
    """Alternate the sides and print the table."""
    description: Any = __doc__
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--deepspeed-python", help="a Python that has deepspeed")
    parser.add_argument("--deepspeed-chat", type=Path, help="the directory that holds dschat")
    args = parser.parse_args(argv)
    sides = [*OURS, "trl"]
    if args.deepspeed_python and args.deepspeed_chat:
        sides.append("deepspeed-chat")
    else:
        print("DeepSpeed-Chat is skipped: name --deepspeed-python and --deepspeed-chat")
    figures: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        build_assets(Path(scratch))
        for number in range(args.rounds):
            for side, values in figures.items():
                values.append(run_side(args, side, Path(scratch)))
                seconds = values[-1]["iteration"]
                print(f"round {number + 1}, {side}: {seconds:.3f} s an iteration", flush=True)
    print(f"\n{table(figures)}")


if __name__ == "__main__":
    main(sys.argv[1:])
