"""A contender's process: ``python -m sp_lightning.bench.worker``, started and spoken to by `referee`.

Lines of JSON: a job arrives on standard input, then a line for each further turn; reports leave on what was standard
output. What libraries print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from ..memory.device import Device
from ..runtime.measure import measure, measure_optimizer
from .contenders import CONTENDERS
from .setting import WARM_UP, Setting
from .turns import Turns
from .work import Work

Report = Callable[[dict[str, Any]], None]


def main() -> None:
    """One job."""
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


def work_on(job: dict[str, Any], report: Report) -> None:
    """A contender's turns, or the machine's measurement where the job names none."""
    setting = Setting(**job["setting"])
    if job["contender"] is None:
        report(the_machine(setting))
        return
    device = Device(setting.device)
    if setting.device_memory is not None:
        device.limit_memory(setting.device_memory)
    contender = CONTENDERS[job["contender"]](**job["options"])
    for name in contender.needs:
        __import__(name)
    torch.zeros(1, device=device.torch_device)  # what the device's runtime takes on the host is nobody's
    report({"how": contender.how, "resident_set": psutil.Process().memory_info().rss})
    work = Work(setting, device)
    turns = Turns(
        work.batches(),
        device,
        steps=setting.steps,
        repetitions=job["repetitions"],
        warm_up=WARM_UP,
        report=report,
        wait=next_turn,
    )
    contender.run(work, turns)


def the_machine(setting: Setting) -> dict[str, Any]:
    """Its profile in the model's type and with the optimizer's kind of step, and the device's name."""
    device = Device(setting.device)
    machine = measure(device.torch_device, dtype=setting.dtype)
    if setting.optimizer == "adamw-fused":
        machine = dataclasses.replace(
            machine, optimizer_bytes_per_parameter=machine.dram_bytes_per_s / measure_optimizer(fused=True)
        )
    return {"device": device.name, "machine": dataclasses.asdict(machine)}


def next_turn() -> None:
    """Returns when it comes; ends the process when nobody is there to give it."""
    if not sys.stdin.readline():
        sys.exit(0)


def in_one_line(error: BaseException) -> str:
    """Kind and first line."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


if __name__ == "__main__":
    main()
