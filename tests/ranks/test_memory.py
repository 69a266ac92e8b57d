"""Weights, gradients and optimizer state exist once, however many ranks there are."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import loops
import processes
import pytest

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "ranks_memory.py"


def benchmark():
    spec = importlib.util.spec_from_file_location("ranks_memory", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("case", ["made in __init__", "configure_model", "resumed", "accumulated", "clipped"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_together_need_what_is_planned(size, case, tmp_path):
    """Of a model that is large beside the 30 MB that each rank's threads keep for pieces of sums and of steps."""
    width = 512 if size == 1 else 768 if (size, case) == (4, "accumulated") else 1024
    found = benchmark().run(size, case, 32, width, str(tmp_path))
    for phase, terms in found["expected"].items():
        measured, expected = found["phases"][phase], sum(terms.values())
        assert 0.95 * expected < measured < 1.05 * expected, f"{phase}: {measured / 1e6:.0f} MB, {terms}"


def test_a_run_that_ended_maps_its_weights_alone():
    for weights, before, after in processes.run(2, loops.mapped_after_close):
        assert after < 2.2 * weights < before  # their truth and their face


@pytest.mark.seldom
def test_no_rank_has_all_of_the_state_while_it_is_loaded(tmp_path):
    for state, most in processes.run(2, loops.grown_by_a_resume, str(tmp_path / "of.ckpt")):
        assert most < 0.25 * state, (state, most)


SCRIPT = "import loops, processes; print(processes.run(2, loops.use_of_shm, 2048))"
MOUNTED = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
LIMITED = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNTED, "sh"]


@pytest.mark.slow
def test_a_model_trains_beside_a_small_dev_shm_and_leaves_it_empty():
    """As in a container of docker, which limits it to 64 MB."""
    if subprocess.run([*LIMITED, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*LIMITED, sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for weights, used in eval(done.stdout.splitlines()[-1]):
        assert weights > 64 << 20 and used == 0
