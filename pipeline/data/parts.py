"""Which prompts are held out, and which step gets each of the others.

Both are decided prompt by prompt: a row that is added, a path more, another order or another
training seed move no other prompt.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from pipeline.data.prompt_hash import draw


def held_out_prompts(prompts: Collection[int], *, fraction: float, seed: int) -> set[int]:
    """The prompts whose draw is below `fraction`; those of a smaller fraction are among them.

    Where there is none, as in a few rows, the one with the smallest draw; but never all of them.
    """
    draws = {prompt: draw(prompt, seed=seed, purpose="held out") for prompt in prompts}
    found = {prompt for prompt, at in draws.items() if at < fraction}
    ordered = sorted(draws, key=lambda prompt: draws[prompt])
    return found if found and len(found) < len(draws) else set(ordered[: len(ordered) > 1])


def step_of_prompt(
    prompt: int, steps: Iterable[int], *, split: Sequence[float], seed: int
) -> int | None:
    """The one of `steps` that gets the prompt, in proportion to `split`; None where all have 0.

    Weighted rendezvous hashing (Schindelhauer & Schomaker 2005): each step draws an exponential
    number at the rate of its share, and the smallest wins. So a step that leaves `steps`, or whose
    share changes, moves no prompt between the others.
    """
    numbers = [
        (-math.log(draw(prompt, seed=seed, purpose=f"step {step}")) / split[step - 1], step)
        for step in steps
        if split[step - 1] > 0
    ]
    return min(numbers)[1] if numbers else None


def assign_steps(
    usable: Mapping[int, Collection[int]], *, split: Sequence[float], seed: int
) -> dict[int, int | None]:
    """The step of each prompt, from the steps that can use any of its rows."""
    return {
        prompt: step_of_prompt(prompt, sorted(steps), split=split, seed=seed)
        for prompt, steps in usable.items()
    }
