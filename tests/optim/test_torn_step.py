"""Weights and state of a step that failed half done are read, and neither stepped nor saved until state is loaded."""

import copy
import errno
import itertools
import os
import pickle

import pytest
import torch
from torch import nn

from sp_lightning.disk import state_ring
from sp_lightning.errors import DiskError, TornStepError
from sp_lightning.runtime.handle import stream as stream_before


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(65, 65), nn.Tanh()) for _ in range(4)])


def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(5, 65)).square().mean().backward()
        optimizer.step()


class Torn:
    """A streamed net of which the second step failed half done, and a checkpoint of the first."""

    def __init__(self, handle, net, monkeypatch, error):
        self.handle, self.net = handle, net
        self.optimizer = torch.optim.AdamW(net.parameters())
        train(net, self.optimizer)
        self.weights, self.state = copy.deepcopy((net.state_dict(), self.optimizer.state_dict()))
        real, calls = os.pwritev, itertools.count()

        def failing(*given):
            if next(calls) == 4:
                raise error
            return real(*given)

        raised = DiskError if isinstance(error, OSError) else type(error)
        with monkeypatch.context() as broken, pytest.raises(raised):
            broken.setattr(os, "pwritev", failing)
            train(net, self.optimizer)
            handle.finish_step()

    def is_stepped(self, optimizer=None):
        """Whether a step is taken, and not refused."""
        before = copy.deepcopy(self.net.state_dict())
        try:
            train(self.net, optimizer or self.optimizer)
        except TornStepError as error:
            assert "of 8 parameters when a " in str(error) and " ended its step" in str(error)
            assert all(map(torch.equal, before.values(), self.net.state_dict().values()))
            return False
        return True


@pytest.fixture(params=[OSError(errno.EIO, "Input/output error")])
def torn(monkeypatch, request):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 15)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 15)
    net = stack()
    with stream_before(net, "cpu", window=2, host_budget="0B", disk=os.getcwd()) as handle:
        yield Torn(handle, net, monkeypatch, request.param)


@pytest.mark.parametrize("first", ["weights", "state"])
@pytest.mark.parametrize("closes", [False, True])
def test_weights_and_state_are_loaded_before_the_next_step(torn, first, closes):
    if closes:
        torn.handle.close()
    assert not torn.is_stepped()
    loads = [lambda: torn.net.load_state_dict(torn.weights), lambda: torn.optimizer.load_state_dict(torn.state)]
    for load in loads if first == "weights" else reversed(loads):
        assert not torn.is_stepped()
        load()
    assert torn.is_stepped()
    plain = stack()
    train(plain, torch.optim.AdamW(plain.parameters()), 2)
    assert all(map(torch.equal, plain.parameters(), torn.net.parameters()))


@pytest.mark.parametrize("torn", [MemoryError(), KeyboardInterrupt()], indirect=True)
def test_any_error_tears_a_step(torn):
    assert not torn.is_stepped()


def test_a_new_optimizer_needs_the_weights_only(torn):
    other = torch.optim.SGD(torn.net.parameters(), 0.1)
    assert not torn.is_stepped(other)
    torn.net.load_state_dict(torn.weights)
    assert torn.is_stepped(other) and not torn.is_stepped()


def parts(torn):
    for name, block in torn.net.named_children():
        block.load_state_dict({key[2:]: value for key, value in torn.weights.items() if key.startswith(name)})


LOADS = {
    "own": lambda torn: torn.net.load_state_dict(torn.net.state_dict()),  # to go on from them on purpose
    "assigned": lambda torn: torn.net.load_state_dict(torn.weights, assign=True),
    "part by part": parts,
}
NO_LOADS = {
    "without the last bias": lambda torn: torn.net.load_state_dict(dict(list(torn.weights.items())[:-1]), strict=False),
    "of another shape": lambda torn: torn.net.load_state_dict({**torn.weights, "3.0.bias": torch.ones(3)}),
    "into a copy": lambda torn: copy.deepcopy(torn.net).load_state_dict(torn.weights),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.few(2)
def test_all_weights_may_be_loaded_in_any_way(torn, load):
    LOADS[load](torn)
    torn.optimizer.load_state_dict(torn.state)
    assert torn.is_stepped(torch.optim.SGD(torn.net.parameters(), 0.1))
    assert not any(module._load_state_dict_pre_hooks for module in torn.net.modules())


@pytest.mark.parametrize("load", NO_LOADS)
@pytest.mark.few(2)
def test_a_load_that_leaves_one_weight_leaves_the_step_torn(torn, load):
    with pytest.raises(RuntimeError) if load == "of another shape" else pytest.MonkeyPatch.context():
        NO_LOADS[load](torn)
    assert not torn.is_stepped(torch.optim.SGD(torn.net.parameters(), 0.1))


def test_such_weights_can_be_looked_at_and_copied(torn):
    copies = copy.deepcopy(torn.net), pickle.loads(pickle.dumps(torn.net))
    for one in copies:
        assert all(map(torch.equal, one.state_dict().values(), torn.net.state_dict().values()))
        train(one, torch.optim.AdamW(one.parameters()))
