"""Messages, examples and encoded dialogues: the common form of all rows."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pipeline.data.teacher import TeacherTokens

Role = Literal["system", "user", "assistant", "tool"]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn that hold its reasoning, in rows and chat templates."""


@dataclass(frozen=True)
class Message:
    """One turn of a dialogue."""

    role: Role
    content: str

    trained: bool = True
    """False for an assistant turn that is read but not trained on (`"weight": 0`)."""

    reasoning: str = ""
    """Reasoning of the assistant that rows store separately from the content
    (`reasoning_content`)."""

    prefill: str = ""
    """Beginning of `content` that the prompt already has: it is read but not trained on."""

    keys: str = ""
    """Further keys for the template, as a JSON object: the dialogue's `tools` in its first turn,
    `tool_calls` in assistant turns, `name` and `tool_call_id` in tool turns."""

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as a dictionary, as in rows and templates, without the dialogue's tools."""
        keys = json.loads(self.keys) if self.keys else {}
        keys.pop("tools", None)
        reasoning = {REASONING[0]: self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **reasoning, **keys}

    @property
    def calls(self) -> list[Any]:
        """The turn's tool calls, in the format of the key `tool_calls`."""
        return json.loads(self.keys).get("tool_calls", []) if self.keys else []

    @property
    def tools(self) -> list[Any] | None:
        """The tools of the dialogue that starts with this turn, as JSON schemas."""
        return json.loads(self.keys).get("tools") if self.keys else None

    def __repr__(self) -> str:
        # Rows are sorted by repr: omit empty fields, so that they don't affect the order.
        rest = f", reasoning={self.reasoning!r}" if self.reasoning else ""
        rest += f", keys={self.keys!r}" if self.keys else ""
        return (
            f"Message(role={self.role!r}, content={self.content!r}, trained={self.trained!r}{rest})"
        )


@dataclass(frozen=True)
class Example:
    """A prompt and its possible continuations.

    Each step reads what it needs: step 1 trains on `prompt + chosen`, step 2 compares `chosen` with
    `rejected`, step 3 uses `prompt` alone.
    """

    prompt: tuple[Message, ...]
    """The dialogue so far. It ends in a user turn, or in an assistant turn that the response
    continues; it is empty for plain text."""

    chosen: tuple[Message, ...] = ()
    """The demonstration, or the better response; empty for a prompt without a response."""

    rejected: tuple[Message, ...] = ()
    """The worse response of a pair, or an unpaired bad one; empty if there is none."""

    margin: float | None = None
    """Amount by which `chosen` is better, in units of the score; None if unknown."""

    tie: bool = False
    """Whether `chosen` and `rejected` are equally good."""

    steps: tuple[str, ...] = ()
    """Steps of a response that is judged step by step; it is neither chosen nor rejected."""

    step_labels: tuple[float | None, ...] = ()
    """Correctness of each of `steps`, from 0 to 1; None if unknown."""

    label: bool | int | float | str | None = field(default=None, compare=False)
    """Label of the dialogue that ends in `chosen`, or of the prompt if `chosen` is empty: a
    class, a grade or a number. It is read only if a step trains on labels."""

    origin: str = ""
    """Origin of the row, for error messages: `rows.jsonl line 17`."""

    teacher: "TeacherTokens | None" = field(default=None, compare=False)
    """The tokens of `chosen`, if the row has a teacher's log-probabilities for them."""

    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Columns by name that the step reads in addition to the dialogue, such as the correct answer;
    only those that the row has."""

    @cached_property
    def prompt_hash(self) -> int:
        """64-bit hash that identifies the prompt.

        It is the first 8 bytes, little-endian, of the SHA-256 of the first user turn (or of the
        whole text if there is none) in UTF-8, case-folded and with each run of whitespace replaced
        by one space. Branches of a conversation, which share their first turn, have the same hash.
        """
        text = next((turn.content for turn in self.prompt if turn.role == "user"), None)
        if text is None:
            text = "\n".join(turn.content for turn in (*self.prompt, *self.chosen))
        normalized = " ".join(text.split()).casefold()
        digest = hashlib.sha256(normalized.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "little")

    @property
    def num_targets(self) -> int:
        """Number of assistant turns that step 1 trains on."""
        turns = (*self.prompt, *self.chosen)
        return sum(turn.trained for turn in turns if turn.role == "assistant")


@dataclass(frozen=True)
class Encoded:
    """Token ids of one dialogue, and a mask of the tokens in the loss."""

    input_ids: list[int]

    trained: list[bool]
    """True on tokens whose prediction is trained: assistant text and its end-of-turn token."""

    teacher: "TeacherTokens | None" = None
    """A teacher's distributions at the targets, if the loss uses them."""

    @classmethod
    def untrained(cls, input_ids: list[int]) -> "Encoded":
        """Return a sequence without targets."""
        return cls(input_ids, [False] * len(input_ids))

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Number of tokens in the loss; the first token of a sequence can't be predicted."""
        return sum(self.trained[1:])

    def head(self, max_length: int) -> "Encoded":
        """Return the first `max_length` tokens."""
        return Encoded(self.input_ids[:max_length], self.trained[:max_length], self.teacher)

    def tail(self, max_length: int, *, keep_first: bool = False) -> "Encoded":
        """Return the last `max_length` tokens; with `keep_first`, one fewer, after the first."""
        if keep_first and len(self) > max_length:
            end = self.tail(max_length - 1)
            return Encoded(self.input_ids[:1] + end.input_ids, self.trained[:1] + end.trained)
        return Encoded(self.input_ids[-max_length:], self.trained[-max_length:])
