"""The handle of a streamed module: it cuts units, moves their weights to the host, and makes the module plain again."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from .compat.tensors import consists_of_tensors
from .compat.torch import graph_task, tree_map_only
from .errors import UnsupportedError
from .handles import KeepFiled, note_new, open_handles
from .host.device import Device
from .host.recorder import Recorder
from .host.room import Room
from .optim.figures import explaining, stats_of
from .options import Options, parse_with_waits
from .ranks.peers import Alone, Peers
from .store.store import Store
from .stream import parameters
from .stream.activations import Activations
from .stream.gradients import recover
from .stream.held import HeldUnit, ResidentUnit
from .stream.lazy import set_requires_grad
from .stream.leaf import Weight, has_form_of
from .stream.preparation import Cut, check_not_streamed, materialize, move_buffers, slots
from .stream.unit import Unit
from .stream.visits import Visit, Visits
from .stream.wholes import Sharded, Whole, WholeWeight, drawing_on_mesh
from .stream.window import Window

CHUNK = 1 << 18  # elements of a slice, which fit a core's cache


class Handle:
    """A module whose units stream between host and device."""

    garbage: Any = None  # the mark by which `close_dropped` finds a dropped handle
    closed = False  # whether the module is plain again
    before_new: Callable[[nn.Module], object] | None = None  # called before parameters that were added are streamed

    @torch.inference_mode(False)  # tensors that are made here may be trained later
    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str,
        options: Options,
        team: Alone | None = None,
        *,
        wire: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        """Move a module's weights into host memory, and run visits in place of its modules' calls.

        Args:
            module: The module.
            device: The device that computes.
            options: The user's options.
            team: The devices that compute together; by default this one alone.
            wire: The type to which autocast casts in this run, or in which the module computes with
                ``master_weights``; None: each weight travels in its own.
            chunk: Elements that the host steps at a time. A multiple of 64: fused kernels round a tail otherwise.
        """
        self.module, self.options = module, options
        self.team = team or Alone()
        self.device = Device(device, options.host_memory, self.team.slabs)
        with contextlib.ExitStack() as failed:
            failed.callback(self.team.close)
            check_not_streamed(module.named_parameters())
            self._cut = cut = Cut(module, options, self.device, wire)
            self.team.check_alike(
                [f"the shard {whole.name} ({whole.shard_name()})" for whole in cut.shards],
                "Ranks whose gradients are exchanged have the same shards: pass the group of the mesh's data axis, or"
                " tensor_parallel_size= to a strategy",
            )
            materialize(module)
            failed.pop_all()
        self.units: list[Unit] = []
        self.store = Store(options.host_budget, options.disk, self.device)
        makes_trips = options.optimizer_device == "device" and not self.device.is_host
        self.steps = self.team.steps(chunk, options.optimizer_overlap, self.device, self.store, makes_trips)
        self.steps.chose_residents = bool(cut.chosen)
        self.window = Window(self.device, Activations(options.activations, self.device))
        self._gradients: Any = None
        self._first_called: Visit | None = None  # the first visit since the last step began
        self.is_new = False  # whether modules or parameters were added anywhere
        self._process_wide = contextlib.ExitStack()  # what this handle has set in torch, and undoes at its end
        # The class of the unit of resident weights: the truth of FP32 masters is on the host.
        self._kind_of_rest: type[Unit] = HeldUnit if options.master_weights else ResidentUnit
        entries: dict[nn.Module, Unit] = {}  # by the modules that need the whole unit
        visit = functools.partial(Visit, window=self.window, outermost=self._outermost, compiles=options.compile_units)
        self.visits = Visits(module, entries, visit)
        try:
            self._make_units(entries)
            self._start_units(makes_trips)
            self._notice_changes()
            move_buffers(module, self.device.torch_device)
            self.team.share_buffers(module)
            self.visits.attach(self.units)
        except BaseException as error:
            self.close()
            if cut.chosen and isinstance(error, torch.OutOfMemoryError):
                raise cut.too_many_residents() from error
            raise
        cut.streamed = cut.kept = cut.chosen = []  # parameters that are replaced later may be freed
        open_handles.add(self)

    # ---- what doors call

    @contextlib.contextmanager
    def scope(self, kind: str) -> Iterator[None]:
        """Run one step of the module in this context, where errors that streaming causes say what to do.

        Inside of another step it does nothing.
        """
        if self.window.is_in_step:
            yield
            return
        self._begin_step(kind)
        self.window.is_in_step = True
        try:
            with self.explaining():
                yield
        finally:
            self.window.is_in_step = False

    def _begin_step(self, kind: str) -> None:
        """Tell the recorder, gradients, window and ranks that a step begins. Collective if buffers are due."""
        trains = torch.is_grad_enabled()
        if (listener := self.device.counters.listener) is not None:
            listener.begin_pass(trains)
        if not self.device.is_capturing():
            self._gradients.let_go()
        self.room.begin_step(trains)
        if trains or kind == "validate":  # a Trainer validates on all ranks at once
            self.team.begin_forward(self.module)

    def announce(self, optimizer: Optimizer) -> None:
        """Take over an optimizer's steps of streamed weights, and move their state to where each is stepped."""
        self.steps.adopt(optimizer)

    def loaded(self, optimizer: Optimizer) -> None:
        """Copy an optimizer's loaded state, since its file may vanish, and move it to where each weight is stepped."""
        self.steps.adopt(optimizer)
        state = optimizer.state
        for param in list(state):
            if parameters.unit_of(param) not in (None, *self.units):
                continue  # another handle steps it
            state[param] = tree_map_only(
                Tensor,
                lambda one: one if self.store.is_filed(one) else one.clone(),  # the scratch file has a copy already
                state[param],
            )
        self.steps.adopt(optimizer)
        self.steps.place_state(optimizer)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer, is_early: bool) -> Iterator[None]:
        """Run an optimizer's closure and step in this context.

        With ``is_early`` units are stepped while backward runs: the caller knows that no code reads or changes their
        gradients before the step.
        """
        self.steps.step_beside_backward(optimizer if is_early else None)
        try:
            with self.explaining():
                yield
        except BaseException as error:
            self.steps.note_exception(error)
            raise
        finally:
            self.steps.step_beside_backward(None)

    def explaining(self) -> AbstractContextManager[None]:
        """Return a context in which errors of the user's code that streaming causes say what to do."""
        return explaining(self.window, self.window.policy, self.device)

    def saving(self) -> None:
        """Raise HalfAppliedStepError if a step is half applied: weights and state may not be saved then."""
        self.steps.check_applied()

    def stats(self) -> dict[str, Any]:
        """Return figures of the run so far: counts since streaming began, sizes and memory. Nothing waits."""
        return stats_of(self.units, self.window, self.device, self.steps.pending)

    def record(self, recorder: Recorder | None = None) -> Recorder:
        """Start recording each step's copies, computation and waits, with their times; return the recorder."""
        self.device.counters.listener = recorder = recorder or Recorder(self.device)
        return recorder

    def stop_recording(self) -> None:
        """Stop recording, and read the last events. Waits for pending steps and the device."""
        self.finish_step()
        counters = self.device.counters
        recorder, counters.listener = counters.listener, None
        if recorder is not None:
            recorder.flush()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards leave gradients of this rank alone in `.grad`, as under DDP."""
        return self.team.no_sync()

    @property
    def uses_files(self) -> bool:
        """Whether weights or state are in files."""
        return not self.store.placement.is_in_memory

    @property
    def weights(self) -> list[Weight]:
        """All weights, in the order of the units."""
        return [weight for unit in self.units for weight in unit.weights]

    # ---- making

    def _make_units(self, entries: dict[nn.Module, Unit]) -> None:
        """Create a unit for each part that streams, and up to two for all weights that stay; list them by entry."""
        options, cut = self.options, self._cut
        plain_rest = [named for part in cut.kept for named in part.params if id(named[1]) not in part.parts]
        held = [named for part in cut.kept for named in part.params if id(named[1]) in part.parts]
        host_params = [part.params for part in cut.streamed] + [plain_rest] * options.master_weights
        window = 1 if options.window == "auto" else options.window
        self.device.slabs.expect(sum(param.nbytes for part in (*cut.streamed, *cut.kept) for _, param in part.params))
        self.store.choose(host_params, cut.travels_as, options.master_weights, window)
        for part in cut.streamed:
            unit = self._add_unit(Unit, part.name, part.params, part.wholes)
            entries |= {root: unit for _, root in part.modules}
        if plain_rest:
            self._add_unit(self._kind_of_rest, "(resident)", plain_rest)
        if held:
            wholes = [whole for part in cut.kept for whole in part.wholes]
            self._add_unit(HeldUnit, "(resident, quantised)", held, wholes)

    def _start_units(self, makes_trips: bool) -> None:
        """Set up window and gradient transfers, copy the first rank's weights to all, connect units. Collective."""
        options, numbers = self.options, [unit.numbers() for unit in self.units]
        sizes = options.window, options.transfer, options.memory_budget
        self.room = Room(*sizes, numbers, self.device, makes_trips)
        self.window.begin(self.units, self.room)
        kept_in = self.room if makes_trips else None
        self._gradients = self.team.gradients(self.device, self.steps, self.units, kept_in)
        self.team.check_alike(
            [f"{weight.description()} in {unit.name}" for unit in self.units for weight in unit.weights],
            "Make the same model on all of them, and load frozen weights from the same files before it is streamed",
        )
        self.team.share_units(self.units, self.device)
        for unit in self.units:
            self._connect(unit)
        if any(weight.is_shard for weight in self.weights):
            self._process_wide.enter_context(drawing_on_mesh())  # random numbers for shards

    def _notice_changes(self) -> None:
        """Register hooks for modules and parameters that are added, and for weights that are loaded."""
        note = functools.partial(note_new, weakref.ref(self))  # a weak reference, so that a dropped handle is garbage
        keep: Any = KeepFiled(self)
        for hook in (
            register_module_parameter_registration_hook(note),
            register_module_module_registration_hook(note),
            self.module.register_load_state_dict_pre_hook(keep),  # type: ignore[no-untyped-call]
        ):
            self._process_wide.callback(hook.remove)

    def _add_unit(
        self,
        kind: type[Unit],
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        wholes: Iterable[Whole] = (),
    ) -> Unit:
        """Create a unit of these parameters, add it to `units`, and register it with the steps."""
        index, in_a_group = len(self.units), type(self.team) is not Alone
        places = [self.store.place_of(index, param, self._cut.travels_as(param)) for _, param in params]
        weights = [self._cut.weight(*named, place, in_a_group) for named, place in zip(params, places, strict=True)]
        unit = kind(index, name, weights, self.device, self.window, self.store.filed(name, weights))
        unit.spill = self.store.gradients_of(index)
        parts = {id(weight.host): weight for weight in weights}
        for whole in (whole for whole in wholes if not isinstance(whole, Sharded)):
            own = [parts[id(tensor)] for _, tensor in whole.parts]
            unit.wholes.append(WholeWeight(whole, self._cut.slots[whole.parameter], own, self.device.torch_device))
        self.units.append(unit)
        self.steps.add_unit(unit)
        return unit

    def _connect(self, unit: Unit) -> None:
        """Register gradient hooks on a unit's leaves, and make readers of its weights wait for pending work."""
        for weight in unit.weights:
            if weight.is_part:
                continue
            if weight.leaf.is_floating_point() or weight.leaf.is_complex():
                trains = weight.host.requires_grad
                weight.host.requires_grad_(True)  # a leaf's requires_grad is the host parameter's
                set_requires_grad(weight.leaf, True)
                take: Any = functools.partial(self._gradients.take, weight)
                weight.hook = Tensor.register_post_accumulate_grad_hook(weight.leaf, take)  # type: ignore[no-untyped-call]
                set_requires_grad(weight.leaf, trains)
                weight.host.requires_grad_(trains)
            weight.collector = self._gradients
            parameters.watch(weight)
        parameters.wholes.update({id(whole.host): unit for whole in unit.wholes})
        if unit.is_held:
            unit.show()

    # ---- between steps

    def _outermost(self, called: Visit) -> AbstractContextManager[None]:
        """Stream parameters that were added since the last outermost call; return the context of this one.

        A call of the root is a step, unless it is in one. Where the user's loop calls parts of the module, a step
        begins with the first call after each optimizer step and, without gradients, with each call of the part that was
        called first.
        """
        is_again = called is self._first_called and not torch.is_grad_enabled()
        is_first = called.module is self.module or self.steps.has_stepped or is_again
        if is_first:
            self.steps.has_stepped, self._first_called = False, called
            self.visits.retake_slots()
        if self.is_new and not any(unit.bound for unit in self.units):  # some are in a call of another stream's root
            self._place_new()
            self.is_new = False
        return self.scope("forward") if is_first and graph_task() == -1 else contextlib.nullcontext()

    def _place_new(self) -> None:
        """Take in parameters that were added or replaced after streaming began; called before the next forward.

        A replacement of the same form is streamed; others stay on the device. Several ranks raise instead.
        """
        if self.before_new is not None:
            self.before_new(self.module)
        found = self._cut.slots = slots(self.module)
        known = {id(weight.host) for weight in self.weights}
        known |= {id(whole.host) for unit in self.units for whole in unit.wholes}
        gone = {weight.name: weight for weight in self.weights if weight.slots and weight.host not in found}
        named = []
        for name, param in self.module.named_parameters():
            if id(param) in known:
                continue
            self.team.check_new(name)
            check_not_streamed([(name, param)])
            parameters.let_go_of_weight(param)
            if name in gone and gone[name].place is None and has_form_of(gone[name], param):
                self.steps.bring_state_to_host(gone[name].host)
                parameters.replace(gone[name], param)
                continue
            if consists_of_tensors(param):
                raise UnsupportedError(
                    f"{name} is a {type(param).__name__}, which consists of several tensors, and came after streaming"
                    " began: quantise and load such weights before the module is streamed"
                )
            named.append((name, param))
        for weight in self.weights:
            weight.slots = found.get(weight.host, [])
        for unit in self.units:
            unit.note_slots()
        if named:
            self._connect(self._add_unit(self._kind_of_rest, "(added)", named))
        move_buffers(self.module, self.device.torch_device)
        self.visits.attach(self.units)

    def finish_step(self) -> None:
        """Wait for all pending optimizer steps."""
        for unit in self.units:
            unit.wait_step()

    # ---- the end

    def close(self) -> None:
        """End streaming, and leave a plain module on the host. Waits for pending work. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        open_handles.discard(self)
        with contextlib.ExitStack() as ends:  # all of them run, the last one first, even if one raises
            ends.callback(self.device.close)
            ends.callback(self.store.close)
            ends.callback(move_buffers, self.module, torch.device("cpu"))
            ends.callback(self.team.close)
            if self._gradients is not None:
                ends.callback(self._gradients.close)
            ends.callback(self.window.policy.ring.close)
            for weight in self.weights:
                ends.callback(parameters.release, weight)
            for unit in self.units:
                ends.callback(parameters.forget_wholes, unit)
                if unit.is_held:
                    ends.callback(unit.evict)
            ends.callback(self.stop_recording)
            ends.callback(self.window.close)
            ends.callback(self.steps.close)
            for unit in self.units:
                ends.callback(unit.wait_step)
            ends.callback(self.visits.close)
            ends.callback(self._process_wide.close)
            ends.callback(recover)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.team.fail(error)
        self.close()


def stream(module: nn.Module, device: torch.device | str, *, group: Any = None, **options: Any) -> Handle:
    """Stream a module's weights through a window on ``device``; train it in your own loop.

    Its parameters move into host memory, page-locked if the device supports that, and its buffers to the device.
    Forward and backward run on the device; gradients arrive in the parameters' ``.grad`` on the host, where any
    optimizer steps them. The handle is a context manager, too.

    Args:
        module: Any module. Its parameters stay the same objects.
        device: The device that computes, such as "cuda".
        group: A process group whose ranks, on one machine or several, train together with one device each, as under
            DDP. Every rank calls this with its own copy of the module; the first one's weights and buffers count. Each
            backward exchanges gradients, but for those in ``handle.no_sync()``; every rank steps the same optimizers.
        **options: As for ``SuperpipelineStrategy``: ``window``, ``transfer``, ``units``, ... With ``group``: also
            ``timeout``, for how long a rank waits for the others, and ``keepalive``, for how long one may give no sign
            before the others end. With ``master_weights`` FP32 weights are bfloat16 on the device; convert the
            module's buffers and inputs yourself.
    """
    parsed, waits = parse_with_waits(**options)
    devices = 1 if group is None else group.size()
    parsed.check_devices(devices)
    wire = torch.bfloat16 if parsed.master_weights else None
    return Handle(module, device, parsed, None if devices == 1 else Peers(group, **waits), wire=wire)
