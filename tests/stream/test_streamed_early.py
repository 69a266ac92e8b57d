"""Steps beside backward: the bits of steps after it, or a typed error; nothing half applied goes on or is saved."""

import copy
import functools
import os

import pytest
import torch
from often import often
from stream_programs import Block, Net, Run, compare, device_named, streamed

from sp_lightning.errors import ExactnessError, HalfAppliedStepError


def adamw(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **options)
    optimizer.seen = []
    return optimizer


def trained(loop, device, is_early, make=Net, **options):
    """Train plainly (None), or streamed with or without steps beside backward; return all that is left."""
    torch.manual_seed(0)
    model, place = make(), device_named(device)
    run = Run(place, is_early is not None)
    if is_early is None:
        model.to(place)
        optimizer = loop(run, model, lambda optimizer: None)
    else:
        with streamed(model, device, **options) as handle:

            def early(optimizer):
                handle.steps.step_beside_backward(optimizer if is_early else None)

            optimizer = loop(run, model, early)
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [*model.parameters(), *states, *optimizer.seen]


def once(run, model, early, casts=False, dtype=torch.float32):
    """One step for each batch."""
    optimizer = adamw(model)
    for i in range(4):
        early(optimizer)
        with torch.autocast(run.device.type, torch.bfloat16, casts, cache_enabled=False):
            loss = model(run.x(i).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        early(None)
        optimizer.seen.append(loss.detach())
        optimizer.zero_grad()
    return optimizer


def test_state_has_its_order_where_first_batches_skip_a_block():
    orders = []
    for is_early in (False, True):
        model = Net()
        names = {id(p): name for name, p in model.named_parameters()}
        with streamed(model, "cpu") as handle:
            optimizer = adamw(model)
            for i in range(3):
                handle.steps.step_beside_backward(optimizer if is_early else None)
                model(torch.ones(4, 8) + i, skip=[1] if i < 2 else ()).square().mean().backward()
                optimizer.step()
                handle.steps.step_beside_backward(None)
                optimizer.zero_grad()
            orders.append([names[id(p)] for p in optimizer.state])
    assert orders[0] == orders[1] and orders[0][-1].startswith("blocks.1.")


def accumulated(run, model, early):
    """Steps beside the last of three backwards."""
    optimizer = adamw(model)
    for i in range(9):
        if i % 3 == 2:
            early(optimizer)
        loss = model(run.x(i)).square().mean() / 3
        loss.backward()
        optimizer.seen.append(loss.detach())
        if i % 3 == 2:
            optimizer.step()
            early(None)
            optimizer.seen += [model.blocks[1].up.weight.grad.clone()]
            optimizer.zero_grad()
    return optimizer


def with_closures(run, model, early):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.seen = []

    def closure():
        optimizer.zero_grad()
        loss = model(run.x(len(optimizer.seen))).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        early(optimizer)
        optimizer.seen.append(optimizer.step(closure).detach())
        early(None)
    return optimizer


class Twice(Block):
    """A unit whose weights are used twice in one call."""

    def forward(self, x):
        return super().forward(super().forward(x))


class Repeated(Net):
    """A model that calls two of its units twice."""

    def forward(self, x):
        x = self.emb(x)
        for block in (*self.blocks, self.blocks[1], self.blocks[3]):
            x = block(x)
        return self.head(x)


CASES = {
    "once": (once, Net, {}),
    "recompute": (once, Net, {"activations": "recompute"}),
    "offload": (once, Net, {"activations": "offload", "window": 2}),
    "resident": (once, Net, {"resident": 2}),
    "accumulated": (accumulated, Net, {}),
    "closures": (with_closures, Net, {}),
    "narrow": (functools.partial(once, casts=True), Net, {"wire": torch.bfloat16}),
    "called_twice": (once, Repeated, {}),
    "twice_inside": (once, lambda: Net(Twice), {}),
}


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.simgpu
def test_steps_beside_backward_have_the_plain_runs_bits(case, device):
    loop, make, options = CASES[case]
    compare(case, trained(loop, device, None, make), trained(loop, device, True, make, **options))


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.simgpu
def test_master_weights_step_beside_backward_as_after_it(device):
    options, loop = {"wire": torch.bfloat16, "master_weights": True}, functools.partial(once, dtype=torch.bfloat16)
    after, beside = (trained(loop, device, is_early, **options) for is_early in (False, True))
    compare("masters", after, beside)


@pytest.mark.simgpu
def test_steps_beside_backward_have_the_devices_arithmetic(arithmetic):
    for loop in (once, accumulated):
        compare(loop.__name__, trained(loop, "simgpu", None), trained(loop, "simgpu", True))


# ---- what needs all gradients at once


def half_stepped(handle, model, optimizer):
    handle.steps.step_beside_backward(optimizer)
    model(torch.ones(4, 8)).square().mean().backward()


TOUCHES = {
    "unscaled": lambda scaler, optimizer, model: scaler.unscale_(optimizer),
    "stepped by a scaler": lambda scaler, optimizer, model: scaler.step(optimizer),
    "clipped by norm": lambda scaler, optimizer, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clipped by value": lambda scaler, optimizer, model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "divided": lambda scaler, optimizer, model: [param.grad.div_(2) for param in model.parameters()],
    "summed": lambda scaler, optimizer, model: sum(param.grad.sum() for param in model.parameters()),
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("is_fused", [False, True])
def test_what_needs_all_gradients_is_refused(touch, is_fused):
    model = Net()
    optimizer, scaler = adamw(model, fused=is_fused), torch.amp.GradScaler("cpu")
    with streamed(model, "cpu") as handle:
        scaler.scale(torch.ones(()))
        half_stepped(handle, model, optimizer)
        with pytest.raises(ExactnessError, match="beside backward: set optimizer_overlap=False"):
            TOUCHES[touch](scaler, optimizer, model)
        optimizer.step()


def test_options_that_change_after_steps_are_refused():
    model = Net()
    optimizer = adamw(model)
    with streamed(model, "cpu") as handle:
        half_stepped(handle, model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(ExactnessError, match="options of the optimizer changed"):
            optimizer.step()


def test_a_second_backward_after_steps_is_refused():
    model = Net()
    optimizer = adamw(model)
    with streamed(model, "cpu") as handle:
        handle.steps.step_beside_backward(optimizer)
        loss = model(torch.ones(4, 8)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(ExactnessError, match=r"another gradient after it was stepped"):
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("touch, said", [("an option", "options of the optimizer changed"), ("a weight", "stepped")])
def test_a_backward_hook_that_touches_what_is_stepped_is_refused(touch, said):
    model = Net()
    optimizer, last = adamw(model), model.blocks[-1].up.weight

    def hook(grad):
        if touch == "a weight":
            return grad + last.detach().sum()
        optimizer.param_groups[0]["lr"] = 0.05

    model.blocks[1].up.weight.register_hook(hook)
    with streamed(model, "cpu") as handle, pytest.raises(ExactnessError, match=said):
        with handle.stepping(optimizer, is_early=True):
            optimizer.step(lambda: model(torch.ones(4, 8)).square().mean().backward())


# ---- exceptions half-way


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error("on purpose")


class Failing(Net):
    error = None  # raised in backward, between units

    def forward(self, x):
        x = self.emb(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.error is not None:
                x = Boom.apply(x, self.error)
        return self.head(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_backward_that_ends_midway_leaves_a_half_applied_step(error):
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    state, weights = (copy.deepcopy(one.state_dict()) for one in (optimizer, model))
    with streamed(model, "cpu") as handle:
        model.error = error
        with pytest.raises(error), handle.stepping(optimizer, True):
            model(torch.ones(4, 8)).square().mean().backward()
        model.error = None
        for go_on in (
            lambda: handle.steps.step_beside_backward(optimizer),
            handle.steps.check_applied,
            optimizer.state_dict,
        ):
            with pytest.raises(HalfAppliedStepError, match="Load the last checkpoint"):
                go_on()
        optimizer.zero_grad()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        half_stepped(handle, model, optimizer)
        optimizer.step()
    plain = Failing()
    plain.load_state_dict(weights)
    once_more = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    plain(torch.ones(4, 8)).square().mean().backward()
    once_more.step()
    compare("weight", list(plain.parameters()), list(model.parameters()))


def test_a_step_that_lacks_gradients_already_stepped_is_refused():
    """In a plain run a step without gradients would change nothing."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with streamed(model, "cpu") as handle:
        half_stepped(handle, model, optimizer)
        optimizer.zero_grad()
        with pytest.raises(HalfAppliedStepError, match="Load the last checkpoint"):
            optimizer.step()


# ---- threads and forks


def test_a_forked_process_reads_weights_and_state():
    model = Net()
    optimizer = adamw(model)
    with streamed(model, "cpu") as handle:
        half_stepped(handle, model, optimizer)
        optimizer.step()
        child = os.fork()
        if not child:
            fine = all(param.isfinite().all() and optimizer.state[param]["step"] == 1 for param in model.parameters())
            os._exit(0 if fine and len(optimizer.state) else 1)
        assert os.waitpid(child, 0)[1] == 0


class ReadInBackward(torch.autograd.Function):
    """A copy of an input, whose gradient a layer scales as the layer is by then."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.kept
        return grad * (kept.weight if isinstance(kept, torch.nn.Module) else kept).sum(), None


class ReadingNet(Net):
    """Whose backward ends with a look at the last block, which is stepped and evicted by then."""

    keeps_layer = True

    def forward(self, x, skip=()):
        layer = self.blocks[-1].up
        x = ReadInBackward.apply(self.emb(x), [layer if self.keeps_layer else layer.weight])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class KeepingNet(ReadingNet):
    keeps_layer = False


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("make", [ReadingNet, KeepingNet])
def test_a_backward_that_reads_what_was_stepped_is_refused(device, make):
    compare(device, trained(once, device, None, make), trained(once, device, False, make))
    with pytest.raises(ExactnessError, match=r"after it was stepped beside the first backward"):
        trained(once, device, True, make, window=1)
