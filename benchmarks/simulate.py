"""Simulate training steps of known models on known machines, and print how close each comes to its lower bound.

    python benchmarks/simulate.py [--machines]

The tables are those of docs/simulation.md; with --machines the one of docs/several-machines.md, in minutes. Nothing is
measured: machines are the profiles of sp_lightning/core/machine.py, models those of
sp_lightning/planning/workloads.py, the order of work is the runtime's.
"floor" in the tables is the lower bound of the step time.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

from sp_lightning.core.machine import GIB, MACHINES, Machine, with_cores
from sp_lightning.core.schedule import Schedule
from sp_lightning.core.simulation import LowerBound, Simulation, floor, simulate
from sp_lightning.core.unit_numbers import UnitNumbers, stepped_on_device
from sp_lightning.planning import plan
from sp_lightning.planning.forecast import speed_of
from sp_lightning.planning.workloads import WORKLOADS, Moved, Workload, WorkloadPart

WINDOW = 3
HOST_BYTES = 12 + 2 + 4  # per parameter: FP32 weight and moments, bf16 wire copy, FP32 gradient
MARGIN = 1.2
ROWS = 8
TOKENS = 4096
ADAMW_STATES = 2
SMALL = "llama-1b", "llama-3b"  # whose embedding, a unit, is as large as four to eight of their blocks
CHOICES = (  # name, k', parts of a unit
    ("as it is", 1, 1),
    ("two units exchanged at a time", 2, 1),
    ("each unit cut in 2", 1, 2),
    ("each unit cut in 8", 1, 8),
)


def step(workload: Workload, machine: Machine, tokens: int, runs_on: bool = True) -> Simulation:
    """Simulate one step with recompute, in which weights and gradients travel in bf16."""
    return simulated(workload.units(tokens), machine, runs_on=runs_on)


def simulated(units: list[UnitNumbers], machine: Machine, transfer: int = 1, runs_on: bool = True) -> Simulation:
    """Simulate one step over these units."""
    schedule = Schedule([unit.up_nbytes for unit in units], WINDOW, transfer)
    return simulate(units, schedule, machine, activations="recompute", steps_into_forward=runs_on)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_machine(cell) -> str:
    """Return a table with a row for each model and a column for each machine."""
    shown = {name: workload for name, workload in WORKLOADS.items() if name not in SMALL}
    rows = [[name, *(cell(workload, machine) for machine in MACHINES.values())] for name, workload in shown.items()]
    return table(["", *MACHINES], rows)


def sizes(workload: Workload, machine: Machine) -> str:
    """Return a cell with the tokens and seconds of a step, and the memory it takes."""
    tokens = workload.tokens(machine, WINDOW, True, False, MARGIN)
    result = step(workload, machine, tokens)
    host = workload.parameters * HOST_BYTES
    return (
        f"{tokens / 1e3:.1f}k, {result.step_s:.1f} s, {_fits(result.peak_nbytes, machine.device_nbytes)}, "
        f"{_fits(host, machine.host_nbytes)}"
    )


def _fits(nbytes: float, there: int) -> str:
    text = f"{nbytes / GIB:.0f}"
    return text if nbytes <= there else f"**{text}**"


def merits(margin: float, hidden_in_forward: bool, runs_on: bool = True):
    """Return a function that makes cells with floor / step, and bound / step."""

    def cell(workload: Workload, machine: Machine) -> str:
        tokens = workload.tokens(machine, WINDOW, True, hidden_in_forward, margin)
        result = step(workload, machine, tokens, runs_on)
        return f"{result.merit:.3f} ({result.floor.bound / result.step_s:.2f})"

    return cell


def chains(margin: float):
    """Return a function that makes cells with what binds, floor / step, and the most that the longest chain allows."""

    def cell(workload: Workload, machine: Machine) -> str:
        result = step(workload, machine, workload.tokens(machine, WINDOW, True, True, margin))
        return f"{result.floor.binds} {result.merit:.3f} ({most(result.floor, result.floor):.3f})"

    return cell


def most(floor: LowerBound, chained: LowerBound) -> float:
    """Return the most that floor / step can be: no step is shorter than its longest chain."""
    return min(1.0, floor.seconds / chained.chain)


def in_parts(units: list[UnitNumbers], count: int) -> list[UnitNumbers]:
    """Cut each unit into this many parts."""
    return [part for unit in units for part in itertools.repeat(_part(unit, count), count)]


def _part(unit: UnitNumbers, count: int) -> UnitNumbers:
    return replace(
        unit,
        up_nbytes=unit.up_nbytes // count,
        down_nbytes=unit.down_nbytes // count,
        parameters=unit.parameters // count,
        cast=unit.cast // count,
        forward_flops=unit.forward_flops / count,
        backward_flops=unit.backward_flops / count,
        forward_other=unit.forward_other / count,
        backward_other=unit.backward_other / count,
    )


def choices(workload: Workload) -> str:
    """Return a table of floor / step, and the most that the longest chain allows, by what a schedule may choose."""
    rows: dict[str, list[str]] = {}
    names = [name for name, machine in MACHINES.items() if _binds(workload, machine) != "compute"]
    for machine in map(MACHINES.__getitem__, names):
        units = workload.units(workload.tokens(machine, WINDOW, True, True, MARGIN / 2))
        floor = simulated(units, machine).floor
        for what, transfer, count in CHOICES:
            result = simulated(in_parts(units, count), machine, transfer)
            cell = f"{floor.seconds / result.step_s:.3f} ({most(floor, result.floor):.3f})"
            rows.setdefault(what, []).append(cell)
    return table(["", *names], [[what, *cells] for what, cells in rows.items()])


def _binds(workload: Workload, machine: Machine) -> str:
    return step(workload, machine, workload.tokens(machine, WINDOW, True, True, MARGIN / 2)).floor.binds


def fewer_tokens(workload: Workload) -> str:
    """Return a table of `chains` by the share of the tokens, from compute as long as the rest to very little of it."""
    shares = [1 / MARGIN, 1 / 2, 1 / 3, 1 / 4, 1 / 8]
    columns = [chains(MARGIN * share) for share in shares]
    rows = [[name, *(cell(workload, machine) for cell in columns)] for name, machine in MACHINES.items()]
    return table(["", *(f"{share:.2f}" for share in shares)], rows)


def in_rows(part: WorkloadPart) -> list[WorkloadPart]:
    """Cut an embedding table by rows."""
    piece = replace(
        part,
        parameters=part.parameters // ROWS,
        active=part.active / ROWS,
        activation_nbytes=part.activation_nbytes / ROWS,
        moved=tuple(Moved(*(nbytes / ROWS for nbytes in of_kind)) for of_kind in part.moved),
    )
    return [replace(piece, name=f"{part.name} {index}") for index in range(ROWS)]


def places(workload: Workload) -> Iterator[tuple[str, list[WorkloadPart]]]:
    """Yield the places where the embedding and the head may be, and the parts of the model then."""
    first, *blocks, last = workload.parts
    both = replace(first, parameters=first.parameters + last.parameters, resident=True)
    yield "a unit each", [first, *blocks, last]
    yield "both kept on the device, as one", [both, *blocks, replace(last, parameters=0, resident=True)]
    yield "embedding kept on the device", [replace(first, resident=True), *blocks, last]
    yield "head kept on the device", [first, *blocks, replace(last, resident=True)]
    yield f"embedding in {ROWS}", [*in_rows(first), *blocks, last]
    yield f"head in {ROWS}", [first, *blocks, *in_rows(last)]


def placement() -> str:
    """Return a table of the seconds of a step and the device's peak, for each place."""
    columns = list(itertools.product(("llama3-8b", "qwen3-14b", "llama3-70b"), ("rtx4090", "h100")))
    rows: dict[str, list[str]] = {}
    for name, machine_name in columns:
        workload, machine = WORKLOADS[name], MACHINES[machine_name]
        for place, parts in places(workload):
            placed = replace(workload, parts=tuple(parts))
            compute = step(placed, machine, workload.tokens(machine, WINDOW, True, False, MARGIN))
            optimizer = step(placed, machine, workload.tokens(machine, WINDOW, True, True, MARGIN / 2))
            cell = f"{compute.step_s:.2f} s, {optimizer.step_s:.2f} s, {compute.peak_nbytes / GIB:.1f} GiB"
            rows.setdefault(place, []).append(cell)
    return table(["", *map(", ".join, columns)], [[place, *cells] for place, cells in rows.items()])


