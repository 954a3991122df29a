"""Held-out prompts, and the responses of the trained model and the base model."""

import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import nn

from evaluation.evaluate import Generating
from evaluation.scored import HeldOutResponses, ScoredResponse
from inference.chat import ChatConfig
from inference.engine.requests import Response
from inference.generation import free_bytes, generate
from pipeline.config import FrozenModelConfig
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example, Message
from pipeline.demo.task import HAND_WRITTEN, verify
from pipeline.models.hf.load import add_tokens, load_causal_lm, load_tokenizer
from pipeline.models.hf.meta import load_on_meta
from pipeline.parallel import launched
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.run.run import json_safe
from pipeline.system.errors import DataError, ModelError
from pipeline.system.memory import available_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A dialogue that needs a response."""

    messages: tuple[Message, ...]
    input_ids: list[int]
    """Token ids, including the format's opening of the assistant's turn."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the prompt's row that rewards read."""


def encode_prompts(
    examples: Sequence[Example],
    chat: ChatFormat,
    *,
    limit: int,
    name: str,
    setting: str,
    max_prompts: int | None = None,
) -> list[Prompt]:
    """Encode the first `max_prompts` prompts of at most `limit` tokens; drop longer ones.

    Args:
        examples: the rows.
        chat: the actor's chat format.
        limit: maximum number of tokens in a prompt.
        name: name of the prompts in messages, such as "held-out".
        setting: name of the limit's setting, such as "ppo.max_prompt_length".
        max_prompts: maximum number of prompts; None encodes all.

    Raises:
        DataError: all prompts are too long.
    """
    short: list[Prompt] = []
    lengths: list[int] = []
    for example in examples:
        if len(short) == max_prompts:
            break
        input_ids = chat.encode_prompt(example.prompt, origin=example.origin)
        prompt = Prompt(example.prompt, input_ids, example.extra)
        lengths.append(len(prompt.input_ids))
        short += [prompt] if lengths[-1] <= limit else []
    if not short:
        shortest = min(lengths)
        raise DataError(
            f"every {name} prompt is longer than {setting} {limit} (the shortest has {shortest}"
            " tokens); raise it"
        )
    if num_skipped := len(lengths) - len(short):
        description = f"{name} prompts, which are longer than {setting} {limit}"
        logger.info("skipping %d of %d %s", num_skipped, len(lengths), description)
    return short


class HeldOutPrompts(ABC):
    """Generates and scores responses to prompts that no step trained on.

    Args:
        prompts: all prompts, on every process.
        chat: converts dialogues to tokens, and tokens to text.
        generating: context manager that provides the current model for generation.
        seed: seed of the sampled responses.
        temperature: temperature of the sampled responses.
        max_new_tokens: maximum number of tokens per response.
        batch_size: number of prompts that a process responds to at once.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        chat: ChatFormat,
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
        # All processes take the same number; the last ones repeat the first prompts.
        data = self.data = current_mesh().data
        share = math.ceil(len(self.prompts) / data.size)
        self.rows = [(data.rank + i * data.size) % len(self.prompts) for i in range(share)]

    @abstractmethod
    def with_prompts(self, prompts: Sequence[Prompt]) -> Self:
        """Return the same evaluation with different prompts."""

    @abstractmethod
    def score_all(
        self, responses: Sequence[Response], *, strict: bool = False
    ) -> list[ScoredResponse]:
        """Return the texts and scores of all processes' responses, in the order of the prompts.

        Raises:
            RewardError: too many rewards failed, and `strict` is true.
        """

    @abstractmethod
    def compute_kl(self, responses: Sequence[Response]) -> float:
        """Return the mean of log pi - log pi_ref over responses sampled from the actor, in nats."""

    def answer_all(self, *, strict: bool = False) -> HeldOutResponses:
        """Generate and score greedy and sampled responses of the current actor.

        Raises:
            RewardError: see `score_all`.
        """
        with self.generating() as actor:
            sampled = self.respond(actor, temperature=self.temperature)
            greedy = self.respond(actor, temperature=0.0)
        return HeldOutResponses(
            greedy=self.score_all(greedy, strict=strict),
            sampled=self.score_all(sampled, strict=strict),
            kl=self.compute_kl(sampled),
        )

    def respond(self, model: nn.Module, *, temperature: float) -> list[Response]:
        """Generate a model's responses to this process's prompts; temperature 0 is greedy."""
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
            stop_ids=self.chat.stop_ids,
            seed=seed,
            keys=keys,
            batch_size=self.batch_size,
        )

    def merge_responses(self, local: Sequence[ScoredResponse]) -> list[ScoredResponse]:
        """Return all processes' responses in prompt order; `local` are those of this process."""
        gathered = self.data.gather_objects(dict(zip(self.rows, local, strict=True)))
        merged = {row: response for responses in gathered for row, response in responses.items()}
        return [merged[row] for row in range(len(self.prompts))]

    @property
    def is_counted(self) -> list[bool]:
        """Whether each of this process's prompts is counted here rather than on another process."""
        size, rank = self.data.size, self.data.rank
        return [rank + index * size < len(self.prompts) for index in range(len(self.rows))]

    def verdicts(self, responses: Sequence[ScoredResponse]) -> list[bool | None]:
        """Return whether each response is correct and polite, or None if no verdict is possible."""
        verdicts = [
            verify(prompt.messages[-1].content, response.text)
            if len(prompt.messages) == 1 and not response.opening
            else None
            for prompt, response in zip(self.prompts, responses, strict=True)
        ]
        return [None if verdict is None else verdict.both for verdict in verdicts]

    @property
    def is_verifiable(self) -> bool:
        """Whether all prompts are from the embedded task."""
        return all(
            len(prompt.messages) == 1 and verify(prompt.messages[0].content, "") is not None
            for prompt in self.prompts
        )


