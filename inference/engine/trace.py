"""A computation recorded once as calls into fixed memory, and repeated without what made it.

What a CUDA graph is to a GPU: the Python of a model's modules, most of a small model's step, runs
once; then its operators run alone, each into the memory that it had the first time. Views are made
once, what depends on no input is computed once, and what nobody reads is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from inference.engine.replay import ReplayError

Replay = Callable[[], object]
"""Does a call again, on what its memory holds now."""

TRANSFERS = {"_to_copy", "copy_", "to"}
"""Operators that may copy between the host and a device, and wait for it."""

COPIES = {"_to_copy", "clone", "contiguous", "to"}
"""Operators whose new tensor is the old one, perhaps in another format."""

TO_PYTHON = {"tolist", "numpy", "__array__"}
"""Methods of tensors that hand numbers to Python beside the dispatcher, which sees `item`."""

UNREPLAYABLE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)


@dataclass(frozen=True)
class Call:
    """One operator, with the tensors that it read and made."""

    operator: Any
    """PyTorch's operator; None for what was computed outside of it."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: tuple[Tensor, ...]
    """Its results, in the memory that they keep."""

    repeat: Replay | None = None
    """How to do it again, of what was computed outside."""

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return self.operator.overloadpacket.__name__ if self.operator else "outside"

    def read(self) -> Iterator[Tensor]:
        """The tensors among the arguments."""
        return tensors_in((*self.args, *self.kwargs.values()))

    def changed(self) -> Iterator[Tensor]:
        """The arguments that are written to."""
        if self.operator is None or not self.operator._schema.is_mutable:  # noqa: SLF001
            return
        schema = self.operator._schema.arguments  # noqa: SLF001
        for place, argument in enumerate(schema):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = (
                    self.args[place]
                    if place < len(self.args)
                    else self.kwargs.get(str(argument.name))
                )
                yield from tensors_in((value,))


Substitute = Callable[[Call], Replay | None]
"""Gives another way to compute a recorded call, or None where there is none."""


class NoNumbers(TorchFunctionMode):
    """Inside it, no number of a tensor is handed to Python."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Called by PyTorch for each function and method of tensors."""
        if func.__name__ in TO_PYTHON:
            raise ReplayError(f"{func.__name__} hands numbers to Python")
        return func(*args, **(kwargs or {}))


class TraceRecorder(TorchDispatchMode):
    """Inside it, operators are computed as always, and recorded.

    Everything they make is kept, so that no two results share memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._outside = False
        self._no_numbers = NoNumbers()

    def __enter__(self) -> "TraceRecorder":
        super().__enter__()
        self._no_numbers.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:  # noqa: ANN401
        self._no_numbers.__exit__(*raised)
        super().__exit__(*raised)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Called by PyTorch for each operator."""
        result = func(*args, **(kwargs or {}))
        if not self._outside:
            made = tuple(tensors_in((result,)))
            call = Call(func, args, kwargs or {}, made)
            require_replayable(call, result)
            self.calls.append(call)
        return result

    def outside(self, compute: Callable[[Tensor | None], Tensor], read: Sequence[Tensor]) -> Tensor:
        """What `compute` returns, recorded as one call.

        Args:
            compute: is given the memory for the result when it is repeated, None the first time.
            read: the tensors that it reads, besides what is its own business.
        """
        self._outside = True
        try:
            # Of its own memory: a result may be a view of what another call will change.
            result = compute(None).clone()
        finally:
            self._outside = False
        self.calls.append(Call(None, read, {}, (result,), partial(compute, result)))
        return result


def require_replayable(call: Call, result: object) -> None:
    """Refuse a call whose repetition would not do what the modules' Python does.

    Raises:
        ReplayError: it draws random numbers, Python or a shape depends on the numbers it read, or
            it copies between the host and a device.
    """
    if isinstance(result, (bool, int, float)) and any(True for _ in call.read()):
        raise ReplayError(f"{call.name} hands a number to Python")
    if any(tag in call.operator.tags for tag in UNREPLAYABLE) and not is_view(call):
        raise ReplayError(
            f"{call.name} gives what can't be repeated"
        )  # but dropout that drops nothing
    if torch.Tag.dynamic_output_shape in call.operator.tags and (
        call.name != "index" or any(index.dtype == torch.bool for index in call.read())
    ):
        raise ReplayError(f"the size of what {call.name} gives depends on numbers")
    if call.name in TRANSFERS and len({each.device for each in (*call.read(), *call.made)}) > 1:
        raise ReplayError(f"{call.name} copies between the host and a device")


