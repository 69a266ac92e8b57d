"""What activations="recompute" puts back before forward runs again, and what it leaves alone, on both cores."""

import contextlib
import functools
import types

import pytest
import torch
from cores import streaming
from refusals import refusal
from side_by_side import blocks, check, inputs, squares, training
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import models
import parity
from sp_lightning.errors import ExactnessError


class Flooding(models.Block):
    """Changes what is passed to it, as a dropout does that comes first."""

    def forward(self, x):
        x = nn.functional.dropout(getattr(x, "x", x), 0.3, self.training, inplace=True)
        x.mul_(1.5)
        return x + self.down(self.up(self.norm(x)).relu())


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_block_that_changes_its_input_in_place_runs_again_with_what_it_was(device, activations, window):
    check(models.stack_of(Flooding), training(steps=3), device, activations=activations, window=window)


class FloodingStack(nn.Module):
    """Three of them, each handed what a copy can not stand for."""

    def __init__(self, passed):
        super().__init__()
        self.blocks = nn.ModuleList(Flooding() for _ in range(3))
        self.passed = passed

    def forward(self, x):
        x = x.repeat(3, 1).relu()
        for block in self.blocks:
            x = block(types.SimpleNamespace(x=x) if self.passed == "inside" else x[1:])
        return x


@pytest.mark.parametrize("passed", ["in part", "inside"])
def test_a_change_in_place_of_what_is_shared_is_exact_or_an_error(passed, device):
    def run(net, device):
        for x in inputs(device):
            squares(net, x.repeat(1, 2)).backward()

    with contextlib.suppress(ExactnessError):
        check(lambda: FloodingStack(passed), run, device, activations="recompute", units=["Flooding"])


class Doubling(models.Block):
    """Does not save what is passed to it, which may be changed afterwards."""

    def forward(self, x):
        return super().forward(x * 2)


class Changing(models.Stack):
    """Changes, between a block and the next, what the block needs to run again."""

    def __init__(self, changed):
        super().__init__(Doubling() for _ in range(4))
        self.changed = changed

    def run(self, x):
        for block in self.blocks:
            out = block(x)
            with torch.no_grad():
                if self.changed == "passed":
                    x.add_(1)
            x = x + out
        return x


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
@refusal(
    '`activations="recompute"`, and a unit saves other tensors in its second forward than in its first',
    ExactnessError,
    '"keep" or "offload"',
)
def test_a_second_run_that_saves_other_tensors_is_an_error(activations, device):
    runs = [0]

    class Alternating(models.Block):
        def forward(self, x):
            runs[0] += 1
            return super().forward(x.double().exp().float() if runs[0] > 9 else x)

    net, (x,) = models.stack_of(Alternating)(), inputs(device, 1)
    with streaming(net, device, window=1, activations=activations, units=["Alternating"]):
        loss = squares(net, x)
        runs[0] = 9
        with pytest.raises(ExactnessError, match=r"blocks\.\d ran again in backward, and not as it did") as caught:
            loss.backward()
        assert str(caught.value).endswith("use activations='keep' or 'offload'")


@parity.product(changed=["passed", "nothing"], activations=["recompute", "recompute+offload"], device=parity.DEVICES)
@pytest.mark.few(4)
def test_what_is_changed_between_the_two_runs_is_an_error(activations, changed, device):
    net, x = Changing(changed), torch.ones(64, models.FEATURES, device=device)
    error = pytest.raises((ExactnessError, RuntimeError), match=r"changed after its forward|modified by an inplace")
    with streaming(net, device, window=1, activations=activations):
        for _ in range(2):  # of the second it is known that the blocks change nothing themselves
            with contextlib.nullcontext() if changed == "nothing" else error:
                net(x).sum().backward()
    if device.type == "simgpu" and (activations, changed) == ("recompute+offload", "passed"):
        import simgpu

        torch.accelerator.synchronize()
        simgpu.races()  # of the change and the way to the host: that is the user's


FROZEN = {
    "a unit": (["blocks.1"], []),
    "a layer of a unit": (["blocks.1.up"], ["blocks.2.up"]),
    "the first unit, whose input has no gradient": (["blocks.0"], ["stem"]),
    "what trained, while the rest thaws": (["blocks.0", "blocks.1", "stem"], ["blocks.2", "blocks.3"]),
}


@parity.product(
    weights=list(FROZEN),
    activations=["keep", "recompute", "recompute+offload"],
    autocast=[False, True],
    device=parity.DEVICES,
)
@pytest.mark.few(1)
def test_weights_that_are_frozen_or_thaw_before_backward(weights, activations, autocast, device):
    """As by Lightning's ``toggle_optimizer`` after a forward."""

    def run(net, device):
        def toggle(trains):
            for names, train in zip(FROZEN[weights], (trains, not trains), strict=True):
                for name in names:
                    net.get_submodule(name).requires_grad_(train)

        toggle(True)
        for index, x in enumerate(inputs(device)):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = squares(net, x)
            toggle(trains=index != 1)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]
            toggle(True)

    check(blocks, run, device, activations=activations)


class Hooking(models.Block):
    """Registers hooks from inside its first forward: on a weight, and on one of its layers."""

    hooked = False

    def forward(self, x):
        if not self.hooked:
            self.hooked = True
            self.up.weight.register_hook(lambda grad: grad * 0.5)
            self.norm.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))
            self.up.register_forward_hook(lambda layer, args, output: output * 0.5)
        return super().forward(x)


def test_hooks_that_forward_registers_are_registered_once(device):
    check(models.stack_of(Hooking), training(), device, activations="recompute")


