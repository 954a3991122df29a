"""What variants of LoRA need beside plain adapters: to be made, to begin, and to be saved."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.config import AdapterVariant, LoraConfig
from pipeline.engine.stored import copy_elements
from pipeline.errors import ConfigError
from pipeline.models.block_codes import parts_of, unpack
from pipeline.models.dora import Dora
from pipeline.models.layer_variant import is_turned, variant_in
from pipeline.models.principal import Principal, widened
from pipeline.models.quantized import QuantizedLinear
from pipeline.parallel.mesh import current_mesh


def vary(model: PeftModel, config: LoraConfig) -> None:
    """Have plain adapters be those of a variant.

    peft could, but needs whole weights for it, and overwrites them for two of the variants.

    Raises:
        ConfigError: a layer is not for the variant.
    """
    settings = adapter_settings(model)
    layers = _adapted_layers(model)
    _require_fit({name.removeprefix("base_model.model."): each for name, each in layers}, config)
    for _, layer in layers:
        if config.variant == "dora":
            layer.lora_variant["default"] = Dora(layer)
            settings.use_dora = True
        elif config.variant in ("pissa", "olora"):
            layer.lora_variant["default"] = Principal(config.variant, layer)
            settings.init_lora_weights = config.variant


def _require_fit(layers: Mapping[str, LoraLayer], config: LoraConfig) -> None:
    """Return if a variant can adapt the layers.

    Raises:
        ConfigError: one is not linear, or has fewer rows or columns than the adapter needs.
    """
    sizes: dict[str, int] = {}
    for name, layer in layers.items():
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear | Conv1D):
            raise ConfigError(
                f"lora.variant {config.variant} adapts linear layers, and {name} is not a linear"
                f" layer ({type(base).__name__}); leave it out of lora.targets, or set"
                " lora.variant lora"
            )
        sizes[name] = min(base.weight.shape)
    smallest = min(sizes, key=lambda name: sizes[name])
    if config.variant != "dora" and config.rank > sizes[smallest]:
        raise ConfigError(
            f"lora.variant {config.variant} begins as lora.rank {config.rank} parts of each weight,"
            f" and {smallest} has {sizes[smallest]}; set lora.rank {sizes[smallest]} or less"
        )


@torch.no_grad()
def start_adapters(model: PeftModel) -> None:
    """Have each adapter begin as its variant begins with the weight that its layer has now.

    All processes call it, once the base is quantized if it is to be and before the model is cut.
    The layers are divided among them, and each process gets the others' numbers: processors differ
    in how they round.
    """
    adapted = [(layer, variant_in(layer)) for _, layer in _adapted_layers(model)]
    started = [(layer, variant) for layer, variant in adapted if variant is not None]
    world = current_mesh().world
    for layer, variant in world.share(started):
        variant.start(layer, whole_weight(layer))
    for number, (layer, variant) in enumerate(started):
        for tensor in variant.started(layer):
            world.broadcast(tensor, source=number % world.size)


def whole_weight(layer: LoraLayer) -> Float[Tensor, "out in"]:
    """The weight that a linear layer multiplies with, in fp32, wherever its numbers are."""
    base = layer.get_base_layer()
    if isinstance(base, QuantizedLinear):
        codes = {name: _elements(base.get_parameter(name)) for name in parts_of(base.form)}
        weight = unpack(codes, base.shape, base.form, base.dtype)
    else:
        stored = base.get_parameter("weight")
        weight = _elements(stored).view(stored.shape)
    return (weight.T if is_turned(layer) else weight).float()


def _elements(param: nn.Parameter) -> Tensor:
    out = torch.empty(param.numel(), dtype=param.dtype, device=param.device)
    copy_elements(param, 0, out)
    return out


def _adapted_layers(model: PeftModel) -> list[tuple[str, LoraLayer]]:
    named = model.named_modules()
    return [(name, module) for name, module in named if isinstance(module, LoraLayer)]


def adapter_settings(model: PeftModel) -> PeftLoraConfig:
    """The settings of the adapter that learns, as peft has them."""
    return cast("PeftLoraConfig", model.peft_config["default"])


def variant_of(settings: PeftLoraConfig) -> AdapterVariant:
    """What our settings call the adapter that peft's describe."""
    if settings.use_dora:
        return "dora"
    kind = settings.init_lora_weights
    if kind in ("pissa", "olora"):
        return cast("AdapterVariant", kind)
    return "rslora" if settings.use_rslora else "lora"


def save_adapter(
    model: PeftModel, tensors: dict[str, Tensor], directory: Path
) -> dict[str, Tensor]:
    """Write an adapter as plain peft loads it on the untouched base; the tensors that it has there.

    `tensors` are its own by their names in the model. Those of PiSSA and OLoRA become a plain
    adapter of twice the rank.
    """
    settings = adapter_settings(model)
    if variant_of(settings) in ("pissa", "olora"):
        settings = copy.copy(settings)
        settings.init_lora_weights = True
        settings.r, settings.lora_alpha = 2 * settings.r, 2 * settings.lora_alpha
        tensors = _widened(tensors)
    own = model.peft_config["default"]
    model.peft_config["default"] = settings
    try:
        model.save_pretrained(str(directory), state_dict=tensors)
    finally:
        model.peft_config["default"] = own
    return tensors


def _widened(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    plain = {name: each for name, each in tensors.items() if ".lora_" not in name}
    for stem in (name.partition(".lora_A.")[0] for name in tensors if ".lora_A." in name):
        halves = [f"{stem}.lora_{half}.default.weight" for half in "AB"]
        first = [f"{stem}.lora_start_{half}.default" for half in "AB"]
        wide = widened(*(tensors[name] for name in (*halves, *first)))
        plain |= dict(zip(halves, wide, strict=True))
    return plain
