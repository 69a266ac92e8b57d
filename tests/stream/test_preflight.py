"""A run that can not fit stops before it starts; a host that would be filled is warned, in numbers, before it is."""

import logging

import lightning as L
import pytest
import torch
from torch import nn

import parity
import sp_lightning
from sp_lightning.errors import MemoryBudgetError
from sp_lightning.host.machine import HostMemory
from sp_lightning.host.unit_numbers import UnitNumbers
from sp_lightning.options import Options
from sp_lightning.stream import preflight
from sp_lightning.stream.partition import partition
from sp_lightning.stream.preflight import Means, check_budget, check_device

MIB, GIB = 2**20, 2**30
EIGHT = [UnitNumbers(f"block {index}", 100 * MIB, 100 * MIB, parameters=25 * MIB) for index in range(8)]
ROOT = UnitNumbers("(root)", 50 * MIB, 50 * MIB, resident=True)


def means(can_halve=False, finer=None):
    return Means(can_halve=can_halve, finer=lambda: finer or ([], []))


def refused(units, window, free, **given):
    with pytest.raises(MemoryBudgetError) as stopped:
        check_device(units, window, free * MIB, "cuda:0", means(**given))
    return str(stopped.value)


def test_a_window_that_can_not_fit_is_refused_with_three_changes():
    assert refused([*EIGHT, ROOT], 6, 600) == (
        "with window 6, weights and gradients alone need 650.00 MiB on cuda:0, but 600.00 MiB are free; these "
        "would fit (device memory): window=5 (550.00 MiB); window=1 (250.00 MiB)"
    )
    assert refused([*EIGHT, ROOT], 6, 600, can_halve=True).endswith(
        "window=5 (550.00 MiB); precision='bf16-true' and master_weights=True (325.00 MiB); window=1 (250.00 MiB)"
    )


def test_a_budget_is_refused_in_the_same_way():
    with pytest.raises(
        MemoryBudgetError,
        match=r"needs at least 250.00 MiB for block 0, got 200.00 MiB; raise it; these would fit .* training ad",
    ):
        check_budget(Options(memory_budget=200 * MIB), [*EIGHT, ROOT], False, means())
    said = r"window 6 does not fit .* window=4 \(650.00 MiB\); training adapters .* window=1 \(250.00 MiB"
    with pytest.raises(MemoryBudgetError, match=said):
        check_budget(Options(memory_budget=700 * MIB, window=6), [*EIGHT, ROOT], False, means())
    check_budget(Options(memory_budget=700 * MIB), [*EIGHT, ROOT], False, means())


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
    import simgpu

    simgpu.config.capacity = 600 * 1024
    module, strategy = Wide(), parity.streaming_strategy("simgpu", window=4)
    trainer = parity.make_trainer(strategy, "simgpu", max_steps=1)
    with pytest.raises(
        MemoryBudgetError,
        match=r"need 1.0\d MiB on simgpu:0, but 600.00 KiB are free; .*: window=2 \(514.00 KiB\); prec",
    ):
        trainer.fit(module, [torch.zeros(2, 256)])
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())


@pytest.mark.simgpu
def test_inference_by_hand_needs_no_room_for_gradients():
    import simgpu

    simgpu.config.capacity = 600 * 1024
    with sp_lightning.stream(Wide().blocks, "simgpu", window=2) as handle, torch.no_grad():
        assert handle.module(torch.zeros(2, 256)).shape == (2, 256)


def test_a_host_that_would_be_filled_is_warned_in_numbers(monkeypatch, caplog):
    monkeypatch.setattr(preflight, "host_memory", lambda: HostMemory(4 * GIB, 3 * GIB, "machine", 4 * GIB))
    large = nn.Sequential(*(nn.Linear(2**14, 2**14, device="meta") for _ in range(2)))  # 2 GiB
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preflight.check_host(partition(large), lambda parameter: parameter.dtype)
    assert (
        "training will take 8.00 GiB more host memory (weights 2.00 GiB, wire copies 0 B, gradients "
        "2.00 GiB, optimizer 4.00 GiB if it is AdamW), but 3.00 GiB are free: the system may end the process. "
        "Close other programs, or, with what each would still take: precision='bf16-true' and Adafactor (2.00 GiB; "
        "--trainer.precision bf16-true, configure_optimizers: torch.optim.Adafactor); adapters on a frozen bf16 base "
        "(1.03 GiB; python -m sp_lightning fit --config examples/lora_llm/config.yaml"
    ) in caplog.text


def test_processes_that_will_make_more_copies_than_there_is_room_for(monkeypatch, caplog):
    monkeypatch.setattr(preflight, "host_memory", lambda: HostMemory(4 * GIB, GIB, "machine", 4 * GIB))
    made = nn.utils.skip_init(nn.Linear, 2**14, 2**14, bias=False)  # 1 GiB, of which no page is touched
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preflight.check_copies(made, 2)
        preflight.check_copies(made.to("meta"), 4)
    assert not caplog.records
    monkeypatch.setattr(preflight, "host_memory", lambda: HostMemory(4 * GIB, 2 * GIB, "machine", 4 * GIB))
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preflight.check_copies(nn.utils.skip_init(nn.Linear, 2**14, 2**14, bias=False), 4)
    assert "each of 4 processes makes the model in __init__, with 1.00 GiB of weights" in caplog.text
    assert "3.00 GiB more, but 2.00 GiB are free" in caplog.text
