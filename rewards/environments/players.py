"""In the supervisor: the workers that play environments, and which one has which episode.

A call past its deadline, or one that ends its process, fails its own episode. The other episodes of
that worker are played again, on a new one, up to where they were.
"""

import math
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from rewards.environments.messages import Loaded, Move, Play, Played, Stage
from rewards.lane import LOAD_SECONDS
from rewards.processes import exit_code, kill_tree, reap_orphans, start_worker


@dataclass
class _Worker:
    """A worker process and what it does."""

    process: "subprocess.Popen[bytes]"
    connection: Connection
    deadline: float
    """When it must have done what it does; infinite where it does nothing."""

    seconds: float
    """Seconds from the begin of what it does to that deadline."""

    loaded: bool = False
    playing: Play | None = None
    episodes: set[int] = field(default_factory=set)
    """Those whose environments it holds."""


@dataclass
class _Seat:
    """A place for a worker, with the moves that wait for it."""

    waiting: deque[Play] = field(default_factory=deque)
    episodes: set[int] = field(default_factory=set)
    """Those that belong here."""

    worker: _Worker | None = None


@dataclass
class _Record:
    """An episode so far."""

    opening: Move
    seat: _Seat
    answers: list[str] = field(default_factory=list)


class Players:
    """Moves, workers and episodes of one training process."""

    def __init__(self, trainer: Connection, stage: Stage) -> None:
        self._trainer = trainer
        self._stage = stage
        self._seats = [_Seat() for _ in range(stage.workers)]
        self._records: dict[int, _Record] = {}

    def serve(self) -> None:
        """Work until the training process closes its end."""
        error = self._open()
        self._trainer.send(Loaded(error))
        while error is None:
            workers = [seat.worker for seat in self._seats if seat.worker is not None]
            soonest = min((each.deadline for each in workers), default=math.inf)
            # At least once a minute, so that no time is infinite.
            seconds = min(max(0.0, soonest - time.monotonic()), 60.0)
            ready = wait([self._trainer, *(each.connection for each in workers)], seconds)
            if self._trainer in ready:
                self._obey(self._trainer.recv())
            for seat in self._seats:
                worker = seat.worker
                # What came while another worker was replaced is no less in time.
                if worker is not None and (worker.connection in ready or worker.connection.poll()):
                    self._receive(seat, worker)
                elif worker is not None and time.monotonic() >= worker.deadline:
                    doing = worker.playing.verb if worker.playing else "loading the environment"
                    self._lose(seat, worker, f"{doing} took longer than {worker.seconds:g} s")
                self._hand_out(seat)

    def _open(self) -> str | None:
        """Start the workers and wait for them; returns why the class can't be loaded."""
        for seat in self._seats:
            seat.worker = self._started()
        error: str | None = None
        for seat in self._seats:
            worker = seat.worker
            assert worker is not None
            if not wait([worker.connection], max(0.0, worker.deadline - time.monotonic())):
                return f"loading it took longer than {LOAD_SECONDS:g} s"
            try:
                loaded: Loaded = worker.connection.recv()
            except (EOFError, OSError):
                return "loading it ended the process"
            worker.loaded, worker.deadline = True, math.inf
            error = error or loaded.error
        return error

    def _started(self) -> _Worker:
        process, connection = start_worker("rewards.environments.worker", self._stage.file)
        return _Worker(process, connection, time.monotonic() + LOAD_SECONDS, LOAD_SECONDS)

    def _obey(self, move: Move) -> None:
        if move.verb == "reset":
            seat = min(self._seats, key=lambda each: len(each.episodes))
            seat.episodes.add(move.episode)
            self._records[move.episode] = _Record(move, seat)
        record = self._records[move.episode]
        if move.verb == "step":
            record.answers.append(move.answer)
        row = record.opening.row or {}
        answers = tuple(record.answers)
        record.seat.waiting.append(Play(move.episode, move.verb, row, record.opening.seed, answers))

    def _hand_out(self, seat: _Seat) -> None:
        if not seat.waiting:
            return
        worker = seat.worker
        if worker is None:
            worker = seat.worker = self._started()
        if not worker.loaded or worker.playing is not None:
            return
        play = seat.waiting.popleft()
        is_known = play.verb == "reset" or play.episode in worker.episodes
        calls = 1 if is_known else 1 + len(play.answers) + (play.verb == "reward")
        worker.seconds = calls * self._stage.timeout_seconds
        worker.playing, worker.deadline = play, time.monotonic() + worker.seconds
        worker.episodes.add(play.episode)
        try:
            worker.connection.send(play)
        except OSError:
            code = exit_code(worker.process)
            self._lose(seat, worker, f"the process had ended, with code {code}")

    def _receive(self, seat: _Seat, worker: _Worker) -> None:
        try:
            message: Played | Loaded = worker.connection.recv()
        except (EOFError, OSError):
            doing = worker.playing.verb if worker.playing else "loading the environment"
            code = exit_code(worker.process)
            self._lose(seat, worker, f"{doing} ended its process, with code {code}")
            return
        worker.deadline, worker.playing = math.inf, None
        if isinstance(message, Played):
            self._reply(message)
        elif message.error is None:
            worker.loaded = True
        else:
            self._lose(seat, worker, message.error)

    def _lose(self, seat: _Seat, worker: _Worker, sentence: str) -> None:
        """Be rid of a worker; what it did has failed."""
        kill_tree(worker.process.pid)
        worker.process.wait()
        worker.connection.close()
        seat.worker = None
        alive = {each.worker.process.pid for each in self._seats if each.worker is not None}
        reap_orphans(alive)
        if worker.playing is not None:
            self._reply(Played(worker.playing.episode, failure=sentence))
        if not worker.loaded:
            # Another worker would go the same way: it is tried at the next move.
            why = f"its worker can't be started: {' '.join(sentence.split())}"
            while seat.waiting:
                self._reply(Played(seat.waiting.popleft().episode, failure=why))

    def _reply(self, played: Played) -> None:
        if played.failure is not None or played.verdict is not None:
            record = self._records.pop(played.episode)
            record.seat.episodes.discard(played.episode)
            if record.seat.worker is not None:
                record.seat.worker.episodes.discard(played.episode)
        self._trainer.send(played)
