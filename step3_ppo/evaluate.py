"""How models answer held-out prompts: texts, scores, win rate, KL, the judge's rate."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from inference.generation import Response, generate
from pipeline.data.embedded import verify
from pipeline.models.chat import decode_response
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.config import PPOConfig
from step3_ppo.models import Models
from step3_ppo.prompts import Prompt
from step3_ppo.rollout import score_responses
from step3_ppo.scoring import counted_scores, raw_scores, reward_of

logger = logging.getLogger(__name__)

SHOWN = 2
"""Prompts whose answers are printed during training."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to a held-out prompt."""

    text: str
    score: float
    """The reward model's score, as `scoring.counted_scores` counts it."""
    length: int
    """Tokens, the end-of-turn token included."""
    stopped: bool


class HeldOut:
    """Prompts that no step trained on; every process answers its share."""

    def __init__(self, models: Models, prompts: Sequence[Prompt], config: PPOConfig) -> None:
        self.models = models
        self.prompts = list(prompts)
        self.config = config
        # Every process takes equally many; the last ones go round to the first prompts again.
        data = self.data = current_mesh().data
        share = math.ceil(len(self.prompts) / data.size)
        self.rows = [
            (data.rank + number * data.size) % len(self.prompts) for number in range(share)
        ]

    def respond(self, model: nn.Module, *, temperature: float) -> list[Response]:
        """Responses of a model in evaluation mode to this process's prompts; 0 decodes greedily."""
        return generate(
            model,
            self._inputs(),
            max_new_tokens=self.config.max_new_tokens,
            temperature=temperature,
            stop_ids=self.models.chat.stop_ids,
            seed=self.config.seed + 1,
            keys=self.rows,
            batch_size=self.config.generation_batch_size,
        )

    def answers(self, responses: Sequence[Response]) -> list[Answer]:
        """Text and score of the responses of all processes, in the order of the prompts."""
        mine = [
            Answer(
                text=decode_response(self.models.tokenizer, response.ids),
                score=score,
                length=len(response.ids),
                stopped=response.stopped,
            )
            for response, score in zip(responses, self._scores(responses), strict=True)
        ]
        everyones = self.data.gather_objects(dict(zip(self.rows, mine, strict=True)))
        merged = {row: answer for answers in everyones for row, answer in answers.items()}
        return [merged[row] for row in range(len(self.prompts))]

    def kl(self, responses: Sequence[Response]) -> float:
        """Mean of log pi - log pi_ref summed over a response the actor sampled, in nats."""
        experience = score_responses(
            self.models, self._inputs(), responses, self.config, learns=False
        )
        log_ratio = (experience.logprobs - experience.ref_logprobs)[experience.mask]
        total, count = self.data.sums([log_ratio.double().sum().item(), len(responses)])
        return total / count

    def verdicts(self, answers: Sequence[Answer]) -> list[bool | None]:
        """Whether each answer is correct and polite; None where the prompt is not of that task."""
        verdicts = [
            verify(prompt.messages[-1].content, answer.text) if len(prompt.messages) == 1 else None
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        return [None if verdict is None else verdict.both for verdict in verdicts]

    @property
    def is_verifiable(self) -> bool:
        """Every prompt is one of the embedded task's."""
        return all(
            len(prompt.messages) == 1 and verify(prompt.messages[0].content, "") is not None
            for prompt in self.prompts
        )

    def print_samples(self, iteration: int) -> None:
        """Log the actor's greedy answers to the first prompts."""
        shown = self.prompts[:SHOWN]
        with self.models.hybrid_engine.generating() as actor:
            responses = generate(
                actor,
                [prompt.input_ids for prompt in shown],
                max_new_tokens=self.config.max_new_tokens,
                temperature=0.0,
                stop_ids=self.models.chat.stop_ids,
                seed=self.config.seed,
            )
        for prompt, response in zip(shown, responses, strict=True):
            text = decode_response(self.models.tokenizer, response.ids)
            logger.info("iteration %d: %r -> %r", iteration, prompt.messages[-1].content, text)

    def _inputs(self) -> list[list[int]]:
        return [self.prompts[row].input_ids for row in self.rows]

    def _scores(self, responses: Sequence[Response]) -> list[float]:
        score = raw_scores(self.models, self._inputs(), responses, self.config)
        stopped = torch.tensor([each.stopped for each in responses], device=local_device())
        return counted_scores(score, stopped, self.models, self.config).tolist()

    def objective(self, answers: Sequence[Answer], *, kl: float) -> float:
        """What PPO maximizes, on these prompts: mean reward less kl_coef times the KL in nats.

        The higher, the better; kl_coef is the setting, where it adapts as well.
        """
        score = torch.tensor([answer.score for answer in answers])
        stopped = torch.tensor([answer.stopped for answer in answers])
        reward = reward_of(score, stopped, self.models, self.config)
        return reward.double().mean().item() - self.config.kl_weight * kl


def win_rate(new: Sequence[Answer], old: Sequence[Answer]) -> float:
    """Share of prompts on which the new answer scores higher; ties count half."""
    wins = sum(
        (a.score > b.score) + 0.5 * (a.score == b.score) for a, b in zip(new, old, strict=True)
    )
    return wins / len(new)


def comparison(new: Sequence[Answer], old: Sequence[Answer]) -> dict[str, int | float]:
    """The win rate, and what its uncertainty follows from: prompts, wins and losses."""
    return {
        "win_rate": win_rate(new, old),
        "prompts": len(new),
        "wins": sum(a.score > b.score for a, b in zip(new, old, strict=True)),
        "losses": sum(a.score < b.score for a, b in zip(new, old, strict=True)),
    }


def mean_score(answers: Sequence[Answer]) -> float:
    """Mean score of the reward model, of unfinished answers as `counted_scores` counts them."""
    return sum(answer.score for answer in answers) / len(answers)


def mean_length(answers: Sequence[Answer]) -> float:
    """Mean length in tokens."""
    return sum(answer.length for answer in answers) / len(answers)


def stop_rate(answers: Sequence[Answer]) -> float:
    """Share of answers that ended by themselves."""
    return sum(answer.stopped for answer in answers) / len(answers)
