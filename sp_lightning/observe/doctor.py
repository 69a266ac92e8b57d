"""The doctor: what of this machine slows streaming down or stops it, and how to mend that.

`examine` collects facts; `findings` is a function of facts alone, so that it can be tried on those of any machine.
Rates are not measured, apart from writes to a disk: `sp_lightning.plan` measures the machine that it plans for.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import OptionError
from ..host.device import Device, find
from ..host.machine import (
    HostMemory,
    gpus_by_vendor,
    host_memory,
    lock_limit,
    usable_cores,
)
from ..optim.compiled import why_none
from ..options import check_writable, format_bytes
from ..store.files import Mount, mount_of
from ..store.scratch import no_local_disk

PIN_TRIED = 1 << 30  # bytes that are page-locked for a trial, and at most a quarter of the free memory
PIN_BLOCK = 64 << 20  # bytes that are page-locked together
DISK_TRIED = 256 << 20  # bytes written for a trial, and at most a quarter of the free space
SLOW_DISK = 1e9  # bytes per second
STATE_WRITTEN = 8  # bytes per parameter that a step with AdamW writes, if its state is on a disk
ON_HOST = 16  # bytes per parameter for FP32 weights, gradients and AdamW's state


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk of a folder."""

    folder: str
    filesystem: str
    elsewhere: str  # what it is, if it is no local disk
    rotates: bool
    write_bytes_per_s: float
    free_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a machine."""

    device: str  # "cuda:0", "cpu"
    device_name: str
    device_nbytes: int
    gpus: dict[str, int]  # by vendor, as kernel drivers list them
    torch_version: str
    torch_accelerator: str | None  # the kind for which torch was built: "cuda" or "hip"
    host: HostMemory
    pin_tried_nbytes: int
    pinned_nbytes: int | None  # how much of it could be page-locked; None if nothing is page-locked
    lock_limit_nbytes: int | None  # ulimit -l
    cores: int
    threads: int  # threads of torch
    why_not_compiled: str  # why AdamW does not step in compiled code; empty if it does
    disks: tuple[Disk, ...]


@dataclass(frozen=True)
class Finding:
    """A problem: one sentence with what was found and what to do."""

    subject: str
    sentence: str


def examine(device: str | None = None, folders: Sequence[str] = (".",)) -> Facts:
    """Collect the facts about this machine; takes some seconds.

    Args:
        device: The device that computes, such as "cuda:0"; by default the first accelerator, else the CPU.
        folders: Folders for checkpoints, optimizer state or weights: a file is written and removed in each.
    """
    disks = tuple(map(_examine_disk, folders))
    chosen, host = Device(find(device)), host_memory()
    tried = min(PIN_TRIED, host.free // 4)
    build = "hip" if torch.version.hip else "cuda" if torch.version.cuda else None
    return Facts(
        device=str(chosen.torch_device),
        device_name=_name(chosen),
        device_nbytes=_memory(chosen),
        gpus=gpus_by_vendor(),
        torch_version=torch.__version__,
        torch_accelerator=build,
        host=host,
        pin_tried_nbytes=tried,
        pinned_nbytes=_lockable(chosen, tried),
        lock_limit_nbytes=lock_limit(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        why_not_compiled=why_none(),
        disks=disks,
    )


def findings(facts: Facts) -> Iterator[Finding]:
    """Yield the problems of a machine that slow streaming down or stop it, the worst first."""
    yield from _device_findings(facts)
    yield from _memory_findings(facts)
    yield from _core_findings(facts)
    for disk in facts.disks:
        yield from _disk_findings(disk)


def _device_findings(facts: Facts) -> Iterator[Finding]:
    """Yield problems of the device: none is found, or torch is built for another."""
    gpus = " and ".join(f"{count} {vendor} GPU{'s' * (count > 1)}" for vendor, count in facts.gpus.items())
    builds = {"NVIDIA": "cuda", "AMD": "hip"}
    if facts.device == "cpu" and not gpus:
        sentence = "The CPU computes, as there is no accelerator: streaming works but gains nothing here."
        yield Finding("device", sentence)
    elif facts.device == "cpu" and facts.torch_accelerator not in {builds[vendor] for vendor in facts.gpus}:
        wanted = "CUDA" if "NVIDIA" in facts.gpus else "ROCm"
        yield Finding(
            "device",
            f"torch {facts.torch_version} was not built for the {gpus} that the system shows: install a {wanted} "
            "build of torch (pytorch.org/get-started).",
        )
    elif facts.device == "cpu":
        yield Finding(
            "device",
            f"The system shows {gpus}, and torch {facts.torch_version} finds none: update the driver to one for this "
            "torch, unset CUDA_VISIBLE_DEVICES, or pass --device cuda:0.",
        )


def _memory_findings(facts: Facts) -> Iterator[Finding]:
    """Yield problems of host memory: page locks, limits, too little of it."""
    host = facts.host
    if facts.pinned_nbytes is not None and facts.pinned_nbytes < facts.pin_tried_nbytes:
        limit = "unlimited" if facts.lock_limit_nbytes is None else format_bytes(facts.lock_limit_nbytes)
        yield Finding(
            "page locks",
            f"{format_bytes(facts.pinned_nbytes)} of {format_bytes(facts.pin_tried_nbytes)} could be page-locked "
            f"(ulimit -l: {limit}), and copies from other memory are slower: raise memlock in "
            "/etc/security/limits.conf, or start the container with --ulimit memlock=-1.",
        )
    if host.limited_by == "cgroup" and host.total < host.machine / 2:
        yield Finding(
            "host memory",
            f"This process may take {format_bytes(host.total)} of the machine's {format_bytes(host.machine)}: raise "
            "the memory limit of its container or job.",
        )
    elif facts.device != "cpu" and host.free < 2 * facts.device_nbytes:
        yield Finding(
            "host memory",
            f"{format_bytes(host.free)} of host memory are free for a device of {format_bytes(facts.device_nbytes)}, "
            f"and each parameter takes {ON_HOST} bytes with AdamW: add memory, let disk= have the optimizer's state, "
            "or train adapters, which takes 2.",
        )


def _core_findings(facts: Facts) -> Iterator[Finding]:
    """Yield problems of the cores: the number of torch's threads, and steps without compiled code."""
    if facts.threads != facts.cores:
        effect = "leaves cores idle" if facts.threads < facts.cores else "has threads that wait for one another"
        yield Finding(
            "threads",
            f"torch uses {facts.threads} threads on {facts.cores} cores, so that the host optimizer {effect}: set "
            f"OMP_NUM_THREADS={facts.cores}.",
        )
    if facts.why_not_compiled:
        yield Finding(
            "compiled steps",
            f"AdamW steps by torch's operators, not in compiled code, which is faster and rounds as a GPU does, as "
            f"{facts.why_not_compiled}: install a C++ compiler (g++ or clang++, or name it in $CXX), and let "
            "XDG_CACHE_HOME name a directory that can be written.",
        )


