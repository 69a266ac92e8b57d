"""Errors by kind: each message says what was found, what is allowed and what to try next."""

from __future__ import annotations

import copyreg
import os
import re
import traceback
from collections.abc import Iterable
from typing import Any

PACKAGE, LIBRARY = os.path.dirname(__file__), os.path.dirname(os.__file__)
NOT_THE_USERS = os.path.join(PACKAGE, ""), os.path.join(LIBRARY, ""), "<"  # beginnings of paths of other code


def users_line(error: BaseException) -> str:
    """Return the last line of the user's own code that led to an error, as "script.py:12: "; "" if none did."""
    places = [f"{frame.filename}:{frame.lineno}: " for frame in traceback.extract_tb(error.__traceback__)]
    others = [place for place in places if not place.startswith(NOT_THE_USERS)]
    own = [place for place in others if "site-packages" not in place and "dist-packages" not in place]
    return own[-1] if own else ""


class SuperpipelineError(Exception):
    """Base class of all errors that this package raises on purpose."""


def did_you_mean(found: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for the name most like the one found, or "" if none is similar."""
    import difflib

    lowered = {name.lower(): name for name in names if name != found}
    close = difflib.get_close_matches(found.lower(), lowered, 1, 0.7)
    return f"; did you mean {lowered[close[0]]}?" if close else ""


class OptionError(SuperpipelineError, ValueError):
    """An option has a value that is not allowed."""

    def __init__(self, *, argument: str, found: object, allowed: str) -> None:
        self.argument = argument
        # The text instead of the value: a value may be any object, but an error must travel between processes.
        self.found = repr(found)
        self.allowed = allowed
        named = re.search(r"(?:one of|among) ([^;(]+)", allowed)
        names = re.findall(r"[\w.+-]+", named[1]) if named else []
        meant = did_you_mean(found, names) if isinstance(found, str) else ""
        super().__init__(f"{argument} must be {allowed}, got {self.found}{meant}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling would pass positional arguments, and __init__ takes only keywords.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class PartitionError(SuperpipelineError, ValueError):
    """The model cannot be cut into units as the options require."""


class MemoryBudgetError(SuperpipelineError, RuntimeError):
    """The bytes that must be on the device at once do not fit into the memory budget."""


class HostMemoryError(SuperpipelineError, RuntimeError):
    """Host memory cannot be allocated, or cannot be page-locked as the options require."""


class DiskError(SuperpipelineError, RuntimeError):
    """A file could not be read or written; the message has its path, the byte in it, and the system's errno."""

    GO_ON = "go on from the last checkpoint"

    def __init__(self, *, path: str, offset: int, errno: int, writes: bool = False, outcome: str = "") -> None:
        self.path, self.offset, self.errno, self.writes = path, offset, errno, writes
        self.outcome = outcome = outcome or (
            "Weights on the host are as they were; check the disk, or load the model from another copy of the file"
        )
        done = "written" if writes else "read"
        super().__init__(
            f"{path} could not be {done} at byte {offset}: {os.strerror(errno)} (errno {errno}). {outcome}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SourceFileError(SuperpipelineError, RuntimeError):
    """A file that weights are read from has changed, or is gone, since they were loaded."""


class HalfAppliedStepError(SuperpipelineError, RuntimeError):
    """An optimizer step changed some weights and not others, as after an exception: load a checkpoint."""


class UnsupportedError(SuperpipelineError, RuntimeError):
    """A device or a feature is not supported; the message says what to do instead."""


class ExactnessError(SuperpipelineError, RuntimeError):
    """The run stops because its result could differ from plain training; the message names the module."""


class PeerError(SuperpipelineError, RuntimeError):
    """Another rank ended, failed, or did not come in time; the message names it."""


class MeasurementError(SuperpipelineError, RuntimeError):
    """Two measurements of one rate differ: the machine is busy, and a plan from them would be wrong."""


class MissingExtraError(SuperpipelineError, ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, *, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs {package}, which is not installed: pip install 'sp-lightning[{extra}]'")

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]
