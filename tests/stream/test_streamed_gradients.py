"""Gradients that a program reads, writes, keeps, multiplies, assigns and takes norms of are those of the plain run."""

import copy
import io
import pickle
import threading

import pytest
import torch
from often import often
from stream_programs import PLACES, Block, Net, Program, Run, cases, check, collected, streamed
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

from sp_lightning import errors
from sp_lightning.stream import leaf

PROGRAMS = []
program = collected(PROGRAMS)


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


def clipped_by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"))


def clipped_by_the_total_norm(model):
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.01, norm)
    return norm


def swapped_and_shared(model):
    one, other, third = (model.blocks[i].up.weight for i in range(3))
    one.grad, other.grad = other.grad, one.grad
    third.grad = one.grad
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def multiplied_by_numbers_and_read(model):
    for param in model.parameters():
        param.grad.mul_(0.5)
    seen = sum(p.grad.detach().cpu().sum() for p in model.parameters())
    for param in model.parameters():
        param.grad *= 3.0
    model.blocks[0].up.bias.grad = None
    return seen


def added_to_with_weights_at_once(model):
    grads = [p.grad for p in model.blocks.parameters()]
    torch._foreach_add_(grads, [p.detach() for p in model.blocks.parameters()], alpha=1e-2)


def by_arguments_that_are_named(model):
    grads = [p.grad for p in model.parameters()]
    grads[0].mul_(other=0.5)
    torch._foreach_mul_([grads[1]], scalar=0.5)
    torch._foreach_mul_(self=[grads[2]], scalar=2.0)
    norms = [torch.linalg.vector_norm(x=grads[3]), torch.linalg.vector_norm(grads[3], 2, 0), grads[3].norm(p=1)]
    return [*norms, *torch._foreach_norm(self=grads), *torch._foreach_norm(grads, 2, torch.float64)]


EDITS = [
    by_arguments_that_are_named,
    clipped_by_value,
    clipped_by_the_total_norm,
    swapped_and_shared,
    multiplied_by_numbers_and_read,
    added_to_with_weights_at_once,
]


