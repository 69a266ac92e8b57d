"""What the package promises before any of it is used: what an import costs, where things lie, README's commands."""

import ast
import fnmatch
import functools
import importlib.util
import json
import os
import pathlib
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


@pytest.mark.slow
def test_import_makes_less_than_an_eightieth_of_the_calls_that_torch_and_lightning_make():
    """In calls of Python functions, which are the same under any load; 1/93 of theirs, about as much of the time."""
    output = python("""
        import importlib
        import sys

        def calls(*names):
            made = 0

            def count(frame, event, arg):
                nonlocal made
                made += event == "call"

            sys.setprofile(count)
            for name in names:
                importlib.import_module(name)
            sys.setprofile(None)
            return made

        print(calls("torch", "lightning.pytorch"), calls("sp_lightning"))
    """)
    theirs, ours = (int(count) for count in output.split())
    assert 1000 < ours < theirs / 80, (theirs, ours)


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


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--help", "plan --model llama-8b --machine rtx4090 --host-memory 256GiB"])
def test_a_command_that_makes_no_model_takes_a_fifth_of_the_import_more(command):
    """In processor time of one process, of which the shortest of three runs counts: the same under load."""
    output = python(f"""
        import contextlib
        import io
        import time

        begin = time.process_time()
        import sp_lightning
        imported = time.process_time() - begin
        from sp_lightning.cli import main

        def run():
            begin = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                main({command.split()})
            return time.process_time() - begin

        print(imported, min(run() for _ in range(3)))
    """)
    imported, ran = map(float, output.split())
    assert 0 < ran < 0.2 * imported, (imported, ran)


# ---- layout


def test_top_level_holds_what_a_stranger_expects():
    expected = {"sp_lightning", "examples", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "LICENSE"}
    expected |= {"CHANGELOG.md", "CONTRIBUTING.md", ".ci", ".git", ".github", ".gitignore", ".pre-commit-config.yaml"}
    expected |= {"mkdocs.yml", "hatch_build.py"}
    ignored = (ROOT / ".gitignore").read_text().split()
    found = {path.name for path in ROOT.iterdir()}
    assert {name for name in found - expected if not any(fnmatch.fnmatch(name, i) for i in ignored)} == set()
    assert expected - found <= {".git"}


def test_contributing_fits_on_a_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 40


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


def test_ci_runs_the_default_tests_as_the_readme_says_and_the_checks(clone):
    """Installed are commands that only say what they were called with."""
    tools = "mkdir -p .venv/bin && cp ruff mypy .venv/bin/ && echo pytest -n auto"
    for name in ("ruff", "mypy"):
        (clone / name).write_text(f"#!/bin/sh\necho {name} $*\n")
        (clone / name).chmod(0o755)
    readme = clone / "README.md"
    readme.write_text(readme.read_text().replace(list_commands(clone).stdout.splitlines()[1], tools))
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    done = ci(clone, "--default", CXX="true", CI_TORCH="")
    said = [line for line in done.stdout.splitlines() if line and not line.startswith("====")]
    assert said == ["pytest -n auto", "ruff check .", "ruff format --check .", "mypy"] and done.returncode == 0


def test_ci_needs_a_compiler_for_the_default_tests(clone):
    done = ci(clone, "--default", CXX="no-compiler")
    assert "a C++ compiler" in done.stderr and done.returncode == 1


# ---- workflows and releases


def workflows():
    yaml = pytest.importorskip("yaml")
    return {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()}


def steps():
    return [step for workflow in workflows().values() for job in workflow["jobs"].values() for step in job["steps"]]


def test_workflows_run_nothing_but_ci():
    commands = {step["run"] for step in steps() if "run" in step}
    shard = ".ci/run --slow ${{ matrix.shard }}"
    assert commands == {".ci/run", ".ci/run --quick", ".ci/run --default", ".ci/run --dist", ".ci/run --site", shard}
    used = {step["uses"].partition("@")[0] for step in steps() if "uses" in step}
    assert {name for name in used if not name.startswith("actions/")} == {"pypa/gh-action-pypi-publish"}


