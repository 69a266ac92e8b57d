"""Gradients that lie on a disk: they arrive in a ring of buffers, and go from there to the scratch file.

1. ``.grad`` is a tensor over the file's mapping (scratch_file.py, Rule 2): right for any code at any time, by page
   faults. It is set once its bytes are in the file. Steps in portions read it past the mapping (state_on_disk.py).
2. A unit's gradients arrive in a buffer at the places that they have in the unit's slab. They are widened there, and
   are written to the file, or added to what is in it.
3. A buffer is free again when its gradients have landed. If none is free, the oldest gradients land on the thread that
   asks for one, whoever else would have had them land later. What a failed backward, or a step that was given up,
   leaves does not land: it is cancelled. One thread at a time has gradients land or cancels them: whoever has the
   ring's lock. Only the thread in backward takes buffers. It makes larger ones once a unit's gradients need them: code
   may train more than what trained when units were chosen, or a larger layer may have come.
4. A gradient without a slot of its type is in memory, and so is one whose slot other code refers to (slab.py, Rule 1).
5. No forked process gets the buffers (direct_ring.py, Rule 6).
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.telemetry import Counters
from ..disk.direct_file import BLOCK, blocks
from ..disk.direct_ring import READERS, Buffer, aligned_buffer, keep_from_forks
from ..disk.placement import GRADIENT_BUFFERS, GRADIENT_PIECE
from ..disk.scratch_file import ScratchFile
from ..disk.state_ring import BlockRun, as_few_runs, cut
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import set_true_grad, true_grad
from .slab import GradientSlab, GradientSlot, PackedGradients, accumulate, widen
from .way_down import GradientTransfer, mark_of


class GradientRing:
    """The buffers in which gradients arrive, and the threads that move them to the file and add to what is there."""

    def __init__(self, file: ScratchFile, device: Device, counters: Counters, nbytes: int) -> None:
        """Make a ring of buffers of this many bytes, which are allocated when the first one is taken."""
        self.file = file
        self._device, self._counters, self._buffer_nbytes = device, counters, nbytes
        self._buffers: list[Buffer] = []
        self._pieces: list[Buffer] = []  # through which gradients in the file are added to
        self._free: deque[Buffer] = deque()
        self._lent: deque[TransferToDisk] = deque()
        self.landing = threading.RLock()  # Rule 3
        self._threads: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.flat.nbytes for buffer in (*self._buffers, *self._pieces))

    def have_room(self, nbytes: int) -> None:
        """Have buffers of at least this many bytes from now on; gradients in smaller ones land (Rule 3)."""
        if nbytes > self._buffer_nbytes:
            for transfer in list(self._lent):
                transfer.land()
            self.close()
            self._buffer_nbytes = nbytes

    def next_free(self) -> Buffer:
        """Return the buffer that the next transfer gets; have the oldest gradients land if none is free (Rule 3)."""
        if self._threads is None:
            try:
                self._open()
            except BaseException:
                self.close()
                raise
        for transfer in list(self._lent):
            if not self._free:
                transfer.land()
        return self._free[0]

    def transfer(self, *of: Any) -> TransferToDisk:
        """Make a transfer into the next free buffer."""
        transfer = TransferToDisk(*of, ring=self, buffer=self._free.popleft())
        self._lent.append(transfer)
        return transfer

    def give_back(self, transfer: TransferToDisk) -> None:
        """Have the buffer of a transfer free again."""
        if transfer in self._lent:
            self._lent.remove(transfer)
            self._free.append(transfer.buffer)

    def write(self, buffer: Buffer, runs: Iterable[BlockRun], nbytes: int) -> None:
        """Write runs of a buffer, which have these bytes of gradients, to the file."""
        self._share(self._write, [(buffer, run) for run in cut(as_few_runs(runs), GRADIENT_PIECE)])
        self._counters.disk_written += nbytes

    def add(self, so_far: Tensor, begin: int, grad: Tensor) -> None:
        """Add to a gradient that begins at this byte of the file."""
        count, flat = self._pieces[0].flat.nbytes // grad.itemsize, grad.as_strided((grad.numel(),), (1,))
        parts = [(begin + first * grad.itemsize, flat[first : first + count]) for first in range(0, len(flat), count)]
        for first in range(0, len(parts), READERS):
            some = zip(self._pieces, parts[first : first + READERS], strict=False)
            self._share(self._add, [(piece, *part) for piece, part in some])
        torch.autograd.graph.increment_version(so_far)
        self._counters.disk_read += grad.nbytes
        self._counters.disk_written += grad.nbytes

    def close(self) -> None:
        """End the threads and free the buffers. Safe twice."""
        if self._threads is not None:
            self._threads.shutdown()
        for buffer in (*self._buffers, *self._pieces):
            keep_from_forks(buffer.flat, False)
        self._threads, self._buffers, self._pieces = None, [], []
        self._free.clear()
        self._lent.clear()

    # ---- details

    def _open(self) -> None:
        """Allocate the buffers and make the threads."""
        for _ in range(GRADIENT_BUFFERS):
            self._buffers.append(aligned_buffer(self._device, self._buffer_nbytes))
        for _ in range(READERS):
            self._pieces.append(aligned_buffer(self._device, min(GRADIENT_PIECE, self._buffer_nbytes)))
        self._free.extend(self._buffers)
        self._threads = ThreadPoolExecutor(READERS, "superpipeline-gradients")

    def _share(self, work: Callable[..., None], of: Sequence[tuple[Any, ...]]) -> None:
        """Have the threads do some work, and wait for all of it, also after an error."""
        assert self._threads is not None
        jobs = [self._threads.submit(work, *one) for one in of]
        with self._counters.stall("disk"):
            errors = [job.exception() for job in jobs]
        for error in filter(None, errors):
            raise error

    def _write(self, buffer: Buffer, run: BlockRun) -> None:
        with self._counters.listener.work("disk out", "", "gradients", run.nbytes):
            self.file.write(buffer.memory[run.at :], run.offset, run.nbytes)

    def _add(self, piece: Buffer, begin: int, grad: Tensor) -> None:
        nbytes = blocks(grad.nbytes)
        with self._counters.listener.work("disk in", "", "gradients", nbytes):
            self.file.read(piece.memory, begin, nbytes)
        with torch.no_grad():
            so_far = piece.flat[: grad.nbytes].view(grad.dtype)
            so_far += grad
        with self._counters.listener.work("disk out", "", "gradients", nbytes):
            self.file.write(piece.memory, begin, nbytes)


@dataclass(eq=False)
class TransferToDisk(GradientTransfer):
    """Gradients of a unit on their way to the file."""

    ring: GradientRing = field(kw_only=True)
    buffer: Buffer = field(kw_only=True)  # in which they arrive
    _is_over: bool = False
    _error: BaseException | None = None

    def land(self) -> list[Tensor]:
        """Have the gradients land, as one in memory does; another thread may have done so (Rule 3)."""
        with self.ring.landing:
            if self._error is not None:
                raise self._error
            if not self._is_over:
                self._is_over = True
                try:
                    self.wait()
                    self._accumulate()
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # whoever keeps it would keep gradients
                    self._error = error
                    raise
                finally:
                    self._leave()
            return self.parameters

    def cancel(self) -> None:
        with self.ring.landing:
            if not self._is_over:
                self._is_over = True
                self.wait()
                self._leave()

    def _leave(self) -> None:
        """Let go of the buffer, and of the slots, which else are taken for as long as anything refers to this."""
        self.slots, self.in_use = [], []
        self.ring.give_back(self)

    def _accumulate(self) -> None:
        before = list(map(true_grad, self.parameters))
        mark = mark_of(before)
        widen(slot for slot in self.slots if slot.flat is self.buffer.flat and slot.wide_view is not None)
        written: list[tuple[Tensor, Tensor, BlockRun]] = []
        for parameter, so_far, slot in zip(self.parameters, before, self.slots, strict=True):
            grad = _landing_place(slot)
            if slot.flat is not self.buffer.flat:
                accumulate(parameter, so_far, slot.tensor)
            elif so_far is not None:
                begin = self._place_of(so_far, grad)
                if begin is None:
                    accumulate(parameter, so_far, grad)
                else:
                    self.ring.add(so_far, begin, grad)
            elif slot.lands_in is None:
                set_true_grad(parameter, grad.clone())
            else:
                place = self.ring.file.place_of(slot.lands_in)
                assert place is not None
                at = slot.offset if slot.wide_view is None else slot.wide_offset
                written.append((parameter, slot.lands_in, BlockRun(place.offset, at, blocks(place.nbytes))))
        self.ring.write(self.buffer, [run for *_, run in written], sum(home.nbytes for _, home, _ in written))
        for parameter, home, _ in written:
            set_true_grad(parameter, home)
        self.marks.note_accumulated(self.parameters, mark)

    def _place_of(self, so_far: Tensor, grad: Tensor) -> int | None:
        """Return where a gradient is in the file; None if it is not, or if code made something else of it."""
        place = None if so_far.requires_grad or so_far.layout is not torch.strided else self.ring.file.place_of(so_far)
        alike = (so_far.dtype, so_far.shape, so_far.stride()) == (grad.dtype, grad.shape, grad.stride())
        return place.offset if place is not None and alike else None


class SlabOnDisk(GradientSlab):
    """A slab over the file's mapping, whose gradients arrive in a buffer of the ring."""

    alignment = BLOCK

    def __init__(self, store: HostCopy, device: Device, ring: GradientRing) -> None:
        self._ring, self.make_transfer = ring, ring.transfer
        super().__init__(store, device, self._in_file)
        ring.file.divide(self._flat, map(_landing_place, self._slots.values()))
        self.nbytes = 0  # of memory

    def slots_for(self, indices: list[int], grads: list[Tensor]) -> tuple[list[GradientSlot], PackedGradients]:
        self._ring.have_room(self._flat.nbytes)
        buffer = self._ring.next_free()
        free = self._free(self._traces())
        found = []
        for index, grad in zip(indices, grads, strict=True):
            slot = self._slots.get(index)
            if slot is None or grad.dtype is not slot.tensor.dtype or not grad.numel():
                found.append(self._slot_for(index, grad, ()))
            else:
                found.append(_in_buffer(slot, buffer, index in free))
        return found, PackedGradients(self._device, found)

    def _free(self, traces: tuple[list[Any], ...]) -> set[int]:
        same = dict(zip(map(id, self._tensors), self._same(traces), strict=True))
        return {index for index, slot in self._slots.items() if same[id(_landing_place(slot))]}

    def _in_file(self, nbytes: int) -> Tensor:
        (self._flat,) = self._ring.file.tensors([torch.empty(nbytes, dtype=torch.uint8, device="meta")])
        return self._flat


def _landing_place(slot: GradientSlot) -> Tensor:
    return slot.tensor if slot.wide_view is None else slot.wide_view


def _in_buffer(slot: GradientSlot, buffer: Buffer, is_free: bool) -> GradientSlot:
    """Return the slot in a buffer, of the same offsets, of a gradient that lands in this one if it is free."""

    def view(like: Tensor, begin: int) -> Tensor:
        flat = buffer.flat[begin : begin + like.nbytes].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    wide = None if slot.wide_view is None else view(slot.wide_view, slot.wide_offset)
    lands_in = _landing_place(slot) if is_free else None
    return GradientSlot(view(slot.tensor, slot.offset), buffer.flat, slot.offset, wide, slot.wide_offset, lands_in)
