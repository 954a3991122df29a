"""The bytes of a step's checkpoints."""

from collections.abc import Iterator, Mapping

from pipeline.budget.machine import Machine
from pipeline.budget.models import CountedModel, models_of
from pipeline.config import StepConfig
from pipeline.engine.predict import moment_bytes

MASTER_BYTES = 4
"""Of each trained weight, in whichever form: the engine's masters are fp32 numbers."""


def checkpoint_bytes(
    config: StepConfig, machine: Machine, origins: Mapping[str, str]
) -> int | None:
    """Bytes of a checkpoint once the step has evaluated; None where a model is not known.

    Frozen weights, which are written once, and what is not a weight are left out. `origins` are as
    for `models_of`.
    """
    workload = config.workload(machine.world)
    trained = [
        model
        for model in models_of(workload, origins, has_gpu=machine.has_gpu)
        if model.trained is not None
    ]
    if not all(model.module is not None for model in trained):
        return None
    total = 0.0
    for model in trained:
        assert model.trained is not None
        use = workload.model(model.role)
        copies = use.keeps_average + use.keeps_best
        each = MASTER_BYTES * (1 + copies) + float(moment_bytes(model.trained.optim))
        total += each * sum(numel for numel in _trained_weights(model))
    return int(total)


def _trained_weights(model: CountedModel) -> Iterator[int]:
    return (each.numel() for each in model.present.parameters() if each.requires_grad)
