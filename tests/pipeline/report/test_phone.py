"""The report on a telephone, in a real browser."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from pipeline.report.write import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom"),
)

# The report forbids scripts to itself, so that a page around it looks at it.
LOOK = """<!doctype html><iframe src="report.html" style="width: 400px; height: 3000px; border: 0">
</iframe><pre id="seen"></pre><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const cells = [...page.querySelectorAll("body *:not(pre):not(pre *):not(svg *)")];
  const seen = cells.filter(cell => cell.children.length == 0 && cell.textContent.trim())
    .map(cell => [cell.textContent.trim(), cell.getBoundingClientRect()])
    .filter(([text, box]) => box.width > 0)
    .map(([text, box]) => [text, Math.floor(box.left), Math.ceil(box.right)]);
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, a package of most distributions")
def test_all_of_the_report_lies_within_400_pixels(tmp_path: Path) -> None:
    figures = {
        "step1_sft": {"perplexity_before": 1102.3, "perplexity_after": 2.31},
        "step2_reward": {"accuracy_before": 0.512, "accuracy_after": 0.943, "pairs": 1000},
        "step3_ppo": {"score_before": -0.6, "score_after": 1.38, "kl": 4.02, "win_rate": 0.87},
    }
    settings = {"model.zero.offload.optimizer": "cpu", "data.path": ["a/long/path" * 8]}
    for name, figure in figures.items():
        (tmp_path / name).mkdir()
        result = {"seconds": 80, "steps": 300, "tokens": 2_400_000, "changed_settings": settings}
        (tmp_path / name / "result.json").write_text(json.dumps({**result, "eval": figure}))
        (tmp_path / name / "metrics.jsonl").write_text("")
    write_report(tmp_path)
    (tmp_path / "look.html").write_text(LOOK)

    ended = subprocess.run(
        [
            CHROMIUM or "",
            *FLAGS,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"file://{tmp_path}/look.html",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    found = re.search(r'<pre id="seen">(.*?)</pre>', ended.stdout, re.DOTALL)
    seen = json.loads(unescape(found[1])) if found else []
    texts = [text for text, _, _ in seen]
    assert [text for text, left, right in seen if left < 0 or right > 400] == []
    for text in ("2.31", "94.3\u202f%", "+1.38", "4.02 nats"):
        assert any(text in other for other in texts), text
