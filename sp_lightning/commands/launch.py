"""``python -m sp_lightning launch [options] -- SCRIPT ...``: run a script whose models stream, unchanged.

The script, or ``-m module``, runs in this process as Python would run it, inside of ``sp_lightning.hf.streaming``.
"""

import argparse
import importlib.util
import os
import runpy
import sys
import traceback

from ..errors import OptionError, SuperpipelineError
from . import OPTIONS, add_options, given

PACKAGE, LIBRARY = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__)
NOT_THE_USERS = os.path.join(PACKAGE, ""), os.path.join(LIBRARY, ""), "<"  # beginnings of paths of other code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: the strategy's options."""
    parser.usage = "%(prog)s [options] -- (script.py | -m module) [arguments of the script]"
    add_options(parser)
    parser.add_argument("--only-if-needed", action="store_true", help="leave models that fit to stock code")


def main(args: argparse.Namespace) -> int:
    """Run the script or module after ``--`` while its models stream; return its exit status."""
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
        return _failed(error)
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _failed(error: SuperpipelineError) -> int:
    """Print an error in one line, with the last line of the user's code that led to it; return exit status 1.

    An error without any of the user's code is raised again.
    """
    places = traceback.extract_tb(error.__traceback__)
    others = [place for place in places if not place.filename.startswith(NOT_THE_USERS)]
    own = [one for one in others if "site-packages" not in one.filename and "dist-packages" not in one.filename]
    if not own:
        raise error  # it is about this command's own arguments
    sys.stderr.write(f"python -m sp_lightning: {own[-1].filename}:{own[-1].lineno}: {' '.join(str(error).split())}\n")
    return 1
