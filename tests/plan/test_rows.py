"""Planned steps beside measured ones: each row of benchmarks/results that has a measured step and that a plan is for.

Known of a row: what a step of its version costs, and the machine as measured in its file. Replaced are
rates that a compiler or a cache spoilt (benchmarks/fit_lanes.py says which, and by what). No row is out of reach.
"""

import dataclasses
import importlib.util
import json
import pathlib
import sys

import pytest

from sp_lightning.plan import plan
from sp_lightning.plan.machines import REACHED, Reached
from sp_lightning.plan.model import batch_of, kind_of

ROOT = pathlib.Path(__file__).parents[2]
OTHERS = {"accelerate", "deepspeed", "fsdp2"}  # frameworks for which nothing is planned

_spec = importlib.util.spec_from_file_location("fit_lanes", ROOT / "benchmarks" / "fit_lanes.py")
fit_lanes = sys.modules["fit_lanes"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fit_lanes)

ROWS = fit_lanes.measured()
each_row = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])


@pytest.fixture(scope="module")
def fit():
    return fit_lanes.Fit.around(ROWS, REACHED)


@each_row
def test_a_row_s_step_is_planned_within_15_percent(row):
    assert row.predicted_s(REACHED) == pytest.approx(row.step_s, rel=0.15)


@each_row
def test_a_row_is_within_25_percent_of_the_fit_to_others(row, fit):
    assert row.predicted_s(fit.best(without=row)) == pytest.approx(row.step_s, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.window], ids=lambda row: row.name)
def test_a_streamed_row_s_peak_is_planned_within_2_percent(row):
    pytest.importorskip("transformers")
    batch = batch_of(*kind_of(row.model), row.rows, row.length)
    options = {"window": row.window, "transfer": 1, "activations": "recompute"}
    found = plan(row.model, batch, precision="bf16-mixed", machine="h200", **options).device_terms
    nbytes = sum(nbytes for name, nbytes in found.items() if name != "reserve")
    assert nbytes == pytest.approx(row.device_peak, rel=0.02)


def test_the_rates_are_those_of_the_fit(fit):
    found = fit.best()
    for name in fit_lanes.FITTED:
        assert getattr(REACHED, name) == pytest.approx(getattr(found, name), rel=0.01), name


def test_all_rows_share_at_most_six_constants():
    assert len(dataclasses.fields(Reached)) <= 6


def test_only_rows_of_other_frameworks_are_not_planned():
    rows = [
        row
        for path in fit_lanes.RESULTS.glob("*.json")
        for result in json.loads(path.read_text())["results"]
        for row in result.get("rows", [])
        if row["step_s"] is not None
    ]
    assert {row["contender"] for row in rows} == OTHERS | {"plain", "stock", "superpipeline"}
    assert len(ROWS) == sum(row["contender"] not in OTHERS for row in rows) == 10
