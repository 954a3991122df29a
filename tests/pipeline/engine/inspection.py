"""Access to an engine's state for tests."""

from torch import Tensor

from pipeline.engine.engine import Engine
from pipeline.engine.zero import ZeroModel


def get_gradients(engine: Engine) -> dict[str, Tensor]:
    """Return the accumulated gradients by name, fp32, times the loss scale; on all ranks."""
    engine.zero.check_ready()
    engine.zero.reduce()
    gradients: dict[str, Tensor] = {}
    for group in engine.groups:
        full = group._all_gather(group._gradient())
        gradients |= {name: view.clone() for name, view in group.flat.unflatten(full).items()}
        group.gradients.pool.release(full)
    return gradients


def count_gathered_bytes(zero: ZeroModel) -> int:
    """Return the bytes of the weights that are gathered at present and will be freed."""
    flats = [flat for unit in zero.units for flat in unit.flats if flat.placement.shard_params]
    return sum(flat.full.untyped_storage().nbytes() for flat in flats)
