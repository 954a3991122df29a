"""The processes that can generate together."""

from collections.abc import Mapping
from dataclasses import replace

from pipeline.budget.models import model_of
from pipeline.config import StepConfig, TrainedModelConfig

SIZES = (1, 2, 4, 8)
"""Processes that are tried: those of one machine, whose links are fast."""


def tp_sizes(
    config: StepConfig, *, processes: int, origins: Mapping[str, str] | None = None
) -> tuple[int, ...]:
    """Values that `inference_tp_size` may have in a step, the smallest first.

    They divide the processes of a machine, and layers, heads and heads of keys of the actor; 1
    alone where its family can't be divided or isn't known, and none in a step without the setting.

    Args:
        config: the step's settings.
        processes: of one machine.
        origins: for a directory that an earlier step has yet to fill, the model it starts from.
    """
    if not hasattr(config, "inference_tp_size"):
        return ()
    actor: TrainedModelConfig = getattr(config, "actor")  # noqa: B009
    # Adapters are merged into what is divided, and codes are dequantized there.
    plain = replace(actor, lora=None, quantize="none", double_quant=False)
    found = model_of(plain, origins or {})
    sizes = [size for size in SIZES[1:] if processes % size == 0]
    if found.module is None or not sizes:
        return (1,)
    from pipeline.models.sharding import can_shard

    return (1, *(size for size in sizes if can_shard(found.plain, size)))
