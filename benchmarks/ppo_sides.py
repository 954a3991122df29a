"""One side of `benchmarks.ppo`; see there."""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, get_args

from benchmarks.ppo import ANSWER, BATCH, PROMPT

WARM_UP = 3
"""Iterations before the clock counts."""

ACTOR_LR, CRITIC_LR = 1e-6, 9e-6

Times = dict[str, float]
Precision = Literal["fp32", "bf16"]


def run_ours(
    directory: Path,
    iterations: int,
    precision: Precision,
    method: str = "ppo",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[Times]:
    """Step 3 as users run it; every iteration's seconds from its line of metrics."""
    from pipeline.config import DataConfig, FrozenModelConfig, OptimConfig, TrainedModelConfig
    from step3_ppo.config import PPOConfig
    from step3_ppo.methods import METHODS
    from step3_ppo.train import train

    with tempfile.TemporaryDirectory() as scratch:
        config = PPOConfig(
            output_dir=Path(scratch) / "run",
            data=DataConfig(
                path=(str(directory / "prompts.jsonl"),), split=(0, 0, 1), max_eval_rows=2
            ),
            epochs=iterations,
            max_steps=iterations,
            rollout_size=BATCH,
            batch_size=BATCH,
            micro_batch_size=BATCH,
            generation_batch_size=BATCH,
            max_prompt_length=PROMPT,
            max_new_tokens=ANSWER,
            samples_every=10**6,
            eval_every=0,
            keep_best=False,
            actor=TrainedModelConfig(
                path=str(directory / "actor"), precision=precision, optim=OptimConfig(lr=ACTOR_LR)
            ),
            critic=TrainedModelConfig(
                path=str(directory / "reward"), precision=precision, optim=OptimConfig(lr=CRITIC_LR)
            ),
            reward=FrozenModelConfig(path=str(directory / "reward"), precision=precision),
            **{**METHODS[method], "method": method, **settings},
        )
        metrics = train(config) / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "seconds_generation" in line]
    return [
        {
            "iteration": line["seconds"] - before["seconds"],
            **{name: line[f"seconds_{name}"] for name in ("generation", "experience", "training")},
        }
        for before, line in itertools.pairwise(steps)
    ]


def run_grpo(directory: Path, iterations: int, precision: Precision) -> list[Times]:
    """Ours, as TRL's side: 4 prompts, 2 answers each, the same reward model, KL in the loss."""
    return run_ours(directory, iterations, precision, "grpo", {"group_size": 2, "kl_coef": 0.05})


def run_trl(directory: Path, iterations: int, precision: Precision) -> list[Times]:
    """GRPOTrainer with a reference and a reward model: 4 prompts, 2 answers each."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Steps(TrainerCallback):
        """Notes when each iteration ends."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: object, **__: object) -> None:
            self.ends.append(time.perf_counter())

    steps = Steps()
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "actor")
    ids = json.loads((directory / "prompt_ids.json").read_text())
    reward: Any = AutoModelForSequenceClassification.from_pretrained(
        directory / "reward", dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=str(directory / "actor"),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=BATCH,
                num_generations=2,
                max_completion_length=ANSWER,
                max_steps=iterations,
                learning_rate=ACTOR_LR,
                beta=0.05,
                bf16=precision == "bf16",
                model_init_kwargs={"dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision]},
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Dataset.from_dict({"prompt": [tokenizer.decode(each) for each in ids]}),
            processing_class=tokenizer,
            callbacks=[steps],
        )
        trainer.train()
    return [{"iteration": after - before} for before, after in itertools.pairwise(steps.ends)]


def run_deepspeed_chat(directory: Path, iterations: int, precision: Precision) -> list[Times]:
    """Its own trainer and reward model, on engines at stage 0 with DeepSpeed's CPU Adam.

    The loading of models is ours: its own asks for names that `transformers` no longer has.
    """
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]
    from dschat.rlhf.ppo_trainer import (  # pyright: ignore[reportMissingImports]
        DeepSpeedPPOTrainer,
    )
    from dschat.utils.model.reward_model import (  # pyright: ignore[reportMissingImports]
        RewardModel,
    )
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16"},
        "steps_per_print": 10**9,
    }
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "actor")

    def engine(model: Any, lr: float | None) -> Any:  # noqa: ANN401
        adam = None
        if lr is not None:
            adam = DeepSpeedCPUAdam(model.parameters(), lr=lr, betas=(0.9, 0.95))
        return deepspeed.initialize(model=model, optimizer=adam, config=settings)[0]

    def causal(lr: float | None) -> Any:  # noqa: ANN401
        return engine(AutoModelForCausalLM.from_pretrained(directory / "actor"), lr)

    def scorer(lr: float | None) -> Any:  # noqa: ANN401
        return engine(RewardModel(AutoModel.from_pretrained(directory / "critic"), tokenizer), lr)

    engines = SimpleNamespace(
        actor=causal(ACTOR_LR),
        ref=causal(None),
        critic=scorer(CRITIC_LR),
        reward=scorer(None),
        tokenizer=tokenizer,
    )
    args = SimpleNamespace(
        max_answer_seq_len=ANSWER,
        end_of_conversation_token="</s>",
        actor_zero_stage=0,
        compute_fp32_loss=False,
        print_answers=False,
        print_answers_interval=1,
        align_overflow=False,
        local_rank=0,
        dtype=precision,
    )
    trainer: Any = DeepSpeedPPOTrainer(engines, args)
    ids = torch.tensor(json.loads((directory / "prompt_ids.json").read_text()))
    times: list[Times] = []
    for number in range(iterations):
        began = time.perf_counter()
        rows = torch.arange(number * BATCH, (number + 1) * BATCH) % len(ids)
        prompts = ids[rows]
        experience = trainer.generate_experience(prompts, torch.ones_like(prompts), number)
        experienced = time.perf_counter()
        trainer.train_rlhf(experience)
        ended = time.perf_counter()
        assert experience["input_ids"].shape == (BATCH, PROMPT + ANSWER)
        times.append(
            {
                "iteration": ended - began,
                "generation": trainer.generate_time,
                "experience": experienced - began - trainer.generate_time,
                "training": ended - experienced,
            }
        )
    return times


SIDES: Mapping[str, Callable[[Path, int, Precision], list[Times]]] = {
    "ours": run_ours,
    "ours, grpo": run_grpo,
    "trl": run_trl,
    "deepspeed-chat": run_deepspeed_chat,
}


def main(argv: Sequence[str]) -> None:
    """Run one side and print its median iteration as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--precision", choices=get_args(Precision), required=True)
    args = parser.parse_args(argv)
    times = SIDES[args.side](args.directory, args.iterations, args.precision)[WARM_UP:]
    median = {name: statistics.median(each[name] for each in times) for name in times[0]}
    print(f"\n{json.dumps(median)}")


if __name__ == "__main__":
    main(sys.argv[1:])
