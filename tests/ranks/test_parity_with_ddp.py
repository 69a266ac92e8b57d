"""Several devices train every net of the zoo, and families, as Lightning's own DDP does, to the last bit."""

import pytest
import ranked_parity
import ranked_runs
import torch
from families import FAMILIES

import models
import parity

pytestmark = [pytest.mark.simgpu, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CASES = [case for case in sorted(models.ZOO) if case not in ranked_parity.NOT_AS_DDP]
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


def check(case, row, size=2):
    """Compare one row of the cover, but for what Lightning refuses and what has no reference on the CPU."""
    row = dict(row)
    options = {name: row.pop(name) for name in ("window", "transfer", "activations")}
    options["transfer"] = min(options["transfer"], options["window"])
    if row["optimizer"] == "two":  # Lightning neither accumulates nor clips for who optimizes by hand
        row |= {"accumulate": 1, "clip": None}
    if "writes" in models.case(case).tags and "recompute" in options["activations"]:  # which is refused
        options["activations"] = "offload"
    # The simulated device's autocast has CUDA's lists of operators, and it draws from a generator of its own.
    if row["precision"] == "bf16-mixed" or "random" in models.case(case).tags:
        row["accelerator"] = "cpu"
    if row["optimizer"] == "lbfgs":
        row["clip"] = None  # which changes gradients between its closures
    ranked_parity.check(ranked_runs.fit, case, options, size=size, **row)


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)))
def test_two_ranks_train_the_zoo_as_ddp(number, case):
    check(case, COVER[2 * number % len(COVER)])
    check(case, COVER[(2 * number + 1) % len(COVER)])


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES[::3])))
def test_four_ranks_train_the_zoo_as_ddp_with_the_tree(number, case):
    check(case, COVER[5 * number % len(COVER)], size=4)


@pytest.mark.parametrize(("number", "name"), list(enumerate(list(FAMILIES)[::3])))
def test_two_ranks_train_families_as_ddp(number, name):
    for library in FAMILIES[name].case.tags:
        pytest.importorskip(library)
    under_ddp, _ = ranked_parity.plain(2, ranked_runs.fit, name, batches=2)
    states = [entry.value for entry in under_ddp.entries if entry.what == "RNG state after training_step of torch"]
    draws = not all(torch.equal(states[0], state) for state in states)  # the device would, from a generator of its own
    accelerator = "simgpu" if number % 2 and not draws else "cpu"
    ranked_parity.check(ranked_runs.fit, name, {"window": 2}, accelerator=accelerator, batches=2)
