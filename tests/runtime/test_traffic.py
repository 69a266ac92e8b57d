"""What travels between host and device, counted and seen on the device: as much as the schedule says, and no more.

The ledger (traffic.py) checks this for every cell of test_exactness.py, too.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import traffic
from side_by_side import sgd, squares
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.core import schedule
from sp_lightning.memory import layout

BLOCKS = 8
uniform = models.stack_of(models.Block, BLOCKS)  # and a small stem and head, which are resident


@contextlib.contextmanager
def streaming(make, device, **options):
    torch.manual_seed(0)
    module = make()
    with sp_lightning.stream(module, device, **options) as handle:
        yield module, handle


def train(module, device, loss=squares, stepping=True, steps=1):
    """Steps of training on the same batch, which is on the device already; the loss stays there."""
    x = models.vectors(0)[0].to(device)
    optimizer = sgd(module)
    for _ in range(steps):
        if stepping:
            optimizer.zero_grad()
        loss(module, x).backward()
        if stepping:
            optimizer.step()


def added(handle, run):
    """What the counters gained while `run` ran."""
    before = handle.stats()
    run()
    after = handle.stats()
    return {name: after[name] - before[name] for name in ("fetches", "bytes_up", "bytes_down", "bytes_written_back")}


def blocks_of(handle):
    return [unit for unit in handle.units if not unit.resident]


def gradient_nbytes(parameters):
    return sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)


# --- Up


@pytest.mark.parametrize("window", range(1, BLOCKS + 1))
@pytest.mark.few(3)
def test_a_training_step_fetches_each_unit_twice_less_the_window_and_the_root_once(device, window):
    with streaming(uniform, device, window=window) as (net, handle):
        train(net, device, steps=2)
        step = added(handle, lambda: train(net, device))
        block, root = handle.units[0].nbytes, handle.units[-1].nbytes
    assert step["fetches"] == 2 * BLOCKS - window + 1
    assert step["bytes_up"] == (2 * BLOCKS - window) * block + root


@pytest.mark.parametrize("window", [1, 2, 5, BLOCKS])
@pytest.mark.few(3)
def test_what_is_resident_stays_between_micro_batches(device, window):
    with streaming(uniform, device, window=window) as (net, handle):
        train(net, device, stepping=False)
        step = added(handle, lambda: train(net, device, stepping=False))
    # Forward begins with the units with which backward ended; with one place, the turn is the only unit visited twice.
    assert step["fetches"] == 2 * (BLOCKS - window)


@pytest.mark.parametrize("window", [1, 2, 5, BLOCKS])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_fetches_what_an_order_that_starts_again_needs(device, window, context):
    with streaming(uniform, device, window=window) as (net, handle), context():
        x = models.vectors(0)[0].to(device)
        for _ in range(3):
            net(x)
        step = added(handle, lambda: [net(x) for _ in range(3)])
    order = 6 * list(range(BLOCKS))
    both = len(schedule.loads([1] * BLOCKS, order, window, wrap=True))
    first = len(schedule.loads([1] * BLOCKS, order[: 3 * BLOCKS], window, wrap=True))
    assert step["fetches"] == both - first
    assert step["fetches"] == 0 or window < BLOCKS


def test_a_tied_weight_travels_in_one_unit(device):
    with streaming(lambda: models.TokenStack(tied=True), device, window=1) as (_, handle):
        names = [name for unit in handle.units for name, _ in unit.params]
    assert names.count("embedding.weight") == 1 and "head.weight" not in names


@pytest.mark.few(1)
def test_recomputation_fetches_nothing_more(device):
    with streaming(uniform, device, window=2, activations="recompute") as (net, handle):
        train(net, device, steps=2)
        step = added(handle, lambda: train(net, device))
    assert step["fetches"] == 2 * BLOCKS - 2 + 1


# --- Down


def test_gradients_that_exist_come_down_once(device):
    with streaming(uniform, device, window=2) as (net, handle):
        step = added(handle, lambda: train(net, device))
        assert step["bytes_down"] == gradient_nbytes(net.parameters()) == sum(4 * p.numel() for p in net.parameters())


def test_frozen_units_send_no_gradients_and_a_frozen_prefix_is_not_fetched_for_backward(device):
    with streaming(models.frozen_prefix, device, window=1) as (net, handle):
        train(net, device)
        step = added(handle, lambda: train(net, device))
        trainable = [p for p in net.parameters() if p.requires_grad]
        assert step["bytes_down"] == sum(4 * p.numel() for p in trainable)
        frozen = [unit for unit in blocks_of(handle) if not unit.trainable]
        root, block = handle.units[-1], blocks_of(handle)[0]
        assert len(frozen) == 2 and root.resident
        # Forward fetches four blocks; backward has the last one, fetches the third, and needs no other.
        stepped = (len(blocks_of(handle)) + 1) * block.nbytes + root.nbytes
        assert step["bytes_up"] == stepped


def test_a_unit_sends_the_gradients_of_its_trainable_part_alone(device):
    with streaming(models.stack_of(models.AdaptedBlock, 4), device, window=2) as (net, handle):
        step = added(handle, lambda: train(net, device))
        trainable = [p for p in net.parameters() if p.requires_grad]
        assert 0 < step["bytes_down"] == sum(4 * p.numel() for p in trainable)
        assert 4 * step["bytes_down"] < sum(4 * p.numel() for p in net.parameters())


def test_experts_that_get_no_row_send_nothing(device):
    with streaming(models.stack_of(models.ExpertBlock, 3), device, window=2) as (net, handle):
        step = added(handle, lambda: train(net, device, stepping=False))
        missing = [p for p in net.parameters() if p.grad is None]
        assert missing and step["bytes_down"] == gradient_nbytes(net.parameters())


@pytest.mark.parametrize("block", [models.RescalingBlock, models.DataRescalingBlock])
def test_weights_come_down_only_where_the_model_wrote_them(device, block):
    with streaming(models.stack_of(block, 4), device, window=1) as (net, handle):
        step = added(handle, lambda: train(net, device))
        assert step["bytes_written_back"] == 4 * 4 * net.blocks[0].weight.numel()
        assert step["bytes_down"] == gradient_nbytes(net.parameters())


class Shifted(models.Stack):
    """Blocks within a module that has a weight of its own, whose unit is visited as long as they run."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.shift = nn.Parameter(torch.zeros(models.WIDTH))

    def run(self, x):
        return super().run(x + self.shift)


