"""CUDA's registration of host memory, on the simulated accelerator."""

import torch

import simgpu
from sp_lightning.memory import device


class FakeCudart:
    """Refuses what would make more than `room` bytes."""

    def __init__(self, room=2**40):
        self.room = room
        self.registered = {}
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("register", address))
        if sum(self.registered.values()) + nbytes > self.room:
            return 2
        simgpu.pin(address, nbytes)  # which refuses what is pinned already
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        if self.registered.pop(address, None) is None:
            return 713
        simgpu.unpin(address)
        return 0

    def cudaGetErrorString(self, error):
        return {2: "out of memory", 713: "part or all of the memory is not registered"}[error]

    def synchronize(self, device):
        """`torch.cuda.synchronize`."""
        self.calls.append(("synchronize", device))
        torch.accelerator.synchronize(device)


def install(monkeypatch):
    """Slabs are registered with it."""
    fake = FakeCudart()
    monkeypatch.setattr(device, "_cudart", lambda: fake)
    monkeypatch.setattr(device, "page_lock", device.CudaPageLock)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    return fake
