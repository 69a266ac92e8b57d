"""Count what is on the device beside weights during a dry run, and the work done there.

1. Each storage that appears is counted until it is freed, rounded up as the device's allocator rounds.
2. A storage has the term of the moment in which it appears (step_trace.py, Rule 2), unless it turns out to be a
   gradient, or keys or values. Casts of weights, which only a run's first step makes, are counted apart as well.
3. Operators count with the current visit: their FLOPs by precision, what collectives send, and the bytes of memory
   that they move, apart for those with FLOPs and for all others (operator_work.py). Casts of weights do not count, as
   later steps do not make them, nor does what the host and its link do. Copies of arguments that only the first
   forward of a unit makes that is recomputed do count: they are a hundredth of these bytes, or less.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat.tensors import operator_of, schema_of, sent_by, storage_id, written_by
from ..core.unit_numbers import aligned
from .fake_tensors import tensors_of
from .operator_work import flops_of, moved_by
from .step_trace import KEPT, OUTSIDE, WORKING, StepPhase, Visit


@dataclass(slots=True)
class _Allocation:
    nbytes: int
    term: str
    visit: int
    moment: int
    is_cast: bool
    reference: object  # to the storage, which tells when that is freed


class MemoryTracker:
    """Counts what is on the device beside weights (Rules 1 and 2), and what is done there (Rule 3)."""

    def __init__(self, term: Callable[[], str]) -> None:
        self.visits = [Visit(None, (), False, True, totals=[0], casts=[0])]
        self.passes: list[int] = []  # places of the first visits of an answer's passes
        self.phases: list[StepPhase] = []  # of a step that begins with answers
        self._term = term
        self._live: dict[int, _Allocation] = {}
        self._now: dict[str, int] = {}
        self._total = 0
        self._moment = 0
        self._working: list[int] = []  # storages that the current visit made
        self._on_host = False
        self._casting = False
        self._casts = 0  # bytes of casts of weights
        refer = weakref.ref(self)  # what storages call must not lead to the tensors

        def freed(key: int, _reference: object) -> None:
            if (tracker := refer()) is not None:
                tracker._remove(key)

        self._freed = freed

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that ran: its work and the storages it made."""
        for tensor in tensors_of((out,)):
            self.add(tensor)
        self.visits[-1].mesh_nbytes += sent_by(func, args, out)
        visit = self.visits[-1]
        if (flops := flops_of(func)) is not None:
            self._count(visit, flops(args, kwargs, out), args)
            if operator_of(func) is not torch.ops.aten._grouped_mm:  # which reads the experts that have tokens alone
                visit.moved_nbytes += sum(tensor.nbytes for tensor in tensors_of((args, out)))
        elif not (self._on_host or self._casting or self._writes_elsewhere(func, args, kwargs)):
            visit.other_nbytes += moved_by(func, args, kwargs, out)

    def _writes_elsewhere(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator writes to host memory, or brings a unit's weights: the host or a link does that."""
        written = tensors_of(written_by(func, args, kwargs)) if schema_of(func).is_mutable else ()
        places = (self._live.get(storage_key(tensor)) for tensor in written)
        return any(place is not None and not place.nbytes for place in places)

    @staticmethod
    def _count(visit: Visit, flops: float, args: Any) -> None:
        if tensors_of(args)[0].dtype in (torch.float16, torch.bfloat16):
            visit.flops += flops
        else:
            visit.fp32_flops += flops

    def add(self, tensor: Tensor, term: str | None = None) -> None:
        """Count a tensor's storage if it is new."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._live:
            return
        nbytes = 0 if self._on_host else aligned(storage.nbytes())
        term = term or self._term()
        self._moment += 1
        reference = weakref.ref(storage, functools.partial(self._freed, key))
        self._live[key] = _Allocation(nbytes, term, len(self.visits) - 1, self._moment, self._casting, reference)
        self._casts += nbytes * self._casting
        if term == WORKING:
            self._working.append(key)
        self.change(term, nbytes)

    def _remove(self, key: int) -> None:
        allocation = self._live.pop(key)
        self._casts -= allocation.nbytes * allocation.is_cast
        self.change(allocation.term, -allocation.nbytes)

    def change(self, term: str, nbytes: int) -> None:
        """Add bytes to a term; a negative number removes them."""
        self._now[term] = self._now.get(term, 0) + nbytes
        self._total += nbytes
        visit = self.visits[-1]
        if nbytes > 0:
            visit.totals.append(self._total)
            visit.casts.append(self._casts)
        if self._total > visit.nbytes:
            visit.nbytes, visit.terms, visit.moment = self._total, dict(self._now), self._moment

    def begin(self, visit: Visit) -> None:
        """Begin another visit; what the last one made and left is kept for backward."""
        for key in self._working:
            allocation = self._live.get(key)
            if allocation is not None and allocation.term == WORKING:
                allocation.term = KEPT
                self._now[WORKING] -= allocation.nbytes
                self._now[KEPT] = self._now.get(KEPT, 0) + allocation.nbytes
        self._working = []
        visit.nbytes, visit.terms, visit.moment = self._total, dict(self._now), self._moment
        visit.totals, visit.casts = [self._total], [self._casts]
        self.visits.append(visit)

    def mark(self, tensor: Tensor, term: str) -> None:
        """Count a tensor as part of this term, also in the peaks that visits have reached since it was made."""
        allocation = self._live.get(storage_key(tensor))
        if allocation is None or allocation.term == term:
            return
        for visit in self.visits[allocation.visit :]:
            if visit.moment >= allocation.moment:
                was = WORKING if visit.terms.get(WORKING, 0) >= allocation.nbytes else KEPT
                was = was if visit.terms.get(was, 0) >= allocation.nbytes else OUTSIDE
                visit.terms[was] = visit.terms.get(was, 0) - allocation.nbytes
                visit.terms[term] = visit.terms.get(term, 0) + allocation.nbytes
        self._now[allocation.term] -= allocation.nbytes
        self._now[term] = self._now.get(term, 0) + allocation.nbytes
        allocation.term = term

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Count storages made within this context as casts of weights (Rule 2)."""
        self._casting = True
        try:
            yield
        finally:
            self._casting = False

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Count storages made within this context as host memory."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before


def storage_key(tensor: Tensor) -> int:
    """Return a key for a tensor's storage; 0 if it has none."""
    return storage_id(tensor.untyped_storage()) if tensor.layout is torch.strided else 0
