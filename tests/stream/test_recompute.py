"""What activations="recompute" puts back before forward runs again, and what it leaves alone."""

import collections
import copy

import numpy
import pytest
import torch
from side_by_side import blocks, check, inputs, squares, training
from stream_programs import streamed
from torch import nn

import models
import parity
from sp_lightning.errors import ExactnessError


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
def test_a_second_run_that_saves_other_tensors_is_an_error(activations, device):
    runs = [0]

    class Alternating(models.Block):
        def forward(self, x):
            runs[0] += 1
            return super().forward(x.double().exp().float() if runs[0] > 9 else x)

    net, (x,) = models.stack_of(Alternating)(), inputs(device, 1)
    with streamed(net, device, window=1, activations=activations, units=["Alternating"]):
        loss = squares(net, x)
        runs[0] = 9
        with pytest.raises(ExactnessError, match=r"blocks\.\d ran again in backward, and not as it did") as caught:
            loss.backward()
        assert str(caught.value).endswith("use activations='keep' or 'offload'")


class Counting(models.Block):
    """A block that counts its calls in an argument."""

    def forward(self, x, seen):
        first = seen[0] if not isinstance(seen, set) and len(seen) else None
        count = float(first) if isinstance(first, (torch.Tensor, numpy.float64)) else len(seen)
        if isinstance(seen, numpy.ndarray):
            seen += 1
        elif isinstance(seen, set):
            seen.add(count)
        elif count and isinstance(seen[0], torch.Tensor):
            seen[0].add_(1)
        else:
            seen.append(count)
        return super().forward(x) * (1 + count)


def counted(net, seen, device):
    """Run three blocks and a backward; return the gradients."""
    x = torch.linspace(-1, 1, 4 * models.WIDTH, device=device).view(4, models.WIDTH)
    for block in net:
        x = block(x, seen)
    x.square().sum().backward()
    return [param.grad.cpu() for param in net.parameters()]


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
@pytest.mark.parametrize("kind", [list, set, bytearray, collections.deque, numpy.ndarray])
def test_an_argument_that_forward_changes_is_put_back(kind, activations, device):
    make = kind if kind is not numpy.ndarray else lambda: numpy.zeros(1)
    net = nn.ModuleList(Counting() for _ in range(3))
    plain = counted(copy.deepcopy(net).to(device), make(), device)
    with streamed(net, device, window=1, activations=activations, units=["Counting"]):
        assert all(map(torch.equal, counted(net, make(), device), plain))


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_a_write_to_a_tensor_in_an_argument_is_an_error(kind, device):
    net = nn.ModuleList(Counting() for _ in range(3))
    with streamed(net, device, window=1, activations="recompute", units=["Counting"]):
        with pytest.raises(ExactnessError, match="wrote to a tensor inside of one of its arguments"):
            counted(net, kind([torch.ones(1, device=device)]), device)


class Masked(models.Block):
    """A block that adds its input to a sum, and may get a mask before that sum."""

    def forward(self, x, mask=None, *, scale=None, total):
        x = x * (1 + total.mean()) * (1 if mask is None else mask) * (1 if scale is None else scale)
        total.add_(x.detach())
        return super().forward(x)


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
def test_a_written_argument_is_put_back_where_later_calls_get_more_tensors(activations, device):
    def run(net, device):
        for index in range(3):
            x = torch.linspace(-1, 1, 4 * models.WIDTH, device=device).view(4, models.WIDTH)
            more = {"mask": x.relu(), "scale": x.square()} if index else {}
            total = torch.zeros_like(x)
            for block in net:
                x = block(x, **more, total=total)
            x.square().sum().backward()
            yield x, [p.grad for p in net.parameters()]

    make = lambda: nn.ModuleList(Masked() for _ in range(3))  # noqa: E731
    check(make, run, device, activations=activations, units=["Masked"])


class Shifted(models.Block):
    """A block that adds an argument, or the first of a list."""

    def forward(self, x, shift):
        return super().forward(x) + (shift[0] if isinstance(shift, list) else shift)


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
def test_a_second_run_gets_arguments_of_inference_mode(activations, device):
    def run(net, device):
        with torch.inference_mode():
            shift = torch.ones(64, models.WIDTH, device=device)
        for given in (shift, [shift]):
            x = torch.linspace(-1, 1, 64 * models.WIDTH, device=device).view(64, models.WIDTH)
            for block in net:
                x = block(x, given)
            x.square().sum().backward()
            yield x, [p.grad for p in net.parameters()]

    make = lambda: nn.ModuleList(Shifted() for _ in range(3))  # noqa: E731
    check(make, run, device, activations=activations, units=["Shifted"])


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


def test_hooks_inside_a_unit_run_again_and_its_own_do_not(device):
    net, ran = blocks(), []
    net.blocks[1].up.register_forward_hook(lambda *_: ran.append("up"))
    net.blocks[1].register_forward_hook(lambda *_: ran.append("block"))
    with streamed(net, device, window=1, activations="recompute"):
        squares(net, next(iter(inputs(device)))).backward()
    assert ran == ["up", "block", "up"]


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
    with streamed(net, device, window=1, units=["Table"], activations="recompute"):
        with pytest.raises(ExactnessError, match=r"writes to its weights|was changed after its forward"):
            net(x).sum().backward()


class Averaging(nn.Module):
    """Keeps an average in a buffer of inference mode, which each forward replaces, or writes."""

    def __init__(self, writes):
        super().__init__()
        self.layer, self.writes = nn.Linear(8, 8), writes
        self.register_buffer("average", torch.ones(8))

    def forward(self, x):
        if self.writes and not self.average.is_inference():
            with torch.inference_mode():
                self.average = self.average.clone()
        y = x + self.layer(x).sigmoid() * self.average.clone()
        with torch.inference_mode():
            if self.writes:
                self.average.mul_(0.9).add_(x.mean(0) * 0.1)
            else:
                self.average = self.average * 0.9 + x.mean(0) * 0.1
        return y


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
def test_a_buffer_of_inference_mode_is_put_back(activations, writes):
    def train(model):
        for seed in range(3):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        return [*(p.grad.clone() for p in model.parameters()), *(buffer.clone() for buffer in model.buffers())]

    torch.manual_seed(0)
    model = nn.Sequential(*(Averaging(writes) for _ in range(3)))
    want = train(copy.deepcopy(model))
    with streamed(model, "cpu", activations=activations):
        assert all(map(torch.equal, train(model), want))


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
def test_an_argument_of_inference_mode_that_is_written_is_put_back(activations):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, count):
            y = self.layer(x) * count.clone()
            with torch.inference_mode():
                count += 1
            return y

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Counting() for _ in range(3))

        def forward(self, x):
            with torch.inference_mode():
                count = torch.ones(1)
            for layer in self.layers:
                x = layer(x, count)
            return x

    def train(model):
        for _ in range(2):
            model(torch.ones(4, 8)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = Counted()
    want = train(copy.deepcopy(model))
    with streamed(model, "cpu", activations=activations):
        assert all(map(torch.equal, train(model), want))
