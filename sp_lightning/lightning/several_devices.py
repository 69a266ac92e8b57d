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

import contextlib
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
    is_interactive,
    set_device_mesh,
    sync_if_distributed,
)
from ..compat.tensors import is_dtensor
from ..errors import OptionError, UnsupportedError
from ..host.device import check_supported
from ..options import Options, is_int
from ..ranks.peers import Peers
from ..ranks.shared_slabs import check_possible
from ..stream.shards import registering_on_host
from .names import LightningEnvironment, ScriptLauncher, SLURMEnvironment, TunerExit

DATA, TENSOR = "data_parallel", "tensor_parallel"  # the axes of a mesh, by Lightning's names


class Axes:
    """The axes along which a run's devices lie: that of the data, and a second one along which layers are cut (Rule 5).

    Without a size of the second one there is the first alone: each rank has whole layers.
    """

    def __init__(self, data: int | Literal["auto"], tensor: int | Literal["auto"] | None) -> None:
        if tensor is None and data != "auto":
            raise OptionError(argument="data_parallel_size", found=data, allowed="given with tensor_parallel_size")
        for argument, size in (("data_parallel_size", data), ("tensor_parallel_size", tensor)):
            if not (size in ("auto", None) or (isinstance(size, int) and is_int(size) and size >= 1)):
                raise OptionError(argument=argument, found=size, allowed="'auto' or an int >= 1")
        self._sizes: Any = data, tensor
        self.has_shards = tensor is not None
        self.shards: int | None = None  # among how many devices layers are cut, once the size is checked
        self.mesh: Any = None
        self.group: Any = None  # of the ranks that have the same weights; None: of all

    def check_size(self, world: int, local: int) -> None:
        """Raise OptionError if ``world`` devices, ``local`` of them on each machine, do not fill the axes."""
        if not self.has_shards:
            return
        data, tensor = self._sizes
        tensor = local if tensor == "auto" else tensor
        data = world // tensor if data == "auto" else data
        if data * tensor != world or world == 1:
            raise OptionError(
                argument="tensor_parallel_size",
                found=f"{tensor} with data_parallel_size={data}",
                allowed=f"such that their product is the number of devices, which is {world}, and more than one: each "
                "has a process of its own",
            )
        self._sizes = data, tensor
        self.shards = tensor

    def backend(self, backend: str, device: torch.device) -> str:
        """Return the backend of the process group."""
        return f"cpu:gloo,{device.type}:{backend}" if self.has_shards and device.type != "cpu" else backend

    def make_mesh(self, module: Any, device: torch.device) -> None:
        """Make the mesh of all ranks, and give it to the module."""
        if not self.has_shards:
            return
        if self.mesh is None:
            from torch.distributed.device_mesh import init_device_mesh  # other runs need nothing of it

            self.mesh = init_device_mesh(device.type, self._sizes, mesh_dim_names=(DATA, TENSOR))
        if module is not None:
            set_device_mesh(module, self.mesh)
        self.group = self.mesh[DATA].get_group()

    def share(self, world: int, rank: int) -> dict[str, int]:
        """Return the arguments of a sampler that draws this rank's share of the data."""
        data, tensor = self._sizes if self.has_shards else (world, 1)
        return {"num_replicas": data, "rank": rank // tensor}

    def making(self) -> contextlib.AbstractContextManager[None]:
        """Make a module's layers in this context."""
        return registering_on_host() if self.has_shards else contextlib.nullcontext()

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
    """The devices of a strategy: Lightning chooses them unless the user passed one."""

    _root_device: torch.device  # Lightning's
    _device_given: bool  # whether the user passed the device
    _parallel_devices: list[torch.device] | None = None
    cluster_environment: Any = None  # the connector sets these two
    _layer_sync: Any = None
    _num_processes = 1  # on each machine
    _machines = 1
    _timeout: timedelta
    _keepalive: timedelta
    options: Options
    _launcher: Any
    model: Any

    _axes = Axes("auto", None)

    _syncs_batch_norms = False  # during a fit

    # ---- devices

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that Lightning chose; None before that, as any other value would choose the accelerator."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices:
            devices = self._take_devices(devices)
        self._parallel_devices = devices
        if devices and self._device_given and self._root_device.type != devices[0].type:
            raise OptionError(
                argument="device",
                found=str(self._root_device),
                allowed=f"on the chosen accelerator ('{devices[0]}'); choose its own, or pass no device here",
            )
        if devices and not self._device_given:
            check_supported(devices[0])
            self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._machines

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        self._machines = count
        self._check_devices()

    @property
    def _num_nodes(self) -> int:
        return self._machines

    @_num_nodes.setter
    def _num_nodes(self, count: int) -> None:  # Fabric sets it past the public one
        self.num_nodes = count

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
        """Raise an error if the options, or this system, do not allow several devices; Lightning says how many."""
        if self.is_distributed and self._device_given:
            raise OptionError(
                argument="device",
                found=str(self._root_device),
                allowed="left out with several devices, which Lightning chooses",
            )
        self.options.check_devices(self._num_processes, self._machines)
        if self.is_distributed:
            check_possible()

    world_size = property(
        lambda self: self._num_processes * self._machines, lambda self, _: None
    )  # SingleDeviceStrategy sets these three
    global_rank = property(lambda self: self._rank("global_rank"), lambda self, _: None)
    local_rank = property(lambda self: self._rank("local_rank"), lambda self, _: None)

    def _rank(self, which: str) -> int:
        return int(getattr(self.cluster_environment, which)()) if self.is_distributed else 0

    @property
    def shards(self) -> int | None:
        """The number of devices among which layers are cut; an OptionError if there are not as many."""
        self._axes.check_size(self.world_size, self._num_processes)
        return self._axes.shards

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return self._rank("node_rank")

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""
        return self._rank("global_rank") == 0

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """The share of the data that this rank gets; None with one device."""
        return self._axes.share(self.world_size, self.global_rank) if self.is_distributed else None

    def set_world_ranks(self) -> None:
        """Tell the environment the ranks, and take this rank's device."""
        if self.is_distributed:
            assert self.parallel_devices is not None
            if self.local_rank >= self._num_processes:
                raise OptionError(
                    argument="devices",
                    found=self._num_processes,
                    allowed=f"more than the local rank, which is {self.local_rank}",
                )
            if not 0 <= self.node_rank < self._machines:
                allowed = f"from 0 to {self._machines - 1}, as there are num_nodes={self._machines}"
                raise OptionError(argument="NODE_RANK", found=self.node_rank, allowed=allowed)
            self._check_launched()
            self.cluster_environment.set_global_rank(self.node_rank * self._num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.world_size)
            setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  # an attribute of a function
            self._root_device = self.parallel_devices[self.local_rank]

    def _launched(self) -> int:
        """Return how many processes of this run a launcher has started, by their environment."""
        environment = self.cluster_environment
        if isinstance(environment, LightningEnvironment):  # Lightning would start them
            return 1
        if isinstance(environment, SLURMEnvironment):  # a job has as many tasks also if its script starts one process
            return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        return int(environment.world_size())

    def _check_launched(self) -> None:
        """Raise OptionError unless a launcher started as many processes as several machines have devices (Rule 3)."""
        environment = self.cluster_environment
        if self._machines == 1 or isinstance(environment, LightningEnvironment):
            return
        if environment.world_size() != self.world_size:
            raise OptionError(
                argument="num_nodes",
                found=self._machines,
                allowed=f"such that num_nodes * devices, which is {self._machines} * {self._num_processes}, are the "
                f"{environment.world_size()} processes that {type(environment).__name__} finds",
            )

    def _check_alone(self) -> None:
        """Raise OptionError if this run on one device is one of several processes that a launcher started (Rule 1)."""
        if not self.is_distributed and (processes := self._launched()) > 1:
            finder = type(self.cluster_environment).__name__
            raise OptionError(
                argument="devices",
                found=1,
                allowed=f"{processes}, the number of processes that {finder} finds, or as many per machine with "
                "num_nodes: with 1 device each of them trains on all the data by itself; if that is meant, pass "
                "plugins=[LightningEnvironment()], and to each a folder of its own",
            )

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            if is_interactive() and not self.cluster_environment.creates_processes_externally:
                raise UnsupportedError(
                    "several devices need a process each, which a notebook cannot start: write a script and run it "
                    "with python or torchrun, or pass devices=1"
                )
            self._launcher = _Launcher(self.cluster_environment, self._num_processes, self._machines)

    # ---- setup

    def _set_up_ranks(self) -> None:
        """Connect the processes, as DDP does."""
        self._axes.check_size(self.world_size, self._num_processes)
        if self.is_distributed:
            self.set_world_ranks()
            backend = self._axes.backend(backend_for(self._root_device), self._root_device)
            init_process_group(self.cluster_environment, backend, timeout=self._timeout)
            self._axes.make_mesh(self._module_to_make, self._root_device)

    @property
    def _module_to_make(self) -> Any:
        """The module that may make its layers once the ranks are connected."""
        return None

    def _sync_batch_norms(self) -> None:
        """Have batch norms compute with the data of all ranks, by the Trainer's ``sync_batchnorm``."""
        if self._layer_sync is not None and self.is_distributed:
            self._syncs_batch_norms = True
            self.model = self._layer_sync.apply(self.model)

    def _revert_batch_norms(self) -> None:
        """Give the module back its own kind of batch norms, as DDP does. Safe twice."""
        if self._syncs_batch_norms:
            self._syncs_batch_norms = False
            self.model = self._layer_sync.revert(self.model)

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

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self.is_distributed and dist.is_initialized():
            dist.barrier(device_ids=[self._root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank."""
        if not (self.is_distributed and dist.is_initialized()):
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **kwargs: Any) -> Any:
        """Reduce a tensor over all ranks."""
        if not (self.is_distributed and dist.is_initialized() and isinstance(tensor, torch.Tensor)):
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
        if not self.is_distributed:
            return decision
        count = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return count == self.world_size if all else count > 0


class _Launcher(ScriptLauncher):
    """Lightning's launcher of a process for each device; it looks whether there is room for what they will make."""

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, then call the function; tell the other ranks of a Trainer's exception.

        They are told before any callback is: one that saves a checkpoint waits for the ranks that handle one.
        """
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except TunerExit:  # the end of a search of Lightning's, on all ranks
            raise
        except BaseException as error:
            if trainer is not None:
                trainer.strategy.tell_peers(error)
            raise
