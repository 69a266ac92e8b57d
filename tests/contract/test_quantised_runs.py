"""Adapters over a quantised base, beside the disk, on two ranks and from checkpoints, are those of the plain run."""

from __future__ import annotations

import os

import processes
import pytest
import wrapped
from lightning.pytorch.callbacks import ModelCheckpoint
from side_by_side import check, fit

import parity

# Window and activations
SETTINGS = [(1, "keep"), (2, "recompute"), (1, "offload"), (2, "recompute+offload")]


# --- The disk


@parity.product(
    ("nf4", "file", SETTINGS[1], "simgpu"),
    ("int8", "memory", SETTINGS[0], "cpu"),
    form=wrapped.TRAINED,
    place=["file", "memory"],
    setting=SETTINGS,
    device=parity.DEVICES,
)
def test_adapters_train_over_a_quantised_base_beside_the_disk(device, form, place, setting):
    """The optimizer's state goes to the disk, and weights of a file stay there."""
    window, activations = setting
    make = {"file": wrapped.filed, "memory": wrapped.adapted}[place](form)
    options = {"host_budget": "0B", "disk": os.getcwd(), "activations": activations, "window": window}
    stats = check(make, wrapped.trained_and_evaluated, device, **options)
    assert stats["disk_written"] > 0
    frozen = sum(part.nbytes for weight in wrapped.weights(make()).values() for part in wrapped.parts(weight))
    if place == "file":  # in seven passes at least, over units of which a window may have stayed from the last one
        assert stats["disk_read"] > 7 * frozen * (4 - window) / 4


# --- Two ranks


@parity.product(
    ("nf4", SETTINGS[0], "cpu"),
    ("coded", SETTINGS[1], "simgpu"),
    form=wrapped.TRAINED,
    setting=SETTINGS[:2],
    device=parity.DEVICES,
)
@pytest.mark.slow
def test_two_ranks_train_adapters_over_one_shared_quantised_base(device, form, setting):
    window, activations = setting
    options = {"activations": activations, "window": window}
    expected = processes.run(2, wrapped.train_on_ranks, None, form)
    found = processes.run(2, wrapped.train_on_ranks, options, form, device.type)
    for theirs, ours in zip(expected, found, strict=True):
        assert [parity.difference(*pair) for pair in zip(theirs, ours, strict=True)] == [None] * len(theirs)


# --- Checkpoints


@parity.product(("nf4", "memory", "cpu"), form=wrapped.TRAINED, place=["memory", "file"], device=parity.DEVICES)
def test_checkpoints_of_adapters_resume_both_ways(device, form, place, tmp_path):
    make = wrapped.filed if place == "file" else wrapped.adapted
    tier = {"host_budget": "0B", "disk": os.getcwd()} if place == "file" else {}

    def train(streams, steps, ckpt_path=None):
        strategy = parity.streaming_strategy(device.type, window=1, **tier) if streams else None
        saves = ModelCheckpoint(tmp_path / str(streams), "last") if ckpt_path is None else None
        options = {"callbacks": [saves], "enable_checkpointing": True} if saves else {}
        module = fit(lambda: wrapped.Module(form, make), strategy, device, ckpt_path, max_steps=steps, **options)
        return saves.best_model_path if saves else module

    paths = [train(streams, 2) for streams in (False, True)]
    first, *others = [train(streams, 4, path) for path in paths for streams in (False, True)]
    assert len(first.losses) == 2
    for other in others:
        wrapped.compare(first, other)
