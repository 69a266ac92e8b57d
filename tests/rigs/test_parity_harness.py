"""The harness catches wrong runs, each by name, and finds nothing wrong with right ones."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import parity
from models import Case, ZooModule
from parity import Difference, Entry, Record, compare, pairwise, record


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


def run(strategy=None, accelerator="cpu", optimizer="adamw", **options):
    strategy = strategy or SingleDeviceStrategy(device=parity.device_of(accelerator))
    return record(lambda: ZooModule(TRAITS, optimizer=optimizer), strategy, accelerator=accelerator, **options)


@pytest.mark.simgpu
@pytest.mark.parametrize(
    ("accelerator", "options"),
    [
        ("cpu", {"see": "backward", "epochs": 2, "batches": 2}),
        ("simgpu", {"accumulate": 2, "clip": ("norm", 0.1)}),
        ("simgpu", {"optimizer": "two", "precision": "bf16-mixed"}),
    ],
)
def test_two_plain_runs_are_equal(accelerator, options):
    compare(run(accelerator=accelerator, **options), run(accelerator=accelerator, **options))


@pytest.mark.simgpu
def test_what_is_on_the_device_is_kept_without_waiting_for_it():
    import simgpu

    tensor = torch.ones(4, device="simgpu")
    parity.keep(tensor + tensor)  # the first call of an operator always waits
    with simgpu.hold():
        kept = parity.keep(tensor + tensor)  # a wait would never end
    assert kept.cpu().equal(torch.full((4,), 2.0))


class Wrong(NamedTuple):
    """A method that does something wrong in one batch, after the right one, and what is said of it."""

    method: str
    batch: int | None
    tamper: Callable
    said: str


def drop(net, result):
    net.head.weight.grad = None


def shift(net, result):
    result[4, 1] = torch.nextafter(result[4, 1], torch.tensor(torch.inf))


WRONG = {
    "a dropped gradient": Wrong(
        "backward", 1, drop, "batch 1: gradient of net.head.weight: a tensor of shape (3, 8) != None"
    ),
    "a gradient dropped in the last batch": Wrong(
        "backward", 3, drop, "batch 3: gradient of net.head.weight: a tensor of shape (3, 8) != None"
    ),
    "another weight": Wrong(
        "optimizer_step",
        2,
        lambda net, _: net.head.bias.data.mul_(2),
        "batch 2: parameter net.head.bias: 3 of 3 elements differ, first at (0,): ",
    ),
    "a random number": Wrong("backward", 1, lambda *_: torch.rand(1), "batch 1: RNG state at the end of torch: "),
    "a random number of Python": Wrong(
        "backward", 1, lambda *_: parity.random.random(), "batch 1: RNG state at the end of python: "
    ),
    "a random number of NumPy": Wrong(
        "backward", 1, lambda *_: parity.numpy.random.rand(), "batch 1: RNG state at the end of numpy: "
    ),
    "a buffer updated twice": Wrong(
        "backward",
        2,
        lambda net, _: net.norm.running_mean.mul_(0.9),
        "batch 2: buffer net.norm.running_mean: 8 of 8 elements differ, first at (0,): ",
    ),
    "a prediction off by one representable number": Wrong(
        "predict_step", None, shift, "prediction 0: output: 1 of 18 elements differ, first at (4, 1): "
    ),
    "a negative zero": Wrong(
        "backward",
        0,
        lambda net, _: net.embedding.weight.grad[0, 5].neg_(),  # a row that no batch looks up
        "batch 0: gradient of net.embedding.weight: 1 of 72 elements differ, first at (0, 5): 0 != -0 (ulp 0)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_run_is_named(name):
    wrong = WRONG[name]

    def method(self, *args, **kwargs):
        result = getattr(SingleDeviceStrategy, wrong.method)(self, *args, **kwargs)
        if wrong.batch in (None, self.lightning_module.trainer.fit_loop.epoch_loop.total_batch_idx):
            wrong.tamper(self.lightning_module.net, result)
        return result

    kind = type("Tampering", (SingleDeviceStrategy,), {wrong.method: method})
    with pytest.raises(Difference) as caught:
        compare(run(), run(kind(device="cpu")))
    assert str(caught.value).startswith(wrong.said)


def test_zeroed_optimizer_state_is_named():
    class Zeroing(SingleDeviceStrategy):
        def on_train_end(self):
            self.optimizers[0].state[self.lightning_module.net.embedding.weight]["exp_avg"].zero_()

    with pytest.raises(Difference, match="exp_avg of net"):
        compare(run(), run(Zeroing(device="cpu")))


def one(value):
    return Record([Entry("batch 0", "x", value)])


@pytest.mark.parametrize(
    "expected, actual, message",
    [
        (torch.ones(2), torch.ones(2).bfloat16(), "dtype torch.float32 != torch.bfloat16"),
        (torch.ones(2), torch.ones(1, 2), r"shape \(2,\) != \(1, 2\)"),
        (torch.eye(2), torch.eye(2).to_sparse(), "layout torch.strided != torch.sparse_coo"),
        (torch.eye(2).to_sparse(), torch.eye(2).mul(2).to_sparse(), r"2 of 2 elements differ, first at \(0,\): 1 != 2"),
        (torch.tensor(1.0), torch.tensor(1.0 + 2**-22), r"1 != 1\.00000024 \(ulp 2\)"),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), r"1 of 2 elements differ, first at \(1,\): 2 != 5 \(off by 3\)"),
        (torch.tensor(1 + 2j), torch.tensor(1 + 3j), r"1 of 2 elements differ, first at \(1,\): 2 != 3"),
        (torch.tensor(math.nan), torch.tensor(1.0), r"nan != 1 \(bits 0x7fc00000 != 0x3f800000\)"),
        (0.0, -0.0, r"0\.0 != -0\.0"),
        (1, 1.0, r"1 != 1\.0"),
        (None, torch.zeros(1), r"None != a tensor of shape \(1,\)"),
    ],
)
def test_what_differs_is_described(expected, actual, message):
    for value in (expected, actual):
        compare(one(value), one(value.clone() if isinstance(value, torch.Tensor) else value))
    with pytest.raises(Difference, match=r"^batch 0: x: " + message):
        compare(one(expected), one(actual))


def test_missing_unexpected_and_reordered_values_are_told_apart():
    first, second = Entry("batch 0", "a", 1), Entry("batch 1", "b", 2)
    with pytest.raises(Difference, match=r"^batch 0: a: missing$"):
        compare(Record([first, second]), Record([second]))
    with pytest.raises(Difference, match=r"^batch 0: a: not expected$"):
        compare(Record([second]), Record([first, second]))
    with pytest.raises(Difference, match=r"^batch 0: a: another order, found batch 1: b$"):
        compare(Record([first, second]), Record([second, first]))


def test_pairwise_covers_every_pair():
    axes = {"window": [1, 2, "auto"], "clip": [None, ("norm", 0.1)], "units": [["A"], {}], "see": list("abcd")}
    rows = pairwise(**axes)
    for (one_name, one_values), (other_name, other_values) in itertools.combinations(axes.items(), 2):
        for pair in itertools.product(one_values, other_values):
            assert any((row[one_name], row[other_name]) == pair for row in rows)
