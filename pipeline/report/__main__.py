"""Write the report of an output directory: `python -m pipeline.report OUT`."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.options import print_output, run_main
from pipeline.report.page import write_report
from pipeline.system.errors import ConfigError

USAGE = "usage: python -m pipeline.report OUT (the --output-dir of a run)"


def main(argv: Sequence[str]) -> None:
    """Write the report of the output directory named in `argv`.

    Raises:
        UserError: no directory was named, or it has no results.
    """
    if list(argv) in (["-h"], ["--help"]):
        print_output(USAGE)
    elif len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(USAGE)
    else:
        print_output(str(write_report(Path(argv[0]))))


if __name__ == "__main__":
    run_main(main)
