"""``wire_dtype="auto"``: under autocast, weights of linear layers and convolutions travel in autocast's type.

Autocast casts such a weight before its operator, and its gradient back afterwards. Cast on the host once per update,
the weight takes half the bytes on the way up, and on the device there is no second copy that autograd would save. The
bits are the same as long as the operator is all that ever sees the weight. So:

1. *Which.* FP32 weights with one place in the model: ``weight`` of a module of torch's own classes, whose forward reads
   it once and passes it to an operator that autocast casts for. Units that are compiled, as a whole or in part, are
   left out: compiled code reads weights unnoticed, and has to find modules unchanged.
2. *Seen.* During a visit ``module._parameters`` is a dictionary that notices every read of the weight: by a hook, by
   another module, through ``named_parameters()``, by a function that reads its type. Only the module's own forward is
   given the weight unnoticed, if autocast is on and no mode, transform or trace observes operators.
3. *Recorded.* In the first pass of a kind that makes gradients all weights travel as they are. A weight qualifies if
   its forward ran once in the graph, cast to one type, and nothing else read it. Recomputation in backward is counted
   separately; a forward that makes no gradient may run any number of times.
4. *Changed between passes.* A unit's layout changes where a pass begins, if nothing of the unit is bound, referenced
   elsewhere, or saved by a graph that waits for its backward; otherwise it waits for a later pass.
5. *Guarded.* The same dictionary stays in later passes. Any other read is noticed before the weight is used: it is
   given a full-precision copy (fp32_copies.py), and from the next pass on the weight travels as it is, for good. A
   second use by the forward is exact (bridge.py, Rule 4), and has the same consequence.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.dispatch import dispatch_mode_count, function_mode_count, in_transform, tracing_state
from ..compat.dynamo import at_compilation, compiles_frame, never_compiled_hook
from ..memory.parameters import HostParameter, quietly
from .backward_pass import in_backward
from .streamed_unit import StreamedUnit

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NAME = "weight"


class CastCandidate:
    """One weight that may travel in autocast's type, and the uses that were counted."""

    def __init__(self, unit: StreamedUnit, index: int, on_given_up: Callable[[], None]) -> None:
        self.unit = unit
        self.index = index
        self.dtype: torch.dtype | None = None  # autocast's, in all of its uses
        self.seen_in: set[bool] = set()  # kinds of passes that ran its forward: with gradients, without
        self.given_up = False
        self._forward_runs = 0  # in this pass, recorded by autograd
        self._runs_in_backward = 0  # recorded too, by a recomputation
        self._runs = 0  # all
        self._device = unit.store.storage.device.type
        self._on_given_up = on_given_up

    def use(self, args: Any, kwargs: Any) -> Tensor | None:
        """Count a call of the module's forward; return the weight for it, or None to have its read noticed (Rule 2)."""
        stand_ins = self.unit.stand_ins
        dtype = None if kwargs or len(args) != 1 or type(args[0]) is not Tensor else self._cast_to()
        if dtype is None or self.dtype not in (None, dtype) or self.given_up or not stand_ins.bound:
            self.give_up()
            return None
        self.dtype = dtype
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self._count(recorded)
        output = stand_ins.outputs[self.index]
        uses = stand_ins.uses.get(self.index)
        if uses is None:
            return output
        if not recorded or not output.requires_grad:
            return output.detach()  # like a cast without autograd: ``requires_grad`` decides on kernels
        use = output.view_as(output)
        use.grad_fn.register_prehook(uses.arrive)  # type: ignore[union-attr]
        return use

    def _cast_to(self) -> torch.dtype | None:
        """Return the type that autocast casts the weight to now; None if it does not, or if operators are observed."""
        if (
            not torch.is_autocast_enabled(self._device)
            or function_mode_count()
            or dispatch_mode_count()
            or in_transform()
            or tracing_state() is not None
        ):
            return None
        dtype = torch.get_autocast_dtype(self._device)
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    def _count(self, recorded: bool) -> None:
        self._runs += 1
        if recorded:
            if in_backward():
                self._runs_in_backward += 1
            else:
                self._forward_runs += 1

    def give_up(self) -> None:
        """Let the weight travel as it is, for good: it is read elsewhere, or not cast by its forward (Rule 5)."""
        if not self.given_up:
            self.given_up = True
            with quietly():
                self.unit.stand_ins.expose(self.index)
            self._on_given_up()

    def learn(self, gradients: bool) -> bool:
        """Record the uses in a finished pass (Rule 3); return whether it was the first such pass to use the weight."""
        several = self._forward_runs > 1 or self._runs_in_backward > 1
        new = self._runs > 0 and gradients not in self.seen_in
        if self._runs > 0:
            self.seen_in.add(gradients)
        if several and self.trainable:
            self.give_up()
        self.forget_pass()
        return new

    def travels_cast(self, trained: bool) -> bool:
        """Whether the weight qualifies; of a trainable one, once the model trains, only passes with gradients tell."""
        return not self.given_up and bool(self.seen_in) and (True in self.seen_in or not (trained and self.trainable))

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the copies that autocast made of the weight in this pass, and that autograd saved."""
        store = self.unit.store
        if self.dtype is None or self.index in store.autocast:
            return 0
        return self._forward_runs * store.params[self.index].numel() * self.dtype.itemsize

    @property
    def trainable(self) -> bool:
        """Whether the weight has a gradient."""
        return self.unit.store.params[self.index].requires_grad

    def forget_pass(self) -> None:
        """Reset the counts, of a pass that was recorded or broken off."""
        self._runs = self._forward_runs = self._runs_in_backward = 0


class Front(Protocol):
    """The entry in front of a module's forward (runtime/entries.py)."""

    module: nn.Module
    forward: Callable[..., Any]


