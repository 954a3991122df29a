"""Memory of a step on each of its processes, by closed formulas.

The result is an estimate of what the process takes from the system (resident memory on a CPU,
reserved memory on a GPU), within about 15 %.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.budget.machine import (
    GIB,
    MIB,
    RUNTIME_CPU,
    Machine,
    describe_machine,
    in_words,
)
from pipeline.budget.models import CountedModel, check_cut, models_of
from pipeline.config import Generation, OptimConfig, StepConfig, Workload

Place = Literal["device", "host", "disk"]
"""Where the model computes, main memory next to a GPU, or a file."""

PLACES: Mapping[Place, str] = {
    "device": "",
    "host": "  in main memory",
    "disk": "  on the disk",
}

PhaseName = Literal["load", "score", "train", "generate"]

KINDS = (
    *("weights", "masters", "moments", "gradients", "gradient_buffers", "gathered", "activations"),
    *("logits", "replica", "kv_cache", "ema", "staging", "runtime", "slack", "best", "start"),
)
"""Kinds of memory; `docs/scaling.md` has the formula of each."""

RUNTIME_GPU = 768 * MIB
SLACK = {"cpu": 0.05, "cuda": 0.10}
STATES: Mapping[str, int] = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Adafactor": 0, "Muon": 1}
"""Vectors that an optimizer keeps; 2 for all others."""

WHOLE, TILE = 2**26, {"cpu": 2**23, "cuda": 2**26}
"""Logits that are computed at once, and those of a tile where there are more."""

SAMPLED = 16
"""Bytes of each logit while a token is drawn."""

PREFILL, SLOT_BLOCK = 2048, 32
"""Prompt tokens of a pass, and the granularity of cache slots."""


@dataclass(frozen=True)
class Item:
    """Memory of one process in one phase."""

    kind: str
    role: str
    """Of the model; empty for what belongs to none."""

    num_bytes: float
    place: Place = "device"

    least: float | None = None
    """What is enough where the step adapts to the room that there is; None is all of it."""


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: PhaseName
    items: tuple[Item, ...]

    def by_kind(self, place: Place) -> Mapping[str, int]:
        """Bytes of each kind that takes any."""
        sums = Counter[str]()
        for item in self._items(place):
            sums[item.kind] += int(item.num_bytes)
        return {kind: sums[kind] for kind in KINDS if sums[kind]}

    def peak(self, place: Place) -> int:
        """Bytes of all kinds."""
        return int(sum(item.num_bytes for item in self._items(place)))

    def least(self) -> "Phase":
        """The phase with the least that it can do with."""
        items = (
            item if item.least is None else replace(item, num_bytes=item.least)
            for item in self.items
        )
        return replace(self, items=tuple(items))

    def _items(self, place: Place) -> Iterator[Item]:
        return (item for item in self.items if item.place == place)


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step on each of its processes."""

    phases: tuple[Phase, ...]

    unknown: tuple[str, ...] = ()
    """Models without a formula, a sentence each."""

    parameters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of each model, by role, adapters included."""

    def peak(self, place: Place) -> int:
        """Most bytes in any phase."""
        return max((phase.peak(place) for phase in self.phases), default=0)


def step_memory(
    config: StepConfig, *, machine: Machine, origins: Mapping[str, str] | None = None
) -> StepMemory:
    """The memory of a step on such machines; nothing is allocated.

    Args:
        config: the step's settings.
        machine: the machine it runs on.
        origins: for a directory that an earlier step has yet to write, the model it starts from.

    Raises:
        ConfigError, ModelError: a model can't be divided as `parallel` has it.
    """
    workload = config.workload(machine.world)
    models = models_of(workload, origins or {}, has_gpu=machine.has_gpu)
    unknown = tuple(
        f"{model.role} {model.path} is not counted: it is not downloaded, or has no configuration"
        " that can be read"
        for model in models
        if model.module is None
    )
    known = [model for model in models if model.module is not None]
    for index, model in enumerate(known):
        if model.trained is not None:
            check_cut(model.present, workload.parallel, follows=index > 0)
    formulas = {model.role: ModelMemory(model, workload, machine) for model in known}
    step = _Step(workload, machine, formulas, saves=config.save_interval is not None)
    parameters = {model.role: model.parameters for model in known}
    return StepMemory(tuple(step.phases()), unknown, parameters)


def moment_bytes(optim: OptimConfig) -> float:
    """Bytes that the optimizer keeps for each trained weight."""
    if optim.moments == "fp32":
        return 4 * STATES.get(optim.name, 2)
    return 4


@dataclass(frozen=True)
class ModelMemory:
    """The formulas of one model."""

    model: CountedModel
    workload: Workload
    machine: Machine

    @property
    def role(self) -> str:
        """The model's role."""
        return self.model.role

    @property
    def _tp(self) -> int:
        return self.workload.parallel.tp if self._is_cut else 1

    @property
    def _pp(self) -> int:
        return self.workload.parallel.pp if self._is_cut else 1

    @property
    def _is_cut(self) -> bool:
        return self.model.trained is not None or self.model.use.divided

    @property
    def _root(self) -> float:
        """Share of the root that this process has: the first and the last stage split it."""
        split = 2 if self._pp > 1 and not self.model.shape.ties else 1
        return 1 / split / self._tp

    @property
    def _block(self) -> float:
        """Share of all blocks that this process has."""
        return 1 / (self._tp * self._pp)

    def _shards(self, from_stage: int) -> int:
        """Processes that share a state which is sharded from that ZeRO stage on."""
        engine = self.model.engine
        return self.workload.shards if engine and engine.zero_stage >= from_stage else 1

    @property
    def weights(self) -> float:
        """Bytes of the weights of this process, before they are sharded."""
        shape = self.model.shape
        return shape.block_bytes * self._block + shape.root_bytes * self._root

    @property
    def trained(self) -> float:
        """Trained numbers of this process, before they are sharded."""
        shape = self.model.shape
        return shape.block_trained * self._block + shape.root_trained * self._root

    def _two_blocks(self, root: float, blocks: float) -> float:
        """The root and two blocks."""
        return root * self._root + 2 * blocks / self.model.shape.layers / self._tp

    def _place(self, kind: Literal["params", "optimizer", "gradients"]) -> Place:
        engine = self.model.engine
        if engine is None:
            return "device"
        where = getattr(engine.zero.offload, kind)
        if where == "nvme":
            return "disk"
        return "host" if where == "cpu" and self.machine.has_gpu else "device"

    def states(self) -> Iterator[Item]:
        """What is there in every phase."""
        role, trained = self.role, self.model.trained
        yield Item("weights", role, self.weights / self._shards(3), self._place("params"))
        if trained is None:
            return
        numbers, place = self.trained / self._shards(1), self._place("optimizer")
        fused = trained.optim.name == "AdamW" and trained.kernels != "off"
        wide = 4 if self._place("params") != place or not fused else 2
        wide = 0 if self.model.shape.itemsize == 4 and place == "device" else wide
        yield Item("masters", role, wide * numbers, place)
        yield Item("moments", role, moment_bytes(trained.optim) * numbers, place)
        copies: Place = "host" if self.machine.has_gpu else "device"
        use = self.model.use
        if use.keeps_average:
            yield Item("ema", role, 4 * numbers, copies if place == "disk" else place)
        if use.keeps_best:
            yield Item("best", role, 4 * numbers, copies)
        if use.keeps_start:
            yield Item("start", role, 4 * numbers, copies)

    def staging(self) -> Item:
        """The copy of the states that a checkpoint is written from."""
        trained, use = self.model.trained, self.model.use
        assert trained is not None
        each = 4 * (1 + use.keeps_average + use.keeps_best) + moment_bytes(trained.optim)
        place: Place = "host" if self.machine.has_gpu else "device"
        return Item("staging", self.role, each * self.trained / self._shards(1), place)

    def gradients(self) -> Iterator[Item]:
        """The sums of gradients, and the buffers of a backward pass."""
        shards, shape = self.workload.shards, self.model.shape
        place = self._place("gradients")
        yield Item("gradients", self.role, 4 * self.trained / shards, place)
        if shards > 1 or self.workload.passes(self.role) > 1 or place != "device":
            buffers = 4 * self._two_blocks(shape.root_trained, shape.block_trained)
            yield Item("gradient_buffers", self.role, buffers)
        yield from self.gathered()

    def gathered(self) -> Iterator[Item]:
        """At stage 3, whole weights."""
        shape = self.model.shape
        if self._shards(3) > 1 or self._place("params") != "device":
            yield Item("gathered", self.role, self._two_blocks(shape.root_bytes, shape.block_bytes))

    def passes(self, *, trains: bool) -> Iterator[Item]:
        """Activations and logits of the step's largest micro-batch."""
        work, use = self.workload, self.model.use
        length = min(work.length, self.model.shape.context)
        entropy = work.learns_entropy if trains else use.scores_entropy
        sequences, targets = work.sequences, min(work.targets, length)
        candidates = [self._pass(sequences, length, targets, trains=trains, entropy=entropy)]
        if trains and use.text_length is not None:
            text = min(use.text_length, self.model.shape.context)
            candidates.append(self._pass(work.rows, text, text, trains=True, entropy=False))
        activations, logits = max(candidates, key=sum)
        yield Item("activations", self.role, activations)
        yield Item("logits", self.role, logits)

    def _pass(
        self,
        sequences: int,
        length: int,
        targets: int,
        *,
        trains: bool,
        entropy: bool,
    ) -> tuple[float, float]:
        """Bytes of activations and of logits."""
        shape, engine = self.model.shape, self.model.trained
        tokens = sequences * length
        by_tokens = self._tp if self.workload.parallel.sequence else 1
        vector = tokens * shape.hidden * shape.itemsize / by_tokens
        block = tokens * shape.kept * shape.itemsize / self._tp
        # Attention and MLP keep their input of all tokens.
        block += 2 * tokens * shape.hidden * shape.itemsize * (1 - 1 / self._tp)
        layers = -(-shape.layers // self._pp)
        if not trains:
            activations = block + vector
        elif engine is not None and engine.gradient_checkpointing:
            every = engine.checkpoint_every
            in_flight = vector * -(-layers // every) * self._micro_batches_in_flight
            activations = in_flight + block * (every + 1)
        else:
            activations = block * (layers * self._micro_batches_in_flight + 1)
        if self.model.use.scores:
            return activations, 0.0
        return activations, self._logits(sequences * targets, trains=trains, entropy=entropy)

    @property
    def _micro_batches_in_flight(self) -> int:
        """Micro-batches whose activations the first stage of a pipeline keeps."""
        return min(self._pp, self.workload.micro_batches)

    def _logits(self, targets: int, *, trains: bool, entropy: bool) -> float:
        shape = self.model.shape
        numbers = targets * shape.vocabulary / self._tp
        times = (2 if shape.itemsize == 4 else 4) + entropy
        if numbers <= WHOLE:
            return 4 * times * numbers
        tile = TILE["cuda" if self.machine.has_gpu else "cpu"]
        matrix = shape.vocabulary * shape.hidden / self._tp if trains and shape.head_learns else 0
        return 4 * (times * tile + matrix)

    def replica(self, generation: Generation) -> Iterator[Item]:
        """A copy of the weights to generate with."""
        engine, shape = self.model.trained, self.model.shape
        adapted = engine is not None and (engine.lora is not None or engine.quantize != "none")
        regroup = self._pp > 1 or generation.tensor_parallel != self._tp
        if self._shards(3) > 1 or self._place("params") != "device" or adapted or regroup:
            yield Item("replica", self.role, shape.merged_bytes / generation.tensor_parallel)

    def responses(self, generation: Generation) -> Iterator[Item]:
        """The cache, the logits that are sampled from, and a pass over prompts."""
        shape = self.model.shape
        longest = min(generation.prompt_length + generation.new_tokens, shape.context)
        width = -(-longest // SLOT_BLOCK) * SLOT_BLOCK + SLOT_BLOCK
        keys = max(1.0, shape.kv_width / generation.tensor_parallel)
        slot = width * 2 * shape.layers * keys * shape.itemsize
        drawn = SAMPLED * shape.vocabulary
        yield Item("kv_cache", self.role, generation.slots * slot, least=slot)
        yield Item("logits", self.role, generation.slots * drawn, least=drawn)
        tokens = min(PREFILL, generation.slots * generation.prompt_length)
        yield Item("activations", self.role, tokens * shape.kept * shape.itemsize)


@dataclass(frozen=True)
class _Step:
    """The phases of a step."""

    workload: Workload
    machine: Machine
    models: Mapping[str, ModelMemory]

    saves: bool
    """Whether checkpoints are written during training."""

    def phases(self) -> Iterator[Phase]:
        """The phases in their order."""
        generation = self.workload.generation
        generates = generation is not None and generation.role in self.models
        yield self._phase("load", self._load())
        if generation is not None and generates and self.workload.generates_first:
            yield self._phase("generate", self._generate(generation))
        yield self._phase("score", self._score())
        yield self._phase("train", self._train())
        if generation is not None and generates and not self.workload.generates_first:
            yield self._phase("generate", self._generate(generation))

    def _phase(self, name: PhaseName, items: Iterable[Item]) -> Phase:
        """A phase with the runtime and the allocator's slack."""
        every = [item for item in items if item.num_bytes]
        host: Place = "host" if self.machine.has_gpu else "device"
        every.append(Item("runtime", "", RUNTIME_CPU, host))
        if self.machine.has_gpu:
            every.append(Item("runtime", "", RUNTIME_GPU))
        share = SLACK["cuda" if self.machine.has_gpu else "cpu"]
        moving = [i for i in every if i.kind in TRANSIENT and i.place == "device"]
        least = sum(i.num_bytes if i.least is None else i.least for i in moving)
        slack = share * sum(i.num_bytes for i in moving)
        return Phase(name, (*every, Item("slack", "", slack, least=share * least)))

    @property
    def present(self) -> list[ModelMemory]:
        """The models that are there in every phase."""
        return [each for each in self.models.values() if not each.model.use.phase_only]

    def _states(self) -> Iterator[Item]:
        for each in self.present:
            yield from each.states()
        generation = self.workload.generation
        if generation is not None and generation.keeps_replica and generation.role in self.models:
            yield from self.models[generation.role].replica(generation)

    def _load(self) -> Iterator[Item]:
        for each in self.present:
            yield from (i for i in each.states() if i.kind in ("weights", "masters"))
            if each.model.trained is None and each.model.settings.quantize != "none":
                place: Place = "host" if self.machine.has_gpu else "device"
                yield Item("weights", each.role, each.model.shape.merged_bytes, place)

    def _score(self) -> Iterator[Item]:
        yield from self._states()
        passes = [[*each.gathered(), *each.passes(trains=False)] for each in self.present]
        yield from max(passes, key=_sum, default=[])

    def _train(self) -> Iterator[Item]:
        yield from self._states()
        trained = [each for each in self.present if each.model.trained is not None]
        for each in trained:
            yield from each.gradients()
            if self.saves:
                yield each.staging()
        passes = [list(each.passes(trains=True)) for each in trained]
        if self.workload.reuses_forward:  # all wait for their backward passes
            yield from (item for items in passes for item in items)
        else:
            yield from max(passes, key=_sum, default=[])

    def _generate(self, generation: Generation) -> Iterator[Item]:
        actor = self.models[generation.role]
        moved = {"masters", "moments"} if generation.offloads_training else set[str]()
        for each in self.present if actor in self.present else [*self.present, actor]:
            for item in each.states():
                goes = item.kind in moved and item.place == "device" and self.machine.has_gpu
                yield replace(item, place="host") if goes else item
        yield from actor.replica(generation)
        yield from actor.responses(generation)


TRANSIENT = ("gradient_buffers", "gathered", "activations", "logits", "kv_cache")


def _sum(items: Iterable[Item]) -> float:
    return sum(item.num_bytes for item in items)


def line(memory: StepMemory, machine: Machine) -> str:
    """The memory of the largest phase."""
    phases = [phase.least() for phase in memory.phases]
    worst = max(phases, key=lambda phase: phase.peak("device"))
    (needed,) = in_words(worst.peak("device"))
    more = " and more, which is not counted" if memory.unknown else ""
    host = max(phase.peak("host") for phase in phases)
    of_host = f", {in_words(host)[0]} of main memory" if host and machine.has_gpu else ""
    each = "on each GPU" if machine.has_gpu else "in each process"
    return f"about {needed} {each} (to {worst.name}){of_host}{more}"


def table(memory: StepMemory, machine: Machine) -> Iterator[str]:
    """Kinds down, phases across; main memory and disk after the device."""
    unit, name = (GIB, "GiB") if memory.peak("device") >= GIB else (MIB, "MiB")

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
