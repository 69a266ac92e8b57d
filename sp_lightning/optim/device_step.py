"""Steps of optimizers on the device: weights, gradients and state go up in portions, and come down stepped.

1. torch's own code steps tensors on the device, so its kernels, and its choice of them, are those of a plain run.
   Weights, gradients and state stay on the host, whatever steps them: only this file knows where that is done.
2. A portion is what fits into one of a few buffers. While one is stepped the next goes up and the one before comes
   down. A weight that is too large for a buffer is cut where its class is elementwise; else it has a buffer of its own.
   The cuts fall on whole vectors (pieces.py, Rule 5).
3. Scalars of the state lie where a plain run has them: on the host, or on the device with ``capturable`` or ``fused``,
   and always those of `ASGD`. One that was loaded may have its weight's type: torch takes it from the device, as all
   but counts in FP32 and FP64. Each part of a weight steps copies, and the last part's are written back: a step that
   fails before it wrote anything to the host can be tried again.
4. State that a step makes gets page-locked memory on the host, once for each portion; what is loaded moves there.
5. torch chooses between a loop and its kernels for lists by the types of all tensors of a group. A portion would choose
   otherwise where some of them are not the streamed module's own: such a group has to say ``foreach`` itself. Where a
   gradient or state lies in another order than its weight, torch chooses by that: it has to say ``foreach=False``.
   Weights that share memory, or whose gradients or state do, go up and come down one after the other. Kernels for
   lists would count all steps of a scalar that several weights share at once: such a group has to say so, too.
   Those of `SGD` go another way for all weights of a type if one of them has no momentum yet: each portion has an
   empty one then. Beside backward none of them is stepped: it is not known which gradients are yet to come.
6. Copies have streams of their own: a thread may step while another one fills a unit, and no stream serves two threads.
   The step is over when all is down.
7. The norm by which gradients are clipped is computed on the device, of each gradient as a whole, as torch computes it.
8. Buffers grow, between steps, with what is stepped. A gradient comes down only if torch wrote to it.
9. What is stepped may itself be in a buffer on the host, into which it came from a disk: the disk.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adafactor, Optimizer

from ..compat.kernels import grouped_by_device_and_dtype, norms_of_each
from ..compat.modules import step_without_hooks
from ..compat.references import are_tensors_of_entry_shared
from ..errors import UnsupportedError
from ..host.unit_numbers import ALIGNMENT, aligned, state_nbytes
from ..memory.device import Device
from ..memory.layout import Layout, is_dense
from ..memory.staging import Arrival
from ..memory.watched_parameters import HostParameter, is_on_host, true_grad
from ..memory.weights import Conversion
from ..options import HostMemory
from ..steps import torn_step
from .host_gradients import stepped_there
from .pieces import (
    ELEMENTWISE,
    LINE,
    PER_PARAMETER,
    Conversions,
    Group,
    Regrouped,
    ShadowStep,
    State,
    all_of,
    each_by_itself,
    flattened,
    has_gradient_in_step,
    is_scalar,
    keep_order,
    needs_order,
    same_order,
    shadow_of,
)
from .state_in_memory import StateInMemory

BUFFER = 64 << 20  # bytes: long enough for the link to reach its speed
BUFFERS = 3  # one goes up, one is stepped, one comes down
WEIGHT, GRADIENT = " weight", " gradient"  # keys that no state has
SCALARS = "step", "mu_product"  # of the state, on the host as a rule (Rule 3)
BEGIN = " begin"  # an option that no group has: the types of weights whose state this step makes
OF_SCALER = "grad_scale", "found_inf"  # what a scaler leaves for an optimizer that unscales by itself


def buffer_nbytes(moved: int) -> int:
    """Return the bytes of a buffer for a step that moves this many to the device."""
    return max(ALIGNMENT, min(BUFFER, aligned(moved)))


def device_nbytes(moved: int) -> int:
    """Return the bytes on the device of a step that moves this many there: buffers, and what torch's code makes."""
    return BUFFERS * buffer_nbytes(moved) + buffer_nbytes(moved) // 2


