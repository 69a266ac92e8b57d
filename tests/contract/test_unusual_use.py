"""What users do to a module while it streams: all has the bits of the plain run."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import lightning as L
import pytest
import torch
from cores import strategy, streaming
from side_by_side import blocks, check, fit, inputs, kept, sgd, squares, training
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import models
import parity


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Asking(models.Block):
    """Asks what its weights are."""

    def forward(self, x):
        self.told = [
            (p.is_leaf, p.grad_fn, p.grad_dtype, p.dtype, p.device, p.requires_grad, p.shape, p.stride())
            for p in self.parameters()
        ]
        return super().forward(x)


def test_inside_a_unit_a_weight_tells_what_the_plain_runs_does(device):
    def told(net):
        squares(net, next(iter(inputs(device, 1))))
        return [block.told for block in net.blocks]

    expected = told(models.Stack(Asking() for _ in range(3)).to(device))
    net = models.Stack(Asking() for _ in range(3))
    with streaming(net, device, window=1):
        assert told(net) == expected


class Momentum(L.LightningModule):
    """Trains beside a target that follows it, in the way of BYOL: data is replaced within the training step."""

    def __init__(self):
        super().__init__()
        self.net, self.target = blocks(), blocks().requires_grad_(False)

    def training_step(self, batch, _):
        x = batch[0]
        with torch.no_grad():
            goal = self.target(x)
        loss = (self.net(x) - goal).square().mean()
        for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
            q.data = 0.9 * q.data + 0.1 * p.data
        self.losses.append(loss.detach().cpu())
        return loss

    def configure_optimizers(self):
        return sgd(self)


@parity.product(precision=["32-true", "bf16-mixed"], device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_target_whose_data_each_training_step_replaces(device, precision):
    expected = fit(Momentum, None, device, precision=precision)
    for window in (1, 4):
        module = fit(Momentum, strategy(device, window=window), device, precision=precision)
        assert all(map(torch.equal, module.losses, expected.losses))
        for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.cpu(), q.cpu()), name


@pytest.mark.parametrize("lottery", [True, False])
@pytest.mark.few(1)
def test_pruning_keeps_and_changes_its_backup_as_the_plain_run_does(device, lottery):
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = blocks()

        def training_step(self, batch, _):
            loss = squares(self.net, batch[0])
            self.losses.append(loss.detach().cpu())
            return loss

        def configure_optimizers(self):
            return sgd(self)

    def run(strategy):
        pruning = L.pytorch.callbacks.ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)
        module = fit(Module, strategy, device, max_steps=-1, max_epochs=3, callbacks=[pruning])
        backups = [layer["data"] for layer in (pruning._original_layers or {}).values()]
        return module.losses, module.state_dict(), [backup.state_dict() for backup in backups]

    expected, actual = kept(run(None)), kept(run(strategy(device)))
    assert len(expected) > 4
    for (path, value), (other, own) in zip(expected, actual, strict=True):
        assert path == other and torch.equal(value.cpu(), own.cpu()), path


# --- After something went wrong


class Fault(BaseException):
    """Like KeyboardInterrupt: no ``except Exception`` sees it."""


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.few(2)
def test_an_interruption_anywhere_leaves_the_weights_and_the_next_step_right(device, where, window):
    def run(net, device):
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device)):
            optimizer.zero_grad()
            if index == 1:
                with pytest.raises(Fault), failing(net, optimizer, where):
                    squares(net, x).backward()
                    optimizer.step()
                yield dict(net.named_parameters())
                optimizer.zero_grad()
            squares(net, x).backward()
            yield [p.grad for p in net.parameters()]
            optimizer.step()

    check(blocks, run, device, window=window)


@contextlib.contextmanager
def failing(net, optimizer, where):
    """Something in the middle raises."""

    def fail(*_):
        raise Fault

    if where == "forward":
        hook = net.blocks[2].register_forward_pre_hook(fail)
    elif where == "backward":
        hook = net.blocks[1].register_full_backward_pre_hook(fail)
    else:
        hook = optimizer.register_step_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


# --- One module, several users


# --- Parameters that change between steps


def test_weights_that_take_over_other_tensors_between_steps(device):
    def run(net, device):
        for _ in range(3):
            yield from training(steps=2)(net, device)
            with torch.no_grad():
                for layer in (net.blocks[1].up, net.head):
                    layer.weight.set_(layer.weight * 0.5)

    check(blocks, run, device)


@pytest.mark.few(1)
def test_parametrizations_that_are_removed_between_steps(device):
    def make():
        net = blocks()
        for block in net.blocks:
            parametrizations.spectral_norm(block.up)
        return net

    def run(net, device):
        yield from training(steps=2)(net, device)
        parametrize.remove_parametrizations(net.blocks[1].up, "weight")
        yield from training(steps=2)(net, device)

    check(make, run, device)


@pytest.mark.parametrize("needed", [True, False])
def test_requires_grad_flipped_while_an_older_graph_waits_for_its_backward(device, needed):
    def run(net, device):
        batches = inputs(device)
        net.blocks[1].requires_grad_(not needed)
        older = squares(net, next(batches))
        net.blocks[1].requires_grad_(needed)
        younger = squares(net, next(batches))
        younger.backward()
        yield [p.grad for p in net.parameters()]
        older.backward()

    check(blocks, run, device)


# --- Graphs that live on


# --- Copies


def pickled(net):
    return pickle.loads(pickle.dumps(net))


def saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def rebuilt(net):
    other = blocks()
    other.load_state_dict(net.state_dict())
    return other


COPIES = [copy.deepcopy, pickled, saved, rebuilt]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.few(1)
def test_copies_made_between_steps_are_plain_modules_that_train_alike(device, make_copy):
    def run(net, device):
        yield from training(steps=1)(net, device)
        copied = make_copy(net)
        assert {type(p) for p in copied.parameters()} == {nn.Parameter}
        copied.to(device).zero_grad()
        net.zero_grad()
        yield from training()(copied, device)
        yield from training()(net, device)

    check(blocks, run, device)


def test_training_goes_on_after_weights_went_to_another_process():
    """A queue between processes, or a loader whose dataset has the model, pickles in this way."""

    def hand_over(module):
        ForkingPickler(io.BytesIO()).dump(module)
        ForkingPickler(io.BytesIO()).dump(module.state_dict())

    check(blocks, training(between=hand_over), torch.device("cpu"))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, rebuilt])
def test_copies_made_inside_a_forward_are_plain_modules(device, make_copy):
    copies = []
    net = blocks()
    net.blocks[1].register_forward_pre_hook(lambda *_: copies.append(make_copy(hookless(net))))

    def hookless(net):
        net.blocks[1]._forward_pre_hooks.clear()
        return net

    with streaming(net, device, window=1):
        expected = net(next(inputs(device)))
    (copied,) = copies
    for (name, p), q in zip(copied.named_parameters(), net.parameters(), strict=True):
        assert type(p) is nn.Parameter and p.is_leaf and torch.equal(p.cpu(), q), name
    assert torch.equal(copied.to(device)(next(inputs(device))).cpu(), expected.cpu())


class Tripling(models.Block):
    def forward(self, x):
        return 3 * super().forward(x)


class CopiesByItself(models.Block):
    """Copies one attribute after the other, as ``torch.fx.GraphModule`` does."""

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in vars(self).items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        return made


def test_a_copy_that_its_class_made_by_itself(device):
    def run(net, device):
        yield from training(steps=1)(net, device)
        net.blocks[1] = copy.deepcopy(net.blocks[1])
        net.blocks[1].__class__ = Tripling
        yield from training()(net, device)

    check(models.stack_of(CopiesByItself), run, device)


# --- Complex numbers


class Complex(nn.Module):
    """Uses a weight, and what it computes, conjugated and negated: views whose bytes say otherwise."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Linear(models.WIDTH, models.WIDTH, dtype=torch.complex64) for _ in range(2))

    def forward(self, x):
        z = self.one(torch.complex(x, x.cos())).tanh()
        z = z.conj() @ self.two.weight.mH + z.conj() * self.two.weight[0].conj()
        return x + z.real * z.conj().imag * self.one.weight.conj().imag[0]


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
@pytest.mark.few(2)
def test_conjugated_and_negated_views_of_complex_weights(device, activations):
    check(models.stack_of(Complex), training(), device, activations=activations)


