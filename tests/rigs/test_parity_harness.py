"""The harness catches wrong runs, each by name, and finds nothing wrong with right ones."""

import itertools
import logging
import math
import types

import daily
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import parity
from models import Case, ZooModule, case
from parity import Difference, Entry, Record, compare, pairwise, record

ACCELERATORS = ["cpu", pytest.param("simgpu", marks=pytest.mark.simgpu)]


class TraitNet(nn.Module):
    """Small, with one of each: a buffer that forward updates, dropout, an unused parameter, rows without gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, rows):
        return self.head(self.drop(self.norm(self.embedding(rows))))


def trait_batch(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, 9, (6,), generator=generator), torch.randint(3, (6,), generator=generator)


TRAITS = Case(
    "traits",
    TraitNet,
    trait_batch,
    lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
    lambda net, batch: net(batch[0]),
)


class LineSearching(ZooModule):
    """Its optimizer calls the closure, and with it training_step, several times per batch."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def run(kind=SingleDeviceStrategy, accelerator="cpu", make=TRAITS, optimizer="adamw", **options):
    strategy = kind(device=parity.device_of(accelerator))
    return record(lambda: ZooModule(make, optimizer=optimizer), strategy, accelerator=accelerator, **options)


def difference_of(kind, **options):
    with pytest.raises(Difference) as caught:
        compare(run(**options), run(kind, **options))
    return str(caught.value)


def tampering(**overrides):
    """A SingleDeviceStrategy that does something wrong: `method=function(strategy, proceed)`.

    `proceed()` is plain Lightning's method; the function returns what the method returns.
    """

    def method(name, tamper):
        def wrong(self, *args, **kwargs):
            return tamper(self, lambda: getattr(SingleDeviceStrategy, name)(self, *args, **kwargs))

        return wrong

    return type(
        "Tampering", (SingleDeviceStrategy,), {name: method(name, tamper) for name, tamper in overrides.items()}
    )


def batch_of(strategy):
    return strategy.lightning_module.trainer.fit_loop.epoch_loop.total_batch_idx


def parameter_of(strategy, name):
    return strategy.lightning_module.get_parameter(name)


# --- Right runs


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"see": "backward", "epochs": 2, "batches": 2},
        {"accumulate": 2, "clip": ("norm", 0.1)},
        {"clip": ("value", 0.01), "optimizer": "sgd"},
        {"optimizer": "two"},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
@pytest.mark.few(1)
def test_two_plain_runs_are_equal(accelerator, options):
    compare(run(accelerator=accelerator, **options), run(accelerator=accelerator, **options))


@pytest.mark.slow
def test_a_run_is_recorded_in_time_order():
    entries = run(batches=2, accumulate=2).entries
    assert list(dict.fromkeys(entry.where for entry in entries)) == [
        "validation batch 0",
        "validation batch 1",
        "validation 0",
        "batch 0",
        "batch 1",
        "validation batch 2",
        "validation batch 3",
        "validation 1",
        "after fit",
        "prediction 0",
        "prediction 1",
    ]
    kinds = [entry.what.split(" ")[0] for entry in entries if entry.where == "batch 0"]
    order = ["RNG", "loss", "buffer", "RNG", "gradient", "parameter"]
    assert [kind for kind, _ in itertools.groupby(kinds)] == order
    after = {entry.what.split(" ")[0] for entry in entries if entry.where == "after fit"}
    assert after == {"parameter", "buffer", "optimizer", "RNG"}


def test_observing_adds_no_callback():
    class Callbacks(SingleDeviceStrategy):
        seen = None

        def on_train_start(self):
            callbacks = self.lightning_module.trainer.callbacks
            Callbacks.seen = [type(c) for c in callbacks if type(c).__module__ == parity.__name__]

    run(Callbacks)
    assert Callbacks.seen == []
    run(Callbacks, see="backward")
    assert Callbacks.seen == [parity.GradientsAfterBackward]


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.few(1)
def test_observing_leaves_the_order_in_which_units_are_stepped(accelerator, caplog):
    """Else the comparison would be with an order that users do not get."""
    with caplog.at_level(logging.INFO, "sp_lightning"):
        telemetry = parity.check(TRAITS, {"window": 1}, accelerator=accelerator)
    assert telemetry["fetches"] > 0
    assert "the optimizer steps after backward" not in caplog.text


