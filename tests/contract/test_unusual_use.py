"""What users do to a module while it streams, each with the outcome that the contract names.

Bitwise equal to the plain run, the error that the plain run raises, or a typed error; afterwards everything goes on.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import pickle
import re
import threading
from multiprocessing.reduction import ForkingPickler

import families
import lightning as L
import pytest
import torch
from refusals import refusal
from side_by_side import assert_plain, blocks, check, fit, inputs, kept, sgd, squares, training
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import models
import parity
import sp_lightning
from sp_lightning.errors import ExactnessError, SuperpipelineError, UnsupportedError
from sp_lightning.memory.watched_parameters import HostParameter

# --- Weights where they are not looked for


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


product = Product.apply  # before anything is streamed


WAYS = {
    "a function that was bound before": lambda block, hidden: product(hidden, block.up.weight),
    "a copy": lambda block, hidden: copy.deepcopy(block)(hidden),
}


@pytest.mark.simgpu
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_reached_on_the_host_is_an_error_that_says_where_it_is(way):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = blocks()

        def training_step(self, x):
            return self.net(x).sum() + WAYS[way](self.net.blocks[0], torch.ones(2, models.WIDTH, device=x.device)).sum()

        forward = training_step

    module, (x,) = Outer(), inputs("simgpu", 1)
    with sp_lightning.stream(module, "simgpu", window=1) as handle:
        with pytest.raises(UnsupportedError, match="call it inside the forward of the module that owns the weight"):
            with handle.explaining():  # as Lightning's backward is
                module(x).backward()
        squares(module.net, x).backward()


@pytest.mark.simgpu
def test_a_mask_that_was_made_like_a_weight_between_steps_is_an_error_that_says_so():
    class Masked(models.Block):
        def forward(self, x):
            return super().forward(x * self.mask)

    net, (x,) = models.stack_of(Masked)(), inputs("simgpu", 1)
    with sp_lightning.stream(net, "simgpu", window=1):
        for block in net.blocks:
            block.register_buffer("mask", torch.ones_like(block.down.bias))
        with pytest.raises(UnsupportedError, match=r"made like a weight between steps .*: move it to the device"):
            net(x)
        for block in net.blocks:
            block.mask = block.mask.to("simgpu")
        squares(net, x).backward()


@pytest.mark.parametrize(
    "said, error",
    [
        ("all tensors to be on the same device, but got mat2 is on cpu, different from other ...", UnsupportedError),
        (
            "Input type (torch.cuda.FloatTensor) and bias type (torch.FloatTensor) should be the same",
            UnsupportedError,
        ),
        ("grid_sampler(): expected input and grid to be on same device, but input is on cuda:0 ...", UnsupportedError),
        (
            "Input type (torch.cuda.HalfTensor) and bias type (torch.cuda.FloatTensor) should be the same",
            RuntimeError,
        ),
    ],
)
def test_an_error_about_two_devices_is_told_from_one_about_two_types(said, error):
    with sp_lightning.stream(blocks(), "cpu") as handle:
        with pytest.raises(RuntimeError) as raised, handle.explaining():
            raise RuntimeError(said)
    assert raised.type is error


class Asking(models.Block):
    """Asks what its weights are."""

    def forward(self, x):
        self.told = [
            (p.is_leaf, p.grad_fn, p.grad_dtype, p.dtype, p.device, p.requires_grad, p.shape, p.stride())
            for p in self.parameters()
        ]
        return super().forward(x)


def test_inside_a_unit_a_weight_tells_what_the_plain_runs_does(device):
    def told(net):
        squares(net, next(iter(inputs(device, 1))))
        return [block.told for block in net.blocks]

    expected = told(models.Stack(Asking() for _ in range(3)).to(device))
    net = models.Stack(Asking() for _ in range(3))
    with sp_lightning.stream(net, device, window=1):
        assert told(net) == expected


class Freezing(models.Block):
    """Sets ``requires_grad`` of its own weight; first to what it is."""

    way, to = "method", True

    def forward(self, x):
        self.up.weight.requires_grad_(True).requires_grad = True
        if self.way == "method":
            self.up.weight.requires_grad_(self.to)
        else:
            self.up.weight.requires_grad = self.to
        return super().forward(x)


@pytest.mark.parametrize("way", ["method", "attribute"])
def test_a_weight_that_is_frozen_inside_its_forward_is_an_error_and_one_that_stays_as_it_is_is_none(device, way):
    check(models.stack_of(Freezing), training(), device)
    net, (x,) = models.stack_of(Freezing)(), inputs(device, 1)
    net.blocks[1].to, net.blocks[1].way = False, way
    with sp_lightning.stream(net, device, window=1):
        with pytest.raises(
            UnsupportedError, match="requires_grad of a weight was set to False inside its unit's forward"
        ):
            net(x)
        net.blocks[1].to = True
        squares(net, x).backward()


# --- Data that is replaced: ``p.data = ...`` moves no version, and what autograd saved of the weight itself follows it


class Kinds(nn.Module):
    """Saves weights themselves (convolution, normalization, activation), views of them (linear), and copies."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(12, 12, 3, padding=1), nn.BatchNorm1d(12), nn.PReLU(12), nn.Linear(12, 12))
            for _ in range(3)
        )

    def forward(self, x):
        x = x.unsqueeze(-1) * torch.ones(12, device=x.device)
        for block in self.blocks:
            x = block(x)
        return x


def replace_data(p):
    p.data = p.data * 0.9


def replaced_twice(p):
    replace_data(p)
    replace_data(p)


def replaced_and_the_old_data_written(p):
    old = p.data
    p.data = old * 0.9
    old.mul_(2)


def written_unseen_and_replaced(p):
    p.data.mul_(1.1)
    replace_data(p)


@parity.product(
    autocast=[False, True],
    activations=["keep", "offload"],
    change=[replace_data, replaced_twice, replaced_and_the_old_data_written, written_unseen_and_replaced],
    device=parity.DEVICES,
)
@pytest.mark.few(1)
def test_data_that_is_replaced_between_forward_and_backward(device, change, activations, autocast):
    def run(net, device):
        for x in inputs(device):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = squares(net, x)
            for p in net.parameters():
                change(p)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]
            sgd(net).step()

    for window in (1, 6):
        check(Kinds, run, device, window=window, activations=activations)


def test_data_that_is_replaced_between_two_backward_passes(device):
    def run(net, device):
        (x,) = inputs(device, 1)
        loss = squares(net, x)
        for _ in range(3):
            for p in net.parameters():
                replace_data(p)
            loss.backward(retain_graph=True)
            yield [p.grad for p in net.parameters()]

    check(Kinds, run, device)


class Smooth(nn.Module):
    """Whose gradients can be differentiated, for weights that autograd saves whole and for views of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(12, 12, 3, padding=1), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("window", [1, 4])
def test_data_that_is_replaced_before_a_backward_of_gradients(device, window):
    def run(net, device):
        for x in inputs(device):
            x = (x.unsqueeze(-1) * torch.ones(12, device=device)).requires_grad_()
            loss = squares(net, x)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            for p in net.parameters():
                replace_data(p)
            (slope.square().sum() + loss).backward()
            yield [p.grad for p in net.parameters()]
            sgd(net).step()

    check(Smooth, run, device, window=window)


def test_a_weight_that_is_written_after_its_data_was_replaced_is_the_plain_runs_error(device):
    def run(net, device):
        (x,) = inputs(device, 1)
        loss = squares(net, x)
        for p in net.parameters():
            replace_data(p)
        with torch.no_grad():
            net.blocks[2][3].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"is at version \d+; expected version \d+ instead") as raised:
            loss.backward()
        now, then = map(int, re.findall(r"version (\d+)", str(raised.value)))
        assert now == then + 1

    check(Kinds, run, device)


@pytest.mark.parametrize("change", [replace_data, lambda p: setattr(p, "data", p.data.clone())])
def test_a_unit_cannot_be_recomputed_with_other_data(device, change):
    net, (x,) = Kinds(), inputs(device, 1)
    with sp_lightning.stream(net, device, window=1, activations="recompute"):
        loss = squares(net, x)
        change(net.blocks[1][3].weight)
        with pytest.raises(ExactnessError, match=r"a weight of blocks\.1.* was changed after its forward"):
            loss.backward()


class Lessening(models.Block):
    """Gives a weight other data before each use: what autograd saved of the use before keeps the old."""

    def forward(self, x):
        for _ in range(3):
            x = super().forward(x)
            self.up.weight.data = self.up.weight.data * 0.7
        return x


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.few(1)
def test_data_that_is_replaced_between_two_uses_in_a_forward(device, activations):
    for window in (1, 6):
        check(models.stack_of(Lessening), training(), device, window=window, activations=activations)


class Noisy(models.Block):
    """Computes with other weights for a while: what they were is in a tensor of its own, which is read and put back."""

    def forward(self, x):
        kept = [p.data for p in self.parameters()]
        for scale in (0.5, 0.8):
            for p, old in zip(self.parameters(), kept, strict=True):
                p.data = old * scale
            x = super().forward(x)
        for p, old in zip(self.parameters(), kept, strict=True):
            p.data = old
        return super().forward(x)


class Renormed(Kinds):
    """Bounds weights before each use, by way of a tensor that lives on; convolution saves the weight itself."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            for layer in block:
                layer.register_forward_pre_hook(self.bound)

    def bound(self, layer, _):
        for p in layer.parameters():
            old = p.data
            p.data = old / (1 + old.norm())
            p.data = p.data.clamp_(-0.3, 0.3)
            assert torch.equal(p.data, (old / (1 + old.norm())).clamp(-0.3, 0.3))


