"""OpenAI's objects made of pieces of responses."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.engine.sampling import Reported
from inference.serve.jobs import Piece
from inference.serve.served import ServedModel

LEAST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


def new_id(kind: str) -> str:
    """A name for a response."""
    return f"{kind}-{secrets.token_hex(12)}"


@dataclass
class Usage:
    """Tokens of a request and its responses, as their pieces come."""

    num_prompt: int
    """Of all prompts, each counted once."""
    per_prompt: int
    """Responses to each prompt."""
    num_completion: int = 0
    _reused: dict[int, int] = field(default_factory=dict)
    """Of each response, the tokens of its prompt that were not read for it."""

    def add(self, piece: Piece) -> None:
        """More of a response has come."""
        self.num_completion += len(piece.ids)
        self._reused[piece.row] = self._reused.get(piece.row, 0) + piece.num_reused

    @property
    def json(self) -> dict[str, Any]:
        """OpenAI's object; of a prompt's tokens those are cached that no response had read."""
        by_prompt: dict[int, int] = {}
        for row, count in self._reused.items():
            prompt = row // self.per_prompt
            by_prompt[prompt] = min(count, by_prompt.get(prompt, count))
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(by_prompt.values())},
        }


def number(logprob: float) -> float:
    """A log-probability as JSON has it."""
    return max(logprob, LEAST)


@dataclass
class RowSoFar:
    """How far the tokens and the text of one response are given."""

    served: ServedModel
    begins: bool
    """Whether its text begins anew, so that decoding may drop the space of the first word."""

    offset: int = 0
    """Characters before the next token, of which a half character counts none."""
    _open: bytes = field(default=b"", repr=False)

    def tokens(self, piece: Piece) -> list[tuple[int, bytes, Reported]]:
        """(id, bytes, what the policy says) of the tokens of a piece that have text."""
        ids = piece.ids[: len(piece.reported)]
        parts = self.served.bytes_of.of_all(ids, begins=self.begins)
        self.begins = self.begins and set(ids) <= self.served.bytes_of.special
        return list(zip(ids, parts, piece.reported, strict=True))

    def place(self, part: bytes) -> int:
        """Where the text of the next token begins, which stands for these bytes."""
        place = self.offset
        self._open += part
        text = self._open.decode(errors="ignore")
        self.offset += len(text)
        self._open = self._open[len(text.encode()) :]
        return place


def chat_logprobs(row: RowSoFar, piece: Piece) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    content = [
        {
            **_entry(row.served, token, part, report.logprob),
            "top_logprobs": [
                _entry(row.served, other, row.served.bytes_of.of(other), value)
                for other, value in report.top
            ],
        }
        for token, part, report in row.tokens(piece)
    ]
    return {"content": content, "refusal": None}


def _entry(served: ServedModel, token: int, part: bytes, logprob: float) -> dict[str, Any]:
    name = served.bytes_of.name(token) if not part else part.decode(errors="replace")
    return {"token": name, "logprob": number(logprob), "bytes": list(part)}


def text_logprobs(
    row: RowSoFar, tokens: Sequence[tuple[int, bytes, Reported | None]]
) -> dict[str, Any]:
    """`logprobs` of a choice of a completion; a first token that nothing precedes has none."""
    names = row.served.bytes_of
    return {
        "tokens": [part.decode(errors="replace") or names.name(token) for token, part, _ in tokens],
        "token_logprobs": [None if each is None else number(each.logprob) for *_, each in tokens],
        "top_logprobs": [
            None if each is None else {names.name(t): number(value) for t, value in each.top}
            for *_, each in tokens
        ],
        "text_offset": [row.place(part) for _, part, _ in tokens],
    }
