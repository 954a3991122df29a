"""What a run's figures say: did it get better, and by how much."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.report.figures import BASE, nats, pass_rates, percent, plain, points, score, title
from pipeline.report.intervals import Verdict, change_interval, share_interval, verdict_of
from pipeline.report.methods import compare_methods
from pipeline.report.results import Results, StepResult, events_of, finite, model_to_talk_to


@dataclass(frozen=True)
class Finding:
    """What one kind of figure says of the run."""

    verdict: Verdict | None
    """None where it can't be computed, as without the number of prompts."""

    sentence: str
    """With its figures, without a full stop."""

    detail: str = ""
    """Of how many, and with which 95 % interval."""

    optimized: bool = False
    """Whether the figure is what training maximized, so that a rise proves little."""

    @property
    def whole(self) -> str:
        """The sentence with its detail."""
        return f"{self.sentence} ({self.detail})" if self.detail else self.sentence


def findings(results: Results) -> list[Finding]:
    """What the figures say, the strongest first; never empty.

    A run that diverged says so first. Else the judge's word comes first where there is one; then
    what people would look at next.
    """
    broken = [
        Finding("worse", f"{of_method(each, results)}{each.diverged}")
        for each in results.steps.values()
        if each.diverged
    ]
    ended = [
        Finding(None, f"{of_method(each, results)}{guarded}")
        for each in results.steps.values()
        if (guarded := sentence_of(each))
    ]
    found = [_by_verifier(results), _by_talk(results), _by_reward(results), _by_win_rate(results)]
    if results.methods:
        found = [_at_equal_kl(results), *_of_each_method(results), _by_talk(results)]
    found += [*_of_preferences(results), _by_accuracy(results), *_by_perplexity(results)]
    known = broken + [finding for finding in found if finding is not None] + ended
    return known or [Finding(None, _nothing_known(results))]


def of_method(step: StepResult, results: Results) -> str:
    """Before a sentence about one of several methods, its name."""
    return f"{title(step.name, results)}: " if step in results.methods else ""


def _at_equal_kl(results: Results) -> Finding | None:
    compared = compare_methods(results)
    return Finding(None, compared.sentence) if compared and compared.sentence else None


def _of_each_method(results: Results) -> Iterator[Finding]:
    """The strongest that is known of each method by itself."""
    names = {step.name for step in results.methods}
    before = {name: step for name, step in results.steps.items() if name not in names}
    for step in results.methods:
        alone = replace(results, steps={**before, step.name: step})
        by_all = (_by_verifier(alone), _by_reward(alone), _by_win_rate(alone))
        for found in list(filter(None, by_all))[:1]:
            is_named = title(step.name, results) in found.sentence
            name = "" if is_named else of_method(step, results)
            yield replace(found, sentence=f"{name}{found.sentence}")


def _nothing_known(results: Results) -> str:
    names = " and ".join(results.steps)
    if any(step.finished for step in results.steps.values()):
        return f"The evaluation of {names} gave no finite figure"
    verb = "has" if len(results.steps) == 1 else "have"
    return f"{names} {verb} not been evaluated yet"


def _by_verifier(results: Results) -> Finding | None:
    rates = pass_rates(results)
    if len(rates) < 2:
        return None
    *earlier, (_, last) = rates.items()
    before = " and ".join(f"{percent(rate)} {_after(model)}" for model, rate in reversed(earlier))
    sentence = f"{percent(last)} of answers are correct and polite, against {before}"
    step = results.evaluated_by("judge_counts")
    counts = step.eval.get("judge_counts") if step else None
    numbers = [finite(counts.get(name)) for name in _COUNTS] if isinstance(counts, Mapping) else []
    known = [int(number) for number in numbers if number is not None]
    if len(known) < len(_COUNTS) or not known[0]:
        return Finding(None, sentence)
    count, gained, lost = known
    change = change_interval(gained, lost, count)
    low, high = change
    start, _ = earlier[-1]
    since = "" if start == BASE else f" from {_step_of(start)}"
    return Finding(
        verdict_of(change),
        sentence,
        f"{count:,} held-out prompts; 95 % interval of the change{since}: {points(low)} to"
        f" {points(high)} points",
    )


def _by_talk(results: Results) -> Finding | None:
    chosen = model_to_talk_to(results.steps)
    of_chosen = chosen is not None and chosen.has("judge_talk")
    step = chosen if of_chosen else results.evaluated_by("judge_talk")
    rate = step.number("judge_talk") if step else None
    if step is None or rate is None:
        return None
    among = f"{len(results.talk)} prompts" if results.talk else "prompts"
    name = of_method(step, results)
    return Finding(None, f"{name}{percent(rate)} of answers to {among} written by hand are right")


def _after(model: str) -> str:
    """Which model it was, in words: of `step1_sft` "after step 1"."""
    if model == BASE:
        return "from the base model"
    return f"after {_step_of(model)}"


def _step_of(model: str) -> str:
    """What sentences call it: step 1 for `step1_sft`."""
    return model.split("_", maxsplit=1)[0].replace("step", "step ")


_COUNTS = ("prompts", "gained", "lost")

FELL = 0.1
"""Share of a log-probability per token by which a fall of it is said."""

LOST_ENDS = 0.05
"""Fall of the share of sampled responses that end by themselves from which it is said."""


def _by_reward(results: Results) -> Finding | None:
    """The finding by the gold reward where there is one, else by what was trained on."""
    step = results.evaluated_by("gold_after") or results.evaluated_by("reward_after")
    if step is None:
        return None
    name = "gold" if step.has("gold_after") else "reward"
    before, after = step.number(f"{name}_before"), step.number(f"{name}_after")
    if before is None or after is None:
        return None
    what = "gold reward" if name == "gold" else "reward"
    sentence = f"Answers to held-out prompts have a mean {what} of {score(after)}, against"
    return Finding(None, f"{sentence} {score(before)} after step 1", optimized=name == "reward")


