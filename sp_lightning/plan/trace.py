"""Run one step of a model without a device, and note what each visit to a unit computes and allocates there.

1. A visit lasts from the moment a unit is needed until other code runs. Its bytes count from those that were there as
   it began. Neither window nor transfer changes what is in it, so one trace serves all of them.
2. Weights take nothing here.
3. A unit's gradients wait for the last of them, and are packed then. Packed gradients and activations that are on their
   way down are counted by `sweep`, which follows the visits.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from ..compat.torch import graph_task, operator_of, schema_of, storage_id, without_dispatch_modes
from ..host.device import aligned, dense_strides
from ..host.room import UnitNumbers
from ..stream.activations import SMALLEST
from ..stream.partition import FoundUnit
from ..stream.recompute import copied, tensors_in
from ..stream.schedule import Schedule
from .fakes import HALVES, FakeTensors, aten, tensors_of
from .machines import Work

FREE = {aten._unsafe_view, aten.set_, aten.resize_, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
LOOKS_UP = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward}
PRODUCTS = {  # torch 2.11 has no count of attention in which heads share keys
    **flop_registry,
    aten._grouped_mm: lambda one, other, *_, **__: 2 * one.numel() * other.shape[-1],
    aten._scaled_dot_product_flash_attention: lambda q, k, *_, **__: 4 * q.numel() * k.shape[-2],
    aten._scaled_dot_product_flash_attention_backward: lambda _, q, k, *__, **___: 10 * q.numel() * k.shape[-2],
}
# CUDA sums columns of at least so many rows, as for the gradient of a bias, in partial sums of up to 1 MiB for each of
# its multiprocessors; an A100 has 108.
TALL, SCRATCH = 1024, 108 << 20


@dataclass
class Visit:
    """A visit to a unit, or code outside of all: its work and its bytes."""

    unit: int | None
    backward: bool
    in_use: tuple[int, ...] = ()  # units whose code runs around this one
    work: Work = field(default_factory=Work)  # up and down: activations from the host, and to it
    packed: list[int] = field(default_factory=list)  # bytes of gradients that go to the host, of each unit
    leaving: int = 0  # bytes that its copies of activations to the host still read
    peak: int = 0  # the most bytes beside weights, less those that were there as it began
    grown: int = 0  # bytes there as it ends, less those as it began


class Trace:
    """A step that ran without data: what was allocated and computed, divided into visits.

    Args:
        tensors: The context in which the module was made, entered while a step runs.
        units: The units.
        wide: Ids of weights that are FP32 on the host alone.
        activations: The policy for activations.
    """

    def __init__(
        self,
        tensors: FakeTensors,
        units: Sequence[FoundUnit],
        wide: frozenset[int],
        activations: str,
    ) -> None:
        self.visits = [Visit(None, False)]
        self.batch = self.buffers = 0  # bytes
        self._units = units
        self._tensors, self._wide, self._activations = tensors, wide, activations
        self.live: dict[int, tuple[int, object]] = {}  # bytes of a storage, and a reference that tells when it is gone
        self._stack: list[int] = []  # units whose code runs
        self._unit_of = {storage_id(p.untyped_storage()): unit.index for unit in units for _, p in unit.params}
        self._came: dict[int, list[Tensor]] = defaultdict(list)  # by unit: weights whose gradients are complete

    # ---- a step

    def run(self, module: nn.Module, batch: Any, step: Callable[[], Any]) -> None:
        """Run a forward, and a backward from each loss in its output.

        Args:
            module: The module, which has the units.
            batch: Its tensors are on the device throughout.
            step: Returns the loss, or an output that contains or leads to it.
        """
        self.buffers = sum(self.add(tensor, 0) for tensor in module.buffers())
        self.batch = sum(self.add(tensor, 0) for tensor in tensors_in(batch))
        with contextlib.ExitStack() as stack:
            self._listen(stack)
            losses = _losses(step())  # the rest of an output is gone before backward
            if losses:
                torch.autograd.backward(losses, [torch.ones_like(one) for one in losses])
            for index in list(self._came):
                self._send(index)
        module.zero_grad()  # of units that stay on the device

    def _listen(self, stack: contextlib.ExitStack) -> None:
        """Count units' forwards and gradients until the stack is closed."""
        for unit in (unit for unit in self._units if not unit.resident):
            for _, module in unit.modules:
                stack.callback(setattr, module, "forward", module.forward)
                module.forward = functools.partial(self._run, unit.index, module.forward)
            for _, parameter in unit.params:
                if parameter.requires_grad:
                    take = functools.partial(self._take, unit)
                    stack.callback(parameter.register_post_accumulate_grad_hook(take).remove)  # type: ignore[no-untyped-call]

    def enter(self, unit: int | None, backward: bool) -> None:
        """Start a visit of a unit (None: code outside of all) unless it is under way; resident units have no visits."""
        now = self.visits[-1]
        if (unit, backward) != (now.unit, now.backward) and (unit is None or not self._units[unit].resident):
            around = tuple(dict.fromkeys(index for index in self._stack if index != unit))
            self.visits.append(Visit(unit, backward, around))

    def _run(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit's forward in place of the module's own: its activations are kept, offloaded or recomputed."""
        inside = functools.partial(self._inside, unit, forward)
        if self._stack or not torch.is_grad_enabled():
            return inside(*args, **kwargs)
        first = [(args, kwargs)]
        args, kwargs = copied((args, kwargs), (), iter)  # for the second run: a forward may add to its arguments

        def run(*args: Any, **kwargs: Any) -> Any:
            """Call the unit, the first time with its arguments themselves, which are not kept."""
            args, kwargs = first.pop() if first else (args, kwargs)
            return inside(*args, **kwargs)

        with _Trip(self, unit) if "offload" in self._activations else contextlib.nullcontext():
            if "recompute" in self._activations:
                return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return run()

    def _inside(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit's forward as a visit, where the operators inside count for it."""
        backward = graph_task() != -1
        self.enter(unit, backward)
        self._stack.append(unit)
        try:
            with self._tensors.kernels if backward else contextlib.nullcontext():  # autograd's engine leaves this mode
                return forward(*args, **kwargs)
        finally:
            self._stack.pop()

    # ---- bytes

    def add(self, tensor: Tensor, counts: int | None = None) -> int:
        """Count a new storage until it is freed, as ``counts`` bytes if given; return its bytes, 0 if it is known."""
        storage = tensor.untyped_storage()
        key, nbytes = storage_id(storage), aligned(storage.nbytes())
        if key in self.live or key in self._unit_of:
            return 0
        counts = nbytes if counts is None else counts
        self.live[key] = counts, weakref.ref(storage, lambda _: self._change(-self.live.pop(key)[0]))
        self._change(counts)
        return nbytes

    def _change(self, nbytes: int, passing: int = 0) -> None:
        """Add bytes to the current visit; raise its peak if they exceed it, or those that are ``passing`` before do."""
        visit = self.visits[-1]
        visit.peak = max(visit.peak, visit.grown + passing, visit.grown + nbytes)
        visit.grown += nbytes

    def _take(self, unit: FoundUnit, parameter: Tensor) -> None:
        """Note a complete gradient; with the last one of a unit, pack them."""
        self._came[unit.index].append(parameter)
        if len(self._came[unit.index]) == sum(p.requires_grad for _, p in unit.params):
            self._send(unit.index)

    def _send(self, unit: int) -> None:
        """Count the bytes of a unit's gradients as they are widened for norms and packed, and drop them."""
        params = [p for p in self._came.pop(unit) if p.grad is not None]
        goes = sum(aligned(p.nbytes) for p in params)
        wide = sum(aligned(4 * p.numel()) for p in params if id(p) in self._wide)
        self._change(0, passing=max(wide, goes))
        self.visits[-1].packed.append(goes)
        passes = 3.5 if torch.is_autocast_enabled("cpu") else 2.0  # over widened ones; autocast has cast them before
        self.visits[-1].work.moved += 2 * goes + passes * wide
        for parameter in params:
            parameter.grad = None

    # ---- work

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that ran: its work, and the storages that it made."""
        results, operator, read = tensors_of((out,)), operator_of(func), tensors_of((*args, *kwargs.values()))
        backward = graph_task() != -1
        known = {storage_id(t.untyped_storage()) for t in read}
        made = [t for t in results if t.numel() and storage_id(t.untyped_storage()) not in known]
        units = [self._unit_of[key] for key in known if key in self._unit_of]
        for unit in units:
            if unit not in self._stack:
                self.enter(unit, backward)  # a backward, or a head that shares its weight with a table
        if not units and not self._stack and made and not backward:
            self.enter(None, False)
        for tensor in made:
            self.add(tensor)
        if operator is aten.sum and read[0].dim() == 2 and len(read[0]) >= TALL:
            self._change(0, passing=min(8 * read[0].numel(), SCRATCH))
        visit, count = self.visits[-1], PRODUCTS.get(operator)
        if count is not None and read[0].dtype in HALVES:
            visit.work.flops += count(*args, **kwargs, out_val=out)
        elif count is not None:
            visit.work.fp32_flops += count(*args, **kwargs, out_val=out)
        elif operator not in FREE and (made or schema_of(func).is_mutable):
            visit.work.moved += _moved(operator, read, made)


def _losses(output: Any) -> list[Tensor]:
    """Return the loss in a step's output or, without one, all tensors of the output from which a backward can start."""
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    return list({id(one): one for one in tensors_in(output if loss is None else loss) if one.requires_grad}.values())


class _Trip(saved_tensors_hooks):
    """A unit's saved tensors on their way to the host and back: all come as the first is needed."""

    def __init__(self, trace: Trace, unit: int) -> None:
        super().__init__(self._pack, self._unpack)
        self._trace, self._unit = trace, unit
        self._moved: dict[Any, Any] = {}  # offloaded tensors, until all come back

    def __exit__(self, *exception: object) -> None:
        """End the unit's forward: drop the offloaded tensors, and note the bytes that are still being copied."""
        super().__exit__(*exception)
        storages = {key[0]: moved.tensor.untyped_storage() for key, moved in self._moved.items()}
        self._trace.visits[-1].leaving = sum(aligned(storage.nbytes()) for storage in storages.values())
        for moved in self._moved.values():
            del moved.tensor

    def _pack(self, tensor: Tensor) -> Any:
        """Replace a saved tensor by a mark that it goes to the host.

        Small ones, weights, buffers, the batch and views with gaps stay.
        """
        with without_dispatch_modes():  # else the trace would see an operator of the model
            is_dense = tensor.is_contiguous() or dense_strides(tensor) == tensor.stride()
        storage = storage_id(tensor.untyped_storage())
        if tensor.nbytes < SMALLEST or not self._trace.live.get(storage, (0,))[0] or not is_dense:
            return tensor.detach()
        key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._moved:
            self._moved[key] = SimpleNamespace(tensor=tensor.detach())
            self._trace.visits[-1].work.down += tensor.nbytes
        return self._moved[key]

    def _unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor; the first one that is asked for brings all of the unit's back."""
        self._trace.enter(self._unit, True)
        if isinstance(packed, Tensor):
            return packed
        moved, self._moved = self._moved, {}
        for (*_, shape, stride, dtype), one in moved.items():
            one.tensor = torch.empty_strided(shape, stride, dtype=dtype)
            self._trace.visits[-1].work.up += one.tensor.nbytes
        tensor: Tensor = packed.tensor
        return tensor


def _moved(operator: Any, read: list[Tensor], made: list[Tensor]) -> float:
    """Return the bytes of device memory that an operator reads and writes."""
    written = sum(map(_nbytes, made or read[:1]))
    return written + (written + sum(map(_nbytes, read[1:])) if operator in LOOKS_UP else sum(map(_nbytes, read)))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in memory: elements that repeat, as in an expanded one, count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


# ---- bytes on the device

# What bytes on the device are for.
WINDOW, ROOT, KEPT, WORKING = "window", "resident root", "kept for backward", "activations of one unit"
GRADIENTS = "gradient buffers"
PASSES = 3  # over the units: from the third on all are alike
RING = 2  # units whose gradients, or activations, are on their way down while others compute


Loads = dict[bool, list[int]]  # indices of units that a step loads, by whether backward runs


def sweep(found: Trace, sizes: Sequence[UnitNumbers], window: int, transfer: int) -> tuple[dict[str, int], Loads]:
    """Simulate the run's loads and evictions over the visits of a step.

    Returns the bytes on the device by term at its fullest moment, and its loads.
    """
    schedule = Schedule([size.up_nbytes for size in sizes], window, min(transfer, window))
    order = [visit.unit for visit in found.visits if visit.unit is not None]
    coming = [0]  # by visit: bytes of activations that come up for the next one that needs any
    for visit in reversed(found.visits):
        coming.insert(0, visit.work.up or coming[0])
    packs, leaving = deque[int](maxlen=RING), deque[int](maxlen=RING)
    terms, loads = dict[str, int](), Loads()
    for number in range(PASSES):
        schedule.invalidate(index for index, size in enumerate(sizes) if size.down_nbytes)
        packs.clear()
        schedule.begin(order if number else (), wrap=bool(number))
        there, loads = 0, {False: [], True: []}
        for visit, ahead in zip(found.visits, coming[1:], strict=True):
            if visit.unit is not None:
                loads[visit.backward] += schedule.visit(visit.unit, visit.in_use).load
            if visit.work.up:
                leaving.clear()
            beside = there + visit.peak + sum(leaving) + (ahead if visit.work.up else 0)
            kept = max(0, min(there + sum(leaving), beside))
            now = {WINDOW: schedule.loaded_nbytes, KEPT: kept, WORKING: beside - kept, GRADIENTS: sum(packs)}
            if sum(now.values()) > sum(terms.values()):
                terms = now
            there += visit.grown
            packs.extend(visit.packed)
            leaving.extend([visit.leaving] * bool(visit.leaving))
    terms[ROOT] = sum(size.up_nbytes for size in sizes if size.resident)
    return terms | {"batch": found.batch, "buffers": found.buffers}, loads
