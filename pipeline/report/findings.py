"""What a run's figures say: did it get better, and by how much."""

from collections.abc import Mapping

from pipeline.report.results import Results, StepResult, finite

JUDGED = ("base", "step1_sft", "step3_ppo")
"""The models whose answers are compared, earliest first."""


def findings(results: Results) -> tuple[bool | None, str, list[str]]:
    """(did it get better, the strongest finding, the others), each a sentence with its figures.

    The judge's word comes first where there is one; then what people would look at next.
    """
    found = [
        finding
        for finding in (
            _by_judge(results),
            _by_win_rate(results),
            _by_accuracy(results),
            _by_perplexity(results),
        )
        if finding is not None
    ]
    if not found:
        return None, "No step has been evaluated yet.", []
    (better, headline), *others = found
    return better, headline, [sentence for _, sentence in others]


def judge_rates(results: Results) -> dict[str, float]:
    """Share of answers that are correct and polite, by model; empty without a judge."""
    step = results.steps.get("step3_ppo")
    judge = step.eval.get("judge") if step else None
    if not isinstance(judge, Mapping):
        return {}
    rates = {model: finite(judge.get(model)) for model in JUDGED}
    return {model: rate for model, rate in rates.items() if rate is not None}


def before_after(step: StepResult) -> list[tuple[str, str, str]]:
    """(name, before, after) of the step's evaluation figures; before may be empty."""
    pairs = {
        "perplexity": ("perplexity_before", "perplexity_after", plain),
        "accuracy": ("accuracy_before", "accuracy_after", percent),
        "mean score, rejected": ("", "mean_rejected", score),
        "mean score, chosen": ("", "mean_chosen", score),
        "score": ("score_before", "score_after", score),
        "answer length": ("length_before", "length_after", tokens),
        "win rate": ("", "win_rate", percent),
        "KL per answer": ("", "kl", nats),
        "stop rate": ("", "stop_rate", percent),
    }
    rows = [
        (name, step.number(before), step.number(after), show)
        for name, (before, after, show) in pairs.items()
    ]
    return [
        (name, "" if before is None else show(before), show(after))
        for name, before, after, show in rows
        if after is not None
    ]


def _by_judge(results: Results) -> tuple[bool, str] | None:
    rates = judge_rates(results)
    if len(rates) < 2:
        return None
    *earlier, (_, last) = rates.items()
    before = " and ".join(f"{percent(rate)} {_AFTER[model]}" for model, rate in reversed(earlier))
    better = last > max(rate for _, rate in earlier)
    return better, f"{percent(last)} of answers are correct and polite, against {before}"


_AFTER = {"base": "from the base model", "step1_sft": "after step 1", "step3_ppo": "after PPO"}


def _by_win_rate(results: Results) -> tuple[bool, str] | None:
    step = results.steps.get("step3_ppo")
    win_rate = step.number("win_rate") if step else None
    if step is None or win_rate is None:
        return None
    kl = step.number("kl")
    price = f", at a KL of {nats(kl)} per answer" if kl is not None else ""
    sentence = (
        f"PPO's answers score higher than step 1's on {percent(win_rate)} of held-out prompts"
    )
    return win_rate > 0.5, sentence + price


def _by_accuracy(results: Results) -> tuple[bool, str] | None:
    step = results.steps.get("step2_reward")
    after = step.number("accuracy_after") if step else None
    if step is None or after is None:
        return None
    before, pairs = step.number("accuracy_before"), step.number("pairs")
    among = f" {pairs:.0f}" if pairs else ""
    sentence = f"The reward model puts {percent(after)} of{among} held-out pairs in the right order"
    if before is None:
        return after > 0.5, sentence
    return after > before, f"{sentence}, {percent(before)} before training"


def _by_perplexity(results: Results) -> tuple[bool, str] | None:
    step = results.steps.get("step1_sft")
    if step is None:
        return None
    before, after = step.number("perplexity_before"), step.number("perplexity_after")
    if before is None or after is None:
        return None
    verb = "fell" if after < before else "rose"
    return (
        after < before,
        f"Perplexity on held-out answers {verb} from {plain(before)} to {plain(after)}",
    )


def percent(share: float) -> str:
    """0.844 as `84.4 %`."""
    return f"{100 * share:.1f}".removesuffix(".0") + "\u202f%"


def score(value: float) -> str:
    """A reward-model score, with its sign."""
    return f"{value:+.2f}".replace("-", "\u2212")


def plain(value: float) -> str:
    """A figure with two decimals, or none where it is large."""
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def nats(value: float) -> str:
    """A figure in nats."""
    return f"{value:.2f} nats"


def tokens(value: float) -> str:
    """A mean number of tokens."""
    return f"{value:.1f} tokens"
