"""What the C library keeps of memory that was given back to it, and how it is made to keep less.

1. glibc takes large blocks from the system one by one, and small ones from a heap that only shrinks at its end. What
   counts as large grows with the largest block that was ever freed, up to 32 MiB: most of a model's tensors are small
   then. A block that is freed in the middle of the heap stays resident, and an aligned allocation, as all of torch's
   are, can not even be made in the hole that one of its own size left.
2. Weights that move into slabs leave such holes: `freed` gives the pages of holes back to the system.
3. The first step of an optimizer makes its state, tensor by tensor, among temporaries of the same sizes: in a heap, the
   holes between what stays took a fifth as much memory as the state. `by_themselves` makes large what has at least
   1 MiB, until `as_ever`: state is exact then, and what is freed is gone.
4. Nothing is done where the user set malloc's thresholds, or where there is another C library.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

MIB = 1 << 20
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt
ENOUGH = 64 * MIB  # freed between two looks at the heap
LARGEST = 32 * MIB  # threshold, to which glibc's own grows


def _library() -> Any:
    chosen = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"))
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


class _State:
    """Of the process, as malloc's is."""

    freed = 0
    by_themselves = False


_glibc = _library()
_state = _State()


def freed(nbytes: int) -> None:
    """So much was given back in many pieces. Free pages inside the heap go back to the system now and then (Rule 2):
    that takes milliseconds."""
    _state.freed += nbytes
    if _glibc is not None and _state.freed >= ENOUGH:
        _state.freed = 0
        _glibc.malloc_trim(0)


def by_themselves() -> None:
    """Blocks of at least 1 MiB are taken from the system, and given back to it, one by one (Rule 3)."""
    if _glibc is not None:
        _state.by_themselves = True
        _glibc.mallopt(MMAP_THRESHOLD, MIB)


def as_ever() -> None:
    """Only those of at least 32 MiB, as in any process that once freed one; the heap's end is given back by twice as
    much, as glibc does then. Nothing where that is so."""
    if _glibc is not None and _state.by_themselves:
        _state.by_themselves = False
        _glibc.mallopt(MMAP_THRESHOLD, LARGEST)
        _glibc.mallopt(TRIM_THRESHOLD, 2 * LARGEST)
