import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import sp_lightning
from sp_lightning.gradients import slab
from sp_lightning.gradients.way_down import GradientVersions

TYPES = {"as it is": {}, "widened": {"master_weights": True}}  # a gradient's type on the way, and on the host


@pytest.fixture(params=TYPES)
def backward(request):
    """Stream a net whose gradients come down in a type, and return it with a function that runs a backward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    dtype = torch.bfloat16 if TYPES[request.param] else torch.float32
    with sp_lightning.stream(net, "cpu", window=1, **TYPES[request.param]):

        def run():
            net.zero_grad()
            net(torch.randn(4, 8, dtype=dtype)).square().sum().backward()
            return [parameter.grad.data_ptr() for parameter in net.parameters()]

        yield net, run


def test_gradients_have_the_same_memory_in_every_step(backward):
    _, run = backward
    first = run()
    assert run() == first
    assert run() == first


def test_a_gradient_that_code_refers_to_is_not_written_again(backward):
    net, run = backward
    first = run()
    kept = net[0].weight.grad
    before = kept.clone()
    second = run()
    assert torch.equal(kept, before)
    assert second[0] != first[0]
    assert second[2:] == first[2:]  # of the other unit
    del kept
    assert run() == first


def test_a_gradient_whose_data_was_exchanged_gets_new_memory(backward):
    net, run = backward
    first = run()
    net[0].weight.grad.data = torch.zeros(16, 8)
    second = run()
    assert second[0] not in first
    assert second[2:] == first[2:]


def test_what_packs_gradients_is_kept_of_few_sets_of_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))

        def forward(self, x, chosen):
            return sum(expert(x) for index, expert in enumerate(self.experts) if chosen >> index & 1)

    net = nn.Sequential()
    net.unit = Experts()
    net.forward = lambda x, chosen: net.unit(x, chosen)
    with sp_lightning.stream(net, "cpu", units=["Experts"]) as handle:
        for chosen in range(1, 200):
            net(torch.ones(2, 4), chosen).sum().backward()
            assert all(
                torch.equal(expert.weight.grad, torch.full((4, 4), 2.0))
                if chosen >> index & 1
                else expert.weight.grad is None
                for index, expert in enumerate(net.unit.experts)
            )
            net.zero_grad()
        (of_unit,) = handle.engine.gradient_return._slabs.values()
        assert 0 < len(of_unit._packed) <= slab.MOST_PACKED


def test_gradients_get_other_memory_on_a_thread_while_a_backward_packs_more():
    marks, packed = GradientVersions(), [[nn.Parameter(torch.zeros(1))] for _ in range(2000)]
    for few in packed[:500]:
        marks.note_packed(few)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            packing = thread.submit(lambda: [marks.note_packed(few) for few in packed])
            while not packing.done():
                with marks.exchanging(packed[0]):
                    pass
        packing.result()
    finally:
        sys.setswitchinterval(interval)
    assert marks.changed() == []