CONSUMER = replace(MACHINES["rtx4090"], dram_bytes_per_s=100e9, host_bytes_per_s=100e9)
SERVER = replace(MACHINES["h100"], dram_bytes_per_s=400e9, host_bytes_per_s=400e9)


def floor_of_devices(machine: Machine, ranks: int, parameters: float = 8.03e9, units: int = 1000) -> float:
    """Return the lower bound of a step without compute, if devices share a host: of a model of many equal units."""
    nbytes, count = int(2 * parameters / units), int(parameters / units)
    costs = [UnitNumbers(str(unit), nbytes, nbytes, count, 0.0, 0.0) for unit in range(units)]
    return floor(costs, 1, machine, False, ranks).seconds


def several_devices() -> str:
    """Return a table of what several devices take that share a host, for a model of 8.03e9 parameters."""
    workload, tokens = WORKLOADS["llama3-8b"], 8192
    rows = []
    for ranks in (1, 2, 4, 8):
        bounds = [floor_of_devices(machine, ranks) for machine in (CONSUMER, SERVER)]
        compute = floor(workload.units(tokens), 1, CONSUMER, False)
        hides = tokens * bounds[0] / (compute.compute_forward + compute.compute_backward)
        row = [f"{bounds[0]:.1f} s", f"{hides / 1e3:.1f}k", f"{bounds[1]:.2f} s"]
        for machine in (CONSUMER, SERVER):
            units = workload.units(tokens)
            schedule = Schedule([unit.up_nbytes for unit in units], WINDOW)
            found = simulate(
                units,
                schedule,
                machine,
                activations="recompute",
                steps_into_forward=True,
                ranks=ranks,
            )
            row.append(f"{found.step_s:.1f} s, {found.floor.binds}")
        rows.append([str(ranks), *row])
    head = ["devices", "consumer: floor", "tokens that hide it", "server: floor", "consumer: step", "server: step"]
    return table(head, rows)


