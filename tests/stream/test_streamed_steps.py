"""Optimizers, their state, steps that fail and steps beside backward: the plain run's bits, or a typed error."""

import collections
import contextlib
import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from stream_programs import PLACES, Block, Net, cases, check, collected, streamed

from sp_lightning.errors import HalfAppliedStepError
from sp_lightning.optim.slices import SlicedOptimizer
from sp_lightning.optim.steps import Steps
from sp_lightning.stream.host_gradient import GradientBytes
from sp_lightning.stream.unit import Unit

PROGRAMS = []
program = collected(PROGRAMS)


@program()
def hooks_before_a_step_clip_schedule_and_refuse(run, model):
    optimizer, count = run.adamw(model.parameters()), []

    def before(optimizer, args, kwargs):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] *= 0.5
        count.append(len(count))
        if len(count) == 3:
            raise ValueError("on purpose")

    optimizer.register_step_pre_hook(before)

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        with contextlib.suppress(ValueError):
            optimizer.step()
        optimizer.zero_grad()
        return loss

    return [*run.loop(model, step, optimizer, 5), *count]


class GlobalNorm(torch.optim.AdamW):
    """An optimizer that looks at all gradients at once."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        norm = torch.sqrt(sum(grad.square().sum() for grad in grads))
        for grad in grads:
            grad.div_(norm.clamp(min=1.0))
        return super().step(closure)


@program()
def an_optimizer_that_looks_at_all_gradients(run, model):
    return run.loop(model, optimizer=run.noted(GlobalNorm(model.parameters(), 1e-2, fused=True)))


@program()
def an_optimizer_per_weight_in_a_hook(run, model):
    optimizers = {param: torch.optim.SGD([param], 0.1, fused=True) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    hooks, seen = [param.register_post_accumulate_grad_hook(step) for param in model.parameters()], []
    for i in range(4):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        seen.append(loss.detach().clone())
    for hook in hooks:
        hook.remove()
    return seen


@program()
def two_optimizers_over_the_same_weights(run, model):
    one = run.adamw(model.parameters())
    other = run.noted(torch.optim.SGD(model.parameters(), 1e-3, fused=True))

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        one.step()
        other.step()
        one.zero_grad()
        return loss

    return run.loop(model, step, one)


@program()
def optimizers_made_anew(run, model):
    seen = []
    for i in range(6):
        sgd = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
        seen.append(run.step(model, sgd if i % 2 else torch.optim.AdamW(model.parameters(), 1e-2, fused=True), i))
    return seen


@program()
def an_error_in_the_options_of_a_step(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        betas = optimizer.param_groups[0]["betas"]
        if i == 1:
            optimizer.param_groups[0]["betas"] = None
        with contextlib.suppress(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = betas
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@pytest.mark.parametrize("device, window", PLACES)
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
def test_steps_are_those_of_the_plain_run(program, policy, window, device):
    check(program, device, policy, window)


# ---- steps that fail


def failed_after_one_unit(monkeypatch, model, optimizer):
    """Have a step end after its first unit."""
    from sp_lightning.optim.slices import SlicedOptimizer

    whole, count = SlicedOptimizer.step, []

    def step(self, *args):
        count.append(1)
        if len(count) == 2:
            raise MemoryError("on purpose")
        whole(self, *args)

    monkeypatch.setattr(SlicedOptimizer, "step", step)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(MemoryError):
        model(torch.ones(4, 8))
    monkeypatch.setattr(SlicedOptimizer, "step", whole)


def test_a_step_failed_midway_is_neither_stepped_on_nor_saved(monkeypatch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu"):
        failed_after_one_unit(monkeypatch, model, optimizer)
        with pytest.raises(HalfAppliedStepError, match=r"half-way, at blocks\.0, by MemoryError"):
            optimizer.step()
        with pytest.raises(HalfAppliedStepError, match="Load the last checkpoint"):
            optimizer.state_dict()


def test_loading_both_weights_and_state_ends_a_half_applied_step(monkeypatch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, weights = (copy.deepcopy(one.state_dict()) for one in (optimizer, model))
    with streamed(model, "cpu"):
        failed_after_one_unit(monkeypatch, model, optimizer)
        optimizer.load_state_dict(state)
        with pytest.raises(HalfAppliedStepError):
            optimizer.step()
        model.load_state_dict(weights)
        optimizer.step()


def test_a_step_that_raises_leaves_gradients_in_place():
    model, other = Net(), torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), other], 0.1, foreach=False)
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        other.grad = torch.ones(3, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="integral input tensors"):
            optimizer.step()  # which cannot add half numbers to whole ones
        assert all(param.grad is not None for param in model.parameters())


def test_an_interrupt_between_units_is_a_step_half_applied(monkeypatch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu") as handle:
        model(torch.ones(4, 8)).sum().backward()
        dropped = []

        def drop(unit):
            dropped.append(unit)
            if len(dropped) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(handle.window, "drop", drop)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        monkeypatch.undo()
        with pytest.raises(HalfAppliedStepError, match="half-way"):
            optimizer.step()


# ---- what is left behind


def test_an_optimizer_that_is_dropped_is_freed():
    model = Net()
    with streamed(model, "cpu"):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        model(torch.ones(4, 8))
        dropped = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert dropped() is None


@pytest.mark.simgpu
def test_state_is_on_the_host_after_close():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with streamed(model, "simgpu"):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        optimizer.step()
        assert optimizer.state[model.emb.weight]["exp_avg"].device.type == "simgpu"
    assert type(optimizer.state) is collections.defaultdict
    assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"cpu"}


class Boom(Block):
    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupt_leaves_a_plain_module():
    model = Net(Boom)
    with contextlib.suppress(KeyboardInterrupt), streamed(model, "cpu"):
        model(torch.ones(4, 8))
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())


# ---- who waits


READS = {
    "iterated": lambda state, weight: list(state) and dict.get(state, weight)["step"].item(),
    "counted": lambda state, weight: len(state) and dict.get(state, weight)["step"].item(),
    "asked": lambda state, weight: weight in state and dict.get(state, weight)["step"].item(),
    "got": lambda state, weight: state.get(weight)["step"].item(),
    "updated": lambda state, weight: state.update({}) or dict.get(state, weight)["step"].item(),
    "reversed": lambda state, weight: list(reversed(state)) and dict.get(state, weight)["step"].item(),
    "printed": lambda state, weight: "step" in repr(state) and dict.get(state, weight)["step"].item(),
    "compared": lambda state, weight: state != {} and dict.get(state, weight)["step"].item(),
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_state_waits_for_the_pending_step(read):
    model = Net()
    optimizer, weight = torch.optim.AdamW(model.parameters()), model.blocks[2].up.weight
    with streamed(model, "cpu") as handle:
        for step in (1, 2):
            model(torch.ones(4, 8)).sum().backward()
            handle.steps.thread.submit(time.sleep, 0.1)
            optimizer.step()
            assert READS[read](optimizer.state, weight) == step


def test_whoever_reads_state_waits_for_no_other_stream():
    model, goes_on = Net(), threading.Event()
    optimizer = torch.optim.AdamW(model.parameters())
    with streamed(Net(), "cpu") as other, streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        other.units[0].begin_step(lambda: other.steps.thread.submit(goes_on.wait, 5))
        assert len(optimizer.state) == len(list(model.parameters())) and not other.units[0].steps.last.done()
        goes_on.set()


def slow_steps(monkeypatch):
    """Have each unit's step begin late."""
    step = Steps._step

    def late(self, *args):
        time.sleep(0.05)
        step(self, *args)

    monkeypatch.setattr(Steps, "_step", late)


