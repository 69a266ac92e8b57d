"""The result of planning: bytes term by term, times, and possible changes, in plain numbers and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..core import remedies
from ..core.machine import ENDURANCE, Machine
from ..core.simulation import Simulation
from ..errors import MemoryBudgetError
from ..options import Options, format_both, format_bytes, format_seconds

if TYPE_CHECKING:
    from ..memory.host_bytes import HostBytes

SLOW = 2.0  # times as long per sample: changes to the host that cost more come after those that cost less
MANY = 16  # batches to accumulate, that are named where a step of the optimizer takes most of the time


@dataclass(frozen=True)
class SweepPoint:
    """A window and a transfer size, with the device memory and the step time that they lead to."""

    window: int
    transfer: int
    nbytes: int  # on the device
    step_s: float


@dataclass(frozen=True)
class Change:
    """A change to the run, with the memory and the step time that it leads to."""

    what: str
    nbytes: int  # on the device then
    step_s: float
    samples: float = 1.0  # per step, as a multiple of the plan's
    host_nbytes: int | None = None  # on the host then; None: as planned
    bits: str = ""  # what it does to the numbers, if it frees host memory
    how: str = ""  # what to type for it
    accumulating_s: float | None = None  # as a plan's; None: not computed

    def batch_s(self, accumulate: int) -> float:
        """Return the mean time of a batch, of which this many are accumulated."""
        return mean_s(self.step_s, self.accumulating_s or 0.0, accumulate)

    def cost(self, plan: Plan, accumulate: int | None = None) -> float:
        """Return the time per sample, as a multiple of the plan's; with as many batches a step, or this many."""
        return self.batch_s(accumulate or plan.accumulate) / self.samples / plan.batch_s

    def describe(self, plan: Plan) -> str:
        """Describe the change for a message, with its memory and its cost."""
        nbytes = f"{format_bytes(self.nbytes)} on the device"
        if self.host_nbytes is not None:
            nbytes = f"{format_bytes(self.host_nbytes)} on the host"
        cost = f"{self.cost(plan):.2f} times as long per sample"
        if plan.accumulate == 1 and self.accumulating_s is not None and self.cost(plan) > SLOW:
            cost += f", or {self.cost(plan, MANY):.2f} times with accumulate_grad_batches={MANY}"
        said = "; ".join(filter(None, (f"{nbytes}, {format_seconds(self.step_s)} a step, {cost}", self.bits)))
        return f"{self.what} ({said})" + (f": {self.how}" if self.how else "")


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
    largest_batch: int | None  # rows that fit with this window; None if unknown
    sweep: tuple[SweepPoint, ...]
    changes: tuple[Change, ...]  # those that fit first, cheapest first; before them a loss in chunks (`first`)
    host_changes: tuple[Change, ...] = ()  # that free host memory, if the host has too little
    notes: tuple[str, ...] = ()
    flops: float = 0.0
    headroom: int = 0  # bytes of host memory that are left to the system
    devices: int = 1  # of the machine, which share the host's memory
    on_disk: int = 0  # bytes of state, and of weights that train, on a disk: read and written once in a step
    accumulating_s: float = 0.0  # seconds of a batch whose gradients are only added to those before it
    accumulate: int = 1  # batches in a step of the optimizer
    answer: int = 0  # tokens that are generated for each row: a step is one of them; 0 if the model is trained
    reading_s: float = 0.0  # seconds in which the prompts are read, and the first tokens made

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
        return self.disk_nbytes + self.simulation.state_read_nbytes

    @property
    def disk_s(self) -> float:
        """Seconds in which the disk reads these bytes."""
        return self.disk_read_nbytes / self.machine.disk_bytes_per_s

    @property
    def disk_written_nbytes(self) -> int:
        """Bytes that a step writes to the disk."""
        return self.simulation.state_written_nbytes

    @property
    def disk_written_s(self) -> float:
        """Seconds in which the disk writes these bytes."""
        return self.disk_written_nbytes / self.machine.disk_out_bytes_per_s

    @property
    def wear(self) -> str:
        """How many steps the rating of a drive allows, in a sentence; empty if nothing is written."""
        written = self.disk_written_nbytes
        if not written:
            return ""
        size = f"{written / 1e9:.3g} GB" if written < 1e12 else f"{written / 1e12:.3g} TB"
        return (
            f"a step writes {size} to the disk: {float(f'{ENDURANCE / written:.3g}'):,.0f} steps to "
            f"{ENDURANCE / 1e12:,.0f} TB, the rating of a consumer drive of 2 TB"
        )

    @property
    def chosen(self) -> dict[str, int]:
        """Sizes for `Handle.resume`, from which a run with automatic sizes starts."""
        others = self.device_nbytes - self.device_terms.get("window", 0) - self.device_terms.get("reserve", 0)
        return {"window": self.window, "transfer": self.transfer, "others_nbytes": others}

    @property
    def step_s(self) -> float:
        """Predicted seconds of a batch after which the optimizer steps."""
        return self.simulation.step_s

    @property
    def batch_s(self) -> float:
        """Predicted mean seconds of a batch, of which the last one of those accumulated takes `step_s`."""
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
        return min(self.simulation.floor.seconds, self.step_s)

    @property
    def binds(self) -> str:
        """Part that sets the lower bound: "compute", "link", "disk", "optimizer" or, with ranks, "host memory"."""
        return self.simulation.floor.binds

    @property
    def host_available(self) -> int:
        """Bytes of host memory for the run: all but the system's share, and no more than ``host_budget``."""
        nbytes = self.machine.host_nbytes - self.headroom
        return min(nbytes, self.options.host_budget or nbytes)  # "0B" is as little as can be had, no limit

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
        enough = [change for change in self.host_changes if self.makes_room(change)][:3]
        where, further = "what would fit: ", ""
        if not enough:
            where, further = "what would fit on the host: ", "; the device needs a smaller batch, too"
            enough = [change for change in self.host_changes if (change.host_nbytes or 0) <= self.host_available][:3]
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
            return f"nothing: compute takes {self.simulation.compute_s / self.step_s:.0%} of the step"
        faster = [change for change in self.changes if change.nbytes <= self.available and change.cost(self) < 0.95]
        best = min(faster, key=lambda change: change.cost(self), default=None)
        lanes = {
            "compute": floor.compute_forward + floor.compute_backward,
            "link": max(floor.up_forward + floor.up_backward, floor.down),
            "disk": floor.disk,
            "optimizer": floor.optimizer,
            "host memory": floor.host,
        }
        why = f"the {self.binds} takes {format_seconds(lanes[self.binds])} of a step of {format_seconds(self.step_s)}"
        if best is None:
            return f"nothing that was tried is faster; {why}"
        return f"{best.what}: {best.cost(self):.2f} times as long per sample, as {why}"

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
            "first": self.first,
            "sweep": [asdict(point) for point in self.sweep],
            "changes": [asdict(change) | {"cost": change.cost(self)} for change in self.changes],
            "host_changes": [asdict(change) | {"cost": change.cost(self)} for change in self.host_changes],
        }


def mean_s(step_s: float, accumulating_s: float, accumulate: int) -> float:
    """Return the mean time of a batch, if the optimizer steps after the last one of this many."""
    return (step_s + (accumulate - 1) * accumulating_s) / accumulate


def _listed(terms: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items() if nbytes)