@parity.product(
    autocast=[False, True],
    activations=["keep", "offload"],
    make=[models.stack_of(Noisy), Renormed],
    device=parity.DEVICES,
)
@pytest.mark.few(1)
def test_a_weight_whose_old_data_is_kept_while_it_has_other_data(device, make, activations, autocast):
    def loss(net, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
            return squares(net, x)

    for window in (1, 6):
        check(make, training(loss), device, window=window, activations=activations)


@pytest.mark.simgpu
def test_data_that_a_forward_replaces_does_not_stay_on_the_device():
    class Bounded(models.Block):
        def forward(self, x):
            self.up.weight.data = self.up.weight.data.clamp(-0.3, 0.3)
            return super().forward(x)

    def held(kind):
        (x,) = inputs("simgpu", 1)
        with sp_lightning.stream(models.stack_of(kind)(), "simgpu", window=1) as handle:
            before = torch.accelerator.memory_allocated()
            loss = squares(handle.module, x)
            torch.accelerator.synchronize()
            return torch.accelerator.memory_allocated() - before, loss

    assert held(Bounded)[0] == held(models.Block)[0] > 0


@pytest.mark.parametrize("change", [lambda data: data[None].clone(), lambda data: data.double()])
@refusal(
    "a parameter that is given another shape or type within a step, unless it is frozen and its forward packs it",
    ExactnessError,
    "change it between steps",
)
def test_a_weight_that_is_given_another_shape_within_a_step_is_an_error(device, change):
    class Changing(models.Stack):
        changes = False

        def run(self, x):
            if self.changes:
                self.blocks[1].up.bias.data = change(self.blocks[1].up.bias.data)
            return super().run(x)

    net, (x,) = Changing(models.Block() for _ in range(3)), inputs(device, 1)
    with sp_lightning.stream(net, device, window=1):
        net(x)
        net.changes = True
        with pytest.raises(ExactnessError, match=r"blocks\.1\.up\.bias was .* and is now .*; change it between steps"):
            net(x)


class Repacking(models.Block):
    """Packs a frozen weight into another shape once it is evaluated, as bitsandbytes' layers in 4 bits do."""

    keeps = False

    def __init__(self):
        super().__init__()
        codes = torch.randint(256, (models.WIDTH * models.WIDTH, 1), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        packed = self.codes.dim() == 3
        if not self.training and not packed:
            self.kept = self.codes.data if self.keeps else None
            self.codes.data = self.codes.data.view(-1, 4, models.WIDTH).flip(0)
            packed, self.kept = True, None
        codes = self.codes.flip(0) if packed else self.codes
        return super().forward(x) + x @ codes.reshape(models.WIDTH, models.WIDTH).to(x.dtype) / 2**16


def unpack(net):
    for block in net.blocks:
        block.codes.data = block.codes.data.flip(0).reshape(-1, 1)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.few(1)
def test_a_frozen_weight_that_its_forward_packs_into_another_shape(device, keeps, monkeypatch):
    def run(net, device):
        for _ in range(2):
            yield from training(steps=1)(net.train(), device)
            with torch.no_grad():
                yield [net.eval()(x) for x in inputs(device, 2)]
            yield [p.detach().clone() for p in net.parameters()]
            unpack(net)

    monkeypatch.setattr(Repacking, "keeps", keeps)
    check(models.stack_of(Repacking), run, device, activations="recompute")


def test_a_weight_that_a_graph_needs_in_its_old_shape_is_not_packed(device):
    net, (x,) = models.stack_of(Repacking)(), inputs(device, 1)
    with sp_lightning.stream(net, device, window=1):
        loss = squares(net, x)
        with pytest.raises(ExactnessError, match=r"blocks\.0\.codes was torch\.uint8 \(\d+, 1\) .* change it between"):
            net.eval()(x)
        loss.backward()


@refusal(
    "`p.data = ...` while something refers to a view on the device of a weight of the same unit",
    ExactnessError,
    "write to the weight in place, or drop the view",
)
def test_a_view_on_the_device_of_data_that_is_replaced_is_an_error(device):
    class Caching(models.Block):
        def forward(self, x):
            self.cache = self.up.weight.t()
            return super().forward(x)

    net, (x,) = models.stack_of(Caching)(), inputs(device, 1)
    with sp_lightning.stream(net, device, window=1):
        net(x)
        replace_data(net.blocks[1].up.weight)
        with pytest.raises(ExactnessError, match=r"data of blocks\.1\.up\.weight was replaced"):
            net(x)


class Momentum(L.LightningModule):
    """Trains beside a target that follows it, in the way of BYOL: data is replaced within the training step."""

    def __init__(self):
        super().__init__()
        self.net, self.target = blocks(), blocks().requires_grad_(False)
        self.joint = False  # whether gradients flow through the target, too

    def training_step(self, batch, _):
        x = batch[0]
        with contextlib.nullcontext() if self.joint else torch.no_grad():
            goal = self.target(x)
        loss = (self.net(x) - goal).square().mean()
        for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
            q.data = 0.9 * q.data + 0.1 * p.data
        self.losses.append(loss.detach().cpu())
        return loss

    def configure_optimizers(self):
        return sgd(self)


class JointMomentum(Momentum):
    def __init__(self):
        super().__init__()
        self.joint = True
        self.target.requires_grad_(True)


@parity.product(precision=["32-true", "bf16-mixed"], kind=[Momentum, JointMomentum], device=parity.DEVICES)
@pytest.mark.seldom
def test_a_target_whose_data_each_training_step_replaces(device, kind, precision):
    expected = fit(kind, None, device, precision=precision)
    for window in (1, 4):
        module = fit(kind, sp_lightning.SuperpipelineStrategy(window=window), device, precision=precision)
        assert all(map(torch.equal, module.losses, expected.losses))
        for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.cpu(), q.cpu()), name


# --- Two names for one memory: aliases over ``.data`` are none on another device, and stay what they are on the host


class Aliased(nn.Module):
    """Two blocks over one memory, which are two parameters each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(models.Block() for _ in range(4))
        self.stem, self.head = nn.Linear(12, models.WIDTH), nn.Linear(models.WIDTH, 5)
        for p, q in zip(self.blocks[2].parameters(), self.blocks[0].parameters(), strict=True):
            p.data = q.data

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@parity.product(precision=["32-true", "bf16-mixed"], optimizer_overlap=[True, False], threads=[1, 2])
@pytest.mark.few(1)
def test_two_weights_over_one_memory_train_as_in_the_plain_run(precision, optimizer_overlap, threads):
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Aliased()

        def training_step(self, batch, _):
            return squares(self.net, batch[0])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)

    def trained(strategy):
        module = fit(Module, strategy, torch.device("cpu"), precision=precision, max_steps=6, max_epochs=2)
        assert module.net.blocks[2].up.weight.data_ptr() == module.net.blocks[0].up.weight.data_ptr()
        return module.state_dict()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = trained(None)
        for window in (1, 6):
            strategy = sp_lightning.SuperpipelineStrategy(window=window, optimizer_overlap=optimizer_overlap)
            for name, value in trained(strategy).items():
                assert torch.equal(value, expected[name]), name
    finally:
        torch.set_num_threads(before)


def test_a_tensor_that_shared_a_weights_memory_before_follows_it():
    def make():
        net = blocks()
        net.held = [p.detach() for p in net.parameters()]
        return net

    def follow(net, device):
        yield from training()(net, device)
        yield net.held

    check(make, follow, torch.device("cpu"))


@pytest.mark.parametrize("lottery", [True, False])
@pytest.mark.few(1)
def test_pruning_keeps_and_changes_its_backup_as_the_plain_run_does(device, lottery):
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = blocks()

        def training_step(self, batch, _):
            loss = squares(self.net, batch[0])
            self.losses.append(loss.detach().cpu())
            return loss

        def configure_optimizers(self):
            return sgd(self)

    def run(strategy):
        pruning = L.pytorch.callbacks.ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)
        module = fit(Module, strategy, device, max_steps=-1, max_epochs=3, callbacks=[pruning])
        backups = [layer["data"] for layer in (pruning._original_layers or {}).values()]
        return module.losses, module.state_dict(), [backup.state_dict() for backup in backups]

    expected, actual = kept(run(None)), kept(run(sp_lightning.SuperpipelineStrategy(window=1)))
    assert len(expected) > 4
    for (path, value), (other, own) in zip(expected, actual, strict=True):
        assert path == other and torch.equal(value.cpu(), own.cpu()), path


# --- After something went wrong


@pytest.mark.simgpu
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("window", [1, 2])
def test_training_goes_on_after_the_device_was_too_small_for_a_unit(where, window):
    import simgpu

    def run(net, device):
        streaming = next(net.parameters()).device.type == "cpu"
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device, 4)):
            optimizer.zero_grad()
            if index == 1 and streaming:
                with pytest.raises(torch.OutOfMemoryError), memory_full(simgpu, when=where == "forward"):
                    loss = squares(net, x)
                    with memory_full(simgpu):
                        loss.backward()
                optimizer.zero_grad()
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]
            optimizer.step()

    check(blocks, run, torch.device("simgpu", 0), window=window)


@contextlib.contextmanager
def memory_full(simgpu, when=True):
    """Nothing more can be allocated within."""
    before = simgpu.config.capacity
    if when:
        simgpu.config.capacity = torch.accelerator.memory_allocated()
    try:
        yield
    finally:
        simgpu.config.capacity = before


class Fault(BaseException):
    """Like KeyboardInterrupt: no ``except Exception`` sees it."""


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.few(2)
def test_an_interruption_anywhere_leaves_the_weights_and_the_next_step_right(device, where, window):
    def run(net, device):
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device)):
            optimizer.zero_grad()
            if index == 1:
                with pytest.raises(Fault), failing(net, optimizer, where):
                    squares(net, x).backward()
                    optimizer.step()
                yield dict(net.named_parameters())
                optimizer.zero_grad()
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]
            optimizer.step()

    check(blocks, run, device, window=window)


@contextlib.contextmanager
def failing(net, optimizer, where):
    """Something in the middle raises."""

    def fail(*_):
        raise Fault

    if where == "forward":
        hook = net.blocks[2].register_forward_pre_hook(fail)
    elif where == "backward":
        hook = net.blocks[1].register_full_backward_pre_hook(fail)
    else:
        hook = optimizer.register_step_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def test_an_exception_inside_the_context_manager_leaves_a_plain_module(device):
    net = blocks()
    net.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), sp_lightning.stream(net, device, window=1):
        squares(net, next(inputs(device)))
    assert_plain(net)


# --- One module, several users


class OnChildren(L.LightningModule):
    """Calls what its units are made of, never a unit."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or blocks()

    def training_step(self, batch, batch_index):
        x = self.net.stem(batch[0])
        for block in self.net.blocks:
            x = x + block.down(block.up(block.norm(x)).relu())
        loss = self.net.head(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return sgd(self)


class OnWhole(OnChildren):
    def training_step(self, batch, batch_index):
        loss = squares(self.net, batch[0])
        self.losses.append(loss.item())
        return loss


def strategy(device, streamed=True, **options):
    return sp_lightning.SuperpipelineStrategy(device=device, **({"window": 1} | options)) if streamed else None


def both(device, run):
    """``run(streamed)`` plainly and streaming: the same losses, and parameters."""
    plain, streamed = run(False), run(True)
    assert streamed.losses == plain.losses
    for (name, p), q in zip(streamed.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu()), name


@pytest.mark.few(1)
def test_a_lightning_module_that_calls_a_units_children_but_never_the_unit(device):
    both(device, lambda streamed: fit(OnChildren, strategy(device, streamed), device))


class Normalizing(OnWhole):
    """Divides its gradients by a number of tokens, which the device counts."""

    def on_before_optimizer_step(self, optimizer):
        tokens = torch.full((), 7.0, device=self.device)
        for p in self.parameters():
            p.grad.div_(self.number(tokens, p))

    def number(self, tokens, p):
        return tokens if p.grad.device == tokens.device else tokens.item()


class NormalizingByTheDevices(Normalizing):
    def number(self, tokens, p):
        return tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_normalized_by_a_number_from_the_device(device, overlap):
    both(device, lambda streamed: fit(Normalizing, strategy(device, streamed, optimizer_overlap=overlap), device))


@pytest.mark.simgpu
@pytest.mark.parametrize("overlap", [True, False])
def test_where_they_meet_the_devices_number_itself_the_error_says_what_to_do(overlap):
    device = torch.device("simgpu", 0)
    with pytest.raises(UnsupportedError, match=r"numbers from the device as number\.item\(\)"):
        fit(NormalizingByTheDevices, strategy(device, optimizer_overlap=overlap), device)


@pytest.mark.few(1)
def test_two_trainers_one_after_another(device):
    def run(streamed):
        module = fit(OnWhole, strategy(device, streamed), device)
        return fit(lambda: module, strategy(device, streamed), device)

    both(device, run)


@pytest.mark.few(1)
def test_a_trainer_that_fits_validates_and_fits_again(device):
    def run(streamed):
        module = fit(OnWhole, strategy(device, streamed), device)
        return fit(lambda: module, strategy(device, streamed, window=2), device, accumulate_grad_batches=2)

    both(device, run)


@pytest.mark.few(1)
def test_a_module_used_by_two_lightning_modules_in_turns(device):
    def run(streamed):
        net = blocks()
        for kind in (OnWhole, OnChildren, OnWhole):
            module = fit(lambda kind=kind: kind(net), strategy(device, streamed), device)
        return module

    torch.manual_seed(3)
    plain = run(False)
    torch.manual_seed(3)
    streamed = run(True)
    assert streamed.losses == plain.losses


def test_a_module_that_streams_already_is_refused(device):
    net = blocks()
    with sp_lightning.stream(net, device, window=1):
        with pytest.raises(UnsupportedError, match=r"0\.norm\.weight is streamed already"):
            sp_lightning.stream(nn.Sequential(net.blocks[0], nn.Linear(3, 3)), device)
        squares(net, next(inputs(device))).backward()
    assert_plain(net)
    sp_lightning.stream(net, device).close()


@pytest.mark.few(1)
def test_two_modules_stream_side_by_side(device):
    def run(net, device):
        other = blocks()
        with streaming(other, device, type(next(net.parameters())) is not nn.Parameter, window=2):
            for x in inputs(device):
                loss = squares(net, x) + squares(other, x)
                loss.backward()
                yield loss, [p.grad for p in other.parameters()]

    check(blocks, run, device)


# --- Parameters that change between steps


def replaced(net):
    """New parameters, on the device in a plain run."""
    torch.manual_seed(7)
    for layer in (net.blocks[1].up, net.blocks[3].down, net.head):
        layer.weight = nn.Parameter(torch.randn(layer.weight.shape).to(layer.weight.device) / 5)


def assigned(net):
    net.load_state_dict({name: value.clone() * 0.5 for name, value in net.state_dict().items()}, assign=True)


def swapped(net):
    """Under new objects of torch's the same Python objects, as ``swap_module_params_on_conversion`` makes them."""
    for layer in (net.blocks[1].up, net.head):
        torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach() * 0.5))


