"""No wait for reads and writes of files is missing (benchmarks/race_deletions.py --files deletes them one at a time).

The disk is slow here, or holds what it was asked for until a test lets it go.
"""

import contextlib
import errno
import gc
import itertools
import os
import threading
import time

import in_files
import pytest
import torch
from held_disk import LONG_S, Disk
from torch import nn
from torch.optim import AdamW

import sp_lightning
from sp_lightning.core.telemetry import Counters
from sp_lightning.disk import direct_ring, scratch_file, state_ring
from sp_lightning.disk.direct_file import Mount
from sp_lightning.disk.direct_ring import DirectRing, Target, pieces
from sp_lightning.disk.scratch_file import ScratchFile
from sp_lightning.disk.source_files import BLOCK, Place, SourceFile
from sp_lightning.disk.state_ring import BUFFERS, SMALLEST, BlockRun, StateRing
from sp_lightning.errors import DiskError, OptionError, SourceFileError
from sp_lightning.gradients import slab_on_disk
from sp_lightning.gradients.slab import GradientSlot
from sp_lightning.gradients.slab_on_disk import GradientRing
from sp_lightning.gradients.way_down import GradientVersions
from sp_lightning.memory.device import Device
from sp_lightning.optim.pieces import step_in_pieces
from sp_lightning.optim.state_on_disk import StateOnDisk
from sp_lightning.ranks.board import ONE_RANK


@pytest.fixture(autouse=True)
def begun():
    """The names of threads of ours that were begun since."""
    before = set(threading.enumerate())
    whose = ("state", "read", "disk", "gradients")
    ours = tuple(f"superpipeline-{name}" for name in whose)
    return lambda: [t.name for t in threading.enumerate() if t not in before and t.name.startswith(ours)]


@pytest.fixture
def scratch(tmp_path):
    with contextlib.closing(ScratchFile(str(tmp_path), ONE_RANK)) as made:
        yield made


@pytest.fixture
def ring(scratch):
    with contextlib.closing(StateRing(scratch, SMALLEST, Counters())) as made:
        yield made


def runs(scratch, count):
    """As many runs, each of a buffer, with the values 0, 1, ... in the file."""
    (tensor,) = scratch.tensors([torch.empty(count * SMALLEST, dtype=torch.uint8)])
    tensor.view(count, -1).copy_(torch.arange(count, dtype=torch.uint8)[:, None])
    offset = scratch.place_of(tensor).offset
    return tensor.view(count, -1), [BlockRun(offset + SMALLEST * number, 0, SMALLEST) for number in range(count)]


def are_free(ring):
    return len(ring._free) == len({id(buffer.flat) for buffer in ring._free}) == BUFFERS and not ring._written


# ---- the ring of state


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.few(1)
def test_a_ring_that_is_closed_waits_for_what_is_under_way(call, scratch, begun, monkeypatch):
    _, (run, *_) = runs(scratch, 1)
    ring = StateRing(scratch, SMALLEST, Counters())
    disk = Disk(monkeypatch, call)
    buffer = ring.take()
    ring.read(buffer, [run]) if call == "preadv" else ring.write(buffer, [run])
    disk.lets_go(LONG_S)
    ring.close()
    assert (disk.begun, disk.under_way) == (1, 0)
    assert not begun()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.few(1)
def test_after_a_transfer_failed_none_is_under_way_when_that_is_raised(call, scratch, ring, monkeypatch):
    """What a read brings later would land in what the buffer is used for by then."""
    _, given = runs(scratch, 12)
    disk = Disk(monkeypatch, call, fails=(0,))
    disk.lets_go(LONG_S)
    with pytest.raises(DiskError), contextlib.closing(ring.portions((run, [run]) for run in given)) as portions:
        for run, buffer in portions:
            ring.write(buffer, [run])
    assert disk.begun > 1 and disk.under_way == 0 and are_free(ring)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_after_a_transfer_of_a_whole_failed_none_is_under_way(call, scratch, ring, monkeypatch):
    _, (first, *_) = runs(scratch, 4)
    whole = [BlockRun(first.offset, 0, 4 * SMALLEST)]
    disk = Disk(monkeypatch, call, fails=(0,))
    disk.lets_go(LONG_S)
    with pytest.raises(DiskError), ring.as_one(whole if call == "preadv" else [], whole):
        pass
    assert disk.begun > 1 and disk.under_way == 0 and are_free(ring)