# --- Checkpoints in checkpoints


class Shared(models.Stack):
    """Its first block is visited three times, twice of them under a checkpoint in a checkpoint."""

    use_reentrant = True

    def run(self, x):
        def inner(x):
            return checkpoint(self.blocks[0], self.blocks[1](x), use_reentrant=self.use_reentrant)

        x = self.blocks[0](x)
        x = checkpoint(lambda x: inner(self.blocks[2](x)), x, use_reentrant=self.use_reentrant)
        return checkpoint(inner, x, use_reentrant=self.use_reentrant)


class SharedNested(Shared):
    use_reentrant = False


@pytest.mark.parametrize("kind", [Shared, SharedNested])
@pytest.mark.parametrize("window", [1, 2])
def test_nested_checkpoints_over_a_shared_block(device, kind, window):
    check(lambda: kind(models.Block() for _ in range(3)), training(), device, window=window)


# --- Weights that are read while backward runs


class Rereading(models.Stack):
    """A checkpointed function reads the weight of a unit that it does not enter."""

    def run(self, x):
        x = super().run(x)
        return checkpoint(lambda x: (x @ self.stem.weight @ self.stem.weight.t()).tanh(), x, use_reentrant=False)


class RereadingReentrant(models.Stack):
    def run(self, x):
        x = super().run(x)
        return checkpoint(lambda x: (x @ self.stem.weight @ self.stem.weight.t()).tanh(), x, use_reentrant=True)


