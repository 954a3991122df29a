"""A response on the generation thread: from tokens to the pieces that a client is given."""

import time

from inference.engine.requests import Ended, Token
from inference.serve.generation import Finish, Job, Piece, Wanted
from inference.serve.served import ServedModel
from inference.serve.text import ResponseText


class Row:
    """One response of a job, with its text so far."""

    def __init__(self, job: Job, number: int, wanted: Wanted, served: ServedModel) -> None:
        self.job = job
        self.wanted = wanted
        self._text = ResponseText(served.bytes_of, wanted.stops, begins=not wanted.continues)
        self._piece = Piece(number)
        self.began, self.newest = time.perf_counter(), 0.0
        """When it was submitted and its newest token came, for the metrics."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._text.stopped

    def token(self, event: Token) -> Piece | None:
        """The piece that a token completes, if somebody reads it now."""
        if self.stopped:
            return None
        self._piece.ids.append(event.id)
        if not self.newest:
            self._piece.num_reused = event.ticket.num_reused
        if event.id in event.ticket.sampler.stop_ids:
            return None
        self._piece.text += self._text.add(event.id)
        if event.reported is not None:
            self._piece.reported.append(event.reported)
        if not self.job.streams or not self._piece.text:
            return None
        return self._take()

    def ended(self, event: Ended) -> Piece | None:
        """The last piece; none of a response that its client left."""
        if event.reason == "cancelled" and not self.stopped:
            return None
        self._piece.text += self._text.finish()
        if event.error is not None:
            return self.failed()
        self._piece.finish = _finish(event, stopped=self.stopped)
        return self._take()

    def failed(self) -> Piece:
        """The last piece of a response that can't go on."""
        self._piece.error = "the response could not be generated; the server's log says why"
        return self._take()

    def _take(self) -> Piece:
        piece, self._piece = self._piece, Piece(self._piece.row)
        return piece


def _finish(event: Ended, *, stopped: bool) -> Finish:
    return "stop" if stopped or event.reason == "stop" else "length"
