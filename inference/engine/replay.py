"""Replay decoding passes without the Python code of the modules."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from inference.engine.cache import DecodeAttention
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.decode_attention import prepare as prepare_attention
from pipeline.kernels.elementwise import prepare_norm, prepare_rotation, prepare_silu_product
from pipeline.kernels.linear import Linear, LinearKernelMode, linear, prepare
from pipeline.models.forward.attention import Layout

Pass = Callable[[Int[Tensor, "3 N"], Layout], Float[Tensor, "N V"]]
"""A forward pass of the modules over tokens, positions, and cache indices."""

Column = tuple[int, int, int]
"""A token, its position, and its cache index."""


class ReplayError(Exception):
    """A pass can't be replayed without its modules; the message is a clause that says why."""


@dataclass
class PassCounts:
    """Number of passes of a batch, by how they were computed."""

    prefill: int = 0
    """Number of passes over prompts."""

    eager: int = 0
    """Number of decoding passes computed by the model's modules."""

    replayed: int = 0
    """Number of decoding passes replayed from a trace or a graph."""

    failed_recordings: int = 0
    """Number of recordings that failed or did not reproduce the modules' logits."""


class ReplayStage(Enum):
    """What the next pass of a `ReplayedRows` does."""

    RECORD = auto()
    VERIFY = auto()
    REPLAY = auto()


