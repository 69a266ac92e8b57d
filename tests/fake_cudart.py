"""CUDA's registration of host memory, for a device that is not CUDA's."""

import torch

from sp_lightning import device


class FakeCudart:
    """Refuses what begins after so many bytes are registered."""

    def __init__(self, room=2**40):
        self.room = room
        self.registered = {}
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        assert not any(a < address + nbytes and address < a + n for a, n in self.registered.items())
        self.calls.append(("register", address))
        if sum(self.registered.values()) + nbytes > self.room:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, error):
        return {2: "out of memory", 713: "part or all of the memory is not registered"}[error]


def install(monkeypatch):
    """Slabs of whichever device are registered with it."""
    fake = FakeCudart()
    monkeypatch.setattr(device, "_cudart", lambda: fake)
    monkeypatch.setattr(device, "page_lock", device.CudaPageLock)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.calls.append(("synchronize", device)))
    return fake
