"""The report on a run: figures for loggers, a table when it begins, and a summary when it ends.

A report reads a handle's recorder and works without Lightning.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ..core.host import peak_memory, usable_cores
from ..core.machine import NARROW, Machine
from ..core.telemetry import Lane
from ..core.unit_numbers import STATES, HostBytes, host_bytes, state_nbytes
from ..core.window_choice import DeviceBudget
from ..optim.pending_step import AFTER_BACKWARD
from ..options import format_bytes, format_seconds
from ..runtime.handle import Handle
from ..runtime.measure import measure_quickly
from ..runtime.preflight import least_s
from ..runtime.recorder import KEPT, RecordedStep, Recorder, UnitTimes
from .bottleneck import WAITED_FOR, MeasuredRun, RunSetting, in_unit_of, measured, measured_floor, sentence
from .timeline import Timeline, in_words
from .timeline import measured as measured_timeline

GB = 1e9
WARM_UP = 2  # steps left out of the figures: they record the order of visits and allocate memory
ADAMW = "AdamW"  # the optimizer whose speed is measured
FP32_FROM = 3  # bytes per parameter on the way up, on average, from which weights count as FP32


class Planned(Protocol):
    """The part of a plan that a report shows (forecast.py)."""

    @property
    def machine(self) -> Machine: ...

    @property
    def window(self) -> int: ...

    @property
    def device_terms(self) -> dict[str, int]: ...

    @property
    def host(self) -> HostBytes: ...

    @property
    def device_nbytes(self) -> int: ...

    @property
    def step_s(self) -> float: ...

    @property
    def floor_s(self) -> float: ...

    @property
    def binds(self) -> str: ...


class RunReport:
    """Record training passes of a handle and turn them into figures; ``close`` restores the handle.

    Of every ``every`` * ``KEPT`` passes the first ``KEPT`` are recorded, and all passes whose numbers are in ``also``.
    """

    def __init__(self, handle: Handle, plan: Planned | None = None, every: int = 1, also: Collection[int] = ()) -> None:
        self._handle = handle
        self._plan = plan
        self._least_s: float | None = None  # lower bound of a step, predicted without a plan
        self._recorder = handle.record(
            Recorder(handle.device, wanted=lambda batch: batch // KEPT % every == 0 or batch in also)
        )
        self._seen = 0  # passes of any kind, up to the last one that was read
        self._fresh: list[RecordedStep] = []  # training passes since the last call of ``figures``
        self._last: deque[RecordedStep] = deque(maxlen=KEPT)

    # ---- while it runs

    def update(self) -> list[RecordedStep]:
        """Return training passes that became readable since the last call, numbered from 0 among training passes."""
        new = [step for step in self._recorder.steps if step.number >= self._seen]
        self._seen = max([self._seen, *(step.number + 1 for step in new)])
        numbered = [replace(step, number=step.batch) for step in new if step.trains]
        self._fresh = (self._fresh + numbered)[-KEPT:]
        self._last.extend(numbered)
        while self._last and self._last[0].number < WARM_UP < self._last[-1].number:
            self._last.popleft()
        return numbered

    @property
    def last(self) -> list[RecordedStep]:
        """The latest training passes, without the warm-up if the run is long enough."""
        return list(self._last)

    def figures(self) -> dict[str, float]:
        """Return means over the training passes since the last call; empty if there were none."""
        steps, self._fresh = self._fresh, []
        if not steps:
            return {}
        causes = [step.causes() for step in steps]
        mean = {cause: statistics.fmean(c[cause] for c in causes) * 1e3 for cause in causes[0]}
        step_ms = statistics.fmean(step.seconds for step in steps) * 1e3
        floor_s = self.floor_s()
        on_disk = self._handle.options.uses_files
        return {
            "step_ms": step_ms,
            **({} if floor_s is None else {"floor_ms": floor_s * 1e3, "floor_share": floor_s * 1e3 / step_ms}),
            "compute_ms": mean["compute"],
            **{f"stall_{cause}_ms": mean[cause] for cause in WAITED_FOR if cause != "disk" or on_disk},
            "outside_ms": mean["other"],
            "up_gb_per_s": _rate(steps, "up"),
            "down_gb_per_s": _rate(steps, "down"),
            **(
                {"disk_in_gb_per_s": _rate(steps, "disk in"), "disk_out_gb_per_s": _rate(steps, "disk out")}
                if on_disk
                else {}
            ),
            **self.memory(),
        }

    def memory(self) -> dict[str, float]:
        """Return the peaks so far, and the share of the weights that is on the device now."""
        window = self._handle.engine.window
        total = sum(unit.store.on_device.nbytes for unit in window.units)
        return {
            "device_peak_bytes": float(self.device_peak()),
            "host_peak_bytes": float(peak_memory()),
            "resident_share": (window.schedule.resident_nbytes + self._rest_nbytes()) / total,
        }

    def stall_share(self) -> float | None:
        """Return the share of the latest recorded step that was stalls, from 0 to 1."""
        if not self._last:
            return None
        causes = self._last[-1].causes()
        return sum(causes[cause] for cause in WAITED_FOR) / self._last[-1].seconds

    def device_peak(self) -> int:
        """Return the peak of device memory in bytes."""
        return self._handle.device.memory_peak()

    def times(self) -> dict[str, UnitTimes]:
        """Return the measured times of each unit."""
        return self._recorder.times()

    def floor_s(self) -> float | None:
        """Return the lower bound of the recorded steps, or None before there are any."""
        times, window = self.times(), self._handle.engine.window.schedule.window
        return measured_floor(times.values(), window, self._resident()).seconds if times else None

    # ---- when it begins and ends

    def table(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
        """Predict, before the first step, memory on both sides and the time of a step: rows by name."""
        stats, rest = self._handle.stats(), self._rest_nbytes()
        grows = ", until the first steps show what is free" if self._handle.options.window == "auto" else ""
        return {
            "units": f"{stats['units']}" + (f", and {format_bytes(rest)} that stay on the device" if rest else ""),
            "window": f"{stats['window']} of them on the device{grows}",
            "transfer": f"{stats['transfer']} at a time",
            "device": self._device_in_words(),
            "host": self._host_in_words(optimizers),
            "step": self._step_in_words(optimizers),
        }

    def _device_in_words(self) -> str:
        if self._plan is None:
            return f"{format_bytes(self.predicted_nbytes())} for weights and gradients, plus activations"
        listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self._plan.device_terms.items())
        return f"{format_bytes(self._plan.device_nbytes)} planned: {listed}"

    def _host_in_words(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Describe the host memory of streaming and of the optimizers' state."""
        if self._plan is not None:
            return f"{format_bytes(self._plan.host.total)} planned"
        states = [state_nbytes(optimizer) for optimizer in optimizers]
        known = sum(nbytes for nbytes in states if nbytes is not None)
        found = self._host_bytes()
        terms = {"weights": found.weights, "converted": found.wire, "gradients": found.gradients, "optimizer": known}
        listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items() if nbytes)
        unknown = ", plus optimizer state of unknown size" * (None in states)
        return f"{format_bytes(sum(terms.values()))}: {listed}{unknown}"

    def _step_in_words(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        if self._plan is not None:
            floor = f"floor {format_seconds(self._plan.floor_s)}, set by the {self._plan.binds}"
            return f"{format_seconds(self._plan.step_s)} planned for {self._plan.machine.name}, {floor}"
        machine, kinds = measure_quickly(self._handle.device.torch_device), ADAMW
        self._handle.device.reset_memory_peak()  # what measuring allocated is not the run's
        states = [state_nbytes(optimizer) for optimizer in optimizers]
        if None not in states:
            kept = sum(nbytes or 0 for nbytes in states) / max(1, self._host_bytes().gradients)
            machine = replace(machine, optimizer_bytes_per_parameter=(3 + 2 * kept) / (3 + 2 * STATES[ADAMW]))
            kinds = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        self._least_s = self._least(machine)
        return f"at least {format_seconds(self._least_s)} for weights, gradients and {kinds}, plus compute"

    def _least(self, machine: Machine) -> float:
        """Compute the lower bound of a step without compute, at this machine's measured rates."""
        schedule = self._handle.engine.window.schedule
        sizes = [unit.sizes() for unit in self._handle.engine.window.units]
        window = len(sizes) if self._handle.options.window == "auto" else schedule.window
        if self._handle.storage.may_stay_narrow:
            machine = replace(machine, cast_bytes_per_parameter=NARROW)
        return least_s(sizes, window, machine, schedule.transfer)

    def _host_bytes(self) -> HostBytes:
        return host_bytes(unit.host_bytes() for unit in self._handle.engine.window.units)

    def predicted_nbytes(self) -> int:
        """Return device bytes for weights and gradients: resident root, largest window, two gradient buffers."""
        window = self._handle.engine.window
        units = [unit.sizes() for unit in window.units if not unit.unit.resident]
        largest = sorted((unit.up_nbytes for unit in units), reverse=True)[: window.schedule.window]
        return sum(largest) + 2 * max((unit.down_nbytes for unit in units), default=0) + self._rest_nbytes()

    def report(self) -> list[str]:
        """Compare predicted with measured values and name the bottleneck; empty if no step was recorded."""
        m = self.measured()
        if m is None:
            return []
        took = in_unit_of(m.step_s, m.step_s) + self._step_predicted(m.step_s)
        floor = ""
        if m.floor_s is not None:
            floor = f", floor {in_unit_of(m.step_s, m.floor_s)} ({m.floor_s / m.step_s:.2f} of the step)"
        return [
            f"a step took {took}{floor}: {in_words(dict(m.causes))}",
            f"{self._memory_predicted(m.setting.window)}; host peak {format_bytes(peak_memory())}",
            sentence(m),
        ]

    def _step_predicted(self, step_s: float) -> str:
        if self._plan is not None:
            return f" ({in_unit_of(step_s, self._plan.step_s)} planned)"
        if self._least_s is not None:
            return f" (at least {in_unit_of(step_s, self._least_s)} predicted, without compute)"
        return ""

    def _memory_predicted(self, window: int) -> str:
        peak = format_bytes(self.device_peak())
        if self._plan is not None and window == self._plan.window:
            return f"device peak {peak} ({format_bytes(self._plan.device_nbytes)} planned) with window {window}"
        planned = format_bytes(self.predicted_nbytes())
        return f"device peak {peak} ({planned} predicted for weights and gradients) with window {window}"

    def measured(self) -> MeasuredRun | None:
        """Return the times of a typical step, or None before one was recorded."""
        if not self._last:
            return None
        return measured(self._last, self.times(), self._setting(), self._resident())

    def rank_figures(self) -> list[float]:
        """Return this rank's part of the report (`ranks_in_words`); zeros if no step was recorded."""
        found = self.measured()
        if found is None:
            return [0.0] * 4
        waited = sum(found.causes[cause] for cause in WAITED_FOR)
        return [found.step_s, waited / found.step_s, float(self.device_peak()), float(peak_memory())]

    def timeline(self, title: str, steps: Sequence[RecordedStep]) -> Timeline:
        """Make a timeline of these steps, with what runs on into them from the step before."""
        before = [span for step in self._last if step.number == steps[0].number - 1 for span in step.spans]
        return measured_timeline(steps, title, self.floor_s(), before)

    def close(self) -> list[RecordedStep]:
        """Stop recording, wait for the device, and return the training passes that were not read yet."""
        self._handle.stop_recording()
        return self.update()

    # ---- details

    def _rest_nbytes(self) -> int:
        return sum(unit.store.on_device.nbytes for unit in self._handle.engine.window.units if unit.unit.resident)

    def _resident(self) -> Collection[str]:
        return [unit.name for unit in self._handle.engine.window.units if unit.unit.resident]

    def _setting(self) -> RunSetting:
        window, stats, steps = self._handle.engine.window, self._handle.stats(), self._handle.steps
        units = window.units
        device = self._handle.device
        spare = (
            0 if device.is_host else DeviceBudget(capacity=device.memory_capacity(), others=device.memory_peak()).spare
        )
        largest = max(unit.store.on_device.nbytes for unit in units)
        return RunSetting(
            window=stats["window"],
            transfer=stats["transfer"],
            units=stats["units"],
            spare_units=spare // largest,
            threads=torch.get_num_threads(),
            cores=usable_cores(),
            overlaps=stats["stepped_ahead"] > 0 or steps.shares_cores,
            waits_as="; ".join(steps.said[AFTER_BACKWARD]),
            single=sum(unit.store.on_device.nbytes for unit in units)
            >= FP32_FROM * sum(unit.unit.numel for unit in units),
            activations=self._handle.options.activations,
        )


def ranks_in_words(figures: Sequence[Sequence[float]]) -> str:
    """Describe what all ranks measured: the seconds of a step, the share of it that waits, and two peaks."""
    slowest = max(figure[0] for figure in figures)
    listed = (
        f"rank {rank} {in_unit_of(slowest, step_s)}, waits {waits:.0%}, device peak {format_bytes(int(device))}, "
        f"host peak {format_bytes(int(host))}"
        for rank, (step_s, waits, device, host) in enumerate(figures)
    )
    return "by rank: " + "; ".join(listed)


def _rate(steps: Sequence[RecordedStep], lane: Lane) -> float:
    """Return GB/s of a lane while it worked."""
    seconds = sum(step.busy(lane) for step in steps)
    return sum(step.nbytes(lane) for step in steps) / seconds / GB if seconds else 0.0
