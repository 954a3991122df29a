"""The tensors in a module's output, on which the engine registers its hooks."""

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.system.errors import ConfigError

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def tensors_in(output: object) -> list[Tensor]:
    """The tensors in tuples, lists, dictionaries and model outputs of `transformers`."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def without_views(output: object) -> object:
    """The output with copies in place of views that autograd backpropagates through.

    A hook on a view is lost when the view is changed in place.
    """

    def replaced(leaf: object) -> object:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view()  # noqa: SLF001
        return leaf.clone() if is_view and isinstance(leaf, Tensor) else leaf

    return tree_map(replaced, output)


def check_output(block: str, output: object) -> None:
    """Raise if a block returns an object in which no tensor can be found.

    Raises:
        ConfigError: its weights would be freed before its backward pass.
    """
    for leaf in tree_leaves(output):
        if not isinstance(leaf, (*PLAIN, Tensor)):
            raise ConfigError(
                f"{block} returns a {type(leaf).__qualname__}, in which the engine finds no tensor:"
                " have it return tensors, in tuples or dictionaries"
            )
