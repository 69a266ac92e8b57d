"""FP32 weights that autocast casts, on disk: what goes there, what travels, and what user code does with them.

tests/contract/test_state_on_disk.py trains the zoo that way.
"""

import contextlib
import copy
import errno
import functools
import os
import time

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.disk import state_ring
from sp_lightning.disk.homes import ScratchHome
from sp_lightning.errors import DiskError

UNITS = ["Block"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 16)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 16)


class Block(nn.Module):
    """A layer that is cast, a norm that is not, and a layer whose weight a function reads as it is."""

    def __init__(self, width, reads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.cast = nn.Linear(width, width)
        self.read = nn.Linear(width, width, bias=False) if reads else None

    def forward(self, x):
        x = torch.tanh(self.cast(self.norm(x)))
        return x if self.read is None else self.read(x) * self.read.weight.square().mean()


def stack(width=70, count=4, reads=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), *[Block(width, reads and n % 2) for n in range(count)])


def batch(device, width=70):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(device)


def streamed(net, device, on_disk=True, **options):
    disk = {"host_budget": "0B", "disk": os.getcwd()} if on_disk else {}
    return sp_lightning.stream(net, device, **{"window": 1, "units": UNITS, **disk, **options})


def forward(net, device):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return net(batch(device)).float().square().mean()


def train(net, optimizer, device, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        forward(net, device).backward()
        optimizer.step()


def on_disk(handle, net):
    handle.finish_step()
    with torch._C.DisableTorchFunctionSubclass():
        return {name for name, p in net.named_parameters() if handle.storage.state._file.place_of(p) is not None}


def assert_same(net, plain):
    for name, weight in plain.state_dict().items():
        assert parity.difference(weight, net.state_dict()[name]) is None, name


def layers(net):
    return {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, nn.Linear)}


