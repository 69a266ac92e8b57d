"""Delete every wait of the core, one at a time, and run its tests: is each needed, and would its absence be noticed?

    python benchmarks/race_deletions.py [--only stream/unit.py:291] [--jobs 2] [--marks "slow or not slow"]

A *wait* is a call that orders one stream after another, or the host after a stream or a thread, or a call of a function
that does so: see `is_wait`. One run of the tests without a deletion shows which tests come to which waits, in which
process ever. Then each wait is replaced by its arguments in a copy of the package, and those tests run, the quickest
first, until one fails, for as long as `--seconds` of tests; then random programs on the simulated device, of one device
or of ranks. The output has a line for each wait; the exit status is 1 if a deletion goes unnoticed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORE = ("host", "store", "stream", "optim", "ranks", "handle.py")  # of the package, as far as they are there
TESTS = tuple(f"tests/{name}" for name in "stream store ranks contract host hf lightning plan observe".split())
NEEDED = ("sp_lightning", "tests", "docs", "benchmarks", "pyproject.toml")
WAITS = {"synchronize", "result", "before_host_access", "keep_for"}
LIMIT_S = 120  # of one test
PROGRAMS = "tests/rigs/programs.py --from 0 --device simgpu --jobs 1 --count".split()


class Wait(NamedTuple):
    """A call to delete."""

    file: str  # its path in the package
    line: int
    column: int
    text: str


class Verdict(NamedTuple):
    """The result of tests on a changed package."""

    status: int
    said: str  # the first failure

    @property
    def caught(self) -> bool:
        return self.status == 1 or self.status < 0  # ended by a signal

    def __str__(self) -> str:
        return f"caught      {self.said}" if self.caught else f"NOT CAUGHT  pytest: {self.status} {self.said}"


def is_wait(node: ast.AST) -> bool:
    """Whether this is a call of a function whose purpose is a wait."""
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return name in WAITS or name.lstrip("_").split("_")[0] == "wait"


def waits(package: pathlib.Path) -> list[Wait]:
    """List the waits of the core."""
    found = []
    for path in sorted(path for name in CORE for path in [package / name, *(package / name).rglob("*.py")]):
        if path.is_file():
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                if is_wait(node):
                    text = " ".join((ast.get_source_segment(source, node) or "").split())
                    found.append(Wait(path.relative_to(package).as_posix(), node.lineno, node.col_offset, text))
    if not found:
        raise ValueError(f"no wait was found in {package}")
    return found


class Change(ast.NodeTransformer):
    """Puts something in the place of some waits of a file."""

    def __init__(self, made: Mapping[tuple[int, int], Callable[[ast.Call], ast.expr]]) -> None:
        self.made = made

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        make = self.made.get((node.lineno, node.col_offset)) if is_wait(node) else None
        return node if make is None else ast.copy_location(make(node), node)


def arguments(call: ast.Call) -> ast.expr:
    """Make what evaluates a call's arguments alone: an event that it records is still recorded."""
    return ast.Tuple([*call.args, *(keyword.value for keyword in call.keywords)], ast.Load())


def noted(number: int, call: ast.Call) -> ast.expr:
    """Make what notes that a call was come to, and then calls."""
    made: Any = ast.parse(f"(__import__('race_deletions').hits.add({number}), None)[1]", mode="eval").body
    made.value.elts[1] = call
    return made  # type: ignore[no-any-return]


def change(package: pathlib.Path, file: str, made: Mapping[tuple[int, int], Callable[[ast.Call], ast.expr]]) -> None:
    path = package / file
    tree = Change(made).visit(ast.parse(path.read_text()))
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def delete(wait: Wait, package: pathlib.Path) -> None:
    """Delete a wait from a package."""
    change(package, wait.file, {(wait.line, wait.column): arguments})


def mark(found: Sequence[Wait], package: pathlib.Path) -> None:
    """Have waits note that they are come to, by their places in this list."""
    for file in {wait.file for wait in found}:
        numbers = {(wait.line, wait.column): n for n, wait in enumerate(found) if wait.file == file}
        change(package, file, {at: partial(noted, number) for at, number in numbers.items()})