class Scaled(torch.autograd.Function):
    """Its derivative takes a weight from a layer."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.layer.weight
        return grad @ weight @ weight.t(), None


class Differentiating(models.Stack):
    def run(self, x):
        return Scaled.apply(super().run(x), self.stem)


class Decaying(models.Stack):
    """Hooks add a share of each weight to its gradient, before it is summed and after it."""

    def __init__(self, blocks):
        super().__init__(blocks)
        for p in self.parameters():
            p.register_hook(lambda grad, p=p: grad + 0.1 * p)
            p.register_post_accumulate_grad_hook(self.decay)

    @staticmethod
    @torch.no_grad()
    def decay(p):
        p.grad += 0.1 * p


SAVES = "a checkpoint in a forward saves a resident weight itself, and in backward a reference to its unit"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(Rereading, marks=pytest.mark.xfail(reason=SAVES)), RereadingReentrant, Differentiating, Decaying],
)
@pytest.mark.few(3)
def test_weights_that_backward_reads_outside_their_unit(device, kind):
    check(lambda: kind(models.Block() for _ in range(3)), training(), device)


class FusedLoss(torch.autograd.Function):
    """Computes gradients in its forward, and keeps the weight beside what is saved."""

    @staticmethod
    def forward(x, weight, bias):
        return (x @ weight.t() + bias).square().sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.weight, bias = inputs
        scores = 2 * (x @ ctx.weight.t() + bias)
        ctx.save_for_backward(x, scores.flatten(0, -2).t() @ x.flatten(0, -2), scores.flatten(0, -2).sum(0), scores)

    @staticmethod
    def backward(ctx, grad):
        _, for_weight, for_bias, scores = ctx.saved_tensors
        return grad * (scores @ ctx.weight), grad * for_weight, grad * for_bias


def view(p):
    """What the step hands to a function: torch dispatches none, so it would get the host's parameter itself."""
    return p.view_as(p)


HANDED = {
    "a function": lambda net, x: Product.apply(x, net.stem.weight.t()),
    "a function, twice": lambda net, x: Product.apply(Product.apply(x, net.stem.weight.t()), view(net.stem.weight)),
    "a fused loss": lambda net, x: FusedLoss.apply(x, view(net.head.weight), view(net.head.bias))[None],
    "a reentrant checkpoint": lambda net, x: checkpoint(
        lambda x, weight: (x @ weight).tanh(), x, view(net.stem.weight), use_reentrant=True
    ),
}


@parity.product(
    activations=["keep", "recompute", "offload"],
    handed=list(HANDED),
    units=["auto", ["Block", "Linear"]],  # where the stem and the head are resident, and where they stream
    device=parity.DEVICES,
)
@pytest.mark.few(4)
def test_weights_that_are_handed_to_a_function_outside_their_unit(device, handed, units, activations):
    class Net(models.Stack):
        def run(self, x):
            return HANDED[handed](self, super().run(x)).sum() + x

    check(lambda: Net(models.Block() for _ in range(3)), training(), device, activations=activations, units=units)


