"""Step 2: a reward model from pairs of responses.

python -m step2_reward.train --config configs/reward/opt-350m.yaml --actor.path DIR
torchrun --nproc_per_node 2 -m step2_reward.train --config configs/reward/opt-350m.yaml
"""

from pipeline.cli import help_before_imports
from step2_reward.config import RewardConfig

if __name__ == "__main__":
    help_before_imports(RewardConfig)

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.budget.start import check_memory
from pipeline.checkpoints import Checkpoints
from pipeline.cli import parse_step, run_main
from pipeline.compute_threads import compute_threads
from pipeline.data.batches import RowStream, TokenBatch, collate, micro_batches, num_steps
from pipeline.data.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.fingerprint import fingerprint
from pipeline.data.lengths import Fit, check_lengths
from pipeline.data.stages import StageData
from pipeline.data.step_rows import load_step_rows, record_prompts
from pipeline.distributed import (
    global_sums,
    is_main,
    local_device,
    process_group,
    rank,
    world_size,
)
from pipeline.divergence import check_finite, check_start, keeping_best
from pipeline.engine.best import BestWeights
from pipeline.engine.engine import Engine
from pipeline.evaluations import FORWARD_SHARE, evaluation_interval
from pipeline.models.card import Card
from pipeline.models.chat import load_chat, require_same_chat
from pipeline.models.export import export
from pipeline.models.forward import Scorer
from pipeline.models.load import load_tokenizer
from pipeline.models.trained import evaluating, trained_classifier, within_context
from pipeline.random_state import seed_generators
from pipeline.run import Run, configure_logging
from step2_reward.losses import pairwise_loss
from step2_reward.normalization import measure_scores, write_normalization

METHOD = (
    "Trained on pairs of responses, one of which was preferred (Bradley-Terry; Ouyang et al. 2022);"
    " its one label is the score of a dialogue."
)


