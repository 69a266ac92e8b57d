"""What calls in lockstep change on modules: that of the calls one after the other, or an error (module_state.py)."""

from __future__ import annotations

import functools
import random

import numpy
import pytest
import torch
from refusals import refusal
from side_by_side import assert_plain
from torch import nn

import sp_lightning
from sp_lightning.errors import ExactnessError


class Net(nn.Module):
    """Blocks; subclasses say what a forward does before, between and after them."""

    note: object = "the class's"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.middle = nn.Identity()
        self.register_buffer("steps", torch.zeros(()))
        self.seen, self.limit, self.dice = [], 3, random.Random(1)

    def before(self, x):
        return x

    def between(self, x, index):
        return x

    def after(self, x):
        return x

    def forward(self, x):
        x = self.before(x)
        for index, block in enumerate(self.blocks):
            x = self.between(block(x).tanh(), index)
        return self.after(x)


class Scratch(Net):
    """Keeps what a later part of the same forward reads, as RAFT does."""

    def before(self, x):
        self.kept, self.limit = [x], float(x.sum())
        return x

    def between(self, x, index):
        self.kept.append(x)
        return x

    def after(self, x):
        return sum(self.kept) + self.limit


class ScratchOfBuffers(Net):
    def before(self, x):
        self.steps = x.sum()
        return x

    def after(self, x):
        return x + self.steps


class WritesThroughData(Net):
    def __init__(self):
        super().__init__()
        self.on_host = torch.zeros(())

    def before(self, x):
        self.on_host.data.mul_(0.5).add_(x.sum().cpu())
        return x

    def after(self, x):
        return x + self.on_host.to(x.device)


class Slots:
    __slots__ = ("kept",)


class InSlots(Net):
    def __init__(self):
        super().__init__()
        self.scratch = Slots()
        self.scratch.kept = 0.0

    def before(self, x):
        self.scratch.kept = x.sum()
        return x

    def after(self, x):
        return x + self.scratch.kept


class InBytes(Net):
    def __init__(self):
        super().__init__()
        self.mode = bytearray(1)

    def before(self, x):
        self.mode[0] = int(x.abs().sum().item()) % 7
        return x

    def after(self, x):
        return x * (1 + self.mode[0])


class Deleted(Net):
    def before(self, x):
        self.kept = x
        return x

    def after(self, x):
        kept = self.kept
        del self.kept
        return x + kept


class ClassDefault(Net):
    def before(self, x):
        self.note = x
        return x

    def after(self, x):
        found, self.note = self.note, None
        del self.note
        assert self.note == "the class's" == type(self).note
        return x + found


class LazyCache(Net):
    """Makes a table at its first forward, which all later ones find."""

    def before(self, x):
        if not hasattr(self, "table"):
            self.table = torch.arange(4.0, device=x.device)
        return x + self.table


class Hooked(Net):
    """Has a hook for the time of a forward, which only this forward may find."""

    def before(self, x):
        kept = x.sum()
        self.hook = self.blocks[1].register_forward_hook(lambda module, args, output: output + kept)
        return x

    def after(self, x):
        self.hook.remove()
        return x


class Switched(Net):
    """Leaves training mode for the time of a forward."""

    def before(self, x):
        self.middle.train(not x.sum() > 10)
        return x

    def after(self, x):
        x = x + self.middle.training
        self.middle.train()
        return x


class Swapped(Net):
    """Has another submodule for the time of a forward."""

    def before(self, x):
        if x.sum() > 10:
            self.middle, self.spare = nn.Tanh(), self.middle
        return x

    def after(self, x):
        x = self.middle(x)
        if x.abs().sum() and hasattr(self, "spare"):
            self.middle = self.spare
            del self.spare
        return x


class AsksWhether(Net):
    """Sees that there is a tensor of the forward before, and does not use it, as Qwen2-VL does with `rope_deltas`."""

    delta = None

    def before(self, x):
        if self.delta is None or len(x) > 0:
            self.delta = x.sum()
        return x

    def after(self, x):
        return x + self.delta


class AsksAndUses(AsksWhether):
    def before(self, x):
        before = self.delta
        if before is not None:
            x = x + before.size(0) if before.dim() else x * before
        self.delta = x.sum()
        return x


class PassesOn(AsksWhether):
    """Stores under another name what it has seen, and uses it in the next forward."""

    def before(self, x):
        self.older = self.delta
        return super().before(x)

    def after(self, x):
        return x if self.older is None else x + self.older


