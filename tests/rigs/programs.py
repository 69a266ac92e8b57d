"""Whole programs of users, each made from a number: `draw` makes one, `outcome` compares its runs, `shrink` cuts it.

    python tests/rigs/programs.py NUMBER [--device simgpu] [--ranks [COUNT] | --lone] [--nodes COUNT] [--alone]
                                    [--shrink]

prints a program as readable steps and runs it, with `--alone` both runs in processes of their own: what torch does the
first time, and what it has counted until then, are as in a user's process. `--shrink` takes away what the program does
and what it sets for as long as the runs still differ, and prints the smallest that is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import forks
import torch
from lightning import seed_everything
from program_edits import (
    AGAIN,
    CALLS,
    COPIES,
    EDITS,
    FAULTS,
    FUNCTIONAL,
    GRAPH,
    HOOKED,
    INSIDE,
    MOMENTS,
    NEW,
    OF_WEIGHTS,
    ON_LOSS,
    OUTSIDE,
    REPLACES,
    STRUCTURE,
    TERMS,
    WRITE_A_WEIGHT,
    WRITES_IN_FORWARD,
    WRITES_KEPT,
)
from program_entries import HOOKS, run
from program_nets import KINDS, USES_TWICE
from program_runs import OPTIMIZERS, OTHER_KERNELS

import parity
from sp_lightning.errors import SuperpipelineError


class Act(NamedTuple):
    """One thing that user code does."""

    step: int  # the batch, from the first of the run
    moment: str
    by: str  # "module" (or the loop), or "callback"
    edit: str
    at: int  # chooses what it is done to
    rank: int | None = None  # that does it alone

    def __str__(self) -> str:
        by = f" of a callback's {HOOKS[self.moment]}" if self.by == "callback" else ""
        alone = "" if self.rank is None else f", by rank {self.rank} alone"
        return f"batch {self.step}, {self.moment}{by}: {self.edit} ({self.at}){alone}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program in plain values, of which the defaults are the simplest."""

    number: int
    entry: str = "by hand"
    kinds: tuple[str, ...] = ("Dense", "Dense")  # of blocks
    batches: int = 3  # in an epoch
    epochs: int = 1
    resumes: str | None = None  # with a new model and a checkpoint, after an epoch
    manual: bool = False
    alternates: bool = False  # between two optimizers, which a LightningModule toggles
    optimizer: str = "sgd"
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

    @property
    def option(self) -> dict[str, Any]:
        return dict(self.options)

    @property
    def activations(self) -> str:
        return str(self.option.get("activations", "keep"))

    @property
    def has_trainer(self) -> bool:
        return self.entry.endswith("lightning")

    @property
    def steps_early(self) -> bool:
        """Whether a Trainer may step units beside backward."""
        return self.has_trainer and not self.manual and bool(self.option.get("optimizer_overlap", True))

    def does(self, *edits: str) -> bool:
        """Whether user code does any of these."""
        return any(act.edit in edits for act in self.acts)

    def __str__(self) -> str:
        own = ("acts", "options")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in own}
        changed = {name: value for name, value in values.items() if name in ALWAYS or value != getattr(SIMPLEST, name)}
        lines = [
            ", ".join(f"{name}={value!r}" for name, value in changed.items()),
            "streamed with " + ", ".join(f"{name}={value!r}" for name, value in self.options),
        ]
        return "\n".join([*lines, *(f"  {act}" for act in self.acts)])


ALWAYS = ("number", "entry", "kinds", "batches")
SIMPLEST = Program(0)


# --- Drawing


