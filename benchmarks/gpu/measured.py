"""Run comparisons of `sp_lightning.bench` one after another, each with the bars that it should reach."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import campaign
import predicted

from sp_lightning.bench import Entry, Setting, compare, entries
from sp_lightning.bench.figures import Result, Row
from sp_lightning.core.machine import MACHINES, Machine
from sp_lightning.errors import SuperpipelineError
from sp_lightning.options import format_bytes

OURS = "superpipeline"
TINY = {"llama-1b": "llama-tiny", "llama-3b": "llama-tiny", "llama-8b": "llama-tiny", "vit-h": "vit-tiny"}
TINY |= {"llava-1b": "llava-tiny", "llava-3b": "llava-tiny"}
DEVICE_OFF, STEP_OFF = 0.05, 0.15  # shares by which a plan may differ from the measurement

Bar = Callable[[Result], "Verdict | None"]


@dataclass(frozen=True)
class Verdict:
    """A bar, what was measured, and whether the bar is reached."""

    bar: str
    measured: str
    reached: bool

    def __str__(self) -> str:
        return f"{'reached' if self.reached else 'MISSED '}  {self.bar}: {self.measured}"


@dataclass(frozen=True)
class Comparison:
    """One comparison."""

    label: str
    setting: dict[str, Any]
    entries: Sequence[Entry]
    bars: Sequence[Bar] = ()


def parser(description: str) -> argparse.ArgumentParser:
    """Make the parser of a campaign of comparisons."""
    made = campaign.parser(description)
    made.add_argument(
        "--predict",
        metavar="MACHINE",
        type=machine,
        help="run nothing: print the plan's predictions for a profile, or for the machine of a result file",
    )
    made.add_argument("--repetitions", type=int, help="of each row, in turn (default: the comparison's own)")
    made.add_argument("--only", help="only comparisons with this in their name")
    made.add_argument("--row", action="append", help="only rows with this in their name, may be repeated")
    return made


def machine(given: str) -> Machine:
    """Return the profile of this name, or the machine that a campaign measured before the first result of its file."""
    if given in MACHINES:
        return MACHINES[given]
    try:
        numbers = json.loads(pathlib.Path(given).read_text())["results"][0]["machine"]
    except (OSError, ValueError, LookupError) as error:
        allowed = f"one of {', '.join(MACHINES)}, or a result file with a machine"
        raise argparse.ArgumentTypeError(f"{given} is not {allowed} ({type(error).__name__})") from error
    return Machine(**{"host_bytes_per_s": numbers["dram_bytes_per_s"], **numbers})  # older files lack the first


def begin(name: str, options: argparse.Namespace, comparisons: Sequence[Comparison]) -> int:
    """Run the campaign, or print the plan's predictions."""
    comparisons = [comparison for comparison in comparisons if (options.only or "") in comparison.label]
    if options.row is not None:
        comparisons = [replace(c, entries=_named(c.entries, options.row)) for c in comparisons]
    if options.repetitions is not None:
        often = {"repetitions": options.repetitions}
        comparisons = [replace(c, setting={**c.setting, **often}) for c in comparisons]
    if options.predict is None:
        return run_all(campaign.Campaign(name, options), comparisons)
    for comparison in comparisons:
        print(comparison.label, *map(_planned_line, _predictions(comparison, options.predict)), sep="\n")
    return 0


def _named(rows: Sequence[Entry], parts: Sequence[str]) -> list[Entry]:
    return [row for row in rows if any(part in row.label for part in parts)]


def _predictions(comparison: Comparison, machine: Machine) -> list[predicted.Prediction]:
    given = {name: value for name, value in comparison.setting.items() if name != "device_memory"}
    setting = Setting.parse(**given, device="cpu")
    if setting.inference:
        return []
    rows = [entry for entry in comparison.entries if entry.contender == OURS]
    return [predicted.Prediction.of(entry, setting, machine, "cuda") for entry in rows]


def _planned_line(planned: predicted.Prediction) -> str:
    return (
        f"    {planned.label:52} {planned.step_s * 1e3:10,.0f} ms  {format_bytes(planned.device_nbytes):>11}  "
        f"floor/step {planned.floor_s / planned.step_s:.2f}  {planned.binds} binds"
    )


def run_all(run: campaign.Campaign, comparisons: Sequence[Comparison]) -> int:
    """Run comparisons until the time is over, and print their table; return 1 if a bar is missed or losses differ."""
    lines: list[str] = []
    missed = False
    for number, comparison in enumerate(comparisons):
        if run.left_s <= 0:
            lines.append(f"not begun, no time left: {', '.join(c.label for c in comparisons[number:])}")
            break
        run.say(f"== {comparison.label}")
        entry = {"label": comparison.label, "error": "interrupted before anything was measured"}
        run.add(entry)
        try:
            result = _compared(run, comparison, entry)
        except SuperpipelineError as error:
            entry["error"] = str(error)
            run.save()
            lines.append(f"{comparison.label}: {error}")
            missed = True
            continue
        plans = [] if result.setting.inference else predicted.beside(result, _done(result, OURS))
        found = [bar(result) for bar in comparison.bars] + [plan_accuracy(plans)]
        verdicts = [verdict for verdict in found if verdict is not None]
        bars = [vars(verdict) for verdict in verdicts]
        entry |= {"bars": bars, "plans": plans}
        run.save()
        lines += [comparison.label, *map(_line, result.rows), *(f"    {verdict}" for verdict in verdicts)]
        lines += [f"    DIFFERS {words}" for words in result.differences]
        missed |= bool(result.differences) or not all(verdict.reached for verdict in verdicts)
    run.say(*lines)
    return int(missed)


