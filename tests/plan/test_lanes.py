"""The time of a step by lanes, in numbers small enough to check by hand."""

import random
from dataclasses import replace

import pytest

from sp_lightning.plan.lanes import (
    COMPUTE,
    CORES,
    DOWN,
    NETWORK,
    READ,
    UP,
    WRITE,
    Bytes,
    Run,
    StepCost,
    UnitWork,
    step_cost,
    step_time,
)
from sp_lightning.plan.machines import MACHINES, Machine, Reached

pytestmark = pytest.mark.quick

# One FLOP and one byte of device memory take a second each; other rates are bytes per second, too.
MACHINE = Machine(
    name="slow",
    flops_per_s=1,
    fp32_flops_per_s=0.5,
    device_bytes_per_s=1,
    up_bytes_per_s=10,
    down_bytes_per_s=10,
    duplex=0.5,
    host_bytes_per_s=1000,
    cores_bytes_per_s=100,
    device_nbytes=1,
    host_nbytes=1,
    disk_bytes_per_s=5,
    disk_out_bytes_per_s=4,
    disk_duplex=1,
    network_bytes_per_s=2,
    mesh_bytes_per_s=8,
)
EXACT = Reached(matrix=1, step=1, down_cost=1, one_core=20)
FREE = StepCost()


def seconds(units, machine=MACHINE, **run):
    return timed(units, machine, **run).seconds


def timed(units, machine=MACHINE, **run):
    return step_time(units, machine, Run(**{"cost": FREE, "window": 2, **run}), EXACT)


def blocks(count, **work):
    return [UnitWork(name=f"block {index}", **work) for index in range(count)]


# ---- compute


def test_products_and_what_memory_binds_add_up():
    unit = UnitWork(name="a", forward_flops=3, forward_fp32_flops=1, forward_moved=4, mesh_nbytes=8, resident=True)
    assert seconds([unit], inference=True) == pytest.approx(3 + 1 / 0.5 + 4 + 8 / 8)


def test_products_reach_a_share_of_the_machine_s_rate():
    unit = UnitWork(name="a", forward_flops=3, forward_moved=4, resident=True)
    run = Run(cost=FREE, window=1, inference=True)
    assert step_time([unit], MACHINE, run, replace(EXACT, matrix=0.5)).seconds == pytest.approx(3 / 0.5 + 4)


def test_a_backward_follows_a_forward():
    assert seconds(blocks(3, forward_flops=1, backward_flops=2, resident=True)) == pytest.approx(9)


# ---- copies


def test_a_forward_behind_the_link_takes_the_link_s_time():
    found = timed(blocks(6, forward_flops=1, up_nbytes=20), inference=True)
    assert found.seconds == pytest.approx(6 * 2)
    assert found.bound_by == UP and found.lanes == pytest.approx({COMPUTE: 6, UP: 12})


@pytest.mark.parametrize(("window", "loads"), [(2, 6), (3, 4.5), (4, 3), (5, 1.5), (6, 0)])
def test_a_larger_window_moves_only_the_excess(window, loads):
    """Two places are for the unit that computes and the next one; what is in the others stays."""
    lanes = timed(blocks(6, up_nbytes=20, forward_flops=1), inference=True, window=window).lanes
    assert lanes.get(UP, 0) == pytest.approx(2 * loads)


def test_a_window_of_one_computes_and_copies_in_turns():
    work = blocks(4, forward_flops=1, up_nbytes=20)
    assert seconds(work, inference=True, window=1) == pytest.approx(4 * 3)
    assert seconds(work, inference=True, window=3, transfer=3) == pytest.approx(4 * 3)


def test_both_directions_at_once_have_the_duplex_share():
    """Forward has loads alone; in backward each takes twice as long, beside gradients of as many bytes."""
    work = blocks(20, up_nbytes=40, down_nbytes=40, trained=1)
    assert seconds(work, replace(MACHINE, duplex=1)) == pytest.approx(20 * 4 + 20 * 4, rel=0.08)
    assert seconds(work) == pytest.approx(20 * 4 + 20 * 8, rel=0.08)


def test_kept_activations_go_down_and_come_up():
    work = blocks(5, forward_flops=9, backward_flops=9, kept_nbytes=30, resident=True)
    lanes = timed(work, replace(MACHINE, duplex=1)).lanes
    assert lanes == pytest.approx({COMPUTE: 90, DOWN: 15, UP: 15})


