"""What the laboratory measures of a process reward model.

Dimension name: M labelled steps.
"""

from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.nn.functional as F

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.models.forward import Scorer
from step2_reward.config import RewardConfig
from step2_reward.lab.calibration import calibrate
from step2_reward.lab.figures import Measured, of_classes, share
from step2_reward.lab.steps import PredictedSteps, first_errors
from step2_reward.label_rows import Labels
from step2_reward.step_objective import StepObjective, step_texts

NAMES = ("right", "wrong")


def measure_steps(
    scorer: Scorer,
    labels: Labels,
    examples: Sequence[Example],
    chat: ChatFormat,
    config: RewardConfig,
) -> Measured:
    """The figures of a model on responses in steps; all processes call it."""
    objective = StepObjective(labels, config)
    encoded = objective.encode(examples, chat, config)
    _, predicted = objective.predict(scorer, encoded, config)
    logits = torch.tensor([logit for row in predicted for logit in row.logits])  # (M,)
    wrong = torch.tensor([int(each < 0.5) for row in predicted for each in row.targets])
    both = torch.stack([logits, torch.zeros_like(logits)], dim=1)
    errors = first_errors(predicted)
    found = of_classes(both.log_softmax(dim=1), wrong, NAMES)
    found["step_accuracy"] = found.pop("accuracy")
    count = errors.with_error + errors.without_error
    found["first_errors"] = {
        **asdict(errors),
        "f1": errors.f1,
        "accuracy": share(float(errors.found + errors.kept), count),
    }
    found["calibration"] = asdict(calibrate(both, wrong))
    lines = [
        prediction(example, row, config.step_separator)
        for example, row in zip(examples, predicted, strict=True)
    ]
    return Measured({"labels": labels.kind, "rows": len(examples), **found}, lines)


def prediction(example: Example, row: PredictedSteps, separator: str) -> dict[str, object]:
    """A row beside the probability that each of its labelled steps is right."""
    labelled = [at for at, label in enumerate(example.step_labels) if label is not None]
    probabilities: list[float | None] = [None] * len(example.steps)
    # What was cut off lies at the beginning.
    for at, logit in zip(reversed(labelled), reversed(row.logits), strict=False):
        probabilities[at] = F.sigmoid(torch.tensor(logit)).item()
    return {
        "origin": example.origin,
        "prompt": [{"role": each.role, "content": each.content} for each in example.prompt],
        "steps": step_texts(example, separator),
        "labels": list(example.step_labels),
        "probabilities": probabilities,
        "right": row.first_found == row.first_error,
    }
