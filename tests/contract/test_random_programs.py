"""Whole programs, each made from a number, have streamed the bits of their plain run (tests/rigs/programs.py).

A program within sections 1 to 4 of the contract never differs, and is refused where section 4 says so. One that the
plain run refuses tells nothing; few do.

    python tests/rigs/programs.py NUMBER --shrink
"""

from __future__ import annotations

import collections
import logging

import program_doors
import program_nets
import program_ranks
import programs
import pytest
import torch
from program_features import FEATURES, MOMENTS

import parity

OFTEN, ALL, SHEET = 6, 600, 20  # programs in the default run, in the slow one, and in each of its tests
ALONE = 60  # programs in processes of their own
RANKED = 40  # programs of two ranks
COVER = 1000  # numbers in which every feature is drawn
TELL_NOTHING = 8  # of a sheet: the plain run raises, is not the same twice, or the program may be refused

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("silence")]


@pytest.fixture
def silence():
    """Keep what two Lightnings log out of the report of a failure."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def outcomes(drawn, runs):
    """Run programs; return how many came out in which way, after a failure that names all that are wrong."""
    found = [(program, programs.outcome(program, runs)) for program in drawn]
    wrong = [f"{program}\n-> {one.kind} {one.what}" for program, one in found if one.kind in programs.WRONG]
    assert not wrong, "\n\n".join(wrong)
    return collections.Counter(one.kind for _, one in found)


def sheet(first, draw=programs.draw, **rest):
    return [draw(number, **rest) for number in range(first, first + SHEET)]


@pytest.mark.parametrize(
    "number, device",
    [
        pytest.param(number, device, marks=[pytest.mark.simgpu] * (device == "simgpu"))
        for number, device in enumerate(parity.DEVICES * (OFTEN // 2))
    ],
    indirect=["device"],
)
def test_a_random_program_has_the_plain_runs_bits(number, device):
    assert not outcomes([programs.draw(number)], programs.runs_on(device)).get("discarded")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, SHEET))
def test_random_programs_have_the_plain_runs_bits(first, device):
    assert outcomes(sheet(first), programs.runs_on(device))["equal"] >= SHEET - TELL_NOTHING


@pytest.mark.simgpu
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL // 2, SHEET))
def test_random_programs_step_on_the_device_as_plain_ones(first):
    runs = programs.runs_on(torch.device("simgpu"))
    assert outcomes(sheet(first, programs.stepped_there), runs)["equal"] >= SHEET - TELL_NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("first", range(ALL, ALL + ALONE, SHEET))
def test_random_programs_in_processes_of_their_own(first, device):
    """Where a graph of gradients is recomputed there, torch sums in an order of its own."""
    summed = [one for one in sheet(first) if one.loss != "of an input's gradient"]
    assert outcomes(summed, programs.alone_on(device))["equal"] >= len(summed) - TELL_NOTHING


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("first", range(0, RANKED, SHEET))
def test_random_programs_on_ranks_have_the_bits_of_ddp(first, size, nodes, device):
    drawn = sheet(first + RANKED * (nodes - 1), ranked=True)
    assert outcomes(drawn, program_ranks.runs_on(device, size, nodes))["equal"] >= SHEET - TELL_NOTHING


@pytest.mark.parametrize("door", ["by hand", "trainer"])
def test_a_fault_in_a_programs_prediction_is_caught_in_both_runs(door, device):
    act = programs.Act(0, "epoch end", "module", "end: fault in forward", 0)
    program = programs.Program(0, door=door, batches=1, predicts=True, acts=(act,))
    runs = programs.runs_on(device)
    assert [error.split(":")[0] for error in runs(program, False).telemetry["raised"]] == ["Fault"]
    assert programs.outcome(program, runs) == ("equal", "")


# --- What they found


def test_weights_may_be_exchanged_after_a_run_without_autocast(device):
    acts = [
        programs.Act(7, "before step", "module", "evaluate: a block", 90),
        programs.Act(8, "batch start", "module", "weight: exchange", 76),
    ]
    program = programs.Program(
        1385,
        door="trainer",
        kinds=("Dense",),
        batches=5,
        epochs=2,
        resumes="plain first",
        precision="bf16-mixed",
        acts=tuple(acts),
        options=(("window", 1), ("units", ("Linear",))),
    )
    assert programs.outcome(program, programs.runs_on(device)) == ("equal", "")


@pytest.mark.slow
def test_graphs_of_gradients_are_summed_in_order_from_the_start(device):
    program = programs.Program(
        3483,
        kinds=("Checkpointed", "Normed", "Checkpointed", "Batched"),
        batches=5,
        optimizer="adafactor",
        loss="of an input's gradient",
        accumulates=2,
        zeroes="after step",
        sets_to_none=False,
        acts=(programs.Act(4, "epoch end", "module", "hook: scales", 24),),
        options=(("window", 8), ("units", ("Linear",)), ("host_memory", "pageable")),
    )
    assert programs.outcome(program, programs.alone_on(device)) == ("equal", "")


def test_state_of_a_weight_that_freezes_within_a_step_has_its_place(device):
    program = programs.Program(
        3130,
        door="trainer",
        kinds=("Dense", "Dense"),
        batches=2,
        optimizer="rmsprop",
        accumulates=2,
        acts=(programs.Act(1, "forward", "module", "freeze: some", 18),),
        options=(("window", 1), ("units", ("Dense",))),
    )
    assert programs.outcome(program, programs.runs_on(device)) == ("equal", "")


# --- That looking changes nothing


@pytest.mark.parametrize("number", range(0, OFTEN, 4))
@pytest.mark.slow
def test_what_a_program_sees_changes_nothing(number, device):
    program = programs.on(device, programs.draw(number))
    blind = program_doors.record(program, device, False, observes=False)
    seeing = program_doors.record(program, device, False)
    at_end = [entry for entry in seeing.entries if entry.where == "end"]
    assert blind.entries and len(at_end) < len(seeing.entries)
    parity.compare(parity.Record(at_end), blind)


# --- What they are


def test_a_program_is_made_from_its_number_alone():
    assert programs.draw(7) == programs.draw(7) != programs.draw(8)


def test_programs_do_everything_in_the_contract():
    drawn = [programs.draw(number) for number in range(COVER)]
    assert {act.feature for program in drawn for act in program.acts} == {*FEATURES}
    assert {act.moment for program in drawn for act in program.acts} == set(MOMENTS)
    assert {kind for program in drawn for kind in program.kinds} == {*program_nets.KINDS, "again"}
    assert {program.door for program in drawn} == set(program_doors.DOORS)
    assert {program.optimizer for program in drawn} == {*program_doors.OPTIMIZERS}
    for name in ("groups", "loss", "resumes", "precision", "clips", "zeroes", "accumulates", "closure", "compiled"):
        assert len({getattr(program, name) for program in drawn}) > 1, name
    for name in ("activations", "window", "transfer", "optimizer_overlap", "disk", "host_memory", "wire_dtype"):
        assert len({program.option.get(name) for program in drawn}) > 1, name


def test_a_default_program_lies_within_the_contract():
    assert not [name for number in range(COVER) for name in programs.lies_beyond(programs.draw(number))]


def test_a_program_is_cut_to_what_is_looked_for():
    drawn = map(programs.draw, range(800))
    program = next(one for one in drawn if one.does("write: mul_") and len(one.acts) > 3)
    small = programs.shrink(program, lambda less: less.does("write: mul_"))
    (act,) = small.acts
    assert (act.feature, small.kinds, small.batches, small.door) == ("write: mul_", ("Dense",), 1, "by hand")
    assert str(small).splitlines()[-1] == f"  batch 0, {act.moment}: write: mul_ ({act.at})"
