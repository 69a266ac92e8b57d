"""`window="auto"` without gradients: what fits travels once, and of a larger model what exceeds the device."""

import pytest
import torch
from stream_programs import Net, stream

simgpu = pytest.importorskip("simgpu")
pytestmark = pytest.mark.simgpu
COUNT = 40


def by_its_forward(model, x):
    model(x[:, :8])


def by_a_loop_over_units(model, x):
    for block in model.blocks:
        x = block(x)


def ups(model, call, times=5):
    """Return the units that go up in each of a few forwards, as a number of their bytes, and a unit's bytes."""
    found = []
    with stream(model, "simgpu", window="auto", transfer="auto") as handle:
        for _ in range(times):
            before = handle.stats()["bytes_up"]
            with torch.no_grad():
                call(model, torch.ones(4, 32, device="simgpu"))
            found.append(handle.stats()["bytes_up"] - before)
        unit = next(unit.nbytes for unit in handle.units if not unit.is_resident)
    return [nbytes / unit for nbytes in found], unit


@pytest.mark.parametrize("call", [by_its_forward, by_a_loop_over_units])
def test_a_model_that_fits_travels_once(call):
    assert ups(Net(count=COUNT), call)[0][2:] == [0, 0, 0]


@pytest.mark.parametrize("call", [by_its_forward, by_a_loop_over_units])
def test_a_larger_model_moves_what_exceeds_the_device(call):
    _, unit = ups(Net(count=COUNT), call, times=1)
    torch.accelerator.synchronize()
    capacity = int(COUNT * unit / 1.5)
    simgpu.config.capacity = torch.accelerator.memory_allocated() + capacity
    try:
        found, _ = ups(Net(count=COUNT), call)
    finally:
        simgpu.config.capacity = 1 << 30
    assert max(found[2:]) <= COUNT - 0.95 * capacity / unit + 1  # 5 % stay free


def test_the_window_begins_small_for_the_first_step_that_trains():
    model, x = Net(count=COUNT), torch.ones(4, 8, device="simgpu")
    with stream(model, "simgpu", window="auto", transfer="auto") as handle:
        with torch.no_grad():
            model(x), model(x)
        assert handle.room.window == COUNT
        model(x).sum().backward()
        assert handle.room.window == 1
        model(x).sum().backward()
        assert handle.room.window == 4
