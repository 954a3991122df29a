"""Sequence parallelism: between the divided parts of blocks each process has tokens of its own.

Korthikanti et al. 2022, section 4.2.2. Norms, residual sums and whatever else a block does token by
token run on 1/tp of the row. The tokens of all are gathered where a module begins whose
layers are divided by outputs, and what processes find in layers that are divided by inputs is
summed, each for its own tokens. The first block takes its share of what the embeddings give, and
the last one gives all tokens back: outside of the blocks, the model's code sees nothing of it.

Of what is gathered a process keeps its own share for the way back, and gathers it once more there;
where a block is run again anyway it keeps nothing.

A row of any length is shared out, filled with zeros at its end, which never reach a divided layer.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from pipeline.models.attention import KEY_BLOCK, Ragged
from pipeline.models.packing import how_to_run
from pipeline.models.sharding import layer_of
from pipeline.models.stages import block_list
from pipeline.parallel.gathered_product import Reading, gathered_product
from pipeline.parallel.group import Group
from pipeline.parallel.tokens import gather_tokens, share_tokens, sum_to_tokens, whole_tokens
from pipeline.system.errors import ModelError

MIXING = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in which tokens meet in attention alone."""


@dataclass(frozen=True)
class _Row:
    """What the divided layers of a module read."""

    share: Tensor
    whole: weakref.ref[Tensor]
    reading: Reading


class OwnTokens:
    """Has the blocks of a model work on this process's tokens; its methods are their hooks.

    Args:
        plain: the model, whose blocks are in one list.
        group: the processes that compute each layer together.
    """

    def __init__(self, plain: PreTrainedModel, group: Group) -> None:
        self._plain, self._group = plain, group
        self._list, blocks = block_list(plain)
        self._fed: set[str] = set()
        self._tokens = 0
        """Of the row, in the block that is at work."""
        self._runs_again = False
        """Whether that block is recomputed in the backward pass."""
        self._row: _Row | None = None
        for block in blocks:
            block.register_forward_pre_hook(self._begin, with_kwargs=True)
            block.register_forward_hook(self._end)

    def works_on(self, name: str) -> bool:
        """Whether a module is in one of the blocks."""
        return name.startswith(f"{self._list}.")

    def feed(self, name: str) -> None:
        """Have a layer that is divided by outputs read the tokens of all processes.

        They are gathered for the module that it is in, whose code may look at the row's length; a
        block itself goes on with its own.
        """
        owner = name.rpartition(".")[0]
        place = name if owner.rpartition(".")[0] == self._list else owner
        if place not in self._fed:
            self._fed.add(place)
            module = self._plain.get_submodule(place)
            module.register_forward_pre_hook(self._gather, with_kwargs=True)
        module = self._plain.get_submodule(name)
        readers = [layer_of(module)]
        if isinstance(module, LoraLayer):
            readers.append(cast("nn.Module", module.lora_A["default"]))
        for layer in readers:
            if isinstance(layer, nn.Linear | Conv1D):
                plain = layer.forward
                object.__setattr__(layer, "forward", partial(self._product, layer, plain))

    def sum(self, output: Tensor) -> Tensor:
        """The sum, for this process's tokens, of what a layer that is divided by inputs gives."""
        return sum_to_tokens(output, self._group)

    def _begin(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden, layout = _hidden(args, kwargs), kwargs.get("ragged")
        self._runs_again = block.training and getattr(block, "gradient_checkpointing", False)
        if block is self._present()[0]:
            self._tokens = hidden.shape[-2]
            return _replaced(args, kwargs, share_tokens(hidden, self._group))
        is_row = isinstance(layout, Ragged)
        self._tokens = sum(layout.lengths) if is_row else hidden.shape[-2] * self._group.size
        return None

    def _end(self, block: nn.Module, _args: object, output: Any) -> Any:  # noqa: ANN401
        self._row = None
        hidden = output[0] if isinstance(output, tuple) else output
        if self._runs_again and hidden.requires_grad:
            hidden.register_hook(partial(self._begin_again, self._tokens))
        if block is not self._present()[-1]:
            return output
        whole = whole_tokens(hidden, self._tokens, self._group)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _begin_again(self, tokens: int, _gradient: Tensor) -> None:
        """A block is about to be recomputed, without its own hooks, perhaps among other rows."""
        self._tokens, self._runs_again = tokens, True

    def _gather(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        share = _hidden(args, kwargs)
        whole = gather_tokens(share, self._tokens, self._group)
        if torch.is_grad_enabled() and not self._runs_again:
            self._row = _Row(share, weakref.ref(whole), Reading(self._tokens, self._group))
        return _replaced(args, kwargs, whole)

    def _product(
        self, layer: nn.Linear | Conv1D, plain: Callable[[Tensor], Tensor], values: Tensor
    ) -> Tensor:
        """What a layer gives, without keeping the tokens of others."""
        row = self._row
        if row is None or values is not row.whole():
            return plain(values)
        turned = isinstance(layer, Conv1D)
        return gathered_product(
            values, row.share, layer.weight, layer.bias, row.reading, transposed=turned
        )

    def _present(self) -> list[nn.Module]:
        """The blocks that this stage of a pipeline has."""
        blocks = cast("nn.ModuleList", self._plain.get_submodule(self._list))
        return [each for each in blocks if isinstance(each, GradientCheckpointingLayer)]


def why_not(plain: PreTrainedModel, size: int) -> str | None:
    """Why each of so many processes can't have tokens of its own between layers; None if it can."""
    kind = plain.config.model_type
    settings = plain.config.get_text_config()
    others = sorted(set(getattr(settings, "layer_types", None) or ()) - set(MIXING))
    if others:
        return f"{kind} models have layers of the kind {others[0]}, in which tokens may meet"
    if getattr(plain, "_is_stateful", False):
        return f"layers of {kind} models carry a state from token to token"
    if KEY_BLOCK % size and not how_to_run(plain).packed:
        return (
            f"{kind} models run padded to multiples of {KEY_BLOCK} tokens, which {size} doesn't"
            " divide"
        )
    try:
        block_list(plain)
    except ModelError:
        return f"{kind} models have their blocks in several lists"
    return None


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a module of a block reads, by whichever name."""
    return args[0] if args else kwargs["hidden_states"]


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
