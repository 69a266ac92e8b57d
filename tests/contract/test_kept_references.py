"""References to a weight that outlive the visit in which they were taken.

Reading device memory that was freed does not raise, it ends the process. So the cases run in a process of their own,
one for each device; a case that took it down fails with the signal, and those after it run in another one.
"""

from __future__ import annotations

import contextlib
import functools
import traceback

import forks
import pytest
import torch
from side_by_side import check, inputs, squares, training
from torch.nn import functional

import models

CASES = {}


def case(function):
    """A case takes a device and raises if streaming is not what it should be."""
    CASES[function.__name__] = function
    return function


def stack_of(block):
    return models.stack_of(block, 4)


class LinearKeepingView(models.LinearKeepingWeight):
    """Keeps a view of the weight on ctx, in a list."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = [weight.t()]
        ctx.save_for_backward(x)
        return x @ ctx.kept[0]

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.kept[0].t(), gradient.t() @ x


@case
def as_a_view_on_the_context_of_a_function(device):
    class Block(models.ContextBlock):
        def forward(self, x):
            return x + LinearKeepingView.apply(self.norm(x), self.weight).relu()

    check(stack_of(Block), training(), device)


class AttributeBlock(models.Block):
    """Keeps a weight as an attribute in one batch, and uses that one in the next."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.__dict__["kept"] = []

    def forward(self, x):
        if not self.kept:
            self.kept.append(self.keep(self.up.weight))
        return x + self.down(functional.linear(self.norm(x), self.kept[0], self.up.bias).relu())


@case
def as_an_attribute_over_steps(device):
    check(stack_of(lambda: AttributeBlock(lambda weight: weight)), training(steps=4), device)


@case
def detached_over_steps(device):
    check(stack_of(lambda: AttributeBlock(lambda weight: weight.detach())), training(steps=4), device)


@case
def as_a_view_over_steps(device):
    with_view = lambda: AttributeBlock(lambda weight: weight.detach().t().t()[:])  # noqa: E731
    check(stack_of(with_view), training(steps=4), device)


@case
def used_after_the_forward(device):
    class Block(models.Block):
        def forward(self, x):
            self.__dict__["kept"] = self.up.weight
            return super().forward(x)

    def loss(net, x):
        output = net(x)
        return output.square().mean() + sum(block.kept.square().sum() for block in net.blocks) * 1e-2

    check(stack_of(Block), training(loss), device)


@case
def in_an_exception(device):
    class Block(models.Block):
        def forward(self, x):
            weight = self.up.weight
            if not hasattr(self, "raised"):
                self.raised = True
                raise ArithmeticError(weight)
            return super().forward(x)

    def run(net, device):
        errors = []
        for x in inputs(device, 6):
            with contextlib.suppress(ArithmeticError):
                try:
                    squares(net, x).backward()
                except ArithmeticError as error:
                    errors.append(error)  # with its frames, and the weight
                    raise
            yield [error.args[0] for error in errors]

    check(stack_of(Block), run, device)


@case
def taken_in_a_hook_and_read_after_the_optimizers_step(device):
    def run(net, device):
        kept, read = {}, []
        for index, block in enumerate(net.blocks):
            block.up.register_forward_hook(lambda layer, *_, index=index: kept.update({index: layer.weight}))
        between = lambda net: read.extend(weight.detach().to(device) * 2 for weight in kept.values())  # noqa: E731
        yield from training(between=between)(net, device)
        yield read

    check(stack_of(models.Block), run, device)


CODE = "import faulthandler, sys; faulthandler.enable(); import test_kept_references as t; t.main(*sys.argv[1:])"


@functools.cache
def outcomes(device: str) -> dict[str, str]:
    """What became of each case: "passed", a traceback, or how the process ended."""
    found: dict[str, str] = {}
    while missing := [name for name in CASES if name not in found]:
        done = forks.run(CODE, device, *missing)
        blocks = done.stdout.split("\0")[1:]
        found |= {name: outcome.strip() for name, outcome in (block.split("\n", 1) for block in blocks)}
        if len(blocks) < len(missing) or done.returncode:
            broken = missing[max(0, len(blocks) - 1)]
            found[broken] = f"the process ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.seldom
def test_a_weight_that_is_kept(name, device):
    outcome = outcomes(device.type)[name]
    assert outcome == "passed", outcome


def main(device: str, *names: str) -> None:
    torch.set_num_threads(1)
    if device == "simgpu":
        import simgpu
    place = torch.device("cpu") if device == "cpu" else torch.device(device, 0)
    for name in names:
        print(f"\0{name}", flush=True)
        try:
            CASES[name](place)
            if device == "simgpu" and (races := simgpu.races()):
                raise AssertionError("\n".join(races))
        except Exception:
            print(traceback.format_exc(), flush=True)
        else:
            print("passed", flush=True)
    # Autograd's thread of the device still drops what a backward held that failed, for which it may want the
    # interpreter: it has done so once it gets to another one.
    torch.ones((), device=place, requires_grad=True).backward()
