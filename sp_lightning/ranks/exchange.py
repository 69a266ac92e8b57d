"""Gradients of all ranks, exchanged through host memory and summed by their owners in a fixed order.

1. A rank posts each unit's gradients in its box (shared_memory.py). A gradient lies there in the type in which it came
   down, or, with what ``.grad`` had before, in the parameter's type. At the end of backward a rank posts "none" for
   each parameter that it did not reach. So skipped blocks and idle experts need no flag, unlike DDP's
   ``find_unused_parameters=True``.
2. Of each element the owner takes, once all ranks have posted the unit, ``x * (1 / ranks)`` in the parameter's type for
   each rank, as DDP's reducer does; none counts as zeros. It adds them as a binary tree over ranks: ((0+1)+(2+3))+...
   With two ranks this is the only order there is; with more it is that of `tree_hook`.
3. After the exchange ``.grad`` is the full mean on every rank: a face of one shared slab. If no rank reached a
   parameter since the last exchange, its ``.grad`` is left alone, with what user code wrote to it. A tensor that was
   ``.grad`` before and that user code refers to shows the mean as well, as where it is accumulated in place.
4. A ``.grad`` of an earlier exchange that is no longer ``.grad`` keeps its bytes for user code that still refers to it:
   before a rank posts the unit, the face gets pages of its own, and the unit's later gradients a new face.
5. What autograd accumulates by itself (for hooks, and past a unit's node) is posted from ``.grad`` at the end. It
   accumulates a parameter's gradient after the unit's came, and gets that as well, to be one summand as in a plain run.
6. Owners sum on a thread of their own beside backward, unit by unit: those that all ranks have posted, and of which
   nothing more comes. Autograd comes to a parameter's leaf once in a backward, after all parts of its gradient. So a
   unit is *complete* once it has come to all of its leaves with nothing to accumulate. A nested backward (a reentrant
   checkpoint) brings parts; what it reaches is summed at the end, as is every unit that is not complete. A second
   backward that brings more of a complete unit in the same exchange is an error, as it is under DDP. Denormal numbers
   are flushed to zero if the caller's thread does so, on the host alone: DDP sums on the device, which flushes none.
7. A reentrant backward may bring a unit's gradients several times: each is added to what was posted before.
8. Gradients exist once, but for those on their way: at most those of `AHEAD` units in each rank's box. A rank that is
   further ahead posts what has arrived, and then waits until owners have summed more. It waits only for ranks that go
   on: none that waits here itself, or whose backward has ended, so no order of units can hang the ranks. Beyond that
   number boxes hold only units that are not complete before the end of backward. Where several models are streamed, one
   backward may exchange for all of them, and a rank would not see that another one waits for a unit of another model:
   there no rank waits.
9. A rank in its backward may wait for this one where nothing on the board says so: in a collective of the user's, as
   SyncBatchNorm has one there. So when the ranks that this one waits for have posted nothing for `PATIENCE` times what
   a unit took here, there is room in its box for twice as many units, and for the next `KEPT` exchanges: few steps wait
   in vain. A rank that has not come to the end of its forward is at no collective of backward, and is waited for much
   longer.
10. Autograd comes to leaves on the thread that called backward, and brings gradients on that of the device. Both take
    memory of the box, where page-locking lets the other one run: in one lock, as all that both change.
11. With several nodes each sums its own ranks' gradients of a unit, times ``1 / ranks of all nodes``, into the memory
    where the mean will be; so its boxes are free, and Rule 8 is the node's own. What an owner has of each parameter is
    divided among the nodes of its rail (transport.py): it sends each node that node's *share* of its sum. When those of
    the other nodes are there, it adds what it has of its own share in a second tree over nodes, and sends the sum to
    all. A sum of another node comes after that one has this node's, so it is written over it at once. A node sends
    shares of all its units before it waits for any. For 2^n ranks on each node the two trees are the one of Rule 2.
12. A backward that failed uses up its number, as one whose exchange ended: what ranks posted of it is of no other one.
    Ranks that come to an exchange with different numbers, since a backward failed on some of them alone, all get an
    error there, before any gradient is shown, and at each exchange that follows: some may have summed what belongs to
    the backward that failed. Where one came to more that failed than another one, none waits as in Rule 8: the other
    one may wait at an exchange to which nobody else comes. With several nodes what was sent cannot be taken back. So
    there no backward follows one that failed once nodes had begun to sum.
13. Before a rank posts a complete unit it posts a *mark*, which says how it would step that beside backward; 0 says
    that it would not. An owner has its part stepped once it has summed it, if all ranks have posted the same mark. So
    all owners of a unit decide alike, and by what each knew when it posted the unit (sharded_step.py, Rule 6). With
    several nodes that mark, or 0 if a node's ranks posted others, goes to the rail with the shares, and a part is
    stepped once all sums of it have come, if the marks of all nodes are the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compat.modules import is_ending
from ..compat.references import references, storage_uses
from ..compat.tensors import graph_task
from ..errors import ExactnessError, UnsupportedError
from ..gradients.slab import GradientSlab
from ..host.unit_numbers import HostSharing
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.layout import in_order
from ..memory.watched_parameters import set_true_grad, true_dtype, true_grad
from ..memory.weights import same_bytes
from ..nodes import transport
from ..nodes.shares import flat, owned, share
from ..nodes.transport import PARTS, SUMS, Key, Message, Unpacked, packed, same_for_all
from ..optim.pending_step import Arriving, Kept, PendingStep, thread_settings, with_settings
from .board import AFTER_GRADIENTS, Board, Ranks
from .shared_memory import PAGE, Box, SharedSlab, paged
from .user_edits import Alike, fingerprint, listed

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
NONE, USED, AT = 0, 1, 2  # flags of what a rank posts of a parameter; the place and the type are above them
ROOM = 4  # a box has room for this many times the gradients: they are laid out again when types change
ENDED = (1 << 32) - 1  # more units than there are: a rank whose backward has ended posts none
AHEAD = 2  # units whose gradients a rank may have on their way when it takes room for another one's (Rule 8)
PATIENCE = 4  # how often what a unit took this rank others may take to get on in their backward (Rule 9)
SHORT_S, LONG_S = 0.2, 60.0  # the least time for that, and how long a rank is waited for whose forward has not ended
KEPT = 100  # exchanges for which a rank has the room that it got
PAUSE_S = 2e-4  # between two looks for units that all ranks have posted
LOOKS = 500  # of which nothing came, between two looks at whether the process is about to end
PART = 1 << 18  # elements that an owner sums at a time


Place = tuple[int, Tensor, Tensor]  # of a gradient: its index, its region of the box, and its tensor there


def host_sharing(ranks: int, nodes: int, own_gradients: bool, divides_state: bool = False) -> HostSharing:
    """Describe how the ranks of a machine share its memory (Rules 8 and 11).

    ``own_gradients``: whether each rank certainly has gradients of its own.
    ``divides_state``: whether each node has a share of the optimizer's state (new_weights.py).
    """
    return HostSharing(
        ranks=ranks,
        nodes=nodes,
        own_gradients=own_gradients,
        ahead=AHEAD + 1,
        parts_ahead=transport.AHEAD,
        divides_state=divides_state,
    )


class StepsOfUnits(Protocol):
    """The steps of units beside the backward in which they are summed (Rule 13)."""

    def announce(self, store: HostCopy, step: PendingStep) -> None:
        """Note a unit whose gradients this step may take once they are summed."""

    def mark(self, store: HostCopy) -> int:
        """Return what says how this rank would step a unit, which it posts; 0 if it would not."""

    def summed(self, store: HostCopy, indices: Sequence[int]) -> None:
        """Have a unit stepped: this rank has summed its part, and all ranks posted the same mark."""


class _Sums:
    """The slab of a unit's mean gradients, and the tensors over its face that become ``.grad``."""

    def __init__(self, slab: SharedSlab, store: HostCopy) -> None:
        self.slab, self._store = slab, store
        self.make_views()

    def make_views(self) -> None:
        """Make the tensors over the face."""
        self.views = self._store.host_layout.own_views(self.slab.face.untyped_storage())
        self._made = list(map(_form, self.views))

    def is_altered(self, index: int) -> bool:
        """Whether user code gave a tensor other data or another form: ``p.grad.data = ...``, ``grad.t_()``."""
        return _form(self.views[index]) != self._made[index]


