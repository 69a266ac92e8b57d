"""On the machine of most tests every rate is 1, so that units cost seconds; "link" has both directions on one wire."""

import functools
import importlib.util
import itertools
import math
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_lightning.core import simulation
from sp_lightning.core.machine import MACHINES, Machine
from sp_lightning.core.schedule import Schedule
from sp_lightning.core.simulation import SimulatedVisit, floor, simulate
from sp_lightning.core.unit_numbers import UnitNumbers, stepped_on_device
from sp_lightning.errors import OptionError
from sp_lightning.planning.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
UNIT_MACHINE = Machine("unit", 1, 1, 1, 1, 1, device_nbytes=100, host_nbytes=100, optimizer_bytes_per_parameter=1)
SHARED_WIRE = replace(UNIT_MACHINE, duplex=0.5)
SLOW_DISK = replace(UNIT_MACHINE, disk_bytes_per_s=1, disk_out_bytes_per_s=1, disk_duplex=1)


def unit(name="", up=1, forward=1, backward=2, down=1, step=1, **more):
    return UnitNumbers(name, up, down, step, forward, backward, **more)


def simulated(units, window=2, machine=UNIT_MACHINE, transfer=1, **options):
    return simulate(units, Schedule([one.up_nbytes for one in units], window, transfer), machine, **options)


def literal(result):
    return [f"{span.lane} {span.unit} {span.start:g}-{span.end:g}" for span in result.timeline]


# The choreography, with times worked out by hand


def test_a_step_of_three_units_is_literally_this():
    # The way up of 0 in backward may start when backward of 1 is done with the place it takes (of unit 2).
    result = simulated([unit("a"), unit("b"), unit("c")])
    assert literal(result) == [
        "up b 0-1",
        "compute a 0-1",
        "up c 1-2",
        "compute b 1-2",
        "compute c 2-3",
        "compute c 3-5",
        "up a 5-6",
        "compute b 5-7",
        "down c 5-6",
        "optimizer c 6-7",
        "compute a 7-9",
        "down b 7-8",
        "optimizer b 8-9",
        "down a 9-10",
        "optimizer a 10-11",
        "up a 11-12",
    ]


def test_the_step_of_the_overlap_benchmark_is_the_best_possible():
    result = simulated([unit(up=10, forward=10, backward=20, down=10, step=10)] * 24, window=3)
    assert result.step_s == 24 * 30 + 30
    assert result.merit == 1
    assert result.stall_s == {"up": 10, "down": 10, "optimizer": 10}


def test_without_overlap_the_optimizer_comes_after_backward():
    result = simulated([unit(up=10, forward=10, backward=20, down=10, step=10)] * 24, window=3, optimizer_overlap=False)
    assert result.step_s == 24 * 30 + 10 + 24 * 10 + 10
    assert result.stall_s == {"up": 10, "down": 10, "optimizer": 240}


def test_a_window_of_one_waits_for_every_way_up():
    result = simulated([unit()] * 5, window=1)
    assert result.step_s == 5 * 3 + 9 + 2  # nine ways up: backward starts with the last unit there
    assert result.stall_s["up"] == 9


def test_the_step_begins_with_what_is_left_of_a_slow_optimizer():
    # Steps end at 5 + 1 + 4 x 10; then the first way up.
    result = simulated([unit(step=10)] * 4, window=4)
    assert result.step_s == 4 + 2 + 1 + 4 * 10 + 1


def test_steps_into_forward_let_a_unit_come_when_its_own_step_is_done():
    result = simulated([unit(step=4)] * 4, window=4, steps_into_forward=True)
    today = simulated([unit(step=4)] * 4, window=4)
    assert today.step_s == 4 + 2 + 1 + 4 * 4 + 1
    assert result.floor.chain <= result.step_s < today.step_s


def test_the_unit_that_forward_needs_first_is_stepped_first_when_steps_run_into_forward():
    # What is left of "b" and "c" from the step before; then each that arrives comes before the ones that are waiting.
    result = simulated([unit("a"), unit("b", step=8), unit("c", step=8)], window=3, steps_into_forward=True)
    assert [span.unit for span in result.timeline if span.lane == "optimizer"] == ["b", "c", "c", "b", "a"]


def test_steps_into_forward_gain_nothing_in_the_order_of_arrival(monkeypatch):
    units = [unit(step=4)] * 6
    newest_first = simulated(units, steps_into_forward=True)
    monkeypatch.setattr(simulation, "NewestFirst", simulation.InOrder)
    assert simulated(units, steps_into_forward=True).step_s == simulated(units).step_s > newest_first.step_s


def test_clipping_holds_the_steps_until_backward_is_done_and_forward_hides_them():
    units = [unit(forward=2, backward=4)] * 10
    held = simulated(units, window=4, optimizer_overlap=False, steps_into_forward=True)
    assert held.step_s == 60 + 3
    assert simulated(units, window=4, optimizer_overlap=False).step_s == 60 + 1 + 10 + 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_norm_is_computed_between_the_last_gradient_and_the_first_step(overlap):
    units = [unit(forward=2, backward=4)] * 10
    given = {"window": 4, "optimizer_overlap": overlap}
    clipped = simulated(units, steps_into_forward=True, after_backward=[2] * 10, **given)
    assert clipped.step_s == 60 + 3 + 10 * 2
    assert simulated(units, after_backward=[2] * 10, **given).step_s == 60 + 1 + 10 * 2 + 10 + 1
    assert simulated(units, after_backward=[0] * 10, steps_into_forward=True, **given).step_s == 60 + 3


