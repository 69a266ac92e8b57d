"""`optimizer_device="device"`: slices go up to be stepped, with the bits of a plain run, and gradients wait there."""

import dataclasses

import pytest
import torch
from often import often
from stream_programs import Net, Program, Run, cases, check, collected, stream
from test_streamed_arithmetic import PROGRAMS as of_the_host
from test_streamed_optimizers import OPTIMIZERS, Odd
from test_streamed_optimizers import program as steps_of

from sp_lightning.errors import UnsupportedError

simgpu = pytest.importorskip("simgpu")
pytestmark = pytest.mark.simgpu

THERE = {"optimizer_device": "device", "chunk": 64}
PROGRAMS = [
    dataclasses.replace(program, options=program.options | {"optimizer_device": "device"})
    for program in of_the_host
    if "resident" not in program.options
]
program = collected(PROGRAMS)


@pytest.fixture(autouse=True)
def short_trips(monkeypatch):
    """Cut weights of a few hundred elements."""
    monkeypatch.setattr("stream_programs.CHUNK", 64)
    monkeypatch.setattr("sp_lightning.optim.places.LONGER", 4)


MORE = {
    "sgd_fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam_capturable": (torch.optim.Adam, {"capturable": True}),
    "muon": (torch.optim.Muon, {}),
}


@pytest.mark.parametrize("name", often([*OPTIMIZERS, *MORE], "adamw_fused", "muon"))
def test_an_optimizer_steps_as_in_the_plain_run(arithmetic, name):
    cls, options = {**OPTIMIZERS, **MORE}[name]
    make = (
        (lambda: torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(6)))) if name == "muon" else Net
    )
    check(Program(steps_of(cls, options), make, options={"optimizer_device": "device"}), "simgpu")


@pytest.mark.parametrize("name", ["adamw_fused", "rmsprop", "sgd_nesterov"])
def test_odd_weights_step_as_in_the_plain_run(arithmetic, name):
    cls, options = OPTIMIZERS[name]
    check(Program(steps_of(cls, options, count=4), lambda: Net(Odd), options={"optimizer_device": "device"}), "simgpu")


@program(Net, optimizer_device="device", wire=torch.bfloat16)
def under_autocast(run, model):
    optimizer = run.noted(torch.optim.AdamW(model.parameters(), 1e-2))

    def step(model, optimizer, i):
        for part in range(2):
            with torch.autocast(run.device.type, torch.bfloat16, cache_enabled=False):
                loss = model(run.x(2 * i + part)).square().mean()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss + norm

    return run.loop(model, step, optimizer)


@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
def test_programs_have_the_devices_bits(arithmetic, program, policy):
    check(program, "simgpu", policy)


def moved(**options):
    """Return the bytes up and down of one clipped step, for each parameter of a unit, and the bytes of gradients."""
    model, run = Net(), Run(torch.device("simgpu", 0), True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with stream(model, "simgpu", window=1, chunk=64, **options) as handle:
        for i in range(2):
            model(run.x(i)).square().mean().backward()
            before = handle.stats()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            handle.finish_step()
            after = handle.stats()
            optimizer.zero_grad()
        count = sum(param.numel() for param in model.blocks.parameters())
        return tuple((after[name] - before[name]) / count for name in ("bytes_up", "bytes_down"))


def test_a_clipped_step_moves_weights_and_state_alone():
    assert moved(optimizer_device="device") == (12, 12)
    assert moved(optimizer_device="host") == (0, 0)


def test_a_weight_sent_in_half_precision_returns_in_both_types():
    up, down = moved(optimizer_device="device", wire=torch.bfloat16)
    assert up == 12 and 13.9 < down < 14


def test_gradients_that_do_not_fit_go_down_with_the_same_bits(arithmetic, monkeypatch):
    monkeypatch.setattr("sp_lightning.host.room.Room.takes", lambda self, nbytes: False)
    for one in PROGRAMS:
        if one.name in ("clipped_by_norm", "accumulated_and_clipped", "under_autocast"):
            check(one, "simgpu")


def test_gradients_stay_as_far_as_they_fit_beside_a_forward():
    model = Net()
    with stream(model, "simgpu", window=1, **THERE) as handle:
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        block = sum(param.nbytes for param in model.blocks[0].parameters())
        whole = torch.accelerator.max_memory_allocated()
        simgpu.config.capacity = int((whole + 3.5 * block) / 0.95)
        model.zero_grad()
        handle.room._beside = 0
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        stays = [one.up.weight.grad.content.raw.device.type == "simgpu" for one in model.blocks]
        assert stays == [False, False, True, True, True]
        model.zero_grad()
        assert not handle.room._kept
    simgpu.config.capacity = 1 << 30


def test_state_is_page_locked():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with stream(model, "simgpu", window=1, **THERE):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        optimizer.step()
        assert all(state["exp_avg"].is_pinned() for state in map(optimizer.state.get, model.blocks.parameters()))


def test_an_optimizer_that_may_look_at_all_weights_is_refused():
    class Own(torch.optim.AdamW):
        pass

    model = Net()
    optimizer = Own(model.parameters())
    with stream(model, "simgpu", window=1, **THERE):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        with pytest.raises(UnsupportedError, match=r"Own is none of them.*optimizer_device='host'"):
            optimizer.step()
