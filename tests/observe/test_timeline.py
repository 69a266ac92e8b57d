"""The timeline: recorded steps as a trace and as a picture."""

import importlib.util
import json

import pytest

from sp_lightning.errors import MissingExtraError
from sp_lightning.host.recorder import RecordedStep
from sp_lightning.host.telemetry import Span
from sp_lightning.observe.timeline import Timeline, short

WORK = (
    Span("up", "blocks.0", 5.0, 5.5, "weights", nbytes=10),
    Span("compute", "blocks.0", 5.5, 5.6, stall="weights"),
    Span("compute", "blocks.0", 5.6, 8.0, "forward"),
    Span("host", "", 8.0, 8.5, stall="gradients"),
    Span("optimizer", "blocks.0", 8.5, 9.0, "step"),
)


def recorded(number=7, start=5.0, end=10.0, spans=WORK):
    return RecordedStep(number=number, trains=True, start=start, end=end, spans=spans)


def example():
    return Timeline.of("A model", [recorded()], [], floor_s=4.0)


def test_times_begin_at_zero():
    assert example().spans[0] == Span("up", "blocks.0", 0.0, 0.5, "weights", nbytes=10)


def test_of_the_step_before_only_what_runs_on_is_shown():
    late, early = Span("optimizer", "blocks.1", 4.0, 6.0, "step"), Span("optimizer", "blocks.2", 3.0, 4.0, "step")
    made = Timeline.of("A model", [recorded()], [recorded(6, 0.0, 5.0, (early, late)), recorded()], floor_s=4.0)
    assert [span.unit for span in made.spans if span.start < 0] == ["blocks.1"]
    assert len(made.spans) == len(WORK) + 1


def test_a_trace_has_lanes_as_named_threads():
    events = example().trace()["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["steps", "host to device", "compute", "optimizer on the host", "host thread waits"]
    shown = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert shown[:3] == [("step 7", 0, 5e6), ("blocks.0 weights", 0, 5e5), ("waits for weights", 5e5, 1e5)]


def test_trace_and_picture_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = example().write(tmp_path / "deep")
    assert json.loads(path.read_text())["otherData"] == {"title": "A model"}
    assert (tmp_path / "deep" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_the_step_of_median_length():
    pytest.importorskip("matplotlib")
    steps = [recorded(number, end=5 + seconds) for number, seconds in enumerate([9, 1, 2])]
    (axis,) = Timeline.of("A model", steps, [], floor_s=1.0).picture().axes
    assert axis.get_title(loc="left").startswith("A model: step 2 takes 2e+03 ms")


def test_a_picture_names_lanes_units_and_waits():
    pytest.importorskip("matplotlib")
    (axis,) = example().picture().axes
    lanes = ["host to device", "compute", "optimizer on the host", "host thread waits"]
    assert [label.get_text() for label in axis.get_yticklabels()] == lanes
    legend = {text.get_text() for text in axis.get_legend().get_texts()}
    assert legend == {"host to device: weights", "waits", "compute: forward", "optimizer on the host: step", "floor"}
    assert {text.get_text() for text in axis.texts} == {"0"}
    assert axis.get_title(loc="left").endswith("compute 48%, waits for weights 2%, waits for gradients 10%, waits for "
                                               "optimizer 10%, outside of units 30%")  # fmt: skip


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs matplotlib, .* pip install 'sp-lightning\[plots\]'"):
        example().picture()


@pytest.mark.parametrize(
    ("unit", "name"), [("model.layers.12", "12"), ("block 3", "3"), ("lm_head", "lm_head"), ("net.head", "head")]
)
def test_units_have_short_names(unit, name):
    assert short(unit) == name
