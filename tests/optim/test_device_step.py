"""Optimizers that step on the device have the bits of a plain run there, whose arithmetic is not the host's."""

import contextlib
import copy
import functools
import time

import pytest
import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
import parity
import sp_lightning
from sp_lightning.errors import OptionError, TornStepError, UnsupportedError
from sp_lightning.optim import device_step
from sp_lightning.runtime.handle import stream as stream_before

pytestmark = pytest.mark.simgpu


@pytest.fixture
def rounds_otherwise():
    import rounding

    return rounding.rounds_otherwise


KINDS = {  # with operators of each that round otherwise on the device
    "adamw": (AdamW, {"lr": 1e-2}, "addcdiv_"),
    "adam": (Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}, "addcdiv_"),
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "add_.Tensor"),
    "sgd without momentum": (SGD, {"lr": 0.1}, "add_.Tensor"),
    "rmsprop": (RMSprop, {"momentum": 0.9, "centered": True}, "addcdiv_"),
    "adagrad": (Adagrad, {"lr": 0.1}, "addcdiv_"),
    "adadelta": (Adadelta, {"lr": 1.0}, "addcmul_"),
    "adamax": (Adamax, {}, "addcdiv_"),
    "nadam": (NAdam, {}, "addcdiv_"),
    "radam": (RAdam, {}, "addcmul_"),
    "rprop": (Rprop, {}, "mul_.Tensor"),
    "asgd": (ASGD, {"t0": 1}, "add_.Tensor", "addcmul_"),
    "adafactor": (Adafactor, {}, "lerp_.Scalar"),
    "fused": (Adam, {"fused": True}, "_fused_adam_"),
    "muon": (Muon, {}, "lerp_.Scalar"),
}


PLACES = {  # where state lies and is stepped
    "host": {"optimizer_device": "host"},
    "device": {"optimizer_device": "device"},
}


class Net(torch.nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.stem = torch.nn.Linear(24, 40, bias=bias)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(40, 40, bias=bias) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.tensor(0.7)) if bias else 0.7

    def forward(self, x):
        x = self.scale * self.stem(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


class Mixed(Net):
    """With weights of two types."""

    def __init__(self, bias=True):
        super().__init__(bias)
        self.blocks[:2].to(torch.bfloat16)

    def forward(self, x):
        x = self.scale * self.stem(x)
        for block in self.blocks:
            x = x + block(x.to(block.weight.dtype)).tanh().float()
        return x


class Half(Net):
    """With weights of a narrow type."""

    def __init__(self, bias=True):
        super().__init__(bias)
        self.bfloat16()

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def train(
    make_optimizer, where, steps=5, bias=True, clip=None, between=lambda *_: None, after=lambda *_: None, make=Net
):
    """Train on the simulated device; return weights and state, and how many steps were deferred."""
    torch.manual_seed(0)
    net = make(bias)
    with contextlib.ExitStack() as stack:
        handle = None
        if where == "plain":
            net.to("simgpu")
        else:
            handle = stack.enter_context(stream_before(net, device="simgpu", window=2, **PLACES[where]))
        optimizer = make_optimizer(net.parameters())
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 24, generator=generator).to("simgpu")
            net(x).square().mean().backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            after(net, optimizer)
            optimizer.zero_grad()
            between(net, optimizer)
        held = 0
        if handle is not None:
            handle.finish_step()
            held = handle.stats()["held_steps"]
        state = {
            f"{name} {key}": value.detach().cpu().clone()
            for name, parameter in net.named_parameters()
            for key, value in [("", parameter), *optimizer.state[parameter].items()]
            if isinstance(value, torch.Tensor)
        }
    return state, held


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@parity.product(
    *((name, None, False) for name in KINDS),
    ("adamw", True, True),
    ("sgd", False, True),
    name=list(KINDS),
    foreach=[None, False, True],
    small=[False, True],
)
def test_every_class_steps_on_the_device_and_nowhere_else(name, foreach, small, rounds_otherwise, monkeypatch):
    kind, options, *operators = KINDS[name]
    if kind is not Muon and "fused" not in options:
        options = {**options, "foreach": foreach}
    if small:  # several portions, and weights that are cut
        monkeypatch.setattr(device_step, "BUFFER", 16384)
    make, bias = functools.partial(kind, **options), kind is not Muon  # which steps matrices alone
    with rounds_otherwise(*operators):
        plain, _ = train(make, "plain", bias=bias)
        device, held = train(make, "device", bias=bias)
        host, _ = train(make, "host", bias=bias)
    assert not differing(plain, device)
    assert differing(plain, host), "no operator that rounds otherwise is one of this class's"
    if kind in (Adafactor, Muon, ASGD):  # which step as a whole, or after backward
        assert held == 0
    else:  # a step that makes state is not deferred
        assert held == (5 if kind is Adagrad or name == "sgd without momentum" else 4)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_left_as_torch_leaves_them(name, rounds_otherwise):
    kind, options, *operators = KINDS[name]
    found = {"plain": [], "device": []}

    def read(where, net, _):
        found[where] += [parameter.grad.detach().cpu().clone() for parameter in net.parameters()]

    with rounds_otherwise(*operators):
        for where in found:
            make = functools.partial(kind, **options)
            train(make, where, bias=kind is not Muon, after=functools.partial(read, where))
    assert all(map(torch.equal, found["plain"], found["device"]))


