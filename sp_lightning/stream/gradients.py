"""Gradients: packed copies down, and tensors that answer only when somebody asks.

`p.grad` is a `HostGradient`. Its norm is computed where the gradient came from, by the plain run's kernel; a factor
that multiplies it is noted, and multiplied inside the optimizer's own pass. So clipping by norm moves no bytes. Any
other function gets the true gradient in host memory.

Each backward has a record of its own, by autograd's number. `.grad` is written as the backward ends, by the thread that
called it, or by the next touch of a weight where an exception ended the backward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..compat.streaming import (
    as_subclass,
    at_end_of_backward,
    copy_all,
    graph_task,
    hooks_after_accumulation,
    hooks_of_gradient,
    multiply_all,
    norms_of_all,
    unscale_all,
    without_dispatch,
)
from ..errors import ExactnessError, UnsupportedError
from ..host.device import NOT_RECORDED, Arrival, Device, Ring, aligned
from ..host.room import Room
from .lazy import (
    ARRAYS,
    METADATA,
    Lazy,
    data_of,
    found_in,
    grad_of,
    has_others,
    in_own_step,
    set_data,
    set_grad,
    shares_bytes,
)
from .leaf import Weight, stepped_already, version_of
from .unit import Unit

ADDED = 1 << 20  # elements that are added at a time: their copies in a wider type stay in the cores' caches
# Functions whose results are over a gradient's bytes, and no tensors.
EXPOSING = {*ARRAYS, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}
JOINING = {torch.stack, torch.cat, torch.hstack}  # functions that make one tensor of a list


class Norm(Tensor):
    """A gradient's norm on the device, where clipping stacks and sums norms as in a plain run.

    Joined with tensors on the host it is one of them, as between steps all weights and gradients are.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and isinstance(args[0], Norm):
            return args[0]  # clipping asks for the device of the first gradient
        with without_dispatch():
            if func in JOINING and any(tensor.device.type == "cpu" for tensor in args[0]):
                args = [tensor.cpu() for tensor in args[0]], *args[1:]
            return func(*args, **(kwargs or {}))


