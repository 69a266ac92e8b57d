"""Delete every wait of the core, one at a time, and run its tests: is each needed, and would its absence be noticed?

    python benchmarks/race_deletions.py [--only stream/unit.py:291] [--jobs 2]

A *wait* is a call that orders one stream after another, or the host after a stream or a thread, or a call of a function
that does so: see `is_wait`. One run of the tests without a deletion shows which tests come to which waits. Then each
wait is replaced by its arguments in a copy of the package, and those tests run, the quickest first, until one fails.
The output has a line for each wait; the exit status is 1 if a deletion goes unnoticed.
"""

from __future__ import annotations

import argparse
import ast
import json
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
TESTS = ("tests/stream", "tests/store", "tests/ranks")  # likewise
NEEDED = ("sp_lightning", "tests", "docs", "pyproject.toml")
WAITS = {"synchronize", "result", "before_host_access", "keep_for"}
LIMIT_S = 120  # of one test


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


def verdict(
    source: pathlib.Path,
    changed: Callable[[pathlib.Path], None] | None,
    tests: Collection[str],
    *options: str,
    cover: str = "",
) -> Verdict:
    """Run tests on a package that was changed, or on the unchanged one."""
    with tempfile.TemporaryDirectory() as name:
        folder = copied(source, pathlib.Path(name))
        if changed is not None:
            changed(folder / "sp_lightning")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "race_deletions", *options, *tests]
        env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "WAIT_COVER": cover}
        command += ["--timeout", str(LIMIT_S), "--timeout-method", "thread"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        failed = re.findall(r"^(?:FAILED|ERROR) tests/.*?::(\S+)", done.stdout, re.MULTILINE)
        return Verdict(done.returncode, [*failed, " ".join(done.stdout[-100:].split()) if done.returncode else ""][0])


def covered(source: pathlib.Path, found: Sequence[Wait], tests: Collection[str]) -> dict[str, tuple[float, list[int]]]:
    """Map each test that passes to its seconds and to the waits that it comes to."""
    with tempfile.NamedTemporaryFile("r") as file:
        whole = verdict(source, partial(mark, found), tests, cover=file.name)
        if whole.status:
            sys.exit(f"the tests fail without a deletion: {whole.said}")
        return {test: (seconds, came) for test, seconds, came in map(json.loads, file)}


# ---- as a plugin of pytest, beside a copy of the package

hits: set[int] = set()

if os.environ.get("WAIT_COVER"):
    import pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: Any) -> Iterator[None]:
        """Write down a test that passes: its seconds, and the waits that it came to."""
        hits.clear()
        begin = time.monotonic()
        found = yield
        with open(os.environ["WAIT_COVER"], "a") as file:
            file.write(json.dumps([item.nodeid, time.monotonic() - begin, sorted(hits)]) + "\n")
        return found


def without(source: pathlib.Path, wait: Wait, number: int, cover: Mapping[str, tuple[float, list[int]]]) -> Verdict:
    """Run without a wait the tests that come to it, the quickest first."""
    came = sorted(test for test, (_, waits) in cover.items() if number in waits)
    came.sort(key=lambda test: cover[test][0])
    return verdict(source, partial(delete, wait), came, "-x") if came else Verdict(5, "no test comes to it")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a file of the package, by its path there, or a line of it")
    parser.add_argument("--jobs", type=int, default=1, help="test runs at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source = copied(ROOT, pathlib.Path(name))  # edits to the checkout do not change it meanwhile
        found = waits(source / "sp_lightning")
        meant = [(n, wait) for n, wait in enumerate(found) if options.only in f"{wait.file}:{wait.line}"]
        cover = covered(source, found, [test for test in TESTS if (source / test).exists()])
        with ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda one: without(source, one[1], one[0], cover), meant)
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
