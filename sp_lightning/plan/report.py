"""A plan: the answers, as numbers and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..host.machine import headroom
from ..options import Options, format_bytes, format_seconds
from .machines import Machine
from .step import GRADIENTS, ROOT, WINDOW


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to plan. The arguments are those of `sp_lightning.plan`."""

    options: Options
    precision: str
    machine: Machine
    accumulate: int = 1
    clip: bool = False
    copies: int = 0
    devices: int = 1
    nodes: int = 1
    rows: int | None = None  # of the batch; None: as it was given

    @property
    def host_available(self) -> int:
        """Bytes of host memory that the run may have."""
        nbytes = self.machine.host_nbytes
        return int(min(nbytes - headroom(nbytes), self.options.host_limit))

    def changed(self, **changes: Any) -> Job:
        """Return this job with other arguments, or other options of the strategy, by name."""
        options = {one.name: changes.pop(one.name) for one in fields(Options) if one.name in changes}
        return replace(self, options=replace(self.options, **options), **changes)


@dataclass(frozen=True)
class Change:
    """A change to the run, and its price."""

    what: str
    cost: str  # what it does to the numbers
    device_nbytes: int
    host_nbytes: int
    step_s: float
    slower: float  # how many times as long a sample takes

    def __str__(self) -> str:
        sizes = f"{format_bytes(self.device_nbytes)} on the device, {format_bytes(self.host_nbytes)} on the host"
        price = f"{sizes}, {format_seconds(self.step_s)} a step, {self.slower:.2f} times as long per sample"
        return f"{self.what} ({price}{'; ' + self.cost if self.cost else ''})"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The needs of a run, the time of its steps, and what to change. Bytes on the device are each device's."""

    job: Job
    model: str
    parameters: int
    trained: int
    rows: int
    tokens: int | None  # in a row, if it consists of tokens
    window: int
    transfer: int
    units: tuple[str, ...]  # names of the units that stream
    device_terms: dict[str, int]
    host_terms: dict[str, int]
    disk: dict[str, int]  # bytes in files, and what a step reads and writes of them
    step_s: float
    lanes: dict[str, float]  # seconds for which each lane is busy in a step
    changes: tuple[Change, ...] = ()
    tried: tuple[str, ...] = ()  # all changes that were planned, useful or not

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device at the fullest moment of a step."""
        return sum(self.device_terms.values())

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(self.host_terms.values())

    @property
    def fits_device(self) -> bool:
        """Whether the device has room for all terms, and ``memory_budget`` for weights and gradients."""
        budget = self.job.options.memory_budget
        weights = sum(self.device_terms.get(name, 0) for name in (WINDOW, ROOT, GRADIENTS))
        return self.device_nbytes <= self.job.machine.device_nbytes and (budget is None or weights <= budget)

    @property
    def fits_host(self) -> bool:
        """Whether the host has room."""
        return self.host_nbytes <= self.job.host_available

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.fits_device and self.fits_host

    @property
    def bound_by(self) -> str:
        """The lane that is busiest in a step."""
        return max(self.lanes, key=self.lanes.__getitem__)

    @property
    def speed(self) -> dict[str, float]:
        """The rows per second of all devices and, where they consist of tokens, the tokens per second."""
        rows = self.rows * self.job.accumulate * self.job.devices * self.job.nodes / self.step_s
        return {"rows_per_s": rows} | ({"tokens_per_s": rows * self.tokens} if self.tokens else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of plain values."""
        computed = "device_nbytes", "host_nbytes", "fits_device", "fits_host", "fits", "bound_by", "speed"
        return asdict(self) | {name: getattr(self, name) for name in computed}

    def __str__(self) -> str:
        """Return the plan as the command prints it."""
        job, fits = self.job, "fits"
        several = f"{job.nodes} machines with " * (job.nodes > 1) + f"{job.devices} x " * (job.devices > 1)
        if not self.fits:
            place, of_place = ("host", self.host_terms) if self.fits_device else ("device", self.device_terms)
            worst = max(of_place, key=of_place.__getitem__)
            fits = f"DOES NOT FIT: on the {place}, most for {worst}, {format_bytes(of_place[worst])}"
        lines = [
            f"{self.model}: {_count(self.parameters)} parameters, of which {_count(self.trained)} train, batch of "
            f"{self.rows} rows, {job.precision}, "
            f"activations {job.options.activations!r}",
            f"on {several}{job.machine.name}: window {self.window} of {len(self.units)} units, transfer "
            f"{self.transfer}: {format_bytes(self.device_nbytes)} of {format_bytes(job.machine.device_nbytes)} on the "
            f"device, {format_bytes(self.host_nbytes)} of {format_bytes(job.host_available)} on the host: {fits}",
        ]
        disk = self.disk if self.disk["there"] else {}
        for title, terms in (("Device", self.device_terms), ("Host", self.host_terms), ("Disk, in a step", disk)):
            shown = [f"  {name:24}{format_bytes(nbytes):>12}" for name, nbytes in terms.items()]
            lines += ["", f"{title}:", *shown] if shown else []
        busy = ", ".join(f"{lane} {format_seconds(seconds)}" for lane, seconds in self.lanes.items() if seconds)
        speed = ", ".join(f"{value:.3g} {name.split('_')[0]}" for name, value in self.speed.items())
        lines += ["", f"A step takes {format_seconds(self.step_s)}, bound by {self.bound_by} (busy: {busy})"]
        lines += [f"Speed{'' if self.fits else ', if it fitted'}: {speed} a second"]
        title = "Change:" if self.fits else "Would fit:"
        nothing = f"Nothing {'faster' if self.fits else 'that fits'} was found among: {'; '.join(self.tried)}"
        offers = [title, *(f"- {change}" for change in self.changes)] if self.changes else [nothing]
        return "\n".join([*lines, *offers])


def _count(parameters: int) -> str:
    """Format a number of parameters: "8.03e9", "42.1e6"."""
    return f"{parameters / 1e9:.3g}e9" if parameters >= 1e8 else f"{parameters / 1e6:.3g}e6"
