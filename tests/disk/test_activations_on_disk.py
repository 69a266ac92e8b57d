"""Offloaded activations that exceed the budget go to the disk, the first ones, and come back ahead of backward."""

import contextlib
import errno
import functools
import gc
import itertools
import os
import threading
import time

import forks
import pytest
import torch
from held_disk import LONG_S, Disk
from in_files import flags_at
from torch import nn

import parity
import sp_lightning
from sp_lightning.core.telemetry import Counters
from sp_lightning.disk import activation_blocks, placement, state_ring
from sp_lightning.disk.activation_blocks import BEHIND, LEAST, ActivationBlocks
from sp_lightning.disk.scratch_file import OneProcess, ScratchFile
from sp_lightning.errors import DiskError, UnsupportedError
from sp_lightning.memory.device import Device
from sp_lightning.plan import plan

BLOCK = 1 << 12
LAYERS = 6
KINDS = ["offload", "recompute+offload"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)
    monkeypatch.setattr(activation_blocks, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(activation_blocks, "SMALLEST", BLOCK)


class Block(nn.Module):
    """What it saves has several sizes, none of them a block's, and a part that is saved twice."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(33, 97), nn.Linear(97, 33), nn.LayerNorm(33)

    def forward(self, x):
        wide = self.up(self.norm(x))
        return x + self.down(nn.functional.gelu(wide) * torch.sigmoid(wide))


def stack(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)]).to(dtype)


def streamed(net, device, activations="offload", **options):
    options = {"window": 2, "units": ["Block"], "host_budget": "0B", "disk": os.getcwd()} | options
    return sp_lightning.stream(net, device, activations=activations, **options)


def loss_of(net, device, number=0, autocast=False, rows=40):
    dtype = next(net.parameters()).dtype
    x = torch.randn(rows, 33, generator=torch.Generator().manual_seed(number)).to(device, dtype)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=autocast):
        return net(x).float().square().mean()


def store_of(handle):
    return handle.storage._activations


def alive(handle):
    """The numbers of the blocks in which anything is."""
    gc.collect()
    return sorted(store_of(handle)._blocks)


def trained(net, device, steps=3, accumulate=1, **given):
    found, optimizer = [], torch.optim.AdamW(net.parameters(), lr=0.01)
    for number in range(steps):
        for part in range(accumulate):
            loss = loss_of(net, device, accumulate * number + part, **given)
            loss.backward()
            found.append(loss.detach().clone())
        found += [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in net.parameters()]


# ---- the same bits


@parity.product(
    activations=KINDS,
    precision=["32-true", "bf16-mixed", "bf16-true"],
    accumulate=[1, 3],
    memory=["auto", "pageable"],
    device=parity.DEVICES,
)
@pytest.mark.few(3)
def test_training_with_activations_on_the_disk_is_that_in_memory(activations, precision, accumulate, memory, device):
    results = []
    for on_disk in (False, True):
        net = stack(torch.bfloat16 if precision == "bf16-true" else torch.float32)
        options = {"host_memory": memory} | ({} if on_disk else {"host_budget": None, "disk": None})
        with streamed(net, device, activations, **options) as handle:
            results.append(trained(net, device, accumulate=accumulate, rows=80, autocast=precision == "bf16-mixed"))
            if on_disk:
                assert "_scratch" in vars(store_of(handle))
    assert all(map(torch.equal, *results))


def outputs(net, x):
    """What each unit returns."""
    found = []
    hooks = [layer.register_forward_hook(lambda *given: found.append(given[-1])) for layer in net]
    net(x)
    for hook in hooks:
        hook.remove()
    passed = list(found)
    found.clear()  # a graph that runs a unit again refers to its hooks
    return passed


def twice(net, device, number):
    loss = loss_of(net, device, number)
    loss.backward(retain_graph=True)
    loss.backward()


def in_parts(net, device, number):
    """Backward comes to each unit by itself, and to some twice."""
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(number)).to(device)
    passed = outputs(net, x)
    for at in (3, 1, 5):
        passed[at].square().mean().backward(retain_graph=True)


def of_gradients(net, device, number):
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(number)).to(device).requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    grad.square().mean().backward()


def two_at_once(net, device, number):
    losses = [loss_of(net, device, number), loss_of(net, device, number + 100)]
    losses[0].backward()
    losses[1].backward()


def not_at_all(net, device, number):
    """A graph that is dropped, between the two that backward comes to."""
    loss_of(net, device, number).backward()
    loss_of(net, device, number + 1)
    with torch.no_grad():
        loss_of(net, device, number + 2)
    loss_of(net, device, number + 3).backward()


def a_branch(net, device, number):
    """Nobody asks for the gradients of what the last units saved."""
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(number)).to(device)
    outputs(net, x)[3].square().mean().backward()


def frozen(net, device, number):
    """Saved and never unpacked: their gradients are not needed."""
    net[3].requires_grad_(number % 2 == 1)
    loss_of(net, device, number).backward()
    net[3].requires_grad_(True)


class Stop(Exception):
    pass


def interrupted(net, device, number):
    def stop(*_):
        raise Stop

    for register in (net[4].register_forward_hook, net[2].register_full_backward_hook):
        hook = register(stop)
        with contextlib.suppress(Stop):
            loss_of(net, device, number).backward()
        hook.remove()
        net.zero_grad()
    loss_of(net, device, number).backward()


USES = [twice, in_parts, of_gradients, two_at_once, not_at_all, a_branch, frozen, interrupted]


@parity.product(use=USES, activations=KINDS, device=parity.DEVICES)
@pytest.mark.few(3)
def test_whatever_code_does_with_graphs_gradients_are_those_in_memory_and_nothing_is_left(use, activations, device):
    """Ranges of the file are used again: what a step takes of it is what the first one took."""
    results, taken = [], []
    for on_disk in (False, True):
        net = stack()
        found = []
        with streamed(net, device, activations, **({} if on_disk else {"host_budget": None, "disk": None})) as handle:
            for number in range(4):
                use(net, device, number)
                found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
                net.zero_grad()
                if on_disk:
                    assert alive(handle) == []
                    taken.append(store_of(handle)._scratch._end)
        results.append(found)
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    assert taken[-1] == taken[1]


# ---- what goes where


class Store:
    """A store on a device, and what was read and written of it, as numbers of blocks."""

    def __init__(self, device, room=0):
        self.device = sp_lightning.memory.device.Device(device)
        self.counters, self.moved = Counters(), []
        make = functools.partial(ScratchFile, os.getcwd(), OneProcess(), holds_activations=True)
        self.blocks = ActivationBlocks(make, self.device, self.counters, BLOCK, room)
        for name in ("_write", "_read"):
            setattr(self.blocks, name, functools.partial(self._note, name[1:], getattr(self.blocks, name)))

    def _note(self, name, move, block, *given):
        self.moved.append((name, block.number))
        move(block, *given)

    def save(self, nbytes, value):
        source = torch.full((nbytes,), value, dtype=torch.uint8, device=self.device.torch_device)
        self.device.down.wait_event(self.device.compute.record_event())
        place = self.blocks.receive(source)
        place.arrived.synchronize()
        return place

    def sent(self, place, nbytes):
        target = torch.zeros(nbytes, dtype=torch.uint8, device=self.device.torch_device)
        self.device.up.wait_event(self.device.compute.record_event())
        place.send(target).synchronize()
        return target.cpu()


@pytest.fixture
def store(device):
    made = Store(device)
    with contextlib.closing(made.blocks):
        yield made


def test_the_first_saved_are_written_and_the_last_come_back_first(store):
    places = [store.save(BLOCK, value) for value in range(10)]
    assert store.moved == [("write", number) for number in range(10 - LEAST + BEHIND)]
    assert [place.is_near for place in places] == [False] * 4 + [True] * 6
    while places:
        value = len(places) - 1
        assert bool((store.sent(places.pop(), BLOCK) == value).all())
    assert store.moved[6:] == [("read", number) for number in (3, 2, 1, 0)]  # two were written, and stayed


def test_memory_that_is_free_is_read_into_before_anyone_asks(store):
    places = [store.save(BLOCK, value) for value in range(12)]
    del places[8:]
    store.sent(places[7], BLOCK)
    assert store.moved[8:] == [("read", number) for number in (5, 4, 3, 2)]
    assert bool((store.sent(places[2], BLOCK) == 2).all()) and len(store.moved) == 12


def test_a_graph_that_is_kept_is_written_once_and_read_each_time(store):
    places = [store.save(BLOCK, value) for value in range(10)]
    for _ in range(3):
        for value in reversed(range(10)):
            assert bool((store.sent(places[value], BLOCK) == value).all())
    written = [number for name, number in store.moved if name == "write"]
    assert sorted(written) == sorted(set(written))
    assert len(store.blocks._all) == LEAST


@pytest.mark.parametrize("nbytes", [512, 1000, BLOCK - 512, BLOCK + 1, 5 * BLOCK + 700, 20 * BLOCK])
@pytest.mark.few(2)
def test_a_tensor_lies_in_as_many_blocks_as_it_takes(nbytes, store):
    places = [store.save(nbytes, value) for value in range(9)]
    for value, place in reversed(list(enumerate(places))):
        assert bool((store.sent(place, nbytes) == value).all())
    assert len(store.blocks._all) <= LEAST


def test_what_fits_stays_in_memory_and_has_no_file(device):
    made = Store(device, room=20 * BLOCK)
    with contextlib.closing(made.blocks):
        places = [made.save(BLOCK, value) for value in range(18)]
        assert made.moved == [] and "_scratch" not in vars(made.blocks)
        places += [made.save(BLOCK, value) for value in range(18, 21)]
        assert made.moved == [("write", number) for number in range(3)]
        assert made.blocks.host_nbytes == 20 * BLOCK


@parity.product(activations=KINDS, device=parity.DEVICES)
def test_memory_stays_within_the_room_that_the_budget_leaves(activations, device, monkeypatch):
    """Each block is written once a step, and only those that memory has no room for."""
    monkeypatch.setattr(placement, "MOST_SPARE", 0)
    net, seen = stack(), set()
    with streamed(net, device, activations, host_budget="1GiB") as handle:
        whole = handle.storage.placed.host.total
    for budget in (whole, whole + (40 << 10), whole + (4 << 20)):
        with streamed(net, device, activations, host_budget=budget) as handle:
            room, store = handle.storage.placed.room, store_of(handle)
            assert handle.storage.placed.host.total - LEAST * BLOCK + room <= budget
            optimizer = torch.optim.AdamW(net.parameters())
            for number in range(3):
                before = store._counters.disk_written
                loss_of(net, device, number, rows=200).backward()
                moved = store._counters.disk_written - before
                optimizer.step()
                optimizer.zero_grad()
                assert store.host_nbytes <= max(room, LEAST * BLOCK)
                assert handle.stats()["host_bytes"] <= budget
            most = max(LEAST, room // BLOCK)
            count = store._next // 3
            assert moved == BLOCK * max(0, count - most + BEHIND)
            seen.add(moved)
    assert 0 in seen and len(seen) > 1


@parity.product(activations=KINDS, accumulate=[1, 2], device=parity.DEVICES)
def test_a_step_moves_what_the_plan_says(activations, accumulate, device, tmp_path):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6)])
    options = {"units": ["Sequential"], "activations": activations, "host_budget": "0B", "disk": str(tmp_path)}
    options |= {"window": 2, "transfer": 1, "wire_dtype": "as-is"}
    expected = plan(net, torch.ones(64, 64), machine="rtx4090", device="cpu", accumulate=accumulate, **options)
    with sp_lightning.stream(net, device, **options) as handle:
        optimizer, moved = torch.optim.AdamW(net.parameters()), []
        for _ in range(4):
            before = handle.stats()
            for _ in range(accumulate):
                net(torch.ones(64, 64, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.finish_step()
            moved.append(handle.stats()["disk_written"] - before["disk_written"])
        held = store_of(handle).host_nbytes
    saved = expected.disk.activations
    assert saved > 4 * BLOCK and held == expected.host.activations
    if accumulate == 1:
        assert moved[-1] == expected.written
        assert f"a step writes {moved[-1] / 1e9:.3g} GB to the disk" in str(expected)
    assert "on disk" in str(expected) and expected.fits


def test_a_run_that_exceeds_the_host_fits_with_a_disk():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(8)])
    given = {"machine": "rtx4090", "device": "cpu", "units": ["Sequential"], "activations": "offload"}
    x = torch.ones(1 << 16, 512)
    whole = plan(net, x, host_budget="200MiB", **given)
    on_disk = plan(net, x, host_budget="200MiB", disk=".", **given)
    assert not whole.fits_host and on_disk.fits_host
    assert on_disk.disk.activations > 0.9 * whole.host.activations - (200 << 20)
    assert on_disk.step_s > on_disk.written / on_disk.machine.disk_out_bytes_per_s


def test_memory_of_what_backward_has_used_is_free_before_the_loss_is(device):
    net = stack()
    with streamed(net, device, host_budget=None, disk=None) as handle:
        loss = loss_of(net, device)
        there = handle.engine.saved.offload.host_nbytes
        loss.backward()
        assert loss.grad_fn is not None and there > 0 == handle.engine.saved.offload.host_nbytes


IN_MEMORY = """
import contextlib, functools, os, sys
import torch
from sp_lightning.core.telemetry import Counters
from sp_lightning.disk.activation_blocks import LEAST, ActivationBlocks
from sp_lightning.disk.scratch_file import OneProcess, ScratchFile
from sp_lightning.memory.device import Device

MIB, torch_threads = 1 << 20, torch.set_num_threads(1)
make = functools.partial(ScratchFile, sys.argv[1], OneProcess(), holds_activations=True)
source = torch.ones(2 * MIB, dtype=torch.uint8)


def taken():
    with open("/proc/self/status") as lines:
        rows = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmLck"))


def used(room):
    with contextlib.closing(ActivationBlocks(make, Device("cpu"), Counters(), 4 * MIB, room)) as store:
        before, most, places, target = taken(), 0, [], torch.empty_like(source).zero_()
        for _ in range(200):
            places.append(store.receive(source))
            most = max(most, taken())
        while places:
            places.pop().send(target).synchronize()
            most = max(most, taken())
    return most - before


used(0)  # imports, threads and their heaps
print(used(int(sys.argv[2]) * MIB) // MIB)
"""


@pytest.mark.parametrize("room", [0, 60])
@pytest.mark.few(1)
def test_what_a_process_takes_for_activations_is_the_room_that_they_have(room, tmp_path):
    """400 MiB are saved."""
    done = forks.run(IN_MEMORY, str(tmp_path), str(room))
    assert done.returncode == 0, done.stderr
    room = max(24, room)
    assert room - 4 <= int(done.stdout) <= room + 12


# ---- waits (benchmarks/race_deletions.py --files deletes them one at a time)


class Late:
    """A copy that is made when somebody waits for it, and no earlier."""

    def __init__(self, copies):
        self.copies = copies

    def synchronize(self):
        for target, source in self.copies:
            target.copy_(source)
        self.copies = ()

    def wait(self, stream):
        self.synchronize()


@pytest.fixture
def late(monkeypatch):
    """A store on the CPU, whose copies are late."""
    made = Store("cpu")
    made.sent_down = []

    def send_down(copies, _around):
        made.sent_down.append(Late(copies))
        return made.sent_down[-1]

    def send_up(copies, _around, after):
        after.synchronize()
        return Late(copies)

    monkeypatch.setattr(made.device, "send_down", send_down)
    monkeypatch.setattr(made.device, "send_up", send_up)
    with contextlib.closing(made.blocks):
        yield made


def rows(count):
    return [torch.full((BLOCK,), value, dtype=torch.uint8) for value in range(count)]


def brought(store, places, sources):
    for place, source in reversed(list(zip(places, sources, strict=True))):
        target = torch.zeros_like(source)
        place.send(target).synchronize()
        assert torch.equal(target, source)


@pytest.mark.simgpu
@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("locked", list(itertools.product([True, False], repeat=2)))
def test_a_tensor_in_locked_and_in_unlocked_blocks_is_copied_once_all_of_it_is(locked, way):
    import simgpu  # noqa: F401

    device, begins, can_lock = Device("simgpu"), threading.Event(), iter(locked)
    store = ActivationBlocks(lambda: None, device, Counters(), BLOCK, 100 * BLOCK)
    slab = device.slab

    def some(nbytes):
        device._can_pin = next(can_lock)
        return slab(nbytes)

    device.slab = some

    @contextlib.contextmanager
    def around():
        begins.wait()
        yield

    source = torch.full((2 * BLOCK,), 7, dtype=torch.uint8, device=device.torch_device)
    host, other, target = torch.zeros(64, dtype=torch.uint8), torch.zeros_like(source[:64]), torch.zeros_like(source)
    device.synchronize()
    busy = [device.send_down([(host, other)], around())] if way == "down" else []
    place = store.receive(source)
    if way == "up":
        place.arrived.synchronize()
        device._can_pin = False
        busy = [device.send_up([(other, torch.zeros(64, dtype=torch.uint8))], around())]
    later = threading.Timer(0.2, begins.set)
    later.start()
    if way == "down":
        place.arrived.wait(device.compute)
        source.fill_(9)  # its memory is given to another tensor
    place.send(target).wait(device.compute)
    assert target.clone().eq(7).all()
    for copy in busy:
        copy.synchronize()
    later.join()
    store.close()
    device.close()


@pytest.mark.simgpu
@pytest.mark.parametrize("host_memory", ["auto", "pageable"])
def test_a_way_up_that_fails_in_the_middle_writes_to_no_memory_that_is_given_out_again(host_memory, monkeypatch):
    import simgpu

    device = Device("simgpu", host_memory)
    store = ActivationBlocks(lambda: None, device, Counters(), BLOCK, 100 * BLOCK)
    target = torch.zeros(2 * BLOCK, dtype=torch.uint8, device=device.torch_device)
    source = torch.full_like(target, 7)
    device.synchronize()
    place = store.receive(source)
    device.finish_copies()
    brought, bring = [], store._bring

    def fail_second(block):
        brought.append(block)
        if len(brought) == 2:
            raise OSError("cannot be read")
        return bring(block)

    monkeypatch.setattr(store, "_bring", fail_second)
    monkeypatch.setattr(simgpu.config, "h2d_us", 100_000)
    with pytest.raises(OSError, match="cannot be read"):
        place.send(target)
    target.fill_(1)  # as whoever gets its memory does
    device.finish_copies()
    assert target.eq(1).all()
    store.close()
    device.close()


def test_what_has_not_come_down_is_not_written(late):
    sources = rows(12)
    brought(late, [late.blocks.receive(source) for source in sources], sources)


def test_nothing_comes_down_into_memory_from_which_a_copy_goes_up(late):
    target, (first, second) = torch.zeros(BLOCK, dtype=torch.uint8), rows(3)[1:]
    going_up = late.blocks.receive(first).send(target)
    late.blocks.receive(second).arrived.synchronize()
    going_up.synchronize()
    assert len(late.blocks._all) == 1 and torch.equal(target, first)


def test_nothing_is_read_into_memory_from_which_a_copy_goes_up(late):
    sources, targets = rows(12), torch.zeros(12, BLOCK, dtype=torch.uint8)
    places = [late.blocks.receive(source) for source in sources]
    going_up = []
    while places:
        going_up.append(places.pop().send(targets[len(places)]))
    for copy in going_up:
        copy.synchronize()
    assert torch.equal(targets, torch.stack(sources))


def test_a_tensor_that_finds_no_room_has_no_copy_under_way(late, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", failing_always)
        with pytest.raises(DiskError):
            late.blocks.receive(torch.zeros(20 * BLOCK, dtype=torch.uint8))
    assert len(late.sent_down) >= LEAST and not any(copy.copies for copy in late.sent_down)


def test_memory_into_which_something_is_read_is_not_given_away(store, monkeypatch):
    places = [store.save(BLOCK, value) for value in range(12)]
    disk = Disk(monkeypatch, "preadv")
    del places[8:]
    store.sent(places[7], BLOCK)
    assert [name for name, _ in store.moved].count("read") == 4
    disk.lets_go(LONG_S)
    places += [store.save(BLOCK, value) for value in range(8, 20)]
    assert all(bool((store.sent(place, BLOCK) == value).all()) for value, place in reversed([*enumerate(places)]))


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_wait_for_the_disk_is_counted(call, device, monkeypatch):
    made = Store(device)
    with contextlib.closing(made.blocks):
        places = [made.save(BLOCK, value) for value in range(LEAST)]
        before = made.counters.stall_ms["disk"]
        Disk(monkeypatch, call).lets_go(LONG_S)
        places += [made.save(BLOCK, value) for value in range(LEAST, 12)]
        made.sent(places[0], BLOCK)
        assert made.counters.stall_ms["disk"] - before > 200 * LONG_S


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_store_that_is_closed_waits_for_what_is_under_way(call, device, monkeypatch):
    made = Store(device)
    places = [made.save(BLOCK, value) for value in range(LEAST if call == "pwritev" else 12)]
    disk = Disk(monkeypatch, call)
    if call == "pwritev":
        places.append(made.save(BLOCK, LEAST))
    else:
        del places[8:]
        made.sent(places[7], BLOCK)
    disk.lets_go(LONG_S)
    made.blocks.close()
    assert disk.begun and disk.under_way == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("superpipeline-activations")]


def test_a_forked_process_gets_no_memory_of_blocks_until_the_run_ends(device):
    """What is read into it while a process forks might be lost (direct_ring.py, Rule 6)."""
    made = Store(device)
    place = made.save(BLOCK, 1)
    address = made.blocks._all[0].buffer.flat.data_ptr()
    assert "dc" in flags_at(address)
    made.blocks.close()
    assert "dc" not in flags_at(address) and bool((made.sent(place, BLOCK) == 1).all())


def test_memory_that_no_block_has_is_freed_and_a_forked_process_may_get_it(device):
    made = Store(device)
    kept, gone = made.save(BLOCK, 1), made.save(BLOCK, 2)
    in_use, unused = (memory.buffer.flat for memory in made.blocks._all)
    del gone
    made.blocks.free_unused()
    assert [memory.buffer.flat.data_ptr() for memory in made.blocks._all] == [in_use.data_ptr()]
    assert "dc" in flags_at(in_use.data_ptr()) and "dc" not in flags_at(unused.data_ptr())
    assert bool((made.sent(kept, BLOCK) == 1).all()) and bool((made.sent(made.save(BLOCK, 3), BLOCK) == 3).all())
    made.blocks.close()  # else memory that is used again is withheld from forks


# ---- failures


@parity.product(
    call=["pwritev", "preadv", "posix_fallocate"],
    at=[0, 1, 5],
    error=[errno.EIO, errno.ENOSPC],
    activations=KINDS,
    device=parity.DEVICES,
)
@pytest.mark.few(3)
def test_a_disk_that_fails_under_activations_is_a_typed_error_and_the_next_batch_is_right(
    call, at, error, activations, device, monkeypatch
):
    """Nothing was stepped, nothing is left, and the run goes on once the disk is there again."""
    results = []
    for fails in (False, True):
        net = stack()
        with streamed(net, device, activations, optimizer_overlap=False) as handle:
            loss_of(net, device, rows=30).backward()  # allocates for state and gradients, and less than the next one
            net.zero_grad()
            move, calls = getattr(os, call), itertools.count()

            def failing(*given, move=move, calls=calls):
                ours = call == "posix_fallocate" or threading.current_thread().name.startswith(
                    "superpipeline-activations"
                )
                if ours and next(calls) == at:
                    raise OSError(error, os.strerror(error))
                return move(*given)

            if fails:
                with monkeypatch.context() as broken:
                    broken.setattr(os, call, failing)
                    with pytest.raises(DiskError) as caught:
                        loss_of(net, device, 1, rows=120).backward()
                said = "could not be read at" if call == "preadv" else "could not be written at"
                assert said in str(caught.value) and caught.value.errno == error
                assert ("Activations need" in str(caught.value)) is (
                    call == "posix_fallocate" and error == errno.ENOSPC
                )
                assert "checkpoint" not in str(caught.value)
                del caught
                net.zero_grad()
            for number in (3, 4):
                loss_of(net, device, number, rows=120).backward()
            results.append([p.grad.clone() for p in net.parameters()])
            assert len(store_of(handle)._all) == LEAST and alive(handle) == []
    assert all(map(torch.equal, *results))


def test_a_write_that_failed_is_tried_again(store, monkeypatch):
    places = [store.save(BLOCK, value) for value in range(LEAST)]
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", failing_always)
        with pytest.raises(DiskError):
            places += [store.save(BLOCK, value) for value in range(LEAST, 20)]
    while len(places) < 20:
        with contextlib.suppress(DiskError):  # of other writes that had failed by then
            places.append(store.save(BLOCK, len(places)))
    assert all(bool((store.sent(place, BLOCK) == value).all()) for value, place in enumerate(places))


def test_a_read_that_failed_is_tried_again(store, monkeypatch):
    places = [store.save(BLOCK, value) for value in range(20)]
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", failing_always)
        for place in places[:3]:
            with pytest.raises(DiskError):
                store.sent(place, BLOCK)
    assert all(bool((store.sent(place, BLOCK) == value).all()) for value, place in enumerate(places))


def failing_always(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_slow_disk_holds_forward_and_backward_and_changes_nothing(device, monkeypatch):
    results = []
    for call in (None, "pwritev", "preadv"):
        if call is not None:
            move = getattr(os, call)
            monkeypatch.setattr(os, call, lambda *given, move=move: time.sleep(0.002) or move(*given))
        net = stack()
        with streamed(net, device) as handle:
            results.append(trained(net, device))
            assert len(store_of(handle)._all) == LEAST
    assert all(map(torch.equal, *results[:2])) and all(map(torch.equal, *results[1:]))


def test_a_graph_that_outlives_the_run_is_refused(store):
    places = [store.save(BLOCK, value) for value in range(20)]
    store.blocks.close()
    assert bool((store.sent(places[19], BLOCK) == 19).all())
    with pytest.raises(UnsupportedError, match="used after streaming ended"):
        store.sent(places[0], BLOCK)
    del places
    store.blocks.close()


def test_a_run_gives_its_space_on_the_disk_back(device):
    net = stack()
    folder, size = os.getcwd(), 1 << 20
    with streamed(net, device) as handle:
        loss_of(net, device, rows=600).backward()
        file = store_of(handle)._scratch
        taken = os.fstat(file.descriptor).st_blocks * 512
        fd = os.dup(file.descriptor)
    gc.collect()
    assert taken > size and os.fstat(fd).st_blocks * 512 < taken // 10
    os.close(fd)
    assert os.listdir(folder) == []
    assert not [link for link in links() if link.startswith(folder)]


def links():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{name}")
