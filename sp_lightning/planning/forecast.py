"""The result of planning: bytes term by term, times, and possible changes, in plain numbers and sentences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import remedies
from ..core.machine import ENDURANCE, Machine
from ..core.simulation import Simulation
from ..errors import MemoryBudgetError
from ..options import Options, format_both, format_bytes, format_seconds

if TYPE_CHECKING:
    from ..core.unit_numbers import HostBytes

SLOW = 2.0  # times as long per sample: changes to the host that cost more come after those that cost less
MANY = 16  # batches to accumulate, that are named where a step of the optimizer takes most of the time
WIDTH = 120  # of tables that no terminal shows
SHOWN = 12  # most rows of the sweep in the table, beside the chosen one; --json has all


@dataclass(frozen=True)
class SweepPoint:
    """A window and a transfer size, with the device memory and the step time that they lead to."""

    window: int
    transfer: int
    nbytes: int  # on the device
    step_s: float


class RunTimes(NamedTuple):
    """The times of a run, in seconds."""

    step_s: float
    accumulating_s: float
    reading_s: float

    def batch_s(self, accumulate: int) -> float:
        """Return the mean time of a batch where this many are accumulated."""
        return mean_s(self.step_s, self.accumulating_s, accumulate)

    def answer_s(self, tokens: int) -> float:
        """Return the time of answers of this many tokens."""
        return self.reading_s + (tokens - 1) * self.step_s


@dataclass(frozen=True)
class Change:
    """A change to the run, with the memory and the step time that it leads to."""

    what: str
    nbytes: int  # on the device then
    step_s: float  # with enough memory, if that is too many
    window: int
    transfer: int
    samples: float = 1.0  # per step, as a multiple of the plan's
    host_nbytes: int | None = None  # on the host then; None: as planned
    bits: str = ""  # what it does to the numbers, if it frees host memory
    how: str = ""  # what to type for it
    accumulating_s: float | None = None  # as a plan's; None: not computed
    many_s: float | None = None  # mean seconds of a batch, of which `MANY` are accumulated; None: not computed
    written_nbytes: int = 0  # by a step, to a disk that the run has with this change alone

    def batch_s(self, accumulate: int) -> float:
        """Return the mean time of a batch where this many are accumulated."""
        return mean_s(self.step_s, self.accumulating_s or 0.0, accumulate)

    def cost(self, plan: Plan) -> float:
        """Return the time per sample, as a multiple of the plan's.

        Where the plan does not fit, its time is that which it would have with enough memory.
        """
        return self.batch_s(plan.accumulate) / self.samples / plan.with_memory.batch_s(plan.accumulate)

    def describe(self, plan: Plan) -> str:
        """Describe the change for a message, with its memory and its cost."""
        nbytes = f"{format_bytes(self.nbytes)} on the device"
        if self.host_nbytes is not None:
            nbytes = f"{format_bytes(self.host_nbytes)} on the host"
        cost = f"{self.cost(plan):.2f} times as long per sample"
        if self.many_s is not None and self.cost(plan) > SLOW:
            many = self.many_s / self.samples / plan.with_memory.batch_s(plan.accumulate)
            cost += f", or {many:.2f} times with accumulate_grad_batches={MANY}"
        figures = f"{nbytes}, {format_seconds(self.step_s)} a step, {cost}"
        said = "; ".join(filter(None, (figures, self.bits, wear_of(self.written_nbytes))))
        return f"{self.what} ({said})" + (f": {self.how}" if self.how else "")


@dataclass(frozen=True)
class LockstepPlan:
    """The predicted memory and time of calls in lockstep, each with a plan's batch."""

    cache: str  # where keys and values wait: "device" or "host"
    at_once: int
    window: int
    device_terms: dict[str, int]
    fits: bool
    first_s: float  # seconds to the first token
    token_s: float  # of each further one, for every row
    tokens_per_s: float  # of all rows of the calls under way, once prompts are read
    weights_per_token: float  # bytes of weights that travel for a token

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device, all terms together."""
        return sum(self.device_terms.values())


@dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a run."""

    model: str
    parameters: int
    trained: int  # parameters that train
    rows: int  # of the batch, on each device
    counted: str  # what `rows` counts: "rows" or "tokens"
    precision: str
    machine: Machine
    options: Options
    window: int
    transfer: int
    units: tuple[str, ...]  # names of those that stream
    device_terms: dict[str, int]
    host: HostBytes
    available: int  # bytes on the device
    simulation: Simulation
    largest_window: int  # that fits; 0 if none does
    largest_batch: int | None  # rows that fit; None if unknown
    with_memory: RunTimes  # of the window that would be chosen with enough device memory: this one's, if it fits
    sweep: tuple[SweepPoint, ...]
    changes: tuple[Change, ...]  # those that fit first, cheapest first; before them a loss in chunks (`first`)
    host_changes: tuple[Change, ...] = ()  # that free host memory, if the host has too little
    notes: tuple[str, ...] = ()
    flops: float = 0.0
    headroom: int = 0  # bytes of host memory that are left to the system
    devices: int = 1  # of the machine, which share the host's memory
    nodes: int = 1  # such machines
    on_disk: int = 0  # bytes on a disk, of what trains: written in a step (`Requirements.on_disk`)
    accumulating_s: float = 0.0  # seconds of a batch whose gradients are only added to those before it
    accumulate: int = 1  # batches in a step of the optimizer
    answer: int = 0  # tokens that are generated for each row: a step is one of them; 0 if the model is trained
    reading_s: float = 0.0  # seconds in which the prompts are read, and the first tokens made
    weights_dtype: str = ""  # of most weights, where a precision of "32-true" leaves them in another type than FP32
    lockstep: tuple[LockstepPlan, ...] = ()  # of several such batches, with each place of the cache
    before_s: float = 0.0  # seconds of a batch in which answers are generated and scored, before its step
    before_floor_s: float = 0.0  # lower bound of them
    shards: int = 1  # devices among which layers are cut: each such group has one batch
    mesh_nbytes: int = 0  # bytes that each device sends to those with other shards in a step
    gradients_on_disk: int = 0  # bytes of `on_disk` that are written also where gradients are only added to

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device, all terms together."""
        return sum(self.device_terms.values())

    @property
    def disk_nbytes(self) -> int:
        """Bytes of weights that a step reads from their files."""
        return self.simulation.disk_nbytes

    @property
    def disk_read_nbytes(self) -> int:
        """Bytes that a step reads from the disk, the optimizer's state included."""
        return self.disk_nbytes + self.simulation.state_read_nbytes + self.simulation.activations_on_disk

    @property
    def disk_s(self) -> float:
        """Seconds in which the disk reads these bytes."""
        return self.disk_read_nbytes / self.machine.disk_bytes_per_s

    @property
    def disk_written_nbytes(self) -> int:
        """Bytes that a step writes to the disk."""
        return self.simulation.state_written_nbytes + self.simulation.activations_on_disk

    @property
    def disk_written_s(self) -> float:
        """Seconds in which the disk writes these bytes."""
        return self.disk_written_nbytes / self.machine.disk_out_bytes_per_s

    @property
    def network_nbytes(self) -> int:
        """Bytes that each machine sends to the others in a step."""
        floor, rate = self.simulation.floor, self.machine.network_bytes_per_s
        return 0 if self.nodes == 1 else round((floor.network + floor.first_network + floor.new_weights) * rate)

    @property
    def wear(self) -> str:
        """How many steps the rating of a drive allows, in a sentence; empty if nothing is written."""
        of_each = self.gradients_on_disk + self.simulation.activations_on_disk
        return wear_of(self.disk_written_nbytes + (self.accumulate - 1) * of_each)

    @property
    def chosen(self) -> dict[str, int]:
        """Sizes for `Handle.resume`, from which a run with automatic sizes starts."""
        others = self.device_nbytes - self.device_terms.get("window", 0) - self.device_terms.get("reserve", 0)
        return {"window": self.window, "transfer": self.transfer, "others_nbytes": others}

    @property
    def step_s(self) -> float:
        """Predicted seconds of a batch after which the optimizer steps, with what comes before it."""
        return self.before_s + self.simulation.step_s

    @property
    def batch_s(self) -> float:
        """Predicted mean seconds of a batch: the last of those that are accumulated takes `step_s`."""
        return mean_s(self.step_s, self.accumulating_s, self.accumulate)

    @property
    def answer_s(self) -> float:
        """Seconds of the answers to a batch of prompts."""
        return self.reading_s + (self.answer - 1) * self.step_s

    @property
    def _doing(self) -> str:
        return "generating with" if self.answer else "training"

    @property
    def floor_s(self) -> float:
        """Lower bound of the step time in seconds, never more than the predicted step.

        The bound counts the first unit's way up separately; where the optimizer binds, that may run beside the steps
        of other units.
        """
        return min(self.before_floor_s + self.simulation.floor.seconds, self.step_s)

    @property
    def binds(self) -> str:
        """Part that sets the lower bound, as in a simulation's."""
        return self.simulation.floor.binds

    @property
    def host_available(self) -> int:
        """Bytes of host memory for the run: all but the system's share, and no more than ``host_budget``."""
        return int(min(self.machine.host_nbytes - self.headroom, self.options.host_limit))

    @property
    def fits_host(self) -> bool:
        """Whether the run fits on the host."""
        return self.host.total <= self.host_available

    @property
    def fits(self) -> bool:
        """Whether the run fits on both device and host."""
        return self.device_nbytes <= self.available and self.fits_host

    def check(self) -> None:
        """Raise MemoryBudgetError if the run does not fit: with its needs, what is available, and what would fit."""
        if not self.fits_host:
            raise MemoryBudgetError(
                f"{self._doing} {self.model} needs {format_bytes(self.host.total)} of host memory "
                f"({_listed(asdict(self.host))}), and {self.machine.name} has {self.host_memory()}; "
                f"{self._host_remedies()}"
            )
        if self.device_nbytes > self.available:
            needed, available = format_both(self.device_nbytes, self.available)
            raise MemoryBudgetError(
                f"{self._doing} {self.model} needs {needed} on the device with window "
                f"{self.window} and {self.rows} {self.counted}, but {available} are available; " + self._remedies()
            )

    def host_memory(self) -> str:
        """Describe the host memory that there is, and what of it is left to the system."""
        if self.host_available == self.options.host_budget:
            return f"a host budget of {format_bytes(self.host_available)}"
        if not self.headroom:
            return format_bytes(self.machine.host_nbytes)
        whole, headroom = format_bytes(self.machine.host_nbytes), format_bytes(self.headroom)
        return f"{format_bytes(self.host_available)} ({whole} less {headroom} for the system)"

    def _remedies(self) -> str:
        fitting = [change for change in self.changes if change.nbytes <= self.available][:3]
        if not fitting:
            return "no window, policy or batch that was tried fits: name smaller units, or use a larger device"
        return "what would fit: " + "; ".join(change.describe(self) for change in fitting)

    def _host_remedies(self) -> str:
        enough = _few([change for change in self.host_changes if self.makes_room(change)])
        where, further = "what would fit: ", ""
        if not enough:
            where, further = "what would fit on the host: ", "; the device needs a smaller batch, too"
            enough = _few([one for one in self.host_changes if (one.host_nbytes or 0) <= self.host_available])
        if not enough:
            return "nothing that was tried fits: use a host with more memory, or a smaller model"
        return where + "; ".join(change.describe(self) for change in enough) + further

    def makes_room(self, change: Change) -> bool:
        """Whether the run fits with this change, on both device and host."""
        host_nbytes = self.host.total if change.host_nbytes is None else change.host_nbytes
        return change.nbytes <= self.available and host_nbytes <= self.host_available

    @property
    def first(self) -> str:
        """Sentence that says what to change first."""
        if not self.fits_host:
            return self._host_remedies()
        if not self.fits:
            return self._remedies()
        floor = self.simulation.floor
        if self.changes and self.changes[0].what == remedies.LOSS_IN_CHUNKS.what:  # logits are the largest term
            chunks = self.changes[0]
            sizes = f"{format_bytes(chunks.nbytes)} instead of {format_bytes(self.device_nbytes)} on the device"
            return f"{chunks.what}: {sizes}, {chunks.cost(self):.2f} times as long per sample, and room for more rows"
        if self.binds == "compute" and self.simulation.merit > 0.9:
            return f"nothing: compute takes {self.simulation.compute_s / self.simulation.step_s:.0%} of the step"
        faster = [change for change in self.changes if change.nbytes <= self.available and change.cost(self) < 0.95]
        best = min(faster, key=lambda change: change.cost(self), default=None)
        lanes = {
            "compute": floor.compute_forward + floor.compute_backward,
            "link": max(floor.up_forward + floor.up_backward, floor.down, floor.link),
            "disk": floor.disk,
            "optimizer": floor.optimizer,
            "host memory": floor.host,
            "network": floor.network + floor.first_network + floor.new_weights,
        }
        step_s, binding_s = self.simulation.step_s, lanes[self.binds]
        why = f"the {self.binds} takes {format_seconds(binding_s)} of a step of {format_seconds(step_s)}"
        if self.before_s > step_s:
            why = f"answers and their scores take {format_seconds(self.before_s)} of {format_seconds(self.step_s)}"
        if best is None:
            return f"nothing that was tried is faster; {why}"
        return f"{best.what}: {best.cost(self):.2f} times as long per sample, as {why}"

    def __str__(self) -> str:
        """Return what the command prints."""

        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        options = asdict(self.options)
        options["units"] = options["units"] if isinstance(options["units"], str | tuple) else "callable"
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return shown | {
            "machine": asdict(self.machine),
            "options": options,
            "host": asdict(self.host) | {"total": self.host.total},
            "device_nbytes": self.device_nbytes,
            "simulation": asdict(self.simulation) | {"timeline": [list(span) for span in self.simulation.timeline]},
            "step_s": self.step_s,
            "floor_s": self.floor_s,
            "binds": self.binds,
            "fits": self.fits,
            "host_available": self.host_available,
            "disk_nbytes": self.disk_nbytes,
            "disk_read_nbytes": self.disk_read_nbytes,
            "disk_written_nbytes": self.disk_written_nbytes,
            "network_nbytes": self.network_nbytes,
            "first": self.first,
            "sweep": [asdict(point) for point in self.sweep],
            "lockstep": [asdict(calls) | {"device_nbytes": calls.device_nbytes} for calls in self.lockstep],
            "changes": [asdict(change) | {"cost": change.cost(self)} for change in self.changes],
            "host_changes": [asdict(change) | {"cost": change.cost(self)} for change in self.host_changes],
        }


