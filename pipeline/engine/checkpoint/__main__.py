"""`python -m pipeline.engine.checkpoint verify DIR`, and `... consolidate DIR OUT`."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.cli.help import help_entry
from pipeline.cli.options import choose_command, run_main, say
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import MANIFEST, is_base_name, step_of
from pipeline.engine.checkpoint.history import candidates
from pipeline.system.errors import CheckpointError, ConfigError

EXIT_DAMAGED = 1


def verify(words: Sequence[str]) -> None:
    """Compare every file with its checksum; exit code 1 if one is damaged."""
    damaged = False
    for path in _checkpoints("verify", words):
        began = time.perf_counter()
        try:
            checkpoint = Checkpoint.open(path)
            checkpoint.verify()
        except CheckpointError as error:
            damaged = True
            say(f"{path.name} failed verification: {error}")
        else:
            say(
                f"{path.name} is intact: {len(checkpoint.keys()):,} tensors, {checkpoint.nbytes:,}"
                f" bytes in {time.perf_counter() - began:.1f} s"
            )
    if damaged:
        raise SystemExit(EXIT_DAMAGED)


def consolidate(words: Sequence[str]) -> None:
    """Write the model to a Hugging Face directory OUT; in step 3 the actor, or --model critic."""
    model = None
    if len(words) == 4 and words[2] == "--model":
        *words, _, model = words
    if len(words) != 2:
        raise ConfigError(
            "usage: python -m pipeline.engine.checkpoint consolidate DIR OUT [--model NAME]"
        )
    path, out = _checkpoints("consolidate", words[:1])[0], Path(words[1])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists; choose a new directory")
    from pipeline.models.hf.consolidate import consolidate as write
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    write(checkpoint, model or next(iter(checkpoint.state.get("models", {})), "model"), out)
    say(f"{out} holds the model after step {checkpoint.step}")


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "verify": (verify, "DIR"),
    "consolidate": (consolidate, "DIR OUT"),
}


def main(argv: Sequence[str]) -> None:
    """Run the command in `argv`.

    Raises:
        UserError: the command or its arguments are wrong.
    """
    (command, _), words = choose_command(COMMANDS, argv, _help)
    command(words)


def _checkpoints(command: str, words: Sequence[str]) -> list[Path]:
    """The named checkpoint, or all those in the named directory."""
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
        raise ConfigError(f"no such directory: {path}")
    raise ConfigError(f"{path} is not a checkpoint and contains none")


def _help() -> str:
    lines = ["usage: python -m pipeline.engine.checkpoint COMMAND ...", ""]
    for name, (command, takes) in COMMANDS.items():
        lines += help_entry(f"{name} {takes}", (command.__doc__ or "").strip())
    return "\n".join([*lines, "", "DIR is a checkpoint, or a directory of them."])


if __name__ == "__main__":
    run_main(main)
