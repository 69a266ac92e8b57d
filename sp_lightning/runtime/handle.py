"""``sp_lightning.stream``: attaches the engine to a module, without Lightning, and detaches it again."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ..autograd.phases import Phase
from ..autograd.recompute import host_of
from ..compat.dynamo import Unsupported, never_compiled
from ..compat.modules import is_compiled, tree_leaves, tree_map_only
from ..compat.tensors import attributes_in, consists_of_tensors, tensor_id, were_replaced, without_dispatch
from ..errors import DiskError, OptionError, PartitionError, PeerError, SuperpipelineError, UnsupportedError
from ..host.recorder import Recorder
from ..host.telemetry import Counters, Stats, StepListener
from ..host.unit_numbers import UnitNumbers, host_bytes
from ..memory.device import Device, DeviceMemoryError
from ..memory.watched_parameters import is_watched, unwatch
from ..memory.weights import device_dtype
from ..nodes.transport import KEEPALIVE
from ..optim import native
from ..optim.state_in_memory import StateInMemory
from ..options import Options
from ..ranks.alone import Alone
from ..ranks.board import ONE_RANK, OneRank, Ranks
from ..ranks.connection import broadcast_buffers, connect, leave_at_exit
from ..ranks.new_weights import share_of
from ..ranks.shared_memory import drop_own_pages
from ..steps import torn_step
from ..storage.in_memory import InMemory
from ..stream.partition import Unit, forward_of, partition, slots
from ..stream.preflight import Means, check_budget, check_device, finer_classes, sizes
from ..stream.preparation import check_moves, materialize, move_buffers, pack_weights
from ..stream.sharded import bring_to_host, check_supported, has_shards
from . import preflight
from .engine import Engine
from .entries import (
    CallEntry,
    ConversionEntry,
    CopyEntry,
    EncoderFastPathEntry,
    ForwardEntry,
    Generation,
    ModuleEntry,
    NoFlatten,
    RootEntry,
    ShardedEntry,
    ShardedUnitEntry,
    StepEntry,
    SubmoduleEntry,
    UnitEntry,
    has_method,
)
from .optimizer_steps import OptimizerSteps
from .same_path import SamePath

BETWEEN_DEVICES = re.compile(  # torch's messages about tensors on two devices
    r"(on|at|in) (the )?same device|expected device|two devices"
    r"|\(torch\.\w+\.\w+\) and \w+ type \(torch\.\w+\) should be the same"
)

_is_some = functools.partial(operator.is_not, None)
SUBSTITUTE = "a tensor that is no parameter"  # the mark of a slot where something else stands for a parameter

log = logging.getLogger(__name__)


class Handle:
    """A module whose weights live on the host and visit the device, unit by unit.

    Making it copies the weights into page-locked memory, one unit at a time, and puts an entry in front of the forward
    of each module that owns parameters. As a context manager, the handle is closed on leaving.
    """

    def __init__(
        self,
        module: nn.Module,
        device: Device | torch.device | str,
        options: Options,
        compute_dtype: torch.dtype | None = None,
        only_inference: bool = False,
        trains: bool = False,
        methods: Sequence[str] = (),
        ranks: OneRank = ONE_RANK,
        group: Any = None,
        own_gradients: bool = False,
        exchanges: bool = False,
        autocasts: bool = True,
        shards: bool = False,
        draws: bool = True,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        options.check_devices(ranks.size, ranks.world // ranks.size)
        if options.resident not in ("auto", 0):
            allowed = "'auto' or 0 with several devices or a disk"
            raise OptionError(argument="resident", found=options.resident, allowed=allowed)
        self.module = module
        self.device = Device(device, options.host_memory) if isinstance(device, str | torch.device) else device
        self.options = options
        self._trains = trains  # training certainly follows
        self._shards = shards  # whether DTensors may be streamed
        self._draws = draws  # whether what is on the meta device gets initial values
        self._timeout = timeout  # for ranks that have shards of the same layers
        self.path = SamePath((), self.device.torch_device, timeout)  # of a module without shards
        self._methods = methods  # of the module, besides forward: each is a step if it is called by itself
        self._only_inference = only_inference  # no training follows, so the window may fill the memory
        self._compute_dtype = compute_dtype  # on the device, of weights that are FP32 on the host; None: FP32
        self._counters = Counters()  # of all engines, one after the other
        state = StateInMemory()
        if options.optimizer_device == "device" and not self.device.is_host:
            from ..optim.device_step import StepsOnDevice  # a run that steps on the host needs nothing of it

            state = StepsOnDevice(self.device, options.host_memory)
        self.storage = InMemory(state)  # of weights and optimizer state
        if options.uses_files:
            found = options.disk or options.host_budget
            allowed = "None with several devices or compile_units"
            raise OptionError(argument="disk or host_budget", found=found, allowed=allowed)
        self.team = Alone(self.device)  # of several devices, each of which has a handle like this one
        if isinstance(ranks, Ranks):
            from ..ranks.team import Team  # on one device nothing needs it

            self.team = Team(ranks, self.device, own_gradients, options.divide_state)
        self.group = group  # in a loop by hand
        self._by_hand = group is not None
        self.exchanges = exchanges or self._by_hand  # not in `no_sync`
        self.has_buffers = next(module.buffers(), None) is not None  # at the beginning: else DDP broadcasts none later
        self._syncs_buffers = True  # whether the next forward broadcasts them, in a loop by hand
        self.closed = False
        self.report: Any = None  # on this run, if one was asked for: kept here, it goes with the handle
        self.garbage: Any = None  # finds out whether this handle is (`close_dropped`)
        self.before_change: Callable[[nn.Module], object] | None = None  # of which parameters the module has
        self.last_checkpoint: str | None = None  # that was written or read, as far as is known
        self._copies: list[nn.Module] = []  # that run this module's parts
        self._entries: list[ForwardEntry] = []
        self._fingerprint: ModuleFingerprint | None = None  # None: units are to be made
        self._attach()
        self.steps = OptimizerSteps(self.engine, self.storage)
        torn_step.notice_loads(module)

    # ---- units and figures

    @property
    def units(self) -> list[Unit]:
        """The units, in order; the resident rest, if there is one, comes last."""
        return list(self._units)

    @property
    def managed(self) -> list[str]:
        """The names of all streamed parameters, as ``named_parameters()`` has them."""
        return [name for streamed in self.engine.units for name in streamed.names]

    @property
    def grows(self) -> bool:
        """Whether the window grows until the first steps showed what is free."""
        return self.options.window == "auto"

    @property
    def uses_files(self) -> bool:
        """Whether weights or state may be in files."""
        return self.options.uses_files

    @property
    def rank(self) -> int:
        """The number of this process among those that stream the module, one for each device."""
        return self.team.rank

    @property
    def divides_state(self) -> bool:
        """Whether each of several machines has a share of the optimizers' state."""
        return self.team.sharing.divides_state

    def stats(self) -> Stats:
        """Return figures of the run so far: counts since streaming began, sizes and memory; `Stats` has each key.

        Nothing waits: call `finish_step` before reading the figures of a step.
        """
        engine, schedule = self.engine, self.engine.window.schedule
        slabs = [unit.store.slab.truth.numel() + unit.store.wire_nbytes for unit in engine.units]
        resident = [unit.store.on_device.layout.nbytes for unit in engine.units if unit.unit.resident]
        streamed = [unit.sizes() for unit in engine.units if not unit.unit.resident]
        largest = sorted((unit.up_nbytes for unit in streamed), reverse=True)[: schedule.window]
        gradients = 2 * max((unit.down_nbytes for unit in streamed), default=0)
        on_host = host_bytes(unit.host_bytes() for unit in engine.units)
        figures = {
            **self._counters.snapshot(),
            "pending_step": engine.step_owner.pending,
            "compiled_step": native.LIBRARY.variant,
            "window": schedule.window,
            "transfer": schedule.transfer,
            "units": len(streamed),
            "resident_root_bytes": sum(resident),
            "weight_bytes": sum(unit.store.on_device.nbytes for unit in engine.units),
            "resident_bytes": sum(resident) + schedule.resident_nbytes,
            "window_bytes": sum(resident) + sum(largest) + gradients,
            "device_peak": self.device.memory_peak(),
            "host_bytes": sum(slabs)
            + engine.gradient_return.host_nbytes
            + engine.saved.offload.host_nbytes
            + self.device.ring_nbytes
            + self.storage.ring_nbytes,
            "host_weight_bytes": on_host.weights + on_host.wire,
            "host_gradient_bytes": on_host.gradients,
        }
        return cast(Stats, figures)

    def chosen(self) -> dict[str, int]:
        """Return the sizes that "auto" arrived at, for `resume` in a later run; empty if none were chosen."""
        return self.engine.window.tuner.state()

    def resume(self, chosen: dict[str, int], why: str = "as in the run that is resumed") -> None:
        """Start from sizes that `chosen` returned, or from `Plan.chosen`, as far as they fit.

        Options that are not "auto" keep their values.
        """
        self.engine.window.resume(chosen, why)

    def record(self, recorder: Recorder | None = None) -> Recorder:
        """Record from now on what passes do and when (recorder.py).

        Recording costs some microseconds of host time for each visit of a unit, and no synchronisation.
        """
        self._counters.listener = recorder = recorder or Recorder(self.device)
        return recorder

    def stop_recording(self) -> None:
        """Stop recording and read what is left; wait for the device and for an optimizer step that still runs."""
        self.finish_step()
        listener, self._counters.listener = self._counters.listener, StepListener()
        if isinstance(listener, Recorder):
            listener.flush()

    def finish_step(self) -> None:
        """Wait for an optimizer step that still runs beside other work, and raise its error if it has failed.

        Reading a weight, a gradient or optimizer state waits by itself; call this before you read `stats` of a step.
        """
        self.engine.step_owner.finish()

    def runs_as(self, made: nn.Module) -> None:
        """Have calls of a shallow copy of the module, which runs the same parts, be steps as well."""
        self._copies.append(made)
        self._entries.append(RootEntry(made, self))

    # ---- passes

    @property
    def in_step(self) -> bool:
        """Whether a step or a backward is running."""
        return self.engine.phases.in_step

    @never_compiled
    def open_scope(self, kind: Any) -> None:
        """Begin a step of the module. Everything between its end and the next step counts as user code."""
        self._follow_changes()
        if self._by_hand and torch.is_grad_enabled() and not self.engine.phases.in_step:
            if self._syncs_buffers and self.has_buffers:  # not in an evaluation, which one rank may run alone
                self.broadcast_buffers()
            self._syncs_buffers = self.exchanges
        self.engine.open_scope(kind)

    @never_compiled
    def _follow_changes(self) -> None:
        """Make the units anew if the module's parameters changed since the last step, or which code its modules run.

        Entries find another class by themselves; but what was learned of the old one does not hold for it. While a
        graph may wait for its backward, that does no harm: at worst an error says that this step was unlike others.
        """
        if self.engine.phases.in_step:
            return
        known, between_steps = self._fingerprint, self.engine.phases.current is Phase.BETWEEN_STEPS
        replaced = self.engine.any_replaced
        changed = (
            known is None
            or (self.storage.frozen and self.storage.is_outgrown(lambda: self.engine.any_awaited))
            or known.has_changed(replaced)
            or (replaced and self.engine.any_reshaped)
        )
        if changed or (known is not None and between_steps and known.runs_other_code()):
            log.info("superpipeline: the module's parameters or classes changed; its units are made anew")
            if self.before_change is not None:
                self.before_change(self.module)
            if known is not None:
                self.team.settle()  # else what another rank than the first wrote would be lost
            self._fingerprint = None
            self._detach()
            try:
                self._attach(None if changed else self._units, again=True)
            except BaseException:
                root = RootEntry(self.module, self)  # the next forward tries again, and is never plain
                self._entries = [root, CallEntry(root), *(RootEntry(made, self) for made in self._copies)]
                raise
            self.steps.follow(self.engine)

    @never_compiled
    def close_scope(self) -> None:
        """End a step of the module."""
        self.engine.close_scope()
        if not self.engine.phases.in_step and any(True for _ in self.engine.window.referenced_elsewhere()):
            self._register_hosts()

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Have weights read as in a step between the forwards that the model's ``generate`` calls in this context."""
        if self.closed:  # since it yielded
            yield
            return
        self._follow_changes()
        with self.engine.phases.generating(), self.explaining():
            yield

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn errors of the user's code in this context into errors that say what to do.

        These are errors about device memory, about tensors on two devices, about compiled graphs that break, and about
        a disk.
        """
        try:
            with self.team.tearing():  # an error of the optimizer's own code
                yield
        except DiskError as error:
            raise error.going_on_from(self.last_checkpoint) from error.__cause__
        except SuperpipelineError:
            raise
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(f"{error}\n{self._out_of_memory_report().message()}") from error
        except Unsupported as error:
            raise UnsupportedError(
                f"{error}\nA compiled graph ends where a unit is entered, and another begins: leave out fullgraph=True "
                "where you compile code that calls units, or set compile_units=True to compile units from "
                "inside. If the plain run raises this as well, its graph breaks elsewhere"
            ) from error
        except RuntimeError as error:
            if BETWEEN_DEVICES.search(str(error)) is None:
                raise
            raise UnsupportedError(
                f"{error}\nA weight or gradient on the host met a tensor on {self.device.torch_device}. Only the "
                "weights of the unit whose forward is running, and those that a torch function reads inside a step, "
                "are on the device; gradients are on the host. Common causes: (1) a copy of a unit, or an "
                "autograd.Function whose apply was bound before streaming began: call it inside the forward of the "
                "module that owns the weight; (2) p.data or p.detach(): write to p itself, under "
                "torch.no_grad(); (3) arithmetic on p.grad inside a step: do it in optimizer.step(closure), with "
                "numbers from the device as number.item(); (4) a mask or a buffer that was made like a weight between "
                "steps (torch.ones_like(p)), when weights are on the host: move it to the device. If the plain run "
                "raises this as well, a tensor was created without device="
            ) from error

    def _out_of_memory_report(self) -> preflight.OutOfMemoryReport:
        window = self.engine.window
        report = preflight.OutOfMemoryReport(
            where=str(self.device.torch_device),
            capacity=self.device.memory_capacity(),
            allocated=self.device.memory_allocated(),
            window=window.schedule.window,
            window_nbytes=window.schedule.resident_nbytes,
            largest_unit=max(
                (unit.store.on_device.nbytes for unit in self.engine.units if not unit.unit.resident), default=0
            ),
            activations=self.options.activations,
            finer=finer_classes(self.units),
        )
        window.ran_out()
        return report

    # ---- several devices

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backwards in this context to their rank, to accumulate.

        The next backward outside exchanges what was accumulated. DDP's ``no_sync`` is for forwards: one around both
        does the same here and there.
        """
        before, self.exchanges = self.exchanges, False
        try:
            yield
        finally:
            self.exchanges = before

    @property
    def exchanges(self) -> bool:
        """Whether each backward exchanges gradients with the other ranks."""
        return self.team.exchanges

    @exchanges.setter
    def exchanges(self, exchanges: bool) -> None:
        self.team.exchanges = exchanges

    def settle(self) -> None:
        """Make true for all ranks what users wrote to weights on each. Every rank comes here."""
        self.team.settle()

    def state_loaded(self, optimizer: Optimizer, prepare: Callable[[torch.Tensor], object] | None = None) -> None:
        """Move an optimizer's state that was loaded to where it lies: to the disk, or into what the ranks share.

        Every rank loaded it, and `settle` follows. ``prepare`` is called with each of the module's parameters before
        its state is moved: what it makes of the state need not be in memory for all at once.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    if prepare is not None and id(parameter) in self.engine.managed:
                        prepare(parameter)
                    self.storage.state.adopt_one(optimizer, parameter)
        self.team.adopt_state(optimizer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's ``state_dict()`` for a checkpoint. Every rank has to call this.

        With ``divide_state`` on several machines the first rank's has the whole state; those of others cannot be read.
        """
        return self.team.whole_state(optimizer)

    def broadcast_buffers(self) -> None:
        """Give all ranks the first one's buffers. Every rank comes here."""
        broadcast_buffers(self.module, self.team.ranks, self.group, self.device.torch_device)

    # ---- ends

    def close(self) -> None:
        """Make the module plain again, on the host, with its trained weights. Safe twice."""
        if self.closed:
            return
        self.closed = True
        try:
            try:
                self.stop_recording()
            finally:
                self._detach()
        except DiskError as error:
            raise error.going_on_from(self.last_checkpoint) from error.__cause__
        finally:
            for entry in self._entries:
                entry.retire()
            self.steps.close()
            self.storage.close()
            if self._by_hand:
                self.team.leave()
            move_buffers(self.module, torch.device("cpu"))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.path.fail(isinstance(error, PeerError))
            if self._by_hand:
                self.team.fail(error)
        self.close()

    # ---- details

    @torch.inference_mode(False)  # what is made here may be trained later
    def _attach(self, units: list[Unit] | None = None, again: bool = False) -> None:
        """Begin to stream, or begin again; ``units``: the module's, if they are known."""
        bring_to_host(self.module)
        pack_weights(self.module)
        if not self.device.is_host:
            check_moves(self.module)
        units = partition(self.module, self.options.units) if units is None else units
        device = self.device.torch_device
        kind = device if self.device.is_real else None
        meshes = check_supported(units, kind, self.team.size > 1, self._refused_with_shards())
        self.team.check_alike(units)
        self.storage.choose(units, self.team)
        self._check_memory(units)
        if self._draws:
            materialize(self.module, None if self.team.gives_weights else drop_own_pages)
        else:
            check_values(self.module)
        for name, parameter in self.module.named_parameters():
            if is_watched(parameter):
                raise UnsupportedError(
                    f"{name} is streamed already, and only one handle or Trainer can stream it at a time: close() the "
                    "other handle, or let the other fit() end first"
                )
        self._entries = []
        self._units = units
        try:
            move_buffers(self.module, device)
            self.path = SamePath(meshes, device, self._timeout)
            self._slots = slots(self.module)
            self.storage.open()
            self.engine = Engine(
                units,
                self._slots,
                self.device,
                self.team,
                self.options,
                self._counters,
                self._compute_dtype,
                self.storage,
                again=again,
            )
            self.engine.window.only_inference = self._only_inference
            self._entries.extend(self._module_entries())
            self._entries.extend(SubmoduleEntry(part, self, name) for name, part in self._modules_above_units())
            root = RootEntry(self.module, self)
            self._entries.append(root)
            self._entries.append(CallEntry(root))
            self._entries.extend(RootEntry(made, self) for made in self._copies)
            self._entries.extend(
                Generation(part, self) for part in self.module.modules() if has_method(part, Generation.method)
            )
            self._entries.extend(
                StepEntry(self.module, self, name) for name in self._methods if has_method(self.module, name)
            )
            self._entries.extend(map(CopyEntry, dict.fromkeys(entry.module for entry in self._entries)))
        except BaseException:
            self._abandon(again)
            raise
        self.engine.phases.start()
        self._fingerprint = ModuleFingerprint(self.module, self._entries)

    def _refused_with_shards(self) -> dict[str, bool]:
        """Return what DTensors are not streamed with, and whether it is so here."""
        options, ranks = self.options, self.team.ranks
        return {
            "a Trainer or Fabric without tensor_parallel_size=, or sp_lightning.hf": not self._shards,
            "a group on several machines": ranks.world > ranks.size,
            "disk= or host_budget=": options.uses_files,
            "optimizer_device='device'": options.optimizer_device == "device",
            "master_weights=True": self._compute_dtype is not None,
            "compile_units=True": options.compile_units,
        }

    def _check_memory(self, units: list[Unit]) -> None:
        """Check the memory of device, budget and host before anything is allocated."""
        dtypes = functools.partial(device_dtype, self._compute_dtype)

        def travels_as(parameter: nn.Parameter) -> torch.dtype:
            return dtypes(parameter.dtype)

        def finer() -> tuple[list[str], list[UnitNumbers]]:
            classes = finer_classes(units)
            with contextlib.suppress(PartitionError):
                return classes, sizes(partition(self.module, classes), travels_as, self._trains)
            return [], []

        floats = {p.dtype for unit in units for _, p in unit.params}
        can_halve = self._trains and self._compute_dtype is None and floats == {torch.float32}
        means = Means(can_halve=can_halve, finer=finer)
        if not self.device.is_host:
            window = 1 if self.options.window == "auto" else self.options.window
            of_device = sizes(units, travels_as, self._trains)
            check_device(of_device, window, self.device.memory()[0], str(self.device.torch_device), means)
        check_budget(self.options, sizes(units, travels_as, True), self.device.is_host, means)
        if self._trains or self.team.size > 1:
            preflight.check_host(units, dtypes, self.storage, self.team, self._trains)

    def _register_hosts(self) -> None:
        """Put host parameters where model code registered stand-ins, as by ``self.again = self.linear.weight``."""
        for child in self.module.modules():
            for name, parameter in child._parameters.items():
                if (host := host_of(parameter)) is not parameter:
                    child._parameters[name] = host

    def _detach(self) -> None:
        try:
            self.finish_step()
        finally:
            self._stop_streaming()

    def _stop_streaming(self) -> None:
        self.path.close()
        try:
            try:
                self.engine.reset()  # puts hidden entries back, so that they can be removed
            finally:
                self._remove_entries()
                self._register_hosts()
                self.engine.close()
        finally:
            self.storage.close_weights()
            self.device.close()

    def _abandon(self, goes_on: bool) -> None:
        """Undo an attach that failed midway; there may be no engine to close. The next forward may try again."""
        self.path.close()
        self._remove_entries()
        for parameter in (*self.module.parameters(), *(p for unit in self._units for _, p in unit.params)):
            unwatch(parameter)
        for whole in (whole for unit in self._units for whole in unit.wholes):
            whole.end()
        (self.storage.close_weights if goes_on else self.storage.close)()
        self.device.close()
        move_buffers(self.module, torch.device("cpu"))

    def _remove_entries(self) -> None:
        for entry in reversed(self._entries):
            entry.remove()

    def _modules_above_units(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield, by name, the submodules above units: neither the managed module nor inside of a unit.

        A unit's root is above units too if it shares submodules with others: its forward enters their units.
        """
        roots = {module for unit in self._units for _, module in unit.modules}
        for name, module in self.module.named_modules():
            if name and not roots.isdisjoint(part for part in module.modules() if part is not module):
                yield name, module

    def _module_entries(self) -> Iterator[ForwardEntry]:
        """Make the entries of units' roots, of other modules that own parameters, and of torch's encoders and RNNs."""
        if is_compiled(self.module):  # then no weight travels in autocast's type
            self.engine.autocast_weights.stop()
        roots = {module: streamed for streamed in self.engine.units for _, module in streamed.unit.modules}
        for name, module in self.module.named_modules():
            own = list(dict.fromkeys(self.engine.unit_of(p) for p in module._parameters.values() if p is not None))
            owners = [streamed for streamed in own if streamed is not None]
            root = roots.get(module)
            if owners:
                yield ConversionEntry(module, self.engine.device)
            if isinstance(module, nn.RNNBase):
                yield NoFlatten(module)
            if root is not None:
                units = [root, *(owner for owner in owners if owner is not root)]
                entry = self._entry(UnitEntry, ShardedUnitEntry, has_shards(module, True), module, units, name)
                self.engine.autocast_weights.guard(entry, entry.units, hides_entry=False)
                yield entry
            elif owners:
                part = self._entry(ModuleEntry, ShardedEntry, has_shards(module, False), module, owners, name)
                if len(owners) == 1:
                    owners[0].stand_ins.hidden.append(part)
                    self.engine.autocast_weights.guard(part, owners, hides_entry=True)
                yield part
            elif isinstance(module, nn.TransformerEncoder):
                yield EncoderFastPathEntry(module)

    def _entry(self, plain: Any, sharded: Any, is_sharded: bool, module: nn.Module, units: list[Any], name: str) -> Any:
        """Make an entry that visits these units."""
        if is_sharded:
            return sharded(module, self.engine, units, name or type(module).__name__, self.path)
        return plain(module, self.engine, units)


def stream(
    module: nn.Module,
    device: torch.device | str,
    *,
    group: Any = None,
    timeout: timedelta = default_pg_timeout,
    keepalive: timedelta = KEEPALIVE,
    **options: Any,
) -> Handle:
    """Stream a module's weights through a window on ``device``; train it in your own loop.

    Its parameters move into host memory, page-locked if the device supports that, and its buffers to the device.
    Forward and backward run on the device; gradients arrive in the parameters' ``.grad`` on the host, where any
    optimizer steps them.

    Args:
        module: Any module. Its parameters stay the same objects.
        device: The device that computes, such as "cuda".
        group: A process group whose ranks, on one machine or several, train together with one device each, as under
            DDP. Every rank calls this with its own copy of the module; the first one's weights and buffers count. Each
            backward exchanges gradients, but for those in ``handle.no_sync()``; every rank steps the same optimizers.
        timeout: How long a rank of the group waits for the others.
        keepalive: For how long nothing comes of a machine of the group that counts as lost.
        **options: As for ``SuperpipelineStrategy``: ``window``, ``transfer``, ``units``, ... With ``master_weights``
            FP32 weights are bfloat16 on the device; convert the module's buffers and inputs yourself.
    """
    parsed = Options.parse(**options)
    ranks = (
        ONE_RANK if group is None else connect(group, torch.device(device), timeout, nodes=None, keepalive=keepalive)
    )
    compute_dtype = torch.bfloat16 if parsed.master_weights else None
    try:
        beside = group if ranks.world > 1 else None
        handle = Handle(module, device, parsed, compute_dtype, ranks=ranks, group=beside, shards=True, timeout=timeout)
    except BaseException as error:
        ranks.fail(isinstance(error, PeerError))
        ranks.close()
        raise
    handle.steps.by_hand = True
    leave_at_exit(handle, ranks)
    return handle


# ---- handles of modules that other code may drop


# ---- the module that is streamed: whether it changed, where its buffers are, whether it has memory


class ModuleFingerprint:
    """The parameters and forwards that a module has when the fingerprint is made, and its modules' classes."""

    def __init__(self, module: nn.Module, entries: Sequence[ForwardEntry]) -> None:
        self._module = module
        self._structure = _structure(module)
        self._identities = _identities(module)
        self._forwards = {type(child): forward_of(type(child)) for child in module.modules()}
        self._with_entries = [entry.module for entry in entries]
        self._classes = list(map(type, self._with_entries))
        wholes = [parameter for parameter in module.parameters() if consists_of_tensors(parameter)]
        self._wholes = [*map(attributes_in, wholes)]  # which tensors each consists of, and how

    def has_changed(self, any_replaced: bool) -> bool:
        """Return whether parameters were replaced, swapped, added, removed or retyped.

        Tensors that ``functional_call`` puts in their places for a call do not count.
        ``any_replaced`` says that the data of some parameter was replaced.
        """
        if self._wholes and any(map(were_replaced, self._wholes)):
            return True
        if not any_replaced and self._identities == _identities(self._module):
            return False
        structure, now = self._structure, _structure(self._module)
        return len(structure) != len(now) or any(
            b != n and n is not SUBSTITUTE for b, n in zip(structure, now, strict=True)
        )

    def runs_other_code(self) -> bool:
        """Return whether a module was given another class, or a class another forward.

        While ``functional_call`` has tensors in the places of parameters it waits: units cannot be made then.
        """
        forwards = any(forward_of(kind) is not forward for kind, forward in self._forwards.items())
        if not forwards and list(map(type, self._with_entries)) == self._classes:
            return False
        return SUBSTITUTE not in _structure(self._module)


def _identities(module: nn.Module) -> list[Any]:
    """List which parameters are registered where: a quick check, since they are nearly always the same."""
    found: list[Any] = []
    children: list[nn.Module | None] = [module]
    with without_dispatch():
        for child in children:  # the list grows during the loop
            if child is not None:
                own = child.__dict__
                if own["_parameters"]:
                    found += own["_parameters"]
                    found += map(id, own["_parameters"].values())
                    found += map(tensor_id, filter(_is_some, own["_parameters"].values()))
                children += own["_modules"].values()
    return found


def _structure(module: nn.Module) -> list[Any]:
    """Describe all registered parameters, to tell whether the table of slots is still right."""

    def described(name: str, p: Any) -> Any:
        if p is None:
            return name
        if not isinstance(p, nn.Parameter):
            return SUBSTITUTE
        return name, id(p), tensor_id(p), type(p), p.dtype  # of these `swap_tensors` exchanges the third

    with without_dispatch():
        return [described(name, p) for child in module.modules() for name, p in child._parameters.items()]


def own_state(optimizer: Optimizer, handles: Iterable[Handle]) -> None:
    """Copy an optimizer's state that was loaded, and move it to where it lies: the file that it is in may vanish.

    That is done for one parameter after another: what goes to a disk need not fit in memory. Of several ranks each
    moves what it owns, and copies the rest: no host has to have the whole once for each. The state of a parameter that
    is not streamed stays where the optimizer has put it, on the parameter's device.
    """
    leaves = (value for state in optimizer.state.values() for value in tree_leaves(state))
    tensors = (value for value in leaves if isinstance(value, torch.Tensor))
    loaded = {id(value): value for value in tensors if share_of(value) is None}  # others were not loaded
    handles = list(handles)
    streamed = set().union(*(handle.engine.managed for handle in handles))

    def own(parameter: torch.Tensor) -> None:
        def copied(state: torch.Tensor) -> torch.Tensor:
            device = "cpu" if id(parameter) in streamed else state.device
            return state.to(device, copy=True) if id(state) in loaded else state

        optimizer.state[parameter] = tree_map_only(torch.Tensor, copied, optimizer.state[parameter])

    for handle in handles:
        handle.state_loaded(optimizer, own if handle.team.size == 1 else None)
    for parameter in list(optimizer.state):
        own(parameter)


def check_values(module: nn.Module) -> None:
    """Raise an error for a parameter or buffer on the meta device, which a plain run cannot move either."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device, so it has no values, and none are made up for it: load it with "
                "load_state_dict(..., assign=True), since without assign=True nothing is loaded into it, or make the "
                "model outside of init_empty_weights(), without low_cpu_mem_usage=True"
            )
