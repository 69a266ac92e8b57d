"""What a user mistypes: each is one line that says what to do instead, with exit status 2, and nothing has run."""

import argparse
import json
import logging
import pathlib
import pickle
import re
import socket
import sys

import pytest

from sp_lightning import cli
from sp_lightning.hf import hub

ROOT = pathlib.Path(__file__).parents[2]
FIT = f"fit --config {ROOT}/examples/finetune_llm/config.yaml"
PREDICT = f"predict --config {ROOT}/examples/predict/config.yaml"
LORA = f"fit --config {ROOT}/examples/lora_llm/config.yaml"
PREFERENCE = f"fit --config {ROOT}/examples/preference/config.yaml"
VISION = f"fit --config {ROOT}/examples/finetune_vision/config.yaml"
PRETRAIN = f"fit --config {ROOT}/examples/pretrain_small/config.yaml"
CLASSIFY = f"predict --config {ROOT}/examples/classify/config.yaml"
PLAN = "plan --model llama3-8b --machine rtx3060"
SAID = {  # what is typed, and what the line says
    "": "the following arguments are required: command",
    "--modle": "'--modle' is not an option",
    "--verison": "did you mean --version?",
    "plann --model llama-3b": "'plann' is not a command; did you mean plan?",
    "train": "'train' is not a command: fit, validate",
    "fitt": "did you mean fit?",
    "fit": "--model must be given: package.module.Class, or a --config",
    "validate": "--model must be given",
    "predict": "--model must be given",
    "fit --modle x": "--modle is no argument; did you mean --model?",
    "fit --model nonsense": "model must be the path of a class, package.module.Class, got nonsense",
    "fit --model examples.finetune_llm.module.FineTuneLM": "did you mean FineTuneLLM?",
    "fit --model examples.finetune_llm.modul.FineTuneLLM": "has no attribute 'modul'",
    "fit --config nowhere.yaml": "config: File does not exist",
    f"{FIT} --trainer.strategy.windw 2": "trainer.strategy.windw is no argument; did you mean window?",
    f"{FIT} --trainer.strategy.window 0": "window must be an int >= 1 or 'auto', got 0",
    f"{FIT} --trainer.strategy.window two": "window must be str or int or one of auto, got two",
    f"{FIT} --trainer.strategy.window 2 --trainer.strategy.transfer 3": "transfer must be at most window (2), got 3",
    f"{FIT} --trainer.strategy.memory_budget 64": "memory_budget must be a size with its unit",
    f"{FIT} --trainer.strategy.activations recomput": "did you mean recompute?",
    f"{FIT} --trainer.strategy superpipelin": "did you mean superpipeline?",
    f"{FIT} --trainer.max_epochs many": "trainer.max_epochs must be int, got many",
    f"{FIT} --trainer.max_epchs 2": "--trainer.max_epchs is no argument; did you mean --trainer.max_epochs?",
    f"{FIT} --trainer.precision bf15": "32-true, 64-true",
    f"{FIT} --trainer.accelerator warp": "invalid accelerator name: `accelerator='warp'`",
    f"{FIT} --trainer.devices 0": "`Trainer(devices='0')` value is not a valid input",
    f"{FIT} --data.blok_size 128": "data.blok_size is no argument; did you mean block_size?",
    f"{FIT} --data.path nowhere.jsonl": "the data file nowhere.jsonl does not exist (looked from",
    f"{FIT} --data.path .": "the data file . is a folder, not a file",
    f"{FIT} --data.block_size 0": "data.block_size must be int > 0, got 0",
    f"{FIT} --data.batch_size 0": "data.batch_size must be int > 0, got 0",
    f"{FIT} --model.lr -1": "model.lr must be float >= 0, got -1",
    f"{FIT} --model.lr fast": "model.lr must be float >= 0, got fast",
    f"{FIT} --model.name_or_path ./nowhere": "directory nowhere does not exist (looked from",
    f"{FIT} --model.name_or_path meta-llama/Nonsense-8B": "cannot be reached: no network; give a folder",
    f"{FIT} --ckpt_path nowhere.ckpt": "ckpt_path must be a checkpoint that a run wrote, or one of last",
    f"{FIT} --trainer.accumulate_grad_batches 0": "trainer.accumulate_grad_batches must be an int >= 1, got 0",
    f"{FIT} --trainer.default_root_dir /proc/runs": "trainer.default_root_dir must be in a folder that can be written",
    f"{PREDICT} --data.batch_size 0": "data.batch_size must be int > 0, got 0",
    f"{PREDICT} --model.max_new_tokens none": "model.max_new_tokens must be int > 0, got none",
    f"predict --config {ROOT}/examples/finetune_vision/config.yaml": "`predict_dataloader` must be implemented",
    f"plan --config {ROOT}/examples/finetune_llm/config.yaml --trainer.num_nodes 2": "network must be given together",
    "plan": "model must be given, unless --config is",
    "plan --model llama3b": "did you mean llama-3b?",
    "plan --model nosuch": "or one of tiny, llama-tiny",
    "plan --model nowhere/config.json": "No such file or directory: 'nowhere/config.json'",
    "plan --model meta-llama/Nonsense-8B": "huggingface.co cannot be reached: no network",
    "plan --model a:b": "package.module:function that returns the batch",
    "plan --config nowhere.yaml": "config: File does not exist",
    "plan --model llama3-8b --machine rtx306": "did you mean rtx3060?",
    f"{PLAN} --host-memory 64": "host_memory must be a size with its unit",
    f"{PLAN} --device-memory 8GX": "device_memory must be a size with its unit",
    f"{PLAN} --batch 0": "batch must be an int >= 1, got 0",
    f"{PLAN} --batch four": "argument --batch: invalid int value: 'four'",
    f"{PLAN} --bach 4": "plan does not know --bach 4; did you mean --batch?",
    f"{PLAN} --activations recomput": "did you mean recompute?",
    f"{PLAN} --precision bf15": "precision must be one of '32-true'",
    f"{PLAN} --optimizer Adamm": "did you mean Adam?",
    f"{PLAN} --link gen9x99": "link must be a PCIe generation",
    f"{PLAN} --plot plan.xyz": "plot must be a file that ends in one of",
    f"{PLAN} --epochs 3": "epochs must be given together with --samples",
    f"{PLAN} --json file/plan.json": "json must be in a folder that can be written",
    f"{PLAN} --plot /proc/plan.png": "plot must be in a folder that can be written (/proc: No such file",
    "doctor --quick --json /proc/doctor.json": "json must be in a folder that can be written",
    "doctor --device warp:0": "device must be one of '",
    "doctor --folder nowhere": "folder must be a writable directory",
    "doctor --disk nowhere": "disk must be a directory that can be written",
    "doctor --quik": "did you mean --quick?",
    "timeline": "the following arguments are required: TRACE.json",
    "timeline nowhere.json": "nowhere.json cannot be read",
    "timeline file": "file is not JSON",
    "bench --model nosuch": "model must be one of tiny",
    "bench --windows 0": "window must be an int >= 1",
    "bench --contenders plane": "did you mean plain?",
    "bench --device cpu --devices 99": "devices must be at most",
    "bench --inference --optimizer sgd": "optimizer must be left out with --inference",
    "bench --precision bf15": "precision must be one of '32-true'",
    "bench --set window": "--set must be NAME=VALUE",
    "launch": "the script must be after --",
    "launch -- nowhere.py": "the script must be a file, or -m and a module",
    "launch --windw 2 -- nowhere.py": "did you mean --window?",
    "launch --window 0 -- file": "window must be an int >= 1",
    "launch -- -m no_such_module": "the module must be one that Python can import",
    "launch --nodes 2 -- file": "it is of one machine, and docs/several-machines.md has what others add",
    f"{PLAN} --num_nodes=4": "did you mean --nodes?",
    f"{PLAN} --nodes 2": "network must be given together with nodes",
    f"{PLAN} --nodes 2 --network 10": "network must be the line in bits per second",
    f"{FIT} --nodes 2": "--nodes is no argument; did you mean --trainer.num_nodes?",
    f"{FIT} --max_epochs 2": "--max_epochs is no argument; did you mean --trainer.max_epochs?",
    f"{FIT} --window 2": "--window is no argument; did you mean --trainer.strategy.window?",
    f"{PLAN} --config {ROOT}/examples/lora_llm/config.yaml": "model must be left out beside --config",
    "plan --model llama3-8b --machine RTX3060": "did you mean rtx3060?",
    f"plan --config {ROOT}/examples/classify/config.yaml --machine rtx3060": "predict in place of plan prints",
    "plan --config wrong.yaml": "trainr.max_epochs is no argument; did you mean --trainer.max_epochs?",
    f"{FIT} --config wrong.yaml": "trainr.max_epochs is no argument of fit; did you mean --trainer.max_epochs?",
    f"{FIT} --config file": "--config: ",
    f"{FIT} --trainer.devices -3": "trainer: `devices` selected with `CPUAccelerator` should be an int > 0",
    f"{FIT} --trainer.gradient_clip_val -1": "trainer.gradient_clip_val must be a number >= 0, got -1",
    f"{FIT} --model.warmup_steps -4": "model.warmup_steps must be int >= 0, got -4",
    f"{FIT} --model.weight_decay -4": "model.weight_decay must be float >= 0, got -4",
    f"{PREFERENCE} --model.beta -1": "model.beta must be float >= 0, got -1",
    f"{VISION} --data.mixup -1": "data.mixup must be float >= 0, got -1",
    f"{PRETRAIN} --data.vocabulary 0": "data.vocabulary must be int > 0, got 0",
    f"{PRETRAIN} --model.heads 7": "model.heads=7 must divide model.hidden_size=64",
    f"{VISION} --model.name_or_path torchvision/resnet5": "has no classifier 'resnet5'; did you mean resnet50?",
    f"{LORA} --model.targets [q_prj]": "names 'q_prj', which LlamaForCausalLM has not got; its linear layers are",
    f"{LORA} --model.targets [norm]": "the adapters can not be made: Target module LlamaRMSNorm",
    f"{PREFERENCE} --model.targets [nonsense]": "model.targets names 'nonsense'",
    f"{PREDICT} --model.adapters nowhere/adapters": "the directory of adapters nowhere/adapters is neither a folder",
    f"{PREDICT} --model.adapters .": "the directory of adapters . has no adapter_config.json",
    f"{CLASSIFY} --model.name_or_path file": "the checkpoint directory file is a file, not a folder",
    "doctor --quick --json .": "json must be a file, not a folder, got '.'",
    "doctor --quick --folder /proc": "folder must be in a folder that can be written (/proc: No such file",
}


