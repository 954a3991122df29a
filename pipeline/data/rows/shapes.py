"""From rows to examples: the shapes that preference, chat and instruction data come in.

A shape is recognised by the columns it needs. The first one in `SHAPES` whose columns a row has
reads the row.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import RowColumns
from pipeline.data.examples import Example, Message
from pipeline.data.rows.columns import (
    ALL_TIED,
    BAD_LABEL,
    EMPTY_RESPONSE,
    NO_ANSWER,
    NO_TARGETS,
    ZERO_WEIGHT,
    Columns,
    LeftOut,
    Reading,
    best_first,
    dialogue,
    history,
    label_of,
    names,
    prompt,
    ranks_of,
    response,
    text,
    tie_of,
    turns,
    winner_of,
    with_system,
)
from pipeline.data.rows.dialogues import Turns, common_prompt, last_response
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError

STEPWISE = (("prompt", "completions", "labels"), ("prompt", "steps", "labels"), ("prompt", "steps"))
"""Columns of TRL's stepwise rows; the same with another name; steps with their labels in them."""

STEP_RATINGS = {-1: 0.0, 0: 1.0, 1: 1.0}
"""Of PRM800K: wrong, neutral, right; what is neutral counts as right (Lightman et al. 2023)."""


def stepwise_reader(name: str) -> Callable[[Row], Example]:
    """What reads rows whose steps are in the column `name`.

    A row has a prompt alone for whoever doesn't learn from steps: a response with wrong steps is
    not a demonstration.
    """

    def read(row: Row) -> Example:
        question: Turns = prompt(row)
        if not question or question[-1].role != "user":
            raise LeftOut(NO_ANSWER)
        texts, labels = _steps(row, name)
        if not texts:
            raise LeftOut(EMPTY_RESPONSE)
        return Example(question, steps=texts, step_labels=labels)

    return read


def _steps(row: Row, name: str) -> tuple[tuple[str, ...], tuple[float | None, ...]]:
    """The steps that hold text, and their labels."""
    steps = row.columns[name]
    if not isinstance(steps, list):
        raise DataError(f"{row.origin}: {name} must be a list of steps, got {_kind(steps)}")
    if "labels" in row.columns:
        labels = row.columns["labels"]
        if not isinstance(labels, list) or len(labels) != len(steps):
            count = len(labels) if isinstance(labels, list) else _kind(labels)
            raise DataError(
                f"{row.origin}: {name} has {len(steps)} steps, and labels {count}; give one label"
                " for each step, null where none is known"
            )
        texts = steps
    else:
        texts = [_inside(row, name, step, "text") for step in steps]
        labels = [_label_inside(row, name, step) for step in steps]
    kept: list[tuple[str, float | None]] = []
    for step, label in zip(texts, labels, strict=True):
        if not isinstance(step, str):
            raise DataError(f"{row.origin}: a step in {name} must be text, got {_kind(step)}")
        known = _label(row, label)
        if step.strip():
            kept.append((step, known))
    return tuple(step for step, _ in kept), tuple(label for _, label in kept)


def _inside(row: Row, name: str, step: object, key: str) -> object:
    if not isinstance(step, dict) or key not in step:
        raise DataError(
            f'{row.origin}: without a column labels, {name} must be a list of {{"text": ...,'
            f' "label": ...}}, got {str(step)[:60]}'
        )
    return step[key]


def _label_inside(row: Row, name: str, step: object) -> object:
    if isinstance(step, dict) and "rating" in step:
        rating = step["rating"]
        if rating is None:
            return None
        if isinstance(rating, bool) or rating not in STEP_RATINGS:
            raise DataError(f"{row.origin}: rating must be -1, 0 or 1 or null, got {rating!r}")
        return STEP_RATINGS[rating]
    return _inside(row, name, step, "label")


def _label(row: Row, value: object) -> float | None:
    """How right a step is, from 0 to 1; None where that is not known."""
    if value is None:
        return None
    is_share = isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1
    if not is_share:
        raise DataError(
            f"{row.origin}: the label of a step must be true, false or a number from 0 to 1, or"
            f" null where none is known, got {value!r}"
        )
    return float(value)  # pyright: ignore[reportArgumentType]  # a number, as is checked above