def mean_s(step_s: float, accumulating_s: float, accumulate: int) -> float:
    """Return the mean time of a batch, if the optimizer steps after the last one of this many."""
    return (step_s + (accumulate - 1) * accumulating_s) / accumulate


def wear_of(written: int) -> str:
    """Describe how many steps a drive's rating allows, if each writes these bytes; empty if there are none."""
    if not written:
        return ""
    size = f"{written / 1e9:.3g} GB" if written < 1e12 else f"{written / 1e12:.3g} TB"
    return (
        f"a step writes {size} to the disk: {float(f'{ENDURANCE / written:.3g}'):,.0f} steps to "
        f"{ENDURANCE / 1e12:,.0f} TB, the rating of a consumer drive of 2 TB"
    )


def _few(changes: Sequence[Change]) -> list[Change]:
    """Return the first three of changes that make room, and the first with a disk, which may be slower."""
    return [*changes[:3], *[change for change in changes[3:] if change.written_nbytes][:1]]


def _listed(terms: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items() if nbytes)


# ---- a plan as text: what the command prints, and ``print(plan)``


def speed_of(
    plan: Plan, rows: int | None = None, tokens: int | None = None, steps: int | None = None
) -> dict[str, float]:
    """Compute the speed and, for a number of steps, the length of the whole run.

    Args:
        plan: The plan.
        rows: Rows in a step of the optimizer, of all machines; by default the plan's, which may be tokens.
        tokens: Tokens in a row, if it is text.
        steps: Steps of the optimizer, or batches of prompts.
    """
    count = plan.rows * plan.accumulate * plan.devices // plan.shards * plan.nodes if rows is None else rows
    times = plan.with_memory
    step_s = times.answer_s(plan.answer) if plan.answer else plan.accumulate * times.batch_s(plan.accumulate)
    if rows is None and plan.counted == "tokens":
        return {"tokens_per_s": count / step_s}
    speed: dict[str, float] = {"rows_per_s": count / step_s}
    if tokens := plan.answer or tokens:
        speed["tokens_per_s"] = count * tokens / step_s
    if steps is not None:
        speed |= {"steps": steps, "hours": steps * step_s / 3600}
    return speed