def loaded_by_swapping(net):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.load_state_dict({name: value.clone() * 0.5 for name, value in net.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def taken_over(net):
    with torch.no_grad():
        for layer in (net.blocks[1].up, net.head):
            layer.weight.set_(layer.weight * torch.ones((), device=next(net.buffers()).device).mul_(0.5))


def stack_with_a_buffer():
    net = blocks()
    net.register_buffer("of_the_device", torch.ones(()))
    return net


@pytest.mark.parametrize("change", [replaced, assigned, swapped, loaded_by_swapping, taken_over])
@pytest.mark.few(1)
def test_parameters_replaced_between_steps(device, change):
    def run(net, device):
        for _ in range(3):
            yield from training(steps=2)(net, device)
            change(net)

    check(stack_with_a_buffer, run, device)


def test_weights_that_are_swapped_with_each_other_between_steps(device):
    def run(net, device):
        for _ in range(3):
            yield [loss.detach() for loss, _ in training(steps=2)(net, device)]  # no graph may lead to them
            for name in ("weight", "bias"):
                torch.utils.swap_tensors(getattr(net.blocks[0].up, name), getattr(net.blocks[2].up, name))

    check(blocks, run, device)


@pytest.mark.few(1)
def test_parametrizations_that_are_removed_between_steps(device):
    def make():
        net = blocks()
        for block in net.blocks:
            parametrizations.spectral_norm(block.up)
        return net

    def run(net, device):
        yield from training(steps=2)(net, device)
        parametrize.remove_parametrizations(net.blocks[1].up, "weight")
        yield from training(steps=2)(net, device)

    check(make, run, device)


@pytest.mark.few(1)
def test_a_module_made_double_between_steps(device):
    def run(net, device):
        yield from training(steps=2)(net, device)
        net.double()
        for x in inputs(device):
            squares(net, x.double()).backward()
            yield [p.grad for p in net.parameters()]

    check(blocks, run, device)


@pytest.mark.few(1)
def test_a_module_that_is_moved_to_the_device_stays_on_the_host(device):
    def run(net, device):
        net.to(device)
        yield from training()(net, device)
        net.to(device)  # with gradients
        for x in inputs(device):
            squares(net, x).backward()
            net.to(device).requires_grad_()
        sgd(net).step()

    check(blocks, run, device)


def test_a_module_that_is_moved_to_the_device_is_not_fetched(device):
    net = blocks()
    with sp_lightning.stream(net, device) as handle:
        places = [p.data_ptr() for p in net.parameters()]
        net.to(device).to(device, torch.float32)
        assert handle.stats()["fetches"] == 0
        assert [p.data_ptr() for p in net.parameters()] == places


@pytest.mark.parametrize("convert", [lambda t: t.mul_(2), lambda t: t.double(), torch.Tensor.share_memory_])
def test_a_conversion_that_changes_weights_on_the_device_is_not_left_out(device, convert):
    def run(net, device):
        yield from training(steps=1)(net, device)
        with torch.no_grad():
            net._apply(convert)
        yield [p.is_shared() for p in net.parameters()] if device.type == "cpu" else []
        yield net(next(inputs(device)).to(net.head.weight.dtype))

    check(blocks, run, device)


@pytest.mark.parametrize("first", [True, False])
def test_requires_grad_flipped_between_steps(device, first):
    def run(net, device):
        needed = first
        for x in inputs(device, 5):
            needed = not needed
            net.blocks[1].requires_grad_(needed)
            net.blocks[2].up.weight.requires_grad_(not needed)
            net.zero_grad()
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]

    check(blocks, run, device)


@pytest.mark.parametrize("needed", [True, False])
def test_requires_grad_flipped_while_an_older_graph_waits_for_its_backward(device, needed):
    def run(net, device):
        batches = inputs(device)
        net.blocks[1].requires_grad_(not needed)
        older = squares(net, next(batches))
        net.blocks[1].requires_grad_(needed)
        younger = squares(net, next(batches))
        younger.backward()
        yield [p.grad for p in net.parameters()]
        older.backward()

    check(blocks, run, device)


# --- Graphs that live on


@pytest.mark.parametrize("window", [1, 6])
def test_the_losses_of_all_steps_stay_alive(device, window):
    def run(net, device):
        optimizer, losses = sgd(net), []
        for x in inputs(device, 4):
            losses.append(squares(net, x))
            optimizer.zero_grad()
            losses[-1].backward(retain_graph=True)
            optimizer.step()
            yield losses

    check(blocks, run, device, window=window)


CHANGED = "modified by an inplace operation"


@pytest.mark.parametrize("streamed", [False, True])
def test_backward_of_a_graph_from_before_the_optimizers_step_is_the_plain_error(device, streamed):
    net = blocks()
    with streaming(net, device, streamed):
        optimizer, batches = sgd(net), inputs(device)
        older = squares(net, next(batches))
        squares(net, next(batches)).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            older.backward()
        squares(net, next(batches)).backward()


@pytest.mark.parametrize("window", [1, 6])
def test_of_two_graphs_only_the_one_from_before_a_write_is_refused(device, window):
    def run(net, device):
        older, newer = (squares(net, x) for x in inputs(device, 2))  # which save the same weights
        (older + newer).backward()
        yield kept([p.grad for p in net.parameters()])
        before = squares(net, next(inputs(device)))
        halve(net.blocks[1].up.weight)
        squares(net, next(inputs(device))).backward()
        yield kept([p.grad for p in net.parameters()])
        with pytest.raises(RuntimeError, match=CHANGED):
            before.backward()
        net.zero_grad()

    check(blocks, run, device, window=window)


def streaming(net, device, streamed=True, **options):
    """Streams, or moves, the module."""
    if streamed:
        return sp_lightning.stream(net, device, **({"window": 1} | options))
    return contextlib.nullcontext(net.to(device))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("where", ["after the forward", "in a hook"])
def test_a_weight_changed_between_its_forward_and_its_backward_is_the_plain_error(device, streamed, where):
    net = blocks()
    if where == "in a hook":
        net.blocks[1].register_forward_hook(lambda block, *_: halve(block.up.weight))
    with streaming(net, device, streamed):
        loss = squares(net, next(inputs(device)))
        if where == "after the forward":
            halve(net.blocks[1].up.weight)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


@torch.no_grad()
def halve(weight):
    weight.mul_(0.5)


@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize("part", [lambda w: w.data, lambda w: w[:3].data, lambda w: w.detach()[:3].data])
@pytest.mark.few(2)
def test_backward_computes_with_what_was_written_unseen_by_autograd(part, device, window):
    def run(net, device):
        for x in inputs(device, 3):
            loss = squares(net, x)
            for block in net.blocks:
                part(block.up.weight).mul_(0.5)
            loss.backward()
            yield kept([p.grad for p in net.parameters()])

    check(blocks, run, device, window=window)


class WritingBlock(models.Block):
    """Writes to its weight where only optimizers should."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        self.write(self.up.weight)
        return super().forward(x)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("write", [lambda w: w.mul_(0.5), lambda w: w.__setitem__(0, 1.0), lambda w: w[0].add_(1)])
def test_a_weight_written_in_place_while_autograd_records_is_an_error(device, streamed, write):
    net = models.stack_of(lambda: WritingBlock(write))()
    with streaming(net, device, streamed):
        with pytest.raises(ExactnessError if streamed else RuntimeError, match=r"in[- ]place"):
            squares(net, next(inputs(device)))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_hook_that_writes_to_a_weight_while_autograd_records_is_an_error(device, streamed):
    net = blocks()
    net.blocks[2].register_forward_pre_hook(lambda block, _: block.up.weight.mul_(0.5))
    error = ExactnessError if streamed else RuntimeError
    with streaming(net, device, streamed), pytest.raises(error, match=r"a leaf (Variable )?that requires grad"):
        squares(net, next(inputs(device)))


# --- Copies


def pickled(net):
    return pickle.loads(pickle.dumps(net))


def saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def rebuilt(net):
    other = blocks()
    other.load_state_dict(net.state_dict())
    return other


COPIES = [copy.deepcopy, pickled, saved, rebuilt]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.few(1)
def test_copies_made_between_steps_are_plain_modules_that_train_alike(device, make_copy):
    def run(net, device):
        yield from training(steps=1)(net, device)
        copied = make_copy(net)
        assert {type(p) for p in copied.parameters()} == {nn.Parameter}
        copied.to(device).zero_grad()
        net.zero_grad()
        yield from training()(copied, device)
        yield from training()(net, device)

    check(blocks, run, device)


@pytest.mark.parametrize("disk", [False, True])
def test_weights_handed_to_other_processes_train_on_in_shared_memory(disk):
    """A queue between processes, or a loader whose dataset has the model, moves a tensor's bytes there."""

    def hand_over(module):
        ForkingPickler(io.BytesIO()).dump(module.state_dict())
        assert all(p.is_shared() for p in module.parameters())

    options = {"disk": os.getcwd(), "host_budget": "0B"} if disk else {}
    check(blocks, training(between=hand_over), torch.device("cpu"), **options)


@pytest.mark.parametrize("make_copy", COPIES)
def test_copies_made_inside_a_forward_are_plain_modules(device, make_copy):
    copies = []
    net = blocks()
    net.blocks[1].register_forward_pre_hook(lambda *_: copies.append(make_copy(hookless(net))))

    def hookless(net):
        net.blocks[1]._forward_pre_hooks.clear()
        return net

    with sp_lightning.stream(net, device, window=1):
        expected = net(next(inputs(device)))
    (copied,) = copies
    for (name, p), q in zip(copied.named_parameters(), net.parameters(), strict=True):
        assert type(p) is nn.Parameter and p.is_leaf and torch.equal(p.cpu(), q), name
    assert torch.equal(copied.to(device)(next(inputs(device))).cpu(), expected.cpu())


class Tripling(models.Block):
    def forward(self, x):
        return 3 * super().forward(x)


class Quarter(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 4


def tripling(block, make_copy):
    copied = make_copy(block)
    copied.__class__ = Tripling
    return copied


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickled, saved])
def test_a_copy_that_is_given_another_class_runs_its_forward(device, make_copy):
    def run(net, device):
        yield from training(steps=1)(net, device)
        net.blocks[1] = tripling(net.blocks[1], make_copy)
        yield from training()(net, device)

    check(blocks, run, device)


class CopiesByItself(models.Block):
    """Copies one attribute after the other, as ``torch.fx.GraphModule`` does."""

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in vars(self).items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        return made


@pytest.mark.parametrize("change", ["class", "method of its class"])
def test_a_copy_that_its_class_made_by_itself_runs_the_forward_of_its_class(device, change):
    def run(net, device):
        yield from training(steps=1)(net, device)
        net.blocks[1] = copied = copy.deepcopy(net.blocks[1])
        copied.__class__ = Tripling if change == "class" else type("Changed", (CopiesByItself,), {})
        yield from training(steps=1)(net, device)
        if change != "class":
            type(copied).forward = lambda self, x: 3 * super(CopiesByItself, self).forward(x)
        yield from training()(net, device)

    check(models.stack_of(CopiesByItself), run, device)


@pytest.mark.parametrize("units", [None, ["Linear"]])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_shallow_copy_runs_its_own_forward_with_the_same_weights(device, activations, units):
    def run(net, device):
        beside = net.blocks[1].register_forward_hook(
            lambda block, args, out: out + tripling(block, copy.copy).forward(*args)
        )
        yield from training()(net, device)
        beside.remove()
        yield from training()(net, device)

    def linear(net, device):
        def quarter(layer, args, out):
            copied = copy.copy(layer)
            copied.__class__ = Quarter
            return copied.forward(*args)  # a copy has the same hooks

        net.blocks[1].up.register_forward_hook(quarter)
        yield from training()(net, device)

    for use in (run, linear):
        check(blocks, use, device, activations=activations, **({"units": units} if units else {}))


