"""What is known to bite whoever streams weights, each trap with the outcome that the contract names.

Bitwise equal to the plain run, equal to rounding, or a typed error. What users do beside training is in
test_unusual_use.py, and references that outlive a visit are in test_kept_references.py.
"""

from __future__ import annotations

import contextlib
import logging
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from side_by_side import blocks, check, fit, inputs, make_trainer, sgd, squares, training
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import models
import parity
import sp_lightning
from sp_lightning.errors import ExactnessError

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


@pytest.mark.few(1)
def test_saved_tensor_hooks_of_the_user_see_what_they_see_in_the_plain_run(device):
    def run(net, device):
        seen = []

        def pack(tensor):
            seen.append(("packed", tuple(tensor.shape)))
            return tensor.cpu()

        def unpack(tensor):
            seen.append(("unpacked", tuple(tensor.shape)))
            return tensor.to(device)

        for x in inputs(device):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = squares(net, x)
            loss.backward()
            yield loss, seen

    check(blocks, run, device)


def test_activations_saved_on_the_cpu_around_the_model(device):
    def loss(net, x):
        with torch.autograd.graph.save_on_cpu():
            return squares(net, x)

    check(blocks, training(loss), device)


class SelfCheckpointingBlock(models.Block):
    """Recomputes below its own forward, and below every hook on it."""

    use_reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class ReentrantBlock(SelfCheckpointingBlock):
    use_reentrant = True


@pytest.mark.parametrize("block", [SelfCheckpointingBlock, ReentrantBlock])
def test_a_block_that_checkpoints_inside_its_own_forward(device, block):
    check(models.stack_of(block), training(), device)


@pytest.mark.few(1)
def test_forward_hooks_that_recomputation_runs_inside_backward_release_nothing(device):
    def run(net, device):
        calls = []
        for block in net.blocks:
            block.register_forward_hook(lambda *_: calls.append(torch._C._current_graph_task_id() != -1))
        yield from training(lambda net, x: net.head(checkpointed(net, x)).square().mean())(net, device)
        yield calls

    def checkpointed(net, x):
        x = net.stem(x)
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    recomputed = check(blocks, run, device)
    assert recomputed["fetches"] == check(blocks, training(), device)["fetches"]


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


def test_the_side_door_alone_while_the_output_is_thrown_away(device):
    def loss(net, x):
        net(x)
        return net.blocks[1].auxiliary_loss + net.blocks[3].auxiliary_loss

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


def test_backward_enters_through_a_cache_while_the_outputs_are_thrown_away(device):
    def run(net, device):
        for index in range(3):
            net(models.sequences(index)[0].to(device)).square().mean().backward()
            yield [p.grad for p in net.parameters()]

    check(models.CachingStack, run, device)


# --- Orders that change


@pytest.mark.parametrize("count", [1, 2])
def test_blocks_that_are_visited_many_times_over(device, count):
    check(lambda: models.RepeatedStack([models.Block() for _ in range(count)]), training(), device)


@pytest.mark.few(1)
def test_blocks_that_are_skipped_at_random(device):
    stats = check(lambda: models.SkippingStack(models.Block() for _ in range(4)), training(steps=8), device)
    assert stats["surprises"] > 0


@pytest.mark.few(1)
def test_experts_that_get_nothing_have_no_gradient(device):
    def run(net, device):
        for x in inputs(device, 4):
            net.zero_grad()
            squares(net, x).backward()
            yield [p.grad is None for p in net.parameters()]

    net = models.stack_of(models.ExpertBlock, 3)
    check(net, run, device)
    assert any(p.grad is None for p in run_once(net, device).parameters())


def run_once(make, device):
    """The module after one streamed batch."""
    torch.manual_seed(0)
    net = make()
    with sp_lightning.stream(net, device, window=1):
        squares(net, next(inputs(device))).backward()
    return net


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


def test_a_gradient_penalty_on_the_inputs(device):
    def loss(net, x):
        x = x.clone().requires_grad_()
        slope = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
        return (slope.norm(dim=-1) - 1).square().mean()

    check(blocks, training(loss), device)


