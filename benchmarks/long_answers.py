"""Simulate how many tokens a second a streamed language model generates, with its cache on the device and on the host.

    python benchmarks/long_answers.py [--prompt 512] [--answer 512]

The tables are those of docs/inference.md ("Caches"). Nothing is measured: machines are the profiles of core/machine.py,
the order of work is the runtime's with a window of two, and each cell has the best batch that fits. Published figures
are printed as they were published, beside a simulation of the same model, device and workload.

1. One pass over the weights reads the prompts of a whole batch; each further pass gives every row a token. Weights and
   cache are in half precision. A pass of the mean length stands for all of an answer.
2. With the cache on the host a layer's keys and values come up before its visit and go down after it, whole
   (examples/common/host_cache.py): three layers are on the device, and the copy that appending makes of one.
3. Beside weights and cache, the device holds four tensors of hidden size and those of one layer's MLP, over all tokens
   of a pass, or the logits of one token per row in two types (tests/project/test_host_cache.py compares the peak).
4. Not modelled: reads of the device's own memory, launches, padding, and a device on which all weights would fit.
   A cache layer comes up when the layer before has been computed, where the runtime begins a little earlier.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from sp_lightning.core.machine import GEN4, GIB, MACHINES, SUSTAINED_DEVICE, SUSTAINED_FLOPS, Machine
from sp_lightning.core.schedule import Schedule
from sp_lightning.core.simulation import SimulatedVisit, Simulation, simulate
from sp_lightning.core.unit_numbers import UnitNumbers

WINDOW = 2
HALF = 2  # bytes of a number in half precision
LOGIT = HALF + 4  # bytes of a logit in two types
SHARE = 0.9  # of a memory that a run may fill


@dataclass(frozen=True)
class Decoder:
    """A decoder's sizes; `queries` and `keys` are features of all heads together."""

    name: str
    hidden: int
    layers: int
    queries: int
    keys: int
    intermediate: int
    vocabulary: int
    matrices: int = 3  # of an MLP: 2 without a gate
    tied: bool = False  # whether embedding and head are one matrix

    @property
    def block(self) -> int:
        """Parameters of a layer's matrices."""
        attention = 2 * self.hidden * self.queries + 2 * self.hidden * self.keys
        return attention + self.matrices * self.hidden * self.intermediate

    @property
    def cache_nbytes(self) -> int:
        """Bytes of a layer's cache for one token."""
        return 2 * HALF * self.keys

    @cached_property
    def units(self) -> list[UnitNumbers]:
        """The units of a pass; a tied head is the embedding, which then stays on the device."""
        table = self.vocabulary * self.hidden
        numbers = [table, *[self.block] * self.layers, 0 if self.tied else table]
        names = ["embedding", *(f"block {index}" for index in range(self.layers)), "head"]
        ends = ("embedding", "head") if self.tied else ()
        return [
            UnitNumbers(name, HALF * count, 0, count, 0.0, 0.0, resident=name in ends)
            for name, count in zip(names, numbers, strict=True)
        ]

    def visits(self, rows: int, new: int, length: int, on_host: bool, reads: bool) -> Iterator[SimulatedVisit]:
        """Yield the visits of a pass that appends `new` tokens to each row, which then has `length`.

        ``reads``: the cache is not empty before.
        """
        tokens, layer = rows * new, rows * length * self.cache_nbytes
        there = (4 if on_host else self.layers + 1) * layer
        mlp = HALF * tokens * (4 * self.hidden + self.matrices * self.intermediate)
        block = SimulatedVisit(
            unit=0,
            flops=2 * tokens * self.block + 4 * tokens * length * self.queries,
            stowed_nbytes=layer * on_host,
            fetched_nbytes=layer * on_host * reads,
            nbytes=there + mlp,
            moved_nbytes=HALF * self.block + layer,
        )
        hidden = HALF * tokens * self.hidden
        yield SimulatedVisit(0, 0.0, nbytes=there + hidden)
        for index in range(1, self.layers + 1):
            yield replace(block, unit=index)
        head = 2 * rows * self.vocabulary * self.hidden
        logits = LOGIT * rows * self.vocabulary
        matrix = HALF * self.vocabulary * self.hidden
        yield SimulatedVisit(self.layers + 1, head, nbytes=there + hidden + logits, moved_nbytes=matrix + logits)


