"""Optimizer steps of streamed weights: on a thread, beside the next forward and, if declared, beside backward.

- A step of a unit is pending from its submission until something needs its results: a load, a read of a weight, its
  gradient or its state (unit_steps.py).
- The optimizer's own code gets a shadow of the optimizer, which has the parameters that are not streamed.
- A step beside backward takes gradients as they come. The user's own call of `step` finds those weights stepped;
  until it comes, the step is half applied: it is neither saved nor followed by another backward.
- A step that failed after it changed a weight is half applied: nothing steps or saves the weights again before weights
  and state are loaded. A step that changed nothing leaves no mark, as a plain run's.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..compat.torch import without_dispatch
from ..errors import UnsupportedError
from ..host.device import Device
from ..store.store import Store
from ..stream.gradients import recover
from ..stream.host_gradient import GradientBytes, HostGradient
from ..stream.lazy import grad_of, own_steps
from ..stream.leaf import Weight, weights
from ..stream.parameters import unit_of
from ..stream.unit import Unit
from .compiled import say_torch_steps
from .half_applied import EarlySteps, Outcome, check_step, note_loaded, refuse_later_steps
from .slices import COUNTS, SlicedOptimizer, counts_on_device, names_by_weight, shadow_of, steps_by_weight
from .state import WaitingState
from .unit_steps import OptimizerStep, UnitSteps


class Steps(UnitSteps):
    """Decide which units each call of an optimizer's step has to step, and when."""

    def __init__(self, chunk: int, overlap: bool, device: Device, store: Store, makes_trips: bool = False) -> None:
        super().__init__(chunk, device, store, makes_trips)
        self._overlap = overlap
        self._units: dict[Unit, None] = {}
        self._adopted: weakref.WeakKeyDictionary[optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()  # and hooks
        self.early: optim.Optimizer | None = None  # the optimizer that steps beside this backward
        self._early_step: Any = None  # the OptimizerStep of this backward, as the first of its units finds it
        self._early_steps = EarlySteps()
        self.has_stepped = True  # whether a step of the user's came since the handle looked
        self.chose_residents = False  # whether the user asked for resident units
        # Whether the user's call of step came in the code of a step; an optimizer may step another.
        self._was_in_step: weakref.WeakKeyDictionary[optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def add_unit(self, unit: Unit) -> None:
        """Add a unit whose weights are stepped from here on."""
        self._units[unit] = None

    @property
    def pending(self) -> str | None:
        """Which step runs beside other work: "in backward", or "deferred" beside a forward; None: there is none."""
        if all(unit.steps.last is None or unit.steps.last.done() for unit in self._units):
            return None
        return "in backward" if self.early is not None else "deferred"

    def publish(self) -> None:
        """Copy the user's writes to weights to where all ranks read them. Collective; does nothing for one device."""

    def close(self) -> None:
        """Finish all steps, remove the hooks, and leave optimizers with plain state on the host."""
        self.thread.shutdown(wait=True)
        for hook in self._hooks:
            hook.remove()
        for optimizer, hooks in list(self._adopted.items()):
            for hook in hooks:
                hook.remove()
            _wait_steps(optimizer)
            refuse_later_steps(optimizer)
            optimizer.state = collections.defaultdict(dict, optimizer.state)
            self._place_state(optimizer, is_closing=True)

    # ---- the user's calls of step

    def _groups(self, optimizer: optim.Optimizer) -> dict[int, int]:
        """Map the id of each of an optimizer's streamed weights to the index of its group."""
        units = self._units
        return {
            id(weight): index
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
            if (weight := weights.get(id(param))) is not None and weight.unit in units and not weight.is_shard
        }

    def _weight(self, param: Any) -> Weight | None:
        """Return the weight that this stream steps for a parameter; None if there is none, or it is a DTensor."""
        weight = weights.get(id(param))
        if weight is None or weight.is_shard or weight.unit not in self._units:
            return None  # the optimizer's own code steps a DTensor
        return weight

    def adopt(self, optimizer: optim.Optimizer) -> None:
        """Make reads of an optimizer's state wait for steps, and refuse to save half-applied ones, from here on."""
        if not isinstance(optimizer.state, WaitingState):
            optimizer.state = WaitingState(optimizer)
            self.place_state(optimizer)
        if optimizer not in self._adopted:
            self._adopted[optimizer] = [
                optimizer.register_state_dict_pre_hook(self._check_saving),
                optimizer.register_load_state_dict_pre_hook(lambda owner, _: _wait_steps(owner)),
                optimizer.register_load_state_dict_post_hook(self._loaded),
            ]

    def place_state(self, optimizer: optim.Optimizer) -> None:
        """Move weights' optimizer state to where each is stepped, if the optimizer steps weight by weight."""
        self._place_state(optimizer, is_closing=False)

    def _place_state(self, optimizer: optim.Optimizer, is_closing: bool) -> None:
        """Move each weight's state to where the weight is stepped; if ``is_closing``, to the host. Blocks."""
        if not steps_by_weight(optimizer):  # the optimizer's own code steps all weights on the host
            return
        counts_there = {
            id(param)
            for group in optimizer.param_groups
            for param in group["params"]
            if counts_on_device(optimizer, group)
        }  # parameters of kernels that read the step count on the device
        for param, state in optimizer.state.items():
            if (weight := self._weight(param)) is None:
                continue
            is_resident = weight.unit.is_resident and not is_closing
            home = weight.there.device if is_resident else torch.device("cpu")
            if not is_resident:
                self._filed.keep_state(weight, state)
            for key, value in state.items():
                travels = isinstance(value, Tensor) and (
                    key not in COUNTS or not is_resident or id(param) in counts_there
                )
                if travels and value.device != home:
                    state[key] = value.to(home)
                elif travels and value.ndim and not is_resident and not is_closing and not self._filed.has(value):
                    state[key] = self._place.adopt_state(value)

    def bring_state_to_host(self, param: Tensor) -> None:
        """Move the state of a parameter that no longer streams to the host, where it is stepped from here on."""
        for optimizer in self._adopted:
            state = optimizer.state.get(param) or {}
            state.update((key, value.cpu()) for key, value in state.items() if isinstance(value, Tensor))

    def _loaded(self, optimizer: optim.Optimizer) -> None:
        """Hook after `optimizer.load_state_dict`: note the load, and move state to where weights are stepped."""
        note_loaded(optimizer)
        self.place_state(optimizer)

    def _before(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Hook before `optimizer.step`: step streamed weights, and give the optimizer a shadow with all others."""
        recover()
        if not self._units:  # the module has no parameters
            return None
        if optimizer not in own_steps:  # left by an optimizer whose step raised
            own_steps.clear()
        window = next(iter(self._units)).window
        self._was_in_step[optimizer] = window.is_in_step
        window.is_in_step = False  # the user's optimizer code steps on the host
        if not self._groups(optimizer):
            return None
        self.has_stepped = True
        check_step(optimizer)
        self.adopt(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not steps_by_weight(optimizer):  # its code may look at all weights at once
            if self._makes_trips:
                raise UnsupportedError(
                    f"optimizer_device='device' steps torch's own {', '.join(names_by_weight())};"
                    f" {type(optimizer).__name__} is none of them: step it with optimizer_device='host'"
                )
            if self._device.type != "cpu":
                say_torch_steps(type(optimizer).__name__, self._device.type, "it is not one of torch's own")
            self._begin_own_code(optimizer)
            if closure is None:
                return None
            closed = functools.partial(self._run_closure, optimizer, closure)
            return ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closed})
        own = args[0]  # already a shadow if another stream has weights of the optimizer
        shadow = shadow_of(own, [])

        def closure_and_step() -> Any:  # also without a closure: the optimizer's own step hooks run first
            """Run the user's closure, give the shadow the parameters that do not stream, and step the others."""
            result = None if closure is None else closure()  # may stream parameters that were added
            groups = self._groups(optimizer)
            for group in own.param_groups:
                rest = [param for param in group["params"] if id(weights.get(id(param))) not in groups]
                shadow.param_groups.append({**group, "params": rest})
            self._step_streamed(optimizer, groups)
            return result

        return (shadow, closure_and_step), {}

    @staticmethod
    def _begin_own_code(optimizer: optim.Optimizer) -> None:
        """Wait until parameters and gradients are final: code that the user's optimizer compiles reads at once."""
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if isinstance(grad := grad_of(param), HostGradient):
                grad.plain()  # writes of compiled code do not show
                param.before()
        own_steps.append(optimizer)

    def _run_closure(self, optimizer: optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """Run the closure of a user's own optimizer, which is code of the model, and may be compiled as such."""
        own_steps.clear()
        loss = closure()
        self._begin_own_code(optimizer)
        return loss

    def _step_streamed(self, optimizer: optim.Optimizer, groups: dict[int, int]) -> None:
        """Step the streamed weights that have gradients, except for those that were stepped beside backward."""
        self.adopt(optimizer)
        state: Any = optimizer.state
        with without_dispatch():
            params = [p for group in optimizer.param_groups for p in group["params"] if grad_of(p) is not None]
            state.reserve(params)
            whose = [weight for p in params if (weight := weights.get(id(p))) is not None and id(weight) in groups]
            work: dict[Unit, list[Weight]] = {}
            for weight in self._early_steps.weights_left(optimizer, whose):
                work.setdefault(weight.unit, []).append(weight)
            sliced = SlicedOptimizer(optimizer, self._device, not self._makes_trips)
            if self.chose_residents and not self._makes_trips:
                streamed = {groups[id(weight)] for unit in work if not unit.is_resident for weight in work[unit]}
                self._check_bits(optimizer, sliced, streamed)
            self._step_units(OptimizerStep(sliced, groups, state, Outcome()), work)
        self._early_steps.end(optimizer)

    def _check_bits(self, optimizer: optim.Optimizer, sliced: SlicedOptimizer, groups: set[int]) -> None:
        """Raise if a step on the host gives weights of these groups other bits than a step on the device would."""
        if not all(map(sliced.has_devices_bits, groups)):
            raise UnsupportedError(
                f"resident= with {type(optimizer).__name__}, whose steps round in one way on the host and in another on"
                f" {self._device}: bits would depend on the number of resident units. Set optimizer_device='device', or"
                " resident=0"
            )

    def _step_units(self, step: OptimizerStep, work: dict[Unit, list[Weight]]) -> None:
        """Step resident units, raising their errors, and then start the steps of the others on the thread."""
        for unit in work:
            if unit.spill is not None:  # raises for a gradient missing after a failed write, before any step
                for _, grad, _ in self._noted_work(work[unit], step.groups):
                    if isinstance(grad, GradientBytes):
                        grad.arrived.synchronize()
        where = ""
        self._counters.held_steps += self._overlap and not all(unit.is_resident for unit in work)
        try:
            for unit in sorted(work, key=lambda unit: (not unit.is_resident, unit.index)):
                where = unit.name
                if unit.is_resident:
                    self._step_on_device(step, unit, work[unit])
                else:
                    self._submit(step, unit, work[unit])
                    unit.window.drop(unit)
            awaited, self._awaited = self._awaited, []
            for unit in awaited:
                unit.wait_step()
        except BaseException as error:  # of a resident unit, or an interrupt: units that have not begun are skipped
            step.outcome.error = step.outcome.error or error
            self.wait_thread()
            step.outcome.failed(step.sliced.user, where, error)
            raise

    def _after(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hook after `optimizer.step`: wait for steps if none may be deferred; note units that its own code stepped."""
        own_steps.clear()
        if self._units:
            next(iter(self._units)).window.is_in_step = self._was_in_step.pop(optimizer, False)
        if optimizer in self._adopted and not self._overlap:
            _wait_steps(optimizer)
        if optimizer in self._adopted and not steps_by_weight(optimizer):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            for unit in {unit for param in params if (unit := unit_of(param)) is not None}:
                unit.epoch += 1  # the user's own code stepped it

    # ---- beside backward

    def step_beside_backward(self, optimizer: optim.Optimizer | None) -> None:
        """Let an optimizer step units as their gradients arrive in backward, from here on; None ends this."""
        self.early = None
        self.backward_ended()
        for unit in self._units:
            unit.calls = 0
        if optimizer is not None:
            self.check_applied()
            self._early_steps.outcome = Outcome(is_early=True)
            self.adopt(optimizer)
            if steps_by_weight(optimizer):
                self.early = optimizer

    @staticmethod
    def _reserve_state(optimizer: optim.Optimizer) -> None:
        """Reserve entries of optimizer state in a plain run's order: steps beside backward make them in another."""
        state: Any = optimizer.state
        params = [p for group in optimizer.param_groups for p in group["params"]]
        with without_dispatch():  # one that was frozen since may have the gradient of an earlier batch
            state.guess([p for p in params if p.requires_grad or grad_of(p) is not None])

    def delivered(self, unit: Unit, whose: list[Weight], is_complete: bool) -> None:
        """Start a unit's step beside backward if all its gradients came and its forward ran once."""
        if self.early is None or not is_complete or unit.calls != 1 or unit.is_resident:
            return
        with without_dispatch():
            self._step_early(self.early, unit, whose)

    def _step_early(self, optimizer: optim.Optimizer, unit: Unit, whose: list[Weight]) -> None:
        """Start a unit's step beside backward, unless the user assigned a gradient of its weights."""
        if not self._early_steps.stepped:  # first unit of this backward: the groups may have changed
            sliced = SlicedOptimizer(optimizer, self._device, not self._makes_trips)
            outcome = self._early_steps.outcome
            self._early_step = OptimizerStep(sliced, self._groups(optimizer), optimizer.state, outcome)
            self._reserve_state(optimizer)
        mine = [weight for weight in whose if id(weight) in self._early_step.groups]
        others = [weight for weight in mine if not isinstance(grad_of(weight.host), HostGradient)]
        if mine and not others:
            self._early_steps.mark(optimizer, mine)
            unit.is_final = True
            self._counters.stepped_ahead += len(mine)
            self._submit(self._early_step, unit, mine)

    def backward_ended(self) -> None:
        """Evict units that were stepped beside the backward: the device has their old weights."""
        final = [unit for unit in self._units if unit.is_final]
        for unit in final:
            unit.is_final = False
        if final:
            final[0].window.drop(*final)

    # ---- half-applied steps

    def check_applied(self) -> None:
        """Raise if an optimizer step is half applied, as weights and state may not be saved then."""
        self._early_steps.check()
        for optimizer in self._adopted:
            check_step(optimizer)

    def note_exception(self, error: BaseException) -> None:
        """Mark steps beside backward as half applied after an exception in the user's closure or step."""
        self._early_steps.note_exception(error)

    def _check_saving(self, optimizer: optim.Optimizer) -> None:
        """Hook before `optimizer.state_dict`: wait for steps, and raise if one is half applied."""
        _wait_steps(optimizer)
        self.check_applied()


def _wait_steps(optimizer: optim.Optimizer) -> None:
    """Wait for all pending steps, by reading the optimizer's state."""
    optimizer.state.values()
