"""Frozen weights that consist of several tensors stream as they train plainly: those of any library that quantises."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import wrapped
from often import often
from side_by_side import check, inputs, observe, training
from stream_programs import POLICIES
from torch import nn

import parity
import sp_lightning


@parity.product(
    ("coded", "keep", "simgpu"),
    ("nf4", "recompute+offload", "simgpu"),
    form=wrapped.TRAINED,
    activations=POLICIES,
    device=parity.DEVICES,
)
def test_adapters_train_over_a_quantised_base(device, form, activations):
    check(wrapped.adapted(form), wrapped.trained_and_evaluated, device, activations=activations)


@parity.product(form=wrapped.EVALUATED, device=parity.DEVICES)
def test_a_quantised_base_is_evaluated(device, form):
    wrapped.skip_unless_computed(form, device)

    def run(module, device):
        with torch.no_grad():
            yield [module(x) for x in inputs(device, 2)]

    check(wrapped.adapted(form), run, device)


@pytest.mark.parametrize("form", ["coded", "int8", "nf4"])
def test_a_quantised_base_takes_its_bytes(form, monkeypatch):
    monkeypatch.setattr(wrapped, "WIDTH", 512)
    net = wrapped.adapted(form, count=6)()
    nbytes = sum(part.nbytes for p in net.parameters() for part in wrapped.parts(p))
    (x,) = inputs("cpu", 1)
    with sp_lightning.stream(net, "cpu", window=1) as handle, torch.no_grad():
        net(x)
        before = handle.stats()
        net(x)
        after = handle.stats()
    streamed = nbytes - after["resident_root_bytes"]
    assert streamed <= after["host_weight_bytes"] < 1.05 * nbytes
    assert streamed * 5 / 6 <= after["bytes_up"] - before["bytes_up"] < 1.05 * streamed  # a unit may be there already


# --- Reads outside of a weight's unit


class Decoding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * few(weight, x)

    @staticmethod
    def backward(ctx, grad):
        return grad * few(ctx.saved_tensors[0], grad), None


def few(weight, x):
    """As many numbers of a weight as a row of x has."""
    return wrapped.decoded(weight)[0, : x.shape[-1]]


def by_function(weight, x):
    wide = nn.functional.pad(x, (0, weight.shape[1] - x.shape[1]))
    return x + nn.functional.linear(wide, weight)[:, : x.shape[1]]


def by_method(weight, x):
    return x + few(weight, x)


def by_attribute(weight, x):
    part = wrapped.parts(getattr(weight, weight.__tensor_flatten__()[0][-1]))[0]
    return x + part.flatten()[: x.shape[-1]].float().mean(-1, keepdim=True)


def by_custom_function(weight, x):
    return Decoding.apply(x, weight)


def by_device(weight, x):
    return x + torch.ones(x.shape[-1], device=weight.device)


READS = [by_function, by_method, by_attribute, by_custom_function, by_device]


class Reading(wrapped.AdaptedBlock):
    """Reads, before its own, a weight of another block by one of these."""

    def forward(self, x):
        return super().forward(self.read(self.kept[0], x))


class ReadingStep(nn.Module):
    """Reads a weight of a block in a step, in another block or after all."""

    def __init__(self, form, read, where):
        super().__init__()
        self.net, self.read, self.where = wrapped.adapted(form)(), read, where
        if where == "block":
            self.net.blocks[2].__class__ = Reading
            self.net.blocks[2].kept, self.net.blocks[2].read = (self.net.blocks[0].up.base.weight,), read

    @property
    def weight(self):
        return self.net.blocks[1].up.base.weight

    def forward(self, x):
        return self.read(self.weight, self.net(x)) if self.where == "step" else self.net(x)


@parity.product(form=["coded", "int8", "nf4"], read=READS, where=["step", "block"], device=parity.DEVICES)
def test_a_quantised_weight_is_read_outside_of_its_unit(device, form, read, where):
    check(lambda: ReadingStep(form, read, where), wrapped.trained_and_evaluated, device)


# --- What users do to such weights


def test_a_state_dict_is_loaded_while_the_module_streams(device):
    def run(module, device):
        yield from training(steps=1)(module, device)
        state = {name: value.clone() for name, value in module.state_dict().items()}
        other = wrapped.adapted("coded")()
        module.load_state_dict(other.state_dict())
        yield from training(steps=1)(module, device)
        module.load_state_dict(state)
        yield from training(steps=1)(module, device)

    check(wrapped.adapted("coded"), run, device)


@pytest.mark.parametrize("form", often(["nf4", "coded", "int8"]))
def test_copies_and_files_of_a_streamed_module_are_plain(form):
    net, (x,) = wrapped.adapted(form)(), inputs("cpu", 1)
    plain = copy.deepcopy(net)
    with sp_lightning.stream(net, "cpu", window=1), torch.no_grad():
        expected = net(x)
        file, whole = io.BytesIO(), io.BytesIO()
        torch.save(net.state_dict(), file)
        torch.save(plain.state_dict(), whole)
        assert file.tell() < 1.05 * whole.tell()  # of each weight its own bytes, and not those of the slab
        copies = [copy.deepcopy(net), wrapped.adapted(form)()]
        file.seek(0)
        copies[1].load_state_dict(torch.load(file, weights_only=False))
        if form != "int8":  # whose module cannot be pickled without streaming, either
            copies.append(pickle.loads(pickle.dumps(net)))
    for other in [*copies, plain]:
        with torch.no_grad():
            assert torch.equal(other(x), expected)
        for weight, same in zip(wrapped.weights(other).values(), wrapped.weights(net).values(), strict=True):
            assert type(weight) is type(same) and isinstance(weight, nn.Parameter)
            assert all(part.untyped_storage().nbytes() == part.nbytes for part in wrapped.parts(weight))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_units_with_quantised_weights_are_compiled_by_inductor(form):
    def compiled(module, device):
        for block in module.blocks:
            block.compile()
        yield from wrapped.trained_and_evaluated(module, device)

    torch.compiler.reset()  # neither run finds what the other compiled
    expected, _ = observe(wrapped.adapted(form), compiled, torch.device("cpu"), None)
    torch.compiler.reset()
    options = {"window": 1, "compile_units": True}
    found, _ = observe(wrapped.adapted(form), wrapped.trained_and_evaluated, torch.device("cpu"), options)
    parity.compare(expected, found)
