"""What a handle tells of a stream, and the window that it chooses from bytes."""

import time

import pytest
import torch
from stream_programs import Net, device_named, stream, streamed

from sp_lightning.host.device import DeviceMemoryError


def steps(model, device, count=2, optimizer=None, batch=4):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(count):
        model(torch.ones(batch, 8, device=device_named(device))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def nbytes(*modules):
    return sum(-(-p.nbytes // 512) * 512 for module in modules for p in module.parameters())


def test_counts_are_those_of_the_copies():
    model = Net()
    block, blocks = nbytes(model.blocks[0]), len(model.blocks)
    with streamed(model, "cpu", window=1, units=["Block"]) as handle:
        steps(model, "cpu")
        handle.finish_step()
        stats = handle.stats()
    loads = 2 * (2 * blocks - 1)  # forward and backward, and the last block is there when backward begins
    assert (stats["fetches"], stats["bytes_up"], stats["bytes_down"]) == (
        loads,
        loads * block + nbytes(model.emb, model.head),  # which go up once
        2 * blocks * block,
    )
    assert (stats["units"], stats["window"], stats["held_steps"], stats["stepped_ahead"]) == (blocks, 1, 2, 0)
    assert stats["resident_root_bytes"] == nbytes(model.emb, model.head)
    assert stats["weight_bytes"] == stats["resident_root_bytes"] + blocks * block


def test_a_write_of_a_forward_is_counted():
    model = Net()
    model.blocks[1].register_forward_pre_hook(lambda block, _: block.up.weight.data.mul_(0.5))
    with streamed(model, "cpu") as handle, torch.no_grad():
        model(torch.ones(4, 8))
        assert handle.stats()["bytes_down"] == model.blocks[1].up.weight.nbytes


@pytest.mark.simgpu
def test_an_auto_window_grows_into_what_steps_leave_free():
    import simgpu

    model = Net()
    with streamed(model, "simgpu"):
        steps(model, "simgpu", count=1)  # compares compiled steps with the device's, once in a process
    simgpu.config.capacity = 420 * 1024
    with stream(model, "simgpu", window="auto", transfer=2, units=["Block"]) as handle:
        windows = []
        for _ in range(4):
            steps(model, "simgpu", count=1)
            windows.append(handle.stats()["window"])
        assert windows[0] == 1 and windows[-1] == len(model.blocks) and handle.stats()["transfer"] == 2
        assert torch.accelerator.max_memory_allocated() <= simgpu.config.capacity


def test_a_budget_bounds_an_auto_window():
    model = Net()
    rest, block = nbytes(model.emb, model.head), nbytes(model.blocks[0])
    budget = 2 * rest + 4 * block  # weights and gradients that stay; two units, and gradients of two
    with stream(model, "cpu", window="auto", memory_budget=budget, units=["Block"]) as handle:
        steps(model, "cpu")
        assert handle.stats()["window"] == 2


@pytest.mark.simgpu
def test_a_model_that_fills_the_device_is_told_what_makes_room():
    import simgpu

    model = Net()
    with streamed(model, "simgpu", window=2) as handle:
        steps(model, "simgpu")
        many = torch.ones(4096, 8, device=device_named("simgpu"))
        simgpu.config.capacity = torch.accelerator.memory_allocated() + 64 * 1024
        said = (
            r"out of memory.*\nsuperpipeline: of [\d.]+ KiB on simgpu:0, the window of 2 took [\d.]+ K?i?B, and "
            r"activations, gradients, buffers and all else [\d.]+ KiB; to make room: activations='recompute' "
            r"\(each forward runs twice.*\); window=1 \(.*\); batches of half the size and"
        )
        with pytest.raises(DeviceMemoryError, match=said):
            model(many)
        assert not handle.closed


@pytest.mark.simgpu
def test_a_tensor_on_the_host_is_named_as_the_cause():
    from sp_lightning.errors import UnsupportedError

    model = Net()
    model.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] + torch.ones(4, 32),))
    with streamed(model, "simgpu"), pytest.raises(UnsupportedError, match="met a tensor on simgpu:0"):
        model(torch.ones(4, 8))


def test_without_overlap_a_step_is_over_when_it_returns():
    model = Net()
    with streamed(model, "cpu", optimizer_overlap=False) as handle:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handle.steps.thread.submit(time.sleep, 0.1)
        steps(model, "cpu", 1, optimizer)
        assert all(unit.steps.last is None for unit in handle.units) and handle.stats()["held_steps"] == 0