def _kind(value: object) -> str:
    return type(value).__name__


RATING = ("schema", "kind", "messages", "answers")
RATING_MAY_HAVE = ("choice", "tie", "strength", "edit")
SCHEMA = 1
UNDO = "undo"

NO_PREFERENCE = "that prefer neither response"


def standing(rows: Sequence[Row]) -> list[Row]:
    """The rows without ratings that later ones took back or replaced; others as they are."""
    ratings = [row.columns for row in rows if _is_rating(row.columns)]
    gone = {each["supersedes"] for each in ratings if each["supersedes"] is not None}
    return [
        row
        for row in rows
        if not _is_rating(row.columns)
        or (row.columns["kind"] != UNDO and row.columns.get("id") not in gone)
    ]


def _is_rating(columns: Mapping[str, Any]) -> bool:
    return "schema" in columns and "kind" in columns and "supersedes" in columns


def rating_example(row: Row) -> Example:
    """The example in a rating: a preference, or a response that is good or bad by itself.

    Raises:
        LeftOut: it prefers neither response.
        DataError: it is of another version, or its fields contradict each other.
    """
    if row.columns["schema"] != SCHEMA:
        raise DataError(
            f"{row.origin}: a rating of schema {row.columns['schema']!r}, and {SCHEMA} is read;"
            " update the package"
        )
    prompt = turns(row, "messages")
    if not prompt or prompt[-1].role != "user":
        raise LeftOut(NO_ANSWER)
    answers = [_rated_response(row, answer) for answer in _answers(row)]
    match row.columns["kind"]:
        case "pair":
            return _rated_pair(row, prompt, answers)
        case "edit":
            return Example(prompt, (Message("assistant", text(row, "edit").strip()),))
        case "thumb":
            return _thumb(row, prompt, answers)
        case kind:
            raise DataError(f"{row.origin}: there is no kind of rating {kind!r}")


def _rated_pair(row: Row, prompt: tuple[Message, ...], answers: Sequence[Message]) -> Example:
    choice = row.columns.get("choice")
    if choice is None or row.columns.get("tie"):
        raise LeftOut(NO_PREFERENCE)
    if len(answers) != 2 or choice not in (0, 1):
        raise DataError(f"{row.origin}: a pair has two answers, and choice is 0 or 1: {choice!r}")
    strength = row.columns.get("strength")
    margin = float(strength) if isinstance(strength, int) else None
    return Example(prompt, (answers[choice],), (answers[1 - choice],), margin=margin)


def _thumb(row: Row, prompt: tuple[Message, ...], answers: Sequence[Message]) -> Example:
    choice = row.columns.get("choice")
    if choice not in (0, 1) or len(answers) != 1:
        raise DataError(f"{row.origin}: a thumb has one answer, and choice is 0 or 1: {choice!r}")
    return Example(prompt, (answers[0],)) if choice == 1 else Example(prompt, (), (answers[0],))


def _answers(row: Row) -> list[Mapping[str, Any]]:
    answers = row.columns["answers"]
    if isinstance(answers, list) and all(isinstance(each, dict) for each in answers):
        return answers
    raise DataError(f"{row.origin}: answers must be a list of objects with a text each")


def _rated_response(row: Row, answer: Mapping[str, Any]) -> Message:
    written = answer.get("text")
    if not isinstance(written, str):
        raise DataError(f"{row.origin}: an answer has no text")
    if not written.strip():
        raise LeftOut(EMPTY_RESPONSE)
    return Message("assistant", written.strip())


@dataclass(frozen=True)
class Shape:
    """One form of rows."""

    needs: tuple[str, ...]
    """Columns a row must have to be of this shape."""

    read: Callable[[Row], Example]
    """The example in a row; raises LeftOut where the row holds nothing to train on."""

    may_have: tuple[str, ...] = ()
    """Further columns it reads."""


