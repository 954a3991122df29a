r"""Select the best of several responses as training data: `python -m rewards.select`.

python -m rewards.select --path DIR --prompts FILE --reward math --best-of 8 \
        --write demonstrations --output best.jsonl

Samples responses to each prompt, scores them with reward sources, and writes the best ones as
demonstrations (rejection sampling), or the best and worst ones as pairs.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.cli.options import read_command, run_main, say
from pipeline.data.examples import Example, Message
from pipeline.files.durable import check_output, json_lines, write_output
from pipeline.system.errors import DataError, require
from pipeline.system.installation import MODULE
from rewards.config import RewardConfig, read_specs
from rewards.mixture import weighted_sum, without_failures
from rewards.sampling import SamplingConfig, read_prompts, respond, score
from rewards.sources import read_sources, row_columns

ALIASES = {"reward_function": "reward", "out": "output"}


@dataclass(frozen=True, kw_only=True)
class SelectConfig(SamplingConfig):
    """Settings of sampling, scoring and writing responses."""

    path: str = ""
    """Model that responds: a directory, such as OUT/step1_sft, or Hub id."""

    reward: tuple[str, ...] = ()
    """Reward sources: file.py:function (--reward-function), a kind (math, verifier, ...), or all
    settings, '{kind: model, path: OUT/step2_reward}' for a reward model."""

    best_of: int = 16
    """Responses per prompt. One truncated at max_new_tokens is never chosen."""

    write: Literal["demonstrations", "pairs"] = "demonstrations"
    """demonstrations: the best response to each prompt, for step 1; pairs: the best and the worst,
    for step 2."""

    output: Path = Path("selected.jsonl")
    """Output file for the rows; an existing one is replaced."""

    min_reward: float | None = None
    """Minimum reward of a chosen response; null always takes the best one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "--path is missing: pass the model that responds")
        require(
            bool(self.reward), "--reward is missing: pass file.py:function, or a kind such as math"
        )
        require(self.best_of > 1, f"--best-of must be at least 2, got {self.best_of}")
        require(
            self.temperature > 0,
            f"--temperature must be above 0, got {self.temperature}: at 0, all {self.best_of}"
            " responses are equal",
        )

    @property
    def sources(self) -> list[RewardConfig]:
        """The reward sources, in the order of the command line."""
        sources = read_specs(self.reward)
        for source in sources:
            require(
                source.kind != "model" or source.path is not None,
                "--reward model: pass its directory, as in '{kind: model, path: OUT/step2_reward}'",
            )
        return sources


def main(argv: Sequence[str]) -> None:
    """Write the rows and print a summary.

    Raises:
        UserError: a setting is wrong, there is no model, prompts can't be read, or sources fail.
    """
    config = read_command(
        SelectConfig,
        argv,
        usage=f"{MODULE} rewards.select --path DIR --prompts FILE --reward SOURCE ..."
        " [--SETTING VALUE ...]",
        about="Sample responses, score them, and write the best as data to learn from.",
        aliases=ALIASES,
    )
    check_output(config.output, option="--output")

    from pipeline.models.hf.chat import check_ready
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    sources = config.sources
    programs = [source for source in sources if source.kind != "model"]
    examples = read_prompts(config, row_columns(read_sources(programs)))
    check_ready(config.path, examples)
    for source in sources:
        if source.kind == "model":
            check_ready(str(source.path), examples, scores=True)
    responses = respond(config.path, examples, config, num_samples=config.best_of)
    batches, scored = score(sources, responses, config)
    weights = [source.weight for source in sources]
    rewards = iter(weighted_sum(without_failures([*scored.values()], weights), weights))
    candidates = [
        [Candidate(each.response, next(rewards), each.stopped) for each in batch]
        for batch in batches
    ]
    rows, left_out = select(examples, candidates, config)
    num_failed = sum(each.num_failed for each in scored.values())
    say("\n".join(summary(config, candidates, num_failed, rows, left_out)))
    if not rows:
        raise DataError(
            f"no prompt yielded a row, so {config.output} is not written: raise --best-of or"
            " --max-new-tokens, or inspect the rewards with python -m rewards"
        )
    write_output({config.output: json_lines(rows)}, option="--output")
    say(f"written to {config.output}")