T = TypeVar("T")


def name_start(path: Path | str | None, base: FrozenModelConfig) -> str:
    """Return the metric name of step 3's initial model: base, `path`'s step name, or start."""
    if path == base.path:
        return "base"
    name = Path(str(path)).name
    return name if re.fullmatch(r"step\d_\w+", name) else "start"


def respond_with_base(held_out: HeldOutPrompts, base: FrozenModelConfig) -> HeldOutResponses | None:
    """Return the responses of the model before step 1, loaded in full on every process.

    Only the report's prompts get greedy responses. The result is None if no base is named. It is
    also None if the base has another tokenizer, can't be loaded or doesn't fit in memory, since a
    failed comparison must not discard a finished run.
    """
    if base.path is None:
        return None
    # All processes check before any of them loads, so that all take the same path.
    is_usable = _try_on_all(lambda: _check_base(held_out, base), base)
    subset = held_out.with_prompts(held_out.prompts[:NUM_SAMPLES])
    responses = _try_on_all(lambda: _respond(held_out, subset, base), base) if is_usable else None
    if responses is None:
        return None
    sampled, greedy = responses
    return HeldOutResponses(subset.score_all(greedy), held_out.score_all(sampled), kl=math.nan)


def _try_on_all(work: Callable[[], T], base: FrozenModelConfig) -> T | None:
    """Return the result of `work`, or None on all processes if it fails on any."""
    result, reason = None, ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # such as out of memory or damaged files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
    reason = next(filter(None, current_mesh().world.gather_objects(reason)), "")
    if not reason:
        return result
    logger.warning("%s is excluded from the comparison: %s", base.path, reason)
    return None


