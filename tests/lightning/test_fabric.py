"""Fabric: a user's own loop, once plainly and once with modules that stream, has the same bits."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import itertools
import os
import pathlib
import socket
import sys
import time
import weakref

import forks
import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy
from side_by_side import assert_plain, blocks
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.errors import ExactnessError, OptionError

BATCHES = 5
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


def fabric_on(device, strategy, precision="32-true"):
    simulated = device.type == "simgpu"
    accelerator = importlib.import_module("simgpu.lightning").SimGPUAccelerator() if simulated else "cpu"
    mixed = precision.endswith("mixed")
    plugins = [MixedPrecision(precision, device.type)] if mixed else None
    fabric = Fabric(
        accelerator=accelerator, devices=1, strategy=strategy, precision=None if mixed else precision, plugins=plugins
    )
    fabric.launch()
    return fabric


made = []


@pytest.fixture(autouse=True)
def torn_down():
    """All strategies of a test that are still there end with it."""
    yield
    while made:
        strategy = made.pop()()
        if strategy is not None and strategy.accelerator is not None:
            strategy.teardown()


def streaming(device, **options):
    strategy = sp_lightning.SuperpipelineFabricStrategy(device=device, **{"window": 1, **options})
    made.append(weakref.ref(strategy))
    return strategy


def record(loop, device, strategy, precision):
    """What a loop yields, as it was then."""
    torch.manual_seed(0)
    fabric = fabric_on(device, strategy, precision)
    entries = []
    for index, value in enumerate(loop(fabric)):
        entries += [
            parity.Entry(f"yield {index}", path, parity.keep(leaf)) for path, leaf in parity.leaves(value, "value ")
        ]
    host = [e._replace(value=e.value.cpu() if isinstance(e.value, torch.Tensor) else e.value) for e in entries]
    return parity.Record(host)


def compare(loop, device, precision="32-true", **options):
    strategy = streaming(device, **options)
    plain = record(loop, device, SingleDeviceStrategy(device=device), precision)
    streamed = record(loop, device, strategy, precision)
    assert plain.entries
    parity.compare(plain, streamed)
    assert all(handle.stats()["bytes_up"] for handle in strategy.handles)


def adamw(module, **options):
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False, **options)


def batches(fabric, count=BATCHES):
    return fabric.setup_dataloaders(
        torch.utils.data.DataLoader([models.vectors(i) for i in range(count)], batch_size=None)
    )


def trained(*modules):
    return [[p.detach().clone() for p in module.parameters()] for module in modules]


# --- Loops as users write them


def plainly(fabric):
    net = blocks()
    net, optimizer = fabric.setup(net, adamw(net))
    for x, y in batches(fabric):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        yield loss
    yield trained(net), optimizer.state_dict()["state"]


def with_everything_in_between(fabric):
    """Clips, schedules, looks at gradients and weights, averages weights, and zeroes right after the step."""
    net = blocks()
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    average = copy.deepcopy(net)
    net, optimizer = fabric.setup(net, optimizer)
    for index, (x, y) in enumerate(batches(fabric, 8)):
        loss = nn.functional.cross_entropy(net(x), y)
        fabric.backward(loss)
        yield [p.grad for p in net.parameters()]
        clip = {"max_norm": 0.1, "error_if_nonfinite": False} if index % 2 else {"clip_val": 0.01}
        fabric.clip_gradients(net, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 3 == 0)
        scheduler.step()
        with torch.no_grad():
            for kept, p in zip(average.parameters(), net.parameters(), strict=True):
                kept.lerp_(p.to(kept.device, kept.dtype), 0.1)
            if index == 5:
                next(net.parameters()).mul_(0.9)
        yield loss, trained(average)
    yield trained(net), optimizer.state_dict()["state"], scheduler.get_last_lr()


def accumulating(fabric):
    net = blocks()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False))
    for index, (x, y) in enumerate(batches(fabric, 6)):
        waits = index % 3 != 2
        with fabric.no_backward_sync(net, enabled=waits):
            fabric.backward(nn.functional.cross_entropy(net(x), y) / 3)
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    yield trained(net)


def with_a_closure(fabric):
    net = blocks()
    net, optimizer = fabric.setup(net, adamw(net))
    for x, y in batches(fabric):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(net, optimizer, max_norm=0.1)
            return loss

        yield optimizer.step(closure)
    yield trained(net)


def by_hand(fabric):
    """``loss.backward()``, which plain Fabric allows on one device."""
    net = fabric.setup_module(blocks())
    optimizer = fabric.setup_optimizers(adamw(net))
    for x, y in batches(fabric):
        optimizer.zero_grad()
        with fabric.autocast():
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        yield [net(x) for x, _ in batches(fabric)], trained(net)


def adversaries(fabric):
    """Two modules and two optimizers, as a GAN has."""
    generator, critic = blocks(), models.stack_of(models.Block, 3)()
    generator, by_generator = fabric.setup(generator, adamw(generator))
    critic, by_critic = fabric.setup(critic, adamw(critic))
    widen = torch.ones(1, models.FEATURES)
    for x, _ in batches(fabric):
        made = generator(x).sum(1, keepdim=True) * widen.to(x.device)
        by_critic.zero_grad()
        fabric.backward(critic(x).mean() - critic(made.detach()).mean())
        by_critic.step()
        by_generator.zero_grad()
        loss = critic(made).mean()
        fabric.backward(loss)
        by_generator.step()
        yield loss
    yield trained(generator, critic)


def one_module_and_two_optimizers(fabric):
    net = blocks()
    parameters = list(net.parameters())
    one = torch.optim.AdamW(parameters[::2], lr=0.01, foreach=False)
    other = torch.optim.SGD(parameters[1::2], lr=0.1, foreach=False)
    net, one, other = fabric.setup(net, one, other)
    for x, y in batches(fabric):
        one.zero_grad()
        other.zero_grad()
        fabric.backward(nn.functional.cross_entropy(net(x), y))
        one.step()
        other.step()
    yield trained(net)


class Generates(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = blocks()

    def forward(self, x):
        return self.net(x)

    def generate(self, x, times=2):
        return [self(x * (1 + number)) for number in range(times)]

    def regularized(self, x):
        return self(x).square().mean() + self.net.head.weight.square().sum()


def marking_methods(fabric):
    """As code for DDP has to, before it calls them."""
    net = Generates()
    net, optimizer = fabric.setup(net, adamw(net))
    net.mark_forward_method("generate")
    net.mark_forward_method(net.module.generate)
    net.mark_forward_method("regularized")
    copied = copy.deepcopy(net.module)
    for x, _ in batches(fabric):
        optimizer.zero_grad()
        fabric.backward(net.regularized(x))
        optimizer.step()
        with torch.no_grad():
            yield net.generate(x, times=3), str(inspect.signature(net.module.generate))
            yield fabric.to_device(copied).generate(x)
    yield trained(net, copied)


def a_lightning_module(fabric):
    """Its training_step reads weights outside of any forward, for the loss."""

    class Penalised(models.ZooModule):
        def training_step(self, batch, index):
            loss = self.case.loss(self.net, batch)
            return loss + sum(block.up.weight.square().sum() for block in self.net.blocks)

        def log(self, *_, **__):
            pass

    module = Penalised(models.case("mlp"))
    module, optimizer = fabric.setup(module, adamw(module))
    for index, batch in enumerate(batches(fabric)):
        optimizer.zero_grad()
        loss = module.training_step(batch, index)
        fabric.backward(loss)
        yield loss, [p.grad for p in module.parameters()]
        optimizer.step()
        yield module.predict_step(batch, index)
    yield trained(module)


class Head(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.last = nn.Linear(models.CLASSES, models.CLASSES)

    def forward(self, x):
        return self.last(self.encoder(x))


def sharing_an_encoder(fabric):
    """Two modules with an optimizer each have the same encoder."""
    encoder = blocks()
    first, second = Head(encoder), Head(encoder)
    fabric.to_device(nn.ModuleList([first, second]))
    first, by_first = fabric.setup(first, adamw(first))
    second, by_second = fabric.setup(second, adamw(second))
    for x, y in batches(fabric):
        by_first.zero_grad()
        by_second.zero_grad()
        loss = nn.functional.cross_entropy(first(x), y) + second(x).square().mean()
        fabric.backward(loss)
        by_first.step()
        by_second.step()
        yield loss
    yield trained(first, second)


class Centred(nn.Module):
    """Has a buffer and a metric beside another module."""

    def __init__(self, net):
        super().__init__()
        self.net, self.mean = net, torchmetrics.MeanMetric()
        self.register_buffer("center", torch.full((models.CLASSES,), 0.25))

    def forward(self, x):
        loss = (self.net(x) - self.center).square().mean()
        self.mean.update(loss.detach())
        return loss


def with_a_loss_around(fabric):
    """What is around a module that streams has no weights of its own, and neither has a metric inside of one."""
    net = Centred(blocks())
    net, optimizer = fabric.setup(net, adamw(net))
    moved, also = fabric.to_device(Centred(net.net)), fabric.setup(Centred(net.net))
    for x, _ in batches(fabric):
        optimizer.zero_grad()
        loss = net(x) + moved(x) + also(x)
        fabric.backward(loss)
        optimizer.step()
        yield loss
    yield trained(net), [module.mean.compute() for module in (net, moved, also)]


def with_parts_that_take_tensors_along(fabric):
    """Tensors that are neither weights nor buffers, of a layer and of a metric with weights, inside and by itself."""
    net = nn.Sequential(blocks(), models.Scaled(models.CLASSES))
    inside = net[1].distance = models.Distance()
    net, optimizer = fabric.setup(net, adamw(net))
    alone = fabric.to_device(models.Distance())
    for x, y in batches(fabric):
        scores = net(x)
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(scores, y))
        optimizer.step()
        with torch.no_grad():
            inside.update(scores)
            alone.update(scores)
    yield trained(net), inside.compute(), alone.compute(), str(alone.device)


def with_copies(fabric):
    """Averages weights in copies of what Fabric wrapped, keeps the best ones, and goes on with one of those."""
    net = blocks()
    net, optimizer = fabric.setup(net, adamw(net))
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9))
    kept = []
    for x, y in batches(fabric):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        average.update_parameters(net)
        kept.append(copy.deepcopy(net))
        with torch.no_grad():
            yield average(x), net(x)
    best = copy.deepcopy(kept[2])  # a copy that was never called
    again = fabric.setup_optimizers(adamw(best))
    for x, y in batches(fabric):
        again.zero_grad()
        fabric.backward(nn.functional.cross_entropy(best(x), y))
        again.step()
    yield trained(net, average, best, *kept)


LOOPS = [
    plainly,
    with_everything_in_between,
    accumulating,
    with_a_closure,
    by_hand,
    adversaries,
    one_module_and_two_optimizers,
    marking_methods,
    a_lightning_module,
    sharing_an_encoder,
    with_a_loss_around,
    with_parts_that_take_tensors_along,
    with_copies,
]


@parity.product(overlap=[True, False], loop=LOOPS, device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_loop_is_bitwise_the_plain_one(loop, overlap, device):
    compare(loop, device, optimizer_overlap=overlap)


@parity.product(
    precision=["bf16-mixed", "bf16-true", "16-true"],
    loop=[plainly, with_everything_in_between, adversaries],
    device=parity.DEVICES,
)
@pytest.mark.few(1)
def test_under_other_precisions_too(loop, precision, device):
    compare(loop, device, precision, activations="recompute")


class Repeating(models.Stack):
    """Runs each of its blocks three times."""

    def run(self, x):
        for _ in range(3):
            x = super().run(x)
        return x


@pytest.mark.few(1)
def test_weights_used_several_times_under_autocast_have_the_bits_without_its_cache(device, monkeypatch):
    def loop(fabric):
        net = Repeating([models.Block(), models.Block()])
        net, optimizer = fabric.setup(net, adamw(net))
        for x, y in batches(fabric, 2):
            fabric.backward(nn.functional.cross_entropy(net(x), y))
            yield [p.grad.clone() for p in net.parameters()]
            optimizer.step()

    streamed = record(loop, device, streaming(device), "bf16-mixed")
    cached = record(loop, device, SingleDeviceStrategy(device=device), "bf16-mixed")
    with pytest.raises(parity.Difference):  # or exactness.md is out of date
        parity.compare(cached, streamed)
    uncached = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    monkeypatch.setattr(MixedPrecision, "forward_context", lambda _: uncached)
    parity.compare(record(loop, device, SingleDeviceStrategy(device=device), "bf16-mixed"), streamed)


@pytest.mark.simgpu
@pytest.mark.parametrize("loop", [plainly, with_everything_in_between, adversaries], ids=lambda loop: loop.__name__)
@pytest.mark.few(1)
def test_a_gradient_scaler_too(loop):
    compare(loop, torch.device("simgpu", 0), "16-mixed")


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [True, False])
def test_each_step_runs_beside_other_work_unless_the_option_says_so(overlap, device):
    strategy = streaming(device, optimizer_overlap=overlap)
    record(adversaries, device, strategy, "32-true")
    assert [handle.stats()["held_steps"] for handle in strategy.handles] == [BATCHES * overlap] * 2


@pytest.mark.few(1)
def test_a_zero_grad_after_the_step_fetches_no_more(device):
    found = {}
    for zeroes_after in (False, True):
        strategy = streaming(device)
        fabric = fabric_on(device, strategy)
        net = blocks()
        net, optimizer = fabric.setup(net, adamw(net))
        handle = strategy.handles[0]
        fetches = []
        for x, y in batches(fabric):
            if not zeroes_after:
                optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(net(x), y))
            optimizer.step()
            if zeroes_after:
                optimizer.zero_grad()
            fetches.append(handle.stats()["fetches"])
        found[zeroes_after] = [after - before for before, after in itertools.pairwise(fetches[1:])]
    assert found[True] == found[False] == found[True][:1] * (BATCHES - 2) and found[True][0] > 0


# --- Checkpoints


@pytest.mark.parametrize("saves", ["plain", "streaming"])
@pytest.mark.parametrize("loads", ["plain", "streaming"])
@pytest.mark.few(1)
def test_checkpoints_cross_over(saves, loads, device, tmp_path):
    def strategy(side):
        return SingleDeviceStrategy(device=device) if side == "plain" else streaming(device)

    def parts(side, seed):
        torch.manual_seed(seed)
        fabric = fabric_on(device, strategy(side))
        net = blocks()
        net, optimizer = fabric.setup(net, adamw(net))
        return fabric, {"net": net, "optimizer": optimizer, "step": 0, "extra": torch.zeros(3)}

    def steps(fabric, state, count):
        for x, y in batches(fabric, count):
            state["optimizer"].zero_grad()
            fabric.backward(nn.functional.cross_entropy(state["net"](x), y))
            state["optimizer"].step()
            state["step"] += 1
        return trained(state["net"]), state["optimizer"].state_dict()["state"], state["step"]

    fabric, state = parts(saves, 0)
    steps(fabric, state, 2)
    state["extra"] = torch.arange(3.0)
    fabric.save(tmp_path / "state.ckpt", state)
    expected = steps(fabric, state, 3)
    other, again = parts(loads, 1)
    remainder = other.load(tmp_path / "state.ckpt", again)
    (tmp_path / "state.ckpt").write_bytes(b"")  # nothing refers to the file
    assert remainder == {} and again["step"] == 2 and torch.equal(again["extra"], torch.arange(3.0))
    actual = steps(other, again, 3)
    for one, two in zip(parity.leaves(expected, ""), parity.leaves(actual, ""), strict=True):
        same = torch.equal(one[1].cpu(), two[1].cpu()) if isinstance(one[1], torch.Tensor) else one[1] == two[1]
        assert one[0] == two[0] and same, one[0]


@pytest.mark.parametrize("raw", [False, True])
def test_loaded_state_goes_to_the_disk_before_any_step(raw, tmp_path):
    """Of two modules, each of which finds its own part; what a third one has, not streamed, stays in memory."""
    fabric = fabric_on(torch.device("cpu"), streaming(torch.device("cpu"), disk=tmp_path, host_budget="0B"))
    nets = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))) for _ in range(2)]
    other = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW([p for net in (*nets, other) for p in net.parameters()])
    for p in (p for net in (*nets, other) for p in net.parameters()):
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    file = tmp_path / "state.ckpt"
    torch.save(saved if raw else {"optimizer": saved}, file)
    optimizer.state.clear()
    nets = [fabric.setup_module(net) for net in nets]
    optimizer = fabric.setup_optimizers(optimizer)
    if raw:
        fabric.load_raw(file, optimizer)
    else:
        fabric.load(file, {"optimizer": optimizer})
    file.write_bytes(b"")
    stores = [handle.store for handle in fabric.strategy.handles]
    for net, is_filed in ((nets[0], True), (nets[1], True), (other, False)):
        for p in net.parameters():
            moments = [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
            goes = is_filed and p.ndim > 1  # small ones stay in memory
            assert [any(store.is_filed(value) for store in stores) for value in moments] == [goes] * 2
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(found[i][name], value) for i, one in saved["state"].items() for name, value in one.items())


def test_loaded_state_of_a_parameter_that_is_on_the_device_stays_there(device, tmp_path):
    def run(strategy):
        fabric = fabric_on(device, strategy)
        torch.manual_seed(0)
        net, scale = blocks(), nn.Parameter(torch.ones(3, device=device))
        net, optimizer = fabric.setup(net, torch.optim.AdamW([*net.parameters(), scale], 0.05, foreach=False))
        state = {"net": net, "optimizer": optimizer}
        for index, (x, y) in enumerate(batches(fabric, 4)):
            if index == 2:
                fabric.save(tmp_path / "state.ckpt", state)
                fabric.load(tmp_path / "state.ckpt", state)
                assert optimizer.state[scale]["exp_avg"].device == device
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(net(x) * scale.sum(), y))
            optimizer.step()
        return [*trained(net)[0], scale.detach()]

    expected, found = run(SingleDeviceStrategy(device=device)), run(streaming(device))
    assert all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(expected, found, strict=True))


@pytest.mark.parametrize("part", ["net", "optimizer", None])
@pytest.mark.few(2)
def test_a_raw_state_is_loaded_and_outlives_its_file(part, device, tmp_path):
    fabric = fabric_on(device, streaming(device))
    net = blocks()
    optimizer = adamw(net)
    net, optimizer = fabric.setup(net, optimizer)
    for x, y in batches(fabric, 1):
        fabric.backward(nn.functional.cross_entropy(net(x), y))
        optimizer.step()
    saved = copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    file = tmp_path / "raw.ckpt"
    torch.save(saved[part] if part else saved, file)
    if part is None:
        found = fabric.load(file)
    else:
        for p in net.parameters():
            p.data.zero_()
        fabric.load_raw(file, {"net": net, "optimizer": optimizer}[part])
        found = {part: {"net": net, "optimizer": optimizer}[part].state_dict()}
    file.write_bytes(b"")
    for where, leaf in parity.leaves(found, ""):
        expected = dict(parity.leaves(saved, ""))[where]
        assert torch.equal(leaf.cpu(), expected.cpu()) if isinstance(leaf, torch.Tensor) else leaf == expected


def test_a_trainers_checkpoint_is_loaded(tmp_path):
    trainer = parity_trainer(tmp_path)
    module = models.ZooModule(models.case("mlp"))
    trainer.fit(module, models.loader(module.case, 2))
    trainer.save_checkpoint(tmp_path / "trainer.ckpt")
    fabric = fabric_on(torch.device("cpu"), streaming(torch.device("cpu")))
    other = models.ZooModule(models.case("mlp"))
    wrapped, optimizer = fabric.setup(other, other.configure_optimizers())
    rest = fabric.load(tmp_path / "trainer.ckpt", {"state_dict": wrapped}, strict=False)
    optimizer.load_state_dict(rest["optimizer_states"][0])
    assert all(map(torch.equal, trained(other)[0], trained(module)[0]))


def parity_trainer(folder):
    import lightning as L

    return L.Trainer(
        strategy=sp_lightning.SuperpipelineStrategy(window=1),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


# --- Modules: where they are made, and how long they stream


@pytest.mark.parametrize("empty", [True, False])
def test_a_module_made_by_fabric_is_on_the_host(empty, device):
    fabric = fabric_on(device, streaming(device))
    with fabric.init_module(empty_init=empty):
        net = blocks()
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    net = fabric.setup(net)
    x, _ = next(iter(batches(fabric)))
    assert net(x).device == device and net.device == device


def test_master_weights_stay_in_fp32(device):
    fabric = fabric_on(device, streaming(device, master_weights=True), "bf16-true")
    with fabric.init_module():
        net = blocks()
    net, optimizer = fabric.setup(net, adamw(net))
    for x, y in batches(fabric):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    seen = []
    net.blocks[0].up.register_forward_hook(lambda layer, *_: seen.append(layer.weight.dtype))
    net(x)
    assert seen == [torch.bfloat16]
    with pytest.raises(OptionError, match="precision must be 'bf16-true' or '16-true' with master_weights=True"):
        fabric_on(device, streaming(device, master_weights=True), "32-true")


def test_a_module_without_parameters_only_moves_and_a_part_that_streams_stays(device):
    fabric = fabric_on(device, streaming(device))
    norm = fabric.to_device(nn.BatchNorm1d(3, affine=False))
    assert norm.running_mean.device == device and fabric.strategy.handles == []
    net = fabric.setup(blocks())
    assert fabric.setup(net.module.blocks[0]) is not None
    fabric.to_device(net.module)
    assert len(fabric.strategy.handles) == 1


@pytest.mark.few(1)
def test_a_lightning_module_that_is_only_moved_says_where_it_is(device):
    class Teacher(models.ZooModule):
        def forward(self, x):
            return self.net(x + torch.arange(models.FEATURES, device=self.device))

    fabric = fabric_on(device, streaming(device))
    teacher = fabric.to_device(Teacher(models.case("mlp")))
    x, _ = next(iter(batches(fabric)))
    assert teacher(x).device == teacher.device == device


def test_a_module_that_is_not_moved_is_plain_until_it_is(device):
    fabric = fabric_on(device, streaming(device))
    net = blocks()
    wrapped = fabric.setup(net, move_to_device=False)
    assert_plain(net)
    fabric.to_device(net)
    x, _ = next(iter(batches(fabric)))
    assert wrapped(x).device == device and len(fabric.strategy.handles) == 1


def test_a_copy_streams_when_it_is_called_and_for_as_long_as_it_is_there(device):
    fabric = fabric_on(device, streaming(device))
    net = fabric.setup(blocks())
    copied = copy.deepcopy(net)
    assert_plain(copied)
    x, _ = next(iter(batches(fabric)))
    with torch.no_grad():
        assert torch.equal(copied(x), net(x))
    assert [len(wrapped._strategy.handles) for wrapped in (net, copied)] == [1, 1]
    inner = copied.module
    del copied
    gc.collect()
    assert_plain(inner)


def test_a_pickle_is_of_plain_modules(device, tmp_path):
    fabric = fabric_on(device, streaming(device))
    net = fabric.setup(blocks())
    torch.save(net, tmp_path / "net.pt")
    again = torch.load(tmp_path / "net.pt", weights_only=False)
    assert_plain(again)
    fabric.to_device(again)
    x, _ = next(iter(batches(fabric)))
    with torch.no_grad():
        assert torch.equal(again(x), net(x))


def test_modules_are_plain_again_when_the_strategy_is_gone(device):
    fabric = fabric_on(device, streaming(device))
    net = blocks()
    wrapped, optimizer = fabric.setup(net, adamw(net))
    for x, y in batches(fabric, 2):
        fabric.backward(nn.functional.cross_entropy(wrapped(x), y))
        optimizer.step()
    gone = weakref.ref(fabric.strategy)
    del fabric, wrapped, optimizer
    gc.collect()
    assert gone() is None
    assert_plain(net)
    again = fabric_on(device, streaming(device))
    assert again.setup(net)(x).device == device


def alive(references):
    return [one for one in (refer() for refer in references) if one is not None]


@pytest.mark.parametrize("keeps", ["nothing", "parameters", "all"])
@pytest.mark.few(1)
def test_a_module_that_was_dropped_leaves_when_another_one_comes(keeps, device):
    """With its weights, its gradients and what is on the device, as in a search for hyperparameters."""

    def run(fabric):
        torch.manual_seed(0)
        net = blocks()
        wrapped, optimizer = fabric.setup(net, adamw(net))
        for x, y in batches(fabric, 3):
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(wrapped(x), y))
            optimizer.step()
        kept = {"nothing": [], "parameters": list(net.parameters()), "all": wrapped}
        return [weakref.ref(p) for p in net.parameters()], kept[keeps]

    fabric = fabric_on(device, streaming(device))
    other = fabric.setup(blocks())
    first, kept = run(fabric)
    again = fabric.setup(blocks())
    found = alive(first)
    patience = time.monotonic() + 5  # autograd's own thread may hold the last graph, and so keep a cycle, for a moment
    while keeps == "nothing" and found and time.monotonic() < patience:
        found = []
        gc.collect()
        found = alive(first)
    assert len(fabric.strategy.handles) == 2 + (keeps == "all")
    assert bool(found) == (keeps != "nothing")
    if keeps == "all":
        return
    assert all(type(one) is nn.Parameter and one.device.type == "cpu" for one in found)
    _, expected = run(fabric_on(device, SingleDeviceStrategy(device=device)))
    assert all(torch.equal(one, two.cpu()) for one, two in zip(kept, expected, strict=True))
    x, _ = next(iter(batches(fabric)))
    assert other(x).device == again(x).device == device


def test_a_teardown_makes_all_modules_plain(device):
    fabric = fabric_on(device, streaming(device))
    nets = [blocks(), blocks()]
    for net in nets:
        fabric.setup(net)
    fabric.strategy.teardown()
    for net in nets:
        assert_plain(net)
    assert fabric.strategy.handles == []


# --- What is refused


@pytest.mark.parametrize("several", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_several_devices_of_the_users_choice_are_refused(several):
    with pytest.raises(OptionError, match="device must be left out with several devices"):
        Fabric(accelerator="cpu", strategy=sp_lightning.SuperpipelineFabricStrategy(device="cpu"), **several)


def test_one_device_needs_no_launch_and_several_do():
    assert isinstance(Fabric(accelerator="cpu", devices=1, strategy="superpipeline").strategy, SingleDeviceStrategy)
    several = Fabric(accelerator="cpu", devices=2, strategy="superpipeline")
    assert not isinstance(several.strategy, SingleDeviceStrategy)
    assert isinstance(several.strategy, sp_lightning.SuperpipelineFabricStrategy)
    with pytest.raises(RuntimeError, match=r"you must call `.launch\(\)`"):
        several.setup(blocks())


def test_modules_that_share_weights_are_set_up_together(device):
    fabric = fabric_on(device, streaming(device))
    encoder = blocks()
    fabric.setup(Head(encoder))
    with pytest.raises(
        ExactnessError, match=r"encoder\.stem\.weight is in another stream already.* one module that contains both"
    ):
        fabric.setup(Head(encoder))


def test_a_wrong_option_is_refused_by_name():
    with pytest.raises(OptionError, match=r"an option must be one of window, .* got 'windows'"):
        sp_lightning.SuperpipelineFabricStrategy(windows=1)


def test_the_name_is_registered():
    fabric = Fabric(accelerator="cpu", devices=1, strategy="superpipeline")
    assert type(fabric.strategy) is sp_lightning.SuperpipelineFabricStrategy


# --- The command line

SCRIPT = """
import sys
import sp_lightning
import torch
from lightning.fabric import Fabric

