"""The optimizer's step of several ranks: each steps what it owns.

1. The update of the classes in `ELEMENTWISE` is elementwise: each rank steps a flat range of each parameter's truth,
   with its own view of the gradient, so that what a user's hook did to ``.grad`` on all ranks counts once. What one
   rank alone did there is an error (user_edits.py, Rule 5).
2. State has the parameter's shape and lies in shared slabs: each rank writes its range, and ``optimizer.state`` shows
   faces of it. So ``state_dict()`` is plain on every rank, and a run resumes with any other number of them. Scalar
   state is each rank's own. Edits of one rank alone are an error, also of scalars, and so is state that it cleared.
   State that was loaded, or that user code replaced, moves into the slabs before the step. Where user code keeps what
   was there, on any rank, all moves into other ones, also what a step makes anew.
3. All else is *replicated*. Optimizers of other classes step their faces on each rank, as under DDP, and then these are
   settled (user_edits.py). Of an optimizer that is cut, each rank steps copies of what is in groups whose steps are not
   elementwise (pieces.py), of parameters without dimensions, whose state cannot be told from a count of steps, of those
   whose data user code moved, and of those whose state is of another type or shape. It does not step their faces: a
   page of its own would have old bytes of the parameters beside them, which their owners step. So it is with what is in
   no unit, if user code gave it the place of a unit's parameter. Their state is each rank's own. Its bytes are compared
   before each step: with other state, ranks would write parts of other weights.
4. The ranks meet before what they own is stepped, since another rank may still read it. Each posts when it comes to
   this meeting, and when what it owns is stepped, of each unit by itself. Who needs a unit waits for these numbers,
   never for a meeting: so a rank may step beside other work (pending_step.py) where another one does not. An error
   before all have posted leaves a torn step (torn_step.py), unless one that gave up was not there, so that none has
   stepped.
5. A step may be deferred, but where user code wrote to the state, or refers to the bytes of any parameter of the unit,
   also of a frozen one: a write to that would get a page of its own (shared_memory.py, Rule 2), with bytes of those
   beside it from before their step. A read or write of the parameter itself waits for its unit.
6. An owner steps a unit beside backward once it has summed its part, if all ranks would: the step may begin in
   backward, user code wrote neither to the unit's weights nor to their state and refers to none of these, and the
   optimizer has the same options and scalars. Each rank says so when it posts the unit (exchange.py, Rule 13), after
   which it reads the weights no more. The thread steps with the sums themselves: ``.grad`` shows them later. Nobody
   needs to know whether others have stepped before all come to the meeting of Rule 4. Before a rank comes there it
   reads the optimizer's state, which waits for its thread, or leaves to the step what that did not reach
   (state_guard.py). From a rank's first mark on an error leaves a torn step, until the exchange shows that no marks
   were the same.
7. State may lie in a scratch file in place of memory (the disk). Ranges of a parameter of more than `CUT`
   elements begin at multiples of that, and so at blocks of the file, where each parameter begins at a block: no two
   ranks write to one. What a rank owns of others it steps through the mapping. The ranks meet once more where a step
   makes state, when each has room for it: so a disk that is full tears no step of which nothing was stepped beside
   backward.
8. State may be divided among nodes (new_weights.py): then a rank steps its node's share of what it owns, and a unit is
   stepped once the other nodes' new weights of that are in place, too.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ..compat.tensors import forbid_access, storage_id
from ..errors import DiskError, ExactnessError, OptionError, UnsupportedError
from ..memory.host_copy import HostCopy
from ..memory.layout import Layout, in_order
from ..memory.watched_parameters import quietly, true_data, true_grad
from ..nodes.shares import flat, owned
from ..optim.pending_step import CannotDefer, Parts, PendingStep
from ..optim.pieces import ELEMENTWISE, Group, State, is_elementwise, keeps_no_state
from ..optim.state_in_memory import StateInMemory
from ..options import is_int
from .board import Board, Ranks
from .clipping import Clipping
from .exchange import Exchange
from .new_weights import DIVIDED, SHARE, NewWeights, OwnWeights, share_of
from .shared_memory import SharedSlab, SlabRange
from .user_edits import Alike, Faces, fingerprint, listed

MOVED = (
    "state of an optimizer was moved to another parameter, or the module's parameters were changed, after it was "
    "divided among machines, which divide_state=True does not follow"
)
WHY = ", which each machine steps as a whole: state is divided of torch's optimizers that update each element by itself"


class StateSlab:
    """State of a unit's parameters under one key, in memory that all ranks share."""

    def __init__(self, shared: SharedSlab, layout: Layout) -> None:
        self.shared, self.layout = shared, layout
        self.faces: dict[int, StorageWeakRef] = {}  # of parameters, by index: those that were given last

    def own(self, index: int, part: slice) -> Tensor:
        """Return what a rank owns of a parameter's state, as its owner writes it."""
        return flat(self.shared.truth, self.layout.fields[index], part)

    def hold(self, index: int, part: slice) -> Tensor:
        """Make room for a parameter's state; return what a rank owns of it. Safe twice."""
        return self.own(index, part)

    def face(self, index: int) -> Tensor:
        """Return a parameter's state as user code sees it."""
        face = Layout.own_view(self.shared.face.untyped_storage(), self.layout.fields[index])
        self.faces[index] = StorageWeakRef(face.untyped_storage())  # type: ignore[no-untyped-call]
        return face

    def is_kept(self, index: int) -> bool:
        """Whether anything refers to the bytes of the face that was given last."""
        return not self.faces[index].expired()  # type: ignore[no-untyped-call]

    def has(self, index: int, value: Tensor) -> bool:
        """Whether a tensor is a parameter's state in this slab, as user code sees it."""
        field = self.layout.fields[index]
        return (value.data_ptr(), value.stride()) == (self.shared.face.data_ptr() + field.offset, field.stride)

    def collect(self, index: int, part: slice) -> None:
        """Write what user code wrote to what a rank owns (Rule 2)."""
        self.own(index, part).copy_(flat(self.shared.face, self.layout.fields[index], part))


