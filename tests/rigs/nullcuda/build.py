"""Compiles csrc/ into a CUDA runtime, a driver and kernels for the installed torch, once per torch and source text.

What torch's libraries ask of CUDA's and csrc/ does not say is a function that gives 0. The libraries lie where simgpu's
do (../simgpu/build.py).
"""

import pathlib
import re
import shutil
import subprocess

import torch

from simgpu import build

SOURCES = pathlib.Path(__file__).parent / "csrc"
TORCH = pathlib.Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w"]
RUNTIME, DRIVER, KERNELS = "libnullcuda.so", "libcuda.so.1", "libkernels.so"
ASKED = re.compile(r"(_*cuda|cublas|cusolver|cusparse|cufft|nccl)[A-Z]\w*")
REAL = re.compile(r"\w*(GetVersion|GetLastError)|nccl\w*String")  # the libraries answer these without a device


def directory() -> pathlib.Path:
    """Where they lie, once they are there."""
    sources = [*SOURCES.rglob("*.*"), *build.SOURCES.iterdir(), pathlib.Path(__file__)]
    return build.folder("nullcuda", (str(TORCH), FLAGS), sources, KERNELS, _make)


def _make(path: pathlib.Path) -> None:
    headers = _require()
    version = "".join(part.zfill(2) for part in torch.version.cuda.split(".")) + "0"  # 13.0 is 13000
    asked = [name for library in sorted((TORCH / "lib").glob("lib*torch*.so*")) for name in _asked(library)]
    include = [f"-isystem{SOURCES}", f"-isystem{headers}", f"-DCUDA_VERSION_MADE_FOR={int(version)}"]
    _make_whole(path / RUNTIME, SOURCES / "runtime.cpp", {*filter(ASKED.fullmatch, asked)}, include)
    asked = _asked(TORCH / "lib" / "libcaffe2_nvrtc.so")
    _make_whole(path / DRIVER, SOURCES / "driver.cpp", {*filter(re.compile(r"cu[A-Z]\w*").fullmatch, asked)}, [])
    build.compile(path / KERNELS, *FLAGS, str(SOURCES / "kernels.cpp"), *build.with_torch())


def _require() -> pathlib.Path:
    """The folder of the headers that torch was made with."""
    if torch.version.cuda is None:
        raise build.MissingError("this torch was made without CUDA")
    compiler = build.compiler()[0]
    if not (shutil.which(compiler) and shutil.which("nm")):
        raise build.MissingError(f"the null CUDA needs a C++20 compiler and nm: {compiler!r} ($CXX, else c++)")
    found = list(TORCH.parent.glob("nvidia/*/include/driver_types.h"))
    if not found:
        raise build.MissingError("the null CUDA needs driver_types.h of the CUDA runtime's wheel")
    return found[0].parent


def _asked(library: pathlib.Path) -> list[str]:
    """What a library takes from others."""
    found = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return [line.split()[-1].partition("@")[0] for line in found.stdout.splitlines()]


def _make_whole(library: pathlib.Path, source: pathlib.Path, asked: set[str], flags: list[str]) -> None:
    """With a function for all that is asked and not said."""
    said = set(re.findall(r"^API [\w ]+?\W+(\w+)\(", source.read_text(), re.MULTILINE))
    rest = [f"API long {name}() {{ return 0; }}\n" for name in sorted(asked - said) if not REAL.fullmatch(name)]
    whole = library.with_suffix(".cpp")
    whole.write_text(f'#include "{source}"\n' + "".join(rest))
    build.compile(library, *FLAGS, *flags, f"-Wl,-soname,{library.name}", str(whole))
