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
def test_without_a_compiler_a_module_that_imports_simgpu_is_skipped_with_the_reason(tmp_path):
    status, output = run_pytest(tmp_path, IMPORTS_SIMGPU, SIMGPU_BUILD_DIR=str(tmp_path), **WITHOUT_COMPILER)
    assert "1 skipped" in output and MISSING in output and status == 5  # nothing else was collected


@pytest.mark.slow
def test_without_a_compiler_only_the_marked_test_is_skipped(tmp_path):
    status, output = run_pytest(tmp_path, MARKED, SIMGPU_BUILD_DIR=str(tmp_path), **WITHOUT_COMPILER)
    assert "1 passed, 1 skipped" in output and MISSING in output and status == 0


@pytest.mark.slow
@pytest.mark.parametrize("source", [IMPORTS_SIMGPU, MARKED])
def test_without_a_compiler_ci_fails_with_the_reason(tmp_path, source):
    status, output = run_pytest(tmp_path, source, ci=True, SIMGPU_BUILD_DIR=str(tmp_path), **WITHOUT_COMPILER)
    assert "1 error" in output and "skipped" not in output and MISSING in output and status in (1, 2)


@pytest.mark.slow
def test_sources_that_do_not_compile_fail_outside_ci_too(tmp_path):
    status, output = run_pytest(tmp_path, IMPORTS_SIMGPU, SIMGPU_BUILD_DIR=str(tmp_path), CXX="false")
    assert "1 error" in output and "simgpu_C" in output and "false -std=c++20" in output and status == 2


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


@pytest.mark.slow
def test_counters_peaks_and_config_start_anew(tmp_path):
    source = """
        import simgpu
        import torch

        def test_leaves_much():
            simgpu.config.capacity, simgpu.config.h2d_us = 1 << 20, 5
            torch.ones(1000, device="simgpu").cpu().pin_memory()

        def test_finds_nothing():
            assert (simgpu.config.capacity, simgpu.config.h2d_us) == (1 << 30, 0)
            assert torch.accelerator.max_memory_allocated() == 0
            assert simgpu.pinned_bytes() == (0, 0)
            assert simgpu.counts() == (0, 0)
    """
    status, output = run_pytest(tmp_path, source)
    assert "2 passed" in output and status == 0


@pytest.mark.slow
def test_an_error_in_queued_work_fails_the_test_that_queued_it_and_no_other(tmp_path):
    source = """
        import pytest
        import torch
        import torch.nn.functional as F

        @pytest.mark.simgpu
        def test_reads_beyond_a_table():
            table, index = torch.ones(4, 3, device="simgpu"), torch.zeros(5, dtype=torch.long, device="simgpu")
            F.embedding(index, table)  # from here on such a call is queued
            for stream in [torch.Stream(device="simgpu") for _ in range(2)]:
                stream.wait_stream(torch.accelerator.current_stream())
                with stream:
                    F.embedding(index + 9, table)
            torch.accelerator.current_stream().synchronize()

        def test_next():
            pass
    """
    status, output = run_pytest(tmp_path, source)
    assert "2 passed, 1 error" in output and "ERROR test_inner.py::test_reads_beyond_a_table" in output and status == 1


@pytest.mark.slow
def test_a_file_left_in_the_root_is_an_error_and_one_in_the_own_directory_is_not(tmp_path):
    source = f"""
        import pathlib

        def test_leaves_a_file():
            pathlib.Path({str(tmp_path)!r}, "left").touch()
            pathlib.Path("in_its_own_directory").touch()
    """
    status, output = run_pytest(tmp_path, source)
    assert "1 passed, 1 error" in output and f"a test left ['left'] in {tmp_path}" in output and status == 1


@pytest.mark.slow
def test_a_module_that_streams_on_is_an_error_and_so_is_a_check_that_can_not_find_out(tmp_path):
    source = """
        import sys

        import torch

        import models
        import sp_lightning
        from sp_lightning import handles as streams

        net = models.case("mlp").make()

        def test_hides_what_is_checked():
            sys.modules[streams.__name__] = None

        def test_streams_on():
            global handle
            sys.modules[streams.__name__] = streams
            handle = sp_lightning.stream(net, torch.device("cpu"))

        def test_closes_it():
            handle.close()
    """
    status, output = run_pytest(tmp_path, source)
    assert "3 passed, 2 errors" in output and status == 1
    assert "ERROR test_inner.py::test_hides_what_is_checked - ModuleNotFoundError" in output
    assert "ERROR test_inner.py::test_streams_on" in output and "a module still streams" in output
