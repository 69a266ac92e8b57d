"""A step that is held runs on beside the next forward, and nobody ever sees that it is not done."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import itertools
import logging
import os
import pickle
import signal
import sys
import threading
import time
import weakref

import lightning as L
import pytest
import torch
from side_by_side import assert_plain, blocks, check, fit, inputs, squares
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.autograd import weight_reads
from sp_lightning.errors import TornStepError
from sp_lightning.kernels.build import Unavailable
from sp_lightning.memory import host_copy
from sp_lightning.memory.device import Device
from sp_lightning.optim import native, pending_step
from sp_lightning.optim.pending_step import HostThread, PendingStep
from sp_lightning.optim.pieces import Optimizer
from sp_lightning.runtime.window import Window

TRUE_DATA = torch.Tensor.data.__get__


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)


def step(net, optimizer, x):
    optimizer.zero_grad()
    squares(net, x).backward()
    optimizer.step()


class Gate:
    """The host thread does not go on until this is open."""

    def __init__(self, handle):
        self.event = threading.Event()
        handle.engine.step_owner.thread.submit(lambda: self.event.wait(60))

    def open(self, after=0.05):
        threading.Timer(after, self.event.set).start()


class Held:
    """A net whose last step is held at the gate."""

    def __init__(self, handle, net, optimizer, opens_after):
        self.handle, self.net, self.optimizer = handle, net, optimizer
        self.opens_after = opens_after

    def after_backward(self, x, before):
        """All of it."""
        squares(self.net, x).backward()
        before(self.net, self.optimizer)
        with self.handle.steps.overlapping(self.optimizer, lambda: True, in_backward=False):
            self.gate = Gate(self.handle)
            self.gate.open(self.opens_after)
            self.optimizer.step()

    def beside_backward(self, x, before):
        """What was not stepped when backward came to the second block."""

        def stop(_):
            self.handle.engine.step_owner.thread.submit(lambda: None).result()
            self.gate = Gate(self.handle)

        hook = self.net.blocks[1].register_forward_hook(lambda *args: args[2].register_hook(stop) and None)
        with self.handle.steps.overlapping(self.optimizer, lambda: True):
            squares(self.net, x).backward()
            hook.remove()
            before(self.net, self.optimizer)
            self.gate.open(self.opens_after)
            self.optimizer.step()

    @property
    def is_under_way(self):
        return self.handle.stats()["pending_step"] == "deferred"


def plain(make_optimizer=adamw, steps=2):
    torch.manual_seed(0)
    net = blocks()
    optimizer = make_optimizer(net)
    for _ in range(steps):
        step(net, optimizer, next(inputs(torch.device("cpu"))))
    return net, optimizer


@pytest.fixture(params=[Held.after_backward, Held.beside_backward], ids=["after backward", "beside backward"])
def hold(device, request):
    """Makes the same with a step that is held; everything is closed at the end."""
    handles = []

    def make(make_optimizer=adamw, steps=2, before=lambda net, optimizer: None, opens_after=0.05, window=1):
        torch.manual_seed(0)
        net = blocks()
        handle = sp_lightning.stream(net, device, window=window)
        handles.append(handle)
        optimizer = make_optimizer(net)
        x = next(inputs(device))
        for _ in range(steps - 1):
            with handle.steps.overlapping(optimizer):  # the first shows whether it may (step_owner.py, Rule 4)
                step(net, optimizer, x)
        optimizer.zero_grad()
        held = Held(handle, net, optimizer, opens_after)
        request.param(held, x, before)
        assert held.is_under_way
        return held

    yield make
    for handle in handles:
        handle.close()


def assert_equal(one, other):
    one, other = list(parity.leaves(one)), list(parity.leaves(other))
    assert len(one) == len(other)
    for (path, a), (_, b) in zip(one, other, strict=True):
        assert torch.equal(a.cpu(), b.cpu()) if isinstance(a, torch.Tensor) else a == b, path


# --- Who looks, waits


LOOKS = {
    "a function": lambda net, _: [p.sum() for p in net.parameters()],
    "data": lambda net, _: [p.data.clone() for p in net.parameters()],
    "the getter of data": lambda net, _: [torch.Tensor.data.__get__(p).clone() for p in net.parameters()],
    "detach": lambda net, _: [p.detach().clone() for p in net.parameters()],
    "torch.func.grad": lambda net, _: [torch.func.grad(lambda p: p.square().sum())(p) for p in net.parameters()],
    "numpy": lambda net, _: [torch.from_numpy(p.detach().numpy().copy()) for p in net.parameters()],
    "storage": lambda net, _: [torch.tensor(p.untyped_storage().tolist()[:9]) for p in net.parameters()],
    "state_dict": lambda net, _: {k: v.clone() for k, v in net.state_dict().items()},
    "state_dict of a block": lambda net, _: {k: v.clone() for k, v in net.blocks[3].state_dict().items()},
    "a list of them": lambda net, _: [torch.nn.utils.parameters_to_vector(net.parameters())],
    "foreach": lambda net, _: torch._foreach_norm(list(net.parameters())),
    "deepcopy": lambda net, _: [p.data for p in copy.deepcopy(net).parameters()],
    "deepcopy of a weight": lambda net, _: [copy.deepcopy(net.head.weight).data],
    "pickle": lambda net, _: [pickle.loads(pickle.dumps(net.head.weight)).data],
    "nn.Parameter": lambda net, _: [nn.Parameter(net.head.weight).data.clone()],
    "an operator": lambda net, _: [torch.ops.aten.sum.default(p) for p in net.parameters()],
    "a copy into another": lambda net, _: [torch.zeros_like(p.data).copy_(p) for p in net.parameters()],
    "gradients": lambda net, _: [p.grad.clone() for p in net.parameters()] + [p.data.clone() for p in net.parameters()],
    "state": lambda net, optimizer: [dict(optimizer.state[p]) for p in net.parameters()],
    "state by getattr": lambda _, optimizer: [dict(s) for s in getattr(optimizer, "state", {}).values()],
    "state_dict of the optimizer": lambda _, optimizer: copy.deepcopy(optimizer.state_dict()["state"]),
    "deepcopy of the optimizer": lambda _, optimizer: [dict(s) for s in copy.deepcopy(optimizer).state.values()],
}


def test_stats_name_the_step_that_is_pending_and_finish_step_ends_it(hold):
    held, seen = hold(), []

    def pending(*_):
        seen.append(held.handle.stats()["pending_step"])

    pending()
    held.handle.finish_step()
    pending()
    with held.handle.steps.overlapping(held.optimizer):
        held.net.blocks[0].register_forward_hook(lambda *args: args[2].register_hook(pending) and None)
        squares(held.net, next(inputs(held.handle.device.torch_device))).backward()
        pending()
        held.optimizer.step()
    assert seen == ["deferred", None, "in backward", None]


@pytest.mark.parametrize("way", LOOKS)
@pytest.mark.few(2)
def test_who_looks_sees_it_done(way, hold):
    held = hold()
    seen = LOOKS[way](held.net, held.optimizer)
    assert_equal(seen, LOOKS[way](*plain()))


def written_in_place(net, _):
    with torch.no_grad():
        net.head.weight.mul_(2)


def written_by_data(net, _):
    net.head.weight.data = torch.ones_like(TRUE_DATA(net.head.weight))


def gradients_zeroed(net, _):
    for p in net.parameters():
        p.grad.zero_()


def gradients_dropped(_, optimizer):
    optimizer.zero_grad()


def stepped_again(_, optimizer):
    optimizer.step()


def state_exchanged(net, optimizer):
    optimizer.load_state_dict(plain(steps=1)[1].state_dict())


def moved(net, _):
    net.double().float()


def learning_rate_written(_, optimizer):
    optimizer.param_groups[0]["lr"] = 7.0


def weight_replaced(net, _):
    net.head = nn.Linear(models.WIDTH, models.CLASSES)
    nn.init.ones_(net.head.weight)
    nn.init.ones_(net.head.bias)


WRITES = [written_in_place, written_by_data, gradients_zeroed, gradients_dropped, stepped_again, state_exchanged, moved]
WRITES += [learning_rate_written, weight_replaced]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.few(3)
def test_who_writes_writes_after_it(write, hold):
    held, (net, optimizer) = hold(), plain()
    write(held.net, held.optimizer)
    write(net, optimizer)
    with torch.no_grad():
        assert_equal(held.net(next(inputs(held.handle.device.torch_device))), net(next(inputs(torch.device("cpu")))))
    held.handle.close()
    assert_equal(held.net.state_dict(), net.state_dict())
    assert_equal(list(held.optimizer.state.values()), list(optimizer.state.values()))


def none_by_hand(net, _):
    for p in net.parameters():
        p.grad = None


def deleted(net, _):
    for p in net.parameters():
        del p.grad


TAKEN_AWAY = {
    "by the optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "by the module": lambda net, _: net.zero_grad(),
    "by a part, then by the module": lambda net, _: (net.blocks[2].zero_grad(), net.zero_grad(set_to_none=True)),
    "by hand": none_by_hand,
    "by del": deleted,
}


@pytest.mark.parametrize("way", TAKEN_AWAY)
@pytest.mark.few(2)
def test_gradients_are_taken_away_without_a_wait(way, hold):
    held, (net, optimizer) = hold(), plain()
    for one in ((held.net, held.optimizer), (net, optimizer)):
        TAKEN_AWAY[way](*one)
    assert [p.grad for p in held.net.parameters()] == [None] * len(list(net.parameters()))
    assert held.is_under_way
    x = next(inputs(held.handle.device.torch_device))
    for one, at, by in ((held.net, x, held.optimizer), (net, x.cpu(), optimizer)):
        squares(one, at).backward()
        by.step()
    assert_equal([p.grad for p in held.net.parameters()], [p.grad for p in net.parameters()])
    assert_equal(held.net.state_dict(), net.state_dict())
    assert_equal(list(held.optimizer.state.values()), list(optimizer.state.values()))


def test_gradients_that_stay_as_zeros_wait(hold):
    held = hold()
    held.optimizer.zero_grad(set_to_none=False)
    assert not held.is_under_way and not any(p.grad.any() for p in held.net.parameters())


def test_what_wraps_zero_grad_still_sees_gradients_after_the_step(hold, monkeypatch):
    held, seen = hold(), []
    expected = [p.grad for p in plain()[0].parameters()]
    for kind in (nn.Module, torch.optim.Optimizer):
        torchs = kind.zero_grad

        def zero_grad(self, *args, torchs=torchs):
            seen.append([p.grad.clone() for p in held.net.parameters() if p.grad is not None])
            torchs(self, *args)

        monkeypatch.setattr(kind, "zero_grad", zero_grad)
    held.optimizer.zero_grad()
    held.net.zero_grad()
    assert len(seen) == 2 and not seen[1]
    assert_equal(seen[0], expected)
    assert all(p.grad is None for p in held.net.parameters())


def undispatched(p):
    with torch._C.DisableTorchFunctionSubclass():
        return p.sum()


def by_a_write(p):
    with torch.no_grad():
        p.mul_(2)
    return p


def by_a_host_tensor(p):
    return p + torch.ones(p.shape[0])


def by_a_visit(p):
    return p.square()


@pytest.mark.parametrize("look", [by_a_write, by_a_host_tensor, by_a_visit])
def test_who_looks_inside_a_step_sees_it_done(look, hold):
    held = hold()
    held.handle.open_scope("train")
    seen = look(held.net.head.bias).detach().cpu().clone()
    held.handle.close_scope()
    assert_equal(seen, look(plain()[0].head.bias).detach())


def test_a_kept_stand_in_follows(hold):
    kept = []

    def keep(net, _):
        net.blocks[1].up.register_forward_hook(lambda up, *_: kept.append(up.weight))
        net(next(inputs(net.head.forward.engine.device.torch_device)))

    hold(before=keep)
    assert_equal(kept[0].detach(), plain()[0].blocks[1].up.weight.detach())


def test_data_is_waited_for_outside_of_function_dispatch_too(hold):
    held = hold()
    with torch._C.DisableTorchFunctionSubclass():
        assert_equal(held.net.head.weight.data, plain()[0].head.weight.data)


def test_nothing_is_under_way_when_reads_are_not_told(hold):
    held = hold()
    sp_lightning.autograd.weight_reads.pause()
    assert not held.is_under_way
    assert_equal(held.net.head.weight.detach(), plain()[0].head.weight.detach())


def test_nothing_is_under_way_after_the_next_training_step(hold):
    held = hold()
    held.handle.open_scope("train")
    assert held.is_under_way
    held.handle.close_scope()
    assert not held.is_under_way


def test_a_backward_that_comes_again_accumulates_after_it(device):
    def run(handle, net, x):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
        next(net.parameters()).register_hook(lambda grad: grad)  # autograd accumulates it
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        Gate(handle).open()
        with handle.steps.overlapping(optimizer, lambda: True, in_backward=False):
            optimizer.step()
        loss.backward()
        return [p.data.clone() for p in net.parameters()]

    weight = torch.ones(4, 4)
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    net[0].weight.data.copy_(weight)
    x = torch.arange(8.0).view(2, 4)
    with sp_lightning.stream(net, device) as handle:
        (seen,) = run(handle, net, x.to(device))
    grad = 2 * (x @ weight.T).T @ x
    assert handle.stats()["held_steps"] == 1
    assert_equal(seen, weight - 0.1 * grad)


def test_a_backward_beside_which_units_are_stepped_begins_when_the_step_before_is_done(device):
    net = nn.Linear(4, 4, bias=False)
    net.weight.data.fill_(1.0)
    x = torch.arange(8.0).view(2, 4)
    grad = 2 * (x @ torch.ones(4, 4)).T @ x
    with sp_lightning.stream(net, device) as handle:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125, foreach=False)
        loss = net(x.to(device)).square().sum()
        loss.backward(retain_graph=True)
        Gate(handle).open()
        with handle.steps.overlapping(optimizer, lambda: True, in_backward=False):
            optimizer.step()
        with handle.steps.overlapping(optimizer):
            loss.backward()
            optimizer.step()
        assert handle.stats()["held_steps"] == 1
    assert_equal(net.weight.data, 1 - 0.125 * grad - 0.125 * 2 * grad)


def test_a_backward_that_comes_past_a_unit_accumulates_after_its_step():
    """The graph leads to the weight by a read between steps, and through another unit, which runs first."""

    def run(net, overlapping):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
        x = next(inputs(torch.device("cpu")))
        squares(net, x).backward()
        read = net.blocks[3].up.weight.sum()
        loss = net.stem(x).sum() + read
        with overlapping(optimizer):
            optimizer.step()
        loss.backward()
        return [p.detach().clone() for p in net.parameters()], [p.grad.clone() for p in net.parameters()]

    def held(optimizer):
        Gate(handle).open()
        return handle.steps.overlapping(optimizer, lambda: True, in_backward=False)

    torch.manual_seed(0)
    net = blocks()
    expected = run(copy.deepcopy(net), contextlib.nullcontext)
    with sp_lightning.stream(net, "cpu") as handle:
        assert_equal(run(net, held), expected)
        assert handle.stats()["held_steps"] == 1


def test_a_step_waits_for_the_one_before(hold):
    held, (net, optimizer) = hold(), plain()
    optimizer.step()
    with held.handle.steps.overlapping(held.optimizer, lambda: True, in_backward=False):
        held.optimizer.step()
    assert_equal(held.net.state_dict(), net.state_dict())


def test_a_recording_ends_with_the_step(hold):
    held = hold(before=lambda net, optimizer: None)
    held.handle.record()
    held.handle.stop_recording()
    assert not held.is_under_way


UNSEEN = {
    "torch.tensor": torch.tensor,
    "torch.as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor) + 0,
    "outside of function dispatch": undispatched,
    "a scripted function": torch.jit.script(torch.nn.functional.relu),
    "dlpack": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("way", UNSEEN)
@pytest.mark.few(4)
def test_what_can_not_be_made_wait_is_an_error_that_names_the_weight(way, hold):
    held = hold(opens_after=30)
    with pytest.raises(RuntimeError, match="is being stepped by the optimizer"):
        UNSEEN[way](held.net.head.weight)
    held.gate.event.set()
    UNSEEN[way](held.net.head.weight.detach())


def test_what_only_tells_about_a_weight_does_not_wait(hold):
    held = hold(opens_after=30)
    told = [(p.shape, p.stride(), p.requires_grad, p.is_leaf, p.numel(), p.dtype) for p in held.net.parameters()]
    assert held.is_under_way and told == [
        (p.shape, p.stride(), p.requires_grad, p.is_leaf, p.numel(), p.dtype) for p in plain()[0].parameters()
    ]
    held.gate.event.set()


@pytest.mark.few(1)
def test_a_child_process_does_not_wait_for_a_thread_that_it_does_not_have(hold):
    held, expected = hold(), plain()[0].head.weight.sum().item()
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(held.net.head.weight.sum().item() != expected)
    assert os.waitpid(child, 0)[1] == 0


# --- What somebody else refers to is not held


def keep_a_view(net, optimizer):
    return net.head.weight.detach()


def keep_numbers(net, optimizer):
    return net.head.weight.detach().numpy()


def keep_a_view_of_a_view(net, optimizer):
    return net.blocks[0].up.weight[0]


def keep_the_state(net, optimizer):
    return optimizer.state


def keep_the_state_of_a_weight(net, optimizer):
    return optimizer.state[net.head.weight]


def keep_a_tensor_of_the_state(net, optimizer):
    return optimizer.state[net.head.weight]["exp_avg"]


def keep_a_view_of_the_state(net, optimizer):
    return optimizer.state[net.head.weight]["exp_avg"].numpy()


def keep_the_state_weakly(net, optimizer):
    return weakref.ref(optimizer.state[net.head.weight]["exp_avg"])


def keep_a_gradient(net, optimizer):
    return net.head.weight.grad


def keep_a_view_of_a_gradient(net, optimizer):
    return net.head.weight.grad[0]


KEPT = [keep_a_view, keep_numbers, keep_a_view_of_a_view, keep_the_state, keep_the_state_of_a_weight]
KEPT += [keep_a_tensor_of_the_state, keep_a_view_of_the_state, keep_the_state_weakly]
KEPT += [keep_a_gradient, keep_a_view_of_a_gradient]


def test_a_step_is_held_where_nobody_keeps_anything(hold):
    assert hold().handle.stats()["held_steps"] == 1


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.few(3)
def test_what_somebody_refers_to_is_stepped_at_once_and_that_is_said(keep, hold, caplog):
    kept = []
    with caplog.at_level(logging.INFO, "sp_lightning"), pytest.raises(AssertionError):
        hold(before=lambda net, optimizer: kept.append(keep(net, optimizer)))
    assert kept and sum("somebody else refers to" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("hold", [Held.after_backward], indirect=True)  # beside backward it comes too late: an error
def test_a_step_is_not_held_whose_gradient_is_over_an_array(hold, caplog):
    def receive(net, optimizer):
        weight = net.blocks[0].up.weight
        weight.grad = torch.from_numpy(weight.grad.numpy().copy())  # the array may be written by whoever has it

    with caplog.at_level(logging.INFO, "sp_lightning"), pytest.raises(AssertionError):
        hold(before=receive)
    assert "somebody else refers to the gradient of blocks.0.up.weight" in caplog.text


class Scale(nn.Parameter):
    """A class of the user's."""


