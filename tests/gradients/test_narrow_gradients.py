"""Gradients that stay in the type in which they came down (slab.py, Rule 3): whoever looks, and whenever, finds what a
plain run has, and a step has its bits."""

import contextlib
import copy
import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

import parity
import sp_lightning
from sp_lightning.memory.watched_parameters import NarrowGradient, true_grad
from sp_lightning.optim import host_gradients, native, pieces
from sp_lightning.optim.pending_step import HostThread

OPTIMIZERS = {
    "AdamW": (AdamW, {"weight_decay": 0.1}),
    "Adam": (Adam, {"amsgrad": True}),
    "SGD": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (RMSprop, {"centered": True}),
    "Adagrad": (Adagrad, {}),
    "Adadelta": (Adadelta, {}),
    "Adamax": (Adamax, {}),
    "NAdam": (NAdam, {}),
    "RAdam": (RAdam, {}),
    "Rprop": (Rprop, {}),
    "ASGD": (ASGD, {}),
    "Adafactor": (Adafactor, {}),
    "foreach": (AdamW, {"foreach": True}),
    "fused": (AdamW, {"fused": True}),
}
OWN_WAY = ("Adafactor", "foreach", "fused")  # which read each gradient as a whole
STEPS = 4


class Net(nn.Module):
    """Blocks whose weights travel in bfloat16, with a norm and a bias that do not, and a weight that is used twice."""

    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(3))
        self.head = nn.Linear(width, 8, bias=False)
        turned = self.blocks[0][1]
        turned.weight = nn.Parameter(turned.weight.detach().t().contiguous().t())  # with strides of its own

    def forward(self, x):
        x = self.embed(x) + nn.functional.linear(x, self.head.weight.t())
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def made(**sizes):
    torch.manual_seed(0)
    return Net(**sizes)


def grads_of(net):
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def narrow_in(net):
    """Count the gradients that nobody asked for: by a look that does not ask."""
    return sum(type(true_grad(p)) is NarrowGradient for p in net.parameters())


class Loop:
    """A loop in which code of the user's runs at each moment; it keeps what that code returns."""

    def __init__(self, optimizer, looks, device="cpu", **options):
        self.net = made()
        kind, arguments = optimizer
        self.optimizer = kind(self.net.parameters(), lr=1e-2, **arguments)
        self.looks, self.seen, self.narrow = looks, [], []
        self.device, self.options = device, options
        self.deferred = 0

    def look(self, moment, step):
        for at, code in self.looks:
            if at == (moment, step):
                self.seen.append(code(self.net, self.optimizer))

    def run(self, streamed):
        context = sp_lightning.stream(self.net, self.device, window=1, **self.options) if streamed else None
        with context or contextlib.nullcontext() as handle:
            for step in range(STEPS):
                self.look("begin", step)
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = self.net(x).square().mean()
                loss.backward()
                self.narrow.append(narrow_in(self.net))
                self.look("backward", step)
                self.optimizer.step()
                self.narrow.append(narrow_in(self.net))
                self.look("step", step)
                self.optimizer.zero_grad()
                self.look("zeroed", step)
            self.look("end", 0)
            self.deferred = handle.stats()["held_steps"] if streamed else 0
        self.look("closed", 0)
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.net.parameters(), *state, *self.seen]


