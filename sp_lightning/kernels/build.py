"""Compile optimizer.cpp, once for each set of instructions that it is written for.

The wheel's build (hatch_build.py) loads this file without the package around it: it imports the standard library alone.
"""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable

SOURCE = pathlib.Path(__file__).with_name("optimizer.cpp")
# No multiply-add is fused that torch does not fuse, and the target is never the machine that compiles.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC", "-Wl,--as-needed,-s")
_AVX2 = ("avx2", "fma", "f16c")
# The instructions that a variant needs, as compilers and Linux name them; the fastest variant first.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx512": (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"), "avx2": _AVX2, "default": ()},
}
DEFAULT: dict[str, tuple[str, ...]] = {"default": ()}  # variants on other processors
OLDEST_GLIBC = (2, 17)  # of any system for which there are wheels of torch


class Unavailable(Exception):
    """The reason for which there is no compiled step on this machine."""


def variants() -> dict[str, tuple[str, ...]]:
    """Return the variants of the library to compile for this kind of processor, each with the instructions it needs."""
    return VARIANTS.get(platform.machine(), DEFAULT)


def file_name(variant: str) -> str:
    """Return the name of a variant's library."""
    return f"optimizer-{variant}.so"


def compiler() -> list[str]:
    """Return the command line words that start the C++ compiler; raise Unavailable if there is none."""
    words = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(words[0]) is None:
        raise Unavailable(f"no C++ compiler ({words[0]!r}, from $CXX, else c++) is on this machine")
    return words


def command(words: list[str], variant: str, source: pathlib.Path, target: pathlib.Path) -> list[str]:
    """Return the command that compiles a variant."""
    instructions = [f"-m{name}" for name in variants()[variant]]
    return [*words, *FLAGS, *instructions, str(source), "-o", str(target)]


def output(words: list[str], start: Callable[..., subprocess.Popen[str]] = subprocess.Popen) -> str:
    """Run a program to its end and return its output; raise Unavailable if it fails."""
    process = start(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    written, _ = process.communicate()
    if process.returncode:
        raise Unavailable(f"{shlex.join(words)} failed: {written.strip()[-500:]}")
    return written


def compile_all(folder: pathlib.Path) -> list[pathlib.Path]:
    """Compile every variant for this kind of processor into a folder."""
    words = compiler()
    made = []
    for variant in variants():
        made.append(folder / file_name(variant))
        output(command(words, variant, SOURCE, made[-1]))
    return made


def platform_tag(libraries: list[pathlib.Path]) -> str:
    """Return the wheel platform tag ("manylinux_...") that these libraries need, by their glibc symbols."""
    found = {OLDEST_GLIBC}
    for library in libraries:
        versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
        found.update((int(major), int(minor)) for major, minor in versions)
    major, minor = max(found)
    return f"manylinux_{major}_{minor}_{platform.machine()}"
