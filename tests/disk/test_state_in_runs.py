"""Optimizer state on disk in runs: what user code sees of it, what fails, and what is left afterwards.

tests/contract/test_state_on_disk.py trains the zoo that way.
"""

import contextlib
import copy
import ctypes
import errno
import functools
import gc
import itertools
import logging
import mmap
import os
import pathlib
import re
import subprocess
import sys
import threading
import weakref
from unittest import mock

import forks
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

import models
import parity
import sp_lightning
from sp_lightning.disk import placement, scratch_file, state_ring
from sp_lightning.errors import DiskError, HostMemoryError, TornStepError
from sp_lightning.memory.pinned import libc
from sp_lightning.runtime.handle import Handle, own_state


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)


def stack(width=65, count=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])


def batch(device="cpu", width=65):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(device)


def streamed(net, device, **options):
    return sp_lightning.stream(net, device, **{"window": 2, "host_budget": "0B", "disk": os.getcwd(), **options})


def train(net, optimizer, device="cpu", steps=1, width=65):
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch(device, width)).square().mean().backward()
        optimizer.step()


def trained(steps, make=torch.optim.AdamW, device="cpu"):
    """A plain run, on the device but for the optimizer."""
    net = stack()
    optimizer = make(net.parameters())
    with sp_lightning.stream(net, device, window=2):
        train(net, optimizer, device, steps)
    return net, optimizer


def on_disk(handle, optimizer):
    """The keys of state in the scratch file, by parameter."""
    place_of = handle.storage.state._file.place_of
    return [
        [key for key, value in optimizer.state[p].items() if value.dim() and place_of(value) is not None]
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def assert_same(one, other):
    (net, optimizer), (plain, reference) = one, other
    for name, weight in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], weight), name
    found, expected = optimizer.state_dict(), reference.state_dict()
    assert found["param_groups"] == expected["param_groups"] and list(found["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][index][key], value), (index, key)


MOMENTS = ["exp_avg", "exp_avg_sq"]


@pytest.mark.few(1)
def test_state_that_user_code_writes_is_what_the_next_step_reads(device):
    net, (plain, reference) = stack(), trained(2, device=device)
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device) as handle:
        train(net, optimizer, device, 2)
        assert on_disk(handle, optimizer) == [MOMENTS] * len(list(net.parameters()))
        for which in (optimizer, reference):
            for state in which.state.values():
                state["exp_avg"].mul_(0.5)
                state["exp_avg_sq"].view(-1)[3:7] = 0.25
        train(net, optimizer, device)
        with sp_lightning.stream(plain, device, window=2):
            train(plain, reference, device)
        version = next(iter(optimizer.state.values()))["exp_avg"]._version
        train(net, optimizer, device)
        assert next(iter(optimizer.state.values()))["exp_avg"]._version > version
        with sp_lightning.stream(plain, device, window=2):
            train(plain, reference, device)
    assert_same((net, optimizer), (plain, reference))


@pytest.mark.few(1)
def test_state_lives_on_after_the_end_and_streams_again_from_another_file(device):
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device):
        train(net, optimizer, device, 2)
    with sp_lightning.stream(net, device, window=2):
        train(net, optimizer, device)
    with streamed(net, device) as handle:
        train(net, optimizer, device, 2)
        assert on_disk(handle, optimizer) == [MOMENTS] * len(list(net.parameters()))
    assert_same((net, optimizer), trained(5, device=device))
    assert os.listdir() == []


@pytest.mark.few(1)
def test_loaded_state_moves_to_the_disk_and_what_user_code_still_refers_to_does_not(device):
    _, reference = trained(2, device=device)
    plain, expected = trained(3, device=device)
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device) as handle:
        train(net, optimizer, device, 2)
        kept = copy.deepcopy(reference.state_dict())
        optimizer.load_state_dict(kept)
        assert on_disk(handle, optimizer) == [[]] * len(list(net.parameters()))
        train(net, optimizer, device)
        assert_same((net, optimizer), (plain, expected))
        del kept
        gc.collect()
        train(net, optimizer, device)
        assert on_disk(handle, optimizer) == [MOMENTS] * len(list(net.parameters()))
        used = os.fstat(handle.storage.state._file._fd).st_blocks * 512
        for _ in range(3):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(net, optimizer, device)
        gc.collect()
        extents = 4096  # ext4 lists the ranges of a file in a block of its own once they are more than four
        assert os.fstat(handle.storage.state._file._fd).st_blocks * 512 <= used + extents


def test_state_comes_into_being_in_the_order_of_the_parameters(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 15)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 15)
    net = stack(200)
    net[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": net[3].parameters()}, {"params": [*net[0].parameters(), *net[2].parameters()]}]
    )
    size = sum(p.nbytes for p in net.parameters())
    with streamed(net, "cpu", host_budget=int(3.1 * size) + 8 * (1 << 15)) as handle:
        net(batch(width=200)).sum().backward()
        optimizer.step()
        found = on_disk(handle, optimizer)
        assert MOMENTS in found and [] in found
    assert list(optimizer.state) == [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", ["LBFGS", "of the user's own", "foreach", "Adafactor, foreach"])
@pytest.mark.seldom
def test_an_optimizer_that_cannot_be_stepped_in_portions_steps_on_the_tensors(kind, device, caplog):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad  # another tensor in each step
                p.sub_(state["sum"], alpha=0.01)

    makes = {
        "Adafactor, foreach": functools.partial(torch.optim.Adafactor, foreach=True),
        "LBFGS": torch.optim.LBFGS,
        "of the user's own": Own,
        "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    }

    def run(context, net):
        optimizer = makes[kind](list(net.parameters()))

        def closure():
            optimizer.zero_grad()
            loss = net(batch(device)).square().mean()
            loss.backward()
            return loss

        with context(net) as handle, caplog.at_level(logging.INFO):
            for _ in range(3):
                optimizer.step(closure) if kind == "LBFGS" else (closure(), optimizer.step())
            if context is not plain and kind in ("of the user's own", "foreach"):
                net(batch(device))
                assert all(on_disk(handle, optimizer)), kind
        return net, optimizer

    plain = functools.partial(sp_lightning.stream, device=device, window=2)
    (net, _), (other, _) = (run(c, stack()) for c in (functools.partial(streamed, device=device), plain))
    for name, weight in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], weight), name
    said = [message for message in caplog.messages if "cannot be stepped in portions" in message]
    assert len(said) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, options",
    [
        ("AdamW", {}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {}),
        ("Adagrad", {}),
    ],
)
@pytest.mark.few(3)
def test_a_fused_optimizer_of_the_users_is_stepped_in_portions(kind, options, dtype, device, caplog):
    """With a scaler, too, whose factor the kernels take from gradients, also where a step is skipped."""
    found, make = [], functools.partial(getattr(torch.optim, kind), fused=True, **options)
    for where in (True, False):
        net = stack(263).to(dtype)
        optimizer = make(net.parameters())
        factor = {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)}
        context = streamed(net, device) if where else sp_lightning.stream(net, device, window=2)
        with context as handle, caplog.at_level(logging.INFO):
            for step in range(5):
                vars(optimizer).update(factor if step % 2 else dict.fromkeys(factor))
                factor["found_inf"].fill_(step == 3)
                optimizer.zero_grad()
                net(batch(device, 263).to(dtype)).square().mean().backward()
                optimizer.step()
            if where:
                assert handle.stats()["disk_read"] > 0 and resident(os.getcwd()) == 0
        found.append((net, optimizer))
    assert_same(*found)
    assert not any("cannot be stepped in portions" in message for message in caplog.messages)


