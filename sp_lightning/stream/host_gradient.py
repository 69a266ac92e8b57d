"""Gradients of streamed weights as the user sees them: tensors that answer only when somebody asks.

`p.grad` is a `HostGradient`. Its norm is computed where the gradient came from, by the plain run's kernel; a factor
that multiplies it is noted, and multiplied inside the optimizer's own pass. So clipping by norm moves no bytes. Any
other function gets the true gradient in host memory.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat.torch import as_subclass, multiply_all, norms_of_all, unscale_all, without_dispatch
from ..errors import ExactnessError
from ..host.device import Arrival, Device
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
from .leaf import Weight, version_of

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

    `full` is what the user sees: in host memory and in the weight's type. `raw` has the truth, times `factors`. They
    are one tensor if it came down so; else `full` has no bytes until somebody asks for it.
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
        """Have the true gradient in `raw`, in the weight's type. For the optimizer's thread, or if none is pending."""
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
        """Add the gradient of another backward on the device. Waits for a step that reads the sum."""
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


def release_gradient(host: nn.Parameter) -> None:
    """Make a parameter's gradient a plain tensor in host memory."""
    with without_dispatch():
        if isinstance(grad := grad_of(host), HostGradient):
            set_grad(host, grad.content.settle() if hasattr(grad, "content") else grad.detach())
