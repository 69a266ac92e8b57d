"""Draw the README's charts: measured steps from one result file, and planned ones of several windows.

    python docs/make_charts.py [--plan]

With --plan the windows are planned anew, in a minute or so, into tradeoff.json; without it that file is drawn.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
PEERS = "step-*.json", "peers-*.json"  # files with peers, the newest kind first
NOT_REAL = ("cpu", "simgpu", "null-cuda")  # devices
TOKENS = 8192  # of their step
CHART = DOCS / "chart.svg"
SHOWN = {
    "superpipeline window=auto resident=auto": "sp-lightning",
    "superpipeline window=4": "sp-lightning, window=4",
    "deepspeed": "DeepSpeed ZeRO-3 offload",
    "fsdp2": "FSDP2 CPU offload",
}
PLANNED = DOCS / "tradeoff.json"
TRADEOFF = DOCS / "tradeoff.svg"
SIZES = ((1, 1), (2, 1), (4, 1), (4, 4), (8, 1), (16, 1))  # window and transfer
CHOSEN = (2, 1)  # the smallest window that is as fast as any
RUN = {"model": "llama-3b", "batch": 4, "seq": 512, "activations": "recompute", "machine": "rtx3060"}
WIDTH, ROW, LEFT, BAR = 760, 34, 190, 200  # pixels; BAR is the longest bar of each panel
OURS, OTHERS = "#3f51b5", "#9e9e9e"


class Bar(NamedTuple):
    """One step."""

    name: str
    seconds: float
    device_gib: float
    color: str = OTHERS


# ---- measured


def result() -> dict[str, Any]:
    """Return the newest comparison with peers, and what its file says of all."""
    files = [path for pattern in PEERS for path in sorted(RESULTS.glob(pattern))]
    return next(found for path in files for found in _with_peers(path))


def _with_peers(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    file = json.loads(path.read_text())
    for found in file["results"]:
        has_peers = any(row["contender"] == "deepspeed" and row["step_s"] for row in found.get("rows", ()))
        if has_peers and f" {TOKENS} tokens" in found["label"] and file["facts"]["device"] not in NOT_REAL:
            yield {**file["facts"], "file": path.name, **found}


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return the bars of the measured chart, in its order."""
    rows = {row["label"]: row for row in found["rows"] if row["step_s"]}
    shown = [label for label in SHOWN if label in rows]
    return [
        Bar(
            SHOWN[label], rows[label]["step_s"]["median"], rows[label]["device_peak"] / 2**30, OTHERS if place else OURS
        )
        for place, label in enumerate(shown)
    ]


def conditions(found: dict[str, Any]) -> list[str]:
    """Return the lines below the chart: what was measured, on what, with which versions."""
    setting, versions = found["setting"], found["versions"]
    clipping = "no clipping" if setting["clip"] is None else f"clipped at {setting['clip']}"
    tokens = f"{setting['batch'] * setting['seq']:,} tokens a step"
    work = f"{setting['model']}, {tokens}, {setting['precision']}, adamw, {clipping}, "
    return [
        work + f"activations: {setting['activations']}",
        f"one {found['device']}, {found['cores']} cores, torch {versions['torch']}, deepspeed {versions['deepspeed']}; "
        f"{setting['repetitions']} x {setting['steps']} steps",
        f"commit {found['commit'][:7]}{' with local changes' * found['commit'].endswith('+')}, {found['date'][:10]}, "
        f"benchmarks/results/{found['file']}",
    ]


def chart(found: dict[str, Any]) -> str:
    """Return the chart of what was measured as SVG."""
    return drawn(bars(found), conditions(found))


# ---- planned


def planned(sizes: Sequence[tuple[int, int]] = SIZES) -> list[dict[str, Any]]:
    """Plan the run with each window and transfer."""
    import torch

    import sp_lightning

    tokens = torch.ones(RUN["batch"], RUN["seq"], dtype=torch.long)
    options = {"precision": "bf16-mixed", "machine": RUN["machine"], "activations": RUN["activations"]}
    rows = []
    for window, transfer in sizes:
        batch = {"input_ids": tokens, "labels": tokens}
        found = sp_lightning.plan(RUN["model"], batch, window=window, transfer=transfer, **options)
        sizes_of_row = {"window": window, "transfer": transfer}
        rows.append({**sizes_of_row, "step_s": round(found.step_s, 3), "device_nbytes": found.device_nbytes})
    return rows


def tradeoff(found: dict[str, Any]) -> str:
    """Return the chart of what was planned as SVG."""
    rows = [
        Bar(
            f"window={row['window']}, transfer={row['transfer']}",
            row["step_s"],
            row["device_nbytes"] / 2**30,
            OURS if (row["window"], row["transfer"]) == CHOSEN else OTHERS,
        )
        for row in found["rows"]
    ]
    run = " ".join(f"--{name} {value}" for name, value in found["run"].items())
    below = [
        f"planned, not measured, by the planner of commit {found['commit']}, with --window and --transfer as above:",
        f"python -m sp_lightning plan {run}",
    ]
    return drawn(rows, below)


# ---- both


def drawn(rows: Sequence[Bar], below: Sequence[str]) -> str:
    """Return bars as SVG: seconds on the left, memory on the right, and lines of text below."""
    right = LEFT + BAR + 90
    height = 40 + ROW * len(rows) + 18 * len(below) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">seconds a step</text>',
        f'<text x="{right}" y="24" font-weight="bold">GiB of device memory</text>',
    ]
    for place, bar in enumerate(rows):
        top = 36 + ROW * place
        lines.append(f'<text x="{LEFT - 10}" y="{top + 17}" text-anchor="end">{escape(bar.name)}</text>')
        panels = (
            (LEFT, bar.seconds, max(each.seconds for each in rows), f"{bar.seconds:.2f} s"),
            (right, bar.device_gib, max(each.device_gib for each in rows), f"{bar.device_gib:.1f} GiB"),
        )
        for x, value, longest, text in panels:
            length = round(BAR * value / longest)
            lines.append(f'<rect x="{x}" y="{top}" width="{length}" height="24" fill="{bar.color}"/>')
            lines.append(f'<text x="{x + length + 6}" y="{top + 17}">{text}</text>')
    for place, line in enumerate(below):
        top = 40 + ROW * len(rows) + 18 * (place + 1)
        lines.append(f'<text x="10" y="{top}" font-size="12" fill="#555">{escape(line)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the charts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plan", action="store_true", help="plan the windows anew")
    if parser.parse_args().plan:
        log = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "sp_lightning/plan"]
        commit = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
        PLANNED.write_text(json.dumps({"run": RUN, "commit": commit, "rows": planned()}, indent=2) + "\n")
    CHART.write_text(chart(result()))
    TRADEOFF.write_text(tradeoff(json.loads(PLANNED.read_text())))


if __name__ == "__main__":
    main()
