"""Evaluation of preference optimization: held-out rows, sampled responses, and the best actor."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from evaluation.evaluate import Generating, TaskEvaluations
from evaluation.held_out import (
    HeldOutPrompts,
    Prompt,
    encode_prompts,
    judge_samples,
    name_start,
    respond_with_base,
)
from evaluation.scored import (
    HeldOutResponses,
    ScoredResponse,
    compare_scores,
    mean_length,
    mean_score,
    stop_rate,
)
from inference.engine.requests import Response, repeated_trigrams
from inference.hybrid_engine import HybridEngine
from inference.reward_model import score_responses
from pipeline.data.batches import collate_or_empty, local_micro_batches
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded
from pipeline.engine.checkpoint.parts import BestWeights
from pipeline.guards.guards import Guards
from pipeline.models.hf.chat import decode_response
from pipeline.models.passes import evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.report.figures import method_title
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.run import Run
from pipeline.run.training import Rows, Training, check_finite, check_initial_metrics
from step3_preference.config import PreferenceConfig
from step3_preference.objective import KTOInputs, MetricSums, kto_weights, objective
from step3_preference.reference import InitialActor, Reference
from step3_preference.rows import BatchWithReference, Row, response_start, split_rows

logger = logging.getLogger(__name__)


def evaluate_rows(
    rows: Sequence[Row], reference: Reference, config: PreferenceConfig
) -> dict[str, float]:
    """Compute the training metrics on held-out rows, without gradients, over all processes.

    For single responses, `accuracy` is the fraction of (good, bad) pairs that the log-ratio orders
    correctly. The responses of a pair share a prompt; if no prompt has both kinds, all (good, bad)
    pairs are compared.
    """
    passes, engine = reference.initial_actor.passes, reference.initial_actor.engine
    good = sum(row.chosen is not None for row in rows)
    weights = kto_weights(good, len(rows) - good, config)
    kto = KTOInputs(reference.z0(rows, first=None), *weights)
    parts, values = list[MetricSums](), dict[int, float]()

    def compute_loss(batch: BatchWithReference) -> Tensor:
        assert batch.reference is not None
        logp = batch.rows.sums(engine(batch.tokens).logprobs)
        loss, metrics = objective(batch.rows, logp, batch.reference, config, kto)
        parts.append(metrics)
        if config.is_unpaired:
            indices = (*batch.rows.chosen, *batch.rows.rejected)
            values.update(zip(indices, (logp - batch.reference).tolist(), strict=True))
        return loss

    batches = reference.add_reference(split_rows(rows, config), reference.held_out_logprobs)
    with evaluating(engine.model):
        passes.forward(batches, compute_loss)
    means = sum(parts, MetricSums.zero()).means(passes, len(rows), paired=not config.is_unpaired)
    if config.is_unpaired:
        gathered = current_mesh().data.gather_objects(passes.from_last_stage(values))
        means["accuracy"] = compute_order_accuracy([{**part} for part in gathered], rows)
    return means


def compute_order_accuracy(parts: Sequence[Mapping[int, float]], rows: Sequence[Row]) -> float:
    """Return the fraction of (good, bad) pairs in the correct order, counting ties as half.

    Args:
        parts: values by row index; each row is in exactly one part.
        rows: rows with single responses.
    """
    values = {index: value for part in parts for index, value in part.items()}
    by_prompt: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
    for index, row in enumerate(rows):
        sequence = row.sequences[0]
        prompt = tuple(sequence.input_ids[: response_start(sequence)])
        good, bad = by_prompt.setdefault(prompt, ([], []))
        (good if row.chosen is not None else bad).append(values[index])
    groups = [group for group in by_prompt.values() if all(group)]
    if not groups:
        groups = [
            (
                [value for good, _ in by_prompt.values() for value in good],
                [value for _, bad in by_prompt.values() for value in bad],
            )
        ]
    pairs = [(a > b) + 0.5 * (a == b) for good, bad in groups for a in good for b in bad]
    return sum(pairs) / max(1, len(pairs))


class HeldOut(HeldOutPrompts):
    """Prompts that no step trained on; a reward model, if there is one, scores the responses."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        chat: ChatFormat,
        generating: Generating,
        initial_actor: InitialActor,
        config: PreferenceConfig,
    ) -> None:
        super().__init__(
            prompts,
            chat,
            generating,
            seed=config.seed,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.generation_batch_size,
        )
        self.initial_actor = initial_actor
        self.config = config

    def with_prompts(self, prompts: Sequence[Prompt]) -> "HeldOut":
        """Return the same evaluation with different prompts."""
        return HeldOut(prompts, self.chat, self.generating, self.initial_actor, self.config)

    def score_all(
        self, responses: Sequence[Response], *, strict: bool = False
    ) -> list[ScoredResponse]:
        """Score the responses of all processes, and return them in the order of the prompts."""
        del strict  # unused: a reward model never fails
        continues = [self.prompts[row].messages[-1].role == "assistant" for row in self.rows]
        texts = [
            decode_response(self.chat.tokenizer, response.text_ids, continues=is_continued)
            for response, is_continued in zip(responses, continues, strict=True)
        ]
        scores = self._score_texts(texts, [response.stopped for response in responses])
        return self.merge_responses(
            [
                ScoredResponse(text, score, length=len(response.ids), stopped=response.stopped)
                for text, score, response in zip(texts, scores, responses, strict=True)
            ]
        )

    def _score_texts(self, texts: Sequence[str], stopped: Sequence[bool]) -> Sequence[float | None]:
        reward = self.config.reward
        if reward.path is None:
            return [None] * len(texts)
        dialogues = [
            (self.prompts[row].messages, text) for row, text in zip(self.rows, texts, strict=True)
        ]
        return score_responses(reward, dialogues, stopped)

    def compute_kl(self, responses: Sequence[Response]) -> float:
        """Return the mean over responses of log pi - log pi_ref, summed over tokens, in nats."""
        rows = [
            Encoded(
                self.prompts[row].input_ids + response.ids,
                [False] * len(self.prompts[row].input_ids) + [True] * len(response.ids),
            )
            for row, response in zip(self.rows, responses, strict=True)
        ]
        engine = self.initial_actor.engine
        with evaluating(engine.model):
            policy = self._compute_logp(rows)
        with self.initial_actor.applied():
            reference = self._compute_logp(rows)
        # The last processes' shares are padded with the first prompts, which must count only once.
        counted = torch.tensor(self.is_counted, dtype=torch.float64)
        total, count = self.data.sums(
            [((policy - reference) * counted).sum().item(), sum(self.is_counted)]
        )
        return total / count

    def compute_repetition(self, responses: Sequence[Response]) -> float:
        """Return the fraction of response tokens that complete a repeated trigram."""
        counted = [r for r, counts in zip(responses, self.is_counted, strict=True) if counts]
        repeated = sum(repeated_trigrams(response.ids) for response in counted)
        tokens = sum(len(response.ids) for response in counted)
        repeated, tokens = self.data.sums([repeated, tokens])
        return repeated / max(1, tokens)

    def _compute_logp(self, rows: Sequence[Encoded]) -> Tensor:
        """Compute the log-probability of each of this process's responses."""
        passes, engine, config = self.initial_actor.passes, self.initial_actor.engine, self.config
        max_tokens = config.micro_batch_size * (config.max_prompt_length + config.max_new_tokens)
        logp = torch.zeros(len(rows), dtype=torch.float64)
        parts = local_micro_batches([len(row) for row in rows], max_tokens=max_tokens)
        batches = [
            collate_or_empty([rows[row] for row in part], filler=rows[0]).to(local_device())
            for part in parts
        ]
        temperature = config.temperature  # that of the responses
        outputs = passes.forward(
            batches, lambda batch: engine(batch, temperature=temperature).logprobs
        )
        for part, logprobs in zip(parts, outputs, strict=False):  # only on the last stage
            counts = [rows[row].num_targets for row in part]
            by_response = logprobs.double().cpu().split(counts) if part else ()
            for row, token_logp in zip(part, by_response, strict=True):
                logp[row] = token_logp.sum()
        return passes.from_last_stage(logp)

    def by_prompt(self, responses: Sequence[ScoredResponse]) -> dict[str, list[float | None]]:
        """Return the judge's value for each response, by the judge's name, or {} without one.

        The judge is the embedded task's verifier if it applies, otherwise the reward model.
        """
        if self.is_verifiable:
            return {"judge": [float(bool(verdict)) for verdict in self.verdicts(responses)]}
        if self.config.reward.path is not None:
            return {"score": [response.score for response in responses]}
        return {}

    def judge_values(self, responses: Sequence[ScoredResponse]) -> list[float | None]:
        """Return the judge's value of each response, or None for each without a judge."""
        return next(iter(self.by_prompt(responses).values()), [None] * len(responses))  # pyrefly: ignore[bad-return]


