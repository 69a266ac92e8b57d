"""``wire_dtype="auto"``: under autocast, weights of linear layers and convolutions travel in autocast's type.

Autocast casts such a weight before its operator, and its gradient back afterwards. Cast on the host once per update,
the weight takes half the bytes on the way up, and on the device there is no second copy that autograd would save. The
bits are the same as long as the operator is all that ever sees the weight. So:

1. *Which.* FP32 weights with one place in the model: ``weight`` of a module of torch's own classes, whose forward reads
   it once and passes it to an operator that autocast casts for. Units that are compiled, as a whole or in part, are
   left out: compiled code reads weights unnoticed, and has to find modules unchanged. The use that counts may also be a
   function that is handed the weight elsewhere (weight_reads.py), if all it does with it is to cast it under autocast:
   an operator that autocast casts for, or a cast to autocast's type, of which the result has bytes of its own.
2. *Seen.* During a visit ``module._parameters`` is a dictionary that notices every read of the weight: by a hook, by
   another module, through ``named_parameters()``, by a function that reads its type. Only for the module's own forward
   a plain dictionary with the weight takes its place, if autocast is on, no mode, transform or trace observes
   operators, and no other tensor is in the weight's place (``torch.func.functional_call``). The host parameter could
   not stay there instead, with reads left to weight_reads.py: ``.data``, ``detach()``, a copy of the module and code
   outside of torch would find the bytes on the host, and a write would miss those on the device.
3. *Recorded.* In the first pass of a kind that makes gradients all weights travel as they are. A weight qualifies if
   it was used once in the graph, cast to one type, and nothing else read it. Recomputation in backward is counted
   separately; without gradients there may be any number of uses. While a pass is recorded, the window is half as wide,
   because weights take up to twice the bytes of later passes.
4. *Changed between passes.* A unit's layout changes where a pass begins, if nothing of the unit is bound, referenced
   elsewhere, or in a graph that waits for its backward; otherwise it waits for a later pass. A new layout has a new
   node: gradients of one backward that came by two would be added to an earlier one in another order.
5. *Guarded.* The same dictionary stays in later passes. Any other read is noticed before the weight is used: it is
   given a full-precision copy (fp32_copies.py), and from the next pass on the weight travels as it is, for good. A
   second use of those that count is exact (gradient_nodes.py, Rule 4), and has the same consequence.
6. *Cast on the device.* A weight that does not travel in autocast's type is cast on the device before its module's
   forward, as autocast would cast it, and its gradient comes down in autocast's type. Saved by autograd, such casts
   would take half a copy of all weights: they are dropped after the forward and made again in backward from the
   resident unit. A plain run saves them, so they have to keep their values when the weight changes in the meantime: the
   host has a copy for that case, where wire copies are. Other code is given the weight as it is: autograd saves its
   cast, and sums the gradients.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.dynamo import at_compilation, compiles_frame, never_compiled_hook
from ..compat.tensors import dispatch_mode_count, function_mode_count, in_transform, storage_id, tracing_state
from ..memory.watched_parameters import HostParameter, quietly, true_version
from ..stream.partition import slots
from .backward_pass import in_backward
from .stand_ins import InPlaceOfForward, StreamedUnit

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NAME = "weight"
CAST_FOR = {  # functions that do nothing else with a weight than an operator that autocast casts for (Rule 1)
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.addmm),
}
_numbers = itertools.count()  # of uses
CASTS = {Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}  # and ``Tensor.to``


class GuardedEntry(Protocol):
    """The entry in front of a module's forward (runtime/entries.py)."""

    module: nn.Module
    own: Any  # set on the instance by the user
    hidden: bool
    guard: Callable[..., Any] | None  # is called instead of the forward

    @property
    def forward(self) -> Callable[..., Any]: ...


class CastingCall(NamedTuple):
    """A call of a function with a weight that only casts the weight, under autocast (Rule 1)."""

    dtype: torch.dtype | None  # that the function names; None: autocast's


def castable(module: nn.Module) -> set[int]:
    """Return the ids of a module's weights that may come to travel in autocast's type, as far as is known (Rule 1)."""
    places = slots(module)
    weights = (child._parameters.get(NAME) for child in module.modules() if type(child) in LAYERS)
    return {id(w) for w in weights if w is not None and w.dtype is torch.float32 and len(places[w]) == 1}


