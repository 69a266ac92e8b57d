"""Run one step of a model without a device, and note what each visit to a unit takes there beside weights.

1. A visit lasts from the moment a unit is needed until another unit is. What is on the device beside weights does not
   depend on the window, so one trace serves every window.
2. Parameters take nothing here, and neither do casts of them that autograd saves: a run makes those again in backward.
   A gradient counts until its unit's gradients are complete; then they count once, packed, until the next unit's are.
3. Of many blocks that are alike four run; the others' visits are repeated from those between the first and the last.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from ..autograd.backward_pass import in_backward
from ..compat.tensors import operator_of, schema_of, storage_id
from ..core.unit_numbers import ALIGNMENT, aligned
from ..memory.partition import Unit
from .fakes import HALVES, FakeTensors, tensors_of

aten = torch.ops.aten
ALIKE = 4  # blocks that run in the place of more that are alike
FREE = {aten._unsafe_view, aten.set_, aten.resize_, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
FILLS = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_}
LOOKS_UP = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward}


@dataclass
class Work:
    """The work of a device."""

    flops: float = 0.0  # in half precision
    fp32_flops: float = 0.0
    moved: float = 0.0  # bytes of device memory that all but products read and write
    mesh: float = 0.0  # bytes sent to devices with other shards

    def towards(self, other: Work, share: float) -> Work:
        """Return the work on the line from this one (0) through the other (1)."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Work(*(max(0.0, one + share * (two - one)) for one, two in pairs))


@dataclass
class Visit:
    """The time from the moment a unit is needed until another one is."""

    unit: int | None  # None before the first one
    backward: bool
    in_use: tuple[int, ...] = ()  # units whose code runs around this one
    before: int = 0  # bytes beside weights as it begins
    peak: int = 0
    gradients: int = 0  # of the peak
    forward: Work = field(default_factory=lambda: Work())
    gradient: Work = field(default_factory=lambda: Work())  # in autograd's backward
    down: int = 0  # activations that go to the host
    after: int = 0  # bytes beside weights as it ends


@dataclass(frozen=True)
class Trace:
    """The visits of a step, and what it found out about weights."""

    visits: tuple[Visit, ...]
    batch: int  # bytes
    buffers: int
    narrow: frozenset[int] = frozenset()  # ids of weights that were cast to autocast's type, and not used otherwise
    cache: int = 0  # bytes of keys and values after an answer's pass

    @property
    def order(self) -> list[int]:
        """Return the units as they are visited."""
        return [visit.unit for visit in self.visits if visit.unit is not None]

    def between(self, other: Trace, share: float) -> Trace | None:
        """Return the trace on the line from this one (0) through the other (1); None if their visits differ."""
        if [(v.unit, v.backward) for v in self.visits] != [(v.unit, v.backward) for v in other.visits]:
            return None

        def line(one: float, two: float) -> float:
            return max(0.0, one + share * (two - one))

        def visit(one: Visit, two: Visit) -> Visit:
            sizes = ("before", "peak", "gradients", "down", "after")
            works: dict[str, Any] = {
                name: getattr(one, name).towards(getattr(two, name), share) for name in ("forward", "gradient")
            }
            numbers: dict[str, Any] = {n: int(line(getattr(one, n), getattr(two, n))) for n in sizes}
            return replace(one, **works, **numbers)

        pairs = zip(self.visits, other.visits, strict=True)
        batch, cache = int(line(self.batch, other.batch)), int(line(self.cache, other.cache))
        return replace(self, visits=tuple(visit(*pair) for pair in pairs), batch=batch, cache=cache)


