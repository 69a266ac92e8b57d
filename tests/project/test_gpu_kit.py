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
    env = {**environment, "PYTHONPATH": os.pathsep.join(first), "OMP_NUM_THREADS": "1"}
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
def test_a_whole_run_has_the_bits_of_a_plain_one(tmp_path):
    found, done = run(tmp_path, "exact", "--part", "plain", "--device", "cpu")
    assert [result["difference"] for result in found["results"]] == [None], done.stdout


@slow
@pytest.mark.parametrize(
    "name, few",
    [
        ("step", ["--only", "8192"]),
        ("trainer", ["--only", "llama-1b"]),
        ("lora", []),
        ("infer", ["--only", "4GiB"]),
        ("paper", ["--only", "vit"]),
        ("paper", ["--only", "llava", "--row", "plain", "--row", "transfer=2"]),
        ("big", ["--device-memory", "24GiB"]),
    ],
)
def test_a_campaign_measures_and_keeps_what_it_measured(name, few, tmp_path):
    found, done = run(tmp_path, name, "--device", "cpu", "--minutes", "4", *few)
    facts = found["facts"]
    assert facts["device"] == "cpu" and name in facts["command"]
    assert (facts["commit"] == "unknown") != (ROOT / ".git").exists()
    for entry in found["results"]:
        ours = [row for row in entry["rows"] if row["contender"] == "superpipeline"]
        assert ours and all(row["step_s"] and row["host_peak"] for row in ours), done.stdout
        is_busy = BUSY.search(entry["unplanned"] or "")
        assert entry["differences"] == [] and (entry["bars"] or is_busy), done.stdout
        if entry["setting"]["door"] == "lightning" and not is_busy:
            assert [plan["label"] for plan in entry["plans"]] == [row["label"] for row in ours], done.stdout


@slow
def test_the_first_campaign_checks_and_draws_a_timeline(tmp_path):
    few = ["--only", "16384", "--timeline", str(tmp_path / "timeline")]
    found, done = run(tmp_path, "first", "--device", "cpu", "--minutes", "4", *few)
    checks = [bar for entry in found["results"] if not entry["rows"] for bar in entry["bars"]]
    assert len(checks) > 10 and not [bar for bar in checks if bar["reached"] is False], done.stdout
    rows = [row for entry in found["results"] for row in entry["rows"]]
    assert len(rows) == 5 and {row["error"] for row in rows} == {None}, done.stdout
    assert json.loads((tmp_path / "timeline" / "trace.json").read_text())["traceEvents"]


@slow
@pytest.mark.parametrize(
    "name, few, refused",
    [
        ("first", ["--only", "4 x"], ()),
        ("step", ["--only", "8192"], ("resident= with AdamW", "deepspeed", "torchao")),
        ("big", ["--device-memory", "16GiB"], ()),
    ],
)
def test_a_campaign_runs_through_torchs_cuda(name, few, refused, null_cuda, tmp_path):
    """What it finds has no meaning there; that nothing ends it is what matters."""
    found, done = run(tmp_path, name, "--minutes", "4", *few, environment=null_cuda())
    assert found["facts"]["device"] == "null-cuda", done.stdout
    rows = [row for entry in found["results"] for row in entry["rows"]]
    errors = [row["error"] for row in rows if row["error"]]
    assert any(row["step_s"] and row["device_peak"] for row in rows), done.stdout
    assert [error for error in errors if not any(part in error for part in refused)] == [], done.stdout


@slow
def test_memory_and_copies_are_right_through_torchs_cuda(null_cuda, tmp_path):
    few = ["--only", "nothing", "--timeline", str(tmp_path)]
    found, done = run(tmp_path, "first", *few, environment=null_cuda(numbers=True))
    bars = {bar["bar"]: bar for entry in found["results"] for bar in entry["bars"]}
    right = [bar["reached"] for name, bar in bars.items() if "copies" in name or "slab" in name or "norms" in name]
    assert right == [True] * 8, done.stdout


@slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("part", ["zoo", "blocks", "optimizer", "programs"])
def test_cells_are_exact_through_torchs_cuda(part, late, null_cuda, tmp_path):
    few = ["--part", part, "--minutes", "0.8", "--jobs", "1"]
    found, done = run(tmp_path, "exact", *few, environment=null_cuda(numbers=True, late=late))
    assert found["results"] and {result["difference"] for result in found["results"]} == {None}, done.stdout


# ---- what the notes say of them


def test_each_campaign_has_a_claim_and_a_script():
    scripts = {path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py")}
    assert set(publish.CLAIMS) == scripts - {"campaign", "measured", "predicted", "publish"}


def test_the_notes_say_what_the_result_files_say():
    notes = publish.NOTES.read_text()
    assert notes == publish.written(notes, publish.table(publish.results()))
