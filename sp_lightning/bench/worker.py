"""A contender's process: ``python -m sp_lightning.bench.worker``, which `referee` starts and talks to.

A job arrives on standard input as a line of JSON, then a line for each further turn; reports leave as lines of JSON on
the original standard output. What libraries print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from ..memory.device import Device
from ..runtime.measure import measure, measure_optimizer
from .contenders import CONTENDERS
from .entries import Entry
from .setting import WARM_UP, Setting
from .turns import Turns
from .work import Work, device_here

LOOKS_S = 1.0  # for its parent, so often
Report = Callable[[dict[str, Any]], None]


def main() -> None:
    """Do the job that is read from standard input, and report on standard output."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "w", buffering=1) as replies:
        os.dup2(2, 1)  # standard output is for reports alone
        job = json.loads(sys.stdin.readline())

        def report(facts: dict[str, Any]) -> None:
            replies.write(json.dumps(facts) + "\n")

        try:
            work_on(job, report)
        except Exception as error:
            report({"error": in_one_line(error)})
            raise


def end_with(parent: int) -> None:
    """End this process when its parent is gone: a rank that waits for others would stay."""
    while os.getppid() == parent:
        time.sleep(LOOKS_S)
    os.kill(os.getpid(), signal.SIGKILL)


def work_on(job: dict[str, Any], report: Report) -> None:
    """Run a contender's turns, or measure the machine if the job names no contender."""
    setting = Setting(**job["setting"])
    if job["contender"] is None:
        report(describe_machine(setting))
        return
    device = Device(setting.device if setting.ranks == 1 or setting.device == "cpu" else device_here())
    if setting.device_memory is not None:
        device.limit_memory(setting.device_memory)
    contender = CONTENDERS[job["contender"]](**job["options"])
    for name in contender.needs:
        __import__(name)
    torch.zeros(1, device=device.torch_device)  # the host memory of the device's runtime counts for no contender
    report({"how": contender.how, "resident_set": psutil.Process().memory_info().rss})
    work = Work(setting, device)
    turns = Turns(
        work.batches(),
        device,
        steps=setting.steps,
        repetitions=job["repetitions"],
        warm_up=WARM_UP,
        at_once=Entry(job["contender"], job["options"]).at_once,
        report=report,
        wait=next_turn,
    )
    contender.run(work, turns)


def describe_machine(setting: Setting) -> dict[str, Any]:
    """Measure the machine in the model's type and with the optimizer's kind of step, and name its device."""
    device = Device(setting.device)
    machine = measure(device.torch_device, dtype=setting.dtype)
    if setting.optimizer == "adamw-fused":
        machine = dataclasses.replace(
            machine, optimizer_bytes_per_parameter=machine.dram_bytes_per_s / measure_optimizer(fused=True)
        )
    return {"device": device.name, "machine": dataclasses.asdict(machine)}


def next_turn() -> None:
    """Wait for the next turn; end the process if the referee is gone."""
    if not sys.stdin.readline():
        sys.exit(0)


def in_one_line(error: BaseException) -> str:
    """Return an error's type and first line."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


if __name__ == "__main__":
    main()