class Beside(nn.Module):
    """A layer with a weight of another type."""

    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(65, dtype=torch.cfloat if kind == "complex" else torch.float32))
        self.codes = nn.Parameter(torch.arange(65, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        x = x * self.weight
        return (x if x.dtype == torch.float32 else torch.view_as_real(x)[..., 0]) * self.codes


@parity.product(kind=["complex", "uint8"], device=parity.DEVICES)
@pytest.mark.few(1)
def test_weights_beside_one_of_another_type_have_their_first_state_on_the_disk(kind, device, caplog):
    """Those beside one that does not train are stepped in portions; of the others the log says that they are not."""
    runs = []
    for where in (True, False):
        net = stack().append(nn.Sequential(Beside(kind)))
        optimizer = torch.optim.AdamW(net.parameters())
        context = streamed(net, device, wire_dtype="as-is") if where else sp_lightning.stream(net, device, window=2)
        with context, caplog.at_level(logging.INFO):
            for step in range(3):
                train(net, optimizer, device)
                if where and not step:
                    values = [v for entry in optimizer.state.values() for v in entry.values() if v.dim()]
                    assert scratch_file.in_memory_nbytes(values) == 0
        runs.append((net, optimizer))
    assert_same(*runs)
    said = [message for message in caplog.messages if "cannot be stepped in portions" in message]
    assert len(said) == (kind == "complex")


@pytest.mark.parametrize("made", [torch.zeros_like, lambda p: [torch.zeros_like(p)]], ids=["a tensor", "a list"])
@pytest.mark.few(1)
def test_state_that_is_no_dictionary_stays_in_memory(made, device):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                total = self.state[p] = self.state[p] if p in self.state else made(p)
                total = total if isinstance(total, torch.Tensor) else total[0]
                p.sub_(total.add_(p.grad), alpha=0.01)

    nets = [stack(), stack()]
    optimizers = [Own(net.parameters()) for net in nets]
    for net, optimizer, disk in zip(nets, optimizers, (False, True), strict=True):
        for _ in range(2):  # the second run asks what the first one left on the disk
            with streamed(net, device) if disk else sp_lightning.stream(net, device):
                train(net, optimizer, device, 2)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.few(1)
def test_an_optimizer_that_steps_whole_parameters_finds_them_in_a_buffer(kind, masters, device, caplog):
    makes = {
        "Adafactor": torch.optim.Adafactor,
        "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]),
    }
    found = []
    for where in (True, False):
        net = stack()
        optimizer = makes[kind](list(net.parameters()))
        options = {"window": 2, "master_weights": masters, "wire_dtype": "as-is"}
        with streamed(net, device, **options) if where else sp_lightning.stream(net, device, **options) as handle:
            for _ in range(3):
                (train_half if masters else train)(net, optimizer, device, 1)
            if where:
                weights = [p.nbytes for p in net.parameters() if kind == "Adafactor" or p.dim() == 2]
                visits = 3 * 2 * sum(p.nbytes for p in net.parameters())
                state = [p.nbytes for p in net.parameters() if p.dim() == (2 if kind == "Muon" else 1)]
                assert 0 < handle.stats()["disk_read"] - 2 * sum(state) - 2 * 3 * sum(weights) <= visits
                assert resident(os.getcwd()) == 0 or (masters and kind == "Muon")  # whose other weights are not stepped
        found.append((net, optimizer))
    assert_same(*found)
    assert not any("cannot be stepped in portions" in message for message in caplog.messages)


TWO_OPTIMIZERS = """
import os
import sys

import torch
from torch import nn

import sp_lightning

torch.set_num_threads(1)
for options in {}, {"host_budget": "0B", "disk": os.getcwd()}:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(8)))
    deferred = torch.optim.AdamW([p for block in net for p in (*block[0].parameters(), block[2].bias)])
    other = getattr(torch.optim, sys.argv[1])([block[2].weight for block in net])
    with sp_lightning.stream(net, "cpu", window=2, **options) as handle:
        for _ in range(6):
            net(torch.ones(4, 256)).square().mean().backward()
            deferred.step()
            other.step()
            deferred.zero_grad()
            other.zero_grad()
        assert handle.stats()["held_steps"]
    print(sum(p.double().sum().item() for p in net.parameters()))
"""


@pytest.mark.parametrize("kind", ["Muon", "Adafactor", "ASGD"])
@pytest.mark.few(1)
def test_an_optimizer_that_steps_while_the_step_of_another_one_is_deferred_ends(kind):
    done = forks.run(TWO_OPTIMIZERS, kind, timeout=60)
    assert done.returncode == 0, done.stderr
    in_memory, on_disk = done.stdout.split()
    assert in_memory == on_disk


@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.few(2)
def test_adafactor_takes_its_epsilon_from_the_type_of_a_groups_first_weight(first, device):
    """As torch does for the whole group, of which only vectors have state on the disk."""

    class Cast(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    found = []
    for where in (True, False):
        torch.manual_seed(0)
        types = [first, torch.float64, torch.float32, torch.bfloat16]
        net = nn.Sequential(*[nn.Sequential(Cast(65, 65, dtype=dtype), nn.Tanh()) for dtype in types])
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1e-5)
        optimizer = torch.optim.Adafactor(net.parameters())
        with streamed(net, device) if where else sp_lightning.stream(net, device, window=2) as handle:
            train(net, optimizer, device, 3)
            assert not where or handle.stats()["disk_read"] > 0
        found.append((net, optimizer))
    assert_same(*found)


@pytest.mark.parametrize("first, second", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@pytest.mark.few(1)
def test_one_optimizer_over_two_streamed_modules_has_its_state_on_the_disk_of_each(kind, first, second, device):
    found = []
    for streams in (True, False):
        nets = [stack(), stack()]
        optimizer = getattr(torch.optim, kind)([p for net in nets for p in net.parameters()])
        with contextlib.ExitStack() as contexts:
            handles = [
                contexts.enter_context(
                    streamed(net, device) if streams and on else sp_lightning.stream(net, device, window=2)
                )
                for net, on in zip(nets, (first, second), strict=True)
            ]
            for step in range(4):
                if step == 2:  # which user code replaced
                    for entry in optimizer.state.values():
                        entry.update({key: value.clone() for key, value in entry.items()})
                    del entry  # what user code refers to stays in memory
                optimizer.zero_grad()
                nets[1](nets[0](batch(device))).square().mean().backward()
                optimizer.step()
            for handle, net in zip(handles, nets, strict=True):
                if handle.storage.state.is_on_disk:
                    like = [v for p in net.parameters() for v in optimizer.state[p].values() if v.shape == p.shape]
                    assert like and all(handle.storage.state._file.place_of(value) is not None for value in like)
                    assert resident(os.getcwd()) == 0
        found.append((nn.Sequential(*nets), optimizer))
    assert_same(*found)


@pytest.mark.parametrize("kind", ["RMSprop", "NAdam", "Adafactor"])
@pytest.mark.few(1)
def test_fused_optimizer_steps_a_class_without_a_fused_kernel_in_portions(kind, device):
    net = stack()
    optimizer = getattr(torch.optim, kind)(net.parameters())
    with streamed(net, device, fused_optimizer=True) as handle:
        train(net, optimizer, device, 3)
        assert handle.stats()["disk_read"] > 0 and resident(os.getcwd()) == 0
    assert_same((net, optimizer), trained(3, getattr(torch.optim, kind), device))


# ---- what is refused


@pytest.mark.seldom
def test_without_a_disk_nothing_of_this_is_loaded():
    code = (
        "import sys, torch, sp_lightning\nfrom torch import nn\nnet = nn.Linear(3, 3)\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "with sp_lightning.stream(net, 'cpu'):\n    net(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
        "print([name for name in sys.modules if 'disk' in name and 'sp_lightning' in name])"
    )
    assert forks.run(code).stdout == "[]\n"


def test_a_disk_without_room_is_an_error_before_the_run_with_both_numbers(monkeypatch):
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: 1000)
    net = stack()
    with pytest.raises(DiskError, match=r"needs .* KiB there, and 1000 B are free: nothing was stepped"):
        streamed(net, "cpu")
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_a_disk_that_is_full_in_the_first_step_steps_nothing(monkeypatch, device):
    net = stack()
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device):
        allocate = os.posix_fallocate
        calls = itertools.count()

        def full(fd, begin, nbytes):
            if next(calls) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return allocate(fd, begin, nbytes)

        with monkeypatch.context() as broken:
            broken.setattr(os, "posix_fallocate", full)
            with pytest.raises(DiskError, match="nothing was stepped"):
                train(net, optimizer, device)
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        train(net, optimizer, device)
    assert_same((net, optimizer), trained(1, device=device))


def test_a_budget_that_cannot_be_met_names_the_disk():
    with pytest.raises(HostMemoryError, match=r"cannot be met.*Give disk= a folder on a local SSD"):
        streamed(stack(), "cpu", disk=None, host_budget=1000)
    with pytest.raises(HostMemoryError, match=r"and .*iB of optimizer state and weights on the disk the run takes"):
        streamed(stack(), "cpu", host_budget=1000)


def test_a_host_that_has_room_for_all_leaves_the_disk_alone():
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, "cpu", host_budget=None) as handle:
        train(net, optimizer)
        assert not handle.storage.state.is_on_disk and handle.stats()["disk_written"] == 0


def test_a_host_without_room_puts_state_on_disk_if_no_budget_is_given(monkeypatch):
    from sp_lightning.core.host import HostMemory

    monkeypatch.setattr(
        "sp_lightning.storage.within_budget.host_memory", lambda: HostMemory(4 << 20, 3 << 20, "machine", 4 << 20)
    )
    net = stack(200)
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, "cpu", host_budget=None) as handle:
        optimizer.zero_grad()
        net(batch(width=200)).sum().backward()
        optimizer.step()
        assert any(on_disk(handle, optimizer))


