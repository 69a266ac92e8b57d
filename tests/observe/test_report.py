"""The report: what bounded a run, in one sentence, and what the figures of a step mean."""

import pytest
import side_by_side

import sp_lightning
from sp_lightning.host.recorder import RecordedStep
from sp_lightning.host.telemetry import CAUSES, Span
from sp_lightning.observe.report import ADVICE, RunReport, bound_by, floor_s, in_words, ranks_in_words

pytestmark = pytest.mark.simgpu


def causes(**seconds):
    """Causes of a step of ten seconds, of which the units compute what is left."""
    return dict.fromkeys(CAUSES, 0.0) | {"compute": 10.0 - sum(seconds.values())} | seconds


@pytest.mark.parametrize("cause", ADVICE)
def test_what_a_step_waits_for_most_bounds_it(cause):
    said = bound_by(causes(**{cause: 3.0, "other": 1.0}))
    assert said.startswith("30 % of each step waits for ") and cause in said and said.endswith(f"{ADVICE[cause]}.")


def test_a_step_that_waits_for_little_is_bound_by_compute():
    said = bound_by(causes(weights=0.4, other=0.3))
    assert said.startswith("Compute bounds the step, with 93 % of it: a larger window or a faster host would gain")


def test_time_outside_of_units_names_the_loop():
    said = bound_by(causes(weights=1.0, other=4.0))
    assert said.startswith("40 % of each step passes outside") and "look at the data loader" in said


def test_shares_are_in_words_the_largest_first():
    said = in_words(causes(weights=2.0, other=0.01))
    assert said == "compute 80 %, waits for weights 20 %"


def test_the_floor_is_the_busiest_lanes_work():
    work = (Span("up", "a", 0, 6), Span("up", "b", 6, 7), Span("compute", "a", 2, 7), Span("host", "", 0, 9, stall="x"))
    step = RecordedStep(number=0, trains=True, start=0.0, end=10.0, spans=work)
    assert floor_s(step) == 7.0


def test_ranks_are_in_one_line():
    said = ranks_in_words([[0.2, 0.25, 2**30, 2**31], [0.3, 0.5, 2**30, 2**31]])
    assert said.startswith("by rank: rank 0 200 ms, waits 25%, device peak 1.00 GiB, host peak 2.00 GiB; rank 1 300 ms")


def test_stats_have_the_bytes_of_a_window(device):
    module = side_by_side.blocks()
    with sp_lightning.stream(module, device, window=2, units=["Block"]) as handle:
        stats = handle.stats()
    nbytes, streamed = sum(p.nbytes for p in module.parameters()), [u for u in handle.units if not u.is_held]
    on_host = sum(weight.nbytes for unit in streamed for weight in unit.weights)
    for name, least in {"weight_bytes": nbytes, "host_weight_bytes": on_host, "host_gradient_bytes": on_host}.items():
        assert least <= stats[name] < 2 * nbytes  # each is aligned
    assert stats["window_bytes"] >= stats["resident_root_bytes"] + 2 * max(unit.nbytes for unit in streamed)


def test_lines_compare_a_plan_with_what_was_measured(device):
    class Plan:
        window, device_nbytes, step_s = 2, 3 << 20, 0.25

    module = side_by_side.blocks()
    with sp_lightning.stream(module, device, window=2, units=["Block"]) as handle:
        report = RunReport(handle, Plan())
        assert report.lines() == [] and report.rank_figures() == [0.0] * 4
        for x in side_by_side.inputs(device, 4):
            module(x).sum().backward()
        report.close()
        took, memory, _ = report.lines()
    assert "(250 ms planned), floor " in took and "(3.00 MiB planned) with window 2" in memory
