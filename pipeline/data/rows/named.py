"""The data sets that DeepSpeed-Chat supports by name, with one short function per schema.

The name `local/jsonfile`, for the user's own files, is handled by `sources`, and their shape is
determined by their columns. If a set has train and test splits, they are used; otherwise evaluation
rows are held out.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import RowColumns
from pipeline.data.examples import Example, Message
from pipeline.data.rows.columns import Turns, join_turns, parse_dialogue, split_last_response
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class NamedSet:
    """A data set whose rows need a separate reader."""

    to_example: Callable[[Columns], Example | None]
    """Function that returns the example in a row, or None to drop the row."""

    has_rejected: bool = False
    """Whether rows have a rejected response, so that step 2 can use them."""

    def read(self, row: Row, *, kept: RowColumns | None = None) -> Example | None:
        """Return the example in `row`, with the columns that `kept` selects as `extra`.

        Raises:
            DataError: the row doesn't match the set's schema.
        """
        try:
            example = self.to_example(row.columns)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DataError(
                f"{row.origin} does not match the schema of its data set ({type(error).__name__}:"
                f" {error}); map the columns with --fields"
            ) from error
        extra = kept.select(row.columns) if kept else {}
        return example and replace(example, origin=row.origin, extra=extra)


def named_set(name: str) -> NamedSet | None:
    """Return the data set whose name is the path `name` or its end, or None if there is none."""
    parts = name.replace("\\", "/").rstrip("/").split("/")
    return NAMED.get("/".join(parts[-2:])) or NAMED.get(parts[-1])


def _pair(
    prompt: str | Turns | None, chosen: str | None, rejected: str | None = None
) -> Example | None:
    """Return an example of stripped texts, or None if the prompt or a response has no text."""
    turns = _user(prompt) if isinstance(prompt, str) else prompt
    if not turns or turns[-1].role != "user" or not turns[-1].content:
        return None
    if not chosen or not all(text.strip() for text in (chosen, rejected) if text is not None):
        return None
    return Example(turns, _assistant(chosen), _assistant(rejected) if rejected else ())


def _from_columns(*names: str) -> NamedSet:
    """Return a set with prompt and responses in these columns; rows that lack one are dropped."""

    def to_example(row: Columns) -> Example | None:
        texts = [row[name] for name in names]
        return None if None in texts else _pair(*texts)

    return NamedSet(to_example, has_rejected=len(names) > 2)


def _assistant(text: str) -> Turns:
    return (Message("assistant", text.strip()),)


def _user(text: str) -> Turns:
    return (Message("user", text.strip()),)


def _prompt_chosen_rejected(row: Columns) -> Example | None:
    """Read Dahoas/rm-static or full-hh-rlhf: a prompt in the form of hh-rlhf, and two responses."""
    prompt = parse_dialogue(row["prompt"]) or _user(row["prompt"])
    return _pair(prompt, row["chosen"], row["rejected"])


def _reward_datasets(row: Columns) -> Example | None:
    """Read rlhf-reward-datasets: "Assistant:" is in the responses, not at the end of the prompt."""
    prompt = parse_dialogue(f"{row['prompt'].rstrip()}\n\nAssistant:") or _user(row["prompt"])
    chosen, rejected = (row[name].split("Assistant:")[-1] for name in ("chosen", "rejected"))
    return _pair(prompt, chosen, rejected)


def _webgpt(row: Columns) -> Example | None:
    """Read two answers with scores, without citations such as [2, 3]; ties are dropped."""
    scores = float(row["score_0"]), float(row["score_1"])
    answers = [re.sub(r" ?\[\d+(?:, ?\d+)*\]", "", row[name]) for name in ("answer_0", "answer_1")]
    if scores[0] == scores[1]:
        return None
    better = 0 if scores[0] > scores[1] else 1
    example = _pair(row["question"]["full_text"], answers[better], answers[1 - better])
    return example and replace(example, margin=abs(scores[0] - scores[1]))


def _shp(row: Columns) -> Example | None:
    """Read two comments on a Reddit post; `labels` is 1 if A is preferred."""
    responses = row["human_ref_A"], row["human_ref_B"]
    chosen, rejected = responses if int(row["labels"]) == 1 else responses[::-1]
    return _pair(row["history"], chosen, rejected)


def _sharegpt_vicuna(row: Columns) -> Example | None:
    """Read a prompt of USER: and ASSISTANT: turns, and the response in `label`."""
    pieces = re.split(r"(?:\A|\s)(USER|ASSISTANT):", row["prompt"] or "")
    turns = [
        Message("user" if name == "USER" else "assistant", text.strip())
        for name, text in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
    if turns and turns[-1] == Message("assistant", ""):
        turns.pop()
    prompt, answered = split_last_response(join_turns(turns or _user(row["prompt"] or "")))
    return None if answered else _pair(prompt, row["label"])


def _miracl(row: Columns) -> Example | None:
    """Read a query, a passage that answers it, and a passage that doesn't."""
    positive, negative = row["positive_passages"], row["negative_passages"]
    if not positive or not negative:
        return None
    return _pair(row["query"], positive[0]["text"], negative[0]["text"])


def _hc3_chinese(row: Columns) -> Example | None:
    answers = row["human_answers"]
    return _pair(row["question"], answers[0] if answers else None)


def _mkqa(language: str) -> Callable[[Columns], Example | None]:
    def to_example(row: Columns) -> Example | None:
        answers = row["answers"][language]
        return _pair(row["queries"][language], answers[0]["text"] if answers else None)

    return to_example


def _qag_jaquad(row: Columns) -> Example | None:
    """Read the first question and the paragraph that answers it."""
    return _pair(row["questions"][0], row["paragraph"]) if row["questions"] else None


_MIRACL = NamedSet(_miracl, has_rejected=True)

NAMED = {
    "Dahoas/rm-static": NamedSet(_prompt_chosen_rejected, has_rejected=True),
    "Dahoas/full-hh-rlhf": NamedSet(_prompt_chosen_rejected, has_rejected=True),
    "Dahoas/synthetic-instruct-gptj-pairwise": _from_columns("prompt", "chosen", "rejected"),
    "yitingxie/rlhf-reward-datasets": NamedSet(_reward_datasets, has_rejected=True),
    "openai/webgpt_comparisons": NamedSet(_webgpt, has_rejected=True),
    "stanfordnlp/SHP": NamedSet(_shp, has_rejected=True),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": NamedSet(_sharegpt_vicuna),
    "wangrui6/Zhihu-KOL": _from_columns("INSTRUCTION", "RESPONSE"),
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "Cohere/miracl-ja": _MIRACL,
    "Hello-SimpleAI/HC3-Chinese": NamedSet(_hc3_chinese),
    "mkqa-Chinese": NamedSet(_mkqa("zh_cn")),
    "mkqa-Japanese": NamedSet(_mkqa("ja")),
    "lmqg/qg_jaquad": _from_columns("question", "sentence"),
    "lmqg/qag_jaquad": NamedSet(_qag_jaquad),
}
