"""``python -m sp_lightning launch [options] -- SCRIPT ...``: run a script whose models stream, unchanged.

The script, or ``-m module``, runs in this process as Python would run it, inside of ``sp_lightning.hf.streaming``.
"""

import argparse
import importlib.util
import os
import runpy
import sys

from ..errors import OptionError, SuperpipelineError, users_line
from . import OPTIONS, add_options, given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: the strategy's options."""
    parser.usage = "%(prog)s [options] -- (script.py | -m module) [arguments of the script]"
    add_options(parser)
    parser.add_argument("--only-if-needed", action="store_true", help="leave models that fit to stock code")


def main(args: argparse.Namespace) -> int:
    """Run the script or module after ``--`` while its models stream; return its exit status.

    An error of this package's is one line, with the last line of the user's code that led to it.
    """
    from ..hf import streaming

    is_module = args.script[:1] == ["-m"]
    script = args.script[is_module:]
    if not script:
        raise OptionError(argument="the script", found=" ".join(args.script), allowed="after --: a path, or -m module")
    if not is_module and not os.path.isfile(script[0]):
        raise OptionError(argument="the script", found=script[0], allowed="a file, or -m and a module")
    context = streaming(only_if_needed=args.only_if_needed, **given(args, OPTIONS))
    before = sys.argv, list(sys.path)
    sys.argv = script
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script[0]))  # as Python itself sets it
    try:
        if is_module and importlib.util.find_spec(script[0].partition(".")[0]) is None:
            raise OptionError(argument="the module", found=script[0], allowed="one that Python can import")
        with context:
            if is_module:
                runpy.run_module(script[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script[0], run_name="__main__")
    except SuperpipelineError as error:
        if not (line := users_line(error)):
            raise  # it is about this command's own arguments
        sys.stderr.write(f"python -m sp_lightning: {line}{' '.join(str(error).split())}\n")
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0
