"""Write the tables of what fits where, from the planner alone: a long one, and the README's.

    python docs/make_fits.py

A cell is the largest of `MODELS` whose plan fits, with its speed and the hours for 10 M tokens. Nothing is measured.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sp_lightning.host.machine import headroom
from sp_lightning.options import Options
from sp_lightning.plan import Job
from sp_lightning.plan.machines import GIB, MACHINES
from sp_lightning.plan.model import batch_of, kind_of, made, made_with_adapters
from sp_lightning.plan.planner import Planner

README = pathlib.Path(__file__).parents[1] / "README.md"
PAGE = pathlib.Path(__file__).parent / "what-fits.md"
BEGIN, END = "<!-- what fits -->", "<!-- end of what fits -->"
CARDS = ("rtx4060", "rtx3060", "rtx4060ti-16gb", "rtx4090")
MEMORIES = (32, 64, 128)  # GB, as they are sold
SHOWN = GIB * 31 // 32  # bytes of a GB that is sold, which Linux shows
IN_SHORT = (
    *(("rtx4060", 32), ("rtx4060", 64)),
    *(("rtx3060", 32), ("rtx3060", 64)),
    *(("rtx4060ti-16gb", 64), ("rtx4090", 64)),
)
TOKENS = 2048  # of a step
RUN = 10_000_000  # tokens
ROOMY = 4096 * GIB  # of a host that never binds


MODELS = {  # the smallest first
    "Llama 1B": "llama-1b",
    "Llama 3B": "llama-3b",
    "Llama 8B": "llama-8b",
    "Qwen3 14B": "qwen3-14b",
    "Qwen3 32B": "qwen3-32b",
    "Llama 70B": "llama-70b",
}
WAYS = ("FP32 AdamW", "bf16-true AdamW", "adapters, bf16")
SHORT = ("FP32 AdamW", "adapters, bf16")
PRECISION = {"FP32 AdamW": "bf16-mixed"}  # of the others: bf16-true
RANK = 16  # of the adapters, beside all linear layers


@dataclass(frozen=True)
class Needs:
    """What training a model in one way takes on one card."""

    device_nbytes: int
    host_nbytes: int
    step_s: float


def needs(model: str, way: str) -> dict[str, Needs]:
    """Return what a model takes in one of these ways on each card; its traces serve all cards."""
    kind = kind_of(MODELS[model])
    batch = batch_of(*kind, 1, TOKENS)
    planner = Planner(
        functools.partial(made_with_adapters, *kind, RANK)
        if way == "adapters, bf16"
        else functools.partial(made, *kind),
        batch,
        loss=None,
        name=model,
        optimizer=None,
    )
    found = {}
    for card in CARDS:
        job = Job(
            options=Options.parse(activations="recompute"),
            precision=PRECISION.get(way, "bf16-true"),
            machine=replace(MACHINES[card], host_nbytes=ROOMY),
            clip=True,
        )
        plan = planner.size(job)
        found[card] = Needs(plan.device_nbytes, plan.host_nbytes, plan.step_s)
    return found


def tables() -> tuple[str, str]:
    """Make the long table, with a row for each card and host memory, and the short one."""
    found = {way: {model: needs(model, way) for model in MODELS} for way in WAYS}
    rows = [(card, memory) for card in CARDS for memory in MEMORIES]
    return _table(found, WAYS, rows), _table(found, SHORT, IN_SHORT)


def _table(found: dict[str, Any], ways: Sequence[str], rows: Sequence[tuple[str, int]]) -> str:
    lines = [f"| card | RAM | {' | '.join(ways)} |", f"| --- | --- |{' --- |' * len(ways)}"]
    for card, memory in rows:
        free = memory * SHOWN - headroom(memory * SHOWN)
        cells = []
        for way in ways:
            here = {model: on[card] for model, on in found[way].items()}
            cells.append(_cell(here, card, free))
        lines.append(f"| {MACHINES[card].device_nbytes // GIB} GB (`{card}`) | {memory} GB | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(of_models: dict[str, Needs], card: str, free: int) -> str:
    """Describe the largest model that fits, or a dash."""
    for model, one in reversed(of_models.items()):
        if one.device_nbytes <= MACHINES[card].device_nbytes and one.host_nbytes <= free:
            speed = TOKENS / one.step_s
            return f"{model}, {float(f'{speed:.2g}'):.0f} tokens/s, {RUN / speed / 3600:.2g} h"
    return "-"


def written(text: str, new: str) -> str:
    """Return the page with the table in its place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the page has no place between {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def main() -> None:
    """Write the tables into their pages."""
    for page, table in zip((PAGE, README), tables(), strict=True):
        page.write_text(written(page.read_text(), table))


if __name__ == "__main__":
    main()