class Counter(Net):
    def before(self, x):
        self.limit += 1
        return x + self.limit

    def after(self, x):
        self.limit += 1
        return x


class CountsLate(Net):
    """Reads before its first visit what it sets after the last."""

    def before(self, x):
        return x + self.limit

    def after(self, x):
        self.limit = self.limit + 1
        return x


class Previous(Net):
    """Remembers the output of the forward before, and does not read it after setting it."""

    def before(self, x):
        return x + getattr(self, "previous", 0)

    def after(self, x):
        self.previous = x
        return x


class BufferInPlace(Net):
    def before(self, x):
        return x + self.steps

    def after(self, x):
        self.steps += 1
        return x


class RunningStatistics(Net):
    def __init__(self):
        super().__init__()
        self.middle = nn.BatchNorm1d(4)

    def before(self, x):
        return self.middle(x)


class ListInPlace(Net):
    """A list made once, a stack within the forward: calls would take each other's."""

    def before(self, x):
        self.seen.append(x)
        return x

    def after(self, x):
        return x + self.seen.pop()


class Growing(Net):
    def after(self, x):
        self.seen.append(0)
        return x + len(self.seen)


class Dice(Net):
    def between(self, x, index):
        return x + self.dice.random()


class ByName(Net):
    """Sets an attribute of which no code of the class has the name."""

    def before(self, x):
        return x + vars(self).get("_".join(("the", "name")), 0)

    def after(self, x):
        setattr(self, "_".join(("the", "name")), float(x.sum()))
        return x


class OnAnother(Net):
    """Sets an attribute of which no code of the module that has it has the name."""

    def before(self, x):
        self.middle.kept = x
        return x

    def after(self, x):
        return x + self.middle.kept


class OnAnotherUnit(Net):
    """Has an attribute on a unit while its code is in another one."""

    def between(self, x, index):
        if index == 0:
            self.blocks[2].factor = float(x.sum())
        elif index == 1:
            x = x * getattr(self.blocks[2], "factor", 1.0)
            del self.blocks[2].factor
        return x


class WritesWeights(Net):
    def before(self, x):
        return x * self.blocks[0].bias.sum()

    def after(self, x):
        with torch.no_grad():
            self.blocks[0].bias.add_(1)
        return x


class HookOfClosure(Net):
    """Reads after its visits what a hook of a block put into a dictionary of its closure, as one extracts features."""

    def __init__(self):
        super().__init__()
        self.take = self.found_by(self.blocks[1], {})

    def found_by(self, block, found):
        block.register_forward_hook(lambda module, args, output: found.update(x=output.sum()))
        return lambda: found["x"]

    def after(self, x):
        return x + self.take()


class HookThatRebinds(HookOfClosure):
    def found_by(self, block, found):
        last = None

        def hook(module, args):
            nonlocal last
            last = args[0].sum()

        block.register_forward_pre_hook(hook)
        return lambda: last


class HookWithArguments(HookOfClosure):
    def found_by(self, block, found):
        def hook(found, module, args, output):
            found["x"] = output.sum()

        block.register_forward_hook(functools.partial(hook, found))
        return lambda: found["x"]


class HookOfAnObject(HookOfClosure):
    def found_by(self, block, found):
        class Extractor:
            def take(self, module, args, output):
                self.last = output.sum()

        extractor = Extractor()
        block.register_forward_hook(extractor.take)
        return lambda: extractor.last


taken, last_taken = [], None


class HookOfGlobals(HookOfClosure):
    def found_by(self, block, found):
        block.register_forward_hook(lambda module, args, output: taken.append(float(output.sum())))
        return taken.pop


class HookThatRebindsAGlobal(HookOfClosure):
    def found_by(self, block, found):
        def hook(module, args, output):
            global last_taken
            last_taken = float(output.sum())

        block.register_forward_hook(hook)
        return lambda: last_taken


class Extractor:
    last = 0.0


extractor, sums = Extractor(), numpy.zeros(1)


class HookOfAGlobalObject(HookOfClosure):
    def found_by(self, block, found):
        block.register_forward_hook(lambda module, args, output: setattr(extractor, "last", float(output.sum())))
        return lambda: extractor.last


class HookOfAGlobalArray(HookOfClosure):
    def found_by(self, block, found):
        block.register_forward_hook(lambda module, args, output: sums.fill(float(output.sum())))
        return lambda: float(sums[0])


