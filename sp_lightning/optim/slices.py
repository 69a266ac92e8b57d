"""The user's optimizer over slices of weights, gradients and state: what fits a core's cache, or a trip to the device.

A `SlicedOptimizer` has the class and the options of the user's optimizer. Its parameters are slices of weights, with
slices of their gradients and of the user's own state: torch's optimizers of `ELEMENTWISE` treat each element by itself,
so the elements are stepped as in one whole call. State that a first step makes is put together of its slices'.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from ..compat.dynamo import compile_lock
from ..compat.torch import devices_with_lists
from ..stream.host_gradient import GradientBytes
from ..stream.leaf import Weight
from .compiled import GroupOptions, loop_for, rounds_alike, writes_gradients
from .compiled import step as step_compiled
from .places import OnHost, Place
from .state import WaitingState

ELEMENTWISE = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adamax, optim.NAdam}
ELEMENTWISE |= {optim.RAdam, optim.ASGD, optim.Rprop, optim.Adadelta}
BY_WEIGHT = {optim.Adafactor, optim.Muon, optim.SparseAdam}  # optimizers that treat each weight by itself

COUNTS = ("step", "mu_product")  # numbers of the state that a plain run has on the host, unless a kernel reads them
SCALING = ("grad_scale", "found_inf")  # what a GradScaler tells a fused optimizer


class StepWork(NamedTuple):
    """One weight to step, with its gradient and the index of its optimizer group."""

    weight: Weight
    grad: Any  # GradientBytes, or a tensor that the user made
    group: int


class Slice(NamedTuple):
    """A range of a weight's elements in the order of memory; without ends the whole weight, in its shape."""

    work: StepWork
    own: GroupOptions  # the weight's state before the step
    start: int | None
    stop: int | None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this slice's range of a tensor that is laid out as the weight is."""
        if self.start is None or self.stop is None:
            return tensor.detach()
        return tensor.as_strided((self.stop - self.start,), (1,), tensor.storage_offset() + self.start)

    def gradient(self, place: Place) -> Tensor:
        """Return this slice's range of the gradient, in the memory where it is, ordered after its arrival."""
        grad = self.work.grad
        if not isinstance(grad, GradientBytes):
            return grad  # type: ignore[no-any-return]
        place.wait(grad.arrived, grad.raw)
        return self.of(grad.raw)

    def multiplied(self, grad: Tensor) -> Tensor:
        """Return a gradient in the weight's type, multiplied by its noted factors; the given tensor is not changed."""
        if isinstance(self.work.grad, GradientBytes):
            grad = grad.to(self.work.weight.value.dtype)
            for factor in self.work.grad.factors:
                grad = grad * factor  # the gradient stays as it is: a step that raises has changed nothing
        return grad

    def put_state(
        self, state: GroupOptions, new: GroupOptions, given: dict[int, Tensor], place: Place
    ) -> list[tuple[Tensor, Tensor]]:
        """Put ``new``, this slice's state after a step, into ``state``, the weight's; numbers come from the last slice.

        Return pairs (target, stepped tensor) that are still to be copied. Tensors whose ids are in ``given`` were
        stepped in place and need no copy.
        """
        weight, down = self.work.weight, []
        is_last = self.stop is None or self.stop == weight.value.numel()
        for key, entry in new.items():
            if not isinstance(entry, Tensor):
                state[key] = entry
            elif entry.ndim and id(entry) in given:
                continue
            elif self.start is not None and entry.ndim:
                if not isinstance(mine := state.get(key), Tensor):
                    mine = state[key] = place.new_state(place.home(weight), entry.dtype)
                down.append((self.of(mine), entry))
            elif is_last or key not in state:
                mine = state.get(key)
                if not isinstance(mine, Tensor) or (mine.shape, mine.dtype) != (entry.shape, entry.dtype):
                    belongs_here = entry.device.type == "cpu" or entry.device == place.home(weight).device
                    mine = state[key] = entry if belongs_here else place.new_state(entry, entry.dtype)
                down.append((mine, entry))
        return down