def read_row(
    row: Row,
    fields: Mapping[str, str],
    reading: Reading | None = None,
    *,
    kept: RowColumns | None = None,
) -> Example | None:
    """The example in `row`; None where it holds nothing to train on, such as an empty dialogue.

    Args:
        row: the columns and their origin.
        fields: our names of columns to the row's, `{"prompt": "question"}`.
        reading: receives which columns were read, and why a row is left out.
        kept: columns that the example has as `extra` too.

    Raises:
        DataError: no shape fits the row's columns, or a column holds something else than it should.
    """
    reading = Reading() if reading is None else reading
    given = {ours: row.columns[theirs] for ours, theirs in fields.items() if theirs in row.columns}
    columns = Columns(
        {name: value for name, value in {**row.columns, **given}.items() if value is not None}
    )
    shape = next((shape for shape in SHAPES if _fits(shape, columns, given)), None)
    if shape is None:
        raise DataError(_unknown_shape(row, columns))
    try:
        example = _example(shape, columns, row.origin, reading, kept or RowColumns())
        return replace(example, extra=kept.of(row.columns)) if kept else example
    except LeftOut as reason:
        reading.left_out[str(reason)] += 1
        return None
    finally:
        reading.columns.update(row.columns)
        reading.used.update(fields[name] if name in given else name for name in columns.read)
        if kept is not None:
            reading.used.update(kept.needed & row.columns.keys())


def _example(
    shape: Shape, columns: Columns, origin: str, reading: Reading, kept: RowColumns
) -> Example:
    """The example of a row of this shape, as its weight and its label have it.

    With `kept.labels` the label is what is learned of the response, and takes it from nobody.
    """
    row = Row(columns, origin)
    if "weight" in row.columns and _weight(row) == 0:
        raise LeftOut(ZERO_WEIGHT)
    example = shape.read(row)
    margin = example.margin if example.margin is not None else _margin(row)
    example = replace(example, margin=margin, origin=row.origin)
    for messages in (example.chosen, example.rejected, *example.responses):
        if any(turn.role == "assistant" and not turn.content.strip() for turn in messages):
            raise LeftOut(EMPTY_RESPONSE)
    example = replace(example, prompt=tuple(map(_unlearned_where_empty, example.prompt)))
    if (kept.labels or kept.known_labels) and not example.rejected:
        example = replace(example, label=label_of(row))
    if kept.labels or not example.prompt or not example.chosen or example.rejected:
        return example
    is_bad = example.label is False
    if is_bad or (not kept.known_labels and _is_labelled_bad(columns, row.origin)):
        reading.no_demonstrations[BAD_LABEL] += 1
        return replace(example, chosen=(), rejected=example.chosen)
    if example.num_targets == 0:
        reading.no_demonstrations[NO_TARGETS] += 1
        return replace(example, chosen=())
    return example


def _unlearned_where_empty(turn: Message) -> Message:
    """The turn; of an assistant without content, one that is read and not learned."""
    empty = turn.role == "assistant" and not turn.content.strip()
    return replace(turn, trained=False) if empty else turn


def _unknown_shape(row: Row, columns: Collection[str]) -> str:
    if not columns:
        return f"{row.origin}: the row is empty; remove it"
    return (
        f"{row.origin}: no known shape of row has the columns {names(columns)};"
        " needed are prompt + chosen + rejected, chosen + rejected dialogues, messages,"
        " conversations, instruction + output, prompt + response, prompt, or text: say which column"
        """ is which with --fields, such as '{"prompt": "question", "response": "best"}'"""
    )


def check_fields(fields: Mapping[str, str], columns: Collection[str]) -> None:
    """Raise DataError for a name in `fields` that no shape reads, or a column that isn't there."""
    known = {name for shape in SHAPES for name in (*shape.needs, *shape.may_have)} | _EVERYWHERE
    for ours, theirs in fields.items():
        if ours not in known:
            raise DataError(f"fields: {ours} is not a name we know; use one of {names(known)}")
        if theirs not in columns:
            raise DataError(
                f"fields: no row has the column {theirs} (for {ours}); there are {names(columns)}"
            )