def text(
    plan: Plan, note: str = "", run: Mapping[str, float] | None = None, tokens: int | None = None, width: int = WIDTH
) -> str:
    """Return all that is known of a run, in tables and sentences.

    Args:
        plan: The plan.
        note: What was not measured.
        run: Speed and length, as `speed_of` computes them.
        tokens: Tokens in a row, to fill into commands.
        width: Columns of the tables.
    """
    from rich.console import Console

    run = speed_of(plan) if run is None else run
    console = Console(highlight=False, width=width, color_system=None, force_terminal=False)
    with console.capture() as printed:
        _print(console, plan, note, run, tokens)
    return printed.get().rstrip("\n")


def _print(console: Any, plan: Plan, note: str, run: Mapping[str, float], tokens: int | None) -> None:
    console.print(_heading(plan), markup=False, soft_wrap=True)
    if plan.lockstep:
        console.print()
        console.print(_lockstep_table(plan))
        console.print("\nOne call alone, as in the first lines:", markup=False)
    for table in (_bytes_table(plan), _time_table(plan), _sweep_table(plan), _changes_table(plan, run)):
        console.print()
        console.print(table)
    console.print()
    for line in [*plan.notes, note] if note else plan.notes:
        console.print(f"Not measured: {line}" if line == note else f"Note: {line}", markup=False, soft_wrap=True)
    if plan.wear:
        console.print(f"Wear: {plan.wear}", markup=False, soft_wrap=True)
    console.print(_speed(plan, run), markup=False, soft_wrap=True)
    # What is in parentheses stays in its line.
    change, *others = (_filled(said, plan, tokens) for said in re.split(r"; (?![^(]*\))", plan.first))
    console.print(
        f"Change first: {change}", *(f"- {other}" for other in others), sep="\n", markup=False, soft_wrap=True
    )