def test_a_weight_of_a_class_of_its_own_is_stepped_at_once(device, caplog):
    net = blocks()
    net.head.weight = Scale(net.head.weight.detach())
    with caplog.at_level(logging.INFO, "sp_lightning"), sp_lightning.stream(net, device) as handle:
        optimizer, x = adamw(net), next(inputs(device))
        for _ in range(2):
            with handle.steps.overlapping(optimizer, lambda: True, in_backward=False):
                step(net, optimizer, x)
    assert handle.stats()["held_steps"] == 0 and "head.weight is of a class of its own, Scale" in caplog.text


def test_steps_are_held_while_compiled_code_for_their_options_is_yet_to_be_compared(device, monkeypatch):
    """A schedule that changes betas, as OneCycleLR does, asks for other options in each step."""
    goes_on = threading.Event()

    def compiled():
        assert goes_on.wait(60)
        raise Unavailable("there is no compiler")

    monkeypatch.setattr(native, "LIBRARY", native.Library())
    monkeypatch.setattr(native, "FEWEST", 0)
    monkeypatch.setattr(native, "compiled", compiled)
    net = blocks()
    with sp_lightning.stream(net, device) as handle:
        optimizer, x = adamw(net), next(inputs(device))
        for number in range(5):
            optimizer.param_groups[0]["betas"] = (0.9 - number / 100, 0.99)
            step(net, optimizer, x)
        assert handle.stats()["held_steps"] == 4
        assert len(native.LIBRARY._asked) > 0
        goes_on.set()
    native.LIBRARY.wait()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_weight_that_the_optimizer_has_twice_is_stepped_twice_at_once(device, caplog):
    def twice(net):
        return torch.optim.AdamW([*net.parameters(), net.head.weight], 0.01)

    torch.manual_seed(0)
    net = blocks()
    with caplog.at_level(logging.INFO, "sp_lightning"), sp_lightning.stream(net, device) as handle:
        optimizer, x = twice(net), next(inputs(device))
        for _ in range(3):
            with handle.steps.overlapping(optimizer, lambda: True, in_backward=False):
                step(net, optimizer, x)
        assert handle.stats()["held_steps"] == 0 and "the optimizer has head.weight twice" in caplog.text
    other, its_optimizer = plain(twice, 3)
    assert_equal(net.state_dict(), other.state_dict())
    assert_equal(list(optimizer.state.values()), list(its_optimizer.state.values()))


