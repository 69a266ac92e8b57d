"""What the package promises before any of it is used: what an import costs, where things lie, README's commands."""

import ast
import fnmatch
import functools
import importlib.util
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OPTIONAL = ("transformers", "torchvision", "matplotlib")


def python(source):
    """The output of a fresh interpreter; it may cache bytecode, as a user's does."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- import


@functools.cache
def after_lightning():
    """What comes of each of these in a process of its own, in which torch and Lightning have been imported before."""
    output = python(f"""
        import contextlib
        import io
        import json
        import logging
        import os
        import runpy
        import sys
        import warnings

        import lightning.pytorch
        import torch
        from lightning.pytorch.strategies import StrategyRegistry

        def world():
            threads, seed, dtype = torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype()
            handlers = len(logging.getLogger().handlers)
            return dict(os.environ), threads, seed, dtype, handlers, list(warnings.filters)

        def run_import():
            import sp_lightning

        def run_help():
            sys.argv[1:] = ["--help"]
            runpy.run_module("sp_lightning", run_name="__main__")

        for run in (run_import, run_help):
            if not os.fork():
                modules, strategies, before = set(sys.modules), set(StrategyRegistry), world()
                with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                    run()
                assert "sp_lightning" in sys.modules
                optional = [name for name in set(sys.modules) - modules if name.split(".")[0] in {OPTIONAL}]
                found = optional, list(set(StrategyRegistry) - strategies), world() == before
                print(json.dumps([run.__name__, *found]), flush=True)
                os._exit(0)
            os.wait()
    """)
    return {name: found for name, *found in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("run", ["run_import", "run_help"])
@pytest.mark.slow
def test_neither_import_nor_help_brings_an_optional_package(run):
    optional, _, _ = after_lightning()[run]
    assert optional == []


@pytest.mark.slow
def test_import_registers_the_strategy_and_does_nothing_else():
    _, strategies, same = after_lightning()["run_import"]
    assert strategies == ["superpipeline"] and same


# ---- layout


def test_the_package_is_pickled_by_name():
    """As part of a function that is sent to another process."""
    import sp_lightning

    assert pickle.loads(pickle.dumps(sp_lightning)) is sp_lightning


def test_top_level_holds_what_a_stranger_expects():
    expected = {"sp_lightning", "examples", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "LICENSE"}
    expected |= {"CHANGELOG.md", "CONTRIBUTING.md", ".ci", ".git", ".github", ".gitignore", ".pre-commit-config.yaml"}
    expected |= {"mkdocs.yml", "hatch_build.py"}
    ignored = (ROOT / ".gitignore").read_text().split()
    found = {path.name for path in ROOT.iterdir()}
    assert {name for name in found - expected if not any(fnmatch.fnmatch(name, i) for i in ignored)} == set()
    assert expected - found <= {".git"}


# ---- README's two command lines


def ci(root, *arguments, **variables):
    """What .ci/run says and returns, with these variables in its environment."""
    env = {**os.environ, **variables}
    command = [root / ".ci/run", *arguments]
    return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def list_commands(root):
    return ci(root, "--list")


@pytest.fixture
def clone(tmp_path):
    """As much of a clone as ``.ci/run`` reads before it installs anything."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/run", "README.md", "CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_ci_runs_the_first_and_the_last_command_of_the_readme():
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    commands = [block.removeprefix("bash\n").strip() for block in blocks if block.startswith("bash\n")]
    assert list_commands(ROOT).stdout.splitlines() == [commands[0], commands[-1]]
    assert all("pip install -e" in line for line in (commands[0], commands[-1]))
    assert commands[0].endswith("python examples/quickstart.py") and commands[-1].endswith("pytest -n auto")


# ---- workflows and releases


def workflows():
    yaml = pytest.importorskip("yaml")
    return {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()}


def steps():
    return [step for workflow in workflows().values() for job in workflow["jobs"].values() for step in job["steps"]]


