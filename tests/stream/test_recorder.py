"""What the recorder says about steps: complete, in order, on one clock, and without any effect on them."""

import itertools

import pytest
import side_by_side
import torch

import sp_lightning
from sp_lightning.host.recorder import RecordedStep, Recorder
from sp_lightning.host.telemetry import CAUSES, Span
from sp_lightning.stream import activations as saved

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
    return RecordedStep(number=number, trains=True, start=start, end=end, spans=spans)


def test_copies_add_up_to_the_counters(device):
    recorder, stats = record(device)
    assert sum(step.nbytes("up") for step in recorder.steps) == stats["bytes_up"] - stats["resident_root_bytes"] > 0
    assert 0 < sum(step.nbytes("down") for step in recorder.steps) <= stats["bytes_down"]
    assert sum(len(step.of("up")) for step in recorder.steps) == stats["fetches"]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_units_compute_forward_in_order_and_backward_in_reverse(device, activations):
    recorder, _ = record(device, activations=activations)
    for step in recorder.steps:
        order = [(s.phase, s.unit) for s in step.of("compute") if s.unit in BLOCKS]
        order = [key for key, _ in itertools.groupby(order)]  # a wait for gradients cuts a unit's work in two
        assert order == [("forward", b) for b in BLOCKS] + [("backward", b) for b in reversed(BLOCKS)]


def test_what_goes_to_the_host_and_back_is_told_apart(device, monkeypatch):
    monkeypatch.setattr(saved, "SMALLEST", 1)
    if device.type == "cpu":
        pytest.skip("nothing is offloaded from the host")
    recorder, stats = record(device, activations="offload")
    spans = [s for step in recorder.steps for s in step.spans if s.phase == "activations"]
    down, up = (sum(s.nbytes for s in spans if s.lane == lane) for lane in ("down", "up"))
    assert stats["bytes_down"] > down == up > 0


def test_a_lane_does_one_thing_at_a_time(device):
    recorder, _ = record(device)
    lanes = "up", "compute", "down", "optimizer"
    assert {s.lane for step in recorder.steps for s in step.spans} >= {*lanes}  # or in the next pass
    for step, lane in itertools.product(recorder.steps, lanes):
        spans = [s for s in step.spans if s.lane == lane]
        assert all(s.start <= s.end for s in spans)
        # The optimizer's own code, whose spans name no unit, steps the rest while the thread steps deferred units.
        own = [s for s in spans if lane == "optimizer" and not s.unit]
        rest = [s for s in spans if s not in own]
        for one in (own, rest):
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(one))


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
    expected = {"weights": 1, "gradients": 2, "activations": 0, "optimizer": 1, "other": 1}
    assert causes == {"compute": 5, "disk": 0, **expected}
    disk = span("host", 4.5, 5.5, "", stall="disk")  # the part that is before the host launches more
    causes = made(*work, stall, host, disk, span("optimizer", 7, 9)).causes()
    assert causes == {"compute": 5, "disk": 0.5, **expected, "weights": 0.5}


@pytest.mark.simgpu
def test_waiting_for_weights_is_seen_on_a_slow_link():
    """In one of some tries: whatever else a machine does makes a step slower now and then."""
    import simgpu

    def slow():
        simgpu.config.h2d_us = 20_000

    def share():
        recorder, _ = record(torch.device("simgpu", 0), before=slow, window=1)
        step = recorder.steps[-1]
        return step.causes()["weights"] / step.seconds

    assert any(share() > 0.5 for _ in range(5))


def test_only_wanted_batches_are_recorded_and_each_as_a_whole(device):
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
    assert all(len(step.of("down")) == len(recorder.steps[0].of("down")) > 0 for step in recorder.steps if step.trains)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_recording_changes_nothing(device, monkeypatch, activations):
    stream = sp_lightning.stream

    def recorded(*args, **options):
        handle = stream(*args, **options)
        handle.record()
        return handle

    monkeypatch.setattr(sp_lightning, "stream", recorded)
    side_by_side.check(side_by_side.blocks, side_by_side.training(), device, window=2, activations=activations)


@pytest.mark.simgpu
def test_what_is_still_queued_is_in_the_record():
    import simgpu

    def slow():
        simgpu.config.h2d_us = 20_000

    recorder, stats = record(torch.device("simgpu", 0), steps=2, before=slow)
    assert sum(len(step.of("up")) for step in recorder.steps) == stats["fetches"]