class SlabOfShares(StateSlab):
    """The same of which this node has shares (new_weights.py, Rule 2)."""

    def face(self, index: int) -> Tensor:
        """Return a tensor that stands for a parameter's state: any access to its bytes is an error."""
        face = super().face(index)
        forbid_access(storage_id(face.untyped_storage()), DIVIDED)
        vars(face)[SHARE] = self, index
        return face

    def has(self, index: int, value: Tensor) -> bool:
        return share_of(value) == (self, index) and value.stride() == self.layout.fields[index].stride

    def is_kept(self, index: int) -> bool:
        return False  # nothing can be read there


StateSlabs = dict[tuple[HostCopy, str, bool], StateSlab]  # whether it is in a file


@dataclass(eq=False)
class OwnPiece:
    """A parameter's range that this rank steps, or a copy of the whole, or the parameter itself (Rules 1 and 3)."""

    parameter: Tensor
    data: Tensor  # with its gradient
    made: State  # the state with which it is stepped
    given: State | None = None  # of a range: the state before the step


class Owners:
    """The steps of optimizers over the parameters of all units."""

    def __init__(
        self,
        ranks: Ranks,
        exchange: Exchange,
        faces: Faces,
        clipping: Clipping,
        stores: Sequence[HostCopy],
        disk: StateInMemory,
        divides: bool,
    ) -> None:
        """``divides``: whether nodes have shares of the state (new_weights.py)."""
        self._ranks, self._exchange, self._faces, self._clipping = ranks, exchange, faces, clipping
        self._disk = disk  # on which state may lie (Rule 7)
        self._places = {id(p): (store, index) for store in stores for index, p in enumerate(store.params)}
        self.units = {store: number for number, store in enumerate(stores)}
        # How far each rank is in a step that is not deferred, and which one has stepped each unit last (Rule 4).
        self._progress = Board(ranks, 1 + len(stores))
        truths = {store: slab.truth for store, slab in faces.slabs.items()}
        self._weights = (NewWeights if divides else OwnWeights)(ranks, truths, self._post)
        self._steps = 0
        self._parts: OwnParts | None = None  # of the step that runs, if it is cut
        self._early: EarlyParts | None = None  # of the step that begins in backward, until it runs (Rule 6)
        self._optimizer: Optimizer | None = None  # of the step that runs
        # Of state. Ranks share memory together, so no rank may find a slab where another finds none: the address of an
        # optimizer, which may be that of one that died, does not decide.
        self._slabs: weakref.WeakKeyDictionary[Optimizer, StateSlabs] = weakref.WeakKeyDictionary()
        self._copies: dict[int, Tensor] = {}  # of the step that runs: of what every rank steps, by the parameter's id
        self._pieces: list[OwnPiece] = []  # likewise, what its own code steps
        self._new: dict[Tensor, dict[str, Tensor]] = {}  # likewise, where it makes state on the disk
        self._state: Any = {}  # likewise, the optimizer's
        self._edits: list[tuple[HostCopy, StateSlab, list[SlabRange]]] = []  # of state, by user code on this rank

    @staticmethod
    def cuts(optimizer: Optimizer) -> bool:
        """Whether ranks step ranges of this optimizer's parameters (Rules 1 and 3)."""
        return type(optimizer) in ELEMENTWISE

    def stores_of(self, parameters: Iterable[Tensor]) -> set[HostCopy]:
        """Find the units that have these parameters."""
        return {self._places[id(parameter)][0] for parameter in parameters if id(parameter) in self._places}

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun, and not ended, in which ranks step their parts at once."""
        return self._optimizer is not None

    def begin(self, optimizer: Optimizer, gradients: Alike) -> OwnParts:
        """Begin a step; return what this rank may defer of it. Every rank comes here (Rules 2 to 4)."""
        early = self._early
        self._copy_moved_state(optimizer)
        scalars = self._find_scalars(optimizer)
        alike = self._find_edits(optimizer), scalars, gradients, self._clipping.described(), _options(optimizer)
        self._steps += 1
        self._optimizer = optimizer
        self._progress.post(0, 2 * self._steps - 1)
        try:
            self._faces.settle(f"a step of {type(optimizer).__name__}", self._find_moved(optimizer), *alike)
        except ExactnessError:
            self._progress.post(0, 2 * self._steps - 2)  # the others come no further without this rank
            raise
        if early is not None:
            early.collect()
            self._early = None
        self._collect_edits()
        self._leave_kept_slabs(optimizer)
        try:
            self._new = self._make_room(optimizer)
        except BaseException as error:
            self._progress.post(0, 2 * self._steps - 2)  # likewise
            if isinstance(error, DiskError) and early is not None and early.may_be_torn:  # Rule 6
                of = sum(len(group["params"]) for group in early.optimizer.param_groups)
                raise error.in_step("some", of) from error
            raise
        if self._new:
            self._exchange.board.alike(0)  # nobody steps before all have room, on every node
        self._pieces, self._copies = [], {}
        self._clipping.multiply()
        cut: dict[HostCopy, list[int]] = {}
        for group, parameter in self._stepped(optimizer):
            if self.is_cut(optimizer, group, parameter) and not _is_of_another_type(
                optimizer.state.get(parameter, {}), parameter
            ):
                self.adopt(optimizer, parameter)
                store, index = self._places[id(parameter)]
                cut.setdefault(store, []).append(index)
            else:
                self._copies[id(parameter)] = true_data(parameter).clone(memory_format=torch.preserve_format)
        if self._copies:
            # A rank steps copies with gradients that others multiply, and others write weights that it copies (Rule 3).
            self._exchange.board.meet()
        self._weights.begin(self._steps, cut)
        self._parts = OwnParts(self, optimizer, self._steps)
        return self._parts

    # ---- beside backward (Rule 6)

    def announce(self, store: HostCopy, step: PendingStep) -> None:
        """Note a unit whose gradients this step may take once they are summed."""
        if self._early is None or self._early.pending is not step:
            self._early = EarlyParts(self, step)
        self._early.announced.add(store)
        step.promise(store, self._early)

    def mark(self, store: HostCopy) -> int:
        """Return what says how this rank would step a unit beside backward; 0 if it would not."""
        parts = self._early
        if parts is None or store not in parts.announced:
            return 0
        with quietly():
            return parts.mark(store)

    def summed(self, store: HostCopy, indices: Sequence[int]) -> None:
        """Have a unit stepped whose gradients this rank has summed."""
        if self._early is not None:
            self._early.summed(store, indices)

    def all_summed(self) -> None:
        """Note that the exchange of the backward is over: no other unit is stepped beside it."""
        if self._early is not None:
            self._early.all_summed()

    def would_step(self, store: HostCopy, step: PendingStep) -> list[int]:
        """List the parameters of a unit, by index, that this rank may step beside backward (Rules 2, 3 and 6)."""
        if not self.cuts(step.optimizer) or self._faces.is_written(store):
            return []
        if any(slab.shared.private() for (of, *_), slab in self._slabs.get(step.optimizer, {}).items() if of is store):
            return []
        return [index for index, parameter in enumerate(store.params) if self._would_step(parameter, step)]

    def check_gradient(self, store: HostCopy, index: int) -> None:
        """Raise ExactnessError if a gradient with which this rank has stepped was changed since (Rule 6)."""
        if id(store.params[index]) in self._exchange.changed or self._clipping.is_clipped(store, index):
            raise ExactnessError(
                f"the gradient of {store.names[index]} was changed after backward, when the optimizer had stepped with "
                "what it was; set optimizer_overlap=False"
            )

    def _would_step(self, parameter: Tensor, step: PendingStep) -> bool:
        groups = [step.optimizer.param_groups[number] for number in step.numbers_of(parameter)]
        if len(groups) != 1 or not self.is_cut(step.optimizer, groups[0], parameter) or not step.may_step(parameter):
            return False
        if keeps_no_state(step.optimizer, groups[0]):
            return True
        return all(
            isinstance(value, Tensor)
            and (not value.dim() or self._lies_in_a_slab(step.optimizer, parameter, key, value))
            for key, value in step.state_of(parameter).items()
        )

    def _stepped(self, optimizer: Optimizer) -> Iterator[tuple[Group, Tensor]]:
        """Yield the streamed parameters that an optimizer steps, with their groups."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._places and true_grad(parameter) is not None:
                    yield group, parameter

    def is_cut(self, optimizer: Optimizer, group: Group, parameter: Tensor) -> bool:
        """Whether each rank steps a range of a streamed parameter (Rule 3)."""
        store, index = self._places[id(parameter)]
        return is_elementwise(optimizer, group) and bool(parameter.dim()) and store.at_home(index)

    def pieces(self, groups: list[Group], state: Any) -> tuple[list[Group], Any]:
        """Return groups and state of what the optimizer's own code steps now of these groups (Rules 1 and 3)."""
        optimizer = self._optimizer
        assert optimizer is not None
        self._state = state
        new, self._new = self._new, {}
        trained = (p for group in groups for p in group["params"] if true_grad(p) is not None)
        pieces = {parameter: self.piece(optimizer, parameter, state) for parameter in trained}
        self._pieces = list(pieces.values())
        self._disk.make_in({pieces[parameter].data: made for parameter, made in new.items()})
        data = {parameter: piece.data for parameter, piece in pieces.items()}
        cut = [{**group, "params": [data.get(p, p) for p in group["params"]]} for group in groups]
        return cut, defaultdict(dict, {piece.data: piece.made for piece in self._pieces})

    def _make_room(self, optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
        """Make room on the disk for the state of parameters that have none; return what this rank owns of it."""
        return {
            parameter: {key: self._hold(optimizer, parameter, key) for key in keys}
            for group, parameter in self._stepped(optimizer)
            if self.cuts(optimizer) and self.is_cut(optimizer, group, parameter) and not optimizer.state.get(parameter)
            if (keys := self._disk.to_make(optimizer, group, parameter))
        }

    def piece(self, optimizer: Optimizer, parameter: Tensor, state: Mapping[Tensor, State]) -> OwnPiece:
        """Return what this rank steps of a parameter, with its gradient and its state (Rules 1 to 3)."""
        own_state, grad = state.get(parameter, {}), true_grad(parameter)
        if id(parameter) not in self._places:
            data = self._faces.copied(parameter)
            if data is not parameter:
                data.grad = grad
            return OwnPiece(parameter, data, own_state)
        assert grad is not None
        copy = self._copies.get(id(parameter))
        if copy is not None:
            copy.grad = grad
            self._leave_slabs(optimizer, parameter, own_state)
            return OwnPiece(parameter, copy, own_state)
        store, index = self._places[id(parameter)]
        field, own = self._owned(store, index)
        return self._range(optimizer, parameter, own_state, in_order(grad, field)[own])

    def summed_piece(self, optimizer: Optimizer, parameter: Tensor, state: Mapping[Tensor, State]) -> OwnPiece:
        """Return what this rank steps of a parameter beside backward, with what it has summed (Rule 6)."""
        store, index = self._places[id(parameter)]
        grad = flat(self._exchange.truth(store), *self._owned(store, index))
        return self._range(optimizer, parameter, state.get(parameter, {}), grad)

    def _range(self, optimizer: Optimizer, parameter: Tensor, own_state: State, grad: Tensor) -> OwnPiece:
        store, index = self._places[id(parameter)]
        field, own = self._owned(store, index)
        piece = flat(self._faces.slabs[store].truth, field, own)
        piece.grad = grad
        given = {
            key: self._slab(optimizer, parameter, key).own(index, own) if _is_like(value, parameter) else value
            for key, value in own_state.items()
        }
        return OwnPiece(parameter, piece, dict(given), given)

    def take(self, optimizer: Optimizer, piece: OwnPiece, state: Any) -> None:
        """Take over what a step made of a piece, for all ranks; ``state`` is the optimizer's."""
        parameter, made, given = piece.parameter, piece.made, piece.given
        if given is None:  # the whole parameter's
            if made:
                state[parameter] = made
            if piece.data is parameter:
                return
            store, index = self._places[id(parameter)]
            field = store.host_layout.fields[index]
            own = owned(field, self._ranks.rank, self._ranks.size)  # each node steps the whole
            whole = torch.as_strided(piece.data, (piece.data.numel(),), (1,))
            flat(self._faces.slabs[store].truth, field, own).copy_(whole[own])
            return
        for key, value in made.items():
            if value is not given.get(key):
                is_tensor = isinstance(value, Tensor) and value.dim()
                state[parameter][key] = self._publish(optimizer, parameter, key, value) if is_tensor else value

    def _owned(self, store: HostCopy, index: int) -> tuple[Any, slice]:
        field = store.host_layout.fields[index]
        return field, self._weights.part(field, index)

    def _leave_slabs(self, optimizer: Optimizer, parameter: Tensor, state: State) -> None:
        """Give a rank state of its own for a parameter that every rank steps as a whole (Rule 3)."""
        for key, value in state.items():
            if _is_like(value, parameter) and self._lies_in_a_slab(optimizer, parameter, key, value):
                self._check_whole(parameter)
                state[key] = value.clone(memory_format=torch.preserve_format)

    def _check_whole(self, parameter: Tensor) -> None:
        """Raise UnsupportedError if state that this rank is about to read is divided among nodes."""
        if self._weights.is_divided:
            store, index = self._places[id(parameter)]
            raise UnsupportedError(
                f"{store.names[index]} was given other data, or other state, after its optimizer's state was divided "
                "among machines, which divide_state=True does not follow: leave it as it is, or leave that option out"
            )

    def _lies_in_a_slab(self, optimizer: Optimizer, parameter: Tensor, key: str, value: Tensor) -> bool:
        store, index = self._places[id(parameter)]
        slab = self._slabs.get(optimizer, {}).get((store, key, id(parameter) in self._disk.parameters))
        return slab is not None and slab.has(index, value)

    def _copy_moved_state(self, optimizer: Optimizer) -> None:
        """Copy state that user code gave to another parameter: the first one's is written in its place."""
        faces = [slab.shared.face for slab in self._slabs.get(optimizer, {}).values()]
        slabs = sorted((face.data_ptr(), face.data_ptr() + face.nbytes) for face in faces)
        for parameter, state in optimizer.state.items() if slabs or self._weights.is_divided else ():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if share_of(value) is not None:
                    if id(parameter) not in self._places or not self._lies_in_a_slab(optimizer, parameter, key, value):
                        raise UnsupportedError(MOVED)
                    continue
                address = value.data_ptr()
                at = bisect.bisect_right(slabs, address, key=operator.itemgetter(0)) - 1
                if at < 0 or address >= slabs[at][1]:
                    continue
                if id(parameter) in self._places and self._lies_in_a_slab(optimizer, parameter, key, value):
                    continue
                state[key] = value.clone(memory_format=torch.preserve_format)

    def _outside(self, optimizer: Optimizer) -> Iterator[tuple[Group, Tensor, str, Tensor]]:
        """Yield each tensor of the state that is in no slab, with its parameter, the parameter's group, and its key."""
        for group in optimizer.param_groups if self.cuts(optimizer) else ():
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items() if id(parameter) in self._places else ():
                    is_plain = type(value) is Tensor and value.is_cpu and value.layout is torch.strided
                    if is_plain and value.dim() and not self._lies_in_a_slab(optimizer, parameter, key, value):
                        yield group, parameter, key, value

    def _find_moved(self, optimizer: Optimizer) -> Alike:
        """Find the parameters that user code gave other data, the same on all ranks, but for those in files."""
        places = filter(None, (self._places.get(id(p)) for group in optimizer.param_groups for p in group["params"]))
        moved = ((store, i) for store, i in places if not store.at_home(i) and i not in store.host_layout.elsewhere)
        names = [store.names[index] for store, index in moved]
        return Alike("gave other data to different parameters", f"gave it to {listed(names)}", repr(names).encode())

    def _find_edits(self, optimizer: Optimizer) -> Alike:
        """Find what user code wrote to this optimizer's state, the same on all ranks (Rule 2)."""
        early = self._early
        seen = early.promised if early is not None and early.optimizer is optimizer else ()  # when it was guarded
        self._edits = [
            (store, slab, pages)
            for (store, *_), slab in self._slabs.get(optimizer, {}).items()
            if store not in seen and (pages := slab.shared.private())
        ]
        digest = hashlib.sha256()
        for _, slab, pages in self._edits:
            digest.update(repr(pages).encode())
            for start, end in pages:
                digest.update(slab.shared.face[start:end].numpy().data)
        names = [store.names[i] for store, slab, pages in self._edits for i in slab.layout.indices_in(pages)]
        for _, parameter, key, value in self._outside(optimizer):
            store, index = self._places[id(parameter)]
            names.append(f"{store.names[index]} ({key})")
            digest.update(f"{names[-1]} {fingerprint(value.detach().contiguous().view(-1))}".encode())
        return Alike("wrote different optimizer state", f"wrote that of {listed(names)}", digest.digest())

    def _leave_kept_slabs(self, optimizer: Optimizer) -> None:
        """Leave slabs to user code that keeps, on any rank, state that was there: all state moves to others.

        It may have replaced that state, or taken it away, so that a step makes it anew.
        """
        slabs, replaced, is_kept = self._slabs.get(optimizer, {}), set(), False
        for place, slab in slabs.items():
            store, key, _ = place
            for index in slab.faces:
                parameter = store.params[index]
                value = optimizer.state.get(parameter, {}).get(key)
                if value is None or (_is_like(value, parameter) and not slab.has(index, value)):
                    replaced.add(place)
                    is_kept = is_kept or slab.is_kept(index)
        if replaced and any(self._exchange.board.exchange(int(is_kept))):
            for place in replaced:
                del slabs[place]

    def _find_scalars(self, optimizer: Optimizer) -> Alike:
        """Describe the state that is each rank's own, the same on all ranks (Rule 2)."""
        early = self._early
        seen = early.promised if early is not None and early.optimizer is optimizer else {}  # with the marks
        names = defaultdict(list)
        for number, group in enumerate(optimizer.param_groups if self.cuts(optimizer) else ()):
            for parameter in group["params"]:
                store, index = self._places.get(id(parameter), (None, 0))
                if store is not None and index not in seen.get(store, ()):
                    names[number, _scalars(optimizer.state.get(parameter, {}))].append(store.names[index])
        rare = min(names, key=lambda found: len(names[found]), default=(0, ""))
        mine = f"has {rare[1] or 'none'} of {listed(names[rare])} in group {rare[0]}"
        return Alike("wrote different optimizer state", mine, repr(sorted(names.items())).encode())

    def adopt_all(self, optimizer: Optimizer) -> None:
        """Move state that was loaded into slabs. Every rank comes here, and has to meet others before it reads it.

        Until then each reads and writes only what it owns, so edits need no meeting of their own.
        """
        if not self.cuts(optimizer):
            return
        self._copy_moved_state(optimizer)
        self._faces.settle("state that was loaded", self._find_edits(optimizer), self._find_scalars(optimizer))
        self._collect_edits()
        self._drop_edits()
        self._leave_kept_slabs(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._places and self.is_cut(optimizer, group, parameter):
                    self.adopt(optimizer, parameter)

    def adopt(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Move a parameter's state that was loaded, or that user code replaced, into slabs (Rule 2)."""
        store, index = self._places[id(parameter)]
        field, own = self._owned(store, index)
        state = optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            if _is_like(value, parameter) and not self._lies_in_a_slab(optimizer, parameter, key, value):
                state[key] = self._publish(optimizer, parameter, key, in_order(value, field)[own])

    def _collect_edits(self) -> None:
        """Write to the truth what user code wrote to the state that this rank owns (Rule 2)."""
        for store, slab, pages in self._edits:
            for index in slab.layout.indices_in(pages):
                slab.collect(index, self._owned(store, index)[1])

    def _drop_edits(self) -> None:
        """Drop the pages of state that user code wrote and this rank has collected."""
        for _, slab, pages in self._edits:
            slab.shared.drop(pages)
        self._edits = []

    def end(self, optimizer: Optimizer) -> None:
        """End a step: its results are true for all ranks, but for what is deferred. Every rank comes here (Rule 4)."""
        parts, self._parts = self._parts, None
        moved: list[OwnPiece] = []
        for piece in self._pieces:
            store, index = self._places.get(id(piece.parameter), (None, 0))
            if piece.data is not piece.parameter if store is None else not store.at_home(index):
                moved.append(piece)
                if piece.made:
                    self._state[piece.parameter] = piece.made
                continue
            self.take(optimizer, piece, self._state)
            if store is not None:
                torch.autograd.graph.increment_version(piece.parameter)
        self._drop_edits()
        self._pieces, self._copies, self._state = [], {}, {}
        self._disk.make_in({})
        if parts is None:
            self._faces.settle("the end of a step")
        elif not parts.begun:
            self.post(self.units, self._steps)
            if not moved and not self._weights.is_divided:
                self._progress.post(0, 2 * self._steps)
            self.wait(self.units, self._steps)
            if not moved and self._weights.is_divided:  # until then an error leaves weights of two steps
                self._progress.post(0, 2 * self._steps)
            self._faces.note_all_true()
        for piece in moved:  # perhaps to the face of another one's place, and all beside it is stepped now
            true_data(piece.parameter).copy_(piece.data)
            torch.autograd.graph.increment_version(piece.parameter)
        if moved:
            self._progress.post(0, 2 * self._steps)  # the next exchange settles what is on faces
        self._optimizer = None

    # ---- how far a step is (Rule 4)

    def post(self, stores: Iterable[HostCopy], step: int) -> None:
        """Post that this rank has stepped what it owns of these units in a step."""
        for store in stores:
            self._weights.send(store, step)

    def _post(self, store: HostCopy, step: int) -> None:
        self._progress.post(1 + self.units[store], step)

    def missing(self, store: HostCopy, step: int) -> list[int]:
        """List the other ranks, by their numbers among all, whose part of a unit's step is not in place."""
        number, mine, first = 1 + self.units[store], self._ranks.rank, self._ranks.place.first
        others = (rank for rank in range(self._ranks.size) if rank != mine)
        here = [first + rank for rank in others if self._progress.read(rank, number) < step]
        return here + self._weights.late(store)

    def wait(self, stores: Iterable[HostCopy], step: int) -> None:
        """Wait until all ranks have stepped what they own of these units in a step."""
        for store in stores:
            missing = functools.partial(self.missing, store, step)
            self._ranks.wait_beside(missing, "their parts of an optimizer's step")

    def note_true(self, store: HostCopy) -> None:
        """Note that a unit's face is equal to the truth: it was hidden until all ranks had stepped the unit."""
        self._faces.note_true(store)

    def check_deferrable(self) -> None:
        """Raise CannotDefer if this rank still has pages of its own of the state (Rule 5)."""
        if self._edits:
            raise CannotDefer("other code wrote to the optimizer's state")

    def take_torn(self) -> Optimizer | None:
        """Return the optimizer of a step that an error ended, once, if some of it may be stepped (Rule 4)."""
        optimizer, self._optimizer = self._optimizer, None
        given_up = self._ranks.given_up()  # before what they posted
        posted = [self._progress.read(rank, 0) for rank in range(self._ranks.size)]
        last = 2 * self._steps
        if posted[self._ranks.rank] < last - 1 or min(posted) == last:
            return None
        return None if any(posted[rank] < last - 1 for rank in given_up) else optimizer

    def check_divisible(self, optimizer: Optimizer) -> None:
        """Raise OptionError if an optimizer's state is to be divided, and each rank steps whole parameters here."""
        if not self._weights.is_divided:
            return
        is_cut = self.cuts(optimizer) and all(is_elementwise(optimizer, group) for group in optimizer.param_groups)
        if not is_cut and self.stores_of(p for group in optimizer.param_groups for p in group["params"]):
            allowed = f"False with {type(optimizer).__name__}{WHY}"
            raise OptionError(argument="divide_state", found=True, allowed=allowed)

    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's ``state_dict()``, on the first rank of all with whole state. Every rank comes here."""
        found = optimizer.state_dict()
        states = {number: dict(state) for number, state in found["state"].items()}
        for number in sorted(filter(is_int, states)):
            for key, value in sorted(states[number].items()):
                if isinstance(value, Tensor) and share_of(value) is not None:
                    slab, index = share_of(value)
                    whole = self._weights.whole(slab.shared.truth, slab.layout.fields[index], index)
                    states[number][key] = value if whole is None else whole
        return {**found, "state": states}

    def close(self) -> None:
        """Forget the slabs of state: the optimizers' tensors keep them. Safe twice."""
        self._weights.close()
        self._slabs.clear()
        self._early = None

    def _publish(self, optimizer: Optimizer, parameter: Tensor, key: str, part: Tensor) -> Tensor:
        """Move state of this rank's range into a slab; return the whole of it, as user code sees it."""
        own = self._hold(optimizer, parameter, key)
        if own.data_ptr() != part.data_ptr():  # else a step made it there
            own.copy_(part)
        return self._slab(optimizer, parameter, key).face(self._places[id(parameter)][1])

    def _hold(self, optimizer: Optimizer, parameter: Tensor, key: str) -> Tensor:
        """Return what this rank owns of a parameter's state, having made room for it."""
        store, index = self._places[id(parameter)]
        return self._slab(optimizer, parameter, key).hold(index, self._owned(store, index)[1])

    def _slab(self, optimizer: Optimizer, parameter: Tensor, key: str) -> StateSlab:
        """Return where a parameter's state lies, which all ranks make at the same time."""
        (store, _), on_disk = self._places[id(parameter)], id(parameter) in self._disk.parameters
        slabs = self._slabs.setdefault(optimizer, {})
        if (store, key, on_disk) not in slabs:
            slabs[store, key, on_disk] = self._make_slab(store, parameter, key)
        return slabs[store, key, on_disk]

    def _make_slab(self, store: HostCopy, parameter: Tensor, key: str) -> StateSlab:
        kind = SlabOfShares if self._weights.is_divided else StateSlab
        return kind(self._ranks.share(store.host_layout.nbytes), store.host_layout)


class OwnParts(Parts):
    """A rank's part of a step, which it may defer (Rules 4 and 5)."""

    is_all = False

    def __init__(self, owners: Owners, optimizer: Optimizer, step: int) -> None:
        self._owners, self._optimizer, self._step = owners, optimizer, step
        self.pieces: dict[int, OwnPiece] = {}  # that this rank has not stepped
        self._state: Any = {}  # of the optimizer
        self.begun = False  # whether this rank defers the step

    def check(self) -> None:
        self._owners.check_deferrable()

    def beside(self, store: HostCopy) -> Collection[int]:
        return range(len(store.params))

    def begin(self, stepped: Mapping[HostCopy, Sequence[Tensor]], state: Mapping[Tensor, State]) -> None:
        self.begun, self._state = True, state
        for parameter in itertools.chain.from_iterable(stepped.values()):
            self.pieces[id(parameter)] = self._owners.piece(self._optimizer, parameter, state)
        self._owners.post([store for store in self._owners.units if not stepped.get(store)], self._step)

    def stepped(self, store: HostCopy, data: Mapping[int, Tensor], conversions: Any) -> None:  # type: ignore[override]
        for index, parameter in enumerate(store.params):
            piece = self.pieces.pop(id(parameter), None)
            if piece is not None:
                self._owners.take(self._optimizer, piece, self._state)
                torch.autograd.graph.increment_version(data[index])
        if not self.pieces:
            self._state = {}  # a reference would be counted at the next step
        self._owners.post([store], self._step)

    def misses(self, store: HostCopy) -> bool:
        return bool(self._owners.missing(store, self._step))

    def wait(self, store: HostCopy) -> None:
        self._owners.wait([store], self._step)

    def done(self, store: HostCopy) -> None:
        self._owners.note_true(store)


class EarlyParts(Parts):
    """A rank's part of the units that are stepped beside backward (Rule 6)."""

    is_all = False

    def __init__(self, owners: Owners, pending: PendingStep) -> None:
        self._owners, self.pending = owners, pending
        self.optimizer: Optimizer = pending.optimizer
        self.pieces: dict[int, OwnPiece] = {}  # that the thread steps, or has stepped
        self.is_open = True
        self.announced: set[HostCopy] = set()  # units that this rank may step
        self.promised: dict[HostCopy, list[int]] = {}  # those of which it said so, and what of them, by index
        self._agreed: set[HostCopy] = set()  # those of which all have said the same
        self._options = _options(self.optimizer).digest

    @property
    def may_be_torn(self) -> bool:  # type: ignore[override]
        return bool(self.promised)

    def mark(self, store: HostCopy) -> int:
        """Promise to step a unit; return what all ranks have to say alike, or 0 if this rank would not step it."""
        indices = self._owners.would_step(store, self.pending)
        if not indices:
            return 0
        self.promised[store] = indices
        store.wrote()  # from here on the device's bytes are none that views of them could be compared with
        params = ((index, store.params[index]) for index in indices)
        found = [(index, *self.pending.numbers_of(p), _scalars(self.pending.state_of(p))) for index, p in params]
        digest = hashlib.sha256(f"{type(self.optimizer).__name__} {found}".encode() + self._options).digest()
        return int.from_bytes(digest[:7], "big") | 1

    def summed(self, store: HostCopy, indices: Collection[int]) -> None:
        """Have the promised parameters of a unit stepped, of those that got a sum: all ranks say the same."""
        self._agreed.add(store)
        if both := [store.params[index] for index in self.promised[store] if index in indices]:
            self.pending.take(store, Summed(both))

    def take_up(self, params: Sequence[Tensor], state: Mapping[Tensor, State]) -> None:
        for parameter in params:
            self.pieces[id(parameter)] = self._owners.summed_piece(self.optimizer, parameter, state)

    def stepped(self, store: HostCopy, data: Mapping[int, Tensor], conversions: Any) -> None:  # type: ignore[override]
        """Do nothing: where all are is known once they come to the step itself."""

    def all_summed(self) -> None:
        """Note that no other unit comes. Where ranks did not agree on a unit, none of them steps a part of it."""
        self.promised = {store: self.promised[store] for store in self._agreed}
        self.is_open = False

    def collect(self) -> None:
        """Take over what the thread has stepped, once all ranks are done with that."""
        for store in self.promised:
            for index, parameter in enumerate(store.params):
                piece = self.pieces.pop(id(parameter), None)
                if piece is not None and id(parameter) in self.pending.stepped:
                    self._owners.check_gradient(store, index)
                    self._owners.take(self.optimizer, piece, self.optimizer.state)
                    torch.autograd.graph.increment_version(parameter)
            store.wrote()  # also where others have stepped theirs, and this rank did not


class Summed:
    """Gradients of a unit that its owners have summed: they are where the thread finds them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    def has_arrived(self) -> bool:
        return True

    def wait(self) -> None: ...

    def land(self) -> Sequence[Tensor]:
        return self._parameters

    def cancel(self) -> None: ...  # they are in ``.grad`` already


def _options(optimizer: Optimizer) -> Alike:
    """Describe the numbers with which an optimizer steps: one rank's own would be those of its parts alone."""
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    rates = [group.get("lr") for group in groups]
    return Alike("gave their optimizers different options", f"steps with lr={rates}", repr(groups).encode())


def _scalars(state: State) -> str:
    """Say which state a parameter has, and its numbers."""
    return ", ".join(f"{key}={_scalar(value)}" for key, value in sorted(state.items()))


def _scalar(value: Any) -> Any:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else _plain(value)


def _plain(value: Any) -> Any:
    """Return an option as its repr is on every rank."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _is_of_another_type(state: State, parameter: Tensor) -> bool:
    """Whether state cannot be cut where its parameter is (Rule 3)."""
    tensors = (value for value in state.values() if isinstance(value, Tensor) and value.dim())
    return not all(_is_like(value, parameter) for value in tensors)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == true_data(parameter).dtype
