"""How the suite uses the simulated device: skipped or failed where it cannot be built, clean and race-free per test."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

TESTS = pathlib.Path(__file__).parents[1]


def run_pytest(folder, source, *, ci=False, **env):
    """Runs ``source`` as the one test file of a session that has this suite's conftest; returns its output."""
    (folder / "test_inner.py").write_text(textwrap.dedent(source))
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_") and name != "CI"}
    env = {**outer, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **({"CI": "true"} if ci else {}), **env}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", TESTS.parent / "pyproject.toml", "-rA"]
    done = subprocess.run(
        [*command, "--rootdir", folder, folder / "test_inner.py"], env=env, cwd=folder, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


IMPORTS_SIMGPU = """
    import simgpu

    def test_runs_on_it():
        pass
"""
MARKED = """
    import pytest

    @pytest.mark.simgpu
    def test_runs_on_it():
        pass

    def test_does_not():
        pass
"""
WITHOUT_COMPILER = {"CXX": "/no/such/compiler"}
MISSING = "simgpu needs a C++20 compiler: '/no/such/compiler' ($CXX, else c++) is not on this machine"


@pytest.mark.slow
@pytest.mark.parametrize("source", [IMPORTS_SIMGPU, MARKED])
def test_without_a_compiler_ci_fails_with_the_reason(tmp_path, source):
    status, output = run_pytest(tmp_path, source, ci=True, SIMGPU_BUILD_DIR=str(tmp_path), **WITHOUT_COMPILER)
    assert "1 error" in output and "skipped" not in output and MISSING in output and status in (1, 2)


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
    status, output = run_pytest(tmp_path, source)
    assert "3 passed, 1 error" in output and "ERROR test_inner.py::test_raced" in output and status == 1
    assert "simgpu race: " in output
