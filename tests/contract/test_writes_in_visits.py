"""Weights that code inside of their unit reads and writes, also by a reference that it keeps from outside.

Such code finds the host parameter, while the unit's forward computes with the stand-in: in a plain run both are one.
"""

from __future__ import annotations

import copy

import pytest
import torch
from refusals import refusal
from side_by_side import blocks, check, inputs, squares

import models
import parity
import sp_lightning
from sp_lightning.errors import ExactnessError


def over(storage, like):
    return torch.empty(0, device=storage.device).set_(storage, like.storage_offset(), like.shape, like.stride())


def replace(p):
    p.data = p.data * 0.5


GRADIENT_WRITES = {
    "zero_": lambda grad: grad.zero_(),
    "mul_": lambda grad: grad.mul_(0.5),
    "data": lambda grad: grad.data.mul_(0.5),
    "row": lambda grad: grad[0].mul_(0.5),
}


def step(p):
    p.grad = torch.full_like(p, 0.1)
    torch.optim.SGD([p], 0.1).step()
    p.grad = None


WRITES = {
    "data": lambda p: p.data.clamp_(min=0),
    "itself": lambda p: p.clamp_(min=0),
    "item": lambda p: p.__setitem__(0, 0.25),
    "copy_": lambda p: p.copy_(torch.full(p.shape, 0.1)),
    "out=": lambda p: torch.mul(p, 0.5, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "view": lambda p: p.t()[0].mul_(0.5),
    "as_strided": lambda p: p.as_strided((2,), (1,), p.storage_offset() + 1).mul_(0.5),
    "detached": lambda p: p.detach().mul_(0.5),
    "storage": lambda p: over(p.untyped_storage(), p).mul_(0.5),
    "other data": replace,
    "random": lambda p: torch.nn.init.normal_(p, generator=torch.Generator(p.device).manual_seed(0)),
    "from another layer": lambda p: p.add_(p.other),
    "set_": lambda p: p.set_(p.detach() * 0.5),
    "an optimizer": step,
    "several": lambda p: (p.mul_(0.5), p.data.add_(0.1), step(p), p.clamp_(max=0.2)),
}
SEEN = [
    lambda p: p.data.clone(),
    lambda p: p.detach().clone(),
    lambda p: p.clone(),
    lambda p: torch.tensor(p.tolist()),
    lambda p: copy.deepcopy(p).data,
    lambda p: torch.tensor(len(str(p.data.cpu()))),
    lambda p: torch.zeros_like(p).copy_(p),
    lambda p: torch.zeros(p.shape).copy_(p),
]


def hooked(write, autocasts=False, since=0):
    """Train blocks in which a hook of a layer writes to its weight in front of its forward, and sees it."""

    def run(net, device):
        seen, step = [], 0
        for block, other in zip(net.blocks, [*net.blocks[1:], net.blocks[0]], strict=True):
            weight = block.down.weight
            weight.other = other.down.weight

            def hook(layer, _, weight=weight):
                if step >= since:
                    with torch.no_grad():
                        write(weight)
                        seen.extend(look(weight).cpu() for look in SEEN)

            block.down.register_forward_pre_hook(hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step, x in enumerate(inputs(device, since + 4)):  # noqa: B007  the hooks look at it
            with torch.autocast(device.type, torch.bfloat16, enabled=autocasts, cache_enabled=False):
                loss = squares(net, x)
            loss.backward()
            yield loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        yield seen

    return run


@parity.product(
    write=list(WRITES),
    activations=["keep", "offload"],
    window=[1, 6],
    device=parity.DEVICES,
)
@pytest.mark.few(8)
def test_a_weight_that_a_hook_inside_of_its_unit_writes(write, activations, window, device):
    check(blocks, hooked(WRITES[write]), device, activations=activations, window=window)


@parity.product(write=list(WRITES), since=[0, 2], window=[1, 6], device=parity.DEVICES)
@pytest.mark.few(3)
def test_a_weight_that_travels_in_autocasts_type_and_is_written_by_a_hook_inside_of_its_unit(
    write, since, window, device
):
    check(blocks, hooked(WRITES[write], autocasts=True, since=since), device, window=window)


@parity.product(
    write=list(GRADIENT_WRITES),
    by=["slot", "reference", "both"],
    activations=["keep", "offload"],
    device=parity.DEVICES,
)
@pytest.mark.few(4)
def test_a_gradient_of_an_earlier_batch_that_code_inside_of_its_unit_writes(write, by, activations, device):
    def run(net, device):
        seen = []
        for block in net.blocks:

            def hook(layer, _, kept=block.down.weight):
                weights = [*[layer.weight] * (by != "reference"), *[kept] * (by != "slot")]
                for weight in weights:
                    if weight.grad is not None:
                        GRADIENT_WRITES[write](weight.grad)
                        seen.append((weight.grad + layer.bias.grad.norm()).cpu())

            block.down.register_forward_pre_hook(hook)
        for x in inputs(device, 4):
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]
        yield seen

    check(blocks, run, device, activations=activations)


@refusal(
    "code inside a unit's forward writes a gradient of the unit, and a backward there adds to it",
    ExactnessError,
    "write to it outside of the forward",
)
def test_a_gradient_that_a_unit_writes_and_adds_to_is_an_error_on_a_device():
    class Adding(models.Block):
        def forward(self, x):
            if self.up.weight.grad is not None:
                self.up.weight.grad.mul_(0.5)
                with torch.enable_grad():
                    self.up(x.detach()).sum().backward()
            return super().forward(x)

    net, batches = models.stack_of(Adding)(), inputs(torch.device("simgpu"), 2)
    with sp_lightning.stream(net, "simgpu", window=1):
        squares(net, next(batches)).backward()
        with pytest.raises(ExactnessError, match=r"the gradient of blocks\.0\.up\.weight was written inside its unit"):
            squares(net, next(batches))
