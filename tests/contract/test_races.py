"""No wait is missing: each test fails if one of the runtime's waits is deleted.

The checker of the simulated device reports what the device does in the wrong order, and what the host reads or writes
in page-locked memory before it has waited for the copy there, whatever the timing was; every test ends with that
(conftest.py). Copies and kernels are made slow here, so that numbers show it as well: a copy reads its source when its
time is over. What is kept too long shows in the device's memory.
"""

from __future__ import annotations

import signal
import threading
import time

import fake_cudart
import pytest
import torch
import torch.nn.functional as F
from side_by_side import blocks, check, inputs, sgd, squares, training
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import simgpu
import sp_lightning
from sp_lightning.autograd.offload import Offload
from sp_lightning.core.telemetry import Counters
from sp_lightning.memory.access import Access
from sp_lightning.memory.device import CudaPageLock, Device
from sp_lightning.memory.pinned import HostAllocator
from sp_lightning.optim.pending_step import HostThread, PendingStep
from sp_lightning.optim.pieces import step_in_pieces

DEVICE = torch.device("simgpu", 0)
SLOW_US = 20_000  # longer than the host needs to come to what it does next


@pytest.fixture(autouse=True, scope="module")
def warm():
    """An operator that is called for the first time waits for the device, and so would hide a missing wait."""
    for options in ({}, {"activations": "offload"}, {"activations": "recompute"}):
        net = blocks()
        with sp_lightning.stream(net, DEVICE, window=1, **options), torch.enable_grad():
            x = models.vectors(0)[0].to(DEVICE)
            squares(net, x).backward()
            with torch.no_grad():
                net(x)
    simgpu.races()


def slow(**delays_us):
    for name, value in delays_us.items():
        setattr(simgpu.config, f"{name}_us", value)


