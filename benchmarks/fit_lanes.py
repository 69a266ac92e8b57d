"""Fit the rates that a step reaches to the measured rows of benchmarks/results, and print each row's error.

    python benchmarks/fit_lanes.py

Each row is also predicted with rates that are fitted without it. What is printed as `Reached` is what plan/machines.py
has. Two of its rates are fitted. Two were measured by themselves (NOTES.md): torch's norm of one gradient at 12 GB/s,
and the host's optimizer beside copies. It moved 109 GB/s alone, 90 beside copies up at 55 GB/s and 70 beside copies
down, in a memory that gave 143 for all: a byte up costs 1 byte, a byte down 1.33.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from sp_lightning.plan.machines import REACHED, Machine, Reached, Work, step_time

RESULTS = pathlib.Path(__file__).with_name("results")
FITTED = "matrix", "step"
SAME = "flops_per_s device_bytes_per_s up_bytes_per_s down_bytes_per_s duplex device_nbytes host_nbytes".split()
CORES = "dram_bytes_per_s"  # the name of the cores' rate in files
SMALL = 0.02  # of a rate's logarithm

# Files have no usable rate of the host's memory for all together: older ones have none, and that of 70ed76e is its
# cache's. This one was measured on another machine of the kind (NOTES.md).
HOST = 143e9
# A compiler ran while the machine of peers' training was measured: it has the rates that its file measured later. No
# machine was measured for Hugging Face's Trainer: it has the medians of the others.
SPOILT, LATER = ("peers-nvidia-h200.json", 0), 1

ONE_CORE = 12e9  # bytes/s of a norm that torch computes on one core


class Trained(NamedTuple):
    """Parameters that a step changes: all, and those of them that travel in half precision."""

    every: int = 0
    cast: int = 0


class Bytes(NamedTuple):
    """Bytes for each parameter that travels in half precision, and for each other one."""

    half: float = 0.0
    full: float = 0.0

    def of(self, trained: Trained) -> float:
        """Return the bytes of one pass over these parameters."""
        return trained.cast * self.half + (trained.every - trained.cast) * self.full


NO_BYTES = Bytes()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The bytes of host memory that a step of a version costs for each parameter; nothing runs beside the last two."""

    stepped: Bytes = NO_BYTES  # by the optimizer
    landed: Bytes = NO_BYTES  # when gradients are down
    clipped: Bytes = NO_BYTES  # then, if they are clipped: norms, and the factor
    clipped_by_one: Bytes = NO_BYTES  # the same by one core
    on_device: float = 0.0  # of device memory, for a step there


# What a step costs in each version. FP32 gradients are made of those that came down in half precision (2 + 4), clipped
# by two passes (4, and 8 for the product), and stepped (28, and 2 for a wire copy). Steps of torch's fused kernels cast
# weights apart (4 + 2). From 70ed76e on gradients stay narrow: no pass widens them, and the step takes the factor.
WIDE = Cost(landed=Bytes(6, 0), clipped=Bytes(12, 8), clipped_by_one=Bytes(0, 4), stepped=Bytes(30, 28))
COSTS = {
    "35907c1": replace(WIDE, clipped=Bytes(8, 8), clipped_by_one=Bytes(4, 4)),  # all norms on one core
    "63d205d": WIDE,
    "63d205d fused": replace(WIDE, stepped=Bytes(34, 28)),
    "70ed76e": Cost(clipped=Bytes(2, 8), clipped_by_one=Bytes(0, 4), stepped=Bytes(28, 28)),
    # Plain runs, on the device: norm and product (12), weights and gradients cast (18), and the optimizer, by torch's
    # operators for lists (80) or fused (28).
    "plain": Cost(on_device=12 + 18 + 80),
    "plain fused": Cost(on_device=12 + 18 + 28),
}