def _by_win_rate(results: Results) -> Finding | None:
    step = results.evaluated_by("win_rate")
    win_rate = step.number("win_rate") if step else None
    if step is None or win_rate is None:
        return None
    wins, losses, count = (step.number(name) for name in ("wins", "losses", "prompts"))
    kl = step.number("kl")
    price = f", at a KL of {nats(kl)} per answer" if kl is not None else ""
    name = title(step.name, results)
    start = f"{name}'s answers score higher than step 1's on {percent(win_rate)} of"
    if wins is None or losses is None or not count:
        return Finding(
            None, f"{start} held-out prompts{price}", optimized=not step.has("margin_after")
        )
    # A win rate with ties counted half is 1/2 and half of the change in wins.
    change = change_interval(int(wins), int(losses), int(count))
    low, high = (0.5 + end / 2 for end in change)
    sentence = f"{start} {count:,.0f} held-out prompts{price}"
    detail = f"95 % interval {percent(low)} to {percent(high)}"
    return Finding(verdict_of(change), sentence, detail, optimized=not step.has("margin_after"))


def _of_preferences(results: Results) -> Iterator[Finding]:
    """What steps that learn from preferences say of held-out pairs, and what went wrong in them."""
    for step in results.steps.values():
        after, pairs = step.number("accuracy_after"), step.number("pairs")
        if not step.has("margin_after") or after is None:
            continue
        name = title(step.name, results)
        among = f" {pairs:,.0f}" if pairs else ""
        yield Finding(
            None,
            f"{name}'s implicit rewards put {percent(after)} of{among} held-out pairs in the right"
            " order, which says nothing of its own answers",
        )
        before, now = (step.number(f"logp_chosen_{when}") for when in ("before", "after"))
        if before is not None and now is not None and now < before - FELL * abs(before):
            yield Finding(
                "worse",
                f"{name} made chosen responses less likely, too: {now:.2f} nats per token, at first"
                f" {before:.2f}; preference.nll_coef holds them up",
            )
        first, last = step.number("sampled_stop_rate_before"), step.number("sampled_stop_rate")
        if first is not None and last is not None and last < first - LOST_ENDS:
            yield Finding(
                "worse",
                f"{percent(last)} of {name}'s sampled answers end by themselves, at first"
                f" {percent(first)}: preference.nll_coef holds up the ends of turns",
            )


_ORDERED = {
    "pairs": "puts {} of{} held-out pairs in the right order",
    "ties": "foresees {} of{} held-out outcomes, ties among them",
    "classes": "puts {} of{} held-out rows in their class",
    "ordinal": "puts {} of{} held-out rows in their class",
    "scalar": "puts {} of every two of{} held-out rows in the right order",
    "rankings": "puts {} of the pairs in{} held-out lists in the right order",
    "steps": "predicts {} of the steps of{} held-out responses as they are labelled",
}
"""By kind of label: the clause that says what accuracy counts."""


def _by_accuracy(results: Results) -> Finding | None:
    of_rewards = [step for step in results.steps.values() if not step.has("margin_after")]
    step = next((each for each in reversed(of_rewards) if each.has("accuracy_after")), None)
    after = step.number("accuracy_after") if step else None
    if step is None or after is None:
        return None
    labels = step.eval.get("labels")
    words = _ORDERED.get(labels if isinstance(labels, str) else "", _ORDERED["pairs"])
    before, pairs = step.number("accuracy_before"), step.number("pairs") or step.number("rows")
    among = f" {pairs:,.0f}" if pairs else ""
    sentence = f"The reward model {words.format(percent(after), among)}"
    if before is not None:
        sentence += f", {percent(before)} before training"
    if not pairs:
        return Finding(None, sentence)
    interval = share_interval(after * pairs, int(pairs))
    low, high = interval
    least = 0.0 if labels in ("classes", "ordinal", "ties") else 0.5
    verdict = verdict_of(interval, equal=0.5 if before is None else max(least, before))
    return Finding(verdict, sentence, f"95 % interval {percent(low)} to {percent(high)}")


def _by_perplexity(results: Results) -> Iterator[Finding]:
    """The findings on held-out answers, and on held-out texts where a step learned from such."""
    steps = [step for step in results.steps.values() if step.has("perplexity_after")]
    for reads_texts in (False, True):
        step = next((each for each in reversed(steps) if each.reads_texts is reads_texts), None)
        before = step.number("perplexity_before") if step else None
        after = step.number("perplexity_after") if step else None
        if step is None or before is None or after is None:
            continue
        verb = "fell" if after < before else "rose"
        rows, tokens = step.number("rows"), step.number("held_out_tokens")
        among = f"{rows:,.0f} held-out answers" if rows else "held-out answers"
        if tokens:
            among = f"{tokens:,.0f} tokens of held-out texts"
        yield Finding(
            "better" if after < before else "worse",
            f"Perplexity on {among} {verb} from {plain(before)} to {plain(after)}",
        )


def sentence_of(step: StepResult) -> str:
    """How guards changed the run, where they did; else empty."""
    acted = [event for event in events_of(step) if event.to is not None]
    if not acted:
        return ""
    last = acted[-1]
    at = f"{last.unit} {last.to}" if last.to else "its start"
    if last.action == "stop":
        return (
            f"A guard ended {step.name} after {last.unit} {last.step}, with the actor of {at}:"
            f" {last.sentence}"
        )
    times = "back" if len(acted) == 1 else f"back {len(acted)} times, at last"
    return f"A guard took {step.name} {times} from {last.unit} {last.step} to {at}: {last.sentence}"
