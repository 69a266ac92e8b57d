"""LightningCLI with this package's strategy, in which an error about arguments is typed and one line long.

An error of the user's module or data keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI  # needs the extra "cli"
from lightning.pytorch.strategies import StrategyRegistry

from ..errors import OptionError, SuperpipelineError, did_you_mean
from ..options import Options, check_writable

OURS = "sp_lightning.SuperpipelineStrategy"
RESUMED = ("last", "best", "hpc", "registry")  # names with which Lightning finds a checkpoint itself
_KEY = re.compile(r'Parser key "([^"]+)"')
_UNKNOWN = re.compile(r"unrecognized arguments: -*(\S+)|[Oo]ption '([^']+)'(?: is not accepted)?")
_NESTED = re.compile(r"NestedArg\(.*val='([^']*)'\)")
_VALUE = re.compile(r"value: ([^\s;]+)$")
_CHOICE = re.compile(r"'([\w+-]+)'")
_SKIPPED = re.compile(  # lines in which jsonargparse says which types it tried
    r"(?:- )?(?:$|Does not validate|Subtypes|Errors|Problem with given|Given value type|Expected a path"
    r"|Expected an? <class 'NoneType'>)"
)


class CommandLineError(SuperpipelineError, ValueError):
    """The arguments of a command are not ones that it takes."""


class FitCLI(LightningCLI):
    """LightningCLI whose errors about arguments are typed and one line long."""

    def __init__(self, **options: Any) -> None:
        self.made: list[Any] = []  # the parsers of all commands
        try:
            super().__init__(trainer_defaults={"strategy": {"class_path": OURS}}, **options)
        except MisconfigurationException as error:
            raise CommandLineError(" ".join(str(error).split())) from error

    def init_parser(self, **options: Any) -> Any:
        """Make a parser that raises errors instead of exiting, and append it to ``made``."""
        parser = super().init_parser(**{**options, "exit_on_error": False})
        self.made.append(parser)
        return parser

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the arguments; raise CommandLineError, one line long, for wrong ones."""
        try:
            self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            known = [name for one in self.made for name in re.findall(r"--([\w.]+)", one.format_help())]
            known += [f"trainer.strategy.{field.name}" for field in fields(Options)]
            raise CommandLineError(in_one_line(str(error), known)) from None

    def before_instantiate_classes(self) -> None:
        """Check options, checkpoint and folder before modules, data and the Trainer are made."""
        config = self.config.get(self.config.get("subcommand") or "", self.config)
        strategy, checkpoint = config.trainer.strategy, config.get("ckpt_path")
        if isinstance(strategy, str) and strategy not in (names := [*StrategyRegistry.available_strategies(), "auto"]):
            raise OptionError(argument="trainer.strategy", found=strategy, allowed=f"one of {', '.join(names)}")
        self.given: dict[str, Any] | None = {} if strategy == "superpipeline" else None  # our strategy's options
        if getattr(strategy, "class_path", "").endswith(".SuperpipelineStrategy"):
            given = vars(strategy.get("init_args") or argparse.Namespace())
            self.given = {field.name: given[field.name] for field in fields(Options) if field.name in given}
            Options.parse(**self.given)
        if checkpoint and checkpoint not in RESUMED and "://" not in checkpoint and not os.path.exists(checkpoint):
            allowed = f"a checkpoint that a run wrote, or one of {', '.join(RESUMED)} (looked from {os.getcwd()})"
            raise OptionError(argument="ckpt_path", found=checkpoint, allowed=allowed)
        if (folder := config.trainer.get("default_root_dir")) and "://" not in str(folder):
            check_writable(folder, "trainer.default_root_dir")

    def instantiate_trainer(self, **options: Any) -> Any:
        """Make the Trainer; raise CommandLineError for an argument that it refuses."""
        try:
            return super().instantiate_trainer(**options)
        except SuperpipelineError:
            raise
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise CommandLineError(f"trainer: {' '.join(str(error).split())}") from error


def in_one_line(message: str, known: Iterable[str]) -> str:
    """Shorten jsonargparse's error message to one line, and name the known argument or value that was likely meant."""
    key = ".".join(dict.fromkeys(_KEY.findall(message)))
    if unknown := _UNKNOWN.search(message):
        name = f"{key}.{unknown[1] or unknown[2]}".lstrip(".")
        ends = {name.rpartition(".")[2]: name for name in sorted(known, key=lambda name: -name.count("."))}
        close = difflib.get_close_matches(name.rpartition(".")[2].replace("-", "_"), ends, 1, 0.7)
        return f"--{name} is no argument{f'; did you mean --{ends[close[0]]}?' if close else ''}"
    lines = [
        _KEY.sub("", line).strip(":- ")
        for line in _NESTED.sub(r"\1", message).splitlines()
        if not _SKIPPED.match(line.strip())
    ]
    said = re.sub(r"<class '([^']+)'>|typing\.Literal", r"\1", "; ".join(filter(None, lines)))
    value = _VALUE.search(said)
    return f"{key or 'arguments'}: {said}{did_you_mean(value[1], _CHOICE.findall(said)) if value else ''}"
