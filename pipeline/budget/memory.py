"""Memory of a step on each of its processes, by closed-form formulas.

The result is an estimate of what the process takes from the system (resident memory on a CPU,
reserved memory on a GPU), within about 15 %. `docs/scaling.md` has a table of the formulas.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.budget.machine import GIB, MIB, Machine, describe_machine, in_words
from pipeline.budget.models import CountedModel, check_cut, read_models
from pipeline.config import Generation, StepConfig, Workload

Place = Literal["device", "host", "disk"]
"""Location of memory: the compute device, host memory next to a GPU, or a file."""

PLACES: Mapping[Place, str] = {"device": "", "host": "  in host memory", "disk": "  on the disk"}

TRANSIENT = ("gradient_buffers", "gathered", "activations", "logits", "kv_cache")
"""Transient kinds, for which the allocator reserves more memory than is used."""

KINDS = (
    *("weights", "masters", "moments", "gradients", *TRANSIENT, "replica", "copies"),
    *("graphs", "staging", "export", "runtime", "slack"),
)

RUNTIME_CPU, RUNTIME_GPU = 512 * MIB, 768 * MIB
"""Bytes that a process takes without a model: Python, PyTorch and transformers; on a GPU, CUDA."""

SLACK = {"cpu": 1 / 8, "cuda": 0.10}
"""Freed memory that the allocator keeps, as a fraction of the temporary memory."""

LEAST_SLACK = {"cpu": 256 * MIB, "cuda": 0}
"""Minimum of `SLACK` in bytes, the same as in `host_allocator.cpp`."""

WHOLE, TILE = 2**26, {"cpu": 2**23, "cuda": 2**26}
"""Maximum number of logits computed at once, and number per tile if there are more."""

CUBLAS = 32 * MIB
"""Bytes of cuBLAS's workspace on the stream that captures CUDA graphs."""

SAMPLED = 16
"""Bytes per logit while a token is sampled."""

PREFILL, PAGE = (2048, 8192), 64
"""Prompt tokens of a pass on a CPU and on a GPU, and tokens of a page of the cache."""


@dataclass(frozen=True)
class Item:
    """Memory of one process in one phase."""

    kind: str
    num_bytes: float
    place: Place = "device"

    least: float | None = None
    """Minimum bytes if the step adapts to free memory; None if it needs all `num_bytes`."""


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: Literal["train", "generate"]
    items: tuple[Item, ...]

    def by_kind(self, place: Place) -> Mapping[str, int]:
        """Bytes in one place by kind, without zeros."""
        sums = Counter[str]()
        for item in self.items:
            sums[item.kind] += int(item.num_bytes) if item.place == place else 0
        return {kind: sums[kind] for kind in KINDS if sums[kind]}

    def peak(self, place: Place) -> int:
        """Total bytes in one place."""
        return int(sum(item.num_bytes for item in self.items if item.place == place))

    def least(self) -> "Phase":
        """The same phase at the minimum memory it can adapt to."""
        items = (
            item if item.least is None else replace(item, num_bytes=item.least)
            for item in self.items
        )
        return replace(self, items=tuple(items))


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step on each of its processes."""

    phases: tuple[Phase, ...]

    unknown: tuple[str, ...] = ()
    """A sentence for each model whose configuration is not available."""

    parameters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Parameters of each model by role, including adapters."""

    def peak(self, place: Place) -> int:
        """Maximum bytes over all phases."""
        return max((phase.peak(place) for phase in self.phases), default=0)


def step_memory(
    config: StepConfig, *, machine: Machine, origins: Mapping[str, str] | None = None
) -> StepMemory:
    """Estimate the memory of a step on `machine`; nothing is allocated.

    Args:
        config: the step's settings.
        machine: the machine it runs on.
        origins: for a directory that an earlier step has yet to write, the model it starts from.

    Raises:
        ConfigError, ModelError: a model can't be divided as `parallel` requires.
    """
    work = config.workload(machine.world)
    models, unknown = read_models(work, origins or {}, has_gpu=machine.has_gpu)
    for model in models:
        if model.trained is not None:
            check_cut(model.module, work.parallel)
    formulas = {model.role: _ModelMemory(model, work, machine) for model in models}
    present = [each for each in formulas.values() if not each.model.use.phase_only]
    train = _train(work, present, formulas, machine, saves=config.save_interval is not None)
    phases = [_phase("train", train, machine)]
    generation = work.generation
    if generation is not None and generation.role in formulas:
        generate = _generate(generation, present, formulas[generation.role], machine)
        phases.append(_phase("generate", generate, machine))
    if work.generates_first:
        phases.reverse()
    return StepMemory(
        tuple(phases), tuple(unknown), {model.role: model.parameters for model in models}
    )