@parity.product(kind=["AdamW", "SGD", "RMSprop", "Adafactor"], large=[False, True], device=parity.DEVICES)
@pytest.mark.few(1)
def test_weights_lie_on_the_disk_and_travel_from_there(kind, large, device, monkeypatch):
    """Those that are only cast travel as copies, the others as they are, small or large."""
    monkeypatch.setattr("sp_lightning.memory.weights.BY_ITSELF", 1 << (12 if large else 20))
    nets = [stack(), stack()]
    optimizers = [getattr(torch.optim, kind)(net.parameters(), lr=0.01) for net in nets]
    moved = []
    with streamed(nets[0], device) as handle:
        for _ in range(5):
            before = handle.stats()
            train(nets[0], optimizers[0], device)
            handle.finish_step()
            after = handle.stats()
            moved.append([after[name] - before[name] for name in ("disk_read", "disk_written")])
        sizes = {name: p.nbytes for name, p in nets[0].named_parameters()}
        assert on_disk(handle, nets[0]) == sizes.keys()
        stores = [unit.store for unit in handle.engine.units]
        assert all([type(home) for home in store.files] == [ScratchHome] for store in stores)
        assert all(store.slab.truth.nbytes <= 512 * len(store.params) for store in stores)
        weights = sum(sizes.values())
        state = {"AdamW": 2, "SGD": 0, "RMSprop": 1, "Adafactor": 0}[kind] * sum(sizes.values())
        if kind == "Adafactor":  # has state of a parameter's shape for vectors alone
            state = sum(p.nbytes for p in nets[0].parameters() if p.dim() == 1)
        narrow = {store.names[index] for store in stores for index in store.narrow}
        assert {"0.weight", *(f"{number}.cast.weight" for number in range(1, 5))} <= narrow
        assert not any("norm" in name or "read" in name for name in narrow)
        travel = {name: size // (1 + (name in narrow)) for name, size in sizes.items()}
        once = sum(size for name, size in travel.items() if name[0] in "04")  # backward begins with the last one there
        wires = sum(size for name, size in travel.items() if size < sizes[name])
        stepped = state + weights + weights  # with gradients
        assert moved[-1] == [stepped + 2 * sum(travel.values()) - once, stepped + wires]
        assert sum(store.wire_nbytes for store in stores) == 0
    with streamed(nets[1], device, False):
        train(nets[1], optimizers[1], device, 5)
    assert_same(*nets)
    assert all(type(p) is nn.Parameter for p in nets[0].parameters()) and os.listdir() == []


EDITS = {
    "in place": lambda net, w: w.mul_(0.5),
    "an element": lambda net, w: w.data.view(-1)[3:7].fill_(1.0),
    "an array": lambda net, w: w.detach().numpy().__setitem__((0, 2), 3.0),
    "other data": lambda net, w: setattr(w, "data", w.data.clone() * 2),
    "NaN": lambda net, w: w.view(-1)[5::17].fill_(float("nan")),
    "a state": lambda net, w: net.load_state_dict({name: value * 0.75 for name, value in net.state_dict().items()}),
    "a state, assigned": lambda net, w: net.load_state_dict(
        {name: value * 0.75 for name, value in net.state_dict().items()}, assign=True
    ),
    "a gradient less": lambda net, w: w.requires_grad_(False),
}


@parity.product(edit=list(EDITS), when=[0, 1, 3], name=["1.cast", "2.read"], device=parity.DEVICES)
@pytest.mark.few(1)
def test_what_user_code_writes_is_what_travels(edit, when, name, device):
    """Before the first pass, after it (all weights traveled as they are), and later."""

    def run(on_disk):
        net = stack()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        with streamed(net, device, on_disk):
            train(net, optimizer, device, when)
            losses = []
            for number in range(4):
                if number % 2 == 0:
                    with torch.no_grad():
                        EDITS[edit](net, net.get_submodule(name).weight)
                losses.append(forward(net, device).item())
                train(net, optimizer, device)
        return net, losses

    (net, losses), (plain, expected) = run(True), run(False)
    assert parity.difference(torch.tensor(expected), torch.tensor(losses)) is None
    assert_same(net, plain)


def test_other_data_and_then_the_first_again(device):
    def run(on_disk):
        net = stack()
        weight = net[2].read.weight
        found = []
        with streamed(net, device, on_disk), torch.no_grad():
            first = weight.data
            for data in (first, first * 2, first, first + 1):
                weight.data = data
                found.append(forward(net, device).item())
                first.mul_(1.5)
        return found

    assert run(True) == run(False)


@pytest.mark.few(1)
def test_a_write_waits_for_the_read_of_what_it_would_change(device, monkeypatch):
    """A weight that travels as it is is read from the file while user code may write it again."""
    read = os.preadv

    def run(on_disk):
        net = stack()
        found = []
        with streamed(net, device, on_disk, window=2), torch.no_grad():
            for _ in range(3):
                found.append(forward(net, device).item())
                for parameter in net.parameters():
                    parameter.mul_(1.1)
        return found

    expected = run(False)
    monkeypatch.setattr(os, "preadv", lambda *given: time.sleep(0.05) or read(*given))
    assert run(True) == expected


@pytest.mark.few(1)
def test_a_read_that_fails_is_an_error_after_which_the_run_goes_on(device, monkeypatch):
    nets = [stack(), stack()]
    read = os.preadv

    def failing(fd, views, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for net, where in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.AdamW(net.parameters())
        with streamed(net, device, where) as handle:
            for _ in range(3):
                if where:
                    handle.finish_step()  # which reads, too
                    monkeypatch.setattr(os, "preadv", failing)
                    with pytest.raises(DiskError, match="could not be read"):
                        forward(net, device)
                    monkeypatch.setattr(os, "preadv", read)
                train(net, optimizer, device)
    assert_same(*nets)


@parity.product(unit=[0, 2], device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_disk_that_is_full_when_types_change_leaves_a_run_that_goes_on(unit, device, monkeypatch):
    """Once there is room again, the types of this unit and of those behind it change, and no others."""
    nets = [stack(), stack()]
    allocate = os.posix_fallocate

    def full(fd, begin, nbytes):
        found.append(nbytes)
        if len(found) > unit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(fd, begin, nbytes)

    for net, where in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.AdamW(net.parameters())
        with streamed(net, device, where) as handle:
            train(net, optimizer, device)
            handle.finish_step()
            if where:
                for _ in range(2):
                    found = []
                    monkeypatch.setattr(os, "posix_fallocate", full)
                    with pytest.raises(DiskError, match="nothing was stepped"):
                        forward(net, device)
                    assert len(found) == unit + 1
                    monkeypatch.setattr(os, "posix_fallocate", allocate)
                    unit = 0  # those before have their copies
            train(net, optimizer, device, 3)
            if where:
                narrow = {store.names[i] for store in (one.store for one in handle.engine.units) for i in store.narrow}
                assert narrow == {"0.weight", *(f"{number}.cast.weight" for number in range(1, 5))}
    assert_same(*nets)


@pytest.mark.few(1)
def test_copies_that_stay_need_no_more_room_when_other_types_change(device, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 70)) for _ in range(3)])
    plain = copy.deepcopy(net)
    for which, where in ((net, True), (plain, False)):
        optimizer = torch.optim.AdamW(which.parameters())
        with streamed(which, device, where, units="Sequential") as handle:
            train(which, optimizer, device, 3)
            handle.finish_step()
            stores = [unit.store for unit in handle.engine.units]
            assert not where or all(len(store.narrow) == 2 for store in stores)
            which[1][0].register_forward_pre_hook(lambda layer, _: layer.weight.sum() and None)
            train(which, optimizer, device)
            handle.finish_step()
            with monkeypatch.context() as full:
                if where:
                    full.setattr(os, "posix_fallocate", lambda *given: pytest.fail("takes more of the disk"))
                forward(which, device)
            train(which, optimizer, device, 2)
            assert not where or sum(len(store.narrow) for store in stores) == 5
    assert_same(net, plain)


