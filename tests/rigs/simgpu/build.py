"""Compiles csrc/ into one shared library, once per torch, Python and source text.

Plain calls of the C++ compiler (``$CXX``, else ``c++``): neither ninja nor setuptools is needed. The library lies under
``$SIMGPU_BUILD_DIR``, else ``$XDG_CACHE_HOME/simgpu`` or ``~/.cache/simgpu``, in a folder keyed by all that decides it;
never in the repository, so that it outlives a clone and serves every environment with the same torch.
"""

import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable

import torch

SOURCES = pathlib.Path(__file__).parent / "csrc"
FLAGS = [
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-DNDEBUG",
    "-g0",
    "-fPIC",
    "-shared",
    "-w",
    "-DTORCH_EXTENSION_NAME=simgpu_C",
]


class MissingError(ImportError):
    """This machine lacks what the build needs; nothing is wrong with the sources."""


def folder(kind: str, decided_by: object, sources: Iterable[pathlib.Path], last: str, make: Callable) -> pathlib.Path:
    """The one of the cache that ``make`` has filled for this torch, these sources and whatever else decides what it
    makes; ``last`` is the file that it makes last."""
    root = os.environ.get("SIMGPU_BUILD_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "simgpu")
    key = hashlib.sha256(repr((torch.version.git_version, torch.__version__, decided_by)).encode())
    for file in sorted(sources):
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    path = pathlib.Path(root).expanduser() / f"{kind}-{torch.__version__}-{key.hexdigest()[:12]}"
    if not (path / last).exists():
        path.mkdir(parents=True, exist_ok=True)
        with open(path / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies: it never goes stale
            if not (path / last).exists():
                for left in path.glob("*.tmp"):  # of a build that was killed
                    left.unlink()
                make(path)
    return path


def library() -> pathlib.Path:
    """The library's path, once it is there."""
    name = f"simgpu_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    # Not torch's own path: the library holds no reference to it, since torch has loaded its libraries by then.
    return folder("torch", (sys.version, FLAGS), SOURCES.iterdir(), name, lambda path: _make(path / name)) / name


def compiler() -> list[str]:
    """The command."""
    return shlex.split(os.environ.get("CXX") or "c++")


def compile(target: pathlib.Path, *arguments: str) -> None:
    """Runs the compiler; the target is there at once, so that whoever sees it sees all of it."""
    temporary = target.with_suffix(".tmp")
    command = [*compiler(), *arguments, "-o", str(temporary)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{target.name}: {shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    os.replace(temporary, target)


def with_torch() -> list[str]:
    """What compiles and links against torch's C++."""
    root = pathlib.Path(torch.__file__).parent
    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{path}" for path in (root / "include", root / "include/torch/csrc/api/include")),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"),
    ]


def _make(path: pathlib.Path) -> None:
    command, header = compiler()[0], pathlib.Path(sysconfig.get_path("include")) / "Python.h"
    if not shutil.which(command):
        raise MissingError(f"simgpu needs a C++20 compiler: {command!r} ($CXX, else c++) is not on this machine")
    if not header.exists():
        raise MissingError(f"simgpu needs Python's headers (python3-dev): {header} is not on this machine")
    compile(path, *FLAGS, f"-isystem{header.parent}", str(SOURCES / "module.cpp"), *with_torch(), "-ltorch_python")


def load():
    spec = importlib.util.spec_from_file_location("simgpu_C", library())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
