"""Benchmark a PPO iteration against one of DeepSpeed-Chat and one of TRL's GRPOTrainer.

    pip install -e '.[peers]'       # TRL
    python -m benchmarks.ppo [--rounds 3] [--threads 2] [--precision bf16]
           [--deepspeed-python PATH --deepspeed-chat DIR]

DIR contains the package `dschat` from DeepSpeedExamples (applications/DeepSpeed-Chat); PATH is a
Python interpreter with deepspeed. In each iteration, every side generates 64 tokens for the same 8
prompts of 128 tokens and trains on them in one step. Actor, reference, critic and reward model are
Llamas with 15M parameters. TRL no longer has PPO; its GRPOTrainer trains no critic, and samples 2
responses to each of 4 prompts, which we also run, with `method: grpo_2024`. The sides alternate,
each round in new processes. Reported times are medians over rounds of the median iteration; ratios
are medians of the ratios within rounds.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, get_args

BATCH, PROMPT, ANSWER = 8, 128, 64
PROMPTS = 64
PHASES = ("generation", "experience", "training")
WARM_UP = 3
"""Number of iterations before timing starts."""

ACTOR_LR, CRITIC_LR = 1e-6, 9e-6

Times = dict[str, float]
Precision = Literal["fp32", "bf16"]


def build_assets(directory: Path) -> None:
    """Save the models, a word-level tokenizer, and prompts of exactly PROMPT tokens."""
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
    from pipeline.models.hf.chat import load_chat

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

    chat = load_chat(FrozenModelConfig(path=str(directory / "actor")), DataConfig())
    num_words = PROMPT - len(chat.encode_prompt((Message("user", ""),)))
    generator = torch.Generator().manual_seed(0)
    rows: list[str] = []
    ids: list[list[int]] = []
    for _ in range(PROMPTS):
        word_ids = torch.randint(len(names), VOCABULARY, (num_words,), generator=generator)
        text = " ".join(f"w{number}" for number in word_ids.tolist())
        rows.append(json.dumps({"prompt": text, "chosen": "w9", "rejected": "w8"}))
        ids.append(chat.encode_prompt((Message("user", text),)))
    assert {len(prompt) for prompt in ids} == {PROMPT}
    (directory / "prompts.jsonl").write_text("\n".join(rows))
    (directory / "prompt_ids.json").write_text(json.dumps(ids))


def run_ours(
    directory: Path,
    iterations: int,
    precision: Precision,
    method: str = "ppo",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[Times]:
    """Run step 3 as users do; return the seconds of each iteration from its metrics."""
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
    """Run our GRPO in TRL's setup: 4 prompts, 2 responses each, KL in the loss."""
    settings = {"group_size": 2, "kl_coef": 0.05}
    return run_ours(directory, iterations, precision, "grpo_2024", settings)


