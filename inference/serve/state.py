"""What all routes share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from inference.ratings.file import RatingsFile
from inference.serve.broker import Broker
from inference.serve.config import ServeConfig
from inference.serve.errors import ApiError
from inference.serve.metrics import Metrics
from inference.serve.served import ServedModel
from inference.serve.watch import WatchedRun

if TYPE_CHECKING:
    from inference.serve.reward import ServedReward


@dataclass
class State:
    """A server: what it serves, and within which limits."""

    config: ServeConfig
    keys: Mapping[str, str]
    """By the name that the log has for each; empty where everybody is let in."""
    metrics: Metrics
    broker: Broker
    models: dict[str, ServedModel] = field(default_factory=dict)
    reward: "ServedReward | None" = None
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


def state_of(request: Request) -> State:
    """The state of the server that has a request."""
    return request.app.state.server


def client_of(request: Request) -> str:
    """Who asks, for turns in the queue and the log: the name of a key, or an address."""
    name = request.scope.get("key_name")
    return str(name or (request.client.host if request.client else "?"))