def steps_by_weight(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer's step treats each weight by itself."""
    return type(optimizer) in ELEMENTWISE | BY_WEIGHT


def names_by_weight() -> list[str]:
    """List the optimizers whose step treats each weight by itself."""
    return sorted(kind.__name__ for kind in ELEMENTWISE | BY_WEIGHT)


def counts_on_device(optimizer: optim.Optimizer, group: GroupOptions) -> bool:
    """Whether torch on a device keeps all numbers of the state, such as step counts, on the device for this group."""
    return bool(group.get("fused") or group.get("capturable")) or type(optimizer) is optim.ASGD


def options_of(optimizer: optim.Optimizer, group: GroupOptions, device: torch.device) -> GroupOptions:
    """Copy a group's options; where the user chose no kernels, choose those that torch takes on the device."""
    noted = {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
    is_free = type(optimizer) in ELEMENTWISE and noted["foreach"] is None and noted.get("fused") is None
    has_no_list = isinstance(optimizer, optim.Adam) and isinstance(noted["lr"], Tensor) and not noted["capturable"]
    if is_free and not noted.get("differentiable") and not has_no_list:
        noted["foreach"] = device.type in devices_with_lists()
    return noted


def steps_in_parts(optimizer: optim.Optimizer | None, device: torch.device) -> bool:
    """Whether a plain step on the device treats each element by itself, and leaves gradients as they are."""
    if optimizer is None or type(optimizer) not in ELEMENTWISE:
        return False
    groups = (options_of(optimizer, group, device) for group in optimizer.param_groups)
    return not any(writes_gradients(type(optimizer), group) for group in groups)


def code_of_step(optimizer: optim.Optimizer) -> Any:
    """Return an optimizer's step function without the hooks that torch runs around it."""
    step: Any = type(optimizer).step
    return getattr(step, "__wrapped__", step)


class SlicedOptimizer:
    """One call of the user's optimizer step over slices, with the options as they were at that call."""

    def __init__(self, user: optim.Optimizer, device: torch.device, on_host: bool = True) -> None:
        self.user, self._device = user, device
        self.has_written = False  # whether any weight was stepped
        self.is_elementwise = type(user) in ELEMENTWISE  # such classes take lists of tensors by default
        self._options = [options_of(user, group, device) for group in user.param_groups]
        self._loops = [loop_for(type(user), group, device) if on_host else None for group in self._options]
        self.writes_gradients = any(writes_gradients(type(user), group) for group in self._options)
        self._counts_go_up = [counts_on_device(user, group) for group in self._options]
        given = {name: getattr(user, name, None) for name in SCALING}
        self._scaling = {name: value for name, value in given.items() if value is not None}
        self._scaling_here = {name: value.to("cpu") for name, value in self._scaling.items()}
        # Whether gradients are others after the step: also divided by the scale of a GradScaler.
        self.changes_gradients = bool(self._scaling) or self.writes_gradients

    def unscale(self, work: list[StepWork]) -> None:
        """Divide gradients, of which ranges were stepped, by the scale of a GradScaler, as a fused kernel does."""
        scale = self._scaling_here.get("grad_scale")
        if scale is not None and not self._scaling_here.get("found_inf", 0):
            for _, grad, _ in work:
                (grad.true_on_host() if isinstance(grad, GradientBytes) else grad).div_(scale)

    def makes_numbers(self, whose: list[Weight], state: WaitingState) -> bool:
        """Whether the step makes numbers of torch's default dtype, which a forward beside the step may change."""
        if isinstance(self.user, (optim.SGD, optim.ASGD)):
            return isinstance(self.user, optim.ASGD)  # ASGD makes some at each step, SGD none
        return not all(map(state.peek, [weight.host for weight in whose]))

    def has_devices_bits(self, group: int) -> bool:
        """Whether a step on the host gives a group's weights the same bits as the device's kernels would."""
        cls, options = type(self.user), self._options[group]
        if self._loops[group] is not None or self._device.type == "cpu":
            return True
        return self.is_elementwise and rounds_alike(cls, options, self._device)

    def step(self, work: list[StepWork], state: WaitingState, place: Place) -> None:
        """Step weights. Blocks until results are in place; of resident weights, the work is only queued."""
        left = work
        if isinstance(place, OnHost) and not self._scaling_here.get("found_inf", 0):
            left = step_compiled(self._loops, work, self._scaling_here.get("grad_scale"), state)
            self.has_written = self.has_written or len(left) < len(work)
        if self.changes_gradients:
            for _, grad, _ in left:
                if isinstance(grad, GradientBytes):
                    grad.make_true()  # the step writes to this tensor
        try:
            for run in self._runs(left, state, place.chunk):
                with place.lane():
                    self._step_slices(run, state, place)
                self.has_written = True
        finally:
            place.finish()
        for _, grad, _ in work:
            if isinstance(grad, GradientBytes) and self.changes_gradients:
                grad.norm = None

    def _step_slices(self, run: list[Slice], state: WaitingState, place: Place) -> None:
        """Step one run of slices: bring them to the place, call the optimizer, and copy the results back."""
        ordered = sorted(run, key=operator.attrgetter("work.group"))
        homes = [part.of(place.home(part.work.weight)) for part in ordered]
        made, grads = place.up(homes), place.up([part.gradient(place) for part in ordered])
        params: list[list[Tensor]] = [[] for _ in self._options]
        states: dict[Tensor, Any] = collections.defaultdict(dict)
        given: dict[int, Tensor] = {}  # state that is stepped where it belongs, by its id
        for part, param, grad in zip(ordered, made, grads, strict=True):
            param.grad = part.multiplied(grad)
            params[part.work.group].append(param)
            if part.own:
                states[param] = self._state(part, place, given)
        scaling = place.up(list(self._scaling_here.values()))
        self._call(params, states, dict(zip(self._scaling_here, scaling, strict=True)))
        down = list(zip(homes, made, strict=True))
        for part, param in zip(ordered, made, strict=True):
            weight, grad = part.work.weight, part.work.grad
            if new := states.get(param):
                down += part.put_state(state.make(weight.host), new, given, place)
            if self.changes_gradients and param.grad is not None:
                down.append((part.of(grad.raw) if isinstance(grad, GradientBytes) else grad, param.grad))
            if weight.is_narrow:
                down.append((part.of(weight.wire), param))
        place.down(down)

    def _state(self, part: Slice, place: Place, given: dict[int, Tensor]) -> GroupOptions:
        """Return a slice's state where it is stepped; note in ``given`` the tensors that are stepped in place.

        The numbers of a weight that is cut are copied.
        """
        counts_go_up, shape = self._counts_go_up[part.work.group], part.work.weight.value.shape
        state, going = dict(part.own), []
        for key, entry in part.own.items():
            if isinstance(entry, Tensor):
                if part.start is not None:
                    state[key] = part.of(entry) if entry.shape == shape else entry.clone()
                if counts_go_up or key not in COUNTS:
                    going.append(key)
        for key, entry in zip(going, place.up([state[key] for key in going]), strict=True):
            if entry is state[key]:
                given[id(entry)] = entry
            state[key] = entry
        return state

    def _call(self, params: list[list[Tensor]], states: dict[Tensor, Any], scaling: GroupOptions) -> None:
        """Call the step of the user's optimizer class on these parameters and states in place of the user's own."""
        groups = [{**group, "params": own} for group, own in zip(self._options, params, strict=True)]
        with compile_lock:  # while any thread compiles, torch's optimizers compute with tensors in place of numbers
            code_of_step(self.user)(shadow_of(self.user, groups, state=states, **scaling))

    def _runs(self, work: list[StepWork], state: WaitingState, chunk: int) -> Iterator[list[Slice]]:
        """Cut weights larger than a chunk into slices where `_is_cut` allows it, and yield lists that fill a chunk."""
        run: list[Slice] = []
        room = chunk
        for item in work:
            own, count = state.peek(item.weight.host) or {}, item.weight.value.numel()
            if count <= chunk or not self._is_cut(item, own):
                parts = [Slice(item, own, None, None)]
            else:
                parts = [Slice(item, own, at, min(at + chunk, count)) for at in range(0, count, chunk)]
            for part in parts:
                run.append(part)
                room -= min(count, chunk)
                if room <= 0:
                    yield run
                    run, room = [], chunk
        if run:
            yield run

    def _is_cut(self, item: StepWork, own: GroupOptions) -> bool:
        """Whether a weight may be cut into slices: the optimizer is elementwise, and the state has its layout."""
        value = item.weight.value
        if not (self.is_elementwise and value.ndim and value.numel() and isinstance(item.grad, GradientBytes)):
            return False
        shape, stride = value.shape, value.stride()
        for entry in own.values():
            if entry is None or (isinstance(entry, Tensor) and entry.shape == shape and entry.stride() != stride):
                return False
        return True


def shadow_of(optimizer: optim.Optimizer, groups: list[GroupOptions], **attributes: Any) -> Any:
    """Make an optimizer with other groups and attributes that shares all else with the user's."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__ = {**vars(optimizer), **attributes, "param_groups": groups}
    return shadow