@pytest.fixture(autouse=True)
def nothing_is_there(tmp_path, monkeypatch):
    """A folder with one file that is of no use, and no network."""
    pytest.importorskip("transformers")
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("nothing\n")
    (tmp_path / "wrong.yaml").write_text("trainr:\n  max_epochs: 1\n")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", ["sp_lightning"])

    def connect(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", connect)
    hub.why_unreachable.cache_clear()
    yield
    hub.why_unreachable.cache_clear()


FEW = [typed if number % 4 == 0 else pytest.param(typed, marks=pytest.mark.slow) for number, typed in enumerate(SAID)]


@pytest.mark.parametrize("typed", FEW)
def test_what_is_mistyped_is_one_line_and_exit_status_2(typed, capfd):
    with pytest.raises(SystemExit) as stopped:
        cli.main(typed.split())
    out, err = capfd.readouterr()
    *before, last = err.splitlines()
    assert stopped.value.code == 2 and last.startswith("python -m sp_lightning") and SAID[typed] in last, err
    said = re.compile(r"^Traceback|^usage:|^error:|Retrying")
    assert [line for line in [*before, *out.splitlines()] if said.search(line)] == []


def test_at_least_sixty_are_tried():
    assert len(SAID) >= 60


def test_an_error_of_the_data_stands_alone(capfd):
    """What Lightning tells of seed, devices and tips is for a run that begins."""
    with pytest.raises(SystemExit):
        cli.main(f"{FIT} --data.path nowhere.jsonl --trainer.logger false".split())
    _, err = capfd.readouterr()
    assert "Seed set" not in err and "GPU available" not in err and "nowhere.jsonl does not exist" in err


def test_what_was_held_is_shown_when_a_run_begins(capsys):
    from sp_lightning.commands import fit_cli

    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        fit_cli._Held()
        logger.warning("at once")
        logger.info("later")
        assert shown == ["at once"]
        pickle.loads(pickle.dumps(fit_cli._Release())).on_fit_start(None, None)
        logger.info("now")
        assert shown == ["at once", "later", "now"]
    finally:
        logger.removeHandler(handler)


def test_machine_list_prints_all_machines(capsys):
    from sp_lightning.core.machine import PROFILES

    with pytest.raises(SystemExit, match="0"):
        cli.main("plan --machine list".split())
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*PROFILES, "here:"]


