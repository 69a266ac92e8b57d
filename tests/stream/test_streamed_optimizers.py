"""Each of torch's optimizers, with options and types of weights that take other ways, steps as in the plain run."""

import copy
import functools
import os
import threading
import time

import pytest
import torch
from often import often
from stream_programs import Net, Program, check, streamed
from torch import nn

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adam_amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adam_at_a_tensor": (torch.optim.Adam, {"lr": torch.tensor(1e-2)}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw_one_by_one": (torch.optim.AdamW, {"foreach": False}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
    "sgd_nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd_maximizing": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def program(cls, options, count=7, dtype=torch.float32):
    def steps(run, model):
        optimizer = run.noted(cls(model.parameters(), **{"lr": 1e-2, **options}))

        def step(model, optimizer, i):
            return run.train(model(run.x(i).to(dtype)).square().mean(), optimizer)

        return run.loop(model, step, optimizer, count)

    return steps


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("name", often(OPTIMIZERS, "adamw", "sgd_nesterov", "adafactor"))
@pytest.mark.simgpu
def test_an_optimizer_steps_as_in_the_plain_run(name, device):
    check(Program(program(*OPTIMIZERS[name]), Net), device)


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", often(["adamw_fused", "adamw", "sgd_nesterov", "rmsprop"]))
@pytest.mark.simgpu
def test_weights_of_other_types_step_as_in_the_plain_run(name, dtype, device):
    check(Program(program(*OPTIMIZERS[name], dtype=dtype), lambda: Net().to(dtype)), device)


WRITING = {
    "nesterov": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    "nesterov, lr a tensor": (torch.optim.SGD, {"lr": torch.tensor(1e-3), "momentum": 0.9, "nesterov": True}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}


@pytest.mark.parametrize("options", [{}, {"resident": 1}, {"optimizer_device": "device"}], ids=str)
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("name", WRITING)
@pytest.mark.simgpu
def test_a_step_that_writes_into_gradients_does_so(name, reads, options):
    """On a device torch's steps for lists write into `.grad`, to which a next backward adds if nothing clears it."""
    cls, values = WRITING[name]

    def steps(run, model):
        optimizer, seen = run.noted(cls(model.parameters(), **values)), []
        for i in range(4):
            loss = model(run.x(i)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            seen.append(loss.detach().clone())
            if reads:
                seen += [p.grad.detach().cpu().clone() for p in model.parameters()]
        return seen

    check(Program(steps, Net, options=options), "simgpu")


class Odd(nn.Module):
    """Weights whose elements fill no vectors, of no elements, of no dimension, and in another order of memory."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 37), nn.Linear(37, 32)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.none, self.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        seen = self.conv(x[:, :27].reshape(-1, 3, 3, 3)).mean()
        return x + (self.down(self.up(x).relu()) * self.scale + self.none.sum() + seen) / 8


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("name", often(["adamw_fused", "adamw", "sgd_nesterov", "rmsprop"]))
@pytest.mark.simgpu
def test_odd_weights_step_as_in_the_plain_run(name, device):
    check(Program(program(*OPTIMIZERS[name]), lambda: Net(Odd)), device)


@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "sgd_nesterov"])
@pytest.mark.simgpu
def test_odd_weights_step_with_the_devices_arithmetic(arithmetic, name):
    check(Program(program(*OPTIMIZERS[name]), lambda: Net(Odd)), "simgpu")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32, sparse=True)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.words((x[:, :3] * 10).abs().long() % 50).sum(1)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_step_as_in_the_plain_run(cls):
    """The simulated device has no sparse tensors."""
    check(Program(program(cls, {}), Words), "cpu")


@pytest.mark.simgpu
def test_muon_and_another_optimizer_share_a_model():
    def steps(run, model):
        matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
        others = [param for param in model.parameters() if all(param is not one for one in matrices)]
        optimizers = [run.noted(torch.optim.Muon(matrices, 1e-2)), run.noted(torch.optim.AdamW(others, 1e-2))]
        seen = []
        for i in range(4):
            loss = model(run.x(i)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.detach().clone())
        return seen

    check(Program(steps, Net), "simgpu")


class Compiled(torch.optim.Optimizer):
    """A user's own, which compiles what it does with each weight, as the optimizers of torchao do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                torch.compile(self.update, backend="eager", fullgraph=True)(p.detach(), p.grad, mean, group["lr"])

    @staticmethod
    def update(p, grad, mean, lr):
        mean.lerp_(grad, 0.5)
        p.copy_(p.float() - lr * mean)


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.simgpu
def test_an_optimizer_with_compiled_code_steps_as_in_a_plain_run(device):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # for each shape of a weight
        check(Program(program(Compiled, {}), Net), device)


@pytest.mark.parametrize("reads", [False, True], ids=["beside_a_step", "that_waits_for_a_step"])
def test_a_compilation_changes_no_bits_of_a_step(reads):
    """While a thread compiles, NAdam on any thread computes with tensors in place of numbers. A compiler may fork."""
    plain, model = copy.deepcopy(net := Net()), net
    optimizers = [torch.optim.NAdam(each.parameters(), 1e-2, foreach=False) for each in (plain, model)]
    begin = threading.Event()

    def started(_):
        begin.set()
        time.sleep(0.1)  # in which the thread comes to the steps
        if not reads and (child := os.fork()) == 0:
            os._exit(0)
        assert reads or os.waitpid(child, 0)[1] == 0

    with streamed(model, "cpu") as handle:
        for i in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                if each is model and i == 2:  # the first steps are waited for
                    handle.steps.thread.submit(begin.wait, 10)
                optimizer.step()
        read = model.blocks[0].up.weight.grad if reads else x
        torch._dynamo.reset()
        torch._dynamo.callback_handler.register_start_callback(started)
        seen = torch.compile(lambda y: y.sum() * 2, backend="eager")(read)
        torch._dynamo.callback_handler.remove_start_callback(started)
        assert torch.equal(seen, (plain.blocks[0].up.weight.grad if reads else x).sum() * 2)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    numbers = [[state["mu_product"] for state in optimizer.state.values()] for optimizer in optimizers]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.emb.weight.sum(),
        lambda model: model.emb.weight.data.sum(),
        lambda model: sum(p.detach().sum() for p in model.parameters()),
        lambda model: model.blocks[0].up.bias.detach().mul_(0.9).sum(),
        lambda model: model.emb.weight.grad.mul_(0.5).norm(),
    ],
    ids=["parameter", "data", "all", "write", "gradient"],
)
def test_compiled_code_reads_weights_between_steps(read):
    def steps(run, model):
        optimizer, seen = run.adamw(model.parameters()), []
        compiled = torch.compile(read, backend="eager")
        for i in range(3):
            model(run.x(i)).square().mean().backward()
            optimizer.step()
            seen.append(compiled(model).detach())
        return seen

    torch._dynamo.reset()
    check(Program(steps, Net), "cpu")


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_code_runs_backward_and_sets_gradients_and_what_trains():
    def steps(run, model):
        @functools.partial(torch.compile, backend="eager")
        def train(x):
            model.blocks[1].up.weight.requires_grad = False
            loss = model(x).square().mean()
            loss.backward()
            for param in model.parameters():
                param.grad = None if param.grad is None else param.grad * 0.5
            return loss

        optimizer, losses = run.noted(torch.optim.SGD(model.parameters(), 0.1)), []
        for i in range(3):
            losses.append(train(run.x(i)).detach().clone())
            optimizer.step()
            torch.compile(model.zero_grad, backend="eager")()
        return losses

    torch._dynamo.reset()
    check(Program(steps, Net), "cpu")


class Closing(Compiled):
    """As SAM does, it has its closure run twice, from other weights the second time."""

    def step(self, closure):
        with torch.enable_grad():
            first = closure()
        super().step()
        with torch.enable_grad():
            second = closure()
        super().step()
        return first + second


def test_a_closure_within_compiled_code_of_an_optimizer_runs_a_compiled_model():
    def steps(run, model):
        optimizer, losses = run.noted(Closing(model.parameters(), 0.1)), []
        call = torch.compile(model, backend="eager")

        def closure():
            model.zero_grad()
            loss = call(run.x(len(losses))).square().mean()
            loss.backward()
            return loss.detach()

        for _ in range(3):
            losses.append(optimizer.step(closure=closure))
        return losses

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        check(Program(steps, Net), "cpu")


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiled_step_steps_streamed_units_eagerly():
    torch._dynamo.reset()
    plain, model = copy.deepcopy(net := Net()), net
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with streamed(model, "cpu"):
        for each in (plain, model):
            optimizer = torch.optim.AdamW(each.parameters(), 1e-2)
            each(x).square().mean().backward()
            (torch.compile(optimizer.step, backend="eager") if each is model else optimizer.step)()
    assert all(map(torch.equal, plain.blocks.parameters(), model.blocks.parameters()))


class Around(torch.optim.Optimizer):
    """A user's own, which steps another one and then adds to the weights."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr)
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.99)


@pytest.mark.simgpu
def test_an_optimizer_that_steps_another_does_so_within_a_step():
    check(Program(program(Around, {}), Net), "simgpu")
    model = Net()
    with streamed(model, "simgpu") as handle, handle.scope("train"):
        optimizer = Around(model.parameters(), 0.1)
        model(torch.ones(4, 8, device="simgpu")).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert model.blocks[0].up.weight.square().device.type == "simgpu"  # as a training step goes on