def test_all_is_written_when_the_last_portion_was_taken(scratch, ring, monkeypatch):
    content, given = runs(scratch, 12)
    disk = Disk(monkeypatch, "pwritev")
    disk.lets_go(LONG_S)
    with contextlib.closing(ring.portions((run, [run]) for run in given)) as portions:
        for run, buffer in portions:
            buffer.flat.add_(100)
            ring.write(buffer, [run])
    assert disk.under_way == 0 and are_free(ring)
    assert torch.equal(content, (torch.arange(12, dtype=torch.uint8) + 100)[:, None].expand_as(content))


# ---- the state of optimizers


def spilled(scratch, count):
    """As many optimizers of a parameter, whose state has more portions than the ring has buffers."""
    disk = StateOnDisk(scratch, SMALLEST, Counters(), False)
    generator = torch.Generator().manual_seed(0)
    optimizers = []
    for number in range(count):
        params = [nn.Parameter(torch.randn(30, 4001, generator=generator)) for _ in range(4)]
        optimizers.append(AdamW(params, lr=0.01 * (number + 1)))
    disk.parameters = {id(param) for optimizer in optimizers for param in optimizer.param_groups[0]["params"]}
    for optimizer in optimizers:
        disk.attach(optimizer, step_in_pieces(optimizer))
        stepped(optimizer)
    return disk, optimizers


def stepped(optimizer, steps=1):
    for _ in range(steps):
        for number, param in enumerate(optimizer.param_groups[0]["params"]):
            param.grad = param.detach() * 0.1 + number
        optimizer.step()


def plainly(count, *steps):
    """The optimizers of `spilled`, in memory, after so many steps."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        params = [nn.Parameter(torch.randn(30, 4001, generator=generator)) for _ in range(4)]
        optimizer = AdamW(params, lr=0.01 * (number + 1))
        stepped(optimizer, steps[number])
        yield optimizer


def assert_same(one, other):
    for mine, theirs in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(one.state[mine][key], value) for key, value in other.state[theirs].items())


def both(monkeypatch, *works):
    """Begin one after the other while a slow disk holds what the first one reads and writes; raise what they raise."""
    slow, errors = [Disk(monkeypatch, call) for call in ("preadv", "pwritev")], []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    side_by_side(slow, *(lambda work=work: guarded(work) for work in works))
    if errors:
        raise errors[0]


def side_by_side(disks, *works):
    """Begin each of these on a thread of its own, some time after the one before, and then let the slow disks go."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
        time.sleep(LONG_S)
    for slow in disks:
        slow.lets_go()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


IN_THE_RING = ("another step", "adopt", "moved", "converted")


