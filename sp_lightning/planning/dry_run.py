"""Run one training step without a device to get its trace: visits, bytes and work.

1. The step is real: forward, autograd's backward, recomputation and offloading run as they do while streaming, but on
   tensors without data (fake_tensors.py). What is on the device beside weights is counted (tally.py).
2. Units are arranged as at run time: one buffer each, behind a bridge that receives their gradients when all are
   complete (bridge.py, Rules 1 and 2). A gradient takes memory while autograd collects its unit's gradients, and again
   as part of the packed ones, until the next unit's are packed (gradients.py, Rule 3).
3. The step is a run's first one, in which all weights travel as they are: it takes the most memory. Which weights only
   autocast reads, and which therefore travel cast later, is found along the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.autocast_weights import LAYERS, NAME
from ..autograd.backward_pass import in_backward
from ..autograd.bridge import LEAF_PRIORITY, Gradients, HostDeviceBridge
from ..autograd.offload import Offload, OffloadedTensor
from ..autograd.recompute import Recompute, Written
from ..autograd.saved_tensors import tensors_in
from ..compat.dispatch import TorchDispatchMode, without_function_modes
from ..compat.graph import set_sequence_number
from ..compat.references import storage_uses_at
from ..compat.storages import storage_id
from ..core.sizing import UnitBytes
from ..core.telemetry import Counters
from ..memory.device import Device
from ..memory.layout import ALIGNMENT, Layout, aligned
from ..memory.partition import Unit, partition, slots
from ..options import Options
from .fake_tensors import FakeTensors
from .step_trace import BATCH, BUFFERS, GRADIENTS, OUTSIDE, WORKING, StepTrace, Visit
from .tally import MemoryTracker, storage_key

Runner = Callable[[nn.Module, Any], Any]


def dry_run(
    module: nn.Module,
    batch: Any,
    run: Runner,
    options: Options,
    tensors: FakeTensors | RealTensors,
    compute_dtype: torch.dtype | None = None,
) -> StepTrace:
    """Run one training step of a module on these tensors and return its trace; the module cannot be used afterwards.

    Args:
        module: Its parameters' values do not matter, and are lost.
        batch: The batch that ``run`` takes.
        run: Returns what the step returns: the loss, or an output that contains or leads to it.
        options: ``units``, ``activations``, ``wire_dtype`` and ``compile_units`` matter.
        tensors: The context in which the module was made, still entered.
        compute_dtype: With ``master_weights``: the type on the device of what is FP32 on the host.
    """
    step = _DryRun(module, options, compute_dtype)
    tensors.observe = step.tally.observe
    try:
        step.perform(batch, run)
    finally:
        tensors.observe = None
    return step.trace()


class _WatchedParameters(dict[str, Any]):
    """A module's parameters, which note each read of the weight from outside the module's own forward.

    Such a read, even of the weight's dtype alone, is a use without a cast.
    """

    def __init__(self, parameters: Mapping[str, Any], uses: list[torch.dtype | None]) -> None:
        super().__init__(parameters)
        self.by_forward = False
        self._uses = uses

    def __getitem__(self, name: str) -> Any:
        if name == NAME and not self.by_forward:
            self._uses.append(None)
        return super().__getitem__(name)


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


# ---- choreography


class _FakeDevice(Device):
    """The device as recomputation and offloading see it: idle streams, and tensors where the dry run has them."""

    def __init__(self, where: torch.device) -> None:
        super().__init__("cpu")
        self.torch_device = where

    def passing(self, nbytes: int) -> Tensor:
        """Allocate a host buffer."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)


class _FakeOffload(Offload):
    """Offloading that moves nothing; what it makes on the way down does not count as device memory."""

    def __init__(self, device: _FakeDevice, tally: MemoryTracker) -> None:
        super().__init__(device, Counters())
        self._tally = tally

    def pack(self, tensor: Tensor) -> Any:
        """Offload a tensor without keeping it on the device."""
        with without_function_modes(), self._tally.on_host():
            return super().pack(tensor.detach())

    def fetch(self, saved: OffloadedTensor) -> None:
        """Allocate memory for an offloaded tensor again."""
        with without_function_modes():
            super().fetch(saved)