def test_the_next_packed_gradients_wait_for_the_ones_on_their_way():
    # The head's gradients are on their way from 4 to 14; those of the middle one are ready at 6.
    result = simulated([unit("a"), unit("b"), unit("head", down=10)], window=3)
    spans = literal(result)
    assert "down head 5-15" in spans
    assert "compute b 5-7" in spans
    assert "compute a 15-17" in spans
    assert result.stall_s["down"] == 8 + 1


# Lanes of a disk


def test_what_is_read_from_files_goes_up_meanwhile_and_is_waited_for():
    # The machine reads 1 byte a second from its disk: 4 s for each load, beside 1 s on the link.
    units = [unit("a", down=0), unit("b", down=0, disk_nbytes=4), unit("c", down=0)]
    result = simulated(units, window=1, machine=SLOW_DISK)
    plain = simulated([replace(one, disk_nbytes=0) for one in units], window=1)
    assert result.step_s == plain.step_s + 2 * 3
    assert result.stall_s == {"up": plain.stall_s["up"] - 2, "down": 0, "optimizer": 0, "disk": 2 * 4}
    assert result.disk_nbytes == 8 and result.floor.seconds <= result.step_s
    assert plain.stall_s.keys() == {"up", "down", "optimizer"}


def test_a_step_whose_state_is_on_the_disk_is_read_and_written_beside_the_others():
    units = [unit(step=0, state_read_nbytes=8, state_written_nbytes=8) for _ in range(6)]
    free, shared = (simulated(units, window=6, machine=replace(SLOW_DISK, disk_duplex=share)) for share in (1, 0.5))
    assert free.state_read_nbytes == free.state_written_nbytes == 6 * 8 and free.disk_nbytes == 0
    assert free.floor.binds == shared.floor.binds == "disk"
    assert 6 * 8 <= free.floor.seconds <= free.step_s <= 6 * 8 + 12
    assert 12 * 8 <= shared.floor.seconds <= shared.step_s <= 12 * 8 + 12
    assert {span.lane for span in free.timeline} == {"compute", "down", "up", "disk in", "disk out"}
    assert {span.phase for span in free.timeline if span.lane.startswith("disk")} == {"state"}


FLOORS = {  # docs: bytes per parameter read and written, seconds on one drive of 7 and 5 GB/s, free and one pipe
    ("llama3-8b", 8): (13, 22),
    ("llama3-8b", 12): (19, 33),
    ("llama3-70b", 8): (113, 194),
    ("llama3-70b", 12): (169, 290),
}


@pytest.mark.parametrize("model, each", FLOORS)
@pytest.mark.few(3)
def test_state_and_weights_of_large_models_take_what_a_drive_takes(model, each):
    """State alone is 8 bytes per parameter of FP32 AdamW; with the FP32 weights, of which a copy travels, 12."""
    one = [replace(u, resident=False) for u in WORKLOADS[model].units(1e3)]
    units = [replace(u, state_read_nbytes=each * u.parameters, state_written_nbytes=each * u.parameters) for u in one]
    for duplex, seconds in zip((1.0, 0.5), FLOORS[model, each], strict=True):
        drive = replace(MACHINES["rtx4090"], disk_bytes_per_s=7e9, disk_out_bytes_per_s=5e9, disk_duplex=duplex)
        result = simulated(units, window=2, machine=drive, steps_into_forward=True)
        first = units[0].step_s(drive)
        assert round(result.floor.disk + first) == seconds
        assert result.floor.binds == "disk" and result.floor.disk + first <= result.step_s * (1 + 1e-9)
        assert result.step_s <= 1.15 * seconds
        assert result.state_read_nbytes == result.state_written_nbytes == each * sum(u.parameters for u in units)


def test_state_that_waits_for_gradients_holds_up_no_weights():
    units = [unit(f"{i}", disk_nbytes=1, state_read_nbytes=1, state_written_nbytes=1) for i in range(6)]
    result = simulated(units, window=2, machine=SLOW_DISK)
    alone = simulated([replace(one, state_read_nbytes=0, state_written_nbytes=0) for one in units], 2, SLOW_DISK)
    assert alone.step_s <= result.step_s <= alone.step_s + 3