@pytest.mark.parametrize(
    "first, then",
    [*(("a step", what) for what in (*IN_THE_RING, "close")), *((what, "a step") for what in IN_THE_RING[1:])],
)
def test_the_buffers_are_used_by_one_thread_at_a_time(first, then, scratch, monkeypatch):
    disk, (optimizer, other) = spilled(scratch, 2)
    values = torch.randn(30, 4001)
    there, wire = disk.moved(values)[0], torch.empty(30, 4001, dtype=torch.bfloat16)
    moved = []

    def load():
        state = next(iter(other.state.values()))  # of one parameter: a step may come between those of two
        state["exp_avg"] = state["exp_avg"].clone()
        del state  # what other code refers to does not move
        disk.adopt(other)

    calls = {
        "a step": lambda: stepped(optimizer),
        "another step": lambda: stepped(other),
        "adopt": load,
        "moved": lambda: moved.append(disk.moved(values)[0]),
        "converted": lambda: moved.append(disk.converted(there, wire)),
        "close": disk.close,
    }
    ring, used_by = disk._ring, []

    def noted(of):
        return lambda *args: (used_by.append(threading.get_ident()), of(*args))[1]

    for name in ("take", "read", "write"):
        monkeypatch.setattr(ring, name, noted(getattr(ring, name)))
    both(monkeypatch, calls[first], calls[then])
    assert are_free(ring)
    in_turn = [thread for thread, _ in itertools.groupby(used_by)]
    assert len(in_turn) == len(set(used_by)) == (1 if then == "close" else 2)
    for one, plain in zip((optimizer, other), plainly(2, 2, 2 if then == "another step" else 1), strict=True):
        assert_same(one, plain)
    if "moved" in (first, then):
        assert torch.equal(moved[0], values)
    elif "converted" in (first, then):
        assert moved == [True] and torch.equal(wire, values.bfloat16())
    elif "adopt" in (first, then):
        assert all(scratch.place_of(state["exp_avg"]) is not None for state in other.state.values())
    disk.close()


def test_what_moves_into_the_file_is_there_at_once(scratch, monkeypatch):
    disk, values = StateOnDisk(scratch, SMALLEST, Counters(), False), torch.randn(30, 4001)
    slow = Disk(monkeypatch, "pwritev")
    slow.lets_go(LONG_S)
    assert torch.equal(disk.moved(values)[0], values) and slow.under_way == 0
    disk.close()


def test_state_that_a_step_which_failed_wrote_in_part_has_another_version(scratch, monkeypatch):
    disk, (optimizer,) = spilled(scratch, 1)
    before = {param: (state["exp_avg"]._version, state["exp_avg"].clone()) for param, state in optimizer.state.items()}
    with monkeypatch.context() as broken, pytest.raises(DiskError):
        Disk(broken, "pwritev", fails=(3,)).lets_go()
        stepped(optimizer)
    moments = {param: state["exp_avg"] for param, state in optimizer.state.items()}
    written = [param for param, (_, old) in before.items() if not torch.equal(moments[param], old)]
    assert written and all(moments[param]._version != before[param][0] for param in written)
    disk.close()


def test_tensors_move_into_the_file_one_after_the_other(scratch, monkeypatch):
    """They take the same buffers, and each waits for all writes of these."""
    disk, values = StateOnDisk(scratch, SMALLEST, Counters(), False), [torch.randn(30, 4001) for _ in range(2)]
    ring, moved = disk._ring, {}
    slow = Disk(monkeypatch, "pwritev")
    side_by_side([slow], *(lambda at=at: moved.update({at: disk.moved(values[at])[0]}) for at in range(2)))
    assert are_free(ring) and all(torch.equal(moved[at], values[at]) for at in range(2))
    disk.close()


@pytest.mark.parametrize("first, then", [*itertools.permutations(["state", "gradients"])])
def test_tensors_of_two_threads_get_places_of_their_own(first, then, scratch, monkeypatch):
    """One in backward makes room for gradients while another one, in a hook, steps an optimizer."""
    disk, made = StateOnDisk(scratch, SMALLEST, Counters(), False), []
    makes = {"state": lambda like: disk.placed(like)[0], "gradients": lambda like: scratch.tensors([like])[0]}
    slow = Disk(monkeypatch, "posix_fallocate")
    side_by_side([slow], *(lambda what=what: made.append(makes[what](torch.empty(4001))) for what in (first, then)))
    one, other = sorted(map(scratch.place_of, made))
    assert one.offset + one.nbytes <= other.offset
    disk.close()


