"""Check this package's host memory on a real device: page-locked, exact, fast, and freed again.

    python benchmarks/gpu/pinned.py [--gib 4]

Each check prints what it found; the exit status is 1 if one fails. Speeds are those of the best of five copies.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import campaign
import psutil
import torch
from torch import Tensor

from sp_lightning.host.device import Device

ODD = 512  # bytes beyond a power of two, which torch's own allocator would round up to the next
Found = dict[str, Any]


def main() -> int:
    parser = campaign.parser(__doc__)
    parser.add_argument("--gib", type=float, default=4, help="size of a slab (default: 4)")
    options = parser.parse_args()
    here = campaign.Campaign("pinned", options)
    nbytes = (16 << 20 if options.small else int(options.gib * 2**30)) + ODD
    failed = 0
    for check in CHECKS:
        found = check(here.device, nbytes)
        here.add({"check": check.__name__, **found})
        here.say(f"{check.__name__:32} {'right' if found['right'] else 'WRONG':6} {found['found']}")
        failed += not found["right"]
    here.say(f"{len(CHECKS)} checks, {failed} failed")
    return 1 if failed else 0


def outcome(right: bool, found: str) -> Found:
    return {"right": bool(right), "found": found}


@contextlib.contextmanager
def opened(name: str, host_memory: Any = "auto") -> Iterator[Device]:
    device = Device(name, host_memory)
    try:
        yield device
    finally:
        device.synchronize()
        device.close()


def resident() -> int:
    nbytes: int = psutil.Process().memory_info().rss
    return nbytes


# ---- checks


def a_slab_is_exact(name: str, nbytes: int) -> Found:
    with opened(name) as device:
        device.slab(1 << 20)  # loads what is needed once
        before, begin = resident(), time.perf_counter()
        slab = device.slab(nbytes)
        seconds = time.perf_counter() - begin
        slab.fill_(1)
        grown = resident() - before
    exact = abs(grown - nbytes) < 0.02 * nbytes + (4 << 20)
    return outcome(
        exact, f"{grown / nbytes:.3f} of its size resident, made and locked at {nbytes / seconds / 1e9:.1f} GB/s"
    )


def a_slab_is_locked_until_the_end(name: str, nbytes: int) -> Found:
    with opened(name) as device:
        slab = device.slab(nbytes)
        locked = device.is_host or slab.is_pinned()
    return outcome(
        locked and not slab.is_pinned() and slab.fill_(3)[-1] == 3, f"locked {locked}, then {slab.is_pinned()}"
    )


def an_error_stays_where_it_was_made(name: str, nbytes: int) -> Found:
    """Check that locking memory twice is an error, and that the next kernel runs without one."""
    with opened(name) as device:
        slab = device.slab(1 << 20)
        if device._lock is None:
            return outcome(True, "memory is not registered with this device")
        try:
            device._lock.lock(slab.data_ptr(), slab.numel())
        except RuntimeError as error:
            message = str(error)
        else:
            return outcome(False, "locked twice")
        ones = torch.ones(8, device=name)
        return outcome(ones.sum().item() == 8, message)


def memory_is_given_back(name: str, nbytes: int) -> Found:
    with opened(name) as device:
        device.slab(1 << 20)
        before = resident()
        for _ in range(20):
            device.slab(nbytes // 8).fill_(1)
        left = resident() - before
    return outcome(left < nbytes // 8, f"{left / 2**20:.0f} MiB left of 20 x {nbytes / 8 / 2**20:.0f} MiB")


def a_forked_process_ends_well(name: str, nbytes: int) -> Found:
    """Check that a forked process, such as a DataLoader's worker, ends well, and can read the slab once unlocked."""
    before = resident()
    with opened(name) as device:
        slab = device.slab(nbytes).fill_(5)
        began = time.perf_counter()
        locked = forked(lambda: 0)
        took = time.perf_counter() - began
    unlocked = forked(lambda: 0 if int(slab[-1]) == 5 else 1)
    grown = (resident() - before) / nbytes
    return outcome(
        locked == unlocked == 0, f"status {locked} and {unlocked}, {took * 1e3:.0f} ms, {grown:.2f} x resident"
    )


def forked(work: Callable[[], int]) -> int:
    child = os.fork()
    if not child:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def copies_are_right_and_fast(name: str, nbytes: int) -> Found:
    """Check copies through a slab, through torch's own page-locked memory, and through the staging ring."""
    speeds, right = {}, True
    for kind in ("slab", "torch", "ring"):
        with opened(name, "pageable" if kind == "ring" else "auto") as device:
            host = device.passing(nbytes) if kind == "torch" else device.slab(nbytes)
            host.copy_(torch.arange(nbytes, dtype=torch.uint8))
            there = torch.zeros(nbytes, dtype=torch.uint8, device=name)
            speeds[f"{kind} up"], submitted = timed(device, nbytes, lambda h=host, t=there, d=device: up(d, t, h))
            host.fill_(0)
            speeds[f"{kind} down"], _ = timed(device, nbytes, lambda h=host, t=there, d=device: down(d, h, t))
            right &= torch.equal(host, torch.arange(nbytes, dtype=torch.uint8))
            if kind == "slab" and not device.is_host:
                right &= submitted < 0.5  # otherwise the caller waited
    found = ", ".join(f"{what} {speed:.1f}" for what, speed in speeds.items())
    return {**outcome(right, f"GB/s: {found}"), "gb_per_s": speeds}


def up(device: Device, there: Tensor, host: Tensor) -> Any:
    return device.send_up(there, host)


def down(device: Device, host: Tensor, there: Tensor) -> Any:
    return device.send_down(host, there)


def timed(device: Device, nbytes: int, copy: Callable[[], Any]) -> tuple[float, float]:
    """Return the GB/s, and the share of the time until the copy is submitted."""
    copy().synchronize()
    best, submitted = float("inf"), 1.0
    for _ in range(5):
        device.synchronize()
        begin = time.perf_counter()
        arrival = copy()
        submit_s = time.perf_counter() - begin
        arrival.synchronize()
        device.synchronize()
        seconds = time.perf_counter() - begin
        best, submitted = min((best, submitted), (seconds, submit_s / seconds))
    return nbytes / best / 1e9, submitted


CHECKS = [
    a_slab_is_exact,
    a_slab_is_locked_until_the_end,
    an_error_stays_where_it_was_made,
    memory_is_given_back,
    a_forked_process_ends_well,
    copies_are_right_and_fast,
]


if __name__ == "__main__":
    sys.exit(main())
