"""Gradients on the host in torch's own hands: `torch.amp.GradScaler`, and the norm for clipping.

The scaler's factor is on the device. The scaler copies it to the gradients' device without waiting for the copy. If
that is the host, kernels there may run before the bytes have arrived, and gradients come out as garbage. So while a
module is streamed, a scaler whose optimizer has gradients on the host gets the factor as a host tensor, already copied.

An optimizer that unscales by itself (torch's fused ones) reads the factor from its attributes, and would copy it in the
same way. It gets a host copy too. The copy is its own, because the scaler writes to its factor after the step, which
may be deferred (pending_step.py).

On the host torch computes the norm of one gradient on one core, and one after another. Here several are computed at
once, each as torch does it. The norm of a gradient whose weight is stepped on a device is computed there, as plain
Lightning has it. Clipping multiplies by a factor, which is one where the norm is below the limit: on the host it is
known, and then no gradient is read and written once more, for the same bits. Norms of gradients on the host and on the
device are summed in the order that they have in a plain run, where all are on the device.

A gradient that is still in the type in which it came down (watched_parameters.py, Rule 9) stays so. Compiled code has
its norm, and the factor is left with it, for the step to multiply by.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler

from ..compat.kernels import grouped_by_device_and_dtype, norms_of_each
from ..compat.patches import CLIP_GRADIENTS, TOTAL_NORM, UNSCALE_GRADS
from ..compat.references import caller_has
from ..compat.tensors import dispatch_mode_count, without_dispatch
from ..memory.watched_parameters import NarrowGradient, true_grad
from . import native

FEWEST = 1 << 22  # elements for which threads are worth their start
MOST_WIDENED = 1 << 27  # elements that are widened at a time
LEAST_BITS = torch.tensor(1, dtype=torch.int32, device="cpu")  # of the smallest number, which some settings flush
# Types for which torch sums the squares on one core, whatever the number of threads: the bits are the same on each.
ON_ONE_CORE = (torch.float32, torch.bfloat16)


def hand_over(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that is about to step on the host its own host copies of what a scaler left for it."""
    for name in ("grad_scale", "found_inf"):
        value = vars(optimizer).get(name)
        if isinstance(value, Tensor):
            setattr(optimizer, name, value.to("cpu", copy=True))


def unscale(
    self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, *rest: Any
) -> Any:
    """Unscale gradients, those on the host by a factor that is there: replaces ``GradScaler._unscale_grads_``."""
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if any(grad.device.type == "cpu" for grad in grads):
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
    return UNSCALE_GRADS.original(self, optimizer, inv_scale, found_inf, *rest)


class SteppedThere(Protocol):
    """Weights on the host that are stepped on a device."""

    def gradients(self) -> Iterator[Tensor]:
        """Yield their gradients."""

    def beside(self, like: Tensor) -> Tensor:
        """Make an empty tensor of the type of a weight or gradient, on the device."""

    def norms(self, gradients: Sequence[Tensor], kind: float, foreach: bool | None) -> list[Tensor]:
        """Compute the norms of gradients on the device."""


stepped_there: weakref.WeakSet[SteppedThere] = weakref.WeakSet()


def total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Compute the norm of all gradients, each where its weight is stepped: replaces torch's."""
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    kind = float(norm_type)
    known = _narrow_norms(gradients, kind) if NarrowGradient in map(type, gradients) else {}
    gradients = [_wide(one) if type(one) is NarrowGradient and id(one) not in known else one for one in gradients]
    owners = {id(gradient): steps for steps in list(stepped_there) for gradient in steps.gradients()}
    there = [owners[id(one)].beside(one) if id(one) in owners else one for one in gradients]
    first = there[0].device if there else None
    devices = sorted({one.device for one in there}, key=lambda device: device.type == "cpu")
    if len(devices) == 2 and devices[1].type == "cpu":  # where a plain run has what is on the host: on the device
        there = [torch.empty(0, dtype=one.dtype, device=devices[0]) for one in there]
    if known or not all(map(operator.is_, there, gradients)) or (not foreach and _are_many(gradients, kind)):
        norms: list[Tensor] = []
        for places in grouped_by_device_and_dtype(there):
            some = [gradients[place] for place in places]
            found = iter(_norms([one for one in some if id(one) not in known], owners, kind, foreach))
            norms += [(known[id(one)] if id(one) in known else next(found)).to(first) for one in some]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
        if not error_if_nonfinite or total.isfinite():
            return total
    gradients = [_wide(one) if type(one) is NarrowGradient else one for one in gradients]
    original: Tensor = TOTAL_NORM.original(gradients, norm_type, error_if_nonfinite, foreach)
    return original


