"""What is on the device beside weights while a step is rehearsed, and what is done there.

1. Each storage that appears is counted until it is freed, rounded up as the device's allocator rounds.
2. It has the term of the moment in which it appears (step_trace.py, Rule 2), until it turns out to be a gradient.
3. Operators count with the visit under way: their FLOPs as torch counts them, by precision, and that they are kernels.
   What not every version of torch counts, counts as products of matrices: attention with fewer heads of keys than of
   queries, and experts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..memory.layout import aligned
from .fake_tensors import tensors_of
from .step_trace import GRADIENTS, KEPT, OUTSIDE, WORKING, Visit

_ATTENTION = {  # kernels, and whether it is backward's
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{suffix}"): bool(suffix)
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for suffix in ("", "_backward")
}


@dataclass
class _Held:
    nbytes: int
    term: str
    visit: int
    moment: int


class MemoryTracker:
    """Counts what is on the device beside weights (Rules 1 and 2), and what is done there (Rule 3)."""

    def __init__(self, uses: Callable[[int], None], term: Callable[[], str]) -> None:
        self.visits = [Visit(None, (), False, course=[0])]
        self.weights: dict[int, int] = {}  # storages, and the units they are of
        self._uses = uses
        self._term = term
        self._held: dict[int, _Held] = {}
        self._now: dict[str, int] = {}
        self._total = 0
        self._moment = 0
        self._working: list[int] = []  # what the visit under way made
        self._on_host = False

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator ran."""
        for tensor in tensors_of(args, kwargs):
            if (owner := self.weights.get(storage_key(tensor))) is not None:
                self._uses(owner)
        made = [self.add(tensor) for tensor in tensors_of((out,))]
        visit = self.visits[-1]
        visit.kernels += any(made) or func._schema.is_mutable
        operator = func._overloadpacket
        if operator in _ATTENTION:
            self._count(visit, _attention_flops(_ATTENTION[operator], args), out)
        elif operator is torch.ops.aten._grouped_mm:
            rows = args[0].shape[-2:].numel() if args[1].dim() == 2 else args[0].numel()
            self._count(visit, 2 * rows * args[1].shape[-1], out)
        elif (formula := flop_registry.get(operator)) is not None:
            self._count(visit, formula(*args, **kwargs, out_val=out), out)

    @staticmethod
    def _count(visit: Visit, flops: float, out: Any) -> None:
        if tensors_of((out,))[0].dtype in (torch.float16, torch.bfloat16):
            visit.flops += flops
        else:
            visit.fp32_flops += flops

    def add(self, tensor: Tensor, term: str | None = None) -> bool:
        """Counts a tensor's storage, if it is a new one of the device."""
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or key in self.weights:
            return False
        nbytes = 0 if self._on_host else aligned(storage.nbytes())
        term = term or self._term()
        self._moment += 1
        self._held[key] = _Held(nbytes, term, len(self.visits) - 1, self._moment)
        if term == WORKING:
            self._working.append(key)
        self.change(term, nbytes)
        weakref.finalize(storage, self._remove, key).atexit = False
        return True

    def _remove(self, key: int) -> None:
        held = self._held.pop(key)
        self.change(held.term, -held.nbytes)

    def change(self, term: str, nbytes: int) -> None:
        """Bytes come or go."""
        self._now[term] = self._now.get(term, 0) + nbytes
        self._total += nbytes
        visit = self.visits[-1]
        if nbytes > 0:
            visit.course.append(self._total)
        if self._total > visit.nbytes:
            visit.nbytes, visit.terms, visit.moment = self._total, dict(self._now), self._moment

    def begin(self, visit: Visit) -> None:
        """Another visit: what the last one made and left is kept."""
        for key in self._working:
            held = self._held.get(key)
            if held is not None and held.term == WORKING:
                held.term = KEPT
                self._now[WORKING] -= held.nbytes
                self._now[KEPT] = self._now.get(KEPT, 0) + held.nbytes
        self._working = []
        visit.nbytes, visit.terms, visit.moment = self._total, dict(self._now), self._moment
        visit.course = [self._total]
        self.visits.append(visit)

    def is_gradient(self, tensor: Tensor) -> None:
        """It has been one since it was made: visits that were at their most by then held it as that."""
        held = self._held.get(storage_key(tensor))
        if held is None or held.term == GRADIENTS:
            return
        for visit in self.visits[held.visit :]:
            if visit.moment >= held.moment:
                was = WORKING if visit.terms.get(WORKING, 0) >= held.nbytes else KEPT
                was = was if visit.terms.get(was, 0) >= held.nbytes else OUTSIDE
                visit.terms[was] = visit.terms.get(was, 0) - held.nbytes
                visit.terms[GRADIENTS] = visit.terms.get(GRADIENTS, 0) + held.nbytes
        self._now[held.term] -= held.nbytes
        self._now[GRADIENTS] = self._now.get(GRADIENTS, 0) + held.nbytes
        held.term = GRADIENTS

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made within is host memory."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before


def storage_key(tensor: Tensor) -> int:
    """Tells a tensor's storage from others; 0 where it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _attention_flops(backward: bool, args: Any) -> int:
    """Of one kernel. Backward has the scores once more, and two products for each of the two that made the output."""
    query, key, value = args[backward : backward + 3]
    scores = query.shape[:-1].numel() * key.shape[-2]
    return int(2 * scores * ((3 if backward else 1) * query.shape[-1] + (2 if backward else 1) * value.shape[-1]))