def trace(
    module: nn.Module,
    units: Sequence[Unit],
    batch: Any,
    run: Callable[[], Any],
    tensors: FakeTensors,
    *,
    activations: str = "keep",
    backward: bool = True,
    grad: bool = True,
) -> Trace:
    """Run one step, or a forward alone, and return its trace.

    Args:
        module: A module that was made on ``tensors``.
        units: All units of the module.
        batch: Its tensors are on the device throughout.
        run: Returns the loss, or an output that contains or leads to it.
        tensors: The context, still entered.
        activations: The policy of the strategy's option.
        backward: False for a forward alone.
        grad: Whether autograd records the forward.
    """
    with _fewer_blocks(module, units) as cut:
        recorder = _Recorder(units, activations)
        buffers = sum(recorder.add(buffer, fixed=True) for buffer in module.buffers())
        given = sum(recorder.add(tensor, fixed=True) for tensor in tensors_in(batch))
        tensors.observe = recorder.observe
        try:
            with recorder.entered(), torch.set_grad_enabled(grad):
                recorder.step(run, backward)
        finally:
            tensors.observe = None
    visits = recorder.visits
    narrow = recorder.cast - recorder.used_as_is
    cache = recorder.cache
    if cut is not None:
        ran, everything = cut
        expanded = _expanded(visits, ran, everything)
        if expanded is None:
            return trace_whole(
                module, units, batch, run, tensors, activations=activations, backward=backward, grad=grad
            )
        visits, cache = expanded, cache * len(everything) // len(ran)
        for index in everything[len(ran) :]:
            pairs = zip(units[ran[0]].params, units[index].params, strict=True)
            narrow |= {id(other) for (_, one), (_, other) in pairs if id(one) in narrow}
    return Trace(tuple(visits), given, buffers, frozenset(narrow), cache)


def trace_whole(*args: Any, **kwargs: Any) -> Trace:
    """Trace a step in which every block runs."""
    with _all_blocks():
        return trace(*args, **kwargs)


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


@dataclass
class _Allocation:
    nbytes: int
    reference: object  # to the storage, which tells when that is freed


@dataclass(eq=False)
class _Away:
    """A saved tensor that waits on the host."""

    unit: int
    like: tuple[Any, ...]
    nbytes: int
    source: Tensor | None
    uses: int = 1
    back: Tensor | None = None


