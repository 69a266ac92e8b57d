"""What users do to a module while it streams: all has the bits of the plain run, or is a typed error."""

from __future__ import annotations

import threading

import lightning as L
import pytest
import torch
from often import often
from side_by_side import blocks, check, fit, inputs, squares, training
from stream_programs import streamed
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import parity
from sp_lightning.errors import ExactnessError, UnsupportedError


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
    with streamed(net, device):
        assert told(net) == expected


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


@pytest.mark.parametrize("activations", often(["recompute+offload", "keep", "recompute", "offload"]))
def test_conjugated_and_negated_views_of_complex_weights(device, activations):
    check(models.stack_of(Complex), training(), device, activations=activations)


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
    """Its derivative takes a weight from a layer."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.layer.weight
        return grad @ weight @ weight.t(), None


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


SAVES = "a checkpoint in a forward saves a resident weight itself, and in backward a reference to its unit"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(Rereading, marks=pytest.mark.xfail(reason=SAVES)), RereadingReentrant, Differentiating, Decaying],
)
def test_weights_that_backward_reads_outside_their_unit(device, kind):
    check(lambda: kind(models.Block() for _ in range(3)), training(), device)


# --- Hooks on gradients


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
    "of some weights": lambda loss, weights: loss.backward(inputs=weights[::2]),
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("when", often(["before", "after forward"]))
def test_hooks_of_weights_are_called_only_where_gradients_arrive(when, backward, device):
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

    check(models.stack_of(Experts), run, device)


def test_hooks_of_weights_without_gradients_outlive_streaming(device):
    net = models.stack_of(Experts)()
    calls, weight = [], net.blocks[0].experts[0].weight
    hooks = [weight.register_hook(calls.append), weight.register_post_accumulate_grad_hook(calls.append)]
    with streamed(net, device):
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


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
def test_sparse_tensors_in_a_forward(activations):
    check(models.stack_of(Neighbours), training(), torch.device("cpu"), activations=activations)


# --- Streams, threads, data


def test_forward_in_one_thread_and_backward_in_another(device):
    def run(net, device):
        for x in inputs(device):
            loss = squares(net, x)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            yield [p.grad for p in net.parameters()]

    check(blocks, run, device)


# --- Where arguments are


def test_a_batch_on_the_host_moves_with_the_call(device):
    net, x = blocks(), models.vectors(0)[0]
    with streamed(net, device):
        output = net(x)
        hidden = net.blocks[0](torch.ones(1, models.WIDTH))
    assert output.device == device and hidden.device == device
    assert torch.equal(output.cpu(), net.to(device)(x.to(device)).cpu())


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


def test_a_host_argument_beside_others_on_the_device_stays_there(device):
    def loss(net, x):
        lengths = torch.arange(1, len(x) + 1)
        return net(x[:, None].repeat(1, len(x), 1), lengths).square().mean()

    check(Packing, training(loss), device, units=["Linear", "GRU"])


# --- Weights that are frozen between a forward and its backward


def freeze_one(net):
    net.blocks[1].norm.weight.requires_grad_(False)


def freeze_all(net):
    net.blocks[1].requires_grad_(False)


@pytest.mark.parametrize("freeze", [freeze_one, freeze_all])
@pytest.mark.parametrize("thaws", [True, False])
def test_weights_may_freeze_between_two_forwards_of_one_backward(freeze, thaws, device):
    def run(net, device):
        first, second = inputs(device, 2)
        net(first).square().sum().backward()
        loss = squares(net, first)
        freeze(net)
        loss = loss + squares(net, second)
        if thaws:
            net.requires_grad_()
        loss.backward()
        yield loss

    check(blocks, run, device, window=2)


def test_gradients_of_many_losses_at_once(device):
    def run(net, device):
        weights = [net.blocks[1].up.weight, net.head.bias]
        for x in inputs(device):
            out = net(x).sum(0)
            ones = torch.eye(len(out), device=device)
            yield torch.autograd.grad(out, weights, grad_outputs=ones, is_grads_batched=True)

    check(blocks, run, device)


# --- Weights that become others within a step


class ConvertsInItsStep(L.LightningModule):
    """Gives its weights another memory format where a step is under way."""

    def __init__(self, when):
        super().__init__()
        self.when = when
        self.net = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))

    def convert(self, now):
        if now == self.when:
            self.net[1].to(memory_format=torch.channels_last)

    def training_step(self, batch, index):
        self.convert("before the forward")
        loss = self.net(batch[0].view(1, 3, 4, 4)).square().mean()
        self.convert("after it")
        return loss

    def on_before_zero_grad(self, optimizer):
        self.convert("in a hook")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("when", ["before the forward", "after it", "in a hook"])
def test_weights_that_change_strides_within_a_step_are_an_error(device, when):
    strategy = parity.streaming_strategy(device.type, window=1, units=["Conv2d"])
    with pytest.raises((ExactnessError, UnsupportedError), match=r"net.1.weight.* strides"):
        fit(lambda: ConvertsInItsStep(when), strategy, device)


class Retypes(nn.Linear):
    other = staticmethod(torch.Tensor.half)

    def forward(self, x):
        self.weight.data = self.other(self.weight.data)
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


@pytest.mark.parametrize("other", [torch.Tensor.half, lambda data: data[:1], torch.Tensor.flatten])
def test_a_weight_that_gets_another_type_or_shape_is_an_error(device, other, monkeypatch):
    monkeypatch.setattr(Retypes, "other", staticmethod(other))
    net = nn.Sequential(*(Retypes(5, 5) for _ in range(3)))
    with streamed(net, device, units=["Retypes"]):
        with pytest.raises((ExactnessError, UnsupportedError), match=r"0.weight.* torch.float32 [(\[]5, 5"):
            net(torch.ones(2, 5, device=device))
        assert net[0].weight.dtype is torch.float32 and net[0].weight.shape == (5, 5)


def test_an_average_of_weights_takes_the_hosts_formula(device):
    """Without `avg_fn`, torch has one formula for averages on the host and another for a GPU's."""
    net = blocks()
    with streamed(net, device):
        average = torch.optim.swa_utils.AveragedModel(net)
        average.update_parameters(net)
        expected = [p.detach().clone() for p in net.parameters()]
        assert list(training()(net, device))
        for mean, p in zip(expected, net.parameters(), strict=True):
            assert not torch.equal(mean, p)
            mean.copy_(mean + (p.detach() - mean) / torch.tensor(2))
        average.update_parameters(net)
        assert all(map(torch.equal, expected, average.module.parameters()))


# --- Precision, and kernels that read weights otherwise


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_evaluation_fast_path_of_transformer_encoders(device, padding, context):
    def make():
        layer = nn.TransformerEncoderLayer(models.FEATURES, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 3)  # which packs padded sequences into nested tensors

    if padding and device.type == "simgpu":
        pytest.skip("it has no nested tensors")

    def run(net, device):
        mask = torch.arange(models.LENGTH).expand(models.BATCH, -1) >= torch.tensor([[8], [5], [3], [1]])
        net.eval()
        with context():
            for index in range(2):
                yield net(
                    models.sequences(index)[0].to(device), src_key_padding_mask=mask.to(device) if padding else None
                )

    check(make, run, device)
