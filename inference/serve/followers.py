"""Tensor parallelism: the first process has the web, the others compute their part of each pass.

Those follow the first one's generation thread, order by order. What was submitted and cancelled
the open batches agree on themselves, before each step (`inference/engine/exchange.py`).
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from inference.serve.prompt_logprobs import prompt_logprobs
from inference.serve.served import ServedModel
from pipeline.parallel.group import ALONE, Group

TICK = 5.0
"""Seconds after which the first process says that it is there, where nobody asks it anything."""


@dataclass(frozen=True)
class Steps:
    """A step of each of these lanes."""

    lanes: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """What a model says of the tokens of a prompt."""

    model: str
    prompt: tuple[int, ...]
    num_top: int


@dataclass(frozen=True)
class End:
    """The server has ended."""


Order = Steps | Score | End


class Followers:
    """Those who compute the models together with this process; nobody, where it is alone."""

    def __init__(self, group: Group = ALONE) -> None:
        self._group = group

    @property
    def any(self) -> bool:
        """Whether there are others."""
        return self._group.size > 1

    def tell(self, order: Order) -> None:
        """Have the others do what this process does next; of the first process."""
        self._group.gather_objects(order)


def follow(models: Mapping[str, ServedModel], group: Group) -> None:
    """Do what the first process does, until its server has ended."""
    lanes = {served.lane.name: served.lane for served in models.values()}
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process drains, and says when
        signal.signal(number, signal.SIG_IGN)
    none = cast("Order | None", None)
    while not isinstance(order := group.gather_objects(none)[0], End):
        if isinstance(order, Steps):
            for name in order.lanes:
                lanes[name].batch.step()
        elif order is not None:
            prompt_logprobs(models[order.model], order.prompt, order.num_top)
