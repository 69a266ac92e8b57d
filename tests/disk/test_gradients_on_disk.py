"""Gradients on a disk are those of a plain run, whoever reads, writes, keeps or replaces them, and never come late."""

import copy
import errno
import functools
import gc
import itertools
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import parity
import sp_lightning
from sp_lightning.disk import state_ring
from sp_lightning.disk.placement import GRADIENT_BUFFERS, gradient_ring, in_slab
from sp_lightning.disk.scratch_file import ScratchFile
from sp_lightning.errors import DiskError
from sp_lightning.gradients import slab_on_disk

LAYERS = 6


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)
    monkeypatch.setattr(slab_on_disk, "GRADIENT_PIECE", 1 << 12)


def stack(tied=False):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(65, 65), nn.Tanh()) for _ in range(LAYERS)])
    if tied:
        net[4][0].weight = net[1][0].weight
    return net


class Around(nn.Module):
    """A layer, and others beside it, which add nothing while their last one's weights are zero."""

    def __init__(self, layer, others):
        super().__init__()
        self.layer, self.others = layer, others

    def forward(self, x):
        return self.layer(x) + self.others(x)


def streamed(net, device, **options):
    return sp_lightning.stream(net, device, window=2, host_budget="0B", disk=os.getcwd(), **options)


def backward(net, device, number=0, autocast=False):
    x = torch.randn(5, 65, generator=torch.Generator().manual_seed(number)).to(device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=autocast):
        loss = net(x).float().square().mean()
    loss.backward()


def is_on_disk(handle, tensor):
    return handle.storage.state._file.place_of(tensor) is not None


# What code does between two batches whose gradients are added, and returns for comparison.


def nothing(net):
    return []


def read(net):
    return [p.grad.clone() for p in net.parameters()]


def keep(net):
    """Keeps the gradients, whose tensors are not the next ones."""
    kept = [p.grad for p in net.parameters()]
    net.zero_grad()
    return kept


def keep_views(net):
    kept = [p.grad.view(-1)[3:9] for p in net.parameters()]
    net.zero_grad()
    return kept


def write(net):
    for p in net.parameters():
        p.grad.mul_(0.3)
    return []


def replace(net):
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    return []


def replace_data(net):
    for p in net.parameters():
        p.grad.data = torch.full_like(p.grad, 0.5)
    return []


def to_zero(net):
    net.zero_grad(set_to_none=False)
    return []


def turn(net):
    net[2][0].weight.grad.t_()
    return []


def hook(net):
    """From here on autograd accumulates this gradient by itself, into what is on the disk."""
    net[2][0].weight.register_hook(lambda grad: grad * 2)
    return []


def hook_after(net):
    seen = []
    net[3][0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    return seen


def freeze(net):
    net[1][0].weight.requires_grad_(False)
    return []


def clip(net):
    return [nn.utils.clip_grad_norm_(net.parameters(), 0.01)]


BETWEEN = [nothing, read, keep, keep_views, write, replace, replace_data, to_zero, hook, hook_after, freeze, clip]


def trained(net, device, between, steps, **given):
    """Three batches with code between them, and a step, several times; all gradients and weights on the way."""
    found = []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number in range(steps):
        kept = []
        for part in range(3):
            backward(net, device, 3 * number + part, **given)
            if part < 2:
                kept += between(net) if number in (0, 2) else []
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        found += [value.clone() for value in kept]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in net.parameters()]


@parity.product(between=BETWEEN, tied=[False, True], autocast=[False, True], device=parity.DEVICES)
@pytest.mark.few(3)
def test_what_code_does_with_gradients_it_does_with_those_on_the_disk(between, tied, autocast, device):
    results = []
    for on_disk in (False, True):
        net = stack(tied)
        if on_disk:
            with streamed(net, device) as handle:
                results.append(trained(net, device, between, 4, autocast=autocast))
                assert handle.engine.gradient_return.host_nbytes == 0 and handle.stats()["disk_written"] > 0
        else:
            with sp_lightning.stream(net, device, window=2):
                results.append(trained(net, device, between, 4, autocast=autocast))
    assert len(results[0]) == len(results[1])
    assert all(parity.difference(*pair) is None for pair in zip(*results, strict=True))


