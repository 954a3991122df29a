"""LoRA adapters over a model that is in memory once.

Each lies in modules of its own that share the model's weights, and computes what training
computed: Wx + s B(Ax), the adapter in fp32 (Hu et al. 2021, 4.1).
"""

import copy
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.models.finite import require_finite
from pipeline.models.load import errors_only


def with_adapter(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Modules of their own that share the weights of `base`, with an adapter in them.

    Raises:
        ModelError: it can't be loaded, or its weights are not finite.
    """
    shared = {id(param): param for param in base.parameters()}
    model = copy.deepcopy(base, shared)
    try:
        with errors_only():
            PeftModel.from_pretrained(model, str(adapter))
    except Exception as error:  # peft raises any kind
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the adapter in {adapter} can't be loaded: {reason}") from error
    require_finite(model, str(adapter))
    return model.requires_grad_(requires_grad=False).eval()
