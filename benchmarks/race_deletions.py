"""Delete every wait, one at a time, and run the race tests: is each needed, and would its absence be noticed?

    python benchmarks/race_deletions.py [--only engine.py] [--jobs 2] [--cover FILE]
                                        [--ranks | --nodes | --shards | --files]

A *wait* is a call that orders one stream after another, or the host after a stream or a thread, or a call that does so
inside: see `WAITS`; with ``--ranks`` one of a rank for others: see `OF_RANKS`; with ``--nodes`` one for those of other
machines: see `OF_NODES`; with ``--shards`` one that only models of DTensors need: see `OF_SHARDS`; with ``--files`` one
for reads and writes of files, and what else orders them there, such as a lock: see `OF_FILES`. Each is replaced by its
arguments in a copy of the package, and `TESTS` run against the copy, or `TESTS_OF_RANKS`, `TESTS_OF_NODES`,
`TESTS_OF_SHARDS`, or those of the file in `FOR_FILES`: those that come to the wait, as one run of all without a
deletion has shown, first those of the file that is named first there, and the quickest first; tests that failed in that
run are left out, and named at the end.
``--cover`` keeps what that run showed in a file, and takes it from there for as long as the package and the tests are
the same. A test that comes to its limit of time does not count, and those of other files run after it. The output has a
line for each wait; the exit status is 1 if a deletion goes unnoticed, or if a test was left out.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import operator
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeGuard

ROOT = pathlib.Path(__file__).resolve().parent.parent
_CLOSURE = "tests/contract/test_writes_outside_visits.py::test_a_view_that_is_written_in_the_closure_of_a_manual_step"
_KEPT = "tests/contract/test_random_programs.py::test_an_alias_that_a_step_keeps_under_autocast_today"
_STREAMS = "forward_and_backward_on_a_stream_of_the_user units_that_are_read_on_several_streams_at_once".split()
_STREAMS += ["what_is_recomputed_for_another_stream_is_in_order_with_it"]
TESTS = (
    "tests/contract/test_races.py",
    "tests/optim/test_deferred_step.py",
    "tests/optim/test_device_step.py",
    "tests/memory/test_pinned.py",
    *(f"tests/contract/test_unusual_use.py::test_{name}" for name in _STREAMS),
    _CLOSURE,
    _KEPT,
)
_OF_RANKS = (
    "waits steps_in_backward deferred_steps nodes schedules stream_by_hand features_with_ddp refusals failures "
    "fabric_with_ddp parity_with_ddp".split()
)
TESTS_OF_RANKS = tuple(f"tests/ranks/test_{name}.py" for name in _OF_RANKS)
_FILES, _DISK = "tests/ranks/test_files_with_ddp.py", "tests/ranks/test_disk_with_ddp.py"
_BEGIN = (  # what ranks decide together before they begin, and before they make state
    f"{_FILES}::test_weights_of_unlike_files_are_the_first_ranks",
    f"{_FILES}::test_nodes_whose_frozen_weights_are_in_files_of_each_are_ddp",
    f"{_DISK}::test_ranks_that_find_unlike_memory_have_one_budget",
    f"{_DISK}::test_a_disk_that_is_full_on_one_rank_leaves_what_was_before_the_step",
)
TESTS_OF_RANKS += _BEGIN
TESTS_OF_NODES = (
    "tests/ranks/test_nodes.py",
    "tests/ranks/test_divided_state.py",
    "tests/ranks/test_refusals.py",
    "tests/ranks/test_steps_in_backward.py::test_nodes_step_all_units_beside_backward_and_equal_ddp_with_the_tree",
    *_BEGIN,
)
TESTS_OF_SHARDS = ("tests/ranks/test_tensor_parallel.py", "tests/ranks/test_tensor_parallel_fits.py")
NEEDED = ("sp_lightning", "tests", "pyproject.toml")
BESIDE_IT = ROOT / "benchmarks" / "wait_cover.py"  # goes into each copy
END = [""]  # its last line, after those of tests

# torch's own waits, and functions of this package whose purpose is a wait.
WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "result", "exception"}
WAITS |= {"settle", "wait_load", "_let_readers_finish", "let_go", "land", "finish"}
WAITS |= {"wait_step", "before_host_access", "_complete", "before_user_code", "quiesce", "_wait_for_copies"}
# Files, by their paths in the package, in which no step waits: they observe, plan or compare.
BESIDE = {"observe/progress.py", "runtime/recorder.py", "hf/report.py"}
# Waits of one rank for others: these calls, and all waits of these files, and of these functions of other files.
OF_RANKS = {"meet", "exchange", "barrier", "exchange_gradients", "exchange_if_any"}
OF_RANKS |= {"_meet_handling", "_wait_for_all", "_end_job", "wait_beside"}
OF_NODES = {"wait_for_nodes", "alike", "_wait_for_nodes", "_join"}  # for those of other machines
OF_RANKS |= OF_NODES
OF_RANKS |= {"_all_at", "_common_mark"}  # they say, where units are summed, which are not due yet, or stepped later
OF_RANKS |= {"all_summed"}
BETWEEN_RANKS = {
    f"ranks/{name}.py" for name in ("board", "exchange", "new_weights", "sharded_step", "team", "user_edits")
}
BETWEEN_RANKS |= {"nodes/transport.py", "lightning/several_devices.py", "lightning/strategy.py"}
BETWEEN_RANKS |= {
    "optim/pending_step.py: _error_of_others",
    "hf/context.py: _load_state",
    "lightning/fabric.py: load_checkpoint",
    "runtime/engine.py: exchanging",
    "runtime/handle.py: _follow_changes",
    "runtime/handle.py: settle",
}
BETWEEN_NODES = {"nodes/arrivals.py", "nodes/transport.py"}  # where all waits are for other machines
# Waits that no model without DTensors comes to: all of these files, and of these functions of other files.
OF_SHARDS = {"runtime/same_path.py", "compat/tensors.py: arrived", "lightning/strategy.py: load_checkpoint"}
# Waits for reads and writes of files: all waits in these files, each with the tests that run without one of them.
_IN_FILES = ("tests/disk/test_waits_for_files.py", "tests/disk/test_file_store.py")
_ON_DISK = ("tests/disk/test_waits_for_files.py", "tests/optim/test_portions.py", "tests/disk/test_state_in_runs.py")
_GRADIENTS = ("tests/disk/test_waits_for_files.py", "tests/disk/test_gradients_on_disk.py")
_CHECKPOINTS = ("tests/disk/test_waits_for_files.py", "tests/lightning/test_checkpoints.py")
FOR_FILES = {
    "disk/direct_file.py": ("tests/disk/test_waits_for_files.py", "tests/disk/test_source_files.py"),
    "disk/direct_ring.py": ("tests/disk/test_direct_ring.py", *_IN_FILES),
    "disk/homes.py": _IN_FILES,
    "disk/scratch_file.py": ("tests/disk/test_scratch_file.py", "tests/disk/test_waits_for_files.py", _DISK),
    "disk/source_files.py": ("tests/disk/test_source_files.py", *_CHECKPOINTS),
    "disk/state_ring.py": _ON_DISK,
    "disk/weight_files.py": _IN_FILES,
    "gradients/slab_on_disk.py": _GRADIENTS,
    "lightning/checkpoint_io.py": _CHECKPOINTS,
    "optim/state_on_disk.py": _ON_DISK,
}
# What else orders things there: these calls, and locks and contexts that close something when they end.
OF_FILES = {"drain", "recover", "_end_write", "check", "shutdown", "close", "closing", "flush", "fsync", "_sync"}
OF_FILES |= {"_sync_folder", "increment_version", "keep_from_forks", "madvise", "set_stream", "_leave_files"}
OF_FILES |= {"_allocate", "keep_order", "_end_of"}
LOCKS = {"_lock", "landing"}
NOT_SLOW = "not slow or seldom"  # the tests that are slow for their products alone
LONGEST_TEST_S = 240  # without a deletion; with one, this many times what the longest test took, and seconds more
TIMES, MORE_S = 4, 40
HANGS = 6  # tests that may come to their limit before the search for one that fails is given up


class Came(NamedTuple):
    """What a test did without any deletion."""

    seconds: float
    waits: list[int]  # to which it came, by their numbers
    failed: bool = False


Cover = Mapping[str, Came]  # by the names of tests


class Wait(NamedTuple):
    """A call to delete."""

    file: str  # its path in the package
    line: int
    column: int
    function: str
    text: str


class Verdict(NamedTuple):
    """The result of the race tests without a wait."""

    status: int
    first_failure: str
    hung_at: int = 0  # which test came to its limit of time, counted from 1: a busy machine may do that, too

    @property
    def caught(self) -> bool:
        return not self.hung_at and (self.status == 1 or self.status < 0)  # ended by a signal

    def __str__(self) -> str:
        if self.caught:
            return f"caught      {self.first_failure}"
        if self.hung_at:
            return f"NOT CAUGHT  but by a limit of time: {self.first_failure}"
        return "NOT CAUGHT" if self.status == 0 else f"NOT CAUGHT  pytest: {self.status} {self.first_failure}"


def waits(package: pathlib.Path, beside: Collection[str] = BESIDE, of: str = "steps") -> list[Wait]:
    """List the waits of a package in the order of its files: "of" ranks, nodes, shards, files, or all else.

    In the files ``beside`` no step waits.
    """
    found = all_waits(package)
    if idle := set(beside) - {wait.file for wait in found}:
        raise ValueError(f"BESIDE names files of {package} that have no wait or do not exist: {sorted(idle)}")
    left = [wait for wait in found if wait.file not in beside and kind(wait) == of]
    if not left:
        raise ValueError(f"no wait was found in {package}")
    return left


def kind(wait: Wait) -> str:
    """Return what the wait is for: other "ranks", other "nodes", "shards", "files", or "steps"."""
    if not OF_SHARDS.isdisjoint(places(wait)):
        return "shards"
    if wait.file in FOR_FILES:
        return "files"
    if called(wait) in OF_NODES or wait.file in BETWEEN_NODES:
        return "nodes"
    return "ranks" if is_between_ranks(wait) else "steps"


def places(wait: Wait) -> set[str]:
    """Return the names of the place where the wait is: of its file, and of its function."""
    return {wait.file, f"{wait.file}: {wait.function}"}


def called(wait: Wait) -> str:
    """Return the name of the function that waits."""
    return wait.text.partition("(")[0].rpartition(".")[2]


def is_between_ranks(wait: Wait) -> bool:
    """Whether a rank waits for others there."""
    return called(wait) in OF_RANKS or not BETWEEN_RANKS.isdisjoint(places(wait))


def all_waits(package: pathlib.Path) -> list[Wait]:
    """List the waits of all files of a package, sub-packages included."""
    found: dict[tuple[str, int, int], Wait] = {}
    for path in package.rglob("*.py"):
        file, source = path.relative_to(package).as_posix(), path.read_text()
        for scope in ast.walk(ast.parse(source)):  # inner functions come after the outer ones around them
            if isinstance(scope, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(scope):
                    if isinstance(node, ast.withitem):
                        node = node.context_expr
                    if is_wait(node, file):
                        text = " ".join((ast.get_source_segment(source, node) or "").split())
                        at = file, node.lineno, node.col_offset
                        found[at] = Wait(*at, getattr(scope, "name", "the file itself"), text)
    return [found[at] for at in sorted(found)]


def is_wait(node: ast.AST, file: str) -> TypeGuard[ast.expr]:
    """Whether a wait is there: a call, or in what is for files a lock."""
    if isinstance(node, ast.Call):
        node = node.func
        others = OF_RANKS if isinstance(node, ast.Attribute) else set()  # functions of the same names wait for nobody
        names = WAITS | (OF_FILES if file in FOR_FILES else others)
    else:
        names = LOCKS if file in FOR_FILES and isinstance(getattr(node, "ctx", None), ast.Load) else set()
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) in names


def tests_of(wait: Wait) -> Collection[str]:
    """Return the tests that may see that a wait is missing."""
    tests = {"steps": TESTS, "ranks": TESTS_OF_RANKS, "shards": TESTS_OF_SHARDS, "nodes": TESTS_OF_NODES}
    return tests.get(kind(wait)) or FOR_FILES[wait.file]


class Deletion(ast.NodeTransformer):
    """Replaces a call by its arguments: what evaluating them does, such as recording an event, is still done.

    A context is replaced by one that does nothing.
    """

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not self.is_meant(node):
            return node
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return ast.copy_location(ast.Tuple(arguments, ast.Load()), node)

    def visit_withitem(self, item: ast.withitem) -> ast.AST:
        if self.is_meant(item.context_expr):
            nothing = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
            nothing.args = getattr(item.context_expr, "args", [])
            item.context_expr = nothing
        return self.generic_visit(item)

    def is_meant(self, node: ast.expr) -> bool:
        """Whether this is the wait to delete."""
        meant = (node.lineno, node.col_offset) == (self.wait.line, self.wait.column) and is_wait(node, self.wait.file)
        self.count += meant
        return meant


class Marking(ast.NodeTransformer):
    """Has the waits of one file note that they are come to (wait_cover.py)."""

    def __init__(self, file: str, numbers: Mapping[tuple[int, int], int]) -> None:
        self.file, self.numbers = file, numbers

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return self.marked(node)

    def visit_withitem(self, item: ast.withitem) -> ast.AST:
        self.generic_visit(item)
        if isinstance(item.context_expr, (ast.Name, ast.Attribute)):
            item.context_expr = self.marked(item.context_expr)
        return item

    def marked(self, node: ast.expr) -> ast.expr:
        number = self.numbers.get((node.lineno, node.col_offset))
        if number is None or not is_wait(node, self.file):
            return node
        marked = ast.parse(f"(__import__('wait_cover').hit({number}), None)[1]", mode="eval").body
        marked.value.elts[1] = node  # type: ignore[attr-defined]
        return marked


def mark(found: Sequence[Wait], package: pathlib.Path) -> None:
    """Have these waits of a package note that they are come to, by their places in this list."""
    for file in {wait.file for wait in found}:
        numbers = {(wait.line, wait.column): number for number, wait in enumerate(found) if wait.file == file}
        path = package / file
        marked = Marking(file, numbers).visit(ast.parse(path.read_text()))
        path.write_text(ast.unparse(ast.fix_missing_locations(marked)))


def copied(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copy what the tests need."""
    for name in NEEDED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source / name, target / name)
    shutil.copy(BESIDE_IT, target)
    return target


