"""One unit's bytes on the device: a buffer that is filled from the host bytes, read, and freed.

1. The buffer's storage object lives as long as the unit's layout: it is freed and re-allocated in place, so all of its
   aliases (the stand-ins, what autograd saved) see the refilled bytes.
2. The buffer is allocated, filled and freed under the up stream. ``ready`` is recorded there after the fill, and every
   reader of the bytes waits for it. Before the buffer is freed, the up stream waits for the last readers' events. So
   memory is never given to another unit while a kernel still reads it.
3. The copy knows nothing of the host. A fill is given where the bytes are, as data, the way on which they go up, and
   their stamp. The copy has this stamp once they are on their way; until then it is stale.
4. A fill that failed leaves the device's bytes stale, whatever they were: the next visit fills them again. The error is
   raised in whoever waits for the bytes; an eviction or another fill, which need none, do not raise it. A wait that was
   only interrupted is no failure: the next one takes it up again.
5. A buffer whose bytes are still referred to (by a saved tensor, a weight kept on ``ctx``, in a cache, as an attribute)
   is in use, and is not freed: reading a freed buffer would end the process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..compat.references import uses_of
from ..host.telemetry import Counters
from ..host.unit_numbers import ALIGNMENT
from .device import Device
from .layout import Layout
from .staging import Around, Arrival, Copies
from .weights import Stamp

Run = tuple[Tensor, int, int, int]  # a buffer, the first byte in it, the first byte on the device, the number of bytes


class Transport(Protocol):
    """The way on which bytes go up: the device's own copies, or a ring that reads files."""

    def __call__(self, copies: Copies, around: Around, loose: Copies, /) -> Arrival:
        """Start copies of bytes, and after them of tensors in any memory, with ``around`` around them."""


class Sources(NamedTuple):
    """The bytes that fill a device copy, and the way on which they go up."""

    runs: Sequence[Run]  # the same object until they change
    loose: Sequence[tuple[int, Tensor]]  # weights that go up by themselves, by index
    transport: Transport


class DeviceCopy:
    """The device buffer of one unit."""

    def __init__(self, name: str, device: Device, counters: Counters, stamp: Stamp) -> None:
        self.name = name
        self.device = device
        self.counters = counters
        self.stamp = stamp  # of the host bytes that it was filled from
        self.is_loaded = False  # whether the bytes are on the device, or on the way up until ``ready`` has happened
        self.ready: Any = None  # dropped early, a reader would see the bytes of the memory's previous user
        self._ordered: list[Any] = []  # streams that are ordered after the fill

    def lay_out(self, layout: Layout) -> None:
        """Have a buffer of this layout from the next fill on; the copy is not loaded, and no graph needs its bytes."""
        assert not self.is_loaded
        nbytes = max(layout.nbytes, ALIGNMENT)  # parameters may all be empty
        self.flat = self.device.device_bytes(nbytes)  # first: there may be no memory
        self.layout, self.nbytes = layout, nbytes
        self._offsets = [field.offset for field in layout.fields]
        self.storage = self.flat.untyped_storage()
        self._runs: Sequence[Run] = ()  # that the copies below are of
        self._copies: Copies = []
        self.own_aliases = self.aliases()  # tensors over the buffer that are ours, but for stand-ins
        self.stand_ins = 0  # tensors over it that these are, or have: counted when they are made

    # ---- fills

    def load(self, stamp: Stamp, sources: Sources) -> None:
        """Start to fill the buffer, which is allocated first if the unit is not resident (Rules 2 and 3)."""
        self.stamp = stamp._replace(epoch=None)  # if the fill is interrupted, the old bytes stay stale
        if self.is_loaded:  # filled again in place
            self._let_readers_finish()
        else:
            with self.device.up:
                self.device.grow(self.storage, self.nbytes)
        around = self.counters.listener.work("up", self.name, "weights", self.nbytes)
        if sources.runs is not self._runs:  # only now: slices of the buffer need its memory
            self.own_aliases += len(sources.runs) - len(self._copies)
            self._copies = [
                (self.flat[at : at + n], source[there : there + n]) for source, there, at, n in sources.runs
            ]
            self._runs = sources.runs
        self.ready = sources.transport(self._copies, around, [(self.view(i), data) for i, data in sources.loose])
        self._ordered = []
        self.stamp = stamp
        self.is_loaded = True
        self.counters.fetches += 1
        self.counters.bytes_up += self.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the unit is resident and the caller's stream is ordered after the fill."""
        return self.is_loaded and self.device.compute in self._ordered

    def wait_load(self) -> None:
        """Order the caller's stream after the fill, once for each stream."""
        stream = self.device.compute
        if stream not in self._ordered:
            try:
                self.ready.wait(stream)
            except Exception:
                self._failed()
                raise
            self._ordered.append(stream)

    def settle(self) -> None:
        """Wait until the fill reads no host bytes any more."""
        if self.ready is not None:
            try:
                self.ready.synchronize()
            except Exception:
                self._failed()
                raise

    def forget_sources(self) -> None:
        """Forget the host bytes: nothing is loaded any more."""
        self.own_aliases -= len(self._copies)
        self._runs, self._copies = (), []

    def free(self) -> None:
        """Free the buffer's memory after all queued readers (Rule 2)."""
        self._let_readers_finish()
        with self.device.up:
            self.device.shrink(self.storage)
        self.is_loaded = False
        self.counters.evictions += 1

    def _let_readers_finish(self) -> None:
        """Order the up stream after the fill, which may not be queued yet (staging.py), and after all readers.

        Readers are the work queued on the caller's stream, and on every other stream that was ordered after the fill.
        """
        try:
            self.ready.wait(self.device.up)
        except Exception:
            self._failed()
        for stream in {self.device.compute, *self._ordered}:
            self.device.up.wait_event(stream.record_event())

    def _failed(self) -> None:
        """Make the bytes stale: their fill failed (Rule 4)."""
        self.ready, self._ordered = self.device.up.record_event(), []
        self.stamp = self.stamp._replace(epoch=None)

    # ---- the bytes

    def view(self, index: int) -> Tensor:
        """Make a tensor over a weight's bytes, with a version counter of its own."""
        return self.layout.view(self.storage, self.layout.fields[index])

    def index_at(self, offset: int) -> int:
        """Return the index of the parameter in whose bytes an offset lies."""
        return bisect_right(self._offsets, offset) - 1

    def aliases(self) -> int:
        """Return how many tensors refer to the buffer (Rule 5)."""
        return uses_of([self.storage])[0]

    def has_views(self) -> bool:
        """Whether tensors other than our own refer to the buffer."""
        return uses_of([self.storage])[0] > self.own_aliases + self.stand_ins
