"""What is known to bite whoever streams weights: all has the bits of the plain run, on both cores, or a typed error."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch
from cores import strategy, streaming
from side_by_side import blocks, check, fit, inputs, make_trainer, sgd, squares, training
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import parity
import sp_lightning
from sp_lightning.errors import ExactnessError, UnsupportedError

# --- Saved-tensor hooks and recomputation


class CountingBlock(models.Block):
    """Counts how often its forward ran."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_several_units_recomputes_as_in_the_plain_run(device, use_reentrant):
    def run(net, device):
        for x in inputs(device):
            checkpoint(net.run, net.stem(x), use_reentrant=use_reentrant).square().mean().backward()
            yield [block.runs for block in net.blocks]

    check(models.stack_of(CountingBlock), run, device)


@pytest.mark.parametrize("through", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.few(1)
def test_gradient_checkpointing_of_transformers(device, use_reentrant, through):
    pytest.importorskip("transformers")

    def loss(net, tokens):
        given = tokens if through == "input_ids" else net.get_input_embeddings()(tokens)
        return net(**{through: given}).logits.square().mean()

    def run(net, device):
        for index in range(2):
            loss(net, models.tokens(index)["input_ids"].to(device)).backward()
            yield [p.grad for p in net.parameters()]

    check(models.checkpointing_llama(use_reentrant), run, device)


# --- Ways into a unit's backward


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_an_auxiliary_loss_kept_as_an_attribute_leads_into_backward_by_a_side_door(device, weight):
    def loss(net, x):
        output = net(x)
        return weight * output.square().mean() + sum(block.auxiliary_loss for block in net.blocks)

    check(models.stack_of(models.AuxiliaryBlock), training(loss), device)


class ForkingBlock(models.Block):
    def forward(self, x):
        y = super().forward(x)
        return {"hidden": y, "extras": (y.tanh(), [y.sigmoid()])}


class ForkingStack(models.Stack):
    """Of its blocks' outputs, only one nested one is used."""

    used = ("hidden", "tanh", "sigmoid")

    def run(self, x):
        for block, used in zip(self.blocks, self.used, strict=False):
            output = block(x)
            x = {"hidden": output["hidden"], "tanh": output["extras"][0], "sigmoid": output["extras"][1][0]}[used]
        return x


def test_backward_enters_a_unit_through_any_one_of_its_outputs(device):
    check(lambda: ForkingStack(ForkingBlock() for _ in range(3)), training(), device)


# --- Orders that change


@pytest.mark.parametrize("count", [1, 2])
def test_blocks_that_are_visited_many_times_over(device, count):
    check(lambda: models.RepeatedStack([models.Block() for _ in range(count)]), training(), device)


@pytest.mark.few(1)
def test_experts_that_get_nothing_have_no_gradient(device):
    def run(net, device):
        for x in inputs(device, 4):
            net.zero_grad()
            squares(net, x).backward()
            yield [p.grad is None for p in net.parameters()]

    check(models.stack_of(models.ExpertBlock, 3), run, device)


@pytest.mark.few(1)
def test_a_weight_that_is_used_in_several_calls_of_one_graph_sums_its_gradients_in_plain_order(device):
    def loss(net, x):  # the same blocks in three calls, of very different size: another order is another sum
        return sum(net(x * scale).square().mean() for scale in (1e-3, 1.0, 1e3, 0.3))

    check(blocks, training(loss), device)


# --- More than one backward


@pytest.mark.few(1)
def test_a_backward_through_the_gradients(device):
    def run(net, device):
        for x in inputs(device):
            grads = torch.autograd.grad(squares(net, x), list(net.parameters()), create_graph=True)
            sum(g.square().sum() for g in grads).backward()
            yield grads, [p.grad for p in net.parameters()]

    check(blocks, run, device)


@pytest.mark.few(1)
def test_gradients_of_many_losses_at_once(device):
    def run(net, device):
        weights = [net.blocks[1].up.weight, net.head.bias]
        for x in inputs(device):
            out = net(x).sum(0)
            ones = torch.eye(len(out), device=device)
            yield torch.autograd.grad(out, weights, grad_outputs=ones, is_grads_batched=True)

    check(blocks, run, device)


# --- Weights in several places, or read outside their module


class SharedLayers(models.Stack):
    """A head per block; heads share a weight, two blocks a layer, and the last block is the first."""

    def __init__(self):
        super().__init__([models.Block() for _ in range(4)])
        self.blocks[2].up = self.blocks[1].up
        self.blocks.append(self.blocks[0])
        self.heads = nn.ModuleList(nn.Linear(models.WIDTH, models.CLASSES) for _ in self.blocks)
        for head in self.heads[1:]:
            head.weight = self.heads[0].weight

    def forward(self, x):
        x, outputs = self.stem(x), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            outputs.append(head(x))
        return torch.stack(outputs)


def test_ties_of_every_shape(device):
    check(SharedLayers, training(), device)


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


@pytest.mark.few(1)
def test_buffers_and_tensors_made_where_the_module_says_it_is_are_on_the_device(device):
    plain = fit(Located, None, device)
    streamed = fit(Located, strategy(device), device)
    assert streamed.losses == plain.losses
    assert streamed.devices == {device}
    assert streamed.device.type == "cpu" and {b.device.type for b in streamed.buffers()} == {"cpu"}


@pytest.mark.parametrize("units", ["auto", ["NormedBatchBlock", "Linear"]])
def test_inside_of_a_forward_other_modules_weights_are_on_the_device(device, units):
    def run(net, device):
        answers = []
        net.blocks[0].register_forward_pre_hook(lambda *_: answers.extend(p.device for p in net.parameters()))
        yield squares(net, models.vectors(0)[0].to(device))
        assert set(answers) == {device}

    check(models.stack_of(models.NormedBatchBlock), run, device, units=units)


def test_a_batch_on_the_host_moves_with_the_call(device):
    net, x = blocks(), models.vectors(0)[0]
    with streaming(net, device, window=1):
        output = net(x)
        hidden = net.blocks[0](torch.ones(1, models.WIDTH))
    assert output.device == device and hidden.device == device
    assert torch.equal(output.cpu(), net.to(device)(x.to(device)).cpu())


# --- Weights that the user writes between steps


@parity.product(
    write=["data_clamp", "data_item", "in_place", "new_data", "load", "ema", "detached"],
    window=[1, 6],
    device=parity.DEVICES,
)
@pytest.mark.few(4)
def test_writes_to_weights_between_steps_are_seen_at_the_next_visit(device, write, window):
    def between(net):
        for p in net.parameters():
            WRITES[write](p)
        if write == "load":
            net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})

    check(blocks, training(between=between), device, window=window)


