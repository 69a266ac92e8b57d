"""What leaves host memory for which budget, as a table; and what memory and file have is the same."""

import os
import random

import pytest
import torch

from sp_lightning.host.device import Device
from sp_lightning.store.pipeline import ElementSpan, Pipeline, cut
from sp_lightning.store.placement import UnitBytes, choose
from sp_lightning.store.scratch import scratch_in

LORA = [UnitBytes(frozen=100, state=4, weights=2, gradients=2, fixed=1)] * 4  # 436 bytes
WHOLE = [UnitBytes(state=80, weights=40, gradients=20, fixed=20)] * 4  # 640 bytes
NONE, ALL = frozenset(), frozenset(range(4))


@pytest.mark.parametrize(
    "units, budget, has_disk, frozen, state, weights, gradients, host",
    [
        (LORA, 436, False, NONE, NONE, NONE, NONE, 436),
        (LORA, 435, False, {0}, NONE, NONE, NONE, 346),
        (LORA, 300, False, {0, 2}, NONE, NONE, NONE, 246),
        (LORA, 0, False, ALL, NONE, NONE, NONE, 46),
        (LORA, 40, True, ALL, {0, 2}, NONE, NONE, 38),
        (LORA, 0, True, ALL, ALL, ALL, ALL, 14),
        (WHOLE, 640, True, NONE, NONE, NONE, NONE, 640),
        (WHOLE, 600, True, NONE, {0}, NONE, NONE, 570),
        (WHOLE, 330, True, NONE, ALL, NONE, NONE, 330),
        (WHOLE, 250, True, NONE, ALL, {0, 2}, NONE, 250),
        (WHOLE, 130, True, NONE, ALL, ALL, {0, 2}, 130),
        (WHOLE, 0, True, NONE, ALL, ALL, ALL, 90),
        (WHOLE, 300, False, NONE, NONE, NONE, NONE, 650),
    ],
)
def test_what_leaves_memory(units, budget, has_disk, frozen, state, weights, gradients, host):
    found = choose(units, budget, has_disk, buffers=10)
    assert (found.frozen, found.state, found.weights, found.gradients) == (frozen, state, weights, gradients)
    assert found.host == host
    terms = [(found.state, units[0].state), (found.weights, units[0].weights), (found.gradients, units[0].gradients)]
    assert found.disk == sum(len(gone) * nbytes for gone, nbytes in terms)


def test_what_the_mapping_and_the_pipeline_write_is_the_same():
    draw = random.Random(0)
    file = scratch_in(os.getcwd(), 1 << 20)
    tensors = [file.take(torch.empty(size)).zero_() for size in (1, 1024, 5000, 33000)]
    copies = [tensor.clone() for tensor in tensors]
    through = Pipeline(Device("cpu"), 1 << 16)
    for _ in range(200):
        tensor, other = draw.choice(list(zip(tensors, copies, strict=True)))
        value = draw.random()
        if draw.random() < 0.5:
            at = draw.randrange(len(tensor))
            tensor[at:] = value
            other[at:] = value
            continue
        ends = draw.choice(list(cut(len(tensor), [tensor.dtype], 1 << 14)))
        for window in through.windows(file, [[ElementSpan(tensor, tensor.dtype, *ends)]]):
            here = window[0].here
            assert torch.equal(here, other[slice(*ends)])
            here.mul_(value)
            other[slice(*ends)].mul_(value)
        assert torch.equal(tensor, other)
    through.close()


def test_a_range_is_free_again_only_when_its_tensor_is_gone():
    file = scratch_in(os.getcwd(), 0)
    first = file.take(torch.empty(2000))
    address, view = first.data_ptr(), first[10:]
    del first
    second = file.take(torch.empty(2000))
    assert second.data_ptr() != address
    del view
    assert file.take(torch.empty(2000)).data_ptr() == address


def test_a_range_has_disk_space_whatever_other_sizes_are_free():
    file = scratch_in(os.getcwd(), 0)
    large = file.take(torch.empty(1 << 16))
    del large
    small = file.take(torch.empty(2000))
    assert file.offset_of(small) + small.nbytes <= file._end <= file._allocated
