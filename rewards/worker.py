"""A worker process: scores one call after another, on its main thread.

Started by `rewards.supervisor` as `python -m rewards.worker FD PARENT`. A call that hangs, crashes
or eats all memory takes this process with it and no other.
"""

import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from pipeline.errors import UserError
from rewards.contract import Outcome, Scorer, everywhere, of_error
from rewards.messages import Answer, Call, Ready
from rewards.processes import end_with_parent, leave_signals_to
from rewards.sources import Source, scorer_of


def main(argv: Sequence[str]) -> None:
    """Load the sources that come first, then answer calls until the connection ends."""
    descriptor, parent = map(int, argv)
    end_with_parent(parent)
    leave_signals_to(parent)
    os.dup2(2, 1)  # what a function prints is not an output of the command that runs it
    connection = Connection(descriptor)
    try:
        _serve(connection, connection.recv())
    except EOFError:
        return


def _serve(connection: Connection, sources: dict[int, Source]) -> None:
    scorers: dict[int, Scorer] = {}
    errors: dict[int, str] = {}
    for number, source in sources.items():
        try:
            scorers[number] = scorer_of(source)
        except Exception as error:  # noqa: BLE001 - whatever a user's file raises
            is_sentence = isinstance(error, UserError)
            errors[number] = str(error) if is_sentence else f"{type(error).__name__}: {error}"
    connection.send(Ready({number: each.batched for number, each in scorers.items()}, errors))
    while True:
        call: Call = connection.recv()
        began = time.monotonic()
        outcomes = _outcomes(scorers, errors, call)
        connection.send(Answer(call.number, outcomes, time.monotonic() - began))


def _outcomes(scorers: dict[int, Scorer], errors: dict[int, str], call: Call) -> list[Outcome]:
    count = len(call.episodes)
    if call.source in errors:
        return everywhere(f"it can't be loaded: {errors[call.source]}", count)
    try:
        return scorers[call.source].score(call.episodes)
    except Exception as error:  # noqa: BLE001 - a failure is reported, whatever it is
        return of_error(error, count)


if __name__ == "__main__":
    main(sys.argv[1:])
