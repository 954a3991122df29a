"""Win rates of models against each other: `python -m evaluation.winrate`.

python -m evaluation.winrate --paths OUT/step1_sft OUT/step3_ppo/actor --prompts FILE \
        --judge '{kind: model, path: OUT/step2_reward}'

Prints a line for each pair of models, and writes the metrics to winrate.json.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.comparison import Match
from pipeline.cli.options import parse_command, print_output, run_main
from pipeline.config import RowColumns
from pipeline.files.durable import check_writable, write_output
from pipeline.settings.fields import to_plain
from pipeline.system.errors import DataError, require
from pipeline.system.installation import MODULE
from rewards.config import RewardConfig, read_spec
from rewards.contract import Episode
from rewards.sampling import SamplingConfig, read_prompts, sample_responses, score_episodes
from rewards.sources import read_sources, row_columns


@dataclass(frozen=True, kw_only=True)
class WinrateConfig(SamplingConfig):
    """The models to compare, the prompts, and the judge."""

    paths: tuple[str, ...] = ()
    """Two or more model directories or Hub ids."""

    judge: str = ""
    """The judge: a reward model, '{kind: model, path: OUT/step2_reward}'; a program,
    file.py:function or a kind such as math; or an LLM that scores each response, '{kind: judge,
    path: https://HOST/v1, model: NAME}'."""

    temperature: float = 0.0
    """Sampling temperature; 0 selects greedy decoding."""

    max_new_tokens: int = 512
    """Maximum number of tokens per response."""

    timeout_seconds: float = 60.0
    """Maximum seconds per program call or request."""

    output: Path = Path("winrate.json")
    """JSON file for all metrics; an existing one is replaced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.paths) > 1, "--paths needs two or more models to compare, such as --paths A B"
        )
        for path in self.paths:
            require(self.paths.count(path) == 1, f"--paths lists {path} twice; list it once")
        require(
            bool(self.judge),
            "--judge is missing: pass '{kind: model, path: DIR}', file.py:function or a kind",
        )
        require(
            self.source.kind != "model" or self.source.path is not None,
            "--judge model: pass its directory, as in '{kind: model, path: OUT/step2_reward}'",
        )
        require(
            self.source.weight == 1.0,
            f"--judge: weight {self.source.weight} has no effect on a single judge; omit it",
        )

    @property
    def source(self) -> RewardConfig:
        """The reward source that `judge` describes."""
        return read_spec(self.judge, option="--judge")

    @property
    def columns(self) -> RowColumns:
        """Columns of the rows that the judge reads.

        Raises:
            ConfigError: the judge can't be used.
        """
        if self.source.kind == "model":
            return RowColumns()
        return row_columns(read_sources([self.source]))


def main(argv: Sequence[str]) -> None:
    """Compare the models, print a table and write the file.

    Raises:
        UserError: a setting is wrong, a path contains no model, prompts can't be read, or the judge
            can't be used or fails.
    """
    config = parse_command(
        WinrateConfig,
        argv,
        usage=f"{MODULE} evaluation.winrate --paths A B ... --prompts FILE --judge SOURCE"
        " [--SETTING VALUE ...]",
        about="Compare the responses of models, and print their win rates (docs/evaluation.md).",
    )
    check_writable(config.output, config.prompts, option="--output")

    from pipeline.models.hf.chat import check_ready
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    examples = read_prompts(config, config.columns, held_out=True)
    for path in config.paths:
        check_ready(path, examples)
    if config.source.kind == "model":
        check_ready(str(config.source.path), examples, reward_model=True)
    responses = [
        [episode for (episode,) in sample_responses(path, examples, config)]
        for path in config.paths
    ]
    matches = compare_models(responses, config)
    for match in matches:
        if not len(match.verdicts):
            raise DataError(
                f"no response of {config.paths[match.model]} or {config.paths[match.opponent]} has"
                " a verdict: the judge applies to none of the prompts; check the columns it reads"
            )
    print_output("\n".join(_format_table(matches, config)))
    text = json.dumps(_make_document(matches, config), indent=2)
    write_output({config.output: f"{text}\n"}, option="--output")
    print_output(f"\nsettings and metrics: {config.output}")


def compare_models(responses: Sequence[Sequence[Episode]], config: WinrateConfig) -> list[Match]:
    """Compare all pairs of models on all prompts, the later model first.

    Raises:
        RewardError: the judge failed on more responses than `max_failures` allows.
    """
    lengths = [np.array([float(len(e.response)) for e in episodes]) for episodes in responses]
    rewards = [_judge(episodes, config) for episodes in responses]
    return [
        Match(
            model,
            opponent,
            _compute_points(rewards[model], rewards[opponent]),
            lengths[model] - lengths[opponent],
        )
        for opponent, model in itertools.combinations(range(len(responses)), 2)
    ]


def _judge(responses: Sequence[Episode], config: WinrateConfig) -> np.ndarray:
    """Return the judge's rewards for a model's responses, or NaN where it gives none."""
    _, results = score_episodes([config.source], [list(responses)], config)
    (result,) = results.values()
    return np.array(result.values, dtype=float)


def _compute_points(model_rewards: np.ndarray, opponent_rewards: np.ndarray) -> np.ndarray:
    """Return 1 where the model's reward is higher, 0.5 for a tie, else 0; NaN if one is missing."""
    points = (model_rewards > opponent_rewards) + 0.5 * (model_rewards == opponent_rewards)
    return np.where(np.isnan(model_rewards) | np.isnan(opponent_rewards), np.nan, points)


def _format_table(matches: Sequence[Match], config: WinrateConfig) -> list[str]:
    lines = ["win rate  95% interval    length-controlled  won  tied  lost  unknown"]
    for match in matches:
        wins, losses, ties = match.counts
        low, high = match.interval
        unknown = len(match.points) - len(match.verdicts)
        lines.append(
            f"{match.win_rate:7.1%}   {low:5.1%} to {high:5.1%}  {match.length_controlled:15.1%}"
            f"  {wins:5}  {ties:4}  {losses:4}  {unknown:7}"
            f"  {config.paths[match.model]} against {config.paths[match.opponent]}"
        )
    return lines


def _make_document(matches: Sequence[Match], config: WinrateConfig) -> dict[str, Any]:
    return {
        "matches": [
            {
                "model": config.paths[match.model],
                "against": config.paths[match.opponent],
                "win_rate": match.win_rate,
                "low": match.interval[0],
                "high": match.interval[1],
                "length_controlled": match.length_controlled,
                **dict(zip(("wins", "losses", "ties"), match.counts, strict=True)),
                "unknown": len(match.points) - len(match.verdicts),
                "mean_longer": float(match.length_difference.mean()),
            }
            for match in matches
        ],
        "settings": to_plain(config),
    }


if __name__ == "__main__":
    run_main(main)