@pytest.mark.parametrize("make_optimizer", [adamw, lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)])
def test_a_step_that_makes_state_is_not_held(make_optimizer, hold):
    with pytest.raises(AssertionError):
        hold(make_optimizer, steps=1)


def test_a_weight_that_is_not_the_modules_is_stepped_at_once(hold):
    other = nn.Parameter(torch.ones(3))
    held = hold(
        lambda net: torch.optim.SGD([*net.parameters(), other], lr=1.0, foreach=False),
        before=lambda *_: setattr(other, "grad", torch.ones(3)),
        opens_after=30,
    )
    assert held.is_under_way and torch.equal(other.detach(), torch.zeros(3))
    held.gate.event.set()


def test_frozen_units_stay_on_the_device_past_a_deferred_step(device):
    """As they do past one that is not deferred: the step writes none of their bytes."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
    net[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW(net[4:].parameters())
    with sp_lightning.stream(net, device, window=6, units=["Sequential"]) as handle:
        for _ in range(3):
            before = handle.stats()
            optimizer.zero_grad()
            net(torch.ones(3, 8, device=device)).square().mean().backward()
            optimizer.step()
        after = handle.stats()
        assert after["held_steps"] == before["held_steps"] + 1
        assert after["fetches"] - before["fetches"] == 2


# --- Endings


def test_what_is_done_leaves_nothing_behind(hold):
    held = hold()
    held.net.head.weight.sum()
    held.optimizer.zero_grad(set_to_none=False)  # which waits
    assert not held.is_under_way and "state" in vars(held.optimizer)
    assert not hasattr(Optimizer, "__getattr__")
    held.handle.close()
    assert_plain(held.net)
    assert_equal(held.net.state_dict(), plain()[0].state_dict())


def test_an_unknown_attribute_of_an_optimizer_is_unknown_as_ever(hold):
    held = hold(opens_after=30)
    with pytest.raises(AttributeError, match="'AdamW' object has no attribute 'foo'"):
        held.optimizer.foo  # noqa: B018
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'state_of'"):
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).state_of  # noqa: B018
    assert held.is_under_way
    held.gate.event.set()


def adam_function():
    adam = importlib.import_module("torch.optim.adam")
    return adam, "adam"


@pytest.mark.parametrize("look", ["a weight", "the state", "close", "a forward"])
def test_an_error_of_the_thread_is_raised_once_by_who_waits_first(look, hold, monkeypatch, caplog):
    held = hold(opens_after=30)
    module, name = adam_function()
    monkeypatch.setattr(module, name, failing(getattr(module, name), after=2))
    held.gate.event.set()
    with pytest.raises(ValueError, match="the optimizer failed"):
        {
            "a weight": lambda: held.net.blocks[1].up.weight.sum(),
            "the state": lambda: held.optimizer.state,
            "close": held.handle.close,
            "a forward": lambda: held.net(next(inputs(held.handle.device.torch_device))),
        }[look]()
    assert "had already stepped" in caplog.text and "of 28 parameters" in caplog.text
    assert all(p.isfinite().all() for p in held.net.parameters())
    with pytest.raises(TornStepError, match=r"AdamW had stepped \d+ of 28 parameters when a ValueError ended its step"):
        held.optimizer.step()
    held.handle.close()
    assert_plain(held.net)


def failing(function, after):
    calls = []

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) > after:
            raise ValueError("the optimizer failed")
        return function(*args, **kwargs)

    return fails


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_that_other_code_has_wrapped_is_deferred_as_ever(wrapped, device, monkeypatch):
    adamw(blocks())  # so that torch calls hooks in this class's step
    original = torch.optim.AdamW.step

    @functools.wraps(original)
    def timed(*args, **kwargs):
        return original(*args, **kwargs)

    if wrapped:
        monkeypatch.setattr(torch.optim.AdamW, "step", timed)

    def run(net, device):
        optimizer = adamw(net)
        for x in inputs(device):
            step(net, optimizer, x)
            yield net(x)

    assert check(blocks, run, device)["held_steps"] == 2


@pytest.mark.few(1)
def test_a_wait_that_was_interrupted_is_taken_up_again(hold):
    held = hold(opens_after=0.6)
    main = threading.main_thread().ident
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        held.net.head.weight.sum()
    assert held.is_under_way
    assert_equal(held.net.head.weight.data, plain()[0].head.weight.data)


OF_DEFERRING = (PendingStep._defer, PendingStep._enqueue, PendingStep._submit, HostThread.submit)


@contextlib.contextmanager
def interrupted_at(place):
    """A signal's handler raises, as it seems, behind one of the calls by the code that defers a step."""
    places, codes = itertools.count(), {function.__code__ for function in OF_DEFERRING}

    def interrupt(frame, event, _):
        caller = frame if event == "c_return" else frame.f_back if event == "return" else None
        if caller is not None and caller.f_code in codes and next(places) == place:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_weights_and_state_are_there_wherever_deferring_a_step_is_interrupted(device, monkeypatch):
    setter = pending_step.set_true_data
    monkeypatch.setattr(pending_step, "set_true_data", lambda *args: setter(*args))  # a function whose end is seen
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    with sp_lightning.stream(net, device, window=1, units="Linear") as handle:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, foreach=False)

        def backward():
            optimizer.zero_grad()
            net(torch.ones(2, 3, device=device)).square().sum().backward()

        def found():
            weights = [parameter.detach().clone() for parameter in net.parameters()]
            buffers = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in net.parameters()]
            return [*zip(weights, buffers, strict=True)]

        backward(), optimizer.step()
        was_interrupted, place = True, 0
        while was_interrupted:
            backward()
            before, grads, was_interrupted = found(), [parameter.grad.clone() for parameter in net.parameters()], False
            try:
                with interrupted_at(place):
                    optimizer.step()
            except KeyboardInterrupt:
                was_interrupted, place = True, place + 1
            is_deferred = handle.stats()["pending_step"] == "deferred"
            for (data, buffer), (old, old_buffer), grad in zip(found(), before, grads, strict=True):
                new_buffer = (old_buffer * 0.9).add_(grad)
                stepped = data.equal(old.add(new_buffer, alpha=-0.001)) and buffer.equal(new_buffer)
                assert stepped or (was_interrupted and data.equal(old) and buffer.equal(old_buffer)), place
            handle.finish_step()
            assert handle.stats()["pending_step"] is None and not weight_reads.deferred
        assert is_deferred and place > 50


