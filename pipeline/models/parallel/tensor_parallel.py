"""Tensor parallelism in training: this process has a shard of each layer of a model.

The user's model runs unmodified on the process's heads and widths. The input of a column-parallel
layer (sharded by outputs) passes through `copy_to_group`, once for all layers with the same input,
such as queries, keys and values; the output of a row-parallel layer (sharded by inputs) passes
through `sum_over_group`, and its bias is added to the sum. Norms are replicated, and so are
embedding and output layer if they are small (`forward/vocab_parallel.py`).

Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): norms, residual sums and other
operations on single tokens run on 1/tp of the row. The row is all-gathered before a module with
column-parallel layers, and the outputs of row-parallel layers are reduce-scattered. The first block
takes its shard of the embeddings' output, and the last one gathers all tokens. A row of any length
is sharded after padding it with zeros, which never reach a sharded layer.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from pipeline.engine.sharding.tensor_parallel import (
    ParamShard,
    get_role,
    get_shard,
    mark_partial,
    reduce_gradient,
    replace_by_shard,
)
from pipeline.models.adapters.quantized import LinearLayer, QuantizedLinear, weight_shape
from pipeline.models.forward.attention import KEY_BLOCK, Ragged
from pipeline.models.forward.forward import base_model
from pipeline.models.forward.packing import Family, how_to_run, small_hidden_states
from pipeline.models.forward.vocab_parallel import divide_table, divisible_tables, rows_of
from pipeline.models.parallel.sharding import STYLES, TensorShards, can_shard, get_layer, match
from pipeline.models.parallel.stages import block_list
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group
from pipeline.parallel.shards import ShardSpec
from pipeline.parallel.tensor import (
    copy_to_group,
    gather_tokens,
    join_over_group,
    join_tokens,
    reduce_scatter_tokens,
    split_over_group,
    split_tokens,
    sum_over_group,
)
from pipeline.system.errors import ModelError, one_line

logger = logging.getLogger(__name__)


MIXING = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in which only attention mixes tokens."""


