"""A PPO iteration on one GPU: OPT-1.3B and a 350M reward model. Takes under 20 minutes.

    bash scripts/measure_gpu.sh ppo [--rollout 512] [--iterations 3] [--output DIRECTORY]
    bash scripts/measure_gpu.sh ppo --tiny      # the same run with tiny models, on any device

Random weights, nothing is downloaded: actor and reference are OPT-1.3B, critic and reward model
OPT-350M, all in bf16, actor and critic with fp32 masters. An iteration generates 256 tokens for
each prompt of 256 tokens, runs the four models, and makes one update. The first is a warm-up;
figures are medians. Then a single prompt is answered: its time per token is bounded below by
reading the weights at the measured bandwidth of a copy. Gates: 30 sequences a second, generation at
most 45 % of an iteration, a token at most 1 / 0.6 of the time to read the weights. The exit code is
1 if a gate fails.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROMPT, ANSWER = 256, 256
VOCABULARY = 50_272

SEQUENCES_PER_SECOND = 30.0
GENERATION_SHARE = 0.45
BANDWIDTH_SHARE = 0.6


def save_models(directory: Path, *, tiny: bool) -> int:
    """Save an actor and a reward model with random weights, and a tokenizer; return its size."""
    from transformers import OPTConfig, OPTForCausalLM, OPTForSequenceClassification

    from pipeline.demo.model import build_tokenizer

    tokenizer = build_tokenizer()
    common: dict[str, Any] = {
        "vocab_size": max(len(tokenizer), 512) if tiny else VOCABULARY,
        "max_position_embeddings": 2048,
        "dropout": 0.0,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    large, small, toy = (
        {
            "hidden_size": width,
            "ffn_dim": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
        }
        for width, layers in ((2048, 24), (1024, 24), (64, 2))
    )
    actor = OPTConfig(
        **common, **(toy if tiny else large), word_embed_proj_dim=64 if tiny else 2048
    )
    reward = OPTConfig(
        **common,
        **(toy if tiny else small),
        word_embed_proj_dim=64 if tiny else 512,
        do_layer_norm_before=tiny,
        num_labels=1,
    )
    torch.manual_seed(0)
    for name, kind, config in (
        ("actor", OPTForCausalLM, actor),
        ("reward", OPTForSequenceClassification, reward),
    ):
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = kind(config).to(torch.bfloat16)
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return common["vocab_size"]


def measure(directory: Path, vocabulary: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time per iteration, and per token of a single sequence."""
    from pipeline.config import FrozenModelConfig, TrainedModelConfig
    from pipeline.models.hf.chat import load_chat
    from step3_ppo.config import PPOConfig
    from step3_ppo.models import load_models

    prompt, answer = (16, 8) if args.tiny else (PROMPT, ANSWER)
    config = PPOConfig(
        actor=TrainedModelConfig(path=str(directory / "actor"), precision="bf16"),
        critic=TrainedModelConfig(path=str(directory / "reward"), precision="bf16"),
        reward=FrozenModelConfig(path=str(directory / "reward"), precision="bf16"),
        batch_size=args.rollout,
        rollout_size=args.rollout,
        micro_batch_size=args.micro_batch,
        generation_batch_size=args.rollout,
        max_prompt_length=prompt,
        max_new_tokens=answer,
        missing_eos_score=None,
    )
    tokenizer, chat = load_chat(config.actor, config.data)
    models = load_models(config, tokenizer, chat, iterations=args.iterations + 1)
    rounds = [
        iterate(models, config, step=step, count=args.rollout, length=prompt, vocabulary=vocabulary)
        for step in range(1, args.iterations + 2)
    ][1:]
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    with models.hybrid_engine.generating() as actor:
        return {
            **medians,
            "sequences_per_second": args.rollout / medians["iteration"],
            "generation_share": medians["generation"] / medians["iteration"],
            **alone(actor, prompt, answer),
        }


