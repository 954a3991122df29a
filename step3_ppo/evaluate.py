"""Evaluation of the initial, current and exported actor on held-out prompts."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from evaluation.evaluate import TaskEvaluations
from evaluation.held_out import HeldOutPrompts, Prompt, judge_samples, name_start, respond_with_base
from evaluation.scored import (
    HeldOutResponses,
    ScoredResponse,
    mean,
    mean_length,
    mean_score,
    source_means,
    stop_rate,
    summarize,
    win_rate,
)
from inference.engine.requests import Response
from pipeline.engine.checkpoint.parts import BestWeights
from pipeline.guards.guards import Guards
from pipeline.models.hf.chat import decode_response
from pipeline.parallel.device import local_device
from pipeline.report.figures import method_title
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.run import Run
from pipeline.run.training import check_finite, check_initial_metrics, evaluation_interval
from pipeline.system.errors import require
from rewards.mixture import GOLD
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse, format_transcript, run_shared_episodes
from step3_ppo.experience import score_responses
from step3_ppo.metrics import get_reward_parts, kl_statistics
from step3_ppo.models import Models
from step3_ppo.reward_sources import ResponseSubmitter
from step3_ppo.rewards import ResponseRewards, compute_raw_scores, compute_rewards, score_to_reward

logger = logging.getLogger(__name__)


NUM_PRINTED_SAMPLES = 2
"""Number of prompts whose responses are printed during training."""


def get_opening(response: Response) -> list[Mapping[str, Any]]:
    """Return the messages before an episode's first response, or [] for other responses."""
    if not isinstance(response, EpisodeResponse):
        return []
    return [turn.turn for turn in response.opening]


