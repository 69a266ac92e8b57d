"""Timelines: measured and simulated ones become traces, come back whole, and are drawn."""

import importlib.util
import json
from dataclasses import replace

import pytest

from sp_lightning.cli import main
from sp_lightning.core.machine import MACHINES
from sp_lightning.core.schedule import Schedule
from sp_lightning.core.simulation import simulate
from sp_lightning.core.telemetry import Span, causes
from sp_lightning.core.unit_numbers import UnitNumbers
from sp_lightning.errors import MissingExtraError, OptionError, TraceError
from sp_lightning.observe import timeline, timeline_plot
from sp_lightning.runtime.recorder import RecordedStep

WORK = (
    Span("up", "blocks.0", 5.0, 5.5, "weights", nbytes=10),
    Span("compute", "blocks.0", 5.5, 5.6, stall="weights"),
    Span("compute", "blocks.0", 5.6, 8.0, "forward"),
    Span("host", "", 8.0, 8.5, stall="gradients"),
    Span("optimizer", "blocks.0", 8.5, 9.0, "step"),
)


def recorded(number=7, start=5.0, end=10.0, spans=WORK):
    return RecordedStep(number=number, kind="train", trains=True, start=start, end=end, spans=spans)


def example():
    return timeline.measured([recorded()], "A model", floor_s=4.0)


def simulation(machine="rtx4090", count=4, window=2):
    units = [UnitNumbers(f"block {i}", 10**8, 10**8, 5 * 10**7, 1e12, 2e12) for i in range(count)]
    return simulate(units, Schedule([unit.up_nbytes for unit in units], window), MACHINES[machine])


def test_times_of_a_measured_one_begin_at_zero():
    made = example()
    assert made.steps == (timeline.Step(name="step 7", start=0.0, end=5.0, floor_s=4.0),)
    assert made.spans[0] == Span("up", "blocks.0", 0.0, 0.5, "weights", nbytes=10)


@pytest.mark.parametrize("made", [example(), timeline.simulated(simulation(), "B")], ids=["measured", "simulated"])
def test_a_trace_comes_back_whole(made, tmp_path):
    back = timeline.load(timeline.save(made, tmp_path / "deep" / "trace.json"))
    assert (back.title, back.source, len(back.steps)) == (made.title, made.source, 1)
    for one, other in zip(made.spans, back.spans, strict=True):
        assert one._replace(start=0, end=0) == other._replace(start=0, end=0)
        assert (other.start, other.end) == pytest.approx((one.start, one.end), abs=1e-9)


def test_a_trace_has_lanes_as_named_threads():
    events = timeline.to_trace(example())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["steps", "up: host to device", "compute", "optimizer on the host", "host thread waits"]
    shown = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert shown[:3] == [("step 7", 0, 5e6), ("blocks.0 weights", 0, 5e5), ("waits for weights", 5e5, 1e5)]


@pytest.mark.parametrize("machine", ["rtx4090", "h100"])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_simulated_step_is_work_and_waiting_and_nothing_else(machine, window):
    result = simulation(machine, window=window)
    made = timeline.simulated(result, "B")
    shares = causes(made.spans, 0.0, result.step_s)
    assert shares["other"] == pytest.approx(0, abs=1e-9)
    assert shares["compute"] == pytest.approx(result.compute_s)
    waits = [shares[cause] for cause in ("weights", "gradients", "optimizer")]
    assert waits == pytest.approx([result.stall_s[lane] for lane in ("up", "down", "optimizer")], abs=1e-9)


def test_the_typical_step_is_the_one_of_median_length():
    steps = [recorded(number, end=5 + seconds) for number, seconds in enumerate([9, 1, 2])]
    made = timeline.measured(steps, "A")
    assert made.step(None).name == "step 2" and made.step(0).name == "step 0"
    with pytest.raises(OptionError, match="step must be from 0 to 2, as recorded, got 3"):
        made.step(3)


def test_the_summary_says_where_the_time_went():
    said = "A model, measured: step 7 took 5 s, floor 4 s (0.80 of the step): compute 48 %, outside of units 30 %, "
    assert timeline.summary(example()).startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is no timeline of sp_lightning: it lacks otherData.format"),
        (json.dumps({"traceEvents": []}), "is no timeline of sp_lightning"),
        (json.dumps({"otherData": {"format": timeline.FORMAT}}), "is damaged: missing or wrong in an event: "),
        (json.dumps(timeline.to_trace(example()) | {"traceEvents": []}), "has 0 spans but no step"),
    ],
)
def test_what_is_no_trace_is_refused(content, said, tmp_path, capsys):
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(TraceError, match=said):
        timeline.load(tmp_path / "trace.json")
    with pytest.raises(SystemExit, match="2"):
        main(["timeline", str(tmp_path / "trace.json")])
    assert said in capsys.readouterr().err


