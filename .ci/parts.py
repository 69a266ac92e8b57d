"""Run the slow tests in named parts, and keep in parts.txt what each part costs.

    python .ci/parts.py choose SECONDS          print the parts that fit: those that the change touches first
    python .ci/parts.py run [--record] PART...  run these parts ("all": every one) with this Python's pytest
    python .ci/parts.py run [--record] --within SECONDS   run the chosen parts, and fail if one is cut off
    python .ci/parts.py run [--record] --share 2/6        run the second of six shares, which together are all parts

1. A slow test belongs to the part with the longest of all paths in `PARTS` that begin its name: to one, and to no more.
2. The change is what differs from $CI_BASE, a commit, or else from the last commit that is a day older than HEAD,
   together with what is not committed.
3. ``--record`` writes the table; commit it. Its seconds are of a machine with two cores and nothing else to do.
4. Parts take turns: each commit moves the place in the table from which parts of equal right are chosen by one.
5. A slower machine shows in the parts that it has run: one that no longer fits at that pace is left out, not begun.

Tests are those of the current directory, and the table is this checkout's. The standard library is all it needs.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / ".ci" / "parts.txt"
HEAD = ["part", "seconds"]
SPARE = 1.25  # a part is chosen if this many times its seconds are left


class Part(NamedTuple):
    """Tests, by their names or folders, and the folders and files whose change they are the first to notice."""

    tests: tuple[str, ...]
    code: tuple[str, ...]


EXACTNESS = "tests/contract/test_exactness.py::test_streaming_is_exact"
STEP = tuple(f"sp_lightning/{name}/" for name in ("memory", "autograd", "optim", "gradients", "runtime"))
PARITY = "tests/ranks/test_parity_with_ddp.py"
IN_FILES = "tests/contract/test_weights_in_files.py::test_weights_that_stay_in_files_train"
RANKS = "sp_lightning/nodes/", "sp_lightning/ranks/", "sp_lightning/lightning/"
PARTS = {
    "exact-models": Part((f"{EXACTNESS}_for_every_model",), STEP),
    "exact-autocast": Part((f"{EXACTNESS}_for_every_model_under_autocast",), ("sp_lightning/autograd/",)),
    "exact-settings": Part(
        (f"{EXACTNESS}_in_every_setting", f"{EXACTNESS}_in_a_cover_of_all_pairs_of_settings"),
        ("sp_lightning/optim/", "sp_lightning/runtime/"),
    ),
    "families": Part(("tests/contract/test_families.py",), ("tests/rigs/families.py", "sp_lightning/runtime/")),
    "contract": Part(("tests/contract",), STEP),
    "autograd": Part(("tests/autograd",), ("sp_lightning/autograd/", "sp_lightning/runtime/")),
    "optim": Part(
        ("tests/optim",),
        tuple(f"sp_lightning/{name}/" for name in ("kernels", "optim", "gradients", "runtime")),
    ),
    "lightning": Part(("tests/lightning",), ("sp_lightning/lightning/",)),
    "runtime": Part(("tests/runtime",), ("sp_lightning/runtime/", "sp_lightning/memory/")),
    "quantised": Part(
        tuple(f"tests/contract/test_quantised_{name}.py" for name in ("weights", "runs", "peft")),
        (*STEP, "tests/rigs/wrapped.py"),
    ),
    "programs": Part(("tests/contract/test_random_programs.py",), (*STEP, "tests/rigs/program")),
    "stream": Part(
        ("tests/stream",),
        (
            *(f"sp_lightning/{name}/" for name in ("host", "stream", "steps")),
            "sp_lightning/handle.py",
            "tests/rigs/stream",
        ),
    ),
    "soak": Part(("tests/runtime/test_soak.py",), ("tests/rigs/soak.py",)),
    "plans": Part(("tests/plan", "tests/core"), ("sp_lightning/plan/", "sp_lightning/core/")),
    "ranks-traits": Part((f"{PARITY}::test_two_ranks_are_ddp_for_every_trait",), RANKS),
    "ranks-families": Part((f"{PARITY}::test_two_ranks_train_families_as_ddp",), RANKS),
    "ranks-settings": Part((PARITY,), RANKS),
    "ranks-features": Part(("tests/ranks/test_features_with_ddp.py", "tests/ranks/test_resume.py"), RANKS),
    "ranks-schedules": Part(("tests/ranks/test_schedules.py",), RANKS),
    "ranks-recipes": Part(("tests/ranks/test_recipes_with_ddp.py",), ("examples/", "sp_lightning/ranks/")),
    "nodes": Part(("tests/ranks/test_nodes.py",), RANKS),
    "ray": Part(("tests/ranks/test_ray.py",), ("sp_lightning/ray/", *RANKS)),
    "ranks-failures": Part(("tests/ranks/test_failures.py",), RANKS),
    "ranks": Part(("tests/ranks",), (*RANKS, "sp_lightning/memory/")),
    "disk-state": Part(
        ("tests/contract/test_state_on_disk.py", "tests/optim/test_portions.py"),
        ("sp_lightning/disk/", "sp_lightning/optim/"),
    ),
    "disk-weights": Part((f"{IN_FILES}_as_in_memory",), ("sp_lightning/disk/",)),
    "disk-autocast": Part((f"{IN_FILES}_under_autocast_as_in_memory",), ("sp_lightning/disk/",)),
    "disk": Part(
        ("tests/contract/test_weights_in_files.py", "tests/disk"),
        tuple(f"sp_lightning/{name}/" for name in ("disk", "storage", "gradients", "autograd", "lightning")),
    ),
    "hf": Part(
        ("tests/hf",), ("sp_lightning/hf/", "sp_lightning/compat/accelerate.py", "sp_lightning/runtime/entries.py")
    ),
    "recipes": Part(("tests/project/test_recipes.py",), ("examples/", "sp_lightning/lightning/")),
    "docs": Part(("tests/project/test_docs.py",), ("docs/", "sp_lightning/plan/", "sp_lightning/commands/")),
    "kits": Part(("tests/project",), ("benchmarks/", "hatch_build.py", "sp_lightning/kernels/")),
    "rigs": Part(("tests/rigs",), ("tests/rigs/", "tests/conftest.py")),
    "rest": Part(("tests",), ("pyproject.toml", "sp_lightning/memory/")),
}


def read(table: pathlib.Path = TABLE) -> dict[str, int]:
    """Read the seconds of each part; the table's parts must be those of `PARTS`."""
    head, *lines = [line.split() for line in table.read_text().splitlines() if line and not line.startswith("#")]
    rows = {name: int(seconds) for name, seconds in lines}
    if head != HEAD or list(rows) != list(PARTS):
        raise ValueError(f"{table} has the parts {list(rows)}, expected {list(PARTS)} under {HEAD}")
    return rows


