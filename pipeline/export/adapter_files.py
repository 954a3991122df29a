"""An adapter in peft's form: its settings and tensors, and what they make of a base."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.models.directory import ADAPTER

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
LENGTHS = "lora_magnitude_vector"
"""What peft's files call the lengths that DoRA learns."""

REWRITES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which peft takes the adapter's start off the base."""


class Adapter:
    """A directory with a LoRA adapter.

    Raises:
        ModelError: a file is missing, damaged, or of another kind than LoRA.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not (directory / WEIGHTS).is_file():
            raise ModelError(f"{directory} holds {ADAPTER} and no {WEIGHTS}; copy it there")
        try:
            settings = json.loads((directory / ADAPTER).read_text(encoding="utf-8"))
            self.tensors = load_file(directory / WEIGHTS)
        except Exception as error:  # noqa: BLE001  # safetensors raises any kind
            raise ModelError(f"the adapter in {directory} can't be read: {error}") from None
        if not self.tensors:
            raise ModelError(f"{directory} holds an adapter without tensors")
        self.settings: dict[str, Any] = settings
        if settings.get("peft_type") != "LORA":
            raise ModelError(
                f"{directory} holds an adapter of the kind {settings.get('peft_type')}, which has"
                " no export here; merge it with peft's merge_and_unload"
            )
        kind = str(settings.get("init_lora_weights"))
        if kind.startswith(REWRITES):
            raise ModelError(
                f"{directory} holds an adapter ({kind}) of what its start has left of the base, not"
                " of the base; save it with peft's path_initial_model_for_weight_conversion, which"
                " makes a plain adapter of it"
            )

    @property
    def base(self) -> str | None:
        """The model that it says it changes."""
        return self.settings.get("base_model_name_or_path") or None

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """W + alpha / r * B A in fp32 (Hu et al. 2021, 4.1), rounded once to the dtype of W.

        Of DoRA its rows have the adapter's lengths (Liu et al. 2024, equation 5). W itself where
        the adapter has nothing for it, the adapter's tensor where that replaces W.
        """
        stem = PREFIX + name.removesuffix(".weight")
        down, up = (self.tensors.get(f"{stem}.lora_{each}.weight") for each in "AB")
        if down is not None and up is not None:
            update = self._scale(name) * (up.float() @ down.float())
            is_turned = bool(self.settings.get("fan_in_fan_out"))
            total = weight.float() + (update.t() if is_turned else update)
            lengths = self.tensors.get(f"{stem}.{LENGTHS}")
            if lengths is not None:
                inputs = 0 if is_turned else 1
                factor = lengths.float() / torch.linalg.vector_norm(total, dim=inputs)
                total *= factor.unsqueeze(inputs)
            return total.to(weight.dtype)
        own = self.tensors.get(PREFIX + name)
        return weight if own is None else own.to(weight.dtype)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the weight that the adapter was made for; None where it has none for it."""
        stem = PREFIX + name.removesuffix(".weight")
        down, up = (self.tensors.get(f"{stem}.lora_{each}.weight") for each in "AB")
        if down is None or up is None:
            own = self.tensors.get(PREFIX + name)
            return None if own is None else tuple(own.shape)
        ends = (up.shape[0], down.shape[1])
        return ends[::-1] if self.settings.get("fan_in_fan_out") else ends

    def uses(self, name: str) -> set[str]:
        """The adapter's tensors that `merged` takes for a weight."""
        stem = PREFIX + name.removesuffix(".weight")
        ends = ("lora_A.weight", "lora_B.weight", LENGTHS)
        mine = {PREFIX + name, *(f"{stem}.{end}" for end in ends)}
        return mine & self.tensors.keys()

    def _scale(self, name: str) -> float:
        if self.settings.get("rank_pattern") or self.settings.get("alpha_pattern"):
            raise ModelError(
                f"{self.directory} has ranks or alphas of their own for some layers ({name} may be"
                " one); merge it with peft's merge_and_unload"
            )
        rank, alpha = self.settings["r"], self.settings["lora_alpha"]
        return alpha / (rank**0.5 if self.settings.get("use_rslora") else rank)