def cast_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CastingCall | None:
    """Tell how a function that is called with a weight casts it; None if it may do anything else with it."""
    if func in CAST_FOR:
        return None if "out" in kwargs else CastingCall(None)
    if func is Tensor.to:
        asked = (*args[1:], *kwargs.values())
        plain = len(asked) == 1 and not kwargs.keys() - {"dtype"} and isinstance(asked[0], torch.dtype)
        return CastingCall(asked[0]) if plain else None
    return CastingCall(CASTS[func]) if func in CASTS and len(args) == 1 and not kwargs else None


class CastBytes:
    """The bytes of a weight's cast on the device, for what autograd saved of them (Rule 6)."""

    def __init__(self, unit: StreamedUnit, index: int, cast: Tensor) -> None:
        self.unit = unit
        self._index = index
        self._state = self._state_now()
        self._host = unit.store.host_cast(index, cast)

    def _state_now(self) -> tuple[Any, ...]:
        """Return what changes when the weight may have other bytes, on the host or on the device."""
        stand_ins = self.unit.stand_ins
        version = true_version(stand_ins.outputs[self._index]) if stand_ins.outputs else None
        return stand_ins.build, version, stand_ins.data_exposed[0], self.unit.store.stamp()

    @property
    def current(self) -> bool:
        """Whether the weight still has these bytes for certain."""
        return self._state_now() == self._state

    def again(self) -> Tensor:
        """Make the cast again; the unit is resident."""
        store = self.unit.store
        with torch.inference_mode(False), torch.no_grad():
            if self.current:
                return store.device.cast(store.on_device.view(self._index), self._host.dtype)
            store.counters.bytes_up += self._host.nbytes
            return self._host.to(store.on_device.storage.device, copy=True)


