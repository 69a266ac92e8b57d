"""Frozen weights that stay in the files they were loaded from (`host_budget="0B"`): the same bits, and typed errors."""

import copy
import errno
import os

import in_files
import pytest
import torch
from stream_programs import Net, Program, check, stream
from torch import nn

from sp_lightning.errors import DiskError, HostMemoryError, SourceFileError
from sp_lightning.store import files, pipeline
from sp_lightning.store.files import Mount

DEVICES = [pytest.param("cpu"), pytest.param("simgpu", marks=pytest.mark.simgpu)]
preadv = os.preadv


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Buffers of one block: each unit needs several."""
    monkeypatch.setattr(pipeline, "MOST", 4096)
    monkeypatch.setattr(pipeline, "LEAST", 4096)


def net(folder: str | None = None, count: int = 4) -> nn.Module:
    """A net whose blocks are frozen but for every third weight, and lie in files."""
    made = Net(count=count)
    in_files.freeze(made.blocks)
    in_files.put(made.blocks, folder)
    return made


def mapped(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if not p.requires_grad and id(p) in files.find([p]))


def train(run, model):
    losses = run.loop(model)
    with torch.no_grad():
        return losses, model(run.x(9))


def write_between_steps(run, model):
    losses = run.loop(model, count=2)
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
        model.blocks[2].norm.weight.data[3] = 0.5
    return losses, run.loop(model, count=2), model.blocks[1].up.weight.clone()


def thaw(run, model):
    losses = run.loop(model, count=2)
    model.blocks[0].up.weight.requires_grad_(True)
    return losses, run.loop(model, count=3)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("policy", ["keep", "recompute+offload"])
@pytest.mark.parametrize("device", DEVICES)
def test_training_has_the_bits_of_weights_in_memory(device, policy, window):
    check(Program(train, net, options={"host_budget": 0}), device, policy, window)


@pytest.mark.parametrize("program", [write_between_steps, thaw], ids=lambda program: program.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_is_written_goes_up_from_memory(device, program):
    check(Program(program, net, options={"host_budget": 0}), device)


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_weights_are_read_each_visit_without_host_memory(device):
    model = net()
    before, there = mapped(model), [p.data_ptr() for p in model.blocks.parameters() if not p.requires_grad]
    with stream(model, device, host_budget=0, window=1) as handle:
        frozen = sum(p.nbytes for p in model.blocks.parameters() if not p.requires_grad)
        slabs = sum(unit.slab.nbytes for unit in handle.units if not unit.is_resident)
        assert handle.uses_files and slabs < sum(unit.nbytes for unit in handle.units if not unit.is_resident) - frozen
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(4, 8, device=handle.device.torch_device))
        assert handle.stats()["disk_read"] >= 2 * frozen
        assert mapped(model) == before
    assert there == [p.data_ptr() for p in model.blocks.parameters() if not p.requires_grad]


def test_loading_the_values_that_files_have_leaves_weights_there():
    model = net()
    state = copy.deepcopy(model.state_dict())
    state["blocks.1.up.weight"] += 1
    with stream(model, "cpu", window=1, host_budget=0):
        before = mapped(model)
        model.load_state_dict(state)
        assert mapped(model) > before - 3 * model.blocks[1].up.weight.nbytes  # and what shares its pages
        with torch.no_grad():
            found = model(torch.ones(4, 8))
    plain = Net(count=4)
    plain.load_state_dict(state)
    assert torch.equal(plain(torch.ones(4, 8)), found)


def test_a_budget_that_all_fits_reads_no_file():
    with stream(net(), "cpu", host_budget=1 << 30) as handle:
        assert not handle.uses_files


def test_a_budget_that_is_not_met_names_what_takes_memory():
    model = Net()
    with pytest.raises(HostMemoryError, match=r"host_budget=1.00 KiB cannot be met: .*state .*weights .*disk="):
        stream(model, "cpu", host_budget=1024)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    stream(model, "cpu").close()


def failing(monkeypatch, number):
    """Have direct reads fail until the returned list is emptied."""
    broken = [True]

    def read(fd, views, at):
        if broken:
            raise OSError(number, os.strerror(number))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", read)
    return broken


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_that_fails_is_typed_and_the_next_visit_retries(device, monkeypatch):
    model = net()
    with stream(model, device, host_budget=0, window=2) as handle:
        x = torch.ones(4, 8, device=handle.device.torch_device)
        with torch.no_grad():
            wanted = model(x).cpu()
            broken = failing(monkeypatch, errno.EIO)
            for _ in range(2):
                with pytest.raises(DiskError, match="could not be read at byte"):
                    model(x)
            broken.clear()
            assert torch.equal(model(x).cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_changes_under_the_run_is_an_error(device, tmp_path):
    model = net(str(tmp_path))
    with stream(model, device, host_budget=0, window=1) as handle:
        x = torch.ones(4, 8, device=handle.device.torch_device)
        with torch.no_grad():
            model(x)
            with open(tmp_path / "weights-0", "r+b") as file:
                file.write(b"x")
            with pytest.raises(SourceFileError, match="changed while weights stayed in it"):
                model(x)


def test_a_file_that_another_one_replaced_stays_what_it_was(tmp_path):
    model = net(str(tmp_path))
    with stream(model, "cpu", window=1, host_budget=0), torch.no_grad():
        wanted = model(torch.ones(4, 8))
        os.replace(in_files.write(str(tmp_path / "other"), [torch.zeros(9000)]), tmp_path / "weights-0")
        assert torch.equal(model(torch.ones(4, 8)), wanted)


def test_weights_of_a_file_without_a_name_are_copied(tmp_path):
    model = net(str(tmp_path))
    for path in tmp_path.iterdir():
        path.unlink()
    with stream(model, "cpu", window=1, host_budget=0) as handle:
        assert not handle.uses_files


def test_weights_on_a_network_file_system_are_copied(monkeypatch, caplog):
    model = net()
    monkeypatch.setattr(files, "mount_of", lambda path: Mount("nfs4", 0))
    with stream(model, "cpu", window=1, host_budget=0) as handle:
        assert not handle.uses_files
    assert "on nfs4" in caplog.text
