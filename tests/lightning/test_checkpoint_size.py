"""What is written to disk is as large as plain Lightning's: slabs and buffers of ours never travel with a tensor."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from often import often
from side_by_side import sgd, squares

import models
import sp_lightning

adapted = models.stack_of(models.AdaptedBlock)


def saved(what):
    """The file that torch.save writes, as bytes of tensors: (sum, number of storages)."""
    file = io.BytesIO()
    torch.save(what, file)
    return tensor_bytes(file)


def tensor_bytes(file):
    with zipfile.ZipFile(file) as archive:
        sizes = [entry.file_size for entry in archive.infolist() if "/data/" in entry.filename]
    return sum(sizes), len(sizes)


def trained(make, device, **options):
    """A module after a step, plain if there are no options, and what closes it."""
    torch.manual_seed(0)
    module = make()
    handle = sp_lightning.stream(module, device, **options) if options else None
    if handle is None:
        module.to(device)
    optimizer = sgd(module)
    squares(module, models.vectors(0)[0].to(device)).backward()
    optimizer.step()
    return module, optimizer, handle.close if handle else lambda: None


def of_both(make, device, choose):
    """What `choose(module, optimizer)` saves of a plain module and of a streamed one."""
    for options in ({}, {"window": 1}):
        module, optimizer, close = trained(make, device, **options)
        yield saved(choose(module, optimizer))
        close()


CHOICES = {
    "state_dict": lambda module, optimizer: module.state_dict(),
    "one small entry": lambda module, optimizer: {"head.bias": module.state_dict()["head.bias"]},
    "one block": lambda module, optimizer: module.blocks[1].state_dict(),
    "adapters alone": lambda module, optimizer: {
        name: tensor for name, tensor in module.state_dict().items() if "shrink" in name or "grow" in name
    },
    "trainable parameters": lambda module, optimizer: {n: p for n, p in module.named_parameters() if p.requires_grad},
    "one parameter": lambda module, optimizer: module.blocks[0].up.weight,
    "gradients": lambda module, optimizer: [p.grad for p in module.parameters()],
    "one gradient": lambda module, optimizer: module.blocks[0].grow.weight.grad,
    "optimizer state": lambda module, optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("choice", often(CHOICES, "state_dict", "adapters alone", "optimizer state"))
def test_what_is_saved_is_as_large_as_from_a_plain_module(device, choice):
    plain, streamed = of_both(adapted, device, CHOICES[choice])
    assert plain == streamed and plain[0] > 0


def test_a_tied_weight_is_saved_once(device):
    make = lambda: models.TokenStack(tied=True)  # noqa: E731
    torch.manual_seed(0)
    expected = saved(make().state_dict())
    with sp_lightning.stream(make(), device, window=1) as handle:
        assert saved(handle.module.state_dict()) == expected
