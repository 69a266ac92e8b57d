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
        """End with one line and exit status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ``arguments`` default to those of the process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    command, known = given[0] if given else "", [*LIGHTNINGS, *OWN]
    if command in ("", "-h", "--help", "--version"):
        parser.parse_args(given[:1])  # which ends
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
    """Make the parser of the command's name alone."""
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
    try:
        return importlib.metadata.version("sp-lightning")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def _run_own(command: str, given: list[str]) -> int:
    """Run one of this package's commands; return its exit status."""
    module: Any = importlib.import_module(f".commands.{command}", __package__)
    parser = OneLineParser(prog=f"python -m sp_lightning {command}", description=OWN[command], allow_abbrev=False)
    module.add_arguments(parser)
    at = given.index("--") if "--" in given and command == "launch" else len(given)
    args, rest = parser.parse_known_args(given[:at])
    args.rest, args.script = rest, given[at + 1 :]  # the command line of a script that the command runs
    if rest and not (command == "plan" and args.config):  # LightningCLI knows the rest
        meant = did_you_mean(rest[0], re.findall(r"--[\w-]+", parser.format_help()))
        if command == "launch" and not rest[0].startswith("-"):
            meant = f": put -- before the script (launch [options] -- {rest[0]} ...)"
        parser.error(f"{command} does not know {' '.join(rest)}{meant}")
    try:
        status = int(module.main(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `plan ... | head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes nowhere
        return 128 + signal.SIGPIPE


def _run_lightning(arguments: Sequence[str] | None) -> None:
    from .commands.fit import FitCLI  # needs the extra

    if not sys.stdout.isatty():  # of a file a bar does not know the width, and would wrap its figures at 80
        os.environ.setdefault("COLUMNS", "200")
    FitCLI(args=None if arguments is None else list(arguments), parser_kwargs={"prog": "python -m sp_lightning"})


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())
