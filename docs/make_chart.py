"""Draw the README's chart from the result file of one run, and nothing else.

python docs/make_chart.py
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "peers-nvidia-h200.json"
CHART = pathlib.Path(__file__).parent / "chart.svg"
SHOWN = {
    "superpipeline window=4": "sp-lightning, window=4",
    "deepspeed": "DeepSpeed ZeRO-3 offload",
    "fsdp2": "FSDP2 CPU offload",
}
WIDTH, ROW, LEFT, BAR = 760, 34, 190, 200  # pixels; BAR is the longest bar of each panel
OURS, OTHERS = "#3f51b5", "#9e9e9e"


class Bar(NamedTuple):
    """One contender's step."""

    name: str
    seconds: float
    device_gib: float


def result() -> dict[str, Any]:
    """Return the training result of the file."""
    results = json.loads(RESULT.read_text())["results"]
    (found,) = [each for each in results if not each["setting"]["inference"]]
    return found


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return the bars of the chart, in its order."""
    rows = {row["label"]: row for row in found["rows"]}
    return [
        Bar(name, rows[label]["step_s"]["median"], rows[label]["device_peak"] / 2**30) for label, name in SHOWN.items()
    ]


def conditions(found: dict[str, Any]) -> list[str]:
    """Return the lines below the chart: what was measured, on what, with which versions."""
    setting, versions = found["setting"], found["versions"]
    clipping = "no clipping" if setting["clip"] is None else f"clipped at {setting['clip']}"
    tokens = f"{found['model']['tokens_per_step']:,} tokens a step"
    work = f"{setting['model']}, {tokens}, {setting['precision']}, {setting['optimizer']}, {clipping}, "
    return [
        work + f"activations: {setting['activations']}",
        f"one {found['device']}, {found['cores']} cores, torch {versions['torch']}, deepspeed {versions['deepspeed']}; "
        f"{setting['repetitions']} x {setting['steps']} steps",
        f"commit {found['commit'][:7]}{' with local changes' * found['commit'].endswith('+')}, {found['date'][:10]}, "
        f"benchmarks/results/{RESULT.name}",
    ]


def chart(found: dict[str, Any]) -> str:
    """Return the chart as SVG: seconds on the left, memory on the right."""
    drawn, below = bars(found), conditions(found)
    right = LEFT + BAR + 90
    height = 40 + ROW * len(drawn) + 18 * len(below) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">seconds a step</text>',
        f'<text x="{right}" y="24" font-weight="bold">GiB of device memory</text>',
    ]
    for place, bar in enumerate(drawn):
        top, color = 36 + ROW * place, OTHERS if place else OURS
        lines.append(f'<text x="{LEFT - 10}" y="{top + 17}" text-anchor="end">{escape(bar.name)}</text>')
        panels = (
            (LEFT, bar.seconds, max(each.seconds for each in drawn), f"{bar.seconds:.2f} s"),
            (
                right,
                bar.device_gib,
                max(each.device_gib for each in drawn),
                f"{bar.device_gib:.1f} GiB",
            ),
        )
        for x, value, longest, text in panels:
            length = round(BAR * value / longest)
            lines.append(f'<rect x="{x}" y="{top}" width="{length}" height="24" fill="{color}"/>')
            lines.append(f'<text x="{x + length + 6}" y="{top + 17}">{text}</text>')
    for place, line in enumerate(below):
        top = 40 + ROW * len(drawn) + 18 * (place + 1)
        lines.append(f'<text x="10" y="{top}" font-size="12" fill="#555">{escape(line)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the chart."""
    CHART.write_text(chart(result()))


if __name__ == "__main__":
    main()
