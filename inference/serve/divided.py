"""A model that processes divide among them: each keeps its part of every layer."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from inference.weights.hash import weights_hash
from inference.weights.replica import InPlace, Replica
from pipeline.config import FrozenModelConfig
from pipeline.errors import ConfigError
from pipeline.models.load import load_causal_lm, weight_dtype
from pipeline.parallel.group import Group

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_divided(
    config: FrozenModelConfig, *, device: torch.device, seed: int, group: Group
) -> tuple[PreTrainedModel, int]:
    """This process's part of a model, on `device`, and the hash of all weights.

    The model is read into main memory whole, and let go of.

    Raises:
        ModelError: there is none, or a part of it is missing or damaged.
        ConfigError: it can't be divided among that many processes.
    """
    precision = NAMES[weight_dtype(config.precision, device)]
    whole = load_causal_lm(
        replace(config, precision=precision), device=torch.device("cpu"), seed=seed
    )
    try:
        replica = Replica(whole, shares=True, tp_group=group)
    except ConfigError as error:
        reason = str(error).replace("inference_tp_size", "--nproc-per-node")
        raise ConfigError(f"{config.path}: {reason}") from None
    replica.load(InPlace(whole))
    replica.model.to(device)  # pyright: ignore[reportArgumentType]
    return replica.model, weights_hash(whole)
