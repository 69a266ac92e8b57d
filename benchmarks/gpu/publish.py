"""Write the table of results on real devices, and the picture, into ../NOTES.md, from the result files alone.

    python benchmarks/gpu/publish.py

A campaign without a result file is "not measured". Runs on a CPU, on a simulated device or of tiny models do not count.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import campaign
from measured import OURS

NOTES = campaign.ROOT / "benchmarks" / "NOTES.md"
PICTURE = campaign.ROOT / "docs" / "measured_curve.png"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
NOT_REAL = ("cpu", "simgpu", "null-cuda")
CLAIMS = {
    "exact": "no bit differs from plain Lightning on the same device",
    "pinned": "host memory is page-locked, exact to the page, fast, and given back",
    "fits": "0.95 of plain's speed at 32K tokens with a quarter of its state; 60 % less memory at 1.2 x its time",
    "peers": "3 x FSDP2's offload and DeepSpeed ZeRO-3's, at the same device memory",
    "big": "the largest model that the host holds, in 24 and in 16 GiB of device memory, at 0.85 of its floor",
    "curve": "memory against time for every k and k'",
    "trainer": "transformers' Trainer has stock's bits where the optimizer steps on the device",
}
Found = dict[str, Any]


def results(folder: pathlib.Path = campaign.RESULTS) -> dict[str, list[Found]]:
    """Read the results on real devices, by campaign."""
    found: dict[str, list[Found]] = {name: [] for name in CLAIMS}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result["facts"]["device"] not in NOT_REAL and not result["small"]:
            found[result["campaign"]].append({**result, "file": path.name})
    return found


def table(found: dict[str, list[Found]]) -> str:
    """Make a table with a row for every bar that was measured, and for every campaign that was not run."""
    lines = ["| campaign | claim | measured |", "| --- | --- | --- |"]
    for name, claim in CLAIMS.items():
        link = f"[`benchmarks/gpu/{name}.py`](gpu/{name}.py)"
        if not found[name]:
            lines.append(f"| {link} | {claim} | not measured |")
        for result in found[name]:
            file = f"[{result['facts']['device']}](results/{result['file']})"
            lines += [f"| {link}, {file} | {bar} | {measured} |" for bar, measured in _rows(result, claim)]
    return "\n".join(lines)


def _rows(result: Found, claim: str) -> Iterator[tuple[str, str]]:
    entries = result["results"]
    if result["campaign"] == "exact":
        for part in dict.fromkeys(entry["part"] for entry in entries):
            own = [entry for entry in entries if entry["part"] == part]
            yield f"{claim}: {part}", f"{len(own)} compared, {sum(bool(e['difference']) for e in own)} differ"
        return
    if result["campaign"] == "pinned":
        yield claim, "; ".join(f"{entry['check'].replace('_', ' ')}: {entry['found']}" for entry in entries)
        return
    for entry in entries:
        if "error" in entry:
            yield entry["label"], entry["error"]
            continue
        ours = [row for row in entry["rows"] if row["contender"] == OURS and row["step_s"] is not None]
        for bar in entry["bars"] if ours else ():
            yield f"{entry['label']}: {bar['bar']}", f"{bar['measured']}{'' if bar['reached'] else ' (missed)'}"
        yield entry["label"], "; ".join(_row(row) for row in entry["rows"])


def _row(row: Found) -> str:
    if row["step_s"] is None:
        return f"{row['label']}: {row['error'] or 'did not end in time'}"
    gib = "" if row["device_peak"] is None else f", {row['device_peak'] / 2**30:.1f} GiB"
    return f"{row['label']} {row['step_s']['median'] * 1e3:,.0f} ms{gib}"


def written(text: str, new: str) -> str:
    """Return a page with the table in its place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{NOTES.name} has no place between {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def draw(entries: list[Found], path: pathlib.Path) -> None:
    """Draw memory against time for each model, with a line for each transfer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [entry for entry in entries if "rows" in entry]
    figure = Figure(figsize=(5 * len(shown), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, entry in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name, points in _lines(entry).items():
            place.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        place.set(title=entry["label"], xlabel="ms per step", ylabel="peak memory, GiB", xlim=(0, None), ylim=(0, None))
        place.legend()
    figure.savefig(path, dpi=150)


def _lines(entry: Found) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in entry["rows"]:
        if row["step_s"] is not None:
            peak = row["device_peak"] if row["device_peak"] is not None else row["host_peak"]
            name = f"k' = {row['options'].get('transfer', 'all')}" if row["options"] else row["contender"]
            lines.setdefault(name, []).append((row["step_s"]["median"] * 1e3, peak / 2**30))
    return lines


def main() -> int:
    found = results()
    NOTES.write_text(written(NOTES.read_text(), table(found)))
    if found["curve"]:
        draw(found["curve"][-1]["results"], PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