class WeightReadGuard:
    """A stand-in for a module's parameters and its forward during a visit of its unit (Rule 2)."""

    def __init__(self, weight: CastCandidate, front: Front, hides: Any) -> None:
        self.weight = weight
        self.module = front.module
        self._front = front
        self._hides = hides  # the entry, if it is out of the way during a visit; else None
        self._forward = front.forward
        self.on = False
        self.parameters = GuardedParameters(weight, front.module._parameters)

    def hide(self) -> None:
        """Begin a visit: put the guard in place, and the entry out of the way."""
        if self._hides is not None:
            self._hides.hide()
            if not self._hides.hidden:
                self.weight.give_up()  # user code put another forward in front
        if self.weight.given_up:
            return
        self.on = True
        self.module.__dict__["_parameters"] = self.parameters
        self._front.forward = self  # for a call of the module that begins the visit
        if self._hides is not None:
            self.module.__dict__["forward"] = self  # and for those within one

    def show(self) -> None:
        """End a visit: put back the module's parameters and the entry."""
        self.step_aside()
        if self._hides is not None:
            self._hides.show()

    def step_aside(self) -> None:
        """Put back the module's parameters and forward: reads are not noticed in the rest of the visit."""
        if self.on:
            self.on = False
            if self.module.__dict__["_parameters"] is self.parameters:
                self.module.__dict__["_parameters"] = self.parameters.guarded
            self._front.forward = self._forward
            if self.module.__dict__.get("forward") is self:
                del self.module.__dict__["forward"]

    @never_compiled_hook
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.parameters.given = self.weight.use(args, kwargs)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self.parameters.given = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")


class GuardedParameters(dict[str, Any]):
    """A module's parameters, with reads of the weight noticed. The dictionary is empty: calls go to ``guarded``."""

    def __init__(self, weight: CastCandidate, guarded: dict[str, Any]) -> None:
        super().__init__()
        self.weight = weight
        self.guarded = guarded
        self.given: Tensor | None = None  # to the next read, which is that of the module's own forward

    def opened(self) -> dict[str, Any]:
        """Give the weight up, and return the guarded parameters, for a call that may read or write it."""
        self.weight.give_up()
        return self.guarded

    def __getitem__(self, name: str) -> Any:
        if name != NAME:
            return self.guarded[name]
        given = self.given
        if given is None:
            return self.opened()[name]
        self.given = None
        return given

    def __contains__(self, name: object) -> bool:
        return name in self.guarded

    def __iter__(self) -> Iterator[str]:
        return iter(self.guarded)

    def __len__(self) -> int:
        return len(self.guarded)

    def keys(self) -> Any:
        return self.guarded.keys()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.opened(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.opened().__reduce_ex__(protocol)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: GuardedParameters, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.opened(), name)(*args, **kwargs)

    return call


for _name in set(dir(dict)) - set(vars(GuardedParameters)) - set(dir(object)) | {"__eq__", "__ne__", "__repr__"}:
    if not _name.startswith("__class"):
        setattr(GuardedParameters, _name, _passed_on(_name))


