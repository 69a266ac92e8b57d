"""The command line: this package's commands, and LightningCLI's with superpipeline as the default strategy.

An error of this package, wherever a command meets it, is one line that says what to do next, and exit status 2. The
modules of commands are imported when they run: ``--help`` imports no torch.
"""

import argparse
import importlib
import importlib.metadata
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .commands import need
from .errors import SuperpipelineError, did_you_mean

LIGHTNINGS = {
    "fit": "train a LightningModule, with validation",
    "validate": "run one evaluation epoch over the validation set",
    "test": "run one evaluation epoch over the test set",
    "predict": "run inference on a dataset",
}
OWN = {  # module in commands/, and its help
    "plan": "predict what training a model needs, and what to change first",
    "doctor": "find what of this machine slows streaming down, and what to do",
    "launch": "run a Hugging Face script with streamed models",
}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse a command line and run its command; ``arguments`` default to those of the process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    command, known = given[0] if given else "", [*LIGHTNINGS, *OWN]
    if command in ("", "-h", "--help", "--version"):
        parser.parse_args(given[:1])  # prints help or version, and exits
    if command not in known:
        what = "an option" if command.startswith("-") else "a command"
        meant = did_you_mean(command, [*known, "--help", "--version"]) or ": " + ", ".join(known)
        parser.error(f"{command!r} is not {what}{meant}")
    try:
        if command in OWN:
            sys.exit(_run_own(command, given[1:]))
        need("jsonargparse", "cli", command)
        _run_lightning(arguments)
    except SuperpipelineError as error:
        parser.exit(2, f"{parser.prog} {command}: {_in_a_line(error)}\n")


def _parser() -> OneLineParser:
    """Make the parser of a command's name, ``--help`` and ``--version``; commands parse their own arguments."""
    listed = "\n".join(f"  {name:10} {what}" for name, what in (LIGHTNINGS | OWN).items())
    parser = OneLineParser(
        prog="python -m sp_lightning",
        usage="%(prog)s [--help] [--version] command ...",
        description="Train, validate and predict with LightningModules larger than the accelerator's memory.",
        epilog=f"commands (COMMAND --help for options):\n{listed}\n\n"
        f"{', '.join(LIGHTNINGS)} are LightningCLI's, with strategy superpipeline unless another is named.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("command", help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    """Return the installed version of this package, or "not installed"."""
    try:
        return importlib.metadata.version("sp-lightning")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def _run_own(command: str, given: list[str]) -> int:
    """Parse the arguments of one of this package's commands and run it; return its exit status."""
    module: Any = importlib.import_module(f".commands.{command}", __package__)
    parser = OneLineParser(prog=f"python -m sp_lightning {command}", description=OWN[command], allow_abbrev=False)
    module.add_arguments(parser)
    at = given.index("--") if "--" in given and command == "launch" else len(given)
    args, rest = parser.parse_known_args(given[:at])
    args.rest, args.script = rest, given[at + 1 :]  # the script of `launch`, with its arguments
    if rest and not (command == "plan" and args.config):  # the rest of `plan --config` is for LightningCLI
        meant = did_you_mean(rest[0], re.findall(r"--[\w-]+", parser.format_help()))
        if command == "launch" and not rest[0].startswith("-"):
            meant = f": put -- before the script (launch [options] -- {rest[0]} ...)"
        parser.error(f"{command} does not know {' '.join(rest)}{meant}")
    try:
        status = int(module.main(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe, as in `plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not raise again
        return 128 + signal.SIGPIPE


def _run_lightning(arguments: Sequence[str] | None) -> None:
    """Run one of LightningCLI's commands; ``arguments`` default to those of the process."""
    from .commands.fit import FitCLI  # needs the extra "cli"

    if not sys.stdout.isatty():  # a progress bar does not know a file's width, and would wrap at 80 columns
        os.environ.setdefault("COLUMNS", "200")
    FitCLI(args=None if arguments is None else list(arguments), parser_kwargs={"prog": "python -m sp_lightning"})


def _in_a_line(error: BaseException) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split())
