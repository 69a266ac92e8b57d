"""``python -m sp_lightning launch``: a script runs unchanged, as Python runs it, and its models stream."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from sp_lightning.cli import main

pytest.importorskip("accelerate", reason="sp_lightning.hf is for accelerate")

SCRIPT = """
    import json
    import sys

    import accelerate
    import torch
    import beside
    from sp_lightning.hf import streaming as _
    from sp_lightning.stream.parameters import unit_of

    accelerator = accelerate.Accelerator()
    net = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    from sp_lightning.hf.context import open_contexts
    options = open_contexts[0].options
    found = [__name__, sys.argv, unit_of(net[0].weight) is not None, options.window, options.units, beside.NAME]
    print(json.dumps(found))
    if "--fail" in sys.argv:
        open("gone.txt")
    if "--twice" in sys.argv:
        from sp_lightning import handle
        handle.stream(net, "cpu", window=1)
    if "--exit" in sys.argv:
        sys.exit(3)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "folder/beside.py").write_text("NAME = 'beside'")
    monkeypatch.setattr(sys, "argv", ["sp_lightning"])
    yield "folder/script.py"
    sys.modules.pop("beside", None)


def launch(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["launch", *arguments])
    return ended.value.code


def test_a_script_gets_its_own_arguments_while_its_models_stream(script, capsys):
    path = list(sys.path)
    code = launch("--window", "1", "--units", "Linear,LayerNorm", "--", script, "--window", "7", "--", "x")
    assert code == 0 and sys.path == path and sys.argv == ["sp_lightning"]
    said = f'["__main__", ["{script}", "--window", "7", "--", "x"], true, 1, ["Linear", "LayerNorm"], "beside"]'
    assert capsys.readouterr().out.strip() == said


def test_a_module_runs_as_with_python_m(script, capsys, monkeypatch):
    monkeypatch.chdir("folder")
    assert launch("--", "-m", "script", "--quiet") == 0
    out = capsys.readouterr().out
    assert '"--quiet"], true, "auto", "auto", "beside"]' in out and out.startswith('["__main__"')


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]])
def test_a_package_error_is_one_line_with_its_place_in_a_script(how, script, capsys, monkeypatch):
    monkeypatch.chdir("folder")
    assert launch("--", *how, "--twice") == 1
    line = script_line('handle.stream(net, "cpu", window=1)')
    (error,) = capsys.readouterr().err.splitlines()
    assert f"script.py:{line}: " in error and "is in another stream already" in error


def script_line(code):
    return textwrap.dedent(SCRIPT).splitlines().index(f"    {code}") + 1


def test_a_script_ends_as_it_ends(script, capsys):
    assert launch("--", script, "--exit") == 3
    with pytest.raises(FileNotFoundError):
        main(["launch", "--", script, "--fail"])


@pytest.mark.slow
def test_the_script_of_trls_command_runs_unchanged(tmp_path, monkeypatch):
    for package in ("trl", "datasets"):
        pytest.importorskip(package, reason="trl.scripts.sft trains a model of TRL on a data set")
    import hf_runs
    from safetensors.torch import load_file

    hf_runs.torch.manual_seed(0)
    hf_runs.llama().save_pretrained("base")
    hf_runs.tokenizer().save_pretrained("base")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"text": "w1 w2 w3 w4 w5"}\n' * 8)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    own = "-m trl.scripts.sft --model_name_or_path base --dtype float32 --dataset_name data --max_steps 3"
    own += " --report_to none --per_device_train_batch_size 2 --use_cpu --bf16 False --save_strategy no --output_dir"
    for out, command in {"stock": [], "streamed": ["-m", "sp_lightning", "launch", "--window", "1", "--"]}.items():
        done = subprocess.run([sys.executable, *command, *own.split(), out], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    stock, streamed = (load_file(f"{out}/model.safetensors") for out in ("stock", "streamed"))
    assert all(hf_runs.torch.equal(stock[name], streamed[name]) for name in stock) and stock.keys() == streamed.keys()