def delete(wait: Wait, package: pathlib.Path) -> None:
    """Delete a wait from a package."""
    path = package / wait.file
    deletion = Deletion(wait)
    path.write_text(ast.unparse(ast.fix_missing_locations(deletion.visit(ast.parse(path.read_text())))))
    assert deletion.count == 1, wait


def verdict(
    source: pathlib.Path,
    change: Callable[[pathlib.Path], None] | None = None,
    tests: Collection[str] = TESTS,
    marks: str = NOT_SLOW,
    env: Mapping[str, str] | None = None,
    stop: bool = True,
) -> Verdict:
    """Run tests with these marks on a package that was changed, or on the unchanged one; until the first fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = copied(source, pathlib.Path(name))
        if change is not None:
            change(folder / "sp_lightning")
        command = [
            "-v",
            "--tb=no",
            "-rfE",
            "-p",
            "wait_cover",
            "-m",
            marks,
            *tests,
        ]
        command += ["--timeout", str(LONGEST_TEST_S), "--timeout-method", "thread", *["-x"] * stop]
        env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        status, output = forked(command, folder, env)
        lines = output.splitlines()
        failures = [
            line.split("::")[-1].split(" - ")[0] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))
        ]
        begun = [line.split("::")[-1].split(" ")[0] for line in lines if line.startswith("tests/") and "::" in line]
        hangs = begun[-1:] if "Timeout" in output and not failures else []
        return Verdict(status, [*failures, *hangs, output[-300:]][0], len(begun) if hangs else 0)


def forked(arguments: Sequence[str], folder: pathlib.Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Run pytest in a fork of this process, which has imported torch and Lightning; return its status and output."""
    import lightning  # noqa: F401
    import pytest

    with tempfile.TemporaryFile() as output:
        if (process := os.fork()) == 0:
            status = 70
            try:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
                for name in [name for name in sys.modules if name.partition(".")[0] == "sp_lightning"]:
                    del sys.modules[name]  # a process that tests this file has the package itself
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(env)
                sys.path[:1] = [str(folder)]
                sys.dont_write_bytecode = True
                status = int(pytest.main([*arguments]))
                sys.stdout.flush()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        output.seek(0)
        return status, output.read().decode(errors="replace")


