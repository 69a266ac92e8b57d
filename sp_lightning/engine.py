"""One step's choreography: which unit is on the device when, what stands in for its parameters, what comes back.

1. A *visit* is the time in which code that belongs to a unit runs. Entering makes the unit resident, orders the
   caller's stream after its bytes and binds its stand-ins; leaving unbinds them. Visits nest; only the outermost one
   of a unit acts. Nothing is freed by leaving: the schedule says at later visits what has to go.
2. A *pass* is all visits from the opening of the outermost scope (a forward of the root, a Lightning step) to the
   opening of the next one, backward included. The order of a pass is recorded and predicts the next of its kind:
   learned, never trusted. A unit that is not there when it is visited is fetched.
3. Backward makes a unit resident through the hook on its outputs (early), and through autograd's unpacking (whatever
   the way in). Code that recomputes enters units as forward does, or reads their weights outside of visits (reads.py).
4. Where a scope ends user code may write to weights: fills that still read them are waited for.
5. After an exception everything of ours is taken out of the module's slots, whatever was under way; the host weights
   are the truth and are only ever written by write-backs and by the user's optimizer.
6. A unit may be stepped while backward goes on (overlap.py) once a backward was seen that did not come back to it after
   its gradients: one that uses a weight detached, too, does. If another one comes back all the same, that is an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from . import reads
from .activations import SavedTensors, tensors_in
from .autotune import UnitBytes, first_window, grown_window
from .binding import Binding
from .compiled import never_compiled, not_compiled_itself
from .config import Options, format_bytes
from .device import Device
from .errors import ExactnessError, UnsupportedError
from .gradients import Downlink, Gradients
from .offload import Offload, OnHost
from .parameters import true_device
from .recompute import Recompute, Written
from .schedule import Schedule
from .store import Residency, UnitStore
from .telemetry import Counters
from .units import Slot, Unit

log = logging.getLogger(__name__)


class StreamedUnit:
    """A unit at run time: its bytes, its stand-ins and how deep we are inside it."""

    def __init__(self, unit: Unit, store: UnitStore, slots: list[tuple[int, Slot]], engine: Engine) -> None:
        self.unit = unit
        self.name = unit.name
        self.index = unit.index
        self.store = store
        self.visits = 0

        def receive(node: Any, grads: Gradients) -> Gradients:
            return engine.gradients_ready(self, node, grads)

        self.binding = Binding(store, slots, receive)

    def stand_in(self, parameter: Tensor) -> Tensor:
        """The device tensor for one of its host parameters."""
        return self.binding.outputs[self.store.index_of[id(parameter)]]

    def sizes(self) -> UnitBytes:
        """What planning has to know."""
        trainable = (p.requires_grad for p in self.store.params)
        fields = zip(self.store.layout.fields, trainable, strict=True)
        return UnitBytes(self.name, self.store.nbytes, sum(field.nbytes for field, needed in fields if needed))

    @property
    def movable(self) -> bool:
        """Whether its bytes may leave the device now."""
        return not self.visits and not self.binding.in_use()


class _InUse:
    """The units that can not leave the device now, asked one by one."""

    def __init__(self, units: list[StreamedUnit]) -> None:
        self._units = units

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        return not self._units[index].movable


class Engine:
    """Streams the units of one module. Use it through ``sp_lightning.stream`` or the strategy."""

    def __init__(
        self,
        units: list[Unit],
        slots: dict[nn.Parameter, list[Slot]],
        device: Device,
        options: Options,
        counters: Counters,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = device
        self.options = options
        self.compute_dtype = compute_dtype  # of what is FP32 on the host; None: as it is
        self.counters = counters
        self.downlink = Downlink(device, self.counters)
        self.units = [self._streamed(unit, slots) for unit in units]
        self._in_use = _InUse(self.units)
        self._by_storage = {unit.store.storage._cdata: unit for unit in self.units}
        self._by_parameter = {id(p): unit for unit in self.units for p in unit.store.params}
        self.offload = Offload(device, self.counters)
        self.written = Written()
        stow = self.offload if options.activations == "recompute+offload" else None
        self.recompute = Recompute(device, self.written, stow)
        self.saved = SavedTensors(self._by_storage.get, self.require, self.offload)
        self._sizes = [unit.sizes() for unit in self.units if not unit.unit.resident]
        root_nbytes = sum(unit.store.nbytes for unit in self.units if unit.unit.resident)
        window = first_window(options, self._sizes, root_nbytes, device.is_host)
        transfer = 1 if options.transfer == "auto" else min(options.transfer, window)
        self.schedule = Schedule([unit.store.nbytes for unit in self.units], window, transfer)
        self._may_grow = options.window == "auto" and options.memory_budget is None
        self._scopes = 0
        self._interrupted: list[bool] = []  # for each open scope: whether an optimizer was stepping when it began
        self._open: list[StreamedUnit] = []  # visited now, in order of entering
        self._thread = 0  # that entered the first of them
        self._hooked: list[bool] = []  # for each open visit: whether it pushed saved-tensor hooks
        self._backward_task = -1  # autograd's number of the outermost backward
        self._backward = False  # whether a backward visits units; still so after one that failed
        self._complete: set[StreamedUnit] = set()  # whose gradients came out of it (Rule 6)
        self._stepping: set[StreamedUnit] = set()  # those of them that may be stepped by now
        self._left_alone: set[StreamedUnit] = set()  # to which a backward did not come back after that
        self._orders: dict[Any, list[int]] = {}  # of the last pass of each kind (Rule 2)
        self._recorded: list[int] = []
        self._kind: Any = None
        self._last: StreamedUnit | None = None  # the unit required last
        self._listening = False  # to a step, and until the backward that may follow it
        self._attending = False
        self._told = False
        self._closed = False
        self.optimizing = False
        self.only_inference = False

    def _streamed(self, unit: Unit, slots: dict[nn.Parameter, list[Slot]]) -> StreamedUnit:
        store = UnitStore(unit, self.device, self.counters, self, self._device_dtype)
        own = [(index, slot) for index, parameter in enumerate(store.params) for slot in slots[parameter]]
        return StreamedUnit(unit, store, own, self)

    def _device_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.compute_dtype if self.compute_dtype is not None and dtype is torch.float32 else dtype

    # ---- scopes and passes

    @property
    def in_scope(self) -> bool:
        """Whether a step of the managed module is running."""
        return self._scopes > 0

    def apparent_device(self) -> torch.device | None:
        """What ``parameter.device`` tells inside a step: the device on which the plain run has it."""
        return self.device.torch_device if self._scopes and not self.optimizing else None

    def apparent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What ``parameter.dtype`` tells inside a step."""
        return self._device_dtype(dtype) if self._scopes and not self.optimizing else dtype

    def open_scope(self, kind: Any) -> None:
        """A step, or a forward outside of any step, begins (Rule 2)."""
        with _quietly():
            if not self._scopes and (self._open or self._backward):
                self.reset()  # of an interrupted step
            self._scopes += 1
            self._interrupted.append(self.optimizing)
            self.optimizing = False
            if self._scopes > 1:
                return
            self._grow(self._kind)
            self._orders[self._kind] = self._recorded
            self._recorded = []
            self._kind = (kind, torch.is_grad_enabled())
            self._last = None
            self._drop_stale()
            self._listen()
            self.schedule.begin(self._orders.get(self._kind, ()), wrap=not torch.is_grad_enabled())

    def close_scope(self) -> None:
        """It ends: user code runs next (Rule 4)."""
        with _quietly():
            self._scopes = max(0, self._scopes - 1)
            self.optimizing = self._interrupted.pop() if self._interrupted else False
            if not self._scopes:
                self.offload.finish()
                if not torch.is_grad_enabled():
                    self._ignore()  # else a backward may follow, and what it differentiates may read weights until then
                self.settle()

    def settle(self) -> None:
        """Host weights may be written from here on."""
        for unit in self.units:
            if unit.store.residency is Residency.DEVICE:
                unit.store.settle()

    def _grow(self, kind: Any) -> None:
        """After the first pass of a kind: into the memory that it never used (autotune.py, Rule 2)."""
        if not self._may_grow or kind is None or kind in self._orders:
            return
        if not kind[1] and not self.only_inference:
            return  # a pass without gradients does not show what training needs
        headroom = self.device.memory_headroom()
        if headroom is None:
            return
        window = grown_window(self._sizes, self.schedule.window, headroom)
        if window != self.schedule.window:
            log.info(
                "superpipeline: window %d -> %d, as %s of device memory were never used",
                self.schedule.window,
                window,
                format_bytes(headroom),
            )
            self.schedule.resize(window, self.schedule.transfer)

    def _drop_stale(self) -> None:
        """Units whose host bytes changed have to come up again: better planned than at their visit."""
        self.follow()
        for index in self.schedule.resident:
            unit = self.units[index]
            if unit.store.stale() and unit.movable:
                self.schedule.invalidate([index])
                self._evict(unit)

    def follow(self) -> None:
        """Device bytes that the user keeps a reference to become what the host's are now."""
        with _quietly():
            for unit in self._kept():
                if unit.store.stale():
                    self._refill(unit)

    def collect_writes(self) -> None:
        """What the user wrote through kept references is on the host."""
        with _quietly():
            for unit in self._kept():
                unit.binding.collect_writes()

    @property
    def keeps_references(self) -> bool:
        """Whether stand-ins outlive their visit."""
        return any(True for _ in self._kept())

    def _kept(self) -> Iterator[StreamedUnit]:
        for unit in self.units:
            if unit.store.residency is Residency.DEVICE and not unit.visits and unit.binding.in_use():
                yield unit

    def _refill(self, unit: StreamedUnit) -> None:
        """In place: whoever refers to the bytes sees the new ones, as in a plain run."""
        unit.binding.collect_writes()
        written = unit.store.written()
        unit.store.load()
        unit.store.wait_load()
        unit.binding.overwritten(written)

    # ---- reads outside visits (reads.py)

    @property
    def serving(self) -> bool:
        """Whether reads of host parameters are answered with their stand-ins."""
        return (self._scopes > 0 or self._backward) and not self.optimizing

    @property
    def between_steps(self) -> bool:
        """Whether user code may bring host parameters together with tensors on the device."""
        return self._attending and not self.serving and not self.optimizing

    def attend(self) -> None:
        """Begins to see what user code does between steps; where all is on the host there is nothing to see."""
        if not self.device.is_host:
            self._attending = True
            reads.listen()

    def on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor's bytes are the device's, or a unit's there."""
        return true_device(tensor).type != "cpu" or tensor.untyped_storage()._cdata in self._by_storage

    def in_slab(self, tensor: Tensor) -> bool:
        """Whether they are those of a managed parameter on the host."""
        starts = ((unit.store.slab.data_ptr(), unit.store.slab.numel()) for unit in self.units)
        return any(start <= tensor.data_ptr() < start + length for start, length in starts)

    def read_on_host(self, parameter: Tensor) -> None:
        """Said once: of all that streaming does, only this can cost bits."""
        if self._listening and not self._told and not self.optimizing:
            self._told = True
            unit = self._by_parameter[id(parameter)]
            log.info(
                "superpipeline: %s was read on the host; if a loss depends on that, its gradient is summed in another "
                "order and equals the plain run's to rounding. Inside the step such a read costs nothing",
                unit.store.names[unit.store.index_of[id(parameter)]],
            )

    @contextlib.contextmanager
    def lend(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """The stand-in of a host parameter; a visit of its unit."""
        unit = self._by_parameter[id(parameter)]
        depth = len(self._open)
        self.enter(unit)
        try:
            yield unit.stand_in(parameter)
        finally:
            self.leave_to(depth)
            if not self.serving:
                unit.store.settle()  # Rule 4

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            reads.listen()

    def _ignore(self) -> None:
        if self._listening and not self._scopes and not self._backward:
            self._listening = False
            reads.ignore()
        if self.optimizing:
            reads.pause()  # an optimizer's arithmetic is on the host

    # ---- visits

    @never_compiled
    def enter_all(self, units: list[StreamedUnit]) -> int:
        """Enters several units; returns the depth to leave to."""
        depth = len(self._open)
        for unit in units:
            if not unit.visits:
                self.enter(unit)
        return depth

    def enter(self, unit: StreamedUnit) -> None:
        """Code that belongs to this unit is about to run (Rule 1)."""
        if self._open and self._thread != threading.get_ident() and not _in_backward():
            raise UnsupportedError(
                f"{unit.name} was entered while another thread is inside {self._open[-1].name}; weights visit "
                "the device for one thread at a time: run the two one after the other, or stream a copy of the module "
                "for each"
            )
        if not self._open:
            self._thread = threading.get_ident()
        with _quietly():
            if not unit.visits:
                reads.resume()
                self.require(unit)
                self._restore(unit)
                unit.binding.bind()
            unit.visits += 1
            hook = not self._open and torch.is_grad_enabled() and self.saved.enabled()
            self._open.append(unit)
            self._hooked.append(hook)
            if hook:
                self.saved.push(unit.name)

    @never_compiled
    def leave_to(self, depth: int) -> None:
        """Leaves the visits that were entered since, also those that an exception left open."""
        with _quietly():
            while len(self._open) > depth:
                unit = self._open.pop()
                if self._hooked.pop():
                    self.saved.pop()
                unit.visits -= 1
                if not unit.visits:
                    unit.binding.collect_writes(self._replayed(unit))
                    unit.binding.unbind()

    @not_compiled_itself
    def run(self, unit: StreamedUnit, root: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A forward of a unit's root that autograd records: as the ``activations`` option says."""
        saved: list[OnHost] = []
        if self.options.activations.startswith("recompute"):
            output, saved = self.recompute.run(call, unit.name, root, args, kwargs)
        elif self.options.activations == "offload" and not self._open and not _in_backward():
            self.offload.begin()
            try:
                output = call(*args, **kwargs)
            finally:
                saved = self.offload.end()
        else:
            output = call(*args, **kwargs)
        self._announce(unit, saved, output)
        return output

    @never_compiled
    def _announce(self, unit: StreamedUnit, saved: list[OnHost], output: Any) -> None:
        """Has the unit fetched as soon as backward arrives at any of its outputs (Rule 3)."""

        def before_backward(_grads: Any) -> None:
            self.require(unit)
            for tensor in saved:
                self.offload.fetch(tensor)

        for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
            node.register_prehook(before_backward)

    def _replayed(self, unit: StreamedUnit) -> list[int]:
        """The weights that a forward which runs again writes once more."""
        return [index for store, index in self.written.restored if store is unit.store]

    def _restore(self, unit: StreamedUnit) -> None:
        """Weights that the unit's forward writes are again what they were, for a forward that runs again."""
        for (store, index), before in self.written.restored.items():
            if store is unit.store:
                store.layout.view(store.storage, store.layout.fields[index]).copy_(before)

    def about_to_write_back(self, store: UnitStore, index: int, before: Tensor) -> None:
        """Model code wrote a weight whose host copy is still what it was."""
        self.written.report((store, index), before)

    def require(self, unit: StreamedUnit) -> None:
        """The unit is resident, and the caller's stream is ordered after its bytes."""
        with _quietly():
            if self._closed:
                raise UnsupportedError(
                    f"a graph that was made while {unit.name} was streamed is used after that ended, by close() or "
                    "because the module's parameters changed: run its backward before"
                )
            in_backward = _in_backward()
            store = unit.store
            if in_backward:
                self._in_backward_from_here()
                self._check_complete(unit)
            if unit.visits == 0 and store.residency is Residency.DEVICE and not in_backward and store.stale():
                self._refill(unit)
            if unit.unit.resident:
                if store.residency is Residency.HOST:
                    store.load()
            elif unit is not self._last or store.residency is Residency.HOST:
                self._visit(unit)
            store.wait_load()
            if not unit.binding.bound:
                unit.binding.refresh()

    def _visit(self, unit: StreamedUnit) -> None:
        """Does what the schedule says."""
        decision = self.schedule.visit(unit.index, self._in_use)
        self.counters.surprises += decision.surprise
        self.counters.extra_held += len(self.schedule.resident) > self.schedule.window
        for index in decision.evict:
            self._evict(self.units[index])
        for index in decision.load:
            if self.units[index].store.residency is Residency.HOST:
                self._load(self.units[index], unit)
        self._last = unit
        self._recorded.append(unit.index)

    def _load(self, unit: StreamedUnit, visited: StreamedUnit) -> None:
        """Starts a unit's way up. Without room for it an "auto" window shrinks: what can go, goes."""
        try:
            unit.store.load()
        except torch.OutOfMemoryError:
            self.schedule.invalidate([unit.index])
            if self.options.window != "auto":
                raise
            self._shrink(visited)
            if unit is visited:
                unit.store.load()
                self.schedule.keep(unit.index)

    def _shrink(self, visited: StreamedUnit) -> None:
        window = max(1, self.schedule.window - 1)
        log.warning("superpipeline: out of device memory; window %d -> %d", self.schedule.window, window)
        self._may_grow = False
        self.schedule.resize(window, min(self.schedule.transfer, window))
        for index in self.schedule.resident:
            unit = self.units[index]
            if unit is not visited and unit.store.residency is Residency.DEVICE and unit.movable:
                self.schedule.invalidate([index])
                self._evict(unit)

    def _evict(self, unit: StreamedUnit) -> None:
        unit.binding.collect_writes()
        unit.binding.unbind()
        unit.store.free()

    def suspect(self, parameters: Iterable[Tensor]) -> None:
        """These parameters were, or are about to be, written by an optimizer or someone like it."""
        for unit in {self._by_parameter[id(p)] for p in parameters if id(p) in self._by_parameter}:
            unit.store.settle()
            unit.store.suspect()

    @property
    def torch_device(self) -> torch.device:
        """Where the units compute."""
        return self.device.torch_device

    def owner(self, parameter: Tensor) -> StreamedUnit | None:
        """The unit of a host parameter."""
        return self._by_parameter.get(id(parameter))

    # ---- backward

    def gradients_ready(self, unit: StreamedUnit, node: Any, grads: Gradients) -> Gradients:
        """All uses of the unit's weights in this backward are done."""
        with _quietly():
            self._in_backward_from_here()
            final = self._is_outermost()
            if final:
                self._complete.add(unit)
            if final and unit in self._left_alone:
                self._stepping.add(unit)
            return self.downlink.receive(unit.store, node, grads, final and unit in self._left_alone)

    def land(self) -> None:
        """Gradients that are under way are in ``.grad``."""
        with _quietly():
            self.downlink.finish()

    def _check_complete(self, unit: StreamedUnit) -> None:
        """Backward needs this unit (Rule 6)."""
        if unit not in self._complete:
            return
        self._complete.discard(unit)
        self._left_alone.discard(unit)
        if unit in self._stepping and self.downlink.ahead is not None:
            raise ExactnessError(
                f"backward came back to {unit.name} when its gradients were complete and the optimizer had stepped it, "
                "which it did not in the steps before; set optimizer_overlap=False"
            )

    def _is_outermost(self) -> bool:
        """Whether the backward that runs is not one inside another, which may bring a part of the gradients only."""
        return torch._C._current_graph_task_id() == self._backward_task

    def _in_backward_from_here(self) -> None:
        if not self._backward:
            self._backward = True
            self._backward_task = torch._C._current_graph_task_id()
            self._complete.clear()
            self._stepping.clear()
            self._listen()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        with _quietly():
            self._backward = False
            self._left_alone |= self._complete
            self.downlink.let_go()
            self.land()
            self._ignore()
            self.settle()

    # ---- ends

    def reset(self) -> None:
        """Takes everything of ours out of the module, wherever an exception left it (Rule 5)."""
        while self._open:
            if self._hooked.pop():
                self.saved.pop()
            self._open.pop().visits = 0
        self._backward = False
        self.downlink.drop()
        for unit in self.units:
            unit.visits = 0
            unit.binding.unbind()
        self._scopes = 0
        self._interrupted.clear()
        self._ignore()
        self._last = None
        self.optimizing = False

    def close(self) -> None:
        """The parameters are plain again; nothing is left on the device."""
        self.reset()
        self._closed = True
        if self._attending:
            self._attending = False
            reads.ignore()
        try:
            self.device.synchronize()
        finally:  # what failed on the device takes nothing from the host
            for unit in self.units:
                unit.store.release(kept=unit.binding.in_use())
                unit.binding.forget()

    # ---- figures

    def stats(self) -> dict[str, Any]:
        """What happened since the start."""
        return {
            **self.counters.snapshot(),
            "window": self.schedule.window,
            "transfer": self.schedule.transfer,
            "units": sum(not unit.unit.resident for unit in self.units),
            "resident_root_bytes": sum(unit.store.layout.nbytes for unit in self.units if unit.unit.resident),
            "device_peak": self.device.memory_peak(),
            "host_bytes": sum(unit.store.slab.numel() for unit in self.units),
        }

    @property
    def order(self) -> list[int]:
        """The visits of the pass so far, as unit indices."""
        return list(self._recorded)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# Our own looks at host parameters are no reads (reads.py).
@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    with torch._C.DisableTorchFunctionSubclass(), temporarily_clear_interpreter_stack():
        yield


def _quietly() -> AbstractContextManager[None]:
    """What we do to weights is no read of the user's, and nothing that a function transform (vmap, grad) transforms."""
    if torch._C._are_functorch_transforms_active():
        return _outside_transforms()
    return torch._C.DisableTorchFunctionSubclass()
