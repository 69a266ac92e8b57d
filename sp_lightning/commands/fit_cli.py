"""LightningCLI with this package's strategy, in which an error of the command line is one line.

1. Arguments that jsonargparse refuses are a CommandLineError: which argument, what is wrong with it, and the known name
   that looks most like it. Left out are the types that jsonargparse tried.
2. The strategy's options, the checkpoint and the folder of the run are checked before anything is made.
3. What Lightning tells of seed, devices and tips waits until data and model are there: an error that is found before,
   as most are, stands alone. Warnings do not wait.
4. An error of Lightning's Trainer about its own arguments, or about what a module or its data lack, is one of the
   command line. An error of the user's module or data keeps its traceback.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar

import jsonargparse.typing
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI  # needs the extra
from lightning.pytorch.strategies import StrategyRegistry

from ..errors import OptionError, SuperpipelineError, did_you_mean
from ..options import Options, check_writable

OURS = "sp_lightning.SuperpipelineStrategy"
RESUMED = ("last", "best", "hpc", "registry")  # names with which Lightning finds a checkpoint itself
_KEY = re.compile(r'Parser key "([^"]+)"')
_REFUSED = re.compile(r"Option '([^']+)' is not accepted")
_UNKNOWN = re.compile(r"(?:unrecognized arguments|Key|Unrecognized arguments)[^-\w]*(--?[\w.-]+)")
_OF_COMMAND = re.compile(r"Subcommand '(\w+)' does not accept option '([^']+)'")
_EXPECTED = re.compile(r"Expected an? (?!path but|<class 'NoneType'>)(.+?)(?:\. Got value.*|: .*)?$", re.MULTILINE)
_RESTRICTED = re.compile(r"Not of type (\w+): (.*)")
_VALUE = re.compile(r"Given value: NestedArg\(.*val='(.*)'\)|Given value: (.*)|Got value: (.*)")
_CLASS = re.compile(r"Problem with given class_path '([^']+)':\s*(.*)")


class CommandLineError(SuperpipelineError, ValueError):
    """The arguments of a command are not ones that it takes."""


class FitCLI(LightningCLI):
    """LightningCLI whose errors about arguments are typed and one line long (Rules 1 to 4)."""

    def __init__(self, **options: Any) -> None:
        self.made: list[Any] = []  # the parsers of all commands
        held = _Held()
        try:
            super().__init__(trainer_defaults={"strategy": {"class_path": OURS}}, **options)
        except MisconfigurationException as error:
            raise CommandLineError(" ".join(str(error).split())) from error
        finally:
            held.close()

    def init_parser(self, **options: Any) -> Any:
        """Make a parser that raises its errors."""
        parser = super().init_parser(**{**options, "exit_on_error": False})
        self.made.append(parser)
        return parser

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the arguments (Rule 1)."""
        try:
            super().parse_arguments(parser, args)
        except argparse.ArgumentError as error:
            known = {name for one in self.made for name in re.findall(r"--[\w.]+", one.format_help())}
            raise CommandLineError(_said(str(error), known)) from None

    def before_instantiate_classes(self) -> None:
        """Check what can be checked before modules, data and the Trainer are made (Rule 2)."""
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
        if (config.trainer.get("gradient_clip_val") or 0) < 0:
            found = config.trainer.gradient_clip_val
            raise OptionError(argument="trainer.gradient_clip_val", found=found, allowed="a number >= 0")
        if config.trainer.get("accumulate_grad_batches", 1) < 1:
            found = config.trainer.accumulate_grad_batches
            raise OptionError(argument="trainer.accumulate_grad_batches", found=found, allowed="an int >= 1")

    def instantiate_trainer(self, **options: Any) -> Any:
        """Make the Trainer (Rules 3 and 4)."""
        try:
            trainer: Any = super().instantiate_trainer(**options)
            trainer.callbacks.insert(0, _Release())
            return trainer
        except SuperpipelineError:
            raise
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise CommandLineError(f"trainer: {' '.join(str(error).split())}") from error


