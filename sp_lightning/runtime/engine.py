"""The choreography of a step: when units are resident, stand-ins are bound and gradients come back.

1. A *visit* is the time in which code of a unit runs. Entering makes the unit resident (window.py), orders the caller's
   stream after its bytes and binds its stand-ins; leaving unbinds them. Visits nest; only the outermost visit of a unit
   acts.
2. A *scope* is a step, or a forward outside of any step. The outermost scope begins a pass (window.py, Rule 1), so each
   forward that the model's ``generate`` calls predicts the next one. A scope inside a backward (a checkpoint around the
   whole module) belongs to the pass of that backward.
3. Backward makes a unit resident early, through the hook on the unit's outputs, and at the latest when autograd unpacks
   a saved tensor, whatever led to it. Code that recomputes enters units as forward does, or reads their weights outside
   of visits (weight_reads.py).
4. User code may read and write weights once a scope has ended: what model code wrote to them goes down before that.
5. After an exception, wherever it came, the stand-ins leave the module's slots; the entries stay in front of it. The
   host weights are the truth: of the library, only write-backs write to them, beside the user's optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autograd import weight_reads
from ..autograd.autocast_weights import AutocastWeights, CastingCall
from ..autograd.backward_pass import BackwardPass, in_backward, leaf
from ..autograd.gradient_nodes import Gradients
from ..autograd.offload import Offload, OffloadedTensor
from ..autograd.phases import Phases
from ..autograd.recompute import Recompute
from ..autograd.saved_tensors import SavedTensors, is_checkpointed, tensors_in
from ..autograd.stand_ins import StreamedUnit
from ..compat.dynamo import compiling_as_here, compiling_callback, never_compiled, not_compiled_itself
from ..compat.references import shares_storage
from ..compat.tensors import admits_hooks, in_transform, storage_id
from ..errors import ExactnessError, UnsupportedError
from ..gradients.way_down import GradientReturn
from ..host.telemetry import Counters
from ..memory.access import Access
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import name_of, quietly, true_device
from ..memory.weights import device_dtype
from ..optim.step_owner import StepOwner
from ..options import Options
from ..ranks.alone import Alone
from ..storage.in_memory import InMemory
from ..stream.partition import Slot, Unit
from .window import Window

log = logging.getLogger(__name__)


class VisitingEntry(Protocol):
    """An entry in front of a module's forward (entries.py)."""

    module: nn.Module
    units: list[StreamedUnit]
    guard: Callable[..., Any] | None  # in front of the forward during a visit (autocast_weights.py)


