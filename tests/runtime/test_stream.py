"""`sp_lightning.stream`: the engine by hand, as a user of plain torch meets it."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import copy
import functools
import gc
import itertools
import logging
import pickle
import time
import types

import pytest
import torch
from side_by_side import assert_plain, blocks, check, inputs, sgd, squares
from torch import nn

import models
import sp_lightning
from sp_lightning import errors
from sp_lightning.memory.device import Device


def train(net, device, steps=2):
    optimizer = sgd(net)
    for x in inputs(device, steps):
        optimizer.zero_grad()
        loss = squares(net, x)
        loss.backward()
        optimizer.step()
    return loss.item()


def used_bytes(device):
    return torch.accelerator.memory_allocated() if device.type == "simgpu" else 0


# --- What a handle tells


def test_units_and_managed_cover_every_parameter_once(device):
    net = blocks()
    with sp_lightning.stream(net, device, window=2) as handle:
        assert sorted(handle.managed) == sorted(name for name, _ in net.named_parameters())
        assert [unit.name for unit in handle.units] == [f"blocks.{i}" for i in range(4)] + ["(root)"]
        assert sum(unit.numel for unit in handle.units) == sum(p.numel() for p in net.parameters())
        assert all(unit.trainable == 1 and unit.nbytes >= 4 * unit.numel for unit in handle.units)
        assert [unit.resident for unit in handle.units] == [False] * 4 + [True]


def test_a_tied_parameter_is_managed_under_its_first_name(device):
    net = models.TokenStack(tied=True)
    with sp_lightning.stream(net, device) as handle:
        assert sorted(handle.managed) == sorted(name for name, _ in net.named_parameters())


STATS = {
    "fetches": int,
    "bytes_up": int,
    "bytes_down": int,
    "bytes_offloaded": int,
    "bytes_brought_back": int,
    "writebacks": int,
    "bytes_written_back": int,
    "evictions": int,
    "extra_held": int,
    "surprises": int,
    "stall_ms": dict,
    "window": int,
    "transfer": int,
    "units": int,
    "resident_root_bytes": int,
    "device_peak": int,
    "host_bytes": int,
}


def test_stats_have_these_figures(device):
    net = blocks()
    with sp_lightning.stream(net, device, window=2) as handle:
        train(net, device)
        stats = handle.stats()
    assert STATS.items() <= {name: type(value) for name, value in stats.items()}.items()
    assert (stats["window"], stats["transfer"], stats["units"]) == (2, 1, 4)
    assert stats["host_bytes"] == 2 * sum(unit.nbytes for unit in handle.units)  # weights and gradients
    assert stats["device_peak"] >= 2 * handle.units[0].nbytes + stats["resident_root_bytes"]


def test_stats_are_a_snapshot(device):
    net = blocks()
    with sp_lightning.stream(net, device, window=2) as handle:
        before = handle.stats()
        kept = copy.deepcopy(before)
        train(net, device)
        assert before == kept and handle.stats()["fetches"] > before["fetches"]


# --- What the module is meanwhile


def test_parameters_are_the_same_objects_on_the_host_between_steps(device):
    net = blocks()
    before = dict(net.named_parameters())
    with sp_lightning.stream(net, device, window=2):
        train(net, device)
        after = dict(net.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.device.type == "cpu" for p in after.values())
        assert all(p.grad.device.type == "cpu" for p in after.values())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_results_without_gradients_are_those_of_the_plain_module(device, context):
    torch.manual_seed(0)
    net = blocks()
    x = models.vectors(0)[0].to(device)
    with context():
        expected = copy.deepcopy(net).to(device)(x).cpu()
        with sp_lightning.stream(net, device, window=1):
            assert torch.equal(net(x).cpu(), expected)
            assert torch.equal(net(x).cpu(), expected)
    assert torch.equal(net(x.cpu()), expected)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
@pytest.mark.parametrize("begins", [True, False])
def test_units_that_are_made_in_inference_mode_train_afterwards(begins, activations, device):
    torch.manual_seed(0)
    net = models.stack_of(models.NormedBatchBlock)()
    expected = train(copy.deepcopy(net).to(device), device)
    with torch.inference_mode(begins):
        handle = sp_lightning.stream(net, device, window=1, activations=activations)
    if not begins:  # they are made anew
        net.head.bias = nn.Parameter(net.head.bias.detach().clone())
    with torch.inference_mode():
        net.eval()(models.vectors(0)[0].to(device))
    assert train(net.train(), device) == expected
    handle.close()


@pytest.mark.parametrize("window", [5, 100])
def test_with_a_window_larger_than_the_units_all_of_them_stay(device, window):
    net = blocks()
    with sp_lightning.stream(net, device, window=window) as handle, torch.no_grad():
        assert handle.stats()["window"] == 4
        for x in inputs(device, 3):
            net(x)
        assert handle.stats()["fetches"] == 5


def test_two_modules_stream_side_by_side(device):
    torch.manual_seed(0)
    nets = blocks(), models.stack_of(models.NormedBatchBlock)()
    plain = [copy.deepcopy(net).to(device) for net in nets]
    expected = [train(net, device) for net in plain]
    with sp_lightning.stream(nets[0], device, window=1), sp_lightning.stream(nets[1], device, window=2):
        assert [train(net, device) for net in nets] == expected


def test_modules_that_share_an_encoder_are_called_one_by_one(device):
    class Head(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder = encoder
            self.last = nn.Linear(models.CLASSES, models.CLASSES)

        def forward(self, x):
            return self.last(self.encoder(x))

    torch.manual_seed(0)
    encoder = blocks()
    nets = nn.ModuleList([Head(encoder), Head(encoder)])
    plain = copy.deepcopy(nets).to(device)

    def both(nets):
        optimizer = sgd(nets)
        for x in inputs(device):
            optimizer.zero_grad()
            sum(squares(net, x) for net in nets).backward()
            optimizer.step()
        return [p.detach().cpu() for p in nets.parameters()]

    expected = both(plain)
    with sp_lightning.stream(nets, device, window=1):
        assert all(map(torch.equal, both(nets), expected))


# --- The end


def test_a_closed_module_is_plain_trained_and_off_the_device(device):
    torch.manual_seed(0)
    net = models.stack_of(models.NormedBatchBlock)()
    plain = copy.deepcopy(net).to(device)
    train(plain, device)
    plain.to("cpu")
    before = used_bytes(device)
    handle = sp_lightning.stream(net, device, window=2)
    train(net, device)
    net.zero_grad()
    handle.close()
    del handle
    assert_plain(net)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True))
    assert used_bytes(device) == before


class OnItsLayerBlock(models.Block):
    """Leaves its last graph at one of its layers."""

    def forward(self, x):
        self.up.last = self.up(self.norm(x))
        return x + self.down(self.up.last)


@pytest.mark.simgpu
# All but the first block keep their last graph; one that torch's checkpoint made leads to the module in any case.
@pytest.mark.parametrize(
    "activations, block",
    [
        *itertools.product(["keep", "offload"], [models.Block, models.AuxiliaryBlock, OnItsLayerBlock]),
        ("recompute", models.Block),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.few(4)
def test_no_host_memory_outlives_the_module(activations, block, autocast):
    import simgpu

    before = simgpu.pinned_bytes()[0]  # of whoever else is still alive
    net, device = models.stack_of(block)(), torch.device("simgpu", 0)
    handle = sp_lightning.stream(net, device, window=2, activations=activations)
    with torch.autocast("simgpu", torch.bfloat16, enabled=autocast):
        train(net, device)
    assert simgpu.pinned_bytes()[0] > before
    handle.close()
    del handle, net
    patience = time.monotonic() + 10  # autograd's own thread lets go of the last graph when it comes to it
    while gc.collect() or (simgpu.pinned_bytes()[0] > before and time.monotonic() < patience):
        time.sleep(0.01)
    assert simgpu.pinned_bytes()[0] <= before


def test_the_module_runs_plainly_afterwards_and_streams_again(device):
    torch.manual_seed(0)
    net = blocks()
    plain = copy.deepcopy(net).to(device)
    expected = [train(plain, device) for _ in range(3)]
    for index in (0, 2):
        with sp_lightning.stream(net, device, window=1):
            assert train(net, device) == expected[index]
        if index == 0:
            assert train(net.to(device), device) == expected[1]
            net.to("cpu")


def test_what_somebody_kept_while_it_streamed_is_plain_after_the_end(device):
    torch.manual_seed(0)
    net = blocks()
    handle = sp_lightning.stream(net, device, window=2)
    kept = [(module, module.forward) for module in net.modules() if "forward" in vars(module)]
    train(net, device)
    handle.close()
    expected = [squares(net, x) for x in inputs("cpu", 2)]
    for module, forward in kept:
        module.forward = forward  # as whoever had replaced it meanwhile puts it back
    assert all(map(torch.equal, [squares(net, x) for x in inputs("cpu", 2)], expected))
    for module, _ in kept:
        del module.forward
    assert_plain(net)


@pytest.mark.parametrize("in_backward", [True, False])
def test_steps_after_the_end_are_plain(device, in_backward):
    torch.manual_seed(0)
    net = blocks()
    with sp_lightning.stream(net, device, window=2) as handle:
        train(net, device)
    plain = copy.deepcopy(net)
    net.zero_grad()
    ours, theirs = sgd(net), sgd(plain)
    for x in inputs("cpu", 3):
        with handle.steps.overlapping(ours, lambda: True, in_backward):
            squares(net, x).backward()
            ours.step()
        squares(plain, x).backward()
        theirs.step()
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert not ours._optimizer_step_pre_hooks
    assert_plain(net)


def test_a_run_takes_over_the_weights_that_another_run_left(device):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for _ in range(2):
        with sp_lightning.stream(net, device) as handle:
            stores = [unit.store for unit in handle.engine.units]
            assert all(store.at_home(index) for store in stores for index in range(len(store.params)))


def test_close_is_safe_twice_and_a_figure_can_be_read_after_it(device):
    net = blocks()
    handle = sp_lightning.stream(net, device, window=2)
    train(net, device)
    handle.close()
    handle.close()
    assert handle.closed and handle.stats()["fetches"] > 0
    assert_plain(net)


def test_leaving_the_block_closes_also_after_an_exception(device):
    net = blocks()
    with pytest.raises(KeyError, match="mine"), sp_lightning.stream(net, device, window=2) as handle:
        train(net, device)
        raise KeyError("mine")
    assert handle.closed
    assert_plain(net)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_in_a_step_the_next_one_is_exact(device, where):
    class Interruption(RuntimeError):
        pass

    def interrupt(*_):
        raise Interruption

    torch.manual_seed(0)
    net = blocks()
    plain = copy.deepcopy(net).to(device)
    expected = train(plain, device)
    with sp_lightning.stream(net, device, window=1):
        x = models.vectors(0)[0].to(device)
        if where == "forward":
            hook = net.blocks[2].down.register_forward_pre_hook(interrupt)
            with pytest.raises(Interruption):
                net(x)
        else:
            hook = net.blocks[1].up.register_forward_hook(lambda _m, _i, out: out.register_hook(interrupt) and None)
            with pytest.raises(Interruption):
                squares(net, x).backward()
        hook.remove()
        net.zero_grad()
        assert train(net, device) == expected


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("then", ["forward", "backward", "close"])
@pytest.mark.few(1)
def test_after_a_backward_that_failed_the_next_one_keeps_its_gradients(activations, then, device):
    """The graph of the next one was there already: no forward between the two ended the failed one."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    def run(net, device):
        x = models.vectors(0)[0].to(device)
        first, second = squares(net, Fails.apply(x.clone().requires_grad_())), squares(net, 2 * x)
        with pytest.raises(ZeroDivisionError):
            first.backward()
        net.zero_grad()
        second.backward()
        if then == "forward":
            with torch.no_grad():
                yield net(x)
        elif then == "backward":
            squares(net, 3 * x).backward()

    check(blocks, run, device, activations=activations)


