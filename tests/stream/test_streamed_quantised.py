"""Frozen weights that consist of several tensors travel with their units, and compute with the plain run's bits."""

import copy
import functools

import pytest
import torch
import wrapped
from side_by_side import check
from stream_programs import streamed
from torch import nn

import models
from sp_lightning.errors import UnsupportedError


def test_quantised_weights_outside_of_units_stay_on_the_device(device):
    def make():
        net = wrapped.adapted("coded")()
        net.stem = wrapped.quantise(net.stem, "coded")
        return net

    check(make, wrapped.trained_and_evaluated, device)
    check(wrapped.adapted("coded"), wrapped.trained_and_evaluated, device, resident=2)


def test_a_quantised_weight_that_two_modules_share(device):
    def make():
        net = wrapped.adapted("coded")()
        net.blocks[3].up.base.weight = net.blocks[0].up.base.weight
        return net

    check(make, wrapped.trained_and_evaluated, device, activations="recompute")


@pytest.mark.simgpu
def test_units_leave_the_device_between_forward_and_backward():
    net = wrapped.adapted("coded")()
    x = torch.randn(4, models.FEATURES).to("simgpu")
    with streamed(net, "simgpu") as handle:
        loss = net(x).square().mean()
        on_device = [unit for unit in handle.units if not unit.is_held and unit.memory.flat.numel()]
        before = torch.accelerator.memory_allocated()
        assert len(on_device) <= 1
        loss.backward()
        assert torch.accelerator.memory_allocated() < before + 2 * max(unit.nbytes for unit in handle.units)


def test_between_steps_a_weight_is_what_it_was():
    net = wrapped.adapted("coded")()
    before = copy.deepcopy(wrapped.weights(net))
    with streamed(net, "cpu"):
        net(torch.ones(4, models.FEATURES)).sum().backward()
        for name, weight in wrapped.weights(net).items():
            assert type(weight) is wrapped.Coded and torch.equal(weight.decoded(), before[name].decoded())
            assert torch.equal(copy.deepcopy(weight).decoded(), before[name].decoded())


def test_a_write_between_steps_goes_up():
    net, x = wrapped.adapted("coded")(), torch.ones(4, models.FEATURES)
    with streamed(net, "cpu"), torch.no_grad():
        first = net(x)
        net.blocks[1].up.base.weight.factors.factors.mul_(2)
        assert not torch.equal(net(x), first)


def test_master_weights_leave_a_quantised_base_as_it_is():
    net = wrapped.adapted("int8")()
    before = copy.deepcopy(wrapped.weights(net))
    optimizer = torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], 1e-2)
    with streamed(net, "cpu", wire=torch.bfloat16, master_weights=True):
        net(torch.ones(4, models.FEATURES, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    for name, weight in wrapped.weights(net).items():
        assert all(map(torch.equal, wrapped.parts(weight), wrapped.parts(before[name]))), name


def test_training_a_quantised_weight_is_refused():
    net = wrapped.adapted("coded")()
    with streamed(net, "cpu"):
        net.blocks[1].up.base.weight.requires_grad_(True)
        with pytest.raises(UnsupportedError, match=r"blocks\.1\.up\.base\.weight .* cannot|not trained"):
            net(torch.ones(4, models.FEATURES))


def test_a_quantised_weight_that_comes_later_is_refused():
    net = wrapped.adapted("coded")()
    with streamed(net, "cpu"):
        net.blocks[1].up.base = wrapped.quantise(nn.Linear(wrapped.WIDTH, wrapped.HIDDEN), "coded")
        with pytest.raises(UnsupportedError, match=r"blocks\.1\.up\.base\.weight .* before the module is streamed"):
            net(torch.ones(4, models.FEATURES))


# ---- weights with other tensors in their attributes


class Scaled(nn.Parameter):
    """Has its scale in an attribute, and takes it along where it is moved."""

    def __new__(cls, data, state):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    def to(self, *args, **kwargs):
        return Scaled(super().to(*args, **kwargs), {"scale": self.state["scale"].to(*args, **kwargs)})


class ScaledLinear(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.randint(-8, 8, (12, 12), dtype=torch.int8)
        self.weight = Scaled(codes, {"scale": torch.rand(12, 1)})

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight.state["scale"])


def of_bitsandbytes(bits):
    library = pytest.importorskip("bitsandbytes", reason="it packs the weights")
    kinds = {4: library.nn.Linear4bit, 8: functools.partial(library.nn.Linear8bitLt, has_fp16_weights=False)}
    return kinds[bits](64, 64)


@pytest.mark.simgpu
@pytest.mark.parametrize("make", [ScaledLinear, lambda: of_bitsandbytes(4), lambda: of_bitsandbytes(8)])
def test_a_weight_that_takes_other_tensors_along_is_refused(make):
    net = nn.Sequential(make(), make())
    with pytest.raises(UnsupportedError, match=r"0\.weight is a \w+, which takes other tensors along .*torchao"):
        streamed(net, "simgpu").__enter__()


@pytest.mark.parametrize("make", [ScaledLinear, lambda: of_bitsandbytes(4), lambda: of_bitsandbytes(8)])
def test_such_a_weight_streams_where_the_cpu_computes(make):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(make(), make())

    plain, net = made(), made()
    x = torch.rand(4, 12 if make is ScaledLinear else 64)
    with torch.no_grad():
        expected = (plain if make is ScaledLinear else plain.to("cpu"))(x)
        with streamed(net, "cpu", units=[type(net[0]).__name__]):
            assert torch.equal(net(x), expected)
