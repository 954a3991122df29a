"""Step 2: a reward model from pairs of responses, or from labels.

python -m step2_reward.train --config configs/opt-350m.yaml --actor.path DIR
torchrun --nproc_per_node 2 -m step2_reward.train --config configs/opt-350m.yaml
"""

from pipeline.cli import before_imports
from step2_reward.config import RewardConfig

if __name__ == "__main__":
    before_imports(RewardConfig)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.cli import run_main
from pipeline.divergence import check_finite, check_start, keeping_best
from pipeline.errors import ModelError
from pipeline.models.chat import require_same_chat
from pipeline.models.forward import LabelOutputs, Scorer, base_model, reads_whole
from pipeline.models.load import load_tokenizer
from pipeline.models.passes import passes_of, scorer_of
from pipeline.models.trained import trained_classifier, within_context
from pipeline.offline import Rows, Training, check_rows, load_rows, set_up
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.run import Run
from pipeline.run_step import run_step
from pipeline.system.torch_process import seed_generators
from step2_reward.finish import finish
from step2_reward.label_rows import resolve
from step2_reward.objective import Batch, Objective
from step2_reward.objectives import objective_of


@dataclass(frozen=True)
class RewardTraining:
    """A reward model that learns."""

    training: Training[RewardConfig, Any, Rows]
    objective: Objective[Any, Any]

    scorer: Scorer
    """What is asked for scores: the model in its engine, or all stages of it."""

    def evaluate(self) -> dict[str, float]:
        """Figures of the held-out rows."""
        training = self.training
        return self.objective.evaluate(self.scorer, training.held_out, training.config)


def train(config: RewardConfig) -> Path:
    """Train the reward model; return the directory of the exported model."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)
    rows = load_rows(config, config.model, step=2)
    if config.actor.path is not None and not rows.chat.begins_with_cls:
        require_same_chat(
            rows.tokenizer, load_tokenizer(config.actor), "the reward model", config.actor
        )
    with Run(config, name="step2_reward", total_steps=rows.total_steps, mesh=mesh) as run:
        reward = load_model(config, rows, run)
        training, best = reward.training, reward.training.best
        before = training.checkpoints.once("before", reward.evaluate)
        check_start(config.model.path, before)
        if training.checkpoints.done == 0:
            run.evaluated(0, before)

        def enough() -> bool:
            return best.worse_in_a_row == config.patience

        with keeping_best(run, best, training.export, model=config.model):
            for step in training.checkpoints.steps(enough=enough):
                learn(reward, run, step=step)
                if training.evaluates_after(step):
                    figures = reward.evaluate()
                    best.update(badness(figures, config.best_by), step=step)
                    run.evaluated(step, figures)
                    check_finite(f"of held-out rows after step {step}", figures)
        finish(training, reward.objective, reward.scorer, run, before=before)
    return config.output_dir


def load_model(config: RewardConfig, rows: Rows, run: Run) -> RewardTraining:
    """The reward model in its engine, with the state of an earlier run where this one goes on."""
    labels = resolve(config, rows.data.train, rows.data.eval)
    objective: Objective[Any, Any] = objective_of(labels, config)
    model = trained_classifier(
        config.model,
        rows.tokenizer,
        device=local_device(),
        seed=config.seed,
        num_labels=labels.num_labels,
        defer=True,
    )
    base_model(model).config.update({"label_kind": labels.kind})  # not that of an earlier training
    cutpoints = objective.cutpoints()
    passes = passes_of(
        model,
        config.model,
        config.parallel,
        run.mesh,
        lambda whole: Scorer(whole, kernels=config.model.kernels, cutpoints=cutpoints),
        total_steps=rows.total_steps,
        name="reward model",
    )
    config = within_context(config, model)
    if labels.kind == "steps" and reads_whole(base_model(model)):
        raise ModelError(
            f"reward.model.path {config.model.path} reads a response as a whole, as encoders do,"
            " and can't judge it step by step; start from a language model"
        )
    check_rows(rows.data, objective.rows_fit(rows.chat, config), config)
    held_out = objective.encode(rows.data.eval, rows.chat, config)
    training = set_up(config, model, passes.engine, rows, held_out, run, passes=passes)
    return RewardTraining(training, objective, scorer_of(passes, model, cutpoints))


def learn(reward: RewardTraining, run: Run, *, step: int) -> None:
    """Take one optimizer step on the next rows, and log it."""
    passes, config, objective = reward.training.passes, reward.training.config, reward.objective
    engine, batch = passes.engine, reward.training.rows
    rows = objective.encode(batch.next_examples(), batch.chat, config)
    rights: list[Tensor] = []

    def loss_of(part: Batch) -> Tensor:
        outputs: LabelOutputs = engine(part.tokens, labels=True)
        loss, right = objective.loss(outputs.at(objective.places(part)), part)
        rights.extend([] if right is None else [right])
        return loss

    losses = passes.learn(objective.cut(rows, config), loss_of, divisor=len(rows))
    result = engine.step()
    loss_sum, num_right = run.mesh.data.sums([passes.total(losses), passes.total(rights)])
    run.log(
        step,
        reward.training.at_peak(sequence for row in rows for sequence in objective.sequences(row)),
        tokens=sum(row.num_tokens for row in rows),
        loss=loss_sum / len(rows),
        **({"accuracy": num_right / len(rows)} if objective.counts_right else {}),
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
        **passes.metrics(),
    )


def badness(figures: Mapping[str, float], best_by: str = "accuracy") -> float:
    """What the best weights have least of: rows that are wrong, among equals loss; or loss.

    As a tie-breaker the loss is too small to outweigh half a row of a million.
    """
    if best_by == "loss":
        return figures["loss"]
    return 1 - figures["accuracy"] + 1e-9 * min(figures["loss"], 100.0)


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(RewardConfig, train, argv, section="reward")


if __name__ == "__main__":
    run_main(main)