@dataclass(frozen=True)
class Candidate:
    """A sampled response and its reward."""

    text: str

    reward: float | None
    """The reward; None if no source applies, or if one failed."""

    stopped: bool = True
    """Whether the response ended with the end token. A truncated one is never chosen, because
    training would teach the model to end there."""

    @property
    def turn(self) -> dict[str, Any]:
        """The response in the format of rows."""
        return Message("assistant", self.text).turn


def best_and_worst(candidates: Sequence[Candidate]) -> tuple[Candidate | None, Candidate | None]:
    """The responses with the highest and the lowest reward, the first among equals.

    The best is None if none is eligible, the worst if it equals the best in reward or text.
    """
    known = [
        (each.reward, each) for each in candidates if each.reward is not None and each.text.strip()
    ]
    chosen = [pair for pair in known if pair[1].stopped]
    if not chosen:
        return None, None
    reward, best = max(chosen, key=lambda pair: pair[0])
    least, worst = min(known, key=lambda pair: pair[0])
    return best, worst if least < reward and worst.text != best.text else None


def select(
    examples: Sequence[Example], candidates: Sequence[Sequence[Candidate]], config: SelectConfig
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The rows to write, and the number of prompts without a row, by reason."""
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for example, responses in zip(examples, candidates, strict=True):
        best, worst = best_and_worst(responses)
        prompt = [each.turn | ({} if each.trained else {"weight": 0}) for each in example.prompt]
        tools = {"tools": example.prompt[0].tools} if example.prompt[0].tools else {}
        if best is None or best.reward is None:
            left_out["no response to choose"] += 1
        elif config.min_reward is not None and best.reward < config.min_reward:
            left_out["a low reward"] += 1
        elif config.write == "demonstrations":
            rows.append({"messages": [*prompt, best.turn], **tools, "reward": best.reward})
        elif worst is None:
            left_out["no response with a lower reward"] += 1
        else:  # no margin: rewards have no unit
            rows.append(
                {
                    "prompt": prompt,
                    **tools,
                    "chosen": [best.turn],
                    "rejected": [worst.turn],
                    "reward_chosen": best.reward,
                    "reward_rejected": worst.reward,
                }
            )
    return rows, left_out


def summary(
    config: SelectConfig,
    candidates: Sequence[Sequence[Candidate]],
    num_failed: int,
    rows: Sequence[dict[str, Any]],
    left_out: Mapping[str, int],
) -> list[str]:
    """Summary lines: samples, rewards and written rows."""
    n = config.best_of
    responses = [each for of_prompt in candidates for each in of_prompt]
    known = [[each.reward for each in row if each.reward is not None] for row in candidates]
    tops = [max(rewards) for rewards in known if rewards]
    count = sum(map(len, known))
    lines = [f"prompts     {len(candidates):,}, {n} responses each"]
    if tops:
        mean, top = sum(map(sum, known)) / count, sum(tops) / len(tops)
        lines.append(f"reward      mean {mean:.4g}, best of {n} {top:.4g}")
    lines += [
        f"no reward   {len(responses) - count:,} responses; sources failed {num_failed:,} times",
        f"cut off     {sum(not each.stopped for each in responses):,} responses, never chosen",
        f"chosen      {len(rows):,} {config.write}",
    ]
    lines += [f"skipped     {number:,} with {why}" for why, number in left_out.items()]
    if rows:
        # Beirami et al. 2024, arXiv:2401.01879, theorem 1; ties only lower it.
        more = "; more if prompts are skipped" if len(rows) < len(candidates) else ""
        bound = f"log {n} - {n - 1}/{n} = {math.log(n) - (n - 1) / n:.3f} nats{more}"
        lines.append(f"KL          at most {bound}")
    return lines


if __name__ == "__main__":
    run_main(main)