@pytest.mark.simgpu
def test_what_is_on_the_device_is_kept_without_waiting_for_it():
    import simgpu

    tensor = torch.ones(4, device="simgpu")
    parity.keep(tensor + tensor)  # the first call of an operator always waits
    with simgpu.hold():
        kept = parity.keep(tensor + tensor)  # a wait would never end
    assert kept.cpu().equal(torch.full((4,), 2.0))


# --- Wrong runs


def test_a_dropped_gradient_is_named():
    def drop(strategy, proceed):
        result = proceed()
        if batch_of(strategy) == 1:
            parameter_of(strategy, "net.head.weight").grad = None
        return result

    found = difference_of(tampering(backward=drop))
    assert found == "batch 1: gradient of net.head.weight: a tensor of shape (3, 8) != None"


def test_a_gradient_dropped_in_the_last_batch_is_named():
    def drop(strategy, proceed):
        result = proceed()
        if batch_of(strategy) == 3:
            parameter_of(strategy, "net.norm.bias").grad = None
        return result

    found = difference_of(tampering(backward=drop))
    assert found == "batch 3: gradient of net.norm.bias: a tensor of shape (8,) != None"


def test_a_stale_weight_is_named():
    def lose_update(strategy, proceed):
        weight = parameter_of(strategy, "net.head.bias")
        before = weight.detach().clone()
        result = proceed()
        if batch_of(strategy) == 2:
            weight.data.copy_(before)
        return result

    found = difference_of(tampering(optimizer_step=lose_update))
    assert found.startswith("batch 2: parameter net.head.bias: 3 of 3 elements differ, first at (0,): ")


def test_an_overwritten_accumulation_is_named():
    def overwrite(strategy, proceed):
        if batch_of(strategy) == 3:
            parameter_of(strategy, "net.norm.weight").grad = None
        return proceed()

    found = difference_of(tampering(backward=overwrite), accumulate=2)
    assert found.startswith("batch 3: gradient of net.norm.weight: 8 of 8 elements differ, first at (0,): ")


@pytest.mark.parametrize(
    "name, draw",
    [
        ("torch", lambda: torch.rand(1)),
        ("python", lambda: parity.random.random()),
        ("numpy", lambda: parity.numpy.random.rand()),
    ],
)
@pytest.mark.few(2)
def test_one_random_number_too_many_is_named(name, draw):
    def draw_too_many(strategy, proceed):
        if batch_of(strategy) == 1:
            draw()
        return proceed()

    found = difference_of(tampering(backward=draw_too_many))
    assert found.startswith(f"batch 1: RNG state at the end of {name}: ")


def test_a_buffer_updated_twice_is_named():
    def update_twice(strategy, proceed):
        result = proceed()
        if batch_of(strategy) == 2:
            strategy.lightning_module.net.norm.running_mean.mul_(0.9)
        return result

    found = difference_of(tampering(backward=update_twice))
    assert found.startswith("batch 2: buffer net.norm.running_mean: 8 of 8 elements differ, first at (0,): ")


def test_zeroed_optimizer_state_is_named():
    def zero(strategy, proceed):
        strategy.optimizers[0].state[parameter_of(strategy, "net.embedding.weight")]["exp_avg"].zero_()
        return proceed()

    found = difference_of(tampering(on_train_end=zero))
    assert found.startswith("after fit: optimizer 0: exp_avg of net.embedding.weight: ")


def test_a_prediction_off_by_one_representable_number_is_named():
    def shift(strategy, proceed):
        output = proceed()
        output[4, 1] = torch.nextafter(output[4, 1], torch.tensor(torch.inf))
        return output

    found = difference_of(tampering(predict_step=shift))
    assert found.startswith("prediction 0: output: 1 of 18 elements differ, first at (4, 1): ")
    assert found.endswith(" (ulp 1)")


def test_a_wrong_validation_loss_is_named():
    def shift(strategy, proceed):
        mean = strategy.lightning_module.net.norm.running_mean
        before = mean.clone()
        mean.add_(1)
        result = proceed()
        mean.copy_(before)
        return result

    found = difference_of(tampering(validation_step=shift), num_sanity_val_steps=0)
    assert found.startswith("validation 0: metric val_loss: ")


