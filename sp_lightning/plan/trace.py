"""Run one plain step of a model without a device, and note what each visit to a unit computes and allocates there.

1. A visit lasts from the moment a unit is needed until other code runs. Neither the window nor the policy of
   activations changes what is in it, so one trace serves all. Its bytes count from those that were there as it began.
2. Parameters take nothing here, and neither do casts of them with which they travel. A gradient counts until those of
   its unit are complete; then they count once, packed, until the next unit's are.
3. Of many blocks that are alike three run; the middle one's visits stand for those of all others.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from ..autograd.backward_pass import in_backward
from ..compat.tensors import operator_of, schema_of, storage_id
from ..core.unit_numbers import aligned
from ..memory.partition import Unit
from .fakes import HALVES, FakeTensors, tensors_of

aten = torch.ops.aten
PLAIN = int, float, str, tuple, type(None)  # attributes that may decide what a block does
ALIKE = 3  # blocks that run in the place of more that are alike
FREE = {aten._unsafe_view, aten.set_, aten.resize_, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
LOOKS_UP = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward}


@dataclass
class Visit:
    """A visit to a unit, or code outside of all: its work and its bytes."""

    unit: int | None
    backward: bool
    in_use: tuple[int, ...] = ()  # units whose code runs around this one
    flops: float = 0.0  # of products in half precision
    fp32_flops: float = 0.0
    moved: float = 0.0  # bytes of device memory that all but products read and write
    peak: float = 0  # the most bytes beside weights, less those that were there as it began
    gradients: float = 0  # bytes of gradients at that moment
    grown: float = 0  # bytes there as it ends, less those as it began
    saved: float = 0  # bytes that autograd saved in it, and in no later visit
    inner: float = 0  # of these, what a forward that runs again makes again
    arguments: float = 0  # bytes of its arguments that carry a gradient
    held: float = 0  # of these, what nothing but a forward that runs again needs

    def towards(self, other: Visit, share: float) -> Visit:
        """Return the visit on the line from this one (0) through the other (1)."""
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)[3:]}
        return replace(self, **{name: one + share * (two - one) for name, (one, two) in pairs.items()})


@dataclass(frozen=True)
class Trace:
    """The visits of a step, and what it found out about weights."""

    visits: tuple[Visit, ...]
    batch: float  # bytes
    buffers: int
    narrow: frozenset[int] = frozenset()  # ids of weights that were cast to autocast's type, and not used otherwise
    cache: float = 0  # bytes of keys and values after an answer's pass

    def between(self, other: Trace, share: float) -> Trace | None:
        """Return the trace on the line from this one (0) through the other (1); None if their visits differ."""
        if [(v.unit, v.backward) for v in self.visits] != [(v.unit, v.backward) for v in other.visits]:
            return None
        visits = [one.towards(two, share) for one, two in zip(self.visits, other.visits, strict=True)]
        batch, cache = (
            one + share * (two - one) for one, two in ((self.batch, other.batch), (self.cache, other.cache))
        )
        return replace(self, visits=tuple(visits), batch=batch, cache=cache)


def trace(
    module: nn.Module,
    units: Sequence[Unit],
    batch: Any,
    run: Callable[[], Any],
    tensors: FakeTensors,
    *,
    trains: bool = True,
    may_cast: bool = False,
    whole: bool = False,
) -> Trace:
    """Run one step, or a forward alone, and return its trace.

    Args:
        module: A module that was made on ``tensors``.
        units: All units of the module.
        batch: Its tensors are on the device throughout.
        run: Returns the loss, or an output that contains or leads to it.
        tensors: The context, still entered.
        trains: Whether there is a backward.
        may_cast: Whether weights that autocast casts travel as these casts.
        whole: Every block runs.
    """
    with _fewer_blocks(module, units, whole) as (ran, every):
        recorder = _Recorder(units, may_cast)
        buffers = sum(recorder.add(buffer, 0) for buffer in module.buffers())
        given = sum(recorder.add(tensor, 0) for tensor in tensors_in(batch))
        tensors.observe = recorder.observe
        try:
            with recorder.listening(), torch.set_grad_enabled(trains):
                cache = recorder.step(run, trains)
        finally:
            tensors.observe = None
    visits = _repeated(recorder.visits, ran, every)
    if visits is None:
        return trace(module, units, batch, run, tensors, trains=trains, may_cast=may_cast, whole=True)
    narrow = recorder.narrow - recorder.used_as_is
    for index in every[len(ran) :]:
        pairs = zip(units[every[0]].params, units[index].params, strict=True)
        narrow |= {id(other) for (_, one), (_, other) in pairs if id(one) in narrow}
    return Trace(tuple(visits), given, buffers, frozenset(narrow), cache * len(every or [0]) // len(ran or [0]))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch or an output: of lists, tuples, mappings and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple | set):
        for item in tree:
            yield from tensors_in(item)
    elif hasattr(tree, "values") and callable(tree.values):
        yield from tensors_in(list(tree.values()))
    elif hasattr(tree, "__dataclass_fields__"):
        yield from tensors_in(list(vars(tree).values()))


@dataclass(eq=False)
class _Storage:
    """Bytes on the device."""

    nbytes: int
    made: Visit
    freed: object  # a reference that tells when it is
    saved: Visit | None = None  # the last visit in which autograd saved it
    is_inner: bool = False
    argument: Visit | None = None  # the last visit that has it as an argument


class _Recorder:
    """Divides what is allocated and computed into visits."""

    def __init__(self, units: Sequence[Unit], may_cast: bool) -> None:
        self.visits = [Visit(None, False)]
        self.narrow: set[int] = set()
        self.used_as_is: set[int] = set()
        self._units, self._may_cast = units, may_cast
        self._live: dict[int, _Storage] = {}
        self._gradients = self._packed = 0
        self._stack: list[int] = []
        weights = [(p, unit.index) for unit in units for _, p in unit.params if p.layout is torch.strided]
        self._weights = {storage_id(p.untyped_storage()): (p, index) for p, index in weights}
        self._casts: set[int] = set()  # storages of casts of weights
        self._complete: dict[int, list[Tensor]] = defaultdict(list)  # by unit, its weights whose gradients are there

    # ---- a step

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the units' forwards, to gradients, and to what autograd saves."""
        with contextlib.ExitStack() as stack:
            for unit in self._units:
                for _, module in unit.modules if not unit.resident else ():
                    begin = functools.partial(self._begin_unit, unit.index)
                    stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)
                    stack.callback(module.register_forward_hook(self._end_unit).remove)
                for _, parameter in unit.params:
                    if parameter.requires_grad:
                        came = functools.partial(self._came, unit)
                        stack.callback(parameter.register_post_accumulate_grad_hook(came).remove)  # type: ignore[no-untyped-call]
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            yield

    def step(self, run: Callable[[], Any], backward: bool) -> int:
        """Run the step; return the bytes of keys and values that its output has."""
        output = run()
        if not backward:
            layers = getattr(getattr(output, "past_key_values", None), "layers", ())
            kept = [t for layer in layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
            found = [self._storage_of(tensor) for tensor in kept if isinstance(tensor, Tensor)]
            return sum(storage.nbytes for storage in {*found} if storage)
        loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", output)
        losses = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
        losses = [tensor for tensor in losses if tensor.requires_grad]
        torch.autograd.backward(losses, [torch.ones_like(tensor) for tensor in losses])
        for index in list(self._complete):
            self._send(index)
        return 0

    def _begin_unit(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter(unit, in_backward())
        self._stack.append(unit)
        for storage in {self._storage_of(tensor) for tensor in tensors_in([args, kwargs]) if tensor.requires_grad}:
            if storage:
                storage.argument = self.visits[-1]
                storage.argument.arguments += storage.nbytes
                _leave(storage)

    def _end_unit(self, *_: Any) -> None:
        self._stack.pop()

    def _enter(self, unit: int | None, backward: bool) -> None:
        now = self.visits[-1]
        if (unit, backward) != (now.unit, now.backward) and (unit is None or not self._units[unit].resident):
            around = tuple(dict.fromkeys(index for index in self._stack if index != unit))
            self.visits.append(Visit(unit, backward, around, gradients=self._gradients))

    # ---- bytes

    def _storage_of(self, tensor: Tensor) -> _Storage | None:
        return self._live.get(storage_id(tensor.untyped_storage())) if tensor.layout is torch.strided else None

    def add(self, tensor: Tensor, counts: int | None = None) -> int:
        """Count a tensor's storage if it is new, as these bytes if they are given; return its bytes."""
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._live or key in self._weights:
            return 0
        nbytes = aligned(storage.nbytes())
        freed = weakref.ref(storage, functools.partial(_free, weakref.ref(self), key))
        self._live[key] = _Storage(nbytes if counts is None else counts, self.visits[-1], freed)
        self.change(self._live[key].nbytes)
        return nbytes

    def free(self, key: int) -> None:
        """Count a storage that is gone."""
        self._casts.discard(key)
        storage = self._live.pop(key)
        self.change(-storage.nbytes)
        if storage.argument is not None and not in_backward():
            storage.argument.held += storage.nbytes

    def change(self, nbytes: int) -> None:
        """Count bytes that came, or went."""
        visit = self.visits[-1]
        visit.grown += nbytes
        if visit.grown > visit.peak:
            visit.peak, visit.gradients = visit.grown, self._gradients

    def _came(self, unit: Unit, parameter: Tensor) -> None:
        """Take note of a gradient that is complete (Rule 2)."""
        self._complete[unit.index].append(parameter)
        self._gradients += self._travels(parameter)
        if len(self._complete[unit.index]) == sum(p.requires_grad for _, p in unit.params):
            self._send(unit.index)

    def _send(self, unit: int) -> None:
        """Pack a unit's gradients, and free those that were packed before them."""
        params = [p for p in self._complete.pop(unit) if p.grad is not None]
        nbytes = sum(map(self._travels, params))
        self.change(nbytes - self._packed)
        self._gradients, self._packed = self._gradients - self._packed, nbytes
        self.visits[-1].moved += 2 * nbytes
        for parameter in params:
            parameter.grad = None

    def _is_narrow(self, parameter: Tensor) -> bool:
        return self._may_cast and id(parameter) in self.narrow and id(parameter) not in self.used_as_is

    def _travels(self, parameter: Tensor) -> int:
        return aligned(parameter.nbytes // 2 if self._is_narrow(parameter) else parameter.nbytes)

    # ---- what autograd saves

    def _pack(self, tensor: Tensor) -> tuple[int | None, Callable[[], Tensor]]:
        kept, storage, visit = tensor.detach(), self._storage_of(tensor), self.visits[-1]
        unit = visit.unit if self._stack and not in_backward() else None
        if storage is not None and not self._may_cast and storage_id(tensor.untyped_storage()) in self._casts:
            return unit, functools.partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if storage is not None and unit is not None and storage.saved is not visit:
            if storage.saved is None and storage.made is visit:
                storage.is_inner, visit.inner = True, visit.inner + storage.nbytes
            else:
                _leave(storage)
            if storage.saved is not None:
                storage.saved.saved -= storage.nbytes
            storage.saved, visit.saved = visit, visit.saved + storage.nbytes
        return unit, lambda: kept

    def _unpack(self, packed: tuple[int | None, Callable[[], Tensor]]) -> Tensor:
        unit, kept = packed
        if unit is not None:
            self._enter(unit, True)
        return kept()

    # ---- work

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that ran: its work, and the storages that it made."""
        results, operator = tensors_of((out,)), operator_of(func)
        read = tensors_of(args, kwargs)
        known = {storage_id(t.untyped_storage()) for t in read if t.layout is torch.strided}
        made = [t for t in results if t.layout is torch.strided and storage_id(t.untyped_storage()) not in known]
        weights = [self._weights[key] for key in known if key in self._weights]
        for _, unit in weights:
            if unit not in self._stack:
                self._enter(unit, in_backward())  # code of another module reads it, such as a head that is a table
        if not weights and not self._stack and made and not in_backward():
            self._enter(None, False)
        if weights and made and not in_backward():
            self._note_use(func, weights, made[0])
        if self._may_cast and func is aten._to_copy.default and made and self._is_wire(read[0], made[0]):
            return
        for tensor in made:
            self.add(tensor)
        visit, count = self.visits[-1], flop_registry.get(operator)
        if count is not None and read[0].dtype in HALVES:
            visit.flops += count(*args, **kwargs, out_val=out)
        elif count is not None:
            visit.fp32_flops += count(*args, **kwargs, out_val=out)
        elif operator not in FREE and (made or schema_of(func).is_mutable):
            visit.moved += _moved(operator, read, made)

    def _note_use(self, func: Any, weights: Sequence[tuple[Tensor, int]], made: Tensor) -> None:
        """Take note of a weight that is cast, or used as it is."""
        weight, _ = weights[0]
        if func is not aten._to_copy.default or made.dtype not in HALVES or weight.dtype is not torch.float32:
            self.used_as_is.update(id(one) for one, _ in weights)
        elif id(weight) not in self.used_as_is:  # else the run leaves the cast to autograd, which saves it
            self.narrow.add(id(weight))
            self._casts.add(storage_id(made.untyped_storage()))

    def _is_wire(self, source: Tensor, made: Tensor) -> bool:
        """Count a cast that no run makes: of a weight that travels as that cast, or of its gradient."""
        if storage_id(made.untyped_storage()) in self._casts:
            self.add(made, 0)
            return True
        shapes = {p.shape for p, _ in self._weights.values() if p.requires_grad and self._is_narrow(p)}
        storage = self._storage_of(source)
        if not in_backward() or source.dtype not in HALVES or made.shape not in shapes or storage is None:
            return False
        self.change(-storage.nbytes)
        self.add(made, storage.nbytes)
        storage.nbytes = 0
        return True


def _leave(storage: _Storage) -> None:
    """Take note that a storage is used outside of the visit that made it: it outlives a forward that runs again."""
    if storage.is_inner:
        storage.is_inner, storage.made.inner = False, storage.made.inner - storage.nbytes


def _free(refer: Callable[[], _Recorder | None], key: int, _: object) -> None:
    recorder = refer()
    if recorder is not None:
        recorder.free(key)


def _moved(operator: Any, read: list[Tensor], made: list[Tensor]) -> float:
    """Return the bytes of device memory that an operator reads and writes."""
    written = sum(map(_nbytes, made or read[:1]))
    return written + (written + sum(map(_nbytes, read[1:])) if operator in LOOKS_UP else sum(map(_nbytes, read)))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor has in memory, where some repeat."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else tensor.nbytes


# ---- blocks that are alike (Rule 3)


@contextlib.contextmanager
def _fewer_blocks(module: nn.Module, units: Sequence[Unit], whole: bool) -> Iterator[tuple[list[int], list[int]]]:
    """Leave three of the longest run of units that are alike; yield the indices of those that run, and of all."""
    places = {id(inner): unit.index for unit in units if len(unit.modules) == 1 for _, inner in unit.modules}
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child) > 2 * ALIKE]
    stacks = [one for one in lists if all(id(block) in places for block in one) and _are_alike(one)]
    if whole or not stacks:
        yield [], []
        return
    stack = max(stacks, key=len)
    blocks, every = stack._modules, [places[id(block)] for block in stack]
    stack._modules = dict(list(blocks.items())[:ALIKE])
    try:
        yield every[:ALIKE], every
    finally:
        stack._modules = blocks


def _are_alike(blocks: nn.ModuleList) -> bool:
    """Whether blocks do the same: what decides their operators differs at most in numbers that are their indices."""
    first = _described(blocks[0])
    for index, block in enumerate(blocks):
        other = _described(block)
        differ = [(value, other.get(key)) for key, value in first.items() if value != other.get(key)]
        if first.keys() != other.keys() or any(pair != (0, index) for pair in differ):
            return False
    return True


def _described(block: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the types, tensors and plain attributes of the modules of a block."""
    found: dict[tuple[str, str], Any] = {}
    for name, child in block.named_modules():
        tensors = {key: each for key, each in (*child._parameters.items(), *child._buffers.items()) if each is not None}
        found |= {(name, key): (each.shape, each.dtype, each.requires_grad) for key, each in tensors.items()}
        plain = {key: each for key, each in vars(child).items() if isinstance(each, PLAIN)}
        found |= {(name, "class"): type(child)} | {(name, key): value for key, value in plain.items()}
    return found


def _repeated(visits: list[Visit], ran: list[int], every: list[int]) -> list[Visit] | None:
    """Repeat the visits of the middle block; None if blocks are not visited one after the other."""
    if not ran:
        return visits
    first, middle, last = ran
    order = [visit.unit for visit in visits]
    between = [{order[place - 1], *order[place + 1 : place + 2]} for place, unit in enumerate(order) if unit == middle]
    if not between or any(neighbours != {first, last} for neighbours in between):
        return None
    found = []
    for visit in visits:
        around = tuple(every[-1] if index == last else index for index in visit.in_use)
        alike = every[1:-1] if visit.unit == middle else [every[-1] if visit.unit == last else visit.unit]
        found += [replace(visit, unit=unit, in_use=around) for unit in (reversed(alike) if visit.backward else alike)]
    return found