# ---- state that is in memory where AdamW's is on the disk, and more than AdamW's (placement.py, Rule 6)


def images():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Tanh()) for _ in range(16)))


IMAGES = 16 * 64 * 64 * 9 * 4  # bytes of its weights
RINGS = 6 << 16


class Images(L.LightningModule):
    def __init__(self, make):
        super().__init__()
        self.net, self.make = images(), make

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return self.make(self.net.parameters())


def step_of_images(make, way, **options):
    """Take a step, or with Fabric only set it up; return the storage."""
    options = {"disk": os.getcwd(), "wire_dtype": "as-is", "window": 2, **options}
    if way == "trainer":
        strategy = sp_lightning.SuperpipelineStrategy(**options)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_steps=1, **quiet)
        trainer.fit(Images(make), DataLoader([torch.ones(64, 9, 9)]))
        return trainer.optimizers[0]
    if way == "fabric":
        module, strategy = images(), sp_lightning.SuperpipelineFabricStrategy(**options)
        try:
            return L.Fabric(accelerator="cpu", strategy=strategy).setup(module, make(module.parameters()))[1].optimizer
        finally:
            strategy.teardown()
    net = images()
    optimizer = make(net.parameters())
    with sp_lightning.stream(net, "cpu", **options) as handle:
        net(torch.ones(1, 64, 9, 9)).square().mean().backward()
        optimizer.step()
        placed = handle.storage.placed.host
        others = placed.total - placed.optimizer
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        assert others + scratch_file.in_memory_nbytes([one for one in tensors if one.dim()]) <= options["host_budget"]
    return optimizer


