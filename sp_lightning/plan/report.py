"""A plan: the answers, as numbers and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core.unit_numbers import HostBytes
from ..errors import MemoryBudgetError
from ..options import Options, format_both, format_bytes, format_seconds
from .host import OnDisk
from .machines import Machine
from .step import StepTime

ENDURANCE = 1200e12  # bytes that a consumer drive of 2 TB is rated to be written
FEWER = "name smaller units, or use a device with more memory"


@dataclass(frozen=True)
class Change:
    """A change to the run, and its price."""

    what: str
    detail: str  # what it does to the numbers, or costs
    nbytes: int  # on the device
    host_nbytes: int
    step_s: float
    samples: float  # in a step, for each one of the plan's
    window: int

    def cost(self, plan: Plan) -> float:
        """Return how many times as long a sample takes."""
        return self.step_s / self.samples / plan.step_s

    def described(self, plan: Plan) -> str:
        """Describe the change with its price."""
        sizes = f"{format_bytes(self.nbytes)} on the device, {format_bytes(self.host_nbytes)} on the host"
        price = f"{sizes}, {format_seconds(self.step_s)} a step, {self.cost(plan):.2f} times as long per sample"
        return f"{self.what} ({price}{'; ' + self.detail if self.detail else ''})"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The needs of a run, the time of its steps, and what to change. Bytes on the device are each device's."""

    model: str
    parameters: int
    trained: int
    rows: int
    precision: str
    machine: Machine
    options: Options
    window: int
    transfer: int
    units: tuple[str, ...]  # that stream
    device_terms: dict[str, int]
    bytes_up: int  # of weights, in a step after the first
    loaded: int  # of these, from files
    host: HostBytes
    disk: OnDisk
    available: int  # bytes of the device
    host_available: int
    headroom: int  # bytes of host memory that are left to the system
    time: StepTime  # of a step of the optimizer or, of answers, of a token for each row
    reading_s: float  # of the prompts of an answer
    answer: int  # tokens of each answer; 0 for training
    accumulate: int
    devices: int
    nodes: int
    largest_batch: int | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device at the fullest moment of a step."""
        return sum(self.device_terms.values())

    @property
    def fits_device(self) -> bool:
        """Whether the device has room."""
        return self.device_nbytes <= self.available

    @property
    def fits_host(self) -> bool:
        """Whether the host has room."""
        return self.host.total <= self.host_available

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.fits_device and self.fits_host

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.seconds

    @property
    def chosen(self) -> dict[str, int]:
        """Sizes for `Handle.resume`, from which a run with automatic sizes starts."""
        others = self.device_nbytes - self.device_terms.get("window", 0) - self.device_terms.get("reserve", 0)
        return {"window": self.window, "transfer": self.transfer, "others_nbytes": others}

    @property
    def rows_per_s(self) -> float:
        """Rows a second, of all devices and machines."""
        seconds = self.reading_s + self.answer * self.step_s if self.answer else self.step_s
        return self.rows * self.accumulate * self.devices * self.nodes / seconds

    def speed(self, tokens: int | None = None) -> dict[str, float]:
        """Return rows and, for rows of as many tokens or for answers, tokens a second."""
        count = self.answer or tokens
        return {"rows_per_s": self.rows_per_s} | ({"tokens_per_s": self.rows_per_s * count} if count else {})

    @property
    def first(self) -> str:
        """The changes to make, with their prices."""
        offers = "; ".join(change.described(self) for change in self.changes)
        if not self.fits:
            return f"what would fit: {offers}" if offers else f"nothing that was tried fits: {FEWER}"
        busy = self.time.lanes[self.time.bound_by]
        why = f"{self.time.bound_by} is busy for {format_seconds(busy)} of a step of {format_seconds(self.step_s)}"
        return f"{offers}; {why}" if offers else f"nothing that was tried is faster: {why}"

    def check(self) -> None:
        """Raise MemoryBudgetError if the run does not fit, with what it needs and what would fit."""
        if self.fits:
            return
        if self.fits_device:
            (needs, has), terms = format_both(self.host.total, self.host_available), _terms_of(self.host)
            left = f", beside {format_bytes(self.headroom)} that are left to the system" if self.headroom else ""
            there = f"of host memory ({_listed(terms)}), but one has {has}{left}"
        else:
            (needs, has), terms = format_both(self.device_nbytes, self.available), self.device_terms
            with_these = f"with window {self.window} and {self.rows} rows"
            there = f"on the device {with_these} ({_listed(terms)}), but {has} are available"
        raise MemoryBudgetError(f"{self.model} needs {needs} {there}; {self.first}")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        options = asdict(self.options)
        options["units"] = options["units"] if isinstance(options["units"], str | tuple) else "callable"
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return shown | {
            "machine": asdict(self.machine),
            "options": options,
            "host": asdict(self.host) | {"total": self.host.total},
            "disk": {"weights": self.disk.weights, "read": self.read, "written": self.written},
            "time": asdict(self.time),
            "device_nbytes": self.device_nbytes,
            "step_s": self.step_s,
            "fits": self.fits,
            "first": self.first,
            "changes": [asdict(change) | {"cost": change.cost(self)} for change in self.changes],
            "speed": self.speed(),
        }

    @property
    def read(self) -> int:
        """Bytes that a step reads from the disk."""
        return self.loaded + sum(self.disk.read.values())

    @property
    def written(self) -> int:
        """Bytes that a step writes to the disk."""
        return sum(self.disk.written.values())

    def __str__(self) -> str:
        return self.text()

    def text(self, tokens: int | None = None, note: str = "") -> str:
        """Return what the command prints; ``tokens``: of a row; ``note``: what was not measured."""
        lines = [*self._heading(), "", *self._memory(), "", *self._times(tokens)]
        lines += [f"Note: {line}" for line in self.notes]
        if note:
            lines.append(f"Not measured: {note}")
        lines += self._wear()
        offers = [change.described(self) for change in self.changes]
        if offers:
            lines += ["Change:" if self.fits else "Would fit:", *(f"- {offer}" for offer in offers)]
        else:
            lines.append(f"Change: {self.first}")
        return "\n".join(lines)

    def _heading(self) -> list[str]:
        several = f"{self.nodes} machines with " * (self.nodes > 1) + f"{self.devices} x " * (self.devices > 1)
        doing = f"answers of {self.answer} tokens" if self.answer else f"activations {self.options.activations!r}"
        fits = "fits" if self.fits else "DOES NOT FIT"
        if not self.fits:
            terms = self.device_terms if not self.fits_device else _terms_of(self.host)
            worst = max(terms, key=terms.__getitem__)
            place = "device" if not self.fits_device else "host"
            fits += f": on the {place}, most for {worst}, {format_bytes(max(terms.values()))}"
        return [
            f"{self.model}: {self.parameters / 1e9:.3g}e9 parameters, batch of {self.rows} rows, "
            f"{self.precision}, {doing}",
            f"on {several}{self.machine.name}: window {self.window} of {len(self.units)} units, transfer "
            f"{self.transfer}: {format_bytes(self.device_nbytes)} of {format_bytes(self.available)} on the device, "
            f"{format_bytes(self.host.total)} of {format_bytes(self.host_available)} on the host: {fits}",
        ]

    def _memory(self) -> list[str]:
        host = _terms_of(self.host)
        if self.disk.weights or self.written:
            host["(on disk)"] = self.disk.weights + sum(self.disk.written.values())
        lines = []
        for place, terms in (("Device", self.device_terms), ("Host", host)):
            shown = {name: nbytes for name, nbytes in terms.items() if nbytes}
            lines += [f"{place}:", *(f"  {name:24}{format_bytes(nbytes):>12}" for name, nbytes in shown.items())]
        return lines

    def _times(self, tokens: int | None) -> list[str]:
        what = "A token for each row" if self.answer else "A step"
        busy = ", ".join(f"{lane} {format_seconds(seconds)}" for lane, seconds in self.time.lanes.items() if seconds)
        lines = [f"{what} takes {format_seconds(self.step_s)}, bound by {self.time.bound_by} (busy: {busy})"]
        if self.answer:
            lines.append(f"Reading the prompts takes {format_seconds(self.reading_s)}")
        speed = ", ".join(f"{value:.3g} {name.split('_')[0]}" for name, value in self.speed(tokens).items())
        lines.append(f"Speed{'' if self.fits else ', if it fitted'}: {speed} a second")
        if self.largest_batch is not None:
            lines.append(f"Largest batch that fits on the device: {self.largest_batch} rows")
        return lines

    def _wear(self) -> list[str]:
        if not self.written:
            return []
        steps = float(f"{ENDURANCE / self.written:.3g}")
        return [
            f"Wear: a step writes {self.written / 1e9:.3g} GB to the disk: {steps:,.0f} steps to "
            f"{ENDURANCE / 1e12:,.0f} TB, the rating of a consumer drive of 2 TB"
        ]


def _terms_of(host: HostBytes) -> dict[str, int]:
    return {name.replace("_", " "): nbytes for name, nbytes in asdict(host).items()}


def _listed(terms: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items() if nbytes)
