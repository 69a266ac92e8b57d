"""A test in which the simulated device saw a race fails."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_a_race_fails_the_test_that_has_it_and_no_other(tmp_path):
    source = """
        import simgpu
        import torch

        def race():
            x, side = torch.ones(8, device="simgpu"), torch.Stream(device="simgpu")
            torch.accelerator.synchronize()
            with side:
                x.add_(1)
            return x + 1

        def test_raced():
            race()

        def test_began_clean():
            assert not simgpu.races()

        def test_took_its_races():
            race()
            assert simgpu.races()
    """
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(source))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", TESTS.parent / "pyproject.toml", "-rA"]
    command += ["--rootdir", tmp_path, tmp_path / "test_inner.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    status, output = done.returncode, done.stdout + done.stderr
    assert "3 passed, 1 error" in output and "ERROR test_inner.py::test_raced" in output and status == 1
    assert "simgpu race: " in output
