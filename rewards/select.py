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

from pipeline.cli.options import parse_command, print_output, run_main
from pipeline.data.examples import Example, Message
from pipeline.files.durable import check_writable, json_lines, write_output
from pipeline.system.errors import DataError, counted, require
from pipeline.system.installation import MODULE
from rewards.config import RewardConfig, read_specs
from rewards.mixture import mask_failures, weighted_sum
from rewards.sampling import SamplingConfig, read_prompts, sample_responses, score_episodes
from rewards.sources import read_sources, row_columns

ALIASES = {"reward_function": "reward", "out": "output"}


@dataclass(frozen=True, kw_only=True)
class SelectConfig(SamplingConfig):
    """Settings of sampling, scoring and writing responses."""

    path: str = ""
    """Model to sample from: a directory, such as OUT/step1_sft, or a Hub id."""

    reward: tuple[str, ...] = ()
    """Reward sources: file.py:function (--reward-function), a kind (math, verifier, ...), or
    settings in braces, such as '{kind: model, path: OUT/step2_reward}' for a reward model."""

    best_of: int = 16
    """Number of responses per prompt; those truncated at max_new_tokens are never chosen."""

    write: Literal["demonstrations", "pairs"] = "demonstrations"
    """demonstrations: the best response per prompt, for step 1; pairs: best and worst, for step
    2."""

    output: Path = Path("selected.jsonl")
    """Output file for the rows; an existing one is replaced."""

    min_reward: float | None = None
    """Minimum reward of a chosen response; null sets no minimum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "--path is missing: pass the model to sample from")
        require(
            bool(self.reward), "--reward is missing: pass file.py:function, or a kind such as math"
        )
        require(self.best_of > 1, f"--best-of must be at least 2, got {self.best_of}")
        require(
            self.temperature > 0,
            f"--temperature must be positive, got {self.temperature}: at 0, all {self.best_of}"
            " responses would be identical",
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
    config = parse_command(
        SelectConfig,
        argv,
        usage=f"{MODULE} rewards.select --path DIR --prompts FILE --reward SOURCE ..."
        " [--SETTING VALUE ...]",
        about="Sample responses, score them, and write the best as training data.",
        aliases=ALIASES,
    )
    check_writable(config.output, config.prompts, option="--output")

    from pipeline.models.hf.chat import check_ready
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    sources = config.sources
    programs = [source for source in sources if source.kind != "model"]
    examples = read_prompts(config, row_columns(read_sources(programs)))
    check_ready(config.path, examples)
    for source in sources:
        if source.kind == "model":
            check_ready(str(source.path), examples, reward_model=True)
    responses = sample_responses(config.path, examples, config, num_samples=config.best_of)
    batches, results = score_episodes(sources, responses, config)
    weights = [source.weight for source in sources]
    rewards = iter(weighted_sum(mask_failures([*results.values()], weights), weights))
    candidates = [
        [Candidate(episode.response, next(rewards), episode.stopped) for episode in batch]
        for batch in batches
    ]
    rows, skipped = select_rows(examples, candidates, config)
    num_failed = sum(result.num_failed for result in results.values())
    print_output("\n".join(summarize(config, candidates, num_failed, rows, skipped)))
    if not rows:
        raise DataError(
            f"no prompt yielded a row, so {config.output} is not written: raise --best-of or"
            " --max-new-tokens, or inspect the rewards with python -m rewards"
        )
    write_output({config.output: json_lines(rows)}, option="--output")
    print_output(f"written to {config.output}")


@dataclass(frozen=True)
class Candidate:
    """A sampled response and its reward."""

    text: str

    reward: float | None
    """The reward; None if no source applies, or if one failed."""

    stopped: bool = True
    """Whether the response ended with an end token. A truncated one is never chosen, because
    training would teach the model to stop there."""

    @property
    def turn(self) -> dict[str, Any]:
        """The response as a message of a data row."""
        return Message("assistant", self.text).turn


def best_and_worst(candidates: Sequence[Candidate]) -> tuple[Candidate | None, Candidate | None]:
    """Return the responses with the highest and the lowest reward; the first ones if tied.

    The best is None if none is eligible; the worst is None if its reward or text equals the best's.
    """
    rewarded = [(c.reward, c) for c in candidates if c.reward is not None and c.text.strip()]
    eligible = [pair for pair in rewarded if pair[1].stopped]
    if not eligible:
        return None, None
    highest, best = max(eligible, key=lambda pair: pair[0])
    lowest, worst = min(rewarded, key=lambda pair: pair[0])
    return best, worst if lowest < highest and worst.text != best.text else None


def select_rows(
    examples: Sequence[Example], candidates: Sequence[Sequence[Candidate]], config: SelectConfig
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the rows to write, and the number of prompts without a row, by reason."""
    rows: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    for example, responses in zip(examples, candidates, strict=True):
        best, worst = best_and_worst(responses)
        prompt = [turn.turn | ({} if turn.trained else {"weight": 0}) for turn in example.prompt]
        tools = {"tools": example.prompt[0].tools} if example.prompt[0].tools else {}
        if best is None or best.reward is None:
            skipped["no response to choose"] += 1
        elif config.min_reward is not None and best.reward < config.min_reward:
            skipped["a low reward"] += 1
        elif config.write == "demonstrations":
            rows.append({"messages": [*prompt, best.turn], **tools, "reward": best.reward})
        elif worst is None:
            skipped["no response with a lower reward"] += 1
        else:  # no margin, since rewards have no fixed scale
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
    return rows, skipped


def summarize(
    config: SelectConfig,
    candidates: Sequence[Sequence[Candidate]],
    num_failed: int,
    rows: Sequence[dict[str, Any]],
    skipped: Mapping[str, int],
) -> list[str]:
    """Return the lines of the summary: samples, rewards and written rows."""
    n = config.best_of
    num_responses = sum(map(len, candidates))
    num_truncated = sum(not c.stopped for group in candidates for c in group)
    rewards = [[c.reward for c in group if c.reward is not None] for group in candidates]
    best_rewards = [max(group) for group in rewards if group]
    num_rewarded = sum(map(len, rewards))
    lines = [f"prompts     {len(candidates):,}, {n} responses each"]
    if best_rewards:
        mean = sum(map(sum, rewards)) / num_rewarded
        mean_best = sum(best_rewards) / len(best_rewards)
        lines.append(f"reward      mean {mean:.4g}, best of {n} {mean_best:.4g}")
    lines += [
        f"no reward   {counted(num_responses - num_rewarded, 'response')};"
        f" sources failed {counted(num_failed, 'time')}",
        f"cut off     {counted(num_truncated, 'response')}, never chosen",
        f"chosen      {counted(len(rows), config.write.removesuffix('s'))}",
    ]
    lines += [f"skipped     {number:,} with {reason}" for reason, number in skipped.items()]
    if rows:
        # Beirami et al. 2024, arXiv:2401.01879, theorem 1; ties only lower it.
        caveat = "; the skipped prompts can increase it" if len(rows) < len(candidates) else ""
        bound = f"log {n} - {n - 1}/{n} = {math.log(n) - (n - 1) / n:.3f} nats{caveat}"
        lines.append(f"KL          at most {bound}")
    return lines


if __name__ == "__main__":
    run_main(main)
