"""What is asked of generation and what comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

StopWhen = Callable[[int, Sequence[int]], bool]
"""Whether a response ends here: called with its prompt's index and its tokens so far."""


@dataclass
class Response:
    """What the model answered to one prompt."""

    ids: list[int] = field(default_factory=list)
    """Sampled tokens, the stop token included."""

    logprobs: list[float] = field(default_factory=list)
    """log pi of each token under the whole policy at the sampling temperature (at temperature 1 for
    greedy decoding), before anything is truncated, penalized or forbidden; in nats."""

    stopped: bool = False
    """True where the model ended its turn itself; False where the length or the caller did."""


@dataclass(frozen=True)
class Request:
    """One prompt in the middle of being answered."""

    index: int
    """Place of the prompt among those given."""

    prompt: tuple[int, ...]

    key: int
    """Chooses the sample, with the seed."""

    room: int
    """Longest response, in tokens: as asked for, or what the model's context leaves."""

    response: Response = field(default_factory=Response)

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt, *self.response.ids]


@dataclass(frozen=True)
class Recorder:
    """Writes chosen tokens into responses, and says which of them go on."""

    stop_ids: frozenset[int]
    stop_when: StopWhen | None
    on_token: Callable[[int, int], None] | None

    def add(self, request: Request, token: int, logprob: float) -> bool:
        """Append a token; whether the response goes on after it."""
        response = request.response
        response.ids.append(token)
        response.logprobs.append(logprob)
        response.stopped = token in self.stop_ids
        if self.on_token is not None:
            self.on_token(request.index, token)
        return not (
            response.stopped
            or len(response.ids) == request.room
            or (self.stop_when is not None and self.stop_when(request.index, response.ids))
        )
