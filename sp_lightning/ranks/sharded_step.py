"""The optimizer's step of several ranks: each steps what it owns.

1. The update of the classes in `ELEMENTWISE` is elementwise: each rank steps a flat range of each parameter's truth,
   with its own view of the gradient, so that what a user's hook did to ``.grad`` on all ranks counts once. What one
   rank alone did there is an error (user_edits.py, Rule 5).
2. State has the parameter's shape and lies in shared slabs: each rank writes its range, and ``optimizer.state`` shows
   faces of it. So ``state_dict()`` is plain on every rank, and a run resumes with any other number of them. Scalar
   state is each rank's own. Edits of one rank alone are an error. State that was loaded, or that user code replaced,
   moves into the slabs before the step.
3. All else is *replicated*. Optimizers of other classes step their faces on each rank, as under DDP, and then these are
   settled (user_edits.py). Of an optimizer that is cut, each rank steps copies of what is in groups that do not take
   the default loop, of parameters without dimensions, whose state cannot be told from a count of steps, and of those
   whose data user code moved. It does not step their faces: a page of its own would have old bytes of the parameters
   beside them, which their owners step. Their state is each rank's own, as that of parameters that are not streamed.
4. The ranks meet before what they own is stepped, since another rank may still read it, and after it. Each posts when
   it comes to the first of these meetings, and when what it owns is stepped. An error between them leaves a torn step
   (torn_step.py), unless one that gave up was not there, so that none has stepped; or all have.
"""

from __future__ import annotations

import bisect
import hashlib
import operator
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ExactnessError
from ..memory.host_copy import HostCopy
from ..memory.layout import Layout
from ..memory.watched_parameters import true_data, true_grad
from ..optim.pieces import ELEMENTWISE, Group, State, takes_the_loop
from .board import Board, Ranks
from .clipping import Clipping
from .shared_memory import SharedSlab, SlabRange
from .user_edits import Alike, Faces, fingerprint, flat, in_order, listed, owned

ALL = slice(None)
StateSlabs = dict[tuple[HostCopy, str], SharedSlab]


