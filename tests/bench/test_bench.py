"""``python -m sp_lightning bench``: who is measured, how turns are timed, what is reckoned and what is said."""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch

from sp_lightning.bench import Entry, Setting, compare, contenders, entries, referee, report, turns, worker
from sp_lightning.bench.figures import Result, Row, Spread
from sp_lightning.bench.floor import Costs
from sp_lightning.cli import main
from sp_lightning.core.machine import Machine
from sp_lightning.errors import MissingExtraError, OptionError, UnsupportedError
from sp_lightning.memory.device import Device
from sp_lightning.planning import shapes
from sp_lightning.planning.shapes import SHAPES, build, multiplied

ROOT = pathlib.Path(__file__).parents[2]
TINIEST = "--device cpu --batch 1 --seq 8 --steps 2 --repetitions 2 --windows 1,all".split()
HERE = Machine("here", 1e9, 1e8, 1e8, 1.0, 28e7, 0, 0)


def setting(**given):
    return Setting.parse(**{"device": "cpu", "model": "tiny", "batch": 1, "seq": 8, "steps": 2, **given})


def costs(**given):
    chosen = setting(**given)
    with torch.device("meta"):
        return Costs.of(build(chosen.shape), chosen)


def row(label="plain", losses=(1.0, 2.0), seconds=(0.2,), batches=2, **options):
    made = Row(Entry(label, options))
    for took in seconds:
        report = {"seconds": took, "batches": batches, "losses": list(losses), "allocated_peak": None, "details": {}}
        made.add(report, host_peak=round(1000 * took))
    return made


def result(*rows, **given):
    reckoned = costs(**given)
    for each in rows:
        each.compute(reckoned, HERE)
    return Result(reckoned.setting, reckoned, HERE, {"device": "cpu"}, True, rows)


def text(what):
    return "\n".join(str(part) for part in report.table(what).renderables)


# ---- the command


@pytest.mark.slow
@pytest.mark.parametrize("others, windows", [([], [1]), (["fsdp2", "accelerate"], [1, "all"])], ids=["ours", "all"])
def test_the_command_measures_all_and_finds_our_losses_equal_to_the_plain_ones(others, windows, tmp_path):
    files = ["--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "result.png")]
    contenders = ["--contenders", ",".join(["plain", "superpipeline", *others])]
    contenders += ["--windows", ",".join(map(str, windows))]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit, match="0"):
        main(["bench", *TINIEST, *contenders, *files])
    found = json.loads((tmp_path / "result.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    plain, *ours = rows["plain"], *(rows[f"superpipeline window={window}"] for window in windows)
    assert [one["losses"] for one in ours] == [plain["losses"]] * len(windows) and found["differences"] == []
    if "accelerate" in others:
        assert "accelerate" in rows["accelerate"]["error"] and rows["accelerate"]["error"] in printed.getvalue()
    for label in ("plain", *(name for name in others if name != "accelerate"), *(one["label"] for one in ours)):
        assert rows[label]["step_s"]["median"] > 0 < rows[label]["host_peak"] and len(rows[label]["repetitions"]) == 2
        assert f"\n{label} " in printed.getvalue() and repr(rows[label]["losses"][-1]) in printed.getvalue()
    assert found["machine"]["flops_per_s"] > 0 and found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert (tmp_path / "result.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_command_compares_answers_of_one_batch_and_of_several_at_once(tmp_path, capsys):
    given = [*TINIEST, "--inference", "--model", "llama-tiny", "--answer", "3", "--at-once", "1,2"]
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *given, "--contenders", "plain,superpipeline", "--json", str(tmp_path / "found.json")])
    assert stopped.value.code == 0
    found = json.loads((tmp_path / "found.json").read_text())
    ours = [row for row in found["rows"] if row["label"] != "plain"]
    assert len({row["label"] for row in ours}) == len(ours) > 1 and found["differences"] == []
    assert [row["error"] for row in found["rows"]] == [None] * (len(ours) + 1)
    assert "superpipeline window=1 predict_at_once=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "llama-2t"], "model must be one of tiny, .*, got 'llama-2t'"),
        (["--contenders", "plain,deepsped"], "contenders must be among plain, .*, got 'deepsped'"),
        (["--precision", "8"], "precision must be one of '32-true', .*, got '8'"),
        (["--windows", "0"], "window must be an int >= 1 or 'auto', got '0'"),
        (["--set", "transfer"], "--set must be NAME=VALUE, got 'transfer'"),
        (["--set", "depth=2"], "an option must be one of window, .*, got 'depth'"),
        (["--device-memory", "1GiB"], "device_memory limits an accelerator's allocator, and the device is the CPU"),
        (["--model", "vit-tiny", "--seq", "8"], "seq must be 17 for this model: patches and a class, got 8"),
        (["--model", "llava-tiny"], "seq must be more than the 16 patches of an image, got 8"),
        (["--repetitions", "0"], "repetitions must be an int >= 1, got 0"),
        (["--clip", "-1"], "clip must be a number > 0, got -1"),
        (["--answer", "-1", "--inference"], "answer must be an int >= 0, got -1"),
        (["--answer", "2"], "answer must be given together with --inference, got 2"),
        (["--answer", "2", "--inference"], "model must be one that generates, such as 'llama-1b', got 'tiny'"),
        (["--at-once", "1,0", "--inference"], "--at-once must be ints >= 1, with commas between, got '1,0'"),
        (["--at-once", "2"], "--at-once must be given together with --inference, got '2'"),
        (["--device", "abacus"], "device must be one of 'cpu'.*, got 'abacus'"),
    ],
)
def test_a_wrong_value_is_refused_by_name_before_anything_runs(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(referee, "COMMAND", ["must not be started"])
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *TINIEST, *arguments])
    assert re.search(said, capsys.readouterr().err)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs matplotlib, .*: pip install 'sp-lightning\[plots\]'"):
        report.check_plot()


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'llama-1b' needs transformers.*'sp-lightning\[models\]'"):
        setting(model="llama-1b", seq=None)


