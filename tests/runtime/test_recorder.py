"""What the recorder says about steps: complete, in order, on one clock, and without any effect on them."""

import importlib
import itertools
import time

import pytest
import side_by_side
import torch
from speeds import measured_again

import sp_lightning
from sp_lightning.core.telemetry import CAUSES, Span
from sp_lightning.observe.report import RunReport
from sp_lightning.observe.timeline import Timeline
from sp_lightning.runtime.recorder import KEPT, RecordedStep, Recorder, unit_times

BLOCKS = [f"blocks.{i}" for i in range(4)]


def record(device, steps=4, before=lambda: None, **options):
    """The recorder, and the statistics, of a few steps in a loop of one's own."""
    torch.manual_seed(0)
    module = side_by_side.blocks()
    with sp_lightning.stream(module, device, **{"window": 2, "units": ["Block"], **options}) as handle:
        recorder = handle.record()
        before()
        optimizer = side_by_side.sgd(module)
        for x in side_by_side.inputs(device, steps):
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.stop_recording()
        return recorder, handle.stats()


def span(lane, start, end, unit="a", **more):
    return Span(lane, unit, start, end, **more)


def made(*spans, start=0.0, end=10.0, number=0):
    return RecordedStep(number=number, kind="train", trains=True, start=start, end=end, spans=spans)


def test_copies_add_up_to_the_counters(device):
    recorder, stats = record(device)
    assert sum(step.nbytes("up") for step in recorder.steps) == stats["bytes_up"] > 0
    assert sum(step.nbytes("down") for step in recorder.steps) == stats["bytes_down"] > 0
    assert sum(len(step.of("up")) for step in recorder.steps) == stats["fetches"]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_units_compute_forward_in_order_and_backward_in_the_opposite_one(device, activations):
    recorder, _ = record(device, activations=activations)
    for step in recorder.steps:
        order = [(s.phase, s.unit) for s in step.of("compute") if s.unit in BLOCKS]
        order = [key for key, _ in itertools.groupby(order)]  # a wait for gradients cuts a unit's work in two
        assert order == [("forward", b) for b in BLOCKS] + [("backward", b) for b in reversed(BLOCKS)]


def test_what_goes_to_the_host_and_back_is_told_apart(device):
    if device.type == "cpu":
        pytest.skip("nothing is offloaded from the host")
    recorder, stats = record(device, activations="offload")
    spans = [s for step in recorder.steps for s in step.spans if s.phase == "activations"]
    assert sum(s.nbytes for s in spans if s.lane == "down") == stats["bytes_offloaded"] > 0
    assert sum(s.nbytes for s in spans if s.lane == "up") == stats["bytes_brought_back"] > 0
    assert not any(name == "" for name in recorder.times())


def test_a_lane_does_one_thing_at_a_time(device):
    recorder, _ = record(device)
    for step, lane in itertools.product(recorder.steps, ("up", "compute", "down", "optimizer")):
        spans = [s for s in step.spans if s.lane == lane]
        assert spans and all(s.start <= s.end for s in spans)
        # The optimizer's own code, whose spans name no unit, steps the rest while the thread steps deferred units.
        own = [s for s in spans if lane == "optimizer" and not s.unit]
        rest = [s for s in spans if s not in own]
        for one in (own, rest):
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(one))


@pytest.mark.simgpu
def test_a_clock_that_comes_late_is_waited_for():
    import simgpu

    module = side_by_side.blocks()
    with sp_lightning.stream(module, "simgpu", window=2, units=["Block"]) as handle:
        recorder, inputs = handle.record(), list(side_by_side.inputs(handle.device.torch_device, 6))
        module(inputs[0]).sum().backward()  # makes the clock
        with simgpu.hold(handle.device._clock):
            for x in inputs[1:]:
                module(x).sum().backward()
        assert len(recorder.steps) == 1
        handle.stop_recording()
    assert len(recorder.steps) == 6


def test_causes_sum_to_the_time_of_the_step(device):
    recorder, _ = record(device)
    for step in recorder.steps:
        causes = step.causes()
        assert tuple(causes) == CAUSES and min(causes.values()) >= 0
        assert sum(causes.values()) == pytest.approx(step.seconds)


def test_each_moment_counts_for_its_first_cause():
    work = span("compute", 0, 4), span("compute", 5, 6)
    stall = span("compute", 4, 5, stall="weights")
    host = span("host", 3, 8, "", stall="gradients")
    causes = made(*work, stall, host, span("optimizer", 7, 9)).causes()
    expected = {"weights": 1, "gradients": 2, "network": 0, "activations": 0, "optimizer": 1, "other": 1}
    assert causes == {"compute": 5, "disk": 0, **expected}
    disk = span("host", 4.5, 5.5, "", stall="disk")  # the part that is before the host launches more
    causes = made(*work, stall, host, disk, span("optimizer", 7, 9)).causes()
    assert causes == {"compute": 5, "disk": 0.5, **expected, "weights": 0.5}


def test_what_lies_outside_of_the_step_is_not_its_own():
    assert made(span("compute", -2, 3), span("optimizer", 9, 14)).causes()["other"] == 6


