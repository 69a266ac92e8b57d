"""Every family of families.py trains as in a plain run, bit for bit, while units stream."""

from __future__ import annotations

import pathlib

import pytest
from families import FAMILIES

import parity

ROOT = pathlib.Path(__file__).parents[2]
OFTEN = {"qwen3", "deepseek_v3", "mamba", "paligemma", "whisper", "tv_regnet", "unet"}
SETTINGS = [
    ("cpu", {"window": 2}),
    ("simgpu", {"window": 1}),
    ("simgpu", {"window": 2, "activations": "recompute"}),
    ("simgpu", {"window": 3, "transfer": 2, "activations": "offload", "optimizer_device": "device"}),
    ("simgpu", {"window": 2, "activations": "recompute+offload"}),
]


def marks(name: str, accelerator: str, often: bool) -> list[pytest.MarkDecorator]:
    device = [pytest.mark.simgpu] if accelerator == "simgpu" else []
    return device if often else [*device, pytest.mark.slow]


CELLS = [
    pytest.param(name, accelerator, options, id=f"{name}-{number}", marks=marks(name, accelerator, often))
    for index, name in enumerate(FAMILIES)
    for number, (accelerator, options) in enumerate(SETTINGS)
    for often in [name in OFTEN and number == index % len(SETTINGS)]
]


@pytest.mark.parametrize("name, accelerator, options", CELLS)
@pytest.mark.few(2)
def test_it_trains_as_in_a_plain_run_and_streams(name, accelerator, options):
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