class AutocastWeights:
    """The choice of weights that travel in autocast's type."""

    def __init__(self, enabled: bool, change: Callable[[StreamedUnit, dict[int, torch.dtype]], None]) -> None:
        self.enabled = enabled
        self._change = change
        self._weights: dict[StreamedUnit, list[CastCandidate]] = {}
        self._by_parameter: dict[int, CastCandidate] = {}
        self._guards: list[WeightReadGuard] = []
        self._compiling: set[StreamedUnit] = set()  # something was compiled in a visit of them
        self._known: set[Any] = set()  # kinds of passes that were recorded (Rule 3)
        self._kind: Any = None
        self._dirty = False  # whether some weight may travel in another type than it should

    def guard(self, front: Front, units: list[StreamedUnit], hides: Any) -> WeightReadGuard | None:
        """Make the guard of a module for visits, if its weight may travel cast (Rule 1).

        ``hides``: the entry, if it is out of the way during visits.
        """
        parameters = front.module._parameters
        weight = parameters.get(NAME)
        if not self.enabled or type(front.module) not in LAYERS or len(set(units)) != 1 or weight is None:
            return None
        if any(type(p) not in (HostParameter, type(None)) for p in parameters.values()):
            return None
        if (
            weight.dtype is not torch.float32
            or getattr(front.forward, "__func__", None) is not type(front.module).forward
        ):
            return None
        unit, index = units[0], units[0].store.index_of[id(weight)]
        if sum(at == index for at, _ in unit.stand_ins.slots) != 1:
            return None
        watched = self._by_parameter[id(weight)] = CastCandidate(unit, index, self._given_up)
        self._weights.setdefault(unit, []).append(watched)
        self._guards.append(WeightReadGuard(watched, front, hides))
        return self._guards[-1]

    def _given_up(self) -> None:
        self._dirty = True

    def read(self, parameter: Tensor) -> None:
        """Note that a parameter is read outside of its module (weight_reads.py)."""
        if (weight := self._by_parameter.get(id(parameter))) is not None:
            weight.give_up()

    def stop(self) -> None:
        """Let all weights travel as they are: compiled code is about to read some (Rule 1)."""
        self.enabled = False
        self._leave_out(self._weights)

    def compilation_begins(self, compilation: Any) -> None:
        """Leave out the units being visited, whose weights the code that is about to be compiled may read.

        Other units that run the same code and find it compiled already are not left out: it reads no weight, or it
        would be compiled for each of them. So a compilation in the visit of another unit leaves out all units.
        """
        if not compiles_frame(compilation):
            return
        units = {guard.weight.unit for guard in self._guards if guard.on}
        if units <= self._compiling or not self._compiling:
            self._leave_out(units)
            self._compiling |= units
        else:
            self.stop()

    def _leave_out(self, units: Collection[StreamedUnit]) -> None:
        for guard in self._guards:
            if guard.weight.unit in units:
                guard.weight.give_up()
                guard.step_aside()

    def begin_pass(self, kind: Any) -> None:
        """Record the uses of the pass before, and change types for a pass of this kind (Rules 3 and 4)."""
        if not self._weights:
            return
        if self.compilation_begins not in at_compilation:
            at_compilation.append(self.compilation_begins)
        if self._kind is not None:
            self._known.add(self._kind)
            for weight in self._all():
                self._dirty = weight.learn(self._kind[1]) or self._dirty  # read after ``learn``, which may set it
        recorded_before = self._recorded()
        self._kind = (kind, torch.is_grad_enabled())
        if self._dirty or self._recorded() is not recorded_before:
            self._change_types()

    def close(self) -> None:
        """Stop watching compilations."""
        with contextlib.suppress(ValueError):
            at_compilation.remove(self.compilation_begins)

    def interrupt(self) -> None:
        """Forget the counts of a pass that was broken off."""
        self._kind = None
        for weight in self._all():
            weight.forget_pass()

    def _recorded(self) -> bool:
        return self._kind is not None and (self._kind in self._known or not self._kind[1])

    def _change_types(self) -> None:
        self._dirty = False
        trained = any(gradients for _, gradients in self._known)
        for unit, weights in self._weights.items():
            self._dirty = unit.stand_ins.full_precision.check_old_copies() or self._dirty
            types: dict[int, torch.dtype] = {}
            if self._recorded():
                types = {w.index: w.dtype for w in weights if w.dtype is not None and w.travels_cast(trained)}
            if types == unit.store.autocast:
                continue
            if unit.movable and not unit.store.remembered():
                self._change(unit, types)
            else:
                self._dirty = True

    @property
    def copied_nbytes(self) -> int:
        """Lower bound of the bytes that autograd saved of autocast's own copies of weights in this pass."""
        return sum(weight.copied_nbytes for weight in self._all())

    def backward_done(self) -> None:
        """End a backward: drop what its gradients left behind."""
        for unit in self._weights:
            unit.stand_ins.backward_done()

    def _all(self) -> Iterator[CastCandidate]:
        return (weight for weights in self._weights.values() for weight in weights)