@pytest.mark.parametrize("share", [1.6, 2.2, 2.8, 3.4])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD])
@pytest.mark.few(1)
def test_a_budget_has_room_for_state_that_is_not_of_its_weights_shape(kind, share, monkeypatch):
    """Adafactor's means of a convolution's weight take two thirds of its bytes."""
    monkeypatch.setattr(placement, "MOST_SPARE", 0)
    step_of_images(kind, "stream", host_budget=RINGS + int(share * IMAGES))


@pytest.mark.parametrize("way", ["trainer", "fabric", "stream"])
@pytest.mark.few(1)
def test_more_state_in_memory_than_adamw_has_and_the_budget_is_refused(way, monkeypatch):
    """Three tensors of a weight's shape, where there is room for two."""
    monkeypatch.setattr(placement, "MOST_SPARE", 0)
    make = functools.partial(torch.optim.AdamW, amsgrad=True)
    with pytest.raises(HostMemoryError, match=r"AdamW has .*B of state in host memory, and beside all else"):
        step_of_images(make, way, host_budget=4 * IMAGES)
    step_of_images(torch.optim.AdamW, way, host_budget=4 * IMAGES)
    for budget in (5 * IMAGES, "0B"):
        step_of_images(make, "trainer", host_budget=budget)


# ---- transfers that fail


def failing(call, after, number=errno.EIO, counts=lambda: True):
    """A transfer that fails from some call on, of those that count."""
    real, calls = getattr(os, call), itertools.count()

    def transfer(fd, views, at):
        if counts() and next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return real(fd, views, at)

    return transfer


@pytest.mark.parametrize(
    "call, number, after",
    [
        ("preadv", errno.EIO, 4),
        *(("pwritev", number, after) for number in (errno.EIO, errno.ENOSPC) for after in (0, 4)),
    ],
)
@pytest.mark.few(2)
def test_a_transfer_that_fails_ends_the_step_and_says_what_was_stepped(call, number, after, device, monkeypatch):
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device, optimizer_overlap=False) as handle:
        train(net, optimizer, device)
        kept = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        net(batch(device)).square().mean().backward()
        with monkeypatch.context() as broken:
            broken.setattr(os, call, failing(call, after, number))
            with pytest.raises(
                DiskError, match=r"had stepped \d of 8 parameters.*go on from the last checkpoint"
            ) as caught:
                optimizer.step()
        assert caught.value.errno == number
        ring = handle.storage.state._made_ring
        assert len(ring._free) == state_ring.BUFFERS and not ring._written
        with pytest.raises(
            TornStepError, match=r"AdamW had stepped \d of 8 parameters when a DiskError ended its step"
        ):
            optimizer.step()
        net.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        train(net, optimizer, device)  # the ring is as it was
    assert_same((net, optimizer), trained(2, device=device))


def test_a_step_whose_first_read_fails_may_be_taken_again(device, monkeypatch):
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device, optimizer_overlap=False):
        train(net, optimizer, device)
        optimizer.zero_grad()
        net(batch(device)).square().mean().backward()
        with monkeypatch.context() as broken, pytest.raises(DiskError, match="could not be read"):
            broken.setattr(os, "preadv", failing("preadv", 0))
            optimizer.step()
        optimizer.step()
    assert_same((net, optimizer), trained(2, device=device))


@pytest.mark.parametrize("at_most", [1000, 5000])
@pytest.mark.few(1)
def test_short_transfers_change_no_bit(at_most, device, monkeypatch):
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [memoryview(views[0])[:at_most]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [memoryview(views[0])[:at_most]], at))
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device):
        train(net, optimizer, device, 3)
    assert_same((net, optimizer), trained(3, device=device))


def of_gradients():
    """Whether a transfer is one of a gradient on its way to the disk."""
    return threading.current_thread().name.startswith("superpipeline-gradients")


class Breaking(Callback):
    """The disk fails in the third batch: in the optimizer's step, or under gradients."""

    def __init__(self, monkeypatch, call, under_gradients):
        self.monkeypatch, self.call, self.under_gradients = monkeypatch, call, under_gradients

    def on_train_batch_start(self, trainer, module, batch, number):
        if number == 2:
            broken = failing(self.call, 2, counts=lambda: of_gradients() == self.under_gradients)
            self.monkeypatch.setattr(os, self.call, broken)


