"""The campaigns for real hardware work: each runs here in small, and its result file says what it found."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(tmp_path, name, *arguments):
    pytest.importorskip("transformers")
    path = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / f"{name}.py"), "--small", "--json", str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([*command, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(path.read_text()), done


@pytest.mark.parametrize("part", ["zoo", "blocks"])
def test_exactness_is_compared_cell_by_cell(part, tmp_path):
    found, done = run(tmp_path, "exact", "--part", part, "--device", "cpu", "--minutes", "0.4", "--jobs", "1")
    assert found["results"] and {result["difference"] for result in found["results"]} == {None}, done.stdout
    assert done.returncode == 0 and "0 differ" in done.stdout


def test_whole_runs_are_repeated_bit_for_bit(tmp_path):
    found, done = run(tmp_path, "exact", "--part", "repeat", "--device", "cpu")
    assert [result["difference"] for result in found["results"]] == [None, None], done.stdout


@pytest.mark.parametrize("name", ["fits", "peers", "big", "curve"])
def test_a_campaign_measures_and_keeps_what_it_measured(name, tmp_path):
    found, done = run(tmp_path, name, "--device", "cpu", "--minutes", "0.01")
    first = found["results"][0]
    assert first["rows"] and any(row["step_s"] for row in first["rows"] if row["contender"] == "superpipeline"), (
        done.stdout
    )
    assert first["differences"] == [] and found["facts"]["device"] == "cpu"


def test_host_memory_is_checked_one_promise_at_a_time(tmp_path):
    found, done = run(tmp_path, "pinned", "--device", "cpu")
    assert len(found["results"]) == 6 and done.returncode == 0, done.stdout
