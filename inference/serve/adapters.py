"""LoRA adapters over a model that is in memory once.

Each lies in modules of its own that share the model's weights, and computes what training
computed: Wx + s B(Ax), the adapter in fp32 (Hu et al. 2021, 4.1). Those of linear layers alone lie
together in one more set of modules, in which each row of a batch has its own.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxtyping import Float
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.engine.row_adapters import AdaptedLayer, LowRank, RowAdapters, scale_table
from pipeline.errors import ModelError
from pipeline.models.deferred import require_finite
from pipeline.models.load import errors_only

NAME = "default"
"""What peft calls the one adapter of a model."""


def with_adapter(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Modules of their own that share the weights of `base`, with an adapter in them.

    Raises:
        ModelError: it can't be loaded, or its weights are not finite.
    """
    model = _shared_copy(base)
    try:
        with errors_only():
            PeftModel.from_pretrained(model, str(adapter))
    except Exception as error:  # peft raises any kind
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the adapter in {adapter} can't be loaded: {reason}") from error
    require_finite(model, str(adapter))
    return model.requires_grad_(requires_grad=False).eval()


def with_adapters_by_row(
    base: PreTrainedModel, adapted: Sequence[PreTrainedModel]
) -> tuple[PreTrainedModel, RowAdapters]:
    """One more set of modules over the weights of `base`, whose rows have adapters of their own.

    The first of `adapted` is adapter 1. What they have of their own moves into the new modules, and
    they keep views of it.
    """
    rows = RowAdapters(len(adapted))
    layers = [adapted_layers(model) for model in adapted]
    model = _shared_copy(base)
    tables: dict[tuple[tuple[int, int, float], ...], Tensor] = {}
    for name in dict.fromkeys(name for each in layers for name in each):
        parts = {number: each[name] for number, each in enumerate(layers, 1) if name in each}
        kind = tuple(
            (number, len(_low_rank(each).a), each.scaling[NAME]) for number, each in parts.items()
        )
        if kind not in tables:
            tables[kind] = scale_table(kind, len(adapted)).to(base.device)
        layer = _by_row(model.get_submodule(name), parts, rows, tables[kind])
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer)
    return model, rows


def _by_row(
    base: nn.Module,
    parts: Mapping[int, LoraLayer],
    rows: RowAdapters,
    table: Float[Tensor, "K1 R"],
) -> AdaptedLayer:
    own = [_low_rank(each) for each in parts.values()]
    layer = AdaptedLayer(base, own, rows, table)
    for each, part in zip(parts.values(), layer.parts([len(each.a) for each in own]), strict=True):
        each.lora_A[NAME].weight.data, each.lora_B[NAME].weight.data = part
    return layer


def adapted_layers(model: PreTrainedModel) -> dict[str, LoraLayer]:
    """The layers that an adapter changes, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, LoraLayer)}


def _low_rank(layer: LoraLayer) -> LowRank:
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return LowRank(a.detach(), b.detach())


def _shared_copy(base: PreTrainedModel) -> PreTrainedModel:
    """Modules of their own over the same weights."""
    return copy.deepcopy(base, {id(param): param for param in base.parameters()})
