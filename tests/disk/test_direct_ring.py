"""Pieces hold every byte of every weight once, and elements whole; forked processes do not get the ring's memory."""

import contextlib
import errno
import os
import random
import threading
import time
from types import SimpleNamespace

import in_files
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_lightning.compat.references import uses_of
from sp_lightning.core.telemetry import Counters
from sp_lightning.disk import direct_ring
from sp_lightning.disk.direct_ring import GAP, DirectRing, Target, pieces
from sp_lightning.disk.source_files import BLOCK, Place, SourceFile
from sp_lightning.errors import DiskError
from sp_lightning.memory.device import Device

weights = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3 * GAP), st.integers(1, 40000), st.sampled_from([1, 2, 4, 8])),
    min_size=1,
    max_size=8,
)


@pytest.mark.quick
@given(weights, st.sampled_from([2 * BLOCK, 5 * BLOCK, 1 << 20]))
def test_pieces_have_every_byte_once_and_no_element_is_cut(given_weights, most):
    files = [SimpleNamespace(path="a"), SimpleNamespace(path="b")]
    places = [
        (index, Place(files[file], offset, elements * itemsize), itemsize)
        for index, (file, offset, elements, itemsize) in enumerate(given_weights)
    ]
    cut = pieces(places, most)
    within = dict.fromkeys(range(len(places)), 0)
    for piece in cut:
        assert piece.begin % BLOCK == 0 and 0 < piece.nbytes <= most
        assert piece.nbytes == max(part.at + part.nbytes for part in piece.parts)
        for part in piece.parts:
            index, place, itemsize = places[part.weight]
            assert piece.file is place.file and piece.begin + part.at == place.offset + part.within
            assert part.within == within[index] and part.nbytes > 0 and part.nbytes % itemsize == 0
            within[index] += part.nbytes
    assert within == {index: place.nbytes for index, place, _ in places}


@pytest.mark.quick
def test_weights_that_are_close_are_read_together():
    file = SimpleNamespace(path="a")
    near, far = Place(file, 10000 + GAP, 500), Place(file, 10500 + 2 * GAP + 1, 500)
    cut = pieces([(0, Place(file, 100, 9900), 4), (1, near, 4), (2, far, 4)], 64 << 20)
    assert [[part.weight for part in piece.parts] for piece in cut] == [[0, 1], [2]]


def test_a_forked_process_does_not_get_the_buffers(device):
    ring = DirectRing(Device(device), 1 << 20)
    addresses = [buffer.flat.data_ptr() for buffer in ring._buffers]
    assert all(address % BLOCK == 0 and "dc" in in_files.flags_at(address) for address in addresses)
    ring.close()
    assert not any("dc" in in_files.flags_at(address) for address in addresses)


@pytest.fixture
def filed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(60000))
    file = SourceFile(str(path))
    yield file, path.read_bytes()
    file.close()


def jobs_of(file, flat, most=2 * BLOCK):
    cut = pieces([(0, Place(file, 1001, len(flat)), 1)], most)
    return [
        (piece, [Target(part.at, part.nbytes, flat[part.within : part.within + part.nbytes], None)])
        for piece in cut
        for part in piece.parts
    ]


def test_fills_of_more_pieces_than_buffers_have_their_bytes(device, filed):
    file, content = filed
    found = Device(device)
    ring = DirectRing(found, 2 * BLOCK)
    flats = [torch.zeros(50000, dtype=torch.uint8, device=found.torch_device) for _ in range(3)]
    found.synchronize()
    fills = [ring.fill(Counters(), [], jobs_of(file, flat), contextlib.nullcontext(), [file]) for flat in flats]
    for fill, flat in zip(fills, flats, strict=True):
        fill.wait(found.compute)
        assert bytes(flat.cpu().numpy()) == content[1001:51001]
    ring.close()


def test_a_fill_ends_when_no_tensor_of_the_ring_is_over_its_target(device, filed):
    file, _ = filed
    found, begins, seen = Device(device), threading.Event(), []

    @contextlib.contextmanager
    def around():
        begins.wait()
        yield

    flat = torch.zeros(50000, dtype=torch.uint8, device=found.torch_device)
    ring, storage, jobs = DirectRing(found, 2 * BLOCK), flat.untyped_storage(), jobs_of(file, flat[1000:])
    found.synchronize()
    before = uses_of([storage])
    fill = ring.fill(Counters(), [(flat[:500], torch.ones(500, dtype=torch.uint8))], jobs, around(), [file])
    fill.on_device.add_done_callback(lambda _: seen.append(uses_of([storage])))
    begins.set()
    ring.close()
    assert seen == [before]