# ---- processes


def compared(monkeypatch, code, names=("plain",), left_s=lambda: math.inf, keep=lambda result: None, **given):
    """Rows of processes that do this instead of their job."""
    machine = {"machine": dataclasses.asdict(HERE), "device": "cpu"}
    monkeypatch.setattr(referee, "describe_machine", lambda setting: machine)
    monkeypatch.setattr(referee, "COMMAND", [sys.executable, "-c", code])
    return compare(setting(**given), [Entry(name) for name in names], left_s=left_s, keep=keep).rows


def error_of(monkeypatch, code, **given):
    """What is said of such a process."""
    return compared(monkeypatch, code, **given)[0].error


def test_a_process_ends_when_the_one_that_began_it_is_gone(monkeypatch):
    monkeypatch.setattr(worker, "LOOKS_S", 0.01)
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        parent = os.getpid()
        if (grandchild := os.fork()) == 0:
            worker.end_with(parent)
        os.write(writes, str(grandchild).encode())
        os._exit(0)
    os.waitpid(child, 0)
    left = psutil.Process(int(os.read(reads, 20)))
    with contextlib.suppress(psutil.NoSuchProcess):
        while left.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_a_process_that_was_killed_is_told_by_its_signal(monkeypatch):
    code = "import os, sys; print('some words', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    assert error_of(monkeypatch, code) == "ended by SIGKILL: some words"


def test_a_process_that_hangs_ends_at_the_time_limit(monkeypatch):
    assert error_of(monkeypatch, "import time; time.sleep(60)", time_limit=0.2) == "no answer within 0.2 s"


def test_a_process_that_hangs_ends_soon_after_the_time_that_is_left(monkeypatch):
    monkeypatch.setattr(referee, "GRACE_S", 0.1)
    assert error_of(monkeypatch, "import time; time.sleep(60)", left_s=lambda: 0.1) == "no answer within 0.2 s"


TURNS = """
import json, sys
sys.stdin.readline()
print(json.dumps({"how": "", "resident_set": 0}), flush=True)
turn = {"seconds": 1.0, "batches": 2, "losses": [0.5], "allocated_peak": None, "reserved_peak": None, "details": {}}
while print(json.dumps(turn), flush=True) or sys.stdin.readline():
    pass
"""