def test_images_of_which_none_can_be_read_end_with_exit_status_2(tmp_path, capfd):
    pytest.importorskip("torchvision")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_text("none")
    with pytest.raises(SystemExit) as stopped:
        cli.main(f"{CLASSIFY} --data.path photos --trainer.accelerator cpu".split())
    last = capfd.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and "none of the 1 records can be read: runs/classify/labels.jsonl has" in last
    assert "error" in json.loads(pathlib.Path("runs/classify/labels.jsonl").read_text())


def test_a_script_of_the_examples_ends_with_one_line(capsys):
    from examples.common.errors import BadInput, in_one_line, positive

    with pytest.raises(SystemExit, match="2"), in_one_line():
        raise BadInput("the data file nowhere.jsonl\ndoes not exist")
    assert capsys.readouterr().err == "sp_lightning: the data file nowhere.jsonl does not exist\n"
    with pytest.raises(argparse.ArgumentTypeError, match="must be an int >= 1, got 0"):
        positive("0")


def test_a_chat_file_with_a_local_base_model_names_what_its_folder_lacks(tmp_path):
    from examples.common.errors import BadInput
    from examples.common.text import templated
    from examples.common.tiny import tokenizer

    words = tokenizer(["a text"])
    words.chat_template, words.name_or_path = None, str(tmp_path)
    with pytest.raises(BadInput, match=r"add the chat_template.jinja of its model for chats to that folder"):
        templated([{"role": "user", "content": "?"}], words, "chats.jsonl, line 1", False)