@pytest.mark.parametrize("handed", ["a fused loss", "a reentrant checkpoint"])
def test_weights_that_are_handed_to_a_function_by_the_step(device, handed):
    check(blocks, training(lambda net, x: HANDED[handed](net, net.run(net.stem(x))).square().sum()), device)


# --- Hooks on gradients


class Experts(nn.Module):
    """Uses one of two layers for a batch, as a router does that sends no token to an expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(2))

    def forward(self, x):
        return x + self.experts[int(x.sum() > 0)](x).tanh()


# How a backward is called, given the loss and the weights.
BACKWARDS = {
    "once": lambda loss, weights: loss.backward(),
    "twice": lambda loss, weights: (loss.backward(retain_graph=True), loss.backward()),
    "of some weights": lambda loss, weights: loss.backward(inputs=weights[::2]),
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("when", ["before", "after forward"])
@pytest.mark.few(3)
def test_hooks_of_weights_are_called_only_where_a_gradient_arrives(when, backward, device):
    def run(net, device):
        seen, weights = [], list(net.parameters())

        def hook_up():
            for number, p in enumerate(weights):
                p.register_hook(lambda grad, number=number: (seen.append(number), grad * 0.5)[1])
                if number % 3:
                    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2.0))

        if when == "before":
            hook_up()
        for x in inputs(device):
            loss = squares(net, x)
            if when == "after forward" and not weights[0]._backward_hooks:
                hook_up()
            BACKWARDS[backward](loss, weights)
            yield loss, [p.grad for p in weights], sorted(seen)

    check(models.stack_of(Experts), run, device)


@pytest.mark.parametrize("autocast", [False, True])
def test_hooks_of_weights_see_the_gradients_that_autograd_grad_returns(autocast, device):
    def run(net, device):
        seen, weights = [], list(net.parameters())
        for p in weights[::2]:
            p.register_hook(lambda grad: (seen.append(tuple(grad.shape)), grad * 0.5)[1])
        for x in inputs(device):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = squares(net, x)
            grads = torch.autograd.grad(loss, weights, retain_graph=True)
            some = torch.autograd.grad(loss, weights[1:3], retain_graph=True)
            yield loss, grads, some, [grad.device for grad in grads], sorted(seen)

    check(blocks, run, device)


class ReadInSecondForwards(models.Block):
    """Reads the weights of its layers itself, in a checkpoint that saves on the CPU what it keeps."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(self.read, x, use_reentrant=False)

    def read(self, x):
        return x + nn.functional.linear(nn.functional.linear(x, self.up.weight).tanh(), self.down.weight.clone())


@pytest.mark.parametrize("hooks", [False, True])
def test_weights_are_read_in_second_forwards_that_autograd_grad_runs(hooks, device):
    def run(net, device):
        weights = list(net.parameters())
        for p in weights[:1] if hooks else ():
            p.register_hook(lambda grad: grad * 0.5)
        for x in inputs(device):
            loss = squares(net, x)
            yield loss, torch.autograd.grad(loss, weights, allow_unused=True)

    check(models.stack_of(ReadInSecondForwards), run, device, units=["Linear"])


def test_weights_are_read_in_second_forwards_that_a_backward_of_some_weights_runs(device):
    def run(net, device):
        for x in inputs(device):
            loss = squares(net, x)
            loss.backward(inputs=list(net.parameters())[::2], retain_graph=True)
            torch.autograd.backward([loss, loss], inputs=[net.blocks[1].up.weight])
            yield loss

    check(models.stack_of(ReadInSecondForwards), run, device, units=["Linear"])


def test_hooks_of_weights_that_got_no_gradient_are_the_users_again_after_streaming(device):
    net = models.stack_of(Experts)()
    calls, weight = [], net.blocks[0].experts[0].weight
    hooks = [weight.register_hook(calls.append), weight.register_post_accumulate_grad_hook(calls.append)]
    with streaming(net, device):
        for sign in (1, -1):
            net(sign * torch.ones(2, models.FEATURES, device=device)).sum().backward()
    assert list(weight._backward_hooks.values()) == list(weight._post_accumulate_grad_hooks.values()) == [calls.append]
    for hook in hooks:
        hook.remove()
    assert not weight._backward_hooks and not weight._post_accumulate_grad_hooks


