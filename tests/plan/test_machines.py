"""Machines: what the list says, what a user may change, and how the one at hand is measured."""

import math

import pytest
import torch

from sp_lightning.errors import MeasurementError, OptionError
from sp_lightning.host import rates as measuring
from sp_lightning.host.machine import host_memory
from sp_lightning.host.rates import measured
from sp_lightning.plan import plan
from sp_lightning.plan.machines import GIB, MACHINES, Machine

MIB = 2**20


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24])
def test_cards_of_each_usual_size_are_listed(gigabytes):
    assert sum(machine.device_nbytes == gigabytes * GIB for machine in MACHINES.values()) >= 2


def test_a_geforce_card_has_its_whitepaper_s_peaks():
    assert MACHINES["rtx3090"].flops_per_s / 0.7 == pytest.approx(71e12, rel=0.01)
    assert MACHINES["rtx3090"].fp32_flops_per_s / 0.7 == pytest.approx(35.6e12, rel=0.01)


def test_an_unknown_machine_is_answered_with_the_nearest_name():
    with pytest.raises(OptionError, match="did you mean rtx4090"):
        plan(torch.nn.Linear(2, 2), torch.ones(1, 2), machine="rtx490")


# ---- the machine at hand


@pytest.fixture
def small(monkeypatch):
    """Arrays so small that measuring takes no time, beside tests that make all rates uneven."""
    monkeypatch.setattr(measuring, "ARRAYS", 4 * MIB)
    monkeypatch.setattr(measuring, "SHORTEST_S", 0.002)
    monkeypatch.setattr(measuring, "NOISE", math.inf)


def test_a_measured_machine_lacks_no_rate(device, small):
    machine = measured(device, torch.float32)
    assert min(machine.values()) > 0 and machine["duplex"] <= 1 and math.isfinite(machine["device_bytes_per_s"])
    assert machine["host_bytes_per_s"] >= machine["cores_bytes_per_s"]
    assert machine["host_nbytes"] == host_memory().total
    assert Machine(name="here", **machine).name == "here"


@pytest.mark.simgpu
def test_the_link_s_directions_are_measured_apart(small, monkeypatch):
    import simgpu

    monkeypatch.setattr(measuring, "SHORTEST_S", 0.05)
    simgpu.config.h2d_gbps, simgpu.config.d2h_gbps = 0.25, 1
    machine = measured("simgpu", torch.float32)
    assert 2 < machine["down_bytes_per_s"] / machine["up_bytes_per_s"] < 8


@pytest.mark.simgpu
def test_measuring_leaves_nothing_on_the_device(small):
    measured("simgpu", torch.float32)
    assert torch.accelerator.memory_allocated() == 0


@pytest.mark.parametrize(("second", "refused"), [(115, False), (116, True), (86, True), (87, False)])
def test_two_rates_that_differ_by_15_percent_are_noisy(second, refused):
    rate = iter((100.0, second)).__next__
    if not refused:
        assert measuring._twice("copies", rate) == max(100, second)
        return
    with pytest.raises(MeasurementError, match=rf"copies reached 100 and then {second} a second.*stop what else runs"):
        measuring._twice("copies", rate)


def test_measuring_draws_none_of_the_user_s_random_numbers(small):
    before = torch.get_rng_state()
    measured("cpu", torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
