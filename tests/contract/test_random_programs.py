"""Whole programs, each made from a number, do streamed what they do plainly, bit for bit (tests/rigs/programs.py).

A program chooses its entry, its loop, its model, the options of streaming, and what user code does in hooks and between
steps. One that the plain run refuses tells nothing; few do, and none that is promised may be refused when it streams.

    python tests/rigs/programs.py NUMBER --shrink
"""

from __future__ import annotations

import collections
import functools
import logging

import program_edits
import program_ranks
import programs
import pytest
import torch

import parity
from sp_lightning.autograd import offload
from sp_lightning.core.unit_numbers import aligned
from sp_lightning.disk import activation_blocks
from sp_lightning.memory.host_copy import HostCopy
from sp_lightning.runtime.engine import Engine

OFTEN, ALL, SHEET = 12, 600, 20  # programs in the default run, in the slow one, and in each of its tests
ALONE = 60  # programs in processes of their own
RANKED = 40  # programs of two ranks
TELL_NOTHING = 2  # of a sheet: the plain run raises, or is not the same twice

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("silence")]


@pytest.fixture
def silence():
    """Keep what two Lightnings log out of the report of a failure."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def outcomes(numbers, runs, ranked=False, draw=programs.draw):
    """Run programs; return how many came out in which way, after a failure that names all that differ."""
    found = {number: programs.outcome(draw(number, ranked), runs) for number in numbers}
    wrong = [
        f"{draw(number, ranked)}\n-> {outcome.kind} {outcome.what}"
        for number, outcome in found.items()
        if outcome.kind in ("differs", "refused")
    ]
    assert not wrong, "\n\n".join(wrong)
    return collections.Counter(outcome.kind for outcome in found.values())


@pytest.mark.parametrize(
    "number, device",
    [
        pytest.param(number, device, marks=[pytest.mark.simgpu] * (device == "simgpu"))
        for number, device in enumerate(parity.DEVICES * (OFTEN // 2))
    ],
    indirect=["device"],
)
@pytest.mark.few(6)
def test_a_random_program_does_what_it_does_plainly(number, device):
    runs = programs.runs_on(device)
    if outcomes([number], runs) == {"equal": 1}:
        return
    # The first plain run of a process may sum in another order than the next ones (docs/exactness.md).
    assert outcomes([number], runs) == {"equal": 1}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, SHEET))
def test_random_programs_do_what_they_do_plainly(first, device):
    assert outcomes(range(first, first + SHEET), programs.runs_on(device))["equal"] >= SHEET - TELL_NOTHING


@pytest.mark.simgpu
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL // 2, SHEET))
def test_random_programs_step_on_the_device_as_plain_ones_there(first):
    runs = programs.runs_on(torch.device("simgpu"))
    found = outcomes(range(first, first + SHEET), runs, draw=programs.stepped_there)
    assert found["equal"] >= SHEET - TELL_NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL // 4, SHEET))
def test_random_programs_do_what_they_do_plainly_with_activations_on_the_disk(first, device, monkeypatch):
    """In blocks of a page, with room for four tensors at most, of which one is in memory."""
    written = []
    for name, value in {"BLOCK_NBYTES": 4096, "SMALLEST": 4096, "LEAST": 1, "BEHIND": 1}.items():
        monkeypatch.setattr(activation_blocks, name, value)
    monkeypatch.setattr(activation_blocks, "aligned", functools.partial(aligned, alignment=1024))
    monkeypatch.setattr(offload, "ALIGNMENT", 64)  # smaller tensors would stay on the device
    write = activation_blocks.ActivationBlocks._write
    monkeypatch.setattr(activation_blocks.ActivationBlocks, "_write", lambda *given: written.append(1) or write(*given))
    found = outcomes(range(first, first + SHEET), programs.runs_on(device), draw=programs.offloaded_to_disk)
    assert found["equal"] >= SHEET - TELL_NOTHING and len(written) > 3 * SHEET


@pytest.mark.slow
@pytest.mark.parametrize("first", range(ALL, ALL + ALONE, SHEET))
def test_random_programs_do_in_processes_of_their_own_what_they_do_plainly(first, device):
    numbers = [number for number in range(first, first + SHEET) if not recomputes_under_a_graph(programs.draw(number))]
    assert outcomes(numbers, programs.alone_on(device))["equal"] >= len(numbers) - TELL_NOTHING


def recomputes_under_a_graph(program):
    """Whether sums may come in another order on a device (docs/exactness.md)."""
    return program.loss == "of an input's gradient" and "recompute" in program.activations


@pytest.mark.seldom
def test_graphs_of_gradients_are_summed_in_order_from_a_processs_first_step_on(device):
    program = programs.Program(
        3483,
        kinds=("Checkpointed", "Adapting", "Checkpointed", "Batched"),
        batches=5,
        optimizer="adafactor",
        loss="of an input's gradient",
        accumulates=2,
        zeroes="after step",
        sets_to_none=False,
        acts=(
            programs.Act(0, "stepped", "module", "write to view of data", 87),
            programs.Act(4, "epoch end", "module", "hook that scales", 24),
        ),
        options=(("window", 8), ("units", ("Linear",)), ("host_memory", "pageable")),
    )
    assert programs.outcome(program, programs.alone_on(device)) == ("equal", "")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, RANKED, SHEET))
def test_random_programs_do_on_two_ranks_what_they_do_under_ddp(first, device):
    found = outcomes(range(first, first + SHEET), program_ranks.runs_on(device), ranked=True)
    assert found["equal"] >= SHEET - TELL_NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("first", range(RANKED, 2 * RANKED, SHEET))
def test_random_programs_do_on_two_nodes_what_they_do_under_ddp(first, size, device):
    found = outcomes(range(first, first + SHEET), program_ranks.runs_on(device, size, nodes=2), ranked=True)
    assert found["equal"] >= SHEET - TELL_NOTHING


@pytest.mark.slow
@pytest.mark.parametrize(("first", "size"), [(2 * RANKED, 2), (2 * RANKED + SHEET, 4)])
def test_random_programs_do_with_divided_state_what_they_do_under_ddp(first, size):
    """Or say why not: a weight that was given other data is refused, once there is state."""
    runs = program_ranks.runs_on(torch.device("cpu"), size, nodes=2)
    drawn = [program_ranks.divided(programs.draw(number, ranked=True)) for number in range(first, first + SHEET)]
    found = [programs.outcome(program, runs) for program in drawn]
    wrong = [outcome for outcome in found if outcome.kind == "differs"]
    wrong += [outcome for outcome in found if outcome.kind == "refused" and "was given other data" not in outcome.what]
    assert not wrong
    assert sum(outcome.kind == "equal" for outcome in found) >= SHEET * 3 // 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, RANKED, SHEET))
def test_what_one_rank_alone_does_is_refused_or_has_the_effect_that_it_has_under_ddp(first, device):
    """Never silently another one; and no rank waits for good (processes.TIMEOUT)."""
    runs = program_ranks.runs_on(device)
    found = {number: programs.outcome(programs.draw_lone(number), runs) for number in range(first, first + SHEET)}
    wrong = [f"{programs.draw_lone(number)}\n-> {one}" for number, one in found.items() if one.kind == "differs"]
    assert not wrong, "\n\n".join(wrong)
    kinds = collections.Counter(one.kind for one in found.values())
    assert kinds["discarded"] <= TELL_NOTHING and min(kinds["equal"], kinds["refused"]) > 0


@pytest.mark.parametrize("entry", ["by hand", "lightning"])
def test_a_fault_that_comes_when_a_program_predicts_is_caught_in_both_runs(entry, device):
    act = programs.Act(0, "epoch end", "module", "fault in forward", 0)
    program = programs.Program(0, entry=entry, batches=1, predicts=True, acts=(act,))
    runs = programs.runs_on(device)
    assert [error.split(":")[0] for error in runs(program, False).telemetry["raised"]] == ["Fault"]
    assert programs.outcome(program, runs) == ("equal", "")


# --- What they found


@pytest.mark.few(1)
def test_weights_that_are_exchanged_after_their_block_ran_without_autocast(device):
    acts = [(7, "before step", "module", "evaluate a block", 90), (8, "batch start", "module", "exchange weights", 76)]
    program = programs.Program(
        1385,
        entry="lightning",
        kinds=("Dense",),
        batches=5,
        epochs=2,
        resumes="plain first",
        precision="bf16-mixed",
        acts=tuple(programs.Act(*act) for act in acts),
        options=(("window", 1), ("units", ("Linear",))),
    )
    assert programs.outcome(program, programs.runs_on(device)) == ("equal", "")


@pytest.mark.few(1)
def test_a_view_that_is_kept_from_a_step_is_one_of_the_weight_after_the_fit(device):
    acts = (
        programs.Act(0, "stepped", "module", "keep view", 56),
        programs.Act(2, "forward", "module", "write to what was kept", 96),
    )
    program = programs.Program(2221, entry="lightning", kinds=("Dense",), batches=2, epochs=2, manual=True, acts=acts)
    assert programs.outcome(program, programs.runs_on(device)) == ("equal", "")


@pytest.mark.seldom
def test_a_write_after_the_last_step_to_a_frozen_weight_that_it_read_under_autocast(device):
    program = programs.Program(
        2556,
        entry="lightning",
        kinds=("Batched", "Frozen", "Scaled"),
        precision="bf16-mixed",
        acts=(
            programs.Act(2, "forward", "module", "keep T", 6),
            programs.Act(2, "epoch end", "module", "write to what was kept", 59),
        ),
        options=(("window", 1), ("units", ("Batched", "Frozen", "Scaled"))),
    )
    assert programs.outcome(program, programs.runs_on(device)) == ("equal", "")


@pytest.mark.parametrize("step, moment", [(1, "before step"), (1, "batch end"), (2, "batch start"), (1, "epoch end")])
@pytest.mark.parametrize("edit", ["see what was kept", "write to what was kept"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.few(1)
def test_a_view_of_what_a_step_read_under_autocast_is_one_of_the_weight(step, moment, edit, overlap, device):
    acts = (programs.Act(1, "forward", "module", "keep T", 6), programs.Act(step, moment, "module", edit, 59))
    options = (("window", 1), ("units", ("Dense",)), ("optimizer_overlap", overlap))
    program = programs.Program(
        2556,
        entry="lightning",
        batches=2 if moment == "epoch end" else 3,
        precision="bf16-mixed",
        acts=acts,
        options=options,
    )
    assert programs.outcome(program, programs.runs_on(device)) == ("equal", "")


@pytest.mark.slow
def test_an_optimizer_that_writes_to_storages_does_on_two_ranks_what_it_does_under_ddp():
    program = programs.Program(0, batches=2, optimizer="by storage")
    assert programs.outcome(program, program_ranks.runs_on(parity.device_of("cpu"))) == ("equal", "")


@pytest.mark.parametrize(
    "acts",
    [
        ((0, "forward", "keep [0]"),),
        ((0, "forward", "keep T"), (1, "batch start", "write to what was kept")),
        ((0, "forward", "keep [0]"), (2, "batch end", "write to what was kept")),
    ],
    ids=lambda acts: f"{len(acts)}, {acts[-1][1]}",
)
@pytest.mark.seldom
def test_a_view_that_is_kept_from_a_step_is_one_of_what_all_ranks_have_stepped(acts, device):
    """Units are stepped beside backward, and by one rank before another one."""
    acts = [programs.Act(step, moment, "module", edit, 63) for step, moment, edit in acts]
    program = programs.Program(80, entry="lightning", kinds=("Dense",), batches=4, acts=tuple(acts))
    assert programs.outcome(program, program_ranks.runs_on(device)) == ("equal", "")


# --- That they see


def never_stale(monkeypatch):
    monkeypatch.setattr(Engine, "mark_stale", lambda *_: None)


def no_wait_for_a_unit(monkeypatch):
    monkeypatch.setattr(HostCopy, "wait_step", lambda *_: None)


def no_wait_before_a_read(monkeypatch):
    monkeypatch.setattr(Engine, "before_host_access", lambda *_: None)


@pytest.mark.parametrize("mutant", [never_stale, no_wait_for_a_unit, no_wait_before_a_read])
@pytest.mark.seldom
def test_a_wrong_engine_is_found_within_forty_programs(mutant, monkeypatch):
    runs = programs.runs_on(parity.device_of("cpu"))
    for number in range(40):
        program = programs.draw(number)
        expected = runs(program, False)
        with monkeypatch.context() as patch:
            mutant(patch)
            if programs.compared(expected, program, runs).kind == "differs":
                return
    pytest.fail("not found")


@pytest.mark.parametrize("number", range(0, OFTEN, 4))
@pytest.mark.seldom
def test_what_a_program_sees_changes_nothing(number, device):
    program = programs.on(device, programs.draw(number))
    blind = programs.run(program, device, False, observes=False)
    seeing = programs.run(program, device, False)
    at_end = [entry for entry in seeing.entries if entry.where == "end"]
    assert blind.entries and len(at_end) < len(seeing.entries)
    parity.compare(parity.Record(at_end), blind)


# --- What they are


def test_a_program_is_made_from_its_number_alone():
    assert programs.draw(7) == programs.draw(7) != programs.draw(8)


def test_programs_do_everything():
    drawn = [programs.draw(number) for number in range(ALL)]
    assert {act.edit for program in drawn for act in program.acts} == set(program_edits.EDITS)
    assert {act.moment for program in drawn for act in program.acts} == set(program_edits.MOMENTS)
    for name in ("entry", "optimizer", "groups", "loss", "resumes", "precision", "clips", "zeroes"):
        assert min(collections.Counter(getattr(program, name) for program in drawn).values()) > ALL // 40, name
    assert any(program.alternates for program in drawn)
    for name in ("activations", "window", "optimizer_overlap", "disk", "host_memory", "wire_dtype"):
        assert len({program.option.get(name) for program in drawn}) > 1, name


def test_a_program_is_cut_to_what_is_looked_for():
    program = next(p for p in map(programs.draw, range(100)) if p.does("mul_") and len(p.acts) > 3)
    small = programs.shrink(program, lambda less: less.does("mul_"))
    (act,) = small.acts
    assert (act.edit, small.kinds, small.batches, small.entry) == ("mul_", ("Dense",), 1, "by hand")
    assert str(small).splitlines()[-1] == f"  batch 0, {act.moment}: mul_ ({act.at})"