def test_hooks_inside_a_unit_run_again_and_those_of_the_unit_do_not(device):
    net, ran = blocks(), []
    net.blocks[1].up.register_forward_hook(lambda *_: ran.append("up"))
    net.blocks[1].register_forward_hook(lambda *_: ran.append("block"))
    with streaming(net, device, window=1, activations="recompute"):
        squares(net, next(iter(inputs(device)))).backward()
    assert ran == ["up", "block", "up"]


class Folded(nn.Module):
    """A block with one weight in two layers, and a checkpoint of its own around one of them."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.up, self.again = nn.Linear(models.WIDTH, models.WIDTH), nn.Linear(models.WIDTH, models.WIDTH)
        self.down = nn.Linear(models.WIDTH, models.WIDTH, bias=False)
        self.again.weight = self.up.weight
        self.use_reentrant = use_reentrant

    def forward(self, x):
        y = checkpoint(self.within, self.up(x), use_reentrant=self.use_reentrant)
        return x + self.down(self.again(y))

    def within(self, x):
        return torch.tanh(self.up(torch.tanh(self.down(x))))


def under(dtype, loss):
    """A loss that is computed under autocast with this type, or without autocast."""

    def cast(net, x):
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            return loss(net, x)

    return cast


@parity.product(
    activations=["recompute", "recompute+offload", "offload"],
    casts=[None, torch.bfloat16],
    reentrant=[False, True],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_a_checkpoint_inside_a_unit_with_a_shared_weight(reentrant, casts, activations, device):
    check(models.stack_of(lambda: Folded(reentrant)), training(under(casts, squares)), device, activations=activations)


class Normalised(nn.Module):
    """Leaves traces of each run: batch statistics, and a count after all that backward needs was saved."""

    runs = 0

    def __init__(self, around=None):
        super().__init__()
        self.up, self.norm = nn.Linear(models.WIDTH, models.WIDTH), nn.BatchNorm1d(models.WIDTH)
        self.around = around

    def forward(self, x):
        return self.within(x) if self.around is None else x + checkpoint(self.within, x, use_reentrant=self.around)

    def within(self, x):
        y = self.norm(self.up(x)).tanh()
        self.runs += 1
        return x + y


class Scaled(nn.Module):
    """Units behind a weight of another one: they run while that unit is visited."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.WIDTH))
        self.blocks = nn.ModuleList(Normalised() for _ in range(2))

    def forward(self, x):
        return through_blocks(self, x + self.scale)

    @property
    def runs(self):
        return [block.runs for block in self.blocks]


def through_blocks(net, x):
    for block in net.blocks:
        x = block(x)
    return x


def checkpoint_each(net, x, reentrant):
    return functools.reduce(lambda x, block: checkpoint(block, x, use_reentrant=reentrant), net.blocks, x)


# Where a module has a checkpoint of its own: calls of its blocks.
CHECKPOINTED = {
    "each unit": checkpoint_each,
    "units behind a weight": checkpoint_each,
    "all units": lambda net, x, reentrant: checkpoint(through_blocks, net, x, use_reentrant=reentrant),
    "twice around each unit": lambda net, x, reentrant: functools.reduce(
        lambda x, block: checkpoint(lambda x: checkpoint(block, x, use_reentrant=reentrant), x, use_reentrant=False),
        net.blocks,
        x,
    ),
    "one unit beside others": lambda net, x, reentrant: through_blocks(
        net, checkpoint(net.blocks[0], x, use_reentrant=reentrant)
    ),
}


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", [*CHECKPOINTED, "in each unit"])
@pytest.mark.few(2)
def test_a_checkpoint_of_the_users_leaves_the_traces_of_the_plain_run(place, reentrant, activations, device):
    def run(net, device):
        calls = CHECKPOINTED.get(place, lambda net, x, _: through_blocks(net, x))
        for x in inputs(device):
            loss = calls(net, net.stem(x), reentrant).square().mean()
            loss.backward()
            yield loss, [p.grad for p in net.parameters()], list(net.buffers()), [b.runs for b in net.blocks]

    block = functools.partial(Normalised, reentrant if place == "in each unit" else None)
    make = models.stack_of(Scaled if place == "units behind a weight" else block)
    check(make, run, device, activations=activations, units=["Normalised"])


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("casts", [None, torch.bfloat16])
@pytest.mark.parametrize("policy", [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE])
@pytest.mark.few(1)
def test_a_selective_checkpoint_counts_no_copies_of_weights(policy, casts, window, device):
    """In the second run other weights are on the device than in the first."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def choose(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in products else policy

    def loss(net, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        x = checkpoint(through_blocks, net, net.stem(x), use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    make = models.stack_of(models.Block, 6)
    check(make, training(under(casts, loss)), device, window=window, activations="recompute")


class Table(nn.Module):
    """A table of which autograd saves the rows that are read, and a layer."""

    def __init__(self, tied=None, **options):
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 8, **options), nn.Linear(8, 8)
        if tied is not None:
            self.table.weight = tied

    def forward(self, x):
        return x + self.layer(self.table(torch.arange(4, device=x.device)))


def test_a_weight_that_another_unit_writes_is_an_error(device):
    """Autograd saved nothing of it, and the second run of its own unit would begin with what was written."""
    first = Table()
    net = nn.Sequential(first, Table(first.table.weight, max_norm=0.1))
    x = torch.ones(4, 8, device=device, requires_grad=True)
    with streaming(net, device, window=1, units=["Table"], activations="recompute"):
        with pytest.raises(ExactnessError, match=r"writes to its weights|was changed after its forward"):
            net(x).sum().backward()
