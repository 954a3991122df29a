"""What step 2 leaves behind: the best weights, the unit of their scores, figures, a report."""

from collections.abc import Mapping
from typing import Any

from pipeline.models.card import Card
from pipeline.models.forward import Scorer, base_model
from pipeline.offline import Rows, Training
from pipeline.run import Run
from step2_reward.config import RewardConfig
from step2_reward.lab.measure import measure
from step2_reward.lab.write import write_measured
from step2_reward.label_rows import Labels
from step2_reward.normalization import Moments, measure_scores, write_settings
from step2_reward.objective import Objective

METHODS = {
    "pairs": "Trained on pairs of responses, one of which was preferred (Bradley-Terry; Ouyang et"
    " al. 2022); its one label is the score of a dialogue.",
    "ties": "Trained on pairs of responses, one of which was preferred or neither (Rao and Kupper"
    " 1967); its one label is the score of a dialogue.",
    "classes": "Trained to name the class of a dialogue.",
    "ordinal": "Trained on ordered classes (proportional odds; McCullagh 1980); its one label is"
    " the score of a dialogue.",
    "scalar": "Trained on ratings of dialogues; its one label is the score of a dialogue.",
    "rankings": "Trained on ranked lists of responses (Plackett-Luce; Ouyang et al. 2022); its one"
    " label is the score of a dialogue.",
    "steps": "Trained on steps of responses, each right or wrong (Lightman et al. 2023); its one"
    " label, read where a step ends, is the log-odds that the step is right.",
}
"""Of each kind of label, for the model's card."""


def finish(
    training: Training[RewardConfig, Any, Rows],
    objective: Objective[Any, Any],
    scorer: Scorer,
    run: Run,
    *,
    before: Mapping[str, float],
) -> None:
    """Export the best weights with the moments of their scores, and write the result."""
    best, config, labels = training.best, training.config, objective.labels
    best.restore()
    after = objective.evaluate(scorer, training.held_out, config)
    name_labels(training, labels)
    training.export()
    settings, moments = label_settings(training, labels, scorer) | objective.settings(), None
    base_model(training.model).config.update(settings)  # of which scores may be made
    if labels.gives_scores:
        moments = measure_scores(
            scorer, training.rows.chat, training.rows.data.train, config, objective
        )
        settings |= {"score_mean": moments.mean, "score_std": moments.std}
    write_settings(training.model, config.output_dir, settings)
    rows = training.rows
    measured = measure(scorer, labels, rows.data.eval, rows.chat, config)
    if run.is_main:
        write_measured(measured, config.output_dir)
    run.finish(
        eval={
            **both(before, after),
            ("pairs" if labels.kind == "pairs" else "rows"): len(training.held_out),
            "labels": labels.kind,
            "best_step": best.step if config.keep_best else best.last_step,
            **of_moments(moments),
            **trust(measured.figures),
        },
        models={
            ".": Card(
                "Reward model", METHODS[labels.kind], config.model.path or "", ("reward-model",)
            )
        },
    )


def both(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Each figure before and after; means of scores, which the report shows, by their own name."""
    figures: dict[str, float] = {}
    for name, value in after.items():
        if name == "loss":
            continue
        figures[f"{name}_before"] = before[name]
        figures[name if name.startswith("mean_") else f"{name}_after"] = value
    return figures


def of_moments(moments: Moments | None) -> dict[str, float | None]:
    """The figures of the scores' moments, where there are scores."""
    if moments is None:
        return {}
    return {
        "score_mean": moments.mean,
        "score_std": moments.std,
        "score_stop_rate": moments.stop_rate,
    }


def trust(figures: Mapping[str, Any]) -> dict[str, float]:
    """How far the model can be trusted, in three figures where they are known."""
    calibration, length = figures.get("calibration"), figures.get("length")
    found: dict[str, float] = {}
    if calibration:
        found |= {
            "calibration_error": calibration["ece"],
            "temperature": calibration["temperature"],
        }
    if length:
        found["length_correlation"] = length["spearman"]
    return found


def name_labels(training: Training[RewardConfig, Any, Rows], labels: Labels) -> None:
    """Give the model's labels the names of the classes, as `transformers` has them."""
    if labels.kind == "classes":
        settings = base_model(training.model).config
        settings.id2label = dict(enumerate(labels.classes))
        settings.label2id = {name: number for number, name in enumerate(labels.classes)}


def label_settings(
    training: Training[RewardConfig, Any, Rows], labels: Labels, scorer: Scorer
) -> dict[str, object]:
    """What config.json says of labels: which kind, classes and what they are worth, thresholds."""
    settings: dict[str, object] = {"label_kind": labels.kind}
    if labels.classes:
        settings["class_list"] = list(labels.classes)
    if labels.kind == "classes" and labels.values:
        settings["class_values"] = list(labels.values)
    if labels.kind == "scalar" and labels.loss == "mse":
        settings |= {"label_mean": labels.mean, "label_std": labels.std}
    with training.engine.gathered():
        cutpoints = scorer.thresholds()
    return settings if cutpoints is None else settings | {"cutpoints": cutpoints.tolist()}
