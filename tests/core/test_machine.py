"""Machines: what their profiles say, and what a user may change of them."""

import pytest

from sp_lightning.core.machine import (
    CORE_DRAM,
    GEN4,
    GEN5,
    GIB,
    MACHINES,
    PROFILES,
    RAIL,
    headroom,
    link_bytes_per_s,
    with_cores,
    with_disk,
    with_link,
    with_network,
)
from sp_lightning.errors import OptionError


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24])
def test_there_are_profiles_for_the_cards_that_people_have(gigabytes):
    found = [machine for machine in PROFILES.values() if machine.device_nbytes == gigabytes * GIB]
    assert len(found) >= 2
    assert gigabytes == 24 or any("laptop" in machine.name for machine in found)


def test_profiles_have_the_names_that_they_are_found_by():
    assert all(name == machine.name for name, machine in PROFILES.items())
    assert MACHINES.keys() < PROFILES.keys()


def test_a_geforce_card_has_the_peaks_of_its_architecture_s_whitepaper():
    """The RTX 3090's 71 and 35.6 TFLOP/s follow from its cores and its clock."""
    assert PROFILES["rtx3090"].flops_per_s / 0.7 == pytest.approx(71e12, rel=0.01)
    assert PROFILES["rtx3090"].fp32_flops_per_s / 0.7 == pytest.approx(35.6e12, rel=0.01)


@pytest.mark.parametrize(
    "host, left", [(64, 6.4), (16, 4), (32, 4), (8, 2), (128, 12.8), (2048, 32)], ids=lambda value: str(value)
)
def test_a_tenth_of_the_host_is_the_system_s_within_limits(host, left):
    assert headroom(host * GIB) == pytest.approx(left * GIB)


def test_few_cores_step_the_optimizer_slower_and_many_do_not_make_it_faster():
    machine = PROFILES["h100"]
    assert with_cores(machine, 2).dram_bytes_per_s == 2 * CORE_DRAM
    assert with_cores(machine, 1000) == machine


@pytest.mark.parametrize(
    "text, rate",
    [("gen4x16", GEN4), ("4x8", GEN4 / 2), ("PCIe 5.0 x8", GEN5 / 2), ("12GB", 12e9), ("12GB/s", 12e9), (3e9, 3e9)],
)
def test_a_link_is_given_by_its_lanes_or_its_rate(text, rate):
    assert link_bytes_per_s(text) == rate
    changed = with_link(PROFILES["rtx4090"], text)
    assert changed.up_bytes_per_s == changed.down_bytes_per_s == rate


@pytest.mark.parametrize("text", ["gen9x16", "gen4x3", "fast", "0", 0, True])
def test_another_link_is_refused(text):
    with pytest.raises(OptionError, match="link must be a PCIe generation and its lanes such as"):
        link_bytes_per_s(text)


@pytest.mark.parametrize("cores", [0, -1, True, 1.5])
def test_another_number_of_cores_is_refused(cores):
    with pytest.raises(OptionError, match="cores must be an int >= 1"):
        with_cores(PROFILES["h100"], cores)


@pytest.mark.parametrize(
    "text, read, written, duplex",
    [("7GB,5GB", 7e9, 5e9, None), ("7 GB/s, 1500MB/s", 7e9, 1.5e9, None), ("3GiB,1GiB,0.5", 3 * 2**30, 2**30, 0.5)],
)
def test_a_disk_has_a_speed_each_way(text, read, written, duplex):
    machine = PROFILES["rtx4090"]
    found = with_disk(machine, text)
    assert (found.disk_bytes_per_s, found.disk_out_bytes_per_s) == (read, written)
    assert found.disk_duplex == (duplex or machine.disk_duplex) and found.up_bytes_per_s == machine.up_bytes_per_s


@pytest.mark.parametrize("text", ["", "7GB", "0,5GB", "7GB,-1", "7GB,5GB,0.4", "7GB,5GB,1.1", "7GB,5GB,x", "1,2,1,1"])
def test_another_speed_of_a_disk_is_refused(text):
    with pytest.raises(OptionError, match='disk_speed must be bytes per second read and written, such as "7GB,5GB"'):
        with_disk(PROFILES["rtx4090"], text)


@pytest.mark.parametrize(
    ("network", "devices", "rate"),
    [
        ("1Gb", 1, 0.9 / 8 * 1e9),
        ("100 Mbit/s", 8, 0.9 / 8 * 1e8),
        ("10Gbps", 8, 0.9 / 8 * 1e10),
        ("100Gb", 1, RAIL),  # the process is the limit, not the line
        ("100Gb", 8, 8 * RAIL),
        ("400Gb", 8, 8 * RAIL),
        ("1.9GB", 1, 1.9e9),  # as measured
        ("1.9 GB/s", 8, 1.9e9),
    ],
)
def test_a_network_is_what_gloo_carries_of_a_line_or_as_measured(network, devices, rate):
    assert with_network(PROFILES["h100"], network, devices).network_bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize("network", ["fast", "10", "0Gb", "0B", "-1Gb", ""])
def test_a_network_that_is_no_speed_is_refused(network):
    with pytest.raises(OptionError, match="network must be the line in bits per second"):
        with_network(PROFILES["h100"], network, 1)
