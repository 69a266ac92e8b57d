"""The user's optimizer over slices of weights, gradients and state that fit a core's cache.

A `SlicedOptimizer` has the class and the options of the user's optimizer. Its parameters are slices of weights, with
slices of their gradients and of the user's own state: torch's optimizers of `ELEMENTWISE` treat each element by itself,
so the elements are stepped as in one whole call.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, optim

from ..stream.gradients import GradientBytes
from ..stream.leaf import Weight
from .state import WaitingState

FUSED = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad}  # which torch fuses on the host
ELEMENTWISE = FUSED | {optim.RMSprop, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop, optim.Adadelta}
BY_WEIGHT = {optim.Adafactor, optim.Muon, optim.SparseAdam}  # which treat each weight by itself
Options: TypeAlias = dict[str, Any]

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


class SlicedOptimizer:
    """The user's optimizer, over slices of what it has."""

    def __init__(self, user: optim.Optimizer, chunk: int) -> None:
        self.user, self._chunk = user, chunk
        step = type(user).step
        self._step: Any = getattr(step, "__wrapped__", step)  # without the hooks of the user's step
        self._is_elementwise = type(user) in ELEMENTWISE
        self.is_known = self._is_elementwise or type(user) in BY_WEIGHT

    def options(self, is_host: bool) -> list[Options]:
        """Note the options of the groups as they are now."""
        found = [
            {key: _noted(value) for key, value in group.items() if key != "params"} for group in self.user.param_groups
        ]
        for group in found if is_host and type(self.user) in FUSED else ():
            if group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
                group["fused"] = True
        return found

    def scaling(self, device: torch.device) -> Options:
        """Note what a GradScaler told the optimizer for this step."""
        given = {name: getattr(self.user, name, None) for name in SCALING}
        return {name: value.to(device) for name, value in given.items() if value is not None}

    def step(self, work: list[Work], options: list[Options], scaling: Options, state: WaitingState) -> None:
        """Step weights on the host, with options as they were when the user called the step."""
        for run in self._runs(work, state):
            params: list[list[Tensor]] = [[] for _ in options]
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
            self._call(options, params, states, scaling)
            for part, param in zip(ordered, made, strict=True):
                weight = part.work.weight
                if (new := states.get(param)) and part.is_last:
                    part.put_state(state.make(weight.host), new)
                if weight.is_narrow:
                    part.of(weight.wire).copy_(param)
        for _, grad, _ in work:
            if isinstance(grad, GradientBytes) and grad.is_full:
                grad.norm = None  # a fused kernel that scales gradients writes them

    def step_on_device(self, work: list[Work], options: list[Options], scaling: Options, state: WaitingState) -> None:
        """Step resident weights where they are, as a plain run steps them."""
        params: list[list[Tensor]] = [[] for _ in options]
        states: dict[Tensor, Any] = collections.defaultdict(dict)
        made = []
        for weight, grad, group in work:
            param = weight.there.detach()
            param.grad = grad.on_device() if isinstance(grad, GradientBytes) else grad.to(param.device)
            if own := state.peek(weight.host):
                states[param] = dict(own)
            params[group].append(param)
            made.append(param)
        self._call(options, params, states, scaling)
        for (weight, _, _), param in zip(work, made, strict=True):
            if new := states.get(param):
                state.make(weight.host).update(new)

    def _call(
        self,
        options: list[Options],
        params: list[list[Tensor]],
        states: dict[Tensor, Any],
        scaling: Options,
    ) -> None:
        """Call the class's step on other parameters and state than the user's."""
        other = object.__new__(type(self.user))
        other.__dict__ = {**vars(self.user), "state": states, **scaling}
        other.param_groups = [{**group, "params": own} for group, own in zip(options, params, strict=True)]
        self._step(other)

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
        if not (self._is_elementwise and own and value.ndim) or None in own.values():
            return False
        if not isinstance(item.grad, GradientBytes):
            return False
        alike = [entry for entry in own.values() if isinstance(entry, Tensor) and entry.shape == value.shape]
        return all(entry.stride() == value.stride() for entry in alike)


def _noted(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
