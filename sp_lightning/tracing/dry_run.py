"""Run one training step without a device to get its trace: visits, bytes and work.

1. The step is a run's own: the engine streams the module as at run time, but on tensors without data (fake_tensors.py),
   through a device that only counts. What is on the device beside weights is counted (memory_tracker.py).
2. All units fit into the window and stay there, so that the trace serves every window. A recorder listens to the
   engine's phases and finds the visits.
3. A gradient takes memory while autograd collects its unit's gradients, and again as part of the packed ones, until the
   next unit's are packed (way_down.py, Rule 3).
4. The step is a run's first one, in which all weights travel as they are, and are cast on the device. What these casts
   take is counted apart, so that the trace also tells what later steps take. Another step is only begun: then the
   engine has decided which weights travel cast.
5. Models that stream through windows of their own (`Together`) have a handle each. Their units are listed one model
   after the other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.autocast_weights import castable
from ..autograd.backward_pass import in_backward
from ..autograd.gradient_nodes import Gradients
from ..autograd.saved_tensors import tensors_in
from ..autograd.stand_ins import StreamedUnit
from ..compat.tensors import TorchDispatchMode, dispatch_mode_count, function_mode_count, storage_id
from ..core.telemetry import Lane, StepListener
from ..core.unit_numbers import UnitNumbers, aligned
from ..gradients.way_down import GradientReturn
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..optim.pending_step import PendingStep
from ..options import Options
from ..runtime.engine import Engine
from ..runtime.handle import Handle
from ..wholes.sharded import shards_of
from .answers import Answers, answer, counted_by
from .fake_tensors import FakeTensors, without_values
from .memory_tracker import MemoryTracker
from .step_trace import BATCH, BUFFERS, GRADIENTS, OUTSIDE, WORKING, StepTrace, Visit

Runner = Callable[[nn.Module, Any], Any]


class Together(nn.Module):
    """Models that stream through windows of their own (Rule 5)."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)


def dry_run(
    module: nn.Module,
    batch: Any,
    run: Runner | Answers,
    options: Options,
    tensors: FakeTensors | RealTensors,
    compute_dtype: torch.dtype | None = None,
) -> StepTrace:
    """Run one training step of a module, or its answers, on these tensors and return the trace.

    Args:
        module: Its parameters' values do not matter.
        batch: The batch that ``run`` takes.
        run: Returns what the step returns: the loss, or an output that contains or leads to it. Or what to answer.
        options: ``units``, ``activations``, ``wire_dtype`` and ``compile_units`` matter.
        tensors: The context in which the module was made, still entered.
        compute_dtype: With ``master_weights``: the type on the device of what is FP32 on the host.
    """
    recorder = _StepRecorder()
    tracker = recorder.tracker
    for tensor in module.buffers():
        tracker.add(tensor, BUFFERS)
    for tensor in tensors_in(batch):
        tracker.add(tensor, BATCH)
    tensors.observe = tracker.observe
    models = list(module.models) if isinstance(module, Together) else [module]
    handles: list[Handle] = []
    try:
        with contextlib.ExitStack() as stack:
            for model in models:
                device = _CountingDevice(tracker)
                with tracker.on_host():
                    handle = stack.enter_context(
                        Handle(model, device, _with_all_units(options), compute_dtype, shards=True)
                    )
                handles.append(handle)
                handle.engine.window.halves = False  # Rule 2
                handle.engine.gradient_return = _CountedGradients(device, handle.engine.counters)
                recorder.listen_to(handle.engine)
            sizes = _sizes(handles)
            stack.enter_context(counted_by(tracker))
            if isinstance(run, Answers):
                answer(handles[0], batch, run, tracker)
            else:
                _perform(handles, module, batch, run)
                for handle in handles:
                    _begin_again(handle)  # Rule 4
            stores = [unit.store for handle in handles for unit in handle.engine.units]
            wires = [
                [(aligned(store.on_device.layout.fields[index].nbytes), store.params[index]) for index in store.narrow]
                for store in stores
            ]
            units = [(number, unit) for number, handle in enumerate(handles) for unit in handle.units]
            return StepTrace(
                units=tuple(replace(unit, index=i, name=_named(n, unit.name)) for i, (n, unit) in enumerate(units)),
                sizes=sizes,
                wire=_sizes(handles),
                wire_nbytes=tuple(sum(nbytes for nbytes, _ in unit) for unit in wires),
                frozen_wire_nbytes=tuple(sum(nbytes for nbytes, p in unit if not p.requires_grad) for unit in wires),
                castable=frozenset(castable(module)),
                uncast=frozenset(id(w.parameter) for store in stores for w in store.weights if w.wire is None),
                narrow={id(w.parameter): w.field.nbytes for s in stores for w in s.weights if w.is_narrow},
                visits=tuple(tracker.visits),
                passes=tuple(tracker.passes),
                models=tuple(number for number, _ in units),
                phases=tuple(tracker.phases),
                shards=shards_of(module),
            )
    finally:
        tensors.observe = None


