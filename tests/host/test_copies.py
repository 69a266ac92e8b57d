"""What a copy waits for, told apart from what else happens to be in order around it."""

import contextlib

import pytest
import torch

from sp_lightning.host.device import Device, Ring
from sp_lightning.host.staging import StagedCopy, StagingRing

pytestmark = pytest.mark.simgpu

NBYTES = 64 << 10


def late(direction="d2h"):
    """Makes copies take so long that whatever does not wait for them comes first."""
    import simgpu

    setattr(simgpu.config, f"{direction}_us", 50_000)


@pytest.fixture(params=["pinned", "pageable"])
def at(request):
    import simgpu  # noqa: F401  # the device

    with contextlib.closing(Device("simgpu", request.param)) as device:
        yield device


def on_device(at, value):
    there = torch.full((NBYTES,), value, dtype=torch.uint8, device=at.torch_device)
    at.synchronize()
    return there


def test_a_copy_up_runs_behind_the_copy_down_that_it_names(at):
    host, source, target = at.passing(NBYTES), on_device(at, 7), on_device(at, 0)
    late()
    down = at.send_down(host, source)
    up = at.send_up(target, host, after=down)
    up.wait(at.current_stream())
    assert target.eq(7).all()


def test_a_ring_that_is_closed_has_the_bytes_of_all_copies(at):
    host, source, ring = at.passing(NBYTES), on_device(at, 7), Ring()
    late()
    ring.hold(source, [at.send_down(host, source)], at.current_stream())
    ring.close()
    assert host.eq(7).all()


def test_after_a_failed_copy_nothing_is_written_any_more():
    import simgpu

    with contextlib.closing(Device("simgpu", "pageable")) as at:
        stream = at.new_stream()
        ring = StagingRing(stream, [torch.empty(NBYTES, dtype=torch.uint8).pin_memory()], "test")
        late("h2d")
        there, here = on_device(at, 0), torch.zeros(2 * NBYTES, dtype=torch.uint8)  # more bytes than there is room for
        copy = ring.copy(stream.record_event(), there, here, contextlib.nullcontext())
        assert isinstance(copy, StagedCopy)
        with pytest.raises(ValueError, match="zip"):
            copy.synchronize()
        assert stream.query() and not simgpu.races()
        ring.close()
