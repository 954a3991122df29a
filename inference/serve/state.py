"""What all routes share."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from inference.ratings.file import RatingsFile
from inference.serve.broker import Broker
from inference.serve.config import ServeConfig
from inference.serve.http import ApiError, read_json
from inference.serve.metrics import Metrics
from inference.serve.served import ServedModel, ServedReward
from inference.serve.watch import WatchedRun
from pipeline.data.chat.resolve_format import Argument
from pipeline.data.examples import Message

P = ParamSpec("P")
T = TypeVar("T")

LONG = 20_000
"""Characters that take a few milliseconds to be made into tokens."""


@dataclass
class State:
    """A server: what it serves, and within which limits."""

    config: ServeConfig
    keys: Mapping[str, str]
    """By the name that the log has for each; empty where everybody is let in."""
    metrics: Metrics
    broker: Broker
    models: dict[str, ServedModel] = field(default_factory=dict)
    reward: ServedReward | None = None
    ratings: RatingsFile | None = None
    watched: WatchedRun | None = None
    created: int = 0
    """When it started, in seconds since 1970."""

    def model(self, name: str) -> ServedModel:
        """The model that a request names; the first one where it names none.

        Raises:
            ApiError: there is none of this name, or none yet.
        """
        if not self.models:
            raise ApiError(
                404, "no model is served; start the server with --path DIR", code="model_not_found"
            )
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(
                404,
                f"there is no model {name[:64]}; there are {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns that reads `size` characters; many of them are read by a thread.

    So a long text doesn't hold up the streams of others.
    """
    if size < LONG:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def size_of(messages: Sequence[Message], arguments: Mapping[str, Argument] | None) -> int:
    """Characters of a dialogue; compiling a template takes as long as `LONG` characters."""
    return LONG if arguments else sum(len(message.content) for message in messages)


def state_of(request: Request) -> State:
    """The state of the server that has a request."""
    return request.app.state.server


def client_of(request: Request) -> str:
    """Who asks, for turns in the queue and the log: the name of a key, or an address."""
    name = request.scope.get("key_name")
    return str(name or (request.client.host if request.client else "?"))


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object that a request contains.

    Raises:
        ApiError: it contains something else, or too much.
    """
    config = state_of(request).config
    return await read_json(request, limit=config.max_body, seconds=config.idle_seconds)