class GradientBytes:
    """The bytes that backwards left of a weight's gradient.

    `full` is what the user sees: in host memory, in the weight's type, and without bytes until somebody asks for it.
    `raw` has the truth, times `factors`; it is `full` once that has its bytes.
    """

    is_mean = False  # whether it is a mean over ranks, to which nothing was added

    def __init__(self, weight: Weight, raw: Tensor, arrived: Arrival, norm: Tensor | None) -> None:
        self.weight, self.raw, self.arrived = weight, raw, arrived
        if raw.device.type == "cpu" and raw.dtype == weight.value.dtype and not weight.unit.is_resident:
            self.full = raw
        else:
            self.full = self.room(weight.value)
        self.norm = norm  # by the kernel for many tensors
        self.factors: list[Any] = []
        self.is_stepped_early = False  # whether a step has read it that the user has not called yet
        self.is_exposed = False  # whether the user may have a view of it
        self.adding: Future[None] | None = None  # of another gradient to it
        self.step: Future[None] | None = None  # the step that reads it

    def room(self, like: Tensor) -> Tensor:
        """Make a tensor for the gradient as the user sees it, without bytes unless it is in a file."""
        if (spill := self.weight.unit.spill) is not None:
            return spill.take(like)  # type: ignore[no-any-return]
        full = torch.empty_like(like, device="cpu")
        full.untyped_storage().resize_(0)
        return full

    def _each(self, work: Callable[..., Any], target: Tensor, *others: Tensor) -> None:
        """Do elementwise work, which writes to the first tensor, wherever they are."""
        spill = self.weight.unit.spill
        work(target, *others) if spill is None else spill.each(work, target, *others)

    @property
    def is_full(self) -> bool:
        """Whether `full` has the bytes."""
        return self.raw is self.full

    def wait(self) -> None:
        """Wait until nothing adds to it or steps with it. A step's error is raised by the unit's `wait_step`."""
        self.wait_added()
        if self.step is not None:
            futures.wait([self.step])

    def wait_added(self) -> None:
        """Wait until nothing adds to it."""
        if self.adding is not None:
            self.adding.result()

    def settle(self) -> Tensor:
        """Wait for all that is pending, and return the true gradient in host memory."""
        self.wait()
        return self.true()

    def true(self) -> Tensor:
        """Return the true gradient in host memory. Called by the optimizer's thread, or when nothing is pending."""
        self.arrived.synchronize()
        if self.raw is not self.full:
            if self.weight.unit.spill is None:
                self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
            self._each(Tensor.copy_, self.full, self.raw)
            self.raw = self.full
        self.multiply()
        self.norm = None  # the caller may change the gradient
        return self.full

    def multiply(self) -> None:
        """Multiply by the factors that were noted."""
        for factor in self.factors:
            self._each(functools.partial(Tensor.mul_, other=factor), self.raw)
        if self.factors:
            self.factors, self.norm = [], None

    def make_true(self) -> None:
        """Have the true gradient in `raw`, in the weight's type. Called as `true` is."""
        self.true()

    def on_device(self) -> Tensor:
        """Return the true gradient on the device."""
        return self.settle().to(self.weight.there.device)

    def find_norm(self, compute: Callable[[Tensor], Tensor], is_for_many: bool) -> Tensor:
        """Return the gradient's norm by this function, computed on the device."""
        if is_for_many and self.norm is not None and not self.factors and not self.norm._version:  # nobody wrote to it
            return self.norm
        return compute(self.on_device())

    def accumulate(self, came: GradientBytes, worker: Executor) -> None:
        """Add the gradient of another backward, beside what follows unless the user may have a view."""
        if self.factors or self.step is not None:
            self.settle()
            self.step = None
        self.norm, self.is_mean = None, False
        self.adding = worker.submit(self._add, came, self.adding)
        if self.is_exposed:
            self.wait_added()  # nothing makes readers of a view wait

    def _add(self, came: GradientBytes, before: Future[None] | None) -> None:
        """Add another gradient slice by slice: the first one is widened in a core's cache as the second is added."""
        if before is not None:
            before.result()  # raise its error: a sum without it is none
        came.arrived.synchronize()
        if self.is_full or self.factors or self.weight.unit.spill is not None:
            total, first = self.true(), None
        else:
            self.arrived.synchronize()
            total, first = self.full, self.flat()
            total.untyped_storage().resize_(total.numel() * total.itemsize)
        other = came.raw.to(total.device)
        if self.weight.unit.spill is not None or other.numel() != total.numel():
            self._each(Tensor.add_, total, other)
            return
        flat, other = (one.as_strided((total.numel(),), (1,)) for one in (total, other))
        for at in range(0, total.numel(), ADDED):
            part = slice(at, at + ADDED)
            mine = flat[part] if first is None else first[part].to(flat.dtype)
            torch.add(mine, other[part], out=flat[part])
        self.raw = total

    def flat(self) -> Tensor:
        """Return all elements in the order of memory, in the type in which they came."""
        return self.raw.as_strided((self.raw.numel(),), (1,))


class DeviceGradientBytes(GradientBytes):
    """A gradient that stays where it is stepped: on the device, until it is read on the host."""

    def make_true(self) -> None:
        if self.is_full:
            self.true()
            return
        here = self.weight.unit.device.current_stream()
        self.arrived.wait(here)
        self.raw = self.raw.to(self.weight.value.dtype)
        self.multiply()
        self.arrived = here.record_event()

    def on_device(self) -> Tensor:
        if self.is_full:
            return super().on_device()
        self.wait()
        self.make_true()
        return self.raw

    def accumulate(self, came: GradientBytes, worker: Executor) -> None:
        """Add the gradient of another backward, where the sum is."""
        self.wait()
        self.step = None
        self.make_true()
        if self.is_full or not isinstance(came, DeviceGradientBytes):
            came.true()
        here = self.weight.unit.device.current_stream()
        came.arrived.wait(here)
        self.raw.add_(came.raw.to(self.raw.device))
        self.arrived, self.norm, self.is_mean = here.record_event(), None, False


