"""A pipeline stage: the user's model without the blocks of other stages.

The model's own `forward` runs on every stage and builds masks, positions and rotary tables. Blocks
of other stages pass their input through, except that on later stages the first block returns the
hidden states received from the previous stage. Later stages' embeddings return zeros of the right
shape; earlier stages' norm and head do nothing. Parameters keep their names from the full model. A
small copy of the model shows which modules come before and after the blocks, and whether the blocks
exchange more than hidden states, in which case the model can't be split.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config import Kernels
from pipeline.data.batches import TokenBatch
from pipeline.models.adapters.quantized import num_weights
from pipeline.models.forward.forward import (
    SCORE_HEAD,
    Backbone,
    base_model,
    ragged_inputs,
    ragged_layout,
    require_context,
)
from pipeline.models.forward.packing import Family, detect_batching, small_hidden_states
from pipeline.models.hf.export import can_stream
from pipeline.models.parallel.sharding import unwrap_lora
from pipeline.parallel.device import local_device
from pipeline.parallel.schedules import balance_stages
from pipeline.system.errors import ConfigError, ModelError


class PassThrough(nn.Module):
    """Replaces a block of another stage and returns the hidden states unchanged."""

    def __init__(self, block: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        for name, value in vars(block).items():  # some models read attributes of their blocks
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        """Return the hidden states in the form of a block's output."""
        hidden = self.hidden(cast("Tensor", args[0] if args else kwargs["hidden_states"]))
        return (hidden,) if self.as_tuple else hidden

    def hidden(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states that replace the block's output."""
        return hidden_states


class StageInput(PassThrough):
    """Replaces the first block on a later stage and returns the received hidden states."""

    received: Float[Tensor, "1 N d"] | None = None
    """Hidden states for the next pass, from the previous stage."""

    def hidden(self, hidden_states: Tensor) -> Tensor:
        """Return the received hidden states, or noise when the model is only being tested."""
        received, self.received = self.received, None
        if received is not None:
            return received
        if hidden_states.is_meta:
            return torch.empty_like(hidden_states, requires_grad=torch.is_grad_enabled())
        generator = torch.Generator().manual_seed(0)
        return torch.randn(hidden_states.shape, generator=generator).to(hidden_states)


class ZeroOutput(nn.Module):
    """Replaces, on later stages, an embedding or projection of the first stage; returns zeros."""

    def __init__(self, module: nn.Module, *, is_token_table: bool) -> None:
        super().__init__()
        is_table = isinstance(module, nn.Embedding)
        self.width = module.embedding_dim if is_table else cast("int", module.out_features)
        self.keeps_length = is_token_table or not is_table
        """Whether the output is as long as the input, rather than broadcast."""
        self.dtype = cast("Tensor", module.weight).dtype

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return zeros in the shape of the replaced module's output."""
        inputs = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        tokens = inputs if inputs.dtype.is_floating_point is False else inputs[..., 0]
        shape = tokens.shape if self.keeps_length else (1,) * tokens.ndim
        return torch.zeros(*shape, self.width, dtype=self.dtype, device=inputs.device)


class StageModule(nn.Module):
    """A stage other than the last: maps token ids and received hidden states to hidden states."""

    def __init__(self, model: nn.Module, *, kernels: Kernels) -> None:
        super().__init__()
        self.model = model
        self.kernels: Kernels = kernels

    def forward(self, batch: TokenBatch) -> Float[Tensor, "1 N d"]:
        """Return the output of the stage's last block for a batch."""
        plain = base_model(self.model)
        require_context(plain, batch)
        inputs = ragged_inputs(batch, ragged_layout(batch, self.kernels))
        return cast("Backbone", plain.base_model)(**inputs)[0]


@dataclass(frozen=True)
class PipelineStage:
    """A process's stage of a model, and the tensors that it exchanges with other stages."""

    number: int = 0
    count: int = 1

    stage_input: StageInput | None = None
    """The module that receives the previous stage's output; None on the first stage."""

    tied: Tensor | None = None
    """The first stage's embedding weight, which is tied to the last stage's output layer."""

    tied_copy: Tensor | None = None
    """The last stage's copy of that weight, which is kept in sync with the first stage."""

    width: int = 0
    """Width of the hidden states between stages."""

    dtype: torch.dtype = torch.float32
    """Data type of the hidden states between stages."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which embeds the tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the head."""
        return self.number == self.count - 1


def build_stage(model: nn.Module, *, number: int, blocks: Sequence[int]) -> PipelineStage:
    """Remove other stages' modules from a model; `blocks` lists the number of blocks per stage.

    Raises:
        ModelError: models of its family can't be split.
    """
    plain = base_model(model)
    if not can_stream(plain):
        reason = "their files merge several parameters into one tensor"
        raise ModelError(_explain(plain.config, reason))
    if not detect_batching(plain).packed:
        raise ModelError(_explain(plain.config, "they run padded, not packed"))
    family = Family.from_model(plain)
    require_equal_outputs(family, tuple(blocks))
    return _build(plain, find_module_order(family), number=number, blocks=blocks)


def balance_blocks(model: nn.Module, stages: int) -> list[int]:
    """Return the number of blocks of each stage, chosen so that stages take about equally long.

    The time of a block, or of the output layer, is assumed to be proportional to its number of
    weights, quantized or not.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    plain = base_model(model)
    _, all_blocks = get_block_list(plain)
    if (count := len(all_blocks)) < stages:
        raise ConfigError(
            f"parallel.pp is {stages}, but the model has only {count} blocks; use at most {count}"
        )
    head = plain.get_output_embeddings()
    costs = [num_weights(block) for block in all_blocks]
    last = 0 if head is None else sum(param.numel() for param in head.parameters())
    return balance_stages(costs, stages, last=last)


def get_block_list(plain: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name of the list that contains the model's blocks, and the list.

    Raises:
        ModelError: the blocks aren't all in one list.
    """
    lists = {
        name: module
        for name, module in plain.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(block, GradientCheckpointingLayer | PassThrough) for block in module)
    }
    if len(lists) != 1:
        raise ModelError(_explain(plain.config, "their blocks are not all in one list"))
    return next(iter(lists.items()))


