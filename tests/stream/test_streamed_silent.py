"""What used to differ silently between a plain run and a streamed one: each is the same now, or stated here."""

import contextlib

import pytest
import torch
from often import often
from stream_programs import Block, Net, Program, cases, check, collected, streamed
from torch import nn

PROGRAMS = []
program = collected(PROGRAMS)


class Named(Block):
    """A block that finds its weights in dicts and lists of the user's."""

    def __init__(self):
        super().__init__()
        self.names = {weight: name for name, weight in self.named_parameters()}

    def forward(self, x):
        assert self.up.weight in self.names and self.names[self.down.bias] == "down.bias"
        known = [self.names[weight] for weight in self.parameters()]
        return super().forward(x) * len(known)


@program(lambda: Net(Named, 2), "keep", "recompute")
def weights_are_keys_in_their_forward(run, model):
    return run.loop(model)


class TwiceRead(nn.Module):
    """A weight that travels in autocast's type, read twice in one call, and once by another module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        first = nn.functional.linear(x, self.inner.weight)
        return first + nn.functional.linear(first.relu(), self.inner.weight) + self.inner(x)


@program(lambda: Net(TwiceRead, 3), "keep", "recompute", wire=torch.bfloat16)
def a_narrow_weight_is_read_twice(run, model):
    def step(model, optimizer, i):
        with torch.autocast(run.device.type, torch.bfloat16, cache_enabled=False):
            loss = model(run.x(i)).square().mean()
        return run.train(loss, optimizer)

    return run.loop(model, step)


def steps_of_two_backwards(run):
    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


class Scaling(Block):
    """A block that reads the gradients that earlier backwards left."""

    def forward(self, x):
        grads = [weight.grad for weight in self.parameters() if weight.grad is not None]
        return super().forward(x) / (1 + sum(grad.norm() for grad in grads))


@program(lambda: Net(Scaling, 3), "keep", "recompute", "offload")
def gradients_are_read_in_their_forward(run, model):
    return run.loop(model, steps_of_two_backwards(run), run.adamw(model.parameters()))


def scale_data(weight):
    weight.data.mul_(0.9)


def give_data(weight):
    weight.data = weight.data * 0.9


class Weighing(Block):
    """A block that multiplies the gradients that earlier backwards left with its weights."""

    def forward(self, x):
        if self.up.weight.grad is None:
            return super().forward(x)
        factor = (self.up.weight.grad * self.up.weight).sum()
        return super().forward(x) * (1 + factor.to(x.device))


@program(lambda: Net(Weighing, 3), "keep", "recompute", "offload")
def gradients_are_multiplied_with_weights(run, model):
    return run.loop(model, steps_of_two_backwards(run))


CAPTURED = {
    "copy_": lambda weight: weight.copy_(weight * 0.9),
    "detach": lambda weight: weight.detach().mul_(0.9),
    "data": scale_data,
    "given": give_data,
}


def captured(kind):
    """Make a program in which a hook inside a unit writes its weight, which it knows from before the stream."""

    @program(Net, "keep", "offload")
    def written(run, model):
        weight = model.blocks[1].up.weight

        @torch.no_grad()
        def hook(layer, args):
            CAPTURED[kind](weight)

        model.blocks[1].up.register_forward_pre_hook(hook)
        return run.loop(model)

    written.__name__ = f"hook_writes_by_{kind}"


for kind in CAPTURED:
    captured(kind)


def decay(run, model, get):
    """Train with a term of all weights in the loss."""

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        return run.train(loss + sum(get(weight).square().sum() for weight in model.parameters()), optimizer)

    return run.loop(model, step)


@program(Net, "keep", "recompute")
def a_term_reads_weights_by_what_returns_them(run, model):
    """Nothing held the memory that backward reads."""
    return decay(run, model, lambda weight: weight.float().contiguous())


@program(Net, "keep", "recompute")
def a_term_is_a_distance_to_copies_of_weights(run, model):
    """The copies were made between steps."""
    copies = {weight: weight.detach() * 0.9 for weight in model.parameters()}
    return decay(run, model, lambda weight: weight - copies[weight])


@program(Net)
def a_term_reads_a_weight_with_its_gradient(run, model):
    """Of which clipping noted a factor."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(model, optimizer, i):
        optimizer.zero_grad()
        model(run.x(i)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        term = sum((weight * weight.grad).sum() for weight in model.parameters())
        optimizer.step()
        return term

    return run.loop(model, step, optimizer)


@program(Net, "keep", "recompute")
def a_term_reads_weights_by_their_storage_offset(run, model):
    """On the device a weight is one of many in a storage."""
    return decay(run, model, lambda weight: weight.as_strided((2,), (1,), weight.storage_offset()))


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
@pytest.mark.simgpu
def test_it_is_the_same_now(program, policy, device):
    check(program, device, policy)


class Decaying(Block):
    """A block that writes to a weight of a layer."""

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.99)
        return super().forward(x)


def test_a_write_to_a_unit_on_the_device_is_kept(device):
    """Nothing had noted it where an earlier forward had left the layer's weight there."""

    def accumulate(run, model):
        return run.loop(model, lambda model, optimizer, i: [model(run.x(i)).sum(), run.step(model, optimizer, i)][1])

    program = Program(accumulate, lambda: Net(Decaying, 2), options={"units": ["Linear"]})
    check(program, device.type, window=8)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_a_step_writes_to_views_in_another_type(wire, device):
    """Such a view has no base by which it could be known."""
    model = Net()
    wanted = model.blocks[2].up.weight.detach().clone()
    wanted.view(torch.int32)[..., 0].bitwise_xor_(64)
    with streamed(model, device.type, wire=wire) as handle:
        weight = model.blocks[2].up.weight
        with handle.scope("train"), torch.no_grad():
            weight.view(torch.int32)[..., 0].bitwise_xor_(64)
            assert weight.mul_(1) is weight
            weight.view_as(weight).mul_(0.5)
    assert torch.equal(weight, wanted * 0.5)


def test_identity_in_a_forward_is_that_of_the_device_s_tensor():
    """`is` compares with the tensor on the device, as under FSDP2; `==`, `in` and keys find the parameter."""
    found = []

    class Asking(Block):
        def forward(self, x):
            found.append((self.up.weight is kept[0], self.up.weight in kept))
            return super().forward(x)

    model = Net(Asking, 1)
    kept = [model.blocks[0].up.weight]
    with streamed(model, "cpu"), contextlib.suppress(RuntimeError):
        model(torch.ones(4, 8))
    assert found == [(False, True)]


def test_a_parametrization_made_last_streams_again():
    """One of its parameters is over the bytes of the weight that streamed."""
    model = Net()
    with streamed(model, "cpu"):
        nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    wanted = model(torch.ones(4, 8))
    with streamed(model, "cpu"):
        assert torch.equal(model(torch.ones(4, 8)), wanted)


def test_hooks_see_what_a_failed_backward_left_at_the_next_touch():
    """A plain run's hook sees it as it comes; here gradients of a unit come together."""
    model, seen = Net(), []
    model.blocks[1].down.bias.register_hook(lambda grad: seen.append(grad.clone()))

    def fail(layer, grads):
        raise KeyError

    model.blocks[1].up.register_full_backward_pre_hook(fail)
    with streamed(model, "cpu"):
        loss = model(torch.ones(4, 8)).sum()
        with pytest.raises(KeyError):
            loss.backward()
        assert not seen
        assert model.blocks[1].down.bias.grad is not None and len(seen) == 1
