"""Step 2: a reward model from pairs of responses, or from labels.

python -m step2_reward.train --config configs/opt-350m.yaml --actor.path DIR
torchrun --nproc_per_node 2 -m step2_reward.train --config configs/opt-350m.yaml
"""

from pipeline.cli.options import before_imports
from step2_reward.config import RewardConfig

if __name__ == "__main__":
    before_imports(RewardConfig)

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from inference.generation import generate
from pipeline.cli.options import run_main
from pipeline.config import DataConfig
from pipeline.data.batches import collate_part, local_micro_batches
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.models.forward.forward import Scorer, base_model, context_length, reads_whole
from pipeline.models.hf.chat import decode_response, load_chat, require_same_chat
from pipeline.models.hf.export import move_in
from pipeline.models.hf.load import load_causal_lm, load_tokenizer
from pipeline.models.passes import evaluating, make_passes, scorer_of
from pipeline.models.trained import trained_classifier, within_context
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.run.run import Run
from pipeline.run.training import (
    Rows,
    Training,
    check_finite,
    check_rows,
    check_start,
    keeping_best,
    load_rows,
    run_step,
    set_up,
)
from pipeline.system.errors import ModelError
from pipeline.system.torch_process import seed_generators
from step2_reward.lab.measure import measure
from step2_reward.lab.sentences import write_measured
from step2_reward.labels import resolve_labels
from step2_reward.objectives import HeldOut, Objective, make_objective
from step2_reward.rows import Batch, Row, cut_rows

logger = logging.getLogger(__name__)


Evaluation = tuple[dict[str, float], HeldOut]


@dataclass(frozen=True)
class RewardTraining:
    """A reward model in training."""

    training: Training[RewardConfig, Row, Rows]
    objective: Objective

    scorer: Scorer
    """Runs the model in its engine, or in all stages of a pipeline."""

    def evaluate(self) -> Evaluation:
        """Metrics of the held-out rows, and the model's outputs for them."""
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
        before = training.checkpoints.once("before", lambda: reward.evaluate()[0])
        check_start(config.model.path, before)
        if training.checkpoints.done == 0:
            run.evaluated(0, before)

        def enough() -> bool:
            return best.worse_in_a_row == config.patience

        kept: Evaluation | None = None
        with keeping_best(run, best, training.export, model=config.model):
            for step in training.checkpoints.steps(enough=enough):
                learn(reward, run, step=step)
                if training.evaluates_after(step):
                    evaluation = reward.evaluate()
                    figures = evaluation[0]
                    best.update(badness(figures, config.best_by), step=step)
                    if best.step == step or not config.keep_best:
                        kept = evaluation
                    run.evaluated(step, figures)
                    check_finite(f"of held-out rows after step {step}", figures)
        finish(reward, run, before=before, kept=kept)
    return config.output_dir


def load_model(config: RewardConfig, rows: Rows, run: Run) -> RewardTraining:
    """Load the reward model into its engine, and with `resume` the state of an earlier run.

    Raises:
        ModelError: an encoder can't judge steps.
    """
    labels = resolve_labels(config, rows.data.train, rows.data.eval)
    objective = make_objective(labels, config)
    model = trained_classifier(
        config.model,
        rows.tokenizer,
        device=local_device(),
        seed=config.seed,
        num_labels=labels.num_labels,
    )
    base_model(model).config.update({"label_kind": labels.kind})  # replaces an earlier training's
    passes = make_passes(
        model,
        config.model,
        config.parallel,
        run.mesh,
        lambda full: Scorer(full, kernels=config.model.kernels),
        total_steps=rows.total_steps,
        name="reward model",
    )
    config = within_context(config, config.model)
    if labels.kind == "steps" and reads_whole(base_model(model)):
        raise ModelError(
            f"reward.model.path {config.model.path} is an encoder, which can't score steps; start"
            " from a language model"
        )
    check_rows(rows.data, objective.rows_fit(rows.chat, config), config)
    held_out = objective.encode(rows.data.eval, rows.chat, config)
    training = set_up(config, model, passes.engine, rows, held_out, run, passes=passes)
    return RewardTraining(training, objective, scorer_of(passes, model))


