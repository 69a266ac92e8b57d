"""``python -m sp_lightning launch [options] -- SCRIPT ...``: run a script whose models stream, unchanged.

The script, or ``-m module``, runs in this process as Python would run it, inside of ``sp_lightning.hf.streaming``.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import runpy
import sys
import traceback
from typing import Any

from ..errors import OptionError, SuperpipelineError
from ..options import Options

PACKAGE = os.path.dirname(os.path.dirname(__file__))
NOT_THE_USERS = PACKAGE, sys.prefix, sys.base_prefix, "<"  # beginnings of the paths of code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: the strategy's options."""
    parser.usage = "%(prog)s [options] -- (script.py | -m module) [arguments of the script]"
    for field in dataclasses.fields(Options):
        name = field.name.replace("_", "-")
        help = f"as the strategy's option {field.name} (default: {field.default})"
        parser.add_argument(f"--{name}", dest=field.name, default=argparse.SUPPRESS, metavar="VALUE", help=help)
    parser.add_argument("--report", action="store_true", help="say at the end what the models took their time for")
    parser.add_argument("--log-metrics", action="store_true", help="add figures to the log of transformers' Trainer")


def main(args: argparse.Namespace) -> int:
    """Run what stands after ``--``, while models stream."""
    from ..hf import streaming

    given: dict[str, Any] = {f.name: getattr(args, f.name) for f in dataclasses.fields(Options) if f.name in args}
    if "units" in given:
        given["units"] = given["units"] if given["units"] == "auto" else tuple(given["units"].split(","))
    return run(list(args.script), streaming(report=args.report, log_metrics=args.log_metrics, **given))


def run(script: list[str], context: contextlib.AbstractContextManager[Any]) -> int:
    """Run a script, or ``-m`` and a module, with its arguments, in a context; return the exit status."""
    is_module = script[:1] == ["-m"]
    if not script[is_module:]:
        raise OptionError(argument="the script", found=" ".join(script), allowed="after --: a path, or -m and a module")
    if not is_module and not os.path.isfile(script[0]):
        raise OptionError(argument="the script", found=script[0], allowed="a file, or -m and a module")
    before = sys.argv, list(sys.path)
    sys.argv = script[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(sys.argv[0]))  # as Python has it
    try:
        if is_module and not _is_there(sys.argv[0]):
            raise OptionError(argument="the module", found=sys.argv[0], allowed="one that Python can import")
        return _run(context, is_module)
    finally:
        sys.argv, sys.path[:] = before


def _run(context: contextlib.AbstractContextManager[Any], is_module: bool) -> int:
    try:
        with context:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
    except SuperpipelineError as error:  # which says what to do, but not where the user's code met it
        places = traceback.extract_tb(error.__traceback__)
        own = [place for place in places if not place.filename.startswith(NOT_THE_USERS)]
        at = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        sys.stderr.write(f"python -m sp_lightning: {at}{' '.join(str(error).split())}\n")
        return 1
    except OSError:  # the script's, with the place in it; others are no command's to catch
        traceback.print_exc()
        return 1
    return 0


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a package around it
        return False
