"""Whole programs of users, each made from a number, run plainly and then streamed, and compared bit for bit.

    python tests/rigs/programs.py NUMBER [--device simgpu] [--door DOOR] [--shrink]
                                    [--ranks [COUNT]] [--nodes COUNT]
    python tests/rigs/programs.py --from FIRST --count COUNT [--jobs COUNT] ...

`draw` makes a program within sections 1 to 4 of the contract. `outcome` compares its two runs, one after the other, and
`shrink` cuts a program for as long as they differ. The second form runs many, each in a process that is ended if it
hangs, and prints those that are not equal.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import forks
import torch
from lightning import seed_everything
from program_doors import DOORS, HOOKS, MIXED, OPTIMIZERS, OTHER_KERNELS, record
from program_features import FEATURES, MOMENTS, cannot_ask, refuses_writes, steps_early, writes_wrongly
from program_nets import REENTRANT, USES_TWICE, WITHIN

import parity
from sp_lightning.errors import SuperpipelineError

HANGS_S = 120  # a program that takes longer hangs
BUDGET = 1 << 20  # bytes of the device, where a budget is drawn


class Act(NamedTuple):
    """One thing that user code does."""

    step: int  # the batch, from the first of the run
    moment: str
    by: str  # "module" (or the loop), or "callback"
    feature: str
    at: int  # chooses what it is done to

    def __str__(self) -> str:
        by = f" of a callback's {HOOKS[self.moment]}" if self.by == "callback" else ""
        return f"batch {self.step}, {self.moment}{by}: {self.feature} ({self.at})"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program in plain values, of which the defaults are the simplest."""

    number: int
    door: str = "by hand"
    kinds: tuple[str, ...] = ("Dense", "Dense")  # of blocks
    batches: int = 3  # in an epoch
    epochs: int = 1
    resumes: str | None = None  # with a new model and a checkpoint
    resumes_in_the_middle: bool = False  # of the first epoch, too
    compiled: str | None = None  # "a block", or "the net"
    manual: bool = False
    alternates: bool = False  # between two optimizers, which a LightningModule toggles
    optimizer: str = "sgd"
    closure: bool = False  # by which a loop by hand steps
    groups: str = "one"
    schedules: bool = False
    loss: str = "plain"
    accumulates: int = 1
    clips: str | None = None
    zeroes: str = "first"  # where gradients are cleared
    sets_to_none: bool = True
    precision: str = "32-true"
    validates: bool = False
    predicts: bool = False
    acts: tuple[Act, ...] = ()
    options: tuple[tuple[str, Any], ...] = (("window", 1), ("units", ("Dense",)))  # of streaming

    def replace(self, **values: Any) -> Program:
        return dataclasses.replace(self, **values)

    @property
    def option(self) -> dict[str, Any]:
        return dict(self.options)

    @property
    def activations(self) -> str:
        return str(self.option.get("activations", "keep"))

    @property
    def has_trainer(self) -> bool:
        return self.door in ("trainer", "pytorch_lightning")

    @property
    def is_mixed(self) -> bool:
        return self.precision in MIXED

    def does(self, *names: str) -> bool:
        """Whether user code does anything whose name begins so."""
        return any(act.feature.startswith(names) for act in self.acts)

    def __str__(self) -> str:
        own = ("acts", "options")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in own}
        changed = {name: value for name, value in values.items() if name in SHOWN or value != getattr(SIMPLEST, name)}
        lines = [
            ", ".join(f"{name}={value!r}" for name, value in changed.items()),
            "streamed with " + ", ".join(f"{name}={value!r}" for name, value in self.options),
        ]
        return "\n".join([*lines, *(f"  {act}" for act in self.acts)])


SHOWN = ("number", "door", "kinds", "batches")
SIMPLEST = Program(0)


# --- The contract: what a program may be


