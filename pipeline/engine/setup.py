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
from pipeline.engine.sharding.units import UnitParams, engine_units
from pipeline.engine.zero import Unit
from pipeline.kernels.adamw import new_moments
from pipeline.parallel.group import ALONE, Group


def get_placement(config: TrainedModelConfig, device: torch.device) -> Placement:
    """Device and sharding of all states of a process."""
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
    tensor: Group = ALONE,
) -> list[Unit]:
    """Lay out all parameters in flat vectors, unit by unit, the root last.

    `tensor` is the tensor-parallel group.
    """
    disk = None
    if config.zero.offload.params == "nvme":
        assert config.zero.offload.nvme_path is not None  # checked by OffloadConfig
        disk = WeightDisk(config.zero.offload.nvme_path, comm)
    units: list[Unit] = []
    for unit in engine_units(model):
        flats = [
            FlatParams(unit.name, params, settings, comm, placement, disk)
            for (_, settings), params in group_vectors(unit, config).items()
        ]
        trained = [
            TrainedParams(flat, pool, config.optim, kernels=config.kernels, tensor=tensor)
            for flat in flats
            if flat.settings.trained
        ]
        units.append(Unit(unit.name, unit.module, flats, trained, unit.kind))
    return units


def group_vectors(
    unit: UnitParams, config: TrainedModelConfig
) -> dict[tuple[str, ParamSettings], dict[str, nn.Parameter]]:
    """The parameters of each flat vector of a unit, grouped by kind.

    Outside the blocks, if there are any, each module has separate vectors. So a pipeline stage,
    which has some of these modules, lays them out and sums their squares as a single process does.
    """
    found: dict[tuple[str, ParamSettings], dict[str, nn.Parameter]] = {}
    for name, param in unit.params.items():
        owner = name.rpartition(".")[0] if unit.beside_blocks else ""
        settings = param_settings(name, param, config)
        found.setdefault((owner, settings), {})[name] = param
    return found


def store_on_disk(
    groups: Sequence[TrainedParams], config: TrainedModelConfig, rank: int
) -> StreamedState | None:
    """Masters and moments in a file if they are offloaded to NVMe, else None.

    Raises:
        ConfigError: the disk lacks space.
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
        state.put(index, (master, *new_moments(master, moments).values()))
    return state


def param_settings(name: str, param: nn.Parameter, config: TrainedModelConfig) -> ParamSettings:
    """The settings by which a parameter is assigned to a vector of its unit.

    One-dimensional parameters (biases and norms) have no weight decay. They are stored at the end
    of the others' vector, so that each unit is gathered and reduced at once.
    """
    if not param.requires_grad:
        return ParamSettings(
            param.dtype, trained=False, lr=0.0, weight_decay=0.0, role=get_role(param)
        )
    return ParamSettings(
        param.dtype,
        trained=True,
        lr=config.rate[1] if ".lora_" in name else config.optim.lr,
        weight_decay=config.optim.weight_decay,
        role=get_role(param),
    )
