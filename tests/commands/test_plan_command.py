"""``python -m sp_lightning plan``: what it prints, which models it finds, and what it refuses."""

import json
import subprocess
import sys

import pytest

from sp_lightning import cli

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "dtype": "bfloat16",
}


@pytest.fixture
def llama(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "tiny")


def run(*arguments, status=0):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *map(str, arguments)])
    assert stopped.value.code == status


def small(llama, *more):
    return ("--model", llama, "--seq", 64, "--machine", "rtx4090", *more)


def as_json(capsys, *arguments, status=0):
    run(*arguments, "--json", status=status)
    return json.loads(capsys.readouterr().out)


def test_it_prints_memory_time_and_what_to_change(llama, capsys):
    run("--model", llama, "--batch", 4, "--seq", 64, "--machine", "rtx4090", "--device-memory", "2GiB")
    said = capsys.readouterr().out
    assert "tiny: 0.181e6 parameters, of which 0.181e6 train, batch of 4 rows, bf16-mixed, activations 'keep'" in said
    for words in ("window", "kept for backward", "optimizer", "A step takes", "tokens a second", "Change"):
        assert words in said
    assert ": fits" in said


def test_adapters_leave_the_rest_of_a_model_frozen(llama, capsys):
    pytest.importorskip("peft")
    whole = as_json(capsys, *small(llama))
    found = as_json(capsys, *small(llama, "--adapters", 4))
    assert found["parameters"] - found["trained"] == whole["parameters"]
    assert found["job"]["precision"] == "bf16-true"


def test_what_does_not_fit_is_said_with_its_term(llama, capsys):
    too_little = "--device-memory", "1MiB", "--host-memory", "2MiB"
    run("--model", llama, "--seq", 64, "--machine", "rtx4090", *too_little, status=1)
    said = capsys.readouterr().out
    assert "DOES NOT FIT: on the device, most for reserve" in said and "; on the host, most for optimizer" in said
    run("--model", llama, "--seq", 64, "--machine", "rtx4090", "--memory-budget", "1KB", status=1)
    assert "DOES NOT FIT: within memory_budget, most for window" in capsys.readouterr().out


def test_json_has_everything(llama, capsys):
    found = as_json(capsys, *small(llama, "--window", 2, "--transfer", 1))
    assert (found["window"], found["transfer"], found["job"]["machine"]["name"], found["rows"]) == (2, 1, "rtx4090", 1)
    assert found["device_nbytes"] == sum(found["device_terms"].values())


def test_a_directory_and_its_config_are_one_model(llama, capsys):
    one, other = (as_json(capsys, "--model", at, "--machine", "h100") for at in (llama, f"{llama}/config.json"))
    assert one == other and one["parameters"] > 0


def test_known_machines_are_listed(capsys):
    run("--machine", "list")
    assert "rtx4090" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("", "model must be given, unless --config is"),
        ("--model llama-3b --loss x --machine rtx3060", "plan does not know --loss x"),
        ("--model llama-3b --config a.yaml", "model must be left out beside --config"),
        ("--model llama3b --machine rtx3060", "did you mean llama-3b?"),
        (
            "--model nowhere/config.json --machine rtx3060",
            "model must be a config.json of transformers or its directory",
        ),
        ("--model vit-h --seq 64 --machine rtx3060", "seq must be left out for a model that takes images"),
        ("{} --host-memory 64", "host_memory must be a size with its unit"),
        ("{} --device-memory 8GX", "device_memory must be a size with its unit"),
        ("{} --batch 0", "argument --batch: must be an int >= 1, got 0"),
        ("{} --precision bf15", "precision must be one of '32-true'"),
        ("{} --optimizer Adamm", "did you mean Adam?"),
        ("{} --activations recomput", "did you mean recompute?"),
        ("{} --master-weights", "'bf16-true' or '16-true' with master_weights=True"),
        ("{} -- script.py", "plan does not know -- script.py"),
        ("{} --bach 4", "did you mean --batch?"),
    ],
)
def test_bad_arguments_end_with_one_sentence(arguments, said, llama, capsys):
    words = small(llama) if "{}" in arguments else []
    run(*words, *arguments.replace("{}", "").split(), status=2)
    out, err = capsys.readouterr()
    assert said in err and out == "" and "Traceback" not in err


def test_several_devices_have_one_host(llama, capsys):
    one, two = (as_json(capsys, *small(llama, "--window", 2, "--devices", count)) for count in (1, 2))
    assert one["device_terms"] == two["device_terms"]
    assert two["host_terms"] == one["host_terms"] and two["speed"]["rows_per_s"] > one["speed"]["rows_per_s"]


def test_several_devices_are_offered_no_disk(llama, capsys):
    run(*small(llama, "--devices", 2, "--host-memory", "2MiB"), status=1)
    said = capsys.readouterr().out
    assert "on the host, most for" in said and "disk=" not in said


def test_a_disk_has_its_bytes_in_the_plan(llama, capsys, tmp_path):
    run(*small(llama, "--disk", tmp_path, "--host-budget", "0B", "--wire-dtype", "as-is", "--precision", "32-true"))
    said = capsys.readouterr().out
    assert "Disk, in a step (6.52 GiB read, 4.66 GiB written a second):" in said and "  written " in said


def _python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("given, heavy", [("--help", "torch"), ("plan --help", "lightning"), ("plan", "torchmetrics")])
def test_what_a_command_need_not_import_it_does_not(given, heavy):
    code = f"""
import contextlib, sys
from sp_lightning import cli
with contextlib.suppress(SystemExit):
    cli.main({given.split()!r})
print([name for name in sys.modules if name.partition(".")[0] == {heavy!r}])
"""
    assert _python(code).splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_largest_model_is_planned_in_1_5_times_the_imports():
    pytest.importorskip("transformers")
    code = """
import contextlib, time
begin = time.process_time()
import torch, transformers.models.llama.modeling_llama
imports = time.process_time() - begin
from sp_lightning import cli
with contextlib.suppress(SystemExit):
    cli.main("plan --model llama-70b --machine h200 --activations recompute".split())
print((time.process_time() - begin) / imports)
"""
    assert min(float(_python(code).splitlines()[-1]) for _ in range(5)) <= 1.5  # a busy machine adds to it


@pytest.mark.parametrize("command", ["plan", "launch"])
def test_help_names_the_values_of_an_option(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--activations keep|recompute|offload|recompute+offload" in " ".join(capsys.readouterr().out.split())
