"""FP32 stand-ins of weights that travel in autocast's type, for whoever reads one in a way that was not foreseen.

1. A lent stand-in is a copy of its own, brought up when it is asked for, and good for one visit of its unit: the values
   and the way of gradients are those of a plain run. It costs a transfer that nothing overlaps; from the next pass on
   the weight travels as it is (autocast_weights.py).
2. In one backward, all gradients of a weight come from uses of the withheld one, or from one that was lent in one
   visit. Others would have to be summed with them before they reach ``.grad``, and are an error instead.
3. It does not follow its host parameter: to keep it until the weight has changed is an error, and so is a hook on it,
   which the gradient of earlier uses would pass by. What is written to it goes down to the host when the visit ends; a
   forward that writes can not run again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..errors import ExactnessError
from ..memory.parameters import DeviceParameter, stand_in, true_data, true_grad_fn, true_version
from ..memory.unit_store import UnitStore, same_bytes
from .bridge import Gradients, Receive, link

AS_IS = 'earlier steps did not do that; set wire_dtype="as-is"'


class FullPrecisionStandIn(DeviceParameter):
    """A stand-in that is lent."""

    def register_hook(self, hook: Any) -> Any:
        raise ExactnessError(f"a hook was registered on a weight inside its unit: {AS_IS}")

    def retain_grad(self) -> None:
        raise ExactnessError(f"a weight was asked inside its unit to retain its gradient: {AS_IS}")


class FullPrecisionCopies:
    """Lends out what a unit holds in another type."""

    def __init__(self, store: UnitStore, receive: Receive) -> None:
        self._store = store
        self._receive = receive
        self._lending: set[int] = set()  # for this and all visits to come
        self._written: set[int] = set()  # since then
        self.lent: dict[int, FullPrecisionStandIn] = {}  # in this visit
        self._kept: list[tuple[int, Tensor]] = []  # in earlier ones
        self._came: dict[tuple[int, int], Any] = {}  # by task and parameter: what brought the gradient
        self.gradients_split = False  # in this backward, gradients of any of them from the others'

    def begin(self, index: int) -> None:
        """This one is lent out in every visit."""
        self._lending.add(index)

    def has(self, index: int) -> bool:
        """Whether it is."""
        return index in self._lending

    def tensor(self, index: int) -> FullPrecisionStandIn:
        """The weight, for this visit (Rule 1)."""
        if index not in self.lent:
            self.lent[index] = self._brought(index)
        return self.lent[index]

    def _brought(self, index: int) -> FullPrecisionStandIn:
        store, parameter = self._store, self._store.params[index]
        device = store.storage.device
        with torch.inference_mode(False), torch.no_grad():
            views = [torch.empty(0, device=device, dtype=field.dtype) for field in store.host_layout.fields]
            views[index] = true_data(parameter).to(device, copy=True)
        store.counters.bytes_up += views[index].nbytes

        def receive(node: Any, grads: Gradients) -> Gradients:
            self.came(index, receive)
            self.gradients_split = True
            return self._receive(node, grads)

        lent: Any = stand_in(link(store, receive, views)[index], parameter, [False])
        lent.__class__ = FullPrecisionStandIn
        return cast(FullPrecisionStandIn, lent)

    def came(self, index: int, way: Any) -> None:
        """A gradient of this one arrived in this way (Rule 2)."""
        if self._came.setdefault((torch._C._current_graph_task_id(), index), way) is not way:
            raise ExactnessError(
                f"a loss depends on {self._store.names[index]} by its layer, and by another read beside it, or another "
                f"run of the layer outside of autocast: {AS_IS}"
            )

    def backward_done(self) -> None:
        """All gradients have arrived."""
        self._came.clear()
        self.gradients_split = False

    def take_back(self) -> None:
        """The visit ends (Rule 3)."""
        while self.lent:
            index, tensor = self.lent.popitem()
            data = tensor.detach()
            if (true_version(tensor) or tensor.data_exposed[0]) and not self._is_host(index, data):
                if tensor.requires_grad and true_grad_fn(tensor).name() != "HostDeviceBridgeBackward":
                    raise ExactnessError(
                        f"{self._store.names[index]} was written in place while autograd recorded; a leaf that "
                        "requires grad can not be: write to it under torch.no_grad()"
                    )
                self._store.write_back(index, data)
                self._store.mark_stale()
                self._written.add(index)
            self._kept.append((index, data))

    def check_rewritten(self, index: int) -> None:
        """A forward that wrote this weight runs again."""
        if index in self._written:
            raise ExactnessError(f"{self._store.names[index]} was written by a forward that has to run again: {AS_IS}")

    def end(self) -> None:
        """The unit has no weights of another type any more, or other ones."""
        self._lending.clear()
        self._written.clear()

    def check_kept(self) -> bool:
        """A pass begins: nobody keeps what is no longer the weight (Rule 3). Tells whether there is more to check."""
        for index, tensor in self._kept:
            if _is_kept(tensor) and not self._is_host(index, tensor):
                raise ExactnessError(f"a reference to {self._store.names[index]} was kept: {AS_IS}")
        self._kept = [(index, tensor) for index, tensor in self._kept if _is_kept(tensor)]
        return bool(self._kept)

    def _is_host(self, index: int, tensor: Tensor) -> bool:
        return same_bytes(tensor.cpu(), true_data(self._store.params[index]))


def _is_kept(tensor: Tensor) -> bool:
    """By anybody but us, and the object that asks."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) > 2
