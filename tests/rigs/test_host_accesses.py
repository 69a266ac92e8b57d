"""The simulated device reports what the host does with pinned memory before it has waited for the copy that uses it."""

import ctypes
import os
import random
import threading
import time

import numpy as np
import pytest
import torch
from often import often

import simgpu

D = "simgpu"
acc = torch.accelerator
config = simgpu.config
PAGE = os.sysconf("SC_PAGESIZE")


def up(host, device=None, stream=None):
    """A copy to the device that is queued, and done or not."""
    device = torch.empty(host.shape, dtype=host.dtype, device=D) if device is None else device
    with stream or acc.current_stream():
        device.copy_(host, non_blocking=True)
    return device


def down(host, stream=None):
    """A copy to the host that is queued, and done or not."""
    device = torch.ones(host.shape, dtype=host.dtype, device=D)
    with stream or acc.current_stream():
        host.copy_(device, non_blocking=True)
    return device


def pinned(n=5 * PAGE // 4):
    return torch.zeros(n, pin_memory=True)


def libc_memset(host):
    ctypes.memset(host.data_ptr(), 1, host.nbytes)


def direct_read(host):
    """As a file that is read into pinned memory."""
    with open("file", "wb") as file:
        file.write(bytes(host.nbytes))
    descriptor = os.open("file", os.O_RDONLY)
    assert os.preadv(descriptor, [memoryview(host.numpy())], 0) == host.nbytes
    os.close(descriptor)


def direct_write(host):
    descriptor = os.open("file", os.O_WRONLY | os.O_CREAT)
    assert os.pwritev(descriptor, [memoryview(host.numpy())], 0) == host.nbytes
    os.close(descriptor)


def set_last(host):
    host[-1] = 3


def numpy_reads(host):
    assert np.isfinite(host.numpy().sum())


def in_a_thread(host):
    thread = threading.Thread(target=host.fill_, args=(2,))
    thread.start()
    thread.join()


WRITES = [torch.Tensor.zero_, set_last, libc_memset, direct_read, in_a_thread, lambda host: host.numpy().fill(1)]
READS = [torch.Tensor.sum, torch.Tensor.clone, numpy_reads, direct_write, lambda host: host[-1].item()]


def waits():
    """What orders the host after a copy that was queued on the current stream."""
    stream = acc.current_stream()

    def poll(ready):
        patience = time.monotonic() + 10
        while not ready() and time.monotonic() < patience:
            time.sleep(0.001)
        assert ready()

    def another_stream_waited():
        other = torch.Stream(device=D)
        other.wait_stream(stream)
        other.synchronize()

    event = stream.record_event()
    return [
        event.synchronize,
        stream.synchronize,
        acc.synchronize,
        lambda: poll(event.query),
        lambda: poll(stream.query),
        another_stream_waited,
        lambda: torch.ones(1, device=D).item(),
        lambda: torch.ones(3, device=D).cpu(),
    ]


def assert_one_race(what):
    (race,) = simgpu.races()
    assert what in race and "Stack (most recent call first):\n  File" in race, race


# ---- which accesses


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_wait_for_a_copy_up_is_reported(write):
    host = pinned()
    up(host)
    write(host)
    assert_one_race("the host writes memory that copy H2D reads on stream 0")


@pytest.mark.parametrize("access", [*WRITES, *READS])
def test_an_access_before_the_wait_for_a_copy_down_is_reported(access):
    host = pinned()
    down(host)
    access(host)
    assert_one_race("memory that copy D2H writes on stream 0")


@pytest.mark.slow
@pytest.mark.parametrize("copy", [up, down])
@pytest.mark.parametrize("number", range(8))
def test_an_access_after_a_wait_is_allowed(copy, number):
    host = pinned()
    copy(host)
    waits()[number]()
    for access in [*READS, *WRITES]:
        access(host)
    assert not simgpu.races()


# ---- which bytes


@pytest.mark.parametrize("copy", [up, down])
def test_bytes_beside_a_copy_in_its_pages_are_free(copy):
    host = pinned(3 * PAGE)
    used = slice(100, 2 * PAGE + 11)
    host[:100] = 2
    copy(host[used])
    host[: used.start].mul_(3).sum()
    host[used.stop :].add_(1).numpy().sum()
    direct_read(host[: used.start])
    direct_write(host[used.stop :])
    assert not simgpu.races()
    host[used][-1] = 1
    host[used.start - 1] = 1
    assert len(simgpu.races()) == 1


@pytest.mark.slow
def test_memory_that_its_owner_pinned_is_checked():
    memory = np.ones(3 * PAGE, dtype=np.float32)
    host = torch.from_numpy(memory)
    simgpu.pin(host.data_ptr(), host.nbytes)
    device = up(host)
    memory[PAGE] = 5
    assert_one_race("the host writes memory that copy H2D reads")
    down(host)
    simgpu.unpin(host.data_ptr())  # as cudaHostUnregister: nobody watches any more
    host.zero_()
    acc.synchronize()
    assert device.numel() == host.numel() and not simgpu.races()


# ---- any order of events


@pytest.mark.parametrize("seed", often(range(100), 0, 1, 2))
def test_exactly_the_unordered_accesses_of_programs_are_reported(seed):
    rnd = random.Random(seed)
    config.h2d_us, config.d2h_us = rnd.choice([(0, 0), (200, 0), (0, 200), (100, 100)])
    hosts = [pinned(rnd.choice([8, 600, 3000])) for _ in range(3)]
    devices = [torch.zeros(3000, device=D) for _ in range(4)]
    streams = [torch.Stream(device=D) for _ in range(4)]
    acc.synchronize()
    queued, waited, events = [0] * 4, [0] * 4, []  # of each stream
    uses = []  # (stream, position, host, begin, end, whether it is written)

    def part():
        host = rnd.randrange(3)
        begin, end = sorted(rnd.sample(range(len(hosts[host]) + 1), 2))
        return host, begin, end

    def covers(stream, position):
        waited[stream] = max(waited[stream], position)
        uses[:] = [use for use in uses if use[1] > waited[use[0]]]

    for _ in range(60):
        kind, number = rnd.choice(["up", "down", "read", "write", "record", "event", "stream"]), rnd.randrange(4)
        stream, device = streams[number], devices[number]
        if kind in ("up", "down"):
            host, begin, end = part()
            there, here = device[: end - begin], hosts[host][begin:end]
            with stream:
                there.copy_(here, non_blocking=True) if kind == "up" else here.copy_(there, non_blocking=True)
            queued[number] += 1
            uses.append((number, queued[number], host, begin, end, kind == "down"))
        elif kind in ("read", "write"):
            host, begin, end = part()
            hit = [
                use
                for use in uses
                if use[2] == host and use[3] < end and begin < use[4] and (use[5] or kind == "write")
            ]
            hosts[host][begin:end].add_(1) if kind == "write" else hosts[host][begin:end].sum()
            found = [race for race in simgpu.races() if "the host" in race]  # else of two copies
            assert len(found) == len(hit), (hit, found)
            uses[:] = [use for use in uses if use not in hit]  # each is reported once
        elif kind == "record":
            events.append((stream.record_event(), number, queued[number]))
        elif kind == "event" and events:
            event, number, position = rnd.choice(events)
            event.synchronize()
            covers(number, position)
        elif kind == "stream":
            stream.synchronize()
            covers(number, queued[number])
    simgpu.races()
