"""Gradients that came down in half precision are widened where they lie, to the bits of torch's own cast."""

from __future__ import annotations

import pytest
import torch

from sp_lightning.optim import native


def halves(count, dtype):
    """Make numbers of any bits; of NaNs in FP16 torch makes several, depending on where in a tensor they lie."""
    numbers = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16).view(dtype)
    return numbers.masked_fill_(numbers.isnan(), 0) if dtype is torch.float16 else numbers


def in_a_room(numbers, ahead=0):
    """Lay numbers into the second half of a room, or so far behind it; return them and the room."""
    count = len(numbers)
    storage = torch.empty(4 * (count + ahead) + 4).untyped_storage()
    narrow = torch.empty(0, dtype=numbers.dtype).set_(storage, count + ahead, (count,), (1,))
    return narrow.copy_(numbers), torch.empty(0).set_(storage, 0, (count,), (1,))


@pytest.fixture(scope="module")
def library():
    """Compiled code that has been compared."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    native.LIBRARY.steps(optimizer, optimizer.param_groups[0])
    native.LIBRARY.wait()
    if native.LIBRARY.failure:
        pytest.skip(native.LIBRARY.failure)
    return native.LIBRARY


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count, ahead", [(1, 0), (31, 0), (16384, 0), (100_001, 0), (300_000, 70_001), (1 << 20, 0)])
def test_compiled_code_widens_as_torch_does_with_any_number_of_threads(
    library, monkeypatch, count, ahead, dtype, threads
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    numbers = halves(count, dtype)
    for past_the_cache in (False, True, True):
        monkeypatch.setattr(native, "PAST_THE_CACHE", 0 if past_the_cache else count + 1)
        narrow, room = in_a_room(numbers, ahead)
        version = room._version
        assert library.widen(narrow, room)
        assert room._version > version
        assert torch.equal(room.view(torch.int32), numbers.float().view(torch.int32))


def test_compiled_code_does_not_widen_over_what_it_has_not_read(library):
    """Where the memory does not lie as it should, it refuses; other types and NaNs in FP16 are torch's as well."""
    room = torch.zeros(100)
    narrow = room.view(torch.bfloat16)[99:199]
    assert not library.widen(narrow, room)
    assert not library.widen(narrow[:0], room[:0])
    assert not library.widen(torch.zeros(4, dtype=torch.float64), room[:4])
    half = room.view(torch.float16)[100:]
    half[70] = float("nan")
    assert not library.widen(half, room)
    half[70] = 0
    assert not room.any()
