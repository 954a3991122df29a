"""The commands `python -m pipeline.engine.checkpoint verify DIR` and `consolidate DIR OUT`."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.options import CommandParser, print_output, run_main
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import MANIFEST, is_base_name, parse_step
from pipeline.engine.checkpoint.history import list_candidates
from pipeline.system.errors import CheckpointError, ConfigError
from pipeline.system.installation import MODULE


def main(argv: Sequence[str]) -> None:
    """Run the command in `argv`.

    Raises:
        UserError: the command or its arguments are wrong.
    """
    parser = CommandParser(prog=f"{MODULE} pipeline.engine.checkpoint")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for run in (verify, consolidate):
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.add_argument("dir", type=Path, help="a checkpoint, or a directory of checkpoints")
        command.set_defaults(run=run)
    command.add_argument("out", type=Path, help="output directory")
    command.add_argument("--model", help="model to write, if there are several; default: the first")
    options = parser.parse_args(list(argv))
    options.run(options)


def verify(options: argparse.Namespace) -> None:
    """Verify every file's checksum; exit with code 1 if a file is damaged."""
    damaged = False
    for path in _checkpoints(options.dir):
        start = time.perf_counter()
        try:
            checkpoint = Checkpoint.open(path)
            checkpoint.verify()
        except CheckpointError as error:
            damaged = True
            print_output(f"{path.name} failed verification: {error}")
        else:
            print_output(
                f"{path.name} is intact: {len(checkpoint.keys()):,} tensors, {checkpoint.nbytes:,}"
                f" bytes in {time.perf_counter() - start:.1f} s"
            )
    if damaged:
        raise SystemExit(1)


def consolidate(options: argparse.Namespace) -> None:
    """Write a model (in step 3 the actor, or --model critic) as a Hugging Face directory OUT."""
    path, out = _checkpoints(options.dir)[0], options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists; choose a new directory")
    from pipeline.models.hf.consolidate import consolidate as write
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    write(checkpoint, options.model or next(iter(checkpoint.state.get("models", {})), "model"), out)
    print_output(f"wrote the model after step {checkpoint.step} to {out}")


def _checkpoints(path: Path) -> list[Path]:
    """Return the named checkpoint, or all checkpoints in the named directory."""
    name = path.resolve().name
    if (path / MANIFEST).exists() or parse_step(Path(name)) is not None or is_base_name(name):
        return [path]
    if checkpoints := list_candidates(path):
        return checkpoints
    if not path.is_dir():
        raise ConfigError(f"no such directory: {path}")
    raise ConfigError(f"{path} is not a checkpoint and contains none")


if __name__ == "__main__":
    run_main(main)
