"""Training whose optimizer state is on disk is plain training, bit for bit (``disk=``, ``host_budget="0B"``).

Each cell trains, validates and predicts plainly and then streaming, with the state of all parameters, their gradients
and the weights that train in the scratch file, and buffers that are smaller than the nets.
"""

import functools
import os

import pytest
import torch
from families import FAMILIES

import models
import parity
from sp_lightning.disk import state_ring

STEPS_TOO = "simgpu, which steps too"  # with optimizer_device="device"
WINDOWS = {"1": 1, "2": 2, "all": 64}
NOT_UNDER_AUTOCAST = {  # plain runs on the CPU, too
    "bigbird": "scatters values of another type",
    "tv_faster_rcnn": "suppresses boxes of another type",
    "tv_retinanet": "suppresses boxes of another type",
    "tv_video": "has another gradient of a convolution in each run",
}
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "bf16-true, masters", "16-mixed", "64-true"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)


def check(case, accelerator, precision="32-true", optimizer="adamw", accumulate=1, clip=None, **options):
    """Compares the two runs; returns the streaming one's telemetry."""
    precision, _, masters = precision.partition(", ")

    def run(strategy):
        return parity.record(
            functools.partial(models.ZooModule, case, optimizer=optimizer),
            strategy,
            accelerator=accelerator,
            precision=precision,
            accumulate=accumulate,
            clip=clip,
            batches=6 if accumulate > 1 else 4,
        )

    alike = {"master_weights": True} if masters else {}  # plainly there is no such precision
    if options.get("optimizer_device"):
        alike["optimizer_device"] = options["optimizer_device"]
    if options.get("fused_optimizer"):
        alike["fused_optimizer"] = True
    own = masters or options.get("fused_optimizer")  # which no plain run has
    plain = parity.streaming_strategy(accelerator, **alike) if own else parity.plain_strategy(accelerator)
    expected = run(plain)
    options = {"host_budget": "0B", "disk": os.getcwd(), **alike, **options}
    actual = run(parity.streaming_strategy(accelerator, **options))
    parity.compare(expected, actual)
    return actual.telemetry


def cells():
    """Every third net in one of the settings; slow are all pairs of them over three nets, and all pairs with nets."""
    settings = {
        "precision": PRECISIONS,
        "window": list(WINDOWS),
        "optimizer": ["adamw", "sgd", "adafactor", "two"],
        "accumulate": [1, 3],
        "clip": [None, ("norm", 0.5), ("value", 0.01)],
        "accelerator": ["simgpu", "cpu", STEPS_TOO],
        "overlap": [True, False],
        "fused": [False, True],
        "activations": ["keep", "recompute", "offload"],
    }
    few = ["mlp", "tied_embedding", "mixture_of_experts"]
    often = [legal(row) for row in parity.each_value(case=list(models.ZOO)[::3], **settings)]
    pairs = parity.pairwise(case=few, **settings) + parity.pairwise(case=list(models.ZOO), **settings)
    seen = []
    for row in [*often, *map(legal, pairs)]:
        marks = [pytest.mark.simgpu] * (row["accelerator"] != "cpu") + [pytest.mark.slow] * (row not in often)
        if row in seen:
            continue
        seen.append(row)
        yield pytest.param(row, id="-".join(map(str, row.values())), marks=marks)


def legal(row):
    """The same settings, but for what Lightning does not have."""
    if row["precision"] == "16-mixed" and row["accelerator"] == "cpu":
        row |= {"accelerator": "simgpu"}
    if row["precision"] == "16-mixed" or row["accelerator"] == STEPS_TOO:
        row |= {"fused": False}
    if row["optimizer"] == "two":  # which are stepped by hand
        row |= {"accumulate": 1, "clip": None}
    return row


@pytest.mark.parametrize("cell", list(cells()))
@pytest.mark.few(3)
def test_training_with_its_state_on_disk_is_plain_training(cell):
    case = models.case(cell["case"])
    for library in case.tags & {"transformers", "torchvision"}:
        pytest.importorskip(library)
    accelerator, _, steps_too = cell["accelerator"].partition(",")
    if case.name == "transformer_encoder" and "-mixed" in cell["precision"] and accelerator != "cpu":
        with torch.autocast(accelerator, dtype=torch.bfloat16):
            if not torch.is_autocast_enabled():
                pytest.skip("this torch asks for CUDA's autocast before its encoder's fast path, and fails plainly")
    found = check(
        case,
        accelerator,
        cell["precision"],
        cell["optimizer"],
        cell["accumulate"],
        cell["clip"],
        window=WINDOWS[cell["window"]],
        activations=cell["activations"],
        optimizer_overlap=cell["overlap"],
        fused_optimizer=cell["fused"],
        **({"optimizer_device": "device"} if steps_too else {}),
    )
    if cell["optimizer"] == "adamw":
        assert found["disk_written"] > 0 and found["disk_read"] > 0


@pytest.mark.parametrize(
    "name", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.parametrize(
    "accelerator", ["cpu", *(pytest.param(place, marks=pytest.mark.simgpu) for place in ("simgpu", STEPS_TOO))]
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.few(1)
def test_a_family_with_its_state_on_disk_trains_as_in_memory(name, accelerator, precision):
    case = FAMILIES[name].case
    for library in case.tags:
        pytest.importorskip(library)
    if precision == "bf16-mixed" and name in NOT_UNDER_AUTOCAST:
        pytest.skip(f"under autocast it {NOT_UNDER_AUTOCAST[name]}")
    accelerator, _, steps_too = accelerator.partition(",")
    options = {"optimizer_device": "device"} if steps_too else {}
    assert check(case, accelerator, precision, window=2, **options)["disk_read"] > 0
