"""``python -m sp_lightning bench``: compare this strategy and its peers on the same work, on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import OptionError
from . import make_room

SETTING = "model batch seq precision optimizer clip activations inference answer steps repetitions device device_memory"
SETTING += " time_limit devices nodes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; defaults that depend on the machine are left to the library."""
    add = parser.add_argument
    add(
        "--model",
        help="tiny, llama-tiny, llama-1b, llama-3b, llama-8b, vit-tiny, vit-h, llava-tiny, llava-1b or llava-3b",
    )
    add("--batch", type=int, help="sequences, or images")
    add("--seq", type=int, help="tokens in a sequence")
    add("--precision", help="32-true (default), bf16-mixed or bf16-true")
    add("--optimizer", help="adamw (torch's default, which is slow on the host; default), adamw-fused or sgd")
    add("--clip", type=float, metavar="NORM", help="clip gradients by their global norm")
    add("--activations", help="keep (default), recompute, offload or recompute+offload; for peers: recomputed or kept")
    add("--inference", action="store_true", help="forward only")
    add("--answer", type=int, metavar="TOKENS", help="with --inference: generate so many tokens for each row")
    add("--at-once", default="1", metavar="N,...", help="with --inference: batches of this strategy under way at once, "
        "a row each (default: %(default)s)")  # fmt: skip
    add("--windows", default="1,2,4,all", help="units on the device at a time, a row each (default: %(default)s)")
    add("--contenders", help="some of plain, superpipeline, fsdp2, deepspeed, zero-offload, superoffload, torchao, "
        "accelerate and group-offload (default: those for training, or for inference)")  # fmt: skip
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of SuperpipelineStrategy")
    add("--steps", type=int, help="steps in a repetition (default: 5)")
    add("--repetitions", type=int, help="repetitions of each contender, interleaved (default: 3)")
    add("--device", help="device that computes (default: the accelerator, or else the CPU)")
    add("--devices", type=int, help="devices that train together: plain is DDP then (default: 1)")
    add("--nodes", type=int, help="machines that this one's processes pretend to be, each with these devices; plain is "
        "DDP with tree_hook then (default: 1)")  # fmt: skip
    add("--device-memory", metavar="SIZE", help='device memory that a process may take, such as "16GiB"')
    add("--time-limit", type=float, metavar="S", help="seconds for one turn of a contender (default: 300)")
    add("--json", type=Path, metavar="FILE", help="write all measurements")
    add("--plot", type=Path, metavar="FILE", help="draw memory against time")


def main(args: argparse.Namespace) -> int:
    """Run the contenders and print the table; return 1 if losses that must be equal differ."""
    from rich.console import Console

    from ..bench import Setting, compare, entries, report

    if args.plot is not None:
        report.check_plot()
    make_room(json=args.json, plot=args.plot)
    setting = Setting.parse(**{name: getattr(args, name) for name in SETTING.split()})
    rows = entries(_names(args), args.windows.split(","), _options(args.set), _at_once(args))
    progress = Console(stderr=True, highlight=False, markup=False)
    result = compare(setting, rows, progress.print)
    Console(width=None if sys.stdout.isatty() else 160).print(report.table(result))
    if args.json is not None:
        report.save_json(result, args.json)
    if args.plot is not None:
        report.plot(result, args.plot)
    return 1 if result.differences else 0


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    from ..bench.entries import INFERENCE, SEVERAL, TRAINING

    if args.contenders:
        return tuple(args.contenders.split(","))
    if max(args.devices or 1, args.nodes or 1) > 1:
        return SEVERAL
    return INFERENCE if args.inference else TRAINING


def _at_once(args: argparse.Namespace) -> list[int]:
    counts = args.at_once.split(",")
    if not all(count.isdigit() and int(count) for count in counts):
        raise OptionError(argument="--at-once", found=args.at_once, allowed="ints >= 1, with commas between")
    if counts != ["1"] and not args.inference:
        raise OptionError(argument="--at-once", found=args.at_once, allowed="given together with --inference")
    return [int(count) for count in counts]


def _options(pairs: list[str]) -> dict[str, Any]:
    for pair in pairs:
        if "=" not in pair:
            raise OptionError(argument="--set", found=pair, allowed="NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)