def step_places() -> str:
    """Return a table of steps on the host and on the device: by card, the host's cores, and when gradients are final.

    Gradients that are clipped are final after backward, and for their norm the device needs all of them once more.
    """
    units = WORKLOADS["llama3-8b"].units(TOKENS)

    def seconds(machine: Machine, on_device: bool, clips: bool) -> float:
        there = units
        if on_device:
            there = [
                replace(unit, step_up_nbytes=unit.step_up_nbytes + 4 * clips * unit.parameters)
                for unit in stepped_on_device(units, ADAMW_STATES, 4)
            ]
        schedule = Schedule([unit.up_nbytes for unit in there], WINDOW)
        options = {"optimizer_overlap": not clips, "steps_into_forward": True}
        return simulate(there, schedule, machine, activations="recompute", **options).step_s

    def cell(machine: Machine, clips: bool) -> str:
        host, device = (seconds(machine, on_device, clips) for on_device in (False, True))
        faster = f"**{host:.1f}** / {device:.1f}" if host < 0.98 * device else f"{host:.1f} / {device:.1f}"
        return f"{host:.1f} / **{device:.1f}**" if device < 0.98 * host else faster

    rows = []
    for name, machine in MACHINES.items():
        by_cores = [machine, with_cores(machine, 8), with_cores(machine, 4)]
        row = [cell(one, clips) for clips in (False, True) for one in by_cores]
        rows.append([name, f"{machine.up_bytes_per_s / 1e9:.0f}", f"{machine.dram_bytes_per_s / 1e9:.0f}", *row])
    head = ["", "link GB/s", "host memory GB/s", "all cores", "8 cores", "4 cores"]
    return table([*head, "clipped, all cores", "clipped, 8 cores", "clipped, 4 cores"], rows)


