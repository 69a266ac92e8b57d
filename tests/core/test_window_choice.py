"""``window="auto"`` and ``transfer="auto"``: decisions from made-up numbers, and runs on the simulated accelerator."""

import copy
import dataclasses
import importlib.util
import logging
import pathlib
import re
import sys
import time

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sp_lightning
from sp_lightning.core.machine import Machine
from sp_lightning.core.window_choice import (
    DeviceBudget,
    Times,
    UnitMs,
    UnitNumbers,
    choose,
    largest_window,
    sizes_of,
    times_of,
)
from sp_lightning.memory.device import DeviceMemoryError
from sp_lightning.runtime.recorder import UnitTimes

simgpu = pytest.importorskip("simgpu")
SIMGPU = torch.device("simgpu", 0)
KIB, MIB = 2**10, 2**20
ONE = Machine("one", 1e12, 1e9, 1e9, 1, 1e11, device_nbytes=2**30, host_nbytes=2**36)
BAR = 0.95  # of the best
BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "auto_window.py"


def units(*sizes):
    return [UnitNumbers(f"unit {i}", size, size) for i, size in enumerate(sizes)]


def times(count=8, overlap=True, **ms):
    one = UnitMs(**{"up": 1, "forward": 1, "backward": 2, "down": 1, "step": 1, **ms})
    return Times((one,) * count, overlap)


# ---- decisions


def test_the_largest_window_leaves_the_reserve_and_what_others_took():
    memory = DeviceBudget(capacity=1000, others=400)
    assert memory.reserve == 50
    assert memory.most(units(*[100] * 8)) == 5  # of 550 bytes
    assert memory.most(units(*[10] * 8)) == 8
    assert DeviceBudget(capacity=100, others=100).most(units(10, 10)) == 1  # without one unit nothing runs


def test_a_window_that_hides_everything_is_not_made_larger():
    assert choose(times(), most=8).window == 2


def test_where_every_way_up_counts_as_much_stays_as_fits():
    found = choose(times(up=20, down=0.1, step=0.1), most=6)
    assert found.window == 6


def test_a_window_within_2_percent_of_the_fastest_is_enough():
    slow = times(up=3, forward=1, backward=2)
    found = choose(slow, most=8)
    fastest = slow.step_ms(8, 1)
    assert found.ms <= 1.02 * fastest
    assert found.window == 2 or slow.step_ms(found.window - 1, 1) > 1.02 * fastest


def test_what_the_user_chose_is_kept():
    assert choose(times(), most=8, window=5).window == 5
    assert choose(times(), most=8, window=5, transfer=3)[:2] == (5, 3)