def test_several_threads_wait(hold):
    held, seen = hold(), []
    threads = [threading.Thread(target=lambda: seen.append(held.net.head.weight.data.clone())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(seen, [plain()[0].head.weight.data] * 4)


# --- It overlaps


def test_the_first_unit_is_computed_before_the_last_one_is_stepped(device, monkeypatch):
    """The step of the last unit waits until a later unit's forward has begun: without overlap it would never do so."""
    module, name = adam_function()
    adam, computed, stepped = getattr(module, name), threading.Event(), []

    def waits(params, *args, **kwargs):
        if params:  # there is nothing left for the optimizer's own step
            stepped.append(computed.wait(20) if len(stepped) == 4 else None)  # units: the root, four blocks
        return adam(params, *args, **kwargs)

    torch.manual_seed(0)
    net = blocks()
    with sp_lightning.stream(net, device, window=2) as handle:
        optimizer, x = adamw(net), next(inputs(device))
        step(net, optimizer, x)
        optimizer.zero_grad()
        squares(net, x).backward()
        monkeypatch.setattr(module, name, waits)
        with handle.steps.overlapping(optimizer, lambda: True, in_backward=False):
            optimizer.step()
        net.blocks[1].register_forward_hook(lambda *_: computed.set())
        handle.open_scope("train")
        net.forward(x)
        handle.close_scope()
    assert stepped == [None] * 4 + [True]


# --- Under Lightning


class Net(L.LightningModule):
    """Remembers what it met."""

    def __init__(self, make_optimizer=adamw):
        super().__init__()
        self.net = blocks()
        self.make_optimizer = make_optimizer

    def training_step(self, batch, batch_idx):
        loss = squares(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.make_optimizer(self)


def groups_with_a_scheduler(net):
    first, *rest = net.parameters()
    optimizer = torch.optim.AdamW(
        [{"params": [first], "lr": 0.1}, {"params": rest, "betas": (0.5, 0.9)}], foreach=False
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def tensor_rate(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.05), foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=False)


def several(net):
    return torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True, foreach=True)


CLIP = {"gradient_clip_val": 0.05}
SETTINGS = [
    (adamw, {}, 2),
    (momentum, {}, 2),
    (several, {}, 2),
    (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), {}, 3),  # has no state to be made
    (adamw, {"accumulate_grad_batches": 3, "max_steps": 4, "max_epochs": 4}, 1),
    (groups_with_a_scheduler, {}, 2),
    (tensor_rate, {}, 2),
    (adamw, {"precision": "bf16-mixed"}, 2),
]


@pytest.fixture(params=["after backward", "beside backward"])
def clip(request, monkeypatch):
    """Settings of a Trainer whose steps wait for all gradients, or begin beside backward and are not done then."""
    if request.param == "after backward":
        return CLIP
    step_next = PendingStep._step_next

    def is_waited_for(step):
        """Whether the step leaves what is queued, or is waited for where it leaves nothing."""
        leaves = step._queue and not step._deferred and step._may_defer()
        free = step._waiting.acquire(blocking=False)
        if free:
            step._waiting.release()
        return step._leaving or not (free or leaves)

    def step_one(step):
        step_next(step)
        begin = time.monotonic()
        while not step._deferred and not is_waited_for(step) and time.monotonic() < begin + 10:
            time.sleep(0.001)
        time.sleep(0.05 if step._deferred else 0)

    monkeypatch.setattr(PendingStep, "_step_next", step_one)
    return {}


def compare_fits(device, make=Net, options=None, **settings):
    """A plain fit and a streaming one; gives the latter's figures."""
    expected = fit(make, None, device, **settings)
    strategy = sp_lightning.SuperpipelineStrategy(device=device, **{"window": 2, **(options or {})})
    actual = fit(make, strategy, device, **settings)
    assert actual.losses == expected.losses
    assert_equal(actual.state_dict(), expected.state_dict())
    one, other = (module.trainer.optimizers[0] for module in (actual, expected))
    assert_equal(list(one.state.values()), list(other.state.values()))
    assert [p.grad is None for p in actual.parameters()] == [p.grad is None for p in expected.parameters()]
    return strategy.handle.stats()


@pytest.mark.parametrize("make_optimizer, settings, held", SETTINGS)
@pytest.mark.few(1)
def test_the_bits_are_the_plain_runs(make_optimizer, settings, held, device, clip):
    stats = compare_fits(device, functools.partial(Net, make_optimizer), **settings, **clip)
    assert stats["held_steps"] == held and (stats["stepped_ahead"] > 0) is not bool(clip)


@pytest.mark.few(1)
def test_the_bits_are_the_plain_runs_with_gradients_clipped_by_value(device):
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    assert compare_fits(device, **clip)["held_steps"] == 2


@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.few(1)
def test_the_bits_are_the_plain_runs_whatever_happens_to_activations(activations, device, clip):
    assert compare_fits(device, options={"activations": activations, "window": 1}, **clip)["held_steps"] == 2


class FromTheDevice(Net):
    """Its gradients are made on the device, and nobody waits for their way down."""

    def on_after_backward(self):
        simgpu = importlib.import_module("simgpu")
        simgpu.config.d2h_us = 20_000
        for p in self.parameters():
            p.grad.copy_(torch.full_like(p, 0.25, device=self.device), non_blocking=True)
        simgpu.config.d2h_us = 0


@pytest.mark.simgpu
@pytest.mark.seldom
def test_it_begins_when_gradients_are_there_that_nobody_waited_for():
    assert compare_fits(torch.device("simgpu", 0), FromTheDevice)["held_steps"] == 2


def bare_sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)


