"""The embedded model with adapters that change what it says."""

import torch
from peft import PeftModel

from pipeline.config import FrozenModelConfig, LoraConfig
from pipeline.models.load import load_causal_lm
from pipeline.models.lora import add_lora

EMBEDDED = FrozenModelConfig(path="embedded")


def with_random_adapter(kind: LoraConfig, *, seed: int) -> PeftModel:
    """The model with such an adapter, whose B is random rather than zero."""
    base = load_causal_lm(EMBEDDED, device=torch.device("cpu"))
    model = add_lora(base, kind, task="causal", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1, generator=generator)
    return model
