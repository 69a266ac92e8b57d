"""Programs beyond the promise: each test states what happens there."""

import pytest
import torch
from stream_programs import Block, Net, Program, check, streamed


def under_autocast_s_cache(run, model):
    """Use each weight twice under one context, whose cache a plain run takes the second cast from."""

    def step(model, optimizer, i):
        with torch.autocast(run.device.type, dtype=torch.bfloat16):
            loss = model(run.x(i)).float().square().mean() + model(run.x(i + 50)).float().square().mean()
        return run.train(loss, optimizer)

    return run.loop(model, step)


@pytest.mark.simgpu
def test_autocasts_cache_gives_other_bits_for_weights_used_twice():
    with pytest.raises(AssertionError, match="value"):
        check(Program(under_autocast_s_cache), "simgpu")


def test_function_transforms_over_streamed_weights_are_refused():
    model = Net()

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x[None],)).square().mean()

    weights = {name: param.detach() for name, param in model.named_parameters()}
    with streamed(model, "cpu"), pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(4, 8))


class ZeroesUnseen(Block):
    def forward(self, x):
        self.up.weight[0].data.zero_()
        return super().forward(x)


def test_a_write_that_no_version_shows_ends_with_the_visit():
    model = Net(ZeroesUnseen)
    with streamed(model, "cpu"), torch.no_grad():
        model(torch.ones(4, 8))
        assert model.blocks[0].up.weight[0].any()


def test_a_view_of_a_weight_that_gets_other_data_has_what_it_was():
    model = Net()
    one, another = model.blocks[0].up.weight, model.blocks[1].up.weight
    with streamed(model, "cpu"):
        kept, was = one.data, one.detach().clone()
        one.data, another.data = another.data, one.data
        with torch.no_grad():
            another.add_(1)  # whose bytes the view has in a plain run
        assert torch.equal(kept, was)


class CountsInPython(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_python_state_changes_twice_in_a_recomputed_forward():
    model = Net(CountsInPython)
    with streamed(model, "cpu", activations="recompute"):
        model(torch.ones(4, 8)).sum().backward()
        assert model.blocks[0].calls == 2


@pytest.mark.simgpu
def test_between_steps_random_tensors_like_weights_are_the_hosts():
    model = Net()
    with streamed(model, "simgpu"):
        torch.manual_seed(0)
        found = torch.randn_like(model.blocks[0].up.weight)
        torch.manual_seed(0)
        assert torch.equal(found, torch.randn(found.shape))


def test_gradients_are_in_place_once_all_of_their_unit_came():
    model, seen = Net(), []
    for name, block in (("before", 4), ("its own", 0)):
        weights = model.blocks[block].down.weight, model.blocks[block].up.weight
        weights[1].register_hook(
            lambda grad, name=name, weight=weights[0]: seen.append((name, weight.grad is not None))
        )
    with streamed(model, "cpu"):
        model(torch.ones(4, 8)).sum().backward()
        assert seen == [("before", False), ("its own", False)]  # a plain run has those of `down` by then