class ReadsOne(Net):
    """A weight in the third step: from then on it travels as it is."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            with torch.no_grad():
                self.losses.append(self.net.blocks[1].up.weight.norm().item())
        return super().training_step(batch, batch_idx)


@pytest.mark.few(1)
def test_the_very_first_step_may_be_held_when_weights_begin_to_travel_in_half(clip, device, monkeypatch):
    """As an optimizer without state makes none."""
    quick = Device.slab

    def slow(self, nbytes):
        time.sleep(0.02)
        return quick(self, nbytes)

    monkeypatch.setattr(Device, "slab", slow)
    stats = compare_fits(device, lambda: Net(bare_sgd), precision="bf16-mixed", **clip)
    assert stats["held_steps"] >= 2


@pytest.mark.few(1)
def test_types_of_a_weight_change_after_the_step_that_is_held(clip, device, monkeypatch):
    """Whose thread is in the middle of the unit's conversion when they are to change."""
    midway, changed, retype, fill = threading.Event(), threading.Event(), Window.retype, host_copy.fill_wire

    def change(self, unit, types):
        if unit.store.unit.name == "net.blocks.1" and unit.store.narrow:
            midway.wait(0.5)
        retype(self, unit, types)
        changed.set()

    def fill_until_then(weights, data, remembered, done):
        first = 0
        if weights[0].host.name.startswith("net.blocks.1.") and HostThread.is_current():
            first = 1
            fill(weights[:first], data[:first], remembered, done)
            changed.clear()
            midway.set()
            changed.wait(0.5)
            midway.clear()
        fill(weights[first:], data[first:], *([index - first for index in of] for of in (remembered, done)))

    monkeypatch.setattr(Window, "retype", change)
    monkeypatch.setattr(host_copy, "fill_wire", fill_until_then)
    stats = compare_fits(device, ReadsOne, precision="bf16-mixed", **clip, max_epochs=2)
    assert stats["held_steps"] >= 2


