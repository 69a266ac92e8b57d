"""Gradients of all ranks, exchanged through host memory and summed by their owners in a fixed order.

1. A rank posts each unit's gradients in its *box*: memory of its own that the other ranks can read. A gradient lies
   there in the type in which it came down, or, with what ``.grad`` had before, in the parameter's type. At the end of
   backward a rank posts "none" for each parameter that it did not reach. So skipped blocks and idle experts need no
   flag: DDP's ``find_unused_parameters=True``.
2. Of each element the owner takes, once all ranks have posted the unit, ``x * (1 / ranks)`` in the parameter's type for
   each rank, as DDP's reducer does; none counts as zeros. It adds them as a binary tree over ranks: ((0+1)+(2+3))+...
   With two ranks this is the only order there is; with more it is that of `tree_hook`.
3. After the exchange ``.grad`` is the full mean on every rank: a face of one shared slab. If no rank reached a
   parameter since the last exchange, its ``.grad`` is left alone, with what user code wrote to it. A tensor that was
   ``.grad`` before and that user code refers to shows the mean as well, as where it is accumulated in place.
4. A ``.grad`` of an earlier exchange that is no longer ``.grad`` keeps its bytes for user code that still refers to it:
   before the rank posts the unit, it takes pages of its own for the whole face, and later ones get a new face.
5. What autograd accumulates by itself (for hooks, and past a unit's bridge) is posted from ``.grad`` at the end. It
   accumulates a parameter's gradient after the unit's came, and gets that as well, to be one summand as in a plain run.
6. A region of a box is free again once all owners have summed what lies there. So gradients exist once, but for those
   on their way. Owners sum on a thread of their own beside backward, unit by unit: those whose gradients came at once
   in every exchange before, and were posted by all ranks. The others are summed at the end. A unit whose gradients come
   again in one backward, though they never did before and were summed, is an error.
7. A reentrant backward may bring a unit's gradients several times: each is added to what was posted before.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..compat.references import references, storage_uses
from ..errors import ExactnessError, UnsupportedError
from ..memory.device import Device
from ..memory.gradient_store import GradientSlab
from ..memory.layout import Layout
from ..memory.parameters import set_true_grad, true_dtype, true_grad
from ..memory.unit_store import UnitStore
from ..memory.weights import same_bytes
from ..optim.pending_step import Arriving
from .board import Board, Ranks
from .faces import Alike, fingerprint, flat, in_order, listed, owned
from .shared_memory import PAGE, SharedSlab, drop_pages, lock_in, mapped, paged

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NONE, USED, AT = 0, 1, 2  # flags of what a rank posts of a parameter; the place and the type are above them
ROOM = 4  # a box has room for this many times the gradients: they are laid out again when types change
IDLE = 1  # exchanges after which a region that nobody needs is given up
PAUSE_S = 2e-4  # between two looks for units that all ranks have posted
PART = 1 << 18  # elements that an owner sums at a time


Place = tuple[int, Tensor, Tensor]  # of a gradient: its index, its region of the box, and its tensor there


class Box:
    """Memory of each rank that the others read (Rule 1): files of which only what was written takes memory."""

    def __init__(self, ranks: Ranks, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = paged(nbytes)
        self.of: list[Tensor] = []
        for rank in range(ranks.size):
            descriptor = ranks.descriptor(self._nbytes)
            self.of.append(mapped(descriptor, self._nbytes, mmap.MAP_SHARED)[0])
            if rank == ranks.rank:
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        self._end = 0
        self._holes: list[tuple[int, int]] = []  # bytes of regions that were given up
        self._starts: dict[int, int] = {}  # of regions, by their address here
        self._free: list[Tensor] = []
        self._idle: dict[int, int] = {}  # for how many exchanges nobody took a region, by its address

    def region(self, nbytes: int) -> Tensor:
        """Take memory of this rank's box, page-locked for its device: free memory, if there is any of about this size.

        It never waits: the box grows."""
        region = self.free_for(nbytes)
        if region is None:
            return self._grow(paged(nbytes))
        self._free = [other for other in self._free if other is not region]
        self._idle[region.data_ptr()] = 0
        return region

    def free_for(self, nbytes: int) -> Tensor | None:
        """Return the free region that would be taken: always the first one, so that the others may be given up."""
        fitting = [region for region in self._free if paged(nbytes) <= region.numel() <= 2 * paged(nbytes)]
        return min(fitting, key=lambda region: (region.numel(), self._starts[region.data_ptr()]), default=None)

    def _grow(self, nbytes: int) -> Tensor:
        start = next((start for start, room in self._holes if room >= nbytes), self._end)
        if start + nbytes > self._nbytes:
            raise UnsupportedError("the gradients of this model change their types too often for several devices")
        region, before = mapped(self._descriptor, nbytes, mmap.MAP_SHARED, start)
        lock_in(self._device, region, before)
        self._starts[region.data_ptr()] = start
        self._idle[region.data_ptr()] = 0
        if start == self._end:
            self._end += nbytes
        else:
            self._holes = [
                (at + nbytes, room - nbytes) if at == start else (at, room)
                for at, room in self._holes
                if at != start or room > nbytes
            ]
        return region

    def give_back(self, region: Tensor) -> None:
        """Let a region be taken again."""
        self._free.append(region)

    def trim(self) -> list[Tensor]:
        """Give up the regions that nobody took for `IDLE` exchanges; return them, for their last references."""
        left: list[Tensor] = []
        for region in self._free:
            address = region.data_ptr()
            self._idle[address] += 1
            if self._idle[address] > IDLE:
                start = self._starts.pop(address)
                del self._idle[address]
                drop_pages(self._descriptor, start, region.numel())
                self._holes.append((start, region.numel()))
                left.append(region)
        self._free = [region for region in self._free if region.data_ptr() in self._starts]
        return left

    def place(self, region: Tensor, tensor: Tensor) -> int | None:
        """Return where in the box a tensor begins; None if it is not in this region, or that is not of the box."""
        start = self._starts.get(region.data_ptr())
        offset = tensor.data_ptr() - region.data_ptr()
        return start + offset if start is not None and 0 <= offset < region.numel() else None

    def close(self) -> None:
        """Give up all memory that nothing else refers to. Safe twice."""
        if self.of:
            os.close(self._descriptor)
        self.of.clear()
        self._free.clear()


@dataclass(eq=False)
class _Sums:
    """The slab of a unit's mean gradients, and the tensors over its face that become ``.grad``."""

    slab: SharedSlab
    views: list[Tensor]