def test_times_are_medians_over_steps():
    def step(number, seconds):
        up = span("up", 0, seconds, phase="weights", nbytes=8), span("up", 5, 5 + seconds, phase="weights", nbytes=8)
        return made(*up, span("compute", 0, 1, phase="forward"), span("compute", 2, 3, phase="forward"), number=number)

    (a,) = unit_times([step(0, 9), step(1, 1), step(2, 2)]).values()
    assert (a.unit, a.up_s, a.up_nbytes, a.forward_s, a.backward_s) == ("a", 2, 8, 2, 0)


def test_a_step_of_all_at_once_is_shared_by_gradient_bytes():
    downs = span("down", 0, 1, "a", nbytes=3), span("down", 1, 2, "b", nbytes=1)
    times = unit_times([made(*downs, span("optimizer", 2, 6, ""))])
    assert (times["a"].step_s, times["b"].step_s) == (3, 1)


def test_every_unit_gets_its_times(device):
    recorder, _ = record(device)
    times = recorder.times()
    assert [name for name in times if name in BLOCKS] == BLOCKS
    assert all(min(t.up_s, t.forward_s, t.backward_s, t.down_s, t.step_s) > 0 for t in times.values())


def test_the_devices_clock_and_the_hosts_are_one(device):
    """Work lies between the readings of the host's clock around the loop, but for how late a busy host wakes the thread
    that is the simulated device's clock."""
    late = 0.5
    begin = time.perf_counter()
    recorder, _ = record(device)
    end = time.perf_counter()
    spans = [s for step in recorder.steps for s in step.spans]
    assert begin - late < min(s.start for s in spans) and max(s.end for s in spans) < end + late


@pytest.mark.simgpu
@measured_again
def test_waiting_for_weights_is_seen_on_a_slow_link():
    import simgpu

    def slow():
        simgpu.config.h2d_us = 20_000

    recorder, _ = record(torch.device("simgpu", 0), before=slow, window=1)
    step = recorder.steps[-1]
    assert step.causes()["weights"] > 0.5 * step.seconds
    assert recorder.times()[BLOCKS[1]].up_s == pytest.approx(0.02, rel=0.5)


@pytest.mark.simgpu
def test_nothing_is_read_before_two_later_passes_have_begun():
    device = torch.device("simgpu", 0)
    module = side_by_side.blocks()
    with sp_lightning.stream(module, device, window=2, units=["Block"]) as handle:
        recorder = handle.record()
        known = []
        for x in side_by_side.inputs(device, 4):
            module(x).sum().backward()
            torch.accelerator.synchronize()
            known.append(len(recorder.steps))
    assert known == [0, 0, 0, 1] and len(recorder.steps) == 4


def test_only_what_is_wanted_is_recorded_and_each_of_that_as_a_whole(device):
    wanted = {1, 2, 5}
    module = side_by_side.blocks()
    with sp_lightning.stream(module, device, window=2, units=["Block"]) as handle:
        recorder = handle.record(Recorder(handle.device, wanted=wanted.__contains__))
        for x in side_by_side.inputs(device, 7):
            module(x).sum().backward()
            with torch.no_grad():
                module(x)  # counted by itself
        handle.stop_recording()
    assert [step.batch for step in recorder.steps if step.trains] == [1, 2, 5]
    assert [step.batch for step in recorder.steps if not step.trains] == [1, 2, 5]
    assert all(len(step.of("down")) == len(recorder.steps[0].of("down")) > 0 for step in recorder.trained())


@pytest.mark.few(1)
def test_of_many_steps_an_observer_records_some_in_a_row_and_those_that_are_asked_for(device):
    module, seen = side_by_side.blocks(), []
    with sp_lightning.stream(module, device, window=2, units=["Block"]) as handle:
        observer = RunReport(handle, every=2, also={KEPT + 3})
        for x in side_by_side.inputs(device, 2 * KEPT + 4):
            module(x).sum().backward()
            seen += observer.update()
        seen += observer.close()
    assert [step.number for step in seen] == [*range(KEPT), KEPT + 3, *range(2 * KEPT, 2 * KEPT + 4)]


@pytest.mark.few(1)
def test_a_timeline_shows_what_of_the_step_before_runs_on_into_it(device, monkeypatch):
    sgd = importlib.import_module("torch.optim.sgd")  # torch.optim has no attribute of that name
    plain, module, seen = sgd.sgd, side_by_side.blocks(), []
    monkeypatch.setattr(sgd, "sgd", lambda *args, **options: (time.sleep(0.01), plain(*args, **options)))
    with sp_lightning.stream(module, device, window=2, units=["Block"]) as handle:
        observer, optimizer = RunReport(handle), side_by_side.sgd(module)
        for x in side_by_side.inputs(device, 6):
            loss = module(x).square().mean()
            optimizer.zero_grad()  # which waits for the step
            with handle.steps.overlapping(optimizer, lambda: True):
                loss.backward()
                optimizer.step()
        seen = observer.close()
        made = Timeline.of("A", seen[-1:], observer.last, 0.0)
    early = [span for span in made.spans if span.start < 0 < span.end]
    assert early and {span.lane for span in early} == {"optimizer"}


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_recording_changes_nothing(device, monkeypatch, activations):
    stream = sp_lightning.stream

    def recorded(*args, **options):
        handle = stream(*args, **options)
        handle.record()
        return handle

    monkeypatch.setattr(sp_lightning, "stream", recorded)
    side_by_side.check(side_by_side.blocks, side_by_side.training(), device, window=2, activations=activations)