class Overflows(Net):
    """The third batch's scaled gradients are infinite."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())
        return loss * 1e36 if batch_idx == 2 else loss


@pytest.mark.simgpu
@pytest.mark.parametrize("clip", [{}, CLIP])
@pytest.mark.few(1)
def test_the_bits_are_the_plain_runs_with_a_scaler_that_skips_a_step(clip):
    device, loader = torch.device("simgpu", 0), {"max_epochs": 2, "max_steps": 8}
    assert compare_fits(device, Overflows, precision="16-mixed", **clip, **loader)["held_steps"] >= 1


class UnscalesByItself(Net):
    """Its optimizer does, by a factor that grows after each step."""

    def on_fit_start(self):
        self.trainer.precision_plugin.scaler.set_growth_interval(1)


@pytest.mark.simgpu
def test_a_step_that_is_held_unscales_by_the_factor_that_was_there_when_it_began():
    make = functools.partial(UnscalesByItself, lambda net: torch.optim.AdamW(net.parameters(), lr=0.05, fused=True))
    settings = {"precision": "16-mixed", "max_epochs": 2, "max_steps": 8}
    assert compare_fits(torch.device("simgpu", 0), make, **settings)["held_steps"] >= 1


class LooksAtTheEnd(Net):
    """Of each batch, and at its begin."""

    def on_train_batch_end(self, *_):
        self.losses.append([p.sum().item() for p in self.parameters()])


class ActsBetweenSteps(Net):
    """In each hook between a step and the next forward, in one of these ways."""

    ways = {
        "copies": lambda module: copy.deepcopy(module.net).state_dict(),
        "saves": lambda module: torch.save(module.state_dict(), io.BytesIO()),
        "clamps": lambda module: [p.data.clamp_(-0.3, 0.3) for p in module.net.parameters()],
        "scales under no_grad": lambda module: [p.mul_(0.9) for p in module.net.head.parameters()],
        "measures all at once": lambda module: torch._foreach_norm(list(module.net.parameters())),
        "lines up": lambda module: nn.utils.parameters_to_vector(module.net.parameters()),
        "reads as arrays": lambda module: [p.detach().cpu().numpy().sum() for p in module.net.parameters()],
        "reads gradients": lambda module: [p.grad.sum().item() for p in module.net.parameters() if p.grad is not None],
        "computes": lambda module: (
            module.net(module.trainer.strategy.batch_to_device(models.vectors(3)[0])).sum().item()
        ),
        "sets the rate": lambda module: module.trainer.optimizers[0].param_groups[0].update(lr=0.01),
        "freezes": lambda module: module.net.blocks[1].requires_grad_(module.trainer.global_step % 2 == 0),
    }

    def __init__(self, way):
        super().__init__()
        self.way = way

    def act(self):
        with torch.no_grad():
            self.losses.append(plain_numbers(self.ways[self.way](self)))

    def on_train_batch_end(self, *_):
        self.act()

    def on_train_batch_start(self, *_):
        self.act()


def plain_numbers(found):
    """Keep of a result what can be compared."""
    if isinstance(found, torch.Tensor):
        return found.detach().cpu().tolist()
    if isinstance(found, dict):
        return {name: plain_numbers(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [plain_numbers(value) for value in found]
    return found if isinstance(found, float) else None


@pytest.mark.parametrize("way", ActsBetweenSteps.ways)
@pytest.mark.few(1)
def test_who_acts_between_steps_does_as_in_a_plain_fit(way, device, clip):
    compare_fits(device, functools.partial(ActsBetweenSteps, way), **clip)


class LooksWhereThereIsNoHook(Net):
    """A scheduler's step is asked for by nearly everybody, and looks at no weights; this one does."""

    def lr_scheduler_step(self, scheduler, metric):
        super().lr_scheduler_step(scheduler, metric)
        self.losses.append([p.sum().item() for p in self.parameters()])
        self.losses.append([state["exp_avg"].sum().item() for state in self.trainer.optimizers[0].state.values()])