def _begin_again(handle: Handle) -> None:
    """Begin another pass like the last one, if there was any."""
    if (last := handle.engine.window.kind) is not None:
        kind, has_gradients = last
        with torch.set_grad_enabled(has_gradients):
            handle.open_scope(kind)


def _sizes(handles: Sequence[Handle]) -> tuple[UnitNumbers, ...]:
    """Return the sizes of all handles' units, in order (Rule 5)."""
    found = ((number, unit.sizes()) for number, handle in enumerate(handles) for unit in handle.engine.units)
    return tuple(replace(sizes, name=_named(number, sizes.name)) for number, sizes in found)


def _named(model: int, unit: str) -> str:
    """Name a unit of one of several models; the first one's have their own names."""
    return f"{model}.{unit}" if model else unit


def _with_all_units(options: Options) -> Options:
    """Return the options of a run whose window takes all units (Rule 2), and whose units are not compiled."""
    wire_dtype = "as-is" if options.compile_units else options.wire_dtype
    whole = replace(options, window=sys.maxsize, transfer=1, memory_budget=None, host_budget=None, disk=None)
    return replace(whole, wire_dtype=wire_dtype, compile_units=False)


def _perform(handles: Sequence[Handle], module: nn.Module, batch: Any, run: Runner) -> None:
    """Run the step; nothing of its graph is left afterwards. Of several models each call is a scope of its own."""
    alone = handles[0] if len(handles) == 1 else None
    if alone is not None:
        alone.open_scope("train")
    output = run(module, batch)
    if alone is not None:
        alone.close_scope()
    losses, gradients = losses_in(output)
    torch.autograd.backward(losses, gradients)


def losses_in(output: Any) -> tuple[list[Tensor], list[Tensor]]:
    """List the tensors of a step's output to differentiate, its loss or all of them, and their initial gradients."""
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", output)
    found: Sequence[Tensor] = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
    losses = [tensor for tensor in found if tensor.requires_grad]
    return losses, [torch.ones_like(tensor) for tensor in losses]


class RealTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context of tensors with data, on the CPU, for a step that depends on values that it computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observe: Any = None
        self.building = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.observe is not None:
            self.observe(func, args, kwargs or {}, out)
        return out

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        return tensor.detach().clone()


