"""The report of a run in which guards tripped."""

import json
from pathlib import Path

from pipeline.report.findings import findings
from pipeline.report.page import render
from pipeline.report.results import Results, read_results

EVAL = {"reward_before": 0.25, "reward_after": 0.9}
LOOPS = {"signal": "repetition", "sentence": "responses run in <loops>", "unit": "step"}


def write_run(out: Path, *lines: dict[str, object]) -> Results:
    step = out / "step3_ppo"
    step.mkdir()
    result = {"seconds": 60.0, "steps": 4, "tokens": 1000, "eval": EVAL}
    (out / "summary.json").write_text(json.dumps({"steps": {"step3_ppo": result}, "seconds": 60}))
    (step / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_results(out)


def scored(step: int, score: float) -> dict[str, object]:
    return {"step": step, "score": score}


def guard_event(step: int, action: str, target_step: int | None = None) -> dict[str, object]:
    fields = {} if target_step is None else {"to": target_step}
    return {"step": step, "guard": {**LOOPS, "step": step, "action": action, **fields}}


def test_curves_omit_rolled_back_steps_and_timeline_has_all_events(tmp_path: Path) -> None:
    first = [scored(1, 0.1), scored(2, 0.2), {"step": 2, "eval_kl": 1.0}, scored(3, 0.9)]
    second = [scored(2, 0.15), {"step": 2, "eval_kl": 0.5}, scored(3, 0.25)]
    events = guard_event(3, "warn"), guard_event(3, "rollback", 1)
    results = write_run(tmp_path, *first, *events, *second, scored(4, 0.3))
    step = results.steps["step3_ppo"]

    assert step.series("score") == [(1, 0.1), (2, 0.15), (3, 0.25), (4, 0.3)]
    assert step.series("eval_kl") == [(2, 0.5)]
    effects = [(3, "warned"), (3, "rolled back to step 1")]
    assert [(event.step, event.effect) for event in step.events] == effects
    page = render(results, tmp_path)
    assert "<b>rolled back to step 1</b></td><td>responses run in &lt;loops&gt;</td>" in page
    assert "<tr><th>Step</th><th>Guards</th><th></th></tr>" in page
    assert [finding.sentence for finding in findings(results)][-1] == (
        "A guard tripped at step 3 of step3_ppo (rolled back to step 1): responses run in <loops>"
    )
