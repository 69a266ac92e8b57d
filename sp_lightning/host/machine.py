"""Facts about the host: its free and total memory, page locks, cores and GPUs. No tensors needed.

A limit that the system does not report is None, never a guess.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

ROOT = Path("/")
SYSTEM_SHARE, SYSTEM_LEAST, SYSTEM_MOST = 0.1, 4 * 2**30, 32 * 2**30  # of host memory, that is the system's
SMALL_HOST_SHARE = 0.25  # the most that is taken of a small host
NO_LIMIT = 1 << 60  # cgroups of the first version write "none" as a number near 2**63


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory for this process."""

    total: int
    free: int
    limited_by: str  # "machine" or "cgroup"
    machine: int  # total of the machine, including what this process may not use


def host_memory(root: Path = ROOT) -> HostMemory:
    """Return how much memory this process may use at most, and how much of that is free now.

    Both are the smaller of the machine's and the cgroup's. In a cgroup, cached file pages count as free: the
    kernel reclaims them before it kills a process.
    """
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in _cgroup_limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return HostMemory(total, free, "cgroup" if total < machine.total else "machine", machine.total)


def peak_memory() -> int:
    """Return this process's peak memory in bytes; where the system does not tell, that may be its parent's."""
    own = _statistic(ROOT / "proc/self/status", ("VmHWM:",))
    return 1024 * (own or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def lock_limit() -> int | None:
    """Return how many bytes an unprivileged process may page-lock (``ulimit -l``); None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft in (resource.RLIM_INFINITY, -1) else soft


def usable_cores() -> int:
    """Count the physical cores that this process may run on, within its CPU quota."""
    allowed = len(os.sched_getaffinity(0))
    logical, physical = psutil.cpu_count() or allowed, psutil.cpu_count(logical=False) or allowed
    cores = max(1, round(allowed * physical / logical))
    quota = _cpu_quota(ROOT)
    return cores if quota is None else max(1, min(cores, int(quota)))


def gpus_by_vendor(root: Path = ROOT) -> dict[str, int]:
    """Count the GPUs that kernel drivers report, by vendor, whether torch can use them or not."""
    nvidia = list((root / "proc/driver/nvidia/gpus").glob("*")) or list((root / "dev").glob("nvidia[0-9]*"))
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = sum("".join(_lines(node)).strip() not in ("", "0") for node in nodes)
    return {vendor: count for vendor, count in (("NVIDIA", len(nvidia)), ("AMD", amd)) if count}


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, use without file pages) of this process's memory cgroup and of each parent that has a limit.

    In a container the path of the cgroup may be the host's: then only the topmost folder exists.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, limit_file, used_file = root / "sys/fs/cgroup", "memory.max", "memory.current"
        if controllers:  # of the first version
            base, limit_file, used_file = base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        folder = base / path.strip("/")
        for parent in (folder, *folder.parents):
            limit = _number(parent / limit_file) if parent.is_relative_to(base) else None
            if limit is not None and limit < NO_LIMIT:
                files = _statistic(parent / "memory.stat", ("inactive_file ", "active_file "))
                yield limit, max(0, (_number(parent / used_file) or 0) - files)


def _cpu_quota(root: Path) -> float | None:
    """Return how many CPUs' worth of time the cgroup allows; None without a quota."""
    for line in _lines(root / "sys/fs/cgroup/cpu.max"):
        quota, _, period = line.partition(" ")
        if quota.isdigit() and period.isdigit():
            return int(quota) / int(period)
    return None


def _statistic(file: Path, names: tuple[str, ...]) -> int:
    """Sum the numbers of these names in a file of lines that begin with a name and its number."""
    return sum(int(line.split()[1]) for line in _lines(file) if line.startswith(names))


def _number(file: Path) -> int | None:
    """Read a file that holds one whole number; None if it holds anything else or cannot be read."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    """Read the lines of a file; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text().splitlines()
    return []


class Mapping(NamedTuple):
    """A range of addresses that is a private mapping of a file."""

    begin: int
    end: int
    offset: int  # in the file, of the first byte
    file: tuple[str, str]  # the kernel's device and inode
    path: str


def mappings() -> list[Mapping]:
    """List the private mappings of files in this process.

    Neighbours that continue each other are joined. A memfd, as ranks share it, is left out.
    """
    found: list[Mapping] = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            addresses, mode, offset, device, inode, *path = line.rstrip("\n").split(None, 5)
            if inode == "0" or not path or path[0].startswith("/memfd:") or mode[0] != "r" or mode[3] != "p":
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            this = Mapping(begin, end, int(offset, 16), (device, inode), path[0].replace("\\012", "\n"))
            last = found[-1] if found else None
            if last is not None and (last.file, last.end, last.offset - last.begin) == (
                this.file,
                this.begin,
                this.offset - this.begin,
            ):
                found[-1] = last._replace(end=end)
            else:
                found.append(this)
    return found


def headroom(host_nbytes: int) -> int:
    """Return the bytes of host memory that are left to the system: desktop, drivers, libraries and the page cache."""
    usual = min(max(int(SYSTEM_SHARE * host_nbytes), SYSTEM_LEAST), SYSTEM_MOST)
    return min(usual, int(SMALL_HOST_SHARE * host_nbytes))