def _narrow_norms(gradients: Iterable[Tensor], kind: float) -> dict[int, Tensor]:
    """Compute the norms, by ids, of the gradients that are as they came down."""
    narrow = [
        one
        for one in gradients
        if type(one) is NarrowGradient and one.wide is None and one.factor == 1.0 and one.came_down.is_contiguous()
    ]
    if not narrow or kind != 2.0:
        return {}
    came_down = [one.came_down for one in narrow]
    numels = list(map(Tensor.numel, came_down))
    found = native.LIBRARY.norms(came_down) if sum(numels) >= native.FEWEST else None
    if found is not None:
        return {
            id(one): torch.tensor(norm, dtype=one.dtype, device="cpu") for one, norm in zip(narrow, found, strict=True)
        }

    def norm(one: NarrowGradient) -> Tensor:
        with torch.no_grad():
            of_one: Tensor = torch.linalg.vector_norm(one.came_down.to(one.dtype))
            return of_one

    # Without the code, or of a NaN: few at a time, and none is widened for good.
    few = min(torch.get_num_threads(), MOST_WIDENED // max(1, *numels))
    if few < 2 or sum(numels) < FEWEST or dispatch_mode_count():
        return {id(one): norm(one) for one in narrow}
    with ThreadPoolExecutor(few, "superpipeline-norms") as threads:
        return dict(zip(map(id, narrow), threads.map(norm, narrow), strict=True))


def _wide(gradient: Tensor) -> Tensor:
    assert isinstance(gradient, NarrowGradient)
    return gradient.widened()


def _norms(
    gradients: Sequence[Tensor], owners: Mapping[int, SteppedThere], kind: float, foreach: bool | None
) -> list[Tensor]:
    """Compute the norms of gradients of one type, on the devices where their weights are stepped."""
    found: list[Tensor] = []
    for (steps, _), some in itertools.groupby(gradients, lambda one: (owners.get(id(one)), one.device)):
        with torch.no_grad():
            found += (_norms_here if steps is None else steps.norms)(list(some), kind, foreach)
    return found


def _norms_here(gradients: list[Tensor], kind: float, foreach: bool | None) -> list[Tensor]:
    """Compute the norms of gradients where they are, on the host of several at a time."""
    if foreach or not _are_many(gradients, kind):
        return norms_of_each(gradients, kind, foreach)
    found: dict[int, Tensor] = {}
    if others := [place for place, gradient in enumerate(gradients) if not _is_on_one_core(gradient)]:
        found.update(zip(others, norms_of_each([gradients[place] for place in others], kind, foreach), strict=True))

    def norm(place: int) -> None:
        with torch.no_grad():
            found[place] = torch.linalg.vector_norm(gradients[place], kind)

    largest_first = sorted(set(range(len(gradients))) - found.keys(), key=lambda place: -gradients[place].numel())
    with ThreadPoolExecutor(torch.get_num_threads(), "superpipeline-norms") as threads:
        list(threads.map(norm, largest_first))
    return [found[place] for place in range(len(gradients))]


def _are_many(gradients: Sequence[Tensor], kind: float) -> bool:
    """Whether several gradients are on the host, and large enough, for threads to be worth it."""
    if kind != 2.0 or torch.get_num_threads() == 1:
        return False
    numels = [gradient.numel() for gradient in gradients if _is_on_one_core(gradient)]
    return len(numels) > 1 and sum(numels) >= FEWEST


def _is_on_one_core(gradient: Tensor) -> bool:
    """Whether torch computes the norm of a gradient on one core of the host."""
    return (
        type(gradient) is Tensor
        and gradient.device.type == "cpu"
        and gradient.dtype in ON_ONE_CORE
        and gradient.layout is torch.strided
        and gradient.is_contiguous()
    )


class KeepsFactors(Protocol):
    """Some gradients that are multiplied later than the others (ranks/clipping.py)."""

    def keep(self, parameters: Iterable[Tensor], factor: Tensor, references: int) -> list[Tensor]:
        """Store a factor for these parameters' gradients; return the parameters whose gradients are multiplied now.

        ``references``: from torch's function to each gradient.
        """


multiplied_later: weakref.WeakSet[KeepsFactors] = weakref.WeakSet()


def clip(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
    """Clip gradients by their total norm: replaces the function that torch's clipping calls."""
    left = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if total_norm.device.type == "cpu" and type(total_norm) is Tensor:
        # `clip_grad_norm_` has them in a list, this function's users may have them wherever they like.
        references = int(caller_has("grads", CLIP_GRADIENTS.holder.__name__))
        with torch.no_grad():  # as torch computes it
            factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
        # Under a mode nothing may be known of values: it may be a dry run.
        if not dispatch_mode_count() and _keeps_all_bits(factor) and not any(map(torch.is_complex, left)):
            return
        for later in list(multiplied_later):
            left = later.keep(left, factor, references)
        if references and not dispatch_mode_count():
            left = _left_to_multiply(left, factor)
    if left:
        CLIP_GRADIENTS.original(left, max_norm, total_norm, foreach)


def _left_to_multiply(parameters: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Leave a factor with the gradients that are as they came down and have none; return the other parameters."""
    with without_dispatch():
        grads = list(map(true_grad, parameters))
    if NarrowGradient not in map(type, grads) or not 0 < (number := factor.item()) < 1:
        return parameters
    left = []
    for parameter, grad in zip(parameters, grads, strict=True):
        if type(grad) is NarrowGradient and grad.wide is None and grad.factor == 1.0:
            grad.factor = number
        else:
            left.append(parameter)
    return left


def _keeps_all_bits(factor: Tensor) -> bool:
    """Whether a product with this factor has the bits of the other one, also of one that is next to zero."""
    with torch.no_grad():
        return bool(factor == 1) and bool((LEAST_BITS.view(torch.float32) * 1.0).view(torch.int32) == LEAST_BITS)
