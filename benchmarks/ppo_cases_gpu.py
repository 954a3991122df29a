"""Run two PPO iterations with tiny models in 15 settings: generation and training must agree.

    python -m benchmarks.ppo_cases_gpu [CASE ...]

Their log-probabilities must agree within the limits that a run enforces, and no optimizer step may
be skipped. On a GPU, decoding must also replay graphs, and no kernel may be missing.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import GPU, Fallbacks, emit, report_errors
from benchmarks.ppo_gpu import iterate, load_ppo, save_models
from pipeline.config import LoraConfig, OptimConfig
from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.parallel.process_group import process_group
from pipeline.system.torch_process import use_expandable_segments
from pipeline.watchdog.process import watch_processes

SEQUENCES, PROMPT, ANSWER = 8, 16, 24

Settings = Mapping[str, Any]


def offload(stage: int, **fields: Any) -> Settings:  # noqa: ANN401
    """Return the settings of a ZeRO stage with offload; `fields` are those of `OffloadConfig`."""
    return {"zero_stage": stage, "zero": ZeroConfig(offload=OffloadConfig(**fields))}


def adam(**settings: Any) -> OptimConfig:  # noqa: ANN401
    """Return AdamW settings with a constant learning rate."""
    return OptimConfig(lr=1e-4, schedule="constant", warmup_ratio=0.0, **settings)


CASES: Mapping[str, Settings] = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
    "parameters on the host": offload(3, params="cpu"),
    "gradients on the host": offload(2, gradients="cpu"),
    "optimizer on the host": offload(2, optimizer="cpu"),
    "recomputation": {"gradient_checkpointing": True},
    "bf16 moments": {"optim": adam(moments="bf16")},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "training without kernels": {"kernels": "off"},
    "deterministic": {"zero": ZeroConfig(reduction="deterministic")},
    "stage 3, lora": {"zero_stage": 3, "lora": LoraConfig(rank=4)},
    "offload in generation": {},
}
"""Settings of actor and critic, by case."""


def iterate_case(name: str, directory: Path, vocabulary: int) -> dict[str, Any]:
    """Run two iterations of a case; return the metrics of the second."""
    kernels = "required" if GPU else "auto"
    config, models = load_ppo(
        directory,
        trained={"kernels": kernels, "optim": adam(), **CASES[name]},
        iterations=2,
        offload_in_generation=name == "offload in generation",
        rollout=SEQUENCES,
        micro_batch_size=SEQUENCES // 2,
        max_prompt_length=PROMPT,
        max_new_tokens=ANSWER,
    )
    iterate(models, config, step=1, vocabulary=vocabulary)
    return iterate(models, config, step=2, vocabulary=vocabulary)


def main(argv: Sequence[str]) -> None:
    """Run the cases and report a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    names = parser.parse_args(argv).cases or list(CASES)
    use_expandable_segments()
    fallbacks, replays, replay = Fallbacks(), [0], torch.cuda.CUDAGraph.replay

    def count_replay(graph: torch.cuda.CUDAGraph) -> None:
        replays[0] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = count_replay
    with tempfile.TemporaryDirectory() as scratch, process_group(watch_processes):
        vocabulary = save_models(Path(scratch), tiny=True)
        for number, name in enumerate(names, start=1):
            replays[0] = 0
            try:
                with report_errors("ppo", case=name):
                    metrics = iterate_case(name, Path(scratch), vocabulary)
                    ok = not metrics["skipped"] and (not GPU or replays[0] >= ANSWER // 2)
                    emit("ppo", ok=ok, case=name, **metrics, replayed=replays[0])
            except Exception:  # run the remaining cases in a new process
                if number == len(names):
                    raise
                module = ["-m", "benchmarks.ppo_cases_gpu"]
                os.execv(sys.executable, [sys.executable, *module, *names[number:]])
    fallbacks.report()


if __name__ == "__main__":
    main(sys.argv[1:])