@pytest.mark.parametrize(
    "call, under_gradients, failed",
    [
        ("preadv", False, "could not be read"),  # on the way up, too
        ("pwritev", False, r"had stepped \d+ of \d+ parameters"),
        ("pwritev", True, "could not be written"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.few(1)
def test_a_disk_that_fails_in_a_fit_names_the_checkpoint_to_go_on_from(
    call, under_gradients, failed, overlap, tmp_path, monkeypatch
):
    case = models.case("mlp")
    options = {"host_budget": "0B", "disk": os.getcwd(), "optimizer_overlap": overlap}
    trainer = L.Trainer(
        strategy=parity.streaming_strategy("cpu", **options),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        callbacks=[
            L.pytorch.callbacks.ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1),
            Breaking(monkeypatch, call, under_gradients),
        ],
    )
    module = models.ZooModule(case, optimizer="adamw")
    with pytest.raises(DiskError, match=failed + r".*go on from the last checkpoint, .*kept.*step=2\.ckpt"):
        trainer.fit(module, models.loader(case, 6))
    assert all(type(p) is nn.Parameter for p in module.parameters())


class Filling(Callback):
    """Before the third batch a weight loses its state, and from then on the disk is full."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_train_batch_start(self, trainer, module, batch, number):
        if number == 2:
            del trainer.optimizers[0].state[next(module.parameters())]
            self.monkeypatch.setattr(os, "posix_fallocate", failing("posix_fallocate", 0, errno.ENOSPC))


@pytest.mark.parametrize("overlap, stepped", [(True, r"had stepped \d+ of 28"), (False, "nothing was stepped")])
@pytest.mark.few(1)
def test_a_disk_that_is_full_when_a_weight_gets_state_late_says_what_was_stepped(overlap, stepped, monkeypatch):
    options = {"host_budget": "0B", "disk": os.getcwd(), "optimizer_overlap": overlap}
    case = models.case("mlp")
    with pytest.raises(DiskError, match=rf"No space left.*{stepped}"):
        parity.record(
            functools.partial(models.ZooModule, case, optimizer="adamw"),
            parity.streaming_strategy("cpu", **options),
            callbacks=[Filling(monkeypatch)],
        )


# ---- processes


@pytest.mark.seldom
def test_loader_processes_are_forked_while_the_disk_is_used(device):
    def record(**options):
        strategy = parity.streaming_strategy(device.type, **options)
        loader = lambda n: DataLoader(  # noqa: E731
            [case.batch(i) for i in range(n)], batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        return parity.record(
            functools.partial(models.ZooModule, case, optimizer="adamw"),
            strategy,
            accelerator=device.type,
            make_loader=loader,
            epochs=2,
        )

    case = models.case("mlp")
    parity.compare(record(), record(host_budget="0B", disk=os.getcwd()))


@pytest.mark.few(1)
def test_a_forked_process_that_touches_state_gets_an_error(device):
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device):
        train(net, optimizer, device)
        value = optimizer.state[net[0][0].weight]["exp_avg"]
        before = value.clone()
        child = os.fork()
        if child == 0:
            try:
                value.zero_()
            except RuntimeError as error:
                os._exit(7 if "state lies in memory that a forked process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert torch.equal(value, before)


@pytest.mark.few(1)
def test_an_average_of_the_weights(device):
    case, average = models.case("mlp"), lambda: [EMAWeightAveraging(decay=0.9)]
    options = {"host_budget": "0B", "disk": os.getcwd()}
    parity.check(case, options, accelerator=device.type, make_callbacks=average, epochs=2)


# ---- FP32 weights whose wire copies stay in memory


def masters_on_disk(handle, net):
    handle.finish_step()
    with torch._C.DisableTorchFunctionSubclass():
        return [handle.storage.state._file.place_of(p) is not None for p in net.parameters()]


def train_half(net, optimizer, device, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch(device).bfloat16()).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "Adafactor"])
@pytest.mark.few(1)
def test_master_weights_on_disk_are_stepped_there_and_so_is_what_travels(kind, device, tmp_path):
    nets = [stack(), stack()]
    optimizers = [getattr(torch.optim, kind)(net.parameters(), lr=0.01) for net in nets]
    with streamed(nets[0], device, master_weights=True) as handle:
        train_half(nets[0], optimizers[0], device, 3)
        assert all(masters_on_disk(handle, nets[0]))
        assert sum(unit.store.slab.truth.nbytes for unit in handle.engine.units) <= 512 * 4
        handle.finish_step()
        before = handle.stats()
        train_half(nets[0], optimizers[0], device, 1)
        handle.finish_step()
        after = handle.stats()
        weights = sum(p.nbytes for p in nets[0].parameters())
        moved = {"AdamW": 3, "SGD": 1, "RMSprop": 2, "Adafactor": 1}[kind] * weights
        if kind == "Adafactor":  # has state of a parameter's shape for vectors alone
            moved += sum(p.nbytes for p in nets[0].parameters() if p.dim() == 1)
        read, written = (after[name] - before[name] for name in ("disk_read", "disk_written"))
        assert written == moved + weights // 2 + weights  # wire copies and gradients
        assert 1.2 * weights // 2 <= read - moved - weights <= 2 * weights // 2
        with torch.no_grad():  # user code writes weights
            nets[0][1][0].weight.mul_(0.5)
            nets[0][2][0].bias.data[3] = 1.0
        train_half(nets[0], optimizers[0], device, 2)
    with sp_lightning.stream(nets[1], device, window=2, master_weights=True):
        train_half(nets[1], optimizers[1], device, 4)
        with torch.no_grad():
            nets[1][1][0].weight.mul_(0.5)
            nets[1][2][0].bias.data[3] = 1.0
        train_half(nets[1], optimizers[1], device, 2)
    for name, weight in nets[1].state_dict().items():
        assert torch.equal(nets[0].state_dict()[name], weight), name
    assert all(type(p) is nn.Parameter for p in nets[0].parameters())


@pytest.mark.few(1)
def test_steps_beside_backward_convert_what_travels_from_the_buffer(device, monkeypatch):
    """No weight is read from the file for it, which page faults would do."""
    from sp_lightning.memory import host_copy

    filled = []
    fill = host_copy.fill_wire
    monkeypatch.setattr(
        host_copy,
        "fill_wire",
        lambda weights, data, remembered, done=(): (
            filled.append(len(weights) - len(done)) or fill(weights, data, remembered, done)
        ),
    )
    case = models.case("mlp")

    def run(**options):
        filled.clear()
        make = functools.partial(models.ZooModule, case, optimizer="adamw")
        strategy = parity.streaming_strategy(device.type, master_weights=True, **options)
        return parity.record(make, strategy, accelerator=device.type, precision="bf16-true", batches=6)

    parity.compare(run(), run(host_budget="0B", disk=os.getcwd()))
    assert 0 in filled, filled  # a unit of which a part was left to another step is converted as a whole


def resident(folder):
    """The bytes of mappings of nameless files in a folder that this process ever touched."""
    found, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                inside = folder in line and "(deleted)" in line
            elif inside and first == "Rss:":
                found += int(line.split()[1])
    return found


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.few(1)
def test_steps_never_touch_the_mapping(masters, device):
    """Through it a disk that fails would end the process, and page faults take several times as long."""
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device, master_weights=masters) as handle:
        for _ in range(3):
            (train_half if masters else train)(net, optimizer, device, 1)
        net(batch(device).bfloat16() if masters else batch(device))
        assert handle.stats()["disk_written"] > 0 and resident(os.getcwd()) == 0
        assert optimizer.state[net[0][0].weight]["exp_avg"].any() and resident(os.getcwd()) > 0


@pytest.mark.few(1)
def test_master_weights_with_a_nan_travel_as_in_memory(device):
    nets = [stack(), stack()]
    for number, net in enumerate(nets):
        options = {"disk": os.getcwd(), "host_budget": "0B"} if number == 0 else {}
        with sp_lightning.stream(net, device, window=2, master_weights=True, **options):
            optimizer = torch.optim.AdamW(net.parameters())
            train_half(net, optimizer, device, 1)
            with torch.no_grad():
                net[2][0].weight.view(-1)[5::17] = float("nan")
            train_half(net, optimizer, device, 2)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert parity.difference(other.detach(), one.detach()) is None


def test_only_as_many_master_weights_are_on_disk_as_the_budget_requires():
    net = stack(200)
    size = sum(p.nbytes for p in net.parameters())
    with streamed(net, "cpu", master_weights=True, host_budget=int(2.3 * size) + 8 * (1 << 15)) as handle:
        found = masters_on_disk(handle, net)
    assert any(found) and not all(found)
    with streamed(stack(200), "cpu", master_weights=True, host_budget=int(3 * size) + 8 * (1 << 15)) as handle:
        assert handle.storage.state.is_on_disk and not handle.storage.in_files


@pytest.mark.parametrize("wire_dtype", [None, "auto"])
@pytest.mark.few(1)
def test_weights_of_frozen_units_are_on_disk_too_and_train_once_they_are_unfrozen(wire_dtype, device):
    """With weights that are computed with in half precision, and under autocast."""
    masters = wire_dtype is None
    nets = [stack(), stack()]
    for number, net in enumerate(nets):
        net[:3].requires_grad_(False)
        optimizer = torch.optim.AdamW(net.parameters())
        options = {"disk": os.getcwd(), "host_budget": "0B"} if number == 0 else {}
        options |= {"master_weights": True} if masters else {"wire_dtype": wire_dtype}
        with sp_lightning.stream(net, device, window=2, **options) as handle:
            for step in range(6):
                if step == 3:
                    net[1].requires_grad_(True)
                optimizer.zero_grad()
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not masters):
                    x = batch(device)
                    net(x.bfloat16() if masters else x).float().square().mean().backward()
                optimizer.step()
            if number == 0:
                frozen = [layer[0].weight for layer in net[:3]]
                handle.finish_step()
                assert scratch_file.in_memory_nbytes([weight.data for weight in frozen]) == 0
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert parity.difference(other.detach(), one.detach()) is None


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_transfer_of_master_weights_that_fails_ends_the_step(call, device, monkeypatch):
    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device, master_weights=True, optimizer_overlap=False):
        train_half(net, optimizer, device, 1)
        net(batch(device).bfloat16()).float().square().mean().backward()
        with monkeypatch.context() as broken:
            broken.setattr(os, call, failing(call, 12 if call == "preadv" else 3))  # in a later portion than the first
            with pytest.raises(DiskError, match="go on from the last checkpoint"):
                optimizer.step()
        with monkeypatch.context() as broken:  # what travels is converted from the file, which was written
            broken.setattr(os, "preadv", failing("preadv", 0))
            with pytest.raises(DiskError, match="could not be read at byte"):
                net(batch(device).bfloat16())
        net(batch(device).bfloat16())
    assert all(type(p) is nn.Parameter and p.isfinite().all() for p in net.parameters())


@pytest.mark.few(1)
def test_a_module_grows_while_its_master_weights_are_on_disk(device):
    nets = [stack(), stack()]
    for number, net in enumerate(nets):
        options = {"disk": os.getcwd(), "host_budget": "0B"} if number == 0 else {}
        with sp_lightning.stream(net, device, window=2, master_weights=True, **options) as handle:
            optimizer = torch.optim.AdamW(net.parameters())
            train_half(net, optimizer, device, 2)
            torch.manual_seed(3)
            net.append(nn.Linear(65, 65))
            optimizer.add_param_group({"params": list(net[-1].parameters())})
            train_half(net, optimizer, device, 2)
            if number == 0:
                assert all(masters_on_disk(handle, net))
    for name, weight in nets[1].state_dict().items():
        assert torch.equal(nets[0].state_dict()[name], weight), name


@pytest.mark.few(1)
def test_state_of_weights_that_are_unfrozen_later_goes_to_the_disk(device):
    """They were not counted when units were chosen."""
    runs = []
    for options in ({"disk": os.getcwd(), "host_budget": "0B"}, {}):
        net = stack()
        net[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(net.parameters())
        with sp_lightning.stream(net, device, window=2, **options) as handle:
            train(net, optimizer, device, 2)
            net.requires_grad_(True)
            train(net, optimizer, device, 2)
            if options:
                assert on_disk(handle, optimizer) == [MOMENTS] * len(list(net.parameters()))
        runs.append((net, optimizer))
    assert_same(*runs)


STEPS = pytest.mark.parametrize("optimizer_device", ["host", "device"])


@STEPS
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@pytest.mark.few(1)
def test_a_module_that_outgrows_its_budget_has_its_optimizers_state_on_disk_from_then_on(
    kind, optimizer_device, device
):
    runs = []
    size = sum(p.nbytes for p in stack(200, 2).parameters())
    for options in ({"disk": os.getcwd(), "host_budget": 6 * size}, {}):
        net = stack(200, 2)
        optimizer = getattr(torch.optim, kind)(net.parameters())
        options |= {"wire_dtype": "as-is", "optimizer_device": optimizer_device}
        with sp_lightning.stream(net, device, window=2, **options) as handle:
            for number in range(2):
                train(net, optimizer, device, 2, 200)
                if number == 0:
                    assert not handle.storage.state.is_on_disk
                    net.extend(stack(200, 2))
                    optimizer.add_param_group({"params": list(net[2:].parameters())})
            if "disk" in options:
                assert all(on_disk(handle, optimizer)[1::2])  # Adafactor's of matrices has other shapes
        runs.append((net, optimizer))
    assert_same(*runs)


def thawing(device, **options):
    """Train four layers, two of them frozen at first."""
    net = stack(200, 4)
    net[2:].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters())
    with sp_lightning.stream(net, device, window=2, wire_dtype="as-is", **options) as handle:
        for number in range(2):
            train(net, optimizer, device, 2, 200)
            if number == 0:
                assert not handle.storage.state.is_on_disk
                net.requires_grad_(True)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(net, optimizer, device, 1, 200)
        if "disk" in options:
            assert any(on_disk(handle, optimizer))
    return net, optimizer


SIZE = sum(p.nbytes for p in stack(200, 2).parameters())


@STEPS
@pytest.mark.few(1)
def test_weights_that_are_unfrozen_and_outgrow_the_budget_have_state_on_disk(optimizer_device, device):
    options = {"optimizer_device": optimizer_device}
    assert_same(thawing(device, disk=os.getcwd(), host_budget=6 * SIZE, **options), thawing(device, **options))


@pytest.mark.few(1)
def test_what_a_run_has_made_itself_is_within_its_budget_when_weights_are_unfrozen(device, monkeypatch):
    from sp_lightning.core.host import HostMemory

    plain = thawing(device)
    free = [4 * SIZE, SIZE]  # beside weights and the system's share: at first, and with gradients and state
    monkeypatch.setattr(
        "sp_lightning.storage.within_budget.host_memory",
        lambda: HostMemory(4 << 20, (1 << 20) + free.pop(0), "machine", 4 << 20),
    )
    assert_same(thawing(device, disk=os.getcwd()), plain)


def host_of(monkeypatch, free, seen=lambda: None):
    """A host that has 1 MiB for the system, and so much free beside it each time."""
    from sp_lightning.core.host import HostMemory

    monkeypatch.setattr(
        "sp_lightning.storage.within_budget.host_memory",
        lambda: (seen(), HostMemory(4 << 20, (1 << 20) + free, "machine", 4 << 20))[1],
    )


def test_what_an_earlier_run_left_on_the_disk_gives_the_next_one_no_memory(monkeypatch):
    """Weights and gradients of the first run are its budget's as far as they are in memory."""
    net = stack(200, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, "cpu", wire_dtype="as-is") as handle:
        train(net, optimizer, width=200)
    assert scratch_file.in_memory_nbytes([p.data for p in net.parameters()]) == 0
    host_of(monkeypatch, 8 * SIZE)
    with streamed(net, "cpu", host_budget=None) as handle:
        assert handle.storage._budget == 8 * SIZE
    for parameter in net.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), parameter.grad.clone()
    with streamed(net, "cpu", host_budget=None) as handle:
        assert handle.storage._budget == 10 * SIZE


def test_a_second_fit_has_no_state_of_the_first_beside_its_own(monkeypatch, tmp_path):
    class Module(models.ZooModule):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            made.append(weakref.ref(optimizer))
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]  # the two are in a cycle

    made, left = [], []
    host_of(monkeypatch, 1 << 30, lambda: left.append([one() for one in made if one() is not None]))
    module = Module(models.case("mlp"), optimizer="adamw")
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False}
    strategy = parity.streaming_strategy("cpu", disk=os.getcwd())
    trainer = L.Trainer(strategy=strategy, enable_checkpointing=False, default_root_dir=tmp_path, **options)
    for _ in range(2):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(module, models.loader(models.case("mlp"), 2))
        assert trainer.optimizers[0] is made[-1]() and trainer.optimizers[0].state
    assert left == [[], []]
    trainer.test(module, models.loader(models.case("mlp"), 2), verbose=False)
    assert trainer.optimizers[0].state  # a checkpoint that is saved now has it


