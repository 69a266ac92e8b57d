"""Training whose frozen weights stay in their files is plain training, bit for bit (``host_budget="0B"``).

Each cell trains, validates and predicts plainly with weights in memory, and then streaming with the frozen ones in
files (in_files.py); the prediction leaves all weights in files that nothing wrote. The slow run takes a cover of all
pairs of settings over the zoo.
"""

from __future__ import annotations

import functools
from typing import Any

import in_files
import pytest
import torch
from families import FAMILIES

import models
import parity
from sp_lightning.errors import ExactnessError

WINDOWS = {"1": 1, "2": 2, "all": 64}
PRECISIONS = {
    "32-true": None,
    "bf16-mixed": None,
    "bf16-true": torch.bfloat16,  # the type of the weights in the files
    "bf16-true, masters": None,
}
ACTIVATIONS = ["keep", "recompute", "offload", "recompute+offload"]
FAMILY_SETTINGS = [
    ("cpu", {"window": 2}),
    ("simgpu", {"window": 1, "activations": "recompute"}),
    ("simgpu", {"window": 3, "transfer": 2}),
]


def check(case: models.Case, accelerator: str, precision: str, optimizer: str, **options: Any) -> dict[str, Any]:
    """Compares the two runs; returns the streaming one's telemetry."""
    dtype, (precision, _, masters) = PRECISIONS[precision], precision.partition(", ")

    def run(case: models.Case, strategy: Any) -> parity.Record:
        make = functools.partial(models.ZooModule, case, optimizer=optimizer)
        return parity.record(make, strategy, accelerator=accelerator, precision=precision, batches=3)

    options = {"host_budget": "0B", **options}
    if masters:
        options["master_weights"] = True
        expected = run(in_files.frozen(case), parity.streaming_strategy(accelerator, master_weights=True))
    else:
        expected = run(in_files.frozen(case, dtype), parity.plain_strategy(accelerator))
    actual = run(in_files.filed(case, dtype), parity.streaming_strategy(accelerator, **options))
    parity.compare(expected, actual)
    return actual.telemetry


COVER = parity.pairwise(
    case=list(models.ZOO),
    accelerator=["simgpu", "cpu"],
    precision=list(PRECISIONS)[:4],
    window=list(WINDOWS),
    activations=ACTIVATIONS,
    optimizer=["adamw", "sgd"],
)


@pytest.mark.simgpu
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id="-".join(row.values()), marks=[pytest.mark.slow] * (number % 50 > 0))
        for number, row in enumerate(COVER)
    ],
)
def test_weights_that_stay_in_files_train_as_in_memory(row):
    case = models.case(row["case"])
    if case.name == "transformer_encoder" and row["precision"] == "bf16-mixed" and row["accelerator"] != "cpu":
        with torch.autocast(row["accelerator"], dtype=torch.bfloat16):
            if not torch.is_autocast_enabled():
                pytest.skip("this torch asks for CUDA's autocast before its encoder's fast path, and fails plainly")
    check_cell(**row | {"case": case})


def check_cell(case, accelerator, precision, window, activations, optimizer):
    try:
        read = check(case, accelerator, precision, optimizer, window=WINDOWS[window], activations=activations)
    except ExactnessError as error:  # which the contract names
        assert "writes" in case.tags
        repeats = "writes to its weights in its forward, which a second forward would repeat" in str(error)
        assert (repeats and activations.startswith("recompute")) or "and the write would be lost" in str(error)
        return
    assert read["disk_read"] > 0 or "writes" in case.tags or "masters" in precision  # which travel in another type


@pytest.mark.slow
@pytest.mark.simgpu
@pytest.mark.parametrize(("number", "name"), list(enumerate(FAMILIES)))
def test_a_family_with_frozen_weights_in_files_trains_exactly(number, name):
    case = FAMILIES[name].case
    for library in case.tags:
        pytest.importorskip(library)
    accelerator, options = FAMILY_SETTINGS[number % len(FAMILY_SETTINGS)]
    assert check(case, accelerator, "32-true", "adamw", **options)["disk_read"] > 0
