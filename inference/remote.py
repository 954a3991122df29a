"""Generation on processes that do nothing else, while the other processes of the job train.

The training processes send prompts with their sampling keys, and the weights if they have changed.
The generating processes divide the prompts among themselves and return responses by key, so the
responses don't depend on the number of processes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from inference.engine.requests import Response
from inference.generation import KeyedPrompt, generate
from inference.hybrid_engine import HybridEngine
from inference.replica import iter_merged, weights_hash
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import RolloutGroups
from pipeline.system.errors import JobFailed, JobStopped
from pipeline.system.position import POSITION
from pipeline.system.signals import EXIT_INTERRUPTED, EXIT_REQUEUE, INTERRUPTS, StopSignals


@dataclass(frozen=True)
class Message:
    """A message to all other processes: prompts, the responses to them, or the end of the job."""

    prompts: Sequence[KeyedPrompt] = ()
    responses: Mapping[int, Response] = field(default_factory=dict[int, Response])
    """Responses by sampling key."""

    sends_weights: bool = False
    """Whether the first training process broadcasts the weights next."""

    weights_hash: int | None = None
    """Hash of the weights with which the responses were sampled; None from training processes."""

    exit_code: int | None = None
    """The exit code of the job if it ends; otherwise None."""


class RemoteGenerator:
    """The generating processes, as seen by the training processes, which all call each method."""

    def __init__(self, groups: RolloutGroups) -> None:
        self._groups = groups
        self._is_waiting = False
        """Whether responses have been requested but not yet received."""
        self._sent: tuple[int, int] | None = None
        """Update count and hash of the weights that were last sent."""
        self._batch: int | None = None
        """Number of the batch that was requested ahead, if any."""
        self._ahead: dict[int, Response] = {}
        """Responses to that batch by sampling key, once they are received."""
        self.weights_hash = 0
        """Hash of the weights with which the last batch was sampled."""
        self.staleness = 0
        """Rounds of updates between sampling the last batch and using it."""

    def generate(
        self,
        engine: HybridEngine,
        prompts: Sequence[KeyedPrompt],
        *,
        batch: int,
        on_response: Callable[[int, Response], None] | None = None,
    ) -> list[Response]:
        """Return responses to this process's prompts.

        Unless this batch was requested ahead, responses are sampled with the engine's current
        weights. `batch` is a number that identifies the batch, the same on all training processes.
        `on_response` is called with (index of the prompt, response).
        """
        self._wait()
        self.staleness = int(batch == self._batch)
        if batch != self._batch:
            self.request(engine, prompts, batch=batch)
            self._wait()
        responses = [self._ahead[key] for _, key in prompts]
        self._batch, self._ahead = None, {}
        if on_response is not None:
            for index, response in enumerate(responses):
                on_response(index, response)
        return responses

    def request(self, engine: HybridEngine, prompts: Sequence[KeyedPrompt], *, batch: int) -> None:
        """Request responses for the next call of `generate`, sampled with the current weights."""
        updates = engine.engine.updates
        sends_weights = self._sent is None or updates != self._sent[0]
        self._groups.job.gather_objects(Message(prompts, sends_weights=sends_weights))
        self._batch, self._is_waiting = batch, True
        if sends_weights:
            with engine.generating() as model:
                start = time.perf_counter()
                broadcast_weights(model, self._groups.weights)
                engine.seconds += time.perf_counter() - start
            self._sent = updates, engine.weights_hash

    def metrics(self) -> dict[str, float]:
        """Return the hash and the staleness of the weights that sampled the last batch."""
        return {"weights_hash": self.weights_hash, "staleness": self.staleness}

    def state_dict(self) -> dict[str, Any]:
        """Wait for the responses that were requested ahead, and return them."""
        self._wait()
        responses = {str(key): asdict(response) for key, response in self._ahead.items()}
        return {"batch": self._batch, "hash": self.weights_hash, "responses": responses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved responses, and discard any that were requested ahead."""
        self._wait()
        self._batch, self.weights_hash = state["batch"], state["hash"]
        self._ahead = {int(key): Response(**value) for key, value in state["responses"].items()}

    def _wait(self) -> None:
        """Receive the responses that were requested, if any.

        Raises:
            RuntimeError: generation did not use the weights that were sent.
        """
        if not self._is_waiting or self._sent is None:
            return
        messages = self._groups.job.gather_objects(Message())
        replies = [message for message in messages if message.weights_hash is not None]
        self._is_waiting = False
        self.weights_hash = self._sent[1]
        if any(reply.weights_hash != self.weights_hash for reply in replies):
            raise RuntimeError("generation did not use the weights that were sent to it")
        self._ahead = {key: value for r in replies for key, value in r.responses.items()}

    def end(self, code: int) -> None:
        """Make the generating processes exit with this code."""
        if self._is_waiting:
            self._groups.job.gather_objects(Message())
        self._groups.job.gather_objects(Message(exit_code=code))