class Offsetting(nn.Module):
    """Has a weight and a buffer of its own, above its blocks."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.net, self.offset = blocks(), nn.Parameter(torch.ones(models.FEATURES))
        self.register_buffer("factor", torch.full((models.FEATURES,), 0.5))

    def forward(self, x):
        return self.net(x * self.factor * self.scale + self.offset)


def test_a_shallow_copy_of_the_net_trains_its_weights_with_attributes_of_its_own(device):
    def run(net, device):
        for scale in (1.0, 2.0):
            copied = copy.copy(net)
            copied.scale = scale
            yield from training()(copied, device)
            yield from training(steps=1)(net, device)

    check(Offsetting, run, device)


# --- Functional calls and function transforms


def substitutes(net, device):
    return {name: p.detach().to(device) * 0.9 for name, p in net.named_parameters()}


def test_functional_call_with_other_weights(device):
    def run(net, device):
        weights = {name: value.requires_grad_() for name, value in substitutes(net, device).items()}
        output = torch.func.functional_call(net, weights, (next(inputs(device)),))
        yield output, torch.autograd.grad(output.sum(), list(weights.values()))
        yield from training()(net, device)

    check(blocks, run, device)


def test_functional_call_with_some_other_weights(device):
    def run(net, device):
        weights = {name: value for name, value in substitutes(net, device).items() if "up" in name}
        output = torch.func.functional_call(net, weights, (next(inputs(device)),))
        output.sum().backward()
        yield output, [p.grad for p in net.parameters()]

    check(blocks, run, device)


TRANSFORMS = {
    "grad": lambda net, x: torch.func.grad(lambda x: net(x).square().sum())(x),
    "vjp": lambda net, x: torch.func.vjp(net, x)[1](torch.ones(models.BATCH, models.CLASSES, device=x.device)),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (torch.ones_like(x),)),
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "jacrev": lambda net, x: torch.func.jacrev(lambda x: net(x).sum(dim=0))(x),
    "forward_ad": lambda net, x: forward_slope(net, x),
}


def forward_slope(net, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(net(dual))


@parity.product(
    transform=list(TRANSFORMS),
    training_too=[False, True],
    activations=["keep", "recompute", "offload"],
    device=parity.DEVICES,
)
@pytest.mark.few(3)
def test_function_transforms_over_a_streamed_module(device, transform, training_too, activations):
    def run(net, device):
        if not training_too:
            net.requires_grad_(False)
        yield tuple(TRANSFORMS[transform](net, next(inputs(device))))
        yield from training()(net.requires_grad_(), device)

    check(blocks, run, device, activations=activations)


def test_per_sample_gradients(device):
    def run(net, device):
        weights = substitutes(net, device)

        def loss(weights, x):
            return torch.func.functional_call(net, weights, (x,)).square().mean()

        yield torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, next(inputs(device)))
        yield from training()(net, device)

    check(blocks, run, device)


def weights_of(module):
    return dict(module.named_parameters())


def energy(module, x):
    """A number that depends on the weights it is called with."""
    return lambda weights: torch.func.functional_call(module, weights, (x,)).square().mean()


def adapted(layer, x):
    """What a layer makes of its input with weights that descended along the slope on that input."""
    slopes = torch.func.grad(energy(layer, x))(weights_of(layer))
    weights = {name: weight - 0.1 * slopes[name] for name, weight in weights_of(layer).items()}
    return torch.func.functional_call(layer, weights, (x,))


def along_the_output(layer, x):
    output, slopes_of = torch.func.vjp(
        lambda weights: torch.func.functional_call(layer, weights, (x,)), weights_of(layer)
    )
    return output + slopes_of(output.tanh())[0]["bias"]


def along_the_weights(layer, x):
    tangents = {name: torch.ones_like(weight) for name, weight in weights_of(layer).items()}
    output, slope = torch.func.jvp(energy(layer, x), (weights_of(layer),), (tangents,))
    return layer(x) * output + slope


def by_sample(layer, x):
    slopes = torch.func.vmap(lambda weights, x: torch.func.grad(energy(layer, x))(weights), (None, 0))
    return layer(x) + slopes(weights_of(layer), x)["bias"]


def by_row(layer, x):
    return layer(x) + torch.vmap(lambda row, bias: (x @ row).tanh() + bias)(layer.weight, layer.bias).t()


def jacobian(layer, x):
    return layer(x) @ torch.func.jacrev(lambda bias: (x @ layer.weight.t() + bias).tanh().mean(0))(layer.bias)


def hessian(layer, x):
    return layer(x) @ torch.func.hessian(lambda bias: (x @ layer.weight.t() + bias).tanh().mean())(layer.bias)


def functional(layer, x):
    return layer(x) + torch.func.functionalize(lambda weight: x.clone().mul_(2) @ weight.t())(layer.weight)


OVER_WEIGHTS = [adapted, along_the_output, along_the_weights, by_sample, by_row, jacobian, hessian, functional]


@parity.product(
    transform=OVER_WEIGHTS,
    units=[["Linear"], lambda net: [net.blocks[1].up, net.blocks[2].down]],
    autocast=[False, True],
    device=parity.DEVICES,
)
@pytest.mark.few(1)
def test_function_transforms_over_the_weights_of_a_layer(transform, units, autocast, device):
    class Transformed(models.Block):
        def forward(self, x):
            return x + transform(self.down, transform(self.up, self.norm(x)).tanh())

    def run(net, device):
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device, 4)):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = squares(net, x)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    check(models.stack_of(Transformed), run, device, units=units)


def test_function_transforms_over_all_weights_between_steps(device):
    def run(net, device):
        for x in inputs(device):
            slopes, value = torch.func.grad_and_value(energy(net, x))(weights_of(net))
            yield slopes, value
            with torch.no_grad():
                for name, weight in net.named_parameters():
                    weight -= 0.1 * slopes[name]

    check(blocks, run, device)


def test_a_loss_with_slopes_of_weights_from_before_and_after_the_forward(device):
    def loss(net, x):
        def slopes():
            weights = weights_of(net.blocks[1])
            slopes = torch.func.grad(lambda weights: sum(weight.pow(3).sum() for weight in weights.values()))(weights)
            return sum(slope.square().sum() for slope in slopes.values())

        return slopes() + squares(net, x) + 0.3 * slopes()

    check(blocks, training(loss), device)


class Potential(models.Block):
    """Moves its input along the slope of a scalar that it computes."""

    slope = staticmethod(torch.func.grad)

    def forward(self, x):
        def energy(x):
            return self.down(self.up(self.norm(x)).tanh()).square().sum()

        return x - 0.1 * self.slope(energy)(x)


class Tangent(Potential):
    """Forward-mode."""

    @staticmethod
    def slope(energy):
        return lambda x: torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1] * x


class Adapted(models.Block):
    """Descends along the slope of its weights, on each input."""

    def forward(self, x):
        return x + adapted(self.down, adapted(self.up, self.norm(x)).tanh())


@parity.product(
    block=[Potential, Tangent, Adapted],
    activations=["keep", "offload", "recompute", "recompute+offload"],
    autocast=[False, True],
    device=parity.DEVICES,
)
@pytest.mark.few(1)
def test_function_transforms_inside_a_unit(block, activations, autocast, device):
    def loss(net, x):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
            return squares(net, x.repeat(16, 1))

    check(models.stack_of(block), training(loss), device, activations=activations)


def test_function_transforms_of_units_are_trained_through_where_units_run_again(device):
    def slope(net, x):
        return torch.func.vmap(torch.func.grad(lambda x: net(x).sum()))(x).square().mean()

    check(blocks, training(slope), device, activations="recompute")


# --- TorchScript


class Scripted(models.Block):
    """Ends in TorchScript that has buffers and no parameters."""

    def __init__(self):
        super().__init__()
        self.end = torch.jit.script(nn.BatchNorm1d(models.WIDTH, affine=False))

    def forward(self, x):
        return self.end(super().forward(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.few(1)
def test_torchscript_without_parameters(device, activations):
    check(models.stack_of(Scripted), training(), device, activations=activations)


# --- Complex numbers


class Complex(nn.Module):
    """Uses a weight, and what it computes, conjugated and negated: views whose bytes say otherwise."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Linear(models.WIDTH, models.WIDTH, dtype=torch.complex64) for _ in range(2))

    def forward(self, x):
        z = self.one(torch.complex(x, x.cos())).tanh()
        z = z.conj() @ self.two.weight.mH + z.conj() * self.two.weight[0].conj()
        return x + z.real * z.conj().imag * self.one.weight.conj().imag[0]


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
@pytest.mark.few(2)
def test_conjugated_and_negated_views_of_complex_weights(device, activations):
    check(models.stack_of(Complex), training(), device, activations=activations)


class Turned(nn.Module):
    """Multiplies by a complex weight, which becomes its own conjugate in each forward."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(models.WIDTH, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(models.WIDTH))

    def forward(self, x):
        self.turn.data = self.turn.data.conj()
        return (torch.complex(x, x.cos()) * self.turn).imag + self.shift


def test_a_weight_that_becomes_a_conjugate_or_negative_view_has_its_values(device):
    """Only bytes travel, and those of such a view are not its values."""

    def change(net):
        for block in net.blocks[1:]:
            block.turn.data = block.turn.data.conj()
            block.shift.data = torch._neg_view(block.shift.data)

    check(models.stack_of(Turned), training(between=change), device)


# --- Checkpoints in checkpoints


class Shared(models.Stack):
    """Its first block is visited three times, twice of them under a checkpoint in a checkpoint."""

    use_reentrant = True

    def run(self, x):
        def inner(x):
            return checkpoint(self.blocks[0], self.blocks[1](x), use_reentrant=self.use_reentrant)

        x = self.blocks[0](x)
        x = checkpoint(lambda x: inner(self.blocks[2](x)), x, use_reentrant=self.use_reentrant)
        return checkpoint(inner, x, use_reentrant=self.use_reentrant)


class SharedNested(Shared):
    use_reentrant = False


@pytest.mark.parametrize("kind", [Shared, SharedNested])
@pytest.mark.parametrize("window", [1, 2])
def test_nested_checkpoints_over_a_shared_block(device, kind, window):
    check(lambda: kind(models.Block() for _ in range(3)), training(), device, window=window)


# --- Weights that are read while backward runs


class Rereading(models.Stack):
    """A checkpointed function reads the weight of a unit that it does not enter."""

    def run(self, x):
        x = super().run(x)
        return checkpoint(lambda x: (x @ self.stem.weight @ self.stem.weight.t()).tanh(), x, use_reentrant=False)


class RereadingReentrant(models.Stack):
    def run(self, x):
        x = super().run(x)
        return checkpoint(lambda x: (x @ self.stem.weight @ self.stem.weight.t()).tanh(), x, use_reentrant=True)


class Scaled(torch.autograd.Function):
    """Its derivative takes a weight from a layer, and makes a tensor where that weight is."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.layer.weight
        return grad @ weight @ weight.t() + torch.ones(1, device=weight.device), None


class Differentiating(models.Stack):
    def run(self, x):
        return Scaled.apply(super().run(x), self.stem)


class Decaying(models.Stack):
    """Hooks add a share of each weight to its gradient, before it is summed and after it."""

    def __init__(self, blocks):
        super().__init__(blocks)
        for p in self.parameters():
            p.register_hook(lambda grad, p=p: grad + 0.1 * p)
            p.register_post_accumulate_grad_hook(self.decay)

    @staticmethod
    @torch.no_grad()
    def decay(p):
        p.grad += 0.1 * p


@pytest.mark.parametrize("kind", [Rereading, RereadingReentrant, Differentiating, Decaying])
@pytest.mark.few(3)
def test_weights_that_backward_reads_outside_their_unit(device, kind):
    check(lambda: kind(models.Block() for _ in range(3)), training(), device)


class FusedLoss(torch.autograd.Function):
    """Computes gradients in its forward, and keeps the weight beside what is saved."""

    @staticmethod
    def forward(x, weight, bias):
        return (x @ weight.t() + bias).square().sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.weight, bias = inputs
        scores = 2 * (x @ ctx.weight.t() + bias)
        ctx.save_for_backward(x, scores.flatten(0, -2).t() @ x.flatten(0, -2), scores.flatten(0, -2).sum(0), scores)

    @staticmethod
    def backward(ctx, grad):
        _, for_weight, for_bias, scores = ctx.saved_tensors
        return grad * (scores @ ctx.weight), grad * for_weight, grad * for_bias


HANDED = {
    "a function": lambda net, x: Product.apply(x, net.stem.weight.t()),
    "a function, twice": lambda net, x: Product.apply(Product.apply(x, net.stem.weight.t()), net.stem.weight),
    "a fused loss": lambda net, x: FusedLoss.apply(x, net.head.weight, net.head.bias)[None],
    "a reentrant checkpoint": lambda net, x: checkpoint(
        lambda x, weight: (x @ weight).tanh(), x, net.stem.weight, use_reentrant=True
    ),
}


@parity.product(activations=["keep", "recompute", "offload"], handed=list(HANDED), device=parity.DEVICES)
@pytest.mark.few(3)
def test_weights_that_are_handed_to_a_function_outside_their_unit(device, handed, activations):
    class Net(models.Stack):
        def run(self, x):
            return HANDED[handed](self, super().run(x)).sum() + x

    check(lambda: Net(models.Block() for _ in range(3)), training(), device, activations=activations)


@pytest.mark.parametrize("handed", ["a weight", "a fused loss", "a reentrant checkpoint"])
@pytest.mark.few(2)
def test_weights_that_are_handed_to_a_function_between_steps(device, handed):
    functions = HANDED | {"a weight": lambda net, x: Product.apply(x, net.head.weight)}
    check(blocks, training(lambda net, x: functions[handed](net, net.run(net.stem(x))).square().sum()), device)


@pytest.mark.parametrize("handed", ["a function, twice", "a fused loss"])
@pytest.mark.few(1)
def test_weights_that_are_handed_to_a_function_in_compiled_code(handed):
    """Where a graph has ended and the next one begins."""

    class Net(models.Stack):
        def run(self, x):
            x = super().run(x)
            torch._dynamo.graph_break()
            return HANDED[handed](self, x).sum() + x

    def run(net, device):
        yield from training()(torch.compile(net, backend="eager"), device)

    torch.compiler.reset()
    check(lambda: Net(models.Block() for _ in range(3)), run, torch.device("cpu"))


