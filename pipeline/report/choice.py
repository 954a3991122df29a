"""Which methods of a run can be compared, and which model is the one to talk to."""

from collections.abc import Mapping, Sequence

from pipeline.report.results import StepResult, known, mean


def of_one_origin(
    methods: Sequence[StepResult], steps: Mapping[str, StepResult]
) -> list[StepResult]:
    """The methods that began from the same model, those of which it is not known included.

    That is the one which a step has left there now; where none began from such a model, the one
    that most began from.
    """
    origins = [method.began_from for method in methods if method.began_from is not None]
    now = [step.training for step in steps.values() if step.training in origins]
    chosen = next(iter(now or sorted(origins, key=origins.count, reverse=True)), None)
    return [method for method in methods if method.began_from in (None, chosen)]


def model_to_talk_to(steps: Mapping[str, StepResult]) -> StepResult | None:
    """The furthest finished step with a model that talks.

    Of methods side by side that began from one model it is the one whose exported model has the
    highest figure on held-out prompts, where they have the same one; else, and of equal ones, the
    first.
    """
    finished = [step for step in steps.values() if step.finished]
    talking = [
        step
        for step in finished
        if step.has("win_rate") or (step.has("perplexity_after") and not step.reads_texts)
    ]
    if not talking:
        return None
    last = [step for step in talking if step.stage == talking[-1].stage]
    furthest = of_one_origin(last, steps)
    exported = {step.name: found for step in furthest if (found := step.exported) is not None}
    if len(exported) < len(furthest) or len({figure for figure, _ in exported.values()}) > 1:
        return furthest[0]
    means = {name: mean(known(values)) for name, (_, values) in exported.items()}
    return max(furthest, key=lambda step: means[step.name])
