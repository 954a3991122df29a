"""Everything that is served, planned and then loaded."""

from collections.abc import Mapping, Sequence

from inference.serve.broker import Broker
from inference.serve.config import ServeConfig
from inference.serve.memory import plan_memory
from inference.serve.metrics import Metrics
from inference.serve.models import ModelPath
from inference.serve.reward import load_reward
from inference.serve.served import load_served
from inference.serve.state import State
from pipeline.cli import remark
from pipeline.models.ready import check_ready


def load(
    config: ServeConfig, places: Sequence[ModelPath], reward: str | None, keys: Mapping[str, str]
) -> State:
    """The state of a server that is about to begin.

    Raises:
        UserError: there is no such model, or no room for it.
    """
    for place in places:
        check_ready(place.path)
    if reward is not None:
        check_ready(reward, scores=True)
    rooms = plan_memory(places, reward, config)
    state = State(config=config, keys=keys, metrics=Metrics(), broker=Broker(config))
    if reward is not None:
        state.reward = load_reward(reward)
        remark(f"reward: {reward}")
    for place in places:
        remark(f"{place.name}: {place.path}, {rooms[place.name].words}")
        state.models[place.name] = load_served(place, rooms[place.name], config)
        state.metrics.serves(place.name, rooms[place.name].slots)
    return state
