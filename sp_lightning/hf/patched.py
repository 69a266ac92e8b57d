"""Patches to torch and accelerate that are in force for the time of a context."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ..errors import MissingExtraError


def names_of_accelerate(feature: str) -> ModuleType:
    """Return the module of accelerate's names; raise MissingExtraError for this feature if it is not installed."""
    try:
        from ..compat import accelerate as names
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "accelerate":
            raise
        raise MissingExtraError(feature=feature, package="accelerate", extra="hf") from error
    names.check_names()
    return names


def replace(undo: ExitStack, patch: Any, replacement: Any) -> None:
    """Install a patch until the stack ends."""
    patch.install(replacement)
    undo.callback(patch.remove)


def function(original: Any, replacement: Any) -> Any:
    """Make a function, as methods are of functions only, that other code can inspect as the original."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return method
