"""What a step takes on each of its processes, phase by phase.

The engine's vectors are counted by its own layout (`pipeline.engine.predict`), passes by the
models' own code (`pipeline.budget.activation_profiler`), generation by the shapes of its cache and
replica.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pipeline.budget.activation_profiler import PassBytes
from pipeline.budget.generation import (
    PREFILL,
    replica_bytes,
    sampling_bytes,
    slot_bytes,
    weight_sync_bytes,
)
from pipeline.budget.machine import RUNTIME_CPU, Machine
from pipeline.budget.models import CountedModel, models_of
from pipeline.budget.moments import at_head, first_passes, moments_of, names
from pipeline.budget.passes import Pass, Rows, UnknownPassError, longest, pass_bytes
from pipeline.budget.stages import Part, part_of_layers, stages_of
from pipeline.budget.states import engine_bytes, held, places_of, sums_directly
from pipeline.budget.step_passes import StepPasses
from pipeline.budget.table import Item, Phase, PhaseName, StepMemory
from pipeline.config import Generation, StepConfig, Workload

RUNTIME_GPU = 768 * 2**20
"""Of a GPU before it holds a tensor: CUDA's context, the libraries' kernels and workspaces."""

OPTIONAL = ("compare",)
"""Phases that a step leaves out where they don't fit."""


def step_memory(
    config: StepConfig, *, machine: Machine, origins: Mapping[str, str] | None = None
) -> StepMemory:
    """The bytes of a step on such machines; nothing is allocated.

    Args:
        config: the step's settings.
        machine: what it runs on.
        origins: for a directory that an earlier step has yet to fill, the model it starts from.
    """
    return workload_memory(config.workload(machine.world), machine=machine, origins=origins)


def workload_memory(
    workload: Workload, *, machine: Machine, origins: Mapping[str, str] | None = None
) -> StepMemory:
    """As `step_memory`, by what a step does rather than by its settings."""
    found = memory_by_stage(workload, machine=machine, origins=origins)
    return max(found, key=lambda memory: memory.peak("device"))


def memory_by_stage(
    workload: Workload, *, machine: Machine, origins: Mapping[str, str] | None = None
) -> list[StepMemory]:
    """As `workload_memory`, for each stage of a pipeline; for one process without stages."""
    models = models_of(workload, origins or {}, has_gpu=machine.has_gpu)
    parameters = {model.role: model.parameters for model in models if model.module is not None}
    if workload.parallel.tp > 1:
        models = [part_of_layers(model, workload) for model in models]
    counted = tuple(model for model in models if model.module is not None)
    missing = tuple(
        f"{model.role} {model.path} is not counted: it is not downloaded, or has no configuration"
        " that can be read"
        for model in models
        if model.module is None
    )
    found = [_memory(workload, machine, counted, parts) for parts in stages_of(counted, workload)]
    return [
        replace(each, unknown=(*missing, *each.unknown), parameters=parameters) for each in found
    ]


def _memory(
    workload: Workload,
    machine: Machine,
    models: tuple[CountedModel, ...],
    parts: Mapping[str, Part],
) -> StepMemory:
    """Memory of a process, which has the `parts` of models that are cut into stages, by role."""
    models = tuple(parts[each.role].own if each.role in parts else each for each in models)
    sizes = {model.role: engine_bytes(model, workload, machine) for model in models}
    step = _Step(workload, machine, models, sizes, parts=parts)
    phases = step.all_phases()
    stage = next((part.stage.number for part in parts.values()), None)
    return StepMemory(phases, tuple(dict.fromkeys(step.unknown)), {}, stage=stage)