@contextmanager
def remote_generation(groups: RolloutGroups) -> Iterator[RemoteGenerator]:
    """Context manager that ends the generating processes with the training processes.

    After an error, or a signal to this process alone, the other training processes may not leave
    the context; closed connections or the watchdog then end the generating processes.
    """
    generator = RemoteGenerator(groups)
    try:
        yield generator
    except JobStopped as stopped:
        generator.end(int(str(stopped.code)))
        raise
    generator.end(0)


def broadcast_weights(model: nn.Module, group: Group) -> None:
    """Copy the merged weights of the first process of a group to the others, one at a time."""
    for _, _, weight in iter_merged(model) if group.size > 1 else ():
        group.broadcast(weight.contiguous(), source=0)


def serve_requests(
    model: nn.Module,
    groups: RolloutGroups,
    *,
    group_size: int,
    **sampling: Any,  # noqa: ANN401
) -> None:
    """Serve generation requests until the training processes exit.

    Every generating process must call this function. It ignores stop signals, which a launcher
    sends to every process of a job, and leaves them to the training processes.

    Args:
        model: an unwrapped model of the trained model's class; its weights are overwritten.
        groups: the groups that connect the processes.
        group_size: number of copies of each prompt (consecutive keys), all served by one process.
        sampling: other arguments of `generate`.

    Raises:
        SystemExit: a signal stopped the job; the exit code is that of the training processes.
    """
    rank, size, current_hash = groups.weights.rank - 1, groups.weights.size - 1, 0
    model.requires_grad_(False)
    with StopSignals(lambda _number, **_: None) as signals:
        while True:
            requests = _exchange(groups.job, Message(), signals)
            if (code := requests[0].exit_code) is not None:
                break
            if requests[0].sends_weights:
                broadcast_weights(model, groups.weights)
                current_hash = weights_hash(model)
            prompts = sorted((p for r in requests for p in r.prompts), key=lambda p: p[1])
            local = [p for i, p in enumerate(prompts) if i // group_size % size == rank]
            ids, keys = [prompt for prompt, _ in local], [key for _, key in local]
            responses = generate(model, ids, keys=keys, on_response=_show_progress, **sampling)
            reply = Message(responses=dict(zip(keys, responses, strict=True)))
            _exchange(groups.job, replace(reply, weights_hash=current_hash), signals)
    if code != 0:
        raise SystemExit(code)


def _exchange(job: Group, message: Message, signals: StopSignals) -> list[Message]:
    """Gather the messages of all processes; exit if a signal has ended the training processes."""
    try:
        return job.gather_objects(message)
    except RuntimeError:  # the training processes exited without announcing it
        if signals.received is None:
            raise
        is_interrupt = signals.received in INTERRUPTS
        raise JobFailed(EXIT_INTERRUPTED if is_interrupt else EXIT_REQUEUE) from None


def _show_progress(_index: int, _response: Response) -> None:
    """Let the watchdog see that this process does not hang."""
    POSITION.transfers += 1