class _CountingDevice(Device):
    """A device without memory of its own: packed gradients are counted as they are allocated, host buffers never."""

    is_real = False

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__("cpu")
        self.function_modes = function_mode_count()
        self.dispatch_modes = dispatch_mode_count()
        self.tracker = tracker
        self._packed: set[int] = set()  # storages of gradients

    def holds(self, tensor: Tensor) -> bool:
        return True

    def slab(self, nbytes: int) -> Tensor:
        with self.tracker.on_host():
            return without_values(torch.empty(nbytes, dtype=torch.uint8))

    passing = slab

    def device_bytes(self, nbytes: int) -> Tensor:
        """Make a buffer that is not counted: the schedule decides which weights are on the device."""
        with self.tracker.on_host():
            return without_values(super().device_bytes(nbytes))

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        with self.tracker.casting():
            return super().cast(weight, dtype)

    def copied_to_host(self, tensor: Tensor) -> Tensor:
        with self.tracker.on_host():
            return super().copied_to_host(tensor)

    def host_empty(self, like: Tensor) -> Tensor:
        """Allocate as a device does, but never memory that is mapped: tensors without data have none."""
        with self.tracker.on_host():
            return without_values(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype))

    def claim(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().claim(storage, nbytes)
        self._packed.add(storage_id(storage))
        self.tracker.change(GRADIENTS, nbytes)
        self.tracker.visits[-1].other_nbytes += 2 * nbytes  # read and written, by a copy that the host asks for

    def shrink(self, storage: torch.UntypedStorage) -> None:
        """Free memory, and count that of packed gradients; a unit's is not counted (`device_bytes`)."""
        if storage_id(storage) in self._packed:
            self._packed.remove(storage_id(storage))
            self.tracker.change(GRADIENTS, -storage.nbytes())
        super().shrink(storage)


class _CountedGradients(GradientReturn):
    """Gradients on their way down: all but the packed ones are on the host from here on (Rule 3)."""

    device: _CountingDevice

    def receive(self, store: HostCopy, node: Any, grads: Gradients, step: PendingStep | None, task: int) -> Gradients:
        for grad in grads:
            if grad is not None:
                self.device.tracker.mark(grad, GRADIENTS)
        with self.device.tracker.on_host():
            return super().receive(store, node, grads, step, task)


class _StepRecorder:
    """Divides what the tracker counts into visits (Rule 2)."""

    def __init__(self) -> None:
        self.tracker = MemoryTracker(self._term)
        self.units: list[StreamedUnit] = []  # of all engines, in order (Rule 5)
        self.inside = False  # whether forward runs code of a streamed unit
        self._last: StreamedUnit | None = None

    def listen_to(self, engine: Engine) -> None:
        """Listen to an engine's phases from now on."""
        engine.counters.listener = _OfEngine(self, engine.units, len(self.units))
        self.units += engine.units
        for unit in engine.units:
            unit.stand_ins.data_exposed = _NeverExposed([False])

    def enter(self, index: int, in_backward: bool) -> None:
        """Note that a unit is needed."""
        unit, self.inside = self.units[index], True
        if unit is not self._last:
            self._last = unit
            others = ((place, other) for place, other in enumerate(self.units) if not other.unit.resident)
            in_use = tuple(place for place, other in others if not other.movable)
            self.tracker.begin(Visit(index, in_use, in_backward, in_backward or torch.is_grad_enabled()))

    def _term(self) -> str:
        """Return the term of what appears now (step_trace.py, Rule 2)."""
        inside = self._last is not None if in_backward() else self.inside
        return WORKING if inside else OUTSIDE


class _OfEngine(StepListener):
    """Listens to one engine, whose first unit has this place among all."""

    def __init__(self, recorder: _StepRecorder, units: Sequence[StreamedUnit], first: int) -> None:
        self._recorder = recorder
        self._units = {unit.name: unit for unit in units}
        self._first = first

    def waiting(self, cause: str, unit: str = "", phase: str = "") -> AbstractContextManager[None]:
        if cause == "weights" and not self._units[unit].unit.resident:
            self._recorder.enter(self._first + self._units[unit].index, phase == "backward")
        return super().waiting(cause, unit, phase)

    def left(self, around: str, in_backward: bool) -> None:
        self._recorder.inside = around in self._units and not self._units[around].unit.resident

    def work(self, lane: Lane, unit: str, phase: str, nbytes: int = 0) -> AbstractContextManager[None]:
        visit = self._recorder.tracker.visits[-1]
        if phase == "gradients":
            visit.sends.append(self._first + self._units[unit].index)
        elif phase == "activations":
            visit.stowed_nbytes += nbytes if lane == "down" else 0
            visit.fetched_nbytes += nbytes if lane == "up" else 0
        return super().work(lane, unit, phase, nbytes)


class _NeverExposed(list[bool]):
    """A mark that stays False: nothing can compare weights without data with their host copies."""

    def __setitem__(self, *_: Any) -> None:
        """Ignore what is set."""
