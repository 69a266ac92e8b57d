"""Several ranks train one host copy of a model with accelerate, a Trainer or TRL, as they do under DDP."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import processes
import pytest
import ranked_hf

import parity

pytest.importorskip("accelerate", reason="sp_lightning.hf is for accelerate")
transformers = pytest.importorskip("transformers", reason="these runs are transformers' Trainers")

BEST = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
EACH_OTHER = {"num_generations": 2, "max_completion_length": 4}
RUNS = {
    "plainly": ("plainly", {}),
    "plainly in bf16": ("plainly", {"mixed_precision": "bf16"}),
    "accumulating": ("accumulating", {}),
    "accumulating in bf16": ("accumulating", {"mixed_precision": "bf16"}),
    "two models": ("gan", {}),
    "one optimizer of two models": ("pair", {}),
    "a module around it is moved": ("around", {}),
    "one rank moves a module around it": ("around", {"ranks": 1}),
    "a module around it was moved before": ("around", {"early": True}),
    "a module that overlaps it was moved before": ("beside", {}),
    "Trainer": ("trainer", {}),
    "Trainer accumulating": ("trainer", {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}),
    "Trainer and the best": ("trainer", {**BEST, "load_best_model_at_end": True, "num_train_epochs": 2}),
    "Trainer in bf16": ("trainer", {"bf16": True}),
    "Trainer checkpointing": ("trainer", {"gradient_checkpointing": True}),
    "Trainer of adapters": ("adapters", {}),
    "Trainer resuming": ("resuming", {}),
    "Trainer of embeddings": ("sentences", {"loss": "negatives"}),
    "SFT": ("trl", {"kind": "SFT"}),
    "SFT of adapters": ("trl", {"kind": "SFT", "adapters": True}),
    "DPO with a reference": ("trl", {"kind": "DPO", "reference": True}),
    "KTO with a reference": ("trl", {"kind": "KTO", "reference": True}),
    "Distillation": ("trl", {"kind": "Distillation", "max_completion_length": 4}),
    "GRPO with a reference": ("trl", {"kind": "GRPO", "beta": 0.1, **EACH_OTHER}),
}
DAILY = ("plainly", "cpu"), ("Trainer and the best", "simgpu")
TRL = ("SFT", "DPO", "KTO", "Distillation", "GRPO")
# They draw from the device's generator, and the reference's is the CPU's.
DRAWS = ("Trainer of adapters", "Distillation", "GRPO with a reference", "Trainer of embeddings")


def combinations():
    for run in RUNS:
        for device in ("cpu", "simgpu")[: 1 if run in DRAWS else 2]:
            marks = [pytest.mark.simgpu] * (device == "simgpu") + [pytest.mark.slow] * ((run, device) not in DAILY)
            yield pytest.param(run, device, marks=marks, id=f"{run}-{device}")


@pytest.mark.parametrize("run, on", list(combinations()))
@pytest.mark.slow
def test_two_ranks_are_ddp(run, on, tmp_path):
    check_ranks(run, on, tmp_path, functools.partial(processes.run, 2))


def check_ranks(run, on, folder, start):
    """Compare a run of two ranks, started by this function, with DDP's."""
    if run.startswith(TRL):
        pytest.importorskip("trl", reason="these runs are TRL's trainers")
        pytest.importorskip("datasets", reason="TRL trains on data sets of datasets")
    if run.startswith("Trainer of embeddings"):
        pytest.importorskip("sentence_transformers", reason="these runs are its trainer's")
    name, settings = RUNS[run]
    options = {"window": 2, "activations": "recompute"} if run == "Trainer and the best" else {"window": 1}
    try:
        expected = processes.run(2, ranked_hf.record, name, None, folder=str(folder), **settings)
    except processes.RankFailed as error:
        if "tagged with cpu:0" in str(error):
            pytest.skip("this transformers cannot resume several ranks of the CPU")
        raise
    found = start(ranked_hf.record, name, options, accelerator=on, folder=str(folder), **settings)
    for theirs, ours in zip(expected, found, strict=True):
        parity.compare(theirs, ours)


@pytest.mark.parametrize(
    "first, second",
    [
        ((1, {"window": 1}), (2, {"window": 2})),
        ((2, {"window": 1}), (1, {"window": 1})),
        ((2, None), (2, {"window": 1})),
        ((2, {"window": 1}), (2, None)),
    ],
    ids=["one to two", "two to one", "from DDP", "to DDP"],
)
@pytest.mark.slow
def test_a_run_resumes_from_a_checkpoint_of_other_processes(first, second, tmp_path):
    def train(name, size, options, **settings):
        ranks = processes.run(2, ranked_hf.trained, str(tmp_path / name), size, options, **settings)
        return ranks[:size]

    (tmp_path / "saved").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "ours").mkdir()
    train("saved", *first, resume=None, max_steps=2)
    kind = "stock" if first[1] is None else "cpu"
    checkpoint = str(tmp_path / "saved" / kind / "checkpoint-2")
    size, options = second
    expected = train("other", size, None if options else {"window": 1}, resume=checkpoint, max_steps=4)
    for theirs, ours in zip(expected, train("ours", size, options, resume=checkpoint, max_steps=4), strict=True):
        parity.compare(theirs, ours)


def test_only_a_model_that_ddp_would_wrap_is_shared():
    for found in processes.run(2, ranked_hf.facts):
        assert (found["shared"], found["streamed"]) == (["moved first", "prepared"], 4)
        assert found["torch's DDP"].startswith("UnsupportedError: Net streams, and DDP around it would not exchange")
        assert found["only_if_needed"].startswith("OptionError: only_if_needed must be False with several processes")


def test_a_communication_hook_is_refused():
    for said in processes.run(2, ranked_hf.comm_hook):
        assert said.startswith("UnsupportedError: a model that streams has no DDP for comm_hook=")


@pytest.mark.parametrize("early", [False, True])
def test_a_rank_that_fails_is_named(early):
    first, second = processes.run(2, ranked_hf.fails, early)
    error = "UnsupportedError: head.weight is on the meta device" if early else "ZeroDivisionError"
    assert first.startswith("PeerError: rank 0 waits at") and "rank 1 is gone" in first
    assert error in first and second.startswith(error)


# ---- scripts

SCRIPT = pathlib.Path(__file__).parents[1] / "rigs" / "accelerate_script.py"


def start(launcher, script, out, streams):
    launched = ["-m", "sp_lightning", "launch", "--window", "1", "--", script] if streams else [script]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", *launcher, str(processes.free_port()), *launched, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
ACCELERATE = "accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes 2 --mixed_precision no".split()
ACCELERATE += "--dynamo_backend no --main_process_port".split()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate launch"])
def test_launch_under_another_launcher_runs_the_script_as_it_is(launcher, tmp_path):
    """A rank that ends before the others does not end them."""
    from safetensors.torch import load_file

    assert "DistributedDataParallel" in start(launcher, str(SCRIPT), tmp_path / "stock", False)
    assert "Sequential" in start(launcher, str(SCRIPT), tmp_path / "streamed", True)
    stock, streamed = load_file(tmp_path / "stock"), load_file(tmp_path / "streamed")
    assert stock.keys() == streamed.keys()
    assert not [name for name in stock if parity.difference(stock[name], streamed[name])]
