import io

import pytest
import torch

from sp_lightning.core.unit_numbers import aligned
from sp_lightning.memory.layout import Layout

pytestmark = pytest.mark.quick


def slab(layout):
    return torch.zeros(layout.nbytes, dtype=torch.uint8).untyped_storage()


def saved_nbytes(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getbuffer().nbytes


MIXED = [
    ("weight", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
    ("scale", torch.tensor(2.5, dtype=torch.float64)),
    ("none", torch.empty(0, 7, dtype=torch.float16)),
    ("mask", torch.tensor([True, False, True])),
    ("half", torch.arange(300, dtype=torch.bfloat16)),
    ("index", torch.arange(5)),
    ("wave", torch.tensor([1 + 2j])),
]


def test_every_field_begins_at_a_multiple_of_512_bytes_after_the_one_before():
    layout = Layout.of(MIXED)
    assert [field.offset for field in layout.fields] == [0, 512, 1024, 1024, 1536, 2560, 3072]
    assert layout.nbytes == 3584


@pytest.mark.parametrize("make", [Layout.view, Layout.own_view])
def test_every_tensor_comes_back_bit_for_bit(make):
    layout = Layout.of(MIXED)
    storage = slab(layout)
    for field, (_, tensor) in zip(layout.fields, MIXED, strict=True):
        make(storage, field).copy_(tensor)
    for field, (_, tensor) in zip(layout.fields, MIXED, strict=True):
        again = make(storage, field)
        assert (again.dtype, again.shape, again.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(again, tensor)
    assert storage.nbytes() == layout.nbytes


DENSE = {
    "contiguous": torch.empty(2, 3, 4),
    "transposed": torch.empty(3, 4).t(),
    "channels_last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "size_one_dimension": torch.empty(4, 1, 3).as_strided((4, 1, 3), (3, 99, 1)),
    "zero_sized": torch.empty(3, 0).t(),
    "scalar": torch.tensor(1.0),
}
NOT_DENSE = {
    "expanded": torch.empty(1, 3).expand(4, 3),
    "overlapping": torch.empty(6).as_strided((3, 3), (1, 1)),
    "gaps": torch.empty(4, 6)[:, :3],
    "every_second": torch.empty(8)[::2],
}


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_tensor_keeps_its_strides(kind):
    tensor = DENSE[kind]
    layout = Layout.of([("weight", tensor)])
    view = Layout.view(slab(layout), layout.fields[0])
    assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
    assert layout.nbytes == aligned(tensor.numel() * 4)


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_tensor_with_gaps_or_overlaps_becomes_contiguous(kind):
    tensor = NOT_DENSE[kind]
    layout = Layout.of([("weight", tensor)])
    view = Layout.view(slab(layout), layout.fields[0])
    assert view.shape == tensor.shape
    assert view.is_contiguous()
    assert layout.fields[0].nbytes == tensor.numel() * 4


@pytest.mark.parametrize("make", [Layout.view, Layout.own_view])
def test_writing_one_tensor_in_place_leaves_the_version_of_its_neighbour(make):
    layout = Layout.of([("a", torch.empty(3)), ("b", torch.empty(3))])
    storage = slab(layout)
    a, b = (make(storage, field) for field in layout.fields)
    before = a._version, b._version
    a.add_(1)
    assert (a._version, b._version) == (before[0] + 1, before[1])


def test_saving_an_own_view_writes_only_its_bytes():
    layout = Layout.of([("small", torch.empty(4)), ("large", torch.empty(100_000))])
    storage = slab(layout)
    small = layout.fields[0]
    assert Layout.own_view(storage, small).untyped_storage().nbytes() == 16
    assert saved_nbytes(Layout.own_view(storage, small)) == saved_nbytes(torch.zeros(4)) < 4096
    assert saved_nbytes(Layout.view(storage, small)) > 400_000
