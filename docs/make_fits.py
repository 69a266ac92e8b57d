"""Write the tables of what fits where, from the planner alone: a long one, and the README's.

    python docs/make_fits.py

A cell is the largest of `MODELS` whose plan fits, with its speed and the hours for 10 M tokens. Nothing is measured.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sp_lightning.core.host import headroom
from sp_lightning.plan import listed, plan
from sp_lightning.plan.machines import GIB, MACHINES

README = pathlib.Path(__file__).parents[1] / "README.md"
PAGE = pathlib.Path(__file__).parent / "what-fits.md"
BEGIN, END = "<!-- what fits -->", "<!-- end of what fits -->"
CARDS = ("rtx4060", "rtx4070", "rtx4060ti-16gb", "rtx4090")
MEMORIES = (32, 64, 128)  # GiB
IN_SHORT = (
    *(("rtx4060", 32), ("rtx4060", 64)),
    *(("rtx4070", 32), ("rtx4070", 64)),
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
ASKED = ("Llama 8B", "Qwen3 14B", "Qwen3 32B", "Llama 70B")
WAYS = ("FP32 AdamW", "bf16-true AdamW")
SHORT = ("FP32 AdamW", "bf16-true AdamW", "answers, bf16")
PROMPTS, PROMPT, ANSWER = 32, 512, 256  # of the answers: how many at once, and their tokens


@dataclass(frozen=True)
class Needs:
    """What training a model in one way takes on one card."""

    device_nbytes: int
    host_nbytes: int
    step_s: float


def needs(card: str, model: str) -> Iterator[Needs]:
    """Yield what each of `WAYS` takes."""
    given = {"machine": card, "activations": "recompute"}
    for precision in ("bf16-mixed", "bf16-true"):
        found = plan(MODELS[model], 1, precision=precision, host_memory=ROOMY, **given)
        yield Needs(found.device_nbytes, found.host.total, found.step_s)


def answers(card: str, model: str) -> Needs:
    """Return what answers take on one card."""
    make = listed.maker(listed.LISTED[MODELS[model]])
    found = plan(make, _prompts(PROMPTS), **_asking(card))
    return Needs(found.device_nbytes, found.host.total, found.reading_s + ANSWER * found.step_s)


def _prompts(rows: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(rows, PROMPT, dtype=torch.long)}


def _asking(card: str) -> dict[str, object]:
    return {"machine": card, "precision": "bf16-true", "answer": ANSWER, "host_memory": ROOMY}


def tables() -> tuple[str, str]:
    """Make the long table, with a row for each card and host memory, and the short one."""
    long, short = (
        [f"| card | RAM | {' | '.join(ways)} |", f"| --- | --- |{' --- |' * len(ways)}"] for ways in (WAYS, SHORT)
    )
    for card in CARDS:
        found = {model: list(needs(card, model)) for model in MODELS}
        asked = {model: answers(card, model) for model in ASKED} if card in dict(IN_SHORT) else {}
        gigabytes = MACHINES[card].device_nbytes // GIB
        for memory in MEMORIES:
            free = memory * GIB - headroom(memory * GIB)
            cells = [_cell({model: ways[number] for model, ways in found.items()}, card, free) for number in range(2)]
            long.append(f"| {gigabytes} GB (`{card}`) | {memory} GiB | {' | '.join(cells)} |")
            if (card, memory) in IN_SHORT:
                of = [*cells, _cell(asked, card, free, PROMPTS * ANSWER, hours=False)]
                short.append(f"| {gigabytes} GB (`{card}`) | {memory} GiB | {' | '.join(of)} |")
    return "\n".join(long), "\n".join(short)


def _cell(of_models: dict[str, Needs], card: str, free: int, tokens: int = TOKENS, hours: bool = True) -> str:
    """Describe the largest model that fits, or a dash."""
    for model, one in reversed(of_models.items()):
        if one.device_nbytes <= MACHINES[card].device_nbytes and one.host_nbytes <= free:
            speed = tokens / one.step_s
            return f"{model}, {float(f'{speed:.2g}'):.0f} tokens/s" + f", {RUN / speed / 3600:.2g} h" * hours
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