def _filled(said: str, plan: Plan, tokens: int | None) -> str:
    """Fill the batch into a command that a change names (`HostRemedy.how`)."""
    if tokens is None:
        return said
    rows = plan.rows if plan.counted == "rows" else plan.rows // tokens
    return said.replace("block_size TOKENS", f"block_size {tokens}").replace("batch_size ROWS", f"batch_size {rows}")


def _speed(plan: Plan, run: Mapping[str, float]) -> str:
    unit = "tokens" if "tokens_per_s" in run else "rows"
    alone = " of one call alone" if plan.lockstep else ""
    text = f"Speed{alone}{'' if plan.fits else ', if it fitted'}: {run[f'{unit}_per_s']:.3g} {unit} a second"
    if "hours" in run:
        long = run["hours"] >= 0.1
        text += f"; {run['steps']} steps take "
        text += f"{run['hours']:.3g} hours" if long else format_seconds(3600 * run["hours"])
    return text + (f" and cost {run['cost']:.2f}" if "cost" in run else "")


def _heading(plan: Plan) -> str:
    fits = "fits" if plan.fits else "DOES NOT FIT"
    several = f"{plan.devices} x " if plan.devices > 1 else ""
    each = " each" if plan.devices * plan.nodes > 1 else ""
    of_each = (f" for each {plan.shards} devices" if plan.devices > plan.shards else "") if plan.shards > 1 else each
    machines = f"{plan.nodes} machines with {several or '1 x '}" if plan.nodes > 1 else several
    answers = f"answers of {plan.answer} tokens"
    cut = f", layers cut among {plan.shards}" if plan.shards > 1 else ""
    doing = answers if plan.answer else f"activations {plan.options.activations!r}"
    weights = f" with weights in {plan.weights_dtype}" if plan.weights_dtype else ""
    return (
        f"{plan.model}: {_count(plan.parameters)} parameters, batch of {plan.rows} {plan.counted}{of_each}, "
        f"{plan.precision}{weights}, {doing}\n"
        f"on {machines}{plan.machine.name}{cut}: "
        f"window {plan.window} of {len(plan.units)} units, transfer {plan.transfer}: "
        f"{format_bytes(plan.device_nbytes)} of {format_bytes(plan.available)} on {'each' if each else 'the'} device, "
        f"{format_bytes(plan.host.total)} of {plan.host_memory()} on {'each' if plan.nodes > 1 else 'the'} host: {fits}"
    )


