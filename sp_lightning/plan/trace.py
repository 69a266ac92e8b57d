"""Run one step of a model without a device, and note what each visit to a unit computes and allocates there.

1. A visit lasts from the moment a unit is needed until other code runs. Its bytes count from those that were there as
   it began. Neither window nor transfer changes what is in it, so one trace serves all of them.
2. Weights take nothing here, and neither do casts of them with which they travel.
3. A unit's gradients wait for the last of them, and are packed then. Packed gradients and activations that are on their
   way down are counted by who follows the visits (step.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from ..compat.tensors import graph_task, operator_of, schema_of, storage_id
from ..host.device import dense_strides
from ..host.unit_numbers import aligned
from ..stream.partition import FoundUnit
from .fakes import HALVES, FakeTensors, tensors_of

aten = torch.ops.aten
FREE = {aten._unsafe_view, aten.set_, aten.resize_, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
LOOKS_UP = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward}
# CUDA sums columns of at least so many rows, as for the gradient of a bias, in partial sums of up to 1 MiB for each of
# its multiprocessors; an A100 has 108.
TALL, SCRATCH = 1024, 108 << 20
SMALLEST = 1 << 10  # bytes of an activation that is worth a copy to the host


@dataclass
class Visit:
    """A visit to a unit, or code outside of all: its work and its bytes."""

    unit: int | None
    backward: bool
    in_use: tuple[int, ...] = ()  # units whose code runs around this one
    flops: float = 0.0  # of products in half precision
    fp32_flops: float = 0.0
    moved: float = 0.0  # bytes of device memory that all but products read and write
    up: int = 0  # bytes of activations that come back from the host
    down: int = 0  # bytes of activations that go there
    packed: list[int] = field(default_factory=list)  # bytes of gradients that go there, by unit
    peak: int = 0  # the most bytes beside weights, less those that were there as it began
    gradients: int = 0  # bytes of gradients at that moment
    grown: int = 0  # bytes there as it ends, less those as it began


class Trace(NamedTuple):
    """The visits of a step."""

    visits: list[Visit]
    batch: int  # bytes
    buffers: int


class Setting(NamedTuple):
    """The settings that decide where a step's bytes are."""

    units: Sequence[FoundUnit]
    narrow: frozenset[int]  # ids of FP32 weights that travel in half precision
    masters: bool  # whether weights are FP32 on the host alone
    activations: str


def trace(module: nn.Module, setting: Setting, batch: Any, run: Callable[[], Any], tensors: FakeTensors) -> Trace:
    """Run one step, with a backward if anything trains.

    Args:
        module: A module that was made on ``tensors``.
        setting: Its units, and what becomes of their bytes.
        batch: Its tensors are on the device throughout.
        run: Returns the loss, or an output that contains or leads to it.
        tensors: The context, still entered.
    """
    recorder = _Recorder(setting, tensors)
    buffers, given = (sum(recorder.add(tensor, 0) for tensor in some) for some in (module.buffers(), tensors_in(batch)))
    tensors.observe = recorder.observe
    try:
        with recorder.listening():
            recorder.step(run)
    finally:
        tensors.observe = None
    return Trace(recorder.visits, given, buffers)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif hasattr(tree, "values") and callable(tree.values):
        yield from tensors_in(list(tree.values()))
    elif hasattr(tree, "__dataclass_fields__"):
        yield from tensors_in(list(vars(tree).values()))


