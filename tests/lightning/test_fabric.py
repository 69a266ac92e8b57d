"""Fabric: a user's own loop, once plainly and once with modules that stream, has the same bits."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import pathlib
import sys
import weakref

import forks
import processes
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.load import _lazy_load
from often import often
from side_by_side import assert_plain, blocks
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.errors import OptionError

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


def streaming(**options):
    strategy = sp_lightning.SuperpipelineFabricStrategy(**{"window": 1, **options})
    made.append(weakref.ref(strategy))
    return strategy


def record(loop, device, strategy, precision):
    """What a loop yields, as it was then."""
    torch.manual_seed(0)
    fabric = fabric_on(device, strategy, precision)
    return parity.Record([e for i, value in enumerate(loop(fabric)) for e in parity.seen(f"yield {i}", value)])


def compare(loop, device, precision="32-true", **options):
    strategy = streaming(**options)
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
    adversaries,
    with_copies,
]


@pytest.mark.parametrize("overlap", often([True, False]))
@pytest.mark.parametrize("loop", often(LOOPS, with_everything_in_between, adversaries))
def test_a_loop_is_bitwise_the_plain_one(loop, overlap, device):
    compare(loop, device, optimizer_overlap=overlap)


@parity.product(
    precision=["bf16-mixed", "bf16-true", "16-true"],
    loop=[plainly, with_everything_in_between, adversaries],
    device=parity.DEVICES,
)
def test_a_loop_is_bitwise_the_plain_one_in_lower_precisions(loop, precision, device):
    compare(loop, device, precision, activations="recompute")


@pytest.mark.simgpu
@pytest.mark.parametrize("loop", often([adversaries, plainly, with_everything_in_between]))
def test_a_loop_is_bitwise_the_plain_one_with_a_gradient_scaler(loop):
    compare(loop, torch.device("simgpu", 0), "16-mixed")


# --- Checkpoints


@pytest.mark.parametrize("saves", ["plain", "streaming"])
@pytest.mark.parametrize("loads", ["plain", "streaming"])
def test_checkpoints_cross_over(saves, loads, device, tmp_path):
    def strategy(side):
        return SingleDeviceStrategy(device=device) if side == "plain" else streaming()

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
    parity.assert_same(expected, actual)


@pytest.mark.parametrize("part", often([None, "net", "optimizer"]))
def test_a_raw_state_is_loaded_and_outlives_its_file(part, device, tmp_path):
    fabric = fabric_on(device, streaming())
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
    parity.assert_same({name: saved[name] for name in found}, found)


def test_a_trainers_checkpoint_is_loaded(tmp_path):
    strategy = sp_lightning.SuperpipelineStrategy(window=1)
    trainer = parity.make_trainer(strategy, max_epochs=1)
    module = models.ZooModule(models.case("mlp"))
    trainer.fit(module, models.loader(module.case, 2))
    trainer.save_checkpoint(tmp_path / "trainer.ckpt")
    fabric = fabric_on(torch.device("cpu"), streaming())
    other = models.ZooModule(models.case("mlp"))
    wrapped, optimizer = fabric.setup(other, other.configure_optimizers())
    rest = fabric.load(tmp_path / "trainer.ckpt", {"state_dict": wrapped}, strict=False)
    optimizer.load_state_dict(rest["optimizer_states"][0])
    assert all(map(torch.equal, trained(other)[0], trained(module)[0]))


# --- Modules: where they are made, and how long they stream


@pytest.mark.parametrize("empty", [True, False])
def test_a_module_made_by_fabric_is_on_the_host(empty, device):
    fabric = fabric_on(device, streaming())
    with fabric.init_module(empty_init=empty):
        net = blocks()
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    net = fabric.setup(net)
    x, _ = next(iter(batches(fabric)))
    assert net(x).device == device and net.device == device


def test_master_weights_stay_in_fp32(device):
    fabric = fabric_on(device, streaming(master_weights=True), "bf16-true")
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
        fabric_on(device, streaming(master_weights=True), "32-true")


def test_a_module_that_is_not_moved_is_plain_until_it_is(device):
    fabric = fabric_on(device, streaming())
    net = blocks()
    wrapped = fabric.setup(net, move_to_device=False)
    assert_plain(net)
    fabric.to_device(net)
    x, _ = next(iter(batches(fabric)))
    assert wrapped(x).device == device and len(fabric.strategy.handles) == 1


def test_modules_are_plain_again_when_the_strategy_is_gone(device):
    fabric = fabric_on(device, streaming())
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
    again = fabric_on(device, streaming())
    assert again.setup(net)(x).device == device


def test_a_teardown_makes_all_modules_plain(device):
    fabric = fabric_on(device, streaming())
    nets = [blocks(), blocks()]
    for net in nets:
        fabric.setup(net)
    fabric.strategy.teardown()
    for net in nets:
        assert_plain(net)
    assert fabric.strategy.handles == []


# --- What is refused


def test_one_device_needs_no_launch_and_several_do():
    assert isinstance(Fabric(accelerator="cpu", devices=1, strategy="superpipeline").strategy, SingleDeviceStrategy)
    several = Fabric(accelerator="cpu", devices=2, strategy="superpipeline")
    assert not isinstance(several.strategy, SingleDeviceStrategy)
    assert isinstance(several.strategy, sp_lightning.SuperpipelineFabricStrategy)
    with pytest.raises(RuntimeError, match=r"you must call `.launch\(\)`"):
        several.setup(blocks())


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
    given = [
        "--accelerator=cpu",
        f"--main-port={processes.free_port()}",
        *options,
        "script.py",
        "streamed.pt",
        "superpipeline",
    ]
    return forks.run(command, *given, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.slow
def test_the_command_line_runs_a_script_that_names_the_strategy(tmp_path, monkeypatch):
    done = by_the_command(tmp_path, "--precision=bf16-mixed")
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["script.py", str(tmp_path / "plain.pt"), "auto"])
    exec(SCRIPT, {})
    results = [torch.load(tmp_path / f"{name}.pt") for name in ("plain", "streamed")]
    assert [result.pop("strategy") for result in results] == ["SingleDeviceStrategy", "SuperpipelineFabricStrategy"]
    parity.assert_same(*results)


def test_tensors_that_load_lazily_are_loaded_into_a_model(device, tmp_path):
    """As litgpt reads its checkpoints."""

    def loop(fabric):
        torch.save(blocks().state_dict(), tmp_path / "checkpoint")
        net = blocks()
        net, optimizer = fabric.setup(net, adamw(net))
        net.load_state_dict(_lazy_load(tmp_path / "checkpoint"))
        for x, *_ in batches(fabric, 2):
            fabric.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        yield trained(net)

    compare(loop, device)
