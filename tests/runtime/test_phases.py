"""Where the phases of a step meet: each by itself is tested elsewhere, and errors have lain between two of them."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from side_by_side import assert_plain, blocks, check, inputs, sgd, squares, training
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import parity
import sp_lightning

# --- Forwards inside of other phases


class Rolling(nn.Module):
    """Generates with its inner net, and is trained on what it generated."""

    def __init__(self):
        super().__init__()
        self.net = blocks()
        self.scale = nn.Parameter(torch.ones(models.CLASSES))

    @property
    def device(self):
        return self.scale.device

    def forward(self, x):
        return self.net(x) * self.scale

    def generate(self, x):
        for _ in range(2):
            x = x + self(x).mean() * self.scale.mean() + torch.ones(1, device=self.device)
        return x


class Imagining(nn.Module):
    """A forward that generates, with gradients or without, before and after its own use of the same weights."""

    def __init__(self):
        super().__init__()
        self.inner = Rolling()

    def forward(self, x):
        first = self.inner(x)
        with torch.no_grad():
            told = self.inner.generate(x)
        imagined = self.inner.generate(x)
        return first * self.inner.scale + self.inner(told) + self.inner(imagined)


class Checkpointed(nn.Module):
    """A model with its own root in a checkpoint, and a layer of it beside."""

    def __init__(self):
        super().__init__()
        self.net = blocks()
        self.back = nn.Linear(models.CLASSES, models.FEATURES)

    def forward(self, x):
        return self.back(self.net(x))


def two_forwards(net, x):
    return (net(x).square() + net(x * 0.5).square()).mean()


def with_a_prediction(net, x):
    hidden = net(x)
    with torch.no_grad():
        target = net(x * 0.5)
    return (hidden - target).square().mean()


def with_a_gradient_of_the_input(net, x):
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().mean(), x)
    return (net(x + grad).square()).mean()


def recomputed(reentrant):
    def loss(net, x):
        x = x.detach().requires_grad_()
        hidden = checkpoint(net, x, use_reentrant=reentrant)
        again = checkpoint(net, hidden, use_reentrant=reentrant)
        return net.back(net.net(again)).square().mean()

    return loss


LOSSES = {
    "a generate inside a step": (Imagining, squares),
    "two forwards before one backward": (blocks, two_forwards),
    "a prediction before a backward": (blocks, with_a_prediction),
    "autograd.grad before a backward": (blocks, with_a_gradient_of_the_input),
    "a forward of the whole in backward": (Checkpointed, recomputed(False)),
    "a forward of the whole in a reentrant backward": (Checkpointed, recomputed(True)),
}


def stepping(loss):
    """Trains with a closure."""

    def run(net, device):
        optimizer = sgd(net)
        for x in inputs(device):

            def closure(x=x):
                optimizer.zero_grad()
                value = loss(net, x)
                value.backward()
                return value

            yield optimizer.step(closure), [p.grad for p in net.parameters()]

    return run


@parity.product(window=[1, 3], how=[training, stepping], case=list(LOSSES), device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_forward_inside_another_phase(device, case, how, window):
    make, loss = LOSSES[case]
    check(make, how(loss), device, window=window)


@parity.product(activations=["recompute", "offload"], case=list(LOSSES), device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_forward_inside_another_phase_with_other_activations(device, case, activations):
    make, loss = LOSSES[case]
    check(make, training(loss), device, activations=activations)


@pytest.mark.few(1)
def test_predictions_between_accumulated_batches(device):
    def run(net, device):
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device, 6)):
            loss = squares(net, x)
            with torch.no_grad():
                yield net(x * 0.5)
            loss.backward()
            with torch.no_grad():
                yield loss, net(x * 2)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    check(blocks, run, device)


# --- Code of the user inside an optimizer's step


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one: it goes on when the other has stepped."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        loss = self.inner.step(closure)
        slow_down(self)
        return loss


class Slowed(torch.optim.SGD):
    """An optimizer that goes on when its base class has stepped."""

    def step(self, closure=None):
        loss = super().step(closure)
        slow_down(self)
        return loss


@torch.no_grad()
def slow_down(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            slow = optimizer.state[p].setdefault("slow", torch.zeros(p.shape, device=p.device))
            slow += 0.5 * (p - slow)
            p.copy_(slow * p.norm())


MAKES = {
    "torch's": sgd,
    "around": lambda net: Lookahead(sgd(net)),
    "by super": lambda net: [sgd(net), Slowed(net.parameters(), lr=0.1, momentum=0.9, foreach=False)][1],  # both hooked
}


class Outer(nn.Module):
    """A step as Lightning's manual optimization has it: the optimizer steps inside, by a closure or without."""

    def __init__(self, closure, make):
        super().__init__()
        self.net = blocks()
        self.closure, self.make = closure, make
        self.optimizer = None

    def loss(self, x):
        """Runs a part of the model, and reads weights outside of their layers."""
        hidden = self.net(x)
        weight = self.net.blocks[0].up.weight
        return hidden.square().mean() + weight.square().mean() * torch.ones((), device=weight.device)

    def forward(self, x):
        if self.optimizer is None:
            self.optimizer = MAKES[self.make](self)

        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        if self.closure:
            return self.optimizer.step(closure)
        loss = closure()
        self.optimizer.step()
        return loss, self.loss(x)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.few(3)
