"""Closed-form estimates of the memory that a step needs on each of its processes.

The result is an estimate of what the process takes from the system (resident memory on a CPU,
reserved memory on a GPU), within about 15%. `docs/scaling.md` lists the formulas.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.budget.machine import GIB, MIB, Machine, describe_machine, format_bytes
from pipeline.budget.models import CountedModel, build_models, check_shardable
from pipeline.config import Generation, StepConfig, Workload

Location = Literal["device", "host", "disk"]
"""Location of memory: the compute device, host memory next to a GPU, or a file."""

PhaseName = Literal["train", "generate", "rollouts"]
"""A part of a step; `rollouts` takes place on processes that only generate."""

TITLES: Mapping[Location, str] = {"device": "", "host": "  in host memory", "disk": "  on disk"}

TRANSIENT = ("gradient_buffers", "gathered", "activations", "logits", "kv_cache")
"""Kinds of transient memory, for which the allocator reserves more than is used."""

KINDS = (
    *("weights", "masters", "moments", "gradients", *TRANSIENT, "replica", "copies"),
    *("graphs", "staging", "export", "runtime", "slack"),
)

RUNTIME_CPU, RUNTIME_GPU = 512 * MIB, 768 * MIB
"""Bytes that a process takes without a model: Python, PyTorch and transformers; on a GPU, CUDA."""

SLACK = {"cpu": 1 / 8, "cuda": 0.10}
"""Freed memory that the allocator keeps, as a fraction of the transient memory."""

MIN_SLACK = {"cpu": 256 * MIB, "cuda": 0}
"""Minimum of `SLACK` in bytes, the same as in `host_allocator.cpp`."""

MAX_UNTILED_LOGITS, TILE_LOGITS = 2**26, {"cpu": 2**23, "cuda": 2**26}
"""Maximum number of logits computed at once, and the number per tile if there are more."""

CUBLAS = 32 * MIB
"""Bytes of cuBLAS's workspace on the stream that captures CUDA graphs."""

MASTER_BYTES = {"fp32": 0, "bf16": 2, "fp16": 4}
"""Bytes per master weight in addition to the weight if both are on one device; otherwise 4."""

SAMPLING_BYTES = 16
"""Bytes per logit while a token is sampled."""

PREFILL_TOKENS, PAGE_SIZE = (2048, 8192), 64
"""Prompt tokens per pass on a CPU and on a GPU, and tokens per page of the cache."""


