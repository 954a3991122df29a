"""How models answer held-out prompts: texts, scores, win rate, KL, the judge's rate."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from inference.generation import Response, generate
from pipeline.data.embedded import verify
from pipeline.models.chat import decode_response
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.config import PPOConfig
from step3_ppo.episode_statistics import parts_of
from step3_ppo.episodes import EpisodeResponse, play, transcript
from step3_ppo.models import Models
from step3_ppo.prompts import Prompt
from step3_ppo.response_rewards import ResponseRewards, rewards_of
from step3_ppo.reward_sources import GOLD
from step3_ppo.rollout import score_responses
from step3_ppo.scoring import raw_scores, reward_of

logger = logging.getLogger(__name__)

SHOWN = 2
"""Prompts whose answers are printed during training."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to a held-out prompt."""

    text: str
    """Of an episode all its turns."""
    score: float | None
    """As `ResponseRewards.score` has it: a reward model's score, else the reward; None where it is
    not known."""
    length: int
    """Tokens, the end-of-turn token included."""
    stopped: bool
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """What each source gave, by the name of its metric."""
    opening: Sequence[Mapping[str, str]] = ()
    """Of an episode: what its environment began with, as messages of role and content."""


def opening_of(response: Response) -> list[Mapping[str, str]]:
    """What an episode began with; empty for any other response."""
    if not isinstance(response, EpisodeResponse):
        return []
    return [{"role": each.role, "content": each.content} for each in response.opening]


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
        prompts = [self.prompts[row] for row in self.rows]
        seed = self.config.seed + 1
        return self._respond(model, prompts, temperature=temperature, seed=seed, keys=self.rows)

    def _respond(
        self,
        model: nn.Module,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        seed: int,
        keys: Sequence[int],
    ) -> list[Response]:
        """Responses, or episodes where there is an environment."""
        models, config = self.models, self.config
        environments = models.sources.environments
        if environments is None:
            return generate(
                model,
                [prompt.input_ids for prompt in prompts],
                max_new_tokens=config.max_new_tokens,
                temperature=temperature,
                stop_ids=models.chat.stop_ids,
                seed=seed,
                keys=keys,
                batch_size=config.generation_batch_size,
            )
        return [
            *play(
                model,
                models.chat,
                environments,
                prompts,
                config,
                temperature=temperature,
                seed=seed,
                keys=keys,
            )
        ]

    def answers(self, responses: Sequence[Response], *, strict: bool = False) -> list[Answer]:
        """Text and score of the responses of all processes, in the order of the prompts.

        Raises:
            RewardError: as `rewards_of`, with `strict`; else rewards that failed are not known.
        """
        rewards = self._rewards(responses, strict=strict)
        known = zip(rewards.score.tolist(), rewards.known.tolist(), strict=True)
        scores = [score if is_known else None for score, is_known in known]
        by_source = rewards.by_source()
        mine = [
            Answer(
                text=self._text(response),
                score=scores[place],
                length=len(response.ids),
                stopped=response.stopped,
                rewards={
                    **{name: values[place] for name, values in by_source.items()},
                    **self._parts(response),
                },
                opening=opening_of(response),
            )
            for place, response in enumerate(responses)
        ]
        everyones = self.data.gather_objects(dict(zip(self.rows, mine, strict=True)))
        merged = {row: answer for answers in everyones for row, answer in answers.items()}
        return [merged[row] for row in range(len(self.prompts))]

    def kl(self, responses: Sequence[Response]) -> float:
        """Mean of log pi - log pi_ref summed over a response the actor sampled, in nats."""
        experience = score_responses(
            self.models, self._inputs(), responses, self.config, learns=False
        )
        # The last processes go round to the first prompts, which count once.
        size, num_prompts = self.data.size, len(self.prompts)
        own = [self.data.rank + place * size < num_prompts for place in range(len(responses))]
        mask = experience.mask & torch.tensor(own, device=experience.mask.device)[:, None]
        log_ratio = (experience.logprobs - experience.ref_logprobs)[mask]
        total, count = self.data.sums([log_ratio.double().sum().item(), sum(own)])
        return total / count

    def verdicts(self, answers: Sequence[Answer]) -> list[bool | None]:
        """Whether each answer is correct and polite; None where the prompt is not of that task."""
        verdicts = [
            verify(prompt.messages[-1].content, answer.text)
            if len(prompt.messages) == 1 and not answer.opening
            else None
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        return [None if verdict is None else verdict.both for verdict in verdicts]

    def by_prompt(self, answers: Sequence[Answer]) -> dict[str, list[float | None]]:
        """What tells best how good each answer is, under its name; None where it is not known.

        The verdicts of the embedded task's program, else the gold source, else what is trained on.
        """
        if self.is_verifiable:
            return {"judge": [float(bool(verdict)) for verdict in self.verdicts(answers)]}
        if self.config.gold is not None:
            return {GOLD: [answer.rewards.get(GOLD) for answer in answers]}
        name = "reward" if self.config.rewards else "score"
        return {name: [answer.score for answer in answers]}

    @property
    def is_verifiable(self) -> bool:
        """Every prompt is one of the embedded task's, and its answer is one turn."""
        return self.config.environment is None and all(
            len(prompt.messages) == 1 and verify(prompt.messages[0].content, "") is not None
            for prompt in self.prompts
        )

    def print_samples(self, iteration: int) -> None:
        """Log the actor's greedy answers to the first prompts."""
        shown = self.prompts[:SHOWN]
        with self.models.hybrid_engine.generating() as actor:
            responses = self._respond(
                actor, shown, temperature=0.0, seed=self.config.seed, keys=range(len(shown))
            )
        for prompt, response in zip(shown, responses, strict=True):
            opening = opening_of(response)
            question = opening[-1]["content"] if opening else prompt.messages[-1].content
            logger.info("iteration %d: %r -> %r", iteration, question, self._text(response))

    def _text(self, response: Response) -> str:
        if isinstance(response, EpisodeResponse):
            return transcript(response.turns)
        return decode_response(self.models.tokenizer, response.ids)

    def _parts(self, response: Response) -> dict[str, float]:
        is_episode = isinstance(response, EpisodeResponse)
        return parts_of(response, self.config) if is_episode else {}

    def _inputs(self) -> list[list[int]]:
        return [self.prompts[row].input_ids for row in self.rows]

    def _rewards(self, responses: Sequence[Response], *, strict: bool) -> ResponseRewards:
        models = self.models
        submit = models.sources.submitting(
            [self.prompts[row] for row in self.rows], models.tokenizer
        )
        for index, response in enumerate(responses):
            submit(index, response)
        has_model = models.reward is not None
        score = raw_scores(models, self._inputs(), responses, self.config) if has_model else None
        stopped = torch.tensor([each.stopped for each in responses], device=local_device())
        return rewards_of(models, score, stopped, self.config, learns=False, strict=strict)

    def objective(self, answers: Sequence[Answer], *, kl: float) -> float:
        """What is maximized, on these prompts: mean reward less kl_coef times the KL in nats.

        The higher, the better; kl_coef is the setting, where it adapts as well.
        """
        if self.config.rewards:  # whose scores are what is maximized
            known = [answer.score for answer in answers if answer.score is not None]
            return mean(known) - self.config.kl_coef * kl
        score = torch.tensor([answer.score for answer in answers])
        stopped = torch.tensor([answer.stopped for answer in answers])
        reward = reward_of(score, stopped, self.models, self.config)
        return reward.double().mean().item() - self.config.kl_weight * kl


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def scored_pairs(new: Sequence[Answer], old: Sequence[Answer]) -> list[tuple[float, float]]:
    """The scores of both, on the prompts on which both are known."""
    return [
        (a.score, b.score)
        for a, b in zip(new, old, strict=True)
        if a.score is not None and b.score is not None
    ]


def win_rate(new: Sequence[Answer], old: Sequence[Answer]) -> float:
    """Share of prompts on which the new answer scores higher; ties count half."""
    return mean([(a > b) + 0.5 * (a == b) for a, b in scored_pairs(new, old)])


def comparison(new: Sequence[Answer], old: Sequence[Answer]) -> dict[str, int | float]:
    """The win rate and what its uncertainty follows from: prompts, wins and losses."""
    pairs = scored_pairs(new, old)
    return {
        "win_rate": win_rate(new, old),
        "prompts": len(pairs),
        "wins": sum(a > b for a, b in pairs),
        "losses": sum(a < b for a, b in pairs),
    }


def mean_score(answers: Sequence[Answer]) -> float:
    """Mean score of the answers whose score is known."""
    return mean([answer.score for answer in answers if answer.score is not None])


def source_means(answers: Sequence[Answer]) -> dict[str, float]:
    """Mean of what each source gave, by the name of its metric; of those that gave anything."""
    names = dict.fromkeys(name for answer in answers for name in answer.rewards)
    values = {
        name: [value for each in answers if (value := each.rewards.get(name)) is not None]
        for name in names
    }
    return {name: mean(known) for name, known in values.items() if known}


def mean_length(answers: Sequence[Answer]) -> float:
    """Mean length in tokens."""
    return sum(answer.length for answer in answers) / len(answers)


def stop_rate(answers: Sequence[Answer]) -> float:
    """Share of answers that ended by themselves."""
    return sum(answer.stopped for answer in answers) / len(answers)
