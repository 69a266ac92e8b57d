"""A result as a table, as JSON, and as a picture of memory against time."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import MissingExtraError
from ..options import format_bytes
from .entries import OURS
from .figures import Result, Row
from .setting import WARM_UP

NOTHING = "-"


def table(result: Result) -> RenderableType:
    """Make a table of the result, with the machine it was measured on."""
    rows = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("contender", *_COLUMNS):
        rows.add_column(name, justify="left" if name == "contender" else "right", no_wrap=name != "contender")
    for row in result.rows:
        if row.step_s is not None:
            rows.add_row(row.entry.label, *(column(row, result) for column in _COLUMNS.values()))
    return Group(*_heading(result), rows, *_endings(result))


def save_json(result: Result, path: Path) -> None:
    """Write the whole result, every repetition included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.as_dict(), indent=1) + "\n")


def check_plot() -> None:
    """Raise MissingExtraError, before a run, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(feature="a picture of the result", package="matplotlib", extra="plots")


def plot(result: Result, path: Path) -> None:
    """Draw memory against time: the device's memory, or the host's if the CPU computes."""
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    on_device = result.setting.device != "cpu"
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in _points(result, on_device):
        style = "o-" if name == OURS else "s"
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], style, label=name)
        for x, y, text in points:
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(5, 5), fontsize="small")
    axes.margins(0.15)
    axes.set(xlabel="ms per step", xlim=(0, None), ylim=(0, None))
    axes.set_ylabel(f"peak {'device' if on_device else 'host'} memory, GiB")
    axes.set_title(_what(result), fontsize="medium")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _points(result: Result, on_device: bool) -> Iterator[tuple[str, list[tuple[float, float, str]]]]:
    """Yield a line for each contender, with points (ms, GiB, label)."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for row in result.rows:
        nbytes = row.device_peak if on_device else row.host_peak
        if row.step_s is not None and nbytes is not None:
            window = f"window {row.entry.options['window']}" if row.entry.contender == OURS else ""
            lines.setdefault(row.entry.contender, []).append((row.step_s.median * 1e3, nbytes / 2**30, window))
    yield from lines.items()


# ---- the table


def _what(result: Result) -> str:
    setting = result.setting
    parts = [
        f"{setting.model}, {result.costs.parameters / 1e6:.0f} M parameters",
        "inference" if setting.inference else setting.optimizer,
        setting.precision,
        f"{setting.batch} x {setting.seq} tokens"
        + f", answers of {setting.answer}" * (setting.answer > 0)
        + f" on each of {setting.devices} devices" * (setting.ranks > 1)
        + f" of {setting.nodes} pretended machines" * (setting.nodes > 1),
        "" if setting.inference or setting.activations == "keep" else f"activations {setting.activations}",
        "" if setting.inference or setting.clip is None else f"clipped at {setting.clip:g}",
    ]
    return ", ".join(part for part in parts if part)


def _heading(result: Result) -> Iterator[Text]:
    machine = result.machine
    setting = result.setting
    yield Text(_what(result), style="bold")
    yield Text(
        f"{result.facts['device']}: {machine.flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{machine.up_bytes_per_s / 1e9:.3g} GB/s up, {machine.down_bytes_per_s / 1e9:.3g} down, "
        f"{machine.duplex:.0%} of each at once; host optimizer "
        f"{machine.dram_bytes_per_s / machine.optimizer_bytes_per_parameter / 1e9:.3g} G parameters/s"
    )
    processes = "processes stay between turns" if result.together else "one process at a time"
    yield Text(f"{setting.repetitions} repetitions of {setting.steps} steps, interleaved; {processes}")
    yield Text()


def _endings(result: Result) -> Iterator[Text]:
    failed = [row for row in result.rows if row.error is not None]
    if failed:
        yield Text("\nDid not run, or did not finish:")
    yield from (Text(f"  {row.entry.label}: {row.error}") for row in failed)
    if any((row.merit or 0) > 1 for row in result.rows):
        yield Text(
            "\nThe machine was not quiet while it was measured: a step took less than its floor", style="bold red"
        )
    if result.differences:
        yield Text("\nLosses that must be equal differ:", style="bold red")
    yield from (Text(f"  {words}") for words in result.differences)


def _spread(row: Row, _: Result) -> str:
    assert row.step_s is not None
    return f"{row.step_s.median * 1e3:,.1f} ({row.step_s.relative:.0%})"


def _to_plain(row: Row, result: Result) -> str:
    plain = next((other.step_s for other in result.rows if other.entry.contender == "plain"), None)
    return NOTHING if plain is None or row.step_s is None else f"{row.step_s.median / plain.median:.2f}"


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _memory(nbytes: int | None) -> str:
    return NOTHING if nbytes is None else format_bytes(nbytes)


_COLUMNS: dict[str, Any] = {
    "ms/step (spread)": _spread,
    "x plain": _to_plain,
    "tokens/s": lambda row, _: _number(row.tokens_per_s, ",.0f"),
    "TFLOP/s": lambda row, _: _number(row.flops_per_s and row.flops_per_s / 1e12, ".3g"),
    "device peak": lambda row, _: _memory(row.device_peak),
    "host peak": lambda row, _: _memory(row.host_peak),
    "floor ms": lambda row, _: _number(row.floor_s and row.floor_s * 1e3, ",.1f"),
    "floor/step": lambda row, _: _number(row.merit, ".2f"),
    # With several batches at once there are more: those that all rows have end here.
    "last loss": lambda row, result: repr(row.losses[: WARM_UP + result.setting.steps][-1]),
}
