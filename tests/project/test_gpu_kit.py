"""The campaigns for real hardware work: each runs here in small, its result file says what it found, and the notes
says no more than result files do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import campaign
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
def test_processes_of_a_campaign_end_when_asked_also_within_a_fit():
    code = """
import sys, threading, time, os, signal
import exact, lightning as L, models
exact.end_when_asked()
class Asked(L.Callback):
    def on_train_start(self, trainer, module):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
module = models.ZooModule(next(iter(models.ZOO.values())))
L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, callbacks=Asked()).fit(
    module, models.loader(next(iter(models.ZOO.values())), 1))
"""
    folders = [ROOT / "benchmarks" / "gpu", ROOT / "tests" / "rigs", ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, *filter(None, sys.path)]))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 70, done.stderr


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


def test_a_whole_run_does_not_outlast_its_campaign(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    import exact

    monkeypatch.setattr(campaign, "GRACE_S", 0)
    command = ["exact.py", "--part", "repeat", "--part", "curves", "--device", "cpu", "--small", "--minutes", "0.02"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(tmp_path / "result.json")])
    assert exact.main() == 0
    assert capsys.readouterr().out.count("no time left") == 2


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


@slow
def test_a_campaign_measures_the_checkout_that_it_is_of(tmp_path):
    code = "import campaign, sp_lightning; print(sp_lightning.__file__)"
    other = tmp_path / "sp_lightning"
    other.mkdir()
    (other / "__init__.py").touch()
    path = [str(ROOT / "benchmarks" / "gpu"), str(tmp_path), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str(ROOT / "sp_lightning" / "__init__.py"), done.stderr


@slow
def test_host_memory_is_checked_one_promise_at_a_time(tmp_path):
    found, done = run(tmp_path, "pinned", "--device", "cpu")
    assert len(found["results"]) == 6 and done.returncode == 0, done.stdout


@slow
@pytest.mark.parametrize("name", ["fits", "big"])
def test_what_a_campaign_would_find_can_be_predicted_anywhere(name, tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / f"{name}.py"), "--predict", "h200"]
    few = ["--model", "llama-1b", "--tokens", "2048"] if name == "fits" else ["--blocks", "25"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([*command, *few], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert "superpipeline window=" in done.stdout and " binds" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
    for limit, needed in re.findall(r"in (\d+)GiB\n.* ([\d.]+) GiB ", done.stdout):
        assert float(needed) < 0.85 * int(limit)  # else there is no run, as an allocator can not use all it may have


def test_a_machine_that_a_campaign_measured_is_planned_for(tmp_path):
    import measured

    listed = measured.machine("h200")
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"results": [{"machine": None}, {"machine": dataclasses.asdict(listed)}]}))
    assert listed.name == "h200" and measured.machine(str(path)) == listed


@pytest.mark.parametrize("results", ["[]", '[{"machine": null}]', '[{"machine": {"dram_bytes_per_s": 1}}]'])
def test_a_file_without_the_rates_of_a_plan_is_refused(results, tmp_path):
    import measured

    (tmp_path / "none.json").write_text(f'{{"results": {results}}}')
    with pytest.raises(argparse.ArgumentTypeError, match="or a result file with a machine"):
        measured.machine(str(tmp_path / "none.json"))


def test_an_unknown_machine_is_refused():
    import measured

    with pytest.raises(argparse.ArgumentTypeError, match=r"h2000 is not one of rtx3060, .*, or a result file"):
        measured.machine("h2000")


NOISY = "sp_lightning.errors.MeasurementError: products reached 2 and then 1 a second, which differ by more than 15%"


@pytest.fixture
def campaign_of(tmp_path, monkeypatch, capsys):
    """Runs a campaign of one comparison, whose machine is measured by a program of this code."""
    pytest.importorskip("transformers")
    import measured

    def take_turn(setting, rows, say, left_s, keep):
        for row in rows:
            row.turns.append({"seconds": 0.5, "losses": [3.0], "device_peak": None, "host_peak": 9})

    def run(code):
        (tmp_path / "program.py").write_text(code)
        monkeypatch.setattr(measured, "compare", take_turn)
        monkeypatch.setattr(measured, "__file__", str(tmp_path / "program.py"))
        path = tmp_path / "result.json"
        options = measured.parser("").parse_args(["--small", "--device", "cpu", "--json", str(path)])
        setting = {"precision": "bf16-mixed", "seq": 8, "batch": 1}
        row = measured.Row("superpipeline", {"window": 1})
        status = measured.run_all(campaign.Campaign("fits", options), [measured.Comparison("one", setting, [row])])
        (found,) = json.loads(path.read_text())["results"]
        return status, found, capsys.readouterr().out

    return run


@slow
def test_rows_of_a_measured_machine_stand_beside_their_plans(campaign_of):
    code = "import dataclasses, json\nfrom sp_lightning.plan.machines import MACHINES\n"
    _, found, _ = campaign_of(code + "print(json.dumps(dataclasses.asdict(MACHINES['h200'])))")
    (plan,) = found["plans"]
    assert plan["label"] == "superpipeline window=1" and plan["step_off"] == plan["step_s"] / 0.5 - 1
    assert found["machine"]["name"] == "h200" and found["unplanned"] is None


@slow
def test_rows_are_measured_where_the_machine_is_too_noisy(campaign_of):
    status, found, said = campaign_of(f"import sys\nsys.exit('a traceback\\n{NOISY}')")
    assert [row["step_s"] for row in found["rows"]] == [{"median": 0.5}] and status == 0
    assert found["machine"] is None and found["plans"] == []
    assert f"no plans: {found['unplanned']}" in said and found["unplanned"].endswith(NOISY)


@slow
def test_rows_are_measured_where_the_machine_takes_too_long(campaign_of, monkeypatch):
    import measured

    monkeypatch.setattr(measured, "MEASURED_S", 0.2)
    _, found, _ = campaign_of("import time\ntime.sleep(60)")
    assert [row["error"] for row in found["rows"]] == [None] and found["plans"] == []
    assert found["unplanned"] == "the machine was not measured within 0.2 s"


# ---- what the notes say of them


def test_the_notes_say_what_the_result_files_say():
    notes = publish.NOTES.read_text()
    assert notes == publish.written(notes, publish.table(publish.results()))


def result(folder, name, device, *entries, small=False):
    contents = {"campaign": name, "small": small, "facts": {"device": device}, "results": list(entries)}
    (folder / f"{name}-{device}.json").write_text(json.dumps(contents))


ROW = {"label": "superpipeline window=2", "contender": "superpipeline", "options": {"window": 2, "transfer": 1}}
ROW |= {"step_s": {"median": 0.25}, "device_peak": 3 * 2**30, "host_peak": 2**30, "error": None}
BARS = [{"bar": "at least 0.95", "measured": "0.97 of plain's speed", "reached": True}]
BARS += [{"bar": "at least 60% less", "measured": "41% less", "reached": False}]


def test_every_bar_of_a_result_stands_in_the_table_also_a_missed_one(tmp_path):
    result(tmp_path, "fits", "nvidia-x", {"label": "llama", "bars": BARS, "rows": [ROW]})
    result(tmp_path, "exact", "nvidia-x", {"part": "zoo", "difference": None}, {"part": "zoo", "difference": "loss"})
    table = publish.table(publish.results(tmp_path))
    assert "| llama: at least 0.95 | 0.97 of plain's speed |" in table
    assert "| llama: at least 60% less | 41% less (missed) |" in table
    assert "superpipeline window=2 250 ms, 3.0 GiB" in table and "zoo | 2 compared, 1 differ |" in table
    assert table.count("not measured") == 5 and "results/fits-nvidia-x.json" in table


def test_runs_without_a_real_device_or_of_tiny_models_are_no_results(tmp_path):
    cases = [
        ("fits", "cpu", False),
        ("big", "simgpu", False),
        ("curve", "null-cuda", False),
        ("exact", "nvidia-x", True),
    ]
    for name, device, small in cases:
        result(tmp_path, name, device, small=small)
    assert publish.table(publish.results(tmp_path)).count("not measured") == 7


def test_the_picture_is_drawn_from_the_result_file(tmp_path):
    pytest.importorskip("matplotlib")
    publish.draw([{"label": "llama", "rows": [ROW, {**ROW, "step_s": None}]}], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
