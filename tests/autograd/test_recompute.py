"""What activations="recompute" puts back before forward runs again, and what it leaves alone."""

import contextlib
import dataclasses
import functools
import inspect
import random
import threading
import types

import numpy
import pytest
import torch
from refusals import refusal
from side_by_side import blocks, check, inputs, squares, training
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import models
import parity
import sp_lightning
from sp_lightning.autograd import recompute
from sp_lightning.autograd.stand_ins import InPlaceOfForward
from sp_lightning.errors import ExactnessError


def block_that_keeps(value):
    """A block that keeps something, made of itself, as an attribute."""

    class Keeping(models.Block):
        def __init__(self):
            super().__init__()
            self.kept = value(self)

        def forward(self, x):
            return x + self.down(self.activate(self.up(self.norm(x))))

        def activate(self, x):
            return x.relu()

    return Keeping


class Unwilling(dict):
    """Fails when it is looked through, as lazy registries may."""

    def values(self):
        raise ValueError("not to be looked through")


KEPT = {
    "an object that leads to a registry": lambda block: types.SimpleNamespace(registry=Unwilling(a=1)),
    "a bound method": lambda block: block.activate,
    "a partial of a bound method": lambda block: {"activate": functools.partial(block.activate)},
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.few(2)
def test_recomputation_copies_no_module_that_an_attribute_leads_to(kept, device, monkeypatch):
    make = models.stack_of(block_that_keeps(KEPT[kept]))
    monkeypatch.setattr(models.Block, "__deepcopy__", lambda *_: pytest.fail("a block was copied"), raising=False)
    check(make, training(), device, activations="recompute")


def test_weights_behind_a_bound_method_are_trained_when_it_is_recomputed(device):
    class Calling(models.Block):
        def __init__(self):
            super().__init__()
            self.first = self.up.forward

        def forward(self, x):
            return x + self.down(self.first(self.norm(x)).relu())

    check(models.stack_of(Calling), training(), device, activations="recompute")


def test_the_second_run_finds_every_entry_where_the_first_one_did():
    def methods(kind):
        return {kind.method}.union(*map(methods, kind.__subclasses__()))

    assert methods(InPlaceOfForward) <= recompute.ENTERED


def test_recomputation_does_not_look_through_a_python_module_that_an_attribute_names(device, monkeypatch):
    registry = types.ModuleType("registry")
    registry.models = Unwilling(a=1)
    check(models.stack_of(block_that_keeps(lambda block: registry)), training(), device, activations="recompute")


def test_what_can_not_be_copied_keeps_nothing_else_from_being_put_back(device):
    class Counting(models.Block):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()
            self.seen = types.SimpleNamespace(count=0)

        def forward(self, x):
            self.seen.count += 1
            return x + self.seen.count * self.down(self.up(self.norm(x)).relu())

    check(models.stack_of(Counting), training(), device, activations="recompute")


class Flooding(models.Block):
    """Changes what is passed to it, as a dropout does that comes first."""

    def forward(self, x, scale=None):
        x = getattr(x, "x", x)
        x = nn.functional.dropout(x, 0.3, self.training, inplace=True)
        x.mul_(1.5 if scale is None else scale)
        return x + self.down(self.up(self.norm(x)).relu())


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_block_that_changes_its_input_in_place_runs_again_with_what_it_was(device, activations, window):
    check(models.stack_of(Flooding), training(steps=3), device, activations=activations, window=window)


class Twice(models.Block):
    def forward(self, x, same):
        return x.mul_(2).relu() + self.down(self.up(self.norm(same)).relu())


class TwiceStack(models.Stack):
    def run(self, x):
        for block in self.blocks:
            x = x.clone()
            x = block(x, x)
        return x


def test_what_is_changed_in_place_and_passed_twice_is_one_tensor_again(device):
    def make():
        return TwiceStack(Twice() for _ in range(3))

    check(make, training(steps=3), device, activations="recompute", units=["Twice"])


class FloodingStack(nn.Module):
    """Three of them, each handed what a copy can not stand for."""

    def __init__(self, passed):
        super().__init__()
        self.blocks = nn.ModuleList(Flooding() for _ in range(3))
        self.passed = passed

    def forward(self, x):
        x = x.repeat(3, 1).relu()
        for block in self.blocks:
            if self.passed == "inside":
                x = block(types.SimpleNamespace(x=x))
            else:
                x = block(x, x[:, :1]) if self.passed == "twice" else block(x[1:])
        return x


@pytest.mark.parametrize("passed", ["twice", "in part", "inside"])
@refusal(
    '`activations="recompute"`, and a unit changes in place a view, a tensor that another argument '
    "shares, or one inside an object, or begins to change an argument in place later",
    ExactnessError,
    '"keep" or "offload"',
)
def test_a_change_in_place_that_no_copy_can_stand_for_is_an_error(passed, device):
    net, x = FloodingStack(passed), torch.ones(2, models.WIDTH, device=device)
    with sp_lightning.stream(net, device, window=1, activations="recompute", units=["Flooding"]):
        with pytest.raises(ExactnessError, match="changes a tensor that is passed to it in place"):
            net(x)


def test_a_change_in_place_that_begins_later_is_an_error_once(device):
    class Late(models.Block):
        changes = False

        def forward(self, x):
            return super().forward(x.mul_(2) if self.changes else x)

    net, x = models.stack_of(Late)(), torch.ones(2, models.FEATURES, device=device)
    with sp_lightning.stream(net, device, window=1, activations="recompute"):
        net(x).sum().backward()
        Late.changes = True
        with pytest.raises(ExactnessError, match="changes a tensor that is passed to it in place"):
            net(x)
        for _ in net.blocks[1:]:
            with pytest.raises(ExactnessError):
                net(x)
        net(x).sum().backward()


class Counting(models.Block):
    """Scales by what it counts with something that it keeps."""

    def __init__(self, kept, count):
        super().__init__()
        self.kept, self.count = kept, count

    def forward(self, x):
        return super().forward(x) * torch.full_like(x, 0.1 * self.count(self.kept))


def counted(kept):
    kept.n = getattr(kept, "n", 0) + 1
    return kept.n


COUNTERS = {
    "an object": (types.SimpleNamespace, counted),
    "an iterator": (lambda: iter([1, 2, 3, 4, 5, 6]), next),
    "torch's generator": (lambda: torch.Generator().manual_seed(3), lambda kept: float(torch.rand((), generator=kept))),
    "NumPy's generator": (lambda: numpy.random.default_rng(3), lambda kept: kept.random()),
    "Python's generator": (lambda: random.Random(3), lambda kept: kept.random()),
    "an array": (lambda: numpy.zeros(1), lambda kept: float(kept.__iadd__(1)[0])),
}


@pytest.mark.parametrize("kept", COUNTERS)
@pytest.mark.few(3)
def test_an_object_that_a_block_changes_is_for_the_second_run_what_it_was_for_the_first(kept, device):
    make, count = COUNTERS[kept]
    check(lambda: models.Stack(Counting(make(), count) for _ in range(3)), training(), device, activations="recompute")


class Config:
    """Plain values, as the configs of models are."""

    def __init__(self):
        self.n, self.flag, self.names, self.entries = 1, True, [1.0, 2.0], {"one": 1.0, "two": {"three": 3.0}}


class Other(Config):
    factor = 2


def reordered(config):
    config.entries["one"] = config.entries.pop("one")
    return len(next(iter(config.entries)))


def replaced(config):
    config.entries = {"one": config.entries["one"] + 1}
    return config.entries["one"]


def given(config, **entries):
    vars(config).update(entries)


CHANGES = {
    "nothing": lambda config: config.n,
    "a number": counted,
    "the type of a number": lambda config: given(config, flag=1) or 1 + (type(config.flag) is int),
    "a new attribute": lambda config: given(config, new=getattr(config, "new", 0) + 1) or config.new,
    "a lost attribute": lambda config: 1 if vars(config).pop("flag", None) is None else 2,
    "an item of a list": lambda config: config.names.append(config.names[-1] + 1) or config.names[-1],
    "an entry further inside": lambda config: (
        config.entries["two"].update(three=config.entries["two"]["three"] + 1) or 1
    ),
    "the order of a dictionary": reordered,
    "a dictionary": replaced,
    "its class": lambda config: setattr(config, "__class__", Other) or config.factor,
}


class Configured(models.Block):
    """Changes a config, or not, by what is passed to it."""

    def __init__(self, config, change):
        super().__init__()
        self.config, self.inner, self.change = config, config.entries, change

    def forward(self, x):
        changes = int(x.detach().abs().sum() * 1000) % 3 == 0
        factor = self.change(self.config) if changes else self.config.n
        factor += self.config.entries.get("two", self.inner["two"])["three"]
        return super().forward(x) * torch.full_like(x, 0.1 * factor)


@parity.product(shared=[False, True], change=list(CHANGES), device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_config_that_a_block_changes_now_and_then_is_for_the_second_run_what_it_was(change, shared, device):
    def make():
        one = Config()
        return models.Stack(Configured(one if shared else Config(), CHANGES[change]) for _ in range(3))

    check(make, training(steps=6), device, activations="recompute")


def test_a_config_that_no_block_changes_is_not_copied_again(device, monkeypatch):
    config, copies = Config(), []
    deepcopy = recompute.copy.deepcopy

    def noted(value, memo=None):
        copies.append(value)
        return deepcopy(value, memo)

    monkeypatch.setattr(recompute.copy, "deepcopy", noted)
    net = models.Stack(Configured(config, CHANGES["nothing"]) for _ in range(3)).to(device)
    with sp_lightning.stream(net, device, window=2, activations="recompute"):
        for before in (True, False, False):
            net(torch.ones(2, models.FEATURES, device=device)).sum().backward()
            assert any(type(value) is Config for value in copies) == before
            copies.clear()
        config.n = 2
        net(torch.ones(2, models.FEATURES, device=device)).sum().backward()
        assert any(value is config for value in copies)


def numbers():
    yield from range(1, 100)


@pytest.mark.parametrize("keep", [lambda it: it, lambda it: types.SimpleNamespace(it=[it])], ids=["itself", "inside"])
@refusal(
    '`activations="recompute"`, and a unit stores, or is passed, an iterator that cannot be copied (a '
    "generator; since Python 3.14 those of `itertools`)",
    ExactnessError,
    '"keep" or "offload"',
)
def test_an_iterator_that_can_not_be_copied_is_an_error_that_names_the_unit(keep, device):
    """A generator: since Python 3.14 those of itertools as well."""

    def count(kept):
        return next(kept.it[0] if isinstance(kept, types.SimpleNamespace) else kept)

    net = models.Stack([models.Block(), Counting(keep(numbers()), count)])
    with sp_lightning.stream(net, device, window=1, activations="recompute"):
        with pytest.raises(ExactnessError, match="1 keeps, or is passed, an iterator that cannot be copied"):
            net(torch.randn(2, models.FEATURES, device=device))


def test_what_can_not_be_copied_leaves_what_is_passed_beside_it_alone(device):
    class Passed(models.Block):
        def forward(self, x, seen=None, lock=None):
            seen.append(len(seen))
            return super().forward(x) * torch.full_like(x, 0.1 * len(seen))

    class Net(models.Stack):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, seen=[0], lock=threading.Lock())
            return self.head(x)

    check(lambda: Net(Passed() for _ in range(3)), training(), device, activations="recompute")


@pytest.mark.few(1)
def test_what_two_modules_of_a_unit_keep_together_is_one_object_again(device):
    class Pair(models.Block):
        def __init__(self):
            super().__init__()
            kept = types.SimpleNamespace()
            self.one, self.other = Counting(kept, counted), Counting(kept, counted)

        def forward(self, x):
            return super().forward(x) + self.one(x) + self.other(x)

    check(models.stack_of(Pair), training(), device, activations="recompute", units=["Pair"])


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


class Lazy(models.Block):
    """Takes what it needs from a tensor that it keeps in its first forward, and counts its forwards there."""

    def __init__(self, kept):
        super().__init__()
        self.scale = None
        if kept == "a weight of another class":
            self.up.weight = Marked(self.up.weight.detach())
        elif kept == "a buffer":
            self.register_buffer("at", torch.ones(1))
        elif kept == "a tensor":
            self.at = torch.ones(1)

    def mark(self):
        self.kept().found = self.kept().first = torch.rand(()).item() + 1
        self.kept().uses = []

    def kept(self):
        return getattr(self, "at", self.up.weight)

    def forward(self, x):
        kept = self.kept()
        if hasattr(kept, "found"):
            self.scale = kept.found
            del kept.found
        kept.uses.append(kept.first)
        kept.first, kept.last = None, len(kept.uses)
        return x + super().forward(x.sinh()) * self.scale * kept.last


@parity.product(
    kept=["a weight", "a weight of another class", "a buffer", "a tensor"],
    activations=["recompute", "recompute+offload"],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_what_is_set_on_a_tensor_that_a_unit_keeps_is_for_the_second_run_what_it_was(kept, activations, device):
    def run(net, device):
        for block in net.blocks:
            block.mark()
        yield from training()(net, device)
        yield [(len(block.kept().uses), sorted(vars(block.kept())), block.scale) for block in net.blocks]

    check(models.stack_of(functools.partial(Lazy, kept)), run, device, activations=activations, units=["Lazy"])


class Handing(models.Stack):
    """Marks what it hands to each block, which takes the mark off, and may write to what it was handed."""

    class Block(models.Block):
        written = False

        def forward(self, x):
            share = x.share
            del x.share
            if self.written:
                x.mul_(2)
            return x + super().forward(x.sinh()) * share

    def run(self, x):
        for share, block in enumerate(self.blocks, start=1):
            x = x * 1
            x.share = share
            x = block(x)
        return x


@parity.product(
    written=[False, True],
    activations=["recompute", "recompute+offload"],
    rows=[2, 64],  # too few to wait on the host, and enough
    device=parity.DEVICES,
)
def test_what_is_set_on_a_tensor_that_is_passed_is_for_the_second_run_what_it_was(written, activations, rows, device):
    def run(net, device):
        for block in net.blocks:
            block.written = written
        for x in inputs(device):
            net(x.repeat(rows, 1)).square().mean().backward()

    def make():
        return Handing(Handing.Block() for _ in range(3))

    check(make, run, device, activations=activations, units=["Block"])


class Averaging(models.Block):
    """Keeps a running mean, which is no buffer."""

    def __init__(self):
        super().__init__()
        self.mean = [torch.zeros(())]

    def forward(self, x):
        self.mean[0] += x.detach().mean().cpu()
        return super().forward(x - self.mean[0].to(x.device))


@refusal(
    '`activations="recompute"`, and a unit changes in place a tensor that a module stores as an attribute',
    ExactnessError,
    'a buffer, or "keep" or "offload"',
)
def test_a_tensor_beside_the_buffers_that_is_changed_in_place_is_an_error(device):
    net, x = models.stack_of(Averaging)(), torch.ones(2, models.FEATURES, device=device)
    with sp_lightning.stream(net, device, window=1, activations="recompute"):
        with pytest.raises(ExactnessError, match="register it as a buffer, or use activations='keep' or 'offload'"):
            net(x)


class Doubling(models.Block):
    """Saves neither what is passed to it nor what it keeps: they may be changed afterwards."""

    def forward(self, x):
        return super().forward(x * 2 + self.kept)


class Changing(models.Stack):
    """Changes, between a block and the next, what the block needs to run again."""

    def __init__(self, changed):
        super().__init__(Doubling() for _ in range(4))
        self.changed = changed

    def run(self, x):
        kept = torch.ones(x.shape[-1], device=x.device)
        for block in self.blocks:
            block.kept = kept if self.changed == "kept" else 1
            out = block(x)
            with torch.no_grad():
                if self.changed == "bias":
                    block.up.bias += 1
                elif self.changed != "nothing":
                    {"passed": x, "kept": kept}[self.changed].add_(1)
            x = x + out
        return x


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
@refusal(
    '`activations="recompute"`, and a unit saves other tensors in its second forward than in its first',
    ExactnessError,
    '"keep" or "offload"',
)
def test_a_second_run_that_saves_other_tensors_is_an_error(activations, device):
    runs = [0]

    class Alternating(models.Block):
        def forward(self, x):
            runs[0] += 1
            return super().forward(x.double().exp().float() if runs[0] > 9 else x)

    net, (x,) = models.stack_of(Alternating)(), inputs(device, 1)
    with sp_lightning.stream(net, device, window=1, activations=activations, units=["Alternating"]):
        loss = squares(net, x)
        runs[0] = 9
        with pytest.raises(ExactnessError, match=r"blocks\.\d ran again in backward, and not as it did") as caught:
            loss.backward()
        assert str(caught.value).endswith("use activations='keep' or 'offload'") and "Tip:" not in str(caught.value)


@pytest.mark.few(1)
def test_a_level_of_forward_mode_differentiation_that_ended_before_backward_is_named(device):
    net, (x,) = models.stack_of(models.Block)(), inputs(device, 1)
    with sp_lightning.stream(net, device, window=1, activations="recompute"):
        with forward_ad.dual_level():
            slope = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        with pytest.raises(ExactnessError, match="forward-mode differentiation that ended before backward"):
            slope.sum().backward()


@parity.product(
    rows=[2, 64],  # too few to wait on the host, and enough
    changed=["passed", "kept", "bias", "nothing"],
    activations=["recompute", "recompute+offload"],
    device=parity.DEVICES,
)
@refusal(
    '`activations="recompute"`, and one of these is changed in place between a unit\'s forward and its '
    "backward, where autograd saved none of it (`x += block(x)`): a weight of the unit, an argument, "
    "or a tensor that its modules store. Also a weight that gets other data there (`p.data = ...`)",
    ExactnessError,
    '`x = x + block(x)`, or "keep" or "offload"',
)
@pytest.mark.few(2)
def test_what_is_changed_between_the_two_runs_is_an_error(activations, changed, rows, device):
    net, x = Changing(changed), torch.ones(rows, models.FEATURES, device=device)
    error = pytest.raises(ExactnessError, match="changed after its forward, which cannot run again")
    with sp_lightning.stream(net, device, window=1, activations=activations):
        for _ in range(2):  # of the second it is known that the blocks change nothing themselves
            with contextlib.nullcontext() if changed == "nothing" else error:
                net(x).sum().backward()
    if device.type == "simgpu" and (activations, changed) == ("recompute+offload", "passed"):
        import simgpu

        torch.accelerator.synchronize()
        simgpu.races()  # of the change and the way to the host: that is the user's


class Given(models.Block):
    def forward(self, x, weight):
        return super().forward(x) + (x @ weight).tanh()


class Gives(models.Stack):
    """Passes a weight of its own to each block, as DeBERTa does with its relative positions."""

    def __init__(self):
        super().__init__(Given() for _ in range(3))
        self.table = torch.nn.Parameter(torch.eye(models.WIDTH))

    def run(self, x):
        for block in self.blocks:
            x = block(x, self.table)
        return x


@parity.product(activations=["recompute", "recompute+offload"], window=[1, 2], device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_weight_that_is_passed_to_a_unit_is_one_in_the_second_run(activations, window, device):
    case = dataclasses.replace(models.case("mlp"), make=Gives, units=["Given"])
    parity.check(case, {"window": window, "activations": activations}, accelerator=device.type, accumulate=2)


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
@pytest.mark.few(1)
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


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
def test_where_saved_tensor_hooks_are_disabled_what_units_save_is_kept(activations, device):
    def loss(net, x):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return squares(net, x)

    check(blocks, training(loss), device, activations=activations)


def test_an_attribute_that_shares_what_is_passed_and_changed_in_place_is_an_error(device):
    class Looking(models.Block):
        def forward(self, x):
            x += 1
            return super().forward(x) * self.seen

    class Shared(models.Stack):
        def run(self, x):
            for block in self.blocks:
                x = x.clone()
                block.seen = x[:1]
                x = block(x)
            return x

    net, x = Shared(Looking() for _ in range(3)), torch.ones(2, models.FEATURES, device=device)
    with sp_lightning.stream(net, device, window=1, activations="recompute", units=["Looking"]):
        with pytest.raises(ExactnessError, match="keeps as an attribute"):
            net(x)


class Run:
    """Knows the whole module, and changes as it goes."""

    def __init__(self, net):
        self.net, self.calls, self.sum = net, 0, torch.zeros(1)

    def __deepcopy__(self, memo):
        raise AssertionError("nobody's to copy")


class Reporting(models.Block):
    run = None

    def forward(self, x):
        if self.run is not None:
            self.run.calls += 1
            self.run.sum += 1
        return super().forward(x)


def test_an_object_that_leads_out_of_a_unit_is_not_the_units_own(device):
    net = models.stack_of(Reporting)()
    run = net.blocks[1].run = Run(net)
    with sp_lightning.stream(net, device, window=1, activations="recompute"):
        for x in inputs(device, 2):
            squares(net, x).backward()
    assert run.calls == 4 and net.blocks[1].run is run


class Substituting(nn.Module):
    """Runs its blocks with other weights than their own."""

    def __init__(self):
        super().__init__()
        self.net = blocks()

    def forward(self, x):
        return torch.func.functional_call(self.net, {name: p * 0.9 for name, p in self.net.named_parameters()}, x)


def test_what_took_the_places_of_weights_for_a_call_is_there_in_the_second_run(device):
    check(Substituting, training(), device, activations="recompute")


class Turning(models.Block):
    """Exchanges two layers in each forward."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(models.WIDTH, models.HIDDEN)

    def forward(self, x):
        found = super().forward(x)
        self.up, self.other = self.other, self.up
        return found


class Activating(models.Block):
    """Has its activation in a module."""

    def __init__(self):
        super().__init__()
        self.activate = nn.Tanh()

    def forward(self, x):
        return x + self.down(self.activate(self.up(self.norm(x))))


class WithTwoActivations(models.Stack):
    """Gives its blocks another activation for each of two forwards."""

    def forward(self, x):
        found = super().forward(x)
        for block in self.blocks:
            block.activate = nn.Sigmoid() if isinstance(block.activate, nn.Tanh) else nn.Tanh()
        return found + super().forward(x)


@pytest.mark.parametrize("stack, block", [(models.Stack, Turning), (WithTwoActivations, Activating)])
def test_a_module_that_is_exchanged_for_another_is_there_in_the_second_run(stack, block, device):
    check(lambda: stack(block() for _ in range(3)), training(), device, activations="recompute")


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


def test_hooks_inside_a_unit_run_again_and_those_of_the_unit_do_not(device):
    net, ran = blocks(), []
    net.blocks[1].up.register_forward_hook(lambda *_: ran.append("up"))
    net.blocks[1].register_forward_hook(lambda *_: ran.append("block"))
    with sp_lightning.stream(net, device, window=1, activations="recompute"):
        squares(net, next(iter(inputs(device)))).backward()
    assert ran == ["up", "block", "up"]


class Once(models.Block):
    """Has a hook that removes itself when it ran, and registers a buffer in each step's first forward."""

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().abs().mean(), persistent=False)
            x = x * 2
        return super().forward(x) * self.scale


def test_a_hook_that_removes_itself_and_a_buffer_that_forward_registers_are_there_for_both_runs(device):
    def run(net, device):
        for x in inputs(device):
            for block in net.blocks:
                if hasattr(block, "scale"):
                    del block.scale

                def once(layer, args, at=block):
                    at.handle.remove()
                    return (args[0] * 0.5,)

                block.handle = block.up.register_forward_pre_hook(once)
            loss = squares(net, x)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]
            yield [[block.scale, len(block.up._forward_pre_hooks)] for block in net.blocks]

    check(models.stack_of(Once), run, device, activations="recompute")


class Folded(nn.Module):
    """A block with one weight in two layers, and a checkpoint of its own around one of them."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.up, self.again = nn.Linear(models.WIDTH, models.WIDTH), nn.Linear(models.WIDTH, models.WIDTH)
        self.down = nn.Linear(models.WIDTH, models.WIDTH, bias=False)
        self.again.weight = self.up.weight
        self.use_reentrant = use_reentrant

    def forward(self, x):
        y = checkpoint(self.within, self.up(x), use_reentrant=self.use_reentrant)
        return x + self.down(self.again(y))

    def within(self, x):
        return torch.tanh(self.up(torch.tanh(self.down(x))))


def penalised(net, x):
    """Depends on its own gradient, which is differentiated in turn."""
    x = x.requires_grad_()
    loss = squares(net, x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


def under(dtype, loss):
    """A loss that is computed under autocast with this type, or without autocast."""

    def cast(net, x):
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            return loss(net, x)

    return cast


@parity.product(
    activations=["recompute", "recompute+offload", "offload"],
    casts=[None, torch.bfloat16],
    reentrant=[False, True],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_a_checkpoint_inside_a_unit_with_a_shared_weight(reentrant, casts, activations, device):
    check(models.stack_of(lambda: Folded(reentrant)), training(under(casts, squares)), device, activations=activations)


class Normalised(nn.Module):
    """Leaves traces of each run: batch statistics, and a count after all that backward needs was saved."""

    runs = 0

    def __init__(self, around=None):
        super().__init__()
        self.up, self.norm = nn.Linear(models.WIDTH, models.WIDTH), nn.BatchNorm1d(models.WIDTH)
        self.around = around

    def forward(self, x):
        return self.within(x) if self.around is None else x + checkpoint(self.within, x, use_reentrant=self.around)

    def within(self, x):
        y = self.norm(self.up(x)).tanh()
        self.runs += 1
        return x + y


class Scaled(nn.Module):
    """Units behind a weight of another one: they run while that unit is visited."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.WIDTH))
        self.blocks = nn.ModuleList(Normalised() for _ in range(2))

    def forward(self, x):
        return through_blocks(self, x + self.scale)

    @property
    def runs(self):
        return [block.runs for block in self.blocks]


def through_blocks(net, x):
    for block in net.blocks:
        x = block(x)
    return x


def checkpoint_each(net, x, reentrant):
    return functools.reduce(lambda x, block: checkpoint(block, x, use_reentrant=reentrant), net.blocks, x)


# Where a module has a checkpoint of its own: calls of its blocks.
CHECKPOINTED = {
    "each unit": checkpoint_each,
    "units behind a weight": checkpoint_each,
    "all units": lambda net, x, reentrant: checkpoint(through_blocks, net, x, use_reentrant=reentrant),
    "twice around each unit": lambda net, x, reentrant: functools.reduce(
        lambda x, block: checkpoint(lambda x: checkpoint(block, x, use_reentrant=reentrant), x, use_reentrant=False),
        net.blocks,
        x,
    ),
    "one unit beside others": lambda net, x, reentrant: through_blocks(
        net, checkpoint(net.blocks[0], x, use_reentrant=reentrant)
    ),
}


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", [*CHECKPOINTED, "in each unit"])
@pytest.mark.few(2)
def test_a_checkpoint_of_the_users_leaves_the_traces_of_the_plain_run(place, reentrant, activations, device):
    def run(net, device):
        calls = CHECKPOINTED.get(place, lambda net, x, _: through_blocks(net, x))
        for x in inputs(device):
            loss = calls(net, net.stem(x), reentrant).square().mean()
            loss.backward()
            yield loss, [p.grad for p in net.parameters()], list(net.buffers()), [b.runs for b in net.blocks]

    block = functools.partial(Normalised, reentrant if place == "in each unit" else None)
    make = models.stack_of(Scaled if place == "units behind a weight" else block)
    check(make, run, device, activations=activations, units=["Normalised"])


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("casts", [None, torch.bfloat16])
@pytest.mark.parametrize("policy", [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE])
@pytest.mark.few(1)
def test_a_selective_checkpoint_counts_no_copies_of_weights(policy, casts, window, device):
    """In the second run other weights are on the device than in the first."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def choose(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in products else policy

    def loss(net, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        x = checkpoint(through_blocks, net, net.stem(x), use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    make = models.stack_of(models.Block, 6)
    check(make, training(under(casts, loss)), device, window=window, activations="recompute")


@pytest.mark.filterwarnings("error:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("outer", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_selective_checkpoint_that_respects_hooks_sees_those_of_the_user(outer, device):
    if "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters:
        pytest.skip("torch has had this argument since 2.15")
    options = {"respect_saved_tensors_hooks": True} if outer is not contextlib.nullcontext else {}

    def saves(context, operator, *args, **kwargs):
        save = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def loss(net, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, saves)
        with outer():
            x = checkpoint(through_blocks, net, net.stem(x), use_reentrant=False, context_fn=contexts, **options)
        return x.square().mean()

    check(models.stack_of(models.Block), training(loss), device, activations="recompute")


class Stage(nn.Module):
    """Visits the resident root around its units, for a weight of its own."""

    def __init__(self):
        super().__init__()
        self.position, self.blocks = nn.Parameter(torch.ones(models.WIDTH)), nn.ModuleList([Normalised(), Normalised()])

    def forward(self, x):
        return through_blocks(self, x + self.position)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_users_around_a_module_that_owns_a_weight_beside_units(reentrant, device):
    def run(net, device):
        for x in inputs(device):
            loss = CHECKPOINTED["each unit"](net, net.stem(x), reentrant).square().mean()
            loss.backward()
            runs = [block.runs for stage in net.blocks for block in stage.blocks]
            yield loss, [p.grad for p in net.parameters()], list(net.buffers()), runs

    check(models.stack_of(Stage, 2), run, device, activations="recompute", units=["Normalised"])


@pytest.mark.parametrize("activations", ["offload", "recompute", "recompute+offload"])
@pytest.mark.parametrize("casts", [None, torch.bfloat16])
@pytest.mark.few(2)
def test_a_gradient_that_is_differentiated_in_turn(casts, activations, device):
    check(blocks, training(under(casts, penalised)), device, activations=activations)


@contextlib.contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class ByDefault(models.Block):
    """Depends on the type and the device of new tensors, and on how attention is computed."""

    def forward(self, x):
        new = torch.empty(0)
        x = x + (x.abs() + torch.finfo(new.dtype).eps).sqrt() * (2 if new.device == x.device else 1)
        sequence = x.expand(1, 1, *x.shape)
        return super().forward(x) + nn.functional.scaled_dot_product_attention(sequence, sequence, sequence)[0, 0]


DEFAULTS = {
    "type": lambda device: default_type(torch.float64),
    "device": lambda device: device,
    "kernels": lambda device: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.few(2)
def test_what_torch_does_by_default_around_a_forward_it_does_in_the_second_run(default, device):
    def loss(module, x):
        with DEFAULTS[default](device):
            return squares(module, x)

    check(models.stack_of(ByDefault), training(loss), device, activations="recompute")
    assert torch.get_default_dtype() is torch.float32 and torch.backends.cuda.flash_sdp_enabled()


class Table(nn.Module):
    """A table of which autograd saves the rows that are read, and a layer."""

    def __init__(self, tied=None, **options):
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 8, **options), nn.Linear(8, 8)
        if tied is not None:
            self.table.weight = tied

    def forward(self, x):
        return x + self.layer(self.table(torch.arange(4, device=x.device)))


@pytest.mark.parametrize("by", ["another unit", "data of the device", "a write on the host"])
@pytest.mark.few(1)
def test_a_weight_that_is_written_elsewhere_after_the_forward_is_an_error(by, device):
    """Autograd saved nothing of it, and such a write may leave its version as it was."""
    first = Table()
    net = nn.Sequential(first, Table(first.table.weight, max_norm=0.1 if by == "another unit" else None))
    with sp_lightning.stream(net, device, window=1, units=["Table"], activations="recompute"):
        x = torch.ones(4, 8, device=device, requires_grad=True)
        if by == "data of the device":
            write = torch.no_grad()(lambda *_: [net[0].table.weight.add_(torch.ones(8, device=device))].clear())
            net[1].register_forward_pre_hook(write)
        loss = net(x).sum()
        if by == "a write on the host":
            with torch.no_grad():
                net[1].table.weight.mul_(2)  # the unit of the first one has it, where backward comes last
        with pytest.raises(ExactnessError, match="was changed after its forward"):
            loss.backward()