class _ModelMemory:
    """The formulas of one model."""

    def __init__(self, model: CountedModel, work: Workload, machine: Machine) -> None:
        self.model, self.work, self.machine = model, work, machine
        shape, engine = model.shape, model.engine
        is_cut = not model.use.phase_only
        self.tp, self.pp = (work.parallel.tp, work.parallel.pp) if is_cut else (1, 1)
        # The first and last stages share the root's parameters.
        self.root = 1 / (2 if self.pp > 1 and not shape.ties else 1) / self.tp
        self.block = 1 / (self.tp * self.pp)
        stage = 0 if engine is None else engine.zero_stage
        self.weight_shards = work.shards if stage == 3 else 1
        self.trained = shape.block_trained * self.block + shape.root_trained * self.root
        self.states_shard = self.trained / (work.shards if stage >= 1 else 1)
        self.host: Place = "host" if machine.has_gpu else "device"

    @property
    def _moment_bytes(self) -> int:
        """Bytes that the optimizer keeps for each trained weight."""
        assert self.model.trained is not None
        return 4 if self.model.trained.optim.moments == "bf16" else 8

    def _two_blocks(self, root: float, blocks: float) -> float:
        """This process's part of the root and two blocks, given the totals of root and blocks."""
        return root * self.root + 2 * blocks / self.model.shape.layers / self.tp

    def _place(self, kind: Literal["params", "optimizer", "gradients"]) -> Place:
        engine = self.model.engine
        where = "none" if engine is None else getattr(engine.zero.offload, kind)
        if where == "nvme":
            return "disk"
        return "host" if where == "cpu" and self.machine.has_gpu else "device"

    def states(self) -> Iterator[Item]:
        """States that exist in every phase."""
        shape, trained = self.model.shape, self.model.trained
        weights = shape.block_bytes * self.block + shape.root_bytes * self.root
        yield Item("weights", weights / self.weight_shards, self._place("params"))
        if trained is None:
            return
        place = self._place("optimizer")
        fused = trained.kernels != "off"
        wide = 4 if self._place("params") != place or not fused else 2
        wide = 0 if shape.itemsize == 4 and place == "device" else wide
        yield Item("masters", wide * self.states_shard, place)
        yield Item("moments", self._moment_bytes * self.states_shard, place)
        average = 4 * self.model.use.keeps_average * self.states_shard
        yield Item("copies", average, self.host if place == "disk" else place)
        yield Item("copies", 4 * self.model.use.host_copies * self.states_shard, self.host)

    def staging(self) -> Item:
        """The copy of the states that a checkpoint is written from."""
        use = self.model.use
        each = 4 * (1 + use.keeps_average + use.host_copies) + self._moment_bytes
        return Item("staging", each * self.states_shard, self.host)

    def gradients(self) -> Iterator[Item]:
        """The sums of gradients, and the buffers of a backward pass."""
        shards, shape, place = self.work.shards, self.model.shape, self._place("gradients")
        yield Item("gradients", 4 * self.trained / shards, place)
        if self.work.data_processes > 1 or place != "device":
            buffers = 4 * self._two_blocks(shape.root_trained, shape.block_trained)
            yield Item("gradient_buffers", buffers)
        yield from self.gathered()

    def gathered(self) -> Iterator[Item]:
        """Gathered weights, at stage 3."""
        shape = self.model.shape
        if self.weight_shards > 1 or self._place("params") != "device":
            yield Item("gathered", self._two_blocks(shape.root_bytes, shape.block_bytes))

    def passes(self, *, trains: bool) -> Iterator[Item]:
        """Activations and logits of the step's largest micro-batch."""
        work, shape, trained = self.work, self.model.shape, self.model.trained
        texts = (self.model.use.text_length or 0) if trains else 0
        length = min(max(work.length, texts), shape.context)
        tokens = work.sequences * length
        if not texts and (trained is not None or not self.model.use.scores):
            tokens = min(tokens, self._rollout_tokens(length))
        by_tokens = self.tp if work.parallel.sequence else 1
        vector = tokens * shape.hidden * shape.itemsize / by_tokens
        block = tokens * shape.kept * shape.itemsize / self.tp
        # Attention and MLP save their inputs for all tokens.
        block += 2 * tokens * shape.hidden * shape.itemsize * (1 - 1 / self.tp)
        layers = -(-shape.layers // self.pp)
        in_flight = min(self.pp, work.micro_batches)
        if not trains:
            yield Item("activations", block + vector)
        elif trained is not None and trained.gradient_checkpointing:
            yield Item("activations", vector * layers * in_flight + block * 2)
        else:
            yield Item("activations", block * (layers * in_flight + 1))
        if not self.model.use.scores:
            targets = work.sequences * min(max(work.targets, texts), length)
            yield Item("logits", self._logits(targets, trains=trains))

    def _rollout_tokens(self, length: int) -> float:
        """Tokens of a rollout whose groups share their prompts; infinite if there are no groups."""
        generation = self.work.generation
        if generation is None or generation.group_size == 1:
            return math.inf
        prompts = generation.count / generation.group_size * generation.prompt_length
        return prompts + generation.count * (length - generation.prompt_length)

    def _logits(self, targets: int, *, trains: bool) -> float:
        """Bytes of logits with their gradients, in one pass or in tiles."""
        shape = self.model.shape
        numbers = targets * shape.vocabulary / self.tp
        times = 2 if shape.itemsize == 4 else 4
        tile = TILE["cuda" if self.machine.has_gpu else "cpu"]
        matrix = shape.vocabulary * shape.hidden / self.tp if trains and shape.head_learns else 0
        if trains and self.work.compares_logits:  # 8 tensors of half a tile
            return 16 * min(2 * numbers, tile) + (4 + shape.itemsize) * matrix
        return 4 * times * numbers if numbers <= WHOLE else 4 * (times * tile + matrix)

    def replica(self, generation: Generation) -> Iterator[Item]:
        """A copy of the weights for generation, if one is needed."""
        trained, shape = self.model.trained, self.model.shape
        adapted = trained is not None and (trained.lora is not None or trained.quantize != "none")
        regroups = self.pp > 1 or generation.tensor_parallel != self.tp
        if self.weight_shards > 1 or self._place("params") != "device" or adapted or regroups:
            yield Item("replica", shape.merged_bytes / generation.tensor_parallel)

    def responses(self, generation: Generation) -> Iterator[Item]:
        """The cache, the logits that are sampled from, and a pass over prompts."""
        shape = self.model.shape
        longest = min(generation.prompt_length + generation.new_tokens, shape.context)
        keys = max(1.0, shape.kv_width / generation.tensor_parallel)
        page = PAGE * 2 * shape.layers * keys * shape.itemsize
        shared = (min(generation.prompt_length, longest) - 1) // PAGE  # by a group's sequences
        own = -(-longest // PAGE) - shared
        prompts = min(generation.slots, -(-generation.most_at_once // generation.group_size))
        if self.machine.has_gpu:  # graphs share the memory of the widest pass
            row = (shape.kept + shape.vocabulary) * shape.itemsize
            yield Item("graphs", CUBLAS + generation.slots * row, least=CUBLAS + row)
        drawn = SAMPLED * shape.vocabulary
        num_pages = 1 + prompts * shared + generation.slots * own
        yield Item("kv_cache", num_pages * page, least=(1 + shared + own) * page)
        yield Item("logits", generation.slots * drawn, least=drawn)
        tokens = min(PREFILL[self.machine.has_gpu], generation.slots * generation.prompt_length)
        yield Item("activations", tokens * shape.kept * shape.itemsize)


def _phase(name: Literal["train", "generate"], items: Iterable[Item], machine: Machine) -> Phase:
    """A phase including the runtime and the allocator's slack."""
    every = [item for item in items if item.num_bytes]
    every.append(Item("runtime", RUNTIME_CPU, "host" if machine.has_gpu else "device"))
    every += [Item("runtime", RUNTIME_GPU)] if machine.has_gpu else []
    kind = "cuda" if machine.has_gpu else "cpu"
    moving = [item for item in every if item.kind in TRANSIENT and item.place == "device"]
    least = sum(item.num_bytes if item.least is None else item.least for item in moving)
    kept, fewest = (max(SLACK[kind] * size, LEAST_SLACK[kind]) for size in (_sum(moving), least))
    return Phase(name, (*every, Item("slack", kept, least=fewest)))


def _train(
    work: Workload,
    present: Sequence[_ModelMemory],
    models: Mapping[str, _ModelMemory],
    machine: Machine,
    *,
    saves: bool,
) -> Iterator[Item]:
    """Memory of scoring, training and export; `saves` is true if checkpoints are written."""
    for each in present:
        yield from each.states()
        if each.model.trained is not None:
            yield from each.gradients()
            yield from [each.staging()] if saves else []
    generation = work.generation
    if generation is not None and generation.keeps_replica and generation.role in models:
        yield from models[generation.role].replica(generation)
    scoring = ([*each.gathered(), *each.passes(trains=False)] for each in present)
    training = [list(each.passes(trains=True)) for each in present if each.model.trained]
    if work.compares_logits:  # the teacher's output layer is gathered meanwhile
        training[0] += [
            item for each in present if not each.model.trained for item in each.gathered()
        ]
    if work.reuses_forward:  # the graphs of all models are in memory together
        training = [[item for items in training for item in items]]
    largest = max([*scoring, *training], key=_sum, default=[])
    yield from largest
    # The main process compares an export with a copy that it loads on the CPU, if that fits.
    exports = (each.model.shape.merged_bytes for each in present if each.model.trained)
    copy = max(exports, default=0) - (0 if machine.has_gpu else _sum(largest))
    yield Item("export", max(0, copy), "host" if machine.has_gpu else "device", least=0)


def _generate(
    generation: Generation, present: Sequence[_ModelMemory], actor: _ModelMemory, machine: Machine
) -> Iterator[Item]:
    moved = {"masters", "moments"} if generation.offloads_training else set[str]()
    for each in present:
        for item in each.states():
            goes = item.kind in moved and item.place == "device" and machine.has_gpu
            yield replace(item, place="host") if goes else item
    yield from actor.replica(generation)
    yield from actor.responses(generation)


def _sum(items: Iterable[Item]) -> float:
    return sum(item.num_bytes for item in items)


def line(memory: StepMemory, machine: Machine) -> str:
    """The memory of the largest phase; if it doesn't fit, the minimum that it adapts to."""
    room = machine.gpu_bytes or (machine.host_bytes or 0) // machine.processes
    phases = [p if p.peak("device") <= room else p.least() for p in memory.phases]
    worst = max(phases, key=lambda phase: phase.peak("device"))
    (needed,) = in_words(worst.peak("device"))
    more = " plus uncounted parts" if memory.unknown else ""
    host = max(phase.peak("host") for phase in phases)
    of_host = f", {in_words(host)[0]} of host memory" if host and machine.has_gpu else ""
    each = "on each GPU" if machine.has_gpu else "in each process"
    return f"about {needed} {each} (to {worst.name}){of_host}{more}"


def table(memory: StepMemory, machine: Machine) -> Iterator[str]:
    """Lines of a table of memory by kind and phase: on the device, the host and the disk."""
    unit, name = (GIB, "GiB") if memory.peak("device") >= 10 * GIB else (MIB, "MiB")

    def row(name: str, sizes: Iterable[int]) -> str:
        return f"  {name:<18}" + "".join(f"{size / unit:>10.1f}" for size in sizes)

    for role, count in memory.parameters.items():
        yield f"  {role:<18} {count / 1e6:,.1f}M parameters"
    yield f"  {name:<18}" + "".join(f"{phase.name:>10}" for phase in memory.phases)
    for place, title in PLACES.items():
        if memory.peak(place):
            yield from [title] if title else []
            by_phase = [phase.by_kind(place) for phase in memory.phases]
            for kind in KINDS:
                if any(kind in kinds for kinds in by_phase):
                    yield row(kind.replace("_", " "), (kinds.get(kind, 0) for kinds in by_phase))
            yield row("in all", (phase.peak(place) for phase in memory.phases))
    yield f"  {describe_machine(machine)}"
    yield from (f"  {sentence}" for sentence in memory.unknown)
