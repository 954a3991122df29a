"""A flat vector of weights that learn: masters, gradients and their optimizer."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.config import Kernels, OptimConfig
from pipeline.engine.buffers import BufferPool
from pipeline.engine.comm import Work
from pipeline.engine.flat import FlatParams
from pipeline.engine.gradients import FlatGradients
from pipeline.engine.masters import Kind, Masters, kind_of_masters
from pipeline.engine.optim import MOMENTS, build_optimizer, steps_in_one_pass
from pipeline.engine.set_aside import Numbers, SetAside, filled_up, same, step_by_itself
from pipeline.engine.tensor_parts import Stretch, completed, counted
from pipeline.errors import KernelError
from pipeline.kernels.adamw.definition import (
    COPIES,
    AdamW,
    Shard,
    Weights,
    entries,
    new_moments,
)
from pipeline.kernels.adamw.dispatch import adamw_, prepare
from pipeline.parallel.group import ALONE, Group

NOWHERE = slice(0, 0)
"""The place of a parameter of which this process updates no element."""


class TrainedParams:
    """A flat vector with what trains it: masters, summed gradients and an optimizer."""

    def __init__(
        self,
        flat: FlatParams,
        pool: BufferPool,
        optim: OptimConfig,
        *,
        kernels: Kernels = "auto",
        tensor: Group = ALONE,
    ) -> None:
        self.flat, self.comm, self.optim = flat, flat.comm, optim
        self.tensor = tensor
        """The processes that have the parts of each layer."""
        self.kernels: Kernels = kernels
        self.moment_dtype = MOMENTS[optim.moments]
        kind = kind_of_masters(flat.settings.dtype, flat.placement, optim, kernels)
        self.one_pass = self._prepare(optim, kind)
        # On a GPU a kernel may not be there, which on a CPU PyTorch stands in for.
        self.masters = Masters(flat, "whole" if kind == "split" and not self.one_pass else kind)
        self.gradients = FlatGradients(flat, pool)
        *_, decay = next(flat.decays(0, 1))  # where parts of it have rates of their own, the first
        settings = {"lr": flat.settings.lr, "weight_decay": decay}
        self.optimizer = build_optimizer([{"params": [self.masters.param], **settings}], optim)
        self.numbers_of: dict[str, Numbers | None] = {}
        """What the optimizer keeps for parameters that were not updated as often as the others;
        None for those that never were."""

    def _prepare(self, optim: OptimConfig, kind: Kind) -> bool:
        """Whether the optimizer steps in one pass, with the kernel for it ready where one is."""
        device, dtype = self.flat.placement.optimizer_device, self.flat.settings.dtype
        if self.kernels != "off" and steps_in_one_pass(optim, device):
            copy = dtype if kind == "whole" and dtype in COPIES else None
            ready = prepare(
                device,
                copy=copy,
                split=kind == "split",
                moments=self.moment_dtype,
                kernels=self.kernels,
            )
            # On a CPU PyTorch has the same bits without a kernel, on a GPU a faster class.
            return ready or device.type == "cpu" or optim.moments != "fp32"
        if self.kernels == "required":
            raise KernelError(
                f"kernels required: there is none of {optim.name} on {device.type} with these"
                " settings; set kernels auto, or take AdamW without optim.params"
            )
        return optim.moments != "fp32"  # of which no class of PyTorch knows

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps, by its own names: moments, and numbers for all weights."""
        return self.optimizer.state[self.masters.param]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Replace what the optimizer keeps."""
        if self.moment_dtype != torch.float32:  # PyTorch's class would make fp32 of it
            self.state.clear()
            self.state.update(state)
            return
        settings = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": {0: state}, "param_groups": settings})

    @contextmanager
    def changing(self) -> Iterator[Float[Tensor, " n"]]:
        """The fp32 masters, to change in place; then the weights follow, on all processes."""
        self.comm.synchronize()  # before weights change that are being copied to the GPU
        with self.masters.changing() as masters:
            yield masters
        self.publish()

    def attach(self, master: Tensor, *moments: Tensor) -> None:
        """Have masters and moments that live on a disk here, until `detach`."""
        self.masters.param.data = master
        self.state.setdefault("step", torch.zeros(()))
        names = new_moments(torch.empty(0), self.moment_dtype)
        self.state.update(zip(names, moments, strict=True))

    def detach(self) -> None:
        """Free the masters and moments that `attach` brought."""
        self.masters.param.data = torch.empty(0)
        self.state.update(new_moments(torch.empty(0), self.moment_dtype))

    def spans(self, *, own: bool = False) -> Iterator[tuple[str, slice, slice]]:
        """Where the elements of each parameter in these masters lie, and which they are.

        With `own` only those that this process writes to a checkpoint: processes that keep the same
        share it out among them.
        """
        flat, first = self.flat, self._first
        low, high = first, first + self.masters.numel
        if own:
            low, high = flat.written
        for name, start, stop in flat.stretches(low, high):
            offset = flat.offsets[name]
            yield name, slice(start - first, stop - first), slice(start - offset, stop - offset)

    def full_gradients(self) -> dict[str, Tensor]:
        """The reduced gradient of each parameter, whole, by name; all processes call it.

        Where layers are divided, of this process's part.
        """
        full = self._gathered(self._gradient())
        whole = {name: view.clone() for name, view in self.flat.cut(full).items()}
        self.gradients.pool.give_back(full)
        return whole

    def _gathered(self, gradient: Tensor) -> Tensor:
        """The whole vector of which each process has its piece, in a buffer of the pool."""
        full = self.gradients.borrow()
        piece = self.comm.piece(full)
        piece.copy_(gradient)
        self.comm.all_gather(full, piece, self.flat.unit).wait()
        return full

    def _gradient(self) -> Float[Tensor, " n"]:
        """The sum over all micro-batches and processes, of the own piece."""
        self.gradients.settle()
        gradient = self.gradients.sum.finish()
        return completed(gradient, self.flat.settings.role, self.tensor, self._stretches())

    def _stretches(self) -> list[Stretch]:
        """The parameters of the own piece."""
        flat, first = self.flat, self.comm.rank * self.flat.shard_numel
        return [
            (flat.params[name], start - flat.offsets[name], slice(start - first, stop - first))
            for name, start, stop in flat.stretches(first, first + flat.shard_numel)
        ]

    def counted_gradient(self) -> Float[Tensor, " n"]:
        """The own piece of the reduced gradient, with zeros for what counts on another process."""
        return counted(self._gradient(), self.flat.settings.role, self.tensor, self._stretches())

    def step(
        self,
        *,
        multiplier: float,
        lr_share: float,
        momentum: float | None = None,
        used: Collection[str] | None = None,
    ) -> None:
        """Update the masters with the summed gradient times `multiplier`, then the weights.

        The rate is `lr_share` of this vector's. `momentum` replaces the optimizer's beta1 where a
        schedule cycles it. `used` are the parameters that had a gradient on any process, all
        without it; the others stay as they are, moments included.
        """
        used = self.flat.params.keys() if used is None else used
        if not used:
            self.gradients.clear()
            return
        self.comm.synchronize()  # before weights change that are being copied to the GPU
        self._set_numbers(lr_share, momentum)
        gathers = not self.flat.placement.shard_optimizer and self.comm.size > 1
        gradient = self._gradient()
        if multiplier != 1.0 and not self.one_pass:
            gradient.mul_(multiplier)
        if gathers:
            gradient = self._gathered(gradient)
        moved = gradient.to(self.flat.placement.optimizer_device)
        rounded = self._update(moved, multiplier, used)
        if gathers:
            self.gradients.pool.give_back(gradient)
        self.gradients.clear()
        self.publish(rounded)

    def begin_joined_step(
        self, *, lr_share: float, momentum: float | None, used: Collection[str] | None
    ) -> list[Shard] | None:
        """This vector's part of a step of many by one kernel; `end_joined_step` comes after that.

        None where it must be stepped by itself, which is so on all processes: the optimizer is
        another, a parameter is left as it is, or gradient and weights are not whole where they are.
        """
        placement, masters = self.flat.placement, self.masters
        here = placement.device == placement.gradient_device == placement.optimizer_device
        whole = placement.shard_optimizer or self.comm.size == 1
        if not (self.one_pass and here and whole) or placement.optimizer_on_disk:
            return None
        if used is not None or self.numbers_of or placement.params_on_disk:
            return None
        if self.flat.placement.shard_params and placement.param_device != placement.device:
            return None
        self._set_numbers(lr_share, momentum)
        gradient = self._gradient()
        vectors = self._next_vectors(gradient, masters.room_for_weights())
        return [
            Shard(
                weights=vectors.part(place),
                gradient=gradient[place],
                lr=self.flat.settings.lr,
                weight_decay=rate,
            )
            for place, rate in self._decays()
        ]

    def end_joined_step(self) -> Work:
        """Begin to have the weights follow, on all processes."""
        self.gradients.clear()
        self.masters.write_weights(self.masters.room_for_weights())
        return self.flat.start_publishing()

    def _decays(self) -> list[tuple[slice, float]]:
        """The parts of these masters that weight decay treats alike, and its rate there."""
        first = self._first
        parts = self.flat.decays(first, first + self.masters.numel)
        return [(slice(start - first, stop - first), rate) for start, stop, rate in parts]

    @property
    def _first(self) -> int:
        """Where these masters begin in the whole vector."""
        flat = self.flat
        return flat.comm.rank * flat.shard_numel if flat.placement.shard_optimizer else 0

    def _set_numbers(self, lr_share: float, momentum: float | None) -> None:
        (settings,) = self.optimizer.param_groups
        settings["lr"] = self.flat.settings.lr * lr_share
        if momentum is not None and "betas" in settings:
            settings["betas"] = (momentum, settings["betas"][1])

    def _update(self, gradient: Tensor, multiplier: float, used: Collection[str]) -> Tensor | None:
        """Update what has a gradient, the parameters with numbers of their own by themselves.

        Returns:
            The rounded weights, where the masters are others than these and a kernel has done it.
        """
        names = self.flat.params.keys()
        places = {name: place for name, place, _ in self.spans()}
        aside = [
            self._set_aside(name, places.get(name, NOWHERE), gradient if name in used else None)
            for name in names
            if name not in used or name in self.numbers_of
        ]
        together = len(aside) < len(names)
        rounded = self._step_together(gradient, multiplier) if together else None
        for each in aside:
            if each.gradient is not None:
                self._step_alone(each, multiplier)
            if together or each.gradient is not None:
                self.numbers_of[each.name] = each.numbers
            self._put_back(each, rounded)
        numbers = self._numbers() if aside else None
        for name in [name for name, own in self.numbers_of.items() if same(own, numbers)]:
            del self.numbers_of[name]
        return rounded

    def numbers(self, name: str) -> Numbers | None:
        """What the optimizer keeps for a whole parameter; None where it was never updated."""
        return self.numbers_of[name] if name in self.numbers_of else self._numbers()

    def _numbers(self) -> Numbers | None:
        """The numbers of all parameters that have none of their own."""
        found = {name: value for name, value in self._tensors() if value.ndim == 0}
        return {name: value.clone() for name, value in found.items()} if self.state else None

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, each) for name, each in self.state.items() if isinstance(each, Tensor)]

    def _set_aside(self, name: str, place: slice, gradient: Tensor | None) -> SetAside:
        numbers = self.numbers(name)
        kept = [] if numbers is None else [each for each in self._tensors() if each[1].ndim]
        return SetAside(
            name,
            place,
            master=filled_up(self.masters.read(place)),
            moments={kind: filled_up(each[entries(kind, place)], kind) for kind, each in kept},
            gradient=None if gradient is None else filled_up(gradient[place]),
            numbers=numbers,
        )

    def _put_back(self, each: SetAside, rounded: Tensor | None) -> None:
        self.masters.write(each.place, each.master[: each.numel], rounded)
        for kind, vector in self._tensors():
            if vector.ndim:
                values, own = each.moments.get(kind), vector[entries(kind, each.place)]
                own[:] = 0 if values is None else values[: own.numel()]

    def _step_together(self, gradient: Tensor, multiplier: float) -> Tensor | None:
        """Update the vector as a whole; what `_update` returns."""
        if not (self.one_pass or self.flat.decays_in_part):
            self.masters.param.grad = gradient
            self.optimizer.step()
            self.masters.param.grad = None
            return None
        rounded = self.masters.room_for_weights()
        vectors = self._next_vectors(gradient, rounded)
        step = int(self.state["step"].item())
        for place, rate in self._decays():
            self._step_in_one_pass(
                vectors.part(place), gradient[place], multiplier, step=step, weight_decay=rate
            )
        return rounded

    def _next_vectors(self, gradient: Tensor, rounded: Tensor | None) -> Weights:
        """What a kernel steps, for the next step, whose number the optimizer's state has then."""
        state, masters = self.state, self.masters
        if "exp_avg" not in state:
            state["step"] = torch.zeros(())
            state |= new_moments(gradient, self.moment_dtype)
        if state["step"].is_cuda:  # as PyTorch's fused class has loaded it
            state["step"] = state["step"].cpu()
        state["step"] += 1
        stepped = masters.fp32() if masters.low_bits is None else masters.weights
        moments = {name: value for name, value in self._tensors() if value.ndim}
        return Weights(stepped, **moments, copy=rounded, low_bits=masters.low_bits)

    def _step_alone(self, each: SetAside, multiplier: float) -> None:
        """Update a parameter that lies aside, as `_step_together` would."""
        assert each.gradient is not None
        offset = self.flat.offsets[each.name]
        *_, rate = next(self.flat.decays(offset, offset + 1))
        if self.one_pass:
            step = 1 if each.numbers is None else int(each.numbers["step"].item()) + 1
            each.moments = each.moments or new_moments(each.master, self.moment_dtype)
            vectors = Weights(each.master, **each.moments)
            self._step_in_one_pass(vectors, each.gradient, multiplier, step=step, weight_decay=rate)
            each.numbers = {"step": torch.tensor(float(step))}
            return
        (settings,) = self.optimizer.param_groups
        step_by_itself(each, settings | {"weight_decay": rate}, self.optim)

    def _step_in_one_pass(
        self,
        vectors: Weights,
        gradient: Tensor,
        multiplier: float,
        *,
        step: int,
        weight_decay: float,
    ) -> None:
        """What the optimizer would do, the factor and the rounding of the weights included."""
        (settings,) = self.optimizer.param_groups
        adamw_(
            vectors,
            gradient,
            AdamW(
                lr=settings["lr"],
                betas=settings["betas"],
                eps=settings["eps"],
                weight_decay=weight_decay,
                step=step,
                multiplier=multiplier if self.one_pass else 1.0,  # which the gradient has
            ),
            kernels=self.kernels,
        )

    def moments(self) -> list[Tensor]:
        """What the optimizer keeps for each weight."""
        return [value for _, value in self._tensors() if value.ndim > 0]

    def publish(self, rounded: Tensor | None = None) -> None:
        """Have the weights follow the masters, on all processes; `rounded` is them already."""
        self.masters.write_weights(rounded)
        self.flat.publish()