def write(rows: dict[str, int], table: pathlib.Path = TABLE) -> None:
    """Write the rows below the table's comment."""
    comment = [line for line in table.read_text().splitlines() if line.startswith("#")]
    text = (f"{name:16}{seconds:>8}" for name, seconds in [HEAD, *rows.items()])
    table.write_text("\n".join([*comment, *text]) + "\n")


def arguments(name: str) -> list[str]:
    """List pytest's arguments for a part (Rule 1)."""
    own = PARTS[name].tests
    others = (path for part, of in PARTS.items() if part != name for path in of.tests)
    return [*own, *(f"--deselect={path}" for path in others if path.startswith(own))]


def git(*arguments: str) -> list[str]:
    """List the lines that git prints about this checkout; none where git knows nothing of it."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def change() -> set[str]:
    """List the files of the change (Rule 2)."""
    new = git("ls-files", "--others", "--exclude-standard")
    day = git("log", "-1", "--format=%ct")
    before = git("log", "-1", "--format=%H", f"--before={int(day[0]) - 86400}") if day else []
    base = os.environ.get("CI_BASE", "").strip("0") or (before or [""])[0]  # of a new branch the workflow has zeros
    return {*(git("diff", "--name-only", base) if base else []), *new} - {TABLE.relative_to(ROOT).as_posix()}


def turn() -> int:
    """Return the number of commits, from which parts take turns (Rule 4)."""
    return int((git("rev-list", "--count", "HEAD") or ["0"])[0])


def choose(seconds: float, changed: Collection[str], rows: dict[str, int], turn: int) -> tuple[list[str], list[str]]:
    """Choose the parts to run within so many seconds, and list those that are left out."""

    def touched(name: str) -> bool:
        paths = PARTS[name].code + tuple(test.partition("::")[0] for test in PARTS[name].tests)
        return any(file.startswith(paths) for file in changed)

    first = turn % len(rows)
    chosen, left = [], []
    for name in sorted([*rows][first:] + [*rows][:first], key=lambda name: not touched(name)):
        takes = rows[name] * SPARE
        (chosen if takes <= seconds else left).append(name)
        seconds -= takes if name in chosen else 0
    return chosen, left


def share(text: str, rows: dict[str, int]) -> list[str]:
    """List the parts of a share such as "2/6": the longest go first, each to the share that has least to do."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"a share is one of 1/{count} to {count}/{count}, got {text}")
    shares: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(rows, key=lambda name: -rows[name]):
        min(shares, key=lambda names: sum(rows[name] for name in names)).append(name)
    return shares[number - 1]


