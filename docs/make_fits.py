"""Write the README's table of what fits where, from the planner alone.

    python docs/make_fits.py

Each cell is the largest of `MODELS` whose plan fits, with its speed and the hours for 10 M tokens. Nothing is measured.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sp_lightning.core.machine import GIB, PROFILES, headroom
from sp_lightning.planning import plan
from sp_lightning.planning.workloads import WORKLOADS, Workload, decoder

README = pathlib.Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- what fits -->", "<!-- end of what fits -->"
CARDS = ("rtx4060", "rtx4070", "rtx4060ti-16gb", "rtx4090")
MEMORIES = (32, 64, 128)  # GiB
TOKENS = 2048  # of a step
RUN = 10_000_000  # tokens
ROOMY, TIGHT = 4096 * GIB, GIB  # hosts: one that never binds, one that always does
ADAPTERS = "adapters on a frozen bf16 base"


def _tied(workload: Workload) -> Workload:
    """Return the workload with a head that has the embedding's weights."""
    *parts, head = workload.parts
    return replace(workload, parts=(*parts, replace(head, parameters=0, resident=True)))


def _llama(name: str, hidden: int, layers: int, keys: int) -> Workload:
    sizes = {"hidden": hidden, "layers": layers, "queries": hidden, "keys": keys, "intermediate": 8192}
    return _tied(decoder(name, **sizes, vocabulary=128256))


# The smallest first: Llama 3.2's two, whose published config.json files are those of shapes.py, and listed ones.
MODELS = {
    "Llama 1B": _llama("llama-1b", 2048, 16, 512),
    "Llama 3B": _llama("llama-3b", 3072, 28, 1024),
    "Llama 8B": WORKLOADS["llama3-8b"],
    "Qwen3 14B": WORKLOADS["qwen3-14b"],
    "Qwen3 32B": WORKLOADS["qwen3-32b"],
    "Llama 70B": WORKLOADS["llama3-70b"],
}
WAYS = ("FP32 AdamW", "bf16-true AdamW", "adapters, bf16")


@dataclass(frozen=True)
class Needs:
    """What training a model in one way takes on one card."""

    device_nbytes: int
    host_nbytes: int
    step_s: float


def needs(card: str, model: str) -> Iterator[Needs]:
    """Yield what each of `WAYS` takes."""
    given = {"machine": card, "activations": "recompute"}
    for precision, host in (("bf16-mixed", ROOMY), ("bf16-true", TIGHT)):
        found = plan(MODELS[model], TOKENS, precision=precision, host_memory=host, **given)
        yield Needs(found.device_nbytes, found.host.total, found.step_s)
    (change,) = [change for change in found.host_changes if change.what == ADAPTERS]
    yield Needs(change.nbytes, change.host_nbytes or 0, change.step_s)


def table() -> str:
    """Make the table: a row for each card and host memory."""
    lines = [f"| card | RAM | {' | '.join(WAYS)} |", f"| --- | --- |{' --- |' * len(WAYS)}"]
    for card in CARDS:
        found = {model: list(needs(card, model)) for model in MODELS}
        gigabytes = PROFILES[card].device_nbytes // GIB
        for memory in MEMORIES:
            free = memory * GIB - headroom(memory * GIB)
            cells = [_cell({model: ways[number] for model, ways in found.items()}, card, free) for number in range(3)]
            lines.append(f"| {gigabytes} GB (`{card}`) | {memory} GiB | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(of_models: dict[str, Needs], card: str, free: int) -> str:
    """Describe the largest model that fits, or a dash."""
    for model, one in reversed(of_models.items()):
        if one.device_nbytes <= PROFILES[card].device_nbytes and one.host_nbytes <= free:
            speed = TOKENS / one.step_s
            return f"{model}, {float(f'{speed:.2g}'):.0f} tokens/s, {RUN / speed / 3600:.2g} h"
    return "-"


def written(text: str, new: str) -> str:
    """Return the page with the table in its place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{README.name} has no place between {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def main() -> None:
    """Write the table into the README."""
    README.write_text(written(README.read_text(), table()))


if __name__ == "__main__":
    main()
