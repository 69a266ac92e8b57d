"""Steps on the host with the device's arithmetic: a simulated device that rounds as CUDA does is the plain run."""

import logging

import pytest
import rounding
import torch
from often import often
from stream_programs import Net, Program, Run, cases, check, collected, streamed
from test_streamed_optimizers import program as steps_of

from sp_lightning.optim import compiled
from sp_lightning.stream.host_gradient import HostGradient
from sp_lightning.stream.unit import Unit

PROGRAMS = []
program = collected(PROGRAMS)
pytestmark = pytest.mark.simgpu


@pytest.fixture
def stepped(monkeypatch):
    """Count the weights that compiled code stepped, and those that it left."""
    counts = {"compiled": 0, "left": 0}
    whole = compiled.step

    def step(loops, work, scale, state):
        left = whole(loops, work, scale, state)
        counts["left"] += len(left)
        counts["compiled"] += len(work) - len(left)
        return left

    monkeypatch.setattr("sp_lightning.optim.slices.step_compiled", step)
    return counts


KINDS = {"lists": {}, "fused": {"fused": True}}
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "adam_with_decay": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adam_amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "sgd": (torch.optim.SGD, {}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd_nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", often(OPTIMIZERS))
def test_steps_have_the_devices_bits(arithmetic, stepped, name, kind):
    cls, options = OPTIMIZERS[name]
    check(Program(steps_of(cls, {**options, **KINDS[kind]})), "simgpu")
    assert stepped["compiled"] and not stepped["left"]


@program()
def schedules_change_rates_and_betas(run, model):
    optimizer = run.noted(torch.optim.AdamW(model.parameters(), 1e-2))

    def step(model, optimizer, i):
        group = optimizer.param_groups[0]
        group["lr"], group["betas"] = 1e-2 / (i + 1), (0.9 - 0.01 * i, 0.99 - 0.01 * i)
        return run.step(model, optimizer, i)

    return run.loop(model, step, optimizer)


@program(Net, "keep", "recompute")
def clipped_by_norm(run, model):
    optimizer = run.noted(torch.optim.AdamW(model.parameters(), 1e-2))

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss + norm

    return run.loop(model, step, optimizer)


@program(Net, "keep", "offload")
def accumulated_and_clipped(run, model):
    optimizer = run.noted(torch.optim.AdamW(model.parameters(), 1e-2))

    def step(model, optimizer, i):
        for part in range(3):
            loss = model(run.x(3 * i + part)).square().mean() / 3
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss + norm

    return run.loop(model, step, optimizer)


@program(Net, resident=2)
def some_units_are_resident(run, model):
    return run.loop(model, optimizer=run.noted(torch.optim.AdamW(model.parameters(), 1e-2)))


@program()
def scaled_for_a_fused_optimizer(run, model):
    optimizer = run.noted(torch.optim.AdamW(model.parameters(), 1e-2, fused=True))
    scaler, seen = torch.amp.GradScaler(run.device.type, init_scale=3000.0, growth_interval=2), []
    for i in range(5):
        loss = model(run.x(i) * (float("inf") if i == 2 else 1)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [model.blocks[1].up.weight.grad.clone(), torch.tensor(scaler.get_scale())]
        optimizer.zero_grad()
    return seen


@program()
def state_is_loaded_half_way(run, model):
    first = torch.optim.AdamW(model.parameters(), 1e-2)
    seen = [run.step(model, first, i) for i in range(2)]
    second = run.noted(torch.optim.AdamW(model.parameters(), 1e-2))
    second.load_state_dict(first.state_dict())
    return seen + [run.step(model, second, i) for i in range(3)]


@program(Net, resident=2)
def state_of_residents_is_loaded(run, model):
    first = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    seen = [run.step(model, first, i) for i in range(2)]
    second = run.noted(torch.optim.AdamW(model.parameters(), 1e-2, fused=True))
    second.load_state_dict(first.state_dict())
    return seen + [run.step(model, second, i) for i in range(3)]


@program(Net, resident=1)
def groups_with_and_without_decay(run, model):
    groups = [
        {"params": [param for param in model.parameters() if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in model.parameters() if param.ndim == 1], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return run.loop(model, optimizer=run.noted(torch.optim.AdamW(groups, 1e-2)))


@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
def test_programs_have_the_devices_bits(arithmetic, stepped, program, policy):
    check(program, "simgpu", policy)
    assert stepped["compiled"]


def test_comparisons_are_of_kinds_and_not_of_numbers(arithmetic, monkeypatch):
    compared, whole = [], compiled._compare
    monkeypatch.setattr(compiled, "_compare", lambda *kind: compared.append(kind) or whole(*kind))
    schedules = next(one for one in PROGRAMS if one.name == "schedules_change_rates_and_betas")
    check(schedules, "simgpu")
    assert len(compared) == 1


def test_other_bits_are_left_to_torch_and_said_once(stepped, caplog):
    """Without CUDA's arithmetic the simulated device has that of torch's operators on the CPU."""
    compiled._is_same.cache_clear()
    compiled.say_torch_steps.cache_clear()
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        check(next(one for one in PROGRAMS if one.name == "groups_with_and_without_decay"), "simgpu")
    compiled._is_same.cache_clear()
    assert not stepped["compiled"]
    (said,) = [record.getMessage() for record in caplog.records if "torch's own operators" in record.getMessage()]
    assert "AdamW" in said and "simgpu" in said


def test_the_cpu_as_device_has_the_cpu_s_arithmetic(stepped):
    check(next(one for one in PROGRAMS if one.name == "clipped_by_norm"), "cpu")
    assert not stepped["compiled"]


def test_gradients_in_half_precision_are_stepped_as_they_came(arithmetic, stepped):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with streamed(model, "simgpu", wire=torch.bfloat16):
        with torch.autocast("simgpu", torch.bfloat16, cache_enabled=False):
            loss = model(Run(torch.device("simgpu", 0), True).x(0)).square().mean()
        loss.backward()
        grad = model.blocks[2].up.weight.grad
        assert type(grad) is HostGradient
        optimizer.step()
        model(Run(torch.device("simgpu", 0), True).x(0))
        assert grad.content.raw.dtype is torch.bfloat16 and not grad.content.is_full
    assert stepped["compiled"] and not stepped["left"]


def clipped_in_half_precision(run, model):
    """Multiply gradients by a number in FP32, which the device rounds to their type first."""

    def step(model, optimizer, i):
        loss = model(run.x(i).bfloat16()).square().mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm.float())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step, run.noted(torch.optim.SGD(model.parameters(), 0.1, foreach=False)))


def rounded_first(gradients, factor):
    torch._foreach_copy_(gradients, [gradient * float(factor.to(gradient.dtype)) for gradient in gradients])


@pytest.mark.parametrize("options", [{}, {"resident": 2}])
def test_a_number_that_clips_has_the_devices_rounding(options):
    one = {"mul_.Tensor": lambda gradient, factor: gradient * float(factor.to(gradient.dtype))}
    with rounding.replaced({**one, "_foreach_mul_.Tensor": rounded_first}):
        check(Program(clipped_in_half_precision, lambda: Net().bfloat16(), options=options), "simgpu")


def test_copies_in_another_type_are_made_anew_for_writes_alone(monkeypatch):
    made, cast = [], Unit._cast
    monkeypatch.setattr(Unit, "_cast", lambda unit: made.append(unit.index) or cast(unit))
    model = Net()
    with streamed(model, "cpu", wire=torch.bfloat16) as handle:
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                model(torch.ones(4, 8)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.finish_step()

        step()
        made.clear()
        for _ in range(3):
            step()
            assert all(param.isfinite().all() for param in model.parameters())
        assert not made
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
        step()
        assert len(made) == 1
