"""Division of a model into units: the parameters gathered, reduced and freed together.

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
    """Parameters by full name in the model; a tied parameter has its first name only."""

    beside_blocks: bool = False
    """True for parameters outside the blocks of a model with blocks."""

    kind: Kind = "block"


def find_units(model: nn.Module) -> list[UnitParams]:
    """The units of `model` in the order of its modules, the root unit last.

    Blocks are the layers that `transformers` can checkpoint, else the entries of the longest
    `nn.ModuleList` of one class. Blocks don't nest: the outermost is used. A parameter that a block
    shares with anything outside belongs to the root.
    """
    blocks = _outermost(model, _blocks(model))
    # Include duplicate names: a module shared with the outside can't be freed with its block.
    of_block = {id(block): name for name, block in blocks.items()}
    prefixes = {
        f"{name}.": of_block[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in of_block
    }
    places: dict[nn.Parameter, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        heads = (name[: dot + 1] for dot, sign in enumerate(name) if sign == ".")
        owner = next((prefixes[head] for head in heads if head in prefixes), ROOT)
        places.setdefault(param, set()).add(owner)
    units: list[UnitParams] = []
    owned: set[nn.Parameter] = set()
    for name, block in blocks.items():
        params = {
            f"{name}.{leaf}": param
            for leaf, param in block.named_parameters()
            if places[param] == {name}
        }
        if params:
            units.append(UnitParams(name, block, params))
            owned |= set(params.values())
    rest = {name: param for name, param in model.named_parameters() if param not in owned}
    return [*units, UnitParams(ROOT, model, rest, beside_blocks=bool(units), kind="root")]


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    named.pop("")
    layers: dict[str, nn.Module] = {
        name: each for name, each in named.items() if isinstance(each, GradientCheckpointingLayer)
    }
    return layers or _longest_list(named)


def _longest_list(named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    lists = [
        (name, each)
        for name, each in named.items()
        if isinstance(each, nn.ModuleList) and len({type(child) for child in each}) == 1
    ]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    return {f"{name}.{index}": child for index, child in enumerate(longest)}


def _outermost(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks that are not inside other blocks, each under one name."""
    inner = {
        id(child) for block in blocks.values() for child in block.modules() if child is not block
    }
    seen: set[int] = {id(model)}
    kept: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        if id(block) not in inner and id(block) not in seen:
            seen.add(id(block))
            kept[name] = block
    return kept


class UsesHead(nn.Module):
    """Calls a function that uses a model's output layer without calling the layer's module."""

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call the function; the matrix may be among its arguments."""
        return function(*args, **kwargs)


def engine_units(model: nn.Module) -> list[UnitParams]:
    """`find_units`, with embedding and output layer as separate units, in order of use.

    The embedding comes before the blocks and the output layer after them, each only if the model
    has blocks, calls the module, and uses its parameters nowhere else; the root unit is last.
    """
    *blocks, root = find_units(model)
    found = _matrices(model) if blocks else {}
    names = {module: name for name, module in model.named_modules() if module in found.values()}
    uses: dict[Tensor, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        uses[param] = uses.get(param, 0) + 1
    apart: dict[Kind, UnitParams] = {}
    for kind, module in found.items():
        own = set(module.parameters())
        params = {name: param for name, param in root.params.items() if param in own}
        if len(params) == len(own) and all(uses[param] == 1 for param in own):
            apart[kind] = UnitParams(names[module], module, params, beside_blocks=True, kind=kind)
    taken = {name for unit in apart.values() for name in unit.params}
    rest = {name: param for name, param in root.params.items() if name not in taken}
    first = [apart["embedding"]] if "embedding" in apart else []
    last = [apart["head"]] if "head" in apart else []
    return [*first, *blocks, *last, replace(root, params=rest)]


def _matrices(model: nn.Module) -> dict[Kind, nn.Module]:
    """A language model's embedding and output layer, if they are plain, separate modules."""
    plain = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if plain is None:
        return {}
    try:
        embedding = plain.get_input_embeddings()
    except NotImplementedError:
        return {}
    head = cast("nn.Module | None", plain.get_output_embeddings())
    found: dict[Kind, nn.Module] = {}
    # From the config: a pipeline stage may hold only one of two tied modules.
    is_tied = head is not None and plain.config.get_text_config().tie_word_embeddings
    if isinstance(embedding, nn.Embedding) and not is_tied:
        found["embedding"] = embedding
    if type(head) is nn.Linear and not is_tied:  # excludes adapters, which compute more
        found["head"] = head
    return found
