"""The bytes of the device's memory that a dry run counts: what each operator moves, of a step, and of listed models."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sp_lightning.core.machine import MACHINES
from sp_lightning.options import Options
from sp_lightning.planning.listed_model import ListedModel
from sp_lightning.planning.shapes import SHAPES
from sp_lightning.planning.traced_model import TracedModel
from sp_lightning.planning.workloads import WORKLOADS
from sp_lightning.tracing.fake_tensors import FakeTensors
from sp_lightning.tracing.memory_tracker import MemoryTracker

MACHINE = MACHINES["h200"]
ROWS, WIDTH = 64, 256
WHOLE = 4 * ROWS * WIDTH  # bytes of a matrix in FP32
X, Y = (lambda: torch.randn(ROWS, WIDTH)), (lambda: torch.randn(ROWS, WIDTH))
INDICES = 8  # 64-bit integers


def counted(work, *made):
    """Return what an operator moves without FLOPs, and with them."""
    tally = MemoryTracker(lambda: "all")
    with (tensors := FakeTensors("cuda")):
        given = [make() for make in made]
        tensors.observe = tally.observe
        work(*given)
    return tally.visits[-1].other_nbytes, tally.visits[-1].moved_nbytes


CASES = {
    "a sum": (lambda x, y: x + y, (X, Y), 3 * WHOLE),
    "a sum in place": (lambda x, y: x.add_(y), (X, Y), 3 * WHOLE),
    "a square reads its one argument once for each place": (lambda x: x * x, (X,), 3 * WHOLE),
    "a sum with a row that repeats": (lambda x, y: x + y[:1].expand(ROWS, WIDTH), (X, Y), 2 * WHOLE + 4 * WIDTH),
    "a view": (lambda x: x.view(-1)[1:].T.unsqueeze(0), (X,), 0),
    "a view of what a product made": (lambda x: torch.ops.aten._unsafe_view(x, [-1]), (X,), 0),
    "a transposed copy": (lambda x: x.T.contiguous(), (X,), 2 * WHOLE),
    "memory without values": (lambda x: torch.empty_like(x), (X,), 0),
    "zeros": (lambda x: x.zero_(), (X,), WHOLE),
    "a copy into other memory": (lambda x, y: x.copy_(y), (X, Y), 2 * WHOLE),
    "copies in a list": (lambda x, y: torch._foreach_copy_([x, x], [y, y]), (X, Y), 4 * WHOLE),
    "a cast": (lambda x: x.bfloat16(), (X,), WHOLE + WHOLE // 2),
    "a mean of rows": (lambda x: x.mean(1), (X,), WHOLE + 4 * ROWS),
    "a table that is looked up": (
        lambda x: x[torch.zeros(4, dtype=torch.long)],
        (X,),
        4 * (2 * 4 * WIDTH + INDICES) + 8 * 4,
    ),
    "rows that are added to": (
        lambda x, y: x.index_add_(0, torch.zeros(4, dtype=torch.long), y[:4]),
        (X, Y),
        3 * 4 * 4 * WIDTH + 4 * INDICES + 8 * 4,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operator_moves_what_it_reads_and_what_it_writes(case):
    work, made, nbytes = CASES[case]
    assert counted(work, *made) == (nbytes, 0)


def test_a_product_s_bytes_are_apart():
    assert counted(lambda x, y: x @ y.T, X, Y) == (0, 2 * WHOLE + 4 * ROWS * ROWS)


def test_of_a_loss_logits_are_read_where_they_are_needed():
    labels = lambda: torch.zeros(ROWS, dtype=torch.long)  # noqa: E731
    loss = counted(lambda x, y: F.nll_loss(x, y), X, labels)[0]
    assert loss < WHOLE / 50
    tally = MemoryTracker(lambda: "all")
    with (tensors := FakeTensors("cuda")):
        x = X().requires_grad_()
        loss = F.nll_loss(x, labels())
        tensors.observe = tally.observe
        loss.backward()
    assert WHOLE < tally.visits[-1].other_nbytes < 1.1 * WHOLE  # the gradient is written


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def needs(precision, activations="keep", make=Stack, batch=None):
    batch = torch.zeros(ROWS, WIDTH) if batch is None else batch
    traced = TracedModel(make, batch, precision, "AdamW", "cuda", lambda module, given: module(given))
    return traced.needs(Options(activations=activations), MACHINE)


@pytest.mark.parametrize(
    "precision, forward, backward",
    [
        # relu reads and writes four times the width, the sum reads two and writes one; relu's backward reads two
        ("32-true", (8 + 3) * WHOLE, (12 + 3) * WHOLE),
        ("bf16-true", (8 + 3) * WHOLE / 2, (12 + 3) * WHOLE / 2),
        # x is cast, and what is added to it is half; its gradient is cast up and the sum's is cast down
        ("bf16-mixed", 8 * WHOLE / 2 + 2.5 * WHOLE + 1.5 * WHOLE, 12 * WHOLE / 2 + 3 * WHOLE + 2 * 1.5 * WHOLE),
    ],
)
def test_a_unit_moves_its_activations_and_packs_its_gradients_and_no_load_or_cast_of_weights_counts(
    precision, forward, backward
):
    block = needs(precision).costs[1]
    width = 4 if precision == "32-true" else 2
    assert block.forward_other == forward
    assert block.backward_other == backward + 2 * width * 8 * WIDTH * WIDTH  # gradients are read and packed


def test_recomputation_moves_forward_s_bytes_once_more():
    """A first forward that is recomputed copies its arguments, too."""
    keep, again = (needs("32-true", activations).costs[1] for activations in ("keep", "recompute"))
    assert again.forward_other == keep.forward_other + 2 * WHOLE
    assert again.backward_other == keep.backward_other + 8 * WHOLE  # the last sum is not needed


def test_their_time_comes_on_top_of_the_products_and_grows_with_the_batch():
    slow, fast = replace(MACHINE, device_bytes_per_s=1e9), replace(MACHINE, device_bytes_per_s=math.inf)
    few, many = (needs("32-true", batch=torch.zeros(rows, WIDTH)) for rows in (ROWS, 2 * ROWS))
    unit = few.costs[1]
    products = max(unit.forward_flops / slow.flops_per_s, unit.forward_moved / 1e9)
    assert unit.forward_s(slow) == products + unit.forward_other / 1e9 > products > unit.forward_s(fast)
    assert many.costs[1].forward_other == 2 * unit.forward_other
    assert sum(work.other_nbytes for work in few.works) == sum(
        cost.forward_other + cost.backward_other for cost in few.costs
    )


LISTED = {
    "llama": ("llama-8b", "llama3-8b", 2),
    "llama, tied": ("llama-1b", "llama-1b", 8),  # of fewer tokens the table, whose bytes are not listed, has a share
    "vit": ("vit-h", "vit-h", 8),
}


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("of", LISTED)
@pytest.mark.few(1)
def test_listed_models_move_what_a_dry_run_of_them_counts(of, precision):
    """Here for models of three layers; copies of gradients, which are not listed, are taken off."""
    pytest.importorskip("transformers")
    name, listed, rows = LISTED[of]
    shape = replace(SHAPES[name], layers=3)
    blocks = [part for part in WORKLOADS[listed].parts if part.name.startswith("block")]
    fewer = replace(WORKLOADS[listed], parts=tuple(p for p in WORKLOADS[listed].parts if p not in blocks[3:]))
    batch = shape.inputs(rows, shape.seq, torch.Generator())
    tokens = rows * (shape.seq if of != "vit" else 257)
    loss = lambda module, given: module(**given)  # noqa: E731
    traced = TracedModel(shape.make, batch, precision, "AdamW", "cuda", loss).needs(Options(), MACHINE)
    numbers = ListedModel(fewer, tokens, Options(), precision).needs(Options(), MACHINE)
    packed = sum(2 * cost.down_nbytes for cost in traced.costs)
    found = sum(cost.forward_other + cost.backward_other for cost in traced.costs) - packed
    assert sum(work.other_nbytes for work in numbers.works) == pytest.approx(found, rel=0.1)
