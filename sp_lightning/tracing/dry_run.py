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
5. Answers are no step: nothing is differentiated. Three passes over the weights stand for them: one reads the prompts,
   with the images that belong to them, one makes the token in the middle of each answer, and one the last. Layers of a
   cache on the host wait there as with examples/common/host_cache.py: the one before is on its way down, and the next
   one on its way up. For the simulation a layer comes up before its visit.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.autocast_weights import castable
from ..autograd.backward_pass import in_backward
from ..autograd.gradient_nodes import Gradients
from ..autograd.saved_tensors import tensors_in
from ..autograd.stand_ins import StreamedUnit
from ..compat.tensors import TorchDispatchMode, dispatch_mode_count, function_mode_count
from ..core.telemetry import Lane, StepListener
from ..core.unit_numbers import aligned
from ..errors import OptionError
from ..gradients.way_down import GradientReturn
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..optim.pending_step import PendingStep
from ..options import Options
from ..runtime.engine import Engine
from ..runtime.handle import Handle
from .fake_tensors import FakeTensors
from .memory_tracker import MemoryTracker
from .step_trace import BATCH, BUFFERS, CACHE, GRADIENTS, OUTSIDE, WORKING, StepTrace, Visit

Runner = Callable[[nn.Module, Any], Any]
OF_TEXT = "input_ids", "attention_mask", "position_ids", "past_key_values", "labels"  # the rest goes with prompts alone
KEEPS_MORE = "update_conv_state", "update_indexer"  # of a cache's layers that cannot wait on the host


@dataclass(frozen=True)
class Answers:
    """Tokens that a language model generates for each prompt of a batch (Rule 5)."""

    tokens: int
    cache: str  # where keys and values of layers that are not in use wait: "device" or "host"


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
    tracker, device = recorder.tracker, _CountingDevice(recorder.tracker)
    for tensor in module.buffers():
        tracker.add(tensor, BUFFERS)
    for tensor in tensors_in(batch):
        tracker.add(tensor, BATCH)
    tensors.observe = tracker.observe
    try:
        with tracker.on_host():
            handle = Handle(module, device, _with_all_units(options), compute_dtype)
        with handle:
            engine = handle.engine
            engine.window.halves = False  # Rule 2
            engine.gradient_return = _CountedGradients(device, engine.counters)
            recorder.listen_to(engine)
            sizes = tuple(unit.sizes() for unit in engine.units)
            if isinstance(run, Answers):
                _answer(handle, batch, run, tracker)
            else:
                _perform(handle, batch, run)
                handle.open_scope("train")  # Rule 4
            stores = [unit.store for unit in engine.units]
            wires = [
                [(aligned(store.on_device.layout.fields[index].nbytes), store.params[index]) for index in store.narrow]
                for store in stores
            ]
            return StepTrace(
                units=tuple(handle.units),
                sizes=sizes,
                wire=tuple(unit.sizes() for unit in engine.units),
                wire_nbytes=tuple(sum(nbytes for nbytes, _ in unit) for unit in wires),
                frozen_wire_nbytes=tuple(sum(nbytes for nbytes, p in unit if not p.requires_grad) for unit in wires),
                castable=frozenset(castable(module)),
                uncast=frozenset(id(w.parameter) for store in stores for w in store.weights if w.wire is None),
                visits=tuple(tracker.visits),
                passes=tuple(tracker.passes),
            )
    finally:
        tensors.observe = None


def _with_all_units(options: Options) -> Options:
    """Return the options of a run whose window takes all units (Rule 2), and whose units are not compiled."""
    wire_dtype = "as-is" if options.compile_units else options.wire_dtype
    whole = replace(options, window=sys.maxsize, transfer=1, memory_budget=None, host_budget=None, disk=None)
    return replace(whole, wire_dtype=wire_dtype, compile_units=False)


def _perform(handle: Handle, batch: Any, run: Runner) -> None:
    """Run the step; nothing of its graph is left afterwards."""
    handle.open_scope("train")
    output = run(handle.module, batch)
    handle.close_scope()
    losses, gradients = losses_in(output)
    torch.autograd.backward(losses, gradients)


