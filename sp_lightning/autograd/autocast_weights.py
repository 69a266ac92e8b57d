"""``wire_dtype="auto"``: under autocast, weights of linear layers and convolutions travel in autocast's type.

Autocast casts such a weight in front of its operator, and its gradient back behind it. Cast on the host once per update
it takes half the bytes on its way, and on the device no second copy that autograd would save. The bits are the same as
long as the operator is all that ever sees the weight. So:

1. *Which.* FP32 weights with one place in the model: ``weight`` of a module of torch's own classes, whose forward reads
   it once and hands it to an operator that autocast casts for. Not where code is compiled, be it a unit or layers
   inside of one: that passes by all of this, and is to find modules as they are.
2. *Seen.* During a visit ``module._parameters`` is a dictionary that notices every read of the weight, whoever does it:
   a hook, another module, ``named_parameters()``, a function that asks for its type. The module's own forward, and
   nothing else, is given the weight past it, if autocast is on and no mode, transform or trace looks at operators.
3. *Recorded.* In the first pass of a kind that makes gradients all travel as they are. A weight qualifies if its
   forward ran once in the graph, cast to one type, and nobody else read it. Recomputation in backward counts by itself;
   where no gradient is made it may run any number of times.
4. *Changed between passes.* A unit's layout changes where a pass begins, when nothing of the unit is bound, kept, or
   saved by a graph that waits for its backward; else it waits for a later pass.
5. *Guarded.* The same dictionary stays. Any other read is noticed before the weight is used: the reader is lent it in
   FP32 (fp32_copies.py), and the weight travels as it is from the next pass on, for good. A second use by the forward
   is exact (bridge.py, Rule 4), and ends it too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..memory.parameters import HostParameter, quietly
from .backward_pass import in_backward
from .dynamo import listen_to_compilations, never_compiled_hook
from .streamed_unit import StreamedUnit

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NAME = "weight"


class CastCandidate:
    """One weight that may travel in autocast's type, and what is known of its uses."""

    def __init__(self, unit: StreamedUnit, index: int, given_up: Callable[[], None]) -> None:
        self.unit = unit
        self.index = index
        self.dtype: torch.dtype | None = None  # autocast's, in all of its uses
        self.seen_in: set[bool] = set()  # kinds of passes that ran its forward: with gradients, without
        self.given_up = False
        self._forward_runs = 0  # of this pass, those that autograd recorded
        self._runs_in_backward = 0
        self._runs = 0
        self._device = unit.store.storage.device.type
        self._tell = given_up

    def use(self, args: Any, kwargs: Any) -> Tensor | None:
        """What the module's forward is given; None if it has to read its weight as anybody else (Rule 2)."""
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
            return output.detach()  # as a cast that autograd does not see: kernels are chosen by ``requires_grad``
        use = output.view_as(output)
        use.grad_fn.register_prehook(uses.arrive)  # type: ignore[union-attr]
        return use

    def _cast_to(self) -> torch.dtype | None:
        """The type to which an operator would cast it now; None if not at all, or if somebody looks at operators."""
        if (
            not torch.is_autocast_enabled(self._device)
            or torch._C._len_torch_function_stack()
            or torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or torch._C._get_tracing_state() is not None
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
        """Something else reads it, or its forward does not cast it: it is for anybody to see (Rule 5)."""
        if not self.given_up:
            self.given_up = True
            with quietly():
                self.unit.stand_ins.expose(self.index)
            self._tell()

    def learn(self, gradients: bool) -> bool:
        """A pass, with or without gradients, is over (Rule 3); tells whether something new was learned."""
        several = self._forward_runs > 1 or self._runs_in_backward > 1
        new = self._runs > 0 and gradients not in self.seen_in
        if self._runs > 0:
            self.seen_in.add(gradients)
        if several and self.trainable:
            self.give_up()
        self.forget_pass()
        return new

    def travels_cast(self, trained: bool) -> bool:
        """Whether it qualifies; once the model trains, by what its training showed."""
        return not self.given_up and bool(self.seen_in) and (True in self.seen_in or not (trained and self.trainable))

    @property
    def copied_nbytes(self) -> int:
        """Of copies that autocast made of it in this pass, for autograd to keep."""
        store = self.unit.store
        if self.dtype is None or self.index in store.autocast:
            return 0
        return self._forward_runs * store.params[self.index].numel() * self.dtype.itemsize

    @property
    def trainable(self) -> bool:
        """Whether it has a gradient."""
        return self.unit.store.params[self.index].requires_grad

    def forget_pass(self) -> None:
        """What was counted is not a whole pass, or was taken note of."""
        self._runs = self._forward_runs = self._runs_in_backward = 0


class Front(Protocol):
    """What stands in front of a module's forward outside of visits (runtime/entries.py)."""

    module: nn.Module
    forward: Callable[..., Any]


class WeightReadGuard:
    """Takes the place of a module's parameters and of its forward during a visit of its unit (Rule 2)."""

    def __init__(self, weight: CastCandidate, front: Front, hides: Any) -> None:
        self.weight = weight
        self.module = front.module
        self._front = front
        self._hides = hides  # the front, where it is out of the way in a visit: then its forward stands there itself
        self._forward = front.forward
        self.on = False
        self.parameters = GuardedParameters(weight, front.module._parameters)

    def hide(self) -> None:
        """The visit begins."""
        if self._hides is not None:
            self._hides.hide()
            if not self._hides.hidden:
                self.weight.give_up()  # somebody put another forward in front
        if self.weight.given_up:
            return
        self.on = True
        self.module.__dict__["_parameters"] = self.parameters
        self._front.forward = self  # for a call of the module that begins the visit
        if self._hides is not None:
            self.module.__dict__["forward"] = self  # and for those within one

    def show(self) -> None:
        """It ends."""
        self.step_aside()
        if self._hides is not None:
            self._hides.show()

    def step_aside(self) -> None:
        """For the rest of the visit; tells nobody any more who reads the weight."""
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
    """A module's parameters. It holds none itself: what it is asked for it takes from the dictionary that it guards."""

    def __init__(self, weight: CastCandidate, guarded: dict[str, Any]) -> None:
        super().__init__()
        self.weight = weight
        self.guarded = guarded
        self.given: Tensor | None = None  # to the next read, which is the forward's

    def opened(self) -> dict[str, Any]:
        """For whoever may read or write the weight."""
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
    """Which weights of an engine travel in autocast's type."""

    def __init__(self, enabled: bool, change: Callable[[StreamedUnit, dict[int, torch.dtype]], None]) -> None:
        self.enabled = enabled
        self._change = change
        self._weights: dict[StreamedUnit, list[CastCandidate]] = {}
        self._by_parameter: dict[int, CastCandidate] = {}
        self._guards: list[WeightReadGuard] = []
        self._compiling: set[StreamedUnit] = set()  # in whose visit something was compiled
        self._known: set[Any] = set()  # kinds of passes that were recorded
        self._kind: Any = None
        self._dirty = False  # something may travel in another type than it should

    def guard(self, front: Front, units: list[StreamedUnit], hides: Any) -> WeightReadGuard | None:
        """What stands before this module during visits, if its weight is one of those (Rule 1)."""
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
        """It is read outside of its module (weight_reads.py)."""
        if (weight := self._by_parameter.get(id(parameter))) is not None:
            weight.give_up()

    def stop(self) -> None:
        """Compiled code is about to read weights (Rule 1)."""
        self.enabled = False
        self._pass_by(self._weights)

    def compilation_begins(self) -> None:
        """Something is compiled. In a visit it may read weights; where other units that do the same find it compiled
        already, it read none."""
        units = {guard.weight.unit for guard in self._guards if guard.on}
        if units <= self._compiling or not self._compiling:
            self._pass_by(units)
            self._compiling |= units
        else:
            self.stop()

    def _pass_by(self, units: Collection[StreamedUnit]) -> None:
        for guard in self._guards:
            if guard.weight.unit in units:
                guard.weight.give_up()
                guard.step_aside()

    def begin_pass(self, kind: Any) -> None:
        """The pass so far ends, and one of this kind begins (Rules 3 and 4)."""
        if not self._weights:
            return
        listen_to_compilations(self)
        if self._kind is not None:
            self._known.add(self._kind)
            for weight in self._all():
                self._dirty = weight.learn(self._kind[1]) or self._dirty  # read after: giving up sets it
        recorded_before = self._recorded()
        self._kind = (kind, torch.is_grad_enabled())
        if self._dirty or self._recorded() is not recorded_before:
            self._change_types()

    def interrupt(self) -> None:
        """The pass was broken off."""
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
        """What autograd keeps of autocast's copies of weights that travel as they are, in the pass so far at least."""
        return sum(weight.copied_nbytes for weight in self._all())

    def backward_done(self) -> None:
        """What a backward left behind goes."""
        for unit in self._weights:
            unit.stand_ins.backward_done()

    def _all(self) -> Iterator[CastCandidate]:
        return (weight for weights in self._weights.values() for weight in weights)
