"""Comparison of several methods of one run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from pipeline.report.findings import findings
from pipeline.report.methods import Comparison, Evaluation, compare_methods, value_at
from pipeline.report.results import find_chat_model, read_results

PROMPTS = 40

SETTINGS = {"missing_eos_score": -1.0, "max_prompt_length": 256, "gold": None}
"""Default settings of every method."""


def judged(*points: tuple[float, int]) -> list[tuple[float, dict[str, list[float]]]]:
    """Return (KL, values by prompt) from pairs of a KL and a number of right answers."""
    return [(kl, {"judge": ([1.0] * right + [0.0] * (PROMPTS - right))}) for kl, right in points]


def write_method(
    out: Path,
    method: str,
    points: Sequence[tuple[float, Mapping[str, Sequence[float | None]]]],
    *,
    figures: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    name: str = "",
    began_from: str | None = None,
) -> None:
    """Write a finished step 3 with an evaluation every 10 iterations at (KL, values by prompt)."""
    directory = out / (name or f"step3_{method}")
    directory.mkdir(parents=True)
    path = [
        {"step": 10 * number, "eval_kl": kl, "eval_by_prompt": values}
        for number, (kl, values) in enumerate(points)
    ]
    end = {"step": path[-1]["step"], "eval_kl": 9.9, "eval_by_prompt": {"exported": points[-1][1]}}
    path[0] |= {} if began_from is None else {"began_from": began_from}
    lines = [json.dumps(line) + "\n" for line in [*path, end]]
    (directory / "metrics.jsonl").write_text("".join(lines))
    recorded = {"output_dir": str(directory), "method": method, **SETTINGS, **(settings or {})}
    (directory / "config.yaml").write_text(yaml.safe_dump(recorded))
    evaluation = {"kl": points[-1][0], "win_rate": 0.5, "length_after": 12.34, "stop_rate": 0.975}
    result = {
        "seconds": 83.0,
        "steps": 20,
        "tokens": 5000,
        "samples": 2560,
        "eval": {**evaluation, **(figures or {})},
        "changed_settings": {},
    }
    (directory / "result.json").write_text(json.dumps(result))


def compare(out: Path) -> Comparison:
    comparison = compare_methods(read_results(out))
    assert comparison is not None
    return comparison


def plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def test_values_between_evaluations_are_interpolated_by_kl() -> None:
    path = [
        Evaluation(0, 0.0, [0.0, 1.0, 0.5]),
        Evaluation(10, 2.0, [1.0, 1.0, None]),
        Evaluation(20, 1.0, [0.0, 0.0, 0.0]),
        Evaluation(30, 6.0, [1.0, 0.5, 1.0]),
    ]

    assert value_at(path, 0.5) == [0.25, 1.0, None]
    assert value_at(path, 2.0) == [1.0, 1.0, None]
    assert value_at(path, 3.0) == pytest.approx([0.4, 0.2, 0.4])  # from KL 1 to 6, two fifths
    with pytest.raises(ValueError, match="no evaluation at a KL of 7"):
        value_at(path, 7.0)


def test_methods_are_compared_at_the_largest_common_kl(tmp_path: Path) -> None:
    sft = {"step1_sft": 0.25}
    ppo = judged((0.0, 10), (2.0, 14), (4.0, 18))
    write_method(tmp_path, "ppo", ppo, figures={"judge": {**sft, "step3_ppo": 0.45}})
    grpo = judged((0.0, 10), (2.0, 26), (6.0, 38))
    write_method(tmp_path, "grpo", grpo, figures={"judge": {**sft, "step3_grpo": 0.95}})
    write_method(tmp_path, "dr_grpo", judged((0.0, 10), (5.0, 30), (8.0, 36)))

    comparison = compare(tmp_path)

    # At 4 nats: 18 of 40; 26 + 12 / 2 = 32 of 40; 10 + 4 / 5 * 20 = 26 of 40.
    assert comparison.kl == 4.0
    assert [entry.method.title for entry in comparison.equal] == ["GRPO", "Dr. GRPO", "PPO"]
    assert [entry.value for entry in comparison.equal] == pytest.approx([0.8, 0.65, 0.45])
    assert [entry.against_best for entry in comparison.equal] == [None, "better", "better"]
    # Wilson's interval for 32 of 40.
    assert comparison.equal[0].interval == pytest.approx((0.6524, 0.8950), abs=5e-5)
    assert plain(comparison.sentence) == (
        "At equal KL (4.00 nats), correct and polite: GRPO 80%, better than Dr. GRPO (65%) and"
        " PPO (45%)"
    )
    assert findings(read_results(tmp_path))[0].sentence == comparison.sentence
    best = find_chat_model(read_results(tmp_path).steps)
    assert best is not None
    assert best.name == "step3_grpo"


def test_best_of_methods_without_equal_kl_is_described_alone(tmp_path: Path) -> None:
    counts = {"prompts": PROMPTS, "gained": 10, "lost": 0}
    for name, right in (("dpo", 12), ("grpo", 30), ("ppo", 20)):
        rates = {"step1_sft": 0.25, f"step3_{name}": right / PROMPTS}
        figures = {"judge": rates, "judge_counts": counts, "reward_before": 0, "reward_after": 1}
        write_method(tmp_path, name, judged((0.0, right)), figures=figures)

    first, second = findings(read_results(tmp_path))[:2]

    expected = "GRPO: 75% of answers are correct and polite, against 25% after step 1"
    assert plain(first.sentence) == expected
    assert "the change from step 1: " in first.detail
    assert second.sentence.startswith("GRPO: Answers to held-out prompts have a mean reward of")
