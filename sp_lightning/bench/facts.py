"""The origin of a result: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ..core.host import host_memory, usable_cores

LIBRARIES = ("sp-lightning", "torch", "lightning", "transformers", "deepspeed", "torchao", "accelerate", "diffusers")


def facts() -> dict[str, Any]:
    """Collect the facts about this process and its machine."""
    return {
        "command": _command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **_versions()},
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "host_nbytes": host_memory().total,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _command() -> str:
    program = Path(sys.argv[0])
    start = ["-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join(["python", *start, *sys.argv[1:]])


def _commit() -> str | None:
    """Return the commit of the checkout that is run, with "+" if it was changed; None outside of a checkout."""
    here = Path(__file__)
    described = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    for arguments in (("ls-files", "--error-unmatch", here.name), described):
        try:
            done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True)
        except OSError:  # git is not installed
            return None
        if done.returncode != 0:
            return None
    return done.stdout.strip()


def _processor() -> str:
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