class LooksInTheStep(Net):
    """By reads that go through visits, and by one on the host."""

    def training_step(self, batch, batch_idx):
        self.losses.append(sum(p.square().sum() for p in self.net.blocks[2].parameters()).item())
        self.losses.append(self.net.head.bias.tolist())
        return super().training_step(batch, batch_idx)


class KeepsTheState(Net):
    """And looks at it in each step."""

    def training_step(self, batch, batch_idx):
        optimizer = self.trainer.optimizers[0]
        self.state = self.state if hasattr(self, "state") else optimizer.state
        self.losses.append([state["exp_avg"].sum().item() for state in self.state.values()])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "kind, held", [(LooksAtTheEnd, 2), (LooksWhereThereIsNoHook, 2), (LooksInTheStep, 2), (KeepsTheState, 0)]
)
@pytest.mark.few(1)
def test_who_looks_during_a_fit_sees_what_is_seen_in_a_plain_one(kind, held, device, clip):
    stats = compare_fits(device, functools.partial(kind, groups_with_a_scheduler), **clip)
    assert stats["held_steps"] == held


class GoesBackInTheStep(Net):
    """For the gradient of an input, as adversarial training does; that of the weights is left behind."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        squares(self.net, x).backward()
        return super().training_step((batch[0] + x.grad.sign() * 0.1, batch[1]), batch_idx)


@pytest.mark.parametrize("accumulate, held", [(1, 2), (3, 1)])
@pytest.mark.few(1)
def test_a_backward_inside_the_training_step_steps_nothing(accumulate, held, device, clip):
    settings = {"accumulate_grad_batches": accumulate, "max_epochs": 4, **clip}
    assert compare_fits(device, GoesBackInTheStep, **settings)["held_steps"] == held


@pytest.mark.few(1)
def test_an_average_of_the_weights_is_that_of_a_plain_fit(device, clip):
    def settings():
        return {"callbacks": [L.pytorch.callbacks.EMAWeightAveraging(decay=0.5)], **clip}

    expected = fit(Net, None, device, **settings())
    strategy = sp_lightning.SuperpipelineStrategy(window=2, device=device)
    streamed = fit(Net, strategy, device, **settings())
    assert_equal(streamed.state_dict(), expected.state_dict())
    assert streamed.trainer.strategy.handle.stats()["held_steps"] == 2


class Validated(Net):
    """Looks at its weights in validation."""

    def validation_step(self, batch, batch_idx):
        self.losses.append(squares(self.net, batch[0]).item())

    def val_dataloader(self):
        return torch.utils.data.DataLoader([models.vectors(9)], batch_size=None)


@pytest.mark.parametrize("interval, held", [(2, 1), (1, 0)])
@pytest.mark.few(1)
def test_validation_in_the_middle_sees_finished_weights(interval, held, device, clip):
    assert compare_fits(device, Validated, val_check_interval=interval, **clip)["held_steps"] == held


@pytest.mark.few(1)
def test_checkpoints_of_every_batch_are_those_of_a_plain_fit_and_resume(device, clip, tmp_path):
    def settings(name):
        every = {"every_n_train_steps": 1, "save_top_k": -1}
        checkpoints = L.pytorch.callbacks.ModelCheckpoint(tmp_path / name, "{step}", **every)
        return {"callbacks": [checkpoints], "enable_checkpointing": True, **clip}

    def streaming():
        return sp_lightning.SuperpipelineStrategy(window=2, device=device)

    fit(Net, None, device, **settings("plain"))
    streamed = fit(Net, streaming(), device, **settings("held"))
    assert streamed.trainer.strategy.handle.stats()["held_steps"] == 2
    for number in range(1, 5):
        one, other = (torch.load(tmp_path / name / f"step={number}.ckpt") for name in ("held", "plain"))
        for key in ("state_dict", "optimizer_states"):
            assert_equal(one[key], other[key])
    resumed = [
        fit(Net, strategy, device, tmp_path / "held" / "step=2.ckpt", **clip) for strategy in (streaming(), None)
    ]
    assert_equal(*(module.state_dict() for module in resumed))


@pytest.mark.few(1)
def test_two_modules_do_not_mix(hold):
    one, other = hold(), hold(steps=3)
    assert_equal(other.net.state_dict(), plain(steps=3)[0].state_dict())
    assert_equal(one.net.state_dict(), plain()[0].state_dict())


def test_another_streamed_module_keeps_no_step_from_being_deferred(device):
    def steps(net, other):
        optimizer = adamw(net)
        for x in inputs(device):
            squares(net, x).add(squares(other, x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    nets = blocks(), blocks()
    expected = steps(*(copy.deepcopy(net).to(device) for net in nets))
    with sp_lightning.stream(nets[0], device, window=1) as one, sp_lightning.stream(nets[1], device, window=1) as other:
        steps(*nets)
        assert (one.stats()["held_steps"], other.stats()["held_steps"]) == (2, 0)  # the first makes the state
    assert_equal(nets[0].state_dict(), expected)


def test_an_optimizer_of_two_streamed_modules_steps_as_a_whole(device):
    def steps(one, other):
        optimizer = adamw(nn.ModuleList([one, other]))
        for x in inputs(device):
            squares(one, x).add(squares(other, x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return one.state_dict(), other.state_dict()

    nets = blocks(), blocks()
    expected = steps(*(copy.deepcopy(net).to(device) for net in nets))
    with sp_lightning.stream(nets[0], device, window=1) as one, sp_lightning.stream(nets[1], device, window=1) as other:
        steps(*nets)
        assert (one.stats()["held_steps"], other.stats()["held_steps"]) == (0, 0)
    assert_equal([net.state_dict() for net in nets], expected)


class Fails(Net):
    """In its third batch, beside a step that still runs."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ValueError("this batch")
        return super().training_step(batch, batch_idx)


