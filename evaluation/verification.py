"""Figures of the embedded task's verifier at the end of a run.

Also the responses that the report shows, with that judge's verdicts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.held_out import HeldOutPrompts, Prompt
from evaluation.scored import ScoredResponse
from inference.chat import ChatConfig
from pipeline.data.examples import Message
from pipeline.demo.task import TALK, verify
from pipeline.parallel.mesh import current_mesh

NUM_SAMPLES = 12
"""Held-out prompts whose responses the report shows."""

TRIES = 5
"""Responses to each prompt that was written by hand."""


@dataclass(frozen=True)
class Talk:
    """The actor's responses to the prompts written by hand, sampled as chat.py samples."""

    held_out: HeldOutPrompts
    """The prompts written by hand, each of them `TRIES` times."""

    responses: list[ScoredResponse]

    @property
    def rate(self) -> float:
        """Share of the responses that are correct and polite."""
        verdicts = self.held_out.verdicts(self.responses)
        return sum(verdict is True for verdict in verdicts) / len(verdicts)

    def rows(self) -> list[dict[str, Any]]:
        """Each prompt with its first response, as JSON."""
        pairs = zip(self.held_out.prompts, self.responses, strict=True)
        rows = [
            {"prompt": prompt.messages[-1].content}
            | describe(prompt.messages[-1].content, response)
            for prompt, response in pairs
        ]
        return rows[::TRIES]


def talk(held_out: HeldOutPrompts) -> Talk | None:
    """Let the actor answer the prompts written by hand; None on data other than the task."""
    if not held_out.is_verifiable:
        return None
    prompts = [
        Prompt(messages, held_out.chat.format.encode_prompt(messages), {"answer": written.answer})
        for written in TALK
        for messages in [(Message("user", written.text),)]
        for _ in range(TRIES)
    ]
    by_hand = held_out.on(prompts)
    with held_out.generating() as actor:
        responses = by_hand.respond(actor, temperature=ChatConfig.temperature)
    return Talk(by_hand, by_hand.scored(responses))


def conclude(
    held_out: HeldOutPrompts, sampled: Mapping[str, list[ScoredResponse]], samples: Path
) -> dict[str, object]:
    """Write the report's samples to the file `samples`; return the judge's part of `eval`.

    Returns:
        What `verification` gives, and `judge_talk`, the actor's rate on prompts written by hand.
        Empty on any other data.
    """
    conversation = talk(held_out)
    if current_mesh().is_main:
        write_samples(held_out, sampled, samples, talk=conversation.rows() if conversation else ())
    if conversation is None:
        return {}
    return {
        **verification(held_out, sampled),
        "judge_talk": conversation.rate,
    }


def verification(
    held_out: HeldOutPrompts, sampled: Mapping[str, list[ScoredResponse]]
) -> dict[str, object]:
    """What the embedded task's judge says of the models; empty on any other data.

    Args:
        held_out: the prompts.
        sampled: responses to them by model, those of step 3 the last, what it began with before it.

    Returns:
        `judge`: the share of right answers by model; `judge_counts`: the number of prompts, and on
        how many of them step 3 alone (gained) or what it began with alone (lost) is right.
    """
    verdicts = {name: held_out.verdicts(responses) for name, responses in sampled.items()}
    known = {name: [v for v in each if v is not None] for name, each in verdicts.items()}
    if any(len(known[name]) < len(verdicts[name]) for name in verdicts):
        return {}
    before, after = list(known)[-2:]
    pairs = list(zip(known[after], known[before], strict=True))
    return {
        "judge": {name: sum(each) / len(each) for name, each in known.items()},
        "judge_counts": {
            "prompts": len(pairs),
            "gained": sum(new and not old for new, old in pairs),
            "lost": sum(old and not new for new, old in pairs),
        },
    }


def write_samples(
    held_out: HeldOutPrompts,
    sampled: Mapping[str, list[ScoredResponse]],
    path: Path,
    *,
    talk: Sequence[dict[str, Any]] = (),
) -> None:
    """Write each model's first responses, side by side, for the report; and those of a talk."""
    rows = [
        {
            "prompt": _prompt(prompt, [responses[row] for responses in sampled.values()]),
            "answers": {
                name: describe(prompt.messages[-1].content, responses[row])
                for name, responses in sampled.items()
            },
        }
        for row, prompt in enumerate(held_out.prompts[:NUM_SAMPLES])
    ]
    document = {"models": list(sampled), "rows": rows, "talk": list(talk)}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _prompt(prompt: Prompt, responses: Sequence[ScoredResponse]) -> Sequence[Mapping[str, str]]:
    """What was answered, as JSON: the prompt, or what its environment began with."""
    given = next((response.opening for response in responses if response.opening), None)
    own = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    return own if given is None else given


def describe(question: str, response: ScoredResponse) -> dict[str, Any]:
    """A response as JSON, with the judge's verdict where the question is of the embedded task."""
    described: dict[str, Any] = {
        "text": response.text,
        "score": response.score,
        "stopped": response.stopped,
    }
    described |= {"rewards": dict(response.rewards)} if response.rewards else {}
    verdict = verify(question, response.text)
    if verdict is not None:
        described |= {"correct": verdict.correct, "polite": verdict.polite}
    return described
