"""The parts that all campaigns share: a time budget, a device, a result file that is complete at any time."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Measure this checkout, even if another version is installed.
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "bench")]

from compare import GRACE_S as GRACE_S  # noqa: E402, beyond the budget, to finish what has begun
from compare import facts  # noqa: E402


def parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the arguments of every campaign."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=9, help="begin nothing after this time (default: 9)")
    made.add_argument("--device", default=None, help="device that computes (default: the accelerator, else the CPU)")
    made.add_argument("--small", action="store_true", help="use tiny models, to try the campaign")
    made.add_argument(
        "--json", type=pathlib.Path, help="result file (default: benchmarks/results/CAMPAIGN-DEVICE.json)"
    )
    return made


def device_of(options: argparse.Namespace) -> str:
    """Return the device of the options, or else the accelerator, or the CPU."""
    if options.device is not None:
        return str(options.device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


class Campaign:
    """Collects results until the time is over."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.device = device_of(options)
        self.small: bool = options.small
        self._path = options.json or RESULTS / f"{name}-{_named(self.device)}.json"
        self._end = time.monotonic() + 60 * options.minutes
        self._contents: dict[str, Any] = {"campaign": name, "small": self.small, "results": []}
        self._contents["facts"] = {**facts(), "device": _named(self.device)}

    @property
    def left_s(self) -> float:
        """Seconds left in which something may begin."""
        return self._end - time.monotonic()

    @property
    def results(self) -> list[dict[str, Any]]:
        """Results so far."""
        return list(self._contents["results"])

    def add(self, result: dict[str, Any]) -> None:
        """Add a result, and write the file."""
        self._contents["results"].append(result)
        self.save()

    def save(self) -> None:
        """Write the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        waiting = self._path.with_suffix(".part")
        waiting.write_text(json.dumps(self._contents, indent=1) + "\n")
        waiting.replace(self._path)

    def in_a_process(
        self, program: str, flag: str, order: dict[str, Any], limit_s: float | None = None, **environment: str
    ) -> dict[str, Any]:
        """Run a program with an order in a process of its own; return what it prints last, or its error.

        Raises `subprocess.TimeoutExpired` where that does not end within the limit (default: the campaign's time).
        """
        done = subprocess.run(
            [sys.executable, program, flag, json.dumps(order)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=max(0.0, self.left_s + GRACE_S if limit_s is None else limit_s),
        )
        found: dict[str, Any] = {"error": done.stderr.strip()[-2000:]}
        return found if done.returncode else json.loads(done.stdout.splitlines()[-1])

    def say(self, *lines: str) -> None:
        """Print lines at once: what comes next may take long."""
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _named(device: str) -> str:
    if device.partition(":")[0] != "cuda":
        return device
    return torch.cuda.get_device_name().replace(" ", "-").lower()
