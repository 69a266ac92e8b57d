"""A unit's copies are stale when the host bytes may differ from what they were made from (host_copy.py, Rule 4)."""

import pytest
import torch
from torch import nn

import sp_lightning
from sp_lightning.memory.watched_parameters import quietly, true_data
from sp_lightning.memory.weights import fill_wire


@pytest.fixture
def store():
    """Return a loaded unit of two weights, which go up as wire copies in bfloat16."""
    net, options = nn.Sequential(nn.Linear(8, 8)), {"units": ["Linear"], "window": 1, "master_weights": True}
    with sp_lightning.stream(net, "cpu", **options) as handle, quietly():
        store = handle.engine.units[0].store
        store.load()
        yield store


@pytest.fixture
def fills(monkeypatch):
    counted = []
    monkeypatch.setattr(
        "sp_lightning.memory.host_copy.fill_wire", lambda *arguments: (counted.append(1), fill_wire(*arguments))
    )
    return counted


def refilled(store, fills):
    """Load again; return whether the wire copies were converted for that, and whether they have the host's values."""
    fills.clear()
    store.load()
    equal = [weight.wire.equal(true_data(weight.parameter).bfloat16()) for weight in store.weights]
    return bool(fills), all(equal)


def test_copies_are_fresh_until_a_write(store, fills):
    assert not store.stale()
    assert refilled(store, fills)[0] is False


def test_an_own_step_makes_the_device_stale_whatever_it_does_to_versions(store, fills):
    versions = [parameter._version for parameter in store.params]
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(store.params)):
        store.params[0].mul_(2)
    assert versions == [parameter._version for parameter in store.params]
    assert not store.stale()  # so far nothing told of the write
    store.after_step()
    assert store.stale()
    assert refilled(store, fills) == (False, True)  # `after_step` converted the wire copies


def nothing(store, conversion):
    pass


def written(store, conversion):
    store.params[0].mul_(2)


def replaced(store, conversion):
    store.params[0].data = store.params[0].data * 2


def laid_out_again(store, conversion):
    store.on_device.free()
    store.retype({})


def not_converted(store, conversion):
    conversion.source = None


@pytest.mark.parametrize("meanwhile", [nothing, written, replaced, laid_out_again, not_converted])
def test_what_a_step_converted_is_not_converted_again_if_it_is_still_so(store, meanwhile):
    with torch.no_grad():
        conversion = store.conversion(0)
        store.params[0].mul_(3)
        conversion.done(store.params[0])
        conversion.wire.fill_(7)  # so that it shows who converted
        meanwhile(store, conversion)
    store.after_step(conversions={0: conversion})
    kept = store.weights[0].wire.eq(7).all()
    assert kept if meanwhile is nothing else store.weights[0].wire.equal(true_data(store.params[0]).bfloat16())
    assert store.weights[1].wire.equal(true_data(store.params[1]).bfloat16())


@pytest.mark.parametrize("full", ["slab", "device_bytes"])
def test_types_that_cannot_change_for_lack_of_memory_are_as_they_were(store, full, monkeypatch):
    store.on_device.free()
    with monkeypatch.context() as broken:
        broken.setattr(store.device, full, lambda nbytes: torch.empty(1 << 60, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="memory"):
            store.retype({0: torch.float16})
    assert store.autocast == {} and store.weights[0].wire.dtype == torch.bfloat16
    store.load()
    store.on_device.wait_load()
    assert store.on_device.view(0).equal(true_data(store.params[0]).bfloat16())
    store.on_device.free()
    store.retype({0: torch.float16})
    store.load()
    store.on_device.wait_load()
    assert store.on_device.view(0).equal(true_data(store.params[0]).half())


def test_no_step_converts_what_autograd_saved(store):
    store.on_device.free()
    store.retype({0: torch.bfloat16})
    assert store.conversion(0) is not None
    saved = store.memory
    assert store.conversion(0) is None and store.conversion(1) is not None
    del saved


def test_steps_that_told_of_themselves_are_not_told_of_again(store, fills):
    store.after_step()
    store.load()
    store.wrote({id(parameter) for parameter in store.params})
    assert not store.stale()
    store.wrote({id(store.params[0])})
    assert store.stale()
    assert refilled(store, fills)[0] is True


def test_an_optimizer_that_has_a_frozen_unit_may_write_it(store):
    for parameter in store.params:
        parameter.requires_grad_(False)
    store.wrote({id(parameter) for parameter in store.params})
    assert store.stale()


def test_a_write_back_leaves_the_device_fresh_and_the_wire_copies_stale(store, fills):
    store.on_device.view(0).fill_(3)
    store.write_back(0)
    assert not store.stale()
    assert refilled(store, fills) == (True, True)
    store.write_back(0, torch.full_like(store.params[0], 5))  # a full-precision copy: the device has other bytes
    assert store.stale()


def test_a_write_back_does_not_hide_an_earlier_write(store):
    store.wrote()
    store.write_back(0)
    assert store.stale()


def test_bytes_that_another_tensor_shares_are_stale_until_they_were_loaded_without_it(store, fills):
    alias = store.params[0].detach()
    assert store.stale()
    store.load()
    assert store.stale()
    fills.clear()
    store.load()
    assert fills
    alias[0] = 7
    del alias
    assert store.stale()  # it was there when the bytes went up, and may have been written since
    assert refilled(store, fills) == (True, True)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_every_optimizers_step_makes_the_bytes_stale(store, kind, options):
    for parameter in store.params:
        parameter.grad = torch.ones_like(parameter)
    kind(store.params, lr=0.0, **options).step()
    assert store.stale()