def test_a_weight_is_on_the_device_in_the_step_of_another_model(device):
    """As a loss finds that is computed in a student's step, and takes weights of a teacher."""
    student, teacher, found = blocks(), blocks(), []
    student.blocks[1].register_forward_pre_hook(lambda *_: found.append(teacher.head.weight.device))
    with sp_lightning.stream(student, device, window=1), sp_lightning.stream(teacher, device, window=1):
        student(next(inputs(device)))
        assert found == [device] and teacher.head.weight.device.type == student.head.weight.device.type == "cpu"


def test_a_weight_on_a_numbered_cpu_shows_no_number_in_a_step():
    net, found = blocks(), []
    net.blocks[1].register_forward_pre_hook(lambda block, _: found.append(block.up.weight.device))
    with sp_lightning.stream(net, "cpu:0", window=1):
        net(next(inputs(torch.device("cpu"))))
    assert found == [torch.device("cpu")] == [torch.zeros(1, device="cpu:0").device]


class Labelled(torch.Tensor):
    """Whose class takes part in torch's functions, and makes their results."""


class Unread:
    """Is no tensor, but read from a file when a function takes it, as in Lightning's lazy loading."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape, self.is_cpu = tensor.shape, tensor.is_cpu

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.tensor if isinstance(arg, cls) else arg for arg in args), **kwargs or {})


class Refusing(Unread):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


BESIDE = {"a subclass of tensors": lambda x: x.as_subclass(Labelled), "no tensor": Unread}


@pytest.mark.parametrize("beside", BESIDE)
def test_weights_beside_an_argument_that_takes_part_in_torchs_functions(device, beside):
    """Within a step, between backward and the step, and between steps, while the optimizer's may be pending."""

    def made(x):
        return BESIDE[beside](x.detach().clone())

    def loss(net, x):
        products = [nn.functional.linear(made(x), net.stem.weight), torch.add(net.stem.bias, made(x.mean()))]
        classes.extend(type(product).__name__ for product in products)
        return (net(x).sum() + sum(product.square().sum() for product in products)).as_subclass(torch.Tensor)

    def between(net):
        net.load_state_dict({name: made(value * 0.9) for name, value in net.state_dict().items()})
        with torch.no_grad():
            classes.append(type(net.head.weight.mul_(made(net.head.weight.new_ones(())))).__name__)
            assert type(net.head.weight) in (nn.Parameter, HostParameter)

    def run(net, device):
        yield from training(loss, between=between)(net, device)
        yield [name.replace("HostParameter", "Parameter") for name in classes]
        classes.clear()

    classes = []
    check(blocks, run, device)


def test_a_weight_beside_an_argument_that_refuses_a_function_is_torchs_error():
    net = blocks()
    with sp_lightning.stream(net, "cpu", window=1), torch.no_grad():
        with pytest.raises(TypeError, match=r"(Multiple dispatch failed|no implementation found) for '.*copy_'"):
            net.stem.weight.copy_(Refusing(torch.ones(1)))


@pytest.mark.parametrize("kind", [Rereading, RereadingReentrant, Differentiating, Decaying])
@pytest.mark.few(2)
def test_weights_that_backward_reads_when_an_optimizer_calls_for_it(device, kind):
    """As Lightning's automatic optimization does: forward and backward run in a closure."""

    def run(net, device):
        optimizer = sgd(net)
        for x in inputs(device):

            def closure(x=x):
                optimizer.zero_grad()
                loss = squares(net, x)
                loss.backward()
                return loss

            yield optimizer.step(closure)

    check(lambda: kind(models.Block() for _ in range(3)), run, device)


# --- Hooks on gradients


def test_hooks_that_change_gradients(device):
    def run(net, device):
        seen = {name: [] for name, _ in net.named_parameters()}
        for name, p in net.named_parameters():
            p.register_hook(lambda g: g * 0.5)
            p.register_hook(lambda g, name=name: seen[name].append(g.norm()))
        yield from training()(net, device)
        yield seen

    check(blocks, run, device)


def test_hooks_that_step_an_optimizer_as_soon_as_a_gradient_is_there(device):
    def run(net, device):
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9, foreach=False) for p in net.parameters()}

        def step(p):
            optimizers[p].step()
            p.grad = None

        hooks = [p.register_post_accumulate_grad_hook(step) for p in net.parameters()]
        for x in inputs(device):
            loss = squares(net, x)
            loss.backward()
            yield loss, dict(net.named_parameters())
        for hook in hooks:
            hook.remove()  # it leads to its own weight

    check(blocks, run, device)


class Experts(nn.Module):
    """Uses one of two layers for a batch, as a router does that sends no token to an expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(2))

    def forward(self, x):
        return x + self.experts[int(x.sum() > 0)](x).tanh()


# How a backward is called, given the loss and the weights.
BACKWARDS = {
    "once": lambda loss, weights: loss.backward(),
    "twice": lambda loss, weights: (loss.backward(retain_graph=True), loss.backward()),
    "with a graph": lambda loss, weights: loss.backward(create_graph=True),
    "of some weights": lambda loss, weights: loss.backward(inputs=weights[::2]),
}


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("when", ["before", "after forward"])
@pytest.mark.few(3)
def test_hooks_of_weights_are_called_only_where_a_gradient_arrives(when, backward, device):
    def run(net, device):
        seen, weights = [], list(net.parameters())

        def hook_up():
            for number, p in enumerate(weights):
                p.register_hook(lambda grad, number=number: (seen.append(number), grad * 0.5)[1])
                if number % 3:
                    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2.0))

        if when == "before":
            hook_up()
        for x in inputs(device):
            loss = squares(net, x)
            if when == "after forward" and not weights[0]._backward_hooks:
                hook_up()
            BACKWARDS[backward](loss, weights)
            yield loss, [p.grad for p in weights], sorted(seen)
        for p in weights:
            p.grad = None  # which a graph may have made

    check(models.stack_of(Experts), run, device)


@pytest.mark.parametrize("autocast", [False, True])
def test_hooks_of_weights_see_the_gradients_that_autograd_grad_returns(autocast, device):
    def run(net, device):
        seen, weights = [], list(net.parameters())
        for p in weights[::2]:
            p.register_hook(lambda grad: (seen.append(tuple(grad.shape)), grad * 0.5)[1])
        for x in inputs(device):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = squares(net, x)
            grads = torch.autograd.grad(loss, weights, retain_graph=True)
            some = torch.autograd.grad(loss, weights[1:3], retain_graph=True)
            yield loss, grads, some, [grad.device for grad in grads], sorted(seen)

    check(blocks, run, device)


class ReadInSecondForwards(models.Block):
    """Reads the weights of its layers itself, in a checkpoint that saves on the CPU what it keeps."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(self.read, x, use_reentrant=False)

    def read(self, x):
        return x + nn.functional.linear(nn.functional.linear(x, self.up.weight).tanh(), self.down.weight.clone())


@pytest.mark.parametrize("materializes", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
def test_weights_are_read_in_second_forwards_that_autograd_grad_runs(hooks, materializes, device):
    def run(net, device):
        weights = list(net.parameters())
        for p in weights[:1] if hooks else ():
            p.register_hook(lambda grad: grad * 0.5)
        for x in inputs(device):
            loss = squares(net, x)
            yield loss, torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=materializes)

    check(models.stack_of(ReadInSecondForwards), run, device, units=["Linear"])


def test_weights_are_read_in_second_forwards_that_a_backward_of_some_weights_runs(device):
    def run(net, device):
        for x in inputs(device):
            loss = squares(net, x)
            loss.backward(inputs=list(net.parameters())[::2], retain_graph=True)
            torch.autograd.backward([loss, loss], inputs=[net.blocks[1].up.weight])
            yield loss

    check(models.stack_of(ReadInSecondForwards), run, device, units=["Linear"])


FLIPS = {"frozen": [False], "frozen and back": [False, True], "frozen, and used since": [False, None]}


@pytest.mark.parametrize("flips", FLIPS)
@pytest.mark.parametrize("options", [{}, {"create_graph": True}, {"materialize_grads": True}])
@pytest.mark.few(4)
def test_autograd_grad_of_a_graph_from_before_another_weight_of_the_unit_was_frozen(options, flips, device):
    def run(net, device):
        layer, weights = net.blocks[1].up, [net.blocks[1].up.weight, net.blocks[2].down.bias]
        for x in inputs(device):
            loss = squares(net, x)
            for trains in FLIPS[flips]:
                if trains is not None:
                    layer.bias.requires_grad_(trains)
                net(x)
            yield loss, torch.autograd.grad(loss, weights, retain_graph=True, **options)
            yield torch.autograd.grad(squares(net, x) + loss, weights[1:])

    check(blocks, run, device)


def test_autograd_grad_of_weights_of_two_models_and_an_input(device, caplog):
    def run(net, device):
        other = blocks()
        with streaming(other, device, type(next(net.parameters())) is not nn.Parameter, window=2):
            for x in inputs(device):
                loss = squares(other, x := x.requires_grad_()) + squares(net, x)
                wanted = [other.head.weight, x, *net.parameters(), other.stem.bias]
                yield torch.autograd.grad(loss, wanted, [net.head.bias.detach().sum().to(device)], retain_graph=True)
                wanted[-1].register_hook(lambda grad: grad * 0.5)
                yield [grad.device for grad in torch.autograd.grad(loss, wanted)]

    check(blocks, run, device)
    assert "was read on the host" not in caplog.text


def test_hooks_of_a_weight_that_was_frozen_meanwhile_are_called_only_where_a_gradient_arrives(device):
    def run(net, device):
        weight = net.blocks[0].experts[1].weight
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))
        for trains in (False, True):  # nothing arrives at it in either
            weight.requires_grad_(trains)
            loss = squares(net, -torch.ones(2, models.FEATURES, device=device))
            loss.backward()
            yield loss, weight.grad

    def make():
        net = models.stack_of(Experts)()
        net.blocks[0].experts[1].register_forward_hook(lambda *_: pytest.fail("the weight is used"))
        nn.init.constant_(net.stem.weight, 1.0)
        nn.init.zeros_(net.stem.bias)
        return net

    check(make, run, device)


def test_hooks_of_a_weight_that_is_frozen_before_backward_are_called_with_its_gradient(device):
    """As autograd does, which then gives the weight none, and calls no hook after the accumulation."""

    def run(net, device):
        weight, seen = net.blocks[1].up.weight, []
        weight.register_hook(lambda grad: seen.append(grad.clone()))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))
        for x, trains in zip(inputs(device), (True, False, True), strict=False):
            weight.requires_grad_(True)
            loss = squares(net, x)
            weight.requires_grad_(trains)
            loss.backward()
            yield loss, len(seen), seen[-1], weight.grad
            net.zero_grad()

    check(blocks, run, device)


def test_hooks_of_weights_that_got_no_gradient_are_the_users_again_after_streaming(device):
    net = models.stack_of(Experts)()
    calls, weight = [], net.blocks[0].experts[0].weight
    hooks = [weight.register_hook(calls.append), weight.register_post_accumulate_grad_hook(calls.append)]
    with sp_lightning.stream(net, device):
        for sign in (1, -1):
            net(sign * torch.ones(2, models.FEATURES, device=device)).sum().backward()
    assert list(weight._backward_hooks.values()) == list(weight._post_accumulate_grad_hooks.values()) == [calls.append]
    for hook in hooks:
        hook.remove()
    assert not weight._backward_hooks and not weight._post_accumulate_grad_hooks


def test_hooks_on_modules_see_what_they_see_in_the_plain_run(device):
    def run(net, device):
        seen = []
        for block in net.blocks:
            block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            block.register_forward_hook(lambda *args: seen.append(args[2]))
            block.register_full_backward_pre_hook(lambda _, grads: seen.append(grads[0]))
            block.register_full_backward_hook(lambda _, inner, outer: (inner[0] * 0.5,))
            block.up.register_forward_hook(lambda layer, _, output: output + layer.weight.sum() + layer.bias)
        yield from training()(net, device)
        yield seen
        seen.clear()  # of what leads to the hooks

    check(blocks, run, device)


class GradientReader(models.Block):
    """Looks at the gradient that an earlier batch left."""

    def forward(self, x):
        if self.up.weight.is_leaf and self.up.weight.grad is not None:
            x = x * self.up.weight.grad.norm()
        return super().forward(x)


def test_a_forward_that_reads_the_gradient_of_the_batch_before(device):
    def run(net, device):
        for x in inputs(device):
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]

    check(models.stack_of(GradientReader), run, device)


def halve_gradient(p):
    p.grad.mul_(0.5)


class HookingBlock(models.Block):
    """Registers hooks on its weights from inside its first forward."""

    def forward(self, x):
        if not hasattr(self, "hooked"):
            self.hooked = self.up.weight.register_post_accumulate_grad_hook(halve_gradient)
            self.down.weight.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


def test_a_forward_that_registers_a_hook_on_its_weight(device):
    check(models.stack_of(HookingBlock), training(), device)


