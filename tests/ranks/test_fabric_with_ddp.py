"""Fabric with several devices is Fabric with DDP, to the last bit."""

import processes
import pytest
import ranked_fabric
import torch
from ranked_parity import check


@pytest.mark.parametrize(
    ("loop", "device", "precision", "options"),
    [
        ("gan", "cpu", "bf16-mixed", {"window": "auto"}),
        ("gan", "simgpu", "32-true", {"window": 1, "activations": "recompute"}),
        pytest.param("resuming", "cpu", "32-true", {"window": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.simgpu
def test_two_ranks_are_ddp(loop, device, precision, options):
    check(ranked_fabric.record, loop, options, device, precision=precision)


def test_a_copy_of_what_several_devices_stream_is_refused():
    for error in processes.run(2, ranked_fabric.refused):
        assert error.startswith("UnsupportedError: a deep copy of what Fabric set up on several devices"), error


def test_no_part_of_a_module_exchanges_gradients_that_accumulate():
    first, second = processes.run(2, ranked_fabric.accumulated_around_parts)
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
