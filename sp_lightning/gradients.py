"""The autograd bridge between host parameters and their stand-ins, and the way of gradients down.

1. One node per unit, applied once: it saves nothing, so it serves every step, repeated backward and ``retain_graph``.
   All uses of a weight in a graph, over all calls of its unit, end in it: autograd sums them as it would for a leaf.
2. It runs with the priority of a leaf's accumulation (the highest): as soon as the last use of the unit's weights is
   done. With the low number of a node made at attach, all gradients would pile up on the device until the very end.
3. Outputs share the unit's storage but not a version counter: an in-place write to one weight concerns that one only.
4. Gradients are returned on the host, so autograd itself accumulates into ``.grad``, runs the user's hooks and leaves
   ``None`` where nothing came. What is returned has memory of its own: autograd may keep it as ``.grad``.
5. Under ``create_graph`` the way down is part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .device import Device
from .layout import ALIGNMENT, aligned
from .store import UnitStore
from .telemetry import Counters

Gradients = tuple[Tensor | None, ...]
LEAF_PRIORITY = 2**64 - 1


class Link(torch.autograd.Function):
    """Host parameters in, device stand-ins out; device gradients in, host gradients out."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], receive: Callable[[Gradients], Gradients], *params: Tensor) -> Any:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, param in zip(outputs, params, strict=True) if not param.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.receive(grads))


def link(store: UnitStore, receive: Callable[[Gradients], Gradients]) -> list[Tensor]:
    """The stand-ins of a unit's parameters as they are now: trainable ones lead to the host parameters."""
    views = store.device_views()
    if not any(parameter.requires_grad for parameter in store.params):
        return views
    with torch.inference_mode(False), torch.enable_grad():
        outputs = list(Link.apply(views, receive, *store.params))
    node = next(output.grad_fn for output in outputs if output.grad_fn is not None)
    node._set_sequence_nr(LEAF_PRIORITY)  # Rule 2
    return outputs


class Downlink:
    """Brings gradients to the host."""

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self._landing = device.host_bytes(0)

    def fetch(self, grads: Gradients, dtypes: Sequence[torch.dtype]) -> Gradients:
        """The same gradients on the host, in the host parameters' types (Rules 4 and 5)."""
        self.counters.bytes_down += sum(g.numel() * g.element_size() for g in grads if g is not None)
        if torch.is_grad_enabled():
            return tuple(g if g is None else g.to("cpu", dtype) for g, dtype in zip(grads, dtypes, strict=True))
        dense = [g for g in grads if g is not None and g.layout is torch.strided]
        landed = iter(self._land(dense))
        return tuple(
            None if g is None else _own(next(landed) if g.layout is torch.strided else g.cpu(), dtype)
            for g, dtype in zip(grads, dtypes, strict=True)
        )

    def _land(self, grads: list[Tensor]) -> list[Tensor]:
        """Copies all of them to page-locked memory at once; blocks until they are there."""
        if self.device.is_host:
            return grads
        offsets, end = [], 0
        for grad in grads:
            offsets.append(end)
            end += aligned(grad.numel() * grad.element_size())
        if end > self._landing.numel():
            self._landing = self.device.host_bytes(end)
        landed = [_like(grad, self._landing, offset) for grad, offset in zip(grads, offsets, strict=True)]
        self.device.down.wait_event(self.device.compute.record_event())
        with self.device.down:
            for host, grad in zip(landed, grads, strict=True):
                host.copy_(grad, non_blocking=True)
            done = self.device.down.record_event()
        with self.counters.stall("gradients"):
            done.synchronize()  # the host reads them next; and until then the device's must not be freed
        return landed


def _like(grad: Tensor, flat: Tensor, offset: int) -> Tensor:
    """A tensor in ``flat`` with a gradient's shape, and its strides where they are dense."""
    assert offset % ALIGNMENT == 0
    storage = flat.untyped_storage()
    stride = torch.empty_like(grad, device="meta").stride()
    empty = torch.empty(0, dtype=grad.dtype)
    return empty.set_(storage, offset // grad.element_size(), grad.shape, stride)  # type: ignore[call-overload]


def _own(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that nobody else holds, in the parameter's type."""
    return grad.to(dtype, copy=True)
