"""The machine at hand as a profile, with the simulated accelerator's known rates; what the system says of the host."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
from speeds import measured_again

import sp_lightning.runtime.measure as measuring
from sp_lightning.core import host
from sp_lightning.core.host import host_memory, lock_limit, numa_nodes, peak_memory, usable_cores
from sp_lightning.core.machine import Machine
from sp_lightning.memory.device import Device
from sp_lightning.optim import pieces
from sp_lightning.runtime.measure import (
    Effort,
    measure,
    measure_dram,
    measure_flops,
    measure_link,
    measure_optimizer,
    measure_ways_up,
)

MIB = 2**20


@pytest.mark.seldom
def test_a_measured_machine_is_a_profile_in_which_nothing_is_missing(device):
    machine = measure(device)
    assert isinstance(machine, Machine)
    assert machine.name == "here"
    for name, value in dataclasses.asdict(machine).items():
        assert name == "name" or (name == "fp32_flops_per_s" and value is None) or value > 0, name
    assert 0 < machine.duplex <= 1 and math.isfinite(machine.device_bytes_per_s)
    assert machine.host_nbytes == host_memory().total
    assert machine.host_bytes_per_s >= machine.dram_bytes_per_s  # the CPU's links are its own copies: none is known
    assert math.isinf(machine.host_bytes_per_s) == (torch.device(device).type == "cpu")


@pytest.mark.simgpu
@measured_again
def test_a_link_s_directions_are_told_apart():
    import simgpu

    simgpu.config.h2d_gbps, simgpu.config.d2h_gbps = 0.5, 1
    link = measure_link(Device("simgpu"))
    assert link.up_bytes_per_s == pytest.approx(0.5e9, rel=0.2)
    assert link.down_bytes_per_s == pytest.approx(1e9, rel=0.2)


@pytest.mark.simgpu
@measured_again
@pytest.mark.seldom
def test_directions_that_run_at_once_are_told_from_those_that_take_turns():
    import simgpu

    simgpu.config.h2d_gbps, simgpu.config.d2h_gbps = 0.5, 1
    device = Device("simgpu")
    assert measure_link(device).duplex > 0.8
    device.down = device.up
    assert measure_link(device).duplex < 0.65


@pytest.mark.simgpu
@measured_again
def test_slow_kernels_are_seen():
    import simgpu

    fast = measure_flops(Device("simgpu"), torch.float32)
    simgpu.config.compute_us = 2_000
    assert measure_flops(Device("simgpu"), torch.float32) < fast


@pytest.mark.simgpu
@pytest.mark.seldom
def test_measuring_fits_into_a_small_device():
    import simgpu

    simgpu.config.capacity = 32 * MIB
    measure("simgpu")
    assert torch.accelerator.max_memory_allocated() <= 32 * MIB
    assert torch.accelerator.memory_allocated() == 0


def test_measuring_draws_no_random_numbers_of_the_users():
    before = torch.get_rng_state()
    measure_flops(Device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_speed_is_measured_whatever_device_is_the_default():
    with torch.device("meta"):
        assert measure_flops(Device("cpu"), torch.float32) > 0


def test_the_optimizer_that_is_measured_steps_in_pieces_or_fused(monkeypatch):
    called = []
    for real in (pieces.step_in_pieces, pieces.fuse):
        spy = lambda stepped, real=real: called.append(real.__name__) or real(stepped)  # noqa: E731
        monkeypatch.setattr(f"sp_lightning.runtime.measure.{real.__name__}", spy)
    assert measure_optimizer() > 0 and measure_optimizer(fused=True) > 0
    assert called == ["step_in_pieces", "fuse"]


def test_host_memory_has_a_speed():
    assert measure_dram() > 0


# ---- what the system says


def a_system(root, *, cgroup="0::/mine", **files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("DOT", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def test_memory_is_the_cgroup_s_where_that_is_smaller(tmp_path):
    root = a_system(tmp_path, mine__memoryDOTmax=64 * MIB, mine__memoryDOTcurrent=24 * MIB)
    memory = host_memory(root)
    assert (memory.total, memory.free, memory.limited_by) == (64 * MIB, 40 * MIB, "cgroup")


def test_pages_of_files_are_free(tmp_path):
    stat = f"anon 5\ninactive_file {10 * MIB}\nactive_file {2 * MIB}"
    files = {"mine__memoryDOTmax": 64 * MIB, "mine__memoryDOTcurrent": 24 * MIB, "mine__memoryDOTstat": stat}
    assert host_memory(a_system(tmp_path, **files)).free == 52 * MIB


def test_a_limit_above_the_own_cgroup_counts(tmp_path):
    files = {"mine__memoryDOTmax": "max", "memoryDOTmax": 8 * MIB, "memoryDOTcurrent": MIB}
    assert host_memory(a_system(tmp_path, **files)).total == 8 * MIB


def test_cgroups_of_the_first_version_count(tmp_path):
    files = {"memory__mine__memoryDOTlimit_in_bytes": 16 * MIB, "memory__mine__memoryDOTusage_in_bytes": MIB}
    assert host_memory(a_system(tmp_path, cgroup="5:cpu,memory:/mine", **files)).free == 15 * MIB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_the_machine_s(tmp_path, limit):
    assert host_memory(a_system(tmp_path, mine__memoryDOTmax=limit)).limited_by == "machine"


def test_nodes_of_memory_are_counted_where_this_process_may_run(tmp_path):
    core = min(os.sched_getaffinity(0))
    for index, cores in enumerate((f"{core}-{core + 1}", f"7000,{core}", "7000-7001", "")):
        folder = tmp_path / f"sys/devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes(tmp_path) == 2 and numa_nodes(tmp_path / "nowhere") == 1


def test_a_process_has_a_peak_of_its_own_and_not_that_of_who_started_it():
    """The child loads one small file, this process torch."""
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['peak_memory']())"
    child = subprocess.run([sys.executable, "-c", code, host.__file__], capture_output=True, text=True, check=True)
    assert 1 * MIB < int(child.stdout) < 100 * MIB < peak_memory()


def test_cores_and_locks_are_numbers():
    assert usable_cores() >= 1
    assert lock_limit() is None or lock_limit() >= 0


@pytest.mark.simgpu
@pytest.mark.seldom
def test_ways_up_that_take_turns_are_told_from_one_that_runs_alone():
    import simgpu

    simgpu.config.h2d_gbps = 0.02  # so slow that the copies themselves take no time
    effort = Effort(shortest_s=0.001, patience_s=0.3, largest_nbytes=1 << 20)
    first, second = Device("simgpu"), Device("simgpu")
    assert measure_ways_up([first], effort) > 0.75
    assert measure_ways_up([first, second], effort) < 0.65  # over one link


def test_ways_up_of_the_cpu_are_copies_of_threads():
    assert 0 < measure_ways_up([Device("cpu"), Device("cpu")]) <= 1


def test_products_grow_until_a_fast_device_takes_long_enough_for_them(monkeypatch):
    """An H200 took 0.2 ms for those that 128 MiB hold, most of it for launching: a third of its speed."""
    widths = []

    def mlp(device, dtype, width):
        widths.append(width)
        return width

    speed = 4e14
    seconds = lambda device, width, *effort: 48 * width**3 / speed + 1e-3  # noqa: E731  for launching
    monkeypatch.setattr(measuring, "_mlp", mlp)
    monkeypatch.setattr(measuring, "_probed", seconds)
    monkeypatch.setattr(measuring, "_seconds", seconds)
    device = Device("cpu")
    monkeypatch.setattr(device, "memory", lambda: (140 << 30, 140 << 30))
    assert measure_flops(device, torch.bfloat16) > 0.85 * speed
    monkeypatch.setattr(device, "memory", lambda: (2 << 30, 2 << 30))
    widths.clear()
    measure_flops(device, torch.bfloat16)
    assert 64 * max(widths) ** 2 <= (2 << 30) // 8