def test_what_blocks_save_goes_down_also_within_a_module_with_a_weight_of_its_own(device):
    offloaded = []
    for kind in (models.Stack, Shifted):
        make = functools.partial(kind, [models.Block() for _ in range(4)])
        with streaming(make, device, activations="offload") as (net, handle):
            train(net, device)
            offloaded.append(handle.stats()["bytes_offloaded"])
    assert offloaded[0] == offloaded[1] > 0


class InParts(models.Stack):
    """Calls what its blocks consist of, as models do that run two towers side by side."""

    def run(self, x):
        for block in self.blocks:
            x = x + block.down(block.up(x))
        return x


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("kind", [models.Stack, Shifted, InParts])
def test_activations_that_an_option_does_not_reach_are_named_once(kind, activations, device, caplog):
    make = functools.partial(kind, [models.Block() for _ in range(4)])
    with streaming(make, device, activations=activations, units=["Block"]) as (net, _), torch.no_grad():
        net(models.vectors(0)[0].to(device))  # nothing is saved here
        with torch.enable_grad():
            train(net, device, steps=3)
    said = [message for message in caplog.messages if "does not reach" in message]
    if kind is InParts and activations != "keep":
        assert [message.split(", because")[0] for message in said] == [
            f"superpipeline: activations={activations!r} does not reach blocks.0 and 3 more"
        ]
    else:
        assert said == []