@pytest.mark.simgpu
def test_a_fill_waits_for_what_the_stream_has_and_not_for_what_comes_there_later(filed):
    import simgpu

    file, content = filed
    found, begins = Device("simgpu"), threading.Event()

    @contextlib.contextmanager
    def around():
        begins.wait()
        yield

    ring = DirectRing(found, 2 * BLOCK)
    flats = [torch.zeros(5000, dtype=torch.uint8, device=found.torch_device) for _ in range(2)]
    found.synchronize()
    first = ring.fill(Counters(), [], jobs_of(file, flats[0]), around(), [file])  # which is queued within
    with simgpu.hold(found.up):
        second = ring.fill(Counters(), [], jobs_of(file, flats[1]), contextlib.nullcontext(), [file])
        begins.set()
        first_end, until = first.on_device.result(), time.monotonic() + 30
        while not first_end.query() and time.monotonic() < until:
            time.sleep(1e-3)
        assert first_end.query()
        end = second.on_device.result()
        time.sleep(0.1)
        assert not end.query()
    for fill, flat in zip((first, second), flats, strict=True):
        fill.wait(found.compute)
        assert bytes(flat.cpu().numpy()) == content[1001:6001]
    ring.close()


def test_after_a_fill_that_failed_the_next_one_has_its_bytes(device, filed, monkeypatch):
    file, content = filed
    found = Device(device)
    ring = DirectRing(found, 2 * BLOCK)
    flats = [torch.zeros(50000, dtype=torch.uint8, device=found.torch_device) for _ in range(2)]
    found.synchronize()
    read, failed = os.preadv, []

    def fail_once(fd, views, at):
        if at >= 6 * BLOCK and not failed:
            failed.append(at)
            raise OSError(errno.EIO, "I/O error")
        return read(fd, views, at)

    monkeypatch.setattr(os, "preadv", fail_once)
    first, second = (ring.fill(Counters(), [], jobs_of(file, flat), contextlib.nullcontext(), [file]) for flat in flats)
    with pytest.raises(DiskError) as caught:
        first.wait(found.compute)
    assert caught.value.offset == failed[0]
    second.wait(found.compute)
    assert bytes(flats[1].cpu().numpy()) == content[1001:51001]
    ring.close()


def test_a_fill_whose_reading_fails_ends_where_it_is_sent(device, filed, monkeypatch):
    file, content = filed
    found, begins, submitted = Device(device), threading.Event(), []

    @contextlib.contextmanager
    def around():
        begins.wait()
        yield

    ring = DirectRing(found, 2 * BLOCK)
    flats = [torch.zeros(50000, dtype=torch.uint8, device=found.torch_device) for _ in range(2)]
    found.synchronize()
    submit = ring._threads.submit

    def fail_second(*given):
        submitted.append(given)
        if len(submitted) == 2:
            raise RuntimeError("can't start new thread")
        return submit(*given)

    monkeypatch.setattr(ring._threads, "submit", fail_second)
    first = ring.fill(Counters(), [], jobs_of(file, flats[0]), around(), [file])
    while len(submitted) < 2:
        time.sleep(1e-3)
    time.sleep(0.1)
    assert not first.on_device.done()  # a piece may still be sent
    begins.set()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        first.wait(found.compute)
    second = ring.fill(Counters(), [], jobs_of(file, flats[1]), contextlib.nullcontext(), [file])
    second.wait(found.compute)
    assert bytes(flats[1].cpu().numpy()) == content[1001:51001]
    ring.close()