def test_weights_that_are_unfrozen_and_outgrow_the_budget_without_a_disk(device):
    with pytest.raises(HostMemoryError, match=r"host_budget=.* cannot be met: .* optimizer 1\.23 MiB\)\. Give disk="):
        thawing(device, host_budget=6 * SIZE)


def test_weights_that_are_unfrozen_within_the_budget_leave_the_units_as_they_are(device, monkeypatch):
    """Parts that are frozen in turns would have all weights copied in every step."""
    attached, attach = [], Handle._attach
    monkeypatch.setattr(Handle, "_attach", lambda handle: (attached.append(handle), attach(handle)))
    assert_same(thawing(device, host_budget=9 * SIZE), thawing(device))
    assert len(attached) == len(set(attached)) == 2


@STEPS
@pytest.mark.few(1)
def test_weights_that_are_unfrozen_have_their_first_state_on_disk_where_forward_runs_in_a_closure(
    optimizer_device, device
):
    """As in a Trainer: the optimizer's step has begun when units are made anew."""
    runs = []
    for options in ({"disk": os.getcwd(), "host_budget": 6 * SIZE}, {}):
        net = stack(200, 4)
        net[2:].requires_grad_(False)
        optimizer = torch.optim.AdamW(net.parameters())

        def closure(net=net):
            net.zero_grad()
            loss = net(batch(device, 200)).square().mean()
            loss.backward()
            return loss

        options |= {"wire_dtype": "as-is", "optimizer_device": optimizer_device}
        with sp_lightning.stream(net, device, window=2, **options) as handle:
            optimizer.step(closure)
            net.requires_grad_(True)
            optimizer.step(closure)
            if "disk" in options:
                thawed = [
                    keys
                    for p, keys in zip(net.parameters(), on_disk(handle, optimizer), strict=True)
                    if id(p) in handle.storage.state.parameters
                ]
                assert thawed and all(keys == MOMENTS for keys in thawed)
        runs.append((net, optimizer))
    assert_same(*runs)


