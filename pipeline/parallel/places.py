"""What stages of a pipeline know of each other's progress, while each goes through its own order.

Nobody says what has arrived. But hidden states that come have gone through all chunks before, and
gradients back through all behind: a stage that receives them knows how far the others have come at
least, and so which of its own tensors they have taken.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.parallel.channels import What
from pipeline.parallel.schedules import Instruction, Kind, Schedule

KINDS: dict[What, Kind] = {
    "hidden states": "forward",
    "gradients": "backward",
    "tied gradients": "backward",
}
"""The pass in which a tensor is taken, and before which it was made."""


class Places:
    """Where in its order each stage has each of its passes.

    Args:
        orders: of all stages.
        chunks: of each stage.
    """

    def __init__(self, orders: Sequence[Sequence[Instruction]], *, chunks: int = 1) -> None:
        self._places = [{each: at for at, each in enumerate(order)} for order in orders]
        self._count = chunks * len(orders)

    def of(self, what: What, micro_batch: int, chunk: int) -> tuple[int, int]:
        """The stage that has this chunk of the whole model, and the place of the pass there."""
        at, stage = divmod(chunk, len(self._places))
        return stage, self._places[stage][Instruction(KINDS[what], micro_batch, at)]

    def passed(self, what: What, micro_batch: int, chunk: int) -> Iterator[tuple[int, int]]:
        """Stages and places that they have come to, as who receives what this chunk made knows."""
        goes_on = what == "hidden states"
        for each in range(chunk + 1) if goes_on else range(chunk, self._count):
            yield self.of(what, micro_batch, each)


def most_sent(schedule: Schedule, stages: int) -> int | None:
    """Tensors that a stage goes on with before they have arrived; None never waits.

    In the second half of gpipe a stage hears nothing of the one before, and would keep what it has
    sent until the end. Of a pair of tensors as many as there are stages may be on their way.
    """
    return 2 * stages if schedule == "gpipe" else None


def on_the_way(
    orders: Sequence[Sequence[Instruction]], stage: int, *, chunks: int = 1, most: int | None = None
) -> list[Counter[What]]:
    """What a stage has sent back and still keeps in each of its passes, by what is known then.

    Hidden states aren't counted: a stage keeps them anyway, until it goes back through them.

    Args:
        orders: of all stages.
        stage: the one.
        chunks: of each stage.
        most: that it goes on with; with more it waits. None never waits.
    """
    places, count = Places(orders, chunks=chunks), chunks * len(orders)
    kept: list[tuple[What, tuple[int, int]]] = []
    found: list[Counter[What]] = []
    for each in orders[stage]:
        chunk = each.chunk * len(orders) + stage
        is_back = each.kind == "backward"
        what: What = "gradients" if is_back else "hidden states"
        from_chunk = chunk + 1 if is_back else chunk - 1
        if 0 <= from_chunk < count:
            for other, place in places.passed(what, each.micro_batch, from_chunk):
                kept = [(kind, (to, at)) for kind, (to, at) in kept if to != other or at > place]
        found.append(Counter(kind for kind, _ in kept))
        if is_back and chunk == count - 1:
            kept.append(("tied gradients", places.of("tied gradients", each.micro_batch, 0)))
        if is_back and chunk > 0:
            kept.append((what, places.of(what, each.micro_batch, chunk - 1)))
        if is_back and most is not None:
            kept = kept[-most:]
    return found