def flat(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def check(optimizer, looks=(), **options):
    """Compare a plain loop with a streamed one; return the streamed one."""
    plain, ours = Loop(optimizer, looks), Loop(optimizer, looks, **options)
    expected, found = list(flat(plain.run(False))), list(flat(ours.run(True)))
    assert len(expected) == len(found)
    for number, (theirs, own) in enumerate(zip(expected, found, strict=True)):
        assert type(own) is type(theirs) or isinstance(theirs, nn.Parameter), number
        assert own == theirs if not isinstance(theirs, torch.Tensor) else parity.difference(theirs, own) is None, number
    return ours


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_has_the_bits_of_a_plain_run(name, overlap):
    ours = check(OPTIMIZERS[name], optimizer_overlap=overlap)
    assert ours.narrow[0] > 0
    assert (ours.narrow[1] == 0) == (name in OWN_WAY)
    assert (ours.narrow[-1] == 0) == (name in OWN_WAY)


@pytest.mark.parametrize("optimizer", [(SGD, {"foreach": True}), OPTIMIZERS["foreach"], OPTIMIZERS["fused"]])
def test_gradients_that_are_taken_away_after_a_step_that_needs_them_wide_stay_away(optimizer, monkeypatch):
    widens, taken_away, made_wide = threading.Event(), threading.Event(), NarrowGradient.made

    def made_late(gradient, place=None):
        if HostThread.is_current():  # beside whatever follows the step
            widens.set()
            assert taken_away.wait(60)
        return made_wide(gradient, place)

    def load_state(net, ours):  # as of a checkpoint: the first step makes none, and may be deferred
        kind, arguments = optimizer
        other = copy.deepcopy(net)
        stepped = kind(other.parameters(), lr=1e-2, **arguments)
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        stepped.step()
        ours.load_state_dict(copy.deepcopy(stepped.state_dict()))

    monkeypatch.setattr(NarrowGradient, "made", made_late)
    looks = [
        (("begin", 0), load_state),
        (("step", 0), lambda *_: widens.wait(0.3) and None),
        (("zeroed", 0), lambda *_: taken_away.set()),
        *[(("begin", step), LOOKS["is None"]) for step in range(1, STEPS)],
    ]
    assert check(optimizer, looks).deferred == STEPS


LOOKS = {
    "reads all": lambda net, _: grads_of(net),
    "reads one": lambda net, _: net.blocks[1][1].weight.grad.clone(),
    "norm": lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1e9),
    "clips": lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
    "clips values": lambda net, _: nn.utils.clip_grad_value_(net.parameters(), 1e-5),
    "writes one": lambda net, _: net.head.weight.grad.mul_(3).clone(),
    "writes by data": lambda net, _: net.head.weight.grad.data.add_(1).clone(),
    "replaces one": lambda net, _: setattr(net.head.weight, "grad", torch.full_like(net.head.weight, 0.5)),
    "takes one away": lambda net, _: setattr(net.head.weight, "grad", None),
    "zeroes": lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
    "zeroes the net": lambda net, _: net.zero_grad(set_to_none=False),
    "takes away": lambda net, _: net.zero_grad(),
    "copies the net": lambda net, _: list(copy.deepcopy(net).parameters()),
    "a penalty on the host": lambda net, _: [(net.head.weight.square().sum() * 0.1).backward(), grads_of(net)],
    "more": lambda net, _: net(torch.ones(4, 8)).sum().backward(),
    "a gradient by itself": lambda net, _: torch.autograd.grad(net(torch.ones(4, 8)).sum(), [net.head.weight]),
    "freezes": lambda net, _: net.embed.requires_grad_(False) and None,
    "is None": lambda net, _: [p.grad is None for p in net.parameters()],
    "flags": lambda net, _: [(p.grad.dtype, p.grad.shape, p.grad.stride(), p.grad.is_leaf) for p in net.parameters()],
    "a hook": lambda net, _: net.head.weight.register_hook(lambda grad: grad * 2) and None,
    "state": lambda net, optimizer: [copy.deepcopy(one) for one in optimizer.state_dict()["state"].values()] and None,
}
NO_GRADIENTS = {"reads one", "norm", "clips", "clips values", "writes one", "writes by data", "flags"}


@pytest.mark.parametrize("moment", ["backward", "step", "zeroed", "begin"])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("step", [0, 2])
def test_code_that_looks_between_finds_what_a_plain_run_has(look, moment, step):
    if moment in ("zeroed", "begin") and look in NO_GRADIENTS:
        pytest.skip("there are no gradients")
    check(OPTIMIZERS["AdamW"], [((moment, step), LOOKS[look])])


@pytest.mark.parametrize("first", ["reads one", "zeroes", "more", "a penalty on the host"])
@pytest.mark.parametrize("then", LOOKS)
def test_code_that_looks_twice_finds_what_a_plain_run_has(first, then):
    check(OPTIMIZERS["AdamW"], [(("backward", 1), LOOKS[first]), (("backward", 1), LOOKS[then])])


def clip(net, norm=0.01, **options):
    return torch.nn.utils.clip_grad_norm_(net.parameters(), norm, **options)