SHAPES = {
    "slow link": {"up": 12, "forward": 3, "backward": 6, "down": 8, "step": 2},
    "slow optimizer": {"up": 3, "forward": 3, "backward": 6, "down": 3, "step": 20},
    "small memory": {"up": 8, "forward": 5, "backward": 10, "down": 5, "step": 2},
    "everything fits": {"up": 3, "forward": 8, "backward": 16, "down": 3, "step": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [3, 12])
@pytest.mark.few(2)
def test_on_four_shapes_of_a_machine_the_choice_is_within_2_percent_of_the_best(shape, most):
    measured = times(count=12, **SHAPES[shape])
    swept = min(measured.step_ms(k, kk) for k in range(1, most + 1) for kk in range(1, k + 1))
    assert choose(measured, most).ms <= 1.02 * swept


def test_a_step_that_may_run_on_is_counted_as_one():
    slow = times(step=6)
    assert dataclasses.replace(slow, runs_on=True).step_ms(2, 1) < 0.9 * slow.step_ms(2, 1)


def test_a_large_unit_behind_small_ones_wants_a_larger_transfer():
    small, large = UnitMs(1, 5, 10, 1, 0), UnitMs(30, 5, 10, 1, 0)
    uneven = Times((small, small, small, small, small, large) * 2, overlap=True)
    found = choose(uneven, most=6, window=6)
    assert found.ms == min(uneven.step_ms(6, transfer) for transfer in (1, 2, 4))


def test_the_choice_is_never_far_from_that_of_a_sweep():
    for ms in ({"up": 4}, {"step": 9}, {"down": 6, "up": 2}, {"forward": 0.1, "backward": 0.2}, {"overlap": False}):
        made_up = times(**ms)
        swept = min(made_up.step_ms(k, kk) for k in range(1, 9) for kk in range(1, k + 1))
        assert choose(made_up, most=8).ms <= 1.03 * swept, ms


def test_units_alike_share_the_median_and_three_digits():
    names = "a", "b", "c"
    sizes = [*(UnitNumbers(name, 8, 8) for name in names), UnitNumbers("root", 4, 4, resident=True)]
    measured = {
        name: UnitTimes(unit=name, forward_s=s) for name, s in (("root", 1), ("a", 0.0012345), ("b", 1), ("c", 0))
    }
    found = times_of(sizes, measured, overlap=False, runs_on=True)
    assert [unit.forward for unit in found.units] == [1000, 1.23, 1.23, 1.23]
    assert [unit.resident for unit in found.units] == [True, False, False, False]
    assert str(found) == (
        "1 x 0/1000/0/0/0 resident, 3 x 0/1.23/0/0/0 ms up/forward/backward/down/step after backward and beside forward"
    )


def test_without_times_of_streamed_units_there_are_none():
    assert times_of(units(1), {"another": UnitTimes(unit="another")}, overlap=True) is None


def test_sizes_are_listed_the_largest_first():
    assert sizes_of(units(1, 2, 1, 3)) == "1 x 3, 1 x 2, 2 x 1"


# ---- runs by hand


WIDTH = 256
UNIT = WIDTH * WIDTH * 4


class Wide(nn.Module):
    """A block that saves as many activations as its input has rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def train(net, handle, rows, seen=None, runs_on=False):
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for count in rows:
        with handle.steps.overlapping(optimizer, lambda: runs_on):
            net(torch.ones(count, WIDTH, device=SIMGPU)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        if seen is not None:
            seen.append(handle.stats()["window"])


def stack(count=8):
    torch.manual_seed(0)
    return nn.Sequential(*(Wide() for _ in range(count)))


def streamed(rows, capacity=None, **options):
    """The windows after each step."""
    net, seen = stack(), []
    if capacity is not None:
        simgpu.config.capacity = torch.accelerator.memory_allocated() + capacity
    with sp_lightning.stream(net, SIMGPU, units=["Wide"], **options) as handle:
        train(net, handle, rows, seen)
    return seen


def test_it_starts_from_one_unit_and_grows_fourfold_at_most():
    assert streamed([64] * 4)[:3] == [1, 4, 8]


SMALL, LARGE = 256, 1024  # rows: 256 KiB and 1 MiB of activations for each block
GROWING = [SMALL] * 4 + [LARGE]


@pytest.fixture
def tight():
    """Room for three units beside what a large batch takes, and the reserve."""
    before = torch.accelerator.memory_allocated()
    streamed([LARGE], window=1)
    others = torch.accelerator.max_memory_allocated() - before - UNIT
    simgpu.reset()
    return int((others + 3.5 * UNIT) / 0.95)


def test_a_large_window_runs_out_of_memory_when_activations_grow(tight):
    with pytest.raises(torch.OutOfMemoryError):
        streamed(GROWING, tight, window=8)


def test_when_activations_grow_the_window_shrinks_before_the_memory_is_gone(tight, caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        seen = streamed(GROWING, tight)
    assert seen[-2] == 8 > seen[-1] >= 1
    assert re.search(r"activations rise [34]\.\d\d times as fast as in the pass before", caplog.text)
    assert "out of device memory" not in caplog.text


def test_a_window_that_shrank_for_a_large_batch_does_not_grow_back_over_it(tight):
    seen = streamed([*GROWING, SMALL, SMALL, LARGE, SMALL, LARGE], tight)
    assert max(seen[4:]) <= 3


def test_growing_and_shrinking_change_no_bit(tight):
    def trained(capacity, **options):
        net = stack()
        simgpu.config.capacity = torch.accelerator.memory_allocated() + capacity
        with sp_lightning.stream(net, SIMGPU, units=["Wide"], **options) as handle:
            train(net, handle, [*GROWING, SMALL])
        return list(net.parameters())

    expected = trained(tight, window=1)
    assert all(map(torch.equal, trained(tight), expected))


def test_the_first_pass_fits_where_a_single_unit_does(tight):
    assert streamed([LARGE] * 3, int((tight - 2 * UNIT) / 1.05))[-1] >= 1
    simgpu.reset()
    with pytest.raises(torch.OutOfMemoryError):
        streamed([LARGE] * 3, int((tight - 2 * UNIT) / 1.05), window=4)


def test_every_decision_follows_from_the_numbers_that_it_prints(caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        streamed([64] * 9, capacity=6 * UNIT + 4 * 64 * WIDTH * 8)
    first, *lines = [record.getMessage() for record in caplog.records if "window" in record.getMessage()]
    assert first.startswith(
        "superpipeline: starts with window 1 and transfer 1: the memory of activations is not known before the first "
        f"pass, units 8 x {UNIT}; the device has "
    )
    assert lines
    for line in lines:
        most, capacity, others, reserve = map(
            int, re.search(r"at most (\d+) fit, as of (\d+) bytes (\d+) for others and (\d+) in reserve", line).groups()
        )
        sizes = re.search(r"units ([\dx ,]+)", line)[1].rstrip(", ").split(", ")
        given = units(*(int(size) for text in sizes for size in [text.split(" x ")[1]] * int(text.split(" x ")[0])))
        assert largest_window(given, capacity - reserve - others) == most
        timed = re.search(r"ms predicted, [\d.]+ with window (\d+) and transfer (\d+), from (.*) ms up/\S+(.*)", line)
        if timed:
            runs = [run.split(" x ") for run in timed[3].split(", ")]
            read = Times(
                tuple(UnitMs(*map(float, ms.split("/"))) for n, ms in runs for _ in range(int(n))),
                overlap="after backward" not in timed[4],
                runs_on="beside forward" in timed[4],
            )
            assert choose(read, most)[:2] == (int(timed[1]), int(timed[2]))


@pytest.mark.parametrize("runs_on", [False, True])
@pytest.mark.few(1)
def test_decisions_count_with_steps_that_run_on_where_they_do(runs_on, monkeypatch, caplog):
    sgd = importlib.import_module("torch.optim.sgd")  # torch.optim has no attribute of that name
    plain = sgd.sgd
    monkeypatch.setattr(sgd, "sgd", lambda *args, **options: (time.sleep(0.005), plain(*args, **options)))
    simgpu.config.h2d_us = 3000
    net = stack()
    with caplog.at_level(logging.INFO, "sp_lightning"), sp_lightning.stream(net, SIMGPU, units=["Wide"]) as handle:
        train(net, handle, [64] * 6, runs_on=runs_on)
    assert ("up/forward/backward/down/step and beside forward" in caplog.text) is runs_on
    assert "up/forward/backward/down/step" in caplog.text


def test_a_fixed_window_is_left_alone_while_the_transfer_is_chosen(caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        assert set(streamed([64] * 8, window=3)) == {3}
    assert all("window 3 -> 3" in r.getMessage() for r in caplog.records if "window" in r.getMessage())


def test_a_budget_s_window_follows_from_the_numbers_that_are_printed(caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        assert set(streamed([64] * 2, memory_budget=6 * UNIT)) == {4}
    said = (
        f"starts with window 4 and transfer 1: of a budget of {6 * UNIT} bytes, 0 are for the resident root and "
        f"{2 * UNIT} for gradients"
    )
    assert said in caplog.text


def test_it_starts_from_a_plan_and_keeps_to_it_until_it_has_measured(caplog):
    plan = sp_lightning.plan(
        stack, torch.zeros(64, WIDTH), device="simgpu", device_memory=10 * UNIT, units=["Wide"], machine=ONE
    )
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 11 * UNIT
    net, seen = stack(), []
    with caplog.at_level(logging.INFO, "sp_lightning"), sp_lightning.stream(net, SIMGPU, units=["Wide"]) as handle:
        handle.resume(plan.chosen, "as planned")
        train(net, handle, [64] * 4, seen)
    assert 1 < plan.window < 8 and set(seen[:3]) == {plan.window}
    assert re.search(
        rf"window 1 -> {plan.window}, transfer 1 -> 1: as planned; at most \d fit, as of \d+ bytes", caplog.text
    )


def test_of_a_plan_it_starts_from_as_much_as_fits():
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 6 * UNIT
    with sp_lightning.stream(stack(), SIMGPU, units=["Wide"]) as handle:
        handle.resume({"window": 8, "transfer": 4, "others_nbytes": 3 * UNIT}, "as planned")
        assert (handle.stats()["window"], handle.stats()["transfer"]) == (2, 2)


@pytest.mark.parametrize("resumed", [None, {"window": 1, "transfer": 1, "others_nbytes": 100 * UNIT}])
def test_memory_of_a_resumed_run_with_larger_batches_counts_until_this_one_has_measured(resumed):
    simgpu.config.capacity, seen = torch.accelerator.memory_allocated() + 12 * UNIT, []
    with sp_lightning.stream(stack(), SIMGPU, units=["Wide"]) as handle:
        if resumed:
            handle.resume(resumed)
        train(handle.module, handle, [8] * 6, seen)
        assert (set(seen[:3]) == {1}) is bool(resumed) and seen[-1] > 1
        assert handle.chosen()["others_nbytes"] < 12 * UNIT  # which the next run resumes with


def test_measuring_ends_when_it_has_decided():
    net = stack()
    with sp_lightning.stream(net, SIMGPU, units=["Wide"]) as handle:
        train(net, handle, [64] * 3)
        assert type(handle._counters.listener).__name__ == "Recorder"
        train(net, handle, [64] * 6)
        assert type(handle._counters.listener).__name__ == "StepListener"


def test_gradients_that_find_no_room_take_a_waiting_unit_s():
    net = stack(4)
    with sp_lightning.stream(net, SIMGPU, units=["Wide"]) as handle:
        train(net, handle, [8] * 3)
        assert handle.stats()["window"] == 4
        net(torch.ones(8, WIDTH, device=SIMGPU)).sum()
        simgpu.config.capacity = torch.accelerator.memory_allocated() + UNIT // 2
        storage = torch.empty(0, dtype=torch.uint8, device=SIMGPU).untyped_storage()
        handle.device.claim(storage, UNIT)
        assert storage.nbytes() == UNIT and handle.stats()["window"] == 3


def test_with_a_fixed_window_they_find_none():
    net = stack(4)
    with sp_lightning.stream(net, SIMGPU, units=["Wide"], window=4) as handle:
        train(net, handle, [8] * 2)
        simgpu.config.capacity = torch.accelerator.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            handle.device.claim(torch.empty(0, dtype=torch.uint8, device=SIMGPU).untyped_storage(), UNIT)


# ---- the model's own code runs out of memory


class Sudden(nn.Module):
    """Takes a lot at once, in forward or in backward, as logits do."""

    def __init__(self, nbytes, backward=False):
        super().__init__()
        self.nbytes, self.backward = nbytes, backward

    def forward(self, x):
        if self.backward and x.requires_grad:
            x.register_hook(lambda grad: self._take() and None)
        elif not self.backward:
            self._take()
        return x

    def _take(self):
        return torch.empty(self.nbytes, dtype=torch.uint8, device=SIMGPU)


def test_what_no_pass_showed_beforehand_is_an_error_that_says_what_makes_room():
    net = nn.Sequential(stack(), Sudden(0))
    with sp_lightning.stream(net, SIMGPU, units=["Wide"], window=2) as handle:
        train(net, handle, [64] * 7)
        simgpu.config.capacity = torch.accelerator.memory_allocated() + 4 * UNIT
        net[1].nbytes = 100 * UNIT
        said = (
            r"out of memory.*\nsuperpipeline: of [\d.]+ MiB on simgpu:0, the window of 2 took 512.00 KiB, and "
            r"activations, gradients, buffers and all else [\d.]+ KiB; to make room: activations='recompute' "
            r"\(each forward runs twice.*\); window=1 \(256.00 KiB less; .*\); batches of half the size and"
        )
        with pytest.raises(DeviceMemoryError, match=said):
            train(net, handle, [64])


def test_who_catches_that_error_goes_on_with_half_the_window(caplog):
    net, seen = nn.Sequential(stack(), Sudden(0)), []
    with sp_lightning.stream(net, SIMGPU, units=["Wide"]) as handle:
        train(net, handle, [64] * 3, seen)
        simgpu.config.capacity, net[1].nbytes = torch.accelerator.memory_allocated() + 4 * UNIT, 100 * UNIT
        with pytest.raises(torch.OutOfMemoryError):
            train(net, handle, [64])
        net[1].nbytes = 0
        train(net, handle, [64] * 2, seen)
    assert seen[2] == 8 and max(seen[3:]) <= 4
    assert re.search(r"out of device memory in the model's own code; window [78] -> [34]", caplog.text)


def test_units_of_blocks_are_said_to_have_parts():
    net = nn.Sequential(*(nn.Sequential(Wide(), Wide()) for _ in range(3)), Sudden(100 * UNIT))
    with sp_lightning.stream(net, SIMGPU, units=["Sequential"], activations="recompute", window=1):
        simgpu.config.capacity = torch.accelerator.memory_allocated() + 4 * UNIT
        said = r"room: activations='recompute\+offload' .*; batches of half .*; units=\['Wide'\] \(a window and grad"
        with pytest.raises(DeviceMemoryError, match=said):
            net(torch.ones(4, WIDTH, device=SIMGPU))


# ---- checkpoints


class Stack(L.LightningModule):
    def __init__(self, net=None):
        super().__init__()
        self.net = net or stack()

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def test_in_backward_it_is_the_same_error():
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 20 * UNIT
    with pytest.raises(DeviceMemoryError, match=r"the window of 1 took .* to make room: activations='recompute'"):
        fit(1, net=nn.Sequential(stack(), Sudden(100 * UNIT, backward=True)))


def fit(steps, device="simgpu", ckpt_path=None, net=None, **options):
    importlib.import_module("simgpu.lightning")
    strategy = sp_lightning.SuperpipelineStrategy(units=["Wide"], **options)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator=device, devices=1, strategy=strategy, max_steps=steps, **quiet)
    trainer.fit(Stack(net), DataLoader([torch.ones(16, WIDTH)] * 20, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def test_a_resumed_run_starts_from_what_was_chosen(caplog):
    first = fit(3)
    first.save_checkpoint("auto.ckpt")
    chosen = first.strategy.handle.stats()["window"]
    assert chosen == 8
    with caplog.at_level(logging.INFO, "sp_lightning"):
        resumed = fit(4, ckpt_path="auto.ckpt")
    assert "window 1 -> 8, transfer 1 -> 1: as in the run that is resumed" in caplog.text
    assert resumed.strategy.handle.stats()["window"] == 8


def test_a_copy_of_the_trainer_starts_from_what_was_chosen(caplog):
    copied = copy.deepcopy(fit(3))
    copied.fit_loop.epoch_loop.max_steps = 4
    with caplog.at_level(logging.INFO, "sp_lightning"):
        copied.fit(Stack(None), DataLoader([torch.ones(16, WIDTH)] * 20, batch_size=None))
    assert "window 1 -> 8, transfer 1 -> 1: as in the run that is resumed" in caplog.text


def test_it_starts_from_less_where_there_is_less_memory(caplog):
    fit(3).save_checkpoint("auto.ckpt")
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 5 * UNIT + 400 * KIB
    with caplog.at_level(logging.INFO, "sp_lightning"):
        fit(5, ckpt_path="auto.ckpt")
    resumed = re.search(r"window 1 -> (\d), transfer 1 -> 1: as in the run that is resumed", caplog.text)
    assert 2 <= int(resumed[1]) < 8


def test_a_fixed_window_is_not_resumed_and_leaves_nothing_in_the_checkpoint():
    fit(3).save_checkpoint("auto.ckpt")
    fixed = fit(4, ckpt_path="auto.ckpt", window=2, transfer=1)
    assert fixed.strategy.handle.stats()["window"] == 2
    fixed.save_checkpoint("fixed.ckpt")
    assert "SuperpipelineCallback" not in str(torch.load("fixed.ckpt")["callbacks"])


def test_on_the_cpu_nothing_is_chosen_nor_stored():
    trainer = fit(3, "cpu")
    trainer.save_checkpoint("cpu.ckpt")
    assert trainer.strategy.handle.stats()["window"] == 2
    assert torch.load("cpu.ckpt")["callbacks"] == {}


# ---- against a sweep


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["slow link", "slow optimizer", "small memory", "everything fits"])
def test_auto_reaches_the_best_of_a_sweep_within_ten_steps(shape):
    spec = importlib.util.spec_from_file_location("auto_window", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["auto_window"] = benchmark
    spec.loader.exec_module(benchmark)
    found = benchmark.compare(benchmark.SHAPES[shape], units=6, steps=10, turns=8, enough=BAR)
    assert found["share"] >= BAR, found