fabric = Fabric(strategy=sys.argv[2], accelerator="cpu", precision="bf16-mixed")
fabric.seed_everything(0)
net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))
net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
for _ in range(3):
    loss = net(torch.ones(2, 8)).square().mean()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
fabric.save(sys.argv[1], {"net": net, "optimizer": optimizer, "strategy": type(fabric.strategy).__name__})
"""


def by_the_command(folder, *options):
    """Runs the script as ``fabric run`` does, in the test's own folder; gives the process."""
    pytest.importorskip("click")
    (folder / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(pathlib.Path(sp_lightning.__file__).parents[1]), *filter(None, sys.path)])
    command = "from lightning.fabric.cli import _run; _run()"
    given = ["--accelerator=cpu", f"--main-port={free_port()}", *options, "script.py", "streamed.pt", "superpipeline"]
    return forks.run(command, *given, env={**os.environ, "PYTHONPATH": path})


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.slow
def test_a_script_that_names_the_strategy_is_run_by_the_command_line(tmp_path, monkeypatch):
    done = by_the_command(tmp_path, "--precision=bf16-mixed")
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["script.py", str(tmp_path / "plain.pt"), "auto"])
    exec(SCRIPT, {})
    results = [torch.load(tmp_path / f"{name}.pt") for name in ("plain", "streamed")]
    assert [result.pop("strategy") for result in results] == ["SingleDeviceStrategy", "SuperpipelineFabricStrategy"]
    parity.compare(*(parity.Record([parity.Entry("", *leaf) for leaf in parity.leaves(result)]) for result in results))


@pytest.mark.slow
def test_the_command_line_starts_two_devices(tmp_path):
    """Both see the same data here, so the mean of their gradients is each one's."""
    done = by_the_command(tmp_path, "--devices=2")
    assert done.returncode == 0, done.stderr
    both = torch.load(tmp_path / "streamed.pt")
    assert by_the_command(tmp_path, "--devices=1").returncode == 0
    parity.compare(
        *(
            parity.Record([parity.Entry("", *leaf) for leaf in parity.leaves(result)])
            for result in (torch.load(tmp_path / "streamed.pt"), both)
        )
    )