@given(
    st.lists(st.tuples(*[st.integers(0, 5)] * 7), min_size=1, max_size=6),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0.5, 0.75, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_no_step_over_a_disk_is_shorter_than_its_floor(sizes, window, into_forward, duplex):
    units = [
        unit(str(i), up, forward, 2 * forward, down, step, disk_nbytes=d, state_read_nbytes=r, state_written_nbytes=w)
        for i, (up, forward, down, step, d, r, w) in enumerate(sizes)
    ]
    result = simulated(units, window, replace(SLOW_DISK, disk_duplex=duplex), steps_into_forward=into_forward)
    assert result.step_s >= result.floor.chain * (1 - 1e-9)
    assert result.step_s >= result.floor.bound * (1 - 1e-9)


def test_a_way_up_waits_for_the_last_reader_of_the_memory_it_is_given():
    result = simulated([unit("a"), unit("b", up=3), unit("c")], window=1)
    assert [span for span in literal(result) if span.startswith(("compute", "up"))][:5] == [
        "compute a 0-1",
        "up b 1-4",
        "compute b 4-5",
        "up c 5-6",
        "compute c 6-7",
    ]


def test_both_directions_at_once_share_the_wire():
    units = [unit("a"), unit("b"), unit("c")]
    result = simulated(units, machine=SHARED_WIRE)
    assert "up a 5-7" in literal(result)
    assert "down c 5-7" in literal(result)


def test_a_unit_that_stays_on_the_device_comes_on_demand_once_a_step():
    result = simulated([unit("a"), unit("b"), unit("root", up=5, resident=True)], window=2)
    ups = [span for span in literal(result) if span.startswith("up")]
    assert ups == ["up b 0-1", "up root 2-7", "up a 16-17"]


def test_a_frozen_unit_sends_nothing_and_comes_only_when_it_had_to_go():
    frozen = unit(down=0)
    assert [span.lane for span in simulated([frozen] * 3, window=3).timeline] == ["compute"] * 6
    ups = [span.unit for span in simulated([frozen] * 4, window=3).timeline if span.lane == "up"]
    assert len(ups) == 2


def test_recompute_repeats_forward_in_backward():
    kept = simulated([unit(forward=3, backward=4)] * 4, window=3)
    again = simulated([unit(forward=3, backward=4)] * 4, window=3, activations="recompute")
    assert (kept.compute_s, again.compute_s) == (4 * 7, 4 * 10)


@pytest.mark.parametrize("transfer", [1, 2])
def test_what_comes_up_is_what_the_schedule_says(transfer):
    order = [*range(7), *reversed(range(7))]
    schedule = Schedule([1] * 7, 3, transfer)
    schedule.begin(order)
    expected = [loaded for visited in order for loaded in schedule.visit(visited).load]
    result = simulated([unit(str(index)) for index in range(7)], window=3, transfer=transfer)
    # The first way up belongs to the step before: it is over when the first forward begins.
    ups = [int(span.unit) for span in result.timeline if span.lane == "up"]
    assert ups == [*expected[1:], expected[0]]


# Memory


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6])
def test_passes_without_a_backward_follow_each_other_as_a_ring(window):
    """As in a run (window.py): the first units come up during the last ones of the pass before."""
    units = [unit(str(number), backward=0, down=0, step=0) for number in range(6)]
    order = list(range(len(units)))
    by_itself, counts = Schedule([1] * len(units), window), []
    for _ in range(8):
        by_itself.begin(order if counts else (), wrap=True)
        counts.append(sum(len(by_itself.visit(index).load) for index in order))
    found = simulated(units, window, works=[simulation.SimulatedVisit(index, 1.0) for index in order])
    assert sum(span.lane == "up" for span in found.timeline) in counts[-2:]
    assert found.step_s == len(units) * (1 + (window == 1))  # but for which all ways up are hidden


def test_kept_activations_add_up_until_backward():
    units = [unit(up=10, down=3, activation_nbytes=100)] * 4
    # Window of two, the last one's backward: its gradients as autograd makes them.
    assert simulated(units).peak_nbytes == 2 * 10 + 4 * 100 + 3


def test_recompute_keeps_inputs_and_one_units_activations():
    units = [unit(up=10, down=3, activation_nbytes=100, input_nbytes=7)] * 4
    # In backward of the third: inputs of three, its activations, its gradients, the packed ones before.
    expected = 2 * 10 + max(4 * 7 + 100 + 3, 3 * 7 + 100 + 3 + 3)
    assert simulated(units, activations="recompute").peak_nbytes == expected


def test_gradients_take_two_buffers():
    assert simulated([unit(up=1, down=50)] * 4).peak_nbytes == 2 * 1 + 2 * 50


def test_what_stays_on_the_device_is_counted_beside_the_window():
    units = [unit(up=10, down=0), unit(up=10, down=0), unit(up=1000, down=0, resident=True)]
    assert simulated(units, window=1).peak_nbytes == 1010


# What always holds

