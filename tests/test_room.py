"""A run that can not fit stops before it starts; a host that would be filled is warned, in numbers, before it is."""

import logging

import lightning as L
import pytest
import torch
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning import room
from sp_lightning.autotune import UnitBytes
from sp_lightning.errors import MemoryBudgetError
from sp_lightning.host import HostMemory
from sp_lightning.room import check_device
from sp_lightning.units import partition

MIB, GIB = 2**20, 2**30
EIGHT = [UnitBytes(f"block {index}", 100 * MIB, 100 * MIB) for index in range(8)]
HEAD = UnitBytes("head", 500 * MIB, 500 * MIB)
ROOT = UnitBytes("(root)", 50 * MIB, 50 * MIB, resident=True)


def float32(dtype):
    return dtype


def refused(units, window, free, can_halve=False):
    with pytest.raises(MemoryBudgetError) as stopped:
        check_device(units, window, free * MIB, "cuda:0", can_halve)
    return str(stopped.value)


def test_what_certainly_fits_is_let_through():
    check_device([*EIGHT, ROOT], 6, 650 * MIB, "cuda:0", False)
    check_device([*EIGHT, ROOT], 1, 250 * MIB, "cuda:0", False)


def test_a_window_that_can_not_fit_is_refused_with_one_that_does_and_its_cost():
    assert refused([*EIGHT, ROOT], 6, 649) == (
        "with window 6, weights and gradients alone need 650.00 MiB on cuda:0, and 649.00 MiB are free; "
        "what would fit: window=5 (550.00 MiB, 1.1 times the bytes up)"
    )


def test_half_precision_is_offered_where_it_makes_room():
    said = refused([*EIGHT, ROOT], 6, 400, can_halve=True)
    assert (
        "window=3 (350.00 MiB, 1.3 times the bytes up); precision='bf16-true' with master_weights=True (325.00" in said
    )
    assert "bf16-true" not in refused([*EIGHT, ROOT], 6, 300, can_halve=True)


def test_one_unit_needs_room_beside_its_gradients():
    said = refused([*EIGHT, HEAD, ROOT], 1, 1049)
    assert "with window 1, weights and gradients alone need 1.03 GiB" in said
    assert said.endswith("what would fit: training adapters beside frozen weights (550.00 MiB, 1 times the bytes up)")


def test_where_nothing_fits_smaller_units_are_named():
    assert refused([*EIGHT, ROOT], 1, 100).endswith("; name smaller units, or use a device with more memory")


class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))

    def training_step(self, batch, index):
        raise AssertionError("the run started")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.simgpu
def test_a_fit_stops_before_it_starts_and_leaves_the_module_alone():
    import simgpu.lightning

    simgpu.config.capacity = 600 * 1024
    module, strategy = Wide(), parity.streaming_strategy("simgpu", window=4)
    trainer = L.Trainer(strategy=strategy, accelerator="simgpu", devices=1, max_steps=1, logger=False, **QUIET)
    with pytest.raises(MemoryBudgetError, match=r"need 1.0\d MiB on simgpu:0, and 600.00 KiB are free; .* window=2 \("):
        trainer.fit(module, [torch.zeros(2, 256)])
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())


QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.mark.simgpu
def test_inference_by_hand_needs_no_room_for_gradients():
    import simgpu

    simgpu.config.capacity = 600 * 1024
    with sp_lightning.stream(Wide().blocks, "simgpu", window=2) as handle, torch.no_grad():
        assert handle.module(torch.zeros(2, 256)).shape == (2, 256)


def test_a_host_that_would_be_filled_is_warned_in_numbers(monkeypatch, caplog):
    monkeypatch.setattr(room, "host_memory", lambda: HostMemory(4 * GIB, 2 * GIB, "machine", 4 * GIB))
    large = nn.Sequential(*(nn.Linear(2**14, 2**14, device="meta") for _ in range(2)))  # 2 GiB
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        room.check_host(partition(large), float32)
    assert (
        "training will take 8.00 GiB more of host memory (weights 2.00 GiB, converted for their way 0 B, gradients "
        "2.00 GiB, optimizer 4.00 GiB if it is AdamW), and 2.00 GiB are free: the system may end the process"
    ) in caplog.text


def test_a_host_with_room_is_not_warned(monkeypatch, caplog):
    monkeypatch.setattr(room, "host_memory", lambda: HostMemory(64 * GIB, 32 * GIB, "machine", 64 * GIB))
    room.check_host(partition(nn.Sequential(*(nn.Linear(2**14, 2**14, device="meta") for _ in range(2)))), float32)
    assert not caplog.records


def test_a_small_model_asks_nothing(monkeypatch):
    monkeypatch.setattr(room, "host_memory", lambda: pytest.fail("asked"))
    room.check_host(partition(models.case("mlp").make()), float32)