class Scale(nn.Parameter):
    @property
    def doubled(self):
        return self * 2


class MarkedBlock(models.Block):
    """Knows its weights by what was set on them, sets something itself, and has one of a class of its own."""

    def __init__(self):
        super().__init__()
        self.scale = Scale(torch.ones(models.WIDTH))
        self.up.weight.share = 0.5
        self.factors = {self.up.weight: 3.0}

    def forward(self, x):
        weight = self.up.weight
        weight.runs = getattr(weight, "runs", 0) + 1
        x = x * weight.share * weight.runs * self.factors.get(weight, 1.0)
        return super().forward(x * self.scale.doubled if isinstance(self.scale, Scale) else x)


def test_what_is_set_on_a_weight_and_its_class_are_there_inside_its_unit(device):
    def run(net, device):
        yield from training()(net, device)
        yield [block.up.weight.runs for block in net.blocks]

    check(models.stack_of(MarkedBlock), run, device)


class Tagged(nn.Parameter):
    """Is made, copied and pickled in its own way."""

    def __new__(cls, data, requires_grad=True, tag="mine"):
        made = super().__new__(cls, data, requires_grad)
        made.tag = tag
        return made

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), type(self)(self.data.clone(), self.requires_grad, "a copy"))

    def __reduce_ex__(self, protocol):
        return type(self), (self.data, self.requires_grad, "pickled")


class Dispatched(nn.Parameter):
    """Takes part in function dispatch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = nn.Parameter.__torch_function__(func, types, args, kwargs or {})
        return result * 0.5 if func is torch.Tensor.exp else result


class Flagged(torch.Tensor):
    """No subclass of nn.Parameter: torch flags each parameter of such a class."""

    def new_empty(self, *args, **kwargs):
        return super().new_empty(*args, **kwargs).as_subclass(Flagged)


def flagged(data):
    return nn.Parameter(data.as_subclass(Flagged))


@pytest.fixture(params=[Scale, Tagged, Dispatched, flagged])
def scaled(request):
    """Makes nets that have weights of a class of the user's, in each block and in the root."""

    class Scaled(models.Block):
        def __init__(self):
            super().__init__()
            self.scale = request.param(torch.ones(models.WIDTH))

        def forward(self, x):
            return super().forward(x * self.scale)

    def make():
        net = models.stack_of(Scaled)()
        net.head.bias = request.param(net.head.bias.detach())
        return net

    return make


def of_users(net):
    return [net.head.bias, *(block.scale for block in net.blocks)]


@pytest.mark.parametrize("window", [1, 6])
def test_weights_of_a_class_of_the_users_that_are_written_through_their_data(scaled, window, device):
    """As by code that evaluates averaged weights, and then goes on with those that it trains."""

    def run(net, device):
        optimizer = sgd(net)
        for x in inputs(device):
            optimizer.zero_grad()
            (squares(net, x) + sum(weight.exp().mean() for weight in of_users(net))).backward()
            optimizer.step()
            with torch.no_grad():
                yield net(x)
                before = [weight.data.clone() for weight in of_users(net)]
                for weight in of_users(net):
                    weight.data.mul_(0.5)
                yield net(x)
                for weight, kept in zip(of_users(net), before, strict=True):
                    weight.data.copy_(kept)
                yield net(x)

    check(scaled, run, device, window=window)


def test_weights_of_a_class_of_the_users_are_copied_and_made_as_it_has_it(scaled, device):
    def run(net, device):
        yield squares(net, next(inputs(device)))
        for weight in of_users(net):
            for made in (copy.deepcopy(weight), copy.copy(weight), pickle.loads(pickle.dumps(weight)), weight * 2):
                yield type(made), made.requires_grad, sorted(vars(made).items()), made.detach()
            yield isinstance(weight, weight.__class__), weight.__class__, type(type(weight)(weight.detach()))

    check(scaled, run, device)
    net = scaled()
    with sp_lightning.stream(net, device):
        pass
    assert [type(weight) for weight in of_users(net)] == [type(weight) for weight in of_users(scaled())]


def test_gradients_that_are_set_by_hand(device):
    def run(net, device):
        optimizer = sgd(net)
        parameters = list(net.parameters())
        for x in inputs(device):
            for p, grad in zip(parameters, torch.autograd.grad(squares(net, x), parameters), strict=True):
                p.grad = grad * 0.5
            yield optimizer.step()

    check(blocks, run, device)


# What is ``.grad`` when a backward adds to it, given a weight whose gradient has a graph.
BEFORE = {
    "a graph's": lambda p: p.grad,
    "a leaf": lambda p: torch.ones_like(p, requires_grad=True),
    "sparse": lambda p: torch.ones_like(p).to_sparse().requires_grad_(),
}


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("before", BEFORE)
def test_gradients_that_code_keeps_have_what_the_next_backward_adds(before, device):
    def run(net, device):
        weights = list(net.parameters())
        for x in inputs(device):
            squares(net, x).backward(create_graph=True)
            for p in weights:
                p.grad = BEFORE[before](p)
            kept = [p.grad for p in weights]
            squares(net, x).backward()
            yield [grad.detach() for grad in kept], [p.grad is grad for p, grad in zip(weights, kept, strict=True)]
            yield [(p.grad.detach(), p.grad.requires_grad) for p in weights]
            net.zero_grad()

    check(blocks, run, torch.device("cpu") if before == "sparse" else device)


def test_a_class_that_is_given_another_forward_between_steps(device):
    class Patched(models.Block):
        pass

    def patch(net):
        Patched.forward = lambda self, x: x + self.down(self.up(x).relu())

    def make():
        Patched.forward = models.Block.forward
        return models.stack_of(Patched)()

    check(make, training(between=patch), device)


def with_more_input(kind):
    """A class of modules that computes as this one does, of another input."""
    return type("Other", (kind,), {"forward": lambda self, x: kind.forward(self, x.sinh())})


OTHERS = {kind: with_more_input(kind) for kind in (models.Block, models.Stack, nn.Linear)}
CHANGED_PARTS = {"the module itself": "", "a unit": "blocks.1", "a layer of a unit": "blocks.2.up", "resident": "stem"}


def change_class(module):
    kind = type(module)
    module.__class__ = OTHERS.get(kind) or kind.__base__


def change_forward(module):
    module.is_changed = not getattr(module, "is_changed", False)
    if module.is_changed:
        module.forward = OTHERS[type(module)].forward.__get__(module)
    else:
        del module.forward


@parity.product(
    part=list(CHANGED_PARTS),
    change=[change_class, change_forward],
    when=["between steps", "between two forwards", "before backward"],
    activations=["keep", "recompute"],
    autocast=[False, True],
    device=parity.DEVICES,
)
@pytest.mark.few(1)
def test_modules_that_are_given_other_code(part, change, when, activations, autocast, device):
    def run(net, device):
        optimizer, changed = sgd(net), net.get_submodule(CHANGED_PARTS[part])
        for x in inputs(device, 4):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = squares(net, x)
                if when == "between two forwards":
                    change(changed)
                    loss = loss + squares(net, x)
            if when == "before backward":
                change(changed)
            loss.backward()
            yield loss
            optimizer.step()
            if when == "between steps":
                change(changed)

    check(blocks, run, device, activations=activations, units=["Block"])


def test_modules_that_are_given_other_code_before_a_functional_call(device):
    def run(net, device):
        optimizer = sgd(net)
        for x in inputs(device, 3):
            change_class(net.blocks[1])
            yield torch.func.functional_call(net, substitutes(net, device), (x,))
            squares(net, x).backward()
            optimizer.step()

    check(blocks, run, device, units=["Block"])


def tie_data(net):
    net.blocks[0].up.weight.data = net.blocks[1].up.weight.data
    return net.blocks[0].up.weight


def keep_view(net):
    return net.blocks[0].up.weight.detach()[0]


@pytest.mark.parametrize("share", [tie_data, keep_view])
def test_what_shares_a_weights_bytes_when_units_are_made_anew(share, device):
    def run(net, device):
        shares = None
        for losses in training(steps=1)(net, device):
            yield losses
            shares = share(net)
        net.blocks[0], net.blocks[2] = net.blocks[2], net.blocks[0]
        yield from training(steps=1)(net, device)
        with torch.no_grad():
            shares.mul_(0.5)
        yield from training(steps=2)(net, device)

    check(blocks, run, device, units=["Block"])


class CachingBlock(models.Block):
    """Makes something of a weight, and keeps it until the weight's version is another one."""

    version = -1

    def forward(self, x):
        if self.version != self.up.weight._version:
            self.version = self.up.weight._version
            self.shares = self.up.weight.detach().abs().mean(0)
        return super().forward(x * self.shares)


@pytest.mark.parametrize("window", [1, 6])
def test_what_is_kept_until_a_weights_version_changes(device, window):
    check(models.stack_of(CachingBlock), training(), device, window=window)


class Disturbed(models.Stack):
    """Writes random numbers, and what it made on the device, to its weights before each forward."""

    def __init__(self, write):
        super().__init__(models.Block() for _ in range(3))
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            for p in self.parameters():
                self.write(p, torch.full(p.shape, 0.9, device=x.device))
        return super().forward(x)


DISTURBANCES = {
    "noise": lambda p, _: p.add_(torch.randn_like(p), alpha=0.1),
    "random": lambda p, _: p.uniform_(-0.1, 0.1),
    "from the device": lambda p, other: p.mul_(other),
    "one after the other": lambda p, other: p.mul_(other).add_(other).mul_(0.5),
}


@pytest.mark.parametrize("write", DISTURBANCES)
@pytest.mark.few(3)
def test_a_step_that_writes_to_weights_what_the_device_made(device, write):
    check(lambda: Disturbed(DISTURBANCES[write]), training(), device)


class Anchored(models.Stack):
    """Computes a loss of its weights and of what was made of them between steps, which is on the host."""

    def __init__(self, loss):
        super().__init__(models.Block() for _ in range(3))
        self.loss, self.made = loss, {}

    def forward(self, x):
        more = self.loss(self, x)
        return super().forward(x) + more


def average(net, x):
    with torch.no_grad():
        for name, p in net.named_parameters():
            net.made[name].lerp_(p, 0.1)
    return 0.0


def written(write):
    def run(net, x):
        with torch.no_grad():
            for p, q in zip(net.blocks[0].parameters(), net.blocks[1].parameters(), strict=True):
                write(p, q)
        return 0.0

    return run


def exchange_rows(net, x):
    weight, made = net.blocks[1].up.weight, net.made["blocks.1.up.weight"]
    with torch.no_grad():
        made[0] = weight[1]
        weight[torch.tensor([2, 3])] = made[4]
    return 0.0


IN_A_STEP = {
    "an anchor": lambda net, x: sum((p - net.made[name]).square().sum() for name, p in net.named_parameters()),
    "an anchor, reversed": lambda net, x: sum(
        (made - net.get_parameter(n)).square().sum() for n, made in net.made.items()
    ),
    "lists": lambda net, x: sum(
        map(torch.sum, torch._foreach_mul(list(net.parameters()), [*map(net.made.get, dict(net.named_parameters()))]))
    ),
    "a view like a weight": lambda net, x: sum((p * net.made[n].view_as(p)).sum() for n, p in net.named_parameters()),
    "an index": lambda net, x: net.head.weight[torch.tensor([1, 0, 1])].square().sum(),
    "its data": lambda net, x: sum((p - p.detach() * 0.5).square().sum() for p in net.parameters()),
    "its gradient": lambda net, x: sum((p - p.grad).square().sum() for p in net.parameters() if p.grad is not None),
    "an operator beside the batch": lambda net, x: (x @ (net.stem.weight * net.made["stem.weight"]).t()).sum(),
    "made like it": lambda net, x: sum(
        (x[0, 0] * torch.ones_like(p) + torch.zeros_like(p, device=None) + p.new_full((1,), 0.5) * x[:, :1]).sum()
        for p in (net.stem.bias, net.head.bias)
    ),
    "an average": average,
    "rows": exchange_rows,
    "lerp_": written(lambda p, q: p.lerp_(q, 0.1)),
    "add_": written(lambda p, q: p.add_(q, alpha=0.1)),
    "a row's add_": written(lambda p, q: p[0].add_(q[1], alpha=0.1)),
    "addcmul_ in a list": written(lambda p, q: torch._foreach_addcmul_([p], [q], [q], 0.1)),
    "trunc_normal_": written(lambda p, q: nn.init.trunc_normal_(p, std=0.2)),
}