@dataclass(frozen=True)
class Llama:
    """A Llama with a tied table, in numbers."""

    hidden: int
    mlp: int
    keys: int  # width of keys, and of values
    blocks: int
    words: int = 128256

    def trained(self, training: bool) -> tuple[Trained, Trained]:
        """Return the parameters of the blocks, and of the table, that a step changes."""
        matrices = self.blocks * (2 * self.hidden * (self.hidden + self.keys) + 3 * self.hidden * self.mlp)
        blocks = Trained(matrices + self.blocks * 2 * self.hidden, matrices)
        return (blocks, Trained(self.words * self.hidden)) if training else (Trained(), Trained())

    def works(self, tokens: int, length: int, training: bool, window: int | None) -> tuple[Work, Work, Work]:
        """Return the work of a forward, of a backward that recomputes, and of the table, which comes first.

        Of the blocks, a backward begins with those that the forward left in the window.
        """
        hidden, mlp, keys, blocks = self.hidden, self.mlp, self.keys, self.blocks
        matrices = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * mlp
        attention = 4 * tokens * length * hidden
        flops = 2 * tokens * matrices + attention
        # Recomputation ends before the last product, and attention's backward has five products for two.
        again = flops - 2 * tokens * hidden * mlp + 4 * tokens * matrices + 2.5 * attention
        # Bytes of norms, rotations, casts, activations and sums: as the plan counts them by operator.
        moved = (172 * hidden + 10 * mlp, 550 * hidden + 27 * mlp)
        moved = moved if training else (104 * hidden + 20 * keys + 10 * mlp, 0)
        table, logits = self.words * hidden, tokens * self.words
        width, travels = 4 if training else 2, window is not None
        up = travels * (2 * matrices + (4 if training else 2) * 2 * hidden)
        inner = blocks - max(0, (window or 0) - 1)
        forward = Work(
            flops=blocks * flops + 2 * tokens * table,
            moved=tokens * (blocks * moved[0] + 13 * hidden) + (14 if training else 0) * logits,
            up=inner * up + travels * width * table,  # the table again, as the head
        )
        if not training:
            return forward, Work(), Work(up=travels * width * table)
        backward = Work(
            flops=blocks * again + 4 * tokens * table,
            moved=tokens * blocks * moved[1] + 29.5 * logits + 12 * table,
            up=inner * up + travels * width * table,
            down=travels * blocks * (2 * matrices + 8 * hidden),
        )
        return forward, backward, Work(up=travels * 4 * table, down=travels * 4 * table)


MODELS = {"llama-1b": Llama(2048, 8192, 512, 16), "llama-3b": Llama(3072, 8192, 1024, 28)}


@dataclass(frozen=True)
class Row:
    """A measured row."""

    name: str  # file, setting and contender
    model: str
    rows: int
    length: int
    window: int | None  # None: a plain run
    step_s: float
    device_peak: int
    machine: Machine
    clip: bool
    overlaps: bool
    cost: Cost
    training: bool

    def predicted_s(self, reached: Reached) -> float:
        """Return the step's time by lanes, and by the passes that clipping made then."""
        model, cost, cores = MODELS[self.model], self.cost, reached.step * self.machine.cores_bytes_per_s
        forward, backward, first = model.works(self.rows * self.length, self.length, self.training, self.window)
        parts = model.trained(self.training)
        trained, landed, alone = Trained(*map(sum, zip(*parts, strict=True))), cost.landed, 0.0
        if self.clip:
            alone = (landed.of(trained) + cost.clipped.of(trained)) / cores + cost.clipped_by_one.of(trained) / ONE_CORE
            landed = NO_BYTES
        stepped = Bytes(cost.stepped.half + landed.half, cost.stepped.full + landed.full)
        step, first_step = (Work(cores=stepped.of(part), moved=cost.on_device * part.every) for part in parts)
        how = {"clip": self.clip, "overlaps": self.overlaps, "reached": reached}
        return alone + step_time(forward, backward, step, first, first_step, self.machine, **how)[0]


