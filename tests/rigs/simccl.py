"""A process group for tensors of the simulated device: each collective copies them to the host, where gloo runs it.

The race checker sees an ordinary copy down, which the host waits for, and one up, which runs on the caller's stream
after a collective returns. Tensors of the host have a gloo of their own, as beside NCCL: collectives of either kind
come in one order, and in none with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future


class HostGroup(dist.ProcessGroup):
    """Collectives of a simulated device's tensors, through gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._size = size
        self._gloos = {
            kind: dist.ProcessGroupGloo(dist.PrefixStore(kind, store), rank, size, timeout)
            for kind in ("cpu", "simgpu")
        }

    def getBackendName(self) -> str:
        return "simccl"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def _for(self, tensor: torch.Tensor) -> Any:
        return self._gloos[tensor.device.type]

    def _through_host(self, tensors: list[torch.Tensor], run: Callable[[torch.Tensor], Any]) -> Any:
        for tensor in tensors:
            host = tensor.cpu()
            run(host).wait()
            send_up(host, tensor)
        return done(tensors)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()
        if options.reduceOp == dist.ReduceOp.AVG:  # which NCCL has, and gloo has not
            options.reduceOp = dist.ReduceOp.SUM
            self.allreduce(tensors, options)
            for tensor in tensors:
                tensor.copy_(tensor / self._size)
            return done(tensors)
        return self._through_host(tensors, lambda host: self._for(tensors[0]).allreduce([host], options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._through_host(tensors, lambda host: self._for(tensors[0]).broadcast([host], options))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            hosts = [torch.empty(part.shape, dtype=part.dtype) for part in output]
            self._for(tensor).allgather([hosts], [tensor.cpu()], options or dist.AllgatherOptions()).wait()
            for part, host in zip(output, hosts, strict=True):
                send_up(host, part)
        return done(outputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> Any:
        hosts = [[part.cpu() for part in parts] for parts in inputs]
        return self._through_host(outputs, lambda host: self._for(outputs[0]).scatter([host], hosts, options))

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            hosts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(self._size)]
            self._for(tensor).allgather([hosts], [tensor.cpu()]).wait()
            send_up(torch.cat([host.reshape(-1) for host in hosts]).view(output.shape), output)
        return done(outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            host = torch.empty(output.shape, dtype=output.dtype)
            self._for(tensor)._reduce_scatter_base(host, tensor.cpu(), options).wait()
            send_up(host, output)
        return done(outputs)

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, theirs: list[int], ours: list[int], options: Any = None
    ) -> Any:
        host = torch.empty(output.shape, dtype=output.dtype)
        self._for(tensor).alltoall_base(host, tensor.cpu(), theirs, ours, dist.AllToAllOptions()).wait()
        send_up(host, output)
        return done([output])

    # As other versions of torch call them.
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        torch.accelerator.synchronize()
        self._gloos["cpu"].barrier().wait()
        return done([])


def send_up(host: torch.Tensor, there: torch.Tensor) -> None:
    there.copy_(host if there.device.type == "cpu" else host.pin_memory(), non_blocking=True)


def done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def create(store: Any, rank: int, size: int, timeout: Any) -> HostGroup:
    return HostGroup(store, rank, size, timeout)


def register() -> str:
    """Register the backend; return what `init_process_group` is told for both kinds of tensors.

    It is no default for the device, which Lightning would take in the tests that follow in this process.
    """
    if "simccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simccl", create, devices=["simgpu"])
        del dist.Backend.default_device_backend_map["simgpu"]
    return "cpu:gloo,simgpu:simccl"
