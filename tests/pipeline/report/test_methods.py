"""Methods of one run side by side: interpolation by hand, verdicts, what is written and drawn."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from pipeline.origin import training_at
from pipeline.report.figures import pass_rates
from pipeline.report.findings import findings
from pipeline.report.methods import Comparison, Evaluation, compare_methods, lines, value_at
from pipeline.report.results import model_to_talk_to, read_results
from pipeline.report.write import write_report

PROMPTS = 40

SETTINGS = {"missing_eos_score": -1.0, "max_prompt_length": 256, "gold": None}
"""Of every method, unless it says otherwise."""


def verdicts(right: int) -> list[float]:
    return [1.0] * right + [0.0] * (PROMPTS - right)


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
    """A finished step 3 with an evaluation every 10 iterations at (KL, figure by prompt)."""
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


def compared(out: Path) -> Comparison:
    found = compare_methods(read_results(out))
    assert found is not None
    return found


def plain(text: str) -> str:
    return text.replace("\u202f", " ").replace("\N{MINUS SIGN}", "-")


def test_between_two_evaluations_a_prompt_changes_in_proportion_to_the_kl() -> None:
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


def test_methods_are_compared_at_the_largest_kl_that_all_have_reached(tmp_path: Path) -> None:
    judge = {"step1_sft": 0.25}
    write_method(
        tmp_path,
        "ppo",
        [(0.0, {"judge": verdicts(10)}), (2.0, {"judge": verdicts(14)}),
         (4.0, {"judge": verdicts(18)})],
        figures={"judge": {**judge, "step3_ppo": 0.45}},
    )  # fmt: skip
    write_method(
        tmp_path,
        "grpo",
        [(0.0, {"judge": verdicts(10)}), (2.0, {"judge": verdicts(26)}),
         (6.0, {"judge": verdicts(38)})],
        figures={"judge": {**judge, "step3_grpo": 0.95}},
    )  # fmt: skip
    write_method(
        tmp_path,
        "dr_grpo",
        [(0.0, {"judge": verdicts(10)}), (5.0, {"judge": verdicts(30)}),
         (8.0, {"judge": verdicts(36)})],
    )  # fmt: skip

    found = compared(tmp_path)

    # At 4 nats: 18 of 40; 26 + 12 / 2 = 32 of 40; 10 + 4 / 5 * 20 = 26 of 40.
    assert found.kl == 4.0
    assert [each.method.title for each in found.equal] == ["GRPO", "Dr. GRPO", "PPO"]
    assert [each.value for each in found.equal] == pytest.approx([0.8, 0.65, 0.45])
    assert [each.against_best for each in found.equal] == [None, "better", "better"]
    # Wilson's of 32 of 40.
    assert found.equal[0].interval == pytest.approx((0.6524, 0.8950), abs=5e-5)
    assert plain(found.sentence) == (
        "At equal KL of 4.00 nats, correct and polite: GRPO 80 %, better than Dr. GRPO (65 %) and"
        " PPO (45 %)"
    )
    assert findings(read_results(tmp_path))[0].sentence == found.sentence
    assert [plain(each.sentence) for each in findings(read_results(tmp_path))[1:]] == [
        "Dr. GRPO's answers score higher than step 1's on 50 % of held-out prompts, at a KL of"
        " 8.00 nats per answer",
        "GRPO: 95 % of answers are correct and polite, against 25 % after step 1",
        "PPO: 45 % of answers are correct and polite, against 25 % after step 1",
    ]
    best = model_to_talk_to(read_results(tmp_path).steps)
    assert best is not None
    assert best.name == "step3_grpo"


def test_a_difference_that_may_be_chance_is_not_told_apart(tmp_path: Path) -> None:
    for method, right in (("ppo", 20), ("rloo", 22)):
        points = [(float(kl), {"judge": verdicts(10 + (right - 10) * kl // 2)}) for kl in range(3)]
        write_method(tmp_path, method, points)

    sentence = plain(compared(tmp_path).sentence)

    assert sentence == (
        "At equal KL of 2.00 nats, correct and polite: RLOO 55 %, not told apart from PPO (50 %)"
    )


def test_gold_counts_before_rewards_and_prompts_without_one_are_left_out(tmp_path: Path) -> None:
    for method, gain in (("ppo", 1.0), ("rloo", 2.0)):
        values = [[0.5 * kl * gain + 0.1 * row for row in range(4)] for kl in range(3)]
        points = [
            (float(kl), {"gold": [*values[kl], None], "reward": [9.0] * 5}) for kl in range(3)
        ]
        write_method(tmp_path, method, points)

    found = compared(tmp_path)

    assert found.figure == "gold"
    assert [each.value for each in found.equal] == pytest.approx([2.15, 1.15])
    assert [each.against_best for each in found.equal] == [None, "better"]


def test_other_held_out_prompts_are_not_compared(tmp_path: Path) -> None:
    points = [(float(kl), {"judge": verdicts(kl)}) for kl in range(3)]
    write_method(tmp_path, "ppo", points)
    write_method(tmp_path, "rloo", points, settings={"max_prompt_length": 9})

    found = compared(tmp_path)

    assert (found.kl, found.sentence) == (None, "")
    assert "held-out prompts differ (max_prompt_length)" in found.notes[0]


def test_the_page_and_the_terminal_have_a_row_for_each_method(tmp_path: Path) -> None:
    for method, right in (("ppo", 18), ("reinforce_pp", 34)):
        points = [(1.5 * kl, {"judge": verdicts(10 + (right - 10) * kl // 2)}) for kl in range(3)]
        write_method(tmp_path, method, points)
    unfinished = tmp_path / "step3_rloo"
    unfinished.mkdir()
    (unfinished / "metrics.jsonl").write_text('{"step": 1}\n')

    page = write_report(tmp_path).read_text()
    table = [plain(line) for line in lines(compared(tmp_path))]

    chart = page[page.index("What a method gets for its KL") :].split("</section>")[0]
    assert len(re.findall(r'class="dot', chart)) == 3 + 2 * 3  # the key, then the evaluations
    dashes = re.findall(r'class="line[^"]*" stroke-dasharray="([^"]*)"', chart)
    assert len(set(dashes)) == 3
    assert "REINFORCE++, step 20: 85\u202f% at 3.00 nats" in chart
    assert "equal KL of 3.00 nats" in chart
    assert page.count("<b>RLOO</b>") == 2
    assert [" ".join(line.split()) for line in table] == [
        "method correct and polite 95 % interval KL length stops time samples at equal KL the best"
        " is",
        "PPO 45 % 30.7 % to 60.2 % 3.00 nats 12.3 97.5 % 1:23 2,560 45 % (30.7 % to 60.2 %) better",
        "REINFORCE++ 85 % 70.9 % to 92.9 % 3.00 nats 12.3 97.5 % 1:23 2,560 85 % (70.9 % to"
        " 92.9 %) this one",
        "RLOO not finished – – – – – – – –",
        "At equal KL of 3.00 nats, correct and polite: REINFORCE++ 85 %, better than PPO (45 %)",
        "RLOO kept no evaluation that has this figure",
    ]


def write_step_1(out: Path, perplexity: float, *, seconds: float = 1.0) -> str:
    """A finished step 1, in place of an earlier one; what models that begin from it record."""
    directory = out / "step1_sft"
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("")
    figures = {"perplexity_after": perplexity, "rows": 40}
    result = {"seconds": seconds, "steps": 9, "tokens": 900, "eval": figures}
    (directory / "result.json").write_text(json.dumps(result))
    training = training_at(str(directory))
    assert training is not None
    return training


def write_samples(out: Path, method: str, **answers: str) -> None:
    """The answers to a held-out prompt, by model."""
    prompt = [{"role": "user", "content": "3 plus 4?"}]
    row = {"prompt": prompt, "answers": {model: {"text": answers[model]} for model in answers}}
    (out / f"step3_{method}" / "samples.json").write_text(json.dumps({"rows": [row]}))


def test_a_method_of_an_earlier_step_1_is_left_out_and_a_sentence_says_so(tmp_path: Path) -> None:
    before = write_step_1(tmp_path, 2.5)
    for method, right in (("grpo", 40), ("rloo", 38)):
        points = [(float(kl), {"judge": verdicts(right * kl // 2)}) for kl in range(3)]
        rates = {"judge": {"step1_sft": 0.1, f"step3_{method}": right / 40}}
        write_method(tmp_path, method, points, began_from=before, figures=rates)
    of_all = compared(tmp_path)
    write_samples(tmp_path, "grpo", step1_sft="4", step3_grpo="5")
    now = write_step_1(tmp_path, 2.25)
    for method, right in (("ppo", 30), ("raft", 20)):
        points = [(float(kl), {"judge": verdicts(right * kl // 2)}) for kl in range(3)]
        rates = {"judge": {"step1_sft": 0.2, f"step3_{method}": right / 40}}
        write_method(tmp_path, method, points, began_from=now, figures=rates)
    write_samples(tmp_path, "ppo", step1_sft="6", step3_ppo="7")

    found = compared(tmp_path)
    best = model_to_talk_to(read_results(tmp_path).steps)

    assert (len(of_all.equal), of_all.notes) == (2, ())
    assert [each.method.title for each in found.equal] == ["PPO", "RAFT"]
    assert found.notes == (
        "At equal KL nothing is said of GRPO and RLOO, which began from another model than PPO and"
        " RAFT (a new step 1, or another actor.path)",
    )
    assert best is not None
    assert best.name == "step3_ppo"  # 30 of 40, against 40 of GRPO
    rates = pass_rates(read_results(tmp_path))
    assert rates == {
        "step1_sft": 0.2,  # today's, and not what GRPO and RLOO were measured against
        "step3_grpo": 1.0,
        "step3_ppo": 0.75,
        "step3_raft": 0.5,
        "step3_rloo": 0.95,
    }
    (sample,) = read_results(tmp_path).samples
    texts = {model: answer.text for model, answer in sample.answers.items()}
    assert texts == {"step1_sft": "6", "step3_ppo": "7", "step3_grpo": "5"}
    table = [" ".join(plain(line).split()) for line in lines(found)]
    assert table[1].startswith("GRPO 100 % ")
    assert table[1].endswith("1:23 2,560 \N{EN DASH} \N{EN DASH}")
    chart = write_report(tmp_path).read_text().split("What a method gets for its KL")[1]
    assert "RAFT, step 20" in chart
    assert "GRPO, step 20" not in chart


def test_of_equal_methods_the_first_is_the_one_to_talk_to(tmp_path: Path) -> None:
    for method, right in (("grpo", 20), ("ppo", 30), ("rloo", 30)):
        points = [(float(kl), {"judge": verdicts(right * kl // 2)}) for kl in range(3)]
        write_method(tmp_path, method, points)

    chosen = model_to_talk_to(read_results(tmp_path).steps)

    assert chosen is not None
    assert chosen.name == "step3_ppo"