@torch.no_grad()
def in_place(p):
    p.mul_(0.5).clamp_(-0.1, 0.1)


@torch.no_grad()
def average(p):
    p.lerp_(torch.ones_like(p), 0.1)


WRITES = {
    "data_clamp": lambda p: p.data.clamp_(-0.05, 0.05),
    "data_item": lambda p: p.data.view(-1).__setitem__(0, 0.25),
    "in_place": in_place,
    "new_data": lambda p: setattr(p, "data", p.data.clone() * 0.5),
    "load": lambda p: None,
    "ema": average,
    "detached": lambda p: p.detach().mul_(0.5),
}


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


class Giving(Critic):
    """Writes to its weights after each batch, through what it got of them."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def on_train_batch_end(self, *_):
        for name, p in self.net.named_parameters():
            self.write(name, p)


class Keeping:
    """Writes one batch after it got an alias, and lets go of that."""

    def __init__(self):
        self.kept = {}

    def __call__(self, name, p):
        if name in self.kept:
            self.kept.pop(name).data.mul_(0.7)
        else:
            self.kept[name] = p.detach()


def array(_, p):
    if p.device.type == "cpu":
        p.detach().numpy().__imul__(0.7)
    else:
        p.detach().data.mul_(0.7)


GIVEN_AWAY = {
    "row": lambda: lambda _, p: p[0].data.zero_(),
    "view": lambda: lambda _, p: p.view(-1).data.mul_(0.7),
    "parts": lambda: lambda _, p: p.unbind()[-1].data.zero_(),
    "array": lambda: array,
    "kept": Keeping,
}


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}])
@pytest.mark.parametrize("way", GIVEN_AWAY)
@pytest.mark.few(2)
def test_a_write_through_what_a_weight_gave_away_is_seen(way, options, device):
    plain = fit(lambda: Giving(GIVEN_AWAY[way]()), None, device, **options)
    streamed = fit(lambda: Giving(GIVEN_AWAY[way]()), strategy(device, window=6), device, **options)
    assert streamed.losses == plain.losses
    assert_equal_parameters(streamed, plain)


def assert_equal_parameters(one, other):
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu()), name


# --- Weights that the model writes


@pytest.mark.parametrize("block", [models.RescalingBlock, models.DataRescalingBlock])
def test_weights_that_forward_writes_go_back_to_the_host(device, block):
    check(models.stack_of(block, 3), training(), device)


def test_an_embedding_that_rescales_its_rows(device):
    def run(net, device):
        for index in range(3):
            net(models.tokens(index)["input_ids"].to(device)).square().mean().backward()
            yield [p.grad for p in net.parameters()]

    check(lambda: models.TokenStack(max_norm=1.0), run, device)


# --- What the strategy must not leave to its base class


def test_modules_made_under_the_trainer_are_made_on_the_host(device):
    trainer = make_trainer(sp_lightning.SuperpipelineStrategy(device=device), device)
    with trainer.init_module():
        assert torch.empty(1).device.type == "cpu"


# --- Host memory and streams


# --- Neighbours and precision


@pytest.mark.few(1)
def test_a_gradient_scaler_sees_infinities_and_clipping_meets_host_gradients(device):
    def run(net, device):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=2)
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device, 5)):
            optimizer.zero_grad()
            scaler.scale(squares(net, x) * (1e38 if index == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            yield norm, scaler.get_scale(), [p.grad for p in net.parameters()]

    check(blocks, run, device)


@pytest.mark.few(1)
def test_a_scaler_hands_its_factor_to_an_optimizer_that_unscales_by_itself(device):
    def run(net, device):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        for index, x in enumerate(inputs(device, 5)):
            optimizer.zero_grad()
            scaler.scale(squares(net, x) * (1e38 if index == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            yield scaler.get_scale(), [p.detach() for p in net.parameters()]

    check(blocks, run, device)


def data_given(p):
    p.grad.data = p.grad * 0.5


def made_double_and_back(p):
    p.grad.data = p.grad.data.double()
    p.grad.data = p.grad.data.float()


def recorded(p):
    p.grad.requires_grad_()


@pytest.mark.parametrize("wire_dtype", ["auto", "as-is"])
@pytest.mark.parametrize("change", [data_given, made_double_and_back, recorded])
@pytest.mark.few(1)
def test_a_gradient_that_is_made_another_tensor(change, wire_dtype, device):
    def run(net, device):
        optimizer = sgd(net)
        for x in inputs(device, 5):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
                loss = squares(net, x)
            loss.backward()
            yield [p.grad.detach().clone() for p in net.parameters()]
            for p in net.parameters():
                change(p)
            optimizer.step()

    check(blocks, run, device, wire_dtype=wire_dtype)


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


# --- Parameters that appear, vanish or move


def parametrized(net):
    for block in net.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
        nn.utils.parametrizations.orthogonal(block.down, use_trivialization=False)
    return net


def weight_normed(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for block in net.blocks:
            nn.utils.weight_norm(block.up)
    return net


class Adapter(nn.Module):
    """A low-rank path beside a frozen layer, put in its place, as peft does it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.shrink = nn.Linear(base.in_features, 2, bias=False)
        self.grow = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.grow(self.shrink(x))