def generating(module: nn.Module) -> Any:
    """Return the decoder of transformers in a module that continues texts; None if there is none."""
    child: Any
    for child in module.modules():
        generates = getattr(child, "can_generate", None)
        if generates is not None and generates() and not child.config.is_encoder_decoder:
            return child
    return None


def _answer(handle: Handle, batch: Any, answers: Answers, tracker: MemoryTracker) -> None:
    """Run the passes of an answer (Rule 5)."""
    from transformers import DynamicCache

    model, prompts = generating(handle.module), batch["input_ids"] if hasattr(batch, "keys") else batch
    plain = DynamicCache(config=model.config)
    if answers.cache == "host" and any(hasattr(layer, name) for layer in plain.layers for name in KEEPS_MORE):
        raise OptionError(argument="cache", found="host", allowed="'device': the layers keep more than keys and values")
    cache = _CountedCache(plain, tracker, answers.cache == "host")
    given = {"past_key_values": cache.plain, "use_cache": True}
    taken = inspect.signature(model.forward).parameters
    if "logits_to_keep" in taken:
        given["logits_to_keep"] = 1
    given_beside = {} if batch is prompts else {name: batch[name] for name in taken if name in batch}
    beside = {name: value for name, value in given_beside.items() if name not in OF_TEXT}
    middle, one = answers.tokens // 2, prompts[:, :1]
    alone: dict[str, Any] = {}
    passes = (prompts, 0, beside), (one, middle - 1, alone), (one, answers.tokens - middle - 1, alone)
    handle.open_scope("predict")
    with torch.no_grad():
        for tokens, between, more in passes:
            cache.lengthen(between)
            tracker.passes.append(len(tracker.visits))
            model(tokens, **given, **more)
    handle.close_scope()