def test_weights_are_read_from_files_as_fast_as_the_disk():
    assert seconds(blocks(6, up_nbytes=20, file_nbytes=20), inference=True) == pytest.approx(6 * 20 / 5)


# ---- the step on the host


def test_cores_get_what_copies_leave_of_the_host_s_memory():
    """Of 60 bytes a second 50 are left beside loads at 10, and all 60 alone, of which cores can use 55."""
    cost = StepCost(later=Bytes(0, 1100))
    machine = replace(MACHINE, host_bytes_per_s=60, cores_bytes_per_s=55)
    alone = UnitWork(name="a", trained=1, resident=False)
    assert timed([alone], machine, cost=cost).lanes[CORES] == pytest.approx(1100 / 55)
    beside = replace(alone, up_nbytes=500, name="b", trained=0)  # its loads take 50 seconds
    other = replace(beside, name="c")
    assert timed([alone, beside, other], machine, cost=cost).lanes[CORES] == pytest.approx(1100 / 50)


def test_steps_run_beside_backward_unless_they_are_clipped():
    work = blocks(10, forward_flops=1, backward_flops=10, up_nbytes=1, down_nbytes=1, trained=1)
    cost = StepCost(stepped=Bytes(0, 900))
    beside, clipped = seconds(work, cost=cost), seconds(work, cost=cost, clip=True)
    assert 110 < beside < 130 and clipped > 110 + 10 * 9 - 10


def test_a_norm_on_one_core_holds_everything_up():
    work = blocks(4, forward_flops=1, backward_flops=1, trained=10, up_nbytes=1, down_nbytes=1)
    without = seconds(work, clip=True)
    cost = StepCost(norm=Bytes(0, 5), norm_by_one=Bytes(0, 4), scaled=Bytes(0, 8))
    assert seconds(work, clip=True, cost=cost) - without == pytest.approx(40 * 4 / 20 + 40 * (5 + 8) / 100)
    assert seconds(work, cost=cost) == pytest.approx(seconds(work))  # nothing of it where nothing is clipped


def test_what_is_stepped_later_does_not_hold_up_the_next_forward():
    work = blocks(10, forward_flops=10, backward_flops=40, up_nbytes=1, down_nbytes=1, trained=1)
    whole = seconds(work, clip=True, cost=StepCost(stepped=Bytes(0, 2800)))
    wires = seconds(work, clip=True, cost=StepCost(stepped=Bytes(0, 1600), later=Bytes(0, 2600)))
    assert wires == pytest.approx(whole - 10 * 12, rel=0.02)


def test_overlap_decides_how_far_steps_run_beside_compute():
    work = blocks(8, forward_flops=3, backward_flops=3, up_nbytes=1, down_nbytes=1, trained=1)
    cost = StepCost(stepped=Bytes(0, 600))
    none, backward, forward = (seconds(work, cost=cost, overlap=how) for how in ("none", "backward", "forward"))
    assert none == pytest.approx(8 * (3 + 3 + 6), rel=0.02)
    assert forward < backward < none


def test_added_gradients_cost_a_pass_after_each_backward():
    work = blocks(4, forward_flops=1, backward_flops=1, up_nbytes=1, down_nbytes=1, trained=10)
    once = seconds(work)
    cost = StepCost(added=Bytes(0, 18))
    assert seconds(work, accumulate=3, cost=cost, clip=True) > 3 * once + 3 * 40 * 18 / 100 - 2


def test_a_fused_step_moves_twice_what_the_loop_s_does():
    loop, fused = step_cost(2), step_cost(2, fused=True)
    half = [sum(getattr(cost, name).half for name in ("landed", "norm", "scaled", "stepped")) for cost in (loop, fused)]
    assert half == [30, 52]


@pytest.mark.parametrize(("states", "step"), [(2, 28), (1, 20), (0, 12)])
def test_a_step_reads_and_writes_each_state(states, step):
    assert step_cost(states).stepped == Bytes(step, step) and step_cost(states).on_device == step


def test_several_devices_share_the_host_s_memory():
    work = blocks(8, forward_flops=1, backward_flops=1, up_nbytes=50, down_nbytes=50, trained=1)
    tight = replace(MACHINE, host_bytes_per_s=20, duplex=1)
    assert seconds(work, tight, ranks=4) > 3 * seconds(work, tight)


# ---- the step on the device, the disk and the network