class ReplayedRows(ABC):
    """Passes of a fixed size: the first is recorded, the second verified, later ones replayed.

    The first two passes return the logits that the modules computed.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.stage = ReplayStage.RECORD

    def run(self, columns: Sequence[Column], layout: DecodeAttention) -> Float[Tensor, "N V"]:
        """Return the logits of the rows, in memory that the next pass may overwrite.

        Args:
            columns: input of each row; rows beyond those of `layout` are padding.
            layout: attention of the rows.

        Raises:
            ReplayError: the modules' pass can't be replayed.
        """
        self._load_inputs(columns, layout)
        if self.stage is ReplayStage.REPLAY:
            return self._replay()
        try:
            if self.stage is ReplayStage.RECORD:
                self.stage = ReplayStage.VERIFY
                return self._record()
            self.stage = ReplayStage.REPLAY
            return self._verify(len(layout.lengths))
        except ReplayError:
            raise
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            raise ReplayError(f"{type(error).__name__}: {message}") from error

    def _verify(self, num_sequences: int) -> Float[Tensor, "N V"]:
        """Compute the pass both ways and check that they agree up to rounding.

        A recording may sum in a different order: cuBLAS chooses other kernels on a capture stream,
        and one of our kernels may replace a matrix product.
        """
        expected = self._run_modules()
        logits = expected[:num_sequences].float()
        max_difference = (self._replay()[:num_sequences].float() - logits).abs().max()
        difference = float(max_difference / logits.abs().max().clamp(min=1e-30))
        # Half of the dtype's digits: 3.5e-4 in fp32, 0.09 in bf16. `not <=` also rejects NaN.
        if not difference <= torch.finfo(expected.dtype).eps ** 0.5:
            raise ReplayError(
                "the recording does not match the modules: logits differ by up to"
                f" {difference:.1g} times the largest logit"
            )
        return expected

    @abstractmethod
    def _load_inputs(self, columns: Sequence[Column], layout: DecodeAttention) -> None:
        """Copy the inputs of the next pass into the tensors that a replay reads."""

    @abstractmethod
    def _run_modules(self) -> Float[Tensor, "N V"]:
        """Run the modules."""

    @abstractmethod
    def _record(self) -> Float[Tensor, "N V"]:
        """Run the modules, and record how to replay the pass."""

    @abstractmethod
    def _replay(self) -> Float[Tensor, "N V"]:
        """Replay the pass without the modules."""


Replay = Callable[[], object]
"""Repeats a call on the current contents of its memory."""

TRANSFERS = {"_to_copy", "copy_", "to"}
"""Operators that may copy between the host and a device, and wait for it."""

COPIES = {"_to_copy", "clone", "contiguous", "to"}
"""Operators whose result is their argument, possibly in another format."""

OUT_OPERATORS = {"mm", "bmm", "addmm", "baddbmm", "mean", "sum", "cat", "index_select", "embedding"}
"""Operators, in addition to the elementwise ones, that can write to `out`."""

VALUE_READERS = {"tolist", "numpy", "__array__"}
"""Methods that return values to Python without calling the dispatcher, unlike `item`."""

UNREPLAYABLE_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)


@dataclass(frozen=True)
class Call:
    """A recorded operator call, and the tensors that it read and created."""

    operator: Any
    """PyTorch's operator; None for attention, which is computed outside the trace."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    """Results, in memory that is reused."""

    repeat: Replay | None = None
    """Repeats a call outside the trace."""

    @property
    def name(self) -> str:
        """The operator's name without namespace or overload; `outside` without an operator."""
        return self.operator.overloadpacket.__name__ if self.operator else "outside"

    def inputs(self) -> Iterator[Tensor]:
        """Iterate over the tensors among the arguments."""
        return find_tensors((*self.args, *self.kwargs.values()))

    def mutated(self) -> list[Tensor]:
        """Return the arguments that the call writes to."""
        if self.operator is None or not self.operator._schema.is_mutable:  # noqa: SLF001
            return []
        values = [
            self.args[index] if index < len(self.args) else self.kwargs.get(str(argument.name))
            for index, argument in enumerate(self.operator._schema.arguments)  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return list(find_tensors(values))

    @property
    def is_view(self) -> bool:
        """Whether the results are views of the arguments."""
        if self.operator is None or self.mutated():
            return False
        return {*map(storage_key, self.outputs)} <= {*map(storage_key, self.inputs())}


class _RejectValueReads(TorchFunctionMode):
    """Context manager that makes reading tensor values from Python an error."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func.__name__ in VALUE_READERS:
            raise ReplayError(f"{func.__name__} returns values to Python")
        return func(*args, **(kwargs or {}))


class TraceRecorder(TorchDispatchMode):
    """Context manager that runs and records operators, and keeps all their results.

    Raises:
        ReplayError: an operator can't be repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._is_paused = False
        self._value_guard = _RejectValueReads()

    def __enter__(self) -> "TraceRecorder":
        super().__enter__()
        self._value_guard.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        self._value_guard.__exit__(*raised)
        super().__exit__(*raised)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run and record an operator; called by PyTorch."""
        result = linear(*args) if func is torch.ops.aten.linear.default and not kwargs else None
        if result is None:
            result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            call = Call(func, args, kwargs or {}, tuple(find_tensors((result,))))
            require_replayable(call, result)
            self.calls.append(call)
        return result

    def record(
        self, compute: Callable[[Tensor | None], Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        """Run `compute`, record it as one call, and return its result.

        Args:
            compute: called with None the first time, later with the memory for the result.
            inputs: the tensors that it reads.
        """
        self._is_paused = True
        try:
            result = compute(None).clone()  # it may be a view of what another call modifies
        finally:
            self._is_paused = False
        self.calls.append(Call(None, inputs, {}, (result,), partial(compute, result)))
        return result


def require_replayable(call: Call, result: object) -> None:
    """Reject a call whose replay would differ from the modules' Python code.

    Raises:
        ReplayError: the call draws random numbers, returns values to Python, has an output shape
            that depends on data, or copies between the host and a device.
    """
    if isinstance(result, (bool, int, float)) and any(True for _ in call.inputs()):
        raise ReplayError(f"{call.name} returns a value to Python")
    # Dropout with probability 0 is a view.
    if any(tag in call.operator.tags for tag in UNREPLAYABLE_TAGS) and not call.is_view:
        raise ReplayError(f"{call.name} can't be replayed")
    if torch.Tag.dynamic_output_shape in call.operator.tags and (
        call.name != "index" or any(index.dtype == torch.bool for index in call.inputs())
    ):
        raise ReplayError(f"the output shape of {call.name} depends on data")
    if call.name in TRANSFERS and len({t.device for t in (*call.inputs(), *call.outputs)}) > 1:
        raise ReplayError(f"{call.name} copies between the host and a device")


class OperatorTrace:
    """The calls of a `TraceRecorder`, ready to be replayed.

    Args:
        calls: the computation.
        inputs: tensors whose values change; any other tensors that the calls read without creating
            or modifying them are constants.
        result: the result of the computation.
        substitute: returns a faster way to repeat a call, or None.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        inputs: Sequence[Tensor],
        result: Tensor,
        substitute: Callable[[Call], Replay | None] = lambda _: None,
    ) -> None:
        self.result: Shaped[Tensor, "..."] = result
        # Keeps the tensors of each call alive.
        self._calls = fuse(select_needed(select_varying(calls, inputs), result), result)
        self._replays = [substitute(call) or make_replay(call) for call in self._calls]

    def __len__(self) -> int:
        """Return the number of calls in a replay."""
        return len(self._replays)

    def replay(self) -> Tensor:
        """Recompute the result from the current inputs, in the same memory each time."""
        for repeat in self._replays:
            repeat()
        return self.result