class _Recorder:
    """Divides what is allocated and computed into visits."""

    def __init__(self, units: Sequence[Unit], activations: str) -> None:
        self.visits = [Visit(None, False)]
        self.cast: set[int] = set()
        self.used_as_is: set[int] = set()
        self.cache = 0
        self._units = units
        self._offloads = "offload" in activations
        self._recomputes = "recompute" in activations
        self._live: dict[int, _Allocation] = {}
        self._now = 0
        self._gradients = 0
        self._packed = 0
        self._stack: list[int] = []
        self._last: int | None = None
        weights = [(p, unit.index) for unit in units for _, p in unit.params if p.layout is torch.strided]
        self._weights = {storage_id(p.untyped_storage()): p for p, _ in weights}
        self._unit_of = {id(p): index for p, index in weights}
        self._casts: set[int] = set()  # storages
        self._complete: dict[int, set[int]] = defaultdict(set)  # by unit, its weights whose gradients are there
        self._away: dict[tuple[Any, ...], _Away] = {}  # of the unit whose forward runs
        self._leaving: list[_Away] = []
        self._of_unit: dict[int, list[_Away]] = defaultdict(list)
        refer = weakref.ref(self)

        def freed(key: int, _: object) -> None:
            if (recorder := refer()) is not None:
                recorder._free(key)

        self._freed = freed

    # ---- a step

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Wrap the units' forwards, listen to gradients and to what autograd saves."""
        with contextlib.ExitStack() as stack:
            for unit in self._units:
                for _, module in unit.modules if not unit.resident else ():
                    had, vars(module)["forward"] = vars(module).get("forward"), self._wrapped(unit.index, module)
                    stack.callback(_restore, module, had)
                for _, parameter in unit.params:
                    if parameter.requires_grad:
                        came = functools.partial(self._came, unit.index)
                        heard = parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
                        stack.callback(heard.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            yield

    def step(self, run: Callable[[], Any], backward: bool) -> None:
        """Run the step."""
        output = run()
        if not backward:
            self.cache = sum(allocation.nbytes for allocation in self._in(getattr(output, "past_key_values", None)))
            self.visits[-1].after = self._now
            return
        loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", output)
        found = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
        losses = [tensor for tensor in found if tensor.requires_grad]
        self._leaving, self._away = [], {}
        torch.autograd.backward(losses, [torch.ones_like(tensor) for tensor in losses])
        for unit in list(self._complete):
            self._send(unit)
        self.visits[-1].after = self._now

    def _in(self, cache: Any) -> Iterator[_Allocation]:
        layers = getattr(cache, "layers", ())
        for tensor in (t for layer in layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))):
            if isinstance(tensor, Tensor) and (found := self._live.get(storage_id(tensor.untyped_storage()))):
                yield found

    def _wrapped(self, unit: int, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._inside(unit):
                return forward(*args, **kwargs)

        def again(*args: Any, **kwargs: Any) -> Any:
            with self._inside(unit):
                return checkpoint(
                    inside, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **kwargs
                )

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            recomputes = self._recomputes and torch.is_grad_enabled() and unit not in self._stack
            return again(*args, **kwargs) if recomputes else inside(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _inside(self, unit: int) -> Iterator[None]:
        self._enter(unit, in_backward())
        self._stack.append(unit)
        try:
            yield
        finally:
            self._stack.pop()
            if unit not in self._stack and not in_backward():
                for away in self._leaving:
                    away.source = None
                self._leaving, self._away = list(self._away.values()), {}

    def _enter(self, unit: int, backward: bool) -> None:
        if unit == self._last or self._units[unit].resident:
            return
        self._last = unit
        self.visits[-1].after = self._now
        around = tuple(dict.fromkeys(index for index in self._stack if index != unit))
        self.visits.append(Visit(unit, backward, around, self._now, self._now, self._gradients))

    # ---- bytes

    def add(self, tensor: Tensor, fixed: bool = False) -> int:
        """Count a tensor's storage if it is new; return its bytes."""
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._live or key in self._weights:
            return 0
        nbytes = aligned(storage.nbytes())
        self._live[key] = _Allocation(nbytes, weakref.ref(storage, functools.partial(self._freed, key)))
        if not fixed:
            self._change(nbytes)
        else:
            self._live[key].nbytes = 0
        return nbytes

    def _free(self, key: int) -> None:
        self._casts.discard(key)
        self._change(-self._live.pop(key).nbytes)

    def _change(self, nbytes: int, of_gradients: int = 0) -> None:
        self._now += nbytes
        self._gradients += of_gradients
        visit = self.visits[-1]
        if self._now > visit.peak:
            visit.peak, visit.gradients = self._now, self._gradients

    def _came(self, unit: int, parameter: Tensor) -> None:
        """Take note of a gradient that is complete (Rule 2)."""
        there = self._complete[unit]
        there.add(id(parameter))
        assert parameter.grad is not None
        self._gradients += aligned(parameter.grad.untyped_storage().nbytes())
        if len(there) == sum(p.requires_grad for _, p in self._units[unit].params):
            self._send(unit)

    def _send(self, unit: int) -> None:
        """Pack a unit's gradients, and free those that were packed before them."""
        there = self._complete.pop(unit)
        params = [p for _, p in self._units[unit].params if id(p) in there and p.grad is not None]
        nbytes = sum(aligned(p.nbytes) for p in params)
        self._change(-self._packed, -self._packed)
        self._change(nbytes, nbytes)
        self._packed = nbytes
        self.visits[-1].gradient.moved += 2 * nbytes
        for parameter in params:
            assert parameter.grad is not None
            self._gradients -= aligned(parameter.grad.untyped_storage().nbytes())
            parameter.grad = None

    # ---- what autograd saves

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor.detach()
        key = storage_id(tensor.untyped_storage())
        unit = self._stack[-1] if self._stack else None
        like = tensor.shape, tensor.stride(), tensor.dtype
        if key in self._casts:
            return _Away(-1 if unit is None else unit, like, -1, None)
        if unit is None or in_backward():
            return tensor.detach()
        if key in self._weights or not self._offloads:
            return unit, tensor.detach()
        known = self._live.get(key)
        if known is None or tensor.nbytes < ALIGNMENT:
            return unit, tensor.detach()
        if self._recomputes and not known.nbytes:  # only arguments that carry a gradient go down
            return unit, tensor.detach()
        place = key, tensor.storage_offset(), *like, tensor._version
        if place in self._away:
            self._away[place].uses += 1
        else:
            away = self._away[place] = _Away(unit, like, tensor.nbytes, tensor.detach())
            self._of_unit[unit].append(away)
            self.visits[-1].down += tensor.nbytes
        return self._away[place]

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit = packed.unit if isinstance(packed, _Away) else packed[0]
        if unit >= 0:
            self._enter(unit, True)
        if not isinstance(packed, _Away):
            return packed[1]  # type: ignore[no-any-return]
        shape, stride, dtype = packed.like
        if packed.nbytes < 0:  # a cast of a weight, made again
            return torch.empty_strided(shape, stride, dtype=dtype)
        for away in self._of_unit.pop(unit, ()):
            away.source, away.back = None, _made(away)
        made = _made(packed) if packed.back is None else packed.back
        packed.uses -= 1
        packed.back = made if packed.uses > 0 else None
        return made

    # ---- work

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that ran: its work, and the storages that it made."""
        results, operator = tensors_of((out,)), operator_of(func)
        read = tensors_of(args, kwargs)
        known = {storage_id(t.untyped_storage()) for t in read if t.layout is torch.strided}
        self._note_weights(func, operator, known, results)
        made = [t for t in results if t.layout is torch.strided and storage_id(t.untyped_storage()) not in known]
        for tensor in made:
            self.add(tensor)
        work = self.visits[-1].gradient if in_backward() else self.visits[-1].forward
        if (count := flop_registry.get(operator)) is not None:
            flops = count(*args, **kwargs, out_val=out)
            if read[0].dtype in HALVES:
                work.flops += flops
            else:
                work.fp32_flops += flops
        elif "c10d" in str(operator):
            work.mesh += sum(tensor.nbytes for tensor in results)
        elif operator not in FREE and (made or schema_of(func).is_mutable):
            work.moved += _moved(func, operator, args, read, made)

    def _note_weights(self, func: Any, operator: Any, read: set[int], results: list[Tensor]) -> None:
        touched = [self._weights[key] for key in read if key in self._weights]
        for weight in touched:
            if (unit := self._unit_of[id(weight)]) not in self._stack:
                self._enter(unit, in_backward())  # code of another module reads it, such as a head that is a table
        if not touched:
            return
        if func is aten._to_copy.default and results[0].dtype in HALVES and touched[0].dtype is torch.float32:
            self.cast.add(id(touched[0]))
            if id(touched[0]) not in self.used_as_is:  # else the run leaves the cast to autograd, which saves it
                self._casts.add(storage_id(results[0].untyped_storage()))
        elif not in_backward() and any(storage_id(t.untyped_storage()) not in read for t in results):
            self.used_as_is.update(id(weight) for weight in touched)


def _moved(func: Any, operator: Any, args: Any, read: list[Tensor], made: list[Tensor]) -> float:
    """Return the bytes of device memory that an operator reads and writes."""
    if not made:  # it writes in place
        others = sum(map(_nbytes, read[1:]))
        return others + _nbytes(args[0] if isinstance(args[0], Tensor) else read[0]) * (1 if operator in FILLS else 2)
    written = sum(map(_nbytes, made))
    if operator in LOOKS_UP:
        return 2 * written + sum(map(_nbytes, read[1:]))
    return written + sum(map(_nbytes, read))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor has in memory, where some repeat."""
    nbytes = tensor.nbytes
    if nbytes and tensor.layout is torch.strided and 0 in tensor.stride():
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            nbytes //= 1 if stride else size
    return nbytes


def _made(away: _Away) -> Tensor:
    shape, stride, dtype = away.like
    return torch.empty_strided(shape, stride, dtype=dtype)


def _restore(module: nn.Module, forward: Any) -> None:
    del vars(module)["forward"]
    if forward is not None:
        vars(module)["forward"] = forward


# ---- blocks that are alike (Rule 3)

_whole = [False]


@contextlib.contextmanager
def _all_blocks() -> Iterator[None]:
    _whole[0] = True
    try:
        yield
    finally:
        _whole[0] = False


@contextlib.contextmanager
def _fewer_blocks(module: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[list[int], list[int]] | None]:
    """Leave four of the longest run of units that are alike; yield the indices of those that run, and of all."""
    places = {id(inner): unit.index for unit in units if len(unit.modules) == 1 for _, inner in unit.modules}
    found: nn.ModuleList | None = None
    for child in module.modules():
        if isinstance(child, nn.ModuleList) and len(child) > max(2 * ALIKE, len(found or ())):
            first = _described(child[0])
            if all(id(block) in places for block in child) and all(
                _is_alike(first, _described(block), index) for index, block in enumerate(child)
            ):
                found = child
    if found is None or _whole[0]:
        yield None
        return
    blocks = list(found._modules.items())
    everything = [places[id(block)] for _, block in blocks]
    found._modules = dict(blocks[:ALIKE])
    try:
        yield everything[:ALIKE], everything
    finally:
        found._modules = dict(blocks)


def _described(block: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """List what decides which operators the modules of a block run: their types, tensors and plain attributes."""
    found = []
    for name, child in block.named_modules():
        plain = {
            key: value
            for key, value in vars(child).items()
            if isinstance(value, int | float | str | bool | tuple | None.__class__) and key != "training"
        }
        tensors = [
            (key, each.shape, each.dtype, each.requires_grad)
            for key, each in (*child._parameters.items(), *child._buffers.items())
            if each is not None
        ]
        found.append(((name, type(child), tensors), plain))
    return found


def _is_alike(first: list[tuple[Any, dict[str, Any]]], other: list[tuple[Any, dict[str, Any]]], index: int) -> bool:
    """Whether two blocks do the same: they differ at most in numbers that are their indices, 0 and this one."""
    return len(first) == len(other) and all(
        kind == other_kind
        and plain.keys() == other_plain.keys()
        and all(value == other_plain[key] or (value, other_plain[key]) == (0, index) for key, value in plain.items())
        for (kind, plain), (other_kind, other_plain) in zip(first, other, strict=True)
    )


def _expanded(visits: list[Visit], ran: list[int], everything: list[int]) -> list[Visit] | None:
    """Repeat the visits of the blocks in the middle; None if those that ran are not visited as a stack is."""
    places = [place for place, visit in enumerate(visits) if visit.unit in set(ran)]
    order = [visits[place].unit for place in places]
    forward = places[: len(ran)]
    has_backward = len(places) == 2 * len(ran) - (visits[places[len(ran) - 1]].unit == ran[-1] and len(places) % 2)
    if order[: len(ran)] != ran or forward != list(range(forward[0], forward[0] + len(ran))):
        return None
    back = places[len(ran) :]
    if back and (not has_backward or order[len(ran) :] != list(reversed(ran))[-len(back) :]):
        return None
    more = len(everything) - len(ran)
    second, third = (visits[place] for place in forward[ALIKE - 3 : ALIKE - 1])
    kept = third.before - second.before
    if kept != third.after - second.after or second.peak - second.before != third.peak - third.before:
        return None
    last_of = dict(zip(ran, [*everything[: len(ran) - 1], everything[-1]], strict=True))
    middle = len(ran) - 2  # the block that is repeated: the last but one

    def moved(visit: Visit, by: int, unit: int | None) -> Visit:
        shifted = {name: getattr(visit, name) + by for name in ("before", "peak", "after")}
        around = tuple(last_of.get(index, index) for index in visit.in_use)
        return replace(visit, unit=unit, in_use=around, **shifted)

    result: list[Visit] = []
    for place, visit in enumerate(visits):
        unit = None if visit.unit is None else last_of.get(visit.unit, visit.unit)
        is_back = place in set(back)
        if visit.unit == ran[middle] and place in forward:
            for number in range(more + 1):
                result.append(moved(visit, number * kept, everything[middle + number]))
        elif visit.unit == ran[middle] and is_back:
            for number in range(more, -1, -1):
                result.append(moved(visit, number * kept, everything[middle + number]))
        else:
            passed = (is_back and visit.unit in ran[:middle]) or (back and place > back[-1])
            after_middle = place > forward[middle]
            result.append(moved(visit, more * kept if after_middle and not passed else 0, unit))
    return result
