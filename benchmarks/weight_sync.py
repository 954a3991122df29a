"""What the weight sync costs: its share of a PPO iteration.

    python -m benchmarks.weight_sync [--precisions fp32 bf16] [--iterations 7] [--cases plain ...]

Actor, critic and reward model are Llamas of 15M parameters with random weights. An iteration
answers 8 prompts of 128 tokens on each process with 64 tokens each, asks the four models about
them, and makes one update. The weight sync is what `generating()` does before the first token: it
gathers, merges or shards the weights where that is needed, and hashes them. The first iteration
doesn't count; figures are medians over the others, of the first process. A process has one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS, PROMPT, ANSWER = 8, 128, 64

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (1, {}, {}),
    "LoRA": (1, {"lora": {"rank": 16}}, {}),
    "stage 3": (2, {"zero_stage": 3}, {}),
    "stage 3, LoRA": (2, {"zero_stage": 3, "lora": {"rank": 16}}, {}),
    "stage 3, divided": (2, {"zero_stage": 3}, {"inference_tp_size": 2}),
}
"""By name: processes, settings of the actor, settings of step 3."""

BAR = 0.02
"""The weight sync's share of an iteration must stay below this."""


def save_models(directory: Path) -> None:
    """Actor and reward model, of one size, with the embedded tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from benchmarks.llama import save_llama
    from pipeline.models.embedded import build_tokenizer

    save_llama(directory / "actor")
    settings = AutoConfig.from_pretrained(directory / "actor")
    settings.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(settings)
    reward.save_pretrained(directory / "reward")
    for name in ("actor", "reward"):
        build_tokenizer().save_pretrained(directory / name)


def measure(directory: Path, case: str, precision: str, iterations: int) -> dict[str, float]:
    """Median seconds of the weight sync, of generation and of an iteration, on a process."""
    from benchmarks.iteration import iterate
    from benchmarks.llama import VOCABULARY
    from pipeline.config import FrozenModelConfig, LoraConfig, TrainedModelConfig
    from pipeline.models.chat import load_chat
    from pipeline.parallel.mesh import current_mesh
    from step3_ppo.config import PPOConfig
    from step3_ppo.models import load_models

    _, trained, settings = CASES[case]
    lora = LoraConfig(**trained["lora"]) if "lora" in trained else None
    stage = trained.get("zero_stage", 0)
    everyone = PROMPTS * current_mesh().data.size

    def model(name: str) -> TrainedModelConfig:
        path = str(directory / name)
        return TrainedModelConfig(path=path, precision=precision, zero_stage=stage, lora=lora)  # pyright: ignore[reportArgumentType]

    config = PPOConfig(
        actor=model("actor"),
        critic=model("reward"),
        reward=FrozenModelConfig(path=str(directory / "reward"), precision=precision),  # pyright: ignore[reportArgumentType]
        batch_size=everyone,
        rollout_size=everyone,
        micro_batch_size=PROMPTS,
        max_prompt_length=PROMPT,
        max_new_tokens=ANSWER,
        missing_eos_score=None,
        **settings,
    )
    tokenizer, chat = load_chat(config.actor, config.data)
    models = load_models(config, tokenizer, chat, iterations=iterations + 1)
    rounds = [
        iterate(
            models,
            config,
            step=step,
            num_prompts=PROMPTS,
            prompt_length=PROMPT,
            vocabulary=VOCABULARY,
        )
        for step in range(1, iterations + 2)
    ]
    later = rounds[1:]
    medians = {name: statistics.median(each[name] for each in later) for name in later[0]}
    shares = [each["sync"] / each["iteration"] for each in later]
    return medians | {"share": statistics.median(shares), "most": max(shares)}


def work(args: argparse.Namespace) -> None:
    """One case, in the processes that torchrun started."""
    import torch

    from pipeline.parallel.mesh import current_mesh
    from pipeline.parallel.process_group import process_group
    from pipeline.watchdog.process import watching

    torch.set_num_threads(1)
    with process_group(watching):
        figures = measure(args.models, args.work, args.precisions[0], args.iterations)
        if current_mesh().is_main:
            args.result.write_text(json.dumps(figures))


def run(directory: Path, case: str, precision: str, iterations: int) -> dict[str, float]:
    """One case, in processes of its own."""
    result = directory / "result.json"
    count, _, _ = CASES[case]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [sys.executable, *launch, "-m", "benchmarks.weight_sync", "--work", case]
    command += ["--models", str(directory), "--result", str(result)]
    command += ["--precisions", precision, "--iterations", str(iterations)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(result.read_text())


def main(argv: Sequence[str]) -> None:
    """Measure and print the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work is not None:
        work(args)
        return
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; bar {BAR:.0%}")
    print("| precision | case | processes | sync | generation | iteration | share | at most |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        save_models(Path(scratch))
        for precision in args.precisions:
            for case in args.cases:
                seen = run(Path(scratch), case, precision, args.iterations)
                print(
                    f"| {precision} | {case} | {CASES[case][0]} | {1000 * seen['sync']:.1f} ms |"
                    f" {seen['generation']:.2f} s | {seen['iteration']:.2f} s |"
                    f" {seen['share']:.1%} | {seen['most']:.1%} |",
                    flush=True,
                )
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
