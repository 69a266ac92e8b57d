"""Gradients that a program reads, writes, keeps, multiplies, assigns and takes norms of are those of the plain run."""

import copy
import threading
import time

import pytest
import torch
from stream_programs import Block, Net, cases, check, collected, stream, streamed
from torch import nn
from torch.utils.checkpoint import checkpoint

PROGRAMS = []
program = collected(PROGRAMS)


@program(Net, "keep", "offload")
def scaler_clips_and_accumulates(run, model):
    optimizer, seen = run.adamw(model.parameters()), []
    scaler = torch.amp.GradScaler(run.device.type, init_scale=1024.0, growth_interval=2)
    for i in range(5):
        for j in range(2):
            with torch.autocast(run.device.type, dtype=torch.bfloat16, cache_enabled=False):
                loss = model(run.x(10 * i + j)).float().square().mean() * (float("inf") if (i, j) == (2, 1) else 1)
            scaler.scale(loss).backward()
            seen.append(loss.detach().clone())
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


@program()
def scaler_steps_a_fused_optimizer(run, model):
    optimizer, seen = run.adamw(model.parameters()), []
    scaler = torch.amp.GradScaler(run.device.type, init_scale=1024.0, growth_interval=2)
    for i in range(5):
        loss = model(run.x(i)).float().square().mean() * (float("inf") if i == 2 else 1)
        scaler.scale(loss).backward()
        seen.append(loss.detach().clone())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