class _Crossing:
    """A unit's sums on their way between nodes (Rule 11)."""

    def __init__(self, flags: list[int], mine: dict[int, Tensor], mark: Tensor, peers: Iterable[int]) -> None:
        self.flags, self.mine, self.mark = flags, mine, mark  # what this node posted, and its sums, by the parameter
        self.steps = False  # whether all nodes would step the unit beside backward (Rule 13)
        self.shown: list[int] = []  # parameters that any rank of any node reached
        self.sent: Message | None = None  # the sums of all nodes, of this one's shares
        self.left = set(peers)  # nodes whose shares are missing


class _Backward:
    """One backward whose gradients are exchanged, until the exchange is over."""

    def __init__(self, task: int | None, used: set[int]) -> None:
        self.task = task  # autograd's number of it, if it is known: nested ones have others (Rule 6)
        self.used = used  # ids of parameters that were reached before it
        self.has_any = False  # whether it made gradients
        self.under_way: list[tuple[HostCopy, Arriving, Sequence[Place]]] = []
        # By a parameter's id, what ``.grad`` was, and what came; None once the unit is complete.
        self.posted: dict[int, tuple[Tensor | None, Tensor] | None] = {}
        self.came: defaultdict[HostCopy, set[int]] = defaultdict(set)  # indices of the parameters that were posted
        self.passed: defaultdict[HostCopy, set[int]] = defaultdict(set)  # of those to whose leaves autograd came
        self.complete: dict[HostCopy, None] = {}  # units that may be summed beside backward (Rule 6)
        self.shown: dict[HostCopy, list[int]] = {}  # units that were, with the parameters that any rank reached
        self.begun: dict[HostCopy, _Crossing] = {}  # units that this node has summed, and sends (Rule 11)
        self.lent: list[tuple[HostCopy, Tensor]] = []  # regions that owners have not summed
        self.single: dict[tuple[HostCopy, int], Tensor] = {}  # those of gradients that came otherwise (Rule 5)
        self.began_s = time.monotonic()  # when this rank began to compute the next unit's gradients (Rule 9)
        self.longest_s = 0.0  # that a unit took
        self.units = 0  # to which this rank came
        self.signs: list[list[int]] = []  # of other ranks, when this one last looked
        self.until_s = 0.0  # when it gives up to wait for further ones
        self.kept: set[HostCopy] = set()  # units of which old gradients were looked for (Rule 4)
        self.job: Future[None] | None = None  # that sums
        self.all_posted = False  # whether the job ends once it has summed what there is