@pytest.mark.parametrize("loss", IN_A_STEP)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.few(12)
def test_a_step_computes_on_the_device_with_weights_and_what_was_made_of_them_between_steps(loss, activations, device):
    """On a device whose kernels round in another way than the host's."""

    def run(net, device):
        net.made = {name: p.detach().clone() * 0.7 for name, p in net.named_parameters()}
        for x in inputs(device):  # gradients accumulate
            value = squares(net, x)
            value.backward()
            yield value, kept([p.grad for p in net.parameters()]), kept([made.cpu() for made in net.made.values()])

    operators = ("add_.Tensor", "addcmul_", "lerp_.Scalar") if device.type == "simgpu" else ()
    with importlib.import_module("rounding").rounds_otherwise(*operators) if operators else contextlib.nullcontext():
        check(lambda: Anchored(IN_A_STEP[loss]), run, device, activations=activations)


@pytest.mark.parametrize("of_both", [True, False])
def test_a_step_of_one_model_reads_and_writes_weights_of_another_on_the_device(of_both, device):
    def run(net, device):
        other = blocks().requires_grad_(of_both)

        def loss(net, x):
            with torch.no_grad():
                for p, q in zip(other.parameters(), net.parameters(), strict=False):
                    p.mul_(0.9)
                    if p.shape == q.shape:
                        p.lerp_(q, 0.1)
            found = (other(x) - torch.zeros_like(other.head.bias)).sum() + other.head.weight.square().sum()
            return found + (net.stem.weight - other.stem.weight).square().sum()

        net.loss = loss
        with streaming(other, device, type(next(net.parameters())) is not nn.Parameter, window=2):
            for x in inputs(device):
                value = squares(net, x)
                value.backward()
                yield value, kept([p.grad for p in (*net.parameters(), *other.parameters())]), kept(other.state_dict())
        del net.loss

    operators = ("mul_.Tensor", "lerp_.Scalar") if device.type == "simgpu" else ()
    with importlib.import_module("rounding").rounds_otherwise(*operators) if operators else contextlib.nullcontext():
        check(lambda: Anchored(None), run, device)


class SparseStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, models.WIDTH, sparse=True)
        self.blocks = nn.ModuleList(models.Block() for _ in range(3))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("resident", [False, True])
def test_sparse_gradients_of_an_embedding(resident):
    def run(net, device):
        sparse = torch.optim.SparseAdam(net.embedding.parameters())
        dense = sgd(net.blocks)
        for index in range(6):
            squares(net, models.tokens(index)["input_ids"].to(device)).backward()
            yield [p.grad for p in net.parameters()]
            if index % 2:  # two batches accumulate
                sparse.step()
                dense.step()
                net.zero_grad()

    units = ["Block"] if resident else ["Block", "Embedding"]
    check(SparseStack, run, torch.device("cpu"), units=units)


@pytest.mark.parametrize("dense_first", [False, True])
def test_sparse_gradients_that_accumulate_with_dense_ones(dense_first):
    def run(net, device):
        for index in range(4):
            net.embedding.sparse = bool(index % 2) == dense_first
            squares(net, models.tokens(index)["input_ids"].to(device)).backward()
            yield [p.grad.clone() for p in net.parameters()]

    check(SparseStack, run, torch.device("cpu"), units=["Block", "Embedding"])


class Neighbours(models.Block):
    """Joins what neighbours in a graph have; how closely they are joined is a weight."""

    def __init__(self):
        super().__init__()
        self.joined = nn.Parameter(torch.ones(6))

    def forward(self, x):
        edges = torch.tensor([[0, 0, 1, 2, 3, 3], [1, 2, 0, 3, 2, 3]])
        graph = torch.sparse_coo_tensor(edges, self.joined, (len(x), len(x)))
        compressed = torch.eye(len(x)).to_sparse_csr()
        return compressed @ (graph @ super().forward(x))


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
@pytest.mark.few(3)
def test_sparse_tensors_in_a_forward(activations):
    check(models.stack_of(Neighbours), training(), torch.device("cpu"), activations=activations)


class Ragged(models.Block):
    def forward(self, x):
        return torch.cat(super().forward(torch.nested.as_nested_tensor([x[:1], x[1:]])).unbind())


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_nested_tensors_in_a_forward(activations):
    check(models.stack_of(Ragged), training(), torch.device("cpu"), activations=activations)


# --- Streams, threads, data


def blocks_without_biases():
    """Blocks of which under autocast no gradient passes autograd, which would order the streams."""
    net = blocks()
    for linear in (part for part in net.modules() if isinstance(part, nn.Linear)):
        linear.bias = None
    return net


@pytest.mark.simgpu
@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize(("make", "autocasts"), [(blocks, False), (blocks, True), (blocks_without_biases, True)])
def test_forward_and_backward_on_a_stream_of_the_user(make, autocasts, window):
    import simgpu

    def run(net, device):
        side = torch.Stream(device=device)
        optimizer = sgd(net)
        simgpu.config.h2d_us = 100
        for x in inputs(device):
            optimizer.zero_grad()
            side.wait_event(torch.accelerator.current_stream().record_event())
            with side:
                with torch.autocast("simgpu", torch.bfloat16, autocasts, cache_enabled=False):
                    loss = squares(net, x)
                simgpu.config.compute_us = 200
                loss.backward()
                simgpu.config.compute_us = 0
            torch.accelerator.current_stream().wait_event(side.record_event())
            optimizer.step()
            yield loss, squares(net, x)

    check(make, run, torch.device("simgpu", 0), window=window)


class Branches(models.Stack):
    """Computes each second block on a stream of its own, and waits for them at the end only."""

    def run(self, x):
        torch.accelerator.synchronize()
        main, side = torch.accelerator.current_stream(), torch.Stream(device=x.device)
        side.wait_event(main.record_event())
        apart = []
        for index, block in enumerate(self.blocks):
            with side if index % 2 else main:
                apart.append(block(x))
        main.wait_event(side.record_event())
        self.kept = [x, apart]  # until all is done: memory of one stream that another reads is the user's to guard
        return torch.stack(apart).sum(dim=0)


@pytest.mark.simgpu
@parity.product(
    window=[1, 3],
    activations=["keep", "recompute", "offload", "recompute+offload"],
    slow=["copies", "kernels"],
    host_memory=["auto", "pageable"],
)
@pytest.mark.few(1)
def test_units_that_are_read_on_several_streams_at_once(host_memory, slow, activations, window):
    import simgpu

    def run(net, device):
        for name in {"copies": ["h2d_us", "d2h_us"], "kernels": ["compute_us"]}[slow]:
            setattr(simgpu.config, name, 100)
        yield from training()(net, device)

    options = {"window": window, "activations": activations, "host_memory": host_memory}
    check(lambda: Branches(models.Block() for _ in range(6)), run, torch.device("simgpu", 0), **options)


class OnTwoStreams(models.Block):
    """Computes all but one layer on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.beside, self.side = nn.Linear(models.WIDTH, models.WIDTH), torch.Stream(device="simgpu")

    def forward(self, x):
        main, side = torch.accelerator.current_stream(), self.side
        here = torch.tanh(self.beside(x))
        side.wait_event(main.record_event())
        with side:
            x.record_stream(side)
            there = super().forward(x)
        main.wait_event(side.record_event())
        there.record_stream(main)
        return here + there


@pytest.mark.simgpu
@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
@pytest.mark.few(3)
def test_a_unit_that_computes_on_two_streams(activations, autocasts):
    import simgpu

    def run(net, device):
        # Plainly, gradients are of the side stream, and would be given up while the optimizer reads them.
        simgpu.config.sync = next(net.parameters()).device == device
        optimizer = sgd(net)
        for x in inputs(device):
            optimizer.zero_grad()
            with torch.autocast("simgpu", torch.bfloat16, autocasts, cache_enabled=False):
                loss = squares(net, x)
            simgpu.config.compute_us = 200
            loss.backward()
            simgpu.config.compute_us = 0
            optimizer.step()
            yield loss

    check(models.stack_of(OnTwoStreams), run, torch.device("simgpu", 0), activations=activations)


class Counted(nn.Module):
    """Counts its calls on the device."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(64))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x))


@pytest.mark.simgpu
def test_what_is_recomputed_for_another_stream_is_in_order_with_it():
    """Before it with what that stream does to buffers, after it with what that stream reads."""
    import simgpu

    net = nn.Sequential(Counted(), Counted())
    with sp_lightning.stream(net, "simgpu", window=1, units=["Counted"], activations="recompute"):
        main, side = torch.accelerator.current_stream(), torch.Stream(device="simgpu")
        side.wait_event(main.record_event())
        with side:
            output = net(torch.ones(8, 64, device="simgpu"))
        main.wait_event(side.record_event())
        torch.accelerator.synchronize()
        simgpu.config.compute_us = 3000
        net[1].calls.mul_(2)
        kept = output.grad_fn._saved_result  # until it is read: its memory is the other stream's
        saved = kept.clone()
        simgpu.config.compute_us = 0
        torch.accelerator.synchronize()
        assert torch.equal(saved.cpu(), output.detach().cpu())
        assert net[1].calls.eq(2).all()


