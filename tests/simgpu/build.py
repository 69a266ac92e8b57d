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

import torch

SOURCES = pathlib.Path(__file__).parent / "csrc"
FLAGS = ["-std=c++20", "-O1", "-DNDEBUG", "-g0", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=simgpu_C"]


class MissingError(ImportError):
    """This machine lacks what the build needs; nothing is wrong with the sources."""


def build_dir() -> pathlib.Path:
    root = os.environ.get("SIMGPU_BUILD_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "simgpu")
    # Not torch's own path: the library holds no reference to it, since torch has loaded its libraries by then.
    key = hashlib.sha256(repr((torch.version.git_version, torch.__version__, sys.version, FLAGS)).encode())
    for file in sorted(SOURCES.iterdir()):
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    return pathlib.Path(root).expanduser() / f"torch-{torch.__version__}-{key.hexdigest()[:12]}"


def library() -> pathlib.Path:
    """The library's path, once it is there."""
    path = build_dir() / f"simgpu_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        _require_toolchain()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies: it never goes stale
            if not path.exists():
                _compile(path)
    return path


def compiler() -> list[str]:
    """The command."""
    return shlex.split(os.environ.get("CXX") or "c++")


def _require_toolchain() -> None:
    command, header = compiler()[0], pathlib.Path(sysconfig.get_path("include")) / "Python.h"
    if not shutil.which(command):
        raise MissingError(f"simgpu needs a C++20 compiler: {command!r} ($CXX, else c++) is not on this machine")
    if not header.exists():
        raise MissingError(f"simgpu needs Python's headers (python3-dev): {header} is not on this machine")


def _compile(path: pathlib.Path) -> None:
    for left in path.parent.glob("*.tmp"):  # of a build that was killed
        left.unlink()
    temporary = path.parent / f"{os.getpid()}.tmp"
    root = pathlib.Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    command = [
        *compiler(),
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{i}" for i in includes),
        str(SOURCES / "module.cpp"),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        *("-o", str(temporary)),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"simgpu: {shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    os.replace(temporary, path)  # at once: whoever sees it sees all of it


def load():
    spec = importlib.util.spec_from_file_location("simgpu_C", library())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
