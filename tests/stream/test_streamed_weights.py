"""Weights that a program reads, writes, keeps, replaces, shares and saves are those of the plain run."""

import pytest
import torch
from stream_programs import PLACES, Block, Net, cases, check, collected, device_named, stream, streamed
from torch import nn

from sp_lightning.errors import ExactnessError, UnsupportedError

PROGRAMS = []
program = collected(PROGRAMS)


@program(Net, "keep")
def backed_up_by_data_and_put_back(run, model):
    """Swap averages in as many EMA callbacks do: the backup is the weights' own data."""
    optimizer, seen = run.adamw(model.parameters()), []
    average = {name: p.data.clone() for name, p in model.named_parameters()}
    for i in range(3):
        seen.append(run.step(model, optimizer, i))
        backup = {name: p.data for name, p in model.named_parameters()}
        for name, param in model.named_parameters():
            param.data = average[name]
        with torch.no_grad():
            seen.append(model(run.x(50 + i)).clone())
        for name, param in model.named_parameters():
            param.data = backup[name]
    return seen


WRITES = [
    lambda p, g: p.data.sub_(g),
    lambda p, g: p.data.mul_((g > 0).float()),
    lambda p, g: p.data.view(-1).lerp_(g.view(-1), 0.1),
    lambda p, g: p.data.__setitem__(0, g[0]),
    lambda p, g: p.data.masked_fill_(g > 0, 0.5),
    lambda p, g: p.detach().sub_(g),
    lambda p, g: torch._foreach_sub_([p.data], [g]),
    lambda p, g: torch.sub(p.data, g, out=p.data),
    lambda p, g: p.view(-1).sub_(g.view(-1)),
    lambda p, g: p[1:].copy_(g[1:]),
    lambda p, g: p.mul_(1 - g.mean()),  # a number on the device
]


@program(Net, "keep", "recompute")
def written_with_what_is_on_the_device(run, model):
    """In a plain run weights are there as well; views of them on the host are not."""
    seen = []
    for i, write in enumerate(WRITES):
        params = list(model.parameters())
        loss = model(run.x(i)).square().mean()
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            with torch.no_grad():
                write(param, 0.1 * grad)
        seen.append(loss.detach().clone())
    return seen


class Momentum(Net):
    """A net whose forward averages its weights into a second one, through views."""

    def __init__(self):
        super().__init__()
        self.slow = nn.ModuleList(Block() for _ in self.blocks).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, fast in zip(self.slow.parameters(), self.blocks.parameters(), strict=True):
                mine.view(-1).lerp_(fast.view(-1), 0.1)
                mine.detach()[0] *= 0.9
        x = self.emb(x)
        for block, slow in zip(self.blocks, self.slow, strict=True):
            x = block(x) + slow(x)
        return self.head(x)


@program(Momentum, "keep", "recompute", "offload")
def averaged_by_the_forward_of_their_parent(run, model):
    return run.loop(model)


@program(Net, "keep", "recompute", "offload")
def penalised_by_views_of_several(run, model):
    def step(model, optimizer, i):
        one, two = model.blocks[0], model.blocks[1]
        both = torch.cat([p.flatten() for p in model.parameters()]).abs().sum()
        pairs = (one.up.weight.t() @ two.up.weight).square().mean() + torch.outer(one.up.bias[:4], two.up.bias).mean()
        return run.train(model(run.x(i)).square().mean() + 1e-3 * (both + pairs), optimizer)

    return run.loop(model, step)


@program()
def given_to_functional_call(run, model):
    def step(model, optimizer, i):
        weights = {name: p * 1.01 for name, p in model.named_parameters()}
        return run.train(torch.func.functional_call(model, weights, (run.x(i),)).square().mean(), optimizer)

    return run.loop(model, step)


class Tagged(Block):
    def forward(self, x):
        self.up.weight.tag = getattr(self.up.weight, "tag", 0) + 1
        return super().forward(x)


@program(lambda: Net(Tagged))
def given_attributes_in_a_forward(run, model):
    return run.loop(model) + [block.up.weight.tag for block in model.blocks]


class Writing(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.99)
        return super().forward(x)


class WritingData(Block):
    def forward(self, x):
        self.up.weight.data.mul_(0.99)
        return super().forward(x)


class ReturnsWeight(Block):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, 32))

    def forward(self, x):
        return super().forward(x), self.position.unsqueeze(0)


class AddsWeights(Net):
    def __init__(self):
        super().__init__(ReturnsWeight)

    def forward(self, x):
        x, found = self.emb(x), []
        for block in self.blocks:
            x, position = block(x)
            found.append(position)
        return self.head(x + sum(found))


@program(AddsWeights, "keep", "recompute", "offload")
def returned_by_their_module(run, model):
    return run.loop(model)


