"""An adapter in peft's form: its settings and tensors, and what they make of a base."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.models.directory import ADAPTER

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


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
        if settings.get("peft_type") != "LORA" or settings.get("use_dora"):
            raise ModelError(
                f"{directory} holds an adapter of the kind {settings.get('peft_type')}, which has"
                " no export here; merge it with peft's merge_and_unload"
            )

    @property
    def base(self) -> str | None:
        """The model that it says it changes."""
        return self.settings.get("base_model_name_or_path") or None

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """W + alpha / r * B A in fp32 (Hu et al. 2021, 4.1), rounded once to the dtype of W.

        W itself where the adapter has nothing for it, the adapter's tensor where that replaces W.
        """
        stem = PREFIX + name.removesuffix(".weight")
        down, up = (self.tensors.get(f"{stem}.lora_{each}.weight") for each in "AB")
        if down is not None and up is not None:
            update = self._scale(name) * (up.float() @ down.float())
            turned = update.t() if self.settings.get("fan_in_fan_out") else update
            return (weight.float() + turned).to(weight.dtype)
        own = self.tensors.get(PREFIX + name)
        return weight if own is None else own.to(weight.dtype)

    def uses(self, name: str) -> set[str]:
        """The adapter's tensors that `merged` takes for a weight."""
        stem = PREFIX + name.removesuffix(".weight")
        mine = {f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", PREFIX + name}
        return mine & self.tensors.keys()

    def _scale(self, name: str) -> float:
        if self.settings.get("rank_pattern") or self.settings.get("alpha_pattern"):
            raise ModelError(
                f"{self.directory} has ranks or alphas of their own for some layers ({name} may be"
                " one); merge it with peft's merge_and_unload"
            )
        rank, alpha = self.settings["r"], self.settings["lora_alpha"]
        return alpha / (rank**0.5 if self.settings.get("use_rslora") else rank)
