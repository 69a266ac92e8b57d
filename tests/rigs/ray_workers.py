"""A user's script for Ray Train on a local cluster: ``python ray_workers.py FOLDER RUN``, where RUN is one of `RUNS`.

Each worker leaves its checkpoint in the folder, as ``RANK.ckpt``, and the steps from which it went on.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tempfile
import time
from typing import Any, NamedTuple

import lightning as L
import pretended_nodes
import ray
import torch
from ranked_runs import Dies, Scheduled
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

import models
import sp_lightning
from sp_lightning.ray import RaySuperpipelineStrategy

EPOCHS, BATCHES = 3, 4  # of each worker
DIES_AT = 6  # steps, in the second epoch


class Run(NamedTuple):
    """How a script runs."""

    workers: int = 2
    strategy: str = "ours"
    nodes: int = 1  # that the workers pretend to be
    victim: int | None = None  # the rank that is killed once
    accelerator: str = "auto"


RUNS = {
    "ddp": Run(strategy="ddp"),
    "one machine": Run(),
    "two machines": Run(nodes=2),
    "killed under ddp": Run(strategy="ddp", victim=1),
    "killed": Run(victim=1),
    "alone under ddp": Run(1, "ddp"),
    "alone": Run(1),
    "other accelerator": Run(accelerator="simgpu"),
}


class DiesOnceReported(Dies):
    """The end of a process once Ray has heard of a checkpoint."""

    def wait(self) -> None:
        until = time.monotonic() + 60
        while not list(self.folder.glob("reports/*/checkpoint_manager_snapshot.json")):  # Ray's, of what it knows
            assert time.monotonic() < until, "Ray has heard of no checkpoint"
            time.sleep(0.1)


def work(config: dict[str, Any]) -> None:
    """Train on a worker, as Ray's documentation has it."""
    folder, run = pathlib.Path(config["folder"]), RUNS[config["run"]]
    context = train.get_context()
    rank, case = context.get_world_rank(), models.case("mlp")
    if run.accelerator == "simgpu":
        import simgpu.lightning  # noqa: F401
    with pretended_nodes.pretending(rank) if run.nodes > 1 else contextlib.nullcontext():
        L.seed_everything(0, verbose=False)
        module = Scheduled(case, "adamw")
        strategy = (
            RayDDPStrategy(find_unused_parameters=True)
            if run.strategy == "ddp"
            else RaySuperpipelineStrategy(units=case.units, window=2)
        )
        trainer = L.Trainer(
            strategy=strategy,
            accelerator=run.accelerator,
            devices="auto",
            plugins=[RayLightningEnvironment()],
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[RayTrainReportCallback(), DiesOnceReported(folder, run.victim, DIES_AT)],
        )
        trainer = prepare_trainer(trainer)
        data = [case.batch(number) for number in range(BATCHES * run.workers)]
        loader = DataLoader(data, batch_size=None, shuffle=False)
        if last := train.get_checkpoint():
            with last.as_directory() as found:
                trainer.fit(module, loader, ckpt_path=os.path.join(found, RayTrainReportCallback.CHECKPOINT_NAME))
        else:
            trainer.fit(module, loader)
        torch.save(trainer.callback_metrics, folder / f"{rank}.metrics")
        trainer.save_checkpoint(folder / "end.ckpt")
        if isinstance(strategy, sp_lightning.SuperpipelineStrategy):
            (folder / f"{rank} ran on {context.get_node_rank()}, {strategy.root_device}").touch()


def main(folder: pathlib.Path, name: str) -> None:
    """Run the workers, and say what came of them."""
    run = RUNS[name]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(folder), "run": name},
        scaling_config=ScalingConfig(num_workers=run.workers),
        run_config=RunConfig(
            name=f"{name}-{os.getpid()}",  # Ray's own is the second, and names a folder that all runs share
            storage_path=str(folder / "reports"),
            failure_config=FailureConfig(0 if run.victim is None else 1),
        ),
    )
    with tempfile.TemporaryDirectory(prefix="ray") as place:  # whose sockets' paths may have 107 characters
        ray.init(
            num_cpus=run.workers,
            include_dashboard=False,
            _temp_dir=place,
            runtime_env={"env_vars": environment},
        )
        try:
            torch.save(trainer.fit().metrics, folder / "reported")
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
