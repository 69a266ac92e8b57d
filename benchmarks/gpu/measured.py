"""Run comparisons of `benchmarks/bench` one after another, each with the bars that it should reach."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import campaign
import predicted
import shapes
import torch
from compare import Row, compare, differences, ours, setting_of
from contenders import OURS, Setting

from sp_lightning.host.rates import measured as measure
from sp_lightning.options import format_bytes, parse_bytes
from sp_lightning.plan.machines import MACHINES, REACHED, Machine

__all__ = ["Comparison", "Row", "ahead", "begin", "memory", "merit", "others", "ours", "parser", "speed"]

DEVICE_OFF, STEP_OFF = 0.05, 0.15  # shares by which a plan may differ from the measurement
MEASURED_S = 120  # for the machine, and at most half of the time that is left: what remains is the rows'

Bar = Callable[["Result"], "Verdict | None"]


@dataclass
class Result:
    """What a comparison has measured so far."""

    setting: Setting
    machine: Machine | None  # None: its rates could not be measured, so that no row has a plan
    rows: Sequence[Row]
    plans: list[dict[str, Any]] = field(default_factory=list)
    unplanned: str | None = None  # why the rates could not be measured

    @property
    def parameters(self) -> int:
        """Count the model's parameters."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in shapes.build(self.setting.model).parameters())

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "plans": self.plans,
            "unplanned": self.unplanned,
            "machine": None if self.machine is None else asdict(self.machine),
            "setting": asdict(self.setting),
            "model": {"parameters": self.parameters},
            "differences": differences(self.setting, self.rows),
            "rows": [row.as_dict() for row in self.rows],
        }


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
    rows: Sequence[Row]
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
    """Return the profile of this name, or the first machine that a campaign measured, from its result file."""
    if given in MACHINES:
        return MACHINES[given]
    try:
        results = json.loads(pathlib.Path(given).read_text())["results"]
        measured = [found["machine"] for found in results if found.get("machine")]
        return Machine(**measured[0])  # of an older version it lacks rates that plans need
    except (OSError, ValueError, LookupError, TypeError) as error:
        allowed = f"one of {', '.join(MACHINES)}, or a result file with a machine"
        raise argparse.ArgumentTypeError(f"{given} is not {allowed} ({error})") from error


def begin(name: str, options: argparse.Namespace, comparisons: Sequence[Comparison]) -> int:
    """Run the campaign, or print the plan's predictions."""
    comparisons = [comparison for comparison in comparisons if (options.only or "") in comparison.label]
    if options.row is not None:
        comparisons = [replace(c, rows=_named(c.rows, options.row)) for c in comparisons]
    if options.repetitions is not None:
        often = {"repetitions": options.repetitions}
        comparisons = [replace(c, setting={**c.setting, **often}) for c in comparisons]
    if options.predict is None:
        return run_all(campaign.Campaign(name, options), comparisons)
    for comparison in comparisons:
        print(comparison.label, *map(_planned_line, _predictions(comparison, options.predict)), sep="\n")
    return 0


def _named(rows: Sequence[Row], parts: Sequence[str]) -> list[Row]:
    return [row for row in rows if any(part in row.label for part in parts)]


def _predictions(comparison: Comparison, machine: Machine) -> list[predicted.Prediction]:
    setting = _setting(comparison, device="cpu", device_memory=None)
    rows = [row for row in comparison.rows if row.contender == OURS]
    return [predicted.Prediction.of(row, setting, machine, "cuda") for row in rows]


def _setting(comparison: Comparison, **more: Any) -> Setting:
    given = {**comparison.setting, **more}
    limit = given.pop("device_memory", None)
    return setting_of(**given, device_memory=limit and parse_bytes(limit, "device_memory"))


