"""Write the table of results on real devices into ../NOTES.md, and the README's chart, from the result files alone.

    python benchmarks/gpu/publish.py

A campaign without a result file is "not measured". Runs on a CPU, on a simulated device or of tiny models do not count.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import campaign
from measured import OURS

NOTES = campaign.ROOT / "benchmarks" / "NOTES.md"
CHARTS = campaign.ROOT / "docs" / "make_charts.py"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
NOT_REAL = ("cpu", "simgpu", "null-cuda")
CLAIMS = {
    "first": "compiled steps and norms have the device's bits; host memory is page-locked, fast, and given back",
    "exact": "no bit differs from plain Lightning on the same device",
    "step": "clipped, with a quarter of plain's state, 0.85 of its speed at 16K tokens and 0.95 at 32K; 3 x DeepSpeed's"
    " and 5 x FSDP2's at 8K",
    "trainer": "Hugging Face's Trainer with its defaults: at most 1.5 x stock's time",
    "lora": "adapters of an 8B model in 12 GiB: 0.9 of the speed of all memory",
    "infer": "all that fits has plain's speed from the second call on; in 4 GiB only what exceeds them travels",
    "paper": "60 % less device memory at less than 1.2 x plain's time, for a window and a transfer",
    "big": "the largest model that the host holds, in 24 and in 16 GiB of device memory, at 0.85 of its floor",
}
EARLIER = ("fits", "peers", "pinned")  # campaigns of earlier versions, whose results stay
Found = dict[str, Any]


def results(folder: pathlib.Path = campaign.RESULTS) -> dict[str, list[Found]]:
    """Read the results on real devices, by campaign."""
    found: dict[str, list[Found]] = {name: [] for name in (*CLAIMS, *EARLIER)}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result["facts"]["device"] not in NOT_REAL and not result["small"]:
            found[result["campaign"]].append({**result, "file": path.name})
    return found


def table(found: dict[str, list[Found]]) -> str:
    """Make a table with a row for every bar that was measured, and for every campaign that was not run."""
    lines = ["| campaign | claim | measured |", "| --- | --- | --- |"]
    for name, files in found.items():
        link = f"[`{name}.py`](gpu/{name}.py)" if name in CLAIMS else f"`{name}`"
        if not files:
            lines += [f"| {link} | {CLAIMS[name]} | not measured |"] if name in CLAIMS else []
        for result in files:
            facts = result["facts"]
            file = f"[{facts['device']}, {facts['commit'][:7]}](results/{result['file']})"
            lines += [f"| {link}, {file} | {bar} | {measured} |" for bar, measured in _rows(result)]
    return "\n".join(lines)


def _rows(result: Found) -> Iterator[tuple[str, str]]:
    entries = result["results"]
    if result["campaign"] == "exact":
        for part in dict.fromkeys(entry["part"] for entry in entries):
            own = [entry for entry in entries if entry["part"] == part]
            yield f"{CLAIMS['exact']}: {part}", f"{len(own)} compared, {sum(bool(e['difference']) for e in own)} differ"
        return
    if result["campaign"] == "pinned":
        found = "; ".join(f"{entry['check'].replace('_', ' ')}: {entry['found']}" for entry in entries)
        yield "host memory is page-locked, exact to the page, fast, and given back", found
        return
    for entry in entries:
        if "error" in entry:
            yield entry["label"], entry["error"]
            continue
        ours = [row for row in entry["rows"] if row["contender"] == OURS and row["step_s"] is not None]
        for bar in entry["bars"] if ours or not entry["rows"] else ():
            missed = " (missed)" if bar["reached"] is False else ""
            yield f"{entry['label']}: {bar['bar']}", f"{bar['measured']}{missed}"
        if entry["rows"]:
            yield entry["label"], "; ".join(_row(row) for row in entry["rows"])


def _row(row: Found) -> str:
    if row["step_s"] is None:
        return f"{row['label']}: {row['error'] or 'did not end in time'}"
    gib = "" if row["device_peak"] is None else f", {row['device_peak'] / 2**30:.1f} GiB"
    host = f", host {row['host_peak'] / 2**30:.1f} GiB" if row.get("host_peak") else ""
    return f"{row['label']} {row['step_s']['median'] * 1e3:,.0f} ms{gib}{host}"


def written(text: str, new: str) -> str:
    """Return a page with the table in its place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{NOTES.name} has no place between {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def main() -> int:
    NOTES.write_text(written(NOTES.read_text(), table(results())))
    return subprocess.run([sys.executable, str(CHARTS)]).returncode


if __name__ == "__main__":
    sys.exit(main())