class Exchange:
    """The exchange of all units' gradients between the ranks of a machine."""

    def __init__(self, ranks: Ranks, device: Device, stores: Sequence[HostCopy]) -> None:
        self._ranks, self._device = ranks, device
        self._channel = ranks.number_board()
        self._is_torn = False  # whether a backward failed while nodes were summing (Rule 12)
        self.overlaps = True  # whether units are summed beside backward
        self.stores = list(stores)
        self._firsts: dict[HostCopy, int] = {}  # number of each unit's first parameter
        count = 0
        for store in self.stores:
            self._firsts[store] = count
            count += len(store.params)
        self._units = {store: count + number for number, store in enumerate(self.stores)}
        self._done = {store: number + len(self.stores) for store, number in self._units.items()}
        self._stands = count + 2 * len(self.stores)  # the number that says whether this rank goes on (Rule 8)
        self._came_to = self._stands + 1  # that of the units to which this rank came since its forward (Rule 9)
        self._failed = self._came_to + 1  # that of the last exchange in which this rank's backward failed (Rule 12)
        self._marks = {store: self._failed + 1 + number for number, store in enumerate(self.stores)}  # Rule 13
        self.board = Board(ranks, self._failed + 1 + len(self.stores))
        self.steps: StepsOfUnits  # which the team gives it
        self._signs = count  # the first number of which each change says that a rank gets on
        self._ahead, self._until = AHEAD, 0  # units for which there is room, and the last exchange that has it
        nbytes = sum(paged(2 * store.host_layout.nbytes) for store in self.stores)
        self.box = Box(ranks.rank, ranks.size, ranks.descriptor, device, ROOM * (nbytes + PAGE * count))
        self._sums = {store: self._sums_of(store) for store in self.stores}
        self._used: set[int] = set()  # ids of parameters reached since the last exchange, also in ``no_sync``
        self._slabs: dict[HostCopy, list[tuple[Tensor, GradientSlab]]] = {}  # over regions
        self._count = self._finished = 0  # the number of the last exchange that began, and of the last that ended
        self.changed: set[int] = set()  # ids of parameters whose gradients user code changed, at the step that runs
        ranks.exchanges.add(self)
        self._backward: _Backward | None = None  # that runs, or whose exchange does
        self._lock = threading.RLock()  # around what both of a backward's threads change (Rule 10)
        self._thread = ThreadPoolExecutor(1, "superpipeline-sums")
        self.kept: Kept = lambda store, indices: []  # which gradients user code has, too
        self._leaves: list[Any] = []  # a hook on the parameter itself would be one that reads its gradient
        self._hooks = [
            self._leaf(parameter).register_prehook(functools.partial(self._at_leaf, store, index))
            for store in self.stores
            for index, parameter in enumerate(store.params)
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def _sums_of(self, store: HostCopy) -> _Sums:
        slab = self._ranks.share(max(store.host_layout.nbytes, 1), keep=True)
        return _Sums(slab, store)

    def _leaf(self, parameter: Tensor) -> Any:
        """Return the node that accumulates a parameter's gradient, and keep it; frozen weights may be trained later."""
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.autograd.graph.get_gradient_edge(parameter).node
        if frozen:
            parameter.requires_grad_(False)
        self._leaves.append(leaf)
        return leaf

    def _at_leaf(self, store: HostCopy, index: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
        """Note that nothing more comes of a parameter's gradient, or what autograd accumulates now (Rules 5 and 6).

        That is given what came from the unit in this backward.
        """
        parameter, grad, backward = store.params[index], grads[0], self._backward
        if grad is not None:
            self._used.add(id(parameter))
        if backward is None:
            return None
        with self._lock:
            if grad is None:
                if backward.task is not None and graph_task() == backward.task:
                    backward.passed[store].add(index)
                    self._sum_if_complete(backward, store)
                return None
            backward.has_any = True
            while any(of is store and index in [at for at, *_ in places] for of, _, places in backward.under_way):
                self._post_next(backward)
            if id(parameter) not in backward.posted:
                return None
            self._check_not_complete(backward, store)
            posted = backward.posted.pop(id(parameter))
            assert posted is not None
            before, came = posted
            if before is not None and before is not true_grad(parameter):
                set_true_grad(parameter, before)
            return (came.to(grad.dtype) + grad,)

    def close(self) -> None:
        """Leave the gradients that users have to them. Safe twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._leaves = [], []
        self._ranks.exchanges.discard(self)
        self.abandon()
        self._thread.shutdown()
        self._slabs.clear()  # in the box
        self.box.close()
        for sums in self._sums.values():
            sums.slab.forget()
        self._sums.clear()  # what is ``.grad`` stays mapped

    # ---- one backward

    @property
    def active(self) -> bool:
        """Whether a backward runs whose gradients are exchanged."""
        return self._backward is not None

    @property
    def has_any(self) -> bool:
        """Whether this backward made gradients."""
        return self._backward is not None and self._backward.has_any

    def note_forward(self, ended: bool) -> None:
        """Note that a forward began, or that one ended which a backward may follow (Rule 9)."""
        self.board.post(self._came_to, (self._count + 1) * (ENDED + 1) if ended else 0)

    def begin(self, task: int | None) -> None:
        """Begin a backward whose gradients are exchanged, with autograd's number of it if it is known."""
        self.abandon()
        if self._is_torn:
            raise ExactnessError(
                "a backward failed while its gradients were being summed between machines, and others may have summed "
                "them: end this run, and go on from a checkpoint"
            )
        self._count += 1
        self._ahead = self._ahead if self._count <= self._until else AHEAD
        self._backward = _Backward(task, set(self._used))
        self._post_of_exchange(self._came_to, 0)

    def runs_as(self, task: int) -> None:
        """Take autograd's number of the backward, once it runs (Rule 6)."""
        if self._backward is not None and self._backward.task is None:
            self._backward.task = task

    def cancel(self) -> None:
        """End a backward that made no gradients: the other ranks may know nothing of it."""
        self._count -= 1
        self._backward = None

    def abandon(self) -> None:
        """Forget a backward that failed, if one did, but for its number (Rule 12)."""
        backward, self._backward = self._backward, None
        if backward is None:
            return
        self.board.post(self._failed, self._count)
        self._is_torn = self._is_torn or bool(backward.begun)
        self._used = backward.used
        with contextlib.suppress(Exception):  # of what was to be summed
            backward.all_posted = True
            self._end_job(backward)
        with contextlib.suppress(RuntimeError):  # a device that fails runs nothing more
            for _, arriving, _ in backward.under_way:
                arriving.wait()
        for _, region in backward.lent:
            self.box.give_back(region)

    def number(self) -> Alike:
        """Return the number of the exchange to which this rank comes, the same on all ranks (Rule 12)."""
        differs = "left out different batches after a backward that failed"
        return Alike(differs, f"comes with backward {self._count}", b"%d" % self._count)

    def _may_be_apart(self) -> bool:
        """Whether other ranks may come to this exchange with other numbers (Rule 12)."""
        failed = [self.board.read(rank, self._failed) for rank in range(self._ranks.size)]
        return max(failed) > self._finished and min(failed) != max(failed)

    @property
    def used(self) -> list[Tensor]:
        """The parameters reached since the last exchange."""
        return [parameter for store in self.stores for parameter in store.params if id(parameter) in self._used]

    def reached(self, parameters: Iterable[Tensor]) -> None:
        """Note parameters whose gradients came in a backward, whether it is exchanged or not."""
        self._used.update(map(id, parameters))

    def slab_for(self, store: HostCopy) -> GradientSlab:
        """Return slots for a unit's gradients in this rank's box, once the rank is not too far ahead (Rule 8)."""
        backward = self._backward
        assert backward is not None
        backward.units += 1
        self._post_of_exchange(self._came_to, backward.units)
        self._stay_near(backward)
        with self._lock:
            known = self._slabs.setdefault(store, [])
            known[:] = [(region, slab) for region, slab in known if slab.fits(store)]
            free = self.box.free_for(known[0][1].nbytes) if known else None
            for region, slab in known:
                if region is free:
                    self._lend(backward, store, slab.nbytes)
                    return slab
            slab = GradientSlab(store, self._device, lambda nbytes: self._lend(backward, store, nbytes))
            known.append((backward.lent[-1][1], slab))
            return slab

    def _lend(self, backward: _Backward, store: HostCopy, nbytes: int) -> Tensor:
        region = self.box.region(nbytes)
        backward.lent.append((store, region))
        return region

    def _stay_near(self, backward: _Backward) -> None:
        """Wait until there is room for another unit's gradients on their way to their owners (Rules 8 and 9)."""
        with self._lock:
            while len(backward.under_way) > AHEAD:
                self._post_next(backward)
        backward.longest_s = max(backward.longest_s, time.monotonic() - backward.began_s)
        if self._waiting_for(backward) and len(self._ranks.exchanges) == 1:
            with self._lock:
                while backward.under_way:  # for which others may wait
                    self._post_next(backward)
            self._ranks.wait(lambda: self._getting_on(backward), "gradients of units that this rank has posted")
            self.board.post(self._stands, 0)
        backward.began_s = time.monotonic()

    def _getting_on(self, backward: _Backward) -> list[int]:
        """List the ranks to wait for: none once they do not get on, and there is more room instead (Rule 9)."""
        awaited = self._waiting_for(backward)
        signs = [self.board.row(rank, self._signs, self._came_to + 1) for rank in awaited]
        if signs != backward.signs:
            backward.signs, backward.until_s = signs, time.monotonic() + self._patience_s(backward, awaited)
        elif awaited and time.monotonic() > backward.until_s:
            backward.signs = []
            self._ahead, self._until = 2 * self._ahead, self._count + KEPT
            return []
        return awaited

    def _patience_s(self, backward: _Backward, ranks: Sequence[int]) -> float:
        """Return for how many seconds this rank waits for a sign of others (Rule 9)."""
        if all(self.board.read(rank, self._came_to) // (ENDED + 1) == self._count for rank in ranks):
            return max(SHORT_S, PATIENCE * backward.longest_s)
        return min(LONG_S, self._ranks.timeout.total_seconds() / 2)

    def _waiting_for(self, backward: _Backward) -> list[int]:
        """List the ranks that a rank which is too far ahead waits for; give back what owners have summed (Rule 8)."""
        if backward.job is not None and backward.job.done():
            backward.job.result()  # raises what ended it
        ranks = range(self._ranks.size)
        while True:
            held = self._reclaim(backward)
            if len(held) + len(backward.under_way) <= self._ahead or self._may_be_apart():
                return []
            posted = next((store for store in held if self._all_at(self._units[store])), None)
            if posted is None:
                summed = sum(self._all_at(self._done[store]) for store in self.stores)
                self._stand(summed)  # before it looks at the others: of two that wait for each other, one goes on
                return [rank for rank in ranks if rank != self._ranks.rank and self._goes_on(rank, held, summed)]
            if behind := [rank for rank in ranks if self.board.read(rank, self._done[posted]) != self._count]:
                return behind
            # All owners have summed it in the meantime.

    def _stand(self, summed: int) -> None:
        """Say that this rank waits until more units are summed than these (Rule 8)."""
        self._post_of_exchange(self._stands, summed)

    def _post_of_exchange(self, index: int, number: int) -> None:
        """Post a number that holds for this exchange alone."""
        self.board.post(index, self._count * (ENDED + 1) + number)

    def _goes_on(self, rank: int, held: Sequence[HostCopy], summed: int) -> bool:
        """Whether a rank has not posted one of these units, and may do so before this rank goes on."""
        exchange, until = divmod(self.board.read(rank, self._stands), ENDED + 1)
        missing = any(self.board.read(rank, self._units[store]) != self._count for store in held)
        return missing and (exchange != self._count or until < summed)  # else it waits, and has no reason to wake up

    def _reclaim(self, backward: _Backward) -> list[HostCopy]:
        """Give back the regions of units that all owners have summed; return the complete units that they have not."""
        held: list[HostCopy] = []
        kept: list[tuple[HostCopy, Tensor]] = []
        with self._lock:
            for store, region in backward.lent:
                if store in backward.complete and self._all_at(self._done[store]):
                    self.box.give_back(region)
                    continue
                kept.append((store, region))
                if store in backward.complete:
                    held.append(store)
            backward.lent = kept
        return held

    def _all_at(self, number: int) -> bool:
        """Whether all ranks posted the number of this exchange."""
        return all(self.board.read(rank, number) == self._count for rank in range(self._ranks.size))

    def _check_not_complete(self, backward: _Backward, store: HostCopy) -> None:
        """Raise ExactnessError if gradients of a complete unit came again (Rule 6)."""
        if store in backward.complete:
            raise ExactnessError(
                f"gradients of {store.unit.name} came again after autograd was done with its weights: the ranks may "
                "have summed the first ones; run one backward for each exchange, or set optimizer_overlap=False"
            )

    def submit(
        self, store: HostCopy, arriving: Arriving, places: Sequence[Place], step: PendingStep | None = None
    ) -> None:
        """Have a unit's gradients posted when they have arrived in these places of the box, perhaps for a step."""
        backward = self._backward
        assert backward is not None
        if step is not None:
            self.steps.announce(store, step)
        with self._lock:
            backward.has_any = True
            backward.under_way.append((store, arriving, places))
            while backward.under_way and backward.under_way[0][1].has_arrived():
                self._post_next(backward)

    def _post_next(self, backward: _Backward) -> None:
        """Post the gradients that have been under way longest (Rule 1)."""
        store, arriving, arrived = backward.under_way.pop(0)
        self._check_not_complete(backward, store)
        arriving.wait()
        self._keep_old(backward, store)
        for index, region, grad in arrived:
            parameter = store.params[index]
            before = true_grad(parameter)
            if (posted := backward.posted.get(id(parameter))) is not None:
                before = _sum_of(*posted).to(true_dtype(parameter))
            backward.posted[id(parameter)] = before, grad
            self._post(backward, store, index, region, _sum_of(before, grad))
            backward.came[store].add(index)
        self._sum_if_complete(backward, store)

    def _sum_if_complete(self, backward: _Backward, store: HostCopy) -> None:
        """Have a unit summed beside backward if nothing more comes of it on this rank (Rule 6)."""
        came, passed = backward.came.get(store), backward.passed[store]
        if came is None or not came <= passed or store in backward.complete or not self.overlaps:
            return
        trained = {index for index, parameter in enumerate(store.params) if parameter.requires_grad}
        rest = [index for index in range(len(store.params)) if index not in came]
        if not trained <= passed or any(at is store for at, *_ in backward.under_way):
            return
        if any(id(store.params[index]) in self._used or true_grad(store.params[index]) is not None for index in rest):
            return
        for index in rest:
            self.board.post(self._firsts[store] + index, NONE)
        for index in came:
            backward.posted[id(store.params[index])] = None  # a reference to a slot would keep it from further use
        self.board.post(self._marks[store], self.steps.mark(store))
        self.board.post(self._units[store], self._count)
        backward.complete[store] = None
        if backward.job is None:
            flushes, threads = thread_settings()
            work = functools.partial(self._sum_beside, backward)
            backward.job = self._thread.submit(with_settings, work, flushes and self._device.is_host, threads)

    def _sum_beside(self, backward: _Backward) -> None:
        """Sum units that all ranks have posted, on the thread (Rule 6)."""
        looks = 0
        while True:
            is_last = backward.all_posted
            left = [store for store in list(backward.complete) if not self._is_summed(backward, store)]
            found = [store for store in left if self._all_at(self._units[store])]
            for store in found:
                mark = self._common_mark(store)
                self._sum_unit(backward, store, mark)
                self.board.post(self._done[store], self._count)
                if mark and store in backward.shown:
                    self.steps.summed(store, backward.shown[store])
            self._add_nodes(backward)
            if is_last:
                return
            if not found:
                looks += 1
                if looks % LOOKS == 0 and is_ending():  # an error left backward, and the process
                    return
                time.sleep(PAUSE_S)

    def _common_mark(self, store: HostCopy) -> int:
        """Return the mark of a complete unit that all ranks of this node posted; 0 if there is none (Rule 13)."""
        marks = {self.board.read(rank, self._marks[store]) for rank in range(self._ranks.size)}
        return marks.pop() if len(marks) == 1 else 0

    def _end_job(self, backward: _Backward) -> None:
        """Wait for the thread, which sums what all ranks have posted by now."""
        job, backward.job = backward.job, None
        if job is not None:
            job.result()

    def _post(self, backward: _Backward, store: HostCopy, index: int, region: Tensor | None, grad: Tensor) -> None:
        parameter = store.params[index]
        if grad.layout is not torch.strided:
            raise UnsupportedError(f"{store.names[index]} has a sparse gradient, which several devices cannot sum")
        field = store.host_layout.fields[index]
        place = None if region is None else self.box.place(region, grad)
        if place is None or grad.dtype not in TYPES or grad.stride() != field.stride:
            if (store, index) not in backward.single:
                backward.single[store, index] = self._lend(backward, store, field.nbytes)
            region = backward.single[store, index]
            copy = torch.empty(0, dtype=field.dtype, device="cpu").set_(
                region.untyped_storage(), 0, field.shape, field.stride
            )
            grad = copy.copy_(grad)
            place = self.box.place(region, region)  # a tensor without elements is nowhere
        assert place is not None
        used = USED if id(parameter) in self._used else 0
        self.board.post(self._firsts[store] + index, (place * len(TYPES) + TYPES.index(grad.dtype)) * 4 + AT + used)

    def _post_rest(self, backward: _Backward) -> None:
        """Post ``.grad``, or "none", for each parameter that was not posted in this backward (Rules 1 and 5).

        A name for a gradient that outlived this would count as user code's reference to it (Rule 3).
        """
        for store in self.stores:
            self._keep_old(backward, store)
            for index, parameter in enumerate(store.params):
                if store not in backward.complete and id(parameter) not in backward.posted:
                    grad = true_grad(parameter)
                    if grad is None:
                        used = USED if id(parameter) in self._used else NONE
                        self.board.post(self._firsts[store] + index, used)
                    else:
                        self._post(backward, store, index, None, grad)

    def end_backward(self) -> None:
        """Note that this rank's backward has ended: others no longer wait for its gradients (Rule 8)."""
        self._stand(ENDED)

    def finish(self) -> None:
        """Exchange what this backward made. Every rank comes here (Rules 1 to 3)."""
        backward = self._backward
        assert backward is not None
        while backward.under_way:
            self._post_next(backward)
        self._post_rest(backward)
        self.board.meet()
        backward.all_posted = True
        self._end_job(backward)
        flushes, _ = thread_settings()
        torch.set_flush_denormal(flushes and self._device.is_host)  # Rule 6
        try:
            for store in self.stores:
                if not self._is_summed(backward, store):
                    self._sum_unit(backward, store)
            self._wait_for_nodes(backward)
        finally:
            torch.set_flush_denormal(flushes)
        shown = [(store, backward.shown[store]) for store in self.stores]
        self.board.meet(AFTER_GRADIENTS)
        self._backward, self._finished = None, self._count
        for _, region in backward.lent:
            self.box.give_back(region)
        given_up = self.box.trim()
        for known in self._slabs.values():
            known[:] = [entry for entry in known if not any(entry[0] is region for region in given_up)]
        del backward  # what refers to gradients here is not user code
        for store, indices in shown:
            self._show(store, indices)
        self._used.clear()

    def gradients_of(self, optimizer: Optimizer, clipped: Callable[[HostCopy, int, Tensor], Tensor]) -> Alike:
        """Describe what user code wrote to the gradients that an optimizer steps with: each owner steps with its own.

        ``clipped`` multiplies a mean by the factors that owners have not multiplied by (clipping.py).

        Gradients that were not exchanged, since the backward was this rank's alone, are an ExactnessError.
        """
        for store in self.stores:
            store.wait_step()  # in which others multiply gradients of this optimizer as well (clipping.py, Rule 1)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        written: list[str] = []
        digest = hashlib.sha256()
        self.changed.clear()
        for store, sums in self._sums.items():
            pages = store.host_layout.indices_in(sums.slab.private())
            for index, (parameter, field) in enumerate(zip(store.params, store.host_layout.fields, strict=True)):
                grad = true_grad(parameter)
                if id(parameter) not in stepped:
                    continue
                if grad is None:
                    digest.update(f"no {store.names[index]}".encode())
                    self.changed.add(id(parameter))
                    continue
                if id(parameter) in self._used:
                    raise ExactnessError(
                        "an optimizer steps with gradients that were not exchanged between the devices, under DDP as "
                        "well: call self.manual_backward(loss) instead of loss.backward(), and step after a backward "
                        "outside of no_sync"
                    )
                if index not in pages and self.is_mean(store, index):
                    continue
                mean = clipped(store, index, flat(sums.slab.truth, field, slice(None)))
                if not same_bytes(mine := in_order(grad, field), mean):
                    written.append(store.names[index])
                    self.changed.add(id(parameter))
                    digest.update(f"{store.names[index]} {fingerprint(mine)}".encode())
        return Alike("changed gradients in different ways", f"changed {listed(written)}", digest.digest())

    # ---- for clipping.py

    def truth(self, store: HostCopy) -> Tensor:
        """Return the shared bytes of a unit's mean gradients."""
        return self._sums[store].slab.truth

    def is_mean(self, store: HostCopy, index: int) -> bool:
        """Whether a parameter's ``.grad`` is the face of the mean, and user code gave it no other data."""
        sums = self._sums[store]
        return true_grad(store.params[index]) is sums.views[index] and not sums.is_altered(index)

    def keep_old_bytes(self, store: HostCopy, index: int) -> None:
        """Have a mean that is no longer ``.grad`` keep its bytes on this rank, if code may refer to them (Rule 4)."""
        if self._is_kept(store, index):
            face = flat(self._sums[store].slab.face, store.host_layout.fields[index], slice(None))
            face.copy_(face.clone())  # a write gives this rank pages of its own

    def unseen(self, store: HostCopy, indices: Sequence[int], references: int) -> set[int]:
        """Return the indices of gradients that have at most ``references`` references beside our own.

        There are none if this rank wrote to any gradient of the unit, or code refers to another one, and may write it.
        """
        sums = self._sums[store]
        others = set(range(len(sums.views))).difference(indices)
        if sums.slab.private() or any(self._is_kept(store, index) for index in others):
            return set()
        traces = _traces([sums.views[index] for index in indices])
        return {index for index, seen in zip(indices, traces, strict=True) if seen == _own_traces(True, references)}

    def shared_means(self, store: HostCopy, indices: Collection[int]) -> list[int]:
        """Return those of a unit's gradients that are no means, or to which others refer than their parameters."""
        means = [index for index in range(len(store.params)) if self.is_mean(store, index)]
        unseen = self.unseen(store, means, 0)
        return [index for index in indices if index not in unseen]

    # ---- details

    def _is_kept(self, store: HostCopy, index: int) -> bool:
        """Whether code may refer to the bytes of a parameter's mean, whether that is ``.grad`` or not."""
        sums = self._sums[store]
        is_grad = true_grad(store.params[index]) is sums.views[index]
        return sums.is_altered(index) or _traces([sums.views[index]])[0] != _own_traces(is_grad)

    def _keep_old(self, backward: _Backward, store: HostCopy) -> None:
        """Keep the bytes of gradients that user code still refers to (Rule 4)."""
        if store in backward.kept:
            return
        backward.kept.add(store)
        sums = self._sums[store]
        left = [view for p, view in zip(store.params, sums.views, strict=True) if true_grad(p) is not view]
        altered = any(map(sums.is_altered, range(len(sums.views))))  # code may refer to the bytes that it had
        if altered or any(traces != _own_traces() for traces in _traces(left)):
            sums.slab.keep_face()
            sums.make_views()

    def _sum_unit(self, backward: _Backward, store: HostCopy, mark: int = 0) -> None:
        """Sum what this rank owns of a unit's gradients; with several nodes, send each its share (Rule 11).

        ``mark``: the one that this node's ranks have posted, of a complete unit.
        """
        # Sums of gradients that no rank of this node has reached: if none of another one has, the mean stays.
        apart: dict[int, Tensor] = {}
        shown, transport = self._sum(store, apart), self._ranks.transport
        if transport is None:
            backward.shown[store] = shown
            return
        flags = self._flags(store)
        mine = {index: apart.get(index, self._own_sum(store, index)) for index, flag in enumerate(flags) if flag & AT}
        marked = torch.tensor([mark], device="cpu")

        def pack(nodes: Sequence[int]) -> dict[int, Tensor]:
            shares = {node: [self._share_of(store, node, *sums) for sums in mine.items()] for node in nodes}
            return {node: packed(flags, [marked, *parts]) for node, parts in shares.items()}

        transport.send(PARTS, self._key(store), pack)
        backward.begun[store] = _Crossing(flags, mine, marked, transport.peers)

    @staticmethod
    def _is_summed(backward: _Backward, store: HostCopy) -> bool:
        return store in backward.shown or store in backward.begun

    def _key(self, store: HostCopy) -> Key:
        return self._channel, self._count, self._units[store]

    def _flags(self, store: HostCopy) -> list[int]:
        """Return of each parameter of a unit whether any rank of this node reached it, and posted a gradient."""
        first = self._firsts[store]
        rows = [self.board.row(rank, first, first + len(store.params)) for rank in range(self._ranks.size)]
        return [functools.reduce(operator.or_, posted) & (USED | AT) for posted in zip(*rows, strict=True)]

    def _own_sum(self, store: HostCopy, index: int) -> Tensor:
        field = store.host_layout.fields[index]
        return flat(self._sums[store].slab.truth, field, owned(field, self._ranks.rank, self._ranks.size))

    def _share_of(self, store: HostCopy, node: int, index: int, part: Tensor) -> Tensor:
        """Return a node's share of what this rank has of a parameter (Rule 11)."""
        return part[share(store.host_layout.fields[index], index, len(part), node, len(self._ranks.place.hosts))]

    def _missing(self, store: HostCopy, crossing: _Crossing) -> list[int]:
        """List the ranks of other nodes that keep a unit's mean from being there, and from being sent."""
        transport = self._ranks.transport
        assert transport is not None
        missing = transport.missing(PARTS, self._key(store)) if crossing.sent is None else []
        return missing or [transport.peers[node] for node in crossing.left] or list(transport.peers.values())

    def _add_nodes(self, backward: _Backward) -> None:
        """Go on with units on their way between nodes, as far as messages have come (Rule 11)."""
        transport = self._ranks.transport
        for store, crossing in backward.begun.items():
            if store in backward.shown:
                continue
            assert transport is not None  # else nothing is begun
            if crossing.sent is None and not transport.missing(PARTS, self._key(store)):
                self._sum_of_nodes(store, crossing)
            for node, message in transport.take(SUMS, self._key(store)).items():
                self._take_sums(store, node, message)
                crossing.left.remove(node)
            if crossing.sent is not None and crossing.sent.is_packed and not crossing.left:
                backward.shown[store] = crossing.shown
                if crossing.steps:
                    self.steps.summed(store, crossing.shown)

    def _wait_for_nodes(self, backward: _Backward) -> None:
        """Get the means of all units, once this node has sent all of its own sums (Rule 11)."""
        transport = self._ranks.transport
        if transport is None:
            return

        def missing() -> list[int]:
            self._add_nodes(backward)
            left = [store for store in backward.begun if store not in backward.shown]
            return self._missing(left[0], backward.begun[left[0]]) if left else []

        transport.drains = True
        self._ranks.wait_for_nodes(missing, "gradients of other machines")
        transport.drains = False

    def _sum_of_nodes(self, store: HostCopy, crossing: _Crossing) -> None:
        """Add the sums of all nodes as a tree over nodes, of this one's shares, and send them to all."""
        transport, place = self._ranks.transport, self._ranks.place
        assert transport is not None
        count = len(store.params)
        came = {node: Unpacked(message, count) for node, message in transport.take(PARTS, self._key(store)).items()}
        marks = {int(of.part(crossing.mark)) for of in came.values()} | {int(crossing.mark)}
        crossing.steps = len(marks) == 1 and 0 not in marks
        flags_of = [crossing.flags, *(of.flags for of in came.values())]
        used = [functools.reduce(operator.or_, flags) & USED for flags in zip(*flags_of, strict=True)]
        sums: list[Tensor] = []
        for index in range(count):
            target = self._share_of(store, place.node, index, self._own_sum(store, index))
            there = {node: of.part(target) for node, of in came.items() if of.flags[index] & AT}
            if index in crossing.mine:
                there[place.node] = self._share_of(store, place.node, index, crossing.mine[index])
            if not used[index]:
                continue
            sums.append(target)
            for start in range(0, len(target), PART):
                part = slice(start, start + PART)
                none = torch.zeros_like(target[part])
                parts = [there[node][part] if node in there else none for node in range(len(place.hosts))]
                target[part] = tree(parts)
        crossing.mine = {}
        crossing.shown = [index for index, flag in enumerate(used) if flag]
        crossing.sent = transport.send(SUMS, self._key(store), same_for_all(functools.partial(packed, used, sums)))

    def _take_sums(self, store: HostCopy, node: int, message: Tensor) -> None:
        """Take over the sums of all nodes, of another one's shares (Rule 11)."""
        came = Unpacked(message, len(store.params))
        for index in (index for index, flag in enumerate(came.flags) if flag):
            part = self._share_of(store, node, index, self._own_sum(store, index))
            part.copy_(came.part(part))

    def _sum(self, store: HostCopy, apart: dict[int, Tensor]) -> list[int]:
        """Sum what this rank owns of a unit's gradients on this node (Rule 2); return the parameters that get them."""
        rank, size, world = self._ranks.rank, self._ranks.size, self._ranks.world
        first = self._firsts[store]
        rows = [self.board.row(other, first, first + len(store.params)) for other in range(size)]
        shown: list[int] = []
        for index, field in enumerate(store.host_layout.fields):
            posted = [row[index] for row in rows]
            used = any(entry & USED for entry in posted)
            if used:
                shown.append(index)
            if not (used if world == size else any(entry & AT for entry in posted)):  # another node may have used it
                continue
            own = owned(field, rank, size)
            target = flat(self._sums[store].slab.truth, field, own)
            if not used:
                target = apart[index] = torch.empty_like(target)
            sources = [
                self._source(other, entry, field.nbytes // field.dtype.itemsize, own)
                for other, entry in enumerate(posted)
            ]
            for start in range(0, len(target), PART):
                part = slice(start, start + PART)
                target[part] = tree([_share(source, target[part], world, part) for source in sources])
        return shown

    def _source(self, rank: int, entry: int, numel: int, own: slice) -> Tensor | None:
        if not entry & AT:
            return None
        place, kind = divmod(entry // 4, len(TYPES))
        dtype = TYPES[kind]
        return self.box.of[rank][place : place + numel * dtype.itemsize].view(dtype)[own]

    def _show(self, store: HostCopy, indices: list[int]) -> None:
        """Give the parameters their mean gradients (Rule 3)."""
        if not indices:
            return
        sums = self._sums[store]
        pages = sums.slab.private()
        others = [index for index in store.host_layout.indices_in(pages) if index not in indices]
        alone = [sums.views[index] for index in others if true_grad(store.params[index]) is sums.views[index]]
        written = [view.clone() for view in alone]
        sums.slab.drop(pages)
        for view, bytes_ in zip(alone, written, strict=True):
            if not same_bytes(view, bytes_):
                view.copy_(bytes_)
        for index in indices:
            self._set_grad(store, index, sums.views[index])

    def _set_grad(self, store: HostCopy, index: int, view: Tensor) -> None:
        parameter = store.params[index]
        # A local name for the gradient would count as a reference to it.
        if true_grad(parameter) is not None and true_grad(parameter) is not view and self.kept(store, (index,)):
            _known(true_grad(parameter)).copy_(view)
        else:
            set_true_grad(parameter, view)


def _known(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def _sum_of(before: Tensor | None, grad: Tensor) -> Tensor:
    return grad if before is None else before + grad.to(before.dtype)


def tree(parts: list[Tensor]) -> Tensor:
    """Add tensors of all ranks as a binary tree over ranks (Rule 2)."""
    while len(parts) > 1:
        pairs = zip(parts[::2], [*parts[1::2], None], strict=False)
        parts = [one if other is None else one + other for one, other in pairs]
    return parts[0]


def _share(source: Tensor | None, like: Tensor, size: int, part: slice) -> Tensor:
    if source is None:
        return torch.zeros_like(like)
    return source[part].to(like.dtype) * (1.0 / size)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _traces(views: list[Tensor]) -> list[tuple[int, ...]]:
    """Read what changes when code refers to one of these tensors, or to its bytes."""
    return list(zip(*references(views), storage_uses(views), strict=True))


@functools.cache
def _own_traces(is_grad: bool = False, references: int = 0) -> tuple[int, ...]:
    """Read the traces of a tensor to which the list of views refers, the one that is looked at, and what is named."""
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    views = [torch.zeros(1, device="cpu")]
    others = [*views] * references
    if is_grad:
        parameter.grad = views[0]
    found = _traces([*views])[0]
    del others
    return found