class Reentrant(Block):
    """A block whose backward runs another one."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@program(lambda: Net(Reentrant))
def summed_in_the_order_of_reentrant_backwards(run, model):
    """The gradient of a term comes before that of the forward, which comes of a backward inside."""
    optimizer = run.adamw(model.parameters())

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        (loss + sum((weight * 1.7).sin().sum() for weight in model.parameters())).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return run.loop(model, step, optimizer, 6)


@program(Net, "keep", "recompute", "offload")
def hooks_on_gradients(run, model):
    seen = []
    model.blocks[2].up.weight.register_hook(lambda grad: grad * 0.5)
    model.blocks[0].norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))
    model.emb.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))
    return run.loop(model) + seen


@program()
def gradients_are_set_to_zero(run, model):
    optimizer, seen = run.adamw(model.parameters()), []
    for i in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(run.x(i)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
    return seen


@program()
def gradients_are_read_kept_and_scaled(run, model):
    optimizer, kept = run.noted(torch.optim.SGD(model.parameters(), 0.1, fused=True)), []
    for i in range(4):
        model(run.x(i)).square().mean().backward()
        kept.append(model.blocks[1].up.weight.grad)
        kept.append(model.blocks[1].up.weight.grad.abs().sum())
        model.blocks[3].down.weight.grad *= 2
        model.emb.weight.grad *= 3
        model.blocks[0].up.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return kept


@program()
def clipped_by_value_and_infinity_norm(run, model):
    optimizer, norms = run.adamw(model.parameters()), []
    for i in range(4):
        model(run.x(i)).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf")))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@program()
def clipped_in_the_order_of_groups(run, model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer, seen = run.noted(torch.optim.AdamW(groups, 1e-2, fused=True)), []
    for i in range(5):
        model(run.x(i)).square().mean().backward()
        seen.append(nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-2))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@program()
def clipped_twice(run, model):
    norms = []

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step) + norms


@program()
def norms_of_weights_beside_those_of_gradients(run, model):
    def step(model, optimizer, i):
        model(run.x(i)).square().mean().backward()
        norms = torch.stack([norm for p in model.parameters() for norm in (p.detach().norm(), p.grad.norm())])
        optimizer.step()
        optimizer.zero_grad()
        return norms.cpu()

    return run.loop(model, step)


@program()
def total_norm_and_clip_by_it(run, model):
    norms = []

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        params = list(model.parameters())
        norms.append(nn.utils.get_total_norm([p.grad for p in params]))
        nn.utils.clip_grads_with_norm_(params, 0.01, norms[-1])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step) + norms


@program()
def norm_by_hand(run, model):
    norms = []

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        norms.append(torch.stack([p.grad.norm(2) for p in model.parameters()]).norm(2))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step) + norms


@program()
def divided_by_a_number_on_the_device(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        for param in model.parameters():
            param.grad.div_(loss.detach() + 1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def taken_by_autograd_and_assigned(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        for param, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def added_from_an_earlier_backward(run, model):
    def step(model, optimizer, i):
        one, other = model(run.x(i)).square().mean(), model(run.x(i + 3)).cos().mean()
        one.backward()
        kept = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        other.backward()
        for param, grad in zip(model.parameters(), kept, strict=True):
            param.grad += grad * 0.5
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return one

    return run.loop(model, step)


@program()
def edited_by_data(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        for param in model.parameters():
            param.grad.data.clamp_(-1e-3, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def views_kept_and_zeroed_after_the_step(run, model):
    def step(model, optimizer, i):
        model(run.x(i)).square().mean().backward()
        views = [p.grad.view(-1) for p in model.parameters()]
        optimizer.step()
        for view in views:
            view.zero_()
        return run.step(model, optimizer, i)

    return run.loop(model, step)


@program()
def swapped_between_weights(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
        one.grad, other.grad = other.grad, one.grad
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def one_object_on_two_weights(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        model.blocks[1].up.weight.grad = model.blocks[0].up.weight.grad
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def multiplied_by_numbers_and_read(run, model):
    sums = []

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        for param in model.parameters():
            param.grad.mul_(0.5)
        sums.append(sum(p.grad.detach().cpu().sum() for p in model.parameters()))
        for param in model.parameters():
            param.grad *= 3.0
        for param in model.parameters():
            param.grad.mul_(1 / 3)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step) + sums


@program()
def multiplied_by_a_tensor_that_changes_later(run, model):
    factor = torch.tensor(0.5)

    def step(model, optimizer, i):
        factor.fill_(0.5 + i)
        loss = model(run.x(i)).square().mean()
        loss.backward()
        for param in model.parameters():
            param.grad.mul_(factor)
        factor.fill_(100.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def kept_by_detach_and_multiplied(run, model):
    seen = []

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        kept = model.blocks[1].up.weight.grad.detach()
        model.blocks[1].up.weight.grad.mul_(0.5)
        seen.append(kept.cpu().clone())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step) + seen


@program()
def replaced_by_their_signs(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        for param in model.parameters():
            param.grad = param.grad.sign()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def added_to_with_weights_at_once(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        grads = [p.grad for p in model.blocks.parameters()]
        torch._foreach_add_(grads, [p.detach() for p in model.blocks.parameters()], alpha=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run.loop(model, step)


@program()
def zeroed_after_the_step(run, model):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        optimizer.step()
        for param in model.parameters():
            param.grad.zero_()
        return loss

    return run.loop(model, step)


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
@pytest.mark.simgpu
def test_gradients_are_those_of_the_plain_run(program, policy, window, device):
    check(program, device, policy, window)


def test_a_gradient_is_a_tensor_on_the_host():
    model = Net()
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        assert all(p.grad.device.type == p.device.type == "cpu" for p in model.parameters())


@pytest.mark.simgpu
def test_a_resident_weight_s_gradient_is_on_the_host_when_read():
    model = Net()
    with streamed(model, "simgpu"):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        assert model.emb.weight.grad.clone().device.type == "cpu"


@pytest.mark.simgpu
def test_norms_of_accumulated_gradients_are_computed_on_the_device():
    model = Net()
    with streamed(model, "simgpu"):
        for _ in range(2):
            model(torch.ones(4, 8, device="simgpu")).sum().backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).device.type == "simgpu"


def test_a_graph_of_a_gradient_is_refused():
    from sp_lightning.errors import UnsupportedError

    model = Net()
    with streamed(model, "cpu"), pytest.raises(UnsupportedError, match=r"create_graph=True.*autograd\.grad"):
        model(torch.ones(4, 8)).square().sum().backward(create_graph=True)


def test_a_factor_multiplies_the_sum_of_both_backwards():
    model, x = Net(), torch.ones(4, 8)
    plain = copy.deepcopy(model)

    def halved(model, between):
        model(x).sum().backward()
        between()
        model(x * 2).square().sum().backward()
        return model.blocks[1].up.weight.grad.mul_(0.5).clone()

    want = halved(plain, lambda: None)
    with streamed(model, "cpu") as handle:
        assert torch.equal(halved(model, lambda: handle.steps.thread.submit(time.sleep, 0.2)), want)


def test_a_view_has_the_sum_as_the_second_backward_ends():
    model, x = Net(), torch.ones(4, 8)
    plain = copy.deepcopy(model)

    def read(model, between):
        model(x).sum().backward()
        view = model.blocks[1].up.weight.grad.view(-1)
        between()
        model(x * 2).square().sum().backward()
        return view.sum()

    want = read(plain, lambda: None)
    with streamed(model, "cpu") as handle:
        assert torch.equal(read(model, lambda: handle.steps.thread.submit(time.sleep, 0.2)), want)


@pytest.mark.parametrize(
    "touch, is_pending",
    [
        (lambda grad: grad.sum(), True),
        (lambda grad: grad.clamp_(-1, 1), True),
        (lambda grad: grad.view(-1), False),
        (lambda grad: grad.chunk(2), False),
        (lambda grad: grad.numpy(), False),
        (lambda grad: grad * torch.ones((), requires_grad=True), False),
    ],
)
def test_a_step_is_waited_for_where_gradients_have_views(touch, is_pending):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu") as handle:
        model(torch.ones(4, 8)).sum().backward()
        kept = [touch(block.up.weight.grad) for block in model.blocks]
        optimizer.step()
        assert len(kept) == 5
        assert [unit.pending is not None for unit in handle.units if not unit.is_resident] == [is_pending] * 5


def test_a_step_that_changed_nothing_multiplies_no_gradient(monkeypatch):
    from sp_lightning.steps.slices import SlicedOptimizer

    model, x = Net(), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with streamed(model, "cpu") as handle:
        model(x).sum().backward()
        optimizer.step()
        handle.finish_step()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        weight = model.blocks[0].norm.weight
        want = weight.grad.clone() * 0.5
        optimizer.zero_grad()
        model(x).square().sum().backward()
        weight.grad.mul_(0.5)

        def refuse(*args):
            raise MemoryError("on purpose")

        for other in (*model.emb.parameters(), *model.head.parameters()):
            other.grad = None  # resident weights would be stepped first
        monkeypatch.setattr(SlicedOptimizer, "_call", refuse)
        optimizer.step()
        with pytest.raises(MemoryError):
            handle.finish_step()
        assert torch.equal(weight.grad, want)


def test_norms_are_computed_for_gradients_of_one_type(monkeypatch):
    from sp_lightning.stream import gradients

    types, norms = [], gradients.norms_of_all

    def noted(grads, order):
        types.append({grad.dtype for grad in grads})
        return norms(grads, order)

    monkeypatch.setattr(gradients, "norms_of_all", noted)
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8)) for _ in range(2))
    model.forward = lambda x: sum(block[1](block[0](x).float()) for block in model)
    with streamed(model, "cpu"):
        model(torch.randn(4, 8).bfloat16()).square().sum().backward()
    assert all(len(found) == 1 for found in types) and set.union(*types) == {torch.bfloat16, torch.float32}


def test_writes_to_norms_do_not_change_the_next_ones():
    model = Net()
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        grads = [param.grad for param in model.parameters()]
        want = [norm.clone() for norm in torch._foreach_norm(grads)]
        torch._foreach_mul_(torch._foreach_norm(grads), 3.0)
        assert all(map(torch.equal, want, torch._foreach_norm(grads)))


@pytest.mark.simgpu
def test_a_tensor_on_the_device_takes_a_gradient():
    model = Net()
    with streamed(model, "simgpu"):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        grad = model.blocks[1].up.bias.grad
        kept = torch.zeros(grad.shape, device="simgpu")
        assert kept.copy_(grad) is kept
        assert torch.equal(kept.cpu(), grad.clone())


@pytest.mark.simgpu
def test_a_gradient_is_divided_by_its_norm():
    model = Net()
    with streamed(model, "simgpu"):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        grad = model.blocks[1].up.bias.grad
        want = grad.clone() / grad.norm().cpu()
        assert torch.equal(grad.div_(grad.norm()).clone(), want)


class HalfUsed(nn.Module):
    """A block of which one layer gets no gradient, so that the unit's are sent as backward ends."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.used(x)


