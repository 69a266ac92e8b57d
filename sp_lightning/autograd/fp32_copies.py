"""Full-precision copies of weights that travel in autocast's type, for reads that were not foreseen.

1. A full-precision copy is a stand-in with memory of its own, brought up when the weight is read, and valid for one
   visit of its unit. Its values and the path of its gradients are those of a plain run. It costs a transfer that
   nothing overlaps; from the next pass on the weight travels as it is (autocast_weights.py).
2. In one backward, all gradients of a weight come from uses of its cast stand-in, or all from the full-precision copy
   of one visit. Others would have to be summed with them before they reach ``.grad``, and are an error instead.
3. What is written to a full-precision copy goes down to the host when the visit ends, and what is written to a view of
   it later before the host's bytes are read (weight_reads.py, Rule 8); a forward that writes to it cannot run again. As
   long as other code refers to it, it gets the weight's new bytes when device bytes do that code refers to. A hook on
   it is an error, since the gradients of earlier uses would bypass it. So is other data for the weight (``p.data =
   ...``), which a plain run may have given it before the reference was made or after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..compat.references import shares_storage
from ..compat.tensors import graph_task
from ..errors import ExactnessError
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import DeviceParameter, stand_in, true_data, true_version
from ..memory.weights import same_bytes
from .gradient_nodes import Gradients, Receive, check_not_recorded, connect

AS_IS = 'earlier steps did not do that; set wire_dtype="as-is" to send the weight in FP32'


class FullPrecisionStandIn(DeviceParameter):
    """A full-precision copy as model code sees it."""

    def register_hook(self, hook: Any) -> Any:
        raise ExactnessError(f"a hook was registered on a weight inside its unit: {AS_IS}")

    def retain_grad(self) -> None:
        raise ExactnessError(f"retain_grad() was called on a weight inside its unit: {AS_IS}")


@dataclass(slots=True)
class _OldCopy:
    """The copy of a visit that has ended, which other code may still refer to."""

    index: int
    data: Tensor
    version: int  # when it was equal to the host's bytes
    data_exposed: list[bool]  # [True] once a view of it was made without gradients
    host: tuple[int, ...]  # what the weight's host bytes were then (HostCopy.state)


class FullPrecisionCopies:
    """The full-precision copies of one unit's weights that travel in autocast's type."""

    def __init__(self, store: HostCopy, receive: Receive) -> None:
        self._store = store
        self._receive = receive
        self.enabled: set[int] = set()  # weights that have a copy in this visit and in all later ones
        self._written: set[int] = set()  # those of them that model code wrote
        self.copies: dict[int, FullPrecisionStandIn] = {}  # of this visit
        self.old_copies: list[_OldCopy] = []  # of earlier visits
        self._sources: dict[tuple[int, int], Any] = {}  # by task and weight: the receiver of its gradient
        self.gradients_split = False  # whether a copy's gradient came by itself in this backward

    def tensor(self, index: int) -> FullPrecisionStandIn:
        """Return the copy of this weight for this visit; the first call brings it up (Rule 1)."""
        if index in self.copies:
            return self.copies[index]
        store, parameter = self._store, self._store.params[index]
        device = store.on_device.storage.device
        with torch.inference_mode(False), torch.no_grad():
            views = [torch.empty(0, device=device, dtype=field.dtype) for field in store.host_layout.fields]
            views[index] = true_data(parameter).to(device, copy=True)
        store.counters.bytes_up += views[index].nbytes

        def receive(node: Any, grads: Gradients) -> Gradients:
            self.check_source(index, receive)
            self.gradients_split = True
            return self._receive(node, grads)

        made: Any = stand_in(connect(store, receive, views)[index], parameter, [False])
        made.__class__ = FullPrecisionStandIn
        self.copies[index] = made
        return cast(FullPrecisionStandIn, made)

    def check_source(self, index: int, receive: Any) -> None:
        """Record which receiver a gradient of this weight came to; raise if another one had one before (Rule 2)."""
        if self._sources.setdefault((graph_task(), index), receive) is not receive:
            self.refuse_sources(index)

    def refuse_sources(self, index: int) -> None:
        """Raise: gradients of this weight came in two ways, and cannot be summed in the order of a plain run."""
        raise ExactnessError(
            f"a loss depends on {self._store.names[index]} through its layer, and also through another read, or "
            f"through a run of the layer outside autocast: {AS_IS}"
        )

    def backward_done(self) -> None:
        """End a backward: all gradients have arrived."""
        self._sources.clear()
        self.gradients_split = False

    def collect_in_visit(self) -> None:
        """Write back what model code has written to the copies of this visit (Rule 3)."""
        for index, tensor in self.copies.items():
            self._collect(index, tensor)

    def _collect(self, index: int, tensor: FullPrecisionStandIn) -> None:
        if (true_version(tensor) or tensor.data_exposed[0]) and not self._equals_host(index, tensor.detach()):
            check_not_recorded(tensor, self._store.names[index])
            self._write_back(index, tensor.detach())

    def refill(self) -> None:
        """Give the copies of this visit the bytes that their weights have now."""
        for index, tensor in self.copies.items():
            with torch.inference_mode(False), torch.no_grad():
                tensor.detach().copy_(self._store.data(index))

    def end_visit(self) -> None:
        """Write back what model code wrote to the copies, and end their use (Rule 3)."""
        while self.copies:
            index, tensor = self.copies.popitem()
            self._collect(index, tensor)
            data = tensor.detach()
            tensor.data_exposed[0] = False
            self.old_copies.append(
                _OldCopy(index, data, true_version(data), tensor.data_exposed, self._store.state(index))
            )

    def collect_writes(self) -> None:
        """Write back what code wrote to views of copies of earlier visits, once the weights are stepped (Rule 3)."""
        for copy in self.old_copies:
            exposed, version = copy.data_exposed[0], true_version(copy.data)
            written, copy.version, copy.data_exposed[0] = exposed or version != copy.version, version, False
            if written and not self._equals_host(copy.index, copy.data):
                if copy.host != self._store.state(copy.index):
                    self._refuse_kept(copy)  # once; its other bytes are older than the weight's
                self._write_back(copy.index, copy.data)
                copy.host = self._store.state(copy.index)

    def _write_back(self, index: int, data: Tensor) -> None:
        self._store.write_back(index, data)
        self._written.add(index)

    def check_rewritten(self, index: int) -> None:
        """Raise if a forward that wrote to a copy of this weight is about to run again (Rule 3)."""
        if index in self._written:
            raise ExactnessError(f"{self._store.names[index]} was written by a forward that has to run again: {AS_IS}")

    def clear(self) -> None:
        """Have no copies in later visits: the unit's types changed."""
        self.enabled.clear()
        self._written.clear()

    def refresh(self) -> bool:
        """Give old copies that other code refers to the bytes that their weights have now (Rule 3).

        Return True if there are any: then it has to be done again.
        """
        self.collect_writes()
        self.old_copies = [copy for copy in self.old_copies if shares_storage(copy.data)]
        for copy in self.old_copies:
            if copy.host != (now := self._store.state(copy.index)):
                if copy.host[1] != now[1]:
                    self._refuse_kept(copy)
                with torch.inference_mode(False), torch.no_grad():
                    copy.data.copy_(self._store.data(copy.index))
                copy.host, copy.version = now, true_version(copy.data)
        return bool(self.old_copies)

    def _refuse_kept(self, copy: _OldCopy) -> None:
        raise ExactnessError(
            f"a reference to {self._store.names[copy.index]} was kept after its unit's forward: {AS_IS}"
        )

    def _equals_host(self, index: int, tensor: Tensor) -> bool:
        return same_bytes(tensor.cpu(), self._store.data(index))