def test_gradients_that_are_stepped_in_backward_are_no_change_by_other_code(rounds_otherwise):
    class Momentum(models.ZooModule):
        def make_optimizer(self, name, parameters):
            return SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)

    make = functools.partial(Momentum, models.case("mlp"))
    strategies = [
        parity.plain_strategy("simgpu"),
        parity.streaming_strategy("simgpu", window=2, optimizer_device="device"),
    ]
    with rounds_otherwise("add_.Tensor"):
        plainly, streamed = (parity.record(make, one, accelerator="simgpu", epochs=2) for one in strategies)
    parity.compare(plainly, streamed)
    assert streamed.telemetry["stepped_ahead"] > 0


class Late(models.ZooModule):
    """Comes to one of its blocks in the second epoch first."""

    def training_step(self, batch, index):
        with pytest.MonkeyPatch.context() as patch:
            if self.current_epoch == 0:
                patch.setitem(self.net.blocks._modules, "1", torch.nn.Identity())
            return super().training_step(batch, index)

    def make_optimizer(self, name, parameters):
        return SGD(parameters, lr=0.5, momentum=0.9, dampening=0.3)


@pytest.mark.parametrize("place", ["device"])
def test_units_are_not_stepped_in_backward_beside_a_weight_that_may_get_its_momentum_after_it(place, rounds_otherwise):
    make = functools.partial(Late, models.case("mlp"))
    options = {"window": 2, **PLACES[place]}
    strategies = [parity.plain_strategy("simgpu"), parity.streaming_strategy("simgpu", **options)]
    settings = {"accelerator": "simgpu", "precision": "bf16-true", "epochs": 3}
    with rounds_otherwise("add_.Tensor"):
        plainly, streamed = (parity.record(make, one, **settings) for one in strategies)
    parity.compare(plainly, streamed)
    assert streamed.telemetry["stepped_ahead"] > 0  # once all have momentum


MOVES = {getattr(torch.ops.aten, name) for name in ("copy_", "_to_copy", "detach", "clone", "empty_like")}


