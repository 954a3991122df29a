"""Optimizer from a DeepSpeed file."""

from typing import Any

from pipeline.config.deepspeed.schedule import schedule_settings
from pipeline.config.deepspeed.values import Values

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "AdamW": ("betas", "eps", "amsgrad"),
    "Adam": ("betas", "eps", "amsgrad"),
    "Adagrad": ("eps", "lr_decay", "initial_accumulator_value"),
    "Adadelta": ("eps", "rho"),
    "Adamax": ("betas", "eps"),
    "ASGD": ("lambd", "alpha", "t0"),
    "NAdam": ("betas", "eps", "momentum_decay", "decoupled_weight_decay"),
    "RAdam": ("betas", "eps", "decoupled_weight_decay"),
    "Rprop": ("etas", "step_sizes"),
    "RMSprop": ("eps", "alpha", "momentum", "centered"),
    "SGD": ("momentum", "dampening", "nesterov"),
}
"""torch's element-wise optimizers and their parameters besides lr and weight_decay."""

_ONE_BIT = "compresses gradients into an approximation; use AdamW"
_MATRIX = "updates whole matrices, which sharded flat vectors don't have; use AdamW"
_LAYER = "needs the norm of each layer, which sharded flat vectors don't have; use AdamW"
_MUP = "scales the learning rate by width; use AdamW or SGD with a learning rate of your own"
REFUSED_OPTIMIZERS = {
    "OneBitAdam": _ONE_BIT,
    "ZeroOneAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
    "Lamb": _LAYER,
    "Muon": _MATRIX,
    "Adafactor": _MATRIX,
    "LBFGS": _MATRIX,
    "SparseAdam": "is for sparse gradients, which language models here don't have; use AdamW",
    "Lion": "is not one of torch's optimizers; use AdamW",
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
}

_FIXED_PARAMS = {
    "torch_adam": None,
    "fused": None,
    "foreach": None,
    "capturable": None,
    "set_grad_none": None,
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "maximize": False,
    "differentiable": False,
}
"""Parameters that choose an implementation (None: any value is the same here), or that have one
value only."""


def optim_settings(values: Values) -> dict[str, Any]:
    """`optim.*`, as far as the file sets them."""
    settings = _optimizer(values) if values.under("optimizer") else {}
    own = settings.get("optim.max_grad_norm")
    clip = values.number("gradient_clipping", "optim.max_grad_norm")
    if clip is not None and own not in (None, clip):
        raise values.error(
            "gradient_clipping",
            f"is {clip:g}, but optimizer.params.max_grad_norm is {own:g}; keep one",
        )
    if clip is not None or own is not None:
        settings["optim.max_grad_norm"] = (own if clip is None else clip) or None
    return settings | schedule_settings(values, lr=settings.get("optim.lr"))


def _optimizer(values: Values) -> dict[str, Any]:
    given = values.text("optimizer.type")
    if values.is_auto("optimizer.type"):
        return {}  # listed with the others that nothing resolves
    if given is None:
        raise values.error("optimizer", 'needs a type, such as "AdamW"')
    name = _optimizer_name(values, given)
    settings: dict[str, Any] = {"optim.name": name}
    rest: dict[str, Any] = {}
    for key in values.under("optimizer.params"):
        param = key.removeprefix("optimizer.params.")
        if param in ("lr", "weight_decay") or (
            param in ("betas", "eps") and param in OPTIMIZERS[name]
        ):
            settings[f"optim.{param}"] = _own_field(values, key, param)
        elif param == "max_grad_norm":
            settings["optim.max_grad_norm"] = values.number(key, "optim.max_grad_norm")
        elif param in OPTIMIZERS[name]:
            rest[param] = values.raw(key)
        else:
            _check_fixed(values, key, param, name)
    if rest:
        settings["optim.params"] = rest
    return {key: value for key, value in settings.items() if value is not None}


def _optimizer_name(values: Values, given: str) -> str:
    """The optimizer's name in torch; DeepSpeed's Adam is AdamW unless `adam_w_mode` is off."""
    for name, reason in REFUSED_OPTIMIZERS.items():
        if given.lower() == name.lower():
            raise values.error("optimizer.type", f"is {given}, which {reason}")
    name = values.one_of("optimizer.type", given, OPTIMIZERS, "an optimizer")
    decoupled = values.flag("optimizer.params.adam_w_mode") is not False
    return "AdamW" if name == "Adam" and decoupled else name


def _own_field(values: Values, key: str, param: str) -> object:
    ours = f"optim.{param}"
    return values.pair(key, ours) if param == "betas" else values.number(key, ours)


def _check_fixed(values: Values, key: str, param: str, name: str) -> None:
    """Raise unless the parameter changes nothing."""
    if param == "adam_w_mode" and name in ("Adam", "AdamW"):
        return
    if param not in _FIXED_PARAMS:
        known = ("lr", "weight_decay", "max_grad_norm", *OPTIMIZERS[name])
        raise values.not_a_parameter(key, name, known)
    fixed = _FIXED_PARAMS[param]
    if fixed is not None and values.flag(key) is not fixed:
        raise values.error(key, f"can only be {str(fixed).lower()} here; remove it")
