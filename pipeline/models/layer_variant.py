"""What a variant of LoRA is to the layer that it adapts."""

from abc import abstractmethod

from jaxtyping import Float
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor


class LayerVariant(LoraVariant):
    """A variant of peft's, by whose `forward` its layer answers, which also begins and merges."""

    @abstractmethod
    def start(self, layer: LoraLayer, weight: Float[Tensor, "out in"]) -> None:
        """Begin so that the layer does what it does with `weight`, its own, alone."""

    @abstractmethod
    def started(self, layer: LoraLayer) -> list[Tensor]:
        """The tensors that `start` has written."""

    @abstractmethod
    def merged(self, layer: LoraLayer, weight: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The one weight that does what the layer does, in fp32, in memory of its own.

        `weight` is the layer's, as it stores it.
        """


def variant_in(layer: LoraLayer) -> LayerVariant | None:
    """The variant that a layer's adapter is; None where it is a plain one."""
    variant = layer.lora_variant.get("default")
    assert variant is None or isinstance(variant, LayerVariant)  # peft makes none of its own here
    return variant


def is_turned(layer: LoraLayer) -> bool:
    """Whether a layer stores its weight as (in, out), as GPT-2's do."""
    return bool(getattr(layer, "fan_in_fan_out", False))