def select_varying(calls: Sequence[Call], inputs: Sequence[Tensor]) -> list[Call]:
    """Return the calls whose results may differ between replays, except views."""
    varying = {storage_key(tensor) for tensor in inputs}
    varying |= {storage_key(tensor) for call in calls for tensor in call.mutated()}
    kept: list[Call] = []
    for call in calls:
        if call.is_view:
            continue
        sources = {storage_key(tensor) for tensor in call.inputs()}
        targets = {storage_key(tensor) for tensor in call.outputs}
        if call.operator is None or call.mutated() or (sources | targets) & varying:
            kept.append(call)
            varying |= targets
    return kept


def select_needed(calls: Sequence[Call], result: Tensor) -> list[Call]:
    """Return the calls that the result depends on, and those that modify their arguments."""
    needed = {storage_key(result)}
    kept: list[Call] = []
    for call in reversed(calls):
        if call.mutated() or needed & {storage_key(tensor) for tensor in call.outputs}:
            kept.append(call)
            needed |= {storage_key(tensor) for tensor in call.inputs()}
    return kept[::-1]


NORM = (("pow", 0, 2), ("mean", 1, (-1,), True), ("add", 2, float), ("rsqrt", 3), ("mul", 0, 4))
NORMS = ((*NORM, ("mul", 6, 5)), (*NORM, ("mul", 5, 6)))
ROTATIONS = ((("mul", 0, 1), ("neg", 3), ("cat", (4, 5), -1), ("mul", 6, 7), ("add", 2, 8)),)
ADAPTERS = ((("linear", 0, 1), ("mul", 2, float), ("add", 4, 3)),)
"""Names and arguments of calls; tensors are numbered in the order of their first use."""


def fuse(calls: Sequence[Call], result: Tensor) -> list[Call]:
    """Replace each sequence of calls that a kernel can compute with a single call.

    `result` and the results of other calls keep their memory.
    """
    if kernel_mode() == "off":
        return [*calls]
    reads = Counter(storage_key(tensor) for call in calls for tensor in call.inputs())
    reads[storage_key(result)] += 1
    names, fused = [call.name for call in calls], [*calls]
    for index in range(len(calls) - 1, -1, -1):
        for patterns, fuse_group in FUSIONS:
            end = index + len(patterns[0])
            if names[index:end] != [name for name, *_ in patterns[0]]:
                continue
            pattern, tensors = to_pattern(group := calls[index:end])
            inner = [storage_key(tensor) for call in group[:-1] for tensor in call.outputs]
            if pattern not in patterns or any(reads[key] != 1 for key in inner):
                continue
            if repeat := fuse_group(group, tensors):
                inputs = [t for call in group for t in call.inputs() if storage_key(t) not in inner]
                fused[index:end] = [Call(None, inputs, {}, group[-1].outputs, repeat)]
        if names[index] == "silu" and reads[storage_key(calls[index].outputs[0])] == 1:
            fuse_gate(fused, index)
    return fused


def fuse_gate(calls: list[Call], index: int) -> None:
    """Fuse the SiLU at an index with the product that reads it, if a kernel can compute both."""
    (x,), (gate,) = calls[index].args, calls[index].outputs
    key = storage_key(gate)
    mul_index = next(
        n for n in range(index + 1, len(calls)) if key in map(storage_key, calls[n].inputs())
    )
    others = [tensor for tensor in calls[mul_index].inputs() if tensor is not gate]
    if calls[mul_index].name == "mul" and len(others) == 1:
        (up,) = others
        if repeat := prepare_silu_product(x, up, calls[mul_index].outputs[0]):
            calls[mul_index] = Call(None, (x, up), {}, calls[mul_index].outputs, repeat)
            del calls[index]


