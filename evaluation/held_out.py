"""Held-out prompts, answered by a model that trains: every process answers its share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from evaluation.evaluate import Generating
from evaluation.responding import Chat
from evaluation.scored import ScoredResponse
from inference.generation import Response, generate
from pipeline.data.examples import Message
from pipeline.demo.task import verify
from pipeline.parallel.mesh import current_mesh


@dataclass(frozen=True)
class Prompt:
    """A dialogue that waits for its response."""

    messages: tuple[Message, ...]
    input_ids: list[int]
    """With the format's opening of the assistant's turn."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of its row that rewards read."""


class HeldOutPrompts(ABC):
    """Prompts that no step trained on.

    Args:
        prompts: all of them, on every process.
        chat: how the model's dialogues become tokens, and its tokens text.
        generating: gives the model that trains, as it is, to generate with.
        seed: of the sampled responses.
        temperature: of sampled responses.
        max_new_tokens: of a response.
        batch_size: prompts that a process answers at once.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        chat: Chat,
        generating: Generating,
        *,
        seed: int,
        temperature: float,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        self.prompts = list(prompts)
        self.chat = chat
        self.generating = generating
        self.seed = seed
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        # Every process takes equally many; the last ones go round to the first prompts again.
        data = self.data = current_mesh().data
        share = math.ceil(len(self.prompts) / data.size)
        self.rows = [
            (data.rank + number * data.size) % len(self.prompts) for number in range(share)
        ]

    @abstractmethod
    def on(self, prompts: Sequence[Prompt]) -> Self:
        """Other prompts, answered and judged in the same way."""

    @abstractmethod
    def scored(self, responses: Sequence[Response]) -> list[ScoredResponse]:
        """Text and score of the responses of all processes, in the order of the prompts."""

    def respond(self, model: nn.Module, *, temperature: float) -> list[Response]:
        """Responses of a model in evaluation mode to this process's prompts; 0 decodes greedily."""
        prompts = [self.prompts[row] for row in self.rows]
        return self._respond(
            model, prompts, temperature=temperature, seed=self.seed + 1, keys=self.rows
        )

    def _respond(
        self,
        model: nn.Module,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        seed: int,
        keys: Sequence[int],
    ) -> list[Response]:
        return generate(
            model,
            [prompt.input_ids for prompt in prompts],
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            stop_ids=self.chat.format.stop_ids,
            seed=seed,
            keys=keys,
            batch_size=self.batch_size,
        )

    def merged(self, mine: Sequence[ScoredResponse]) -> list[ScoredResponse]:
        """The responses of all processes, in the order of the prompts; `mine` to this one's."""
        everyones = self.data.gather_objects(dict(zip(self.rows, mine, strict=True)))
        merged = {row: response for responses in everyones for row, response in responses.items()}
        return [merged[row] for row in range(len(self.prompts))]

    @property
    def counted(self) -> list[bool]:
        """Which of this process's prompts count: those that no other process answers too."""
        size, rank = self.data.size, self.data.rank
        return [rank + place * size < len(self.prompts) for place in range(len(self.rows))]

    def verdicts(self, responses: Sequence[ScoredResponse]) -> list[bool | None]:
        """Whether each response is correct and polite; None where that task has no such prompt."""
        verdicts = [
            verify(prompt.messages[-1].content, response.text)
            if len(prompt.messages) == 1 and not response.opening
            else None
            for prompt, response in zip(self.prompts, responses, strict=True)
        ]
        return [None if verdict is None else verdict.both for verdict in verdicts]

    @property
    def is_verifiable(self) -> bool:
        """Every prompt is one of the embedded task's."""
        return all(
            len(prompt.messages) == 1 and verify(prompt.messages[0].content, "") is not None
            for prompt in self.prompts
        )