def iterate(
    models: Any,  # noqa: ANN401
    config: Any,  # noqa: ANN401
    *,
    step: int,
    count: int,
    length: int,
    vocabulary: int,
) -> dict[str, float]:
    """Seconds per iteration, total and by phase, on `count` random prompts of `length` tokens."""
    from pipeline.system.logs import Clock
    from step3_ppo.experience import compute_advantages, score_responses
    from step3_ppo.rewards import compute_reward
    from step3_ppo.rollout import generate_responses
    from step3_ppo.update import update_policy

    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(3, vocabulary, (count, length), generator=generator).tolist()
    wait()
    clock = Clock()
    keys = range(step * count, (step + 1) * count)
    responses = generate_responses(models, prompts, config, keys=keys)
    wait()
    clock.end("generation")
    experience = score_responses(models, prompts, responses, config)
    score = compute_reward(experience.score, experience.stopped, models, config)
    rollout = compute_advantages(experience, score, config, kl_coef=config.kl_coef)
    wait()
    clock.end("experience")
    update_policy(models, rollout, config, step=step, forward=experience.forward)
    wait()
    clock.end("training")
    phases = clock.seconds
    return {"sync": models.hybrid_engine.seconds, **phases, "iteration": sum(phases.values())}


def alone(actor: nn.Module, prompt: int, answer: int) -> dict[str, float]:
    """Seconds per token of a single sequence, and the bound from reading the weights."""
    from inference.generation import generate

    def seconds(new_tokens: int) -> float:
        began = time.perf_counter()
        generate(
            actor,
            [[5] * prompt],
            max_new_tokens=new_tokens,
            temperature=0.0,
            stop_ids=[],
            seed=0,
        )
        wait()
        return time.perf_counter() - began

    few = max(answer // 4, 2)
    for _ in range(2):
        seconds(few)
    token = statistics.median((seconds(answer) - seconds(few)) / (answer - few) for _ in range(3))
    weights = sum(param.nbytes for param in actor.parameters())
    floor = weights / bandwidth(next(actor.parameters()).device)
    return {"token_alone": token, "floor": floor, "bandwidth_share": floor / token}


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.zeros(
        1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(10):
        wait()
        began = time.perf_counter()
        target.copy_(source)
        wait()
        times.append(time.perf_counter() - began)
    return 2 * source.nbytes / statistics.median(times)


def wait() -> None:
    """Synchronize with the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gates(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return each requirement, and whether it is met."""
    return [
        (
            f"{found['sequences_per_second']:.1f} sequences/s, at least {SEQUENCES_PER_SECOND:.0f}",
            found["sequences_per_second"] >= SEQUENCES_PER_SECOND,
        ),
        (
            f"generation {found['generation_share']:.0%} of an iteration, at most"
            f" {GENERATION_SHARE:.0%}",
            found["generation_share"] <= GENERATION_SHARE,
        ),
        (
            f"a token alone at {found['bandwidth_share']:.0%} of the memory's bandwidth, at least"
            f" {BANDWIDTH_SHARE:.0%}",
            found["bandwidth_share"] >= BANDWIDTH_SHARE,
        ),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and print the results; return 1 if a gate fails."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollout", type=int, default=512, help="sequences of an iteration")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=3, help="besides the first")
    parser.add_argument("--tiny", action="store_true", help="toys, and no gates")
    parser.add_argument("--output", type=Path, default=Path("output/ppo_gpu"))
    args = parser.parse_args(argv)
    if args.tiny:
        args.rollout, args.micro_batch, args.iterations = 4, 2, 1
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs the same course anywhere")

    from pipeline.parallel.process_group import process_group
    from pipeline.watchdog.process import watching

    with tempfile.TemporaryDirectory() as scratch, process_group(watching):
        vocabulary = save_models(Path(scratch), tiny=args.tiny)
        found = measure(Path(scratch), vocabulary, args)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found |= {"card": card, "torch": torch.__version__}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(found, indent=1))
    print("| iteration | sync | generation | experience | training | sequences/s | token alone |")
    print("|---|---|---|---|---|---|---|")
    seconds = " | ".join(
        f"{found[name]:.3f} s"
        for name in ("iteration", "sync", "generation", "experience", "training")
    )
    rate, token = found["sequences_per_second"], 1000 * found["token_alone"]
    print(f"| {seconds} | {rate:.1f} | {token:.2f} ms |")
    verdicts = gates(found)
    if args.tiny:
        return 0
    for sentence, holds in verdicts:
        print(f"{'holds' if holds else 'FAILS'}: {sentence}")
    return 0 if all(holds for _, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
