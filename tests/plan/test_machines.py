"""Machines: what the list says, what a user may change, and how the one at hand is measured."""

import math

import pytest
import torch

from sp_lightning.errors import HostMemoryError, MeasurementError, OptionError
from sp_lightning.host import rates as measuring
from sp_lightning.host.machine import cache_nbytes, host_memory
from sp_lightning.host.rates import measured
from sp_lightning.plan.machines import GIB, MACHINES, machine_named

MIB = 2**20


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24])
def test_cards_of_each_usual_size_are_listed(gigabytes):
    assert sum(machine.device_nbytes == gigabytes * GIB for machine in MACHINES.values()) >= 2


def test_a_geforce_card_has_its_whitepaper_s_peaks():
    assert MACHINES["rtx3090"].flops_per_s / 0.7 == pytest.approx(71e12, rel=0.01)
    assert MACHINES["rtx3090"].fp32_flops_per_s / 0.7 == pytest.approx(35.6e12, rel=0.01)


def test_an_unknown_machine_is_answered_with_the_nearest_name():
    with pytest.raises(OptionError, match="did you mean rtx4090"):
        machine_named("rtx490")


# ---- the machine at hand


@pytest.fixture
def small(monkeypatch):
    """A processor whose cache is so small that measuring takes no time, beside tests that make all rates uneven."""
    monkeypatch.setattr(measuring, "cache_nbytes", lambda: MIB)
    monkeypatch.setattr(measuring, "SHORTEST_S", 0.002)
    monkeypatch.setattr(measuring, "NOISE", math.inf)


def test_a_measured_machine_lacks_no_rate(device, small):
    machine = measured(device, torch.float32)
    for name, value in machine._asdict().items():
        assert value > 0, name
    assert machine.duplex <= 1 and math.isfinite(machine.device_bytes_per_s)
    assert machine.host_bytes_per_s >= machine.cores_bytes_per_s
    assert machine.host_nbytes == host_memory().total


@pytest.mark.simgpu
def test_the_link_s_directions_are_measured_apart(small, monkeypatch):
    import simgpu

    monkeypatch.setattr(measuring, "SHORTEST_S", 0.05)
    simgpu.config.h2d_gbps, simgpu.config.d2h_gbps = 0.25, 1
    machine = measured("simgpu", torch.float32)
    assert 2 < machine.down_bytes_per_s / machine.up_bytes_per_s < 8


@pytest.mark.simgpu
def test_measuring_leaves_nothing_on_the_device(small):
    measured("simgpu", torch.float32)
    assert torch.accelerator.memory_allocated() == 0


def test_arrays_have_four_times_the_cache_s_bytes(small, monkeypatch):
    monkeypatch.setattr(measuring, "cache_nbytes", lambda: 3 * MIB)
    made = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **given: made.append(sizes) or zeros(*sizes, **given))
    measured("cpu", torch.float32)
    assert made[:2] == [(12 * MIB // 8,)] * 2  # elements of two arrays


@pytest.mark.parametrize(("second", "refused"), [(115, False), (116, True), (86, True), (87, False)])
def test_two_rates_that_differ_by_15_percent_are_noisy(second, refused):
    if not refused:
        assert measuring._better("copies", 100.0, second) == max(100, second)
        return
    with pytest.raises(MeasurementError, match=rf"copies reached 100 and then {second} a second.*stop what else runs"):
        measuring._better("copies", 100.0, second)


def test_a_host_without_room_for_the_arrays_is_told_so(monkeypatch):
    monkeypatch.setattr(measuring, "cache_nbytes", lambda: host_memory().free)
    with pytest.raises(HostMemoryError, match=r"measuring takes .* of host memory, but .* are free: free some first"):
        measured("cpu", torch.float32)


def test_measuring_draws_none_of_the_user_s_random_numbers(small):
    before = torch.get_rng_state()
    measured("cpu", torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_caches_that_cores_share_count_once(tmp_path):
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        index = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index3"
        index.mkdir(parents=True)
        (index / "size").write_text("8192K\n")
        (index / "shared_cpu_list").write_text(f"{shared}\n")
    assert cache_nbytes(tmp_path) == 16 * MIB
    assert cache_nbytes(tmp_path / "nowhere") == 64 * MIB
