"""Hooks that gather a model's weights before use and free them afterwards.

Hooks are registered on the module itself and on its units; nothing in the model is replaced.
Forward: gather a unit, run it, free it. Backward: gather it again when the gradient of its output
arrives, collect its gradients, and reduce them when the next unit starts. An embedding is not
gathered for its backward pass; an output layer stays gathered until its backward pass is over, and
the root until both passes are. Weights are freed and gathered only at stage 3.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.engine.comm.collectives import Collectives
from pipeline.engine.optimizer.trained import TrainedParams
from pipeline.engine.sharding.flat import FlatParams
from pipeline.engine.sharding.units import Kind, UsesHead
from pipeline.system.errors import ConfigError

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))


def tensors_in(output: object) -> list[Tensor]:
    """List the tensors in nested tuples, lists, dictionaries and `transformers` outputs."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def clone_views(output: object) -> object:
    """Return the output with copies in place of views that autograd backpropagates through.

    A hook on a view is lost when the view is changed in place.
    """

    def clone_view(leaf: object) -> object:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view()  # noqa: SLF001
        return leaf.clone() if is_view and isinstance(leaf, Tensor) else leaf

    return tree_map(clone_view, output)


def check_output(block: str, output: object) -> None:
    """Check that a block's output has only types in which the engine can find tensors.

    Raises:
        ConfigError: the output has another type; the block's weights would be freed too early.
    """
    for leaf in tree_leaves(output):
        if not isinstance(leaf, (*PLAIN_TYPES, Tensor)):
            raise ConfigError(
                f"{block} returns a {type(leaf).__qualname__}, in which the engine can't find"
                " tensors; return tensors, or tuples or dictionaries of tensors"
            )


class Unit:
    """The flat vectors of a transformer block, an embedding, an output layer or the root."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        flats: list[FlatParams],
        trained: list[TrainedParams],
        kind: Kind = "block",
    ) -> None:
        self.name, self.module, self.kind = name, module, kind
        self.flats, self.trained = flats, trained
        self.in_backward = False
        """True from the arrival of the output's gradient until the unit's reduction has started."""
        self.expects_backward = False
        """True if a forward pass has left a graph for autograd."""

    @property
    def gathered(self) -> bool:
        """True if all its weights are gathered."""
        return all(flat.gathered for flat in self.flats)

    def start_gather(self) -> None:
        """Start gathering its weights."""
        for flat in self.flats:
            flat.start_gather()

    def gather(self) -> None:
        """Gather its weights and wait for them."""
        self.start_gather()
        for flat in self.flats:
            flat.gather()

    def free(self) -> None:
        """Release the memory of the other processes' shards."""
        for flat in self.flats:
            flat.free()