def test_one_graph_three_times_backward(device):
    def run(net, device):
        for x in inputs(device, 2):
            loss = squares(net, x)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            yield [p.grad for p in net.parameters()]
            loss.backward()

    check(blocks, run, device)


def test_autograd_grad_of_some_weights_leaves_grad_alone(device):
    def run(net, device):
        for x in inputs(device):
            some = [net.blocks[2].up.weight, net.blocks[0].down.bias, net.stem.weight]
            yield torch.autograd.grad(squares(net, x), some), [p.grad for p in net.parameters()]

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


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.few(1)
def test_gradients_with_tangents(activations, device):
    def run(net, device):
        for x in inputs(device):
            with forward_ad.dual_level():
                out = net(forward_ad.make_dual(x, torch.ones_like(x)))
                out.square().mean().backward()
                yield [tuple(forward_ad.unpack_dual(p.grad)) for p in net.parameters()]
            net.zero_grad()

    check(blocks, run, device, activations=activations)


def test_a_forward_without_gradients_in_the_middle_of_a_training_step(device):
    def loss(net, x):
        output = net(x)
        with torch.no_grad():
            target = net(x.flip(0))
        return (output - target).square().mean()

    check(blocks, training(loss), device)


class LookingAhead(models.Stack):
    """Runs all its blocks without gradients between two of them."""

    def run(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            target = super().run(x)
        return super().run(x) - target


def test_a_pass_without_gradients_between_two_blocks_of_one_forward(device):
    check(lambda: LookingAhead(models.Block() for _ in range(3)), training(), device)


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


def test_an_embedding_tied_to_the_head_in_another_unit(device):
    def run(net, device):
        for index in range(3):
            net(models.tokens(index)["input_ids"].to(device)).square().mean().backward()
            yield [p.grad for p in net.parameters()]

    check(lambda: models.TokenStack(tied=True), run, device, units=lambda net: [net.embedding, *net.blocks, net.head])


class UnitRegulariser(L.LightningModule):
    """Adds a penalty on all weights to its loss, in its step."""

    def __init__(self):
        super().__init__()
        self.net = blocks()

    def training_step(self, batch, batch_index):
        loss = squares(self.net, batch[0]) + 1e-2 * sum(p.square().sum() for p in self.parameters())
        self.losses.append(loss.detach().cpu())
        return loss

    def configure_optimizers(self):
        return sgd(self)


@pytest.mark.few(1)
def test_a_regulariser_over_all_parameters_inside_the_step(device):
    def losses(strategy):
        return fit(UnitRegulariser, strategy, device).losses

    assert losses(None) == losses(sp_lightning.SuperpipelineStrategy(window=1, device=device))


def test_a_regulariser_on_the_host_is_equal_to_rounding_with_one_log_line(device, caplog):
    torch.manual_seed(0)
    net = blocks()
    with caplog.at_level(logging.INFO, "sp_lightning"), sp_lightning.stream(net, device, window=1):
        for x in inputs(device):
            (squares(net, x) + 1e-2 * sum(p.square().sum() for p in net.parameters()).to(device)).backward()
        streamed = [p.grad for p in net.parameters()]
    torch.manual_seed(0)
    plain = blocks()
    plain.to(device)
    for x in inputs(device):
        (squares(plain, x) + 1e-2 * sum(p.square().sum() for p in plain.parameters())).backward()
    for ours, theirs in zip(streamed, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad.cpu())
    assert sum("read on the host" in message for message in caplog.messages) == 1


# --- Where things are


class Located(L.LightningModule):
    """Makes tensors where it thinks it is, in all the ways that people write."""

    def __init__(self):
        super().__init__()
        self.net = models.stack_of(models.NormedBatchBlock)()
        self.metric = torchmetrics.MeanMetric()
        self.register_buffer("shift", torch.full((models.FEATURES,), 0.1))

    def training_step(self, batch, batch_index):
        x = batch[0] - self.shift + torch.ones(models.FEATURES, device=self.device)
        x = x * torch.full_like(x, 2.0, device=next(self.parameters()).device)
        x = x + torch.arange(models.FEATURES).to(self.net.blocks[0].linear.weight.device)
        loss = squares(self.net, x)
        self.log("seen", self.metric(x.mean()))
        self.losses.append((loss.item(), self.metric.compute().item()))
        self.devices = {self.device, self.shift.device, self.metric.mean_value.device, x.device}
        return loss

    def configure_optimizers(self):
        return sgd(self)


@pytest.mark.few(1)
def test_buffers_metrics_and_tensors_made_where_the_module_says_it_is_are_on_the_device(device):
    plain = fit(Located, None, device)
    streamed = fit(Located, sp_lightning.SuperpipelineStrategy(window=1, device=device), device)
    assert streamed.losses == plain.losses
    assert streamed.devices == {device}
    assert streamed.device.type == "cpu" and {b.device.type for b in streamed.buffers()} == {"cpu"}


def asked_where(parameter):
    return parameter.device, parameter.get_device(), parameter.is_cpu, parameter.is_cuda, parameter.type()


def test_a_weight_says_in_all_ways_where_a_plain_runs_would_be(device):
    def run(net, device):
        def keep(module, args):
            answers.append(asked_where(net.blocks[1].linear.weight))

        answers = []
        net.blocks[0].register_forward_pre_hook(keep)
        yield squares(net, models.vectors(0)[0].to(device))
        assert answers == [asked_where(torch.ones(1, device=device))]

    check(models.stack_of(models.NormedBatchBlock), run, device)


@pytest.mark.few(1)
def test_tensors_made_where_a_transformers_model_says_it_is(device):
    pytest.importorskip("transformers")

    def run(net, device):
        def double(layer, args):
            return (args[0] * torch.full((), 2.0, device=net.device, dtype=net.dtype), *args[1:])

        net.model.layers[1].register_forward_pre_hook(double)
        logits = net(models.tokens(0)["input_ids"].to(device)).logits
        logits.square().mean().backward()
        yield logits

    check(models.checkpointing_llama(False), run, device)


def test_a_batch_on_the_host_moves_with_the_call(device):
    net, x = blocks(), models.vectors(0)[0]
    with sp_lightning.stream(net, device, window=1):
        output = net(x)
        hidden = net.blocks[0](torch.ones(1, models.WIDTH))
    assert output.device == device and hidden.device == device
    assert torch.equal(output.cpu(), net.to(device)(x.to(device)).cpu())


# --- Compiled code


@parity.product(activations=["keep", "recompute+offload"], backend=["eager", "aot_eager"], when=["before", "after"])
@pytest.mark.few(1)
def test_compiled_blocks(backend, when, activations):
    def compiled(net):
        for block in net.blocks:
            block.compile(backend=backend)
        return net

    def run(net, device):
        if when == "after":
            compiled(net)
        yield from training()(net, device)

    torch.compiler.reset()
    make = (lambda: compiled(blocks())) if when == "before" else blocks
    check(make, run, torch.device("cpu"), activations=activations)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.few(1)
def test_a_compiled_model(backend):
    torch.compiler.reset()
    check(blocks, lambda net, device: training()(torch.compile(net, backend=backend), device), torch.device("cpu"))


# --- Weights that the user writes between steps


@parity.product(
    write=["data_clamp", "data_item", "in_place", "new_data", "load", "ema", "detached", "numpy"],
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

    if write == "numpy" and device.type == "simgpu":
        between = host_only(between)
    check(blocks, training(between=between), device, window=window)


def host_only(between):
    """What plain code has to do where numpy cannot look: move there and back."""

    def moving(net):
        moved = next(net.parameters()).device
        if moved.type == "cpu":
            between(net)
        else:
            net.cpu()
            between(net)
            net.to(moved)

    return moving


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
    "numpy": lambda p: p.detach().numpy().__imul__(0.5),
}


def test_writes_through_an_alias_that_was_taken_long_ago(device):
    def run(net, device):
        aliases = [[p.data, p.detach(), nn.Parameter(p)][index % 3] for index, p in enumerate(net.parameters())]
        for x in inputs(device):
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]
            with torch.no_grad():
                for alias in aliases:
                    alias.clamp_(-0.05, 0.05).mul_(0.7)

    check(blocks, run, device, window=6)


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("kind", ["convolutions", "matrices"])
def test_weights_that_are_given_other_strides_between_steps(device, kind, momentum):
    """Kernels choose by strides how they compute, and gradients have those of their weights."""
    is_image = kind == "convolutions"

    def make():
        layers = [nn.Conv2d(16, 16, 3, padding=1) if is_image else nn.Linear(257, 257) for _ in range(4)]
        return nn.Sequential(*layers)

    def run(net, device):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)
        for number in range(4):
            x = torch.randn((2, 16, 32, 32) if is_image else (33, 257), generator=torch.Generator().manual_seed(number))
            if number == 2 and is_image:
                net.to(memory_format=torch.channels_last)
            elif number == 2:
                for layer in net:
                    layer.weight.data = layer.weight.data.t().contiguous().t()
            loss = net(x.to(device)).square().mean()
            loss.backward()
            yield [loss, *(p.grad for p in net.parameters())], [p.grad.stride() for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            yield [*net.parameters()], [p.stride() for p in net.parameters()]

    check(make, run, device, units=["Conv2d" if is_image else "Linear"])


def transposed(layer, optimizer):
    layer.weight.data = layer.weight.data.t()


def transposed_in_place(layer, optimizer):
    with torch.no_grad():
        layer.weight.t_()


def cut(layer, optimizer):
    for p in layer.parameters():
        p.data, p.grad = p.data[:20], None
        del optimizer.state[p]


@pytest.mark.parametrize("change", [transposed, transposed_in_place, cut])
@pytest.mark.few(2)
def test_weights_that_become_another_view_of_their_own_bytes_between_steps(device, change):
    """Which lies at the same address."""

    def run(net, device):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=False)
        for number in range(5):
            if number == 2:
                change(net[3], optimizer)
            loss = net(torch.randn(7, 33, generator=torch.Generator().manual_seed(number)).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            loss = loss.detach()  # a graph would expect gradients of the former shape
            yield [loss, *(p.grad for p in net.parameters())], [p.grad.stride() for p in net.parameters()]
            optimizer.step()
            with torch.no_grad():
                yield net(torch.ones(1, 33, device=device))

    check(lambda: nn.Sequential(*(nn.Linear(33, 33) for _ in range(4))), run, device, units=["Linear"])


class TransposesBeforeItsStep(L.LightningModule):
    """Transposes a weight between backward and a step that may run beside the next forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 1:
            transposed(self.net[3], None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, foreach=False)


def test_a_weight_that_is_transposed_before_a_deferred_step(device):
    expected = fit(TransposesBeforeItsStep, None, device)
    found = fit(TransposesBeforeItsStep, sp_lightning.SuperpipelineStrategy(units=["Linear"], window=1), device)
    assert found.losses == expected.losses and len(found.losses) == 4
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


class Transposing(nn.Module):
    """Transposes a weight where a step is under way, outside of the weight's forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(33, 33) for _ in range(3)))

    def forward(self, x):
        x = self.layers(x)
        transposed(self.layers[1], None)
        return self.layers(x)


def test_a_weight_that_is_transposed_within_a_step_is_an_error(device):
    net = Transposing()
    with sp_lightning.stream(net, device, window=1, units=["Linear"]):
        with pytest.raises(ExactnessError, match=r"layers.1.weight had strides .* change its memory format between"):
            net(torch.ones(1, 33, device=device))


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
    strategy = sp_lightning.SuperpipelineStrategy(units=["Conv2d"], window=1)
    with pytest.raises(ExactnessError, match=r"net.1.weight had strides .* change its memory format between steps"):
        fit(lambda: ConvertsInItsStep(when), strategy, device)


def test_a_weight_that_was_not_dense_before_streaming_may_be_given_dense_data_in_a_step(device):
    def make():
        net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        net[0].weight = nn.Parameter(torch.ones(5, 10)[:, ::2])
        return net

    def run(net, device):
        def replace(module, _):
            module[0].weight.data = torch.full((5, 5), 0.5, device=device)

        net.register_forward_pre_hook(replace)
        yield net(torch.ones(2, 5, device=device))

    check(make, run, device, units=["Linear"])


class ConvertsItself(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data.t().contiguous().t()
        return super().forward(x)


def test_a_weight_that_is_given_other_strides_in_its_forward_is_an_error(device):
    net = nn.Sequential(*(ConvertsItself(5, 5) for _ in range(3)))
    with sp_lightning.stream(net, device, units=["ConvertsItself"]):
        with pytest.raises(ExactnessError, match=r"0.weight had strides .* change its memory format between steps"):
            net(torch.ones(2, 5))


class Retypes(nn.Linear):
    other = staticmethod(torch.Tensor.half)

    def forward(self, x):
        self.weight.data = self.other(self.weight.data)
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


@pytest.mark.parametrize("other", [torch.Tensor.half, lambda data: data[:1], torch.Tensor.flatten])
def test_a_weight_that_is_given_another_type_or_shape_in_its_forward_is_an_error(device, other, monkeypatch):
    monkeypatch.setattr(Retypes, "other", staticmethod(other))
    net = nn.Sequential(*(Retypes(5, 5) for _ in range(3)))
    with sp_lightning.stream(net, device, units=["Retypes"]):
        with pytest.raises(ExactnessError, match=r"0.weight was torch.float32 \(5, 5\) .* change it between steps"):
            net(torch.ones(2, 5, device=device))
        assert net[0].weight.dtype is torch.float32 and net[0].weight.shape == (5, 5)


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("training_too", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("window", [1, 6])
def test_writes_through_an_array_that_a_weight_lies_over(when, training_too, autocast, window):
    """No reference count shows the array: torch did not allocate its bytes."""
    arrays = {}  # by the id of the net

    def lies_over_an_array(p):
        array = np.ascontiguousarray(p.detach().numpy().copy())
        p.data = torch.from_numpy(array)
        return array

    def make():
        net = blocks()
        if when == "before":
            arrays[id(net)] = lies_over_an_array(net.head.weight)
        return net

    def run(net, device):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        array = arrays.pop(id(net), None)
        for number, x in enumerate([*inputs(device), *inputs(device)]):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = squares(net, x)
            loss.backward()
            if training_too:
                optimizer.step()
            yield [loss, *(p.grad for p in net.parameters())]
            optimizer.zero_grad()
            if number == 1 and array is None:
                array = lies_over_an_array(net.head.weight)
            if array is not None:
                array *= 0.5
                yield [net.head.weight.clone()]

    check(make, run, torch.device("cpu"), window=window)


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


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.few(1)
def test_a_clamp_through_data_under_autocast_between_accumulated_batches(device, window):
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    plain = fit(Critic, None, device, **options)
    streamed = fit(Critic, sp_lightning.SuperpipelineStrategy(window=window, device=device), device, **options)
    assert streamed.losses == plain.losses
    assert_equal_parameters(streamed, plain)


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
@pytest.mark.few(1)
def test_a_write_through_what_a_weight_gave_away_is_seen(way, options, device):
    plain = fit(lambda: Giving(GIVEN_AWAY[way]()), None, device, **options)
    strategy = sp_lightning.SuperpipelineStrategy(window=6, device=device)
    streamed = fit(lambda: Giving(GIVEN_AWAY[way]()), strategy, device, **options)
    assert streamed.losses == plain.losses
    assert_equal_parameters(streamed, plain)


def assert_equal_parameters(one, other):
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu()), name


def test_units_that_stay_resident_over_the_optimizers_step_are_refilled(device):
    stats = check(blocks, training(steps=3), device, window=6)
    assert stats["fetches"] == 3 * len(units_of(blocks, device))


def units_of(make, device):
    with sp_lightning.stream(make(), device) as handle:
        return handle.units


# --- Weights that the model writes


@pytest.mark.parametrize("block", [models.RescalingBlock, models.DataRescalingBlock])
def test_weights_that_forward_writes_go_back_to_the_host_and_are_counted(device, block):
    stats = check(models.stack_of(block, 3), training(), device)
    assert stats["writebacks"] == 3 * 3
    assert stats["bytes_written_back"] == 9 * models.WIDTH**2 * 4


def test_an_embedding_that_rescales_its_rows(device):
    def run(net, device):
        for index in range(3):
            net(models.tokens(index)["input_ids"].to(device)).square().mean().backward()
            yield [p.grad for p in net.parameters()]

    assert check(lambda: models.TokenStack(max_norm=1.0), run, device)["writebacks"] > 0


# --- What the strategy must not leave to its base class


class Adamw(Critic):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)

    def on_train_batch_end(self, *_):
        self.kept = {value.device for state in self.optimizers().state.values() for value in state.values()}


@pytest.mark.few(1)
def test_optimizer_state_is_on_the_host_also_after_a_resume(device, tmp_path):
    def strategy():
        return sp_lightning.SuperpipelineStrategy(window=1, device=device)

    class Saving(Adamw):
        def on_train_end(self):
            self.trainer.save_checkpoint(tmp_path / "model.ckpt")

    fit(Saving, strategy(), device, max_steps=2)
    module = Adamw()
    module = fit(lambda: module, strategy(), device, max_steps=4, ckpt_path=tmp_path / "model.ckpt")
    assert module.kept == {torch.device("cpu")} and len(module.losses) == 2


def test_loading_a_checkpoint_leaves_the_devices_memory_cache_alone(tmp_path, monkeypatch):
    strategy = sp_lightning.SuperpipelineStrategy()
    trainer = make_trainer(strategy, torch.device("cpu"))
    trainer.strategy.connect(blocks())
    torch.save({"state_dict": {}}, tmp_path / "model.ckpt")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the cache was emptied"))
    assert strategy.load_checkpoint(tmp_path / "model.ckpt", weights_only=True) == {"state_dict": {}}


def test_modules_made_under_the_trainer_are_made_on_the_host(device):
    trainer = make_trainer(sp_lightning.SuperpipelineStrategy(device=device), device)
    with trainer.init_module():
        assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("flags", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.few(2)
def test_flags_of_optimizers_are_the_users_and_the_state_has_nothing_else(device, flags):
    def state(streamed):
        torch.manual_seed(0)
        net = blocks()
        optimizer = torch.optim.AdamW(net.parameters(), **flags)
        plain = optimizer.state_dict()["param_groups"]
        with sp_lightning.stream(net, device, window=1) if streamed else contextlib.nullcontext():
            for x in inputs(device if streamed else torch.device("cpu")):
                squares(net, x).backward()
                optimizer.step()
        assert optimizer.state_dict()["param_groups"] == plain
        return optimizer.state_dict()["state"], list(net.parameters())

    streamed, plain = state(True), state(False)
    for ours, theirs in zip(
        torch.utils._pytree.tree_leaves(streamed), torch.utils._pytree.tree_leaves(plain), strict=True
    ):
        assert torch.equal(ours, theirs)


# --- Host memory and streams


@pytest.mark.simgpu
def test_page_locked_memory_is_not_rounded_up():
    import simgpu

    before, net = simgpu.pinned_bytes()[0], blocks()
    with sp_lightning.stream(net, torch.device("simgpu", 0), window=1) as handle:
        exact = sum(unit.nbytes for unit in handle.units)
        assert handle.stats()["host_bytes"] == exact
        assert simgpu.pinned_bytes()[0] - before == exact


@pytest.mark.simgpu
def test_where_no_memory_can_be_page_locked_the_run_goes_on_and_says_so(monkeypatch, caplog):
    empty = torch.empty

    def refusing(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("cannot page-lock memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    check(blocks, training(), torch.device("simgpu", 0))
    assert sum("page-locked" in message for message in caplog.messages) == 1


@pytest.mark.simgpu
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("slow", ["copies", "kernels"])
@pytest.mark.few(1)
def test_memory_is_not_given_away_while_it_is_read_whoever_is_slow(window, slow):
    import simgpu

    def run(net, device):
        if slow == "copies":
            simgpu.config.h2d_us = simgpu.config.d2h_us = 300
        else:
            simgpu.config.compute_us = 100
        yield from training()(net, device)

    check(blocks, run, torch.device("simgpu", 0), window=window)
    assert simgpu.races() == []


# --- Neighbours and precision


def test_transformers_and_torchvision_import_together():
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    assert transformers.LlamaForCausalLM and transformers.CLIPModel


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
    streamed = fit(Overflowing, sp_lightning.SuperpipelineStrategy(window=1, device=device), device, **options)
    assert streamed.losses == plain.losses and len(set(plain.losses[1::2])) > 1
    assert_equal_parameters(streamed, plain)


@pytest.mark.parametrize("training_mode", [True, False])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_device_weight_requires_grad_as_its_host_parameter_does(device, training_mode, context):
    def run(net, device):
        net.train(training_mode)
        seen = []
        for block in net.blocks:
            block.register_forward_hook(lambda block, *_: seen.append([p.requires_grad for p in block.parameters()]))
        with context():
            yield [net(x) for x in inputs(device)], seen

    check(models.stack_of(models.AdaptedBlock), run, device)


class WritesAtTimes(nn.Linear):
    """Writes its weight while autograd records, if told to: an error in a plain run, at the write."""

    def forward(self, x):
        if getattr(self, "writes", False):
            self.weight.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.few(1)
def test_a_write_that_is_refused_leaves_the_weights_as_they_were(where, autocast, device):
    def build():
        net = blocks()
        for block in net.blocks:
            block.up.__class__ = WritesAtTimes
        return net

    def run(net, device):
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device, 5)):
            optimizer.zero_grad()
            net.blocks[where].up.writes = index == 2
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                if index == 2:
                    with pytest.raises(RuntimeError, match="leaf"):
                        net(x)
                else:
                    loss = squares(net, x)
                    loss.backward()
                    optimizer.step()
                    yield loss, [p.grad for p in net.parameters()]
            yield [p.detach().clone() for p in net.parameters()]

    check(build, run, device)


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


def unnormed(net):
    for block in net.blocks:
        nn.utils.remove_weight_norm(block.up)
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


def test_weight_norm_that_is_removed_between_steps(device):
    def run(net, device):
        yield from training(steps=2)(net, device)
        yield from training(steps=2)(unnormed(net), device)

    check(lambda: weight_normed(blocks()), run, device)


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


class CompactLSTM(nn.LSTM):
    """Does on every device what cuDNN's does: moves its weights into one chunk of memory, as soon as it meets them."""

    def flatten_parameters(self):
        with torch.no_grad():
            for weight in self._flat_weights:
                weight.set_(weight.clone())


@pytest.mark.parametrize("activations", ["keep", "recompute", "recompute+offload"])
def test_recurrent_layers_neither_move_their_weights_nor_keep_them_on_the_device(device, activations):
    def run(net, device):
        optimizer = sgd(net)
        for index in range(3):
            loss = net(models.sequences(index)[0].to(device))[0].square().mean()
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(CompactLSTM(models.FEATURES, models.FEATURES) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)[0]
            return x

    stats = check(Recurrent, run, device, activations=activations)
    assert stats["writebacks"] == 0
    if activations == "keep":  # else a second run's weights stay for outputs that backward does not reach
        assert stats["extra_held"] == 0


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_evaluation_fast_path_of_transformer_encoders(device, padding, context):
    def make():
        layer = nn.TransformerEncoderLayer(models.FEATURES, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 3)

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


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_evaluation_fast_path_of_multihead_attention(device, need_weights):
    def run(net, device):
        net.eval()
        x = models.sequences(0)[0].to(device)
        with torch.no_grad():
            yield net(x, x, x, need_weights=need_weights)

    check(lambda: nn.MultiheadAttention(models.FEATURES, 2, batch_first=True), run, device)
