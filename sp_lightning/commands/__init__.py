"""The commands of ``python -m sp_lightning`` beside LightningCLI's, one module each.

A module has ``add_arguments(parser)``, which imports nothing heavy, and ``main(args)``, which prints and returns an
exit status. Commands only translate: a library module, which can be called without them, makes what they print.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from ..errors import MissingExtraError
from ..options import CHOICES, Options

OPTIONS = tuple(field.name for field in fields(Options))


def add_options(parser: argparse.ArgumentParser, but: Collection[str] = ()) -> None:
    """Add the strategy's options to a parser, except those named in ``but``, which the command defines itself."""
    for field in fields(Options):
        if field.name not in but:
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(field.default, bool) else {}
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                metavar="|".join(CHOICES.get(field.name, [field.name.upper()])),
                help=f"as the strategy's option {field.name} (default: {field.default})",
                **alone,
            )


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the named arguments that the command line set, by name."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def need(package: str, extra: str, feature: str) -> None:
    """Raise MissingExtraError, which names the extra to install, if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(feature=feature, package=package, extra=extra)
