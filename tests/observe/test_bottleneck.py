"""The one sentence that matters, from made-up figures; and the floor, from measured ones."""

import pytest

from sp_lightning.core.telemetry import CAUSES, Span
from sp_lightning.observe.bottleneck import MeasuredRun, RunSetting, in_unit_of, measured, measured_floor, sentence
from sp_lightning.runtime.recorder import RecordedStep, UnitTimes, unit_times

pytestmark = pytest.mark.quick


def figures(step_s=1.4, setting=None, **causes):
    """A step of which the rest is compute."""
    lanes = {name: causes.pop(name) for name in ("up_s", "down_s", "optimizer_s", "fetches") if name in causes}
    compute = step_s - sum(causes.values())
    shares = dict.fromkeys(CAUSES, 0.0) | causes | {"compute": compute}
    setting = RunSetting(**{"window": 2, "transfer": 1, "units": 32} | (setting or {}))
    third = compute / 3
    return MeasuredRun(step_s=step_s, causes=shares, forward_s=third, backward_s=2 * third, setting=setting, **lanes)


def test_an_optimizer_that_could_have_more_threads():
    m = figures(optimizer=0.53, optimizer_s=0.7, setting={"threads": 2, "cores": 8})
    assert sentence(m) == (
        "38 % of each step waits for the host optimizer; with 8 threads instead of 2 the step would take about 0.88 s "
        "instead of 1.4 s."
    )


def test_an_optimizer_that_could_run_beside_backward():
    m = figures(optimizer=0.7, optimizer_s=0.7, setting={"overlaps": False})
    assert "50 % of each step waits for the host optimizer; with units stepped while backward runs" in sentence(m)
    assert sentence(m).endswith("the step would take about 0.93 s instead of 1.4 s.")
    m = figures(optimizer=0.7, optimizer_s=0.7, setting={"overlaps": False, "waits_as": "gradients are clipped"})
    assert "with units stepped while backward runs (not now, because gradients are clipped) the step" in sentence(m)


def test_two_changes_that_gain_as_much_stand_side_by_side():
    m = figures(optimizer=0.4, optimizer_s=0.8, setting={"overlaps": False, "threads": 1, "cores": 4})
    assert "with 4 threads instead of 1, or units stepped while backward runs (" in sentence(m)
    assert sentence(m).endswith("the step would take about 1.0 s instead of 1.4 s.")


def test_two_changes_that_differ_have_a_time_each():
    m = figures(weights=0.7, up_s=1.2, fetches=64, setting={"single": True, "spare_units": 10})
    assert sentence(m) == (
        "50 % of each step waits for weights on their way up; with precision='bf16-true' and master_weights=True the "
        "step would take about 0.80 s instead of 1.4 s; with window=12 (there is memory for it), about 1.2 s."
    )


def test_a_window_of_one_hides_nothing():
    m = figures(weights=0.7, up_s=0.7, setting={"window": 1})
    said = "with window=2 (one unit is copied while another computes) the step would take about 0.70 s instead of 1.4 s"
    assert said in sentence(m)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("disk", "50 % of each step waits for the disk; the disk is the limit: a larger host_budget leaves less there"),
        ("weights", "50 % of each step waits for weights on their way up; the link is the limit: a larger batch"),
        ("gradients", "50 % of each step waits for gradients on their way down; the link is the limit"),
        ("activations", "50 % of each step waits for offloaded activations; the link is the limit: keep activations"),
        ("optimizer", "50 % of each step waits for the host optimizer; all cores work on it already"),
        ("other", "50 % of each step passes outside of the units"),
    ],
)
def test_where_no_setting_helps_it_says_what_does(cause, said):
    assert sentence(figures(**{cause: 0.7})).startswith(said)


def test_activations_that_are_cheaper_to_compute_again():
    m = figures(activations=0.7, setting={"activations": "offload"})
    assert sentence(m).endswith("with activations='recompute' the step would take about 0.93 s instead of 1.4 s.")


def test_gradients_in_half_the_bytes():
    m = figures(gradients=0.7, down_s=0.6, setting={"single": True})
    assert sentence(m).endswith("master_weights=True the step would take about 1.1 s instead of 1.4 s.")


def test_a_step_that_only_computes_is_left_alone():
    assert sentence(figures(weights=0.02, optimizer=0.01)) == (
        "Units compute 98 % of each step and streaming costs 2 %: a larger window or a faster host would gain next to "
        "nothing."
    )


def test_no_change_promises_less_than_what_is_computed():
    m = figures(optimizer=0.1, optimizer_s=9.0, setting={"threads": 1, "cores": 64})
    assert sentence(m).endswith("would take about 1.3 s instead of 1.4 s.")


@pytest.mark.parametrize(
    ("step_s", "seconds", "text"),
    [(1.4, 1.4, "1.4 s"), (1.4, 0.876, "0.88 s"), (12, 12.34, "12 s"), (12, 9.99, "10 s"), (0.9, 0.0854, "85 ms")],
)
def test_times_have_two_digits_in_the_steps_unit(step_s, seconds, text):
    assert in_unit_of(step_s, seconds) == text


def times(unit, nbytes=100):
    return UnitTimes(
        unit=unit, up_s=1, forward_s=2, backward_s=4, down_s=1, step_s=3, up_nbytes=nbytes, down_nbytes=nbytes
    )


def test_the_floor_is_the_simulations_with_measured_times():
    """Three units, window 1: compute 6 + 12, of the first unit down 1, step 3 and up 1."""
    bound = measured_floor([times("a"), times("b"), times("c")], window=1)
    assert bound.seconds == pytest.approx(6 + 12 + 1 + 3 + 1)
    assert (bound.up_forward, bound.up_backward, bound.down, bound.optimizer) == pytest.approx((2, 2, 2, 6))


def test_a_frozen_unit_without_times_has_a_floor_too():
    assert measured_floor([UnitTimes(unit="a", forward_s=2)], window=1).seconds == 2


def test_what_was_recorded_becomes_figures_of_the_median_step():
    def step(number, end):
        spans = (
            Span("up", "a", 0, 1, "weights", nbytes=8),
            Span("compute", "a", 0, 1, stall="weights"),
            Span("compute", "a", 1, 3, "forward"),
            Span("compute", "a", 3, 4, "backward"),
            Span("optimizer", "a", 4, 5, "step"),
        )
        return RecordedStep(number=number, kind="train", trains=True, start=0, end=end, spans=spans)

    steps = [step(0, 90), step(1, 5), step(2, 6)]
    m = measured(steps, unit_times(steps), RunSetting(window=1, transfer=1, units=1))
    assert (m.step_s, m.forward_s, m.backward_s, m.up_s, m.optimizer_s, m.fetches) == (6, 2, 1, 1, 1, 1)
    assert m.causes == {
        "compute": 3,
        "disk": 0,
        "weights": 1,
        "gradients": 0,
        "network": 0,
        "activations": 0,
        "optimizer": 1,
        "other": 1,
    }
