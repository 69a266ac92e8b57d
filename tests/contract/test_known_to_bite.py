"""What is known to bite whoever streams weights: all has the bits of the plain run, or a typed error."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from side_by_side import blocks, check, fit, inputs, make_trainer, sgd, squares
from streamed import strategy, streaming
from torch import nn

import models
import sp_lightning
from sp_lightning.errors import ExactnessError, UnsupportedError

# --- More than one backward


def test_gradients_of_many_losses_at_once(device):
    def run(net, device):
        weights = [net.blocks[1].up.weight, net.head.bias]
        for x in inputs(device):
            out = net(x).sum(0)
            ones = torch.eye(len(out), device=device)
            yield torch.autograd.grad(out, weights, grad_outputs=ones, is_grads_batched=True)

    check(blocks, run, device)


# --- Where things are


class Located(L.LightningModule):
    """Makes tensors where it thinks it is, in all the ways that people write."""

    def __init__(self):
        super().__init__()
        self.net = models.stack_of(models.NormedBatchBlock)()
        self.register_buffer("shift", torch.full((models.FEATURES,), 0.1))

    def training_step(self, batch, batch_index):
        x = batch[0] - self.shift + torch.ones(models.FEATURES, device=self.device)
        x = x * torch.full_like(x, 2.0)
        loss = squares(self.net, x)
        self.losses.append(loss.item())
        self.devices = {self.device, self.shift.device, x.device}
        return loss

    def configure_optimizers(self):
        return sgd(self)


def test_buffers_and_tensors_made_where_the_module_says_it_is_are_on_the_device(device):
    plain = fit(Located, None, device)
    streamed = fit(Located, strategy(device), device)
    assert streamed.losses == plain.losses
    assert streamed.devices == {device}
    assert streamed.device.type == "cpu" and {b.device.type for b in streamed.buffers()} == {"cpu"}


def test_a_batch_on_the_host_moves_with_the_call(device):
    net, x = blocks(), models.vectors(0)[0]
    with streaming(net, device, window=1):
        output = net(x)
        hidden = net.blocks[0](torch.ones(1, models.WIDTH))
    assert output.device == device and hidden.device == device
    assert torch.equal(output.cpu(), net.to(device)(x.to(device)).cpu())


# --- Weights that the user writes between steps


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
def test_weights_that_are_given_other_strides_within_a_step_are_an_error(device, when):
    with pytest.raises((ExactnessError, UnsupportedError), match=r"net.1.weight.* strides"):
        fit(lambda: ConvertsInItsStep(when), strategy(device, units=["Conv2d"]), device)


class Retypes(nn.Linear):
    other = staticmethod(torch.Tensor.half)

    def forward(self, x):
        self.weight.data = self.other(self.weight.data)
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


@pytest.mark.parametrize("other", [torch.Tensor.half, lambda data: data[:1], torch.Tensor.flatten])
def test_a_weight_that_is_given_another_type_or_shape_in_its_forward_is_an_error(device, other, monkeypatch):
    monkeypatch.setattr(Retypes, "other", staticmethod(other))
    net = nn.Sequential(*(Retypes(5, 5) for _ in range(3)))
    with streaming(net, device, units=["Retypes"]):
        with pytest.raises((ExactnessError, UnsupportedError), match=r"0.weight.* torch.float32 [(\[]5, 5"):
            net(torch.ones(2, 5, device=device))
        assert net[0].weight.dtype is torch.float32 and net[0].weight.shape == (5, 5)


class Critic(L.LightningModule):
    """Clamps its weights through ``.data`` ahead of each batch, as a WGAN's critic."""

    def __init__(self):
        super().__init__()
        self.net = blocks()

    def training_step(self, batch, batch_index):
        loss = squares(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_):
        for p in self.net.parameters():
            p.data.clamp_(-0.05 / (1 + len(self.losses)), 0.05)

    def configure_optimizers(self):
        return sgd(self)


def assert_equal_parameters(one, other):
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu()), name


# --- What the strategy must not leave to its base class


def test_modules_made_under_the_trainer_are_made_on_the_host(device):
    trainer = make_trainer(sp_lightning.SuperpipelineStrategy(device=device), device)
    with trainer.init_module():
        assert torch.empty(1).device.type == "cpu"


# --- Neighbours and precision


class Overflowing(Critic):
    """Has a batch whose scaled gradients are infinite."""

    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        return loss * 1e36 if batch_index == 1 else loss

    def on_train_batch_end(self, *_):
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())


@pytest.mark.simgpu
def test_a_step_that_overflows_is_skipped_as_in_the_plain_run():
    device, options = torch.device("simgpu", 0), {"precision": "16-mixed", "gradient_clip_val": 0.1}
    plain = fit(Overflowing, None, device, **options)
    streamed = fit(Overflowing, strategy(device), device, **options)
    assert streamed.losses == plain.losses and len(set(plain.losses[1::2])) > 1
    assert_equal_parameters(streamed, plain)


# --- Modules that keep or read weights in other ways


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
