"""Optimizers whose state lies in the scratch file step to the bits of those whose state is in memory."""

import contextlib
import copy
import errno
import itertools
import os
import time

import pytest
import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

import parity
from sp_lightning.core.telemetry import Counters
from sp_lightning.disk.scratch_file import ScratchFile
from sp_lightning.disk.state_ring import BUFFERS, SMALLEST
from sp_lightning.errors import DiskError
from sp_lightning.optim.pieces import fuse, step_each, step_in_pieces
from sp_lightning.optim.state_on_disk import StateOnDisk
from sp_lightning.ranks.board import ONE_RANK
from sp_lightning.steps import torn_step

KINDS = {
    "adamw": (AdamW, {}),
    "adam, amsgrad": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd, no momentum": (SGD, {"lr": 0.1}),
    "rmsprop": (RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (Adagrad, {}),
    "adadelta": (Adadelta, {}),
    "adamax": (Adamax, {}),
    "nadam": (NAdam, {}),
    "radam": (RAdam, {}),
    "rprop": (Rprop, {}),
    "asgd": (ASGD, {"t0": 1}),
}
# Elements: of one block, of several portions, whose pieces end inside of blocks where threads share them, and of none.
SHAPES = [(3, 5), (300, 401), (7,), (99_991,), (), (0,), (64, 32), (131_072 + 2, 3)]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    if len(made) > 6:
        made[6] = torch.nn.Parameter(made[6].detach().t())  # strides of its own
    return made


def give_gradients(params, step, nan=False):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator)
        if nan:
            grad.view(-1)[::7] = float("nan")
            grad.view(-1)[3::11] = float("inf")
        param.grad = torch.empty_like(param).copy_(grad)


@pytest.fixture
def file(tmp_path):
    with contextlib.closing(ScratchFile(str(tmp_path), ONE_RANK)) as made:
        yield made


@contextlib.contextmanager
def on_disk(file, optimizer, fuses=False, buffer=SMALLEST):
    """State of all parameters in the file, with small buffers."""
    disk = StateOnDisk(file, buffer, Counters(), fuses)
    disk.parameters = {id(param) for group in optimizer.param_groups for param in group["params"]}
    shadow = (fuse if fuses else step_in_pieces)(optimizer) or step_in_pieces(optimizer) or step_each(optimizer)
    disk.attach(optimizer, shadow)
    try:
        yield disk
    finally:
        if shadow is not None:
            shadow.close()
        disk.close()


def assert_equal(ours, theirs, optimizer, plain):
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert parity.difference(b.detach(), a.detach()) is None, index
    found, expected = optimizer.state_dict(), plain.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        assert list(found["state"][index]) == list(state)
        for key, value in state.items():
            here = found["state"][index][key]
            assert here.stride() == value.stride() if isinstance(value, torch.Tensor) else True
            assert parity.difference(value, here) is None, (index, key)


def spilled(disk, optimizer):
    """The bytes of state in the file."""
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(v.nbytes for v in values if disk._file.place_of(v) is not None)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@parity.product(
    kind=list(KINDS), dtype=["float32", "bfloat16", "float64"], count=[1, 2, 3], fuses=[False, True], nan=[False, True]
)
@pytest.mark.few(1)
def test_steps_in_portions_have_the_bits_of_the_loop(kind, dtype, count, fuses, nan, file, threads):
    threads(count)
    cls, options = KINDS[kind]
    dtype = getattr(torch, dtype)
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, plain = cls(ours, **options), cls(theirs, **options)
    reference = fuse(plain) if fuses else None
    with on_disk(file, optimizer, fuses) as disk:
        for step in range(4):
            give_gradients(ours, step, nan)
            give_gradients(theirs, step, nan)
            optimizer.step()
            plain.step()
        assert_equal(ours, theirs, optimizer, plain)
        whole = sum(v.nbytes for state in plain.state.values() for v in state.values() if v.dim())
        assert spilled(disk, optimizer) == whole
        assert (disk._counters.disk_read, disk._counters.disk_written) == traffic(optimizer, fuses, whole)
    if reference is not None:
        reference.close()


WHOLE = {
    "adafactor": (Adafactor, {"lr": 0.01}),
    "adafactor, options": (Adafactor, {"lr": 0.01, "weight_decay": 0.1, "maximize": True, "d": 2.0}),
    "muon": (Muon, {"lr": 0.01}),
    "muon, options": (Muon, {"lr": 0.01, "nesterov": False, "weight_decay": 0.3}),
}
# In a buffer, in several, too large for all, and of strides of their own; Muon takes matrices alone.
MATRICES = [(3, 5), (100, 120), (200, 300), (500, 400), (30, 70)]
OTHERS = [(7,), (9000,), (20_000,), (3, 20, 7), ()]


