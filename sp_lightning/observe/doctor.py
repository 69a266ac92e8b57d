"""The doctor: this machine's resources for streaming, what slows it down, and how to mend that.

1. ``examine`` collects facts by measuring, not from datasheets; ``findings`` and ``capacity`` are pure functions of
   facts, so that they can be tried on the facts of any machine.
2. A finding is one sentence with the number that was found and a remedy. A limit without a remedy is a fact, not a
   finding.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.host import gpus_by_vendor, host_memory, is_wsl2, lock_limit, numa_nodes, usable_cores
from ..core.machine import Machine
from ..errors import OptionError
from ..memory.device import Device, available, find
from ..optim.native import DIFFERENT
from ..options import check_writable, format_bytes
from ..runtime.measure import QUICK, THOROUGH, measure, measure_optimizer, measure_ways_up, why_not_compiled
from .disk_speed import DiskSpeed, check_folder, measure_disks
from .mesh_speed import MeshSpeed
from .network_speed import NetworkSpeed

GB = 1e9
PACKAGES = ("torch", "lightning", "transformers", "torchvision", "sp-lightning")

# Thresholds of the findings.
SLOW_LINK = 10 * GB  # bytes/s: 16 lanes of the third generation carry 12 of 15.8
SHARED_WIRE = 0.7  # duplex factor
CROWDED = 0.7  # share of its speed that a way up keeps while those of all devices run
LOPSIDED = 0.6  # slower direction / faster direction
SLOW_DRAM = 20 * GB  # bytes/s: two channels of DDR4-2133 carry 34
FUSED_GAIN = 1.25
SLOW_DISK = 0.3 * GB  # bytes/s
SHARED_PIPE = 0.7  # duplex factor of a disk
FALLS = 0.7  # the last rate of a long write / its first
SLOW_FOR_STATE = 1.0 * GB  # bytes/s
STATE_WRITTEN = 8  # bytes by a step, per parameter of FP32 AdamW

# Host bytes per parameter, and the share of free host memory that these may take.
FULL = 12 + 2 + 4  # FP32 weight and AdamW's two moments; wire copy in half precision; FP32 gradient
LORA_HALF, LORA_FULL = 2, 4  # frozen bf16 or FP32 weights; the adapters and their state are small beside them
CHECKPOINT = 12
HOST_SHARE = 0.9
# The device holds at least two units in half precision and two gradient buffers: 8 bytes per parameter of a unit.
BLOCKS = 64  # equal ones, as in a decoder of 30e9 parameters
DEVICE_MINIMUM = 8 / BLOCKS
DEVICE_SHARE = 0.6  # the rest is for activations

PIN_QUICK, PIN_THOROUGH = 1 << 30, 8 << 30
DISK_QUICK, DISK_THOROUGH = 64 << 20, 1 << 30
LOPSIDED_NODES = 0.7  # the slowest node's rate / the fastest one's
TRIAL_QUICK_S, TRIAL_THOROUGH_S = 1.0, 20.0  # of a disk for weights and state


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a machine."""

    device: str  # "cuda:0", "cpu"
    device_name: str
    machine: Machine
    device_free_nbytes: int
    host_free_nbytes: int
    host_limited_by: str  # "machine" or "cgroup"
    machine_nbytes: int  # host memory of the whole machine, which may exceed this process's limit
    pin_tried_nbytes: int
    pinned_nbytes: int | None  # how much of it could be page-locked; None if nothing is page-locked
    lock_limit_nbytes: int | None  # ulimit -l
    parameters_per_s: float  # stepped by AdamW on the host
    fused_parameters_per_s: float
    why_not_compiled: str  # why AdamW does not step in compiled code; empty if it does
    cores: int
    threads: int  # of torch
    numa_nodes: int
    folder: str  # for checkpoints
    disk_write_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_free_nbytes: int
    gpus: dict[str, int]  # by vendor, as kernel drivers list them
    torch_accelerator: str | None  # the kind for which torch was built
    versions: dict[str, str | None]
    torch_wanted_by_torchvision: str | None
    wsl2: bool = False  # Linux inside Windows
    ways_up: int = 1  # tried at once: one for each accelerator; on the CPU two threads
    ways_up_share: float = 1.0  # of its own speed, that each had
    disk: DiskSpeed | None = None  # for weights and state, of several together; None if it was not asked for
    network: NetworkSpeed | None = None  # to other machines; None if there are none
    mesh: MeshSpeed | None = None  # between devices; None if it was not measured
    disks: tuple[DiskSpeed, ...] = ()  # if `disk` is several: each of them

    @property
    def on_host(self) -> bool:
        """Whether the CPU computes."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Finding:
    """A problem with its remedy (Rule 2)."""

    subject: str
    sentence: str


@dataclass(frozen=True)
class Capacity:
    """The largest models that train on this machine, in parameters."""

    full: int
    lora_half: int
    lora_full: int
    full_limited_by: str  # "host memory" or "device memory"


@dataclass(frozen=True)
class Report:
    """Facts, findings and capacity of a machine."""

    facts: Facts
    findings: tuple[Finding, ...]
    capacity: Capacity

    @property
    def summary(self) -> str:
        """The capacity in one sentence."""
        found = self.capacity
        return (
            f"This machine trains up to {_billions(found.full)} parameters with FP32 AdamW (limited by "
            f"{found.full_limited_by}), and with LoRA up to {_billions(found.lora_half)} in bfloat16 or "
            f"{_billions(found.lora_full)} in FP32."
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to numbers and text only, for ``from_dict``."""
        return {
            "facts": {**asdict(self.facts), "disks": list(map(asdict, self.facts.disks))},
            "findings": [asdict(finding) for finding in self.findings],
            "capacity": asdict(self.capacity),
            "summary": self.summary,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """Restore a report from the result of ``to_dict``."""
        facts = dict(values["facts"])
        disk = None if facts["disk"] is None else DiskSpeed(**facts["disk"])
        disks = tuple(DiskSpeed(**one) for one in facts.pop("disks", ()))
        of = facts.get("network")
        mesh = None if facts.get("mesh") is None else MeshSpeed(**facts["mesh"])
        network = None if of is None else NetworkSpeed(**{name: _as_tuple(value) for name, value in of.items()})
        return cls(
            Facts(
                **{**facts, "machine": Machine(**facts["machine"])}
                | {"disk": disk, "disks": disks, "network": network, "mesh": mesh}
            ),
            tuple(Finding(**finding) for finding in values["findings"]),
            Capacity(**values["capacity"]),
        )


def doctor(
    device: str | None = None,
    folder: str | Path = ".",
    quick: bool = False,
    disk: str | Path | Sequence[str | Path] | None = None,
) -> Report:
    """Examine this machine in seconds if ``quick``, else in about half a minute, with part of the free memory.

    Args:
        device: The device that computes, such as "cuda:0"; by default the first accelerator, else the CPU.
        folder: The folder for checkpoints: a test file is written, read and removed there.
        quick: Measure briefly, and try to page-lock at most 1 GiB.
        disk: A folder on the disk that is to have weights or state: measured for 20 s, or one if ``quick``. Of several
            each is measured, and all together.
    """
    return of_facts(examine(device, folder, quick, disk))


def of_facts(facts: Facts) -> Report:
    """Return the report of a machine with these facts."""
    return Report(facts, tuple(findings(facts)), capacity(facts))


def examine(
    device: str | None, folder: str | Path, quick: bool, disk: str | Path | Sequence[str | Path] | None = None
) -> Facts:
    """Collect the facts about this machine (Rule 1)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise OptionError(argument="folder", found=str(folder), allowed="a writable directory")
    check_writable(folder, "folder")
    disks = () if disk is None else (disk,) if isinstance(disk, str | Path) else tuple(disk)
    for one in disks:
        check_folder(one)
    chosen = Device(find(device))
    memory = host_memory()
    device_free_nbytes, _ = chosen.memory()
    pin_tried_nbytes = min(PIN_QUICK if quick else PIN_THOROUGH, memory.free // 4)
    write, read = _disk(folder, min(DISK_QUICK if quick else DISK_THOROUGH, shutil.disk_usage(folder).free // 4))
    speeds = measure_disks(disks, TRIAL_QUICK_S if quick else TRIAL_THOROUGH_S) if disks else []
    effort = QUICK if quick else THOROUGH
    machine = measure(chosen.torch_device, effort)
    others = [torch.device(name) for name in available() if name != "cpu"]
    ways = others if not chosen.is_host and len(others) > 1 else [chosen.torch_device] * (1 + chosen.is_host)
    ways_up_share = measure_ways_up([Device(device) for device in ways], effort) if len(ways) > 1 else 1.0
    return Facts(
        device=str(chosen.torch_device),
        device_name=chosen.name,
        machine=machine,
        device_free_nbytes=device_free_nbytes,
        host_free_nbytes=memory.free,
        host_limited_by=memory.limited_by,
        machine_nbytes=memory.machine,
        pin_tried_nbytes=pin_tried_nbytes,
        pinned_nbytes=chosen.lockable(pin_tried_nbytes),
        lock_limit_nbytes=lock_limit(),
        parameters_per_s=machine.dram_bytes_per_s / machine.optimizer_bytes_per_parameter,
        fused_parameters_per_s=measure_optimizer(fused=True, effort=effort),
        why_not_compiled=why_not_compiled(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        numa_nodes=numa_nodes(),
        folder=str(folder.resolve()),
        disk_write_bytes_per_s=write,
        disk_read_bytes_per_s=read,
        disk_free_nbytes=shutil.disk_usage(folder).free,
        gpus=gpus_by_vendor(),
        torch_accelerator=_accelerator_of_build(),
        versions={name: _version(name) for name in PACKAGES},
        torch_wanted_by_torchvision=_torch_required_by_torchvision(),
        wsl2=is_wsl2(),
        ways_up=len(ways),
        ways_up_share=ways_up_share,
        disk=speeds[-1] if speeds else None,
        disks=tuple(speeds[:-1]),
    )


def capacity(facts: Facts) -> Capacity:
    """Compute what trains here from free host memory, and from the least memory that the device needs."""
    host = facts.host_free_nbytes * HOST_SHARE
    # On the CPU, device memory is host memory, and the streamed units are small beside the rest.
    device = host if facts.on_host else facts.device_free_nbytes * DEVICE_SHARE
    most = {nbytes: int(min(host / nbytes, device / DEVICE_MINIMUM)) for nbytes in (FULL, LORA_HALF, LORA_FULL)}
    limited_by = "host memory" if host / FULL <= device / DEVICE_MINIMUM else "device memory"
    return Capacity(full=most[FULL], lora_half=most[LORA_HALF], lora_full=most[LORA_FULL], full_limited_by=limited_by)


# ---- findings (Rule 2)


def findings(facts: Facts) -> Iterator[Finding]:
    """Yield what slows this machine down, the worst first."""
    yield from _of_accelerator(facts)
    yield from _of_memory(facts)
    yield from _of_cores(facts)
    yield from _of_folder(facts)
    for disk in (*facts.disks, facts.disk):
        if disk is not None:
            yield from _of_disk(disk)
    if facts.network is not None:
        yield from _of_network(facts.network)
    wanted, found = facts.torch_wanted_by_torchvision, (facts.versions["torch"] or "").partition("+")[0]
    if wanted is not None and wanted != found:
        yield Finding(
            "versions",
            f"torchvision {facts.versions['torchvision']} was built for torch {wanted}, found {found}, which breaks "
            "'import transformers': install them together (pip install -U torch torchvision), or remove torchvision.",
        )


def _of_accelerator(facts: Facts) -> Iterator[Finding]:
    if facts.on_host:
        yield Finding("device", _why_on_host(facts))
        return
    machine = facts.machine
    up, down = machine.up_bytes_per_s, machine.down_bytes_per_s
    if min(up, down) < SLOW_LINK:
        yield Finding(
            "link",
            f"The link carries {up / GB:.1f} GB/s up and {down / GB:.1f} GB/s down, of 12 with 16 lanes of PCIe 3 and "
            "25 with PCIe 4: put the device into a slot with 16 lanes, check its link width and speed under load, and "
            "remove risers and power saving.",
        )
    elif min(up, down) < LOPSIDED * max(up, down):
        yield Finding(
            "link",
            f"The link carries {up / GB:.1f} GB/s up and {down / GB:.1f} GB/s down: the slower direction crosses "
            "sockets or an IOMMU; bind the process to the device's memory node, and set the IOMMU to pass-through.",
        )
    if machine.duplex < SHARED_WIRE:
        yield Finding(
            "duplex",
            f"With copies in both directions each keeps {machine.duplex:.0%} of its rate: gradients on their way "
            "down slow the weights on their way up; train more tokens per step (a larger batch, "
            "accumulate_grad_batches), so that compute hides both.",
        )
    if facts.ways_up_share < CROWDED:
        yield Finding(
            "ways up",
            f"While {facts.ways_up} devices load weights at once, each way up keeps {facts.ways_up_share:.0%} of its "
            "rate: they share the host's memory or a switch; train more tokens per step on each device, give every "
            "device lanes of its own, and fill every memory channel.",
        )


def _why_on_host(facts: Facts) -> str:
    for vendor, count in facts.gpus.items():
        build = {"NVIDIA": "cuda", "AMD": "hip"}[vendor]
        gpus = f"{count} {vendor} GPU{'s' * (count > 1)}"
        if facts.torch_accelerator != build:
            return (
                f"torch {facts.versions['torch']} was not built for the {gpus} that the system shows: "
                f"install a {'CUDA' if build == 'cuda' else 'ROCm'} build of torch (pytorch.org/get-started)."
            )
        return (
            f"The CPU was measured although the system shows {gpus}: pass --device cuda:0; if torch does not find it, "
            "update the driver or unset CUDA_VISIBLE_DEVICES."
        )
    return (
        "The CPU computes, 0 accelerators were found, and links are copies in memory: streaming works but gains "
        "nothing here; run this on a machine with an accelerator."
    )


def _of_memory(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if facts.pinned_nbytes is not None and facts.pinned_nbytes < facts.pin_tried_nbytes:
        limit = "unlimited" if facts.lock_limit_nbytes is None else format_bytes(facts.lock_limit_nbytes)
        yield Finding(
            "pinned memory",
            f"{format_bytes(facts.pinned_nbytes)} of {format_bytes(facts.pin_tried_nbytes)} could be page-locked "
            f"(ulimit -l: {limit}): raise memlock in "
            "/etc/security/limits.conf, or start the container with --ulimit memlock=-1; copies from other memory are "
            "slower and do not run beside compute.",
        )
    if facts.host_limited_by == "cgroup" and machine.host_nbytes < facts.machine_nbytes / 2:
        yield Finding(
            "host memory",
            f"This process may take {format_bytes(machine.host_nbytes)} of the machine's "
            f"{format_bytes(facts.machine_nbytes)}: raise the memory limit of its container or job.",
        )
    elif not facts.on_host and facts.host_free_nbytes < 2 * machine.device_nbytes:
        yield Finding(
            "host memory",
            f"{format_bytes(facts.host_free_nbytes)} of host memory are free for a device of "
            f"{format_bytes(machine.device_nbytes)}, and AdamW takes {FULL} host bytes per parameter: add memory (at "
            "least twice the device's), or train adapters, which takes 2.",
        )
    if facts.wsl2:
        yield Finding(
            "WSL2",
            f"This is Linux inside Windows (WSL2) with {format_bytes(machine.host_nbytes)} of host memory, by "
            "default half of the computer's: to give it more, write the lines [wsl2] and memory=56GB (of 64 GB) into "
            "%UserProfile%\\.wslconfig, then run 'wsl --shutdown' in Windows; page-locked memory is limited there, "
            "too.",
        )
    if machine.dram_bytes_per_s < SLOW_DRAM:
        yield Finding(
            "memory speed",
            f"Host memory moves {machine.dram_bytes_per_s / GB:.1f} GB/s, where two channels of DDR4 give 40: fill "
            "every channel, enable the modules' rated profile, and give torch all cores.",
        )


def _of_cores(facts: Facts) -> Iterator[Finding]:
    if facts.threads != facts.cores:
        few = facts.threads < facts.cores
        effect = "the host optimizer leaves cores idle" if few else "threads wait for one another"
        yield Finding(
            "threads",
            f"torch uses {facts.threads} thread{'s' * (facts.threads != 1)} on {facts.cores} "
            f"core{'s' * (facts.cores != 1)}, so {effect}: set OMP_NUM_THREADS={facts.cores}.",
        )
    if facts.numa_nodes >= 2:
        yield Finding(
            "memory nodes",
            f"This process may run on {facts.numa_nodes} memory nodes, and copies across them are slower: start it "
            "with numactl --cpunodebind=N --membind=N, where N is the device's node (nvidia-smi topo -m, rocm-smi "
            "--showtopo).",
        )
    gain = facts.fused_parameters_per_s / facts.parameters_per_s
    if gain >= FUSED_GAIN:
        yield Finding(
            "optimizer",
            f"AdamW steps {facts.parameters_per_s / GB:.2f}e9 parameters/s on this host and "
            f"{facts.fused_parameters_per_s / GB:.2f}e9 with torch's fused kernels: where steps wait for the "
            f"optimizer, fused_optimizer=True makes it {gain:.1f} times as fast (with other rounding).",
        )
    if facts.why_not_compiled and not facts.why_not_compiled.startswith(DIFFERENT):
        yield Finding(
            "compiled steps",
            f"AdamW steps {facts.parameters_per_s / GB:.2f}e9 parameters/s by torch's operators, not in compiled code "
            f"with the same bits, which is faster, as {facts.why_not_compiled}: install a C++ compiler (g++ or "
            "clang++, or name it in $CXX), and let XDG_CACHE_HOME name a directory that can be written.",
        )


def _of_folder(facts: Facts) -> Iterator[Finding]:
    if facts.disk_write_bytes_per_s < SLOW_DISK:
        minutes = 10e9 * CHECKPOINT / facts.disk_write_bytes_per_s / 60
        yield Finding(
            "disk speed",
            f"{facts.folder} takes {facts.disk_write_bytes_per_s / 1e6:.0f} MB/s, so a checkpoint of 10e9 parameters "
            f"would take {minutes:.0f} minutes: let ModelCheckpoint write to another disk (dirpath) or less often.",
        )
    needed = capacity(facts).full * CHECKPOINT
    if facts.disk_free_nbytes < needed:
        yield Finding(
            "disk space",
            f"{facts.folder} has {format_bytes(facts.disk_free_nbytes)} left, and a checkpoint of the largest model "
            f"that trains here would take {format_bytes(needed)}: free some, or write to another disk "
            "(default_root_dir).",
        )


def _of_disk(disk: DiskSpeed) -> Iterator[Finding]:
    if disk.rotates or disk.elsewhere:
        what = disk.elsewhere or "a disk that rotates"
        yield Finding(
            "filesystem",
            f"{disk.folder} is on {what} ({disk.filesystem or 'unknown filesystem'}): leave weights and state on a "
            "local SSD (ext4 or xfs).",
        )
    if not disk.is_direct:
        yield Finding(
            "direct transfers",
            f"{disk.filesystem or 'The filesystem'} refuses direct transfers in {disk.folder}: what is "
            "there goes through the page cache, at several times the processor's time; use ext4 or xfs.",
        )
    if disk.duplex < SHARED_PIPE:
        yield Finding(
            "disk both ways",
            f"Read and written at once, {disk.folder} keeps {disk.duplex:.0%} of its speed each way: it shares one "
            "pipe, so that the times of a step's reads and writes add up; train more tokens per step (a larger batch, "
            "accumulate_grad_batches), so that compute hides both.",
        )
    rates = f"--disk {disk.read_bytes_per_s / GB:.2g}GB,{disk.sustained_bytes_per_s / GB:.2g}GB"
    if disk.sustained_bytes_per_s < FALLS * disk.write_bytes_per_s:
        yield Finding(
            "sustained writes",
            f"{disk.folder} took {disk.write_bytes_per_s / GB:.1f} GB/s at first and "
            f"{disk.sustained_bytes_per_s / GB:.1f} GB/s after {disk.written_nbytes / GB:.0f} GB: a cache of the drive "
            f"is full then; plan with {rates}, and use a drive that sustains its writes.",
        )
    elif disk.sustained_bytes_per_s < SLOW_FOR_STATE:
        seconds = 8e9 * STATE_WRITTEN / disk.sustained_bytes_per_s
        yield Finding(
            "sustained writes",
            f"{disk.folder} takes {disk.sustained_bytes_per_s / GB:.2f} GB/s: a step of 8e9 parameters with AdamW's "
            f"state there would write for {seconds:.0f} s; plan with {rates}, and use an NVMe drive.",
        )


def _of_network(network: NetworkSpeed) -> Iterator[Finding]:
    rates = network.sent_bytes_per_s
    if min(rates) < LOPSIDED_NODES * max(rates):
        host = network.hosts[rates.index(min(rates))]
        yield Finding(
            "network",
            f"{host} sends {min(rates) / GB:.2f} GB/s to other machines and the fastest one {max(rates) / GB:.2f}: all "
            "wait for it; see that GLOO_SOCKET_IFNAME names its fastest interface, and that its cores are free.",
        )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"


# ---- facts


def _disk(folder: Path, nbytes: int) -> tuple[float, float]:
    """Measure bytes per second written to the disk and read back (from the page cache if that cannot be dropped)."""
    block = os.urandom(1 << 20)  # random, because a compressing file system would write zeros faster
    count = max(1, nbytes >> 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        begin = time.perf_counter()
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(1 << 20):
            pass
        return count * len(block) / (written - begin), count * len(block) / (time.perf_counter() - start)


def _accelerator_of_build() -> str | None:
    if torch.version.hip:
        return "hip"
    return "cuda" if torch.version.cuda else None


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_required_by_torchvision() -> str | None:
    """Return the torch release that the installed torchvision requires."""
    try:
        wanted = importlib.metadata.requires("torchvision") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    exact = [text.partition("==")[2].strip() for text in wanted if text.replace(" ", "").startswith("torch==")]
    return exact[0].partition(";")[0].strip() if exact else None