def lies_beyond(program: Program) -> Iterator[str]:
    """Yield what of a program section 5 of the contract leaves out."""
    if "Counting" in program.kinds and "recompute" in program.activations:
        yield "a recomputed forward that changes Python state"
    several = program.loss == "of two calls" or not USES_TWICE.isdisjoint(program.kinds)
    if program.is_mixed and program.door in ("fabric", "hf") and (several or program.does("loss: ", "weight: tie")):
        yield "autocast's cache for weights that are used more than once"
    if program.does("end: ") and program.does("keep: ", "keep: with its graph"):
        yield "a view from one run in the next, which moves weights, as Module.to() would"
    if program.does("weight: exchange") and program.does("keep: "):
        yield "a view of a weight that gets another one's data"
    if program.does("module: parametrize") and program.does("keep: "):
        yield "a view of a parameter that was added, before the call that begins to stream it"
    if program.door == "hf" and program.optimizer == "own" and program.does("weight: of a new layer"):
        yield "a default that accelerate gives an optimizer's groups as it moves its state"


def may_be_refused(program: Program) -> bool:
    """Whether section 4 names a typed error for something that a program does."""
    quantised = "Quantised" in program.kinds  # where an option does not take it
    rounds = bool(program.option.get("resident")) and program.optimizer == "adafactor"  # otherwise on the host
    writes = "Writing" in program.kinds and refuses_writes(program)
    # A second gradient after the inner one.
    reads = "Surrounded" in program.kinds or ("Reentrant" in program.kinds and program.loss == "of weights too")
    return (
        quantised
        or rounds
        or writes
        or (reads and steps_early(program))
        or any(FEATURES[act.feature].error(program) for act in program.acts)
    )


def is_refused_today(program: Program) -> bool:
    """Whether there is a typed error that the contract does not name."""
    narrow = program.is_mixed and program.option.get("wire_dtype") != "as-is"
    later = any(act.step > 0 and act.feature.startswith(("loss: ", "inside: ", "evaluate: ")) for act in program.acts)
    copied = "Lent" in program.kinds and program.does("module: copy")  # with a hidden module, which is on the host
    handed = "Handed" in program.kinds and program.does("module: parametrize")  # over the bytes of the weight
    return "Lazy" in program.kinds or (narrow and later) or copied or handed or "memory_budget" in program.option


def is_right(program: Program) -> bool:
    """Whether a plain run of a program has one right result, and all of it is possible."""
    writes = "Writing" in program.kinds and writes_wrongly(program)
    asks = program.loss == "of an input's gradient" and cannot_ask(program)
    return not (writes or asks) and not any(FEATURES[act.feature].unless(program) for act in program.acts)


def happens(act: Act, program: Program) -> bool:
    """Whether the program comes to this moment."""
    if act.moment in ("before backward", "validation") and program.door == "hf":
        return False
    if act.moment == "loss" and program.alternates:
        return False
    if act.moment == "stepped":
        return program.manual or not program.has_trainer
    return act.moment != "validation" or program.validates


# --- Drawing


def draw(number: int, ranked: bool = False, door: str | None = None) -> Program:
    """Make a program from its number; ``ranked``: one that DDP can run, on several ranks."""
    dice = random.Random(f"{'ranked ' * ranked}program {number}")
    while True:
        program = draw_program(dice, number, ranked, door)
        if is_right(program) and not any(lies_beyond(program)):
            return program


