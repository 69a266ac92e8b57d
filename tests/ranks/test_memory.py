"""Weights, gradients and optimizer state exist once, however many ranks there are."""

import importlib.util
import pathlib

import pytest

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "ranks_memory.py"


def benchmark():
    spec = importlib.util.spec_from_file_location("ranks_memory", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("case", ["made in __init__", "configure_model", "resumed"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_together_need_what_one_needs(size, case, tmp_path):
    found = benchmark().run(size, case, 32, 1024 if size == 2 else 512 if size == 1 else 768, str(tmp_path))
    for phase, terms in found["expected"].items():
        measured, expected = found["phases"][phase], sum(terms.values())
        assert measured < 1.1 * expected, f"{phase}: {measured / 1e6:.0f} MB, {terms}"
