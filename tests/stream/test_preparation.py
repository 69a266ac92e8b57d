"""A run that cannot fit stops before it starts; a host that several processes would fill is warned of, in numbers."""

import logging

import lightning as L
import pytest
import torch
from torch import nn

import parity
import sp_lightning
from sp_lightning.errors import MemoryBudgetError
from sp_lightning.host.machine import HostMemory
from sp_lightning.host.room import UnitNumbers, first_window
from sp_lightning.stream import preparation

MIB, GIB = 2**20, 2**30


def test_a_budget_that_does_not_suffice_is_refused_in_numbers():
    units = [UnitNumbers(f"block {index}", 100 * MIB, 100 * MIB) for index in range(8)]
    units.append(UnitNumbers("(root)", 50 * MIB, 50 * MIB, resident=True))
    with pytest.raises(MemoryBudgetError, match=r"needs at least 300.00 MiB for block 0, got 200.00 MiB: raise it"):
        first_window("auto", 200 * MIB, units, False)
    with pytest.raises(MemoryBudgetError, match=r"window 6 does not fit .* which holds 4 of the largest"):
        first_window(6, 700 * MIB, units, False)
    assert [first_window(window, 700 * MIB, units, False) for window in ("auto", 3)] == [4, 3]


class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))

    def training_step(self, batch, index):
        raise AssertionError("the run started")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.simgpu
def test_a_fit_without_room_never_starts_or_touches_its_module():
    import simgpu

    simgpu.config.capacity = 600 * 1024
    module, strategy = Wide(), parity.streaming_strategy("simgpu", window=4)
    trainer = parity.make_trainer(strategy, "simgpu", max_steps=1)
    with pytest.raises(
        MemoryBudgetError,
        match=r"with window 4, .* need 1.0\d MiB on simgpu:0, but 600.00 KiB are free: lower window",
    ):
        trainer.fit(module, [torch.zeros(2, 256)])
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())


@pytest.mark.simgpu
def test_inference_by_hand_needs_no_room_for_gradients():
    import simgpu

    simgpu.config.capacity = 600 * 1024
    with sp_lightning.stream(Wide().blocks, "simgpu", window=2) as handle, torch.no_grad():
        assert handle.module(torch.zeros(2, 256)).shape == (2, 256)


def test_processes_that_make_more_copies_than_fit_are_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(preparation, "host_memory", lambda: HostMemory(4 * GIB, GIB, "machine", 4 * GIB))
    made = nn.utils.skip_init(nn.Linear, 2**14, 2**14, bias=False)  # 1 GiB, of which no page is touched
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preparation.check_copies(made, 2)
        preparation.check_copies(made.to("meta"), 4)
    assert not caplog.records
    monkeypatch.setattr(preparation, "host_memory", lambda: HostMemory(4 * GIB, 2 * GIB, "machine", 4 * GIB))
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preparation.check_copies(nn.utils.skip_init(nn.Linear, 2**14, 2**14, bias=False), 4)
    assert "each of 4 processes makes the model in __init__, with 1.00 GiB of weights" in caplog.text
    assert "3.00 GiB more, but 2.00 GiB are free" in caplog.text