def test_two_threads_get_the_same_buffers(scratch, monkeypatch):
    """One that brings weights converts them while another one steps an optimizer for the first time."""
    disk = StateOnDisk(scratch, SMALLEST, Counters(), False)
    tensor, wire, make, rings = disk.placed(torch.empty(4001))[0], torch.empty(4001).bfloat16(), StateRing.__init__, []

    def slowly(ring, *given):
        rings.append(ring)
        time.sleep(LONG_S)
        make(ring, *given)

    monkeypatch.setattr(StateRing, "__init__", slowly)
    works = [threading.Thread(target=disk.converted, args=(tensor, wire)) for _ in range(2)]
    for work in works:
        work.start()
    for work in works:
        work.join(30)
    assert len(rings) == 1
    disk.close()


def test_state_on_a_disk_that_is_closed_has_no_buffers_and_no_threads(scratch, begun):
    disk, _ = spilled(scratch, 1)
    ring = disk._ring
    assert begun()
    disk.close()
    assert not begun() and not in_files.flags_at(ring._whole.flat.data_ptr()).count("dc")


def test_after_a_move_that_failed_all_buffers_are_free(scratch, monkeypatch):
    disk, values = StateOnDisk(scratch, SMALLEST, Counters(), False), torch.randn(30, 4001)
    with monkeypatch.context() as broken:
        slow = Disk(broken, "pwritev", fails=(0,))
        slow.lets_go(LONG_S)
        with pytest.raises(DiskError):
            disk.moved(values)
        assert slow.begun > 1 and slow.under_way == 0 and are_free(disk._ring)
    assert torch.equal(disk.moved(values)[0], values)
    disk.close()


@pytest.mark.parametrize("what", ["step", "converted"])
def test_after_an_error_of_other_code_all_buffers_are_free(what, scratch, monkeypatch):
    """Also while somebody has the error, and with it the frames in which the buffers were used."""
    disk, (optimizer,) = spilled(scratch, 1)
    wire = torch.empty(30, 4001, dtype=torch.bfloat16)
    there, _ = disk.moved(torch.randn(30, 4001))
    with monkeypatch.context() as broken:
        if what == "step":
            broken.setattr(type(optimizer).step, "__wrapped__", failing)
        else:
            broken.setattr(torch.Tensor, "isnan", failing)
        with pytest.raises(ZeroDivisionError) as caught:
            stepped(optimizer) if what == "step" else disk.converted(there, wire)
    assert are_free(disk._ring), caught
    disk.close()


def failing(*given):
    raise ZeroDivisionError


# ---- the ring of weights


@pytest.fixture
def filed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(60000))
    with contextlib.closing(SourceFile(str(path))) as file:
        yield file


