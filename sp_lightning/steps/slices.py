"""The user's optimizer over slices of weights, gradients and state that fit a core's cache.

A `SlicedOptimizer` has the class and the options of the user's optimizer. Its parameters are slices of weights, with
slices of their gradients and of the user's own state: torch's optimizers of `ELEMENTWISE` treat each element by itself,
so the elements are stepped as in one whole call.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from ..compat.streaming import devices_with_lists
from ..stream.gradients import GradientBytes
from ..stream.leaf import Weight
from .compiled import Options, loop_for
from .compiled import step as step_compiled
from .state import WaitingState

ELEMENTWISE = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adamax, optim.NAdam}
ELEMENTWISE |= {optim.RAdam, optim.ASGD, optim.Rprop, optim.Adadelta}
BY_WEIGHT = {optim.Adafactor, optim.Muon, optim.SparseAdam}  # which treat each weight by itself

SCALING = ("grad_scale", "found_inf")  # what a GradScaler tells a fused optimizer


class Work(NamedTuple):
    """A weight to step."""

    weight: Weight
    grad: Any  # GradientBytes, or a tensor that the user made
    group: int


class Slice(NamedTuple):
    """A range of a weight's elements in the order of memory; without ends the whole weight, in its shape."""

    work: Work
    start: int | None
    stop: int | None

    @property
    def is_last(self) -> bool:
        return self.start is None or self.stop == self.work.weight.value.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """Return the range of a tensor that is laid out as the weight is."""
        if self.start is None or self.stop is None:
            return tensor.detach()
        return tensor.as_strided((self.stop - self.start,), (1,), tensor.storage_offset() + self.start)

    def gradient(self) -> Tensor:
        """Return the true gradient; a slice is multiplied by the factors on its way."""
        grad, value = self.work.grad, self.work.weight.value
        if not isinstance(grad, GradientBytes):
            return grad  # type: ignore[no-any-return]
        if self.start is None:
            return grad.true()
        grad.arrived.synchronize()
        part = grad.flat()[self.start : self.stop]
        part = part if part.dtype == value.dtype else part.to(value.dtype)
        for factor in grad.factors:
            part = part * factor  # the gradient stays as it is: a step that raises has changed nothing
        return part

    def state_of(self, entry: Any) -> Any:
        """Return the range of an entry of the weight's state; numbers are copied."""
        if not isinstance(entry, Tensor) or self.start is None:
            return entry
        return self.of(entry) if entry.shape == self.work.weight.value.shape else entry.clone()

    def put_state(self, state: dict[str, Any], new: dict[str, Any]) -> None:
        """Put back what a step made, and the numbers that it changed."""
        for key, entry in new.items():
            if self.start is None or not isinstance(entry, Tensor):
                state[key] = entry
            elif isinstance(state.get(key), Tensor) and state[key].shape == entry.shape and not entry.ndim:
                state[key].copy_(entry)


