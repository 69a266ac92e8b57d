"""Optimizers, their state, steps that fail and steps beside backward: the plain run's bits, or a typed error."""

import collections
import contextlib
import copy
import gc
import pickle
import threading
import time
import weakref
from concurrent import futures

import pytest
import torch
from stream_programs import Block, Net, cases, check, collected, streamed

from sp_lightning.errors import ExactnessError, TornStepError

PROGRAMS = []
program = collected(PROGRAMS)


@program()
def a_subclass_of_the_user_s(run, model):
    class Mine(torch.optim.AdamW):
        pass

    return run.loop(model, optimizer=run.noted(Mine(model.parameters(), 1e-2, fused=True)))


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                param.add_(mean.mul(0.9).add(param.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                mean.lerp_(param.grad, 0.01)


@program()
def an_optimizer_of_the_user_s(run, model):
    return run.loop(model, optimizer=run.noted(Lion(model.parameters())))


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


@program(Net, "keep", "recompute")
def lbfgs_with_a_closure(run, model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(model, optimizer, i):
        def closure():
            optimizer.zero_grad()
            loss = model(run.x(i)).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return run.loop(model, step, optimizer)


@program()
def a_layer_that_was_added_before_a_closure(run, model):
    """Stream a layer that the first call inside the closure finds."""
    optimizer = run.adamw(model.parameters())
    model.head.extra = torch.nn.Linear(4, 4, device=model.head.weight.device)
    torch.nn.init.constant_(model.head.extra.weight, 0.1)
    torch.nn.init.constant_(model.head.extra.bias, 0.1)
    optimizer.add_param_group({"params": list(model.head.extra.parameters())})

    def step(model, optimizer, i):
        def closure():
            optimizer.zero_grad()
            loss = model.head.extra(model(run.x(i))).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return run.loop(model, step, optimizer)


@program(Net, resident=2)
def gradients_of_residents_are_exchanged(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        one, other = model.blocks[0].up.weight, model.blocks[4].up.weight
        one.grad, other.grad = other.grad, one.grad
        optimizer.step()
        loss = loss + model(run.x(i + 50)).square().mean()
        loss.detach_()
        model(run.x(i)).square().mean().backward()
        return run.train(model(run.x(i)).square().mean(), optimizer) + loss

    return run.loop(model, step)


@program(Net, resident=2)
def state_of_the_user_s_optimizer_is_loaded(run, model):
    """Load LBFGS's state, which lies with its first weight, a resident one."""
    first, second = (torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2) for _ in range(2))

    def step(model, optimizer, i):
        def closure():
            optimizer.zero_grad()
            loss = model(run.x(i)).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    seen = run.loop(model, step, first, 2)
    second.load_state_dict(first.state_dict())
    return seen + run.loop(model, step, second, 2)


@program(Net, resident=2)
def weights_that_were_replaced_are_stepped(run, model):
    """Step with an optimizer that has the weights from before load_state_dict(assign=True), too."""
    optimizer = run.noted(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False))

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    seen = run.loop(model, step, optimizer, 2)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return seen + run.loop(model, step, optimizer, 2)


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
def state_read_after_each_step(run, model):
    optimizer, seen = run.adamw(model.parameters()), []
    for i in range(3):
        run.step(model, optimizer, i)
        seen.append(optimizer.state[model.blocks[2].up.weight]["exp_avg"].clone())
        seen.append(sum(state["exp_avg"].sum().cpu() for state in optimizer.state.values()))
        seen.append(copy.deepcopy(optimizer.state_dict())["state"])
    return seen


@program()
def state_cleared(run, model):
    optimizer = run.adamw(model.parameters())
    seen = [run.step(model, optimizer, i) for i in range(3)]
    optimizer.state.clear()
    return seen + [run.step(model, optimizer, i) for i in range(4)]


@program()
def state_replaced(run, model):
    optimizer = run.adamw(model.parameters())
    seen = [run.step(model, optimizer, i) for i in range(3)]
    optimizer.state = collections.defaultdict(dict)
    return seen + [run.step(model, optimizer, i) for i in range(4)]


@program()
def state_of_one_weight_reset(run, model):
    optimizer = run.adamw(model.parameters())
    seen = [run.step(model, optimizer, i) for i in range(3)]
    optimizer.state[model.blocks[1].up.weight] = {}
    return seen + [run.step(model, optimizer, i) for i in range(4)]


@program(Net, "keep", "recompute")
def groups_added_later(run, model):
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    optimizer = run.adamw(model.parameters())
    seen = [run.step(model, optimizer, i) for i in range(2)]
    model.requires_grad_(True)
    added = [param for block in model.blocks[:3] for param in block.parameters()]
    optimizer.add_param_group({"params": added, "lr": 1e-3})
    return seen + [run.step(model, optimizer, i) for i in range(3)]


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
def two_steps_with_one_gradient(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def optimizers_made_anew(run, model):
    seen = []
    for i in range(6):
        sgd = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
        seen.append(run.step(model, sgd if i % 2 else torch.optim.AdamW(model.parameters(), 1e-2, fused=True), i))
    return seen


@program()
def nadam_without_foreach(run, model):
    return run.loop(model, optimizer=run.noted(torch.optim.NAdam(model.parameters(), 1e-2, foreach=False)), count=6)


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


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
@pytest.mark.simgpu
def test_steps_are_those_of_the_plain_run(program, policy, window, device):
    check(program, device, policy, window)


# ---- steps beside backward


def trained(is_early, edit=lambda model, optimizer: None, steps=4):
    """Train with or without steps beside backward; ``edit`` comes between backward and step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    with streamed(model, "cpu") as handle:
        for i in range(steps):
            handle.steps.step_beside_backward(optimizer if is_early else None)
            model(torch.full((4, 8), float(i))).square().mean().backward()
            edit(model, optimizer)
            optimizer.step()
            handle.steps.step_beside_backward(None)
            optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_steps_beside_backward_have_the_bits_of_steps_after_it():
    assert all(map(torch.equal, trained(is_early=True), trained(is_early=False)))


def test_steps_are_taken_beside_backward():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu") as handle:
        handle.steps.step_beside_backward(optimizer)
        before = model.blocks[4].up.weight.detach().clone()
        model(torch.ones(4, 8)).sum().backward()
        assert not torch.equal(before, model.blocks[4].up.weight.detach())
        optimizer.step()


@pytest.mark.parametrize(
    "edit",
    [
        lambda model, optimizer: model.blocks[2].up.weight.grad.mul_(0.5),
        lambda model, optimizer: model.blocks[2].up.weight.grad.sum(),
        lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    ],
    ids=["multiplied", "read", "clipped"],
)
def test_a_gradient_touched_after_its_step_is_refused(edit):
    with pytest.raises(ExactnessError, match=r"blocks\.\d.*beside backward: set optimizer_overlap=False"):
        trained(is_early=True, edit=edit)


def test_options_that_change_after_steps_are_refused():
    def edit(model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.5

    with pytest.raises(ExactnessError, match="options of the optimizer changed"):
        trained(is_early=True, edit=edit)


def test_a_second_backward_after_steps_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu") as handle:
        handle.steps.step_beside_backward(optimizer)
        loss = model(torch.ones(4, 8)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(ExactnessError, match=r"another gradient after it was stepped"):
            loss.backward()
        optimizer.step()


def test_a_step_that_was_half_applied_is_not_saved():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu") as handle:
        handle.steps.step_beside_backward(optimizer)
        model(torch.ones(4, 8)).sum().backward()
        with pytest.raises(TornStepError, match=r"Load the last checkpoint"):
            optimizer.state_dict()
        optimizer.step()
        optimizer.state_dict()


# ---- steps that fail


def failed_after_one_unit(monkeypatch, model, optimizer):
    """Have a step end after its first unit."""
    from sp_lightning.steps.slices import SlicedOptimizer

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


def test_a_step_that_failed_half_way_is_neither_stepped_on_nor_saved(monkeypatch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu"):
        failed_after_one_unit(monkeypatch, model, optimizer)
        with pytest.raises(TornStepError, match=r"half-way, at blocks\.0, by MemoryError"):
            optimizer.step()
        with pytest.raises(TornStepError, match="load the last checkpoint"):
            optimizer.state_dict()


def test_loading_both_weights_and_state_ends_a_half_applied_step(monkeypatch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, weights = (copy.deepcopy(one.state_dict()) for one in (optimizer, model))
    with streamed(model, "cpu"):
        failed_after_one_unit(monkeypatch, model, optimizer)
        optimizer.load_state_dict(state)
        with pytest.raises(TornStepError):
            optimizer.step()
        model.load_state_dict(weights)
        optimizer.step()


def test_loading_ends_a_step_that_was_half_applied_beside_backward():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, weights = (copy.deepcopy(one.state_dict()) for one in (optimizer, model))
    with streamed(model, "cpu") as handle:
        for is_loaded in (False, True):
            handle.steps.step_beside_backward(optimizer)
            model(torch.ones(4, 8)).sum().backward()
            handle.steps.step_beside_backward(None)  # an exception came before the step
            optimizer.zero_grad()
            if is_loaded:
                model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            if not is_loaded:
                with pytest.raises(TornStepError, match="Load the last checkpoint"):
                    handle.steps.step_beside_backward(optimizer)
                model.load_state_dict(weights)
        handle.steps.step_beside_backward(optimizer)
        model(torch.ones(4, 8)).sum().backward()
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
        with pytest.raises(TornStepError, match="half-way"):
            optimizer.step()


def test_an_interrupt_of_a_wait_leaves_the_step_pending():
    with streamed(Net(), "cpu") as handle:
        unit, step = handle.units[0], futures.Future()
        unit.begin_step(lambda: step)
        step.result, whole = lambda: (_ for _ in ()).throw(KeyboardInterrupt), step.result
        with pytest.raises(KeyboardInterrupt):
            unit.wait_step()
        assert unit.pending is step
        step.result = whole
        unit.steps.end()
        step.set_result(None)
        unit.wait_step()
        assert unit.pending is None


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


def test_two_threads_wait_for_one_step():
    with streamed(Net(), "cpu") as handle:
        unit, step = handle.units[0], futures.Future()
        unit.begin_step(lambda: step)
        readers = [threading.Thread(target=unit.wait_step) for _ in range(2)]
        for reader in readers:
            reader.start()
            reader.join(0.1)
        assert all(reader.is_alive() for reader in readers)
        unit.steps.end()
        step.set_result(None)
        for reader in readers:
            reader.join()


def test_an_error_of_the_first_of_two_optimizers_is_raised():
    model = Net()
    block = model.blocks[0]
    first, second = (torch.optim.AdamW(part.parameters(), fused=True) for part in (block.up, block.down))
    with streamed(model, "cpu") as handle:
        model(torch.ones(4, 8)).sum().backward()
        for optimizer in (first, second):  # which make their state, and so wait for nothing below
            optimizer.step()
        handle.finish_step()
        handle.steps.thread.submit(time.sleep, 0.2)
        first.param_groups[0]["betas"] = (None, None)
        first.step()
        second.step()
        with pytest.raises(TypeError):
            handle.finish_step()
        first.param_groups[0]["betas"] = (0.9, 0.99)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_an_optimizer_s_state_is_plain(copied):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        found = copied(optimizer.state)
        assert type(found) is collections.defaultdict
        assert len(found) == len(optimizer.state)


READS = {
    "iterated": lambda state, weight: list(state) and dict.get(state, weight)["step"].item(),
    "counted": lambda state, weight: len(state) and dict.get(state, weight)["step"].item(),
    "asked": lambda state, weight: weight in state and dict.get(state, weight)["step"].item(),
    "got": lambda state, weight: state.get(weight)["step"].item(),
    "updated": lambda state, weight: state.update({}) or dict.get(state, weight)["step"].item(),
    "reversed": lambda state, weight: list(reversed(state)) and dict.get(state, weight)["step"].item(),
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


def test_a_step_that_makes_no_state_leaves_none():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        assert model.emb.weight not in optimizer.state
        assert len(optimizer.state) == 0


def test_state_is_deleted_after_the_pending_step():
    model = Net()
    optimizer, weight = torch.optim.AdamW(model.parameters()), model.blocks[2].up.weight
    with streamed(model, "cpu") as handle:
        model(torch.ones(4, 8)).sum().backward()
        handle.steps.thread.submit(time.sleep, 0.2)
        optimizer.step()
        del optimizer.state[weight]
        handle.finish_step()
        assert weight not in optimizer.state
