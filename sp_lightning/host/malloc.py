"""Freed memory that glibc's malloc keeps resident, and how to make it keep less.

glibc maps large blocks from the system one by one, and takes small ones from a heap that only shrinks at its end. The
threshold between them grows with the largest block ever freed, up to 32 MiB: most of a model's tensors are small then.
A block freed in the middle of the heap stays resident. An aligned allocation, as all of torch's are, cannot even reuse
the hole that a block of its own size left. Nothing is changed if the user set malloc's thresholds, or if this is
another C library.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

MIB = 1 << 20
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers of these parameters
LARGEST = 32 * MIB  # up to which glibc's own threshold grows


def _library() -> Any:
    """Load the C library if it is glibc and the user set none of malloc's thresholds; else return None."""
    chosen = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"))
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


class _HeapState:
    """State of the whole process, as malloc's is."""

    maps_large_blocks = False


_glibc = _library()
_state = _HeapState()


def map_large_blocks() -> None:
    """Make malloc map blocks of at least 1 MiB one by one, so that freeing one returns it to the system.

    For runs with bytes in files: memory that the model frees would otherwise stay with the process, beyond its budget.
    Units that came and went among gradients left 1.5 times as much as the gradients.
    """
    if _glibc is not None:
        _state.maps_large_blocks = True
        _glibc.mallopt(MMAP_THRESHOLD, MIB)


def restore_thresholds() -> None:
    """Undo `map_large_blocks`, if it is in effect: map only blocks of at least 32 MiB one by one.

    A process that once freed such a block has the same thresholds: glibc then trims the heap's end from 64 MiB on.
    """
    if _glibc is not None and _state.maps_large_blocks:
        _state.maps_large_blocks = False
        _glibc.mallopt(MMAP_THRESHOLD, LARGEST)
        _glibc.mallopt(TRIM_THRESHOLD, 2 * LARGEST)