def without(source: pathlib.Path, wait: Wait, number: int, cover: Cover) -> Verdict:
    """Run without a wait the tests that come to it: first those of the file for such waits, the quickest first."""
    (first, *_) = tests_of(wait)
    came = sorted(
        (
            (not test.startswith(first), of.seconds, test)
            for test, of in cover.items()
            if number in of.waits and not of.failed
        ),
        key=operator.itemgetter(0, 1),
    )
    result = Verdict(5, "no test comes to it")
    for _ in range(HANGS):
        if not came:
            break
        with tempfile.NamedTemporaryFile("w") as only:
            json.dump({test: TIMES * seconds + MORE_S for _, seconds, test in came}, only)
            only.flush()
            files = dict.fromkeys(test.partition("::")[0] for *_, test in came)
            now = verdict(source, partial(delete, wait), files, env={"WAIT_ONLY": only.name})
        if not now.hung_at:
            return now if now.status or not result.hung_at else result
        result, hung = now, came[now.hung_at - 1][2].partition("::")[0]
        came = sorted(came[now.hung_at :], key=lambda one: one[2].startswith(hung))  # its others may hang, too
    return result


def record(source: pathlib.Path, found: Sequence[Wait]) -> tuple[Verdict, Cover]:
    """Run the tests of these waits without any deletion; return to which waits each comes."""
    with tempfile.TemporaryDirectory() as name:
        file, lines = pathlib.Path(name, "cover"), pathlib.Path(name, "cover.lines")
        file.write_bytes(bytes(len(found)))
        tests = dict.fromkeys(test for wait in found for test in tests_of(wait))
        result = verdict(source, partial(mark, found), tests, env={"WAIT_COVER": str(file)}, stop=False)
        came = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        if result.status == 1 and came[-1:] == [END]:
            result = Verdict(0, "")  # tests that failed are left out
        return result, {test: Came(*of) for test, *of in came if test}


