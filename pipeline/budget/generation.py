"""What answering prompts takes: the replica, the keys and values, prompts that are read."""

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

from peft.tuners.lora import LoraLayer
from torch import Tensor

from pipeline.budget.models import CountedModel
from pipeline.config import Generation
from pipeline.engine.tensor_parts import part_of, whole_shape
from pipeline.models.block_codes import SCALES
from pipeline.models.forward import context_length, kv_bytes_per_token, num_key_heads
from pipeline.models.quantized import (
    LinearLayer,
    QuantizedLinear,
    quantized_layers,
    weight_shape,
)

PREFILL = 2048
"""Prompt tokens of a pass, as `inference.engine.slots` reads them."""

SLOT_BLOCK = 32
"""A slot has whole blocks of that many tokens, and one more: see `inference.engine.cache`."""

SAMPLED = 4 * 4
"""Bytes of each logit while a token is drawn: logits, log-probabilities, probabilities and their
blocks, in fp32."""


def slot_bytes(model: CountedModel, generation: Generation) -> int:
    """Keys and values of one sequence, of one of the processes that generate together."""
    longest = min(generation.prompt_length + generation.new_tokens, context_length(model.plain))
    width = -(-longest // SLOT_BLOCK) * SLOT_BLOCK + SLOT_BLOCK
    heads = max(1, num_key_heads(model.plain) // generation.tensor_parallel)
    return width * kv_bytes_per_token(model.plain, key_heads=heads)


def sampling_bytes(model: CountedModel) -> int:
    """Bytes of drawing the next token of one sequence."""
    table = model.plain.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    return SAMPLED * table.shape[0]


def replica_bytes(
    actor: CountedModel, generation: Generation, *, own: CountedModel | None = None
) -> int:
    """Copies of the weights to generate with: of what is sharded, merged, divided or quantized.

    Matrices of the blocks are divided among the processes that generate together. What is not in
    `own`, the stage of the actor that this process trains, is copied as well.
    """
    if actor.engine is None:
        return 0
    layers = {id(layer.codes): layer for layer in quantized_layers(actor.present).values()}
    adapted = [each for each in _adapted(actor) if not isinstance(each, QuantizedLinear)]
    merged = {id(layer.weight) for layer in adapted}
    trained = (actor if own is None else own).present.named_parameters()
    here, total = {name for name, _ in trained}, 0
    for unit in actor.units():
        for name, param in unit.params.items():
            layer = layers.get(id(param))
            is_matrix = layer is not None or param.ndim == 2
            divided = unit.kind == "block" and is_matrix and generation.tensor_parallel > 1
            part, size = part_of(param), generation.tensor_parallel if divided else 1
            another = size != (1 if part is None else len(part.specs))
            copied = actor.is_sharded or layer is not None or id(param) in merged or another
            copied = copied or name not in here
            if copied and not _is_beside(name):
                num_bytes = _whole_bytes(param) if layer is None else layer.whole_bytes
                total += num_bytes // size
    return total


def _whole_bytes(param: Tensor) -> int:
    """Bytes of the whole weight that a process may have a part of."""
    return whole_shape(param).numel() * param.itemsize


def _is_beside(name: str) -> bool:
    """Whether a parameter is part of an adapter, or of what a quantized weight is made of."""
    return ".lora_" in name or name.rpartition(".")[2] in SCALES


def weight_sync_bytes(actor: CountedModel, generation: Generation) -> int:
    """Most that making the replica takes for a while.

    A matrix with its adapter is added up in fp32: both, their sum and a factor. Parts of a matrix
    that generates otherwise divided are joined. At stage 3 a unit and the next one are gathered.
    """
    sizes = (weight_shape(layer).numel() for layer in _adapted(actor))
    merging = 4 * 4 * max(sizes, default=0)
    cut = {param: _whole_bytes(param) for param in actor.present.parameters()}
    for layer in quantized_layers(actor.present).values():
        cut[layer.get_parameter("codes")] = layer.whole_bytes
    for param, whole in cut.items():
        part = part_of(param)
        if part is not None and len(part.specs) != generation.tensor_parallel:
            merging = max(merging, 2 * whole)
    if not actor.is_sharded:
        return merging
    sizes = [sum(each.nbytes for each in unit.params.values()) for unit in actor.units()]
    return merging + max((one + other for one, other in pairwise(sizes)), default=sizes[0])


def _adapted(actor: CountedModel) -> Iterator[LinearLayer]:
    """The layers that have an adapter."""
    for module in actor.present.modules():
        if isinstance(module, LoraLayer):
            yield cast("LinearLayer", module.get_base_layer())
