"""Slabs are exact, locked and unlocked once; where locks are refused, copies go through a ring with the same bits."""

import copy
import logging
import os
import threading
import time

import pytest
import torch
from often import often
from stream_programs import POLICIES, Net, Program, check, device_named, stream, streamed

from sp_lightning.errors import HostMemoryError, OptionError, UnsupportedError
from sp_lightning.host import device as devices
from sp_lightning.host import memory
from sp_lightning.host.device import DeviceMemoryError, aligned
from sp_lightning.kernels.loader import unforked
from sp_lightning.stream.residency import Presence
from sp_lightning.stream.window import Window


class SimulatedLock:
    """Page locks of the simulated device, as CUDA registers memory."""

    def __init__(self):
        self.locked = {}

    def lock(self, address, nbytes):
        import simgpu

        simgpu.pin(address, nbytes)
        self.locked[address] = nbytes

    def unlock(self, address):
        import simgpu

        simgpu.unpin(address)
        del self.locked[address]


@pytest.fixture
def locks(monkeypatch):
    lock = SimulatedLock()
    monkeypatch.setattr(devices, "page_lock", lambda device: lock)
    return lock


@pytest.mark.simgpu
def test_slabs_are_locked_to_the_byte_and_unlocked_at_the_end(locks):
    model = Net()
    with streamed(model, "simgpu") as handle:
        units = [unit for unit in handle.units if not unit.is_resident]
        assert sorted(locks.locked.values()) == sorted(unit.nbytes for unit in units)
        assert all(unit.nbytes == sum(aligned(4 * weight.host.numel()) for weight in unit.weights) for unit in units)
    assert locks.locked == {} and model.blocks[0].up.weight.sum().isfinite()


@pytest.mark.parametrize("window", often([2, 1, 3]))
@pytest.mark.parametrize("policy", often(POLICIES))
def test_at_most_the_window_and_what_is_in_use_is_there(policy, window, monkeypatch):
    counts, visit = [], Window.visit

    def counted(self, unit):
        visit(self, unit)
        there = {one.index for one in self._units if not one.is_resident and one.memory.state is not Presence.ABSENT}
        counts.append(len(there - (self._in_use.keys() - {unit.index})))

    monkeypatch.setattr(Window, "visit", counted)
    model = Net(count=6)
    with streamed(model, "cpu", window=window, activations=policy):
        for skip in ((), (1, 4), ()):
            model(torch.ones(4, 8), skip).sum().backward()
            with torch.no_grad():
                model.blocks[3](model.blocks[5](model.emb(torch.ones(4, 8))))
            torch.nn.functional.linear(torch.ones(4, 32), model.blocks[2].up.weight).sum().backward()
    assert max(counts) == window


@pytest.mark.parametrize("name", ["blocks.0.up.weight", "optimizer state"])
@pytest.mark.simgpu
def test_a_forked_process_that_reads_a_locked_slab_gets_an_error(locks, name):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with streamed(model, "simgpu", optimizer_device="device"):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        optimizer.step()
        weight = model.blocks[0].up.weight
        state = optimizer.state[weight]["exp_avg"]
        child = os.fork()
        if not child:
            try:
                (weight.detach() if "up" in name else state).sum()
            except RuntimeError as error:
                os._exit(7 if f"{name} lies in page-locked memory" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert model.blocks[0].up.weight.detach().sum().isfinite()


def test_no_process_forks_while_a_library_is_loaded():
    order = []

    def load():
        with unforked:
            begun.set()
            time.sleep(0.2)
            order.append("loaded")

    begun, thread = threading.Event(), threading.Thread(target=load)
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        os._exit(0 if unforked.acquire(blocking=False) else 1)
    order.append("forked")
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and order == ["loaded", "forked"]


def refuse(nbytes):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("policy", often(POLICIES))
@pytest.mark.simgpu
def test_refused_locks_change_no_bit(monkeypatch, policy):
    monkeypatch.setattr(memory, "locked_by_torch", refuse)
    check(Program(lambda run, model: run.loop(model)), "simgpu", policy, window=2)


@pytest.mark.simgpu
def test_refused_locks_are_said_once(monkeypatch, caplog):
    monkeypatch.setattr(memory, "locked_by_torch", refuse)
    model = Net()
    with caplog.at_level(logging.WARNING), streamed(model, "simgpu"):
        model(torch.ones(4, 8, device=device_named("simgpu")))
    (said,) = [record.getMessage() for record in caplog.records if "page-locked" in record.getMessage()]
    assert "(on purpose)" in said and "2 staging buffers" in said


@pytest.mark.simgpu
def test_refused_locks_are_an_error_where_the_user_requires_them(monkeypatch):
    monkeypatch.setattr(memory, "locked_by_torch", refuse)
    with pytest.raises(HostMemoryError, match=r"host_memory='pinned'.*could not be page-locked.*host_memory='auto'"):
        stream(Net(), "simgpu", host_memory="pinned")


@pytest.mark.parametrize(
    "name, said", [("meta", "holds no data"), ("mps", "shares its memory"), ("xpu", "device must be one of")]
)
def test_a_device_that_cannot_stream_is_refused(name, said):
    with pytest.raises((OptionError, UnsupportedError), match=said):
        stream(Net(), name)


@pytest.mark.simgpu
def test_a_full_device_gives_up_idle_units_with_the_same_bits():
    import simgpu

    torch.manual_seed(0)
    model, x = Net(count=8), torch.ones(4, 8, device="simgpu")
    want = copy.deepcopy(model).to("simgpu")(x)
    with streamed(model, "simgpu", window=6) as handle, torch.no_grad():
        torch.accelerator.synchronize()
        room = 3 * handle.units[0].nbytes + 8192  # of six units
        simgpu.config.capacity = torch.accelerator.memory_allocated() + room
        for _ in range(3):
            assert torch.equal(model(x), want)
        simgpu.config.capacity = 1 << 30


@pytest.mark.simgpu
def test_too_little_room_for_one_unit_is_an_error_with_numbers():
    import simgpu

    model, x = Net(), torch.ones(4, 8, device="simgpu")
    with streamed(model, "simgpu"), torch.no_grad():
        torch.accelerator.synchronize()
        simgpu.config.capacity = torch.accelerator.memory_allocated() + 4096
        with pytest.raises(DeviceMemoryError, match=r"blocks\.0 needs 18\.\d+ KiB.*activations='recompute'"):
            model(x)
        simgpu.config.capacity = 1 << 30


@pytest.mark.simgpu
def test_too_little_room_for_residents_leaves_a_plain_module():
    import simgpu

    model = Net()
    wanted = [param.detach().clone() for param in model.parameters()]
    torch.accelerator.synchronize()
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 24000  # not of all resident ones
    with pytest.raises(torch.OutOfMemoryError):
        stream(model, "simgpu", window=1, resident=4)
    simgpu.config.capacity = 1 << 30
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    assert all(map(torch.equal, model.parameters(), wanted))