class _Recorder:
    """Divides what is allocated and computed into visits."""

    def __init__(self, setting: Setting, tensors: FakeTensors) -> None:
        self.visits = [Visit(None, False)]
        self._setting, self._tensors = setting, tensors
        self._live: dict[int, tuple[int, object]] = {}  # bytes of a storage, and a reference that tells when it is gone
        self._gradients = 0
        self._stack: list[int] = []  # units whose code runs
        weights = [(p, unit.index) for unit in setting.units for _, p in unit.params if p.layout is torch.strided]
        self._weights = {storage_id(p.untyped_storage()): (p, index) for p, index in weights}
        self._came: dict[int, list[Tensor]] = defaultdict(list)  # by unit, its weights whose gradients are there

    # ---- a step

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the units' forwards and gradients."""
        with contextlib.ExitStack() as stack:
            for unit in self._setting.units:
                for _, module in unit.modules if not unit.resident else ():
                    stack.callback(_restore, module, vars(module).get("forward"))
                    module.forward = functools.partial(self._run, unit.index, module.forward)
                for _, parameter in unit.params:
                    if parameter.requires_grad and not unit.resident:
                        take = functools.partial(self._take, unit)
                        stack.callback(parameter.register_post_accumulate_grad_hook(take).remove)  # type: ignore[no-untyped-call]
            yield

    def step(self, run: Callable[[], Any]) -> None:
        """Run a forward, and a backward from each loss in its output."""
        output = run()
        loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
        losses = [tensor for tensor in tensors_in(output if loss is None else loss) if tensor.requires_grad]
        if losses:
            torch.autograd.backward(losses, [torch.ones_like(tensor) for tensor in losses])
        for index in list(self._came):
            self._send(index)

    def enter(self, unit: int | None, backward: bool) -> None:
        """Begin a visit, unless it goes on."""
        now = self.visits[-1]
        if (unit, backward) != (now.unit, now.backward) and (unit is None or not self._setting.units[unit].resident):
            around = tuple(dict.fromkeys(index for index in self._stack if index != unit))
            self.visits.append(Visit(unit, backward, around, gradients=self._gradients))

    def _run(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit's forward by the policy of activations."""
        inside = functools.partial(self._inside, unit, forward)
        if self._stack or not torch.is_grad_enabled():
            return inside(*args, **kwargs)
        self.enter(unit, False)
        with contextlib.ExitStack() as stack:
            if "offload" in self._setting.activations:
                trip = _Trip(self, unit)
                stack.callback(trip.held.clear)
                stack.enter_context(saved_tensors_hooks(trip.pack, trip.unpack))
            if "recompute" in self._setting.activations:
                return checkpoint(inside, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return inside(*args, **kwargs)

    def _inside(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.enter(unit, _in_backward())
        self._stack.append(unit)
        try:
            with (
                self._tensors.kernels if _in_backward() else contextlib.nullcontext()
            ):  # autograd's engine leaves this mode
                return forward(*args, **kwargs)
        finally:
            self._stack.pop()

    # ---- bytes

    def add(self, tensor: Tensor, counts: int | None = None) -> int:
        """Count a tensor's storage if it is new, as these bytes if they are given; return its bytes."""
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key, nbytes = storage_id(storage), aligned(storage.nbytes())
        if key in self._live or key in self._weights:
            return 0
        counts = nbytes if counts is None else counts
        self._live[key] = counts, weakref.ref(storage, functools.partial(_free, weakref.ref(self), key))
        self._change(counts)
        return nbytes

    def free(self, key: int) -> None:
        """Count a storage that is gone."""
        self._weights.pop(key, None)  # of a cast
        self._change(-self._live.pop(key)[0])

    def counts(self, tensor: Tensor) -> bool:
        """Whether a tensor takes bytes beside those of weights."""
        return tensor.layout is torch.strided and self._live.get(storage_id(tensor.untyped_storage()), (0,))[0] > 0

    def _change(self, nbytes: int) -> None:
        visit = self.visits[-1]
        visit.grown += nbytes
        if visit.grown > visit.peak:
            visit.peak, visit.gradients = visit.grown, self._gradients

    def _take(self, unit: FoundUnit, parameter: Tensor) -> None:
        """Take note of a gradient that is complete (Rule 3)."""
        self._came[unit.index].append(parameter)
        self._gradients += 0 if parameter.grad is None else aligned(parameter.grad.nbytes)
        if len(self._came[unit.index]) == sum(p.requires_grad for _, p in unit.params):
            self._send(unit.index)

    def _send(self, unit: int) -> None:
        """Narrow a unit's gradients, widen them for their norms, pack them, and let go of all."""
        setting, params = self._setting, [p for p in self._came.pop(unit) if p.grad is not None]
        came = sum(aligned(p.grad.nbytes) for p in params if p.grad is not None)
        goes = sum(aligned(p.nbytes // 2 if id(p) in setting.narrow else p.nbytes) for p in params)
        wide = sum(aligned(4 * p.numel()) for p in params if setting.masters or id(p) in setting.narrow)
        for nbytes in (goes - came, wide, -wide, goes, came - 2 * goes):
            self._gradients += nbytes
            self._change(nbytes)
        self._gradients -= came
        self.visits[-1].packed.append(goes)
        self.visits[-1].moved += 2 * (goes + wide)
        for parameter in params:
            parameter.grad = None

    # ---- work

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that ran: its work, and the storages that it made."""
        results, operator, read = tensors_of((out,)), operator_of(func), tensors_of(args, kwargs)
        known = {storage_id(t.untyped_storage()) for t in read if t.layout is torch.strided}
        made = [t for t in results if t.layout is torch.strided and storage_id(t.untyped_storage()) not in known]
        weights = [self._weights[key] for key in known if key in self._weights]
        for _, unit in weights:
            if unit not in self._stack:
                self.enter(unit, _in_backward())  # such as for a backward, or a head that is a table
        if not weights and not self._stack and made and not _in_backward():
            self.enter(None, False)
        is_cast = func is aten._to_copy.default and made and made[0].dtype in HALVES
        if is_cast and weights and id(weights[0][0]) in self._setting.narrow:
            self.add(made[0], 0)
            self._weights[storage_id(made[0].untyped_storage())] = weights[0]
            return
        for tensor in made:
            self.add(tensor)
        if operator is aten.sum and read[0].dim() == 2 and len(read[0]) >= TALL and self._tensors.is_fused:
            scratch = min(8 * read[0].numel(), SCRATCH)
            self._change(scratch)
            self._change(-scratch)
        visit, count = self.visits[-1], flop_registry.get(operator)
        if count is not None and read[0].dtype in HALVES:
            visit.flops += count(*args, **kwargs, out_val=out)
        elif count is not None:
            visit.fp32_flops += count(*args, **kwargs, out_val=out)
        elif operator not in FREE and (made or schema_of(func).is_mutable):
            visit.moved += _moved(operator, read, made)


class _Trip:
    """A unit's saved tensors on their way to the host and back: all come as the first is needed."""

    def __init__(self, recorder: _Recorder, unit: int) -> None:
        self._recorder, self._unit = recorder, unit
        self.held: list[Tensor] = []  # until the forward ends
        self._forms: dict[Any, Any] = {}
        self._needed: Counter[Any] = Counter()
        self._there: dict[Any, Tensor] = {}

    def pack(self, tensor: Tensor) -> Any:
        if tensor.nbytes < SMALLEST or not self._recorder.counts(tensor) or dense_strides(tensor) != tensor.stride():
            return tensor.detach()
        key = storage_id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.dtype
        if key not in self._forms:
            self._forms[key] = tensor.shape, tensor.stride(), tensor.dtype
            self._recorder.visits[-1].down += tensor.nbytes
            self.held.append(tensor.detach())
        self._needed[key] += 1
        return key

    def unpack(self, packed: Any) -> Tensor:
        self._recorder.enter(self._unit, True)
        if isinstance(packed, Tensor):
            return packed
        if not self._there:
            for key, (shape, stride, dtype) in self._forms.items():
                self._there[key] = torch.empty_strided(shape, stride, dtype=dtype)
                self._recorder.visits[-1].up += self._there[key].nbytes
        self._needed[packed] -= 1
        return self._there[packed] if self._needed[packed] else self._there.pop(packed)


def _in_backward() -> bool:
    return graph_task() != -1


def _restore(module: nn.Module, forward: Any) -> None:
    vars(module).pop("forward")
    if forward is not None:
        module.forward = forward


def _free(refer: Callable[[], _Recorder | None], key: int, _: object) -> None:
    if (recorder := refer()) is not None:
        recorder.free(key)


def _moved(operator: Any, read: list[Tensor], made: list[Tensor]) -> float:
    """Return the bytes of device memory that an operator reads and writes."""
    written = sum(map(_nbytes, made or read[:1]))
    return written + (written + sum(map(_nbytes, read[1:])) if operator in LOOKS_UP else sum(map(_nbytes, read)))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor has in memory, where some repeat."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else tensor.nbytes