def test_hooks_on_modules_see_what_they_see_in_the_plain_run(device):
    def run(net, device):
        seen = []
        for block in net.blocks:
            block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            block.register_forward_hook(lambda *args: seen.append(args[2]))
            block.register_full_backward_pre_hook(lambda _, grads: seen.append(grads[0]))
            block.register_full_backward_hook(lambda _, inner, outer: (inner[0] * 0.5,))
            block.up.register_forward_hook(lambda layer, _, output: output + layer.weight.sum() + layer.bias)
        yield from training()(net, device)
        yield seen
        seen.clear()  # of what leads to the hooks

    check(blocks, run, device)


def halve_gradient(p):
    p.grad.mul_(0.5)


class HookingBlock(models.Block):
    """Registers hooks on its weights from inside its first forward."""

    def forward(self, x):
        if not hasattr(self, "hooked"):
            self.hooked = self.up.weight.register_post_accumulate_grad_hook(halve_gradient)
            self.down.weight.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


def test_a_forward_that_registers_a_hook_on_its_weight(device):
    check(models.stack_of(HookingBlock), training(), device)


class SparseStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, models.WIDTH, sparse=True)
        self.blocks = nn.ModuleList(models.Block() for _ in range(3))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("resident", [False, True])
def test_sparse_gradients_of_an_embedding(resident):
    def run(net, device):
        sparse = torch.optim.SparseAdam(net.embedding.parameters())
        dense = sgd(net.blocks)
        for index in range(6):
            squares(net, models.tokens(index)["input_ids"].to(device)).backward()
            yield [p.grad for p in net.parameters()]
            if index % 2:  # two batches accumulate
                sparse.step()
                dense.step()
                net.zero_grad()

    units = ["Block"] if resident else ["Block", "Embedding"]
    check(SparseStack, run, torch.device("cpu"), units=units)


@pytest.mark.parametrize("dense_first", [False, True])
def test_sparse_gradients_that_accumulate_with_dense_ones(dense_first):
    def run(net, device):
        for index in range(4):
            net.embedding.sparse = bool(index % 2) == dense_first
            squares(net, models.tokens(index)["input_ids"].to(device)).backward()
            yield [p.grad.clone() for p in net.parameters()]

    check(SparseStack, run, torch.device("cpu"), units=["Block", "Embedding"])


class Neighbours(models.Block):
    """Joins what neighbours in a graph have; how closely they are joined is a weight."""

    def __init__(self):
        super().__init__()
        self.joined = nn.Parameter(torch.ones(6))

    def forward(self, x):
        edges = torch.tensor([[0, 0, 1, 2, 3, 3], [1, 2, 0, 3, 2, 3]])
        graph = torch.sparse_coo_tensor(edges, self.joined, (len(x), len(x)))
        compressed = torch.eye(len(x)).to_sparse_csr()
        return compressed @ (graph @ super().forward(x))


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
@pytest.mark.few(3)
def test_sparse_tensors_in_a_forward(activations):
    check(models.stack_of(Neighbours), training(), torch.device("cpu"), activations=activations)


class Ragged(models.Block):
    def forward(self, x):
        return torch.cat(super().forward(torch.nested.as_nested_tensor([x[:1], x[1:]])).unbind())


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_nested_tensors_in_a_forward(activations):
    check(models.stack_of(Ragged), training(), torch.device("cpu"), activations=activations)


# --- Streams, threads, data


def blocks_without_biases():
    """Blocks of which under autocast no gradient passes autograd, which would order the streams."""
    net = blocks()
    for linear in (part for part in net.modules() if isinstance(part, nn.Linear)):
        linear.bias = None
    return net