def learn(reward: RewardTraining, run: Run, *, step: int) -> None:
    """Take one optimizer step on the next rows, and log it."""
    passes, config, objective = reward.training.passes, reward.training.config, reward.objective
    engine, source = passes.engine, reward.training.rows
    rows = objective.encode(source.next_examples(), source.chat, config)
    rights: list[Tensor] = []

    def compute_loss(batch: Batch) -> Tensor:
        outputs: Tensor = engine(batch.tokens, labels=True)
        loss, right = objective.loss(outputs[batch.positions], batch)
        rights.extend([] if right is None else [right])
        return loss

    losses = passes.learn(cut_rows(rows, config), compute_loss, divisor=len(rows))
    result = engine.step()
    loss_sum, num_right = run.mesh.data.sums([passes.total(losses), passes.total(rights)])
    run.log(
        step,
        tokens=sum(row.num_tokens for row in rows),
        loss=loss_sum / len(rows),
        **({"accuracy": num_right / len(rows)} if objective.counts_right else {}),
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
        **passes.metrics(),
    )


def badness(figures: Mapping[str, float], best_by: str = "accuracy") -> float:
    """The metric that the best weights minimize: the fraction of wrong rows, or the loss.

    The loss is added as a tie-breaker, scaled to less than half a row in a million.
    """
    if best_by == "loss":
        return figures["loss"]
    return 1 - figures["accuracy"] + 1e-9 * min(figures["loss"], 100.0)


MIN_ENDED = 8
"""Minimum number of finished responses for the moments; half of the prompts if that is less."""


@dataclass(frozen=True)
class Moments:
    """Moments of the score over responses that ended with the end token."""

    mean: float
    std: float
    stop_rate: float | None
    """Fraction of step 1's responses that ended; None without its responses."""


def measure_scores(
    scorer: Scorer,
    chat: ChatFormat,
    examples: Sequence[Example],
    config: RewardConfig,
    objective: Objective,
) -> Moments:
    """Mean and standard deviation of the score over responses sampled from step 1's model.

    They are exported with the model, and PPO's critic starts on their scale; PPO normalizes its
    rewards by its first rollout. Unfinished responses are left out: the reward model was not
    trained to score them. The data's own responses are scored instead if there is no step-1
    model, if hardly any of its responses ended, or if the rows label prompts.
    """
    data = current_mesh().data
    sequences: list[Encoded] = []
    stop_rate = None
    if config.actor.path is not None and any(example.chosen for example in examples):
        sequences, generated = sample_responses(examples, chat, config)
        ended, generated = data.sums([len(sequences), generated])
        stop_rate = ended / generated
        if ended < max(2, min(MIN_ENDED, generated / 2)):
            logger.warning(
                "only %d of %d responses of step 1's model ended within max_new_tokens %d:"
                " computing the score's mean and standard deviation from the responses in the data",
                ended,
                generated,
                config.max_new_tokens,
            )
            sequences = []
    if not data.sum(len(sequences)):
        own = objective.encode(data.share(examples[: config.normalization_prompts]), chat, config)
        sequences = [sequence for row in own for sequence in row.sequences]
    mean, std = mean_and_std(compute_scores(scorer, chat, sequences, config))
    return Moments(mean, std, stop_rate)


