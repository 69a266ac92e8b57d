"""Machines: what the list says, what a user may change, and how the one at hand is measured."""

import dataclasses
import math

import pytest
import torch

from sp_lightning.core.host import cache_nbytes, host_memory
from sp_lightning.errors import HostMemoryError, MeasurementError, OptionError
from sp_lightning.plan import measure as measuring
from sp_lightning.plan.machines import CORE, GEN4, GEN5, GIB, MACHINES, RAIL, changed, machine_named
from sp_lightning.plan.measure import here

MIB = 2**20
CARD = MACHINES["rtx4090"]


@pytest.mark.quick
@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24])
def test_cards_of_each_usual_size_are_listed(gigabytes):
    assert sum(machine.device_nbytes == gigabytes * GIB for machine in MACHINES.values()) >= 2


@pytest.mark.quick
def test_a_geforce_card_has_its_whitepaper_s_peaks():
    assert MACHINES["rtx3090"].flops_per_s / 0.7 == pytest.approx(71e12, rel=0.01)
    assert MACHINES["rtx3090"].fp32_flops_per_s / 0.7 == pytest.approx(35.6e12, rel=0.01)


@pytest.mark.quick
def test_an_unknown_machine_is_answered_with_the_nearest_name():
    with pytest.raises(OptionError, match="did you mean rtx4090"):
        machine_named("rtx490")


@pytest.mark.quick
def test_few_cores_move_less_than_the_memory_channels():
    assert changed(CARD, cores=2).cores_bytes_per_s == 2 * CORE
    assert changed(CARD, cores=1000) == CARD


@pytest.mark.quick
@pytest.mark.parametrize(
    "text, rate",
    [("gen4x16", GEN4), ("4x8", GEN4 / 2), ("PCIe 5.0 x8", GEN5 / 2), ("12GB", 12e9), ("12GB/s", 12e9), (3e9, 3e9)],
)
def test_a_link_is_given_by_its_lanes_or_its_rate(text, rate):
    found = changed(CARD, link=text)
    assert found.up_bytes_per_s == found.down_bytes_per_s == rate


@pytest.mark.quick
@pytest.mark.parametrize(
    "text, rates",
    [("7GB,5GB", (7e9, 5e9, 0.75)), ("7 GB/s, 1500MB/s", (7e9, 1.5e9, 0.75)), ("3GiB,1GiB,0.5", (3 * GIB, GIB, 0.5))],
)
def test_a_disk_has_a_speed_each_way(text, rates):
    found = changed(CARD, disk_speed=text)
    assert (found.disk_bytes_per_s, found.disk_out_bytes_per_s, found.disk_duplex) == rates


@pytest.mark.quick
@pytest.mark.parametrize(
    ("network", "devices", "rate"),
    [
        ("1Gb", 1, 0.9 / 8 * 1e9),
        ("100 Mbit/s", 8, 0.9 / 8 * 1e8),
        ("100Gb", 1, RAIL),  # the process is the limit, not the line
        ("100Gb", 8, 8 * RAIL),
        ("1.9 GB/s", 8, 1.9e9),  # as measured
    ],
)
def test_a_network_is_a_line_or_what_was_measured(network, devices, rate):
    assert changed(CARD, network=network, devices=devices).network_bytes_per_s == pytest.approx(rate)


@pytest.mark.quick
def test_memory_of_device_and_host_can_be_changed():
    found = changed(CARD, device_memory=12 * GIB, host_memory=32 * GIB)
    assert (found.device_nbytes, found.host_nbytes) == (12 * GIB, 32 * GIB)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("link", value) for value in ("gen9x16", "gen4x3", "fast", "12", "0", 0, True)),
        *(("cores", value) for value in (0, -1, True, 1.5)),
        *(("disk_speed", value) for value in ("", "7GB", "0,5GB", "7GB,-1", "7GB,5GB,0.4", "7GB,5GB,x", "1,2,1,1")),
        *(("network", value) for value in ("fast", "10", "0Gb", "0B", "-1Gb", "")),
    ],
)
def test_what_is_no_such_value_is_refused(argument, value):
    with pytest.raises(OptionError, match=f"{argument} must be ") as refused:
        changed(CARD, **{argument: value})
    assert refused.value.argument == argument


# ---- the machine at hand


@pytest.fixture
def small(monkeypatch):
    """A processor whose cache is so small that measuring takes no time, beside tests that make all rates uneven."""
    monkeypatch.setattr(measuring, "cache_nbytes", lambda: MIB)
    monkeypatch.setattr(measuring, "SHORTEST_S", 0.002)
    monkeypatch.setattr(measuring, "NOISE", math.inf)


def test_a_measured_machine_lacks_no_rate(device, small):
    machine = here(device, torch.float32)
    for name, value in dataclasses.asdict(machine).items():
        assert name in ("name", "fp32_flops_per_s") or value > 0, name
    assert machine.duplex <= 1 and math.isfinite(machine.device_bytes_per_s)
    assert machine.host_bytes_per_s >= machine.cores_bytes_per_s
    assert machine.host_nbytes == host_memory().total


@pytest.mark.simgpu
def test_the_link_s_directions_are_measured_apart(small, monkeypatch):
    import simgpu

    monkeypatch.setattr(measuring, "SHORTEST_S", 0.05)
    simgpu.config.h2d_gbps, simgpu.config.d2h_gbps = 0.25, 1
    machine = here("simgpu", torch.float32)
    assert 2 < machine.down_bytes_per_s / machine.up_bytes_per_s < 8


@pytest.mark.simgpu
def test_measuring_leaves_nothing_on_the_device(small):
    here("simgpu", torch.float32)
    assert torch.accelerator.memory_allocated() == 0


def test_arrays_have_four_times_the_cache_s_bytes(small, monkeypatch):
    monkeypatch.setattr(measuring, "cache_nbytes", lambda: 3 * MIB)
    made = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **given: made.append(sizes) or zeros(*sizes, **given))
    here("cpu", torch.float32)
    assert made[:2] == [(12 * MIB // 8,)] * 2  # elements of two arrays


@pytest.mark.quick
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
        here("cpu", torch.float32)


def test_measuring_draws_none_of_the_user_s_random_numbers(small):
    before = torch.get_rng_state()
    here("cpu", torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.quick
def test_caches_that_cores_share_count_once(tmp_path):
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        index = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index3"
        index.mkdir(parents=True)
        (index / "size").write_text("8192K\n")
        (index / "shared_cpu_list").write_text(f"{shared}\n")
    assert cache_nbytes(tmp_path) == 16 * MIB
    assert cache_nbytes(tmp_path / "nowhere") == 64 * MIB