@pytest.mark.simgpu
@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize(("make", "autocasts"), [(blocks, False), (blocks, True), (blocks_without_biases, True)])
def test_forward_and_backward_on_a_stream_of_the_user(make, autocasts, window):
    import simgpu

    def run(net, device):
        side = torch.Stream(device=device)
        optimizer = sgd(net)
        simgpu.config.h2d_us = 100
        for x in inputs(device):
            optimizer.zero_grad()
            side.wait_event(torch.accelerator.current_stream().record_event())
            with side:
                with torch.autocast("simgpu", torch.bfloat16, autocasts, cache_enabled=False):
                    loss = squares(net, x)
                simgpu.config.compute_us = 200
                loss.backward()
                simgpu.config.compute_us = 0
            torch.accelerator.current_stream().wait_event(side.record_event())
            optimizer.step()
            yield loss, squares(net, x)

    check(make, run, torch.device("simgpu", 0), window=window)


class Branches(models.Stack):
    """Computes each second block on a stream of its own, and waits for them at the end only."""

    def run(self, x):
        torch.accelerator.synchronize()
        main, side = torch.accelerator.current_stream(), torch.Stream(device=x.device)
        side.wait_event(main.record_event())
        apart = []
        for index, block in enumerate(self.blocks):
            with side if index % 2 else main:
                apart.append(block(x))
        main.wait_event(side.record_event())
        self.kept = [x, apart]  # until all is done: memory of one stream that another reads is the user's to guard
        return torch.stack(apart).sum(dim=0)


@pytest.mark.simgpu
@parity.product(
    window=[1, 3],
    activations=["keep", "recompute", "offload", "recompute+offload"],
    slow=["copies", "kernels"],
    host_memory=["auto", "pageable"],
)
@pytest.mark.few(1)
def test_units_that_are_read_on_several_streams_at_once(host_memory, slow, activations, window):
    import simgpu

    def run(net, device):
        for name in {"copies": ["h2d_us", "d2h_us"], "kernels": ["compute_us"]}[slow]:
            setattr(simgpu.config, name, 100)
        yield from training()(net, device)

    options = {"window": window, "activations": activations, "host_memory": host_memory}
    check(lambda: Branches(models.Block() for _ in range(6)), run, torch.device("simgpu", 0), **options)


class OnTwoStreams(models.Block):
    """Computes all but one layer on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.beside, self.side = nn.Linear(models.WIDTH, models.WIDTH), torch.Stream(device="simgpu")

    def forward(self, x):
        main, side = torch.accelerator.current_stream(), self.side
        here = torch.tanh(self.beside(x))
        side.wait_event(main.record_event())
        with side:
            x.record_stream(side)
            there = super().forward(x)
        main.wait_event(side.record_event())
        there.record_stream(main)
        return here + there


@pytest.mark.simgpu
@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.few(3)
def test_a_unit_that_computes_on_two_streams(activations, autocasts):
    """Not with recomputation, which is a race in a plain run with torch's checkpoint around the block, too.

    The second forward runs on the stream of whichever node of backward asks for it first, and nodes of the other stream
    do not wait for what it made.
    """
    import simgpu

    def run(net, device):
        # Plainly, gradients are of the side stream, and would be given up while the optimizer reads them.
        simgpu.config.sync = next(net.parameters()).device == device
        optimizer = sgd(net)
        for x in inputs(device):
            optimizer.zero_grad()
            with torch.autocast("simgpu", torch.bfloat16, autocasts, cache_enabled=False):
                loss = squares(net, x)
            simgpu.config.compute_us = 200
            loss.backward()
            simgpu.config.compute_us = 0
            optimizer.step()
            yield loss

    check(models.stack_of(OnTwoStreams), run, torch.device("simgpu", 0), activations=activations)


class Counted(nn.Module):
    """Counts its calls on the device."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(64))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x))


@pytest.mark.simgpu
def test_what_is_recomputed_for_another_stream_is_in_order_with_it():
    """Before it with what that stream does to buffers, after it with what that stream reads."""
    import simgpu

    net = nn.Sequential(Counted(), Counted())
    with streaming(net, "simgpu", window=1, units=["Counted"], activations="recompute"):
        main, side = torch.accelerator.current_stream(), torch.Stream(device="simgpu")
        side.wait_event(main.record_event())
        with side:
            output = net(torch.ones(8, 64, device="simgpu"))
        main.wait_event(side.record_event())
        torch.accelerator.synchronize()
        simgpu.config.compute_us = 3000
        net[1].calls.mul_(2)
        kept = output.grad_fn._saved_result  # until it is read: its memory is the other stream's
        saved = kept.clone()
        simgpu.config.compute_us = 0
        torch.accelerator.synchronize()
        assert torch.equal(saved.cpu(), output.detach().cpu())
        assert net[1].calls.eq(2).all()


