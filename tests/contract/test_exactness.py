"""Training through a window is plain training, bit for bit.

Each cell trains, validates and predicts plainly and then streaming, and compares all that the two runs leave
(parity.py), with the race checker on. The slow run takes a cover of all pairs of settings over the whole zoo, the
default run each twelfth cell of it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch

import models
import parity
from sp_lightning import SuperpipelineStrategy
from sp_lightning.errors import ExactnessError

WINDOWS = {"1": 1, "2": 2, "all": 64}
ACTIVATIONS = ["keep", "recompute", "offload", "recompute+offload"]
ACCELERATORS = ["simgpu", "cpu"]
STEPS_TOO = "simgpu, which steps too"  # with optimizer_device="device"
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"]
ACCUMULATE = [1, 3]
CLIP = [None, ("norm", 0.5), ("value", 0.01)]
OPTIMIZERS = ["sgd", "adamw", "adafactor"]


class Settings(NamedTuple):
    """What the plain and the streaming run of a cell share."""

    case: str
    accelerator: str
    precision: str = "32-true"
    accumulate: int = 1
    clip: tuple[str, float] | None = None
    optimizer: str = "adamw"
    see: parity.See = "step"


class Cell(NamedTuple):
    """One comparison."""

    settings: Settings
    window: str
    activations: str
    overlap: bool = True
    optimizer_device: str = "host"
    resident: int = 0
    wire_dtype: str = "auto"

    def __str__(self) -> str:
        algorithm = self.settings.clip and f"clip-{self.settings.clip[0]}"
        return "-".join(str(part) for part in (*self.settings._replace(clip=algorithm), *self[1:]))


class InSlices(SuperpipelineStrategy):
    """Streams in slices so small that each weight has several."""

    def _streamed(self, module: Any) -> Any:
        return super()._streamed(module, chunk=512)


def check(cell: Cell) -> None:
    """Compares the two runs of a cell."""
    case = models.case(cell.settings.case)
    if case.name == "transformer_encoder" and cell.settings.precision.endswith("-mixed"):
        with torch.autocast(cell.settings.accelerator, dtype=torch.bfloat16):
            if cell.settings.accelerator != "cpu" and not torch.is_autocast_enabled():
                pytest.skip("this torch asks for CUDA's autocast before its encoder's fast path, and fails plainly")
    expected = plain(cell.settings)
    options = {
        "window": WINDOWS[cell.window],
        "activations": cell.activations,
        "optimizer_overlap": cell.overlap,
        "optimizer_device": cell.optimizer_device,
        "resident": cell.resident,
        "wire_dtype": cell.wire_dtype,
    }
    strategy = InSlices(**options)
    try:
        actual = record(cell.settings, strategy)
    except ExactnessError as error:  # which the contract names
        assert "writes" in case.tags and cell.activations.startswith("recompute")
        assert "writes to its weights in its forward, which a second forward would repeat" in str(error)
        return
    parity.compare(expected, actual)
    assert actual.telemetry["fetches"] >= actual.telemetry["units"] > 0


@functools.lru_cache(maxsize=1)
def plain(settings: Settings) -> parity.Record:
    """The plain run, which the cells that differ in streaming alone share."""
    return record(settings, parity.plain_strategy(settings.accelerator))


def record(settings: Settings, strategy: Any) -> parity.Record:
    case, accelerator, precision, accumulate, clip, optimizer, see = settings
    return parity.record(
        functools.partial(models.ZooModule, models.case(case), optimizer=optimizer),
        strategy,
        accelerator=accelerator,
        precision=precision,
        accumulate=accumulate,
        clip=clip,
        see=see,
    )


def parameters(cells: list[Cell], often: int) -> Any:
    """Cells that share a plain run come one after the other; they say what they need. One of so many is not slow."""
    return [
        pytest.param(
            cell,
            id=str(cell),
            marks=[pytest.mark.simgpu] * (cell.settings.accelerator == "simgpu")
            + [pytest.mark.slow] * (number % often > 0),
        )
        for number, cell in enumerate(dict.fromkeys(sorted(cells, key=lambda cell: str(cell.settings))))
    ]


# --- The cover


AXES = {
    "case": list(models.ZOO),
    "precision": PRECISIONS,
    "window": list(WINDOWS),
    "activations": ACTIVATIONS,
    "clip": CLIP,
    "optimizer": OPTIMIZERS,
    "accumulate": ACCUMULATE,
    "accelerator": [*ACCELERATORS, STEPS_TOO],
    "overlap": [True, False],
    "resident": [0, 1],
    "wire_dtype": ["auto", "as-is"],
    "see": ["step", "backward"],
}
TWO_AXES = {  # of two optimizers that are stepped by hand: Lightning neither clips nor accumulates for them
    "case": ["mlp", "tied_embedding", "frozen_prefix", "mixture_of_experts", "checkpoint"],
    **{name: AXES[name] for name in ("precision", "window", "activations", "accelerator")},
}


def cells_of(row: dict[str, Any]) -> list[Cell]:
    """One cell; two for what is not there, as its other pairs are needed."""
    if row["precision"] == "16-mixed" and row["accelerator"] == "cpu":  # which Lightning does not have
        rows = [row | {"accelerator": "simgpu"}, row | {"precision": "32-true"}]
    else:
        rows = [row]
    found = []
    for one in rows:
        rounds_otherwise = one["optimizer"] == "adafactor" and one["accelerator"] == "simgpu"
        if rounds_otherwise and one["resident"]:  # which is refused
            found += [one | {"resident": 0}, one | {"accelerator": STEPS_TOO}]
        else:
            found.append(one)
    return [cell_of(one) for one in found]


def cell_of(row: dict[str, Any]) -> Cell:
    row = row | {"optimizer_device": "device" if row["accelerator"] == STEPS_TOO else "host"}
    row["accelerator"] = row["accelerator"].partition(",")[0]
    settings, streaming = ({name: row[name] for name in kind._fields if name in row} for kind in (Settings, Cell))
    return Cell(Settings(**settings), **streaming)


def cells(rows: list[dict[str, Any]], **also: Any) -> list[Cell]:
    return [cell for row in rows for cell in cells_of(row | also)]


COVER = cells(parity.pairwise(**AXES))
TWO = cells(parity.pairwise(**TWO_AXES), optimizer="two")


@pytest.mark.parametrize("cell", parameters(COVER, 12))
def test_streaming_is_exact_in_a_cover_of_all_pairs_of_settings(cell):
    check(cell)


@pytest.mark.parametrize("cell", parameters(TWO, 16))
def test_streaming_is_exact_with_two_optimizers_stepped_by_hand(cell):
    check(cell)


def test_the_cover_has_every_pair_that_exists():
    rows = [cell.settings._asdict() | cell._asdict() for cell in COVER]
    for row in rows:
        del row["settings"]
    values = {axis: {row[axis] for row in rows} for axis in rows[0]}
    for one in values:
        for other in values:
            missing = {(a, b) for a in values[one] for b in values[other]} - {(row[one], row[other]) for row in rows}
            none = {("cpu", "16-mixed"), ("16-mixed", "cpu"), ("cpu", "device"), ("device", "cpu")}
            assert one == other or missing <= none, (one, other)
