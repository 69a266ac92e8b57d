"""A run that can not fit stops before it starts; a host that would be filled is warned, in numbers, before it is."""

import copy
import logging

import lightning as L
import pytest
import torch
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.core.host import HostMemory
from sp_lightning.core.unit_numbers import UnitNumbers
from sp_lightning.errors import MemoryBudgetError
from sp_lightning.memory.device import Device
from sp_lightning.memory.partition import partition
from sp_lightning.options import Options
from sp_lightning.ranks.alone import Alone
from sp_lightning.runtime import preflight
from sp_lightning.runtime.preflight import Means, check_budget, check_device, finer_classes
from sp_lightning.storage.in_memory import InMemory

MIB, GIB = 2**20, 2**30
HOST = Device(torch.device("cpu"))
EIGHT = [UnitNumbers(f"block {index}", 100 * MIB, 100 * MIB, parameters=25 * MIB) for index in range(8)]
HEAD = UnitNumbers("head", 500 * MIB, 500 * MIB, parameters=125 * MIB)
ROOT = UnitNumbers("(root)", 50 * MIB, 50 * MIB, resident=True)
SECOND = 100 * MIB  # bytes that go up, a quarter of those that go down, parameters that are stepped


def float32(dtype):
    return dtype


def means(can_halve=False, finer=None):
    return Means(can_halve=can_halve, finer=lambda: finer or ([], []))


def refused(units, window, free, **given):
    with pytest.raises(MemoryBudgetError) as stopped:
        check_device(units, window, free * MIB, "cuda:0", means(**given))
    return str(stopped.value)


def test_what_certainly_fits_is_let_through():
    check_device([*EIGHT, ROOT], 6, 650 * MIB, "cuda:0", means())
    check_device([*EIGHT, ROOT], 1, 250 * MIB, "cuda:0", means())


def test_a_window_that_can_not_fit_is_refused_with_three_changes():
    assert refused([*EIGHT, ROOT], 6, 600) == (
        "with window 6, weights and gradients alone need 650.00 MiB on cuda:0, but 600.00 MiB are free; these "
        "would fit (device memory): window=5 (550.00 MiB); window=1 (250.00 MiB)"
    )
    assert refused([*EIGHT, ROOT], 6, 600, can_halve=True).endswith(
        "window=5 (550.00 MiB); precision='bf16-true' and master_weights=True (325.00 MiB); window=1 (250.00 MiB)"
    )


def test_smaller_units_are_offered_by_their_classes():
    halves = [UnitNumbers(f"half {i}", 50 * MIB, 50 * MIB, parameters=13 * MIB) for i in range(16)]
    said = refused([*EIGHT, ROOT], 6, 600, finer=(["Half"], [*halves, ROOT]))
    assert "units=['Half'] (350.00 MiB)" in said


def test_one_unit_needs_room_beside_its_gradients():
    said = refused([*EIGHT, HEAD, ROOT], 1, 1049)
    assert "with window 1, weights and gradients alone need 1.03 GiB" in said
    assert said.endswith("training adapters beside frozen weights (550.00 MiB)")


def test_where_nothing_fits_smaller_units_are_named():
    assert refused([*EIGHT, ROOT], 1, 100).endswith("; name smaller units, or use a device with more memory")


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


def test_the_classes_of_smaller_units_leave_the_others_whole():
    block = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.LayerNorm(8)))
    net = nn.Sequential(nn.Embedding(4, 8), *(nn.Sequential(copy.deepcopy(block), nn.Bilinear(8, 8, 8)) for _ in "12"))
    cut = partition(net, ["Sequential", "Embedding"])
    assert finer_classes(cut) == ["Linear", "LayerNorm", "Bilinear", "Embedding"]
    assert finer_classes(partition(net, ["Linear"])) == []


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
    with pytest.raises(
        MemoryBudgetError,
        match=r"need 1.0\d MiB on simgpu:0, but 600.00 KiB are free; .*: window=2 \(514.00 KiB\); prec",
    ):
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
    monkeypatch.setattr(preflight, "host_memory", lambda: HostMemory(4 * GIB, 3 * GIB, "machine", 4 * GIB))
    large = nn.Sequential(*(nn.Linear(2**14, 2**14, device="meta") for _ in range(2)))  # 2 GiB
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preflight.check_host(partition(large), float32, InMemory(), Alone(HOST))
    assert (
        "training will take 8.00 GiB more host memory (weights 2.00 GiB, wire copies 0 B, gradients "
        "2.00 GiB, optimizer 4.00 GiB if it is AdamW), but 3.00 GiB are free: the system may end the process. "
        "Close other programs, or, with what each would still take: precision='bf16-true' and Adafactor (2.00 GiB; "
        "--trainer.precision bf16-true, configure_optimizers: torch.optim.Adafactor); adapters on a frozen bf16 base "
        "(1.03 GiB; python -m sp_lightning fit --config examples/lora_llm/config.yaml"
    ) in caplog.text


@pytest.mark.parametrize("free, offered", [(7, "Adafactor (4.00 GiB"), (0.1, "nothing fits but a smaller model")])
def test_what_a_filled_host_has_room_for_is_offered(free, offered, monkeypatch, caplog):
    free_nbytes = int(free * GIB)
    monkeypatch.setattr(preflight, "host_memory", lambda: HostMemory(16 * GIB, free_nbytes, "machine", 16 * GIB))
    large = nn.Sequential(*(nn.Linear(2**14, 2**14, device="meta") for _ in range(2)))  # 2 GiB
    with caplog.at_level(logging.WARNING, "sp_lightning"):
        preflight.check_host(partition(large), float32, InMemory(), Alone(HOST))
    assert f"would still take: {offered}" in caplog.text


def test_a_host_with_room_is_not_warned(monkeypatch, caplog):
    monkeypatch.setattr(preflight, "host_memory", lambda: HostMemory(64 * GIB, 32 * GIB, "machine", 64 * GIB))
    large = nn.Sequential(*(nn.Linear(2**14, 2**14, device="meta") for _ in range(2)))
    preflight.check_host(partition(large), float32, InMemory(), Alone(HOST))
    assert not caplog.records


def test_a_small_model_asks_nothing(monkeypatch):
    monkeypatch.setattr(preflight, "host_memory", lambda: pytest.fail("asked"))
    preflight.check_host(partition(models.case("mlp").make()), float32, InMemory(), Alone(HOST))


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