@parity.product(kind=list(WHOLE), dtype=["float32", "bfloat16"], count=[1, 2], weights=[False, True], nan=[False, True])
@pytest.mark.few(1)
def test_parameters_that_are_stepped_whole_have_the_bits_of_the_loop(
    kind, dtype, count, weights, nan, file, threads, caplog
):
    threads(count)
    cls, options = WHOLE[kind]
    dtype = getattr(torch, dtype)
    shapes = MATRICES + (OTHERS if cls is Adafactor else [])
    ours, theirs = (parameters(dtype, shapes) for _ in range(2))
    for params in (ours, theirs):
        params[4] = torch.nn.Parameter(params[4].detach().t())
    optimizer, plain = cls(ours, **options), cls(theirs, **options)
    with caplog.at_level("INFO"), on_disk(file, optimizer) as disk:
        room = disk._ring.nbytes
        if weights:
            for param in ours:
                if param.dim() and param.numel():
                    param.data = disk.moved(param.data)[0]
        moved = []
        for step in range(4):
            give_gradients(ours, step, nan)
            give_gradients(theirs, step, nan)
            before = disk._counters.disk_read, disk._counters.disk_written
            optimizer.step()
            plain.step()
            moved.append((disk._counters.disk_read - before[0], disk._counters.disk_written - before[1]))
            assert_equal(ours, theirs, optimizer, plain)
        states = [1 if cls is Muon or p.dim() == 1 else 0 for p in theirs]
        taken = [(states[i] + weights) * p.nbytes for i, p in enumerate(theirs) if p.dim()]
        fitting = sum(nbytes for nbytes in taken if nbytes <= room - 2 * 4096)
        assert moved[-1] == (fitting, fitting)
        assert fitting == sum(taken) or f"exceeds {room / 1024:.2f} KiB" in caplog.text
        assert len([1 for said in caplog.messages if "cannot be stepped in portions" in said]) == (fitting < sum(taken))


@pytest.mark.parametrize("call, after", [("preadv", 2), ("preadv", 4), ("pwritev", 0), ("pwritev", 1), ("pwritev", 4)])
@pytest.mark.seldom
def test_a_transfer_of_a_whole_parameter_that_fails_ends_the_step_and_leaves_the_ring_as_it_was(
    call, after, file, monkeypatch
):
    def made():
        params = parameters(shapes=MATRICES)
        return params, Muon(params, lr=0.01)

    (ours, optimizer), (theirs, plain) = made(), made()
    with on_disk(file, optimizer) as disk:
        give_gradients(ours, 0)
        give_gradients(theirs, 0)
        optimizer.step()
        plain.step()
        disk.adopt(optimizer)  # of what is too large for the ring, torch made the state in memory
        real, calls = getattr(os, call), itertools.count()

        def failing(fd, views, at):
            if next(calls) >= after:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, views, at)

        torn_step.notice_loads(module := torch.nn.ParameterList(ours))
        kept = copy.deepcopy((optimizer.state_dict(), module.state_dict()))
        # A read ahead may fail before the first parameter is stepped: then nothing is torn, and the error says no more.
        with monkeypatch.context() as broken, pytest.raises(DiskError, match=r"had stepped \d of 5|could not be read"):
            broken.setattr(os, call, failing)
            optimizer.step()
        assert len(disk._ring._free) == BUFFERS
        optimizer.load_state_dict(kept[0])
        module.load_state_dict(kept[1])
        for step in (1, 2):
            give_gradients(ours, step)
            give_gradients(theirs, step)
            optimizer.step()
            plain.step()
    assert_equal(ours, theirs, optimizer, plain)


@pytest.mark.parametrize("slow", ["preadv", "pwritev"])
@pytest.mark.few(1)
def test_a_slow_disk_is_waited_for(slow, file, monkeypatch):
    real = getattr(os, slow)
    delays = itertools.cycle([0.02, 0.001, 0.01])
    monkeypatch.setattr(os, slow, lambda *given: time.sleep(next(delays)) or real(*given))
    ours, theirs = parameters(shapes=SHAPES[:4]), parameters(shapes=SHAPES[:4])
    optimizer, plain = AdamW(ours), AdamW(theirs)
    with on_disk(file, optimizer) as disk:
        for step in range(2):
            give_gradients(ours, step)
            give_gradients(theirs, step)
            optimizer.step()
            plain.step()
            assert_equal(ours, theirs, optimizer, plain)
        assert disk._counters.stall_ms["disk"] > 0


def traffic(optimizer, fuses, nbytes):
    """What four steps read and write: the first step reads nothing, but Adagrad is made with its state."""
    return (4 * nbytes, 5 * nbytes) if isinstance(optimizer, Adagrad) else (3 * nbytes, 4 * nbytes)


def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.seldom
def test_state_that_moved_into_the_file_leaves_nothing_in_memory(file):
    """As it is loaded, parameter by parameter: malloc keeps freed blocks of less than 32 MiB (core/malloc.py)."""
    large = torch.zeros(31 << 20, dtype=torch.uint8)
    del large  # from here on, malloc takes all smaller ones from its heap
    params = [torch.nn.Parameter(torch.zeros(3 << 20)) for _ in range(12)]
    optimizer = AdamW(params)
    with on_disk(file, optimizer) as disk:
        before = None
        for param in params:
            made = {key: torch.ones_like(param) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(1.0), **made}
            del made
            disk.adopt_one(optimizer, param)
            before = before or anonymous()
        assert spilled(disk, optimizer) == 12 * 2 * (12 << 20)
        assert anonymous() - before < 100 << 20