class Stashing(Block):
    def forward(self, x):
        self.view, self.detached = self.up.weight[:2], self.down.weight.detach()
        return super().forward(x)


@program(lambda: Net(Stashing))
def kept_by_their_module_for_the_loss(run, model):
    norms = []

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean() + sum(block.view.sum() for block in model.blocks)
        norms.append(torch.stack([block.detached.norm() for block in model.blocks]))
        return run.train(loss, optimizer)

    return run.loop(model, step) + norms


class TiedNorms(Net):
    def __init__(self):
        super().__init__()
        for block in self.blocks[1:]:
            block.norm.weight = self.blocks[0].norm.weight


@program(TiedNorms, "keep", "recompute", "offload")
def tied_across_units(run, model):
    return run.loop(model)


@pytest.mark.parametrize("device, window", PLACES)
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
def test_weights_are_those_of_the_plain_run(program, policy, window, device):
    check(program, device, policy, window)


# ---- one face: on the host between steps, on the device inside of one


def test_each_weight_has_a_storage_of_its_own_bytes():
    model = Net()
    with streamed(model, "cpu"):
        for param in model.parameters():
            assert param.untyped_storage().nbytes() == param.numel() * 4


# ---- what is refused


def test_another_shape_or_type_is_refused_by_name():
    model = Net()
    with streamed(model, "cpu"), pytest.raises(UnsupportedError, match=r"emb\.weight\.data of torch\.float32"):
        model.double()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("part", ["blocks.1.up", "head"])
def test_a_function_that_gets_the_host_s_weight_is_refused(part):
    model = Net()
    weight = model.get_submodule(part).weight
    with streamed(model, "cpu"):
        loss = model(torch.ones(4, 8)).sum() + Doubled.apply(weight).sum()
        with pytest.raises(ExactnessError, match=rf"{part}\.weight was handed to an autograd\.Function"):
            loss.backward()
        Doubled.apply(weight.view_as(weight)).sum().backward()
        assert weight.grad.eq(2).all()


def test_torch_swaps_no_streamed_tensor():
    model = Net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with streamed(model, "cpu"):
        for layer in (model.blocks[1].up, model.head):
            with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
                torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach() * 0.5))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with pytest.raises(RuntimeError, match=r"emb\.weight.*Cannot swap"):
                model.load_state_dict(state)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.ones_like(model.head.weight)))


def test_a_weight_in_two_streams_is_refused_by_name():
    one, other = Net(), Net()
    other.blocks[1] = one.blocks[1]
    with streamed(one, "cpu"), pytest.raises(ExactnessError, match=r"blocks\.1\.norm\.weight is in another stream"):
        stream(other, "cpu").__enter__()


def test_recompute_refuses_a_forward_that_writes_weights():
    model = Net(Writing)
    with streamed(model, "cpu", activations="recompute"):
        with pytest.raises(ExactnessError, match=r"blocks\.0 writes to its weights.*activations='keep'"):
            model(torch.ones(4, 8)).sum().backward()


@pytest.mark.simgpu
@pytest.mark.parametrize("block", [Writing, WritingData])
def test_a_write_to_a_weight_in_autocast_s_type_is_refused(block):
    model, device = Net(block), device_named("simgpu")
    with streamed(model, "simgpu", wire=torch.bfloat16), torch.autocast("simgpu", dtype=torch.bfloat16):
        with pytest.raises(ExactnessError, match=r"blocks\.0\.up\.weight was written.*wire_dtype='as-is'"):
            model(torch.ones(4, 8, device=device))


def test_a_failed_stream_leaves_nothing_behind():
    one, other = Net(), Net()
    other.blocks[1] = one.blocks[1]
    with streamed(one, "cpu"):
        with pytest.raises(ExactnessError):
            stream(other, "cpu").__enter__()
        assert type(other.blocks[0].up.weight) is nn.Parameter


@pytest.mark.simgpu
def test_a_write_through_an_array_is_seen_by_the_next_call():
    model, x = Net(), torch.randn(4, 32).to("simgpu")
    with streamed(model, "simgpu"), torch.no_grad():
        before = model.blocks[0](x)
        model.blocks[0].up.weight.detach().numpy()[:] = 0
        assert not torch.equal(model.blocks[0](x).cpu(), before.cpu())


@pytest.mark.simgpu
def test_what_a_view_is_like_needs_no_copy_of_its_weight():
    model = Net()
    with streamed(model, "simgpu") as handle:
        view = model.blocks[0].up.weight.view(-1)
        assert view.device.type == "simgpu"
        model(torch.ones(4, 8))  # which evicts the unit
        before = handle.stats()["fetches"]
        assert (view.shape, view.dtype, view.dim(), view.numel()) == (torch.Size([2048]), torch.float32, 1, 2048)
        assert handle.stats()["fetches"] == before