class Calls(TorchDispatchMode):
    """The operators that compute on the device: each portion calls them anew."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        moves = func.is_view or func.overloadpacket in MOVES
        if not moves and any(tensor.device.type == "simgpu" for tensor in tensors):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@parity.product(
    *((name, None) for name in KINDS), ("sgd", False), ("adamw", True), name=list(KINDS), foreach=[None, False, True]
)
def test_torch_makes_the_calls_of_a_plain_step(name, foreach):
    """Whether in a loop or for lists, and which of their branches: bits depend on it on a real device."""
    kind, options, *_ = KINDS[name]
    if kind is not Muon and "fused" not in options:
        options = {**options, "foreach": foreach}

    def calls(where):
        torch.manual_seed(0)
        net, steps = Net(bias=kind is not Muon), []
        stream = functools.partial(sp_lightning.stream, window=2, optimizer_overlap=False, optimizer_device="device")
        with stream(net, device="simgpu") if where == "device" else contextlib.nullcontext():
            net.to("simgpu") if where == "plain" else None
            optimizer = kind(net.parameters(), **options)
            for _ in range(3):
                net(torch.ones(4, 24, device="simgpu")).square().mean().backward()
                with Calls() as seen:
                    optimizer.step()
                steps.append(seen.names)
        return steps

    plain = calls("plain")
    assert all(plain) and calls("device") == plain


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_gradients_are_clipped_by_the_norm_that_the_device_computes(foreach, small, rounds_otherwise, monkeypatch):
    if small:
        monkeypatch.setattr(device_step, "BUFFER", 8192)

    make = functools.partial(SGD, lr=0.1, foreach=foreach)
    with rounds_otherwise("linalg_vector_norm"):
        plain, _ = train(make, "plain", clip=1e-3)
        device, _ = train(make, "device", clip=1e-3)
        host, _ = train(make, "host", clip=1e-3)
    assert not differing(plain, device)
    assert differing(plain, host)


@pytest.mark.parametrize("foreach", [None, False])
def test_norms_of_several_types_are_summed_in_torchs_order(foreach, rounds_otherwise):
    make = functools.partial(SGD, lr=0.1, foreach=foreach)
    with rounds_otherwise("linalg_vector_norm"):
        plain, _ = train(make, "plain", clip=1e-2, make=Mixed)
        device, _ = train(make, "device", clip=1e-2, make=Mixed)
    assert not differing(plain, device)


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_takes_its_eps_from_the_type_that_torch_takes_it_from(foreach, monkeypatch):
    monkeypatch.setattr(device_step, "BUFFER", 16384)
    make = functools.partial(Adafactor, foreach=foreach)
    plain, _ = train(make, "plain", make=Mixed)
    device, _ = train(make, "device", make=Mixed)
    assert not differing(plain, device)


@pytest.mark.parametrize("other", ["streamed", "on the device"])
def test_gradients_beside_those_of_the_module_are_part_of_the_norm(other, rounds_otherwise):
    def norms(where):
        torch.manual_seed(0)
        nets = [Net(), torch.nn.Linear(40, 30)]
        streamed = nets if other == "streamed" else nets[:1]
        found = []
        with contextlib.ExitStack() as stack:
            for net in nets:
                if where == "device" and net in streamed:
                    stack.enter_context(stream_before(net, device="simgpu", window=2, optimizer_device="device"))
                else:
                    net.to("simgpu")
            both = torch.nn.Sequential(*nets)
            optimizer = SGD(both.parameters(), lr=0.1, foreach=False)
            for _ in range(2):
                both(torch.ones(4, 24, device="simgpu")).square().mean().backward()
                gradients = [parameter.grad for parameter in both.parameters()]
                found.append(torch.nn.utils.get_total_norm(gradients[:3]).item())
                found.append(torch.nn.utils.clip_grad_norm_(both.parameters(), 1e-2).item())
                optimizer.step()
                optimizer.zero_grad()
        return found

    with rounds_otherwise("linalg_vector_norm"):
        assert norms("plain") == norms("device")


SETTINGS = parity.pairwise(
    optimizer=["adamw", "sgd", "adagrad", "two"],
    precision=["32-true", "bf16-true", "bf16-mixed", "16-mixed"],
    clip=[None, ("norm", 0.05), ("value", 1e-3)],
    accumulate=[1, 2],
    overlap=[True, False],
    master=[False, True],
    memory=["auto", "pageable"],
    place=["device"],
    small=[False, True],
)


@pytest.mark.parametrize("row", SETTINGS, ids=str)
@pytest.mark.few(4)
def test_trainer_runs_are_plain_runs_whose_optimizer_steps_on_the_device(row, rounds_otherwise, monkeypatch):
    row = dict(row)
    if row["optimizer"] == "two":  # steps by hand
        row |= {"clip": None, "accumulate": 1}
    options = {
        "window": 2,
        **PLACES[row["place"]],
        "optimizer_overlap": row["overlap"],
        "host_memory": row["memory"],
        "master_weights": row["master"] and row["precision"] == "bf16-true",
    }
    if row["small"]:
        monkeypatch.setattr(device_step, "BUFFER", 8192)
    settings = {name: row[name] for name in ("optimizer", "precision", "clip", "accumulate")}
    case = models.case("mlp")
    if options["master_weights"]:  # a plain run has none
        host = parity.streaming_strategy("simgpu", **{**options, "optimizer_device": "host"})
        device = parity.streaming_strategy("simgpu", **options)
        make = functools.partial(models.ZooModule, case, optimizer=settings.pop("optimizer"))
        parity.compare(*(parity.record(make, one, accelerator="simgpu", **settings) for one in (host, device)))
        return
    with rounds_otherwise("addcdiv_", "add_.Tensor", "linalg_vector_norm"):
        telemetry = parity.check(case, options, accelerator="simgpu", epochs=2, **settings)
    waits = row["clip"] or row["precision"] == "16-mixed" or row["optimizer"] == "two"
    assert (telemetry["stepped_ahead"] > 0) is bool(row["overlap"] and not waits)


@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_a_learning_rate_on_the_device_is_read_when_it_is_written(option, rounds_otherwise):
    def make(params):
        return Adam(params, lr=torch.tensor(1e-2, device="simgpu"), **{option: True})

    def decay(net, optimizer):
        for group in optimizer.param_groups:
            group["lr"].mul_(0.5)

    with rounds_otherwise("addcdiv_"):
        plain, _ = train(make, "plain", between=decay)
        for place in ("device",):
            device, held = train(make, place, between=decay)
            assert not differing(plain, device), place
            assert held == 0


# ---- state


WHERE = ["plain", "device", "host"]


@parity.product(
    ("plain", "device"),
    ("device", "plain"),
    ("host", "device"),
    first=WHERE,
    then=WHERE,
)
def test_state_crosses_over_between_runs(first, then, rounds_otherwise):
    def leg(where, saved, steps):
        torch.manual_seed(0)
        net = Net()
        if saved is not None:
            net.load_state_dict(saved[0])
        stream = stream_before(net, device="simgpu", window=2, **PLACES[where]) if where != "plain" else None
        with stream or contextlib.nullcontext():
            net.to("simgpu") if stream is None else None
            optimizer = AdamW(net.parameters(), lr=1e-2)
            if saved is not None:
                optimizer.load_state_dict(saved[1])
            for step in steps:
                x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step)).to("simgpu")
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return copy.deepcopy((net.state_dict(), optimizer.state_dict()))

    def all_of(saved):
        weights, state = saved
        of_optimizer = {f"{n} {k}": v for n, entry in state["state"].items() for k, v in entry.items()}
        return {name: value.cpu() for name, value in {**weights, **of_optimizer}.items()}

    with rounds_otherwise("addcdiv_"):
        whole = leg(first, leg(first, None, range(3)), range(3, 6))
        crossed = leg(then, leg(first, None, range(3)), range(3, 6))
    same_arithmetic = (first == "host") == (then == "host")
    assert bool(differing(all_of(whole), all_of(crossed))) is not same_arithmetic


@pytest.mark.parametrize("name", ["adamw", "fused", "asgd", "adagrad"])
def test_no_state_that_is_loaded_goes_through_staging_buffers(name, caplog):
    kind, options, *_ = KINDS[name]

    def load(net, optimizer):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    train(functools.partial(kind, **options), "device", between=load)
    assert "staging" not in caplog.text


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("place", ["device"])
def test_momentum_that_some_weights_have_is_stepped_as_torch_steps_it_beside_new_one(
    place, foreach, rounds_otherwise, monkeypatch
):
    monkeypatch.setattr(device_step, "BUFFER", 8192)  # so that the other weights of the type are in other portions
    frozen = []

    def make(params):
        params = list(params)
        frozen[:] = params[-2:]
        for param in frozen:
            param.requires_grad_(False)
        return SGD(params, lr=1e-2, momentum=0.9, dampening=0.3, foreach=foreach)

    def thaw(net, optimizer):
        for param in frozen if optimizer.state else ():
            param.requires_grad_(True)

    with rounds_otherwise("add_.Tensor"):
        plain, _ = train(make, "plain", between=thaw, make=Half)
        device, _ = train(make, place, between=thaw, make=Half)
    assert not differing(plain, device)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("place", ["device"])
def test_a_scalar_that_was_loaded_in_the_type_of_its_weight_is_stepped(place, foreach, rounds_otherwise):
    def load(net, optimizer):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    make = functools.partial(NAdam, lr=1e-2, foreach=foreach)
    with rounds_otherwise("addcdiv_"):
        plain, _ = train(make, "plain", between=load, make=Mixed)
        device, _ = train(make, place, between=load, make=Mixed)
    assert not differing(plain, device)
    assert plain["blocks.0.weight mu_product"].dtype is torch.bfloat16


def test_state_lies_in_page_locked_memory_of_the_host_each_tensor_by_itself():
    torch.manual_seed(0)
    net = Net()
    before = torch.accelerator.memory_allocated()
    with stream_before(net, device="simgpu", window=2, optimizer_device="device") as handle:
        optimizer = AdamW(net.parameters())
        for _ in range(2):
            net(torch.randn(4, 24, device="simgpu")).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        net(torch.randn(4, 24, device="simgpu")).sum().backward()
        optimizer.step()
        for entry in optimizer.state.values():
            for key, value in entry.items():
                assert value.is_cpu
                assert key == "step" or value.numel() == 1 or value.is_pinned()
                assert value.untyped_storage().nbytes() == value.nbytes  # `torch.save` writes whole storages
        handle.finish_step()
        moved = sum(4 * parameter.nbytes for parameter in net.parameters())
        assert torch.accelerator.memory_allocated() >= before + device_step.BUFFERS * device_step.buffer_nbytes(moved)
    assert torch.accelerator.memory_allocated() <= before + 1024


@pytest.mark.parametrize("how", ["two optimizers", "add_param_group", "thawed"])
def test_buffers_grow_with_what_is_stepped(how, rounds_otherwise):
    first, others = [], []

    def make(params):
        params = list(params)
        first[:] = [param for param in params if param.numel() == 1]
        others[:] = [param for param in params if param.numel() > 1]
        for param in others:
            param.requires_grad_(how == "two optimizers")
        return AdamW(params if how == "thawed" else first, lr=1e-2)

    def grow(net, optimizer):
        if how == "two optimizers":
            if "second" not in vars(net):
                net.second = AdamW(others, lr=1e-2)
            net.second.step()
            net.second.zero_grad()
        elif not others[0].requires_grad:
            for param in others:
                param.requires_grad_(True)
            if how == "add_param_group":
                optimizer.add_param_group({"params": others})

    with rounds_otherwise("addcdiv_"):
        plain, _ = train(make, "plain", between=grow)
        device, _ = train(make, "device", between=grow)
    assert not differing(plain, device)


# ---- what is refused, and what fails


class Own(AdamW):
    """A class of the user's."""


