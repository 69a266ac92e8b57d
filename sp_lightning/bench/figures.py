"""A row's repetitions, and the figures that follow from them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.machine import Machine
from .entries import OURS, Entry
from .floor import Costs
from .setting import Setting

# Peers that fetch weights as they need them.
STREAMING = {"fsdp2", "deepspeed", "superoffload", "accelerate", "group-offload"}


@dataclass(frozen=True)
class Spread:
    """Several measurements of one quantity."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarize one or more values."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    @property
    def relative(self) -> float:
        """Distance from the lowest to the highest, as a share of the median."""
        return (self.high - self.low) / self.median


@dataclass
class Row:
    """A contender's result, or its error."""

    entry: Entry
    how: str | None = None
    error: str | None = None
    repetitions: list[dict[str, Any]] = field(default_factory=list)
    step_s: Spread | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    device_peak: int | None = None
    host_peak: int | None = None
    floor_s: float | None = None

    def add(self, repetition: dict[str, Any], host_peak: int) -> None:
        """Add a turn's report."""
        self.repetitions.append({**repetition, "host_peak": host_peak})

    def compute(self, costs: Costs, machine: Machine) -> None:
        """Fill in the figures that follow from the repetitions."""
        if not self.repetitions:
            return
        self.step_s = Spread.of(repetition["seconds"] / repetition["batches"] for repetition in self.repetitions)
        ranks = costs.setting.ranks
        self.tokens_per_s = ranks * costs.tokens / self.step_s.median
        self.flops_per_s = ranks * costs.flops / self.step_s.median
        self.device_peak = self._most("allocated_peak")
        self.host_peak = self._most("host_peak")
        window = self._window(costs)
        if window is not None:
            on_device = self.entry.options.get("optimizer_device") == "device" and costs.setting.device != "cpu"
            self.floor_s = costs.floor_s(machine, window, self.entry.at_once, on_device)

    @property
    def merit(self) -> float | None:
        """Lower bound over measured step time."""
        return self.floor_s / self.step_s.median if self.floor_s is not None and self.step_s is not None else None

    @property
    def losses(self) -> list[float]:
        """Losses up to the end of the first repetition, which every process has."""
        return self.repetitions[0]["losses"] if self.repetitions else []

    @property
    def repeated(self) -> int:
        """Count the first losses that every process found, one for each repetition; one process shows the first."""
        found = [repetition["losses"] for repetition in self.repetitions]
        same = itertools.takewhile(lambda losses: len(set(losses)) == 1, zip(*found, strict=False))
        return min(sum(1 for _ in same), 1 if len(found) == 1 else len(self.losses))

    @property
    def arithmetic(self) -> tuple[Any, ...]:
        """Options of this strategy on which the bits depend."""
        names = "fused_optimizer", "optimizer_device", "master_weights", "compile_units"
        return tuple(self.entry.options.get(name) for name in names)

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        spread = self.step_s
        return {
            "label": self.entry.label,
            "contender": self.entry.contender,
            "options": dict(self.entry.options),
            "how": self.how,
            "error": self.error,
            "step_s": None if spread is None else {**vars(spread), "relative": spread.relative},
            "tokens_per_s": self.tokens_per_s,
            "flops_per_s": self.flops_per_s,
            "device_peak": self.device_peak,
            "host_peak": self.host_peak,
            "floor_s": self.floor_s,
            "merit": self.merit,
            "losses": self.losses,
            "repetitions": self.repetitions,
        }

    def _most(self, name: str) -> int | None:
        values = [repetition[name] for repetition in self.repetitions if repetition[name] is not None]
        return max(values) if values else None

    def _window(self, costs: Costs) -> int | None:
        """Return the units on the device at a time; None for a contender whose weights stay where they compute."""
        if self.entry.contender != OURS:
            return 1 if self.entry.contender in STREAMING and costs.setting.device != "cpu" else None
        window = self.entry.options["window"]
        if window == "auto":
            window = self.repetitions[-1]["details"]["window"]
        return len(costs.units) if window == "all" else int(window)


@dataclass(frozen=True)
class Result:
    """The result of a comparison."""

    setting: Setting
    costs: Costs
    machine: Machine
    facts: dict[str, Any]
    together: bool  # whether processes stayed while others worked
    rows: Sequence[Row]

    @property
    def differences(self) -> list[str]:
        """Losses that should be equal and differ, in words.

        A GPU's kernels may add in another order in each run: there losses count as far as a row repeats its own.
        """
        plain = [row for row in self.rows if row.entry.contender == "plain" and row.losses]
        alike: dict[tuple[Any, ...], Row] = {}
        found = []
        for row in self.rows:
            if row.entry.contender == OURS and row.losses:
                first = alike.setdefault(row.arithmetic, row)
                found.append(self._difference(row, first, len(row.losses)))
                found += [self._difference(row, other, self._equal_steps(row)) for other in plain]
        return [words for words in found if words]

    def _equal_steps(self, row: Row) -> int:
        """Count the losses that must equal the plain run's, whose optimizer rounds as the device does."""
        fused, where, masters, compiled = row.arithmetic
        if compiled:
            return 0
        if (
            self.setting.ranks > 2 and self.setting.nodes == 1
        ):  # the order in which stock DDP sums changes with its buckets
            return 1
        on_host = self.setting.device == "cpu" and self.setting.optimizer != "adamw-fused"
        same = self.setting.inference or ((on_host or where == "device") and not fused and not masters)
        return len(row.losses) if same else 1

    def _difference(self, row: Row, other: Row, count: int) -> str:
        if self.setting.device != "cpu":
            count = min(count, row.repeated, other.repeated)
        # Batches under way at once as a repetition ends report their losses later.
        for step, (mine, theirs) in enumerate(zip(row.losses[:count], other.losses[:count], strict=False), 1):
            if mine != theirs:
                return f"{row.entry.label} has loss {mine!r} at step {step}, {other.entry.label} {theirs!r}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            **self.facts,
            "machine": vars(self.machine),
            "setting": self.setting.as_dict(),
            "model": {
                "parameters": self.costs.parameters,
                "units": len(self.costs.units),
                "tokens_per_step": self.costs.tokens,
                "flops_per_step": self.costs.flops,
            },
            "processes": "stay" if self.together else "one at a time",
            "differences": self.differences,
            "rows": [row.as_dict() for row in self.rows],
        }
