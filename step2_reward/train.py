"""Step 2: a reward model from pairs of responses.

python -m step2_reward.train --config configs/reward/opt-350m.yaml --actor.path DIR
torchrun --nproc_per_node 2 -m step2_reward.train --config configs/reward/opt-350m.yaml
"""

from pipeline.cli import before_imports
from step2_reward.config import RewardConfig

if __name__ == "__main__":
    before_imports(RewardConfig)

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from pipeline.cli import run_main
from pipeline.data.pairs import EncodedPair
from pipeline.divergence import check_finite, check_start, keeping_best
from pipeline.engine.engine import Engine
from pipeline.models.card import Card
from pipeline.models.chat import require_same_chat
from pipeline.models.forward import Scorer
from pipeline.models.load import load_tokenizer
from pipeline.models.trained import evaluating, trained_classifier, within_context
from pipeline.offline import Rows, Training, load_rows, set_up
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.random_state import seed_generators
from pipeline.run import Run
from pipeline.run_step import run_step
from step2_reward.losses import pairwise_loss
from step2_reward.normalization import measure_scores, write_normalization
from step2_reward.pairs import check_pairs, cut, encode

METHOD = (
    "Trained on pairs of responses, one of which was preferred (Bradley-Terry; Ouyang et al. 2022);"
    " its one label is the score of a dialogue."
)


def train(config: RewardConfig) -> Path:
    """Train the reward model; return the directory of the exported model."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)  # of adapter dropout
    rows = load_rows(config, config.model, step=2)
    if config.actor.path is not None:
        actor = load_tokenizer(config.actor)
        require_same_chat(rows.tokenizer, actor, "the reward model", config.actor)
    with Run(config, name="step2_reward", total_steps=rows.total_steps, mesh=mesh) as run:
        reward = load_model(config, rows, run)
        engine, held_out, best, config = reward.engine, reward.held_out, reward.best, reward.config
        scorer = cast("Scorer", engine.model)
        before = reward.checkpoints.once("before", lambda: evaluate(scorer, held_out, config))
        check_start(config.model.path, before)
        if reward.checkpoints.done == 0:
            run.evaluated(0, before)

        with keeping_best(run, best, reward.export, model=config.model):
            for step in reward.checkpoints.steps():
                batch = encode(rows.next_examples(), rows.chat, config)
                learn(engine, batch, run, step=step, config=config)
                if reward.evaluates_after(step):
                    figures = evaluate(scorer, held_out, config)
                    best.update(badness(figures), step=step)
                    run.evaluated(step, figures)
                    check_finite(f"of held-out pairs after step {step}", figures)
        finish(reward, scorer, run, before=before)
    return config.output_dir


def load_model(config: RewardConfig, rows: Rows, run: Run) -> Training[RewardConfig, EncodedPair]:
    """The reward model in its engine, with the state of an earlier run where this one goes on."""
    model = trained_classifier(
        config.model, rows.tokenizer, device=local_device(), seed=config.seed
    )
    scorer = Scorer(model, kernels=config.model.kernels)
    engine = Engine(
        scorer,
        config.model,
        total_steps=rows.total_steps,
        name="reward model",
        group=run.mesh.data,
    )
    config = within_context(config, model)
    check_pairs(rows.data, rows.chat, config)
    held_out = encode(rows.data.eval, rows.chat, config)
    return set_up(config, model, engine, rows, held_out, run)


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
    loss_sum, num_right = run.mesh.data.sums(totals)
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
        total / max(1, len(pairs)) for total in current_mesh().data.sums(totals)
    )
    return {
        "loss": loss,
        "accuracy": accuracy,
        "mean_chosen": mean_chosen,
        "mean_rejected": mean_rejected,
    }


def finish(
    reward: Training[RewardConfig, EncodedPair],
    scorer: Scorer,
    run: Run,
    *,
    before: Mapping[str, float],
) -> None:
    """Export the best weights with the moments of their scores, and write the result."""
    best, config = reward.best, reward.config
    best.restore()
    after = evaluate(scorer, reward.held_out, config)
    reward.export()
    moments = measure_scores(scorer, reward.rows.chat, reward.rows.data.train, config)
    write_normalization(reward.model, config.output_dir, mean=moments.mean, std=moments.std)
    run.finish(
        eval={
            "accuracy_before": before["accuracy"],
            "accuracy_after": after["accuracy"],
            "mean_chosen": after["mean_chosen"],
            "mean_rejected": after["mean_rejected"],
            "mean_chosen_before": before["mean_chosen"],
            "mean_rejected_before": before["mean_rejected"],
            "pairs": len(reward.held_out),
            "best_step": best.step if config.keep_best else best.last_step,
            "score_mean": moments.mean,
            "score_std": moments.std,
            "score_stop_rate": moments.stop_rate,
        },
        models={".": Card("Reward model", METHOD, config.model.path or "", ("reward-model",))},
    )


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(RewardConfig, train, argv, section="reward")


if __name__ == "__main__":
    run_main(main)