def draw(number: int, ranked: bool = False) -> Program:
    """Make a program from its number; ``ranked``: one that DDP can run, on several ranks."""
    dice = random.Random(f"{'ranked ' * ranked}program {number}")
    quiet = dice.random() < 0.5  # nothing keeps a Trainer from stepping units beside backward and the next forward
    entries = ["lightning", "lightning", *["pytorch_lightning"] * (not ranked), "fabric", "by hand"]
    entry = dice.choice(entries)
    trainer = entry.endswith("lightning")
    kinds = tuple(dice.choice([*KINDS]) for _ in range(dice.randint(2, 4))) + ("tied",) * (dice.random() < 0.1)
    manual = trainer and not quiet and dice.random() < 0.5
    groups = dice.choice(["one", "two groups", *["two optimizers"] * (manual or not trainer)])
    resumes = None if ranked else dice.choice([None, None, "streamed", "plain first", "plain last"])
    precision, loss = draw_arithmetic(dice, entry, kinds, ranked)
    optimizers = [*OPTIMIZERS] + [*OTHER_KERNELS] * ranked
    if entry == "fabric":
        optimizers.remove("adagrad")  # whose state is made before the plain run's weights move
    if manual and precision != "32-true":
        optimizers.remove("adafactor")  # whose step would be under the autocast of the plain run's device
    program = Program(
        number,
        entry=entry,
        kinds=kinds,
        batches=dice.choice([3, 4, 5]),
        epochs=2 if resumes else dice.choice([1, 1, 2]),
        resumes=resumes,
        manual=manual,
        alternates=manual and groups == "two optimizers" and dice.random() < 0.5,
        optimizer=dice.choice(optimizers),
        groups=groups,
        schedules=dice.random() < 0.3,
        loss=loss,
        accumulates=dice.choice([1, 1, 2]),
        clips=None if quiet else dice.choice([None, None, "norm", "value"]),
        zeroes=dice.choice(["first", "before backward", "after step"]),
        sets_to_none=dice.random() < 0.7,
        precision=precision,
        validates=dice.random() < 0.3,
        predicts=dice.random() < 0.3,
        options=tuple(draw_options(dice, kinds, quiet, ranked).items()),
    )
    acts: list[Act] = []
    for _ in range(dice.randint(1, 8)):
        acts += draw_act(dice, program, acts, quiet, ranked)
        for _ in range(dice.choice([0, 1, 1, 2]) if acts and EDITS[acts[-1].edit].then else 0):
            acts += draw_act(dice, program, acts, quiet, ranked, after=acts[-1])
    if ranked and any(act.edit.startswith("keep ") for act in acts):  # weights that share memory cannot begin a run
        program = dataclasses.replace(program, epochs=1, predicts=False)
    if program.optimizer == "adamw, fused":  # which a Trainer does not clip with autocast
        program = dataclasses.replace(program, clips=None)
    return dataclasses.replace(program, acts=tuple(sorted(acts, key=lambda act: (act.step, MOMENTS.index(act.moment)))))


def draw_arithmetic(dice: random.Random, entry: str, kinds: tuple[str, ...], ranked: bool) -> tuple[str, str]:
    """Draw precision and loss, of those that are exact in this entry (docs/exactness.md)."""
    precision = dice.choice(["32-true", "32-true", "bf16-mixed"])
    if entry == "fabric" and not USES_TWICE.isdisjoint(kinds):
        precision = "32-true"  # else autocast's cache sums what a weight's uses bring
    losses = ["plain"] * 3
    if entry.endswith("lightning"):
        losses += ["of weights too"]  # elsewhere it would be a read on the host
    if not (entry == "fabric" and precision != "32-true") and (entry.endswith("lightning") or not ranked):
        losses += ["of two calls"]
    if not ranked:
        losses += ["of an input's gradient"] * (precision == "32-true" or entry != "fabric")
    return precision, dice.choice(losses)


def draw_options(dice: random.Random, kinds: tuple[str, ...], quiet: bool, ranked: bool) -> dict[str, Any]:
    """Draw options of streaming."""
    units = [classes(kinds)] * 3 + ["auto"] + [("Linear",)] * (not {"Scaled", "Recurrent", "tied"}.issuperset(kinds))
    options: dict[str, Any] = {
        "window": dice.choice([1, 1, 2, 3, 8]),
        "units": dice.choice(units),
        "activations": dice.choice(["keep", "keep", "recompute", "offload", "recompute+offload"]),
        "optimizer_overlap": quiet or dice.random() < 0.6,
    }
    if options["window"] > 1 and dice.random() < 0.3:
        options["transfer"] = 2
    if dice.random() < 0.3:
        options["host_memory"] = "pageable"
    if dice.random() < 0.3:
        options["wire_dtype"] = "as-is"
    if dice.random() < 0.2:
        options["disk"] = True
    return options


