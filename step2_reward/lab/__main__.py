"""Measure the quality and reliability of a reward model.

python -m step2_reward.lab --path OUT/step2_reward --data-path FILE
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.options import parse_command, run_main
from pipeline.files.durable import check_writable
from pipeline.system.installation import MODULE
from step2_reward.config import LabConfig


def main(argv: Sequence[str]) -> None:
    """Measure the model, write lab.json and predictions.jsonl, and print the findings.

    Raises:
        UserError: a setting is wrong, the path isn't a classifier, or there are no labeled rows.
    """
    config = parse_command(
        LabConfig,
        argv,
        usage=f"{MODULE} step2_reward.lab --path DIR [--data-path FILE]",
        about="Measure how accurate a reward model is, and how far it can be trusted.",
    )
    from pipeline.report.results import LAB
    from pipeline.system.logs import configure_logging
    from step2_reward.lab.measure import measure_model
    from step2_reward.lab.sentences import format_findings, write_measurement

    configure_logging(is_main=True)
    local = Path(config.path).expanduser()
    directory = config.output_dir or (local if local.is_dir() else Path()) / "lab"
    check_writable(directory / LAB, option="--output-dir")
    measurement = measure_model(config)
    write_measurement(measurement, directory)
    lines = [f"{sentence}." for sentence in format_findings(measurement[0])]
    sys.stdout.write("\n".join([*lines, f"metrics: {directory / LAB}"]) + "\n")


if __name__ == "__main__":
    run_main(main)