@pytest.mark.few(1)
def test_a_fit_that_fails_leaves_finished_weights(device, clip):
    def weights(strategy):
        failed = []
        with pytest.raises(ValueError, match="this batch"):
            fit(lambda: failed.append(Fails()) or failed[0], strategy, device, **clip)
        return failed[0].state_dict()

    assert_equal(weights(sp_lightning.SuperpipelineStrategy(window=2, device=device)), weights(None))


def test_why_a_step_is_not_held_is_said_once(clip, caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        fit(KeepsTheState, sp_lightning.SuperpipelineStrategy(window=2), torch.device("cpu"), **clip)
    reason = "somebody else refers to the optimizer's state"
    said = f"the next forward waits for the whole step of the optimizer, as {reason}"
    assert sum(said in record.getMessage() for record in caplog.records) == 1


def test_what_is_held_is_what_was_not_stepped_beside_backward(hold, request):
    stats = hold().handle.stats()
    beside = request.node.callspec.params["hold"] is Held.beside_backward
    ahead = 2 * 6 if beside else 0  # the parameters of two blocks
    assert (stats["held_steps"], stats["stepped_ahead"]) == (1, ahead)


def test_switched_off_nothing_is_held(device, clip):
    assert compare_fits(device, options={"optimizer_overlap": False}, **clip)["held_steps"] == 0
