"""What the embedded task's judge says at the end of a run: of answers, and of trivial policies."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.chat.command import CHAT_TEMPERATURE
from pipeline.data.embedded_policies import trivial_rates
from pipeline.data.embedded_talk import TALK
from pipeline.data.examples import Message
from pipeline.parallel.mesh import current_mesh
from step3_ppo.comparison import describe, verification, write_samples
from step3_ppo.evaluate import Answer, HeldOut
from step3_ppo.prompts import Prompt

TRIES = 5
"""Answers to each prompt that was written by hand."""


@dataclass(frozen=True)
class Talk:
    """The actor's answers to the prompts that were written by hand, sampled as chat.py samples."""

    held_out: HeldOut
    """Each prompt `TRIES` times."""

    answers: list[Answer]

    @property
    def rate(self) -> float:
        """Share of the answers that are correct and polite."""
        verdicts = self.held_out.verdicts(self.answers)
        return sum(verdict is True for verdict in verdicts) / len(verdicts)

    def rows(self) -> list[dict[str, Any]]:
        """Each prompt with its first answer, as JSON."""
        pairs = zip(self.held_out.prompts, self.answers, strict=True)
        rows = [
            {"prompt": prompt.messages[-1].content} | describe(prompt.messages[-1].content, answer)
            for prompt, answer in pairs
        ]
        return rows[::TRIES]


def talk(held_out: HeldOut) -> Talk | None:
    """Let the actor answer the prompts written by hand; None on data other than the task."""
    if not held_out.is_verifiable:
        return None
    models = held_out.models
    prompts = [
        Prompt(messages, models.chat.encode_prompt(messages), {"answer": written.answer})
        for written in TALK
        for messages in [(Message("user", written.text),)]
        for _ in range(TRIES)
    ]
    if models.reward is not None and models.reward.text is not None:
        models.reward.text.know(prompts)
    by_hand = HeldOut(models, prompts, held_out.config)
    with models.hybrid_engine.generating() as actor:
        responses = by_hand.respond(actor, temperature=CHAT_TEMPERATURE)
    return Talk(by_hand, by_hand.answers(responses))


def conclude(
    held_out: HeldOut, sampled: Mapping[str, list[Answer]], samples: Path
) -> dict[str, object]:
    """Write the report's samples to the file `samples`; return the judge's part of `eval`.

    Returns:
        What `verification` gives, `judge_trivial`, the rates of policies that understand nothing,
        and `judge_talk`, the actor's rate on prompts written by hand. Empty on any other data.
    """
    conversation = talk(held_out)
    if current_mesh().is_main:
        write_samples(held_out, sampled, samples, talk=conversation.rows() if conversation else ())
    if conversation is None:
        return {}
    return {
        **verification(held_out, sampled),
        "judge_trivial": trivial_rates(),
        "judge_talk": conversation.rate,
    }