def _disk_findings(disk: Disk) -> Iterator[Finding]:
    """Yield the problem of a disk, if it has one: no local SSD, or slow writes."""
    if disk.elsewhere or disk.rotates:
        yield Finding(
            "filesystem",
            f"{disk.folder} is on {disk.elsewhere or 'a disk that rotates'} ({disk.filesystem}): leave weights and "
            "optimizer state on a local SSD (ext4 or xfs).",
        )
    elif disk.write_bytes_per_s < SLOW_DISK:
        seconds = 8e9 * STATE_WRITTEN / disk.write_bytes_per_s
        yield Finding(
            "disk speed",
            f"{disk.folder} takes {disk.write_bytes_per_s / 1e9:.2f} GB/s: a step of 8e9 parameters with AdamW's state "
            f"there would write for {seconds:.0f} s; use an NVMe drive.",
        )


# ---- facts


def _name(device: Device) -> str:
    """Return the vendor's name of a device if torch knows it, otherwise its type."""
    known = getattr(torch.get_device_module(device.torch_device), "get_device_name", None)
    return device.torch_device.type if known is None else str(known(device.torch_device))


def _memory(device: Device) -> int:
    """Return the bytes of a device's memory, or of the host's if the CPU computes."""
    total = host_memory().total if device.is_host else torch.accelerator.get_memory_info(device.torch_device)[1]
    return int(total)


def _lockable(device: Device, most: int) -> int | None:
    """Return how many of ``most`` bytes can be page-locked, by a trial; None where nothing is page-locked."""
    if device.is_host:
        return None
    blocks: list[torch.Tensor] = []
    with contextlib.suppress(RuntimeError):
        while len(blocks) * PIN_BLOCK < most:
            blocks.append(torch.empty(PIN_BLOCK, dtype=torch.uint8, device="cpu", pin_memory=True))
    return min(len(blocks) * PIN_BLOCK, most)


def _examine_disk(folder: str) -> Disk:
    """Examine the disk of a folder: its filesystem, its free space, and its speed by a file that is written to it."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise OptionError(argument="disk", found=folder, allowed="a directory that can be written")
    check_writable(path, "disk")
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    block = os.urandom(1 << 20)  # random, because a compressing filesystem would write zeros faster
    count = max(1, min(DISK_TRIED, free // 4) >> 20)
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        mount = mount_of(f"/proc/self/fd/{file.fileno()}")
        elsewhere = no_local_disk(mount)
        begin = time.perf_counter()
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
        rate = count * len(block) / (time.perf_counter() - begin)
    return Disk(
        folder=str(path),
        filesystem=mount.kind,
        elsewhere=elsewhere,
        rotates=_rotates(mount),
        write_bytes_per_s=rate,
        free_nbytes=free,
    )


def _rotates(mount: Mount) -> bool:
    """Whether the system says that a mount's disk rotates; False for a virtual disk, of which it does not know."""
    device = mount.device
    if not os.major(device):  # a filesystem over several disks: the table of mounts names one of them
        with contextlib.suppress(OSError):
            device = os.stat(mount.source).st_rdev
    here = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if "virt" in os.path.realpath(here):
        return False
    for queue in (f"{here}/queue", f"{here}/../queue"):  # of the disk itself, or of the disk with this partition
        with contextlib.suppress(OSError), open(f"{queue}/rotational") as file:
            return file.read().strip() == "1"
    return False