def test_an_array_kept_over_a_weight_has_the_step_afterwards(monkeypatch):
    seen = []
    for streams in (False, True):
        torch.manual_seed(0)
        model = Net()
        with streamed(model, "cpu") if streams else contextlib.nullcontext():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            array = model.blocks[0].up.weight.detach().numpy()
            slow_steps(monkeypatch)
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            seen.append(torch.from_numpy(array.copy()))
    assert torch.equal(*seen)


@pytest.mark.parametrize("backwards", [2, 3])
def test_a_sum_of_gradients_that_failed_ends_the_step(backwards, monkeypatch):
    add, calls = GradientBytes._add, []

    def fail_once(self, *args):
        calls.append(self.weight.name)
        if len(calls) == 1:
            raise OSError("no room")
        add(self, *args)

    monkeypatch.setattr(GradientBytes, "_add", fail_once)
    model, is_said = Net(), False
    with contextlib.suppress(OSError), streamed(model, "cpu") as handle:  # the gradient is still lost at the end
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(backwards):
            model(torch.ones(4, 8)).square().mean().backward()
        with pytest.raises(OSError, match="no room"):
            optimizer.step()
            handle.finish_step()
        is_said = True
    assert is_said


def test_a_step_is_not_taken_after_a_failed_one_of_the_same_unit(monkeypatch):
    model, step = Net(), SlicedOptimizer.step
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.blocks[0].up, model.blocks[0].down))

    def failing(self, *args):
        if self.user is first:
            raise OSError("no room")
        step(self, *args)

    monkeypatch.setattr(SlicedOptimizer, "step", failing)
    with streamed(model, "cpu") as handle:
        before = copy.deepcopy(model.blocks[0].down)
        model(torch.ones(4, 8)).square().mean().backward()
        first.step()
        second.step()
        with pytest.raises(OSError, match="no room"):
            handle.finish_step()
        assert all(map(torch.equal, before.parameters(), model.blocks[0].down.parameters()))