@dataclass(frozen=True)
class ModuleOrder:
    """Names of modules before and after a family's blocks, and whether blocks return tuples."""

    before: frozenset[str]
    after: frozenset[str]
    as_tuple: bool


@functools.cache
def find_module_order(family: Family) -> ModuleOrder:
    """Run a small copy of a family to find the modules before and after its blocks.

    Raises:
        ModelError: the order can't be determined.
    """
    model = family.copy(packed=True)
    path, blocks = get_block_list(model)
    before: set[str] = set()
    after: set[str] = set()
    are_tuples: list[bool] = []

    def record(module_name: str) -> Callable[..., None]:
        return lambda *_: (after if are_tuples else before).add(module_name)

    for name, module in model.named_modules():
        if not name.startswith(f"{path}.") and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(record(name))
    for block in blocks:
        block.register_forward_hook(lambda _m, _a, out: are_tuples.append(isinstance(out, tuple)))
    with torch.no_grad():
        small_hidden_states(model)
    if before & after:
        raise ModelError(
            _explain(model.config, f"{min(before & after)} is used before and after the blocks")
        )
    return ModuleOrder(frozenset(before), frozenset(after), as_tuple=any(are_tuples))


def _build(
    plain: PreTrainedModel, order: ModuleOrder, *, number: int, blocks: Sequence[int]
) -> PipelineStage:
    list_name, all_blocks = get_block_list(plain)
    start, end = sum(blocks[:number]), sum(blocks[: number + 1])
    stages = len(blocks)
    is_first, is_last = number == 0, number == stages - 1
    embedding = plain.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):  # such as one with an adapter
        raise ModelError(_explain(plain.config, f"their embedding is a {type(embedding).__name__}"))
    head = plain.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    width, dtype = plain.config.get_text_config().hidden_size, embedding.weight.dtype
    modules = _modules_outside_blocks(plain, order, list_name)  # before any block is removed
    stage_input = None if is_first else StageInput(all_blocks[0], as_tuple=order.as_tuple)
    for index, block in enumerate(all_blocks):
        if not start <= index < end:
            all_blocks[index] = PassThrough(block, as_tuple=order.as_tuple)
    if stage_input is not None:
        all_blocks[0] = stage_input
    tied_copy = _detach_head(cast("nn.Linear", head)) if tied and is_last and not is_first else None
    for name, module, is_before in modules:
        if not (is_first if is_before else is_last):
            is_table = module is embedding
            layer, replacement = unwrap_lora(module), nn.Identity()
            if is_before and isinstance(layer, nn.Embedding | nn.Linear):
                replacement = ZeroOutput(layer, is_token_table=is_table)
            plain.set_submodule(name, replacement)
    return PipelineStage(
        number,
        stages,
        stage_input,
        tied=embedding.weight if tied and is_first and not is_last else None,
        tied_copy=tied_copy,
        width=width,
        dtype=dtype,
    )


def _modules_outside_blocks(
    plain: PreTrainedModel, order: ModuleOrder, blocks: str
) -> list[tuple[str, nn.Module, bool]]:
    """List (name, module, whether it precedes the blocks) of all modules outside the blocks.

    Modules without parameters are omitted, and an adapter counts as part of its layer.
    """
    head = plain.get_output_embeddings()
    modules: list[tuple[str, nn.Module, bool]] = []
    adapted = ""
    for name, module in plain.named_modules():
        if name.startswith(f"{blocks}.") or (adapted and name.startswith(f"{adapted}.")):
            continue
        if unwrap_lora(module) is not module and name in order.before | order.after:
            adapted = name
        elif not any(True for _ in module.parameters(False)):
            continue
        owner = name.partition(".")[0]
        if module is head or owner == SCORE_HEAD:
            modules.append((name, module, False))
        elif name in order.before or name in order.after:
            modules.append((name, module, name in order.before))
        else:
            raise ModelError(_explain(plain.config, f"it is not clear where {name} is used"))
    return modules


def _detach_head(head: nn.Linear) -> Tensor:
    """Replace the output layer's weight with a plain tensor that the engine ignores; return it."""
    weight = head.weight
    tied_copy = weight.detach().to(local_device(), copy=True).requires_grad_(weight.requires_grad)
    del head.weight
    head.weight = tied_copy
    return tied_copy


@functools.cache
@torch.no_grad()
def require_equal_outputs(family: Family, blocks: tuple[int, ...]) -> None:
    """Check that a small copy's hidden states are bitwise identical with and without stages.

    Raises:
        ModelError: the hidden states differ.
    """
    expected = small_hidden_states(family.copy(packed=True))
    hidden: Tensor | None = None
    for number in range(len(blocks)):
        stage_model = family.copy(packed=True)
        stage = _build(stage_model, find_module_order(family), number=number, blocks=blocks)
        if stage.stage_input is not None:
            stage.stage_input.received = hidden
        hidden = small_hidden_states(stage_model)
    if hidden is None or not torch.equal(hidden, expected):
        raise ModelError(_explain(family.settings, "their blocks exchange more than hidden states"))


def _explain(settings: PreTrainedConfig, reason: str) -> str:
    return f"{settings.model_type} models can't be split: {reason}; set parallel.pp to 1"
