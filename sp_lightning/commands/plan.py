"""``python -m sp_lightning plan``: predict what a run needs, before there is a device."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from . import STDOUT, add_json, make_room, write_json

if TYPE_CHECKING:
    from .fit_config import PlannedRun

OF_STRATEGY = {  # options of the strategy, and what each is
    "window": "units on the device at once (default: auto)",
    "transfer": "units exchanged at a time (default: auto)",
    "memory-budget": "device bytes for weights, gradients and what streams, such as 10GiB",
    "host-budget": "host bytes beyond which frozen weights stay in files, such as 24GiB",
    "activations": "keep, recompute, offload or recompute+offload (default: keep)",
    "optimizer-device": "host or device (default: host)",
    "wire-dtype": "auto or as-is (default: auto)",
}
OF_RUN = {  # what a config says, in place of these
    "data": "package.module:function of rows and tokens that returns the batch",
    "optimizer": "an optimizer such as AdamW or SGD (default: the module's own, or AdamW)",
    "precision": "the Trainer's precision (default: bf16-mixed; bf16-true with --answer)",
    "cache": "with --answer: keys and values wait on the device (default) or the host",
}
COUNTS = {
    "batch": "rows in a batch (default: 1)",
    "seq": "tokens in a row (default: 2048)",
    "answer": "tokens to generate for each row: nothing is trained",
    "accumulate": "batches before the optimizer steps (default: 1)",
    "devices": "devices that train together, each with this batch (default: 1)",
    "nodes": "machines that train together, each with these devices (default: 1)",
}
OF_MACHINE = {
    "device-memory": "device bytes, such as 24GiB (default: the machine's)",
    "host-memory": "host bytes, such as 64GiB (default: the machine's)",
    "host-headroom": "host bytes for the system (default: a tenth, from 4 to 32 GiB)",
    "link": "gen4x8, or bytes per second such as 12GB (default: the machine's)",
    "disk-speed": "bytes per second that the disk reads and writes, such as 7GB,5GB",
    "network": "with --nodes: the line between them such as 100Gb, or bytes per second",
}
SWITCHES = {
    "clip": "gradients are clipped by their norm",
    "master-weights": "with bf16-true or 16-true: FP32 on the host",
    "divide-state": "with --nodes: each has a share of the optimizer's state",
}
FIT = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"  # the path of a class


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--config",
        action="append",
        help="a config of fit: with further arguments of fit (--model.name_or_path ...) the run that it would make",
    )
    parser.add_argument(
        "--model",
        help="a transformers config.json or its directory, a name on the hub, a torchvision name, "
        "package.module:function, a known name, or the path of a LightningModule, as fit takes it",
    )
    parser.add_argument(
        "--machine", default="here", help="a known machine, or list to see all (default: here, measured)"
    )
    parser.add_argument("--loss", help="package.module:function of module and batch")
    parser.add_argument("--cores", type=int, help="physical cores for the optimizer (default: all of the machine's)")
    parser.add_argument("--copies", type=int, help="copies of the weights, such as an EMA callback's (default: 0)")
    parser.add_argument("--units", nargs="+", help="class names of the units (default: auto)")
    parser.add_argument("--disk", help="a folder on a local SSD, for what exceeds the host")
    for name, text in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    for name, text in (*OF_STRATEGY.items(), *OF_RUN.items(), *OF_MACHINE.items()):
        parser.add_argument(f"--{name}", help=text)
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", default=None, help=text)
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if the run does not fit."""
    if args.machine == "list":
        print(_machines())
        return 0
    if args.script:
        raise OptionError(argument="script", found=args.script[0], allowed="left out: a plan is of a model or a config")
    for name in map(_attribute, COUNTS):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(argument=name, found=value, allowed="an int >= 1")
    make_room(json=args.json)
    run = _run_of_fit(args) if in_place_of_fit(args) else _run_of_arguments(args)
    from ..observe.progress import working
    from ..plan import plan
    from .model_spec import own_function

    spec = run.spec
    loss = spec.loss if args.loss is None else own_function("loss", args.loss)
    machine = {name: getattr(args, name) for name in ("machine", "cores", *map(_attribute, OF_MACHINE))}
    with working("planning"):
        found = plan(
            spec.model,
            spec.batch,
            precision=run.precision,
            optimizer=run.optimizer,
            copies=run.copies if args.copies is None else args.copies,
            trained_copies=run.trained_copies,
            devices=run.devices,
            nodes=run.nodes,
            own_gradients=run.own_gradients,
            accumulate=run.accumulate,
            clip=run.clip,
            loss=loss,
            answer=run.answer,
            cache=run.cache,
            name=spec.name,
            **machine,
            **{name: value for name, value in run.options.items() if name != "host_memory"},  # it changes no plan
        )
    found = replace(found, notes=(*found.notes, *run.notes))
    if args.json:
        write_json(found.to_dict() | {"speed": found.speed(spec.tokens)}, args.json)
    if args.json != STDOUT:
        print(found.text(spec.tokens, spec.note))
    return 0 if found.fits else 1


def _attribute(name: str) -> str:
    return name.replace("-", "_")


def _machines() -> str:
    """List the machines that ``--machine`` takes, a line each."""
    from ..options import format_bytes
    from ..plan.machines import MACHINES

    lines = [
        f"{name:20} {format_bytes(one.device_nbytes):>12} on the device, {format_bytes(one.host_nbytes):>12} on a host"
        for name, one in MACHINES.items()
    ]
    return "\n".join([*lines, "here: this machine, measured"])


def in_place_of_fit(args: argparse.Namespace) -> bool:
    """Return whether the arguments are those of fit: there is a config, or the model is the path of a class."""
    classes = args.model is not None and re.fullmatch(FIT, args.model) is not None
    return bool(args.config) or (classes and not args.model.endswith(".json") and not Path(args.model).exists())


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the strategy that were given to plan itself."""
    names = *map(_attribute, OF_STRATEGY), "units", "disk", "master_weights", "divide_state"
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _run_of_fit(args: argparse.Namespace) -> PlannedRun:
    """Return the run that fit would make with the config, if there is one, and the arguments beside it."""
    from .fit_config import find

    for name in (*_options_of(args), *map(_attribute, COUNTS), "precision", "cache", "clip"):
        if getattr(args, name) is not None:
            allowed = "left out beside arguments of fit, which say it (--trainer.precision, --data.batch_size ...)"
            raise OptionError(argument=name, found=getattr(args, name), allowed=allowed)
    given = [word for config in args.config or () for word in ("--config", config)]
    for name in ("model", "data", "optimizer"):
        if getattr(args, name) is not None:
            given += [f"--{name}", getattr(args, name)]
    return find([*given, *args.rest])


def _run_of_arguments(args: argparse.Namespace) -> PlannedRun:
    """Return the run that plan's own arguments describe."""
    from .fit_config import PlannedRun
    from .model_spec import SPECS, find

    if args.model is None:
        raise OptionError(argument="model", found=None, allowed=f"given, unless --config is: {SPECS}")
    return PlannedRun(
        spec=find(args.model, args.batch or 1, args.seq, args.data),
        precision=args.precision or ("bf16-mixed" if args.answer is None else "bf16-true"),
        options=_options_of(args),
        accumulate=args.accumulate or 1,
        copies=0,
        trained_copies=0,
        devices=args.devices or 1,
        nodes=args.nodes or 1,
        answer=args.answer,
        cache=args.cache,
        optimizer=args.optimizer,
        clip=bool(args.clip),
    )