class Evaluator:
    """Evaluates the actor at the start, at intervals, and at the end.

    The best actor has the lowest loss on held-out rows. The loss only compares given responses, so
    each evaluation also samples the actor's responses to the first held-out prompts.
    """

    def __init__(
        self, training: Training[PreferenceConfig, Row, Rows], reference: Reference
    ) -> None:
        self.training = training
        self.reference = reference
        self.config = config = training.config
        chat = training.rows.chat
        generating = HybridEngine(training.engine, training.model).generating
        prompts = encode_prompts(
            training.rows.data.held_out_prompts,
            training.rows.chat,
            limit=config.max_prompt_length,
            name="held-out",
            setting="preference.max_prompt_length",
            max_prompts=config.data.max_eval_rows,
        )
        self.held_out = HeldOut(prompts, chat, generating, reference.initial_actor, config)
        self.subset = self.held_out.with_prompts(prompts[: config.eval_prompts])
        self.tasks = TaskEvaluations(config, chat, generating)
        self.metrics_by_step: dict[int, dict[str, float]] = {}
        """Metrics on held-out rows by step; a resumed run lacks its earlier steps except 0."""

    @property
    def best(self) -> BestWeights:
        """The best weights so far."""
        return self.training.best

    def begin(self, checkpoints: Checkpoints, run: Run) -> dict[str, float]:
        """Evaluate the initial actor, the first candidate for the best; return its metrics.

        Raises:
            ModelError: the model's metrics are not finite.
            ConfigError: the run is resumed and its initial model no longer exists.
        """
        origin = checkpoints.require_same_start(self.config.model)
        self.initial = self.metrics_by_step[0] = checkpoints.once("rows", self._evaluate_rows)
        check_initial_metrics(self.config.model.path, self.initial)
        self.before = HeldOutResponses.from_dict(
            checkpoints.once("before", lambda: asdict(self.held_out.answer_all()))
        )
        self.initial_tasks = checkpoints.once("tasks", self.tasks.metrics)
        responses = self.before.sampled[: len(self.subset.prompts)]
        metrics = {**self.initial, **self._get_metrics(responses, kl=self.before.kl)}
        if checkpoints.is_new:
            self.best.update(self.initial["loss"], step=0)
            details = {"began_from": origin, **self._values_by_prompt(responses)}
            run.log_eval(0, {**metrics, **self.initial_tasks}, details=details)
        return metrics

    def evaluate(self, step: int, run: Run) -> dict[str, float]:
        """Evaluate the actor after optimizer step `step`, if due; return its metrics.

        Raises:
            DivergedError: the actor's metrics are not finite.
        """
        if not self.training.evaluates_after(step):
            return {}
        metrics = self._evaluate_rows()
        self.metrics_by_step[step] = {**metrics}
        self.best.update(metrics["loss"], step=step)
        details: dict[str, object] = {}
        if self.subset.prompts:
            with self.subset.generating() as actor:
                responses = self.subset.respond(actor, temperature=self.config.temperature)
            scored = self.subset.score_all(responses)
            metrics |= self._get_metrics(scored, kl=self.subset.compute_kl(responses))
            metrics["sampled_repetition"] = self.subset.compute_repetition(responses)
            details = self._values_by_prompt(scored)
        run.log_eval(step, {**metrics, **self.tasks.metrics()}, details=details)
        check_finite(f"of held-out rows after step {step}", metrics)
        return metrics

    def end(self, run: Run, guards: Guards) -> None:
        """Evaluate the exported actor and the base on all prompts; write samples and results."""
        best, config = self.best, self.config
        # A guard that stops the run loads an earlier state.
        changed = guards.stopped and not best.keep
        row_metrics = None if changed else self.metrics_by_step.get(best.exported_step)
        row_metrics = self._evaluate_rows() if row_metrics is None else row_metrics
        after = self.held_out.answer_all()
        evaluation = {
            "accuracy_before": self.initial["accuracy"],
            "accuracy_after": row_metrics["accuracy"],
            **self._summary(after),
            "margin_before": self.initial["margin"],
            "margin_after": row_metrics["margin"],
            **{f"{name}_after": row_metrics[name] for name in ("reward_chosen", "reward_rejected")},
            **{f"{name}_before": self.initial[name] for name in ("logp_chosen", "logp_rejected")},
            **{f"{name}_after": row_metrics[name] for name in ("logp_chosen", "logp_rejected")},
            "pairs": len(self.training.held_out),
            "best_step": best.exported_step,
        }
        exported = self.held_out.by_prompt(after.sampled)
        details = {"eval_by_prompt": {"exported": exported}} if exported else {}
        known = {name: value for name, value in evaluation.items() if value is not None}
        run.log_eval(run.step, known, details=details)
        warn_if_not_improved(self.initial, row_metrics, best, config)
        changed = best.exported_step != best.last_step or guards.stopped
        tasks = self.tasks.summary(self.initial_tasks, changed=changed)
        before = name_start(config.model.path, config.base)
        responses = {before: self.before, config.step_name: after}
        base = None if before == "base" else respond_with_base(self.held_out, config.base)
        if base is not None:
            responses = {"base": base, **responses}
        verification = judge_samples(self.held_out, responses, run.path("samples.json"))
        run.finish(
            eval={**evaluation, **verification, **tasks},
            **({"guards": guards.acted} if guards.acted else {}),
        )

    def _evaluate_rows(self) -> dict[str, float]:
        return evaluate_rows(self.training.held_out, self.reference, self.config)

    def _get_metrics(self, responses: Sequence[ScoredResponse], *, kl: float) -> dict[str, float]:
        """Return metrics of responses sampled during training."""
        if not responses:
            return {}
        scored = {"sampled_score": mean_score(responses)} if self.config.reward.path else {}
        return {
            "kl": kl,
            "sampled_length": mean_length(responses),
            "sampled_stop_rate": stop_rate(responses),
            **scored,
        }

    def _values_by_prompt(self, responses: Sequence[ScoredResponse]) -> dict[str, object]:
        values = self.subset.by_prompt(responses) if responses else {}
        return {"eval_by_prompt": values} if values else {}

    def _summary(self, after: HeldOutResponses) -> dict[str, float | None]:
        """Return metrics of responses to all prompts; the win rate is None without a judge."""
        before = self.before
        new, old = (
            [
                replace(response, score=value)
                for response, value in zip(
                    responses, self.held_out.judge_values(responses), strict=True
                )
            ]
            for responses in (after.greedy, before.greedy)
        )
        wins = compare_scores(new, old) if new[0].score is not None else {"win_rate": None}
        scored: Mapping[str, float] = {}
        if self.config.reward.path is not None:
            scored = {
                "score_before": mean_score(before.greedy),
                "score_after": mean_score(after.greedy),
            }
        return {
            "kl": after.kl,
            **wins,
            "length_before": mean_length(before.greedy),
            "length_after": mean_length(after.greedy),
            "stop_rate": stop_rate(after.greedy),
            "sampled_stop_rate_before": stop_rate(before.sampled),
            "sampled_stop_rate": stop_rate(after.sampled),
            **scored,
        }


def warn_if_not_improved(
    before: Mapping[str, float],
    after: Mapping[str, float],
    best: BestWeights,
    config: PreferenceConfig,
) -> None:
    """Warn if the held-out loss did not improve, or if both sides of pairs became less likely."""
    method = method_title(config.method)
    if best.step == 0 and best.last_step > 0:
        logger.warning(
            "%s did not reduce the loss on held-out rows (initially %.4g)%s. Lower"
            " preference.model.%s, or inspect the rows",
            method,
            before["loss"],
            "; the initial weights are exported" if best.keep else "",
            config.model.peak_lr[0],
        )
    drops = {name: before[name] - after[name] for name in ("logp_chosen", "logp_rejected")}
    if drops["logp_chosen"] > 0.1 * abs(before["logp_chosen"]) and drops["logp_rejected"] > 0:
        logger.warning(
            "held-out chosen responses, like rejected ones, have become less likely (%.3g nats per "
            "token, initially %.3g); to counteract this, raise preference.nll_coef",
            after["logp_chosen"],
            before["logp_chosen"],
        )
