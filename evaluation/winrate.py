"""How often a model's responses are better than another's: `python -m evaluation.winrate`.

python -m evaluation.winrate --paths OUT/step1_sft OUT/step3_ppo/actor --prompts FILE \
        --judge '{kind: model, path: OUT/step2_reward}'

Prints a line for every two models, and the strengths of all; writes both to winrate.json.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evaluation.winrate_config import WinrateConfig
from pipeline.cli import run_main, say
from pipeline.command import read_command
from pipeline.errors import DataError
from pipeline.files.output import check_output, write_output
from pipeline.installation import MODULE
from pipeline.settings.plain import plain

if TYPE_CHECKING:
    from evaluation.comparison import Match
    from pipeline.report.figures import Interval


def main(argv: Sequence[str]) -> None:
    """Compare the models, print the tables and write the file.

    Raises:
        UserError: a wrong setting, no model at a path, prompts that can't be read, a judge that
            can't be used or fails.
    """
    config = read_command(
        WinrateConfig,
        argv,
        usage=f"{MODULE} evaluation.winrate --paths A B ... --prompts FILE --judge SOURCE"
        " [--SETTING VALUE ...]",
        about="How often a model's responses are better than another's: docs/evaluation.md.",
    )
    check_output(config.output, option="--output")

    from evaluation.comparison import strength_intervals, strengths
    from evaluation.verdicts import columns_read, matches, responses_of
    from pipeline.logs import configure_logging
    from pipeline.models.chat import check_ready
    from rewards.prompts import read_prompts

    configure_logging(is_main=True)
    examples = read_prompts(
        config.prompts,
        columns_read(config),
        fields=config.fields,
        limit=config.limit,
        seed=config.seed,
        held_out=True,
    )
    for path in config.paths:
        check_ready(path, examples)
    if config.source.kind == "model":
        check_ready(str(config.source.path), examples, scores=True)
    found = matches([responses_of(path, examples, config) for path in config.paths], config)
    for each in found:
        if not len(each.known):
            raise DataError(
                f"no response of {config.paths[each.ours]} or {config.paths[each.theirs]} has a"
                " verdict: the judge applies to none of the prompts; look at the columns it reads"
            )
    points = strengths(found, len(config.paths)).tolist()
    intervals = strength_intervals(found, len(config.paths), seed=config.seed)
    say("\n".join([*_match_lines(found, config), "", *_strength_lines(points, intervals, config)]))
    text = json.dumps(_document(found, points, intervals, config), indent=2)
    write_output({config.output: f"{text}\n"}, option="--output")
    say(f"\nWith all settings in {config.output}")


def _match_lines(found: "Sequence[Match]", config: WinrateConfig) -> list[str]:
    lines = ["win rate  95 % interval   length-controlled  won  tied  lost  unknown"]
    for each in found:
        wins, losses, ties = each.counts
        low, high = each.interval
        unknown = len(each.points) - len(each.known)
        lines.append(
            f"{each.win_rate:7.1%}   {low:5.1%} to {high:5.1%}  {each.length_controlled:15.1%}"
            f"  {wins:5}  {ties:4}  {losses:4}  {unknown:7}"
            f"  {config.paths[each.ours]} against {config.paths[each.theirs]}"
        )
    return lines


def _strength_lines(
    points: Sequence[float], intervals: "Sequence[Interval]", config: WinrateConfig
) -> list[str]:
    lines = ["strength (Bradley-Terry, in Elo points)  95 % interval"]
    order = sorted(range(len(points)), key=lambda model: -points[model])
    for model in order:
        low, high = (_elo(end) for end in intervals[model])
        elo = _elo(points[model])
        lines.append(f"{elo:+8.0f}  {low:+.0f} to {high:+.0f}  {config.paths[model]}")
    return lines


def _document(
    found: "Sequence[Match]",
    points: Sequence[float],
    intervals: "Sequence[Interval]",
    config: WinrateConfig,
) -> dict[str, Any]:
    return {
        "matches": [
            {
                "model": config.paths[each.ours],
                "against": config.paths[each.theirs],
                "win_rate": each.win_rate,
                "low": each.interval[0],
                "high": each.interval[1],
                "length_controlled": each.length_controlled,
                **dict(zip(("wins", "losses", "ties"), each.counts, strict=True)),
                "unknown": len(each.points) - len(each.known),
                "mean_longer": float(each.longer.mean()),
            }
            for each in found
        ],
        "strengths": [
            {"model": path, "elo": _elo(strength), "low": _elo(low), "high": _elo(high)}
            for path, strength, (low, high) in zip(config.paths, points, intervals, strict=True)
        ],
        "settings": plain(config),
    }


def _elo(strength: float) -> float:
    from evaluation.comparison import ELO

    return strength * ELO


if __name__ == "__main__":
    run_main(main)
