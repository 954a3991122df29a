"""Step 2: train a reward model on pairs of responses, or on labels.

python -m step2_reward.train --config configs/opt-350m.yaml
torchrun --nproc_per_node 2 -m step2_reward.train --config configs/opt-350m.yaml
"""

from pipeline.cli.options import prepare_imports
from step2_reward.config import RewardConfig

if __name__ == "__main__":
    prepare_imports(RewardConfig)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.cli.options import run_main
from pipeline.models.forward.forward import Scorer, base_model, is_encoder
from pipeline.models.passes import get_scorer, make_passes
from pipeline.models.trained import limit_to_context, prepare_classifier
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.run.run import Run
from pipeline.run.training import (
    Rows,
    Training,
    check_finite,
    check_initial_metrics,
    check_rows,
    exporting_best,
    load_rows,
    run_step,
    set_up,
)
from pipeline.system.errors import ModelError
from pipeline.system.torch_process import seed_generators
from step2_reward.lab.measure import measure
from step2_reward.lab.sentences import write_measurement
from step2_reward.labels import resolve_labels
from step2_reward.objectives import HeldOutOutputs, Objective, make_objective
from step2_reward.rows import Batch, Row, split_rows

Evaluation = tuple[dict[str, float], HeldOutOutputs]


@dataclass(frozen=True)
class RewardTraining:
    """A reward model in training."""

    training: Training[RewardConfig, Row, Rows]
    objective: Objective

    scorer: Scorer
    """Runs the model in its engine, or in all stages of a pipeline."""

    def evaluate(self) -> Evaluation:
        """Return the metrics of the held-out rows, and the model's outputs."""
        training = self.training
        return self.objective.evaluate(self.scorer, training.held_out, training.config)


