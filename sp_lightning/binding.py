"""Stand-ins in the places of host parameters, for the time of a visit.

1. A slot is a place that holds a parameter: an entry of some module's ``_parameters``, or another list or attribute
   that holds it once more. A slot that holds something else by now is left alone: it is the user's.
2. Stand-ins stand in the slots only while the unit is resident, and never outlive it there.
3. The link is built anew when ``requires_grad`` of a parameter changed; older graphs keep the older one.
4. A write that model code made to a stand-in goes down to the host at the end of the visit: seen by the version
   counter, or, where ``.data`` was taken, assumed. An in-place write that autograd recorded is an error, as for a
   plain leaf.
5. A stand-in that somebody still refers to keeps its unit resident (store.py, Rule 5).
6. The stand-in of a weight that travels in autocast's type is *withheld*: it stands in no slot. Who reads such a weight
   in another way than wire.py foresees is lent one in FP32 (lending.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import ExactnessError
from .lending import Lending
from .link import Gradients, Receive, Uses, link
from .parameters import stand_in, true_data, true_grad_fn, true_version
from .store import UnitStore
from .units import Slot

_hooks = torch._C._autograd


class Hidden(Protocol):
    """What is out of the way while the unit is bound."""

    def hide(self) -> None: ...

    def show(self) -> None: ...


class Binding:
    """What stands in for one unit's parameters, and where."""

    def __init__(
        self,
        store: UnitStore,
        slots: Sequence[tuple[int, Slot]],
        receive: Receive,
    ) -> None:
        self.store = store
        self.slots = slots  # each with the index of its parameter
        self.receive = receive
        self.hidden: list[Hidden] = []
        self.bound = False
        self.build = -1  # how often the stand-ins were made anew
        self.outputs: list[Tensor] = []
        self.taken = [False]
        self.uses: dict[int, Uses] = {}  # of the stand-ins that are withheld
        self.lending = Lending(store, receive)
        self._bound_slots = 0
        self._trainable: list[bool] = []
        self._versions: list[int] = []
        self._own_references = 0

    def refresh(self) -> bool:
        """Makes the stand-ins, if they are missing or lead to the wrong parameters (Rule 3); tells whether other ones
        train than did."""
        trainable = [parameter.requires_grad for parameter in self.store.params]
        changed = trainable != self._trainable and bool(self._trainable)
        if not changed and self.outputs:
            return False
        assert not self.bound
        self.uses = {index: Uses() for index in self.store.autocast}
        receive, views = self._receiver(self.uses), self.store.device_views()
        self.outputs = [  # and nothing else refers to them: references are counted below
            stand_in(output, parameter, self.taken)
            for output, parameter in zip(link(self.store, receive, views), self.store.params, strict=True)
        ]
        del views
        self._trainable = trainable
        self.build += 1
        self._versions = self.versions()
        self.store.own_aliases, self._own_references = self.store.aliases(), self._references()
        return changed

    def _receiver(self, uses: dict[int, Uses]) -> Receive:
        """With the gradients of these uses where the node has none."""
        if not uses:
            return self.receive

        def receive(node: Any, grads: Gradients) -> Gradients:
            merged = list(grads)
            for index, of in uses.items():
                total = of.sum()
                if total is not None:
                    merged[index] = total
                    self.lending.came(index, receive)
            return self.receive(node, tuple(merged))

        return receive

    def bind(self) -> None:
        """Stand-ins into the slots; the unit is resident (Rule 2)."""
        if self.bound:
            return
        for index, slot in self.slots:
            if index in self.store.autocast:
                if self.lending.has(index):
                    slot.set(self.lending.tensor(index))
            elif slot.get() is self.store.params[index]:
                slot.set(self.outputs[index])
                self._bound_slots += 1
        for entry in self.hidden:
            entry.hide()
        self.bound = True

    def unbind(self) -> None:
        """Host parameters back into the slots."""
        if not self.bound:
            return
        self.store.rejoin(self.outputs)
        for index, slot in self.slots:
            held = slot.get()
            if held is self.outputs[index] or self.lending.lent.get(index, self) is held:
                slot.set(self.store.params[index])
        for entry in self.hidden:
            entry.show()
        self.lending.take_back()
        self._bound_slots = 0
        self.bound = False

    def surface(self, index: int) -> None:
        """From here on this weight, if it is withheld, is where anybody finds it (Rule 6)."""
        if index not in self.store.autocast:
            return
        self.lending.begin(index)
        if self.bound:
            for at, slot in self.slots:
                if at == index:
                    slot.set(self.lending.tensor(index))

    def stand_in(self, index: int) -> Tensor:
        """The device tensor for a parameter, as anybody may see it."""
        return self.lending.tensor(index) if index in self.store.autocast else self.outputs[index]

    def remake(self) -> None:
        """The stand-ins are other ones from now on: their types changed."""
        self.outputs = []
        self._versions = []  # it may be fetched, and leave, before it is visited
        self.taken[0] = False
        self.lending.end()

    def backward_done(self) -> None:
        """Nothing more arrives."""
        for uses in self.uses.values():
            uses.clear()
        self.lending.backward_done()

    def forget(self) -> None:
        """At the end: drops the stand-ins, and the places they stood in. Autograd's nodes lead to the engine, and no
        garbage collector sees through them: with a graph that a module keeps, neither would ever be freed."""
        self.outputs = []
        self.slots = ()
        self.hidden = []

    def versions(self) -> list[int]:
        """The stand-ins' version counters."""
        return [true_version(output) for output in self.outputs]

    def collect_writes(self, replayed: Sequence[int] = ()) -> None:
        """Takes down what model code wrote (Rule 4); what it wrote again in a recomputation is there already."""
        self.store.rejoin(self.outputs)
        for index in replayed:
            self._replay(index)
        versions = self.versions()
        if versions == self._versions and not self.taken[0]:
            return
        for index, (now, before) in enumerate(zip(versions, self._versions, strict=True)):
            if now != before:
                self._check_recorded(index)
                self.store.write_back(index)
            elif self.taken[0]:
                self._write_back_if_differs(index)
        self._versions = versions
        self.taken[0] = False

    def overwritten(self, indices: Sequence[int]) -> None:
        """These have new bytes: what autograd saved of the old ones, without our hooks, is an error as in a plain
        run."""
        if not self.outputs:  # nothing could be saved since its types changed
            return
        for index in indices:
            torch.autograd.graph.increment_version(self.outputs[index])
        self._versions = self.versions()

    def _replay(self, index: int) -> None:
        """A weight is what it was after the first write: a recomputation may have stopped before it came to that."""
        field = self.store.layout.fields[index]
        self.store.layout.view(self.store.storage, field).copy_(true_data(self.store.params[index]))
        _hooks._unsafe_set_version_counter((self.outputs[index],), (self._versions[index],))

    def in_use(self) -> bool:
        """Whether somebody but us refers to the device bytes (Rule 5)."""
        if not self.outputs:
            return False
        return self.store.has_views() or self._references() > self._own_references + self._bound_slots

    def has_views(self) -> bool:
        """Whether tensors other than the stand-ins lie over the device bytes, and are referred to by somebody else."""
        return bool(self.outputs) and self.store.has_views()

    def _references(self) -> int:
        """From Python, and from C++, to the stand-ins themselves."""
        return sum(map(sys.getrefcount, self.outputs)) + sum(map(Tensor._use_count, self.outputs))

    def _check_recorded(self, index: int) -> None:
        output, name = self.outputs[index], self.store.names[index]
        if output.requires_grad and not self._is_link(output):
            raise ExactnessError(
                f"{name} was written in place while autograd recorded; a leaf that requires grad can not be: "
                "write to it under torch.no_grad()"
            )

    def _is_link(self, output: Tensor) -> bool:
        node = true_grad_fn(output)
        return node is not None and node.name() == "LinkBackward"

    def _write_back_if_differs(self, index: int) -> None:
        host, field = true_data(self.store.params[index]), self.store.layout.fields[index]
        now = self.store.layout.view(self.store.storage, field).cpu()
        if not torch.equal(_bytes(now), _bytes(host.to(now.dtype))):
            self.store.write_back(index)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