def adapted(net):
    torch.manual_seed(5)
    for block in net.blocks:
        adapter = Adapter(block.up)
        block.up = adapter
        adapter.shrink.to(block.norm.weight.device), adapter.grow.to(block.norm.weight.device)
    return net


def pruned(net):
    del net.blocks[2]
    net.blocks[0].up = nn.Identity()
    net.blocks[0].down = nn.Identity()
    return net


@parity.product(
    change=[parametrized, weight_normed, adapted, pruned], when=["before", "after", "between"], device=parity.DEVICES
)
@pytest.mark.few(2)
def test_parameters_that_appear_vanish_or_move(device, change, when):
    def run(net, device):
        if when == "between":
            yield from training(steps=2)(net, device)
        if when != "before":
            change(net)
        yield from training(steps=2)(net, device)
        yield [name for name, _ in net.named_parameters()]

    check(lambda: change(blocks()) if when == "before" else blocks(), run, device)


# --- Shapes of models


ENTERED = {
    "nested lists with None": models.NestedStack,
    "children only": lambda: models.ChildrenOnlyStack(models.Block() for _ in range(4)),
    "another method": lambda: models.EncodingStack(models.EncodingBlock() for _ in range(4)),
    "no list": models.NamedStages,
    "one layer": lambda: nn.Linear(models.FEATURES, models.CLASSES),
    "sequential": lambda: nn.Sequential(*(nn.Linear(models.FEATURES, models.FEATURES) for _ in range(5))),
}


@pytest.mark.parametrize("shape", ENTERED)
@pytest.mark.few(4)
def test_whatever_part_of_a_unit_is_entered_makes_it_resident(device, shape):
    check(ENTERED[shape], training(), device)


# --- Modules that keep or read weights in other ways


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.few(2)
def test_recurrent_layers_keep_their_weights_twice(device, kind, mode):
    class Recurrent(models.Stack):
        def run(self, x):
            for block in self.blocks:
                x = block(x)[0]
            return x

    def run(net, device):
        getattr(net, mode)()
        for index in range(2):
            net(models.sequences(index)[0].to(device)).square().mean().backward()
            yield [p.grad for p in net.parameters()]

    check(lambda: Recurrent(kind(models.WIDTH, models.WIDTH, batch_first=True) for _ in range(3)), run, device)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_evaluation_fast_path_of_transformer_encoders(device, padding, context):
    """Without nested tensors, which torch makes of padded sequences only where it finds weights of its own class."""

    def make():
        layer = nn.TransformerEncoderLayer(models.FEATURES, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

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
