"""benchmarks/bench: contenders do the same work, each in processes of its own, and losses that differ are told."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import compare
import contenders
import pytest
import shapes
import torch

from sp_lightning.errors import OptionError

pytest.importorskip("transformers")

PROGRAM = pathlib.Path(compare.__file__)
LIMIT_S = 1200  # ten processes that import all libraries, a minute each where other tests run, and some to spare
SETTING = compare.setting_of(model="llama-tiny", batch=1, seq=8, steps=2, repetitions=2, device="cpu")


def run(tmp_path, *arguments):
    command = [sys.executable, str(PROGRAM), "--json", str(tmp_path / "found.json"), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def taken(name, **options):
    return contenders.take_turn(SETTING, name, options)


def row(name, *losses_of_turns, **options):
    turns = [{"seconds": 0.5, "losses": list(losses), "device_peak": 7, "host_peak": 9} for losses in losses_of_turns]
    return compare.Row(name, options, turns=turns)


@pytest.mark.slow
def test_the_command_measures_all_in_turns(tmp_path):
    done = run(tmp_path, *"--device cpu --batch 1 --seq 8 --steps 2 --repetitions 2 --windows 1 auto".split())
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "superpipeline window=1", "superpipeline window=auto", "fsdp2", "deepspeed"]
    assert found["differences"] == [] and found["setting"]["clip"] == 1.0 and found["versions"]["torch"]
    for label in ("plain", "superpipeline window=1", "superpipeline window=auto", "fsdp2"):
        assert len(rows[label]["repetitions"]) == 2 and rows[label]["step_s"]["median"] > 0 < rows[label]["host_peak"]
        assert f"\n{label} " in done.stdout and repr(rows[label]["losses"][-1]) in done.stdout
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("1/2", "2/2"))]
    assert said[:4] == ["plain", "superpipeline", "superpipeline", "fsdp2"] and said[5:9] == said[:4]


@pytest.mark.parametrize("window", [1, "auto"])
def test_ours_has_the_losses_of_plain(window):
    assert taken("superpipeline", window=window)["losses"] == taken("plain")["losses"]


def test_fsdp2_has_the_losses_of_plain_to_rounding():
    assert taken("fsdp2")["losses"] == pytest.approx(taken("plain")["losses"], rel=1e-5)


def test_gradients_are_clipped_unless_that_is_off():
    clipped, loose = (
        contenders.take_turn(dataclasses.replace(SETTING, clip=clip), "plain", {})["losses"] for clip in (1e-9, None)
    )
    assert SETTING.clip == 1.0 and clipped[0] == loose[0] and clipped[1:] != loose[1:]
    assert compare.setting_of(device="cpu", clip=None).clip is None and compare._norm("none") is None


@pytest.mark.simgpu
def test_on_a_device_the_peak_is_the_allocators():
    import simgpu.lightning  # noqa: F401

    there = dataclasses.replace(SETTING, device="simgpu", seq=64)
    ours = contenders.take_turn(there, "superpipeline", {"window": 1})
    torch.accelerator.reset_peak_memory_stats()
    plain = contenders.take_turn(there, "plain", {})
    assert 0 < ours["device_peak"] < plain["device_peak"] <= plain["reserved_peak"]
    assert ours["losses"][0] == plain["losses"][0]


def test_a_loss_that_differs_is_told_with_its_step():
    rows = [row("plain", [3.0, 2.0], [3.0, 2.0]), row("superpipeline", [3.0, 2.5], [3.0, 2.5], window=1)]
    said = ["superpipeline window=1 has loss 2.5 at step 2, plain 2.0"]
    assert compare.differences(SETTING, rows) == said and f"DIFFERS: {said[0]}" in compare.table(SETTING, rows)


def test_on_a_gpu_losses_count_as_far_as_rows_repeat_them():
    gpu = dataclasses.replace(SETTING, device="cuda")
    there = {"optimizer_device": "device"}
    plain, unsteady = row("plain", [3.0, 2.0], [3.0, 2.0]), row("superpipeline", [3.0, 2.5], [3.0, 2.6], **there)
    assert compare.differences(gpu, [plain, unsteady]) == []
    assert compare.differences(gpu, [plain, row("superpipeline", [3.0, 2.5], [3.0, 2.5], **there)])
    assert compare.differences(gpu, [plain, row("superpipeline", [3.0, 2.5], [3.0, 2.5])]) == []  # steps on the host
    assert compare.differences(gpu, [plain, row("superpipeline", [3.1, 2.0])])


@pytest.mark.parametrize(
    "code, error",
    [
        ("import sys; sys.exit('no room')", "ended with status 1: no room"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9: "),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_a_process_that_fails_ends_its_row_alone(code, error, tmp_path, monkeypatch):
    (tmp_path / "contenders.py").write_text(code)
    monkeypatch.setattr(compare, "HERE", tmp_path)
    rows, kept = [compare.Row("plain"), compare.Row("fsdp2")], []
    setting = dataclasses.replace(SETTING, time_limit=0.5 if "sleep" in code else 60)
    compare.compare(setting, rows, lambda line: None, keep=lambda: kept.append(rows[0].error))
    assert [row.error for row in rows] == [error] * 2 and kept == [error] * 2  # once each: no second turn


def test_no_turn_begins_without_time_left():
    rows = [compare.Row("plain")]
    compare.compare(SETTING, rows, lambda line: None, left_s=lambda: 0)
    assert rows[0].error == "not begun: no time left"


def test_weights_are_the_same_every_time_and_no_two_rows_alike():
    one, other = (shapes.build("llama-tiny:2") for _ in range(2))
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    rows = one.model.layers[0].mlp.up_proj.weight
    assert len(rows.unique(dim=0)) == len(rows) and len(one.model.layers) == 2


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(OptionError, match=r"model must be one of llama-tiny, .*, got 'llama-2t'"):
        compare.setting_of(model="llama-2t")
