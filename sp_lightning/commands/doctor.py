"""``python -m sp_lightning doctor``: what this machine offers for streaming, and what to fix."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..options import format_bytes
from . import STDOUT, add_json, make_room, write_json

if TYPE_CHECKING:
    import torch

    from ..observe.disk_speed import DiskSpeed
    from ..observe.doctor import Report
    from ..observe.mesh_speed import MeshSpeed
    from ..observe.network_speed import NetworkSpeed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--device", help="device that computes, such as cuda:0 or cpu (default: the first accelerator)")
    parser.add_argument("--folder", default=".", help="where checkpoints will be written (default: here)")
    parser.add_argument(
        "--disk",
        nargs="+",
        help="a folder on the disk that is to have weights or state, to be measured as well; of several each and all",
    )
    parser.add_argument("--quick", action="store_true", help="measure for seconds instead of half a minute")
    add_json(parser)


NETWORK_QUICK_S, NETWORK_THOROUGH_S = 1.0, 10.0


def main(args: argparse.Namespace) -> int:
    """Examine the machine and print the report; under torchrun all machines, and the network between them."""
    from ..observe.doctor import doctor

    make_room(json=args.json)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        reports = _of_machines(args)
        if not reports:
            return 0
    else:
        reports = [doctor(args.device, args.folder, args.quick, args.disk)]
    report, *others = reports
    if args.json:
        more = {"machines": [other.to_dict() for other in reports]} if others else {}
        write_json(report.to_dict() | more, args.json)
    if args.json != STDOUT:
        _print(report, others)
    return 0


def _of_machines(args: argparse.Namespace) -> list[Report]:
    """Examine each machine from its first process, then the network from all; return the reports on the first one."""
    import torch.distributed as dist

    from ..observe.doctor import Report, doctor, of_facts
    from ..observe.mesh_speed import measure_mesh
    from ..observe.network_speed import measure_network

    device = _device_of(args.device)
    theirs = "" if device.type == "cpu" else f",{device.type}:{dist.get_default_backend_for_device(device.type)}"
    dist.init_process_group(f"cpu:gloo{theirs}")
    try:
        first = int(os.environ["LOCAL_RANK"]) == 0
        mine = doctor(args.device, args.folder, args.quick, args.disk).to_dict() if first else None
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        seconds = NETWORK_QUICK_S if args.quick else NETWORK_THOROUGH_S
        network, mesh = measure_network(None, seconds), measure_mesh(device, seconds)
        if dist.get_rank():
            return []
        reports = [Report.from_dict(one) for one in gathered if one is not None]
        return [of_facts(replace(reports[0].facts, network=network, mesh=mesh)), *reports[1:]]
    finally:
        dist.destroy_process_group()


def _device_of(given: str | None) -> torch.device:
    """Return this process's device, of the kind that was given, or of the machine's accelerator."""
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    kind = given.split(":")[0] if given else "cpu" if here is None else here.type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ["LOCAL_RANK"]))


def _print(report: Report, others: Sequence[Report] = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, value in rows(report):
        table.add_row(name, value)
    network = report.facts.network
    for other, host in zip(others, network.hosts[1:] if network else (), strict=False):
        table.add_row(host, _machine(other))
    console.print(table)
    console.print()
    named = [("", report), *zip([f"{host}: " for host in network.hosts[1:]] if network else [], others, strict=False)]
    found = [f"{host}{finding.sentence}" for host, one in named for finding in one.findings]
    if found:
        console.print("To fix:")
        for sentence in dict.fromkeys(found):
            console.print(f"- {sentence}", markup=False, soft_wrap=True)
    else:
        console.print("Nothing to fix was found.")
    console.print(f"\n{report.summary}", markup=False, soft_wrap=True)


def rows(report: Report) -> list[tuple[str, str]]:
    """Return the facts as labelled lines of text."""

    facts = report.facts
    machine = facts.machine
    link = f"{machine.up_bytes_per_s / 1e9:.1f} GB/s up, {machine.down_bytes_per_s / 1e9:.1f} GB/s down"
    both = f"each keeps {machine.duplex:.0%} while both run"
    limit = "unlimited" if facts.lock_limit_nbytes is None else format_bytes(facts.lock_limit_nbytes)
    if facts.pinned_nbytes is None:
        pinned = "not used by this device"
    else:
        pinned = f"{format_bytes(facts.pinned_nbytes)} of {format_bytes(facts.pin_tried_nbytes)} tried"
    memory = f"{format_bytes(facts.host_free_nbytes)} free of {format_bytes(machine.host_nbytes)}"
    fused = f"{facts.fused_parameters_per_s / 1e9:.2f}e9 with fused_optimizer=True"
    how = f"by torch's operators ({facts.why_not_compiled})" if facts.why_not_compiled else "in compiled code"
    return [
        ("device", f"{facts.device} ({facts.device_name})"),
        ("device memory", f"{format_bytes(facts.device_free_nbytes)} free of {format_bytes(machine.device_nbytes)}"),
        ("compute", f"{machine.flops_per_s / 1e12:.2f} TFLOP/s in bfloat16, forward and backward"),
        ("link", f"{link}; {both}" + "; copies in memory, as the CPU computes" * facts.on_host),
        *([("ways up at once", _ways_up(report))] if facts.ways_up > 1 else []),
        ("page locks", f"{pinned} (ulimit -l: {limit})"),
        (
            "host memory",
            f"{memory}{', limited by the cgroup' * (facts.host_limited_by == 'cgroup')}{', of WSL2' * facts.wsl2}",
        ),
        ("memory speed", f"{machine.dram_bytes_per_s / 1e9:.1f} GB/s read and written"),
        ("host optimizer", f"{facts.parameters_per_s / 1e9:.2f}e9 parameters/s of AdamW {how}, {fused}"),
        ("threads", f"{facts.threads} on {facts.cores} cores, {facts.numa_nodes} memory node(s)"),
        ("disk", _disk(report)),
        *(("one of the disks", _disk_for_state(disk)) for disk in facts.disks),
        *([("disk for weights and state", _disk_for_state(facts.disk))] if facts.disk is not None else []),
        *([("network", _network(facts.network))] if facts.network is not None else []),
        *([("devices' link", _mesh(facts.mesh))] if facts.mesh is not None else []),
        ("versions", ", ".join(f"{name} {found or 'not installed'}" for name, found in facts.versions.items())),
    ]


def _machine(report: Report) -> str:
    """Describe another machine in a line."""
    facts, machine = report.facts, report.facts.machine
    return (
        f"{facts.device_name}, {machine.flops_per_s / 1e12:.2f} TFLOP/s, {machine.up_bytes_per_s / 1e9:.1f} GB/s up, "
        f"{format_bytes(facts.host_free_nbytes)} of host memory free at {machine.dram_bytes_per_s / 1e9:.1f} GB/s"
    )


def _network(network: NetworkSpeed) -> str:
    rates = zip(network.hosts, network.sent_bytes_per_s, strict=True)
    each = ", ".join(f"{host} {rate / 1e9:.2f}" for host, rate in rates)
    nodes = len(network.hosts)
    return (
        f"GB/s that each machine sends while as much comes: {each}; plan --nodes {nodes} --devices {network.devices} "
        f"--network {network.bytes_per_s / 1e9:.2g}GB"
    )


def _mesh(mesh: MeshSpeed) -> str:
    return (
        f"{mesh.bytes_per_s / 1e9:.2f} GB/s that each of {mesh.devices} sends in a sum, while as much comes; plan "
        f"--tensor-parallel-size {mesh.devices} --mesh-link {mesh.bytes_per_s / 1e9:.2g}GB"
    )


def _ways_up(report: Report) -> str:
    facts = report.facts
    whole = facts.ways_up * facts.ways_up_share * facts.machine.up_bytes_per_s
    what = "by a thread each" if facts.on_host else f"{whole / 1e9:.1f} GB/s together"
    return f"{facts.ways_up} keep {facts.ways_up_share:.0%} of their speed each, {what}: what several devices share"


def _disk(report: Report) -> str:
    facts = report.facts
    write, read = facts.disk_write_bytes_per_s / 1e9, facts.disk_read_bytes_per_s / 1e9
    return f"{write:.2f} GB/s written, {read:.2f} read, {format_bytes(facts.disk_free_nbytes)} free ({facts.folder})"


def _disk_for_state(disk: DiskSpeed) -> str:
    how = "direct" if disk.is_direct else "through the page cache"
    return (
        f"{disk.read_bytes_per_s / 1e9:.2f} GB/s read, {disk.write_bytes_per_s / 1e9:.2f} written, "
        f"{disk.sustained_bytes_per_s / 1e9:.2f} after {format_bytes(disk.written_nbytes)}; each keeps "
        f"{disk.duplex:.0%} while both run; {how} ({disk.folder}, {disk.filesystem or 'unknown filesystem'})"
    )