def jobs_of(file, flat, types=None):
    """Pieces of two blocks, to be read into a tensor of bytes."""
    cut = pieces([(0, Place(file, 0, 50000), 4)], 2 * BLOCK)
    shrink = 1 if types is None else 2
    return [
        (
            piece,
            [Target(at, n, flat[within // shrink : (within + n) // shrink], types) for _, at, within, n in piece.parts],
        )
        for piece in cut
    ]


def test_a_ring_of_weights_that_is_closed_waits_for_what_is_under_way(filed, begun, monkeypatch):
    ring, flat = DirectRing(Device("cpu"), 2 * BLOCK), torch.zeros(50000, dtype=torch.uint8)
    disk = Disk(monkeypatch, "preadv")
    fill = ring.fill(Counters(), [], jobs_of(filed, flat), contextlib.nullcontext(), [filed])
    disk.lets_go(LONG_S)
    ring.close()
    assert disk.begun == len(jobs_of(filed, flat)) > direct_ring.BUFFERS and disk.under_way == 0
    assert fill.on_device.done()
    assert not begun()


@pytest.mark.simgpu
def test_a_weight_is_converted_only_after_the_device_has_the_one_before(filed):
    import simgpu

    device = Device("simgpu")
    ring = DirectRing(device, 2 * BLOCK)
    flat = torch.zeros(25000, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    jobs = jobs_of(filed, flat, (torch.int32, torch.int16))[: direct_ring.BUFFERS]
    with simgpu.hold(device.up):
        fill = ring.fill(Counters(), [], jobs, contextlib.nullcontext(), [filed])
        time.sleep(LONG_S)
    fill.wait(device.compute)
    end = len(jobs) * 2 * BLOCK
    expected = filed.bytes_of(0, end).view(torch.int32).to(torch.int16)
    assert torch.equal(flat[: end // 2].cpu().view(torch.int16), expected)
    ring.close()


@pytest.mark.few(1)
def test_a_file_that_changes_while_it_is_read_is_an_error(filed, device, monkeypatch):
    found = Device(device)
    ring, flat = DirectRing(found, 2 * BLOCK), torch.zeros(50000, dtype=torch.uint8, device=device)
    found.synchronize()
    disk = Disk(monkeypatch, "preadv")
    fill = ring.fill(Counters(), [], jobs_of(filed, flat), contextlib.nullcontext(), [filed])
    time.sleep(LONG_S)
    os.utime(filed.path, ns=(1, 1))
    disk.lets_go()
    with pytest.raises(SourceFileError, match="changed while weights stayed in it"):
        fill.wait(found.compute)
    ring.close()


# ---- units of which weights are in files


def mixed(folder=None):
    """A net of which each unit has a frozen weight, in a file if there is a folder, and others in memory."""
    net = stack()
    for layer in net:
        layer[0].weight.requires_grad_(False)
    if folder is not None:
        in_files.put(net, str(folder))
    return net


def evicted(handle):
    """The store of a unit that is not on the device, and its layer."""
    unit = next(unit for unit in handle.engine.units if not unit.store.on_device.is_loaded)
    return unit.store, handle.module.get_submodule(unit.name)


def on_device(store, parameter):
    """What comes of a weight on the device by the fill that was begun."""
    store.on_device.wait_load()
    index = next(index for index, (_, one) in enumerate(store.unit.params) if one is parameter)
    return store.on_device.view(index).cpu()


@torch.no_grad()
def test_a_weight_in_a_file_that_a_step_is_about_to_write_goes_up_as_it_is_after_that(device, tmp_path):
    """The kernel is asked which pages were written only after the step."""
    net, x = mixed(tmp_path), torch.ones(3, 65)
    with sp_lightning.stream(net, device, host_budget="0B", window=1) as handle:
        net(x.to(device))
        (store, layer), steps = evicted(handle), handle.engine.access.steps
        (weight,) = (p for p in layer.parameters() if p.dim() == 2)
        before = weight.detach().clone()

        class Step:
            def wait(self, unit):
                del steps[unit]
                weight.mul_(2)

        steps[store] = Step()
        store.load()
        assert not steps and torch.equal(on_device(store, weight), before * 2)
        store.on_device.free()


@pytest.mark.simgpu
@torch.no_grad()
def test_weights_in_memory_beside_those_in_files_are_written_only_after_they_went_up(tmp_path):
    import simgpu

    device, net = torch.device("simgpu", 0), mixed(tmp_path)
    with sp_lightning.stream(net, device, host_budget="0B", window=1) as handle:
        net(torch.ones(3, 65, device=device))
        store, layer = evicted(handle)
        (bias,) = (p for p in layer.parameters() if p.dim() == 1)
        before = bias.detach().clone()
        simgpu.config.h2d_us = 50_000
        store.load()
        bias.data.fill_(7)
        assert torch.equal(on_device(store, bias), before)
        store.on_device.free()


@torch.no_grad()
def test_a_fill_that_failed_is_no_error_where_a_unit_is_evicted(device, tmp_path, monkeypatch):
    net, x = mixed(tmp_path), torch.ones(3, 65)
    expected = mixed().to(device)(x.to(device)).cpu()
    with sp_lightning.stream(net, device, host_budget="0B", window=1) as handle:
        net(x.to(device))
        store, _ = evicted(handle)
        with monkeypatch.context() as broken:
            disk = Disk(broken, "preadv", fails=range(100))
            store.load()
            store.on_device.ready.on_device.exception()
            store.on_device.free()
            assert disk.begun
        assert torch.equal(net(x.to(device)).cpu(), expected)


@torch.no_grad()
@pytest.mark.few(1)
def test_an_interrupted_wait_for_a_fill_is_taken_up_again(device, tmp_path, monkeypatch):
    """A failure of the fill would make the bytes stale; Ctrl-C in the wait is none, and the reads go on."""
    net, x = mixed(tmp_path), torch.ones(3, 65)
    with sp_lightning.stream(net, device, host_budget="0B", window=1) as handle:
        net(x.to(device))
        store, layer = evicted(handle)
        expected = next(layer.parameters()).detach().clone()
        with monkeypatch.context() as slow:
            disk = Disk(slow, "preadv")
            store.load()
            with monkeypatch.context() as pressed, pytest.raises(KeyboardInterrupt):
                pressed.setattr(type(store.on_device.ready), "wait", interrupt)
                store.on_device.wait_load()
            assert store.on_device.stamp.epoch is not None
            disk.lets_go(after=LONG_S)
            assert torch.equal(on_device(store, next(layer.parameters())), expected)
        store.on_device.free()


def interrupt(*_):
    raise KeyboardInterrupt


# ---- gradients


@pytest.fixture
def gradients(scratch):
    """A ring of gradients, and what makes a transfer of ones to a parameter's place in the file."""
    ring = GradientRing(scratch, Device("cpu", "auto"), Counters(), 1 << 14)
    parameter = nn.Parameter(torch.zeros(4096))
    (home,) = scratch.tensors([parameter.detach()])
    marks = GradientVersions()

    def transfer(done=None):
        buffer = ring.next_free()
        arrives_in = buffer.flat.view(torch.float32).fill_(1)
        slot = GradientSlot(arrives_in, buffer.flat, 0, lands_in=None if parameter.grad is not None else home)
        marks.note_packed([parameter])
        return ring.transfer(None, [parameter], [slot], [], marks, None, done or Arrived())

    yield ring, parameter, transfer
    ring.close()


class Arrived:
    """Gradients that arrive after some seconds."""

    def __init__(self, after=0.0):
        self._event = threading.Event()
        threading.Timer(after, self._event.set).start()

    def synchronize(self):
        assert self._event.wait(30)

    def query(self):
        return self._event.is_set()


@pytest.mark.parametrize("then", ["land", "cancel", "close"])
def test_gradients_that_one_thread_has_land_have_landed_for_each_other_one(then, gradients, begun, monkeypatch):
    """What landed after a failed backward would be in the next gradient."""
    ring, parameter, transfer = gradients
    moving = transfer()
    disk = Disk(monkeypatch, "pwritev")
    thread = threading.Thread(target=moving.land)
    thread.start()
    while not disk.begun:
        time.sleep(0.001)
    disk.lets_go(LONG_S)
    ring.close() if then == "close" else getattr(moving, then)()
    assert disk.under_way == 0
    thread.join()
    assert torch.equal(parameter.grad, torch.ones(4096))
    ring.close()
    assert not begun()


def test_the_oldest_gradients_land_where_no_buffer_is_free(gradients):
    ring, parameter, transfer = gradients
    first, second = transfer(), transfer()
    assert ring.next_free() is first.buffer is not second.buffer
    assert torch.equal(parameter.grad, torch.ones(4096))


@pytest.mark.parametrize("then", ["land", "cancel"])
def test_a_buffer_is_free_when_its_gradients_have_arrived(then, gradients):
    ring, parameter, transfer = gradients
    done = Arrived(LONG_S)
    moving = transfer(done)
    getattr(moving, then)()
    assert done.query() and len(ring._free) == 2 and (parameter.grad is None) == (then == "cancel")


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_gradient_that_failed_has_nothing_under_way(call, gradients, monkeypatch):
    ring, _, transfer = gradients
    monkeypatch.setattr(slab_on_disk, "GRADIENT_PIECE", 1 << 12)
    if call == "preadv":
        transfer().land()
    failing = transfer()
    disk = Disk(monkeypatch, call, fails=(0,))
    disk.lets_go(LONG_S)
    for _ in range(2):  # the optimizer thread, too, learns of it
        with pytest.raises(DiskError):
            failing.land()
        assert disk.begun > 1 and disk.under_way == 0 and len(ring._free) == 2


def test_a_gradient_on_the_disk_that_is_added_to_has_another_version(gradients):
    _, parameter, transfer = gradients
    transfer().land()
    before = parameter.grad._version
    transfer().land()
    assert parameter.grad._version > before and torch.equal(parameter.grad, torch.full((4096,), 2.0))


def test_no_forked_process_gets_buffers_of_gradients(gradients):
    ring, _, transfer = gradients
    transfer().land()
    addresses = [buffer.flat.data_ptr() for buffer in (*ring._buffers, *ring._pieces)]
    assert addresses and all("dc" in in_files.flags_at(address) for address in addresses)
    ring.close()
    assert not any("dc" in in_files.flags_at(address) for address in addresses)


# ---- whole runs


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(65, 65), nn.Tanh()) for _ in range(4)))


def open_files(folder):
    """What this process has open in a folder, nameless files too."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith(str(folder))]


@pytest.mark.parametrize("what", ["files", "state", "masters"])
@pytest.mark.few(2)
def test_after_a_run_no_file_is_open_but_those_of_its_weights_and_no_thread_is_left(
    what, device, begun, tmp_path, monkeypatch
):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)
    net, x = stack(), torch.ones(3, 65, device=device)
    options = {"host_budget": "0B", "window": 1}
    if what == "files":
        in_files.put(net[:3].requires_grad_(False), str(tmp_path))
    else:
        options |= {"disk": str(tmp_path), "master_weights": what == "masters"}
    optimizer = AdamW([p for p in net.parameters() if p.requires_grad])
    with sp_lightning.stream(net, device, **options) as handle:
        for _ in range(2):
            net(x.bfloat16() if what == "masters" else x).float().square().mean().backward()
            optimizer.step()
        torch.save(net.state_dict(), tmp_path / "saved")
        assert open_files(tmp_path) and handle.stats()["disk_read"] > 0
    filed = [str(tmp_path / f"weights-{number}") for number in range(2)] if what == "files" else []
    assert sorted(open_files(tmp_path)) == filed and not begun()
    assert not [name for name in open_files("/proc") if name.endswith("pagemap")]
    del net, optimizer, handle
    gc.collect()
    assert open_files(tmp_path) == []


def test_files_of_weights_are_closed_if_one_of_them_is_gone(tmp_path):
    net = stack().requires_grad_(False)
    paths = in_files.put(net, str(tmp_path))
    os.remove(paths[1])
    with pytest.raises(SourceFileError):
        sp_lightning.stream(net, "cpu", host_budget="0B")
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("how", ["no way to tell it", "no direct trial"])
def test_a_scratch_file_that_cannot_be_used_is_closed(how, tmp_path, monkeypatch):
    if how == "no way to tell it":
        monkeypatch.setattr(scratch_file, "mount_of", lambda file: Mount("btrfs", 0))
        monkeypatch.setattr("fcntl.ioctl", failing_ioctl)
    else:
        monkeypatch.setattr(os, "posix_fallocate", failing_ioctl)
    with pytest.raises((OptionError, DiskError)):
        if how == "no direct trial":
            monkeypatch.setattr(scratch_file.ScratchFile, "_both_ways_are_equal", lambda self, fd: self.tensors([]))
        ScratchFile(str(tmp_path), ONE_RANK)
    assert open_files(tmp_path) == []


def failing_ioctl(*given):
    raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))


def test_forked_processes_get_no_buffer_of_a_ring_until_it_is_closed(scratch):
    ring = StateRing(scratch, SMALLEST, Counters())
    addresses = [buffer.flat.data_ptr() for buffer in ring._buffers]
    assert all("dc" in in_files.flags_at(address) for address in addresses)
    ring.close()
    assert not any("dc" in in_files.flags_at(address) for address in addresses)
