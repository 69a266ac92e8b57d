"""``python -m sp_lightning plan``: predict what training a model needs, before there is a device."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import re
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..options import format_bytes
from . import STDOUT, add_json, check_picture, make_room, write_json

if TYPE_CHECKING:
    from ..planning import Plan
    from .fit_config import Run

MEASURED_S = 10.0  # of the disk
ANSWER = 256  # tokens, with --inference
OF_STRATEGY = "window", "transfer", "memory_budget", "units", "activations", "host_budget", "disk"
SWITCHES = "master_weights", "divide_state"
OF_SCRIPT = "config", "model", "batch", "data", "loss", "answer", "cache", "precision", "optimizer", "accumulate"
OF_RUN = (  # what a config says
    *OF_STRATEGY,
    *("batch", "seq", "answer", "cache", "precision", "accumulate", "clip", "devices", "nodes"),
    "tensor_parallel_size",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [options] [-- (script.py | -m module) [arguments of the script]]"
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
    parser.add_argument("--batch", type=int, help="rows in a batch (default: 1)")
    parser.add_argument("--seq", type=int, help="tokens in a row (default: as many as the model has, or 2048)")
    parser.add_argument("--data", help="package.module:function of rows and tokens that returns the batch")
    parser.add_argument(
        "--loss",
        help="full (default); chunked: never all logits; or package.module:function of module and batch",
    )
    parser.add_argument("--answer", type=int, help="tokens to generate for each row: nothing is trained (bf16-true)")
    parser.add_argument(
        "--inference",
        action="store_true",
        help="plan calls in lockstep, each of such a batch: how many fit, and tokens a second (--answer: 256)",
    )
    parser.add_argument("--at-once", type=int, help="with --inference: so many calls (default: as many as fit)")
    parser.add_argument(
        "--guessed", type=int, default=0, help="with --inference: tokens that speculation guesses for a forward"
    )
    parser.add_argument(
        "--accepted", type=float, default=1.0, help="with --guessed: tokens that a forward gives, on average"
    )
    parser.add_argument("--cache", help="with --answer: keys and values wait on the device (default) or the host")
    parser.add_argument("--precision", help="the Trainer's precision (default: bf16-mixed)")
    parser.add_argument("--optimizer", help="an optimizer such as AdamW or SGD (default: the module's own, or AdamW)")
    parser.add_argument(
        "--machine", default="here", help="a profile such as rtx4090, or list to see all (default: here, measured)"
    )
    parser.add_argument("--devices", type=int, help="devices that train together, each with this batch (default: 1)")
    parser.add_argument("--nodes", type=int, help="machines that train together, each with these devices (default: 1)")
    parser.add_argument(
        "--network", help="with --nodes: the line between them such as 100Gb, or bytes per second that doctor measured"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=int, help="devices among which the model cuts its layers (docs/planning.md)"
    )
    parser.add_argument(
        "--mesh-link", help="with --tensor-parallel-size: the link between them, as --link (default: that to the host)"
    )
    parser.add_argument("--device-memory", help="device bytes, such as 24GiB (default: the machine's)")
    parser.add_argument("--host-memory", help="host bytes, such as 64GiB (default: the machine's)")
    parser.add_argument("--host-headroom", help="host bytes for the system (default: a tenth, from 4 to 32 GiB)")
    parser.add_argument("--cores", type=int, help="physical cores for the optimizer (default: all of the machine's)")
    parser.add_argument("--link", help="gen4x8, or bytes per second such as 12GB (default: the machine's)")
    parser.add_argument(
        "--disk-speed",
        help="bytes per second that the disk reads and writes, such as 7GB,5GB (default: measured for 10 s, if "
        "--machine is here and --disk a folder; else that of a drive on PCIe 4)",
    )
    parser.add_argument("--copies", type=int, help="copies of the weights, such as an EMA callback's (default: 0)")
    parser.add_argument("--accumulate", type=int, help="batches before the optimizer steps (default: 1)")
    parser.add_argument("--clip", action="store_true", default=None, help="gradients are clipped")
    parser.add_argument("--samples", type=int, help="rows in an epoch: prints how long the run takes")
    parser.add_argument("--epochs", type=int, help="epochs of those samples (default: 1)")
    parser.add_argument("--price", type=float, help="of the machine for an hour: prints what the run costs")
    parser.add_argument("--window", help="units on the device at once (default: auto)")
    parser.add_argument("--transfer", help="units exchanged at a time (default: auto)")
    parser.add_argument("--memory-budget", help="device bytes for weights, gradients and what streams, such as 10GiB")
    parser.add_argument("--host-budget", help="host bytes beyond which frozen weights stay in files, such as 24GiB")
    parser.add_argument(
        "--disk", nargs="+", help="folders on local SSDs, usually one, for optimizer state and weights beyond that"
    )
    parser.add_argument("--units", nargs="+", help="class names of the units (default: auto)")
    parser.add_argument("--activations", help="keep, recompute, offload or recompute+offload (default: keep)")
    parser.add_argument("--master-weights", action="store_true", help="with bf16-true or 16-true: FP32 on the host")
    parser.add_argument("--divide-state", action="store_true", help="with --nodes: each has a share of optimizer state")
    add_json(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="draw memory against time for every window and transfer")
    parser.add_argument("--timeline", metavar="TRACE.json", help="write the simulated step as a timeline")


def main(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if the run does not fit."""
    if args.machine == "list":
        print(_machines())
        return 0
    from ..planning.forecast import WIDTH, text

    for name in ("batch", "seq", "answer", "accumulate", "samples", "epochs", "devices", "nodes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(argument=name, found=value, allowed="an int >= 1")
    if args.inference:
        if args.script or in_place_of_fit(args):
            allowed = "left out beside a script or arguments of fit: give --model, --batch, --seq and --answer"
            raise OptionError(argument="inference", found=True, allowed=allowed)
        args.answer = args.answer or ANSWER
        args.at_once = "auto" if args.at_once is None else args.at_once
    _check_run(args)
    if args.plot:
        check_picture(args.plot)
    make_room(json=args.json, timeline=args.timeline, plot=args.plot)
    of = _run_of_script if args.script else _run_of_fit if in_place_of_fit(args) else _run_of_arguments
    run = of(args)
    spec, note = run.spec, run.spec.note
    found = _plan_of(args, run)
    found = replace(found, notes=(*found.notes, *run.notes))
    speed = _speed_of(args, run, found)
    if args.json:
        write_json(found.to_dict() | {"run": speed}, args.json)
    if args.json != STDOUT:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
        print(text(found, note, speed, spec.tokens, width))
    if args.timeline:
        from ..observe.timeline import save, simulated

        save(simulated(found.simulation, f"{found.model} on {found.machine.name}"), args.timeline)
    if args.plot:
        from .plan_plot import draw

        draw(found, args.plot)
    return 0 if found.fits else 1


def _plan_of(args: argparse.Namespace, run: Run) -> Plan:
    """Plan the run."""
    from ..observe.progress import working
    from ..planning import plan

    spec = run.spec
    loss = "chunked" if args.loss == "chunked" else spec.loss
    with working("planning"):
        return plan(
            spec.model,
            spec.batch,
            precision=run.precision,
            optimizer=run.optimizer,
            machine=args.machine,
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            host_headroom=args.host_headroom,
            cores=args.cores,
            link=args.link,
            disk_speed=_disk_speed(args, run),
            copies=run.copies,
            trained_copies=run.trained_copies,
            devices=run.devices,
            nodes=run.nodes,
            network=args.network,
            tensor_parallel_size=run.tensor_parallel_size,
            mesh_link=args.mesh_link,
            own_gradients=run.own_gradients,
            accumulate=run.accumulate,
            clip=run.clip,
            loss=None if run.answer is not None and args.loss is None else loss,  # that of the model's kind
            answer=run.answer,
            cache=run.cache,
            at_once=args.at_once,
            guessed=args.guessed,
            accepted=args.accepted,
            name=spec.name,
            **{name: value for name, value in run.options.items() if name != "host_memory"},  # it changes no plan
        )


def _disk_speed(args: argparse.Namespace, run: Run) -> str | None:
    """Return the speed that was given, or that of this machine's disk; None if a plan has to assume one."""
    disk = run.options.get("disk") or ()
    folders = [disk] if isinstance(disk, str | os.PathLike) else list(disk)
    if args.disk_speed is not None or args.machine != "here" or not folders or not all(map(os.path.isdir, folders)):
        return args.disk_speed  # type: ignore[no-any-return]
    from ..observe.disk_speed import measure_disks

    found = measure_disks(folders, MEASURED_S)[-1]
    return f"{found.read_bytes_per_s:.0f}B,{found.sustained_bytes_per_s:.0f}B,{max(0.5, found.duplex):.2f}"


def _is_yaml(path: str) -> bool:
    return path.endswith((".yaml", ".yml"))


def _machines() -> str:
    """List the profiles that ``--machine`` takes, a line each."""
    from ..core.machine import PROFILES

    sizes = ((name, format_bytes(one.device_nbytes), format_bytes(one.host_nbytes)) for name, one in PROFILES.items())
    lines = [
        f"{name:{max(map(len, PROFILES))}}  {device:>10} on the device, {host:>10} on the host"
        for name, device, host in sizes
    ]
    return "\n".join([*lines, "here: this machine, measured"])


def in_place_of_fit(args: argparse.Namespace) -> bool:
    """Return whether the arguments are those of fit: there is a config, or the model is the path of a class."""
    classes = args.model is not None and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", args.model) is not None
    return bool(args.config) or (classes and not args.model.endswith(".json") and not pathlib.Path(args.model).exists())


def _run_of_fit(args: argparse.Namespace) -> Run:
    """Return the run that fit would make with the config, if there is one, and the arguments beside it."""
    from .fit_config import find
    from .model_spec import NAMES, own_function

    for name in OF_RUN:
        if getattr(args, name) is not None:
            allowed = "left out beside arguments of fit, which say it (--trainer.precision, --data.batch_size ...)"
            raise OptionError(argument=name, found=getattr(args, name), allowed=allowed)
    for name in SWITCHES:
        if getattr(args, name):
            allowed = f"left out beside arguments of fit: give --trainer.strategy.{name} true"
            raise OptionError(argument=name, found=True, allowed=allowed)
    if args.config and (args.model in NAMES or re.search(r"[/:-]", args.model or "")) and not _is_yaml(args.model):
        allowed = (
            "left out beside --config, which names the module (--model.name_or_path is the checkpoint that it reads), "
            "or given without --config"
        )
        raise OptionError(argument="model", found=args.model, allowed=allowed)
    given = [word for config in args.config or () for word in ("--config", config)]
    for name in ("model", "data", "optimizer"):
        if getattr(args, name) is not None:
            given += [f"--{name}", getattr(args, name)]
    run = find([*given, *args.rest])
    loss = None if args.loss in (None, "full", "chunked") else own_function("loss", args.loss)
    run = replace(run, spec=replace(run.spec, loss=loss))
    return run if args.copies is None else replace(run, copies=args.copies, trained_copies=0)


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the strategy that were given to plan itself."""
    options = {name: getattr(args, name) for name in OF_STRATEGY if getattr(args, name) is not None}
    return options | {name: True for name in SWITCHES if getattr(args, name)}


def _run_of_arguments(args: argparse.Namespace) -> Run:
    """Return the run that plan's own arguments describe."""
    from .fit_config import Run
    from .model_spec import SPECS, find

    if args.model is None:
        raise OptionError(argument="model", found=None, allowed=f"given, unless --config is: {SPECS}")
    options = _options_of(args)
    needs_code = {name: options[name] for name in ("units",) if options.get(name, "auto") != "auto"}
    if args.answer is not None:
        needs_code["answer"] = args.answer
    if "offload" in options.get("activations", ""):
        needs_code["activations"] = options["activations"]
    own_loss = None if args.loss in (None, "full", "chunked") else args.loss
    return Run(
        spec=find(args.model, args.batch or 1, args.seq, args.data, own_loss, needs_code),
        precision=args.precision or ("bf16-mixed" if args.answer is None else "bf16-true"),
        options=options,
        accumulate=args.accumulate or 1,
        copies=args.copies or 0,
        trained_copies=0,
        steps=None,
        devices=args.devices or 1,
        nodes=args.nodes or 1,
        tensor_parallel_size=args.tensor_parallel_size,
        answer=args.answer,
        cache=args.cache,
        optimizer=args.optimizer,
        clip=bool(args.clip),
    )


def _run_of_script(args: argparse.Namespace) -> Run:
    """Return the run that a script of Hugging Face's libraries would make (hf/rehearsal.py)."""
    from ..hf.rehearsal import rehearsal
    from .fit_config import Run
    from .launch import run
    from .model_spec import Spec

    for name in OF_SCRIPT:
        if getattr(args, name) is not None:
            allowed = "left out before --, as the script says it; change the script's own arguments"
            raise OptionError(argument=name, found=getattr(args, name), allowed=allowed)
    if args.divide_state:
        allowed = "left out before --, as sp_lightning.hf has no such option"
        raise OptionError(argument="divide_state", found=True, allowed=allowed)
    rehearsed = rehearsal(args.seq)
    status = run(list(args.script), rehearsed)
    found = rehearsed.found
    if found is None and status:
        raise SystemExit(status)
    if found is None:
        ended, allowed = "one that ended before it trained", "one that calls Trainer.train, or a model that it moved"
        raise OptionError(argument="the script", found=ended, allowed=f"{allowed} or prepared, with gradients")
    options = _options_of(args)
    return Run(
        spec=Spec(found.name, found.models.renewed, found.batch, found.loss, "; ".join(found.notes), found.tokens),
        precision="bf16-true" if args.master_weights else found.precision,
        options=options,
        accumulate=found.accumulate,
        copies=args.copies or 0,
        trained_copies=0,
        steps=found.steps,
        devices=args.devices or 1,
        nodes=args.nodes or 1,
        tensor_parallel_size=args.tensor_parallel_size,
        optimizer=found.optimizer,
        clip=bool(args.clip) or found.clip,
    )


def _check_run(args: argparse.Namespace) -> None:
    """Refuse epochs and a price without samples, and accumulation beside answers."""
    if args.answer is not None and args.accumulate is not None:
        allowed = "left out beside --answer: nothing is trained"
        raise OptionError(argument="accumulate", found=args.accumulate, allowed=allowed)
    knows_steps = args.script or in_place_of_fit(args)
    for name, default in (("at_once", None), ("guessed", 0), ("accepted", 1.0)):
        if getattr(args, name) != default and not args.inference:
            raise OptionError(argument=name, found=getattr(args, name), allowed="given together with --inference")
    for name in ("epochs", "price"):
        if getattr(args, name) is not None and args.samples is None and not (knows_steps and name == "price"):
            raise OptionError(argument=name, found=getattr(args, name), allowed="given together with --samples")
    if args.price is not None and not 0 <= args.price < math.inf:
        raise OptionError(argument="price", found=args.price, allowed="a number >= 0")


def _speed_of(args: argparse.Namespace, run: Run, plan: Plan) -> dict[str, float]:
    """Compute the speed and, for a number of samples, the length and the cost of the whole run."""
    from ..planning.forecast import speed_of

    rows = (
        (plan.rows if plan.counted == "rows" else args.batch or 1)
        * run.accumulate
        * plan.devices
        // plan.shards
        * run.nodes
    )
    steps = run.steps if args.samples is None else -(-args.samples // rows) * (args.epochs or 1)
    speed = speed_of(plan, rows, run.spec.tokens, steps)
    if steps is not None and args.price is not None:
        speed["cost"] = speed["hours"] * args.price
    return speed
