"""Gradients wait for their step in the type in which they came down, with the bits of a plain run (slab.py, Rule 3).

Most rigs read each gradient, after which none of its unit waits. So the runs here read none, or only one batch's.
"""

import copy
import functools
import os
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.disk import state_ring
from sp_lightning.gradients import slab
from sp_lightning.memory.watched_parameters import as_it_came
from sp_lightning.optim import pieces

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch):
    monkeypatch.setattr(pieces, "AT_A_TIME", 100)
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 15)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 15)
    yield
    assert not as_it_came


class Reader(L.Callback):
    """Reads the gradients of one batch, or has hooks on them."""

    def __init__(self, how):
        self.how = how
        self.seen = []

    def on_fit_start(self, trainer, pl_module):
        if self.how == "hooks":
            for parameter in list(pl_module.parameters())[::3]:
                if parameter.requires_grad:
                    parameter.register_hook(lambda grad: grad * 0.5)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.how == "after batch 1" and batch_idx == 1:
            self.seen += [p.grad if p.grad is None else p.grad.cpu().clone() for p in pl_module.parameters()]


class ReaderBeforeStep(Reader):
    """Changes the gradients of one batch in place, before the optimizer steps with them."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 1:
            for parameter in list(pl_module.parameters())[::2]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


def cells():
    settings = {
        "precision": ["bf16-mixed", "bf16-true, masters", "16-mixed"],
        "optimizer": ["adamw", "sgd", "adafactor", "two"],
        "accumulate": [1, 3],
        "clip": [None, None, ("norm", 0.5), ("value", 0.01)],
        "reads": ["never", "after batch 1", "hooks", "before step"],
        "accelerator": ["simgpu", "cpu"],
        "overlap": [True, False],
        "disk": [False, True],
        "activations": ["keep", "recompute"],
        "fused": [False, True],
    }
    often = [legal(row) for row in parity.each_value(case=list(models.ZOO)[::9], **settings)]
    seen = []
    for row in [*often, *map(legal, parity.pairwise(case=list(models.ZOO), **settings))]:
        if row not in seen:
            seen.append(row)
            marks = [pytest.mark.simgpu] * (row["accelerator"] == "simgpu") + [SLOW] * (row not in often)
            yield pytest.param(row, id="-".join(map(str, row.values())), marks=marks)


def legal(row):
    """The same settings, but for what Lightning does not have."""
    if row["precision"] == "16-mixed":
        row |= {"accelerator": "simgpu", "fused": False}
    if row["optimizer"] == "two":  # which are stepped by hand
        row |= {"accumulate": 1, "clip": None, "reads": "never" if row["reads"] == "before step" else row["reads"]}
    return row


@pytest.mark.parametrize("cell", list(cells()))
@pytest.mark.few(3)
def test_gradients_that_nobody_reads_have_the_plain_run_s_bits(cell):
    case = models.case(cell["case"])
    for library in case.tags & {"transformers", "torchvision"}:
        pytest.importorskip(library)
    precision, _, masters = cell["precision"].partition(", ")

    def run(strategy):
        reader = (ReaderBeforeStep if cell["reads"] == "before step" else Reader)(cell["reads"])
        found = parity.record(
            functools.partial(models.ZooModule, case, optimizer=cell["optimizer"]),
            strategy,
            accelerator=cell["accelerator"],
            precision=precision,
            accumulate=cell["accumulate"],
            clip=cell["clip"],
            batches=6 if cell["accumulate"] > 1 else 4,
            callbacks=[] if cell["reads"] == "never" else [reader],
            see="parameters",
        )
        found.entries += [parity.Entry("batch 1", f"gradient {index}", grad) for index, grad in enumerate(reader.seen)]
        return found

    alike = ({"master_weights": True} if masters else {}) | ({"fused_optimizer": True} if cell["fused"] else {})
    if alike:  # plainly there is no such run
        with mock.patch.object(slab, "MAY_WAIT", torch.int8):
            expected = run(parity.streaming_strategy(cell["accelerator"], **alike))
    else:
        expected = run(parity.plain_strategy(cell["accelerator"]))
    options = alike | {"activations": cell["activations"], "optimizer_overlap": cell["overlap"], "window": 2}
    options |= {"host_budget": "0B", "disk": os.getcwd()} if cell["disk"] else {}
    parity.compare(expected, run(parity.streaming_strategy(cell["accelerator"], **options)))


# ---- which gradients wait, and what ends that


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 4))


def backward(module, device, number=0):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(number)).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = module(x).float().square().mean()
    loss.backward()


def trained(module, device, between=lambda module, device: None, steps=3, handle=None, kind=torch.optim.AdamW):
    optimizer, sizes = kind(module.parameters(), lr=0.01), []
    for number in range(steps):
        backward(module, device, number)
        sizes.append(handle and handle.engine.gradient_return.host_nbytes)
        between(module, device)
        optimizer.step()
        optimizer.zero_grad()
    return sizes


def travels_cast(module):
    """Bytes of the gradients that come down in half precision."""
    return sum(-(-p.numel() * 2 // 512) * 512 for p in module.parameters() if p.dim() == 2)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_what_nobody_reads_takes_half_from_the_first_step_on(kind, device):
    module, reference = net(), net()
    with mock.patch.object(slab, "MAY_WAIT", torch.int8), sp_lightning.stream(reference, device) as handle:
        whole = trained(reference, device, handle=handle, kind=kind)
    with sp_lightning.stream(module, device) as handle:
        sizes = trained(module, device, handle=handle, kind=kind)
    assert sizes[-1] == whole[-1] - travels_cast(module) and max(sizes) <= whole[0]
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), reference.parameters(), strict=True))


def clip(module, device):
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def add(module, device):
    backward(module, device, 99)


def write(module, device):
    for parameter in module.parameters():
        parameter.grad.mul_(0.25)


def replace(module, device):
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


def take_away(module, device):
    for parameter in list(module.parameters())[::2]:
        parameter.grad = None


def delete(module, device):
    del next(module.parameters()).grad


def no_more(module, device):
    module.zero_grad()
    add(module, device)


ENDINGS = {"half": [take_away, delete, no_more, replace], "whole": [clip, add, write]}


@parity.product(between=[*ENDINGS["half"], *ENDINGS["whole"]], device=parity.DEVICES)
@pytest.mark.few(7)
def test_what_is_done_between_backward_and_step_is_done_to_the_plain_run_s_gradients(between, device):
    module, reference = net(), net()
    with mock.patch.object(slab, "MAY_WAIT", torch.int8), sp_lightning.stream(reference, device, window=1) as handle:
        whole = trained(reference, device, between, handle=handle)
    with sp_lightning.stream(module, device, window=1) as handle:
        sizes = trained(module, device, between, handle=handle)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), reference.parameters(), strict=True))
    assert sizes[-1] == whole[-1] - (0 if between in ENDINGS["whole"] else travels_cast(module))


def test_a_gradient_that_is_read_widens_those_of_its_unit_alone(device):
    module = net()
    with sp_lightning.stream(module, device, window=1):
        backward(module, device)
        assert len(as_it_came) == 4
        first = module[0][0].weight.grad
        assert first.dtype is torch.float32 and module[0][0].weight.grad is first and len(as_it_came) == 3
        copied = copy.deepcopy(module[1][0].weight)
        assert len(as_it_came) == 3 and copied.dtype is torch.float32
    assert all(p.grad.dtype is torch.float32 for p in module.parameters())


def test_gradients_are_those_of_a_plain_run_when_streaming_ends():
    module, plain = net(), net()
    backward(plain, torch.device("cpu"))
    with sp_lightning.stream(module, "cpu"):
        backward(module, torch.device("cpu"))
        assert as_it_came
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_nothing_waits_for_steps_on_the_device(device):
    module = net()
    with sp_lightning.stream(module, device, optimizer_device="device"):
        backward(module, device)
        assert not as_it_came
