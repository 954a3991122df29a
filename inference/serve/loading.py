"""Everything that is served, planned and then loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from inference.serve.adapter_files import trained_on
from inference.serve.broker import Broker
from inference.serve.config import ServeConfig
from inference.serve.lanes import open_lanes
from inference.serve.memory import plan_memory
from inference.serve.metrics import Metrics
from inference.serve.models import ModelPath
from inference.serve.reward import load_reward
from inference.serve.served import load_model, serve_model
from inference.serve.state import State
from pipeline.cli import remark
from pipeline.errors import ModelError
from pipeline.models.chat import check_ready


def load(
    config: ServeConfig,
    places: Sequence[ModelPath],
    reward: str | None,
    keys: Mapping[str, str],
) -> State:
    """The state of a server that is about to begin.

    Raises:
        UserError: there is no such model, or no room for it.
    """
    places = _ready(places)
    if reward is not None:
        check_ready(reward, scores=True)
    rooms = plan_memory(places, reward, config)
    state = State(config=config, keys=keys, metrics=Metrics(), broker=Broker(config))
    if reward is not None:
        state.reward = load_reward(reward)
        remark(f"reward: {reward}")
    models: dict[str, PreTrainedModel] = {}
    weights: dict[str, int] = {}
    for place in places:
        remark(f"{place.name}: {_what(place)}, {rooms[place.name].words}")
        base = models[place.base] if place.base else None
        models[place.name], weights[place.name] = load_model(place, config, base)
    seats = open_lanes(places, models, rooms, config)
    for place in places:
        name = place.name
        served = serve_model(place, models[name], seats[name], weights=weights[name])
        state.models[name] = served
        state.metrics.serves(name, served.lane.num_slots)
    return state


def _ready(places: Sequence[ModelPath]) -> list[ModelPath]:
    """Those that can be loaded: all but the model that a run began from, where it is gone.

    A run is moved to other machines, and finished models outlive what they were made of.
    """
    found: list[ModelPath] = []
    needed = {place.base for place in places}
    for place in places:
        try:
            if place.adapter is None:
                check_ready(place.path)
        except ModelError as error:
            if not place.begins_run or place.name in needed:
                raise
            remark(f"{place.name} is left out, the model that the run began from: {error}")
        else:
            found.append(place)
    return found


def _what(place: ModelPath) -> str:
    """What is served by a name; of an adapter also a base that it was not trained on by name."""
    if place.adapter is None:
        return place.path
    words = f"the adapter {place.adapter} over {place.base}"
    own = trained_on(place.adapter)
    if own in (None, place.path) or Path(own).resolve() == Path(place.path).resolve():
        return words
    return f"{words}, though it names {own} as its model"