@dataclass(frozen=True)
class Item:
    """Memory of one kind that a process takes in one phase."""

    kind: str
    num_bytes: float
    location: Location = "device"

    min_bytes: float | None = None
    """Minimum bytes if the step adapts to free memory; None if it needs all `num_bytes`."""


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: PhaseName
    items: tuple[Item, ...]

    def bytes_by_kind(self, location: Location) -> Mapping[str, int]:
        """Return the bytes in one location by kind, omitting zeros."""
        sums = Counter[str]()
        for item in self.items:
            sums[item.kind] += int(item.num_bytes) if item.location == location else 0
        return {kind: sums[kind] for kind in KINDS if sums[kind]}

    def peak(self, location: Location) -> int:
        """Return the total bytes in one location."""
        return int(sum(item.num_bytes for item in self.items if item.location == location))

    def at_minimum(self) -> "Phase":
        """Return the phase with every item that adapts to free memory at its minimum."""
        items = (
            item if item.min_bytes is None else replace(item, num_bytes=item.min_bytes)
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
    """Number of parameters of each model by role, including adapters."""

    generating: int = 0
    """Number of processes that only generate, in `rollouts`; all others run the other phases."""

    def peak(self, location: Location) -> int:
        """Return the maximum bytes over all phases."""
        return max((phase.peak(location) for phase in self.phases), default=0)


def step_memory(
    config: StepConfig, *, machine: Machine, origins: Mapping[str, str] | None = None
) -> StepMemory:
    """Estimate the memory of a step on `machine`; nothing is allocated.

    `origins` holds the initial model of each earlier step that has yet to run, by output directory.

    Raises:
        ConfigError, ModelError: a model can't be sharded or split as `parallel` requires.
    """
    work = config.workload(machine.world)
    models, unknown = build_models(work, origins or {}, has_gpu=machine.has_gpu)
    for model in models:
        if model.trained is not None:
            check_shardable(model.module, work.parallel)
    by_role = {model.role: _ModelMemory(model, work, machine) for model in models}
    loaded = [memory for memory in by_role.values() if not memory.model.use.comparison_only]
    items = _train_items(work, loaded, by_role, machine, saves=config.save_interval is not None)
    phases = [_make_phase("train", items, machine)]
    generation = work.generation
    if generation is not None and generation.role in by_role:
        items = _generate_items(generation, loaded, by_role[generation.role], machine)
        phases.append(_make_phase("generate", items, machine))
    if work.generates_first:
        phases.reverse()
    if (rollouts := work.rollouts) is not None and rollouts.role in by_role:
        items = by_role[rollouts.role].rollouts(rollouts)
        phases.append(_make_phase("rollouts", items, machine))
    parameters = {model.role: model.parameters for model in models}
    return StepMemory(tuple(phases), tuple(unknown), parameters, work.generating)


class _ModelMemory:
    """The memory formulas of one model."""

    def __init__(self, model: CountedModel, work: Workload, machine: Machine) -> None:
        self.model, self.work, self.machine = model, work, machine
        shape, engine = model.shape, model.engine
        is_sharded = not model.use.comparison_only
        self.tp, self.pp = (work.parallel.tp, work.parallel.pp) if is_sharded else (1, 1)
        if model.settings.quantize != "none":  # see `can_shard`
            self.tp = 1
        # The first and last stages share the root's parameters.
        self.root = 1 / (2 if self.pp > 1 and not shape.is_tied else 1) / self.tp
        self.block = 1 / (self.tp * self.pp)
        stage = 0 if engine is None else engine.zero_stage
        self.weight_shards = work.shards if stage == 3 else 1
        self.trained = shape.block_trained * self.block + shape.root_trained * self.root
        self.states_shard = self.trained / (work.shards if stage >= 1 else 1)
        self.host: Location = "host" if machine.has_gpu else "device"

    @property
    def _moment_bytes(self) -> int:
        """Bytes that the optimizer keeps for each trained weight."""
        assert self.model.trained is not None
        return 4 if self.model.trained.optim.moments == "bf16" else 8

    def _root_and_two_blocks(self, root: float, blocks: float) -> float:
        """Return this process's share of the root and of two blocks, given the totals."""
        return root * self.root + 2 * blocks / self.model.shape.layers / self.tp

    def _location(self, kind: Literal["params", "optimizer", "gradients"]) -> Location:
        engine = self.model.engine
        device = "none" if engine is None else getattr(engine.zero.offload, kind)
        if device == "nvme":
            return "disk"
        return "host" if device == "cpu" and self.machine.has_gpu else "device"

    def states(self) -> Iterator[Item]:
        """Yield the states that exist in every phase."""
        shape, trained = self.model.shape, self.model.trained
        weights = shape.block_bytes * self.block + shape.root_bytes * self.root
        yield Item("weights", weights / self.weight_shards, self._location("params"))
        if trained is None:
            return
        location = self._location("optimizer")
        precision = "fp32" if trained.lora else trained.precision  # adapters are always fp32
        is_next_to_weights = self._location("params") == location != "disk"
        master_bytes = MASTER_BYTES[precision] if is_next_to_weights else 4
        yield Item("masters", master_bytes * self.states_shard, location)
        yield Item("moments", self._moment_bytes * self.states_shard, location)
        average_bytes = 4 * self.model.use.keeps_average * self.states_shard
        yield Item("copies", average_bytes, self.host if location == "disk" else location)
        yield Item("copies", 4 * self.model.use.host_copies * self.states_shard, self.host)

    def staging(self) -> Item:
        """Return the host copy of the states, from which a checkpoint is written."""
        use = self.model.use
        state_bytes = 4 * (1 + use.keeps_average + use.host_copies) + self._moment_bytes
        return Item("staging", state_bytes * self.states_shard, self.host)

    def gradients(self) -> Iterator[Item]:
        """Yield the accumulated gradients, and the buffers and weights of a backward pass."""
        shards, shape, location = self.work.shards, self.model.shape, self._location("gradients")
        yield Item("gradients", 4 * self.trained / shards, location)
        if self.work.data_processes > 1 or location != "device":
            buffers = 4 * self._root_and_two_blocks(shape.root_trained, shape.block_trained)
            yield Item("gradient_buffers", buffers)
        yield from self.gathered()

    def gathered(self) -> Iterator[Item]:
        """Yield the weights that are gathered at stage 3."""
        shape = self.model.shape
        if self.weight_shards > 1 or self._location("params") != "device":
            yield Item("gathered", self._root_and_two_blocks(shape.root_bytes, shape.block_bytes))

    def passes(self, *, trains: bool) -> Iterator[Item]:
        """Yield the activations and logits of the step's largest micro-batch."""
        work, shape, trained = self.work, self.model.shape, self.model.trained
        text_length = (self.model.use.text_length or 0) if trains else 0
        length = min(max(work.length, text_length), shape.context)
        tokens = work.sequences * length
        if not text_length and (trained is not None or not self.model.use.scores):
            tokens = min(tokens, self._rollout_tokens(length))
        token_shards = self.tp if work.parallel.sequence else 1
        hidden_bytes = tokens * shape.hidden * shape.itemsize / token_shards
        block_bytes = tokens * shape.saved_elements * shape.itemsize / self.tp
        # Attention and MLP save their inputs for all tokens.
        block_bytes += 2 * tokens * shape.hidden * shape.itemsize * (1 - 1 / self.tp)
        layers = -(-shape.layers // self.pp)
        in_flight = min(self.pp, work.micro_batches)
        if not trains:
            yield Item("activations", block_bytes + hidden_bytes)
        elif trained is not None and trained.gradient_checkpointing:
            yield Item("activations", hidden_bytes * layers * in_flight + block_bytes * 2)
        else:
            yield Item("activations", block_bytes * (layers * in_flight + 1))
        if not self.model.use.scores:
            targets = work.sequences * min(max(work.targets, text_length), length)
            yield Item("logits", self._logits(targets, trains=trains))

    def _rollout_tokens(self, length: int) -> float:
        """Return the number of tokens in a rollout with shared prompts; infinity without groups."""
        generation = self.work.generation
        if generation is None or generation.group_size == 1:
            return math.inf
        prompts = generation.count / generation.group_size * generation.prompt_length
        return prompts + generation.count * (length - generation.prompt_length)

    def _logits(self, targets: int, *, trains: bool) -> float:
        """Return the bytes of logits with their gradients, in one pass or in tiles."""
        shape = self.model.shape
        num_logits = targets * shape.vocabulary / self.tp
        num_copies = 2 if shape.itemsize == 4 else 4
        tile = TILE_LOGITS["cuda" if self.machine.has_gpu else "cpu"]
        head = shape.vocabulary * shape.hidden / self.tp if trains and shape.head_is_trained else 0
        if trains and self.work.compares_logits:  # 8 tensors of half a tile, and gathered logits
            gathered = 2 * shape.itemsize * targets * shape.vocabulary * (self.tp > 1)
            return 16 * min(2 * num_logits, tile) + (4 + shape.itemsize) * head + gathered
        if num_logits <= MAX_UNTILED_LOGITS:
            return 4 * num_copies * num_logits
        return 4 * (num_copies * tile + head)

    def replica(self, generation: Generation) -> Iterator[Item]:
        """Yield a copy of the weights for generation, if one is needed."""
        shape = self.model.shape
        is_sharded = self.weight_shards > 1 or self._location("params") != "device"
        reshards = self.pp > 1 or generation.tensor_parallel != self.tp
        if is_sharded or reshards:
            num_bytes = shape.block_bytes + shape.root_bytes
            if generation.tensor_parallel > 1:  # shards are dequantized
                num_bytes = max(num_bytes, shape.merged_bytes) / generation.tensor_parallel
            yield Item("replica", num_bytes)

    def rollouts(self, generation: Generation) -> Iterator[Item]:
        """Yield the memory of a process that only generates."""
        yield Item("weights", self.model.shape.merged_bytes)
        yield from self.responses(generation)

    def responses(self, generation: Generation) -> Iterator[Item]:
        """Yield CUDA graphs, the cache, logits to sample from, and activations of a prompt pass."""
        shape = self.model.shape
        max_length = min(generation.prompt_length + generation.new_tokens, shape.context)
        kv_width = max(1.0, shape.kv_width / generation.tensor_parallel)
        page_bytes = PAGE_SIZE * 2 * shape.layers * kv_width * shape.itemsize
        # The sequences of a group share the full pages of their prompt.
        shared_pages = (min(generation.prompt_length, max_length) - 1) // PAGE_SIZE
        unshared_pages = -(-max_length // PAGE_SIZE) - shared_pages
        prompts = min(generation.slots, -(-generation.max_concurrent // generation.group_size))
        if self.machine.has_gpu:  # graphs share the memory of the widest pass
            is_fp32 = self.model.trained is not None and self.model.trained.fp32_head
            per_row = shape.saved_elements * shape.itemsize
            per_row += shape.vocabulary * (4 if is_fp32 else shape.itemsize)
            yield Item("graphs", CUBLAS + generation.slots * per_row, min_bytes=CUBLAS + per_row)
        sampling_bytes = SAMPLING_BYTES * shape.vocabulary
        num_pages = 1 + prompts * shared_pages + generation.slots * unshared_pages
        min_pages = 1 + shared_pages + unshared_pages
        yield Item("kv_cache", num_pages * page_bytes, min_bytes=min_pages * page_bytes)
        yield Item("logits", generation.slots * sampling_bytes, min_bytes=sampling_bytes)
        prompt_tokens = generation.slots * generation.prompt_length
        tokens = min(PREFILL_TOKENS[self.machine.has_gpu], prompt_tokens)
        yield Item("activations", tokens * shape.saved_elements * shape.itemsize)


def _make_phase(name: PhaseName, items: Iterable[Item], machine: Machine) -> Phase:
    """Build a phase from its items, adding the runtime and the allocator's slack."""
    items = [item for item in items if item.num_bytes]
    items.append(Item("runtime", RUNTIME_CPU, "host" if machine.has_gpu else "device"))
    items += [Item("runtime", RUNTIME_GPU)] if machine.has_gpu else []
    kind = "cuda" if machine.has_gpu else "cpu"
    transient = [item for item in items if item.kind in TRANSIENT and item.location == "device"]
    slack, min_slack = (
        max(SLACK[kind] * _total_bytes(temporary), MIN_SLACK[kind])
        for temporary in (transient, Phase(name, tuple(transient)).at_minimum().items)
    )
    return Phase(name, (*items, Item("slack", slack, min_bytes=min_slack)))


def _train_items(
    work: Workload,
    loaded: Sequence[_ModelMemory],
    by_role: Mapping[str, _ModelMemory],
    machine: Machine,
    *,
    saves: bool,
) -> Iterator[Item]:
    """Yield the memory of scoring, training and export, and of checkpoints if `saves`."""
    for memory in loaded:
        yield from memory.states()
        if memory.model.trained is not None:
            yield from memory.gradients()
            yield from [memory.staging()] if saves else []
    generation = work.generation
    if generation is not None and generation.keeps_replica and generation.role in by_role:
        yield from by_role[generation.role].replica(generation)
    trained = [memory for memory in loaded if memory.model.trained]
    scoring = ([*memory.gathered(), *memory.passes(trains=False)] for memory in loaded)
    training = [list(memory.passes(trains=True)) for memory in trained]
    if work.compares_logits:  # the teacher's output layer is gathered meanwhile
        frozen = (memory for memory in loaded if memory not in trained)
        training[0] += [item for memory in frozen for item in memory.gathered()]
    if work.reuses_forward:  # the graphs of all models are in memory together
        training = [[item for items in training for item in items]]
    largest = max([*scoring, *training], key=_total_bytes, default=[])
    yield from largest
    # The main process compares an export with a copy that it loads on the CPU, if that fits.
    export_bytes = (memory.model.shape.merged_bytes for memory in trained)
    copy_bytes = max(export_bytes, default=0) - (0 if machine.has_gpu else _total_bytes(largest))
    yield Item("export", max(0, copy_bytes), "host" if machine.has_gpu else "device", min_bytes=0)


def _generate_items(
    generation: Generation, loaded: Sequence[_ModelMemory], actor: _ModelMemory, machine: Machine
) -> Iterator[Item]:
    offloaded = {"masters", "moments"} if generation.offloads_training else set[str]()
    for memory in loaded:
        for item in memory.states():
            is_offloaded = item.kind in offloaded and item.location == "device" and machine.has_gpu
            yield replace(item, location="host") if is_offloaded else item
    yield from actor.replica(generation)
    yield from actor.responses(generation)


def _total_bytes(items: Iterable[Item]) -> float:
    return sum(item.num_bytes for item in items)


def memory_summary(memory: StepMemory, machine: Machine) -> str:
    """Describe the memory of the largest phase, at its minimum if it doesn't fit otherwise."""
    available = machine.gpu_bytes or (machine.host_bytes or 0) // machine.processes
    phases = [p if p.peak("device") <= available else p.at_minimum() for p in memory.phases]
    rollouts = [phase for phase in phases if phase.name == "rollouts"]
    phases = [phase for phase in phases if phase not in rollouts]
    largest = max(phases, key=lambda phase: phase.peak("device"))
    (needed,) = format_bytes(largest.peak("device"))
    suffix = " plus uncounted parts" if memory.unknown else ""
    host = max(phase.peak("host") for phase in phases)
    host_part = f", {format_bytes(host)[0]} of host memory" if host and machine.has_gpu else ""
    scope = "on each GPU" if machine.has_gpu else "in each process"
    for phase in rollouts:
        (needed_alone,) = format_bytes(phase.peak("device"))
        suffix += f"; {needed_alone} in each of {memory.generating} that only generate"
    return f"about {needed} {scope} (to {largest.name}){host_part}{suffix}"


def memory_table(memory: StepMemory, machine: Machine) -> Iterator[str]:
    """Yield the lines of a table: memory by kind and phase, on the device, host and disk."""
    unit, name = (GIB, "GiB") if memory.peak("device") >= 10 * GIB else (MIB, "MiB")

    def row(label: str, sizes: Iterable[int]) -> str:
        return f"  {label:<18}" + "".join(f"{size / unit:>10.1f}" for size in sizes)

    for role, count in memory.parameters.items():
        yield f"  {role:<18} {count / 1e6:,.1f}M parameters"
    yield f"  {name:<18}" + "".join(f"{phase.name:>10}" for phase in memory.phases)
    for location, title in TITLES.items():
        if memory.peak(location):
            yield from [title] if title else []
            by_phase = [phase.bytes_by_kind(location) for phase in memory.phases]
            for kind in KINDS:
                if any(kind in kinds for kinds in by_phase):
                    yield row(kind.replace("_", " "), (kinds.get(kind, 0) for kinds in by_phase))
            yield row("total", (phase.peak(location) for phase in memory.phases))
    yield f"  {describe_machine(machine)}"
    yield from (f"  {sentence}" for sentence in memory.unknown)