def test_an_optimizer_inside_a_step(device, closure, make):
    def run(net, device):
        for x in inputs(device):
            yield net(x)
        streamed = type(net.net.blocks[0].up.weight) is not nn.Parameter
        for state in net.optimizer.state.values():
            assert {value.device for value in state.values()} == {torch.device("cpu") if streamed else device}

    check(lambda: Outer(closure, make), run, device)


def test_a_weight_that_a_closure_reads_is_read_as_without_a_closure(device, caplog):
    """On the host, between a forward and its backward: equal to rounding, with one line in the log."""
    net = blocks()
    with sp_lightning.stream(net, device, window=1), caplog.at_level("INFO", "sp_lightning"):
        optimizer = sgd(net)
        for x in inputs(device):

            def closure(x=x):
                optimizer.zero_grad()
                loss = squares(net, x) + net.blocks[0].up.weight.square().sum().item()
                loss = loss + net.blocks[0].up.weight.square().sum().to(device)
                loss.backward()
                return loss

            optimizer.step(closure)
    (said,) = [record for record in caplog.records if "was read on the host" in record.getMessage()]
    assert said.levelname == "WARNING"  # which Python shows to those who set up no logging


class Reading(Rolling):
    """Reads a weight outside of its layer."""

    def forward(self, x):
        hidden, weight = super().forward(x), self.net.blocks[0].up.weight
        return hidden + weight.flatten()[: models.CLASSES] * torch.ones(1, device=weight.device)


@pytest.mark.parametrize("place", ["forward", "between"])
def test_a_step_on_another_thread_of_an_optimizer_without_these_weights_is_no_matter(device, place):
    def run(net, device):
        optimizer, others = sgd(net), sgd(nn.Linear(3, 3))
        began, may_end = threading.Event(), threading.Event()

        def wait(*_):
            began.set()
            assert may_end.wait(60)

        def begin(*_):
            thread.start()
            assert began.wait(60)

        others.register_step_pre_hook(wait)
        average = torch.zeros(net.scale.shape, device=device)
        for x in inputs(device):
            began.clear(), may_end.clear()
            thread = threading.Thread(target=others.step)
            hook = net.net.stem.register_forward_hook(begin) if place == "forward" else None
            try:
                loss = squares(net, x)
                loss.backward()
                if hook is not None:
                    hook.remove()
                else:
                    begin()
                with torch.no_grad():
                    average += net.scale
            finally:
                may_end.set()
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
            yield loss, average

    check(Reading, run, device)


class Borrowing(models.Block):
    """Reads a weight of another block."""

    def __init__(self):
        super().__init__()
        self.others, self.before_read, self.after_read = [], lambda: None, lambda: None

    def forward(self, x):
        self.before_read()
        try:
            x = x + sum(other.up.weight[0] * torch.ones_like(x) for other in self.others)
        finally:
            self.after_read()
        return super().forward(x)


def borrowing():
    net = models.Stack(Borrowing() for _ in range(4))
    for block in net.blocks[1:]:
        block.others.append(net.blocks[0])
    return net


def test_a_step_in_a_hook_on_a_weight_leaves_the_reads_of_recomputation_alone(device):
    """Autograd's thread of the device recomputes a block, while the host's thread steps a weight of the next one."""

    def run(net, device):
        began, steps, read = threading.Event(), threading.Event(), threading.Event()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, foreach=False) for parameter in net.parameters()}

        def is_on(host):
            return device.type != "cpu" and (threading.current_thread() is threading.main_thread()) is host

        def recomputes():
            if is_on(host=False):
                began.set()
                assert steps.wait(60)

        def step(parameter):
            assert parameter is not net.blocks[3].up.weight or not is_on(host=True) or began.wait(60)
            optimizers[parameter].step()
            parameter.grad = None

        def wait(*_):
            steps.set()
            assert not is_on(host=True) or read.wait(60)

        net.blocks[2].before_read, net.blocks[2].after_read = recomputes, read.set
        optimizers[net.blocks[3].up.weight].register_step_pre_hook(wait)
        hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in net.parameters()]
        for x in inputs(device):
            loss = squares(net, x)
            began.clear(), steps.clear(), read.clear()
            loss.backward()
            yield loss
        for hook in hooks:
            hook.remove()

    check(borrowing, run, device, activations="recompute")


