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
PROCESSES = 6  # at most, of which the shortest way counts: on a busy machine, threads come to steps at other times
RECOMPUTE_AND_OFFLOAD = ({"activations": "recompute+offload"}, "bf16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, limits",  # as measured, and a little for other versions of torch: calls, changes of file, upward calls
    [
        pytest.param(DEFAULT, (2500, 955, 30), id="default"),
        pytest.param(RECOMPUTE_AND_OFFLOAD, (4300, 1515, 80), id="recompute+offload in bf16-mixed"),
    ],
)
def test_a_step_takes_no_more_than_these(setting, limits):
    ways = []
    for _ in range(PROCESSES):
        done = forks.run(CODE, json.dumps(setting))
        assert done.returncode == 0, done.stderr
        ways.append(json.loads(done.stdout))
        if all(least <= most for least, most in zip(map(min, *ways, ways[0]), limits, strict=True)):
            return
    pytest.fail(f"(calls, changes of file, upward calls) are {ways}, more than {limits}")