def _fits(shape: Shape, columns: Collection[str], given: Collection[str]) -> bool:
    """Whether `columns` has what `shape` needs, and the shape reads all that `--fields` gave."""
    reads = {*shape.needs, *shape.may_have, *_EVERYWHERE}
    return all(name in columns for name in shape.needs) and reads.issuperset(given)


def _preference(row: Row) -> Example:
    chosen, rejected = dialogue(row, "chosen"), dialogue(row, "rejected")
    if chosen is not None and rejected is not None:
        parts = common_prompt(chosen, rejected)
        if parts is None:
            raise LeftOut(NO_ANSWER)
        return Example(with_system(row, parts[0]), parts[1], parts[2], tie=tie_of(row))
    example = _answered(_prompt_beside(row), response(row, "chosen"), response(row, "rejected"))
    return replace(example, tie=tie_of(row))


def _prompt_beside(row: Row) -> Turns:
    """The prompt of two responses: a column of its own, or LLaMA-Factory's forms of dialogue."""
    if "prompt" in row.columns:
        return prompt(row)
    for name in ("conversations", "messages"):
        if name in row.columns:
            return last_response(_from_first_user(with_system(row, turns(row, name))))[0]
    if "instruction" in row.columns:
        return _instruction(row)
    raise DataError(
        f"{row.origin}: without a prompt, chosen and rejected must be whole dialogues, turns or"
        ' "\\n\\nHuman: ...\\n\\nAssistant: ..." text; it has the columns'
        f" {names(row.columns)}: say which one is the prompt with --fields"
    )


def _answered(question: Turns, chosen: Turns, rejected: Turns = ()) -> Example:
    """The example, if its prompt ends in a user turn and the assistant takes the next."""
    responses = [each for each in (chosen, rejected) if each]
    if not question or question[-1].role != "user" or not responses:
        raise LeftOut(NO_ANSWER)
    if any({each[0].role, each[-1].role} != {"assistant"} for each in responses):
        raise LeftOut(NO_ANSWER)
    return Example(question, chosen, rejected)


def _ranking(row: Row) -> Example:
    """A list of responses with their ranks or scores."""
    ranks = ranks_of(row)
    responses = tuple(
        response(Row({"responses": each}, row.origin), "responses")
        for each in row.columns["responses"]
    )
    order = best_first(ranks)
    best, worst = order[0], order[-1]
    if ranks[best] == ranks[worst]:
        raise LeftOut(ALL_TIED)
    example = _answered(_prompt_beside(row), responses[best], responses[worst])
    return replace(
        example,
        responses=tuple(responses[place] for place in order),
        ranks=tuple(ranks[place] for place in order),
    )


def _comparison(row: Row) -> Example:
    """Two responses and which of them won, or that neither did."""
    winner = winner_of(row)
    first, second = response(row, "response_a"), response(row, "response_b")
    chosen, rejected = (second, first) if winner == "b" else (first, second)
    return replace(_answered(_prompt_beside(row), chosen, rejected), tie=winner == "tie")


def _messages(row: Row) -> Example:
    return _chat(with_system(row, turns(row, "messages")))


def _conversations(row: Row) -> Example:
    return _chat(_from_first_user(with_system(row, turns(row, "conversations"))))


def _from_first_user(dialogue: Turns) -> Turns:
    """The dialogue without an assistant's turn at its start: it was cut out of a longer chat."""
    system = dialogue[:1] if dialogue and dialogue[0].role == "system" else ()
    rest = dialogue[len(system) :]
    return (*system, *(rest[1:] if rest and rest[0].role == "assistant" else rest))


def _chat(dialogue: Turns) -> Example:
    question, answer = last_response(dialogue)
    return _answered(question, answer) if answer else _prompt_example(question)


def _prompt_example(question: Turns) -> Example:
    if not question or question[-1].role != "user":
        raise LeftOut(NO_ANSWER)
    return Example(question)


