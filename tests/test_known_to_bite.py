"""What is known to bite whoever streams weights, each trap with the outcome that the contract names.

Bitwise equal to the plain run, equal to rounding, or a typed error. What users do beside training is in
test_unusual_use.py, and references that outlive a visit are in test_kept_references.py.
"""

from __future__ import annotations

import logging
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import parity
import sp_lightning
from side_by_side import assert_plain, blocks, check, inputs, on_each_device, sgd, squares, training

# --- Saved-tensor hooks and recomputation


class CountingBlock(models.Block):
    """Counts how often its forward ran."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


@on_each_device
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_several_units_recomputes_as_in_the_plain_run(device, use_reentrant):
    def run(net, device):
        for x in inputs(device):
            checkpoint(net.run, net.stem(x), use_reentrant=use_reentrant).square().mean().backward()
            yield [block.runs for block in net.blocks]

    check(models.stack_of(CountingBlock), run, device)


@on_each_device
def test_saved_tensor_hooks_of_the_user_see_what_they_see_in_the_plain_run(device):
    def run(net, device):
        for x in inputs(device):
            packed, unpacked = [], []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: packed.append(tuple(t.shape)) or t.cpu(), lambda t: unpacked.append(tuple(t.shape)) or t.to(device)
            ):
                loss = squares(net, x)
            loss.backward()
            yield loss, packed, unpacked

    check(blocks, run, device)


@on_each_device
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


@on_each_device
@pytest.mark.parametrize("block", [SelfCheckpointingBlock, ReentrantBlock])
def test_a_block_that_checkpoints_inside_its_own_forward(device, block):
    check(models.stack_of(block), training(), device)


@on_each_device
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


@on_each_device
@pytest.mark.parametrize("through", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("use_reentrant", [False, True])
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


@on_each_device
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_an_auxiliary_loss_kept_as_an_attribute_leads_into_backward_by_a_side_door(device, weight):
    def loss(net, x):
        output = net(x)
        return weight * output.square().mean() + sum(block.auxiliary_loss for block in net.blocks)

    check(models.stack_of(models.AuxiliaryBlock), training(loss), device)


@on_each_device
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


@on_each_device
def test_backward_enters_a_unit_through_any_one_of_its_outputs(device):
    check(lambda: ForkingStack(ForkingBlock() for _ in range(3)), training(), device)


@on_each_device
def test_backward_enters_through_a_cache_while_the_outputs_are_thrown_away(device):
    def run(net, device):
        for index in range(3):
            net(models.sequences(index)[0].to(device)).square().mean().backward()
            yield [p.grad for p in net.parameters()]

    check(models.CachingStack, run, device)


# --- Orders that change


@on_each_device
@pytest.mark.parametrize("count", [1, 2])
def test_blocks_that_are_visited_many_times_over(device, count):
    check(lambda: models.RepeatedStack([models.Block() for _ in range(count)]), training(), device)


@on_each_device
def test_blocks_that_are_skipped_at_random(device):
    stats = check(lambda: models.SkippingStack(models.Block() for _ in range(4)), training(steps=8), device)
    assert stats["surprises"] > 0


@on_each_device
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


@on_each_device
def test_a_weight_that_is_used_in_several_calls_of_one_graph_sums_its_gradients_in_plain_order(device):
    def loss(net, x):  # the same blocks in three calls, of very different size: another order is another sum
        return sum(net(x * scale).square().mean() for scale in (1e-3, 1.0, 1e3, 0.3))

    check(blocks, training(loss), device)


# --- More than one backward


@on_each_device
def test_a_backward_through_the_gradients(device):
    def run(net, device):
        for x in inputs(device):
            grads = torch.autograd.grad(squares(net, x), list(net.parameters()), create_graph=True)
            sum(g.square().sum() for g in grads).backward()
            yield grads, [p.grad for p in net.parameters()]

    check(blocks, run, device)


@on_each_device
def test_a_gradient_penalty_on_the_inputs(device):
    def loss(net, x):
        x = x.clone().requires_grad_()
        slope = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
        return (slope.norm(dim=-1) - 1).square().mean()

    check(blocks, training(loss), device)


@on_each_device
def test_one_graph_three_times_backward(device):
    def run(net, device):
        for x in inputs(device, 2):
            loss = squares(net, x)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            yield [p.grad for p in net.parameters()]
            loss.backward()

    check(blocks, run, device)


@on_each_device
def test_autograd_grad_of_some_weights_leaves_grad_alone(device):
    def run(net, device):
        for x in inputs(device):
            some = [net.blocks[2].up.weight, net.blocks[0].down.bias, net.stem.weight]
            yield torch.autograd.grad(squares(net, x), some), [p.grad for p in net.parameters()]

    check(blocks, run, device)


@on_each_device
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


@on_each_device
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


@on_each_device
def test_ties_of_every_shape(device):
    check(SharedLayers, training(), device)


@on_each_device
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


@on_each_device
def test_a_regulariser_over_all_parameters_inside_the_step(device):
    def losses(strategy):
        return fit(UnitRegulariser, strategy, device).losses

    assert losses(None) == losses(sp_lightning.SuperpipelineStrategy(window=1, device=device))


@on_each_device
def test_a_regulariser_on_the_host_is_equal_to_rounding_with_one_log_line(device, caplog):
    def run(strategy):
        net = blocks()
        if strategy:
            sp_lightning.stream(net, device, window=1)
        for x in inputs(device):
            (squares(net, x) + 1e-2 * sum(p.square().sum() for p in net.parameters()).to(device)).backward()
        return [p.grad for p in net.parameters()]

    with caplog.at_level(logging.INFO, "sp_lightning"):
        torch.manual_seed(0)
        streamed = run(True)
    torch.manual_seed(0)
    plain = blocks()
    plain.to(device)
    for x in inputs(device):
        (squares(plain, x) + 1e-2 * sum(p.square().sum() for p in plain.parameters())).backward()
    for ours, theirs in zip(streamed, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad.cpu())
    assert sum("read on the host" in message for message in caplog.messages) == 1


def fit(make, strategy, device, **options):
    """The module after a short fit, plain if there is no strategy; with the list `losses` for it to fill."""
    if device.type == "simgpu":
        import simgpu.lightning  # noqa: F401
    torch.manual_seed(0)
    module = make()
    module.losses = []
    trainer = L.Trainer(
        strategy=strategy or parity.plain_strategy(device.type),
        accelerator=device.type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_steps": 4} | options),
    )
    trainer.fit(module, torch.utils.data.DataLoader([models.vectors(i) for i in range(4)], batch_size=None))
    return module
