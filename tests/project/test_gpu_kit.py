"""The campaigns for real hardware work: each runs here in small, its result file says what it found, and the notes
says no more than result files do."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import publish
import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
slow = pytest.mark.slow
BUSY = re.compile("which differ by more than|was not measured within")  # refused where something else runs


def run(tmp_path, name, *arguments, environment=os.environ):
    pytest.importorskip("transformers")
    path = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / f"{name}.py"), "--small", "--json", str(path)]
    first = filter(None, [environment.get("PYTHONPATH"), str(ROOT), *sys.path])
    env = {**environment, "PYTHONPATH": os.pathsep.join(first)}
    done = subprocess.run([*command, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(path.read_text()), done


def differences(tmp_path, part, device, minutes):
    found, done = run(tmp_path, "exact", "--part", part, "--device", device, "--minutes", minutes, "--jobs", "1")
    assert found["results"] and done.returncode == 0 and "0 differ" in done.stdout, done.stdout
    return {result["difference"] for result in found["results"]}


@slow
@pytest.mark.parametrize("part", ["zoo", "blocks", "optimizer"])
def test_exactness_is_compared_cell_by_cell(part, tmp_path):
    assert differences(tmp_path, part, "cpu", "0.4") == {None}


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["zoo", "blocks", "optimizer"])
def test_runs_on_a_gpu_have_the_plain_runs_bits(part, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    assert differences(tmp_path, part, "cuda", "3") == {None}


@slow
def test_whole_runs_are_repeated_bit_for_bit(tmp_path):
    found, done = run(tmp_path, "exact", "--part", "repeat", "--device", "cpu")
    assert [result["difference"] for result in found["results"]] == [None, None], done.stdout


@slow
def test_transformers_trainer_is_compared_with_stock(tmp_path):
    found, done = run(tmp_path, "trainer", "--steps", "6", "--device", "cpu")
    (entry,) = found["results"]
    assert [bar["reached"] for bar in entry["bars"]] == [True] and done.returncode == 0, done.stdout
    assert [row["error"] for row in entry["rows"]] == [None] * 3
    assert len({row["weights"] for row in entry["rows"]}) == 1  # on the CPU, whose optimizer is the same


@slow
@pytest.mark.parametrize(
    "name, few",
    [
        ("fits", ["--model", "llama-1b", "--tokens", "2048"]),
        ("peers", []),
        ("big", ["--device-memory", "24GiB"]),
        ("curve", ["--model", "llama-1b"]),
    ],
)
def test_a_campaign_measures_and_keeps_what_it_measured(name, few, tmp_path):
    found, done = run(tmp_path, name, "--device", "cpu", "--minutes", "2", *few)
    first = found["results"][0]
    assert first["rows"] and any(row["step_s"] for row in first["rows"] if row["contender"] == "superpipeline"), (
        done.stdout
    )
    assert first["differences"] == [] and found["facts"]["device"] == "cpu"
    ours = [row["label"] for row in first["rows"] if row["contender"] == "superpipeline" and row["step_s"]]
    if BUSY.search(first["unplanned"] or ""):  # then there are no rates to plan with
        assert f"no plans: {first['unplanned']}" in done.stdout and first["plans"] == []
        return
    assert [plan["label"] for plan in first["plans"]] == ours and all(plan["step_off"] > -1 for plan in first["plans"])


@slow
@pytest.mark.parametrize(
    "name, few",
    [
        ("fits", ["--model", "llama-1b", "--tokens", "2048"]),
        ("peers", ["--minutes", "1"]),
        ("big", ["--device-memory", "16GiB"]),
    ],
)
def test_a_campaign_runs_through_torchs_cuda(name, few, null_cuda, tmp_path):
    """What it finds has no meaning there; that nothing ends it is what matters."""
    found, done = run(tmp_path, name, *few, environment=null_cuda())
    assert found["facts"]["device"] == "null-cuda" and found["results"], done.stdout
    for result in found["results"]:
        ours = [row for row in result["rows"] if row["contender"] in ("plain", "superpipeline", "fsdp2")]
        assert ours and {row["error"] for row in ours} <= {None, "not begun: no time left"}, done.stdout
        assert result is not found["results"][0] or not any(row["error"] for row in ours), done.stdout
        assert result["unplanned"] is None or BUSY.search(result["unplanned"]), done.stdout
        assert all(plan["device_off"] is not None for plan in result["plans"])


@slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("part", ["zoo", "blocks", "optimizer", "programs"])
def test_cells_are_exact_through_torchs_cuda(part, late, null_cuda, tmp_path):
    few = ["--part", part, "--minutes", "0.8", "--jobs", "1"]
    found, done = run(tmp_path, "exact", *few, environment=null_cuda(numbers=True, late=late))
    assert found["results"] and {result["difference"] for result in found["results"]} == {None}, done.stdout


# ---- what the notes say of them


def test_the_notes_say_what_the_result_files_say():
    notes = publish.NOTES.read_text()
    assert notes == publish.written(notes, publish.table(publish.results()))
