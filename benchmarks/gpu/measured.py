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
from compare import Row, compare, differences, setting_of
from compare import ours as ours
from contenders import NEW_TOKENS, OURS, Setting

from sp_lightning.host.rates import measured as measure
from sp_lightning.observe.report import in_words
from sp_lightning.options import format_bytes, parse_bytes
from sp_lightning.plan.machines import MACHINES, REACHED, Machine

DEVICE_OFF, STEP_OFF = 0.05, 0.15  # shares by which a plan may differ from the measurement
MEASURED_S = 120  # for the machine, and at most half of the time that is left: what remains is the rows'

Bar = Callable[["Result"], "Verdict"]
STATES = {True: "met", False: "MISSED", None: "-"}
NO_PEAKS = "not known: this device has no memory of its own"


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

    def done(self, *contenders: str) -> list[Row]:
        """Return the rows of these contenders that have a time."""
        return [row for row in self.rows if row.contender in contenders and row.step_s is not None]

    def unknown(self, bar: str, *contenders: str) -> Verdict | None:
        """Say why a bar is not known: a contender has no time; None if all have."""
        lacking = [name for name in contenders if not self.done(name)]
        errors = {row.label: row.error or "not measured" for row in self.rows if row.contender in lacking}
        why = "; ".join(f"{label}: {error}" for label, error in errors.items())
        return Verdict(bar, f"not known: {why or 'no row of ' + ', '.join(lacking)}", None) if lacking else None

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
    """A bar, what was measured, and whether the bar is reached; None: not known, for the reason that is said."""

    bar: str
    measured: str
    reached: bool | None

    def __str__(self) -> str:
        return f"{STATES[self.reached]:9} {self.bar}: {self.measured}"


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


def begin(
    name: str,
    options: argparse.Namespace,
    comparisons: Sequence[Comparison],
    checked: Callable[[campaign.Campaign], None] = lambda run: None,
) -> int:
    """Run the campaign, what it checks first, or print the plan's predictions."""
    comparisons = [comparison for comparison in comparisons if (options.only or "") in comparison.label]
    if options.row is not None:
        comparisons = [replace(c, rows=_named(c.rows, options.row)) for c in comparisons]
    if options.repetitions is not None:
        often = {"repetitions": options.repetitions}
        comparisons = [replace(c, setting={**c.setting, **often}) for c in comparisons]
    if options.predict is None:
        run = campaign.Campaign(name, options)
        checked(run)
        return run_all(run, comparisons)
    for comparison in (one for one in comparisons if one.setting.get("door") in (None, "lightning")):
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
    machine, unplanned = _measured(run)
    for number, comparison in enumerate(comparisons):
        if run.left_s <= 0:
            lines.append(f"not begun, no time left: {', '.join(c.label for c in comparisons[number:])}")
            break
        run.say(f"== {comparison.label}")
        result = _compared(run, comparison, machine, unplanned)
        entry = run.results[-1]
        lines += [comparison.label, *(_line(result, row) for row in result.rows)]
        lines += [f"    {Verdict(**verdict)}" for verdict in entry["bars"]]
        lines += [f"    no plans: {unplanned}"] if unplanned else []
        lines += [f"    DIFFERS {words}" for words in entry["differences"]]
    run.say(*lines)
    return int(any(entry["differences"] or _missed(entry) for entry in run.results))


def _missed(entry: dict[str, Any]) -> bool:
    return any(verdict["reached"] is False for verdict in entry["bars"])


def _compared(run: campaign.Campaign, comparison: Comparison, machine: Machine | None, unplanned: str | None) -> Result:
    """Run a comparison; the campaign's file has its result so far after each turn."""
    more: dict[str, Any] = {"device": run.device, "time_limit": max(30.0, run.left_s + campaign.GRACE_S)}
    if run.small:
        more |= {"model": shapes.tiny(comparison.setting["model"]), **dict.fromkeys(("batch", "seq", "device_memory"))}
        more |= {"steps": 2, "repetitions": 1}
    setting = _setting(comparison, **more)
    result = Result(setting, machine, comparison.rows, unplanned=unplanned)
    entry = {"label": comparison.label, "bars": [], **result.as_dict()}
    run.add(entry)

    def keep() -> None:
        entry.update(result.as_dict())
        run.save()

    compare(result.setting, result.rows, lambda line: run.say(f"   {line}"), lambda: run.left_s, keep)
    if machine is not None and setting.door == "lightning":
        result.plans = predicted.beside(setting, machine, result.done(OURS))
    verdicts = [bar(result) for bar in comparison.bars] + ([plan_accuracy(result.plans)] if result.plans else [])
    entry["bars"] = [vars(verdict) for verdict in verdicts]
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