class Distilled(models.Stack):
    """Runs its first blocks without autograd, as a frozen teacher runs beside a student."""

    def run(self, x):
        with torch.no_grad():
            taught = self.blocks[1](self.blocks[0](x))
        for block in self.blocks[2:]:
            x = block(x)
        return x + taught


def test_activations_of_a_unit_that_runs_without_autograd_are_not_said_to_be_out_of_reach(device, caplog):
    make = functools.partial(Distilled, [models.Block() for _ in range(4)])
    with streaming(make, device, activations="recompute") as (net, _):
        train(net, device)
    assert not [message for message in caplog.messages if "does not reach" in message]


# --- As the device saw it


def copies(traced):
    """Bytes copied up and down."""
    return [sum(op.nbytes for op in traced if op.name == f"copy {way}") for way in ("H2D", "D2H")]


@pytest.mark.simgpu
@pytest.mark.parametrize("name", ["mlp", "tied_embedding", "adapters", "dropout", "spectral_norm"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_no_byte_crosses_that_is_not_counted(name, activations):
    import simgpu

    case, device = models.case(name), torch.device("simgpu", 0)
    with streaming(case.make, device, window=2, activations=activations) as (net, handle):
        batch = torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), case.batch(0))
        before = handle.stats()
        with simgpu.trace() as traced:
            case.loss(net, batch).backward()
        after = handle.stats()
        moved = {key: after[key] - before[key] for key in before if key.startswith("bytes_")}
        gaps = layout.ALIGNMENT * sum(p.grad is not None for p in net.parameters())  # gradients come down as one
    up, down = copies(traced)
    assert up == moved["bytes_up"] + moved["bytes_brought_back"]
    assert 0 <= down - moved["bytes_down"] - moved["bytes_offloaded"] < gaps
    assert moved["bytes_down"] == gradient_nbytes(net.parameters())
    assert bool(moved["bytes_offloaded"]) == (activations == "offload")


# --- The ledger sees what is not as it should be


def ledger_of(monkeypatch, fault):
    """The check of one run into which `fault` put something."""
    ledger, case = traffic.Ledger(), models.case("mlp")
    fault(monkeypatch)
    with ledger.listening():
        make = functools.partial(models.ZooModule, case)
        parity.record(make, parity.streaming_strategy("cpu", window=2))
    gradients = {f"net.{name}": 4 * p.numel() for name, p in case.make().named_parameters()}
    return lambda: traffic.assert_streamed(ledger, [gradients] * 4, writes=False)


def test_the_ledger_accepts_a_good_run(monkeypatch):
    ledger_of(monkeypatch, lambda monkeypatch: None)()


def fetch_twice(monkeypatch):
    from sp_lightning.memory.device_copy import DeviceCopy

    wait_load = DeviceCopy.wait_load
    monkeypatch.setattr(
        DeviceCopy,
        "wait_load",
        lambda c: (setattr(c.counters, "bytes_up", c.counters.bytes_up + c.nbytes), wait_load(c)),
    )


def send_more_gradients(monkeypatch):
    from sp_lightning.gradients.way_down import GradientReturn

    receive = GradientReturn.receive

    def receive_more(gradient_return, store, *args):
        gradient_return.counters.bytes_down += 1
        return receive(gradient_return, store, *args)

    monkeypatch.setattr(GradientReturn, "receive", receive_more)


def write_weights_back(monkeypatch):
    from sp_lightning.memory.device_copy import DeviceCopy

    free = DeviceCopy.free
    monkeypatch.setattr(DeviceCopy, "free", lambda c: (setattr(c.counters, "bytes_written_back", 8), free(c)))


@pytest.mark.parametrize("fault", [fetch_twice, send_more_gradients, write_weights_back])
@pytest.mark.few(1)
def test_the_ledger_refuses_a_run_that_moves_more(monkeypatch, fault):
    with pytest.raises(AssertionError):
        ledger_of(monkeypatch, fault)()
