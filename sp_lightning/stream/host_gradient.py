"""Gradients of streamed weights as the user sees them: tensors that wait for their bytes when these are read.

`p.grad` is a `HostGradient`. Its norm is computed where the gradient came from, by the plain run's kernel; a factor
that multiplies it is noted, and multiplied inside the optimizer's own pass. So clipping by norm moves no bytes. Any
other function gets the true gradient in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import Tensor

from ..compat.dynamo import wait_beside_compilation
from ..compat.torch import as_subclass, multiply_all, norms_of_all, unscale_all, without_dispatch
from ..errors import ExactnessError
from ..host.device import Arrival, Device
from .lazy import (
    ARRAYS,
    METADATA,
    Copies,
    Lazy,
    compiles_own_step,
    data_of,
    found_in,
    has_others,
    replaced,
    set_data,
    shares_bytes,
)
from .leaf import Weight

ADDED = 1 << 20  # elements that are added at a time: their copies in a wider type stay in the cores' caches
# Functions that give access to a gradient's bytes by other objects than tensors.
EXPOSING = {*ARRAYS, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}
JOINING = {torch.stack, torch.cat, torch.hstack}  # functions that make one tensor of a list


class Norm(Tensor):
    """A gradient's norm on the device, where clipping stacks and sums norms as in a plain run.

    A function that joins it with host tensors gets it as a host tensor: between steps all gradients are there.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and isinstance(args[0], Norm):
            return args[0]  # clipping moves norms to the device of the first gradient, which is the host
        with without_dispatch():
            if func in JOINING and any(tensor.device.type == "cpu" for tensor in args[0]):
                args = [tensor.cpu() for tensor in args[0]], *args[1:]
            return func(*args, **(kwargs or {}))


class GradientBytes:
    """The bytes of a weight's gradient, summed over backwards.

    `full` is the tensor that the user sees: in host memory, in the weight's type. `raw` has the bytes that arrived, and
    times `factors` it is the true gradient. Both are one tensor if the gradient arrived in host memory in the weight's
    type; else `full` has no bytes until the gradient is read.
    """

    is_mean = False  # whether this is a mean over ranks, to which no gradient of this rank alone was added

    def __init__(self, weight: Weight, raw: Tensor, arrived: Arrival, norm: Tensor | None) -> None:
        self.weight, self.raw, self.arrived = weight, raw, arrived
        if raw.device.type == "cpu" and raw.dtype == weight.value.dtype and not weight.unit.is_resident:
            self.full = raw
        else:
            self.full = self.room(weight.value)
        self.norm = norm  # on the device, by torch's multi-tensor kernel; None: not known
        self.factors: list[Any] = []
        self.is_stepped_early = False  # whether a step beside backward has read it, which the user has not called yet
        self.is_exposed = False  # whether the user may have a view of the bytes
        self.adding: Future[None] | None = None  # the pending sum with the gradient of another backward
        self.step: Future[None] | None = None  # the optimizer step that reads the bytes

    def room(self, like: Tensor) -> Tensor:
        """Make the tensor that the user sees as the gradient: in the scratch file, or without bytes yet."""
        if (spill := self.weight.unit.spill) is not None:
            return spill.take(like)  # type: ignore[no-any-return]
        full = torch.empty_like(like, device="cpu")
        full.untyped_storage().resize_(0)
        return full

    def _each(self, work: Callable[..., Any], target: Tensor, *others: Tensor) -> None:
        """Run an elementwise function that writes to ``target``, on tensors in memory or in the scratch file."""
        spill = self.weight.unit.spill
        work(target, *others) if spill is None else spill.each(work, target, *others)

    @property
    def is_full(self) -> bool:
        """Whether `full` has the gradient's bytes: in host memory, in the weight's type."""
        return self.raw is self.full

    def wait(self) -> None:
        """Wait until no sum and no step uses the gradient. A step's error is raised by the unit's `wait_step`."""
        self.wait_added()
        if self.step is not None:
            wait_beside_compilation(self.step)

    def wait_added(self) -> None:
        """Wait until the pending sum of gradients is done; raise its error."""
        if self.adding is not None:
            wait_beside_compilation(self.adding)
            self.adding.result()

    def wait_true(self) -> Tensor:
        """Wait until no sum and no step uses the gradient, and return the true gradient in host memory."""
        self.wait()
        return self.true_on_host()

    def release(self) -> Tensor:
        """Wait until no sum and no step uses the gradient, and return the true gradient for after the stream."""
        return self.wait_true()

    def true_on_host(self) -> Tensor:
        """Return the true gradient in host memory, in the weight's type and times its factors. Blocks for its copy.

        Called by the steps thread, or when no sum and no step is pending.
        """
        self.arrived.synchronize()
        if self.raw is not self.full:
            if not self.full.untyped_storage().nbytes():
                self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
            self._each(Tensor.copy_, self.full, self.raw)
            self.raw = self.full
        self.multiply()
        self.norm = None  # the caller may change the gradient
        return self.full

    def multiply(self) -> None:
        """Multiply `raw` in place by the factors that clipping noted, and forget them."""
        for factor in self.factors:
            self._each(functools.partial(Tensor.mul_, other=factor), self.raw)
        if self.factors:
            self.factors, self.norm = [], None

    def make_true(self) -> None:
        """Make `raw` the true gradient, in the weight's type and times its factors, where a step reads it.

        Called by the steps thread, or when no sum and no step is pending.
        """
        self.true_on_host()

    def on_device(self) -> Tensor:
        """Return the true gradient on the device. Blocks until no sum and no step uses it."""
        return self.wait_true().to(self.weight.there.device)

    def find_norm(self, compute: Callable[[Tensor], Tensor], is_for_many: bool) -> Tensor:
        """Return the norm on the device: the noted one if ``is_for_many`` and still right, else by ``compute``."""
        if is_for_many and self.norm is not None and not self.factors and not self.norm._version:  # 0: no write
            return self.norm
        return compute(self.on_device())

    def accumulate(self, came: GradientBytes, worker: Executor) -> None:
        """Add the gradient of another backward, on the steps thread.

        Blocks for pending factors or a pending step, and for the sum if the user may have a view of the bytes.
        """
        if self.factors or self.step is not None:
            self.wait_true()
            self.step = None
        self.norm, self.is_mean = None, False
        self.adding = worker.submit(self._add, came, self.adding)
        if self.is_exposed:
            self.wait_added()  # a view's readers do not wait for the sum

    def _add(self, came: GradientBytes, before: Future[None] | None) -> None:
        """Add another gradient to this one, slice by slice: a slice is widened to the weight's type in the cache."""
        if before is not None:
            before.result()  # raises the error of the sum before, without which this sum would be wrong
        came.arrived.synchronize()
        if self.is_full or self.factors or self.weight.unit.spill is not None:
            total, first = self.true_on_host(), None
        else:
            self.arrived.synchronize()
            total, first = self.full, self.flat()
            if not total.untyped_storage().nbytes():
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
        """Return a flat view of `raw`: all elements in the order of memory, in the type in which they arrived."""
        return self.raw.as_strided((self.raw.numel(),), (1,))


