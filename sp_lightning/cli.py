"""The command line: this package's commands, and LightningCLI's with superpipeline as the default strategy.

An error of this package, wherever a command meets it, is one line that says what to do next, and exit status 2.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .errors import SuperpipelineError, did_you_mean

OWN: dict[str, str] = {  # module in commands/, and its help
    "doctor": "what this machine offers for streaming, and what to fix",
    "plan": "predict what training a model needs, and what to change first",
    "timeline": "draw a recorded or simulated timeline",
    "launch": "run a Hugging Face script with streamed models",
}
LIGHTNINGS = {
    "fit": "train a LightningModule, with validation",
    "validate": "run one evaluation epoch over the validation set",
    "test": "run one evaluation epoch over the test set",
    "predict": "run inference on a dataset",
}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with one line and exit status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ``arguments`` default to those of the process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser, parsers = _parsers()
    own, script = _without_script(given)
    if own[:1] and own[0] not in parsers and own[0] not in ("-h", "--help", "--version"):
        what = "an option" if own[0].startswith("-") else "a command"
        known = [*parsers, "--help", "--version"]
        parser.error(f"{own[0]!r} is not {what}{did_you_mean(own[0], known) or ': ' + ', '.join(parsers)}")
    args, rest = parser.parse_known_args(own)
    args.script = script
    try:
        if args.command in OWN:
            args.rest = rest  # of a plan in place of fit, LightningCLI knows them
            if rest and not (args.command == "plan" and _module("plan").in_place_of_fit(args)):
                options = re.findall(r"--[\w-]+", parsers[args.command].format_help())
                meant = did_you_mean(rest[0], options)
                if "--nodes" not in options and re.fullmatch(r"--(n|num[-_])?nodes(=.*)?", rest[0]):
                    meant = ": it is of one machine, and docs/several-machines.md has what others add"
                if args.command == "launch" and not rest[0].startswith("-"):
                    meant = f": put -- before the script ({args.command} [options] -- {rest[0]} ...)"
                parsers[args.command].error(f"{args.command} does not know {' '.join(rest)}{meant}")
            sys.exit(_run_own(parser, args))
        # LightningCLI parses the arguments itself.
        if importlib.util.find_spec("jsonargparse") is None:
            parser.error(f"{args.command} needs jsonargparse, which is not installed: pip install 'sp-lightning[cli]'")
        _run_lightning(arguments)
    except SuperpipelineError as error:
        parser.exit(2, f"{parser.prog} {args.command}: {_in_a_line(error)}\n")


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _without_script(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split off the command line of the script that `launch` or `plan` runs, with its own arguments."""
    if arguments[:1] not in (["launch"], ["plan"]) or "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _run_own(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        status = int(_module(args.command).main(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `plan ... | head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes nowhere
        return 128 + signal.SIGPIPE
    except OSError as error:  # such as a folder or a file that cannot be written
        parser.exit(2, f"{parser.prog} {args.command}: {_in_a_line(error)}\n")


def _parsers() -> tuple[OneLineParser, dict[str, argparse.ArgumentParser]]:
    """Make the parser, and those of its commands."""
    parser = OneLineParser(
        prog="python -m sp_lightning",
        description="Train, validate and predict with LightningModules larger than the accelerator's memory.",
        epilog=f"{', '.join(LIGHTNINGS)} are LightningCLI's, with strategy superpipeline unless another is named.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command", title="commands", description="COMMAND --help for options."
    )
    made: dict[str, argparse.ArgumentParser] = {}
    for name, what in LIGHTNINGS.items():
        made[name] = commands.add_parser(name, help=what, add_help=False)
    for name, what in OWN.items():
        made[name] = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        _module(name).add_arguments(made[name])
    return parser, made


def _version() -> str:
    try:
        return importlib.metadata.version("sp-lightning")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def _module(command: str) -> Any:
    return importlib.import_module(f".commands.{command}", __package__)


def _run_lightning(arguments: Sequence[str] | None) -> None:
    from .commands.fit_cli import FitCLI  # needs the extra

    if not sys.stdout.isatty():  # of a file a bar does not know the width, and would wrap its figures at 80
        os.environ.setdefault("COLUMNS", "200")
    FitCLI(args=None if arguments is None else list(arguments), parser_kwargs={"prog": "python -m sp_lightning"})