FROZEN = {  # at first; the budget is for layers of 160 KB
    "layers": (lambda net: net[:8].requires_grad_(False), 3_400_000),
    "weights": (lambda net: [layer[0].weight.requires_grad_(False) for layer in net], "0B"),
}


@parity.product(part=list(FROZEN), device=parity.DEVICES)
@pytest.mark.few(1)
def test_what_is_unfrozen_once_state_is_on_the_disk_is_within_the_budget(part, device):
    """Gradients of what did not train before, in layers of their own or beside those of others."""
    nets, (freeze, budget) = [], FROZEN[part]
    for options in ({"disk": os.getcwd(), "host_budget": budget}, {}):
        net = stack(200, 12)
        freeze(net)
        optimizer = torch.optim.AdamW(net.parameters())
        with sp_lightning.stream(net, device, window=2, wire_dtype="as-is", **options) as handle:
            for _ in range(2):
                train(net, optimizer, device, 2, 200)
                handle.finish_step()
                if options:
                    assert handle.storage.state.is_on_disk
                    tensors = [*(p.grad for p in net.parameters() if p.grad is not None), *net.parameters()]
                    taken = scratch_file.in_memory_nbytes([one.data for one in tensors]) + handle.storage.ring_nbytes
                    assert taken <= 3_400_000
                net.requires_grad_(True)
            if options:
                assert scratch_file.in_memory_nbytes([p.grad for p in net.parameters()]) == 0
        nets.append(net)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert parity.difference(other.detach(), one.detach()) is None


