"""Lightning's view of the devices, of a Trainer or of Fabric: one, or one process for each of several.

1. With one device nothing is distributed: no launcher, no sampler, no process group. So where a launcher started
   several processes, each would train on all the data: that is an error, as under DDP.
2. With several, Lightning starts a process for each, as for DDP, and asks this class for ranks, samplers and
   collectives. What DDP does beside gradients is done here: seeds, rank 0's weights at the beginning, and rank 0's
   buffers at each synchronising forward. The weights are shared (sp_lightning/ranks).
3. With several machines there are as many devices on each. A launcher starts the processes there; what differs is
   inside of sp_lightning/ranks.
4. Collectives run on the process group's own tensors: where the backend knows only the host's, on host copies.
5. With a second axis (`Axes`), as Lightning's ModelParallelStrategy has it, layers are cut along that one. Ranks that
   have the same shards, along the data axis, are those that exchange gradients and have data of their own. All else,
   such as meetings, logged means and checkpoints, is among all ranks. The mesh's groups need a backend for the host's
   tensors too, as gradients are clipped and weights stepped there.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from ..compat.lightning import (
    all_gather_if_distributed,
    backend_for,
    init_process_group,
    sync_if_distributed,
)
from ..compat.tensors import is_dtensor
from ..errors import OptionError
from ..host.device import check_supported
from ..options import Options, check_waits, count
from ..ranks.peers import Peers
from .checkpoint_io import MappedCheckpointIO
from .names import (
    LightningEnvironment,
    ModelParallelStrategy,
    ParallelStrategy,
    ScriptLauncher,
    SLURMEnvironment,
    WrappingCheckpointIO,
)

DATA, TENSOR = "data_parallel", "tensor_parallel"  # the axes of a mesh, by Lightning's names


class Axes:
    """The axes along which a run's devices lie: that of the data, and a second one along which layers are cut (Rule 5).

    Without a size of the second one each rank has whole layers.
    """

    def __init__(self, data: int | Literal["auto"], tensor: int | Literal["auto"] | None) -> None:
        if tensor is None and data != "auto":
            raise OptionError(argument="data_parallel_size", found=data, allowed="given with tensor_parallel_size")
        self.has_shards = tensor is not None
        self._sizes: Any = (
            count("data_parallel_size", data),
            count("tensor_parallel_size", 1 if tensor is None else tensor),
        )
        self.mesh: Any = None
        self.group: Any = None  # of the ranks that have the same weights; None: of all

    def fit(self, world: int, local: int) -> None:
        """Choose "auto" sizes for ``world`` devices, ``local`` of them on each machine; raise if no sizes fit."""
        data, tensor = self._sizes
        tensor = local if tensor == "auto" else tensor
        data = max(1, world // tensor) if data == "auto" else data
        if data * tensor != world or (self.has_shards and world == 1):
            raise OptionError(
                argument="tensor_parallel_size",
                found=f"{tensor} with data_parallel_size={data}",
                allowed=f"such that their product is the number of devices, which is {world}, and more than one: each "
                "has a process of its own",
            )
        self._sizes = data, tensor

    def make_mesh(self, device: torch.device) -> None:
        """Make the mesh of all ranks, once, if layers are cut. Collective."""
        if self.has_shards and self.mesh is None:
            from torch.distributed.device_mesh import init_device_mesh  # other runs need nothing of it

            self.mesh = init_device_mesh(device.type, self._sizes, mesh_dim_names=(DATA, TENSOR))
            self.group = self.mesh[DATA].get_group()

    def share(self, rank: int) -> dict[str, int]:
        """Return the arguments of a sampler that draws this rank's share of the data."""
        data, tensor = self._sizes
        return {"num_replicas": data, "rank": rank // tensor}

    def check_module(self, module: torch.nn.Module) -> None:
        """Raise an error unless the module is cut as the axes say."""
        if self.has_shards and self._sizes[1] != 1 and not any(map(is_dtensor, module.parameters())):
            raise OptionError(
                argument="tensor_parallel_size",
                found=self._sizes[1],
                allowed="1 for a module none of whose parameters is a DTensor: apply parallelize_module(..., "
                "self.device_mesh['tensor_parallel'], plan) in configure_model, with Fabric before its setup and with "
                "fabric.strategy.device_mesh, or leave it out",
            )


class SeveralDevices:
    """The devices of a strategy, which Lightning chooses."""

    _root_device: torch.device  # Lightning's
    _parallel_devices: list[torch.device] | None = None
    cluster_environment: Any = None  # the connector sets these two
    _layer_sync: Any = None
    _num_processes = 1  # on each machine
    _machines = 1
    options: Options
    _launcher: Any
    _checkpoint_io: Any
    model: Any

    def _store(
        self,
        options: Options,
        timeout: timedelta,
        keepalive: timedelta,
        data: int | Literal["auto"],
        tensor: int | Literal["auto"] | None,
        save_distributed: bool,
    ) -> None:
        """Store a strategy's options."""
        check_waits(timeout=timeout, keepalive=keepalive)
        self.options, self._timeout, self._keepalive = options, timeout, keepalive
        self._axes = Axes(data, tensor)
        self._save_distributed_checkpoint = save_distributed  # Lightning's functions read it by this name

    # ---- devices

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that Lightning chose; None before that, as any other value would choose the accelerator."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices and self._take_devices(devices)
        if self._parallel_devices:
            check_supported(self._parallel_devices[0])
            self._root_device = self._parallel_devices[0]

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._machines

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        self._machines = count
        self._check_devices()

    _num_nodes = num_nodes  # Fabric sets it by this name

    # ---- ranks

    @property
    def is_distributed(self) -> bool:
        """Whether each device has a process of its own."""
        return bool(self.world_size > 1)

    def _take_devices(self, devices: list[torch.device]) -> list[torch.device]:
        """Return those of the devices that Lightning found on which the processes of this machine compute."""
        self._num_processes = len(devices)
        self._check_devices()
        return devices

    def _check_devices(self) -> None:
        """Raise an error if the options do not allow several devices; Lightning says how many."""
        self.options.check_devices(self._num_processes, self._machines)

    # SingleDeviceStrategy sets the first three.
    world_size = property(lambda self: self._num_processes * self._machines, lambda self, _: None)
    global_rank = property(lambda self: self._rank("global_rank"), lambda self, _: None)
    local_rank = property(lambda self: self._rank("local_rank"), lambda self, _: None)
    node_rank = property(lambda self: self._rank("node_rank"))
    is_global_zero = property(lambda self: self._rank("global_rank") == 0)

    def _rank(self, which: str) -> int:
        """Return this process's "global_rank", "local_rank" or "node_rank"; 0 with one device."""
        return int(getattr(self.cluster_environment, which)()) if self.is_distributed else 0

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """The share of the data that this rank gets; None with one device."""
        return self._axes.share(self.global_rank) if self.is_distributed else None

    def set_world_ranks(self) -> None:
        """Tell the environment the ranks, and take this rank's device; Lightning's error if a launcher has others."""
        if self.is_distributed:
            assert self.parallel_devices is not None
            self.cluster_environment.validate_settings(self._num_processes, self._machines)
            self.cluster_environment.set_global_rank(self.node_rank * self._num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.world_size)
            setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  # an attribute of a function
            self._root_device = self.parallel_devices[self.local_rank]

    def _check_alone(self) -> None:
        """Raise OptionError if this run on one device is one of several processes that a launcher started (Rule 1)."""
        environment = self.cluster_environment
        if self.is_distributed or isinstance(environment, LightningEnvironment):  # which would start them
            return
        processes = int(environment.world_size())
        if isinstance(environment, SLURMEnvironment):  # a job has as many tasks also if its script starts one process
            processes = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        if processes > 1:
            raise OptionError(
                argument="devices",
                found=1,
                allowed=f"{processes}, the number of processes that {type(environment).__name__} finds, or as many per "
                "machine with num_nodes: with 1 device each of them trains on all the data by itself; if that is "
                "meant, pass plugins=[LightningEnvironment()], and to each a folder of its own",
            )

    def _configure_launcher(self) -> None:
        """Make a launcher and a checkpoint plugin: the connector calls this when it has set what the user passed."""
        self._checkpoint_io = self._checkpoint_io or MappedCheckpointIO()
        if isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = MappedCheckpointIO()  # of a wrapper without one of the user's
        if self.is_distributed:
            self._launcher = ScriptLauncher(self.cluster_environment, self._num_processes, self._machines)

    # ---- setup

    def _set_up_ranks(self) -> None:
        """Connect the processes, as DDP does, unless they are connected. Collective."""
        self._axes.fit(self.world_size, self._num_processes)
        if self.is_distributed:
            self.set_world_ranks()
            backend, kind = backend_for(self._root_device), self._root_device.type
            if self._axes.has_shards and kind != "cpu":
                backend = f"cpu:gloo,{kind}:{backend}"
            init_process_group(self.cluster_environment, backend, timeout=self._timeout)
            self._axes.make_mesh(self._root_device)

    def _team(self) -> Peers | None:
        """Make what this rank and the others have together while a module streams; None with one device."""
        if not self.is_distributed or (self._axes.group is not None and self._axes.group.size() == 1):
            return None
        group: Any = self._axes.group or dist.group.WORLD
        return Peers(group, self._timeout, self._keepalive)

    @property
    def _home(self) -> torch.device:
        """The device of the tensors that the process group's backend takes."""
        return torch.device("cpu") if dist.get_backend() == "gloo" else self._root_device

    # ---- collectives

    @property
    def _is_connected(self) -> bool:
        """Whether there are other ranks, to which this one is connected."""
        return self.is_distributed and dist.is_initialized()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self._is_connected:
            dist.barrier(device_ids=[self._root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank."""
        kind: Any = ModelParallelStrategy
        return kind.broadcast(self, obj, src) if self._is_connected else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **kwargs: Any) -> Any:
        """Reduce a tensor over all ranks."""
        if not (self._is_connected and isinstance(tensor, torch.Tensor)):
            return tensor
        return sync_if_distributed(tensor.to(self._home), group, reduce_op=reduce_op).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor from all ranks."""
        if not self.is_distributed:
            return tensor
        found: torch.Tensor = all_gather_if_distributed(tensor.to(self._home), group=group, sync_grads=sync_grads)
        return found.to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decided so, or any did."""
        kind: Any = ParallelStrategy
        return kind.reduce_boolean_decision(self, decision, all) if self._is_connected else decision
