"""Benchmark iterations of PPO or GRPO on one GPU, by phase, and profile the slowest parts.

    python -m benchmarks.ppo_gpu [--rollout 512] [--iterations 2]       # OPT-1.3B, PPO
    python -m benchmarks.ppo_gpu --model qwen2.5-1.5b --method grpo_2024
    python -m benchmarks.ppo_gpu --tiny             # with tiny models, on any device

Weights are random, and nothing is downloaded. Actor and reference are OPT-1.3B or have the shape of
Qwen2.5-1.5B; critic and reward model are OPT-350M. All are in bf16, actor and critic with fp32
master weights. An iteration generates 256 tokens for each prompt of 256 tokens, scores them, and
makes one update. The first is a warm-up; results are medians. For PPO, decoding steps (with all
rows, 64 and one), a micro-batch and an optimizer step are profiled. `share` is the time to read the
weights at the bandwidth of a copy, a lower bound for one row, divided by the measured time. TFLOP/s
count 6 operations per trained parameter and token; the target on an H100 is 45% of 989.
The exit code is 1 if PPO with OPT-1.3B misses 30 sequences per second, generation takes over 45%
of an iteration, or the peak of reserved memory exceeds 1.15 times the plan.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    OPTForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.device import (
    DEVICE,
    GPU,
    Fallbacks,
    Row,
    copy_bandwidth,
    emit,
    pop_peak_bytes,
    profile,
    synchronize,
    time_call,
)
from inference.engine.batch import OpenBatch
from inference.engine.requests import Request
from inference.engine.sampling import Sampler
from pipeline.budget.machine import detect_machine
from pipeline.budget.memory import step_memory
from pipeline.config import FrozenModelConfig, TrainedModelConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.demo.model import build_tokenizer
from pipeline.models.hf.chat import load_chat
from pipeline.parallel.process_group import process_group
from pipeline.system.logs import Clock
from pipeline.system.torch_process import use_expandable_segments
from pipeline.watchdog.process import watch_processes
from step3_ppo.config import PPOConfig
from step3_ppo.experience import check_rollout_gap, compute_advantages, score_responses
from step3_ppo.methods import METHODS
from step3_ppo.metrics import rollout_statistics
from step3_ppo.models import Models, load_models
from step3_ppo.rewards import score_to_reward
from step3_ppo.rollout import generate_responses
from step3_ppo.update import update_policy

PROMPT, ANSWER = 256, 256
MODELS = ("opt-1.3b", "qwen2.5-1.5b")

SEQUENCES_PER_SECOND = 30.0
GENERATION_SHARE = 0.45
OVER_PLAN = 1.15


def opt_config(width: int, **settings: Any) -> OPTConfig:  # noqa: ANN401
    """Return the config of an OPT without dropout; it has 24 layers, or 2 if `width` is 64."""
    sizes = {
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": 2 if width == 64 else 24,
        "num_attention_heads": width // 64,
        "word_embed_proj_dim": width,
        "max_position_embeddings": 2048,
    }
    return OPTConfig(dropout=0.0, **{**sizes, **settings})


def save_models(directory: Path, *, tiny: bool, model: str = MODELS[0]) -> int:
    """Save a random actor and reward model, and a tokenizer; return the vocabulary size."""
    tokenizer, is_opt = build_tokenizer(), model == MODELS[0]
    vocabulary = max(len(tokenizer), 512) if tiny else 50_272 if is_opt else 151_936
    common: Row = {
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }

    def qwen() -> Qwen2Config:
        return Qwen2Config(
            hidden_size=128 if tiny else 1536,
            intermediate_size=256 if tiny else 8960,
            num_hidden_layers=2 if tiny else 28,
            num_attention_heads=2 if tiny else 12,
            num_key_value_heads=1 if tiny else 2,
            tie_word_embeddings=True,
            **common,
        )

    torch.manual_seed(0)
    with DEVICE:
        large, small = (64, 64) if tiny else (2048, 1024)
        actor = OPTForCausalLM(opt_config(large, **common)) if is_opt else Qwen2ForCausalLM(qwen())
        like_350m = {"word_embed_proj_dim": small if tiny else 512, "do_layer_norm_before": tiny}
        reward = OPTForSequenceClassification(
            opt_config(small, num_labels=1, **like_350m, **common)
        )
    for name, module in {"actor": actor, "reward": reward}.items():
        module.to(torch.bfloat16).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return vocabulary


def load_ppo(
    directory: Path,
    *,
    trained: Row,
    iterations: int,
    rollout: int,
    **settings: Any,  # noqa: ANN401
) -> tuple[PPOConfig, Models]:
    """Build step 3's settings and load its models; `trained` applies to actor and critic."""
    torch.cuda.empty_cache()
    trained, reward = {"precision": "bf16", **trained}, str(directory / "reward")
    config = PPOConfig(
        actor=TrainedModelConfig(path=str(directory / "actor"), **trained),
        critic=TrainedModelConfig(path=reward, **trained),
        reward=FrozenModelConfig(path=reward, precision=trained["precision"]),
        missing_eos_score=None,
        batch_size=rollout,
        rollout_size=rollout,
        generation_batch_size=rollout,
        **{**METHODS[settings.get("method", "ppo")], **settings},
    )
    chat = load_chat(config.actor, config.data)
    return config, load_models(config, chat, iterations=iterations)