@pytest.mark.few(1)
def test_a_module_that_outgrew_its_budget_is_never_run_plainly(device):
    """A caller that goes on after the error meets it again, and streams once the module fits."""
    net = blocks()
    with sp_lightning.stream(net, device, host_budget="1MiB") as handle:
        optimizer = sgd(net)
        squares(net, next(inputs(device, 1))).backward()
        net.head = nn.Sequential(net.head, nn.Linear(models.CLASSES, 1 << 20))
        for _ in range(2):
            with pytest.raises(errors.HostMemoryError, match=r"host_budget=1\.00 MiB cannot be met"):
                net(next(inputs(device, 1)))
            optimizer.step()
        del net.head[1]
        before = handle.stats()["fetches"]
        assert net(next(inputs(device, 1))).device == device
        assert handle.stats()["fetches"] > before
    assert_plain(net)


def test_a_module_that_streams_already_is_refused(device):
    net = blocks()
    with sp_lightning.stream(net, device), pytest.raises(errors.UnsupportedError, match="streamed already"):
        sp_lightning.stream(net, device)
    assert_plain(net)


# --- Bad input


def test_a_device_that_is_not_here_is_refused_with_those_that_are():
    net, absent = blocks(), "cuda" if torch.xpu.is_available() else "xpu"  # no machine has both
    with pytest.raises(errors.OptionError, match=rf"device must be one of .*'cpu', got '{absent}'"):
        sp_lightning.stream(net, absent)
    assert_plain(net)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, r"window must be an int >= 1 or 'auto', got 0"),
        ({"window": -1}, r"window must be an int >= 1 or 'auto', got -1"),
        ({"window": 1.5}, r"window must be an int >= 1 or 'auto', got 1.5"),
        ({"window": True}, r"window must be an int >= 1 or 'auto', got True"),
        ({"window": 2, "transfer": 3}, r"transfer must be at most window \(2\), got 3"),
        ({"activations": "drop"}, r"activations must be one of 'keep', .*, got 'drop'"),
        ({"memory_budget": "much"}, r"memory_budget must be .*, got 'much'"),
        ({"windows": 2}, r"an option must be one of .*window.*, got 'windows'"),
        ({"units": []}, r"units must be 'auto', a sequence of class names or a callable.*, got \[\]"),
    ],
)
def test_a_wrong_option_is_refused_by_name(device, options, message):
    net = blocks()
    with pytest.raises(errors.OptionError, match=message):
        sp_lightning.stream(net, device, **options)
    assert_plain(net)


