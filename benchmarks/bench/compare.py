"""Compare this strategy with plain Lightning and with what others offload to the host, on this machine.

    python benchmarks/bench/compare.py [--model llama-3b] [--windows 2 4 auto] [--clip none] [--json FILE]

1. Every contender trains the same model from the same weights on the same batches, in the same precision, with the same
   optimizer. Gradients are clipped, as in most runs that people make.
2. Each turn of a contender has a process of its own: memory is measured by process, and a crash or a missing library
   ends one row, not the run. Turns are interleaved: all contenders have their first one, then all their second.
3. A turn is timed from the start of one step to the start of a later one, with the device idle at both ends: work that
   a step leaves to the next, such as an optimizer step on the host, is included. The first steps do not count.
4. Host memory is the most that the process had beyond what it had before the model was made; device memory is the peak
   of what the device's allocator handed out.
5. Losses of this strategy have to equal the plain run's as far as both repeat their own: a GPU's kernels may add in
   another order in each run. With torch's fused kernels on the CPU, whose arithmetic is another one, only the first
   loss has to.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]  # measure this checkout, even if another version is installed

from contenders import CONTENDERS, OURS, Setting  # noqa: E402
from shapes import config_of, tiny  # noqa: E402

from sp_lightning.errors import SuperpipelineError  # noqa: E402
from sp_lightning.options import format_bytes  # noqa: E402

GRACE_S = 60  # after the end of the time, for a turn that has begun
LIBRARIES = ("sp-lightning", "torch", "lightning", "transformers", "accelerate", "peft", "deepspeed", "torchao")


@dataclasses.dataclass
class Row:
    """A contender with its options, and what was measured of it so far."""

    contender: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    error: str | None = None
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def label(self) -> str:
        """Name of the row."""
        given = {**self.options, **self.environment}
        return " ".join([self.contender, *(f"{name}={value}" for name, value in given.items())])

    @property
    def step_s(self) -> float | None:
        """Median time of a step."""
        return statistics.median(turn["seconds"] for turn in self.turns) if self.turns else None

    @property
    def losses(self) -> list[float]:
        """Losses of the first turn."""
        return self.turns[0]["losses"] if self.turns else []

    def repeated(self, on_cpu: bool) -> int:
        """Count the first losses that every turn had; on a GPU a single turn shows the first alone."""
        if on_cpu or len(self.turns) == 1:
            return len(self.losses) if on_cpu else 1
        at_each_step = zip(*(turn["losses"] for turn in self.turns), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda found: len(set(found)) == 1, at_each_step))

    def most(self, name: str) -> int | None:
        """Return the largest of all turns' figures of this name."""
        return max((turn[name] for turn in self.turns if turn[name] is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "label": self.label,
            "contender": self.contender,
            "options": self.options,
            "environment": self.environment,
            "error": self.error,
            "step_s": None if self.step_s is None else {"median": self.step_s},
            "device_peak": self.most("device_peak"),
            "host_peak": self.most("host_peak"),
            "losses": self.losses,
            "repetitions": self.turns,
        }


def ours(*windows: int | str, **options: Any) -> list[Row]:
    """Make a row of this strategy for each window: ints, or "auto"."""
    return [Row(OURS, {"window": window, **options}) for window in windows]


def compare(
    setting: Setting,
    rows: Sequence[Row],
    say: Callable[[str], object],
    left_s: Callable[[], float] = lambda: math.inf,
    keep: Callable[[], object] = lambda: None,
) -> None:
    """Let all rows take their turns. No turn begins without time left; ``keep`` is called after each."""
    for number in range(setting.repetitions):
        for row in rows:
            if row.error is None and left_s() > 0:
                say(f"{number + 1}/{setting.repetitions} {row.label}")
                _take_turn(setting, row, min(setting.time_limit, left_s() + GRACE_S))
                say(f"    {row.error}" if row.error else f"    {1e3 * row.turns[-1]['seconds']:,.1f} ms a step")
                keep()
    for row in rows:
        if row.error is None and not row.turns:
            row.error = "not begun: no time left"


def _take_turn(setting: Setting, row: Row, limit: float) -> None:
    job = {"setting": dataclasses.asdict(setting), "contender": row.contender, "options": row.options}
    environment = {**os.environ, **row.environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(HERE / "contenders.py"), json.dumps(job)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        row.error = f"no answer within {limit:g} s"
        return
    if done.returncode == 0:
        row.turns.append(json.loads(done.stdout))
    else:
        row.error = f"ended with status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"


def differences(setting: Setting, rows: Sequence[Row]) -> list[str]:
    """Describe losses of this strategy's rows that have to be equal and are not (Rule 5)."""
    plain, mine = ([row for row in rows if row.contender == name and row.turns] for name in ("plain", OURS))
    found: list[str] = []
    for row, other in itertools.product(mine, plain + mine[:1]):
        pairs = list(zip(row.losses, other.losses, strict=True))[: _equal_losses(setting, row, other)]
        said = f"{row.label} has loss {{1}} at step {{0}}, {other.label} {{2}}"
        found += [said.format(step, *pair) for step, pair in enumerate(pairs, 1) if pair[0] != pair[1]][:1]
    return found


def _equal_losses(setting: Setting, row: Row, other: Row) -> int:
    on_cpu = setting.device == "cpu"
    if other.contender == OURS:
        same_arithmetic = {**row.options, "window": None} == {**other.options, "window": None}
    else:
        same_arithmetic = not (on_cpu and setting.fused)
    return min(row.repeated(on_cpu), other.repeated(on_cpu)) if same_arithmetic else 1


def facts() -> dict[str, Any]:
    """Collect where a result comes from: command, commit, versions, machine."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    versions = {one.name: one.version for one in importlib.metadata.distributions() if one.name in LIBRARIES}
    return {
        "command": shlex.join(["python", pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or "unknown",  # outside of a checkout
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions},
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def table(setting: Setting, rows: Sequence[Row]) -> str:
    """Make the table, a line for each row."""
    first = next((row.step_s for row in rows if row.contender == "plain"), None)
    clip = "not clipped" if setting.clip is None else f"clipped at {setting.clip:g}"
    work = f"{setting.model}, {setting.batch} x {setting.seq} tokens, {setting.precision}, AdamW, {clip}"
    lines = [work, f"{'':36}{'ms a step':>12}{'x plain':>9}{'tokens/s':>11}{'device':>12}{'host':>12}  last loss"]
    for row in rows:
        if row.step_s is None:
            lines.append(f"{row.label:36} {row.error}")
            continue
        times = f"{row.step_s / first:.2f}" if first else "-"
        device, host = (format_bytes(n) if (n := row.most(f"{at}_peak")) else "-" for at in ("device", "host"))
        speed = setting.batch * setting.seq / row.step_s
        figures = f"{1e3 * row.step_s:12,.1f}{times:>9}{speed:11,.0f}{device:>12}{host:>12}  {row.losses[-1]!r}"
        lines.append(f"{row.label:36}{figures}" + (f"  ended early: {row.error}" if row.error else ""))
    return "\n".join([*lines, *(f"DIFFERS: {words}" for words in differences(setting, rows))])


def setting_of(clip: float | None = 1.0, **given: Any) -> Setting:
    """Make a setting, with defaults for what is None or missing that suit the model and the machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    chosen = {"device": "cpu" if accelerator is None else accelerator.type}
    chosen |= {name: value for name, value in given.items() if value is not None}
    chosen.setdefault("model", "llama-tiny" if chosen["device"] == "cpu" else "llama-1b")
    config_of(chosen["model"])  # or an error that lists the models
    small = chosen["model"] == tiny(chosen["model"])
    return Setting(clip=clip, **{"batch": 2 if small else 4, "seq": 64 if small else 2048, **chosen})


def main() -> int:
    """Run the contenders and print the table; return 1 if losses that have to be equal differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="llama-tiny, llama-1b, llama-3b or llama-8b; llama-8b:24 for 24 layers")
    add("--batch", type=int, help="sequences")
    add("--seq", type=int, help="tokens in a sequence")
    add("--precision", choices=("32-true", "bf16-mixed", "bf16-true"), default="32-true")
    add("--fused", action="store_true", help="torch's fused AdamW")
    add("--clip", default=1.0, type=_norm, help="norm of all gradients, or none (default: 1.0)")
    add("--activations", default="keep", help="keep (default), recompute, offload or recompute+offload")
    add("--windows", nargs="+", default=["2", "4", "auto"], help="a row each (default: 2 4 auto)")
    add("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS], help="default: all")
    add("--steps", type=int, default=5, help="steps of a turn (default: 5)")
    add("--repetitions", type=int, default=3, help="turns of each contender, interleaved (default: 3)")
    add("--device", help="device that computes (default: the accelerator, or else the CPU)")
    add("--json", type=pathlib.Path, metavar="FILE", help="write all measurements")
    given = vars(parser.parse_args())
    path, mine, names = given.pop("json"), ours(*map(_window, given.pop("windows"))), given.pop("contenders")
    try:
        setting = setting_of(**given)
    except SuperpipelineError as error:
        parser.error(str(error))
    rows = [row for name in names for row in (mine if name == OURS else [Row(name)])]
    compare(setting, rows, functools.partial(print, flush=True))
    print(table(setting, rows))
    found = differences(setting, rows)
    if path is not None:
        result = {**facts(), "setting": dataclasses.asdict(setting), "differences": found}
        path.write_text(json.dumps({**result, "rows": [row.as_dict() for row in rows]}, indent=1) + "\n")
    return 1 if found else 0


def _norm(given: str) -> float | None:
    return None if given == "none" else float(given)


def _window(given: str) -> int | str:
    return int(given) if given.isdigit() else given


if __name__ == "__main__":
    sys.exit(main())
