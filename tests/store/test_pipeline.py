"""The pipeline by itself: what its ends wait for, where nothing else is in order around them."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

from sp_lightning.host.device import Device
from sp_lightning.store.files import BLOCK
from sp_lightning.store.pipeline import ElementSpan, Pipeline
from sp_lightning.store.scratch import ScratchFile

SLOW_US = 50_000  # of a copy


@pytest.fixture
def pipeline():
    import simgpu  # noqa: F401  # the device

    with contextlib.closing(Device("simgpu")) as device, contextlib.closing(Pipeline(device, BLOCK)) as made:
        made.device = device
        yield made


class Failing:
    """A file whose second read fails."""

    reads = 0

    def read(self, memory, offset, nbytes):
        self.reads += 1
        if self.reads == 2:
            raise OSError("on purpose")

    def check(self):
        pass


@pytest.mark.simgpu
def test_a_fill_ends_after_the_copies_that_are_given_to_it(pipeline):
    import simgpu

    host, flat = pipeline.device.slab(BLOCK), torch.empty(BLOCK, dtype=torch.uint8, device="simgpu")
    torch.accelerator.synchronize()
    simgpu.config.h2d_us = SLOW_US
    fill = pipeline.send_up(flat, [], [pipeline.device.send_up(flat, host)], "unit")
    fill.synchronize()
    host.zero_()
    assert not simgpu.races()


@pytest.mark.simgpu
def test_a_fill_that_fails_leaves_no_copy_under_way(pipeline):
    import simgpu

    flat = torch.empty(2 * BLOCK, dtype=torch.uint8, device="simgpu")
    torch.accelerator.synchronize()
    simgpu.config.h2d_us = SLOW_US
    place = SimpleNamespace(file=Failing(), offset=0)
    weight = SimpleNamespace(at=0, nbytes=2 * BLOCK, place=place)
    fill = pipeline.send_up(flat, [weight], [], "unit")
    fill.synchronize()
    assert pipeline._stream.query()
    with pytest.raises(OSError, match="on purpose"):
        fill.wait(torch.accelerator.current_stream())


@pytest.mark.simgpu
def test_windows_that_fail_have_written_what_was_begun(pipeline, tmp_path, monkeypatch):
    written, write = [], ScratchFile.write

    def slow(self, *args):
        time.sleep(0.1)
        write(self, *args)
        written.append(0)

    monkeypatch.setattr(ScratchFile, "write", slow)
    with contextlib.closing(ScratchFile(str(tmp_path))) as file:
        tensor = file.take(torch.empty(3 * BLOCK, dtype=torch.uint8))
        windows = [[ElementSpan(tensor, torch.uint8, at, at + BLOCK)] for at in range(0, 3 * BLOCK, BLOCK)]
        with contextlib.closing(pipeline.windows(file, windows)) as parts:
            next(parts), next(parts)  # the first is being written
        assert written == [0]