def test_an_unknown_class_name_is_refused_with_those_that_exist(device):
    net = blocks()
    with pytest.raises(errors.PartitionError, match=r"'Blok', which is not in Stack; its modules are: Block \(4\)"):
        sp_lightning.stream(net, device, units=["Blok"])
    assert_plain(net)


def test_a_module_without_parameters_runs_with_its_buffers_on_the_device(device):
    norm, plain = nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, affine=False).to(device)
    with sp_lightning.stream(norm, device) as handle:
        batch = torch.arange(12.0, device=device).view(4, 3).requires_grad_()
        norm(batch).square().sum().backward()
        assert batch.grad.device == norm.running_mean.device == torch.device(device)
        assert handle.units == [] and handle.stats()["fetches"] == 0
    plain(batch)
    assert norm.running_mean.is_cpu and torch.equal(norm.running_mean, plain.running_mean.cpu())


@pytest.mark.parametrize(
    "name, message",
    [("mps", "device 'mps' shares its memory with the host.*strategy='auto'"), ("meta", "device 'meta' holds no data")],
)
def test_a_device_that_cannot_be_served_is_refused(name, message):
    net = blocks()
    with pytest.raises(errors.UnsupportedError, match=message):
        sp_lightning.stream(net, name)
    assert_plain(net)


