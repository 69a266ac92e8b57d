"""Host memory: exact, locked once and unlocked once where a device is told of it, and copied through a ring where it
can not be locked."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_cudart
import pytest
import torch

import models
import parity
import simgpu
from sp_lightning.compat.references import uses_of
from sp_lightning.memory.device import Device
from sp_lightning.memory.staging import StagingRing

SIMGPU = torch.device("simgpu", 0)


@pytest.fixture
def cudart(monkeypatch):
    return fake_cudart.install(monkeypatch)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_copy_through_the_ring_ends_when_no_tensor_of_the_ring_is_over_its_target(way):
    begins = threading.Event()

    @contextlib.contextmanager
    def around():
        begins.wait()
        yield

    host, on_device = torch.ones(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8, device=SIMGPU)
    ring = StagingRing(torch.Stream(SIMGPU), [torch.empty(100, dtype=torch.uint8).pin_memory() for _ in range(2)], way)
    target, found = on_device if way == "up" else host, []
    storage = target.untyped_storage()
    before = uses_of([storage])
    begin = torch.Stream(SIMGPU).record_event()
    if way == "up":
        end = ring.up(begin, [(on_device, host)], around(), uncut=[(on_device[:8], host[:8])]).on_device
    else:
        end = ring.down(begin, [(host, on_device)], around()).on_host
    end.add_done_callback(lambda _: found.append(uses_of([storage])))
    torch.accelerator.synchronize()
    begins.set()
    ring.close()
    assert found == [before]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_copy_waits_for_what_its_stream_has_and_not_for_what_comes_there_later(way):
    device, begins = Device(SIMGPU, host_memory="pageable"), threading.Event()

    @contextlib.contextmanager
    def around():
        begins.wait()
        yield

    host, there = torch.ones(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8, device=SIMGPU)
    device.synchronize()

    def copy():
        return device.send_up([(there, host)], around()) if way == "up" else device.send_down([(host, there)], around())

    first = copy()  # which its thread queues within
    with simgpu.hold(device.up, device.down):
        second = copy()
        begins.set()
        first_end, until = first.on_device.result(), time.monotonic() + 30
        while not first_end.query() and time.monotonic() < until:
            time.sleep(1e-3)
        assert first_end.query()
        second_end = second.on_device.result()
        time.sleep(0.1)
        assert not second_end.query()
    second.synchronize()
    device.close()


def test_a_copy_through_the_ring_that_fails_leaves_none_of_its_pieces_under_way(monkeypatch):
    monkeypatch.setattr(simgpu.config, "h2d_us", 100_000)
    stream = torch.Stream(SIMGPU)
    ring = StagingRing(stream, [torch.empty(100, dtype=torch.uint8).pin_memory() for _ in range(2)], "up")
    host, there = torch.ones(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8, device=SIMGPU)
    torch.accelerator.synchronize()

    @contextlib.contextmanager
    def failing():
        yield
        raise ZeroDivisionError

    copy = ring.up(stream.record_event(), [(there, host)], failing())
    with pytest.raises(ZeroDivisionError):
        copy.synchronize()
    assert stream.query()
    ring.close()


@pytest.mark.parametrize("case", ["mlp", "lstm"])
@pytest.mark.few(1)
def test_a_trainer_trains_through_the_ring(case):
    parity.check(models.case(case), {"host_memory": "pageable", "window": 2}, accelerator="simgpu")


# ---- the process


@pytest.mark.slow
@pytest.mark.parametrize("device", ["simgpu", "cpu"])
@pytest.mark.parametrize(
    "case", ["FP32", "FP32, offloaded", "autocast", "master weights", "frozen but for the last block"]
)
def test_a_process_of_half_a_gigabyte_of_parameters_has_as_much_memory_as_planned(case, device):
    benchmark = Path(__file__).parents[2] / "benchmarks" / "host_memory.py"
    command = [sys.executable, benchmark, "--case", case, "--device", device]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    terms = found["terms"]
    on_device = terms.pop("device (here the host)")  # measured, not planned
    assert terms["weights"] > 500e6
    assert sum(terms.values()) == pytest.approx(found["peak"] - on_device, rel=0.1)
    assert found["peak in setup"] < 1.1 * (terms["weights"] + terms["wire"]) + on_device  # where the way up is tried