@dataclass(eq=False)
class SteppedWeight:
    """A weight in a step, with its state on the host."""

    param: Tensor
    grad: Tensor
    group: Group
    entry: State
    sources: list[tuple[str, Tensor]]  # what goes up
    conversion: Conversion | None
    scalars: State  # on the host (Rule 3)
    cuts: bool  # whether it may be cut (Rule 2)
    made: dict[str, Tensor] = field(default_factory=dict)  # on the host, by this step
    is_written: bool = False  # on the host, all of it or a part

    def nbytes(self, count: int) -> int:
        """Count the bytes that this many elements take in a buffer."""
        return sum(
            aligned(tensor.nbytes if self.is_small(tensor) else count * tensor.itemsize) for _, tensor in self.sources
        )

    def is_small(self, tensor: Tensor) -> bool:
        """Whether a tensor goes up with each part as a whole."""
        return tensor.numel() != self.param.numel()

    def most(self, room: int) -> int:
        """Return how many elements fit into the room, in whole vectors."""
        items = sum(tensor.itemsize for _, tensor in self.sources if not self.is_small(tensor))
        return max(0, room - self.nbytes(0) - ALIGNMENT * len(self.sources)) // items // LINE * LINE


class SteppedPart(NamedTuple):
    """Elements of a weight that are in one buffer."""

    of: SteppedWeight
    first: int
    length: int
    is_last: bool

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements, which are stepped in the weight's shape."""
        return self.length == self.of.param.numel()

    def of_host(self, tensor: Tensor) -> Tensor:
        """Return the part's elements of a tensor on the host, in one dimension."""
        found = flattened(tensor)
        return found if self.is_whole or self.of.is_small(tensor) else found[self.first : self.first + self.length]

    def shaped(self, elements: Tensor, like: Tensor) -> Tensor:
        """View elements on the device as they are stepped."""
        whole = self.is_whole or self.of.is_small(like)
        return elements.as_strided(like.shape, like.stride()) if whole else elements

    def like(self, made: Tensor) -> Tensor:
        """Return a tensor without data like the state of the whole weight of which this was made."""
        of = made if self.is_whole or is_scalar(made) else self.of.param
        return torch.empty_like(of, dtype=made.dtype, device="meta")


Source = tuple[str, Tensor, int]  # the key in the state, the tensor on the host, and its first byte in the buffer


class Portion(NamedTuple):
    """The contents of one buffer."""

    parts: list[SteppedPart]
    sources: list[list[Source]]  # of each part
    nbytes: int

    def added(self, part: SteppedPart) -> Portion:
        """Return the portion with one more part."""
        at, sources = self.nbytes, []
        for key, tensor in part.of.sources:
            sources.append((key, tensor, at))
            at += aligned(part.of_host(tensor).nbytes)
        return Portion([*self.parts, part], [*self.sources, sources], at)


