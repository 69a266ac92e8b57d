"""The step of one unit, for one optimizer.

Resident weights are stepped on the device, by the calling thread, as in a plain run; the others on a thread of the
host, or by trips to the device (places.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from ..compat.dynamo import wait_beside_compilation
from ..compat.torch import without_dispatch
from ..host.device import Device
from ..store.store import Store
from ..stream.host_gradient import GradientBytes, HostGradient
from ..stream.lazy import grad_of
from ..stream.leaf import Weight
from ..stream.unit import Unit
from .filed import FiledSteps
from .half_applied import Outcome
from .places import ByTrips, OnDevice, OnHost, Place
from .slices import SlicedOptimizer, StepWork


@dataclass(eq=False, frozen=True)
class OptimizerStep:
    """One call of an optimizer's step; the weights of each unit are stepped on their own as a part of it."""

    sliced: SlicedOptimizer
    groups: dict[int, int]  # indices of the optimizer's groups, by the id of the weight
    state: Any  # the optimizer's
    outcome: Outcome


class UnitSteps:
    """The thread that steps units, and the places where their weights are stepped."""

    def __init__(self, chunk: int, device: Device, store: Store, makes_trips: bool) -> None:
        self._device, self._makes_trips = device.torch_device, makes_trips
        self._residents = OnDevice(chunk, device)
        self._place: Place = ByTrips(chunk, device) if makes_trips else OnHost(chunk)  # where other weights are stepped
        self._filed = FiledSteps(store)
        self._counters = device.counters
        # The thread rounds as the device does, which keeps denormals.
        self.thread = ThreadPoolExecutor(1, "superpipeline-steps", torch.set_flush_denormal, (False,))
        self._awaited: list[Unit] = []  # units whose steps the user's call of step waits for

    def locked_state(self) -> list[Tensor]:
        """List the tensors of optimizers' state that are in page-locked memory."""
        made = self._place.made if isinstance(self._place, ByTrips) else []
        return [state for reference in made if (state := reference()) is not None]

    def wait_thread(self) -> None:
        """Wait until the thread has run all steps and sums of gradients given to it; raise none of their errors."""
        wait_beside_compilation(self.thread.submit(lambda: None))  # a compiler may fork, too

    def _noted_work(self, whose: list[Weight], groups: dict[int, int]) -> list[StepWork]:
        """List each weight with its gradient and the index of its optimizer group."""
        found = []
        for weight in whose:
            grad = grad_of(weight.host)
            found.append(StepWork(weight, grad.content if isinstance(grad, HostGradient) else grad, groups[id(weight)]))
        return found

    @staticmethod
    def _wait_added(work: list[StepWork]) -> list[GradientBytes]:
        """Wait until the thread has summed all gradients; return those that streaming made. Raises a sum's error."""
        noted = [item.grad for item in work if isinstance(item.grad, GradientBytes)]
        for grad in noted:
            grad.wait_added()
        return noted

    def _submit(self, step: OptimizerStep, unit: Unit, whose: list[Weight]) -> None:
        """Start a unit's step on the thread. The thread skips the step if an earlier unit's step raised an error."""
        work = self._noted_work(whose, step.groups)
        run = functools.partial(self._run, step, unit, work, unit.steps.last)  # the last is another optimizer's
        for weight in whose:
            weight.edits += 1
        future: Future[None] = unit.begin_step(lambda: self._start(unit, whose, run, step.sliced.user))
        is_watched = True
        for _, grad, _ in work:
            if isinstance(grad, GradientBytes):
                grad.step = future
                is_watched = is_watched and not grad.is_exposed
            else:
                is_watched = False
        if not is_watched or unit.is_exposed or step.sliced.makes_numbers(whose, step.state):
            self._awaited.append(unit)  # reads of arrays and of the user's gradients cannot wait

    def _start(
        self, unit: Unit, whose: list[Weight], run: Callable[[], None], optimizer: optim.Optimizer | None
    ) -> Future[None]:
        """Queue ``run``, a unit's step, on the steps thread; return a future that is done when the step has ended.

        ``whose`` (the unit's weights) and ``optimizer`` are for subclasses that share the step among ranks.
        """

        def run_and_end() -> None:
            """Run the step, and count it as ended even if it raises."""
            try:
                run()
            finally:
                unit.steps.end()

        return self.thread.submit(run_and_end)

    def _step(self, unit: Unit, work: list[StepWork], sliced: SlicedOptimizer, state: Any) -> None:
        """Step a unit's weights, part by part if some of their bytes are in files. Runs on the thread."""
        if self._filed.is_in_memory:
            sliced.step(work, state, self._place)
            return
        with contextlib.closing(self._filed.parts(work, state, sliced)) as parts:
            for part, own in parts:
                sliced.step(part, own, self._place)

    def _run(self, step: OptimizerStep, unit: Unit, work: list[StepWork], before: Future[None] | None) -> None:
        """Step a unit once ``before``, its step by another optimizer, and the sums of its gradients are done.

        Do nothing if an earlier unit's step failed. Note and raise an error of this one. Runs on the thread.
        """
        outcome, sliced = step.outcome, step.sliced
        if outcome.error is not None:
            return
        versions = [item.weight.value._version for item in work]
        with torch.no_grad(), without_dispatch(), self._counters.record("optimizer", unit.name, "step"):
            try:
                unit.wait_copy()
                if before is not None:
                    before.result()  # raises the error of a step that nothing has waited for
                self._wait_added(work)
                self._step(unit, work, sliced, step.state)
                outcome.has_changed = True
            except BaseException as error:
                has_moved = versions != [item.weight.value._version for item in work]
                outcome.has_changed = outcome.has_changed or sliced.has_written or has_moved
                outcome.failed(sliced.user, unit.name, error)
                raise

    def _step_on_device(self, step: OptimizerStep, unit: Unit, whose: list[Weight]) -> None:
        """Step a resident unit's weights on the caller's stream, and note that their host copies are out of date."""
        work = self._noted_work(whose, step.groups)
        noted = self._wait_added(work)
        unit.show()
        before = [weight.there._version for weight in whose]
        is_done = False
        try:
            with torch.no_grad():
                step.sliced.step(work, step.state, self._residents)
            is_done = True
            read = unit.device.current_stream().record_event()
            for grad in noted:
                grad.arrived = read  # a streamed weight's gradient, assigned to a resident one, is on its way up
            if len(noted) < len(work):
                read.synchronize()  # writes to gradients that the user made cannot wait
        finally:
            if is_done or before != [weight.there._version for weight in whose]:
                for weight in whose:
                    unit.keep_write(weight)
                step.outcome.has_changed = True
