"""Responses to prompts of the embedded task, labelled right or wrong, of which few are wrong.

python -m benchmarks.imbalanced_labels rows.csv --rows 6000 --share 0.05

Training prompts are step 2's, whose responses are drawn as its pairs are; `rows_choice.csv` has
other prompts of step 2, for the choice of settings, and `rows_eval.csv` the task's held-out
prompts, with responses of each class as often as in training.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from random import Random

from pipeline.data.embedded import (
    Question,
    draw_response,
    held_out_questions,
    training_questions,
)


def rows(questions: Iterable[Question], *, share: float, random: Random) -> list[dict[str, str]]:
    """A row for each question; `share` of them have a wrong response."""
    found: list[dict[str, str]] = []
    for question in questions:
        correct, polite = random.random() >= share, random.random() < 0.5
        (turn,) = draw_response(question.fact, correct=correct, polite=polite, random=random)
        label = "right" if correct else "wrong"
        found.append({"prompt": question.text, "response": turn.content, "label": label})
    return found


def write(path: Path, lines: list[dict[str, str]]) -> None:
    """Write the rows as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--choice", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=3000)
    parser.add_argument("--share", type=float, default=0.05)
    options = parser.parse_args()
    questions = training_questions(step=2, seed=0, count=options.rows + options.choice)
    write(
        options.path,
        rows(questions[: options.rows], share=options.share, random=Random("training")),
    )
    choice = options.path.with_stem(f"{options.path.stem}_choice")
    write(choice, rows(questions[options.rows :], share=options.share, random=Random("choice")))
    random = Random("held out")
    drawn = random.choices(held_out_questions(), k=options.held_out)
    held_out = options.path.with_stem(f"{options.path.stem}_eval")
    write(held_out, rows(drawn, share=options.share, random=random))


if __name__ == "__main__":
    main()
