"""`python -m pipeline.engine.checkpoint verify DIR`, `... show DIR`, `... consolidate DIR OUT`."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.cli import run_main, say
from pipeline.command import choose_command
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.find import candidates
from pipeline.engine.checkpoint.layout import MANIFEST, is_base_name, step_of
from pipeline.engine.checkpoint.show import describe
from pipeline.errors import CheckpointError, ConfigError
from pipeline.help import help_entry

EXIT_DAMAGED = 1

RESULT = "result.json"
"""Beside the directory of checkpoints: the run has finished."""


def verify(words: Sequence[str]) -> None:
    """Read every byte and compare it with its checksum; exit code 1 if one is wrong."""
    damaged = False
    for path in _checkpoints("verify", words):
        began = time.perf_counter()
        try:
            checkpoint = Checkpoint.open(path)
            checkpoint.verify()
        except CheckpointError as error:
            damaged = True
            say(f"{path.name} does not verify: {error}")
        else:
            say(
                f"{path.name} verifies: {len(checkpoint.keys()):,} tensors,"
                f" {checkpoint.nbytes:,} bytes in {time.perf_counter() - began:.1f} s"
            )
    if damaged:
        raise SystemExit(EXIT_DAMAGED)


def show(words: Sequence[str]) -> None:
    """Say what is in it: step, date, versions, tensors by kind, the run's state."""
    for path in _checkpoints("show", words):
        say("\n".join(describe(Checkpoint.open(path))))


def consolidate(words: Sequence[str]) -> None:
    """Write the model as a Hugging Face directory OUT; of step 3 the actor, or --model critic."""
    from pipeline.logs import configure_logging
    from pipeline.models.consolidate import consolidate as write

    configure_logging(is_main=True)
    model = None
    if len(words) == 4 and words[2] == "--model":
        *words, _, model = words
    if len(words) != 2:
        raise ConfigError(
            "usage: python -m pipeline.engine.checkpoint consolidate DIR OUT [--model NAME]"
        )
    path, out = _checkpoints("consolidate", words[:1])[0], Path(words[1])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists; name a new directory")
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    write(checkpoint, model or next(iter(checkpoint.state.get("models", {})), "model"), out)
    say(f"{out} holds the model after step {checkpoint.step}")


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "verify": (verify, "DIR"),
    "show": (show, "DIR"),
    "consolidate": (consolidate, "DIR OUT"),
}


def main(argv: Sequence[str]) -> None:
    """Do what `argv` says.

    Raises:
        UserError: it says nothing that can be done.
    """
    (command, _), words = choose_command(COMMANDS, argv, _help)
    command(words)


def _checkpoints(command: str, words: Sequence[str]) -> list[Path]:
    """The checkpoint that was named, or all those in the directory that was."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"usage: python -m pipeline.engine.checkpoint {command} DIR")
    path = Path(words[0])
    name = path.resolve().name
    if (path / MANIFEST).exists() or step_of(Path(name)) is not None or is_base_name(name):
        return [path]
    found = candidates(path)
    if found:
        return found
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}")
    if not (path.parent / RESULT).is_file():
        raise ConfigError(f"{path} is not a checkpoint and holds none")
    model = path.parent / "actor" if (path.parent / "actor").is_dir() else path.parent
    finished = f"{path} holds no checkpoints: the run has finished, and its model is in {model}"
    if command == "consolidate":
        raise ConfigError(finished)
    say(finished)
    return []


def _help() -> str:
    lines = ["usage: python -m pipeline.engine.checkpoint COMMAND ...", ""]
    for name, (command, takes) in COMMANDS.items():
        lines += help_entry(f"{name} {takes}", (command.__doc__ or "").strip())
    return "\n".join([*lines, "", "DIR is a checkpoint, or a directory of them."])


if __name__ == "__main__":
    run_main(main)