class Engine:
    """The engine that streams the units of one module; ``sp_lightning.stream`` and the strategy make it."""

    def __init__(
        self,
        units: list[Unit],
        slots: dict[nn.Parameter, list[Slot]],
        device: Device,
        team: Alone,
        options: Options,
        counters: Counters,
        compute_dtype: torch.dtype | None,  # on it, of weights that are FP32 on the host; None: FP32
        storage: InMemory,  # of weights and gradients
        again: bool = False,
    ) -> None:
        self.team = team
        self.shares_bytes = team.find_sharing([parameter for unit in units for _, parameter in unit.params], again)
        self.access = Access()
        self.step_owner = StepOwner(counters, self.access)
        dtypes = functools.partial(device_dtype, compute_dtype)
        self.phases = Phases(self.access, device, dtypes)
        self.device = device
        self.options = options
        self.counters = counters
        self.gradient_return = GradientReturn(
            device, self.counters, storage.gradients_of, lambda: storage.may_stay_narrow
        )
        self.units: list[StreamedUnit] = []
        with quietly():  # other modules may be streamed already, and have reads of weights watched
            for unit in units:
                store = HostCopy(unit, device, counters, self, dtypes, team.slab, storage.homes(unit))
                self.units.append(StreamedUnit(unit, store, self.gradients_ready, slots))
            stores = [unit.store for unit in self.units]
            team.begin(stores, self.access, self.gradient_return, options.optimizer_overlap, storage.state)
        self._by_storage = {storage_id(unit.store.on_device.storage): unit for unit in self.units}
        self._by_parameter = {id(p): unit for unit in self.units for p in unit.stand_ins.hosts}
        offload = Offload(device, counters)
        self.recompute = Recompute(device, offload if options.activations == "recompute+offload" else None)
        self.autocast_weights = AutocastWeights(options.may_cast and compute_dtype is None, self._retype)
        casts = self.autocast_weights.casts
        self.saved = SavedTensors(self._by_storage.get, self.unit_of, self.require, offload, casts)
        self.window = Window(self.units, device, options, counters)
        self.backward_pass = BackwardPass(self.access)
        self._open: list[StreamedUnit] = []  # the units that are visited, in order of entering
        self._thread = 0  # the thread that entered the first of them
        # Whether the root was called of each unit of which autograd recorded a forward; None once that was looked at.
        self._called: dict[int, bool] | None = {}

    @property
    def any_replaced(self) -> bool:
        """Whether user code replaced the data of any parameter."""
        with quietly():
            return any(store.was_replaced for store in self._with_data())

    @property
    def any_reshaped(self) -> bool:
        """Whether user code gave any parameter another shape or other strides than its unit has."""
        with quietly():
            return any(store.was_reshaped for store in self._with_data())

    @property
    def any_awaited(self) -> bool:
        """Whether some graph waits for its backward, as far as autograd saved weights for it."""
        with quietly():
            return any(unit.awaited for unit in self.units)

    def _with_data(self) -> Iterator[HostCopy]:
        """Yield the units' stores, but for those being stepped: their parameters may be vacant (pending_step.py)."""
        return (unit.store for unit in self.units if unit.store not in self.access.steps)

    def _retype(self, unit: StreamedUnit, types: dict[int, torch.dtype]) -> None:
        """Have these weights of a unit travel in these types from now on (autocast_weights.py)."""
        before = storage_id(unit.store.on_device.storage)
        self.window.retype(unit, types)
        del self._by_storage[before]
        self._by_storage[storage_id(unit.store.on_device.storage)] = unit

    # ---- scopes and optimizers' steps

    def open_scope(self, kind: Any) -> None:
        """Begin a scope: a step, or a forward outside of any step (Rule 2)."""
        if not self.phases.in_step:
            with quietly():
                if self._open or self.backward_pass in self.access.gradients:
                    self.reset()  # what an interrupted step left
                self.begin_pass(kind)
            self.team.note_forward(ended=False)
        self.phases.begin_step()

    def begin_pass(self, kind: Any) -> None:
        """Begin a pass of this kind (window.py, Rule 1)."""
        self.counters.listener.begin_pass(kind if isinstance(kind, str) else kind[0], torch.is_grad_enabled())
        self.autocast_weights.begin_pass(kind)
        self.window.begin_pass(kind, self.autocast_weights.recording)

    def close_scope(self) -> None:
        """End a scope: user code runs next (Rule 4)."""
        if self.phases.end_step():
            self.step_owner.finish()
            self.step_owner.forward_ended()
            self.saved.offload.finish()
            self.window.collect_writes()
            self.team.note_forward(ended=torch.is_grad_enabled())
            if torch.is_grad_enabled() and self.options.activations != "keep" and self._called is not None:
                self._compare_calls(self._called)

    def _compare_calls(self, called: dict[int, bool]) -> None:
        """Warn, once, of units that the ``activations`` option does not reach: only parts of them are called."""
        visited = [index for index in dict.fromkeys(self.window.order) if index in called]
        if visited:
            self._called = None
        if parts := [self.units[index].name for index in visited if not called[index]]:
            more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
            log.warning(
                "superpipeline: activations=%r does not reach %s%s, because the model calls modules inside, never the "
                "unit itself: what autograd saves there stays on the device",
                self.options.activations,
                parts[0],
                more,
            )

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """Begin an optimizer's step, which reads and writes on the host."""
        self.phases.begin_optimizer(optimizer)
        with quietly():
            for unit in {*self._open}:
                unit.stand_ins.collect_in_visit()
        self.window.collect_writes()  # and marks nothing stale: a closure may run before the optimizer writes

    def check_whole(self) -> None:
        """Raise ExactnessError in the middle of an optimizer's step, of which a checkpoint would have a part."""
        self.step_owner.check_whole()
        self.team.check_between_steps()

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Call an optimizer's closure, which may read and write weights as a step does."""
        result = self.phases.run_closure(closure)
        self.window.collect_writes()
        return result

    def end_optimizer(self, parameters: Iterable[Tensor], stepped: Collection[int] = ()) -> None:
        """End an optimizer's step of these parameters, with the ids of those that were stepped beside other work."""
        self.phases.end_optimizer()
        self.mark_stale(parameters, stepped)
        with quietly():
            for unit in {*self._open}:  # an optimizer inside of a forward
                if unit.store.stale():
                    self.window.refill(unit, has_collected=True)
            self.window.refresh_referenced()

    # ---- reads outside visits (weight_reads.py)

    def on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device, or lies in the device buffer of a unit."""
        return true_device(tensor).type != "cpu" or storage_id(tensor.untyped_storage()) in self._by_storage

    def in_slab(self, tensor: Tensor) -> bool:
        """Whether a tensor's bytes lie where those of a unit do: in its slab, or in a file."""
        ranges = (range_ for unit in self.units for range_ in unit.store.ranges())
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in ranges)

    def in_weights(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a weight: at its home, or where user code has put it since."""
        stores = (unit.store for unit in self.units)
        return self.in_slab(tensor) or (shares_storage(tensor) and any(store.refers_to(tensor) for store in stores))

    def in_visit(self, parameter: Tensor) -> bool:
        """Whether the calling thread runs model code inside a visit of the parameter's unit."""
        is_bound = self._by_parameter[id(parameter)].stand_ins.bound
        is_here = is_bound and (self._thread == threading.get_ident() or in_backward())
        return is_here and self.phases.serving

    @contextlib.contextmanager
    def lend(self, parameter: nn.Parameter, read: CastingCall | None = None) -> Iterator[Tensor]:
        """Visit a host parameter's unit and yield the parameter's stand-in for this read."""
        unit = self._by_parameter[id(parameter)]
        depth = len(self._open)
        self.enter(unit, borrows=True)
        try:
            stand_in = self.autocast_weights.read(parameter, read)
            if stand_in is None:
                with quietly():  # it may be made here
                    stand_in = unit.stand_in(parameter)
            yield stand_in
        finally:
            self.leave_to(depth)
            self.window.borrowed.add(unit)
            self.phases.end_loan()

    # ---- visits

    @not_compiled_itself
    def visit(self, entry: VisitingEntry, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a module's forward, or the guard in front of it, inside visits of the entry's units."""
        if compiling_callback() is not None and self.autocast_weights.enabled:
            self.autocast_weights.stop()
        depth = len(self._open)
        try:
            self._enter_all(entry.units)
            return (entry.guard or forward)(*args, **kwargs)
        finally:
            self.leave_to(depth)

    @never_compiled
    def _enter_all(self, units: list[StreamedUnit]) -> None:
        for unit in units:
            if self._called is not None and torch.is_grad_enabled():
                self._called.setdefault(unit.index, False)
            if unit not in self._open:
                self.enter(unit)

    def enter(self, unit: StreamedUnit, borrows: bool = False) -> None:
        """Begin a visit: code of this unit is about to run (Rule 1), or other code to read its weights."""
        if not self._open:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident() and not in_backward():
            raise UnsupportedError(
                f"{unit.name} was entered while another thread is inside {self._open[-1].name}; weights visit "
                "the device for one thread at a time: run the threads one after the other, or stream a copy of the "
                "module in each"
            )
        with quietly():
            if unit not in self._open:
                reads = borrows and self.phases.between_steps  # of user code: no part of the module runs
                if unit.store in self.team.filed and torch.is_grad_enabled() and not reads:
                    self._check_frozen(unit)
                if self.device.is_capturing is not None and self.device.is_capturing():
                    raise UnsupportedError(
                        f"{unit.name} was entered while a CUDA graph is captured, whose replays would read its weights "
                        "where they are now: streamed ones do not stay there. Leave out the graph"
                    )
                weight_reads.resume()
                backward = in_backward()
                if not (backward and self._came_last(unit)):
                    self._require(unit, backward)
                elif unit.stand_ins.refresh():  # recomputation has just restored which weights train
                    self.backward_pass.forget()
                if self.recompute.written.restored:
                    self._restore(unit)
                unit.stand_ins.bind()
            unit.visits += 1
            self._open.append(unit)
            if len(self._open) == 1 and torch.is_grad_enabled() and admits_hooks():
                self.saved.push(unit.name)

    def _check_frozen(self, unit: StreamedUnit) -> None:
        """Raise UnsupportedError if a weight trains to which ranks have given no memory that they share."""
        for index in self.team.filed[unit.store]:
            if unit.store.params[index].requires_grad:
                raise UnsupportedError(
                    f"{unit.store.names[index]} lies in its file, and was unfrozen within a step, or since the whole "
                    "module was last called. Several devices give it memory that they share as a step or a call of the "
                    "whole module begins: unfreeze it before that, as in on_train_batch_start. "
                    "If it is frozen and unfrozen in turns, have it in memory before (p.data = p.data.clone())"
                )

    @never_compiled
    def leave_to(self, depth: int) -> None:
        """Leave the visits that are deeper than this, also those that an exception left open."""
        with quietly():
            while len(self._open) > depth:
                unit = self._open.pop()
                if self.saved.in_force and not self._open:
                    self.saved.pop()
                unit.visits -= 1
                if unit not in self._open:
                    replayed: list[int] = []  # a recomputed forward writes these weights a second time
                    if self.recompute.written.restored:
                        replayed = [index for store, index in self.recompute.written.restored if store is unit.store]
                    unit.stand_ins.collect_writes(replayed)
                    unit.stand_ins.unbind()
                    if unit.stand_ins.gradients:
                        unit.stand_ins.collect_gradients()
                    if unit.stand_ins.may_be_kept:
                        self.window.borrowed.add(unit)
                    self.counters.listener.left(self._open[-1].name if self._open else "", in_backward())

    @not_compiled_itself
    def record(self, entry: VisitingEntry, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward of a unit's root that autograd records, as the ``activations`` option says."""
        unit = entry.units[0]
        call: Any = functools.partial(self.visit, entry, forward)  # a second run is of the forward that ran first
        if self._called is not None:
            self._called[unit.index] = True
        if self.window.borrowed:  # else the unit's forward would seem to have written what code wrote before
            self.window.collect_from_borrowed()
        # No checkpoint works inside a transform, nor where hooks are forbidden; and one of the user's has to see
        # what it sees in a plain run.
        can_save = not in_transform() and admits_hooks() and not is_checkpointed()
        activations = self.options.activations if can_save else "keep"
        saved: list[OffloadedTensor] = []
        if activations.startswith("recompute"):
            if unit.stand_ins.versions() != unit.stand_ins.known_versions:  # through a view that is kept; the same
                self.window.collect_writes((unit,))
            call = compiling_as_here(call)  # a checkpoint, which compiles nothing, runs it now and in backward
            output, saved = self.recompute.run(call, unit.name, unit.store, entry.module, args, kwargs)
        elif activations == "offload" and not self.saved.offload.active and not in_backward():
            self.saved.offload.begin()
            try:
                output = call(*args, **kwargs)
            finally:
                saved = self.saved.offload.end()
        else:
            output = call(*args, **kwargs)
        self._hook_outputs(unit, saved, output)
        return output

    @never_compiled
    def _hook_outputs(self, unit: StreamedUnit, saved: list[OffloadedTensor], output: Any) -> None:
        """Have the unit fetched as soon as backward arrives at any of its outputs (Rule 3)."""

        waiting = [weakref.ref(tensor) for tensor in saved]  # nodes live as long as the loss, and these until they ran

        def before_backward(_grads: Any) -> None:
            self.require(unit)
            for reference in waiting:
                tensor = reference()
                if tensor is not None:
                    self.saved.offload.fetch(tensor)

        for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
            node.register_prehook(before_backward)
        if self.team.size > 1 and not self.phases.in_step:  # a unit that user code calls by itself
            self.team.note_forward(ended=True)

    def _restore(self, unit: StreamedUnit) -> None:
        """Restore weights that the unit's forward wrote, before the forward is recomputed."""
        for (store, index), before in self.recompute.written.restored.items():
            if store is unit.store:
                unit.stand_ins.full_precision.check_rewritten(index)
                store.on_device.view(index).copy_(before)

    def about_to_write_back(self, store: HostCopy, index: int, before: Tensor) -> None:
        """Report a weight that model code wrote, while its host copy still has the value from before."""
        self.recompute.written.report((store, index), before)

    def require(self, unit: StreamedUnit) -> None:
        """Make the unit resident and order the caller's stream after its bytes."""
        backward = in_backward()
        if not (backward and self._came_last(unit)):  # autograd unpacks each saved tensor of the unit by itself
            with quietly():
                self._require(unit, backward)

    def _came_last(self, unit: StreamedUnit) -> bool:
        """Whether the unit is the one that backward needed last, and still there, with bytes that code cannot reach."""
        if unit is not self.backward_pass.last or self.backward_pass.at_end() is None:
            return False
        on_device = unit.store.on_device
        return on_device.is_there and on_device.stamp.epoch == unit.store.epoch

    def _require(self, unit: StreamedUnit, backward: bool) -> None:
        if backward:
            self._in_backward_from_here(unit)
            self._needs_unit(unit)
        elif self.phases.closed:
            raise _after_the_end(unit)
        if not unit.visits and unit.store.on_device.is_loaded and unit.store.stale():
            self.window.refill(unit)
        with self.counters.listener.waiting("weights", unit.name, "backward" if backward else "forward"):
            self.window.require(unit)
        if not unit.stand_ins.bound and unit.stand_ins.refresh():
            self.backward_pass.forget()  # other weights train than before
            if unit.stand_ins.may_be_kept:
                self.window.borrowed.add(unit)
        self.backward_pass.last = unit if backward else None

    def mark_stale(self, parameters: Iterable[Tensor], stepped: Collection[int] = ()) -> None:
        """Mark the units of these parameters stale: an optimizer's own code wrote them, but for those ``stepped``.

        Those are ids of parameters that the host thread steps: a wire copy converted after that is valid.
        """
        for unit in {self._by_parameter[id(p)] for p in parameters if id(p) in self._by_parameter}:
            unit.store.wrote(stepped)

    @property
    def managed(self) -> Collection[int]:
        """The ids of the parameters that are streamed."""
        return self._by_parameter.keys()

    def unit_of(self, parameter: Tensor) -> StreamedUnit | None:
        """Return the unit of a host parameter, or None if no unit of this engine has it."""
        return self._by_parameter.get(id(parameter))

    # ---- backward

    def gradients_ready(self, unit: StreamedUnit, node: Any, grads: Gradients) -> Gradients:
        """Send down a unit's gradients, which are complete in this backward; return those that autograd needs."""
        with quietly():
            self._in_backward_from_here(unit)
            step = self.step_owner.takes_units if self.backward_pass.completed(unit) else None
            if step is not None:
                unit.stand_ins.collect_writes()
            return self.gradient_return.receive(unit.store, node, grads, step, self.backward_pass.brought_by)

    def land(self) -> None:
        """Wait until all gradients under way are in ``.grad``, and a pending step is done.

        A step in backward may leave units to the optimizer's own code, and is not waited for with several ranks.
        """
        self.step_owner.finish()
        self.gradient_return.finish()
        self.team.show_gradients()

    def check_gradient(self, parameter: Tensor) -> None:
        """Raise ExactnessError if a backward reads a gradient that is not there yet (backward_pass.py, Rule 3)."""
        hooked = leaf()
        if hooked is parameter:  # a hook on the weight itself, which may read its own, wherever backward is
            return
        if self.backward_pass in self.access.gradients and in_backward() and parameter.requires_grad:
            unit = self._by_parameter[id(parameter)]
            returned = -1 if self.device.is_host else self.gradient_return.returned_in(parameter)
            self.backward_pass.check_gradient(unit, name_of(parameter), returned)
            if hooked is not None and not self.device.is_host and self.gradient_return.came_after(parameter, hooked):
                raise ExactnessError(
                    f"the gradient of {name_of(parameter)} was read in a hook on {name_of(hooked)}, before which it is "
                    "not there in a plain run; here backward went on meanwhile. Read it after backward, or register a "
                    f"hook on {name_of(parameter)} as well, which orders them"
                )
            if self.gradient_return.is_shared(parameter):
                raise ExactnessError(
                    f"the gradient of {name_of(parameter)} was read in a hook of backward, and is on its way to the "
                    "other ranks until all of backward is done: read it in a hook on the weight itself, or after "
                    "backward"
                )
        elif parameter.requires_grad and self.team.is_to_exchange and not in_backward():
            raise ExactnessError(
                f"the gradient of {name_of(parameter)} was read after backward and before it is exchanged with the "
                "other ranks, as in backward() of a LightningModule: read it in on_after_backward"
            )

    def gradient_given(self, parameter: Tensor) -> None:
        """Note that code may write a gradient through its ``.data`` between its arrival and a step in backward."""
        if id(parameter) not in self.gradient_return.taken or self.team.size > 1:  # sums may come yet
            return
        if self.phases.optimizing:  # the library's code for a step, and torch's
            return
        unit = self._by_parameter[id(parameter)]
        self.backward_pass.gives_gradient(unit)
        if self.step_owner.has_submitted(unit.store):
            with quietly():
                self.gradient_return.marks.note_given(parameter)

    def check_changed(self) -> None:
        """Report the units whose gradients other code changed since they arrived (backward_pass.py, Rule 1)."""
        for parameter in self.gradient_return.marks.changed():
            self._needs_unit(self._by_parameter[id(parameter)])

    def _needs_unit(self, unit: StreamedUnit) -> None:
        if self.backward_pass.needs_unit(unit):
            self.step_owner.check_revisit(unit.store)

    def _in_backward_from_here(self, unit: StreamedUnit) -> None:
        if self.backward_pass in self.access.gradients:
            if self.backward_pass.at_end() is not None:
                return
            self._interrupt_backward()
        if self.phases.closed:
            raise _after_the_end(unit)
        if self.window.borrowed:  # other units may share the bytes that code wrote
            self.window.collect_from_borrowed()
        self.backward_pass.begin(self._backward_done)
        self.team.backward_begins()
        self.gradient_return.taken.clear()
        self.gradient_return.marks.clear()
        self.step_owner.backward_begins(self.phases.in_scope)
        weight_reads.resume()

    def _backward_done(self) -> None:
        with quietly():
            self.backward_pass.last = None
            self.gradient_return.let_go()
            self.land()
            self.backward_pass.end()
            self.autocast_weights.backward_done()
            self.saved.offload.backward_done()
            self.counters.listener.idle()
            if self.step_owner.takes_units is None or self.team.size > 1:  # else a step checks before it steps the rest
                self.check_changed()
            self.phases.end_backward()
            self.team.backward_ends()
            self.counters.listener.step_may_begin()

    # ---- an optimizer's step (step_owner.py)

    def next_needed(self) -> list[HostCopy]:
        """List all units in the order in which the next forward needs them, as far as it is known."""
        resident = (unit.index for unit in self.units if unit.unit.resident)  # may hold what forward needs first
        order = dict.fromkeys([*resident, *self.window.order, *range(len(self.units))])
        return [self.units[index].store for index in order]

    def before_host_access(self, parameter: Tensor) -> None:
        """Wait for the unit's step and for copies of its bytes, and collect writes to its stand-ins.

        Called before its host bytes are accessed: a backward that failed leaves copies to the device under way.

        Raises ExactnessError if this backward stepped the unit.
        """
        unit = self._by_parameter[id(parameter)]
        if in_backward() and id(parameter) in self.gradient_return.taken:
            self._needs_unit(unit)
        unit.store.wait_step()
        if unit.store in self.access.fills:
            unit.store.on_device.settle()
        if self.in_visit(parameter):
            with quietly():
                unit.stand_ins.collect_in_visit()
        self.window.collect_writes((unit,))

    # ---- ends

    def reset(self) -> None:
        """End visits and a backward that an exception left open (Rule 5).

        Stand-ins leave the slots, and gradients under way are dropped; the entries and all memory stay.
        """
        self.let_autograd_end()
        if self.saved.in_force:
            self.saved.pop()
        self._open.clear()
        self.window.borrowed.clear()
        self._interrupt_backward()
        self.team.interrupt()
        for unit in self.units:
            unit.visits = 0
            unit.stand_ins.unbind()
        self.autocast_weights.interrupt()
        self.window.interrupt()

    def _interrupt_backward(self) -> None:
        """End a backward that an exception left open, if one did; the team ends its own as the next one begins."""
        self.backward_pass.interrupt()
        self.counters.listener.idle()
        self.gradient_return.drop()
        self.saved.offload.backward_done()
        self.autocast_weights.backward_done()

    def let_autograd_end(self) -> None:
        """Wait until autograd's thread of the device is done with a backward that failed, if one did."""
        if self.backward_pass in self.access.gradients and not in_backward() and not self.device.is_host:
            # A device that fails runs nothing more.
            with contextlib.suppress(RuntimeError), torch.inference_mode(False), torch.enable_grad():
                x = torch.zeros((), device=self.device.torch_device, requires_grad=True)
                torch.autograd.grad(x.clone(), x)  # waits in line behind it

    def close(self) -> None:
        """Make the parameters plain again, end all threads, and free the device bytes that nothing else refers to."""
        try:
            self.window.collect_writes()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self.reset()
            self.device.synchronize()
        finally:  # a failure on the device must not cost the host's weights
            self.phases.close()
            self.autocast_weights.close()
            self.step_owner.close()
            self.gradient_return.close()
            self.team.close()
            for unit in self.units:
                unit.store.release(kept=unit.stand_ins.in_use())
                self.gradient_return.widen(unit.store)  # once there is room: wire copies are gone
                unit.forget()


def _after_the_end(unit: StreamedUnit) -> UnsupportedError:
    return UnsupportedError(
        f"a graph that was made while {unit.name} was streamed is used after streaming ended, by close() or because "
        "the module's parameters changed: run its backward before that"
    )