class DeviceGradientBytes(GradientBytes):
    """The bytes of a gradient that stays on the device, where it is stepped, until it is read on the host."""

    def make_true(self) -> None:
        """Make `raw` the true gradient on the device, in the weight's type and times its factors."""
        if self.is_full:
            self.true_on_host()
            return
        here = self.weight.unit.device.current_stream()
        self.arrived.wait(here)
        self.raw = self.raw.to(self.weight.value.dtype)
        self.multiply()
        self.arrived = here.record_event()

    def on_device(self) -> Tensor:
        """Return the true gradient on the device, without a copy unless it was read on the host."""
        if self.is_full:
            return super().on_device()
        self.wait()
        self.make_true()
        return self.raw

    def accumulate(self, came: GradientBytes, worker: Executor) -> None:
        """Add the gradient of another backward on the device, if it is still there. Blocks while a step reads it."""
        self.wait()
        self.step = None
        self.make_true()
        if self.is_full or not isinstance(came, DeviceGradientBytes):
            came.true_on_host()
        here = self.weight.unit.device.current_stream()
        came.arrived.wait(here)
        self.raw.add_(came.raw.to(self.raw.device))
        self.arrived, self.norm, self.is_mean = here.record_event(), None, False


class HostGradient(Lazy, Tensor):
    """The gradient of a streamed parameter."""

    content: GradientBytes

    @staticmethod
    def of(content: GradientBytes) -> HostGradient:
        """Wrap a gradient's bytes in the tensor that the user sees as `.grad`."""
        gradient: HostGradient = as_subclass(HostGradient, content.full)
        gradient.content = content
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or compiles_own_step():
            with without_dispatch():
                return func(*args, **(kwargs or {}))
        if has_others(types):
            return NotImplemented
        if args and func in DEFERRED:
            answer = DEFERRED[func](*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        copies = Copies()  # gradients are on the host, and so are copies of other tensors that a function gets
        bring = lambda one: one if one.device.type == "cpu" else copies.add(one, one.to("cpu"))  # noqa: E731
        args, kwargs = replaced((args, kwargs or {}), Tensor, bring)
        return copies.keep_writes(super().__torch_function__(func, types, args, kwargs))

    def plain(self) -> Tensor:
        """Wait for the true gradient, and return it as a plain tensor over the same bytes."""
        self.content.is_exposed = True
        return super().plain()

    @property
    def is_unread(self) -> bool:
        """Whether no step reads the bytes, and the user has no view of them."""
        return self.content.step is None and not self.content.is_exposed

    def before(self) -> None:
        """Wait for the true gradient in host memory; raise if its weight was stepped beside backward."""
        if self.content.is_stepped_early:
            raise ExactnessError(
                f"the gradient of {self.content.weight.name} was read or changed between backward and optimizer.step(),"
                " but the weight was stepped beside backward: set optimizer_overlap=False"
            )
        self.content.wait_true()

    def after(self, func: Any, result: Any) -> None:
        """Note that the user may have a view of the bytes, if the result shares them or autograd saved them."""
        if not self.content.is_exposed:
            others = [tensor for tensor in found_in([result], Tensor) if tensor is not self]
            self.content.is_exposed = func in EXPOSING or any(
                tensor.requires_grad or shares_bytes(tensor, self.content.full) for tensor in others
            )


# ---- functions of gradients that need no bytes on the host; NotImplemented: wait for them, and run torch's own


def _norm(func: Callable[..., Tensor]) -> Callable[..., Any]:
    """Make an implementation of a norm function that computes the norm of one gradient on the device."""

    def answer(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the norm on the device; NotImplemented for other arguments."""
        if not isinstance(gradient, HostGradient) or kwargs or len(args) > 1:
            return NotImplemented
        return gradient.content.find_norm(lambda there: func(there, *args), False).as_subclass(Norm)

    return answer


def _vector_norm(gradient: Any, ord: Any = 2, *rest: Any, **kwargs: Any) -> Any:
    """Implement `torch.linalg.vector_norm` for one gradient: the norm has the bits of torch's multi-tensor kernel.

    Clipping uses that kernel in a plain run, and this function for tensors of a class that it does not know.
    """
    found = _norms([gradient], ord, *rest, **kwargs)
    return found if found is NotImplemented else found[0]


def _norms(gradients: Any, ord: Any = 2, *rest: Any, **kwargs: Any) -> Any:
    """Implement `torch._foreach_norm` for gradients: norms noted on arrival, or computed on the device."""
    if rest or kwargs or not all(isinstance(gradient, HostGradient) for gradient in gradients):
        return NotImplemented
    contents = [gradient.content for gradient in gradients]
    found = [content.find_norm(lambda there: norms_of_all([there], ord)[0], ord == 2) for content in contents]
    return tuple(norm.as_subclass(Norm) for norm in found)


def _multiply(gradients: Any, factor: Any = None, **kwargs: Any) -> Any:
    """Implement `torch._foreach_mul_` of gradients by a number: note it, to be applied by the step or a read.

    A factor that is given by name is left to torch.
    """
    is_number = isinstance(factor, (int, float)) or (type(factor) in (Tensor, Norm) and not factor.ndim)
    if not is_number or not all(isinstance(one, HostGradient) and one.is_unread for one in gradients):
        return NotImplemented
    device = gradients[0].content.weight.unit.device
    noted = {dtype: _factor_on_host(factor, dtype, device) for dtype in {gradient.dtype for gradient in gradients}}
    for gradient in gradients:
        gradient.content.wait_added()  # the factor is of the sum, not of the first gradient alone
        gradient.content.factors.append(noted[gradient.dtype])
    return gradients


def _factor_on_host(factor: Any, dtype: torch.dtype, device: Device) -> Any:
    """Copy a factor to the host, rounded as the device's kernels round a factor of a gradient of this type.

    A factor on the host is rounded, too: in a plain run clipping moves it to the gradients' device.
    """
    if not isinstance(factor, Tensor):
        return factor
    is_rounded = dtype.itemsize < factor.itemsize and device.rounds_factors
    with without_dispatch():
        return factor.to("cpu", dtype if is_rounded else factor.dtype, copy=True)


def _multiply_one(gradient: Any, factor: Any = None, **kwargs: Any) -> Any:
    """Implement `gradient.mul_(factor)` for a number: note it, to be applied by the step or a read."""
    return NotImplemented if _multiply([gradient], factor) is NotImplemented else gradient


def _unscale(gradients: Any, found_inf: Any, inv_scale: Any) -> Any:
    """Wait for the device before a GradScaler unscales gradients: nothing else waits for the copy of its factor."""
    for gradient in gradients:
        if isinstance(gradient, HostGradient):
            gradient.content.weight.unit.device.synchronize()
            break
    return NotImplemented


def _write_data(gradient: Any, data: Tensor) -> None:
    """Copy data that the user assigns to `gradient.data` into the bytes that the next step reads."""
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