class Owners:
    """The steps of optimizers over the parameters of all units."""

    def __init__(
        self, ranks: Ranks, board: Board, faces: Faces, clipping: Clipping, stores: Sequence[HostCopy]
    ) -> None:
        self._ranks, self._board, self._faces, self._clipping = ranks, board, faces, clipping
        self._places = {id(p): (store, index) for store in stores for index, p in enumerate(store.params)}
        self._progress = Board(ranks, 1)  # how far each rank is in a step (Rule 4)
        self._steps = 0
        self._optimizer: Optimizer | None = None  # of the step that runs
        # Of state. Ranks share memory together, so no rank may find a slab where another finds none: the address of an
        # optimizer, which may be that of one that died, does not decide.
        self._slabs: weakref.WeakKeyDictionary[Optimizer, StateSlabs] = weakref.WeakKeyDictionary()
        self._pieces: dict[Tensor, Tensor] = {}  # of the step that runs: the parameter of each piece
        self._copies: dict[Tensor, Tensor] = {}  # likewise, of what every rank steps: a copy, or the parameter itself
        self._given: dict[Tensor, State] = {}  # the state that each had before
        self._state: dict[Tensor, State] = {}
        self._edits: list[tuple[HostCopy, SharedSlab, list[SlabRange]]] = []  # of state, by user code on this rank

    @staticmethod
    def cuts(optimizer: Optimizer) -> bool:
        """Whether ranks step ranges of this optimizer's parameters (Rules 1 and 3)."""
        return type(optimizer) in ELEMENTWISE

    def stores_of(self, parameters: Iterable[Tensor]) -> set[HostCopy]:
        """Find the units of which these parameters are."""
        return {self._places[id(parameter)][0] for parameter in parameters if id(parameter) in self._places}

    def pieces(self, optimizer: Optimizer, gradients: Alike) -> tuple[list[Group], Any]:
        """Return the groups and the state with which this rank steps what it owns. Every rank comes here (Rule 4)."""
        self._copy_moved_state(optimizer)
        alike = self._find_edits(optimizer), gradients, self._clipping.described(), _options(optimizer)
        self._steps += 1
        self._optimizer = optimizer
        self._progress.post(0, 2 * self._steps - 1)
        try:
            self._faces.settle(self._find_moved(optimizer), *alike)
        except ExactnessError:
            self._progress.post(0, 2 * self._steps - 2)  # the others come no further without this rank
            raise
        self._collect_edits()
        if self._clipping.multiply():
            self._board.meet()  # a rank may step copies of gradients that another one owns (Rule 3)
        self._pieces, self._copies, self._given, self._state = {}, {}, {}, defaultdict(dict)
        groups = [
            {**group, "params": [self._piece(optimizer, p, takes_the_loop(group)) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        if any(copy is not parameter for copy, parameter in self._copies.items()):
            self._board.meet()  # a rank that ends its step writes what another one may not have copied yet
        return groups, self._state

    def _piece(self, optimizer: Optimizer, parameter: Tensor, loops: bool) -> Tensor:
        place = self._places.get(id(parameter))
        grad = true_grad(parameter)
        if grad is None:
            return parameter
        if place is None:
            self._copies[parameter], self._state[parameter] = parameter, self._own_state(optimizer, parameter)
            return parameter
        store, index = place
        if not loops or not parameter.dim() or not store.at_home(index):
            copy = true_data(parameter).clone(memory_format=torch.preserve_format)
            copy.grad = grad
            self._copies[copy], self._state[copy] = parameter, self._own_state(optimizer, parameter)
            return copy
        field, own = self._owned(store, index)
        piece = flat(self._faces.slabs[store].truth, field, own)
        piece.grad = in_order(grad, field)[own]
        self._pieces[piece] = parameter
        self._given[piece] = {
            key: self._adopted(optimizer, parameter, key, value)[own] if _is_like(value, parameter) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        self._state[piece] = dict(self._given[piece])
        return piece

    def _owned(self, store: HostCopy, index: int) -> tuple[Any, slice]:
        field = store.host_layout.fields[index]
        return field, owned(field, self._ranks.rank, self._ranks.size)

    def _adopted(self, optimizer: Optimizer, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        """Return the flat truth of a parameter's state, which moves into a slab if it is not in one (Rule 2)."""
        store, index = self._places[id(parameter)]
        field, own = self._owned(store, index)
        if not self._lies_in_a_slab(optimizer, parameter, key, value):
            self._publish(optimizer, parameter, key, in_order(value, field)[own])
        return flat(self._slabs[optimizer][store, key].truth, field, ALL)

    def _own_state(self, optimizer: Optimizer, parameter: Tensor) -> State:
        """Return the state of a parameter that every rank steps as a whole: each has its own (Rule 3)."""
        state: State = optimizer.state.get(parameter, {})
        for key, value in state.items():
            is_like = id(parameter) in self._places and _is_like(value, parameter)
            if is_like and self._lies_in_a_slab(optimizer, parameter, key, value):
                state[key] = value.clone(memory_format=torch.preserve_format)
        return state

    def _lies_in_a_slab(self, optimizer: Optimizer, parameter: Tensor, key: str, value: Tensor) -> bool:
        store, index = self._places[id(parameter)]
        slab = self._slabs.get(optimizer, {}).get((store, key))
        field = store.host_layout.fields[index]
        return slab is not None and (value.data_ptr(), value.stride()) == (
            slab.face.data_ptr() + field.offset,
            field.stride,
        )

    def _copy_moved_state(self, optimizer: Optimizer) -> None:
        """Copy state that user code gave to another parameter: the first one's is written in its place."""
        faces = [slab.face for slab in self._slabs.get(optimizer, {}).values()]
        slabs = sorted((face.data_ptr(), face.data_ptr() + face.nbytes) for face in faces)
        for parameter, state in optimizer.state.items() if slabs else ():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                address = value.data_ptr()
                at = bisect.bisect_right(slabs, address, key=operator.itemgetter(0)) - 1
                if at < 0 or address >= slabs[at][1]:
                    continue
                if id(parameter) in self._places and self._lies_in_a_slab(optimizer, parameter, key, value):
                    continue
                state[key] = value.clone(memory_format=torch.preserve_format)

    def _replaced(self, optimizer: Optimizer) -> Iterator[tuple[str, int]]:
        """Yield the name and a fingerprint of each tensor of the state that is to move into slabs."""
        for group in optimizer.param_groups if self.cuts(optimizer) else ():
            for parameter in group["params"] if takes_the_loop(group) else ():
                store, index = self._places.get(id(parameter), (None, 0))
                if store is None or not parameter.dim() or not store.at_home(index):
                    continue
                for key, value in optimizer.state.get(parameter, {}).items():
                    if _is_like(value, parameter) and not self._lies_in_a_slab(optimizer, parameter, key, value):
                        yield (
                            f"{store.names[index]} ({key})",
                            fingerprint(in_order(value, store.host_layout.fields[index])),
                        )

    def _find_moved(self, optimizer: Optimizer) -> Alike:
        """Find the parameters that user code gave other data, the same on all ranks."""
        places = [self._places.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
        names = [store.names[index] for store, index in filter(None, places) if not store.at_home(index)]
        return Alike("gave other data to different parameters", f"gave it to {listed(names)}", repr(names).encode())

    def _find_edits(self, optimizer: Optimizer) -> Alike:
        """Find what user code wrote to this optimizer's state, the same on all ranks (Rule 2)."""
        self._edits = [
            (store, slab, pages)
            for (store, _), slab in self._slabs.get(optimizer, {}).items()
            if (pages := slab.private())
        ]
        digest = hashlib.sha256()
        for _, slab, pages in self._edits:
            digest.update(repr(pages).encode())
            for start, end in pages:
                digest.update(slab.face[start:end].numpy().data)
        names = [store.names[index] for store, _, pages in self._edits for index in store.host_layout.indices_in(pages)]
        for name, number in self._replaced(optimizer):
            names.append(name)
            digest.update(f"{name} {number}".encode())
        return Alike("wrote different optimizer state", f"wrote that of {listed(names)}", digest.digest())

    def adopt(self, optimizer: Optimizer, group: Group, parameter: Tensor) -> None:
        """Move a parameter's state that was loaded into slabs; the ranks have to meet before it is read (Rule 2)."""
        store, index = self._places.get(id(parameter), (None, 0))
        if store is None or not self.cuts(optimizer) or not takes_the_loop(group):
            return
        if parameter.dim() and store.at_home(index):
            for key, value in list(optimizer.state.get(parameter, {}).items()):
                if _is_like(value, parameter):
                    self._adopted(optimizer, parameter, key, value)

    def _collect_edits(self) -> None:
        """Write to the truth what user code wrote to the state that this rank owns (Rule 2)."""
        for store, slab, pages in self._edits:
            for index in store.host_layout.indices_in(pages):
                field, own = self._owned(store, index)
                flat(slab.truth, field, own).copy_(flat(slab.face, field, own))

    def end(self, optimizer: Optimizer) -> None:
        """End a step: its results are true for all ranks. Every rank comes here (Rules 3 and 4)."""
        moved: list[tuple[Tensor, Tensor]] = []
        for copy, parameter in self._copies.items():
            if self._state[copy]:
                optimizer.state[parameter] = self._state[copy]
            if copy is parameter:
                continue
            store, index = self._places[id(parameter)]
            if not store.at_home(index):
                moved.append((copy, parameter))
                continue
            field, own = self._owned(store, index)
            flat(self._faces.slabs[store].truth, field, own).copy_(torch.as_strided(copy, (copy.numel(),), (1,))[own])
            torch.autograd.graph.increment_version(parameter)
        for piece, parameter in self._pieces.items():
            for key, value in self._state[piece].items():
                if value is self._given[piece].get(key):
                    continue
                if isinstance(value, Tensor) and value.dim():
                    self._publish(optimizer, parameter, key, value)
                else:
                    optimizer.state[parameter][key] = value
            torch.autograd.graph.increment_version(parameter)
        for _, slab, pages in self._edits:
            slab.drop(pages)
        if not moved:
            self._progress.post(0, 2 * self._steps)
        self._pieces, self._copies, self._given, self._state, self._edits = {}, {}, {}, {}, []
        self._faces.settle()
        for copy, parameter in moved:  # perhaps to the face of another one's place, and all beside it is stepped now
            true_data(parameter).copy_(copy)
            torch.autograd.graph.increment_version(parameter)
        if moved:
            self._faces.settle()
            self._progress.post(0, 2 * self._steps)
        self._optimizer = None

    def take_torn(self) -> Optimizer | None:
        """Return the optimizer of a step that an error ended, once, if some of it may be stepped (Rule 4)."""
        optimizer, self._optimizer = self._optimizer, None
        given_up = self._ranks.given_up()  # before what they posted
        posted = [self._progress.read(rank, 0) for rank in range(self._ranks.size)]
        last = 2 * self._steps
        if posted[self._ranks.rank] < last - 1 or min(posted) == last:
            return None
        return None if any(posted[rank] < last - 1 for rank in given_up) else optimizer

    def close(self) -> None:
        """Leave state to the optimizers that have it. Safe twice."""
        self._slabs.clear()

    def _publish(self, optimizer: Optimizer, parameter: Tensor, key: str, part: Tensor) -> None:
        """Move state that the step made for this rank's range into a slab."""
        store, index = self._places[id(parameter)]
        field, own = self._owned(store, index)
        slabs = self._slabs.setdefault(optimizer, {})
        if (store, key) not in slabs:
            slabs[store, key] = self._ranks.share(store.host_layout.nbytes)
        slab = slabs[store, key]
        flat(slab.truth, field, own).copy_(part)
        optimizer.state[parameter][key] = Layout.own_view(slab.face.untyped_storage(), field)


def _options(optimizer: Optimizer) -> Alike:
    """Describe the numbers with which an optimizer steps: one rank's own would be those of its parts alone."""
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    rates = [group.get("lr") for group in groups]
    return Alike("gave their optimizers different options", f"steps with lr={rates}", repr(groups).encode())


def _plain(value: Any) -> Any:
    """Return an option as its repr is on every rank."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == true_data(parameter).dtype
