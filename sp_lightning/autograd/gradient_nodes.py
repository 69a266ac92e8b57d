"""The autograd nodes between host parameters and their stand-ins, through which gradients come back.

1. A unit has one node, applied once: it saves nothing, so it serves every step, repeated backward and ``retain_graph``.
   All uses of a weight in a graph, over all calls of its unit, lead to it: autograd sums them as it would for a leaf.
2. The node runs with the priority of a leaf's accumulation (the highest): as soon as the last use of the unit's weights
   is done. With the low number of a node made when streaming began, all gradients would pile up on the device until
   backward ends.
3. The node's outputs share the unit's storage but no version counter: an in-place write to one weight concerns only it.
4. A weight that travels in autocast's type has a node for each use, as plain autocast has a cast for each. The gradient
   that arrives there is the one that the cast's backward would convert to FP32. The gradients of several uses are
   summed in FP32, in the order in which they arrive. Gradients of casts that are made on the device are collected
   likewise (autocast_weights.py, Rule 6). autograd does not know of them, so the unit's node itself waits for the
   streams on which they arrived.
5. autograd runs what is ready by the numbers that nodes had from their thread when they were made. In a graph of
   gradients (create_graph) nodes of the caller's thread meet those of the device's, and the order of sums depends on
   how far each thread has counted. So what has no counterpart in a plain run takes no number of either: the unit's
   node is made on a thread of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..compat.tensors import graph_task, set_sequence_number, without_dispatch
from ..errors import ExactnessError
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import true_grad_fn

Gradients = tuple[Tensor | None, ...]
Receive = Callable[[Any, Gradients], Gradients]  # from the node that runs and its gradients
# Prehooks of uses in graphs, by numbers of their own: until they are called, or the graph is gone.
Awaited = WeakValueDictionary[int, Callable[[Gradients], Any]]
LEAF_PRIORITY = 2**64 - 1


class UnitNode(torch.autograd.Function):
    """Host parameters in, device stand-ins out; device gradients in, host gradients out."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], receive: Receive, *params: Tensor) -> Any:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, param in zip(outputs, params, strict=True) if not param.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.receive(ctx, grads))


def connect(store: HostCopy, receive: Receive, views: list[Tensor]) -> list[Tensor]:
    """Make stand-ins of a unit's device views: those of trainable parameters lead to the host parameters."""
    if not any(parameter.requires_grad for parameter in store.params):
        return views

    def apply() -> list[Tensor]:
        with without_dispatch(), torch.inference_mode(False), torch.enable_grad():
            return list(UnitNode.apply(views, receive, *store.params))

    with ThreadPoolExecutor(1) as thread:  # Rule 5
        outputs = thread.submit(apply).result()
    node = next(output.grad_fn for output in outputs if output.grad_fn is not None)
    set_sequence_number(node, LEAF_PRIORITY)  # Rule 2
    return outputs


def check_not_recorded(output: Tensor, name: str) -> None:
    """Raise if autograd recorded an in-place write to a stand-in: another node than the unit's made it then."""
    node = true_grad_fn(output)
    if output.requires_grad and (node is None or node.name() != "UnitNodeBackward"):
        raise ExactnessError(
            f"{name} was written in place while autograd recorded, which a leaf that requires grad cannot be: "
            "write to it under torch.no_grad()"
        )


class CastUses:
    """The gradients of a unit's weights in autocast's type, by their uses in a graph (Rule 4)."""

    def __init__(self, awaited: Awaited, device: Device) -> None:
        self.awaited = awaited
        self._device = device
        # By the number of autograd's task, then by weight: each with the stream on which it arrived.
        self.arrived: dict[int, dict[int, list[tuple[Tensor, Any]]]] = {}
        self.left_to_autograd: set[int] = set()  # weights of casts on the device that are read in another way as well

    def arrive(self, index: int, use: int, grads: Gradients) -> Gradients:
        """Collect the gradient of a use, as a prehook of its node: the unit's node gets none from there."""
        self.awaited.pop(use, None)
        if grads[0] is not None:
            stream = None if self._device.is_host else self._device.compute
            self.arrived.setdefault(graph_task(), {}).setdefault(index, []).append((grads[0], stream))
        return (None,)

    def arrive_at_cast(self, index: int, use: int, grads: Gradients) -> Gradients | None:
        """Collect the gradient of a cast on the device, unless autograd sums it with others of the weight."""
        if index not in self.left_to_autograd:
            return self.arrive(index, use, grads)
        self.awaited.pop(use, None)
        return None

    def sums(self) -> dict[int, Tensor]:
        """Return and forget the sums of gradients that arrived in the running task of autograd, by weight."""
        arrived = self.arrived.pop(graph_task(), {})
        if not self._device.is_host:
            self._wait_for(itertools.chain.from_iterable(arrived.values()))
        return {index: _sum(grads) for index, grads in arrived.items()}

    def _wait_for(self, arrived: Iterable[tuple[Tensor, Any]]) -> None:
        """Order the caller's stream after the others on which gradients arrived, and tell the allocator of it."""
        compute, streams = self._device.compute, set()
        for grad, stream in arrived:
            if stream != compute:
                streams.add(stream)
                grad.record_stream(compute)
        for stream in streams:
            compute.wait_event(stream.record_event())

    def clear(self) -> None:
        """Drop gradients of tasks that ended before they reached the unit's node."""
        self.arrived.clear()


def _sum(arrived: list[tuple[Tensor, Any]]) -> Tensor:
    if len(arrived) == 1:
        return arrived[0][0]
    total = arrived[0][0].float()
    for grad, _ in arrived[1:]:
        total = total + grad.float()
    return total