def _count(number: int) -> str:
    power = next(power for power in (9, 6, 3, 0) if number >= 10**power or not power)
    return f"{number / 10**power:.3g}e{power}" if power else str(number)


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    return table


def _bytes_table(plan: Plan) -> Any:
    table = _table("Memory", "device", "", "host", "")
    device = [*plan.device_terms.items(), ("total", plan.device_nbytes)]
    host = [(name.replace("_", " "), nbytes) for name, nbytes in asdict(plan.host).items() if nbytes]
    host.append(("total", plan.host.total))
    if on_disk := plan.on_disk + plan.simulation.activations_on_disk:
        host.append(("on disk", on_disk))
    for left, right in itertools.zip_longest(device, host, fillvalue=("", None)):
        cells = (
            text for name, nbytes in (left, right) for text in (name, "" if nbytes is None else format_bytes(nbytes))
        )
        table.add_row(*cells)
    return table


def _clock(plan: Plan) -> tuple[str, Callable[[float], str]]:
    """Return the time unit that suits the step, and a function that writes times in it."""
    unit, per_s = ("s", 1.0) if plan.step_s >= 1 else ("ms", 1e3)
    return unit, lambda seconds: f"{seconds * per_s:.4g}"


def _time_table(plan: Plan) -> Any:
    unit, time = _clock(plan)
    table = _table("Time of a token for each row" if plan.answer else "Time of a step", "", unit)
    if plan.answer:
        table.add_row("reading the prompts, and the first token", time(plan.reading_s))
    table.add_row("predicted", time(plan.step_s))
    if plan.before_s:
        table.add_row("of that, generating answers and scoring them", time(plan.before_s))
    table.add_row(f"lower bound, set by the {plan.binds}", time(plan.floor_s))
    if plan.disk_read_nbytes:
        table.add_row(f"reading {format_bytes(plan.disk_read_nbytes)} from files", time(plan.disk_s))
        if plan.disk_written_nbytes:
            table.add_row(f"writing {format_bytes(plan.disk_written_nbytes)} to files", time(plan.disk_written_s))
    if plan.network_nbytes:
        sent = plan.network_nbytes / plan.machine.network_bytes_per_s
        table.add_row(f"sending {format_bytes(plan.network_nbytes)} to other machines", time(sent))
    table.add_row("compute", time(plan.simulation.compute_s))
    if plan.mesh_nbytes:
        sent = plan.mesh_nbytes / plan.machine.mesh_bytes_per_s
        table.add_row(f"of that, sending {format_bytes(plan.mesh_nbytes)} to devices with other shards", time(sent))
    for lane, seconds in plan.simulation.stall_s.items():
        table.add_row(f"waiting: {lane}", time(seconds))
    batch = "not known" if plan.largest_batch is None else str(plan.largest_batch)
    table.add_row("largest window that fits", str(plan.largest_window))
    table.add_row("largest batch that fits", batch)
    return table