CLIPS = {
    "once": lambda net, _: clip(net),
    "lists": lambda net, _: clip(net, foreach=True),
    "singly": lambda net, _: clip(net, foreach=False),
    "not at all": lambda net, _: clip(net, norm=1e9),
    "to nothing": lambda net, _: clip(net, norm=0.0),
}
WIDE = {
    "twice": lambda net, _: (clip(net), clip(net, norm=0.005)),
    "one of them twice": lambda net, _: torch.nn.utils.clip_grad_norm_(
        [net.embed.weight, net.head.weight, net.embed.weight], 0.01
    ),
    "by another norm": lambda net, _: clip(net, norm_type=float("inf")),
    "and reads": lambda net, _: (clip(net), grads_of(net)),
    "reads and": lambda net, _: (grads_of(net), clip(net), grads_of(net)),
    "and adds": lambda net, _: (clip(net), net.head.weight.grad.add_(1)),
    "in two functions": lambda net, _: torch.nn.utils.clip_grads_with_norm_(
        net.parameters(), 0.01, torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    ),
    "what is infinite": lambda net, _: (net.head.weight.grad.fill_(float("inf")), clip(net)),
}


@pytest.fixture
def large(monkeypatch):
    """Have the compiled code take gradients of any size, and have it compared."""
    monkeypatch.setattr(native, "FEWEST", 1)
    weights = [nn.Parameter(torch.randn(600, 600)) for _ in range(2)]
    optimizer = AdamW(weights, lr=1e-2, weight_decay=0.1)
    native.LIBRARY.steps(optimizer, optimizer.param_groups[0])
    native.LIBRARY.wait()
    assert native.LIBRARY.steps(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", [*CLIPS, *WIDE])
def test_clipped_steps_have_the_bits_of_a_plain_run(way, overlap, compiled, request):
    if compiled:
        request.getfixturevalue("large")
    looks = [(("backward", step), {**CLIPS, **WIDE}[way]) for step in range(STEPS)]
    for name in ("AdamW", "SGD", "Rprop"):
        ours = check(OPTIMIZERS[name], looks, optimizer_overlap=overlap)
        if way in CLIPS and way != "to nothing":
            assert ours.narrow[1] > 0 and ours.narrow[-1] > 0


@pytest.mark.parametrize("moment", ["backward", "step"])
@pytest.mark.parametrize("look", LOOKS)
def test_code_that_looks_at_clipped_gradients_finds_what_a_plain_run_has(look, moment):
    looks = [(("backward", step), CLIPS["once"]) for step in range(STEPS)]
    check(OPTIMIZERS["momentum"], [*looks, ((moment, 2), LOOKS[look])])


def test_gradients_are_clipped_whatever_device_is_the_default(large):
    def clipped(net, _):
        with torch.device("meta"):
            return clip(net)

    looks = [(("backward", step), clipped) for step in range(STEPS)]
    assert check(OPTIMIZERS["AdamW"], looks).narrow[-1] > 0


@pytest.fixture
def widening(monkeypatch):
    """Note the threads that compute norms without compiled code."""
    monkeypatch.setattr(native, "LIBRARY", library := native.Library())
    library.failure = "there is no compiler"
    used, norm = [], torch.linalg.vector_norm

    def noting(*args, **kwargs):
        used.append(threading.current_thread().name)
        return norm(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", noting)
    return used


@pytest.mark.parametrize("fewest, threads", [(1, 1), (1, 3), (1 << 20, 3)])
def test_gradients_stay_narrow_where_there_is_no_compiled_code_for_their_norm(monkeypatch, widening, fewest, threads):
    monkeypatch.setattr(host_gradients, "FEWEST", fewest)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        looks = [(("backward", step), CLIPS["once"]) for step in range(STEPS)]
        assert check(OPTIMIZERS["AdamW"], looks).narrow[-1] > 0
    finally:
        torch.set_num_threads(before)
    assert any(name.startswith("superpipeline-norms") for name in widening) == (threads > 1 and fewest == 1)


def test_a_norm_that_is_not_finite_is_torchs_error():
    def spoiled(net, _):
        net.head.weight.grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip(net, error_if_nonfinite=True)

    check(OPTIMIZERS["AdamW"], [(("backward", 1), spoiled)])


@pytest.mark.parametrize("moment", ["backward", "step"])
def test_gradients_that_code_keeps_stay_as_they_are(moment):
    kept = []

    def keep(net, _):
        grads = [p.grad for p in net.parameters()]
        kept.append((grads, [grad.clone() for grad in grads]))
        return [grad is p.grad for grad, p in zip(grads, net.parameters(), strict=True)]

    check(OPTIMIZERS["AdamW"], [((moment, step), keep) for step in range(STEPS)])
    for grads, then in kept:
        assert all(map(torch.equal, grads, then))
        assert all(type(grad) is torch.Tensor for grad in grads)


def test_a_gradient_that_is_taken_away_while_another_thread_reads_it_stays_away(monkeypatch):
    widens, taken_away, made_wide, net, read = threading.Event(), threading.Event(), NarrowGradient.made, made(), []

    def made_late(gradient, place=None):
        widens.set()
        assert taken_away.wait(60)
        return made_wide(gradient, place)

    monkeypatch.setattr(NarrowGradient, "made", made_late)
    with sp_lightning.stream(net, "cpu", window=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.ones(4, 8)).sum()
        loss.backward()
        other = threading.Thread(target=lambda: read.append(net.blocks[1][1].weight.grad))
        other.start()
        assert widens.wait(60)
        net.zero_grad()
        taken_away.set()
        other.join()
        assert all(p.grad is None for p in net.parameters())
    plain = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = plain(torch.ones(4, 8)).sum()
    loss.backward()
    assert torch.equal(read[0], plain.blocks[1][1].weight.grad)


def test_gradients_are_as_in_a_plain_run_once_streaming_ended():
    net = made()
    with sp_lightning.stream(net, "cpu", window=1), torch.autocast("cpu", dtype=torch.bfloat16):
        net(torch.ones(4, 8)).sum().backward()
        assert narrow_in(net)
    assert not narrow_in(net)
    assert all(type(p.grad) is torch.Tensor and p.grad.dtype is torch.float32 for p in net.parameters())
    plain = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain(torch.ones(4, 8)).sum().backward()
    assert all(map(torch.equal, grads_of(net), grads_of(plain)))


def test_a_gradient_that_is_only_taken_away_is_never_made():
    net, optimizer = made(), None
    optimizer = AdamW(net.parameters())
    with sp_lightning.stream(net, "cpu", window=1), torch.autocast("cpu", dtype=torch.bfloat16):
        for zero in (net.zero_grad, optimizer.zero_grad):
            net(torch.ones(4, 8)).sum().backward()
            found = [grad for p in net.parameters() if type(grad := true_grad(p)) is NarrowGradient]
            zero()
            assert found and all(grad.wide is None for grad in found)
            assert all(p.grad is None for p in net.parameters())


def test_memory_is_half_until_code_asks_and_as_ever_afterwards():
    nets = {asks: Net(width=256) for asks in (False, True)}
    found = {}
    for asks, net in nets.items():
        with sp_lightning.stream(net, "cpu", window=1) as handle, torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                net.zero_grad()
                net(torch.ones(4, 8)).sum().backward()
                if asks:
                    _ = [p.grad for p in net.parameters()]
            found[asks] = handle.engine.gradient_return.host_nbytes
            if asks:  # the memory in which they came down is free again
                (slabs,) = [handle.engine.gradient_return._slabs.values()]
                assert all(type(slab).__name__ == "GradientSlab" for slab in slabs)
    weights = sum(p.nbytes for p in nets[True].parameters() if p.dim() == 2 and p.numel() > 1 << 15)
    assert found[True] - found[False] == pytest.approx(weights // 2, rel=0.1)


def test_the_memory_in_which_gradients_came_down_is_free_once_they_are_wide():
    net = made()
    with sp_lightning.stream(net, "cpu", window=1), torch.autocast("cpu", dtype=torch.bfloat16):
        net(torch.ones(4, 8)).sum().backward()
        found = [grad for p in net.parameters() if type(grad := true_grad(p)) is NarrowGradient]
        came_down = [weakref.ref(grad.came_down) for grad in found]
        del found
        _ = [p.grad for p in net.parameters()]
        gc.collect()
        assert came_down and not any(ref() is not None for ref in came_down)


def test_where_the_order_of_parameters_decides_all_are_widened_first():
    found = []
    for streamed in (False, True):
        net = made()
        net.tied = nn.Linear(8, 24, bias=False)
        net.tied.weight = nn.Parameter(net.head.weight.detach().t())  # of the same memory, stepped after it
        optimizer = AdamW(net.parameters(), lr=1e-2)
        with sp_lightning.stream(net, "cpu", window=1) if streamed else contextlib.nullcontext():
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    (net(torch.ones(4, 8)).sum() + net.tied(torch.ones(4, 8)).square().sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach() for p in net.parameters()])
    assert all(map(torch.equal, *found))


def test_parameters_that_share_a_count_of_steps_are_stepped_in_their_order():
    found = []
    for streamed in (False, True):
        net = made()
        optimizer = AdamW(net.parameters(), lr=1e-2)
        with sp_lightning.stream(net, "cpu", window=1) if streamed else contextlib.nullcontext():
            for step in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    net(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    first, *others = optimizer.state.values()
                    for entry in others:
                        entry["step"] = first["step"]
        found.append([p.detach() for p in net.parameters()])
    assert all(map(torch.equal, *found))


class Looks(nn.Module):
    """Reads gradients of the layers behind it within backward, in one of the steps."""

    def __init__(self, net, step):
        super().__init__()
        self.steps, self.step, self.seen, self.net = 0, step, [], [net]

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.look)
        return x

    def look(self, _):
        self.steps += 1
        if self.steps == self.step:
            self.seen.append(self.net[0][-1].weight.grad.clone())


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("overlaps", [True, False])
def test_a_hook_in_backward_reads_what_a_plain_run_has(step, overlaps):
    found = []
    for streamed in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        looks = Looks(net, step)
        net.insert(1, looks)
        optimizer = AdamW(net.parameters())
        context = sp_lightning.stream(net, "cpu", window=1) if streamed else contextlib.nullcontext()
        with context as handle:
            for _ in range(5):
                steps = handle.steps.overlapping(optimizer) if streamed and overlaps else contextlib.nullcontext()
                with steps:
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = net(torch.ones(4, 8)).square().sum()
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
        found.append([*looks.seen, *[p.detach() for p in net.parameters()]])
    assert len(found[0]) == len(found[1]) == 9
    assert all(map(torch.equal, *found))


def test_a_backward_that_failed_leaves_the_next_one_exact():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    found = []
    for streamed in (False, True):
        net = made()
        optimizer = AdamW(net.parameters())
        with sp_lightning.stream(net, "cpu", window=1) if streamed else contextlib.nullcontext():
            for step in range(4):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    x = net.embed(torch.ones(4, 8)) if step == 1 else None
                    loss = net(torch.ones(4, 8) * (1 + step)).sum() + (0 if x is None else Failing.apply(x).sum())
                if step == 1:
                    with pytest.raises(ZeroDivisionError):
                        loss.backward()
                else:
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach() for p in net.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_bfloat16_stays_as_it_came_down(dtype):
    """torch makes several NaNs of one in FP16, by where it lies."""
    net = made()
    with sp_lightning.stream(net, "cpu", window=1), torch.autocast("cpu", dtype=dtype):
        net(torch.ones(4, 8)).sum().backward()
        assert (narrow_in(net) > 0) == (dtype is torch.bfloat16)


def test_all_gradients_of_master_weights_stay_as_they_came_down():
    net = made()
    with sp_lightning.stream(net, "cpu", window=1, master_weights=True):
        net(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
        assert narrow_in(net) == len(list(net.parameters()))
        assert {p.grad.dtype for p in net.parameters()} == {torch.float32}


SMALL = 1 << 12


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in OWN_WAY])
@pytest.mark.parametrize("numel", [SMALL * 4, SMALL * 7 + 3])
def test_pieces_are_widened_as_they_are_stepped(name, numel, monkeypatch):
    monkeypatch.setattr(native, "FEWEST", sys.maxsize)
    kind, arguments = OPTIMIZERS[name]
    found = []
    for narrow in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(numel, generator=generator)) for _ in range(3)]
        optimizer = kind(params, lr=1e-2, **arguments)
        steps = pieces.step_in_pieces(optimizer, piece=SMALL)
        for _ in range(3):
            for param in params:
                came_down = torch.randn(numel, generator=generator).bfloat16()
                param.grad = NarrowGradient.of(came_down, torch.float32, lambda: None) if narrow else came_down.float()
            before = [param.grad for param in params]
            optimizer.step()
            assert all(param.grad is grad for param, grad in zip(params, before, strict=True))
            if narrow:
                assert all(grad.wide is None for grad in before)
        steps.close()
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        found.append([*params, *(value for value in state if isinstance(value, torch.Tensor))])
    assert all(map(torch.equal, *found))