def digest(source: pathlib.Path, found: Sequence[Wait]) -> str:
    """Return what is another text once the package, a test or the list of waits is another."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    of = hashlib.sha256(repr(found).encode())
    for path in files:
        of.update(path.relative_to(source).as_posix().encode() + b"\0" + path.read_bytes())
    return of.hexdigest()


def known(source: pathlib.Path, found: Sequence[Wait], file: pathlib.Path | None) -> tuple[Verdict, Cover]:
    """Return what a run without any deletion showed, from this file or by such a run, which then writes it."""
    now = digest(source, found)
    if file is not None and file.exists() and (content := json.loads(file.read_text()))["of"] == now:
        return Verdict(0, ""), {test: Came(*came) for test, came in content["tests"].items()}
    result, cover = record(source, found)
    if file is not None and not result.status:
        file.write_text(json.dumps({"of": now, "tests": cover}))
    return result, cover


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a file of the package, by its path there, or a line: engine.py:195")
    parser.add_argument("--jobs", type=int, default=1, help="test runs at a time")
    parser.add_argument("--cover", type=pathlib.Path, help="a file that keeps which tests come to which waits")
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--ranks", dest="of", action="store_const", const="ranks", help="delete waits of ranks for others")
    of.add_argument("--nodes", dest="of", action="store_const", const="nodes", help="delete waits for other machines")
    of.add_argument("--shards", dest="of", action="store_const", const="shards", help="delete waits of DTensors alone")
    of.add_argument("--files", dest="of", action="store_const", const="files", help="delete waits for files")
    parser.set_defaults(of="steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source = copied(ROOT, pathlib.Path(name))  # edits to the checkout do not change it meanwhile
        found = waits(source / "sp_lightning", of=options.of)
        meant = [(n, wait) for n, wait in enumerate(found) if options.only in f"{wait.file}:{wait.line}"]
        if not meant:
            say(f"no wait is in {options.only!r}")
            return 2
        unchanged, cover = known(source, found, options.cover)
        if unchanged.status:
            say(f"the race tests fail without any deletion: {unchanged.first_failure}")
            return 2
        results: list[tuple[Wait, Verdict]] = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for (number, wait), result in zip(
                meant, pool.map(lambda one: without(source, one[1], one[0], cover), meant), strict=True
            ):
                came = sum(number in came.waits and not came.failed for came in cover.values())
                say(f"{wait.file}:{wait.line:<4} {wait.function:24} {wait.text:58} {came:4} tests  {result}")
                results.append((wait, result))
    missed = sum(not result.caught for _, result in results)
    failed = [test for test, came in cover.items() if came.failed]
    say(f"{len(results)} waits, {missed} of them can go unnoticed")
    for test in failed:
        say(f"left out, as it fails without any deletion: {test}")
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
