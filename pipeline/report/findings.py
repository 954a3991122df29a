"""Sentences on whether a run improved its model, and by how much."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.report.figures import (
    BASE,
    START,
    Verdict,
    change_interval,
    decimal,
    get_verdict,
    nats,
    pass_rates,
    percent,
    points,
    score,
    share_interval,
    title,
)
from pipeline.report.methods import compare_methods
from pipeline.report.results import Results, find_chat_model, finite, mapping


@dataclass(frozen=True)
class Finding:
    """A sentence about one kind of metric."""

    verdict: Verdict | None
    """The verdict; None if it can't be computed, for example without the number of prompts."""

    sentence: str
    """The finding with its numbers, without a trailing period."""

    detail: str = ""
    """The number of prompts and the 95% interval."""

    @property
    def text(self) -> str:
        """The sentence with its details."""
        return f"{self.sentence} ({self.detail})" if self.detail else self.sentence


def findings(results: Results) -> list[Finding]:
    """Return the findings of a run, strongest first; never empty.

    Divergence comes first, then the verifier, rewards, win rate, and the metrics of steps 2 and 1.
    Of several methods that can't be compared at equal KL, the one to chat with is described.
    """
    steps = results.steps.values()
    result: list[Finding | None] = [Finding("worse", s.diverged) for s in steps if s.diverged]
    compared = compare_methods(results)
    if compared is not None and compared.sentence:
        result.append(Finding(None, compared.sentence))
    else:
        best = find_chat_model(results.steps)
        others = {step.name for step in results.methods} - {best.name if best else ""}
        single = replace(results, steps={k: s for k, s in results.steps.items() if k not in others})
        prefix = f"{title(best.name, results)}: " if best and others else ""
        unnamed = _verifier_finding(single), _reward_finding(single)
        result += [found and replace(found, sentence=prefix + found.sentence) for found in unnamed]
        result.append(_win_rate_finding(single))
    result += _preference_findings(results)
    result += [_accuracy_finding(results), *_perplexity_findings(results)]
    for step in steps:
        for event in [event for event in step.events if event.to is not None][-1:]:
            at = f"at {event.unit} {event.step} of {step.name}"
            result.append(Finding(None, f"A guard tripped {at} ({event.effect}): {event.sentence}"))
    return [*filter(None, result)] or [Finding(None, _not_evaluated(results))]


def _not_evaluated(results: Results) -> str:
    names = " and ".join(results.steps)
    if any(step.finished for step in results.steps.values()):
        return f"The evaluation of {names} produced no finite value"
    return f"{names} {'has' if len(results.steps) == 1 else 'have'} not been evaluated yet"


def _verifier_finding(results: Results) -> Finding | None:
    rates = pass_rates(results)
    if len(rates) < 2:
        return None

    def origin(model: str) -> str:
        named = {BASE: "from the base model", START: "from the starting model"}
        return named.get(model) or "after " + model.partition("_")[0].replace("step", "step ")

    *earlier, (_, last) = rates.items()
    before = " and ".join(f"{percent(rate)} {origin(model)}" for model, rate in reversed(earlier))
    sentence = f"{percent(last)} of answers are correct and polite, against {before}"
    step = results.last_step_with("judge_counts")
    counts = mapping(step.eval.get("judge_counts")) if step else {}
    count, gained, lost = (int(finite(counts.get(n)) or 0) for n in ("prompts", "gained", "lost"))
    if not count:
        return Finding(None, sentence)
    low, high = change = change_interval(gained, lost, count)
    start, _ = earlier[-1]
    since = "" if start in (BASE, START) else f" from {origin(start).removeprefix('after ')}"
    return Finding(
        get_verdict(change),
        sentence,
        f"{count:,} held-out prompts; 95% interval of the change{since}: {points(low)} to"
        f" {points(high)} points",
    )


