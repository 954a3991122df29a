"""Measuring a model that is there: its labels by its config.json, its rows by a data path."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from inference.generation import generate
from pipeline.config import EMBEDDED, DataConfig, RowColumns
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.embedded import stage_examples
from pipeline.data.examples import Example, Message
from pipeline.data.rows.dialogues import with_history
from pipeline.data.rows.named import named_set
from pipeline.data.rows.shapes import check_fields, read_row
from pipeline.data.rows.sources import read_source
from pipeline.demo.task import verify
from pipeline.errors import DataError, ModelError
from pipeline.models.chat import check_ready, decode_response, require_score_head
from pipeline.models.forward import Scorer, base_model, context_length
from pipeline.models.load import load_for_inference, load_reward_for_inference
from pipeline.models.scores import Cutpoints
from pipeline.parallel.device import local_device
from step2_reward.config import RewardConfig
from step2_reward.lab.best_of import curve
from step2_reward.lab.config import LabConfig
from step2_reward.lab.measure import Measured, measure
from step2_reward.label_rows import NEEDS, OF_CLASSES, Labels, is_of, kind_of, name_of, resolve
from step2_reward.labelled import encode_dialogue
from step2_reward.outputs import outputs_of, scores_of

AT_ONCE = 16
"""Dialogues of a micro-batch."""


def measure_model(config: LabConfig) -> Measured:
    """The figures of the model at `config.path`.

    Raises:
        ModelError: there is none, or it is not a classifier.
        DataError: there are no rows, or none with the labels that the model has learned.
    """
    check_ready(config.path, scores=True)
    examples = read_examples(config)
    model, tokenizer = load_reward_for_inference(config.path)
    require_score_head(config.path, model.config.architectures)
    chat = resolve_format(tokenizer, "auto")
    limit = min(config.max_length, context_length(base_model(model)))
    settings = RewardConfig(
        data=DataConfig(max_length=limit),
        micro_batch_size=AT_ONCE,
        step_separator=getattr(model.config, "step_separator", "\n"),
    )
    labels = labels_of(model.config, examples, settings)
    rows = [row for row in examples if is_of(labels.kind, row)][: config.rows]
    if not rows:
        raise DataError(
            f"data_path {config.data_path}: none of its {len(examples)} rows has"
            f" {NEEDS[labels.kind]}, which a model of {labels.kind} is measured by"
        )
    if labels.kind in OF_CLASSES:
        check_classes(labels, rows)
    cutpoints = getattr(model.config, "cutpoints", None)
    scorer = Scorer(
        model,
        cutpoints=Cutpoints(cutpoints, device=local_device(), positive=labels.kind == "ties")
        if cutpoints
        else None,
    )
    measured = measure(scorer, labels, rows, chat, settings)
    if config.actor is not None:
        measured.figures["best_of"] = over_optimization(scorer, labels, chat, config, limit)
    return measured


def read_examples(config: LabConfig) -> list[Example]:
    """All labelled rows of the data path, of its test split where it has one."""
    if config.data_path == EMBEDDED:
        return stage_examples(step=2, seed=config.seed)[1]
    source = read_source(config.data_path, step=2)
    rows = source.eval or source.train
    if config.fields:
        check_fields(config.fields, {name for row in rows for name in row.columns})
    known = None if config.fields else named_set(source.name)
    kept = RowColumns(labels=True)
    found = [known.read(row) if known else read_row(row, config.fields, kept=kept) for row in rows]
    return [
        replace(each, prompt=with_history(each.prompt, config.history)) for each in found if each
    ]


def labels_of(settings: object, examples: Sequence[Example], config: RewardConfig) -> Labels:
    """What the model has learned: step 2 writes it into config.json; else it is as the rows say."""
    kind = getattr(settings, "label_kind", None)
    if kind is None:
        count = getattr(settings, "num_labels", 1)
        if count == 1:
            kind = kind_of(config, examples)
            kind = "scalar" if kind in OF_CLASSES else kind
        else:
            kind = "classes"
    names: dict[int, str] = getattr(settings, "id2label", None) or {}
    classes = tuple(getattr(settings, "class_list", ())) or tuple(names.values())
    values = tuple(getattr(settings, "class_values", ()))
    if kind in OF_CLASSES:
        loss = "cross_entropy" if kind == "classes" else "proportional_odds"
        return Labels(kind, loss, classes, values)
    if kind == "scalar":
        mean, std = (getattr(settings, name, None) for name in ("label_mean", "label_std"))
        if mean is None or std is None:
            return Labels(kind, "bce")
        return Labels(kind, "mse", mean=mean, std=std)
    if kind == "steps":
        return Labels(kind, "bce")
    chosen = replace(config, labels=kind)
    rows = [row for row in examples if is_of(kind, row)]
    return Labels("ties", "rao_kupper") if kind == "ties" else resolve(chosen, rows, [])


def check_classes(labels: Labels, rows: Sequence[Example]) -> None:
    """Raise DataError for a label that is none of the model's classes."""
    for row in rows:
        if name_of(row.label) not in labels.classes:
            raise DataError(
                f"{row.origin}: label {name_of(row.label)} is none of the model's classes,"
                f" {', '.join(labels.classes)}"
            )


def over_optimization(
    scorer: Scorer, labels: Labels, chat: ChatFormat, config: LabConfig, limit: int
) -> list[dict[str, object]]:
    """Proxy and truth of the actor's best of n answers, by the model and by the task's verifier."""
    assert config.actor is not None
    actor, tokenizer = load_for_inference(config.actor)
    own = resolve_format(tokenizer, "auto")
    questions = list(dict.fromkeys(row.prompt for row in stage_examples(step=3, seed=0)[1]))
    questions = questions[: config.prompts]
    slots = [question for question in questions for _ in range(config.best_of)]
    responses = generate(
        actor,
        [own.encode_prompt(question) for question in slots],
        max_new_tokens=64,
        temperature=1.0,
        stop_ids=own.stop_ids,
        seed=config.seed,
        keys=list(range(len(slots))),
    )
    texts = [decode_response(tokenizer, response.ids) for response in responses]
    rows = [
        encode_dialogue(chat, Example(question), (Message("assistant", text),), max_length=limit)
        for question, text in zip(slots, texts, strict=True)
    ]
    scores = scores_of(outputs_of(scorer, rows, max_tokens=AT_ONCE * limit), labels.values)
    if scores is None:
        raise ModelError(f"path {config.path}: its classes have no values, so there is no score")
    verdicts = [verify(q[-1].content, text) for q, text in zip(slots, texts, strict=True)]
    golds = [float(verdict is not None and verdict.both) for verdict in verdicts]

    def by_prompt(values: Sequence[float]) -> list[Sequence[float]]:
        return [values[at : at + config.best_of] for at in range(0, len(values), config.best_of)]

    return [asdict(each) for each in curve(by_prompt(scores.tolist()), by_prompt(golds))]
