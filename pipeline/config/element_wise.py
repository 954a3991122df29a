"""Optimizers that may update flat pieces of the weights, and their arguments."""

import inspect
from collections.abc import Mapping
from typing import Any

from pipeline.errors import ConfigError, suggestion

ELEMENT_WISE = (
    "AdamW",
    "Adam",
    "SGD",
    "Adagrad",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
)
"""Classes of torch.optim that update every weight from its own gradient and state alone."""

NOT_ELEMENT_WISE = {
    "LBFGS": "it evaluates the loss several times in a step",
    "Muon": "it orthogonalizes whole matrices",
    "Adafactor": "it keeps statistics of the rows and columns of whole matrices",
    "SparseAdam": "it takes sparse gradients only",
    "Lamb": "it needs the norms of whole layers",
    "FusedLamb": "it needs the norms of whole layers",
    "OneBitLamb": "it needs the norms of whole layers and compresses what processes exchange",
    "OneBitAdam": "it compresses what processes exchange",
    "ZeroOneAdam": "it compresses what processes exchange",
}
"""Classes that are refused, by name, and why."""

OWN_SETTINGS = ("lr", "betas", "eps", "weight_decay")

ENGINES_OWN = ("params", "capturable", "differentiable")


def check_optimizer(name: str, params: Mapping[str, Any]) -> None:
    """Raise unless `name` is an element-wise class of torch.optim that takes `params`.

    Raises:
        ConfigError: one sentence that starts with the name of the setting.
    """
    reasons = {each.lower(): why for each, why in NOT_ELEMENT_WISE.items()}
    if name.lower() in reasons:
        raise ConfigError(
            f"optim.name can't be {name}: {reasons[name.lower()]}, and the engine updates flat"
            " pieces of the weights; use AdamW or another element-wise class of torch.optim"
        )
    if name not in ELEMENT_WISE:
        hint = suggestion(name, ELEMENT_WISE)
        raise ConfigError(f"optim.name {name} is not an element-wise class of torch.optim; {hint}")
    if params:
        _check_params(name, params)


def _check_params(name: str, params: Mapping[str, Any]) -> None:
    import torch

    optimizer_class = getattr(torch.optim, name)
    known = set(inspect.signature(optimizer_class).parameters) - {*OWN_SETTINGS, *ENGINES_OWN}
    for param in params:
        setting = f"optim.params.{param}"
        if param in OWN_SETTINGS:
            raise ConfigError(f"{setting} is a setting of its own: optim.{param}")
        if param in ENGINES_OWN:
            raise ConfigError(f"{setting} is the engine's own; leave it out")
        if param not in known:
            raise ConfigError(f"{setting} is not an argument of {name}; {suggestion(param, known)}")
    try:
        optimizer_class([torch.zeros(1, requires_grad=True)], **params)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"optim.params: torch's {name} refuses them: {error}") from None
