"""The user's options, validated and normalised once, where they come in; all other code trusts them.

Values come from Python, from YAML and from a command line: text that means a number or a truth value is accepted.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .errors import OptionError

if TYPE_CHECKING:
    from torch import nn

Count: TypeAlias = int | Literal["auto"]
HostMemory: TypeAlias = Literal["auto", "pinned", "pageable"]
UnitFinder: TypeAlias = "Callable[[nn.Module], Iterable[nn.Module]]"

CHOICES: dict[str, tuple[str, ...]] = {
    "activations": ("keep", "recompute", "offload", "recompute+offload"),
    "host_memory": ("auto", "pinned", "pageable"),
    "wire_dtype": ("auto", "as-is"),
    "optimizer_device": ("host", "device"),
}

WAITS = "timeout", "keepalive"  # of ranks, for each other

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {name.lower(): 1024**power for power, name in enumerate(_BINARY)} | {
    name.lower(): 1000**power for power, name in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


class Bytes(int):
    """A number of bytes, where a plain number would be one of units."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of streaming a model. Creating an instance checks every value; `parse` also checks the names."""

    window: Count = "auto"  # units on the device at once
    transfer: Count = "auto"  # units exchanged at a time
    resident: Count | Bytes = "auto"  # units that stay on the device, where they are stepped
    memory_budget: int | None = None  # device bytes
    units: Literal["auto"] | tuple[str, ...] | UnitFinder = "auto"
    activations: Literal["keep", "recompute", "offload", "recompute+offload"] = "keep"
    optimizer_overlap: bool = True
    optimizer_device: Literal["host", "device"] = "host"  # where optimizers compute; their state is on the host
    wire_dtype: Literal["auto", "as-is"] = "auto"  # type in which weights travel under autocast
    master_weights: bool = False
    host_memory: HostMemory = "auto"  # memory of weights and gradients; ignored where the CPU computes
    compile_units: bool = False
    host_budget: int | None = None  # host bytes, beyond which weights stay in their files, and state goes to the disk
    disk: str | None = None  # a folder for optimizer state, and then weights, that exceed the budget

    @property
    def uses_files(self) -> bool:
        """Whether weights or state may be in files."""
        return self.host_budget is not None or self.spills

    @property
    def spills(self) -> bool:
        """Whether ``disk`` takes state or weights that exceed the host budget."""
        return self.disk is not None

    @property
    def host_limit(self) -> float:
        """Host bytes that a run may take; infinite without ``host_budget``, and with "0B", which spills all it can."""
        return self.host_budget or math.inf

    @property
    def offloads(self) -> bool:
        """Whether activations are moved to the host until backward."""
        return "offload" in self.activations

    def check_devices(self, count: int, machines: int = 1) -> None:
        """Raise OptionError if an option is not built for ``count`` devices on each of ``machines`` machines."""
        if count * machines > 1:
            refused = ["optimizer_device='device'"] * (self.optimizer_device == "device")
            refused += ["disk="] * self.spills
            for what in refused:
                several = ("devices", count) if machines == 1 else ("num_nodes * devices", f"{machines} * {count}")
                raise OptionError(argument=several[0], found=several[1], allowed=f"1 with {what}")

    @classmethod
    def parse(cls, *others: str, **given: Any) -> Options:
        """Make options from values by name; raise OptionError for an unknown name or a wrong value.

        ``others`` are the names of options that the caller takes out of these.
        """
        names = [*(field.name for field in fields(cls)), *others]
        for name in given:
            if name not in names:
                raise OptionError(argument="an option", found=name, allowed="one of " + ", ".join(names))
        return cls(**given)

    def __post_init__(self) -> None:
        self._normalise("window", count("window", self.window))
        self._normalise("transfer", count("transfer", self.transfer))
        if self.window != "auto" and self.transfer != "auto" and self.transfer > self.window:
            raise OptionError(argument="transfer", found=self.transfer, allowed=f"at most window ({self.window})")
        self._normalise("resident", _resident(self.resident))
        self._normalise("memory_budget", nbytes_or_none("memory_budget", self.memory_budget, "> 0"))
        self._normalise("host_budget", nbytes_or_none("host_budget", self.host_budget, ">= 0"))
        self._normalise("disk", _folder("disk", self.disk))
        self._normalise("units", _units(self.units))
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        self._normalise("optimizer_overlap", truth("optimizer_overlap", self.optimizer_overlap))
        self._normalise("master_weights", truth("master_weights", self.master_weights))
        self._normalise("compile_units", truth("compile_units", self.compile_units))

    def _normalise(self, name: str, value: object) -> None:
        """Set a field of this frozen instance while it is made."""
        object.__setattr__(self, name, value)


def parse_with_waits(*others: str, **given: Any) -> tuple[Options, dict[str, timedelta]]:
    """Make options from values by name, beside how long ranks wait for each other; raise as `Options.parse` does."""
    waits = {name: given.pop(name) for name in WAITS if name in given}
    check_waits(**waits)
    return Options.parse(*WAITS, *others, **given), waits


