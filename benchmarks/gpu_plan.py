"""The memory plan of step 1 against the allocator's peak: OPT-1.3B on one GPU.

    python -m benchmarks.gpu_plan [--output DIRECTORY]
    python -m benchmarks.gpu_plan --tiny        # a toy, anywhere; without a GPU there is no peak

Random weights, nothing is downloaded. Each case trains a few steps as users do, in a process of its
own, and reads `memory_gb` of its metrics: the most that torch's allocator gave out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import nn

from pipeline.budget.machine import this_machine
from pipeline.budget.step import step_memory
from pipeline.cli import parse_step
from step1_sft.config import SFTConfig

CASES = {
    "stage 0": ["--model.zero_stage", "0"],
    "stage 3, recomputation": ["--model.zero_stage", "3", "--model.gradient_checkpointing", "true"],
    "offloaded optimizer": ["--model.zero.offload.optimizer", "cpu"],
}
STEPS = 4


def save_model(directory: Path, *, tiny: bool) -> None:
    """OPT-1.3B with random weights and a tokenizer of letters."""
    from transformers import OPTConfig, OPTForCausalLM

    from pipeline.models.embedded import build_tokenizer

    tokenizer = build_tokenizer()
    width = 64 if tiny else 2048
    config = OPTConfig(
        vocab_size=512 if tiny else 50_272,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_hidden_layers=2 if tiny else 24,
        num_attention_heads=width // 64,
        max_position_embeddings=2048,
        dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = cast("nn.Module", OPTForCausalLM(config)).bfloat16()
    cast("OPTForCausalLM", model).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_rows(file: Path, *, length: int) -> None:
    """Demonstrations that fill a sequence."""
    rows = [
        {"prompt": f"Say it {number} times.", "response": "so be it " * length}
        for number in range(96)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))


def measure(directory: Path, options: Sequence[str], *, tiny: bool) -> dict[str, float]:
    """Bytes as planned and at the peak."""
    out = Path(tempfile.mkdtemp(dir=directory)) / "out"
    command = [
        *(sys.executable, "-m", "step1_sft.train", "--model.path", str(directory / "model")),
        *("--data.path", str(directory / "rows.jsonl"), "--output_dir", str(out)),
        *("--data.max_length", "128" if tiny else "512", "--max_steps", str(STEPS)),
        *("--batch_size", "8", "--micro_batch_size", "4", "--model.precision", "bf16"),
        *("--save_every", "null", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    peak = max(json.loads(line).get("memory_gb", 0.0) for line in lines)
    config = parse_step(SFTConfig, ["--config", str(out / "config.yaml")])
    machine = this_machine(processes=1, world=1, gpus=["0"] if torch.cuda.is_available() else [])
    memory = step_memory(config, machine=machine)
    return {"planned": memory.peak("device"), "peak": peak * 1e9}


def main(argv: Sequence[str]) -> None:
    """Measure each case and print the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a toy")
    parser.add_argument("--output", type=Path, default=Path("output/gpu_plan"))
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    print("| case | planned, GiB | peak, GiB |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        save_model(directory / "model", tiny=args.tiny)
        save_rows(directory / "rows.jsonl", length=128 if args.tiny else 512)
        for name, options in CASES.items():
            found[name] = row = measure(directory, options, tiny=args.tiny)
            print(f"| {name} | {row['planned'] / 2**30:.2f} | {row['peak'] / 2**30:.2f} |")
    (args.output / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