def train(config: RewardConfig) -> Path:
    """Train the reward model; return the directory of the exported model."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)
    rows = load_rows(config, config.model, step=2)
    with Run(config, name="step2_reward", total_steps=rows.total_steps, mesh=mesh) as run:
        reward = load_model(config, rows, run)
        training, best = reward.training, reward.training.best
        before = training.checkpoints.once("before", lambda: reward.evaluate()[0])
        check_initial_metrics(config.model.path, before)
        if training.checkpoints.done == 0:
            run.log_eval(0, before)

        def out_of_patience() -> bool:
            return best.worse_in_a_row == config.patience

        best_evaluation: Evaluation | None = None
        with exporting_best(run, best, training.export, model=config.model):
            for step in training.checkpoints.steps(should_stop=out_of_patience):
                take_step(reward, run, step=step)
                if training.evaluates_after(step):
                    evaluation = reward.evaluate()
                    metrics = evaluation[0]
                    best.update(selection_loss(metrics, config.best_by), step=step)
                    if best.step == step or not config.keep_best:
                        best_evaluation = evaluation
                    run.log_eval(step, metrics)
                    check_finite(f"of held-out rows after step {step}", metrics)
        finish(reward, run, before=before, best_evaluation=best_evaluation)
    return config.output_dir


def load_model(config: RewardConfig, rows: Rows, run: Run) -> RewardTraining:
    """Load the reward model into its engine, and restore the run's state if it is resumed.

    Raises:
        ModelError: the labels are steps, which an encoder can't score.
    """
    labels = resolve_labels(config, rows.data.train, rows.data.eval)
    objective = make_objective(labels, config)
    model = prepare_classifier(
        config.model,
        rows.tokenizer,
        device=local_device(),
        seed=config.seed,
        num_labels=labels.num_labels,
    )
    base_model(model).config.update({"label_kind": labels.kind})  # replaces an earlier step's
    passes = make_passes(
        model,
        config.model,
        config.parallel,
        run.mesh,
        lambda full: Scorer(full, kernels=config.model.kernels),
        total_steps=rows.total_steps,
        name="reward model",
    )
    config = limit_to_context(config, config.model)
    if labels.kind == "steps" and is_encoder(base_model(model)):
        raise ModelError(
            f"reward.model.path {config.model.path} is an encoder, which can't score steps; start"
            " from a language model"
        )
    check_rows(rows.data, objective.make_fit_check(rows.chat, config), config)
    held_out = objective.encode(rows.data.eval, rows.chat, config)
    training = set_up(config, model, passes.engine, rows, held_out, run, passes=passes)
    return RewardTraining(training, objective, get_scorer(passes, model))


def take_step(reward: RewardTraining, run: Run, *, step: int) -> None:
    """Take one optimizer step on the next rows, and log it."""
    passes, config, objective = reward.training.passes, reward.training.config, reward.objective
    engine, source = passes.engine, reward.training.rows
    rows = objective.encode(source.next_examples(), source.chat, config)
    right_counts: list[Tensor] = []

    def compute_loss(batch: Batch) -> Tensor:
        outputs: Tensor = engine(batch.tokens, labels=True)
        loss, right = objective.loss(outputs[batch.positions], batch)
        right_counts.extend([] if right is None else [right])
        return loss

    losses = passes.forward_backward(split_rows(rows, config), compute_loss, divisor=len(rows))
    result = engine.step()
    loss_sum, num_right = run.mesh.data.sums([passes.total(losses), passes.total(right_counts)])
    run.log(
        step,
        tokens=sum(row.num_tokens for row in rows),
        loss=loss_sum / len(rows),
        **({"accuracy": num_right / len(rows)} if objective.has_accuracy else {}),
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
        **passes.metrics(),
    )


def selection_loss(metrics: Mapping[str, float], best_by: str = "accuracy") -> float:
    """Return the metric that the best weights minimize: the fraction of wrong rows, or the loss.

    To break ties, the loss is added, scaled to count at most as much as one row in ten million.
    """
    if best_by == "loss":
        return metrics["loss"]
    return 1 - metrics["accuracy"] + 1e-9 * min(metrics["loss"], 100.0)


def finish(
    reward: RewardTraining,
    run: Run,
    *,
    before: Mapping[str, float],
    best_evaluation: Evaluation | None,
) -> None:
    """Export the best weights, and write the result.

    `best_evaluation` is the evaluation of the best weights, or None if it was lost in a restart.
    """
    training, labels = reward.training, reward.objective.labels
    best, config, rows = training.best, training.config, training.rows
    best.restore()
    after, held_out = best_evaluation if best_evaluation is not None else reward.evaluate()
    base_model(training.model).config.update(label_settings(reward))
    training.export()
    measurement = measure(held_out, labels, rows.data.eval, rows.chat, config)
    if run.is_main:
        write_measurement(measurement, config.output_dir)
    run.finish(
        eval={
            **_compare_metrics(before, after),
            ("pairs" if labels.kind == "pairs" else "rows"): len(training.held_out),
            "labels": labels.kind,
            "best_step": best.exported_step,
            **_get_reliability(measurement[0]),
        }
    )


def _compare_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return metrics before and after training; mean scores after it have no suffix."""
    metrics: dict[str, float] = {}
    for name, value in after.items():
        if name == "loss":
            continue
        metrics[f"{name}_before"] = before[name]
        metrics[name if name.startswith("mean_") else f"{name}_after"] = value
    return metrics


def _get_reliability(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the calibration error, temperature and length correlation, if measured."""
    calibration, length = metrics.get("calibration"), metrics.get("length")
    reliability: dict[str, float] = {}
    if calibration:
        reliability["calibration_error"] = calibration["ece"]
        reliability["temperature"] = calibration["temperature"]
    if length:
        reliability["length_correlation"] = length["spearman"]
    return reliability


def label_settings(reward: RewardTraining) -> dict[str, Any]:
    """Return the entries of config.json that describe the labels and the model's outputs."""
    labels = reward.objective.labels
    settings: dict[str, Any] = {"label_kind": labels.kind}
    if labels.classes:
        settings["class_list"] = list(labels.classes)
    if labels.kind == "classes":
        settings["id2label"] = dict(enumerate(labels.classes))
        settings["label2id"] = {name: index for index, name in enumerate(labels.classes)}
        if labels.values:
            settings["class_values"] = list(labels.values)
    if labels.kind == "scalar" and labels.loss == "mse":
        settings |= {"label_mean": labels.mean, "label_std": labels.std}
    return settings | reward.objective.config_entries()


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(RewardConfig, train, argv)


if __name__ == "__main__":
    run_main(main)
