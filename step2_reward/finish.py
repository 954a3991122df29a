"""The end of step 2: normalization of scores, thresholds, and the export."""

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from inference.generation import generate
from pipeline.config import DataConfig
from pipeline.data.batches import collate_part, local_micro_batches
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.models.card import Card
from pipeline.models.chat import decode_response, load_chat
from pipeline.models.export import move_in
from pipeline.models.forward import Scorer, base_model, context_length
from pipeline.models.load import load_causal_lm
from pipeline.models.trained import evaluating
from pipeline.offline import Rows, Training
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.run import Run
from step2_reward.config import RewardConfig
from step2_reward.lab.measure import measure
from step2_reward.lab.sentences import write_measured
from step2_reward.label_rows import Labels
from step2_reward.objective import Objective

logger = logging.getLogger(__name__)


ENOUGH = 8
"""Responses of which moments are taken, or half of the prompts where these are fewer."""


@dataclass(frozen=True)
class Moments:
    """Moments of the score, over responses that ended by themselves."""

    mean: float
    std: float
    stop_rate: float | None
    """Share of step 1's responses that ended; None where it gave none."""


def measure_scores(
    scorer: Scorer,
    chat: ChatFormat,
    examples: Sequence[Example],
    config: RewardConfig,
    objective: Objective[Any, Any],
) -> Moments:
    """Mean and standard deviation of the score over responses that step 1's model samples.

    With them step 3 shifts and scales scores to mean 0, variance 1 where PPO starts (Ziegler et al.
    2019, section 2.1). A response without its end is none that the reward model was trained to
    score, and doesn't count. Without a step-1 model, where hardly any of its responses ended, and
    where the rows label prompts, the data's own are scored.
    """
    sequences: list[Encoded] = []
    stop_rate = None
    if config.actor.path is not None and any(example.chosen for example in examples):
        sequences, generated = responses_of_actor(examples, chat, config)
        ended, generated = current_mesh().data.sums([len(sequences), generated])
        stop_rate = ended / generated
        if ended < max(2, min(ENOUGH, generated / 2)):
            logger.warning(
                "only %d of %d responses of step 1's model ended within max_new_tokens %d: the"
                " score's mean and standard deviation are those of the data's own responses",
                ended,
                generated,
                config.max_new_tokens,
            )
            sequences = []
    if not current_mesh().data.sum(len(sequences)):
        own = examples[: config.normalization_prompts]
        sequences = responses_of_data(own, chat, config, objective)
    mean, std = mean_and_std(scores_of(scorer, chat, sequences, config))
    return Moments(mean, std, stop_rate)


def scores_of(
    scorer: Scorer, chat: ChatFormat, sequences: Sequence[Encoded], config: RewardConfig
) -> list[float]:
    """The score of each of this process's sequences; all processes call it."""
    scores: list[float] = []
    with evaluating(scorer):
        max_tokens = config.micro_batch_size * config.data.max_length
        for part in local_micro_batches([len(row) for row in sequences], max_tokens=max_tokens):
            spare = Encoded.untrained([chat.stop_ids[0]])
            batch = collate_part([sequences[row] for row in part], spare=spare).to(local_device())
            scores += scorer.final_scores(batch).tolist()[: len(part)]
    return scores


def write_settings(model: nn.Module, directory: Path, settings: Mapping[str, object]) -> None:
    """Add settings, such as the mean of the scores, to the exported model's config.json."""
    config = base_model(model).config
    config.update(dict(settings))
    if current_mesh().is_main:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as staging:
            config.save_pretrained(staging)
            move_in(Path(staging), directory)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the values of all processes; 1 where they do not vary."""
    total, count = current_mesh().data.sums([sum(values), len(values)])
    mean = total / count
    (squares,) = current_mesh().data.sums([sum((value - mean) ** 2 for value in values)])
    std = math.sqrt(squares / count)
    return mean, std if std > 1e-6 * max(1.0, abs(mean)) else 1.0


def responses_of_actor(
    examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
) -> tuple[list[Encoded], int]:
    """This process's share of prompts with responses of step 1's model, and how many were asked.

    Those that did not end are left out.
    """
    unique = list({example.prompt: None for example in examples})[: config.normalization_prompts]
    rows = current_mesh().data.share(range(len(unique)))
    actor = load_causal_lm(config.actor, device=local_device(), seed=config.seed)
    limit = min(config.data.max_length, context_length(actor)) - 1
    # An encoder has a tokenizer of its own, and is given the text of the actor's responses.
    own = load_chat(config.actor, DataConfig())[1] if chat.begins_with_cls else chat
    prompts = [own.encode_prompt(unique[row])[-limit:] for row in rows]
    responses = generate(
        actor,
        prompts,
        max_new_tokens=config.max_new_tokens,
        temperature=1.0,
        stop_ids=own.stop_ids,
        seed=config.seed,
        keys=rows,
    )
    ended: list[Encoded] = []
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        if not response.stopped:
            continue
        trained = [False] * len(prompt) + [True] * len(response.ids)
        whole = Encoded(prompt + response.ids, trained)
        if own is not chat:
            text = decode_response(own.tokenizer, response.ids)
            whole = chat.encode(unique[row], (Message("assistant", text),))
        ended.append(whole.tail(config.data.max_length, keep_first=chat.begins_with_cls))
    return ended, len(prompts)


def responses_of_data(
    examples: Sequence[Example],
    chat: ChatFormat,
    config: RewardConfig,
    objective: Objective[Any, Any],
) -> list[Encoded]:
    """The dialogues of this process's share of rows."""
    rows = objective.encode(current_mesh().data.share(examples), chat, config)
    return [sequence for row in rows for sequence in objective.sequences(row)]


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
