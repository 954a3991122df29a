"""How the actor does on held-out rows and prompts over a run, and which actor was the best."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from evaluation.base_model import responses_of_base
from evaluation.held_out import Prompt
from evaluation.in_training import TaskEvaluations, generating_from
from evaluation.responding import Chat
from evaluation.scored import (
    HeldOutResponses,
    ScoredResponse,
    comparison,
    mean_length,
    mean_score,
    stop_rate,
)
from evaluation.verification import conclude
from pipeline.checkpoints import Checkpoints
from pipeline.config import EMBEDDED
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.divergence import check_finite, check_start
from pipeline.engine.best import BestWeights
from pipeline.errors import DataError, require
from pipeline.guards.guards import Guards
from pipeline.models.card import Card
from pipeline.models.load import model_path
from pipeline.offline import Rows, Training
from pipeline.origin import training_at
from pipeline.run import Run
from step3_preference.config import PreferenceConfig
from step3_preference.evaluate import HeldOut, evaluate_rows
from step3_preference.methods import TITLES
from step3_preference.reference import Reference
from step3_preference.rows import Row


def held_out_prompts(
    examples: Sequence[Example], chat: ChatFormat, config: PreferenceConfig
) -> list[Prompt]:
    """The prompts as token ids; those over `max_prompt_length` are left out, and counted.

    Raises:
        DataError: none is short enough.
    """
    encoded = [
        Prompt(each.prompt, chat.encode_prompt(each.prompt), each.extra) for each in examples
    ]
    short = [each for each in encoded if len(each.input_ids) <= config.max_prompt_length]
    if not short:
        shortest = min(len(each.input_ids) for each in encoded)
        raise DataError(
            f"every held-out prompt is longer than preference.max_prompt_length"
            f" {config.max_prompt_length} (the shortest has {shortest} tokens); raise it"
        )
    if len(short) < len(encoded):
        logger.info(
            "%d of %d held-out prompts are longer than max_prompt_length %d and not answered",
            *(len(encoded) - len(short), len(encoded), config.max_prompt_length),
        )
    return short


logger = logging.getLogger(__name__)


class Course:
    """Evaluates the actor at the start, now and then, and at the end.

    The best actor is that of the smallest loss on held-out rows. A loss sees how responses compare,
    not what the actor writes: so it also answers the first held-out prompts each time.
    """

    def __init__(
        self, training: Training[PreferenceConfig, Row, Rows], reference: Reference
    ) -> None:
        self.training = training
        self.reference = reference
        self.config = config = training.config
        chat = Chat(training.rows.tokenizer, training.rows.chat)
        generating = generating_from(training.model, training.engine)
        prompts = held_out_prompts(training.rows.data.held_out_prompts, training.rows.chat, config)
        self.held_out = HeldOut(prompts, chat, generating, reference.start, config)
        self.watched = self.held_out.on(prompts[: config.eval_prompts])
        self.tasks = TaskEvaluations(config, chat, generating)

    @property
    def best(self) -> BestWeights:
        """The best weights so far."""
        return self.training.best

    def begin(self, checkpoints: Checkpoints, run: Run) -> dict[str, float]:
        """Evaluate the actor as it begins; it is the first candidate. Returns its figures.

        Raises:
            ModelError: its figures are not finite.
            ConfigError: the run goes on, and the model that it began from is no longer there.
        """
        path = model_path(self.config.model)
        training = training_at(path)
        require(
            checkpoints.once("training", lambda: training) == training,
            f"the model in {path} is not the one that this run began from: it was trained again;"
            " restore that one, or pass --overwrite to start again",
        )
        self.first = checkpoints.once("rows", self._rows)
        check_start(self.config.model.path, self.first)
        self.before = HeldOutResponses.read(
            checkpoints.once("before", lambda: asdict(self._answer_all()))
        )
        self.first_tasks = checkpoints.once("tasks", self.tasks.metrics)
        responses = self.before.sampled[: len(self.watched.prompts)]
        figures = {**self.first, **self._answered(responses, kl=self.before.kl)}
        if checkpoints.is_new:
            self.best.update(self.first["loss"], step=0)
            details = {"began_from": training or path, **self._by_prompt(responses)}
            run.evaluated(0, {**figures, **self.first_tasks}, details=details)
        return figures

    def evaluate(self, step: int, run: Run) -> dict[str, float]:
        """After optimizer step `step` evaluate the actor, where that is due; its figures.

        Raises:
            DivergedError: its figures are not finite.
        """
        if not self.training.evaluates_after(step):
            return {}
        figures = self._rows()
        self.best.update(figures["loss"], step=step)
        details: dict[str, object] = {}
        if self.watched.prompts:
            with self.watched.generating() as actor:
                responses = self.watched.respond(actor, temperature=self.config.temperature)
            scored = self.watched.scored(responses)
            figures |= self._answered(scored, kl=self.watched.kl(responses))
            figures["sampled_repetition"] = self.watched.repetition(responses)
            details = self._by_prompt(scored)
        run.evaluated(step, {**figures, **self.tasks.metrics()}, details=details)
        check_finite(f"of held-out rows after step {step}", figures)
        return figures

    def end(self, run: Run, guards: Guards) -> None:
        """Let the exported actor and the base answer all prompts; write samples and the result."""
        rows, after, config = self._rows(), self._answer_all(), self.config
        best = self.best
        evaluation = {
            **self._summary(after),
            **{f"{name}_before": self.first[name] for name in ("accuracy", "margin")},
            **{f"{name}_after": rows[name] for name in ("accuracy", "margin")},
            **{f"{name}_after": rows[name] for name in ("reward_chosen", "reward_rejected")},
            **{f"{name}_before": self.first[name] for name in ("logp_chosen", "logp_rejected")},
            **{f"{name}_after": rows[name] for name in ("logp_chosen", "logp_rejected")},
            "pairs": len(self.training.held_out),
            "best_step": best.step if config.keep_best else best.last_step,
        }
        exported = self.held_out.by_prompt(after.sampled)
        details = {"eval_by_prompt": {"exported": exported}} if exported else {}
        plain = {name: each for name, each in evaluation.items() if each is not None}
        ended = run.step if guards.stopped else run.total_steps
        run.evaluated(ended, plain, details=details)
        say_where_it_ended(self.first, rows, best, config)
        tasks = self.tasks.summary(
            self.first_tasks, changed=best.step != best.last_step or guards.stopped
        )
        begins_with_base = config.model.path == config.base.path
        before = "base" if begins_with_base else "step1_sft"
        sampled = {before: self.before.sampled, config.step_name: after.sampled}
        base = None if begins_with_base else responses_of_base(self.held_out, config.base)
        if base is not None:
            sampled = {"base": base, **sampled}
        verification = conclude(self.held_out, sampled, run.path("samples.json"))
        rows_are = "good and bad responses" if config.is_unpaired else "pairs of responses"
        card = Card(
            "Chat model",
            f"Trained by {TITLES[config.method]} on {rows_are}, without a reward model.",
            config.model.path or EMBEDDED,
            (config.method,),
        )
        run.finish(
            eval={**evaluation, **verification, **tasks},
            models={"actor": card},
            **({"guards": guards.acted} if guards.acted else {}),
        )

    def _rows(self) -> dict[str, float]:
        return evaluate_rows(self.training.held_out, self.reference, self.config)

    def _answer_all(self) -> HeldOutResponses:
        with self.held_out.generating() as actor:
            sampled = self.held_out.respond(actor, temperature=self.config.temperature)
            greedy = self.held_out.respond(actor, temperature=0.0)
        return HeldOutResponses(
            greedy=self.held_out.scored(greedy),
            sampled=self.held_out.scored(sampled),
            kl=self.held_out.kl(sampled),
        )

    def _answered(self, responses: Sequence[ScoredResponse], *, kl: float) -> dict[str, float]:
        """Figures of sampled responses to the watched prompts."""
        if not responses:
            return {}
        scored = {"sampled_score": mean_score(responses)} if self.config.reward.path else {}
        return {
            "kl": kl,
            "sampled_length": mean_length(responses),
            "sampled_stop_rate": stop_rate(responses),
            **scored,
        }

    def _by_prompt(self, responses: Sequence[ScoredResponse]) -> dict[str, object]:
        found = self.watched.by_prompt(responses) if responses else {}
        return {"eval_by_prompt": found} if found else {}

    def _summary(self, after: HeldOutResponses) -> dict[str, float | None]:
        """Figures of greedy responses to all prompts, but the KL; win rate null without a judge."""
        before = self.before
        new, old = (
            [
                replace(response, score=value)
                for response, value in zip(each, self.held_out.values(each), strict=True)
            ]
            for each in (after.greedy, before.greedy)
        )
        won = comparison(new, old) if new[0].score is not None else {"win_rate": None}
        scored: Mapping[str, float] = {}
        if self.config.reward.path is not None:
            scored = {
                "score_before": mean_score(before.greedy),
                "score_after": mean_score(after.greedy),
            }
        return {
            "kl": after.kl,
            **won,
            "length_before": mean_length(before.greedy),
            "length_after": mean_length(after.greedy),
            "stop_rate": stop_rate(after.greedy),
            "sampled_stop_rate_before": stop_rate(before.sampled),
            "sampled_stop_rate": stop_rate(after.sampled),
            **scored,
        }


def say_where_it_ended(
    before: Mapping[str, float],
    after: Mapping[str, float],
    best: BestWeights,
    config: PreferenceConfig,
) -> None:
    """Warn where the actor got no better on held-out rows, or where chosen responses fell too."""
    method = TITLES[config.method].partition(" (")[0]
    if best.step == 0 and best.last_step > 0:
        logger.warning(
            "%s made the loss on held-out rows no smaller (at first %.4g)%s: lower"
            " preference.model.optim.lr, or look at the rows",
            method,
            before["loss"],
            ", and the weights that it began with are exported" if best.keep else "",
        )
    fell = {name: before[name] - after[name] for name in ("logp_chosen", "logp_rejected")}
    if fell["logp_chosen"] > 0.1 * abs(before["logp_chosen"]) and fell["logp_rejected"] > 0:
        logger.warning(
            "held-out chosen responses have become less likely, too: %.3g nats per token, at first"
            " %.3g; preference.nll_coef holds them up",
            after["logp_chosen"],
            before["logp_chosen"],
        )
