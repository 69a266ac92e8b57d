"""torch's own code for CUDA on a machine without a GPU: a CUDA runtime whose kernels do nothing, for other processes.

>>> subprocess.run([sys.executable, "script.py"], env=nullcuda.environment())

What a script does there with device "cuda" goes through torch's kernels' launching code, its caching allocator, its
streams, its page-locked memory, and ends in csrc/runtime.cpp, which says what it checks. So there is no number to
compare, but everything else: what raises, what is copied from where, how much memory is taken and when, to the byte.

* ``zeros=True``: no memory is kept for later, so all memory is new, and every result is zero. Two runs are then equal
  where they do the same, and the allocator keeps no figures.
* Without it, results are what was in the memory before: losses, and all that is decided by them, have no meaning.
* cuDNN and compiled kernels need a device: convolutions and recurrent layers take torch's own way.
* Every process says that its device is "Null CUDA"; no result of a campaign is one (benchmarks/gpu/publish.py).
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from typing import NamedTuple

SITE = pathlib.Path(__file__).parent / "site"


def environment(zeros: bool = False, **settings: int) -> dict[str, str]:
    """Of a process that has it.

    ``nbytes``: of a device; ``lockable``: bytes that can be page-locked; ``devices``: how many there are.
    """
    from . import build

    libraries = build.directory()
    found = dict(os.environ)
    names = {"nbytes": "NULLCUDA_BYTES", "lockable": "NULLCUDA_LOCKABLE", "devices": "NULLCUDA_DEVICES"}
    found |= {names[name]: str(value) for name, value in settings.items()}
    found["LD_PRELOAD"] = str(libraries / build.RUNTIME)
    found["LD_LIBRARY_PATH"] = os.pathsep.join([str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    found["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    if zeros:
        found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return found


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
