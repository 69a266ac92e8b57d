"""Where a disk fails, is full or is none of this machine, a run raises a typed error, and keeps nothing half done."""

import contextlib
import copy
import errno
import gc
import itertools
import os
import signal
import sys

import forks
import pytest
import torch
from stream_programs import Net, stream
from test_training_from_disk import Wide
from torch import nn

from sp_lightning.errors import DiskError, HalfAppliedStepError, HostMemoryError, OptionError
from sp_lightning.store import files, pipeline, scratch


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    for name in ("MOST", "LEAST", "SMALLEST"):
        monkeypatch.setattr(pipeline, name, 1 << 16)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net(block=Wide, count=3)


def streaming(model, **more):
    return stream(model, "cpu", **{"host_budget": 0, "disk": os.getcwd(), "window": 1, **more})


def backward(model, seed=0):
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def failing(monkeypatch, call, number, at, *, once=True):
    """Have a call to the system fail at one of its calls, counted from now on."""
    calls, plain = itertools.count(), getattr(os, call)

    def fails(*given):
        count = next(calls)
        if count == at or (not once and count > at):
            raise OSError(number, os.strerror(number))
        return plain(*given)

    monkeypatch.setattr(os, call, fails)


def assert_plain(model, before):
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ---- before work begins


@pytest.mark.parametrize("call, at", [("posix_fallocate", 0), ("posix_fallocate", 1), ("pwritev", 2), ("pwritev", 9)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_while_a_run_begins_leaves_the_module(call, at, number, monkeypatch):
    model = net()
    before = copy.deepcopy(model.state_dict())
    with monkeypatch.context() as broken:
        failing(broken, call, number, at)
        with pytest.raises(DiskError) as caught:
            streaming(model)
    assert caught.value.errno == number and caught.value.writes
    assert_plain(model, before)
    streaming(model).close()


def test_a_full_disk_is_an_error_with_both_numbers(monkeypatch):
    class Full:
        f_bavail, f_frsize = 8, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Full)
    with pytest.raises(DiskError, match=r"needs .*B more there, and 32.00 KiB are free: nothing was stepped"):
        streaming(net())


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "fuse.sshfs", "9p"])
def test_a_folder_in_memory_or_on_a_network_is_refused(kind, monkeypatch):
    monkeypatch.setattr(scratch, "mount_of", lambda path: files.Mount(kind, 0))
    with pytest.raises(OptionError, match=f"disk must be a folder on a local disk of this machine; .* {kind}"):
        streaming(net())


def test_a_folder_that_is_not_there_is_refused(monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(OptionError, match="there is no such folder"):
        streaming(net(), disk="/no/such/folder")
    gc.collect()
    assert not ignored  # the file that was never opened is closed without a word


def test_a_limit_of_files_sizes_is_named(monkeypatch):
    def truncate(file, nbytes):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(OptionError, match=r"a local disk.*ulimit -f permits \(File too large\)"):
        streaming(net())


def test_a_disk_without_direct_transfers_is_exact_and_warns_once(monkeypatch, caplog):
    model, plain = net(), net()
    opened = os.open

    def refuses(path, flags, *more, **others):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuses)
    for each in (model, plain):
        with streaming(each) if each is model else contextlib.nullcontext():
            optimizer = torch.optim.AdamW(each.parameters(), fused=True)
            for seed in range(2):
                backward(each, seed)
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), plain.parameters(), strict=True))
    assert sum("cannot be read or written directly" in message for message in caplog.messages) == 1


def test_a_budget_that_a_disk_does_not_meet_names_what_is_left():
    with pytest.raises(HostMemoryError, match=r"cannot be met: .*fixed .*buffers"):
        streaming(net(), host_budget=4096)


# ---- in a step


def trained():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


@pytest.mark.parametrize("call, at", [("pwritev", 2), ("preadv", 12)])
def test_a_step_failed_midway_is_neither_stepped_on_nor_saved(call, at, monkeypatch):
    model, optimizer = trained()
    with streaming(model) as handle:
        backward(model)
        optimizer.step()
        handle.finish_step()
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        optimizer.zero_grad()
        backward(model, 1)
        for param in model.parameters():
            param.grad.content.arrived.synchronize() if hasattr(param.grad, "content") else None
        with monkeypatch.context() as broken:
            failing(broken, call, errno.EIO, at)
            with pytest.raises(DiskError, match="Input/output error"):
                optimizer.step()
                handle.finish_step()
        with pytest.raises(HalfAppliedStepError, match="ended half-way"):
            optimizer.state_dict()
        with pytest.raises(HalfAppliedStepError, match="ended half-way"):
            optimizer.step()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        backward(model, 1)
        optimizer.step()
        found = [p.detach().clone() for p in model.parameters()]
    plain, its = trained()
    for seed in range(2):
        backward(plain, seed)
        its.step()
        its.zero_grad()
    assert all(torch.equal(mine, other) for mine, other in zip(found, plain.parameters(), strict=True))


def test_an_unwritten_gradient_is_an_error_before_any_step(monkeypatch):
    model, optimizer = trained()
    with streaming(model):
        before = copy.deepcopy(model.state_dict())
        with monkeypatch.context() as broken:
            failing(broken, "pwritev", errno.EIO, 0, once=False)
            with pytest.raises(DiskError, match="could not be written"):
                backward(model)
                optimizer.step()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


# ---- processes


def test_a_forked_process_has_neither_pages_nor_descriptors():
    model, optimizer = trained()
    with streaming(model):
        backward(model)
        optimizer.step()
        state = optimizer.state[model.blocks[0].up.weight]["exp_avg"]
        file = scratch.files[os.getcwd()]
        begin, descriptor = file._flat.data_ptr(), file.fd
        child = os.fork()
        if child == 0:
            found = 1
            with contextlib.suppress(BaseException):
                try:
                    state.sum()
                except RuntimeError as error:
                    with open("/proc/self/maps") as maps:
                        is_mapped = any(int(line.split("-")[0], 16) == begin for line in maps)
                    is_open = os.path.exists(f"/proc/self/fd/{descriptor}")
                    found = 0 if "forked process" in str(error) and not is_mapped and not is_open else 2
            os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert state.isfinite().all()


PROGRAM = """
import os, signal, torch, sp_lightning.handle
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(200, 200), nn.ReLU()) for _ in range(4)])
handle = sp_lightning.handle.stream(model, "cpu", host_budget="0B", disk=os.getcwd(), window=1)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(3):
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert handle.stats()["disk_written"] > 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_no_file():
    assert forks.run(PROGRAM, modules=("torch",)).returncode == -signal.SIGKILL
    assert os.listdir() == []