def speed(share: float, of_state: float | None = None) -> Bar:
    """Require of some row this share of the plain run's speed, with at most that share of its state on the device.

    The state is weights, gradients and optimizer state, 16 bytes a parameter in the plain run; what both runs have,
    activations and logits, does not count.
    """
    at_most = "" if of_state is None else f" with at most {of_state:.0%} of its weights, gradients and state"

    def bar(result: Result) -> Verdict:
        asked = f"at least {share:.2f} of plain's speed{at_most}"
        if unknown := result.unknown(asked, "plain", OURS):
            return unknown
        plain, rows = result.done("plain")[0], result.done(OURS)
        if of_state is not None:
            if not _peak(plain):
                return Verdict(asked, NO_PEAKS, None)
            state = 16 * result.parameters
            rows = [row for row in rows if state - (_peak(plain) - _peak(row)) <= of_state * state]
            if not rows:
                return Verdict(asked, "every row takes more", False)
        best = max(rows, key=_speed)
        found = _speed(best) / _speed(plain)
        return _verdict(asked, f"{found:.2f}", found >= share, best)

    return bar


def memory(saved: float, slowdown: float) -> Bar:
    """Require of some row that it saves this share of the plain run's device memory, below this slowdown."""

    def bar(result: Result) -> Verdict:
        asked = f"at least {saved:.0%} less device memory at less than {slowdown} x plain's time"
        if unknown := result.unknown(asked, "plain", OURS):
            return unknown
        plain = result.done("plain")[0]
        if not _peak(plain):
            return Verdict(asked, NO_PEAKS, None)
        quick = [row for row in result.done(OURS) if _speed(plain) / _speed(row) < slowdown]
        if not quick:
            return _verdict(asked, "every row is slower", False, max(result.done(OURS), key=_speed))
        best = min(quick, key=_peak)
        found = 1 - _peak(best) / _peak(plain)
        return _verdict(asked, f"{found:.0%} less", found >= saved, best)

    return bar


def ahead(peer: str, times: float) -> Bar:
    """Require this many times the speed of a peer."""

    def bar(result: Result) -> Verdict:
        asked = f"at least {times} x {peer}'s speed"
        if unknown := result.unknown(asked, peer, OURS):
            return unknown
        best = max(result.done(OURS), key=_speed)
        found = _speed(best) / _speed(result.done(peer)[0])
        return _verdict(asked, f"{found:.1f} x", found >= times, best)

    return bar


def excess(share: float) -> Bar:
    """Require that calls take no longer than plain's, or than the link for what exceeds the limit, by this share.

    What exceeds it is the plain run's peak less the limit, once for each token; nothing where there is no limit.
    """

    def bar(result: Result) -> Verdict:
        asked = f"the excess divided by the link's rate, or plain's time, within {share:.0%}"
        if unknown := result.unknown(asked, "plain", OURS):
            return unknown
        plain, best, limit = result.done("plain")[0], max(result.done(OURS), key=_speed), result.setting.device_memory
        least, over = 1 / _speed(plain), 0
        trips = NEW_TOKENS if result.setting.door == "generate" else 1
        if limit is not None:
            if result.machine is None or not _peak(plain):
                return Verdict(asked, f"not known: {result.unplanned}" if result.unplanned else NO_PEAKS, None)
            over = max(0, _peak(plain) - limit)
            least = max(least, trips * over / result.machine.up_bytes_per_s)
        ratio = 1 / _speed(best) / least
        up = f"{best.turns[-1]['bytes_up'] / trips / 1e9:.2f} GB up for each trip, {over / 1e9:.2f} GB too many"
        return _verdict(asked, f"{ratio:.2f} x {least * 1e3:,.0f} ms; {up}", ratio <= 1 + share, best)

    return bar


def merit(least: float) -> Bar:
    """Require of every row of this strategy at least this ratio of the planned step to the measured one."""

    def bar(result: Result) -> Verdict:
        asked = f"planned / measured step at least {least}"
        merits = [1 + plan["step_off"] for plan in result.plans]
        if not merits:
            return Verdict(asked, f"not known: {result.unplanned or 'nothing was measured'}", None)
        return Verdict(asked, f"{min(merits):.2f} at least", min(merits) >= least)

    return bar


def plan_accuracy(plans: Sequence[dict[str, Any]]) -> Verdict:
    """Check that every row's plan is as close to the measurement as plans claim to be."""
    device = max((abs(plan["device_off"]) for plan in plans if plan["device_off"] is not None), default=0.0)
    step = max(abs(plan["step_off"]) for plan in plans)
    text = f"device peak within {device:.0%}, step within {step:.0%}"
    bar = f"the plan: device peak within {DEVICE_OFF:.0%}, step within {STEP_OFF:.0%}"
    return Verdict(bar, text, device <= DEVICE_OFF and step <= STEP_OFF)


def _verdict(asked: str, found: str, reached: bool, row: Row) -> Verdict:
    """Make the verdict of a row; a missed one says what the row's time went to."""
    causes = row.turns[-1].get("causes_s")
    why = f"; its time: {in_words(causes)}" if causes and not reached else ""
    return Verdict(asked, f"{found} ({row.label}{why})", reached)


def _peak(row: Row) -> int:
    return row.most("device_peak") or 0


def _speed(row: Row) -> float:
    return 1 / row.step_s if row.step_s else 0.0


if __name__ == "__main__":  # the process of `_measured`
    here = torch.device(json.loads(sys.argv[2])["device"])
    print(json.dumps(measure(here, torch.bfloat16, REACHED.down_cost)))