class Exchange:
    """The exchange of all units' gradients between the ranks of a machine."""

    def __init__(self, ranks: Ranks, device: Device, stores: Sequence[UnitStore]) -> None:
        self._ranks, self._device = ranks, device
        self.overlaps = True  # whether units are summed beside backward
        self.stores = list(stores)
        self._firsts: dict[UnitStore, int] = {}  # number of each unit's first parameter
        count = 0
        for store in self.stores:
            self._firsts[store] = count
            count += len(store.params)
        self._units = {store: count + number for number, store in enumerate(self.stores)}
        self._done = {store: number + len(self.stores) for store, number in self._units.items()}
        self.board = Board(ranks, count + 2 * len(self.stores))
        nbytes = sum(paged(2 * store.host_layout.nbytes) for store in self.stores)
        self.box = Box(ranks, device, ROOM * (nbytes + PAGE * count))
        self._sums = {store: self._sums_of(store) for store in self.stores}
        self._single: dict[tuple[UnitStore, int], Tensor] = {}  # regions for gradients that came otherwise (Rule 5)
        self._used: set[int] = set()  # ids of parameters reached since the last exchange, also in ``no_sync``
        # In this backward: what ``.grad`` was, and what came; None once the unit may be summed.
        self._posted: dict[int, tuple[Tensor | None, Tensor] | None] = {}
        self._summed: set[UnitStore] = set()
        self._count = 0  # of exchanges
        self._slabs: dict[UnitStore, list[tuple[Tensor, GradientSlab]]] = {}  # over regions
        self._lent: list[tuple[UnitStore, Tensor]] = []  # regions with gradients that owners have not summed
        self._visits: dict[UnitStore, int] = {}  # how often a unit's gradients came in this backward
        self._at_once: set[UnitStore] = set()  # units whose gradients came at once in the last exchange (Rule 6)
        self._again: set[UnitStore] = set()  # units whose gradients did not, at least once
        self._early: dict[UnitStore, None] = {}  # units that may be summed beside this backward
        self._shown: dict[UnitStore, list[int]] = {}  # parameters of units that were
        self._all_posted = False
        self._thread = ThreadPoolExecutor(1, "superpipeline-sums")
        self._job: Future[None] | None = None
        self._under_way: list[tuple[UnitStore, Arriving, Sequence[Place]]] = []
        self.has_any = False  # whether this backward made gradients
        self.is_own: Callable[[UnitStore, int], bool] = lambda store, index: True  # whether no user code has a gradient
        self.active = False  # whether a backward runs whose gradients are exchanged
        self._leaves: list[Any] = []  # a hook on the parameter itself would be one that reads its gradient
        self._hooks = [
            self._leaf(parameter).register_prehook(functools.partial(self._accumulating, store, parameter))
            for store in self.stores
            for parameter in store.params
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def _sums_of(self, store: UnitStore) -> _Sums:
        slab = self._ranks.share(max(store.host_layout.nbytes, 1), keep=True)
        return _Sums(slab, _views(slab, store))

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

    def _accumulating(
        self, store: UnitStore, parameter: Tensor, grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """Note what autograd is about to accumulate; add what came from the unit in this backward (Rule 5)."""
        grad = grads[0]
        if grad is None:
            return None
        self._used.add(id(parameter))
        if not self.active:
            return None
        self.has_any = True
        while any(
            store.params[index] is parameter for of, _, places in self._under_way if of is store for index, *_ in places
        ):
            self._post_next()
        if id(parameter) not in self._posted:
            return None
        self._comes_again(store)
        posted = self._posted.pop(id(parameter))
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
        self._end_job()
        self._thread.shutdown()
        for kept in (self._slabs, self._lent, self._single, self._posted, self._under_way):  # in the box
            kept.clear()
        self.box.close()
        for sums in self._sums.values():
            sums.slab.forget()
        self._sums.clear()  # what is ``.grad`` stays mapped

    # ---- one backward

    def begin(self) -> None:
        """Begin a backward whose gradients are exchanged."""
        self._end_job()
        self._count += 1
        self._all_posted = False
        self._visits.clear()
        self._early.clear()
        self._shown.clear()
        self._lent.clear()
        self.active, self.has_any = True, False
        self._under_way.clear()
        self._posted.clear()
        self._summed.clear()

    def cancel(self) -> None:
        """End a backward that made no gradients: the other ranks may know nothing of it."""
        self._count -= 1
        self.active = False

    def reached(self, parameters: Iterable[Tensor]) -> None:
        """Note parameters whose gradients came in a backward, whether it is exchanged or not."""
        self._used.update(map(id, parameters))

    def slab_for(self, store: UnitStore) -> GradientSlab:
        """Return slots for a unit's gradients in this rank's box."""
        self._reclaim()
        known = self._slabs.setdefault(store, [])
        known[:] = [(region, slab) for region, slab in known if slab.fits(store)]
        free = self.box.free_for(known[0][1].nbytes) if known else None
        for region, slab in known:
            if region is free:
                self._lend(store, slab.nbytes)
                return slab
        slab = GradientSlab(store, self._device, lambda nbytes: self._lend(store, nbytes))
        known.append((self._lent[-1][1], slab))
        return slab

    def _lend(self, store: UnitStore, nbytes: int) -> Tensor:
        region = self.box.region(nbytes)
        self._lent.append((store, region))
        return region

    def _reclaim(self) -> None:
        """Give back the regions of units that all owners have summed (Rule 6)."""
        for lent in [lent for lent in self._lent if lent[0] in self._early and self._all_at(self._done[lent[0]])]:
            self._lent = [other for other in self._lent if other is not lent]
            self.box.give_back(lent[1])

    def _all_at(self, index: int) -> bool:
        """Whether all ranks posted the number of this exchange."""
        return all(self.board.read(rank, index) == self._count for rank in range(self._ranks.size))

    def _comes_again(self, store: UnitStore) -> None:
        """Note that gradients of a unit came again in one backward (Rule 6)."""
        if store in self._early:
            raise ExactnessError(
                f"gradients of {store.unit.name} came again in one backward, which they never did before: the ranks "
                "may have summed the first ones; read its weights inside one step, or set optimizer_overlap=False"
            )
        self._again.add(store)

    def submit(self, store: UnitStore, arriving: Arriving, places: Sequence[Place]) -> None:
        """Have a unit's gradients posted when they have arrived in these places of the box."""
        self.has_any = True
        self._under_way.append((store, arriving, places))
        while self._under_way and self._under_way[0][1].has_arrived():
            self._post_next()

    def _post_next(self) -> None:
        """Post the gradients that have been under way longest (Rule 1)."""
        store, arriving, arrived = self._under_way.pop(0)
        self._visits[store] = self._visits.get(store, 0) + 1
        if self._visits[store] > 1:
            self._comes_again(store)
        arriving.wait()
        self._keep_old(store)
        for index, region, grad in arrived:
            parameter = store.params[index]
            before = true_grad(parameter)
            if (posted := self._posted.get(id(parameter))) is not None:
                before = _sum_of(*posted).to(true_dtype(parameter))
            self._posted[id(parameter)] = before, grad
            self._post(store, index, region, _sum_of(before, grad))
        if self.overlaps and store in self._at_once and store not in self._again and self._came_whole(store, arrived):
            for index, *_ in arrived:
                self._posted[id(store.params[index])] = None  # a reference to a slot would keep it from further use
            self.board.post(self._units[store], self._count)
            self._early[store] = None
            if self._job is None:
                self._job = self._thread.submit(self._sum_beside)

    def _came_whole(self, store: UnitStore, arrived: Sequence[Place]) -> bool:
        """Whether nothing else of this unit is to be posted at the end; if so, post "none" for its frozen weights."""
        came = {index for index, *_ in arrived}
        rest = [(index, parameter) for index, parameter in enumerate(store.params) if index not in came]
        if any(p.requires_grad or id(p) in self._used or true_grad(p) is not None for _, p in rest):
            return False
        for index, _ in rest:
            self.board.post(self._firsts[store] + index, NONE)
        return True

    def _sum_beside(self) -> None:
        """Sum units that all ranks have posted, on the thread (Rule 6)."""
        while True:
            is_last = self._all_posted
            found = [s for s in list(self._early) if s not in self._shown and self._all_at(self._units[s])]
            for store in found:
                self._shown[store] = self._sum(store)
                self.board.post(self._done[store], self._count)
            if is_last:
                return
            if not found:
                time.sleep(PAUSE_S)

    def _end_job(self) -> None:
        """Wait for the thread, which sums what all ranks have posted by now."""
        self._all_posted = True
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def _post(self, store: UnitStore, index: int, region: Tensor | None, grad: Tensor) -> None:
        parameter = store.params[index]
        if grad.layout is not torch.strided:
            raise UnsupportedError(f"{store.names[index]} has a sparse gradient, which several devices cannot sum")
        field = store.host_layout.fields[index]
        place = None if region is None else self.box.place(region, grad)
        if place is None or grad.dtype not in TYPES or grad.stride() != field.stride:
            if (store, index) not in self._single:
                self._single[store, index] = self._lend(store, field.nbytes)
            region = self._single[store, index]
            copy = torch.empty(0, dtype=field.dtype).set_(region.untyped_storage(), 0, field.shape, field.stride)
            grad = copy.copy_(grad)
            place = self.box.place(region, grad)
        assert place is not None
        used = USED if id(parameter) in self._used else 0
        self.board.post(self._firsts[store] + index, (place * len(TYPES) + TYPES.index(grad.dtype)) * 4 + AT + used)

    def finish(self) -> None:
        """Exchange what this backward made. Every rank comes here (Rules 1 to 3)."""
        while self._under_way:
            self._post_next()
        for store in self.stores:
            self._keep_old(store)
            for index, parameter in enumerate(store.params):
                if id(parameter) not in self._posted:
                    grad = true_grad(parameter)
                    if grad is None:
                        used = USED if id(parameter) in self._used else NONE
                        self.board.post(self._firsts[store] + index, used)
                    else:
                        self._post(store, index, None, grad)
        self.board.meet()
        self._end_job()
        shown = [(store, self._shown[store] if store in self._shown else self._sum(store)) for store in self.stores]
        self.board.meet()
        self._at_once = {store for store, visits in self._visits.items() if visits == 1}
        self._single.clear()
        for _, region in self._lent:
            self.box.give_back(region)
        self._lent.clear()
        given_up = self.box.trim()
        for known in self._slabs.values():
            known[:] = [entry for entry in known if not any(entry[0] is region for region in given_up)]
        self._posted.clear()  # what refers to gradients here is not user code
        for store, indices in shown:
            self._show(store, indices)
        self._used.clear()
        self.active = False

    def gradients_of(self, optimizer: Optimizer) -> Alike:
        """Describe what user code wrote to the gradients that an optimizer steps with: each owner steps with its own.

        Gradients that were not exchanged, since the backward was this rank's alone, are an ExactnessError.
        """
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        written: list[str] = []
        digest = hashlib.sha256()
        for store, sums in self._sums.items():
            pages = store.indices_in(sums.slab.private())
            for index, (parameter, field) in enumerate(zip(store.params, store.host_layout.fields, strict=True)):
                grad = true_grad(parameter)
                if id(parameter) not in stepped:
                    continue
                if grad is None:
                    digest.update(f"no {store.names[index]}".encode())
                    continue
                if id(parameter) in self._used:
                    raise ExactnessError(
                        "an optimizer steps with gradients that were not exchanged between the devices, under DDP as "
                        "well: call self.manual_backward(loss) instead of loss.backward(), and step after a backward "
                        "outside of no_sync"
                    )
                if index not in pages and grad is sums.views[index]:
                    continue
                mean = flat(sums.slab.truth, field, slice(None))
                if not same_bytes(mine := in_order(grad, field), mean):
                    written.append(store.names[index])
                    digest.update(f"{store.names[index]} {fingerprint(mine)}".encode())
        return Alike("changed gradients in different ways", f"changed {listed(written)}", digest.digest())

    def _keep_old(self, store: UnitStore) -> None:
        """Keep the bytes of gradients that user code still refers to (Rule 4)."""
        if store in self._summed:
            return
        self._summed.add(store)
        sums = self._sums[store]
        left = [view for p, view in zip(store.params, sums.views, strict=True) if true_grad(p) is not view]
        if any(traces != _own_traces() for traces in _traces(left)):
            sums.slab.keep_face()
            sums.views = _views(sums.slab, store)

    def _sum(self, store: UnitStore) -> list[int]:
        """Sum what this rank owns of a unit's gradients (Rule 2); return the parameters that get them."""
        rank, size = self._ranks.rank, self._ranks.size
        first = self._firsts[store]
        rows = [self.board.row(other, first, first + len(store.params)) for other in range(size)]
        shown: list[int] = []
        for index, field in enumerate(store.host_layout.fields):
            posted = [row[index] for row in rows]
            if not any(entry & USED for entry in posted):
                continue
            shown.append(index)
            own = owned(field, rank, size)
            target = flat(self._sums[store].slab.truth, field, own)
            sources = [
                self._source(other, entry, field.nbytes // field.dtype.itemsize, own)
                for other, entry in enumerate(posted)
            ]
            for start in range(0, len(target), PART):
                part = slice(start, start + PART)
                target[part] = tree([_share(source, target[part], size, part) for source in sources])
        return shown

    def _source(self, rank: int, entry: int, numel: int, own: slice) -> Tensor | None:
        if not entry & AT:
            return None
        place, kind = divmod(entry // 4, len(TYPES))
        dtype = TYPES[kind]
        return self.box.of[rank][place : place + numel * dtype.itemsize].view(dtype)[own]

    def _show(self, store: UnitStore, indices: list[int]) -> None:
        """Give the parameters their mean gradients (Rule 3)."""
        if not indices:
            return
        sums = self._sums[store]
        pages = sums.slab.private()
        others = [index for index in store.indices_in(pages) if index not in indices]
        alone = [sums.views[index] for index in others if true_grad(store.params[index]) is sums.views[index]]
        written = [view.clone() for view in alone]
        sums.slab.drop(pages)
        for view, bytes_ in zip(alone, written, strict=True):
            if not same_bytes(view, bytes_):
                view.copy_(bytes_)
        for index in indices:
            self._set_grad(store, index, sums.views[index])

    def _set_grad(self, store: UnitStore, index: int, view: Tensor) -> None:
        parameter = store.params[index]
        # A local name for the gradient would count as a reference to it.
        if true_grad(parameter) is not None and true_grad(parameter) is not view and not self.is_own(store, index):
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


def tree_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and takes no string
    """Sum DDP's gradients as several devices do here, as a communication hook: the reference for more than two ranks.

    ``DistributedDataParallel(...).register_comm_hook(None, sp_lightning.tree_hook)``, or
    ``DDPStrategy(ddp_comm_hook=sp_lightning.tree_hook)`` on CUDA.
    """
    size = dist.get_world_size()
    mine = bucket.buffer()
    of_all = [torch.empty_like(mine) for _ in range(size)]
    gathered = dist.all_gather(of_all, mine, async_op=True).get_future()
    return gathered.then(lambda _: tree([_share(part, part, size, slice(None)) for part in of_all]))


def _share(source: Tensor | None, like: Tensor, size: int, part: slice) -> Tensor:
    if source is None:
        return torch.zeros_like(like)
    return source[part].to(like.dtype) * (1.0 / size)


def _views(slab: SharedSlab, store: UnitStore) -> list[Tensor]:
    storage = slab.face.untyped_storage()
    return [Layout.own_view(storage, field) for field in store.host_layout.fields]


def _traces(views: list[Tensor]) -> list[tuple[int, ...]]:
    """Read what changes when code refers to one of these tensors, or to its bytes."""
    return list(zip(*references(views), storage_uses(views), strict=True))


@functools.cache
def _own_traces() -> tuple[int, ...]:
    """Read the traces of a tensor that only a list refers to."""
    return _traces([torch.zeros(1, device="cpu")])[0]