@pytest.mark.parametrize("kind", [Own, torch.optim.LBFGS])
def test_other_classes_are_refused_by_name(kind):
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} is none of them.*optimizer_device='host'"):
        train(kind, "device", steps=1)


def test_what_steps_on_a_device_alone_is_refused_on_the_host_by_name():
    with pytest.raises(UnsupportedError, match=r"AdamW has capturable=True.*optimizer_device='device'"):
        train(functools.partial(AdamW, capturable=True), "host", steps=1)


def test_a_group_that_is_not_the_modules_alone_has_to_choose_its_kernels(rounds_otherwise):
    def with_another(params, **options):
        other = torch.nn.Parameter(torch.ones(3))
        other.grad = torch.ones(3)
        return SGD([*params, other], lr=0.1, **options)

    with pytest.raises(UnsupportedError, match="pass foreach=False or foreach=True"):
        train(with_another, "device", steps=1)
    with rounds_otherwise("add_.Tensor"):
        plain, _ = train(functools.partial(with_another, foreach=False), "plain")
        device, _ = train(functools.partial(with_another, foreach=False), "device")
    assert not differing(plain, device)


@pytest.mark.parametrize("place", ["device"])
def test_a_scalar_that_weights_share_is_counted_as_in_a_plain_step_or_refused(place, rounds_otherwise):
    def share(net, optimizer):
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["step"] = state["state"][0]["step"]
        optimizer.load_state_dict(state)

    with rounds_otherwise("addcdiv_"):
        for foreach in (None, True):
            with pytest.raises(UnsupportedError, match=r"belongs to several weights.*pass foreach=False"):
                train(functools.partial(AdamW, foreach=foreach), place, between=share)
        plain, _ = train(functools.partial(AdamW, foreach=False), "plain", between=share)
        device, _ = train(functools.partial(AdamW, foreach=False), place, between=share)
    assert not differing(plain, device)


