"""What the package promises before any of it is used: what an import costs, where things lie, README's commands."""

import fnmatch
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[1]
OPTIONAL = ("transformers", "torchvision", "matplotlib")


def python(source):
    """The output of a fresh interpreter; it may cache bytecode, as a user's does."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- import


def test_import_takes_less_than_a_sixtieth_of_what_torch_and_lightning_take():
    """Each child forked from a process that has imported those measures a first import, in time of its own CPU.
    What else the machine does only ever adds to it, and to theirs; 60 ms beside 3.6 s."""
    output = python("""
        import os
        import time

        begin = time.process_time()
        import lightning.pytorch
        import torch
        print(time.process_time() - begin, flush=True)

        for _ in range(5):
            if not os.fork():
                begin = time.process_time()
                import sp_lightning
                print(time.process_time() - begin, flush=True)
                os._exit(0)
            os.wait()
    """)
    theirs, *ours = [float(line) for line in output.split()]
    assert len(ours) == 5 and min(ours) < theirs / 60, (theirs, ours)


def new_optional_modules(source):
    return python(f"""
        import contextlib
        import io
        import runpy
        import sys

        import lightning.pytorch

        before = set(sys.modules)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            {source}
        assert "sp_lightning" in sys.modules
        print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in {OPTIONAL}))
    """).strip()


def test_import_brings_no_optional_package():
    assert new_optional_modules("import sp_lightning") == "[]"


def test_help_brings_no_optional_package():
    source = "sys.argv[1:] = ['--help']; runpy.run_module('sp_lightning', run_name='__main__')"
    assert new_optional_modules(source) == "[]"


def test_import_registers_the_strategy_and_does_nothing_else():
    output = python("""
        import logging
        import os
        import warnings

        import lightning.pytorch
        import torch
        from lightning.pytorch.strategies import StrategyRegistry

        def world():
            threads, seed, dtype = torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype()
            handlers = len(logging.getLogger().handlers)
            return dict(os.environ), threads, seed, dtype, handlers, list(warnings.filters)

        before, strategies = world(), set(StrategyRegistry)
        import sp_lightning
        print(sorted(set(StrategyRegistry) - strategies), world() == before)
    """)
    assert output.strip() == "['superpipeline'] True"


# ---- layout


def test_top_level_holds_what_a_stranger_expects():
    expected = {"sp_lightning", "examples", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "LICENSE"}
    expected |= {"CHANGELOG.md", "CONTRIBUTING.md", ".ci", ".git", ".gitignore", ".pre-commit-config.yaml"}
    ignored = (ROOT / ".gitignore").read_text().split()
    found = {path.name for path in ROOT.iterdir()}
    assert {name for name in found - expected if not any(fnmatch.fnmatch(name, i) for i in ignored)} == set()
    assert expected - found <= {".git"}


def test_contributing_fits_on_a_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 40


# ---- README's two command lines


def list_commands(root):
    return subprocess.run([root / ".ci/run", "--list"], stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path):
    """As much of a clone as ``.ci/run --list`` reads."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    return tmp_path


def test_ci_runs_the_first_two_commands_of_the_readme():
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    first_two = [block.removeprefix("bash\n").strip() for block in blocks[:2]]
    assert list_commands(ROOT).stdout.splitlines() == first_two
    assert all("pip install -e" in line for line in first_two)
    assert first_two[0].endswith("python examples/quickstart.py") and first_two[1].endswith("pytest -n auto")


def test_ci_follows_the_readme(clone):
    readme = clone / "README.md"
    readme.write_text(readme.read_text().replace("pytest -n auto", "pytest -n auto --changed"))
    assert list_commands(clone).stdout.splitlines()[1].endswith("pytest -n auto --changed")


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("<!-- ci: test -->", "", "README.md has no fenced command line after '<!-- ci: test -->'"),
        ("<!-- ci: run -->", "<!-- ci: run -->\nsome text", "no fenced command line after '<!-- ci: run -->'"),
        ("pytest -n auto", "true\npytest -n auto", "more than one command line after '<!-- ci: test -->'"),
    ],
)
def test_ci_refuses_a_readme_whose_commands_it_cannot_tell(clone, old, new, said):
    readme = clone / "README.md"
    readme.write_text(readme.read_text().replace(old, new, 1))
    done = list_commands(clone)
    assert said in done.stderr and done.returncode == 1


# ---- the guide


def test_the_guide_names_every_wait_of_the_runtime():
    spec = importlib.util.spec_from_file_location("race_deletions", ROOT / "benchmarks" / "race_deletions.py")
    deletions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deletions)
    caught = [(wait, deletions.Verdict(1, "")) for wait in deletions.waits(ROOT / "sp_lightning")]
    begin, end = deletions.MARKS
    assert deletions.GUIDE.read_text().split(begin)[1].split(end)[0].strip() == deletions.summary(caught)
