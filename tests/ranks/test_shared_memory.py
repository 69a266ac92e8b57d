"""Pages of a slab that a process wrote through its face are found and given up."""

import itertools
import random

import pytest
import torch

from sp_lightning.memory.device import Device
from sp_lightning.memory.pinned import MappedRange
from sp_lightning.ranks import shared_memory
from sp_lightning.ranks.shared_memory import PAGE, Box, SharedSlab, SlabRange, make

PAGES = 5000


@pytest.mark.parametrize("scans", [False, True])
def test_written_pages_are_found_and_given_up(scans, monkeypatch):
    """By reading the page table, or by the kernel."""
    if scans and not shared_memory._kernel_scans():
        pytest.skip("the kernel has no PAGEMAP_SCAN")
    monkeypatch.setattr(shared_memory, "_kernel_scans", lambda: scans)
    monkeypatch.setattr(shared_memory, "BLOCK", 100)
    monkeypatch.setattr(shared_memory, "FOUND", 70)
    slab = SharedSlab(MappedRange(make(PAGES * PAGE)), PAGES * PAGE, is_first=True)
    slab.truth.fill_(1)
    assert int(slab.face[:: 3 * PAGE].sum()) and slab.private() == []  # a read makes no page private
    written = sorted(random.Random(0).sample(range(PAGES), 900))
    for page in written:
        slab.face[page * PAGE + page % PAGE] = 2
    slab.truth[0] = 3  # not a write through the face
    found = [page for start, end in slab.private() for page in range(start // PAGE, end // PAGE)]
    assert found == written
    slab.drop([SlabRange(written[0] * PAGE, (written[0] + 1) * PAGE)])
    assert sum(end - start for start, end in slab.private()) == 899 * PAGE
    slab.drop(slab.private())
    assert slab.private() == [] and torch.equal(slab.face, slab.truth)


@pytest.mark.parametrize("ahead", [[1, 2, 3, 3, 3], [6]], ids=["one after the other", "all at once"])
def test_a_box_has_room_for_regions_of_unlike_sizes_in_any_order(ahead):
    """As gradients of units that are skipped in some steps."""
    pages, draw = [61, 20, 51, 3, 34, 69], random.Random(28)
    box = Box(0, 1, make, Device(torch.device("cpu")), 8 * sum(pages) * PAGE)
    for _ in range(1000):
        lent, most = [], draw.choice(ahead)
        for size in (size for size in pages if draw.random() < 0.6):
            if len(lent) >= most:
                box.give_back(lent.pop(0))
            lent.append(box.region(size * PAGE))
        spans = sorted((box.place(region, region), region.numel()) for region in lent)
        assert all(start + room <= after for (start, room), (after, _) in itertools.pairwise(spans))
        while lent:
            box.give_back(lent.pop())
        box.trim()
    box.close()