def test_what_is_unfrozen_and_has_no_room_with_state_on_the_disk_is_an_error(device):
    net = stack(200, 8)
    net.append(nn.Sequential(nn.Linear(200, 1800), nn.Linear(1800, 200)).requires_grad_(False))
    optimizer = torch.optim.AdamW(net.parameters())
    options = {"disk": os.getcwd(), "host_budget": 6_500_000, "wire_dtype": "as-is", "units": "Sequential"}
    with sp_lightning.stream(net, device, window=2, **options) as handle:
        train(net, optimizer, device, 2, 200)
        assert handle.storage.state.is_on_disk
        net.requires_grad_(True)
        with pytest.raises(HostMemoryError, match="cannot be met"):
            train(net, optimizer, device, 1, 200)


def test_parts_that_are_frozen_in_turns_leave_units_on_the_disk_as_they_are(device, monkeypatch):
    """After the first turn: all weights would be copied in every step."""
    attached, attach = [], Handle._attach
    monkeypatch.setattr(Handle, "_attach", lambda *given, **more: (attached.append(1), attach(*given, **more)))
    nets = [stack(200, 4), stack(200, 4)]
    for net, options in zip(nets, ({"disk": os.getcwd(), "host_budget": "0B"}, {}), strict=True):
        optimizer, count = torch.optim.AdamW(net.parameters()), []
        with sp_lightning.stream(net, device, window=2, wire_dtype="as-is", **options):
            for step in range(6):
                net[:2].requires_grad_(step % 2 == 0)
                net[2:].requires_grad_(step % 2 == 1)
                train(net, optimizer, device, 1, 200)
                count.append(len(attached))
        assert not options or count[2:] == count[2:3] * 4
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert parity.difference(other.detach(), one.detach()) is None


def test_data_at_the_address_that_a_weight_had_in_the_file_is_what_travels(device):
    """The range has ended with the last tensor over it, and other memory came to its address."""

    def run(options):
        net, seen = stack(65, 3), []
        weight = net[1][0].weight
        with sp_lightning.stream(net, device, window=1, wire_dtype="as-is", **options), torch.no_grad():
            at = weight.data_ptr()
            weight.data = weight.data * 0.5
            seen += [net(batch(device)).cpu() for _ in range(2)]
            access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            address = libc().mmap(at if options else 0, weight.nbytes, access, flags, -1, 0)
            assert address == at or not options
            buffer = (ctypes.c_uint8 * weight.nbytes).from_address(address)
            new = torch.frombuffer(buffer, dtype=torch.float32).view_as(weight)
            weight.data = new.copy_(weight.data * 3)
            seen += [net(batch(device)).cpu() for _ in range(2)]
            weight.data = weight.data.clone()  # what was mapped stays
        return seen

    found, expected = run({"disk": os.getcwd(), "host_budget": "0B"}), run({})
    assert all(map(torch.equal, found, expected))


# ---- other ways to run, and memory


def test_a_loop_with_fabric_and_its_checkpoints(tmp_path):
    def go(strategy, path, resumes):
        fabric = L.Fabric(accelerator="cpu", strategy=strategy)
        net = stack()
        net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
        state = {"net": net, "optimizer": optimizer}
        if resumes:
            fabric.load(path, state)
        for _ in range(2):
            optimizer.zero_grad()
            fabric.backward(net(batch()).square().mean())
            optimizer.step()
        fabric.save(path, state)
        values = [value.clone() for entry in optimizer.optimizer.state.values() for value in entry.values()]
        values += [parameter.detach().clone() for parameter in net.parameters()]
        for handle in getattr(fabric.strategy, "handles", ()):
            handle.close()
        return values

    def streaming():
        return sp_lightning.SuperpipelineFabricStrategy(host_budget="0B", disk=os.getcwd())

    for first, second in itertools.product([streaming, lambda: "auto"], repeat=2):
        found = [go(strategy(), tmp_path / "checkpoint", number) for number, strategy in enumerate((first, second))]
        expected = [go("auto", tmp_path / "plain", number) for number in range(2)]
        for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_a_run_under_a_real_limit_of_memory_keeps_to_its_budget(tmp_path):
    """The kernel ends a process that takes more than its cgroup's limit, where one can be made."""
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "memory_limits.py"
    command = [sys.executable, str(script), "--parameters", "2.7e8", "--steps", "3", "--folder", str(tmp_path)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    runs = [line for line in said.splitlines() if line.startswith(("half", "quarter"))]
    assert len(runs) == 2 and all("bits equal" in line and "swap 0.00 GB" in line for line in runs), said
    if all("no limit" not in line for line in runs):
        assert all(float(re.search(r"([\d.]+) of its budget", line)[1]) <= 1.05 for line in runs), said
    assert os.listdir(tmp_path) == []


def test_state_of_two_modules_goes_to_their_disks_one_parameter_after_another(tmp_path):
    """What is loaded is copied only as it moves: of both modules it need not fit in memory."""
    nets = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        options = {"device": "cpu", "units": ["Linear"], "disk": str(tmp_path), "host_budget": "0B"}
        handles = [stack.enter_context(sp_lightning.stream(net, **options)) for net in nets]
        parameters = [parameter for net in nets for parameter in net.parameters()]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": torch.ones_like(parameter.detach())}
        loaded = {id(value): value for entry in optimizer.state.values() for value in entry.values()}
        there = []

        def seeing(adopt, optimizer, parameter):
            there.append(sum(id(value) in loaded for entry in optimizer.state.values() for value in entry.values()))
            adopt(optimizer, parameter)

        for handle in handles:
            state = handle.storage.state
            stack.enter_context(mock.patch.object(state, "adopt_one", functools.partial(seeing, state.adopt_one)))
        own_state(optimizer, handles)
        # Each handle is asked for all parameters, and copies its own four.
        assert there == [14, 12, 10, 8, 8, 8, 8, 8, 8, 8, 8, 8, 6, 4, 2, 0]


GROWN = """
import torch
from torch import nn

import sp_lightning

torch.set_num_threads(1)


def taken():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


warm = nn.Linear(8, 8)
warm(torch.ones(2, 8)).sum().backward()
net = nn.Sequential()
for _ in range(16):
    net.append(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh()))
with sp_lightning.stream(net, "cpu", window=1, units=["Sequential"], host_budget="2GB", activations="recompute"):
    before = taken()
    net(torch.ones(8, 1024)).sum().backward()
    print((taken() - before) / sum(parameter.grad.nbytes for parameter in net.parameters()))
"""


def test_gradients_on_the_cpu_take_what_a_budget_counts_without_a_disk():
    """Units come and go between them; what malloc kept of that was more than the gradients themselves."""
    done = forks.run(GROWN)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.3