@dataclass(frozen=True)
class _Step:
    """A step whose phases are being put together."""

    workload: Workload
    machine: Machine
    models: tuple[CountedModel, ...]
    sizes: Mapping[str, Mapping[str, int]]
    """Of the engine's vectors, by role and kind."""

    unknown: list[str] = field(default_factory=list[str])

    parts: Mapping[str, Part] = field(default_factory=dict[str, Part])
    """The stage that is counted, of the models that are cut into some, by role."""

    @property
    def how(self) -> StepPasses:
        """How its models are run."""
        return StepPasses(self.workload, self.machine, self.models)

    def all_phases(self) -> tuple[Phase, ...]:
        """With what a process takes for itself."""
        return tuple(
            Phase(name, (*self.runtime(), *items), optional=name in OPTIONAL)
            for name, items in self.phases().items()
        )

    def phases(self) -> dict[PhaseName, list[Item]]:
        """The phases, in the order in which they come first."""
        generation = self.workload.generation
        phases: dict[PhaseName, list[Item]] = {"load": list(self.load())}
        if generation is not None and generation.phase == "each iteration":
            phases["generate"] = list(self.generate(generation))
        phases["score"] = list(self.score())
        phases["train"] = list(self.train())
        if generation is not None and "generate" not in phases and self.of(generation.role):
            phases["generate"] = list(self.generate(generation))
        for model in self.compared:
            phases["compare"] = list(self.compare(model))
        return phases

    def of(self, role: str) -> CountedModel | None:
        """The model of a role, where it is known."""
        return next((model for model in self.models if model.role == role), None)

    def runtime(self) -> Iterator[Item]:
        """What a process takes for itself."""
        if self.machine.has_gpu:
            yield Item("runtime", "", RUNTIME_GPU)
        yield Item("runtime", "", RUNTIME_CPU, "host" if self.machine.has_gpu else "device")

    @property
    def present(self) -> list[CountedModel]:
        """The models that are there all the time."""
        return [model for model in self.models if not self.workload.model(model.role).phase_only]

    @property
    def compared(self) -> list[CountedModel]:
        """The models that come to generate beside the others when the step is done."""
        roles = {use.role for use in self.workload.compared}
        return [model for model in self.models if model.role in roles]

    @property
    def keeps_replica(self) -> bool:
        """Whether the weights that generate stay in memory."""
        return self.workload.generation is not None and self.workload.generation.keeps_replica

    def load(self) -> Iterator[Item]:
        """Each model is read from its files to its place, and laid out unit by unit.

        What is quantized when it has been read is whole in main memory before, unless processes
        read their parts of it alone.
        """
        for model in self.present:
            alone = frozenset({model.role})
            yield from self.held(model, kinds=("weights", "masters"))
            if model.read_bytes > model.weight_bytes and not self.workload.parallel.is_cut:
                place = "host" if self.machine.has_gpu else "device"
                yield Item("weights", model.role, model.read_bytes, place, alone)
            if model.engine is not None:
                sizes = (sum(each.nbytes for each in u.params.values()) for u in model.units())
                yield Item("gathered", model.role, max(sizes), moments=alone)

    def train(self) -> Iterator[Item]:
        """The models that learn take their turns in each micro-batch, and are updated together."""
        for model in self.present:
            yield from self.held(model)
        if self.keeps_replica:
            yield from self.replica()
        trained = [model for model in self.present if model.trained is not None]
        after = later = frozenset({"update"})
        for model in reversed(trained):
            if self.learns_from_texts(model):
                after |= moments_of("texts")
                later |= moments_of("texts")
            yield from self.gradients(model, after, later)
            own = moments_of(model.role) | moments_of(first_passes(model.role))
            after, later = after | own, later | own
        if self.workload.reuses_forward and len(trained) > 1:
            yield from self.waiting(*trained)

    def waiting(self, first: CountedModel, second: CountedModel) -> Iterator[Item]:
        """What the passes that scored a rollout keep for the way back.

        That of the first model is there while the second is run, that of the second until the first
        has found its gradients. The first one's entropy is computed on the way, before there is any
        of the second.
        """
        scored, kept = (
            self.measured(first, how(first)) for how in (self.how.scoring, self.how.training)
        )
        if scored is not None and kept is not None:
            alone = frozenset({"forward"})
            yield Item("activations", first.role, kept.kept, moments=alone)
            yield Item("logits", first.role, scored.head - scored.kept, moments=alone)
        both = frozenset({"both"})
        for model, moments in ((first, both), (second, both | moments_of(first.role))):
            taken = self.measured(model, self.how.training(model))
            if taken is not None:
                yield Item("activations", model.role, taken.kept, moments=moments)
                yield Item("logits", model.role, taken.waits - taken.kept, moments=moments)
            if self.sizes[model.role]["gathered"]:  # the root stays whole until it is gone back
                whole = sum(each.nbytes for each in at_head(model))
                yield Item("gathered", model.role, whole, moments=moments)
        gathered = self.sizes[second.role]["gathered"]
        yield Item("gathered", second.role, gathered, moments=both)

    def gradients(
        self, model: CountedModel, after: frozenset[str], later: frozenset[str]
    ) -> Iterator[Item]:
        """What comes and goes while one model finds its gradients, and what stays `after` that.

        `later` are the moments that follow in the last micro-batch.
        """
        sizes = self.sizes[model.role]
        place = places_of(model, self.machine).get("gradients", "device")
        on_the_way = frozenset({f"{model.role} blocks", f"{model.role} head"})
        backward = frozenset({f"{model.role} backward"})
        accumulates = self.workload.passes(model.role) > 1
        from_then = after | backward | (on_the_way if accumulates else frozenset())
        yield Item("gradients", model.role, sizes["gradients"], place, from_then)
        root = 4 * sum(each.numel() for each in at_head(model) if each.requires_grad)
        buffers = after | on_the_way | backward
        if self.workload.passes(model.role) == 2 and sums_directly(
            model, self.workload, self.machine
        ):
            # They come with the second backward pass, which begins with the root.
            head = frozenset({f"{model.role} head"})
            buffers = later | backward | on_the_way - head
            yield Item("gradient_buffers", model.role, root, moments=head)
        yield Item("gradient_buffers", model.role, sizes["gradient_buffers"], moments=buffers)
        if not accumulates:
            yield from self.passing(model, self.how.training(model), backward=True, begins=True)
        else:
            yield from self.passing(model, self.how.training(model))
        if accumulates and model.role in self.parts:
            first = first_passes(model.role)
            on_the_way = frozenset(names(first)[:2])
            yield from self.passing(model, self.how.training(model), during=first, begins=True)
            if not sums_directly(model, self.workload, self.machine):
                yield Item(
                    "gradient_buffers", model.role, sizes["gradient_buffers"], moments=on_the_way
                )
        if not accumulates or model.role in self.parts:
            # Sums grow as activations go: the highest moment is at either end.
            yield Item("gradients", model.role, root // self.workload.shards, place, on_the_way)
        if self.learns_from_texts(model):
            yield from self.passing(model, self.how.reading_texts(model), during="texts")

    def passing(
        self,
        model: CountedModel,
        how: Pass,
        *,
        backward: bool = False,
        during: str | None = None,
        begins: bool = False,
    ) -> Iterator[Item]:
        """What comes and goes in a pass: activations, logits, and at stage 3 gathered weights.

        In a pipeline it `begins` before any gradient has been found.
        """
        blocks, head, last = (frozenset({moment}) for moment in names(during or model.role))
        gathered = self.sizes[model.role]["gathered"]
        root = sum(each.nbytes for each in at_head(model)) if gathered else 0
        yield Item("gathered", model.role, gathered, moments=blocks | last)
        yield Item("gathered", model.role, root, moments=head)
        taken = self.measured(model, how, begins=begins)
        if taken is None:
            return
        yield Item("activations", model.role, taken.blocks, moments=blocks)
        yield Item("activations", model.role, taken.kept, moments=head)
        yield Item("logits", model.role, taken.head - taken.kept, moments=head)
        if backward:
            yield Item("activations", model.role, taken.tail, moments=last)

    def score(self) -> Iterator[Item]:
        """Passes without gradients: evaluation, and the scoring of responses."""
        for model in self.present:
            yield from self.held(model)
            yield from self.passing(model, self.how.scoring(model))
        if self.keeps_replica:
            yield from self.replica()

    def generate(self, generation: Generation) -> Iterator[Item]:
        """What the model that generates needs beside all that stays."""
        for model in self.models:
            if model in self.compared:
                continue
            kinds = frozenset({"masters", "moments"})
            if model.role != generation.role or model.is_sharded:
                kinds |= {"weights"}  # else the replica reads them where they are
            moves = generation.offloads_training and model.trained is not None
            yield from self.held(model, moved=kinds if moves else frozenset())
        actor = self.of(generation.role)
        if actor is None:
            return
        yield from self.replica()
        syncing = frozenset({"replica"})
        yield Item("gathered", actor.role, weight_sync_bytes(actor, generation), moments=syncing)
        yield from self.responses(actor, generation)

    def compare(self, base: CountedModel) -> Iterator[Item]:
        """Responses of a model that comes whole beside all that stays."""
        for model in self.models:
            yield from self.held(model)
        if self.keeps_replica:
            yield from self.replica()
        if self.machine.has_gpu:
            reading = frozenset({"load"})
            yield Item("weights", base.role, base.read_bytes, "host", reading)
        assert self.workload.generation is not None
        # Alone, whoever generates together otherwise, and as many responses at once.
        generation = self.workload.generation
        count = max(generation.count, generation.most_at_once)
        alone = replace(generation, tensor_parallel=1, shared_by=1, count=count)
        yield from self.responses(base, alone)

    def responses(self, model: CountedModel, generation: Generation) -> Iterator[Item]:
        """What a model takes to generate, whole, beside its weights."""
        if model.role in self.parts:
            model = self.parts[model.role].whole
        generating = frozenset({"answers"})
        for kind, each in (
            ("kv_cache", slot_bytes(model, generation)),
            ("logits", sampling_bytes(model)),
        ):
            yield Item(kind, model.role, generation.slots * each, moments=generating, least=each)
        length = min(generation.prompt_length, PREFILL)
        count = max(1, min(PREFILL // length, generation.slots))
        taken = self.measured(model, Pass(Rows(count, length, 0), "read"))
        if taken is not None:
            yield Item("activations", model.role, taken.peak, moments=generating)

    def replica(self) -> Iterator[Item]:
        """The copy of the weights that generates."""
        generation = self.workload.generation
        actor = None if generation is None else self.of(generation.role)
        if generation is not None and actor is not None:
            part = self.parts.get(actor.role)
            whole = actor if part is None else part.whole
            yield Item("replica", actor.role, replica_bytes(whole, generation, own=actor))

    def held(
        self,
        model: CountedModel,
        *,
        kinds: tuple[str, ...] = ("weights", "masters", "moments"),
        moved: frozenset[str] = frozenset(),
    ) -> Iterator[Item]:
        """What of a model stays through a phase."""
        sizes = self.sizes[model.role]
        yield from held(model, sizes, self.workload, self.machine, kinds=kinds, moved=moved)
        part = self.parts.get(model.role)
        if part is not None:
            trains = model.trained is not None and "moments" in kinds
            yield from part.shared(trains=trains)

    def learns_from_texts(self, model: CountedModel) -> bool:
        """Whether it has passes over texts beside those of the step."""
        return self.workload.model(model.role).text_length is not None

    def measured(self, model: CountedModel, how: Pass, *, begins: bool = False) -> PassBytes | None:
        """What a pass takes; None where the model's code can't be followed."""
        rows = replace(how.rows, length=longest(model.present, how.rows.length))
        how = replace(how, rows=rows)
        try:
            part = self.parts.get(model.role)
            if part is not None and model is part.own:
                return part.takes(how, begins=begins)
            return pass_bytes(model.present, how)
        except UnknownPassError as error:
            reason = str(error).strip().split("\n")[0]
            self.unknown.append(
                f"activations of {model.plain.config.model_type} are not counted: its code can't be"
                f" followed without numbers ({reason})"
            )
            return None
