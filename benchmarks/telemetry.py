"""Measure what telemetry costs: the same training steps with it on and off, in turn, and the time of its own calls.

    python benchmarks/telemetry.py [--device cpu | cuda | simgpu] [--units 8] [--width 512] [--rounds 8] [--json FILE]

A unit is two linear layers of WIDTH x 4 WIDTH, in FP32. "on" is telemetry as the callback uses it, for a progress bar
and, with ``log_metrics=True``, for a logger that gets values every 50 steps. The output shows the medians of a step's
time and of the time that all threads of the process spent on a core, which other processes disturb less: off, on, and
the difference as a share of the step. Because such differences drown in a machine's noise, all calls that telemetry
makes are timed, too: how many in a step, how long each, and their share of the step. That includes the clock's own
time, so the true cost is lower. With a logger that gets values every 50 steps, 16 of 48 steps are recorded; calls in
the others are timed, too.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time

import torch
from torch import nn

import sp_lightning
from sp_lightning.host.recorder import KEPT, Recorder
from sp_lightning.observe.report import RunReport

CALLS = ("begin_pass", "work", "waiting", "idle")  # of a recorder
LOG_EVERY = 50  # steps, as Lightning does
STEPS = 4  # in a round: the recorder reads two steps late


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.layers(x)


def step(module, optimizer, x):
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Clocked:
    """Counts calls, and the seconds that they take."""

    def __init__(self):
        self.calls, self.seconds, self._inside = 0, 0.0, False

    def __call__(self, call, *arguments, **named):
        if self._inside:  # a timed call that calls another
            return call(*arguments, **named)
        self._inside, begin = True, time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - begin
            self.calls += 1
            self._inside = False


class Within:
    """A context manager whose entry and exit are timed."""

    def __init__(self, clocked, context):
        self._clocked, self._context = clocked, context

    def __enter__(self):
        return self._clocked(self._context.__enter__)

    def __exit__(self, *exception):
        return self._clocked(self._context.__exit__, *exception)


def clocked_recorder(recorder, clocked):
    """Time all calls of a recorder, and return it."""

    def clock(call):
        def called(*arguments, **named):
            result = clocked(call, *arguments, **named)
            return Within(clocked, result) if hasattr(result, "__enter__") else result

        return called

    for name in CALLS:
        setattr(recorder, name, clock(getattr(recorder, name)))
    return recorder


def timed(run):
    """Return the wall and core seconds of a step."""
    wall, core = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        run()
    return (time.perf_counter() - wall) / STEPS, (time.process_time() - core) / STEPS


def read_figures(report):
    """Read what the callback reads after a step, for a progress bar."""
    report.update()
    report.stall_share()
    report.device_peak()


class Turns:
    """Takes turns with telemetry off, on, and timed."""

    def __init__(self, handle, run):
        self.handle, self.run, self.own, self.units = handle, run, Clocked(), []

    def off(self):
        self.run()
        return timed(self.run)

    def on(self):
        with contextlib.closing(RunReport(self.handle)) as report:
            self.run()
            found = timed(lambda: (self.run(), read_figures(report)))
            report.figures()
            return found

    def clocked(self, recorded=True):
        """Return the calls and seconds of a step, recorded or not, with its share of making a logger's values."""
        record, recorder = self.handle.record, Recorder(self.handle.device, wanted=lambda batch: recorded)
        self.handle.record = lambda _: record(clocked_recorder(recorder, self.own))
        with contextlib.closing(RunReport(self.handle)) as report:
            self.handle.record = record
            self.run()
            calls, seconds = self.own.calls, self.own.seconds
            timed(lambda: (self.run(), self.own(read_figures, report)))
            begin = time.perf_counter()
            report.figures()
            logged = (time.perf_counter() - begin) / LOG_EVERY
            self.units += [step.busy("compute") / self.handle.stats()["units"] for step in recorder.steps]
        return (self.own.calls - calls) / STEPS, (self.own.seconds - seconds) / STEPS + logged

    def skipped(self):
        """Return the calls and seconds of a step that is not recorded."""
        return self.clocked(recorded=False)


def measure(arguments):
    """Return medians over the rounds. Turns go off, on, clocked, and back, so that a drift affects all alike."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(arguments.width) for _ in range(arguments.units)))
    x = torch.randn(arguments.batch, arguments.width, device=arguments.device)
    with sp_lightning.stream(module, arguments.device, window=2, units=["Block"]) as handle:
        optimizer = torch.optim.SGD(module.parameters(), 1e-4)
        turns = Turns(handle, lambda: step(module, optimizer, x))
        rows = {"off": [], "on": [], "clocked": [], "skipped": []}
        timed(turns.run)
        for index in range(4 * arguments.rounds):
            name = (*rows, *reversed(rows))[index % 8]
            rows[name].append(getattr(turns, name)())
    medians = {name: [statistics.median(column) for column in zip(*row, strict=True)] for name, row in rows.items()}
    return {**medians, "unit_s": statistics.median(turns.units)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.device == "simgpu":
        sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "rigs"))
        __import__("simgpu")
    torch.set_num_threads(1)
    found = measure(arguments)
    (wall_off, core_off), (wall_on, core_on) = found["off"], found["on"]
    print(f"step        off {wall_off * 1e3:8.2f} ms   on {wall_on * 1e3:8.2f} ms   {(wall_on / wall_off - 1):+.2%}")
    print(f"core time   off {core_off * 1e3:8.2f} ms   on {core_on * 1e3:8.2f} ms   {(core_on / core_off - 1):+.2%}")
    calls, seconds = found["clocked"]
    each = f"{calls:.0f} calls of {seconds / calls * 1e6:.1f} us"
    print(f"by itself   {each}: {seconds * 1e3:.2f} ms, {seconds / wall_off:.2%} of a step")
    every = LOG_EVERY // KEPT
    average = (seconds + (every - 1) * found["skipped"][1]) / every
    print(f"{KEPT} of {every * KEPT}    {average * 1e3:.2f} ms on average, {average / wall_off:.2%} of a step")
    print(
        f"a unit computes {found['unit_s'] * 1e3:.1f} ms, and telemetry costs {seconds / arguments.units * 1e6:.0f} us"
    )
    if arguments.json:
        facts = {"torch": torch.__version__, "device": arguments.device, "units": arguments.units}
        arguments.json.write_text(json.dumps({**facts, **found}, indent=1))


if __name__ == "__main__":
    main()