class HostGradient(Lazy, Tensor):
    """The gradient of a streamed parameter."""

    content: GradientBytes

    @staticmethod
    def of(content: GradientBytes) -> HostGradient:
        """Make the tensor that the user sees."""
        gradient: HostGradient = as_subclass(HostGradient, content.full)
        gradient.content = content
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or in_own_step():
            with without_dispatch():
                return func(*args, **(kwargs or {}))
        if has_others(types):
            return NotImplemented
        if func in DEFERRED:
            answer = DEFERRED[func](*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        moved: list[BroughtDown] = []
        args, kwargs = _on_host(args, moved), _on_host(kwargs or {}, moved)
        return _keep_writes(super().__torch_function__(func, types, args, kwargs), moved)

    def plain(self) -> Tensor:
        """Return the true gradient, over the same bytes, as a tensor that nothing watches."""
        self.before()
        if (content := getattr(self, "content", None)) is not None:
            content.is_exposed = True
        with without_dispatch():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = copy.deepcopy(self.plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def is_unread(self) -> bool:
        """Whether nothing steps with the bytes, and nobody has a view of them."""
        content = getattr(self, "content", None)
        return content is not None and content.step is None and not content.is_exposed

    def before(self) -> None:
        if (content := getattr(self, "content", None)) is not None:
            if content.is_stepped_early:
                raise ExactnessError(
                    f"the gradient of {content.weight.name} was read or changed between backward and optimizer.step(),"
                    " but the weight was stepped beside backward: set optimizer_overlap=False"
                )
            content.settle()

    def after(self, func: Any, result: Any) -> None:
        """Note whether the result is over the same bytes, or autograd keeps them."""
        if (content := getattr(self, "content", None)) is not None and not content.is_exposed:
            others = [tensor for tensor in found_in(result, Tensor) if tensor is not self]
            content.is_exposed = func in EXPOSING or any(
                tensor.requires_grad or shares_bytes(tensor, content.full) for tensor in others
            )


class BroughtDown(NamedTuple):
    """A tensor on a device, and its copy that a function of gradients gets."""

    there: Tensor
    here: Tensor
    version: int  # of the copy before the function


def _on_host(value: Any, moved: list[BroughtDown]) -> Any:
    """Bring tensors on a device down, which a function gets together with a gradient."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            return value
        with without_dispatch():
            here = value.to("cpu")
        moved.append(BroughtDown(value, here, version_of(here)))
        return here
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item, moved) for item in value)
    if isinstance(value, dict):
        return {key: _on_host(item, moved) for key, item in value.items()}
    return value


def _keep_writes(answer: Any, moved: list[BroughtDown]) -> Any:
    """Copy up what a function wrote to tensors that were brought down, and return them in their copies' place."""
    for there, here, version in moved:
        if version_of(here) != version:
            with torch.no_grad(), without_dispatch():
                there.copy_(here)
        if answer is here:
            answer = there
    return answer


# ---- functions of gradients that need no bytes on the host


def _norm(func: Callable[..., Tensor]) -> Callable[..., Any]:
    """Answer with the norm of one gradient, by this function on the device."""

    def answer(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(gradient, "content") or kwargs or len(args) > 1:
            return NotImplemented
        return gradient.content.find_norm(lambda there: func(there, *args), False).as_subclass(Norm)

    return answer


def _vector_norm(gradient: Any, ord: Any = 2, **kwargs: Any) -> Any:
    """Answer as clipping does in a plain run, where it computes the norms of all gradients at once.

    Clipping calls this function for tensors of a class that it does not know.
    """
    found = _norms([gradient], ord, **kwargs)
    return found if found is NotImplemented else found[0]


def _norms(gradients: Any, ord: Any = 2, **kwargs: Any) -> Any:
    if kwargs or not all(hasattr(gradient, "content") for gradient in gradients):
        return NotImplemented
    contents = [gradient.content for gradient in gradients]
    found = [content.find_norm(lambda there: norms_of_all([there], ord)[0], ord == 2) for content in contents]
    return [norm.as_subclass(Norm) for norm in found]


def _multiply(gradients: Any, factor: Any) -> Any:
    is_number = isinstance(factor, (int, float)) or (type(factor) in (Tensor, Norm) and not factor.ndim)
    if not is_number or not all(isinstance(one, HostGradient) and one.is_unread for one in gradients):
        return NotImplemented
    noted: dict[torch.dtype, Any] = {}
    for gradient in gradients:
        content = gradient.content
        content.wait_added()  # or the sum would be of a multiplied gradient and of one that is not
        if gradient.dtype not in noted:
            noted[gradient.dtype] = _noted(factor, gradient.dtype, content.weight.unit.device)
        content.factors.append(noted[gradient.dtype])
    return gradients


def _noted(factor: Any, dtype: torch.dtype, device: Device) -> Any:
    """Return a factor on the host, with the bits by which the device's kernels multiply a gradient of this type.

    One on the host counts as one on the device: clipping brings it to where the gradients are.
    """
    if not isinstance(factor, Tensor):
        return factor
    is_rounded = dtype.itemsize < factor.itemsize and device.rounds_factors
    with without_dispatch():
        return factor.to("cpu", dtype if is_rounded else factor.dtype, copy=True)


def _multiply_one(gradient: Any, factor: Any) -> Any:
    return NotImplemented if _multiply([gradient], factor) is NotImplemented else gradient


def _unscale(gradients: Any, found_inf: Any, inv_scale: Any) -> Any:
    """Wait for the factor of a GradScaler: it comes down by a copy that nothing else waits for."""
    for gradient in gradients:
        if isinstance(gradient, HostGradient) and hasattr(gradient, "content"):
            gradient.content.weight.unit.device.synchronize()
            break
    return NotImplemented


def _write_data(gradient: Any, data: Tensor) -> None:
    """Write data that the user assigns to the bytes that the next step reads."""
    gradient.before()
    with without_dispatch():
        data_of(gradient).copy_(data)


DEFERRED: dict[Any, Callable[..., Any]] = {
    set_data: _write_data,
    unscale_all: _unscale,
    norms_of_all: _norms,
    torch.linalg.vector_norm: _vector_norm,
    torch.norm: _norm(torch.norm),
    Tensor.norm: _norm(Tensor.norm),
    Tensor.mul_: _multiply_one,
    multiply_all: _multiply,
}


# ---- the way down


class Backward:
    """A backward, and the gradients of units that wait for the rest of their unit's."""

    def __init__(self, collector: Gradients, thread: int | None) -> None:
        self.collector = collector
        self.thread = thread  # which called it
        self.came: dict[Unit, dict[Weight, Tensor]] = {}
        self.streams: set[Any] = set()  # on which they were computed
        self.sent: list[tuple[Weight, Any]] = []  # what is yet to be put into `.grad`


# By autograd's number and the stream: those under way, and those that an exception ended.
backwards: dict[tuple[int, Gradients], Backward] = {}


def recover() -> None:
    """Deliver the gradients of ended backwards, as a plain run has all that were accumulated before an exception.

    A thread that is in no backward has ended those that it called; those of another thread may be under way.
    """
    if graph_task() != -1:
        return
    here = threading.get_ident()
    for key, backward in list(backwards.items()):
        if backward.thread == here and backwards.pop(key, None) is not None:  # else a hook of the user's came here
            backward.collector.end(backward)


class Stepper(Protocol):
    """The steps of a stream, as gradients know them."""

    early: Any  # the optimizer that steps this backward's gradients as they come; None: there is none

    @property
    def thread(self) -> Executor:
        """The thread that runs steps, one after the other, and sums of gradients between them."""

    def delivered(self, unit: Unit, whose: list[Weight], is_complete: bool) -> None:
        """Note a unit's gradients: all of them, or those that came by the end of backward."""

    def backward_ended(self) -> None:
        """Note that the backward has ended."""


class Gradients:
    """Takes the leaves' gradients to the user's parameters."""

    def __init__(self, device: Device, steps: Stepper, room: Room | None = None) -> None:
        self._device, self._steps = device, steps
        self._room = room  # for gradients that stay on the device until the step
        self.ring = Ring()

    def close(self) -> None:
        """Release memory on the device, once the copies are done."""
        self.ring.close()

    def take(self, weight: Weight, leaf: Tensor) -> None:
        """Take a leaf's gradient; with the last one of a unit, send them down."""
        key, unit = (graph_task(), self), weight.unit
        if (backward := backwards.get(key)) is None:
            backward = backwards[key] = Backward(self, unit.window.thread)
            at_end_of_backward(lambda: self.end(backwards.pop(key)))
        backward.streams.add(self._device.current_stream())
        came = backward.came.setdefault(unit, {})
        with without_dispatch():
            grad = grad_of(leaf)
            set_grad(leaf, None)
            trains = weight.host.requires_grad
        if grad is None or not trains:
            return  # frozen since the forward, as by `toggle_optimizer`
        if weight.is_half_applied:
            raise stepped_already(weight.name)
        if grad.requires_grad:
            raise UnsupportedError(
                f"backward(create_graph=True) would give {weight.name} a gradient with a graph, which cannot be in host"
                " memory: compute such gradients by torch.autograd.grad(..., create_graph=True)"
            )
        if weight.is_shard and (grad := weight.received(grad)) is None:
            return
        came[weight] = grad
        del grad  # which may be wider than what is sent down of it
        if len(came) >= unit.trained:
            self._flush(backward, unit, backward.came.pop(unit), is_complete=True)

    def end(self, backward: Backward) -> None:
        """Send down what came of units that did not get all their gradients, and put all into `.grad`."""
        if backwards:
            self._deposit_before(backward)
        with contextlib.ExitStack() as ends:  # which go on, last one first, where a hook of the user's raises
            if (listener := self._device.counters.listener) is not None:
                ends.callback(listener.idle)
            ends.callback(self._steps.backward_ended)
            ends.callback(self._deposit_all, backward.sent)
            while backward.came:
                self._flush(backward, *backward.came.popitem(), is_complete=False)

    def _deposit_before(self, inner: Backward) -> None:
        """Deposit what a backward has so far of weights that the one inside of it has, too: sums depend on order."""
        mine = {weight for weight, _ in inner.sent}.union(*inner.came.values())
        for backward in list(backwards.values()):
            if backward.collector is self:
                for unit in [unit for unit, came in backward.came.items() if not mine.isdisjoint(came)]:
                    self._flush(backward, unit, backward.came.pop(unit), is_complete=False)
                sent, backward.sent[:] = backward.sent[:], []
                self._deposit_all(sent)

    def _flush(self, backward: Backward, unit: Unit, came: dict[Weight, Tensor], is_complete: bool) -> None:
        self._prepare(backward, came)
        with torch.no_grad(), without_dispatch():
            sent = self._send(unit, came, self._device.current_stream())
        self._deliver(backward, unit, sent, is_complete)

    def _prepare(self, backward: Backward, came: dict[Weight, Tensor]) -> None:
        """Have the caller's stream wait for gradients, and pass them through the user's hooks."""
        here = self._device.current_stream()
        for stream in backward.streams - {here}:
            here.wait_event(stream.record_event())
            for grad in came.values():
                self._device.keep_for(grad, here)
        with without_dispatch():
            hooked = [weight for weight in came if hooks_of_gradient(weight.host) or weight.is_narrow]
        with torch.no_grad():
            for weight in hooked:  # with dispatch: the weights and gradients that hooks read wait
                window = weight.unit.window
                was_in_step, window.is_in_step = window.is_in_step, True  # hooks get weights where the gradients are
                try:
                    came[weight] = self._hooked(weight, came[weight])
                finally:
                    window.is_in_step = was_in_step

    def _deliver(self, backward: Backward, unit: Unit, sent: list[tuple[Weight, Any]], is_complete: bool) -> None:
        """Put a unit's gradients into `.grad`, now if a step or a hook of the user's reads them, and tell the steps."""
        with without_dispatch():
            after = [weight.host for weight, _ in sent if hooks_after_accumulation(weight.host)]
        if after or self._steps.early is not None:
            backward.sent += [one for one in sent if one[0].is_shard]  # which wait, and which no step of ours reads
            self._deposit_all([one for one in sent if not one[0].is_shard])
            for host in after:
                for hook in list(hooks_after_accumulation(host).values()):
                    hook(host)
        else:
            backward.sent += sent
        self._steps.delivered(unit, [weight for weight, _ in sent], is_complete)

    @staticmethod
    def _hooked(weight: Weight, grad: Tensor) -> Tensor:
        """Pass a gradient through the user's hooks on the parameter."""
        with without_dispatch():
            hooks = list((hooks_of_gradient(weight.host) or {}).values())
        for hook in hooks:
            weight.uses = 0
            changed = hook(grad)
            grad = grad if changed is None else changed
        if weight.is_narrow and weight.uses == 1:
            grad = grad.to(weight.dtype)  # in which it came from the only use
        weight.uses = 0
        return grad

    def _send(self, unit: Unit, came: dict[Weight, Tensor], here: Any) -> list[tuple[Weight, Any]]:
        """Send a unit's gradients down, or note those of resident weights; return them in their order."""
        dense = [(weight, grad) for weight, grad in came.items() if grad.layout is torch.strided]
        sent: dict[Weight, Any] = dict(came)
        if dense:
            norms = norms_by_type(dense)
            room = None if unit.is_resident else self._room
            stays = unit.is_resident or (room is not None and room.takes(sum(grad.nbytes for _, grad in dense)))
            kind = DeviceGradientBytes if stays else GradientBytes
            raws, arrived = self._kept(dense, here) if stays else self._packed(unit, dense, here)
            for (weight, _), raw in zip(dense, raws, strict=True):
                sent[weight] = kind(weight, raw, arrived, norms[weight])
                if stays and room is not None:
                    room.keep(sent[weight], raw.nbytes)
        if len(dense) < len(came):
            for weight, grad in came.items():
                if grad.layout is not torch.strided:
                    sent[weight] = grad.to("cpu", weight.value.dtype)
        return list(sent.items())

    def _kept(self, dense: list[tuple[Weight, Tensor]], stream: Any) -> tuple[list[Tensor], Any]:
        """Keep gradients on the device, as fresh memory in the order of their weights."""
        kept = [torch.empty_like(weight.there, dtype=grad.dtype).copy_(grad) for weight, grad in dense]
        return kept, stream.record_event()

    def _packed(self, unit: Unit, dense: list[tuple[Weight, Tensor]], stream: Any) -> tuple[list[Tensor], Any]:
        """Pack gradients on the device, and start to copy them down as one."""
        places, total = [], 0
        host: Any = self._device if unit.spill is None else unit.spill
        round_up = aligned if unit.spill is None else unit.spill.aligned
        nbytes = [grad.nbytes for _, grad in dense]
        for each in nbytes:
            places.append(total)
            total += round_up(each)
        there, here = self._device.empty(total), host.passing(total)
        typed = {dtype: there.view(dtype) for dtype in {grad.dtype for _, grad in dense}}
        packed, views, storage = [], [], here.untyped_storage()
        for at, (weight, grad) in zip(places, dense, strict=True):
            shape, stride, _ = weight.form
            packed.append(typed[grad.dtype].as_strided(shape, stride, at // grad.itemsize))
            alone = storage[at : at + grad.nbytes]  # torch.save writes whole storages
            views.append(torch.empty(0, dtype=grad.dtype, device=alone.device).set_(alone, 0, shape, stride))
        copy_all(packed, [grad for _, grad in dense])
        self._device.down.wait_event(stream.record_event())
        counters, listener = self._device.counters, self._device.counters.listener
        recorded = NOT_RECORDED if listener is None else listener.work("down", unit.name, "gradients", sum(nbytes))
        arrived = host.send_down(here, there, recorded)
        counters.bytes_down += sum(nbytes)
        self.ring.hold(there, [arrived], stream)
        return views, arrived

    def assign(self, weight: Weight, grad: Tensor) -> Tensor:
        """Make a parameter's gradient of a tensor on the device, which the user assigns."""
        with torch.no_grad(), without_dispatch():
            ((_, made),) = self._send(weight.unit, {weight: grad}, self._device.current_stream())
            return HostGradient.of(made) if isinstance(made, GradientBytes) else made

    def _deposit_all(self, sent: list[tuple[Weight, Any]]) -> None:
        """Make these the parameters' gradients, or add them to the gradients that are there."""
        with without_dispatch(), torch.no_grad():
            for weight, came in sent:
                if weight.is_shard:
                    weight.deposit(came, is_sum=False)
                    continue
                host = weight.host
                there = grad_of(host)
                if there is None:
                    set_grad(host, HostGradient.of(came) if isinstance(came, GradientBytes) else came)
                elif isinstance(came, GradientBytes) and isinstance(there, HostGradient):
                    there.content.accumulate(came, self._steps.thread)
                else:
                    _add_tensors(host, there, came)


def norms_by_type(dense: list[tuple[Weight, Tensor]]) -> dict[Weight, Tensor]:
    """Return the gradients' norms, by the kernel for many tensors of one type: that for several types is another."""
    alike: dict[torch.dtype, dict[Weight, Tensor]] = {}
    for weight, grad in dense:
        alike.setdefault(weight.value.dtype, {})[weight] = grad.to(weight.value.dtype)
    norms: dict[Weight, Tensor] = {}
    for grads in alike.values():
        norms.update(zip(grads, norms_of_all(list(grads.values()), 2.0), strict=True))
    return norms


def _add_tensors(host: nn.Parameter, there: Any, came: Any) -> None:
    if isinstance(there, HostGradient):
        there.before()
    new = came.settle() if isinstance(came, GradientBytes) else came
    set_grad(host, new + there if there.is_sparse and not new.is_sparse else there.add_(new))


def release_gradient(host: nn.Parameter) -> None:
    """Make a parameter's gradient a plain tensor in host memory."""
    with without_dispatch():
        if isinstance(grad := grad_of(host), HostGradient):
            set_grad(host, grad.content.settle() if hasattr(grad, "content") else grad.detach())