def test_an_error_of_the_users_own_code_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import lightning\n\n\nclass Mine(lightning.LightningModule):\n    def __init__(self):\n        1 / 0\n"
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError, match="division by zero"):
        cli.main(["fit", "--model", "mine.Mine"])


@pytest.mark.parametrize(
    "base, chats",
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("google/gemma-3-4b-pt", "google/gemma-3-4b-it"),
    ],
)
def test_a_chat_file_with_a_base_models_tokenizer_names_the_model_for_chats(base, chats):
    from examples.common.errors import BadInput
    from examples.common.text import templated
    from examples.common.tiny import tokenizer

    words = tokenizer(["a text"])
    words.chat_template, words.name_or_path = None, base
    with pytest.raises(BadInput, match=rf"chats.jsonl, line 1 is a chat, .* set model.name_or_path={chats}, or"):
        templated([{"role": "user", "content": "?"}], words, "chats.jsonl, line 1", False)


@pytest.mark.parametrize("place", ["plan.json", "new/folder/plan.json"])
@pytest.mark.few(1)
def test_a_plan_is_written_to_a_file_beside_its_text(place, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*PLAN.split(), "--activations", "recompute", "--host-memory", "256GiB", "--json", place])
    assert json.loads(pathlib.Path(place).read_text())["fits"] is True
    assert ": fits" in capsys.readouterr().out


def test_a_proxy_is_left_to_find_the_hub(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.why_unreachable() == ""