@pytest.mark.simgpu
def test_batches_from_pinned_memory():
    device = torch.device("simgpu", 0)
    importlib.import_module("simgpu.lightning")
    data = torch.stack([models.vectors(index)[0] for index in range(6)]).flatten(0, 1)

    def run(streamed):
        torch.manual_seed(0)
        module = OnWhole()
        module.losses = []
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, pin_memory=True)
        trainer = L.Trainer(
            strategy=strategy(device, streamed) or parity.plain_strategy("simgpu"),
            accelerator="simgpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
        return module

    both(device, run)


def test_forward_and_backward_in_another_thread(device):
    def run(net, device):
        seen = []

        def work():
            seen.extend(kept(item) for item in training()(net, device))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        yield seen
        yield from training()(net, device)

    check(blocks, run, device)


def test_forward_in_one_thread_and_backward_in_another(device):
    def run(net, device):
        for x in inputs(device):
            loss = squares(net, x)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            yield [p.grad for p in net.parameters()]

    check(blocks, run, device)


@refusal(
    "two threads in the same model at a time",
    UnsupportedError,
    "one after the other, or a copy for each",
)
def test_a_forward_in_a_second_thread_while_the_first_is_inside_a_unit_is_an_error(device):
    net, errors = blocks(), []

    def second():
        try:
            net(next(inputs(device)))
        except SuperpipelineError as error:
            errors.append(str(error))

    def meanwhile(*_):
        hook.remove()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    hook = net.blocks[1].up.register_forward_pre_hook(meanwhile)
    with sp_lightning.stream(net, device, window=1):
        output = net(next(inputs(device)))
        assert torch.equal(net(next(inputs(device))), output)
    assert len(errors) == 1 and "another thread" in errors[0]


# --- Weights and buffers that reach units in other ways


class Tied(nn.Module):
    """Blocks that are handed another module's weight, as relative embeddings are."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(TakesWeight() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.relative.weight)
        return x


class TakesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.out = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x, weight):
        return x + self.out(torch.tanh(self.linear(x) @ weight))


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
def test_a_weight_that_is_passed_to_a_unit(device, activations):
    def run(streamed):
        torch.manual_seed(0)
        net = Tied()
        handle = sp_lightning.stream(net, device, window=1, units=["TakesWeight"], activations=activations)
        if not streamed:
            handle.close()
            net.to(device)
        for step in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
            net(x).square().sum().backward()
        grads = [p.grad.cpu().clone() for p in net.parameters()]
        handle.close()
        return grads

    for ours, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, plain)


class Noting(dict):
    pass


class TakesPlaces(TakesWeight):
    """Leaves an auxiliary loss in a list, and a number in a dictionary that also has the weight."""

    def forward(self, x, weights, aux, notes):
        aux.append(x.square().mean())
        notes["count"] = notes.get("count", 0) + (type(notes) is Noting)
        weights.append(None)
        return super().forward(x, weights[0] + notes["weight"])


def test_lists_and_dictionaries_beside_and_around_a_weight_that_is_passed_to_a_unit_are_the_callers_own(device):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative = nn.Embedding(8, 8)
            self.blocks = nn.ModuleList(TakesPlaces() for _ in range(3))

        def forward(self, x):
            weight, aux = self.relative.weight, []
            self.weights, self.notes = [weight], Noting(weight=weight)
            for block in self.blocks:
                x = block(x, self.weights, aux, self.notes)
            return torch.stack(aux).mean() + x

    def run(net, device):
        x = torch.ones(4, 8, device=device)
        squares(net, x).backward()
        assert net.weights[0] is net.relative.weight is net.notes["weight"]
        yield len(net.weights), net.notes["count"], [p.grad for p in net.parameters()]

    check(Outer, run, device, units=["TakesPlaces"])


def test_a_buffer_under_two_names_parts_as_it_does_in_a_plain_run(device):
    def shared_after(move):
        net = nn.Module()
        net.one, net.two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        net.two.running_mean = net.one.running_mean
        return move(net)

    def plain(net):
        net.to(device)
        return net.one.running_mean is net.two.running_mean

    def ours(net):
        with sp_lightning.stream(net, device):
            return net.one.running_mean is net.two.running_mean

    assert shared_after(ours) == shared_after(plain)


def test_buffers_stay_the_same_tensors_when_units_are_made_anew(device):
    """Two modules may share one since streaming began, and other code may refer to one."""

    class Scaled(models.Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(models.WIDTH))

        def forward(self, x):
            self.scale *= 0.9
            return super().forward(x) * self.scale

    def run(net, device):
        one, two, *_ = net.blocks
        held, two.scale = one.scale, one.scale
        for x in inputs(device):
            one.up.bias = nn.Parameter(torch.zeros_like(one.up.bias))
            yield net(x), held
            held.mul_(1.1)
        two.scale = two.scale.clone()

    check(models.stack_of(Scaled), run, device)


# --- Parts of the module that are called by themselves


class Pair(nn.Module):
    """Two nets, of which whoever trains them calls one after the other."""

    def __init__(self, block=models.Block):
        super().__init__()
        self.encoder, self.decoder = models.stack_of(block)(), nn.Sequential(nn.Linear(models.CLASSES, 8), nn.Tanh())


def through_both(net, x):
    return net.decoder(net.encoder(x)).square().mean()


def contrasted(net, x):
    one, other = net.encoder(x), net.encoder(x + 0.5)
    return (net.decoder(one) * net.decoder(other)).mean()


def recomputed(net, x):
    return checkpoint(net.encoder, x.requires_grad_(), use_reentrant=False).square().mean()


def recomputed_by_another_backward(net, x):
    return checkpoint(net.encoder, x.requires_grad_(), use_reentrant=True).square().mean()


def under_autocast(net, x):
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        return contrasted(net, x)


@parity.product(
    window=[1, 3],
    activations=["keep", "recompute"],
    loss=[through_both, contrasted, recomputed, recomputed_by_another_backward, under_autocast],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_training_by_calls_of_parts(loss, activations, window, device):
    def run(net, device):
        yield from training(loss, steps=4)(net, device)
        with torch.no_grad():
            yield [loss(net, x) for x in inputs(device)]

    check(Pair, run, device, activations=activations, window=window)


@pytest.mark.simgpu
def test_a_part_that_is_called_takes_its_arguments_where_they_are_and_holds_nothing_up():
    device = torch.device("simgpu", 0)
    torch.manual_seed(0)
    net = Pair()
    x = next(inputs(torch.device("cpu")))
    expected = net.encoder(x)
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        assert torch.equal(net.encoder(x).cpu(), expected)
        assert not handle.engine.phases.in_step and net.encoder.stem.weight.device.type == "cpu"


class Holder(nn.Module):
    """Takes what it computes with in a list, beside another that it fills."""

    def __init__(self):
        super().__init__()
        self.inner = models.stack_of(models.Block)()

    def forward(self, given, seen):
        seen.append(given[0].device.type)
        return self.inner(given[0])


@pytest.mark.simgpu
def test_arguments_that_hold_tensors_come_along_and_others_are_the_callers_own():
    device, seen = torch.device("simgpu", 0), []
    net = Holder()
    with sp_lightning.stream(net, device, window=1), torch.no_grad():
        net([next(inputs(torch.device("cpu")))], seen)
    assert seen == ["simgpu"]


class Wrapped(nn.Module):
    """As adapters and value heads hold a language model."""

    def __init__(self, make):
        super().__init__()
        self.inner = make()

    def generate(self, *args, **kwargs):
        return self.inner.generate(*args, **kwargs)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=96)
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.few(1)
def test_generation_by_hand(make, wrap, device):
    pytest.importorskip("transformers")

    def run(net, device):
        tokens = torch.arange(3, 17, device=device).view(2, 7)
        with torch.no_grad():
            yield net.eval().generate(tokens, max_new_tokens=4, do_sample=False)
            tokens = tokens.to(next(net.parameters()).device)
            given = net.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
            yield given, given.device.type

    check((lambda: Wrapped(make)) if wrap else make, run, device)


@pytest.mark.simgpu
@pytest.mark.parametrize("options", [{"min_new_tokens": 4}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("streams_model", [False, True])
@pytest.mark.few(1)
def test_generation_with_a_streamed_assistant(streams_model, options):
    pytest.importorskip("transformers")
    device = torch.device("simgpu", 0)

    def generated(streamed):
        torch.manual_seed(0)
        model = llama().eval()
        assistant, tokens = copy.deepcopy(model), torch.arange(3, 17, device=device).view(1, 14)
        with contextlib.ExitStack() as ends, torch.no_grad():
            for net, streams in ((model, streamed and streams_model), (assistant, streamed)):
                if streams:
                    ends.enter_context(sp_lightning.stream(net, device, window=1))
                else:
                    net.to(device)
            return model.generate(tokens, assistant_model=assistant, max_new_tokens=6, **options)

    plain, ours = generated(False), generated(True)
    assert ours.device == device and torch.equal(plain.cpu(), ours.cpu())


@pytest.mark.simgpu
@pytest.mark.parametrize("make, batch", [pytest.param(*rest, id=name) for name, *rest in families.captioners()])
@pytest.mark.few(1)
def test_pictures_are_put_into_words_by_hand(make, batch):
    pytest.importorskip("transformers")

    def run(net, device):
        given = {name: value.to(device) for name, value in batch(0).items()}
        model = net.eval() if hasattr(net, "generate") else net.eval().model
        yield model.generate(**given, max_new_tokens=3, do_sample=False)

    check(make, run, torch.device("simgpu", 0))


class Rolling(nn.Module):
    """Goes on from what it gave, wherever its first parameter is, and reads that parameter between its forwards."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((models.FEATURES,), 0.5))
        self.net = models.stack_of(models.Block)()

    @property
    def device(self):
        return next(p.device for p in self.parameters())

    def forward(self, x, offset):
        return self.net(x + offset)

    def generate(self, x, offset):
        for _ in range(2):
            x = x.to(self.device)
            x = x + self(x, offset).mean() * self.scale.expand_as(x)
        return x


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.few(1)
def test_what_generate_sends_to_the_models_device_is_there(part, window, device):
    def run(net, device):
        model = net.inner if part else net
        for x in inputs(device):
            given = model.generate(x, torch.ones_like(x))
            given.square().mean().backward()
            yield given, given.device == x.device
            model.scale = nn.Parameter(torch.full_like(model.scale, 2.0))
            model.net.blocks[1].up.weight = nn.Parameter(model.net.blocks[1].up.weight.detach() * 0.5)
            with torch.no_grad():
                yield model.generate(x, torch.ones_like(x))

    check((lambda: Wrapped(Rolling)) if part else Rolling, run, device, window=window)


class Telling(Rolling):
    """Hands out what it has, and goes on when it is asked for more."""

    @torch.inference_mode()
    def generate(self, x, offset):
        x = x.tolist()
        for _ in range(3):
            x = torch.tensor(x, device=self.device)
            x = x + self(x, offset).mean() * self.scale.expand_as(x)
            x = x.tolist()
            yield x


@pytest.mark.few(1)
def test_a_generate_that_yields(device):
    def run(net, device):
        for x in inputs(device):
            words = net.generate(x, torch.ones_like(x))
            yield next(words)
            with torch.no_grad():
                net.scale.mul_(0.9)
                net.net.blocks[1].up.weight.mul_(0.9)
            yield net(x, x)
            yield list(words)
            unfinished = net.generate(x, x)
            yield next(unfinished)
            unfinished.close()
            yield from training(lambda net, x: squares(net.net, x))(net, device)

    check(Telling, run, device)


@pytest.mark.simgpu
def test_the_models_device_is_the_host_after_generate_however_it_ended():
    net = Rolling()
    with sp_lightning.stream(net, "simgpu", window=1), torch.no_grad():
        x = next(inputs("simgpu"))
        net.generate(x, x)
        assert net.device.type == "cpu"
        with pytest.raises(RuntimeError, match="size"):
            net.generate(x, x[:, 1:])
        assert net.device.type == "cpu"
        told = Telling()
        with sp_lightning.stream(told, "simgpu", window=1):
            words = told.generate(x, x)
            next(words)
            assert told.device.type == "cpu"
        with pytest.raises(RuntimeError, match="same device"):
            next(words)
        assert told.device.type == "cpu" and type(told.scale) is nn.Parameter
        copied = copy.deepcopy(net)
    assert torch.equal(copied.to("simgpu").generate(x, x), net.to("simgpu").generate(x, x))


class Packing(nn.Module):
    """Takes how long its sequences are on the host, as packing asks for."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(models.FEATURES, models.WIDTH)
        self.memory = nn.GRU(models.WIDTH, models.WIDTH, 2, batch_first=True)
        self.head = nn.Linear(models.WIDTH, models.CLASSES)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.stem(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.memory(packed)[1][-1])


def test_an_argument_on_the_host_beside_others_on_the_device_stays_there(device):
    def loss(net, x):
        lengths = torch.arange(1, len(x) + 1)
        return net(x[:, None].repeat(1, len(x), 1), lengths).square().mean()

    check(Packing, training(loss), device, units=["Linear", "GRU"])


class Counting(nn.Module):
    """Passes its units nothing on the device that is not in a dict, and a count on the host."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(models.FEATURES, models.FEATURES)

        def forward(self, features, seen):
            seen += len(features["x"])
            return {"x": features["x"] + self.up(features["x"]).tanh()}

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, x):
        seen, features = torch.zeros(1, device="cpu"), {"x": x}
        for part in self.parts:
            features = part(features, seen)
        return features["x"] / seen.item()


def test_a_tensor_on_the_host_that_a_unit_gets_in_a_step_is_not_moved(device):
    check(Counting, training(lambda net, x: net(x).square().mean()), device, units=["Part"])


class Offset(nn.Module):
    """Owns a weight itself, beside its units."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.ones(models.FEATURES))
        self.net = models.stack_of(models.Block)()

    def forward(self, x):
        return self.net(x + self.offset)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.few(1)
def test_a_call_that_finds_weights_replaced_has_the_new_ones(part, wrapped, device):
    def run(net, device):
        called = net.inner if part else net
        for x in inputs(device):
            called(x).square().mean().backward()
            owner = net.inner if part else net
            owner.offset = nn.Parameter(torch.full_like(owner.offset, 2.0))
            owner.net.blocks[1].up.weight = nn.Parameter(owner.net.blocks[1].up.weight.detach() * 0.5)
            if wrapped:
                forward = called.forward
                called.forward = lambda x, forward=forward: forward(x) * 2
            yield called(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Offset()

    check(Outer if part else Offset, run, device)


# --- One backward over forwards between which a parameter is frozen


def backward(loss, net):
    loss.backward()


def two_forwards(net, device, between, sums=True, differentiate=backward):
    """Gradients of two forwards, by one backward or by two, on top of earlier ones."""
    first, second = (models.vectors(seed)[0].to(device) for seed in range(2))
    net(first).square().sum().backward()
    values = [net(first).square().mean()]
    between(net)
    values.append(net(second).square().mean())
    for value in [sum(values)] if sums else values:
        differentiate(value, net)
    return [p.grad for p in net.parameters()]


def freeze_one(net):
    next(p for p in net.blocks[1].parameters()).requires_grad_(False)


def freeze_all(net):
    net.blocks[1].requires_grad_(False)


@pytest.mark.parametrize(
    "differentiate, hooks",
    [
        (backward, []),
        (backward, [lambda grad: grad * 0.5]),
        (lambda loss, net: torch.autograd.grad(loss, net.blocks[1].down.weight), []),
        (lambda loss, net: torch.autograd.grad(loss, net.blocks[1].down.weight, create_graph=True), []),
    ],
)
def test_one_backward_over_forwards_between_which_a_parameter_was_frozen_is_refused(differentiate, hooks, device):
    """A plain run sums both before it adds them to an earlier gradient; two nodes bring one after the other."""
    with sp_lightning.stream(net := models.stack_of(models.Block)(), device, window=2):
        for hook in hooks:
            net.blocks[1].down.weight.register_hook(hook)
        with pytest.raises(ExactnessError, match=r"of blocks\.1 over two forwards between which requires_grad"):
            two_forwards(net, device, freeze_one, differentiate=differentiate)


@pytest.mark.parametrize("between, sums", [(freeze_one, False), (freeze_all, True), (lambda net: None, True)])
def test_such_forwards_with_a_backward_each_or_no_gradient_to_sum_are_exact(between, sums, device):
    net = models.stack_of(models.Block)()
    plain = two_forwards(copy.deepcopy(net).to(device), device, between, sums)
    with sp_lightning.stream(net, device, window=2):
        streamed = two_forwards(net, device, between, sums)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(streamed, plain, strict=True))
