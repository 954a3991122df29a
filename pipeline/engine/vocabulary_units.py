"""The two largest matrices outside of the blocks, as units of their own.

An embedding is used before all blocks and an output matrix after them, so that neither has to be
whole while a block computes, nor its gradient. A matrix that is both stays in the root unit: it is
there at the end of a pass, where a step takes most memory, in any case.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.engine.units import Kind, UnitParams, find_units


class UsesHead(nn.Module):
    """Calls a function that uses a model's output matrix without calling the matrix's module."""

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """What the function returns; the matrix may be among its arguments."""
        return function(*args, **kwargs)


def engine_units(model: nn.Module, classes: Sequence[str] = ()) -> list[UnitParams]:
    """`find_units`, with embedding and output matrix apart, in the order in which they are used.

    The embedding comes before the blocks and the output matrix behind them, each only if the model
    has blocks, calls the module, and uses its parameters nowhere else; the root unit is last.
    """
    *blocks, root = find_units(model, classes)
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
    """A language model's embedding and output matrix, where they are plain ones of their own."""
    plain = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if plain is None:
        return {}
    try:
        embedding = plain.get_input_embeddings()
    except NotImplementedError:
        return {}
    head = cast("nn.Module | None", plain.get_output_embeddings())
    found: dict[Kind, nn.Module] = {}
    # By the settings too: a stage of a pipeline has one of two that are tied.
    is_tied = head is not None and plain.config.get_text_config().tie_word_embeddings
    if isinstance(embedding, nn.Embedding) and not is_tied:
        found["embedding"] = embedding
    if type(head) is nn.Linear and not is_tied:  # not an adapter's, which computes more
        found["head"] = head
    return found
