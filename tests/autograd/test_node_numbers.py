"""What autograd counts on each thread, by which it orders graphs of gradients: as much as in a plain run."""

import contextlib
import time

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import models
import parity
import sp_lightning

TRAITS = [case.name for case in models.traits() if "writes" not in case.tags]
# They have no gradient of a gradient, or take it themselves.
ONCE = ["checkpoint_reentrant", "side_state", "gradient_penalty"]


def number():
    """How many operations this thread has recorded."""
    with torch.enable_grad():
        return torch.ones(1, requires_grad=True).mul(1).grad_fn._sequence_nr()


def recorded(case, device, options, mixed):
    """What each step records on the calling thread, and on the thread of the loss, whose gradient has a graph."""
    torch.manual_seed(0)
    net = case.make()
    here, there = [], []
    with contextlib.nullcontext() if options is None else sp_lightning.stream(net, device, **options):
        if options is None:
            net.to(device)
        for index in range(4):
            batch = tree_map_only(torch.Tensor, lambda part: part.to(device), case.batch(index))
            tensors = [part for part in tree_leaves(batch) if isinstance(part, torch.Tensor)]
            inputs = [part.requires_grad_() for part in tensors if part.is_floating_point()]
            here.append(number())
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed, cache_enabled=False):
                loss = case.loss(net, batch).float()
            loss.register_hook(lambda _: there.append(number()))
            if inputs and case.name not in ONCE:
                slopes = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
                loss = loss + sum(slope.square().sum() for slope in slopes if slope is not None)
            loss.backward()
            net.zero_grad()
    return [torch.tensor(numbers).diff().tolist() for numbers in (here, there)]


@parity.product(name=TRAITS, mixed=[False, True], activations=["keep", "offload"], device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_step_records_as_many_operations_on_each_thread_as_a_plain_one(name, mixed, activations, device):
    case = models.ZOO[name]
    options = {"window": 1, "units": case.units, "activations": activations}
    assert recorded(case, device, options, mixed) == recorded(case, device, None, mixed)


@pytest.mark.simgpu
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_run_in_the_order_of_arrival_however_long_one_takes(kind):
    model, called = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2))), []

    def noting(name):
        def hook(_):
            time.sleep(0.05 if not called else 0)  # meanwhile the others arrive
            called.append(name)

        return hook

    with sp_lightning.stream(model, "simgpu", window=1, units=["Sequential"]):
        for name, parameter in model.named_parameters():
            getattr(parameter, kind)(noting(name))
        model(torch.randn(2, 4).to("simgpu")).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    assert called == [*names[8:], *names[:8]]  # of the last unit, then of the first