def test_workflows_run_nothing_but_ci():
    commands = {step["run"] for step in steps() if "run" in step}
    shard = ".ci/run --slow ${{ matrix.shard }}"
    assert commands == {".ci/run", ".ci/run --default", ".ci/run --dist", ".ci/run --site", shard}
    used = {step["uses"].partition("@")[0] for step in steps() if "uses" in step}
    assert {name for name in used if not name.startswith("actions/")} == {"pypa/gh-action-pypi-publish"}


def test_actions_are_pinned_to_a_commit_and_say_its_version():
    used = [
        line.split("uses: ")[1]
        for path in (ROOT / ".github/workflows").iterdir()
        for line in path.read_text().splitlines()
        if "uses: " in line
    ]
    assert len(used) > 10 and [name for name in used if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", name)] == []


def test_the_nightly_run_has_all_shards_of_the_slow_tests():
    (count,) = re.findall(r"^shards=(\d+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    job = workflows()["tests.yml"]["jobs"]["slow"]
    assert job["strategy"]["matrix"]["shard"] == [f"{number}/{count}" for number in range(1, int(count) + 1)]


@pytest.mark.parametrize("job", ["default", "versions"])
def test_the_matrix_begins_with_the_oldest_python_and_torch_that_the_package_supports(job):
    matrix = workflows()["tests.yml"]["jobs"][job]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == ["3.10", "3.11", "3.12", "3.13"] and 'requires-python = ">=3.10"' in project
    assert matrix["torch"] == ["2.11.*", ""] and '"torch>=2.11"' in project


@pytest.mark.parametrize(
    "tag, said",
    [
        ("v9.9", "the tag is v9.9, but pyproject.toml has version 1.2.3: expected v1.2.3"),
        ("v1.2.3", "CHANGELOG.md has no section '## [1.2.3]'"),
    ],
)
def test_a_tag_that_does_not_agree_with_version_and_changelog_builds_nothing(clone, tag, said):
    project = clone / "pyproject.toml"
    project.write_text(re.sub(r'(?m)^version = ".*"$', 'version = "1.2.3"', project.read_text()))
    done = ci(clone, "--dist", CI_TAG=tag)
    assert said in done.stderr and done.returncode == 1 and not (clone / "dist").exists()


def of_conftest(*names):
    """These functions of tests/conftest.py."""
    text = (ROOT / "tests/conftest.py").read_text()
    return "\n\n".join(
        ast.get_source_segment(text, node) for node in ast.parse(text).body if getattr(node, "name", "") in names
    )


SHARDED = f"""import zlib


{of_conftest("pytest_addoption", "keep_shard")}


def pytest_collection_modifyitems(config, items):
    keep_shard(config, items)
"""


@pytest.mark.slow
def test_each_slow_test_is_in_one_shard(tmp_path):
    names = [f"test_{number}" for number in range(40)]
    tests = "\n".join(f"@pytest.mark.slow\ndef {name}(): pass\n" for name in names)
    for path, text in {"conftest.py": SHARDED, "pytest.ini": "[pytest]\nmarkers = slow", "test_it.py": tests}.items():
        (tmp_path / path).write_text(f"import pytest\n{text}" if path == "test_it.py" else text)
    found = []
    for number in range(1, 5):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-v",
            "-m",
            "slow",
            "--shard",
            f"{number}/4",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        shard = re.findall(r"::(\w+) PASSED", done.stdout)
        assert 0 < len(shard) < len(names), done.stdout
        found += shard
    assert sorted(found) == sorted(names)


# ---- benchmarks/race_deletions.py


def test_the_waits_of_the_core_are_found():
    deletions = loaded(ROOT / "benchmarks" / "race_deletions.py")
    files = {wait.file for wait in deletions.waits(ROOT / "sp_lightning")}
    assert {"host/device.py", "stream/unit.py", "stream/residency.py", "optim/steps.py"} <= files
