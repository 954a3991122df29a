"""What each part of a model takes; of the stages of a pipeline the one that takes most counts."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from pipeline.budget.activation_profiler import PassBytes
from pipeline.budget.models import CountedModel
from pipeline.budget.passes import Pass
from pipeline.budget.table import Item
from pipeline.config import Workload
from pipeline.errors import ConfigError, ModelError
from pipeline.models.sharding import can_shard
from pipeline.models.stages import Stage, blocks_of, cut_stage
from pipeline.models.tensor_cut import cut_for_plan
from pipeline.parallel.schedules import Instruction, orders_of


@dataclass(frozen=True)
class Part:
    """A stage of a model."""

    whole: CountedModel

    own: CountedModel
    """The model without what other stages have."""

    stage: Stage

    shares: tuple[float, ...]
    """Of the blocks, of each of its chunks."""

    order: tuple[Instruction, ...]
    """Its passes in an optimizer step."""

    def takes(self, taken: PassBytes, how: Pass, *, begins: bool = False) -> PassBytes:
        """What this stage takes at once, given what a pass of the whole model takes.

        Activations go with blocks. Hidden states that have come in and gone out stay with each
        micro-batch, and on the last stage logits, or what was computed of them.

        Args:
            taken: by a pass of the whole model.
            how: it is run.
            begins: whether that is before any gradient has been found, or after.
        """
        tokens = how.rows.count * how.rows.length
        edge = tokens * self.stage.width * self.stage.dtype.itemsize
        chunks = self.stage.chunks
        edges = [edge * (2 - chunk.is_first - chunk.is_last) for chunk in chunks]
        if how.does != "train":
            return _at_work(taken, max(edges) + taken.kept, 0, has_head=self.stage.is_last)
        own = [
            edge + round(taken.kept * share) for edge, share in zip(edges, self.shares, strict=True)
        ]
        waiting = [
            size + (taken.waits - taken.kept if chunk.is_last else 0)
            for size, chunk in zip(own, chunks, strict=True)
        ]
        moments = [
            _at_work(
                taken,
                own[chunk],
                sum(number * waiting[each] for each, number in now.items()) - waiting[chunk],
                has_head=chunks[chunk].is_last,
            )
            for chunk, now in self._moments(begins=begins)
        ]
        return PassBytes(*(max(each) for each in zip(*map(astuple, moments), strict=True)))

    def _moments(self, *, begins: bool) -> Iterator[tuple[int, Counter[int]]]:
        """The chunk at work in each of its passes, and how many of each chunk are kept with it.

        Of those until the first one back, or of those after it.
        """
        now, is_back = Counter[int](), False
        for each in self.order:
            now[each.chunk] += each.kind == "forward"
            if begins != is_back:
                yield each.chunk, now.copy()
            is_back |= each.kind == "backward"
            now[each.chunk] -= each.kind == "backward"

    def shared(self, *, trains: bool) -> Iterator[Item]:
        """The output matrix that the last stage has from the first one, and its gradient."""
        tied = self.stage.tied if self.stage.borrowed is None else self.stage.borrowed
        if tied is None:
            return
        if self.stage.borrowed is not None:
            yield Item("weights", self.own.role, tied.nbytes)
        if trains and tied.requires_grad:
            yield Item("gradient_buffers", self.own.role, tied.nbytes)


def _at_work(taken: PassBytes, own: int, others: int, *, has_head: bool) -> PassBytes:
    """While a pass keeps `own` bytes, and those that wait `others`."""
    in_head, waits = (each - taken.kept if has_head else 0 for each in (taken.head, taken.waits))
    return PassBytes(
        kept=others + own,
        blocks=others + own + taken.blocks - taken.kept,
        head=others + own + in_head,
        tail=others + min(own, taken.tail),
        waits=others + own + waits,
    )


def part_of_layers(model: CountedModel, workload: Workload) -> CountedModel:
    """A model as one of the processes has it that compute each layer together.

    Raises:
        ConfigError: as `pipeline.models.tensor_cut.cut_for_plan`.
    """
    parallel, use = workload.parallel, workload.model(model.role)
    if model.module is None or not (use.learns or use.divided):
        return model
    if not use.learns and not can_shard(model.plain, parallel.parts or parallel.tp):
        return model
    module = copy.deepcopy(model.module)
    cut_for_plan(module, parallel.tp, sequence=parallel.sequence, parts=parallel.parts)
    return replace(model, module=module)


def stages_of(models: Sequence[CountedModel], workload: Workload) -> list[dict[str, Part]]:
    """What each stage has of the models that are cut, by role; nothing without stages.

    Those that learn are, of the others those that can be.

    Raises:
        ConfigError, ModelError: as `parts_of`.
    """
    found: list[dict[str, Part]] = [{} for _ in range(workload.parallel.pp)]
    if workload.parallel.pp == 1:
        return found
    for place, model in enumerate(models):
        use = workload.model(model.role)
        if not (use.learns or use.divided):
            continue
        try:
            parts = parts_of(model, workload, follows=place > 0)
        except (ConfigError, ModelError):
            if use.learns:
                raise
            continue  # each process has it whole
        for stage, part in zip(found, parts, strict=True):
            stage[model.role] = part
    return found


def parts_of(model: CountedModel, workload: Workload, *, follows: bool = False) -> list[Part]:
    """The stages of a model, in order; `follows` as for `pipeline.models.stages.blocks_of`.

    Raises:
        ConfigError, ModelError: as `pipeline.models.stages.cut_stage`.
    """
    parallel = workload.parallel
    blocks = blocks_of(
        model.present, parallel.pp, parallel.partition, chunks=parallel.chunks, follows=follows
    )
    orders = orders_of(
        parallel.schedule,
        stages=parallel.pp,
        count=workload.micro_batches,
        chunks=parallel.chunks,
    )
    parts: list[Part] = []
    for number, order in enumerate(orders):
        module = copy.deepcopy(model.present)
        stage = cut_stage(module, number=number, blocks=blocks, stages=parallel.pp)
        own = replace(model, module=module)
        shares = [count / sum(blocks) for count in blocks[number :: parallel.pp]]
        parts.append(Part(model, own, stage, tuple(shares), tuple(order)))
    return parts