class OperatorTrace:
    """What a `TraceRecorder` wrote down, ready to be repeated.

    Args:
        calls: the computation.
        inputs: tensors whose numbers will be others; all others that the calls read but neither
            make nor change are constants.
        result: what the computation is for.
    """

    def __init__(self, calls: Sequence[Call], inputs: Sequence[Tensor], result: Tensor) -> None:
        self.result: Shaped[Tensor, "..."] = result
        # Each call leads to memory that it holds.
        self._kept = needed(varying(calls, inputs), result)
        self._replays = [replay_of(call) for call in self._kept]

    def __len__(self) -> int:
        """Calls that a repetition makes."""
        return len(self._replays)

    def substitute(self, other: Substitute) -> None:
        """Have calls done in other ways, where there are."""
        self._replays = [
            other(call) or repeat for call, repeat in zip(self._kept, self._replays, strict=True)
        ]

    def replay(self) -> Tensor:
        """Compute again, from what the inputs hold; the result lies where it always does."""
        for repeat in self._replays:
            repeat()
        return self.result


def varying(calls: Sequence[Call], inputs: Sequence[Tensor]) -> list[Call]:
    """The calls whose outcome may differ the next time, views left out."""
    alive = {memory(tensor) for tensor in inputs}
    alive |= {memory(tensor) for call in calls for tensor in call.changed()}
    kept: list[Call] = []
    for call in calls:
        if is_view(call):
            continue  # it is there for good
        sources = {memory(tensor) for tensor in call.read()}
        targets = {memory(tensor) for tensor in call.made}
        changes = any(True for _ in call.changed())
        if call.operator is None or changes or sources & alive or targets & alive:
            kept.append(call)
            alive |= targets
    return kept


def is_view(call: Call) -> bool:
    """Whether a call made nothing but other ways to look at what was there."""
    if call.operator is None or any(True for _ in call.changed()):
        return False
    return {memory(tensor) for tensor in call.made} <= {memory(tensor) for tensor in call.read()}


def needed(calls: Sequence[Call], result: Tensor) -> list[Call]:
    """The calls that the result comes from, and those that change what was there before."""
    wanted = {memory(result)}
    kept: list[Call] = []
    for call in reversed(calls):
        changes = any(True for _ in call.changed())
        if changes or wanted & {memory(tensor) for tensor in call.made}:
            kept.append(call)
            wanted |= {memory(tensor) for tensor in call.read()}
    return kept[::-1]


def replay_of(call: Call) -> Replay:
    """A way to do a call again that gives the same bits, the leanest there is."""
    if call.repeat is not None:
        return call.repeat
    # Bindings of PyTorch's own are leaner than the dispatcher's.
    is_plain = call.operator.namespace == "aten" and "out" not in call.kwargs
    if any(True for _ in call.changed()):
        method = getattr(Tensor, call.name, None) if is_plain else None
        return partial(method or call.operator, *call.args, **call.kwargs)
    if len(call.made) == 1 and is_plain:
        (made,) = call.made
        source = next(call.read(), None)
        if call.name in COPIES and source is not None and source.shape == made.shape:
            return partial(made.copy_, source)
        places = (torch, vars(torch._C)["_nn"])  # noqa: SLF001
        bindings = (getattr(place, call.name, None) for place in places)
        function = next((each for each in bindings if each is not None), call.operator)
        repeat = partial(function, *call.args, **call.kwargs, out=made)
        if torch.Tag.pointwise in call.operator.tags or call.name in WITH_OUT:
            try:
                repeat()  # by the way: the memory's numbers are of no use any more
            except (TypeError, RuntimeError, NotImplementedError):
                pass
            else:
                return repeat
    return partial(_again, call)


WITH_OUT = {"mm", "bmm", "addmm", "baddbmm", "mean", "sum", "cat", "index_select", "embedding"}
"""Operators besides the elementwise ones that write into an argument, in the same way."""


def _again(call: Call) -> None:
    results = call.operator(*call.args, **call.kwargs)
    for made, result in zip(call.made, tensors_in((results,)), strict=True):
        made.copy_(result)


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def memory(tensor: Tensor) -> int:
    """Which memory a tensor lies in, views as what they are of."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001
