"""Every family of families.py trains as in a plain run, bit for bit, while units stream. docs/models.md lists them."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize("page, said", [("docs/exactness.md", "[{} model families]")])
def test_a_page_says_how_many_families_there_are(page, said):
    assert said.format(len(FAMILIES)) in (ROOT / page).read_text()


@pytest.mark.slow
def test_the_documented_table_is_what_the_command_prints_without_training():
    path = ROOT / "benchmarks" / "models.py"
    spec = importlib.util.spec_from_file_location("models_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert benchmark.table(benchmark.rows(train=False)) in (ROOT / "docs" / "models.md").read_text()