def fuse_norm(group: Sequence[Call], tensors: Sequence[Tensor]) -> Replay | None:
    """Fuse x * rsqrt(mean(x^2) + epsilon) * weight into a kernel; return None if unsupported."""
    if tensors[6].shape != tensors[0].shape[-1:]:
        return None
    return prepare_norm(tensors[0], tensors[6], tensors[7], group[2].args[1])


def fuse_rotation(_group: Sequence[Call], tensors: Sequence[Tensor]) -> Replay | None:
    """Fuse x * cos + cat(-x2, x1) * sin, with halves x1 and x2; return None if unsupported."""
    x, cos, sin, out = (tensors[number] for number in (0, 1, 7, 9))
    halves = [tensor_key(half) for half in x.chunk(2, -1)]
    if halves != [tensor_key(tensors[5]), tensor_key(tensors[3])] or x.ndim != 4 or len(x) != 1:
        return None
    if not cos.shape == sin.shape == (1, 1, *x.shape[2:]):
        return None
    return prepare_rotation(x, cos, sin, out)


def fuse_adapter(group: Sequence[Call], tensors: Sequence[Tensor]) -> Replay | None:
    """Fuse x + scale * (y B^T) into one operator; return None if the dtypes or shapes differ."""
    x, y, out = (tensors[number].flatten(0, -2) for number in (4, 0, 5))
    is_narrow = 2 * y.shape[1] <= x.shape[1]  # otherwise, the kernel for linear layers is faster
    if not is_narrow or x.shape != out.shape or x.dtype != y.dtype:
        return None
    return partial(torch.addmm, x, y, tensors[1].mT, alpha=group[1].args[1], out=out)


FUSIONS = ((NORMS, fuse_norm), (ROTATIONS, fuse_rotation), (ADAPTERS, fuse_adapter))


def to_pattern(group: Sequence[Call]) -> tuple[tuple[object, ...], list[Tensor]]:
    """Convert calls to a pattern such as `NORM`; return it and the tensors that it numbers."""
    tensors: dict[object, Tensor] = {}

    def number(value: object) -> object:
        if isinstance(value, Tensor):
            tensors.setdefault(tensor_key(value), value)
            return [*tensors].index(tensor_key(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(number, value))
        return float if isinstance(value, float) else value

    pattern: list[object] = []
    for call in group:
        pattern.append((call.name, *map(number, call.args), *call.kwargs))
        number(call.outputs)
    return tuple(pattern), [*tensors.values()]


def tensor_key(tensor: Tensor) -> object:
    """Return a key that identifies a tensor's address, shape, strides and dtype."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def make_replay(call: Call) -> Replay:
    """Return the fastest way to replay a call."""
    if call.repeat is not None:
        return call.repeat
    # Tensor and torch functions have less overhead than calls of operator overloads.
    is_plain = call.operator.namespace == "aten" and "out" not in call.kwargs
    if call.mutated():
        method = getattr(Tensor, call.name, None) if is_plain else None
        return partial(method or call.operator, *call.args, **call.kwargs)
    if len(call.outputs) == 1 and is_plain:
        (output,) = call.outputs
        source = next(call.inputs(), None)
        if call.name in COPIES and source is not None and source.shape == output.shape:
            return partial(output.copy_, source)
        namespaces = (torch, vars(torch._C)["_nn"])  # noqa: SLF001
        bindings = (getattr(namespace, call.name, None) for namespace in namespaces)
        function = next((binding for binding in bindings if binding is not None), call.operator)
        repeat = partial(function, *call.args, **call.kwargs, out=output)
        if torch.Tag.pointwise in call.operator.tags or call.name in OUT_OPERATORS:
            try:
                repeat()
            except (TypeError, RuntimeError):
                pass
            else:
                return repeat
    return partial(_copy_results, call)


def _copy_results(call: Call) -> None:
    with LinearKernelMode():  # for operators that contain linear layers
        results = call.operator(*call.args, **call.kwargs)
    for output, result in zip(call.outputs, find_tensors((results,)), strict=True):
        output.copy_(result)


def find_tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the values and in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from find_tensors(value)


def storage_key(tensor: Tensor) -> int:
    """Return a key that identifies a tensor's storage, which its views share."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001


class CurrentLayout:
    """The layout passed to the modules; delegates to the layout of the current pass."""

    def __init__(self) -> None:
        self.layout: DecodeAttention | None = None
        self.recorder: TraceRecorder | None = None

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "P G T D"],
        value: Float[Tensor, "P G T E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
    ) -> Float[Tensor, "1 N H E"]:
        """Compute attention with the layout of the current pass."""
        repeat: Callable[[DecodeAttention], object] | None = None
        settings: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window}

        def attend(layout: DecodeAttention, out: Tensor | None = None) -> Tensor:
            return layout.attend(query, key, value, dropout=dropout, out=out, **settings)

        def compute(out: Tensor | None) -> Tensor:
            nonlocal repeat
            assert self.layout is not None
            if out is None:
                return attend(self.layout)
            if repeat is None:
                rows = query[0].transpose(0, 1)
                settings["scaling"] = query.shape[3] ** -0.5 if scaling is None else scaling
                call = prepare_attention(rows, key, value, out[0], **settings)
                repeat = partial(attend, out=out)
                if call is not None:
                    repeat = lambda layout: call(*layout.device_tables(len(rows)))  # noqa: E731
            repeat(self.layout)
            return out

        if self.recorder is None:
            return compute(None)
        return self.recorder.record(compute, [query, key, value])