class HookThatCounts(HookOfClosure):
    """Adds to an array of numbers, which has no version."""

    def found_by(self, block, found):
        counts = numpy.zeros(1)

        def hook(module, args, output):
            counts[0] += 1

        block.register_forward_hook(hook)
        return lambda: float(counts[0])


NETS = [
    Scratch, ScratchOfBuffers, Deleted, ClassDefault, LazyCache, Hooked, Switched, Swapped, AsksWhether, Counter,
    CountsLate, Previous, BufferInPlace, RunningStatistics, ListInPlace, Growing, Dice, ByName, OnAnother,
    OnAnotherUnit, WritesWeights, AsksAndUses, PassesOn, WritesThroughData, InSlots, InBytes,
]  # fmt: skip
HOOKED = [
    HookOfClosure, HookThatRebinds, HookWithArguments, HookOfAnObject, HookOfGlobals, HookThatRebindsAGlobal,
    HookThatCounts, HookOfAGlobalObject, HookOfAGlobalArray,
]  # fmt: skip


def late(kind):
    """A network that changes its modules only in some forwards."""

    class Late(kind):
        def forward(self, x):
            if x.sum() > 20:
                return super().forward(x)
            for block in self.blocks:
                x = block(x).tanh()
            return x

    return Late


def inputs(device, count=5):
    return [torch.full((2, 4), 1.0 + number, device=device) for number in range(count)]


def times(net, x, count):
    """A call of several forwards."""
    return lambda: [net(x * (number + 1)) for number in range(count)][-1]


def calls_of(net, device):
    return [times(net, x, count) for x, count in zip(inputs(device), (1, 3, 1, 2, 1), strict=True)]


def state_of(net):
    """All attributes that are no tensors, modules or objects, and the buffers."""
    plain = {
        (name, key): value
        for name, module in net.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, list, type(None)))
    }
    return repr(plain), {name: value.cpu().clone() for name, value in net.named_buffers()}


def one_after_the_other(make, device):
    """The results and the state of the calls in their order, streamed."""
    net = make()
    with sp_lightning.stream(net, device, window=1), torch.no_grad():
        return [call() for call in calls_of(net, device)], state_of(net)


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def same_state(found, expected):
    return found[0] == expected[0] and same(found[1].values(), expected[1].values())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("make", [*NETS, *HOOKED])
@pytest.mark.few(3)
def test_calls_that_change_modules_have_the_results_of_one_after_the_other(make, at_once, inference, device):
    expected, after = one_after_the_other(make, device)
    net = make()
    mode = torch.inference_mode() if inference else torch.no_grad()
    with sp_lightning.stream(net, device, window=1) as handle, mode:
        assert same(handle.lockstep(calls_of(net, device), at_once), expected)
        assert same_state(state_of(net), after)
    assert_plain(net)


@refusal(
    "a call in lockstep that changes what modules keep (an attribute, a buffer, a weight) while others are under way, "
    "where the first call had not done so when it came to a unit again",
    ExactnessError,
    "`at_once=1`",
)
@pytest.mark.parametrize("make", NETS)
@pytest.mark.few(2)
def test_a_change_while_others_are_under_way_is_an_error(make, device):
    for at_once in (2, 5):
        net = late(make)()
        with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
            with pytest.raises(ExactnessError, match="was changed by a call in lockstep"):
                handle.lockstep(calls_of(net, device), at_once, return_exceptions=True)
            net(inputs(device)[0])
        assert_plain(net)


@pytest.mark.parametrize("make", [*NETS, *HOOKED])
@pytest.mark.few(1)
def test_calls_of_every_length_have_the_results_of_their_order_or_an_error(make, device):
    numbers = random.Random(5)
    for kind in (make, late(make)) * 3:
        lengths = [numbers.randrange(1, 4) for _ in range(6)]
        results = []
        for at_once in (1, numbers.randrange(2, 5)):
            net = kind()
            calls = [times(net, x, count) for x, count in zip(inputs(device, 6), lengths, strict=True)]
            with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
                try:
                    results.append([*handle.lockstep(calls[:3], at_once), *handle.lockstep(calls[3:], at_once)])
                except ExactnessError:
                    assert at_once > 1 and kind is not make
                    results.append(results[0])
        assert same(results[1], results[0])


def with_other_weights(net, x):
    others = {name: torch.full_like(weight, 0.1) for name, weight in net.named_parameters() if "blocks.2" in name}
    return torch.func.functional_call(net, {name: value.to(x.device) for name, value in others.items()}, (x,))


def with_hook_of_all_modules(net, x):
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        return net(x)
    finally:
        handle.remove()