def test_what_was_measured_is_kept_after_each_turn_and_when_time_is_over(monkeypatch):
    left, kept = iter([30, 30]), []  # asked before a turn, and for its limit
    rows = compared(
        monkeypatch,
        TURNS,
        ["plain", "fsdp2"],
        repetitions=2,
        left_s=lambda: next(left, 0),
        keep=lambda result: kept.append([row.step_s and row.step_s.median for row in result.rows]),
    )
    assert kept == [[rows[0].step_s.median, None]]
    assert [row.error for row in rows] == [None, "not begun: no time left"] and len(rows[0].repetitions) == 1


def test_a_machine_that_was_busy_at_first_has_the_figures_of_the_end(monkeypatch):
    busy = dataclasses.replace(HERE, flops_per_s=HERE.flops_per_s / 30, optimizer_bytes_per_parameter=28, duplex=0.5)
    quiet = dataclasses.replace(HERE, up_bytes_per_s=HERE.up_bytes_per_s / 2, dram_bytes_per_s=14e7)
    measured = iter([busy, quiet])
    monkeypatch.setattr(referee, "_measured", lambda _: {"machine": vars(next(measured)), "device": "cpu"})
    monkeypatch.setattr(referee, "COMMAND", [sys.executable, "-c", TURNS])
    found = compare(setting(), [Entry("superpipeline", {"window": 1})])
    assert found.machine == dataclasses.replace(HERE, optimizer_bytes_per_parameter=28)
    assert found.rows[0].floor_s == found.costs.floor_s(found.machine, 1)


def test_a_machine_that_cannot_be_measured_again_has_the_figures_of_the_beginning(monkeypatch):
    said = iter([{"machine": vars(HERE), "device": "cpu"}])

    def measured(_):
        for found in said:
            return found
        raise referee.ContenderError("ended by SIGKILL")

    monkeypatch.setattr(referee, "_measured", measured)
    monkeypatch.setattr(referee, "COMMAND", [sys.executable, "-c", TURNS])
    assert compare(setting(), [Entry("plain")]).machine == HERE


@pytest.mark.parametrize("seconds", [1e-6, 1e6])
def test_a_step_that_took_less_than_its_floor_tells_that_the_machine_was_not_quiet(seconds):
    said = "The machine was not quiet while it was measured" in text(
        result(row("superpipeline", (1,), [seconds], window=1))
    )
    assert said == (seconds < 1)


def test_an_error_is_told_in_one_line():
    assert worker.in_one_line(RuntimeError("out of memory\nTried to allocate")) == "RuntimeError: out of memory"
    assert worker.in_one_line(KeyError()) == "KeyError"


def test_processes_stay_only_where_all_fit_into_half_of_the_free_host_memory():
    assert referee.fit_together(setting(), 5, 1000, host_free=200_000)
    assert not referee.fit_together(setting(), 5, 1000, host_free=199_999)


@pytest.mark.simgpu
def test_processes_never_stay_on_an_accelerator():
    assert not referee.fit_together(setting(device="simgpu"), 1, 1000, host_free=2**40)


def done(contender, **given):
    """The reports of a process, had by doing its job here."""
    reports = []
    options = {"window": 1} if contender == "superpipeline" else {}
    options |= {name: given.pop(name) for name in ("predict_at_once",) if name in given}
    chosen = setting(**{"model": "llama-tiny", **given}).as_dict()
    job = {"setting": chosen, "contender": contender, "options": options, "repetitions": 1}
    worker.work_on(job, reports.append)
    return reports[-1]


@pytest.mark.simgpu
def test_on_a_device_the_first_loss_is_the_plain_one_and_the_allocators_peak_is_known():
    import simgpu.lightning  # noqa: F401

    ours, plain = (done(contender, device="simgpu") for contender in ("superpipeline", "plain"))  # in one process
    assert ours["losses"][0] == plain["losses"][0] and len(ours["losses"]) == worker.WARM_UP + 2
    assert 0 < ours["allocated_peak"] < plain["allocated_peak"] <= plain["reserved_peak"]