@pytest.mark.few(1)
def test_a_loop_without_autocast_reads_weights_from_the_disk(device):
    nets = [stack(), stack()]
    for net, where in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.AdamW(net.parameters())
        with streamed(net, device, where):
            for _ in range(3):
                optimizer.zero_grad()
                net(batch(device)).square().mean().backward()
                optimizer.step()
    assert_same(*nets)


def test_weights_that_came_to_share_their_bytes_share_them_when_units_are_made_anew(device):
    nets = [stack(), stack()]
    for net, where in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with streamed(net, device, where):
            train(net, optimizer, device)
            net[2].cast.weight.data = net[1].cast.weight.data
            net[3].added = nn.Parameter(torch.zeros(3))
            train(net, optimizer, device)  # each of both moves the other
            assert torch.equal(net[1].cast.weight, net[2].cast.weight)
    assert_same(*nets)


def test_weights_that_travel_as_they_are_stay_in_memory_where_that_is_known(device):
    with streamed(stack(), device, wire_dtype="as-is") as handle:
        assert not handle.storage.in_files and not handle.storage.placed.masters
    net = stack()
    net[1].compile(backend="eager")
    with streamed(net, device) as handle:
        assert not handle.storage.in_files and not handle.storage.placed.masters


@parity.product(steps=[0, 2], device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_graph_keeps_the_weights_that_it_saved(steps, device):
    """Two forwards, a write, and then both backwards: a plain run saved the casts of the weights before.

    In the first pass these are made on the device, and kept on the host for this case: on the disk, as wire copies are.
    """

    def run(on_disk):
        net = stack()
        with streamed(net, device, on_disk) as handle:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            train(net, optimizer, device, steps)
            before = handle.stats()["disk_written"]
            losses = [forward(net, device)]
            if on_disk and not steps:
                saved = layers(net) - {"0.weight"}  # whose input needs no gradient
                casts = sum(weight.numel() for name, weight in net.named_parameters() if name in saved)
                assert handle.stats()["disk_written"] - before == casts * 2
            with torch.no_grad():
                net[1].cast.weight.mul_(1.5)
            losses.append(forward(net, device))
            losses[1].backward()
            losses[0].backward()
            return [p.grad.clone() for p in net.parameters()]

    for found, expected in zip(run(True), run(False), strict=True):
        assert parity.difference(expected, found) is None


@pytest.mark.few(1)
def test_weights_live_on_after_the_end_and_stream_again(device):
    net, plain = stack(), stack()
    for which, contexts in ((net, [True, False, True]), (plain, [False] * 3)):
        optimizer = torch.optim.AdamW(which.parameters())
        for where in contexts:
            with streamed(which, device, where):
                train(which, optimizer, device, 3)
            copy.deepcopy(which)
    assert_same(net, plain)


SHARED = {
    "a parameter": lambda net: setattr(net[2].cast.weight, "data", net[1].cast.weight.data),
    "a transposed parameter": lambda net: setattr(net[2].cast, "weight", nn.Parameter(net[1].cast.weight.detach().t())),
    "a buffer": lambda net: net.register_buffer("seen", net[1].cast.weight.detach()),
    "an array": lambda net: setattr(net[1].cast.weight, "data", torch.from_numpy(net.array)),
}


@pytest.mark.parametrize("by", SHARED)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.few(1)
def test_on_the_cpu_a_weight_whose_bytes_other_code_has_stays_where_that_sees_its_steps(by, masters):
    def run(streams):
        net = stack(reads=False)
        net.array = np.full((70, 70), 0.01, dtype="float32")
        SHARED[by](net)
        optimizer, seen = torch.optim.AdamW(net.parameters(), lr=0.01), []
        context = streamed(net, "cpu", streams, master_weights=masters)
        with context as handle:
            if streams:
                assert layers(net) - on_disk(handle, net) == expected
            for _ in range(3):
                optimizer.zero_grad()
                if masters:
                    net(batch("cpu").bfloat16()).float().square().mean().backward()
                else:
                    forward(net, torch.device("cpu")).backward()
                optimizer.step()
                seen.append(float(net.array.sum()))
                seen += [float(value.sum()) for value in net.state_dict().values()]
                net.array *= 0.9
        return seen

    expected = {"1.cast.weight", "2.cast.weight"} if "parameter" in by else {"1.cast.weight"}
    assert run(True) == run(False)


@pytest.mark.few(1)
def test_steps_beside_backward_leave_the_mapping_alone(device):
    from test_state_in_runs import resident

    net = stack()
    optimizer = torch.optim.AdamW(net.parameters())
    with streamed(net, device):
        train(net, optimizer, device, 3)
        forward(net, device)
        assert resident(os.getcwd()) == 0
        assert net[0].weight.isfinite().all() and resident(os.getcwd()) > 0


# ---- Lightning


class Finetuned(models.ZooModule):
    """A net whose first part is frozen in the first epoch."""

    def __init__(self, case):
        super().__init__(case, optimizer="adamw")
        self.backbone = self.net[0] if isinstance(self.net, nn.Sequential) else next(self.net.children())

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


CALLBACKS = {
    "average": lambda: [EMAWeightAveraging(decay=0.9)],
    "finetuning": lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=True, verbose=False)],
    "swa": lambda: [L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)],
}