def test_an_unknown_lane_is_damage():
    trace = timeline.to_trace(example())
    trace["traceEvents"][-1]["args"]["lane"] = "sideways"
    with pytest.raises(TraceError, match="in an event: lane 'sideways'; write it again"):
        timeline.from_trace(trace)


def test_a_missing_file_is_said():
    with pytest.raises(TraceError, match=r"nowhere\.json cannot be read: No such file"):
        timeline.load("nowhere.json")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs matplotlib, .* pip install 'sp-lightning\[plots\]'"):
        timeline_plot.figure([example()])


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_a_picture_of_a_run_with_a_disk_has_its_two_lanes():
    pytest.importorskip("matplotlib")
    units = [
        UnitNumbers(f"block {i}", 10**8, 10**8, 10**7, 1e12, 2e12, 0, 0, False, 10**9, 4 * 10**8, 4 * 10**8)
        for i in range(4)
    ]
    made = simulate(units, Schedule([unit.up_nbytes for unit in units], 2), MACHINES["rtx4090"])
    drawn = timeline_plot.figure([timeline.simulated(made, "A model")])
    labels = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert labels == ["disk in", "up", "compute", "down", "optimizer", "disk out", "the step"]
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert {"weights from files", "optimizer's state from disk", "optimizer's state to disk", "waits"} <= {*legend}
    assert made.stall_s["disk"] > 0 and "waits for the disk" in timeline.summary(timeline.simulated(made, "A model"))


def test_a_picture_of_a_run_on_several_machines_has_the_lane_of_the_network():
    pytest.importorskip("matplotlib")
    units = [UnitNumbers(f"block {i}", 10**8, 10**8, 5 * 10**7, 1e12, 2e12, cast=5 * 10**7) for i in range(4)]
    machine = replace(MACHINES["rtx4090"], network_bytes_per_s=1e9)
    made = simulate(units, Schedule([unit.up_nbytes for unit in units], 2), machine, nodes=2)
    shown = timeline.simulated(made, "A model")
    drawn = timeline_plot.figure([shown])
    labels = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert labels == ["up", "compute", "down", "network", "optimizer", "the step"]
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert {"gradients to other machines", "waits", "the step: waits for the network"} <= {*legend}
    assert made.stall_s["network"] > 0 and "waits for the network" in timeline.summary(shown)


def test_a_picture_names_lanes_units_waits_and_the_floor():
    pytest.importorskip("matplotlib")
    (axis,) = timeline_plot.figure([example()]).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["up", "compute", "optimizer", "host", "the step"]
    assert axis.get_title(loc="left") == "A model, measured: step 7 takes 5 s, floor / step 0.80"
    assert {"floor 4 s", "0", "compute 48 %", "10 %"} <= set(texts(axis))


def colours_of_the_step(spans):
    (legend,) = timeline_plot.figure([timeline.measured([recorded(spans=spans)], "A model")]).legends
    return [text.get_text()[10:] for text in legend.get_texts() if text.get_text().startswith("the step: ")]


def test_the_legend_has_the_colours_of_the_step_but_none_that_is_too_narrow_to_see():
    pytest.importorskip("matplotlib")
    waits = [f"waits for {cause}" for cause in ("weights", "gradients", "optimizer")]
    assert colours_of_the_step(WORK) == ["compute", *waits, "outside of units"]
    assert colours_of_the_step([Span("compute", "blocks.0", 5.0, 9.98, "forward")]) == ["compute"]  # 0.4 % are outside


def test_predicted_and_measured_share_an_axis_of_time():
    pytest.importorskip("matplotlib")
    drawn = timeline_plot.figure([timeline.simulated(simulation(), "A model"), example()])
    above, below = drawn.axes
    assert above.get_xlim() == below.get_xlim() and below.get_xlim()[1] >= 5
    assert "simulated" in above.get_title(loc="left") and "measured" in below.get_title(loc="left")


@pytest.mark.parametrize(
    ("unit", "name"), [("model.layers.12", "12"), ("block 3", "3"), ("lm_head", "lm_head"), ("net.head", "head")]
)
def test_units_have_short_names(unit, name):
    assert timeline_plot.short(unit) == name


def test_the_command_draws_one_above_the_other(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    mine = timeline.save(example(), tmp_path / "mine.json")
    other = timeline.save(timeline.simulated(simulation(), "A model"), tmp_path / "other.json")
    with pytest.raises(SystemExit, match="0"):
        main(["timeline", str(mine), "--predicted", str(other), "--plot", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:2]] == [
        "A model, simulated",
        "A model, measured",
    ]