@parity.product(turns=[False, True], device=parity.DEVICES)
def test_gradients_are_on_the_disk_and_the_host_has_a_ring(turns, device):
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with streamed(net, device) as handle:
        for number in range(3):
            backward(net, device, number)
            if turns:
                turn(net)
                net[2][0].weight.grad.t_()
            assert all(is_on_disk(handle, p.grad) for p in net.parameters())
            optimizer.step()
            assert all(p.grad is not None for p in net.parameters())
            optimizer.zero_grad()
        buffer = in_slab(p.nbytes for p in net[0].parameters())
        assert handle.storage.placed.gradient_buffer == buffer
        assert 0 < handle.storage._gradients.nbytes <= gradient_ring(buffer)
        assert handle.storage.placed.host.gradients == 0


@parity.product(accumulate=[1, 2], device=parity.DEVICES)
def test_a_step_writes_and_reads_each_gradient_once(accumulate, device):
    """And once more for each batch that is added to others."""
    net = stack()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    gradients = sum(p.nbytes for p in net.parameters())
    with streamed(net, device, optimizer_overlap=False, wire_dtype="as-is") as handle:
        moved = []
        for number in range(3):
            before = handle.stats()
            for part in range(accumulate):
                backward(net, device, 2 * number + part)
            optimizer.step()
            optimizer.zero_grad()
            after = handle.stats()
            moved.append([after[name] - before[name] for name in ("disk_read", "disk_written")])
    weights = gradients  # stepped there
    assert moved[-1][1] == accumulate * gradients + weights
    ups = moved[-1][0] - accumulate * gradients - weights
    assert accumulate * weights < ups <= 2 * accumulate * weights


# ---- failures


class Stop(Exception):
    pass


@parity.product(at=[0, 2, LAYERS - 1], overlap=[True, False], device=parity.DEVICES)
@pytest.mark.few(3)
def test_a_backward_that_fails_leaves_no_gradient_that_comes_later(at, overlap, device):
    """What was on its way then is in no later gradient."""
    results = []
    for on_disk in (False, True):
        net = stack()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        stream = streamed if on_disk else functools.partial(sp_lightning.stream, window=2)
        with stream(net, device, optimizer_overlap=overlap):
            for number in range(5):
                failing = []
                if number == 2:

                    def stop(module, given, output):
                        raise Stop

                    failing = [net[at].register_full_backward_hook(stop)]
                try:
                    backward(net, device, number)
                except Stop:
                    optimizer.zero_grad()
                    for hook in failing:
                        hook.remove()
                    continue
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *results))


@parity.product(call=["pwritev", "preadv"], at=[0, 3], error=[errno.EIO, errno.ENOSPC], device=parity.DEVICES)
@pytest.mark.few(3)
def test_a_disk_that_fails_under_a_gradient_is_a_typed_error_and_the_next_batch_is_right(
    call, at, error, device, monkeypatch
):
    """Nothing was stepped, so the run goes on once the disk is there again."""
    results = []
    for fails in (False, True):
        net = stack()
        with streamed(net, device, optimizer_overlap=False) as handle:
            backward(net, device, 0)  # allocates
            net.zero_grad()
            move, calls = getattr(os, call), itertools.count()

            def failing(*given, move=move, calls=calls):
                ours = threading.current_thread().name.startswith("superpipeline-gradients")
                if ours and next(calls) == at:
                    raise OSError(error, os.strerror(error))
                return move(*given)

            if fails:
                said = ""
                with monkeypatch.context() as broken:
                    broken.setattr(os, call, failing)
                    try:
                        for number in (1, 2):  # the second is added to the first
                            backward(net, device, number)
                    except DiskError as found:
                        said = str(found)
                assert "could not be written at byte" in said or "could not be read at byte" in said
                net.zero_grad()
                gc.collect()  # the error refers to what it came from
            for number in (3, 4):
                backward(net, device, number)
            assert all(is_on_disk(handle, p.grad) for p in net.parameters())
            results.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *results))


