"""The time of a step by lanes, in numbers small enough to check by hand."""

import random
from dataclasses import replace

import pytest

from sp_lightning.plan.machines import (
    COMPUTE,
    CORES,
    DOWN,
    MACHINES,
    NETWORK,
    READ,
    UP,
    WRITE,
    Machine,
    Reached,
    Work,
    step_cost,
    step_time,
)

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
)
EXACT = Reached(matrix=1, step=1, down_cost=1)
NONE = Work()


def timed(forward=NONE, backward=NONE, step=NONE, first=NONE, first_step=NONE, machine=MACHINE, reached=EXACT, **run):
    return step_time(forward, backward, step, first, first_step, machine, reached=reached, **run)


def seconds(*works, **given):
    return timed(*works, **given)[0]


def test_products_and_what_memory_binds_add_up():
    assert seconds(Work(flops=3, fp32_flops=1, moved=4)) == pytest.approx(3 + 1 / 0.5 + 4)


def test_products_reach_a_share_of_the_machine_s_rate():
    assert seconds(Work(flops=3, moved=4), reached=replace(EXACT, matrix=0.5)) == pytest.approx(3 / 0.5 + 4)


def test_a_forward_behind_the_link_takes_the_link_s_time():
    taken, lanes = timed(Work(flops=6, up=120))
    assert taken == 12 and (lanes[COMPUTE], lanes[UP]) == (6, 12)


def test_one_unit_at_a_time_computes_and_copies_in_turns():
    assert seconds(Work(flops=4, up=80), alone=True) == 4 + 8


def test_both_directions_at_once_have_the_duplex_share():
    """Of 8 seconds up and 4 down, 4 have both, at half the rate each."""
    assert seconds(NONE, Work(up=80, down=40)) == 4 / 0.5 + 4
    assert seconds(NONE, Work(up=80, down=40), machine=replace(MACHINE, duplex=1)) == 8


def test_weights_are_read_from_files_as_fast_as_the_disk():
    assert seconds(Work(up=120, read=120)) == 120 / 5


# ---- the step on the host


def test_cores_get_what_copies_leave_of_the_host_s_memory():
    machine, step = replace(MACHINE, host_bytes_per_s=60, cores_bytes_per_s=55), Work(cores=1100)
    assert seconds(step=step, machine=machine) == pytest.approx(1100 / 55)
    assert seconds(Work(up=220), step=step, machine=machine) == pytest.approx((1100 + 220) / 60)


def test_steps_run_beside_backward_unless_they_are_clipped():
    works = Work(flops=10), Work(flops=100), Work(cores=9000)
    assert seconds(*works) == 110
    assert seconds(*works, clip=True) == 100 + 90  # beside the next forward alone


def test_without_overlap_steps_come_after_backward():
    works = Work(flops=10), Work(flops=10), Work(cores=600)
    assert seconds(*works, overlaps=False) == 20 + 6 > seconds(*works) == 20


def test_the_first_unit_is_stepped_with_nothing_beside_it():
    """Its gradient comes down last; it is stepped, and goes up again."""
    works = {"forward": Work(flops=35), "backward": Work(flops=70), "first": Work(up=40, down=40)}
    assert seconds(**works, first_step=Work(cores=280)) == pytest.approx(105 + 4 + 2.8 + 4)


def test_sums_run_beside_backward_and_norms_run_on_the_device():
    works = Work(flops=4), Work(flops=4, cores=600)
    assert seconds(*works, accumulate=3) == pytest.approx(3 * (4 + 600 / 100))
    assert seconds(*works, accumulate=3, clip=True, summed=50) == pytest.approx(30 + 50 / 10)


def test_the_first_unit_comes_with_each_batch_and_is_stepped_once():
    assert seconds(first=Work(down=20, cores=100), first_step=Work(cores=300), accumulate=2) == 2 * (2 + 1) + 3


@pytest.mark.parametrize(("states", "step"), [(2, 28), (1, 20), (0, 12)])
def test_a_step_reads_and_writes_each_state(states, step):
    assert step_cost(10, states) == Work(cores=10 * step)
    assert step_cost(10, states, on_device=True).moved == 10 * step


def test_several_devices_share_the_host_s_memory():
    tight = replace(MACHINE, host_bytes_per_s=20, duplex=1)
    assert seconds(NONE, Work(up=50), machine=tight, ranks=4) == 4 * 50 / 20
    assert seconds(NONE, Work(down=50), machine=tight, ranks=4) == 4 * 2 * 50 / 20  # sums read each once more
    assert timed(backward=Work(up=50), machine=tight, ranks=4)[1][CORES] == 4 * 50 / 20


# ---- the step on the device, the disk and the network


def test_a_step_on_the_device_moves_its_state_both_ways():
    step = step_cost(10, on_device=True)
    assert (step.up, step.down, step.cores) == (120, 120, 0)
    lanes = timed(Work(flops=90), step=step)[1]
    assert (lanes[UP], lanes[DOWN], lanes[COMPUTE]) == (12, 12, 90 + 280)


def test_state_on_the_disk_is_read_and_written_each_step():
    taken, lanes = timed(Work(flops=1), step=Work(read=200, written=160))
    assert (lanes[READ], lanes[WRITE], taken) == (40, 40, 40)


def test_sums_of_several_hosts_cross_the_network():
    assert timed(step=Work(sent=120))[1][NETWORK] == 60


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_shorter_than_its_busiest_lane(seed):
    draw = random.Random(seed)

    def work():
        names = ("flops", "fp32_flops", "moved", "up", "down", "read", "written", "sent", "cores")
        return Work(**{name: draw.choice((0, draw.uniform(0, 1e10))) for name in names})

    run = {
        "alone": draw.random() < 0.2,
        "clip": draw.random() < 0.5,
        "accumulate": draw.randint(1, 3),
        "overlaps": draw.random() < 0.5,
        "ranks": draw.choice((1, 4)),
    }
    first = Work(up=1e8, down=1e8, cores=draw.choice((0, 1e8)))
    machine = MACHINES[draw.choice(("rtx4090", "h200", "rtx3060"))]
    taken, lanes = step_time(work(), work(), work(), first, step_cost(1e7), machine, **run)
    assert max(lanes.values()) <= taken * (1 + 1e-9) and lanes[CORES] >= 0
