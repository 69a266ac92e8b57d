"""torch's own code for CUDA on a machine without a GPU: a CUDA runtime and a driver, for other processes.

>>> subprocess.run([sys.executable, "FILE"], env=nullcuda.environment())  # or python -m nullcuda FILE

What a script does there with device "cuda" goes through torch's launching code, its caching allocator, its streams and
its page-locked memory, and ends in csrc/, where state.h says what is checked: what raises, what is copied from where,
how much memory is taken and when, to the byte, and whether anything orders what must be.

* Kernels do nothing: results are what was in the memory before, and losses, and all that is decided by them, have no
  meaning. What a model of any size does to memory takes little time.
* ``numbers=True``: the CPU's kernels run in their place, on the same bytes (csrc/kernels.cpp). Results have meaning and
  can be compared; what memory kernels take for themselves is no longer seen.
* ``late=True``: copies are done as late as CUDA may do them. Without it, at once: who does not wait where he must has
  other numbers in one of both.
* cuDNN, fused attention and compiled kernels need a device: torch's other ways are taken.
* Every process says that its device is "Null CUDA"; no result of a campaign is one (benchmarks/gpu/publish.py).
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from typing import NamedTuple

SITE = pathlib.Path(__file__).parent / "site"


def environment(numbers: bool = False, late: bool = False, **settings: int) -> dict[str, str]:
    """Of a process that has it.

    ``nbytes``: of a device; ``lockable``: bytes that can be page-locked; ``devices``: how many there are;
    ``capability``: of a device, 90 for 9.0.
    """
    from . import build

    libraries = build.directory()
    found = dict(os.environ)
    names = {"nbytes": "NULLCUDA_BYTES", "lockable": "NULLCUDA_LOCKABLE", "devices": "NULLCUDA_DEVICES"}
    names["capability"] = "NULLCUDA_CAPABILITY"
    found |= {names[name]: str(value) for name, value in settings.items()}
    if numbers:
        found["NULLCUDA_KERNELS"] = str(libraries / build.KERNELS)
    if late:
        found["NULLCUDA_LATE"] = "1"
    found["LD_PRELOAD"] = str(libraries / build.RUNTIME)
    found["LD_LIBRARY_PATH"] = os.pathsep.join([str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    found["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def read_settings() -> None:
    """Read the environment's again: this process is a fork of one that began with others, and has asked for nothing."""
    ctypes.CDLL(None).nullcuda_read_settings()


class Counts(NamedTuple):
    """What this process, which has it, did so far."""

    up: int  # bytes
    down: int
    not_locked: int  # copies from or to host memory that is not page-locked
    kernels: int
    device_nbytes: int  # that are taken now, of all devices
    locked_nbytes: int


def counts() -> Counts:
    """So far."""
    out = (ctypes.c_long * 6)()
    ctypes.CDLL(None).nullcuda_counts(out)
    return Counts(*out)


def touches(device: int) -> int:
    """How often this process made, queued or asked for anything there."""
    return int(ctypes.CDLL(None).nullcuda_touches(device))
