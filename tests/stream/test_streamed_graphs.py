"""Autograd, checkpoints, saved-tensor hooks and what forwards change are as in the plain run."""

import functools
import gc
import random
import weakref

import numpy
import pytest
import torch
from often import often
from stream_programs import PLACES, POLICIES, Block, Net, cases, check, collected, stream, streamed
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sp_lightning.errors import ExactnessError, UnsupportedError

PROGRAMS = []
program = collected(PROGRAMS)


class Projected(torch.autograd.Function):
    """A layer by hand, as kernels of fused losses are."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight[:].t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight[:], grad.t() @ x


class Fused(Net):
    """Hands weights of streamed layers to a function, beside the calls of those layers."""

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = Projected.apply(Projected.apply(block(x), block.up.weight), block.down.weight)
        return Projected.apply(x, self.head.weight) + self.head.bias


@program(Fused, *POLICIES)
def a_function_gets_weights_of_streamed_layers(run, model):
    return run.loop(model)


class ReentrantAround(Net):
    def forward(self, x):
        def part(x, blocks):
            for block in blocks:
                x = block(x)
            return x

        x = checkpoint(part, self.emb(x), self.blocks[:3], use_reentrant=True)
        return self.head(checkpoint(part, x, self.blocks[1:], use_reentrant=True))


@program(ReentrantAround)
def reentrant_checkpoints_overlap_and_gradients_have_a_hook(run, model):
    model.blocks[1].up.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return run.loop(model)


@program(Net, "keep", "recompute")
def a_selective_checkpoint_is_around_each_block(run, model):
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def step(model, optimizer, i):
        x = model.emb(run.x(i))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=context)
        return run.train(model.head(x).square().mean(), optimizer)

    return run.loop(model, step)


@program(Net, "keep", "recompute")
def a_backward_ends_at_an_input(run, model):
    def step(model, optimizer, i):
        x = run.x(i).requires_grad_()
        model(x).square().mean().backward(inputs=[x])
        run.train(model(x.detach()).square().mean(), optimizer)
        return x.grad.sum()

    return run.loop(model, step)


@program(Net, "keep", "recompute", "offload")
def inference_mode_comes_first_and_between(run, model):
    with torch.inference_mode():
        seen = [model(run.x(0)).clone()]

    def step(model, optimizer, i):
        with torch.inference_mode():
            seen.append(model(run.x(i + 9)).clone())
        return run.step(model, optimizer, i)

    return run.loop(model, step) + seen


@program(Net, "keep", "recompute")
def tangents_go_forward(run, model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(run.x(0), run.x(1)))).tangent.detach().clone()


@program(Net, "keep", "recompute", "offload")
def outputs_of_blocks_are_changed_in_place(run, model):
    def step(model, optimizer, i):
        x = model.emb(run.x(i))
        for block in model.blocks:
            x = block(x)
            x.mul_(1.1)
            x[0].add_(1)
        return run.train(model.head(x).square().mean(), optimizer)

    return run.loop(model, step)


class ChangesArgument(Block):
    def forward(self, x):
        x.mul_(1.1)
        return super().forward(x)


class Doubles(Net):
    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x * 2)
        return self.head(x)


@program(lambda: Doubles(ChangesArgument), *POLICIES)
def blocks_change_their_argument_in_place(run, model):
    return run.loop(model)


class Draws(Block):
    def forward(self, x):
        x = super().forward(x) * random.random() + float(numpy.random.rand())
        return nn.functional.dropout(x, 0.5)


@program(lambda: Net(Draws), *POLICIES)
def blocks_draw_from_all_generators(run, model):
    def step(model, optimizer, i):
        torch.manual_seed(i)
        random.seed(i)
        numpy.random.seed(i)
        return run.step(model, optimizer, i)

    return [*run.loop(model, step), random.random(), float(numpy.random.rand()), torch.rand(())]


class Counts(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("copy", torch.zeros(32))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.copy = self.copy * 0.9 + x.detach().mean(0)
        return super().forward(x) + self.mean + self.copy


@program(lambda: Net(Counts), *POLICIES)
def blocks_write_and_replace_buffers(run, model):
    return run.loop(model)


class TakesPair(Block):
    def forward(self, pair):
        x, factor = pair
        return self.down(self.up(x * 2).relu()) * factor


class WritesPair(Net):
    """Blocks that get a tensor inside of a tuple, to which their results are added."""

    def __init__(self):
        super().__init__(TakesPair)

    def forward(self, x):
        x, factor = self.emb(x), torch.full((), 0.5, device=x.device)
        for block in self.blocks:
            x.add_(block((x, factor)))
        return self.head(x)


@program(WritesPair, "keep", "offload")
def tensors_in_tuples_are_written_after_their_use(run, model):
    return run.loop(model)


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context", "ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("device, window", PLACES)
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
def test_graphs_are_those_of_the_plain_run(program, policy, window, device):
    check(program, device, policy, window)


# ---- what is refused


class WritesSaved(Block):
    def forward(self, x):
        a = self.up(self.norm(x))
        b = a.exp()
        b.add_(1)
        return x + self.down(b)


@pytest.mark.parametrize("policy", often(POLICIES))
def test_a_saved_tensor_that_was_written_raises_torch_s_error(policy):
    model = Net(WritesSaved)
    with streamed(model, "cpu", activations=policy), pytest.raises(RuntimeError, match="modified by an inplace"):
        model(torch.ones(4, 8)).sum().backward()


def test_a_weight_written_before_backward_raises_torch_s_error():
    model = Net()
    with streamed(model, "cpu"):
        loss = model(torch.ones(4, 8)).sum()
        with torch.no_grad():
            model.blocks[4].up.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()


def test_recompute_refuses_a_buffer_first_written_in_later_calls():
    model = Net(Counts)
    for block in model.blocks:
        block.forward = functools.partial(Block.forward, block)
    with streamed(model, "cpu", activations="recompute"):
        model(torch.ones(4, 8)).sum().backward()
        for block in model.blocks:
            del block.forward
        with pytest.raises(ExactnessError, match=r"blocks\.0 wrote to its buffer 'mean'"):
            model(torch.ones(4, 8))


class Converts(Block):
    def forward(self, x):
        self.up.to(x.dtype)  # as a router of mixtures does, which nothing changes
        return super().forward(x)


def test_a_conversion_that_changes_nothing_is_no_write():
    model = Net(Converts)
    with streamed(model, "cpu", activations="recompute"):
        model(torch.ones(4, 8)).sum().backward()


class WritesTheSame(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, x):
        self.shift.copy_(self.shift.clone())
        return super().forward(x) + self.shift


def test_a_buffer_that_gets_the_values_it_has_is_recomputed():
    model = Net(WritesTheSame)
    with streamed(model, "cpu", activations="recompute"):
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()


def test_a_tensor_in_a_tuple_written_before_backward_is_refused():
    with streamed(WritesPair(), "cpu", activations="recompute") as handle:
        loss = handle.module(torch.ones(4, 8)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()


def test_a_graph_used_after_close_is_refused():
    model = Net()
    with streamed(model, "cpu"):
        losses = [model(torch.ones(4, 8)).sum(), model.blocks[0].up(torch.ones(4, 32)).sum()]
    for loss in losses:  # by its saved weights, and by its gradients alone
        with pytest.raises(UnsupportedError, match=r"after close\(\)"):
            loss.backward()


class Tied(nn.Module):
    """A net whose blocks share a weight that is no unit's."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.scale = nn.Parameter(torch.ones(4))
        for block in self.net.blocks:
            block.scale = self.scale

    def forward(self, x):
        return self.net(x) * self.scale


def test_a_unit_that_shares_a_resident_weight_is_recomputed():
    model, count = Tied(), []
    model.net.blocks[0].up.register_forward_hook(lambda *_: count.append(1))
    with streamed(model, "cpu", activations="recompute"):
        model(torch.ones(4, 8)).sum().backward()
        assert len(count) == 2


@pytest.mark.parametrize("activations", ["keep", "recompute", "recompute+offload"])
def test_a_step_s_inputs_go_without_a_garbage_collection(activations):
    """Of several steps they would fill the device until Python looks for cycles."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    inputs = []
    gc.collect()
    gc.disable()
    try:
        with stream(net, "cpu", window=2, activations=activations, units=["Sequential"]):
            hook = net[1].register_forward_pre_hook(
                lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage()))
            )
            net(torch.ones(2, 8)).sum().backward()
            hook.remove()
            assert inputs and all(one() is None for one in inputs)
    finally:
        gc.enable()