def test_a_wait_for_the_disk_is_counted(filed, monkeypatch):
    file, _ = filed
    found, counters, read = Device("cpu"), Counters(), os.preadv
    ring = DirectRing(found, 2 * BLOCK)
    monkeypatch.setattr(os, "preadv", lambda *given: time.sleep(0.02) or read(*given))
    fill = ring.fill(counters, [], jobs_of(file, torch.zeros(50000, dtype=torch.uint8)), contextlib.nullcontext(), [])
    fill.wait(found.compute)
    assert counters.stall_ms["disk"] > 5
    ring.close()


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_a_weight_is_converted_wherever_in_the_file_it_begins(shift, device, tmp_path):
    values = torch.randn(9001)
    path = tmp_path / "file"
    path.write_bytes(bytes(1000 + shift) + values.numpy().tobytes())
    file, found = SourceFile(str(path)), Device(device)
    ring = DirectRing(found, 2 * BLOCK)
    flat = torch.zeros(2 * len(values), dtype=torch.uint8, device=found.torch_device)
    found.synchronize()
    jobs = [
        (piece, [Target(at, n, flat[within // 2 : (within + n) // 2], (torch.float32, torch.bfloat16))])
        for piece in pieces([(0, Place(file, 1000 + shift, values.nbytes), 4)], 2 * BLOCK)
        for _, at, within, n in piece.parts
    ]
    assert len(jobs) > direct_ring.BUFFERS / 2
    fill = ring.fill(Counters(), [], jobs, contextlib.nullcontext(), [file])
    fill.wait(found.compute)
    assert torch.equal(flat.cpu().view(torch.bfloat16), values.bfloat16())
    ring.close()
    file.close()


@pytest.mark.simgpu
def test_a_buffer_is_read_into_again_only_after_the_device_has_read_it(filed):
    import simgpu

    file, content = filed
    found = Device("simgpu")
    ring = DirectRing(found, 2 * BLOCK)
    flats = [torch.zeros(50000, dtype=torch.uint8, device=found.torch_device) for _ in range(3)]
    found.synchronize()
    with simgpu.hold(found.up):
        fills = [ring.fill(Counters(), [], jobs_of(file, flat), contextlib.nullcontext(), [file]) for flat in flats]
        time.sleep(0.3)  # all that does not wait for the device is done by then
    for fill, flat in zip(fills, flats, strict=True):
        fill.wait(found.compute)
        assert bytes(flat.cpu().numpy()) == content[1001:51001]
    ring.close()


@pytest.mark.few(1)
def test_a_buffer_is_not_used_again_while_a_fill_that_failed_still_reads_into_it(device, filed, monkeypatch):
    """The first read fails, the two beside it end later: what they bring must not land in the next fill's buffers."""
    file, content = filed
    found = Device(device)
    ring = DirectRing(found, 2 * BLOCK)
    flats = [torch.zeros(50000, dtype=torch.uint8, device=found.torch_device) for _ in range(2)]
    found.synchronize()
    read, begun = os.preadv, []
    ends, sends = threading.Event(), threading.Event()

    def reading(fd, views, at):
        begun.append(at)
        if len(begun) == 1:
            raise OSError(errno.EIO, "I/O error")
        if len(begun) <= 3:
            ends.wait(10)
        return read(fd, views, at)

    @contextlib.contextmanager
    def held():
        sends.wait(10)
        yield

    monkeypatch.setattr(os, "preadv", reading)
    jobs = [jobs_of(file, flat) for flat in flats]
    first = ring.fill(Counters(), [], jobs[0][:3], contextlib.nullcontext(), [file])
    second = ring.fill(Counters(), [], jobs[1][: direct_ring.BUFFERS], held(), [file])
    for event in (ends, sends):
        time.sleep(0.3)  # all that does not wait for it is done by then
        event.set()
    with pytest.raises(DiskError):
        first.wait(found.compute)
    second.wait(found.compute)
    end = direct_ring.BUFFERS * 2 * BLOCK - 1001
    assert bytes(flats[1][:end].cpu().numpy()) == content[1001 : 1001 + end]
    ring.close()


@pytest.mark.simgpu
def test_host_memory_may_be_written_only_after_the_device_has_read_it():
    import simgpu

    found = Device("simgpu")
    ring, source = DirectRing(found, BLOCK), found.slab(4096)
    flat = torch.zeros(4096, dtype=torch.uint8, device=found.torch_device)
    found.synchronize()
    with simgpu.hold(found.up):
        fill = ring.fill(Counters(), [(flat, source)], [], contextlib.nullcontext(), [])
        time.sleep(0.2)
        assert not fill.query()
    fill.synchronize()
    fill.wait(found.compute)
    found.synchronize()
    ring.close()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.few(1)
def test_what_lies_over_a_file_may_be_written_only_after_the_file_was_read(writable, filed, monkeypatch):
    """Of a source file nothing can be written, and nobody waits for its reads."""
    file, _ = filed
    found, read, ends = Device("cpu"), os.preadv, threading.Event()
    ring = DirectRing(found, 2 * BLOCK)
    monkeypatch.setattr(os, "preadv", lambda *given: ends.wait(10) and read(*given))
    jobs = jobs_of(file, torch.zeros(50000, dtype=torch.uint8))
    fill = ring.fill(Counters(), [], jobs, contextlib.nullcontext(), [], writable=writable)
    time.sleep(0.2)
    assert fill.query() is not writable
    ends.set()
    fill.synchronize()
    fill.wait(found.compute)
    ring.close()
