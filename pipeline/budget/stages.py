"""What each part of a model takes; of the stages of a pipeline the one that takes most counts."""

import copy
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from torch import nn

from pipeline.budget.activation_profiler import PassBytes
from pipeline.budget.models import CountedModel
from pipeline.budget.passes import Pass, chunk_bytes
from pipeline.budget.table import Item
from pipeline.config import Workload
from pipeline.errors import ConfigError, ModelError
from pipeline.models.passes import AHEAD
from pipeline.models.sharding import can_shard
from pipeline.models.stages import Stage, blocks_of, cut_stage
from pipeline.models.tensor_cut import cut_for_plan
from pipeline.parallel.channels import What
from pipeline.parallel.schedules import Instruction, most_sent, orders_of


@dataclass(frozen=True)
class Part:
    """A stage of a model."""

    whole: CountedModel

    own: CountedModel
    """The model without what other stages have."""

    stage: Stage

    orders: tuple[tuple[Instruction, ...], ...]
    """The passes of each stage in an optimizer step."""

    most_sent: int
    """Tensors that a stage may have sent and still keep."""

    def takes(self, how: Pass, *, begins: bool = False) -> PassBytes:
        """What this stage takes at once, in passes so run.

        Of each micro-batch that waits for its gradient what its pass keeps, of one chunk what is at
        work, and what has been sent and may not have arrived.

        Args:
            how: it is run.
            begins: whether that is before any gradient has been found, or after.

        Raises:
            UnknownPassError: the model's code can't be run without numbers.
        """
        stage = self.stage
        taken = [chunk_bytes(self.own.present, stage, each, how) for each in stage.chunks]
        edge = how.rows.count * how.rows.length * stage.width * stage.dtype.itemsize
        if how.does != "train":
            sends = sum(not each.is_last for each in stage.chunks)
            ahead = edge * min(AHEAD, sends * len(self.orders[0]))
            return _highest(each.beside(ahead) for each in taken)
        sizes = {"gradients": edge}
        if stage.borrowed is not None and stage.borrowed.requires_grad:
            sizes["tied gradients"] = stage.borrowed.nbytes
        return _highest(
            taken[chunk].beside(
                sum(number * taken[each].waits for each, number in kept.items())
                - taken[chunk].waits
                + sum(number * sizes.get(what, 0) for what, number in sent.items())
            )
            for chunk, kept, sent in self._moments(begins=begins)
        )

    def _moments(self, *, begins: bool) -> Iterator[tuple[int, Counter[int], Counter[What]]]:
        """The chunk at work in each of its passes, how many of each are kept, and what was sent.

        Of those until the first one back, or of those after it.
        """
        now, is_back, sent = Counter[int](), False, Counter[What]()
        for each in self.orders[self.stage.number]:
            now[each.chunk] += each.kind == "forward"
            if begins != is_back:
                yield each.chunk, now.copy(), sent.copy()
            is_back |= each.kind == "backward"
            if each.kind == "backward" and sent.total() < self.most_sent:
                sent["gradients"] += 1
            now[each.chunk] -= each.kind == "backward"

    def shared(self, *, trains: bool) -> Iterator[Item]:
        """The output matrix that the last stage has from the first, which receives gradients."""
        tied = self.stage.tied if self.stage.borrowed is None else self.stage.borrowed
        if tied is None:
            return
        if self.stage.borrowed is not None:
            yield Item("weights", self.own.role, tied.nbytes)
        elif trains and tied.requires_grad:
            yield Item("gradient_buffers", self.own.role, tied.nbytes)


def _highest(moments: Iterable[PassBytes]) -> PassBytes:
    """The most of each kind."""
    return PassBytes(*(max(each) for each in zip(*map(astuple, moments), strict=True)))


def part_of_layers(model: CountedModel, workload: Workload) -> CountedModel:
    """A model as one of the processes has it that compute each layer together.

    Raises:
        ConfigError: as `pipeline.models.tensor_cut.cut_for_plan`.
    """
    parallel, use = workload.parallel, workload.model(model.role)
    if model.module is None or not (use.learns or use.divided):
        return model
    if not use.learns and not can_shard(model.plain, parallel.tp):
        return model
    module = _divided(model.module, parallel.tp, sequence=parallel.sequence)
    return replace(model, module=module)


@functools.lru_cache(maxsize=64)
def _divided(model: nn.Module, size: int, *, sequence: bool) -> nn.Module:
    """A copy of which one process's part is left, the same at each call."""
    module = copy.deepcopy(model)
    cut_for_plan(module, size, sequence=sequence)
    return module


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
    most = most_sent(parallel.pp, parallel.chunks)
    parts: list[Part] = []
    for number in range(parallel.pp):
        module, stage = _cut(model.present, number, tuple(blocks), parallel.pp)
        own = replace(model, module=module)
        parts.append(Part(model, own, stage, tuple(map(tuple, orders)), most))
    return parts


@functools.lru_cache(maxsize=64)
def _cut(
    model: nn.Module, number: int, blocks: tuple[int, ...], stages: int
) -> tuple[nn.Module, Stage]:
    """A copy of which a stage is left, the same at each call, so that passes are run once."""
    module = copy.deepcopy(model)
    return module, cut_stage(module, number=number, blocks=blocks, stages=stages)
