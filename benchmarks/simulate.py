"""Simulates training steps of known models on known machines, and prints how close each comes to its floor.

    python benchmarks/simulate.py

The tables are those of docs/simulation.md. Nothing is measured: machines are the profiles of sp_lightning/machine.py,
models the ones of sp_lightning/workloads.py, the order of work is the runtime's own.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

from sp_lightning.machine import GIB, MACHINES, Machine
from sp_lightning.schedule import Schedule
from sp_lightning.simulation import Simulation, simulate
from sp_lightning.workloads import WORKLOADS, Part, Workload

WINDOW = 3
HOST_BYTES = 12 + 2 + 4  # per parameter: FP32 weight and moments, bf16 copy that travels, FP32 gradient
MARGIN = 1.2
ROWS = 8


def step(workload: Workload, machine: Machine, tokens: int, into_forward: bool) -> Simulation:
    """One step with recompute, weights and gradients in bf16 on their way."""
    units = workload.units(tokens)
    schedule = Schedule([unit.up_nbytes for unit in units], WINDOW)
    return simulate(units, schedule, machine, activations="recompute", steps_into_forward=into_forward)


def table(head: list[str], rows: list[list[str]]) -> str:
    """In markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_machine(cell) -> str:
    """A row for each model, a column for each machine."""
    rows = [[name, *(cell(workload, machine) for machine in MACHINES.values())] for name, workload in WORKLOADS.items()]
    return table(["", *MACHINES], rows)


def sizes(workload: Workload, machine: Machine) -> str:
    """Tokens and seconds of a step, and the memory it takes."""
    tokens = workload.tokens(machine, WINDOW, True, False, MARGIN)
    result = step(workload, machine, tokens, False)
    host = workload.parameters * HOST_BYTES
    return (
        f"{tokens / 1e3:.1f}k, {result.step_s:.1f} s, {_fits(result.peak_nbytes, machine.device_nbytes)}, "
        f"{_fits(host, machine.host_nbytes)}"
    )


def _fits(nbytes: float, there: int) -> str:
    text = f"{nbytes / GIB:.0f}"
    return text if nbytes <= there else f"**{text}**"


def merits(margin: float, hidden_in_forward: bool, into_forward: bool):
    """Cells with floor / step, and bound / step."""

    def cell(workload: Workload, machine: Machine) -> str:
        tokens = workload.tokens(machine, WINDOW, True, hidden_in_forward, margin)
        result = step(workload, machine, tokens, into_forward)
        return f"{result.merit:.3f} ({result.floor.bound / result.step_s:.2f})"

    return cell


def chains(margin: float):
    """Cells with what binds, floor / step, and the longest chain / step."""

    def cell(workload: Workload, machine: Machine) -> str:
        result = step(workload, machine, workload.tokens(machine, WINDOW, True, True, margin), True)
        return f"{result.floor.binds} {result.merit:.3f} ({result.floor.chain / result.step_s:.3f})"

    return cell


def in_rows(part: Part) -> list[Part]:
    """A table cut by rows."""
    piece = replace(
        part,
        parameters=part.parameters // ROWS,
        active=part.active / ROWS,
        activation_nbytes=part.activation_nbytes / ROWS,
    )
    return [replace(piece, name=f"{part.name} {index}") for index in range(ROWS)]


def places(workload: Workload) -> Iterator[tuple[str, list[Part]]]:
    """Where the embedding and the head may be."""
    first, *blocks, last = workload.parts
    both = replace(first, parameters=first.parameters + last.parameters, resident=True)
    yield "a unit each", [first, *blocks, last]
    yield "both kept on the device, as one", [both, *blocks, replace(last, parameters=0, resident=True)]
    yield "embedding kept on the device", [replace(first, resident=True), *blocks, last]
    yield "head kept on the device", [first, *blocks, replace(last, resident=True)]
    yield f"embedding in {ROWS}", [*in_rows(first), *blocks, last]
    yield f"head in {ROWS}", [first, *blocks, *in_rows(last)]


def placement() -> str:
    """Seconds of a step, and the device's peak, for each place; as the runtime is, and with steps into forward."""
    columns = list(itertools.product(("llama3-8b", "qwen3-14b", "llama3-70b"), ("rtx4090", "h100")))
    rows: dict[str, list[str]] = {}
    for name, machine_name in columns:
        workload, machine = WORKLOADS[name], MACHINES[machine_name]
        for place, parts in places(workload):
            placed = replace(workload, parts=tuple(parts))
            compute = step(placed, machine, workload.tokens(machine, WINDOW, True, False, MARGIN), False)
            optimizer = step(placed, machine, workload.tokens(machine, WINDOW, True, True, MARGIN / 2), True)
            cell = f"{compute.step_s:.2f} s, {optimizer.step_s:.2f} s, {compute.peak_nbytes / GIB:.1f} GiB"
            rows.setdefault(place, []).append(cell)
    return table(["", *map(", ".join, columns)], [[place, *cells] for place, cells in rows.items()])


def report() -> str:
    """All of it."""
    sections = {
        f"1. Compute takes {MARGIN} times what hides behind it; the optimizer hides behind backward": (
            "floor / step (bound / step).",
            by_machine(merits(MARGIN, False, False)),
        ),
        "Its size": (
            "Tokens in a step, its time, GiB on the device, GiB on the host; what does not fit is bold.",
            by_machine(sizes),
        ),
        f"2. Compute takes {MARGIN} times what hides behind it; the optimizer hides behind forward too": (
            "floor / step (bound / step) as the runtime is:",
            by_machine(merits(MARGIN, True, False)),
            "With steps into forward:",
            by_machine(merits(MARGIN, True, True)),
        ),
        "3. Half of those tokens: the link or the optimizer binds": (
            "floor / step (bound / step) as the runtime is:",
            by_machine(merits(MARGIN / 2, True, False)),
            "With steps into forward: what binds, floor / step (chain / step):",
            by_machine(chains(MARGIN / 2)),
        ),
        "4. Where the embedding and the head are": (
            "Step at the tokens of 1 as the runtime is, step at those of 3 with steps into forward, device peak at 1.",
            placement(),
        ),
    }
    return "\n\n".join("\n\n".join((f"### {title}", *texts)) for title, texts in sections.items())


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
