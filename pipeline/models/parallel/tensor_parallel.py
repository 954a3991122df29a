"""Tensor-parallel training: each process has a shard of every layer of a model.

The user's model runs unmodified on the process's heads and widths. The input of a column-parallel
layer (sharded by outputs) passes through `copy_to_group`, once for all layers with the same input,
such as queries, keys and values; the output of a row-parallel layer (sharded by inputs) passes
through `sum_over_group`, and its bias is added to the sum. Norms are replicated, and so are the
embedding and output layers unless `forward/vocab_parallel.py` shards them.

Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): norms, residual sums and other
operations on single tokens run on 1/tp of the row. The row is all-gathered before a module with
column-parallel layers, and the outputs of row-parallel layers are reduce-scattered. The first block
takes its shard of the embeddings' output, and the last one gathers all tokens. A row of any length
is padded with zeros before it is sharded; the zeros never reach a sharded layer.
"""

import functools
import logging
from collections.abc import Callable
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
from pipeline.models.adapters.quantized import LinearLayer, QuantizedLinear
from pipeline.models.forward.attention import KEY_BLOCK, Ragged
from pipeline.models.forward.forward import base_model
from pipeline.models.forward.packing import Family, detect_batching, small_hidden_states
from pipeline.models.forward.vocab_parallel import row_shard, shard_table, sharded_tables
from pipeline.models.parallel.sharding import STYLES, TensorShards, can_shard, match, unwrap_lora
from pipeline.models.parallel.stages import get_block_list
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
from pipeline.system.errors import ModelError, is_out_of_memory, one_line, require