def compute_scores(
    scorer: Scorer, chat: ChatFormat, sequences: Sequence[Encoded], config: RewardConfig
) -> list[float]:
    """The score of each of this process's sequences. A collective."""
    scores: list[float] = []
    with evaluating(scorer):
        max_tokens = config.micro_batch_size * config.data.max_length
        for part in local_micro_batches([len(row) for row in sequences], max_tokens=max_tokens):
            spare = Encoded.untrained([chat.stop_ids[0]])
            batch = collate_part([sequences[row] for row in part], spare=spare).to(local_device())
            scores += scorer.final_scores(batch).tolist()[: len(part)]
    return scores


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over the values of all processes; 1 if they do not vary."""
    total, count = current_mesh().data.sums([sum(values), len(values)])
    mean = total / count
    (squares,) = current_mesh().data.sums([sum((value - mean) ** 2 for value in values)])
    std = math.sqrt(squares / count)
    return mean, std if std > 1e-6 * max(1.0, abs(mean)) else 1.0


def sample_responses(
    examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
) -> tuple[list[Encoded], int]:
    """Sample responses from step 1's model to this process's share of prompts.

    Returns:
        The dialogues with a finished response, and the number of prompts.
    """
    unique = list({example.prompt: None for example in examples})[: config.normalization_prompts]
    rows = current_mesh().data.share(range(len(unique)))
    actor = load_causal_lm(config.actor, device=local_device(), seed=config.seed)
    limit = min(config.data.max_length, context_length(actor)) - 1
    # An encoder has its own tokenizer and reads the actor's responses as text.
    own = load_chat(config.actor, DataConfig()) if chat.begins_with_cls else chat
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
        full = Encoded(prompt + response.ids, trained)
        if own is not chat:
            text = decode_response(own.tokenizer, response.text_ids)
            full = chat.encode(unique[row], (Message("assistant", text),))
        ended.append(full.tail(config.data.max_length, keep_first=chat.begins_with_cls))
    return ended, len(prompts)


def finish(
    reward: RewardTraining, run: Run, *, before: Mapping[str, float], kept: Evaluation | None
) -> None:
    """Export the best weights with the moments of their scores, and write the result.

    `kept` is the evaluation of the best weights; None if an earlier run made it.
    """
    training, labels = reward.training, reward.objective.labels
    best, config, rows = training.best, training.config, training.rows
    best.restore()
    after, held_out = kept if kept is not None else reward.evaluate()
    settings = label_settings(reward)
    base_model(training.model).config.update(settings)
    training.export()
    moments = None
    logger.info("scoring responses and held-out rows with the exported weights")
    if labels.gives_scores:
        moments = measure_scores(
            reward.scorer, rows.chat, rows.data.train, config, reward.objective
        )
        settings |= {"score_mean": moments.mean, "score_std": moments.std}
    write_settings(training.model, config.output_dir, settings)
    measured = measure(held_out, labels, rows.data.eval, rows.chat, config)
    if run.is_main:
        write_measured(measured, config.output_dir)
    name = labels.kind
    run.finish(
        eval={
            **_before_and_after(before, after),
            ("pairs" if name == "pairs" else "rows"): len(training.held_out),
            "labels": name,
            "best_step": best.exported_step,
            **({f"score_{key}": x for key, x in vars(moments).items()} if moments else {}),
            **_trust(measured[0]),
        }
    )


def write_settings(model: nn.Module, directory: Path, settings: Mapping[str, object]) -> None:
    """Add settings, such as the mean of the scores, to the exported model's config.json."""
    config = base_model(model).config
    config.update(dict(settings))
    if current_mesh().is_main:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as staging:
            config.save_pretrained(staging)
            move_in(Path(staging), directory)


def _before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Each metric before and after; mean scores, for the report, only after."""
    figures: dict[str, float] = {}
    for name, value in after.items():
        if name == "loss":
            continue
        figures[f"{name}_before"] = before[name]
        figures[name if name.startswith("mean_") else f"{name}_after"] = value
    return figures


def _trust(figures: Mapping[str, Any]) -> dict[str, float]:
    """Calibration error, temperature and length correlation, if known."""
    calibration, length = figures.get("calibration"), figures.get("length")
    found: dict[str, float] = {}
    if calibration:
        found["calibration_error"] = calibration["ece"]
        found["temperature"] = calibration["temperature"]
    if length:
        found["length_correlation"] = length["spearman"]
    return found


def label_settings(reward: RewardTraining) -> dict[str, Any]:
    """Entries of config.json: the kind of label, classes and their values, steps."""
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
    return settings | reward.objective.settings()


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(RewardConfig, train, argv)


if __name__ == "__main__":
    run_main(main)