def copied(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copy what the tests need."""
    for name in NEEDED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source / name, target / name)
    shutil.copy(__file__, target / "race_deletions.py")
    return target


def run(folder: pathlib.Path, *command: str, cover: str = "") -> subprocess.CompletedProcess[str]:
    """Run a Python program on the package in a folder."""
    path = os.pathsep.join(map(str, (folder, folder / "tests", folder / "tests" / "rigs")))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "WAIT_COVER": cover}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)


def tried(folder: pathlib.Path, tests: Collection[str], *options: str, cover: str = "") -> Verdict:
    """Run tests on the package in a folder."""
    command = ["-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "race_deletions", *options, *tests]
    done = run(folder, *command, "--timeout", str(LIMIT_S), "--timeout-method", "thread", cover=cover)
    failed = re.findall(r"^(?:FAILED|ERROR) tests/.*?::(\S+)", done.stdout, re.MULTILINE)
    return Verdict(done.returncode, [*failed, " ".join(done.stdout[-100:].split()) if done.returncode else ""][0])


def verdict(
    source: pathlib.Path, changed: Callable[[pathlib.Path], None] | None, tests: Collection[str], *options: str
) -> Verdict:
    """Run tests on a package that was changed, or on the unchanged one."""
    with tempfile.TemporaryDirectory() as name:
        folder = copied(source, pathlib.Path(name))
        if changed is not None:
            changed(folder / "sp_lightning")
        return tried(folder, tests, *options)


def covered(source: pathlib.Path, found: Sequence[Wait], *options: str) -> dict[str, tuple[float, set[int]]]:
    """Map each test that passes to its seconds and to the waits that it comes to."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as notes:
        folder = copied(source, pathlib.Path(name))
        mark(found, folder / "sp_lightning")
        cover = pathlib.Path(notes, "cover")
        whole = tried(folder, [test for test in TESTS if (source / test).exists()], *options, cover=str(cover))
        lines = [json.loads(line) for line in cover.read_text().splitlines()] if cover.exists() else []
    seconds = {test: value for test, value, number in lines if number is None}
    if not seconds:
        sys.exit(f"the tests do not run without a deletion: {whole.said}")
    if whole.status:
        sys.stdout.write(f"without a deletion: {whole.said}\n")
    return {test: (seconds[test], {n for name, _, n in lines if name == test} - {None}) for test in seconds}


# ---- as a plugin of pytest, beside a copy of the package


class Hits:
    """Notes the waits to which a test comes, in its process and in those that it starts."""

    def __init__(self, path: str) -> None:
        self._path, self._seen = path, set[tuple[bytes, int]]()
        with open(f"{path}.{os.environ.get('PYTEST_XDIST_WORKER', '')}", "a+b") as file:
            file.truncate(LONGEST)
            self.test = mmap.mmap(file.fileno(), LONGEST)  # which test runs, for all processes of a worker

    def begin(self, test: str) -> None:
        self.test[:] = test.encode().ljust(LONGEST, b"\0")

    def add(self, number: int) -> None:
        test = self.test[:].rstrip(b"\0")
        if (test, number) not in self._seen:
            self._seen.add((test, number))
            self.write(test.decode(), None, number)

    def write(self, *line: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


LONGEST = 4096  # bytes of a test's name
hits: Any = set()  # where nothing is noted

if os.environ.get("WAIT_COVER"):
    import pytest

    hits = Hits(os.environ["WAIT_COVER"])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: Any) -> Iterator[None]:
        """Note which test runs."""
        hits.begin(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: Any) -> Iterator[None]:
        """Note a test that passes, and its seconds."""
        begin = time.monotonic()
        found = yield
        hits.write(item.nodeid, time.monotonic() - begin, None)
        return found


def without(
    source: pathlib.Path,
    wait: Wait,
    number: int,
    cover: Mapping[str, tuple[float, set[int]]],
    given: argparse.Namespace,
) -> Verdict:
    """Run without a wait the tests that come to it, the quickest first, then random programs."""
    came = sorted((test for test, (_, waits) in cover.items() if number in waits), key=lambda test: cover[test][0])
    ends = itertools.accumulate(cover[test][0] for test in came)
    quick = [test for test, end in zip(came, ends, strict=True) if end <= given.seconds] or came[:1]
    with tempfile.TemporaryDirectory() as name:
        folder = copied(source, pathlib.Path(name))
        delete(wait, folder / "sp_lightning")
        found = tried(folder, quick, "-x", "-m", "") if quick else Verdict(5, "no test comes to it")
        if not found.caught and given.programs:
            done = run(folder, *PROGRAMS, str(given.programs), *["--ranks"] * wait.file.startswith("ranks"))
            found = Verdict(done.returncode, f"random programs: {' '.join(done.stdout[-60:].split())}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a file of the package, by its path there, or a line of it")
    parser.add_argument("--jobs", type=int, default=1, help="test runs at a time")
    parser.add_argument("--marks", default="not slow and not gpu", help="the tests, as pytest's -m has them")
    parser.add_argument("--seconds", type=float, default=300, help="of tests that come to a wait, at most")
    parser.add_argument("--programs", type=int, default=30, help="random programs for what no test notices")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source = copied(ROOT, pathlib.Path(name))  # edits to the checkout do not change it meanwhile
        found = waits(source / "sp_lightning")
        meant = [(n, wait) for n, wait in enumerate(found) if options.only in f"{wait.file}:{wait.line}"]
        cover = covered(source, found, "-m", options.marks, "-n", str(options.jobs))
        with ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda one: without(source, one[1], one[0], cover, options), meant)
            caught = [say(wait, result) for (_, wait), result in zip(meant, results, strict=True)]
    sys.stdout.write(f"{len(caught)} waits, {caught.count(False)} of them can go unnoticed\n")
    return 0 if caught and all(caught) else 1


def say(wait: Wait, result: Verdict) -> bool:
    """Print the result of one, as soon as it is there."""
    sys.stdout.write(f"{wait.file}:{wait.line:<4} {wait.text[:58]:58} {result}\n")
    sys.stdout.flush()
    return result.caught


if __name__ == "__main__":
    sys.exit(main())
