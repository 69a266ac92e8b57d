"""The changes that a plan names: what makes a run fit, or makes it faster, each with the price of its own plan."""

import torch
from nets import Block
from torch import nn

from sp_lightning.plan import plan

ROWS = 4096
SIZES = {"machine": "rtx3060", "device": "cpu"}  # whose kernels keep nothing for a driver


def planned(rows=ROWS, **options):
    return plan(lambda: nn.Sequential(*(Block(64) for _ in range(6))), torch.zeros(rows, 64), **SIZES, **options)


def test_changes_that_each_need_the_other_are_named_together():
    most = planned(ROWS // 4, activations="recompute").device_nbytes
    found = planned(device_memory=most)
    assert (
        not found.fits
        and found.changes[0].what == f"a batch of {ROWS // 4} rows, accumulate=4, activations='recompute'"
    )
    assert found.changes[0].device_nbytes == most


def test_a_batch_is_divided_into_equal_parts():
    """Half of three rows would be one, and two of these accumulated another batch."""
    blocks = lambda: nn.Sequential(*(Block(512) for _ in range(6)))  # noqa: E731
    images = [torch.zeros(rows, 4096, 512) for rows in (1, 3)]
    one, three = (plan(blocks, image, **SIZES, window=1, activations="recompute+offload") for image in images)
    memory = (one.device_nbytes + three.device_nbytes) // 2
    found = plan(blocks, images[1], **SIZES, device_memory=memory, window=1, activations="recompute+offload")
    assert not found.fits and "a batch of 1 row, accumulate=3" in [change.what for change in found.changes]


def test_a_host_that_is_short_gets_a_disk():
    found = planned(host_memory="3MiB")
    assert found.fits_device and not found.fits and found.changes[0].what == "disk='FOLDER'"


def test_a_host_that_is_short_of_frozen_weights_leaves_them_in_their_files():
    short = plan(
        lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(40))).requires_grad_(False),
        torch.ones(1, 512),
        machine="rtx4090",
        host_memory="32MiB",
    )
    assert not short.fits_host and [change.what for change in short.changes] == ["host_budget='0GiB'"]


def test_a_window_that_is_too_large_is_left_to_auto():
    most = planned(activations="recompute").device_nbytes
    found = planned(activations="recompute", window=6, device_memory=most)
    assert found.changes[0].what == "window='auto'"


def test_what_was_tried_is_listed_where_nothing_is_faster():
    found = planned(device_memory=planned().device_nbytes)
    assert found.fits and not found.changes
    assert f"None of these fits and is faster: a batch of {2 * ROWS} rows; activations='recompute'" in str(found)


def test_where_a_run_fits_the_changes_are_faster():
    found = planned(activations="recompute")
    assert found.fits and "activations='keep'" in [change.what for change in found.changes]
    assert all(change.slower < 1 for change in found.changes)