class StepsOnDevice(StateInMemory):
    """The steps of optimizers on one device, and the state that they made."""

    steps_narrow = False

    def __init__(self, device: Device, host_memory: HostMemory) -> None:
        self.streamed: dict[int, Tensor] = {}  # the parameters that these steps are for, by their ids
        self._device = device
        self._copies = Device(device.torch_device, host_memory)  # with streams, and host memory, of its own (Rule 6)
        self._stream = device.new_stream()
        self._buffers: list[Tensor] = []
        self._nbytes = 0  # of each
        self._loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since state was adopted
        self._lock = threading.RLock()  # a thread may step one optimizer while the caller steps another
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        stepped_there.add(self)

    def shadow(self, optimizer: Optimizer, fuses: bool) -> ShadowStep | None:
        if type(optimizer) not in ELEMENTWISE | PER_PARAMETER:
            names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE | PER_PARAMETER))
            raise UnsupportedError(
                f"optimizer_device='device' steps torch's own {names}; {type(optimizer).__name__} is none of them: "
                "step it with optimizer_device='host'"
            )
        shadow = ShadowStep(lambda shadow, _: all_of(shadow)).attach(optimizer)
        shadow.begins = _begins
        return shadow

    def follow(self, parameters: Iterable[Tensor]) -> None:
        self.streamed = {id(parameter): parameter for parameter in parameters}

    def attach(self, optimizer: Optimizer, shadow: ShadowStep | None) -> None:
        assert shadow is not None
        if shadow.first is not None:  # before its state came to a disk
            return
        shadow.rest, shadow.first = partial(self._rest, shadow.rest), self.first
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self._loaded.add))
        self._loaded.add(optimizer)
        self._make_buffers(optimizer)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Move state that was loaded, or made before, into page-locked memory, but for what other code refers to."""
        state: Any = vars(optimizer)["state"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self.streamed and id(parameter) not in self.parameters and state.get(parameter):
                    self.adopt_one(optimizer, parameter)

    def adopt_one(self, optimizer: Optimizer, parameter: Tensor) -> None:
        state: Any = vars(optimizer)["state"]  # references to an entry and what is in it are counted
        keys = [key for key, value in state[parameter].items() if self._can_move(value)]
        if keys and not are_tensors_of_entry_shared(state, parameter):
            with torch.no_grad():
                moved = self._on_host([state[parameter][key] for key in keys])
                for key, tensor in zip(keys, moved, strict=True):
                    state[parameter][key] = tensor.copy_(state[parameter][key])

    @staticmethod
    def _can_move(value: Any) -> bool:
        return type(value) is Tensor and is_on_host(value) and value.numel() > 0 and is_dense(value)

    def _on_host(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Make tensors like these in page-locked memory (Rule 4)."""
        layout = Layout.of(("", like) for like in likes)
        storage = self.host_bytes(max(layout.nbytes, ALIGNMENT)).untyped_storage()
        return [Layout.own_view(storage, place) for place in layout.fields]

    def host_bytes(self, nbytes: int) -> Tensor:
        """Allocate memory from which the device copies, page-locked if that is possible."""
        return self._copies.slab(nbytes)

    def _make_buffers(self, optimizer: Optimizer) -> None:
        """Allocate the buffers, or larger ones, on the caller's thread, where a full device may make room."""
        if self._nbytes >= BUFFER:
            return
        streamed = [
            param for group in optimizer.param_groups for param in group["params"] if id(param) in self.streamed
        ]
        weights = sum(param.nbytes for param in streamed if param.requires_grad)
        nbytes = buffer_nbytes(2 * weights + (state_nbytes(optimizer, self.streamed) or 0))
        if nbytes <= self._nbytes:
            return
        with self._lock:
            self._free_buffers()
            for _ in range(BUFFERS):
                buffer = self._device.device_bytes(nbytes)
                self._device.claim(buffer.untyped_storage(), nbytes)
                self._buffers.append(buffer)
            self._nbytes = nbytes  # if there are all
            self._copies.up.wait_event(self._device.compute.record_event())  # which had the memory

    def _free_buffers(self) -> None:
        """Free the buffers; nothing uses them between two steps."""
        self._nbytes = 0
        for buffer in self._buffers:
            self._device.shrink(buffer.untyped_storage())
        self._buffers.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with self._lock:
            self._free_buffers()
            self._copies.close()
        stepped_there.discard(self)

    # ---- steps

    def _rest(self, rest: Callable[[Optimizer], Regrouped], optimizer: Optimizer) -> Regrouped:
        """Check the groups of a step, and adopt its state, before some of it is deferred."""
        self._check(optimizer)
        self._make_buffers(optimizer)  # larger ones, if more weights are stepped than before
        # What it loads from may refer to state until the load is over. A guarded one has nothing new (state_guard.py).
        if optimizer in self._loaded and "state" in vars(optimizer):
            self._loaded.discard(optimizer)
            self._adopt(optimizer)
        return rest(optimizer)

    def first(self, shadow: Any, conversions: Conversions, adopts: bool = False) -> list[Group]:
        """Step the streamed module's weights; return the groups with the others."""
        called_with = getattr(shadow, "called_with", None)  # else the optimizer thread, with units of this module
        groups: list[Group] = [self.each_by_itself(shadow, group) for group in shadow.param_groups]
        shadow.param_groups = groups
        weights: list[SteppedWeight] = []
        with self._lock, torch.no_grad():
            try:
                if called_with is not None:
                    keep_order(shadow)
                weights = list(self._weights(shadow, conversions, every=called_with is None))
                for some in [[one] for one in weights] if weights and needs_order(shadow) else [weights]:
                    self._run(shadow, some)
            except BaseException as error:
                if called_with is not None:
                    optimizer = called_with[0][0]
                    before = _count(optimizer.param_groups) - _count(groups)  # from the disk, or of another module
                    done = before + sum(weight.is_written for weight in weights)
                    if done:
                        torn_step.tear(optimizer, done, error)
                raise
        stepped = {id(weight.param) for weight in weights}
        return [{**group, "params": [p for p in group["params"] if id(p) not in stepped]} for group in groups]

    def step_parts(self, shadow: Any, conversions: Conversions, made: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Step tensors that lie in a buffer on the host, with the tensors for what the step makes (Rule 9)."""
        weights = list(self._weights(shadow, conversions, every=True))
        for weight in weights:
            weight.made.update(made.get(weight.param, {}))
        with self._lock:
            self._run(shadow, weights)

    def each_by_itself(self, optimizer: Any, group: Group) -> Group:
        """Do as `each_by_itself`, also for kernels for lists, whose first group decides; name types that begin."""
        stepped = (param for param in group["params"] if param.grad is not None)
        if begins := _begins(optimizer, group, optimizer.state, stepped):
            return {**group, BEGIN: begins.union(group.get(BEGIN, ()))}
        if type(optimizer) is not Adafactor or group["eps"][0] is not None or not group["foreach"]:
            return each_by_itself(optimizer, group)
        there = [
            self.beside(param) if id(param) in self.streamed else param
            for param in group["params"]
            if param.grad is not None
        ]
        if not there:
            return group
        first = there[grouped_by_device_and_dtype(there)[0][0]]
        return {**group, "eps": (torch.finfo(first.dtype).eps, group["eps"][1])}

    def _check(self, optimizer: Optimizer) -> None:
        """Refuse what torch would not step as in a plain run (Rule 5)."""
        for group in optimizer.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            own = [param for param in params if id(param) in self.streamed]
            if own and group.get("differentiable"):
                raise UnsupportedError("a differentiable optimizer steps with optimizer_device='host' only")
            mixed = len(own) < len(params) or any(type(param) is not HostParameter for param in params)
            if own and mixed and _chooses(group):
                raise UnsupportedError(
                    f"a group of {type(optimizer).__name__} has weights of the streamed module beside others, or of a "
                    "class of their own, by which torch chooses its kernels: pass foreach=False or foreach=True to it"
                )

    def _weights(self, shadow: Any, conversions: Conversions, every: bool) -> Iterator[SteppedWeight]:
        counted: set[int] = set()  # addresses of scalars
        for group in shadow.param_groups:
            foreach = None if group.get("fused") else group.get("foreach")
            goes_up = group.get("capturable") or group.get("fused") or isinstance(shadow, ASGD)  # Rule 3
            for param in group["params"]:
                if param.grad is None or not (every or id(param) in self.streamed):
                    continue
                entry = shadow.state.get(param, {})
                alike = has_gradient_in_step(param) and all(_lies_as(param, value) for value in entry.values())
                if not alike and (foreach is not False or not all(map(_can_go, (param, param.grad, *entry.values())))):
                    raise UnsupportedError(
                        f"a weight of shape {tuple(param.shape)} has a gradient or optimizer state that does not lie "
                        "in memory as the weight does, by which torch chooses its kernels: pass foreach=False to the "
                        "optimizer, or step it with optimizer_device='host'"
                    )
                conversion = conversions.get(param)
                if conversion is not None and not same_order(param, conversion.wire):
                    conversion = None
                tensors = [(key, value) for key, value in entry.items() if isinstance(value, Tensor)]
                state = [(key, value) for key, value in tensors if goes_up or not _stays(key, value)]
                scalars = {key: value for key, value in tensors if _stays(key, value) and not goes_up}
                addresses = {value.data_ptr() for key, value in tensors if key in SCALARS}
                if foreach is not False and not counted.isdisjoint(addresses):
                    raise UnsupportedError(
                        f"a scalar of {type(shadow).__name__}'s state belongs to several weights, and torch's kernels "
                        "for lists count all their steps at once: pass foreach=False to the optimizer, or load state "
                        "with a copy of the scalar for each weight"
                    )
                counted |= addresses
                sources = [(WEIGHT, param), (GRADIENT, param.grad), *state]
                cuts = alike and type(shadow) in ELEMENTWISE
                yield SteppedWeight(param, param.grad, group, entry, sources, conversion, scalars, cuts)

    def _run(self, shadow: Any, weights: Sequence[SteppedWeight]) -> None:
        """Step portion after portion, with the next one going up and the one before coming down (Rule 2)."""
        free = list(self._buffers)
        coming: list[tuple[Portion, Tensor, list[Arrival], list[Tensor]]] = []  # down, the oldest first
        ahead: tuple[Portion, Tensor, list[Arrival]] | None = None

        def take(portion: Portion) -> Tensor:
            if portion.nbytes > self._nbytes:
                end()  # all work of the stream before, which may have had the memory
                buffer = self._device.device_bytes(portion.nbytes)
                with self._stream:
                    self._device.claim(buffer.untyped_storage(), portion.nbytes)
                self._copies.up.wait_event(self._stream.record_event())
                return buffer
            while not free:
                end(1)
            return free.pop()

        def end(count: int = -1) -> None:
            while coming and count:
                portion, buffer, arrivals, _ = coming.pop(0)
                for arrival in arrivals:
                    arrival.synchronize()
                _finish(portion)
                if buffer.nbytes > self._nbytes:
                    self._device.shrink(buffer.untyped_storage())
                else:
                    free.append(buffer)
                count -= 1

        def step_ahead() -> None:
            nonlocal ahead
            if ahead is not None:
                coming.append((*ahead[:2], *self._step_portion(shadow, *ahead)))
                ahead = None

        try:
            for portion in _portions(weights, self._nbytes):
                if portion.nbytes > self._nbytes:  # one of them is there at a time
                    step_ahead()
                buffer = take(portion)
                going = portion, buffer, self._send_up(portion, buffer)
                step_ahead()
                ahead = going
            step_ahead()
            end()
        except BaseException:
            self._stream.synchronize()
            self._copies.finish_copies()  # nothing writes to the host from here on
            raise

    def _send_up(self, portion: Portion, buffer: Tensor) -> list[Arrival]:
        rows = [
            (buffer[at : at + source.nbytes], source.view(torch.uint8))
            for part, sources in zip(portion.parts, portion.sources, strict=True)
            for _, tensor, at in sources
            for source in [part.of_host(tensor)]
        ]
        return [self._copies.send_up(some, nullcontext()) for some in _by_memory(rows, host=1)]

    def _step_portion(
        self, shadow: Any, portion: Portion, buffer: Tensor, arrivals: Iterable[Arrival]
    ) -> tuple[list[Arrival], list[Tensor]]:
        """Step a portion that goes up; return the ends of its copies down, and what they read."""
        for arrival in arrivals:
            arrival.wait(self._stream)
        step = shadow_of(shadow)
        step.param_groups, step.state = [], defaultdict(dict)
        with self._stream:
            for name in OF_SCALER:
                if isinstance(vars(step).get(name), Tensor):
                    setattr(step, name, vars(step)[name].to(self._device.torch_device))
            pieces, group = [], None
            for part, sources in zip(portion.parts, portion.sources, strict=True):
                pieces.append(_piece(step, part, sources, buffer))
                if part.of.group is not group:
                    group = part.of.group
                    step.param_groups.append({**group, "params": []})
                step.param_groups[-1]["params"].append(pieces[-1])
            for group in step.param_groups:
                group["params"] += map(self._beginning, group.get(BEGIN, ()))
            step_without_hooks(type(shadow))(step)
            rows = [
                row for part, piece in zip(portion.parts, pieces, strict=True) for row in self._down(step, part, piece)
            ]
        self._copies.down.wait_event(self._stream.record_event())
        in_bytes = [(target.view(torch.uint8), source.view(torch.uint8)) for target, source in rows]
        ends = [self._copies.send_down(some, nullcontext()) for some in _by_memory(in_bytes, host=0)]
        return ends, [source for _, source in rows]

    def _beginning(self, dtype: torch.dtype) -> Tensor:
        """Make a weight without elements and without state (Rule 5)."""
        weight = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        weight.grad = torch.empty_like(weight)
        return weight

    def _down(self, step: Any, part: SteppedPart, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what comes down of a part: elements on the host, and those on the device."""
        weight = part.of
        weight.is_written = True
        yield part.of_host(weight.param), flattened(piece)
        gradient: Any = piece.grad
        # SGD's kernels for lists may step gradients, and fused ones unscale them; these have a new version in any case.
        if vars(step).get(OF_SCALER[0]) is not None or (gradient._version and not weight.group.get("fused")):
            # That is no change by code in backward, which the engine would find by the version (engine.check_changed).
            yield part.of_host(weight.grad.data), flattened(gradient)
        if weight.conversion is not None:
            yield part.of_host(weight.conversion.wire), flattened(piece.to(weight.conversion.wire.dtype))
        results = step.state.get(piece, {})
        there = {key: value for key, value in results.items() if isinstance(value, Tensor) and not value.is_cpu}
        if not part.is_last:
            there = {key: value for key, value in there.items() if not is_scalar(value)}  # Rule 3
        new = [key for key in there if key not in weight.made and not isinstance(weight.entry.get(key), Tensor)]
        if new:
            likes = [part.like(there[key]) for key in new]
            weight.made.update(zip(new, self._on_host(likes), strict=True))
        for key, value in there.items():
            yield part.of_host(weight.made[key] if key in weight.made else weight.entry[key]), flattened(value)
        if part.is_last:
            for key, value in results.items():
                if key in weight.scalars:
                    weight.scalars[key].copy_(value)
                elif key not in there:
                    weight.entry[key] = value
                elif key in weight.made:
                    weight.entry[key] = weight.made[key]

    # ---- clipping (Rule 7)

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients of streamed weights."""
        found = (true_grad(parameter) for parameter in self.streamed.values())
        return (gradient for gradient in found if gradient is not None)

    def beside(self, like: Tensor) -> Tensor:
        """Make an empty tensor of the type of a weight or gradient, on the device."""
        return torch.empty(0, dtype=like.dtype, device=self._device.torch_device)

    def norms(self, gradients: Sequence[Tensor], kind: float, foreach: bool | None) -> list[Tensor]:
        """Compute the norms of gradients on the device."""
        found: list[Tensor] = []
        with self._lock, torch.no_grad(), self._stream:
            for some in _within(gradients, BUFFER):
                found += norms_of_each([gradient.to(self._device.torch_device) for gradient in some], kind, foreach)
        self._device.compute.wait_event(self._stream.record_event())
        for norm in found:
            norm.record_stream(self._device.compute)
        return found


def _begins(optimizer: Optimizer, group: Group, state: Any, parameters: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the types of those of a group's parameters that have no momentum yet, where that decides for others."""
    if type(optimizer) is not SGD or not group["momentum"] or group["foreach"] is False or group["fused"]:
        return set()
    return {one.dtype for one in parameters if state.get(one, {}).get("momentum_buffer") is None}


def _piece(step: Any, part: SteppedPart, sources: Iterable[Source], buffer: Tensor) -> Tensor:
    """Make the tensors on the device that are stepped in place of a part."""
    found: dict[str, Tensor] = {}
    for key, tensor, at in sources:
        elements = buffer[at : at + part.of_host(tensor).nbytes].view(tensor.dtype)
        found[key] = part.shaped(elements, tensor)
    piece, piece.grad = found.pop(WEIGHT), found.pop(GRADIENT).data  # whose version counter is its own
    weight = part.of
    if weight.entry:
        scalars = {key: value.clone() for key, value in weight.scalars.items()}
        step.state[piece] = {key: found.get(key, scalars.get(key, value)) for key, value in weight.entry.items()}
    return piece


def _portions(weights: Iterable[SteppedWeight], nbytes: int) -> Iterator[Portion]:
    """Cut weights into portions, each of which fits into a buffer but for a weight that cannot be cut (Rule 2)."""
    portion = Portion([], [], 0)
    for weight in weights:
        first, numel = 0, weight.param.numel()
        while first < numel or not first:
            count, room = numel - first, nbytes - portion.nbytes
            if weight.cuts and weight.nbytes(numel) > nbytes and weight.nbytes(count) > room:
                count = weight.most(room)
                if not count and not portion.parts:  # of a buffer that is too small for one vector
                    count = numel - first
            elif weight.nbytes(count) > room and portion.parts:
                count = 0
            if not count and numel:
                yield portion
                portion = Portion([], [], 0)
                continue
            part = SteppedPart(weight, first, count, first + count == numel)
            portion = portion.added(part)
            first += count or 1
    if portion.parts:
        yield portion


def _finish(portion: Portion) -> None:
    """Note that a portion is down."""
    for part in portion.parts:
        if part.is_last and part.of.conversion is not None:
            part.of.conversion.done(part.of.param)


def _by_memory(rows: Sequence[tuple[Tensor, Tensor]], host: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Divide copies into those that the device makes by itself and those through staging buffers."""
    some: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
    for row in rows:
        if row[host].numel():
            some[row[host].is_pinned()].append(row)
    return [rows for rows in some.values() if rows]


def _within(tensors: Iterable[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Divide tensors into lists of at most these bytes, or of one larger tensor."""
    some: list[Tensor] = []
    for tensor in tensors:
        if some and sum(one.nbytes for one in some) + tensor.nbytes > nbytes:
            yield some
            some = []
        some.append(tensor)
    yield some


def _stays(key: str, value: Tensor) -> bool:
    """Whether torch's code reads a tensor of the state on the host, where it stays (Rule 3)."""
    return key in SCALARS and value.dtype in (torch.float32, torch.float64)


def _count(groups: Iterable[Group]) -> int:
    """Count the parameters of groups."""
    return sum(len(group["params"]) for group in groups)


def _chooses(group: Group) -> bool:
    """Whether torch chooses between a loop and its kernels for lists (Rule 5)."""
    return group.get("foreach") is None and not group.get("fused")


def _lies_as(param: Tensor, value: Any) -> bool:
    """Whether a value of the state lies in memory as its weight does, if it has as many elements."""
    return not isinstance(value, Tensor) or is_scalar(value) or value.shape != param.shape or same_order(param, value)


def _can_go(value: Any) -> bool:
    """Whether a tensor can go up as it is."""
    return not isinstance(value, Tensor) or (value.is_cpu and value.layout is torch.strided and is_dense(value))
