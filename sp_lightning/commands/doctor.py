"""``python -m sp_lightning doctor``: what of this machine slows streaming down, and what to do."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..options import format_bytes

if TYPE_CHECKING:
    from ..observe.doctor import Facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--device", help="device that computes, such as cuda:0 or cpu (default: the first accelerator)")
    parser.add_argument(
        "--disk", nargs="+", default=["."], help="folders for checkpoints, optimizer state or weights (default: here)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(args: argparse.Namespace) -> int:
    """Examine the machine and print facts and findings."""
    from ..observe.doctor import examine, findings

    facts = examine(args.device, args.disk)
    found = list(findings(facts))
    if args.json:
        print(json.dumps({"facts": asdict(facts), "findings": list(map(asdict, found))}, indent=2))
        return 0
    for name, value in rows(facts).items():
        print(f"{name:14}  {value}")
    print("\nTo fix:" if found else "\nNothing to fix was found.")
    for finding in found:
        print(f"- {finding.sentence}")
    return 0


def rows(facts: Facts) -> dict[str, str]:
    """Describe each fact about the machine in one line, by its name."""
    host, limit = facts.host, facts.lock_limit_nbytes
    pinned = "not used by this device" if facts.pinned_nbytes is None else format_bytes(facts.pinned_nbytes)
    found = {
        "device": f"{facts.device} ({facts.device_name}), {format_bytes(facts.device_nbytes)}",
        "torch": f"{facts.torch_version}, for {facts.torch_accelerator or 'CPUs'}",
        "page locks": f"{pinned} (ulimit -l: {'unlimited' if limit is None else format_bytes(limit)})",
        "host memory": f"{format_bytes(host.free)} free of {format_bytes(host.total)}, of the {host.limited_by}",
        "threads": f"{facts.threads} on {facts.cores} cores",
        "AdamW": facts.why_not_compiled or "steps in compiled code",
    }
    for number, disk in enumerate(facts.disks, 1):
        speed = f"{disk.write_bytes_per_s / 1e9:.2f} GB/s written, {format_bytes(disk.free_nbytes)} free"
        found[f"disk {number}"] = f"{speed} ({disk.folder}, {disk.filesystem})"
    return found