def _planned_line(planned: predicted.Prediction) -> str:
    return (
        f"    {planned.label:52} {planned.step_s * 1e3:10,.0f} ms  {format_bytes(planned.device_nbytes):>11}  "
        f"bound by {planned.bound_by}"
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
        result = _compared(run, comparison, entry)
        if result.machine is not None:
            result.plans = predicted.beside(result.setting, result.machine, _done(result, OURS))
        found = [bar(result) for bar in comparison.bars] + [plan_accuracy(result.plans)]
        verdicts = [verdict for verdict in found if verdict is not None]
        entry |= {**result.as_dict(), "bars": [vars(verdict) for verdict in verdicts]}
        run.save()
        lines += [comparison.label, *(_line(result, row) for row in result.rows)]
        lines += [f"    {verdict}" for verdict in verdicts]
        lines += [f"    no plans: {result.unplanned}"] if result.unplanned else []
        lines += [f"    DIFFERS {words}" for words in entry["differences"]]
        missed |= bool(entry["differences"]) or not all(verdict.reached for verdict in verdicts)
    run.say(*lines)
    return int(missed)


def _compared(run: campaign.Campaign, comparison: Comparison, entry: dict[str, Any]) -> Result:
    """Run a comparison; the entry, and the file, have its result so far after each turn."""
    more: dict[str, Any] = {"device": run.device, "time_limit": max(30.0, run.left_s + campaign.GRACE_S)}
    if run.small:
        more |= {"model": "llama-tiny", **dict.fromkeys(("batch", "seq", "device_memory"))}
        more |= {"steps": 2, "repetitions": 2}
    setting = _setting(comparison, **more)
    machine, unplanned = _measured(run)
    result = Result(setting, machine, comparison.rows, unplanned=unplanned)

    def keep() -> None:
        entry.pop("error", None)
        entry.update({"bars": [], **result.as_dict()})
        run.save()

    compare(result.setting, result.rows, lambda line: run.say(f"   {line}"), lambda: run.left_s, keep)
    keep()
    return result


def _measured(run: campaign.Campaign) -> tuple[Machine | None, str | None]:
    """Measure the machine, in a process that leaves nothing on the device; return it, or None and the reason.

    A machine that does something else at the same time has no rates to plan with, but steps can be compared in turns.
    """
    limit = min(MEASURED_S, run.left_s / 2)
    try:
        found = run.in_a_process(__file__, "--measure", {"device": run.device}, limit_s=limit)
    except subprocess.TimeoutExpired:
        return None, f"the machine was not measured within {limit:g} s"
    if "error" in found:
        return None, f"the machine could not be measured: {found['error'].splitlines()[-1]}"
    return Machine(name="here", **found), None


def _line(result: Result, row: Row) -> str:
    if row.step_s is None:
        return f"    {row.label:52} {row.error}"
    device, host = (format_bytes(n) if (n := row.most(f"{at}_peak")) else "-" for at in ("device", "host"))
    speed = result.setting.batch * result.setting.seq / row.step_s
    return f"    {row.label:52} {row.step_s * 1e3:10,.0f} ms  {speed:10,.0f} tokens/s  {device:>11}  host {host:>11}"


# ---- rows, and bars


def others(*names: str) -> list[Row]:
    """Make rows of contenders by name."""
    return [Row(name) for name in names]


def _done(result: Result, contender: str) -> list[Row]:
    return [row for row in result.rows if row.contender == contender and row.step_s is not None]


def speed(share: float, of_state: float) -> Bar:
    """Require of some window this share of plain Lightning's speed, with at most that share of its state on the device.

    The state is weights, gradients and optimizer state, 16 bytes a parameter in the plain run; what both runs have,
    activations and logits, does not count.
    """

    def bar(result: Result) -> Verdict | None:
        plain = next(iter(_done(result, "plain")), None)
        if plain is None or not _peak(plain):
            return None
        state = 16 * result.parameters
        lean = [row for row in _done(result, OURS) if state - (_peak(plain) - _peak(row)) <= of_state * state]
        best = max((_speed(row) / _speed(plain) for row in lean), default=0.0)
        text = f"{best:.2f} of plain's speed with at most {of_state:.0%} of its weights, gradients and state"
        return Verdict(f"at least {share:.2f}", text, best >= share)

    return bar


def memory(saved: float, slowdown: float) -> Bar:
    """Require of some window that it saves this share of plain Lightning's device memory, below this slowdown."""

    def bar(result: Result) -> Verdict | None:
        plain = next(iter(_done(result, "plain")), None)
        if plain is None or not _peak(plain):
            return None
        quick = [row for row in _done(result, OURS) if _speed(plain) / _speed(row) < slowdown]
        best = max((1 - _peak(row) / _peak(plain) for row in quick), default=0.0)
        text = f"{best:.0%} less device memory at less than {slowdown} x plain's time"
        return Verdict(f"at least {saved:.0%} less", text, best >= saved)

    return bar


def ahead(peers: Sequence[str], times: float) -> Bar:
    """Require this many times the tokens per second of each of these peers, in at most its device memory."""

    def bar(result: Result) -> Verdict | None:
        found = [row for name in peers for row in _done(result, name)]
        if not found:
            return None
        ratios = {row.label: _best_within(result, _peak(row)) / _speed(row) for row in found}
        text = ", ".join(f"{ratio:.1f} x {label}" for label, ratio in ratios.items())
        return Verdict(f"at least {times} x, at the same device memory", text, min(ratios.values()) >= times)

    return bar


def merit(least: float) -> Bar:
    """Require of every row of this strategy at least this ratio of the planned step to the measured one."""

    def bar(result: Result) -> Verdict | None:
        merits = [1 + plan["step_off"] for plan in result.plans]
        if not merits:
            return None
        return Verdict(f"planned / measured step at least {least}", f"{min(merits):.2f} at least", min(merits) >= least)

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
    return row.most("device_peak") or 0


def _speed(row: Row) -> float:
    return 1 / row.step_s if row.step_s else 0.0


def _best_within(result: Result, nbytes: int) -> float:
    return max((_speed(row) for row in _done(result, OURS) if _peak(row) <= nbytes), default=0.0)


if __name__ == "__main__":  # the process of `_measured`
    here = torch.device(json.loads(sys.argv[2])["device"])
    print(json.dumps(measure(here, torch.bfloat16, REACHED.down_cost)._asdict()))