COST = st.integers(0, 20)
UNITS = st.lists(
    st.builds(unit, st.just("u"), COST, st.integers(1, 20), COST, COST, COST, resident=st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    UNITS,
    st.integers(1, 9),
    st.sampled_from([1.0, 0.8, 0.5]),
    st.sampled_from(["keep", "recompute"]),
    st.booleans(),
    st.booleans(),
)
def test_no_step_is_shorter_than_what_has_to_be_done(units, window, duplex, activations, overlap, into_forward):
    options = {"activations": activations, "optimizer_overlap": overlap, "steps_into_forward": into_forward}
    result = simulated(units, window, replace(UNIT_MACHINE, duplex=duplex), **options)
    compute = result.floor.compute_forward + result.floor.compute_backward
    assert math.isclose(result.compute_s, compute)
    assert math.isclose(result.compute_s + sum(result.stall_s.values()), result.step_s)
    assert result.step_s >= result.floor.chain * (1 - 1e-9)
    for lane in ("up", "down", "optimizer"):
        assert sum(span.end - span.start for span in result.timeline if span.lane == lane) <= result.step_s * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(UNITS, st.integers(1, 9), st.booleans())
def test_lanes_do_one_thing_at_a_time(units, window, into_forward):
    timeline = simulated(units, window, SHARED_WIRE, steps_into_forward=into_forward).timeline
    for lane in ("up", "compute", "down", "optimizer"):
        spans = [span for span in timeline if span.lane == lane]
        assert all(later.start >= earlier.end for earlier, later in itertools.pairwise(spans))


def test_the_same_twice():
    units = WORKLOADS["sdxl"].units(1e5)
    assert simulated(units, machine=MACHINES["h100"]) == simulated(units, machine=MACHINES["h100"])


def test_a_step_moves_what_its_optimizer_does_and_the_casts_of_what_travels_in_half_precision():
    whole = unit(step=10**9)
    machine = replace(MACHINES["rtx4090"], dram_bytes_per_s=1e9)
    for cast in (0, 4 * 10**8, 10**9):
        assert replace(whole, cast=cast).step_s(machine) == pytest.approx(28 + 8 * cast / 1e9)
    assert not replace(whole, cast=10**9, down_nbytes=0).step_s(machine)  # a frozen one


def test_what_lies_between_products_takes_the_time_of_the_memory_that_it_moves():
    """Products take their arithmetic's or their own memory's time; all else comes on top."""
    machine = replace(UNIT_MACHINE, device_bytes_per_s=2.0)
    for moved, other in ((0, 0), (4, 0), (10, 0), (0, 6), (10, 6)):
        whole = unit(forward=3, backward=4, forward_moved=moved, forward_other=other, backward_other=2 * other)
        assert whole.forward_s(machine) == max(3, moved / 2) + other / 2
        assert whole.backward_s(machine) == 4 + other
        works = [
            SimulatedVisit(0, 3, moved_nbytes=moved, other_nbytes=other),
            SimulatedVisit(0, 4, other_nbytes=2 * other),
        ]
        swept, listed = (simulated([whole], machine=machine, works=each) for each in ((), works))
        assert swept.compute_s == listed.compute_s == whole.forward_s(machine) + whole.backward_s(machine)
        assert swept.floor == listed.floor


def test_two_hundred_units_take_under_a_second():
    units = [unit(up=index % 7, backward=index % 5) for index in range(200)]
    start = time.process_time()
    simulated(units, window=8, machine=SHARED_WIRE, steps_into_forward=True)
    assert time.process_time() - start < 1


def test_it_needs_no_torch():
    script = f"""
import sys, types
package = sys.modules["sp_lightning"] = types.ModuleType("sp_lightning")
package.__path__ = [{str(ROOT / "sp_lightning")!r}]
from sp_lightning.core import simulation
from sp_lightning.planning import workloads
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# The floor


def test_the_floor_is_that_of_its_definition():
    units = [unit(up=2, forward=3, backward=5, down=7, step=11)] * 4
    one = floor(units, 2, UNIT_MACHINE, recompute=False)
    assert (one.up_forward, one.up_backward) == (3 * 2, 2 * 2)
    assert (one.compute_forward, one.compute_backward) == (12, 20)
    assert (one.down, one.optimizer) == (3 * 7, 3 * 11)
    assert one.seconds == max(12 + 21, 33) + 7 + 11 + 2
    assert one.bound == 44


def test_the_floor_carries_what_helps_of_the_optimizer_into_forward():
    carried = floor([unit(forward=3, backward=5, step=step) for step in (1, 7, 7)], 3, UNIT_MACHINE, recompute=False)
    assert carried.seconds == 3 * 3 + 3 * 5 + 3
    bound = floor([unit(forward=3, backward=5, step=step) for step in (1, 20, 20)], 3, UNIT_MACHINE, recompute=False)
    assert bound.seconds == 40 + 3
    assert (carried.binds, bound.binds) == ("compute", "optimizer")


def test_the_chain_is_one_that_the_order_of_units_forces():
    # All but the last unit are stepped between its backward and its next forward.
    units = [unit(step=50), unit(step=50), unit(forward=100, backward=200, step=0)]
    one = floor(units, 3, UNIT_MACHINE, recompute=False)
    assert one.chain == 300 + 3 + 1 + 100 + 1
    assert one.chain > one.seconds


# Rejections


def test_no_units_are_refused():
    with pytest.raises(OptionError, match="units must be at least one unit, got 0"):
        simulate([], Schedule([], 1), UNIT_MACHINE)


def test_an_unknown_policy_is_refused():
    with pytest.raises(OptionError, match="activations must be 'keep' or 'recompute', got 'forget'"):
        simulated([unit()], activations="forget")


# Shipped models and machines


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama-1b", 1236),
        ("llama-3b", 3213),
        ("llama3-8b", 8030),
        ("llama3-70b", 70554),
        ("qwen3-14b", 14768),
        ("qwen3-32b", 32762),
        ("mixtral-8x7b", 46703),
        ("vit-h", 632),
    ],
)
def test_models_have_their_published_sizes(name, millions):
    assert WORKLOADS[name].parameters / 1e6 == pytest.approx(millions, rel=1e-3)


def test_the_unet_has_about_the_published_size():
    assert WORKLOADS["sdxl"].parameters / 1e6 == pytest.approx(2567, rel=0.02)


SMALL = "llama-1b", "llama-3b"  # whose embedding, a unit, is as large as four to eight of their blocks
CASES = [(w, machine) for w in WORKLOADS.values() if w.name not in SMALL for machine in MACHINES.values()]


@functools.cache  # several facts are stated of each
def stepped(workload, machine, activations, margin, hidden_in_forward, into_forward, window=3, ranks=1):
    tokens = workload.tokens(machine, 3, activations == "recompute", hidden_in_forward, margin)
    units = workload.units(tokens)
    return simulated(units, window, machine, activations=activations, steps_into_forward=into_forward, ranks=ranks)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.few(1)
def test_a_step_comes_near_its_floor_where_compute_takes_more_than_what_hides_behind_it(activations):
    for workload, machine in CASES:
        result = stepped(workload, machine, activations, 1.2, hidden_in_forward=False, into_forward=True)
        assert result.floor.binds == "compute"
        assert result.merit >= (0.965 if workload.uniform else 0.98), (workload.name, machine.name)


@pytest.mark.seldom
def test_a_window_of_two_is_enough_for_that_and_one_of_one_is_not():
    for workload, machine in CASES:
        two, one = (stepped(workload, machine, "recompute", 1.2, False, False, window) for window in (2, 1))
        assert two.merit >= 0.965, (workload.name, machine.name)
        assert one.merit < 0.92 < two.merit - 0.04, (workload.name, machine.name)


def of_what_is_possible(workload, machine, margin, hidden_in_forward=True, window=3, ranks=1):
    result = stepped(workload, machine, "recompute", margin, hidden_in_forward, True, window, ranks)
    return max(result.floor.seconds, result.floor.chain) / result.step_s


@pytest.mark.slow
@pytest.mark.parametrize("margin, hidden_in_forward", [(1.2, False), (1.2, True), (0.6, True)])
def test_no_step_of_the_tables_is_5_percent_longer_than_its_floor_or_its_chain(margin, hidden_in_forward):
    for workload, machine in CASES:
        share = of_what_is_possible(workload, machine, margin, hidden_in_forward)
        assert share >= 0.95, (workload.name, machine.name)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("margin, hidden_in_forward", [(1.2, False), (1.2, True), (0.6, True)])
@pytest.mark.few(1)
def test_nor_is_one_of_several_devices(ranks, margin, hidden_in_forward):
    for workload, machine in CASES:
        share = of_what_is_possible(workload, machine, margin, hidden_in_forward, ranks=ranks)
        assert share >= 1 / 1.05, (workload.name, machine.name)


# Steps on the device


def stepping(units):
    """The same units, which the device steps: 16 bytes of a weight go up for AdamW in FP32, and 12 come down."""
    found = stepped_on_device(units, states=2, width=4)
    assert all(
        (one.step_up_nbytes, one.step_down_nbytes) == (16 * one.parameters, 12 * one.parameters) for one in found
    )
    return found


def test_a_step_on_the_device_of_one_unit_is_literally_this(monkeypatch):
    monkeypatch.setattr(simulation, "PARTS", 2)
    units = [unit("a", step_up_nbytes=4, step_down_nbytes=2), unit("b", down=0, resident=True)]
    machine = replace(UNIT_MACHINE, device_bytes_per_s=3.0)
    result = simulated(units, window=1, machine=machine)
    assert [line for line in literal(result) if "b" not in line] == [
        "compute a 0-1",
        "compute a 4-6",
        "down a 6-7",
        "up a 7-11",  # two portions
        "optimizer a 9-10",
        "down a 10-11",
        "optimizer a 11-12",
        "down a 12-13",
        "up a 13-14",  # for the next forward
    ]
    assert {wait.stall for wait in result.waits} == {"gradients", "optimizer", "weights"}


def test_copies_for_steps_leave_the_link_to_weights():
    units = stepping([unit(up=10, forward=10, backward=20, down=10, step=2) for _ in range(8)])
    one = simulated(units, window=3, steps_into_forward=True)
    free = simulated(units, window=3, steps_into_forward=True, machine=replace(UNIT_MACHINE, duplex=1.0))
    assert one.step_s == free.step_s and one.merit > 0.9
    late = [span for span in one.timeline if span.lane == "up" and span.phase != "state"]
    assert late and all(span.seconds == pytest.approx(10) for span in late)  # none waits in the middle


@pytest.mark.parametrize("margin, hidden_in_forward", [(1.2, False), (1.2, True), (0.6, True), (0.3, True)])
@pytest.mark.few(1)
def test_a_step_on_the_device_comes_near_its_floor_or_its_chain(margin, hidden_in_forward):
    for workload, machine in CASES:
        units = stepping(workload.units(workload.tokens(machine, 3, True, hidden_in_forward, margin)))
        result = simulated(units, 3, machine, activations="recompute", steps_into_forward=True)
        share = max(result.floor.seconds, result.floor.chain) / result.step_s
        enough = 0.92 if result.floor.binds == "host memory" else 0.98  # a copy one way leaves some of it unused
        assert enough <= share <= 1 + 1e-9, (workload.name, machine.name)


def random_units(draw):
    """Some of them frozen, or resident, and with their state on the device, on the disk, on both or on neither."""
    units = []
    for index in range(draw.randint(1, 8)):
        up, forward, down, step = (draw.randint(0, 6) for _ in range(4))
        down *= draw.random() < 0.7
        units.append(unit(str(index), up, forward, 2 * forward, down, step, resident=draw.random() < 0.15))
    if draw.random() < 0.6:
        units = stepping(units)
    if draw.random() < 0.3:
        moved = {"state_read_nbytes": draw.randint(0, 9), "state_written_nbytes": draw.randint(1, 9)}
        units = [replace(one, **moved) for one in units]
    return units


@pytest.mark.parametrize("first", range(0, 3000, 1000))
@pytest.mark.few(1)
def test_no_step_of_random_units_is_shorter_than_its_floor(first):
    for number in range(first, first + 1000):
        draw = random.Random(number)
        units, window = random_units(draw), draw.randint(1, 4)
        machine = replace(UNIT_MACHINE, duplex=draw.choice([0.5, 0.75, 1.0]), device_bytes_per_s=40.0)
        activations, into_forward = draw.choice(["keep", "recompute"]), draw.random() < 0.5
        result = simulated(units, window, machine, activations=activations, steps_into_forward=into_forward)
        assert result.step_s >= result.floor.chain * (1 - 1e-9), number
        assert result.step_s >= result.floor.bound * (1 - 1e-9), number


def test_a_step_of_state_on_the_disk_on_the_device_is_literally_this(monkeypatch):
    monkeypatch.setattr(simulation, "PARTS", 2)
    moved = {"state_read_nbytes": 2, "state_written_nbytes": 4, "step_up_nbytes": 4, "step_down_nbytes": 2}
    machine = replace(UNIT_MACHINE, device_bytes_per_s=3.0, disk_bytes_per_s=1.0, disk_out_bytes_per_s=2.0)
    result = simulated([unit("a", **moved), unit("b", down=0, resident=True)], window=1, machine=machine)
    assert [line for line in literal(result) if "b" not in line] == [
        "compute a 0-1",
        "compute a 4-6",
        "down a 6-7",
        "disk in a 7-9",  # two portions
        "up a 8-10",
        "optimizer a 10-11",
        "down a 11-12",
        "up a 12-14",
        "disk out a 12-13",
        "optimizer a 14-15",
        "down a 15-16",
        "disk out a 16-17",
        "up a 17-18",  # for the next forward
    ]


@pytest.mark.slow
@pytest.mark.parametrize("margin", [1.0, 0.6, 0.4, 0.3, 0.15])
def test_nor_is_one_of_the_unet(margin):
    for machine in MACHINES.values():
        assert of_what_is_possible(WORKLOADS["sdxl"], machine, margin) >= 0.95, machine.name


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.seldom
def test_with_steps_into_forward_it_does_so_where_the_optimizer_needs_forward_too(activations):
    for workload, machine in CASES:
        result = stepped(workload, machine, activations, 1.2, hidden_in_forward=True, into_forward=True)
        assert result.floor.binds == "compute"
        assert result.merit >= (0.955 if workload.uniform else 0.96), (workload.name, machine.name)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("margin", [0.8, 0.6, 0.3])
@pytest.mark.seldom
def test_with_steps_into_forward_it_does_so_where_a_link_or_the_optimizer_binds(activations, margin):
    for workload, machine in CASES:
        result = stepped(workload, machine, activations, margin, hidden_in_forward=True, into_forward=True)
        assert result.floor.binds != "compute"
        enough = result.merit >= (0.915 if workload.uniform else 0.86)
        assert enough, (workload.name, machine.name, result.merit)


@pytest.mark.seldom
def test_where_the_optimizer_takes_most_of_a_step_uneven_models_come_as_near_as_uniform_ones():
    for workload, machine in CASES:
        result = stepped(workload, machine, "recompute", 0.3, hidden_in_forward=True, into_forward=True)
        assert result.merit >= 0.92, (workload.name, machine.name)


@pytest.mark.seldom
def test_the_least_is_reached_where_compute_and_what_hides_behind_it_take_equally_long():
    for workload, machine in CASES:
        result = stepped(workload, machine, "recompute", 1.0, hidden_in_forward=True, into_forward=True)
        assert result.merit >= (0.92 if workload.uniform else 0.85), (workload.name, machine.name)


@pytest.mark.parametrize("margin", [0.9, 0.6, 0.3])
@pytest.mark.seldom
def test_where_the_optimizer_binds_no_other_order_of_its_steps_would_gain_more_than_a_little(margin):
    for workload, machine in CASES:
        result = stepped(workload, machine, "recompute", margin, hidden_in_forward=True, into_forward=True)
        if result.floor.binds == "optimizer":
            assert result.floor.chain >= 0.98 * result.step_s, (workload.name, machine.name)


@pytest.mark.parametrize("margin", [0.8, 0.5, 0.2])
@pytest.mark.few(1)
def test_a_step_comes_near_its_floor_where_the_link_alone_binds(margin):
    for workload, machine in CASES:
        unhurried = replace(machine, dram_bytes_per_s=math.inf, host_bytes_per_s=math.inf)
        result = stepped(workload, unhurried, "recompute", margin, hidden_in_forward=False, into_forward=False)
        assert result.floor.binds == "link"
        assert result.merit >= 0.92, (workload.name, machine.name)


# The host's memory, which the optimizer, copies and several ranks share


SHARING = [unit("a"), unit("b", up=3, down=3, step=6), unit("c")]


def test_what_runs_at_once_shares_the_hosts_memory():
    """A copy and the optimizer, or two copies, would take two bytes a second of one and a half."""
    result = simulated(SHARING, window=1, machine=replace(UNIT_MACHINE, host_bytes_per_s=1.5))
    assert [line for line in literal(result) if float(line.split("-")[1]) > 9] == [
        "up b 9-12.6667",  # at three quarters of its speed until c is stepped
        "down c 9-10.3333",
        "optimizer c 10.3333-11.6667",
        "compute b 12.6667-14.6667",
        "up a 14.6667-16",
        "down b 14.6667-18",
        "compute a 16-18",
        "down a 18-19.3333",
        "optimizer b 18-24.3333",
        "optimizer a 24.3333-25.3333",
        "up a 25.3333-26.3333",
    ]
    assert result.floor.host == pytest.approx((3 + 1 + 1 + 3 + 1 + 5 + 8) / 1.5)  # up, up again, down, stepped


def test_cores_that_do_not_fill_the_memory_leave_the_rest_of_it_to_copies():
    """Beside the copy down of a the step of b takes half of the memory: both run at two thirds of their speeds."""
    result = simulated(SHARING, window=1, machine=replace(UNIT_MACHINE, host_bytes_per_s=1, dram_bytes_per_s=0.5))
    assert {"down a 20-21.5", "optimizer b 20-32.5", "optimizer a 32.5-34.5"} < set(literal(result))


def test_memory_that_is_enough_for_all_or_not_known_slows_nothing_down():
    enough, unknown = (replace(UNIT_MACHINE, host_bytes_per_s=rate) for rate in (3, math.inf))
    found, other = (
        simulated(SHARING, window=1, machine=machine, steps_into_forward=True) for machine in (enough, unknown)
    )
    assert literal(found) == literal(other) and other.floor.host == 0


def test_a_step_on_the_device_takes_nothing_of_the_hosts_memory_but_its_copies():
    units = [unit("a", step_up_nbytes=4, step_down_nbytes=2), unit("b", down=0, resident=True)]
    free = replace(UNIT_MACHINE, device_bytes_per_s=3.0)
    shared = replace(free, host_bytes_per_s=2, dram_bytes_per_s=2)
    assert literal(simulated(units, window=1, machine=shared)) == literal(simulated(units, window=1, machine=free))
    copied = 1 + 1 + 4 + 2  # weight up, gradient down, and what the step copies
    assert simulated(units, window=1, machine=shared).floor.host == copied / 2


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 5), min_size=1, max_size=6), st.booleans(), st.integers(1, 4))
@settings(deadline=None)
def test_no_step_is_shorter_than_what_the_hosts_memory_moves(sizes, into_forward, window):
    units = [unit(str(n), up + 1, *others) for n, (up, *others) in enumerate(sizes)]
    machine = replace(UNIT_MACHINE, host_bytes_per_s=1.25)
    found = simulated(units, window, machine, steps_into_forward=into_forward)
    assert found.step_s >= max(found.floor.host, found.floor.chain) * (1 - 1e-9)


# Several ranks, which share the host's memory


def test_ranks_wait_for_the_hosts_memory_in_proportion():
    """On a host that moves one byte a second, two ranks bring one up in two seconds, and down in four."""
    machine = replace(UNIT_MACHINE, host_bytes_per_s=1)
    assert literal(simulated([unit("a"), unit("b")], 1, machine, optimizer_overlap=False, ranks=2)) == [
        "compute a 0-1",
        "up b 1-3",
        "compute b 3-4",
        "compute b 4-6",
        "up a 6-12",  # both at a sixth of their speeds
        "down b 6-12",
        "compute a 12-14",
        "down a 14-18",
        "optimizer b 18-19",
        "optimizer a 19-20",
        "up a 20-22",
    ]


@given(
    st.integers(1, 8),
    st.lists(st.tuples(*[st.integers(0, 5)] * 5), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_ranks_never_take_more_of_the_hosts_memory_than_there_is(ranks, sizes, overlap, into_forward, window):
    units = [
        unit(str(n), up + 1, forward, backward, down, step)
        for n, (up, forward, backward, down, step) in enumerate(sizes)
    ]
    machine = replace(UNIT_MACHINE, dram_bytes_per_s=3, host_bytes_per_s=3)
    options = {"optimizer_overlap": overlap, "steps_into_forward": into_forward}
    found = simulated(units, window, machine, ranks=ranks, **options)
    assert found.step_s >= found.floor.host * (1 - 1e-9)
    assert found.step_s >= found.floor.chain * (1 - 1e-9)
    assert found.floor.seconds >= found.floor.host


def test_one_rank_is_a_device_by_itself():
    units = [unit("a"), unit("b", up=3, step=4), unit("c")]
    assert simulated(units, ranks=1) == simulated(units)
    assert simulated(units).floor.host == 0  # of an unknown memory


def test_more_ranks_take_longer_and_train_more_in_a_second():
    units = WORKLOADS["llama3-8b"].units(tokens=8192)
    found = [simulated(units, 3, MACHINES["rtx4090"], ranks=n).step_s for n in (1, 2, 4, 8)]
    assert found == sorted(found)
    speeds = [n / step_s for n, step_s in zip((1, 2, 4, 8), found, strict=True)]
    assert speeds == sorted(speeds)


# Several machines, each of which sends every other one its share of the sums, and then its own share


NETWORKED = replace(UNIT_MACHINE, network_bytes_per_s=0.5)


def test_machines_send_their_sums_beside_backward_and_step_a_unit_when_its_own_have_come():
    assert literal(simulated([unit("a"), unit("b")], window=2, machine=NETWORKED, nodes=2)) == [
        "up b 0-1",
        "compute a 0-1",
        "compute b 1-2",
        "compute b 2-4",
        "compute a 4-6",
        "down b 4-5",
        "network b 5-7",
        "down a 6-7",
        "network a 7-9",
        "optimizer b 7-8",
        "optimizer a 9-10",
        "up a 10-11",
    ]


def test_new_weights_cross_after_the_steps_and_a_unit_goes_up_when_its_own_have_come():
    units = [unit("a", new_nbytes=1), unit("b", new_nbytes=1)]
    found = simulated(units, window=2, machine=NETWORKED, nodes=2, steps_into_forward=True)
    assert literal(found)[-5:] == [
        "optimizer b 7-8",
        "optimizer a 9-10",
        "network a 10-11",
        "up a 11-12",
        "network b 11-12",
    ]
    assert found.step_s == found.floor.seconds == 12


@pytest.mark.parametrize(("nodes", "network", "step_s"), [(1, 0, 9), (2, 4, 11), (4, 6, 13), (8, 7, 14)])
def test_each_machine_sends_its_sums_twice_but_for_its_own_share(nodes, network, step_s):
    result = simulated([unit("a"), unit("b")], window=2, machine=NETWORKED, nodes=nodes)
    assert sum(span.seconds for span in result.timeline if span.lane == "network") == network
    assert result.floor.network + result.floor.first_network == network
    assert result.step_s == step_s
    assert ("network" in result.stall_s) == (nodes > 1)


def test_a_wait_for_the_network_is_its_own_stall():
    result = simulated([unit("a"), unit("b")], window=2, machine=NETWORKED, nodes=2)
    assert result.stall_s == {"up": 1, "down": 1, "optimizer": 1, "network": 2}
    assert result.floor.binds == "compute"
    slow = replace(NETWORKED, network_bytes_per_s=0.2)
    assert simulated([unit("a"), unit("b")], window=2, machine=slow, nodes=8).floor.binds == "network"


def test_sums_are_of_the_hosts_type():
    """What comes down in half precision is summed in FP32: twice the bytes, of each element that is cast."""
    assert unit(down=2, step=1, cast=1).gradient_nbytes == 4
    assert unit(down=4, step=1).gradient_nbytes == 4


def test_a_frozen_unit_sends_nothing():
    result = simulated([unit("a", down=0, cast=5), unit("b")], machine=NETWORKED, nodes=2)
    assert [span.unit for span in result.timeline if span.lane == "network"] == ["b"]


@given(st.integers(1, 8), st.lists(st.tuples(*[st.integers(0, 5)] * 5), min_size=1, max_size=6), st.booleans())
@settings(deadline=None)
def test_a_step_of_several_machines_is_no_shorter_than_all_its_sums(nodes, sizes, into_forward):
    units = [
        unit(str(n), up + 1, forward, backward, down, step)
        for n, (up, forward, backward, down, step) in enumerate(sizes)
    ]
    divided = [replace(one, new_nbytes=one.down_nbytes) for one in units]
    shares = simulated(divided, 2, NETWORKED, steps_into_forward=into_forward, nodes=nodes)
    assert shares.step_s >= max(shares.floor.seconds, shares.floor.bound) * (1 - 1e-9)
    found = simulated(units, 2, NETWORKED, optimizer_overlap=False, steps_into_forward=into_forward, nodes=nodes)
    alone = simulated(units, 2, NETWORKED, optimizer_overlap=False, steps_into_forward=into_forward)
    sums = 4 * (nodes - 1) / nodes * sum(one.down_nbytes for one in units)
    assert found.floor.network + found.floor.first_network == pytest.approx(sums)
    assert found.step_s >= max(alone.step_s, sums) * (1 - 1e-9)
    assert found.floor.bound >= sums * (1 - 1e-9)
    assert shares.floor.bound >= 1.5 * sums * (1 - 1e-9)
    beside = simulated(units, 2, NETWORKED, steps_into_forward=into_forward, nodes=nodes)
    assert beside.step_s >= max(beside.floor.seconds, sums) * (1 - 1e-9)
    assert into_forward or beside.step_s <= found.step_s * (1 + 1e-9)


def benchmark():
    path = ROOT / "benchmarks" / "simulate.py"
    spec = importlib.util.spec_from_file_location("simulate_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("ranks", "consumer", "server"), [(2, "3.5", "0.88"), (4, "4.8", "1.20"), (8, "7.4", "1.85")])
def test_the_floor_of_ranks_is_that_of_all_bytes_through_the_hosts_memory(ranks, consumer, server):
    """Of 8 B parameters: 4 bytes up, 2 down and 2 read by owners for each rank, 28 for the optimizer, once."""
    simulate_benchmark = benchmark()
    assert f"{simulate_benchmark.floor_of_devices(simulate_benchmark.CONSUMER, ranks):.1f}" == consumer
    assert f"{simulate_benchmark.floor_of_devices(simulate_benchmark.SERVER, ranks):.2f}" == server
    assert simulate_benchmark.floor_of_devices(simulate_benchmark.CONSUMER, ranks) == pytest.approx(
        8.03e9 * (8 * ranks + 28) / 100e9, rel=2e-3
    )


@pytest.mark.slow
def test_the_tables_in_the_docs_are_those_of_the_benchmark():
    assert benchmark().report() in (ROOT / "docs" / "simulation.md").read_text()


@pytest.mark.slow
def test_the_table_of_several_machines_in_the_docs_is_that_of_the_benchmark():
    """Else run: python benchmarks/simulate.py --machines."""
    assert benchmark().several_machines() in (ROOT / "docs" / "several-machines.md").read_text()