def test_forward_and_backward_in_another_thread(device):
    def run(net, device):
        seen = []

        def work():
            seen.extend(kept(item) for item in training()(net, device))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        yield seen
        yield from training()(net, device)

    check(blocks, run, device)


def test_forward_in_one_thread_and_backward_in_another(device):
    def run(net, device):
        for x in inputs(device):
            loss = squares(net, x)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            yield [p.grad for p in net.parameters()]

    check(blocks, run, device)


# --- Weights and buffers that reach units in other ways


class Tied(nn.Module):
    """Blocks that are handed another module's weight, as relative embeddings are."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(TakesWeight() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.relative.weight)
        return x


class TakesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.out = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x, weight):
        return x + self.out(torch.tanh(self.linear(x) @ weight))


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
def test_a_weight_that_is_passed_to_a_unit(device, activations):
    def run(net, device):
        for step in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
            net(x).square().sum().backward()

    check(Tied, run, device, units=["TakesWeight"], activations=activations)


# --- Parts of the module that are called by themselves


class Pair(nn.Module):
    """Two nets, of which whoever trains them calls one after the other."""

    def __init__(self, block=models.Block):
        super().__init__()
        self.encoder, self.decoder = models.stack_of(block)(), nn.Sequential(nn.Linear(models.CLASSES, 8), nn.Tanh())


def through_both(net, x):
    return net.decoder(net.encoder(x)).square().mean()


def contrasted(net, x):
    one, other = net.encoder(x), net.encoder(x + 0.5)
    return (net.decoder(one) * net.decoder(other)).mean()


def recomputed(net, x):
    return checkpoint(net.encoder, x.requires_grad_(), use_reentrant=False).square().mean()


def recomputed_by_another_backward(net, x):
    return checkpoint(net.encoder, x.requires_grad_(), use_reentrant=True).square().mean()


def under_autocast(net, x):
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        return contrasted(net, x)


@parity.product(
    window=[1, 3],
    activations=["keep", "recompute"],
    loss=[through_both, contrasted, recomputed, recomputed_by_another_backward, under_autocast],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_training_by_calls_of_parts(loss, activations, window, device):
    def run(net, device):
        yield from training(loss, steps=4)(net, device)
        with torch.no_grad():
            yield [loss(net, x) for x in inputs(device)]

    check(Pair, run, device, activations=activations, window=window)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=96)
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.few(1)
def test_generation_by_hand(make, device):
    pytest.importorskip("transformers")

    def run(net, device):
        with torch.no_grad():
            tokens = torch.arange(3, 17, device=device).view(2, 7)
            yield net.eval().generate(tokens, max_new_tokens=4, do_sample=False)

    check(make, run, device)


class Packing(nn.Module):
    """Takes how long its sequences are on the host, as packing asks for."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(models.FEATURES, models.WIDTH)
        self.memory = nn.GRU(models.WIDTH, models.WIDTH, 2, batch_first=True)
        self.head = nn.Linear(models.WIDTH, models.CLASSES)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.stem(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.memory(packed)[1][-1])


def test_an_argument_on_the_host_beside_others_on_the_device_stays_there(device):
    def loss(net, x):
        lengths = torch.arange(1, len(x) + 1)
        return net(x[:, None].repeat(1, len(x), 1), lengths).square().mean()

    check(Packing, training(loss), device, units=["Linear", "GRU"])


# --- Weights that are frozen between a forward and its backward


def freeze_one(net):
    net.blocks[1].norm.weight.requires_grad_(False)


def freeze_all(net):
    net.blocks[1].requires_grad_(False)


@pytest.mark.parametrize("freeze", [freeze_one, freeze_all])
@pytest.mark.parametrize("thaws", [True, False])
def test_weights_that_are_frozen_between_two_forwards_of_one_backward(freeze, thaws, device):
    def run(net, device):
        first, second = inputs(device, 2)
        net(first).square().sum().backward()
        loss = squares(net, first)
        freeze(net)
        loss = loss + squares(net, second)
        if thaws:
            net.requires_grad_()
        loss.backward()
        yield loss

    check(blocks, run, device, window=2)