PLANNED = ("llama3-8b", 8), ("llama3-70b", 2)  # a model, and the devices of each machine
NETWORKS = "10Gb", "100Gb", "400Gb"
NODES = 1, 2, 4, 8
BATCHES = 1, 32  # that are accumulated


def several_machines() -> str:
    """Return a table of the tokens a second of all machines together, by their number and the line between them."""
    rows = []
    for (name, devices), batches, network in itertools.product(PLANNED, BATCHES, NETWORKS):
        row = [f"{name}, {devices} x h100", str(batches), f"{network.removesuffix('Gb')} Gbit/s"]
        for nodes in NODES:
            between = {"nodes": nodes, "network": network} if nodes > 1 else {}
            options = {"activations": "recompute", "window": WINDOW, "accumulate": batches}
            found = plan(name, TOKENS, precision="bf16-mixed", machine="h100", devices=devices, **between, **options)
            row.append(f"{speed_of(found)['tokens_per_s']:,.0f}" if found.fits else "does not fit")
        rows.append(row)
    return table(["each machine", "batches a step", "line", "one", *(f"{nodes} machines" for nodes in NODES[1:])], rows)


def report() -> str:
    """Return the whole report."""
    sections = {
        f"1. Compute takes {MARGIN} times what hides behind it; the optimizer hides behind backward": (
            "floor / step (bound / step).",
            by_machine(merits(MARGIN, False)),
        ),
        "Its size": (
            "Tokens in a step, its time, GiB on the device, GiB on the host; what does not fit is bold.",
            by_machine(sizes),
        ),
        f"2. Compute takes {MARGIN} times what hides behind it; the optimizer hides behind forward too": (
            "floor / step (bound / step):",
            by_machine(merits(MARGIN, True)),
            "Where the step may not run on beside the next forward:",
            by_machine(merits(MARGIN, True, False)),
        ),
        "3. Half of those tokens: the link or the optimizer binds": (
            "What binds, floor / step (what it can be at most: floor / chain):",
            by_machine(chains(MARGIN / 2)),
            "Where the step may not run on beside the next forward, floor / step (bound / step):",
            by_machine(merits(MARGIN / 2, True, False)),
            "The UNet where the optimizer binds, by what a schedule may choose, floor / step (floor / chain):",
            choices(WORKLOADS["sdxl"]),
            "The UNet with other shares of those tokens, what binds, floor / step (floor / chain):",
            fewer_tokens(WORKLOADS["sdxl"]),
        ),
        "4. Where the embedding and the head are": (
            "Step at the tokens of 1, step at those of 3, device peak at 1.",
            placement(),
        ),
        "5. Several devices over one host copy": (
            "8.03e9 parameters, AdamW. The floor leaves compute out; these tokens on each device hide it. Steps are "
            "llama3-8b's, with 8.2k tokens on each device and recompute.",
            "The consumer's host memory has 100 GB/s, the server's 400.",
            several_devices(),
        ),
        "6. The optimizer on the host or on the device": (
            f"Seconds of a step of llama3-8b with {TOKENS / 1e3:.1f}k tokens and recompute, AdamW in FP32, with "
            '`optimizer_device` "host" / "device"; the faster one is bold. "Clipped" holds for all that makes '
            "gradients final after backward only: a scaler, and a norm, for which they go up once more. With gradients "
            "accumulated over several batches the difference comes once in as many.",
            step_places(),
        ),
    }
    return "\n\n".join("\n\n".join((f"### {title}", *texts)) for title, texts in sections.items())


if __name__ == "__main__":
    sys.stdout.write((several_machines() if sys.argv[1:] == ["--machines"] else report()) + "\n")