def test_an_interrupted_step_raises_once_its_thread_is_idle(monkeypatch):
    model, step, begun, ended = Net(), SlicedOptimizer.step, [], []

    def slow(self, *args):
        begun.append(0)
        time.sleep(0.1)
        step(self, *args)
        ended.append(0)

    def interrupted(self):
        while not begun:
            time.sleep(0.001)
        raise KeyboardInterrupt

    with streamed(model, "cpu") as handle:
        array = model.blocks[4].up.weight.detach().numpy()  # whose step cannot wait
        model(torch.ones(4, 8)).square().mean().backward()
        with monkeypatch.context() as patched:
            patched.setattr(SlicedOptimizer, "step", slow)
            patched.setattr(Unit, "wait_step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert len(begun) == len(ended) > 0 and array.size
        with contextlib.suppress(HalfAppliedStepError):
            handle.finish_step()


# ---- while the thread is late


def late(monkeypatch, cls, name):
    """Have a method that the thread runs begin late."""
    method = getattr(cls, name)

    def begun_late(self, *args):
        time.sleep(0.02)
        return method(self, *args)

    monkeypatch.setattr(cls, name, begun_late)


def accumulate(model, edit):
    """Train on two batches for a step, with an edit of the gradients after the second one; return what it saw."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(2):
        views = [param.grad.view(-1) for param in model.parameters()] if step else []
        for seed in range(2):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        seen += [view.clone() for view in views]
        edit(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [*seen, *(param.detach().clone() for param in model.parameters())]


def test_a_factor_and_a_view_are_of_the_sum_of_gradients(monkeypatch):
    def halve(model):
        for param in model.parameters():
            param.grad.mul_(0.5)

    model = Net()
    want = accumulate(copy.deepcopy(model), halve)
    late(monkeypatch, GradientBytes, "_add")
    with streamed(model, "cpu"):
        assert all(map(torch.equal, accumulate(model, halve), want))


@pytest.mark.parametrize("resident", [0, 7])
def test_a_parameter_that_is_replaced_after_a_step_has_been_stepped(resident, monkeypatch):
    def train(model):
        optimizer, layer = torch.optim.SGD(model.parameters(), lr=0.1), model.blocks[4].up
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        before, layer.weight = layer.weight, torch.nn.Parameter(torch.ones(64, 32))
        return model(torch.ones(4, 8)).detach().clone(), before.detach().clone()

    model = Net()
    want = train(copy.deepcopy(model))
    late(monkeypatch, SlicedOptimizer, "step")
    with streamed(model, "cpu", resident=resident):
        assert all(map(torch.equal, train(model), want))