def test_a_negative_zero_is_named():
    def negate(strategy, proceed):
        result = proceed()
        parameter_of(strategy, "net.embedding.weight").grad[0, 5].neg_()  # a row that no batch looks up
        return result

    found = difference_of(tampering(backward=negate))
    assert found == (
        "batch 0: gradient of net.embedding.weight: 1 of 72 elements differ, first at (0, 5): 0 != -0 (ulp 0)"
    )


@pytest.mark.simgpu
def test_a_wrong_run_on_the_simulated_accelerator_is_named():
    def scale(strategy, proceed):
        result = proceed()
        if batch_of(strategy) == 1:
            parameter_of(strategy, "net.blocks.1.down.weight").grad.mul_(1.5)
        return result

    found = difference_of(tampering(backward=scale), accelerator="simgpu", make=case("mlp"))
    assert found.startswith("batch 1: gradient of net.blocks.1.down.weight: ")


# --- check


def test_check_compares_plain_with_streaming_and_returns_its_telemetry(monkeypatch):
    class Handle:
        def stats(self):
            return {"fetches": 12}

    class Streaming(SingleDeviceStrategy):
        handle = Handle()

    made = []

    def streaming_strategy(accelerator, **options):
        made.append((accelerator, options))
        return Streaming(device=parity.device_of(accelerator))

    monkeypatch.setattr(parity, "streaming_strategy", streaming_strategy)
    assert parity.check(TRAITS, {"window": 2}, accumulate=2) == {"fetches": 12}
    assert made == [("cpu", {"window": 2})]


def test_check_raises_where_the_streaming_run_differs(monkeypatch):
    def scale(strategy, proceed):
        return proceed() * 2

    monkeypatch.setattr(parity, "streaming_strategy", lambda accelerator: tampering(training_step=scale)(device="cpu"))
    with pytest.raises(Difference, match=r"^batch 0: loss: "):
        parity.check(TRAITS, {})


# --- compare


def one(value, where="batch 0", what="x"):
    return Record([Entry(where, what, value)])


def bit_pattern(integer, dtype=torch.float32):
    signed = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.tensor([integer - 2 ** (8 * dtype.itemsize)], dtype=signed).view(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.tensor([], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        math.nan,
        None,
        "text",
    ],
    ids=str,
)
@pytest.mark.parametrize("bitwise", [True, False])
def test_equal_values_are_equal(value, bitwise):
    compare(one(value), one(value.clone() if isinstance(value, torch.Tensor) else value), bitwise=bitwise)


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected, actual, message",
    [
        (torch.ones(2), torch.ones(2).bfloat16(), "dtype torch.float32 != torch.bfloat16"),
        (torch.ones(2), torch.ones(1, 2), r"shape \(2,\) != \(1, 2\)"),
        (torch.eye(2), torch.eye(2).to_sparse(), "layout torch.strided != torch.sparse_coo"),
        (torch.eye(2).to_sparse(), torch.eye(2).mul(2).to_sparse(), r"2 of 2 elements differ, first at \(0,\): 1 != 2"),
        (torch.tensor(1.0), torch.tensor(1.0 + 2**-22), r"1 != 1\.00000024 \(ulp 2\)"),
        (torch.tensor(-(2**-149)), torch.tensor(2**-149), r"-1\.40129846e-45 != 1\.40129846e-45 \(ulp 2\)"),
        (bit_pattern(0xFFC00000), bit_pattern(0xFFFFFFFF), r"nan != nan \(bits 0xffc00000 != 0xffffffff\)"),
        (bit_pattern(0xFF80, torch.bfloat16), torch.ones(1).bfloat16(), r"-inf != 1 \(bits 0xff80 != 0x3f80\)"),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), r"1 of 2 elements differ, first at \(1,\): 2 != 5 \(off by 3\)"),
        (torch.tensor([True]), torch.tensor([False]), r"True != False \(off by -1\)"),
        (torch.tensor(1 + 2j), torch.tensor(1 + 3j), r"1 of 2 elements differ, first at \(1,\): 2 != 3"),
        (0.0, -0.0, r"0\.0 != -0\.0"),
        (1, 1.0, r"1 != 1\.0"),
        (None, torch.zeros(1), r"None != a tensor of shape \(1,\)"),
    ],
)
def test_what_differs_is_described(expected, actual, message):
    with pytest.raises(Difference, match=r"^batch 0: x: " + message):
        compare(one(expected), one(actual))