def _instruction(row: Row) -> Turns:
    """The prompt of Alpaca's columns: earlier turns, the instruction, and below it its input."""
    inputs = [text(row, name) for name in ("input", "context") if row.columns.get(name)]
    question = "\n\n".join([text(row, "instruction"), *inputs])
    return with_system(row, (*history(row), Message("user", question)))


def _alpaca(row: Row) -> Example:
    output = "output" if "output" in row.columns else "response"
    return _answered(_instruction(row), response(row, output))


def _pair(answer: str, question: str = "prompt") -> Callable[[Row], Example]:
    def read(row: Row) -> Example:
        return _answered(prompt(row, question), response(row, answer))

    return read


def _prompt_only(row: Row) -> Example:
    return _prompt_example(prompt(row))


def _plain_text(row: Row) -> Example:
    written = text(row, "text")
    if not written.strip():
        raise LeftOut(EMPTY_RESPONSE)
    return Example((), (Message("assistant", written),))


_MARGINS = ("margin", "score_chosen", "score_rejected")
_EVERYWHERE = {*_MARGINS, "label", "weight"}
"""Columns that a row of any shape may have."""


def _margin(row: Row) -> float | None:
    """The column `margin`, else score_chosen - score_rejected, else None."""
    if "rejected" not in row.columns:
        return None
    numbers = {name: _number(row, name) for name in _MARGINS if name in row.columns}
    if "margin" in numbers:
        return numbers["margin"]
    if "score_chosen" in numbers and "score_rejected" in numbers:
        return numbers["score_chosen"] - numbers["score_rejected"]
    return None


def _number(row: Row, name: str) -> float:
    value = row.columns[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{row.origin}: {name} must be a finite number, got {value!r}")
    return number


def _weight(row: Row) -> float:
    weight = _number(row, "weight")
    if weight not in (0, 1):
        raise DataError(
            f"{row.origin}: weight is {weight:g}, and a row is trained (1) or not (0); rename the"
            " column if it means something else"
        )
    return weight


def _is_labelled_bad(columns: Columns, origin: str) -> bool:
    """Whether the column `label` (KTO; `kto_tag` in LLaMA-Factory) says that the response is bad.

    A label that is neither true nor false, such as the name of a class, is not read.
    """
    name = "kto_tag" if "kto_tag" in columns else "label"
    if name not in columns:
        return False
    read, word = set(columns.read), str(columns[name]).strip().lower()
    if word in ("0", "1"):
        raise DataError(
            f"{origin}: {name} is {word}; beside a response it must be true (good) or false"
            " (bad), or have another name if it means something else"
        )
    if word not in ("true", "false"):
        columns.read = read
    return word == "false"


_ALPACA = ("input", "context", "history", "system")
_BESIDE = ("prompt", "conversations", "messages", "instruction", *_ALPACA)

SHAPES = (
    Shape(RATING, rating_example, RATING_MAY_HAVE),
    Shape(("chosen", "rejected"), _preference, (*_BESIDE, "tie")),
    *(
        Shape(("responses", ranks, dialogue), _ranking, ("system",))
        for ranks in ("ranks", "scores")
        for dialogue in ("prompt", "messages")
    ),
    *(Shape(needs, stepwise_reader(needs[1]), ("system",)) for needs in STEPWISE),
    Shape(("response_a", "response_b", "winner", "prompt"), _comparison, ("system",)),
    Shape(("messages",), _messages, ("system", "kto_tag")),
    Shape(("conversations",), _conversations, ("system", "kto_tag")),
    Shape(("instruction", "output"), _alpaca, (*_ALPACA, "kto_tag")),
    Shape(("instruction", "response"), _alpaca, (*_ALPACA, "kto_tag")),
    Shape(("prompt", "chosen"), _pair("chosen"), ("system",)),
    Shape(("prompt", "response"), _pair("response"), ("system",)),
    Shape(("prompt", "completion"), _pair("completion"), ("system",)),
    Shape(("question", "answer"), _pair("answer", "question"), ("system",)),
    Shape(("prompt",), _prompt_only, ("system",)),
    Shape(("text",), _plain_text),
)