@pytest.mark.parametrize("callbacks", list(CALLBACKS))
@pytest.mark.seldom
def test_callbacks_that_read_and_write_weights(callbacks, device):
    def run(strategy):
        case = models.case("mlp")
        make = functools.partial(Finetuned, case) if callbacks == "finetuning" else None
        make = make or functools.partial(models.ZooModule, case, optimizer="adamw")
        options = {"accelerator": device.type, "precision": "bf16-mixed", "epochs": 3}
        return parity.record(make, strategy, callbacks=CALLBACKS[callbacks](), **options)

    expected = run(parity.plain_strategy(device.type))
    options = {"host_budget": "0B", "disk": os.getcwd()}
    parity.compare(expected, run(parity.streaming_strategy(device.type, **options)))


@pytest.mark.seldom
def test_checkpoints_go_both_ways(tmp_path):
    case = models.case("mlp")

    def fit(strategy, epochs, path=None):
        L.seed_everything(0, verbose=False)
        module = models.ZooModule(case, optimizer="adamw")
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            precision="bf16-mixed",
            max_epochs=epochs,
            enable_checkpointing=False,
            **options,
        )
        with contextlib.suppress(UserWarning):
            trainer.fit(module, models.loader(case, 3), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "saved")
        return module, torch.load(tmp_path / "saved", weights_only=False)

    streaming = functools.partial(parity.streaming_strategy, "cpu", host_budget="0B", disk=os.getcwd())
    plain = functools.partial(parity.plain_strategy, "cpu")
    _, expected = fit(plain(), 2)
    for first, second in ((streaming, plain), (plain, streaming), (streaming, streaming)):
        fit(first(), 1)
        os.replace(tmp_path / "saved", tmp_path / "first")
        _, found = fit(second(), 2, tmp_path / "first")
        for name, value in expected["state_dict"].items():
            assert torch.equal(found["state_dict"][name], value), name
        for index, state in expected["optimizer_states"][0]["state"].items():
            for key, value in state.items():
                assert torch.equal(found["optimizer_states"][0]["state"][index][key], value), (index, key)
