"""What the package promises before any of it is used: what an import costs, where things lie, README's commands."""

import fnmatch
import importlib.util
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
    expected |= {"CHANGELOG.md", "CONTRIBUTING.md", ".ci", ".git", ".github", ".gitignore", ".pre-commit-config.yaml"}
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


# ---- workflows and releases


def workflows():
    yaml = pytest.importorskip("yaml")
    return {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()}


def steps():
    return [step for workflow in workflows().values() for job in workflow["jobs"].values() for step in job["steps"]]


def test_workflows_run_nothing_but_ci():
    commands = {step["run"] for step in steps() if "run" in step}
    assert commands == {".ci/run", ".ci/run --quick", ".ci/run --dist"}
    used = {step["uses"].partition("@")[0] for step in steps() if "uses" in step}
    assert {name for name in used if not name.startswith("actions/")} == {"pypa/gh-action-pypi-publish"}


def test_workflows_set_variables_that_ci_reads():
    read = (ROOT / ".ci/run").read_text()
    for step in steps():
        assert all(name.startswith("PIP_") or f"${{{name}:-" in read for name in step.get("env", {})), step


@pytest.mark.parametrize("job", ["quick", "complete"])
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


@pytest.mark.parametrize("arguments, said", [(["--fast"], "unknown argument: --fast"), (["--list", "x"], "got 2")])
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


# ---- the guide


@pytest.fixture(scope="module")
def deletions():
    """benchmarks/race_deletions.py as a module."""
    spec = importlib.util.spec_from_file_location("race_deletions", ROOT / "benchmarks" / "race_deletions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guide_names_every_wait_of_the_runtime(deletions):
    caught = [(wait, deletions.Verdict(1, "")) for wait in deletions.waits(ROOT / "sp_lightning")]
    begin, end = deletions.MARKS
    assert deletions.GUIDE.read_text().split(begin)[1].split(end)[0].strip() == deletions.summary(caught)


def test_every_file_with_waits_or_events_has_its_waits_deleted_or_is_beside_the_step(deletions):
    says = re.compile(r"\.(wait|wait_event|wait_stream|synchronize|record_event)\(|\bEvent\(")
    package = ROOT / "sp_lightning"
    say = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if says.search(path.read_text())}
    assert say <= {wait.file for wait in deletions.waits(package)} | deletions.BESIDE


@pytest.fixture
def package(tmp_path):
    """A package that waits in a file of its own, in one of a sub-package, and twice beside the step."""
    files = {
        "engine.py": "def step(event):\n    event.wait()\n",
        "memory/__init__.py": "",
        "memory/store.py": "def load(ready, up):\n    ready.wait(up.record_event())\n",
        "bench/turns.py": "class Turns:\n    def end(self, device):\n        device.synchronize()\n",
        "measure.py": "import torch\n\ntorch.accelerator.synchronize()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


BESIDE = ("bench/turns.py", "measure.py")


def test_waits_of_sub_packages_are_found_and_deleted(deletions, package):
    found = deletions.waits(package, BESIDE)
    assert [(wait.file, wait.function) for wait in found] == [("engine.py", "step"), ("memory/store.py", "load")]
    deletions.delete(found[1], package)
    assert (package / "memory/store.py").read_text().endswith("    (up.record_event(),)")
    assert [wait.file for wait in deletions.waits(package, BESIDE)] == ["engine.py"]


def test_a_wait_at_the_top_of_a_file_is_found(deletions, package):
    assert {"bench/turns.py", "measure.py"} < {wait.file for wait in deletions.waits(package, ())}


@pytest.mark.parametrize("stray", ["turns.py", "memory/measure.py", "memory/__init__.py"])
def test_a_file_beside_that_is_not_there_or_does_not_wait_is_an_error(stray, deletions, package):
    with pytest.raises(ValueError, match=rf"BESIDE names files of .* that have no wait or do not exist: \['{stray}'\]"):
        deletions.waits(package, (*BESIDE, stray))


def test_a_package_without_waits_is_an_error(deletions, package):
    (package / "engine.py").write_text("")
    (package / "memory/store.py").unlink()
    with pytest.raises(ValueError, match="no wait was found in"):
        deletions.waits(package, BESIDE)
    with pytest.raises(ValueError, match="no wait was found in"):
        deletions.waits(package / "no" / "such" / "folder", ())
