"""Several devices train as Lightning's own DDP does, to the last bit, whatever the model does."""

import processes
import pytest
import ranked_parity
import ranked_runs
import torch
from families import FAMILIES

import models
import parity

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
SLOW = pytest.mark.slow
CASES = sorted(models.ZOO)
TRAITS = [case for case in CASES if case not in ranked_parity.NOT_AS_DDP]
OFTEN = ["batch_norm", "dropout", "mixture_of_experts", "skipped_block", "tied_embedding", "parameter_regulariser"]
COVER = parity.pairwise(
    window=[1, 2, 99],
    transfer=[1, 2],
    activations=["keep", "recompute", "offload", "recompute+offload"],
    accumulate=[1, 2],
    clip=[None, ("norm", 0.1), ("value", 0.01)],
    precision=["32-true", "bf16-mixed", "bf16-true"],
    optimizer=["adamw", "sgd", "adafactor", "lbfgs", "two", "adagrad"],
    accelerator=["cpu", "simgpu"],
)
FEW = list(range(0, len(FAMILIES), 3))


def check(case, row, size=2):
    """Compare one row of the cover, but for what Lightning refuses and what has no reference on the CPU."""
    row = dict(row)
    options = {name: row.pop(name) for name in ("window", "transfer", "activations")}
    options["transfer"] = min(options["transfer"], options["window"])
    if row["optimizer"] == "two":  # Lightning neither accumulates nor clips for who optimizes by hand
        row |= {"accumulate": 1, "clip": None}
    # The simulated device's autocast has CUDA's lists of operators, and it draws from a generator of its own.
    if row["precision"] == "bf16-mixed" or "random" in models.case(case).tags:
        row["accelerator"] = "cpu"
    if row["optimizer"] == "lbfgs":
        row["clip"] = None  # which changes gradients between its closures
    ranked_parity.check(ranked_runs.fit, case, options, size=size, **row)


def rows_for(cases, each, step=1):
    """Pair each case with so many rows, all rows in turn."""
    return [
        (case, (number * each + turn) * step % len(COVER)) for number, case in enumerate(cases) for turn in range(each)
    ]


@pytest.mark.parametrize("row", [pytest.param(row, marks=[SLOW] * (row % 3 > 0)) for row in range(len(COVER))])
@pytest.mark.few(1)
def test_two_ranks_are_ddp_in_every_setting(row):
    check(OFTEN[row % len(OFTEN)], COVER[row])


@pytest.mark.parametrize("case, row", [pytest.param(*cell, marks=SLOW) for cell in rows_for(TRAITS, 4)])
def test_two_ranks_are_ddp_for_every_trait(case, row):
    check(case, COVER[row])


@pytest.mark.parametrize("case, row", [pytest.param(*cell, marks=SLOW) for cell in rows_for(TRAITS[::2], 1, 5)])
def test_four_ranks_are_ddp_with_the_tree(case, row):
    check(case, COVER[row], size=4)


@pytest.mark.parametrize("index", [pytest.param(index, marks=SLOW, id=list(FAMILIES)[index]) for index in FEW])
def test_two_ranks_train_families_as_ddp(index):
    name = list(FAMILIES)[index]
    for library in FAMILIES[name].case.tags:
        pytest.importorskip(library)
    under_ddp, _ = ranked_parity.plain(2, ranked_runs.fit, name, batches=2)
    states = [entry.value for entry in under_ddp.entries if entry.what == "RNG state after training_step of torch"]
    draws = not all(torch.equal(states[0], state) for state in states)  # the device would, from a generator of its own
    accelerator = "simgpu" if index % 2 and not draws else "cpu"
    ranked_parity.check(ranked_runs.fit, name, {"window": 2}, accelerator=accelerator, batches=2)


@pytest.mark.parametrize(
    "case, equal", [("checkpoint_reentrant", "checkpoint"), ("llama_checkpoint_reentrant", "llama_checkpoint")]
)
@pytest.mark.seldom
def test_what_ddp_refuses_equals_what_it_trains(case, equal):
    """A reentrant checkpoint computes what the other kind does."""
    with pytest.raises(processes.RankFailed, match="marked as ready twice"):
        ranked_parity.plain(2, ranked_runs.fit, case)
    found = processes.run(2, ranked_runs.fit, case, {"window": 1})
    for theirs, ours in zip(ranked_parity.plain(2, ranked_runs.fit, equal), found, strict=True):
        parity.compare(theirs, ours)