# --- Weights on their way up


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("slowness", ["h2d", "compute", "d2h"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.few(1)
def test_training(window, slowness, activations):
    def run(net, device):
        slow(**{slowness: 1000})
        yield from training()(net, device)

    check(blocks, run, DEVICE, window=window, activations=activations)


@pytest.fixture
def small_ring(monkeypatch):
    """A unit goes in several pieces."""
    monkeypatch.setattr(sp_lightning.memory.device, "STAGING_NBYTES", 2048)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("slowness", ["h2d", "compute", "d2h"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.few(1)
def test_training_through_the_ring(small_ring, window, slowness, activations):
    def run(net, device):
        slow(**{slowness: 1000})
        yield from training()(net, device)

    check(blocks, run, DEVICE, window=window, activations=activations, host_memory="pageable")


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.few(1)
def test_evaluation(window):
    def run(net, device):
        slow(compute=1000)
        with torch.no_grad():
            yield [net(x) for x in inputs(device)]

    check(blocks, run, DEVICE, window=window)


@torch.no_grad()
def double(parameter):
    parameter.mul_(2)


@pytest.mark.parametrize("name", ["head.weight", "blocks.1.up.weight"])
@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.few(1)
def test_resident_weights_are_not_overwritten_while_they_are_read(name, window):
    def run(net, device):
        xs = list(inputs(device))
        with torch.no_grad():
            slow(compute=1000)
            for x in xs:
                yield net(x)
                double(net.get_parameter(name))

    check(blocks, run, DEVICE, window=window)


def test_weights_that_are_written_after_a_forward_went_up_before():
    def run(net, device):
        xs = list(inputs(device))
        with torch.no_grad():
            slow(h2d=SLOW_US)
            for x in xs:
                yield net(x)
                for parameter in net.parameters():
                    double(parameter)

    check(blocks, run, DEVICE)


def test_weights_that_are_written_after_a_backward_without_gradients_for_them_went_up_before():
    def run(net, device):
        xs = [x.requires_grad_() for x in inputs(device)]
        slow(h2d=SLOW_US)
        for x in xs:
            net(x).square().mean().backward()
            yield x.grad
            for parameter in net.parameters():
                double(parameter)

    check(lambda: blocks().requires_grad_(False), run, DEVICE)


class Writing(models.Stack):
    """Its forward writes to the weights of a block that it called, in a way that a test chooses."""

    write = staticmethod(double)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
            self.write(block.up.weight)
        return x


def double_data(parameter):
    parameter.data.mul_(2)


def double_data_in_a_torch_function(parameter):
    """As code of a tensor subclass does, whose reads nobody sees."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data.mul_(2)


def double_by_optimizer(parameter):
    gradient, parameter.grad = parameter.grad, -parameter.detach().cpu()
    torch.optim.SGD([parameter], lr=1.0, foreach=False).step()
    parameter.grad = gradient


@pytest.mark.parametrize("write", [double, double_data, double_data_in_a_torch_function])
@pytest.mark.few(1)
def test_weights_that_are_written_within_a_step_went_up_before(write):
    def run(net, device):
        net.write = write
        xs = list(inputs(device))
        with torch.no_grad():
            slow(h2d=SLOW_US)
            for x in xs:
                yield net(x)

    check(lambda: Writing(models.Block() for _ in range(4)), run, DEVICE)


class WritingKept(models.Stack):
    """Its forward writes to the weights of a block that it called, through tensors that were read before."""

    def run(self, x):
        for block, weight in zip(self.blocks, self.kept, strict=True):
            x = block(x)
            weight.mul_(2)
        return x


def test_weights_that_are_written_by_what_was_read_before_went_up_before():
    def run(net, device):
        net.kept = [block.up.weight.data for block in net.blocks]
        xs = list(inputs(device))
        with torch.no_grad():
            slow(h2d=SLOW_US)
            for x in xs:
                yield net(x)
        del net.kept

    check(lambda: WritingKept(models.Block() for _ in range(4)), run, DEVICE)


@pytest.mark.parametrize("in_closure", [False, True])
def test_weights_that_an_optimizer_steps_within_a_step_went_up_before(in_closure):
    torch.manual_seed(0)
    net, actual = blocks(), []
    x = models.vectors(0)[0]
    expected = net.stem(x), net.blocks[0](net.stem(x))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, foreach=False)
    with sp_lightning.stream(net, DEVICE, window=1) as handle, torch.no_grad():
        x = x.to(DEVICE)
        handle.open_scope("train")

        @torch.no_grad()
        def forward():
            slow(h2d=SLOW_US)
            with torch.Stream(DEVICE):  # the step waits for its own by itself
                actual.extend([net.stem(x), net.blocks[0](net.stem(x))])

        if in_closure:
            optimizer.step(forward)
        else:
            forward()
            optimizer.step()
        handle.close_scope()
        torch.accelerator.synchronize()
        assert all(torch.equal(one.cpu(), other) for one, other in zip(actual, expected, strict=True))


def test_what_is_filled_again_within_a_step_was_read_before():
    torch.manual_seed(0)
    net = blocks()
    x = models.vectors(0)[0]
    block, hidden = net.blocks[0], net.stem(x).detach()
    with torch.no_grad():
        before = block(hidden)
        block.up.weight.mul_(2)
        after = block(hidden)
        block.up.weight.mul_(0.5)
    with sp_lightning.stream(net, DEVICE, window=1) as handle, torch.no_grad():
        hidden = hidden.to(DEVICE)
        handle.open_scope("train")
        slow(compute=SLOW_US)
        actual = [block(hidden)]
        block.up.weight.data.mul_(2)
        actual.append(block(hidden))
        handle.close_scope()
        assert all(torch.equal(one.cpu(), other) for one, other in zip(actual, [before, after], strict=True))


class Reading(models.Stack):
    """Reads a block's weight outside of any forward."""

    def generate(self, x):
        return F.linear(x, self.blocks[1].down.weight)


@pytest.mark.parametrize("read", [Reading.generate, lambda net, x: net.generate(x)], ids=["between steps", "generate"])
def test_weights_that_are_written_after_a_read_outside_of_steps_went_up_before(read):
    torch.manual_seed(0)
    net = Reading(models.Block() for _ in range(4))
    weight = net.blocks[1].down.weight
    expected = net.generate(torch.ones(2, models.HIDDEN)).detach()
    with sp_lightning.stream(net, DEVICE, window=1), torch.no_grad():
        x = torch.ones(2, models.HIDDEN).to(DEVICE)
        slow(h2d=SLOW_US)
        actual = read(net, x)
        double(weight)
        assert torch.equal(actual.cpu(), expected)


def test_weights_that_are_written_after_the_end_went_up_before():
    torch.manual_seed(0)
    net = blocks()
    x = models.vectors(0)[0]
    expected = net(x).detach()
    handle = sp_lightning.stream(net, DEVICE, window=1)
    with torch.no_grad():
        handle.open_scope("predict")
        x = x.to(DEVICE)
        slow(h2d=SLOW_US)
        actual = net(x)
        handle.close()
        for parameter in net.parameters():
            double(parameter)
    assert torch.equal(actual.cpu(), expected)


class Keeping(models.Stack):
    """Keeps a block's weight as an attribute."""

    def run(self, x):
        self.kept = [self.take(self.blocks[1])]
        return super().run(x)

    @staticmethod
    def take(block):
        kept = []
        hook = block.up.register_forward_pre_hook(lambda up, _: kept.append(up.weight))
        block(torch.ones(1, models.WIDTH, device=block.up.weight.device))
        hook.remove()
        return kept[0]


def test_a_kept_reference_is_read_when_it_has_the_new_bytes():
    def run(net, device):
        optimizer = sgd(net)
        xs = list(inputs(device))
        slow(h2d=SLOW_US)
        for x in xs:
            optimizer.zero_grad()
            squares(net, x).backward()
            optimizer.step()
            yield net.kept[0] * 2

    check(lambda: Keeping(models.Block() for _ in range(4)), run, DEVICE)


def test_a_unit_that_has_to_go_while_it_goes_through_the_ring_writes_to_nobody_elses_memory(small_ring, monkeypatch):
    with sp_lightning.stream(blocks(), DEVICE, window=1) as handle:
        first, second = (unit.store for unit in handle.engine.units[:2])
        in_ring = first.slab.truth.data_ptr()
        monkeypatch.setattr(type(handle.device), "_by_itself", lambda self, host: host.data_ptr() != in_ring)
        slow(h2d=SLOW_US)
        first.load()
        first.on_device.free()
        second.load()
        second.on_device.wait_load()
        first.on_device.ready.synchronize()
        assert torch.equal(second.on_device.flat.cpu(), second.slab.truth)


def test_registered_memory_is_given_up_with_its_last_tensor_and_after_what_is_queued(monkeypatch):
    cudart = fake_cudart.install(monkeypatch)
    flat = HostAllocator().locked(3 << 20, CudaPageLock(DEVICE))
    address, part = flat.data_ptr(), flat.untyped_storage()[512:1024]
    assert cudart.registered == {address: 3 << 20}
    del flat
    assert cudart.registered
    del part
    assert cudart.calls == [("register", address), ("synchronize", DEVICE), ("unregister", address)]


# --- Activations on their way


def test_backward_inside_the_step_brings_back_what_the_last_unit_saved():
    torch.manual_seed(0)
    net = blocks()
    x = models.vectors(0)[0]
    squares(net, x).backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    with sp_lightning.stream(net, DEVICE, window=1, activations="offload") as handle:
        handle.open_scope("train")
        slow(d2h=SLOW_US)
        squares(net, x.to(DEVICE)).backward()
        handle.close_scope()
        assert all(torch.equal(p.grad, other) for p, other in zip(net.parameters(), expected, strict=True))


@pytest.mark.parametrize("host_memory", ["auto", "pageable"])
def test_memory_of_another_stream_is_given_out_again_after_the_copy_of_what_was_saved_there(host_memory):
    device, counters = Device(DEVICE, host_memory), Counters()
    offload = Offload(device, counters)
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    slow(d2h=SLOW_US)
    kept = []
    for stream in (main, side):
        with stream:
            offload.begin()
            saved = torch.full((4096,), 3.0, device=DEVICE)
            kept.append(offload.pack(saved))
            offload.end()
    del saved
    offload.finish()  # on the main stream
    with side:
        zeros = [torch.zeros(4096, device=DEVICE) for _ in range(2)]  # in the memory of what was saved on this stream
    device.synchronize()
    assert all(bool(offload.unpack(one).eq(3).all()) for one in kept) and not any(one.any() for one in zeros)
    device.close()


class Branching(nn.Module):
    """Two outputs; only the gradient of the second one needs what the sigmoid saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x), torch.sigmoid(2 * x)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(2))

    def forward(self, x):
        others = []
        for block in self.blocks:
            x, other = block(x)
            others.append(other)
        return x, others


def test_what_came_back_and_is_not_asked_for_writes_to_no_memory_that_is_given_out_again():
    net = Branches()
    x = torch.ones(512, 64, device=DEVICE, requires_grad=True)
    with sp_lightning.stream(net, DEVICE, window=1, activations="offload") as handle:
        for h2d_us in (0, SLOW_US):
            output, kept = net(x)  # what the sigmoid saved lives as long as its output
            slow(h2d=h2d_us)
            output.sum().backward()
            assert handle.stats()["bytes_brought_back"] >= sum(tensor.nbytes for tensor in kept)
            del output, kept
            others = [torch.full((64, 64), float(index), device=DEVICE) for index in range(64)]
        assert all(bool((other == index).all()) for index, other in enumerate(others))


# --- Gradients on their way down


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.few(1)
def test_gradients_are_there_when_backward_returns(seen):
    def run(net, device):
        if seen:
            for parameter in net.parameters():
                parameter.register_hook(lambda gradient: gradient * 2)
        xs = list(inputs(device))
        slow(d2h=SLOW_US)
        for x in xs:
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]

    check(blocks, run, DEVICE)


def test_a_gradient_that_code_has_kept_is_added_to_before_the_next_hook():
    def run(net, device):
        x, *_ = inputs(device)
        squares(net, x).backward()
        slow(d2h=SLOW_US)
        kept, seen = net.blocks[-1].up.weight.grad, []
        hidden = net.blocks[0].register_forward_hook(
            lambda *args: args[2].register_hook(lambda _: seen.append(kept.clone())) and None
        )
        squares(net, x).backward()
        hidden.remove()
        yield seen

    check(blocks, run, DEVICE)


def test_gradients_are_there_for_code_that_asks_torch_itself():
    torch.manual_seed(0)
    net = blocks()
    with sp_lightning.stream(net, DEVICE, window=1):
        x = models.vectors(0)[0].to(DEVICE)
        slow(d2h=SLOW_US)
        squares(net, x).backward()
        assert all(torch.Tensor.grad.__get__(p) is not None for p in net.parameters())


def in_backward_of_the_first_block(net, call):
    """Calls it when the gradients of the other blocks are on their way."""
    net.blocks[0].register_forward_hook(lambda _m, _i, output: output.register_hook(lambda _: call()) and None)


def test_a_gradient_that_is_asked_for_in_the_middle_of_backward_is_there():
    def run(net, device):
        seen = []
        in_backward_of_the_first_block(net, lambda: seen.append(net.blocks[3].up.weight.grad.clone()))
        x = next(inputs(device))
        slow(d2h=SLOW_US)
        squares(net, x).backward()
        yield seen

    check(blocks, run, DEVICE)


def test_a_gradient_that_is_removed_in_the_middle_of_backward_stays_away():
    def run(net, device):
        def remove():
            net.blocks[3].up.weight.grad = None

        in_backward_of_the_first_block(net, remove)
        x = next(inputs(device))
        slow(d2h=SLOW_US)
        squares(net, x).backward()
        yield net.blocks[3].up.weight.grad

    check(blocks, run, DEVICE)


class Gated(models.Block):
    """Computes with the gradient that a weight of its own has so far."""

    def forward(self, x):
        so_far = self.up.weight.grad
        return super().forward(x if so_far is None else x * (1 + so_far.sum()))


def test_a_gradient_of_another_use_is_there_in_the_second_forward_of_a_checkpoint():
    def run(net, device):
        x = net.stem(next(inputs(device)))
        for _ in range(2):  # in backward the gradient of the second use is on its way when the first one runs again
            x = checkpoint(net.blocks[1], x, use_reentrant=True)
        slow(d2h=SLOW_US)
        x.square().mean().backward()
        yield [p.grad for p in net.parameters()]

    check(models.stack_of(Gated), run, DEVICE)


def wide():
    """Blocks whose weights are large beside all else."""
    return models.stack_of(lambda: nn.Sequential(nn.Linear(models.WIDTH, 512), nn.Linear(512, models.WIDTH)), 8)()


def allocated_in_the_end(expected):
    """What the device holds once autograd's own thread has let go of the last graph: at once, or a moment later."""
    patience = time.monotonic() + 5
    while (nbytes := torch.accelerator.memory_allocated()) != expected and time.monotonic() < patience:
        time.sleep(0.001)
    return nbytes


def resident_nbytes(handle):
    return sum(unit.store.on_device.nbytes for unit in handle.engine.units if unit.store.on_device.is_loaded)


@pytest.mark.parametrize("returned", [[], [0, 2, 4, 6], range(8)])
@pytest.mark.few(1)
def test_gradients_on_their_way_hold_two_buffers_at_most(returned):
    net = wide()
    for index in returned:  # whose gradients autograd wants to have
        for parameter in net.blocks[index].parameters():
            parameter.register_hook(lambda gradient: gradient)
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        x = models.vectors(0)[0][:1].to(DEVICE)
        squares(net, x).backward()
        torch.accelerator.synchronize()
        slow(d2h=SLOW_US)
        torch.accelerator.reset_peak_memory_stats()
        squares(net, x).backward()
        block = handle.units[0].nbytes
        assert torch.accelerator.max_memory_allocated() < 4 * block  # the window, two buffers, and the small rest


def test_nothing_of_the_gradients_stays_on_the_device():
    net = wide()
    before = torch.accelerator.memory_allocated()
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        stepping(net, handle, models.vectors(0)[0].to(DEVICE))
        expected = before + resident_nbytes(handle)
        assert allocated_in_the_end(expected) == expected


def test_nothing_of_what_was_offloaded_stays_on_the_device_when_the_forward_ends():
    net = wide()
    with sp_lightning.stream(net, DEVICE, window=1, activations="offload") as handle:
        x = models.vectors(0)[0].to(DEVICE)
        before = torch.accelerator.memory_allocated()
        slow(d2h=SLOW_US)
        kept = [net(x)]
        saved = 4 * models.BATCH * 512  # the larger one of what a block saves
        assert torch.accelerator.memory_allocated() < before + resident_nbytes(handle) + saved
        assert kept


class Interruption(RuntimeError):
    """What a test throws into a backward."""


def interrupt(*_, **__):
    raise Interruption


def test_a_backward_that_failed_leaves_nothing_on_the_device():
    net = wide()
    in_backward_of_the_first_block(net, interrupt)
    handle = sp_lightning.stream(net, DEVICE, window=1)
    x = models.vectors(0)[0].to(DEVICE)
    before = torch.accelerator.memory_allocated()
    slow(d2h=SLOW_US)
    with pytest.raises(Interruption):
        squares(net, x).backward()
    handle.close()
    assert allocated_in_the_end(before) == before


# --- Steps ahead


def reference(x, steps):
    """A plain module and its optimizer after so many steps."""
    torch.manual_seed(0)
    net = blocks()
    optimizer = make_optimizer(net)
    for _ in range(steps):
        optimizer.zero_grad()
        squares(net, x).backward()
        optimizer.step()
    return net, optimizer


def make_optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)


def stepping(net, handle, x, steps=2, optimizer=None):
    """Training steps, of which all but an optimizer's first overlap with their backward."""
    optimizer = optimizer or make_optimizer(net)
    for _ in range(steps):
        optimizer.zero_grad()
        with handle.steps.overlapping(optimizer):
            squares(net, x).backward()
            optimizer.step()
    return optimizer


def assert_same_parameters(net, expected):
    for (name, one), other in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(torch.Tensor.data.__get__(one), other), name


def test_the_optimizer_waits_for_what_is_stepped_ahead():
    expected, expected_optimizer = reference(models.vectors(0)[0], steps=2)
    torch.manual_seed(0)
    net = blocks()
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        x = models.vectors(0)[0].to(DEVICE)
        optimizer = stepping(net, handle, x, steps=1)
        slow(d2h=SLOW_US)
        stepping(net, handle, x, 1, optimizer)
        assert handle.stats()["stepped_ahead"] > 0
        assert_same_parameters(net, expected)
        for one, other in zip(optimizer.state.values(), expected_optimizer.state.values(), strict=True):
            assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


@pytest.mark.parametrize("leaves", [False, True])
def test_an_error_of_the_thread_that_steps_ahead_is_raised(leaves, monkeypatch):
    came = threading.Event()

    def fail(*_, **__):
        came.set()
        raise Interruption

    net = blocks()
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        x = models.vectors(0)[0].to(DEVICE)
        optimizer = stepping(net, handle, x)
        monkeypatch.setattr(torch.optim.SGD, "_init_group", fail)
        with pytest.raises(Interruption), handle.steps.overlapping(optimizer, lambda: came.wait(60) and leaves):
            optimizer.zero_grad()
            squares(net, x).backward()


def test_a_failed_step_says_what_was_stepped_and_steps_no_more(caplog):
    net = blocks()
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        x = models.vectors(0)[0].to(DEVICE)
        optimizer = stepping(net, handle, x)
        in_backward_of_the_first_block(net, interrupt)
        optimizer.zero_grad()
        slow(d2h=SLOW_US)
        with pytest.raises(Interruption), handle.steps.overlapping(optimizer):
            squares(net, x).backward()
        assert "already stepped 18 of 28 parameters" in caplog.text  # the blocks 1, 2 and 3
        after = [torch.Tensor.data.__get__(p).clone() for p in net.parameters()]
        time.sleep(0.1)
        assert all(torch.equal(torch.Tensor.data.__get__(p), q) for p, q in zip(net.parameters(), after, strict=True))


def test_another_thread_that_asks_for_the_state_waits_for_what_is_stepped_ahead():
    net = blocks()
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        x = models.vectors(0)[0].to(DEVICE)
        optimizer = stepping(net, handle, x)
        weight, seen = net.blocks[1].up.weight, []

        def look():
            seen.append(optimizer.state[weight]["momentum_buffer"].clone())

        def look_in_another_thread():
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

        in_backward_of_the_first_block(net, look_in_another_thread)
        optimizer.zero_grad()
        slow(d2h=SLOW_US)
        with handle.steps.overlapping(optimizer):
            squares(net, x).backward()
            optimizer.step()
        assert torch.equal(seen[0], optimizer.state[weight]["momentum_buffer"])


class Arriving:
    """Gradients of nothing, on their way for a while."""

    def __init__(self, name, landed, seconds=0.0):
        self.name = name
        self.landed = landed
        self.at = time.monotonic() + seconds

    def has_arrived(self):
        return time.monotonic() >= self.at

    def wait(self):
        time.sleep(max(0, self.at - time.monotonic()))

    def land(self):
        self.wait()
        self.landed.append(self.name)
        return []


@pytest.fixture
def ahead():
    """A step that waits for gradients of nothing, and what submits them to it."""
    net = blocks()
    optimizer = make_optimizer(net)
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        thread = HostThread()
        step = PendingStep(Counters(), Access(), optimizer, step_in_pieces(optimizer), thread)
        assert step.withhold(lambda: None)
        store = handle.engine.units[0].store

        def submit(arriving):
            step.promise(store)
            step.take(store, arriving)

        yield step, submit
        step.close()
        thread.close()


def test_a_wait_that_was_interrupted_can_be_taken_up_again(ahead):
    ahead, submit = ahead
    arrived = []
    submit(Arriving("unit", arrived, 0.5))
    main = threading.main_thread().ident
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ahead.finish()
    assert not arrived
    ahead.finish()
    assert arrived


def test_of_what_has_arrived_the_newest_is_stepped_first(ahead):
    ahead, submit = ahead
    landed = []
    for name, seconds in [("busy", 0.2), ("old", 0), ("new", 0), ("on its way", 0.5)]:
        submit(Arriving(name, landed, seconds))
        time.sleep(0.05)
    ahead.finish()
    assert landed == ["busy", "new", "old", "on its way"]


def test_units_are_stepped_while_the_last_gradients_are_on_their_way():
    net = blocks()
    with sp_lightning.stream(net, DEVICE, window=1) as handle:
        x = models.vectors(0)[0].to(DEVICE)
        optimizer = stepping(net, handle, x)
        before = handle.stats()["stepped_ahead"]
        slow(d2h=SLOW_US)
        optimizer.zero_grad()
        with handle.steps.overlapping(optimizer, lambda: True):
            squares(net, x).backward()
            optimizer.step()
        assert handle.stats()["stepped_ahead"] - before >= 20  # of 28: but for one unit, if the host is slow


# --- What is read of a recording


def test_the_end_of_a_recording_waits_for_what_it_has_to_read():
    net = blocks()
    with sp_lightning.stream(net, DEVICE, window=1) as handle, torch.no_grad():
        recorder = handle.record()
        slow(compute=SLOW_US)
        net(models.vectors(0)[0].to(DEVICE))
        recorder.flush()
        assert len(recorder.steps) == 1


# --- Copies of the user's that he does not wait for


def gradients_from_the_device(net):
    for p in net.parameters():
        p.grad.copy_(torch.full_like(p, 0.25, device=DEVICE), non_blocking=True)


def weights_from_the_device(net):
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.full_like(p, 0.25, device=DEVICE), non_blocking=True)


def data_from_the_device(net):
    for p in net.parameters():
        p.data.copy_(torch.full_like(p, 0.25, device=DEVICE), non_blocking=True)


def slowly(copies, **delays_us):
    def make(net):
        slow(**delays_us)
        copies(net)
        slow(**dict.fromkeys(delays_us, 0))

    return make


@pytest.mark.parametrize("copies", [gradients_from_the_device, weights_from_the_device, data_from_the_device])
@pytest.mark.few(1)
def test_copies_to_weights_and_gradients_before_a_step(copies):
    check(blocks, training(before_step=slowly(copies, d2h=SLOW_US)), DEVICE)


@pytest.mark.parametrize("copies", [weights_from_the_device, data_from_the_device])
@pytest.mark.few(1)
def test_copies_to_weights_before_the_first_forward(copies):
    def run(net, device):
        x = next(inputs(device))
        slowly(copies, d2h=SLOW_US)(net)
        with torch.no_grad():
            yield net(x)

    check(blocks, run, DEVICE)


@pytest.mark.seldom
def test_copies_to_gradients_before_the_step_of_an_unknown_optimizer():
    class Unknown(torch.optim.SGD):
        pass

    def run(net, device):
        optimizer = Unknown(net.parameters(), lr=0.1)
        for x in inputs(device):
            optimizer.zero_grad()
            squares(net, x).backward()
            slowly(gradients_from_the_device, d2h=SLOW_US)(net)
            optimizer.step()

    check(blocks, run, DEVICE)


@pytest.mark.seldom
def test_copies_of_weights_before_a_step():
    taken = []

    def take(net):
        taken.append([p.detach().to(DEVICE, copy=True, non_blocking=True) for p in net.parameters()])

    def run(net, device):
        yield from training(before_step=slowly(take, h2d=SLOW_US))(net, device)
        yield [taken.pop() for _ in range(3)]

    check(blocks, run, DEVICE)