class _Held:
    """Lightning's information that its handlers have not shown yet (Rule 3)."""

    open: ClassVar[list[_Held]] = []  # not of the callback, which may be sent to other processes

    def __init__(self) -> None:
        self.open.append(self)
        self.records: list[tuple[logging.Handler, logging.LogRecord]] = []
        loggers = [logging.getLogger(name) for name in ("lightning", "lightning.fabric", "lightning.pytorch")]
        self.filters = {one: functools.partial(self._keep, one) for logger in loggers for one in logger.handlers}
        for handler, keep in self.filters.items():
            handler.addFilter(keep)

    def _keep(self, handler: logging.Handler, record: logging.LogRecord) -> bool:
        """Keep a record that is information, and let others pass."""
        if record.levelno <= logging.INFO:
            self.records.append((handler, record))
        return record.levelno > logging.INFO

    def close(self) -> None:
        """Keep nothing from now on."""
        if self in self.open:
            self.open.remove(self)
        for handler, keep in self.filters.items():
            handler.removeFilter(keep)

    def release(self) -> None:
        """Show what was kept, and keep nothing from now on."""
        self.close()
        records, self.records = self.records, []
        for handler, record in records:
            handler.handle(record)


class _Release(Callback):
    """Releases what was held when a run begins."""

    def release(self, trainer: Any, pl_module: Any) -> None:
        """Show what was held."""
        for held in list(_Held.open):
            held.release()

    on_fit_start = on_validation_start = on_test_start = on_predict_start = release


def _said(message: str, known: Iterable[str]) -> str:
    """Say in a line what jsonargparse found wrong."""
    if unknown := _UNKNOWN.search(message):
        return f"{unknown[1]} is no argument{_meant(unknown[1], known)}"
    if refused := _OF_COMMAND.search(message):
        return f"{refused[2]} is no argument of {refused[1]}{_meant(refused[2], known)}"
    if "arguments are required" in message:
        return "--model must be given: package.module.Class, or a --config that names it"
    keys = list(dict.fromkeys(_KEY.findall(message)))
    name = ".".join(keys) or ("--config" if "config:" in message else "the arguments")
    if (refused := _REFUSED.search(message)) and not keys:
        return f"{refused[1]} is no argument{_meant(refused[1], known)}"
    if refused := _REFUSED.search(message):
        given = _CLASS.search(message)
        return f"{name}.{refused[1]} is no argument{did_you_mean(refused[1], _arguments_of(given[1] if given else ''))}"
    given_value = _VALUE.search(message)
    found = next(filter(None, given_value.groups()), "") if given_value else ""
    value = found and f", got {found}"
    if restricted := _RESTRICTED.search(message):
        return f"{name} must be {_in_words(*restricted.groups())}{value}"
    if (given := _CLASS.search(message)) and not keys[1:]:
        return f"{name} must be the path of a class: {given[2].strip() or given[1]}{_near(given[1])}"
    if "Expected a dot import path" in message:
        return f"{name} must be the path of a class, package.module.Class{value}"
    if expected := [_plain(text) for text in _EXPECTED.findall(message)]:
        names = re.findall(r"[\w-]+", " ".join(expected))
        meant = did_you_mean(found, names)
        return f"{name} must be {' or '.join(dict.fromkeys(expected))}{value}{meant}"
    return f"{name}: {'; '.join(line.strip() for line in _KEY.sub('', message).strip(': ').splitlines()[:3])}"


def _meant(unknown: str, known: Iterable[str]) -> str:
    """Name the argument that was meant: as --max_epochs and --nodes do, by how it ends, or else by how it looks."""
    typed = unknown.lstrip("-").replace("-", "_")
    ends = {f"trainer.strategy.{field.name}" for field in fields(Options)} | {name.lstrip("-") for name in known}
    for name in sorted(ends, key=lambda name: (name.count("."), name)):
        if re.search(rf"[._]{re.escape(typed)}$", name):
            return f"; did you mean --{name}?"
    return did_you_mean(unknown, known)


def _plain(expected: str) -> str:
    """Say a type as a user would: "int", "16-mixed, bf16-mixed"."""
    if expected.startswith("typing.Literal"):
        return "one of " + ", ".join(map(str, ast.literal_eval(expected.removeprefix("typing.Literal"))))
    return re.sub(r"<class '([^']+)'>", r"\1", expected)


def _in_words(restricted: str, error: str) -> str:
    """Say one of jsonargparse's restricted types, "int > 0", or what another one says of itself."""
    words = getattr(getattr(jsonargparse.typing, restricted, None), "__doc__", error)
    return re.sub(r"restricted to be (\W+)", r"\1 ", words).replace("≥", ">=")


def _arguments_of(path: str) -> list[str]:
    """List the arguments of a class, by its path."""
    module, _, name = path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters) if module else []


def _near(path: str) -> str:
    """Name the class of the same module that looks most like the one of this path."""
    module, _, name = path.rpartition(".")
    try:
        return did_you_mean(name, vars(importlib.import_module(module)))
    except (ImportError, ValueError):
        return ""