def stepped_there(number: int, ranked: bool = False) -> Program:
    """Make a program from its number, whose optimizer steps on the device, if it is torch's."""
    program = draw(number, ranked)
    if program.optimizer == "by storage":
        return program
    return dataclasses.replace(program, options=(*program.options, ("optimizer_device", "device")))


def offloaded_to_disk(number: int, ranked: bool = False) -> Program:
    """Make a program from its number, whose activations go to the host and, as they exceed it, to the disk.

    It leaves out what a plain run allows, and a checkpoint does not.
    """
    program = draw(number, ranked)
    kind = ("offload", "recompute+offload")[number % 3 == 2]
    program = dataclasses.replace(program, options=(*program.options, ("activations", kind), ("disk", True)))
    return dataclasses.replace(program, acts=tuple(act for act in program.acts if is_right(act, program, [])))


def draw_lone(number: int, ranked: bool = True) -> Program:
    """Make a program of two ranks from its number, of which one rank does something alone."""
    program, dice = draw(number, ranked), random.Random(f"lone {number}")
    at, acts = dice.randrange(len(program.acts) or 1), list(program.acts)
    acts[at : at + 1] = [act._replace(rank=dice.randrange(2)) for act in acts[at : at + 1]]
    return dataclasses.replace(program, acts=tuple(acts))