def draw_program(dice: random.Random, number: int, ranked: bool, door: str | None) -> Program:
    quiet = dice.random() < 0.5  # nothing keeps a Trainer from stepping units beside backward and the next forward
    doors = ["trainer", "trainer", "fabric", "by hand", "by hand", *["pytorch_lightning", "hf"] * (not ranked)]
    door = dice.choice(doors) if door is None else door
    trainer, loop = door in ("trainer", "pytorch_lightning"), door in ("by hand", "fabric")
    names = [kind.__name__ for kind in WITHIN]
    if ranked:
        names = [name for name in names if name not in ("Quantised", *REENTRANT)]
    if door != "by hand" or ranked:
        names.remove("Lazy")  # the others look at sizes of weights before the first call
    kinds = tuple(dice.choice(names) for _ in range(dice.randint(2, 4))) + ("again",) * (dice.random() < 0.1)
    manual = trainer and not quiet and dice.random() < 0.5
    optimizers = [*OPTIMIZERS, *[*OTHER_KERNELS] * ranked]
    optimizer = dice.choice(optimizers)
    closure = optimizer == "lbfgs" or (loop and not ranked and dice.random() < 0.1)
    several = (manual or loop) and not closure
    groups = dice.choice(["one", *["two groups"] * (optimizer != "lbfgs"), *["two optimizers"] * several])
    precisions = ["32-true", "32-true", "32-true", "bf16-mixed", *["16-mixed"] * (not closure and door != "hf")]
    losses = ["plain"] * 3 + ["of weights too"] * trainer + ["of two calls"] * (trainer or not ranked)
    resumes = None if ranked else dice.choice([None, None, "streamed", "plain first", "plain last"])
    program = Program(
        number,
        door=door,
        kinds=kinds,
        batches=dice.choice([3, 4, 5]),
        epochs=2 if resumes else dice.choice([1, 1, 2]),
        resumes=resumes,
        resumes_in_the_middle=bool(resumes) and door == "by hand" and dice.random() < 0.5,
        compiled=dice.choice(["a block", "the net"]) if door == "by hand" and dice.random() < 0.1 else None,
        manual=manual,
        alternates=manual and groups == "two optimizers" and dice.random() < 0.5,
        optimizer=optimizer,
        closure=closure,
        groups=groups,
        schedules=dice.random() < 0.3,
        loss=dice.choice(losses + ["of an input's gradient"] * (not ranked)),
        accumulates=1 if closure else dice.choice([1, 1, 2]),
        clips=None if quiet else dice.choice([None, None, "norm", *["value"] * (door != "hf")]),
        zeroes=dice.choice(["first", "before backward", *["after step"] * (not closure)]),
        sets_to_none=dice.random() < 0.7,
        precision=dice.choice(precisions),
        validates=door != "hf" and dice.random() < 0.3,
        predicts=dice.random() < 0.3,
        options=tuple(draw_options(dice, kinds, quiet).items()),
    )
    for _ in range(dice.randint(1, 8)):
        program = draw_act(dice, program, quiet, ranked)
        left = program.acts[-1:]
        for _ in range(dice.choice([0, 1, 1, 2]) if left and FEATURES[left[0].feature].then else 0):
            program = draw_act(dice, program, quiet, ranked, after=left[0])
    acts = sorted(program.acts, key=lambda act: (act.step, MOMENTS.index(act.moment)))
    return without_errors_of_torch(program.replace(acts=tuple(acts)), ranked)


def without_errors_of_torch(program: Program, ranked: bool) -> Program:
    """Take from a program what torch or Lightning refuse, or what two plain runs do not do alike."""
    if program.door == "fabric" and program.optimizer == "adagrad":
        program = program.replace(optimizer="adam")  # its state is made before the plain run's weights move
    if program.manual and program.is_mixed and program.optimizer == "adafactor":
        program = program.replace(optimizer="adamw")  # its step would be under the autocast of the plain run's device
    if program.optimizer == "adamw, fused":
        program = program.replace(clips=None)  # a Trainer does not clip it with autocast
    if program.optimizer == "lbfgs" and (program.manual or program.is_mixed or program.door == "hf"):
        program = program.replace(optimizer="own", closure=False)  # nothing passes a closure, or the scaler takes none
    shares = not {"again", "Tied"}.isdisjoint(program.kinds) or program.does("weight: ", "keep: ")
    if "Quantised" in program.kinds or (program.door == "hf" and shares):
        program = program.replace(resumes=None, resumes_in_the_middle=False)  # it has no checkpoint
    if ranked and program.does("keep: "):
        program = program.replace(epochs=1, predicts=False)  # weights that share memory cannot begin a run
    return program