@pytest.mark.slow
def test_missing_unexpected_and_reordered_values_are_told_apart():
    first, second = Entry("batch 0", "a", 1), Entry("batch 1", "b", 2)
    with pytest.raises(Difference, match=r"^batch 0: a: missing$"):
        compare(Record([first, second]), Record([second]))
    with pytest.raises(Difference, match=r"^batch 1: b: missing$"):
        compare(Record([first, second]), Record([first]))
    with pytest.raises(Difference, match=r"^batch 0: a: not expected$"):
        compare(Record([second]), Record([first, second]))
    with pytest.raises(Difference, match=r"^batch 0: a: another order, found batch 1: b$"):
        compare(Record([first, second]), Record([second, first]))
    with pytest.raises(Difference, match=r"^batch 0: a: another order, found batch 0: a$"):
        compare(Record([first]), Record([first, first]))


@pytest.mark.slow
def test_rounding_is_relative_to_the_largest_element():
    expected = torch.tensor([1000.0, 1e-3])
    compare(one(expected), one(expected + 0.3), bitwise=False)
    with pytest.raises(Difference, match=r"^batch 0: x: 2 of 2 elements differ, .*, more than 0\.345$"):
        compare(one(expected), one(expected + 0.4), bitwise=False)
    with pytest.raises(Difference, match="2 of 2 elements differ"):
        compare(one(expected), one(expected + 0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected, actual",
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0])),
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0, math.nan])),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.zeros(2), torch.tensor([0.0, 1e-30])),
        (1.0, 1.01),
    ],
)
def test_rounding_forgives_nothing_else(expected, actual):
    with pytest.raises(Difference):
        compare(one(expected), one(actual), bitwise=False)


# --- pairwise

AXES = {"window": [1, 2, "auto"], "clip": [None, ("norm", 0.1)], "units": [["A"], {}], "see": list("abcd"), "one": [0]}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pairwise_covers_every_pair(count):
    axes = dict(list(AXES.items())[:count])
    rows = pairwise(**axes)
    for (one_name, one_values), (other_name, other_values) in itertools.combinations(axes.items(), 2):
        for pair in itertools.product(one_values, other_values):
            assert any((row[one_name], row[other_name]) == pair for row in rows)
    for name, values in axes.items():
        assert all(any(row[name] == value for row in rows) for value in values)
    assert all(list(row) == list(axes) for row in rows)


def test_a_product_keeps_each_value_in_the_default_run():
    axes = {"a": [1, 2], "b": [True, False], "c": ["x", "y"]}
    names, rows = parity.product(**axes).args
    often = [row for row in rows if type(row) is tuple]
    rare = [row.values for row in rows if type(row) is not tuple and [mark.name for mark in row.marks] == ["slow"]]
    assert names == list(axes) and {*often, *rare} == set(itertools.product(*axes.values())) and len(rows) == 8
    assert often == [(1, True, "x"), (2, False, "y")]


def test_the_default_run_has_each_value_of_a_test_that_is_parametrized_several_times():
    ids = itertools.product(["cpu", "simgpu"], ["keep", "recompute", "offload"])
    items = [types.SimpleNamespace(callspec=types.SimpleNamespace(_idlist=list(each))) for each in ids]
    slow = [item.callspec._idlist for item in daily.not_needed(items)]
    often = [item.callspec._idlist for item in items if item.callspec._idlist not in slow]
    assert often == [["cpu", "recompute"], ["simgpu", "keep"], ["simgpu", "offload"]]


@pytest.mark.parametrize(
    "count, often",
    [
        (1, [["simgpu", 0]]),
        (2, [["cpu", 0], ["simgpu", 0]]),
        (3, [["cpu", 0], ["simgpu", 0], ["simgpu", 2]]),
        (9, list(map(list, itertools.product(["cpu", "simgpu"], range(4))))),
    ],
)
def test_few_of_a_tests_items_are_of_both_devices_and_apart(count, often):
    ids = itertools.product(["cpu", "simgpu"], range(4))
    items = [types.SimpleNamespace(callspec=types.SimpleNamespace(_idlist=list(each))) for each in ids]
    slow = daily.more_than_few(items, count)
    assert [item.callspec._idlist for item in items if item not in slow] == often