def run(names: Iterable[str], seconds: float | None, record: bool) -> int:
    """Run parts one after the other, each to its first failure, all of them within so many seconds."""
    end, failed = time.monotonic() + seconds if seconds is not None else None, []
    rows, expected, taken = read(), 0, 0
    for name in names:
        begin = time.monotonic()
        pace = max(1.0, taken / expected) if expected else 1.0  # Rule 5
        if end is not None and expected and begin + rows[name] * SPARE * pace > end:
            say(f"---- slow part {name}: left out, {end - begin:.0f} s are left on a machine {pace:.1f} times as slow")
            continue
        status = run_tests(arguments(name), end and end - begin)
        took = round(time.monotonic() - begin)
        expected, taken = expected + rows[name], taken + took
        failed += [name] if status else []
        say(f"---- slow part {name}: {status or 'ok'} after {took} s")
        if record and not status:
            write(read() | {name: took})
    if failed:
        say(f"slow parts that failed: {' '.join(failed)}")
    return 1 if failed else 0


def run_tests(arguments: list[str], seconds: float | None) -> str:
    """Run slow tests; say in a word what went wrong."""
    command = [sys.executable, "-m", "pytest", "-n", "auto", "-m", "slow", "-x", *arguments]
    with subprocess.Popen(command) as process:
        try:
            status = process.wait(seconds)
        except BaseException as error:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return "CUT OFF by the budget, which is a failure"
    return {0: "", 5: "FAILED: no test was collected"}.get(status, f"FAILED ({status})")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("choose").add_argument("seconds", type=float)
    options = commands.add_parser("run")
    options.add_argument("part", nargs="*", choices=[*PARTS, "all", []])
    options.add_argument("--within", type=float)
    options.add_argument("--share", metavar="2/6")
    options.add_argument("--record", action="store_true")
    given = parser.parse_args()
    rows = read()
    if given.command == "run" and given.part:
        return run(rows if "all" in given.part else given.part, given.within, given.record)
    if given.command == "run" and given.share:
        return run(share(given.share, rows), given.within, given.record)
    seconds = given.seconds if given.command == "choose" else given.within
    if seconds is None:
        parser.error("run needs parts, --share or --within")
    chosen, left = choose(seconds, change(), rows, turn())
    for what, names in ("chosen", chosen), ("left out", left):
        say(f"slow parts {what}: {' '.join(f'{name} ({rows[name]} s)' for name in names)}")
    return run(chosen, seconds, given.record) if given.command == "run" else 0


if __name__ == "__main__":
    sys.exit(main())
