"""What users combine with several devices gives the bits of Lightning's own DDP."""

import processes
import pytest
import ranked_features
import ranked_parity
import torch
from ranked_features import FEATURES

import parity

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
SLOW = pytest.mark.slow
OFTEN = "adversaries", "ema"
OPTIONS = [{"window": 1}, {"window": 2, "activations": "recompute"}, {"window": 3, "transfer": 2}, {}]


@pytest.mark.parametrize(
    ("number", "name"),
    [pytest.param(*one, marks=[] if one[1] in OFTEN else SLOW) for one in enumerate(sorted(FEATURES))],
)
def test_a_feature_is_as_under_ddp(number, name):
    """On the simulated device in every other case, with page-locked slabs and its checker of races."""
    accelerator = "cpu" if number % 2 else "simgpu"
    ranked_parity.check(ranked_features.run, name, OPTIONS[number % len(OPTIONS)], accelerator=accelerator)


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("simgpu", marks=SLOW)])
@pytest.mark.parametrize("precision, dtype", [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_master_weights_are_stepped_with_the_mean_in_fp32(precision, dtype, accelerator):
    """DDP has no master weights: the reference is a loop by hand."""
    expected = ranked_features.masters_by_hand("tied_embedding", dtype)
    for rank in processes.run(2, ranked_features.masters, "tied_embedding", precision, accelerator):
        for theirs, ours in zip(expected, rank, strict=True):
            assert not (wrong := parity.difference(theirs, ours)), wrong


@SLOW
@pytest.mark.parametrize(("size", "kind"), [(1, "BatchNorm1d"), (2, "SyncBatchNorm")])
def test_batch_norms_synchronise_only_in_fits_on_several_devices(size, kind):
    assert processes.run(size, ranked_features.synchronised_norms) == [(kind, False)] * size
