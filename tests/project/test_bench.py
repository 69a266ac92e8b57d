"""benchmarks/bench: contenders do the same work, each in processes of its own, and losses that differ are told."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import compare
import contenders
import pytest

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
    assert list(rows) == [
        "plain",
        "superpipeline window=1",
        "superpipeline window=auto",
        "fsdp2",
        "deepspeed",
        "torchao",
    ]
    assert found["differences"] == [] and found["setting"]["clip"] == 1.0 and found["versions"]["torch"]
    for label in ("plain", "superpipeline window=1", "superpipeline window=auto", "fsdp2"):
        assert len(rows[label]["repetitions"]) == 2 and rows[label]["step_s"]["median"] > 0 < rows[label]["host_peak"]
        assert f"\n{label} " in done.stdout and repr(rows[label]["losses"][-1]) in done.stdout
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("1/2", "2/2"))]
    assert said[:4] == ["plain", "superpipeline", "superpipeline", "fsdp2"] and said[6:10] == said[:4]


@pytest.mark.parametrize("window", [1, "auto"])
def test_ours_has_the_losses_of_plain(window):
    assert taken("superpipeline", window=window)["losses"] == taken("plain")["losses"]


def test_fsdp2_has_the_losses_of_plain_to_rounding():
    assert taken("fsdp2")["losses"] == pytest.approx(taken("plain")["losses"], rel=1e-5)


def test_a_loss_that_differs_is_told_with_its_step():
    rows = [row("plain", [3.0, 2.0], [3.0, 2.0]), row("superpipeline", [3.0, 2.5], [3.0, 2.5], window=1)]
    said = ["superpipeline window=1 has loss 2.5 at step 2, plain 2.0"]
    assert compare.differences(SETTING, rows) == said and f"DIFFERS: {said[0]}" in compare.table(SETTING, rows)
