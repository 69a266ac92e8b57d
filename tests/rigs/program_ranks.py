"""Random programs on several ranks: under DDP on the CPU, and streamed on any device (processes.py, Rule 1)."""

from __future__ import annotations

import os

import pretended_nodes
import processes
import simccl
import torch
import torch.distributed as dist
from processes import RankFailed
from program_doors import record
from programs import Program, Runs, with_kinds
from ranked_runs import simulated

import parity
from sp_lightning.errors import SuperpipelineError


def runs_on(device: torch.device, size: int = 2, nodes: int = 1) -> Runs:
    """Return what runs a program on so many ranks of pretended nodes; the reference computes on the CPU, on one."""

    def runs(program: Program, streams: bool) -> parity.Record:
        on_ranks = pretended_nodes.trainer, nodes if streams else 1, ranked
        try:
            records = processes.run(size, *on_ranks, on(device, program), streams, device.type if streams else "cpu")
        except RankFailed as error:
            if "sp_lightning.errors." in str(error):
                raise SuperpipelineError(str(error).strip().splitlines()[-1]) from error
            raise
        entries = [
            entry._replace(where=f"rank {rank}, {entry.where}")
            for rank, record in enumerate(records)
            for entry in record.entries
            if entry.what != "RNG state simgpu"
        ]
        return parity.Record(entries, {"raised": [error for one in records for error in one.telemetry["raised"]]})

    return runs


def on(device: torch.device, program: Program) -> Program:
    """Return what of a program has the same bits on the CPU: no random numbers, GRU, transforms or autocast's types."""
    program = program.replace(options=tuple(pair for pair in program.options if pair[0] != "disk"))  # of one device
    if device.type == "cpu":
        return program
    kinds = tuple("Dense" if kind in ("Dropping", "Recurrent") else kind for kind in program.kinds)
    return with_kinds(program, kinds).replace(precision="32-true")


def ranked(program: Program, streams: bool, accelerator: str) -> parity.Record:
    """Run a program on this rank."""
    rank, size = pretended_nodes.rank(), int(os.environ["WORLD_SIZE"])
    if program.door == "by hand":
        backend = simccl.register() if streams and accelerator == "simgpu" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size)
    with simulated(accelerator):
        return record(program, parity.device_of(accelerator), streams, rank=rank, size=size)
