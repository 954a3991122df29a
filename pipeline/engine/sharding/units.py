"""Division of a model into units: parameters that are gathered, reduced and freed together.

A unit is a transformer block, the embedding, the output layer, or the root: everything else. The
embedding is used before all blocks and the output layer after them, so neither needs to be
gathered while a block computes. A tied matrix stays in the root.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

ROOT = "root"
"""Name of the unit with the parameters outside blocks, embedding and output layer."""

Kind = Literal["block", "embedding", "head", "root"]
"""Kind of a unit; a model has many blocks, and at most one unit of each other kind."""


@dataclass(frozen=True)
class UnitParams:
    """The parameters owned by one unit."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]
    """Parameters by full name in the model; a tied parameter is listed under its first name."""

    outside_blocks: bool = False
    """True for parameters outside the blocks of a model with blocks."""

    kind: Kind = "block"


def find_units(model: nn.Module) -> list[UnitParams]:
    """Find the units of `model`, in the order of its modules but with the root unit last.

    Blocks are the layers that `transformers` can checkpoint or, if there are none, the entries of
    the longest `nn.ModuleList` of one class. Of nested blocks only the outermost are used. A
    parameter that a block shares with anything outside belongs to the root.
    """
    blocks = _find_outermost(model, _find_blocks(model))
    # Include duplicate names: a module shared with the outside can't be freed with its block.
    block_names = {id(block): name for name, block in blocks.items()}
    block_by_prefix = {
        f"{name}.": block_names[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in block_names
    }
    owners: dict[nn.Parameter, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        prefixes = (name[: i + 1] for i, char in enumerate(name) if char == ".")
        owner = next((block_by_prefix[p] for p in prefixes if p in block_by_prefix), ROOT)
        owners.setdefault(param, set()).add(owner)
    units: list[UnitParams] = []
    owned: set[nn.Parameter] = set()
    for name, block in blocks.items():
        params = {
            f"{name}.{leaf}": param
            for leaf, param in block.named_parameters()
            if owners[param] == {name}
        }
        if params:
            units.append(UnitParams(name, block, params))
            owned |= set(params.values())
    rest = {name: param for name, param in model.named_parameters() if param not in owned}
    return [*units, UnitParams(ROOT, model, rest, outside_blocks=bool(units), kind="root")]


def _find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    modules.pop("")
    layers: dict[str, nn.Module] = {
        name: m for name, m in modules.items() if isinstance(m, GradientCheckpointingLayer)
    }
    return layers or _find_longest_list(modules)


def _find_longest_list(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    lists = [
        (name, module)
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    return {f"{name}.{index}": child for index, child in enumerate(longest)}


def _find_outermost(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Select the blocks that are not inside other blocks, each under one name."""
    inner = {
        id(child) for block in blocks.values() for child in block.modules() if child is not block
    }
    seen: set[int] = {id(model)}
    outermost: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        if id(block) not in inner and id(block) not in seen:
            seen.add(id(block))
            outermost[name] = block
    return outermost


class UsesHead(nn.Module):
    """Calls a function that uses a model's output layer without calling the layer's module."""

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call the function; the layer's weight may be among its arguments."""
        return function(*args, **kwargs)


def get_engine_units(model: nn.Module) -> list[UnitParams]:
    """Find the units, with the embedding and output layer as separate units, in order of use.

    The embedding comes before the blocks and the output layer after them, each only if the model
    has blocks, calls the module, and uses its parameters nowhere else; the root unit is last.
    """
    *blocks, root = find_units(model)
    layers = _find_vocabulary_layers(model) if blocks else {}
    names = {module: name for name, module in model.named_modules() if module in layers.values()}
    uses: dict[Tensor, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        uses[param] = uses.get(param, 0) + 1
    separate: dict[Kind, UnitParams] = {}
    for kind, module in layers.items():
        own_params = set(module.parameters())
        params = {name: param for name, param in root.params.items() if param in own_params}
        if len(params) == len(own_params) and all(uses[param] == 1 for param in own_params):
            name = names[module]
            separate[kind] = UnitParams(name, module, params, outside_blocks=True, kind=kind)
    separate_names = {name for unit in separate.values() for name in unit.params}
    rest = {name: param for name, param in root.params.items() if name not in separate_names}
    first, last = ([separate[k]] if k in separate else [] for k in ("embedding", "head"))
    return [*first, *blocks, *last, replace(root, params=rest)]


def _find_vocabulary_layers(model: nn.Module) -> dict[Kind, nn.Module]:
    """Find a language model's embedding and output layer if they are plain, separate modules."""
    pretrained = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if pretrained is None:
        return {}
    try:
        embedding = pretrained.get_input_embeddings()
    except NotImplementedError:
        return {}
    head = cast("nn.Module | None", pretrained.get_output_embeddings())
    layers: dict[Kind, nn.Module] = {}
    # From the config: a pipeline stage may hold only one of two tied modules.
    is_tied = head is not None and pretrained.config.get_text_config().tie_word_embeddings
    if isinstance(embedding, nn.Embedding) and not is_tied:
        layers["embedding"] = embedding
    if type(head) is nn.Linear and not is_tied:  # excludes adapters, which compute more
        layers["head"] = head
    return layers
