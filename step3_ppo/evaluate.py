"""How models answer held-out prompts: texts, scores, win rate, KL, the judge's rate."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from evaluation.held_out import HeldOutPrompts
from evaluation.responding import Chat
from evaluation.scored import HeldOutResponses, ScoredResponse, mean
from inference.generation import Response
from pipeline.models.chat import decode_response
from pipeline.parallel.device import local_device
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse, transcript
from step3_ppo.models import Models
from step3_ppo.prompts import Prompt
from step3_ppo.response_rewards import ResponseRewards, rewards_of
from step3_ppo.reward_sources import GOLD
from step3_ppo.rollout import score_responses
from step3_ppo.scoring import raw_scores, reward_of
from step3_ppo.shared_play import play_shared
from step3_ppo.statistics import parts_of

logger = logging.getLogger(__name__)

SHOWN = 2
"""Prompts whose responses are printed during training."""


def opening_of(response: Response) -> list[Mapping[str, str]]:
    """What an episode began with; empty for any other response."""
    if not isinstance(response, EpisodeResponse):
        return []
    return [{"role": each.role, "content": each.content} for each in response.opening]


class HeldOut(HeldOutPrompts):
    """Prompts that no step trained on; every process answers its share."""

    def __init__(self, models: Models, prompts: Sequence[Prompt], config: PPOConfig) -> None:
        super().__init__(
            prompts,
            Chat(models.tokenizer, models.chat),
            models.hybrid_engine.generating,
            seed=config.seed,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.generation_batch_size,
        )
        self.models = models
        self.config = config

    def on(self, prompts: Sequence[Prompt]) -> "HeldOut":
        """Other prompts, answered and judged in the same way."""
        if self.models.reward is not None and self.models.reward.text is not None:
            self.models.reward.text.know(prompts)
        return HeldOut(self.models, prompts, self.config)

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
            return super()._respond(model, prompts, temperature=temperature, seed=seed, keys=keys)
        return [
            *play_shared(
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

    def answer_all(self, *, strict: bool = False) -> HeldOutResponses:
        """The actor's two sets of responses, as it is now: greedy, and sampled.

        Raises:
            RewardError: with `strict`, where rewards fail.
        """
        with self.generating() as actor:
            sampled = self.respond(actor, temperature=self.config.temperature)
            greedy = self.respond(actor, temperature=0.0)
        return HeldOutResponses(
            greedy=self.scored(greedy, strict=strict),
            sampled=self.scored(sampled, strict=strict),
            kl=self.kl(sampled),
        )

    def scored(
        self, responses: Sequence[Response], *, strict: bool = False
    ) -> list[ScoredResponse]:
        """Text and score of the responses of all processes, in the order of the prompts.

        Raises:
            RewardError: as `rewards_of`, with `strict`; else rewards that failed are not known.
        """
        rewards = self._rewards(responses, strict=strict)
        known = zip(rewards.score.tolist(), rewards.known.tolist(), strict=True)
        scores = [score if is_known else None for score, is_known in known]
        by_source = rewards.by_source()
        mine = [
            ScoredResponse(
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
        return self.merged(mine)

    def kl(self, responses: Sequence[Response]) -> float:
        """Mean of log pi - log pi_ref summed over a response the actor sampled, in nats."""
        experience = score_responses(
            self.models, self._inputs(), responses, self.config, learns=False
        )
        # The last processes go round to the first prompts, which count once.
        own = self.counted
        mask = experience.mask & torch.tensor(own, device=experience.mask.device)[:, None]
        log_ratio = (experience.logprobs - experience.ref_logprobs)[mask]
        total, count = self.data.sums([log_ratio.double().sum().item(), sum(own)])
        return total / count

    def by_prompt(self, responses: Sequence[ScoredResponse]) -> dict[str, list[float | None]]:
        """What tells best how good each response is, under its name; None where it is not known.

        The verdicts of the embedded task's program, else the gold source, else what is trained on.
        """
        if self.is_verifiable:
            return {"judge": [float(bool(verdict)) for verdict in self.verdicts(responses)]}
        if self.config.gold is not None:
            return {GOLD: [response.rewards.get(GOLD) for response in responses]}
        name = "reward" if self.config.rewards else "score"
        return {name: [response.score for response in responses]}

    @property
    def is_verifiable(self) -> bool:
        """Every prompt is one of the embedded task's, and its response is one turn."""
        return self.config.environment is None and super().is_verifiable

    def print_samples(self, iteration: int) -> None:
        """Log the actor's greedy responses to the first prompts."""
        shown = self.prompts[:SHOWN]
        with self.generating() as actor:
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

    def objective(self, responses: Sequence[ScoredResponse], *, kl: float) -> float:
        """What is maximized, on these prompts: mean reward less kl_coef times the KL in nats.

        The higher, the better; kl_coef is the setting, where it adapts as well.
        """
        if self.config.rewards:  # whose scores are what is maximized
            known = [response.score for response in responses if response.score is not None]
            return mean(known) - self.config.kl_coef * kl
        score = torch.tensor([response.score for response in responses])
        stopped = torch.tensor([response.stopped for response in responses])
        reward = reward_of(score, stopped, self.models, self.config)
        return reward.double().mean().item() - self.config.kl_weight * kl
