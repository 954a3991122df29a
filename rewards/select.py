r"""The best of several answers, as data to learn from: `python -m rewards.select`.

python -m rewards.select --path DIR --prompts FILE --reward math --best-of 8 \
        --write demonstrations --output best.jsonl

Samples answers to each prompt, has sources of rewards score them, and writes the best ones as
demonstrations (rejection sampling), or the best and the worst ones as pairs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.cli import run_main, say
from pipeline.command import joined, read_command
from pipeline.errors import DataError
from pipeline.files.output import check_output, json_lines, write_output
from pipeline.installation import MODULE
from rewards.selection import (
    Candidate,
    SelectConfig,
    best,
    best_and_worst,
    best_of_n_kl,
    demonstration,
    pair,
)

if TYPE_CHECKING:
    from pipeline.data.examples import Example
    from rewards.candidates import Sampled


ALIASES = {"reward_function": "reward", "out": "output"}


def main(argv: Sequence[str]) -> None:
    """Write the rows and print a summary.

    Raises:
        UserError: a wrong setting, no model, prompts that can't be read, sources that fail.
    """
    config = read_command(
        SelectConfig,
        argv,
        usage=f"{MODULE} rewards.select --path DIR --prompts FILE --reward SOURCE ..."
        " [--SETTING VALUE ...]",
        about="Sample answers, score them, and write the best as data to learn from.",
        aliases=ALIASES,
        gather=joined("reward"),
    )
    check_output(config.output, option="--output")

    from pipeline.logs import configure_logging
    from pipeline.models.chat import check_ready
    from rewards.candidates import MODEL, programs_of, sampled_candidates
    from rewards.prompts import read_prompts
    from rewards.sources import read_sources, row_columns

    configure_logging(is_main=True)
    columns = row_columns(read_sources(programs_of(config.sources)))
    examples = read_prompts(
        config.prompts, columns, fields=config.fields, limit=config.limit, seed=config.seed
    )
    check_ready(config.path, examples)
    for source in config.sources:
        if source.kind == MODEL:
            check_ready(str(source.path), examples, scores=True)
    sampled = sampled_candidates(examples, config)
    rows, left_out = select(examples, sampled.candidates, config)
    say("\n".join(summary(config, sampled, rows, left_out)))
    if not rows:
        raise DataError(
            f"no prompt gave a row, and {config.output} is not written: raise --best-of or"
            " --max-new-tokens, or look at the rewards with python -m rewards"
        )
    write_output({config.output: json_lines(rows)}, option="--output")
    say(f"written to {config.output}")


def select(
    examples: "Sequence[Example]",
    candidates: "Sequence[Sequence[Candidate]]",
    config: SelectConfig,
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The rows to write, and the number of prompts that give none, by reason."""
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for example, of_prompt in zip(examples, candidates, strict=True):
        chosen = best(of_prompt)
        if chosen is None or chosen.reward is None:
            left_out["no answer to choose"] += 1
        elif config.min_reward is not None and chosen.reward < config.min_reward:
            left_out["a low reward"] += 1
        elif config.write == "demonstrations":
            rows.append(demonstration(example.prompt, chosen))
        elif (both := best_and_worst(of_prompt)) is not None:
            rows.append(pair(example.prompt, *both))
        else:
            left_out["no answer of less reward"] += 1
    return rows, left_out


def summary(
    config: SelectConfig,
    sampled: "Sampled",
    rows: Sequence[dict[str, Any]],
    left_out: Mapping[str, int],
) -> list[str]:
    """What was sampled, what it is worth, and what was written."""
    count, n = len(sampled.candidates), config.best_of
    answers = [each for of_prompt in sampled.candidates for each in of_prompt]
    known = [each.reward for each in answers if each.reward is not None]
    tops = [
        max(rewards)
        for of_prompt in sampled.candidates
        if (rewards := [each.reward for each in of_prompt if each.reward is not None])
    ]
    lines = [f"prompts     {count:,}, {n} answers to each"]
    if known:
        mean, best = sum(known) / len(known), sum(tops) / len(tops)
        lines.append(f"reward      mean {mean:.4g}, best of {n} {best:.4g}")
    failed = sum(sampled.failed.values())
    lines += [
        f"no reward   {len(answers) - len(known):,} answers; sources failed {failed:,} times",
        f"cut off     {sum(not each.stopped for each in answers):,} answers, never chosen",
        f"chosen      {len(rows):,} {config.write}",
    ]
    lines += [f"left out    {number:,} with {why}" for why, number in left_out.items()]
    if rows:
        lines.append(f"KL          {distance(config, count, len(rows))}")
    return lines


def distance(config: SelectConfig, prompts: int, rows: int) -> str:
    """How far the chosen answers are from the model, at most: a bound, and no estimate."""
    n = config.best_of
    changed = [f"temperature {config.temperature:g}"] if config.temperature != 1 else []
    changed += [f"top-p {config.top_p:g}"] if config.top_p != 1 else []
    model = f"the model{' at ' + ' and '.join(changed) if changed else ''}"
    formula = f"log {n} - {n - 1}/{n}"
    if rows == prompts:
        return f"the best of {n} are at most {best_of_n_kl(n):.3f} nats from {model}: {formula}"
    return (
        f"rows are at most {best_of_n_kl(n, rows / prompts):.3f} nats from {model} on the average,"
        f" if {rows / prompts:.1%} of prompts give one: {formula}, and what leaving out adds"
    )


if __name__ == "__main__":
    run_main(main)
