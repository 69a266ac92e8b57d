"""What the package promises before any of it is used: what an import costs, where things lie, README's commands."""

import fnmatch
import importlib.util
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys

import pytest
from often import is_in_shard

ROOT = pathlib.Path(__file__).parents[2]
OPTIONAL = ("transformers", "torchvision", "matplotlib")


def python(source):
    """The output of a fresh interpreter; it may cache bytecode, as a user's does."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", source]
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


LOOK = """
import contextlib, io, json, logging, os, runpy, sys, warnings
import lightning.pytorch
import torch
from lightning.pytorch.strategies import StrategyRegistry

def world():
    threads, seed, dtype = torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype()
    handlers = len(logging.getLogger().handlers)
    return dict(os.environ), threads, seed, dtype, handlers, list(warnings.filters)

modules, strategies, before = set(sys.modules), set(StrategyRegistry), world()
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    {0}
assert "sp_lightning" in sys.modules
optional = [name for name in set(sys.modules) - modules if name.split(".")[0] in {1}]
print(json.dumps([optional, list(set(StrategyRegistry) - strategies), world() == before]))
"""
HELP = "sys.argv[1:] = ['--help']; runpy.run_module('sp_lightning', run_name='__main__')"


@pytest.mark.slow
def test_import_registers_the_strategy_and_does_nothing_else():
    """Neither does it bring an optional package."""
    assert json.loads(python(LOOK.format("import sp_lightning", OPTIONAL))) == [[], ["superpipeline"], True]


@pytest.mark.slow
def test_help_brings_no_optional_package():
    assert json.loads(python(LOOK.format(HELP, OPTIONAL)))[0] == []


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
def test_the_matrix_begins_with_the_oldest_supported_versions(job):
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
def test_a_tag_unlike_version_or_changelog_builds_nothing(clone, tag, said):
    project = clone / "pyproject.toml"
    project.write_text(re.sub(r'(?m)^version = ".*"$', 'version = "1.2.3"', project.read_text()))
    done = ci(clone, "--dist", CI_TAG=tag)
    assert said in done.stderr and done.returncode == 1 and not (clone / "dist").exists()


def test_each_test_is_in_one_shard():
    for name in map(str, range(40)):
        assert sum(is_in_shard(name, f"{number}/4") for number in range(1, 5)) == 1


# ---- benchmarks/race_deletions.py


def test_the_waits_of_the_core_are_found():
    deletions = loaded(ROOT / "benchmarks" / "race_deletions.py")
    files = {wait.file for wait in deletions.waits(ROOT / "sp_lightning")}
    assert {"host/device.py", "stream/unit.py", "stream/residency.py", "optim/unit_steps.py"} <= files
