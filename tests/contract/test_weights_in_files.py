"""Training whose frozen weights stay in their files is plain training, bit for bit (``host_budget="0B"``).

Each cell trains, validates and predicts plainly with weights in memory, and then streaming with the frozen ones in
files (in_files.py); the prediction leaves all weights in files that nothing wrote. The default run takes a cover of all
pairs of settings over three nets, and each other net in some of these settings.
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

WINDOWS = {"1": 1, "2": 2, "all": 64}
PRECISIONS = {
    "32-true": None,
    "bf16-mixed": None,
    "bf16-true": torch.bfloat16,  # the type of the weights in the files
    "bf16-true, masters": None,
    "16-mixed": None,
    "64-true": torch.float64,
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


def cells(cases: list[str]) -> Any:
    settings = {
        "accelerator": ["simgpu", "cpu"],
        "precision": list(PRECISIONS)[:4],
        "window": list(WINDOWS),
        "activations": ACTIVATIONS[:3],
        "optimizer": ["adamw", "sgd"],
    }
    few = ["mlp", "tied_embedding", "mixture_of_experts"]
    often = [tuple(row.values()) for row in parity.each_value(case=cases[::3], **settings)]  # of every third net
    pairs = parity.pairwise(case=few, **settings) + parity.pairwise(case=cases, **settings)
    every = [tuple(row.values()) for row in pairs]
    every += [
        (case, *rest, "adamw")
        for case in cases
        for rest in (
            tuple(setting.values())
            for setting in in_files.settings(
                accelerator=["simgpu", "cpu"], precision=PRECISIONS, window=WINDOWS, activations=ACTIVATIONS
            )
        )
    ]
    return [
        pytest.param(
            *row,
            id="-".join(row),
            marks=[pytest.mark.simgpu] * (row[1] == "simgpu") + [pytest.mark.slow] * (row not in often),
        )
        for row in dict.fromkeys([*often, *every])
        if row[1:3] != ("cpu", "16-mixed")
    ]


CELLS = cells(list(models.ZOO))
ARGUMENTS = "case, accelerator, precision, window, activations, optimizer"


@pytest.mark.parametrize(ARGUMENTS, [cell for cell in CELLS if not cell.values[2].endswith("-mixed")])
@pytest.mark.few(1)
def test_weights_that_stay_in_files_train_as_in_memory(case, accelerator, precision, window, activations, optimizer):
    check_cell(models.case(case), accelerator, precision, window, activations, optimizer)


@pytest.mark.parametrize(ARGUMENTS, [cell for cell in CELLS if cell.values[2].endswith("-mixed")])
@pytest.mark.few(1)
def test_weights_that_stay_in_files_train_under_autocast_as_in_memory(
    case, accelerator, precision, window, activations, optimizer
):
    case = models.case(case)
    if case.name == "transformer_encoder" and accelerator != "cpu":
        with torch.autocast(accelerator, dtype=torch.bfloat16):
            if not torch.is_autocast_enabled():
                pytest.skip("this torch asks for CUDA's autocast before its encoder's fast path, and fails plainly")
    check_cell(case, accelerator, precision, window, activations, optimizer)


def check_cell(case, accelerator, precision, window, activations, optimizer):
    for library in case.tags & {"transformers", "torchvision"}:
        pytest.importorskip(library)
    read = check(case, accelerator, precision, optimizer, window=WINDOWS[window], activations=activations)
    assert read["disk_read"] > 0 or "writes" in case.tags


FAMILY_CELLS = [
    pytest.param(
        name,
        accelerator,
        options,
        id=f"{name}-{number}",
        marks=[pytest.mark.simgpu] * (accelerator == "simgpu")
        + [pytest.mark.slow] * (name not in ("qwen3", "paligemma", "mamba") or number != index % 3),
    )
    for index, name in enumerate(FAMILIES)
    for number, (accelerator, options) in enumerate(FAMILY_SETTINGS)
]


@pytest.mark.parametrize("name, accelerator, options", FAMILY_CELLS)
@pytest.mark.few(1)
def test_a_family_whose_frozen_weights_stay_in_files_trains_as_in_memory(name, accelerator, options):
    case = FAMILIES[name].case
    for library in case.tags:
        pytest.importorskip(library)
    assert check(case, accelerator, "32-true", "adamw", **options)["disk_read"] > 0