def _compared(run: campaign.Campaign, comparison: Comparison, entry: dict[str, Any]) -> Result:
    """Run a comparison; the entry, and the file, have its result so far after each turn."""
    given = dict(comparison.setting)
    if run.small:
        given["model"] = TINY[given["model"].partition(":")[0]]
        given |= dict.fromkeys(("batch", "seq", "device_memory")) | {"steps": 2, "repetitions": 2}
        given |= {"answer": 2} if "answer" in given else {}

    def keep(result: Result) -> None:
        entry.pop("error", None)
        entry.update({"bars": [], "plans": [], **result.as_dict()})
        run.save()

    def say(line: str) -> None:
        run.say(f"   {line}")

    setting = Setting.parse(**{**given, "device": run.device, "time_limit": max(30.0, run.left_s + campaign.GRACE_S)})
    result = compare(setting, comparison.entries, say, left_s=lambda: run.left_s, keep=keep)
    keep(result)
    return result


def _line(row: Row) -> str:
    if row.step_s is None or row.tokens_per_s is None:
        return f"    {row.entry.label:52} {row.error}"
    device = "-" if row.device_peak is None else format_bytes(row.device_peak)
    merit = "-" if row.merit is None else f"{row.merit:.2f}"
    flops = "-" if row.flops_per_s is None else f"{row.flops_per_s / 1e12:.3g}"
    host = "-" if row.host_peak is None else format_bytes(row.host_peak)
    return (
        f"    {row.entry.label:52} {row.step_s.median * 1e3:10,.0f} ms  {row.tokens_per_s:10,.0f} tokens/s  "
        f"{flops:>6} TFLOP/s  {device:>11}  host {host:>11}  floor/step {merit}"
    )


# ---- rows, and bars


def ours(*windows: int | str, at_once: int = 1, **options: Any) -> list[Entry]:
    """Make rows of this strategy with these windows, and ``at_once`` batches on each trip of the weights."""
    return entries([OURS], windows, options, [at_once])


def others(*names: str) -> list[Entry]:
    """Make rows of contenders by name."""
    return entries(names)


def _done(result: Result, contender: str) -> list[Row]:
    return [row for row in result.rows if row.entry.contender == contender and row.step_s is not None]


def speed(share: float, of_state: float) -> Bar:
    """Require of some window this share of plain Lightning's speed, with at most that share of its state on the device.

    The state is weights, gradients and optimizer state, 16 bytes a parameter in the plain run; what both runs have,
    activations and logits, does not count.
    """

    def bar(result: Result) -> Verdict | None:
        plain = next(iter(_done(result, "plain")), None)
        if plain is None or plain.device_peak is None:
            return None
        state = 16 * result.costs.parameters
        lean = [row for row in _done(result, OURS) if state - (plain.device_peak - _peak(row)) <= of_state * state]
        best = max((_speed(row) / _speed(plain) for row in lean), default=0.0)
        text = f"{best:.2f} of plain's speed with at most {of_state:.0%} of its weights, gradients and state"
        return Verdict(f"at least {share:.2f}", text, best >= share)

    return bar


def memory(saved: float, slowdown: float) -> Bar:
    """Require of some window that it saves this share of plain Lightning's device memory, below this slowdown."""

    def bar(result: Result) -> Verdict | None:
        plain = next(iter(_done(result, "plain")), None)
        if plain is None or plain.device_peak is None:
            return None
        quick = [row for row in _done(result, OURS) if _speed(plain) / _speed(row) < slowdown]
        best = max((1 - _peak(row) / plain.device_peak for row in quick), default=0.0)
        text = f"{best:.0%} less device memory at less than {slowdown} x plain's time"
        return Verdict(f"at least {saved:.0%} less", text, best >= saved)

    return bar


def ahead(peers: Sequence[str], times: float) -> Bar:
    """Require this many times the tokens per second of each of these peers, in at most its device memory."""

    def bar(result: Result) -> Verdict | None:
        found = [row for name in peers for row in _done(result, name)]
        if not found:
            return None
        ratios = {row.entry.label: _best_within(result, _peak(row)) / _speed(row) for row in found}
        text = ", ".join(f"{ratio:.1f} x {label}" for label, ratio in ratios.items())
        return Verdict(f"at least {times} x, at the same device memory", text, min(ratios.values()) >= times)

    return bar


def merit(least: float) -> Bar:
    """Require of every row of this strategy at least this ratio of lower bound (floor) to step time."""

    def bar(result: Result) -> Verdict | None:
        merits = [row.merit for row in _done(result, OURS) if row.merit is not None]
        if not merits:
            return None
        return Verdict(f"floor / step at least {least}", f"{min(merits):.2f} at least", min(merits) >= least)

    return bar


def plan_accuracy(plans: Sequence[dict[str, Any]]) -> Verdict | None:
    """Check that every row's plan is as close to the measurement as plans claim to be."""
    device = max((abs(plan["device_off"]) for plan in plans if plan["device_off"] is not None), default=0.0)
    step = max((abs(plan["step_off"]) for plan in plans), default=None)
    if step is None:
        return None
    text = f"device peak within {device:.0%}, step within {step:.0%}"
    bar = f"the plan: device peak within {DEVICE_OFF:.0%}, step within {STEP_OFF:.0%}"
    return Verdict(bar, text, device <= DEVICE_OFF and step <= STEP_OFF)


def _peak(row: Row) -> int:
    return row.device_peak or 0


def _speed(row: Row) -> float:
    return row.tokens_per_s or 0.0


def _best_within(result: Result, nbytes: int) -> float:
    return max((_speed(row) for row in _done(result, OURS) if _peak(row) <= nbytes), default=0.0)
