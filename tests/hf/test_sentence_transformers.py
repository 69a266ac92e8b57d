"""The trainer of sentence-transformers leaves the same bits when its model streams, and so does ``encode``."""

from __future__ import annotations

import functools

import pytest
from hf_runs import compare
from hf_sentences import LOSSES, train


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("simgpu", marks=[pytest.mark.simgpu, pytest.mark.slow])], indirect=True
)
@pytest.mark.parametrize("loss", LOSSES)
def test_its_trainer_leaves_the_bits_of_the_stock_run(device, loss, tmp_path):
    found = compare(functools.partial(train, loss=loss), tmp_path)
    assert found["handles"] and found["fetches"][-1] > found["fetches"][0]