def iterate(models: Models, config: PPOConfig, *, step: int, vocabulary: int) -> Row:
    """Run an iteration on random prompts; return its times, peak memory and metrics.

    Raises:
        OffPolicyError: generation and training disagree on log-probabilities.
    """
    count, size = config.rollout_size, config.group_size
    shape = (count // size, config.max_prompt_length)
    random_ids = torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(step))
    prompts = random_ids.repeat_interleave(size, dim=0).tolist()
    synchronize()
    pop_peak_bytes()
    models.hybrid_engine.seconds = 0.0
    clock, peaks = Clock(), Row()

    def end_phase(phase: str) -> None:
        synchronize()
        clock.end(phase)
        peaks[phase] = pop_peak_bytes()

    keys = range(step * count, (step + 1) * count)
    responses = generate_responses(models, prompts, config, keys=keys)
    end_phase("generation")
    experience = score_responses(models, prompts, responses, config)
    assert experience.score is not None
    score = score_to_reward(experience.score, experience.stopped, models, config)
    rollout = compute_advantages(experience, score, config, kl_coef=config.kl_coef)
    end_phase("experience")
    updates = update_policy(models, rollout, config, step=step, forward=experience.forward)
    end_phase("training")
    statistics = rollout_statistics(rollout)
    check_rollout_gap(statistics, models)
    metrics, seconds = updates.metrics(), sum(clock.seconds.values())
    return {
        "iteration": seconds,
        "sequences_per_second": count / seconds,
        "sync": models.hybrid_engine.seconds,
        **clock.seconds,
        "generation_share": clock.seconds["generation"] / seconds,
        "tokens_per_second": sum(len(response.ids) for response in responses)
        / clock.seconds["generation"],
        "gap": statistics["rollout_gap_max"],
        **{name: metrics[name] for name in ("ratio_error", "actor_grad_norm", "skipped")},
        "peaks": peaks,
    }


def measure(directory: Path, vocabulary: int, args: argparse.Namespace) -> Row:
    """Run and report iterations; return their medians, and the planned and reserved memory."""
    prompt, answer = (16, 8) if args.tiny else (PROMPT, ANSWER)
    config, models = load_ppo(
        directory,
        trained={},
        iterations=args.iterations + 1,
        method=args.method,
        rollout=args.rollout,
        micro_batch_size=args.micro_batch,
        max_prompt_length=prompt,
        max_new_tokens=answer,
    )
    machine = detect_machine(processes=1, world=1, gpus=["0"] if GPU else [])
    planned = step_memory(config, machine=machine).peak("device")
    engines = models.trained.values()
    num_trained = sum(param.numel() for engine in engines for param in engine.model.parameters())
    iterations: list[Row] = []
    for step in range(1, args.iterations + 2):
        row = iterate(models, config, step=step, vocabulary=vocabulary)
        operations = 6 * num_trained * args.rollout * (prompt + answer)
        row["training_TFLOPs"] = operations / row["training"] / 1e12
        emit("iteration", method=args.method, model=args.model, step=step, **row)
        iterations.append(row)
    names = [name for name in iterations[0] if name != "peaks"]
    result = {name: statistics.median(row[name] for row in iterations[1:]) for name in names}
    reserved = max(max(row["peaks"].values()) for row in iterations)
    if args.method == "ppo":
        measure_decoding(models, prompt, args)
        measure_training(models, prompt + answer, args)
    return result | {"planned": planned, "reserved": reserved}


