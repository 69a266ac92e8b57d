"""Find the library of the optimizer's step that is right for this processor, or compile it, and load it.

A wheel has a library for each variant. Elsewhere one is compiled into the user's cache at first use: one process of a
machine compiles, and the others use what it made. ``SP_LIGHTNING_KERNELS`` names a variant, or "none" for none. The
structures by which it gets weights, gradients, state and options are those of optimizer.cpp.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import threading
from typing import Any

from ..compat.torch import openmp_parallel
from . import build
from .build import SOURCE, Unavailable

FOLDER = pathlib.Path(__file__).parent
SWITCH = "SP_LIGHTNING_KERNELS"
# Held where a fork would do harm: in the dynamic loader, whose locks nobody would release in the child, and where a
# program is started, whose pipes the child would keep open.
unforked = threading.Lock()
os.register_at_fork(before=unforked.acquire, after_in_parent=unforked.release, after_in_child=unforked.release)


def variant() -> str:
    """Return the name of the fastest variant that this processor runs, or of the one that the environment asks for."""
    here = _instructions()
    runs = [name for name, needed in build.variants().items() if here.issuperset(needed)]
    asked = os.environ.get(SWITCH) or runs[0]
    if asked == "none":
        raise Unavailable(f"{SWITCH} is 'none'")
    if asked not in runs:
        raise Unavailable(f"{SWITCH} is {asked!r}: this processor runs {', '.join(map(repr, runs))}, or set 'none'")
    return asked


@functools.cache
def _instructions() -> frozenset[str]:
    """Return the names of this processor's instructions that the system allows."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(line[1].split() if line else ())


def compiled() -> pathlib.Path:
    """Return the path of the library for this processor; compile it into the user's cache if it is not there."""
    name = variant()
    shipped = FOLDER / build.file_name(name)
    return shipped if shipped.exists() else _in_the_cache(name)


def _in_the_cache(name: str) -> pathlib.Path:
    """Return a variant's library in the user's cache; compile it if missing, in one process at a time."""
    words = build.compiler()
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sp_lightning"
    wanted = build.command(words, name, pathlib.Path(), pathlib.Path())
    decisive = SOURCE.read_bytes(), wanted, build.output([*words, "--version"], _start), platform.machine()
    path = folder / f"optimizer-{hashlib.sha256(repr(decisive).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # until the process that compiles ends; its children do not hold it
        if not path.exists():
            made = path.with_suffix(f".{os.getpid()}")  # a compiler outlives a process that is killed
            build.output(build.command(words, name, SOURCE, made), _start)
            made.replace(path)
    return path


def _start(words: list[str], **pipes: Any) -> subprocess.Popen[str]:
    """Start a program while holding `unforked`."""
    with unforked:
        return subprocess.Popen(words, **pipes)


def load(path: pathlib.Path) -> ctypes.CDLL:
    """Load a library, and give it torch's OpenMP threads. The caller holds `unforked`."""
    parallel = openmp_parallel()
    if parallel is None:
        raise Unavailable("torch was built without OpenMP")
    code = ctypes.CDLL(str(path))
    code.sp_lightning_use(ctypes.c_void_p(parallel))
    return code


# ---- what it is called with

SCALARS = 8  # numbers that a parameter's step takes besides its tensors


class Tensors(ctypes.Structure):
    """One parameter with its gradient, state and scalars, as optimizer.cpp reads them."""

    _fields_ = [
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("state", ctypes.c_void_p * 3),
        ("count", ctypes.c_int64),
        ("scalar", ctypes.c_float * SCALARS),
        ("wire", ctypes.c_void_p),
        ("wire_type", ctypes.c_int32),
        ("wire_has_nan", ctypes.c_int32),
        ("grad_type", ctypes.c_int32),
        ("factor", ctypes.c_float),
    ]


class Request(ctypes.Structure):
    """One step of several parameters, as optimizer.cpp reads it."""

    _fields_ = [
        ("tensors", ctypes.POINTER(Tensors)),
        ("count", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("done", ctypes.c_int32),
    ]
