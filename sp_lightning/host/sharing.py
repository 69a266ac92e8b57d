"""Memory that processes of one machine share: files without a name (memfd), which one makes and the others open."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from ..errors import UnsupportedError

SIZE = 1 << 46  # bytes of a file, in which ranges that nobody wrote take nothing


def check_possible() -> None:
    """Raise UnsupportedError where processes cannot share memory so."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        raise UnsupportedError(
            f"several devices share host memory by memfd, which {sys.platform} has not: use devices=1, or"
            " strategy='ddp'"
        )


def made() -> int:
    """Make a file; return its descriptor."""
    descriptor = os.memfd_create("superpipeline")
    os.ftruncate(descriptor, SIZE)
    return descriptor


def opened(process: int, descriptor: int) -> int:
    """Open another process's file."""
    try:
        return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UnsupportedError(
            f"process {process} of this machine shares no memory with this one ({error}): have one user start all"
            " ranks, in one container"
        ) from error


def machine() -> str:
    """Identify the machine, and the container where it has processes of its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