@pytest.mark.parametrize("contender", ["plain", "superpipeline", "fsdp2"])
@pytest.mark.few(1)
def test_inference_gives_the_same_losses(contender):
    assert done(contender, inference=True)["losses"] == done("plain", inference=True)["losses"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model, seq", [("llama-tiny", 8), ("llava-tiny", 20)])
@pytest.mark.few(1)
def test_answers_are_the_same_alone_and_several_batches_at_once(model, seq, precision):
    given = {"inference": True, "answer": 3, "model": model, "seq": seq, "precision": precision}
    plain, alone, together = (
        done(contender, **given, **more)
        for contender, more in (("plain", {}), ("superpipeline", {}), ("superpipeline", {"predict_at_once": 2}))
    )
    assert len(set(plain["losses"])) == 4 and alone["losses"] == plain["losses"]
    assert (
        together["losses"] == (2 * plain["losses"])[:7]
    )  # of 2 steps before and 2 that count, one is not reported yet
    assert [each["batches"] for each in (plain, alone, together)] == [2, 2, 4]


@pytest.mark.parametrize("contender, library", [("accelerate", "accelerate"), ("group-offload", "diffusers")])
@pytest.mark.few(1)
def test_peers_answer_the_same(contender, library):
    pytest.importorskip(library)
    given = {"inference": True, "answer": 3}
    assert done(contender, **given)["losses"] == done("plain", **given)["losses"]


@pytest.mark.seldom
def test_batches_at_once_share_the_trips_of_a_step():
    bytes_up = [
        done("superpipeline", inference=True, answer=3, **more)["details"]["bytes_up"]
        for more in ({}, {"predict_at_once": 2})
    ]
    assert bytes_up[1] < 1.1 * bytes_up[0]  # twice the batches by then


def test_what_gathers_for_forwards_refuses_to_answer():
    with pytest.raises(UnsupportedError, match="no answer is one"):
        done("fsdp2", inference=True, answer=3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.few(1)
def test_recomputing_blocks_changes_no_loss(precision):
    kept = done("plain", precision=precision)["losses"]
    assert done("plain", precision=precision, activations="recompute")["losses"] == kept
    assert done("superpipeline", precision=precision, activations="recompute")["losses"] == kept


@pytest.mark.parametrize(
    "contender, name", [("accelerate", "accelerate's cpu_offload"), ("group-offload", "diffusers' group offloading")]
)
def test_what_only_infers_refuses_to_train(contender, name):
    with pytest.raises(UnsupportedError, match=f"{name} serves inference only"):
        worker.CONTENDERS[contender]().run(worker.Work(setting(), Device("cpu")), None)


@pytest.mark.parametrize("contender", ["deepspeed", "torchao"])
def test_what_only_trains_refuses_to_infer(contender):
    with pytest.raises(UnsupportedError, match="takes part in training only"):
        worker.CONTENDERS[contender]().run(worker.Work(setting(inference=True), Device("cpu")), None)


def test_a_limit_of_device_memory_is_handed_to_the_allocator(monkeypatch):
    limits = []
    module = type("module", (), {"set_per_process_memory_fraction": lambda *limit: limits.append(limit)})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = Device("cpu")
    device.limit_memory(device.memory()[1] // 4)
    assert limits == [(pytest.approx(0.25), torch.device("cpu"))]


# ---- turns


class Watched:
    """A device that notes when it is waited for."""

    def __init__(self):
        self.events = []

    def synchronize(self):
        self.events.append("synchronize")

    def free_cached(self):
        self.events.append("free")

    def allocator_peaks(self):
        return {}


def test_a_repetition_is_timed_between_two_waits_for_the_device_after_a_step_that_does_not_count(monkeypatch):
    device = Watched()
    monkeypatch.setattr(turns.time, "perf_counter", itertools.count().__next__)
    note = device.events.append
    batches = turns.Turns(
        [{"number": torch.tensor(0.0)}, {"number": torch.tensor(1.0)}],
        device,
        steps=2,
        repetitions=2,
        warm_up=1,
        report=lambda facts: note((facts["seconds"], facts["losses"])),
        wait=lambda: note("wait"),
    )
    for batch in batches:
        batches.add_loss(batch["number"])
        note("step")
    first = ["step", "synchronize", "step", "step", "synchronize", (1, [0.0, 1.0, 0.0]), "free", "wait"]
    second = ["step", "synchronize", "step", "step", "synchronize", (1, [1.0, 0.0, 1.0]), "step"]
    assert device.events == first + second and len(batches) == 7


def test_a_step_of_several_batches_is_timed_from_the_first_of_it():
    device = Watched()
    batches = turns.Turns(
        [{"number": torch.tensor(float(number))} for number in range(3)],
        device,
        steps=1,
        repetitions=2,
        warm_up=1,
        at_once=2,
        report=lambda facts: device.events.append((facts["batches"], facts["losses"])),
        wait=lambda: device.events.append("wait"),
    )
    for batch in batches:
        batches.add_loss(batch["number"])
        device.events.append("batch")
    step, wait = ["batch"] * 2, "synchronize"
    first = [*step, wait, *step, wait, (2, [0.0, 1.0, 2.0, 0.0]), "free", "wait"]
    second = [*step, wait, *step, wait, (2, [1.0, 2.0, 0.0, 1.0]), *step]
    assert device.events == first + second and len(batches) == 10


# ---- figures


def test_the_spread_of_a_fixed_list():
    spread = Spread.of([1.2, 1.0, 1.1, 0.9])
    assert (spread.median, spread.low, spread.high) == (1.05, 0.9, 1.2)
    assert spread.relative == pytest.approx(0.3 / 1.05)


def test_figures_follow_from_the_median_of_the_repetitions():
    made = row(seconds=[0.2, 0.6, 0.4], batches=4)
    reckoned = costs(steps=4)
    made.compute(reckoned, HERE)
    assert made.step_s == Spread(0.1, 0.05, 0.15) and made.tokens_per_s == 80 and made.host_peak == 600
    assert made.flops_per_s == reckoned.flops / 0.1


def test_a_model_takes_6_operations_per_parameter_and_real_token_and_none_for_a_table():
    with torch.device("meta"):
        module = build(SHAPES["tiny"])
    table = module.embedding.weight.numel()
    assert costs().flops == 6 * 8 * (costs().parameters - table)
    assert costs(inference=True).flops == costs().flops / 3


def test_a_tied_table_counts_once():
    with torch.device("meta"):
        module = build(SHAPES["llama-tiny"])
    assert sum(multiplied(module).values()) == sum(parameter.numel() for parameter in module.parameters())


def test_weights_that_autocast_casts_travel_as_halves():
    full, half = (costs(precision=precision).units[1] for precision in ("32-true", "bf16-mixed"))
    weights = (3 + 1 + 4 + 4) * 256 * 256
    assert full.up_nbytes == 4 * full.parameters and full.up_nbytes - half.up_nbytes == 2 * weights


def test_a_larger_window_has_a_lower_floor():
    slow_up = dataclasses.replace(HERE, flops_per_s=1e15, dram_bytes_per_s=1e15, down_bytes_per_s=1e15)
    one, four, all_of_them = (costs().floor_s(slow_up, window) for window in (1, 4, 10))
    assert one > four > all_of_them


def test_in_inference_what_stays_does_not_travel():
    slow_link = dataclasses.replace(HERE, flops_per_s=1e15)
    reckoned = costs(inference=True)
    assert reckoned.floor_s(slow_link, len(reckoned.units)) == reckoned.flops / 1e15
    come = [unit.up_nbytes for unit in reckoned.units if not unit.resident]
    assert reckoned.floor_s(slow_link, 1) == sum(come[1:]) / 1e8


def test_an_answer_has_a_forward_of_the_prompts_and_one_of_each_further_token():
    given = {"model": "llama-tiny", "inference": True, "batch": 2}
    answers, forward = costs(**given, answer=5), costs(**given)
    with torch.device("meta"):
        head = build(SHAPES["llama-tiny"]).model.get_output_embeddings().weight.numel()
    assert answers.token_flops == 2 * 2 * answers.parameters and answers.tokens == 2 * 5
    assert answers.flops == forward.flops - 2 * 2 * (8 - 1) * head + 4 * answers.token_flops
    slow_link, slow = (dataclasses.replace(HERE, flops_per_s=rate) for rate in (1e15, 1.0))
    assert answers.floor_s(slow_link, 1) == pytest.approx(5 * forward.floor_s(slow_link, 1))
    assert answers.floor_s(slow_link, 1, at_once=4) == pytest.approx(answers.floor_s(slow_link, 1) / 4)
    assert answers.floor_s(slow, 1, at_once=4) == pytest.approx(answers.flops)


def test_a_towers_patches_are_of_the_prompts_alone():
    reckoned = costs(model="llava-tiny", seq=20, inference=True, answer=2)
    assert 0 < reckoned.token_flops < 2 * reckoned.parameters


def test_an_automatic_window_has_the_floor_of_the_window_that_was_found():
    auto, two = row("superpipeline", window="auto"), row("superpipeline", window=2)
    auto.repetitions[-1]["details"] = {"window": 2}
    for each in (auto, two):
        each.compute(costs(), HERE)
    assert auto.floor_s == two.floor_s and auto.merit == two.floor_s / auto.step_s.median


def test_our_losses_must_be_the_plain_ones_on_the_cpu():
    found = result(row(), row("superpipeline", losses=(1.0, 2.5), window=1))
    assert found.differences == ["superpipeline window=1 has loss 2.5 at step 2, plain 2.0"]
    assert "Losses that must be equal differ:" in text(found)


@pytest.mark.parametrize("option", ["fused_optimizer", "master_weights"])
def test_with_another_arithmetic_only_the_first_loss_must_be(option):
    assert result(row(), row("superpipeline", losses=(1.0, 2.5), window=1, **{option: True})).differences == []
    assert result(row(), row("superpipeline", losses=(1.5, 2.5), window=1, **{option: True})).differences != []


@pytest.mark.simgpu
def test_with_steps_on_the_device_all_losses_must_be_the_plain_ones_there():
    for where, count in (("host", 0), ("device", 1)):
        found = result(row(), row("superpipeline", losses=(1.0, 2.5), window=1, optimizer_device=where))
        for each in found.rows:
            each.repetitions *= 2
        there = dataclasses.replace(found, setting=dataclasses.replace(found.setting, device="simgpu"))
        assert len(there.differences) == count


@pytest.mark.simgpu
@pytest.mark.parametrize("again, count", [((1.0, 2.5), 1), ((1.0, 2.75), 0), ((1.25, 2.5), 0), (None, 0)])
def test_where_kernels_may_add_in_another_order_only_what_a_row_repeats_must_be_equal(again, count):
    ours = row("superpipeline", losses=(1.0, 2.5), window=1, optimizer_device="device")
    rows = row(), ours
    for each, losses in ((rows[0], rows[0].losses), (ours, again)):
        each.repetitions[1:] = [] if again is None else [{**each.repetitions[0], "losses": losses}]
    found = result(*rows)
    there = dataclasses.replace(found, setting=dataclasses.replace(found.setting, device="simgpu"))
    assert len(there.differences) == count


@pytest.mark.simgpu
def test_the_floor_on_a_device_has_the_time_of_what_lies_between_products():
    slow = dataclasses.replace(HERE, device_bytes_per_s=1e6)
    here, there = costs(seq=64), costs(seq=64, device="simgpu")
    assert here.floor_s(slow, 1) == here.floor_s(HERE, 1)  # the CPU's caches hold it
    moved = sum(unit.forward_other + unit.backward_other for unit in there.units)
    compute = sum(unit.forward_s(slow) + unit.backward_s(slow) for unit in there.units)
    assert compute == pytest.approx(there.flops / slow.flops_per_s + moved / 1e6)
    assert there.floor_s(slow, 1) > compute > 2 * there.flops / slow.flops_per_s


@pytest.mark.simgpu
def test_the_floor_of_steps_on_the_device_is_the_links():
    link = dataclasses.replace(HERE, up_bytes_per_s=1e6, down_bytes_per_s=1e6)
    there = dataclasses.replace(costs(), setting=dataclasses.replace(setting(), device="simgpu"))
    host, device = row("superpipeline", window=1), row("superpipeline", window=1, optimizer_device="device")
    for each in (host, device):
        each.compute(there, link)
    up = 16 * sum(unit.parameters for unit in there.units)
    assert device.floor_s >= up / 1e6 > host.floor_s


def test_our_losses_must_be_the_same_for_every_window():
    rows = [row("superpipeline", losses=(1.0, loss), window=window) for window, loss in ((1, 2.0), (2, 2.5))]
    assert result(*rows).differences == ["superpipeline window=2 has loss 2.5 at step 2, superpipeline window=1 2.0"]


def test_an_error_stands_below_the_table_in_one_line():
    failed = row("torchao", seconds=())
    failed.error = "AssertionError: CUDA only"
    assert "\n  torchao: AssertionError: CUDA only" in text(result(row(), failed))


# ---- models


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.few(7)
def test_a_model_has_the_blocks_that_it_names(name):
    with torch.device("meta"):
        module = build(SHAPES[name])
    assert set(SHAPES[name].blocks) <= {type(child).__name__ for child in module.modules()}


def test_a_model_is_the_same_each_time_and_leaves_the_users_random_numbers():
    torch.manual_seed(3)
    first = build(SHAPES["tiny"]).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    second = build(SHAPES["tiny"]).state_dict()
    assert all(torch.equal(first[name], second[name]) and first[name].abs().max() <= 1 for name in first)


@pytest.mark.parametrize("name", ["tiny", "llama-tiny", "vit-tiny", "llava-tiny"])
@pytest.mark.few(3)
def test_a_model_trains_all_of_its_blocks(name):
    shape = SHAPES[name]
    module = build(shape)
    module(**shape.inputs(shape.batch, shape.seq, torch.Generator())).backward()
    blocks = [child for child in module.modules() if type(child).__name__ in shape.blocks]
    assert blocks and all(parameter.grad is not None for block in blocks for parameter in block.parameters())


# ---- what a visit of a unit takes the host, beside FSDP2


@pytest.fixture
def overhead():
    spec = importlib.util.spec_from_file_location("host_overhead", ROOT / "benchmarks" / "host_overhead.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.few(1)
def test_what_is_timed_beside_fsdp2_computes_what_the_plain_module_does(overhead, window):
    """Before, between and after it is timed."""
    x = torch.randn(overhead.BATCH, overhead.WIDTH)
    expected = overhead.outcome(overhead.stack(3), x)
    assert len(expected) == 1 + 3 * 12 and all(tensor.all() for tensor in expected)
    with overhead.contenders(3, torch.device("cpu"), window) as modules:
        assert list(modules) == ["plain", "superpipeline", "fsdp2"]
        for _ in range(3):
            for module in modules.values():
                torch.testing.assert_close(overhead.outcome(module, x), expected, rtol=0, atol=0)
            taken = overhead.added(modules, x)
            assert {by: len(both) for by, both in taken.items()} == {"core": 2, "clock": 2}


def test_nothing_is_timed_that_computes_something_else(overhead):
    x = torch.randn(overhead.BATCH, overhead.WIDTH)
    other = overhead.stack(2)
    with torch.no_grad():
        other[0].layers[0].bias[0] += 1
    with pytest.raises(SystemExit, match="fsdp2 computes other losses or gradients than the plain module"):
        overhead.check({"plain": overhead.stack(2), "fsdp2": other}, x)


@pytest.mark.slow
def test_host_overhead_prints_both_times_and_their_ratio(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "host_overhead.py"), "--units", "2", "3", "--repeat", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([*command, "--json", "found.json"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {units: len(rows) for units, rows in found["units"].items()} == {"2": 2, "3": 2}
    assert re.search(r"\n +2 +\d+ us +\d+ us +[\d.]+ ", done.stdout)
    assert f"takes the host {found['ratio']:.2f} of what FSDP2 adds to it" in done.stdout


# ---- entries


def test_this_strategy_has_a_row_for_each_window():
    rows = entries(["plain", "superpipeline"], ["2", "all"], {"transfer": "1"})
    ours = [f"superpipeline window={window} transfer=1" for window in (2, "all")]
    assert [row.label for row in rows] == ["plain", *ours]


def test_this_strategy_has_a_row_for_each_number_of_batches_at_once():
    rows = entries(["superpipeline"], [1, 2], at_once=[1, 4])
    assert [row.label for row in rows] == [
        f"superpipeline window={window}{together}" for window in (1, 2) for together in ("", " predict_at_once=4")
    ]
    assert [row.at_once for row in rows] == [1, 4, 1, 4]


def test_initialisation_that_draws_again_what_is_out_of_bounds_ends():
    matrix = torch.full((4, 4), 1e30)
    with shapes._MatricesLater():
        torch.nn.init.trunc_normal_(matrix)
    assert not matrix.any()


# ---- several devices


@pytest.mark.slow
def test_two_devices_are_compared_with_ddp_and_fsdp(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *TINIEST, "--devices", "2", "--json", str(tmp_path / "found.json")])
    assert stopped.value.code == 0
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "superpipeline window=1", "superpipeline window=all", "fsdp2"]
    assert [row["error"] for row in rows.values()] == [None] * 4
    assert rows["plain"]["losses"] == rows["superpipeline window=1"]["losses"]
    assert all(row["host_peak"] > 0 for row in rows.values())
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(2 * 8 / row["step_s"]["median"])
    assert "1 x 8 tokens on each of 2 devices" in capsys.readouterr().out


@pytest.mark.slow
def test_two_pretended_machines_are_compared_with_ddp_and_the_hook(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *TINIEST, "--devices", "2", "--nodes", "2", "--json", str(tmp_path / "found.json")])
    assert stopped.value.code == 0
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    assert [row["error"] for row in rows.values()] == [None] * 4
    assert (
        rows["plain"]["losses"]
        == rows["superpipeline window=1"]["losses"]
        == rows["superpipeline window=all"]["losses"]
    )
    assert len(set(rows["plain"]["losses"])) > 1
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(4 * 8 / row["step_s"]["median"])
    assert "1 x 8 tokens on each of 2 devices of 2 pretended machines" in capsys.readouterr().out


def test_losses_of_several_machines_equal_those_of_ddp_with_the_hook():
    rows = row(losses=(1.0, 2.0)), row("superpipeline", (1.0, 2.5), window=1)
    assert result(*rows, devices=2, nodes=2).differences


def test_nodes_are_pretended_by_processes_of_the_cpu():
    assert setting(devices=2, nodes=2).ranks == 4
    with pytest.raises(OptionError, match=r"devices must be at most \d+ on this CPU with 2 nodes, got 99"):
        setting(devices=99, nodes=2)
    with pytest.raises(OptionError, match="nodes must be an int >= 1, got 0"):
        setting(nodes=0)


def test_a_contender_for_one_device_says_so():
    with pytest.raises(UnsupportedError, match="DeepSpeed takes part with one device only"):
        contenders.refuse(setting(devices=2), "DeepSpeed")
    with pytest.raises(UnsupportedError, match="DeepSpeed takes part with one device only"):
        contenders.refuse(setting(nodes=2), "DeepSpeed")


def test_several_devices_do_not_compare_inference():
    with pytest.raises(UnsupportedError, match="several devices are compared in training only"):
        setting(devices=2, inference=True)


def test_no_devices_are_refused():
    with pytest.raises(OptionError, match="devices must be an int >= 1, got 0"):
        setting(devices=0)


def test_more_than_two_devices_equal_stock_ddp_in_the_first_loss_alone():
    """Its sums of more gradients change with its buckets."""
    ours = ("superpipeline", (1.0, 2.5))
    for devices, differ in ((2, True), (4, False)):
        rows = row(losses=(1.0, 2.0)), row(*ours, window=1)
        assert bool(result(*rows, devices=devices).differences) == differ