def run_trl(directory: Path, iterations: int, precision: Precision) -> list[Times]:
    """Run GRPOTrainer with a reference and a reward model: 4 prompts, 2 responses each."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.llama import StepEnds

    steps = StepEnds()
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
            train_dataset=Dataset.from_dict(
                {"prompt": [tokenizer.decode(prompt_ids) for prompt_ids in ids]}
            ),
            processing_class=tokenizer,
            callbacks=[steps],
        )
        trainer.train()
    return [{"iteration": after - before} for before, after in itertools.pairwise(steps.ends)]


def run_deepspeed_chat(directory: Path, iterations: int, precision: Precision) -> list[Times]:
    """Run DeepSpeed-Chat's trainer and reward model, at stage 0 with DeepSpeedCPUAdam.

    Our code loads the models, because DeepSpeed-Chat's needs names that `transformers` removed.
    """
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from dschat.rlhf.ppo_trainer import (
        DeepSpeedPPOTrainer,
    )
    from dschat.utils.model.reward_model import (
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

    def make_engine(model: Any, lr: float | None) -> Any:  # noqa: ANN401
        adam = None
        if lr is not None:
            adam = DeepSpeedCPUAdam(model.parameters(), lr=lr, betas=(0.9, 0.95))
        return deepspeed.initialize(model=model, optimizer=adam, config=settings)[0]

    def make_causal_lm(lr: float | None) -> Any:  # noqa: ANN401
        return make_engine(AutoModelForCausalLM.from_pretrained(directory / "actor"), lr)

    def make_reward_model(lr: float | None) -> Any:  # noqa: ANN401
        return make_engine(
            RewardModel(AutoModel.from_pretrained(directory / "critic"), tokenizer), lr
        )

    engines = SimpleNamespace(
        actor=make_causal_lm(ACTOR_LR),
        ref=make_causal_lm(None),
        critic=make_reward_model(CRITIC_LR),
        reward=make_reward_model(None),
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
        start = time.perf_counter()
        rows = torch.arange(number * BATCH, (number + 1) * BATCH) % len(ids)
        prompts = ids[rows]
        experience = trainer.generate_experience(prompts, torch.ones_like(prompts), number)
        experience_end = time.perf_counter()
        trainer.train_rlhf(experience)
        end = time.perf_counter()
        assert experience["input_ids"].shape == (BATCH, PROMPT + ANSWER)
        times.append(
            {
                "iteration": end - start,
                "generation": trainer.generate_time,
                "experience": experience_end - start - trainer.generate_time,
                "training": end - experience_end,
            }
        )
    return times


SIDES: Mapping[str, Callable[[Path, int, Precision], list[Times]]] = {
    "ours": run_ours,
    "ours, grpo": run_grpo,
    "trl": run_trl,
    "deepspeed-chat": run_deepspeed_chat,
}


def run_worker(args: argparse.Namespace) -> None:
    """Run one side and print the times of its median iteration as a line of JSON."""
    times = SIDES[args.side](args.directory, args.iterations, args.precision)[WARM_UP:]
    median = {name: statistics.median(row[name] for row in times) for name in times[0]}
    print(f"\n{json.dumps(median)}")


def run_side(args: argparse.Namespace, side: str, directory: Path) -> dict[str, float]:
    """Run a side in a separate process; return its median seconds, in total and by phase."""
    deepspeed = side == "deepspeed-chat"
    python = args.deepspeed_python if deepspeed else sys.executable
    command = [python, "-m", "benchmarks.ppo", "--side", side]
    command += ["--directory", str(directory), "--iterations", str(args.iterations)]
    command += ["--precision", args.precision]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "DS_ACCELERATOR": "cpu"}
    if deepspeed:
        environment["PYTHONPATH"] = str(args.deepspeed_chat)
        # DeepSpeed builds its Adam with the ninja from its interpreter's environment.
        environment["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


OURS = ("ours", "ours, grpo")


def format_table(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Format a Markdown table, with the ratios of our samples per second to each other side's."""
    from benchmarks.kernels import show_ratios

    header = ["", "iteration", *PHASES, "samples/s", *(f"{side} is" for side in OURS)]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for side, rounds in figures.items():
        seconds = statistics.median(row["iteration"] for row in rounds)
        phases = [
            f"{statistics.median(row[phase] for row in rounds):.3f} s"
            for phase in PHASES
            if phase in rounds[0]
        ]
        cells = [side, f"{seconds:.3f} s", *(phases or [""] * len(PHASES))]
        cells.append(f"{BATCH / seconds:.1f}")
        times = {
            name: [row["iteration"] for row in rounds_of_side]
            for name, rounds_of_side in figures.items()
        }
        cells += ["" if side in OURS else show_ratios(times[side], times[ours]) for ours in OURS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Run the sides alternately and print the table."""
    description: Any = __doc__
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16")
    parser.add_argument("--deepspeed-python", help="Python interpreter with deepspeed")
    parser.add_argument("--deepspeed-chat", type=Path, help="directory that contains dschat")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        run_worker(args)
        return
    sides = [*OURS, "trl"]
    if args.deepspeed_python and args.deepspeed_chat:
        sides.append("deepspeed-chat")
    else:
        print("skipping DeepSpeed-Chat: set --deepspeed-python and --deepspeed-chat")
    figures: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        build_assets(Path(scratch))
        for number in range(args.rounds):
            for side, values in figures.items():
                values.append(run_side(args, side, Path(scratch)))
                seconds = values[-1]["iteration"]
                print(f"round {number + 1}, {side}: {seconds:.3f} s per iteration", flush=True)
    print(f"\n{format_table(figures)}")


if __name__ == "__main__":
    main(sys.argv[1:])