@parity.product(at=[0, 2, 5], device=parity.DEVICES)
@pytest.mark.few(2)
def test_an_interrupt_of_a_wait_for_the_disk_is_raised_once_and_the_next_batch_is_right(at, device, monkeypatch):
    results = []
    for presses in (False, True):
        net = stack()
        with streamed(net, device, optimizer_overlap=False):
            backward(net, device, 0)  # allocates
            net.zero_grad()
            share, calls = slab_on_disk.GradientRing._share, itertools.count()

            def interrupted(ring, work, of, share=share, calls=calls):
                if next(calls) == at:
                    raise KeyboardInterrupt
                share(ring, work, of)

            if presses:
                with monkeypatch.context() as pressed, pytest.raises(KeyboardInterrupt):
                    pressed.setattr(slab_on_disk.GradientRing, "_share", interrupted)
                    backward(net, device, 1)
                net.zero_grad()
                assert all(p.grad is None for p in net.parameters())
                gc.collect()  # the error refers to what it came from
            for number in (3, 4):
                backward(net, device, number)
            results.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *results))


@parity.product(at=[0, 1, 4], device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_host_that_has_no_memory_for_the_buffers_is_an_error_after_which_the_run_goes_on(at, device, monkeypatch):
    results, memory, make = [], [], slab_on_disk.aligned_buffer
    for fails in (False, True):
        net, calls = stack(), itertools.count()

        def failing(device, nbytes, calls=calls):
            return make(device, 1 << 60 if next(calls) == at else nbytes)

        with streamed(net, device, optimizer_overlap=False) as handle:
            if fails:
                monkeypatch.setattr(slab_on_disk, "aligned_buffer", failing)
                with pytest.raises(OSError, match="Cannot allocate memory"):
                    backward(net, device, 0)
                net.zero_grad()
            for number in (1, 2):
                backward(net, device, number)
            assert all(is_on_disk(handle, p.grad) for p in net.parameters())
            results.append([p.grad.clone() for p in net.parameters()])
            memory.append(handle.storage._gradients.nbytes)
    assert all(map(torch.equal, *results))
    assert memory[0] == memory[1]


@parity.product(at=[0, 1, 4], device=parity.DEVICES)
@pytest.mark.few(1)
def test_larger_buffers_without_memory_leave_the_gradients_that_were_on_their_way(at, device, monkeypatch):
    net, calls, make = stack(), itertools.count(), slab_on_disk.aligned_buffer
    with streamed(net, device, optimizer_overlap=False) as handle:
        backward(net, device)
        expected = [p.grad.clone() for p in net[1:].parameters()]
        net.zero_grad()
        first = nn.Sequential(nn.Linear(65, 700), nn.Linear(700, 65))
        nn.init.zeros_(first[1].weight)
        nn.init.zeros_(first[1].bias)
        net[0] = nn.Sequential(Around(net[0], first))
        smaller = handle.storage._gradients._buffer_nbytes

        def larger_fails(device, nbytes):
            is_larger = handle.storage._gradients._buffer_nbytes > smaller
            return make(device, 1 << 60 if is_larger and next(calls) == at else nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(slab_on_disk, "aligned_buffer", larger_fails)
            with pytest.raises(OSError, match="Cannot allocate memory"):
                backward(net, device)
        assert all(map(torch.equal, [p.grad for p in net[1:].parameters()], expected))


def test_a_slow_disk_holds_backward_and_changes_nothing(device, monkeypatch):
    """Buffers are taken again only when what they had has landed."""
    results, lent, write = [], [], slab_on_disk.GradientRing.write

    def slowly(self, *given):
        time.sleep(0.02)
        lent.append(len(self._lent))
        return write(self, *given)

    for slow in (False, True):
        net = stack()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if slow:
            monkeypatch.setattr(slab_on_disk.GradientRing, "write", slowly)
        with streamed(net, device):
            for number in range(3):
                backward(net, device, number)
                optimizer.step()
                optimizer.zero_grad()
        results.append(copy.deepcopy(net.state_dict()))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert max(lent) == GRADIENT_BUFFERS


@parity.product(comes=["layer", "first layer", "weights"], accumulate=[False, True], device=parity.DEVICES)
def test_the_ring_has_room_for_what_comes_to_train(comes, accumulate, device):
    """Buffers are made for what trained when units were chosen the first time, here biases or layers of 65 by 65."""
    found = []
    for disk in ({}, {"host_budget": "0B", "disk": os.getcwd()}):
        net = stack()
        if comes == "weights":
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with sp_lightning.stream(net, device, window=2, units="Sequential", **disk) as handle:
            if comes != "weights":
                backward(net, device)
                optimizer.step()
                if comes == "layer":
                    added = nn.Sequential(nn.Linear(65, 700), nn.Tanh())
                    net.append(added)
                else:  # in backward gradients of the others are on their way then
                    added = nn.Sequential(nn.Linear(65, 700), nn.Linear(700, 65))
                    net.insert(0, added)
                optimizer.add_param_group({"params": [*added.parameters()]})
            net.requires_grad_(True)
            for number in range(2):
                if not accumulate:
                    optimizer.zero_grad()
                backward(net, device, number)
                optimizer.step()
            largest = max(net.parameters(), key=torch.numel)
            assert not disk or is_on_disk(handle, largest.grad)
            found.append([tensor.clone() for p in net.parameters() for tensor in (p, p.grad)])
    assert all(map(torch.equal, *found))


def test_a_weight_without_room_in_the_slab_has_its_gradient_in_memory(device):
    """A slab has room for what trained when it was made."""
    net = stack()
    net[3][0].weight.requires_grad_(False)
    with streamed(net, device) as handle:
        backward(net, device)
        net[3][0].weight.requires_grad_(True)
        net.zero_grad()
        backward(net, device)
        assert is_on_disk(handle, net[0][0].weight.grad)
        found = [p.grad.clone() for p in net.parameters()]
    plain = stack()
    with sp_lightning.stream(plain, device, window=2):
        backward(plain, device)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(plain.parameters(), found, strict=True))


def test_two_threads_may_have_gradients_land_at_once(device, monkeypatch):
    """The optimizer thread does so while backward asks for a buffer: each batch is added once, to all before it."""
    read = ScratchFile.read

    def slowly(self, memory, begin, nbytes):
        read(self, memory, begin, nbytes)
        time.sleep(0.002)

    next_free, land = slab_on_disk.GradientRing.next_free, slab_on_disk.TransferToDisk.land
    with ThreadPoolExecutor(2 * GRADIENT_BUFFERS) as threads:

        def landed(self, transfer):
            land(transfer)
            return transfer not in self._lent

        def in_threads(self):
            lent = list(self._lent)
            if len(lent) < GRADIENT_BUFFERS:
                return next_free(self)
            landing = [threads.submit(landed, self, one) for one in lent for _ in range(2)]
            buffer = next_free(self)
            assert all(one.result() for one in landing)
            return buffer

        found = []
        for at_once in (False, True):
            net = stack()
            with streamed(net, device, optimizer_overlap=False):
                if at_once:
                    monkeypatch.setattr(ScratchFile, "read", slowly)
                    monkeypatch.setattr(slab_on_disk.GradientRing, "next_free", in_threads)
                for number in range(3):
                    backward(net, device, number)
                found.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.simgpu
@pytest.mark.parametrize("stepped", [False, True])
def test_a_graph_that_a_module_keeps_keeps_nothing_of_a_run_that_ended(stepped):
    """A graph leads to what streamed its weights, in a way that no collection of garbage sees."""

    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = self.weight.T
            return super().forward(x)

    net = stack()
    net[3][0] = Keeps(65, 65)
    before, gone = torch.accelerator.memory_allocated(), weakref.ref(net)
    with streamed(net, "simgpu"):
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for _ in range(2):
            backward(net, "simgpu")
            if stepped:
                optimizer.step()
    del net, optimizer
    for _ in range(3):  # what a collection ends may free the graph, whose end leaves garbage
        gc.collect()
    assert gone() is None and torch.accelerator.memory_allocated() == before