def test_a_device_that_torch_does_not_know_is_refused_by_torch():
    with pytest.raises(RuntimeError, match="gpu0"):
        sp_lightning.stream(blocks(), "gpu0")


def test_a_budget_that_the_largest_unit_does_not_fit_into_is_refused_with_both_figures(device):
    net = blocks()
    with pytest.raises(errors.MemoryBudgetError, match=r"needs at least .* for blocks\.\d, got 4\.00 KiB"):
        sp_lightning.stream(net, device, memory_budget="4KiB")
    assert_plain(net)


def test_nothing_is_logged_above_info(device, caplog):
    with (
        caplog.at_level(logging.DEBUG, logger="sp_lightning"),
        sp_lightning.stream(blocks(), device, window=2) as handle,
    ):
        train(handle.module, device)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("at", range(6))
@pytest.mark.few(2)
def test_a_load_that_was_interrupted_is_made_again(device, at, monkeypatch):
    """By the user, say, at a copy up: the weights that the next forward sees are those of now."""
    send_up, calls = Device.send_up, itertools.count()

    def interrupted(self, *arguments, **options):
        if next(calls) == at:
            raise KeyboardInterrupt
        return send_up(self, *arguments, **options)

    def run(net, device):
        x, optimizer = next(inputs(device)), sgd(net)
        squares(net, x).backward()
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(Device, "send_up", interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                net(x)
        yield net(x)

    check(blocks, run, device, window=2)


# ---- a loop of the user's own


def zeroing_after(net, device):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)
    for x in inputs(device, 4):
        loss = squares(net, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield [optimizer.state_dict()["state"]]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_steps_of_a_loop_by_hand_are_deferred(device, overlap):
    stats = check(blocks, zeroing_after, device, optimizer_overlap=overlap)
    assert stats["held_steps"] == (3 if overlap else 0)  # the first one makes the state


def test_a_closure_that_fails_leaves_nothing_announced(device):
    def run(net, device):
        optimizer = sgd(net)

        def fails():
            raise ZeroDivisionError

        for x in inputs(device):
            squares(net, x).backward()
            with pytest.raises(ZeroDivisionError):
                optimizer.step(fails)
            optimizer.step()
            optimizer.zero_grad()

    assert check(blocks, run, device)["held_steps"] == 2


def test_a_hook_after_the_step_sees_it_done(device):
    def run(net, device):
        seen, optimizer = [], sgd(net)
        optimizer.register_step_post_hook(lambda *_: seen.append([p.detach().clone() for p in net.parameters()]))
        for x in inputs(device):
            squares(net, x).backward()
            optimizer.step()
        yield seen

    assert check(blocks, run, device)["held_steps"] == 0


# ---- a forward that other code puts in the place of the entry


def reading_the_head(self, x):
    """Without a call of the head, as a fused loss reads it."""
    return nn.functional.linear(self.run(self.stem(x)), self.head.weight, self.head.bias)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_forward_that_is_set_while_it_streams_is_a_step(device, wraps):
    def run(net, device):
        before = net.forward
        net.forward = (lambda x: before(2 * x)) if wraps else types.MethodType(reading_the_head, net)
        optimizer = sgd(net)
        for x in inputs(device):
            loss = squares(net, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
        with torch.no_grad():
            yield net(x)
        net.forward = before

    check(blocks, run, device)


def test_a_forward_that_was_set_stays_when_streaming_ends(device):
    net = blocks()
    with sp_lightning.stream(net, device):
        net.forward = mine = types.MethodType(reading_the_head, net)
        net(next(inputs(device)))
    assert net.forward is mine and "_call_impl" not in vars(net)
    net(next(inputs(torch.device("cpu"))))


def test_hooks_of_the_users_run_outside_of_the_step(device):
    phases, net = [], blocks()
    with sp_lightning.stream(net, device) as handle:
        net.register_forward_pre_hook(lambda *_: phases.append(handle.in_step))
        net(next(inputs(device)))
    assert phases == [False]


# ---- arguments that are moved


class Batch(collections.UserDict):
    """As transformers' BatchEncoding: no node to pytree, with attributes of its own."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class Sealed(collections.abc.Mapping):
    """It has no way to set an item."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Plain(dict):
    """Of a class of its own, it is no node either."""


class TakesABatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = blocks()

    def forward(self, batch, others=()):
        self.seen = type(batch), getattr(batch, "encodings", None), {x.device.type for x in batch.values()}
        return self.net(batch["x"]) + sum(other["x"].sum() for other in others)


@pytest.mark.parametrize("kind", [Batch, Sealed, Plain])
def test_a_mapping_that_is_no_node_is_moved_as_a_copy(device, kind):
    model, x = TakesABatch(), next(inputs(torch.device("cpu")))
    given = kind({"x": x})
    given.encodings = "kept"
    expected = model(given, [given])
    with sp_lightning.stream(model, device), torch.no_grad():
        found = model(given, [given])
    kept = None if kind is Sealed else "kept"  # made anew from its items, as accelerate and Lightning do
    assert model.seen == (kind, kept if device.type != "cpu" else "kept", {device.type})
    assert torch.equal(found.cpu(), expected) and given["x"] is x


@pytest.mark.parametrize("bound", [False, True])
def test_a_copy_of_a_module_has_the_forward_that_was_set_on_it(bound):
    def outcome(context):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
        block = net[1]
        if bound:
            block.forward = types.MethodType(lambda self, x: self[0](x) * 3, block)
        else:
            block.forward = lambda x, forward=block.forward: forward(x) * 3
        with context(net):
            net(torch.ones(2, 4))
            net[1] = copy.deepcopy(block)
            return net(torch.ones(2, 4))

    plain = outcome(lambda net: contextlib.nullcontext())
    assert torch.equal(plain, outcome(lambda net: sp_lightning.stream(net, "cpu", window=1)))


def tripled(x):
    return x * 3


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_copies_of_a_module_have_the_attributes_of_one_that_is_not_streamed(make_copy, activations):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
    net[1].forward = tripled
    net.offset = nn.Parameter(torch.ones(4))  # the net is above units and has a weight
    names = [set(vars(make_copy(part))) for part in net.modules()]
    with sp_lightning.stream(net, "cpu", window=1, activations=activations):
        for _ in range(2):
            net(torch.ones(2, 4)).sum().backward()
        assert [set(vars(make_copy(part))) for part in net.modules()] == names
        assert make_copy(net[1]).forward is tripled
    assert [set(vars(part)) for part in net.modules()] == names


def doubled(forward):
    return functools.wraps(forward)(lambda self, *args: getattr(self, f"plain_{forward.__name__}")(*args) * 2)


class TakesSteps(nn.Sequential):
    def generate(self, x):
        return self(x) * 3


@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.few(2)
def test_a_copy_of_a_module_has_the_methods_that_code_kept_and_wrapped(make_copy, activations):
    def outcome(context):
        torch.manual_seed(0)
        net = TakesSteps(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
        x = torch.ones(2, 4)
        with context(net):
            for part in (net, net[1], net[1][0]):
                for name in ("forward", "generate")[: 1 + hasattr(part, "generate")]:
                    method = getattr(part, name)
                    setattr(part, f"plain_{name}", method)
                    setattr(part, name, types.MethodType(doubled(method), part))
            copied = make_copy(net)
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.mul_(0.5)
            outputs = [f(x) for one in (copied, net) for f in (one, one.generate)]
        return outputs + [f(x) for one in (copied, net, copy.deepcopy(net)) for f in (one, one.generate)]

    plain = outcome(lambda net: contextlib.nullcontext())
    streamed = outcome(lambda net: sp_lightning.stream(net, "cpu", window=1, activations=activations))
    assert all(map(torch.equal, plain, streamed))


def test_a_method_kept_from_a_run_is_the_same_one_after_it():
    net = TakesSteps(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
    with sp_lightning.stream(net, "cpu", window=1) as _handle:  # which has the entries
        generate = net.generate
    x = torch.ones(2, 4)
    assert torch.equal(generate(x), net(x) * 3)


def test_a_forward_that_was_set_on_a_linear_layer_stays_there_under_autocast():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
    layer = net[1][0]
    layer.forward = own = layer.forward
    with sp_lightning.stream(net, "cpu", window=1), torch.autocast("cpu", torch.bfloat16):
        before = layer.forward
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
        assert before is not own and layer.forward is before
    assert layer.forward is own
