"""The report of a run with programmatic rewards."""

import json
from pathlib import Path

from pipeline.report.curves import step_charts
from pipeline.report.results import Results, read_results

EVAL = {"reward_before": 0.25, "reward_after": 0.9, "kl": 4.0, "win_rate": 0.8}
EVAL |= {"sampled_reward_before": 0.2, "sampled_reward_after": 0.8}
EVAL |= {"prompts": 50, "wins": 40, "losses": 10}
TWO = {"reward_right_before": 0.2, "reward_right_after": 0.8}
TWO |= {"reward_short_before": 0.05, "reward_short_after": 0.1}


def run(out: Path, figures: dict[str, float], *metrics: str) -> Results:
    """An output directory with step 3 alone, and two lines of these metrics."""
    step = out / "step3_ppo"
    step.mkdir()
    result = {"seconds": 60.0, "steps": 2, "tokens": 1000, "eval": figures}
    (out / "summary.json").write_text(json.dumps({"steps": {"step3_ppo": result}, "seconds": 60}))
    lines = [{"step": number, **dict.fromkeys(metrics, number / 2)} for number in (1, 2)]
    (step / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = {"text": "81", "score": 0.9, "stopped": True}
    answer["rewards"] = {"reward_right": 0.8, "reward_short": 0.1}
    rows = [{"prompt": [{"role": "user", "content": "33+48="}], "answers": {"step3_ppo": answer}}]
    (step / "samples.json").write_text(json.dumps({"rows": rows}))
    return read_results(out)


def test_each_source_has_a_curve_beside_the_reward_of_all(tmp_path: Path) -> None:
    names = ("score", "reward_score", "reward_right", "reward_short", "gold", "reward_failures")
    results = run(tmp_path, EVAL | TWO, *names)

    charts = step_charts(results.steps["step3_ppo"])

    curves = {drawn.chart.title: list(drawn.names) for drawn in charts}
    assert curves == {
        "Reward": ["reward"],
        "Reward by source": ["right", "short"],
        "Gold reward": ["training"],
        "Reward failures": ["share"],
    }