class OwnTokens:
    """Runs the blocks of a model on this process's tokens; its methods are hooks.

    Args:
        plain: the model, whose blocks are in one list.
        group: the tensor-parallel group.
    """

    def __init__(self, plain: PreTrainedModel, group: Group) -> None:
        self._plain, self._group = plain, group
        self._list, blocks = block_list(plain)
        self.prefix = f"{self._list}."
        """Prefix of the names of modules in the blocks."""
        self._fed: set[str] = set()
        self._tokens = 0
        """Number of tokens in the current block's row."""
        for block in blocks:
            block.register_forward_pre_hook(self._begin, with_kwargs=True)
            block.register_forward_hook(self._end)

    def feed(self, name: str) -> None:
        """Gather the tokens of all processes as the input of a column-parallel layer.

        They are gathered for the layer's parent module, whose code may use the row's length; the
        block itself continues with its own tokens.
        """
        owner = name.rpartition(".")[0]
        place = name if owner.rpartition(".")[0] == self._list else owner
        if place not in self._fed:
            self._fed.add(place)
            module = self._plain.get_submodule(place)
            module.register_forward_pre_hook(self._gather, with_kwargs=True)

    def _begin(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden, layout = _hidden(args, kwargs), kwargs.get("ragged")
        if block is self._present()[0]:
            self._tokens = hidden.shape[-2]
            return _replaced(args, kwargs, split_tokens(hidden, self._group))
        is_row = isinstance(layout, Ragged)
        self._tokens = sum(layout.lengths) if is_row else hidden.shape[-2] * self._group.size
        return None

    def _end(self, block: nn.Module, _args: object, output: Any) -> Any:  # noqa: ANN401
        hidden = output[0] if isinstance(output, tuple) else output
        runs_again = block.training and getattr(block, "gradient_checkpointing", False)
        if runs_again and hidden.requires_grad:
            hidden.register_hook(partial(self._begin_again, self._tokens))
        if block is not self._present()[-1]:
            return output
        whole = join_tokens(hidden, self._tokens, self._group)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _begin_again(self, tokens: int, _gradient: Tensor) -> None:
        """Prepare for the recomputation of a block, which runs without its hooks."""
        self._tokens = tokens

    def _gather(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        full = gather_tokens(_hidden(args, kwargs), self._tokens, self._group)
        return _replaced(args, kwargs, full)

    def _present(self) -> list[nn.Module]:
        """The blocks of this pipeline stage."""
        blocks = cast("nn.ModuleList", self._plain.get_submodule(self._list))
        return [each for each in blocks if isinstance(each, GradientCheckpointingLayer)]


def why_not(plain: PreTrainedModel, size: int) -> str | None:
    """Return the reason why tokens can't be sharded over `size` processes; None if they can."""
    kind = plain.config.model_type
    settings = plain.config.get_text_config()
    others = sorted(set(getattr(settings, "layer_types", None) or ()) - set(MIXING))
    if others:
        return f"{kind} models have layers of type {others[0]}, which may mix tokens"
    if getattr(plain, "_is_stateful", False):
        return f"layers of {kind} models carry state between tokens"
    if KEY_BLOCK % size and not how_to_run(plain).packed:
        return (
            f"{kind} models are padded to multiples of {KEY_BLOCK} tokens, which {size} doesn't"
            " divide"
        )
    try:
        block_list(plain)
    except ModelError:
        return f"{kind} models have their blocks in several lists"
    return None


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a module of a block is given, positionally or by name."""
    return args[0] if args else kwargs["hidden_states"]


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


CLOSE = 1e-3
"""Tolerance of the relative distance in fp32, which is about 1 if a sum is missing."""

NOISE = 1e-6
"""Fraction of the gradient that may be rounding error, as for the biases of keys."""


def mismatch(
    model: PreTrainedModel, group: Group, *, shards_tables: bool, sequence: bool
) -> str | None:
    """Return the reason why a model of this family can't be trained sharded; None if it can.

    A collective of the group, with the same result on all processes.

    Args:
        model: a full model of the family.
        group: the tensor-parallel group.
        shards_tables: whether embedding and output layer are sharded.
        sequence: whether hidden states are sharded too.
    """
    family, packed = Family.of(model, heads=2 * group.size), how_to_run(model).packed
    whole, sharded = (family.copy(packed=packed).to(local_device()) for _ in range(2))  # pyrefly: ignore[bad-argument-type]
    try:
        tables = divisible_tables(sharded, group.size, least=0) if shards_tables else []
        divide(sharded, group, tables, sequence=sequence)
        expected, output = small_hidden_states(whole), small_hidden_states(sharded)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        for each in (expected, output):
            (each * weights.to(each)).sum().backward()
        reason = _different_gradient(whole, sharded, group)
        if not _close(output.detach(), expected.detach()):
            reason = "the sharded output differs"
    except Exception as error:  # noqa: BLE001  # its code may raise anything
        reason = f"their code failed ({one_line(error)})"
    reasons = [each for each in group.gather_objects(reason) if each]
    return reasons[0] if reasons else None


def _different_gradient(whole: nn.Module, sharded: nn.Module, group: Group) -> str | None:
    """The first parameter whose gradient, summed over processes, differs from the full copy's."""
    norms = [param.grad.norm() for param in whole.parameters() if param.grad is not None]
    noise = NOISE * torch.stack(norms).norm()
    names: list[str] = []
    for (name, param), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        if param.grad is None or other.grad is None:
            continue
        own, part = param.grad.flatten(), get_shard(param)
        stretch = (param, 0, slice(0, own.numel()))
        found = reduce_gradient(own, get_role(param), group, [stretch]).view(param.shape)
        if not _close(found, other.grad if part is None else part.spec.extract(other.grad), noise):
            names.append(name)
    return f"the gradient of {names[0]} differs" if names else None


def _close(found: Tensor, expected: Tensor, noise: Tensor | float = 0.0) -> bool:
    return bool((found - expected).norm() <= CLOSE * expected.norm() + noise)


SETTING = "parallel.tp"

PARTIAL = "replicated_with_grad_allreduce"
"""Entry in `transformers` plans for replicated weights used with a process's heads only."""


def cut_layers(model: nn.Module, group: Group, *, sequence: bool) -> None:
    """Keep only this process's shard of each layer of a model. A collective.

    Parameters keep their names. Only the shards of weights that are not loaded yet are read. With
    `sequence`, hidden states between layers are sharded by tokens if the family allows it.

    Raises:
        ConfigError: the layers of the model can't be sharded this way.
        ModelError: models of its family can't be trained this way.
    """
    if group.size == 1:
        return
    plain = base_model(model)
    _list_shards(plain, group)  # report its errors before those of a copy
    tables = divisible_tables(plain, group.size)
    differs = functools.partial(mismatch, plain, group, shards_tables=len(tables) > 0)
    if sequence:
        reason = why_not(plain, group.size) or differs(sequence=True)
        if reason is not None:
            logger.info("hidden states between layers are replicated, not sharded: %s", reason)
        sequence = reason is None
    if not sequence:
        reason = differs(sequence=False)
        if reason is not None:
            raise ModelError(
                f"{plain.config.model_type} models don't support tensor parallelism: {reason}; "
                f"set parallel.tp 1"
            )
    divide(plain, group, tables, sequence=sequence)


def cut_where_possible(model: PreTrainedModel, group: Group, *, sequence: bool) -> None:
    """`cut_layers` of a frozen model; a model that can't be sharded stays complete.

    It may be of another family than the trained model, such as an encoder without a plan.
    """
    if can_shard(model, group.size):
        cut_layers(model, group, sequence=sequence)
    else:
        logger.info(
            "%s models have no layers that %d processes can share: each process has a full copy",
            model.config.model_type,
            group.size,
        )


def divide(
    plain: PreTrainedModel, group: Group, tables: list[nn.Module], *, sequence: bool
) -> None:
    """`cut_layers` without a check of the family; `tables` are sharded too."""
    shards = _list_shards(plain, group)
    _mark_partial(plain, _partial_parameters(plain, shards, sequence=sequence))
    _divide(plain, shards, sequence=sequence)
    _divide_tables(tables, group)


def cut_for_plan(model: nn.Module, size: int, *, sequence: bool) -> None:
    """Keep one process's shard of each layer of a model on the meta device.

    Raises:
        ConfigError: the layers of the model can't be sharded this way.
    """
    plain, group = base_model(model), Group(0, tuple(range(size)))
    by_tokens = sequence and why_not(plain, size) is None
    divide(plain, group, divisible_tables(plain, size), sequence=by_tokens)


def _partial_parameters(
    plain: PreTrainedModel, shards: TensorShards, *, sequence: bool
) -> set[str]:
    """Names of replicated weights for which each process computes a partial gradient.

    These are the weights that the family's plan uses with a process's heads only, and with
    `sequence` all replicated weights of the blocks, which process only local tokens or heads.
    """
    names = {name.replace(".base_layer.", ".") for name, _ in plain.named_parameters()}
    if sequence:
        blocks, _ = block_list(plain)
        return {name for name in names if name.startswith(f"{blocks}.")}
    styles = shards.plan.styles
    return {name for name in names if match(styles, name.rpartition(".")[0]) == PARTIAL}


def _list_shards(plain: PreTrainedModel, group: Group) -> TensorShards:
    return TensorShards(plain, group, setting=SETTING, divides_head=False)


def _divide(plain: PreTrainedModel, shards: TensorShards, *, sequence: bool) -> None:
    group, branches = shards.tp_group, dict[str, _Branch]()
    tokens = OwnTokens(plain, group) if sequence else None
    for name, kind in shards.styles.items():
        module, style = plain.get_submodule(name), STYLES[kind]
        bias = _cut_layer(shards, name, module)
        if style.splits:
            module.register_forward_pre_hook(
                lambda _module, args: (split_over_group(args[0], group),)
            )
        if style.joins:
            module.register_forward_hook(lambda *given: join_over_group(given[-1], group))  # pyrefly: ignore[bad-argument-type]
        own = tokens if tokens is not None and name.startswith(tokens.prefix) else None
        if style.by_outputs and own is not None:
            own.feed(name)
        elif style.by_outputs:
            owner = name.rpartition(".")[0]
            branches.setdefault(owner, _Branch(group)).feeds(module)
        else:
            total = sum_over_group if own is None else reduce_scatter_tokens
            module.register_forward_hook(_summing(partial(total, group=group), bias))
    shards.narrow()


def _mark_partial(plain: PreTrainedModel, partial: set[str]) -> None:
    """Mark replicated weights, and their adapters, whose gradients are summed over processes."""
    for name, param in plain.named_parameters():
        if name.replace(".base_layer.", ".") in partial:
            mark_partial(param)
    for name, module in plain.named_modules():
        if isinstance(module, LoraLayer) and f"{name}.weight" in partial:
            for adapter in (module.lora_A, module.lora_B):
                mark_partial(cast("Tensor", adapter["default"].weight))


def _divide_tables(tables: list[nn.Module], group: Group) -> None:
    """Keep this process's rows of embedding and output layer, once if they are tied."""
    made = dict[int, nn.Parameter]()
    for module in tables:
        weight = cast("nn.Parameter", module.weight)
        rows, known = weight.shape[0], id(weight)
        specs = tuple(rows_of(module, rank, group.size) for rank in range(group.size))
        if known in made:
            setattr(module, "weight", made[known])  # noqa: B010  # inferred as a Tensor
        else:
            _replace(module, "weight", specs, group)
            made[known] = module.get_parameter("weight")
        if getattr(module, "bias", None) is not None:
            _replace(module, "bias", specs, group)
        divide_table(module, rows, group)


def _cut_layer(shards: TensorShards, name: str, module: nn.Module) -> nn.Module | None:
    """Keep this process's shard of a layer and its adapter; return the layer if it omits its bias.

    A row-parallel layer no longer adds its bias: it must be added once, after the sum.
    """
    layer = cast("LinearLayer", get_layer(module))
    by_outputs = STYLES[shards.styles[name]].by_outputs
    specs = _cut(layer, "weight", shards, name)
    has_bias = layer.bias is not None
    if has_bias and by_outputs:
        _cut(layer, "bias", shards, name)
    elif has_bias:
        object.__setattr__(layer, "forward", functools.partial(_product, layer))
    if isinstance(module, LoraLayer):
        _cut_adapter(shards, module, specs, by_outputs=by_outputs)
    return layer if has_bias and not by_outputs else None


def _cut_adapter(
    shards: TensorShards, module: LoraLayer, specs: tuple[ShardSpec, ...], *, by_outputs: bool
) -> None:
    """Keep this process's shard of an adapter, sharded like its layer by `specs`.

    One matrix is replicated; each process has a partial gradient of it.
    """
    down, up = module.lora_A["default"], module.lora_B["default"]
    cut, whole = (up, down) if by_outputs else (down, up)
    of_cut = tuple(replace(spec, dim=0 if by_outputs else 1) for spec in specs)
    _replace(cut, "weight", of_cut, shards.tp_group)
    mark_partial(cast("Tensor", whole.weight))


def _cut(layer: LinearLayer, leaf: str, shards: TensorShards, name: str) -> tuple[ShardSpec, ...]:
    is_weight = leaf == "weight"
    shape = weight_shape(layer) if is_weight else layer.get_parameter(leaf).shape
    found = [shards.spec(name, leaf, shape, rank=rank) for rank in range(shards.size)]
    specs = tuple(spec for spec in found if spec is not None)
    if isinstance(layer, QuantizedLinear) and is_weight:
        layer.cut(ParamShard(shape, specs, shards.tp_group.rank), name=f"{name}.weight")
    else:
        _replace(layer, leaf, specs, shards.tp_group)
    return specs


def _replace(layer: nn.Module, leaf: str, specs: tuple[ShardSpec, ...], group: Group) -> None:
    """Replace a layer's parameter with this process's shard of it."""
    shape = layer.get_parameter(leaf).shape
    replace_by_shard(layer, leaf, ParamShard(shape, specs, group.rank))


def _product(layer: LinearLayer, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
    """Return the output of a layer without its bias."""
    if isinstance(layer, QuantizedLinear):
        return layer.product(values)
    return values @ layer.weight if isinstance(layer, Conv1D) else F.linear(values, layer.weight)


class _Branch:
    """Column-parallel layers of one module with the same input.

    Their input passes through one copy, so that its gradients are added locally before they are
    summed over the processes.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._layers = self._left = 0
        self._given: Tensor | None = None
        self._copied: Tensor | None = None

    def feeds(self, layer: nn.Module) -> None:
        """Make a layer read the copied input."""
        layer.register_forward_pre_hook(self._copy)
        self._layers += 1

    def _copy(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given, *rest = args
        if given is not self._given or self._copied is None:
            self._given, self._left = given, self._layers
            self._copied = copy_to_group(given, self._group)
        copied = self._copied
        self._left -= 1
        if self._left == 0:
            self._given = self._copied = None
        return (copied, *rest)


def _summing(total: Callable[[Tensor], Tensor], biased: nn.Module | None) -> Callable[..., Tensor]:
    """Return a hook that sums the outputs of a layer, and adds its bias once."""

    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        summed = total(output)
        return summed if biased is None else summed + biased.get_parameter("bias")

    return hook