class _FakeUnit:
    """A unit in the dry run: one buffer, and stand-ins over it."""

    def __init__(self, unit: Unit, device_dtype: Callable[[torch.dtype], torch.dtype], receive: Any) -> None:
        self.unit = unit
        self.index = unit.index
        self.params = [parameter for _, parameter in unit.params]
        described = [(name, p.detach().to(device_dtype(p.dtype))) for name, p in unit.params]
        self.layout = Layout.of(described)
        self.nbytes = max(self.layout.nbytes, ALIGNMENT)
        self.flat = torch.empty(self.nbytes, dtype=torch.uint8)
        storage = self.flat.untyped_storage()
        self._address = storage_id(storage)
        self.outputs = [Layout.view(storage, place) for place in self.layout.fields]
        with torch.no_grad():
            for output, (_, value) in zip(self.outputs, described, strict=True):
                output.copy_(value)
        if any(parameter.requires_grad for parameter in self.params):
            self.outputs = list(
                HostDeviceBridge.apply(self.outputs, lambda ctx, grads: receive(self, grads), *self.params)
            )
            node = next(output.grad_fn for output in self.outputs if output.grad_fn is not None)
            set_sequence_number(node, LEAF_PRIORITY)
        self.depth = 0
        self._aliases = 0  # tensors over the unit's bytes when its forward ended, those that autograd saved included

    def end_visit(self) -> None:
        """End a visit, and count the tensors over the unit's bytes."""
        if not self.depth:
            self._aliases = self._count_aliases()

    def is_used_by_backward(self) -> bool:
        """Whether backward, recorded by autograd, made more such tensors, which keep the unit on the device."""
        return not self.depth and 0 < self._aliases < self._count_aliases()

    def _count_aliases(self) -> int:
        return storage_uses_at([self._address])[0]

    def sizes(self) -> UnitBytes:
        """Return the unit's sizes as the runtime plans with them."""
        pairs = zip(self.layout.fields, self.params, strict=True)
        return UnitBytes(self.unit.name, self.nbytes, sum(place.nbytes for place, p in pairs if p.requires_grad))

    def wire(self, cast: dict[int, torch.dtype]) -> UnitBytes:
        """Return the unit's sizes when these parameters, by id, travel in these types."""
        fields = zip(self.layout.fields, self.params, strict=True)
        sized = [(aligned(p.numel() * cast.get(id(p), place.dtype).itemsize), p) for place, p in fields]
        nbytes = max(sum(nbytes for nbytes, _ in sized), ALIGNMENT)
        return UnitBytes(self.unit.name, nbytes, sum(nbytes for nbytes, p in sized if p.requires_grad))


