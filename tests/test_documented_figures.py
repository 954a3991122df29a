"""README's picture shows the run whose figures docs/results.md has."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_figures_beside_the_picture_are_those_of_the_default_run() -> None:
    readme, results = ((ROOT / name).read_text() for name in ("README.md", "docs/results.md"))

    (said,) = re.findall(r"!\[The report of a run: (.*?)\]\(docs/report\.png\)", readme)
    # The first table of results is the default run's; others have a row of the same seed.
    run = re.findall(r"^\| 1234 \|(.*)\|$", results, re.MULTILINE)[0]
    after_1, after_3 = (cell.strip().partition("%")[0] for cell in run.split("|")[2:4])

    assert said == f"{after_3}% of answers are correct and polite, against {after_1}% after step 1"
    assert (ROOT / "docs" / "report.png").is_file()