class InFloat(torch.autograd.Function):
    """A product that is computed in FP32 under autocast, too."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad @ weight.float()).to(x.dtype), grad.t() @ x.float()


class CastOnceOnly(Block):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            beside = InFloat.apply(x, self.up.weight)
        return x + self.down((self.up(x) + beside).tanh())


class CastInside(Block):
    def turn(self, x):
        return self.down(self.up(x).tanh())

    def forward(self, x):
        return self.turn(checkpoint(self.turn, self.turn(x), use_reentrant=True))


def in_halves(run, model, i):
    with torch.autocast(run.device.type, dtype=torch.bfloat16, cache_enabled=False):
        return model(run.x(i)).float().square().mean()


@program(lambda: Net(CastOnceOnly), wire=torch.bfloat16)
def of_one_cast_and_of_a_function_of_the_users(run, model):
    return run.loop(model, lambda model, optimizer, i: run.train(in_halves(run, model, i), optimizer))


@program(lambda: Net(CastInside), wire=torch.bfloat16)
def of_casts_in_a_backward_and_in_one_inside(run, model):
    return run.loop(model, lambda model, optimizer, i: run.train(in_halves(run, model, i), optimizer))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Parametrised(Block):
    """A block that has a parametrization during its forward, as adapters of weights without a module."""

    def forward(self, x):
        register_parametrization(self.up, "weight", Doubled(), unsafe=True)
        try:
            return super().forward(x)
        finally:
            remove_parametrizations(self.up, "weight", leave_parametrized=False)


@program(lambda: Net(Parametrised), wire=torch.bfloat16)
def of_weights_that_are_parametrised_in_a_forward(run, model):
    return run.loop(model, lambda model, optimizer, i: run.train(in_halves(run, model, i), optimizer))


@program(Net, wire=torch.bfloat16)
def of_a_model_that_is_compiled_under_autocast(run, model):
    model.compile(backend="eager")
    return run.loop(model, lambda model, optimizer, i: run.train(in_halves(run, model, i), optimizer))


class Penalised(Block):
    """A block whose forward differentiates a part of itself."""

    def forward(self, x):
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.square().mean(), [self.up.weight], create_graph=True)
        return y + 0.1 * slope.sum()


@program(lambda: Net(Penalised), "keep", "offload")
def of_a_backward_inside_of_a_forward(run, model):
    return run.loop(model)


@program(lambda: Net(CastInside))
def seen_by_hooks_in_the_order_of_reentrant_backwards(run, model):
    seen, optimizer = [], run.adamw(model.parameters())
    model.blocks[1].down.weight.register_post_accumulate_grad_hook(
        lambda weight: seen.append(weight.grad.clone().cpu())
    )
    for i in range(3):
        model(run.x(i)).square().mean().backward()
    optimizer.step()
    return seen


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.simgpu
def test_edited_gradients_are_those_of_the_plain_run(edit, device):
    check(Program(lambda run, model: run.edited(model, edit)), device)


@pytest.mark.parametrize("device, window", PLACES)
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
def test_gradients_are_those_of_the_plain_run(program, policy, window, device):
    check(program, device, policy, window)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_before_the_backward_of_a_cast_is_an_error(kind):
    model = Net()
    with streamed(model, "cpu", resident=0, wire=torch.bfloat16):
        optimizer = kind(model.parameters(), 0.1)
        run = Run(torch.device("cpu"), True)
        first, second = in_halves(run, model, 0), in_halves(run, model, 1)
        second.backward()
        optimizer.step()
        with pytest.raises(
            errors.ExactnessError, match=r"between a forward and its backward, .* set wire_dtype='as-is'"
        ):
            first.backward()


def test_gradients_that_are_asked_for_leave_nothing_behind():
    model = Net()
    with streamed(model, "cpu", resident=0, wire=torch.bfloat16):
        loss = in_halves(Run(torch.device("cpu"), True), model, 0)
        weight = model.blocks[1].up.weight
        (grad,) = torch.autograd.grad(loss, [weight])
        assert not leaf.casts
        grad.mul_(1.01)
        weight.view(-1).backward(grad.view(-1))
        assert torch.equal(weight.grad, grad)


@pytest.mark.parametrize("device", ["simgpu", "cpu"])
@pytest.mark.simgpu
def test_sums_are_made_beside_the_backward_of_their_gradients(device):
    model = Net()
    with streamed(model, device, resident=0):
        seen, last = [], model.blocks[-1].up.weight
        model.blocks[0].register_full_backward_hook(
            lambda *_: seen.append(last.grad is not None and last.grad.content.adding is not None)
        )
        for _ in range(2):
            model(torch.ones(4, 8)).square().mean().backward()
    assert seen == [False, True]


@pytest.mark.simgpu
def test_a_resident_weight_s_gradient_is_on_the_host_when_read():
    model = Net()
    with streamed(model, "simgpu"):
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        assert model.emb.weight.grad.clone().device.type == "cpu"


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_of_a_gradient_is_refused():
    from sp_lightning.errors import UnsupportedError

    model = Net()
    with streamed(model, "cpu"), pytest.raises(UnsupportedError, match=r"create_graph=True.*autograd\.grad"):
        model(torch.ones(4, 8)).square().sum().backward(create_graph=True)


def test_a_gradient_is_saved_by_itself():
    model = Net()
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        grad = model.blocks[0].norm.weight.grad
        file = io.BytesIO()
        torch.save(grad, file)
        assert file.tell() < 4096  # its unit's take more
        for copied in (pickle.loads(pickle.dumps(grad)), torch.load(io.BytesIO(file.getvalue()))):
            assert type(copied) is torch.Tensor and torch.equal(copied, grad)


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
