"""How much code an iteration of PPO runs through: functions entered, by room and file.

    python train.py --threads 1 --output-dir OUT
    python -m benchmarks.functions_entered --run OUT [--files]

Step 3 of the run is started again for two iterations, on one process; every function of the project
that the second one enters, in its own thread, is counted once.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import step3_ppo.train

ROOT = Path(__file__).resolve().parent.parent

Function = tuple[str, str]
"""A file, relative to the project, and a function's qualified name in it."""


@contextmanager
def entered() -> Iterator[set[Function]]:
    """The functions of the project that are entered inside it."""
    functions: set[Function] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/"):
            functions.add((code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname))

    sys.setprofile(note)
    try:
        yield functions
    finally:
        sys.setprofile(None)


def of_an_iteration(run: Path) -> set[Function]:
    """The functions that the second iteration of step 3 enters, with a run's settings."""
    own, iterations = step3_ppo.train.iterate, []

    def iterate(*args: Any, **kwargs: Any) -> dict[str, float]:  # noqa: ANN401
        with entered() as functions:
            metrics = own(*args, **kwargs)
        iterations.append(functions)
        return metrics

    step3_ppo.train.iterate = iterate
    config = str(run / "step3_ppo" / "config.yaml")
    with tempfile.TemporaryDirectory() as directory:
        step3_ppo.train.main(["--config", config, "--max_steps", "2", "--output_dir", directory])
    return {each for each in iterations[1] if each[0] != "benchmarks/functions_entered.py"}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="of `python train.py`")
    parser.add_argument("--files", action="store_true", help="each file, too")
    args = parser.parse_args(argv)

    by_file = Counter(file for file, _ in of_an_iteration(args.run))
    rooms = Counter(file.split("/")[0] for file in by_file)
    print("| room | files | functions |\n|---|---|---|")
    for room, files in sorted(rooms.items()):
        functions = sum(count for file, count in by_file.items() if file.startswith(f"{room}/"))
        print(f"| {room} | {files} | {functions} |")
    print(f"| all | {len(by_file)} | {by_file.total()} |")
    for file, count in sorted(by_file.items()) if args.files else ():
        print(f"{count:4} {file}")


if __name__ == "__main__":
    main()