def check_waits(**waits: Any) -> None:
    """Raise if how long ranks wait for each other is no timedelta of more than nothing."""
    for name, value in waits.items():
        if not isinstance(value, timedelta) or value <= timedelta():
            raise OptionError(argument=name, found=value, allowed="a datetime.timedelta, such as timedelta(minutes=10)")


def parse_bytes(text: str, argument: str = "a size", others: str = "") -> int:
    """Parse text such as "10GiB" (powers of 1024) or "10 GB" (powers of 1000) into bytes; only "0" needs no unit.

    An error says that ``others`` are allowed, too.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower() or ("" if Decimal(match[1]) else "b")) if match else None
    if match is None or factor is None:
        allowed = f'{others}a size with its unit, such as "10GiB", "10 GB" or "1024B"'
        raise OptionError(argument=argument, found=text, allowed=allowed)
    return int(Decimal(match[1]) * factor)


def format_bytes(nbytes: int, up: bool = False) -> str:
    """Format bytes for a reader, as "1.31 GiB"; rounded ``up`` where a user would copy the text into an option."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, power = _rounded(nbytes / 1024, up), 1
    while abs(value) >= 1024 and power < len(_BINARY) - 1:
        power += 1
        value = _rounded(nbytes / 1024**power, up)
    return f"{value:.2f} {_BINARY[power]}"


def _rounded(value: float, up: bool) -> float:
    """Round to two decimals, upwards with ``up``."""
    return math.ceil(value * 100) / 100 if up else round(value, 2)


def format_both(needed: int, there: int) -> tuple[str, str]:
    """Format bytes needed, rounded up, and bytes available; as plain numbers if both would read the same."""
    texts = format_bytes(needed, up=True), format_bytes(there)
    return texts if needed == there or texts[0] != texts[1] else (f"{needed} B", f"{there} B")


def format_seconds(seconds: float) -> str:
    """Format seconds for a reader, with two digits: "1.4 s", "85 ms", "0.21 ms"."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.2g} {unit}" if value < 99.5 else f"{value:.0f} {unit}"


def is_int(value: object) -> bool:
    """Whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def count(argument: str, value: object) -> Count:
    """Return an option's value as an int >= 1 or "auto"; raise OptionError for any other."""
    if value == "auto":
        return "auto"
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if isinstance(number, int) and is_int(number) and number >= 1:
        return number
    raise OptionError(argument=argument, found=value, allowed="an int >= 1 or 'auto'")


def _resident(value: object) -> Count | Bytes:
    """Return the value of ``resident`` as a number of units, as Bytes or as "auto"; raise OptionError for any other."""
    if isinstance(value, str) and value != "auto" and not (value.isascii() and value.isdigit()):
        return Bytes(parse_bytes(value, "resident", "an int >= 0, 'auto', or "))
    if value == "auto":
        return "auto"
    number = int(value) if isinstance(value, str) else value
    if isinstance(number, int) and is_int(number) and number >= 0:
        return number
    raise OptionError(argument="resident", found=value, allowed="an int >= 0, bytes such as '8GiB', or 'auto'")


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise OptionError unless a value is one of the choices."""
    if value not in choices:
        raise OptionError(argument=argument, found=value, allowed="one of " + ", ".join(map(repr, choices)))


def nbytes_or_none(argument: str, value: object, bound: Literal["> 0", ">= 0"]) -> int | None:
    """Return an option's bytes, given as an int or as text with a unit, as an int; None stays None."""
    if value is None:
        return None
    nbytes = parse_bytes(value, argument) if isinstance(value, str) else value
    if isinstance(nbytes, int) and is_int(nbytes) and nbytes >= (bound == "> 0"):
        return nbytes
    allowed = f'None or bytes {bound}, an int or text with a unit such as "10GiB" or "10 GB"'
    raise OptionError(argument=argument, found=value, allowed=allowed)


def _folder(argument: str, value: Any) -> str | None:
    """Return an option's folder as an absolute path, or None; raise OptionError for any other value."""
    if value is None:
        return None
    folder = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(folder, str) and folder:
        return os.path.abspath(os.path.expanduser(folder))
    raise OptionError(argument=argument, found=value, allowed="None, or the path of a folder on a local disk")


def _units(value: Any) -> Literal["auto"] | tuple[str, ...] | UnitFinder:
    """Return the value of ``units`` as "auto", class names or a callable; raise OptionError for any other."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    # A class is callable too, but a call would build a module instead of finding some.
    if callable(value) and not isinstance(value, type):
        finder: UnitFinder = value
        return finder
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, Sequence) and names and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(name.strip() for name in names)
    allowed = "'auto', a sequence of class names or a callable(module) -> list of modules"
    raise OptionError(argument="units", found=value, allowed=allowed)


def truth(argument: str, value: object) -> bool:
    """Return an option's value as a bool; raise OptionError unless it is one, or its name as text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise OptionError(argument=argument, found=value, allowed="True or False")


def check_writable(folder: str | Path, argument: str, found: str | Path | None = None) -> None:
    """Raise OptionError, naming the argument, if a folder cannot be made or no file can be written to it."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        allowed = f"in a folder that can be written ({there}: {error.strerror})"
        raise OptionError(argument=argument, found=str(found or folder), allowed=allowed) from error
