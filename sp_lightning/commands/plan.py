"""``python -m sp_lightning plan``: predict what a run needs, before there is a device."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from typing import Any

from ..errors import OptionError
from . import OPTIONS, add_options, given, need


def count(text: str) -> int:
    """Parse an argument that must be an int >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an int >= 1, got {text}")
    return int(text)


OF_RUN: dict[str, tuple[Any, str]] = {
    "model": (str, "a known name, a name on the hub, a config.json of transformers or its directory"),
    "batch": (count, "rows in a batch (default: 1)"),
    "seq": (count, "tokens in a row (default: 2048)"),
    "adapters": (count, "train low-rank adapters of this rank beside all linear layers, and nothing else"),
    "precision": (str, "the Trainer's precision (default: bf16-mixed, or bf16-true with adapters)"),
    "optimizer": (str, "an optimizer such as AdamW or SGD (default: AdamW)"),
    "accumulate": (count, "batches before the optimizer steps (default: 1)"),
    "devices": (count, "devices that train together, each with this batch (default: 1)"),
    "nodes": (count, "machines that train together, each with these devices (default: 1)"),
}
OF_MACHINE: dict[str, tuple[Any, str]] = {
    "machine": (str, "a known machine, or list to see all (default: here, measured)"),
    "device_memory": (str, "device bytes, such as 24GiB (default: the machine's)"),
    "host_memory": (str, "host bytes, such as 64GiB (default: the machine's)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--config",
        action="append",
        help="a config of fit: with further arguments of fit (--model.name_or_path ...) the run that it would make",
    )
    parser.add_argument("--clip", action="store_true", default=None, help="gradients are clipped by their norm")
    for name, (kind, text) in (OF_RUN | OF_MACHINE).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    add_options(parser, but=OF_MACHINE)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the plan of a run; return 1 if the run does not fit."""
    if args.machine == "list":
        _list_machines()
        return 0
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # a change that cannot run is left out of the plan
    gc.freeze()  # garbage collection of all imported objects would take a fifth of a plan's time
    run = given(args, [*OF_RUN, "clip", *(name for name in OPTIONS if name not in OF_MACHINE)])
    run = _of_config(args, run) if args.config else _of_model(**run)
    from ..plan import plan

    if sys.stderr.isatty():
        print("planning, which may take a minute ...", file=sys.stderr)
    found = plan(**{**run, **given(args, OF_MACHINE)})
    print(json.dumps(found.to_dict(), indent=2, default=str) if args.json else found)
    return 0 if found.fits else 1


def _list_machines() -> None:
    """Print the machines that ``--machine`` takes, a line each."""
    from ..options import format_bytes
    from ..plan.machines import MACHINES

    for name, one in MACHINES.items():
        print(f"{name:20} {format_bytes(one.device_nbytes):>12}, and {format_bytes(one.host_nbytes):>12} on its host")
    print("here: this machine, measured")


def _of_config(args: argparse.Namespace, run: dict[str, Any]) -> dict[str, Any]:
    """Return the run that fit would make of ``--config`` and of fit's arguments, as arguments of `plan`."""
    for name, found in run.items():
        allowed = "left out beside --config: arguments of fit say it (--trainer.precision, --data.batch_size ...)"
        raise OptionError(argument=name, found=found, allowed=allowed)
    need("jsonargparse", "cli", "a plan of a config")
    from .config import find

    return find([*(word for config in args.config for word in ("--config", config)), *args.rest])


def _of_model(
    model: str | None = None, batch: int = 1, seq: int | None = None, adapters: int | None = None, **run: Any
) -> dict[str, Any]:
    """Return the run that plan's own arguments describe, as arguments of `plan`."""
    from .models import find

    return {"precision": "bf16-true" if adapters else "bf16-mixed", **find(model, batch, seq, adapters), **run}
