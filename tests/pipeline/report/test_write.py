"""The report of a run."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.report.findings import findings
from pipeline.report.page import write_report
from pipeline.report.results import read_results

SFT = {"seconds": 80.0, "steps": 3, "tokens": 2_400_000}
SFT_EVAL = {"perplexity_before": 1102.3, "perplexity_after": 2.31, "rows": 300}
RM_EVAL = {"accuracy_before": 0.512, "accuracy_after": 0.943, "pairs": 212}
PPO_EVAL = {"score_before": -0.6, "score_after": 1.38, "kl": 4.02, "win_rate": 0.871}
PPO_EVAL |= {"prompts": 62, "wins": 54, "losses": 8}
JUDGE = {"base": 0.0, "step1_sft": 0.41, "step3_ppo": 0.84}
COUNTS = {"prompts": 200, "gained": 90, "lost": 4}


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_summary(out: Path, **evals: dict[str, object]) -> None:
    steps = {name: {**SFT, "eval": result} for name, result in evals.items()}
    write(out / "summary.json", {"steps": steps, "seconds": 266.0})


class Page(HTMLParser):
    """The visible text, the tags and the addresses of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the tag and its addresses."""
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        """Record the text."""
        if self.get_starttag_text() != "<style>" and data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        """All of the text."""
        return " ".join(" ".join(self.texts).split())


def test_first_finding_is_that_of_the_judge(tmp_path: Path) -> None:
    write_summary(
        tmp_path,
        step1_sft=SFT_EVAL,
        step2_reward=RM_EVAL,
        step3_ppo={**PPO_EVAL, "judge": JUDGE, "judge_counts": COUNTS},
    )

    first, *others = findings(read_results(tmp_path))

    assert first.verdict == "better"
    assert first.sentence == (
        "84% of answers are correct and polite, against 41% after step 1 and 0% from the base model"
    )
    assert first.detail == (
        "200 held-out prompts; 95% interval of the change from step 1: +35.2 to +50.0 points"
    )
    assert [finding.text for finding in others] == [
        "PPO's answers score higher than step 1's on 54 of 62 held-out prompts, equally on 0 and"
        " lower on 8, at a KL of 4.02 nats per answer (win rate 87.1%, ties count as half; 95%"
        " interval 77.6% to 94.3%)",
        "The reward model is right on 94.3% of 212 held-out pairs, 51.2% before training"
        " (95% interval 90.3% to 96.7%)",
        "Perplexity on 300 held-out answers fell from 1,102 to 2.31",
    ]


def test_perplexity_that_rounds_to_the_same_number_did_not_change(tmp_path: Path) -> None:
    same = {"perplexity_before": 42077.2, "perplexity_after": 42077.4}
    write_summary(tmp_path, step1_sft={**SFT_EVAL, **same})

    (finding,) = findings(read_results(tmp_path))

    assert finding.sentence == "Perplexity on 300 held-out answers did not change: 42,077"
    assert finding.verdict == "not distinguishable"


def test_win_rate_of_only_ties_and_losses_claims_no_win(tmp_path: Path) -> None:
    figures: dict[str, object] = {**PPO_EVAL, "win_rate": 0.4375, "score_after": -0.9}
    write_summary(tmp_path, step3_ppo=figures | {"prompts": 8, "wins": 0, "losses": 1})

    first = findings(read_results(tmp_path))[0].text

    assert "score higher than step 1's on 0 of 8 held-out prompts, equally on 7 and lower" in first
    assert "(win rate 43.8%, ties count as half; 95% interval" in first
    assert "rise" not in Page(write_report(tmp_path)).text  # the score fell from -0.6


@pytest.mark.parametrize("model", ["DIR/my-model", "meta/model"])
def test_run_without_step_1_is_compared_with_its_start_model(tmp_path: Path, model: str) -> None:
    judge = {"start": 0.41, "step3_grpo": 0.84}
    grpo = {"judge": judge, "judge_counts": COUNTS, "reward_before": 0.25, "reward_after": 0.5}
    write_summary(tmp_path, step3_grpo={**PPO_EVAL, **grpo})
    (tmp_path / "step3_grpo").mkdir()
    (tmp_path / "step3_grpo" / "config.yaml").write_text(f"actor: {{path: {model}}}")
    greedy = {"text": "Hello to you.", "score": -1.0, "stopped": False, "raw_score": 2.5}
    texts = {name: {"text": "Hi.", "score": 1.0, "stopped": True} for name in judge}
    texts["start"] |= {"greedy": greedy}
    texts["step3_grpo"] |= {"score": None, "raw_score": None, "stopped": False}  # sources failed
    prompt = [{"role": "user", "content": "Hello"}]
    rows = [{"prompt": prompt, "answers": texts, "temperature": 0.7}]
    write(tmp_path / "step3_grpo/samples.json", {"rows": rows})

    sentences = [x.text for x in findings(read_results(tmp_path))]
    page = Page(write_report(tmp_path)).text

    assert sentences[0].startswith(
        "84% of answers are correct and polite, against 41% from the starting model (200"
        " held-out prompts; 95% interval of the change: "
    )
    assert sentences[1].endswith("mean reward of +0.50, against +0.25 from the starting model")
    assert sentences[2].startswith("GRPO's answers score higher than the starting model's on 54")
    assert (
        "Starting model Greedy Hello to you. score +2.50 cut off: counts as \u22121.00"
        " Sampled at temperature 0.7 Hi. score +1.00 GRPO" in page
    )
    assert "step 1" not in page
    assert "Supervised" not in page


def test_text_of_models_and_data_is_escaped(tmp_path: Path) -> None:
    evil = "</div><script>alert(1)</script><img src=x onerror=alert(2)>"
    write_summary(tmp_path, step3_ppo=PPO_EVAL)
    answers = {"step1_sft": {"text": evil, "score": 1.5, "stopped": False, evil: True}}
    write(
        tmp_path / "step3_ppo/samples.json",
        {"rows": [{"prompt": [{"role": evil, "content": evil}] * 2,
                                            "answers": answers}]},
    )  # fmt: skip
    write(
        tmp_path / "step3_ppo/result.json",
        {**SFT, "eval": PPO_EVAL, "changed_settings": {evil: evil}},
    )

    page = Page(write_report(tmp_path))

    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert "cut off" in page.text


def test_page_is_self_contained(tmp_path: Path) -> None:
    write_summary(tmp_path / "my run", step1_sft=SFT_EVAL)

    report = write_report(tmp_path / "my run")

    assert Page(report).addresses == []
    assert f" --path '{tmp_path}/my run/step1_sft/actor'" in Page(report).text
    assert "url(" not in report.read_text()
    assert "@import" not in report.read_text()


@pytest.mark.parametrize("content", [None, "notes"])
def test_directory_without_results_is_an_error(tmp_path: Path, content: str | None) -> None:
    out = tmp_path / "out"
    if content:
        out.mkdir()
        (out / "notes.txt").write_text(content)

    result = subprocess.run(
        [sys.executable, "-m", "pipeline.report", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {out}")
    assert result.stderr.count("\n") == 1