def test_workflows_set_variables_that_ci_reads():
    read = (ROOT / ".ci/run").read_text()
    for step in steps():
        assert all(name.startswith("PIP_") or f"${{{name}:-" in read for name in step.get("env", {})), step


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


def test_issues_ask_for_what_doctor_prints():
    (form,) = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir() if path.name == "wrong.yml"]
    assert "python -m sp_lightning doctor" in form.read_text()


def test_pull_requests_run_the_default_tests():
    job = workflows()["tests.yml"]["jobs"]["default"]
    assert job["if"] == "github.event_name == 'pull_request'" and job["steps"][-1]["run"] == ".ci/run --default"


@pytest.mark.parametrize("job", ["quick", "default", "versions"])
def test_the_matrix_begins_with_the_oldest_python_and_torch_that_the_package_supports(job):
    matrix = workflows()["tests.yml"]["jobs"][job]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == ["3.10", "3.11", "3.12", "3.13"] and 'requires-python = ">=3.10"' in project
    assert matrix["torch"] == ["2.11.*", ""] and '"torch>=2.11"' in project


def test_the_version_is_said_once():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    said = [path for path in (ROOT / "sp_lightning").rglob("*.py") if f'"{version}"' in path.read_text()]
    assert said == []


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


@pytest.mark.parametrize(
    "arguments, said",
    [(["--fast"], "unknown argument: --fast"), (["--list", "x"], "got 2"), (["--slow", "9/8"], "a shard such as 2/8")],
)
def test_ci_refuses_arguments_that_it_does_not_know(clone, arguments, said):
    done = ci(clone, *arguments)
    assert said in done.stderr and done.returncode == 1


def test_quick_tests_need_no_accelerator():
    """Else ``.ci/run --quick`` would need a compiler."""
    quick = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^pytestmark = .*mark\.quick", path.read_text(), re.M)
    ]
    assert len(quick) >= 5
    assert [path.name for path in quick if re.search(r"simgpu|null_?cuda|mark\.slow", path.read_text())] == []


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


@pytest.fixture
def small(tmp_path):
    """A package with two waits, of which its tests miss one."""
    files = {
        "sp_lightning/__init__.py": "",
        "sp_lightning/stream/__init__.py": "",
        "sp_lightning/stream/unit.py": """
            def both(event, other):
                event.wait()
                other.synchronize(event.wait_all(1))
            """,
        "tests/stream/test_unit.py": """
            from sp_lightning.stream.unit import both

            class Event:
                waited = synchronized = False
                def wait(self):
                    self.waited = True
                def wait_all(self, count): ...
                def synchronize(self, none):
                    self.synchronized = True

            def test_of_wait():
                both(event := Event(), Event())
                assert event.waited
            """,
        "pyproject.toml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.slow
def test_a_deleted_wait_that_no_test_needs_is_told(small, monkeypatch, capsys):
    deletions = loaded(ROOT / "benchmarks" / "race_deletions.py")
    monkeypatch.setattr(deletions, "ROOT", small)
    monkeypatch.setattr(sys, "argv", ["race_deletions.py"])
    assert deletions.main() == 1
    *lines, last = capsys.readouterr().out.splitlines()
    verdicts = {line.split()[1].partition("(")[0]: "NOT CAUGHT" not in line for line in lines}
    assert verdicts == {"event.wait": True, "other.synchronize": False, "event.wait_all": False}
    assert last == "3 waits, 2 of them can go unnoticed"


def test_the_waits_of_the_core_are_found():
    deletions = loaded(ROOT / "benchmarks" / "race_deletions.py")
    files = {wait.file for wait in deletions.waits(ROOT / "sp_lightning")}
    assert {"host/device.py", "stream/unit.py", "stream/residency.py", "steps/steps.py"} <= files