def refuse(_):
    raise ValueError("on purpose")


def test_a_hook_that_raises_loses_no_other_unit_s_gradients():
    model = Net(HalfUsed)
    with streamed(model, "cpu"):
        model.blocks[4].used.weight.register_hook(refuse)
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.ones(4, 8)).sum().backward()
        assert model.head.weight.grad is not None


def test_a_thread_may_read_weights_while_another_is_in_backward():
    model, x = Net(), torch.ones(4, 8)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    weight = model.head.weight

    def read(_):
        reader = threading.Thread(target=weight.norm)
        reader.start()
        reader.join()

    with streamed(model, "cpu"):
        model.blocks[2].up.weight.register_hook(read)
        model(x).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_close_goes_on_where_a_hook_on_a_gradient_raises():
    model = Net(HalfUsed)
    handle = stream(model, "cpu", window=1)
    model.blocks[0].used.weight.register_hook(refuse)
    x = model.emb(torch.ones(4, 8))
    x.register_hook(refuse)
    with pytest.raises(ValueError, match="on purpose"):
        model.head(model.blocks[0](x)).sum().backward()
    with pytest.raises(ValueError, match="on purpose"):
        handle.close()
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_a_replaced_weight_does_not_hold_its_unit_s_gradients_back(monkeypatch):
    from sp_lightning.steps.steps import Steps

    model, complete, delivered = Net(), [], Steps.delivered
    monkeypatch.setattr(
        Steps,
        "delivered",
        lambda steps, unit, whose, done: (complete.append((unit.name, done)), delivered(steps, unit, whose, done)),
    )
    with streamed(model, "cpu"):
        model(torch.ones(4, 8))
        model.blocks[2].up.bias = torch.nn.Parameter(torch.zeros(64))
        model(torch.ones(4, 8)).sum().backward()
        assert dict(complete)["blocks.2"] and model.blocks[2].up.bias.grad is not None