def _check_base(held_out: HeldOutPrompts, base: FrozenModelConfig) -> bool:
    """Return True; raise ModelError if the base can't respond on this process."""
    actor_vocab = held_out.chat.tokenizer.get_vocab().items()
    if not load_tokenizer(base).get_vocab().items() <= actor_vocab:
        raise ModelError("it has a different tokenizer")
    device = local_device()
    model = load_on_meta(base, task="causal", device=device)
    needed = sum(param.nbytes for param in model.parameters())
    # Even for a GPU, the model is first loaded into host memory.
    available = {"host memory": available_bytes() // launched.local_world_size()}
    if device.type == "cuda":
        available["the GPU"] = free_bytes(device)
    for device_name, free in available.items():
        if needed > free:
            raise ModelError(
                f"its weights need {needed:,} bytes, but {device_name} has only {free:,} free"
            )
    return True


def _respond(
    held_out: HeldOutPrompts, subset: HeldOutPrompts, base: FrozenModelConfig
) -> tuple[list[Response], list[Response]]:
    """Return the base's sampled responses to this process's prompts and greedy ones to `subset`."""
    model = load_causal_lm(base, device=local_device(), seed=held_out.seed)
    add_tokens(model, held_out.chat.tokenizer, seed=held_out.seed)
    sampled = held_out.respond(model, temperature=held_out.temperature)
    return sampled, subset.respond(model, temperature=0.0)


NUM_SAMPLES = 12
"""Number of held-out prompts whose responses the report shows."""

RESPONSES_PER_PROMPT = 5
"""Number of responses per hand-written prompt."""


def measure_talk(held_out: HeldOutPrompts) -> float:
    """Measure the pass rate on the hand-written prompts, with sampling as in chat.py."""
    prompts = [
        Prompt(messages, held_out.chat.encode_prompt(messages), {"answer": question.answer})
        for question in HAND_WRITTEN
        for messages in [(Message("user", question.text),)]
        for _ in range(RESPONSES_PER_PROMPT)
    ]
    hand_written = held_out.with_prompts(prompts)
    with held_out.generating() as actor:
        responses = hand_written.respond(actor, temperature=ChatConfig.temperature)
    verdicts = hand_written.verdicts(hand_written.score_all(responses))
    return sum(verdict is True for verdict in verdicts) / len(verdicts)


def judge_samples(
    held_out: HeldOutPrompts, responses: Mapping[str, HeldOutResponses], samples: Path
) -> dict[str, object]:
    """Write the report's samples to the file `samples`; return the judge's part of `eval`.

    Returns:
        The result of `compute_pass_rates`, and `judge_talk`, from `measure_talk`. Empty unless all
        prompts are from the embedded task.
    """
    if current_mesh().is_main:
        write_samples(held_out, responses, samples)
    if not held_out.is_verifiable:
        return {}
    return {**compute_pass_rates(held_out, responses), "judge_talk": measure_talk(held_out)}


def compute_pass_rates(
    held_out: HeldOutPrompts, responses: Mapping[str, HeldOutResponses]
) -> dict[str, object]:
    """Compute pass rates of sampled responses on the embedded task, or {} for other data.

    Args:
        held_out: the prompts.
        responses: responses by model; the last two are step 3's initial model and its result.

    Returns:
        `judge`: the fraction of passing responses by model; `judge_counts`: the number of prompts,
        and the numbers of prompts on which only step 3's result (gained) or only its initial model
        (lost) passes.
    """
    verdicts = {name: held_out.verdicts(outputs.sampled) for name, outputs in responses.items()}
    known = {name: [v for v in values if v is not None] for name, values in verdicts.items()}
    if any(len(known[name]) < len(verdicts[name]) for name in verdicts):
        return {}
    before, after = list(known)[-2:]
    pairs = list(zip(known[after], known[before], strict=True))
    return {
        "judge": {name: sum(passed) / len(passed) for name, passed in known.items()},
        "judge_counts": {
            "prompts": len(pairs),
            "gained": sum(new and not old for new, old in pairs),
            "lost": sum(old and not new for new, old in pairs),
        },
    }


def write_samples(
    held_out: HeldOutPrompts, responses: Mapping[str, HeldOutResponses], path: Path
) -> None:
    """Write the report's samples: each model's responses to the first prompts."""
    rows = [
        {
            "prompt": _describe_prompt(
                prompt, [outputs.sampled[row] for outputs in responses.values()]
            ),
            "answers": {
                name: describe_response(prompt.messages[-1].content, outputs.sampled[row])
                | {"greedy": describe_response(prompt.messages[-1].content, outputs.greedy[row])}
                for name, outputs in responses.items()
            },
            "temperature": held_out.temperature,
        }
        for row, prompt in enumerate(held_out.prompts[:NUM_SAMPLES])
    ]
    path.write_text(json.dumps(json_safe({"rows": rows}), indent=2, ensure_ascii=False) + "\n")


def _describe_prompt(
    prompt: Prompt, responses: Sequence[ScoredResponse]
) -> Sequence[Mapping[str, Any]]:
    """Return the prompt, or the opening of its environment, as JSON."""
    opening = next((response.opening for response in responses if response.opening), None)
    return [message.turn for message in prompt.messages] if opening is None else opening


def describe_response(question: str, response: ScoredResponse) -> dict[str, Any]:
    """Return a response as JSON, with the verdict if the prompt is from the embedded task."""
    record: dict[str, Any] = {
        "text": response.text,
        "score": response.score,
        "stopped": response.stopped,
    }
    record |= {"rewards": dict(response.rewards)} if response.rewards else {}
    if response.raw_score not in (None, response.score):
        record["raw_score"] = response.raw_score
    verdict = verify(question, response.text)
    if verdict is not None:
        record |= {"correct": verdict.correct, "polite": verdict.polite}
    return record