class _CountedCache:
    """A cache whose tensors are counted, on the device or, but for three layers, on the host (Rule 5)."""

    NAMES = ("keys", "values")

    def __init__(self, plain: Any, tracker: MemoryTracker, on_host: bool) -> None:
        self.plain = plain
        self._tracker = tracker
        self._on_host = on_host
        self._update, plain.update = plain.update, self._counted_update
        self._away: set[int] = set()  # layers on the host
        self._leaving: list[Tensor] = []  # tensors on their way down, which take memory until the next update
        self._last: int | None = None

    def lengthen(self, count: int) -> None:
        """Append this many tokens to all layers, on the device or on the host."""
        for index, layer in enumerate(self.plain.layers):
            tensors = self._tensors(index)
            if tensors and count > 0:
                with self._tracker.on_host():
                    layer.update(*(each.new_empty(*each.shape[:2], count, each.shape[3]) for each in tensors))
                self._place(index, index in self._away)

    def _counted_update(self, keys: Tensor, values: Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
        visit = self._tracker.visits[-1]
        self._leaving.clear()
        if self._on_host:
            if self._last not in (None, index):
                self._leaving = self._place(self._last, True)
            visit.fetched_nbytes += self._nbytes(index)
            self._fetch(index)
        result = self._update(keys, values, index, *args, **kwargs)
        for tensor in self._tensors(index):
            self._tracker.mark(tensor, CACHE)
        if self._on_host:
            visit.stowed_nbytes += self._nbytes(index)
            self._last = index
            self._fetch((index + 1) % len(self.plain.layers))
        return result

    def _fetch(self, index: int) -> None:
        if index in self._away:
            self._place(index, False)

    def _place(self, index: int, away: bool) -> list[Tensor]:
        """Make a layer's tensors anew on the host or the device; return those that it had."""
        before = self._tensors(index)
        with self._tracker.on_host() if away else contextlib.nullcontext():
            for name, tensor in zip(self.NAMES, before, strict=True):
                setattr(self.plain.layers[index], name, torch.empty_like(tensor))
        for tensor in () if away else self._tensors(index):
            self._tracker.mark(tensor, CACHE)
        (self._away.add if away else self._away.discard)(index)
        return before

    def _tensors(self, index: int) -> list[Tensor]:
        """Return a layer's keys and values; nothing if it has none yet, or keeps something else."""
        layer = self.plain.layers[index] if index < len(self.plain.layers) else None
        return [getattr(layer, name) for name in self.NAMES if isinstance(getattr(layer, name, None), Tensor)]

    def _nbytes(self, index: int) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(index))


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

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__("cpu")
        self.function_modes = function_mode_count()
        self.dispatch_modes = dispatch_mode_count()
        self.tracker = tracker

    def holds(self, tensor: Tensor) -> bool:
        return True

    def slab(self, nbytes: int) -> Tensor:
        with self.tracker.on_host():
            return torch.empty(nbytes, dtype=torch.uint8)

    passing = slab

    def device_bytes(self, nbytes: int) -> Tensor:
        """Make a buffer that is not counted: the schedule decides which weights are on the device."""
        with self.tracker.on_host():
            return super().device_bytes(nbytes)

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        with self.tracker.casting():
            return super().cast(weight, dtype)

    def host_empty(self, like: Tensor) -> Tensor:
        """Allocate as a device does, but never memory that is mapped: tensors without data have none."""
        with self.tracker.on_host():
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)

    def claim(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().claim(storage, nbytes)
        self.tracker.change(GRADIENTS, nbytes)

    def shrink(self, storage: torch.UntypedStorage) -> None:
        """Free packed gradients: no unit is evicted."""
        self.tracker.change(GRADIENTS, -storage.nbytes())
        super().shrink(storage)


class _CountedGradients(GradientReturn):
    """Gradients on their way down: all but the packed ones are on the host from here on (Rule 3)."""

    device: _CountingDevice

    def receive(self, store: HostCopy, node: Any, grads: Gradients, step: PendingStep | None) -> Gradients:
        for grad in grads:
            if grad is not None:
                self.device.tracker.mark(grad, GRADIENTS)
        with self.device.tracker.on_host():
            return super().receive(store, node, grads, step)


class _StepRecorder(StepListener):
    """A listener that divides what the tracker counts into visits (Rule 2)."""

    def __init__(self) -> None:
        self.tracker = MemoryTracker(self._term)
        self._units: dict[str, StreamedUnit] = {}
        self._last: StreamedUnit | None = None
        self._inside = False  # whether forward runs code of a streamed unit

    def listen_to(self, engine: Engine) -> None:
        """Listen to an engine's phases from now on."""
        engine.counters.listener = self
        self._units = {unit.name: unit for unit in engine.units}
        for unit in engine.units:
            unit.stand_ins.data_exposed = _NeverExposed([False])

    def waiting(self, cause: str, unit: str = "", phase: str = "") -> AbstractContextManager[None]:
        if cause == "weights" and not self._units[unit].unit.resident:
            self._inside = True
            if self._units[unit] is not self._last:
                self._last = self._units[unit]
                others = (other for other in self._units.values() if not other.unit.resident)
                in_use = tuple(other.index for other in others if not other.movable)
                self.tracker.begin(Visit(self._last.index, in_use, phase == "backward"))
        return super().waiting(cause, unit, phase)

    def left(self, around: str, in_backward: bool) -> None:
        self._inside = around in self._units and not self._units[around].unit.resident

    def work(self, lane: Lane, unit: str, phase: str, nbytes: int = 0) -> AbstractContextManager[None]:
        visit = self.tracker.visits[-1]
        if phase == "gradients":
            visit.sends.append(self._units[unit].index)
        elif phase == "activations":
            visit.stowed_nbytes += nbytes if lane == "down" else 0
            visit.fetched_nbytes += nbytes if lane == "up" else 0
        return super().work(lane, unit, phase, nbytes)

    def _term(self) -> str:
        """Return the term of what appears now (step_trace.py, Rule 2)."""
        inside = self._last is not None if in_backward() else self._inside
        return WORKING if inside else OUTSIDE


class _NeverExposed(list[bool]):
    """A mark that stays False: nothing can compare weights without data with their host copies."""

    def __setitem__(self, *_: Any) -> None:
        """Leave it as it is."""
