"""The process between a training process and its reward workers.

It hands calls to workers, kills one whose call passes its deadline, and ends with all its
descendants when the training process ends, however that ends. Being a process of its own, it keeps
the deadlines while the training process computes, needs no thread there, and forks where no
threads are. `python -m rewards.supervisor FD PARENT [ends with the parent's thread: 0 or 1]`.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from rewards.contract import Outcome, everywhere
from rewards.environments.messages import Stage
from rewards.environments.players import Players
from rewards.lane import Lane, Take
from rewards.messages import Answer, Call, Collect, Collected, Opened, Setup, Submission
from rewards.processes import adopt_orphans, end_with_parent, kill_children, leave_signals_to


@dataclass
class _Results:
    """Outcomes as they come in, since the last `Collect`."""

    outcomes: list[list[Outcome]]
    seconds: list[float]
    waiting: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By number of a call: its source, first episode and number of episodes."""

    @classmethod
    def of(cls, num_sources: int) -> "_Results":
        return cls([[] for _ in range(num_sources)], [0.0] * num_sources)

    def expect(self, number: int, source: int, count: int) -> None:
        """Make room for the outcomes of a call."""
        places = self.outcomes[source]
        self.waiting[number] = (source, len(places), count)
        places += [Outcome()] * count

    def take(self, answer: Answer) -> None:
        """Put the outcomes of a call in their places."""
        source, first, count = self.waiting.pop(answer.number)
        if len(answer.outcomes) != count:
            sentence = f"it gave {len(answer.outcomes)} results for {count} responses"
            answer = Answer(answer.number, everywhere(sentence, count), answer.seconds)
        self.outcomes[source][first : first + count] = answer.outcomes
        self.seconds[source] += answer.seconds


class Supervisor:
    """Calls, workers and results of one training process."""

    def __init__(self, trainer: Connection, setup: Setup) -> None:
        self._trainer = trainer
        self._sources = setup.sources
        self._results = _Results.of(len(setup.sources))
        self._collecting = False
        self._number = 0
        self._batched: dict[int, bool] = {}
        self._lanes = _lanes(setup, self._take)

    def serve(self) -> None:
        """Work until the training process closes its end."""
        errors = {}
        for lane in self._lanes:
            errors |= lane.open()
        self._batched = {n: b for lane in self._lanes for n, b in lane.batched.items()}
        self._trainer.send(Opened({self._sources[n].name: text for n, text in errors.items()}))
        while not errors:
            deadlines = [lane.deadline for lane in self._lanes]
            timeout = max(0.0, min(deadlines) - time.monotonic())
            connections = [each for lane in self._lanes for each in lane.connections]
            # At least once a minute, so that no time is infinite.
            ready = wait([self._trainer, *connections], min(timeout, 60.0))
            if self._trainer in ready:
                self._obey(self._trainer.recv())
            for lane in self._lanes:
                lane.advance(ready)
            if self._collecting and not self._results.waiting:
                self._trainer.send(Collected(self._results.outcomes, self._results.seconds))
                self._results = _Results.of(len(self._sources))
                self._collecting = False

    def _obey(self, message: Submission | Collect) -> None:
        if isinstance(message, Collect):
            self._collecting = True
            return
        episodes = message.episodes
        for lane in self._lanes:
            for source in lane.sources:
                whole = self._batched[source]
                calls = [episodes] if whole else [[episode] for episode in episodes]
                for part in calls if episodes else []:
                    self._number += 1
                    self._results.expect(self._number, source, len(part))
                    lane.queue.append(Call(self._number, source, part))

    def _take(self, answer: Answer) -> None:
        self._results.take(answer)


def _lanes(setup: Setup, take: Take) -> list[Lane]:
    """One lane with all workers for what computes, and one with a worker for each other source.

    So nothing that computes waits for a network, and a language model is loaded once.
    """
    everything = dict(enumerate(setup.sources))
    alone = {n: each for n, each in everything.items() if each.is_alone}
    local = {n: each for n, each in everything.items() if n not in alone}
    lanes = [Lane(local, setup.workers, take)] if local else []
    return lanes + [Lane({n: each}, 1, take) for n, each in alone.items()]


def main(argv: Sequence[str]) -> None:
    """Serve the training process behind the connection until it closes its end."""
    descriptor, parent, ends_with_thread = map(int, argv)
    adopt_orphans()
    leave_signals_to(parent)
    if ends_with_thread:
        # Not killed, since nobody else knows what its workers have started.
        end_with_parent(parent, signal.SIGTERM)
    trainer = Connection(descriptor)
    try:
        with contextlib.suppress(EOFError, OSError):  # the training process has ended
            setup = trainer.recv()
            if isinstance(setup, Stage):
                Players(trainer, setup).serve()
            else:
                Supervisor(trainer, setup).serve()
    finally:
        kill_children()


if __name__ == "__main__":
    main(sys.argv[1:])