def _sweep_table(plan: Plan) -> Any:
    unit, time = _clock(plan)
    table = _table("Windows and transfers", "window", "transfer", "device", unit, "")
    shown = [point for point in plan.sweep if point.transfer in (1, plan.transfer)]
    step = max(1, -(-len(shown) // SHOWN))
    for number, point in enumerate(shown):
        chosen = (point.window, point.transfer) == (plan.window, plan.transfer)
        if chosen or number % step == 0:
            mark = "chosen" if chosen else "" if point.nbytes <= plan.available else "too large"
            table.add_row(str(point.window), str(point.transfer), format_bytes(point.nbytes), time(point.step_s), mark)
    return table


def _lockstep_table(plan: Plan) -> Any:
    columns = "at once", "window", "device", "first token", "each further", "tokens/s", "weights for a token", ""
    table = _table(f"Calls in lockstep, of {plan.rows} rows each", "keys and values", *columns)
    for calls in plan.lockstep:
        table.add_row(
            f"on the {calls.cache}",
            str(calls.at_once),
            str(calls.window),
            format_bytes(calls.device_nbytes),
            format_seconds(calls.first_s),
            format_seconds(calls.token_s),
            f"{calls.tokens_per_s:.3g}",
            format_bytes(round(calls.weights_per_token)),
            "" if calls.fits else "too large",
        )
    return table


def _changes_table(plan: Plan, run: Mapping[str, float]) -> Any:
    unit, time = _clock(plan)
    hours = ["hours"] if "hours" in run else []  # of the whole run
    table = _table("Possible changes", "", "device", "host", unit, "time per sample", *hours, "")
    for change in (*plan.changes, *plan.host_changes):
        host = "" if change.host_nbytes is None else format_bytes(change.host_nbytes)
        mark = "" if plan.makes_room(change) else "too large"
        cost = change.cost(plan)
        long = [f"{cost * run['hours']:.3g}"] if hours else []
        table.add_row(change.what, format_bytes(change.nbytes), host, time(change.step_s), f"{cost:.2f}x", *long, mark)
    return table