def _reward_finding(results: Results) -> Finding | None:
    """Return the finding on the gold reward if there is one, else on the training reward."""
    for name, what in (("gold", "gold reward"), ("reward", "reward")):
        step = results.last_step_with(f"{name}_after")
        if step is None:
            continue
        before, after = step.metric(f"{name}_before"), step.metric(f"{name}_after")
        if before is None or after is None:
            return None
        sentence = f"Answers to held-out prompts have a mean {what} of {score(after)}, against"
        origin = f"{'after' if step.start.startswith('step') else 'from'} {step.start}"
        return Finding(None, f"{sentence} {score(before)} {origin}")
    return None


def _win_rate_finding(results: Results) -> Finding | None:
    step = results.last_step_with("win_rate")
    if step is None:
        return None
    wins, losses, count = (int(step.metric(name) or 0) for name in ("wins", "losses", "prompts"))
    if not count:
        return None
    kl = step.metric("kl")
    kl_clause = f", at a KL of {nats(kl)} per answer" if kl is not None else ""
    # With ties counted as half, the win rate is 1/2 plus half the change in wins.
    change = change_interval(wins, losses, count)
    rate, low, high = (0.5 + rate_change / 2 for rate_change in ((wins - losses) / count, *change))
    sentence = (
        f"{title(step.name, results)}'s answers score higher than {step.start}'s on {wins:,} of"
        f" {count:,} held-out prompts, equally on {count - wins - losses:,} and lower on"
        f" {losses:,}{kl_clause}"
    )
    detail = f"win rate {percent(rate)}, ties count as half; 95% interval"
    return Finding(get_verdict(change), sentence, f"{detail} {percent(low)} to {percent(high)}")


def _preference_findings(results: Results) -> Iterator[Finding]:
    """Yield findings on held-out pairs, for steps that train on preferences."""
    for step in results.steps.values():
        after, pairs = step.metric("accuracy_after"), step.metric("pairs")
        if not step.has("margin_after") or after is None:
            continue
        name = title(step.name, results)
        sample = f" {pairs:,.0f}" if pairs else ""
        yield Finding(
            None,
            f"{name}'s implicit rewards put {percent(after)} of{sample} held-out pairs in the right"
            " order, which says nothing about the responses that it generates",
        )


def _accuracy_finding(results: Results) -> Finding | None:
    classifiers = [step for step in results.steps.values() if not step.has("margin_after")]
    step = next((step for step in reversed(classifiers) if step.has("accuracy_after")), None)
    after = step.metric("accuracy_after") if step else None
    pairs = (step.metric("pairs") or step.metric("rows")) if step else None
    if step is None or after is None or not pairs:
        return None
    labels = str(step.eval.get("labels", "pairs"))
    before = step.metric("accuracy_before")
    sentence = f"The reward model is right on {percent(after)} of {pairs:,.0f} held-out {labels}"
    if before is not None:
        sentence += f", {percent(before)} before training"
    low, high = interval = share_interval(after * pairs, pairs)
    chance = 0.0 if labels == "classes" else 0.5
    verdict = get_verdict(interval, equal=0.5 if before is None else max(chance, before))
    return Finding(verdict, sentence, f"95% interval {percent(low)} to {percent(high)}")


def _perplexity_findings(results: Results) -> Iterator[Finding]:
    """Yield findings on held-out responses, and on held-out texts of step 0."""
    steps = [step for step in results.steps.values() if step.has("perplexity_after")]
    for is_pretraining in (False, True):
        step = next((s for s in reversed(steps) if s.is_pretraining is is_pretraining), None)
        before = step.metric("perplexity_before") if step else None
        after = step.metric("perplexity_after") if step else None
        if step is None or before is None or after is None:
            continue
        verdict: Verdict = "better" if after < before else "worse"
        verb = f"{'fell' if after < before else 'rose'} from {decimal(before)} to"
        if decimal(before) == decimal(after):  # no weights were better than the initial ones
            verdict, verb = "not distinguishable", "did not change:"
        rows, tokens = step.metric("rows"), step.metric("held_out_tokens")
        sample = f"{rows:,.0f} held-out answers" if rows else "held-out answers"
        sample = f"{tokens:,.0f} tokens of held-out texts" if tokens else sample
        yield Finding(verdict, f"Perplexity on {sample} {verb} {decimal(after)}")
