"""What autograd's graph tells before a backward pass."""

from collections import Counter

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def parameter_uses(loss: Tensor) -> Counter[Tensor] | None:
    """How often the graph of `loss` uses each parameter; it gets one gradient for each use.

    Returns:
        None where that can't be known: a function written in Python may backpropagate through more,
        as reentrant checkpointing does, unless it says `uses_inputs_alone`.
    """
    uses = Counter[Tensor]()
    if loss.grad_fn is None:
        return uses if not loss.requires_grad else None
    seen, ahead = {loss.grad_fn}, [loss.grad_fn]
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if isinstance(node, BackwardCFunction) and not uses_inputs_alone(node):
                return None
            variable = getattr(node, "variable", None)  # which only the end of a path has
            if variable is not None:
                uses[variable] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                ahead.append(node)
    return uses


def uses_inputs_alone(node: BackwardCFunction) -> bool:
    """Whether a function written in Python declares that it goes back to its inputs alone."""
    return getattr(node, "uses_inputs_alone", False)
