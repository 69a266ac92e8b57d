"""That every model of the zoo runs, is deterministic, and has the trait it is there for."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import models
from models import ZOO


def build(name, seed=0):
    case = models.case(name)
    for library in case.tags & {"transformers", "torchvision"}:
        pytest.importorskip(library)
    torch.manual_seed(seed)
    return case, case.make()


def backward(case, net, index=0, seed=1):
    torch.manual_seed(seed)
    loss = case.loss(net, case.batch(index))
    loss.backward()
    return loss.detach()


def to_device(tree, device):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)


def assert_equal(expected, got):
    expected, got = tree_leaves(expected), tree_leaves(got)
    assert len(expected) == len(got) > 0
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# --- What holds for every case.


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_equal_seeds_give_equal_nets_losses_and_gradients(name):
    case, first = build(name)
    _, second = build(name)
    assert_equal(first.state_dict(), second.state_dict())
    assert all(tensor.device.type == "cpu" for tensor in first.state_dict().values())
    assert_equal(backward(case, first), backward(case, second))
    for (path, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), path


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_random_tag_tells_whether_forward_draws(name):
    case, net = build(name)
    before = torch.get_rng_state()
    case.loss(net, case.batch(0))
    assert ("random" in case.tags) != torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_writes_tag_tells_whether_forward_writes_weights(name):
    case, net = build(name)
    before = {path: parameter.detach().clone() for path, parameter in net.named_parameters()}
    case.loss(net, case.batch(0))
    changed = any(not torch.equal(before[path], parameter) for path, parameter in net.named_parameters())
    assert ("writes" in case.tags) == changed


@pytest.mark.slow
@pytest.mark.simgpu
@pytest.mark.parametrize("name", ZOO)
def test_runs_on_a_device_as_on_the_cpu(name):
    case, expected = build(name)
    _, net = build(name)
    net.to("simgpu")
    torch.manual_seed(1)
    loss = case.loss(net, to_device(case.batch(0), "simgpu"))
    loss.backward()
    # The simulated device computes an LSTM from its elementary operations, which round elsewhere.
    rounding = 1e-4 if name == "lstm" else 0
    torch.testing.assert_close(loss.detach().cpu(), backward(case, expected), rtol=rounding, atol=rounding)
    for a, b in zip(expected.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=rounding, atol=rounding)
    net.eval()
    with torch.inference_mode():
        predictions = case.predict(net, to_device(case.batch(0), "simgpu"))
    assert {leaf.device.type for leaf in tree_leaves(predictions)} == {"simgpu"}


# --- The module, its optimizers and its data.
