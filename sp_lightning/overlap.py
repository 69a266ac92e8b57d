"""``optimizer_overlap``: a unit is stepped on the host while backward of the units below it still runs.

1. What is stepped ahead is final: its gradients came out of the outermost backward of the last micro-batch, and nothing
   between that backward and the step may look at gradients or parameters (the strategy knows).
2. One thread does it, in the order of arrival: it waits for a unit's gradients, accumulates them into ``.grad`` and
   steps the unit's parameters with the optimizer's own code and state. ``optimizer.step()`` then steps the rest.
3. Who asks for a gradient waits for the thread. So does the step, and an error of the thread is raised there.
4. The order in which state is created is not that of the parameters; it is put right before anybody can see it.
5. Where the step has to wait for all gradients (clipping, scaling, user's hooks), it is *held*: the thread steps unit
   by unit in the order of the next forward, and fetching a unit waits for its own step only.
6. Until a held step is done, whoever looks at a parameter, a gradient or the optimizer's state waits for all of it. A
   parameter to which another tensor refers could be looked at unseen: it is stepped at once.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .optimizer import Group, ShadowStep
from .parameters import true_grad
from .store import UnitStore, is_shared

Arrive = Callable[[], Sequence[Tensor]]  # waits for gradients, accumulates them, and tells whose they were
_thread = threading.local()


class HostThread:
    """The thread that steps ahead; it is started when it is first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "superpipeline-optimizer", initializer=self._mark)

    @staticmethod
    def _mark() -> None:
        _thread.steps_ahead = True

    @staticmethod
    def is_current() -> bool:
        """Whether it asks itself."""
        return getattr(_thread, "steps_ahead", False)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Does this after all that was submitted before."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()


class StepAhead:
    """One step of an optimizer, of which parameters whose gradients arrive are stepped at once."""

    def __init__(self, optimizer: Optimizer, step: ShadowStep, thread: HostThread) -> None:
        self._optimizer = optimizer
        self._step = step
        self._thread = thread
        self._group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._under_way: list[Future[None]] = []
        self._states = len(optimizer.state)
        self._failed = False
        self.stepped: set[int] = set()  # ids of parameters

    def submit(self, arrive: Arrive) -> None:
        """Gradients are under way whose parameters can be stepped when they arrive."""
        self._under_way.append(self._thread.submit(lambda: self._arrived(arrive)))

    def rest(self) -> tuple[list[Group], Any]:
        """What the optimizer's own step has to do: all but what was stepped ahead."""
        self.finish()
        groups = self._optimizer.param_groups
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in self.stepped]} for group in groups]
        return rest, self._optimizer.state

    def finish(self) -> None:
        """All that was submitted is stepped (Rule 3)."""
        if HostThread.is_current():
            return
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.exception()  # waits for each before the first error is raised
        _sort_state(self._optimizer, self._states)
        for work in under_way:
            work.result()

    def _arrived(self, arrive: Arrive) -> None:
        if self._failed:
            return
        self._failed = True
        with torch._C.DisableTorchFunctionSubclass():  # host parameters are meant (reads.py)
            params = [param for param in arrive() if id(param) in self._group_of]
            groups: list[Group] = [{**group, "params": []} for group in self._optimizer.param_groups]
            for param in params:
                groups[self._group_of[id(param)]]["params"].append(param)
            self._step.step_groups(self._optimizer, groups)
        self.stepped.update(map(id, params))
        self._failed = False


class HeldStep:
    """One step of an optimizer that runs on while the next forward begins (Rules 5 and 6)."""

    def __init__(self, optimizer: Optimizer, step: ShadowStep, thread: HostThread, order: Sequence[UnitStore]) -> None:
        self._optimizer = optimizer
        self._step = step
        self._thread = thread
        self._order = order
        self._under_way: dict[UnitStore, Future[None]] = {}
        self._state: Any = None
        self._states = len(optimizer.state)
        self._failed = False

    def rest(self) -> tuple[list[Group], Any]:
        """Starts the step of whole units; gives what the optimizer's own step has to do at once."""
        held = {id(p): store for store in self._order for p in store.params if self._can_wait(p)}
        work: dict[UnitStore, dict[int, Group]] = {}
        rest: list[Group] = []
        for group in self._optimizer.param_groups:
            at_once = [p for p in group["params"] if id(p) not in held]
            rest += [{**group, "params": at_once}] if at_once else []
            for param in group["params"]:
                store = held.get(id(param))
                if store is not None and true_grad(param) is not None:
                    by_group = work.setdefault(store, {})
                    by_group.setdefault(id(group), {**group, "params": []})["params"].append(param)
        self._state = self._optimizer.state
        for store in self._order:
            if store in work:
                self._under_way[store] = self._submit(list(work[store].values()))
        if self._under_way:
            self._optimizer.state = WaitingState(self)  # type: ignore[assignment]
        return rest, self._state

    def _can_wait(self, param: Tensor) -> bool:
        """Rule 6. State is not created beside a forward, which may have another default type."""
        return not is_shared(param) and (isinstance(self._optimizer, SGD) or bool(self._optimizer.state.get(param)))

    def wait(self, store: UnitStore) -> None:
        """This unit is stepped."""
        work = self._under_way.get(store)
        if work is not None and not HostThread.is_current():
            work.result()

    def finish(self) -> None:
        """All is stepped, and what was put in the optimizer's way is out of it."""
        under_way, self._under_way = self._under_way, {}
        for work in under_way.values():
            work.exception()
        if isinstance(self._optimizer.state, WaitingState):
            self._optimizer.state = self._state
        _sort_state(self._optimizer, self._states)
        for work in under_way.values():
            work.result()

    @property
    def state(self) -> Any:
        """The optimizer's state, as it is."""
        return self._state

    def _submit(self, groups: list[Group]) -> Future[None]:
        def work() -> None:
            if self._failed:
                return
            self._failed = True
            with torch._C.DisableTorchFunctionSubclass():
                self._step.step_groups(self._optimizer, groups, self._state)
            self._failed = False

        return self._thread.submit(work)


class WaitingState(dict[Any, Any]):
    """Stands for an optimizer's state until a held step is done: who looks waits, and sees the real one."""

    def __init__(self, step: HeldStep) -> None:
        super().__init__()
        self._held = step

    def _real(self) -> Any:
        self._held.finish()
        return self._held.state

    def __getitem__(self, key: Any) -> Any:
        return self._real()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._real()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._real()[key]

    def __iter__(self) -> Any:
        return iter(self._real())

    def __len__(self) -> int:
        return len(self._real())

    def __contains__(self, key: object) -> bool:
        return key in self._real()

    def __bool__(self) -> bool:
        return bool(self._real())

    def get(self, *args: Any) -> Any:
        return self._real().get(*args)

    def keys(self) -> Any:
        return self._real().keys()

    def values(self) -> Any:
        return self._real().values()

    def items(self) -> Any:
        return self._real().items()

    def pop(self, *args: Any) -> Any:
        return self._real().pop(*args)

    def clear(self) -> None:
        self._real().clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._real().update(*args, **kwargs)

    def setdefault(self, *args: Any) -> Any:
        return self._real().setdefault(*args)

    def __reduce__(self) -> Any:
        return self._real().__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._real(), memo)


def _sort_state(optimizer: Optimizer, known: int) -> None:
    """Rule 4."""
    state: dict[Any, Any] = optimizer.state
    if len(state) != known:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        order = {id(param): i for i, param in enumerate(params)}
        entries = sorted(state.items(), key=lambda entry: order.get(id(entry[0]), len(order)))
        state.clear()
        state.update(entries)