def draw_options(dice: random.Random, kinds: tuple[str, ...], quiet: bool) -> dict[str, Any]:
    """Draw options of streaming."""
    whole = {"Scaled", "Recurrent", "again", "Quantised", "Lazy", "Normalised"}
    options: dict[str, Any] = {
        "window": dice.choice([1, 1, 2, 3, 8]),
        "units": dice.choice([classes(kinds)] * 3 + ["auto"] + [("Linear",)] * (not whole.issuperset(kinds))),
        "activations": dice.choice(["keep", "keep", "recompute", "offload", "recompute+offload"]),
        "optimizer_overlap": quiet or dice.random() < 0.6,
    }
    if options["window"] > 1 and dice.random() < 0.3:
        options["transfer"] = 2
    if dice.random() < 0.3:
        options["host_memory"] = "pageable"
    if dice.random() < 0.3:
        options["wire_dtype"] = "as-is"
    if dice.random() < 0.1:
        options |= {"window": "auto", "memory_budget": BUDGET, "transfer": "auto"}
    if dice.random() < 0.1:
        options["disk"] = True
    if dice.random() < 0.15:
        options["resident"] = dice.choice([1, 2])
    return options


def classes(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """List the classes of these blocks."""
    return tuple(dict.fromkeys(kind for kind in kinds if kind != "again"))


def draw_act(dice: random.Random, program: Program, quiet: bool, ranked: bool, after: Act | None = None) -> Program:
    """Add something to do, and a moment in which a plain run allows it; ``after``: with what that act left."""
    names, first = ([*FEATURES], 0) if after is None else (FEATURES[after.feature].then, after.step)
    for _ in range(100):
        name, step = dice.choice(names), dice.randrange(first, program.batches * program.epochs)
        feature, at = FEATURES[name], dice.randrange(100)
        moment = dice.choice(feature.moments)
        by = dice.choice(["module", "callback"]) if program.has_trainer and moment in HOOKS else "module"
        step = {"start": 0, "epoch end": step - step % program.batches + program.batches - 1}.get(moment, step)
        act = Act(step, moment, by, name, at)
        is_seen = program.has_trainer and moment in HOOKS and moment not in ("start", "epoch end")
        if (quiet and is_seen) or (ranked and not feature.ranks):
            continue
        more = program.replace(acts=(*program.acts, act))
        if happens(act, program) and is_right(more):
            return more
    return program


def stepped_there(number: int) -> Program:
    """Make a program from its number, whose optimizer steps on the device, if it is torch's."""
    program = draw(number)
    there = program.optimizer not in ("own", "lbfgs")
    return program.replace(options=(*program.options, ("optimizer_device", "device"))) if there else program


# --- Comparing


class Outcome(NamedTuple):
    """How a streamed run compares with the plain one.

    "equal"; "allowed": a typed error that section 4 names; "refused": another one; "differs"; "races"; or not at all:
    "discarded".
    """

    kind: str
    what: str = ""


WRONG = ("differs", "refused", "races")
Runs = Callable[[Program, bool], parity.Record]  # of a program, plain or streamed


def runs_on(device: torch.device) -> Runs:
    """Return what runs a program in this process."""
    return lambda program, streams: record(on(device, program), device, streams)


def alone_on(device: torch.device) -> Runs:
    """Return what runs a program in a process that has run nothing before."""

    def runs(program: Program, streams: bool) -> parity.Record:
        with tempfile.TemporaryDirectory() as folder:
            asked, told = os.path.join(folder, "asked"), os.path.join(folder, "told")
            torch.save((program, streams, device.type), asked)
            done = forks.run("import programs, sys; programs.answer(*sys.argv[1:])", asked, told, modules=("programs",))
            if done.returncode:
                raise RuntimeError(done.stderr)
            found = torch.load(told, weights_only=False)
        if isinstance(found, Exception):
            raise found
        return found

    return runs


def answer(asked: str, told: str) -> None:
    """Run the program in this file, and write what it left, or its error, into that one."""
    program, streams, kind = torch.load(asked, weights_only=False)
    device = prepare(kind)
    seed_everything(0, verbose=False)
    try:
        found: parity.Record | Exception = runs_on(device)(program, streams)
    except Exception as error:
        found = type(error)(*error.args)
    torch.save(found, told)


def on(device: torch.device, program: Program) -> Program:
    """Return what of a program can run on this device: some things know no simulated one."""
    if device.type == "cpu":
        return program
    door = "trainer" if program.door == "pytorch_lightning" else program.door
    return program.replace(door=door, compiled=None)


def outcome(program: Program, runs: Runs) -> Outcome:
    """Run a program plainly and streamed; where these differ, plainly again, for two plain runs may differ too."""
    try:
        expected = runs(program, False)
    except Exception as error:  # where no batch is trained
        return Outcome("discarded", f"the plain run ends with {type(error).__name__}: {error}")
    if failed := [error for error in expected.telemetry["raised"] if not error.startswith("Fault")]:
        return Outcome("discarded", f"the plain run raises {failed[0]}")
    found = compared(expected, program, runs)
    if found.kind == "differs":
        try:
            parity.compare(expected, runs(program, False))
        except parity.Difference as difference:
            return Outcome("discarded", f"two plain runs differ: {difference}")
    return found


def compared(expected: parity.Record, program: Program, runs: Runs) -> Outcome:
    """Run a program streamed, and compare it with what a plain run left."""
    try:
        found = runs(program, True)
    except SuperpipelineError as error:
        return Outcome(
            "allowed" if may_be_refused(program) or is_refused_today(program) else "refused",
            f"{type(error).__name__}: {error}",
        )
    except Exception as error:
        return Outcome("differs", f"raised {type(error).__name__}: {error}")
    try:
        parity.compare(expected, found)
    except parity.Difference as difference:
        raised = [error for error in found.telemetry["raised"] if error not in expected.telemetry["raised"]]
        return Outcome("differs", "; ".join([str(difference), *raised]))
    if races := found.telemetry.get("races"):
        return Outcome("races", races[0])
    peak, budget = found.telemetry.get("peak", 0), program.option.get("memory_budget")
    if budget is not None and peak > budget and not program.option.get("resident"):  # whose state is there as well
        return Outcome("differs", f"{peak} bytes are on the device, where {budget} are allowed")
    return Outcome("equal")


# --- Shrinking


def shrink(program: Program, still: Callable[[Program], bool]) -> Program:
    """Take away from a program for as long as what is left is one that is still so."""
    while (less := next((one for one in smaller(program) if is_right(one) and still(one)), None)) is not None:
        program = less
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing less, or with a simpler one."""
    acts, kinds, option = program.acts, program.kinds, program.option
    if len(acts) > 2:
        yield program.replace(acts=acts[: len(acts) // 2])
        yield program.replace(acts=acts[len(acts) // 2 :])
    for index in range(len(acts)):
        yield program.replace(acts=acts[:index] + acts[index + 1 :])
    if program.resumes:
        yield program.replace(resumes=None, resumes_in_the_middle=False, epochs=1)
    kept = (*SHOWN, "acts", "options", "resumes", *["epochs"] * bool(program.resumes))
    kept += ("closure",) * (program.optimizer == "lbfgs")
    for name in (field.name for field in dataclasses.fields(program)):
        if name not in kept and getattr(program, name) != getattr(SIMPLEST, name):
            yield program.replace(**{name: getattr(SIMPLEST, name)})
    for door in ("by hand", "trainer"):
        if program.door not in ("by hand", door):
            yield program.replace(door=door, **({"manual": False, "alternates": False} if door == "by hand" else {}))
    if program.batches > 1:
        yield program.replace(batches=program.batches - 1)
    for index in range(len(kinds)):
        if len(kinds) > 1:
            yield with_kinds(program, kinds[:index] + kinds[index + 1 :])
        if kinds[index] not in ("Dense", "again"):
            yield with_kinds(program, (*kinds[:index], "Dense", *kinds[index + 1 :]))
    for name in option:
        if name not in ("window", "units"):
            yield program.replace(options=tuple(item for item in program.options if item[0] != name))
    if option["window"] != 1:
        fewer = {name: value for name, value in option.items() if name != "transfer"} | {"window": 1}
        yield program.replace(options=tuple(fewer.items()))
    for index, act in enumerate(acts):
        for less in (act._replace(by="module"), act._replace(step=max(act.step - 1, 0))):
            if less != act:
                yield program.replace(acts=(*acts[:index], less, *acts[index + 1 :]))


def with_kinds(program: Program, kinds: tuple[str, ...]) -> Program:
    """Return a program with other blocks; its units are those, if they are blocks."""
    units = program.option["units"]
    if units not in ("auto", ("Linear",)):
        units = classes(kinds)
    return program.replace(kinds=kinds, options=tuple((program.option | {"units": units}).items()))


# --- By hand


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=parity.DEVICES, default="cpu")
    parser.add_argument("--door", choices=DOORS)
    parser.add_argument("--ranks", type=int, nargs="?", const=2, help="a program of ranks, two or more, beside DDP")
    parser.add_argument("--nodes", type=int, default=1, help="on so many pretended nodes")
    parser.add_argument("--shrink", action="store_true")
    given = parser.parse_args()
    if given.number is None and given.jobs > 0:
        return run_many(given)
    device = prepare(given.device)
    runs = runs_on(device)
    if given.ranks:
        import program_ranks  # which imports this file

        runs = program_ranks.runs_on(device, given.ranks, given.nodes)
    numbers = range(given.first, given.first + given.count) if given.number is None else [given.number]
    kinds = [run_one(number, given, runs) for number in numbers]
    return 1 if any(kind in WRONG for kind in kinds) else 0


def run_one(number: int, given: argparse.Namespace, runs: Runs) -> str:
    """Run a program and print how it came out, with the program itself if it is not equal."""
    faulthandler.dump_traceback_later(0.0 + HANGS_S, exit=True)
    program = draw(number, bool(given.ranks), given.door)
    found = outcome(program, runs)
    shows = given.number is not None or found.kind in WRONG
    print(f"{number}: {found.kind} {found.what}", *[program] * shows, sep="\n", flush=True)
    if given.shrink and found.kind in WRONG:
        faulthandler.dump_traceback_later(10.0 * HANGS_S, exit=True)
        small = shrink(program, lambda less: outcome(less, runs).kind == found.kind)
        print(f"the smallest: {outcome(small, runs).what}", small, sep="\n", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return found.kind


def run_many(given: argparse.Namespace) -> int:
    """Run programs in processes, begin another one behind a program that ended its process, and count the outcomes."""
    counts: collections.Counter[str] = collections.Counter()

    def run_share(numbers: list[int]) -> None:
        while numbers:
            more = ["--jobs", "0", "--from", str(numbers[0]), "--count", str(len(numbers))]
            command = [sys.executable, __file__, *sys.argv[1:], *more]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
                threading.Thread(target=end_group, args=[process]).start()
                assert process.stdout is not None
                for line in process.stdout:
                    number, _, rest = line.partition(": ")
                    if numbers and number == str(numbers[0]):
                        counts[rest.split()[0]] += 1
                        numbers.pop(0)
                    if not rest.startswith("equal"):
                        print(line, end="", flush=True)
            if numbers:
                counts["ended"] += 1
                print(f"{numbers.pop(0)}: ended its process, or hung", flush=True)

    every = range(given.first, given.first + given.count)
    with ThreadPoolExecutor(given.jobs) as pool:
        share = -(-given.count // given.jobs)
        list(pool.map(run_share, [list(every[first : first + share]) for first in range(0, given.count, share)]))
    print(dict(counts))
    return 1 if any(counts[kind] for kind in (*WRONG, "ended")) else 0


def end_group(process: subprocess.Popen[str]) -> None:
    """Wait until a process has ended, and end its ranks: they would hold its output open."""
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def prepare(kind: str) -> torch.device:
    """Set up a process as the suite does, in a directory of its own."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if kind == "simgpu":
        import simgpu  # noqa: F401
    os.chdir(tempfile.mkdtemp())
    return parity.device_of(kind)


if __name__ == "__main__":
    import programs  # one module, whichever way it is reached

    sys.exit(programs.main())