class HeldOut(HeldOutPrompts):
    """Prompts that no step trained on; each process responds to its share."""

    def __init__(self, models: Models, prompts: Sequence[Prompt], config: PPOConfig) -> None:
        super().__init__(
            prompts,
            models.chat,
            models.hybrid_engine.generating,
            seed=config.seed,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.generation_batch_size,
        )
        self.models = models
        self.config = config

    def with_prompts(self, prompts: Sequence[Prompt]) -> "HeldOut":
        """Return the same evaluation with different prompts."""
        if self.models.reward is not None and self.models.reward.text is not None:
            self.models.reward.text.register_prompts(prompts)
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
        """Sample responses to the prompts, or episodes if there is an environment."""
        models, config = self.models, self.config
        environments = models.sources.environments
        if environments is None:
            return super()._respond(model, prompts, temperature=temperature, seed=seed, keys=keys)
        return [
            *run_shared_episodes(
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

    def score_all(
        self, responses: Sequence[Response], *, strict: bool = False
    ) -> list[ScoredResponse]:
        """Score the responses of all processes, and return them in the order of the prompts.

        Raises:
            RewardError: as in `compute_rewards`, if `strict`; otherwise failed rewards are unknown.
        """
        rewards = self._compute_rewards(responses, strict=strict)
        scores = [None if math.isnan(score) else score for score in rewards.score.tolist()]
        raw = [None] * len(scores) if rewards.raw_score is None else rewards.raw_score.tolist()
        by_source = rewards.by_source()
        local = [
            ScoredResponse(
                text=self._decode(response),
                score=scores[index],
                length=len(response.ids),
                stopped=response.stopped,
                rewards={
                    **{name: values[index] for name, values in by_source.items()},
                    **get_reward_parts(response, self.config),
                },
                opening=get_opening(response),
                raw_score=raw[index],
            )
            for index, response in enumerate(responses)
        ]
        return self.merge_responses(local)

    def compute_kl(self, responses: Sequence[Response]) -> float:
        """Return the KL to the reference in nats per response, or NaN without a reference."""
        if self.config.reference_role != "reference":
            return math.nan
        unused = torch.zeros(len(responses))  # instead of another pass of the reward model
        inputs = self._prompt_ids(), responses, self.config
        experience = score_responses(self.models, *inputs, score=unused)
        # The last processes' shares are padded with the first prompts, which must count only once.
        counted = torch.tensor(self.is_counted, device=experience.mask.device)
        return kl_statistics(experience, counted)["kl"]

    def by_prompt(self, responses: Sequence[ScoredResponse]) -> dict[str, list[float | None]]:
        """Return the best available metric of each response, under its name, or None if unknown.

        The metric is the verdict of the embedded task's verifier if it applies, otherwise the gold
        reward if there is one, otherwise the training reward.
        """
        if self.is_verifiable:
            return {"judge": [float(bool(verdict)) for verdict in self.verdicts(responses)]}
        if self.config.gold is not None:
            return {GOLD: [response.rewards.get(GOLD) for response in responses]}
        name = "reward" if self.config.rewards else "score"
        return {name: [response.score for response in responses]}

    @property
    def is_verifiable(self) -> bool:
        """Whether all prompts are from the embedded task, with one turn."""
        return self.config.environment is None and super().is_verifiable

    def print_samples(self, iteration: int) -> None:
        """Log the actor's greedy responses to the first prompts."""
        prompts = self.prompts[:NUM_PRINTED_SAMPLES]
        with self.generating() as actor:
            responses = self._respond(
                actor, prompts, temperature=0.0, seed=self.config.seed, keys=range(len(prompts))
            )
        for prompt, response in zip(prompts, responses, strict=True):
            opening = get_opening(response)
            question = opening[-1]["content"] if opening else prompt.messages[-1].content
            logger.info("iteration %d: %r -> %r", iteration, question, self._decode(response))

    def _decode(self, response: Response) -> str:
        if isinstance(response, EpisodeResponse):
            return format_transcript(response.turns)
        return decode_response(self.models.chat.tokenizer, response.text_ids)

    def _prompt_ids(self) -> list[list[int]]:
        return [self.prompts[row].input_ids for row in self.rows]

    def _compute_rewards(self, responses: Sequence[Response], *, strict: bool) -> ResponseRewards:
        models = self.models
        prompts = [self.prompts[row] for row in self.rows]
        submit = ResponseSubmitter(models.sources, prompts, models.chat)
        for index, response in enumerate(responses):
            submit(index, response)
        has_model = models.reward is not None
        inputs = self._prompt_ids()
        score = compute_raw_scores(models, inputs, responses, self.config) if has_model else None
        stopped = torch.tensor([response.stopped for response in responses], device=local_device())
        rewards = compute_rewards(models, score, stopped, self.config, strict=strict)
        if not self.config.is_distillation:
            return rewards
        experience = score_responses(models, inputs, responses, self.config)
        assert experience.ref_logprobs is not None
        log_ratio = (experience.logprobs - experience.ref_logprobs) * experience.mask
        return replace(rewards, score=-log_ratio.sum(dim=1))

    def compute_objective(self, responses: Sequence[ScoredResponse], *, kl: float) -> float:
        """Return the objective on these prompts: mean reward minus the KL penalty.

        Higher is better. The KL is weighted by the setting kl_coef, even if kl_coef is adapted.
        """
        penalty = self.config.kl_weight * kl if self.config.reference_role == "reference" else 0.0
        if self.config.rewards or self.config.is_distillation:  # their scores are the objective
            scores = [response.score for response in responses if response.score is not None]
            return mean(scores) - penalty
        scores = [math.nan if response.score is None else response.score for response in responses]
        score = torch.tensor(scores)
        stopped = torch.tensor([response.stopped for response in responses])
        reward = score_to_reward(score, stopped, self.models, self.config)
        return reward.double().mean().item() - penalty


class Evaluator:
    """Evaluates the actor at the start, at intervals, and at the end.

    Intermediate evaluations sample a response to each of the first `rollout_size` held-out prompts.
    The best actor has the highest objective, mean reward minus the KL penalty. If a guard stops or
    rolls back on divergence, the best actor's gold reward also must not be below its initial value.
    """

    def __init__(
        self, models: Models, prompts: Sequence[Prompt], config: PPOConfig, *, total_steps: int
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.held_out = HeldOut(models, prompts, config)
        self.subset = HeldOut(models, prompts[: config.rollout_size], config)
        self.interval = evaluation_interval(
            config.eval_every,
            total_steps=total_steps,
            cost=estimate_evaluation_cost(len(self.subset.prompts), config),
        )
        self.best = BestWeights(models.actor, keep=config.keep_best)
        self.tasks = TaskEvaluations(config, models.chat, models.hybrid_engine.generating)
        self.initial_objective = 0.0
        """The initial actor's objective."""
        self.min_gold = -math.inf
        """Minimum gold reward of the best actor, regardless of its objective."""

    def begin(self, checkpoints: Checkpoints, run: Run) -> None:
        """Evaluate the initial actor, the first candidate for the best, on all held-out prompts.

        Raises:
            ModelError: the model's metrics are not finite.
            RewardError: a reward source fails on too many responses.
            ConfigError: no source applies to any response, or the run is resumed and its initial
                model no longer exists.
        """
        origin = checkpoints.require_same_start(self.config.actor)
        state = checkpoints.once("before", lambda: asdict(self.held_out.answer_all(strict=True)))
        self.before = HeldOutResponses.from_dict(state)
        responses = self.before.sampled[: len(self.subset.prompts)]
        require(
            not self.config.rewards or any(response.score is not None for response in responses),
            "no response to a held-out prompt has a reward: none of the sources in ppo.rewards"
            " applies; check the columns that they read, for example for non-numeric answers",
        )
        metrics = self._get_metrics(responses, kl=self.before.kl)
        # If the KL is finite, so is the actor's output, and the reward model causes other values.
        has_model_score = self.config.uses_reward_model and not self.config.rewards
        is_actor = not has_model_score or not math.isfinite(metrics.get("kl", 0.0))
        model = self.config.actor if is_actor else self.config.reward
        check_initial_metrics(model.path, metrics)
        self.initial_objective = metrics["objective"]
        if any(guard.signal == "divergence" for guard in self.config.acting_guards):
            self.min_gold = metrics.get(GOLD, -math.inf)
        self.initial_tasks = checkpoints.once("tasks", self.tasks.metrics)
        if checkpoints.is_new:
            greedy = self.before.greedy
            self.best.update(-self.initial_objective, step=0)
            greedy_score = {self._score_name: mean_score(greedy)}
            greedy_score |= {"stop_rate": stop_rate(greedy)}
            details = {"eval_by_prompt": self.subset.by_prompt(responses), "began_from": origin}
            run.log_eval(0, {**greedy_score, **metrics, **self.initial_tasks}, details=details)

    def evaluate(self, step: int, run: Run, *, is_last: bool = False) -> None:
        """Print samples after iteration `step` if due; evaluate the actor if due or `is_last`.

        Raises:
            DivergedError: the actor's metrics are not finite.
            RewardError: a reward source fails on too many responses.
        """
        if step % self.config.samples_every == 0:
            self.held_out.print_samples(step)
        if step % self.interval and step != self.total_steps and not is_last:
            return
        with self.subset.generating() as actor:
            responses = self.subset.respond(actor, temperature=self.config.temperature)
        scored = self.subset.score_all(responses, strict=True)
        metrics = self._get_metrics(scored, kl=self.subset.compute_kl(responses))
        is_eligible = metrics.get(GOLD, math.inf) >= self.min_gold
        self.best.update(-metrics["objective"], step=step, may_be_best=is_eligible)
        details = {"eval_by_prompt": self.subset.by_prompt(scored)}
        run.log_eval(step, {**metrics, **self.tasks.metrics()}, details=details)
        check_finite(f"of held-out prompts after iteration {step}", metrics)

    def end(self, run: Run, guards: Guards) -> None:
        """Evaluate the exported actor and the base on all prompts; write samples and results."""
        warn_if_not_improved(self.best, self.initial_objective, self.config)
        after = self.held_out.answer_all()
        evaluation = {
            **summarize(self.before, after, name=self._score_name),
            "best_step": self.best.step if self.config.keep_best else run.step,
        }
        exported = {"exported": self.held_out.by_prompt(after.sampled)}
        run.log_eval(run.step, evaluation, details={"eval_by_prompt": exported})
        changed = self.best.exported_step != self.best.last_step or guards.stopped
        tasks = self.tasks.summary(self.initial_tasks, changed=changed)
        before = name_start(self.config.actor.path, self.config.base)
        responses = {before: self.before, self.config.step_name: after}
        base = None if before == "base" else respond_with_base(self.held_out, self.config.base)
        if base is not None:
            responses = {"base": base, **responses}
        verification = judge_samples(self.held_out, responses, run.path("samples.json"))
        run.finish(
            eval={**evaluation, **verification, **tasks},
            samples=run.step * self.config.rollout_size,
            **({"guards": guards.acted} if guards.acted else {}),
        )

    def _get_metrics(self, responses: Sequence[ScoredResponse], *, kl: float) -> dict[str, float]:
        """Return metrics of sampled responses, such as the win rate over the initial actor."""
        return {
            "objective": self.subset.compute_objective(responses, kl=kl),
            f"sampled_{self._score_name}": mean_score(responses),
            **({"kl": kl} if self.config.reference_role == "reference" else {}),
            "sampled_length": mean_length(responses),
            "sampled_stop_rate": stop_rate(responses),
            "sampled_win_rate": win_rate(responses, self.before.sampled[: len(responses)]),
            **source_means(responses),
        }

    @property
    def _score_name(self) -> str:
        """Name of the responses' score in metrics."""
        return "reward" if self.config.rewards else "score"


def estimate_evaluation_cost(num_prompts: int, config: PPOConfig) -> float:
    """Estimate the cost of an evaluation during training, as a number of iterations.

    Generation is counted as four passes, scoring as one per model, and training as three per
    trained model and epoch.
    """
    trained = 2 if config.has_critic else 1
    frozen = (config.reference_role is not None) + config.uses_reward_model
    forward_passes = 4 + frozen + trained
    backward_passes = 3 * trained * config.ppo_epochs
    return num_prompts / config.rollout_size * forward_passes / (forward_passes + backward_passes)


def warn_if_not_improved(best: BestWeights, initial: float, config: PPOConfig) -> None:
    """Warn if no evaluated actor was better than the initial one, or if the final one is worse.

    Actors are compared by their objective: mean reward minus kl_coef times the KL.
    """
    objective = -best.last
    method = method_title(config.method_name)
    if best.step == 0:
        logger.warning(
            "%s did not improve the actor on held-out prompts (%.3g, initially %.3g)%s. Train"
            " longer, lower ppo.actor.%s, or inspect the %s",
            method,
            objective,
            initial,
            "; the initial weights are exported" if best.keep else "",
            config.actor.peak_lr[0],
            "reward model" if config.uses_reward_model else "rewards",
        )
    elif objective < initial:
        logger.warning(
            "%s made the final actor worse than the initial one (%.3g on held-out prompts, "
            "initially %.3g)%s. Lower ppo.actor.%s",
            method,
            objective,
            initial,
            f"; the weights after iteration {best.step} ({-best.value:.3g}) are exported"
            if best.keep
            else "",
            config.actor.peak_lr[0],
        )