class TracedRows(ReplayedRows):
    """Traced passes with a fixed number of rows; small matmuls use the kernel for linear layers."""

    def __init__(self, forward: Pass, num_rows: int) -> None:
        super().__init__(num_rows)
        self._forward = forward
        self._inputs: Int[Tensor, "3 N"] = torch.zeros(3, num_rows, dtype=torch.long)
        self._layout = CurrentLayout()
        self._calls: list[Call] = []
        self._result: Float[Tensor, "N V"] | None = None
        self._matmuls: list[Linear] = []
        self._trace: OperatorTrace | None = None

    def _load_inputs(self, columns: Sequence[Column], layout: DecodeAttention) -> None:
        self._inputs.copy_(torch.tensor(columns).T)
        self._layout.layout = layout

    def _run_modules(self) -> Float[Tensor, "N V"]:
        return self._forward(self._inputs, self._layout)

    def _record(self) -> Float[Tensor, "N V"]:
        recorder = self._layout.recorder = TraceRecorder()
        try:
            with recorder:
                self._result = self._run_modules()
        finally:
            self._layout.recorder = None
        self._calls = recorder.calls
        return self._result.clone()

    def _verify(self, num_sequences: int) -> Float[Tensor, "N V"]:
        assert self._result is not None
        self._trace = OperatorTrace(self._calls, [self._inputs], self._result, self._prepare_matmul)
        self._calls = []
        return super()._verify(num_sequences)

    def _replay(self) -> Float[Tensor, "N V"]:
        assert self._trace is not None
        assert self._layout.layout is not None
        for matmul in self._matmuls:
            matmul.set_rows(len(self._layout.layout.lengths))
        return self._trace.replay()

    def _prepare_matmul(self, call: Call) -> Replay | None:
        """Return a kernel that computes a matmul without padding rows, or None if unsupported."""
        if kernel_mode() == "off" or len(call.outputs) != 1 or call.kwargs:
            return None
        if call.outputs[0].shape[:-1].numel() != self._inputs.shape[1]:
            return None  # not one row per token
        matmul = None
        if call.name == "linear":
            x, weight, *bias = call.args
            matmul = prepare(x, weight, bias[0] if bias else None, call.outputs[0])
        elif call.name == "addmm":  # transformers' Conv1D, as in GPT-2
            bias, x, weight = call.args
            matmul = prepare(x, weight.mT, bias, call.outputs[0])
        if matmul is not None:
            self._matmuls.append(matmul)
        return matmul
