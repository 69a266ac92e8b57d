"""A training step's way through the library does not get longer unnoticed. Whoever shortens it lowers the figures."""

from __future__ import annotations

import json

import forks
import pytest

CODE = """
import json, sys
import torch
torch.set_num_threads(1)  # else nothing is stepped beside other work
import step_trace
print(json.dumps(step_trace.trace(*json.loads(sys.argv[1]))))
"""
DEFAULT = ({}, None)
RECOMPUTE_AND_OFFLOAD = ({"activations": "recompute+offload"}, "bf16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, most_calls, most_changes, most_upward",  # as measured, and a little for other versions of torch
    [
        pytest.param(DEFAULT, 2470, 970, 33, id="default"),
        pytest.param(RECOMPUTE_AND_OFFLOAD, 4310, 1540, 81, id="recompute+offload in bf16-mixed"),
    ],
)
def test_a_step_takes_no_more_than_these(setting, most_calls, most_changes, most_upward):
    done = forks.run(CODE, json.dumps(setting))
    assert done.returncode == 0, done.stderr
    calls, changes, upward = json.loads(done.stdout)
    found = f"{calls} calls, {changes} changes of file, {upward} upward"
    assert calls <= most_calls and changes <= most_changes and upward <= most_upward, found