def measured() -> list[Row]:
    """Read the rows of this strategy, and of plain runs, that have a measured step."""
    files = {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    results = {(name, place): one for name, file in files.items() for place, one in enumerate(file["results"])}
    machines = {where: one["machine"] for where, one in results.items() if one.get("machine") and where != SPOILT}
    machines[SPOILT] = machines[SPOILT[0], LATER]
    return [
        _row(where[0], files[where[0]], result, row, _machine(machines.get(where) or _usual(machines.values())))
        for where, result in results.items()
        for row in result.get("rows", [])
        if row["step_s"] is not None and row["contender"] in ("plain", "stock", "superpipeline")
    ]


def _machine(given: Mapping[str, Any]) -> Machine:
    same = {name: given[name] for name in SAME}
    return Machine(name="measured", host_bytes_per_s=HOST, cores_bytes_per_s=given[CORES], **same)


def _usual(machines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    all_of_them = list(machines)
    return {name: statistics.median(one[name] for one in all_of_them) for name in (*SAME, CORES)}


def _row(name: str, file: dict[str, Any], result: dict[str, Any], row: dict[str, Any], machine: Machine) -> Row:
    trainer = file["campaign"] == "trainer"  # Hugging Face's, whose file has no setting
    setting = result.get("setting") or {"model": "llama-1b", "batch": 4, "seq": 2048, "clip": 1.0, "inference": False}
    commit = (result.get("commit") or file["facts"]["commit"])[:7]
    window = row["options"].get("window")
    kind = ("plain" if window is None else commit) + " fused" * trainer
    label = f"{name.removesuffix('-nvidia-h200.json')}: {result['label']}, {row['label']}"
    sizes = setting["model"], setting["batch"], setting["seq"]
    return Row(
        label,
        *sizes,
        window,
        row["step_s"]["median"],
        row["device_peak"],
        machine,
        setting["clip"] is not None,
        commit != "35907c1",  # there a callback made the next forward wait
        COSTS[kind],
        not setting["inference"],
    )


def errors(rows: Sequence[Row], reached: Reached) -> list[float]:
    """Return by what share each predicted step is above the measured one, as a logarithm."""
    return [math.log(row.predicted_s(reached) / row.step_s) for row in rows]


@dataclass(frozen=True)
class Fit:
    """The errors of rows at some rates, and how they change with each fitted one."""

    rows: Sequence[Row]
    at: Reached
    errors: torch.Tensor
    slopes: torch.Tensor

    @classmethod
    def around(cls, rows: Sequence[Row], at: Reached) -> Fit:
        """Find the errors, and their slopes by the logarithm of each rate."""
        more = [replace(at, **{name: getattr(at, name) * math.exp(SMALL)}) for name in FITTED]
        base = torch.tensor(errors(rows, at))
        slopes = [(torch.tensor(errors(rows, one)) - base) / SMALL for one in more]
        return cls(rows, at, base, torch.stack(slopes, 1))

    def best(self, without: Row | None = None) -> Reached:
        """Return the rates with the least squares of all errors, but for those of one row."""
        used = [index for index, row in enumerate(self.rows) if row is not without]
        steps = torch.linalg.lstsq(self.slopes[used], -self.errors[used, None]).solution[:, 0].tolist()
        changes = {name: getattr(self.at, name) * math.exp(step) for name, step in zip(FITTED, steps, strict=True)}
        return replace(self.at, **changes)


def fitted(rows: Sequence[Row]) -> Fit:
    """Fit the rates to all rows."""
    fit = Fit.around(rows, REACHED)
    for _ in range(3):
        fit = Fit.around(rows, fit.best())
    return fit


def main() -> None:
    rows = measured()
    fit = fitted(rows)
    lines = [f"{fit.at}", f"{'row':72} {'measured':>9} {'planned':>8} {'error':>7} {'left out':>8}"]
    for row, error in zip(rows, fit.errors.exp().sub(1).tolist(), strict=True):
        without = row.predicted_s(fit.best(without=row)) / row.step_s - 1
        times = f"{row.step_s * 1e3:6.0f} ms {row.step_s * (1 + error) * 1e3:5.0f} ms"
        lines.append(f"{row.name:72} {times} {error:+7.1%} {without:+8.1%}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