LLAMAS = (  # from their published config.json files
    Decoder("Llama 3 8B", 4096, 32, 4096, 1024, 14336, 128256),
    Decoder("Llama 3 70B", 8192, 80, 8192, 1024, 28672, 128256),
)
OPT = Decoder("OPT-30B", 7168, 48, 7168, 7168, 28672, 50272, matrices=2, tied=True)
# NVIDIA T4 datasheet: 65 TFLOP/s in half precision, 16 GB of 320 GB/s, 16 lanes of half GEN4's rate. FlexGen's host
# had 208 GB.
T4 = replace(
    Machine("t4", 65e12 * SUSTAINED_FLOPS, GEN4 / 2, GEN4 / 2, 0.85, 1e11, 16 * GIB, int(208e9)),
    device_bytes_per_s=320e9 * SUSTAINED_DEVICE,
)
# Generated tokens per second on one T4, 512 tokens in and 32 out, with each system's best batch:
# github.com/FMInference/FlexiGen, benchmark/batch_size_table.md.
PUBLISHED = (("Hugging Face Accelerate", 8, 0.62), ("DeepSpeed ZeRO-Inference", 4, 0.60), ("FlexGen", 144, 7.32))
COMPRESSED = ("FlexGen, 4-bit compression", 512, 8.38)
# github.com/huggingface/accelerate, benchmarks/big_model_inference/README.md; 14.1 GB of weights were on the host.
ACCELERATE = "OPT-30B in float16, one row, partly on the host, two Titan RTX: 2.37 s per token"


@dataclass(frozen=True)
class Answers:
    """A simulated batch of answers."""

    rows: int
    tokens_per_s: float


def answers(model: Decoder, machine: Machine, rows: int, prompt: int, answer: int, on_host: bool) -> Answers | None:
    """Simulate a batch; return None if it does not fit."""
    last = prompt + answer
    reading = one_pass(model, machine, model.visits(rows, prompt, prompt, on_host, False))
    longest = one_pass(model, machine, model.visits(rows, 1, last, on_host, True))
    mean = one_pass(model, machine, model.visits(rows, 1, prompt + answer // 2, on_host, True))
    waiting = rows * last * model.layers * model.cache_nbytes if on_host else 0
    if max(reading.peak_nbytes, longest.peak_nbytes) > SHARE * machine.device_nbytes:
        return None
    if sum(unit.up_nbytes for unit in model.units) + waiting > SHARE * machine.host_nbytes:
        return None
    return Answers(rows, rows * answer / (reading.step_s + (answer - 1) * mean.step_s))


def one_pass(model: Decoder, machine: Machine, visits: Iterator[SimulatedVisit]) -> Simulation:
    """Simulate one pass over the weights among others like it."""
    schedule = Schedule([unit.up_nbytes for unit in model.units], WINDOW)
    return simulate(model.units, schedule, machine, works=list(visits))


def largest_and_best(
    model: Decoder, machine: Machine, prompt: int, answer: int, on_host: bool
) -> tuple[int, Answers | None]:
    """Return the most rows that fit, and the batch with the most tokens per second."""

    def fits(rows: int) -> bool:
        return answers(model, machine, rows, prompt, answer, on_host) is not None

    few, many = 0, 1
    while fits(many):
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    tried = {max(1, few * eighth // 8) for eighth in range(1, 9)} if few else set()
    found = [answers(model, machine, rows, prompt, answer, on_host) for rows in tried]
    return few, max((one for one in found if one), key=lambda one: one.tokens_per_s, default=None)


def cell(most: int, best: Answers | None) -> str:
    """Return a cell: the most rows, the tokens per second, and the rows with which it gives them."""
    if best is None:
        return "no room"
    at = "" if best.rows == most else f" with {best.rows}"
    return f"{most:,}: {number(best.tokens_per_s)}/s{at}"


def number(value: float) -> str:
    """Return a number with two or three digits that count."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def main() -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=512, help="tokens of each answer")
    options = parser.parse_args()
    print(f"Most rows, and tokens per second, of {options.prompt} tokens in and {options.answer} out:\n")
    columns = [f"{model.name}, cache on the {place}" for model in LLAMAS for place in ("device", "host")]
    print("| | " + " | ".join(columns) + " |\n" + "| --- " * (len(columns) + 1) + "|")
    for machine in MACHINES.values():
        cells = (
            cell(*largest_and_best(model, machine, options.prompt, options.answer, on_host))
            for model in LLAMAS
            for on_host in (False, True)
        )
        print(f"| {machine.name} | " + " | ".join(cells) + " |")
    print("\nOPT-30B on one T4 with 208 GB on the host, 512 tokens in and 32 out:\n")
    print("| system | rows | tokens per second |\n| --- | --- | --- |")
    for name, rows, speed in (*PUBLISHED, COMPRESSED):
        print(f"| {name}, as published | {rows} | {speed} |")
    for place, on_host in (("device", False), ("host", True)):
        most, best = largest_and_best(OPT, T4, 512, 32, on_host)
        found = f"{best.rows} | {best.tokens_per_s:.2f}" if best else "no room | "
        print(f"| streamed, cache on the {place}, simulated (room for {most} rows) | {found} |")
    print(f"\nAccelerate's own figure, as published: {ACCELERATE}.")


if __name__ == "__main__":
    main()