def is_known(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer's step treats each weight by itself."""
    return type(optimizer) in ELEMENTWISE | BY_WEIGHT


def code_of_step(optimizer: optim.Optimizer) -> Any:
    """Return an optimizer's step without the hooks of the user's."""
    step: Any = type(optimizer).step
    return getattr(step, "__wrapped__", step)


class SlicedOptimizer:
    """One step of the user's optimizer, with its options as they were when the user called it, over slices."""

    def __init__(self, user: optim.Optimizer, chunk: int, device: torch.device) -> None:
        self._user, self._chunk, self._device = user, chunk, device
        self.has_written = False  # whether any weight was stepped
        self._is_elementwise = type(user) in ELEMENTWISE  # which take lists of tensors by default
        self._options = [self._noted(group) for group in user.param_groups]
        self._loops = [loop_for(type(user), group, device) for group in self._options]
        given = {name: getattr(user, name, None) for name in SCALING}
        self._scaling = {name: value for name, value in given.items() if value is not None}
        self._scaling_here = {name: value.to("cpu") for name, value in self._scaling.items()}

    def _noted(self, group: Options) -> Options:
        """Note the options of a group; where the user chose no kernels, choose those that the device takes."""
        noted = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        is_free = self._is_elementwise and noted["foreach"] is None and noted.get("fused") is None
        if is_free and not noted.get("differentiable") and not isinstance(noted["lr"], Tensor):
            noted["foreach"] = self._device.type in devices_with_lists()
        return noted

    def makes_numbers(self, whose: list[Weight], state: WaitingState) -> bool:
        """Whether the step makes numbers of torch's default type, which a forward beside the step may change."""
        if isinstance(self._user, (optim.SGD, optim.ASGD)):
            return isinstance(self._user, optim.ASGD)  # at each step; SGD has none
        return any(not state.peek(weight.host) for weight in whose)

    def step(self, work: list[Work], state: WaitingState) -> None:
        """Step weights on the host."""
        is_infinite = bool(self._scaling_here.get("found_inf", 0))
        scale = self._scaling_here.get("grad_scale")
        left = work if is_infinite else step_compiled(self._loops, work, scale, state)
        self.has_written |= len(left) < len(work)
        for run in self._runs(left, state):
            self._step_slices(run, state)
            self.has_written = True
        for _, grad, _ in work:
            if isinstance(grad, GradientBytes) and grad.is_full:
                grad.norm = None  # a fused kernel that scales gradients writes them

    def _step_slices(self, run: list[Slice], state: WaitingState) -> None:
        params: list[list[Tensor]] = [[] for _ in self._options]
        states: dict[Tensor, Any] = collections.defaultdict(dict)
        ordered = sorted(run, key=lambda part: part.work.group)
        made = []
        for part in ordered:
            weight = part.work.weight
            param = part.of(weight.value)
            param.grad = part.gradient()
            if own := state.peek(weight.host):
                states[param] = {key: part.state_of(entry) for key, entry in own.items()}
            params[part.work.group].append(param)
            made.append(param)
        self._call(params, states, self._scaling_here)
        for part, param in zip(ordered, made, strict=True):
            weight = part.work.weight
            if (new := states.get(param)) and part.is_last:
                part.put_state(state.make(weight.host), new)
            if weight.is_narrow:
                part.of(weight.wire).copy_(param)

    def step_on_device(self, work: list[Work], state: WaitingState) -> None:
        """Step resident weights where they are, as a plain run steps them."""
        params: list[list[Tensor]] = [[] for _ in self._options]
        states: dict[Tensor, Any] = collections.defaultdict(dict)
        made = []
        for weight, grad, group in work:
            param = weight.there.detach()
            param.grad = grad.on_device() if isinstance(grad, GradientBytes) else grad.to(param.device)
            if own := state.peek(weight.host):
                states[param] = dict(own)
            params[group].append(param)
            made.append(param)
        self._call(params, states, {name: value.to(self._device) for name, value in self._scaling.items()})
        for (weight, grad, _), param in zip(work, made, strict=True):
            if new := states.get(param):
                state.make(weight.host).update(new)
            if self._scaling and (there := param.grad) is not None:  # a fused kernel divides them by the scale in place
                grad.keep_write(there) if isinstance(grad, GradientBytes) else grad.copy_(there)

    def _call(self, params: list[list[Tensor]], states: dict[Tensor, Any], scaling: Options) -> None:
        """Call the class's step on other parameters and state than the user's."""
        groups = [{**group, "params": own} for group, own in zip(self._options, params, strict=True)]
        code_of_step(self._user)(shadow_of(self._user, groups, state=states, **scaling))

    def _runs(self, work: list[Work], state: WaitingState) -> Iterator[list[Slice]]:
        """Cut weights into runs of slices of about a chunk's elements; a step that makes state is of a whole."""
        cut = [item for item in work if self._is_cut(item, state)]
        if len(cut) < len(work):
            whole = {id(item.weight) for item in cut}
            yield [Slice(item, None, None) for item in work if id(item.weight) not in whole]
        run: list[Slice] = []
        room = self._chunk
        for item in cut:
            for start in range(0, item.weight.value.numel(), self._chunk):
                stop = min(start + self._chunk, item.weight.value.numel())
                run.append(Slice(item, start, stop))
                room -= stop - start
                if room <= 0:
                    yield run
                    run, room = [], self._chunk
        if run:
            yield run

    def _is_cut(self, item: Work, state: WaitingState) -> bool:
        value, own = item.weight.value, state.peek(item.weight.host)
        if not (self._is_elementwise and own and value.ndim and value.numel()) or None in own.values():
            return False
        if not isinstance(item.grad, GradientBytes):
            return False
        alike = [entry for entry in own.values() if isinstance(entry, Tensor) and entry.shape == value.shape]
        return all(entry.stride() == value.stride() for entry in alike)


def shadow_of(optimizer: optim.Optimizer, groups: list[Options], **attributes: Any) -> Any:
    """Make an optimizer that has other groups, and is the user's otherwise."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__ = {**vars(optimizer), **attributes, "param_groups": groups}
    return shadow