def measure_decoding(models: Models, prompt: int, args: argparse.Namespace) -> None:
    """Report decoding steps for several numbers of rows; for one row, also the bandwidth share."""
    sampler = Sampler(temperature=1.0, seed=0)
    with models.hybrid_engine.generating() as actor:
        floor = sum(param.nbytes for param in actor.parameters()) / copy_bandwidth()
        for rows in (2, 1) if args.tiny else (args.rollout, 64, 1):
            batch = OpenBatch(actor, num_slots=rows, capacity=prompt + 48)
            for row, ids in enumerate(torch.randint(3, 500, (rows, prompt)).tolist()):
                batch.submit(Request(tuple(ids), sampler, row, max_new_tokens=48))
            batch.close()
            prefill = time_call(batch.step)
            time_call(batch.step, count=6)
            figures = profile(batch.step, count=10)
            figures["share"] = floor / figures["seconds"] if rows == 1 else None
            emit("decoding", rows=rows, prefill=prefill, **figures, passes=vars(batch.passes))


def measure_training(models: Models, length: int, args: argparse.Namespace) -> None:
    """Report the forward and backward pass of an actor's micro-batch, and its optimizer step."""
    rows = [Encoded([5] * length, [False] + [True] * (length - 1))] * args.micro_batch
    batch = collate(rows).to(DEVICE)

    def run() -> None:
        models.actor.backward(models.actor(batch).logprobs.sum() / 1e6)

    run()
    emit("micro-batch", rows=args.micro_batch, tokens=length, **profile(run, count=2))
    models.actor.step()
    run()
    emit("optimizer step", seconds=time_call(models.actor.step))


def check_gates(result: Row) -> dict[str, bool]:
    """Return whether each requirement is met."""
    return {
        f"{SEQUENCES_PER_SECOND:.0f} sequences/s": result["sequences_per_second"]
        >= SEQUENCES_PER_SECOND,
        f"generation {GENERATION_SHARE:.0%}": result["generation_share"] <= GENERATION_SHARE,
        f"a peak of {OVER_PLAN} x the plan": result["reserved"] <= OVER_PLAN * result["planned"],
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report rows; return 1 if a requirement is not met."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--method", choices=("ppo", "grpo_2024"), default="ppo")
    parser.add_argument("--rollout", type=int, default=512, help="sequences per iteration")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=2, help="measured iterations")
    parser.add_argument("--tiny", action="store_true", help="use tiny models, without requirements")
    args = parser.parse_args(argv)
    if args.tiny:
        args.rollout, args.micro_batch, args.iterations = 8, 2, 1
    elif not GPU:
        parser.error("no GPU found; use --tiny to run the same steps on a CPU")

    use_expandable_segments()  # like a training step
    fallbacks = Fallbacks()
    with tempfile.TemporaryDirectory() as scratch, process_group(watch_processes):
        vocabulary = save_models(Path(scratch), tiny=args.tiny, model=args.model)
        result = measure(Path(scratch), vocabulary, args)
    fallbacks.report()
    gated = not args.tiny and args.model == MODELS[0] and args.method == "ppo"
    missed = [name for name, is_met in check_gates(result).items() if not is_met] if gated else []
    emit("median", ok=not missed, method=args.method, **result, missed=missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