@pytest.mark.parametrize("how", [with_other_weights, with_hook_of_all_modules])
def test_what_one_call_puts_in_the_modules_for_a_forward_is_not_there_for_the_others(how, device):
    net, xs = Net(), inputs(device)

    def calls(which):
        return [functools.partial(how, net, x) if number in which else times(net, x, 2) for number, x in enumerate(xs)]

    for which in ((0,), (1,), range(5)):
        with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
            expected = [call() for call in calls(which)]
            if which == (1,):
                with pytest.raises(
                    ExactnessError, match=r"(blocks\.2\.weight|hooks of all modules.*) was changed by a call"
                ):
                    handle.lockstep(calls(which), at_once=3)
            else:
                assert same(handle.lockstep(calls(which), at_once=3), expected)
        assert_plain(net)


def test_others_begin_when_the_first_call_comes_to_a_unit_again_and_has_changed_nothing(device):
    net, x, begun = Net(), inputs(device)[0], []

    def call(number):
        for _ in range(3):
            begun.append(number)
            net(x)

    def order(calls):
        begun.clear()
        handle.lockstep([functools.partial(call, number) for number in calls], at_once=3)
        return begun

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        assert order(range(3)) == [0, 0, 1, 2, 0, 1, 2, 1, 2]
        assert order(range(2)) == [0, 1] * 3  # that is known by now


def test_a_call_that_has_begun_to_change_modules_runs_alone_though_others_could_begin(device, caplog):
    expected, after = one_after_the_other(Counter, device)
    net = late(Counter)()
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad(), caplog.at_level("INFO"):
        handle.lockstep([lambda: net(inputs(device)[0])] * 2, at_once=2)
        net.forward = functools.partial(Counter.forward, net)
        assert same(handle.lockstep(calls_of(net, device), at_once=3), expected)
        del net.forward
        assert same_state(state_of(net), after)
    assert caplog.text.count("a call changed Late.limit: calls that change modules run one after the other") == 1


def test_a_call_that_raises_leaves_what_it_set_as_it_does_alone(device):
    def failing(net, x):
        net.before(x)
        net.blocks[0](x)
        raise ValueError

    def run(at_once):
        net = Scratch()
        first, last, _, _, third = inputs(device)
        calls = [functools.partial(net, first), functools.partial(failing, net, third), functools.partial(net, last)]
        with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
            results = handle.lockstep(calls[: at_once or 1], 3, True)
            results += handle.lockstep(calls[at_once or 1 :], 3, True)
            return net, results

    net, alone = run(1)
    together_net, together = run(3)
    assert type(together[1]) is type(alone[1]) is ValueError
    assert same(together[::2], alone[::2]) and same_state(state_of(together_net), state_of(net))


def test_calls_whose_followers_never_come_leave_what_they_changed(device):
    def run(calls):
        net = Counter()

        def to_come():
            yield from calls_of(net, device)[:3]
            raise ValueError

        with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
            with pytest.raises(ValueError):
                handle.lockstep(to_come(), at_once=calls)
            return state_of(net)

    assert same_state(run(3), run(1))


def test_calls_find_what_the_caller_sets_between_them(device):
    net, x = Net(), inputs(device)[0]

    def call():
        net(x)
        return net.note

    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        found = []
        for one in handle.calls_ended([call] * 5, at_once=1):
            found.append(one.result)
            net.note = one.number
    assert found == ["the class's", 0, 1, 2, 3]


def test_what_the_caller_changes_in_place_between_calls_is_none_of_theirs(device):
    net = Net()
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad():
        expected = [call() for call in calls_of(net, device)]
        for one in handle.calls_ended(calls_of(net, device), at_once=3):
            assert torch.equal(one.result, expected[one.number])
            net.seen.append(one.number), net.steps.add_(1), net.dice.random()


def test_modules_set_attributes_by_torch_s_own_code_afterwards(device):
    plain = nn.Module.__setattr__, nn.Module.__delattr__
    net, other = Scratch(), Scratch()
    x = inputs(device)[0]
    with sp_lightning.stream(net, device) as handle, sp_lightning.stream(other, device) as second, torch.no_grad():
        expected = net(x)
        for one in handle.calls_ended([lambda: net(x)] * 2, at_once=2):
            assert torch.equal(one.result, expected)
            assert same(second.lockstep([lambda: other(x)] * 2), [expected] * 2)
            assert nn.Module.__setattr__ is not plain[0]
    assert (nn.Module.__setattr__, nn.Module.__delattr__) == plain
