"""Base, step 1 and step 3 side by side: the figures of the summary and the report's samples."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from inference.generation import Response, free_bytes
from pipeline.budget.machine import available_bytes
from pipeline.config import FrozenModelConfig
from pipeline.data.embedded import verify
from pipeline.errors import ModelError
from pipeline.models.load import add_tokens, load_causal_lm, load_tokenizer
from pipeline.models.meta import model_on_meta
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.evaluate import (
    Answer,
    HeldOut,
    comparison,
    mean_length,
    mean_score,
    source_means,
    stop_rate,
)
from step3_ppo.prompts import Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_SAMPLES = 12
"""Held-out prompts whose answers the report shows."""


@dataclass(frozen=True)
class Answers:
    """Two sets of answers of one model to the held-out prompts."""

    greedy: list[Answer]
    sampled: list[Answer]
    kl: float
    """Nats per sampled response to the reference."""

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Answers":
        """From what `dataclasses.asdict` makes of it."""
        return cls(
            greedy=[Answer(**answer) for answer in plain["greedy"]],
            sampled=[Answer(**answer) for answer in plain["sampled"]],
            kl=plain["kl"],
        )


def answer_all(held_out: HeldOut, *, strict: bool = False) -> Answers:
    """Let the actor, as it is now, answer the held-out prompts.

    Raises:
        RewardError: with `strict`, where rewards fail.
    """
    with held_out.models.hybrid_engine.generating() as actor:
        sampled = held_out.respond(actor, temperature=held_out.config.temperature)
        greedy = held_out.respond(actor, temperature=0.0)
    return Answers(
        greedy=held_out.answers(greedy, strict=strict),
        sampled=held_out.answers(sampled, strict=strict),
        kl=held_out.kl(sampled),
    )


def answers_of_base(held_out: HeldOut, base: FrozenModelConfig) -> list[Answer] | None:
    """Sampled answers of the model before step 1, which is loaded whole on every process.

    None where none is named, where it numbers its tokens in another way than the actor, and where
    it can't be loaded or has no room beside the others: the run itself is done and shall not be
    lost for a comparison, whatever happens.
    """
    if base.path is None:
        return None
    # All processes look before any of them loads, and do the same afterwards.
    seen = _on_all(lambda: _look(held_out, base), base)
    responses = None if seen is None else _on_all(lambda: _respond(held_out, base), base)
    return None if responses is None else held_out.answers(responses)


def _on_all(work: Callable[[], T], base: FrozenModelConfig) -> T | None:
    """What `work`, in which no process needs another, gives; None on all where it fails on one."""
    result, reason = None, ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # memory that ran out, files that are broken
        reason = str(error).strip().split("\n")[0] or type(error).__name__
    reason = next(filter(None, current_mesh().world.gather_objects(reason)), "")
    if not reason:
        return result
    logger.warning("%s is left out of the comparison: %s", base.path, reason)
    return None


def _look(held_out: HeldOut, base: FrozenModelConfig) -> bool:
    """Raise ModelError where this process sees that the base can't answer; else True."""
    known = held_out.models.tokenizer.get_vocab().items()
    if not load_tokenizer(base).get_vocab().items() <= known:
        raise ModelError("it has another tokenizer")
    device = local_device()
    model = model_on_meta(base, task="causal", device=device)
    needed = sum(param.nbytes for param in model.parameters())
    # For a GPU as well it is read in main memory first.
    rooms = {"main memory": available_bytes() // current_mesh().local_size}
    if device.type == "cuda":
        rooms["the GPU"] = free_bytes(device)
    for place, room in rooms.items():
        if needed > room:
            raise ModelError(f"its weights take {needed:,} bytes, and {place} has {room:,} for it")
    return True


def _respond(held_out: HeldOut, base: FrozenModelConfig) -> list[Response]:
    """Sampled responses of the base to this process's prompts; its memory is given back."""
    model = load_causal_lm(base, device=local_device(), seed=held_out.config.seed)
    add_tokens(model, held_out.models.tokenizer, seed=held_out.config.seed)
    return held_out.respond(model, temperature=held_out.config.temperature)


def summarize(before: Answers, after: Answers, *, name: str = "score") -> dict[str, int | float]:
    """The `eval` object of step 3: greedy answers, except for the KL.

    Args:
        before: those of step 1's model.
        after: those of the exported one.
        name: what scores are called: `reward` where sources give them.
    """
    return {
        f"{name}_before": mean_score(before.greedy),
        f"{name}_after": mean_score(after.greedy),
        "kl": after.kl,
        **comparison(after.greedy, before.greedy),
        "length_before": mean_length(before.greedy),
        "length_after": mean_length(after.greedy),
        "stop_rate": stop_rate(after.greedy),
        f"sampled_{name}_before": mean_score(before.sampled),
        f"sampled_{name}_after": mean_score(after.sampled),
        "sampled_stop_rate": stop_rate(after.sampled),
        **_by_source(before.greedy, "before"),
        **_by_source(after.greedy, "after"),
    }


def _by_source(answers: Sequence[Answer], when: str) -> dict[str, float]:
    return {f"{name}_{when}": value for name, value in source_means(answers).items()}


def verification(held_out: HeldOut, sampled: Mapping[str, list[Answer]]) -> dict[str, object]:
    """What the embedded task's judge says of the models; empty on any other data.

    Args:
        held_out: the prompts.
        sampled: answers to them by model, those of step 3 the last.

    Returns:
        `judge`: the share of right answers by model; `judge_counts`: the number of prompts, and on
        how many of them step 3 alone (gained) or step 1 alone (lost) is right.
    """
    verdicts = {name: held_out.verdicts(answers) for name, answers in sampled.items()}
    known = {name: [v for v in each if v is not None] for name, each in verdicts.items()}
    if any(len(known[name]) < len(verdicts[name]) for name in verdicts):
        return {}
    pairs = list(zip(known[list(known)[-1]], known["step1_sft"], strict=True))
    return {
        "judge": {name: sum(each) / len(each) for name, each in known.items()},
        "judge_counts": {
            "prompts": len(pairs),
            "gained": sum(new and not old for new, old in pairs),
            "lost": sum(old and not new for new, old in pairs),
        },
    }


def write_samples(
    held_out: HeldOut,
    sampled: Mapping[str, list[Answer]],
    path: Path,
    *,
    talk: Sequence[dict[str, Any]] = (),
) -> None:
    """Write the first answers of each model, side by side, for the report; and those of a talk."""
    rows = [
        {
            "prompt": _prompt(prompt, [answers[row] for answers in sampled.values()]),
            "answers": {
                name: describe(prompt.messages[-1].content, answers[row])
                for name, answers in sampled.items()
            },
        }
        for row, prompt in enumerate(held_out.prompts[:NUM_SAMPLES])
    ]
    document = {"models": list(sampled), "rows": rows, "talk": list(talk)}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _prompt(prompt: Prompt, answers: Sequence[Answer]) -> Sequence[Mapping[str, str]]:
    """What was answered, as JSON: the prompt, or what its environment began with."""
    given = next((answer.opening for answer in answers if answer.opening), None)
    own = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    return own if given is None else given


def describe(question: str, answer: Answer) -> dict[str, Any]:
    """An answer as JSON, with the judge's verdict where the question is of the embedded task."""
    described: dict[str, Any] = {
        "text": answer.text,
        "score": answer.score,
        "stopped": answer.stopped,
    }
    described |= {"rewards": dict(answer.rewards)} if answer.rewards else {}
    verdict = verify(question, answer.text)
    if verdict is not None:
        described |= {"correct": verdict.correct, "polite": verdict.polite}
    return described
