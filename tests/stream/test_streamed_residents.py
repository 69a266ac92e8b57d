"""`resident=`: units that stay on the device and are stepped there, with parameters on the host to the user."""

import pytest
import torch
from often import often
from stream_programs import Net, Program, Run, cases, check, collected, stream
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sp_lightning.errors import UnsupportedError
from sp_lightning.host.device import DeviceMemoryError
from sp_lightning.options import Bytes
from sp_lightning.stream.held import ResidentUnit

PROGRAMS = []
program = collected(PROGRAMS)


@program()
def average_by_a_callback_s_lists(run, model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(model, optimizer, i):
        loss = run.step(model, optimizer, i)
        average.update_parameters(model)
        return loss

    return run.loop(model, step), [value.cpu() for value in average.module.parameters()]


@program()
def read_as_arrays_before_a_second_derivative(run, model):
    def step(model, optimizer, i):
        x = run.x(i).requires_grad_()
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        arrays = [param.detach().cpu().numpy() for param in model.parameters()]
        assert all(array.size for array in arrays)
        return run.train(model(run.x(i)).square().mean() + grad.square().sum(), optimizer)

    return run.loop(model, step)


@program()
def sharpness_aware(run, model):
    def step(model, optimizer, i):
        model(run.x(i)).square().mean().backward()
        before = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.add_(param.grad, alpha=0.05)
        optimizer.zero_grad()
        loss = model(run.x(i)).square().mean()
        loss.backward()
        with torch.no_grad():
            for param, value in zip(model.parameters(), before, strict=True):
                param.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def gradients_projected(run, model):
    def step(model, optimizer, i):
        found = []
        for part in range(2):
            model(run.x(2 * i + part)).square().mean().backward()
            found.append([param.grad.clone() for param in model.parameters()])
            optimizer.zero_grad()
        for param, one, other in zip(model.parameters(), *found, strict=True):
            product = (one * other).sum()
            param.grad = one + other - other * (product / other.square().sum()).clamp(max=0)
        optimizer.step()
        return model(run.x(i)).square().mean()

    return run.loop(model, step)


@program(Net, "keep", "recompute")
def penalised_outside_of_their_modules(run, model):
    def step(model, optimizer, i):
        penalty = sum(p.square().sum() for p in model.parameters())
        return run.train(model(run.x(i)).square().mean() + 1e-3 * penalty, optimizer)

    return run.loop(model, step)


@pytest.mark.parametrize("resident", often([3, 0, 1, 5, Bytes(100_000)]))
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
@pytest.mark.simgpu
def test_any_number_of_residents_has_the_plain_runs_bits(program, policy, resident):
    check(Program(program.do, program.make, options={"resident": resident}), "simgpu", policy)


def residents(model, resident):
    with stream(model, "cpu", window=1, resident=resident) as handle:
        (unit,) = (unit for unit in handle.units if isinstance(unit, ResidentUnit))
        return {
            name.rpartition(".down")[0] for name in (weight.name for weight in unit.weights) if "down.weight" in name
        }


def test_the_first_blocks_are_resident():
    assert residents(Net(), 2) == {"blocks.0", "blocks.1"}


def test_a_tied_weight_s_unit_is_resident_first():
    model = Net()
    model.blocks[3].also = model.blocks[3].up.weight
    assert residents(model, 2) == {"blocks.3", "blocks.0"}


def test_bytes_are_for_gradients_and_state_too():
    model = Net()
    block = sum(param.nbytes for param in model.blocks[0].parameters())
    assert residents(model, Bytes(8 * block)) == {"blocks.0", "blocks.1"}
    model.blocks.requires_grad_(False)
    assert len(residents(model, Bytes(4 * block))) == 4


@pytest.mark.simgpu
def test_a_device_without_room_names_a_number_that_fits():
    import simgpu

    model = Net()
    torch.accelerator.synchronize()
    block = sum(param.nbytes for param in model.blocks[0].parameters())
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 3 * block  # with what is resident anyway
    with pytest.raises(DeviceMemoryError, match=r"4 resident units of .* set resident=2, or fewer"):
        stream(model, "simgpu", window=1, resident=4)
    simgpu.config.capacity = 1 << 30


@pytest.mark.simgpu
def test_resident_units_travel_once_with_state_on_the_device():
    model, run = Net(), Run(torch.device("simgpu", 0), True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with stream(model, "simgpu", window=1, resident=9) as handle:
        up = handle.stats()["bytes_up"]
        for i in range(3):
            model(run.x(i)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        stats = handle.stats()
        assert (stats["bytes_up"] - up, stats["bytes_down"]) == (0, 0)
        assert all(state["exp_avg"].device.type == "simgpu" for state in optimizer.state.values())
        assert all(param.device.type == "cpu" for param in model.parameters())


@pytest.mark.simgpu
def test_residents_refuse_an_optimizer_that_differs_on_the_host(arithmetic):
    model, x = Net(), torch.ones(4, 8, device="simgpu")
    with stream(model, "simgpu", window=1, resident=2):
        model(x).square().mean().backward()
        with pytest.raises(UnsupportedError, match=r"Adagrad.*optimizer_device='device', or resident=0"):
            torch.optim.Adagrad(model.parameters()).step()
        torch.optim.AdamW(model.parameters()).step()
        for param in model.blocks[2:].parameters():
            param.grad = None
        torch.optim.Adagrad(model.parameters()).step()


@pytest.mark.simgpu
def test_a_gradient_of_the_user_s_may_be_written_after_a_step_on_the_device():
    import simgpu

    model = Net()
    want = model.blocks[0].up.weight.detach() - 0.5
    with stream(model, "simgpu", resident=7):
        weight = model.blocks[0].up.weight
        weight.grad = torch.ones(64, 32, pin_memory=True)
        simgpu.config.h2d_us = 50_000
        torch.optim.SGD([weight], lr=0.5).step()
        weight.grad.zero_()
        assert torch.equal(weight, want)
