"""Fabric with several devices is Fabric with DDP, to the last bit."""

import processes
import pytest
import ranked_fabric
from ranked_parity import check


@pytest.mark.parametrize(
    ("loop", "device", "precision", "options"),
    [
        ("plainly", "cpu", "32-true", {"window": 2}),
        pytest.param("gan", "cpu", "bf16-mixed", {"window": "auto"}, marks=pytest.mark.slow),
        ("gan", "simgpu", "32-true", {"window": 1, "activations": "recompute"}),
        pytest.param("resuming", "cpu", "32-true", {"window": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.simgpu
def test_two_ranks_are_ddp(loop, device, precision, options):
    check(ranked_fabric.record, loop, options, device, precision=precision)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("copy", "UnsupportedError: a deep copy of what Fabric set up on several devices is not streamed"),
        ("part", "UnsupportedError: a module is set up on several devices that is a part of another one, which fabric"),
        ("optimizer", "UnsupportedError: on several devices an optimizer cannot step modules that were set up one by"),
    ],
)
def test_what_several_devices_cannot_do_is_said(what, said):
    for error in processes.run(2, ranked_fabric.refused, what):
        assert error.startswith(said), error
