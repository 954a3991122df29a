"""The identity train_batch_size = micro-batch size x accumulation steps x processes."""

from dataclasses import dataclass

from pipeline.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """A step's sequences: `train == micro * accumulation * world`."""

    train: int
    """Sequences of one optimizer step over all processes (train_batch_size)."""

    micro: int
    """Sequences of one forward pass of one process (train_micro_batch_size_per_gpu)."""

    accumulation: int
    """Forward passes of one process in an optimizer step (gradient_accumulation_steps)."""


def resolve_batch_sizes(
    train: int | None, micro: int | None, accumulation: int | None, *, world: int
) -> BatchSizes:
    """The three sizes from those that are given, as DeepSpeed fills them in.

    Any two imply the third. `train` alone is shared out without accumulation; `micro` alone does
    not accumulate either.

    Raises:
        ConfigError: a size is below 1, `train` is not a multiple, the three contradict each other,
            or neither `train` nor `micro` is given.
    """
    named = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    for name, size in named.items():
        if size is not None and size < 1:
            raise ConfigError(f"{name} must be above 0, got {size}")
    if train is None:
        if micro is None:
            raise ConfigError(
                f"gradient_accumulation_steps {accumulation} alone gives no batch size; add"
                " train_batch_size or train_micro_batch_size_per_gpu"
            )
        accumulation = accumulation or 1
        return BatchSizes(micro * accumulation * world, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world)
        if train != micro * accumulation * world:
            raise _indivisible(train, "no whole number", accumulation, world)
    elif accumulation is None:
        accumulation = train // (micro * world)
        if train != micro * accumulation * world:
            raise _indivisible(train, micro, "no whole number", world)
    if train != micro * accumulation * world:
        raise ConfigError(
            f"train_batch_size {train} is not {_product(micro, accumulation, world)}, which is"
            f" {micro * accumulation * world}; drop one of the three and it follows from the others"
        )
    return BatchSizes(train, micro, accumulation)


def _product(micro: int | str, accumulation: int | str, world: int) -> str:
    processes = "1 process" if world == 1 else f"{world} processes"
    return (
        f"train_micro_batch_size_per_gpu ({micro}) x gradient_accumulation_steps ({accumulation})"
        f" x {processes}"
    )


def _indivisible(train: int, micro: int | str, accumulation: int | str, world: int) -> ConfigError:
    return ConfigError(
        f"train_batch_size {train} can't be shared out as {_product(micro, accumulation, world)};"
        " choose a batch size that divides"
    )