class SavedCast(NamedTuple):
    """A note of a tensor that autograd saved: a weight's cast on the device, or a view of it."""

    bytes: CastBytes
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Return the tensor; the unit is resident."""
        cast = self.bytes.again()
        empty = torch.empty(0, dtype=cast.dtype, device=cast.device)
        return empty.set_(cast.untyped_storage(), self.offset, self.shape, self.stride)


class CastCandidate(InPlaceOfForward):
    """One weight that may travel in autocast's type: the uses that were counted, and its guard during visits (Rule 2).

    The guard stands in the places of the module's parameters and of its forward.
    """

    def __init__(
        self,
        unit: StreamedUnit,
        entry: GuardedEntry,
        hides_entry: bool,
        on_change: Callable[[], None],
        casts: dict[int, Callable[[Tensor], SavedCast]],
    ) -> None:
        self.unit = unit
        self.module = entry.module
        self.index = unit.store.index_of[id(self.module._parameters[NAME])]
        self.dtype: torch.dtype | None = None  # autocast's, in all of its uses
        self.seen_in: set[bool] = set()  # kinds of passes that ran its forward: with gradients, without
        self.given_up = False
        self.on = False  # whether the guard is in place
        self._entry = entry
        self._hides_entry = hides_entry  # whether the entry is out of the way during visits
        self._forward = entry.forward  # which reads the weight once; that of another class may not
        self._parameters: dict[str, Any] = self.module._parameters
        self._guard = GuardedParameters(self._parameters, self.give_up)
        self._on_change = on_change  # the weight may have to travel in another type from now on
        self._casts = casts
        self._cast: Tensor | None = None  # on the device, while the forward runs (Rule 6)
        self._saved: Callable[[], CastBytes | None] = lambda: None  # a weak reference, so that they go with the graph
        self._device = unit.store.device
        self.forget_pass()

    def hide(self) -> None:
        """Begin a visit, in which the entry is out of the way by now: put the guard in place."""
        if self._hides_entry and not self._entry.hidden:
            self.give_up()  # user code put another forward in front
        if self.given_up:
            return
        self.on = True
        self.module.__dict__["_parameters"] = self._guard
        self._entry.guard = self  # for a call of the module that begins the visit
        if self._hides_entry:
            self.module.__dict__["forward"] = self  # and for those within one

    def show(self) -> None:
        """End a visit, or the guard's part in it: put back the module's parameters and forward."""
        if self.on:
            self.on = False
            if self.module.__dict__["_parameters"] is self._guard:
                self.module.__dict__["_parameters"] = self._parameters
            self._entry.guard = None
            if self.module.__dict__.get("forward") is self:
                del self.module.__dict__["forward"]

    @never_compiled_hook
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight = self._use(args, kwargs)
        if weight is None:
            return self._entry.forward(*args, **kwargs)
        places = self.module.__dict__
        places["_parameters"] = {**self._parameters, NAME: weight}
        try:
            return self._forward(*args, **kwargs)
        finally:
            places["_parameters"] = self._guard if self.on else self._parameters
            if self._cast is not None:
                del self._casts[storage_id(self._cast.untyped_storage())]
                self._cast = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._entry.forward, memo)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")

    def _use(self, args: Any, kwargs: Any) -> Tensor | None:
        """Count a call of the module's forward; return the weight for it, or None to have its read noticed (Rule 2)."""
        stand_ins, dtype = self.unit.stand_ins, None
        plain = not kwargs and len(args) == 1 and type(args[0]) is Tensor and self._entry.forward is self._forward
        if plain and stand_ins.bound and not self.given_up:
            now = self._parameters.get(NAME)
            if now is stand_ins.outputs[self.index] or now is self.unit.store.params[self.index]:
                dtype = self._cast_to()
        if dtype is None or self.dtype not in (None, dtype):
            self.give_up()
            return None
        return self._counted(dtype)

    def lend(self, read: CastingCall) -> Tensor | None:
        """Count a use by other code that only casts the weight; return the weight for it as ``_use`` does."""
        dtype = self._cast_to() if self.unit.stand_ins.bound and not self.given_up else None
        if dtype is None or self.dtype not in (None, dtype) or read.dtype not in (None, dtype):
            self.give_up()
            return None
        return self._counted(dtype, lent=True)

    def _counted(self, dtype: torch.dtype, lent: bool = False) -> Tensor:
        """Count a use, and return the weight for it; ``lent``: by other code than the module's forward."""
        stand_ins = self.unit.stand_ins
        self.dtype = dtype
        self._runs += 1
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if recorded and in_backward():
            self._runs_in_backward += 1
        elif recorded:
            self._forward_runs += 1
        output = stand_ins.outputs[self.index]
        arrive: Callable[..., Any] = stand_ins.uses.arrive
        if self.index not in self.unit.store.autocast:
            if not recorded or lent:
                if recorded:  # the code casts by itself, and autograd sums the gradients of all uses
                    self._leave_to_autograd()
                return output
            use, arrive = self._cast_on_device(output, dtype), stand_ins.uses.arrive_at_cast
        elif not recorded or not output.requires_grad:
            return output.detach()  # like a cast without autograd: ``requires_grad`` decides on kernels
        else:
            use = output.view_as(output)
        if use.grad_fn is not None:
            number = next(_numbers)
            stand_ins.awaited[number] = hook = functools.partial(arrive, self.index, number)
            use.grad_fn.register_prehook(hook)
        return use

    def _cast_on_device(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast the weight as autocast does; until its forward ends, what autograd saves of the cast is noted."""
        use = self._device.cast(output, dtype)
        if use.grad_fn is not None:
            if self._several:  # whose sum is FP32
                self.unit.store.cast_gradients.pop(self.index, None)
            else:
                self.unit.store.cast_gradients[self.index] = dtype
        if self._cast is None:
            self._cast = use
            self._casts[storage_id(use.untyped_storage())] = self._note
        return use

    def _note(self, tensor: Tensor) -> SavedCast:
        """Note what autograd saves of the running forward's cast."""
        saved = self._saved()
        if saved is None or not saved.current:
            assert self._cast is not None
            with quietly():
                saved = CastBytes(self.unit, self.index, self._cast)
            self._saved = weakref.ref(saved)
        return SavedCast(saved, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _cast_to(self) -> torch.dtype | None:
        """Return the type that autocast casts the weight to now; None if it does not, or if operators are observed."""
        if (
            not torch.is_autocast_enabled(self._device.torch_device.type)
            or function_mode_count() > self._device.function_modes
            or dispatch_mode_count() > self._device.dispatch_modes
            or in_transform()
            or tracing_state() is not None
        ):
            return None
        dtype = torch.get_autocast_dtype(self._device.torch_device.type)
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    def give_up(self) -> None:
        """Let the weight travel as it is, for good: it is read elsewhere, or not cast by its forward (Rule 5)."""
        if not self.given_up:
            self.given_up = True
            self._leave_to_autograd()
            with quietly():
                self.unit.stand_ins.expose(self.index)
            self._on_change()

    def _leave_to_autograd(self) -> None:
        """Have autograd sum the gradients of casts on the device: the weight is read in another way as well."""
        self.unit.stand_ins.uses.left_to_autograd.add(self.index)
        self.unit.store.cast_gradients.pop(self.index, None)

    def learn(self, gradients: bool) -> None:
        """Record the uses in a finished pass, which made gradients or not (Rule 3)."""
        if self._runs and gradients not in self.seen_in:
            self.seen_in.add(gradients)
            self._on_change()
        if self._several and self.trainable:
            self.give_up()
        self.forget_pass()

    @property
    def _several(self) -> bool:
        """Whether the weight has several uses in a graph, as far as the pass has come."""
        return self._forward_runs > 1 or self._runs_in_backward > 1

    def travels_cast(self, trained: bool) -> bool:
        """Whether the weight qualifies; of a trainable one, once the model trains, only passes with gradients tell."""
        return not self.given_up and bool(self.seen_in) and (True in self.seen_in or not (trained and self.trainable))

    @property
    def trainable(self) -> bool:
        """Whether the weight has a gradient."""
        return self.unit.store.params[self.index].requires_grad

    def forget_pass(self) -> None:
        """Reset the counts, of a pass that was recorded or broken off."""
        self._forward_runs = 0  # in this pass, recorded by autograd
        self._runs_in_backward = 0  # recorded too, by a recomputation
        self._runs = 0  # all


class GuardedParameters(dict[str, Any]):
    """A module's parameters, with reads of the weight noticed. The dictionary is empty: calls go to ``guarded``."""

    def __init__(self, guarded: dict[str, Any], on_read: Callable[[], None]) -> None:
        super().__init__()
        self.guarded = guarded
        self.on_read = on_read


def _noticed(name: str) -> Callable[..., Any]:
    """Make the method of this name: it calls ``on_read`` first unless it reads names only, or another parameter."""

    def call(self: GuardedParameters, *args: Any, **kwargs: Any) -> Any:
        if name not in ("__contains__", "__iter__", "__len__", "keys") and (name != "__getitem__" or args == (NAME,)):
            self.on_read()
        return getattr(self.guarded, name)(*args, **kwargs)

    return call


_OF_OBJECT = set(dir(object)) - {"__eq__", "__ne__", "__repr__", "__reduce_ex__"}
for _name in set(dir(dict)) - _OF_OBJECT - {"__class_getitem__"}:
    setattr(GuardedParameters, _name, _noticed(_name))


class AutocastWeights:
    """The choice of weights that travel in autocast's type."""

    def __init__(self, enabled: bool, change: Callable[[StreamedUnit, dict[int, torch.dtype]], None]) -> None:
        self.enabled = enabled
        self._change = change
        self._weights: dict[int, CastCandidate] = {}  # by id of the parameter
        self._compiling: set[StreamedUnit] = set()  # something was compiled in a visit of them
        self._known: set[Any] = set()  # kinds of passes that were recorded (Rule 3)
        self._kind: Any = None
        self._dirty = False  # whether some weight may travel in another type than it should
        self.recording = False  # whether weights take more bytes in this pass than later, under autocast (Rule 3)
        self.casts: dict[int, Callable[[Tensor], SavedCast]] = {}  # on the device now, by storage: notes what is saved

    def guard(self, entry: GuardedEntry, units: list[StreamedUnit], hides_entry: bool) -> None:
        """Have a module's parameters guarded in visits, if its weight may travel cast (Rule 1).

        ``hides_entry``: whether the entry is out of the way during visits.
        """
        module, parameters = entry.module, entry.module._parameters
        weight = parameters.get(NAME)
        if not self.enabled or type(module) not in LAYERS or len(set(units)) != 1 or weight is None:
            return
        if entry.own is not None:  # whose place the guard would take
            return
        if any(type(p) not in (HostParameter, type(None)) for p in parameters.values()):
            return
        if weight.dtype is not torch.float32 or getattr(entry.forward, "__func__", None) is not type(module).forward:
            return
        candidate = CastCandidate(units[0], entry, hides_entry, self._mark_dirty, self.casts)
        if sum(at == candidate.index for at, _ in units[0].stand_ins.slots) == 1:
            self._weights[id(weight)] = candidate
            units[0].stand_ins.hidden.append(candidate)

    def _mark_dirty(self) -> None:
        self._dirty = True

    def read(self, parameter: Tensor, read: CastingCall | None) -> Tensor | None:
        """Note that a parameter is read outside of its module (weight_reads.py), in a way that only casts it or not.

        Return the stand-in for the read, or None for the one that all code may see.
        """
        weight = self._weights.get(id(parameter))
        if weight is None:
            return None
        if read is not None:
            return weight.lend(read)
        weight.give_up()
        return None

    def stop(self) -> None:
        """Let all weights travel as they are: compiled code is about to read some (Rule 1)."""
        self.enabled = False
        self._leave_out({weight.unit for weight in self._weights.values()})

    def compilation_begins(self, compilation: Any) -> None:
        """Leave out the units being visited, whose weights the code that is about to be compiled may read.

        Other units that run the same code and find it compiled already are not left out: it reads no weight, or it
        would be compiled for each of them. So a compilation in the visit of another unit leaves out all units.
        """
        if not compiles_frame(compilation):
            return
        units = {weight.unit for weight in self._weights.values() if weight.on}
        if units <= self._compiling or not self._compiling:
            self._leave_out(units)
            self._compiling |= units
        else:
            self.stop()

    def _leave_out(self, units: Collection[StreamedUnit]) -> None:
        for weight in self._weights.values():
            if weight.unit in units:
                weight.give_up()
                weight.show()

    def begin_pass(self, kind: Any) -> None:
        """Record the uses of the pass before, and change types for a pass of this kind (Rules 3 and 4)."""
        if not self._weights:
            return
        if self.compilation_begins not in at_compilation:
            at_compilation.append(self.compilation_begins)
        was_recorded = self._kind is not None
        if was_recorded:
            self._known.add(self._kind)
            for weight in self._weights.values():
                weight.learn(self._kind[1])
        self._kind = None  # until the types are changed: after an error no pass of the new kind ran
        new = (kind, torch.is_grad_enabled())
        recorded = new in self._known or not new[1]
        if self._dirty or recorded is not was_recorded:
            self._forget_those_never_cast()
            self._change_types(recorded)
        self._kind = new
        self.recording = not recorded and any(not weight.given_up for weight in self._weights.values())

    def close(self) -> None:
        """Stop watching compilations, and let go of the modules, which may keep graphs that lead to the engine."""
        self._weights.clear()
        with contextlib.suppress(ValueError):
            at_compilation.remove(self.compilation_begins)

    def interrupt(self) -> None:
        """Forget the counts of a pass that was broken off."""
        self._kind = None
        for weight in self._weights.values():
            weight.forget_pass()

    def _forget_those_never_cast(self) -> None:
        for key, weight in list(self._weights.items()):
            if weight.given_up and weight.dtype is None and not weight.on:
                weight.unit.stand_ins.hidden.remove(weight)
                del self._weights[key]

    def _change_types(self, recorded: bool) -> None:
        self._dirty = False
        trained = any(gradients for _, gradients in self._known)
        types: defaultdict[StreamedUnit, dict[int, torch.dtype]] = defaultdict(dict)
        for weight in self._weights.values():
            of_unit = types[weight.unit]
            if recorded and weight.dtype is not None and weight.travels_cast(trained):
                of_unit[weight.index] = weight.dtype
        for unit, of_unit in types.items():
            self._dirty = unit.stand_ins.full_precision.refresh() or self._dirty
            if of_unit == unit.store.autocast:
                continue
            if unit.awaited:
                self._dirty = True
                continue
            try:
                self._change(unit, of_unit)
            except BaseException:
                self._dirty = True  # there may be room for it when the next pass begins
                raise

    def backward_done(self) -> None:
        """End a backward: drop what its gradients left behind."""
        for unit in {weight.unit for weight in self._weights.values()}:
            unit.stand_ins.backward_done()
