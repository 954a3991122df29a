"""Build the engine's units from a model and its settings."""

from collections.abc import Sequence

import torch
from torch import nn

from pipeline.config import TrainedModelConfig
from pipeline.engine.comm.collectives import BufferPool, Collectives
from pipeline.engine.optimizer.trained import MOMENTS, TrainedParams
from pipeline.engine.sharding.flat import FlatParams, ParamSettings, Placement
from pipeline.engine.sharding.offload import StreamedState, TensorStore, WeightDisk
from pipeline.engine.sharding.tensor_parallel import get_role
from pipeline.engine.sharding.units import UnitParams, get_engine_units
from pipeline.engine.zero import Unit
from pipeline.kernels.adamw import new_moments
from pipeline.parallel.group import SELF_GROUP, Group


def get_placement(config: TrainedModelConfig, device: torch.device) -> Placement:
    """Return where a process keeps weights, gradients and optimizer states, and what it shards."""
    host = torch.device("cpu")
    offload = config.zero.offload
    return Placement(
        device=device,
        shard_optimizer=config.zero_stage >= 1,
        shard_params=config.zero_stage >= 3,
        optimizer_device=device if offload.optimizer == "none" else host,
        gradient_device=device if offload.gradients == "none" else host,
        param_device=device if offload.params == "none" else host,
        params_on_disk=offload.params == "nvme",
        optimizer_on_disk=offload.optimizer == "nvme",
        deterministic=config.zero.reduction == "deterministic",
    )


def build_units(
    model: nn.Module,
    config: TrainedModelConfig,
    comm: Collectives,
    pool: BufferPool,
    placement: Placement,
    tensor: Group = SELF_GROUP,
) -> list[Unit]:
    """Lay out a model's parameters in flat vectors, one unit after another, the root last.

    `tensor` is the tensor-parallel group.
    """
    disk = None
    if config.zero.offload.params == "nvme":
        assert config.zero.offload.nvme_path is not None  # checked by OffloadConfig
        disk = WeightDisk(config.zero.offload.nvme_path, comm)
    units: list[Unit] = []
    for unit in get_engine_units(model):
        flats = [
            FlatParams(unit.name, params, settings, comm, placement, disk)
            for (_, settings), params in group_params(unit, config).items()
        ]
        trained = [
            TrainedParams(flat, pool, config.optim, kernels=config.kernels, tensor=tensor)
            for flat in flats
            if flat.settings.trained
        ]
        units.append(Unit(unit.name, unit.module, flats, trained, unit.kind))
    return units


def group_params(
    unit: UnitParams, config: TrainedModelConfig
) -> dict[tuple[str, ParamSettings], dict[str, nn.Parameter]]:
    """Group the parameters of a unit by flat vector.

    Each module outside the blocks has separate vectors, so that a pipeline stage with only some of
    these modules has the same layout, and the same sums of squared gradients, as a single process.
    """
    groups: dict[tuple[str, ParamSettings], dict[str, nn.Parameter]] = {}
    for name, param in unit.params.items():
        module_name = name.rpartition(".")[0] if unit.outside_blocks else ""
        settings = get_settings(name, param, config)
        groups.setdefault((module_name, settings), {})[name] = param
    return groups


def store_on_disk(
    groups: Sequence[TrainedParams], config: TrainedModelConfig, rank: int
) -> StreamedState | None:
    """Store masters and moments in a file, if they are offloaded to NVMe, and return the file.

    Raises:
        ConfigError: the disk lacks space or is not writable.
    """
    offload = config.zero.offload
    if offload.optimizer != "nvme":
        return None
    assert offload.nvme_path is not None  # checked by OffloadConfig
    store = TensorStore(offload.nvme_path, rank=rank)
    moments = MOMENTS[config.optim.moments]
    state = StreamedState(store, [group.masters.numel for group in groups], moments)
    for index, group in enumerate(groups):
        master = group.masters.from_weights()
        state.write(index, (master, *new_moments(master, moments).values()))
    return state


def get_settings(name: str, param: nn.Parameter, config: TrainedModelConfig) -> ParamSettings:
    """Return a parameter's settings; a block's parameters with equal settings share a vector.

    One-dimensional parameters (biases and norms) have no weight decay. They are stored at the end
    of the same vector, so that a unit still needs only one collective.
    """
    dtype, role = param.dtype, get_role(param)
    if not param.requires_grad:
        return ParamSettings(dtype, trained=False, lr=0.0, weight_decay=0.0, role=role)
    lr = config.peak_lr[1] if ".lora_" in name else config.optim.lr
    decay = config.optim.weight_decay
    return ParamSettings(dtype, trained=True, lr=lr, weight_decay=decay, role=role)