def classes(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """List the classes of these blocks."""
    return tuple(dict.fromkeys(kind for kind in kinds if kind != "tied"))


def draw_act(
    dice: random.Random, program: Program, before: list[Act], quiet: bool, ranked: bool, after: Act | None = None
) -> Iterator[Act]:
    """Draw something to do, and a moment in which a plain run allows it; ``after``: with what that act left."""
    edits, first = ([*EDITS], 0) if after is None else (EDITS[after.edit].then or [*EDITS], after.step)
    for _ in range(100):
        edit, step = dice.choice(edits), dice.randrange(first, program.batches * program.epochs)
        moment = dice.choice(EDITS[edit].moments)
        by = dice.choice(["module", "callback"]) if program.has_trainer and moment in HOOKS else "module"
        step = {"start": 0, "epoch end": step - step % program.batches + program.batches - 1}.get(moment, step)
        act = Act(step, moment, by, edit, dice.randrange(100))
        is_seen = program.has_trainer and moment in HOOKS and moment not in ("start", "epoch end")
        if (quiet and is_seen) or (ranked and not EDITS[edit].ranked):
            continue
        if happens(act, program) and is_right(act, program, before):
            yield act
            return


def happens(act: Act, program: Program) -> bool:
    """Whether the program comes to this moment."""
    if program.alternates and act.moment == "loss":
        return False
    if act.moment == "stepped":
        return program.manual or not program.has_trainer
    return act.moment != "validation" or program.validates


def is_kept_in_step(act: Act) -> bool:
    """Whether an act keeps what may be on the device."""
    return act.edit.startswith("inside: layer that keeps") or (
        act.edit.startswith("keep ") and act.moment not in OUTSIDE
    )


NOT_OF_WEIGHTS = ("see", "evaluate", "gradient", "optimizer", "backward", "autograd.grad")  # which these do not write


def is_right(act: Act, program: Program, before: list[Act]) -> bool:
    """Whether a plain run allows the act after those before it, and exactness is promised (docs/exactness.md)."""
    if act.edit in FAULTS:
        if program.resumes or any(other.edit in FAULTS for other in before):
            return False
        if act.edit == "fault in backward" and program.loss == "of an input's gradient":
            return False  # the graph of that backward is never freed, as torch's hooks of modules are in it
        return not (act.edit == "fault in backward" and program.steps_early)  # which leaves units stepped
    if act.edit in STRUCTURE and program.resumes:
        return False  # the new model would not take the checkpoint
    edits = {act.edit, *(other.edit for other in before)}
    calls_once = (
        program.loss in ("plain", "of weights too")
        and "tied" not in program.kinds
        and (TERMS | {"backward that fails at the loss"}).isdisjoint(edits)
    )
    if not WRITES_IN_FORWARD.isdisjoint(edits) and not calls_once:
        return False  # a second call in the graph would write what the first one saved
    if act.edit in WRITES_IN_FORWARD and act.edit in INSIDE and not USES_TWICE.isdisjoint(program.kinds):
        return False  # and so would a second use
    if act.edit in TERMS and program.precision != "32-true" and (program.entry == "fabric" or act.step > 0):
        return False  # autocast's cache; may be an error: a layer begins to run several times, or without autocast
    if act.edit == "loss: of a functional_call" and "Checkpointed" in program.kinds:
        return False  # which is computed again with the weights themselves
    differentiates_twice = program.loss == "of an input's gradient" or "loss: of slopes" in edits
    arrives_once = (
        calls_once
        and "autograd.grad of the loss" not in edits
        and not differentiates_twice
        and "Adapting" not in program.kinds
    )
    if "hook that sees later gradients" in edits and not (arrives_once and program.option["units"] != ("Linear",)):
        return False  # which may be of the unit that backward is inside
    if "hook that sees later gradients" in edits and not OF_WEIGHTS.isdisjoint(edits):
        return False  # whose hooks run beside those of modules
    if "backward that fails in a block" in edits and not HOOKED.isdisjoint(edits):
        return False  # which hooks ran before it failed is not promised
    if act.edit in FUNCTIONAL and "tied" in program.kinds:
        return False  # torch leaves what was put in place of the weights
    if "tie" in edits and program.entry == "fabric" and program.precision != "32-true":
        return False  # autocast's cache, as for weights that are used twice
    if sum(not one.isdisjoint(edits) for one in WRITES_KEPT) > 1:
        return False  # which came first may not be known
    if any(is_kept_in_step(one) for one in (act, *before)):
        writes_both = not WRITES_KEPT[0].isdisjoint(edits) and not WRITE_A_WEIGHT.isdisjoint(edits)
        if writes_both or not REPLACES.isdisjoint(edits):
            return False  # which came first is not known, nor whether what is kept has the old data or the new
    if act.edit in ON_LOSS and program.entry == "fabric" and program.precision != "32-true":
        return False  # which only Fabric may differentiate
    if "weight norm by a hook" in edits and not COPIES.isdisjoint(edits):
        return False  # a weight that is computed cannot be copied
    if act.edit == "optimizer: take state away" and program.optimizer == "adagrad":
        return False  # which makes its state when it is made
    if act.edit in INSIDE and act.step > 0 and program.loss == "of two calls" and program.precision != "32-true":
        return False  # may be an error: autocast's copies of a weight were all that earlier steps read
    if act.edit in HOOKED and program.steps_early and act.step > 0:
        return False  # may be an error if units were stepped before it came
    if not NEW.isdisjoint(edits) and not CALLS.isdisjoint(edits):
        return False  # new weights are on the host until the net is called
    if differentiates_twice and (not AGAIN.isdisjoint(edits) or "write to data while a graph is there" in edits):
        return False  # the graph of a backward that is itself differentiated keeps what the weight was
    if act.edit in AGAIN or (act.moment in GRAPH and not act.edit.startswith(NOT_OF_WEIGHTS)):
        # A checkpoint's second run reads what a weight is by then.
        return "recompute" not in program.activations and "Checkpointed" not in program.kinds
    return True


# --- Comparing


class Outcome(NamedTuple):
    """How a streamed run compares with the plain one: "equal", "differs", "refused", or not at all: "discarded"."""

    kind: str
    what: str = ""


Runs = Callable[[Program, bool], parity.Record]  # of a program, plain or streamed


def runs_on(device: torch.device) -> Runs:
    """Return what runs a program in this process."""
    return lambda program, streams: run(on(device, program), device, streams)


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
    """Return what of a program can run on this device: the other Lightning knows no simulated one."""
    if device.type != "cpu" and program.entry == "pytorch_lightning":
        return dataclasses.replace(program, entry="lightning")
    return program


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
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome("differs", f"raised {type(error).__name__}: {error}")
    try:
        parity.compare(expected, found)
    except parity.Difference as difference:
        raised = [error for error in found.telemetry["raised"] if error not in expected.telemetry["raised"]]
        return Outcome("differs", "; ".join([str(difference), *raised]))
    return Outcome("equal")


# --- Shrinking


def shrink(program: Program, still: Callable[[Program], bool]) -> Program:
    """Take away from a program for as long as what is left is still so."""
    while (less := next(filter(still, smaller(program)), None)) is not None:
        program = less
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing less, or with a simpler one."""
    acts, kinds, option = program.acts, program.kinds, program.option
    if len(acts) > 2:
        yield dataclasses.replace(program, acts=acts[: len(acts) // 2])
        yield dataclasses.replace(program, acts=acts[len(acts) // 2 :])
    for index in range(len(acts)):
        yield dataclasses.replace(program, acts=acts[:index] + acts[index + 1 :])
    if program.resumes:
        yield dataclasses.replace(program, resumes=None, epochs=1)
    kept = (*ALWAYS, "acts", "options", "resumes", *["epochs"] * bool(program.resumes))
    for name in (field.name for field in dataclasses.fields(program)):
        if name not in kept and getattr(program, name) != getattr(SIMPLEST, name):
            yield dataclasses.replace(program, **{name: getattr(SIMPLEST, name)})
    for entry in ("by hand", "lightning"):
        if program.entry not in ("by hand", entry):
            loop = {"manual": False, "alternates": False} if entry == "by hand" else {}
            yield dataclasses.replace(program, entry=entry, **loop)
    if program.batches > 1:
        yield dataclasses.replace(program, batches=program.batches - 1)
    for index in range(len(kinds)):
        if len(kinds) > 1:
            yield with_kinds(program, kinds[:index] + kinds[index + 1 :])
        if kinds[index] not in ("Dense", "tied"):
            yield with_kinds(program, (*kinds[:index], "Dense", *kinds[index + 1 :]))
    for name in option:
        if name not in ("window", "units"):
            yield dataclasses.replace(program, options=tuple(item for item in program.options if item[0] != name))
    if option["window"] != 1:
        fewer = {name: value for name, value in option.items() if name != "transfer"} | {"window": 1}
        yield dataclasses.replace(program, options=tuple(fewer.items()))
    for index, act in enumerate(acts):
        for less in (act._replace(by="module"), act._replace(step=max(act.step - 1, 0))):
            if less != act:
                yield dataclasses.replace(program, acts=(*acts[:index], less, *acts[index + 1 :]))


def with_kinds(program: Program, kinds: tuple[str, ...]) -> Program:
    """Return a program with other blocks; its units are those, if they are blocks."""
    units = program.option["units"]
    if units not in ("auto", ("Linear",)):
        units = classes(kinds)
    return dataclasses.replace(program, kinds=kinds, options=tuple((program.option | {"units": units}).items()))


# --- By hand


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int)
    parser.add_argument("--device", choices=parity.DEVICES, default="cpu")
    parser.add_argument("--ranks", type=int, nargs="?", const=2, help="a program of ranks, two or more, beside DDP")
    parser.add_argument("--nodes", type=int, default=1, help="on so many pretended nodes")
    parser.add_argument("--lone", action="store_true", help="the same, where one rank does something alone")
    parser.add_argument("--alone", action="store_true", help="each run in a process of its own")
    parser.add_argument("--shrink", action="store_true")
    given = parser.parse_args()
    device = prepare(given.device)
    program = draw_lone(given.number) if given.lone else draw(given.number, bool(given.ranks))
    runs = (alone_on if given.alone else runs_on)(device)
    if given.ranks or given.lone:
        import program_ranks  # which imports this file

        runs = program_ranks.runs_on(device, given.ranks or 2, given.nodes)
    print(program)
    found = outcome(program, runs)
    print(f"-> {found.kind} {found.what}")
    if given.shrink and found.kind in ("differs", "refused"):
        program = shrink(program, lambda less: attempt(less, runs).kind == found.kind)
        print(f"\nthe smallest:\n{program}\n-> {attempt(program, runs).what}")
    return 0 if found.kind == "equal" else 1


def attempt(program: Program, runs: Runs) -> Outcome:
    """Return the outcome of a program that may not be one: a plain run of it may fail in any way."""
    try:
        return outcome(program, runs)
    except Exception as error:
        return Outcome("discarded", repr(error))


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
