"""LightningCLI with this package's strategy, in which an error about arguments is typed and one line long.

An error of the user's module or data keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI  # needs the extra
from lightning.pytorch.strategies import StrategyRegistry

from ..errors import OptionError, SuperpipelineError, did_you_mean
from ..options import Options, check_writable

OURS = "sp_lightning.SuperpipelineStrategy"
RESUMED = ("last", "best", "hpc", "registry")  # names with which Lightning finds a checkpoint itself
_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS = re.compile(r"given class_path '([^']+)'")
_UNKNOWN = re.compile(r"unrecognized arguments: -*(\S+)|[Oo]ption '([^']+)'(?: is not accepted)?")
_VALUE = re.compile(r"(?:Given value: (?!NestedArg)|Got value: |val=')([^'\n]+)")
_SKIPPED = re.compile(  # lines in which jsonargparse says which types it tried
    r"(?:- )?(?:$|Does not validate|Subtypes|Errors|Problem with given|Given value|Expected a path"
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
        """Make a parser that raises its errors."""
        parser = super().init_parser(**{**options, "exit_on_error": False})
        self.made.append(parser)
        return parser

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the arguments."""
        try:
            super().parse_arguments(parser, args)
        except argparse.ArgumentError as error:
            known = {name for one in self.made for name in re.findall(r"--([\w.]+)", one.format_help())}
            raise CommandLineError(in_one_line(str(error), known)) from None

    def before_instantiate_classes(self) -> None:
        """Check options, checkpoint and folder before modules, data and the Trainer are made."""
        config = self.config.get(self.config.get("subcommand") or "", self.config)
        strategy, checkpoint = config.trainer.strategy, config.get("ckpt_path")
        if isinstance(strategy, str) and strategy not in (names := [*StrategyRegistry.available_strategies(), "auto"]):
            raise OptionError(argument="trainer.strategy", found=strategy, allowed=f"one of {', '.join(names)}")
        if getattr(strategy, "class_path", "").endswith(".SuperpipelineStrategy"):
            given = vars(strategy.get("init_args") or argparse.Namespace())
            Options.parse(**{field.name: given[field.name] for field in fields(Options) if field.name in given})
        if checkpoint and checkpoint not in RESUMED and "://" not in checkpoint and not os.path.exists(checkpoint):
            allowed = f"a checkpoint that a run wrote, or one of {', '.join(RESUMED)} (looked from {os.getcwd()})"
            raise OptionError(argument="ckpt_path", found=checkpoint, allowed=allowed)
        if (folder := config.trainer.get("default_root_dir")) and "://" not in str(folder):
            check_writable(folder, "trainer.default_root_dir")

    def instantiate_trainer(self, **options: Any) -> Any:
        """Make the Trainer; an error about its arguments is one of the command line."""
        try:
            return super().instantiate_trainer(**options)
        except SuperpipelineError:
            raise
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise CommandLineError(f"trainer: {' '.join(str(error).split())}") from error


def in_one_line(message: str, known: Iterable[str]) -> str:
    """Say in a line what jsonargparse found wrong, and which of the known arguments was meant."""
    key = ".".join(dict.fromkeys(_KEY.findall(message)))
    if unknown := _UNKNOWN.search(message):
        name = f"{key}.{unknown[1] or unknown[2]}".lstrip(".")
        taken = {f"{key}.{name}" for path in _CLASS.findall(message) for name in _arguments_of(path)}
        return f"--{name} is no argument{_meant(name, {*known, *taken})}"
    lines = [_KEY.sub("", line).strip(": ") for line in message.splitlines()]
    lines = [line.removeprefix("- ") for line in lines if not _SKIPPED.match(line)]
    said = re.sub(r"<class '([^']+)'>|typing\.Literal", r"\1", "; ".join(lines))
    value = _VALUE.search(message)
    meant = did_you_mean(value[1], re.findall(r"'([\w+-]+)'", said)) if value else ""
    return f"{key or 'arguments'}: {said}{f', got {value[1]}' if value and 'Got value' not in said else ''}{meant}"


def _meant(unknown: str, known: Iterable[str]) -> str:
    """Name the argument that was meant: by how it ends, as --max_epochs does, or else by how it looks."""
    ends = {f"trainer.strategy.{field.name}" for field in fields(Options)} | {*known}
    ending = f".{unknown.replace('-', '_')}"
    for name in sorted(ends, key=lambda name: (name.count("."), name)):
        if name.endswith(ending):
            return f"; did you mean --{name}?"
    return did_you_mean(f"--{unknown}", [f"--{name}" for name in ends])


def _arguments_of(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters) if module else []