class ZeroModel:
    """A module whose units are gathered and freed by hooks."""

    def __init__(self, model: nn.Module, units: list[Unit], comm: Collectives) -> None:
        self.model, self.units, self.comm = model, units, comm
        *self.inner_units, self.root = units
        self.flats = [flat for unit in units for flat in unit.flats]
        self.head = next((unit for unit in units if unit.kind == "head"), None)
        self.is_offloaded = False
        self.backward_failed = False
        """True after a failed backward pass, until `discard`."""
        self.updates = 0
        """Number of weight updates; autograd graphs from before the last one are invalid."""
        self._pin_count = 0
        self._reducing: Unit | None = None
        self._visited: list[Unit] = []
        self._next: dict[Unit, Unit] = {}
        self._previous: dict[Unit, Unit] = {}
        self._root_was_gathered = True
        if getattr(model, "_engine", None) is not None:
            raise ConfigError("this model already belongs to an engine; create a new model")
        object.__setattr__(model, "_engine", self)
        model.register_state_dict_pre_hook(self._before_state_dict)
        model.register_load_state_dict_pre_hook(self._before_load_state_dict)
        self._reaches_root = True
        """True if the current backward pass reaches parameters outside the blocks."""
        model.register_forward_pre_hook(self._before_model, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._after_model, with_kwargs=True, always_call=True)
        for unit in self.inner_units:
            users = [module for module in model.modules() if isinstance(module, UsesHead)]
            for module in (unit.module, *users) if unit is self.head else (unit.module,):
                module.register_forward_pre_hook(partial(self._before_unit, unit), prepend=True)
                module.register_forward_hook(partial(self._after_unit, unit))

    # Forward

    def _before_model(self, _module: nn.Module, _args: object, _kwargs: object) -> None:
        self.check_ready()
        self.flush()
        self._check_unchanged()
        self._root_was_gathered = self.root.gathered
        self.root.gather()
        self._visited = []

    def _after_model(
        self, _module: nn.Module, _args: object, _kwargs: object, output: object
    ) -> object:
        if self._visited:
            # An embedding comes first; its backward pass comes last and reads no weights.
            pairs = [pair for pair in pairwise(self._visited) if pair[1].kind != "embedding"]
            self._next = dict(pairs)
            self._previous = {second: first for first, second in pairs if first.kind != "embedding"}
        needs_backward = torch.is_grad_enabled() and output is not None
        for unit in self.inner_units:  # left over from a failed pass or an unused prefetch
            if unit is not self.head or not needs_backward:
                self._free(unit)
        if not needs_backward:
            if not self._root_was_gathered:
                self._free(self.root)
            return output
        output, updates = clone_views(output), self.updates
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self.root.expects_backward = True
                tensor.register_hook(lambda _grad: self._begin_root(updates))
        return output

    def _before_unit(self, unit: Unit, *_: object) -> None:
        if in_backward():  # recomputation within the unit's own backward pass
            self._before_backward(unit, is_recompute=True)
            return
        if self._visited and self._visited[-1] is unit is self.head and unit.gathered:
            return
        if not self.root.gathered:
            raise RuntimeError(
                f"{unit.name} was called while the weights outside it were sharded; call the engine"
                " instead of its modules, or call them under `with engine.gathered():`"
            )
        if self.head is not None and unit.kind == "embedding":  # another call in this pass
            self._free(self.head)
        self._visited.append(unit)
        self._gather(unit, self._next)

    def _after_unit(self, unit: Unit, _module: nn.Module, _args: object, output: object) -> object:
        if in_backward():
            return output
        if torch.is_grad_enabled():
            output, updates = clone_views(output), self.updates
            tensors = tensors_in(output)
            if not tensors:
                check_output(unit.name, output)
            for tensor in tensors:
                if tensor.requires_grad:
                    unit.expects_backward = True
                    tensor.register_hook(lambda _grad: self._before_backward(unit, updates))
        if unit is not self.head:
            self._free(unit)
        return output

    # Backward

    def backward(
        self,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor] | None = None,
        *,
        reaches_root: bool = True,
    ) -> None:
        """Run autograd from `roots` (a loss, or outputs with `gradients`) and reduce gradients.

        A process whose roots have no graph contributes zeros to the collectives. Without
        `reaches_root` the graph contains only the blocks, on every process.
        """
        self.check_ready()
        self._reaches_root = reaches_root
        self._begin_root()
        try:
            if any(root.requires_grad for root in roots):
                torch.autograd.backward(roots, gradients)
            else:
                for unit in reversed(self.inner_units):
                    if unit.expects_backward:
                        self._before_backward(unit)
        except BaseException:
            self.backward_failed = True
            raise
        finally:
            self._reaches_root = True
        self.flush()

    def flush(self) -> None:
        """Finish any backward pass: reduce the remaining gradients and free the weights."""
        if in_backward() or not any(unit.in_backward for unit in self.units):
            return
        for unit in self.units:
            if unit.in_backward:
                self._finish_unit(unit)
        self.reduce()
        for unit in self.units:
            unit.expects_backward = False
            self._free(unit)

    def reduce(self) -> None:
        """Reduce all pending gradients and add them to the sums."""
        for unit in self.units:
            for params in unit.trained:
                params.gradients.start_reduction()
        for unit in self.units:
            for params in unit.trained:
                params.gradients.finish_reduction()
                params.gradients.sum.end_micro_batch()
        self._reducing = None

    def discard(self) -> None:
        """Discard all gradients and the state of a failed pass."""
        self._reducing = None
        self.backward_failed = False
        for unit in self.units:
            unit.in_backward = unit.expects_backward = False
            for params in unit.trained:
                params.gradients.clear()
            self._free(unit)

    def _begin_root(self, updates: int | None = None) -> None:
        self._check_current(updates)
        if not self._reaches_root:
            return
        self.root.gather()
        already_begun, self.root.in_backward = self.root.in_backward, True
        for params in self.root.trained:
            params.gradients.begin()
        if self.head is not None and not already_begun:
            self._before_backward(self.head)

    def _before_backward(
        self, unit: Unit, updates: int | None = None, *, is_recompute: bool = False
    ) -> None:
        self._check_current(updates)
        if not self.root.in_backward:
            self._begin_root()
        for other in self.inner_units:  # finished: autograd runs in reverse order of creation
            if other.in_backward and other is not unit:
                self._finish_unit(other)
        if unit.kind != "embedding" or is_recompute:
            self._gather(unit, self._previous)
        unit.in_backward = True
        for params in unit.trained:
            params.gradients.begin()

    def _finish_unit(self, unit: Unit) -> None:
        unit.in_backward = False
        self._free(unit)
        # Overlap at most one reduction with the next unit's computation: each holds a buffer.
        if self._reducing is not None:
            for params in self._reducing.trained:
                params.gradients.finish_reduction()
        for params in unit.trained:
            params.gradients.start_reduction()
        self._reducing = unit

    # Memory

    def _gather(self, unit: Unit, next_units: dict[Unit, Unit]) -> None:
        unit.start_gather()
        if unit in next_units:
            for flat in next_units[unit].flats:
                flat.start_read()
            if self.comm.gathers_ahead:
                next_units[unit].start_gather()
        unit.gather()

    def _free(self, unit: Unit) -> None:
        if not self._pin_count:
            unit.free()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all weights gathered in a `with` block, which all processes must enter together."""
        self.check_ready()
        self._pin_count += 1
        try:
            for unit in self.units:
                unit.gather()
            yield
        finally:
            self._pin_count -= 1
            for unit in self.units:
                if not (unit in (self.root, self.head) and unit.expects_backward):
                    self._free(unit)

    def iter_gathered(self) -> Iterator[Unit]:
        """Yield every unit, with its weights gathered until the next one is requested.

        On GPUs, the next unit is gathered ahead. All processes must iterate together.
        """
        self.check_ready()
        self.flush()
        already_gathered = {unit for unit in self.units if unit.gathered}
        next_units = dict(pairwise(self.units)) if self.comm.gathers_ahead else {}
        try:
            for unit in self.units:
                unit.start_gather()
                if unit in next_units:
                    next_units[unit].start_gather()
                unit.gather()
                yield unit
                if unit not in already_gathered:
                    self._free(unit)
        finally:  # even if the caller stops early
            for unit in self.units:
                if unit not in already_gathered:
                    self._free(unit)

    def detach_params(self) -> None:
        """Detach the parameters from memory that may be released."""
        for flat in self.flats:
            flat.detach_params()

    def attach_params(self) -> None:
        """Reattach the parameters to their weights where those are gathered."""
        self.is_offloaded = False
        for flat in self.flats:
            if flat.gathered:
                flat.attach_params()

    def check_ready(self) -> None:
        """Raise RuntimeError if the engine can't continue."""
        if self.is_offloaded:
            raise RuntimeError("the engine's tensors are offloaded; call reload_states() first")
        if self.backward_failed:
            raise RuntimeError(
                "a backward pass failed and left a partial gradient; call discard(), then repeat"
                " the step's micro-batches"
            )

    def _check_current(self, updates: int | None) -> None:
        if updates is not None and updates != self.updates:
            raise RuntimeError(
                "the weights were updated between a forward pass and its backward pass; call step()"
                " after the backward passes of all its micro-batches"
            )

    def _before_state_dict(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        # With keep_vars, callers need only the names.
        if not keep_vars and not all(unit.gathered for unit in self.units):
            raise RuntimeError(
                "the weights are sharded across processes; call state_dict() on all ranks, under"
                " `with engine.gathered():`"
            )

    def _before_load_state_dict(self, *_: object) -> None:
        raise RuntimeError(
            "the engine's master weights would overwrite the loaded weights; call load_state_dict()"
            " before creating the engine"
        )

    def _check_unchanged(self) -> None:
        for flat in self.flats:
            for name, param in flat.params.items():
                # Ignored under no_grad: peft freezes the adapters it disables.
                changed = param.requires_grad != flat.settings.trained
                if changed and torch.is_grad_enabled():
                    verb = "frozen" if flat.settings.trained else "unfrozen"
                    raise ConfigError(
                        f"{name} was {verb} after the engine was created; do this before creating"
                        " the engine"
                    )
                expected = flat.views[name] if flat.gathered else flat.placeholders[name]
                if param.dtype != expected.dtype or param.data_ptr() != expected.data_ptr():
                    raise ConfigError(
                        f"{name} was converted or moved (for example by .half() or .to()) after the"
                        " engine was created; do this before creating the engine"
                    )


def in_backward() -> bool:
    """Return whether autograd is running on this thread."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001
