"""Recording of PyTorch operators."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorRecorder(TorchDispatchMode):
    """Records operators, except views, with at least `numel` elements of inputs and outputs."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.names = numel, list[str]()
        self.num_bytes = Counter[str]()
        """Bytes of inputs and outputs by operator name."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        if sum(tensor.numel() for tensor in tensors) >= self.numel and not func.is_view:
            self.names.append(name := func.overloadpacket.__name__)
            self.num_bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return result