logger = logging.getLogger(__name__)

ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in which only attention mixes tokens."""


class SequenceParallel:
    """Runs a model's blocks, which must be in one list, on this process's tokens.

    Hooks split the tokens and gather them.
    """

    def __init__(self, plain: PreTrainedModel, group: Group) -> None:
        self._plain, self._group = plain, group
        self._list, blocks = get_block_list(plain)
        self.prefix = f"{self._list}."
        """Prefix of the names of modules in the blocks."""
        self._gathering: set[str] = set()
        self._num_tokens = 0
        """Number of tokens in the current block's row."""
        for block in blocks:
            block.register_forward_pre_hook(self._before_block, with_kwargs=True)
            block.register_forward_hook(self._after_block)

    def gather_input(self, name: str) -> None:
        """Gather the tokens of all processes as the input of a column-parallel layer.

        They are gathered before the layer's parent module, because its code may use the number of
        tokens; the rest of the block has only this process's tokens.
        """
        owner = name.rpartition(".")[0]
        target = name if owner.rpartition(".")[0] == self._list else owner
        if target not in self._gathering:
            self._gathering.add(target)
            module = self._plain.get_submodule(target)
            module.register_forward_pre_hook(self._gather, with_kwargs=True)

    def _before_block(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden, layout = _get_hidden(args, kwargs), kwargs.get("ragged")
        if block is self._local_blocks()[0]:
            self._num_tokens = hidden.shape[-2]
            return _replace_hidden(args, kwargs, split_tokens(hidden, self._group))
        is_row = isinstance(layout, Ragged)
        self._num_tokens = sum(layout.lengths) if is_row else hidden.shape[-2] * self._group.size
        return None

    def _after_block(self, block: nn.Module, _args: object, output: Any) -> Any:  # noqa: ANN401
        hidden = output[0] if isinstance(output, tuple) else output
        is_recomputed = block.training and getattr(block, "gradient_checkpointing", False)
        if is_recomputed and hidden.requires_grad:
            hidden.register_hook(partial(self._before_recomputation, self._num_tokens))
        if block is not self._local_blocks()[-1]:
            return output
        full = join_tokens(hidden, self._num_tokens, self._group)
        return (full, *output[1:]) if isinstance(output, tuple) else full

    def _before_recomputation(self, num_tokens: int, _gradient: Tensor) -> None:
        """Prepare for the recomputation of a block, which runs without its hooks."""
        self._num_tokens = num_tokens

    def _gather(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        full = gather_tokens(_get_hidden(args, kwargs), self._num_tokens, self._group)
        return _replace_hidden(args, kwargs, full)

    def _local_blocks(self) -> list[nn.Module]:
        """Return the blocks of this pipeline stage."""
        blocks = cast("nn.ModuleList", self._plain.get_submodule(self._list))
        return [block for block in blocks if isinstance(block, GradientCheckpointingLayer)]


def unsupported_reason(plain: PreTrainedModel, size: int) -> str | None:
    """Return the reason why tokens can't be sharded over `size` processes, or None if they can."""
    family = plain.config.model_type
    settings = plain.config.get_text_config()
    others = sorted(set(getattr(settings, "layer_types", None) or ()) - set(ATTENTION_TYPES))
    if others:
        return f"{family} models have layers of type {others[0]}, which may mix tokens"
    if getattr(plain, "_is_stateful", False):
        return f"layers of {family} models carry state between tokens"
    if KEY_BLOCK % size and not detect_batching(plain).packed:
        return (
            f"{family} models are padded to multiples of {KEY_BLOCK} tokens, and {size} doesn't"
            f" divide {KEY_BLOCK}"
        )
    try:
        get_block_list(plain)
    except ModelError:
        return f"{family} models don't have all their blocks in one list"
    return None


def _get_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states passed to a module of a block, positionally or by name."""
    return args[0] if args else kwargs["hidden_states"]


def _replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


TOLERANCE = 1e-3
"""Maximum relative difference in fp32; it would be about 1 if an all-reduce were missing."""

NOISE = 1e-6
"""Rounding error, relative to the full gradient's norm; key biases have no other gradient."""


def find_mismatch(
    model: PreTrainedModel, group: Group, *, shards_tables: bool, sequence: bool
) -> str | None:
    """Compare a small sharded model of a family with a full one; return a problem, or None.

    All processes of the group must call this and get the same result. `model` is a full one;
    `shards_tables` and `sequence` are true if the embedding and output layers, and the hidden
    states, are sharded.
    """
    family, packed = Family.from_model(model, heads=2 * group.size), detect_batching(model).packed
    full, sharded = (family.copy(packed=packed).to(local_device()) for _ in range(2))  # pyrefly: ignore[bad-argument-type]
    try:
        tables = sharded_tables(sharded, group.size, min_rows=0) if shards_tables else []
        shard_model(sharded, group, tables, sequence=sequence)
        expected, output = small_hidden_states(full), small_hidden_states(sharded)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        for hidden in (expected, output):
            (hidden * weights.to(hidden)).sum().backward()
        reason = _find_different_gradient(full, sharded, group)
        if not _is_close(output.detach(), expected.detach()):
            reason = "the sharded output differs"
    except Exception as error:  # the family's code may raise anything
        if is_out_of_memory(error):
            raise  # maybe on this process alone, while others wait for it in a collective
        reason = f"their code failed ({one_line(error)})"
    return next(filter(None, group.gather_objects(reason)), None)


def _find_different_gradient(full: nn.Module, sharded: nn.Module, group: Group) -> str | None:
    """Report the first parameter whose all-reduced gradient differs from the full copy's."""
    norms = [param.grad.norm() for param in full.parameters() if param.grad is not None]
    noise = NOISE * torch.stack(norms).norm()
    names: list[str] = []
    for (name, param), other in zip(sharded.named_parameters(), full.parameters(), strict=True):
        # Zeros replace missing gradients, as in the engine: every process runs all collectives.
        local, full_gradient = (
            torch.zeros_like(p) if p.grad is None else p.grad for p in (param, other)
        )
        shard, span = get_shard(param), (param, 0, slice(0, param.numel()))
        gradient = reduce_gradient(local.flatten(), get_role(param), group, [span])
        expected = full_gradient if shard is None else shard.spec.extract(full_gradient)
        if not _is_close(gradient.view(param.shape), expected, noise):
            names.append(name)
    return f"the gradient of {names[0]} differs" if names else None


def _is_close(actual: Tensor, expected: Tensor, noise: Tensor | float = 0.0) -> bool:
    return bool((actual - expected).norm() <= TOLERANCE * expected.norm() + noise)


SETTING = "parallel.tp"

PARTIAL = "replicated_with_grad_allreduce"
"""Style in the plans of `transformers` of replicated weights that apply to local heads only."""


def shard_layers(model: nn.Module, group: Group, *, sequence: bool) -> None:
    """Keep only this process's shard of each layer of a model; all processes must call this.

    Parameters keep their names. If weights are memory-mapped, only the shards are read. With
    `sequence`, hidden states between layers are sharded by tokens if the family allows it.

    Raises:
        ConfigError: the layers of the model can't be sharded this way.
        ModelError: models of its family can't be trained this way.
    """
    if group.size == 1:
        return
    plain = base_model(model)
    _list_shards(plain, group)  # report its errors before those of a copy
    tables = sharded_tables(plain, group.size)
    mismatch = functools.partial(find_mismatch, plain, group, shards_tables=len(tables) > 0)
    if sequence:
        reason = unsupported_reason(plain, group.size) or mismatch(sequence=True)
        if reason is not None:
            logger.info("hidden states between layers are replicated, not sharded: %s", reason)
        sequence = reason is None
    if not sequence:
        reason = mismatch(sequence=False)
        if reason is not None:
            raise ModelError(
                f"{plain.config.model_type} models don't support tensor parallelism: {reason}; "
                f"set parallel.tp to 1"
            )
    shard_model(plain, group, tables, sequence=sequence)


def shard_if_possible(model: PreTrainedModel, group: Group, *, sequence: bool) -> None:
    """Apply `shard_layers` to a frozen model, or leave it unchanged if it can't be sharded.

    Unlike a trained model, a frozen model may be quantized, or an encoder without a plan.
    """
    if can_shard(model, group.size):
        shard_layers(model, group, sequence=sequence)
    else:
        logger.info(
            "layers of %s models can't be sharded over %d processes: each process has a full copy",
            model.config.model_type,
            group.size,
        )


def shard_model(
    plain: PreTrainedModel, group: Group, tables: list[nn.Module], *, sequence: bool
) -> None:
    """Shard the layers of a model, and its `tables`, without the checks of `shard_layers`."""
    shards = _list_shards(plain, group)
    _mark_partial(plain, shards, sequence=sequence)
    _shard_modules(plain, shards, sequence=sequence)
    _shard_tables(tables, group)


def shard_for_plan(model: nn.Module, size: int, *, sequence: bool) -> None:
    """Shard a model on the meta device over `size` processes, to check that it is possible.

    Raises:
        ConfigError: the layers of the model can't be sharded this way.
    """
    plain, group = base_model(model), Group(0, tuple(range(size)))
    shards_tokens = sequence and unsupported_reason(plain, size) is None
    shard_model(plain, group, sharded_tables(plain, size), sequence=shards_tokens)


def _mark_partial(plain: PreTrainedModel, shards: TensorShards, *, sequence: bool) -> None:
    """Mark the replicated weights for which each process computes only a partial gradient.

    These are the weights that, according to the family's plan, apply only to a process's heads; or
    with `sequence`, all replicated weights and adapters of the blocks, which are applied only to
    local tokens or heads.
    """
    prefix = f"{get_block_list(plain)[0]}." if sequence else ""
    for name, param in plain.named_parameters():
        style = match(shards.plan.styles, name.rpartition(".")[0])
        if name.startswith(prefix) if sequence else style == PARTIAL:
            mark_partial(param)


def _list_shards(plain: PreTrainedModel, group: Group) -> TensorShards:
    return TensorShards(plain, group, setting=SETTING, shards_head=False)


def _shard_modules(plain: PreTrainedModel, shards: TensorShards, *, sequence: bool) -> None:
    group, shared_inputs = shards.tp_group, dict[str, _SharedInput]()
    runner = SequenceParallel(plain, group) if sequence else None
    for name, style_name in shards.styles.items():
        module, style = plain.get_submodule(name), STYLES[style_name]
        bias = _shard_layer(shards, name, module)
        if style.splits_input:
            module.register_forward_pre_hook(
                lambda _module, args: (split_over_group(args[0], group),)
            )
        if style.gathers_output:
            module.register_forward_hook(lambda *inputs: join_over_group(inputs[-1], group))  # pyrefly: ignore[bad-argument-type]
        block_runner = runner if runner is not None and name.startswith(runner.prefix) else None
        if style.is_colwise and block_runner is not None:
            block_runner.gather_input(name)
        elif style.is_colwise:
            owner = name.rpartition(".")[0]
            shared_inputs.setdefault(owner, _SharedInput(group)).add_layer(module)
        else:
            fn = sum_over_group if block_runner is None else reduce_scatter_tokens
            module.register_forward_hook(_sum_hook(partial(fn, group=group), bias))
    shards.set_local_sizes()


def _shard_tables(tables: list[nn.Module], group: Group) -> None:
    """Keep this process's rows of the embedding and output layers; tied layers share them."""
    replaced = dict[int, nn.Parameter]()
    for module in tables:
        weight = cast("nn.Parameter", module.weight)
        rows, key = weight.shape[0], id(weight)
        specs = tuple(row_shard(module, rank, group.size) for rank in range(group.size))
        if key in replaced:
            setattr(module, "weight", replaced[key])  # noqa: B010  # inferred as a Tensor
        else:
            _set_shard(module, "weight", specs, group)
            replaced[key] = module.get_parameter("weight")
        if getattr(module, "bias", None) is not None:
            _set_shard(module, "bias", specs, group)
        shard_table(module, rows, group)


def _shard_layer(shards: TensorShards, name: str, module: nn.Module) -> nn.Module | None:
    """Keep this process's shard of a layer and its adapter.

    Return a row-parallel layer with a bias, which the layer no longer adds: it must be added once,
    after the sum over processes. Return None for any other layer.
    """
    layer = cast("LinearLayer", unwrap_lora(module))
    is_colwise = STYLES[shards.styles[name]].is_colwise
    _shard_parameter(layer, "weight", shards, name)
    has_bias = layer.bias is not None
    if has_bias and is_colwise:
        _shard_parameter(layer, "bias", shards, name)
    elif has_bias:
        object.__setattr__(layer, "forward", functools.partial(_matmul, layer))
    if isinstance(module, LoraLayer):  # each process has a partial gradient of the other matrix
        sharded, replicated = ("lora_B", "lora_A") if is_colwise else ("lora_A", "lora_B")
        matrix = module.get_submodule(f"{sharded}.default")
        _shard_parameter(cast("nn.Linear", matrix), "weight", shards, f"{name}.{sharded}.default")
        mark_partial(module.get_parameter(f"{replicated}.default.weight"))
    return layer if has_bias and not is_colwise else None


def _shard_parameter(layer: LinearLayer, leaf: str, shards: TensorShards, name: str) -> None:
    require(
        not isinstance(layer, QuantizedLinear),
        "parallel.tp can't shard quantized weights; set parallel.tp to 1, or quantize to none",
    )
    shape = layer.get_parameter(leaf).shape
    candidates = [shards.spec(name, leaf, shape, rank=rank) for rank in range(shards.size)]
    specs = tuple(spec for spec in candidates if spec is not None)
    _set_shard(layer, leaf, specs, shards.tp_group)


def _set_shard(layer: nn.Module, leaf: str, specs: tuple[ShardSpec, ...], group: Group) -> None:
    """Replace a layer's parameter with this process's shard of it."""
    shape = layer.get_parameter(leaf).shape
    replace_by_shard(layer, leaf, ParamShard(shape, specs, group.rank))


def _matmul(layer: LinearLayer, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
    """Return the output of a layer without its bias."""
    return values @ layer.weight if isinstance(layer, Conv1D) else F.linear(values, layer.weight)


class _SharedInput:
    """Column-parallel layers of one module with the same input.

    Their input passes through `copy_to_group` once, so that its gradients are added locally before
    they are summed over the processes.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._layers = self._remaining = 0
        self._input: Tensor | None = None
        self._copied: Tensor | None = None

    def add_layer(self, layer: nn.Module) -> None:
        """Make a layer read the copied input."""
        layer.register_forward_pre_hook(self._copy)
        self._layers += 1

    def _copy(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs, *rest = args
        if inputs is not self._input or self._copied is None:
            self._input, self._remaining = inputs, self._layers
            self._copied = copy_to_group(inputs, self._group)
        copied = self._copied
        self._remaining -= 1
        if self._remaining == 0:
            self._input = self._copied = None
        return (copied, *rest)


def _sum_hook(fn: Callable[[Tensor], Tensor], biased: nn.Module | None) -> Callable[..., Tensor]:
    """Return a hook that sums a layer's outputs by `fn`, then adds the bias of `biased`."""

    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        summed = fn(output)
        return summed if biased is None else summed + biased.get_parameter("bias")

    return hook
