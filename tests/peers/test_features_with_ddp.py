"""What users combine with several devices gives the bits of Lightning's own DDP."""

import processes
import pytest
import ranked_features
import ranked_parity
import torch
from ranked_features import FEATURES

import parity

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow
DAILY = {
    "accumulation by hand",
    "averages of rank 0",
    "batch norm, accumulation",
    "edits, accumulation, clipping",
    "ema",
    "finetuning",
    "gathering in backward, dropped layers",
    "generation",
    "gradients never cleared, clipping",
    "gradients with other data",
    "hooks after steps",
    "kept gradients, zeros",
    "kept state",
    "late buffers",
    "odd parameters",
    "orders",
    "regulariser, accumulation",
    "schedulers",
    "skips, accumulation",
    "swa",
    "swapped data",
    "swapped state",
    "turned gradients",
    "weights of rank 0",
    "without state",
}
OPTIONS = [{"window": 1}, {"window": 2, "activations": "recompute"}, {"window": 3, "transfer": 2}, {}]


@pytest.mark.simgpu
@pytest.mark.parametrize(
    "name, number, accelerator",
    [
        pytest.param(name, number, accelerator, marks=[] if name in DAILY and accelerator == often else [SLOW])
        for number, name in enumerate(sorted(FEATURES))
        for often in [("cpu", "simgpu")[number % 2]]
        for accelerator in ["cpu"] + ["simgpu"] * (not FEATURES[name].on_the_cpu_only)
    ],
)
@pytest.mark.seldom
def test_a_feature_is_as_under_ddp(name, number, accelerator):
    """On the simulated device with page-locked slabs, and with its checker of races."""
    ranked_parity.check(ranked_features.run, name, OPTIONS[number % len(OPTIONS)], accelerator=accelerator)


SAID = {
    "state of one rank": r"wrote different optimizer state since.*rank 1 wrote that of net\.stem\.weight",
    "weights of one rank": r"wrote to different parameters since.*rank 1 wrote net\.stem\.weight",
    "backward by hand": "steps with gradients that were not exchanged",
    "replaced state of one rank": r"wrote different optimizer state.*rank 1 wrote that of .*\(exp_avg\)",
    "steps of one rank": r"wrote different optimizer state.*rank 1 has .*step=4\.0 of net\.stem\.weight and 0 others",
    "cleared state of one rank": r"wrote different optimizer state.*rank 1 has none of net\.stem\.weight and 0 others",
    "cast state of one rank": r"wrote different optimizer state.*rank 1 wrote that of net\.stem\.weight",
    "group of one rank": r"wrote different optimizer state.*rank 1 has .* of net\.blocks\.0\.up\.weight .* in group 0",
    "rate of one rank": r"gave their optimizers different options.*rank 1 steps with lr=\[0\.02",
    "cleared gradient of one rank": "changed gradients in different ways",
    "other data on each rank": r"wrote different values to weights that have other data.*wrote net\.stem\.weight",
    "other data of frozen weights": r"wrote different values to weights that have other data",
    "other data that one rank writes": r"wrote different values to weights that have other data",
    "weights of one rank, other units": r"wrote to different parameters since.*rank 1 wrote net\.stem\.weight",
}
GRADIENT = r"changed gradients in different ways since.*rank 1 changed net\.stem\.weight"


@pytest.mark.simgpu
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("simgpu", marks=SLOW)])
@pytest.mark.parametrize("precision, dtype", [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_master_weights_are_stepped_with_the_mean_in_fp32(precision, dtype, accelerator):
    """DDP has no master weights: the reference is a loop by hand."""
    expected = ranked_features.masters_by_hand("tied_embedding", dtype)
    for rank in processes.run(2, ranked_features.masters, "tied_embedding", precision, accelerator):
        for theirs, ours in zip(expected, rank, strict=True):
            assert not (wrong := parity.difference(theirs, ours)), wrong


@pytest.mark.parametrize(("size", "kind"), [(1, "BatchNorm1d"), (2, "SyncBatchNorm")])
@pytest.mark.seldom
def test_batch_norms_are_synchronised_in_a_fit_on_several_devices_alone(size, kind):
    assert processes.run(size, ranked_features.synchronised_norms) == [(kind, False)] * size
