"""What code finds of gradients that came down in autocast's type, between backward and the next forward."""

import copy

import pytest
import torch
from side_by_side import check, sgd
from torch import nn

import parity

pytestmark = pytest.mark.usefixtures("core")


class Net(nn.Module):
    """Blocks whose weights travel in bfloat16, with a norm and a bias that do not, and a weight that is used twice."""

    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(3))
        self.head = nn.Linear(width, 8, bias=False)
        turned = self.blocks[0][1]
        turned.weight = nn.Parameter(turned.weight.detach().t().contiguous().t())  # with strides of its own

    def forward(self, x):
        x = self.embed(x) + nn.functional.linear(x, self.head.weight.t())
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def grads_of(net):
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def more(net, _):
    device = next(net.buffers()).device
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        loss = net(torch.ones(4, 8, device=device)).sum()
    loss.backward()


def freeze(net, _):
    net.embed.requires_grad_(False)


LOOKS = {
    "reads all": lambda net, _: grads_of(net),
    "reads one": lambda net, _: net.blocks[1][1].weight.grad.clone(),
    "norm": lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1e9),
    "clips": lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
    "clips and reads": lambda net, _: (nn.utils.clip_grad_norm_(net.parameters(), 1e-3), grads_of(net)),
    "clips twice": lambda net, _: [nn.utils.clip_grad_norm_(net.parameters(), norm) for norm in (0.01, 0.005)],
    "clips by another norm": lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1e-3, float("inf")),
    "clips values": lambda net, _: nn.utils.clip_grad_value_(net.parameters(), 1e-5),
    "writes one": lambda net, _: net.head.weight.grad.mul_(3).clone(),
    "writes by data": lambda net, _: net.head.weight.grad.data.add_(1).clone(),
    "replaces one": lambda net, _: setattr(net.head.weight, "grad", torch.full_like(net.head.weight, 0.5)),
    "takes one away": lambda net, _: setattr(net.head.weight, "grad", None),
    "zeroes": lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
    "takes away": lambda net, _: net.zero_grad(),
    "copies the net": lambda net, _: list(copy.deepcopy(net).parameters()),
    "more": more,
    "freezes": freeze,
    "is None": lambda net, _: [p.grad is None for p in net.parameters()],
    "flags": lambda net, _: [(p.grad.dtype, p.grad.shape, p.grad.stride(), p.grad.is_leaf) for p in net.parameters()],
    "a hook": lambda net, _: net.head.weight.register_hook(lambda grad: grad * 2) and None,
}


def make():
    net = Net()
    net.register_buffer("of_the_device", torch.ones(()))
    return net


@parity.product(look=list(LOOKS), moment=["backward", "step"], device=parity.DEVICES)
@pytest.mark.few(22)
def test_code_that_looks_finds_what_a_plain_run_has(look, moment, device):
    def run(net, device):
        optimizer = sgd(net)
        for step in range(3):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(device)
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                loss = net(x).float().square().mean()
            loss.backward()
            if step and moment == "backward":
                yield LOOKS[look](net, optimizer)
            optimizer.step()
            if step and moment == "step":
                yield LOOKS[look](net, optimizer)
            optimizer.zero_grad()
            yield loss

    check(make, run, device, wire_dtype="auto")


def test_gradients_that_code_keeps_stay_as_they_are(device):
    def run(net, device):
        kept = []
        for step in range(3):
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                net(torch.full((4, 8), step + 1.0, device=device)).sum().backward()
            kept.append([p.grad for p in net.parameters()])
            net.zero_grad()
        yield kept

    check(make, run, device, wire_dtype="auto")
