"""Write the report of an output directory: `python -m pipeline.report OUT`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.options import run_main
from pipeline.report.page import write_report
from pipeline.system.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Write the report of the output directory named in `argv`.

    Raises:
        UserError: no directory was named, or it has no results.
    """
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("usage: python -m pipeline.report OUT, the --output-dir of a run")
    sys.stdout.write(f"{write_report(Path(argv[0]))}\n")


if __name__ == "__main__":
    run_main(main)