def test_a_resident_unit_is_stepped_on_the_device():
    cost = StepCost(stepped=Bytes(0, 1e9), on_device=7)
    found = timed(blocks(3, forward_flops=1, backward_flops=2, trained=2, down_nbytes=8, resident=True), cost=cost)
    assert found.lanes == pytest.approx({COMPUTE: 3 * (1 + 2 + 2 * 7)})


def test_a_step_on_the_device_moves_its_state_both_ways():
    cost = StepCost(on_device=1, up=16, down=12, norm_up=4)
    work = blocks(3, forward_flops=9, backward_flops=9, trained=10, up_nbytes=20, down_nbytes=20)
    plain, clipped = (
        timed(work, replace(MACHINE, duplex=1), cost=cost, optimizer_device="device", clip=c) for c in (0, 1)
    )
    assert clipped.lanes[UP] - plain.lanes[UP] == pytest.approx(30 * 4 / 10)
    assert plain.lanes[DOWN] == pytest.approx(3 * (20 + 10 * 12) / 10)


def test_state_on_the_disk_is_read_and_written_each_step():
    work = blocks(4, trained=1, up_nbytes=1, down_nbytes=1, state_read_nbytes=50, state_written_nbytes=40)
    found = timed(work)
    assert found.lanes[READ] == pytest.approx(40) and found.lanes[WRITE] == pytest.approx(40)
    assert found.bound_by in (READ, WRITE)


def test_activations_on_the_disk_are_written_and_read():
    lanes = timed(blocks(4, forward_flops=99, backward_flops=99, resident=True, kept_nbytes=20, kept_on_disk=20)).lanes
    assert (lanes[WRITE], lanes[READ]) == pytest.approx((4 * 20 / 4, 4 * 20 / 5))


def test_sums_of_several_hosts_cross_the_network():
    work = blocks(4, trained=1, up_nbytes=1, down_nbytes=1, sums_nbytes=20, weights_nbytes=10)
    assert timed(work).lanes[NETWORK] == pytest.approx(4 * 30 / 2)


# ---- the first and last unit


def test_a_tied_table_is_complete_last_and_needed_first():
    """Its gradient comes down, is stepped and goes up again with nothing beside it."""
    table = UnitWork(name="table", trained=10, up_nbytes=40, down_nbytes=40)
    head = replace(table, forward_flops=5, backward_flops=10)
    inner = blocks(6, forward_flops=5, backward_flops=10, trained=10, up_nbytes=5, down_nbytes=5)
    found = seconds([table, *inner, head], cost=StepCost(stepped=Bytes(0, 28)))
    assert found == pytest.approx(7 * 15 + 4 + 10 * 28 / 100 + 4, rel=0.02)


def test_a_unit_that_is_used_twice_is_stepped_once():
    table = UnitWork(name="table", trained=10, up_nbytes=1, down_nbytes=1)
    lanes = timed([table, *blocks(3), table], cost=StepCost(stepped=Bytes(0, 28))).lanes
    assert lanes[CORES] == pytest.approx(2.8) and lanes[DOWN] == pytest.approx(0.1, rel=0.01)


def test_frozen_units_send_nothing_down():
    assert DOWN not in timed(blocks(4, forward_flops=1, backward_flops=2, up_nbytes=10)).lanes


# ---- any step


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_shorter_than_its_busiest_lane(seed):
    draw = random.Random(seed)
    units = [
        UnitWork(
            name=f"unit {index % draw.choice((3, 9))}",
            trained=(trained := draw.choice((0, 10**8))),
            cast=trained // draw.choice((1, 2)),
            forward_flops=draw.uniform(0, 1e12),
            backward_flops=draw.uniform(0, 2e12),
            up_nbytes=2 * 10**8,
            down_nbytes=2 * trained,
            kept_nbytes=draw.choice((0, 10**8)),
            resident=draw.random() < 0.2,
            state_read_nbytes=draw.choice((0, 10**8)) if trained else 0,
        )
        for index in range(9)
    ]
    run = Run(
        cost=step_cost(2, fused=draw.random() < 0.5),
        window=draw.randint(1, 6),
        clip=draw.random() < 0.5,
        accumulate=draw.randint(1, 3),
        overlap=draw.choice(("none", "backward", "forward")),
        optimizer_device=draw.choice(("host", "device")),
        ranks=draw.choice((1, 4)),
    )
    found = step_time(units, MACHINES[draw.choice(("rtx4090", "h200", "rtx3060"))], run)
    assert max(found.lanes.values()) <= found.seconds * (1 + 1e-9)
    assert found.lanes[found.bound_by] == max(found.lanes.values())