# --- Failures


class Fault(BaseException):
    """Like KeyboardInterrupt: no ``except Exception`` sees it."""


@contextlib.contextmanager
def meanwhile(net, optimizer, where, do):
    """Call a function in the middle of a phase."""
    if where == "forward":
        hook = net.net.blocks[2].register_forward_pre_hook(do)
    elif where == "backward":
        hook = net.net.blocks[1].register_full_backward_pre_hook(do)
    elif where == "a weight's hook":
        hook = net.net.blocks[1].up.weight.register_post_accumulate_grad_hook(do)
    elif where == "generate":
        hook = net.net.stem.register_forward_hook(lambda *_: do() if net.generating else None)
    else:
        hook = optimizer.register_step_pre_hook(do)
    try:
        yield
    finally:
        hook.remove()


class Phased(Rolling):
    generating = False

    def generate(self, x):
        self.generating = True
        try:
            return super().generate(x)
        finally:
            self.generating = False


PLACES = ["forward", "generate", "backward", "a weight's hook", "optimizer"]


def whole_step(net, optimizer, x):
    optimizer.zero_grad()
    squares(net, net.generate(x)).backward()
    optimizer.step()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.few(1)
def test_after_a_failure_user_code_and_the_next_step_are_as_ever(device, where):
    def run(net, device):
        def fail(*_):
            raise Fault

        optimizer, other = sgd(net), sgd(net)
        for index, x in enumerate(inputs(device, 4)):
            if index % 2:
                with pytest.raises(Fault), meanwhile(net, optimizer, where, fail):
                    whole_step(net, optimizer, x)
            with torch.no_grad():
                yield net(x), net.generate(x)
            whole_step(net, other if index == 2 else optimizer, x)
            yield [p.grad for p in net.parameters()]
            with torch.no_grad():
                net.scale.mul_(torch.full_like(net(x)[0], 0.9))

    check(Phased, run, device)


@pytest.mark.parametrize("where", ["closure", "optimizer"])
def test_after_a_step_that_raised_another_optimizer_and_code_beside_it_are_as_ever(device, where):
    def run(net, device):
        def fail(*_):
            raise Fault

        failing, optimizer = sgd(net), sgd(net)
        average = [torch.zeros(p.shape, device=device) for p in net.parameters()]

        @torch.no_grad()
        def look_and_write(x):
            for mean, p in zip(average, net.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
            net(x)  # units are on the device
            for p in map(torch.Tensor.detach, net.parameters()):
                p.mul_(0.5) if p.device.type == "simgpu" else p.numpy().__imul__(0.5)
            return average, net(x)

        x = next(inputs(device))
        squares(net, x).backward()
        if where == "optimizer":
            failing.register_step_pre_hook(fail)
        with pytest.raises(Fault):
            failing.step(fail)
        if where == "closure":
            yield look_and_write(x)
        for x in inputs(device):
            optimizer.zero_grad()
            squares(net, x).backward()
            optimizer.step()
            yield look_and_write(x)

    check(blocks, run, device, window=3)


@pytest.mark.parametrize("where", ["forward", "generate", "before backward", "backward", "optimizer"])
@pytest.mark.few(3)
def test_streaming_may_end_in_any_phase(device, where):
    """What still runs may fail, since its weights left the device; the module is plain, and streams again."""
    net, expected = Phased(), Phased()
    expected.load_state_dict(net.state_dict())
    before = {name: p.clone() for name, p in net.named_parameters()}
    optimizer, x = sgd(net), next(inputs(device))
    handle = sp_lightning.stream(net, device, window=1)
    if where == "before backward":
        loss = squares(net, x)
        handle.close()
        with pytest.raises(sp_lightning.errors.UnsupportedError, match="after streaming ended"):
            loss.backward()
    else:
        with contextlib.suppress(RuntimeError), meanwhile(net, optimizer, where, lambda *_: handle.close()):
            whole_step(net, optimizer, x)
    assert handle.closed
    assert_plain(net)
    with torch.no_grad():
        for p, value in zip(net.parameters(), before.values(), strict=True):
            p.copy_(value)
    with sp_lightning.stream(net, device, window=1):
        whole_step(net, sgd(net), x)
    whole_step(expected.to(device), sgd(expected), x)
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q.cpu()), name
