"""A user's script trains on two devices as under DDP, whoever starts its processes."""

import itertools
import os
import pathlib
import subprocess
import sys

import lightning as L
import processes
import pytest
import safetensors.torch
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

import parity
import sp_lightning
from sp_lightning.errors import OptionError

RIGS = pathlib.Path(__file__).parents[1] / "rigs"
KEPT = "state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=PORT"],
}


def run(launcher, strategy, folder):
    """Run the script; return what its ranks left."""
    folder.mkdir()
    port = str(processes.free_port())
    command = [part.replace("PORT", port) for part in LAUNCHERS[launcher]]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(RIGS), *filter(None, sys.path)]), "MASTER_PORT": port}
    done = subprocess.run(
        [*command, str(RIGS / "ranked_script.py"), strategy, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return left_in(folder)


def left_in(folder):
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return [parity.Record([parity.Entry("", name, value) for name, value in rank.items()]) for rank in ranks]


def agents(script, *arguments, local=1, more=()):
    """Run a script with two agents of torchrun and one rendezvous, as on two machines."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{processes.free_port()}"
    agent = ["--nnodes=2", f"--nproc-per-node={local}", "--rdzv-backend=c10d", endpoint, *more]
    command = [sys.executable, "-m", "torch.distributed.run", *agent, *map(str, (*script, *arguments))]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(RIGS), *filter(None, sys.path)]),
        "PRETENDED_NODES": "2",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted ranks meet those of before
    }
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=environment, **piped) for node in range(2)]
    try:
        said = [agent.communicate(timeout=300) for agent in started]
    finally:
        for agent in started:
            agent.terminate()  # which ends its processes, too
    assert [agent.returncode for agent in started] == [0, 0], "\n".join(itertools.chain(*said))[-4000:]
    return "".join(out for out, _ in said)


@pytest.mark.slow
def test_a_script_under_torchrun_on_two_nodes_runs_as_under_ddp(tmp_path):
    expected = run("torchrun", "ddp", tmp_path / "ddp")
    folder = tmp_path / "ours"
    folder.mkdir()
    agents([RIGS / "ranked_script.py"], "superpipeline", folder)
    for theirs, ours in zip(expected, left_in(folder), strict=True):
        parity.compare(theirs, ours)


@pytest.mark.slow
def test_a_run_that_torchrun_restarts_on_two_nodes_goes_on(tmp_path):
    """Either machine's rank is killed in a step, rank 0 with the store that all meet in."""
    ended = {}
    for victim in (None, 0, 3):
        folder = tmp_path / f"{victim}"
        folder.mkdir()
        killed = () if victim is None else (victim,)
        agents([RIGS / "restarted_script.py"], folder, *killed, local=2, more=["--max-restarts=2"])
        kept = {name: torch.load(folder / "end.ckpt", weights_only=False)[name] for name in KEPT}
        ended[victim] = parity.Record([parity.Entry("", name, leaf) for name, leaf in parity.leaves(kept)])
        began = sorted(path.name for path in folder.glob("began *"))
        assert began == [f"began {rank} at {step}" for rank in range(4) for step in ([0, 4] if killed else [0])]
    parity.compare(ended[None], ended[0])
    parity.compare(ended[None], ended[3])


@pytest.mark.slow
def test_a_loop_with_accelerate_on_two_nodes_runs_as_under_ddp(tmp_path):
    pytest.importorskip("accelerate", reason="the script is one of accelerate")
    script = RIGS / "accelerate_script.py"
    launched = ["-m", "sp_lightning", "launch", "--window", "1", "--", script]
    assert "DistributedDataParallel" in agents([script], tmp_path / "stock")
    assert "Sequential" in agents(launched, tmp_path / "streamed")
    stock, streamed = (safetensors.torch.load_file(tmp_path / name) for name in ("stock", "streamed"))
    assert stock.keys() == streamed.keys()
    assert not [name for name in stock if parity.difference(stock[name], streamed[name])]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_script_runs_as_under_ddp(launcher, tmp_path):
    expected = run(launcher, "ddp", tmp_path / "ddp")
    for theirs, ours in zip(expected, run(launcher, "superpipeline", tmp_path / "ours"), strict=True):
        parity.compare(theirs, ours)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
SBATCH = dict.fromkeys(["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"], "0")
SBATCH |= {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
SRUN = SBATCH | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1"}
ALONE = {"strategy": "superpipeline", "accelerator": "cpu", "devices": 1}


def train(package=L, run="fit", **options):
    """Run a small module on one device; return how many batches it saw."""

    class Module(package.LightningModule):
        seen = 0

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch, _):
            self.seen += 1
            return self.layer(batch).sum()

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, quiet = Module(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = package.Trainer(**ALONE, max_epochs=1, **quiet, **options)
    getattr(trainer, run)(module, torch.utils.data.DataLoader(torch.ones(4, 4)))
    return module.seen


@pytest.mark.parametrize(("launched", "by"), [(TORCHRUN, "TorchElasticEnvironment"), (SRUN, "SLURMEnvironment")])
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning", "fabric"])
def test_launched_processes_do_not_each_train_on_all_the_data(package, launched, by, monkeypatch):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"devices must be 2, the number of processes that {by} finds.*, got 1"):
        if package == "fabric":
            L.Fabric(**ALONE)
        else:
            pytest.importorskip(f"sp_lightning.{package}", exc_type=ImportError)
            train(pytest.importorskip(package))


@pytest.mark.parametrize("launched", [TORCHRUN, SRUN])
@pytest.mark.parametrize("package", [L.Trainer, L.Fabric])
def test_machines_that_contradict_the_launcher_are_an_error(package, launched, monkeypatch):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"num_nodes.*(product \(2 \* 2\)|number of nodes configured in SLURM)"):
        package(**ALONE | {"devices": 2, "num_nodes": 2})


@pytest.mark.parametrize(
    ("launched", "options"),
    [
        (TORCHRUN, {"plugins": [LightningEnvironment()]}),
        (TORCHRUN, {"run": "validate"}),
        (TORCHRUN | {"WORLD_SIZE": "1"}, {}),
        (SBATCH, {}),
    ],
)
def test_a_process_that_is_to_run_by_itself_does(launched, options, monkeypatch):
    """It was said so, or it evaluates what others trained; or it is the only one, in a job that has room for more."""
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert train(**options) == 4


def test_a_process_of_a_launcher_streams_a_module_by_itself(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    net = torch.nn.Linear(4, 4)
    with sp_lightning.stream(net, "cpu"):
        net(torch.ones(4)).sum().backward()
    assert net.weight.grad is not None