class _DryRun:
    """The engine's choreography (engine.py, Rules 1 to 3), with nothing to move."""

    def __init__(self, module: nn.Module, options: Options, compute_dtype: torch.dtype | None) -> None:
        self.module = module
        self.options = options
        self.tally = MemoryTracker(self._use, self._term)
        self._open: list[_FakeUnit] = []
        self._last: _FakeUnit | None = None
        self._packed_nbytes = 0
        self._casts: dict[
            int, list[torch.dtype | None]
        ] = {}  # by weight that may be cast: the type at each use; None: no cast
        self._watches = options.wire_dtype == "auto" and compute_dtype is None and not options.compile_units

        def device_dtype(dtype: torch.dtype) -> torch.dtype:
            return compute_dtype if compute_dtype is not None and dtype is torch.float32 else dtype

        places = slots(module)
        self.units = [_FakeUnit(unit, device_dtype, self._receive) for unit in partition(module, options.units)]
        for unit in self.units:
            self.tally.weights[storage_id(unit.flat.untyped_storage())] = unit.index
            for parameter, output in zip(unit.params, unit.outputs, strict=True):
                for slot in places[parameter]:
                    slot.set(output)
        where = self.units[0].flat.untyped_storage().device
        device = _FakeDevice(where)
        self.offload = _FakeOffload(device, self.tally)
        offload_arguments = self.offload if options.activations == "recompute+offload" else None
        self.recompute = Recompute(device, Written(), offload_arguments)
        self._host = {id(out): p for unit in self.units for p, out in zip(unit.params, unit.outputs, strict=True)}
        self._wrap(places)

    def trace(self) -> StepTrace:
        """Return the trace of the step that was run."""
        cast = {key: uses[0] for key, uses in self._casts.items() if len(uses) == 1 and uses[0] is not None}
        converted = (p.numel() * cast[id(p)].itemsize for unit in self.units for p in unit.params if id(p) in cast)
        return StepTrace(
            units=tuple(unit.unit for unit in self.units),
            sizes=tuple(unit.sizes() for unit in self.units),
            wire=tuple(unit.wire(cast) for unit in self.units),
            cast_nbytes=sum(map(aligned, converted)),
            visits=tuple(self.tally.visits),
        )

    def perform(self, batch: Any, run: Runner) -> None:
        """Run the step."""
        for buffer in self.module.buffers():
            self.tally.add(buffer, BUFFERS)
        for tensor in tensors_in(batch):
            self.tally.add(tensor, BATCH)
        output = run(self.module, batch)
        self.offload.finish()
        losses, gradients = losses_in(output)
        torch.autograd.backward(losses, gradients)
        self.offload.backward_done()
        self._free_packed()

    # ---- visits

    def _wrap(self, places: Any) -> None:
        owner = {id(parameter): unit for unit in self.units for parameter in unit.params}
        roots = {module: unit for unit in self.units for _, module in unit.unit.modules}
        own: dict[int, list[_FakeUnit]] = {}
        for parameter, found in places.items():
            for slot in found:
                own.setdefault(id(slot.holder), []).append(owner[id(parameter)])
        for module in self.module.modules():
            root = roots.get(module)
            owners = list(dict.fromkeys(own.get(id(module._parameters), [])))
            self._watch(module, places)
            if root is not None:
                units = [root, *(unit for unit in owners if unit is not root)]
                module.forward = self._root(module, module.forward, units)
            elif owners:
                module.forward = self._part(module.forward, owners)

    def _watch(self, module: nn.Module, places: Any) -> None:
        """Find the weights that only their module's own forward uses (autocast_weights.py, Rules 1 to 3)."""
        weight = self._host.get(id(module._parameters.get(NAME)))
        if not self._watches or type(module) not in LAYERS or weight is None or "forward" in vars(module):
            return
        if weight.dtype is not torch.float32 or len(places[weight]) != 1:
            return
        uses = self._casts[id(weight)] = []
        forward = module.forward
        read = module._parameters = _WatchedParameters(module._parameters, uses)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not in_backward():
                casts = torch.is_autocast_enabled("cpu")
                uses.append(torch.get_autocast_dtype("cpu") if casts else None)
            read.by_forward = True
            try:
                return forward(*args, **kwargs)
            finally:
                read.by_forward = False

        module.forward = call

    def _part(self, forward: Callable[..., Any], units: list[_FakeUnit]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._open)
            for unit in units:
                if not unit.depth:
                    self._require(unit)
                    unit.depth += 1
                    self._open.append(unit)
            try:
                return forward(*args, **kwargs)
            finally:
                while len(self._open) > depth:
                    self._open.pop().depth -= 1
                for unit in units:
                    unit.end_visit()

        return call

    def _root(self, module: nn.Module, forward: Callable[..., Any], units: list[_FakeUnit]) -> Callable[..., Any]:
        visit = self._part(forward, units)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return visit(*args, **kwargs)
            saved: list[OffloadedTensor] = []
            before = self.offload.counters.bytes_offloaded
            if self.options.activations.startswith("recompute"):
                output, saved = self.recompute.run(visit, units[0].unit.name, None, module, args, kwargs)
            elif self.options.activations == "offload" and not self._open and not in_backward():
                output, saved = self._offloaded(visit, args, kwargs)
            else:
                output = visit(*args, **kwargs)
            self.tally.visits[-1].stowed_nbytes += self.offload.counters.bytes_offloaded - before
            self._announce(units[0], saved, output)
            return output

        return call

    def _offloaded(self, visit: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[OffloadedTensor]]:
        self.offload.begin()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                output = visit(*args, **kwargs)
        finally:
            saved = self.offload.end()
        return output, saved

    def _pack(self, tensor: Tensor) -> Any:
        return tensor.detach() if storage_key(tensor) in self.tally.weights else self.offload.pack(tensor)

    def _unpack(self, saved: Any) -> Tensor:
        return self.offload.unpack(saved) if isinstance(saved, OffloadedTensor) else saved

    def _announce(self, unit: _FakeUnit, saved: list[OffloadedTensor], output: Any) -> None:
        def before_backward(_grads: Any) -> None:
            self._require(unit)
            before = self.offload.counters.bytes_brought_back
            for tensor in saved:
                self.offload.fetch(tensor)
            self.tally.visits[-1].fetched_nbytes += self.offload.counters.bytes_brought_back - before

        for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
            node.register_prehook(before_backward)

    def _use(self, index: int) -> None:
        """Note that a unit's weight is read; outside its visits, the read is a visit."""
        unit = self.units[index]
        if not unit.depth:
            self._require(unit)

    def _require(self, unit: _FakeUnit) -> None:
        if not unit.unit.resident and unit is not self._last:
            self._last = unit
            referred_to = (other for other in self.units if in_backward() and other.is_used_by_backward())
            in_use = tuple({other.index for other in (*self._open, *referred_to) if not other.unit.resident})
            self.tally.begin(Visit(unit.index, in_use, in_backward()))

    def _term(self) -> str:
        if in_backward():
            return OUTSIDE if self._last is None else WORKING
        return WORKING if any(not unit.unit.resident for unit in self._open) else OUTSIDE

    # ---- gradients (Rule 2)

    def _receive(self, unit: _FakeUnit, grads: Gradients) -> Gradients:
        self._free_packed()
        for grad in grads:
            if grad is not None:
                self.tally.mark_gradient(grad)
        self._packed_nbytes = sum(aligned(grad.nbytes) for grad in grads if grad is not None)
        self.tally.change(GRADIENTS, self._packed_nbytes)
        self.tally.visits[-1].sends.append(unit.index)
        return (None,) * len(grads)

    def _free_packed(self) -> None:
        self.tally.change(GRADIENTS, -self._packed_nbytes)
        self._packed_nbytes = 0


def losses_in(output: Any) -> tuple[list[Tensor], list[Tensor]]:
    """List the tensors of a step's output to differentiate, its loss or all of them, and their initial gradients."""
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", output)
    found: Sequence[Tensor] = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
    losses = [tensor for tensor in found if tensor.requires_grad]
    return losses, [torch.ones_like(tensor) for tensor in losses]