def test_another_place_for_the_step_is_refused():
    with pytest.raises(OptionError, match="one of 'host', 'device'"):
        sp_lightning.SuperpipelineStrategy(optimizer_device="gpu")


def test_where_the_cpu_computes_the_option_changes_nothing():
    case = models.case("mlp")
    assert parity.check(case, {"window": 1, "optimizer_device": "device"})["device_peak"] < device_step.BUFFER


@pytest.mark.parametrize("place", ["device"])
@pytest.mark.parametrize("fails", [1, 2, 3, 4, 9])
def test_an_error_in_a_portion_tears_the_step(fails, place, monkeypatch):
    import rounding

    monkeypatch.setattr(device_step, "BUFFER", 16384)
    calls = [0]

    def failing(self, one, other, value=1):
        calls[0] += 1
        if calls[0] == fails:
            raise RuntimeError("the device fails")
        return self + one / other * value

    torch.manual_seed(0)
    net = Net()
    with stream_before(net, device="simgpu", window=2, **PLACES[place]):
        optimizer = AdamW(net.parameters(), foreach=False)
        first = copy.deepcopy((net.state_dict(), optimizer.state_dict()))

        def step():
            net(torch.ones(4, 24, device="simgpu")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with rounding.replaced({"addcdiv_": failing}), pytest.raises(RuntimeError, match="the device fails"):
            step()
        optimizer.zero_grad()
        if fails > 3:  # the portion before came down
            with pytest.raises(TornStepError):
                step()
        else:  # nothing was written
            assert all(torch.equal(value, first[0][name]) for name, value in net.state_dict().items())
            assert not any(optimizer.state.values())
        net.load_state_dict(first[0])
        optimizer.load_state_dict(first[1])
        optimizer.zero_grad()
        step()
        after = copy.deepcopy(net.state_dict())
    torch.manual_seed(0)
    plain = Net().to("simgpu")
    optimizer = AdamW(plain.parameters(), foreach=False)
    plain(torch.ones(4, 24, device="simgpu")).sum().backward()
    optimizer.step()
    assert all(torch.equal(value.cpu(), after[name].cpu()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("slow", "host_memory"),
    [("copies to the host", "auto"), ("copies to the host", "pageable"), ("work in the buffers", "auto")],
)
@pytest.mark.few(3)
def test_nothing_of_a_step_that_failed_is_under_way(slow, host_memory, monkeypatch):
    """Neither copies to memory of the host, nor work in buffers, which the next step fills."""
    import rounding

    import simgpu

    monkeypatch.setattr(device_step, "BUFFER", 16384)
    calls = [0]

    def failing(self, one, other, value=1):
        calls[0] += 1
        if calls[0] == 7 and slow == "copies to the host":
            simgpu.config.d2h_us = 100_000
        if calls[0] == 9:
            if slow == "work in the buffers":
                simgpu.config.compute_us = 200_000
                self.mul_(1)
                simgpu.config.compute_us = 0
            raise RuntimeError("the device fails")
        return self + one / other * value

    def copied():
        return [value.clone() for entry in optimizer.state.values() for value in entry.values()]

    net, options = Net(), {"optimizer_device": "device", "host_memory": host_memory}
    with stream_before(net, device="simgpu", window=2, **options):
        optimizer = AdamW(net.parameters(), foreach=False)
        loaded = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        net(torch.ones(4, 24, device="simgpu")).sum().backward()
        with rounding.replaced({"addcdiv_": failing}), pytest.raises(RuntimeError, match="the device fails"):
            optimizer.step()
        if slow == "copies to the host":
            at_once = copied()
            time.sleep(0.5)
            assert all(map(torch.equal, at_once, copied()))
            simgpu.config.d2h_us = 0
        net.load_state_dict(loaded[0])
        optimizer.load_state_dict(loaded[1])
        optimizer.step()


@pytest.mark.parametrize("second", ["device"])
@pytest.mark.parametrize("first", ["device"])
def test_an_error_in_a_second_module_tears_the_step_of_the_first_one(first, second):
    import rounding

    calls = [0]

    def failing(self, one, other, value=1):
        calls[0] += 1
        if calls[0] == 3:  # the first weight of the second module
            raise RuntimeError("the device fails")
        return self + one / other * value

    nets = [torch.nn.Linear(24, 24), torch.nn.Linear(24, 20)]
    with contextlib.ExitStack() as stack:
        for net, place in zip(nets, (first, second), strict=True):
            stack.enter_context(stream_before(net, device="simgpu", window=1, **PLACES[place]))
        both = torch.nn.Sequential(*nets)
        optimizer = AdamW(both.parameters(), foreach=False)
        before = copy.deepcopy(nets[0].state_dict())
        both(torch.ones(4, 24, device="simgpu")).sum().backward()
        with rounding.replaced({"addcdiv_": failing}), pytest.raises(RuntimeError, match="the device fails"):
            optimizer.step()
        assert not torch.equal(before["weight"], nets[0].weight)
        with pytest.raises(TornStepError, match="stepped 2 of 4"):
            optimizer.step()


def test_a_step_without_room_for_its_buffers_can_be_tried_again(rounds_otherwise):
    import simgpu

    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(4, 24, device="simgpu")).sum().backward()
        optimizer.step()

    def weights(net):
        return {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}

    with rounds_otherwise("addcdiv_"):
        torch.manual_seed(0)
        net = Net()
        with stream_before(net, device="simgpu", window=2, optimizer_device="device"):
            optimizer = AdamW(net.parameters())
            net(torch.ones(4, 24, device="simgpu")).sum().backward()
            capacity = simgpu.config.capacity
            for room in (1024, 100_000):  # for none, and for some
                simgpu.config.capacity = torch.accelerator.memory_allocated() + room
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
            simgpu.config.capacity = capacity
            step(net, optimizer)
            device = weights(net)
        torch.manual_seed(0)
        plain = Net().to("simgpu")
        step(plain, AdamW(plain.parameters()))
    assert not differing(weights(plain), device)


def test_buffers_that_grow_for_another_optimizer_are_ordered_after_what_had_their_memory():
    net = models.stack_of(models.Block)()
    with stream_before(net, "simgpu", window=1, optimizer_device="device"):
        optimizers = [SGD(net.stem.parameters(), lr=0.1), SGD(net.blocks.parameters(), lr=0.1, momentum=0.9)]
        net(models.vectors(0)[0].to("simgpu")).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
