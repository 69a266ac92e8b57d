"""Compiles csrc/ into a CUDA runtime and a driver for the installed torch, once per torch and source text.

What torch's libraries ask of CUDA's and csrc/ does not say is a function that gives 0. The libraries lie where simgpu's
do (../simgpu/build.py).
"""

import fcntl
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import torch

from simgpu.build import MissingError, compiler

SOURCES = pathlib.Path(__file__).parent / "csrc"
TORCH = pathlib.Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w"]
RUNTIME, DRIVER = "libnullcuda.so", "libcuda.so.1"
ASKED = re.compile(r"(_*cuda|cublas|cusolver|cusparse|cufft|nccl)[A-Z]\w*")
REAL = re.compile(r"\w*(GetVersion|GetLastError)|nccl\w*String")  # the libraries answer these without a device


def directory() -> pathlib.Path:
    """Where both libraries lie, once they are there."""
    key = hashlib.sha256(repr((torch.version.git_version, torch.__version__, str(TORCH), FLAGS)).encode())
    for file in sorted([*SOURCES.rglob("*.*"), pathlib.Path(__file__)]):
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    root = os.environ.get("SIMGPU_BUILD_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "simgpu")
    path = pathlib.Path(root).expanduser() / f"nullcuda-{torch.__version__}-{key.hexdigest()[:12]}"
    if not (path / DRIVER).exists():
        headers = _require()
        path.mkdir(parents=True, exist_ok=True)
        with open(path / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (path / DRIVER).exists():
                version = "".join(part.zfill(2) for part in torch.version.cuda.split(".")) + "0"  # 13.0 is 13000
                asked = [name for library in sorted((TORCH / "lib").glob("lib*torch*.so*")) for name in _asked(library)]
                include = [f"-isystem{SOURCES}", f"-isystem{headers}", f"-DCUDA_VERSION_MADE_FOR={int(version)}"]
                _make(path / RUNTIME, SOURCES / "runtime.cpp", {*filter(ASKED.fullmatch, asked)}, include)
                asked = _asked(TORCH / "lib" / "libcaffe2_nvrtc.so")
                _make(path / DRIVER, SOURCES / "driver.cpp", {*filter(re.compile(r"cu[A-Z]\w*").fullmatch, asked)}, [])
    return path


def _require() -> pathlib.Path:
    """The folder of the headers that torch was made with."""
    if torch.version.cuda is None:
        raise MissingError("this torch was made without CUDA")
    if not (shutil.which(compiler()[0]) and shutil.which("nm")):
        raise MissingError(f"the null CUDA needs a C++20 compiler and nm: {compiler()[0]!r} ($CXX, else c++)")
    found = list(TORCH.parent.glob("nvidia/*/include/driver_types.h"))
    if not found:
        raise MissingError("the null CUDA needs driver_types.h of the CUDA runtime's wheel")
    return found[0].parent


def _asked(library: pathlib.Path) -> list[str]:
    """What a library takes from others."""
    found = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return [line.split()[-1].partition("@")[0] for line in found.stdout.splitlines()]


def _make(library: pathlib.Path, source: pathlib.Path, asked: set[str], flags: list[str]) -> None:
    said = set(re.findall(r"^API [\w ]+?\W+(\w+)\(", source.read_text(), re.MULTILINE))
    rest = [f"API long {name}() {{ return 0; }}\n" for name in sorted(asked - said) if not REAL.fullmatch(name)]
    whole, made = library.with_suffix(".cpp"), library.with_suffix(".tmp")
    whole.write_text(f'#include "{source}"\n' + "".join(rest))
    command = [*compiler(), *FLAGS, *flags, f"-Wl,-soname,{library.name}", str(whole), "-o", str(made)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"null CUDA: {shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    os.replace(made, library)
