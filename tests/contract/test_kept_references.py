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
from refusals import refusal
from side_by_side import check, inputs, squares, training
from torch import nn
from torch.nn import functional

import models
import sp_lightning
from sp_lightning.errors import UnsupportedError

CASES = {}


def case(function):
    """A case takes a device and raises if streaming is not what it should be."""
    CASES[function.__name__] = function
    return function


def stack_of(block):
    return models.stack_of(block, 4)


# --- In the model


@case
def on_the_context_of_a_function(device):
    check(stack_of(models.ContextBlock), training(), device)


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
def as_data_over_steps(device):
    check(stack_of(lambda: AttributeBlock(lambda weight: weight.data)), training(steps=4), device)


@case
def as_a_view_over_steps(device):
    with_view = lambda: AttributeBlock(lambda weight: weight.detach().t().t()[:])  # noqa: E731
    check(stack_of(with_view), training(steps=4), device)


@case
def as_a_registered_parameter(device):
    class Block(models.Block):
        def forward(self, x):
            if not hasattr(self, "again"):
                self.again = self.up.weight
            return x + self.down(functional.linear(self.norm(x), self.again).relu())

    check(stack_of(Block), training(steps=4), device)


@case
def as_a_buffer(device):
    class Block(models.Block):
        def forward(self, x):
            if not hasattr(self, "again"):
                self.register_buffer("again", self.up.weight.detach())
            return x + self.down(functional.linear(self.norm(x), self.again).relu())

    check(stack_of(Block), training(steps=4), device)


@case
def in_a_cache_until_the_end_of_the_forward(device):
    class Stack(models.Stack):
        def run(self, x):
            cache = {}
            for block in self.blocks:
                x = block(x)
                cache[block] = block.kept
            return x + sum(weight.mean() for weight in cache.values())

    class Block(models.Block):
        def forward(self, x):
            self.kept = self.up.weight.square()  # not the weight itself: that would be registered
            self.__dict__["weight"] = self.up.weight
            return super().forward(x)

    check(lambda: Stack(Block() for _ in range(4)), training(), device)


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
def in_a_closure_that_backward_calls(device):
    class Block(models.Block):
        def forward(self, x):
            weight = self.up.weight
            y = self.norm(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * weight.detach().mean())
            return x + self.down(self.up(y))

    check(stack_of(Block), training(), device)


@case
def in_a_generator_that_goes_on_after_the_unit(device):
    class Block(models.Block):
        def parts(self, x):
            weight, bias = self.up.weight, self.up.bias
            yield self.norm(x)
            yield functional.linear(self.norm(x), weight, bias)

        def forward(self, x):
            return self.parts(x)

    class Stack(models.Stack):
        def run(self, x):
            running = []
            for block in self.blocks:
                running.append(block(x))
                x = x + next(running[-1])
            return x + sum(next(parts).mean() for parts in running)

    check(lambda: Stack(Block() for _ in range(4)), training(), device)


@case
def in_a_generator_that_is_the_whole_forward(device):
    class Stack(models.Stack):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                yield x
            yield self.head(x)

    check(
        lambda: Stack(models.Block() for _ in range(4)),
        training(lambda net, x: list(net(x))[-1].square().mean()),
        device,
    )


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


# --- In what autograd saves


@case
def in_saved_tensors_without_hooks(device):
    def loss(net, x):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return squares(net, x)

    check(stack_of(models.Block), training(loss), device)


@case
def in_saved_tensors_without_hooks_in_some_blocks(device):
    class Block(models.Block):
        def forward(self, x):
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                return super().forward(x)

    check(lambda: models.Stack([Block(), models.Block(), Block(), models.Block()]), training(), device)


@case
def in_graphs_without_hooks_that_are_never_differentiated(device):
    def run(net, device):
        losses = []
        for x in inputs(device, 4):
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                losses.append(squares(net, x))
            yield losses
        yield from training()(net, device)
        yield losses

    check(stack_of(models.Block), run, device)


# --- In the user's own hands


@case
def taken_in_a_hook_and_read_later(device):
    def run(net, device):
        kept = {}
        for index, block in enumerate(net.blocks):
            block.register_forward_hook(lambda block, *_, index=index: kept.update({index: block.up.weight}))
            block.up.register_forward_hook(lambda layer, *_, index=index: kept.update({-index - 1: layer.weight}))
        for values in training(steps=4)(net, device):
            yield values, {index: weight.detach().to(device) * 2 for index, weight in kept.items()}

    check(stack_of(models.Block), run, device)


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


@case
def taken_in_a_hook_and_read_after_close(device):
    net, kept = models.stack_of(models.Block)(), []
    for block in net.blocks:
        block.up.register_forward_hook(lambda layer, *_: kept.append(layer.weight))
    with sp_lightning.stream(net, device, window=1):
        squares(net, next(inputs(device))).backward()
    for weight, block in zip(kept, net.blocks, strict=True):
        assert torch.equal(weight.detach().cpu(), block.up.weight.detach())


@case
@refusal(
    "a graph that is used after `close()`",
    UnsupportedError,
    "run its backward before",
)
def a_graph_whose_backward_comes_after_close(device):
    net = models.stack_of(models.Block)()
    with sp_lightning.stream(net, device, window=1):
        loss = squares(net, next(inputs(device)))
    with pytest.raises(UnsupportedError, match="run its backward before"):
        loss.backward()


@case
def a_graph_whose_backward_comes_after_its_parameters_were_replaced(device):
    net = models.stack_of(models.Block)()
    with sp_lightning.stream(net, device, window=1):
        older = squares(net, next(inputs(device)))
        net.head.weight = nn.Parameter(net.head.weight.detach() * 0.5)
        younger = squares(net, next(inputs(device)))
        with pytest.raises(UnsupportedError, match="run its backward before"):
            older.backward()
        younger.backward()
    assert all(p.grad is not None for p in net.parameters())


@case
def a_graph_without_hooks_whose_backward_comes_after_the_optimizers_step(device):
    net = models.stack_of(models.Block)()
    with sp_lightning.stream(net, device, window=1):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            older = squares(net, next(inputs(device)))
        for _ in training(steps=1)(net, device):
            pass
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            older.backward()


# --- Running them


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
