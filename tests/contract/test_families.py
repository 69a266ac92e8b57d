"""Every family of families.py trains as in a plain run, bit for bit, while units stream."""

from __future__ import annotations

import pathlib

import pytest
from families import FAMILIES

import parity

ROOT = pathlib.Path(__file__).parents[2]
OFTEN = {"qwen3", "paligemma"}
SETTINGS = [
    ("cpu", {"window": 2}),
    ("simgpu", {"window": 1}),
    ("simgpu", {"window": 2, "activations": "recompute"}),
    ("simgpu", {"window": 3, "transfer": 2, "activations": "offload", "optimizer_device": "device"}),
    ("simgpu", {"window": 2, "activations": "recompute+offload"}),
]


@pytest.mark.simgpu
@pytest.mark.parametrize(
    ("number", "name"),
    [pytest.param(*one, id=one[1], marks=[pytest.mark.slow] * (one[1] not in OFTEN)) for one in enumerate(FAMILIES)],
)
def test_it_trains_as_in_a_plain_run_and_streams(number, name):
    accelerator, options = SETTINGS[number % len(SETTINGS)]
    case = FAMILIES[name].case
    for library in case.tags:
        pytest.importorskip(library)
    telemetry = parity.check(case, options, accelerator=accelerator)
    assert telemetry["evictions"] > 0 or telemetry["units"] <= options["window"]
    assert telemetry["fetches"] > telemetry["units"]


def test_the_page_names_all_families():
    page = (ROOT / "docs" / "works-with.md").read_text()
    listed = page.partition("<!-- families -->")[2].partition("<!-- end of families -->")[0]
    assert listed.replace(",", "").split() == [*FAMILIES]
    assert f"[{len(FAMILIES)} model families]" in (ROOT / "docs" / "exactness.md").read_text()