@dataclass(frozen=True)
class EncodedPair:
    """Token ids of a prompt with its better and its worse response."""

    chosen: Encoded
    rejected: Encoded
    margin: float

    @property
    def num_tokens(self) -> int:
        """Of both sequences."""
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class PairBatch:
    """B pairs as 2 B sequences, the chosen ones first."""

    tokens: TokenBatch
    """Two sequences more where B is 0: a process without pairs still runs the same passes."""

    margin: Float[Tensor, " B"]

    def split(self, scores: Float[Tensor, " S"]) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected responses, each (B,)."""
        num_pairs = len(self.margin)
        return scores[:num_pairs], scores[num_pairs : 2 * num_pairs]


def train(config: RewardConfig) -> Path:
    """Train the reward model; return the directory of the exported model."""
    seed_generators(config.seed + rank())  # of adapter dropout
    tokenizer, chat = load_chat(config.model, config.data)
    if config.actor.path is not None:
        require_same_chat(tokenizer, load_tokenizer(config.actor), "the reward model", config.actor)
    data = load_step_rows(config, step=2)
    stream = RowStream(num_rows=len(data.train), batch_size=config.batch_size, seed=config.seed)
    total_steps = num_steps(
        num_rows=len(data.train),
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    with Run(config, name="step2_reward", total_steps=total_steps, is_main=is_main()) as run:
        model = trained_classifier(config.model, tokenizer, device=local_device(), seed=config.seed)
        scorer = Scorer(model, kernels=config.model.kernels)
        engine = Engine(scorer, config.model, total_steps=total_steps, name="reward model")
        config = within_context(config, model)
        check_pairs(data, chat, config)
        record_prompts(data.prompts, config)
        held_out = encode(data.eval, chat, config)
        every = evaluation_interval(
            config.eval_every,
            total_steps=total_steps,
            cost=FORWARD_SHARE * len(held_out) / config.batch_size,
        )
        best = BestWeights(engine, keep=config.keep_best)
        checkpoints = Checkpoints(
            run,
            engines={"model": engine},
            parts={"stream": stream, "best": best},
            tokenizer=tokenizer,
            data=fingerprint(data.train),
        )
        before = checkpoints.once("before", lambda: evaluate(scorer, held_out, config))
        check_start(config.model.path, before)
        if checkpoints.done == 0:
            run.evaluated(0, **before)

        def write() -> None:
            export(model, tokenizer, config.output_dir, weights=engine)

        with keeping_best(run, best, write, model=config.model):
            for step in checkpoints.steps():
                pairs = encode([data.train[row] for row in next(stream)], chat, config)
                learn(engine, pairs, run, step=step, config=config)
                if step == total_steps or step % every == 0:
                    figures = evaluate(scorer, held_out, config)
                    best.update(badness(figures), step=step)
                    run.evaluated(step, **figures)
                    check_finite(f"of held-out pairs after step {step}", figures)

        best.restore()
        after = evaluate(scorer, held_out, config)
        write()
        moments = measure_scores(scorer, chat, data.train, config)
        write_normalization(model, config.output_dir, mean=moments.mean, std=moments.std)
        run.finish(
            eval={
                "accuracy_before": before["accuracy"],
                "accuracy_after": after["accuracy"],
                "mean_chosen": after["mean_chosen"],
                "mean_rejected": after["mean_rejected"],
                "mean_chosen_before": before["mean_chosen"],
                "mean_rejected_before": before["mean_rejected"],
                "pairs": len(held_out),
                "best_step": best.step if config.keep_best else best.last_step,
                "score_mean": moments.mean,
                "score_std": moments.std,
                "score_stop_rate": moments.stop_rate,
            },
            models={".": Card("Reward model", METHOD, config.model.path or "", ("reward-model",))},
        )
    return config.output_dir


def learn(
    engine: Engine, pairs: Sequence[EncodedPair], run: Run, *, step: int, config: RewardConfig
) -> None:
    """Take one optimizer step on the pairs, and log it."""
    totals = [0.0, 0.0]
    for batch in cut(pairs, config):
        scores = engine(batch.tokens)[batch.tokens.last_tokens]
        chosen, rejected = batch.split(scores)
        loss = pairwise_loss(
            chosen,
            rejected,
            margin=batch.margin if config.margin else None,
            center_coef=config.center_coef,
        )
        engine.backward(loss / len(pairs))
        totals[0] += loss.item()
        totals[1] += (chosen > rejected).sum().item()
    result = engine.step()
    loss_sum, num_right = global_sums(totals)
    run.log(
        step,
        tokens=sum(pair.num_tokens for pair in pairs),
        loss=loss_sum / len(pairs),
        accuracy=num_right / len(pairs),
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
    )


def badness(figures: Mapping[str, float]) -> float:
    """What the best weights have least of: pairs in the wrong order; among equals, loss.

    The loss is a tie-breaker: it is too small here to outweigh half a pair of a million.
    """
    return 1 - figures["accuracy"] + 1e-9 * min(figures["loss"], 100.0)


def encode(
    examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
) -> list[EncodedPair]:
    """Token ids of both dialogues.

    What is longer than `max_length` loses its beginning: the score is read at the end.
    """
    limit = config.data.max_length
    return [
        EncodedPair(
            chosen=chat.encode(example.prompt, example.chosen).tail(limit),
            rejected=chat.encode(example.prompt, example.rejected).tail(limit),
            margin=example.margin or 0.0,
        )
        for example in examples
    ]


def check_pairs(data: StageData, chat: ChatFormat, config: RewardConfig) -> None:
    """Say how many pairs are cut; raise DataError where none is left that differs."""
    limit = config.data.max_length

    def fit(examples: Sequence[Example]) -> list[Fit]:
        fits = []
        for each in examples:
            chosen = chat.encode(each.prompt, each.chosen)
            rejected = chat.encode(each.prompt, each.rejected)
            differ = chosen.tail(limit).input_ids != rejected.tail(limit).input_ids
            fits.append(Fit(max(len(chosen), len(rejected)) > limit, int(differ)))
        return fits

    for name, examples in (("training pairs", data.train), ("evaluation pairs", data.eval)):
        check_lengths(
            examples,
            fit,
            config.data,
            name=name,
            end="beginning",
            empty="have equal responses",
        )


def cut(pairs: Sequence[EncodedPair], config: RewardConfig) -> list[PairBatch]:
    """This process's micro-batches of the pairs."""
    deterministic = config.model.zero.reduction == "deterministic"
    parts = micro_batches(
        [pair.num_tokens for pair in pairs],
        max_tokens=2 * config.micro_batch_size * config.data.max_length,
        num_processes=world_size(),
        process=rank(),
        at_least=math.ceil(len(pairs) / config.micro_batch_size) if deterministic else None,
    )
    return [collate_pairs([pairs[row] for row in part], spare=pairs[0]) for part in parts]


def collate_pairs(pairs: Sequence[EncodedPair], *, spare: EncodedPair) -> PairBatch:
    """The chosen sequences, then the rejected ones, end to end; `spare` where there are none."""
    present = pairs or [spare]
    sequences = [pair.chosen for pair in present] + [pair.rejected for pair in present]
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32)
    device = local_device()
    return PairBatch(collate(sequences).to(device), margin.to(device))


def evaluate(
    scorer: Scorer, pairs: Sequence[EncodedPair], config: RewardConfig
) -> dict[str, float]:
    """Loss, accuracy (ties count half) and mean scores over held-out pairs, of all processes."""
    totals = [0.0, 0.0, 0.0, 0.0]
    with evaluating(scorer):
        for batch in cut(pairs, config):
            chosen, rejected = batch.split(scorer.final_scores(batch.tokens))
            right = (chosen > rejected).sum() + 0.5 * (chosen == rejected).sum()
            totals[0] += right.item()
            totals[1] += chosen.sum().item()
            totals[2] += rejected.sum().item()
            totals[3] += pairwise_loss(chosen, rejected).item()
    accuracy, mean_chosen, mean_rejected, loss = (
        total / max(1, len(pairs)) for total in global_sums(totals)
    )
    return {
        "loss": loss,
        "accuracy": accuracy,
        "mean_chosen": mean_chosen,
        "mean_rejected": mean_rejected,
    }


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    config = parse_step(RewardConfig, argv)
    check_memory(config, section="reward")
    with compute_threads(config.threads), process_group(config.timeout_seconds):
        configure_logging(is_main=is_main())
        train(config)


if __name__ == "__main__":
    run_main(main)
